-- Runs shadows: policies that see every record of a run and decide nothing. A shadow has its own
-- scale. It reads the run's record converted to that scale, with the overflows that this scale
-- would cause. counterfactual.lua converts the record and decides whether a verdict is exact or a
-- bound. The history records a verdict when it changes. The summary gives the number of steps that
-- a shadow would have skipped, and the ratio of its scale to the run's scale. The trainer makes the
-- shadows from its option `shadow`.
--
-- A shadow of FP8 layers reads the meters that the run's own FP8 policies read. The history has an
-- event `shadow_layers` at each step where the shadow would have moved layers to a different rung
-- (a recipe of the ladder, or high precision), and an event `shadow_failed` where a shadow first
-- fails. Called by the trainer.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local counterfactual = require "engine.run.counterfactual"
local fp8_verdict = require "engine.policy.fp8_verdict"
local formats = require "engine.base.formats"
local show = require "engine.base.show"

local C, ffi, fail_if = M_ffi.C, M_ffi.ffi, M_ffi.fail_if

local M = {}

local Shadows = {}
Shadows.__index = Shadows

-- Splits "a,b:growth_interval=500,init_scale=8" into { "a", "b:growth_interval=500,init_scale=8" }.
-- A `name=value` belongs to the policy before it.
local function split(text)
  local list = {}
  for part in (text .. ","):gmatch("(.-),") do
    fail_if(part == "", "shadow: expected policies separated by commas, got '%s'", text)
    if part:find("^[%a_][%w_]*=") and #list > 0 then list[#list] = list[#list] .. "," .. part
    else list[#list + 1] = part end
  end
  return list
end

-- Returns a shadow's name: its text in the option `shadow`, or the policy's name if `source` is no
-- text; with a number if the name is taken.
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

--- Loads a trainer's shadows. shadow: "a,b", or a list of policies as engine.policy.load takes
--- them. Returns nil if there are no shadows.
function M.new(trainer, shadow)
  if shadow == nil or shadow == "" then return nil end
  if type(shadow) == "string" then shadow = split(shadow) end
  arguments.want_list(shadow, "trainer", "shadow", '{ "dynamic", "max_value" }')
  if #shadow == 0 then return nil end
  local sites = trainer.optimizer.fp8
  -- all: every shadow; layers: those of FP8 layers; list: the others
  local self = setmetatable({ trainer = trainer, all = {}, list = {}, layers = {}, needs = 0,
    record = ffi.new("eng_record") }, Shadows)
  local taken, seen = {}, {}
  for _, source in ipairs(shadow) do
    fail_if(seen[source], "shadow: %s is listed twice", M_ffi.value_text(source))
    seen[source] = true
    local loaded, policy = pcall(require("engine.policy.policy").load, source, nil,
      sites and "any" or nil)
    if not loaded then error("shadow: " .. policy, 0) end
    fail_if(policy == trainer.policy,
      "shadow: expected another policy than the trainer's, got the trainer's policy %s",
      policy.name)
    -- steps: the number of steps that the shadow saw; run_skipped: how many of them the run skipped
    local one = { name = name_of(source, policy, taken), policy = policy, steps = 0,
      run_skipped = 0, skipped = 0, failed = 0, apart = 0, most = 0,
      certainty = counterfactual.certainty() }
    self.all[#self.all + 1] = one
    if policy.fp8 then
      sites.seats[1]:prepare(policy)
      sites:use(true)
      one.rungs = fp8_verdict.places({}, sites.names, sites.rungs).rungs
      self.layers[#self.layers + 1] = one
    else
      trainer:prepare(policy)
      self.needs = bit.bor(self.needs, policy.needs, C.ENG_NEED_AMAX, C.ENG_NEED_HIST)
      self.list[#self.list + 1] = one
    end
  end
  return self
end

-- Returns the largest fp16 gradient, as stored under a shadow's scales, if layers have separate
-- scales that differ from the run's by different factors. Otherwise returns nil. ratio: the
-- shadow's global scale over the run's.
function Shadows:reach(policy, stats, ratio)
  local groups, largest, apart = self.trainer.groups, -1, false
  if not groups.apart and not policy:scales_groups() then return nil end
  local record, list = self.record, self.trainer:fp16_gradients()
  for _, i in ipairs(list) do
    local relative = stats[i].relative_scale > 0 and stats[i].relative_scale or 1
    local own = policy:group_scale(groups.group_of[i + 1]) / (record.scale * relative)
    apart, largest = apart or own ~= ratio, math.max(largest, stats[i].amax * own)
  end
  return apart and largest or nil
end

-- Returns the statistics of all tensors at a shadow's scale, for policies that read them. stats:
-- the run's own. ratio: the shadow's scale over the run's.
function Shadows:tensors(stats, ratio)
  local n = #self.trainer.optimizer.list
  self.stats = self.stats or ffi.new("eng_tensor_stats[?]", n)
  ffi.copy(self.stats, stats, n * ffi.sizeof("eng_tensor_stats"))
  counterfactual.move_tensors(self.stats, n, ratio,
    function(i) return formats.of(self.formats[i]) or self.format end)
  return self.stats
end

-- Counts a failure of a shadow. Shows and records only the shadow's first failure.
local function count_failure(self, one, step, reason, run)
  one.failed, one.why = one.failed + 1, reason
  if one.failed > 1 then return end
  local text = ("shadow %s failed: %s (later failures are counted, not shown)"):format(one.name,
    reason)
  self.trainer:note(("step %d: %s"):format(step, text))
  run:event(step, "shadow_failed", text)
end

-- Converts a step's record to `scale`, the scale of the shadow s, in self.record. Returns the
-- shadow's verdict on the converted record, and how certain this record is (the first result of
-- counterfactual.move).
function Shadows:ask(s, scale, record, stats, signals)
  local policy, own = s.policy, self.record
  ffi.copy(own, record, ffi.sizeof(own))
  local ratio = scale / record.scale
  local known = counterfactual.move(own, scale, { format = self.format,
    accumulate = self.trainer.accumulate, needs = policy.needs, hist = true,
    around = function() return self.largest end, reach = self:reach(policy, stats, ratio) })
  if ratio ~= 1 and bit.band(policy.needs, C.ENG_NEED_TENSORS) ~= 0 then
    stats = self:tensors(stats, ratio)
  end
  for name, value in pairs(signals) do policy:signal(name, value) end
  return policy:decide(own, stats), known
end

--- Returns the scales that the shadows would use for a step that begins now.
function Shadows:scales()
  local list = {}
  for i, s in ipairs(self.list) do list[i] = s.policy:scale() end
  return list
end

--- Passes a step to the shadows: the trainer's step table s (with shadow_scales and signals), its
--- record (with amax_f16) and statistics, the current policy's verdict, and whether the weights
--- were updated. `run` is the Run that records the decisions.
function Shadows:observe(s, record, stats, verdict, updated, run)
  local step, trainer = tonumber(record.step), self.trainer
  local recipe = s.recipe
  if self.recipe ~= recipe then                            -- set_precision may change it
    self.recipe, self.formats = recipe, trainer:gradient_formats(recipe)
    self.format = formats.of(recipe.weight_gradients) or formats.of "f16"
  end
  for i, one in ipairs(self.list) do
    one.steps, one.run_skipped = one.steps + 1, one.run_skipped + (updated and 0 or 1)
    local own, known = self:ask(one, s.shadow_scales[i], record, stats, s.signals)
    local over = self.record.overflow ~= 0
    local asked = trainer.delay == 1 and own:apply_lag(over) or own.action
    local bound = not counterfactual.judge(one.certainty, step, known, own, verdict,
      (asked == C.ENG_ACTION_ROLLBACK) ~= trainer:asks(verdict, C.ENG_ACTION_ROLLBACK))
    if own.failed ~= 0 then count_failure(self, one, step, own:why(), run) end
    if own.action ~= C.ENG_ACTION_STEP then one.skipped = one.skipped + 1 end
    local apart = math.log(own.scale / verdict.scale) / math.log(2)
    one.apart, one.most = one.apart + math.abs(apart), math.max(one.most, math.abs(apart))
    if run.history and (own.scale ~= one.scale or own.action ~= one.action
      or own.failed ~= one.was_failed or over ~= one.over or bound ~= one.bound) then
      run:complain(run.history:append_shadow(step, one.name, own, over, bound))
    end
    one.scale, one.action, one.was_failed = own.scale, own.action, own.failed
    one.over, one.bound = over, bound
  end
  if record.overflow == 0 and record.amax_f16 > 0 then
    self.largest = record.amax_f16 / record.scale
  end
end

local STEP = { action = C.ENG_ACTION_STEP }

--- Passes a step to the shadows of FP8 layers, after the run's own policies have decided.
function Shadows:observe_layers(step, record, sites, run)
  if #self.layers == 0 then return end
  local places = sites:places()
  local function scaled(k) return sites:scaled(k) end
  for _, one in ipairs(self.layers) do
    local own = sites.seats[1]:ask(one.policy, record)
    local wanted, problem = fp8_verdict.places({ one.policy }, sites.names, sites.rungs)
    local moved = fp8_verdict.moved(sites.paths, one.rungs, wanted.rungs)
    local departs = fp8_verdict.differs(wanted, places, scaled)
    local bound = not counterfactual.judge(one.certainty, step, "exact", STEP, STEP, departs)
    local reason = own.failed == 0 and problem or own:why()
    if own.failed ~= 0 or problem then
      own.failed = 1
      count_failure(self, one, step, reason, run)
    end
    one.rungs, one.apart = wanted.rungs, one.apart + (departs and 1 or 0)
    one.steps = one.steps + 1
    if moved then
      run:event(step, "shadow_layers", ("shadow %s: %s%s"):format(one.name,
        fp8_verdict.text(moved, sites.rungs), reason ~= "" and " (" .. reason .. ")" or ""),
        { shadow = one.name, layers = moved })
    end
    if run.history and (moved or own.failed ~= one.was_failed or bound ~= one.bound) then
      own.scale, own.action = 0 / 0, C.ENG_ACTION_STEP     -- FP8 policies choose neither
      own.reason = ("%s%s"):format(fp8_verdict.off(sites.paths, one.rungs, sites.rungs),
        reason ~= "" and " (" .. reason .. ")" or ""):sub(1, 255)
      run:complain(run.history:append_shadow(step, one.name, own, false, bound))
    end
    one.was_failed, one.bound = own.failed, bound
  end
end

-- Returns a factor as text: 1 -> "equal", 2 -> "x2", 0.25 -> "x0.25", 2^20 -> "x2^20".
local function factor_text(x)
  local _, exponent = math.frexp(x)
  if math.abs(exponent) > 10 and x < math.huge then
    return ("x2^%.4g"):format(math.log(x) / math.log(2))
  end
  return x == 1 and "equal" or ("x%.4g"):format(x)
end

--- Returns a text for the progress line. For the first three shadows, the text gives their scales
--- as multiples of the run's scale, and how many more steps than the run they would have skipped.
--- For the first three shadows of FP8 layers, it gives the number of layers that are on another
--- rung than in the run.
function Shadows:text()
  local parts, places = {}, {}
  local sites = self.trainer.optimizer.fp8
  for i = 1, math.min(3, #self.layers) do
    local moved = fp8_verdict.moved(sites.paths, sites:places().rungs, self.layers[i].rungs)
    local n = #require("engine.base.nearest").keys(moved or {})
    places[i] = ("shadow %s: %s on another rung than in the run"):format(self.layers[i].name,
      show.counted(n, "layer"))
  end
  for i = 1, math.min(3, #self.list) do
    local s = self.list[i]
    local skips = s.skipped - s.run_skipped
    parts[i] = s.name .. " " .. factor_text(s.policy:scale() / self.trainer.policy:scale()) ..
      (skips ~= 0 and (" %+d skipped"):format(skips) or "")
  end
  if #self.list > 3 then parts[4] = ("%d more"):format(#self.list - 3) end
  if #parts > 0 then
    table.insert(places, 1, "shadow scales relative to the run's: " .. table.concat(parts, ", "))
  end
  return table.concat(places, ", ")
end

-- Returns the end of a shadow's line: why its verdicts are bounds, and why it failed.
local function doubts(s)
  local bounds = counterfactual.why_text(s.certainty)
  return (bounds and "; " .. bounds or "") ..
    (s.failed > 0 and ("; it failed in %s, most recently: %s"):format(
      show.counted(s.failed, "step"), s.why) or "")
end

--- Returns a line about each shadow, for the end of a run.
function Shadows:lines()
  local lines, scale = {}, self.trainer.policy:scale()
  local function add(s, text) if s.steps > 0 then lines[#lines + 1] = text .. doubts(s) end end
  for _, s in ipairs(self.list) do
    local own = s.scale or s.policy:scale()
    local text = ("shadow %s: would have skipped %s of %d steps at its own scale (the run " ..
      "skipped %d); that scale ended at %s (relative to the run's: %s)"):format(s.name,
      counterfactual.count_text(s.certainty, s.skipped), s.steps, s.run_skipped,
      show.scale(own), factor_text(own / scale))
    if s.most > 0 then
      text = text .. (" and differed from the run's by a factor of 2^%.2f on " ..
        "average, 2^%.2f at most"):format(s.apart / s.steps, s.most)
    end
    add(s, text)
  end
  local sites = self.trainer.optimizer.fp8
  for _, s in ipairs(self.layers) do
    add(s, ("shadow %s: would have computed FP8 layers differently in %d of %d steps; at the " ..
      "end: %s"):format(s.name, s.apart, s.steps,
      fp8_verdict.off(sites.paths, s.rungs, sites.rungs)))
  end
  return lines
end

-- The fields of a shadow that a checkpoint stores, besides the policy's state.
local KEPT = { "steps", "run_skipped", "skipped", "failed", "why", "apart", "most",
  "scale", "action", "was_failed", "over", "bound", "certainty", "rungs" }

--- Returns whether one of the shadows has this name.
function Shadows:has(name)
  for _, s in ipairs(self.all) do
    if s.name == name then return true end
  end
  return false
end

--- Returns the state of the shadows for a checkpoint.
function Shadows:state()
  local state = { largest = self.largest, list = {} }
  for i, s in ipairs(self.all) do
    local kept = { name = s.name, policy = s.policy.name, state = s.policy:save() }
    for _, key in ipairs(KEPT) do kept[key] = s[key] end
    state.list[i] = kept
  end
  return state
end

-- Restores a shadow's policy from `old`, its part of a checkpoint. Raises an error if `old` does
-- not fit. most: the rung of high precision, the highest.
local function regain(s, old, most)
  local rungs = s.rungs and old.rungs
  for i = 1, rungs and math.max(#s.rungs, #rungs) or 0 do
    local rung = rungs[i]
    fail_if(not (s.rungs[i] and rung and rung >= 1 and rung <= most),
      "rungs[%d]: expected a number from 1 to %d for each of the %d layers, got %s", i, most,
      #s.rungs, M_ffi.value_text(rung))
  end
  s.policy:restore(old.state)
end

--- Restores the shadows that a checkpoint contains. All other shadows start fresh. Adds lines about
--- the shadows whose saved state cannot be restored to `notes`.
function Shadows:restore(saved, notes)
  local sites = self.trainer.optimizer.fp8
  for _, s in ipairs(self.all) do
    local found
    for i, old in ipairs(saved.list) do
      if old.name == s.name and old.policy == s.policy.name then
        local good, why = pcall(regain, s, old, sites and sites.rungs)
        if good then found = old
        else
          notes[#notes + 1] = ("shadow %s starts fresh: state.shadows.list[%d]: %s"):format(s.name,
            i, M_ffi.without_line(why))
        end
      end
    end
    for _, key in ipairs(KEPT) do              -- a checkpoint of an older engine lacks some
      if found and found[key] ~= nil then s[key] = found[key] end
    end
    -- an older engine wrote the checkpoint; its shadows read the run's own overflows
    if found and not found.certainty then s.certainty = counterfactual.certainty(saved.steps) end
    -- older engines count the steps of all shadows together
    if found and not found.steps then s.steps, s.run_skipped = saved.steps, saved.skipped end
  end
  self.largest = saved.largest
end

return M
