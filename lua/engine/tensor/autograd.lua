-- backward(), functions that run code without recording or in other formats, and gradients written
-- in Lua.
--
-- C never calls a Lua gradient: the core's backward pass stops at the node of a custom operation,
-- Lua computes the gradient, and the pass resumes. Used by scripts, nn/, train/, run/ and this
-- folder.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local tensor = require "engine.tensor.tensor"
local within = require "engine.base.within"

local C, check, expect, raise, raise_if, fail_if, Tensor = M_ffi.C, M_ffi.check, M_ffi.expect,
  M_ffi.raise, M_ffi.raise_if, M_ffi.fail_if, M_ffi.Tensor

local M = {}
-- The custom operations on the tape: rules[id] = { backward, saved, n_in, n_out }. Stored in the
-- tensor module, which exists once in a process even if a test runner unloads this file.
tensor.lua_nodes = tensor.lua_nodes or { rules = {}, next_id = 0 }
local nodes = tensor.lua_nodes

-- Computes the gradients of the custom operation at which the backward pass has stopped.
local function answer(rule)
  local dy = {}
  for k = 1, rule.n_out do
    dy[k] = Tensor()
    check(C.eng_backward_output(dy[k], k - 1))
  end
  local dx = { rule.backward(rule.saved, unpack(dy, 1, rule.n_out)) }
  fail_if(dx[rule.n_in + 1] ~= nil, "custom: expected at most %d gradients from backward, one " ..
    "for each tensor that forward got; backward returned more", rule.n_in)
  for k = 1, rule.n_in do
    if dx[k] then
      fail_if(not tensor.is_tensor(dx[k]), "custom: expected the gradient of input %d to be a " ..
        "tensor or nil, got %s", k, M_ffi.value_text(dx[k]))
      check(C.eng_backward_input(k - 1, dx[k]))
    end
  end
end

--- Runs f(...), which must not yield. `message`: the error if it does.
function M.at_once(message, f, ...)
  local thread, is_main = coroutine.running()
  if not thread or is_main then return f(...) end
  local inner = coroutine.create(f)
  local good, problem = coroutine.resume(inner, ...)
  if not good then error(problem, 0) end
  raise_if(coroutine.status(inner) ~= "dead", message)
end

-- A yield would leave the backward pass open, and no other pass could begin.
local YIELDED = "custom: backward yielded; it must return the gradients without a yield"

local OPTIONS = "scale retain"

--- Computes the gradients of a one-element loss and adds them to the `grad` of every leaf that
--- requires a gradient. Options: `scale` multiplies all gradients, as a loss scale does (by default
--- 1); retain = true keeps the tape, so that backward can run again.
function M.backward(loss, options)
  expect(tensor.is_tensor(loss), loss, "backward: expected a tensor")
  options = tensor.read_named(options, "backward", OPTIONS)
  local scale = options.scale or 1
  expect(type(scale) == "number" and scale - scale == 0, scale,
    "backward: expected scale to be a finite number")
  expect(options.retain == nil or type(options.retain) == "boolean", options.retain,
    "backward: expected retain to be true or false")
  check(C.eng_backward(loss, scale, options.retain or false))
  while true do
    local id = tonumber(C.eng_backward_pending())
    if id < 0 then break end
    local rule = nodes.rules[id]
    if not rule then
      C.eng_backward_abort()
      raise("backward: the tape holds a custom operation of an aborted pass; hint: compute the " ..
        "loss again")
    end
    local good, problem = pcall(M.at_once, YIELDED, answer, rule)
    if not good then
      C.eng_backward_abort()
      nodes.rules = {}
      error(problem, 0)
    end
    check(C.eng_backward_resume())
  end
  if not options.retain then nodes.rules = {} end
end
tensor.methods.backward = M.backward

--- Runs f(...) without recording and returns its results.
function M.no_grad(f, ...)
  arguments.want_function(f, "no_grad", "engine.no_grad(function() ... end)")
  local before
  return within(function() before = C.eng_grad_enabled(false) end,
    function() C.eng_grad_enabled(before) end, f, ...)
end

local Formats = M_ffi.ffi.typeof("eng_precision")

--- Runs f(...) and returns its results. `formats` (an eng_precision, or nil) sets the formats in
--- which f's operations compute. With nil, an operation computes in the formats of its inputs.
function M.in_formats(formats, f, ...)
  local before = Formats()
  return within(function() C.eng_autocast(formats, before) end,
    function() C.eng_autocast(before, nil) end, f, ...)
end

local mark = M_ffi.new("int64_t[1]")

--- Runs f(...) without recording, frees the tensors that f made, and returns f's results. Kept
--- tensors are not freed; every other tensor that f made is stale, also among the results. If f
--- yields, so is every tensor that other code makes before f returns. Use it for evaluation and
--- sampling.
function M.scope(f, ...)
  arguments.want_function(f, "scope", "engine.scope(function() ... end)")
  check(C.eng_scope_begin(mark))
  local at = mark[0]
  local function close(good, ...)
    local status = C.eng_scope_end(at)
    if not good then error((...), 0) end
    check(status)
    return ...
  end
  return close(pcall(M.no_grad, f, ...))
end

-- Puts a custom operation on the tape. inputs: the list of its input tensors. The arguments `...`
-- are the results of forward; this function returns them.
local function record(rule, saved, inputs, ...)
  local n_in, n_out = #inputs, select("#", ...)
  if n_out == 0 then raise("custom: expected forward to return a tensor, got nothing") end
  local xs, ys = M_ffi.new("eng_tensor[?]", math.max(n_in, 1)), M_ffi.new("eng_tensor[?]", n_out)
  for k, x in ipairs(inputs) do xs[k - 1] = x end
  for k = 1, n_out do
    local y = select(k, ...)
    if not tensor.is_tensor(y) then
      raise("custom: expected result %d of forward to be a tensor, got %s", k, M_ffi.value_text(y))
    end
    ys[k - 1] = y
  end
  nodes.next_id = nodes.next_id + 1
  local length = C.eng_tape_length()
  if length == 0 then nodes.rules = {} end   -- the step of these rules has ended
  check(C.eng_record_lua(nodes.next_id, xs, n_in, ys, n_out))
  if C.eng_tape_length() > length then
    nodes.rules[nodes.next_id] = { backward = rule.backward, saved = saved, n_in = n_in,
      n_out = n_out }
  end
  return ...
end

--- An operation with a gradient written in Lua:
---   local square = engine.custom { forward = function(saved, x) saved.x = x; return x * x end,
---                                  backward = function(saved, dy) return dy * saved.x * 2 end }
--- forward runs without recording and returns one or more tensors. backward gets the gradients of
--- these results. For each tensor among forward's arguments, in order, it returns a gradient of
--- that tensor's shape, or nil.
function M.custom(rule)
  raise_if(type(rule) ~= "table" or type(rule.forward) ~= "function"
    or type(rule.backward) ~= "function",
    "custom: expected { forward = function(saved, ...), backward = function(saved, ...) }")
  return function(...)
    local inputs, saved = {}, {}
    for k = 1, select("#", ...) do
      local x = select(k, ...)
      if tensor.is_tensor(x) then inputs[#inputs + 1] = x end
    end
    return record(rule, saved, inputs, M.no_grad(rule.forward, saved, ...))
  end
end

return M
