-- Shadows: policies that see every record of a run and decide nothing. The history gets their
-- verdicts where they change. The summary counts the steps they would have skipped, how far their
-- scale is from the current one, and the steps at which their scale would have pushed the largest
-- gradient past its format's range. Made by the trainer from its option `shadow`.
local M_ffi = require "engine.base.ffi"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local Shadows = {}
Shadows.__index = Shadows

-- formats whose range is smaller than f32's
local LARGEST = { f16 = require("engine.base.formats").of("f16").largest }

-- "a,b:growth_interval=500,init_scale=8" -> { "a", "b:growth_interval=500,init_scale=8" }: a
-- `name=value` belongs to the policy before it.
local function split(text)
  local list = {}
  for part in text:gmatch("[^,]+") do
    if part:find("^[%a_][%w_]*=") and #list > 0 then list[#list] = list[#list] .. "," .. part
    else list[#list + 1] = part end
  end
  return list
end

-- A shadow's name: its text in the option `shadow`, with a number if the name is taken.
local function name_of(source, policy, taken)
  local name = type(source) == "string" and source or policy.name
  local base, n = name, 1
  while taken[name] do
    n = n + 1
    name = base .. "#" .. n
  end
  taken[name] = true
  return name
end

--- shadow: "a,b", or a list of what engine.policy.load takes. Returns nil without any.
function M.new(trainer, shadow)
  if type(shadow) == "string" then shadow = split(shadow) end
  if not shadow or #shadow == 0 then return nil end
  local self = setmetatable({ trainer = trainer, list = {}, needs = 0, steps = 0, skipped = 0,
    limit = LARGEST[trainer.precision.weight_gradients] }, Shadows)
  local taken = {}
  for i, source in ipairs(shadow) do
    local loaded, policy = pcall(require("engine.policy.policy").load, source)
    if not loaded then error("shadow: " .. policy, 0) end
    if policy == trainer.policy then
      error("trainer: a shadow must be a separate policy, not the current one", 0)
    end
    trainer:prepare(policy)
    self.needs = bit.bor(self.needs, policy.needs)
    self.list[i] = { name = name_of(source, policy, taken), policy = policy, skipped = 0,
      beyond = 0, failed = 0, apart = 0, most = 0 }
  end
  return self
end

--- Gives the shadows a step: record, statistics, the current policy's verdict, the step's signals.
function Shadows:observe(record, stats, verdict, signals, run)
  self.steps = self.steps + 1
  if verdict.action ~= C.ENG_ACTION_STEP then self.skipped = self.skipped + 1 end
  local limit = self.limit and record.overflow == 0 and self.limit or nil
  for _, s in ipairs(self.list) do
    local policy = s.policy
    -- its own scale for this step
    if limit and record.amax * policy:scale() > limit then s.beyond = s.beyond + 1 end
    for name, value in pairs(signals) do policy:signal(name, value) end
    local own = policy:decide(record, stats)
    if own.failed ~= 0 then s.failed, s.why = s.failed + 1, ffi.string(own.reason) end
    if own.action ~= C.ENG_ACTION_STEP then s.skipped = s.skipped + 1 end
    local apart = math.log(own.scale / verdict.scale) / math.log(2)
    s.apart, s.most = s.apart + math.abs(apart), math.max(s.most, math.abs(apart))
    if run.history and (own.scale ~= s.scale or own.action ~= s.action
      or own.failed ~= s.was_failed) then
      run:complain(run.history:append_shadow(record.step, s.name, own))
    end
    s.scale, s.action, s.was_failed = own.scale, own.action, own.failed
  end
end

-- 1 -> "equal", 2 -> "x2", 0.25 -> "x0.25", 2^20 -> "x2^20"
local function factor_text(x)
  local _, exponent = math.frexp(x)
  if math.abs(exponent) > 10 and x < math.huge then
    return ("x2^%.4g"):format(math.log(x) / math.log(2))
  end
  return x == 1 and "equal" or ("x%.4g"):format(x)
end

--- For the progress line: each shadow's scale as a multiple of the current one, and how often it
--- would have skipped.
function Shadows:text()
  local parts = {}
  for i = 1, math.min(3, #self.list) do
    local s = self.list[i]
    local skips = s.skipped - self.skipped
    parts[i] = s.name .. " " .. factor_text(s.policy:scale() / self.trainer.policy:scale()) ..
      (skips ~= 0 and (" %+d skipped"):format(skips) or "")
  end
  if #self.list > 3 then parts[4] = ("%d more"):format(#self.list - 3) end
  return "shadow scales relative to the run's: " .. table.concat(parts, ", ")
end

--- A line for each shadow, for the end of a run.
function Shadows:lines()
  local lines = {}
  if self.steps == 0 then return lines end
  local scale = self.trainer.policy:scale()
  for i, s in ipairs(self.list) do
    local text = ("shadow %s: would have skipped %d of %d steps (the run skipped %d), scale " ..
      "%.10g (%s)"):format(s.name, s.skipped, self.steps, self.skipped,
      s.scale, factor_text(s.scale / scale))
    if s.most > 0 then
      text = text .. (", apart by 2^%.2f on average, 2^%.2f at most"):format(s.apart / self.steps,
        s.most)
    end
    if s.beyond > 0 then
      text = text .. ("; its scale would have overflowed in %d more"):format(s.beyond)
    end
    if s.failed > 0 then text = text .. ("; it failed %d times: %s"):format(s.failed, s.why) end
    lines[i] = text
  end
  return lines
end

--- The state for checkpoints.
function Shadows:state()
  local state = { steps = self.steps, skipped = self.skipped, list = {} }
  for i, s in ipairs(self.list) do
    state.list[i] = { name = s.name, policy = s.policy.name, state = s.policy:save(),
      skipped = s.skipped, beyond = s.beyond, failed = s.failed, why = s.why,
      apart = s.apart, most = s.most, scale = s.scale, action = s.action,
        was_failed = s.was_failed }
  end
  return state
end

--- Restores the shadows that a checkpoint knows; others start fresh.
function Shadows:restore(saved)
  if type(saved) ~= "table" or type(saved.list) ~= "table" then return end
  local all = true
  for _, s in ipairs(self.list) do
    local found
    for _, old in ipairs(saved.list) do
      if old.name == s.name and old.policy == s.policy.name and pcall(s.policy.restore, s.policy,
        old.state) then
        found = old
      end
    end
    for _, key in ipairs { "skipped", "beyond", "failed", "why", "apart", "most", "scale", "action",
      "was_failed" } do
      if found then s[key] = found[key] end
    end
    all = all and found ~= nil
  end
  if all then self.steps, self.skipped = saved.steps, saved.skipped end
end

return M
