-- Why a step overflowed: the first tensors with inf and with nan, the operation and module in which
-- each began, the pass (forward or backward), and the advice that a stuck run prints.
local engine = require "engine"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"
local C = M_ffi.C

local TEXT = require("engine.report.lab").text(40000)
local nn = engine.nn

local folder
before_each(function() folder = helper.folder() end)
after_each(function() helper.remove(folder) end)

-- If set, a function that a test applies to the hidden features of Net.
local between

local Net = nn.class "Net"
function Net:init()
  self.wte = nn.embedding(256, 16)
  self.up = nn.linear(16, 32)
  self.down = nn.linear(32, 256)
end
function Net:forward(x)
  local h = self.up(self.wte(x)):gelu()
  if between then h = between(h) end
  return self.down(h)
end
function Net:loss(x, y) return engine.cross_entropy(self(x), y) end

local function job(options)
  engine.seed(5)
  local model = options.model or Net()
  options.model = nil
  local o = { model = model, data = engine.data.text { text = TEXT, batch = 4, context = 16,
    seed = 9 },
    optimizer = engine.optim.adamw(model, { lr = 1e-3, precision = options.precision or "fp16" }),
    steps = 3, log = "quiet", run = folder .. "/run", trap = "overflow" }
  for key, value in pairs(options) do o[key] = value end
  return engine.trainer(o)
end

local function events(kind) return helper.history(folder .. "/run", "events", kind) end

describe("an overflow", function()
  after_each(function() between = nil end)

  it("in the backward pass is traced to the operation whose gradient overflowed", function()
    job { policy = "dynamic:init_scale=2^30" }:run()
    local text = events("trap")[1].text
    assert.matches("first inf in backward of cross_entropy (cross_entropy_grad), outside of " ..
      "every module: f16 [4 x 16 x 256]", text, 1, true)
    assert.matches("first nan in backward of linear (matmul), in down: ", text, 1, true)
    assert.matches("down.weight f16 [256 x 32] amax ", text, 1, true)
    assert.is_nil(text:find("forward"))
  end)

  it("in the forward pass is traced to its module, shapes and magnitudes", function()
    between = function(h) return h * 65504 * 64 end
    job { policy = "dynamic:init_scale=1" }:run()
    local found = require("cjson").decode(events("trap")[1].data)
    assert.equal("affine", found.inf.forward.op)
    assert.equal("Net", found.inf.forward.module)
    assert.equal("f16 [4 x 16 x 32]", found.inf.forward.outputs[1].text)
    assert.is_true(found.inf.forward.inputs[1].amax > 0)
    assert.equal("linear", found.nan.forward.op)       -- inf times weights of both signs
    assert.equal("down", found.nan.forward.module)
    assert.equal("down.weight", found.nan.forward.inputs[2].name)
  end)

  it("tells a nan from the harmless inf before it", function()
    between = function(h) return h + engine.zeros(1):log() * 0 end
    job { precision = "fp32" }:run()
    local text = events("trap")[1].text
    assert.matches("first inf in log, in Net: f32 [1] all inf, from f32 [1] amax 0", text, 1, true)
    assert.matches("first nan in affine, in Net: f32 [1] all nan", text, 1, true)
  end)

  it("from a weight is reported with the weight's name", function()
    local model = Net()
    model.up.weight:fill(1 / 0)
    job { model = model, precision = "fp32", steps = 10 }:run()
    assert.matches("first nan in linear, in up: .*up.weight f32 %[32 x 16%] all inf",
      events("trap")[1].text)
    assert.matches("the weight up.weight has inf or nan", events("stuck")[1].text, 1, true)
  end)

  it("from the data is reported as such", function()
    between = function(h) return h + engine.full({ 32 }, 1 / 0) end
    job { precision = "fp32", steps = 1 }:run()
    assert.matches("inf entered cast, in Net, through its input 1, which no operation made " ..
      "(data, a mask or a constant)", events("trap")[1].text, 1, true)
  end)

  it("names the first parameter with inf, and separately the first with nan", function()
    job { policy = "dynamic:init_scale=2^20", trap = "" }:run()
    local event = events("overflow")[1]
    local data = require("cjson").decode(event.data)
    assert.is_true(data.inf > 0)
    assert.is_string(data.first_inf)
    assert.matches(data.inf .. " inf, first in " .. data.first_inf .. (data.last_inf ~=
      data.first_inf and ", last in " .. data.last_inf or ""), event.text, 1, true)
    if data.nan == 0 then assert.is_nil(data.first_nan) else assert.is_string(data.first_nan) end
    assert.equal(0, #events("trap"))
  end)

  it("in a custom gradient and in the second of two micro-batches is found", function()
    local explode = engine.custom { forward = function(_, x) return x * 1 end,
      backward = function(_, dy) return dy * 1e30 end }
    between = explode
    job { policy = "dynamic:init_scale=1", accumulate = 2 }:run()
    assert.matches("first inf in backward of a custom operation (affine), in Net",
      events("trap")[1].text, 1, true)
  end)
end)

describe("tracing an overflow", function()
  it("leaves no trace in the run: weights, losses and random numbers stay the same", function()
    local sums = {}
    for i, trap in ipairs { "overflow", "" } do
      engine.seed(5)
      local model = nn.gpt { vocab = 256, context = 16, width = 32, heads = 2, layers = 1,
        dropout = 0.2 }
      local losses = {}
      local trainer = job { model = model, trap = trap, run = folder .. "/" .. i, steps = 8,
        accumulate = 2, policy = "dynamic:init_scale=2^20",
        on_step = function(_, record) losses[#losses + 1] = ("%.17g"):format(record.loss) end }
      trainer:run()
      assert.is_true(trainer.skipped > 1 and trainer.updates > 1)
      sums[i] = table.concat(losses, " ") ..
        tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0))
    end
    assert.equal(sums[2], sums[1])
  end)

  it("reports its own failure and does not end the run", function()
    local calls = 0
    local trainer = job { policy = "dynamic:init_scale=2^30", steps = 2,
      loss = function(model, batch)
      calls = calls + 1
      if calls == 2 then error("not again") end
      return model:loss(batch.x, batch.y)
    end }
    assert.equal(2, trainer:run().steps)
    assert.matches("could not be run again.*not again", events("trap")[1].text)
    assert.equal(0, C.eng_tape_length())
  end)

  it("reports a step that gives another result when it runs again", function()
    local factor = 1e30
    job { policy = "dynamic:init_scale=1", steps = 1, precision = "fp32",
      loss = function(model, batch)
      local loss = model:loss(batch.x, batch.y) * (factor * factor)
      factor = 1
      return loss
    end }:run()
    assert.matches("its computation is not deterministic", events("trap")[1].text)
  end)
end)

describe("a stuck run", function()
  it("gets advice when the policy ends it at its smallest scale", function()
    between = function(h) return h * 65504 * 64 end
    local summary = job { trap = "", steps = 40,
      policy = "deepspeed:init_scale=4,hysteresis=1" }:run()
    between = nil
    assert.matches("overflow at the smallest loss scale", summary.stopped)
    local text = events("stuck")[1].text
    assert.matches("first tensor with inf: .*; with nan: wte.weight", text)
    assert.matches("first inf in affine, in Net", text, 1, true)
    assert.matches("no loss scale can fix", text, 1, true)
    assert.matches("engine attach", text, 1, true)
  end)

  it("gets advice once when the scale stays the same", function()
    job { trap = "", steps = 25, policy = "static:loss_scale=2^30" }:run()
    local list = events("stuck")
    assert.equal(1, #list)
    assert.equal(9, list[1].step)
    assert.matches("10 overflows in a row, and the loss scale stays at 2^30", list[1].text,
      1, true)
    assert.matches("the backward pass overflows at scale 2^30; try a smaller loss_scale " ..
      "of policy static, or policy=dynamic", list[1].text, 1, true)
  end)

  it("continues at the smallest scale if the policy's option allows it", function()
    between = function(h) return h * 65504 * 64 end
    local summary = job { trap = "", steps = 14, on_lost = "continue",
      policy = "deepspeed:init_scale=2,hysteresis=1,raise_error_at_min_scale=false" }:run()
    between = nil
    assert.is_nil(summary.stopped)
    assert.equal(1, #events("stuck"))
  end)
end)
