-- Refuses policies and modes that a run cannot use: policies whose needs the run cannot meet, and
-- everything that does not work with mode = "lagged" or graph = true. In a lagged run the device
-- decides whether an update is made, and the policy reads the record one step later. Nothing can
-- therefore depend on the policy's verdict within the same step:
--   - a new scale takes effect two steps, not one, after the step whose record the policy read; the
--     device still skips an overflowed update immediately;
--   - a verdict of `skip` without an overflow, or of `retry`, comes too late: the verdict's action
--     becomes what the device did (apply_lag in policy/policy.lua), also in the history; so does
--     that of `stop` and `rollback`, which the run then carries out;
--   - clip and lr_mul come from the last verdict, usually that of two steps before; policies that
--     set a verdict's fields for single tensors, updates or moments are refused;
--   - the schedule counts the update in flight as applied.
-- A captured graph repeats the kernels of one step, so no per-layer scale or FP8 scale may change.
-- Called by scaler.lua, by assemble.lua at the start, and by trainer.lua: after each decision, for
-- every policy that run/swap.lua tries, and when a resumed run changes `accumulate`.
local M_ffi = require "engine.base.ffi"
local activations = require "engine.train.activations"
local attention_logits = require "engine.train.attention_logits"
local fused_state = require "engine.train.fused_state"
local machine = require "engine.base.machine"
local policies = require "engine.policy.policy"

local C = M_ffi.C

local M = {}

-- The reasons why a run cannot meet a need of a policy: name = function(trainer) that returns the
-- reason, or nil or false if the run can meet the need.
local LACKS = {
  lagged = function(t)
    return t.delay == 1 and "with mode=lagged, the update comes before the policy's decision; " ..
      "hint: mode=sync"
  end,
  card = function()
    return machine.device() == "cuda" and "no CUDA kernel computes this; hint: device=cpu"
  end,
  fused = function(t)
    return t.optimizer.whole and ("optimizer %s is written in Lua; hint: use %s"):format(
      t.optimizer.name, fused_state.names "or")
  end,
  spike_clip = function(t)
    return bit.band(t.optimizer.traits, C.ENG_SPIKE_CLIP) == 0 and ("only the optimizers %s " ..
      "have this, and the optimizer is %s"):format(fused_state.names("and", C.ENG_SPIKE_CLIP),
      t.optimizer.name)
  end,
  heads = function(t)
    return not attention_logits.modules(t.model) and "the model has no nn.attention"
  end,
  modules = function(t)
    return not activations.modules(t.model, t.activation_pattern) and (t.activation_pattern
      and ("no module of the model matches activations = '%s'"):format(t.activation_pattern)
      or "the model has no list of modules, such as blocks; hint: activations = a Lua pattern " ..
        "of module names")
  end,
  scalable = function(t) return attention_logits.fixed(t.model) end,
  whole = function(t)
    return (t.reducer.zero or t.reducer.apart) and "each rank updates only a part of the weights" ..
      (t.reducer.zero and "; hint: zero=0" or "")
  end,
}
-- The needs of a shadow that the run must meet. A shadow's verdicts change nothing, so its other
-- needs do not matter.
local STATISTICS = C.ENG_NEED_UPDATE_NORMS + C.ENG_NEED_SIGNALS
-- The needs that only some runs can meet: name, and the entries of LACKS that apply.
local UPDATE = { "lagged", "fused", "whole" }
local NEEDS = {
  { "update_norm", UPDATE }, { "weight_norm", UPDATE }, { "m_norm", UPDATE }, { "v_norm", UPDATE },
  { "update_clip", UPDATE }, { "spike_clip", { "lagged", "spike_clip" } },
  { "clips", { "lagged" } }, { "lr_muls", { "lagged" } }, { "reset_moments", { "lagged" } },
  { "caps", { "lagged", "whole" } },
  { "grad_norms", { "lagged" } }, { "bias_step", { "lagged" } },
  { "activations", { "modules", "card" } }, { "logit_max", { "heads", "card" } },
  { "logit_muls", { "heads", "scalable", "lagged", "card", "whole" } },
}
local SOME_RUNS = 0
for _, need in ipairs(NEEDS) do
  need.bit = C["ENG_NEED_" .. need[1]:upper()]
  SOME_RUNS = bit.bor(SOME_RUNS, need.bit)
end
assert(SOME_RUNS == STATISTICS + C.ENG_NEED_VERDICT, "modes.lua: NEEDS lacks a need")

-- Returns the name of the first entry of NEEDS that a policy needs, or nil.
local function first_need(policy)
  for _, need in ipairs(NEEDS) do
    if bit.band(policy.needs, need.bit) ~= 0 then return need[1] end
  end
end

--- Returns why the scaler of an explicit loop (scaler.lua) cannot use a policy, or nil. A scaler's
--- policy decides after the updates, and a scaler watches no modules, so it meets none of NEEDS.
function M.scaler_refusal(policy)
  local need = first_need(policy)
  return need and ("policy %s needs %s, which a scaler of an explicit loop does not have; " ..
    "hint: engine.trainer"):format(policy.name, need)
end

local function session_refusal(policy)
  local need = first_need(policy)
  local what = need and ("needs %s, which a session does not have"):format(need)
    or bit.band(policy.needs, C.ENG_NEED_NORM_REF) ~= 0
    and "needs reference backward passes, but a session has no loss function to run again"
    or policy:scales_groups()
    and "sets scales per layer, but all gradients of a session have the same loss scale"
  return what and ("session: policy %s %s; hint: engine.trainer"):format(policy.name, what) or nil
end

-- Returns a line about the first need of a policy that this run cannot meet, or nil. mask: the
-- needs that count.
local function unfulfilled(trainer, policy, mask)
  for _, need in ipairs(bit.band(policy.needs, SOME_RUNS) ~= 0 and NEEDS or {}) do
    for _, lack in ipairs(bit.band(policy.needs, need.bit, mask) ~= 0 and need[2] or {}) do
      local why = LACKS[lack](trainer)
      if why then
        return ("policy %s needs %s, which this run lacks: %s"):format(policy.name, need[1], why)
      end
    end
  end
end

--- Returns why a policy cannot be used in this run, or nil. Possible reasons: the policy's scales
--- are outside f32's range, the run lacks statistics or verdict fields that the policy needs, or
--- the policy does not work with mode = "lagged", with graph = true or in a session.
function M.policy_refusal(trainer, policy)
  local unusable = policies.unusable(policy, #trainer.groups.groups)
  if unusable then return unusable end
  if trainer.by_hand then return session_refusal(policy) end
  local lacking = unfulfilled(trainer, policy, -1)
  if lacking then return lacking end
  if trainer.delay == 0 and not trainer.graph then return nil end
  local option = trainer.delay == 1 and "mode=lagged" or "graph=true"
  if trainer.delay == 1 and bit.band(policy.needs, C.ENG_NEED_NORM_REF) ~= 0 then
    return ("mode=lagged: policy %s needs reference backward passes, which wait for the device; "
      .. "hint: mode=sync"):format(policy.name)
  end
  if trainer.graph and policy.is_class and policy.object.scale_loss then
    return ("graph=true: loss scaler '%s' scales the loss itself, which a captured step does " ..
      "not repeat; hint: graph=false"):format(policy.name)
  end
  if not policy:scales_groups() then return nil end
  return ("%s: policy %s sets scales per layer, which needs the record of the same step; hint: %s")
    :format(option, policy.name, trainer.delay == 1 and "mode=sync" or "graph=false")
end

--- Returns why a run cannot use policies of FP8 layers, or nil.
function M.fp8_refusal(trainer)
  local lagged = trainer.delay == 1
  if not lagged and not trainer.graph then return nil end
  return ("%s: FP8 policies wait for the device, because they read each step's amaxes; "
    .. "hint: %s, or precision=fp8_current"):format(lagged and "mode=lagged" or "graph=true",
    lagged and "mode=sync" or "graph=false")
end

local function parted_refusal(trainer)
  local reducer, fp8 = trainer.reducer, trainer.optimizer.fp8
  if not reducer.parted then return nil end
  if machine.device() ~= "cpu" then return "zero=3 works on the CPU only; hint: zero=2" end
  for _, site in ipairs(fp8 and not reducer.apart and fp8.list or {}) do
    if site.path:find("%f[^%z.]experts%.%d+%.") then
      return ("zero=3: precision %s gathers the weights of each expert separately, which fails " ..
        "when ranks use different experts; hint: zero=2, or experts_over"):format(
        trainer.precision.name)
    end
  end
  if fp8 and #fp8.averages.list > 0 then
    return ("zero=3: precision %s averages the weights over steps, so every rank needs all of " ..
      "them; hint: zero=2"):format(trainer.precision.name)
  end
end

--- Returns why a trainer cannot work with its policies, shadows, mode and other options, or nil.
function M.refusal(trainer)
  local lagged, graph, reducer = trainer.delay == 1, trainer.graph, trainer.reducer
  local optimizer, sites = trainer.optimizer, trainer.optimizer.fp8
  local cpu, problem = machine.device() == "cpu", M.policy_refusal(trainer, trainer.policy)
  -- If `bad` is true and there is no problem yet, the problem is the text, which may be a format.
  local function refuse(bad, text, ...)
    if bad then problem = problem or text:format(...) end
  end
  for _, shadow in ipairs(trainer.shadows and trainer.shadows.list or {}) do
    problem = problem or unfulfilled(trainer, shadow.policy, STATISTICS)
  end
  local lack = trainer.activation_pattern and (LACKS.modules(trainer) or LACKS.card(trainer))
  refuse(lack, "activations: %s", lack)
  if sites and (#sites.policies > 0 or sites.watched) then
    problem = problem or M.fp8_refusal(trainer)
  end
  refuse(lagged and trainer.overflows.every_time, "mode=lagged: trap runs an overflowed step " ..
    "again, but the next step has begun by then; hint: mode=sync")
  refuse(lagged and optimizer.whole, "mode=lagged: the device decides whether to update, and " ..
    "optimizer %s is written in Lua; hint: mode=sync", optimizer.name)
  refuse(graph and cpu, "graph=true: the CPU cannot capture steps; hint: device=cuda, or " ..
    "graph=false")
  refuse(graph and trainer.accumulate > 1, "graph=true: a captured step has one batch, got " ..
    "accumulate=%d; hint: accumulate=1, or graph=false", trainer.accumulate)
  refuse(graph and reducer.many, "graph=true: several ranks reduce gradients inside the " ..
    "backward pass, which a captured step cannot do; hint: graph=false")
  refuse(lagged and trainer.accumulate > C.ENG_STATS_LOSSES, "mode=lagged: expected accumulate " ..
    "to be at most %d, got %d; hint: mode=sync", C.ENG_STATS_LOSSES, trainer.accumulate)
  problem = problem or parted_refusal(trainer)
  local divides = reducer.apart and "each rank holds only some of the experts"
    or reducer.zero and not cpu and "with ZeRO each rank holds a part of the gradients"
  refuse(lagged and divides, "mode=lagged: %s, so no rank's device knows whether a step " ..
    "overflowed; hint: mode=sync", divides)
  return problem
end

return M
