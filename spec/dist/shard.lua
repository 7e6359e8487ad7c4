-- Two ranks divide an optimizer's moments (eng_optimizer_shard) twice, as the second trainer of an
-- optimizer does. Then a reduction is refused, and another must still reduce the same gradients.
-- Started by ranks_zero_spec.lua.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local C, ffi, check = M_ffi.C, M_ffi.ffi, M_ffi.check

local N, world = 2 ^ 16, engine.ranks.world()
local first = engine.ranks.rank() * N / 2 + 1
local x = engine.arange(1, N, 1, { dtype = "f32", keep = true }):requires_grad(true)
local optimizer = engine.optim.adam({ x }, { lr = 0 })
;(x * x):sum():backward()
optimizer:step()
engine.end_step()
local function sums(of)
  local out = {}
  for name, moment in pairs(of:state_tensors()) do
    local own = moment.shape[1] == N and moment:slice(1, first, first + N / 2 - 1) or moment
    out[name] = { own:slice(1, 1, 1):item(), own:slice(1, -1):item(), own:sum():item() }
  end
  return out
end
local parallel = ffi.new("eng_parallel *[1]")
check(C.eng_parallel_new(parallel, optimizer.params, world,
  ffi.new("eng_parallel_options", { bucket = 2 ^ 20, zero = 1 })))
local before = sums(optimizer)
for _ = 1, 2 do optimizer.state:shard() end
local after = sums(optimizer)
for name, values in pairs(before) do
  for k, value in ipairs(values) do
    assert(after[name][k] == value, ("%s: %g, then %g"):format(name, value, after[name][k]))
  end
end

-- Kahan errors of bf16 masters that have become f32 since: dividing drops them
local z = engine.full({ N }, 1):keep():requires_grad(true)
local kahan = engine.optim.adam({ z }, { lr = 1e-3, precision = "bf16_kahan" })
;(z * z):sum():backward()
kahan:step()
engine.end_step()
check(C.eng_params_masters(kahan.params, ffi.new("int32_t[1]", M_ffi.dtype.f32)))
local third = ffi.new("eng_parallel *[1]")
check(C.eng_parallel_new(third, kahan.params, world,
  ffi.new("eng_parallel_options", { bucket = 2 ^ 20, zero = 1 })))
local whole = sums(kahan)
kahan.state:shard()
for name, values in pairs(sums(kahan)) do
  for k, value in ipairs(values) do assert(whole[name][k] == value, name) end
  whole[name] = nil
end
assert(not next(whole), next(whole))

-- a failed reduction with zero=2 or 3 leaves the set as it was: zero=0 still reduces it
local y = engine.arange(1, N, 1, { dtype = "f32", keep = true }):requires_grad(true)
local other = engine.optim.adam({ y }, { lr = 0 })
local function reduce(zero)
  return C.eng_parallel_new(parallel, other.params, world,
    ffi.new("eng_parallel_options", { bucket = 2 ^ 20, zero = zero }))
end
local good, message = pcall(check, reduce(3))
assert(not good and tostring(message):find("zero=3: expected the unit", 1, true), message)
check(reduce(0))
check(C.eng_parallel_begin(parallel[0], C.ENG_PASS_FIRST))
;(y * y):sum():backward()
check(C.eng_parallel_finish(parallel[0]))
assert(y.grad:slice(1, -1):item() == 2 * N, "a gradient")
engine.ranks.barrier()
