-- Trains, in fp16, a mixture of experts in which one expert would keep the scale low for all
-- others. Tokens come from eight domains, each half as frequent as the one before, and the gate
-- sends each domain to its expert. Rarely, a token of the most frequent domain is `large` times
-- larger, and its expert's weight gradients overflow. Under one scale, each outlier costs a step
-- and halves the scale of all experts. With policy=per_expert only that expert backs off, and the
-- policy remembers the expert's largest gradients.
--
--   ./engine examples/moe.lua
--   ./engine examples/moe.lua policy=dynamic
--   ./engine examples/moe.lua seeds=5                    compares the policies
--   mpirun -np 2 ./engine examples/moe.lua batch=128 experts_over=2 dispatch=fp8 combine=bf16
--                                                        half of the experts on each rank
--
-- Measured with seeds=5. `share` is the share of the third expert's gradients that lost bits:
--                                 skipped of 300   share
--   dynamic                       6.6 +- 0.6       3.1e-4 +- 1.8e-4
--   dynamic, growth_interval=50   8.8 +- 2.3       1.9e-4 +- 1.0e-4
--   max_value                     6.2 +- 0.8       3.6e-4 +- 4.9e-4
--   per_expert                    5.0 +- 1.2       1.2e-5 +- 1.3e-5
-- The losses, 0.24 +- 0.05, do not differ from fp32's, 0.25 +- 0.02: subnormals still hold some
-- bits.
--
-- Measured over ranks (last loss; batch=256 / ranks): precision=fp32 policy=static gives 0.2799 on
-- one, two and four ranks; with dispatch=fp8 combine=bf16, it gives 0.2826 on two and four (SNR 31
-- dB to the experts, 56 dB back). fp16 gives 0.30, 0.29 and 0.29 on one, two and four ranks; with
-- the same two options, 0.30 and 0.29 on two and four. On two ranks in fp32, rank 0 sends 1.4 KB
-- per step to experts and 11.3 KB back; with the two options, 0.4 KB and 5.7 KB.
local engine = require "engine"
local nn, ranks = engine.nn, engine.ranks

local cfg = engine.config({ policy = "per_expert", seeds = 0, seed = 1, steps = 300, experts = 8,
  batch = 256, hidden = 48, large = 8000, every = 800,
  lr = 3e-3, precision = "fp16", experts_over = 1, dispatch = "own", combine = "own", run = "" },
  { policy = "loss-scaling policy", seeds = "compare policies over this many seeds; 0: train once",
    seed = "seed for weights and data", steps = "training steps",
    experts = "number of experts and of domains",
    batch = "tokens per step on each rank", hidden = "hidden features of an expert",
    large = "factor on the features of an outlier",
    every = "every N-th token is an outlier if it is of the first domain", lr = "learning rate",
    precision = { "precision recipe", choices = engine.precision.names() },
    experts_over = "ranks that share the experts; 1: each rank has all",
    dispatch = { "format of tokens sent to experts", choices = { "own", "fp32", "bf16", "fp8" } },
    combine = { "format of the outputs sent back", choices = { "own", "fp32", "bf16" } },
    run = "name of the run; empty: not stored" },
  { count = "steps experts batch hidden every experts_over", natural = "seeds seed",
    positive = "lr large", policy = "policy" })
if cfg.experts < 3 then
  engine.config.fail("experts: expected 3 or more (the third is measured), got %d", cfg.experts)
end
if ranks.size() % cfg.experts_over ~= 0 or cfg.experts % cfg.experts_over ~= 0 then
  engine.config.fail("experts_over: expected a divisor of the number of ranks, %d, and of the " ..
    "number of experts, %d, got %d; hint: mpirun -np N starts N ranks", ranks.size(), cfg.experts,
    cfg.experts_over)
end

local TOKENS, FEATURES, CLASSES, WIDTH = 4096, 16, 8, 16 + cfg.experts

local Classes = nn.class("classes")
function Classes:init() self.linear = nn.linear(WIDTH, CLASSES) end
function Classes:forward(x, y)
  return engine.cross_entropy(self.linear(x), y, { reduction = "none" })
end

local Net = nn.class("net")
function Net:init()
  self.moe = nn.moe { width = WIDTH, hidden = cfg.hidden, experts = cfg.experts, top_k = 1,
    experts_over = ranks.group(cfg.experts_over), dispatch = cfg.dispatch, combine = cfg.combine }
  self.classes = Classes()
  -- At first the gate [experts x WIDTH] sends each domain to its expert.
  local domains = engine.arange(1, cfg.experts):view(-1, 1) + FEATURES
  self.moe.gate.weight:copy(engine.arange(1, WIDTH):eq(domains))
end
-- Returns the loss of each token.
function Net:forward(x, y) return self.classes(x + self.moe(x), y) end

-- Draws n tokens. x holds 16 features and the domain, one-hot times 16. The class y depends on the
-- signs of three weighted sums, each of two features. Every domain sums different features.
local function drawn(n)
  local features, uniform = engine.randn(n, FEATURES):totable(), engine.rand(n):totable()
  local x, y = {}, {}
  for i = 1, n do
    local domain = math.min(cfg.experts, 1 + math.floor(-math.log(1 - uniform[i]) / math.log(2)))
    local class, f = 0, features[i]
    for k = 0, 2 do
      local a, b = f[(domain + k) % FEATURES + 1], f[(domain * 3 + k) % FEATURES + 1]
      class = 2 * class + (a + 0.5 * b > 0 and 1 or 0)
    end
    local outlier = domain == 1 and i % cfg.every == 0
    for k = 1, FEATURES do f[k] = f[k] * (outlier and cfg.large or 1) end
    for e = 1, cfg.experts do f[FEATURES + e] = e == domain and 16 or 0 end
    x[i], y[i] = f, class
  end
  return engine.tensor(x, { keep = true }), engine.tensor(y, { dtype = "i64", keep = true })
end

-- Trains once; the policy "fp32" means fp32 without a loss scale. tell: whether to print progress.
-- Returns a table with the mean loss of all domains but the first over the last steps, the steps
-- skipped, and the share of the third expert's gradients that lost bits. Also returns the network.
local function train(policy, seed, tell)
  engine.seed(seed)
  local x, y = drawn(TOKENS)
  local net, rare, made, result, third = Net(), 0, 0, { loss = 0, lost = 0 }, nil
  net.moe:sent()                                            -- starts the count of sent bytes
  local fp32 = policy == "fp32"
  local optimizer = engine.optim.adam(net,
    { lr = cfg.lr, eps = 1e-20, precision = fp32 and "fp32" or cfg.precision })
  for i, p in ipairs(optimizer.list) do
    if p.name == "moe.experts.3.up.weight" then third = i - 1 end
  end
  local other_x, other_y = drawn(TOKENS / 4)
  local summary = engine.trainer {
    model = net, policy = fp32 and "static" or policy, steps = cfg.steps, log = "quiet",
    optimizer = optimizer,
    data = engine.data.tensors { x = x, y = y, batch = cfg.batch, seed = seed },
    config = cfg, run = cfg.seeds == 0 and cfg.run or nil, evaluate = { every = cfg.steps,
      data = engine.data.tensors { x = other_x, y = other_y, batch = cfg.batch }, batches = 4 },
    loss = function(model, batch)
      local each = model(batch.x, batch.y)
      rare = engine.no_grad(function()
        local is_rare = batch.x:select(2, FEATURES + 1):eq(0):to("f32")
        return ranks.reduce((each * is_rare):sum():item()) / ranks.reduce(is_rare:sum():item())
      end)
      return each:mean()
    end,
    on_step = function(t, record)
      local last = math.ceil(cfg.steps / 10)
      if t.steps_done > cfg.steps - last then result.loss = result.loss + rare / last end
      if record.overflow == 0 then
        local s = t.stats[third]
        made, result.lost = made + 1,
          result.lost + tonumber(s.underflow) / math.max(1, tonumber(s.count - s.zeros))
      end
      if tell and (t.steps_done % math.ceil(cfg.steps / 12) == 0 or t.steps_done == cfg.steps) then
        print(("step %d  loss %.4f  scale %g  scale of the third expert %g"):format(t.steps_done,
          rare, record.scale, record.scale * t.stats[third].relative_scale))
      end
    end,
  }:run()
  result.lost, result.skipped = result.lost / math.max(1, made), summary.skipped
  return result, net
end

if cfg.seeds == 0 then
  local result, net = train(cfg.policy, cfg.seed, true)
  print(("%d steps skipped; %.2g %% of the third expert's gradients lost bits"):format(
    result.skipped, 100 * result.lost))
  print("tokens of each expert in the last held-out batch: " .. table.concat(net.moe.counts, " "))
  local sent = net.moe:sent()
  for _, way in ipairs(sent and { "out", "back" } or {}) do
    print(("%s experts: %.1f KB per step from rank 0 to other ranks, SNR %.1f dB"):format(
      way == "out" and "to" or "from", sent[way].bytes / cfg.steps / 1024, sent[way].snr))
  end
else
  print(engine.contest { policies = { "dynamic", "dynamic:growth_interval=50", "max_value",
    "per_expert", "fp32" }, also = cfg.policy, seeds = cfg.seeds, run = train })
end
