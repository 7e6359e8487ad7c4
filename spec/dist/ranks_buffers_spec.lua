-- Several ranks with an optimizer written in Lua: with ZeRO each rank has the buffers of whole
-- parameters, training equals a job without ZeRO bit for bit, and a checkpoint resumes on any
-- number of ranks, with trainer.state. The job is spec/dist/buffers.lua.
local helper = require "spec.helper"
local json = require "engine.base.json"
local start = require "spec.dist.start"

if not start.can("optimizers written in Lua on several ranks") then return end

local folder

local function run(n, settings)
  return start.run(n, "spec/dist/buffers.lua", { "told=" .. folder .. "/told", unpack(settings) })
end

-- The report of each rank, rank 0 first; the reports must agree on everything but the buffers.
local function job(n, settings)
  local result, told = run(n, settings), {}
  assert.equal(0, result.code, result.out .. result.err)
  for rank = 1, math.max(n, 1) do
    told[rank] = json.decode(helper.read(("%s/told.%d"):format(folder, rank - 1)))
    for _, key in ipairs { "losses", "weights", "seen", "mean" } do
      assert.same(told[1][key], told[rank][key])
    end
    assert.is_true(told[rank].same)
  end
  return told
end

describe("optimizers written in Lua on several ranks", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("divide whole parameters under ZeRO, and train as without ZeRO", function()
    for _, more in ipairs { { "optimizer=muon" }, { "optimizer=adafactor", "accumulate=2",
      "precision=fp16", "policy=dynamic:init_scale=2^14" } } do
      local plain = job(3, more)
      for zero = 1, 2 do
        local settings = { "zero=" .. zero, unpack(more) }
        if zero == 2 and #more > 1 then settings[#settings + 1] = "accumulate=1" end
        local shared, sum = job(3, settings), 0
        for _, rank in ipairs(shared) do
          sum = sum + rank.elements
          assert.is_true(rank.elements < 0.8 * plain[1].elements)
        end
        assert.equal(plain[1].elements, sum)
        if settings[#settings] ~= "accumulate=1" then     -- with it, the job has fewer batches
          assert.equal(plain[1].weights, shared[1].weights)
        end
      end
    end
  end)

  it("resume bit for bit with any number of ranks, and restore trainer.state", function()
    local whole = job(3, {})
    for zero = 0, 2 do
      local path = folder .. "/run" .. zero
      job(3, { "steps=3", "zero=" .. zero, "run=" .. path })
      local same = job(3, { "zero=" .. (zero + 1) % 3, "resume=" .. path })
      for _, key in ipairs { "weights", "seen", "mean" } do
        assert.same(whole[1][key], same[1][key])
      end
      assert.equal(6, same[1].seen)
      assert.same({ unpack(whole[1].losses, 4) }, same[1].losses)
      assert.is_true(same[3].last[1] > 0 and same[3].last["1"] ~= same[3].last["1"])
      assert.equal(job(2, { "resume=" .. path })[1].weights,
        job(2, { "resume=" .. path, "zero=1" })[1].weights)
      assert.equal(6, job(0, { "resume=" .. path })[1].seen)
    end
  end)

  it("resume with an empty buffer, which the parameter's rank writes", function()
    local path, settings = folder .. "/run", { "optimizer=with_empty", "zero=1" }
    local whole = job(2, settings)
    job(2, { "steps=3", "run=" .. path, unpack(settings) })
    assert.equal(whole[1].weights, job(2, { "resume=" .. path, unpack(settings) })[1].weights)
  end)

  it("write no checkpoint when rank 0's trainer.state cannot be written", function()
    local result = run(2, { "run=" .. folder .. "/run", "bad=true" })
    assert.matches("no checkpoint was written: checkpoint ", result.err, 1, true)
    assert.matches("rank 0: trainer.state.bad: expected a number, "
      .. "string, boolean, tensor or table of these, got a function", result.out .. result.err, 1,
      true)
    assert.equal(5, result.code)
    assert.equal("", helper.shell("ls " .. folder .. "/run/checkpoints").out)
  end)
end)
