-- The disturbances of a running job for spec/chaos.lua, and the endings that docs/runs.md states.
--
-- A kind is a table:
--   fits(plan)             whether a job with this plan can be disturbed in this way
--   several                whether it needs several ranks
--   draw(random, plan)     returns the parameters
--   act(job, parameters)   disturbs the job; a coroutine beside the job (process.lua)
--   disk                   whether the run needs a disk of its own
--   mpirun                 options for mpirun
-- act calls job:may_end(statuses, ends) for the exit statuses that it allows, and job:wrong for a
-- problem that it finds. A moment is { step = } or { time = }: mostly a step of the run, sometimes
-- a time, which may lie before the run or after it.
local ffi = require "ffi"
local helper = require "spec.helper"
local process = require "spec.chaos.process"

local RANK_TIMEOUT = process.RANK_TIMEOUT
-- seconds within which a job ends: after a signal, after losing a rank
local SOON, LOST = 15, RANK_TIMEOUT + 15
local LOST_RANK = 70

local M = {}

local function at(job, moment)
  return job:wait(function()
    if moment.step then return job:step() >= moment.step end
    return job:age() >= moment.time
  end)
end

local function any_rank(random, plan) return random(plan.size) - 1 end
local function of_mpi(plan) return plan.ranks > 1 end

-- ------------------------------------------------------------------ signals

M["signal that ends"] = {
  draw = function(random, plan)
    local p = { signal = random { "INT", "TERM", "USR1", "USR2", "XCPU" },
      target = any_rank(random, plan), again = random(6) == 1 }
    if random(4) == 1 then p.target = plan.ranks > 0 and random(2) == 1 and "mpirun" or "all" end
    if p.target == "mpirun" and p.signal == "XCPU" then p.signal = "TERM" end
    return p
  end,
  act = function(job, p)
    if not at(job, p.moment) then return end
    local before = job:mid()
    if not job:signal(p.signal, p.target) then return end
    if p.again and job:rest(0.002) then job:signal(p.signal, p.target) end
    local code = 128 + process.SIGNALS[p.signal]
    -- mpirun ends with 1 when it is interrupted
    local by_mpirun = p.target == "mpirun" and (p.signal == "INT" or p.signal == "TERM")
    job:may_end(by_mpirun and { code, 1 } or { code }, before and job:mid())
    job.interrupted = true
    job:must_end(SOON, "after " .. p.signal)
  end,
}

M["signal that does not end"] = {
  draw = function(random, plan)
    local p = { signal = random { "HUP", "HUP", "PIPE", "XFSZ" }, target = any_rank(random, plan) }
    if random(3) == 1 then p.target = "all" end
    return p
  end,
  act = function(job, p)
    if not at(job, p.moment) then return end
    if job:step() == 0 then job:may_end { 128 + process.SIGNALS[p.signal] } end
    job:signal(p.signal, p.target)
  end,
}

M["killed"] = {
  draw = function(random, plan)
    return { signal = random { "KILL", "KILL", "QUIT" }, target = any_rank(random, plan) }
  end,
  act = function(job, p)
    if not at(job, p.moment) then return end
    local before = job:mid()
    if not job:signal(p.signal, p.target) then return end
    job:may_end({ 128 + process.SIGNALS[p.signal], job.mpi and LOST_RANK or nil }, before)
    job.killed = true
    job:must_end(LOST, "after a rank was killed")
  end,
}

M["killed, and mpirun leaves the others alone"] = {
  several = true, fits = of_mpi, mpirun = "--enable-recovery", draw = M["killed"].draw,
  act = function(job, p)
    job.unknown = true                      -- mpirun's status is then 0
    M["killed"].act(job, p)
  end,
}

-- ------------------------------------------------------------------ stopped processes

M["stopped and continued"] = {
  draw = function(random, plan)
    local p = { target = any_rank(random, plan), seconds = 0.05 + random() * 0.5 * RANK_TIMEOUT }
    if random(4) == 1 then p.target, p.seconds = "all", p.seconds * 4 end
    return p
  end,
  act = function(job, p)
    if not at(job, p.moment) then return end
    if not job:signal("STOP", p.target) then return end
    table.insert(job.finally, function() job:signal("CONT", p.target) end)
    job:rest(p.seconds)
    job:signal("CONT", p.target)
  end,
}

M["stopped for longer than the others wait"] = {
  several = true, fits = of_mpi,
  draw = function(random, plan)
    return { target = any_rank(random, plan), forever = random(2) == 1 }
  end,
  act = function(job, p)
    if not at(job, p.moment) then return end
    local before = job:mid()
    if not job:signal("STOP", p.target) then return end
    job:may_end({ LOST_RANK }, before and job:mid())
    job:must_end(LOST + 5, "a rank is stopped")
    -- If a rank is stopped after all others have ended, only mpirun waits for it.
    job:rest(p.forever and LOST or RANK_TIMEOUT + 5)
    if not p.forever or job:left() == 1 then job:signal("CONT", p.target) end
  end,
}

-- ------------------------------------------------------------------ full disks

local LOSES = { 5 }

-- Fills the disk of the run's directory to the last byte, with other files.
local function fill(plan)
  helper.shell(("dd if=/dev/zero of=%s/filler bs=4k; dd if=/dev/zero of=%s/filler2 bs=1")
    :format(plan.disk, plan.disk))
end
local function empty(plan) helper.shell(("rm -f %s/filler*"):format(plan.disk)) end

M["full disk"] = {
  fits = function(plan) return plan.can_mount end, disk = true,
  draw = function(random) return { seconds = random(2) == 1 and random() * 0.4 or nil } end,
  act = function(job, p)
    if not at(job, p.moment) then return end
    local begun = job:step() > 0
    fill(p.plan)
    table.insert(job.finally, function() empty(p.plan) end)
    job.disk_was_full = true
    job:may_end(begun and LOSES or { 5, 1 })
    if not p.seconds then return end
    job:rest(p.seconds)
    empty(p.plan)
  end,
}

ffi.cdef [[
  typedef struct { uint64_t soft, hard; } chaos_limit;
  int prlimit(int pid, int resource, const chaos_limit *new_limit, chaos_limit *old_limit);
]]

local function limit_files(pid, bytes)
  local FSIZE, most = 1, 0xffffffffffffffffULL
  return pid and ffi.C.prlimit(pid, FSIZE, ffi.new("chaos_limit", bytes or most, most), nil) == 0
end

M["file limit of one rank"] = {
  draw = function(random, plan)
    return { target = any_rank(random, plan), bytes = random { 0, 100, 5000, 50000 },
      seconds = random(2) == 1 and random() * 0.4 or nil }
  end,
  act = function(job, p)
    if not at(job, p.moment) or job:step() == 0 then return end
    if not limit_files(job.pids[p.target], p.bytes) then return end
    job.did[#job.did + 1] = ("files of rank %d limited to %d bytes at step %d"):format(p.target,
      p.bytes, job:step())
    job.disk_was_full = true
    job:may_end(LOSES)
    if not p.seconds then return end
    job:rest(p.seconds)
    limit_files(job.pids[p.target], nil)
    job.did[#job.did + 1] = ("limit lifted at step %d"):format(job:step())
  end,
}

-- ------------------------------------------------------------------ other processes

M["reader of stdout killed"] = {
  draw = function() return {} end,
  act = function(job, p)
    if not at(job, p.moment) then return end
    local before = job:mid()
    local pid = tonumber((helper.read(job.folder .. "/reader") or ""):match("%d+"))
    if not pid or ffi.C.kill(pid, process.SIGNALS.KILL) ~= 0 then return end
    job.did[#job.did + 1] = ("reader of stdout killed at step %d"):format(job:step())
    job.reader_gone = true
    if job.mpi then            -- mpirun ends the job as on SIGTERM, and may crash itself
      job.interrupted, job.unknown = true, true
      return
    end
    job:may_end(before and LOSES or { 5, 128 + process.SIGNALS.PIPE }, before and job:mid())
  end,
}

local READERS = { "runs %F --json", "runs %F", "plot %R", "plot %R --columns loss,scale",
  "plot %R --heatmap exponent", "report %R -o %F/report.html", "export %R --csv %F/a.csv",
  "attach %R -e 'print(run:status())'", "attach %R -e 'print(history:last(5))'",
  "attach %R -e 'run:pause() for i = 1, 3 do run:step(1) end'", "attach %R -e 'run:checkpoint()'",
  "attach %R -e 'run:pause() while true do history:last(1) end'",
  "replay %R --policy dynamic", "attach %R -e 'run:stop()'" }

M["readers of the history"] = {
  draw = function(random)
    local p = { list = {} }
    for i = 1, 1 + random(3) do
      p.list[i] = { words = random(READERS), rest = random() * 0.2,
        lives = random(2) == 1 and random() * 0.3 or nil }
    end
    return p
  end,
  act = function(job, p)
    if not at(job, p.moment) then return end
    for i, reader in ipairs(p.list) do
      local words = reader.words:gsub("%%R", job.run):gsub("%%F", job.run:match("^(.*)/"))
      local path = ("%s/reader%d"):format(job.folder, i)
      os.execute(("{ sh -c 'echo $$ >%s.pid; exec \"$@\"' sh %s %s >%s.out 2>&1 </dev/null; " ..
        "echo $? >%s.code; } &"):format(path, helper.quote(helper.engine), words, path, path))
      job.did[#job.did + 1] = ("%s at step %d"):format(words, job:step())
      if words:find "run:stop" then
        job.interrupted = true
        job:may_end { 2 }
      end
      local function pid() return tonumber((helper.read(path .. ".pid") or ""):match("%d+")) end
      local function code() return tonumber((helper.read(path .. ".code") or ""):match("%d+")) end
      table.insert(job.finally, function()
        if words:find "while true" and pid() then ffi.C.kill(pid(), process.SIGNALS.KILL) end
        for _ = 1, 1500 do
          if code() then break end
          process.nap(0.01)
        end
        local text = helper.read(path .. ".out") or ""
        if not code() then
          job:wrong("engine %s has not ended 15 s after the job: %s", words, text)
          if pid() then ffi.C.kill(pid(), process.SIGNALS.KILL) end
        elseif code() ~= 0 and code() ~= 1 and code() ~= 137 or text:find "lua/engine/" then
          job:wrong("engine %s ended with %d: %s", words, code(), text)
        end
      end)
      local lives = reader.lives or words:find "while true" and 0.3
      if lives and job:rest(lives) and pid() and not code() then
        ffi.C.kill(pid(), process.SIGNALS.KILL)
      end
      if not job:rest(reader.rest) then return end
    end
  end,
}

-- ------------------------------------------------------------------ policies

-- Policies that only choose the scale: in formats with f32's range a scale that is a power of two
-- changes no bit of the weights.
function M.policy_text(name, decide)
  return ("return { name = %q, init = function() return { scale = 8 } end, decide = function(s, r) "
    .. "%s end }\n"):format(name, decide)
end

local POLICIES = {
  good = function(name) return M.policy_text(name, "return 2^" .. #name) end,
  broken = function() return "return { name = " end,
  empty = function() return "" end,
  ["not a policy"] = function() return "return 7" end,
  looping = function(name) return M.policy_text(name, "while true do end") end,
  ["loops later"] = function(name, step)
    return M.policy_text(name, ("if r.step > %d then while true do end end return 4"):format(step))
  end,
  ["says nothing"] = function(name) return M.policy_text(name, "return nil") end,
  hungry = function(name)
    return M.policy_text(name, "local t = {} for i = 1, 1e9 do t[i] = {} end return 4")
  end,
}
local POLICY_NAMES = {}
for name in pairs(POLICIES) do POLICY_NAMES[#POLICY_NAMES + 1] = name end
table.sort(POLICY_NAMES)

M["policy swapped"] = {
  fits = function(plan) return plan.policy ~= nil end,
  draw = function(random)
    return { what = random(3) == 1 and "good" or random(POLICY_NAMES), name = ("p"):rep(random(6)),
      hangup = random(3) == 1 }
  end,
  act = function(job, p)
    if not at(job, p.moment) then return end
    local step = job:step()
    local text = POLICIES[p.what](p.name, step + 4)
    local new = p.plan.policy .. ".new"
    helper.write(new, text)
    os.rename(new, p.plan.policy)
    if p.hangup and step > 0 then job:signal("HUP", 0) end
    job.did[#job.did + 1] = ("policy file: %s at step %d"):format(p.what, step)
    if step == 0 then job:may_end { 1, 3 } end          -- the script may begin with it
    if job:mid() then job.swapped = p.what end
  end,
}

return M
