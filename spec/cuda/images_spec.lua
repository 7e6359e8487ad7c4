-- Images on the card: resnet18 trains as on the CPU, and convolutions that take several tiles of
-- scratch memory give the CPU's results. Run by spec/cuda/run.lua only.
local engine = require "engine"

local CARD = os.getenv("ENGINE_TEST_DEVICE")
if not CARD then return end

--- Trains a small resnet18; returns the losses and the running statistics of its last batch norm.
local function train(device, precision)
  engine.device(device)
  engine.seed(5)
  local net = engine.nn.resnet18 { classes = 8, width = 4, stem = "small" }
  local losses, statistics = {}, {}
  engine.trainer {
    model = net, data = engine.data.shapes { count = 32, size = 12, batch = 8, seed = 2 },
    loss = function(model, batch) return model:loss(batch.x, batch.y) end,
    steps = 4, log = "quiet",
    optimizer = engine.optim.adamw(net, { lr = 1e-3, precision = precision }),
    on_step = function(_, record) losses[#losses + 1] = record.loss end,
  }:run()
  for _, p in ipairs(net:parameters()) do
    if p.name:find("running_", 1, true) then statistics[p.name] = p.tensor:totable() end
  end
  engine.device("cpu")
  return losses, statistics
end

describe("images on the card", function()
  for precision, limit in pairs { fp32 = 1e-3, bf16 = 3e-2, fp16 = 1e-2 } do
    it("follow the CPU's losses and statistics in " .. precision, function()
      local want, statistics = train("cpu", precision)
      local got, own = train(CARD, precision)
      assert.equal(4, #got)
      for i = 1, #want do
        assert(math.abs(got[i] - want[i]) <= limit * want[i],
          ("step %d: expected a loss of %.7g, got %.7g"):format(i, want[i], got[i]))
      end
      local seen = 0
      for name, values in pairs(statistics) do
        for c, value in ipairs(values) do
          seen = seen + 1
          assert(math.abs(own[name][c] - value) <= 4 * limit * (1 + math.abs(value)),
            ("%s[%d]: expected %.7g, got %.7g"):format(name, c, value, own[name][c]))
        end
      end
      assert(seen > 100, seen)
      assert.same(got, (train(CARD, precision)))   -- repeats bit for bit
    end)
  end

  it("give the CPU's results for a convolution of several tiles", function()
    engine.seed(9)
    -- 90 x 120 output positions, each with 9 x 200 numbers of 4 bytes: 74 MiB
    local x, w, dy = engine.randn(1, 200, 90, 120), engine.randn(2, 200, 3, 3),
      engine.randn(1, 2, 90, 120)
    local function run(device)
      engine.device(device)
      local a, b = x:to(device):requires_grad(), w:to(device):requires_grad()
      local y = a:conv2d(b, nil, { padding = 1 })
      local loss = (y * dy:to(device)):sum()
      loss:backward()
      local results = { y:to("cpu"), a.grad:to("cpu"), b.grad:to("cpu") }
      engine.device("cpu")
      return results
    end
    local want, got = run "cpu", run(CARD)
    for k = 1, 3 do
      local error = (got[k] - want[k]):abs():max():item() / want[k]:abs():max():item()
      assert(error < 1e-5, ("result %d differs by %.3g"):format(k, error))
    end
  end)
end)
