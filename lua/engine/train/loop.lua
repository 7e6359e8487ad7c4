-- Runs the loop around training steps (Trainer:run): progress lines, evaluation, checkpoints,
-- interrupts, what to do after an error, and the summary at the end.
-- Called by trainer.lua, which has the step itself, and by session.lua, where the user's loop
-- replaces steps() below.
local M_ffi = require "engine.base.ffi"
local machine = require "engine.base.machine"
local policies = require "engine.policy.policy"
local progress = require "engine.run.progress"
local show = require "engine.base.show"
local signals = require "engine.policy.signals"

local C, check = M_ffi.C, M_ffi.check

local M = {}

-- The statuses with which a run can end. If the script reaches its end, its exit status is the most
-- serious status of its runs (docs/runs.md). An interrupted run has INTERRUPTED plus the signal's
-- number.
local FINISHED, STOPPED, POLICY_FAILED, DIVERGED, RESULTS_LOST, DRIFTED, INTERRUPTED = 0, 2, 3, 4,
  5, 6, 128

-- Reports a status to the engine binary. If another LuaJIT runs the script (require "engine"),
-- there is no binary to report to.
local hosted, host = pcall(require, "engine.host")
local function report(status)
  if hosted then host.run_status(status) end
  return status
end

-- ------------------------------------------------------------------ what a step shows

local MAX_ROWS = 2000   -- most rows kept for the plot at the end; longer runs drop every second row

local function remember_row(self, record)
  local every, overflow = self.row_every or 1, record.overflow ~= 0
  local rows, step = self.rows, tonumber(record.step)
  if overflow then rows.overflows = (rows.overflows or 0) + 1 end
  if (step + 1) % every ~= 0 and not overflow then return end
  rows[#rows + 1] = { step = step, loss = record.loss, scale = record.scale, overflow = overflow }
  if #rows > MAX_ROWS then
    local thin = { overflows = rows.overflows }
    for i = 1, #rows, 2 do thin[#thin + 1] = rows[i] end
    self.rows, self.row_every = thin, every * 2
  end
end

local LOST_STEPS = 10   -- a run is lost after this many steps in a row with a loss of inf or nan

-- Counts the steps in a row whose loss itself is inf or nan, which no loss scale can fix. Returns a
-- line about them when the count reaches LOST_STEPS, otherwise nil.
function M.loss_note(self, record)
  self.bad_losses = record.loss - record.loss ~= 0 and (self.bad_losses or 0) + 1 or 0
  if self.bad_losses ~= LOST_STEPS then return nil end
  return ("the loss has been %g for %d steps, which no loss scale can fix: the weights, the data "
    .. "or the forward pass have inf or nan; hint: a smaller learning rate, clip=1"):format(
    record.loss, LOST_STEPS)
end

-- Records that the run is lost. Then ends the run or, if on_lost is "continue", shows a line.
local function lose(self, outcome, step, why)
  local files = self.run_files
  if files.path then
    why = why .. "; the last good checkpoint: " .. (files.last_checkpoint or "none")
  end
  files:event(step, "lost", why)
  if self.on_lost == "continue" then self.progress:note(("step %d: %s"):format(step, why))
  elseif not outcome.stopped then outcome.stopped, outcome.status = "lost: " .. why, DIVERGED end
end

local UNDECIDED_STEPS = 20   -- the run ends if its policy fails at every step up to this number

-- A run shows at most BURST lines of one kind in a row, and one more every BURST_STEPS steps.
-- Further lines are only counted.
local BURST, BURST_STEPS = 8, 10

-- Shows a line and returns it, with the number of earlier lines of its kind that were not shown.
-- If there were too many lines of this kind, does not show the line and returns nil.
local function limited(self, kind, step, line)
  local most = BURST * BURST_STEPS        -- credit: a line costs BURST_STEPS, a step adds 1
  local of = self.shown[kind] or { credit = most, step = step, hidden = 0 }
  of.credit = math.min(most, of.credit + step - of.step)
  of.step, self.shown[kind] = step, of
  if of.credit < BURST_STEPS then
    of.hidden = of.hidden + 1
    return nil
  end
  if of.hidden > 0 then line = ("%s (%d earlier ones not shown)"):format(line, of.hidden) end
  of.credit, of.hidden = of.credit - BURST_STEPS, 0
  self.progress:note(("step %d: %s"):format(step, line), kind == "failure")
  return line
end

-- Shows each distinct failure of the policy once. Shows a line if the policy stops the run.
local function show_verdict(self, step, verdict)
  local reason = M_ffi.string(verdict.reason)
  self.decided = self.decided or verdict.failed == 0
  if verdict.failed ~= 0 then
    self.policy_errors = self.policy_errors + 1
    self.failures[reason] = self.failures[reason] or limited(self, "failure", step,
      ("the policy failed: %s; %s (repeats are counted, not shown)"):format(reason,
      self.instead and ("the action is %s instead"):format(self.instead)
      or self.decided and "its last good verdict is used"
      or "it has no good verdict yet, so the loss scale stays"))
  elseif self:asks(verdict, C.ENG_ACTION_STOP) then
    self.progress:note(("step %d: policy %s stops the run%s"):format(step, self.policy.name,
      reason ~= "" and ": " .. reason or ", and gives no reason"))
  end
end

local function show_overflow_and_prints(self, record, verdict)
  local step = tonumber(record.step)
  if record.overflow ~= 0 then
    limited(self, "overflow", step, self.overflows:line(record, verdict))
  end
  local sites = self.optimizer.fp8
  for _, policy in ipairs { self.policy, unpack(sites and sites.policies or {}) } do
    for line in (policy:printed() or ""):gmatch("[^\n]+") do
      line = limited(self, "print", step, line)
      if line then self.run_files:event(step, "print", line) end
    end
  end
end

-- Returns why the verdict ends the run, and the run's exit status. Returns nil if the run
-- continues.
local function end_of(self, verdict)
  local reason = M_ffi.string(verdict.reason)
  if self:asks(verdict, C.ENG_ACTION_STOP) then
    return reason ~= "" and reason or "requested by the policy", STOPPED
  elseif verdict.failed ~= 0 and self.on_policy_error == "stop" then
    return "the policy failed: " .. reason, POLICY_FAILED
  elseif not self.decided and self.policy_errors >= UNDECIDED_STEPS then
    return ("the policy failed in each of its first %d steps: %s"):format(UNDECIDED_STEPS, reason),
      POLICY_FAILED
  end
end

--- Shows a step's record and verdict, and calls on_step. outcome: collects what the summary needs.
--- rate: tokens per second in this step.
function M.show(self, outcome, record, verdict, rate)
  local bar = self.progress
  outcome.speed = outcome.speed ~= outcome.speed and rate or 0.9 * outcome.speed + 0.1 * rate
  outcome.loss, outcome.scale = record.loss, verdict.scale
  remember_row(self, record)
  -- in a lagged run, steps_done and updates may already count the step after this one
  local step = tonumber(record.step) + 1
  bar:update { step = step, updates = self.updates - (self.steps_done - step), loss = record.loss,
    lr = record.lr, scale = record.scale, skipped = self.skipped, overflow = record.overflow ~= 0,
    unscaled = not self.precision.scaled and self.policy.name == "static" and verdict.scale == 1,
    amax = record.amax, norm = record.norm, shadows = self.shadows,
    tokens_per_s = self.log == "json" and rate or outcome.speed, unit = self.unit }
  show_overflow_and_prints(self, record, verdict)
  show_verdict(self, tonumber(record.step), verdict)
  local note = M.loss_note(self, record)
  if note then lose(self, outcome, tonumber(record.step), note) end
  if not outcome.stopped then outcome.stopped, outcome.status = end_of(self, verdict) end
  if self:asks(verdict, C.ENG_ACTION_ROLLBACK) then
    outcome.rollback = { step = tonumber(record.step),
      target = tonumber(record.step - verdict.back), lr_mul = verdict.lr_mul,
      skip = tonumber(verdict.skip), reason = M_ffi.string(verdict.reason) }
  end
  if not self.on_step then return end
  self.in_on_step = true
  self.on_step(self, record, verdict)
  self.in_on_step = false
end

-- Carries out a verdict of `rollback`: goes back to the weights of an earlier checkpoint, keeps the
-- policy's state, and skips as many steps of the data as the verdict asks. If there were too many
-- rollbacks or there is no such checkpoint, shows and records why, and the run continues.
local function roll_back(self, outcome)
  local wish, files, step = outcome.rollback, self.run_files, outcome.rollback.step
  outcome.rollback = nil
  local found, path = nil, ("the run went back %d times, the most that rollbacks= allows"):format(
    self.rollbacks_made)
  if self.rollbacks_made < self.rollbacks then found, path = files:go_back(wish.target) end
  if not found then
    local line = limited(self, "rollback_refused", step, "no rollback: " .. path)
    if line then files:event(step, "rollback_refused", path) end
    return
  end
  self.rollbacks_made, self.lr_factor = self.rollbacks_made + 1, self.lr_factor * wish.lr_mul
  self.reducer:skip_steps(wish.skip)
  local text = ("back to the weights after %s (%s), %s of data left out%s%s"):format(
    show.counted(found, "step"), path, show.counted(wish.skip, "step"),
    wish.lr_mul ~= 1 and (", learning rate x%g"):format(self.lr_factor)
    or "", wish.reason ~= "" and ": " .. wish.reason or "")
  self.progress:note(("step %d: %s"):format(step, text))
  -- the event has the number of the next step, because replay (trace.lua) needs this number
  files:event(self.steps_done, "rollback", text, { verdict = step, to = found, path = path,
    skip = wish.skip, lr_factor = self.lr_factor })
end

local function evaluate(self)
  local e = self.evaluate
  if not e or self.steps_done % e.every ~= 0 then return end
  self.reducer:share_buffers()
  local value = self:evaluate_on(e.data, e.batches or 10)
  self.progress:note(("step %d: evaluation loss %.4f"):format(self.steps_done, value))
  self.run_files:event(self.steps_done, "evaluation", ("loss %.6g"):format(value))
  signals.values.evaluation_loss = value
end

-- ------------------------------------------------------------------ running

--- Does what follows a step: rollbacks, evaluation, requests, checkpoints. Returns whether the run
--- is over.
function M.after_step(self, outcome)
  local files, done = self.run_files, self.steps_done >= self.steps
  if done or files:due() or outcome.stopped or self.reducer:interrupted() then
    self:drain()
  end
  if outcome.rollback then
    self:drain()
    roll_back(self, outcome)
  end
  evaluate(self)
  local ended = self.control:after_step()      -- swaps, and attached clients
  if ended then outcome.stopped, outcome.status = ended, STOPPED end
  local signal = self.reducer:interrupted()
  if signal then outcome.stopped, outcome.status = "interrupted", INTERRUPTED + signal end
  if outcome.stopped then self:drain() end
  local over = self.steps_done >= self.steps or outcome.stopped ~= nil
  local message = files:after_step(over)    -- a checkpoint also compares the ranks
  if message then self.progress:note(message) end
  if files.nonfinite and (self.bad_losses or 0) < LOST_STEPS then
    lose(self, outcome, self.steps_done, files.nonfinite)
  end
  self.agreement:after_step(over)
  return self.steps_done >= self.steps or outcome.stopped ~= nil
end

local function steps(self, outcome)
  local over = self.steps_done >= self.steps
  while not over do
    local from, tokens = machine.clock(), self.tokens
    local record, verdict = self:step()
    local rate = (self.tokens - tokens) / math.max(machine.clock() - from, 1e-9)
    if record then M.show(self, outcome, record, verdict, rate) end
    over = M.after_step(self, outcome)
  end
  self.reducer:agree()
end

-- Saves a run after an error: moves the data, random numbers and the model's buffers back to the
-- start of the unfinished step, and writes a checkpoint of the steps before it. Writes none if the
-- ranks have drifted apart, or if a checkpoint needs all ranks (ZeRO, divided experts).
local function rescue(self, problem)
  local files, failed, drift = self.run_files, self.current, self.agreement.drift
  C.eng_step_end()
  pcall(self.drop_record, self)
  if failed and not failed.counted then pcall(self.go_back, self, failed.place) end
  if not self.reducer.many then pcall(self.drain, self) end    -- other ranks may be gone
  if drift then
    report(DRIFTED)
    files:event(self.steps_done, "drift", drift.summary, drift)
  else files:event(self.steps_done, "error", tostring(problem):match("^[^\n]*")) end
  local alone = not self.reducer.zero and not self.reducer.apart     -- else saving needs all ranks
  local note = self.steps_done > 0 and alone and not drift and files:after_step(true, true)
  if note then self.progress:note(note)
  elseif files.saved_at == self.steps_done then
    self.progress:note(("%s holds a checkpoint of the %s before the error"):format(
      files.path, show.counted(self.steps_done, "step")))
  end
  files:close()
end

-- Returns whether the run diverged: the losses of the last steps, or some weights, were not finite.
local function diverged(self, made)
  return made > 0 and (self.bad_losses or 0) >= math.min(LOST_STEPS, made)
    or self.run_files.nonfinite
end

local function counted(n, what) return ("%d %s%s"):format(n, what, n == 1 and "" or "s") end

-- Returns why a run has made no update, or nil.
local function no_update(self, s)
  if s.made == 0 or s.updates > 0 then return nil end
  local overflows, of = self.rows.overflows or 0, "%d of " .. counted(s.made, "step") .. " %s"
  local parts = {}
  if overflows > 0 then parts[1] = of:format(overflows, "overflowed") end
  if s.retries > 0 then parts[#parts + 1] = of:format(s.retries, "were retried") end
  if #parts == 0 and s.stopped then return nil end         -- the summary has the reason of the stop
  return "no update was made: " .. (#parts > 0 and table.concat(parts, ", ")
    or ("policy %s skipped every step"):format(self.policy.name))
end

--- Returns the summary of a run as text. s: the summary as a table.
function M.summary_text(self, s)
  local parts = { ("%s after %s: %s, %d skipped"):format(s.stopped and "stopped" or "done",
    counted(s.steps, "step"), counted(s.updates, "update"), s.skipped) }
  if s.made > 0 then parts[2] = ("loss %.4f"):format(s.loss)
  elseif s.steps > self.steps then
    parts[1] = ("nothing to do: steps=%d asks for fewer steps than the %d that the run already has")
      :format(self.steps, s.steps)
  else parts[1] = ("nothing to do: %d of %d steps were made before"):format(s.steps, self.steps) end
  if self.precision.scaled or s.scale ~= 1 then
    parts[#parts + 1] = "scale " .. show.scale(s.scale)
  end
  if self.reference then
    local share = self.reference.seconds / math.max(machine.clock() - self.began, 1e-9)
    parts[#parts + 1] = ("%s (%.0f %% of the time)"):format(tostring(self.reference), 100 * share)
  end
  local lines = { table.concat(parts, ", ") }
  for _, line in ipairs(self.shadows and self.shadows:lines() or {}) do lines[#lines + 1] = line end
  lines[#lines + 1] = no_update(self, s)
  if self.rollbacks_made > 0 then
    lines[#lines + 1] = "the run went back to a checkpoint " .. counted(self.rollbacks_made, "time")
  end
  if s.stopped then lines[#lines + 1] = "reason: " .. s.stopped end
  if s.lost then lines[#lines + 1] = "lost: " .. s.lost end
  if s.path then
    local resumes = s.stopped == "interrupted" and "   (resume=auto continues from here)" or ""
    lines[#lines + 1] = "run: " .. s.path .. resumes
  end
  if self.policy_errors > 0 then
    lines[#lines + 1] = ("%s, the policy failed in %d of %s"):format(s.stopped and "stopped"
      or "finished", self.policy_errors, counted(s.made, "step"))
  end
  return table.concat(lines, "\n")
end

--- Opens the files, the socket and the progress line. Returns the table `outcome`, which collects
--- what the summary needs.
function M.start(self)
  local files, policy = self.run_files, self.policy
  self.progress = progress.new { total = self.steps, json = self.log == "json",
    quiet = self.log == "quiet", silent = self.reducer.rank > 0 }
  local problem = policies.unusable(policy, #self.groups.groups)   -- a resume may change the scale
  if problem then M_ffi.raise("trainer: %s", problem) end
  files:reopen()
  self.control:open()
  local before = C.eng_interrupt_policy(1)
  report(FINISHED)                     -- tells the engine binary that a run begins
  for _, line in ipairs(files.warnings) do self.progress:note(line, true) end
  for _, line in ipairs(files.notes) do self.progress:note(line) end
  files.warnings, files.notes = {}, {}
  if self.reducer:text() then self.progress:note(self.reducer:text()) end
  -- drops tapes and tensors from before the run, or from a loop that was left by `break`
  check(C.eng_step_end())
  local outcome = { loss = 0 / 0, scale = policy:scale(), speed = 0 / 0, first = self.steps_done,
    interrupts = before }
  self.on_drain = function(record, verdict)
    M.show(self, outcome, record, verdict, outcome.speed)
  end
  return outcome
end

--- Closes what start() opened and returns the summary. After an error (good is false) the run is
--- rescued and the error is raised again.
function M.finish(self, outcome, good, message)
  local files = self.run_files
  self.on_drain = nil
  self.progress:finish()
  self.control:close()
  if not good then rescue(self, message) end
  self:forget_buffers()
  local unwritten, made = nil, self.steps_done - outcome.first
  if good then
    files:event(self.steps_done, outcome.stopped and "stopped" or "finished", outcome.stopped)
    unwritten = files:close() or self.progress.broken and "output on stdout"
  end
  -- restored only now, because a signal must not stop the script before the files are closed
  C.eng_interrupt_policy(outcome.interrupts)
  if C.eng_interrupted() == 1 then C.eng_interrupt(0) end
  if not good then error(message, 0) end
  local status = report(unwritten and RESULTS_LOST or diverged(self, made) and DIVERGED
    or outcome.status or FINISHED)
  local summary = { steps = self.steps_done, updates = self.updates, skipped = self.skipped,
    retries = self.retries, loss = outcome.loss, scale = outcome.scale,
    tokens_per_s = outcome.speed, stopped = outcome.stopped, path = files.path, rows = self.rows,
    made = made, lost = unwritten, status = status,
    references = self.reference and self.reference.count,
    reference_s = self.reference and self.reference.seconds }
  self.progress:note(M.summary_text(self, summary), status ~= FINISHED)
  return summary
end

--- Trains until `steps` attempts are made, the policy or an attached client stops the run, the run
--- is lost (the option on_lost), the policy fails too often (on_policy_error), or the user
--- interrupts. Returns a summary: { steps, made (by this call), updates, skipped, retries, loss,
--- scale, tokens_per_s, stopped = reason or nil, lost = results that could not be written or nil,
--- status (docs/runs.md), path, rows (for a plot), references and reference_s (the number of
--- reference backward passes and their seconds, or nil) }.
function M.run(self)
  local outcome = M.start(self)
  self.model:train()
  return M.finish(self, outcome, xpcall(function() steps(self, outcome) end, function(m)
    return type(m) == "string" and debug.traceback(m, 2) or m
  end))
end

return M
