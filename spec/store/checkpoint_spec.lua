-- Checkpoints: a saved checkpoint loads exactly, a damaged one is skipped in favour of the one
-- before it, and a failed save leaves nothing behind.
local engine = require "engine"
local checkpoint = require "engine.run.checkpoint"
local json = require "engine.base.json"
local helper = require "spec.helper"
local scratch = require "spec.store.scratch"

local ffi = require "ffi"

describe("plain data as JSON", function()
  local function exact(value) return json.decode(json.encode(value)) end

  it("restores numbers bit for bit", function()
    local numbers = { 0, 1, -1, 0.1, 1 / 3, math.pi, 2 ^ 53, 2 ^ 53 - 1, 2 ^ 63, -2 ^ 31, 1e15,
      123456789012345680, 5e-324, 2.2250738585072014e-308,
      1.7976931348623157e308, 9.999999680285692e37, 85196.796875, 1e100, 1e-7 }
    for i = 1, 2000 do numbers[#numbers + 1] = (math.random() - 0.5) * 2 ^ (i % 600 - 300) end
    local back = exact(numbers)
    for i, x in ipairs(numbers) do assert.are.equal(x, back[i]) end
    assert.are.equal(-math.huge, 1 / exact(-0.0))
    assert.are.equal(math.huge, 1 / exact(0))
    assert.are.equal(math.huge, exact(math.huge))
    assert.are.equal(-math.huge, exact(-math.huge))
    local nan = exact(0 / 0)
    assert.is_true(nan ~= nan)
    assert.are.equal("0.1", json.encode(0.1))
  end)

  it("restores 64-bit integers", function()
    for _, x in ipairs { 0LL, -1LL, 9223372036854775807LL, -9223372036854775807LL - 1LL } do
      assert.is_true(exact(x) == x and ffi.istype("int64_t", exact(x)))
    end
    for _, x in ipairs { 0ULL, 12345678901234567890ULL, 18446744073709551615ULL } do
      assert.is_true(exact(x) == x and ffi.istype("uint64_t", exact(x)))
    end
  end)

  it("restores any plain table", function()
    local data = {
      list = { 1, 2, { 3 } }, empty = {}, text = "é\0\n\"\\/\127", bytes = "\255\254\0x",
      deep = { a = { b = { c = true } } },
      holes = { [1] = "a", [3] = "c" }, zero = { [0] = 1 }, mixed = { 1, x = 2 },
      keys = { [true] = 1, [false] = 2, [-0.5] = 3, ["1"] = 4, [1] = 5 },
      ["$number"] = "nan", tagged = { ["$number"] = "inf" }, ["\255"] = 1, [""] = "",
    }
    assert.are.same(data, exact(data))
  end)

  it("is refused if it is malformed, or nested deeper than it can be read", function()
    for _, text in ipairs { '{"$bytes":"zz"}', '{"$bytes":"0"}', '{"$int64":"9223372036854775808"}',
      '{"$int64":"-9223372036854775809"}', '{"$uint64":"18446744073709551616"}',
      '{"$uint64":"-1"}' } do
      assert.error_matches(function() json.decode(text) end, "malformed value of")
    end
    local function nested(n, inner)
      for _ = 1, n do inner = { a = inner } end
      return inner
    end
    for n, inner in pairs { [1000] = 1, [999] = {}, [998] = { "\255" }, [997] = { [5] = 1 } } do
      assert.equal(json.encode(nested(n, inner)), json.encode(exact(nested(n, inner))))
      local good, message = pcall(json.encode, nested(n + 1, inner))
      assert.is_false(good)
      assert.matches("^value%.a.*: the tables are nested too deep", message)
      assert.is_true(#message < 200)
    end
  end)

  it("for other programs holds no functions", function()
    assert.error_matches(function() json.plain { a = print } end,
      "expected a number, string, boolean or table, got a function")
    assert.equal('{"a":true}', json.plain { a = true })
  end)

  it("names the path of a value that cannot be saved", function()
    local loop = {}
    loop.again = loop
    local cases = {
      { { a = { b = print } }, "state.a.b: expected a number, string, boolean or table, got " ..
        "a function" },
      { { { 1, coroutine.create(print) } },
        "state[1][2]: expected a number, string, boolean or table, got a thread" },
      { { [{}] = 1 }, "state: expected a string, number or boolean as a key, got a table" },
      { loop, "state.again: the table contains itself" },
    }
    for _, case in ipairs(cases) do
      assert.has_error(function() json.encode(case[1], "state") end, case[2])
    end
    local shared = { 1 }
    assert.are.same({ { 1 }, { 1 } }, exact { shared, shared })
  end)
end)

-- Changes the text of a state.json, except its checksum, which is computed again.
local function rewrite(path, change)
  local body = change(helper.read(path):match('^(.*),"crc32c"'))
  helper.write(path, body .. (',"crc32c":"%08x"}\n'):format(
    require("engine.base.ffi").C.eng_crc32c(0, body, #body)))
end

describe("checkpoint", function()
  local dir
  before_each(function() dir = helper.folder() end)
  after_each(function() helper.remove(dir) end)

  local function parts(value)
    return {
      model = { ["wte.weight"] = engine.full({ 4, 3 }, value), bias = engine.full({ 3 }, -value) },
      optimizer = { ["m.wte.weight"] = engine.full({ 4, 3 }, value / 3) },
      state = { policy = { scale = 65536, good = value },
        rng = { seed = 12345678901234567890ULL, counter = 7ULL }, loss = 0 / 0, value = value / 7 },
    }
  end

  local function path_of(step) return ("%s/step-%08d"):format(dir, step) end

  local function damage(step, file, change)
    local path = path_of(step) .. "/" .. file
    helper.write(path, change(helper.read(path)))
  end

  it("loads as it was saved", function()
    assert.are.equal(path_of(12), checkpoint.save(dir, 12, parts(1.5)))
    assert.are.same({ "model.safetensors", "optimizer.safetensors", "state.json" },
      scratch.names(path_of(12)))
    local c = assert(checkpoint.load(dir))
    assert.are.equal(12, c.step)
    assert.are.equal(path_of(12), c.path)
    assert.are.same({}, c.skipped)
    assert.are.same({ 1.5, 1.5, 1.5 }, c.model["wte.weight"]:totable()[4])
    assert.are.equal(engine.tensor(0.5):item(), c.optimizer["m.wte.weight"]:totable()[1][1])
    assert.are.equal(12345678901234567890ULL, c.state.rng.seed)
    assert.are.equal(1.5 / 7, c.state.value)
    assert.is_true(c.state.loss ~= c.state.loss)
    assert.are.equal(path_of(12), assert(checkpoint.load(path_of(12))).path)
  end)

  it("keeps only the newest checkpoints", function()
    for step = 10, 60, 10 do checkpoint.save(dir, step, parts(step), { keep = 3 }) end
    assert.are.same({ "step-00000040", "step-00000050", "step-00000060" }, scratch.names(dir))
    assert.are.same({ 40, 50, 60 }, checkpoint.steps(dir))
    assert.are.equal(path_of(60), (checkpoint.latest(dir)))
    checkpoint.forget_after(dir, 50)
    assert.are.same({ 40, 50 }, checkpoint.steps(dir))
  end)

  it("replaces an earlier one of the same step", function()
    checkpoint.save(dir, 10, parts(1))
    checkpoint.save(dir, 10, parts(2))
    assert.are.equal(2, assert(checkpoint.load(dir)).state.policy.good)
    assert.are.same({ "step-00000010" }, scratch.names(dir))
  end)

  it("reports that a directory has no checkpoint", function()
    assert.are.same({ nil, "there is no checkpoint in " .. dir }, { checkpoint.load(dir) })
    assert.are.same({ nil, "there is no checkpoint in " .. dir .. "/none" },
      { checkpoint.load(dir .. "/none") })
    assert.are.same({ nil, ("checkpoint %s: there is no such directory"):format(path_of(3)) },
      { checkpoint.load(path_of(3)) })
    assert.are.same({ nil, {} }, { checkpoint.latest(dir) })
  end)

  local ways = {
    { "a truncated model", "model.safetensors", function(s) return s:sub(1, -2) end,
      "model.safetensors has %d+ bytes, expected %d+" },
    { "an empty model", "model.safetensors", function() return "" end,
      "model.safetensors has 0 bytes" },
    { "a longer model", "model.safetensors", function(s) return s .. "x" end,
      "model.safetensors has %d+ bytes" },
    { "a flipped bit", "model.safetensors",
      function(s) return s:sub(1, -2) .. string.char(bit.bxor(s:byte(-1), 64)) end,
      "model.safetensors is damaged: its checksum is %x+, expected %x+" },
    { "zeros in the middle", "optimizer.safetensors",
      function(s) return s:sub(1, 20) .. ("\0"):rep(20) .. s:sub(41) end,
      "optimizer.safetensors is damaged" },
    { "a truncated state", "state.json", function(s) return s:sub(1, -10) end,
      "state.json is incomplete" },
    { "an empty state", "state.json", function() return "" end, "state.json is incomplete" },
    { "a changed number", "state.json",
      function(s) return (s:gsub('"scale":65536', '"scale":65537')) end,
      "state.json is damaged: its checksum" },
    { "a changed checksum", "state.json",
      function(s) return (s:gsub('"crc32c":"%x%x%x%x', '"crc32c":"0000')) end, "damaged" },
    { "garbage for state", "state.json", function() return "\0\1\2garbage" end,
      "state.json is incomplete" },
  }
  for _, way in ipairs(ways) do
    it("skips a checkpoint with " .. way[1], function()
      checkpoint.save(dir, 10, parts(1))
      checkpoint.save(dir, 20, parts(2))
      damage(20, way[2], way[3])
      local c = assert(checkpoint.load(dir))
      assert.are.equal(10, c.step)
      assert.are.equal(1, #c.skipped)
      assert.truthy(c.skipped[1]:find("checkpoint " .. path_of(20) .. " is skipped: ", 1, true),
        c.skipped[1])
      assert.truthy(c.skipped[1]:find(way[4]), c.skipped[1])
      local none, message = checkpoint.load(path_of(20))
      assert.is_nil(none)
      assert.truthy(message:find(way[4]), message)
    end)
  end

  it("skips several, missing files and half-written directories", function()
    for step = 10, 40, 10 do checkpoint.save(dir, step, parts(step)) end
    damage(40, "state.json", function() return "" end)
    os.remove(path_of(30) .. "/optimizer.safetensors")
    os.execute("mkdir '" .. path_of(50) .. "' '" .. path_of(60) .. ".tmp' && cp '" .. path_of(10) ..
      "/state.json' '" .. path_of(60) .. ".tmp'")
    helper.write(path_of(70), "a file")
    os.execute("mkdir -p '" .. path_of(80) .. "/state.json'")
    local c = assert(checkpoint.load(dir))
    assert.are.equal(20, c.step)
    assert.are.equal(4, #c.skipped)
    assert.truthy(c.skipped[1]:find("state.json is incomplete", 1, true))
    assert.truthy(c.skipped[2]:find("state.json is missing", 1, true))
    assert.truthy(c.skipped[4]:find("optimizer.safetensors is missing", 1, true))
    damage(20, "state.json", function() return "" end)
    damage(10, "state.json", function() return "" end)
    local none, message = checkpoint.load(dir)
    assert.is_nil(none)
    assert.are.equal(6, select(2, message:gsub("is skipped", "")))
  end)

  it("refuses a checkpoint of a newer engine", function()
    checkpoint.save(dir, 10, parts(1))
    rewrite(path_of(10) .. "/state.json", function(s)
      return (s:gsub('"format":1', '"format":9'))
    end)
    assert.truthy(select(2, checkpoint.load(dir)):find(
      "newer engine (in format 9; this engine reads up to 2)", 1, true))
  end)

  it("refuses fields of state.json that are out of range, in spite of a valid checksum", function()
    checkpoint.save(dir, 10, parts(1))
    local path = path_of(10) .. "/state.json"
    local text = helper.read(path)
    for _, case in ipairs {
      { '"format":1', '"format":"1"', "state.json.format: expected a whole number from 1 to 2, " ..
        "got '1'" },
      { '"step":10', '"step":-1099511627776', "state.json.step: expected a whole number of 0 or " ..
        "more, up to 2^53, got -1099511627776" },
      { '"step":10', '"step":11', "state.json.step: expected 10, as in the directory's name, " ..
        "got 11" },
      { '"files":{', '"files":{"../x":1,', "state.json.files: expected names of " ..
        ".safetensors files as keys, got '../x'" },
      { '"bytes":%d+', '"bytes":{}', ".bytes: expected a whole number of 0 or more, up to 2^53, " ..
        "got a table" },
      { '"scale":65536', '"scale":null', "state.json is damaged: null has no counterpart in Lua" },
      { '"scale":65536', '"scale":{"$pairs":[[{},1]]}', "malformed value of '$pairs'" },
      { '"scale":65536', '"scale":{"$bytes":5}', "malformed value of '$bytes'" },
      { '"scale":65536', '"scale":{"$int64":"x"}', "malformed value of '$int64'" },
    } do
      helper.write(path, text)
      rewrite(path, function(body) return (body:gsub(case[1], case[2])) end)
      local none, message = checkpoint.load(dir)
      assert.is_nil(none)
      assert.matches(case[3], message, 1, true)
    end
  end)

  it("frees the tensors that it has read if a later one cannot be read", function()
    checkpoint.save(dir, 10, parts(1))
    local class = getmetatable(checkpoint.open(dir))
    local read, first = class.read, nil
    class.read = function(...)
      if first then error("the disk is gone", 0) end
      first = read(...)
      return first
    end
    local none, message = checkpoint.load(dir)
    class.read = read
    assert.is_nil(none)
    assert.matches("step-00000010: the disk is gone", message, 1, true)
    assert.is_false(pcall(function() return first.shape end))
  end)

  it("leaves nothing behind when it fails, and removes leftovers of a killed run", function()
    checkpoint.save(dir, 10, parts(1))
    local before = scratch.names(dir)
    local bad = parts(2)
    bad.state.policy.callback = print
    local good, message = pcall(checkpoint.save, dir, 20, bad)
    assert.is_false(good)
    assert.truthy(message:find("state.policy.callback: expected a number", 1, true), message)
    assert.are.same(before, scratch.names(dir))
    local large = parts(2)
    large.model.large = engine.zeros(100000)
    good, message = scratch.with_file_limit(65536, pcall, checkpoint.save, dir, 20, large)
    assert.is_false(good)
    assert.truthy(message:find("cannot write", 1, true), message)
    assert.are.same(before, scratch.names(dir))
    assert.are.equal(10, assert(checkpoint.load(dir)).step)
    os.execute("mkdir '" .. path_of(15) .. ".tmp'")
    helper.write(path_of(15) .. ".tmp/model.safetensors", "half")
    checkpoint.save(dir, 20, parts(2))
    assert.are.same({ "step-00000010", "step-00000020" }, scratch.names(dir))
    assert.has_error(function() checkpoint.save(dir, -1, parts(1)) end,
      "checkpoint.save: expected the step to be a whole number of 0 or more, got -1")
    for _, name in ipairs { "save", "open", "load", "latest", "steps" } do
      assert.error_matches(function() checkpoint[name](nil, 1) end,
        "expected the path of a directory")
    end
    assert.has_error(function() checkpoint.save(dir, 1, parts(1), { keep = 0 }) end,
      "checkpoint.save: expected keep to be a number of 1 or more, got 0")
  end)

  it("is complete after kill -9 at any moment", function()
    helper.write(dir .. "/run.lua", ([[
      local engine = require "engine"
      local checkpoint = require "engine.run.checkpoint"
      local ffi = require "ffi"
      ffi.cdef "int getpid(void);"
      io.write(ffi.C.getpid(), "\n")
      io.flush()
      local w = engine.zeros(200000)
      for step = 1, 1e6 do
        w:fill(step)
        checkpoint.save(%q, step, { model = { w = w }, state = { step = step } }, { keep = 2 })
      end
    ]]):format(dir .. "/checkpoints"))
    for round = 1, 3 do
      local run = io.popen(scratch.command(dir .. "/run.lua"))
      local pid = run:read("*l")
      os.execute(("sleep 0.%d; kill -9 %s"):format(3 + round * 2, pid))
      run:close()
      local c = assert(checkpoint.load(dir .. "/checkpoints"))
      assert.are.same({}, c.skipped)
      assert.are.equal(c.step, c.state.step)
      assert.are.equal(c.step, c.model.w:totable()[200000])
      c.model.w:free()
    end
  end)
end)

describe("the state of a trainer in a checkpoint", function()
  local dir
  before_each(function() dir = helper.folder() end)
  after_each(function() helper.remove(dir) end)

  local function job(options)
    engine.seed(3)
    local model = engine.nn.linear(8, 2)
    local o = { model = model, log = "quiet", attach = false, run = dir .. "/run", steps = 2,
      optimizer = engine.optim.adamw(model, { lr = 0.1, precision = "fp16" }), policy = "dynamic",
      shadow = "megatron", state = { best = { 1 }, x = engine.zeros(2):keep() },
      data = engine.data.mix { loaders = { engine.data.text { text = ("abc "):rep(99), batch = 2,
        context = 8 } } },
      loss = function(m) return engine.mse(m(engine.ones(2, 8)), engine.zeros(2, 2)) end }
    for key, value in pairs(options or {}) do o[key] = value end
    return engine.trainer(o)
  end

  it("is checked before a resume uses it, and a message names the file and the field", function()
    local first = job()
    first.control.set.clip = 1
    first:run()
    local place = dir .. "/run/checkpoints/step-00000002"
    local path, text = place .. "/state.json", helper.read(place .. "/state.json")
    local whole = ": expected a whole number of 0 or more, up to 2^53, got "
    for _, case in ipairs {
      { '"steps":2,"threads"', '"steps":-1099511627776,"threads"',
        "state.steps" .. whole .. "-1099511627776; hint: use another checkpoint" },
      { '"steps":2,"threads"', '"steps":3,"threads"',
        "state.steps: expected 2, the checkpoint's step, got 3" },
      { '"updates":%d+,"user"', '"updates":3,"user"',
        "state.updates: expected a whole number from 0 to the number of steps, got 3" },
      { '"tokens":%d+', '"tokens":0.5', "state.tokens" .. whole .. "0.5" },
      { '"elapsed":[^,]+', '"elapsed":{"$number":"nan"}',
        "state.elapsed: expected a finite number of 0 or more, got nan" },
      { '"retries":%d+,', "", "state.retries: expected a whole number from 0 to the number of " ..
        "steps, got nothing" },
      { '"ranks":1', '"ranks":1e9',
        "state.ranks: expected a whole number from 1 to 65536, got 1000000000" },
      { '"lr_factor":1', '"lr_factor":2', "state.lr_factor: expected 1, or after a rollback" },
      { '"optimizer":{', '"optimizer":[{', "state.optimizer.name: expected a string, got nothing",
        '"updates":%d+},"policy"', '"updates":2}],"policy"' },
      { '"seed":"3"', '"seed":"18446744073709551616"',
        "state.rng.seed: expected a whole number below 2^64 as a string" },
      { '"state":"{clip', '"state":"{klip', "state.json: state.policy.state: " },
      { '"clip":1', '"clip":"high"', "state.json: state.set: clip: expected a finite " ..
        "number of 0 or more (0: no limit), got 'high'" },
      { '"loaders":%[{"at":2', '"loaders":[{"at":"2"',
        "state.json: state.data: data: expected a position from state(): position.at" .. whole },
      { '"bounds":%d+', '"bounds":true', "state.shadows.list[1].certainty.bounds" .. whole ..
        "true" },
      { '"shape":%[2]', '"shape":[3]', "state.user.tensors[1]: expected the name, dtype and " ..
        "shape of a tensor in the files, got 'x', f32 [3]" },
      { '"path":%["x"]', '"path":["best",1]', "state.user.tensors[1].path: expected keys that " ..
        "lead to an unused place in state.user.data" },
      { '"tensors":.*$', '"tensors":[]}}',
        "state.user.tensors: expected an entry for the tensor 'x', got none" },
    } do
      helper.write(path, text)
      rewrite(path, function(body)
        local changed, n = body:gsub(case[1], case[2])
        assert.is_true(n > 0, case[1])
        return (case[4] and changed:gsub(case[4], case[5]) or changed)
      end)
      local message = helper.failure(job, { resume = "auto" })
      assert.matches(place, message, 1, true)
      assert.matches(case[3], message, 1, true)
    end
    helper.write(path, text)
    assert.equal(4, job { resume = "auto", steps = 4 }:run().steps)
    local c = checkpoint.load(dir .. "/run/checkpoints")
    c.state.accumulate = 2 ^ 20                      -- the most that a trainer takes
    assert.is_nil(require("engine.run.state_fields").problem(c.state))
  end)

  it("is checked before a rollback changes anything", function()
    local t = job { checkpoint_every = 1, steps = 6, policy = { file = "back.lua",
      source = [[return { init = function() return { scale = 8 } end,
        decide = function(state, record)
          if record.step == 4 then return { scale = 8, action = "rollback", back = 1 } end
          return 8
        end }]] },
      on_step = function(own)
        local path = dir .. "/run/checkpoints/step-00000003/state.json"
        if own.steps_done == 4 then
          rewrite(path, function(body) return (body:gsub('"tokens":', '"taken":')) end)
        end
      end }
    t:run()
    assert.equal(0, t.rollbacks_made)
    local seen = helper.history(dir .. "/run", "events", "rollback_refused")[1].text
    assert.matches("step-00000003 is not a checkpoint of a trainer: state.json: state.tokens: " ..
      "expected a whole number of 0 or more, up to 2^53, got nothing; hint: use another checkpoint",
      seen, 1, true)
  end)
end)
