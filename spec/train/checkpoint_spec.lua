-- Activation checkpointing: the same losses, gradients and random numbers to the last bit, with
-- less kept for the backward pass.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"
local C, ffi, check = M_ffi.C, M_ffi.ffi, M_ffi.check
local nn = engine.nn

local function bits(x)
  local memory, n = x:read()
  return ffi.string(memory, n * C.eng_dtype_size(M_ffi.dtype[x.dtype]))
end

local MODELS = {
  gpt = function() return nn.gpt { vocab = 64, context = 32, width = 64, heads = 2, layers = 3,
    dropout = 0.1, attention_dropout = 0.1 } end,
  llama = function() return nn.llama { vocab = 64, context = 32, width = 64, heads = 4,
    kv_heads = 2, layers = 3, hidden = 96, dropout = 0.1, qk_norm = 1e-6, window = 24 } end,
  mixture = function() return nn.llama { vocab = 64, context = 32, width = 64, heads = 4,
    kv_heads = 2, layers = 2, hidden = 64, experts = 4 } end,
  bert = function() return nn.bert { vocab = 64, context = 32, width = 64, heads = 4, layers = 3,
    dropout = 0.1 } end,
}

-- Three steps of two micro-batches: the bits of all losses and gradients, the position in the
-- random numbers, and the bytes that the tape keeps.
local function run(make, precision, checkpoint, loss_of)
  engine.seed(3)
  local model, all = make(), {}
  local optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = precision })
  if checkpoint then model:checkpoint(checkpoint) end
  optimizer:accumulates(true)
  local fp8, kept = ffi.new("int64_t[1]"), 0
  for step = 0, 2 do
    check(C.eng_step_begin())
    optimizer:zero_grad()
    if optimizer.fp8 then optimizer.fp8:begin(step) end
    for _ = 1, 2 do
      local x = engine.rand { 2, 32 } * 63
      x = x:to("i32")
      local loss = engine.autocast(optimizer.precision, function()
        return (loss_of or model.loss)(model, x, x:to("i64"))
      end)
      kept = tonumber(C.eng_tape_bytes(fp8))
      loss:backward { scale = 256 }
      all[#all + 1] = bits(loss)
    end
    for _, p in ipairs(model:parameters()) do
      local gradient = p.tensor.grad
      all[#all + 1] = gradient and bits(gradient) or "none"
    end
    optimizer:step { gradient_factor = 1 / 256 }
    if optimizer.fp8 then optimizer.fp8:measure(step, 1) end
    check(C.eng_step_end())
  end
  all[#all + 1] = tostring(require("engine.base.random").place().counter)
  return all, kept
end

local function same(make, precision, loss_of)
  local want, more = run(make, precision, false, loss_of)
  local got, less = run(make, precision, "block", loss_of)
  assert.equal(#want, #got)
  for i = 1, #want do assert(want[i] == got[i], "result " .. i .. " differs") end
  return less / more
end

describe("activation checkpointing gives the same bits", function()
  local stochastic = { name = "stochastic", base = "fp8_current",
    fp8 = { x = { stochastic = true }, w = { stochastic = true }, dy = { stochastic = true } } }
  for _, precision in ipairs { "fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_rowwise",
    "fp8_block", "fp8_block_te", "mxfp8", "mxfp4_tseng", "mxfp4_quartet", "mxfp4_tetrajet_q_ema",
    "nvfp4", "nvfp4_quartet2", "fp4_microsoft", stochastic } do
    for _, name in ipairs { "gpt", "llama" } do
      local text = type(precision) == "table" and precision.name or precision
      it(("for nn.%s in %s"):format(name, text), function()
        local share = same(MODELS[name], precision)
        assert(share < 0.55, share)
      end)
    end
  end
  it("for nn.bert", function() assert.is_true(same(MODELS.bert, "bf16") < 0.5) end)
  it("for mixtures of experts, with their balance in the loss", function()
    assert.is_true(same(MODELS.mixture, "bf16", function(model, x, y)
      return model:loss(x, y) + model.blocks[2].mlp.balance * 0.01
    end) < 0.6)
  end)
  it("for a model with adapters", function()
    same(function()
      return nn.lora(MODELS.llama(), { match = { "attn", "mlp" }, rank = 2, dropout = 0.1 })
    end, "bf16")
  end)
  it("with gradients written in Lua", function()
    local Net = nn.class("net")
    local cube = engine.custom {
      forward = function(saved, x) saved.x = x; return x * x * x end,
      backward = function(saved, dy) return dy * saved.x * saved.x * 3 end,
    }
    function Net:init()
      self.embed = nn.embedding(64, 16)
      local list = {}
      for i = 1, 3 do list[i] = nn.sequential { nn.linear(16, 16), nn.dropout(0.2),
        nn.linear(16, 16) } end
      for _, block in ipairs(list) do
        local plain = block.forward
        rawset(block, "forward", function(m, x) return cube(plain(m, x)):permute(1, 3, 2)
          :reshape(2, 32, 16):tanh() end)
      end
      self.blocks = nn.list(list)
    end
    function Net:forward(x)
      x = self.embed(x)
      for _, block in ipairs(self.blocks) do x = x + block(x) end
      return x
    end
    function Net:loss(x, y) return (self(x) * y:to("f32"):unsqueeze(3)):mean() end
    same(Net, "fp32")
  end)
end)

describe("a checkpointed module", function()
  local function blocks(forward)
    local Net = nn.class("net")
    function Net:init() self.blocks = nn.list { nn.linear(4, 1024) } end
    function Net:forward(x) return self.blocks[1](x) end
    local net = Net()
    rawset(net.blocks[1], "forward", forward)
    net:checkpoint "block"
    return net
  end

  it("allows two backward passes over a retained tape", function()
    local net = blocks(function(m, x) return x:linear(m.weight):exp():tanh() end)
    local loss, weight = net(engine.randn { 8, 4 }):sum(), net.blocks[1].weight
    loss:backward { retain = true }
    local once = bits(weight.grad)
    net:zero_grad()
    loss:backward()
    assert.equal(once, bits(weight.grad))
    net:checkpoint(false)
    net:zero_grad()
  end)

  it("keeps only its results", function()
    local inner
    local net = blocks(function(m, x) inner = x:linear(m.weight); return inner:exp() end)
    local y = net(engine.randn { 8, 4 })
    assert.has_error(function() return inner:sum() end)
    local _, message = pcall(inner.sum, inner)
    assert.matches("computed inside a checkpointed module, which keeps only its results", message,
      1, true)
    y:sum():backward()
  end)

  it("must find its inputs unchanged, or backward says that one was modified", function()
    local net = blocks(function(m, x) return x:linear(m.weight):exp() end)
    local x = engine.randn { 8, 4 }
    local loss = net(x):sum()
    x:fill(1)
    assert.error_matches(function() loss:backward() end,
      "recomputing linear of a checkpointed module: .* was modified after an operation read it")
  end)

  it("records nothing without gradients, and after an error works as before", function()
    local fails = true
    local net = blocks(function(m, x)
      local y = x:linear(m.weight)
      if fails then error("no luck") end
      return y:exp()
    end)
    local x = engine.randn { 8, 4 }
    local function fail() assert.error_matches(function() net(x) end, "In blocks.1: no luck") end
    for _, attempt in ipairs { fail, coroutine.wrap(fail) } do
      attempt()
      assert.is_true(C.eng_checkpoint_begin())
      C.eng_checkpoint_end(nil, -1)
    end
    fails = false
    assert.equal(8, engine.scope(function() return net(x):size(1) end))
    net(x):sum():backward()
    assert.equal(4, net.blocks[1].weight.grad:size(2))
    net:zero_grad()
  end)

  it("is chosen by \"block\", or by a pattern of module paths", function()
    local model = MODELS.bert()
    assert.has_error(function() model:checkpoint(true) end,
      'checkpoint: expected "block", a pattern of module paths or false, got true')
    assert.error_matches(function() model:checkpoint "^layer" end,
      "checkpoint: bert has no module whose path matches '%^layer'; print%(model%) shows")
    assert.error_matches(function() nn.linear(2, 2):checkpoint "block" end,
      "checkpoint: linear has no module in a list `blocks`")
    model:checkpoint "mlp$"
    assert.is_true(rawget(model.blocks[2].mlp, "_checkpoint"))
    model:checkpoint "block"
    assert.is_nil(rawget(model.blocks[2].mlp, "_checkpoint"))
    assert.is_true(rawget(model.blocks[2], "_checkpoint"))
    assert.has_error(function()
      engine.trainer { model = model, data = { next = function() end }, steps = 1,
        optimizer = engine.optim.adamw(model), checkpoint = 4 }
    end)
  end)
end)

describe("a run with checkpoint=block", function()
  local function tables(settings, n)
    local folder = helper.folder()
    local words = { "run=" .. folder .. "/r", unpack(settings) }
    local result = n and require("spec.dist.start").run(n, "spec/train/modes_job.lua", words,
      { limit = 120 }) or helper.run { "spec/train/modes_job.lua", unpack(words) }
    assert(result.code == 0, result.err)
    local h = engine.history.open(folder .. "/r")
    local all = { steps = h:query [[SELECT step, updates, loss, scale, action, overflow, inf, nan,
      zeros, underflow, amax, norm, first_bad, hex(hist) FROM steps ORDER BY step, attempt]],
      tensors = h:query "SELECT step, hex(stats) FROM tensor_stats ORDER BY step",
      events = h:query [[SELECT step, kind, text FROM events WHERE kind NOT IN ("checkpoint",
        "start", "end", "retired") ORDER BY step, kind]] }
    if #h:query "SELECT 1 FROM sqlite_master WHERE name = 'fp8'" > 0 then
      all.fp8 = h:query "SELECT * FROM fp8 ORDER BY step, site, role"
    end
    h:close()
    helper.remove(folder)
    return all
  end
  local function alike(settings, n)
    local want = tables(settings, n)
    settings[#settings + 1] = "checkpoint=block"
    assert.same(want, tables(settings, n))
    return want
  end

  it("writes the same history, with an overflow and its origin", function()
    local all = alike { "accumulate=3", "dropout=0.1", "clip=0.5", "first=4", "last=4",
      "trap=overflow" }
    assert.equal("skip", all.steps[5].action)
  end)
  it("writes the same history in lagged mode", function()
    alike { "mode=lagged", "accumulate=2", "dropout=0.1", "first=4", "last=4" }
  end)
  it("writes the same meters of FP8 layers", function()
    alike { "precision=fp8_current", "sample=2", "policy=static:loss_scale=1" }
  end)
  it("writes the same history on two ranks, also with divided gradients", function()
    for _, zero in ipairs { "zero=0", "zero=2" } do
      alike({ "dropout=0.1", "first=4", "last=4", "accumulate=2", zero }, 2)
    end
  end)
end)
