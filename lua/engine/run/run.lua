-- The files of a run:
--   runs/<name>/history.db       every step (history.lua)
--   runs/<name>/tensorboard/     event files, if requested (tensorboard.lua)
--   runs/<name>/checkpoints/     states to resume from (checkpoint.lua)
-- This module opens these files, finds the checkpoint from which restore.lua resumes, and writes
-- the files during the run. Only trainers and sessions open a Run; commands use M.directory. Owns
-- the table of open runs. Called by train/ and cli/.
local M_ffi = require "engine.base.ffi"
local checkpoint = require "engine.run.checkpoint"
local files = require "engine.base.file"
local json = require "engine.base.json"
local merged = require("engine.base.arguments").merged
local restore = require "engine.run.restore"
local shards = require "engine.run.shards"
local show = require "engine.base.show"
local user_state = require "engine.run.user_state"

local ffi, C, fail_if = M_ffi.ffi, M_ffi.C, M_ffi.fail_if

local M = {}

local Run = {}
Run.__index = Run

--- Returns the directory of a run: runs/<name> for a name. A name with a slash is a path already.
function M.directory(name) return name:find("/", 1, true) and name or "runs/" .. name end

-- ------------------------------------------------------------------ opening

-- Returns whether the option `resume` continues the run in the directory `path`: true if `resume`
-- is "auto", or names that run or one of its checkpoints; false if it names another run or one of
-- its checkpoints, from which a new run starts.
local function continues(path, resume)
  if resume == "auto" then return true end
  local from, own = M.directory(resume), C.eng_file_stamp(path .. "/checkpoints")
  for _, checkpoints in ipairs { "/checkpoints", "", "/.." } do
    if own ~= 0 and C.eng_file_stamp(from .. checkpoints) == own then return true end
  end
  return false
end

-- Returns whether the directory holds a run. A run that failed before its first step does not
-- count.
local function exists(path)
  local file = path .. "/history.db"
  if #checkpoint.steps(path .. "/checkpoints") > 0 then return true end
  if not files.exists(file) then return false end
  local steps = require("engine.run.history").with(file, function(h)
    return #h:query "SELECT 1 FROM steps LIMIT 1"
  end)
  return not steps or steps > 0
end

local holders = setmetatable({}, { __mode = "v" })  -- path -> the Run of this process that holds it

local function parent(path) return path:match("^(.*)/[^/]*$") or "" end

-- What a run's directory may contain before the run begins. The last entry is the directory itself.
local UNUSED = { "/history.db-wal", "/history.db-shm", "/history.db", "/checkpoints", "/lock", "" }

-- Releases a lock. made: the outermost folder that was made for a run that never began, or nil.
-- Removes the folders from `path` up to `made`, unless other files are in them.
local function leave(lock, path, made)
  for _, name in ipairs(made and UNUSED or {}) do C.eng_file_remove(path .. name) end
  while made and #path > #made do
    path = parent(path)
    C.eng_file_remove(path)
  end
  C.eng_file_unlock(lock[0])
end

--- Makes the run's directory and locks it. Returns true, or false and a message if the lock is held
--- by another process or by a run of this process that has begun. If it is held by a run of this
--- process that never began, that run is closed first. again: true if this is the second try.
function Run:take(path, again)
  local other = holders[path]
  if other and not other.running then other:close() end
  local lock, missing, made = ffi.new("int[1]", -1), path, self.made
  made.folder = nil
  while missing ~= "" and not files.exists(missing) do
    made.folder, missing = missing, parent(missing)
  end
  M_ffi.check(C.eng_file_mkdir(path .. "/checkpoints"))
  local status = C.eng_file_lock(lock, path .. "/lock")
  if status == C.ENG_ERR_STATE and not holders[path] and not again then
    collectgarbage()      -- frees the lock of a Run of this process that nothing refers to any more
    collectgarbage()
    return self:take(path, true)
  end
  if status == C.ENG_ERR_STATE then return false, M_ffi.message() end
  M_ffi.check(status)
  self.path, self.lock = path, ffi.gc(lock, function(l) leave(l, path, made.folder) end)
  holders[path] = self
  return true
end

--- Marks that the run has begun, so that its directory stays.
function Run:begin() self.running, self.made.folder = true, nil end

--- Releases the lock. If this run made the directory and never began, also removes the directory,
--- unless other files are in it.
function Run:give()
  if self.lock then
    leave(ffi.gc(self.lock, nil), self.path, self.made.folder)
    holders[self.path] = nil
  end
  self.lock, self.running = nil, false
end

-- Raises an error unless the last part of a path can name a run.
local function check_name(path)
  local name = path:match("([^/]*)/*$")
  local problem = show.name_problem(name)
    or path:find("^runs/%.%.?$") and "is that of another folder"
    or files.exists(path .. "/contest.json") and "is that of a contest"
  fail_if(problem, "run: the name %s: %s; hint: run=ANOTHER_NAME", problem, M_ffi.value_text(path))
end

--- Takes the run's directory. A run that does not continue an earlier one takes the next free name
--- if the directory holds a run or is locked.
function Run:find_place(path, resume)
  check_name(path)
  self.continues = resume and continues(path, resume)
  if self.continues or not exists(path) then
    local good, message = self:take(path)
    if good then return end
    fail_if(self.continues, "%s is being written by another run: %s; hint: wait until that run " ..
      "ends, or run=ANOTHER_NAME", path, message)
  end
  local n = 2
  while files.exists(path .. "-" .. n) or not self:take(path .. "-" .. n) do n = n + 1 end
  self.warnings[1] = ("%s already exists: this run writes to %s (resume=auto continues the old " ..
    "one)"):format(path, self.path)
end

-- Returns the checkpoint to resume from, or nil. Raises an error if the script names a run or a
-- checkpoint that does not exist or has no intact checkpoint. With resume=auto, raises an error if
-- the run has no name, or if it has checkpoints and all are damaged.
local function find_checkpoint(self, resume)
  local dir, auto = self.path and self.path .. "/checkpoints", resume == "auto"
  if not auto then
    dir = M.directory(resume)
    if files.is_folder(dir .. "/checkpoints") then dir = dir .. "/checkpoints" end
    fail_if(not files.is_folder(dir), "resume: there is no run or checkpoint %s; hint: " ..
      "resume=auto continues the run that run=NAME names", dir)
  else fail_if(not dir, "resume: a run without a name has nothing to resume; hint: run=NAME") end
  if not files.is_folder(dir) then return nil end
  local c, message, damaged = checkpoint.open(dir)
  fail_if(not c and not auto, "resume: %s", message)
  -- a fresh start would drop the run's records
  fail_if(damaged, "resume: no checkpoint can be used: %s; hint: restore what is missing, or " ..
    "start a new run with run=ANOTHER_NAME", message)
  for _, line in ipairs(c and c.skipped or {}) do self.warnings[#self.warnings + 1] = line end
  if not c then self.notes[#self.notes + 1] = message end
  return c
end

-- Removes the records from the step `done` on, from which a resumed run continues; the events of
-- this step up to its checkpoint stay. Notes how many steps are removed. Ends the series of shadows
-- that the run no longer has. Lists the names that policies logged before the cut in self.logged,
-- so that these numbers become nan unless a policy logs them again (with_logs).
local function cut_history(self, history, done)
  local read, n, logs, moves, shadows = pcall(function()      -- a damaged history raises an error
    return history:query("SELECT count(*) AS n FROM steps WHERE step >= ?", done)[1].n,
      history:has "signals" and history:logs() or {}, #history:events "layers",
      history:shadows_at(done - 1)
  end)
  self.had_moves = read and moves > 0      -- whether the history has rungs to replace
  if read and n > 0 then
    self.notes[#self.notes + 1] = ("the history drops %s recorded after the checkpoint"):format(
      show.counted(n, "step"))
  end
  self:complain(history:resume(done))
  local now = self.trainer.shadows
  for _, shadow in ipairs(read and shadows or {}) do
    if not (now and now:has(shadow.name)) then
      self:complain(history:end_shadow(done, shadow.name))
    end
  end
  for _, log in ipairs(read and logs or {}) do
    self.logged = self.logged or {}
    self.logged[log.name] = true
  end
end

--- Opens the history. With `cut`, removes the rows of the trainer's current step and later steps
--- (cut_history).
function Run:open_history(cut)
  if not self.wants_history then return end
  local path = self.path .. "/history.db"
  cut = cut and files.exists(path)
  self.history = require("engine.run.history").open(path, { write = true })
  if cut then cut_history(self, self.history, self.trainer.steps_done) end
  -- a resume that makes no step keeps the facts about the steps that were made
  self.undescribed = cut and self.trainer.steps_done >= (self.trainer.steps or math.huge)
  if not self.undescribed then self:describe() end
end

-- Loads the tensors of the checkpoint `c` (as in restore.spread) on every rank. Without `c`, sends
-- rank 0's weights to the other ranks. Every rank calls it.
local function start_ranks(self, c)
  local trainer = self.trainer
  trainer.reducer:start(c and function() restore.spread(trainer, c) end or nil)
end

-- Receives, on ranks above 0, the run's path and the checkpoint's state from rank 0's tell().
-- These ranks write only shards of checkpoints.
local function told(self)
  local news = json.decode(require("engine.dist.ranks").from_first())
  self.path, self.recorded, self.last_checkpoint = news.path, news.recorded, news.read
  local c = news.state and { state = news.state, path = news.read }
  if c then restore.take_over(self.trainer, c, self.notes) end
  start_ranks(self, c)
end

-- Sends the run's path and the checkpoint's state from rank 0 to told() on the other ranks.
local function tell(self, c)
  local recorded = (self.path ~= nil and self.wants_history) or (self.wants_tensorboard or "") ~= ""
  require("engine.dist.ranks").from_first(json.encode { recorded = recorded, path = self.path,
    read = c and c.path, state = c and c.state })
  start_ranks(self, c)
end

local function open(self, resume)
  local trainer = self.trainer
  local c = resume and find_checkpoint(self, resume) or nil
  if c then
    restore.take_over(trainer, c, self.notes, self.config)
    self.last_checkpoint = c.path
    self.notes[#self.notes + 1] = ("resumed from %s at step %d, after %s"):format(c.path,
      trainer.steps_done, show.counted(trainer.updates, "update"))
  elseif resume then
    self.notes[#self.notes + 1] = "nothing to resume: a new run begins" .. (self.path
      and files.exists(self.path .. "/history.db") and "; the steps recorded so far are dropped"
      or "")
  end
  if trainer.reducer.many then tell(self, c) elseif c then start_ranks(self, c) end
  if c then c:close() end
  if not self.path then return end
  if c and self.continues then
    checkpoint.forget_after(self.path .. "/checkpoints", trainer.steps_done)
  end
  self:open_history(self.continues)
end

--- Opens a trainer's run. A run with a name gets a new directory, or the directory of the run that
--- it resumes.
function M.open(trainer, options)
  -- made.folder: the outermost folder that this run made, until the run begins
  local self = setmetatable({ trainer = trainer, notes = {}, warnings = {}, complained = {},
    made = {}, checkpoint_every = options.checkpoint_every or 0, keep = options.keep or 3,
    stats_every = options.stats_every or 100, config = options.config, name = options.run,
    wants_history = options.history ~= false, wants_tensorboard = options.tensorboard }, Run)
  local resume = options.resume
  if resume == "" or resume == "false" then resume = false
  elseif resume == true then resume = "auto" end
  if trainer.reducer.rank > 0 then
    self.follows = true
    told(self)
    return self
  end
  if options.run and options.run ~= "" then self:find_place(M.directory(options.run), resume) end
  fail_if(self.wants_tensorboard == true and not self.path, "tensorboard: a run without a name " ..
    "has no directory for event files; hint: run=NAME or tensorboard=DIRECTORY")
  local good, message = pcall(open, self, resume)
  if not good then
    self:close()
    error(message, 0)
  end
  return self
end

--- Returns whether rank 0 records exponent histograms.
function Run:wants_hist()
  return self.recorded or self.history ~= nil or (self.wants_tensorboard or "") ~= ""
end

--- Opens the event file for TensorBoard, if requested.
function Run:open_tensorboard()
  local wanted = self.wants_tensorboard
  if not wanted or wanted == "" or self.events then return end
  local dir = wanted == true and self.path .. "/tensorboard" or wanted
  self.events = require("engine.run.tensorboard").live(dir, self.trainer.optimizer.list,
    self.trainer.steps_done)
end

--- Opens the files again when a trainer runs again, after an error or for more steps.
function Run:reopen()
  self:open_tensorboard()
  if self.path and not self.lock and not self.follows then
    local good, message = self:take(self.path)
    fail_if(not good, "%s is being written by another run: %s; hint: wait until that run ends",
      self.path, message)
    self:open_history(true)
  end
  self:begin()
end

-- Returns a JSON object about the start of this process, for `engine replay --verify`: the script,
-- its checksum and its arguments, the working folder, and the run's name in the script. Returns nil
-- if the process runs no script.
local function command_text(self)
  local script = type(arg) == "table" and arg[-1] and arg[0]
  local source = type(script) == "string" and files.read(script)
  if not source then return nil end
  local words = {}
  for i, word in ipairs(arg) do words[i] = tostring(word) end
  return json.encode { script = script, arguments = words,
    folder = files.working_folder(), run = self.name, crc32c = C.eng_crc32c(0, source, #source) }
end

--- Records the facts of this run: parameters, settings, the policies' sources.
function Run:describe()
  local history, trainer, list = self.history, self.trainer, {}
  local formats = trainer:gradient_formats()
  self.undescribed = false
  self.signals = {}                   -- the last value written of each signal, by name
  self.recipes = {}                   -- the precision recipes recorded so far, as a set
  for i, p in ipairs(trainer.optimizer.list) do
    list[i] = { name = p.name, shape = trainer.reducer:shape(p), gradient = formats[i] }
  end
  self:complain(history:set_parameters(list))
  local sites = trainer.optimizer.fp8
  for key, value in pairs { policy = trainer.policy.name, precision = trainer.precision.name,
    gradients = trainer.precision.weight_gradients, accumulate = trainer.accumulate,
    mode = trainer.delay == 1 and "lagged" or "sync", optimizer = trainer.optimizer.name,
    schedule = tostring(trainer.schedule or "none"), steps = trainer.steps,
    summed = trainer.optimizer._accumulates,     -- gradients of micro-batches are summed in f32
    parameters = trainer.model:count(), threads = tonumber(C.eng_threads(0)),
    device = M_ffi.string(C.eng_device_name()), ranks = trainer.reducer.size,
    zero = trainer.reducer.level, comm_dtype = trainer.reducer.comm_dtype,
    fp8 = sites and json.encode { layers = sites.paths, sample = sites.sample,
      rungs = sites.rungs } or nil,
    command = command_text(self) } do
    self:complain(history:set_meta(key, value))
  end
  for _, setting in ipairs(self.config and require("engine.base.config").flatten(self.config)
    or {}) do
    self:complain(history:set_config(setting[1], setting[2]))
  end
  local swap = require "engine.run.swap"
  for i, entry in ipairs(trainer.swaps.seats) do
    local policy = entry.seat.policy
    if not policy.idle then
      self:add_policy(policy)
      self:event(trainer.steps_done, i == 1 and "policy" or "fp8_policy", swap.label(policy),
        swap.described(policy))
    end
  end
  self:layers(trainer.steps_done - 1, self.had_moves)
end

-- ------------------------------------------------------------------ while it runs

--- Records the source of a policy that decides from now on.
function Run:add_policy(policy)
  if not self.history or not policy.source then return end
  self:complain(self.history:add_policy(policy:hash(), policy.name, policy.source))
end

-- Records the fields of a precision recipe that the run uses from now on, without its FP8 policies,
-- whose sources are recorded separately.
local function add_recipe(self, recipe)
  self.recipes[recipe] = true
  local full = merged(recipe)
  -- these four are not fields of a user's recipe
  full.checksum, full.source, full.own_fp8, full.usual_high = nil, nil, nil, nil
  full.fp8 = full.fp8 and merged(full.fp8)
  if full.fp8 then full.fp8.policy = nil
  elseif recipe.own_fp8 == false then full.fp8 = false end       -- nil would mean the base's fp8
  self:complain(self.history:add_recipe(recipe.checksum, json.encode(full)))
end

--- Reports a failure to write a file, unless `good` is true. Reports each message once. The run
--- continues.
function Run:complain(good, message)
  if good then return end
  local line = M_ffi.without_line(message)
  if self.complained[line] then return end
  self.complained[line] = true
  self.trainer:warn(line)
end

-- Returns a step's signals and, as "log.NAME", what its verdict logged. A value that is no longer
-- logged becomes nan.
local function with_logs(self, signals, logs)
  if not logs and not self.logged then return signals end
  self.logged = self.logged or {}                          -- every name that was logged so far
  local all = {}
  for name in pairs(self.logged) do all[name] = 0 / 0 end
  for name, value in pairs(signals) do all[name] = value end
  for name, value in pairs(logs or {}) do
    name = "log." .. name
    all[name], self.logged[name] = value, true
  end
  return all
end

-- Records the published signals whose values have changed.
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
  local history, events, step = self.history, self.events, tonumber(record.step)
  local with_tensors = record.overflow ~= 0 or step % self.stats_every == 0
  self:begin()
  signals = with_logs(self, signals, logs)
  if events then
    events:step(record, verdict, tokens, signals)
    if with_tensors then events:tensors(step, stats) end
    self:complain(not events:trouble(), events:trouble())
  end
  if not history then return end
  if self.undescribed then self:describe() end
  local recipe = self.trainer.optimizer.precision
  if recipe.checksum and not self.recipes[recipe] then add_recipe(self, recipe) end
  self:complain(history:append(record, verdict, tokens))
  self:append_signals(step, signals)
  if with_tensors then
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

--- Records what the verdict on a step changed in FP8 layers (fp8_sites.lua): their rungs on the
--- recipe's ladder, and the accumulators of their products. all: records the rungs of all layers.
--- If the scales that FP8 policies choose have no effect, also shows and records a line that says
--- so.
function Run:layers(step, all)
  local sites = self.trainer.optimizer.fp8
  local moved, text, products
  if sites and self.history then
    moved, text = sites:moves(all)
    products = sites:products()
  end
  local unused = sites and sites:unused()
  if unused then
    local line = ("step %d: %s"):format(step, unused)
    if self.trainer.run_files then self.trainer:note(line) else table.insert(self.notes, line) end
    self:event(step, "fp8_unused", unused)
  end
  if moved then self:event(step, "layers", text, moved) end
  if products then self:event(step, "products", products) end
end

--- Records an event (as in History:event). data: plain data, or nil.
function Run:event(step, kind, text, data)
  if not self.history then return end
  self:complain(self.history:event(step, kind, show.shown(text or "", true),
    data and json.encode(data) or nil))
end

-- Raises an error if weights are inf or nan, because their checkpoint must not become the newest.
local function check_weights(self)
  local problem = require("engine.tensor.stats").nonfinite(self.trainer.reducer:weights())
  if problem then error(problem, 0) end
end

-- Writes a checkpoint. alone: as in Run:save. Returns its path (and a message if an old checkpoint
-- could not be removed), or nil and what went wrong.
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
      function() return restore.state_of(trainer, saved) end, options)
  end
  local good, path, note = pcall(function()
    check_weights(self)
    saved, tensors = user_state.pack(trainer.state)
    return checkpoint.save(dir, trainer.steps_done,
      { model = trainer.model:state(), optimizer = trainer.optimizer:state_tensors(),
      user = next(tensors) and tensors, state = restore.state_of(trainer, saved) }, options)
  end)
  if good then return path, note end
  return nil, M_ffi.without_line(path)
end

--- Writes a checkpoint. Returns its path (and a message if an old checkpoint could not be removed),
--- or nil and what went wrong. Every rank calls it and writes a shard. First the ranks are
--- compared, and an error is raised if they have drifted apart. With `alone`, rank 0 writes the
--- whole state by itself, because other ranks may have died; other ranks return nil.
function Run:save(alone)
  local trainer = self.trainer
  if alone and self.follows then return nil end
  if not alone then
    trainer.reducer:share_buffers()
    trainer.agreement:check()
  end
  -- a run that is killed later resumes from this checkpoint, and its history must hold all steps
  if self.history then self:complain(self.history:flush()) end
  local path, note = write(self, alone)
  self.nonfinite = not path and note:match("the weights hold [^;]*")   -- the same on all ranks
  self.unsaved = not path and not self.nonfinite
  if not path then
    self:event(trainer.steps_done, "error", "checkpoint: " .. note)
    return nil, "no checkpoint was written: " .. note
  end
  self:event(trainer.steps_done, "checkpoint", path)
  -- a resume keeps this step's events up to this one, so it must be on disk too
  if self.history then self:complain(self.history:flush()) end
  self.saved_at, self.last_checkpoint = trainer.steps_done, path
  return path, note
end

--- Rolls the trainer back to the newest intact checkpoint of `step` or before, and removes later
--- ones. Every rank calls it between two steps. The loss-scaling policy, the counters of steps and
--- the history do not change. Returns the checkpoint's step and path, or nil and the reason.
function Run:go_back(step)
  local trainer, reducer = self.trainer, self.trainer.reducer
  local dir = self.path and self.path .. "/checkpoints"
  local c, why
  if not dir then why = "a run without a name has no checkpoints; hint: run=NAME"
  elseif not self.follows then
    c = checkpoint.open(dir, step)
    why = c and restore.problem(c) or not c and ("there is no intact checkpoint of step %d or "
      .. "before; hint: checkpoint_every=N"):format(step) or nil
    if c and why then
      c:close()
      c = nil
    end
  end
  if reducer.many then
    local news = json.decode(require("engine.dist.ranks").from_first(not self.follows
      and json.encode { why = why, step = c and c.step, path = c and c.path,
      state = c and c.state } or nil))
    why, c = news.why, c or news.state and news
  end
  if not c then return nil, why end
  restore.go_back(trainer, c)
  self.last_checkpoint = c.path
  if c.close then
    c:close()
    checkpoint.forget_after(dir, c.step)
  end
  return c.step, c.path
end

--- Returns whether a checkpoint is due after this step.
function Run:due()
  local every = self.checkpoint_every
  local done = self.trainer.steps_done
  -- a session calls this only at the end of a turn, which may have several steps
  local before = self.trainer.turn_began_at or done - 1
  return self.path ~= nil and every > 0 and math.floor(done / every) > math.floor(before / every)
end

--- Called after each step: writes a checkpoint if one is due, or if this step is the last. alone:
--- as in Run:save. Returns a line to show, or nil.
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
    if self.running then M.latest = self.path end      -- what the REPL offers as `history`
    local good, message = pcall(self.history.close, self.history)
    self.history = nil
    self:complain(good, message)
    lost = lost or not good and "rows of the history" or nil
  end
  if self.events then
    self.events:close()
    local trouble = self.events:trouble()
    self:complain(not trouble, trouble)
    lost = lost or trouble and "TensorBoard events"
  end
  self.events = nil
  self:give()
  return lost
end

--- Closes runs that have not begun. The engine binary calls it when it ends.
function M.abandon()
  for _, run in pairs(holders) do
    if not run.running then run:close() end
  end
end

return M
