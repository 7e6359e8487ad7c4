-- A job in the background, for spec/chaos.lua: starts it, finds its processes, follows its steps,
-- and runs the disturbances beside it as coroutines until every process has ended. Also records the
-- exit statuses that the disturbances allow, and the time within which the job must end.
local ffi = require "ffi"
local C = require("engine.base.ffi").C
local helper = require "spec.helper"
local start = require "spec.dist.start"

ffi.cdef "int usleep(unsigned useconds); int kill(int pid, int signal);"

local M = {}

M.SIGNALS = { HUP = 1, INT = 2, QUIT = 3, KILL = 9, USR1 = 10, USR2 = 12, PIPE = 13, TERM = 15,
  CONT = 18, STOP = 19, XCPU = 24, XFSZ = 25 }
M.STEPS = 80            -- of the job
M.RANK_TIMEOUT = 5      -- seconds; a loaded machine can take 2 s to start a rank
local END_WITHIN = 60   -- seconds for an undisturbed job on a busy machine
local MARGIN = 10       -- the last steps do not count as the middle of a run

function M.nap(seconds) ffi.C.usleep(seconds * 1e6) end

local function number_in(path) return tonumber((helper.read(path) or ""):match("%d+")) end

local function alive(pid)
  local state = (helper.read(("/proc/%d/stat"):format(pid)) or ""):match("%) (%a)")
  return state ~= nil and state ~= "Z" and state ~= "X"
end

local Job = {}
Job.__index = Job

--- Starts the job. o: ranks (0: one process without mpirun), settings, folder (empty, its own),
--- mpirun (more options for it).
function M.start(o)
  local F = o.folder
  local settings = { "steps=" .. M.STEPS, "marks=" .. F .. "/marks", "dropout=0.1",
    "timeout=" .. M.RANK_TIMEOUT }
  for _, setting in ipairs(o.settings) do settings[#settings + 1] = setting end
  local command = start.command(o.ranks, "spec/dist/job.lua", settings, { limit = 2 * END_WITHIN,
    mpirun = o.mpirun, environment = "ENGINE_RANK_TIMEOUT=" .. M.RANK_TIMEOUT })
  os.execute((([[( ulimit -c 0; mkfifo F/o F/e; cat F/o >F/out & echo $! >F/reader
    cat F/e >F/err &
    sh -c 'echo $$ >F/pid; exec env "$@"' sh COMMAND >F/o 2>F/e </dev/null
    echo $? >F/new; mv F/new F/code; wait; touch F/done ) 2>/dev/null &]]):gsub("%f[%w]F/",
    F .. "/"):gsub("COMMAND", function() return command end)))
  local began = C.eng_clock()
  return setmetatable({ folder = F, size = math.max(o.ranks, 1), mpi = o.ranks > 0, run = o.run,
    began = began, deadline = began + END_WITHIN, late = "undisturbed", pids = {}, codes = {},
    problems = {}, did = {}, finally = {}, stops = {} }, Job)
end

--- Seconds since the start.
function Job:age() return C.eng_clock() - self.began end

--- The exit status, or nil while the job runs.
function Job:over()
  self.code = self.code or number_in(self.folder .. "/code")
  return self.code
end

--- Steps made, as rank 0 noted them; 0 before the first.
function Job:step() return number_in(self.folder .. "/marks") or 0 end

--- Whether the job is in the middle of its run: it has begun, and is not about to end.
function Job:mid()
  local step = self:step()
  return step >= 1 and step <= M.STEPS - MARGIN and not self:over()
end

-- Notes the processes as they appear: self.pids[rank], self.mpirun.
local function find(self)
  local top = not self.pids[self.size - 1] and number_in(self.folder .. "/pid")
  if not top then return end
  local below = helper.children(top)
  if not self.mpi then
    self.pids[0] = below[1]
    return
  end
  self.mpirun = below[1]
  for _, pid in ipairs(self.mpirun and helper.children(self.mpirun) or {}) do
    local rank = (helper.read(("/proc/%d/environ"):format(pid))
      or ""):match("OMPI_COMM_WORLD_RANK=(%d+)")
    if rank then self.pids[tonumber(rank)] = pid end
  end
end

--- Sends a signal to a rank, "all" ranks or "mpirun". False if there is no such process now. A
--- process that several disturbances have stopped goes on when the last of them sends CONT.
function Job:signal(name, target)
  local list = { target == "mpirun" and self.mpirun or self.pids[target] }
  if target == "all" then
    for rank = 0, self.size - 1 do list[#list + 1] = self.pids[rank] end
  end
  self.did[#self.did + 1] = ("%s to %s at step %d, %.2f s"):format(name, target, self:step(),
    self:age())
  local sent = false
  for _, pid in ipairs(list) do
    local change = name == "STOP" and 1 or name == "CONT" and -1 or 0
    local stops = math.max((self.stops[pid] or 0) + change, 0)
    self.stops[pid] = stops
    if name == "CONT" and stops > 0 then sent = true
    else sent = alive(pid) and ffi.C.kill(pid, M.SIGNALS[name]) == 0 or sent end
  end
  return sent
end

--- The number of ranks whose process has not ended.
function Job:left()
  local n = 0
  for _, pid in pairs(self.pids) do n = n + (alive(pid) and 1 or 0) end
  return n
end

-- ------------------------------------------------------------------ for disturbances

--- Waits until f() is true; false if the job ended before. Called in a disturbance's coroutine.
function Job:wait(f)
  while not f() do
    if self:over() then return false end
    coroutine.yield()
  end
  return not self:over()
end

function Job:rest(seconds)
  local until_then = C.eng_clock() + seconds
  return self:wait(function() return C.eng_clock() >= until_then end)
end

--- Allows the job to end with these statuses. Status 0 is also allowed, unless `ends` is true.
function Job:may_end(codes, ends)
  for _, code in ipairs(codes) do self.codes[code] = true end
  self.ends = self.ends or ends
end

--- The job must end within so many seconds from now; of several deadlines the earliest counts.
function Job:must_end(seconds, why)
  local at = C.eng_clock() + seconds
  if at < self.deadline then self.deadline, self.late = at, why end
end

function Job:wrong(format, ...) self.problems[#self.problems + 1] = format:format(...) end

--- Runs these disturbances, functions of the job, until every process has ended or the job is late.
--- Fills code, seconds, out, err and text (out and err together).
function Job:watch(disturbances)
  local threads = {}
  for i, f in ipairs(disturbances) do threads[i] = coroutine.create(f) end
  local function step()
    M.nap(0.003)
    find(self)
    for _, thread in ipairs(threads) do
      if coroutine.status(thread) ~= "dead" then assert(coroutine.resume(thread, self)) end
    end
  end
  repeat step() until self:over() and self:left() == 0 or C.eng_clock() > self.deadline
  if not self:over() or self:left() > 0 then
    local states = {}
    for rank, pid in pairs(self.pids) do
      states[#states + 1] = ("rank %d: %s"):format(rank,
        (helper.read(("/proc/%d/stat"):format(pid)) or "gone"):match("%) (%a)") or "gone")
    end
    self:wrong("late (%s): %.1f s, code %s, %s", self.late, self:age(), tostring(self.code),
      table.concat(states, ", "))
    for _, pid in pairs(self.pids) do ffi.C.kill(pid, M.SIGNALS.KILL) end
    if self.mpirun then ffi.C.kill(self.mpirun, M.SIGNALS.KILL) end
    while not self:over() do M.nap(0.02) end
  end
  self.seconds = self:age()
  for _ = 1, #threads do step() end              -- the disturbances see that the job is over
  for _, f in ipairs(self.finally) do f() end
  for _ = 1, 500 do
    if helper.read(self.folder .. "/done") then break end
    M.nap(0.01)
  end
  self.out, self.err = helper.read(self.folder .. "/out") or "",
    helper.read(self.folder .. "/err") or ""
  self.text = self.out .. self.err
  return self
end

return M
