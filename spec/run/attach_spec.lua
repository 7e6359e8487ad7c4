-- engine attach: a real run in the background, with real clients. Every wait is bounded, and the
-- spec ends only processes that it started.
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"

local C, ffi = M_ffi.C, M_ffi.ffi
local quote = helper.quote

local folder, started
before_each(function() folder, started = helper.folder(), {} end)
after_each(function()
  for _, pid in ipairs(started) do helper.shell("kill -9 " .. pid .. " 2>/dev/null") end
  helper.remove(folder)
end)

local function sleep(seconds) helper.shell("sleep " .. seconds) end

-- Waits until f() is true.
local function wait_for(what, f)
  for _ = 1, 400 do
    local result = f()
    if result then return result end
    sleep(0.025)
  end
  error("waited too long for " .. what)
end

local JOB = [[
local engine = require "engine"
engine.seed(1)
local model = engine.nn.linear(4, 1)
local data = { next = function() return { x = engine.ones(2, 4), y = engine.ones(2, 1) } end }
local trainer = engine.trainer { model = model, data = data,
  loss = function(m, b) return engine.mse(m(b.x), b.y) end,
  optimizer = engine.optim.sgd(model, { lr = 1e-3 }), policy = "dynamic:growth_interval=1e9",
    steps = tonumber(arg[2]), run = arg[1], log = "quiet", keep = 1,
  resume = arg[3], restart_data = true }
local summary = trainer:run()
print(summary.stopped, summary.steps)
]]

-- A job like JOB with a linear layer in FP4, whose policy is the file arg[3].
local FP4_JOB = [[
local engine = require "engine"
engine.seed(1)
local model = engine.nn.linear(32, 32)
local data = { next = function() return { x = engine.ones(16, 32), y = engine.ones(16, 32) } end }
local summary = engine.trainer { model = model, data = data,
  loss = function(m, b) return engine.mse(m(b.x):to("f32"), b.y) end,
  optimizer = engine.optim.sgd(model, { lr = 1e-9, precision = { name = "four", base = "nvfp4",
    fp8 = { sample = 1, policy = arg[3] } } }),
  steps = tonumber(arg[2]), run = arg[1], log = "quiet", restart_data = true }:run()
print(summary.stopped, summary.steps)
]]

-- A client that sends raw text; receive() returns one line of the reply, or nil after a timeout.
local function raw(run)
  local out = ffi.new("eng_attach_link *[1]")
  M_ffi.check(C.eng_attach_connect(out, run .. "/attach.sock"))
  local link = ffi.gc(out[0], C.eng_attach_leave)
  local line, length = ffi.new("const char *[1]"), ffi.new("int64_t[1]")
  return {
    send = function(text) return C.eng_attach_send(link, text, #text) == 0 end,
    receive = function(seconds)
      if C.eng_attach_receive(line, length, link, seconds or 5) == 0 then
        return ffi.string(line[0], length[0])
      end
    end,
    leave = function() C.eng_attach_leave(ffi.gc(link, nil)) end,
  }
end

-- Starts a run in the background and waits until its socket is open. Returns the process number.
-- `more`: a third argument of the script.
local function start(run, steps, more, text)
  local script = helper.write(folder .. "/job.lua", text or JOB)
  local pipe = io.popen(("%s %s %s %s %s >%s 2>&1 </dev/null & echo $!"):format(
    quote(helper.engine), quote(script), quote(run), steps or "1e9", more or "",
    quote(folder .. "/out")))
  local pid = pipe:read("*n")
  pipe:close()
  started[#started + 1] = pid
  wait_for("the socket", function()
    local open, client = pcall(raw, run)
    if open then client.leave() end
    return open
  end)
  return pid
end

-- Whether a process runs: one that ended but has not been waited for has an empty command line.
local function alive(pid) return (helper.read("/proc/" .. pid .. "/cmdline") or "") ~= "" end
local function ended(pid)
  wait_for("the run's end", function() return not alive(pid) end) return helper.read(folder ..
    "/out")
end

local function attach(run, ...)
  local words = { "attach", run }
  for _, code in ipairs { ... } do
    words[#words + 1] = "-e"
    words[#words + 1] = code
  end
  return helper.run(words)
end

local function events(run, kind) return helper.history(run, "events", kind) end

-- The run's status, requested by this process.
local function status(run)
  local client = raw(run)
  client.send('{"do":"status"}\n')
  local reply = require("cjson").decode(client.receive())
  client.leave()
  return reply.status
end

local function stop(run)
  local client = raw(run)
  client.send('{"do":"stop"}\n')
  client.receive()
  client.leave()
end

local function wait_for_step(run, step)
  wait_for("step " .. step, function() return status(run).step > step end)
end

describe("engine attach", function()
  it("shows the progress of a job, changes the job, swaps its policy, and ends it", function()
    local run = folder .. "/run"
    local pid = start(run)
    helper.write(folder .. "/mine.lua",
      "return { name = 'mine', options = { init_scale = 8 }, decide = function(s) return " ..
      "s.scale end }")
    local result = attach(run, "print(run)", 'run:set("lr", 1e-4)',
      ('policy:swap(%q)'):format(folder .. "/mine.lua"), "policy:undo()")
    assert.equal(0, result.code, result.err)
    assert.matches("%d+ of 1000000000 steps made, %d+ updates, 0 skipped, loss .*policy dynamic",
      result.out)
    assert.matches("lr 0.001 %-> 0.0001 %(by an attached client%)", result.out)
    assert.matches("the policy is mine now, loss scale 2^16", result.out, 1, true)
    assert.matches("the policy is dynamic again", result.out)
    assert.matches("the run ends now", attach(run, 'run:stop("enough")').out)
    assert.matches("\nenough\t%d+\n$", ended(pid))
    assert.equal(1, #events(run, "set"))
    assert.equal(2, #events(run, "swap"))
    assert.matches("attached", events(run, "swap")[1].text)
    assert.matches("enough", events(run, "stopped")[1].text)
    assert.equal(0, C.eng_file_kind(run .. "/attach.sock"))
  end)

  it("swaps the policy of FP8 layers, also when its file is saved and on SIGHUP", function()
    local run, text = folder .. "/run", helper.read "policies/layer_ladder.lua"
    local path = helper.write(folder .. "/mine.lua", text)
    local pid = start(run, nil, path, FP4_JOB)
    local result = attach(run, "policy:show()", ('policy:swap(%q)'):format(path .. ":pause=7"),
      'policy:swap("sqrt3:ratio=1e9")', "policy:undo()", 'policy:swap("layer_lader")')
    assert.matches("policy static %x+, loss scale 1\n.-policy of FP8 layers layer_ladder %x+\n" ..
      "options .*pause=200 .*\nstate {", result.out)
    assert.matches("loss scale 1; policies of FP8 layers: sqrt3\n.*policy of FP8 layers is " ..
      "layer_ladder %x+ %(pause=7%) again\n",
      result.out)
    assert.matches("did you mean 'layer_ladder'?", result.err, 1, true)
    -- waits until the last event matches: before it, the run may refuse a half-written file
    local function wait_for_event(kind, match)
      wait_for(kind .. match, function()
        local list = events(run, kind)
        return #list > 0 and (list[#list].text .. list[#list].data):find(match)
      end)
    end
    helper.write(path, "-- saved\n" .. text)
    wait_for_event("fp8_swap", "its file was saved")
    helper.write(path, "return {")
    wait_for_event("swap_refused",
      "^the policy layer_ladder stays; the new policy is not used: .*mine.lua:1.*its file was " ..
      "saved")
    helper.shell("kill -HUP " .. pid)
    wait_for_event("swap_refused",
      "^the policy layer_ladder stays; the new policy is not used: .*mine.lua:1.*SIGHUP")
    stop(run)
    ended(pid)
  end)

  it("pauses and steps; a pause ends when its client leaves, except with stay = true", function()
    local run = folder .. "/run"
    local pid = start(run)
    local result = attach(run, "run:pause()", "a = run:status().step", "run:step(5)",
      "b = run:status()", "print(b.step - a, b.paused, b.step - history:last(1)[1].step)")
    assert.matches("5\ttrue\t1\n$", result.out)
    assert.is_true(alive(pid))
    wait_for_step(run, status(run).step)
    attach(run, "run:pause { stay = true }")
    local one = status(run)
    assert.is_true(one.paused)
    sleep(0.1)
    assert.equal(one.step, status(run).step)
    stop(run)
    ended(pid)
  end)

  it("names the missing history of a run that has ended, and what remains", function()
    local run = folder .. "/run"
    local pid = start(run)
    stop(run)
    ended(pid)
    assert.equal(0, C.eng_file_remove(run .. "/history.db"))
    local result = attach(run, "print(history)")
    assert.equal(("engine attach: there is no run %s; there is no file %s/history.db: it was " ..
      "deleted, or the run had the option history = false; hint: resume=auto continues the run " ..
      "from its last checkpoint, with a new history\n"):format(run, run), result.err)
    helper.shell(("rm -r %s/checkpoints/*"):format(run))
    assert.matches("; hint: start the run again\n$", attach(run, "print(history)").err)
  end)

  it("names the missing history of a live run, whose other requests still work", function()
    local run = folder .. "/run"
    local pid = start(run)
    assert.equal(0, C.eng_file_remove(run .. "/history.db"))
    for _, code in ipairs { "history:why(3)", "print(history:last(1))" } do
      local result = attach(run, "run:pause()", code)
      assert.matches("paused by an attached client", result.out, 1, true)
      assert.matches(("history: there is no file %s/history.db: it was deleted"):format(run),
        result.err, 1, true)
    end
    assert.matches("history: there is no file", attach(run, "print(history)").out, 1, true)
    stop(run)
    ended(pid)
  end)

  it("keeps a pause when a second client steps and leaves", function()
    local run = folder .. "/run"
    local pid = start(run)
    attach(run, "run:pause { stay = true }")
    local before = status(run).step
    assert.matches("paused before step " .. before + 3, attach(run, "run:step(3)").out, 1, true)
    sleep(0.3)
    local after = status(run)
    assert.same({ before + 3, true }, { after.step, after.paused })
    attach(run, "run:resume()")
    local first = raw(run)                    -- its pause ends with it, not with the second client
    first.send('{"do":"pause"}\n')
    assert.matches("paused by an attached client", first.receive(), 1, true)
    attach(run, "run:step(2)")
    sleep(0.3)
    assert.is_true(status(run).paused)
    first.leave()
    wait_for("the end of the pause", function() return not status(run).paused end)
    stop(run)
    ended(pid)
  end)

  it("on several ranks keeps a pause whose holder leaves while another client asks for it",
    function()
      local ranks, run, open, first = require "spec.dist.start", folder .. "/run", nil, nil
      if not ranks.there then return pending("there is no mpirun here, or no MPI in this build") end
      -- not among `started`: the command has a time limit, which ends its ranks, too
      helper.shell(("%s >%s 2>&1 </dev/null &"):format(ranks.command(2,
        helper.write(folder .. "/job.lua", JOB), { run, "1e9" }), quote(folder .. "/out")))
      wait_for("the socket", function()
        open, first = pcall(raw, run)
        return open
      end)
      local second = raw(run)
      first.send('{"do":"pause"}\n')
      assert.matches("paused by an attached client", first.receive(), 1, true)
      local pid = require("engine.run.runs").holder(run)
      helper.shell("kill -STOP " .. pid)                     -- so that it sees both at once
      second.send('{"do":"pause"}\n')
      first.leave()
      helper.shell("kill -CONT " .. pid)
      assert.matches('"ok":true', second.receive(), 1, true)
      sleep(0.5)
      local paused = status(run).paused
      stop(run)
      second.leave()
      assert.is_true(paused)
      wait_for("the run's end", function()
        return (helper.read(folder .. "/out") or ""):find("requested by an attached client")
      end)
    end)

  it("answers a client whose steps another client interrupts", function()
    local run = folder .. "/run"
    local pid = start(run)
    local first = raw(run)
    first.send('{"do":"step","n":1000000000}\n')
    wait_for_step(run, status(run).step)
    attach(run, "run:step(1)")
    assert.matches("step: a later request for steps replaced this one before step %d",
      first.receive())
    first.send('{"do":"step","n":1000000000,"id":1}\n{"do":"step","n":1000000000,"id":2}\n')
    assert.matches('a later request for steps .*"id":1', first.receive())
    attach(run, "run:pause()")
    assert.matches('step: a later request paused the run before step %d.*"id":2', first.receive())
    first.leave()
    stop(run)
    ended(pid)
  end)

  it("reports an invalid request and changes nothing", function()
    local run = folder .. "/run"
    local pid = start(run)
    local function refused(code, text)
      local result = attach(run, code)
      assert.equal(1, result.code)
      assert.matches(text, result.err, 1, true)
    end
    refused('run:set("lrr", 1)', "set: expected the name of a setting, got 'lrr'; did you mean " ..
      "'lr'?")
    refused('run:set("lr", -1)',
      "lr: expected a positive number up to 3.4e38, or 'schedule', got -1")
    refused('run:set("lr", 1e300)', "got 1e+300")
    refused('run:set("lr", "schedule")', "lr: this run has no schedule; expected a " ..
      "positive number, got 'schedule'")
    refused('run:set("lr", 0/0)', "lr: expected a positive number")
    refused('run:step(0)', "step: expected a whole number of steps, 1 or more, got 0")
    refused('policy.swap("dynamic")', "expected a call with a colon: policy:swap(...)")
    refused('policy:swap("dynamc")', "there is no policy 'dynamc'; did you mean 'dynamic'?")
    refused('policy:undo()', "no swap to undo")
    helper.write(folder .. "/bad.lua",
      "return {\n decide = function() return 0 / 0 end, options = { init_scale = 1 } }")
    wait_for_step(run, 1)
    refused(('policy:swap(%q)'):format(folder .. "/bad.lua"),
      "bad.lua:2: decide returned scale = nan")
    assert.equal("dynamic", status(run).policy)
    stop(run)
    ended(pid)
  end)

  it("reports that it waits for a stopped run, and on a signal gives up with one line", function()
    local run = folder .. "/run"
    local pid = start(run)
    local script = helper.write(folder .. "/wait.sh", ([[
      kill -STOP %d
      %s attach %s -e 'print(run)' >"$0.out" 2>&1 </dev/null & client=$!
      for i in $(seq 300); do grep -q "no answer" "$0.out" && break; sleep 0.05; done
      kill -TERM $client
      wait $client; echo "code $?"
      kill -CONT %d]]):format(pid, quote(helper.engine), quote(run), pid))
    local result = helper.shell("bash " .. quote(script))
    assert.matches("code 143", result.out, 1, true)
    local lines = helper.read(script .. ".out")
    assert.matches(("^no answer from the run for 5 s: process %d is stopped; kill %%-CONT %d " ..
      "continues it.*Ctrl%%-C gives up[^\n]*"):format(pid, pid) ..
      "\nstopped waiting: the run has not answered yet; [^\n]*\n$", lines)
    assert.matches("policy dynamic", attach(run, "print(run)").out)
    stop(run)
    ended(pid)
  end)

  it("serves all lines of a client that has sent them and left", function()
    local path, server = folder .. "/s", ffi.new("eng_attach *[1]")
    M_ffi.check(C.eng_attach_open(server, path))
    local line, length = ffi.new("const char *[1]"), ffi.new("int64_t[1]")
    local number = ffi.new("int[1]")
    local function send(text)
      local out = ffi.new("eng_attach_link *[1]")
      M_ffi.check(C.eng_attach_connect(out, path))
      M_ffi.check(C.eng_attach_send(out[0], text, #text))
      return out[0]
    end
    local function serve()
      for _ = 1, 4 do
        if C.eng_attach_poll(line, length, number, server[0], 10) then
          C.eng_attach_answer(server[0], number[0], "done", 4)
          return ffi.string(line[0], length[0])
        end
      end
    end
    local first = send("1\n2\n")
    C.eng_attach_leave(first)
    local second = send("3\n4\n")
    local served = {}
    for i = 1, 4 do served[i] = serve() end
    C.eng_attach_leave(second)           -- without reading the answers
    table.sort(served)
    assert.same({ "1", "2", "3", "4" }, served)
    assert.is_nil(serve())
    assert.equal(0, C.eng_attach_count(server[0]))

    local third = send("5\n")
    assert.equal("5", serve())
    M_ffi.check(C.eng_attach_send(third, "6\n", 2))
    C.eng_attach_leave(third)            -- with an answer that it has not read
    assert.equal("6", serve())
    local many = send((("x"):rep(999) .. "\n"):rep(60))
    C.eng_attach_leave(many)
    for _ = 1, 60 do assert.equal(999, #serve()) end
    assert.is_nil(serve())
    C.eng_attach_close(server[0])
  end)

  it("on an interrupt, gives up a request that the run does not read", function()
    local path, server = folder .. "/s", ffi.new("eng_attach *[1]")
    M_ffi.check(C.eng_attach_open(server, path))
    local out = ffi.new("eng_attach_link *[1]")
    M_ffi.check(C.eng_attach_connect(out, path))
    C.eng_interrupt(2)
    local code = C.eng_attach_send(out[0], ("x"):rep(2 ^ 24), 2 ^ 24)
    C.eng_interrupt(0)
    assert.equal(C.ENG_ERR_INTERRUPTED, code)
    C.eng_attach_leave(out[0])
    C.eng_attach_close(server[0])
  end)

  it("opens a finished run for reading and reports that it has finished", function()
    local run = folder .. "/run"
    assert.equal(0, helper.run({ helper.write(folder .. "/job.lua", JOB), run, "20" }).code)
    local result = attach(run, "print(run)", "print(#history:steps())", 'run:set("lr", 1)')
    local why = ("%s has ended: its history can be read (engine attach %s -e 'print(history)'), " ..
      "but nothing can be changed"):format(run, run)
    assert.matches(why, result.out, 1, true)
    assert.matches("20\n", result.out)
    assert.equal(1, result.code)
    assert.matches(why, result.err, 1, true)
    assert.matches("there is no run " .. folder .. "/nothing",
      attach(folder .. "/nothing", "1").err, 1, true)
    assert.matches("there is no run runs/nothing", attach("nothing", "1").err, 1, true)
    local piped = helper.run({ "attach", run }, "print(#history:steps())\n")
    assert.matches("has ended.*\n> 20\n", piped.out)
  end)

  it("sets a scale in lagged mode that the step in flight does not change", function()
    local run = folder .. "/run"
    local halve = helper.write(folder .. "/halve.lua", [[return { name = "halve", options = {},
      init = function() return { scale = 2 ^ 10 } end,
      decide = function(state)
        state.scale = math.max(1, state.scale / 2)
        return state.scale
      end }]])
    local pid = start(run, "1e9", nil, (JOB:gsub('"dynamic[^"]*"', '"' .. halve ..
      '", mode = "lagged"')))
    wait_for_step(run, 20)
    local result = attach(run, 'run:set("scale", 2 ^ 15)')
    assert.matches("scale 1 -> 2^15 (by an attached client)", result.out, 1, true)
    stop(run)
    ended(pid)
    -- the verdict on the first of these steps comes after the second has begun
    assert.equal(2, helper.history(run, "query",
      "SELECT count(*) AS n FROM steps WHERE scale = 32768")[1].n)
  end)

  it("keeps manual settings over a resume", function()
    local run = folder .. "/run"
    local pid = start(run)
    attach(run, 'run:set("lr", 0.125)', 'run:set("clip", 1 / 3)', "run:stop()")
    ended(pid)
    assert.matches("clip no limit -> 0.3333333333 (by an attached client)",
      events(run, "set")[2].text, 1, true)
    assert.equal("requested by an attached client", events(run, "stopped")[1].text)
    local steps = helper.history(run, "last", 1)[1].step + 1
    local again = start(run, "1e9", "auto")
    wait_for_step(run, steps)
    assert.equal(0.125, status(run).lr)
    stop(run)
    ended(again)
  end)
end)

describe("the socket", function()
  it("is private to its owner, and accepts names of any length", function()
    local run = folder .. "/" .. ("long"):rep(20) .. "/" .. ("name"):rep(20)
    local pid = start(run)
    assert.matches("^srw%-%-%-%-%-%-%-", helper.shell("ls -l " .. quote(run .. "/attach.sock")).out)
    assert.matches("policy dynamic", attach(run, "print(run)").out)
    stop(run)
    ended(pid)
  end)

  it("serves several clients at once, and none of them blocks the run or the others", function()
    local run = folder .. "/run"
    local pid = start(run)
    local silent, half, deaf, endless, nine = raw(run), raw(run), raw(run), raw(run), {}
    half.send('{"do":"sta')
    for _ = 1, 3000 do deaf.send('{"do":"status"}\n') end      -- and never reads
    for _ = 1, 20 do endless.send(("x"):rep(4096)) end
    local first, second = raw(run), raw(run)
    first.send('{"do":"status","id":1}\n')
    second.send('{"do":"status","id":2}\n')
    assert.matches('"id":2', second.receive())
    assert.matches('"id":1', first.receive())
    assert.matches("the line is too long", endless.receive())
    assert.is_nil(endless.receive(0.2))
    half.send('tus","id":3}\n')
    assert.matches('"ok":true', half.receive())
    for i = 1, 9 do nine[i] = raw(run) end                      -- more than the limit
    second.send('{"do":"status"}\nnonsense\n{"do":"fly"}\n[]\n')
    assert.matches('"ok":true', second.receive())
    assert.matches("expected a JSON object", second.receive())
    assert.matches("do: expected a command, got 'fly'", second.receive())
    assert.matches("do: expected a command, got nothing", second.receive())
    second.send('{"do":null}\n')
    assert.matches("}': null has no counterpart in Lua", second.receive(), 1, true)
    -- the reply leaves out an id that is neither a string nor a number
    second.send('{"do":"status","id":null}\n{"do":"status","id":{"$pairs":[[[1],2]]}}\n')
    for _ = 1, 2 do assert.matches('"ok":', second.receive()) end
    for _, client in ipairs(nine) do client.leave() end
    silent.leave()
    wait_for_step(run, status(run).step)
    stop(run)
    ended(pid)
  end)

  it("left by a killed run is removed by the next, and the history is complete", function()
    local run = folder .. "/run"
    local pid = start(run)
    local client = raw(run)
    client.send('{"do":"status"}\n')
    assert.is_truthy(client.receive())
    attach(run, "run:checkpoint()")
    wait_for("rows in the history", function()  -- committed every quarter of a second
      return helper.run({ "-e", ("print(#require('engine').history.open('%s'):last(5))"):format(
        run) }).out:match("^5")
    end)
    helper.shell("kill -9 " .. pid)
    wait_for("its end", function() return not alive(pid) end)
    assert.is_nil(client.receive(1))
    local result = attach(run, "print(run)", "print(#history:last(5))",
      "print(history:query('pragma integrity_check')[1].integrity_check)")
    assert.matches("has ended", result.out)
    assert.matches("5\nok\n$", result.out)
    local again = start(run, "1e9", "auto")
    assert.equal("dynamic", status(run).policy)
    stop(run)
    ended(again)
  end)

  it("that cannot be created does not stop the run", function()
    helper.shell("mkdir -p " .. quote(folder .. "/run/attach.sock/x"))
    local script = helper.write(folder .. "/job.lua", JOB:gsub('log = "quiet"', 'log = "line"'))
    local result = helper.run { script, folder .. "/run", "3" }
    assert.equal(0, result.code)
    assert.matches("engine attach cannot reach this run: .*attach.sock: expected a socket, "
      .. "found another kind of file",
      result.out)
  end)
end)
