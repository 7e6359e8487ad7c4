-- Ranks that drift apart: a change on one rank ends the job at the next comparison, before a
-- checkpoint is written, and the job resumes from the last checkpoint. The jobs are
-- spec/dist/job.lua and spec/dist/experts.lua, which compare the ranks after every step unless
-- agree_every sets another interval. Other specs of ranks use the same jobs, so a false alarm would
-- fail them.
local helper = require "spec.helper"
local json = require "engine.base.json"
local start = require "spec.dist.start"

if not start.can("ranks that drift apart") then return end

local DRIFTED = 6
local UP = "blocks.2.mlp.up.weight"

-- Runs a job with n ranks. Returns its result, the lines of its steps, and rank 0's checksum.
local function job(n, settings, script)
  local result = start.run(n, script or "spec/dist/job.lua", settings)
  return result, start.steps(result), result.err:match("rank 0: weights (%w+)")
end

-- Expects that the job ended because of drift, with one message that contains each of the texts.
local function drifted(result, ...)
  assert.equal(DRIFTED, result.code, result.out .. result.err)
  for _, text in ipairs { ... } do assert.matches(text, result.err, 1, true) end
  local _, times = result.err:gsub("the ranks have drifted apart", "")
  assert.equal(1, times, result.err)
end

local folder
describe("ranks that drift apart", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("end before a checkpoint is written, and resume from the previous checkpoint", function()
    local run = folder .. "/run"
    local settings = { "steps=6", "dropout=0.1", "checkpoint_every=2", "agree_every=1000" }
    local _, whole, weights = job(4, settings)
    local result, lines = job(4, { "drift=flip", "drift_step=3", "run=" .. run, unpack(settings) })
    assert.equal(4, #lines)
    local newest = run .. "/checkpoints/step-00000002"
    drifted(result, "step 4: the ranks have drifted apart: rank 1 differs from the others, " ..
      "first in " .. UP .. "; 1 of 92 values differ", "ranks 0, 2 and 3: checksum ",
      "rank 1: checksum ",
      "all ranks last agreed at step 2\nthe last checkpoint at which all agreed: " .. newest)
    assert.equal(newest, require("engine.run.checkpoint").latest(run .. "/checkpoints"))
    assert.equal("step-00000002\n", helper.shell("ls " .. run .. "/checkpoints").out)

    local command = result.err:match("resume from it with the same launcher: engine ([^\n]+)")
    local words = {}
    for word in command:gmatch("%S+") do words[#words + 1] = word end
    assert.equal("spec/dist/job.lua", table.remove(words, 1))
    assert.equal("resume=" .. newest, words[#words])
    assert.equal("run=" .. run, words[#words - 1])
    words[1] = "drift="                         -- without the change that made the ranks drift
    local resumed, rest, rest_weights = job(4, words)
    assert.equal(0, resumed.code, resumed.err)
    assert.same({ unpack(whole, 3) }, rest)
    assert.equal(weights, rest_weights)
  end)

  it("are recorded in the history and shown by `engine runs`", function()
    local run = folder .. "/run"
    drifted(job(2, { "drift=lr", "run=" .. run }), "step 3: the ranks have drifted apart",
      "there is no checkpoint to resume from; hint: a run with run=NAME " ..
        "checkpoint_every=STEPS writes checkpoints")
    local events = helper.history(run, "query", "SELECT step, kind, text, data FROM events " ..
      "WHERE kind IN ('drift', 'error', 'checkpoint', 'finished')")
    assert.equal(1, #events)
    assert.same({ 3, "drift",
      "ranks 0 and 1 differ from each other, first in lr; 1 of 92 values differ" },
      { events[1].step, events[1].kind, events[1].text })
    local data = json.decode(events[1].data)
    assert.same({ { ranks = { 0 }, value = "0.001" }, { ranks = { 1 }, value = "0.002" } },
      data.values)
    assert.same({ 3, 2, "lr" }, { data.step, data.agreed, data.first })
    assert.matches("drift: ranks 0 and 1 differ from each other, first in lr",
      helper.run({ "runs", folder }).out, 1, true)
    assert.equal(0, helper.run({ "report", run }).code)
    assert.matches("drift: ranks 0 and 1 differ", helper.read(run .. "/report.html"), 1, true)
  end)

  it("are found whatever differs", function()
    for what, expected in pairs {
      moment = UP .. ".moment2; 1 of 92 values differ\n  rank 0: checksum ",
      ["low precision=bf16"] = UP .. " (low-precision weights); 1 of 110 values differ",
      ["scale"] = "the loss scale; 2 of 92 values differ\n  rank 0: 1\n  rank 1: 3\n",
      ["random"] = "the random numbers; 1 of 92 values differ\n  rank 0: seed 5, counter ",
      ["updates"] = "the optimizer's updates; 1 of 92 values differ\n  rank 0: 3\n  rank 1: 4\n",
      ["flip mode=lagged precision=fp16"] = UP .. "; ",
    } do
      local settings = {}
      for word in ("drift=" .. what):gmatch("%S+") do settings[#settings + 1] = word end
      drifted(job(2, settings), "ranks 0 and 1 differ from each other, first in " .. expected)
    end
    drifted(job(2, { "drift=state" }), "first in the state of policy static; 1 of 92 values differ",
      "\n  rank 1: " .. ("long "):rep(60) .. "\nall ranks")     -- cut to 300 bytes
  end)

  it("are compared every agree_every steps; with 0 never", function()
    local result, lines = job(2, { "drift=flip", "agree_every=4" })
    drifted(result, "step 4: the ranks", "all ranks last agreed at step 0")
    assert.equal(4, #lines)
    result, lines = job(2, { "drift=flip", "agree_every=1000" })        -- compares at the end
    drifted(result, "step 6: the ranks")
    assert.equal(6, #lines)
    result = job(2, { "drift=flip", "agree_every=0", "checkpoint_every=2", "run=" .. folder ..
      "/run" })
    assert.equal(0, result.code, result.err)
  end)

  it("are found among the ranks that hold the same experts", function()
    local function experts(...) return (job(4, { "steps=3", ... }, "spec/dist/experts.lua")) end
    local weight = "first in second.experts.2.up.weight; "
    drifted(experts("over=2", "drift_rank=2"), "ranks 0 and 2 differ from each other, " .. weight ..
      "1 of 122 values differ")
    drifted(experts("over=1", "drift_rank=3", "zero=1"), "rank 3 differs from the others, " ..
      weight)
  end)

  it("are not reported when the data draws random numbers, and the job resumes exactly", function()
    for _, settings in ipairs { { "accumulate=2" }, { "mode=lagged", "precision=fp16" } } do
      local run = folder .. "/" .. #settings
      table.insert(settings, "noise=true")
      local whole, lines, weights = job(3, { "steps=6", unpack(settings) })
      assert.equal(0, whole.code, whole.err)
      job(3, { "steps=3", "run=" .. run, unpack(settings) })
      local _, rest, rest_weights = job(3, { "steps=6", "resume=auto", "run=" .. run,
        unpack(settings) })
      assert.same({ unpack(lines, 4) }, rest)
      assert.equal(weights, rest_weights)
    end
  end)

  it("are not reported in any mode of an example when nothing differs", function()
    for _, settings in ipairs { { "precision=fp16", "mode=lagged" },
      { "precision=fp8_block", "zero=2", "accumulate=2" },
      { "precision=mxfp4_tetrajet_q_ema", "zero=1", "width=32" },
      { "precision=bf16", "zero=1", "shadow=megatron", "dropout=0.1" },
      { "precision=fp16", "policy=dynamic:init_scale=2^40", "trap=overflow" } } do
      local run = folder .. "/" .. table.concat(settings, "-"):gsub("[^%w-]", "")
      for steps = 4, 8, 4 do
        local result = start.run(2, "examples/gpt.lua", { "layers=1", "width=16", "heads=2",
          "context=8", "batch=2", "sample=0", "agree_every=1", "checkpoint_every=3", "log=quiet",
          "resume=auto", "run=" .. run, "steps=" .. steps, unpack(settings) })
        assert.equal(0, result.code, table.concat(settings, " ") .. "\n" .. result.err)
      end
    end
  end)
end)
