-- engine replay and engine tune: traces, the JSON output, predictions of a recorded run for other
-- scales (compared with runs at those scales), and the search for options.
local json = require "cjson"
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"

local ffi, replay = M_ffi.ffi, engine.replay

local fails = helper.failure

-- Text to train on, the same on every machine.
local text = {}
do
  local seed = 7
  for i = 1, 4000 do
    seed = (seed * 1103515245 + 12345) % 2 ^ 31
    text[i] = string.char(97 + math.floor(seed / 65536) % 26) .. (i % 5 == 0 and " " or "")
  end
  text = table.concat(text)
end

-- A small fp16 job whose weights do not change, so every step's gradients are the same whatever the
-- policy does.
local function record(policy, options, path, steps)
  local overflows, shares = {}, {}
  helper.job { text = text, data_seed = 8, optimizer = "sgd", lr = 1e-30, precision = "fp16",
    policy = policy, policy_options = options, steps = steps or 40, run = path,
    on_step = function(_, r)
      overflows[#overflows + 1] = r.overflow ~= 0
      shares[#shares + 1] = { underflow = tonumber(r.underflow), zeros = tonumber(r.zeros),
        count = tonumber(r.count) }
    end }:run()
  return overflows, shares
end

local folder
setup(function() folder = helper.folder() end)
teardown(function() helper.remove(folder) end)

describe("a string of outcomes", function()
  it("is parsed with any spacing", function()
    for _, form in ipairs { "4. x 2. 3x", "4.x2.3x", "....x..xxx", " 4 . x\n2.\t3X " } do
      assert.are.same({ false, false, false, false, true, false, false, true, true, true },
        replay.trace(form).overflow)
    end
    assert.are.equal(1, replay.trace(".").n)
    assert.are.equal(2000, replay.trace("2000.").n)
  end)

  it("is refused in one line when malformed", function()
    assert.matches("at character 4, got 'y'; expected '%.' %(a good step%) or 'x'",
      fails(replay.trace, "4. y"))
    assert.matches("no symbol follows the number 3", fails(replay.trace, "x 3"))
    assert.matches("no symbol follows the number 12", fails(replay.trace, "12"))
    assert.matches("more than 5000000 steps", fails(replay.trace, "99999999."))
    assert.matches("there is no run 'runs/nowhere'", fails(replay.trace, "runs/nowhere"))
    assert.matches("there is no run ''", fails(replay.trace, ""))
    assert.matches("holds no history.db", fails(replay.trace, folder))
    assert.matches("is not a history", fails(replay.trace, "README.md"))
  end)
end)

describe("engine replay", function()
  it("prints the documented JSON", function()
    local result = helper.run { "replay", "4. x 2. 3x", "--policy", "policies/dynamic.lua",
      "init_scale=256", "growth_interval=2", "--policy", "deepspeed", "--json" }
    assert.are.equal(0, result.code, result.err)
    assert.are.equal("", result.err)
    local object = json.decode(result.out)
    assert.are.same({
      name = "dynamic", file = "policies/dynamic.lua",
      options = { init_scale = 256, growth_factor = 2, backoff_factor = 0.5, growth_interval = 2,
        strict = true },
      scales = { 256, 512, 512, 1024, 512, 512, 1024, 512, 256, 128 },
      actions = { "step", "step", "step", "step", "skip", "step", "step", "skip", "skip", "skip" },
      skipped = 4, stopped_at = json.null, reason = json.null }, object.policies[1])
    assert.are.equal("deepspeed", object.policies[2].name)
    assert.matches('^{"policies":%[{"name":"dynamic","file":"policies/dynamic.lua",' ..
      '"options":{.-},"scales":%[256,', result.out)
  end)

  it("reports where a policy stops, and why", function()
    local object = json.decode(helper.run { "replay", "30x", "--policy", "deepspeed",
      "--json" }.out).policies[1]
    assert.are.equal(18, object.stopped_at)
    assert.are.equal(18, #object.scales)
    assert.are.equal(18, object.skipped)
    assert.matches("overflow at the smallest loss scale 1", object.reason)
  end)

  it("prints a table for people", function()
    local result = helper.run { "replay", "4. x . x 5. 2x 6. 3x 3.", "--policy", "dynamic",
      "init_scale=2^8", "growth_interval=2", "--policy=flax" }
    assert.are.equal(0, result.code, result.err)
    assert.matches("policy +options +steps +skipped", result.out)
    assert.matches("dynamic +growth_interval=2 init_scale=256 +26 +7 %(26.9 %%%) +9.00 +5.5 " ..
      "steps, then not +2%^9\n", result.out)
    assert.matches("dynamic: 256 512x2 1024 512x2 256x2", result.out)
  end)

  it("takes policy files as words after the trace", function()
    local object = json.decode(helper.run { "replay", "2x", "policies/dynamic.lua",
      "policies/static.lua", "loss_scale=8", "--json" }.out)
    assert.are.equal("dynamic", object.policies[1].name)
    assert.are.same({ 8, 8 }, object.policies[2].scales)
  end)

  it("leaves out the policies that a run or a string cannot replay, and says why", function()
    helper.job { text = text, precision = "fp16", steps = 4, run = folder .. "/half" }:run()
    local words = { "sqrt3", "static", "fp8_lm", "dynamic" }
    for trace, why in pairs { ["4. x"] = "expected a run, because a string",
      [folder .. "/half"] = "and [^\n]+ has no record of such layers: its precision is fp16" } do
      local command = { "replay", trace }
      for i, name in ipairs(words) do command[i + 2] = "policies/" .. name .. ".lua" end
      local result = helper.run(command)
      assert.are.equal(0, result.code, result.err)
      assert.matches("^engine replay: left out: sqrt3, fp8_lm %(each works on FP8 layers[,;] " ..
        why .. "[^\n]*%)\n$", result.err)
      assert.matches("\nstatic .*\ndynamic ", result.out)
      command[#command + 1] = "--json"
      assert.are.equal(2, #json.decode(helper.run(command).out).policies)
    end
    -- an error, if no policy remains or a policy does not load
    for why, last in pairs { ["policy sqrt3 works on FP8 layers;"] = "fp8_lm",
      ["there is no policy 'dynamics'"] = "dynamics" } do
      local result = helper.run { "replay", "4.", "--policy", "sqrt3", "--policy", last }
      assert.are.equal(1, result.code)
      assert.are.equal("", result.out)
      assert.matches("^engine replay: " .. why .. "[^\n]*\n$", result.err)
    end
  end)

  it("reports a user's mistake in one line", function()
    local function told(pattern, ...)
      local result = helper.run { "replay", ... }
      assert.are.equal(1, result.code)
      assert.are.equal("", result.out)
      assert.matches("^engine replay: " .. pattern .. "[^\n]*\n$", result.err)
    end
    told("there is no policy 'dynamics'; did you mean 'dynamic'%?", "4.", "--policy", "dynamics")
    told("policies/dynamic.lua: policy 'dynamic' has no option 'growth_intervall'; did you mean " ..
      "'growth_interval'", "4.", "--policy", "dynamic", "growth_intervall=3")
    told("policies/megatron.lua: hysteresis must be a whole number of 1 or more, got 0", "4.",
      "--policy", "megatron", "hysteresis=0")
    told("policies/dynamic.lua:%d+: option 'init_scale' must be a number, got 'many'", "4.",
      "--policy", "dynamic", "init_scale=many")
    told("there is no option '%-%-polcy'; did you mean '%-%-policy'", "4.", "--polcy", "dynamic")
    told("%-%-policy: expected a value", "4.", "--policy")
    told("expected %-%-policy FILE", "4.")
    local one = "expected one trace %(a run or a string of outcomes%), got "
    told(one .. "nothing; see engine help replay", "--policy", "dynamic")
    told(one .. "'4.', '5.'", "4.", "5.", "--policy", "dynamic")
    told("'a=1' sets an option of the policy before it, but no", "4.", "a=1", "--policy", "dynamic")
    told("policy: nowhere.lua: No such file", "4.", "--policy", "nowhere.lua")
    told("trace '4. y': at character 4, got 'y'", "4. y", "--policy", "dynamic")
    local broken = helper.write(folder .. "/broken.lua", "return {\n  decide = function( end,\n}\n")
    told(".*broken.lua:2: ", "4.", "--policy", broken)
    assert.matches("^usage: engine replay TRACE", helper.run({ "help", "replay" }).out)
  end)

  it("continues after a policy failure and reports its file and line", function()
    local bodies = { ["nothing"] = "", ["a string"] = "return 'x'",
      ["scale = nan"] = "return 0 / 0", ["scale = 0"] = "return 0", ["scale = %-1"] = "return -1",
      ["scale = inf"] = "return 1e400",
      ["state.f is a function"] = "state.f = function() end return 1",
        ["record has no field 'amx'"] = "return record.amx",
      ["two places"] = "state.a = {} state.b = state.a return 1" }
    for words, body in pairs(bodies) do
      local path = helper.write(folder .. "/bad.lua",
        "return {\n  options = { init_scale = 4 },\n  decide = function(state, record)\n    " ..
        body .. "\n  end,\n}\n")
      local result = helper.run { "replay", "2. x", "--policy", path }
      assert.are.equal(0, result.code, result.err)
      assert.matches("bad failed in 3 of 3 steps: [^\n]*bad.lua:%d+: [^\n]*" .. words ..
        "[^\n]*\n$", result.out)
    end
  end)

  it("gives plausible statistics to a policy that needs them", function()
    local path = helper.write(folder .. "/needs.lua",
      [[return { options = { init_scale = 4 },
      needs = { "amax", "norm", "hist", "zeros", "underflow", "tensors" },
      decide = function(state, record)
        state.scale = record.overflow and state.scale / 2
          or 8 * record.amax * record.norm * record.hist:sum(-20, 20)
          + record.zeros + record.underflow
        if record.tensors then error("there are none here") end
        return state.scale
      end }]])
    assert.are.same({ 8, 8, 4, 8 }, replay.run(replay.trace "2. x .", path).scales)
  end)
end)

describe("a replayed run", function()
  local path, trace
  setup(function()
    path = folder .. "/dynamic"
    record("dynamic", { init_scale = 2 ^ 20, growth_interval = 5 }, path, 60)
    trace = replay.trace(path)
  end)

  it("reproduces its own policy's decisions exactly", function()
    local result = helper.run { "replay", path, "--policy", "dynamic", "init_scale=2^20",
      "growth_interval=5", "--json" }
    assert.are.equal(0, result.code, result.err)
    local r = json.decode(result.out).policies[1]
    local history = engine.history.open(path)
    for i, row in ipairs(history:steps()) do
      assert.are.equal(row.next_scale, r.scales[i])
      assert.are.equal(row.action, r.actions[i])
      assert.are.equal("exact", r.verdicts[i])
    end
    history:close()
    assert.are.equal(60, #r.scales)
    assert.is_number(r.underflow)
    assert.is_number(r.mass_lost)
  end)

  it("shows what a loss scaler class would have done", function()
    local Halves = {}
    Halves.__index = Halves
    function Halves.new() return setmetatable({ s = 2 ^ 20 }, Halves) end
    function Halves:get_scale() return self.s end
    function Halves:update(overflow) self.s = overflow and self.s / 2 or self.s end
    engine.register_loss_scaler("replayed", Halves)
    local r = replay.run(trace, "replayed")
    local same = replay.run(trace, "dynamic", { init_scale = 2 ^ 20, growth_interval = 1000 })
    assert.are.same(same.scales, r.scales)
    assert.are.same(same.actions, r.actions)
    assert.matches("policy replayed is a class of a script; expected the name or the file",
      fails(require("engine.run.verify").plan, path, "replayed", nil, {}), 1, true)
  end)

  it("of a class of its script: another process says that it cannot replay the class", function()
    engine.register_loss_scaler("own_class", { update = function() end,
      get_scale = function() return 256 end })
    record("own_class", nil, folder .. "/class", 4)
    local function replayed(...)
      return helper.run { "replay", folder .. "/class", "--policy", "own_class", ... }
    end
    local why = "is a class that the script of [^\n]+/class registered, and a class of a script " ..
      "cannot be replayed here; hint: [^\n]+"
    for _, words in ipairs { {}, { "--verify" }, { "init=3" } } do
      local result = replayed(unpack(words))
      assert.are.equal(1, result.code)
      assert.matches("^engine replay: policy own_class " .. why .. "\n$", result.err)
    end
    local result = replayed("--policy", "static")
    assert.are.equal(0, result.code)
    assert.matches("^engine replay: left out: own_class %(" .. why .. "%)\n$", result.err)
    assert.matches("there is no policy 'own_clas'", helper.run({ "replay", folder .. "/class",
      "--policy", "own_clas" }).err, 1, true)
  end)

  it("of mode=lagged reproduces its own policy's decisions exactly, too", function()
    local function lagged(options)
      helper.job({ text = text, context = 8, width = 16, layers = 1, batch = 2,
        precision = "fp16", mode = "lagged", steps = 40, run = folder .. "/lagged",
        policy = "dynamic:init_scale=2^22,growth_interval=5", checkpoint_every = 7 },
        options):run()
    end
    lagged { steps = 25 }
    lagged { resume = "auto" }
    local r = replay.run(replay.trace(folder .. "/lagged"),
      "dynamic:init_scale=2^22,growth_interval=5")
    assert.are.equal(40, r.certainty.exact)
    for i, row in ipairs(helper.history(folder .. "/lagged", "steps")) do
      assert.are.equal(row.next_scale, r.scales[i])
    end
  end)

  it("predicts runs at other scales: exact verdicts are right, most estimates too", function()
    local wrong, bounds = 0, 0
    for exponent = 12, 20, 2 do
      local overflows = record("static", { loss_scale = 2 ^ exponent }, nil, 60)
      local r = replay.run(trace, "static", { loss_scale = 2 ^ exponent })
      for i, overflow in ipairs(overflows) do
        local same = (r.actions[i] ~= "step") == overflow
        if r.marks[i] == "exact" then
          assert.is_true(same, ("2^%d, step %d"):format(exponent, i))
        else
          bounds = bounds + 1
          if not same then wrong = wrong + 1 end
        end
      end
    end
    assert.is_true(bounds > 0)
    assert.is_true(wrong <= bounds / 5, ("%d of %d"):format(wrong, bounds))
  end)

  it("predicts underflow at smaller scales", function()
    local high = folder .. "/high"
    local _, reference = record("static", { loss_scale = 2 ^ 15 }, high)
    local at_high = replay.trace(high)
    for exponent = 2, 14, 4 do
      local _, shares = record("static", { loss_scale = 2 ^ exponent })
      local mean = 0
      for i, s in ipairs(shares) do
        mean = mean + (s.underflow + s.zeros - reference[i].zeros) / (s.count -
          reference[i].zeros) / #shares
      end
      local r = replay.run(at_high, "static", { loss_scale = 2 ^ exponent })
      assert.near(1, r.underflow / mean, 0.03)
      assert.are.equal(0, r.skipped)
      assert.are.equal(40, r.certainty.exact)
    end
    -- Lost mass falls as the scale rises, and is less than the share that underflows.
    local lost = {}
    for exponent = -6, 14, 4 do
      local r = replay.run(at_high, "static", { loss_scale = 2 ^ exponent })
      assert.is_true(r.mass_lost < r.underflow)
      lost[#lost + 1] = r.mass_lost
    end
    for i = 2, #lost do assert.is_true(lost[i] < lost[i - 1]) end
  end)

  it("keeps an overflow at any scale where the loss itself is not finite", function()
    local lost = folder .. "/lost"
    local model, n = engine.nn.linear(2, 1), 0
    local x = engine.tensor({ { 1, 2 } }, { keep = true })
    engine.trainer { model = model, data = { next = function() n = n + 1 return { x = x } end },
      optimizer = engine.optim.sgd(model, { lr = 0.1 }),
      loss = function(m, batch)
        return m(batch.x):mean() * (n % 5 == 0 and 0 / 0 or 1)
      end, policy = "dynamic", steps = 20, log = "quiet", run = lost }:run()
    local r = replay.run(replay.trace(lost), "static", { loss_scale = 2 ^ -20 })
    assert.are.equal(4, r.skipped)
    assert.are.equal(20, r.certainty.exact)
  end)

  it("marks verdicts exact or estimated by what the policy reads", function()
    local source =
      [[return { options = { init_scale = %s }, needs = { %s },
      decide = function(state, record) return state.scale end }]]
    record("static", { loss_scale = 2 ^ 14 }, folder .. "/good")      -- without an overflow
    local good = replay.trace(folder .. "/good")
    local function exact(needs, scale)
      return replay.run(good, { source = source:format(scale or "2^13.5", needs),
        file = "p.lua" }, {}).certainty.exact
    end
    assert.are.equal(40, exact "")
    assert.are.equal(40, exact('"amax"', "2^13"))
    assert.are.equal(0, exact '"amax"')                    -- rounds differently
    assert.are.equal(0, exact('"norm"', "2^13"))           -- some gradients are subnormal
    assert.are.equal(0, exact '"hist"')                    -- 2^13.5 splits the recorded binades
    assert.are.equal(0, exact '"tensors"')
  end)

  it("reads histories without histograms, and refuses an empty history", function()
    local h = engine.history.open(folder .. "/old.db", { write = true })
    local r, v = ffi.new("eng_record"), ffi.new("eng_verdict")
    r.scale, r.amax, r.norm, r.count, r.loss, v.scale, v.lr_mul = 1024, 2, 3, 100, 1, 1024, 1
    for step = 0, 9 do
      r.step = step
      h:append(r, v, 0)
    end
    h:close()
    local result = replay.run(replay.trace(folder .. "/old.db"), "static", { loss_scale = 2 ^ 20 })
    assert.are.equal(10, result.skipped)      -- gradients of 2, scaled by 2^20, exceed 65504
    assert.is_nil(result.underflow)
    result = replay.run(replay.trace(folder .. "/old.db"), "static", { loss_scale = 2 ^ 12 })
    assert.are.equal(0, result.skipped)
    assert.are.equal(0, result.certainty.exact)
    engine.history.open(folder .. "/empty.db", { write = true }):close()
    assert.matches("has no steps to replay", fails(replay.trace, folder .. "/empty.db"))
  end)

  it("counts steps from where the run's history begins", function()
    local r = replay.run(trace, { source = [[return { options = { init_scale = 1 },
      decide = function(state, record)
      return { scale = 1, action = record.step == 7 and "stop" or nil,
        reason = "enough" } end }]], file = "p.lua" })
    assert.are.equal(8, r.stopped_at)
    assert.are.equal("enough", r.reason)
  end)

  it("from a newer engine is refused in one line", function()
    os.execute("cp " .. helper.quote(path .. "/history.db") .. " " ..
      helper.quote(folder .. "/newer.db"))
    local bytes = helper.read(folder .. "/newer.db")
    -- PRAGMA user_version is the big-endian number at byte 60 of the file.
    helper.write(folder .. "/newer.db", bytes:sub(1, 60) .. "\0\0\0\99" .. bytes:sub(65))
    local result = helper.run { "replay", folder .. "/newer.db", "--policy", "dynamic" }
    assert.are.equal(1, result.code)
    assert.matches("^engine replay: history [^\n]+newer[^\n]+\n$", result.err)
  end)
end)

describe("engine tune", function()
  local path
  setup(function()
    path = folder .. "/tuned"
    record("dynamic", { init_scale = 2 ^ 18, growth_interval = 3 }, path, 60)
  end)

  it("finds better options, deterministically, and names its objective", function()
    local words = { "tune", path, "--policy", "dynamic", "--over", "growth_interval=2..200",
      "init_scale=2^8..2^20" }
    local result = helper.run(words)
    assert.are.equal(0, result.code, result.err)
    assert.matches("^objective: share of gradient elements lost", result.out)
    assert.matches("\nbest: policy=dynamic:growth_interval=%d+,init_scale=%d+\n", result.out)
    assert.are.equal(result.out, helper.run(words).out)
    words[#words + 1] = "--json"
    local object = json.decode(helper.run(words).out)
    assert.is_true(object.best.cost < object.default.cost)
    assert.are.equal(object.evaluations, #object.rows)
    for _, row in ipairs(object.rows) do assert.is_true(row.cost >= object.best.cost) end
    -- The options that tune names have the cost that it reports.
    local r = replay.run(replay.trace(path), "dynamic", object.best.options)
    assert.near(object.best.cost, r.costs.elements, 1e-12)
    assert.are.equal(object.best.skipped, r.skipped)
    local power = math.frexp(object.best.options.init_scale)
    assert.are.equal(0.5, power)
  end)

  it("says what is estimated: the objective, and the verdicts that are bounds", function()
    local over = { "--policy", "static", "--over", "loss_scale=2^4..2^20" }
    local out = helper.run({ "tune", path, unpack(over) }).out
    assert.matches("^objective: [^\n]+; estimated from the recorded gradients\n", out)
    assert.matches("skipped at least %d+[^\n]* of 60  underflow [^\n]*  exact [%d.]+ %%\n", out)
    assert.matches("\n[%d.]+ %% of the best setting's verdicts are exact, the others are bounds",
      out)
    local best = json.decode(helper.run({ "tune", path, "--json", unpack(over) }).out).best
    local r = replay.run(replay.trace(path), "static", best.options)
    assert.same({ r.certainty.exact, r.certainty.least }, { best.exact, best.skipped_at_least })
    out = helper.run({ "tune", "20. 4x 20.", "--objective", "skipped", unpack(over) }).out
    assert.no.matches("estimated", out)
    assert.no.matches("exact", out)
    assert.matches("skipped 4 of 44", out)
  end)

  it("refuses a class, whose options it cannot know", function()
    assert.matches("policy replayed is a class of a script, whose options have no known defaults",
      fails(engine.tune, { runs = { path }, policy = "replayed", over = { "init_scale=1..5" } }),
      1, true)
  end)

  it("finds the best scale of a sweep", function()
    local found = engine.tune { runs = { path }, policy = "static",
      over = { "loss_scale=2^4..2^24" } }
    local least, best = math.huge, nil
    for exponent = 4, 24 do
      local cost = replay.run(replay.trace(path), "static",
        { loss_scale = 2 ^ exponent }).costs.elements
      if cost < least then least, best = cost, 2 ^ exponent end
    end
    assert.are.equal(best, found.best.options.loss_scale)
    assert.are.equal(least, found.best.cost)
  end)

  it("accepts lists of values and strings of outcomes, and drops refused options", function()
    local found = engine.tune { runs = { "20. 4x 20." }, policy = "deepspeed",
      over = { "hysteresis=0,1,2", "min_scale=1,1024" },
      options = { init_scale = 4 }, objective = "skipped" }
    assert.are.equal(1 + 6, found.evaluations)
    local refused = 0
    for _, row in ipairs(found.rows) do refused = refused + (row.cost == math.huge and 1 or 0) end
    assert.are.equal(4, refused)
    local broken = helper.write(folder .. "/broken.lua",
      "return { options = { init_scale = 4 }, decide = function() return 'x' end }")
    assert.matches("tune: expected runs to be a list", fails(engine.tune, {}))
    assert.matches("trace: expected a run or a string of outcomes", fails(replay.trace))
    assert.matches("replay.run: expected a trace", fails(replay.run, "9.", "dynamic"))
    assert.matches("broken failed at every step",
      fails(engine.tune, { runs = { "9." }, policy = broken, over = { "init_scale=1,2" },
      objective = "skipped" }), 1, true)
    local out = json.decode(helper.run({ "replay", "3.", "--policy", broken,
      "--json" }).out).policies[1]
    assert.are.equal(3, out.failures)
    assert.matches("a string; expected", out.failure, 1, true)
  end)

  it("reports a user's mistake in one line", function()
    local function told(pattern, ...)
      local result = helper.run { "tune", ... }
      assert.are.equal(1, result.code)
      assert.matches("^engine tune: " .. pattern .. "[^\n]*\n$", result.err)
    end
    told("policy 'dynamic' has no option 'growth_intervall'; did you mean 'growth_interval'", path,
      "--policy", "dynamic", "--over", "growth_intervall=1..5")
    told("over 'growth_interval=5..1': expected two numbers", path, "--policy", "dynamic", "--over",
      "growth_interval=5..1")
    told("over 'growth_interval=5%-15': expected name=from", path, "--policy", "dynamic", "--over",
      "growth_interval=5-15")
    told("over 'growth_interval=abc': expected numbers", path, "--policy", "dynamic", "--over",
      "growth_interval=abc")
    told("over 'strict=1..2': the option strict is a boolean", path, "--policy", "dynamic",
      "--over", "strict=1..2")
    told("there is no objective 'mas'; did you mean 'mass'", path, "--policy", "dynamic", "--over",
      "growth_interval=1..5", "--objective", "mas")
    told("expected one %-%-policy FILE, got 0", path, "--over", "growth_interval=1..5")
    told("expected one run or several", "--policy", "dynamic", "--over", "growth_interval=1..5")
    told("expected %-%-over", path, "--policy", "dynamic")
    told("'4. x' is a string of outcomes without gradients", "4. x", "--policy", "dynamic",
      "--over", "growth_interval=1..5")
    told("policies/dynamic.lua: growth_interval must be a whole number of 1 or more, got 0", path,
      "--policy", "dynamic",
      "growth_interval=0", "--over", "init_scale=1..5")
  end)
end)
