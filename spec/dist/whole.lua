-- Two ranks whose weights are divided (ZeRO-3): what is refused outside of trainer:whole, and what
-- works inside. Rank 0 saves the model into folder=. Started by zero3_spec.lua.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local ranks = engine.ranks
local cfg = engine.config { folder = "." }
engine.seed(3)
local text = {}
for i = 1, 3000 do text[i] = string.char(32 + i * i % 89) end
local function loader()
  return engine.data.text { text = table.concat(text), batch = 2, context = 8, seed = 9 }
end
local model = engine.nn.gpt { vocab = 256, context = 8, width = 64, heads = 2, layers = 2 }
local optimizer = engine.optim.adamw(model, { lr = 1e-3, precision = "bf16" })
local function train()
  local trainer = engine.trainer { model = model, optimizer = optimizer, data = loader(), steps = 2,
    zero = 3, bucket = 0.02, log = "quiet", rank_timeout = 20,
    evaluate = { data = loader(), every = 1, batches = 2 } }
  trainer:run()
  return trainer
end
local trainer = train()
local w = model.blocks[1].mlp.up.weight

for name, f in pairs {
  item = function() return w:slice(1, 1, 1):slice(2, 1, 1):item() end,
  totable = function() return w:totable() end,
  copy = function() return w:copy(engine.zeros(w.shape)) end,
  fill = function() return w:fill(1) end,
  uniform = function() return w:uniform(-1, 1) end,
  keep = function() return w:keep() end,
  stats = function() return w:stats() end,
  save = function() engine.save(cfg.folder .. "/refused.safetensors", model:state()) end,
  load_state = function() return model:load_state(model:state()) end,
} do
  for _, when in ipairs { "absent", "here" } do
    if when == "here" then w:sum():item() end          -- an operation brings w to every rank
    local good, message = pcall(f)
    assert(not good and message:find("have divided", 1, true)
      and message:find("(zero=3)", 1, true) and message:find("trainer:whole", 1, true),
      name .. ": " .. tostring(message))
  end
end
assert(tostring(w):find("divided among the ranks", 1, true), tostring(w))
local good, message = pcall(optimizer.set_precision, optimizer, "fp16")
assert(not good and message:find("divided among ranks", 1, true), message)
assert(#model:generate({ 65, 66 }, 3, { temperature = 0 }) >= 3)

assert(trainer:whole(function()
  w:fill(0.5)
  if ranks.rank() == 0 then engine.save(cfg.folder .. "/model.safetensors", model:state()) end
  return 7
end) == 7)
assert(w:sum():item() == 0.5 * w.count)
local low = engine.autocast("bf16", function() return w:matmul(engine.ones(64, 1)):sum():item() end)
assert(low == 0.5 * w.count, tostring(low))
good, message = pcall(trainer.whole, trainer, function() error("mine", 0) end)
assert(not good and message == "mine")
assert(not pcall(w.item, w))
engine.end_step()

train()                                                -- once more, with the same optimizer
local sums = ranks.from_all(trainer:whole(function()
  return tostring(M_ffi.C.eng_params_checksum_of(optimizer.params, nil, 0))
end))
assert(sums[1] == sums[2])

-- One rank alone runs an operation on a weight that it holds whole. No other rank notices at once,
-- but the comparison at the end of the next step does.
local parallel, found = trainer.reducer.reduction, false
for i, p in ipairs(optimizer.list) do
  local unit, alone = trainer.reducer.units[i - 1], p.tensor.count <= 512   -- a short message
  for k = 0, #optimizer.list - 1 do
    local from, to = M_ffi.new("int64_t[1]"), M_ffi.new("int64_t[1]")
    M_ffi.C.eng_parallel_own(from, to, parallel, k)
    alone = alone and (trainer.reducer.units[k] ~= unit
      or to[0] - from[0] == optimizer.list[k + 1].tensor.count)
  end
  if alone then
    p.tensor:sum():item()
    found = true
    break
  end
end
engine.end_step()
assert(ranks.reduce(found and 1 or 0, "max") == 1, "no rank has all of a small unit")
good, message = pcall(train)
assert(not good and message:find("the ranks did not use the same weights in the same order", 1,
  true), tostring(message))
