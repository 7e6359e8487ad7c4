-- Loss scalers as classes, in the style of other frameworks. A class runs in the script's own Lua
-- state, without the sandbox. A script registers it under a name, and selects it by that name:
--
--   local Careful = {}
--   Careful.__index = Careful
--   function Careful.new(options)
--     return setmetatable({ s = options.init_scale or 2^16 }, Careful)
--   end
--   function Careful:get_scale() return self.s end
--   function Careful:update(overflow, record) self.s = overflow and self.s / 4 or self.s end
--   engine.register_loss_scaler("careful", Careful)
--   engine.trainer{ policy = "careful", ... }
--
-- get_scale() and update(overflow, record, tensors) are required; record is the step's eng_record.
-- Optional:
--   needs = { "hist", "tensors" }   statistics that the class needs besides amax and norm: any of
--                                   "zeros", "underflow", "hist", "norm_ref", "tensors". With
--                                   "tensors", update's third argument is { name =
--                                   eng_tensor_stats }, which describes the gradients as stored
--                                   (times record.scale); otherwise it is nil
--   scale_loss(loss, ...)           returns the scaled loss; the backward pass then does not apply
--                                   the scale again. get_scale() must return the scale that
--                                   scale_loss used. The further arguments are those of
--                                   scaler:scale() or session:backward(). In a trainer they are the
--                                   further results of the loss function, such as the attention
--                                   maps of model:loss(x, y, { attention_maps = true })
--   set_scale(scale)                sets the scale; called when the class replaces another policy,
--                                   by scaler:update(scale) and by `engine attach`. Without this
--                                   method, the class starts with its own scale, and the other two
--                                   calls are errors
--   unscale_gradients(optimizer)    unscales the gradients; engine.scaler then does not unscale
--                                   them itself. Trainers and sessions do not call this method
--   state_dict()                    returns the state for checkpoints, as plain data
--   load_state_dict(state)          restores this state. Without these two methods, checkpoints
--                                   save the object's fields
-- Called by policy.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fields = require "engine.base.fields"
local json = require "engine.base.json"
local nearest = require "engine.base.nearest"
local policy_names = require "engine.policy.names"
local show = require "engine.base.show"

local ffi, C, expect, raise, fail_if = M_ffi.ffi, M_ffi.C, M_ffi.expect, M_ffi.raise, M_ffi.fail_if

local M = {}

-- The statistics that a class can need, with their bits.
local KNOWN = C.ENG_NEED_GRADIENTS + C.ENG_NEED_TENSORS + C.ENG_NEED_NORM_REF
local NEEDS = {}
for _, entry in ipairs(policy_names) do
  if bit.band(entry.need, KNOWN) ~= 0 and entry.name ~= "groups" then
    NEEDS[entry.name] = entry.need
  end
end

local METHODS = { "get_scale", "update", "new", "scale_loss", "set_scale", "unscale_gradients",
  "state_dict", "load_state_dict" }
local REQUIRED = { get_scale = true, update = true }

-- Returns the statistics that a class needs, as ENG_NEED_* bits.
local function needs_of(name, class)
  local bits, needs = C.ENG_NEED_AMAX + C.ENG_NEED_NORM, class.needs or {}
  expect(type(needs) == "table", needs,
    "register_loss_scaler '%s': needs: expected a list of statistics", name)
  for _, need in ipairs(needs) do
    if not NEEDS[need] then
      raise("register_loss_scaler '%s': needs: there is no statistic %s%s", name,
        M_ffi.value_text(need), nearest.choices(need, NEEDS, "statistics"))
    end
    bits = bit.bor(bits, NEEDS[need])
  end
  return bits
end

--- Raises an error unless `class` can serve as a loss scaler.
function M.check(name, class)
  local problem = show.name_problem(name)
  if problem then raise("register_loss_scaler: the name %s: '%s'", problem, show.cut(name, 100)) end
  expect(type(class) == "table", class, "register_loss_scaler '%s': expected a class (a table)",
    name)
  for _, method in ipairs(METHODS) do
    local value = class[method]
    if value == nil and REQUIRED[method] then
      local names = {}
      for key, given in pairs(class) do
        if type(given) == "function" then names[#names + 1] = key end
      end
      raise("register_loss_scaler '%s': the class has no method %s%s", name, method,
        nearest.hint(method, names))
    end
    expect(value == nil or type(value) == "function", value,
      "register_loss_scaler '%s': expected %s to be a function", name, method)
  end
  needs_of(name, class)
end

local ClassPolicy = {}
ClassPolicy.__index = ClassPolicy

local function is_scale(x) return type(x) == "number" and x > 0 and x < math.huge end

local function scale_of(self)
  local scale = self.object:get_scale()
  if not is_scale(scale) then
    M_ffi.fail("loss scaler '%s': get_scale() gave %s; expected a positive finite number",
      self.name, tostring(scale))
  end
  return scale
end

function ClassPolicy:scale() return self.last end

--- Returns the loss, scaled by the class's scale_loss, or nil if the class has no scale_loss.
--- scale_loss may change the scale.
function ClassPolicy:scale_loss(loss, ...)
  if not self.object.scale_loss then return nil end
  local scaled = self.object:scale_loss(loss, ...)
  expect(arguments.is_tensor(scaled), scaled,
    "loss scaler '%s': expected scale_loss to return a tensor", self.name)
  self.last = scale_of(self)
  return scaled
end

--- Runs the class on a step and returns the verdict, as Policy:decide does for a policy file. If
--- the class raises an error or gives an invalid scale, the verdict is marked as failed and the
--- last valid scale stays in force. Changes that the class made to its fields before the error
--- remain.
function ClassPolicy:decide(record, stats)
  local v = self.verdict
  local overflow = record.overflow ~= 0
  v.action = overflow and C.ENG_ACTION_SKIP or C.ENG_ACTION_STEP
  v.clip, v.lr_mul, v.failed, v.reason = 0, 1, 0, ""
  local good, result = pcall(function()
    self.object:update(overflow, record, self:by_name(stats))
    return scale_of(self)
  end)
  if good then
    if result ~= self.last then
      v.reason = ("%s: scale %.10g -> %.10g"):format(overflow and "overflow" or "update", self.last,
        result)
    end
    self.last = result
  else
    self.failed = self.failed + 1
    v.failed, v.reason = 1, tostring(result):sub(1, 255)
  end
  v.scale = self.last
  return v
end

function ClassPolicy:failures() return self.failed end

function ClassPolicy:save()
  local object = self.object
  local state
  if object.state_dict then state = object:state_dict() else state = arguments.merged(object) end
  return json.encode({ class = self.name, scale = self.last, failures = self.failed,
    state = state }, "loss scaler " .. self.name)
end

function ClassPolicy:restore(text)
  local good, saved = pcall(json.decode, text)
  if not good or type(saved) ~= "table" or saved.class ~= self.name or type(saved.state) ~= "table"
    or not is_scale(saved.scale) or not fields.whole(saved.failures or 0) then
    raise("loss scaler '%s': expected a state that this scaler saved, got %s", self.name,
      M_ffi.value_text(text))
  end
  local object = self.object
  if object.load_state_dict then object:load_state_dict(saved.state)
  else
    for key in pairs(object) do object[key] = nil end
    for key, value in pairs(saved.state) do object[key] = value end
  end
  self.last, self.failed = saved.scale, saved.failures or 0
end

function ClassPolicy:set_scale(scale)
  M_ffi.raise_if(not self.object.set_scale, "loss scaler '%s' is a class without a method " ..
    "set_scale, so only the class itself can change its scale; hint: add set_scale(scale) to it",
    self.name)
  self.object:set_scale(scale)
  self.last = scale_of(self)
end

function ClassPolicy:reset()
  self.object = self.make()
  self.last, self.failed = scale_of(self), 0
end

--- Takes over the old policy's scale if the class has a method set_scale. Otherwise the class
--- starts with its own scale.
function ClassPolicy:take_over(old)
  self:reset()
  if self.object.set_scale then self:set_scale(old:scale()) end
end

--- Sets the names of the tensors, in the order of the statistics that decide() gets.
function ClassPolicy:tensors(names) self.names = names end

-- Returns decide()'s statistics as { name = eng_tensor_stats }, or nil if the class does not need
-- them or if decide() got none.
function ClassPolicy:by_name(stats)
  if not stats or not self.names or bit.band(self.needs, C.ENG_NEED_TENSORS) == 0 then
    return nil
  end
  local tensors = {}
  for i, name in ipairs(self.names) do tensors[name] = stats[i - 1] end
  return tensors
end

-- Callers use these methods of every policy. For a class they do nothing, because a class reads the
-- script's variables directly, logs with engine.signal and prints with print, and its verdict has
-- one scale and no fields for single tensors.
for _, name in ipairs { "signal", "logs", "add_logs", "printed", "each", "logit_muls" } do
  ClassPolicy[name] = function() end
end
function ClassPolicy:group_scale() return self.last end
function ClassPolicy:scales_groups() return false end
function ClassPolicy:changed() return "" end

function ClassPolicy:__tostring()
  return ("loss scaler %s (a class): scale %.10g"):format(self.name, self.last)
end

--- Returns a policy object that wraps a new instance of the class. class.new(options) makes the
--- instance; without `new`, the instance has the options as fields and the class as its prototype.
function M.new(name, class, options)
  local function make()
    local copy = arguments.merged(options)
    if class.new then
      local object = class.new(copy)
      fail_if(type(object) ~= "table",
        "loss scaler '%s': new(options) gave a %s; expected a table", name, type(object))
      return object
    end
    return setmetatable(copy, { __index = class })
  end
  local self = setmetatable({ name = name, doc = class.doc or "", file = name,
    options = options or {}, is_class = true, needs = needs_of(name, class), make = make,
    failed = 0, verdict = ffi.new("eng_verdict") }, ClassPolicy)
  self:reset()
  return self
end

return M
