-- ZeRO-3: weights sharded over the ranks. Training equals ZeRO-0 bit for bit; memory and messages
-- match the prediction; FP8 weights travel as FP8; weights are prefetched in any order of use;
-- killed jobs resume with any number of ranks; an inf is attributed to its rank and tensor; code
-- that needs whole weights is refused outside of trainer:whole; lagged mode works. The jobs are
-- spec/dist/zero.lua, ahead.lua, job.lua and whole.lua.
local helper = require "spec.helper"
local json = require "engine.base.json"
local start = require "spec.dist.start"

if not start.can("ranks with ZeRO-3") then return end

local folder

local function run(n, script, settings, limit)
  return start.run(n, script, settings, limit and { limit = limit })
end

-- The output of each rank of a job of zero.lua.
local function told(n, ...)
  local result = run(n, "spec/dist/zero.lua", { "told=" .. folder .. "/told", ... })
  assert.equal(0, result.code, result.out .. result.err)
  local all = {}
  for rank = 0, n - 1 do
    all[rank + 1] = json.decode(helper.read(("%s/told.%d"):format(folder, rank)))
    assert.same(all[1].steps, all[rank + 1].steps)
    assert.equal(all[1].weights, all[rank + 1].weights)
  end
  return all
end

-- A job of ahead.lua: its lines, its checksum, and for each step how many units came, and how many
-- of them ahead.
local function ahead(n, ...)
  local result, came, early = run(n, "spec/dist/ahead.lua", { ... }), {}, {}
  assert.equal(0, result.code, result.out .. result.err)
  local sum, all, some = result.err:match("rank 0: weights (%w+) came (%S+) ahead (%S+)")
  for rank = 1, n - 1 do
    assert.matches(("rank %d: weights %s came %s ahead %s"):format(rank, sum, all, some),
      result.err, 1, true)
  end
  for count in all:gmatch("%d+") do came[#came + 1] = tonumber(count) end
  for count in some:gmatch("%d+") do early[#early + 1] = tonumber(count) end
  return result.out, sum, came, early
end

-- The lines of a job of job.lua, and the checksum of its weights.
local function job(n, ...)
  local result = run(n, "spec/dist/job.lua", { "tied=false", "bucket=0.02", ... })
  return start.steps(result), result.err:match("rank 0: weights (%w+)"), result
end

local function events(path, kind)
  return helper.history(path, "query",
    "SELECT step, text FROM events WHERE kind = '" .. kind .. "'")
end

describe("ranks with ZeRO-3", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("train as without ZeRO, bit for bit", function()
    for _, case in ipairs { { 2, "precision=fp16", "clip=1" }, { 4, "checkpoint=true" },
      { 3, "precision=bf16", "wire=fp8", "optimizer=muon" },
      { 2, "precision=fp8_delayed", "width=64" }, { 3, "precision=bf16_stochastic" },
      { 2, "precision=bf16_kahan" }, { 2, "precision=mxfp4_quartet", "width=64" },
      { 2, "precision=nvfp4_quartet2", "width=64" },
      { 4, "precision=fp8_block", "width=64", "checkpoint=true" } } do
      local plain = told(unpack(case))
      case[#case + 1] = "zero=3"
      local shared = told(unpack(case))
      assert.same(plain[1].steps, shared[1].steps, table.concat(case, " "))
      assert.equal(plain[1].weights, shared[1].weights, table.concat(case, " "))
    end
    -- ZeRO-3 reduces every micro-batch, as ZeRO-2 does, so their sums have the same bits.
    assert.equal(told(2, "accumulate=3", "precision=bf16", "zero=2")[1].weights,
      told(2, "accumulate=3", "precision=bf16", "zero=3")[1].weights)
  end)

  it("hold the predicted weights and send the predicted messages", function()
    local held = {}
    for _, case in ipairs { { 2, "bf16", "false" }, { 4, "fp32", "true" },
      { 2, "bf16_kahan", "false" },
      { 2, "fp8_rowwise", "true" } } do
      local n, precision = case[1], case[2]
      for _, rank in ipairs(told(n, "zero=3", "width=192", "layers=4", "steps=2",
        "precision=" .. precision, "checkpoint=" .. case[3])) do
        local p, at = rank.predicted, ("rank %d of %d, %s"):format(rank.rank, n, precision)
        for _, what in ipairs { "messages", "bytes", "weight_messages", "weight_bytes",
          "weight_exchanges" } do
          assert.equal(p[what], rank[what], at .. ": " .. what)
        end
        assert.equal(p.weights, rank.weights_memory, at)
        held[precision] = math.max(held[precision] or 0, rank.weights_memory)
      end
    end
    -- 1.8 million weights take 7.2 MB in f32, and 3.6 MB more as copies in bf16
    assert.is_true(held.bf16 < 0.65 * 10.8e6, held.bf16)
    -- a quarter of the weights, and two blocks of four less what the rank has of them
    assert.is_true(held.fp32 < 0.65 * 7.2e6, held.fp32)
    -- fp8_block sends one byte per weight of a layer, bf16 two
    local function sent(precision)
      local bytes = 0
      for _, rank in ipairs(told(2, "zero=3", "width=128", "layers=4", "steps=2",
        "precision=" .. precision)) do
        bytes = bytes + rank.weight_bytes
      end
      return bytes
    end
    assert.is_true(sent("fp8_block") < 0.65 * sent("bf16"))
  end)

  it("bring weights ahead of their use, in orders that change", function()
    local function compare(n, ...)
      local settings = { ... }
      local plain, sum = ahead(n, unpack(settings))
      settings[#settings + 1] = "zero=3"
      local shared, own, came, early = ahead(n, unpack(settings))
      assert.equal(plain, shared, table.concat(settings, " "))
      assert.equal(sum, own, table.concat(settings, " "))
      return came, early
    end
    -- 8 units forward and 6 backward, the first of them when it is needed
    assert.same({ { 14, 14, 14 }, { 0, 13, 13 } }, { compare(2, "steps=3", "order=same") })
    local came, early = compare(3, "precision=bf16")
    assert.is_true(early[2] < came[2] - 1 and early[4] < came[4] - 1)
    -- the third time that the three orders follow each other, only the first unit is not expected
    for step = 7, 9 do assert.equal(came[step] - 1, early[step]) end
    compare(2, "checkpoint=true", "precision=fp16")
    compare(4, "evaluate=1")
    compare(2, "precision=fp8_block", "evaluate=2", "checkpoint=true")
    compare(2, "precision=fp8_delayed")
    local two = { ahead(2, "accumulate=3", "zero=2", "evaluate=2") }
    local three = { ahead(2, "accumulate=3", "zero=3", "evaluate=2") }
    assert.same({ two[1], two[2] }, { three[1], three[2] })
  end)

  it("end when a rank dies, fails or uses other weights, while weights are on their way", function()
    for name, case in pairs { dies = { "die_step=4" }, raises = { "raise_step=4" },
      differs = { "odd_step=4" }, alone = { "other_step=4" } } do
      for _, order in ipairs { "same", "changes" } do
        local from = require("engine.base.ffi").C.eng_clock()
        local result = run(3, "spec/dist/ahead.lua", { "zero=3", "timeout=2", "order=" .. order,
          unpack(case) }, 40)
        assert.are_not.equal(0, result.code, name)
        assert.is_true(require("engine.base.ffi").C.eng_clock() - from < 30, name)
        assert.matches("\n4 [^\n]*\n$", "\n" .. result.out)
        if name == "raises" then
          assert.matches("this rank has had enough", result.err, 1, true)
        elseif name ~= "dies" then
          assert.truthy(result.err:find("zero=3: the ranks used different weights", 1, true)
            or result.err:find("waited 2 s for each other at different places (rank 0: the " ..
              "weights of the unit of blocks.", 1, true), result.err)
        end
      end
    end
  end)

  it("train in lagged mode as without it", function()
    local function compare(n, zero, other, ...)
      local one = told(n, "mode=lagged", "zero=" .. zero, ...)
      for stage = other, 3 do
        local shared = told(n, "mode=lagged", "zero=" .. stage, ...)
        assert.same(one[1].steps, shared[1].steps, table.concat({ stage, ... }, " "))
        assert.equal(one[1].weights, shared[1].weights)
      end
    end
    compare(2, 0, 1, "precision=fp16", "policy=dynamic:init_scale=2^27", "clip=0.5")
    compare(3, 2, 3, "precision=bf16", "accumulate=2")   -- both reduce every micro-batch
    compare(4, 0, 3, "precision=fp16", "wire=fp8")
  end)

  it("return the memory of the other weights to the system", function()
    if helper.sanitized then return end
    local function most(zero)
      local mib = 0
      for _, rank in ipairs(told(2, "zero=" .. zero, "width=384", "layers=6", "steps=3",
        "precision=bf16", "resident=true", "bucket=0.2")) do
        mib = math.max(mib, rank.resident or 0)
      end
      return mib
    end
    local two, three = most(2), most(3)
    -- 10.8 million weights take 62 MiB, and a rank returns half of that, less one block
    assert.is_true(two == 0 or two - three > 20, two .. " " .. three)
  end)

  it("train experts that are divided among ranks, and ranks that use different experts",
    function()
      for _, case in ipairs { { 2, "over=-1", "one=2" }, { 4, "over=2", "precision=fp16" } } do
        local lines = {}
        for zero = 0, 3, 3 do
          local result = run(case[1], "spec/dist/experts.lua", { "hidden=64", "steps=3",
            "zero=" .. zero, case[2], case[3] })
          assert.equal(0, result.code, result.out .. result.err)
          lines[zero] = { result.out:match("(.-)\n[sc]%l"),
            result.err:match("rank 0: common [^\n]*") }
          assert.truthy(lines[zero][1] and lines[zero][2])
        end
        assert.same(lines[0], lines[3])
      end
    end)

  it("resume killed jobs with any number of ranks", function()
    local settings = { "precision=fp16", "dropout=0.1", "zero=3", "width=64" }
    local whole, weights = job(4, "steps=6", unpack(settings))
    assert.equal(6, #whole)
    local path = "run=" .. folder .. "/run"
    local _, _, result = job(4, "steps=6", path, "checkpoint_every=2", "die_rank=2",
      "trouble_step=4", unpack(settings))
    assert.are_not.equal(0, result.code)
    for name, case in pairs { same = { 4, "zero=3" }, without = { 4, "zero=0" },
      half = { 2, "zero=3" } } do
      helper.shell(("cp -r %s/run %s/%s"):format(folder, folder, name))
      local rest, sum = job(case[1], "steps=6", "precision=fp16", "dropout=0.1", "width=64",
        case[2], ("run=%s/%s"):format(folder, name), "resume=auto")
      assert.equal(2, #rest, name)
      if case[1] == 4 then
        assert.same({ unpack(whole, 5) }, rest)
        assert.equal(weights, sum)
      end
      for i = 1, 2 do                  -- other numbers of ranks sum in another order
        local a, b = whole[4 + i]:match("^%d+ (%S+)"), rest[i]:match("^%d+ (%S+)")
        assert.near(tonumber(a), tonumber(b), 1e-3, name)
      end
    end
  end)

  it("attribute an inf to its rank and tensor, and trap it", function()
    local plain, weights = job(2, "plant=inf", "plant_rank=1", "precision=fp16")
    local run_path = folder .. "/run"
    local lines, sum = job(2, "plant=inf", "plant_rank=1", "precision=fp16", "zero=3",
      "run=" .. run_path)
    assert.same(plain, lines)
    assert.equal(weights, sum)
    assert.matches("skip", lines[3])
    local found = events(run_path, "overflow")
    assert.equal(1, #found)
    assert.equal(2, found[1].step)
    assert.matches("inf from rank 1, first in blocks.2.mlp.up.weight", found[1].text, 1, true)
    local traps = {}
    for zero = 0, 3, 3 do
      local path = folder .. "/trap" .. zero
      told(2, "policy=dynamic:init_scale=2^27", "precision=fp16", "trap=overflow", "zero=" .. zero,
        "run=" .. path, "steps=3")
      traps[zero] = events(path, "trap")
    end
    assert.matches("first inf in backward of", traps[0][1].text, 1, true)
    assert.same(traps[0], traps[3])
  end)

  it("run reference backwards and go back to a checkpoint as without ZeRO", function()
    local plain = told(2, "policy=norm_ratio:ref_every=2", "precision=fp16")
    local shared = told(2, "policy=norm_ratio:ref_every=2", "precision=fp16", "zero=3")
    assert.are_not.equal("nan", plain[1].steps[1][4])
    assert.same(plain[1].steps, shared[1].steps)
    assert.equal(plain[1].weights, shared[1].weights)
    local back = helper.write(folder .. "/back.lua", [[return { name = "back", doc = "d",
      options = {}, init = function() return { scale = 1 } end,
      decide = function(s, record)
        return { scale = 1, action = record.step == 3 and "rollback" or "step", back = 1 }
      end }]])
    local lines, sums = {}, {}
    for zero = 0, 3, 3 do
      lines[zero], sums[zero] = job(2, "policy=" .. back, "zero=" .. zero, "checkpoint_every=2",
        "run=" .. folder .. "/back" .. zero)
      assert.equal(1, #events(folder .. "/back" .. zero, "rollback"))
    end
    assert.same(lines[0], lines[3])
    assert.equal(sums[0], sums[3])
  end)

  it("quantize the weights of a checkpoint to which an FP8 run goes back", function()
    local script = helper.write(folder .. "/again.lua", [[
      local engine = require "engine"
      local cfg = engine.config { zero = 0, run = "" }
      engine.seed(5)
      local model = engine.nn.gpt { vocab = 256, context = 8, width = 32, heads = 2, layers = 1 }
      local losses = {}
      engine.trainer { model = model, zero = cfg.zero, run = cfg.run, checkpoint_every = 3,
        log = "quiet", steps = 7, data = engine.data.text { path = "README.md", batch = 2,
        context = 8, seed = 3 },
        optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = "fp8_current" }),
        policy = { file = "back.lua", source = "return { init = function() return { scale = 1 } " ..
          "end, decide = function(s, r) return { scale = 1, action = r.step == 4 and " ..
          "'rollback' or 'step', back = 0, skip = 0 } end }" },
        on_step = function(_, r) losses[#losses + 1] = ("%.17g"):format(r.loss) end }:run()
      if engine.ranks.rank() == 0 then print(table.concat(losses, " ")) end]])
    local said = {}
    for zero = 0, 3, 3 do
      local result = run(2, script, { "zero=" .. zero, "run=" .. folder .. "/again" .. zero })
      assert.equal(0, result.code, result.err)
      said[zero] = result.out
    end
    assert.equal(said[0], said[3])
    local losses = {}
    for loss in said[3]:gmatch "%S+" do losses[#losses + 1] = loss end
    -- steps 3 and 4, whose update is dropped, and both again after the checkpoint of 3 steps
    assert.same({ losses[4], losses[5] }, { losses[6], losses[7] })
  end)

  it("give whole weights only in trainer:whole, and refuse calls that need them", function()
    local result = run(2, "spec/dist/whole.lua", { "folder=" .. folder })
    assert.equal(0, result.code, result.out .. result.err)
    local saved = require("engine").load(folder .. "/model.safetensors")
    assert.equal(0.5, saved["blocks.1.mlp.up.weight"]:mean():item())
  end)

  it("use the divided weights of two models in one operation", function()
    local script = helper.write(folder .. "/models.lua", [[
      local engine = require "engine"
      local M_ffi = require "engine.base.ffi"
      local C, ffi, check = M_ffi.C, M_ffi.ffi, M_ffi.check
      local N, weights = 2 ^ 16, {}
      for i = 1, 2 do
        local w = engine.full({ N }, i + 1):keep():requires_grad(true)
        local optimizer, out = engine.optim.sgd({ w }, { lr = 0 }), ffi.new("eng_parallel *[1]")
        local units = ffi.new "int32_t[1]"
        check(C.eng_parallel_new(out, optimizer.params, engine.ranks.world(),
          ffi.new("eng_parallel_options", { bucket = 2 ^ 20, zero = 3, units = units })))
        check(C.eng_parallel_leave(out[0]))
        weights[i] = { tensor = w, optimizer = optimizer, parallel = out }
      end
      local product = weights[1].tensor * weights[2].tensor
      assert(product:sum():item() == 6 * N, "sum " .. product:sum():item())]])
    local result = start.run(2, script)
    assert.equal(0, result.code, result.err)
  end)

  it("name the ranks that use different layers", function()
    local result = run(3, "spec/dist/zero.lua", { "told=" .. folder .. "/told", "model=forked",
      "zero=3", "timeout=3" })      -- the start of the job must take less than the timeout
    assert.are_not.equal(0, result.code)
    assert.matches("waited 3 s for each other at different places (rank 0: the weights " ..
      "of the unit of first.weight; rank 1: the weights of the unit of ", result.err, 1, true)
  end)
end)
