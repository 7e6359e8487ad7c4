-- What only the emulated card (emulator/) can test: machines without a driver, a usable card or
-- enough memory, how often the host waits, and kernels whose result would depend on the order of
-- threads or on missing waits.
-- Run by spec/cuda/run.lua; skipped on a real card.
local helper = require "spec.helper"

local PLUGIN = os.getenv("ENGINE_CUDA_PLUGIN") or ""
if not os.getenv("ENGINE_TEST_DEVICE") or not PLUGIN:find("emulated_card", 1, true) then return end

local MPIRUN = "mpirun --allow-run-as-root --oversubscribe"
local JOB = "examples/gpt.lua device=cuda layers=1 width=32 heads=2 batch=2 context=16 sample=0 " ..
  "log=json "

--- Runs the engine with settings of the emulated card and other variables.
local function engine(settings, arguments, variables)
  return helper.shell(("env -u ENGINE_TEST_DEVICE ENGINE_EMULATED_CARD=%s %s %s %s 2>&1")
    :format(settings, variables or "", helper.quote(helper.engine), arguments))
end

--- Losses and norms of a job as text: equal text means equal bits.
local function numbers(settings, arguments, variables)
  local ran = engine(settings, JOB .. arguments, variables)
  assert(ran.code == 0, ran.out)
  local lines = {}
  for loss, norm in ran.out:gmatch('"loss":([^,]+),.-"norm":([^,]+)') do
    lines[#lines + 1] = loss .. " " .. norm
  end
  assert(#lines > 0, ran.out)
  return table.concat(lines, "\n")
end

local function refused(ran, ...)
  assert.equal(1, ran.code)
  for _, text in ipairs { ... } do
    assert(ran.out:find(text, 1, true), "expected '" .. text .. "' in\n" .. ran.out)
  end
  assert.falsy(ran.out:find("traceback", 1, true))
end

describe("a machine or card with limits", function()
  it("without a driver or card, or with too old a one, is refused in one line", function()
    refused(engine("sm=90", JOB, "ENGINE_EMULATED_DRIVER=0"),
      "this machine has no NVIDIA driver; hint: device=cpu")
    refused(engine("sm=90", JOB, "ENGINE_EMULATED_DRIVER=12040"),
      "the driver supports CUDA 12.4, but this build needs 1",
      "hint: a newer driver, or device=cpu")
    refused(engine("sm=90", JOB, "ENGINE_EMULATED_DEVICES=0"),
      "no device", "CUDA_VISIBLE_DEVICES hides them, or use device=cpu")
    refused(engine("sm=75", JOB), "has compute capability 7.5, but the kernels need 8.0 or later")
  end)

  it("with too little memory makes the job print its arenas and what to change", function()
    local large = "width=256 layers=4 heads=4 batch=32 context=128 steps=2"
    refused(engine("memory=150", JOB .. large), "out of memory: the cuda", "arena needs",
      "the card has 150.0 MiB", "cuda parameters", "cuda step",
      "hint: use a smaller batch or context, accumulate=N")
  end)

  it("with little free memory takes algorithms without a workspace", function()
    for memory, n in pairs { [40] = 4, [24] = 1200 } do   -- 1200 x 1200 in four parts needs 23 MB
      local script = [[-e 'local e = require "engine" e.device("cuda") local x = e.ones(%d, 4)
        print(x:matmul(x:transpose()):sum():item())']]
      local ran = engine("memory=" .. memory, script:format(n))
      assert(ran.code == 0 and ran.out == ("%d\n"):format(4 * n * n), ran.out)
    end
  end)

  it("with little pinned memory copies in more pieces", function()
    local send = [[-e 'local e = require "engine" e.seed(3)
      local small, large = e.rand(1000), e.rand(5000000)
      small:to("cuda") local there = large:to("cuda"):to("cpu")
      print((there - large):abs():max():item())']]
    for _, pinned in ipairs { 5, 20, 200 } do   -- segments of 1 MiB, of 4 MiB, and of any size
      local ran = engine("pinned=" .. pinned, send)
      assert(ran.code == 0 and ran.out == "0\n", pinned .. ": " .. ran.out)
    end
  end)

  it("with an invalid local rank is refused", function()
    for _, rank in ipairs { "-1", "one" } do
      refused(engine("sm=90", JOB, "LOCAL_RANK=" .. rank),
        ("LOCAL_RANK: expected the local rank of this process, an integer from 0 to 999999999, " ..
          "got '%s'"):format(rank))
    end
  end)

  it("without tensor cores for a recipe is refused, or runs the formula on request", function()
    refused(engine("sm=80", JOB .. "precision=fp8_delayed"),
      "blocks.1.attn.qkv: forward: this card (emulated card, sm_80) has no tensor cores for FP8",
      "compute capability 8.9", "ENGINE_FP8_FORMULA=1")
    refused(engine("sm=89", JOB .. "precision=fp8_block"), "scales by row or block", "fp8_current")
    local job, formula = "steps=2 precision=fp8_block", "ENGINE_FP8_FORMULA=1"
    assert.equal(numbers("sm=90", job, formula), numbers("sm=80", job, formula))
  end)
end)

describe("a Blackwell card", function()
  -- How often a job of 2 steps launched a kernel.
  local function launches(settings, arguments, kernel, variables)
    local trace, n = helper.folder() .. "/trace", 0
    local ran = engine(settings .. ",trace=" .. trace,
      JOB .. "width=64 batch=4 steps=2 sample=0 " .. arguments, variables)
    assert(ran.code == 0, ran.out)
    for line in io.lines(trace) do
      if line:find("launch " .. kernel, 1, true) then n = n + 1 end
    end
    return n
  end

  it("multiplies codes of NVFP4 and MXFP8 by cuBLASLt: three products of four layers", function()
    for _, recipe in ipairs { "nvfp4", "mxfp8" } do
      local job = "precision=" .. recipe
      assert.equal(2 * 3 * 4, launches("sm=100", job, "tile_scales"))
      assert.equal(0, launches("sm=90", job, "tile_scales"))
      assert.equal(0, launches("sm=100", job, "tile_scales", "ENGINE_FP8_FORMULA=1"))
      assert.equal(numbers("sm=100", job .. " width=64 batch=4 steps=2"),
        numbers("sm=100", job .. " width=64 batch=4 steps=2", "ENGINE_FP8_FORMULA=1"))
    end
    assert.equal(0, launches("sm=100", "precision=mxfp4", "tile_scales"))
  end)
end)

describe("the host", function()
  -- The waits of a job of 12 steps, from the trace: for each record that the host waited for, the
  -- number of tasks queued after it; for each step, how often the host waited for anything else.
  local function waits(arguments, records, job)
    local trace = helper.folder() .. "/trace"
    local ran = engine("trace=" .. trace, (job or JOB) .. " steps=12 " .. arguments)
    assert(ran.code == 0, ran.out)
    local behind, others = {}, { 0 }
    for line in io.lines(trace) do
      local n = line:match("^wait event, (%d+) tasks after it")
      if n then behind[#behind + 1] = tonumber(n)
      elseif line:find("launch sum_up", 1, true) then others[#others + 1] = 0
      elseif line == "wait stream" or line:find("pageable", 1, true) then
        others[#others] = others[#others] + 1
      end
    end
    if records then assert.equal(records, #behind) end
    return behind, others
  end
  local NONE = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

  it("waits for the card once a step, for the record", function()
    for _, precision in ipairs { "fp32", "fp16" } do
      local _, others = waits("precision=" .. precision, 12)
      assert.same(NONE, others)
    end
  end)

  -- Meters (in the first step) and delayed scaling (in each step) wait for the stream, so the
  -- record that follows is ready. Waits of the first step after its record count in others[2].
  it("in FP8 also waits for meters and the amaxes of delayed scaling, nothing else", function()
    for precision, each in pairs { fp8_block = 0, fp8_current = 0, fp8_delayed = 2 } do
      local _, others = waits("precision=" .. precision, each == 0 and 11 or 0)
      assert(others[1] > 2, "the first step has meters")
      for i = 2, 12 do
        assert.equal(i == 2 and others[2] or each, others[i], precision .. ", step " .. i)
      end
    end
  end)

  it("in lagged mode never waits for the step just queued", function()
    local behind, others = waits("mode=lagged", 12)
    assert.same(NONE, others)
    -- the next step is queued after the record; the last step has none after it
    for i = 1, 11 do assert(behind[i] > 50, "step " .. i .. ": " .. behind[i]) end
  end)

  it("does not wait after the first update, even if the optimizer treats it specially", function()
    local folder = helper.folder()
    local job = helper.write(folder .. "/job.lua", [[
      local engine = require "engine"
      local cfg = engine.config { steps = 12 }
      local model = engine.nn.gpt { vocab = 256, context = 16, width = 32, heads = 2, layers = 1 }
      engine.trainer { model = model, steps = cfg.steps, log = "quiet", mode = "lagged",
        data = engine.data.text { text = ("some text "):rep(50), batch = 2, context = 16 },
        optimizer = engine.optim.sgd(model, { lr = 1e-3, momentum = 0.9, dampening = 0.5 }),
      }:run()]])
    local _, others = waits("device=cuda", nil, job)
    for i = 4, 12 do assert.equal(0, others[i], "step " .. i) end
    helper.remove(folder)
  end)

  it("never waits for a captured step", function()
    local behind, others = waits("mode=lagged graph=true", 12)
    others[13] = others[13] - 1   -- one wait, when the graph is freed
    assert.same(NONE, others)
    for i = 1, 11 do assert(behind[i] > 10, "step " .. i .. ": " .. behind[i]) end
  end)
end)

describe("kernels", function()
  it("compute the same bits in any order of threads, run early or late", function()
    for _, job in ipairs { "precision=fp32 dropout=0.1", "precision=fp16 accumulate=2",
      "precision=fp8_block", "precision=bf16 mode=lagged graph=true" } do
      local want = numbers("order=forwards", "steps=3 " .. job)
      for _, settings in ipairs { "order=backwards", "order=shuffled,run=early" } do
        assert.equal(want, numbers(settings, "steps=3 " .. job))
      end
    end
  end)

  it("have the card's memory to themselves: the host never accesses it", function()
    assert.equal(numbers("closed=0", "steps=2"), numbers("closed=1", "steps=2"))
  end)

  it("give the same bits on cards with different capabilities", function()
    local job = "steps=3 precision=fp32"
    local want, got = numbers("sm=90", job), numbers("sm=80", job)
    assert.equal(want, got)
  end)

  local has_mpi = helper.shell("command -v mpirun").code == 0
  local on_ranks = has_mpi and it or pending
  on_ranks("of several ranks on one card train like one rank on all batches", function()
    local alone, job = {}, "steps=3 precision=fp32"
    for loss in numbers("sm=90", job .. " accumulate=2"):gmatch("(%S+) %S+") do
      alone[#alone + 1] = tonumber(loss)
    end
    for _, how in ipairs { "zero=0", "zero=1", "zero=2" } do
      local command = "env -u ENGINE_TEST_DEVICE FAKE_CARD=one %s -n 2 %s %s %s %s 2>&1"
      local ran = helper.shell(command:format(MPIRUN, helper.quote(helper.engine), JOB, job, how))
      assert(ran.code == 0, ran.out)
      local losses = {}
      for loss in ran.out:gmatch('"loss":([^,]+)') do losses[#losses + 1] = tonumber(loss) end
      assert.equal(#alone, #losses)
      for i, want in ipairs(alone) do
        local close = math.abs(losses[i] - want) < 1e-5
        assert(close, ("%s: step %d: %s, expected %s"):format(how, i, losses[i], want))
      end
    end
  end)
end)
