-- GPT-2: Hugging Face's files in and out, compared with transformers' own numbers
-- (spec/golden/gpt2, written by spec/parity/golden.py), and the errors for invalid files.
local engine = require "engine"
local helper = require "spec.helper"

local GOLDEN = "spec/golden/gpt2"

local function values(x) return x:to("f64"):view(-1):totable() end

local function largest_difference(a, b)
  local worst = 0
  for i, v in ipairs(values(a)) do
    local d = math.abs(v - values(b)[i])
    if not (d <= worst) then worst = d end
  end
  return worst
end

describe("GPT-2", function()
  local folder, expected, weights

  setup(function()
    folder = helper.folder()
    expected, weights = engine.load(GOLDEN .. "/expected.safetensors"),
      engine.load(GOLDEN .. "/model.safetensors")
  end)
  teardown(function() helper.remove(folder) end)

  -- A folder with the golden files, changed by edit(tensors, config text) -> config text.
  local count = 0
  local function variant(edit)
    count = count + 1
    local path = folder .. "/" .. count
    os.execute("mkdir " .. helper.quote(path))
    local tensors = {}
    for name, x in pairs(weights) do tensors[name] = x end
    local text = helper.read(GOLDEN .. "/config.json")
    text = edit(tensors, text) or text
    engine.save(path .. "/model.safetensors", tensors, { format = "pt" })
    helper.write(path .. "/config.json", text)
    return path
  end

  local function logits_differ(model)
    return engine.scope(function()
      model:eval()
      return largest_difference(model(expected.ids:slice(2, 1, 10)), expected.logits)
    end)
  end

  it("gives transformers' logits", function()
    assert.is_true(logits_differ(engine.load_model(GOLDEN)) < 1e-5)
    assert.is_true(logits_differ(engine.load_model(GOLDEN .. "/")) < 1e-5)
  end)

  it("follows PyTorch's losses under AdamW", function()
    local model = engine.load_model(GOLDEN)
    local opt = engine.optim.adamw(model, { lr = 1e-2, weight_decay = 0.1, decay = "matrices" })
    local ids = expected.ids
    for step in engine.steps(5) do
      opt:zero_grad()
      local loss = model:loss(ids:slice(2, 1, 10), ids:slice(2, 2, 11))
      loss:backward()
      assert.near(values(expected.losses)[step], loss:item(), 2e-5)
      opt:clip_grad_norm(1)
      opt:step()
    end
  end)

  it("reads weights without the prefix, with causal masks and with the tied head", function()
    local bare = variant(function(tensors)
      for name, x in pairs(weights) do
        tensors[name] = nil
        tensors[name:gsub("^transformer%.", "")] = x
      end
      tensors["h.0.attn.bias"] = engine.ones(1, 1, 12, 12, { dtype = "u8", keep = true })
      tensors["h.1.attn.masked_bias"] = engine.zeros({}, { keep = true })
      tensors["lm_head.weight"] = weights["transformer.wte.weight"]
    end)
    assert.is_true(logits_differ(engine.load_model(bare)) < 1e-5)
    local head_only = variant(function(tensors)
      tensors["lm_head.weight"],
        tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"], nil
    end)
    assert.is_true(logits_differ(engine.load_model(head_only)) < 1e-5)
  end)

  it("reads low-precision weights as f32", function()
    local low = variant(function(tensors)
      for name, x in pairs(tensors) do tensors[name] =
        engine.scope(function() return x:to("bf16"):keep() end) end
    end)
    local model = engine.load_model(low)
    assert.equal("f32", model.wte.weight.dtype)
    local d = logits_differ(model)
    assert.is_true(d > 1e-4 and d < 0.5)
  end)

  it("has its own head if the embedding is not tied", function()
    local path = variant(function(tensors, text)
      tensors["lm_head.weight"] =
        engine.scope(function() return (weights["transformer.wte.weight"] * 2):keep() end)
      return (text:gsub('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    end)
    local model = engine.load_model(path)
    engine.scope(function()
      model:eval()
      assert.is_true(largest_difference(model(expected.ids:slice(2, 1, 10)),
        expected.logits * 2) < 1e-5)
    end)
    model:save(path .. "/saved")
    assert.is_truthy(engine.load(path .. "/saved/model.safetensors")["lm_head.weight"])
  end)

  it("writes the same names, layouts and values back, and keeps config.json", function()
    local model = engine.load_model(GOLDEN)
    local path = folder .. "/saved"
    model:save(path)
    local saved, metadata = engine.load(path .. "/model.safetensors")
    assert.equal("pt", metadata.format)
    for name, x in pairs(weights) do
      assert.is_truthy(saved[name], name)
      assert.same(x.shape, saved[name].shape)
      assert.equal(0, largest_difference(x, saved[name]), name)
      saved[name] = nil
    end
    assert.is_nil(next(saved))
    assert.equal(helper.read(GOLDEN .. "/config.json"), helper.read(path .. "/config.json"))
  end)

  it("writes f32 into the config.json that it saves", function()
    local path = variant(function(_, text) return (text:gsub('"dtype": "float32"',
      '"dtype": "bfloat16",\n  "torch_dtype": "float16"')) end)
    engine.load_model(path):save(path .. "/saved")
    local text = helper.read(path .. "/saved/config.json")
    assert.is_truthy(text:find('"dtype": "float32",\n  "torch_dtype": "float32"', 1, true))
  end)

  it("builds from the fields of config.json, saves and loads again", function()
    local model = engine.new_model { model_type = "gpt2", vocab_size = 11, n_positions = 8,
      n_embd = 12, n_layer = 2, n_head = 3, n_inner = 20, activation_function = "gelu" }
    assert.same({ 20, 12 }, model.blocks[1].mlp.up.weight.shape)
    model:save(folder .. "/new")
    local again = engine.load_model(folder .. "/new")
    assert.equal("erf", again.config.gelu)
    assert.equal(0.1, again.config.attention_dropout)
    engine.scope(function()
      local ids = engine.tensor({ { 1, 2, 3 } }, "i32")
      assert.equal(0, largest_difference(model:eval()(ids), again:eval()(ids)))
    end)
    assert.is_truthy(tostring(again):find("gpt2(2 layers, width 12, 3 heads, context 8, vocab 11)",
      1, true))
  end)

  it("can still be called nn.gpt2, its name in version 0.1", function()
    local result = helper.run { "-e", ([[
      local gpt2 = require("engine").nn.gpt2
      gpt2 { n_embd = 4, n_head = 1, n_layer = 1, vocab_size = 5, n_positions = 4 }:save(%q)
      print(gpt2.load(%q):count())]]):format(folder .. "/old", folder .. "/old") }
    assert.equal("288\n", result.out, result.err)
    assert.equal("engine: engine.nn.gpt2 is called engine.load_model and engine.new_model now; "
      .. "the old name still works\n", result.err)
  end)

  it("leaves out a field whose default is null", function()
    local model = engine.new_model { model_type = "gpt2", vocab_size = 5, n_positions = 4,
      n_embd = 4, n_layer = 1, n_head = 1 }
    model:save(folder .. "/plain")
    assert.not_matches("n_inner", helper.read(folder .. "/plain/config.json"))
    assert.same({ 16, 4 }, engine.load_model(folder .. "/plain").blocks[1].mlp.up.weight.shape)
  end)

  it("applies dropout only in training", function()
    local model = engine.load_model(GOLDEN, { dropout = 0.5 })
    engine.scope(function()
      local ids = expected.ids:slice(2, 1, 10)
      model:train()
      assert.is_true(largest_difference(model(ids), model(ids)) > 1e-3)
      model:eval()
      assert.equal(0, largest_difference(model(ids), model(ids)))
    end)
    local plain = engine.load_model(GOLDEN, { dropout = 0 })
    plain:train()
    assert.is_true(engine.scope(function() return largest_difference(plain(expected.ids:slice(2, 1,
      10)), expected.logits) end) < 1e-5)
  end)

  it("refuses a position past the context", function()
    local model = engine.load_model(GOLDEN)
    assert.error_matches(function()
      engine.scope(function() return model(engine.zeros(1, 13, "i32")) end)
    end, "expected up to 12 tokens of context, got 13")
  end)

  describe("refuses, in one line,", function()
    local function refuses(path, pattern)
      assert.matches(pattern, helper.failure(engine.load_model, path))
    end
    local function config(from, to)
      return variant(function(_, text)
        local changed, n = text:gsub(from, to)
        assert(n == 1, from)
        return changed
      end)
    end

    it("folders that lack a file", function()
      refuses(folder .. "/nowhere", "cannot read .*/nowhere/config.json: No such file")
      local path = variant(function() end)
      os.remove(path .. "/model.safetensors")
      refuses(path, "model.safetensors is missing; hint: transformers' save_pretrained writes it")
      helper.write(path .. "/model.safetensors.index.json", "{}")
      refuses(path, "index.json: expected a JSON object whose weight_map gives the file of each")
    end)

    it("an invalid config.json", function()
      refuses(variant(function() return "{ n_embd" end), "config.json: the file is not JSON: ")
      refuses(variant(function() return "3" end), "config.json: expected a JSON object, got 3")
      refuses(config('"model_type": "gpt2"', '"model_type": "lama"'),
        "model_type 'lama' is not supported; did you mean 'llama'%?; supported: bert gpt2 llama")
      refuses(config('"n_layer": 2', '"n_layer": 2.5'),
        "expected n_layer to be a whole number from 1 to 16384, got 2.5")
      refuses(config('"n_layer": 2', '"n_layer": "two"'),
        "expected n_layer to be a number, got 'two'")
      refuses(config('"n_head": 2', '"n_head": 3'), "the width 8 is not divisible by 3 heads")
      refuses(config('"resid_pdrop": 0.0', '"resid_pdrop": 1.5'),
        "expected resid_pdrop in %[0, 1%), got 1.5")
      refuses(config('"activation_function": "gelu_new"', '"activation_function": "swish"'),
        "activation 'swish' is not supported; supported: gelu gelu_accurate gelu_fast gelu_new")
      refuses(config('"scale_attn_weights": true', '"scale_attn_weights": false'), "not supported")
    end)

    it("weights that do not fit", function()
      refuses(config('"n_embd": 8', '"n_embd": 16'),
        "expected 'transformer.wte.weight' to have shape %[13 x 16%] %(from config.json%), " ..
          "got %[13 x 8%]")
      refuses(config('"n_layer": 2', '"n_layer": 3'), "has no tensor 'transformer.h.2")
      refuses(config('"n_layer": 2', '"n_layer": 1'),
        "'transformer.h.1.[%w_.]+' does not belong to this model")
      refuses(variant(function(
        tensors) tensors["transformer.h.0.attn.c_attn.weight"] = engine.zeros(24, 8,
        { keep = true }) end),
        "expected 'transformer.h.0.attn.c_attn.weight' to have shape %[8 x 24%] " ..
          "%(from config.json%), got %[24 x 8%]")
      refuses(variant(function(tensors) tensors["transformer.wpe.weight"] = engine.zeros(12, 8,
        { dtype = "i32", keep = true }) end),
        "expected 'transformer.wpe.weight' to be f32, f16, bf16 or f64, got i32")
    end)

    it("a damaged file", function()
      local path = variant(function() end)
      local text = helper.read(path .. "/model.safetensors")
      helper.write(path .. "/model.safetensors", text:sub(1, -9))
      refuses(path, "model.safetensors")
    end)

    it("unknown fields", function()
      assert.error_matches(function() engine.new_model { model_type = "gpt2", n_layers = 2 } end,
        "unknown field 'n_layers'; did you mean 'n_layer'%?")
      assert.error_matches(function() engine.load_model() end, "expected a folder, got nothing")
      assert.error_matches(function() engine.new_model { model_type = "gpt2", n_layer = 1,
        n_embd = 4, n_head = 1, vocab_size = 5, n_positions = 4 }:save("") end, "expected a folder")
    end)
  end)
end)
