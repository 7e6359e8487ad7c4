-- For specs: runs the engine and other programs, writes files.
local ffi = require "ffi"
local helper = {}

local has_host, host = pcall(require, "engine.host")
-- The binary under test: the one that runs this spec, otherwise the one in the tree.
helper.engine = has_host and host.executable or "./engine"

-- Plots choose their characters by TERM (ASCII for "dumb" and "linux") and by the locale; specs
-- expect those of an ordinary UTF-8 terminal, whatever terminal starts them.
ffi.cdef "int setenv(const char *name, const char *value, int overwrite);"
ffi.C.setenv("TERM", "xterm", 1)
ffi.C.setenv("LC_ALL", "C.UTF-8", 1)

-- True in a sanitizer build, which is too slow for time limits.
helper.sanitized = os.getenv("ENGINE_SANITIZED") ~= nil

function helper.quote(text)
  return "'" .. tostring(text):gsub("'", "'\\''") .. "'"
end

function helper.read(path)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read("*a")
  file:close()
  return text
end

function helper.write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  return path
end

-- A new empty folder; the spec removes it with helper.remove.
function helper.folder()
  local pipe = assert(io.popen("mktemp -d"))
  local path = pipe:read("*l")
  pipe:close()
  return path
end

function helper.remove(path)
  assert(path and #path > 4 and path:sub(1, 1) == "/")
  os.execute("rm -rf " .. helper.quote(path))
end

-- The processes that a process started and that still exist.
function helper.children(pid)
  local list = {}
  for child in (helper.read(("/proc/%d/task/%d/children"):format(pid, pid)) or ""):gmatch("%d+") do
    list[#list + 1] = tonumber(child)
  end
  return list
end

-- Runs a shell command and returns its exit status; the shell reports signal n as 128 + n.
-- os.execute returns the wait status; if LuaJIT was built with the 5.2 extensions, it returns true
-- or nil, a word and the exit status.
function helper.execute(command)
  local status, _, code = os.execute(command)
  if code then return code end
  return status >= 256 and math.floor(status / 256) or status
end

-- Runs a shell command. Returns { code, out, err }.
function helper.shell(command, input)
  local out, err, feed = os.tmpname(), os.tmpname(), nil
  local source = "</dev/null"
  if input then
    feed = helper.write(os.tmpname(), input)
    source = "<" .. feed
  end
  local code = helper.execute(("{ %s\n} %s >%s 2>%s"):format(command, source, out, err))
  local result = { code = code, out = helper.read(out), err = helper.read(err) }
  os.remove(out)
  os.remove(err)
  if feed then os.remove(feed) end
  return result
end

-- Runs the engine with arguments, each quoted. `input` is its stdin.
function helper.run(arguments, input)
  local words = { helper.quote(helper.engine) }
  for _, argument in ipairs(arguments) do words[#words + 1] = helper.quote(argument) end
  return helper.shell(table.concat(words, " "), input)
end

-- Calls f, which must raise an error of one line. Returns the message.
function helper.failure(f, ...)
  local good, message = pcall(f, ...)
  if good then error("expected an error, but the call succeeded", 2) end
  message = tostring(message)
  if message:find "\n" then error("expected an error of one line, got\n" .. message, 2) end
  return message
end

-- Calls f, which must raise an error of one line that contains `text`.
function helper.refuses(text, f, ...)
  local message = helper.failure(f, ...)
  if not message:find(text, 1, true) then
    error(("expected an error with '%s', got: %s"):format(text, message), 2)
  end
end

-- Opens the history of a run, calls a method of it and closes it. Returns the method's result.
function helper.history(run, method, ...)
  local history = require("engine").history.open(run)
  local result = history[method](history, ...)
  history:close()
  return result
end

-- Runs f in a step that frees its tensors, also after an error. Returns the result of f.
function helper.step(f)
  local engine = require "engine"
  engine.begin_step()
  local good, result = pcall(f)
  engine.end_step()
  if not good then error(result, 0) end
  return result
end

-- Wraps f in such a step: it("...", helper.in_step(function() ... end)).
function helper.in_step(f)
  return function() helper.step(f) end
end

-- The fields of helper.job that are not options of the trainer.
local JOB = { seed = 5, context = 16, width = 32, layers = 2, dropout = 0, text = "", batch = 4,
  data_seed = 9, lr = 1e-3, precision = "fp32" }

-- Returns a trainer of a tiny GPT. Each argument is a table of fields of JOB and options of the
-- trainer; later tables override earlier ones. optimizer: its name.
function helper.job(...)
  local engine, o = require "engine", { log = "quiet", optimizer = "adamw" }
  for _, fields in ipairs { JOB, ... } do
    for key, value in pairs(fields) do o[key] = value end
  end
  engine.seed(o.seed)
  o.model = engine.nn.gpt { vocab = 256, context = o.context, width = o.width, heads = 2,
    layers = o.layers, dropout = o.dropout }
  o.data = o.data or engine.data.text { text = o.text, batch = o.batch, context = o.context,
    seed = o.data_seed }
  o.optimizer = engine.optim[o.optimizer](o.model, { lr = o.lr, precision = o.precision })
  for key in pairs(JOB) do o[key] = nil end
  return engine.trainer(o)
end

return helper
