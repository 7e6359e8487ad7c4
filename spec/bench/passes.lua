-- The passes over all parameters compared with memory bandwidth, on one thread:
--   ./engine spec/bench/passes.lua [MiB of gradients] [rounds]
-- Gradient statistics are compared with wmemchr searching for a word that does not occur, which
-- only reads the same bytes; updates are compared with memmove, per byte read or written. Measured
-- alternately; the best of several rounds counts, because other load only adds time.
local M_ffi = require "engine.base.ffi"
local fused_state = require "engine.train.fused_state"
local ffi, C, check = M_ffi.ffi, M_ffi.C, M_ffi.check

ffi.cdef [[
int *wmemchr(const int *s, int c, size_t n);
void *memmove(void *to, const void *from, size_t n);
]]

local MIB, ROUNDS = tonumber(arg[1]) or 256, tonumber(arg[2]) or 7
local ABSENT = 0x7FC17FC1   -- a NaN in f32, two of them in f16 and bf16
local NEEDS = C.ENG_NEED_AMAX + C.ENG_NEED_NORM + C.ENG_NEED_ZEROS + C.ENG_NEED_UNDERFLOW

--- Best time of each function in a list, measured alternately.
local function best(list)
  local least = {}
  for _ = 1, ROUNDS do
    for i, f in ipairs(list) do
      local began = C.eng_clock()
      f()
      least[i] = math.min(least[i] or math.huge, C.eng_clock() - began)
    end
  end
  return least
end

--- A set of one parameter with n normally distributed gradients in a format, and their address.
local function parameter(format, n)
  local leaf, names, set = ffi.new("eng_tensor[1]"), ffi.new("const char *[1]", { "p" }),
    ffi.new("eng_params *[1]")
  check(C.eng_new(leaf, M_ffi.dtype.f32, 1, ffi.new("int64_t[1]", n), true))
  check(C.eng_requires_grad(leaf, true))
  check(C.eng_params_new(set, leaf, names, 1))
  local low = ffi.new("int32_t[1]", M_ffi.dtype[format])
  check(C.eng_params_precision(set[0], low, low))
  check(C.eng_backward(M_ffi.run("sum", { M_ffi.Tensor(leaf[0]) }, { 1, 0 }), 1, false))
  local gradient, info = ffi.new("eng_tensor[1]"), ffi.new("eng_tensor_info")
  check(C.eng_gradient(gradient, leaf))
  check(C.eng_normal(gradient, 0, 1e-3))
  check(C.eng_info(info, gradient))
  return set[0], info.data
end

local function with_parameter(format, n, f)
  check(C.eng_step_begin())
  local set, data = parameter(format, n)
  f(set, data)
  check(C.eng_step_end())
  C.eng_params_free(set)
end

local function statistics(format)
  local size = C.eng_dtype_size(M_ffi.dtype[format])
  local bytes = MIB * 2 ^ 20
  with_parameter(format, bytes / size, function(set, data)
    local record = ffi.new("eng_record")
    local function stats(needs)
      return function() check(C.eng_params_stats(record, nil, set, 1, needs)) end
    end
    local t = best { function() assert(ffi.C.wmemchr(data, ABSENT, bytes / 4) == nil) end,
      stats(NEEDS), stats(NEEDS + C.ENG_NEED_HIST) }
    print(("  %-5s read %5.1f GB/s   statistics %3.0f %%   with histogram %3.0f %%"):format(format,
      bytes / t[1] / 1e9,
      100 * t[1] / t[2], 100 * t[1] / t[3]))
  end)
end

local function update(row, format)
  local n = MIB * 2 ^ 20 / 8
  with_parameter(format, n, function(set)
    local state = ffi.new("eng_optimizer *[1]")
    check(C.eng_optimizer_new(state, set, row.kind, M_ffi.dtype.f32, nil))
    local hyper = ffi.new("eng_hyper", row.defaults)
    hyper.weight_decay, hyper.momentum = 0.1, 0.9
    local call = ffi.new("eng_update", { kind = row.kind, n_groups = 1, groups = hyper,
      gradient_factor = 1, t = 1 })
    -- gradient read, weight and moments read and written, low-precision weight written
    local touched = (format == "f32" and 4 or 2 + 2) + 8 + 8 * row.moments
    local from, to = ffi.new("char[?]", n * 4), ffi.new("char[?]", n * 4)
    ffi.fill(from, n * 4, 1)
    local sums = ffi.new("double[?]", C.ENG_NORMS)
    local function step(norms)
      return function()
        call.norms = norms
        check(C.eng_optimizer_step(state[0], call))
      end
    end
    local t = best { function() ffi.C.memmove(to, from, n * 4) end, step(nil), step(sums) }
    print(("  %-5s %-4s %5.2f ns an element, %3.0f %% of the speed of copying; norms %+.1f %%")
      :format(row.name, format, t[2] / n * 1e9, 100 * t[1] / 8 * touched / t[2],
      100 * (t[3] / t[2] - 1)))
    C.eng_optimizer_free(state[0])
  end)
end

local threads = C.eng_threads(0)
C.eng_threads(1)
print(("gradient statistics: %d MiB, one thread, %s; in percent of the speed of reading"):format(
  MIB, M_ffi.string(C.eng_cpu_isa(nil))))
for _, format in ipairs { "f32", "f16", "bf16" } do statistics(format) end
print "optimizer updates"
for _, format in ipairs { "f32", "f16" } do
  for _, row in ipairs(fused_state.kinds) do update(row, format) end
end
C.eng_threads(threads)
