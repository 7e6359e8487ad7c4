-- A multilayer perceptron that learns to read digits which the script draws: seven-segment figures
-- on a 12 x 12 grid, shifted and covered in noise. engine.trainer trains it in fp32, bf16 or fp16;
-- then it is tested on new digits.
--
--   ./engine examples/mlp.lua
--   ./engine examples/mlp.lua precision=fp16 steps=1600 noise=0.4
local engine = require "engine"

local cfg = engine.config({ steps = 800, batch = 64, lr = 5e-3, hidden = 128, noise = 0.25,
  count = 16000, precision = "fp32", policy = "", seed = 1, log = "line" },
  { steps = "training steps", batch = "digits per step", lr = "peak learning rate",
    seed = "seed for weights, digits and the order of the data",
    hidden = "hidden features", noise = "standard deviation of the noise", count = "digits to draw",
    precision = { "precision recipe", choices = { "fp32", "bf16", "fp16" } },
    policy = "loss-scaling policy; empty: the precision's default",
    log = { "what to show", choices = { "line", "json", "quiet" } } },
  { count = "steps batch hidden count", natural = "seed", positive = "lr", not_negative = "noise",
    policy = "policy" })

engine.seed(cfg.seed)
math.randomseed(cfg.seed)

-- ------------------------------------------------------------------ drawing digits

local SIDE = 12
-- Segments as lines { x1, y1, x2, y2 } in a box of 4 x 7 pixels: top, upper left, upper right,
-- middle, lower left, lower right, bottom. LIT: for each digit, which segments are lit, in this
-- order.
local SEGMENTS = { { 0, 0, 3, 0 }, { 0, 0, 0, 3 }, { 3, 0, 3, 3 }, { 0, 3, 3, 3 }, { 0, 3, 0, 6 },
  { 3, 3, 3, 6 }, { 0, 6, 3, 6 } }
local LIT = { [0] = "1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111",
  "1010010", "1111111", "1111011" }

local function normal()
  return math.sqrt(-2 * math.log(1 - math.random())) * math.cos(2 * math.pi * math.random())
end

local function draw(digit)
  local pixels = {}
  for i = 1, SIDE * SIDE do pixels[i] = normal() * cfg.noise end
  local dx, dy = math.random(1, SIDE - 6), math.random(0, SIDE - 8)
  for s, segment in ipairs(SEGMENTS) do
    if LIT[digit]:sub(s, s) == "1" then
      for x = segment[1], segment[3] do
        for y = segment[2], segment[4] do
          local at = (y + dy) * SIDE + x + dx + 1
          pixels[at] = pixels[at] + 1
        end
      end
    end
  end
  return pixels
end

local function drawn(n)
  local rows, labels = {}, {}
  for i = 1, n do
    labels[i] = math.random(0, 9)
    rows[i] = draw(labels[i])
  end
  return engine.tensor(rows, { keep = true }), engine.tensor(labels, { dtype = "i64", keep = true })
end

local train_x, train_y = drawn(cfg.count)                 -- [count x 144], [count]
local test_x, test_y = drawn(math.ceil(cfg.count / 8))

-- ------------------------------------------------------------------ model and training

local nn = engine.nn
local net = nn.sequential { nn.linear(SIDE * SIDE, cfg.hidden), nn.relu(),
  nn.linear(cfg.hidden, cfg.hidden), nn.relu(), nn.linear(cfg.hidden, 10) }
if cfg.log == "line" then print(net) end

local trainer = engine.trainer {
  model = net,
  data = engine.data.tensors { x = train_x, y = train_y, batch = cfg.batch, seed = cfg.seed },
  loss = function(model, batch) return engine.cross_entropy(model(batch.x), batch.y) end,
  optimizer = engine.optim.adamw(net,
    { lr = cfg.lr, precision = cfg.precision, decay = "matrices" }),
  schedule = engine.schedule.cosine { lr = cfg.lr, total = cfg.steps,
    warmup = math.min(10, cfg.steps), floor = cfg.lr / 10 },
  policy = cfg.policy ~= "" and cfg.policy or nil, steps = cfg.steps, clip = 1.0, log = cfg.log,
}
local summary = trainer:run()

local right = engine.scope(function()
  return engine.autocast(cfg.precision, net, test_x):argmax(-1):eq(test_y):to("f32"):mean():item()
end)
if cfg.log ~= "json" then
  print(("accuracy on %d new digits: %.1f %%"):format(test_y.count, 100 * right))
end
return summary
