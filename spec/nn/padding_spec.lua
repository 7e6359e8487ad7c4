-- Padded batches: a sequence gets the logits, gradients and tokens that it gets without padding.
-- hf_spec.lua compares padded batches with transformers.
local engine = require "engine"
local helper = require "spec.helper"

local IDS = { { 1, 2, 3, 4, 5, 6 }, { 7, 8, 9, 0, 0, 0 }, { 0, 0, 5, 6, 7, 8 } }
local MASK = { { 1, 1, 1, 1, 1, 1 }, { 1, 1, 1, 0, 0, 0 }, { 0, 0, 1, 1, 1, 1 } }
local SPANS = { { 1, 6 }, { 1, 3 }, { 3, 6 } }

local SIZES = { vocab = 20, context = 16, width = 16, heads = 2, layers = 2 }

local function made(name, more)
  engine.seed(4)
  local model = engine.nn[name](require("engine.base.arguments").merged(SIZES, more))
  for _, p in ipairs(model:parameters()) do
    if p.tensor.ndim > 1 then p.tensor:normal(0, 0.3) end
  end
  return model:eval()
end

-- Models, and the rows of IDS whose results must equal those of the sequence alone. nn.gpt and
-- nn.bert count positions from the start of the row, so padding on the left changes them; a dynamic
-- RoPE base depends on the length of the batch.
local MODELS = {
  { "gpt", {}, { 1, 2 } }, { "bert", {}, { 1, 2 } }, { "llama", {}, { 1, 2, 3 } },
  { "llama", { window = 2 }, { 1, 2, 3 } }, { "llama", { experts = 3, hidden = 16 }, { 1, 2, 3 } },
  { "llama", { rope = { base = 100, factor = 2, dynamic = 4 } }, { 1 } },
}

local function i32(list) return engine.tensor(list, { dtype = "i32" }) end
local function flat(x) return x:to("f64"):view(-1):totable() end

local function near(a, b)
  assert.equal(#a, #b)
  for i, v in ipairs(a) do assert.near(v, b[i], 1e-5) end
end

describe("a padding mask", function()
  for _, case in ipairs(MODELS) do
    it("gives each sequence what it gets alone: nn." .. case[1], function()
      local model = made(case[1], case[2])
      for _ in engine.steps(1) do
        local y = model(i32(IDS), { mask = i32(MASK) })
        for _, r in ipairs(case[3]) do
          local first, last = unpack(SPANS[r])
          local alone = model(i32 { { unpack(IDS[r], first, last) } })
          near(flat(alone), flat(y:slice(1, r, r):slice(2, first, last)))
        end
      end
    end)
  end

  it("leaves padding out of the loss and of the gradients", function()
    local model = made "llama"
    local function gradients(loss)
      model:zero_grad()
      loss:backward()
      return flat(model.blocks[1].attn.qkv.weight.grad), flat(model.embed.weight.grad), loss:item()
    end
    for _ in engine.steps(1) do
      local padded = { gradients(model:loss(i32(IDS), i32(IDS), { mask = i32(MASK) })) }
      local sum, count = nil, 0
      for r, span in ipairs(SPANS) do
        local x = i32 { { unpack(IDS[r], span[1], span[2]) } }
        local part = model:loss(x, x, { reduction = "sum" })
        sum, count = sum and sum + part or part, count + x.count
      end
      local alone = { gradients(sum / count) }
      near(alone[1], padded[1])
      near(alone[2], padded[2])
      assert.near(alone[3], padded[3], 1e-6)
    end
  end)

  it("gives the same bits when it trains with checkpointed blocks", function()
    local losses = {}
    for i, which in ipairs { false, "block" } do
      local model = made("llama", { attention_dropout = 0.1 }):train():checkpoint(which)
      local opt = engine.optim.adamw(model, { lr = 1e-2 })
      for _ in engine.steps(3) do
        opt:zero_grad()
        local loss = model:loss(i32(IDS), i32(IDS), { mask = i32(MASK) })
        loss:backward()
        opt:step()
        losses[i] = loss:item()
      end
    end
    assert.equal(losses[1], losses[2])
  end)

  it("takes bools and fractions, and changes no bit where nothing is padded", function()
    local model = made "gpt"
    for _ in engine.steps(1) do
      local ids = i32(IDS)
      assert.same(flat(model(ids)), flat(model(ids, { mask = ids:ge(0) })))
      assert.same(flat(model(ids, { mask = i32(MASK) })),
        flat(model(ids, { mask = i32(MASK):to("f32") * 0.5 })))
      local y = i32 { { 1, 2, -100, 4, 5, 6 }, { 1, 2, 3, 4, 5, 6 }, { 1, 2, 3, 4, 5, 6 } }
      assert.equal(model:loss(ids, y):item(), model:loss(ids, y, { mask = ids:ge(0) }):item())
    end
  end)

  it("limits attention entropies to the tokens that are not padding", function()
    local model = made "llama"
    local attention = model.blocks[1].attn
    attention.watch_entropy = true
    for _ in engine.steps(1) do
      model(i32(IDS), { mask = i32(MASK) })
      local packed, at = attention.entropy, 0
      assert.same({ 1, 2, 13 }, packed.shape)
      for r, span in ipairs(SPANS) do
        local first, last = unpack(span)
        local n = last - first + 1
        model(i32 { { unpack(IDS[r], first, last) } })
        near(flat(attention.entropy), flat(packed:slice(3, at + 1, at + n)))
        at = at + n
      end
    end
  end)

  it("is refused, in one line, where it makes no sense", function()
    local model = made "gpt"
    local function refuses(mask, pattern, more)
      assert.matches(pattern,
        helper.failure(model, i32(IDS), { mask = mask, attention_maps = more }))
    end
    for _ in engine.steps(1) do
      refuses({ 1 }, "gpt: expected mask to be a tensor shaped like the ids, got a table")
      refuses(i32 { { 1, 1 } }, "gpt: expected a mask %[3 x 6%] like the ids, got %[1 x 2%]")
      refuses(i32 { MASK[1], MASK[2], { 0, 0, 0, 0, 0, 0 } },
        "expected a token in every row of the mask, got none in row 3")
      refuses(i32 { MASK[1], { 0, 1, 0, 1, 1, 0 }, MASK[3] },
        "expected no gaps between tokens in row 2 of the mask, got 3 tokens at positions 2 to 5")
      refuses(i32(MASK), "gpt: attention maps of a padded batch are not supported", true)
      assert.equal(3 * 6 * 20, model(i32(IDS)).count)
    end
  end)
end)

describe("generate", function()
  it("continues lists of unequal length as it continues each alone", function()
    local prompts = { { 1, 2, 3 }, { 4 }, { 5, 6, 7, 8, 9 }, { 1, 2, 3 } }
    for _, case in ipairs { { "gpt" }, { "llama" }, { "llama", { window = 3 } } } do
      local model = made(case[1], case[2])
      for _, cache in ipairs { true, false } do
        local options = { max_tokens = 20, temperature = 0, cache = cache }     -- past the context
        local lists = model:generate(prompts, options)
        for i, prompt in ipairs(prompts) do
          assert.same(model:generate(prompt, options), lists[i])
        end
        options.stop = lists[2][4]
        lists = model:generate(prompts, options)
        for i, prompt in ipairs(prompts) do
          assert.same(model:generate(prompt, options), lists[i])
        end
      end
    end
  end)
end)
