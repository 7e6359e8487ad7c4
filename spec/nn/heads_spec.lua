-- What the models' heads add: soft cap and z-loss in the fused cross entropy, against PyTorch's
-- numbers and the formula by hand; attention maps on request.
local engine = require "engine"
local helper = require "spec.helper"

local nn = engine.nn

-- PyTorch 2 in f64: y = c * tanh(x / c); cross_entropy(y, t, label_smoothing = s) +
-- z * logsumexp(y, -1)^2, mean over the rows whose target is not -100; and its gradient.
local LOGITS = { { 1, -2, 3.5, 0.25 }, { -8, 6, 0.5, 7 }, { 0, 0, 20, -20 }, { 1, 2, 3, 4 } }
local TARGETS = { 2, 1, 3, -100 }
local GOLDEN = {
  { options = { soft_cap = 0, z_loss = 0, label_smoothing = 0 }, loss = 13.8106984761434,
    gradient = {
      { 0.0243226490388345, 0.00121095339058401, -0.0370228083094223, 0.0114892058800038 },
      { 7.44623135364049e-08, -0.243784636065632, 0.000365965058345308, 0.243418596544973 },
      { 6.87051204647284e-10, 6.87051204647284e-10, 0.333333331959231, -0.333333333333333 },
      { 0, 0, 0, 0 } } },
  { options = { soft_cap = 0, z_loss = 0.1, label_smoothing = 0 }, loss = 29.3636276428761,
    gradient = {
      { 0.0419212288551923, 0.00208713508707833, 0.177371784020315, 0.0198021863609943 },
      { 1.83391153161813e-07, -0.112786346863018, 0.000901325125146207, 0.599508865643662 },
      { 3.43525602380287e-09, 3.43525602380287e-09, 1.66666666007098, -0.333333333333333 },
      { 0, 0, 0, 0 } } },
  { options = { soft_cap = 5, z_loss = 0, label_smoothing = 0 }, loss = 3.6771126834652,
    gradient = {
      { 0.0348725753270984, 0.00173136215851567, -0.0353377519624985, 0.0173198487665237 },
      { 3.33624063238668e-06, -0.0578599409471805, 0.00362335722993743, 0.040206608059913 },
      { 0.00222336281396396, 0.00222336281396396, 0.000441000565111084, -0.000446963404879083 },
      { 0, 0, 0, 0 } } },
  { options = { soft_cap = 30, z_loss = 0.01, label_smoothing = 0.1 }, loss = 13.0199810856346,
    gradient = {
      { 0.0180812409874463, -0.00698176526865853, 0.00865963498762322, 0.00415778410075518 },
      { -0.00776763570441005, -0.194561668181121, -0.00786299285071584, 0.252657127223866 },
      { -0.00833332184852574, -0.00833332184852574, 0.291588077490021, -0.203612245238581 },
      { 0, 0, 0, 0 } } },
}

local function rows_near(expected, got, within)
  for i, row in ipairs(expected) do
    for k, x in ipairs(row) do assert.near(x, got[i][k], within) end
  end
end

describe("a head", function()
  after_each(function() engine.end_step() end)

  for _, case in ipairs(GOLDEN) do
    local o = case.options
    it(("gives PyTorch's loss and gradient with soft_cap %g, z_loss %g, smoothing %g"):format(
      o.soft_cap, o.z_loss, o.label_smoothing), function()
      for dtype, within in pairs { f64 = 1e-12, f32 = 2e-6 } do
        local x = engine.tensor(LOGITS, dtype):requires_grad(true)
        local loss = engine.cross_entropy(x, engine.tensor(TARGETS, "i64"), o)
        assert.near(case.loss, loss:item(), within * 20)
        loss:backward()
        rows_near(case.gradient, x.grad:totable(), within)
        x:requires_grad(false)
      end
    end)
  end

  it("of every model has soft_cap and z_loss, in loss, forward and generate", function()
    engine.seed(3)
    local ids = engine.randint(0, 16, 2, 6):keep()
    for name, more in pairs { gpt = {}, llama = { kv_heads = 1, hidden = 32 }, bert = {} } do
      local options = { vocab = 16, context = 8, width = 16, heads = 2, layers = 1,
        soft_cap = 0.05, z_loss = 0.5 }
      for key, value in pairs(more) do options[key] = value end
      local model = nn[name](options)
      engine.begin_step()
      local capped, raw = model(ids), model(ids, { uncapped = true })
      assert.is_true(raw:abs():max():item() > 0.05 and capped:abs():max():item() <= 0.05)
      assert.near(0, (capped - (raw / 0.05):tanh() * 0.05):abs():max():item(), 1e-7)
      local lse = capped:exp():sum(-1):log()
      local by_hand = engine.cross_entropy(capped, ids):item() + 0.5 * lse:square():mean():item()
      assert.near(by_hand, model:loss(ids, ids):item(), 1e-5)
      assert.near(engine.cross_entropy(raw, ids):item(),
        model:loss(ids, ids, { soft_cap = 0, z_loss = 0 }):item(), 1e-6)
      engine.end_step()
      if model.generate then assert.equal(5, #model:generate({ 1, 2 }, 3)) end
      options.soft_cap = -1
      helper.refuses("expected soft_cap to be a number in 0..1e6, got -1", nn[name], options)
    end
  end)

  it("refuses wrong options, ids and targets in one line", function()
    local model = nn.gpt { vocab = 16, context = 8, width = 16, heads = 4, layers = 1 }
    local ids = engine.zeros(2, 4, "i32")
    local refuses = helper.refuses
    local TABLE = "gpt: expected a table of options, got "
    refuses(TABLE .. "a tensor", model.loss, model, ids, ids, ids)
    refuses(TABLE .. "5", model.loss, model, ids, ids, 5)
    refuses("gpt: expected targets, a tensor of ids, got nothing", model.loss, model, ids, nil,
      { mask = ids })
    refuses("gpt: unknown option 'maks'; did you mean 'mask'?", model.loss, model, ids, ids,
      { maks = ids })
    refuses("gpt: expected ids [rows x length], got [3]", model, engine.zeros(3, "i32"))
    for _, name in ipairs { "gpt", "llama", "bert" } do
      refuses("nn." .. name .. ": expected up to 16384 layers, got 1000000000", nn[name],
        { layers = 1e9 })
    end
  end)

  it("refuses soft_cap and z_loss out of range", function()
    local x, t = engine.zeros(2, 3), engine.zeros(2, "i64")
    for option, text in pairs { z_loss = "expected z_loss in 0..1e6, got -1",
      soft_cap = "expected soft_cap in 1e-3..1e6, or 0 for no cap, got -1" } do
      helper.refuses(text, engine.cross_entropy, x, t, { [option] = -1 })
    end
  end)
end)

describe("attention maps", function()
  after_each(function() engine.end_step() end)

  local function model_of(name, more)
    local options = { vocab = 16, context = 8, width = 16, heads = 4, layers = 2 }
    for key, value in pairs(more or {}) do options[key] = value end
    return nn[name](options)
  end

  it("come with the logits: softmax rows whose entropy is the fused kernel's", function()
    engine.seed(4)
    for name, more in pairs { gpt = { attention_dropout = 0.2 }, llama = { kv_heads = 2 },
      bert = {} } do
      local model = model_of(name, more):eval()
      engine.begin_step()
      local ids = engine.randint(0, 16, 3, 5)
      for _, block in ipairs(model.blocks) do block.attn.watch_entropy = true end
      local plain, none = model(ids)
      local logits, maps = model(ids, { attention_maps = true })
      assert.is_nil(none)
      assert.equal(0, (plain - logits):abs():max():item())
      assert.equal(2, #maps)
      for i, map in ipairs(maps) do
        assert.same({ 3, 4, 5, 5 }, map.shape)
        assert.near(0, (map:sum(-1) - 1):abs():max():item(), 1e-6)
        if name ~= "bert" then assert.equal(0, map:select(4, 5):slice(3, 1, 4):max():item()) end
        local entropy = -(map * (map + 1e-30):log()):sum(-1)
        assert.near(0, (entropy - model.blocks[i].attn.entropy):abs():max():item(), 1e-5)
      end
      local _, gone = model(ids)
      assert.is_nil(gone)
      engine.end_step()
    end
  end)

  it("reach the scale_loss method of a class through a trainer's loss function", function()
    local seen = {}
    engine.register_loss_scaler("by-entropy", { get_scale = function(self) return self.s or 8 end,
      update = function() end, scale_loss = function(self, loss, maps)
        local h = engine.no_grad(function()
          return -(maps[1] * (maps[1] + 1e-9):log()):sum(-1):mean():item() end)
        self.s = 8 * (1 + (1 - math.min(1, h)) * 2)
        seen[#seen + 1] = h
        return loss * self.s
      end })
    engine.seed(4)
    local model = model_of("gpt", { attention_dropout = 0.1 })
    local trainer = engine.trainer { model = model, steps = 3, log = "quiet",
      policy = "by-entropy", optimizer = engine.optim.adamw(model, { precision = "fp16" }),
      data = { next = function()
        return { x = engine.randint(0, 16, 2, 8), y = engine.randint(0, 16, 2, 8) }
      end },
      loss = function(m, b) return m:loss(b.x, b.y, { attention_maps = true }) end }
    assert.equal(3, trainer:run().updates)
    assert.equal(3, #seen)
    for _, h in ipairs(seen) do assert.is_true(h > 0 and h < math.log(8)) end
  end)

  it("are refused if the option's name is misspelt", function()
    local model = model_of("gpt")
    helper.refuses("unknown option 'attention_map'; did you mean 'attention_maps'?",
      model, engine.zeros(1, 2, "i64"), { attention_map = true })
  end)
end)
