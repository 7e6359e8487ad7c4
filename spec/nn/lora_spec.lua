-- Low-rank adapters: PEFT's numbers and files (spec/golden/lora, written by spec/parity/lora.py),
-- every precision recipe and format of the base, merging, checkpoints, and the errors for misuse.
local engine = require "engine"
local helper = require "spec.helper"
local start = require "spec.dist.start"
local cjson = require "cjson"

local lora, nn = engine.lora, engine.nn
local requires_grad = require("engine.train.optim").requires_grad
local BASE, GOLDEN = "spec/golden/gpt2", "spec/golden/lora/"

local function difference(a, b) return (a:to("f64") - b:to("f64")):abs():max():item() end

local function logits(model, ids) return engine.scope(function() return model(ids):keep() end) end

local function tiny(options)
  engine.seed(3)
  local all = { vocab = 32, context = 8, width = 16, heads = 2, layers = 2 }
  for key, value in pairs(options or {}) do all[key] = value end
  return nn.gpt(all)
end

local ids, targets

-- The first and the last loss of `steps` updates of a model.
local function train(model, steps, precision, lr)
  precision = precision or "fp32"
  local opt, first, last = engine.optim.adamw(model, { lr = lr or 2e-2, precision = precision })
  for _ in engine.steps(steps) do
    opt:zero_grad()
    local loss = engine.autocast(precision, model.loss, model, ids, targets)
    loss:backward()
    opt:step()
    last = loss:item()
    first = first or last
  end
  return first, last, opt
end

describe("nn.lora", function()
  local folder

  setup(function()
    folder = helper.folder()
    engine.seed(1)
    ids, targets = engine.randint(0, 32, { 4, 8 }):keep(), engine.randint(0, 32, { 4, 8 }):keep()
  end)
  teardown(function() helper.remove(folder) end)

  for _, kind in ipairs { "lora", "dora" } do
    it("computes and trains PEFT's numbers: " .. kind, function()
      local model = lora.load(engine.load_model(BASE, { dropout = 0 }), GOLDEN .. kind)
      local expected = engine.load(GOLDEN .. kind .. "/expected.safetensors")
      local x, y = expected.ids:slice(2, 1, 10):keep(), expected.ids:slice(2, 2, 11):keep()
      assert.is_true(difference(logits(model, x), expected.before) < 1e-5)
      local opt, losses = engine.optim.adamw(model, { lr = 1e-2, weight_decay = 0.1 }), {}
      assert.equal(kind == "dora" and 12 or 8, #opt.list)
      for step in engine.steps(20) do
        opt:zero_grad()
        local loss = model:loss(x, y)
        loss:backward()
        opt:step()
        losses[step] = loss:item()
      end
      for step, loss in ipairs(expected.losses:totable()) do
        assert.near(loss, losses[step], 1e-5)
      end
      assert.is_true(difference(logits(model, x), expected.after) < 1e-5)
    end)

    it("changes nothing at first, trains in every precision, and merges: " .. kind, function()
      for _, precision in ipairs { "fp32", "bf16", "fp16", "fp8_block", "fp8_delayed" } do
        for _, base in ipairs { "f32", "bf16", "e4m3", "nf4" } do
          if base ~= "e4m3" and base ~= "nf4" or not precision:find("^fp8") then
            local model = tiny { dropout = 0.1 }:eval()
            local before = logits(model, ids)
            nn.lora(model, { rank = 4, dora = kind == "dora", base = base, dropout = 0.1 })
            local limit = ({ f32 = kind == "dora" and 1e-6 or 0, bf16 = 2e-3, e4m3 = 2e-2,
              nf4 = 0.2 })[base]
            assert.is_true(difference(logits(model, ids), before) <= limit)
            local frozen = model.blocks[1].attn.qkv.weight:to("f32"):keep()
            local first, last = train(model:train(), 12, precision)
            local where = precision .. " " .. base
            assert.is_true(last < first - 0.04, where .. (": %g to %g"):format(first, last))
            assert.equal(0, difference(frozen, model.blocks[1].attn.qkv.weight:to("f32")))
            local trained = logits(model:eval(), ids)
            assert.equal(model, lora.merge(model))
            assert.is_true(difference(logits(model, ids), trained) < 1e-5, where)
            assert.equal(tiny():count(), model:count())
            assert.equal(0, difference(logits(lora.unmerge(model), ids), trained))
          end
        end
      end
    end)
  end

  it("works where FP8 recomputes SwiGLU's output and keeps attention's output in e5m6", function()
    engine.seed(3)
    local model = nn.llama { vocab = 32, context = 8, width = 32, heads = 2, layers = 2,
      hidden = 48 }
    nn.lora(model, { rank = 4 })
    local first, last = train(model, 12, "fp8_block")
    assert.is_true(last < first - 0.1)
  end)

  it("applies dropout to the adapters alone, in training mode, and switches them off", function()
    for _, dora in ipairs { false, true } do
      local model = nn.lora(tiny(), { rank = 4, dropout = 0.5, dora = dora })
      train(model, 5)
      local still = logits(model:eval(), ids)
      assert.equal(0, difference(still, logits(model, ids)))
      assert.is_true(difference(still, logits(model:train(), ids)) > 1e-4)
      local off = lora.disabled(model, logits, model, ids)
      assert.is_true(difference(off, logits(tiny(), ids)) == 0)
      assert.equal(0, difference(still, logits(model:eval(), ids)))
    end
  end)

  it("keeps the mean output of a layer under dropout", function()
    for _, dora in ipairs { false, true } do
      engine.seed(5)
      local layer, x = nn.linear(6, 4), engine.randn(1, 6):keep()
      nn.lora(layer, { rank = 2, dropout = 0.3, dora = dora })
      layer.lora_B.weight:normal(0, 1)
      if dora then layer.lora_magnitude_vector:copy { 0.5, 1, 1.5, 2 } end
      engine.scope(function()
        local many = layer(x:expand(20000, 6)):mean(1)
        layer:eval()
        assert.is_true(difference(many, layer(x):view(4)) < 0.05)
      end)
    end
  end)

  it("freezes all but adapters, on the layers that match", function()
    local model = nn.lora(tiny(), { match = { "attn%.qkv$", "1%.mlp" }, rank = 2, alpha = 4 })
    local names = {}
    for _, p in ipairs(model:parameters()) do
      if requires_grad(p.tensor) then names[#names + 1] = p.name end
    end
    assert.same({ "blocks.1.attn.qkv.lora_A.weight", "blocks.1.attn.qkv.lora_B.weight",
      "blocks.1.mlp.up.lora_A.weight", "blocks.1.mlp.up.lora_B.weight",
      "blocks.1.mlp.down.lora_A.weight", "blocks.1.mlp.down.lora_B.weight",
      "blocks.2.attn.qkv.lora_A.weight", "blocks.2.attn.qkv.lora_B.weight" }, names)
    assert.matches("qkv: linear%(16 %-> 48, lora rank 2, alpha 4%)", model:describe())
    nn.lora(model, { match = "2%.mlp%.up", rank = 4 })                 -- a second rank
    assert.equal(10, #engine.optim.adamw(model).list)
    lora.save(model, folder .. "/two")
    local text = helper.read(folder .. "/two/adapter_config.json")
    assert.matches('"rank_pattern":{"transformer.h.1.mlp.c_fc":4}', text, 1, true)
    local again = lora.load(tiny(), folder .. "/two")
    assert.equal(4, again.blocks[2].mlp.up._lora.rank)
    assert.equal(4, again.blocks[2].mlp.up._lora.scale)
    assert.equal(2, again.blocks[1].mlp.up._lora.scale)
  end)

  it("saves and loads under names that the caller chooses", function()
    local model = nn.lora(tiny(), { dora = true })
    train(model, 3)
    local function names(path) return "model." .. path end
    lora.save(model, folder .. "/own/deep", { names = names, base_model = "tiny" })
    local held = engine.load(folder .. "/own/deep/adapter_model.safetensors")
    assert.is_truthy(held["base_model.model.model.blocks.1.attn.qkv.lora_magnitude_vector"])
    local again = lora.load(tiny(), folder .. "/own/deep/", { names = names })
    assert.equal(0, difference(logits(model, ids), logits(again, ids)))
    lora.load(again, folder .. "/own/deep", { names = names })         -- into the same adapters
    for expected, wrong in pairs { ["'blocks.1.attn.qkv') to be a string or a list"] = 3,
      ["to have 48 rows together, got 40"] = { { "a", 20 }, { "b", 20 } } } do
      assert.matches(expected, select(2, pcall(lora.save, model, folder,
        { names = function() return wrong end })), 1, true)
    end
  end)

  it("splits a fused layer into Hugging Face's layers, and joins them again", function()
    local function llama()
      engine.seed(3)
      return nn.llama { vocab = 32, context = 8, width = 32, heads = 4, kv_heads = 2, layers = 1,
        hidden = 48 }
    end
    local model = nn.lora(llama(), { rank = 3, dora = true })
    train(model, 3)
    lora.save(model, folder .. "/llama")
    local held = engine.load(folder .. "/llama/adapter_model.safetensors")
    local function name(part, what)
      return ("base_model.model.model.layers.0.%s.%s"):format(part, what)
    end
    assert.same({ 16, 3 }, held[name("self_attn.v_proj", "lora_B.weight")].shape)
    assert.same({ 3, 48 }, held[name("mlp.down_proj", "lora_A.weight")].shape)
    local again = lora.load(llama(), folder .. "/llama")
    assert.equal(3, again.blocks[1].attn.qkv._lora.rank)
    assert.equal(0, difference(logits(model, ids), logits(again, ids)))
    -- an adapter of q and v as PEFT trains it: each has its own A; k has no adapter
    local parts = {}
    for part, rows in pairs { ["self_attn.q_proj"] = 32, ["self_attn.v_proj"] = 16 } do
      parts[name(part, "lora_A.weight")] = engine.randn(3, 32):keep()
      parts[name(part, "lora_B.weight")] = engine.randn(rows, 3):keep()
    end
    engine.save(folder .. "/llama/adapter_model.safetensors", parts)
    local config = helper.read(folder .. "/llama/adapter_config.json")
    helper.write(folder .. "/llama/adapter_config.json",
      (config:gsub('"use_dora":true', '"use_dora":false')))
    local before, loaded = llama().blocks[1].attn.qkv.weight, llama()
    lora.merge(lora.load(loaded, folder .. "/llama"))
    assert.equal(6, loaded.blocks[1].attn.qkv._lora.rank)
    engine.scope(function()
      local change = loaded.blocks[1].attn.qkv.weight - before
      local function product(part)
        local a, b = parts[name(part, "lora_A.weight")], parts[name(part, "lora_B.weight")]
        return b:matmul(a) * (16 / 3)
      end
      assert.is_true(difference(change:slice(1, 1, 32), product "self_attn.q_proj") < 1e-4)
      assert.equal(0, change:slice(1, 33, 48):abs():max():item())
      assert.is_true(difference(change:slice(1, 49, 64), product "self_attn.v_proj") < 1e-4)
    end)
  end)

  it("resumes from a checkpoint bit for bit", function()
    local function run(steps, name, resume)
      local model = nn.lora(tiny(), { base = "bf16", dora = true })
      local data = { next = function() return { x = ids, y = targets } end }
      engine.trainer { model = model, data = data, steps = steps, log = "quiet",
        optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = "fp16" }),
        policy = "dynamic", run = name and folder .. "/" .. name, resume = resume,
        checkpoint_every = name and 3 or nil, restart_data = true }:run()
      return logits(model, ids)
    end
    local whole = run(6)
    run(3, "run")
    assert.equal(0, difference(whole, run(6, "run", "auto")))
  end)

  it("trains on two ranks with ZeRO as on one", function()
    if not start.there then return pending "there is no mpirun here" end
    local function losses(n, ...)
      local result = start.run(n, "spec/dist/job.lua", { "lora=4", ... })
      assert.equal(0, result.code, result.err)
      local list = {}
      for loss in result.out:gmatch("%d (%S+) %S+ step") do list[#list + 1] = tonumber(loss) end
      assert.equal(6, #list, result.out)
      return list
    end
    local one = losses(0, "accumulate=2")
    for zero = 0, 2 do
      for step, loss in ipairs(losses(2, "zero=" .. zero)) do assert.near(one[step], loss, 1e-5) end
    end
  end)

  it("saves a merged GPT-2 as Hugging Face's model", function()
    local model = engine.new_model { model_type = "gpt2", vocab_size = 32, n_positions = 8,
      n_embd = 16, n_layer = 1, n_head = 2, resid_pdrop = 0, embd_pdrop = 0, attn_pdrop = 0 }
    train(nn.lora(model, { base = "e4m3" }), 3)
    local trained = logits(model, ids)
    assert.matches("gpt2.save: the model has adapters; hint: lora.save", select(2, pcall(
      model.save, model, folder .. "/merged")), 1, true)
    lora.merge(model):save(folder .. "/merged")
    assert.is_true(difference(logits(engine.load_model(folder .. "/merged"), ids), trained) < 1e-5)
  end)
  local message = helper.failure

  it("names what is wrong with its options in one line", function()
    for expected, options in pairs {
      ["the pattern 'atn.qkv' matches no linear layer; did you mean 'attn.qkv'?; linear layers: "
        .. "blocks.1.attn.qkv blocks.1.attn.out"] = { match = "atn.qkv" },
      ["the pattern 'wte' matches no linear layer"] = { match = { "mlp", "wte" } },
      ["match is empty; linear layers: blocks.1"] = { match = {} },
      ['expected match to be a list, such as { "attn", "mlp" }, got a table with the field \'a\'']
        = { match = { a = "mlp" } },
      ["expected match to be a Lua pattern or a list of patterns, got '('"] = { match = "(" },
      ["expected rank to be a whole number of 1 or more, got 0"] = { rank = 0 },
      ["expected rank to be a whole number of 1 or more, got 2.5"] = { rank = 2.5 },
      ["expected a rank of at most 16 for blocks.1.attn.qkv, linear(16 -> 48), got 17"]
        = { rank = 17 },
      ["expected alpha to be a finite number, got '16'"] = { alpha = "16" },
      ["expected dropout in [0, 1), got 1"] = { dropout = 1 },
      ["expected dora to be true or false, got 1"] = { dora = 1 },
      ["expected base bf16, e4m3, f16, f32 or nf4, got 'e4m2'; did you mean 'e4m3'?"]
        = { base = "e4m2" },
      ["unknown option 'rnk'; did you mean 'rank'?"] = { rnk = 4 },
      ["unknown option 'target_modules'; did you mean 'match'?"] = { target_modules = "attn" },
    } do
      local model = tiny()
      assert.matches(expected, message(nn.lora, model, options), 1, true)
      assert.equal(#model:parameters(), #engine.optim.adamw(model).list)     -- nothing has changed
    end
    assert.matches("expected a module, got a table", message(nn.lora, {}), 1, true)
    assert.matches("with nn.linear layers, got none", message(nn.lora, nn.embedding(3, 3)), 1, true)
  end)

  it("refuses a second adapter, a second merge and training a merged model", function()
    local model = tiny()
    assert.matches("the model has no adapters; hint: nn.lora", message(lora.merge, model), 1, true)
    assert.matches("the model has no adapters", message(lora.save, model, folder), 1, true)
    nn.lora(model, { match = "attn" })
    assert.matches("blocks.1.attn.qkv has an adapter already", message(nn.lora, model), 1, true)
    assert.matches("are not merged", message(lora.unmerge, model), 1, true)
    local _, _, opt = train(model, 2)
    lora.merge(model)
    assert.matches("are merged already", message(lora.merge, model), 1, true)
    assert.matches("lora rank 8, alpha 16, merged", model:describe(), 1, true)
    lora.unmerge(model.blocks[1])
    assert.matches("are merged already", message(lora.merge, model), 1, true)
    lora.merge(model.blocks[1])
    assert.matches("nothing to train: .*hint: the adapters are merged, lora.unmerge%(model%)",
      message(engine.optim.adamw, model))
    assert.matches("nothing in this loss requires a gradient", message(function()
      model:loss(ids, targets):backward()
    end), 1, true)
    for _, f in ipairs { lora.load, lora.disabled } do
      assert.matches("adapters are merged; hint: lora.unmerge", message(f, model, "x"), 1, true)
    end
    assert.matches("are merged; hint", message(nn.lora, model, { match = "mlp" }), 1, true)
    model:freeze(false)
    assert.matches("blocks.1.attn.qkv.weight has been unfrozen since lora.merge",
      message(lora.unmerge, model), 1, true)
    model:freeze()
    lora.unmerge(model)
    for _ in engine.steps(1) do                                    -- the optimizer goes on
      local loss = model:loss(ids, targets)
      assert.matches("; hint: call lora.merge between",
        message(lora.merge, model), 1, true)
      loss:backward()
      opt:step()
    end
  end)

  it("stores bf16 weights in f32 on request, without a change of their values", function()
    local model = tiny()
    local qkv = model.blocks[1].attn.qkv
    qkv.weight = qkv.weight:detach():to("bf16"):keep()
    local before = qkv.weight:totable()
    nn.lora(model, { base = "f32" })
    assert.equal("f32", qkv.weight.dtype)
    assert.same(before, qkv.weight:totable())
  end)

  it("unfreezes no parameter of a model with a quantized base", function()
    for base, dtype in pairs { e4m3 = "e4m3", nf4 = "u8" } do
      local model = nn.lora(tiny(), { base = base })
      assert.matches("expected parameters in f32, f64, f16 or bf16, got blocks.1.attn.qkv." ..
        "weight in " .. dtype .. "; nothing was unfrozen", message(model.freeze, model, false), 1,
        true)
      for _, p in ipairs(model:parameters()) do
        assert.equal(p.name:find("lora_", 1, true) ~= nil, requires_grad(p.tensor), p.name)
      end
      model.wte:freeze(false)
      assert.is_true(requires_grad(model.wte.weight))
    end
  end)

  it("trains the head of a classifier beside the adapters, and saves both for PEFT", function()
    local function classifier(labels) return tiny { labels = labels or 3, pad = 0 } end
    local model, x = nn.lora(classifier(), { rank = 2 }), ids
    local y = engine.tensor({ 0, 1, 2, 1 }, { dtype = "i64", keep = true })
    assert.is_nil(rawget(model.score, "_lora"))
    assert.is_nil(rawget(nn.lora(classifier(), { match = "." }).score, "_lora"))
    assert.matches("match selects only the classifier's head",
      message(nn.lora, classifier(), { match = "score" }), 1, true)
    local head, opt = model.score.weight:totable(), engine.optim.adamw(model, { lr = 1e-2 })
    for _ in engine.steps(3) do
      opt:zero_grad()
      model:loss(x, y):backward()
      opt:step()
    end
    assert.not_same(head, model.score.weight:totable())
    lora.save(model, folder .. "/labels")
    local config = cjson.decode(helper.read(folder .. "/labels/adapter_config.json"))
    assert.equal("SEQ_CLS", config.task_type)
    assert.same({ "classifier", "score" }, config.modules_to_save)
    local file = engine.load(folder .. "/labels/adapter_model.safetensors")
    assert.same(model.score.weight:totable(), file["base_model.model.score.weight"]:totable())
    local again = lora.load(classifier(), folder .. "/labels")
    assert.equal(0, difference(logits(again, x), logits(model, x)))
    assert.is_true(requires_grad(again.score.weight))
    assert.matches("expected 'base_model.model.score.weight' to have shape [5 x 16], got [3 x 16]",
      message(lora.load, classifier(5), folder .. "/labels"), 1, true)
    assert.matches("this adapter belongs to a classifier (SEQ_CLS); hint: load_model(folder, {",
      message(lora.load, tiny(), folder .. "/labels"), 1, true)
    local other = helper.read(folder .. "/labels/adapter_config.json"):gsub('"score"', '"wte"')
    helper.write(folder .. "/labels/adapter_config.json", other)
    assert.matches("modules_to_save = a list is not supported",
      message(lora.load, classifier(), folder .. "/labels"), 1, true)
  end)

  it("refuses an adapter of another model and files that are damaged", function()
    lora.save(nn.lora(tiny(), { match = "attn" }), folder .. "/a")
    local function refused(model, path) return message(lora.load, model, folder .. "/" .. path) end
    assert.matches("the adapter is for another model: it has 'base_model.model.transformer.h.1.",
      refused(tiny { layers = 1 }, "a"), 1, true)
    assert.matches("lora_%u.weight of blocks.%d.attn.%l+: expected %[.*hint: the adapter may be",
      refused(tiny { width = 32 }, "a"))
    assert.matches("the model has other adapters: the file has none for blocks.1.mlp.up; hint: ",
      refused(nn.lora(tiny(), { match = "mlp" }), "a"), 1, true)
    assert.matches("qkv is LoRA with rank 4 and alpha 16, but LoRA with rank 8 "
      .. "and alpha 16 in the file",
      refused(nn.lora(tiny(), { match = "attn", rank = 4 }), "a"), 1, true)
    assert.matches("the model has 2 adapters, the file has 4",
      refused(nn.lora(tiny(), { match = "1.attn" }), "a"), 1, true)
    assert.matches("cannot read .*/none/adapter_config.json", refused(tiny(), "none"))
    local config = helper.read(folder .. "/a/adapter_config.json")
    for from, to in pairs { ['"bias":"none"'] = '"bias":"all"', ["{"] = '{"use_rslora":true,',
      ['"LORA"'] = '"IA3"', ['"lora_alpha":16'] = '"lora_alpha":null',
      ['"lora_dropout":0'] = '"lora_dropout":"x"',
      ['"alpha_pattern":{}'] = '"alpha_pattern":{"x":1}',
      ['pha_pattern":{}'] = 'pha_pattern":{"c_attn":"x"}', ["^.*$"] = "[" } do
      local edited = from == "^.*$" and to or config:gsub(from:gsub("%p", "%%%0"), to, 1)
      helper.write(folder .. "/a/adapter_config.json", edited)
      local model = tiny()
      assert.matches("lora.load: .*adapter_", refused(model, "a"))
      assert.equal(tiny():count(), model:count())
    end
    helper.write(folder .. "/a/adapter_config.json", config)
    local held = engine.load(folder .. "/a/adapter_model.safetensors")
    local key = "base_model.model.transformer.h.1.attn.c_attn.lora_A.weight"
    for _, x in ipairs { engine.tensor(3), engine.zeros(0, 16), engine.zeros(20, 16) } do
      held[key] = x
      engine.save(folder .. "/a/adapter_model.safetensors", held)
      local model = tiny()
      assert.matches("blocks.2.attn.qkv", refused(model, "a"), 1, true)
      assert.equal(tiny():count(), model:count())
    end
  end)
end)
