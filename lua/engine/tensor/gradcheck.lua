-- Finite-difference checks of gradients, in f64: engine.gradcheck(f, inputs) compares the gradients
-- of backward() with central differences of the scalar sum(f(inputs) * w) for fixed random weights
-- w. Called by scripts.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local autograd = require "engine.tensor.autograd"
local tensor = require "engine.tensor.tensor"

local C, check, expect, raise_if = M_ffi.C, M_ffi.check, M_ffi.expect, M_ffi.raise_if
local M = {}

local function weighted_sum(f, inputs, weights)
  local results = { f(unpack(inputs)) }
  local total
  expect(tensor.is_tensor(results[1]), results[1], "gradcheck: expected f to return a tensor")
  for k, y in ipairs(results) do
    weights[k] = weights[k] or tensor.rand(y.shape, { dtype = "f64" }) + 0.5
    local part = (y:to("f64") * weights[k]):sum()
    total = total and total + part or part
  end
  return total
end

local OPTIONS = { eps = 1e-6, tolerance = 1e-6, samples = 64 }

--- Checks the gradients of f with respect to every f64 input, whose gradients from earlier backward
--- passes it drops. Returns the largest deviation, relative to 1 + |gradient|. Raises an error that
--- names the element if a deviation exceeds the tolerance. Options:
---   eps         the step of the finite differences; by default 1e-6
---   tolerance   the largest relative deviation allowed; by default 1e-6
---   samples     an input with twice as many elements or more is checked only at evenly spaced
---               elements, at least `samples` and fewer than twice as many; by default 64
function M.check(f, inputs, options)
  arguments.want_function(f, "gradcheck", "engine.gradcheck(f, { x })")
  local o = arguments.merged(OPTIONS, arguments.read_named(options, "gradcheck", OPTIONS))
  for name in pairs(OPTIONS) do
    expect(type(o[name]) == "number" and o[name] > 0, o[name],
      "gradcheck: expected %s to be a number above 0", name)
  end
  arguments.want_list(inputs, "gradcheck", "the inputs", "{ x, weight }")
  local weights, worst, checked = {}, 0, 0
  for k, x in ipairs(inputs) do
    expect(tensor.is_tensor(x), x, "gradcheck: expected input %d to be a tensor", k)
    if x.dtype == "f64" then
      checked = checked + 1
      x:requires_grad(true)
      check(C.eng_clear_gradient(x))
    end
  end
  raise_if(checked == 0,
    "gradcheck: expected at least one input in f64, got none; hint: x:to('f64'):keep()")
  autograd.backward(weighted_sum(f, inputs, weights))
  for k, x in ipairs(inputs) do
    if x.dtype == "f64" then
      local gradient = x.grad
      local analytic = gradient and gradient:view(-1):totable() or {}
      local values, shape = x:view(-1):totable(), x.shape
      local stride = math.max(1, math.floor(#values / o.samples))
      for i = 1, #values, stride do
        local function at(value)
          local before = values[i]
          values[i] = value
          x:copy(tensor.tensor(values, "f64"):view(shape))
          local result = autograd.no_grad(weighted_sum, f, inputs, weights):item()
          values[i] = before
          return result
        end
        local numeric = (at(values[i] + o.eps) - at(values[i] - o.eps)) / (2 * o.eps)
        x:copy(tensor.tensor(values, "f64"):view(shape))
        local got = analytic[i] or 0
        local difference = math.abs(got - numeric) / (1 + math.abs(numeric))
        if not (difference <= o.tolerance) then
          error(("gradcheck: the gradients of element %d of input %d (%s) differ: backward " ..
            "gives %.10g, finite differences give %.10g"):format(i, k, tensor.shape_text(shape),
            got, numeric), 2)
        end
        worst = math.max(worst, difference)
      end
    end
  end
  return worst
end

return M
