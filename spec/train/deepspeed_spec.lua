-- engine.deepspeed.initialize: a loop in DeepSpeed's form, compared with a trainer; errors for
-- misuse.
local engine = require "engine"
local helper = require "spec.helper"
local C = require("engine.base.ffi").C

local folder
before_each(function() folder = helper.folder() end)
after_each(function()
  C.eng_step_end()
  helper.remove(folder)
end)

local CONFIG = [[
{  // comments and trailing commas
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 0.5,
  "optimizer": { "type": "AdamW", "params": { "lr": 1e-2, "betas": [0.9, 0.95], }, },
  "zero_optimization": { "stage": 1 },
  "fp16": { "enabled": true, "initial_scale_power": 22, "hysteresis": 1, "loss_scale_window": 3 },
}]]

local function model_of()
  engine.seed(2)
  return engine.nn.sequential { engine.nn.linear(8, 16), engine.nn.relu(), engine.nn.linear(16, 2) }
end

describe("deepspeed.initialize", function()
  it("trains as a trainer with the same settings does", function()
    local path = helper.write(folder .. "/ds.json", CONFIG)
    local model = model_of()
    local ds, opt = engine.deepspeed.initialize { model = model, config = path, steps = 12,
      log = "quiet", run = folder .. "/run" }
    local actions = {}
    for i = 1, 24 do
      local y = ds(engine.ones(4, 8) * (i / 24))
      ds:backward(engine.mse(y, engine.ones(4, 2)))
      local result = ds:step()
      actions[i] = result.action
      if i % 2 == 0 then assert.is_true(result.loss > 0 and result.loss < 3) end
    end
    assert.equal(12, ds:close().steps)
    assert.same({ "accumulate", "skip", "accumulate" }, { actions[1], actions[2], actions[3] })
    assert.equal("step", actions[24])
    local other, i = model_of(), 0
    local trained = engine.optim.adamw(other, { lr = 1e-2, betas = { 0.9, 0.95 },
      precision = "fp16" })
    local trainer = engine.trainer { model = other, optimizer = trained, accumulate = 2,
      clip = 0.5, steps = 12, policy = path, log = "quiet",
      loss = function(m, b) return engine.mse(m(b.x), engine.ones(4, 2)) end,
      data = { next = function()
        i = i + 1
        return { x = engine.ones(4, 8) * (i / 24), tokens = 4 }
      end } }
    trainer:run()
    assert.equal(trainer.updates, opt.updates)
    for k, p in ipairs(other:parameters()) do
      local mine = model:parameters()[k].tensor
      assert.near(0, (mine - p.tensor):abs():max():item(), 1e-6)
    end
  end)

  it("names the keys that have no effect", function()
    local script = helper.write(folder .. "/job.lua", [[
      local engine = require "engine"
      local ds = engine.deepspeed.initialize { model = engine.nn.linear(2, 2), config = { flops = 1,
        optimizer = { type = "Adam" }, zero_optimization = { stage = 2 }, bf16 = {} } }
      ds:close()]])
    assert.matches("deepspeed: these keys of the configuration have no effect: flops, " ..
      "zero_optimization",
      helper.run({ script }).out, 1, true)
  end)

  it("takes DeepSpeed's defaults: fp16 and bf16 are off, the stage is 0", function()
    local function session(config)
      config.optimizer = { type = "Adam" }
      local text = require("cjson").encode(config)
      local seen
      for i, given in ipairs { config, helper.write(folder .. "/whole.json", text) } do
        local ds = engine.deepspeed.initialize { model = model_of(), config = given,
          log = "quiet" }
        local s = ds.session
        ds:close()
        local now = { s.precision.name, s.policy.name, s.policy:scale() }
        if i == 2 then assert.same(seen, now) end
        seen = now
      end
      return seen
    end
    local fp16 = { enabled = true, initial_scale_power = 4, hysteresis = 3 }
    assert.same({ "fp32", "static", 1 }, session { bf16 = { auto_cast = true } })
    assert.same({ "fp32", "static", 1 }, session { fp16 = { enabled = "auto" } })
    assert.same({ "bf16", "static", 1 }, session { bf16 = { enabled = true } })
    assert.same({ "fp16", "deepspeed_fused", 16 }, session { fp16 = fp16 })
    assert.same({ "fp16", "deepspeed_fused", 16 }, session { fp16 = fp16,
      zero_optimization = { stage = 0 } })
    assert.same({ "fp16", "deepspeed", 16 }, session { fp16 = fp16,
      zero_optimization = { stage = 1 } })
    -- a policy's configuration may be a part of a whole one, so a bare block counts as enabled
    assert.equal("deepspeed", engine.policy.load({ fp16 = { hysteresis = 3 } }).name)
  end)

  it("computes the number of micro-batches from the batch sizes", function()
    local ds = engine.deepspeed.initialize { model = model_of(), log = "quiet", steps = 1,
      config = { optimizer = { type = "Adam" }, train_batch_size = 6,
        train_micro_batch_size_per_gpu = 2, gradient_accumulation_steps = "auto",
        gradient_clipping = "auto" } }
    local actions = {}
    for i = 1, 3 do
      ds:backward(ds(engine.ones(2, 8)):mean())
      actions[i] = ds:step().action
    end
    assert.same({ "accumulate", "accumulate", "step" }, actions)
  end)

  -- A script that trains with accumulation of two micro-batches until `stop_at`, where a signal or
  -- the option steps ends the run. `head`: the head of its loop.
  local function ended(head, more)
    return helper.run({ helper.write(folder .. "/job.lua", ([[
      local engine, ffi = require "engine", require "ffi"
      ffi.cdef "int raise(int);"
      local ds = engine.deepspeed.initialize { model = engine.nn.linear(2, 2), log = "quiet",
        config = { optimizer = { type = "Adam" }, gradient_accumulation_steps = 2 }%s }
      local passes = 0
      for %s do
        passes = passes + 1
        if passes == 5 then ffi.C.raise(%d) end
        ds:backward(ds(engine.ones(2, 2)):mean())
        ds:step()
        io.write(step, " ")
      end
      print("after", ds:close().stopped)]]):format(more or "", head, more and 0 or 2)) })
  end

  it("ends the loop of turns() with the run", function()
    local result = ended("step in ds:turns()")
    assert.same({ 130, "1 1 2 2 3 3 after\tinterrupted\n" }, { result.code, result.out })
    result = ended("step in ds:turns()", ", steps = 3")
    assert.same({ 0, "1 1 2 2 3 3 after\tnil\n" }, { result.code, result.out })
    local ds = engine.deepspeed.initialize { model = model_of(), log = "quiet",
      config = { optimizer = { type = "Adam" } } }
    helper.refuses("expected turns() without a number, got 9; hint: the option steps", ds.turns,
      ds, 9)
    ds:close()
    assert.is_nil(ds:turns()())
  end)

  it("names turns() to a script that goes on after its run has ended", function()
    local result = ended("step = 1, 50")
    assert.equal(1, result.code)
    assert.matches("deepspeed: the run has ended: interrupted; hint: `for step in " ..
      "model_engine:turns() do` ends with it\n", result.err, 1, true)
    result = ended("step = 1, 50", ", steps = 3")          -- print("after") is missing
    assert.equal(1, result.code)
    assert.matches("deepspeed: the run has ended after 3 steps; hint: `for step in " ..
      "model_engine:turns() do` ends with it, or raise the option steps\n", result.err, 1, true)
  end)

  it("shows its run as text", function()
    local ds = engine.deepspeed.initialize { model = model_of(), log = "quiet", steps = 4,
      config = { optimizer = { type = "Adam" }, fp16 = { enabled = true, loss_scale = 8 } } }
    ds:backward(ds(engine.ones(2, 8)):mean())
    ds:step()
    assert.equal("deepspeed: adamw, 178 parameters, precision fp16, policy static, step 1 of 4, " ..
      "1 update, 0 skipped", tostring(ds))
    ds:close()
    ds = engine.deepspeed.initialize { model = model_of(), log = "quiet",
      config = { optimizer = { type = "Adam" } } }
    assert.matches("policy static, step 0, 0 updates, 0 skipped", tostring(ds), 1, true)
    ds:close()
  end)

  it("shows no total without a number of steps", function()
    local out = helper.run({ helper.write(folder .. "/job.lua", [[
      local engine = require "engine"
      local ds = engine.deepspeed.initialize { model = engine.nn.linear(2, 2),
        config = { optimizer = { type = "Adam" } } }
      for _ = 1, 3 do
        ds:backward(ds(engine.ones(2, 2)):mean())
        ds:step()
      end
      ds:close()]]) }).out
    assert.matches("step 2  loss", out, 1, true)
    assert.matches("done after 3 steps: 3 updates, 0 skipped", out, 1, true)
  end)

  it("names the keys of zero_optimization except the stage, which chooses the policy", function()
    local script = helper.write(folder .. "/job.lua", [[
      local engine = require "engine"
      engine.deepspeed.initialize { model = engine.nn.linear(2, 2), config = { bf16 = {},
        optimizer = { type = "Adam" }, fp16 = { enabled = true },
        zero_optimization = { stage = 1, offload_param = {} } } }:close()]])
    local out = helper.run({ script }).out
    assert.matches("have no effect: zero_optimization.offload_param\n", out, 1, true)
    assert.matches('deepspeed: the block bf16 is off; hint: "enabled": true', out, 1, true)
  end)

  it("reads a null block as absent", function()
    local path = helper.write(folder .. "/ds.json", [[{ "optimizer": { "type": "AdamW" },
      "fp16": null, "bf16": null, "bfloat16": { "enabled": true } }]])
    local ds = engine.deepspeed.initialize { model = model_of(), config = path, log = "quiet" }
    assert.equal("bf16", ds.session.precision.name)
    ds:close()
    assert.equal("static", engine.policy.load(path).name)
  end)

  it("takes a table, and says in one line what is wrong", function()
    local function refused(text, config, more)
      local o = { model = model_of(), config = config, log = "quiet" }
      for key, value in pairs(more or {}) do o[key] = value end
      helper.refuses(text, engine.deepspeed.initialize, o)
    end
    local adam = { type = "Adam", params = { lr = 1e-3 } }
    local ds = engine.deepspeed.initialize { model = model_of(), log = "quiet",
      config = { optimizer = adam, fp16 = { enabled = true, loss_scale = 64 } }, steps = 1 }
    ds:backward(ds(engine.ones(2, 8)):mean())
    assert.same({ "step", 64 }, { ds:step().action, ds:get_scale() })
    assert.matches("the run has ended after 1 step; hint",
      select(2, pcall(ds, engine.ones(2, 8))), 1, true)
    refused("deepspeed: expected optimizer.params to be an object, got 'x'",
      { optimizer = { type = "Adam", params = "x" } })
    refused("expected model to be a module, got 3", {}, { model = 3 })
    refused("unknown option 'modle'", {}, { modle = 1 })
    refused("expected config to be the path of a JSON file or a table, got nothing", nil)
    refused(folder .. "/no.json", folder .. "/no.json")
    refused("bad.json:2: not JSON", helper.write(folder .. "/bad.json", '{\n "fp16": }'))
    refused("expected the configuration's optimizer to have a type, such as \"AdamW\", or " ..
      "initialize to have the option optimizer, got nothing", {})
    refused("there is no optimizer 'AdamX'", { optimizer = { type = "AdamX" } })
    refused("optimizer Adam has no parameter 'lrr'", { optimizer = { type = "Adam",
      params = { lrr = 1 } } })
    refused("a scheduler is not supported", { scheduler = { type = "WarmupLR" },
      optimizer = adam })
    refused("expected gradient_accumulation_steps to be a whole number", { optimizer = adam,
      gradient_accumulation_steps = 0 })
    refused("expected train_batch_size to be train_micro_batch_size_per_gpu * " ..
      "gradient_accumulation_steps on one rank, got 32, 4 and 2", { optimizer = adam,
      train_batch_size = 32, train_micro_batch_size_per_gpu = 4, gradient_accumulation_steps = 2 })
    refused("on one rank, got 32, 10 and 3", { optimizer = adam, train_batch_size = 32,
      gradient_accumulation_steps = 3 })
    refused("on one rank, got 4, 8 and 0", { optimizer = adam, train_batch_size = 4,
      train_micro_batch_size_per_gpu = 8 })
    refused("expected train_batch_size to be a whole number of 1 or more, got 0",
      { optimizer = adam, train_batch_size = 0 })
    refused("expected fp16 to be an object, got true", { optimizer = adam, fp16 = true })
    refused("expected bf16 to be an object, got 'auto'", { optimizer = adam, bf16 = "auto" })
    local on = { enabled = true }
    for _, key in ipairs { "bf16", "bfloat16" } do
      refused("deepspeed: expected fp16 or bf16 to be enabled, got both; hint: \"enabled\": false",
        { optimizer = adam, fp16 = on, [key] = on })
    end
    refused("has no key 'hysteresys'", { optimizer = adam, fp16 = { enabled = true,
      hysteresys = 1 } })
    refused("expected fp16.enabled to be true or false, got 1", { optimizer = adam,
      fp16 = { enabled = 1 } })
  end)
end)
