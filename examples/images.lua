-- Trains nn.resnet18 or nn.vit to classify images: by default eight kinds of shapes that the engine
-- draws, or the PNG and JPEG images of a folder that has a subfolder for each class. Then measures
-- the accuracy on other images. ResNet classifies more than 98 % of drawn shapes correctly, after
-- about half a minute on two cores.
--
--   ./engine examples/images.lua
--   ./engine examples/images.lua model=vit precision=bf16
--   ./engine examples/images.lua data=pets size=64 flip=true steps=2000
local engine = require "engine"

local cfg = engine.config({ model = "resnet18", data = "", size = 24, width = 16, steps = 250,
  batch = 32, lr = 3e-3, flip = false, precision = "fp32", policy = "", seed = 1, run = "",
  log = "line" },
  { model = { "the network", choices = { "resnet18", "vit" } },
    data = "path of a folder that has a subfolder for each class; empty: drawn shapes",
    size = "width and height of an image in pixels; for vit a multiple of 4",
    width = "channels of ResNet's first stage; ViT's width is 4 times this",
    steps = "training steps", batch = "images per step", lr = "peak learning rate",
    flip = "mirror each training image of the folder with probability 1/2",
    precision = { "precision recipe", choices = { "fp32", "bf16", "fp16" } },
    policy = "loss-scaling policy; empty: the precision's default",
    seed = "seed for weights, drawn images and the order of the data",
    run = "name of the run; empty: not stored",
    log = { "what to show", choices = { "line", "json", "quiet" } } },
  { count = "size width steps batch", natural = "seed", positive = "lr", policy = "policy" })
if cfg.model == "vit" and cfg.size % 4 ~= 0 then
  engine.config.fail("size: expected a multiple of 4 for vit, got %d", cfg.size)
end

engine.seed(cfg.seed)

-- ------------------------------------------------------------------ data

local train, test
if cfg.data ~= "" then
  local common = { path = cfg.data, size = cfg.size, batch = cfg.batch, seed = cfg.seed }
  local function with(more)
    for key, value in pairs(common) do more[key] = value end
    return engine.data.images(more)
  end
  train, test = with { to = 0.9, flip = cfg.flip }, with { from = 0.9, shuffle = false }
else
  local function drawn(count, seed)
    return engine.data.shapes { count = count, size = cfg.size, batch = cfg.batch, seed = seed }
  end
  train, test = drawn(math.min(cfg.steps * cfg.batch, 4096), cfg.seed),
    drawn(512, cfg.seed + 1000)
end

-- ------------------------------------------------------------------ model and training

local nn, classes = engine.nn, #train.classes
local net
if cfg.model == "vit" then
  net = nn.vit { size = cfg.size, patch = 4, width = 4 * cfg.width, heads = 4, layers = 4,
    classes = classes }
else
  net = nn.resnet18 { classes = classes, width = cfg.width, stem = "small" }
end
if cfg.log == "line" then
  print(("%s of %s parameters; %s"):format(cfg.model, net:count(), train))
end

local summary = engine.trainer {
  model = net, data = train, steps = cfg.steps, clip = 1.0, log = cfg.log,
  optimizer = engine.optim.adamw(net,
    { lr = cfg.lr, precision = cfg.precision, decay = "matrices" }),
  schedule = engine.schedule.cosine { lr = cfg.lr, warmup = math.ceil(cfg.steps / 20),
    total = cfg.steps, floor = cfg.lr / 50 },
  policy = cfg.policy ~= "" and cfg.policy or nil, run = cfg.run ~= "" and cfg.run or nil,
  config = cfg,
}:run()

-- ------------------------------------------------------------------ accuracy on other images

net:eval()
local right, count, batches = 0, 0, test:batches_per_epoch()
for _ = 1, batches do
  engine.scope(function()
    local batch = test:next()
    local guess = engine.autocast(cfg.precision, net, batch.x):argmax(-1)
    right = right + guess:eq(batch.y):to("f32"):sum():item()
    count = count + batch.y.count
  end)
end
if cfg.log ~= "json" then
  print(("accuracy on %d other images: %.1f %%"):format(count, 100 * right / count))
end
return summary
