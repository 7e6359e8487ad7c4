-- Compares gradients in fp16 and bf16 with gradients in f64. The same values, representable in the
-- low format, go through every call of calls.lua in the low format and in f64. A gradient must be
-- the f64 gradient rounded once, up to the error of sums in f32, and must not overflow where the
-- f64 gradient fits the format. TWICE lists the operations that round a second time, with the
-- reason and the allowed error.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local calls = require "spec.autograd.calls"
local devices = require "spec.devices"
local C, ffi = M_ffi.C, M_ffi.ffi

local FORMATS = { f16 = { digits = 11, least = -24, max = 65504, precision = "fp16" },
  bf16 = { digits = 8, least = -133, max = (2 - 2 ^ -7) * 2 ^ 127, precision = "bf16" } }

-- Errors allowed beyond one rounding, in units in the last place of the largest gradient of the
-- tensor. `plain`: only outside autocast, where the gradient rule reads a rounded output.
local TWICE = {
  mlp_gelu = { units = 4, why = "two linear layers: u, h and du are rounded between them" },
  fp8_linear = { units = 4, why = "with SwiGLU before it: its output and gradient are rounded" },
  attention = { units = 4, why = "reads its rounded output for sum(y dy)" },
  fp8_attention = { units = 4, why = "as attention" },
  add_layer_norm = { units = 2, why = "add, then the norm: the sum is rounded between them" },
  add_rms_norm = { units = 2, why = "add, then the norm: the sum is rounded between them" },
  softmax = { units = 4, plain = true, why = "reads its output" },
  log_softmax = { units = 4, plain = true, why = "reads its output" },
}

-- Elements vary by factors of 2^-span to 2^span. In bf16, a wider span would leave the range of
-- f32, in which kernels compute.
local SPANS, TWICE_SPANS = { f16 = { 0, 3, 6 }, bf16 = { 0, 3 } }, { 0, 2 }

-- Spacing of the format at x.
local function unit(format, x)
  local _, exponent = math.frexp(math.abs(x))
  return 2 ^ math.max(exponent - format.digits, format.least)
end

-- x times random powers of two from 2^-span to 2^span, rounded to the format, as f64.
local function spread(x, span, dtype)
  local factor = engine.tensor((function()
    local list = {}
    for i = 1, x.count do list[i] = 2 ^ math.random(-span, span) end
    return list
  end)(), "f64"):view(x.shape)
  return (x * factor):to(dtype):to("f64"):keep()
end

-- The gradients of sum(f(inputs) * weights), as lists.
local function gradients(f, inputs, weights, dtype, precision)
  local leaves = {}
  for i, x in ipairs(inputs) do leaves[i] = x:to(dtype):keep():requires_grad(true) end
  local outputs = { engine.autocast(precision, f, unpack(leaves)) }
  local loss
  for i, y in ipairs(outputs) do
    weights[i] = weights[i] or spread(engine.randn(y.shape, "f64"), weights.span, weights.dtype)
    local part = (y:to("f64") * weights[i]):sum()
    loss = loss and loss + part or part
  end
  loss:backward()
  local lists = {}
  for i, x in ipairs(leaves) do lists[i] = x.grad:to("f64"):view(-1):totable() end
  return lists
end

local function compare(name, f, inputs, dtype, precision, span)
  local format, rounded = FORMATS[dtype], {}
  for i, x in ipairs(inputs) do rounded[i] = spread(x, span, dtype) end
  local weights = { span = span * 2, dtype = dtype }
  local expected = gradients(f, rounded, weights, "f64", "fp32")
  local got = gradients(f, rounded, weights, dtype, precision)
  local twice = TWICE[name]
  if twice and twice.plain and precision ~= "fp32" then twice = nil end
  for k, list in ipairs(expected) do
    local largest = 0
    for _, t in ipairs(list) do
      if t == t then largest = math.max(largest, math.abs(t)) end
    end
    local slack = 2 ^ -18 * largest
      + (twice and twice.units * unit(format, math.min(largest, format.max)) or 0)
    for i, t in ipairs(list) do
      local g = got[k][i]
      local fits = math.abs(t) + slack < format.max
      if t == t and fits and not (math.abs(g - t) <= 0.51 * unit(format, t) + slack) then
        error(("%s, input %d, element %d, %s, %s: the gradient is %.9g, in f64 %.9g"):format(name,
          k, i, dtype, precision, g, t), 0)
      end
    end
  end
end

describe("in a low precision the gradient of", function()
  before_each(function()
    engine.seed(11)
    math.randomseed(11)
  end)
  after_each(function() engine.end_step() end)

  for op, name in ipairs(M_ffi.op_names) do
    if calls.has_gradient(op - 1) then
      it(name .. " equals the gradient in f64, rounded once", function()
        devices.everywhere(function()
          for _, dtype in ipairs { "f16", "bf16" } do
            for _, precision in ipairs { FORMATS[dtype].precision, "fp32" } do
              for _, span in ipairs(TWICE[name] and TWICE_SPANS or SPANS[dtype]) do
                calls.cases[name](function(f, inputs)
                  compare(name, f, inputs, dtype, precision, span)
                  engine.end_step()
                end)
              end
            end
          end
        end)
      end)
    end
  end

  it("x^-2 does not overflow fp16 where x^-3 does", function()
    local x = engine.tensor({ 0.016022 }, { dtype = "f16", requires_grad = true })
    engine.autocast("fp16", function() return ((x ^ -2) * 1e-4):sum() end):backward()
    assert.near(-48.6, x.grad:item(), 0.05)
  end)

  it("a layer with a relative scale is divided by that scale before it is rounded", function()
    local before = ffi.new("double[1]")
    for _, name in ipairs { "linear", "mul", "matmul" } do
      local x = engine.tensor({ { 1 } }, { dtype = "f16", requires_grad = true })
      M_ffi.check(C.eng_gradient_relative_scale(before, 64))
      local y = x[name](x, engine.tensor({ { 1024 } }, "f16"))
      M_ffi.check(C.eng_gradient_relative_scale(before, 1))
      y:sum():backward()
      assert.equal(1024, x.grad:item())
    end
  end)
end)
