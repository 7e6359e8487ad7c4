-- Modules and models: names and order of parameters, tied weights, state, freezing, modes, text;
-- and the models' shapes, first losses, causality and sampling.
local engine = require "engine"
local helper = require "spec.helper"

local nn = engine.nn
local inf = math.huge

local step = helper.in_step

local function names(net)
  local list = {}
  for i, p in ipairs(net:parameters()) do list[i] = p.name end
  return list
end

local function roles(net)
  local list = {}
  for _, p in ipairs(net:parameters()) do list[p.name] = p.role end
  return list
end

-- ------------------------------------------------------------------ modules

describe("a module", function()
  it("names its parameters after the fields, in the order of assignment", function()
    local Net = nn.class("Net")
    function Net:init()
      self.last = nn.linear(2, 3)
      self.blocks = nn.list { nn.layer_norm(3),
        nn.sequential { nn.linear(3, 3, { bias = false }), nn.relu() } }
      self.head = nn.embedding(4, 3)
      self.note = "not a parameter"
      self:parameter("scale", engine.ones(1, { keep = true }), "norm")
    end
    local net = Net()
    assert.same({ "last.weight", "last.bias", "blocks.1.weight", "blocks.1.bias",
      "blocks.2.1.weight", "head.weight", "scale" }, names(net))
    assert.same({ ["last.weight"] = "linear", ["last.bias"] = "linear",
      ["blocks.1.weight"] = "norm", ["blocks.1.bias"] = "norm",
      ["blocks.2.1.weight"] = "linear", ["head.weight"] = "embedding", scale = "norm" }, roles(net))
    assert.equal(6 + 3 + 3 + 3 + 9 + 12 + 1, net:count())
    assert.equal("not a parameter", net.note)
    net.last = nn.linear(2, 2)                       -- replacing keeps the place
    assert.same("last.weight", names(net)[1])
    net.head = nil
    assert.same(6, #names(net))
    net.head = nn.embedding(4, 3)
    assert.same({ 7, "head.weight" }, { #names(net), names(net)[6] })
    assert.equal(1, select(2, tostring(net):gsub("head: embedding", "")))
  end)

  it("trains what replaces a plain value, but not state that a forward pass keeps", function()
    local net = nn.class("Net")()
    for _, key in ipairs { "act", "scale", "mean", "state" } do net[key] = false end
    net.act = nn.linear(2, 2)
    net.scale = engine.ones(2, { keep = true }):requires_grad(true)
    net:buffer("mean", engine.zeros(2, { keep = true }))
    net.state = engine.zeros(2, { keep = true })
    assert.same({ "act.weight", "act.bias", "scale", "mean" }, names(net))
    net.act = nil
    net.act = nn.linear(2, 2)
    assert.same({ "act.weight", "act.bias", "scale", "mean" }, names(net))
    net:freeze()
    assert.same({ "act.weight", "act.bias", "scale", "mean" }, names(net))
  end)

  it("has the same order of parameters if they were listed in between", function()
    local net = nn.class("Net")()
    net.first = false
    net.first = nn.linear(2, 2, { bias = false })
    assert.same({ "first.weight" }, names(net))
    net.second = nn.linear(2, 2, { bias = false })
    local other = nn.class("Net")()
    other.first = false
    other.first = nn.linear(2, 2, { bias = false })
    other.second = nn.linear(2, 2, { bias = false })
    assert.same({ "first.weight", "second.weight" }, names(net))
    assert.same(names(net), names(other))
  end)

  it("does not count a stored activation as a parameter after the backward pass", step(function()
    local Net = nn.class "Net"
    function Net:init() self.a, self.b = nn.linear(4, 4), nn.linear(4, 1) end
    function Net:forward(x)
      self.hidden = self.a(x)
      return self.b(self.hidden)
    end
    local net = Net()
    net(engine.ones(1, 4)):sum():backward()
    assert.equal(4, #net:parameters())
  end))

  it("does not register the tensors that a pass keeps, but its parameters", step(function()
    local Net = nn.class("Net")
    function Net:init() self.mask = engine.ones(2, { keep = true }) end
    function Net:loss(x) self.last = self(x):sum() return self.last end
    function Net:forward(x)
      self.lazy = self.lazy or nn.linear(2, 2, { bias = false })
      self.cache = self.cache or engine.zeros(2, { keep = true })
      self.scale = self.scale or engine.ones(2, { keep = true, requires_grad = true })
      if not self.mean then self:buffer("mean", engine.zeros(2, { keep = true })) end
      self.hidden = self.lazy(x) * self.scale
      return self.hidden
    end
    local net = Net()
    net:loss(engine.ones(1, 2))
    assert.same({ "mask", "lazy.weight", "scale", "mean" }, names(net))
    coroutine.wrap(function() net(engine.ones(1, 2)) end)()
    assert.same({ "mask", "lazy.weight", "scale", "mean" }, names(net))
  end))

  it("refuses to contain itself or to hide modules also if the field had a value", function()
    local net = nn.class("Net")()
    net.a, net.b, net.c = nn.linear(2, 2), 1, { "text" }
    net.a = net
    for _, call in ipairs { net.parameters, net.train, tostring } do
      assert.error_matches(function() call(net) end, "Net.a: a module cannot contain itself")
    end
    for _, key in ipairs { "a", "b", "c" } do
      net.a, net.b, net.c = nn.linear(2, 2), 1, { "text" }
      net[key] = { nn.linear(2, 2) }
      for _ = 1, 2 do
        assert.error_matches(function() net:parameters() end,
          "Net." .. key .. ": a plain table hides its modules")
      end
    end
  end)

  it("has fields with its own modules in a table, or with an optimizer", function()
    local model = nn.class("Keeper")()
    model.q = nn.linear(2, 3)
    model.by_name = { q = model.q }
    model.opt = engine.optim.sgd(model.q, { lr = 1 })
    assert.equal(model.q, model.by_name.q)
    assert.equal(2, #model:parameters())
  end)

  it("counts a tied weight once, and its gradient has both parts", step(function()
    local net = nn.sequential { nn.linear(2, 2, { bias = false }),
      nn.linear(2, 2, { bias = false }) }
    net[2].weight = net[1].weight
    assert.same({ "1.weight" }, names(net))
    assert.equal(4, net:count())
    net[1].weight:copy { { 1, 2 }, { 3, 4 } }
    net(engine.tensor { { 1, 1 } }):sum():backward()
    -- y = W (W x): dW = g (W x)^T + (W^T g) x^T with g = 1
    assert.same({ { 3 + 4, 7 + 4 }, { 3 + 6, 7 + 6 } }, net[1].weight.grad:totable())
    local other = nn.sequential { nn.linear(2, 2, { bias = false }),
      nn.linear(2, 2, { bias = false }) }
    other[2].weight = other[1].weight
    other:load_state(net:state())
    assert.same({ { 1, 2 }, { 3, 4 } }, other[2].weight:totable())
  end))

  it("returns its state and loads another's", step(function()
    local a, b = nn.sequential { nn.linear(2, 3), nn.layer_norm(3) },
      nn.sequential { nn.linear(2, 3), nn.layer_norm(3) }
    assert.not_same(a[1].weight:totable(), b[1].weight:totable())
    assert.equal(b, b:load_state(a:state()))
    for name, tensor in pairs(a:state()) do
      assert.same(tensor:totable(), b:state()[name]:totable(), name)
    end
    local x = engine.randn(4, 2)
    assert.same(a(x):totable(), b(x):totable())
    b:load_state { ["1.weight"] = engine.ones({ 3, 2 }, "f16"), ["1.bias"] = a[1].bias,
      ["2.weight"] = a[2].weight, ["2.bias"] = a[2].bias }
    assert.same({ "f32", { { 1, 1 }, { 1, 1 }, { 1, 1 } } },
      { b[1].weight.dtype, b[1].weight:totable() })
  end))

  it("refuses a state that does not fit, lists all reasons, and changes nothing", step(function()
    local net = nn.sequential { nn.linear(2, 3), nn.layer_norm(3) }
    local before = net[1].weight:totable()
    local state = { ["1.weight"] = engine.ones(3, 2), ["1.bias"] = engine.ones(4),
      ["2.weigth"] = engine.ones(3), ["2.bias"] = 5 }
    local _, message = pcall(function() net:load_state(state) end)
    assert.matches("^spec/nn/nn_spec.lua:%d+: load_state: the weights do not fit this model:\n",
      message)
    assert.equal("  1.bias: expected [3], got [4]\n  2.bias: expected a tensor, got 5\n  "
      .. "missing: 2.weight\n  unknown: 2.weigth; did you mean '2.weight'?",
      message:match("\n(.*)$"))
    assert.same(before, net[1].weight:totable())
    local _, problems = net:load_state(state, { strict = false })
    assert.equal(4, #problems)
    assert.same({ { 1, 1 }, { 1, 1 }, { 1, 1 } }, net[1].weight:totable())
    assert.error_matches(function() net:load_state(nil) end,
      "load_state: expected a table of tensors by name, as engine.load%(path%) gives, got nothing")
    assert.error_matches(function() net:load_state({}, { stric = false }) end,
      "unknown option 'stric'; did you mean 'strict'")
    local many = nn.gpt { vocab = 4, context = 4, width = 4, heads = 1, layers = 3 }
    _, message = pcall(function() many:load_state {} end)
    assert.matches("%.%.%. and %d+ more$", message)
  end))

  it("freezes and unfreezes", step(function()
    local net = nn.sequential { nn.linear(2, 2), nn.linear(2, 2) }
    net[1]:freeze()
    net(engine.ones(1, 2)):sum():backward()
    assert.is_nil(net[1].weight.grad)
    assert.is_not_nil(net[2].weight.grad)
    assert.equal(net, net:freeze())
    assert.has_error(function() net(engine.ones(1, 2)):sum():backward() end)
    net:freeze(false)
    net(engine.ones(1, 2)):sum():backward()
    assert.is_not_nil(net[1].weight.grad)
  end))

  it("sets the mode of all modules below it; evaluating() restores each one's", step(function()
    local net = nn.sequential { nn.dropout(0.5), nn.list { nn.dropout(0.5) } }
    assert.is_true(net:is_training())
    net:eval()
    assert.is_false(net[2][1]:is_training())
    net:train()
    assert.is_true(net[2][1]:is_training())
    net[1]:eval()
    local a, b, c = net:evaluating(function(x) return net[2][1]:is_training(), nil, x end, 7)
    assert.same({ false, nil, 7 }, { a, b, c })
    assert.same({ true, false, true },
      { net:is_training(), net[1]:is_training(), net[2][1]:is_training() })
    assert.error_matches(function() net:evaluating(function() error("inside") end) end, "inside")
    assert.same({ true, false, true },
      { net:is_training(), net[1]:is_training(), net[2][1]:is_training() })
    local seen = {}
    net:apply(function(module, path) seen[#seen + 1] = path .. ":" .. module._class end)
    assert.same({ ":sequential", "1:dropout", "2:list", "2.1:dropout" }, seen)
  end))

  it("prints its tree and its number of parameters", function()
    local net = nn.sequential { nn.linear(10, 200), nn.gelu("tanh"),
      nn.list { nn.layer_norm(200), nn.dropout(0.25), nn.embedding(7, 3) } }
    assert.equal(table.concat({ "sequential", "  1: linear(10 -> 200)", "  2: gelu", "  3: list",
      "    1: layer_norm(200)", "    2: dropout(0.25)",
      "    3: embedding(7 x 3)", "2,621 parameters" }, "\n"), tostring(net))
    assert.equal("linear(1 -> 2, no bias)\n2 parameters",
      tostring(nn.linear(1, 2, { bias = false })))
    local function twin(n) return nn.sequential { nn.linear(n, 1) } end
    assert.equal(table.concat({ "list", "  1: sequential", "    1: linear(2 -> 1)",
      "  2 to 3: the same", "  4: sequential", "    1: linear(3 -> 1)",
      "  5: the same", "  6: sequential", "    1: linear(2 -> 1)", "20 parameters" }, "\n"),
      tostring(nn.list { twin(2), twin(2), twin(2), twin(3), twin(3), twin(2) }))
    local mixed = nn.list { nn.linear(4, 2), nn.linear(4, 1):freeze() }
    mixed.gain = engine.ones(4)
    mixed:parameter("scale", engine.ones(2))
    mixed:buffer("mean", engine.zeros(9))
    assert.matches("\n21 parameters, 9 of them without gradient$", tostring(mixed))
  end)

  it("adds the module path and the script's line to an error inside", step(function()
    local Inner = nn.class("Inner")
    function Inner.forward(_, x) return x + engine.zeros(7) end
    local net = nn.sequential { nn.relu(), nn.sequential { Inner() } }
    local _, message = pcall(net, engine.zeros(2, 3))
    assert.matches("^spec/nn/nn_spec.lua:%d+: In 2.1: add: f32 %[2 x 3%] and f32 %[7%] do not "
      .. "broadcast", message)
    local object = {}
    function Inner.forward() error(object) end
    local good, err = pcall(net, engine.zeros(2, 3))
    assert.is_false(good)
    assert.equal(object, err)                        -- error objects pass unchanged
    assert.same({ 2, 2 }, nn.linear(3, 2)(engine.zeros(2, 3)).shape)
  end))

  it("reports mistakes in one line at the script's position", step(function()
    local cases = {
      { "nn.PixelShuffle {}", "engine.nn has no 'PixelShuffle'; hint: docs/from-pytorch.md lists "
        .. "PyTorch's names" },
      { "nn.linera(1, 2)", "engine.nn has no 'linera'; did you mean 'linear'?" },
      { "nn.linear(1)",
        "nn.linear: expected outputs to be a whole number of 1 or more, got nothing" },
      { "nn.linear(0, 1)", "nn.linear: expected inputs to be a whole number of 1 or more, got 0" },
      { "nn.linear(1, 2, { baias = false })",
        "nn.linear: unknown option 'baias'; did you mean 'bias'?; options: bias std" },
      { "nn.linear(1, 2, false)", "nn.linear: expected a table of options, got false" },
      { "nn.embedding(5, 'a')",
        "nn.embedding: expected the width to be a whole number of 1 or more, got 'a'" },
      { "nn.layer_norm(2.5)",
        "nn.layer_norm: expected the width to be a whole number of 1 or more, got 2.5" },
      { "nn.dropout(1.5)", "nn.dropout: expected a probability in [0, 1], got 1.5" },
      { "nn.gelu('fast')", "nn.gelu: expected 'erf' or 'tanh', got 'fast'" },
      { "nn.sequential { nn.relu(), 5 }", "nn.sequential: expected entry 2 to be a module, got 5" },
      { "nn.sequential(nn.relu(), nil, nn.relu())",
        "nn.sequential: expected entry 2 to be a module, got nothing" },
      { "nn.sequential(nil, nn.relu())",
        "nn.sequential: expected entry 1 to be a module, got nothing" },
      { "nn.list(5)", "nn.list: expected the modules to be a list, such as { nn.linear(4, 4), "
        .. "nn.layer_norm(4) }, got 5" },
      { "nn.sequential { up = nn.linear(2, 2) }", "nn.sequential: expected the modules to be a "
        .. "list, such as { nn.linear(4, 4), nn.layer_norm(4) }, got a table with the field 'up'" },
      { "gpt:generate({ 1, 2, last = 3 }, 5)", "generate: expected the tokens to be a list, such "
        .. "as { 1, 2, 3 }, got a table with the field 'last'" },
      { "gpt:generate({ 1 }, 5, { stop = { eos = 3 } })", "generate: expected stop to be a list, "
        .. "such as { 0, 2 }, got a table with the field 'eos'" },
      { "nn.list { nn.relu }", "nn.list: expected entry 1 to be a module, got a table" },
      { "nn.class('Empty')()(x)", "In Empty: Empty has no forward method; hint: define one, or "
        .. "call the modules inside it" },
      { "assign()", "Empty.parts: a plain table hides its modules, so their parameters would not "
        .. "be trained; hint: nn.list { ... } or nn.sequential { ... }" },
      { "assign('a')", "Empty.parts: a plain table hides its modules, so their parameters would "
        .. "not be trained; hint: nn.list { ... } or nn.sequential { ... }" },
      { "nn.class()", "nn.class: expected the name of the class, got nothing" },
      { "nn.linear(3, 2) { 1, 2 }", "In linear: expected a tensor, got a table" },
      { "nn.conv2d(3, 4, 3)(nil)", "In conv2d: expected a tensor as x, got nothing" },
      { "nn.linear(3, 2, { std = -1 })",
        "nn.linear: expected std to be a finite number >= 0, got -1" },
      { "nn.embedding(3, 2, { std = 'a' })",
        "nn.embedding: expected std to be a finite number >= 0, got 'a'" },
      { "nn.layer_norm(3, { eps = 'a' })",
        "nn.layer_norm: expected eps to be a number >= 0, got 'a'" },
      { "nn.rms_norm(3, { eps = -1 })", "nn.rms_norm: expected eps to be a number >= 0, got -1" },
      { "nn.softmax(1)(engine.zeros(2, 3))", "In softmax: softmax: expected the last "
        .. "dimension of [2 x 3], got dimension 1; hint: x:transpose(1, -1) makes it the last" },
      { "nn.relu():train('no')", "train: expected true or false, got 'no'" },
      { "nn.mlp(4, 8, { gelu = 'new' })",
        "nn.mlp: expected gelu to be 'erf' or 'tanh', got 'new'" },
      { "nn.gpt { bias = 'no' }", "nn.gpt: expected bias to be true or false, got 'no'" },
      { "nn.linear(3, 2, { bias = 0 })", "nn.linear: expected bias to be true or false, got 0" },
      { "nn.layer_norm(3, { bias = 0 })",
        "nn.layer_norm: expected bias to be true or false, got 0" },
      { "nn.group_norm(1, 3, { affine = 0 })",
        "nn.group_norm: expected affine to be true or false, got 0" },
      { "nn.attention(8, 2, { causal = 0 })",
        "nn.attention: expected causal to be true or false, got 0" },
      { "nn.batch_norm(3, { eps = 'a' })",
        "nn.batch_norm: expected eps to be a number >= 0, got 'a'" },
      { "nn.conv2d(3, 4, { 3 })",
        "nn.conv2d: expected the kernel to be a number or a list of length 2, got a table of "
          .. "length 1" },
      { "nn.relu():buffer('b', 5)", "buffer: expected a tensor for 'b', got 5" },
      { "nn.relu():freeze('weight')", "freeze: expected true or false, got 'weight'" },
      { "nn.relu():apply()", "apply: expected a function, got nothing; hint: "
        .. "model:apply(function(module, path) ... end)" },
      { "nn.moe { width = 4, expert = function() end }",
        "nn.moe: expected expert(1) to return a module, got nothing" },
      { "nn.moe { width = 4, experts = 2 }(engine.zeros(2, 8))",
        "In moe: expected x [.. x 4] with at least one token, got [2 x 8]" },
      { "nn.moe { width = 4, experts = 2 }(engine.zeros { 0, 4 })",
        "In moe: expected x [.. x 4] with at least one token, got [0 x 4]" },
      { "nn.bert { types = 'a' }",
        "nn.bert: expected types to be a whole number of 0 or more, got 'a'" },
      { "nn.bert { width = 8, layers = 1 }(engine.zeros(1, 2, 'i64'), engine.zeros(1, 2, 'i64'))",
        "In bert: bert: the model has no token types; hint: nn.bert { types = 2 }" },
      { "nn.llama { window = { 1 }, layers = 2 }",
        "nn.llama: expected window to have 2 entries, one for each layer, got 1" },
      { "sick:generate({ 1 }, 2)",
        "generate: expected finite logits from the model, got nan; hint: its weights may hold "
          .. "inf or nan" },
      { "nn.attention(8, 2, { dropout = 2 })",
        "nn.attention: expected dropout in [0, 1), got 2" },
      { "nn.attention(3, 1)(engine.zeros(2, 3))",
        "In attention: expected x [batch x time x width], got [2 x 3]" },
      { "nn.vit { size = 4, patch = 2, width = 4, heads = 1, layers = 1 }(engine.zeros(1, 3, 4, "
        .. "6))", "In vit: expected images [N x 3 x 4 x 4], got [1 x 3 x 4 x 6]" },
      { "nn.relu():parameter('w', 5)", "parameter: expected a tensor for 'w', got 5" },
      { "nn.attention(10, 3)", "nn.attention: the width 10 is not divisible by 3 heads" },
      { "nn.attention(12, 3, { kv_heads = 2 })",
        "nn.attention: 3 heads are not divisible by 2 kv_heads" },
      { "nn.attention(12, 3, { casual = false })",
        "nn.attention: unknown option 'casual'; did you mean 'causal'?; `engine help "
          .. "nn.attention` lists the options" },
      { "nn.attention(12, 4, { window = 0 })",
        "nn.attention: expected window to be a whole number of 1 or more, got 0" },
      { "nn.attention(8, 2, { window = 2, causal = false })",
        "nn.attention: a window needs causal attention, got causal = false" },
      { "nn.attention(8, 2, { rope = 'a' })",
        "nn.attention: expected rope to be a number or a table, got 'a'" },
      { "nn.llama { layers = 1, window = 'a' }",
        "nn.attention: expected window to be a whole number of 1 or more, got 'a'" },
      { "nn.swiglu(8, 16, { gelu = 'erf' })",
        "nn.swiglu: unknown option 'gelu'; options: bias out_std std" },
      { "nn.gpt { widht = 4 }",
        "nn.gpt: unknown option 'widht'; did you mean 'width'?; `engine help nn.gpt` "
          .. "lists the options" },
      { "nn.gpt { layers = 0 }",
        "nn.gpt: expected layers to be a whole number of 1 or more, got 0" },
      { "nn.gpt { width = 10, heads = 3 }", "nn.gpt: the width 10 is not divisible by 3 heads" },
      { "nn.gpt { dropout = 1 }", "nn.gpt: expected dropout in [0, 1), got 1" },
      { "nn.llama { heads = 4, kv_heads = 3 }",
        "nn.llama: 4 heads are not divisible by 3 kv_heads" },
      { "nn.llama { kv_heads = false }",
        "nn.llama: expected kv_heads to be a whole number of 1 or more, got false" },
      { "nn.bert { vocab = 'all' }",
        "nn.bert: expected vocab to be a whole number of 1 or more, got 'all'" },
      { "gpt:generate({}, 5)",
        "generate: expected prompt 1 to have at least one token, got none" },
      { "gpt:generate({ 1 })",
        "generate: expected max_tokens to be a whole number of 0 or more, got nothing" },
      { "gpt:generate({ 1 }, 5, { temp = 0 })",
        "generate: unknown option 'temp'; options: cache max_tokens progress seed stop "
          .. "temperature top_k top_p" },
      { "gpt:generate({ 1 }, 5, { progress = true })",
        "generate: expected progress to be a function(done, all), got true" },
      { "gpt:generate(nil, 5)",
        "generate: expected a prompt to be a list of tokens, such as tokenizer:encode(text) or "
          .. "ids:totable(), got nothing" },
      { "gpt:generate({ 1 }, 5, { temperature = -1 })",
        "generate: expected temperature to be a finite number >= 0, got -1" },
      { "gpt:generate({ 1 }, 5, { top_k = 0 })",
        "generate: expected top_k to be a whole number of 1 or more, got 0" },
      { "gpt(engine.zeros(1, 9, 'i32'))", "In gpt: expected up to 8 tokens of context, got 9" },
      { "bert(engine.zeros(1, 9, 'i32'))", "In bert: expected up to 8 tokens of context, got 9" },
      { "gpt(engine.full({ 1, 2 }, 16, 'i32'))",
        "In wte: embedding: expected indices in 0..15, got 16 at position 1 of i32 [1 x 2]" },
    }
    local small = { vocab = 16, context = 8, width = 8, heads = 2, layers = 1 }
    local place = { nn = nn, engine = engine, x = engine.zeros(1), gpt = nn.gpt(small),
      bert = nn.bert(small), sick = nn.gpt(small),
      assign = function(key) nn.class("Empty")().parts = { [key or 1] = nn.relu() } end }
    place.sick.norm.weight:fill(0 / 0)
    for _, case in ipairs(cases) do
      local chunk = assert(loadstring("local y = " .. case[1] .. "\nreturn y", "=script"))
      local good, message = pcall(setfenv(chunk, place))
      assert.is_false(good, case[1])
      if case[1]:find("^assign") then message = message:gsub("^[^:]+:%d+", "script:1") end
      assert.equal("script:1: " .. case[2], message)
    end
  end))
end)

describe("a layer", function()
  it("computes its formula", step(function()
    local linear = nn.linear(2, 2)
    linear.weight:copy { { 1, 2 }, { 3, 4 } }
    linear.bias:copy { 10, 20 }
    assert.same({ { 13, 27 } }, linear(engine.tensor { { 1, 1 } }):totable())
    local embedding = nn.embedding(3, 2)
    embedding.weight:copy { { 0, 1 }, { 2, 3 }, { 4, 5 } }
    assert.same({ { 4, 5 }, { 0, 1 } }, embedding(engine.tensor({ 2, 0 }, "i64")):totable())
    local y = nn.layer_norm(4)(engine.tensor { { 1, 2, 3, 4 } }):totable()[1]
    for k, v in ipairs { -1.341641, -0.447214, 0.447214, 1.341641 } do
      assert.near(v, y[k], 1e-5)
    end
    y = nn.rms_norm(2)(engine.tensor { { 3, 4 } }):totable()[1]
    assert.near(3 / math.sqrt(12.5), y[1], 1e-6)
    for name, expected in pairs { relu = 0, silu = -0.268941, sigmoid = 0.268941, tanh = -0.761594,
      softplus = 0.313262, log_sigmoid = -1.313262,
      gelu = -0.158655 } do
      assert.near(expected, nn[name]()(engine.tensor { -1 }):item(), 1e-6, name)
    end
    assert.near(-0.158808, nn.gelu("tanh")(engine.tensor { -1 }):item(), 1e-6)
    assert.same({ 0.5, 0.5 }, nn.softmax()(engine.tensor { 3, 3 }):totable())
  end))

  it("starts from PyTorch's defaults", function()
    engine.seed(1)
    local linear = nn.linear(100, 200)
    local bound = 0.1
    assert.is_true(linear.weight:abs():max():item() <= bound
      and linear.weight:abs():max():item() > 0.99 * bound)
    assert.is_true(linear.bias:abs():max():item() <= bound
      and linear.bias:abs():max():item() > 0.9 * bound)
    assert.near(bound ^ 2 / 3, (linear.weight * linear.weight):mean():item(), 1e-4)
    local embedding = nn.embedding(100, 50)
    assert.near(1, (embedding.weight * embedding.weight):mean():item(), 0.05)
    assert.near(0.04, (nn.linear(100, 200, { std = 0.2 }).weight ^ 2):mean():item(), 2e-3)
    assert.equal(0, nn.linear(10, 20, { std = 0.2 }).bias:abs():max():item())
    engine.end_step()
  end)

  it("dropout drops in training only, and keeps the mean", step(function()
    engine.seed(2)
    local drop, x = nn.dropout(0.3), engine.ones(20000)
    local y = drop(x)
    local kept = y:gt(0):to("f32"):mean():item()
    assert.near(0.7, kept, 0.02)
    assert.near(1 / 0.7, y:max():item(), 1e-6)
    assert.near(1, y:mean():item(), 0.03)
    assert.not_same(y:totable(), drop(x):totable())
    drop:eval()
    assert.is_true(drop(x) == x)
    assert.is_true(nn.dropout(0)(x) == x)
    assert.equal(0, nn.dropout(1)(x):max():item())
  end))

  it("attention returns its entropy on request", step(function()
    local attention = nn.attention(8, 2)
    attention.watch_entropy = true
    assert.same({ 3, 5, 8 }, attention(engine.randn(3, 5, 8)).shape)
    local entropy = attention.entropy
    assert.same({ 3, 2, 5 }, entropy.shape)
    assert.near(0, entropy:select(3, 1):abs():max():item(), 1e-6)     -- the first row sees one key
    assert.is_true(entropy:max():item() <= math.log(5) + 1e-5)
  end))

  it("attention with dropout equals plain attention if nothing is dropped", step(function()
    for _, causal in ipairs { true, false } do
      engine.seed(3)
      local plain = nn.attention(8, 2, { causal = causal })
      local dropping = nn.attention(8, 2, { causal = causal, dropout = 1e-9 })
      dropping:load_state(plain:state())
      local x = engine.randn(2, 6, 8)
      assert.is_true((plain(x) - dropping(x)):abs():max():item() < 1e-5)
    end
  end))
end)

-- ------------------------------------------------------------------ models

local SHAPE = { vocab = 40, context = 12, width = 16, heads = 4, layers = 2 }
local function with(more)
  local options = {}
  for key, value in pairs(SHAPE) do options[key] = value end
  for key, value in pairs(more or {}) do options[key] = value end
  return options
end
local KINDS = { "gpt", "llama", "bert" }
local function ids(list) return engine.tensor(list, { dtype = "i32", keep = false }) end

describe("the model", function()
  for _, kind in ipairs(KINDS) do
    it(kind .. " gives logits [B x T x V], and its first loss is about ln V", step(function()
      engine.seed(4)
      local model = nn[kind](with())
      local x = engine.randint(0, 40, 3, 9, "i32")
      assert.same({ 3, 9, 40 }, model(x).shape)
      assert.same({ 1, 1, 40 }, model(ids { { 3 } }).shape)
      assert.near(math.log(40), model:loss(x, engine.randint(0, 40, 3, 9, "i32")):item(), 0.15)
    end))

    it(kind .. " trains every parameter, in every precision", function()
      for _, recipe in ipairs { "fp32", "bf16", "fp16" } do
        engine.begin_step()
        engine.seed(4)
        local model = nn[kind](with { dropout = 0.1 })
        local opt = engine.optim.adamw(model, { precision = recipe })
        local x = engine.randint(0, 40, 3, 12, "i32")
        engine.autocast(recipe, function() return model:loss(x,
          x) end):backward { scale = recipe == "fp16" and 1024 or 1 }
        for _, p in ipairs(opt.list) do
          local gradient = p.tensor.grad
          assert.is_not_nil(gradient, kind .. ": " .. p.name .. " has no gradient in " .. recipe)
          local amax = gradient:to("f32"):abs():max():item()
          assert.is_true(amax > 0 and amax < inf, kind .. ": " .. p.name .. " in " .. recipe)
        end
        engine.end_step()
      end
    end)
  end

  it("gpt has the parameters of GPT-2's shape", function()
    local function count(model)
      local n = model:count()
      for _, p in ipairs(model:parameters()) do p.tensor:free() end
      return n
    end
    local V, T, C, L = 40, 12, 16, 2
    local block = 12 * C * C + 13 * C
    assert.equal(V * C + T * C + L * block + 2 * C, count(nn.gpt(with())))
    assert.equal(V * C + T * C + L * block + 2 * C + V * C, count(nn.gpt(with { tied = false })))
    assert.equal(V * C + T * C + L * (block - 13 * C + 2 * C) + C,
      count(nn.gpt(with { bias = false })))
    local llama_block = C * (C + 2 * C / 2) + C * C + 3 * C * 24 + 2 * C
    assert.equal(2 * V * C + L * llama_block + C,
      count(nn.llama(with { kv_heads = 2, hidden = 24 })))
    assert.same({ "wte.weight", "wpe.weight", "blocks.1.norm1.weight", "blocks.1.norm1.bias",
      "blocks.1.attn.qkv.weight", "blocks.1.attn.qkv.bias",
      "blocks.1.attn.out.weight", "blocks.1.attn.out.bias", "blocks.1.norm2.weight",
      "blocks.1.norm2.bias", "blocks.1.mlp.up.weight" },
      { unpack(names(nn.gpt(with())), 1, 11) })
  end)

  for _, kind in ipairs { "gpt", "llama" } do
    it(kind .. " is causal: later tokens do not change earlier logits by a bit", step(function()
      for _, recipe in ipairs { "fp32", "fp16", "bf16" } do
        engine.seed(5)
        local model = nn[kind](with())
        local first = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 }
        local base = engine.autocast(recipe, model, ids { first, first }):to("f32"):totable()
        for change = 1, 10 do
          local other = { unpack(first) }
          other[change] = 33
          local logits = engine.autocast(recipe, model, ids { other, first }):to("f32"):totable()
          for t = 1, change - 1 do
            assert.same(base[1][t], logits[1][t],
              recipe .. ": token " .. change .. " changed place " .. t)
          end
          assert.not_same(base[1][change], logits[1][change])
          -- the last position depends on the changed token
          assert.not_same(base[1][10], logits[1][10])
          assert.same(base[2], logits[2])                             -- the other row does not
        end
      end
    end))
  end

  it("bert attends to both sides, and its loss counts only masked tokens", step(function()
    engine.seed(6)
    local model = nn.bert(with())
    local base = model(ids { { 1, 2, 3, 4 } }):totable()[1]
    local other = model(ids { { 1, 2, 3, 5 } }):totable()[1]
    for t = 1, 4 do assert.not_same(base[t], other[t]) end
    local x = ids { { 1, 2, 3, 4 } }
    local logits = model(x)
    local expected = -logits:log_softmax():select(2, 3):select(2, 8):item()
    assert.near(expected, model:loss(x, ids { { -100, -100, 7, -100 } }):item(), 1e-5)
  end))

  it("blocks add the residual as in their papers: pre-norm x + f(norm x), post-norm norm(x + "
    .. "f x)", step(function()
    local x = engine.randn(2, 5, 16)
    for _, kind in ipairs(KINDS) do
      local block = nn[kind](with()).blocks[1]
      local function near(expected, y) assert.is_true((expected - y):abs():max():item() < 1e-6,
        kind) end
      -- biases are 0 at first
      for _, last in ipairs { block.attn.out, block.mlp.down } do last.weight:fill(0) end
      if kind ~= "llama" then
        assert.equal(0, block.attn.out.bias:abs():max():item())
        assert.equal(0, block.mlp.down.bias:abs():max():item())
      end
      near(kind == "bert" and block.norm2(block.norm1(x)) or x, block(x))
      local fresh = nn[kind](with()).blocks[1]
      local middle = kind == "bert" and fresh.norm1(x + fresh.attn(x))
        or x + fresh.attn(fresh.norm1(x))
      near(kind == "bert" and fresh.norm2(middle + fresh.mlp(middle))
        or middle + fresh.mlp(fresh.norm2(middle)), fresh(x))
    end
  end))

  it("frees its tensors even if no step is open", function()
    local models = {}
    for i, kind in ipairs(KINDS) do
      models[i] = nn[kind](with { attention_dropout = kind == "gpt" and 0.1 or nil })
    end
    local before
    for turn = 1, 5 do
      for _, model in ipairs(models) do model(ids { { 1, 2, 3 } }) end
      engine.end_step()
      local used = engine.memory().kept.used
      if turn == 1 then before = used end
      assert.equal(before, used)
    end
  end)

  it("gpt with dropout differs from call to call in training, not in evaluation", step(function()
    local model = nn.gpt(with { dropout = 0.2, attention_dropout = 0.2 })
    local x = ids { { 1, 2, 3, 4 } }
    assert.not_same(model(x):totable(), model(x):totable())
    model:eval()
    assert.same(model(x):totable(), model(x):totable())
  end))
end)

describe("generate", function()
  for _, kind in ipairs { "gpt", "llama" } do
    it("with temperature 0 takes the likeliest token each time, past the context too: " .. kind,
      function()
      engine.seed(7)
      local model = nn[kind](with())
      local list = model:generate({ 3, 5 }, 20, { temperature = 0 })
      assert.same(22, #list)
      assert.same({ 3, 5 }, { list[1], list[2] })
      assert.same(list, model:generate({ 3, 5 }, 20, { temperature = 0 }))
      for _, cold in ipairs { 1e-30, 1e-45, 5e-324 } do      -- 1e-45 is no normal f32
        assert.same(list, model:generate({ 3, 5 }, 20, { temperature = cold }))
      end
      assert.same(list, model:generate({ 3, 5 }, 20, { top_k = 1 }))
      local by_hand = { 3, 5 }
      for _ = 1, 20 do
        local window = { unpack(by_hand, math.max(1, #by_hand - 11)) }
        by_hand[#by_hand + 1] = model(ids { window }):select(2, -1):argmax():item()
        engine.end_step()
      end
      assert.same(by_hand, list)
    end)
  end

  it("samples by probability, from the top_k only, and follows the seed", function()
    engine.seed(8)
    local model = nn.gpt(with { vocab = 5, tied = false, layers = 1, context = 4 })
    -- only the last norm's bias determines the logits
    model.head.weight:fill(0)
    model.norm.weight:fill(0)
    model.norm.bias:fill(0)
    model.norm.bias:select(1, 1):fill(1)
    -- odds 1 2 3 4 0
    model.head.weight:select(2, 1):copy { 0, math.log(2), math.log(3), math.log(4), -100 }
    local function counts(options)
      local n, list = { 0, 0, 0, 0, 0 }, model:generate({ 0 }, 1000, options)
      for i = 2, 1001 do n[list[i] + 1] = n[list[i] + 1] + 1 end
      return n
    end
    for k, n in ipairs(counts()) do assert.near(({ 100, 200, 300, 400, 0 })[k], n, 60) end
    for k, n in ipairs(counts { top_k = 2 }) do
      assert.near(({ 0, 0, 1000 * 3 / 7, 1000 * 4 / 7, 0 })[k], n, k < 3 and 0 or 70)
    end
    for k, n in ipairs(counts { temperature = 0.5 }) do
      assert.near(({ 1000 / 30, 4000 / 30, 9000 / 30, 16000 / 30, 0 })[k], n, 60)
    end
    engine.seed(9)
    local first = model:generate({ 0 }, 30)
    engine.seed(9)
    assert.same(first, model:generate({ 0 }, 30))
  end)

  it("applies top_p within the top_k tokens, for small and large k", function()
    engine.seed(10)
    local V = 3000
    local model = nn.gpt(with { vocab = V, tied = false, layers = 1, context = 1 })
    model.head.weight:fill(0)
    model.norm.weight:fill(0)
    model.norm.bias:fill(0)
    model.norm.bias:select(1, 1):fill(1)
    local logits = engine.randn(V, { keep = true }) * 2
    logits = logits:keep()
    local order = select(2, logits:topk(V)):totable()
    local function draws(set, options)
      model.head.weight:select(2, 1):copy(set)
      options.max_tokens, options.seed = 20, 3
      return model:generate({ 0 }, options)
    end
    for _, k in ipairs { 1, 2, 50, 1024, 1025, 2000, V } do
      local rest, drop = logits:totable(), -100              -- only the top k, without top_k
      for i = k + 1, V do rest[order[i] + 1] = drop end
      for _, p in ipairs { 0.02, 0.3, 0.9, 0.999 } do
        assert.same(draws(engine.tensor(rest), { top_p = p }),
          draws(logits, { top_p = p, top_k = k }), ("top_k = %d, top_p = %g"):format(k, p))
      end
    end
    -- token 6 has 0.4 of the total probability, but 0.5 among the top 2000, which exceeds top_p
    local flat = engine.zeros(V):totable()
    flat[7] = math.log(0.4 / 0.6 * (V - 1))
    for _, id in ipairs { unpack(draws(engine.tensor(flat), { top_p = 0.45, top_k = 2000 }), 2) } do
      assert.equal(6, id)
    end
  end)

  it("restores modes, tape and memory", function()
    local model = nn.gpt(with { dropout = 0.5 })
    model.blocks[1]:eval()
    model:generate({ 1 }, 2)
    collectgarbage() collectgarbage()   -- optimizers that earlier specs dropped
    local before, total = engine.memory(), 0
    for _ = 1, 5 do model:generate({ 1 }, 20) end
    for i, row in ipairs(engine.memory()) do total = total + row.used - before[i].used end
    assert.equal(0, total)
    assert.same({ true, false, true },
      { model:is_training(), model.blocks[1]:is_training(), model.blocks[2]:is_training() })
    assert.error_matches(function() model:generate({ 99 }, 1) end,
      "In wte: embedding: expected indices in 0..39, got 99")
    assert.is_true(model:is_training())
    assert.error_matches(coroutine.wrap(function()
      model:generate({ 1 }, 2, { progress = coroutine.yield })
    end), "generate: expected progress to return, but it yielded")
    assert.is_true(model:is_training())
    local calls = 0
    coroutine.wrap(function()
      model:generate({ 1 }, 2, { progress = function() calls = calls + 1 end })
    end)()
    assert.equal(2, calls)
    -- recording is still on
    assert.is_false(engine.zeros(1, { requires_grad = true }):add(1).is_leaf)
    engine.end_step()
  end)
end)
