-- The job of spec/dist/ranks_buffers_spec.lua: a small GPT whose optimizer is written in Lua, with
-- a trainer.state of numbers and tensors. Each rank writes into told.RANK the losses, the checksum
-- of the weights, its trainer.state and the number of elements in its buffers.
local engine = require "engine"
local C = require("engine.base.ffi").C
local json = require "engine.base.json"

local cfg = engine.config { told = "told", optimizer = "muon", steps = 6, zero = 0, run = "",
  resume = "", checkpoint_every = 0, mode = "sync", precision = "fp32", accumulate = 1, bad = false,
  policy = "" }
engine.optim.register("with_empty", { defaults = { lr = 1e-2 },
  buffers = { m = function(shape) return shape end, empty = function() return { 0 } end },
  update = function(p, ctx)
    p.m = p.m * 0.9 + p.grad
    p.weight = p.weight - p.m * ctx.lr
  end })
engine.seed(3)
local text = {}
for i = 1, 4000 do text[i] = string.char(32 + i * i % 89) end
local model = engine.nn.gpt { vocab = 256, context = 16, width = 48, heads = 2, layers = 2 }
local optimizer = engine.optim[cfg.optimizer](model, { lr = 1e-2, precision = cfg.precision,
  moments = "bf16" })
local losses = {}
local mean = engine.zeros(2, 3):keep()
local trainer = engine.trainer { model = model, optimizer = optimizer, steps = cfg.steps,
  data = engine.data.text { text = table.concat(text), batch = 2, context = 16, seed = 9 },
  zero = cfg.zero, run = cfg.run, resume = cfg.resume, checkpoint_every = cfg.checkpoint_every,
  mode = cfg.mode, accumulate = cfg.accumulate, bucket = 0.02, log = "quiet", attach = false,
  agree_every = 1, clip = 1, policy = cfg.policy ~= "" and cfg.policy or nil,
  state = { seen = 0, mean = mean },
  on_step = function(t, record)
    losses[#losses + 1] = ("%.17g"):format(record.loss)
    t.state.seen, t.state.last = t.state.seen + 1, { [1] = record.loss, ["1"] = 0 / 0 }
    engine.no_grad(function() mean:copy(mean * 0.5 + record.loss) end)
    if cfg.bad then t.state.bad = print end
  end }
trainer:run()
local elements = 0
for _, x in pairs(optimizer:state_tensors()) do elements = elements + x.count end
local file = assert(io.open(("%s.%d"):format(cfg.told, engine.ranks.rank()), "w"))
file:write(json.encode { losses = losses, elements = elements,
  weights = tostring(C.eng_params_checksum_of(optimizer.params, nil, 0)), seen = trainer.state.seen,
  same = trainer.state.mean == mean, mean = mean:totable(), last = trainer.state.last })
file:close()
