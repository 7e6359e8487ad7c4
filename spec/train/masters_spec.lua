-- Training with bf16 master weights (precision bf16_stochastic, bf16_kahan): how close it comes to
-- f32 masters, what it saves, checkpoints, and what is refused.
local engine = require "engine"
local fused_state = require "engine.train.fused_state"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"

local C = M_ffi.C
local TEXT = require("engine.report.lab").text(20000)
local NEAREST = { name = "nearest", base = "bf16", masters = "bf16", rounding = "nearest" }

-- A trainer of a small GPT.
local function trainer_of(precision, options)
  return helper.job({ text = TEXT, layers = 1, data_seed = 3, precision = precision,
    attach = false }, options)
end

-- Trains; returns the mean loss of the last `tail` steps, a checksum of weights and optimizer
-- state, and the trainer.
local function train(precision, options, tail)
  local losses, sum = {}, 0
  options.on_step = function(_, record) losses[#losses + 1] = record.loss end
  local trainer = trainer_of(precision, options)
  trainer:run()
  for i = #losses - (tail or 0) + 1, #losses do sum = sum + losses[i] end
  local state, all, one = trainer.optimizer:state_tensors(), {}, M_ffi.new("uint64_t[1]")
  for name, x in pairs(state) do
    M_ffi.check(C.eng_checksum(one, x))
    all[#all + 1] = name .. " " .. tostring(one[0])
  end
  table.sort(all)
  table.insert(all, 1, tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0)))
  return sum / (tail or 1), table.concat(all, "\n"), trainer
end

describe("bf16 masters", function()
  it("train like f32 ones, except when rounded to nearest", function()
    for optimizer, lr in pairs { adamw = 1e-4, lion = 5e-5 } do
      local function loss(precision)
        return (train(precision, { steps = 200, lr = lr, optimizer = optimizer }, 20))
      end
      local want, worse = loss "bf16", loss(NEAREST)
      local lost = worse - want
      assert.is_true(lost > 0.05, ("%s: nearest %g, f32 %g"):format(optimizer, worse, want))
      for _, precision in ipairs { "bf16_stochastic", "bf16_kahan" } do
        local got = loss(precision)
        assert.is_true(math.abs(got - want) < 0.1 * lost, ("%s: %s %g, nearest %g, f32 %g"):format(
          optimizer, precision, got, worse, want))
      end
    end
  end)

  it("take 2 bytes a weight, or 4 with a compensation; norms keep f32", function()
    local rows, weights, norms = {}, 0, 0
    for _, precision in ipairs { "bf16", "bf16_stochastic", "bf16_kahan" } do
      local _, _, trainer = train(precision, { steps = 1 })
      local m = trainer.optimizer:memory()
      for _, role in ipairs { "masters", "low-precision copies", "moments" } do
        assert.equal(m[role].predicted, m[role].measured, precision .. ": " .. role)
      end
      rows[precision] = m
      weights, norms = 0, 0
      for _, p in ipairs(trainer.optimizer.list) do
        local norm = p.role == "norm"
        assert.equal((norm or precision == "bf16") and "f32" or "bf16", p.tensor.dtype)
        if norm then norms = norms + p.tensor.count else weights = weights + p.tensor.count end
      end
    end
    -- all shapes here are multiples of 64 bytes
    assert.equal(4 * (weights + norms), rows.bf16.masters.measured)
    assert.equal(2 * weights, rows.bf16["low-precision copies"].measured)
    for _, precision in ipairs { "bf16_stochastic", "bf16_kahan" } do
      assert.equal(2 * weights + 4 * norms, rows[precision].masters.measured)
      assert.equal(0, rows[precision]["low-precision copies"].measured)
    end
    assert.equal(2 * weights, rows.bf16_kahan.moments.measured - rows.bf16.moments.measured)
  end)

  it("resume bit for bit, with other threads, in both modes", function()
    local folder = helper.folder()
    for i, kind in ipairs(fused_state.kinds) do
      local case = { i % 2 == 1 and "bf16_stochastic" or "bf16_kahan",
        i % 4 < 2 and "sync" or "lagged", kind.name }
      local function run(steps, to, resume)
        local _, bits = train(case[1], { steps = steps, mode = case[2], optimizer = case[3],
          run = to and folder .. "/" .. i, resume = resume, dropout = 0.1, clip = 0.5,
          accumulate = 2 })
        return bits
      end
      local want = run(10)
      C.eng_threads(1)
      run(6, true)
      C.eng_threads(2)
      local got = run(10, true, "auto")
      C.eng_threads(0)
      assert.equal(want, got, table.concat(case, " "))
    end
    helper.remove(folder)
  end)

  it("convert checkpoints of runs with other masters, and say so", function()
    local folder = helper.folder()
    local function run(precision, name, from, steps)
      local trainer = trainer_of(precision, { steps = steps, run = folder .. "/" .. name,
        resume = from and folder .. "/" .. from })
      local notes = table.concat(trainer.run_files.notes, "\n")
      trainer:run()
      return trainer.optimizer, notes
    end
    -- the first weight in f32, with its compensation added unless `bare`
    local function weight(opt, bare)
      local p = opt.list[1]
      local lost = not bare and opt:state_tensors()[p.name .. ".compensation"]
      return lost and p.tensor:to("f32") + lost:to("f32") or p.tensor:to("f32")
    end
    local function most(f) return engine.scope(function() return f():abs():max():item() end) end
    local wide = run("bf16", "wide", nil, 6)
    local kahan, notes = run("bf16_kahan", "kahan", "wide", 6)
    assert.matches("master weights are bf16 now and were f32 in the checkpoint", notes, 1, true)
    local largest = most(function() return weight(wide) end)
    assert.is_true(most(function() return weight(wide) - weight(kahan) end) < largest * 2 ^ -16)
    assert.is_true(most(function() return weight(wide) - weight(kahan, true) end)
      > largest * 2 ^ -12)
    kahan = run("bf16_kahan", "more", "wide", 9)
    local back
    back, notes = run("bf16", "back", "more", 9)
    assert.matches("master weights are f32 now and were bf16 in the checkpoint", notes, 1, true)
    assert.equal(0, most(function() return weight(kahan) - weight(back) end))
    assert.equal("bf16", run("bf16_stochastic", "random", "more", 10).list[1].tensor.dtype)
    helper.remove(folder)
  end)

  it("can roll back to a checkpoint with other masters", function()
    local folder = helper.folder()
    local function run(precision, steps, policy)
      local trainer = trainer_of(precision, { steps = steps, run = folder .. "/run",
        policy = policy, resume = "auto", checkpoint_every = 4 })
      return trainer, trainer:run()
    end
    run("bf16", 4)
    local trainer, result = run("bf16_kahan", 6, { file = "back.lua", source = [[return {
      init = function() return { scale = 1 } end,
      decide = function(_, record)
        return { scale = 1, action = record.step == 5 and "rollback" or "step" }
      end }]] })
    assert.same({ 1, 6 }, { trainer.rollbacks_made, result.steps })
    assert.truthy(trainer.optimizer:state_tensors()["wte.weight.compensation"])
    helper.remove(folder)
  end)

  it("work in loops and sessions written by hand, and with FP8 layers", function()
    for _, precision in ipairs { "bf16_kahan", { base = "fp8_current", masters = "bf16" },
      { base = "mxfp8", masters = "bf16", rounding = "kahan" } } do
      engine.seed(2)
      local model = engine.nn.gpt { vocab = 64, context = 8, width = 32, heads = 2, layers = 1 }
      local opt = engine.optim.adamw(model, { lr = 1e-2, precision = precision })
      local x, losses = engine.tensor({ { 1, 2, 3, 4, 5 } }, "i32"):keep(), {}
      for i = 1, 6 do
        engine.begin_step()
        opt:zero_grad()
        local loss = engine.autocast(opt.precision, function() return model:loss(x, x) end)
        loss:backward()
        losses[i] = loss:item()
        opt:clip_grad_norm(1)
        opt:step()
        engine.end_step()
      end
      assert.is_true(losses[6] < losses[1] - 0.3)
      assert.equal("bf16", model.wte.weight.dtype)
    end
    local model = engine.nn.linear(4, 3)
    local session = engine.session { precision = "bf16_kahan", log = "quiet",
      optimizers = { a = engine.optim.sgd(model, { lr = 0.1 }) } }
    assert.equal("bf16", model.weight.dtype)
    assert.is_true(session ~= nil)
  end)

  it("have reference backwards in f32", function()
    local function norm_of(precision, field, options)
      local norm
      options.steps, options.on_step = 1, function(_, record) norm = record[field] end
      local trainer = trainer_of(precision, options)
      for _, p in ipairs(precision == "fp32" and trainer.optimizer.list or {}) do
        if p.role ~= "norm" then p.tensor:copy(engine.no_grad(function()
          return p.tensor:to("bf16")
        end)) end
      end
      trainer:run()
      return norm
    end
    local want = norm_of("fp32", "norm", {})
    local got = norm_of("bf16_kahan", "norm_ref", { policy = "norm_ratio" })
    assert.is_true(math.abs(got - want) < 1e-6 * want, ("%.9g, not %.9g"):format(got, want))
    assert.is_true(math.abs(norm_of("bf16_kahan", "norm", {}) - want) > 1e-6 * want)
  end)

  it("are refused where they cannot work, in one line", function()
    local function refused(want, precision, optimizer)
      local model = engine.nn.linear(4, 3)
      helper.refuses(want, engine.optim[optimizer or "adamw"], model,
        { precision = precision })
    end
    refused("expected masters to be bf16 or f32, got 'f16'", { base = "fp16", masters = "f16" })
    refused("masters in bf16 need weights in bf16, got f16", { base = "fp16", masters = "bf16" })
    refused("rounding = 'kahan' needs masters = 'bf16', but the masters are f32",
      { base = "bf16", rounding = "kahan" })
    refused("expected rounding to be kahan, nearest or stochastic, got 'up'",
      { base = "bf16", masters = "bf16", rounding = "up" })
    refused("has bf16 masters, which only " .. fused_state.names "and" .. " can update",
      "bf16_kahan", "muon")
    local _, _, trainer = train("bf16_kahan", { steps = 1 })
    assert.error_matches(function() trainer.optimizer:set_precision "bf16" end,
      "have had updates in bf16 %(rounding kahan%) and cannot change to f32 %(rounding nearest%)")
  end)
end)
