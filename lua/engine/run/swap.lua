-- Swaps of the policy during a run. A swap is requested by saving the policy's file, by SIGHUP, by
-- the script (policy:swap(file)) or by `engine attach`. Between two steps the new policy is
-- compiled, tried on the records of the last steps, and takes over from the old one (its
-- `migrate`). If anything fails, the old policy stays and the history says why. A policy that fails
-- its first decision is replaced at once, and the old one decides that step. All ranks swap at the
-- same step to the policy text of rank 0, or none does: each rank compiles and tries this text, and
-- if one rank refuses, all do. Owned by the trainer: observe() sees every record after the
-- decision, between() runs between steps.
local M_ffi = require "engine.base.ffi"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local Swap = {}
Swap.__index = Swap

local RING = 64        -- records a candidate is tried on
local PATIENCE = 2     -- seconds for all trials; the run waits
local MOST_UNDO = 20

function M.new(trainer, options)
  local self = setmetatable({ trainer = trainer, watching = options.watch ~= false,
    ring = ffi.new("eng_record[?]", RING), ring_needs = {}, seen = 0,
    former = {}, queue = {}, swaps = 0 }, Swap)
  self:hold(trainer.policy)
  self.asked = { name = trainer.policy.name, file = trainer.policy.file }   -- what the script wants
  return self
end

local read = require("engine.base.file").read

-- Gives a policy its methods swap and undo, and begins to watch its file. as_it_is: the file's
-- current text is known and may differ from the policy's.
function Swap:hold(policy, as_it_is)
  policy.swap = function(_, source, options) return self:swap(source, options, "the script") end
  policy.undo = function() return self:undo("the script") end
  self.stamp = policy.path and C.eng_file_stamp(policy.path) or nil
  self.pending_stamp = nil
  -- the file was saved after the policy was read: a stamp of 0 makes the next check read it again
  if self.stamp and not as_it_is and self.stamp ~= 0 and read(policy.path) ~= policy.source then
    self.stamp = 0
  end
end

-- ------------------------------------------------------------------ events

--- A policy as data for the history: its name, file, hash of its source, and the options that are
--- not its defaults.
function M.described(policy)
  local options = require("engine.run.replay").changed(policy)
  return { name = policy.name, file = policy.file, hash = policy.hash and policy:hash() or nil,
    options = options ~= "" and options or nil }
end

--- A policy in words: "careful d322f655 (growth=2 every=7)".
function M.label(policy)
  local d = M.described(policy)
  return d.name .. (d.hash and " " .. d.hash or "") ..
    (d.options and " (" .. d.options .. ")" or "")
end

local described, label = M.described, M.label

local function tell(self, kind, text, data)
  local trainer = self.trainer
  trainer.run_files:event(trainer.steps_done, kind, text,
    data and require("engine.base.json").encode(data) or nil)
  trainer:note(("step %d: %s"):format(trainer.steps_done, text))
end

local function refuse(self, what, by, problem)
  problem = tostring(problem)
  tell(self, "swap_refused", ("%s stays, %s is not used: %s"):format(self.trainer.policy.name, what,
    problem), { by = by, what = what, problem = problem, policy = described(self.trainer.policy) })
  return nil, problem
end

-- ------------------------------------------------------------------ trying

local WHOLE, WITHOUT_HIST = ffi.sizeof("eng_record"), ffi.offsetof("eng_record", "hist")

--- Keeps a step's record, and its histogram if one was computed, to try candidates on.
function Swap:remember(record)
  local at, needs = self.seen % RING, self.trainer.needs
  local bytes = bit.band(needs, C.ENG_NEED_HIST) ~= 0 and WHOLE or WITHOUT_HIST
  ffi.copy(self.ring + at, record, bytes)
  self.ring_needs[at], self.seen = needs, self.seen + 1
end

-- Tries a copy of a candidate on the records of the last steps. Returns what is wrong with the
-- candidate, or nil. Leaves out records that lack a statistic the candidate needs. Per-tensor
-- statistics are always those of the last step.
local function trial(self, copy)
  local trainer = self.trainer
  trainer:prepare(copy)
  copy:take_over(trainer.policy)
  for name, value in pairs(trainer.reducer.signals) do copy:signal(name, value) end
  local needs = bit.band(copy.needs, C.ENG_NEED_NORM_REF - 1)   -- what a usable record has
  local began = C.eng_clock()
  for i = math.max(0, self.seen - RING), self.seen - 1 do
    local at = i % RING
    if bit.band(needs, bit.bnot(self.ring_needs[at])) == 0 then
      local verdict = copy:decide(self.ring[at], bit.band(needs, C.ENG_NEED_TENSORS) ~= 0
        and trainer.stats or nil)
      if C.eng_clock() - began > PATIENCE then
        return ("tried on the last steps, it took more than %d s"):format(PATIENCE)
      end
      local refused = trainer:refuses(copy)
      if refused then return refused end
      if verdict.failed ~= 0 then
        return ("tried on step %d: %s"):format(tonumber(self.ring[at].step),
          ffi.string(verdict.reason))
      end
    end
  end
end

-- ------------------------------------------------------------------ swapping

-- Makes `fresh` the current policy.
local function put(self, fresh, by, as_it_is)
  local trainer = self.trainer
  local old = trainer.policy
  local files = trainer.run_files
  trainer:use_policy(fresh)
  self:hold(fresh, as_it_is)
  self.swaps = self.swaps + 1
  if files.history and fresh.source then
    files:complain(files.history:add_policy(fresh:hash(), fresh.name, fresh.source))
  end
  tell(self, "swap", ("policy %s -> %s (%s), loss scale %.10g"):format(label(old), label(fresh), by,
    fresh:scale()),
    { by = by, from = described(old), to = described(fresh), scale = fresh:scale() })
end

-- Loads rank 0's policy text on every rank. If the policy has no text (a class), each rank loads it
-- by itself. Returns what pcall returns.
local function load_together(self, source, options)
  local json, ranks, load = require "engine.base.json", require "engine.dist.ranks",
    require("engine.policy.policy").load
  local news, good, fresh = nil, true, nil
  if ranks.rank() == 0 then
    good, fresh = pcall(load, source, options)
    if not good then news = { problem = tostring(fresh) }
    elseif fresh.source then
      news = { source = fresh.source, file = fresh.file, path = fresh.path, options = fresh.given,
        crc = fresh:hash() }
    else news = {} end
  end
  news = json.decode(ranks.from_first(news and json.encode(news)))
  if news.problem then return false, news.problem end
  if ranks.rank() > 0 then
    if news.source then
      good, fresh = pcall(load, { source = news.source, file = news.file, path = news.path },
        news.options or {})
    else good, fresh = pcall(load, source, options) end
    if good and news.crc and fresh:hash() ~= news.crc then
      good, fresh = false, "its source was damaged on the way from rank 0"
    end
  end
  return good, fresh
end

-- The reason of the first rank that refuses, or nil; the same on all ranks.
local function objection(self, problem)
  if not self.trainer.reducer.many then return problem end
  for rank, text in ipairs(require("engine.dist.ranks").from_all(problem and tostring(problem)
    or "")) do
    if text ~= "" then return ("rank %d: %s"):format(rank - 1, text) end
  end
end

local function attempt(self, source, options, by)
  local load = require("engine.policy.policy").load
  local what = type(source) == "table" and (source.file or source.name) or tostring(source)
  local many = self.trainer.reducer.many
  local good, fresh
  if many then good, fresh = load_together(self, source, options)
  else good, fresh = pcall(load, source, options) end
  local obstacle = objection(self, not good and fresh or nil)
  if obstacle then return refuse(self, what, by, obstacle) end
  local old = self.trainer.policy
  if fresh == old then return true end
  local ready, problem = pcall(function()
    if not fresh.is_class then
      local found = trial(self, load({ source = fresh.source, file = fresh.file }, fresh.given))
      if found then return found end
    end
    self.trainer:prepare(fresh)
    fresh:take_over(old)
    return self.trainer:refuses(fresh)
  end)
  problem = objection(self, problem or not ready and "it cannot take over" or nil)
  if problem then return refuse(self, what, by, problem) end
  put(self, fresh, by, type(source) == "table" and not source.of_the_file)
  self.former[#self.former + 1] = old
  if #self.former > MOST_UNDO then table.remove(self.former, 1) end
  self.probation = old
  return true
end

--- Swaps in another policy: a name, a path or { source =, file = }, as engine.policy.load takes
--- them, with options for it. Returns true, or nil and what is wrong with it. Inside a step the
--- swap waits for the step's end.
function Swap:swap(source, options, by)
  if source == nil then error("swap: expected the name or the file of a policy, got nothing", 3) end
  if self.trainer.current then
    self.queue[#self.queue + 1] = function() attempt(self, source, options, by or "the script") end
    return true
  end
  return attempt(self, source, options, by or "the script")
end

--- Returns to the policy before the last swap, with the state that it had then. Returns true, or
--- nil and a message.
function Swap:undo(by)
  if #self.former == 0 then return nil, "there is no swap to undo" end
  if self.trainer.current then
    self.queue[#self.queue + 1] = function() self:undo(by) end
    return true
  end
  self.probation = nil
  put(self, table.remove(self.former), "undone by " .. (by or "the script"), true)
  return true
end

--- After a decision: remembers the record. The first decision after a swap is the new policy's
--- probation: if it fails, the old policy becomes current again and decides this step. Returns the
--- verdict that counts.
function Swap:observe(record, stats, verdict)
  self:remember(record)
  local old = self.probation
  if not old then return verdict end
  self.probation = nil
  local policy = self.trainer.policy
  local problem = verdict.failed ~= 0 and ffi.string(verdict.reason) or self.trainer:refuses(policy)
  problem = objection(self, problem == "" and "it failed" or problem)
  if not problem then return verdict end
  self.trainer:use_policy(old)
  self:hold(old, true)
  if self.former[#self.former] == old then self.former[#self.former] = nil end
  refuse(self, label(policy), "its first decision", problem)
  return old:decide(record, stats)
end

-- ------------------------------------------------------------------ watching

-- Reads the current policy's file again and swaps if its text changed.
local function reread(self, by)
  local policy = self.trainer.policy
  local text, why = read(policy.path)
  if self.trainer.reducer.many then text = require("engine.dist.ranks").from_first(text) end
  if not text then return refuse(self, policy.file, by, why or policy.path .. " cannot be read") end
  if text == policy.source then return false end
  return attempt(self, { source = text, file = policy.file, path = policy.path,
    of_the_file = true }, policy.given, by)
end

-- Whether the policy's file was saved. A new time stamp must be seen twice, because the writer may
-- not have finished at the first.
local function was_saved(self)
  local policy = self.trainer.policy
  if not self.watching or not policy.path then return false end
  local stamp = C.eng_file_stamp(policy.path)
  if stamp == 0 and self.pending_stamp == 0 and self.gone ~= policy then
    self.gone = policy
    self.trainer:note(("step %d: the policy's file %s is gone; the policy stays as it was " ..
      "read"):format(self.trainer.steps_done, policy.path))
  end
  if stamp == self.stamp then
    self.pending_stamp = nil
  elseif stamp ~= 0 and stamp == self.pending_stamp then
    self.stamp, self.pending_stamp = stamp, nil
    return true
  else
    self.pending_stamp = stamp
  end
  return false
end

local SAVED = "its file was saved"

--- Why the policy's file must be read again, or nil.
function Swap:wish()
  return was_saved(self) and SAVED or nil
end

--- Reads the policy's file again. by: the reason, for messages.
function Swap:grant(by)
  local policy = self.trainer.policy
  if not policy.path then
    self.trainer:note(("%s: policy %s has no file to read again"):format(by, policy.name))
  elseif reread(self, by) == false and by ~= SAVED then
    self.trainer:note(("%s: %s has not changed"):format(by, policy.file))
  end
end

--- Called between two steps: handles swaps requested inside the last step, then SIGHUP, then a
--- change of the policy's file. With several ranks, the step's record announces SIGHUP, and rank 0
--- announces file changes (control.lua).
function Swap:between()
  while self.queue[1] do table.remove(self.queue, 1)() end
  local parallel = self.trainer.reducer
  if parallel.many then
    if parallel.hangup then self:grant("SIGHUP") end
    parallel.hangup = false
  elseif C.eng_hangups() > 0 then self:grant("SIGHUP")
  elseif was_saved(self) then self:grant(SAVED) end
end

-- ------------------------------------------------------------------ checkpoints

--- For checkpoints: the current policy, unless it is the one that the script asked for.
function Swap:state()
  local policy = self.trainer.policy
  if self.swaps == 0 or policy.is_class or policy.file == self.asked.file then return nil end
  return { asked = self.asked, name = policy.name, file = policy.file, path = policy.path,
    source = policy.source, options = policy.given }
end

--- Makes a checkpoint's policy current again, if the script still asks for the same policy as
--- before. Returns a line about it.
function Swap:resume(saved)
  local asked = type(saved) == "table" and type(saved.asked) == "table" and saved.asked or {}
  if asked.name ~= self.asked.name or asked.file ~= self.asked.file then return nil end
  local good, policy = pcall(require("engine.policy.policy").load,
    { source = saved.source, file = saved.file, path = saved.path }, saved.options)
  if not good then
    return ("the policy that was swapped in, %s, can no longer be used: %s"):format(
      tostring(saved.file), tostring(policy))
  end
  self.trainer:use_policy(policy)
  self:hold(policy, true)
  self.swaps = 1
  return ("the policy is %s, which was swapped in for %s"):format(label(policy), self.asked.name)
end

return M
