-- Collects a trainer's state for a checkpoint, except tensors, and restores a trainer from a
-- checkpoint. A resume restores all of the trainer's state, a rollback only the state that training
-- changes. This file decides in which order the parts are restored. Called by run.lua, which opens
-- and writes the files.
local M_ffi = require "engine.base.ffi"
local files = require "engine.base.file"
local masters = require "engine.run.masters"
local merged = require("engine.base.arguments").merged
local published = require("engine.policy.signals").values
local random = require "engine.base.random"
local shards = require "engine.run.shards"
local show = require "engine.base.show"
local state_fields = require "engine.run.state_fields"
local user_state = require "engine.run.user_state"

local C, fail_if = M_ffi.C, M_ffi.fail_if

local M = {}

-- ------------------------------------------------------------------ the state as plain data

local function uint64_text(x) return (tostring(x):gsub("ULL$", "")) end
local function uint64_of(text)
  local x = 0ULL
  for digit in text:gmatch("%d") do x = x * 10ULL + tonumber(digit) end
  return x
end

-- Returns the settings that the checkpoint and the resumed run must share: if one differs, the
-- losses differ.
local function numerics_of(trainer)
  return { precision = trainer.precision.name, recipe = trainer.precision.checksum,
    threads = tonumber(C.eng_threads(0)),
    schedule = trainer.schedule and tostring(trainer.schedule) or nil }
end

--- Returns the trainer's state for a checkpoint, without tensors. `user`: the plain part of
--- trainer.state (user_state.lua).
function M.state_of(trainer, user)
  local place, policy, optimizer = random.place(), trainer.policy, trainer.optimizer
  local last, evaluated = trainer.last_verdict, published.evaluation_loss
  local held_out = trainer.evaluate and trainer.evaluate.data
  local fp8 = optimizer.fp8 and optimizer.fp8:state()
  for i, saved in ipairs(fp8 and fp8.policies or {}) do
    saved.swapped = trainer.swaps:state(i + 1)
  end
  return merged(numerics_of(trainer), {
    engine = M_ffi.version, user = user,
    steps = trainer.steps_done, updates = trainer.updates, skipped = trainer.skipped,
    retries = trainer.retries, tokens = trainer.tokens,
    elapsed = require("engine.base.machine").clock() - trainer.began,
    rollbacks = trainer.rollbacks_made, lr_factor = trainer.lr_factor,
    loop = trainer.by_hand and trainer:loop_state() or nil,
    optimizer = { name = optimizer.name, updates = optimizer.updates },
    update_norms = trainer.norms:state(), fp8 = fp8,
    policy = { name = policy.name, file = policy.file, hash = policy.hash and policy:hash(),
      options = not policy.is_class and policy.options or nil,
      state = policy:save(), swapped = trainer.swaps:state(1) },
    last_verdict = trainer.delay == 1 and last and { clip = last.clip, lr_mul = last.lr_mul }
      or nil,
    shadows = trainer.shadows and trainer.shadows:state() or nil, set = trainer.control:state(),
    rng = { seed = uint64_text(place.seed), counter = uint64_text(place.counter) },
    data = trainer.data.state and trainer.data:state() or nil,
    evaluation = held_out and held_out.state and held_out:state() or nil,
    evaluation_loss = evaluated and show.exact(evaluated) or nil,
    accumulate = trainer.accumulate, ranks = trainer.reducer.size,
  })
end

-- Calls f(...), a method with which the owner of a field of the state (a loader, a policy) reads
-- the field. Adds the file and the name of the field to errors of f.
local function owned(c, field, f, ...)
  local good, result = pcall(f, ...)
  if good then return result end
  local line, message = M_ffi.script_line(), tostring(result)
  if message:sub(1, #line) == line then message = message:sub(#line + 1) end
  error(("%s/state.json: %s: %s"):format(c.path, field, message), 0)
end

-- Loads a policy for a seat (swap.lua) from `source` (as in policy.load) and gives it `saved`, the
-- state of a checkpoint's policy. Returns true and the policy, or false and the reason.
local function with_state(seat, saved, source)
  return pcall(function()
    local old = require("engine.policy.policy").load(source, nil, seat.policy.fp8 and "fp8" or nil)
    seat:prepare(old)
    old:restore(saved.state)
    return old
  end)
end

-- Loads a checkpoint's policy from its file or by its name, with its saved state. If both load,
-- prefers the one with the source text that the checkpoint records, and then the file. Returns
-- three values: the policy, or nil; a text for messages, which is the saved policy's name with its
-- file and with a remark if another source was loaded, such as "mine (mine.lua, which has changed
-- since)"; and, without a policy, the reason.
local function saved_policy_of(seat, saved)
  local name, file, found, why = tostring(saved.name), saved.file, nil, nil
  for _, source in ipairs { file or saved.name, saved.name } do
    local good, old = with_state(seat, saved, source)
    why = why or not good and M_ffi.without_line(old)
    if good and (not saved.hash or old.hash and old:hash() == saved.hash) then
      return old, file and file ~= name and ("%s (%s)"):format(name, file) or name
    end
    found = found or good and old or nil
  end
  if found then
    return found, ("%s (%s%s)"):format(name, file or name, found.file == file
      and ", which has changed since" or "; its state was read by " .. found.file)
  end
  local gone = file and file ~= name and not files.exists(file)
  return nil, name, gone and ("there is no file %s, which the checkpoint names; hint: to take " ..
    "over the saved state, restore the file and resume again (history:policies() has its source)")
    :format(file) or why
end

-- Gives a seat's policy the saved state of the checkpoint's policy of the same name. If the source
-- of the policy has changed since the checkpoint, the policy takes over the saved state as at a
-- swap. Returns a line about such a change, or nil.
local function regain(seat, saved)
  local policy = seat.policy
  if not saved.hash or not policy.hash or saved.hash == policy:hash() then
    policy:restore(saved.state)
    return nil
  end
  local took, old = with_state(seat, saved, { source = policy.source, file = policy.file })
  local why = old
  if took then took, why = pcall(policy.take_over, policy, old) end
  local change = "the source of the policy %s has changed since the checkpoint"
  if saved.file ~= policy.file then change = "the policy %s is from %s now and was from %s" end
  change = change:format(policy.name, policy.file, tostring(saved.file))
  return ("%s; the policy %s"):format(change, took and "takes over the saved state"
    or "cannot take over the saved state: " .. tostring(why))
end

-- Returns a line about the options in which a policy differs from `saved`, the checkpoint's policy
-- of the same name; or nil. Older checkpoints, and those of a class, have no options.
local function changed_options(policy, saved)
  local changes = {}
  for _, name in ipairs(saved.options and policy.option_names or {}) do
    local is, was = policy.options[name], saved.options[name]
    if was ~= nil and is ~= was and (is == is or was == was) then
      changes[#changes + 1] = ("%s=%s, was %s"):format(name, show.value(is), show.value(was))
    end
  end
  return #changes > 0 and ("options of policy %s: %s"):format(policy.name,
    table.concat(changes, "; ")) or nil
end

-- Returns the part of a checkpoint's state that belongs to the policy in seat i, and the name of
-- this part; or nil.
local function saved_policy(state, i)
  if i == 1 then return state.policy, "state.policy" end
  local saved = state.fp8 and state.fp8.policies and state.fp8.policies[i - 1]
  return saved, saved and ("state.fp8.policies[%d]"):format(i - 1)
end

-- Restores the policies of the trainer's seats (swap.lua) from a checkpoint's state. A policy that
-- was swapped in before the checkpoint becomes current again. A policy with the saved policy's name
-- gets the saved state; any other takes over from the saved policy or starts fresh. Adds lines
-- about the differences to `notes`.
local function take_policies(trainer, c, notes)
  local state = c.state
  local now = numerics_of(trainer)
  local same = state.precision == now.precision and (state.recipe or now.recipe) == now.recipe
  for i, entry in ipairs(trainer.swaps.seats) do
    local saved, field = saved_policy(state, i)
    if saved and saved.swapped then
      notes[#notes + 1] = owned(c, field .. ".swapped", trainer.swaps.resume, trainer.swaps, i,
        saved.swapped)
    end
    local policy = entry.seat.policy
    local what = policy.fp8 and "FP8 policy" or "policy"
    if saved and saved.name == policy.name then
      notes[#notes + 1] = owned(c, field .. ".state", regain, entry.seat, saved)
      notes[#notes + 1] = changed_options(policy, saved)
    elseif saved then
      local old, was, took, why = nil, saved.name, false, nil
      if same then old, was, why = saved_policy_of(entry.seat, saved) end
      if old then took, why = pcall(policy.take_over, policy, old) end
      notes[#notes + 1] = ("the %s is %s now and was %s; it %s"):format(what, policy.name,
        was, not took and "starts fresh" .. (why and ": " .. tostring(why) or "")
        or policy.fp8 and "takes over the saved state"
        or ("takes over at the scale %s"):format(show.scale(policy:scale())))
    elseif not policy.idle then
      notes[#notes + 1] = ("the FP8 policy %s starts fresh: the checkpoint has no state for it")
        :format(policy.name)
    end
  end
end

--- Returns why a trainer cannot resume from the open checkpoint c or go back to it, or nil.
function M.problem(c)
  local problem = state_fields.problem(c.state)
    or c.state.steps ~= c.step and ("state.steps: expected %.0f, the checkpoint's step, got %.0f")
      :format(c.step, c.state.steps)
    or user_state.problem(c.state.user or { data = {}, tensors = {} }, c.parts.user or {})
  problem = problem and "state.json: " .. problem or not c.parts.model and "it has no weights"
    or not c.parts.optimizer and "it has no optimizer state"
  return problem and ("%s is not a checkpoint of a trainer: %s; hint: use another checkpoint")
    :format(c.path, problem)
end

-- Settings that changed_settings ignores, because they usually differ at a resume.
local NO_PART = { resume = true, run = true, steps = true, log = true }

-- Returns text such as "; layers was 1, is 2" about the settings that differ from those of the
-- checkpoint's run. Returns "" if none differs or the run has no readable history.
local function changed_settings(path, config)
  local before = require("engine.run.history").with((path:match("^(.*)/checkpoints/") or path) ..
    "/history.db", function(h) return h:config() end)
  local changes = {}
  for _, setting in ipairs(before and config and require("engine.base.config").flatten(config)
    or {}) do
    local name, was, is = setting[1], before[setting[1]], tostring(setting[2])
    if was ~= nil and tostring(was) ~= is and not NO_PART[name] then
      changes[#changes + 1] = ("%s was %s, is %s"):format(name, show.value(was), show.value(is))
    end
  end
  return #changes > 0 and "; " .. table.concat(changes, "; ", 1, math.min(#changes, 6)) or ""
end

--- Loads the tensors of a checkpoint on every rank. `c`: on rank 0 the open checkpoint; on other
--- ranks a table with its `state`.
function M.spread(trainer, c)
  shards.spread(trainer.reducer, c.parts and c)
  if not c.state.user then return end
  user_state.restore(trainer.state, c.state.user, function(item)
    local x = c.parts and c:read("user", item.name)
      or require("engine.tensor.tensor").zeros(item.shape, { dtype = item.dtype, keep = true })
    if trainer.reducer.many then
      M_ffi.check(C.eng_comm_broadcast_tensor(require("engine.dist.ranks").world(), x, 0))
    end
    return x
  end)
end

-- Restores what training changes, except tensors (spread): random numbers, FP8 scales, the position
-- in the data, the number of updates. Fits the checkpoint's tensors to the master weights' format.
-- Returns the line of masters.fit about differences in the master weights and averages, or nil.
local function take_training(trainer, c)
  local state, optimizer, data = c.state, trainer.optimizer, trainer.data
  if data.restore and state.data ~= nil then   -- comes first: the loader may refuse the position
    owned(c, "state.data", data.restore, data, state.data)
  end
  local note = c.parts and masters.fit(optimizer, c) or nil
  if trainer.by_hand then trainer:restore_loop(state.loop) end
  optimizer.updates, trainer.updates = state.optimizer.updates, state.updates
  trainer.norms:restore(state.update_norms)
  random.go { seed = uint64_of(state.rng.seed), counter = uint64_of(state.rng.counter) }
  trainer.last_verdict = state.last_verdict
  if optimizer.fp8 then
    optimizer.fp8.averages.held = state.fp8 and state.fp8.held
    optimizer.fp8:apply(trainer.policy:scale() / trainer.accumulate)
  end
  return note
end

-- Returns two values: a line for the user, or nil; and the position from which a resumed run
-- continues its data, or nil. With restart_data, the data begin at their first batch, and the line
-- says so. Without it, raises an error if there is no position or the loader cannot restore it.
-- Returns nil and nil for a session without `data`, whose loop reads the data itself.
local function place_of_data(trainer, path, place)
  if trainer.own_data == false then return nil, nil end
  if trainer.restart_data then return "the data begin at their first batch (restart_data)", nil end
  local problem, hint
  if not trainer.data.restore then
    problem = "the loader has no state() and restore()"
    hint = "add them to the loader (docs/data.md), or accept this with restart_data = true"
  elseif not place then
    problem = "the checkpoint holds no position in the data"
    hint = "restart_data = true accepts this"
  else
    return nil, place
  end
  M_ffi.fail("resume: %s: %s, so the data would begin at their first batch again; hint: %s", path,
    problem, hint)
end

-- Moves the evaluation's data to the position `place`. If that fails, returns a line with the
-- reason.
local function restore_evaluation(trainer, place)
  local data = trainer.evaluate and trainer.evaluate.data
  if not (place and data and data.restore) then return nil end
  local good, why = pcall(data.restore, data, place)
  return not good and "evaluations begin at the first batch of their data: " .. tostring(why) or nil
end

--- Restores all of a trainer from a checkpoint (`c` as in M.spread), except tensors. Adds lines
--- about the differences between this run and the checkpoint to `notes`. config: the settings of
--- this run.
function M.take_over(trainer, c, notes, config)
  local state = c.state
  local problem = c.parts and M.problem(c)
  fail_if(problem, "resume: %s", problem)
  fail_if(state.optimizer.name ~= trainer.optimizer.name, "resume: %s was written with the " ..
    "optimizer %s, but this run has %s; hint: use that optimizer, or begin a new run with " ..
    "run=ANOTHER_NAME", c.path, state.optimizer.name, trainer.optimizer.name)
  notes[#notes + 1], state.data = place_of_data(trainer, c.path, state.data)
  c.changes = function() return changed_settings(c.path, config) end
  take_policies(trainer, c, notes)
  if trainer.shadows and state.shadows then trainer.shadows:restore(state.shadows, notes) end
  notes[#notes + 1] = state.set
    and owned(c, "state.set", trainer.control.restore, trainer.control, state.set)
  notes[#notes + 1] = take_training(trainer, c)
  notes[#notes + 1] = restore_evaluation(trainer, state.evaluation)
  trainer.steps_done, trainer.skipped = state.steps, state.skipped
  trainer.rollbacks_made, trainer.lr_factor = state.rollbacks or 0, state.lr_factor or 1
  published.evaluation_loss = tonumber(state.evaluation_loss)
  trainer.retries, trainer.tokens = state.retries, state.tokens
  trainer.turn = state.loop and state.loop.turn or state.steps
  trainer.began = trainer.began - state.elapsed
  notes[#notes + 1] = trainer:share_as_before(state.ranks or 1,
    state.accumulate or trainer.accumulate)
  local now = numerics_of(trainer)
  for _, what in ipairs { "precision", "schedule", "threads" } do
    if state[what] ~= now[what] then
      notes[#notes + 1] = ("%s is %s now and was %s, so the losses will differ"):format(what,
        tostring(now[what] or "none"), tostring(state[what] or "none"))
    end
  end
  local recipe = { name = state.precision or now.precision,
    checksum = state.recipe or now.recipe }
  if recipe.name == now.precision and recipe.checksum ~= now.recipe then
    notes[#notes + 1] = ("the recipe of precision %s is not the same as in the checkpoint, so " ..
      "the losses will differ"):format(now.precision)
  end
  if recipe.name ~= now.precision or recipe.checksum ~= now.recipe then
    trainer.recipe = recipe                   -- see Trainer:note_recipe
  end
end

--- Rolls a trainer back to a checkpoint of its own run (`c` as in M.spread). Policies of FP8 layers
--- get their saved state; the loss-scaling policy and the counters of steps do not change.
function M.go_back(trainer, c)
  for i = 2, #trainer.swaps.seats do
    local saved, field = saved_policy(c.state, i)
    local seat = trainer.swaps.seats[i].seat
    local line = saved and saved.name == seat.policy.name
      and owned(c, field .. ".state", regain, seat, saved)
    if line then trainer:note(("step %d: %s"):format(trainer.steps_done, line)) end
  end
  take_training(trainer, c)
  trainer.reducer:start(function() M.spread(trainer, c) end)
end

return M
