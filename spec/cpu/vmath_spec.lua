-- The vector functions of core/cpu/vmath.h against libm in double, over f32 of all magnitudes, with
-- every instruction set of this machine. The header of that file states the bounds.
local engine = require "engine.base.ffi"
local values = require "spec.cpu.kernels.values"
local SETS = require("spec.cpu.kernels.compare").SETS
local ffi, C = engine.ffi, engine.C
local abs = math.abs

local N = 200000

--- f32 numbers of all exponents and signs, spread evenly over the bit patterns, and values near
--- zero, where the functions bend.
local function inputs()
  values.seed("vmath")
  local x = values.tensor_of("f32", { N })
  local bits = ffi.cast("uint32_t*", values.info_of(x).data)
  local number = ffi.cast("float*", bits)
  for i = 0, N - 1 do
    if i % 2 == 0 then bits[i] = math.floor((i + values.uniform()) * 2 ^ 32 / N)
    else number[i] = values.sign() * 20 * values.uniform() end
  end
  for i, special in ipairs { 0, -0.0, 1 / 0, -1 / 0, 0 / 0, 2 ^ -149, -2 ^ -149, 3.4e38, -3.4e38,
    88.7228, 88.7229, -103.9, -104 } do
    number[i] = special
  end
  return x
end

--- Runs an operation on the same numbers in f32 and in double; calls check(got, want, x) for each.
local function compare(name, x, ints, check)
  local wide = engine.run("cast", { x }, { engine.dtype.f64 })
  local function run(tensor, dtype)
    if name ~= "unary_grad" then return engine.run(name, { tensor }) end
    local one = values.tensor_of(dtype, { N })
    engine.check(C.eng_fill(one, 1))
    return engine.run(name, { tensor, one }, { ints, engine.dtype[dtype] })
  end
  local from, want = values.values_of(x), values.values_of(run(wide, "f64"))
  for _, set in ipairs(SETS) do
    if #SETS > 1 then C.eng_cpu_isa(set) end
    local got = values.values_of(run(x, "f32"))
    if #SETS > 1 then C.eng_cpu_isa(SETS[1]) end
    for i = 0, N - 1 do
      local g, w = got[i], want[i]
      local good
      if w ~= w then good = g ~= g
      elseif abs(w) >= 2 ^ 128 * (1 - 2 ^ -24) then
        good = abs(g) >= 2 ^ 128 * (1 - 2 ^ -23) and g * w > 0
      else good = check(g, w) end
      if not good then
        error(("%s: %s(%.9g): expected %.9g, got %.9g"):format(set, name, from[i], w, g), 2)
      end
    end
  end
end

local function within_ulp(bound, floor)
  return function(got, want)
    return abs(got - want) <= bound * values.ulp_of(want, values.FORMATS.f32) + (floor or 0)
  end
end

describe("vector functions (" .. table.concat(SETS, ", ") .. ")", function()
  before_each(function() engine.check(C.eng_step_begin()) end)
  after_each(function() engine.check(C.eng_step_end()) end)

  for name, bound in pairs { exp = 1.1, log = 0.9, tanh = 1.4, sigmoid = 2.5, softplus = 2.1,
    log_sigmoid = 2.1, sqrt = 0.5, rsqrt = 1.6, sin = 1, cos = 1 } do
    it(("%s is within %g ulp"):format(name, bound),
      function() compare(name, inputs(), nil, within_ulp(bound)) end)
  end
  -- These need a floor (an absolute difference that is allowed): the factor of x is subnormal below
  -- 1e-30, and the tanh form cancels even in double.
  for name, rule in pairs { gelu = { 8, 1e-36 }, silu = { 3.5, 1e-36 },
    gelu_tanh = { 130, 2e-15 } } do
    it(("%s is within %g ulp"):format(name, rule[1]),
      function() compare(name, inputs(), nil, within_ulp(rule[1], rule[2])) end)
  end

  for name, bound in pairs { tanh = 5, sigmoid = 5, softplus = 2.5 } do
    it(("the slope of %s is within %g ulp"):format(name, bound), function()
      compare("unary_grad", inputs(), engine.op[name], within_ulp(bound, 2 ^ -126))
    end)
  end
  for _, name in ipairs { "gelu", "gelu_tanh", "silu" } do
    it("the slope of " .. name .. " is within 3e-7", function()
      compare("unary_grad", inputs(), engine.op[name],
        function(got, want) return abs(got - want) <= 3e-7 end)
    end)
  end
end)
