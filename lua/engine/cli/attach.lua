-- engine attach RUN [-e CODE]: a REPL on a run. While the run is alive, `run` and `policy` send
-- requests over its socket (run/control.lua). `history` reads history.db, also after the run has
-- finished. Called by init.lua.
local M_ffi = require "engine.base.ffi"
local files = require "engine.base.file"
local json = require "engine.base.json"
local nearest = require "engine.base.nearest"
local options = require "engine.cli.options"
local show = require "engine.base.show"

local C, ffi, fail, fail_if = M_ffi.C, M_ffi.ffi, M_ffi.fail, M_ffi.fail_if

local help = [==[
usage: engine attach RUN [-e CODE]...

Opens a REPL on a run, given by its name (runs/RUN) or its directory. It works from any terminal of
the user who started the run. With -e it runs CODE and ends. While the run is alive:

  run:status()                  its step, loss, scale ...     (also: print(run))
  run:pause()  run:resume()     between two steps; a pause ends when all REPLs that asked for it
                                have closed, unless one used run:pause { stay = true }
  run:step(5)                   five steps, then a pause
  run:set("lr", 1e-4)           lr clip clip_value scale steps checkpoint_every stats_every;
                                run:set("lr", "schedule") returns to the schedule
  run:checkpoint()  run:stop()
  policy:swap("mine.lua")       swaps the policy, after a check on the run's last records; also
                                "dynamic:growth_interval=500". A policy for FP8 layers, such as
                                "layer_ladder", replaces the FP8 policy
  policy:undo()                 reverts the last swap
  policy:show()                 options and state of the policies     (also: policy)

and always:

  history:last(20)  history:overflows()  history:events()  history:why(812)
  history:query("select ...")  history:shadows()  history:tensors(812)
  history:plot("scale")  history:plot("amax", { log = true })
  history:heatmap()  history:heatmap { by = "time" }  history:tensor("blocks.3.attn.qkv.weight")]==]

-- ------------------------------------------------------------------ the connection to the run

local Link = {}
Link.__index = Link

local function connect(path)
  local out = ffi.new("eng_attach_link *[1]")
  local status = C.eng_attach_connect(out, path .. "/attach.sock")
  if status ~= 0 then return nil, M_ffi.message(), status end
  return setmetatable({ handle = ffi.gc(out[0], C.eng_attach_leave), asked = 0, path = path }, Link)
end

local line, length = ffi.new("const char *[1]"), ffi.new("int64_t[1]")
local PATIENCE = 5          -- seconds without a reply after which a message says why

local function waiting_text(path)
  local pid, state = require("engine.run.runs").holder(path)
  local why = "the run answers between two steps"
  if state == "T" then why = ("process %d is stopped; kill -CONT %d continues it"):format(pid, pid)
  elseif pid then why = ("process %d is in a long step, or hangs"):format(pid) end
  return ("no answer from the run for %d s: %s. Still waiting; Ctrl-C gives up. To read the " ..
    "history meanwhile: engine attach %s -e 'print(history)'\n"):format(PATIENCE, why, path)
end

-- Returns the status of f(...), a call that waits for the run. Ctrl-C ends the wait.
local function patiently(f, ...)
  local before = C.eng_interrupt_policy(2)
  local status = f(...)
  C.eng_interrupt_policy(before)
  return status
end

-- Waits without a limit for the next line, and returns the status of eng_attach_receive. If no line
-- comes within `patience` seconds, prints the likely reason for the delay on stderr and goes on
-- waiting.
local function receive(self, patience)
  local status = patiently(C.eng_attach_receive, line, length, self.handle, patience)
  if status ~= C.ENG_ERR_STATE then return status end
  io.stdout:flush()
  io.stderr:write(waiting_text(self.path))
  return patiently(C.eng_attach_receive, line, length, self.handle, 1e9)
end

local ENDED = "the run has ended; its history can still be read"

--- Sends a request and returns the reply, or nil and a message on an error. Ctrl-C ends the wait.
function Link:ask(request)
  self.asked = self.asked + 1
  request.id = self.asked
  local text = json.encode(request) .. "\n"
  if self.gone then return nil, self.gone end
  if #text > C.ENG_ATTACH_LINE then
    return nil, ("expected a request of at most %d bytes, got one of %d"):format(C.ENG_ATTACH_LINE,
      #text)
  end
  local status = patiently(C.eng_attach_send, self.handle, text, #text)
  if status == C.ENG_ERR_INTERRUPTED then
    self.gone = "stopped waiting: the run does not read requests; leave this REPL and attach again"
    return nil, self.gone
  end
  while status == 0 do
    -- the reply to run:step(n) comes after n steps, so waiting for it prints no message
    status = receive(self, request["do"] == "step" and 1e9 or PATIENCE)
    local reply = status == 0 and json.decode(ffi.string(line[0], length[0]))
    -- Replies with an older id belong to requests that Ctrl-C cancelled.
    if reply and (reply.id == nil or reply.id == request.id) then
      if reply.ok then return reply end
      return nil, reply.error
    end
  end
  if status == C.ENG_ERR_INTERRUPTED then
    return nil, "stopped waiting: the run has not answered yet; it answers between two steps"
  end
  self.gone = ENDED
  return nil, self.gone
end

local function status_text(s)
  local most = s.steps < 2 ^ 52 and (" of %d"):format(s.steps) or ""   -- else without limit
  local parts = { ("%s: %d%s steps made%s"):format(s.run or "?", s.step, most,
    s.paused and ", paused" or ""), ("%d updates, %d skipped"):format(s.updates, s.skipped),
    ("loss %.4f"):format(s.loss), ("lr %.4g"):format(s.lr),
    ("scale %s"):format(show.scale(s.scale)), ("policy %s"):format(s.policy) }
  return table.concat(parts, ", ") .. (s.shadows and "\n" .. s.shadows or "")
end

-- ------------------------------------------------------------------ the REPL's objects

-- Returns the objects `run` and `policy`, whose methods send requests to the run. If `link` is nil,
-- every method raises the error `why`.
local function objects(link, why)
  local function ask(request)
    if not link then error(why, 0) end
    local reply, problem = link:ask(request)
    if not reply then error(problem, 0) end
    return reply
  end
  local function say(request)
    local reply = ask(request)
    show.print(reply.text ~= "" and reply.text or status_text(reply.status))
  end
  local function object(name, methods, text)
    local known, made = nearest.keys(methods), {}
    for key, method in pairs(methods) do
      methods[key] = function(self, ...)
        fail_if(self ~= made and self ~= nil, "expected a call with a colon: %s:%s(...)", name,
          key)
        return method(self, ...)
      end
    end
    setmetatable(methods, { __index = function(_, key)
      fail("%s has no '%s'%s", name, tostring(key), nearest.choices(key, known, "methods"))
    end })
    return setmetatable(made, { __index = methods, __tostring = function()
      if not link then return why end
      return show.shown(select(2, pcall(text)), true)
    end })
  end
  local function stays(given) return type(given) == "table" and given.stay or nil end
  local run = object("run", {
    status = function()
      return setmetatable(ask({ ["do"] = "status" }).status, { __tostring = status_text })
    end,
    pause = function(_, given) say { ["do"] = "pause", stay = stays(given) } end,
    resume = function() say { ["do"] = "resume" } end,
    step = function(_, n, given) say { ["do"] = "step", n = n, stay = stays(given) } end,
    set = function(_, name, value) say { ["do"] = "set", name = name, value = value } end,
    checkpoint = function() say { ["do"] = "checkpoint" } end,
    stop = function(_, reason) say { ["do"] = "stop", reason = reason } end,
  }, function() return status_text(ask({ ["do"] = "status" }).status) end)
  local policy = object("policy", {
    swap = function(_, file, policy_options)
      fail_if(type(file) ~= "string", "policy:swap: expected the name or the file of a policy, " ..
        "got %s", M_ffi.value_text(file))
      local is_path = file:find("/", 1, true) or file:find("%.lua$") or file:find("%.lua:")
        or file:find("%.json$")
      say { ["do"] = "swap", file = is_path and files.absolute(file) or file,
        options = policy_options }
    end,
    undo = function() say { ["do"] = "undo" } end,
    show = function() say { ["do"] = "policy" } end,
  }, function() return ask({ ["do"] = "policy" }).text end)
  return run, policy
end

-- Returns the global `history` of a run whose history cannot be read: every use of it raises an
-- error that says why. problem: the error of history.open.
local function no_history(path, problem)
  local file = path .. "/history.db"
  local text = files.exists(file) and tostring(problem) or ("there is no file %s: it was deleted, "
    .. "or the run has the option history = false; hint: `run` and `policy` work without it; after "
    .. "the run's end, resume=auto continues the run with a new history"):format(file)
  return setmetatable({}, { __index = function() fail("history: %s", text) end,
    __tostring = function() return "history: " .. text end })
end

-- Opens a run. Returns { run, policy, history, live } and a line of text about the connection.
-- Raises an error if there is no such run.
local function open(name)
  name = name:gsub("/+$", ""):gsub("/history%.db$", "")
  local path = require("engine.run.run").directory(name)
  if not files.exists(path .. "/history.db") and not files.exists(path .. "/attach.sock") then
    options.fail("there is no run %s%s", path, require("engine.run.runs").hint(name))
  end
  local link, problem, status = connect(path)
  local good, history = pcall(require("engine.run.history").open, path)
  if not good and not link then error(history, 0) end
  local why = status == C.ENG_ERR_STATE
    and ("%s has ended: its history can be read (engine attach %s -e 'print(history)'), but " ..
      "nothing can be changed"):format(path, name)
    or ("%s cannot be reached (%s): its history can be read, but nothing can be changed"):format(
      path, tostring(problem))
  local run, policy = objects(link, why)
  return { run = run, policy = policy, history = good and history
    or no_history(path, history), live = link ~= nil },
    link and "attached to " .. path .. "; help 'attach' lists what run, policy and history can do"
      or why
end

-- Runs the CODE of an option -e and prints its results.
local function execute(code)
  local repl = require "engine.cli.repl"
  local chunk, problem = repl.compile(code)
  fail_if(not chunk, "%s", problem == "more" and "-e: unfinished code: " .. code or problem)
  local good, value, more = pcall(chunk)
  if not good then error(value, 0) end
  if more ~= nil then print(repl.show_all(value, more))
  elseif value ~= nil then print(repl.show_all(value)) end
end

local function main(given)
  local opened, text = open(given.words[1])
  for _, key in ipairs { "run", "policy", "history" } do rawset(_G, key, opened[key]) end
  rawset(_G, "engine", require "engine")
  for _, code in ipairs(given.e) do
    execute(code)
    if C.eng_interrupted() > 0 then return 1 end  -- print(run) reports the interrupt and returns
  end
  if #given.e > 0 then return 0 end
  show.print(text)
  if opened.live then print(tostring(opened.run))
  else print(tostring(opened.history)) end
  -- a Ctrl-C that ended the wait for the run's status must not also end the REPL
  require("engine.host").settle()
  require("engine.cli.repl")()
end

return options.command {
  name = "attach", doc = "a REPL on a running or finished run", help = help,
  least = 1, most = 1, expects = "one run (code follows -e)", options = { e = "texts" },
  main = main,
}
