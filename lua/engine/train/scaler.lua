-- Scales the loss in an explicit loop, with the state machine of PyTorch's GradScaler:
--   local scaler = engine.scaler{ policy = "dynamic", init_scale = 2^16 }
--   scaler:scale(loss):backward()   -- the scale seeds the backward pass, without an extra pass
--   scaler:unscale(opt)             -- only if the loop reads gradients or clips them
--   opt:clip_grad_norm(1)
--   local result = scaler:step(opt)    -- { skipped = true, reason = ... } on inf or nan
--   local verdict = scaler:update()    -- the policy decides on the next scale
--   opt:zero_grad()
-- With model = the trained module, a policy may scale its layers separately
-- (policies/layerwise.lua). An optimizer's step is skipped if its own gradients overflow; update()
-- reports an overflow to the policy if any optimizer had one. The scaler applies only the verdict's
-- scale. An action, clip or lr_mul would come after the optimizers' steps, so update() refuses it
-- (a skip on an overflow is fine). engine.session and engine.trainer carry out whole verdicts.
-- Called by scripts.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local autograd = require "engine.tensor.autograd"
local groups = require "engine.policy.groups"
local modes = require "engine.train.modes"
local nearest = require "engine.base.nearest"
local policy = require "engine.policy.policy"
local policy_names = require "engine.policy.names"
local show = require "engine.base.show"
local signals = require "engine.policy.signals"
local tensor = require "engine.tensor.tensor"

local ffi, C, check, expect, raise, raise_if = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.expect,
  M_ffi.raise, M_ffi.raise_if

local M = {}

local function f32(x) return tonumber(ffi.cast("float", x)) end

-- ------------------------------------------------------------------ a scaled loss

local Scaled = {}
Scaled.__index = Scaled

--- Computes the gradients of the loss times the scale. options: retain (as for loss:backward).
function Scaled:backward(options)
  autograd.backward(self.loss, { scale = self.seed, retain = options and options.retain })
end

--- Returns the loss times the scale, as a number.
function Scaled:item() return self.loss:item() * self.seed end

function Scaled:__tostring()
  return ("loss %g times scale %.10g"):format(self.loss:item(), self.seed)
end

-- ------------------------------------------------------------------ the scaler

local Scaler = nearest.guard_elsewhere({}, "a scaler")
Scaler.__index = Scaler

local READY, UNSCALED, STEPPED = "ready", "unscaled", "stepped"

--- engine.scaler { ... }: makes a scaler for an explicit loop. Options: policy (a name, a path or a
--- loaded policy, by default "dynamic"), enabled (by default true), model (the trained module, for
--- scales per layer), and the policy's own options.
function M.new(options)
  options = options or {}
  expect(type(options) == "table", options, "scaler: expected a table of options")
  local own = arguments.merged(options)
  own.policy, own.enabled, own.model = nil, nil, nil
  local enabled = options.enabled ~= false
  local good, chosen = pcall(policy.load, options.policy or "dynamic", own)
  local problem = not good and chosen or modes.scaler_refusal(chosen)
  if problem then raise(problem) end
  return setmetatable({ policy = chosen, model = options.model, enabled = enabled, optimizers = {},
    order = {}, attempts = 0, updates = 0,
    started = C.eng_clock(), total = ffi.new("eng_record") }, Scaler)
end

--- Returns the current loss scale, or 1 if the scaler is disabled.
function Scaler:get_scale() return self.enabled and self.policy:scale() or 1 end

function Scaler:is_enabled() return self.enabled end

--- Returns the loss, ready for :backward() with the scale. For a list of losses, returns a list.
--- Further arguments go to the scale_loss of a loss scaler class (policy/class_scaler.lua).
function Scaler:scale(loss, ...)
  if type(loss) == "table" and not getmetatable(loss) then
    local list = {}
    for i, one in ipairs(loss) do list[i] = self:scale(one, ...) end
    return list
  end
  expect(tensor.is_tensor(loss), loss, "scaler:scale: expected a loss tensor")
  local problem = self.enabled and policy.unusable(self.policy, self.groups and #self.groups.groups)
  if problem then raise("scaler:scale: %s", problem) end
  self.loss, self.began = loss, true
  local scaled = self.enabled and self.policy.scale_loss and self.policy:scale_loss(loss, ...)
  return setmetatable({ loss = scaled or loss, seed = scaled and 1 or self:get_scale() }, Scaled)
end

local function need_scale(self, what)
  raise_if(not self.began, "scaler:%s: no loss has been scaled yet; call " ..
    "scaler:scale(loss):backward() first", what)
end

-- Returns an optimizer's entry, which lasts until the next update(): { opt, stage, record, stats }
-- and three booleans. inspect() sets checked (the optimizer has gradients) and found (some of them
-- are inf or nan); unscale() also sets found, if some become inf; step() sets stepped (the
-- optimizer made an update).
local function entry_of(self, opt, what)
  expect(type(opt) == "table" and opt.params ~= nil and opt.step, opt,
    "scaler:%s: expected an optimizer of engine.optim", what)
  local entry = self.optimizers[opt]
  if not entry then
    entry = { stage = READY, opt = opt, record = ffi.new("eng_record") }
    self.optimizers[opt] = entry
  end
  return entry
end

-- Takes the statistics of an optimizer's gradients in one read-only pass, and lists the optimizer
-- for update().
local function inspect(self, entry)
  local opt, scale = entry.opt, self:get_scale()
  if bit.band(self.policy.needs, C.ENG_NEED_TENSORS) ~= 0 and not entry.stats then
    entry.stats = ffi.new("eng_tensor_stats[?]", #opt.list)
  end
  check(C.eng_params_stats(entry.record, entry.stats, opt.params, scale, self.policy.needs))
  if entry.checked == nil then self.order[#self.order + 1] = entry end
  entry.checked = tonumber(entry.record.count) > 0
  entry.found = entry.record.overflow ~= 0
end

local out_found = ffi.new("int[1]")

--- Divides the optimizer's gradients by the scale, so that the loop can read and clip them. If a
--- loss scaler class has unscale_gradients, calls this method instead.
function Scaler:unscale(opt)
  local entry = entry_of(self, opt, "unscale")
  if not self.enabled then return end
  need_scale(self, "unscale")
  raise_if(entry.stage == UNSCALED, "scaler:unscale: this optimizer's gradients are unscaled " ..
    "already; unscale an optimizer once between two update() calls")
  raise_if(entry.stage == STEPPED,
    "scaler:unscale: this optimizer has already stepped; unscale before step()")
  inspect(self, entry)
  local object = self.policy.object
  if object and object.unscale_gradients then object:unscale_gradients(opt)
  else
    check(C.eng_params_unscale(out_found, opt.params, f32(1 / self:get_scale())))
    entry.found = entry.found or out_found[0] ~= 0
  end
  entry.stage = UNSCALED
end

local function tell_bad(entry)
  local r = entry.record
  local parts = {}
  if r.inf > 0 then parts[#parts + 1] = ("%d inf"):format(tonumber(r.inf)) end
  if r.nan > 0 then parts[#parts + 1] = ("%d nan"):format(tonumber(r.nan)) end
  if #parts == 0 then return "gradients overflow when unscaled" end
  local first = entry.opt.list[r.first_bad + 1]
  return ("%s among the gradients%s"):format(table.concat(parts, " and "),
    first and ", the first in " .. first.name or "")
end

--- Makes the optimizer's update, or skips it if the gradients hold inf or nan. The update unscales
--- in the same pass. options go to opt:step. Returns { skipped = boolean, reason = text or nil }.
function Scaler:step(opt, options)
  local entry = entry_of(self, opt, "step")
  raise_if(type(options) == "function",
    "scaler:step: closures are not supported; compute the loss and its backward pass before step()")
  if not self.enabled then
    opt:step(options)
    return { skipped = false }
  end
  need_scale(self, "step")
  raise_if(entry.stage == STEPPED,
    "scaler:step: this optimizer has already stepped; call update() before the next step")
  local object = self.policy.object
  if entry.stage == READY then
    if object and object.unscale_gradients then self:unscale(opt) else inspect(self, entry) end
  end
  raise_if(not entry.checked, "scaler:step: this optimizer has no gradients to check for inf " ..
    "and nan; does the loss depend on its parameters?")
  local factor = entry.stage == UNSCALED and 1 or f32(1 / self:get_scale())
  entry.stage = STEPPED
  if entry.found then return { skipped = true, reason = tell_bad(entry) } end
  local given = arguments.merged(options)
  given.gradient_factor = (given.gradient_factor or 1) * factor
  opt:step(given)
  entry.stepped = true
  return { skipped = false }
end

-- Makes one record for all optimizers of the step.
local function add_up(self)
  local total = self.total
  ffi.fill(total, ffi.sizeof("eng_record"))
  total.first_bad, total.norm_ref = -1, 0 / 0
  local squares, before = {}, 0
  for _, entry in ipairs(self.order) do
    local r = entry.record
    for _, field in ipairs(policy_names) do
      local name, combine = field.name, field.combine
      if combine == C.ENG_COMBINE_SUM then total[name] = total[name] + r[name]
      elseif combine == C.ENG_COMBINE_MAX then total[name] = math.max(total[name], r[name])
      elseif combine == C.ENG_COMBINE_ROOT then
        squares[name] = (squares[name] or 0) + r[name] * r[name]
      end
    end
    if entry.found then total.overflow = 1 end
    if total.first_bad < 0 and r.first_bad >= 0 then total.first_bad = before + r.first_bad end
    if bit.band(self.policy.needs, C.ENG_NEED_HIST) ~= 0 then
      for b = 0, C.ENG_HIST_BINS - 1 do total.hist[b] = total.hist[b] + r.hist[b] end
    end
    before = before + #entry.opt.list
  end
  -- With one optimizer, use its norm directly; the root of its square would round.
  for name, square in pairs(squares) do
    total[name] = #self.order == 1 and self.order[1].record[name] or math.sqrt(square)
  end
  total.step, total.updates, total.scale = self.attempts, self.updates, self:get_scale()
  total.elapsed = C.eng_clock() - self.started
  total.lr = self.order[1].opt.lr
  local alive, loss = pcall(function() return self.loss:item() end)
  total.loss = alive and loss or 0 / 0
  return total
end

-- Joins all optimizers' statistics per tensor. Tells the policy the names of the tensors when the
-- list of optimizers has changed.
local function stats_of(self)
  local wanted = bit.band(self.policy.needs, C.ENG_NEED_TENSORS) ~= 0
  if not wanted and not self.model then return nil end
  local n, same = 0, self.named and #self.named == #self.order
  for i, entry in ipairs(self.order) do
    n = n + #entry.opt.list
    same = same and self.named[i] == entry.opt
  end
  if not same then
    local all, sets, group_of, names = {}, {}, {}, {}
    self.named = {}
    for i, entry in ipairs(self.order) do
      self.named[i] = entry.opt
      names[i] = #self.order > 1 and ("%s %d"):format(entry.opt.name, i) or entry.opt.name
      sets[i] = { params = entry.opt.params, n = #entry.opt.list }
      for _, p in ipairs(entry.opt.list) do
        all[#all + 1] = p
        group_of[#all] = i
      end
    end
    local layers = groups.new(self.model, all, sets)
    if self.model then self.policy:tensors(layers.names, layers.group_of, layers.groups, true)
    else self.policy:tensors(layers.names, group_of, names) end
    self.groups = self.model and layers
    self.stats = wanted and ffi.new("eng_tensor_stats[?]", n)
  end
  if not wanted then return nil end
  local at = 0
  for _, entry in ipairs(self.order) do
    ffi.copy(self.stats + at, entry.stats, #entry.opt.list * ffi.sizeof("eng_tensor_stats"))
    at = at + #entry.opt.list
  end
  return self.stats
end

-- Returns, as text, the part of a verdict that comes too late for a scaler, or nil. stepped:
-- whether an optimizer has made its update. overflow: whether any gradients overflowed.
local function too_late(verdict, stepped, overflow)
  local action = verdict:what()
  if action ~= "step" and action ~= "skip" then return "action = '" .. action .. "'" end
  if not stepped then return nil end
  if action == "skip" and not overflow then return "action = 'skip' without an overflow" end
  if verdict.clip > 0 then return ("clip = %g"):format(verdict.clip) end
  if verdict.lr_mul ~= 1 then return ("lr_mul = %g"):format(verdict.lr_mul) end
end

--- Ends the step: the policy reads the statistics of the optimizers' gradients and decides on the
--- next scale. Returns the policy's verdict, or nil if the scaler is disabled. If `new_scale` is a
--- number, it becomes the scale instead, the policy's counters do not change, and the result is
--- nil. A verdict of retry, stop or rollback raises an error. Once an optimizer has stepped, a
--- clip, an lr_mul or a skip without an overflow also raises an error.
function Scaler:update(new_scale)
  if not self.enabled then return nil end
  need_scale(self, "update")
  local verdict
  if new_scale ~= nil then
    expect(type(new_scale) == "number" and new_scale > 0 and new_scale < math.huge, new_scale,
      "scaler:update: expected a positive finite scale")
    self.policy:set_scale(f32(new_scale))
  else
    local any = false
    for _, entry in ipairs(self.order) do any = any or entry.checked end
    raise_if(not any, "scaler:update: no gradients were checked for inf and nan since the last " ..
      "update(); call step() or unscale() first")
    for name, value in pairs(signals.values) do self.policy:signal(name, value) end
    verdict = self.policy:decide(add_up(self), stats_of(self))
    if self.groups then self.groups:apply(self.policy) end
    self.attempts = self.attempts + 1
  end
  local stepped = false
  for _, entry in ipairs(self.order) do stepped = stepped or entry.stepped end
  self.optimizers, self.order = {}, {}
  if stepped then self.updates = self.updates + 1 end
  self.loss = nil
  local late = verdict and verdict.failed == 0 and too_late(verdict, stepped,
    self.total.overflow ~= 0)
  raise_if(late,
    "scaler:update: policy %s gave the verdict %s, which comes too late for a scaler; hint: " ..
    "engine.session and engine.trainer carry out whole verdicts", self.policy.name, late)
  return verdict
end

--- Returns the state that a resumed run needs, or {} if the scaler is disabled.
function Scaler:state_dict()
  if not self.enabled then return {} end
  return { policy = self.policy.name, state = self.policy:save(), scale = self:get_scale(),
    attempts = self.attempts, updates = self.updates }
end

--- Restores a state_dict(). Disabled scalers ignore it.
function Scaler:load_state_dict(dict)
  if not self.enabled then return end
  expect(type(dict) == "table", dict, "scaler:load_state_dict: expected a state_dict()")
  raise_if(next(dict) == nil, "scaler:load_state_dict: the state is empty; it may come from a " ..
    "scaler that was disabled when it was saved")
  raise_if(dict.policy ~= self.policy.name,
    "scaler:load_state_dict: the state is of policy '%s', but this scaler uses '%s'; hint: " ..
    "engine.scaler{ policy = '%s' }", tostring(dict.policy), self.policy.name,
    tostring(dict.policy))
  expect(type(dict.state) == "string", dict.state,
    "scaler:load_state_dict: expected the field state to be a string")
  self.policy:restore(dict.state)
  self.attempts, self.updates = dict.attempts or 0, dict.updates or 0
end

function Scaler:__tostring()
  if not self.enabled then return "scaler: disabled" end
  return ("scaler: %s; %s, %s"):format(tostring(self.policy),
    show.counted(self.attempts, "attempt"), show.counted(self.updates, "update"))
end

return M
