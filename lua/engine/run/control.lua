-- Handles requests to a run between two steps: swaps of its policy, and the requests of attached
-- clients (`engine attach RUN`), which can also pause the run, change its settings or stop it.
-- Without requests, a step pays only for one check of the socket and the policy files. A client
-- that reads no replies is disconnected.
--
-- The socket is RUN/attach.sock, mode 0600. A request is a line of JSON, { "do": NAME, "id": any,
-- ... }. The reply is a line of JSON, { "ok": true, "id":, "text":, "status": } or { "ok": false,
-- "id":, "error":, "status": }. The commands are in `commands` below.
--
-- With several ranks, rank 0 listens. When the ranks exchange the next step's record, all of them
-- learn that there is a request. Then rank 0 sends the request, and all ranks carry it out at the
-- same step. Owned by the trainer and called by train/loop.lua.
local M_ffi = require "engine.base.ffi"
local nearest = require "engine.base.nearest"
local policies = require "engine.policy.policy"
local show = require "engine.base.show"
local swap = require "engine.run.swap"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local Control = {}
Control.__index = Control

local MOST_LINES = 8       -- the most requests that are handled between two steps
local PAUSE_MS = 100       -- milliseconds between two checks of signals and files during a pause

-- Returns the Control of a trainer, with these fields. wanted: whether the run opens a socket. set:
-- the settings that clients changed, by name. paused: the pause of the run, or nil (see held_by).
-- steps_left, next_pause: during a client's steps, how many are left, and the pause after them.
-- waiting: the ids of `step` requests without a reply yet, by client. heard: the requests that rank
-- 0 has not yet sent to the other ranks.
function M.new(trainer, options)
  return setmetatable({ trainer = trainer, wanted = options.attach ~= false, set = {}, waiting = {},
    heard = {}, many = trainer.reducer.many, follows = trainer.reducer.rank > 0 }, Control)
end

--- Opens the socket of a run that has a directory. If this fails, the run continues without it.
function Control:open()
  local path = self.trainer.run_files.path
  if not path or not self.wanted or self.socket or self.follows then return end
  local out = ffi.new("eng_attach *[1]")
  if C.eng_attach_open(out, path .. "/attach.sock") ~= 0 then
    self.trainer:note("engine attach cannot reach this run: " .. M_ffi.message())
    return
  end
  self.socket = ffi.gc(out[0], C.eng_attach_close)
end

-- Ends the steps that clients requested (commands.step) and answers these clients. ok: whether all
-- requested steps were made. text: the text or the error of the answers.
local function end_steps(self, ok, text)
  self.steps_left = nil
  for number, id in pairs(self.waiting) do
    self:answer(number, id, { ok = ok, text = ok and text or nil, error = not ok and text or nil })
  end
  self.waiting = {}
end

function Control:close()
  end_steps(self, false, "step: the run ended before these steps were done")
  self.paused, self.stopping = nil, nil
  if self.socket then C.eng_attach_close(ffi.gc(self.socket, nil)) end
  self.socket = nil
end

-- ------------------------------------------------------------------ settings

local function count(x) return type(x) == "number" and x >= 0 and x % 1 == 0 and x < 2 ^ 53 end

-- Returns the setting for one of the trainer's limits, such as clip. The value 0 means no limit.
local function limit(field)
  return { "a finite number of 0 or more (0: no limit)",
    function(x) return type(x) == "number" and x >= 0 and x < math.huge end,
    function(t) return t[field] or 0 end, function(t, x) t[field] = x > 0 and x or nil end,
    kept = true, none = "no limit" }
end

-- Returns a value of a setting as text.
local function text_of(setting, value)
  return value == 0 and setting.none or (setting.show or show.value)(value)
end

-- Returns the setting for a field of the Run (run.lua). what: the expected value in words.
local function of_files(field, what, test)
  return { what, test, function(t) return t.run_files[field] end,
    function(t, x) t.run_files[field] = x end }
end

-- name -> { the expected value in words, a test of a value, a function that reads the setting, a
-- function that sets it, kept = true if checkpoints store it, none = the text for the value 0,
-- show = a function that returns a value as text }
local settings = {
  lr = { "a positive number up to 3.4e38, or 'schedule'",
    function(x) return type(x) == "number" and x > 0 and x < 2 ^ 128 or x == "schedule" end,
    function(t) return t.fixed_lr or t.schedule and "schedule" or t.optimizer.lr end,
    function(t, x)
      t.fixed_lr = x ~= "schedule" and x or nil
      if not t.schedule and t.fixed_lr then t.optimizer.lr = x end
    end, kept = true },
  clip = limit "clip", clip_value = limit "clip_value",
  scale = { "a number from 2^-126 to 3.4e38",
    function(x) return type(x) == "number" and policies.usable(x) end,
    function(t) return t.policy:scale() end,
    function(t, x)
      t:drain()        -- else the verdict on the step in flight would change the new scale
      t.policy:set_scale(x)
    end, show = show.scale },
  steps = { "a whole number below 2^53", count, function(t) return t.steps end, function(t, x)
    t.steps = x
    if t.progress then t.progress:expect(x) end
  end },
  checkpoint_every = of_files("checkpoint_every", "a whole number, 0 to save only at the end",
    count),
  stats_every = of_files("stats_every", "a whole number of 1 or more",
    function(x) return count(x) and x >= 1 end),
}

-- ------------------------------------------------------------------ commands

-- Returns the status that each reply has. `step` is the number of steps made, which is also the
-- number of the next step.
function Control:status()
  local t, record = self.trainer, self.trainer.record
  return { run = t.run_files.path, step = t.steps_done, steps = t.steps, updates = t.updates,
    skipped = t.skipped, loss = record.loss, lr = record.lr, scale = t.policy:scale(),
    policy = t.policy.name, policy_file = t.policy.file,
    policy_hash = t.policy.hash and t.policy:hash() or nil, paused = self.paused ~= nil,
    attached = self.socket and C.eng_attach_count(self.socket) or 0,
    elapsed = require("engine.base.machine").clock() - t.began,
    shadows = t.shadows and t.shadows:text() or nil }
end

-- Commits the history of a paused run, for other processes that read it.
local function settle(self)
  local history = self.trainer.run_files.history
  if history and self.paused then pcall(history.flush, history) end
end

local function tell(self, kind, text)
  local t = self.trainer
  t.run_files:event(t.steps_done, kind, text)
  t:note(("step %d: %s"):format(t.steps_done, text))
  return text
end

-- Returns text such as "the policy is static now, loss scale 1; policies of FP8 layers: sqrt3". is:
-- a format for the policy's name, such as "is %s now".
local function policies_text(t, is)
  local sites = t.optimizer.fp8
  local names = {}
  for i, policy in ipairs(sites and sites.policies or {}) do names[i] = policy.name end
  return ("the policy %s, loss scale %s%s"):format(is:format(t.policy.name),
    show.scale(t.policy:scale()),
    #names > 0 and "; policies of FP8 layers: " .. table.concat(names, ", ") or "")
end

local commands = {}

function commands.status() return "" end

-- Swaps the policy. request.file: a name, a path or "path:option=value". request.source: the
-- policy's text; request.file is then its name.
function commands.swap(self, request)
  local source = request.file
  if type(source) ~= "string" then
    return nil, "swap: expected the name or the file of a policy, got " .. M_ffi.value_text(source)
  end
  if type(request.source) == "string" then source = { source = request.source, file = source } end
  local good, problem = self.trainer.swaps:swap(source, type(request.options) == "table"
    and request.options or nil, "an attached client")
  if not good then return nil, problem end
  return policies_text(self.trainer, "is %s now")
end

-- Describes the current policies: their options and their states.
function commands.policy(self)
  local lines, sites = {}, self.trainer.optimizer.fp8
  for _, policy in ipairs { self.trainer.policy, unpack(sites and sites.policies or {}) } do
    local label = swap.label(policy)
    lines[#lines + 1] = policy.fp8 and "policy of FP8 layers " .. label
      or ("policy %s, loss scale %s"):format(label, show.scale(policy:scale()))
    local names = nearest.keys(policy.options)
    for i, name in ipairs(names) do
      names[i] = name .. "=" .. M_ffi.value_text(policy.options[name])
    end
    lines[#lines + 1] = "options " .. (#names > 0 and table.concat(names, " ") or "(none)")
    local good, state = pcall(policy.save, policy)
    lines[#lines + 1] = "state " .. (good and state
      or "(cannot be saved: " .. tostring(state) .. ")")
  end
  return table.concat(lines, "\n")
end

function commands.undo(self)
  local good, seat, line = self.trainer.swaps:undo("an attached client")
  if not good then return nil, seat end
  local text = seat and seat.kind
    and ("the policy of FP8 layers is %s again"):format(swap.label(seat.policy))
    or policies_text(self.trainer, "is %s again")
  return line and text .. "; " .. line or text
end

-- Returns the current pause (or the pause after the current steps, or a new one) with the client
-- `number` as a further holder. A pause ends when all its holders have disconnected, unless one of
-- them asked that the run stays paused (request.stay).
local function held_by(self, request, number)
  local pause = self.paused or self.steps_left and self.next_pause or { holders = {} }
  pause.holders[number] = true
  pause.stays = pause.stays or request.stay or nil
  return pause
end

-- Pauses the run. request.stay: the run stays paused when the client disconnects.
function commands.pause(self, request, number)
  local before = self.paused
  self.paused = held_by(self, request, number)
  end_steps(self, false, ("step: a later request paused the run before step %d"):format(
    self.trainer.steps_done))
  if before then return "the run is already paused" end
  return tell(self, "paused", "paused by an attached client")
end

function commands.resume(self)
  end_steps(self, false, ("step: a later request resumed the run before step %d"):format(
    self.trainer.steps_done))
  if not self.paused then return "the run is not paused" end
  self.paused = nil
  return tell(self, "resumed by attach", "resumed by an attached client")
end

-- Runs request.n steps (default 1), pauses the run, and then replies. request.stay: as for a pause.
function commands.step(self, request, number)
  local n = request.n == nil and 1 or request.n
  if not (count(n) and n >= 1) then
    return nil, "step: expected a whole number of steps, 1 or more, got " .. M_ffi.value_text(n)
  end
  self.next_pause = held_by(self, request, number)
  end_steps(self, false, ("step: a later request for steps replaced this one before step %d")
    :format(self.trainer.steps_done))
  self.steps_left, self.paused, self.waiting[number] = n, nil, request.id or true
end

function commands.set(self, request)
  local setting = settings[request.name]
  if not setting then
    return nil, ("set: expected the name of a setting, got %s%s"):format(
      M_ffi.value_text(request.name), nearest.choices(request.name, settings, "settings"))
  end
  if not setting[2](request.value) then
    return nil, ("%s: expected %s, got %s"):format(request.name, setting[1],
      M_ffi.value_text(request.value))
  end
  if request.name == "steps" and request.value <= self.trainer.steps_done then
    return nil, ("steps: expected more than the %d steps already done, got %.0f; hint: " ..
      "run:stop() ends the run"):format(self.trainer.steps_done, request.value)
  end
  if request.value == "schedule" and not self.trainer.schedule then
    return nil, "lr: this run has no schedule; expected a positive number, got 'schedule'"
  end
  local before = setting[3](self.trainer)
  setting[4](self.trainer, request.value)
  if setting.kept then self.set[request.name] = request.value end
  return tell(self, "set", ("%s %s -> %s (by an attached client)"):format(request.name,
    text_of(setting, before), text_of(setting, request.value)))
end

function commands.checkpoint(self) return self.trainer.run_files:save() end

function commands.stop(self, request)
  self.stopping = type(request.reason) == "string" and show.cut(show.shown(request.reason), 200)
    or "requested by an attached client"
  return "the run ends now"
end

-- ------------------------------------------------------------------ serving

function Control:answer(number, id, reply)
  if not self.socket then return end
  local good, status = pcall(self.status, self)
  if type(id) == "string" or type(id) == "number" then reply.id = id end
  reply.status = good and status or nil
  local text = require("engine.base.json").encode(reply)
  C.eng_attach_answer(self.socket, number, text, #text)
end

-- Carries out a request, a line from the client `number`, and answers it. With several ranks, every
-- request except `status` first waits in self.heard. together() then sends it to all ranks, and
-- each rank calls this function again, with `told` = true.
local function serve(self, number, line, told)
  local read, request = pcall(require("engine.base.json").decode, line)
  if not read or type(request) ~= "table" then
    local problem = ("expected a JSON object on one line, got '%s'%s"):format(show.cut(show.shown(
      line), 80), read and "" or ": " .. M_ffi.without_line(request))
    self:answer(number, nil, { ok = false, error = problem })
    return
  end
  local command = commands[request["do"]]
  if not command then
    local problem = ("do: expected a command, got %s%s"):format(M_ffi.value_text(request["do"]),
      nearest.choices(request["do"], commands, "commands"))
    self:answer(number, request.id, { ok = false, error = problem })
    return
  end
  if self.many and not told and command ~= commands.status then
    self.heard[#self.heard + 1] = { number = number, line = line }
    return
  end
  local good, text, problem = pcall(command, self, request, number)
  if good and not text and not problem then return end          -- the reply follows later
  if not good then text, problem = nil, tostring(text) end
  settle(self)
  self:answer(number, request.id, text and { ok = true, text = text }
    or { ok = false, error = problem })
end

local line, length, number = ffi.new("const char *[1]"), ffi.new("int64_t[1]"), ffi.new("int[1]")

-- Reads and serves requests. Waits up to `milliseconds` for the first request.
local function listen(self, milliseconds)
  for i = 1, MOST_LINES do
    if not C.eng_attach_poll(line, length, number, self.socket, i == 1 and milliseconds or 0) then
      return
    end
    serve(self, number[0], ffi.string(line[0], length[0]))
  end
end

--- Returns whether rank 0 has a request for the other ranks.
function Control:wishes()
  self.wish = self.wish or self.trainer.swaps:wish()
  return #self.heard > 0 or self.wish ~= nil
end

-- Returns whether the run is in a pause that ends because all clients that hold it have
-- disconnected. A pause that stays (held_by) never ends in this way.
local function is_abandoned(self)
  if not self.paused or self.paused.stays or not self.socket then return false end
  for client in pairs(self.paused.holders) do
    if C.eng_attach_here(self.socket, client) then return false end
  end
  return true
end

local function end_abandoned_pause(self)
  self.paused = nil
  tell(self, "resumed by attach", "resumed: no client that paused the run is connected any more")
end

-- Rank 0 sends its requests, and every rank carries them out. Returns whether rank 0 was
-- interrupted. A pause does not end while there are requests, because one of them may be from a
-- client that will hold it.
local function together(self)
  local json, ranks = require "engine.base.json", require "engine.dist.ranks"
  local news = { heard = self.heard, wish = self.wish, interrupted = C.eng_interrupted(),
    left = #self.heard == 0 and is_abandoned(self) }
  self.heard, self.wish = {}, nil
  news = json.decode(ranks.from_first(not self.follows and json.encode(news) or nil))
  if news.wish then self.trainer.swaps:grant(news.wish) end
  for _, item in ipairs(news.heard or {}) do serve(self, item.number, item.line, true) end
  if self.paused and news.left then end_abandoned_pause(self) end
  return news.interrupted > 0
end

-- Waits while the run is paused.
local function pause(self)
  local interrupted = not self.many and C.eng_interrupted() > 0
  while self.paused and not self.stopping and not interrupted do
    if self.socket then listen(self, PAUSE_MS) end
    if self.many then
      self:wishes()
      interrupted = together(self)
    else
      self.trainer.swaps:after_step()
      if is_abandoned(self) then end_abandoned_pause(self) end
      interrupted = C.eng_interrupted() > 0
    end
  end
end

--- Called between two steps: handles requests, and waits while the run is paused. Returns a reason
--- if a client ended the run.
function Control:after_step()
  self.trainer.swaps:after_step()
  if self.many and self.trainer.reducer.wish then together(self) end
  if not self.socket and not self.many then return nil end
  if self.steps_left then
    self.steps_left = self.steps_left - 1
    if self.steps_left == 0 or self.trainer.steps_done >= self.trainer.steps then
      self.paused = self.next_pause
      settle(self)
      end_steps(self, true, ("paused before step %d"):format(self.trainer.steps_done))
    end
  end
  if self.socket then listen(self, 0) end
  pause(self)
  local reason = self.stopping
  self.stopping = nil
  return reason
end

-- ------------------------------------------------------------------ checkpoints

--- Returns the settings that clients changed, or nil. A resumed run keeps them.
function Control:state() return next(self.set) and self.set or nil end

--- Restores what state() returned. Raises an error for a value that its setting does not take.
--- Returns a line about the restored settings, or nil if there are none.
function Control:restore(saved)
  local parts = {}
  for name, value in pairs(saved) do
    local setting = settings[name]
    if setting and setting.kept then
      M_ffi.expect(setting[2](value), value, "%s: expected %s", name, setting[1])
      setting[4](self.trainer, value)
      self.set[name] = value
      parts[#parts + 1] = name .. "=" .. text_of(setting, value)
    end
  end
  table.sort(parts)
  if #parts == 0 then return nil end
  return "settings changed by a client before the resume: " .. table.concat(parts, " ")
end

return M
