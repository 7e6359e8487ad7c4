-- Describes in words what happened at a step of a run, h:why(step), and when an event happened.
-- Called by history.lua, report/report_tables.lua and cli/watch.lua.
local arguments = require "engine.base.arguments"
local formats = require "engine.base.formats"
local fp8_verdict = require "engine.policy.fp8_verdict"
local json = require "engine.base.json"
local show = require "engine.base.show"

local M = {}

-- The kinds of events between two steps that belong to the step before them. Their `step` is the
-- number of steps made so far, which is also the number of the next step.
local between = arguments.set_of "checkpoint evaluation rollback finished stopped error drift"

--- Returns when an event happened: "step 99", or "after 100 steps" for an event between two steps.
function M.when(event)
  if not between[event.kind] then return "step " .. show.grouped(event.step) end
  return "after " .. show.counted(event.step, "step")
end

-- Returns the first row of a query, or nil.
local function one(h, sql, ...) return h:query(sql, ...)[1] end

local outcomes = {
  step = "the weights were updated",
  skip = "skipped; the weights did not change",
  retry = "retried on the same batch; the weights did not change",
  stop = "the policy ended the run",
  rollback = "the policy asked for a rollback; the step made no update",
}

-- Formats a magnitude in plain digits.
local function plain(x) return (x >= 1e4 and x < 1e9 and "%.0f" or "%.4g"):format(x) end
local function percent(part, whole)
  return whole > 0 and ("%.3g %%"):format(100 * part / whole) or "none"
end

local function parameter_name(list, id)
  local p = list[id + 1]
  return p and ("%s %s (%s)"):format(p.name, p.shape, p.gradient) or "parameter " .. id
end

-- Returns text about the place and the format of a step's largest finite gradient. With statistics
-- per tensor, the text names the tensor and the format of its gradient. Without them, it names the
-- formats of all gradients, if these differ. If the gradient's format is known and has a smaller
-- range than f32, the text gives the format's largest number.
local function format_text(list, tensors)
  local most, at
  for i = 1, tensors and #tensors or 0 do
    local amax = tensors[i].amax / tensors[i].relative_scale
    if not most or amax > most then most, at = amax, i end
  end
  if at then
    local gradient = list[at] and list[at].gradient or "f16"
    local format = formats.of(gradient)
    return format and format.top < 64 and (" in %s (the largest %s is %g)"):format(
      tensors[at].name, gradient, format.largest) or (" in %s (%s)"):format(tensors[at].name,
      gradient)
  end
  local seen, names = {}, {}
  for _, p in ipairs(list) do
    if not seen[p.gradient] then seen[p.gradient], names[#names + 1] = true, p.gradient end
  end
  local format = #names == 1 and formats.of(names[1])
  if format then
    return format.top < 64 and (" (the largest %s is %g)"):format(format.name, format.largest) or ""
  end
  return #names > 0 and (" (gradients are %s)"):format(table.concat(names, " or ")) or ""
end

local MOST_TENSORS = 10   -- the most tensors that are listed by name

-- Returns the parameters at a step. If gradients of several micro-batches are summed in f32, the
-- `gradient` of a format of 16 bits says so.
local function parameters_at(h, step)
  local list = h:parameters(step)
  for _, p in ipairs(h:meta().summed == "true" and list or {}) do
    p.gradient = p.gradient == "f32" and "f32" or p.gradient .. " summed in f32"
  end
  return list
end

local function say_gradients(h, row, say)
  local list, tensors = parameters_at(h, row.step), h:tensors(row.step)
  if row.overflow then
    say("Of %d gradients, %d were inf and %d nan%s.", row.count, row.inf, row.nan,
      row.first_bad >= 0 and ", first in " .. parameter_name(list, row.first_bad) or "")
  else
    say("All %d gradients were finite; %s were zero, %s subnormal.", row.count,
      percent(row.zeros, row.count), percent(row.underflow, row.count))
  end
  if row.amax == row.amax and row.amax > 0 then
    say("The largest finite gradient was %s, stored as %s%s; the norm was %s.", plain(row.amax),
      plain(row.amax * row.scale), format_text(list, tensors), plain(row.norm))
  end
  local bad = 0
  for i = 1, row.overflow and tensors and #tensors or 0 do
    local t = tensors[i]
    if t.inf + t.nan > 0 then
      bad = bad + 1
      if bad <= MOST_TENSORS then
        say("  %s: %d inf, %d nan of %d %s", t.name, t.inf, t.nan, t.count,
          list[i] and list[i].gradient or "")
      end
    end
  end
  if bad > MOST_TENSORS then
    say("  and %d more tensors; in Lua, history:tensors(%d) lists all", bad - MOST_TENSORS,
      row.step)
  end
  if bad > 1 and one(h, "SELECT count(*) AS n FROM events WHERE step = ? AND kind = 'trap'",
    row.step).n == 0 then
    say("The backward pass runs from the last parameter to the first, so the overflow probably " ..
      "began near the last of these; trap=overflow names the operation.")
  end
end

local function say_context(h, row, say)
  local before = one(h, "SELECT max(step) AS step FROM steps WHERE step < ? AND overflow",
    row.step).step
  local first = h:range()
  if before == row.step - 1 and row.overflow then
    local good = one(h, "SELECT max(step) AS step FROM steps WHERE step < ? AND NOT overflow",
      row.step).step
    say("This is overflow number %d in a row.", row.step - (good or first - 1))
  elseif before then
    say("The previous overflow was at step %d, %s earlier.", before,
      show.counted(row.step - before, "step"))
  else
    say("No earlier overflow is recorded (since step %d).", first)
  end
  local last = one(h, "SELECT loss FROM steps WHERE step < ? ORDER BY step DESC, attempt DESC " ..
    "LIMIT 1", row.step)
  say("The loss was %.6g%s.", row.loss,
    last and last.loss and (", %.6g at the step before"):format(last.loss) or "")
end

-- Returns the data of an event or, if the file is damaged, an empty table.
local function data_of(event)
  local good, data = pcall(json.decode, event.data or "")
  return good and type(data) == "table" and data or {}
end

-- Returns a policy's name and options as text, or nil if the history does not have them.
local function policy_text(policy)
  if type(policy) ~= "table" or not policy.name then return nil end
  return tostring(policy.name) .. (policy.options and (" (%s)"):format(tostring(policy.options))
    or "")
end

-- Returns the policies at a step as texts, from the events: the policy of the loss scale, or nil
-- if the history is too old to have it; and a list of the policies of FP8 layers.
local function policies_at(h, step)
  local own, fp8 = nil, {}
  for event in h:each("SELECT kind, data FROM events WHERE kind IN ('policy', 'swap', " ..
    "'swap_refused', 'fp8_policy', 'fp8_swap') AND step <= ? ORDER BY id", step) do
    local data = data_of(event)
    local from, to = policy_text(data.from), policy_text(data.to or data)
    local refused = event.kind == "swap_refused"           -- with `to`: the old policy returns
    if event.kind == "policy" then own, fp8 = to, {}       -- the run begins or is resumed
    elseif event.kind == "swap" or refused and data.to and not data.fp8 then own = to
    elseif not refused or data.to then
      local at = #fp8 + 1
      for i, policy in ipairs(fp8) do at = policy == from and i or at end
      fp8[at] = to or "unknown"
    end
  end
  return own, #fp8 == 1 and fp8[1] == "none" and {} or fp8
end

local function say_policy(row, say, name)
  local change
  if row.next_scale == row.scale then change = "left the loss scale at " .. show.scale(row.scale)
  else
    change = ("set the loss scale from %s to %s (x %.6g)"):format(show.scale(row.scale),
      show.scale(row.next_scale), row.next_scale / row.scale)
  end
  local of_fp8 = row.policy_failed and row.reason and row.reason:find "^FP8 policy "
  say("The policy %s%s%s.", name and name .. " " or "", change, of_fp8 and "" or row.reason
    and ": " .. row.reason or " and gave no reason")
  if of_fp8 then say("An FP8 policy failed here, so its verdict was not used: %s.", row.reason)
  elseif row.policy_failed then say("The policy failed here, so its verdict was not used.") end
  if row.clip > 0 then say("The policy set a limit of %g on the gradient norm.", row.clip) end
  if row.lr_mul ~= 1 and row.lr_mul == row.lr_mul then
    say("The policy set a factor of %g on the learning rate.", row.lr_mul)
  end
end

-- Returns the FP8 layers that are not on their own recipe after a step, { [path] = rung }, and the
-- history's text about the layers that this step moved, or nil.
local function layers_after(h, step)
  local rungs, moved = {}, nil
  for event in h:each("SELECT step, text, data FROM events WHERE kind = 'layers' AND step <= ? " ..
    "ORDER BY id", step) do
    for path, rung in pairs(data_of(event)) do
      if event.step == step and rung ~= (rungs[path] or 1) then moved = event.text end
      rungs[path] = rung ~= 1 and rung or nil
    end
  end
  return rungs, moved
end

-- Says what the policies of FP8 layers decided, and which tensors stand out in the step's meters:
-- the tensor with the lowest SNR and, if policies chose amaxes, the tensor whose own amax differs
-- most, as a factor, from the chosen one.
local function say_fp8(h, row, say, policies)
  local rows, worst, far, chosen = h:fp8(nil, row.step), nil, nil, 0
  local function apart(r) return math.abs(math.log(r.asked / r.peak)) end
  for _, r in ipairs(rows) do
    if r.snr and r.snr < (worst and worst.snr or math.huge) then worst = r end
    if (r.asked or 0) > 0 and (r.peak or 0) > 0 then
      chosen = chosen + 1
      if apart(r) > (far and apart(far) or 0) then far = r end
    end
  end
  if worst then
    say("The FP8 tensor with the lowest SNR was %s:%s: %.1f dB, %s became 0, %s were clipped.",
      worst.site, worst.role, worst.snr, percent(worst.underflow, 1), percent(worst.overflow, 1))
  end
  if #policies == 0 then return end
  local rungs, moved = layers_after(h, row.step)
  local most = tonumber((h:meta().fp8 or ""):match('"rungs":(%d+)')) or 2
  say("The FP8 polic%s %s %s.", #policies == 1 and "y" or "ies", table.concat(policies, ", "),
    moved and "moved layers from the next step on: " .. moved or "moved no layer; after this step: "
    .. (next(rungs) and fp8_verdict.text(rungs, most) or "all layers as in the recipe"))
  if chosen > 0 then
    say("%s chose the amaxes of %s for the next step%s.", #policies == 1 and "It" or "They",
      show.counted(chosen, "tensor"), far and (", most unlike this step's for %s:%s, %s instead " ..
      "of %s"):format(far.site, far.role, plain(far.asked), plain(far.peak)) or "")
  elseif #rows == 0 then say("%s.", rows.problem) end
end

local function say_shadows(h, row, say)
  for _, shadow in ipairs(h:shadows_at(row.step)) do
    local chosen = ("would have chosen the action %s and a loss scale of %s"):format(shadow.action,
      show.scale(tonumber(shadow.scale)))
    if not shadow.scale then
      chosen = "would have chosen, for FP8 layers, " .. tostring(shadow.reason)
    end
    say("The shadow %s %s%s%s.", shadow.name, shadow.failed ~= 0 and "failed" or chosen,
      shadow.overflow == 1 and ", on an overflow at its own scale" or "",
      shadow.bound == 1 and " (a bound)" or "")
  end
end

local function say_signals(h, row, say)
  if not h:has "signals" then return end
  local signals = h:signals()
  for _, kind in ipairs { { "Signals of the script", signals },
    { "The policy logged", h:logs() } } do                 -- a log is nan where it is not logged
    local parts = {}
    for _, signal in ipairs(kind[2]) do
      local held = one(h, "SELECT value FROM signals WHERE name = ? AND step <= ? ORDER BY step " ..
        "DESC LIMIT 1", signal.name, row.step)
      if held and (held.value or kind[2] == signals) then
        parts[#parts + 1] = ("%s %.6g"):format(signal.name, held.value or 0 / 0)
      end
    end
    if #parts > 0 then say("%s: %s.", kind[1], table.concat(parts, ", ")) end
  end
end

--- Describes in words what happened at a step.
function M.why(self, step)
  local rows, lines = self:steps(step, step), {}
  local function say(format, ...) lines[#lines + 1] = format:format(...) end
  if #rows == 0 then
    local first, last = self:range()
    if not first then return show.text "the history has no steps" end
    return show.text(("step %g is not recorded: the history has steps %d to %d"):format(step, first,
      last))
  end
  local own, fp8 = policies_at(self, step)
  for _, row in ipairs(rows) do
    say("step %d (update %d%s, %.1f s into the run): %s.", row.step, row.updates,
      row.attempt > 1 and ", attempt " .. row.attempt or "",
      row.elapsed, outcomes[row.action] or row.action)
    say_gradients(self, row, say)
    say_policy(row, say, own)
    say_fp8(self, row, say, fp8)
    say_shadows(self, row, say)
    say_signals(self, row, say)
    say_context(self, row, say)
  end
  local problem = self:parts().problem
  if problem then say("The %s.", problem) end
  for event in self:each("SELECT step, kind, text FROM events WHERE step IN (?, ?) ORDER BY id",
    step, step + 1) do
    local apart = between[event.kind]
    if apart or event.step == step then
      say("Event %s%s: %s", event.kind, not apart and "" or event.step == step
        and " (before this step)" or " (after this step)", event.text or "")
    end
  end
  return show.shown(table.concat(lines, "\n"), true)
end

return M
