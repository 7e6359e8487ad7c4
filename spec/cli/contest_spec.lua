-- engine contest: a script under several policies and seeds, as processes that can be killed and
-- continued. The specs recompute its numbers from the runs' histories.
local helper = require "spec.helper"
local history = require "engine.run.history"
local statistics = require "engine.base.statistics"
local C = require("engine.base.ffi").C
local quote = helper.quote

local JOB = [[
local engine = require "engine"
local cfg = engine.config({ policy = "dynamic", seed = 1, run = "", resume = "", log = "line",
  steps = 30, wait = 0, evaluate = true, fail = 0 }, nil, { count = "steps", policy = "policy" })
engine.seed(cfg.seed)
if cfg.fail == cfg.seed then error("seed refused") end
local net = engine.nn.sequential { engine.nn.linear(8, 16), engine.nn.relu(),
  engine.nn.linear(16, 4) }
local function data(seed)
  local x, y = engine.randn(64, 8):keep(), {}
  for i = 1, 64 do y[i] = (i * seed) % 4 end
  return engine.data.tensors { x = x, y = engine.tensor(y, { dtype = "i64" }):keep(), batch = 16,
    seed = seed }
end
local train, held_out = data(cfg.seed), data(7)
engine.trainer { model = net, data = train, steps = cfg.steps, policy = cfg.policy, run = cfg.run,
  resume = cfg.resume, log = cfg.log,
  optimizer = engine.optim.adam(net, { lr = 1e-2, precision = "fp16" }),
  evaluate = cfg.evaluate and { data = held_out, every = 10, batches = 2 } or nil,
  loss = function(model, batch) return engine.cross_entropy(model(batch.x), batch.y) end,
  on_step = function() require("engine.base.ffi").C.eng_sleep(cfg.wait) end }:run()
]]

-- A loop written by hand: two optimizers, so two steps in a turn.
local SESSION = [[
local engine = require "engine"
local cfg = engine.config({ policy = "dynamic", seed = 1, run = "", resume = "", log = "line",
  steps = 12, mydevice = "" }, nil, { count = "steps", policy = "policy" })
engine.seed(cfg.seed)
local nets = { engine.nn.linear(3, 4), engine.nn.linear(3, 4) }
local opts = {}
for i, net in ipairs(nets) do
  opts[i] = engine.optim.adam(net, { lr = 1e-2, precision = "fp16" })
end
local s = engine.session { optimizers = { a = opts[1], b = opts[2] }, policy = cfg.policy,
  run = cfg.run, resume = cfg.resume, log = cfg.log }
for _ in s:turns(cfg.steps) do
  for i, net in ipairs(nets) do
    s:backward(s:autocast(function() return (net(engine.randn(8, 3)) ^ 2):mean() end))
    s:step(opts[i])
  end
end
]]

local FAILS = [[return { name = "fails", options = {}, init = function() return { scale = 1 } end,
  decide = function() error("on purpose") end }]]

local HIGH = "dynamic:init_scale=2^30"      -- its first steps overflow

describe("engine contest", function()
  local folder
  setup(function()
    folder = helper.folder()
    helper.write(folder .. "/job.lua", JOB)
    helper.write(folder .. "/session.lua", SESSION)
    helper.write(folder .. "/mine.lua", FAILS)
    helper.write(folder .. "/script.lua", "local engine = require 'engine'\n" ..
      "engine.config { policy = '', run = '' }\nerror 'not reached'")
  end)
  teardown(function() helper.remove(folder) end)

  local function contest(words, before)
    return helper.shell(("cd %s && %s %s contest %s"):format(quote(folder), before or "",
      quote(helper.engine), words))
  end

  -- The lines of a CSV file as tables by column.
  local function csv(path)
    local rows, names = {}, nil
    for line in helper.read(folder .. "/" .. path):gmatch("[^\n]+") do
      local cells = {}
      for cell in (line .. ","):gmatch("([^,]*),") do cells[#cells + 1] = cell end
      if not names then names = cells
      else
        local row = {}
        for i, name in ipairs(names) do row[name] = tonumber(cells[i]) or cells[i] end
        rows[#rows + 1] = row
      end
    end
    return rows
  end

  -- A run's numbers, from its rows and events.
  local function numbers(path)
    local h = history.open(folder .. "/" .. path)
    local n = { skipped = 0, overflows = 0, loss = 0 }
    local steps, under, count = h:steps(), 0, 0
    for i, row in ipairs(steps) do
      n.skipped = n.skipped + (row.action ~= "step" and 1 or 0)
      n.overflows = n.overflows + (row.overflow and 1 or 0)
      under, count = under + row.underflow, count + row.count
      if i > #steps - 3 then n.loss = n.loss + row.loss / 3 end      -- a tenth of 30
    end
    local events = h:events "evaluation"
    n.held_out = tonumber(events[#events].text:match "[%d.]+$")
    n.underflow, n.seconds = under / count, steps[#steps].elapsed
    h:close()
    return n
  end

  it("compares policies over seeds; its numbers match the histories", function()
    local words = ("job.lua --policy dynamic --policy %s seeds=2 jobs=2 "):format(HIGH)
    local result = contest(words .. "--csv a.csv --latex a.tex --svg a.svg")
    assert.equal(0, result.code, result.err)
    local rows, of = csv "a.csv", {}
    assert.equal(4, #rows)
    for _, row in ipairs(rows) do
      local own = numbers(row.run)
      for _, name in ipairs { "loss", "held_out", "skipped", "overflows", "underflow",
        "seconds" } do
        assert.near(own[name], row[name], 1e-9 * math.max(1, own[name]), row.run .. " " .. name)
        of[name .. row.policy] = of[name .. row.policy] or {}
        of[name .. row.policy][row.seed] = own[name]
      end
      assert.equal(0, row.exit)
      assert.equal(30, row.steps)
    end
    assert.is_true(of["overflows" .. HIGH][1] > 0)
    -- the tables
    local function pattern(text) return (text:gsub("[%p]", "%%%0")) end
    for _, policy in ipairs { "dynamic", HIGH } do
      local cells = { pattern(policy), "2 of 2" }
      for _, name in ipairs { "loss", "held_out", "skipped", "overflows" } do
        local mean, spread = statistics.mean_and_spread(of[name .. policy])
        cells[#cells + 1] = pattern(statistics.text(mean, spread, 2))
      end
      assert.matches("\n" .. table.concat(cells, " +") .. " ", result.out)
    end
    local a, b = of.lossdynamic, of["loss" .. HIGH]
    local mean = (b[1] - a[1] + b[2] - a[2]) / 2
    local half = 12.7062 * math.abs(b[1] - a[1] - mean)      -- t of one degree of freedom
    local difference, low, high, verdict = result.out:match(
      "\n" .. pattern(HIGH) .. " +loss +(%S+) +(%S+) to (%S+) +([^\n]+)")
    local place = 10 ^ -#difference:match("%.?(%d*)$")
    assert.near(mean, tonumber(difference), place)
    assert.near(mean - half, tonumber(low), place)
    assert.near(mean + half, tonumber(high), place)
    assert.equal(mean - half > 0 and "higher" or mean + half < 0 and "lower"
      or "no difference beyond noise", verdict)
    -- the LaTeX, SVG and gnuplot files
    assert.matches("\n" .. pattern "dynamic:init\\_scale=2\\textasciicircum{}30" ..
      " & 2 of 2 & %$[%d.]+ \\pm [%d.]+%$ & ", helper.read(folder .. "/a.tex"))
    local svg = helper.read(folder .. "/a.svg")
    for i, policy in ipairs { "dynamic", HIGH } do      -- 2 panels
      assert.equal(2, select(2, svg:gsub('class="band s' .. i .. '" d="M', "")))
      assert.equal(2, select(2, svg:gsub('class="line s' .. i .. '" d="M0 6H24"/><text [^>]*>' ..
        pattern(policy) .. "</text>", "")))
    end
    helper.shell("mkdir " .. quote(folder .. "/bin"))     -- a gnuplot that keeps its commands
    helper.write(folder .. "/bin/gnuplot", "#!/bin/sh\ncat > commands; echo x > a.png\n")
    helper.shell("chmod +x " .. quote(folder .. "/bin/gnuplot"))
    assert.equal(0, contest(words .. "--png a.png", "PATH=$PWD/bin:$PATH").code)
    local commands = helper.read(folder .. "/commands")
    for _, piece in ipairs { "set title 'loss: mean and standard deviation, 2 seeds'",
      "$data2 using 1:2:4 with filledcurves", "title '" .. HIGH .. "'" } do
      assert.matches(piece, commands, 1, true)
    end
    -- the same contest again: no run is repeated, and the JSON has the same numbers
    local stamp = C.eng_file_stamp(folder .. "/runs/contest/dynamic-1/history.db")
    result = contest(words .. "--json")
    assert.equal("", result.err)
    assert.equal(stamp, C.eng_file_stamp(folder .. "/runs/contest/dynamic-1/history.db"))
    local object = require("cjson").decode(result.out)
    assert.near(mean, object.policies[2].loss.difference.mean, 1e-12)
    assert.near(mean + half, object.policies[2].loss.difference.high, 1e-12)
    -- a third seed adds two runs; stdout has a figure
    result = contest((words:gsub("seeds=2", "seeds=3")))
    assert.matches("2 runs to make.*4 of 6 are done", result.err)
    assert.matches("loss scale: geometric mean, 3 seeds.*a dynamic\n.*b dynamic:init_scale",
      result.out)
    assert.equal(stamp, C.eng_file_stamp(folder .. "/runs/contest/dynamic-1/history.db"))
  end)

  it("continues after a signal, and does not repeat runs that have ended", function()
    local words = "job.lua --policy dynamic --policy pid seeds=2 jobs=1 name=k wait=0.03"
    local runs = folder .. "/runs/k/"
    -- the second run is interrupted
    local result = helper.shell(([[cd %s; %s contest %s & p=$!
      for i in $(seq 200); do [ -s runs/k/pid-1/history.db ] && break; sleep 0.05; done
      sleep 0.3; kill -INT $p; wait $p]]):format(quote(folder), quote(helper.engine), words))
    assert.equal(130, result.code, result.err)
    assert.matches("interrupted, 1 of 4 runs are done; to continue:\n  " ..
      helper.engine:gsub("%p", "%%%0") .. " contest " .. words:gsub("%p", "%%%0"), result.err)
    assert.equal("143\n", helper.read(runs .. "pid-1/exit"))
    assert.is_nil((require("engine.run.runs").holder(runs .. "pid-1")))
    assert.is_nil(helper.read(runs .. "dynamic-2/exit"))
    local first = C.eng_file_stamp(runs .. "dynamic-1/history.db")
    -- the contest is killed; its run ends by itself, with a checkpoint
    result = helper.shell(([[cd %s; %s contest %s & p=$!
      for i in $(seq 200); do [ -s runs/k/dynamic-2/history.db ] && break; sleep 0.05; done
      sleep 0.3; kill -KILL $p; wait $p]]):format(quote(folder), quote(helper.engine), words))
    assert.equal(137, result.code)
    helper.shell(("cd %s/dynamic-2; for i in $(seq 200); do kill -0 $(cat lock) || break; " ..
      "sleep 0.05; done"):format(quote(runs)))
    local h = history.open(runs .. "dynamic-2")
    assert.equal("interrupted", h:events("stopped")[1].text)
    assert.is_true(#h:steps() < 30)
    h:close()
    result = contest(words .. " --csv k.csv")
    assert.equal(0, result.code, result.err)
    assert.matches("2 runs to make.*2 of 4 are done", result.err)
    assert.equal(first, C.eng_file_stamp(runs .. "dynamic-1/history.db"))
    for _, name in ipairs { "pid-1", "dynamic-2" } do
      h = history.open(runs .. name)
      assert.equal(1, #h:events "resumed", name)
      assert.equal(30, #h:steps())
      h:close()
    end
    assert.equal(4, #csv "k.csv")
  end)

  it("compares loops written by hand, and makes no run twice", function()
    local words = ("session.lua --policy dynamic --policy %s seeds=2 name=s --csv s.csv " ..
      "threads=1 mydevice=cuda"):format(HIGH)      -- a setting of the script, not the device
    for turn = 1, 2 do
      local result = contest(words)
      assert.equal(0, result.code, result.err)
      assert.equal(turn == 1 and math.min(4, C.eng_comm_threads()) or nil,
        tonumber(result.err:match "4 runs to make, (%d+) at a time"))
      local rows = csv "s.csv"
      assert.equal(4, #rows)
      for _, row in ipairs(rows) do
        local steps, skipped = helper.history(folder .. "/" .. row.run, "steps"), 0
        for _, step in ipairs(steps) do skipped = skipped + (step.action ~= "step" and 1 or 0) end
        assert.equal("finished", row.ended)
        assert.equal(24, #steps)
        assert.equal(24, row.steps)
        assert.equal(skipped, row.skipped)
        assert.equal(row.policy == HIGH, skipped > 0)
      end
    end
  end)

  it("continues when a policy or a seed fails, and prints the cause", function()
    local words = "job.lua --policy dynamic --policy ./mine.lua seeds=2 name=f fail=2"
    local result = contest(words)
    assert.equal(1, result.code)
    assert.matches("\ndynamic +1 of 2 ", result.out)
    assert.matches("\n%./mine%.lua +0 of 2 +%- ", result.out)
    assert.matches("dynamic: 1 of 2 runs failed (seed 2): exit status 1: job.lua:5: seed refused",
      result.out, 1, true)
    assert.matches("./mine.lua: 1 of 2 runs failed (seed 1): exit status 3: stopped: the " ..
      "policy failed in each of its first 20 steps: ./mine.lua:2: on purpose", result.out, 1, true)
    assert.matches("2 runs to make", contest(words).err)      -- the runs with exit status 1
  end)

  it("says how often a policy failed in runs that finished", function()
    helper.write(folder .. "/careful.lua", (FAILS:gsub("function%(%) error",
      "function(_, record) if record.step %% 3 == 0 then return 1 end error")))
    local result = contest "job.lua --policy pid --policy ./careful.lua seeds=2 name=of --csv o.csv"
    assert.equal(0, result.code, result.err)
    assert.matches("\n./careful.lua: the policy failed in 40 of 60 steps (seed 1, 2), so its " ..
      "verdicts there were not used\n", result.out, 1, true)
    assert.not_matches("pid: the policy failed", result.out, 1, true)
    local rows = csv "o.csv"
    assert.same({ 0, 20 }, { rows[1].policy_failed, rows[2].policy_failed })
  end)

  it("repeats a run whose results were lost from its first step", function()
    helper.write(folder .. "/lossy.lua", JOB .. "if io.open 'full' then os.exit(5) end\n")
    helper.write(folder .. "/full", "")
    local words = "lossy.lua --policy dynamic seeds=1 name=l steps=4 evaluate=false threads=1"
    assert.matches("1 of 1 runs failed (seed 1): exit status 5", contest(words).out, 1, true)
    os.remove(folder .. "/full")
    local result = contest(words)
    assert.equal(0, result.code, result.err)
    assert.matches("\ndynamic +1 of 1 ", result.out)
    local h = history.open(folder .. "/runs/l/dynamic-1")
    assert.equal(0, #h:events "resumed")
    assert.equal(4, #h:steps())
    h:close()
  end)

  it("compares settings of the script", function()
    local out = contest('job.lua --vary steps=10 --vary "steps=20 evaluate=false" --policy pid ' ..
      "seeds=2 name=v --csv v.csv").out
    assert.matches("\nsettings +finished", out)
    assert.matches("\npid +2 of 2 .*\nsteps=10 +2 of 2 .*\nevaluate=false steps=20 +2 of 2 .* %- ",
      out)
    assert.matches("differences from pid with the same seed", out, 1, true)
    local rows = csv "v.csv"
    assert.same({ "evaluate=false steps=20", 1, 20, "runs/v/evaluate=false-steps=20-1" },
      { rows[3].settings, rows[3].seed, rows[3].steps, rows[3].run })
    assert.same({ "pid", 30 }, { rows[1].settings, rows[1].steps })
    local meta = require("cjson").decode(contest('job.lua --vary steps=10 --vary ' ..
      '"evaluate=false steps=20" --policy pid seeds=2 name=v --json').out)
    assert.same({ "steps=10", "runs/v/steps=10-2" },
      { meta.entrants[2].settings, meta.entrants[2].runs[2].run })
  end)

  it("refuses wrong words before anything runs", function()
    local missing = "examples/nope.lua"
    for words, message in pairs {
      ["job.lua"] = "expected at least one --policy NAME or --vary SETTING=VALUE",
      ["job.lua --vary steps"] = "--vary: expected SETTING=VALUE, got 'steps'",
      ["job.lua --vary ' '"] = "--vary: expected SETTING=VALUE, got an empty text",
      ["job.lua --vary 'steps=1 steps=2'"] = "--vary 'steps=1 steps=2' sets 'steps' twice",
      ["job.lua --vary steps=1 --vary steps=1"] = "--vary: expected different settings, got " ..
        "steps=1 twice",
      ["job.lua --vary 'steps=1 fail=1' --vary 'fail=1 steps=1'"] = "--vary: expected different " ..
        "settings, got fail=1 steps=1 twice",
      ["job.lua --vary steps=1 steps=2"] = "'steps' differs between the runs",
      ["job.lua --policy pid policy=pid"] = "'policy' differs between the runs",
      ["job.lua --vary seed=1"] = "the contest itself sets 'seed'; hint: use seeds=",
      ["job.lua --vary stepz=1"] = "no field 'stepz'; did you mean 'steps'?",
      ["--policy dynamic"] = "expected one script, got nothing; see engine help contest",
      [missing .. " --policy dynamic"] = "there is no script '" .. missing .. "'",
      ["job.lua --policy dynamc"] = "policy: there is no policy 'dynamc'; did you mean 'dynamic'?",
      ["job.lua --policy dynamic seeds=0"] = "seeds: expected a whole number of 1 or more, got 0",
      ["job.lua --policy dynamic seeds=1e9"] = "expected at most 10000 runs, got 1e+09 seeds",
      ["job.lua --policy dynamic step=3"] = "no field 'step'; did you mean 'steps'?",
      ["job.lua --policy dynamic devices=cpu"] = "no field 'devices'; did you mean 'device'?",
      ["job.lua --policy dynamic seed=3"] = "the contest itself sets 'seed' for each run; " ..
        "hint: use seeds=",
      ["job.lua --policy dynamic --policy dynamic"] = "--policy: expected different policies, " ..
        "got dynamic twice",
      ["job.lua --policy dynamic --svg no/a.svg"] = "--svg: there is no folder 'no' to write into",
      ["script.lua --policy dynamic"] = "script.lua has no setting 'seed', which a contest " ..
        "needs; hint: add it to engine.config { ... } and use it: engine.seed(cfg.seed)",
    } do
      local result = contest(words .. " name=wrong")
      assert.equal(1, result.code)
      assert.equal("", result.out)
      assert.equal("engine contest: " .. message, result.err:sub(1, 16 + #message))
      assert.equal(1, select(2, result.err:gsub("\n", "")))
    end
    local rank = contest("job.lua --policy dynamic name=wrong", "RANK=0 WORLD_SIZE=2")
    assert.equal("engine contest: expected one process, which starts the runs, got 2; hint: " ..
      "start the contest without mpirun, srun or torchrun, or set ENGINE_RANKS=off\n", rank.err)
    assert.is_nil(helper.read(folder .. "/runs/wrong/contest.json"))
  end)

  it("refuses the folder of another contest, and an edited script", function()
    local words = "job.lua --policy dynamic seeds=1 name=o steps=4 evaluate=false threads=1"
    local out = contest(words).out
    assert.matches("\none seed; loss: mean.*dynamic +1 of 1 +[%d.]+ +%- ", out)
    local result = contest((words:gsub("steps=4", "steps=5")))
    assert.equal(1, result.code)
    assert.equal("engine contest: runs/o is a contest of 'job.lua evaluate=false steps=4 " ..
      "threads=1'; expected the same script and settings, got 'job.lua evaluate=false steps=5 " ..
      "threads=1'; hint: name=ANOTHER starts a new contest\n", result.err)
    helper.write(folder .. "/job.lua", JOB .. "-- edited\n")
    result = contest(words)
    helper.write(folder .. "/job.lua", JOB)
    assert.equal("engine contest: job.lua has changed since the contest runs/o began; hint: " ..
      "name=ANOTHER starts a new contest\n", result.err)
    for _, text in ipairs { "[", "{}", '{"script":"job.lua","settings":[],"sources":1}' } do
      helper.write(folder .. "/runs/o/contest.json", text)
      assert.equal("engine contest: runs/o/contest.json is damaged; hint: name=ANOTHER starts a " ..
        "new contest\n", contest(words).err)
    end
  end)

  it("keeps its folder: no run takes it, and commands name the runs in it", function()
    contest "job.lua --policy dynamic seeds=1 name=kept steps=2 evaluate=false threads=1"
    local function engine(words)
      return helper.shell(("cd %s && %s %s"):format(quote(folder), quote(helper.engine), words))
    end
    local run = engine "job.lua run=kept steps=2"
    assert.not_equal(0, run.code)
    assert.matches("run: the name is that of a contest: 'runs/kept'", run.err, 1, true)
    assert.is_nil(helper.read(folder .. "/runs/kept/history.db"))
    for _, command in ipairs { "plot", "attach" } do
      assert.matches("runs/kept is a folder of runs; hint: `engine runs runs/kept` lists them, " ..
        "and runs/kept/dynamic-1 names one", engine(command .. " kept").err, 1, true)
    end
    assert.matches("\ndynamic%-1 +2 ", engine("runs kept").out)
    assert.matches("\ndynamic%-1 +2 ", engine("runs kept/dynamic-1").out)
  end)
end)
