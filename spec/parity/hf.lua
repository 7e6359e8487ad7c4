-- The engine's side of hf.py: hf.lua ROOT STEPS TOKENS NAME ... For each folder ROOT/NAME, with a
-- model and in.bin (x, y, tokens, masks): writes out.bin (logits, losses, tokens), saves the model
-- as it was loaded, in the dtype of its files, to saved/, and the trained model to trained/. For
-- each architecture a new model goes to ROOT/new/TYPE with its logits, and a classifier with that
-- model's weights to ROOT/new/TYPE_classifier.
local engine = require "engine"
local root, steps, count = arg[1], tonumber(arg[2]), tonumber(arg[3])

local PROMPTS = { 7, 4, 2 }      -- tokens of the prompts of unequal length, which end at token 7

local function losses_of(model, x, y, options)
  model:train()
  local opt = engine.optim.adamw(model, { lr = 1e-3, weight_decay = 0.1, decay = "matrices" })
  local losses = {}
  for step in engine.steps(steps) do
    opt:zero_grad()
    local loss = model:loss(x, y, options)
    loss:backward()
    opt:step()
    losses[step] = loss:item()
  end
  return engine.tensor(losses, { dtype = "f64", keep = true })
end

for i = 4, #arg do
  local folder = root .. "/" .. arg[i]
  local given = engine.load(folder .. "/in.bin")
  engine.load_model(folder, { dtype = "auto" }):save(folder .. "/saved")

  local model = engine.load_model(folder):eval()
  local out = { logits = engine.scope(function() return model(given.x):keep() end) }
  for _, side in ipairs { "right", "left" } do
    local mask, name = given[side], side .. "_logits"
    out[name] = given[name] and engine.scope(function()
      if model.config.labels then     -- padding tokens have the id 0
        return model(mask:ne(0):where(given.x, 0), { mask = mask }):keep()
      end
      return (model(given.x, { mask = mask }) * mask:to("f32"):unsqueeze(3)):keep()
    end)
  end
  if given.tokens then
    local prompts = given.x:slice(2, 1, 7):totable()
    local function greedy()
      return model:generate(prompts, { max_tokens = count, temperature = 0 })
    end
    out.tokens = engine.tensor(greedy(), { dtype = "i32", keep = true })
    for r, n in ipairs(PROMPTS) do prompts[r] = { unpack(prompts[r], 8 - n) } end
    local lists = greedy()
    for r, list in ipairs(lists) do lists[r] = { unpack(list, PROMPTS[r] + 1) } end
    out.unequal = engine.tensor(lists, { dtype = "i32", keep = true })
  end
  out.losses = losses_of(model, given.x, given.y)
  if not model.config.labels then
    out.padded_losses = losses_of(engine.load_model(folder), given.x, given.y,
      { mask = given.left })
  end
  engine.save(folder .. "/out.bin", out)
  model:save(folder .. "/trained", { shard_bytes = 30000 })
end

for _, kind in ipairs { "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "bert" } do
  local fields = kind == "gpt2" and { n_embd = 16, n_head = 2, n_layer = 2 }
    or { hidden_size = 16, num_attention_heads = 2, num_hidden_layers = 2, intermediate_size = 24 }
  fields.model_type, fields.vocab_size = kind, 40
  if kind ~= "bert" and kind ~= "gpt2" then fields.num_key_value_heads = 1 end
  local folder = root .. "/new/" .. kind
  local function save(model, path)
    model:eval():save(path)
    local x = engine.tensor({ { 1, 2, 3, 4, 5, 6, 7 } }, { dtype = "i32", keep = true })
    engine.save(path .. "/out.bin",
      { x = x, logits = engine.scope(function() return model(x):keep() end) })
  end
  save(engine.new_model(fields), folder)
  save(engine.load_model(folder, { labels = 3, pad = 0 }), folder .. "_classifier")
end
