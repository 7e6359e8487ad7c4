-- Replays a policy of FP8 layers on a recorded run: the policy reads each step's record and the
-- step's meters from the history. Called by replay.lua, whose run() describes the results.
--
-- Meters are recorded at the steps that the recipe samples (its `sample`). At other steps a live
-- policy has no meters either, but it sees amaxes, inf and nan, which the history lacks. So if a
-- policy needs amaxes, its verdicts are bounds, beginning with the first step without meters. For
-- policies that do not need amaxes, the replay assumes that tensors are finite at these steps. If
-- the run samples no steps, all verdicts are bounds.
local M_ffi = require "engine.base.ffi"
local counterfactual = require "engine.run.counterfactual"
local fp8_verdict = require "engine.policy.fp8_verdict"
local json = require "engine.base.json"

local C, ffi, fail_if = M_ffi.C, M_ffi.ffi, M_ffi.fail_if

local M = {}

-- Returns what the history says about the run's FP8 layers: { layers = { path ... }, sample = the
-- steps between measurements, rungs = the number of rungs a layer can be on (fp8_recipe.lua) }.
local function facts_of(h, policy)
  local meta = h:meta()
  local good, facts = pcall(json.decode, meta.fp8 or "")
  if not good or type(facts) ~= "table" or type(facts.layers) ~= "table"
    or #facts.layers == 0 or type(facts.sample) ~= "number"
    or type(facts.rungs) ~= "number" then
    local older = h:has "fp8" and h:query("SELECT 1 FROM fp8 LIMIT 1")[1]
    error(("policy %s works on FP8 layers, and %s has no record of such layers: its precision " ..
      "is %s%s"):format(policy.name, h.path, tostring(meta.precision or "unknown"),
      older and ", and an older engine wrote it" or ""), 0)
  end
  fail_if(not h:has "fp8",
    "history %s is damaged: it has FP8 layers, but no table fp8 with their meters", h.path)
  return facts
end

-- Fills the statistics of a tensor from a row of `fp8`, as train/fp8_sites.lua does live.
local function fill(s, row)
  local count, peak = row.count or 0, row.peak or 0 / 0
  local function part(share) return math.floor((share or 0) * count + 0.5) end
  s.amax = peak < math.huge and peak or 0
  if peak ~= peak then s.nan = 1 elseif peak == math.huge then s.inf = 1 end
  s.measured, s.count, s.zeros = count, count, part(row.zeros)
  s.underflow, s.clipped = part(row.underflow), part(row.overflow)
  s.sum_squares, s.snr = row.power or 0, row.snr or 0 / 0
end

-- Returns a function from a step to the rows of its meters. Call it with steps that never decrease.
local function meters_at(h)
  local following = h:each "SELECT * FROM fp8 ORDER BY step, site, role"
  local row, at, held = following(), nil, {}
  return function(step)
    if step == at then return held end
    at, held = step, {}
    while row and row.step <= step do
      if row.step == step then held[#held + 1] = row end
      row = following()
    end
    return held
  end
end

-- Returns f(rungs, step), which changes `rungs` to the run's rungs after the verdict on that step.
-- Call it with steps that never decrease. number: the index of each layer, by path.
local function layers_at(h, number)
  local following = h:each "SELECT step, data FROM events WHERE kind = 'layers' ORDER BY id"
  local event = following()
  return function(rungs, step)
    while event and event.step <= step do
      local good, moved = pcall(json.decode, tostring(event.data))
      for path, rung in pairs(good and type(moved) == "table" and moved or {}) do
        if number[path] then rungs[number[path]] = tonumber(rung) end
      end
      event = following()
    end
  end
end

-- Fills `stats` [n] and run.amaxes with the measurements of a step, from its rows of `fp8`. tensor:
-- the index (from 1) of each tensor, by name. Returns { [index] = whether policies could choose the
-- tensor's scale }.
local function show(stats, n, run, rows, tensor)
  local asked = {}
  ffi.fill(stats, ffi.sizeof("eng_tensor_stats") * n)
  for k = 0, n - 1 do stats[k].relative_scale = 1 end
  run.amaxes = {}
  for _, row in ipairs(rows) do
    local k = tensor[row.site .. ":" .. row.role]
    if k then
      fill(stats[k - 1], row)
      asked[k] = row.asked ~= nil
      run.amaxes[k] = row.asked and row.asked > 0 and row.asked or nil
    end
  end
  return asked
end

local STEP = { action = C.ENG_ACTION_STEP }

local function replay(h, trace, policy)
  local facts = facts_of(h, policy)
  local paths, most = {}, facts.rungs
  for i, path in ipairs(facts.layers) do paths[i] = tostring(path) end
  local names, tensor, layer = fp8_verdict.prepare(policy, paths), {}, {}
  for i, name in ipairs(names) do tensor[name] = i end
  for i, path in ipairs(paths) do layer[path] = i end
  local stats, record = ffi.new("eng_tensor_stats[?]", #names), ffi.new("eng_record")
  local meters, move = meters_at(h), layers_at(h, layer)
  local run, before = fp8_verdict.places({}, names, most), fp8_verdict.places({}, names, most).rungs
  -- how certain the record of a step without meters is
  local unmeasured = bit.band(policy.needs, C.ENG_NEED_AMAX) ~= 0 and "no amaxes"
    or facts.sample == 0 and "no meters" or "exact"
  local needs = bit.band(policy.needs, bit.bnot(C.ENG_NEED_TENSORS))
  local result = { name = policy.name, file = policy.file, options = policy.options,
    changed = policy:changed(), fp8 = true, marks = {}, certainty = counterfactual.certainty(),
    moves = {}, failures = 0, apart = 0, high = 0 }
  local ever = {}
  for i = 1, trace.n do
    local row = trace.rows[i - 1]
    local step = tonumber(row.step)
    local asked = show(stats, #names, run, meters(step), tensor)
    trace:at(record, i, row.scale, needs)
    record.scale = 1
    local verdict = policy:decide(record, stats)
    local wanted, problem = fp8_verdict.places({ policy }, names, most)
    if verdict.failed ~= 0 or problem then
      result.failures = result.failures + 1
      result.failure = result.failure or problem or verdict:why()
    end
    result.logs = policy:add_logs(result.logs, i)
    move(run.rungs, step)
    local departs = fp8_verdict.differs(wanted, run, function(k) return asked[k] end)
    local measured = facts.sample > 0 and step % facts.sample == 0
    result.marks[i] = counterfactual.judge(result.certainty, step,
      measured and "exact" or unmeasured, STEP, STEP, departs) and "exact" or "bound"
    result.apart = result.apart + (departs and 1 or 0)
    local moved = fp8_verdict.moved(paths, before, wanted.rungs)
    if moved then
      result.moves[#result.moves + 1] = { step = step, layers = moved, reason = verdict:why(),
        text = fp8_verdict.text(moved, most) }
    end
    before = wanted.rungs
    for k, rung in ipairs(before) do
      if rung > 1 then result.high, ever[k] = result.high + 1 / #paths, true end
    end
  end
  result.steps, result.layers, result.of = trace.n, 0, #paths
  for _ in pairs(ever) do result.layers = result.layers + 1 end
  result.high = result.high / trace.n
  return result
end

--- Replays a policy of FP8 layers on a trace; see replay.lua.
function M.run(trace, policy)
  fail_if(not trace.names, "policy %s works on FP8 layers; expected a run, because a string of " ..
    "outcomes has no layers", policy.name)
  local result, why = require("engine.run.history").with(trace.name,
    function(h) return replay(h, trace, policy) end)
  return result or error(why, 0)
end

return M
