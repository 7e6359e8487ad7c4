-- engine replay --verify: runs a recorded job live under the replayed policy, in a folder of its
-- own, and names the steps where the replay and the live run differ.
local json = require "cjson"
local engine = require "engine"
local helper = require "spec.helper"
local quote = helper.quote

-- wait: seconds of sleep in each step; other: trains another run first; by_hand: a loop without
-- run().
local JOB = [[
local engine = require "engine"
local cfg = engine.config { policy = "dynamic:init_scale=2^18,growth_interval=10", run = "job",
  lr = 1e-3, steps = 60, wait = 0, every = 0, other = false, mode = "sync", by_hand = false,
  resume = "" }
local function job(run, steps)
  engine.seed(3)
  local model = engine.nn.gpt { vocab = 256, context = 8, width = 16, heads = 2, layers = 1 }
  local data = engine.data.text { text = ("some text to learn from, "):rep(200), batch = 2,
    context = 8, seed = 9 }
  return engine.trainer { model = model, data = data, steps = steps, log = "quiet", run = run,
    policy = cfg.policy, resume = cfg.resume, checkpoint_every = cfg.every, mode = cfg.mode,
    config = cfg,
    optimizer = engine.optim.adamw(model, { lr = cfg.lr, precision = "fp16" }),
    on_step = function() require("engine.base.ffi").C.eng_sleep(cfg.wait) end }
end
if cfg.other then job("other", 5):run() end
local trainer = job(cfg.run, cfg.steps)
if cfg.by_hand then for _ = 1, cfg.steps do trainer:step() end else trainer:run() end
if os.getenv "AFTER" then io.open(os.getenv "AFTER", "w"):close() end
]]

local OWN = "--policy dynamic init_scale=2^18 growth_interval=10"

describe("engine replay --verify", function()
  local folder
  setup(function()
    folder = helper.folder()
    helper.write(folder .. "/job.lua", JOB)
  end)
  teardown(function() helper.remove(folder) end)

  local function shell(command, before)
    return helper.shell(("cd %s && %s %s %s"):format(quote(folder), before or "",
      quote(helper.engine), command))
  end

  local function made(name, words)
    local result = shell(("job.lua run=%s %s"):format(name, words or ""))
    assert.equal(0, result.code, result.err)
  end

  -- The contents of a run's folder; reading a history leaves SQLite's -shm and -wal behind.
  local function contents(name)
    return helper.shell(("cd %s && find . -type f ! -name '*-shm' ! -name '*-wal' | sort | " ..
      "xargs cksum"):format(quote(folder .. "/runs/" .. name))).out
  end

  local function verified(name, words, before)
    local result = shell(("replay %s %s --verify --json"):format(name, words), before)
    local good, object = pcall(json.decode, result.out)
    assert.is_true(good, result.out .. result.err)
    return object.policies[1], result.code, result
  end

  it("agrees with the run under its own policy, from the start and from a checkpoint", function()
    made("own", "every=20")
    local before = contents "own"
    local v, code = verified("own", OWN)
    assert.equal(0, code)
    assert.same({ 60, 0, json.null, 0, 0 }, { v.steps, v.from, v.checkpoint, #v.differences,
      #v.notes })
    v, code = verified("own", OWN .. " --from 45 --tolerance 0")
    assert.equal(0, code)
    assert.same({ 20, 40, 0 }, { v.steps, v.from, #v.differences })
    assert.matches("runs/own/checkpoints/step%-00000040$", v.checkpoint)
    assert.equal(before, contents "own")
  end)

  it("agrees also in lagged mode, after another trainer, and in a loop without run()", function()
    for name, words in pairs { lagged = "mode=lagged every=20", two = "other=true",
      hand = "by_hand=true" } do
      made(name, words)
      local other = name == "two" and contents "other"
      local v, code, result = verified(name, OWN .. " --steps 30" ..
        (name == "lagged" and " --from 25" or ""))
      assert.equal(0, code, name .. result.out .. result.err)
      assert.equal(30, v.steps)
      assert.equal(name == "lagged" and 20 or 0, v.from)
      if other then assert.equal(other, contents "other") end
    end
  end)

  it("names the first step and column that differ, with both values", function()
    made("differs", "policy=static:loss_scale=2^14")
    local result = shell("replay differs --policy static loss_scale=2^17 --verify --steps 40")
    assert.equal(2, result.code, result.err)
    assert.matches("the first difference is at step %d+: %a+ is %S+ in the replay and %S+ " ..
      "in the live run; the replay's verdict at this step is a bound", result.out)
    assert.matches("\nloss +%d+ steps", result.out)
    local v = verified("differs", "--policy static loss_scale=2^17 --steps 40")
    -- with --keep, the live run's own history has the reported values
    local live = shell(("replay differs --policy static loss_scale=2^17 --verify --steps 40 " ..
      "--keep kept"))
    assert.equal(2, live.code)
    local h, d = engine.history.open(folder .. "/kept/run"), v.differences[1]
    assert.equal(40, #h:steps())
    assert.equal(0, #h:events "checkpoint")
    local row = h:steps(d.step, d.step)[1]
    assert.equal(d.live, row[d.column])
    assert.not_equal(d.replay, d.live)
    h:close()
  end)

  it("confirms exact verdicts: a smaller scale makes the same updates", function()
    made("small", "policy=static:loss_scale=2^14")
    local v, code, result = verified("small", "--policy static loss_scale=2^12 --tolerance 0.05")
    assert.equal(0, code, result.out)
    assert.equal(60, v.steps)
  end)

  it("gives the policy the state that the replay had at the checkpoint", function()
    made("state", "every=20 policy=static:loss_scale=2^14")
    local policy = "--policy dynamic init_scale=2^5 growth_interval=7 --from 30 --steps 20"
    local v = verified("state", policy)
    assert.equal(20, v.from)
    for _, d in ipairs(v.differences) do
      assert.is_true(d.column ~= "scale" and d.column ~= "next_scale", d.column)
    end
  end)

  it("hints at --from only if a checkpoint brings the live run closer", function()
    made("apart", "every=20 policy=static:loss_scale=2^10")
    made("whole", "policy=static:loss_scale=2^10")
    local policy = " --policy dynamic init_scale=2^10 growth_interval=30 --steps 5"
    local hint = "the replay equals the run before step 30; hint: --steps 40 or more%s, to verify "
    assert.matches(hint:format ", or --from 30", verified("apart", policy .. " --from 0").notes[1],
      1, true)
    for _, from in ipairs { "", " --from 0", " --from 30" } do
      assert.matches(hint:format "", verified("whole", policy .. from).notes[1], 1, true)
    end
  end)

  it("says what has changed: the script, a setting", function()
    made "changed"
    helper.write(folder .. "/job.lua", (JOB:gsub("lr = 1e%-3", "lr = 2e-3")))
    local v, code = verified("changed", OWN .. " --steps 5")
    helper.write(folder .. "/job.lua", JOB)
    assert.equal(2, code)
    assert.matches("job.lua has changed since the run", v.notes[1], 1, true)
    assert.matches("setting lr was 0.001, is 0.002 now", v.notes[2], 1, true)
    assert.same({ 0, "lr" }, { v.differences[1].step, v.differences[1].column })
  end)

  it("refuses in one line what it cannot run", function()
    made "gone"
    local function told(text, words, before)
      local result = shell("replay " .. words, before)
      assert.equal(1, result.code)
      assert.matches(text, result.err, 1, true)
      assert.matches("\nengine replay: [^\n]*\n$", "\n" .. result.err)
    end
    os.rename(folder .. "/job.lua", folder .. "/moved")
    told("the script that made runs/gone no longer exists: ", "gone --policy static --verify")
    local v = verified("gone", OWN .. " --script moved --steps 5")
    assert.equal(5, v.steps)
    helper.write(folder .. "/job.lua", "error 'on purpose'")
    told("the live run made no step; exit status 1: ", "gone --policy static --verify")
    helper.write(folder .. "/job.lua", "print 'nothing'")
    told("job.lua ended without making the trainer or session of the run 'gone'",
      "gone --policy static --verify")
    helper.write(folder .. "/job.lua", JOB)
    told("--verify needs a run, not a string of outcomes", "'4. x' --policy static --verify")
    told("--steps: expected a whole number of 1 or more, got 0", "gone --policy static --verify " ..
      "--steps 0")
    told("--from: expected a whole number of 0 or more, got 1.5", "gone --policy static " ..
      "--verify --from 1.5")
    told("--from: expected a step from 0 to 59, the steps of the replay of runs/gone, got 60",
      "gone --policy static --verify --from 60")
    told("--tolerance works with --verify only", "gone --policy static --tolerance 1")
    told("there is no policy 'statc'", "gone --policy statc --verify")
    told("--keep: expected a new or an empty folder, but runs holds files",
      "gone --policy static --verify --keep runs")
    local h = engine.history.open(folder .. "/runs/gone", { write = true })
    h:set_meta("command", "{damaged")
    h:close()
    told("does not name the script that made the run; hint: --script FILE",
      "gone --policy static --verify")
    for _, command in ipairs { "5", '{"arguments":{},"script":7,"folder":[]}',
      '{"arguments":[{}],"script":{},"folder":"/nowhere"}' } do
      h = engine.history.open(folder .. "/runs/gone", { write = true })
      h:set_meta("command", command)
      h:close()
      told("", "gone --policy static --verify")
    end
    h = engine.history.open(folder .. "/runs/gone", { write = true })
    h:set_meta("command", "")
    h:close()
    v = verified("gone", OWN .. " --script job.lua --steps 5")          -- the settings suffice
    assert.equal(0, #v.differences)
    h = engine.history.open(folder .. "/runs/gone", { write = true })
    h:set_meta("ranks", 4)
    h:close()
    told("was made by 4 ranks; --verify runs one process", "gone --policy static --verify")
  end)

  it("compares the steps made so far after Ctrl-C", function()
    made("stopped", "wait=0.001")
    helper.write(folder .. "/job.lua", (JOB:gsub("eng_sleep%(cfg.wait%)", "eng_sleep(0.05)")))
    -- signals the command once its live run has begun
    local result = helper.shell(("cd %s; %s replay stopped %s --verify --json --keep stop > " ..
      "out & pid=$!; for i in $(seq 400); do [ -s stop/run/history.db ] && break; sleep 0.05; " ..
      "done; sleep 1; kill -INT $pid; wait $pid"):format(quote(folder), quote(helper.engine), OWN))
    helper.write(folder .. "/job.lua", JOB)
    assert.equal(130, result.code)
    local v = json.decode(helper.read(folder .. "/out")).policies[1]
    assert.is_true(v.interrupted)
    assert.is_true(v.steps > 0 and v.steps < 60)
    assert.equal(0, #v.differences)
    assert.equal("runs/stopped\n", helper.shell(("cd %s && ls -d runs/stop*"):format(quote(
      folder))).out)
  end)

  it("names a later start of the run, whose arguments the live run has", function()
    made("again", "steps=6")
    made("again", "steps=9 resume=auto")
    local text = shell("replay again " .. OWN .. " --verify --from 0 --steps 4").out
    assert.matches("note: step 6: the run was resumed; the live run has the arguments of the last "
      .. "start (resumed at step 6, ", text, 1, true)
    assert.matches("4 of 4 steps compared, from step 0\n", text, 1, true)
    text = shell("replay again " .. OWN .. " --verify --from 6 --steps 2").out
    assert.falsy(text:find("note: step 6", 1, true), text)
  end)
end)
