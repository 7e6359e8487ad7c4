-- engine attach RUN [-e CODE]: a REPL on a run. While it runs, `run` and `policy` speak to it over its socket (control.lua);
-- `history` is read from the file, here. On a finished run there is the history alone.
local M_ffi = require "engine.base.ffi"
local nearest = require "engine.base.nearest"

local C, ffi = M_ffi.C, M_ffi.ffi

local attach = { doc = "a REPL on a running or finished run" }

attach.help = [==[
usage: engine attach RUN [-e CODE]...

Opens a REPL on a run, given by its name (runs/RUN) or its directory, from any terminal of the run's owner. With -e it runs CODE
and ends. While the run goes on:

  run:status()                  where it is                   (also: print(run))
  run:pause()  run:resume()     between two steps; a pause ends when who asked for it leaves, unless run:pause { stay = true }
  run:step(5)                   five steps, then a pause
  run:set("lr", 1e-4)           lr clip clip_value scale steps checkpoint_every stats_every; lr "schedule" gives the schedule back
  run:checkpoint()  run:stop()
  policy:swap("mine.lua")       another policy, tried first; or "dynamic:growth_interval=500"
  policy:undo()                 back to the one before
  policy:show()                 its options and its state     (also: policy)

and always:

  history:last(20)  history:overflows()  history:events()  history:why(812)  history:query("select ...")
  history:shadows()  history:tensors(812)  history:plot("scale")  history:plot("amax", { log = true })
  history:heatmap()  history:heatmap { by = "time" }  history:tensor("blocks.3.attn.qkv.weight")]==]

local function absolute(path)
  if path:sub(1, 1) == "/" then return path end
  return (os.getenv("PWD") or ".") .. "/" .. path
end

-- ------------------------------------------------------------------ the line to the run

local Link = {}
Link.__index = Link

local function connect(path)
  local out = ffi.new("eng_attach_link *[1]")
  local status = C.eng_attach_connect(out, path .. "/attach.sock")
  if status ~= 0 then return nil, M_ffi.message(), status end
  return setmetatable({ handle = ffi.gc(out[0], C.eng_attach_leave), asked = 0, path = path }, Link)
end

local line, length = ffi.new("const char *[1]"), ffi.new("int64_t[1]")
local PATIENCE = 5          -- seconds without an answer until that is told

-- What is to be said to one who waits.
local function waiting_text(path)
  local pid, state = require("engine.run.runs").holder(path)
  local why = not pid and "it answers between two steps" or state == "T" and ("process %d is stopped; kill -CONT %d wakes it"):format(pid, pid)
    or ("process %d is in a long step, or hangs"):format(pid)
  return ("no answer from the run for %d s: %s. Still waiting; Ctrl-C gives up. Its history can be read: engine attach %s -e 'print(history)'\n"):format(
    PATIENCE, why, path)
end

-- The next line, waiting as long as it takes but for Ctrl-C: the status of eng_attach_receive.
local function receive(self, patience)
  local before = C.eng_interrupt_policy(2)
  local status = C.eng_attach_receive(line, length, self.handle, patience)
  if status == C.ENG_ERR_STATE then
    io.stdout:flush()
    io.stderr:write(waiting_text(self.path))
    status = C.eng_attach_receive(line, length, self.handle, 1e9)
  end
  C.eng_interrupt_policy(before)
  return status
end

--- Asks and waits for the answer, as long as it takes; Ctrl-C gives up waiting.
function Link:ask(request)
  self.asked = self.asked + 1
  request.id = self.asked
  local text = require("engine.base.json").encode(request) .. "\n"
  if self.gone then return nil, "the run has ended; the history is still here" end
  if #text > C.ENG_ATTACH_LINE then return nil, "that is too long to be sent" end
  local status = C.eng_attach_send(self.handle, text, #text)
  while status == 0 do
    status = receive(self, request["do"] == "step" and 1e9 or PATIENCE)          -- many steps take their time
    local reply = status == 0 and require("engine.base.json").decode(ffi.string(line[0], length[0]))
    -- an older answer belongs to a question that was given up
    if reply and (reply.id == nil or reply.id == request.id) then
      if reply.ok then return reply end
      return nil, reply.error
    end
  end
  if status == C.ENG_ERR_INTERRUPTED then return nil, "given up: the run has not answered yet; it does so between two steps" end
  self.gone = true
  return nil, "the run has ended; the history is still here"
end

local function scale_text(x) return require("engine.run.progress").scale_text(x) end

local function status_text(s)
  local parts = { ("%s: step %d of %d%s"):format(s.run or "?", s.step, s.steps, s.paused and ", paused" or ""),
    ("%d updates, %d skipped"):format(s.updates, s.skipped), ("loss %.4f"):format(s.loss), ("lr %.4g"):format(s.lr),
    ("scale %s"):format(scale_text(s.scale)), ("policy %s"):format(s.policy) }
  return table.concat(parts, ", ") .. (s.shadows and "\n" .. s.shadows or "")
end

-- ------------------------------------------------------------------ what the REPL has

-- Objects with methods that ask the run. Without a link they say that there is none.
local function objects(link, why)
  local function ask(request)
    if not link then error(why, 0) end
    local reply, problem = link:ask(request)
    if not reply then error(problem, 0) end
    return reply
  end
  local function say(request)
    local reply = ask(request)
    print(reply.text ~= "" and reply.text or status_text(reply.status))
  end
  local function object(name, methods, text)
    local known = {}
    for method in pairs(methods) do known[#known + 1] = method end
    table.sort(known)
    setmetatable(methods, { __index = function(_, key)
      error(("%s has no '%s'%s; there are %s"):format(name, tostring(key), nearest.hint(tostring(key), known), table.concat(known, ", ")), 0)
    end })
    return setmetatable({}, { __index = methods, __tostring = function()
      if not link then return why end
      local good, result = pcall(text)
      return good and result or tostring(result)
    end })
  end
  local function stays(options) return type(options) == "table" and options.stay or nil end
  local run = object("run", {
    status = function() return setmetatable(ask({ ["do"] = "status" }).status, { __tostring = status_text }) end,
    pause = function(_, options) say { ["do"] = "pause", stay = stays(options) } end,
    resume = function() say { ["do"] = "resume" } end,
    step = function(_, n, options) say { ["do"] = "step", n = n, stay = stays(options) } end,
    set = function(_, name, value) say { ["do"] = "set", name = name, value = value } end,
    checkpoint = function() say { ["do"] = "checkpoint" } end,
    stop = function(_, reason) say { ["do"] = "stop", reason = reason } end,
  }, function() return status_text(ask({ ["do"] = "status" }).status) end)
  local policy = object("policy", {
    swap = function(_, file, options)
      if type(file) ~= "string" then error("swap: expected the name or the file of a policy, got " .. M_ffi.value_text(file), 0) end
      local is_path = file:find("/", 1, true) or file:find("%.lua$") or file:find("%.lua:") or file:find("%.json$")
      say { ["do"] = "swap", file = is_path and absolute(file) or file, options = options }
    end,
    undo = function() say { ["do"] = "undo" } end,
    show = function() say { ["do"] = "policy" } end,
  }, function() return ask({ ["do"] = "policy" }).text end)
  return run, policy
end

--- Opens a run: its history, and the objects `run` and `policy`. Gives them and a line about it; nil and a message without a run.
function attach.open(name)
  local path = require("engine.run.run").directory(name):gsub("/history%.db$", ""):gsub("/+$", "")
  if C.eng_file_kind(path) ~= 2 then
    return nil, "there is no run " .. path
  end
  local link, problem, status = connect(path)
  local good, history = pcall(require("engine.run.history").open, path)
  if not good and not link then return nil, tostring(history) end
  local why = status == C.ENG_ERR_STATE and ("%s is not running: its history can be read, nothing can be changed"):format(path)
    or ("%s cannot be reached (%s): its history can be read, nothing can be changed"):format(path, tostring(problem))
  local run, policy = objects(link, why)
  return { run = run, policy = policy, history = good and history or nil, live = link ~= nil }, link and "attached to " .. path or why
end

function attach.main(name, ...)
  if not name or name:sub(1, 1) == "-" then
    io.stderr:write(attach.help, "\n")
    return 1
  end
  local opened, text = attach.open(name)
  if not opened then
    io.stderr:write("engine attach: ", text, "\n")
    return 1
  end
  for _, key in ipairs { "run", "policy", "history" } do rawset(_G, key, opened[key]) end
  rawset(_G, "engine", require "engine")
  local words = { ... }
  if #words == 0 then
    print(text)
    if opened.live then print(tostring(opened.run)) elseif opened.history then print(tostring(opened.history)) end
    require("engine.host").settle()                   -- Ctrl-C has ended the wait for that line, and ends nothing else
    require("engine.cli.repl")()
    return 0
  end
  for i = 1, #words, 2 do
    if words[i] ~= "-e" or not words[i + 1] then
      io.stderr:write("engine attach: expected -e CODE, got ", words[i], "\n")
      return 1
    end
    local chunk, problem = require("engine.cli.repl").compile(words[i + 1])
    if not chunk then
      io.stderr:write("engine attach: ", tostring(problem), "\n")
      return 1
    end
    local results = { pcall(chunk) }
    if not results[1] then
      io.stderr:write("engine attach: ", tostring(results[2]), "\n")
      return 1
    end
    if results[2] ~= nil or results[3] ~= nil then print(require("engine.cli.repl").show_all(unpack(results, 2, results[3] ~= nil and 3 or 2))) end
    if C.eng_interrupted() > 0 then return 1 end             -- print(run) says so and goes on
  end
  return 0
end

return attach
