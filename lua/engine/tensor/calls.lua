-- Calls of operations from Lua. core/ops.def lists the operations. All calls share one struct,
-- M_ffi.call. elementwise.lua, views.lua and products.lua fill the tables `methods` and `functions`
-- below. tensor.lua takes the methods of tensors from `methods`, adds more, and copies `functions`
-- into its module. autograd.lua, images.lua and stats.lua add methods through tensor.lua. Owns both
-- tables. Called by the first four files.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"

local op, call, run_call, Tensor = M_ffi.op, M_ffi.call, M_ffi.run_call, M_ffi.Tensor
local inputs, want, expect, is_tensor = call["in"], arguments.want, M_ffi.expect,
  arguments.is_tensor
local NONE = Tensor(0, 0)
-- The names of the inputs of some operations, for error messages.
local NAMES = { attention = { "q", "k", "v" }, cross_entropy = { "logits", "targets" },
  linear = { "x", "weight", "bias" }, embedding = { "weight", "ids" }, gather = { "x", "index" },
  index_select = { "x", "index" }, where = { "condition", "a", "b" } }

--- Functions by name: `methods` are the methods of tensors, `functions` all others.
local M = { methods = {}, functions = {} }

--- Raises an error unless d is nil or the last dimension of the tensor x.
function M.want_last(x, d, name)
  if d == nil then return end
  local k, what = arguments.dimension(x, d, name)
  M_ffi.raise_if(k ~= what.ndim - 1, "%s: expected the last dimension of %s, got dimension %d; " ..
    "hint: x:transpose(%d, -1) makes it the last", name,
    arguments.shape_text(arguments.shape_table(what)), k + 1, k + 1)
end

--- Runs an operation on one tensor. The caller has already set the attributes of the operation.
function M.run1(name, a)
  want(a, name)
  call.op, call.n_in, call.n_out, inputs[0] = op[name], 1, 1, a
  return run_call()
end

-- Raises an error unless x, input k of the operation `name`, is a tensor.
local function want_input(x, name, k)
  if is_tensor(x) then return end
  expect(false, x, "%s: expected %s to be a tensor", name, (NAMES[name] or {})[k] or "input " .. k)
end

--- Converts the argument keepdim of a reduction to the operation's attribute, 1 or 0. `hint` ends
--- the message about a wrong keepdim.
function M.keep_of(keepdim, name, hint)
  M_ffi.raise_if(keepdim ~= nil and type(keepdim) ~= "boolean",
    "%s: expected keepdim to be true or false, got %s%s", name, M_ffi.value_text(keepdim),
    hint or "")
  return keepdim and 1 or 0
end

--- Runs an operation on two tensors.
function M.run2(name, a, b)
  want_input(a, name, 1)
  want_input(b, name, 2)
  call.op, call.n_in, call.n_out, inputs[0], inputs[1] = op[name], 2, 1, a, b
  return run_call()
end

--- Runs an operation with several inputs and n_out outputs. Only the first `required` inputs must
--- be tensors; the others may be nil.
function M.run_many(name, n_out, required, ...)
  for k = 1, select("#", ...) do
    local x = select(k, ...)
    if x ~= nil or k <= required then want_input(x, name, k) end
    inputs[k - 1] = x or NONE
  end
  call.op, call.n_in, call.n_out = op[name], select("#", ...), n_out
  return run_call()
end

return M
