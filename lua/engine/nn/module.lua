-- The module: a table of parameters and child modules, in the order of their assignment, with a
-- forward method. Assignment registers a child:
--   local Net = nn.class("Net")
--   function Net:init(width) self.up = nn.linear(width, 4 * width) end
--   function Net:forward(x) return self.up(x):gelu() end
--   local net = Net(32); net(x)
-- A parameter's name is the path of the assignments: "blocks.3.attn.qkv.weight".
-- Owns the state of the running module. Used by scripts, this folder, train/ and cli/.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local tensor = require "engine.tensor.tensor"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local within = require "engine.base.within"

local C, expect, raise, raise_if, is_tensor = M_ffi.C, M_ffi.expect, M_ffi.raise, M_ffi.raise_if,
  tensor.is_tensor

local M = {}

-- ------------------------------------------------------------------ calls

local depth = 0   -- 1 while a module runs; the outermost call adds the module path to errors

-- The relative scale of the operations that run now. Their gradients are multiplied by the loss
-- scale times this scale. The innermost module with a relative scale sets it (`_relative_scale`,
-- policy/groups.lua); if there is no such module, it is 1.
local scale_now, scale_before = 1, M_ffi.new("double[1]")
local function set_relative_scale(scale)
  if scale == scale_now then return end
  M_ffi.check(C.eng_gradient_relative_scale(scale_before, scale))
  scale_now = scale
end

local function results(scale, ...)
  set_relative_scale(scale)
  return ...
end

local enter, leave_module   -- the functions that M.watch has set

--- Makes every module call state = on_enter(module) before its forward, and on_leave(state,
--- results...) afterwards. watch(nil) ends this. Used by train/trap.lua, train/activations.lua and
--- cli/plan_checkpoint.lua.
function M.watch(on_enter, on_leave) enter, leave_module = on_enter, on_leave end

--- Whether watch is active.
function M.watched() return enter ~= nil end

local function left(around, ...)
  leave_module(around, ...)
  return ...
end

-- Ends a checkpointed call. The arguments are the results of the call, and are returned. The tape
-- keeps the results that are tensors, and the tensors inside results that are tables.
local function end_checkpoint(...)
  local kept = {}
  for i = 1, select("#", ...) do
    local result = select(i, ...)
    for _, x in pairs(type(result) == "table" and result or { result }) do
      if is_tensor(x) then kept[#kept + 1] = x end
    end
  end
  local list = M_ffi.new("eng_tensor[?]", math.max(1, #kept))
  for i, x in ipairs(kept) do list[i - 1] = x end
  M_ffi.check(C.eng_checkpoint_end(list, #kept))
  return ...
end

local function forward_of(self, ...)
  if rawget(self, "_checkpoint") and C.eng_checkpoint_begin() then
    return end_checkpoint(self:forward(...))
  end
  return self:forward(...)
end

-- Calls self:forward, but not as a tail call, because path_on_stack looks for this frame.
local function forward(self, ...)
  local outside = scale_now
  set_relative_scale(rawget(self, "_relative_scale") or outside)
  if enter then return results(outside, left(enter(self), forward_of(self, ...))) end
  return results(outside, forward_of(self, ...))
end

--- Whether x is a module.
local function is_module(x) return type(x) == "table" and rawget(x, "_order") ~= nil end
M.is_module = is_module

-- The path from `root` to `wanted` in the tree of modules, or nil. seen: the modules searched.
local function path_to(root, wanted, seen)
  if root == wanted then return "" end
  seen = seen or {}
  if seen[root] then return nil end
  seen[root] = true
  for _, key in ipairs(root._order) do
    local child = rawget(root, key)
    local rest = is_module(child) and path_to(child, wanted, seen)
    if rest then return rest == "" and tostring(key) or tostring(key) .. "." .. rest end
  end
end

-- Returns three values: the path from the outermost module on the stack to the innermost
-- ("blocks.3.attn.qkv"), the outermost module, and the first argument of the innermost one.
local function path_on_stack()
  local innermost, outermost, input
  for level = 2, 200 do
    local frame = debug.getinfo(level, "f")
    if not frame then break end
    if frame.func == forward then
      local _, self = debug.getlocal(level, 1)
      if not innermost then input = select(2, debug.getlocal(level, -1)) end
      innermost, outermost = innermost or self, self
    end
  end
  return outermost and path_to(outermost, innermost) or "", outermost, input
end

local caller = ""       -- in a coroutine: the script's line that called the outermost module

-- Returns "file:line: In blocks.3.mlp: message". If Lua code inside engine/nn raised the error,
-- file:line is the position in the script. If this code used another value, such as nil or a table,
-- as a tensor, the message says that a tensor was expected.
local function explain(message)
  if type(message) ~= "string" then return message end
  local path, root, input = path_on_stack()
  local position, text = message:match("^([^\n:]+:%d+: )(.*)$")
  if not position or position:find("engine/nn/[%w_]+%.lua:") then
    position = M_ffi.script_line()
    if position == "" then position = caller end
    text = (text or message):gsub("^attempt to index local '(%w+)' %(a (%w+) value%)$",
      "expected a tensor as %1, got a %2"):gsub("got a nil$", "got nothing")
    if text:find("^attempt to call method ") and input ~= nil and not is_tensor(input) then
      text = "expected a tensor, got " .. M_ffi.value_text(input)
    end
  end
  return ("%sIn %s: %s"):format(position, path ~= "" and path or root and root._class or "?",
    text or message)
end

local function pass(good, ...)
  if good then return ... end
  C.eng_checkpoint_end(nil, -1)
  error((...), 0)
end

-- Calls a module. While a coroutine is suspended in the call, calls of other modules count as
-- outermost calls.
local function call(self, ...)
  if depth > 0 then return forward(self, ...) end
  local thread, is_main = coroutine.running()
  local scale, from = 1, thread and not is_main and M_ffi.script_line() or ""
  return within(function()
    depth, caller = 1, from
    set_relative_scale(scale)
  end, function()
    depth, caller, scale = 0, "", scale_now
    set_relative_scale(1)
  end, function(...) return pass(xpcall(forward, explain, self, ...)) end, ...)
end

-- ------------------------------------------------------------------ the class

local Module = nearest.guard_elsewhere({}, "a module")
M.Module = Module

local function refuse_itself(bad, self, key)
  raise_if(bad, "%s.%s: a module cannot contain itself", self._class, tostring(key))
end

-- Raises an error if `value` is a plain table that holds a module which `self` does not contain.
local function refuse_hidden(self, key, value)
  if type(value) ~= "table" or getmetatable(value) then return end   -- an optimizer has a metatable
  if self._checked[key] == value then return end
  for _, entry in pairs(value) do
    raise_if(is_module(entry) and not path_to(self, entry), "%s.%s: a plain table hides its " ..
      "modules, so their parameters would not be trained; hint: nn.list { ... } or " ..
      "nn.sequential { ... }", self._class, tostring(key))
  end
  self._checked[key] = value
end

local info = M_ffi.new("eng_tensor_info")

-- Stores a value in the module. Lua calls this function only for a key that has no value; walk
-- checks values that replace others. `_order` has the keys that this function stored, in the order
-- of their first assignment; a removed key keeps its place. A tensor registers its key by a role.
local function assign(self, key, value)
  if is_module(value) then refuse_itself(path_to(value, self), self, key) end
  refuse_hidden(self, key, value)
  if depth == 0 and is_tensor(value) and C.eng_info(info, value) == 0
    and (info.owner ~= 0 or info.requires_grad ~= 0 and info.is_leaf ~= 0) then
    self._roles[key] = self._roles[key] or "linear"
  end
  if value ~= nil and not self._known[key] then
    self._order[#self._order + 1], self._known[key] = key, true
  end
  rawset(self, key, value)
end

--- A new class of modules: nn.class("Name") returns the class. Define its methods init and forward,
--- and call the class to make a module. Assigning a module or a tensor registers the field, with
--- three exceptions. A tensor that ends with the step registers a field only if it is a leaf that
--- requires a gradient. A tensor that replaces a plain value, or that is assigned while a module's
--- forward runs, must in addition live longer than the step.
function M.class(name)
  expect(type(name) == "string", name, "nn.class: expected the name of the class")
  local class = { _class = name }
  local instance = { __call = call, __newindex = assign, __index = function(_, key)
    local value = class[key]
    if value ~= nil then return value end
    return Module[key]
  end, __tostring = function(self) return Module.describe(self) end }
  return setmetatable(class, { __call = function(_, ...)
    local self = setmetatable({ _order = {}, _known = {}, _checked = {}, _roles = {},
      _training = true, _class = name }, instance)
    if class.init then class.init(self, ...) end
    return self
  end })
end

--- Registers a parameter under `key`. role: "linear", "embedding" or "norm"; a precision recipe
--- chooses the parameter's formats by its role.
function Module:parameter(key, value, role)
  expect(is_tensor(value), value, "parameter: expected a tensor for '%s'", tostring(key))
  self[key] = value:requires_grad(true)
  self._roles[key] = role or "linear"
  return value
end

--- Registers a buffer under `key`: a tensor that has no gradient but is saved and loaded with the
--- parameters. No optimizer updates a buffer; the module's forward does so itself:
---   self.mean:copy(self.mean * 0.9 + mu * 0.1)
--- Other fields, such as a number self.calls, are not in checkpoints. In some steps trap=overflow
--- and policies that need norm_ref call forward again. After that, buffers get back their values,
--- and other fields do not.
function Module:buffer(key, value)
  expect(is_tensor(value), value, "buffer: expected a tensor for '%s'", tostring(key))
  self[key] = value
  self._roles[key] = "buffer"
end

local only_shapes = false

--- Makes an f32 tensor of zeros for a parameter. set_values(x), if given, then sets its values.
--- Inside M.build_shapes, the tensor has only its shape.
function M.new_parameter(shape, set_values)
  if only_shapes then
    return tensor.zeros(#shape > 0 and 1 or {}, { keep = false }):expand(shape)
  end
  local x = tensor.zeros(shape, { keep = true })
  if set_values then set_values(x) end
  return x
end

--- Returns the option `std`, the standard deviation of initial weights, or nil. In this function
--- and the next two, `name` is the layer's name, which begins error messages.
function M.want_std(options, name)
  local std = options.std
  expect(std == nil or type(std) == "number" and std >= 0 and std < math.huge, std,
    "%s: expected std to be a finite number >= 0", name)
  return std
end

--- Returns the option `key`, or `preset`. Raises an error unless it is a boolean.
function M.want_flag(options, key, name, preset)
  local flag = options[key]
  if flag == nil then flag = preset end
  expect(type(flag) == "boolean", flag, "%s: expected %s to be true or false", name, key)
  return flag
end

--- Returns the option `eps` of a norm, or `preset`.
function M.want_eps(options, name, preset)
  local eps = options.eps or preset
  expect(type(eps) == "number" and eps >= 0, eps, "%s: expected eps to be a number >= 0", name)
  return eps
end

--- Registers the weight [outputs x inputs ..] of a linear layer or a convolution and, unless
--- options.bias is false, its bias. Initial values: uniform within +-1/sqrt(fan-in); with
--- options.std, the weight is normal and the bias 0.
function M.add_linear(self, shape, options)
  local std, fan_in = M.want_std(options, "nn." .. self._class), 1
  for d = 2, #shape do fan_in = fan_in * shape[d] end
  local bound = 1 / math.sqrt(fan_in)
  local function uniform(x) x:uniform(-bound, bound) end
  self:parameter("weight", M.new_parameter(shape,
    std and function(x) x:normal(0, std) end or uniform), "linear")
  if not M.want_flag(options, "bias", "nn." .. self._class, true) then return end
  self:parameter("bias", M.new_parameter({ shape[1] }, not std and uniform), "linear")
end

--- Runs make(...), which builds modules, and returns its results. The parameters of these modules
--- have shapes but no values, and take almost no memory. They live until the step or the scope
--- ends.
function M.build_shapes(make, ...)
  return within(function() only_shapes = true end, function() only_shapes = false end, make, ...)
end

-- Whether x, the value of a field without a role, is a parameter. After a backward pass, results of
-- operations are leaves, too, but they end with the step.
local function is_trained(x)
  return C.eng_info(info, x) == 0 and info.requires_grad ~= 0 and info.is_leaf ~= 0
    and info.owner ~= 0
end

-- Calls on_module(module, path) for every module and on_tensor(path, tensor, owner, key) for every
-- parameter and buffer; either may be nil. above: the modules around `self`.
local function walk(self, path, on_module, on_tensor, above)
  local prefix = path ~= "" and path .. "." or ""
  above[self] = true
  if on_module then on_module(self, path) end
  for _, key in ipairs(self._order) do
    local value = rawget(self, key)
    if is_module(value) then
      refuse_itself(above[value], self, key)
      walk(value, prefix .. tostring(key), on_module, on_tensor, above)
    elseif not is_tensor(value) then refuse_hidden(self, key, value)
    elseif on_tensor and (self._roles[key] or is_trained(value)) then
      on_tensor(prefix .. tostring(key), value, self, key)
    end
  end
  above[self] = nil
end

--- All parameters and buffers in order, a list of { name, tensor, role, owner, key }; `owner` is
--- the module that holds the tensor in its field `key`. A tensor that two modules share (tied
--- weights) is listed once. The role of a buffer is "buffer".
function Module:parameters()
  local list, seen = {}, {}
  walk(self, "", nil, function(name, value, owner, key)
    if not seen[value.slot] then
      seen[value.slot] = true
      list[#list + 1] = { name = name, tensor = value, role = owner._roles[key] or "linear",
        owner = owner, key = key }
    end
  end, {})
  return list
end

--- The number of elements in all parameters, without buffers.
function Module:count()
  local n = 0
  for _, p in ipairs(self:parameters()) do
    if p.role ~= "buffer" then n = n + p.tensor.count end
  end
  return n
end

--- Calls visit(module, path) for this module (path "") and every module below it. Returns this
--- module.
function Module:apply(visit)
  arguments.want_function(visit, "apply", "model:apply(function(module, path) ... end)")
  walk(self, "", visit, nil, {})
  return self
end

--- Sets training mode (which switches dropout on) for this module and all modules below it.
--- train(false) and eval() set evaluation mode.
function Module:train(on)
  expect(on == nil or type(on) == "boolean", on, "train: expected true or false")
  return self:apply(function(module) rawset(module, "_training", on ~= false) end)
end
--- Sets evaluation mode, in which dropout is off. Returns the module.
function Module:eval() return self:train(false) end
--- Whether the module is in training mode.
function Module:is_training() return self._training end

--- Runs f(...) in evaluation mode, restores every module's mode and returns f's results.
function Module:evaluating(f, ...)
  arguments.want_function(f, "evaluating", "model:evaluating(function() ... end)")
  local was
  return within(function()
    was = {}
    self:apply(function(module) was[module] = module._training end)
    self:eval()
  end, function()
    for module, training in pairs(was) do rawset(module, "_training", training) end
  end, f, ...)
end

--- Activation checkpointing: less memory for more time, with the same losses and gradients, bit for
--- bit. The modules that `which` names keep only their results and tensors of up to 256 bytes; the
--- backward pass runs their operations again, one module at a time. which: "block" for the blocks
--- of a model (the modules in each list `blocks`); a Lua pattern for the modules whose path matches
--- it; false for none. Returns the module.
function Module:checkpoint(which)
  expect(which == false or type(which) == "string", which,
    "checkpoint: expected \"block\", a pattern of module paths or false")
  local pattern, found = which == "block" and "%f[^%z.]blocks%.%d+$" or which, not which
  if pattern then arguments.want_pattern(pattern, "checkpoint", "a Lua pattern of module paths") end
  self:apply(function(module, path)
    local matches = pattern and path:find(pattern) and true or nil
    rawset(module, "_checkpoint", matches)
    found = found or matches
  end)
  if not found then
    raise("checkpoint: %s has no module %s; print(model) shows its modules", self._class,
      which == "block" and "in a list `blocks`" or ("whose path matches '%s'"):format(which))
  end
  return self
end

--- Freezes every parameter of this module and the modules below it: a frozen parameter gets no
--- gradient. freeze(false) unfreezes these parameters. If one of them is quantized, freeze(false)
--- raises an error and unfreezes nothing.
function Module:freeze(on)
  expect(on == nil or type(on) == "boolean", on, "freeze: expected true or false")
  local list = self:parameters()
  for _, p in ipairs(on == false and list or {}) do
    raise_if(p.role ~= "buffer" and not p.tensor.dtype:find "^b?f%d+$",
      "freeze(false): expected parameters in f32, f64, f16 or bf16, got %s in %s; nothing " ..
      "was unfrozen; hint: a quantized weight stays frozen, so call freeze(false) on the " ..
      "modules to train", p.name, p.tensor.dtype)
  end
  for _, p in ipairs(list) do
    p.owner._roles[p.key] = p.role              -- stays a parameter without requires_grad
    p.tensor:requires_grad(on == false and p.role ~= "buffer")
  end
  return self
end

--- Returns the parameters and buffers as { name = tensor }, for engine.save and checkpoints.
function Module:state()
  local state = {}
  for _, p in ipairs(self:parameters()) do state[p.name] = p.tensor end
  return state
end

-- Returns the reason why `value` cannot be copied into the parameter p, as text, or nil if it can.
local function misfit(p, value)
  local expected = tensor.shape_text(p.tensor.shape)
  if value == nil then return "missing: " .. p.name end
  if not is_tensor(value) then
    return ("%s: expected a tensor, got %s"):format(p.name, M_ffi.value_text(value))
  end
  local got = tensor.shape_text(value.shape)
  return got ~= expected and ("%s: expected %s, got %s"):format(p.name, expected, got) or nil
end

--- Copies values from { name = tensor } into the parameters and buffers, and converts dtypes.
--- Missing names, unknown names and wrong shapes raise an error that lists them (at most twelve),
--- and nothing is copied. With { strict = false } the tensors that fit are copied. Returns the
--- module and the list of problems.
function Module:load_state(state, options)
  expect(type(state) == "table", state,
    "load_state: expected a table of tensors by name, as engine.load(path) gives")
  local strict = tensor.read_named(options, "load_state", "strict").strict ~= false
  local problems, known, names, fitting = {}, {}, {}, {}
  for _, p in ipairs(self:parameters()) do
    local problem = misfit(p, state[p.name])
    known[p.name], names[#names + 1] = true, p.name
    if problem then problems[#problems + 1] = problem else fitting[#fitting + 1] = p end
  end
  for name in pairs(state) do
    if not known[name] then
      problems[#problems + 1] = "unknown: " .. tostring(name) .. nearest.hint(tostring(name), names)
    end
  end
  if strict and #problems > 0 then
    table.sort(problems)
    local shown = { unpack(problems, 1, 12) }
    if #problems > 12 then shown[#shown + 1] = ("... and %d more"):format(#problems - 12) end
    raise("load_state: the weights do not fit this model:\n  %s", table.concat(shown, "\n  "))
  end
  for _, p in ipairs(fitting) do p.tensor:copy(state[p.name]) end
  return self, problems
end

--- Drops the gradients of all parameters.
function Module:zero_grad()
  for _, p in ipairs(self:parameters()) do M_ffi.check(C.eng_clear_gradient(p.tensor)) end
end

-- ------------------------------------------------------------------ text

local function title(self)
  return self._class .. (self.extra and "(" .. self:extra() .. ")" or "")
end

-- Appends lines for every module inside `self`. If consecutive numbered siblings hold modules and
-- have equal text, as a model's blocks do, writes out the first and one line for the others ("2 to
-- 12: the same").
local function describe(self, indent, lines)
  local above, first
  for _, key in ipairs(self._order) do
    local child = rawget(self, key)
    if is_module(child) then
      local inner = {}
      describe(child, indent .. "  ", inner)
      local text = title(child) .. "\n" .. table.concat(inner, "\n")
      if type(key) == "number" and #inner > 0 and text == above then
        first = first or key
        if first < key then lines[#lines] = nil end
        lines[#lines + 1] = ("%s%s: the same"):format(indent,
          first < key and first .. " to " .. key or key)
      else
        lines[#lines + 1] = ("%s%s: %s"):format(indent, tostring(key), title(child))
        for _, line in ipairs(inner) do lines[#lines + 1] = line end
        above, first = text, nil
      end
    end
  end
end

--- The tree of modules and the number of parameters, as text. Says how many of these get no
--- gradient: they are frozen, or tensors that were assigned without requires_grad.
function Module:describe()
  local lines, fixed, list = { title(self) }, 0, self:parameters()
  describe(self, "  ", lines)
  for _, p in ipairs(list) do
    if p.role ~= "buffer" and arguments.info(p.tensor).requires_grad == 0 then
      fixed = fixed + p.tensor.count
    end
  end
  lines[#lines + 1] = show.grouped(self:count()) .. " parameters"
    .. (fixed > 0 and (", %s of them without gradient"):format(show.grouped(fixed)) or "")
  return table.concat(lines, "\n")
end

--- Computes the module's result. Every class defines its own forward.
function Module.forward(self)
  raise("%s has no forward method; hint: define one, or call the modules inside it", self._class)
end

return M
