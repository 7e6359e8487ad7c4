-- The engine's side of hf.py: hf.lua ROOT STEPS TOKENS NAME ... For each folder ROOT/NAME, with a
-- model and in.bin (x, y, tokens): writes out.bin (logits, losses, tokens), the model as it was
-- loaded to saved/, in the dtype of its files, and the trained model to trained/.
local engine = require "engine"
local root, steps, count = arg[1], tonumber(arg[2]), tonumber(arg[3])

local function prompts(x)
  local list = x:slice(2, 1, 7):totable()
  return list
end

for i = 4, #arg do
  local folder = root .. "/" .. arg[i]
  local given = engine.load(folder .. "/in.bin")
  engine.load_model(folder, { dtype = "auto" }):save(folder .. "/saved")

  local model = engine.load_model(folder):eval()
  local out = { logits = engine.scope(function() return model(given.x):keep() end) }
  if given.tokens then
    out.tokens = engine.tensor(model:generate(prompts(given.x),
      { max_tokens = count, temperature = 0 }), { dtype = "i32", keep = true })
  end
  model:train()
  local opt = engine.optim.adamw(model, { lr = 1e-3, weight_decay = 0.1, decay = "matrices" })
  local losses = {}
  for step in engine.steps(steps) do
    opt:zero_grad()
    local loss = model:loss(given.x, given.y)
    loss:backward()
    opt:step()
    losses[step] = loss:item()
  end
  out.losses = engine.tensor(losses, { dtype = "f64", keep = true })
  engine.save(folder .. "/out.bin", out)
  model:save(folder .. "/trained", { shard_bytes = 30000 })
end
