-- engine watch: a run that begins, goes on and ends while it is watched, on a terminal and in a
-- pipe; and the REPL's functions for runs.
local helper = require "spec.helper"
local quote, shell = helper.quote, helper.shell

-- Each step from `hold` on waits for the file `go`.
local SCRIPT = [[
  local engine = require "engine"
  local cfg = engine.config { run = "", steps = 40, hold = 20 }
  engine.seed(1)
  local model = engine.nn.linear(4, 2)
  local x, y, made = engine.randn(8, 4):keep(), engine.randint(0, 2, 8):keep(), 0
  local function next_batch()
    made = made + 1
    while made > cfg.hold and not io.open("go") do os.execute("sleep 0.05") end
    return { x = x, y = y, tokens = 8 }
  end
  engine.trainer {
    model = model, data = { next = next_batch },
    loss = function(m, b) return engine.cross_entropy(m(b.x), b.y) end,
    optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = "fp16" }),
    policy = "dynamic:init_scale=2^30", steps = cfg.steps, run = cfg.run, config = cfg,
    log = "quiet",
  }:run()
]]

describe("engine watch", function()
  local folder, engine
  setup(function()
    folder = helper.folder()
    engine = quote(helper.engine:sub(1, 1) == "/" and helper.engine
      or shell("pwd").out:match("[^\n]+") .. "/" .. helper.engine)
    helper.write(folder .. "/train.lua", SCRIPT)
  end)
  teardown(function() helper.remove(folder) end)
  local function inside(text, ...)
    return shell("cd " .. quote(folder) .. "\n" .. (text:gsub("ENGINE", engine)):format(...))
  end

  -- Waits up to 30 seconds for `text` in a file, in the shell.
  local AWAIT = [[
    await() { for i in $(seq 300); do grep -q "$2" $1 2>/dev/null && return; sleep 0.1; done; }
  ]]

  it("waits for a run, follows it line by line in a pipe, and ends with it", function()
    local result = inside(AWAIT .. [[
      (ENGINE watch a --every 0.1 >lines 2>notes; echo $? >status) &
      await notes waiting
      ENGINE train.lua run=a &
      await lines '(20/40)'
      touch go
      wait
      cat status notes]])
    assert.equal("0\nengine watch: there is no run 'a'; hint: `engine runs` lists them; waiting " ..
      "for the run to begin; Ctrl-C ends the wait\n", result.out)
    local lines = helper.read(folder .. "/lines")
    assert.matches("a: running, 50 %%  step 19 %(20/40%)  loss %d%.%d+  scale %S+  skipped %d+",
      lines)
    assert.matches("a: finished  step 39 %(40/40%)  loss [^\n]+\n$", lines)
    assert.not_matches("\27", lines, 1, true)
    assert.matches("^a: finished  step 39 %(40/40%)[^\n]+\n$", inside("ENGINE watch a").out)
  end)

  it("draws over itself on a terminal: progress, curves, the last events", function()
    if shell("command -v script").code ~= 0 then return pending("needs script(1)") end
    local result = inside(AWAIT .. [[
      rm -f go
      ENGINE train.lua run=b &
      await runs/b/lock .
      (TERM=xterm timeout 60 script -qefc "ENGINE watch b --every 0.1" screen >/dev/null
       echo $? >status) </dev/null &
      await screen '(20/40)'
      sleep 0.5
      touch go
      wait
      cat status]])
    assert.equal("0\n", result.out)
    local screen = helper.read(folder .. "/screen")
    assert.equal(1, select(2, screen:gsub("\27%[2J", "")))      -- cleared once
    local frames = select(2, screen:gsub("\27%[H", ""))
    assert.is_true(frames > 2)
    local last = screen:match(".*\27%[H(.*)")
    assert.matches("^b: finished  step 39 %(40/40%)", last)
    for _, piece in ipairs { "\nloss scale   ", "overflow (" } do
      assert.matches(piece, last, 1, true)
    end
    assert.matches("step %d+  overflow  %d+ inf", last)
    assert.matches("after 40 steps  finished", last, 1, true)
  end)

  it("waits for a history that is being made", function()
    local result = inside(AWAIT .. [[
      mkdir -p runs/new
      : >runs/new/history.db
      sleep 60 & pid=$!
      echo $pid >runs/new/lock
      ENGINE watch new --every 0.1 >lines & watch=$!
      sleep 0.5
      cp runs/a/history.db* runs/new
      wait $watch; echo $?
      : >runs/new/history.db; rm -f runs/new/history.db-*
      kill $pid; wait $pid
      ENGINE watch new; echo $?
      rm -r runs/new]])
    assert.equal("0\n1\n", result.out)
    assert.matches("^new: finished  step 39 %(40/40%)", helper.read(folder .. "/lines"))
    assert.matches("engine watch: .*runs/new/history.db", result.err)
  end)

  it("ends with status 130 on Ctrl-C, and with 1 on a wrong column", function()
    local result = inside [[
      ENGINE watch a --columns los; echo $?
      ENGINE watch a --every 0; echo $?
      ENGINE watch; echo $?]]
    assert.equal("1\n1\n1\n", result.out)
    assert.matches("the history has no column 'los'; did you mean 'loss'?", result.err, 1,
      true)
    assert.matches("--every: expected 0.05 to 86400 seconds, got 0", result.err, 1, true)
    assert.matches("expected one run, got nothing", result.err, 1, true)
    local interrupted = inside(AWAIT .. [[
      rm -f notes
      ENGINE watch nothing 2>notes & pid=$!
      await notes waiting
      kill -INT $pid; wait $pid; echo $?]])
    assert.equal("130\n", interrupted.out)
    assert.not_matches("interrupted!", helper.read(folder .. "/notes"), 1, true)
  end)

  describe("beside the REPL", function()
    local function typed(text)
      return shell("cd " .. quote(folder) .. " && " .. engine .. " -i", text)
    end

    it("runs lists the runs and open gives a history", function()
      local result = typed('runs\n#runs "runs"\nruns[1].rows\nopen "a"\nh = open("a")\n' ..
        'h:plot("loss", { svg = "a.svg" })\nopen "aa"\n')
      assert.matches("> run +steps +loss .*\na +40 .* finished\n", result.out)
      assert.matches("\n> [12]\n> 40\n> history runs/a/history.db: 40 steps", result.out)
      assert.matches("> a.svg\n", result.out, 1, true)
      assert.matches("^<svg", helper.read(folder .. "/a.svg"))
      assert.matches("there is no run 'aa'; did you mean 'a'?", result.err, 1, true)
    end)

    it("Tab completes columns in h:plot and runs in open", function()
      helper.write(folder .. "/complete.lua", [[
        local repl = require "engine.cli.repl"
        require "engine"
        h = require("engine").history.open "runs/a"
        for _, text in ipairs { 'h:plot("un', 'print(h:plot { "loss", "under', 'h:plot "scales.wei',
          'h:plot("loss", { svg = "trai', 'open "', 'io.open "trai', 'nothing:plot("trai' } do
          print(text .. "|" .. tostring(repl.complete(text)))
        end]])
      local result = shell("cd " .. quote(folder) .. " && " .. engine .. " complete.lua")
      assert.equal('h:plot("un|derflow\nprint(h:plot { "loss", "under|flow\n' ..
        'h:plot "scales.wei|ght\nh:plot("loss", { svg = "trai|n.lua\nopen "|nil\n' ..
        'io.open "trai|n.lua\nnothing:plot("trai|n.lua\n', result.out)
      assert.equal("", result.err)
    end)
  end)
end)
