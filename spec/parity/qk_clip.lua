-- The engine's side of qk_clip.py: for each case of a file, one JSON object a line (seed, heads,
-- head_width, length, threshold, growth, steps, out), trains one attention layer at a rate of 0, so
-- that only the policy changes its weights. Writes the weights before the first step and after each
-- step, and the inputs, to the file `out`. Each step multiplies the inputs by `growth`: where it is
-- above 1, the logits pass the threshold again and again.
local json = require "cjson"
local engine = require "engine"

for line in io.lines(arg[1]) do
  local case = json.decode(line)
  engine.seed(case.seed)
  local width = case.heads * case.head_width
  local model = engine.nn.sequential(engine.nn.attention(width, case.heads,
    { bias = false, std = 0.3 }))
  local base, step = engine.randn(2, case.length, width), 0
  local kept = {}
  local function keep(name, x) kept[name] = (x:detach() * 1):keep() end
  keep("weight.0", model[1].qkv.weight)
  engine.trainer { model = model, optimizer = engine.optim.sgd(model, { lr = 0 }), log = "quiet",
    steps = case.steps, precision = "fp32", policy = "qk_clip",
    policy_options = { threshold = case.threshold, loss_scale = 1 },
    data = { next = function()
      step = step + 1
      local x = base * case.growth ^ step
      keep("x." .. step, x)
      return { x = x }
    end },
    loss = function(m, batch) return m(batch.x):mean() end,
    on_step = function(_, _, verdict)
      assert(verdict.failed == 0, verdict:why())
      keep("weight." .. step, model[1].qkv.weight)
    end }:run()
  engine.save(case.out, kept)
end
