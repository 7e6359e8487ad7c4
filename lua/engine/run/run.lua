-- The files of a run, and how a run resumes from them.
--   runs/<name>/history.db       every step (history.lua)
--   runs/<name>/tensorboard/     event files, if asked for (tensorboard.lua)
--   runs/<name>/checkpoints/     states to resume from (checkpoint.lua)
-- Called only by trainers and sessions. Owns the order in which a run's parts are restored.
local M_ffi = require "engine.base.ffi"
local checkpoint = require "engine.run.checkpoint"
local masters = require "engine.run.masters"
local random = require "engine.base.random"
local shards = require "engine.run.shards"
local show = require "engine.base.show"
local published = require "engine.policy.signals"
local user_state = require "engine.run.user_state"

local ffi, C = M_ffi.ffi, M_ffi.C
local DIRECTORY = 2   -- what eng_file_kind returns for a folder

local M = {}

local Run = {}
Run.__index = Run

--- The directory of a run: runs/<name> for a name; anything with a slash is a path already.
function M.directory(name)
  return name:find("/", 1, true) and name or "runs/" .. name
end

-- ------------------------------------------------------------------ state of a run as plain data

local function uint64_text(x) return (tostring(x):gsub("ULL$", "")) end
local function uint64_of(text)
  local x = 0ULL
  for digit in text:gmatch("%d") do x = x * 10ULL + tonumber(digit) end
  return x
end

-- The trainer's state for a checkpoint, without tensors. `user`: the plain part of trainer.state
-- (user_state.lua).
local function state_of(trainer, user)
  local place = random.place()
  local elapsed = require("engine.base.machine").clock() - trainer.began
  local last, evaluated = trainer.last_verdict, published.evaluation_loss
  local held_out = trainer.evaluate and trainer.evaluate.data
  local fp8 = trainer.optimizer.fp8 and trainer.optimizer.fp8:state()
  for i, of in ipairs(fp8 and fp8.policies or {}) do of.swapped = trainer.swaps:state(i + 1) end
  return {
    user = user, evaluation_loss = evaluated and show.exact(evaluated) or nil,
    rollbacks = trainer.rollbacks_made, lr_factor = trainer.lr_factor,
    loop = trainer.by_hand and trainer:loop_state() or nil,
    steps = trainer.steps_done, updates = trainer.updates, skipped = trainer.skipped,
      retries = trainer.retries, tokens = trainer.tokens, elapsed = elapsed,
    optimizer = { name = trainer.optimizer.name, updates = trainer.optimizer.updates },
    update_norms = trainer.norms:state(),
    policy = { name = trainer.policy.name, file = trainer.policy.file,
      hash = trainer.policy.hash and trainer.policy:hash(), state = trainer.policy:save(),
      swapped = trainer.swaps:state(1) },
    shadows = trainer.shadows and trainer.shadows:state() or nil, set = trainer.control:state(),
    rng = { seed = uint64_text(place.seed), counter = uint64_text(place.counter) },
      accumulate = trainer.accumulate, ranks = trainer.reducer.size,
    last_verdict = trainer.delay == 1 and last and { clip = last.clip, lr_mul = last.lr_mul }
      or nil,
    data = trainer.data.state and trainer.data:state() or nil, evaluation = held_out
      and held_out.state and held_out:state() or nil, fp8 = fp8,
    precision = trainer.precision.name, schedule = trainer.schedule and tostring(trainer.schedule)
      or nil,
    threads = tonumber(C.eng_threads(0)), engine = M_ffi.version,
  }
end

-- Lets a seat's policy take over from a checkpoint's policy, which has the text of `source` (what
-- policy.load takes). Returns false and the reason if it cannot.
local function follow(seat, saved, source)
  return pcall(function()
    local old = require("engine.policy.policy").load(source, nil, seat.policy.fp8 and "fp8" or nil)
    seat:prepare(old)
    old:restore(saved.state)
    seat.policy:take_over(old)
  end)
end

-- Gives a seat's policy the state that a checkpoint has of one of the same name. If the source was
-- another, the policy takes over from it as at a swap; then returns a line about it.
local function regain(seat, saved)
  local policy = seat.policy
  if not saved.hash or not policy.hash or saved.hash == policy:hash() then
    policy:restore(saved.state)
    return nil
  end
  local took, why = follow(seat, saved, { source = policy.source, file = policy.file })
  return ("the source of the policy %s has changed since the checkpoint; it %s"):format(policy.name,
    took and "takes over the state" or "does not take over the state: " .. tostring(why))
end

-- Restores the policies of the trainer's seats (swap.lua) from a checkpoint's state: a policy that
-- was swapped in returns, the same policy gets its saved state, and another takes over from the
-- saved one or starts fresh. Adds lines about what differs to `notes`.
local function take_policies(trainer, state, notes)
  local same = state.precision == trainer.precision.name
  local fp8 = type(state.fp8) == "table" and state.fp8.policies
  for i, of in ipairs(trainer.swaps.seats) do
    local saved = i == 1 and state.policy or type(fp8) == "table" and fp8[i - 1]
    saved = type(saved) == "table" and type(saved.state) == "string" and saved or nil
    if saved and saved.swapped then
      notes[#notes + 1] = trainer.swaps:resume(i, saved.swapped)
    end
    local policy = of.seat.policy
    local what = policy.fp8 and "FP8 policy" or "policy"
    if saved and saved.name == policy.name then notes[#notes + 1] = regain(of.seat, saved)
    elseif saved then
      local took = same and (follow(of.seat, saved, saved.name)
        or saved.file and follow(of.seat, saved, saved.file))
      notes[#notes + 1] = ("the %s is %s now and was %s; it %s"):format(what, policy.name,
        tostring(saved.name), not took and "starts fresh" or policy.fp8 and "takes over"
        or ("takes over at the scale %g"):format(policy:scale()))
    elseif not policy.idle then
      notes[#notes + 1] = ("the FP8 policy %s starts fresh: the checkpoint has no state for it")
        :format(policy.name)
    end
  end
end

-- What a checkpoint's state lacks, or nil.
local function state_problem(state)
  if type(state) ~= "table" then return "it has no state" end
  for _, key in ipairs { "steps", "updates", "skipped", "retries", "tokens", "elapsed" } do
    if type(state[key]) ~= "number" then return ("its state has no number '%s'"):format(key) end
  end
  for part, keys in pairs { optimizer = { name = "string", updates = "number" },
    policy = { name = "string", state = "string" },
    rng = { seed = "string", counter = "string" } } do
    for key, kind in pairs(keys) do
      if type(state[part]) ~= "table" or type(state[part][key]) ~= kind then
        return ("its state has no '%s.%s'"):format(part, key)
      end
    end
  end
end

-- Calls f with all tensors of a checkpoint's part, { name = tensor }, and frees them.
local function take_tensors(c, part, f)
  local tensors = {}
  local good, message = pcall(function()
    for name in pairs(c.parts[part]) do tensors[name] = c:read(part, name) end
    f(tensors)
  end)
  for _, x in pairs(tensors) do x:free() end
  if not good then error(message, 0) end
end

-- The first parameter that differs between the trainer's model and a checkpoint, or nil.
local function difference(trainer, c)
  local saved, known, own = c.parts.model, {}, trainer.model:parameters()
  local function text(shape) return "[" .. table.concat(shape, " x ") .. "]" end
  for _, p in ipairs(own) do
    local now, entry = text(p.tensor.shape), saved[p.name]
    known[p.name] = true
    if not entry then return ("%s, %s here, is not in the checkpoint"):format(p.name, now) end
    if text(entry.shape) ~= now then
      return ("%s is %s in the checkpoint and %s here"):format(p.name, text(entry.shape), now)
    end
  end
  for _, name in ipairs(require("engine.base.nearest").keys(saved)) do
    if not known[name] then
      return ("%s, %s in the checkpoint, is not here"):format(name, text(saved[name].shape))
    end
  end
end

-- "; layers was 1, is 2": the settings that differ from those of the checkpoint's run, if its
-- history has them.
local NO_PART = { resume = true, run = true, steps = true, log = true }   -- may differ
local function changed_settings(path, config)
  local before = require("engine.run.history").with((path:match("^(.*)/checkpoints/") or path) ..
    "/history.db", function(h) return h:config() end)
  local changes = {}
  for _, setting in ipairs(before and config and require("engine.base.config").flatten(config)
    or {}) do
    local name, was, is = setting[1], before[setting[1]], tostring(setting[2])
    if was ~= nil and tostring(was) ~= is and not NO_PART[name] then
      changes[#changes + 1] = ("%s was %s, is %s"):format(name, was, is)
    end
  end
  return #changes > 0 and "; " .. table.concat(changes, "; ", 1, math.min(#changes, 6)) or ""
end

-- Sends the tensors of a checkpoint from rank 0 to every rank. `c`: open on rank 0; elsewhere it
-- has only its state.
local function spread(trainer, c)
  shards.spread(trainer.reducer, c.parts and c)
  if not c.state.user then return end
  user_state.restore(trainer.state, c.state.user, function(item)
    local x = c.parts and c:read("user", item.name)
      or require("engine.tensor.tensor").zeros(item.shape, { dtype = item.dtype, keep = true })
    M_ffi.check(C.eng_comm_broadcast_tensor(require("engine.dist.ranks").world(), x, 0))
    return x
  end)
end

-- Restores what training changes: weights, moments, trainer.state, random numbers, FP8 scales, the
-- position in the data, the number of updates. With several ranks, spread() sends the tensors.
local function restore(trainer, c)
  local state, optimizer = c.state, trainer.optimizer
  if trainer.by_hand then trainer:restore_loop(state.loop) end
  if not trainer.reducer.many then
    take_tensors(c, "optimizer", function(moments) optimizer:load_state(moments,
      state.optimizer.updates) end)
    take_tensors(c, "model", function(weights) trainer.model:load_state(weights) end)
    if state.user then
      user_state.restore(trainer.state, state.user,
        function(item) return c:read("user", item.name) end)
    end
  end
  optimizer.updates, trainer.updates = state.optimizer.updates, state.updates
  trainer.norms:restore(state.update_norms)
  M_ffi.check(C.eng_params_refresh(optimizer.params))
  if trainer.data.restore and state.data then trainer.data:restore(state.data) end
  random.go { seed = uint64_of(state.rng.seed), counter = uint64_of(state.rng.counter) }
  trainer.last_verdict = state.last_verdict
  if optimizer.fp8 then optimizer.fp8:apply(trainer.policy:scale() / trainer.accumulate) end
end

-- Raises if the data of a resumed run would silently begin again. Returns a line if the script
-- accepts this (restart_data); otherwise nil and the position to continue from. The loop of a
-- session without `data` keeps its own place.
local function place_of_data(trainer, path, place)
  if trainer.own_data == false then return nil, nil end
  if trainer.restart_data then return "the data begin at their first batch (restart_data)", nil end
  local problem = not trainer.data.restore and "the loader has no state() and restore()"
    or not place and "the checkpoint holds no position in the data"
  if not problem then return nil, place end
  error(("resume: %s: %s, so the data would begin at their first batch again; hint: a loader "
    .. "with both (docs/data.md), or restart_data = true to accept it"):format(path, problem), 0)
end

-- Moves the evaluation's data to the position `place`. Returns a line if the data refuse it.
local function restore_evaluation(trainer, place)
  local data = trainer.evaluate and trainer.evaluate.data
  if not (place and data and data.restore) then return nil end
  local good, why = pcall(data.restore, data, place)
  return not good and "evaluations begin at the first batch of their data: " .. tostring(why) or nil
end

-- Restores the trainer's parts from an open checkpoint; returns lines about what differs now.
local function take_over(trainer, c, config)
  local notes, state = {}, c.state
  local problem = state_problem(state) or not c.told
    and (not c.parts.model and "it has no weights" or not c.parts.optimizer
    and "it has no optimizer state")
  if problem then
    error(("resume: %s is not a checkpoint of a trainer: %s"):format(c.path, problem), 0)
  end
  if state.optimizer.name ~= trainer.optimizer.name then
    error(("resume: %s was written with the optimizer %s, this run has %s"):format(c.path,
      state.optimizer.name, trainer.optimizer.name), 0)
  end
  notes[1], state.data = place_of_data(trainer, c.path, state.data)
  local other = not trainer.reducer.many and difference(trainer, c)
  if other then
    error(("resume: %s was written by another model: %s%s"):format(c.path, other,
      changed_settings(c.path, config)), 0)
  end
  take_policies(trainer, state, notes)
  if trainer.shadows then trainer.shadows:restore(state.shadows) end
  notes[#notes + 1] = trainer.control:restore(state.set)
  notes[#notes + 1] = c.parts and masters.fit(trainer.optimizer, c)
  restore(trainer, c)
  notes[#notes + 1] = restore_evaluation(trainer, state.evaluation)
  trainer.steps_done, trainer.skipped = state.steps, state.skipped
  trainer.rollbacks_made, trainer.lr_factor = state.rollbacks or 0, state.lr_factor or 1
  published.evaluation_loss = tonumber(state.evaluation_loss)
  trainer.retries, trainer.tokens = state.retries, state.tokens
  trainer.turn = state.loop and state.loop.turn or state.steps
  trainer.began = trainer.began - state.elapsed
  notes[#notes + 1] = trainer:share_as_before(state.ranks or 1,
    state.accumulate or trainer.accumulate)
  for _, what in ipairs { "precision", "schedule", "threads" } do
    local now = ({ precision = trainer.precision.name, schedule = trainer.schedule
      and tostring(trainer.schedule), threads = tonumber(C.eng_threads(0)) })[what]
    if state[what] ~= now then
      notes[#notes + 1] = ("%s is %s now and was %s, so the losses will differ"):format(what,
        tostring(now), tostring(state[what]))
    end
  end
  return notes
end

-- ------------------------------------------------------------------ opening

-- Whether `resume` continues the run in the directory `path`: "auto", or the path of that run or of
-- one of its checkpoints. A checkpoint of another run starts a new run.
local function continues(path, resume)
  if resume == "auto" or resume == true then return true end
  local from, own = M.directory(resume), C.eng_file_stamp(path .. "/checkpoints")
  for _, checkpoints in ipairs { "/checkpoints", "", "/.." } do
    if own ~= 0 and C.eng_file_stamp(from .. checkpoints) == own then return true end
  end
  return false
end

-- Whether the directory holds a run. A run that failed before its first step does not count.
local function exists(path)
  local file = path .. "/history.db"
  if #checkpoint.steps(path .. "/checkpoints") > 0 then return true end
  if C.eng_file_kind(file) == 0 then return false end
  local steps = require("engine.run.history").with(file, function(h)
    return #h:query "SELECT 1 FROM steps LIMIT 1"
  end)
  return not steps or steps > 0
end

local holders = setmetatable({}, { __mode = "v" })  -- path -> the Run of this process that holds it

--- Makes the run's directory and locks it; returns false and a message when another process has the
--- lock. If a trainer of this process holds the lock and never ran, that lock is released first.
function Run:take(path)
  local other = holders[path]
  if other and not other.running then other:close() end
  local lock = ffi.new("int[1]", -1)
  M_ffi.check(C.eng_file_mkdir(path .. "/checkpoints"))
  local status = C.eng_file_lock(lock, path .. "/lock")
  if status == C.ENG_ERR_STATE then return false, M_ffi.message() end
  M_ffi.check(status)
  self.path, self.lock = path, ffi.gc(lock, function(l) C.eng_file_unlock(l[0]) end)
  holders[path] = self
  return true
end

function Run:give()
  if self.lock then
    C.eng_file_unlock(ffi.gc(self.lock, nil)[0])
    holders[self.path] = nil
  end
  self.lock, self.running = nil, false
end

-- Raises unless the last part of a path can name a run.
local function check_name(path)
  local name = path:match("([^/]*)/*$")
  local problem = show.name_problem(name)
    or path:find("^runs/%.%.?$") and "is that of another folder"
  if problem then error(("run: the name %s: '%s'"):format(problem, show.cut(path, 200)), 0) end
end

--- Takes the run's directory. If it holds a run that is not to be continued, takes the next free
--- name.
function Run:find_place(path, resume)
  check_name(path)
  self.continues = resume and continues(path, resume)
  if self.continues or not exists(path) then
    local good, message = self:take(path)
    if good then return end
    if self.continues then
      error(("%s is being written by another run: %s; hint: wait for it, or " ..
        "run=ANOTHER_NAME"):format(path, message), 0)
    end
  end
  local n = 2
  while C.eng_file_kind(path .. "-" .. n) ~= 0 or not self:take(path .. "-" .. n) do n = n + 1 end
  self.warnings[1] =
    ("%s already exists: this run writes to %s (resume=auto continues the old one)"):format(path,
      self.path)
end

-- The checkpoint to resume from, or nil; raises an error when a named one does not exist.
local function find_checkpoint(self, resume)
  local dir = self.path and self.path .. "/checkpoints"
  if resume == "auto" or resume == true then
    if not dir then
      error("resume: a run without a name has nothing to resume; hint: run=NAME", 0)
    end
  else
    dir = M.directory(resume)
    if C.eng_file_kind(dir .. "/checkpoints") == DIRECTORY then dir = dir .. "/checkpoints" end
    if C.eng_file_kind(dir) ~= DIRECTORY then
      error(("resume: there is no run or checkpoint %s"):format(dir), 0)
    end
  end
  if C.eng_file_kind(dir) ~= DIRECTORY then return nil end
  local c, message, damaged = checkpoint.open(dir)
  if not c and resume ~= "auto" and resume ~= true then
    error("resume: " .. tostring(message), 0)
  end
  if c then
    for _, line in ipairs(c.skipped or {}) do self.warnings[#self.warnings + 1] = line end
  elseif damaged then      -- a fresh start would drop the run's records
    error(("resume: no checkpoint can be used: %s; hint: restore what is missing, or " ..
      "start a new run with run=ANOTHER_NAME"):format(message), 0)
  elseif message then
    self.notes[#self.notes + 1] = message
  end
  return c
end

--- Opens the history. cut: removes what an earlier run recorded from this step on.
function Run:open_history(cut)
  if not self.wants_history then return end
  local path = self.path .. "/history.db"
  cut = cut and C.eng_file_kind(path) ~= 0
  self.history = require("engine.run.history").open(path, { write = true })
  if cut then self:complain(self.history:resume(self.trainer.steps_done)) end
  self:describe()
end

-- On ranks above 0: receives what rank 0 opened and read. These ranks write only shards of
-- checkpoints.
local function told(self)
  local news = require("engine.base.json").decode(require("engine.dist.ranks").from_first())
  self.path, self.recorded, self.last_checkpoint = news.path, news.recorded, news.read
  if news.state then
    take_over(self.trainer, { state = news.state, path = news.read, told = true })
  end
  local reducer = self.trainer.reducer
  reducer:start(news.state and function() spread(self.trainer, news) end)
end

local function tell(self, c)
  local recorded = (self.path ~= nil and self.wants_history) or (self.wants_tensorboard or "") ~= ""
  local news = { recorded = recorded, path = self.path, read = c and c.path, state = c and c.state }
  require("engine.dist.ranks").from_first(require("engine.base.json").encode(news))
  local reducer = self.trainer.reducer
  reducer:start(c and function() spread(self.trainer, c) end)
end

local function open(self, resume)
  local trainer = self.trainer
  local c = resume and find_checkpoint(self, resume) or nil
  if c then
    for _, line in ipairs(take_over(trainer, c, self.config)) do
      self.notes[#self.notes + 1] = line
    end
    self.last_checkpoint = c.path
    self.notes[#self.notes + 1] = ("resumed from %s: step %d, %d updates"):format(c.path,
      trainer.steps_done, trainer.updates)
  elseif resume then
    self.notes[#self.notes + 1] = "nothing to resume: a new run begins"
  end
  if trainer.reducer.many then tell(self, c) end
  if c then c:close() end
  if not self.path then return end
  if c and self.continues then
    checkpoint.forget_after(self.path .. "/checkpoints", trainer.steps_done)
  end
  self:open_history(self.continues)
end

--- Opens a trainer's run: nothing without a name, else a new directory or the one to resume.
function M.open(trainer, options)
  local self = setmetatable({ trainer = trainer, notes = {}, warnings = {},
    checkpoint_every = options.checkpoint_every or 0, keep = options.keep or 3,
    stats_every = options.stats_every or 100, config = options.config, name = options.run,
      wants_history = options.history ~= false,
    wants_tensorboard = options.tensorboard }, Run)
  local resume = options.resume
  if resume == "" or resume == "false" then resume = false end
  if trainer.reducer.rank > 0 then
    self.follows = true
    told(self)
    return self
  end
  if options.run and options.run ~= "" then self:find_place(M.directory(options.run), resume) end
  if self.wants_tensorboard == true and not self.path then
    error("tensorboard: a run without a name has no directory for event files; hint: run=NAME, " ..
      "or tensorboard as a directory", 0)
  end
  local good, message = pcall(open, self, resume)
  if not good then
    self:give()
    error(message, 0)
  end
  return self
end

--- Whether rank 0 records exponent histograms.
function Run:wants_hist()
  return self.recorded or self.history ~= nil or (self.wants_tensorboard or "") ~= ""
end

--- Opens the event file for TensorBoard, if asked for.
function Run:open_tensorboard()
  local wanted = self.wants_tensorboard
  if not wanted or wanted == "" or self.events then return end
  local dir = wanted == true and self.path .. "/tensorboard" or wanted
  self.events = require("engine.run.tensorboard").live(dir, self.trainer.optimizer.list,
    self.trainer.steps_done)
end

--- Opens the files again when a trainer runs once more, after an error or for more steps.
function Run:reopen()
  self.running = true
  self:open_tensorboard()
  if not self.path or self.lock or self.follows then return end
  local good, message = self:take(self.path)
  if not good then
    error(("%s is being written by another run: %s"):format(self.path, message), 0)
  end
  self:open_history(true)
end

-- How this process was started, as JSON, for `engine replay --verify`: the script and a checksum of
-- it, its arguments, the folder, the run's name in the script. Nil without a script.
local function command_text(self)
  local script = type(arg) == "table" and arg[-1] and arg[0]
  local source = type(script) == "string" and require("engine.base.file").read(script)
  if not source then return nil end
  local words = {}
  for i, word in ipairs(arg) do words[i] = tostring(word) end
  return require("engine.base.json").encode { script = script, arguments = words,
    folder = os.getenv("PWD"), run = self.name, crc32c = C.eng_crc32c(0, source, #source) }
end

--- Records what this run is: parameters, settings, the policy's source.
function Run:describe()
  local history, trainer, list = self.history, self.trainer, {}
  local formats = trainer:gradient_formats()
  self.signals = {}                   -- the values written last
  for i, p in ipairs(trainer.optimizer.list) do
    list[i] = { name = p.name, shape = trainer.reducer:shape(p), gradient = formats[i] }
  end
  self:complain(history:set_parameters(list))
  for key, value in pairs { policy = trainer.policy.name, precision = trainer.precision.name,
    gradients = trainer.precision.weight_gradients, accumulate = trainer.accumulate,
    mode = trainer.delay == 1 and "lagged" or "sync",
    optimizer = trainer.optimizer.name, schedule = tostring(trainer.schedule or "none"),
      steps = trainer.steps,
    parameters = trainer.model:count(), threads = tonumber(C.eng_threads(0)),
      device = M_ffi.string(C.eng_device_name()),
    ranks = trainer.reducer.size, zero = trainer.reducer:level_of_zero(),
      comm_dtype = trainer.reducer.comm_dtype } do
    self:complain(history:set_meta(key, value))
  end
  local sites = trainer.optimizer.fp8
  if sites then
    self:complain(history:set_meta("fp8", require("engine.base.json").encode { layers = sites.paths,
      sample = sites.sample, rungs = sites.rungs }))
  end
  local command = command_text(self)
  if command then self:complain(history:set_meta("command", command)) end
  for _, setting in ipairs(self.config and require("engine.base.config").flatten(self.config)
    or {}) do
    self:complain(history:set_config(setting[1], setting[2]))
  end
  local swap = require "engine.run.swap"
  for i, of in ipairs(trainer.swaps.seats) do
    local policy = of.seat.policy
    if policy.source and not policy.idle then
      self:complain(history:add_policy(policy:hash(), policy.name, policy.source))
    end
    if not policy.idle then
      self:event(trainer.steps_done, i == 1 and "policy" or "fp8_policy", swap.label(policy),
        require("engine.base.json").encode(swap.described(policy)))
    end
  end
  self:layers(trainer.steps_done - 1, trainer.steps_done > 0)
end

-- ------------------------------------------------------------------ while it runs

--- Reports a failure to write the history, once; the run continues.
function Run:complain(good, message)
  if good ~= nil and good ~= false then return end
  local line = tostring(message):gsub("^[^:\n]+:%d+: ", "")   -- without the script's line
  if self.complained == line then return end
  self.complained = line
  self.trainer:warn(line)
end

-- A step's signals and, as "log.NAME", what its verdict logged. A value that is no longer logged
-- becomes nan.
local function with_logs(self, signals, logs)
  if not logs and not self.logged then return signals end
  self.logged = self.logged or {}                          -- every name so far
  local all = {}
  for name in pairs(self.logged) do all[name] = 0 / 0 end
  for name, value in pairs(signals) do all[name] = value end
  for name, value in pairs(logs or {}) do
    name = "log." .. name
    all[name], self.logged[name] = value, true
  end
  return all
end

-- Records published signals where they changed.
function Run:append_signals(step, signals)
  local told_before = self.signals
  for name, value in pairs(signals) do
    local before = told_before[name]
    if before ~= value and not (value ~= value and before ~= nil and before ~= before) then
      told_before[name] = value
      self:complain(self.history:append_signal(step, name, value))
    end
  end
end

--- Records a step: record, verdict, per-tensor statistics, tokens, the signals ({ name = number })
--- that its policy saw, and what its verdict logged (also { name = number }, or nil).
function Run:append(record, verdict, stats, tokens, signals, logs)
  local history, events = self.history, self.events
  self.running = true
  signals = with_logs(self, signals, logs)
  if events then
    events:step(record, verdict, tokens, signals)
    if record.overflow ~= 0 or tonumber(record.step) % self.stats_every == 0 then
      events:tensors(tonumber(record.step), stats)
    end
    local trouble = events:trouble()
    if trouble then self:complain(nil, trouble) end
  end
  if not history then return end
  self:complain(history:append(record, verdict, tokens))
  local step = tonumber(record.step)
  self:append_signals(step, signals)
  if record.overflow ~= 0 or step % self.stats_every == 0 then
    self:complain(history:append_tensors(step, stats, #self.trainer.optimizer.list))
  end
  if record.overflow ~= 0 then
    local text, data = self.trainer.overflows:text(record, stats, M_ffi.string(verdict.reason))
    self:complain(history:event(step, "overflow", text, data))
  end
end

--- Records the meters of FP8 layers (fp8_sites.lua).
function Run:fp8(step, rows)
  if not self.history then return end
  self:complain(self.history:append_fp8(step, rows))
end

--- Records which FP8 layers changed their rung (fp8_sites.lua) with the verdict on a step. all: the
--- rungs of all layers.
function Run:layers(step, all)
  local sites = self.trainer.optimizer.fp8
  local moved, text
  if sites and self.history then moved, text = sites:moves(all) end
  if moved then self:event(step, "layers", text, require("engine.base.json").encode(moved)) end
end

function Run:event(step, kind, text, data)
  text = show.shown(text or "", true)
  if self.history then self:complain(self.history:event(step, kind, text, data)) end
end

-- Raises an error if weights are inf or nan: such a checkpoint must not become the newest.
local function check_weights(self)
  local problem = require("engine.tensor.stats").nonfinite(self.trainer.reducer:weights())
  if problem then error(problem, 0) end
end

-- Writes a checkpoint; returns its path, or nil and what went wrong.
local function write(self, alone)
  local trainer, dir, options = self.trainer, self.path .. "/checkpoints", { keep = self.keep }
  local saved, tensors
  if trainer.reducer.many and not alone then
    return checkpoint.save_shards(dir, trainer.steps_done,
      function()
        check_weights(self)
        if not self.follows then saved, tensors = user_state.pack(trainer.state) end
        return shards.of_rank(trainer.reducer, tensors)
      end,
      function() return state_of(trainer, saved) end, options)
  end
  local good, path, note = pcall(function()
    check_weights(self)
    saved, tensors = user_state.pack(trainer.state)
    return checkpoint.save(dir, trainer.steps_done,
      { model = trainer.model:state(), optimizer = trainer.optimizer:state_tensors(),
      user = next(tensors) and tensors, state = state_of(trainer, saved) }, options)
  end)
  if good then return path, note end
  return nil, (tostring(path):gsub("^[^:\n]+:%d+: ", ""))   -- without the script's line
end

--- Writes a checkpoint; returns its path, or nil and a message. Every rank calls it and writes a
--- shard, after a comparison of the ranks, which raises an error if they have drifted apart. With
--- `alone`, rank 0 writes the whole state by itself, for when other ranks may have died.
function Run:save(alone)
  local trainer = self.trainer
  if alone and self.follows then return nil end
  if not alone then
    trainer.reducer:share_buffers()
    trainer.agreement:check()
  end
  -- a run killed after this resumes from here, so no step may be missing
  if self.history then self:complain(self.history:flush()) end
  local path, note = write(self, alone)
  self.nonfinite = not path and note:match("the weights hold [^;]*")   -- the same on all ranks
  self.unsaved = not path and not self.nonfinite
  if not path then
    self:event(trainer.steps_done, "error", "checkpoint: " .. note)
    return nil, "no checkpoint was written: " .. note
  end
  self:event(trainer.steps_done, "checkpoint", path)
  self.saved_at, self.last_checkpoint = trainer.steps_done, path
  return path, note
end

--- Returns to the newest intact checkpoint of `step` or before, and drops later ones. Every rank
--- calls it between two steps. The policy, the counters of steps and the history stay. Returns the
--- checkpoint's step and path, or nil and the reason.
function Run:go_back(step)
  local trainer, reducer = self.trainer, self.trainer.reducer
  local dir = self.path and self.path .. "/checkpoints"
  local c, why
  if not dir then why = "a run without a name has no checkpoints"
  elseif not self.follows then
    c, why = checkpoint.open(dir, step)
    if not c then why = ("there is no checkpoint of step %d or before"):format(step) end
  end
  if reducer.many then
    local json, ranks = require "engine.base.json", require "engine.dist.ranks"
    local news = json.decode(ranks.from_first(not self.follows and json.encode { why = why,
      step = c and c.step, path = c and c.path, state = c and c.state } or nil))
    why = news.why
    if news.state then c = c or news end
  end
  if not c then return nil, why end
  local fp8 = type(c.state.fp8) == "table" and c.state.fp8.policies
  for i, seat in ipairs(trainer.optimizer.fp8 and trainer.optimizer.fp8.seats or {}) do
    local saved = type(fp8) == "table" and fp8[i]
    local line = saved and saved.name == seat.policy.name and type(saved.state) == "string"
      and regain(seat, saved)
    if line then trainer:note(("step %d: %s"):format(trainer.steps_done, line)) end
  end
  restore(trainer, c)
  if reducer.many then reducer:start(function() spread(trainer, c) end) end
  self.last_checkpoint = c.path
  if c.close then
    c:close()
    checkpoint.forget_after(dir, c.step)
  end
  return c.step, c.path
end

--- Whether a checkpoint is due after this step.
function Run:due()
  local every = self.checkpoint_every
  local done = self.trainer.steps_done
  -- a session comes here only at the end of a turn, which may have had several steps
  local before = self.trainer.turn_began_at or done - 1
  return self.path ~= nil and every > 0 and math.floor(done / every) > math.floor(before / every)
end

--- Called after each step: writes a checkpoint when one is due, or at the end. Returns a line to
--- show, or nil.
function Run:after_step(last, alone)
  if not self.path then return nil end
  if not (last or self:due()) or self.saved_at == self.trainer.steps_done then return nil end
  local path, message = self:save(alone)
  if not path and message then self.trainer:warn(message) end
  return path and message
end

--- Closes the files. Returns what is missing from them, or nil.
function Run:close()
  local lost = self.unsaved and "the last checkpoint" or nil
  if self.history then
    M.latest = self.path                               -- what the REPL offers as `history`
    local good, message = pcall(self.history.close, self.history)
    self.history = nil
    self:complain(good, message)
    lost = lost or not good and "rows of the history" or nil
  end
  if self.events then
    self.events:close()
    local trouble = self.events:lost()
    self:complain(not trouble, trouble)
    lost = lost or trouble and "TensorBoard events"
  end
  self.events = nil
  self:give()
  return lost
end

return M
