-- Agreement: checks that all ranks still hold the same state. Weights and optimizer scalars are
-- replicated, and without ZeRO no step makes the ranks equal again once they differ. After a
-- flipped bit, an edit on one rank, or a script that is not deterministic between ranks, training
-- would go on silently. So every agree_every steps, before every checkpoint and at the end of a
-- run, the ranks compare
--   scalars   steps, updates, the optimizer's updates and lr, the loss scale, the policy's state,
--             the seed and counter of random numbers
--   tensors   master weights, low-precision weights, moments, averages of weights (Q-EMA) and
--             frozen parameters. Tensors that ZeRO divides are not compared: the moments, and with
--             ZeRO-3 both kinds of weights. Experts are compared only among the ranks that hold
--             them
-- Each rank sends one message of three numbers. If these numbers differ, the ranks exchange the
-- checksum of each value, so that the error can name the first value that differs, and the ranks
-- that differ.
--
-- Called by the loop (train/loop.lua) and by Run:save (run/run.lua), on all ranks between two
-- steps. Owned by the trainer.
local M_ffi = require "engine.base.ffi"
local process = require "engine.base.process"
local exact = require("engine.base.show").exact
local random = require "engine.base.random"
local ranks = require "engine.dist.ranks"

local C, check, ffi = M_ffi.C, M_ffi.check, M_ffi.ffi

local M = {}
M.EVERY = 1000          -- steps between comparisons, by default

local Agreement = {}
Agreement.__index = Agreement

--- Makes the object that compares the ranks of a trainer with the options `o`. Called when the
--- ranks have loaded the same state (Reducer:start). A single process compares nothing, and neither
--- does a job with agree_every=0.
function M.new(trainer, o)
  local every = o.agree_every or M.EVERY
  return setmetatable({ trainer = trainer, every = every, agreed_at = trainer.steps_done,
    on = trainer.reducer.many and every > 0 }, Agreement)
end

-- ------------------------------------------------------------------ what is compared

-- Returns the values that must be equal on all ranks, as a list in the same order on each rank. A
-- scalar is { name =, value = text }. A tensor is { name =, x = tensor, apart = whether only some
-- ranks hold it, held = whether this rank is one of them }.
local function items(trainer)
  local optimizer, reducer, list = trainer.optimizer, trainer.reducer, {}
  local function scalar(name, value) list[#list + 1] = { name = name, value = tostring(value) } end
  local place = random.place()
  scalar("steps", trainer.steps_done)
  scalar("updates", trainer.updates)
  scalar("the optimizer's updates", optimizer.updates)
  scalar("lr", exact(optimizer.lr))
  scalar("the loss scale", exact(trainer.policy:scale()))
  scalar("the state of policy " .. trainer.policy.name, select(2, pcall(trainer.policy.save,
    trainer.policy)))
  scalar("the random numbers", (("seed %s, counter %s"):format(tostring(place.seed),
    tostring(place.counter)):gsub("ULL", "")))

  local function add(name, x, of)
    local apart = reducer.apart and reducer.apart[of]
    if x and x.slot ~= 0 then
      list[#list + 1] = { name = name, x = x, apart = apart ~= nil, held = apart and apart.held }
    end
  end
  local trained = {}
  for i, p in ipairs(optimizer.list) do
    trained[p.name] = true
    local low = M_ffi.Tensor()
    if not reducer.parted or reducer.apart and reducer.apart[p.name] then
      add(p.name, p.tensor, p.name)
      check(C.eng_params_low(low, optimizer.params, i - 1))
      add(p.name .. " (low-precision weights)", low, p.name)
    end
    for _, buffer in ipairs(reducer.zero and {} or optimizer.state:of(i, reducer:shape(p))) do
      add(buffer.name, buffer.x, p.name)
    end
  end
  for _, a in ipairs(optimizer.fp8 and optimizer.fp8.averages.list or {}) do
    add(a.name, a.x, a.p.name)
  end
  for _, p in ipairs(trainer.model:parameters()) do     -- adds frozen parameters
    if not trained[p.name] and p.role ~= "buffer" then add(p.name, p.tensor, p.name) end
  end
  table.insert(list, 1, { name = "the number of compared values", value = tostring(#list) })
  return list
end

-- Returns an array with the checksum of each item. Sets the `value` of items that are tensors.
local function checksums(list)
  local sums = ffi.new("uint64_t[?]", #list)
  for i, item in ipairs(list) do
    if item.x then
      check(C.eng_checksum(sums + i - 1, item.x))
      item.value = ("checksum %016x"):format(sums[i - 1])
    else sums[i - 1] = C.eng_hash64(item.value, #item.value) end
  end
  return sums
end

-- ------------------------------------------------------------------ comparing

-- Returns this rank's message. [0] is the hash of the checksums of the items that all ranks hold,
-- [1] is the hash of the checksums of this rank's other items (experts), [2] is the number of
-- items.
local function summary(list, sums)
  local parts, n = { ffi.new("uint64_t[?]", #list), ffi.new("uint64_t[?]", #list) }, { 0, 0 }
  for i, item in ipairs(list) do
    local part = item.apart and 2 or 1
    if part == 1 or item.held then
      parts[part][n[part]], n[part] = sums[i - 1], n[part] + 1
    end
  end
  return ffi.new("uint64_t[3]", C.eng_hash64(parts[1], 8 * n[1]),
    C.eng_hash64(parts[2], 8 * n[2]), #list)
end

local function gathered(own, n)
  local size = ranks.size()
  local all = ffi.new("uint64_t[?]", n * size)
  check(C.eng_comm_all_gather(ranks.world(), all, own, 8 * n))
  return all
end

-- Groups the ranks by their checksum of an item. Returns two values: the groups, each a list of
-- ranks with one checksum, the largest group first; and whether there is a majority, that is, there
-- are several groups and the first is larger than any other. at(r): the checksum on rank r. held:
-- nil for an item that all ranks hold. For an item of an expert, `held` chooses the ranks to group:
-- the ranks r with reducer:holder(r) == held, which hold the same experts.
local function grouped(reducer, at, held)
  local of, lists = {}, {}
  for r = 0, reducer.size - 1 do
    if not held or reducer:holder(r) == held then
      local key = tostring(at(r))
      if not of[key] then
        of[key] = {}
        lists[#lists + 1] = of[key]
      end
      table.insert(of[key], r)
    end
  end
  table.sort(lists, function(a, b) return #a > #b or #a == #b and a[1] < b[1] end)
  return lists, #lists > 1 and #lists[1] > #lists[2]
end

-- Exchanges the checksums of the first n items. Returns the differences, which are the same on all
-- ranks, as a table with the fields
--   first     the index (from 1) of the first item that differs
--   groups    the groups of ranks for this item, a result of grouped()
--   ranks     the ranks that are outside the majority for at least one item. If an item that
--             differs has no majority, all its ranks are in the list
--   majority  whether every item that differs has a majority
--   count     the number of items that differ
local function differences(reducer, list, sums, n)
  local all, odd = gathered(sums, n), {}
  local found = { ranks = {}, majority = true, count = 0 }
  for i = 1, n do
    local function at(r) return all[r * n + i - 1] end
    local differs, apart = false, list[i].apart
    for held = 0, apart and reducer.size / reducer.holders.size - 1 or 0 do
      local groups, majority = grouped(reducer, at, apart and held or nil)
      if #groups > 1 then
        differs, found.majority = true, found.majority and majority
        if not found.first then found.first, found.groups = i, groups end
        for k = majority and 2 or 1, #groups do
          for _, r in ipairs(groups[k]) do odd[r] = true end
        end
      end
    end
    found.count = found.count + (differs and 1 or 0)
  end
  for r = 0, reducer.size - 1 do
    if odd[r] then table.insert(found.ranks, r) end
  end
  return found
end

-- ------------------------------------------------------------------ the report

-- Returns this process's command line, changed so that it resumes from `checkpoint` and continues
-- the run at `path` (nil: no run).
local function command(path, checkpoint)
  local words = { "engine" }
  local function add(word)
    words[#words + 1] = word:find("^[%w_%-%+%./=:,@%%^]+$") and word or process.quoted(word)
  end
  for i = 0, arg and #arg or -1 do
    if not arg[i]:find("^run=") and not arg[i]:find("^resume=") then add(arg[i]) end
  end
  if path then add("run=" .. path) end
  add("resume=" .. checkpoint)
  return table.concat(words, " ")
end

local SHOWN = 300       -- the most bytes of a value in the message

-- Describes how the ranks differ, for the error and the history. The result is the same on all
-- ranks.
local function describe(self, list, sums, n)
  local trainer = self.trainer
  local found = differences(trainer.reducer, list, sums, n)
  local first, checkpoint = list[found.first], trainer.run_files.last_checkpoint
  local values, path = ranks.from_all(first.value:sub(1, SHOWN)), trainer.run_files.path
  local drift = { step = trainer.steps_done, first = first.name, ranks = found.ranks, values = {},
    agreed = self.agreed_at, checkpoint = checkpoint,
    resume = checkpoint and command(path, checkpoint) or nil }
  drift.summary = ("%s %s, first in %s; %d of %d values differ"):format(ranks.names(found.ranks),
    not found.majority and "differ from each other" or #found.ranks == 1
    and "differs from the others" or "differ from the others", first.name, found.count, n)
  local lines = { ("step %d: the ranks have drifted apart: %s"):format(drift.step, drift.summary) }
  for i, group in ipairs(found.groups) do
    drift.values[i] = { ranks = group, value = values[group[1] + 1] }
    lines[#lines + 1] = ("  %s: %s"):format(ranks.names(group), drift.values[i].value)
  end
  lines[#lines + 1] = ("all ranks last agreed at step %d"):format(self.agreed_at)
  if checkpoint then
    lines[#lines + 1] = "the last checkpoint at which all agreed: " .. checkpoint
    lines[#lines + 1] = "hint: resume from it with the same launcher: " .. drift.resume
  else
    lines[#lines + 1] = "there is no checkpoint to resume from; hint: a run with run=NAME " ..
      "checkpoint_every=STEPS writes checkpoints"
  end
  drift.text = table.concat(lines, "\n")
  return drift
end

-- ------------------------------------------------------------------ when to compare

--- Compares the ranks now; every rank must call this function. If the ranks differ, raises the same
--- error on all ranks, and stores what differs in `drift`.
function Agreement:check()
  if not self.on then return end
  if not self.drift then
    local reducer = self.trainer.reducer
    local list = items(self.trainer)
    local sums = checksums(list)
    local all = gathered(summary(list, sums), 3)
    local same, n = true, #list
    for r = 0, reducer.size - 1 do
      local like = reducer:holder(r)
      same = same and all[3 * r] == all[0] and all[3 * r + 1] == all[3 * like + 1]
      n = math.min(n, tonumber(all[3 * r + 2]))
    end
    self.drift = not same and describe(self, list, sums, n) or nil
  end
  if self.drift then error(self.drift.text, 0) end
  self.agreed_at = self.trainer.steps_done
end

--- Called between two steps and, with `ended`, after the last step. Compares the ranks when a
--- comparison is due. Raises an error if the ranks differ, or if an earlier call of check() found
--- that they differ.
function Agreement:after_step(ended)
  local trainer = self.trainer
  if not (self.drift or ended or self.on and trainer.steps_done % self.every == 0) then return end
  if self.drift or trainer.run_files.saved_at ~= trainer.steps_done then self:check() end
end

return M
