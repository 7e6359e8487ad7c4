-- Keeps the state of optimizers written in Lua (engine.optim.register), and runs the loop that
-- calls the specification's update for each parameter. Owns the buffers: f32, bf16 or FP8 tensors
-- that begin as zeros. Called by optim.lua; fused_state.lua has the same methods for the core's
-- optimizers.
--
-- Everything inside update runs in f32 and in a scope of its own, and the tape does not record it.
-- Temporary tensors are therefore freed after each parameter. With ZeRO, a rank updates whole
-- parameters and has the buffers of only these parameters.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local autograd = require "engine.tensor.autograd"
local fused_state = require "engine.train.fused_state"
local nearest = require "engine.base.nearest"
local precision = require "engine.train.precision"
local tensor = require "engine.tensor.tensor"

local ffi, C, check, raise, raise_if = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.raise, M_ffi.raise_if

local M = {}

local State = {}
State.__index = State

local function count_of(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

-- Buffers to be freed once the tape is empty. Until then the core keeps every tensor.
local waiting = {}

local function release(x)
  if C.eng_free(x) ~= 0 then waiting[#waiting + 1] = x end
end

local function reclaim()
  if waiting[1] == nil or C.eng_tape_length() > 0 then return end
  local list = waiting
  waiting = {}
  for _, x in ipairs(list) do release(x) end
end

--- Makes the state of an optimizer, which must already have its parameters, its groups and the
--- dtype of its moments. `spec`: a checked specification (optim_register.lua).
function M.new(optimizer, spec)
  local self = setmetatable({ optimizer = optimizer, spec = spec, kept = 0, buffers = {},
    known = {} }, State)
  for _, buffer in ipairs(spec.buffers) do self.known[buffer.name] = true end
  local handles = self.buffers     -- a finalizer that held `self` would keep it alive
  self.guard = ffi.gc(ffi.new "char[1]", function()
    for _, of in pairs(handles) do
      for _, x in pairs(of) do release(x) end
    end
  end)
  for i, p in ipairs(optimizer.list) do self:layout(i, p.tensor.shape) end   -- checks the shapes
  return self
end

-- Returns the buffers that parameter i has if its shape is `shape`: a list of { key =, name =,
-- dtype =, size = the buffer's shape, shape = function(parameter's shape) -> the buffer's shape },
-- ordered by key. A parameter without elements has no buffers.
function State:layout(i, shape)
  local p, list = self.optimizer.list[i], {}
  local group = self.optimizer.groups[self.optimizer._group_of[i - 1] + 1]
  if count_of(shape) == 0 then return list end
  for _, buffer in ipairs(self.spec.buffers) do
    local function size_of(whole)      -- the buffer's shape, and whether it is the parameter's
      if not buffer.shape then return whole, true end
      local given = { unpack(whole) }
      local size = buffer.shape(given, p, group)
      if size == nil then return nil end
      local good = type(size) == "table" and #size <= C.ENG_MAX_DIMS
      for _, n in ipairs(good and size or {}) do
        good = good and type(n) == "number" and n % 1 == 0 and n >= 0 and n < 2 ^ 53
      end
      if good then
        return size, size == given and arguments.shape_text(size) == arguments.shape_text(whole)
      end
      raise("optim.%s: expected the shape of buffer '%s' of %s to be nil, or a list of at most " ..
        "%d whole numbers of 0 or more, got %s", self.spec.name, buffer.name, p.name,
        tonumber(C.ENG_MAX_DIMS), type(size) == "table" and "a table with other entries"
        or M_ffi.value_text(size))
    end
    local size, own = size_of(shape)
    if size then
      -- the option `moments` applies only to buffers of the parameter's shape
      list[#list + 1] = { key = buffer.name, name = p.name .. "." .. buffer.name, size = size,
        shape = function(whole) return (size_of(whole)) end,
        dtype = buffer.dtype or own and self.optimizer.moments or "f32" }
    end
  end
  return list
end

-- Makes a buffer for parameter p, in the memory (CPU or card) that holds p.
local function zeros(p, size, dtype)
  local x = tensor.zeros(size, { dtype = dtype, keep = true })
  local home, here = p.tensor.device, x.device
  if home == here then return x end
  x:free()
  raise("parameter %s is in %s memory, but the current device is %s; hint: engine.device('%s')",
    p.name, home, here, home)
end

-- Returns the buffers of parameter i by key, and makes them at the first call. Returns {} if
-- another rank has them.
local function buffers_of(self, i)
  local own = self.buffers[i]
  if own then return own end
  own = {}
  local p = self.optimizer.list[i]
  local absent = p.tensor.count == 0 or self.owns and not self.owns[i]
  for _, b in ipairs(absent and {} or self:layout(i, p.tensor.shape)) do
    own[b.key] = zeros(p, b.size, b.dtype)
    self.kept = self.kept + own[b.key].count * C.eng_dtype_size(M_ffi.dtype[b.dtype])
  end
  self.buffers[i] = own
  return own
end

-- ------------------------------------------------------------------ one update

-- Makes it an error to read or assign an unknown name in t. A name in `known` reads as nil if t
-- does not have it; an example is a buffer that this parameter does not need.
local function guarded(t, what, known)
  local function missing(key)
    local names = nearest.keys(known)
    for name in pairs(t) do names[#names + 1] = tostring(name) end
    error(("%s has no '%s'%s"):format(what, tostring(key),
      nearest.hint(tostring(key), names, true)), 3)
  end
  return setmetatable(t, {
    __index = function(_, key) if not known[key] then missing(key) end end,
    __newindex = function(_, key) missing(key) end,
  })
end

local function same(a, b) return a.slot == b.slot and a.generation == b.generation end

-- Returns the tensor that update assigned to fields[key]. Returns nil if fields[key] still holds x,
-- its tensor from before the update.
local function assigned(self, fields, key, x)
  local value, shape = rawget(fields, key), arguments.shape_text(x.shape)
  local function bad(expected, got)
    raise("optim.%s: expected %s's %s %s, got %s", self.spec.name, fields.name, key, expected, got)
  end
  if not tensor.is_tensor(value) then bad("to be a tensor", M_ffi.value_text(value)) end
  if same(value, x) then return nil end
  if value.dtype ~= "f32" then bad("to be f32", value.dtype) end
  if arguments.shape_text(value.shape) ~= shape then
    bad("to keep its shape " .. shape, arguments.shape_text(value.shape))
  end
  return value
end

-- Copies what the specification's update left in fields[key] to the tensor into[key]. `into` has
-- the weight and the buffers themselves; `fields` may have f32 copies of buffers.
local function store(self, fields, before, into)
  local new = {}
  for key, x in pairs(before) do
    new[key] = assigned(self, fields, key, x)
    for _, other in pairs(before) do      -- copies a buffer that was assigned to another name
      if new[key] and same(new[key], other) then new[key] = other:contiguous() break end
    end
    if not new[key] and not same(x, into[key]) then new[key] = x end
  end
  -- stores the weight last, because a buffer may be a view of it
  for _, buffer in ipairs(self.spec.buffers) do
    if new[buffer.name] then into[buffer.name]:copy(new[buffer.name]) end
  end
  if new.weight then into.weight:copy(new.weight) end
end

local has = ffi.new("int[1]")

-- Updates parameter i. factor: multiplies its gradient. limit: the largest magnitude of a gradient
-- element after that; 0: none. Returns whether the parameter had a gradient.
local function update_one(self, i, factor, limit, ctx)
  local p = self.optimizer.list[i]
  local shape = p.tensor.shape
  local grad = tensor.zeros(shape)
  check(C.eng_params_true_gradient(has, grad, self.optimizer.params, i - 1, factor))
  if has[0] == 0 then return false end
  if limit > 0 then grad = grad:clamp(-limit, limit) end
  local weight = p.tensor
  if self.parted then            -- the whole weight is here; operations on p.tensor need all ranks
    weight = M_ffi.Tensor()
    check(C.eng_parallel_piece(weight, self.parted, i - 1))
    weight = weight:view(shape)
  end
  local fields = { name = p.name, role = p.role, weight = weight, grad = grad }
  local before, into = { weight = weight }, { weight = weight }
  for key, x in pairs(buffers_of(self, i)) do
    before[key], into[key] = x.dtype == "f32" and x or x:to("f32"), x
    fields[key] = before[key]
  end
  self.torn = true                 -- cleared when all parameters are updated
  self.spec.update(guarded(fields, "p, the first argument of update,", self.known), ctx)
  store(self, fields, before, into)
  return true
end

-- Calls update for every parameter that has a gradient and that this rank updates. contexts: the
-- ctx of each group.
local function update_all(self, factor, options, contexts)
  local clips, lr_muls = options.clips, options.lr_muls
  for i, p in ipairs(self.optimizer.list) do
    if p.tensor.count > 0 and not (self.owns and not self.owns[i]) then
      local ctx = contexts[self.optimizer._group_of[i - 1] + 1]
      local lr = ctx.lr
      ctx.lr = lr_muls and lr * lr_muls[i - 1] or lr
      autograd.scope(update_one, self, i, clips and factor * clips[i - 1] or factor,
        options.clip_value, ctx)
      ctx.lr = lr
    end
  end
end

--- Makes one update. `lr`: the rate, not yet multiplied by the groups' lr_mul. `options`: as for
--- Optimizer:step; gradient_factor, clip_value, clip_norm and norm are required.
function State:update(lr, options)
  local name, factor = self.spec.name, options.gradient_factor
  self:refuse_torn()
  raise_if(options.lagged, "optim.%s: in mode=lagged the device decides whether to update, and " ..
    "this optimizer is written in Lua; hint: mode=sync", name)
  for _, option in ipairs { "norms", "update_clip", "spike_clip" } do
    if options[option] then
      raise("optim.%s: the option %s needs a fused optimizer (%s), and this one is written in Lua",
        name, option, fused_state.names "or")
    end
  end
  if options.clip_norm > 0 and options.norm > options.clip_norm then
    factor = factor * options.clip_norm / (options.norm + 1e-6)
  end
  local contexts = {}
  for k, group in ipairs(self.optimizer.groups) do
    local ctx = { t = options.bias_step or self.optimizer.updates + 1 }
    for key in pairs(self.spec.defaults) do ctx[key] = group[key] end
    ctx.lr = lr * group.lr_mul
    contexts[k] = guarded(ctx, "ctx, the second argument of update,", {})
  end
  reclaim()
  precision.autocast("fp32", update_all, self, factor, options, contexts)
  self.torn = nil
  check(C.eng_params_refresh(self.optimizer.params))
end

--- Raises an error if an update failed halfway.
function State:refuse_torn()
  raise_if(self.torn, "optim.%s: an update failed halfway, so weights and buffers belong to " ..
    "different updates; hint: load a checkpoint", self.spec.name)
end

-- ------------------------------------------------------------------ methods as in fused_state.lua

--- Returns the buffers of parameter i: a list of { name = "w.momentum", x = tensor (nil if another
--- rank has the buffer), dtype, shape = function(parameter's shape) -> the buffer's shape, whole =
--- true }. `shape`: the whole parameter's shape, if ranks hold parts of the parameter. With `torn`,
--- raises no error after an update that failed halfway.
function State:of(i, shape, torn)
  if not torn then self:refuse_torn() end
  local own = buffers_of(self, i)
  local list = self:layout(i, shape or self.optimizer.list[i].tensor.shape)
  for _, b in ipairs(list) do b.x, b.whole = own[b.key], true end
  return list
end

--- Returns the size in bytes of the buffers of parameter i.
function State:bytes(i)
  local sum = 0
  for _, b in ipairs(self:layout(i, self.optimizer.list[i].tensor.shape)) do
    sum = sum + count_of(b.size) * C.eng_dtype_size(M_ffi.dtype[b.dtype])
  end
  return sum
end

--- Keeps only the buffers of the parameters that this rank updates (ZeRO). `parted`: true if the
--- rank holds the weights of only these parameters, too (ZeRO-3).
function State:shard(reduction, parted)
  local from, to = ffi.new("int64_t[1]"), ffi.new("int64_t[1]")
  self.owns, self.parted = {}, parted and reduction or nil
  for i in ipairs(self.optimizer.list) do
    C.eng_parallel_own(from, to, reduction, i - 1)
    self.owns[i] = to[0] > from[0]
    for key, x in pairs(not self.owns[i] and self.buffers[i] or {}) do
      self.kept = self.kept - x.count * C.eng_dtype_size(M_ffi.dtype[x.dtype])
      release(x)
      self.buffers[i][key] = nil
    end
  end
end

--- Called after a state is loaded: forgets an update that failed halfway.
function State:restart() self.torn = nil end

return M
