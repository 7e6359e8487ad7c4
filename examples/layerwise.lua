-- Trains, in fp16, a deep network whose early layers underflow under one global scale. An encoder
-- of `depth` layers learns to classify through a loss with a small weight. A tower on top estimates
-- a quantity in physical units, in the thousands. The tower's gradients do not reach the encoder,
-- but they are large and keep the global scale low. With a scale for each layer (policy=layerwise)
-- every layer uses fp16's whole range. Each loss is computed inside a module, so that the loss's
-- gradients carry that module's scale, too.
--
--   ./engine examples/layerwise.lua
--   ./engine examples/layerwise.lua policy=dynamic
--   ./engine examples/layerwise.lua seeds=5              compares the policies
--
-- Measured with seeds=5. `loss` is the classification loss at the end:
--                                 loss              zero gradients, first layer   skipped of 300
--   dynamic                       2.33 +- 0.14      all                           24.8
--   dynamic, growth_interval=50   the same          all                           28.4
--   max_value                     the same          all                           23
--   layerwise                     0.554 +- 0.059    none                          10
--   fp32                          0.484 +- 0.037
-- Under one scale the encoder learns nothing at all.
local engine = require "engine"
local nn = engine.nn

local cfg = engine.config({ policy = "layerwise", seeds = 0, seed = 1, steps = 300, depth = 8,
  width = 48, batch = 64, units = 2000, weight = 1e-4, lr = 2e-3, precision = "fp16" },
  { policy = "loss-scaling policy", seeds = "compare policies over this many seeds; 0: train once",
    seed = "seed for weights and data", steps = "training steps",
    depth = "layers of the encoder", width = "features", batch = "rows per step",
    units = "size of the estimated quantity",
    weight = "weight of the encoder's loss", lr = "learning rate",
    precision = { "precision recipe", choices = { "fp32", "fp16" } } },
  { count = "steps depth width batch", natural = "seeds seed", positive = "lr units",
    not_negative = "weight", policy = "policy" })

local Layer = nn.class("layer")
function Layer:init(width)
  self.norm, self.linear = nn.layer_norm(width), nn.linear(width, width)
end
function Layer:forward(x) return x + self.linear(self.norm(x)):tanh() end

local Classes = nn.class("classes")
function Classes:init(width, n) self.linear = nn.linear(width, n) end
function Classes:forward(x, y) return engine.cross_entropy(self.linear(x), y) end

local Quantity = nn.class("quantity")
function Quantity:init(width) self.up, self.down = nn.linear(width, width), nn.linear(width, 1) end
function Quantity:forward(x, y) return engine.mse(self.down(self.up(x):tanh()) * cfg.units, y) end

local Net = nn.class("net")
function Net:init()
  local layers = {}
  for i = 1, cfg.depth do layers[i] = Layer(cfg.width) end
  self.input = nn.linear(16, cfg.width)
  self.encoder = nn.list(layers)
  self.classes, self.quantity = Classes(cfg.width, 8), Quantity(cfg.width)
end
-- Returns the two losses of a batch: classes, quantity.
function Net:forward(x, y)
  local class, quantity = y:select(2, 1):to("i64"), y:slice(2, 2, 2)
  x = self.input(x)
  for _, layer in ipairs(self.encoder) do x = layer(x) end
  return self.classes(x, class), self.quantity(x:detach(), quantity)
end

-- Draws points in 16 dimensions. The signs of three sums determine the class; each sum adds a
-- product of two coordinates and half of a third. The quantity is a sum of squares, shifted and
-- scaled.
local function drawn(seed)
  engine.seed(seed)
  local x = engine.randn(2048, 16):keep()
  local y = {}
  for i, row in ipairs(x:totable()) do
    local c, q = 0, 0
    for k = 1, 3 do c = 2 * c + (row[k] * row[k + 3] + 0.5 * row[k + 6] > 0 and 1 or 0) end
    for k = 1, 16 do q = q + row[k] ^ 2 end
    y[i] = { c, (q - 16) * cfg.units }
  end
  return x, engine.tensor(y, { keep = true })
end

-- Trains once; the policy "fp32" means fp32 without a loss scale. tell: whether to print progress.
-- Returns a table with the loss of the classes over the last steps, the steps skipped and the share
-- of the first layer's gradients that are 0.
local function train(policy, seed, tell)
  local x, y = drawn(seed)
  local net, fp32 = Net(), policy == "fp32"
  local class_loss, made, result = 0, 0, { loss = 0, lost = 0 }
  local summary = engine.trainer {
    model = net, policy = fp32 and "static" or policy, steps = cfg.steps, log = "quiet", clip = 0,
    data = engine.data.tensors { x = x, y = y, batch = cfg.batch, seed = seed },
    optimizer = engine.optim.adam(net,
      { lr = cfg.lr, eps = 1e-20, precision = fp32 and "fp32" or cfg.precision }),
    loss = function(model, batch)
      local classes, quantity = model(batch.x, batch.y)
      class_loss = classes:item()
      return classes * cfg.weight + quantity
    end,
    on_step = function(t, record)
      local last = math.ceil(cfg.steps / 10)
      if t.steps_done > cfg.steps - last then result.loss = result.loss + class_loss / last end
      if record.overflow == 0 then
        local s = t.stats[4]                                  -- encoder.1.linear.weight
        made, result.lost = made + 1, result.lost + tonumber(s.zeros) / tonumber(s.count)
      end
      if tell and (t.steps_done % math.ceil(cfg.steps / 12) == 0 or t.steps_done == cfg.steps) then
        print(("step %d  loss %.4f  scale %g  scale of the first layer %g"):format(t.steps_done,
          class_loss, record.scale, record.scale * t.stats[4].relative_scale))
      end
    end,
  }:run()
  result.lost, result.skipped = result.lost / math.max(1, made), summary.skipped
  return result
end

if cfg.seeds == 0 then
  local result = train(cfg.policy, cfg.seed, true)
  print(("%d steps skipped; %.1f %% of the first layer's gradients were lost"):format(
    result.skipped, 100 * result.lost))
else
  print(engine.contest { policies = { "dynamic", "dynamic:growth_interval=50", "max_value",
    "layerwise", "fp32" }, also = cfg.policy, seeds = cfg.seeds, run = train })
end
