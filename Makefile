# Every way in. `make help` says what there is.

PREFIX  ?= /usr/local
BUILD   ?= build
CFLAGS  ?= -g -O2
VENV    ?= $(HOME)/.cache/engine/venv
JOBS    ?= $(shell nproc 2>/dev/null || echo 2)
VERSION := 0.1.0
ifeq ($(origin CC),default)
CC := gcc
endif

# ./engine for the ordinary build; other builds keep theirs to themselves.
ENGINE := $(if $(filter build,$(BUILD)),engine,$(BUILD)/engine)
LIB    := $(BUILD)/libengine.so

# Never -ffast-math or its like: it deletes overflow checks.
WARNINGS := -Wall -Wextra $(if $(WERROR),-Werror)
STRICT   := -std=gnu17 -ffp-contract=off -fno-math-errno -fopenmp -fvisibility=hidden -fPIC
LUAJIT_CFLAGS := $(shell pkg-config --cflags luajit 2>/dev/null || echo -I/usr/include/luajit-2.1)
LUAJIT_LIBS   := $(shell pkg-config --libs luajit 2>/dev/null || echo -lluajit-5.1)
COMPILE  := $(CC) $(STRICT) $(CFLAGS) $(WARNINGS) $(CPPFLAGS) -Icore $(LUAJIT_CFLAGS) -MMD -MP
LINK     := $(CC) $(CFLAGS) -fopenmp -Wl,--as-needed $(LDFLAGS)
LIBS     := -ldnnl -lsqlite3 $(LUAJIT_LIBS) -lpthread -lm -ldl

# A kernel file that includes simd.h is compiled once per instruction set and chosen from at run time.
ISA_plain  :=
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
ISAS       := plain $(if $(filter x86_64 amd64,$(shell uname -m)),avx2 avx512)

BINARY_SOURCES := $(wildcard core/main.c core/line.c)
CORE_SOURCES   := $(filter-out $(BINARY_SOURCES),$(wildcard core/*.c))
ISA_SOURCES    := $(shell grep -l '^ *\# *include "simd\.h"' core/cpu/*.c 2>/dev/null)
CPU_SOURCES    := $(filter-out $(ISA_SOURCES),$(wildcard core/cpu/*.c))

OBJECTS := $(CORE_SOURCES:%.c=$(BUILD)/%.o) $(CPU_SOURCES:%.c=$(BUILD)/%.o) \
           $(foreach isa,$(ISAS),$(ISA_SOURCES:%.c=$(BUILD)/%.$(isa).o))
BINARY_OBJECTS := $(BINARY_SOURCES:%.c=$(BUILD)/%.o)

.PHONY: all help deps demo test check bench parity install dist clean lint sanitize fuzz FORCE
.DELETE_ON_ERROR:
.SUFFIXES:

ifeq ($(filter -j%,$(MAKEFLAGS)),)
MAKEFLAGS += -j$(JOBS)
endif

all: $(ENGINE) $(BUILD)/cdef.h

# ------------------------------------------------------------------ building

# Rewritten only when they differ, so that other flags or a new set of files rebuild what they must.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(COMPILE) | $(LINK) | $(LIBS) | $(ISAS)' | cmp -s - $@ || echo '$(COMPILE) | $(LINK) | $(LIBS) | $(ISAS)' > $@
$(BUILD)/objects: FORCE
	@mkdir -p $(@D)
	@echo '$(OBJECTS)' | cmp -s - $@ || echo '$(OBJECTS)' > $@

$(BUILD)/core/%.o: core/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(COMPILE) -c $< -o $@

$(BUILD)/core/cpu/%.o: core/cpu/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(COMPILE) -O3 -c $< -o $@

define isa_rule
$(BUILD)/core/cpu/%.$(1).o: core/cpu/%.c $(BUILD)/flags
	@mkdir -p $$(@D)
	$$(COMPILE) -O3 $$(ISA_$(1)) -DENG_ISA_$(1) -c $$< -o $$@
endef
$(foreach isa,$(ISAS),$(eval $(call isa_rule,$(isa))))

$(LIB): $(OBJECTS) $(BUILD)/objects
	$(LINK) -shared -Wl,-soname,libengine.so -o $@ $(OBJECTS) $(LIBS)

$(ENGINE): $(BINARY_OBJECTS) $(LIB)
	$(LINK) -rdynamic -o $@ $(BINARY_OBJECTS) -L$(BUILD) -lengine $(LUAJIT_LIBS) -ledit -lm -ldl \
	  '-Wl,-rpath,$$ORIGIN:$$ORIGIN/build:$$ORIGIN/../lib/engine:$$ORIGIN/../lib'

# The FFI declarations: the public header without preprocessor and comments.
$(BUILD)/cdef.h: core/engine.h core/errors.def core/dtypes.def core/ops.def $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) -E -P -DENG_CDEF core/engine.h > $@

-include $(shell find $(BUILD)/core -name '*.d' 2>/dev/null)

clean:
	rm -rf build engine
