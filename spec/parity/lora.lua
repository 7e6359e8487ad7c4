-- The engine's side of lora.py: ./engine lora.lua MODEL ADAPTER STEPS. Writes its numbers to
-- ADAPTER/engine.safetensors and the trained adapter to ADAPTER/saved. ./engine lora.lua FOLDER
-- reads a Llama, or a classifier, and its adapter from the folder, and writes the logits and the
-- adapter back there.
local engine = require "engine"

local function llama(folder)
  local w = engine.load(folder .. "/model.safetensors")
  local model = engine.nn.llama { vocab = 13, context = 12, width = 16, heads = 4, kv_heads = 2,
    layers = 2, hidden = 24 }
  local state = { ["embed.weight"] = w["model.embed_tokens.weight"],
    ["norm.weight"] = w["model.norm.weight"], ["head.weight"] = w["lm_head.weight"] }
  for i = 0, 1 do
    local from, to = ("model.layers.%d."):format(i), ("blocks.%d."):format(i + 1)
    state[to .. "attn.qkv.weight"] = engine.concat { w[from .. "self_attn.q_proj.weight"],
      w[from .. "self_attn.k_proj.weight"], w[from .. "self_attn.v_proj.weight"] }
    for ours, theirs in pairs { ["attn.out"] = "self_attn.o_proj", ["mlp.gate"] = "mlp.gate_proj",
      ["mlp.up"] = "mlp.up_proj", ["mlp.down"] = "mlp.down_proj", norm1 = "input_layernorm",
      norm2 = "post_attention_layernorm" } do
      state[to .. ours .. ".weight"] = w[from .. theirs .. ".weight"]
    end
  end
  return model:load_state(state)
end

if not arg[2] then
  local folder = arg[1]
  local text = assert(io.open(folder .. "/config.json")):read("*a")
  local base = text:find("ForSequenceClassification", 1, true)
    and engine.load_model(folder, { dropout = 0 }) or llama(folder)
  local model = engine.lora.load(base:eval(), folder .. "/adapter")
  local ids = engine.load(folder .. "/ids.safetensors").ids
  engine.save(folder .. "/engine.safetensors", { logits = engine.scope(function()
    return model(ids):keep()
  end) })
  return engine.lora.save(model, folder .. "/saved")
end

local base, adapter, steps = arg[1], arg[2], tonumber(arg[3])
local model = engine.lora.load(engine.load_model(base, { dropout = 0 }), adapter)
local ids = engine.load(base .. "/expected.safetensors").ids
local x, y = ids:slice(2, 1, 10):keep(), ids:slice(2, 2, 11):keep()

local function logits() return engine.scope(function() return model(x):keep() end) end

local result, losses = { before = logits() }, {}
local opt = engine.optim.adamw(model, { lr = 1e-2, weight_decay = 0.1 })
for step in engine.steps(steps) do
  opt:zero_grad()
  local loss = model:loss(x, y)
  loss:backward()
  opt:step()
  losses[step] = loss:item()
end
result.after, result.losses = logits(), engine.tensor(losses, { dtype = "f64" })
engine.lora.save(model, adapter .. "/saved")
engine.lora.merge(model)
result.merged = logits()

local pairs_of, dpo = { x = x:slice(1, 1, 2):keep(), y = y:slice(1, 1, 2):keep() }, {}
model = engine.lora.load(engine.load_model(base, { dropout = 0 }), adapter)
opt = engine.optim.adamw(model, { lr = 1e-2, weight_decay = 0.1 })
for step in engine.steps(5) do
  opt:zero_grad()
  local loss, rewards = engine.losses.dpo(model, pairs_of, { beta = 0.5, label_smoothing = 0.1 })
  loss:backward()
  opt:step()
  dpo[step], dpo[6], dpo[7] = loss:item(), rewards.chosen:item(), rewards.rejected:item()
end
result.dpo = engine.tensor(dpo, { dtype = "f64" })
engine.save(adapter .. "/engine.safetensors", result)
