-- Calls of operations from Lua. core/ops.def lists the operations. All calls share one struct,
-- M_ffi.call. elementwise.lua, views.lua and products.lua fill the tables `methods` and `functions`
-- below. tensor.lua takes the methods of tensors from `methods`, and copies `functions` into its
-- module.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"

local op, call, run_call, Tensor = M_ffi.op, M_ffi.call, M_ffi.run_call, M_ffi.Tensor
local inputs, want = call["in"], arguments.want
local NONE = Tensor(0, 0)

--- Functions by name: `methods` are the methods of tensors, `functions` all others.
local M = { methods = {}, functions = {} }

--- Runs an operation on one tensor. The caller has already set the attributes of the operation.
function M.run1(name, a)
  want(a, name)
  call.op, call.n_in, call.n_out, inputs[0] = op[name], 1, 1, a
  return run_call()
end

--- Runs an operation on two tensors.
function M.run2(name, a, b)
  want(a, name)
  want(b, name)
  call.op, call.n_in, call.n_out, inputs[0], inputs[1] = op[name], 2, 1, a, b
  return run_call()
end

--- Runs an operation with several inputs and n_out outputs. Only the first `required` inputs must
--- be tensors; the others may be nil.
function M.run_many(name, n_out, required, ...)
  for k = 1, select("#", ...) do
    local x = select(k, ...)
    if x ~= nil or k <= required then want(x, name) end
    inputs[k - 1] = x or NONE
  end
  call.op, call.n_in, call.n_out = op[name], select("#", ...), n_out
  return run_call()
end

return M
