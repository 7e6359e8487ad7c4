-- Models of Hugging Face's transformers: logits, losses and greedy tokens of tiny models compared
-- with transformers' own (spec/golden/hf.json, written by spec/parity/hf.py --golden), files in and
-- out, published configurations, and errors for invalid files. gpt2_spec.lua has more about GPT-2.
local engine = require "engine"
local helper = require "spec.helper"
local cjson = require "cjson"

local golden = cjson.decode(helper.read("spec/golden/hf.json"))

-- The numbers of hf.py: pseudo-random in (-1, 1).
local function numbers(count, seed)
  local values, state = {}, seed
  for i = 1, count do
    state = state * 16807 % 2147483647
    values[i] = state / 2147483647 * 2 - 1
  end
  return values
end

local function sorted_keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys)
  return keys
end

-- The weights of a golden model, { name = tensor }.
local function weights_of(model)
  local tensors = {}
  for i, name in ipairs(sorted_keys(model.shapes)) do
    local shape, count = model.shapes[name], 1
    for _, n in ipairs(shape) do count = count * n end
    local norm = #shape == 1 and name:lower():gsub("ln_", "norm"):find("norm")
      and name:find("weight$")
    local values = numbers(count, i)
    for k = 1, count do values[k] = values[k] * 0.25 + (norm and 1 or 0) end
    tensors[name] = engine.tensor(values, { keep = true }):view(shape):keep()
  end
  engine.end_step()
  return tensors
end

local function flat(x) return x:to("f64"):view(-1):totable() end

describe("load_model", function()
  local folder

  setup(function() folder = helper.folder() end)
  teardown(function() helper.remove(folder) end)

  local count = 0
  -- A folder with a golden model, changed by edit(tensors, config) -> the text of config.json or
  -- nil.
  local function variant(name, edit)
    count = count + 1
    local path, model = folder .. "/" .. count, golden.models[name]
    os.execute("mkdir " .. helper.quote(path))
    local tensors, config = weights_of(model), {}
    for key, value in pairs(model.config) do config[key] = value end
    local text = edit and edit(tensors, config)
    engine.save(path .. "/model.safetensors", tensors, { format = "pt" })
    helper.write(path .. "/config.json", text or cjson.encode(config))
    for _, x in pairs(tensors) do x:free() end
    return path
  end

  local function ids_of(model, first, last)
    return engine.tensor(model.ids, "i32"):slice(2, first, last)
  end

  for name, expected in pairs(golden.models) do
    it("gives transformers' logits, tokens and losses: " .. name, function()
      local model = engine.load_model(variant(name)):eval()
      engine.scope(function()
        local logits = model(ids_of(expected, 1, 10))
        local last = flat(logits:select(1, 1):view(-1, logits:size(-1)):select(1, -1))
        for i, v in ipairs(expected.logits) do assert.near(v, last[i], 2e-6 * 5) end
        assert.near(expected.sum, logits:abs():sum():item(), 2e-6 * expected.sum)
      end)
      if expected.tokens then
        local prompts = {}
        for i, row in ipairs(expected.ids) do prompts[i] = { unpack(row, 1, 4) } end
        -- with dynamic scaling, a cached key keeps the RoPE base of the length when it was
        -- computed, so results without a cache differ
        for _, cache in ipairs(name == "llama_dynamic" and { true } or { true, false }) do
          assert.same(expected.tokens, model:generate(prompts,
            { max_tokens = 16, temperature = 0, cache = cache }))
        end
      end
      local opt = engine.optim.adamw(model, { lr = 1e-2, weight_decay = 0.1, decay = "matrices" })
      model:train()
      for step in engine.steps(4) do
        opt:zero_grad()
        local y = model.config.labels and engine.tensor({ 2, 0 }, "i64")
          or ids_of(expected, 2, 11)
        local loss = model:loss(ids_of(expected, 1, 10), y)
        loss:backward()
        assert.near(expected.losses[step], loss:item(), 1e-5 * expected.losses[1])
        opt:step()
      end
    end)
  end

  for name, expected in pairs(golden.models) do
    it("leaves out padding as transformers does: " .. name, function()
      local model = engine.load_model(variant(name)):eval()
      local whole = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 }
      local masks = { right = { whole, { 1, 1, 1, 1, 0, 0, 0, 0, 0, 0 } },
        left = { whole, { 0, 0, 0, 0, 0, 0, 1, 1, 1, 1 } } }
      if not expected.left then masks.left = nil end
      for side, rows in pairs(masks) do
        engine.scope(function()
          local x, mask = ids_of(expected, 1, 10), engine.tensor(rows, "i32")
          local y = model.config.labels and model(mask:ne(0):where(x, 0), { mask = mask })
            or model(x, { mask = mask }) * mask:to("f32"):unsqueeze(3)
          assert.near(expected[side], y:abs():sum():item(), 2e-6 * expected[side])
        end)
      end
      if not expected.unequal then return end
      local prompts = { { unpack(expected.ids[1], 1, 4) }, { unpack(expected.ids[2], 3, 4) } }
      for _, cache in ipairs(name == "llama_dynamic" and { true } or { true, false }) do
        local lists = model:generate(prompts, { max_tokens = 12, temperature = 0, cache = cache })
        for i, list in ipairs(lists) do
          assert.same(expected.unequal[i], { unpack(list, #prompts[i] + 1) })
        end
      end
    end)
  end

  local function same_files(a, b)
    local x, y = engine.load(a), engine.load(b)
    assert.same(sorted_keys(x), sorted_keys(y))
    for key, value in pairs(x) do
      assert.equal(value.dtype, y[key].dtype)
      assert.same(value.shape, y[key].shape)
      assert.same(flat(value), flat(y[key]), key)
    end
    engine.end_step()
  end

  for name in pairs(golden.models) do
    it("saves what it loaded, as one file and in shards: " .. name, function()
      local path = variant(name)
      helper.write(path .. "/tokenizer.json", "{}")
      helper.write(path .. "/pytorch_model.bin", "weights")
      local model = engine.load_model(path)
      model:save(path .. "/one")
      same_files(path .. "/model.safetensors", path .. "/one/model.safetensors")
      assert.equal("{}", helper.read(path .. "/one/tokenizer.json"))
      assert.is_nil(io.open(path .. "/one/pytorch_model.bin"))
      model:save(path .. "/one", { shard_bytes = 4000 })       -- replaces the single file
      assert.is_nil(io.open(path .. "/one/model.safetensors"))
      local again = engine.load_model(path .. "/one")
      again:save(path .. "/two/")
      again:save(path .. "/one/../one")                        -- into its own folder
      assert.equal("{}", helper.read(path .. "/one/tokenizer.json"))
      assert.equal(helper.read(path .. "/two/model.safetensors"), (function()
        model:save(path .. "/three")
        return helper.read(path .. "/three/model.safetensors")
      end)())
    end)
  end

  it("keeps bf16 with dtype = 'auto', converts otherwise, and saves in another dtype", function()
    local path = variant("llama3", function(tensors, config)
      for key, x in pairs(tensors) do
        tensors[key] = engine.scope(function() return x:to("bf16"):keep() end)
        x:free()
      end
      config.dtype = "bfloat16"
    end)
    local auto = engine.load_model(path, { dtype = "auto" })
    assert.equal("bf16", auto.embed.weight.dtype)
    assert.equal("bf16", auto.blocks[1].attn.qkv.weight.dtype)
    auto:save(path .. "/auto")
    same_files(path .. "/model.safetensors", path .. "/auto/model.safetensors")
    local full = engine.load_model(path)
    assert.equal("f32", full.blocks[2].mlp.down.weight.dtype)
    full:save(path .. "/full", { dtype = "bf16" })
    same_files(path .. "/model.safetensors", path .. "/full/model.safetensors")
    assert.matches('"bfloat16"', helper.read(path .. "/full/config.json"))
    full:save(path .. "/f32")
    assert.matches('"float32"', helper.read(path .. "/f32/config.json"))
    assert.equal("f16", engine.load_model(path, { dtype = "f16" }).norm.weight.dtype)
  end)

  it("takes no more memory than the model and one tensor", function()
    local model = engine.new_model { model_type = "llama", hidden_size = 64, num_hidden_layers = 6,
      intermediate_size = 128, num_attention_heads = 4, vocab_size = 300 }
    model:save(folder .. "/memory", { dtype = "bf16", shard_bytes = 1e5 })
    local largest, bytes = 300 * 64 * 2, model:count() * 4
    for _, p in ipairs(model:parameters()) do p.tensor:free() end
    collectgarbage() collectgarbage()
    local function used()
      local sum = 0
      for _, row in ipairs(engine.memory()) do sum = sum + row.used end
      return sum
    end
    local before, highest = used(), 0
    local first = helper.shell("ls " .. helper.quote(folder) .. "/memory/*.safetensors").out
    local file = require("engine.tensor.safetensors").open(first:match("^[^\n]+"))
    local File = getmetatable(file)
    local read = File.read
    File.read = function(...)
      local x = read(...)
      highest = math.max(highest, used() - before)
      return x
    end
    local good, loaded = pcall(engine.load_model, folder .. "/memory")
    File.read = read
    file:close()
    assert.is_true(good, loaded)
    assert.is_true(highest > 0 and highest <= bytes + largest + 65536, highest .. " " .. bytes)
  end)

  it("reads BERT's old names, and leaves out what the model does not need", function()
    local path = variant("bert", function(tensors)
      for _, name in ipairs(sorted_keys(tensors)) do
        local old = name:gsub("LayerNorm%.weight", "LayerNorm.gamma"):gsub("LayerNorm%.bias",
          "LayerNorm.beta")
        if old ~= name then tensors[old], tensors[name] = tensors[name], nil end
      end
      tensors["bert.pooler.dense.weight"] = engine.zeros(16, 16, { keep = true })
    end)
    local model = engine.load_model(path):eval()
    engine.scope(function()
      local expected = golden.models.bert
      local last = flat(model(ids_of(expected, 1, 10)):select(1, 1):select(1, -1))
      for i, v in ipairs(expected.logits) do assert.near(v, last[i], 1e-5) end
      local ids = ids_of(expected, 1, 10)
      assert.same(flat(model(ids)), flat(model(ids, engine.zeros(2, 10, "i32"))))
      assert.not_same(flat(model(ids)), flat(model(ids, engine.ones(2, 10, "i32"))))
    end)
  end)

  it("stops at the eos token of config.json, or at `stop`", function()
    local expected = golden.models.llama
    local prompt = { unpack(expected.ids[1], 1, 4) }
    local third = expected.tokens[1][7]
    local path = variant("llama", function(_, config) config.eos_token_id = third end)
    local model = engine.load_model(path)
    local list = model:generate(prompt, { max_tokens = 16, temperature = 0 })
    assert.equal(third, list[#list])
    assert.is_true(#list <= 7)
    local told = {}
    local function progress(done, all) told[#told + 1] = done .. "/" .. all end
    assert.equal(20, #model:generate(prompt, { max_tokens = 16, temperature = 0, stop = {},
      progress = progress }))
    assert.same({ 16, "1/16", "16/16" }, { #told, told[1], told[16] })
    model:generate(prompt, { max_tokens = 16, temperature = 0, progress = progress })
    assert.equal(("%d/%d"):format(#list - 4, #list - 4), told[#told])        -- the stop token
    helper.write(path .. "/generation_config.json", '{"eos_token_id": [1000, ' .. prompt[4] .. "]}")
    assert.same({ 1000, prompt[4] }, engine.load_model(path).stop)
    local both = model:generate({ prompt, { 1 } }, { max_tokens = 3, stop = {}, seed = 1 })
    assert.same({ 7, 4 }, { #both[1], #both[2] })
    assert.same(both, model:generate({ prompt, { 1 } }, { max_tokens = 3, stop = {}, seed = 1 }))
  end)

  it("takes a width that head_dim does not divide", function()
    local model = engine.new_model { model_type = "mistral", hidden_size = 18, head_dim = 4,
      num_attention_heads = 4, num_key_value_heads = 2, num_hidden_layers = 1,
      intermediate_size = 8, vocab_size = 9 }
    assert.same({ 32, 18 }, model.blocks[1].attn.qkv.weight.shape)
    assert.same({ 18, 16 }, model.blocks[1].attn.out.weight.shape)
    assert.equal(3, #model:generate({ 1 }, { max_tokens = 2 }))
  end)

  it("takes a null as no sliding window, and a missing field as transformers' default", function()
    local fields = { model_type = "mistral", hidden_size = 8, num_attention_heads = 2,
      num_key_value_heads = 2, num_hidden_layers = 1, intermediate_size = 8, vocab_size = 9 }
    assert.equal(4096, engine.new_model(fields).blocks[1].attn.window)
    fields.sliding_window = cjson.null
    assert.is_nil(engine.new_model(fields).blocks[1].attn.window)
  end)

  it("makes a classifier of a model for tokens, and saves it as one", function()
    for _, name in ipairs { "llama", "gpt2_untied", "bert" } do
      local path = variant(name, function(tensors, config)
        config.pruned = {}
        if name ~= "bert" then return end
        tensors["bert.pooler.dense.weight"] = engine.ones(16, 16, { keep = true })
        tensors["bert.pooler.dense.bias"] = engine.ones(16, { keep = true })
      end)
      local model = engine.load_model(path, { labels = 3, pad = 1 }):eval()
      local x = ids_of(golden.models[name], 1, 10)
      local scores = engine.scope(function() return model(x):keep() end)
      assert.same({ 2, 3 }, scores.shape)
      if name == "bert" then
        assert.equal(1, model.pooler.weight:min():item())            -- from the file
        assert.equal(0, model.classifier.bias:abs():max():item())
      else assert.is_true(model.score.weight:abs():max():item() > 0) end
      model:save(path .. "/saved")
      local config = cjson.decode(helper.read(path .. "/saved/config.json"))
      assert.matches("ForSequenceClassification$", config.architectures[1])
      assert.same({ ["0"] = "LABEL_0", ["1"] = "LABEL_1", ["2"] = "LABEL_2" }, config.id2label)
      assert.same({ LABEL_0 = 0, LABEL_1 = 1, LABEL_2 = 2 }, config.label2id)
      assert.equal(1, config.pad_token_id)
      local again = engine.load_model(path .. "/saved"):eval()
      assert.same(flat(scores), engine.scope(function() return flat(again(x)) end))
    end
  end)

  it("builds new classifiers, and refuses in one line what they cannot do", function()
    local fields = { model_type = "llama", hidden_size = 8, num_attention_heads = 2,
      num_hidden_layers = 1, intermediate_size = 8, vocab_size = 9, num_labels = 4 }
    local function refuses(f, pattern)
      assert.matches(pattern, helper.failure(f))
    end
    local model = engine.new_model(fields)
    local x = engine.tensor({ { 1, 2, 3 }, { 4, 5, 0 } }, { dtype = "i32", keep = true })
    assert.same({ 1, 4 }, engine.scope(function() return model(x:slice(1, 1, 1)).shape end))
    refuses(function() model(x) end,
      "llama: expected the option pad, the id of the padding token, for a batch of 2 rows")
    refuses(function() model:generate { 1 } end, "llama has a head for labels, not for tokens")
    fields.num_labels = 1
    refuses(function() engine.new_model(fields):loss(x, x) end, "with one label predicts a number")
    fields.num_labels = 0.5
    refuses(function() engine.new_model(fields) end, "expected from 1 to 65536 labels, got 0.5")
    refuses(function() engine.load_model(folder, { pad = 1 }) end,
      "pad is an option of classifiers; hint: labels")
    local bert = engine.new_model { model_type = "bert", hidden_size = 8, num_attention_heads = 2,
      num_hidden_layers = 1, intermediate_size = 8, vocab_size = 9, num_labels = 4 }
    local mask = engine.tensor({ { 1, 1, 1 }, { 0, 1, 1 } }, { dtype = "i32", keep = true })
    refuses(function() bert(x, { mask = mask }) end, "row 2 begins with padding")
  end)

  it("with a cache embeds each token once, plus one token to find the dtypes", function()
    local model = engine.load_model(variant("llama"))
    local rows, forward = 0, model.embed.forward
    rawset(model.embed, "forward", function(self, ids)
      rows = rows + ids.count
      return forward(self, ids)
    end)
    model:generate({ 1, 2, 3, 4, 5, 6, 7, 8 }, { max_tokens = 20, stop = {} })
    assert.equal(1 + 8 + 19, rows)
    rows = 0
    model:generate({ 1, 2, 3, 4, 5, 6, 7, 8 }, { max_tokens = 20, stop = {}, cache = false })
    assert.equal((8 + 27) * 20 / 2, rows)
  end)

  describe("refuses, in one line,", function()
    local function refuses(path, pattern, options)
      assert.matches(pattern, helper.failure(engine.load_model, path, options))
    end
    local function with(name, changes)
      return variant(name, function(_, config)
        for key, value in pairs(changes) do config[key] = value end
      end)
    end

    it("what it does not support, by name", function()
      refuses(with("llama", { model_type = "mamba" }), "config.json: model_type 'mamba' is not sup")
      refuses(with("llama", { architectures = { "LlamaForTokenClassification" } }),
        "architecture LlamaForTokenClassification is not supported; supported: LlamaForCausalLM")
      refuses(with("llama", { rope_parameters = { rope_type = "longrope", factor = 4 } }),
        "rope type 'longrope' is not supported; supported: default dynamic linear llama3 yarn")
      refuses(with("llama", { rope_scaling = { type = "su", factor = 2 },
        rope_parameters = cjson.null }), "rope type 'su' is not supported")
      refuses(with("llama", { rope_parameters = { rope_type = "dynamic", factor = 2 },
        head_dim = 2 }), "rope type 'dynamic' is not supported with a head width of 2")
      refuses(with("llama", { hidden_act = "gelu" }), "hidden_act gelu is not supported")
      refuses(with("llama", { partial_rotary_factor = 0.5 }), "partial_rotary_factor 0.5 is not")
      refuses(with("llama", { quantization_config = { bits = 4 } }),
        "quantization_config is not supported")
      refuses(with("bert", { position_embedding_type = "relative_key" }),
        "position_embedding_type relative_key is not supported")
      refuses(variant("llama"), "expected dtype auto, bf16, f16, f32 or f64, got 'fp16'; did you",
        { dtype = "fp16" })
    end)

    it("fields that make no sense", function()
      refuses(with("llama", { num_key_value_heads = 3 }), "4 heads are not divisible by 3 num_key")
      refuses(with("llama", { num_hidden_layers = 1e9 }),
        "expected num_hidden_layers to be a whole number from 1 to 16384, got 1000000000")
      refuses(with("llama", { num_hidden_layers = 16000 }),
        "each of the 16000 layers, but .* has only %d+ t")
      refuses(with("llama", { hidden_size = 2 ^ 30, intermediate_size = 2 ^ 30 }),
        "config.json: expected a tensor of up to 2%^48 elements, got")
      refuses(with("llama", { vocab_size = 2 ^ 31 - 1, hidden_size = 2 ^ 31 - 4 }),
        "config.json: expected a tensor of up to 2%^48 elements, got")
      refuses(with("llama", { vocab_size = 18 }), "expected 'model.embed_tokens.weight' to have "
        .. "shape %[18 x 16%] %(from config.json%), got %[17 x 16%]")
      refuses(with("llama3", { rope_parameters = { rope_type = "llama3", factor = "8" } }),
        "expected factor to be a finite number above 0, got '8'")
      local function rope(changes, pattern)
        local p = { rope_type = "yarn", factor = 4 }
        for key, value in pairs(changes) do p[key] = value end
        refuses(with("llama", { rope_parameters = p }), pattern)
      end
      rope({ beta_fst = 8 },
        "the field 'beta_fst' of rope_parameters or rope_scaling is not supported; did you " ..
        "mean 'beta_fast'")
      rope({ alpha = 8 }, "the field 'alpha' of rope_parameters or rope_scaling is not supported")
      rope({ truncate = 3 }, "expected truncate to be a boolean, got 3")
      rope({ beta_fast = 1, beta_slow = 32 }, "expected beta_fast >= beta_slow, got 1 and 32")
      rope({ original_max_position_embeddings = 2.5 }, "whole number from 1 to 2^31 %- 1, got 2.5")
      rope({ rope_type = "linear", factor = cjson.null }, "number above 0, got nothing")
      refuses(with("mixtral", { num_experts_per_tok = 9 }), "expected num_experts_per_tok to be at")
      refuses(variant("llama", function() return '{"model_type": "llama\255"}' end),
        "config.json: the file is not UTF%-8")
      refuses(variant("llama", function() return "{}" end), "expected a model_type, got nothing")
      refuses(variant("llama", function() return "[" .. ("["):rep(5000) end),
        "the file is not JSON")
    end)

    it("damaged shards and indices", function()
      local function sharded(damage)
        local path = variant("llama")
        local out = path .. "/sharded"
        engine.load_model(path):save(out, { shard_bytes = 4000 })
        local index = cjson.decode(helper.read(out .. "/model.safetensors.index.json"))
        damage(out, index)
        helper.write(out .. "/model.safetensors.index.json", cjson.encode(index))
        return out
      end
      local NORM = "model.norm.weight"
      refuses(sharded(function(out, index) os.remove(out .. "/" .. index.weight_map[NORM]) end),
        "model%-%d+%-of%-%d+.safetensors is missing; hint: the index names it as a shard")
      refuses(sharded(function(out, index)
        local path = out .. "/" .. index.weight_map[NORM]
        helper.write(path, helper.read(path):sub(1, -5))
      end), "model%-%d+")
      refuses(sharded(function(_, index)
        index.weight_map["model.extra"] = index.weight_map[NORM]
      end), "expected the tensor 'model.extra' in model%-")
      refuses(sharded(function(_, index) index.weight_map[NORM] = nil end),
        "index.json: .* holds the tensor 'model.norm.weight', but the weight_map gives no file")
      refuses(sharded(function(_, index) index.weight_map[NORM] = "../model.safetensors" end),
        "expected the weight_map to give a file of this folder for 'model.norm.weight'")
      refuses(sharded(function(_, index) index.weight_map = 3 end), "got a weight_map that is no")
    end)
  end)
end)

-- The fields that the model cards of these models publish.
local PUBLISHED = {
  { "Llama-3-8B", 8030261248, { model_type = "llama", architectures = { "LlamaForCausalLM" },
    attention_bias = false, attention_dropout = 0, hidden_act = "silu", hidden_size = 4096,
    intermediate_size = 14336, max_position_embeddings = 8192, num_attention_heads = 32,
    num_hidden_layers = 32, num_key_value_heads = 8, rms_norm_eps = 1e-5,
    rope_scaling = cjson.null, rope_theta = 500000, tie_word_embeddings = false,
    vocab_size = 128256 } },
  { "Llama-3.1-8B", 8030261248, { model_type = "llama", architectures = { "LlamaForCausalLM" },
    hidden_act = "silu", hidden_size = 4096, intermediate_size = 14336,
    max_position_embeddings = 131072, mlp_bias = false, num_attention_heads = 32,
    num_hidden_layers = 32, num_key_value_heads = 8, rms_norm_eps = 1e-5,
    rope_scaling = { factor = 8, low_freq_factor = 1, high_freq_factor = 4,
      original_max_position_embeddings = 8192, rope_type = "llama3" }, rope_theta = 500000,
    tie_word_embeddings = false, vocab_size = 128256 } },
  { "Qwen3-0.6B", 596049920, { model_type = "qwen3", architectures = { "Qwen3ForCausalLM" },
    attention_bias = false, head_dim = 128, hidden_act = "silu", hidden_size = 1024,
    intermediate_size = 3072, max_position_embeddings = 40960, max_window_layers = 28,
    num_attention_heads = 16, num_hidden_layers = 28, num_key_value_heads = 8,
    rms_norm_eps = 1e-6, rope_scaling = cjson.null, rope_theta = 1000000,
    sliding_window = cjson.null, tie_word_embeddings = true, use_sliding_window = false,
    vocab_size = 151936 } },
  { "Mixtral-8x7B", 46702792704, { model_type = "mixtral", architectures = { "MixtralForCausalLM" },
    attention_dropout = 0, hidden_act = "silu", hidden_size = 4096, intermediate_size = 14336,
    max_position_embeddings = 32768, num_attention_heads = 32, num_experts_per_tok = 2,
    num_hidden_layers = 32, num_key_value_heads = 8, num_local_experts = 8,
    output_router_logits = false, rms_norm_eps = 1e-5, rope_theta = 1000000,
    router_aux_loss_coef = 0.02, sliding_window = cjson.null, tie_word_embeddings = false,
    vocab_size = 32000 } },
  { "BERT base", 109514298, { model_type = "bert", architectures = { "BertForMaskedLM" },
    attention_probs_dropout_prob = 0.1, gradient_checkpointing = false, hidden_act = "gelu",
    hidden_dropout_prob = 0.1, hidden_size = 768, intermediate_size = 3072,
    layer_norm_eps = 1e-12, max_position_embeddings = 512, num_attention_heads = 12,
    num_hidden_layers = 12, pad_token_id = 0, position_embedding_type = "absolute",
    type_vocab_size = 2, vocab_size = 30522 } },
}

describe("engine plan FOLDER and engine generate", function()
  local folder
  setup(function() folder = helper.folder() end)
  teardown(function() helper.remove(folder) end)

  for i, published in ipairs(PUBLISHED) do
    it("plans " .. published[1] .. " without weights", function()
      local path = folder .. "/" .. i
      os.execute("mkdir " .. path)
      helper.write(path .. "/config.json", cjson.encode(published[3]))
      local result = helper.run { "plan", path }
      assert.equal(0, result.code, result.err)
      local grouped = require("engine.base.show").grouped(published[2])
      assert.is_truthy(result.out:find("\n" .. grouped .. " parameters", 1, true), result.out)
      local facts = require("engine.cli.plan_model").facts(published[3], "here")
      assert.equal(published[2], facts.parameters)
    end)
  end

  it("predicts the memory that training takes", function()
    local M_ffi = require "engine.base.ffi"
    for _, use in ipairs(require("engine.cli.plan_model").USES) do
      if use[5] then
        local model = engine.new_model { model_type = "llama", hidden_size = 128, vocab_size = 500,
          num_hidden_layers = 2, num_attention_heads = 4, intermediate_size = 256 }
        local opt = engine.optim.adamw(model, { precision = use[5] })
        local bytes, moments = M_ffi.new("int64_t[4]"), 0
        M_ffi.C.eng_params_bytes(bytes, opt.params)
        for i, p in ipairs(opt.list) do moments = moments + opt.state:bytes(i, p.tensor.count) end
        local n = model:count()
        assert.near(use[2], tonumber(bytes[0] + bytes[1]) / n, 0.02 * use[2])
        assert.near(use[3], tonumber(bytes[2]) / n, 0.02 * use[3])
        assert.near(use[4], moments / n, 0.02 * use[4])
      end
    end
  end)

  it("prints continued lists, and errors in one line", function()
    local path = folder .. "/tiny"
    engine.new_model { model_type = "llama", hidden_size = 16, vocab_size = 20,
      num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 16 }:save(path)
    local words = { "generate", path, "--tokens", "1,2", "--tokens", "3", "--max_tokens", "4",
      "--seed", "1", "--top_p", "0.9" }
    local first = helper.run(words)
    assert.equal(0, first.code, first.err)
    assert.matches("^1,2,%d+,%d+,%d+,%d+\n3,%d+,%d+,%d+,%d+\n$", first.out)
    assert.equal("", first.err)                                -- no progress outside a terminal
    assert.equal(first.out, helper.run(words).out)
    local vocab = { ["?"] = 0, hello = 1, world = 2 }
    for id = 3, 19 do vocab["w" .. id] = id end
    helper.write(path .. "/tokenizer.json", cjson.encode { pre_tokenizer = { type = "Whitespace" },
      model = { type = "WordLevel", unk_token = "?", vocab = vocab } })
    local text = helper.run { "generate", path, "--prompt", "hello world", "--tokens", "3",
      "--max_tokens", "4", "--seed", "1" }
    assert.matches("^3,%d+,%d+,%d+,%d+\nhello world[^\n]*\n$", text.out, 1, false)
    local every = table.concat(require("engine.base.nearest").keys(vocab), ",")
    local ended = helper.run { "generate", path, "--tokens", "1", "--stop", every }
    assert.matches("^1,%d+\n$", ended.out)                     -- every token ends the list
    for _, case in ipairs {
      { { "generate", path, "--tokens", "1", "--stop", "wrld" }, "no token 'wrld'" },
      { { "generate", folder, "--prompt", "a" }, "tokenizer.json: .*; hint: %-%-prompt and texts" },
      { { "generate", path, "a" }, "expected one folder %(a text follows %-%-prompt" },
      { { "generate", path }, "expected %-%-prompt TEXT, or %-%-tokens with a list of ids such" },
      { { "generate", path, "--prompt", "" }, "%-%-prompt: expected a text, got an empty one" },
      { { "generate", path, "--tokens", "1,x" }, "expected token ids such as 1,2,3, got 'x'" },
      { { "generate", path, "--tokens", "99" }, "embedding: expected indices in 0..19, got 99" },
      { { "generate", path, "--tokens", "1", "--top_p", "2" }, "expected top_p in %(0, 1%], got" },
      { { "generate", folder .. "/none", "--tokens", "1" }, "none'; expected the folder of a" },
      { { "generate", path, "--tokens", "1", "--dtype", "int4" },
        "expected dtype auto, bf16, f16, f32 or f64, got 'int4'" },
      { { "plan", folder }, "cannot read .*/config.json: No such file" },
    } do
      local result = helper.run(case[1])
      assert.equal(1, result.code)
      assert.is_truthy(result.err:find(case[2]), result.err)
      assert.matches("^[^\n]+\n$", result.err)
    end
  end)
end)
