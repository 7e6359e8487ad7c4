# All commands of the project; `make help` lists them.

PREFIX  ?= /usr/local
BUILD   ?= build
CFLAGS  ?= -g -O2
KERNEL_CFLAGS ?= -O3
VENV    ?= $(HOME)/.cache/engine/venv
JOBS    ?= $(shell nproc 2>/dev/null || echo 2)
VERSION := $(shell sed -n 's/.*ENG_VERSION "\(.*\)"/\1/p' core/engine.h)
ifeq ($(origin CC),default)
CC := gcc
endif

# ./engine for the ordinary build; other builds keep their binary in their own folder.
ENGINE := $(if $(filter build,$(BUILD)),engine,$(BUILD)/engine)
LIB    := $(BUILD)/libengine.so

# Never -ffast-math or its like: it deletes overflow checks.
WARNINGS := -Wall -Wextra $(if $(WERROR),-Werror)
STRICT   := -std=gnu17 -ffp-contract=off -fno-math-errno -fopenmp -fvisibility=hidden -fPIC
LUAJIT_CFLAGS := $(shell pkg-config --cflags luajit 2>/dev/null || echo -I/usr/include/luajit-2.1)
LUAJIT_LIBS   := $(shell pkg-config --libs luajit 2>/dev/null || echo -lluajit-5.1)
COMPILE  := $(CC) $(STRICT) $(CFLAGS) $(WARNINGS) $(CPPFLAGS) -Icore $(LUAJIT_CFLAGS) -MMD -MP
LINK     := $(CC) $(CFLAGS) -fopenmp -Wl,--as-needed $(LDFLAGS)
LIBS     := -ldnnl -lsqlite3 -lutf8proc $(LUAJIT_LIBS) -lpthread -lm -ldl

# A kernel file that includes simd.h is compiled once per instruction set. The CPU device chooses at
# run time.
ISA_plain  :=
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
ISAS       := plain $(if $(filter x86_64 amd64,$(shell uname -m)),avx2 avx512)

BINARY_SOURCES := $(wildcard core/main/*.c)
MPI_SOURCES    := core/dist/comm_mpi.c
CORE_SOURCES   := $(filter-out $(BINARY_SOURCES) $(MPI_SOURCES) core/cpu/%,$(wildcard core/*/*.c))
ISA_SOURCES    := $(shell grep -l '^ *\# *include "simd\.h"' core/cpu/*.c 2>/dev/null)
CPU_SOURCES    := $(filter-out $(ISA_SOURCES),$(wildcard core/cpu/*.c))

OBJECTS := $(CORE_SOURCES:%.c=$(BUILD)/%.o) $(CPU_SOURCES:%.c=$(BUILD)/%.o) \
           $(foreach isa,$(ISAS),$(ISA_SOURCES:%.c=$(BUILD)/%.$(isa).o))
BINARY_OBJECTS := $(BINARY_SOURCES:%.c=$(BUILD)/%.o)
PUBLIC_HEADERS := $(wildcard core/engine*.h core/*.def)

# The CUDA device is a plug-in, built where there is a CUDA compiler. CUDA_ARCHS: the compute
# capabilities to compile for; by default this machine's card, or Hopper without a card.
# CUDA_ARCHS='80 89 90' builds for all cards that have their own kernels. Hopper's kernels need 90a,
# so 90 means 90a.
NVCC       ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
THIS_CARD  := $(firstword $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader \
                2>/dev/null | tr -d .))
CUDA_ARCHS ?= $(or $(THIS_CARD),90)
CUDA_HOME  ?= $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
PLUGIN     := $(if $(NVCC),$(BUILD)/libengine_cuda.so)
CUDA_KERNELS := $(wildcard cuda/*/*.cu)
CUDA_HOST    := $(wildcard cuda/*.c cuda/*/*.c)
CUDA_OBJECTS := $(CUDA_KERNELS:%=$(BUILD)/%.o) $(CUDA_HOST:%=$(BUILD)/%.o)
NVCC_COMPILE := $(NVCC) -std=c++17 -O3 -lineinfo --fmad=false \
                $(foreach a,$(CUDA_ARCHS:90=90a),-gencode arch=compute_$(a),code=sm_$(a)) \
                -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra \
                $(if $(WERROR),-Werror all-warnings) -Icore -Icuda -MMD -MP -Xptxas -v

# The output of ptxas -v goes into a file beside the object, for `make spills`; nvcc's other
# messages are shown.
PTXAS_SAYS := '^ptxas info|^ +[0-9]+ bytes stack frame|^$$'

# The MPI transport, a plug-in, where there is an MPI compiler.
MPICC      ?= $(shell command -v mpicc)
MPI_PLUGIN := $(if $(MPICC),$(BUILD)/libengine_mpi.so)

.PHONY: all cuda spills help docs deps built demo test test-gpu test-emulated distros check lint \
        sanitize sanitize-emulated fuzz fuzzers bench parity leaderboard install uninstall deb \
        dist clean FORCE
.DELETE_ON_ERROR:
.SUFFIXES:

# Builds with JOBS parallel jobs by default. A -j on the command line overrides JOBS, and a make
# started by this one shares its jobs.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(JOBS)
endif

all: $(ENGINE) $(BUILD)/cdef.h cuda $(MPI_PLUGIN) $(BUILD)/engine.d.lua ## build ./engine

# ------------------------------------------------------------------ building
# Prints one line per file; `make V=1` shows the commands.
say = $(if $(V),,@echo '  $(1)  $(2)';)
# Libraries and binaries are renamed into place, so that running processes keep the old files.

# Files with flags and object names, rewritten only when they differ. A change rebuilds the targets
# that depend on them.
remember = @mkdir -p $(@D); echo '$(1)' | cmp -s - $@ || echo '$(1)' > $@
$(BUILD)/flags: FORCE
	$(call remember,$(COMPILE) | $(KERNEL_CFLAGS) | $(LINK) | $(LIBS) | $(ISAS))
$(BUILD)/objects: FORCE
	$(call remember,$(OBJECTS))

$(BUILD)/core/%.o: core/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,CC,$<) $(COMPILE) -c $< -o $@

$(BUILD)/core/cpu/%.o: core/cpu/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,CC,$<) $(COMPILE) $(KERNEL_CFLAGS) -c $< -o $@

define isa_rule
$(BUILD)/core/cpu/%.$(1).o: core/cpu/%.c $(BUILD)/flags
	@mkdir -p $$(@D)
	$$(call say,CC,$$< ($(1))) $$(COMPILE) $$(KERNEL_CFLAGS) $$(ISA_$(1)) -DENG_ISA_$(1) -c $$< \
	  -o $$@
endef
$(foreach isa,$(ISAS),$(eval $(call isa_rule,$(isa))))

$(LIB): $(OBJECTS) $(BUILD)/objects
	$(call say,LD,$@) $(LINK) -shared -Wl,-soname,libengine.so '-Wl,-rpath,$$ORIGIN/../lib' \
	  -o $@.new $(OBJECTS) $(LIBS)
	@mv $@.new $@

$(ENGINE): $(BINARY_OBJECTS) $(LIB)
	$(call say,LD,$@) $(LINK) -rdynamic -o $@.new $(BINARY_OBJECTS) -L$(BUILD) -lengine \
	  $(LUAJIT_LIBS) -ledit -lm -ldl -Wl,--disable-new-dtags \
	  '-Wl,-rpath,$$ORIGIN:$$ORIGIN/build:$$ORIGIN/../lib/engine' \
	  '-Wl,-rpath,$$ORIGIN/../lib/lua/5.1/engine:$$ORIGIN/../lib:$$ORIGIN/lib'
	@mv $@.new $@

cuda: $(PLUGIN)

$(BUILD)/libengine_mpi.so: $(MPI_SOURCES) core/dist/comm.h $(PUBLIC_HEADERS) $(BUILD)/flags
	$(call say,MPICC,$@) OMPI_CC='$(CC)' $(MPICC) $(STRICT) $(CFLAGS) $(WARNINGS) $(CPPFLAGS) \
	  -Icore -shared -o $@.new $(MPI_SOURCES)
	@mv $@.new $@

# A fake card and a fake NCCL, for spec/device/fake_card_spec.lua and spec/dist/nccl_spec.lua.
FAKE_CARD := $(BUILD)/fake_card.so
FAKE_NCCL := $(BUILD)/fake_nccl.so
$(FAKE_CARD): spec/cuda/fake_card.c spec/cuda/fake.h cuda/runtime/host.c cuda/runtime/runtime.h \
              core/device/backend.h core/dist/comm.h $(filter $(BUILD)/core/cpu/%,$(OBJECTS)) \
              $(BUILD)/core/base/dtype.o $(BUILD)/core/dist/comm_pack.o
	$(call say,LD,$@) $(COMPILE) -MF $@.d -shared -o $@.new $(filter-out %.h,$^) $(LDFLAGS) $(LIBS)
	@mv $@.new $@
$(FAKE_NCCL): spec/cuda/fake_nccl.c spec/cuda/fake.h core/dist/comm_nccl.h
	$(call say,LD,$@) $(COMPILE) -MF $@.d -shared -o $@.new $< $(LDFLAGS)
	@mv $@.new $@

# The CUDA device on the host: its kernels rewritten for a C++ compiler, and the emulator's versions
# of the CUDA run-time library and cuBLASLt. Needs CUDA's headers.
EMULATOR      := spec/cuda/emulator
EMULATED_CARD := $(if $(NVCC),$(BUILD)/emulated_card.so)
EMULATED_TWINS := $(patsubst $(EMULATOR)/%,cuda/%,$(wildcard $(EMULATOR)/kernel/*.h))
EMULATED_HEADERS := $(filter-out $(EMULATED_TWINS),$(wildcard cuda/*/*.h))
EMULATED      := $(EMULATED_HEADERS:cuda/%=$(BUILD)/emulated/%)
EMULATED_HOST := $(filter-out %/nccl_check.c,$(CUDA_HOST))
EMULATOR_CPP  := $(wildcard $(EMULATOR)/*.cpp)
EMULATED_OBJECTS := $(CUDA_KERNELS:cuda/%.cu=$(BUILD)/emulated/%.o) \
                 $(EMULATED_HOST:cuda/%.c=$(BUILD)/emulated/%.c.o) \
                 $(EMULATOR_CPP:$(EMULATOR)/%.cpp=$(BUILD)/emulated/%.emulator.o) \
                 $(BUILD)/emulated/library.c.o $(BUILD)/emulated/cublaslt.c.o
EMULATED_INCLUDE := -I$(BUILD)/emulated -I$(EMULATOR) -Icore -isystem $(CUDA_HOME)/include
EMULATED_CXX  := $(or $(CXX),g++) -std=c++17 -g -O1 -march=native \
                 $(filter -fsanitize% -fno-sanitize%,$(CFLAGS)) -ffp-contract=off \
                 -fno-strict-aliasing -fPIC -fvisibility=hidden -MMD -MP
# Dependency files of an older build may name a header that no longer exists.
$(BUILD)/emulated/%.h: cuda/%.h $(EMULATOR)/to_host.lua
	@mkdir -p $(@D)
	@[ ! -e $< ] || luajit $(EMULATOR)/to_host.lua $< $@
$(BUILD)/emulated/%.cpp: cuda/%.cu $(EMULATOR)/to_host.lua
	@mkdir -p $(@D)
	@luajit $(EMULATOR)/to_host.lua $< $@
$(BUILD)/emulated.flags: FORCE
	$(call remember,$(EMULATED_CXX) | $(COMPILE) | $(EMULATED_OBJECTS))
.SECONDARY: $(EMULATED) $(CUDA_KERNELS:cuda/%.cu=$(BUILD)/emulated/%.cpp)
# Without warnings: nvcc already reports the warnings of kernels.
$(BUILD)/emulated/%.o: $(BUILD)/emulated/%.cpp $(EMULATED) $(BUILD)/emulated.flags
	$(call say,CXX,$@) $(EMULATED_CXX) -w $(EMULATED_INCLUDE) -c $< -o $@
$(BUILD)/emulated/%.emulator.o: $(EMULATOR)/%.cpp $(EMULATED) $(BUILD)/emulated.flags
	$(call say,CXX,$<) $(EMULATED_CXX) $(WARNINGS) $(EMULATED_INCLUDE) -c $< -o $@
define emulated_rule
$(BUILD)/emulated/%.c.o: $(1)/%.c $(BUILD)/emulated.flags
	@mkdir -p $$(@D)
	$$(call say,CC,$$< (emulated)) $$(COMPILE) -Icuda -I$$(CUDA_HOME)/include -c $$< -o $$@
endef
$(foreach folder,cuda spec/cuda $(EMULATOR),$(eval $(call emulated_rule,$(folder))))
$(BUILD)/emulated_card.so: $(EMULATED_OBJECTS) $(BUILD)/core/base/dtype.o $(BUILD)/emulated.flags
	$(call say,LD,$@) $(or $(CXX),g++) $(filter -fsanitize%,$(CFLAGS)) -shared -Wl,--no-undefined \
	  -o $@.new $(filter %.o,$^) $(LDFLAGS) -fopenmp -lm
	@mv $@.new $@

$(BUILD)/cuda.flags: FORCE
	$(call remember,$(NVCC_COMPILE) | $(CUDA_OBJECTS))

$(BUILD)/cuda/%.cu.o: cuda/%.cu $(BUILD)/cuda.flags
	@mkdir -p $(@D)
	$(call say,NVCC,$<) $(NVCC_COMPILE) -c $< -o $@ 2> $@.ptxas; code=$$?; \
	  grep -vE $(PTXAS_SAYS) $@.ptxas >&2; exit $$code

# Lists kernels that spill registers; spec/cuda/spills.sh lists the kernels that may.
spills: $(CUDA_OBJECTS) ## list CUDA kernels that spill registers; fail for unexpected ones
	@sh spec/cuda/spills.sh $(addsuffix .ptxas,$(filter %.cu.o,$(CUDA_OBJECTS)))

$(BUILD)/cuda/%.c.o: cuda/%.c $(BUILD)/cuda.flags
	@mkdir -p $(@D)
	$(call say,CC,$<) $(COMPILE) -Icuda -I$(CUDA_HOME)/include -c $< -o $@

# The CUDA run-time library is linked statically; cuBLASLt is loaded from the toolkit or the system.
$(BUILD)/libengine_cuda.so: $(CUDA_OBJECTS) $(BUILD)/core/base/dtype.o
	$(call say,LD,$@) $(CC) $(CFLAGS) -shared -Wl,-soname,libengine_cuda.so -Wl,--no-undefined \
	  -o $@.new $^ -L$(CUDA_HOME)/lib64 -lcudart_static -lcublasLt -lstdc++ -lpthread -ldl -lrt -lm
	@mv $@.new $@

# The FFI declarations: the public header without preprocessor and comments.
$(BUILD)/cdef.h: $(PUBLIC_HEADERS) $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,CC,$@) $(CC) -E -P -DENG_CDEF core/engine.h > $@

-include $(shell find $(BUILD)/core $(BUILD)/cuda $(BUILD)/emulated -name '*.d' 2>/dev/null)

# ------------------------------------------------------------------ what must be installed

# Debian's package names. gnuplot is not in the list, because only engine plot --png needs it.
PACKAGES := gcc libc6-dev make pkg-config libluajit-5.1-dev luajit libdnnl-dev libsqlite3-dev \
            libutf8proc-dev libedit-dev lua-cjson lua-busted lua-check libopenmpi-dev openmpi-bin \
            cmark-gfm libpng-dev libturbojpeg0
TOOLS    := $(CC) luajit busted luacheck
HEADERS  := luajit.h dnnl.h sqlite3.h utf8proc.h histedit.h

# The only target that calls the package manager. `make demo` and `make test` begin with it.
deps: ## install the Debian packages that the build and the specs need
	@if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then \
	  missing=; \
	  for p in $(PACKAGES); do \
	    dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null | grep -q '^installed' || \
	      missing="$$missing $$p"; \
	  done; \
	  [ -z "$$missing" ] && exit 0; \
	  sudo=; \
	  if [ "$$(id -u)" != 0 ]; then \
	    command -v sudo >/dev/null || \
	      { echo "missing packages; as root: apt-get install$$missing"; exit 1; }; \
	    sudo=sudo; \
	  fi; \
	  apt="$$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300"; \
	  echo "make deps installs with apt-get:$$missing"; \
	  $$apt update; \
	  $$apt -y install --no-install-recommends $$missing </dev/null >/dev/null; \
	else \
	  missing=; \
	  for t in $(TOOLS); do command -v $$t >/dev/null || missing="$$missing $$t"; done; \
	  for h in $(HEADERS); do \
	    echo "#include <$$h>" | $(CC) $(CPPFLAGS) $(LUAJIT_CFLAGS) -E - >/dev/null 2>&1 || \
	      missing="$$missing $$h"; \
	  done; \
	  [ -z "$$missing" ] && exit 0; \
	  echo "missing:$$missing"; \
	  echo "install your system's equivalents of these Debian packages, then run make again:"; \
	  echo "  $(PACKAGES)"; \
	  exit 1; \
	fi

# A second make, so that pkg-config and the headers are looked up after deps has installed them.
built: deps
	@$(MAKE) --no-print-directory all

# ------------------------------------------------------------------ trying, testing, measuring

# About a minute on two cores of a laptop. The growth interval is short, so that the scale moves.
DEMO ?= examples/gpt.lua
DEMO_ARGS ?= steps=1000 policy=dynamic:growth_interval=100

demo: built ## install what is missing, build, train a small GPT for a minute
	./engine $(DEMO) $(DEMO_ARGS)
	@echo
	@echo "What to try next:"
	@echo "  ./engine $(DEMO) help              list its settings, to append as NAME=VALUE"
	@echo "  ./engine $(DEMO) precision=fp32    the same without loss scaling; or bf16"
	@echo "  ./engine $(DEMO) policy=deepspeed  another policy; policies/README.md: how to write one"
	@echo "  ./engine $(DEMO) data=FILE.txt     learn another text"
	@echo "  ./engine -i $(DEMO)                continue in the REPL with the script's variables"
	@echo "  ./engine doctor                             what this machine offers"
	@echo "  README.md                                   where to go next"

# `make test SPEC=spec/cli/cli_spec.lua` runs one file.
SPEC ?= spec
TEST_SECONDS ?= 900

test: built ## install, build, run every spec (6 minutes on two cores); SPEC=file runs one
	@$(MAKE) --no-print-directory $(FAKE_CARD) $(FAKE_NCCL)
	@sh spec/halves.sh $(TEST_SECONDS) ./engine $(SPEC) $(BUSTED_FLAGS)

test-gpu: ## the specs that need an NVIDIA card
	@./engine spec/cuda/run.lua

# The specs of test-gpu with the CUDA kernels compiled for the processor
# (spec/cuda/emulator/README.md). Needs nvcc and no card.
ON_EMULATED = ENGINE_CUDA_PLUGIN=$(EMULATED_CARD) ENGINE_TEST_STEPS=6 ENGINE_EMULATED_CARD=$(1) \
              timeout -k 10 1200 ./$(ENGINE) spec/cuda/run.lua $(2)
OTHER_CARD  = sm=80,order=backwards,run=early
test-emulated: built ## the same specs with the kernels on the CPU; needs nvcc, but no card
ifneq ($(EMULATED_CARD),)
	@$(MAKE) --no-print-directory $(EMULATED_CARD) $(FAKE_CARD) $(FAKE_NCCL)
	@$(call ON_EMULATED,sm=90)
	@$(call ON_EMULATED,$(OTHER_CARD),spec/cpu/kernels_spec.lua spec/params/gradstats_spec.lua \
	  spec/cpu/lagged_kernel_spec.lua)
	@$(call ON_EMULATED,sm=100,spec/cuda/blackwell_spec.lua)
	@ENGINE_TEST_PLUGIN=$(EMULATED_CARD) timeout -k 10 1200 ./$(ENGINE) spec/run.lua \
	  spec/dist/nccl_spec.lua
else
	@echo "no nvcc: skipped"
endif

# The two commands of the README in clean chroots of Debian's releases; needs root and debootstrap.
distros: ## demo and test in clean chroots of Debian 12, 13 and sid, as root
	@sh spec/distros.sh

check: built ## lint, warnings as errors, specs under sanitizers, fuzzers
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory BUILD=build/werror WERROR=1 all
	@$(MAKE) --no-print-directory sanitize
	@$(MAKE) --no-print-directory fuzz

COLUMNS_IN := find Makefile *.md core cuda spec lua $(wildcard docs examples policies) \
              -name Makefile -o -name '*.[ch]' -o -name '*.cu' -o -name '*.cpp' -o -name '*.def' \
              -o -name '*.sh' -o -name '*.md'
# Not checked: rows of Markdown's tables, and the first URL of a line of Markdown.
lint: ## luacheck and the line limit
	luacheck --quiet lua spec $(wildcard examples policies)
	@awk 'FILENAME ~ /\.md$$/ {if (/^\|/) next; sub(/https?:[^ )>]*/, "")} \
	  length($$0) > 100 {print FILENAME ":" FNR ": longer than 100 columns"; n = 1} END {exit n}' \
	  $$($(COLUMNS_IN))

SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
ASAN_BUILD := BUILD=build/asan CFLAGS='-g -O1 $(SANITIZE)' KERNEL_CFLAGS=-O1
# Leak detection is off: it reports memory that LuaJIT holds.
ASAN := ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1 \
        ENGINE_SANITIZED=1
sanitize:
	@$(MAKE) --no-print-directory $(ASAN_BUILD) all
	$(ASAN) sh spec/halves.sh 4500 build/asan/engine $(SPEC) $(BUSTED_FLAGS)

# The emulated CUDA device's kernels under sanitizers: finds accesses outside the kernels' memory,
# uninitialized reads and misaligned loads.
UNDER_ASAN = $(ASAN) ENGINE_CUDA_PLUGIN=build/asan/emulated_card.so ENGINE_TEST_STEPS=4 \
             ENGINE_EMULATED_CARD=$(1) timeout -k 10 3600
THIRD_CARD = sm=80,order=shuffled,run=early
sanitize-emulated: built ## test-emulated under sanitizers
ifneq ($(EMULATED_CARD),)
	@$(MAKE) --no-print-directory $(ASAN_BUILD) PLUGIN= all build/asan/emulated_card.so
	@$(call UNDER_ASAN,sm=90) build/asan/engine spec/cuda/run.lua
	@$(call UNDER_ASAN,$(THIRD_CARD)) build/asan/engine spec/cuda/run.lua
	@ENGINE_TEST_DEVICE=cuda $(call UNDER_ASAN,sm=90) build/asan/engine spec/fuzz/ops.lua 120
else
	@echo "no nvcc: skipped"
endif

# Each fuzzer is a C program with its own main, or a Lua script. C fuzzers link the core as an
# archive, so that they may replace functions of it; -u adds the objects that register themselves
# (the CPU device, FP8 layers).
FUZZERS  := $(patsubst spec/fuzz/%.c,$(BUILD)/fuzz/%,$(wildcard spec/fuzz/*.c))
FUZZ_LUA := $(wildcard spec/fuzz/*.lua)
$(BUILD)/libengine.a: $(OBJECTS) $(BUILD)/objects
	rm -f $@
	ar rcs $@ $(OBJECTS)
FUZZ_FLAGS_pattern := -fsanitize-coverage=trace-pc
$(BUILD)/fuzz/%: spec/fuzz/%.c $(BUILD)/libengine.a
	@mkdir -p $(@D)
	$(COMPILE) $(FUZZ_FLAGS_$*) -o $@ $< -Wl,-u,eng_cpu_isa,-u,eng_fp8_site_new \
	  $(BUILD)/libengine.a $(LDFLAGS) $(LIBS)

fuzzers: $(FUZZERS) all
	@for f in $(FUZZERS) $(foreach script,$(FUZZ_LUA),'$(ENGINE) $(script)'); do echo "$$f"; \
	  ASAN_OPTIONS=detect_leaks=0 timeout -k 10 300 $$f || exit 1; done

fuzz:
	@$(MAKE) --no-print-directory $(ASAN_BUILD) fuzzers

# A Python environment with PyTorch, for comparison, outside the tree.
$(VENV)/ready:
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet --retries 1 --timeout 15 torch \
	  --index-url https://download.pytorch.org/whl/cpu || $(VENV)/bin/pip install --quiet torch
	$(VENV)/bin/pip install --quiet transformers numpy ml_dtypes safetensors tensorboard
	touch $@

bench: built $(VENV)/ready ## speed compared with PyTorch's, as ratios
	@for f in $(sort $(wildcard spec/bench/*.sh)); do VENV=$(VENV) sh $$f || exit 1; done

parity: built $(VENV)/ready ## numbers compared with PyTorch's
	@for f in $(sort $(wildcard spec/parity/*.sh)); do VENV=$(VENV) sh $$f || exit 1; done

# Continues if it was interrupted.
leaderboard: built ## every policy on seven tasks with SEEDS=5 seeds, in docs/leaderboard.md
	@./$(ENGINE) spec/bench/leaderboard.lua seeds=$(or $(SEEDS),5)

# ------------------------------------------------------------------ documentation

# The reference and the guides as pages in build/docs, and the types for editors. Warnings (a broken
# link, an entry without documentation) fail the target.
docs: $(ENGINE) $(BUILD)/cdef.h $(BUILD)/engine.d.lua ## the reference and the guides as pages
	@./$(ENGINE) help --html $(BUILD)/docs
	@echo "$(BUILD)/docs/index.html"

$(BUILD)/engine.d.lua: $(ENGINE) $(BUILD)/cdef.h $(PUBLIC_HEADERS) \
                       $(shell find lua policies -name '*.lua')
	$(call say,DOC,$@) ASAN_OPTIONS=detect_leaks=0 ./$(ENGINE) help --types $@

# ------------------------------------------------------------------ installing

# Where things are installed. LUADIR is a folder on LuaJIT's path, so that plain luajit finds
# `require "engine"`.
LUADIR ?= $(PREFIX)/share/lua/5.1
LIBDIR ?= $(PREFIX)/lib
SHARE  := $(PREFIX)/share
DOC    := $(SHARE)/doc/engine

# Every installed file, one per line: mode|source|destination.
define installed_files
  printf '%s\n' '755|$(ENGINE)|$(PREFIX)/bin/engine' '644|$(BUILD)/cdef.h|$(LIBDIR)/engine/cdef.h' \
    '644|$(BUILD)/place.lua|$(LUADIR)/engine/base/place.lua' \
    '644|$(BUILD)/engine.pc|$(LIBDIR)/pkgconfig/engine.pc' \
    '644|docs/engine.1|$(SHARE)/man/man1/engine.1' \
    '644|LICENSE|$(DOC)/LICENSE' '644|README.md|$(DOC)/README.md' \
    '644|lua/engine/cli/complete.bash|$(SHARE)/bash-completion/completions/engine' \
    '644|lua/engine/cli/complete.zsh|$(SHARE)/zsh/site-functions/_engine'; \
  for f in $(LIB) $(PLUGIN) $(MPI_PLUGIN); do \
    [ ! -e $$f ] || echo "755|$$f|$(LIBDIR)/engine/$${f##*/}"; done; \
  for f in $(PUBLIC_HEADERS); do echo "644|$$f|$(PREFIX)/include/engine/$${f##*/}"; done; \
  find lua/engine -type f -name '*.lua' | sed 's:^lua/\(.*\):644|&|$(LUADIR)/\1:'; \
  find policies examples core docs -type f | sed 's:.*:644|&|$(SHARE)/engine/&:'; \
  echo '644|$(BUILD)/engine.d.lua|$(SHARE)/engine/types/engine.d.lua'; \
  [ ! -d $(BUILD)/docs ] || find $(BUILD)/docs -type f | sed 's:.*/\(.*\):644|&|$(DOC)/html/\1:'
endef
MANIFEST := $(LIBDIR)/engine/manifest

# The pages are installed if `make docs` has made them.
install: all ## install into PREFIX; DESTDIR is honoured
	@printf 'return { library = "%s", share = "%s" }\n' '$(LIBDIR)/engine' '$(SHARE)/engine' \
	  > $(BUILD)/place.lua
	@printf '%s\n' 'Name: engine' 'Description: Lua-scriptable training engine, the C core' \
	  'Version: $(VERSION)' 'Cflags: -I$${pcfiledir}/../../include/engine' \
	  'Libs: -L$${pcfiledir}/../engine -lengine -Wl,-rpath,$${pcfiledir}/../engine' \
	  > $(BUILD)/engine.pc
	@{ $(installed_files); } > $(BUILD)/files
	@while IFS='|' read -r mode from to; do \
	  install -d -m 755 "$(DESTDIR)$${to%/*}" && install -m $$mode "$$from" "$(DESTDIR)$$to" || \
	    exit 1; done < $(BUILD)/files
	@cut -d '|' -f 3 $(BUILD)/files | sort > $(BUILD)/manifest
	@install -m 644 $(BUILD)/manifest "$(DESTDIR)$(MANIFEST)"
	@echo "installed $$(wc -l < $(BUILD)/manifest) files under $(DESTDIR)$(PREFIX)"

# Removes the files in the manifest that install wrote, and the folders that this leaves empty.
uninstall: ## remove what install wrote
	@[ -f "$(DESTDIR)$(MANIFEST)" ] || \
	  { echo "make uninstall: nothing is installed in $(DESTDIR)$(PREFIX)" >&2; exit 1; }
	@{ cat "$(DESTDIR)$(MANIFEST)"; echo "$(MANIFEST)"; } > $(BUILD)/manifest
	@while read -r f; do rm -f "$(DESTDIR)$$f"; done < $(BUILD)/manifest
	@sed 's:/[^/]*$$::' $(BUILD)/manifest | sort -ru | while read -r d; do \
	  (cd "$(DESTDIR)/" && rmdir -p --ignore-fail-on-non-empty ".$$d" 2>/dev/null) || true; done

# A Debian package for this machine's release, in build/. It depends on the libraries that the
# binaries were linked with.
DEB := $(BUILD)/deb
deb: all ## make a Debian package
	@command -v dpkg-deb >/dev/null || \
	  { echo "make deb: dpkg-deb is missing; this target needs a Debian system" >&2; exit 1; }
	@rm -rf $(DEB) && mkdir -p $(DEB)/DEBIAN
	@$(MAKE) --no-print-directory install DESTDIR="$(CURDIR)/$(DEB)" PREFIX=/usr
	@names=$$(readelf -d $(ENGINE) $(LIB) | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | \
	  grep -v libengine | sort -u); \
	needs=$$(ldd $(ENGINE) $(LIB) | grep -wF "$$names" | awk '$$3 ~ /^\// {print $$3}' | sort -u | \
	  while read -r f; do \
	    dpkg -S "$$f" "$$(readlink -f "$$f")" 2>/dev/null || true; \
	  done | cut -d: -f1 | sort -u | paste -sd, | sed 's/,/, /g'); \
	printf '%s\n' 'Package: engine' 'Version: $(VERSION)' \
	  "Architecture: $$(dpkg --print-architecture)" "Depends: $$needs, lua-cjson" \
	  'Recommends: openmpi-bin, libturbojpeg0, libpng16-16t64 | libpng16-16' 'Suggests: gnuplot' \
	  'Maintainer: The engine authors <engine@localhost>' 'Section: science' 'Priority: optional' \
	  'Description: Lua-scriptable training engine for low-precision numerics' \
	  ' Trains models in fp32, bf16, fp16 and FP8 under loss-scaling policies written in Lua.' \
	  > $(DEB)/DEBIAN/control
	@dpkg-deb --root-owner-group --build $(DEB) \
	  $(BUILD)/engine_$(VERSION)_$$(dpkg --print-architecture).deb

# A packed folder that runs on another Linux machine of this processor family. The other machine
# must provide the C and C++ libraries and, to use a GPU, the driver and CUDA. The folder contains
# busted, so that the specs run there: ./engine spec/run.lua [FILE...].
DIST      := build/engine-$(VERSION)-$(shell uname -sm | tr 'A-Z ' 'a-z-')
LUA_SHARE := /usr/share/lua/5.1
LUA_LIB   := $(firstword $(wildcard /usr/lib/*/lua/5.1))
SYSTEM_LIBRARIES := ld-linux|libc\.so|libm\.so|libdl|libpthread|librt|libstdc|libgcc_s|linux-vdso
dist: all ## pack a folder that runs on another machine
	@rm -rf $(DIST) && mkdir -p $(DIST)/build $(DIST)/lib/lua
	@cp -r README.md LICENSE Makefile .busted core lua policies examples docs spec $(DIST)/
	@cp engine $(DIST)/ && cp $(LIB) $(BUILD)/cdef.h $(PLUGIN) $(DIST)/build/
	@strip --strip-unneeded $(DIST)/engine $(DIST)/build/*.so
	@ldd engine $(LIB) | awk '$$2 == "=>" {print $$3}' | sort -u | \
	  grep -vE '$(SYSTEM_LIBRARIES)|libengine' | xargs -I{} cp -L {} $(DIST)/lib/
	@cd $(LUA_SHARE) && cp -rL cjson busted say luassert cliargs cliargs.lua pl mediator.lua term \
	  system dkjson.lua $(CURDIR)/$(DIST)/lua/
	@cd $(LUA_LIB) && cp -rL cjson.so lfs.so term system $(CURDIR)/$(DIST)/lib/lua/
	@tar -czf $(DIST).tar.gz -C build $(notdir $(DIST))
	@du -h $(DIST).tar.gz

clean: ## remove what was built
	rm -rf build engine

# Lists the targets whose rules have a text after `##`.
help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "Variables: BUILD=dir CC=gcc CFLAGS='-g -O2' WERROR=1 JOBS=n PREFIX=dir VENV=dir"
	@echo "           PLUGIN= (without the CUDA device)"
