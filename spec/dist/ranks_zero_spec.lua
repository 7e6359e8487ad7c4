-- ZeRO-2: gradients sharded over the ranks. Memory and messages match the prediction and shrink
-- with more ranks; training equals training without ZeRO-2 in every configuration; calls that need
-- whole gradients are refused. The job is spec/dist/zero.lua.
local helper = require "spec.helper"
local json = require "engine.base.json"
local start = require "spec.dist.start"

if not start.can("ranks with ZeRO-2") then return end

local folder

-- The output of each rank of a job of n, rank 0 first.
local function job(n, settings)
  local result = start.run(n, "spec/dist/zero.lua",
    { "told=" .. folder .. "/told", unpack(settings) })
  assert.equal(0, result.code, result.out .. result.err)
  local told = {}
  for rank = 0, math.max(n, 1) - 1 do
    local path = ("%s/told.%d"):format(folder, rank)
    told[rank + 1] = json.decode(helper.read(path))
    os.remove(path)
  end
  for _, one in ipairs(told) do
    assert.same(told[1].steps, one.steps)
    assert.equal(told[1].weights, one.weights)
  end
  return told
end

describe("ranks with ZeRO-2", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("use the predicted memory and send the predicted messages, in every configuration", function()
    for _, case in ipairs { { 2, "zero=2" }, { 4, "zero=2", "precision=fp16" },
      { 3, "zero=2", "wire=fp8", "bucket=0.01" }, { 3, "zero=1", "wire=bf16" },
      { 2, "zero=0", "wire=fp8", "bucket=0.2" }, { 3, "zero=2", "optimizer=muon" },
      { 2, "zero=1", "optimizer=muon", "bucket=0.02" }, { 3, "zero=1", "precision=bf16_kahan" },
      { 2, "zero=2", "precision=bf16_stochastic" } } do
      local n = table.remove(case, 1)
      for _, rank in ipairs(job(n, case)) do
        local p, at = rank.predicted, ("rank %d of %d, %s"):format(rank.rank, n,
          table.concat(case, " "))
        local extra = helper.sanitized and 4096 or 0  -- the sanitizers' padding between blocks
        assert.near(p.gradients + p.rooms, rank.gradients, extra, at)
        assert.near(p.under_way, rank.messages_memory, 64 + extra, at)
        for _, what in ipairs { "messages", "bytes", "weight_messages", "weight_bytes" } do
          assert.equal(p[what], rank[what], at .. ": " .. what)
        end
      end
    end
  end)

  it("hold fewer gradients the more ranks there are, in small and large models", function()
    local function most(n, ...)
      local bytes = 0
      for _, rank in ipairs(job(n, { "bucket=0.02", "steps=2", ... })) do
        bytes = math.max(bytes, rank.gradients)
      end
      return bytes
    end
    local whole, two, four = most(0, "zero=2", "width=96"), most(2, "zero=2", "width=96"),
      most(4, "zero=2", "width=96")
    assert.equal(whole, most(2, "zero=1", "width=96"))
    assert.is_true(two < 0.8 * whole, two / whole)
    assert.is_true(four < 0.55 * whole, four / whole)
    -- More layers: each of two ranks holds half of the additional gradients; buffers do not grow.
    local more, of_two = most(0, "zero=2", "width=96", "layers=6") - whole,
      most(2, "zero=2", "width=96", "layers=6") - two
    assert.is_true(of_two < 0.6 * more, of_two / more)
  end)

  it("train as without ZeRO, bit for bit, when ranks use different layers in any order", function()
    for _, settings in ipairs { { "bucket=0.004" },
      { "bucket=0.03", "precision=fp16", "policy=dynamic" },
      { "bucket=0.004", "optimizer=muon" }, { "bucket=0.03", "precision=bf16_stochastic" },
      { "bucket=0.004", "precision=bf16_kahan", "clip=0.5" },
      { "bucket=0.03", "precision=fp16", "policy=dynamic", "optimizer=adafactor" } } do
      local plain = job(3, { "model=forked", unpack(settings) })
      for zero = 1, 2 do
        local shared = job(3, { "model=forked", "zero=" .. zero, unpack(settings) })
        assert.same(plain[1].steps, shared[1].steps)
        assert.equal(plain[1].weights, shared[1].weights)
      end
    end
  end)

  it("support reference backwards and overflow traps as without ZeRO", function()
    local plain = job(2, { "policy=norm_ratio:ref_every=2", "precision=fp16" })
    local shared = job(2, { "policy=norm_ratio:ref_every=2", "precision=fp16", "zero=2" })
    assert.are_not.equal("nan", plain[1].steps[1][4])
    assert.same(plain[1].steps, shared[1].steps)
    assert.equal(plain[1].weights, shared[1].weights)
    local traps = {}
    for zero = 0, 2, 2 do
      local run = folder .. "/zero" .. zero
      local all = job(2, { "policy=dynamic:init_scale=2^27", "precision=fp16", "trap=overflow",
        "zero=" .. zero, "run=" .. run, "steps=6" })
      assert.equal("skip", all[1].steps[1][6])
      traps[zero] = helper.history(run, "query",
        "select step, text from events where kind = 'trap' order by step")
      assert.is_true(#traps[zero] > 0)
      assert.matches("first inf in backward of", traps[zero][1].text, 1, true)
    end
    assert.same(traps[0], traps[2])
  end)

  it("refuse access to sharded gradients, and train on", function()
    local asked, plain = job(2, { "zero=2", "ask=true" }), job(2, { "zero=2" })
    for _, rank in ipairs(asked) do
      assert.matches("the gradient of parameter wpe.weight is divided among the ranks (zero=2 " ..
        "or 3), and no rank has all of it; hint: zero=1", rank.told.grad, 1, true)
      for _, what in ipairs { "stats", "unscale" } do
        assert.matches("divided among ranks (zero=2 or 3), and this rank has only its own elements",
          rank.told[what], 1, true)
      end
      assert.matches("only a trainer's step can compute them", rank.told.backward, 1, true)
      assert.matches("cannot change their format", rank.told.format, 1, true)
      assert.equal("no error", rank.told.leaf)
      assert.same(plain[1].steps, rank.steps)
    end
  end)

  it("end with the script's error when backward raises one", function()
    for zero = 1, 2 do
      local result = start.run(2, "spec/dist/zero.lua",
        { "told=" .. folder .. "/told", "model=forked", "boom=1", "timeout=5", "zero=" .. zero })
      assert.matches("boom", result.err, 1, true)
      assert.not_matches("Signal", result.err)
      assert.is_true(result.code > 0 and result.code < 128, tostring(result.code) .. result.err)
    end
  end)

  it("divide moments once, however many trainers the optimizer has, and nothing after an error",
    function()
    local result = start.run(2, "spec/dist/shard.lua")
    assert.equal(0, result.code, result.out .. result.err)
  end)

  it("resume with bf16 master weights from f32 ones, and back", function()
    local weights = {}
    for zero = 0, 2, 2 do
      local run = folder .. "/masters" .. zero
      for i, precision in ipairs { "bf16", "bf16_kahan", "bf16" } do
        weights[zero] = job(2, { "zero=" .. zero, "precision=" .. precision, "run=" .. run,
          "resume=auto", "steps=" .. 2 * i })[1].weights
      end
    end
    assert.equal(weights[0], weights[2])
  end)

  it("work with parameters that have no elements", function()
    local whole = job(2, { "model=forked", "zero=2", "steps=4" })
    for from = 1, 2 do
      local run = folder .. "/none" .. from
      job(2, { "model=forked", "zero=" .. from, "steps=4", "run=" .. run })
      for n = 1, 3, 2 do
        local rest = job(n, { "model=forked", "zero=" .. 3 - from, "steps=4", "run=" .. run,
          "resume=auto" })
        assert.equal(whole[1].weights, rest[1].weights)
      end
    end
  end)
end)
