-- Swaps policies during a run. A swap is requested by saving the policy's file, by SIGHUP, by the
-- script (policy:swap(file)) or by `engine attach`. Between two steps the new policy is compiled,
-- is tried on the records of the last steps, and takes over from the old policy
-- (eng_policy_migrate). If anything fails, the old policy stays, and the history has the reason. If
-- a new policy fails at its first decision, the old policy returns immediately and decides that
-- step. With several ranks, each rank compiles and tries the policy text of rank 0. If one rank
-- refuses this text, every rank keeps the old policy; otherwise all ranks swap at the same step.
--
-- A seat holds a policy. The first seat is the trainer, whose policy chooses the loss scale. The
-- other seats hold policies of FP8 layers (train/fp8_sites.lua). A new policy goes to a seat of its
-- kind. A seat has
--   policy                        the current policy
--   kind                          "fp8", or nil for the seat of the loss scale
--   prepare(policy)               gives a policy the names of its tensors
--   use_policy(policy, trainer)   makes a prepared policy the current one
--   ask(policy, record)           returns the verdict of a policy on a record, with the last
--                                 statistics per tensor
--   refuses(policy, trainer)      returns why this run cannot use a policy, or nil
-- Owned by the trainer. Called by trainer.lua and train/fp8_sites.lua after a decision, and by
-- control.lua between two steps.
local M_ffi = require "engine.base.ffi"
local json = require "engine.base.json"
local load = require("engine.policy.policy").load
local ranks = require "engine.dist.ranks"
local read = require("engine.base.file").read
local show = require "engine.base.show"
local trace = require "engine.run.trace"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local Swap = {}
Swap.__index = Swap

local RING = 64        -- the number of recent records on which a candidate is tried
local PATIENCE = 2     -- the run waits for a candidate's trial for at most this many seconds
local MOST_UNDO = 20   -- the number of swaps that can be undone

-- Returns a copy of the policy of a seat, in its initial state.
local function copy_of(policy, seat)
  local copy = load({ source = policy.source, file = policy.file }, policy.given, seat.kind)
  seat:prepare(copy)
  return copy
end

-- Returns why a run refuses scales per layer, if a policy sets them, or nil. Only a verdict shows
-- whether a policy sets them. So `copy`, a copy of the policy, decides on a made-up good step,
-- whose gradients have another magnitude in each tensor.
local function layers_refused(trainer, copy)
  local record, n = ffi.new("eng_record"), #trainer.optimizer.list
  local stats = ffi.new("eng_tensor_stats[?]", n)
  trace.verdicts("."):at(record, 1, copy:scale())
  for k = 0, n - 1 do
    local amax = record.scale * 2 ^ -(8 * k % 96)
    stats[k].count, stats[k].amax, stats[k].sum_squares = 1, amax, amax ^ 2
  end
  copy:decide(record, stats)
  return copy:scales_groups() and trainer:refuses(copy) or nil
end

--- Returns the Swap of a trainer. Raises an error if the trainer's policy sets scales per layer and
--- the run refuses them.
function M.new(trainer, options)
  local self = setmetatable({ trainer = trainer, watching = options.watch ~= false,
    ring = ffi.new("eng_record[?]", RING), ring_needs = {}, seen = 0,
    seats = {}, former = {}, queue = {}, swaps = 0 }, Swap)
  local sites = trainer.optimizer.fp8
  for i, seat in ipairs { trainer, unpack(sites and sites.seats or {}) } do
    -- asked: the policy that the script requested, as data; swaps: the number of swaps in this
    -- seat; probation: the last policy that decided, until the current one has decided once; stamp:
    -- the time stamp of the policy's file; pending_stamp: a new time stamp that was seen only once;
    -- gone: the policy whose missing file was reported
    self.seats[i] = { seat = seat, swaps = 0, asked = M.described(seat.policy) }
    -- users edit policy files, so a file with another text still counts as the one requested
    if seat.policy.path then self.seats[i].asked.hash = nil end
    self:hold(self.seats[i])
  end
  if not trainer.policy.is_class then
    local copy = copy_of(trainer.policy, trainer)
    local refused = layers_refused(trainer, copy)
    if refused then error(refused, 0) end
  end
  return self
end

-- Gives the policy of a seat its methods swap and undo, and begins to watch its file. With
-- `as_it_is`, does not compare the file with the policy's text, so only a later save of the file
-- counts.
function Swap:hold(entry, as_it_is)
  local policy = entry.seat.policy
  local own = entry.seat.kind and entry or nil
  policy.swap = function(_, source, options)
    return self:swap(source, options, "the script", own)
  end
  policy.undo = function() return self:undo("the script", own) end
  entry.stamp = policy.path and C.eng_file_stamp(policy.path) or nil
  entry.pending_stamp = nil
  -- the file was saved after the policy was read: stamp 0 makes the next check read the file again
  if entry.stamp and not as_it_is and entry.stamp ~= 0 and read(policy.path) ~= policy.source then
    entry.stamp = 0
  end
end

-- ------------------------------------------------------------------ events

--- Returns a policy as data for the history: its name, its file, the hash of its source, and the
--- options that differ from its defaults.
function M.described(policy)
  if policy.idle then return { name = policy.name } end
  local options = policy:changed()
  return { name = policy.name, file = policy.file, hash = policy.hash and policy:hash() or nil,
    options = options ~= "" and options or nil }
end

--- Returns a policy in words, such as "careful d322f655 (growth=2 every=7)".
function M.label(policy)
  local d = M.described(policy)
  return d.name .. (d.hash and " " .. d.hash or "") ..
    (d.options and " (" .. d.options .. ")" or "")
end

local described, label = M.described, M.label

local function tell(self, kind, text, data)
  local trainer = self.trainer
  trainer.run_files:event(trainer.steps_done, kind, text, data)
  trainer:note(("step %d: %s"):format(trainer.steps_done, text))
end

-- Records why a policy is not used. failed: the policy that was swapped in and gives way to the
-- seat's old policy, or nil. Returns nil and the problem.
local function refuse(self, entry, what, by, problem, failed)
  problem = tostring(problem)
  local policy = entry and entry.seat.policy               -- nil: the seat is not known
  local named = problem:find(what, 1, true)          -- whether the problem already names the file
  tell(self, "swap_refused", ("%s%s is not used: %s"):format((not policy or policy.idle) and ""
    or ("the policy %s stays; "):format(policy.name), named and "the new policy" or what, problem),
    { by = by, what = what, problem = problem, policy = policy and described(policy),
    from = failed and described(failed), to = failed and described(policy),
    fp8 = failed and entry.seat.kind == "fp8" or nil })
  return nil, problem
end

-- ------------------------------------------------------------------ trying

local WHOLE, WITHOUT_HIST = ffi.sizeof("eng_record"), ffi.offsetof("eng_record", "hist")

--- Keeps a step's record, and its histogram if one was computed. Candidates are tried on these
--- records.
function Swap:remember(record)
  local at, needs = self.seen % RING, self.trainer.needs
  local bytes = bit.band(needs, C.ENG_NEED_HIST) ~= 0 and WHOLE or WITHOUT_HIST
  ffi.copy(self.ring + at, record, bytes)
  self.ring_needs[at], self.seen = needs, self.seen + 1
end

-- Tries a copy of a candidate on the records of the last steps, or on a made-up step if there are
-- no such records. Returns what is wrong with the candidate, or nil. Leaves out records that lack a
-- statistic the candidate needs. Per-tensor statistics are always those of the last step.
local function trial(self, entry, copy)
  local trainer, seat, tried = self.trainer, entry.seat, false
  copy:take_over(seat.policy)
  for name, value in pairs(not seat.kind and trainer.reducer.signals or {}) do
    copy:signal(name, value)
  end
  -- the statistics that a record must have
  local needs = bit.band(copy.needs, C.ENG_NEED_GRADIENTS + (seat.kind and 0 or C.ENG_NEED_TENSORS))
  local began = C.eng_clock()
  for i = math.max(0, self.seen - RING), self.seen - 1 do
    local at = i % RING
    if bit.band(needs, bit.bnot(self.ring_needs[at])) == 0 then
      local verdict = seat:ask(copy, self.ring[at])
      tried = true
      if C.eng_clock() - began > PATIENCE then
        return ("its trial on the records of the last steps took more than %d s"):format(PATIENCE)
      end
      local refused = seat:refuses(copy, trainer)
      if refused then return refused end
      if verdict.failed ~= 0 then
        return ("it failed on the record of step %d: %s"):format(tonumber(self.ring[at].step),
          ffi.string(verdict.reason))
      end
    end
  end
  return not tried and not seat.kind and layers_refused(trainer, copy) or nil
end

-- ------------------------------------------------------------------ swapping

-- Returns as data what policy.load needs to load a policy again. The data of a class, and of the
-- idle policy of a seat without policies, have no source; only the script can make them.
local function stored(policy)
  return { name = policy.name, file = policy.file, path = policy.path,
    source = not policy.idle and policy.source or nil, options = policy.given }
end

-- Makes `fresh` the current policy of a seat, and records the swap. by, as_it_is: as in Swap:swap
-- and Swap:hold.
local function put(self, entry, fresh, by, as_it_is)
  local old, trainer = entry.seat.policy, self.trainer
  local files = trainer.run_files
  -- drops the operations that on_step left on the tape, because they may use the layers
  if entry.seat.kind == "fp8" then M_ffi.check(C.eng_step_end()) end
  entry.seat:use_policy(fresh, trainer)
  self:hold(entry, as_it_is)
  self.swaps, entry.swaps = self.swaps + 1, entry.swaps + 1
  files:add_policy(fresh)
  local fp8 = entry.seat.kind == "fp8"
  tell(self, fp8 and "fp8_swap" or "swap", ("%spolicy %s -> %s (%s)%s"):format(fp8 and "FP8 " or "",
    label(old), label(fresh), by, fp8 and "" or ", loss scale " .. show.scale(fresh:scale())),
    { by = by, from = described(old), to = described(fresh),
    scale = not fp8 and fresh:scale() or nil })
  files:layers(trainer.steps_done - 1)                     -- the FP8 rungs from this step on
end

-- Loads rank 0's policy text on every rank. If the policy has no text (a class), each rank loads it
-- by itself. source, options, kind: as for policy.load. Returns true and the policy, or false and a
-- message.
local function load_together(source, options, kind)
  local good, fresh, news
  if ranks.rank() == 0 then
    good, fresh = pcall(load, source, options, kind)
    news = json.encode(good and stored(fresh) or { problem = tostring(fresh) })
  end
  news = json.decode(ranks.from_first(news))
  if news.problem then return false, news.problem end
  if ranks.rank() == 0 then return good, fresh end
  if news.source then source, options = news, news.options end
  return pcall(load, source, options, kind)
end

-- Returns the reason of the first rank that refuses, or nil. All ranks get the same result.
local function objection(self, problem)
  if not self.trainer.reducer.many then return problem end
  for rank, text in ipairs(ranks.from_all(problem and tostring(problem) or "")) do
    if text ~= "" then return ("rank %d: %s"):format(rank - 1, text) end
  end
end

-- Returns the entry of `seats` for a new policy: the only seat of its kind, or the seat whose
-- policy has the same name. If there is neither, returns nil and a message.
local function seat_for(self, fresh)
  local names = {}
  for _, entry in ipairs(self.seats) do
    if (entry.seat.kind == "fp8") == (fresh.fp8 or false) then
      local name = entry.seat.policy.name
      if not fresh.fp8 or #self.seats == 2 or name == fresh.name then return entry end
      names[#names + 1] = name
    end
  end
  return nil, ("the run has %d FP8 policies (%s), none of them %s, and a swap replaces the " ..
    "policy of the same name; hint: give the new policy one of these names, or call the method " ..
    "swap of one of the policies in trainer.optimizer.fp8.policies")
    :format(#names, table.concat(names, ", "), fresh.name)
end

-- In a lagged run, finishes the step in flight, whose statistics are those that the old policy
-- needs. If on_step asks for a swap or an undo meanwhile, that request waits for the present one.
local function finish_step_in_flight(self)
  self.swapping = true
  self.trainer:drain()
  self.swapping = false
end

-- Returns whether a swap must wait until the step has ended, because in a lagged run the record of
-- the step in flight would replace the record that on_step reads.
local function on_step_reads(self) return self.trainer.in_on_step and self.trainer.pending end

-- Returns what f returns, a problem or nil. If f raises an error, the problem is its message.
local function problem_of(f)
  local good, problem = pcall(f)
  return problem or not good and "it cannot take over the old policy's state" or nil
end

-- Makes a swap, as Swap:swap does. entry: an entry of `seats`; if it is nil, seat_for chooses one.
local function attempt(self, source, options, by, entry)
  local what = type(source) ~= "table" and tostring(source) or source.file or source.name
  local kind = self.seats[2] and "any" or nil
  if entry then kind = entry.seat.kind end
  local good, fresh
  if self.trainer.reducer.many then good, fresh = load_together(source, options, kind)
  else good, fresh = pcall(load, source, options, kind) end
  what = what or good and fresh.name or "the policy given as source"
  local obstacle = not good and fresh or nil
  if good and not entry then entry, obstacle = seat_for(self, fresh) end
  obstacle = objection(self, obstacle)
  if obstacle then return refuse(self, entry or not kind and self.seats[1], what, by, obstacle) end
  local seat = entry.seat
  if fresh == seat.policy then return true end
  local problem = objection(self, problem_of(function()
    local found = not fresh.is_class and trial(self, entry, copy_of(fresh, seat)) or nil
    seat:prepare(fresh)
    return found or seat:refuses(fresh, self.trainer)
  end))
  if problem then return refuse(self, entry, what, by, problem) end
  local function take_over()
    finish_step_in_flight(self)
    local old = seat.policy
    problem = objection(self, problem_of(function() fresh:take_over(old) end))
    if problem then return refuse(self, entry, what, by, problem) end
    entry.probation = entry.probation or old
    put(self, entry, fresh, by, type(source) == "table" and not source.of_the_file)
    self.former[#self.former + 1] = { entry = entry, policy = old }
    if #self.former > MOST_UNDO then table.remove(self.former, 1) end
    return true
  end
  if not on_step_reads(self) then return take_over() end
  self.queue[#self.queue + 1] = take_over
  return true
end

--- Swaps in another policy, with its options. source: a name, a path or { source =, file = }, as
--- engine.policy.load accepts them. A policy of FP8 layers goes to a seat of FP8 layers. Returns
--- true, or nil and why the policy is refused. Inside a step, returns true, and the swap is tried
--- after the step. by: who or what asks for the swap, for messages. entry: the entry of `seats` in
--- which to swap, or nil for the seat that fits the policy.
function Swap:swap(source, options, by, entry)
  if source == nil then error("swap: expected the name or the file of a policy, got nothing", 3) end
  by = by or "the script"
  if self.trainer.current or self.swapping then
    self.queue[#self.queue + 1] = function() attempt(self, source, options, by, entry) end
    return true
  end
  return attempt(self, source, options, by, entry)
end

--- Undoes the last swap: makes the previous policy current again, with the state that it had at the
--- swap. With `entry`, an entry of `seats`, undoes the last swap of that seat. Returns true, the
--- seat and, if the policy's file no longer holds the policy's text, a line that says so. Returns
--- nil and a message if there is no swap to undo. Inside a step, and in on_step of a lagged run,
--- returns only true, and the undo follows the step.
function Swap:undo(by, entry)
  local at = #self.former
  while at > 0 and entry and self.former[at].entry ~= entry do at = at - 1 end
  if at == 0 then
    local problem = "there is no swap to undo" .. (self.resumed and
      "; a swap made before the run was resumed cannot be undone" or "")
    self.trainer:note(("step %d: undo: %s"):format(self.trainer.steps_done, problem))
    return nil, problem
  end
  if self.trainer.current or self.swapping or on_step_reads(self) then
    self.queue[#self.queue + 1] = function() self:undo(by, entry) end
    return true
  end
  local last = table.remove(self.former, at)
  finish_step_in_flight(self)
  if last.policy == last.entry.probation then last.entry.probation = nil end
  put(self, last.entry, last.policy, "undone by " .. (by or "the script"), true)
  local path, line = last.policy.path, nil
  if path and read(path) ~= last.policy.source then
    line = ("%s no longer holds the text that policy %s runs"):format(path, last.policy.name)
    self.trainer:note(("step %d: %s"):format(self.trainer.steps_done, line))
  end
  return true, last.entry.seat, line
end

--- Returns the statistics that the trainer's former policy needs, until the new policy has decided
--- once.
function Swap:needs()
  local former = self.seats[1].probation
  return former and former.needs or 0
end

--- Judges the first decision of a policy after its swap. If this decision failed, or the run cannot
--- use the policy, makes the seat's old policy current again and returns true; the caller then lets
--- it decide this step. Caps that the new policy has already applied to the gradients stay; the
--- reason says so. Otherwise, and after later decisions, returns false.
function Swap:rejects(seat, record, verdict)
  local entry
  for _, own in ipairs(self.seats) do entry = own.seat == seat and own or entry end
  local old = entry and entry.probation
  if not old then return false end
  entry.probation = nil
  local policy = seat.policy
  local problem = seat:refuses(policy, self.trainer)
  if verdict.failed ~= 0 then
    problem = "its first decision failed: " .. ffi.string(verdict.reason)
  end
  if problem and not seat.kind and record.capped == 1 then
    problem = problem .. "; its caps on this step's gradients stay"
  end
  problem = objection(self, problem)
  if not problem then
    seat:use_policy(policy, self.trainer)                  -- without the old policy's statistics
    return false
  end
  seat:use_policy(old, self.trainer)
  self:hold(entry, true)
  for i = #self.former, 1, -1 do
    local former = self.former[i]
    if former.entry == entry then
      table.remove(self.former, i)
      if former.policy == old then break end
    end
  end
  refuse(self, entry, label(policy), "its first decision", problem, policy)
  return true
end

-- ------------------------------------------------------------------ watching

-- Reads the file of a seat's policy again and swaps if its text changed.
local function reread(self, entry, by)
  local policy = entry.seat.policy
  local text, why = read(policy.path)
  if self.trainer.reducer.many then text = ranks.from_first(text) end
  if not text then
    return refuse(self, entry, policy.file, by, why or policy.path .. " cannot be read")
  end
  if text == policy.source then return false end
  return attempt(self, { source = text, file = policy.file, path = policy.path,
    of_the_file = true }, policy.given, by, entry)
end

-- Returns whether the file of a seat's policy was saved. A new time stamp counts only when it is
-- seen a second time and the file is not empty, because at first the file may still be incomplete.
local function was_saved(self, entry)
  local policy = entry.seat.policy
  if not self.watching or not policy.path then return false end
  local stamp = C.eng_file_stamp(policy.path)
  if stamp == 0 and entry.pending_stamp == 0 and entry.gone ~= policy then
    entry.gone = policy
    self.trainer:note(("step %d: the policy's file %s no longer exists; the policy that was " ..
      "read from it stays"):format(self.trainer.steps_done, policy.path))
  end
  if stamp == entry.stamp then entry.pending_stamp = nil
  elseif stamp ~= 0 and stamp == entry.pending_stamp and read(policy.path) ~= "" then
    entry.stamp, entry.pending_stamp = stamp, nil
    return true
  else
    entry.pending_stamp = stamp
  end
  return false
end

--- Returns the index (from 1) of a seat whose policy file was saved and must be read again, or nil.
function Swap:wish()
  for i, entry in ipairs(self.seats) do
    if was_saved(self, entry) then return i end
  end
end

--- Reads policy files again. If `by` is the index of a seat, reads only that seat's file, which was
--- saved. Otherwise reads the files of all seats; `by` is then a text such as "SIGHUP", which
--- messages give as the reason.
function Swap:grant(by)
  if self.seats[by] then return reread(self, self.seats[by], "its file was saved") end
  for _, entry in ipairs(self.seats) do
    local policy = entry.seat.policy
    if not policy.path then
      if not policy.idle then
        self.trainer:note(("%s: policy %s has no file to read again"):format(by, policy.name))
      end
    elseif reread(self, entry, by) == false then
      self.trainer:note(("%s: %s has not changed"):format(by, policy.file))
    end
  end
end

--- Called between two steps: handles swaps requested inside the last step, then SIGHUP, then a
--- change of a policy's file. With several ranks, the step's record announces SIGHUP, and rank 0
--- announces file changes (control.lua).
function Swap:after_step()
  while self.queue[1] do table.remove(self.queue, 1)() end
  local parallel = self.trainer.reducer
  if parallel.many then
    if parallel.hangup then self:grant("SIGHUP") end
    parallel.hangup = false
  elseif C.eng_hangups() > 0 then self:grant("SIGHUP")
  else
    local wish = self:wish()
    if wish then self:grant(wish) end
  end
end

-- ------------------------------------------------------------------ checkpoints

--- Returns, for a checkpoint, the current policy of seat i and, until this policy has decided once,
--- the old one. Returns nil if the current policy is a class, which has no source to store, or if
--- the script itself requested it and no old policy may return.
function Swap:state(i)
  local entry = self.seats[i]
  local policy, asked, old = entry.seat.policy, entry.asked, entry.probation
  local now = described(policy)
  if entry.swaps == 0 or policy.is_class or policy.idle
    or not old and now.file == asked.file and now.options == asked.options
    and (not asked.hash and policy.path or now.hash == asked.hash) then
    return nil
  end
  local state = stored(policy)
  state.asked, state.old = asked, old and stored(old)
  if old then state.old.state = old:save() end
  return state
end

--- Makes a checkpoint's policy current again in seat i, if it had been swapped in and the script
--- still requests the same policy as then. saved: what state(i) returned. Returns a line about the
--- policy, or nil if the script requests another one.
function Swap:resume(i, saved)
  local entry = self.seats[i]
  local asked, now = saved.asked, entry.asked
  if asked.name ~= now.name or asked.file ~= now.file or asked.options ~= now.options
    or now.hash and asked.hash ~= now.hash then
    return nil
  end
  -- Returns the policy that stored() describes. A policy without a source must be the script's own.
  local function load_stored(from)
    if not from.source then return from.name == now.name and entry.seat.policy or nil end
    local policy = load(from, from.options, entry.seat.kind)
    entry.seat:prepare(policy)
    return policy
  end
  local good, policy, old = pcall(function()
    return load_stored(saved), saved.old and load_stored(saved.old)
  end)
  if not good then
    return ("the policy that was swapped in, %s, can no longer be used: %s"):format(
      tostring(saved.file), tostring(policy))
  end
  if old then old:restore(saved.old.state) end
  entry.probation = old
  entry.seat:use_policy(policy, self.trainer)
  self:hold(entry, true)
  entry.swaps, self.resumed = 1, true
  return ("the policy is %s, as in the checkpoint: it had been swapped in for %s"):format(
    label(policy), now.name)
end

return M
