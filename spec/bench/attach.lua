-- What attached clients cost a run that trains at full speed. One job, measured in alternating
-- windows with no client, one client and two clients attached, each sending requests as fast as it
-- gets answers. As a control, two clients send about as many requests to another, paused run: they
-- load the machine, but not the measured run. Prints for each kind of window the median step time
-- and the request rate.
--   ./engine spec/bench/attach.lua [SECONDS [ROUNDS]]
local engine = require "engine"
local helper = require "spec.helper"

local seconds, rounds = tonumber(arg[1] or 3), tonumber(arg[2] or 5)
local quote = helper.quote
local folder = helper.folder()
local run = folder .. "/run"

-- One thread, so that a second core is free for the clients. A step takes about 10 ms.
local JOB = [[
local engine = require "engine"
engine.seed(1)
local model = engine.nn.gpt { vocab = 256, context = 64, width = 128, heads = 4, layers = 2 }
local function ids() return engine.randint(0, 256, 8, 64, { dtype = "i32", keep = true }) end
local x, y = ids(), ids()
local data = { next = function() return { x = x, y = y, tokens = 512 } end }
engine.trainer { model = model, data = data, steps = 1e9, precision = "fp16",
  policy = "dynamic", run = arg[1], log = "quiet",
  optimizer = engine.optim.adamw(model, { lr = 1e-4, precision = "fp16" }) }:run()
]]
local CLIENT = [[local n, from, ffi = 0, os.time(), require "ffi"
ffi.cdef "int usleep(unsigned);"
while os.time() - from < %d do run:status() history:last(20) n = n + 2 ffi.C.usleep(%d) end
print(n)]]

-- Starts a job that accepts clients, in the background, and returns its process id.
local function start(path)
  local job = io.popen(("OMP_NUM_THREADS=1 %s %s %s >%s 2>&1 </dev/null & echo $!"):format(
    quote(helper.engine), quote(helper.write(folder .. "/job.lua", JOB)),
    quote(path), quote(path .. ".out")))
  local pid = job:read("*n")
  job:close()
  helper.shell(("for i in $(seq 200); do test -S %s/attach.sock && break; sleep 0.1; done; " ..
    "sleep 2"):format(quote(path)))
  return pid
end

local function client(path, code)
  return io.popen(("%s attach %s -e %s 2>&1"):format(quote(helper.engine), quote(path),
    quote(code)))
end

local other = folder .. "/other"
local pids = { start(run), start(other) }
client(other, "run:pause { stay = true }"):close()

local KINDS = { { name = "no client", clients = 0, run = run },
  { name = "one client", clients = 1, run = run },
  -- pause: microseconds between two pairs of requests, about one step
  { name = "two clients", clients = 2, run = run },
  { name = "two elsewhere", clients = 2, run = other, pause = 10000 } }
for _, kind in ipairs(KINDS) do kind.steps, kind.asked = {}, 0 end
local history = assert(engine.history.open(run))
local function last_step() return history:query("select max(step) as s from steps")[1].s end
for _ = 1, rounds do
  for _, kind in ipairs(KINDS) do
    local from, pipes = last_step(), {}
    for i = 1, kind.clients do
      pipes[i] = client(kind.run, CLIENT:format(seconds, kind.pause or 0))
    end
    if kind.clients == 0 then helper.shell("sleep " .. seconds) end
    for _, pipe in ipairs(pipes) do
      kind.asked = kind.asked + (tonumber(pipe:read("*a"):match("(%d+)%s*$"))
        or error("a client ended without a count"))
      pipe:close()
    end
    local till = last_step()
    for _, row in ipairs(history:query(
      ("select elapsed - lag(elapsed) over (order by step) as elapsed from steps where step >= " ..
      "%d and step <= %d"):format(from, till))) do
      if row.elapsed then table.insert(kind.steps, row.elapsed) end  -- the first has no predecessor
    end
  end
end
for i, path in ipairs { run, other } do
  client(path, "run:stop()"):close()
  client(path, "run:resume()"):close()
  helper.shell(("for i in $(seq 100); do kill -0 %d 2>/dev/null || break; sleep 0.1; done; kill " ..
    "-9 %d 2>/dev/null"):format(pids[i], pids[i]))
end
local rows = history:query("select count(*) as n, max(step) - min(step) + 1 as span from steps")[1]

local function quantile(list, q) return list[math.max(1, math.ceil(q * #list))] end
for _, kind in ipairs(KINDS) do table.sort(kind.steps) end
local base = quantile(KINDS[1].steps, 0.5)
for _, kind in ipairs(KINDS) do
  local list = kind.steps
  print(("%-15s  %6d steps  median %6.3f ms (%+.1f %%)  p10 %6.3f  p90 %6.3f  %6.0f requests a " ..
    "second"):format(kind.name, #list,
    quantile(list, 0.5) * 1e3, (quantile(list, 0.5) / base - 1) * 100, quantile(list, 0.1) * 1e3,
    quantile(list, 0.9) * 1e3,
    kind.asked / (seconds * rounds)))
end
print(("steps in the history: %d of %d"):format(rows.n, rows.span))
helper.remove(folder)
