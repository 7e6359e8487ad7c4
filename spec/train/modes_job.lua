-- The job of spec/train/modes_spec.lua: a tiny GPT, trained in either mode, alone or on ranks, with
-- inf planted in a gradient at chosen steps. Writes its history to `run`.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local ranks = engine.ranks

local cfg = engine.config {
  mode = "sync", precision = "fp16", steps = 10, accumulate = 1, dropout = 0.0, clip = 0.0,
  run = "", resume = "", checkpoint_every = 0, policy = "static:loss_scale=1024", shadow = "",
  first = -1, last = -1, graph = false, sample = 0, checkpoint = "", trap = "", zero = 0,
  device = "cpu",
}
engine.device(cfg.device)
engine.seed(5)

local text = {}
for i = 1, 6000 do text[i] = string.char(32 + i * i % 89) end
local model = engine.nn.gpt { vocab = 256, context = 16, width = 32, heads = 2, layers = 2,
  dropout = cfg.dropout }
local precision = cfg.precision
if precision:find("^fp8") then
  precision = { name = "sampled", base = precision, fp8 = { sample = cfg.sample } }
end
local optimizer = engine.optim.adamw(model, { lr = 1e-3, precision = precision })

local target
for _, p in ipairs(optimizer.list) do
  if p.name == "blocks.2.mlp.up.weight" then target = p.tensor end
end
local plant = engine.custom {
  forward = function(_, loss) return loss * 1 end,
  backward = function(_, dloss)
    local values = M_ffi.new("float[?]", target.count)
    values[7] = math.huge
    return dloss, engine.from_memory(values, "f32", target.shape)
  end,
}

local trainer
local function loss_of(m, batch)
  local loss, step = m:loss(batch.x, batch.y), trainer.current.step
  engine.signal("square", step * step)
  local planted = step >= cfg.first and step <= cfg.last and ranks.rank() == ranks.size() - 1
  return planted and plant(loss, target) or loss
end

trainer = engine.trainer {
  model = model, optimizer = optimizer, loss = loss_of, mode = cfg.mode, graph = cfg.graph,
  checkpoint = cfg.checkpoint ~= "" and cfg.checkpoint or nil, trap = cfg.trap, zero = cfg.zero,
  data = engine.data.text { text = table.concat(text), batch = 4, context = 16, seed = 9 },
  steps = cfg.steps, accumulate = cfg.accumulate, clip = cfg.clip, policy = cfg.policy,
  shadow = cfg.shadow, run = cfg.run, resume = cfg.resume, checkpoint_every = cfg.checkpoint_every,
  stats_every = 3, log = "quiet", rank_timeout = 60, agree_every = 1,
}
trainer:run()
