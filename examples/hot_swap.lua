-- Rewrites a policy during a run, as in an editor: the file is saved half-written, saved complete,
-- then saved with a bad idea, and the bad idea is undone. The run never stops. A table shows the
-- effect of each version of the file on the skipped steps and on the share of gradients that lost
-- bits below fp16's smallest normal number. A swap does not affect weights or data.
--
--   ./engine examples/hot_swap.lua
--   ./engine examples/hot_swap.lua run=swap      then: engine attach swap, and history:events()
--
-- Measured with the defaults: at scale 16, 3.0 % of the gradients lose bits. A target of 8192 for
-- the largest stored gradient (scale 2^15) reduces that to 0.01 % and skips nothing. The bad idea
-- skips 7 of its 11 steps and is undone. The half-written file is rejected with the line of its
-- mistake.
local engine = require "engine"

local cfg = engine.config({ steps = 240, batch = 8, context = 32, layers = 2, width = 64,
  heads = 4, lr = 2e-3, seed = 1, run = "", log = "line" }, {
  steps = "training steps", batch = "rows of a batch", context = "bytes per row", layers = "blocks",
  width = "features per byte", heads = "attention heads",
  lr = "learning rate", seed = "seed for weights and the order of the data",
  run = "name of the run; empty: not stored",
  log = { "what to show", choices = { "line", "json", "quiet" } },
}, { count = "steps batch context layers width heads", natural = "seed", positive = "lr" })
engine.seed(cfg.seed)

local FIRST = [[
return { name = "timid", options = { init_scale = 16 },
  decide = function(state) return state.scale end }
]]
local SECOND = [[
return { name = "aiming", options = { target = 8192 }, needs = { "amax" },
  migrate = function(old) return { scale = old.scale } end,
  init = function() return { scale = 16 } end,
  decide = function(state, record, options)
    if record.overflow then state.scale = state.scale / 2
    elseif record.amax > 0 then
      state.scale = 2 ^ (0.7 * math.log(state.scale) / math.log(2) + 0.3 * math.log(
        options.target / record.amax) / math.log(2)) end
    return { scale = state.scale, reason = record.overflow and "overflow" or nil }
  end }
]]
local BAD_IDEA = SECOND:gsub("target = 8192", "target = 8192 * 4096")

-- ------------------------------------------------------------------ the run, and the editor

local file = os.tmpname()
local function save(text) require("engine.base.file").write(file, text) end
save(FIRST)

local model = engine.nn.gpt { vocab = 256, context = cfg.context, width = cfg.width,
  heads = cfg.heads, layers = cfg.layers }
local phases = {}

local function at(share) return math.floor(share * cfg.steps) end

local function on_step(trainer, record, verdict)
  local step, phase = trainer.steps_done, phases[#phases]
  if not phase or phase.policy ~= trainer.policy then
    phase = { policy = trainer.policy, name = trainer.policy.name, steps = 0, skipped = 0,
      lost = 0, scale = 0 }
    phases[#phases + 1] = phase
  end
  phase.steps, phase.skipped = phase.steps + 1, phase.skipped + (verdict.action ~= 0 and 1 or 0)
  phase.lost, phase.scale = phase.lost + tonumber(record.underflow) / tonumber(record.count),
    phase.scale + math.log(record.scale) / math.log(2)
  phase.loss = record.loss
  if step == at(0.25) then save(SECOND:sub(1, 300)) end        -- half-written
  if step == at(0.3) then save(SECOND) end
  if step == at(0.65) then save(BAD_IDEA) end
  if step == at(0.65) + 12 then trainer.policy:undo() end
end

local trainer = engine.trainer {
  model = model, data = engine.data.text { text = require("engine.report.lab").text(40000),
    batch = cfg.batch, context = cfg.context, seed = cfg.seed },
  optimizer = engine.optim.adamw(model, { lr = cfg.lr, precision = "fp16" }), policy = file,
  clip = 1.0, steps = cfg.steps, run = cfg.run, log = cfg.log, config = cfg, on_step = on_step,
}
local summary = trainer:run()
os.remove(file)

-- ------------------------------------------------------------------ report

if cfg.log == "line" then
  print(("\n%-8s %6s %8s %12s %14s %8s"):format("policy", "steps", "skipped", "mean scale",
    "lost bits", "loss"))
  for _, p in ipairs(phases) do
    print(("%-8s %6d %8d %12s %12.2f %% %8.3f"):format(p.name, p.steps, p.skipped,
      ("2^%.1f"):format(p.scale / p.steps), 100 * p.lost / p.steps, p.loss))
  end
end
return summary
