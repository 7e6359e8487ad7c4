-- How a run ends: signals, lost output, full disks, removed files, and the exit status of each
-- (docs/runs.md).
local engine = require "engine"
local helper = require "spec.helper"

local quote = helper.quote
local folder
before_each(function() folder = helper.folder() end)
after_each(function() helper.remove(folder) end)

-- A job of one tiny layer. arg: the run, the number of steps, the seconds a step takes, Lua code
-- for trainer options, and Lua code to run at the end (both optional).
local SCRIPT = [[
  local engine = require "engine"
  engine.seed(1)
  local net = engine.nn.linear(2, 1)
  local data = { next = function() return { x = engine.rand(4, 2), tokens = 4 } end }
  local options = { model = net, data = data, optimizer = engine.optim.sgd(net),
    steps = tonumber(arg[2]), run = arg[1], log = "line",
    loss = function(m, b) return m(b.x):sum() end,
    on_step = function(t)
      if t.steps_done == 1 then io.stderr:write("running\n") end
      local clock = require("engine.base.machine").clock
      local until_then = clock() + tonumber(arg[3])
      while clock() < until_then do end
    end }
  for key, value in pairs(loadstring("return {" .. (arg[4] or "") .. "}")()) do
    options[key] = value
  end
  local summary = engine.trainer(options):run()
  io.stderr:write("script ends\n", tostring(summary.status), "\n")
  if arg[5] then loadstring(arg[5])() end]]

-- A command that runs the job.
local function job(run, steps, seconds, ...)
  local words = { quote(helper.engine), quote(helper.write(folder .. "/job.lua", SCRIPT)), run,
    steps, seconds }
  for _, word in ipairs { ... } do words[#words + 1] = quote(word) end
  return table.concat(words, " ")
end

-- Starts the job, sends signals when it trains; returns its status and its stderr.
local function sent(signals, command)
  local err = folder .. "/err"
  local result = helper.shell(([[
    %s 2>%s >/dev/null & pid=$!
    for i in $(seq 200); do grep -q running %s && break; sleep 0.05; done
    %s
    wait $pid; echo "code $?"]]):format(command, err, err, signals))
  return tonumber(result.out:match("code (%d+)")), helper.read(err)
end

local function kill(...)
  local parts = {}
  for i, name in ipairs { ... } do parts[i] = "kill -" .. name .. " $pid; " end
  return table.concat(parts, "sleep 0.1; ")
end

local function events(run)
  local list = {}
  for _, event in ipairs(helper.history(run, "events")) do
    list[#list + 1] = event.kind .. " " .. event.text
  end
  return table.concat(list, "\n")
end

describe("a signal to a run", function()
  for name, number in pairs { INT = 2, TERM = 15, USR1 = 10, USR2 = 12, XCPU = 24 } do
    it(name .. " ends it with a checkpoint, an event and 128 + its number", function()
      local run = folder .. "/r"
      local code, err = sent(kill(name), job(run, "1000000000", "0.001"))
      assert.equal(128 + number, code, err)
      assert.matches("stopping after this step", err, 1, true)
      assert.matches("script ends\n" .. code, err, 1, true)
      assert.is_truthy(engine.checkpoint.latest(run .. "/checkpoints"))
      assert.matches("stopped interrupted", events(run), 1, true)
    end)
  end

  it("that is a warning, such as USR1, does not cut the ending short when repeated", function()
    local run = folder .. "/r"
    local code, err = sent(kill("XCPU", "USR1", "XCPU", "TERM"), job(run, "1000000000", "0.5"))
    assert.equal(128 + 24, code, err)
    assert.is_truthy(engine.checkpoint.latest(run .. "/checkpoints"))
  end)

  it("XFSZ and PIPE change nothing", function()
    local run = folder .. "/r"
    local code, err = sent(kill("XFSZ", "PIPE", "USR1"), job(run, "1000000000", "0.001"))
    assert.equal(138, code, err)
    assert.matches("stopped interrupted", events(run), 1, true)
  end)

  it("HUP after the last step changes nothing", function()
    local run, after = folder .. "/r", [[
      io.stderr:write("after\n")
      local clock = require("engine.base.machine").clock
      local until_then = clock() + 0.5
      while clock() < until_then do end
      io.stderr:write("saved\n")]]
    local code, err = sent("for i in $(seq 100); do grep -q after " .. folder ..
      "/err && break; sleep 0.05; done; kill -HUP $pid", job(run, "3", "0", "", after))
    assert.matches("saved", err, 1, true)
    assert.equal(0, code)
  end)

  it("still ends a script without a run", function()
    local result = helper.shell(quote(helper.engine) ..
      " -e 'while true do end' & sleep 0.5; kill -USR1 $!; sleep 0.1; " ..
      "kill -INT $!; sleep 0.1; kill -INT $!; wait $!; echo code $?")
    assert.matches("code 130", result.out, 1, true)
    result = helper.shell(quote(helper.engine) ..
      " -e 'for i = 1, 1e7 do print(i) end io.stderr:write(\"too far\")' | head -1; " ..
      "echo ${PIPESTATUS:-none}")
    assert.not_matches("too far", result.err, 1, true)
  end)
end)

describe("the output of a run", function()
  it("may lose its reader: the run goes on and says so", function()
    for _, log in ipairs { "line", "json" } do
      local run = folder .. "/" .. log
      local result = helper.shell(("{ %s; echo code $? >&2; } | head -1"):format(
        job(run, "50", "0.01", ("log = %q"):format(log))))
      assert.matches("code 5", result.err, 1, true)
      assert.matches("cannot write to stdout (Broken pipe); the run continues without this output",
        result.err, 1, true)
      assert.matches("script ends\n5", result.err, 1, true)
      assert.matches("finished", events(run), 1, true)
      assert.is_truthy(engine.checkpoint.latest(run .. "/checkpoints"))
    end
  end)

  it("may go to a full disk, or be closed", function()
    for target, why in pairs { [">/dev/full"] = "No space left on device",
      [">&-"] = "Bad file descriptor" } do
      local result = helper.shell(job(folder .. "/r", "3", "0", "history = false") .. " " .. target)
      assert.equal(5, result.code)
      assert.matches("cannot write to stdout (" .. why .. ")", result.err, 1, true)
    end
  end)

  it("of a script and of commands is not lost in silence", function()
    local function status(words)
      local result = helper.shell(quote(helper.engine) .. " " .. words)
      return result.code, result.err
    end
    local code, err = status "-e 'print(1)' >/dev/full"
    assert.equal(5, code)
    assert.matches("engine: stdout: output is lost: No space left on device", err, 1, true)
    assert.equal(5, (status "runs /tmp >/dev/full"))
    assert.equal(5, (status "help >/dev/full"))
    assert.equal(5, (status "-e 'print(1) os.exit(0)' >/dev/full"))
    assert.equal(1, (status "-e 'print(1) error()' >/dev/full"))
    assert.equal(0, (status "-e 'local a = 1' >&-"))
  end)
end)

it("a picture that gnuplot does not draw is an error, also where an old picture exists",
  function()
  helper.shell(job(folder .. "/r", "300", "0"))
  helper.write(folder .. "/gnuplot", "#!/bin/sh\necho no fonts >&2; exit 1\n")
  helper.write(folder .. "/a.png", "old")
  local result = helper.shell(("chmod +x %s/gnuplot; PATH=%s:$PATH %s plot %s/r --columns %s " ..
    "--png %s/a.png"):format(folder, folder, quote(helper.engine), folder,
    ("loss,scale,norm,amax,"):rep(20) .. "lr", folder))
  assert.equal(1, result.code, result.err)
  assert.matches("gnuplot did not write .*a.png: no fonts", result.err)
end)

describe("results that cannot be written", function()
  -- The output of a command, then "code N". The output goes through a pipe, because the limit on
  -- the size of files would also apply to a file that holds it.
  local function piped(command)
    return helper.shell(("{ %s; echo code $?; } 2>&1 | cat"):format(command)).out
  end

  -- on_step of a job: limits the size of files from the third step on.
  local LIMIT = [[on_step = function(t)
    local ffi = require "ffi"
    if t.steps_done == 3 then
      ffi.cdef "int setrlimit(int resource, const uint64_t *limit);"
      ffi.C.setrlimit(1, ffi.new("uint64_t[2]", %s, 0xffffffffffffffffULL))
    end
  end, ]]

  it("to a history and checkpoints are reported whatever `log` says, and the status is 5",
    function()
    local text = piped(job(folder .. "/r", "300", "0", LIMIT:format("100") ..
      "log = 'quiet', stats_every = 1"))
    assert.matches("code 5", text, 1, true)
    assert.matches("history [^\n]* rows are lost: ", text)
    assert.matches("no checkpoint was written: [^\n]*File too large", text)
    assert.matches("script ends", text, 1, true)
  end)

  it("for a while are not lost", function()
    local text = piped(job(folder .. "/r", "300", "0", [[checkpoint_every = 100,
      log = "quiet", on_step = function(t)
      local ffi = require "ffi"
      local small = t.steps_done >= 50 and t.steps_done <= 110
      ffi.cdef "int setrlimit(int resource, const uint64_t *limit);"
      ffi.C.setrlimit(1, ffi.new("uint64_t[2]", small and 100 or 0xffffffffffffffffULL,
        0xffffffffffffffffULL))
    end]]))
    assert.matches("code 0", text, 1, true)
    assert.matches("no checkpoint was written", text, 1, true)
    assert.equal(300, #engine.history.open(folder .. "/r/history.db"):steps())
  end)

  it("because the run's directory was removed are reported", function()
    local result = helper.shell(job(folder .. "/r", "10", "0", ([[on_step = function(t)
      if t.steps_done == 5 then os.execute("rm -rf %s") end end]]):format(folder .. "/r")))
    assert.equal(5, result.code)
    assert.matches("removed or replaced", result.err, 1, true)
    assert.matches("lost: rows of the history", result.out, 1, true)
  end)

  it("as TensorBoard events are reported", function()
    local text = piped(job(folder .. "/r", "300", "0", LIMIT:format("4096") ..
      "history = false, checkpoint_every = 0, tensorboard = true"))
    assert.matches("code 5", text, 1, true)
    assert.matches("tensorboard: cannot write", text, 1, true)
  end)
end)

describe("the status of a run", function()
  local function status(options)
    local result = helper.shell(job(folder .. "/r", "30", "0", options))
    assert.matches("script ends", result.err, 1, true)
    return result.code
  end

  local function policy(body)
    return ([[policy = { file = "p.lua", source = "return { " ..
      "init = function() return { scale = 1 } end, " ..
      "decide = function(s, r) %s return 1 end }" }, precision = "fp16"]]):format(body)
  end

  it("is 0 when it has finished", function() assert.equal(0, status "log = 'quiet'") end)

  it("is 2 when the policy stops it, 3 when the policy fails", function()
    assert.equal(2, status(policy "if r.step == 4 then return { scale = 1, action = 'stop' } end"))
    local fails = policy "if r.step == 4 then x.y = 1 end"
    assert.equal(3, status("on_policy_error = 'stop', " .. fails))
    assert.equal(0, status(fails))
  end)

  it("is not 0 when a quiet run fails, and stderr has the reason", function()
    for code, case in pairs {
      [1] = { "loss = function() error('no loss') end", "no loss" },
      [2] = { policy "if true then return { scale = 1, action = 'stop', reason = 'enough' } end",
        "reason: enough" },
      [3] = { policy "if true then x.y = 1 end",
        "the policy failed in each of its first 20 steps" },
      [4] = { "loss = function(m, b) return m(b.x):sum() * (0 / 0) end",
        "lost: the loss has been nan" },
    } do
      local result = helper.shell(job(folder .. "/quiet" .. code, "30", "0", "log = 'quiet', " ..
        case[1]))
      assert.equal(code, result.code)
      assert.equal("", result.out)
      assert.matches(case[2], result.err, 1, true)
    end
  end)

  it("is 4 when the loss is inf or nan at the end", function()
    assert.equal(4, status "loss = function(m, b) return m(b.x):sum() * (0 / 0) end")
  end)

  -- NAN_FROM_12 makes the loss nan from step 12 on; such steps leave the weights alone. WEIGHTS
  -- makes weights infinite by a huge rate, and an infinite weight makes the loss nan.
  local NAN_FROM_12 = "loss = function(m, b) lost_n = (lost_n or 0) + 1 " ..
    "return m(b.x):sum() * (lost_n > 12 and 0 / 0 or 1) end, checkpoint_every = 5"
  local WEIGHTS = "schedule = function(u) return u == 11 and 1e39 or 1e-3 end, " ..
    "checkpoint_every = 5"

  it("is 4 when it is lost; the history names the last good checkpoint", function()
    local run = folder .. "/r"
    assert.equal(4, status(NAN_FROM_12))
    local h = engine.history.open(run)
    assert.equal(22, h:totals().rows)
    local lost = h:events("lost")[1]
    assert.equal(21, lost.step)
    assert.matches("the loss has been nan for 10 steps.*; the last good checkpoint: " .. run ..
      "/checkpoints/step%-0*20$", lost.text)
    h:close()
    local listed = helper.run { "runs", folder }
    assert.matches("stopped: lost: the loss has been nan", listed.out, 1, true)
  end)

  it("is 4 when weights are not finite, and no checkpoint holds such weights", function()
    local run = folder .. "/r"
    assert.equal(4, status(WEIGHTS))
    local h = engine.history.open(run)
    assert.equal(15, h:totals().rows)
    assert.matches("the weights hold %d+ inf and %d+ nan, the first in weight; the last good " ..
      "checkpoint: " .. run .. "/checkpoints/step%-0*10$", h:events("lost")[1].text)
    h:close()
    assert.same({ "10", "5" }, (function()
      local names = {}
      for name in helper.shell("ls -r " .. run .. "/checkpoints").out:gmatch("%d+") do
        names[#names + 1] = tostring(tonumber(name))
      end
      return names
    end)())
  end)

  it("of a lost run that goes on is 4 as well", function()
    assert.equal(4, status(NAN_FROM_12 .. ", on_lost = 'continue'"))
    local h = engine.history.open(folder .. "/r")
    assert.equal(30, h:totals().rows)
    assert.equal(1, #h:events("lost"))
    h:close()
  end)

  it("of several runs is the status of the most serious ending", function()
    local result = helper.shell(job(folder .. "/r", "3", "0",
      policy "if true then return { scale = 1, action = 'stop' } end",
      "local s = loadstring(io.open(arg[0]):read '*a') arg[4], arg[5] = nil, nil s()"))
    assert.equal(2, result.code, result.err)
  end)
end)

describe("a run that has not begun", function()
  local function files_after(code)
    helper.write(folder .. "/s.lua", [[
      local engine = require "engine"
      local net = engine.nn.linear(2, 1)
      local function made(run, resume)
        return engine.trainer { model = net, data = { next = function() return {} end }, steps = 1,
          loss = function() error "no loss" end, optimizer = engine.optim.sgd(net), run = run,
          resume = resume, log = "quiet" }
      end ]] .. code)
    local result = helper.shell(("cd %s && %s s.lua; rm s.lua; find . | sort"):format(quote(folder),
      quote(helper.engine)))
    return result.out:gsub("%s+", " "), result.err
  end

  it("leaves nothing that it created, whatever ends the script", function()
    assert.equal(". ", (files_after "made 'a' made 'q/r' error 'boom'"))
    assert.equal(". ", (files_after "made 'a' made 'a'"))
    assert.equal(". ", (files_after "made 'a' collectgarbage() collectgarbage() made 'a'"))
    assert.equal(". ", (files_after "made 'q/r' collectgarbage() collectgarbage()"))
    local left, err = files_after "made('q/r', 'other')"
    assert.equal(". ", left)
    assert.matches("there is no run or checkpoint runs/other", err, 1, true)
  end)

  it("leaves other files alone, and one that failed in its first step is recorded", function()
    helper.shell("mkdir -p " .. quote(folder .. "/runs/kept"))
    assert.equal(". ./runs ./runs/kept ./runs/kept/checkpoints ./runs/kept/history.db " ..
      "./runs/kept/lock ", (files_after "made 'kept' error 'boom'"))
    helper.remove(folder .. "/runs/kept")
    assert.equal(". ./runs ./runs/b ./runs/b/notes ",
      (files_after "made 'b' io.open('runs/b/notes', 'w'):close()"))
    helper.remove(folder .. "/runs/b")
    assert.equal(". ./runs ./runs/c ./runs/c/checkpoints ./runs/c/history.db ./runs/c/lock ",
      (files_after "made('c'):run()"))
  end)
end)
