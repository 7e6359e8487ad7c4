-- REINFORCE in fp16 with heavy-tailed returns. A network learns to walk from one corner of a grid
-- to the opposite one, against a wind that sometimes pushes it back. An episode that reaches the
-- corner returns 0.97^steps. About one in `rare` of these episodes returns `jackpot` times as much.
-- So a few batches have gradients that are hundreds of times larger than usual. A scale that
-- follows the largest gradient leaves the usual gradients near the smallest numbers of fp16. A
-- scale for the usual gradients overflows at the rare, large gradients.
--
--   ./engine examples/reinforce.lua
--   ./engine examples/reinforce.lua policy=zclip run=walk        then: ./engine plot walk
--   ./engine contest examples/reinforce.lua --policy dynamic --policy guarded --policy zclip
--
-- The loss is -sum(log pi(action) * (return - baseline)) / batch, which does not measure how well
-- the network walks. The held-out loss does: it is minus the mean return without jackpots.
local engine = require "engine"
local lab = require "engine.report.lab"
local nn = engine.nn

local cfg = engine.config({ policy = "dynamic", seed = 1, steps = 200, size = 5, horizon = 24,
  batch = 32, hidden = 64, jackpot = 500, rare = 300, lr = 3e-3, precision = "fp16",
  evaluate_every = 50, run = "", resume = "", log = "line" },
  { policy = "loss-scaling policy", seed = "seed for weights and episodes", steps = "updates",
    size = "rows and columns of the grid", horizon = "moves after which an episode ends",
    batch = "episodes per update", hidden = "hidden features",
    jackpot = "factor on the return of rare episodes",
    rare = "on average, one in N episodes that reach the corner is rare",
    lr = "learning rate", precision = { "precision recipe", choices = { "fp32", "bf16", "fp16" } },
    evaluate_every = "updates between evaluations", run = "name of the run; empty: not stored",
    resume = "auto, or the path of a run or checkpoint",
    log = { "what to show", choices = { "line", "json", "quiet" } } },
  { count = "steps size horizon batch hidden rare evaluate_every", natural = "seed",
    positive = "lr", not_negative = "jackpot", policy = "policy" })

local N, MOVES = cfg.size, { { 1, 0 }, { 0, 1 }, { -1, 0 }, { 0, -1 } }
-- GOAL: the cell to reach. WIND: the probability that the wind replaces a move by a step back.
-- DISCOUNT: the factor on the return for each move.
local CELLS, GOAL, WIND, DISCOUNT = N * N, N * N - 1, 0.15, 0.97

-- Returns the cell after a move. A wall stops the move.
local function moved(cell, move)
  local x, y = cell % N + move[1], math.floor(cell / N) + move[2]
  return math.min(math.max(x, 0), N - 1) + N * math.min(math.max(y, 0), N - 1)
end

-- Plays a batch of episodes; with `jackpots`, rare episodes return `jackpot` times as much. Returns
-- a table of four lists. For each move: `cells` has the cell before it, `actions` the action (from
-- 0), `episode` the number of the episode. For each episode: `returns` has the return.
local function play(model, jackpots)
  local where, list = {}, { cells = {}, actions = {}, episode = {}, returns = {} }
  for e = 1, cfg.batch do where[e], list.returns[e] = 0, 0 end
  for t = 1, cfg.horizon do
    local odds = engine.scope(function()
      return engine.no_grad(function()
        return model(engine.tensor(where, "i64")):to("f32"):softmax(-1):totable()
      end)
    end)
    for e = 1, cfg.batch do
      if where[e] ~= GOAL then
        local draw, action = math.random(), 1
        while action < #MOVES and draw > odds[e][action] do
          draw, action = draw - odds[e][action], action + 1
        end
        local n = #list.cells + 1
        list.cells[n], list.actions[n], list.episode[n] = where[e], action - 1, e
        where[e] = moved(where[e], math.random() < WIND and MOVES[3 + n % 2] or MOVES[action])
        if where[e] == GOAL then
          local rare = jackpots and math.random(cfg.rare) == 1
          list.returns[e] = DISCOUNT ^ t * (rare and cfg.jackpot or 1)
        end
      end
    end
  end
  return list
end

-- Returns a loader whose batches are only their indices, from first + 1. loss() seeds a batch's
-- episodes with its index, so that a resumed run plays the same episodes.
local function numbers(first)
  return lab.loader(function(number) return { number = number, tokens = cfg.batch } end, first)
end

-- Returns the median, which jackpots hardly change.
local function median(values)
  local sorted = {}
  for i, value in ipairs(values) do sorted[i] = value end
  table.sort(sorted)
  return sorted[math.ceil(#sorted / 2)]
end

local function loss(model, batch)
  math.randomseed(cfg.seed * 1000003 + batch.number)
  local list = play(model, model:is_training())
  if not model:is_training() then
    local sum = 0
    for _, value in ipairs(list.returns) do sum = sum + value end
    return engine.tensor(-sum / cfg.batch)
  end
  local baseline, advantage = median(list.returns), {}
  for i, e in ipairs(list.episode) do advantage[i] = (list.returns[e] - baseline) / cfg.batch end
  local cost = engine.cross_entropy(model(engine.tensor(list.cells, "i64")),
    engine.tensor(list.actions, "i64"), { reduction = "none" })     -- -log pi(action)
  return (cost * engine.tensor(advantage)):sum()
end

engine.seed(cfg.seed)
local model = nn.sequential { nn.embedding(CELLS, cfg.hidden), nn.relu(),
  nn.linear(cfg.hidden, cfg.hidden), nn.relu(), nn.linear(cfg.hidden, #MOVES) }
local trainer = engine.trainer { model = model, loss = loss, policy = cfg.policy,
  steps = cfg.steps, data = numbers(0), config = cfg, run = cfg.run, resume = cfg.resume,
  log = cfg.log, optimizer = engine.optim.adam(model, { lr = cfg.lr, precision = cfg.precision }),
  evaluate = { data = numbers(1e6), every = cfg.evaluate_every, batches = 8 } }
local summary = trainer:run()
if cfg.log == "line" then
  print(("mean return %.3f, at best %.3f; %d steps skipped"):format(
    -trainer:evaluate_on(numbers(2e6), 8), DISCOUNT ^ (2 * N - 2), summary.skipped))
end
return summary
