-- nn.sync_batch_norm: ranks with a part of the batch each train like one rank with the whole batch.
local helper = require "spec.helper"
local start = require "spec.dist.start"

if not start.can("batch norm over several ranks") then return end

-- Trains on 12 images in each step, divided among the ranks. Each rank prints its running
-- statistics and weights. The parts differ in mean, so their statistics are not the batch's.
local JOB = [[
local engine = require "engine"
local cfg = engine.config { sync = true, precision = "fp32", affine = true, checkpoint = false }
engine.seed(3)
local nn, rank, size = engine.nn, engine.ranks.rank(), engine.ranks.size()
local model = nn.sequential { nn.sequential { nn.conv2d(2, 3, 3),
  nn.batch_norm(3, { affine = cfg.affine }), nn.relu(), nn.conv2d(3, 2, 2), nn.batch_norm(2) } }
if cfg.sync and size > 1 then nn.sync_batch_norm(model, engine.ranks.group()) end
if cfg.checkpoint then model:checkpoint(".") end
engine.seed(4)
local share, batches, at = 12 / size, {}, -1    -- drawn here: in a step, each rank draws its own
for i = 1, 4 do
  local offset = engine.arange(1, 12):to("f32"):view(12, 1, 1, 1)
  batches[i] = (engine.randn(12, 2, 6, 6) + offset):keep()
end
local function batch()                         -- the parts of a step's batch, one after another
  at = at + 1
  local from = at % size * share
  return { x = batches[math.floor(at / size) + 1]:slice(1, from + 1, from + share),
    tokens = share }
end
engine.trainer { model = model, steps = 4, log = "quiet", attach = false, restart_data = true,
  precision = cfg.precision, optimizer = engine.optim.sgd(model, { lr = 0.05 }),
  data = { next = batch },
  loss = function(m, b) return (m(b.x):to "f32" * b.x:slice(2, 1, 1):slice(3, 1, 3)
    :slice(4, 1, 3)):sigmoid():square():mean() end }:run()
local numbers = {}
for _, p in ipairs(model:parameters()) do
  for _, v in ipairs(p.tensor:to "f64":view(-1):totable()) do
    numbers[#numbers + 1] = ("%.9g"):format(v)
  end
end
io.stderr:write(("rank %d: %s\n"):format(rank, table.concat(numbers, " ")))
]]

-- The batch norm of `rows` x 3 x 2 numbers with mean / standard deviation = 2 * far. Rank 1 has
-- twice as many rows as each other rank. Prints the mean, the variance and the gradients.
local OPERATION = [[
local engine = require "engine"
local cfg = engine.config { rows = 0, far = 1 }
local ranks, rows = engine.ranks, cfg.rows
engine.seed(5)
local x, dy = engine.randn(rows, 3, 2) / 2 + cfg.far, engine.randn(rows, 3, 2)
local rank, share = ranks.rank(), rows / (ranks.size() + 1)
if ranks.size() > 1 and rows > 0 then
  local from = rank > 1 and rank + 1 or rank
  local to = (rank == 1 and 3 or from + 1) * share
  x, dy = x:slice(1, from * share + 1, to), dy:slice(1, from * share + 1, to)
end
local weight, bias = engine.randn(3):requires_grad(true), engine.randn(3):requires_grad(true)
x = x:detach():requires_grad(true)
local y, mean, variance, n = x:batch_norm(weight, bias, { over = ranks.group() })
local loss = (y * dy):sum()
loss:backward()
local numbers = { n, ranks.reduce(x.grad:square():sum():item(), "sum") }
for i, t in ipairs { mean - cfg.far, variance, weight.grad, bias.grad } do
  for _, v in ipairs(t:totable()) do
    numbers[#numbers + 1] = i > 2 and ranks.reduce(v, "sum") or v
  end
end
io.stderr:write(("rank %d: %s\n"):format(rank, table.concat(numbers, " ")))
]]

-- Rank 1 of the job has a batch (where=x) or a loss (where=loss) that overflows in fp16, from step
-- 1 on.
local OVERFLOW = [[
local engine = require "engine"
local cfg = engine.config { where = "x", policy = "static:loss_scale=1024", trap = "", zero = 0,
  steps = 14 }
engine.seed(3)
local nn, rank, at = engine.nn, engine.ranks.rank(), -1
local model = nn.sequential { nn.conv2d(2, 3, 3), nn.batch_norm(3), nn.relu(), nn.conv2d(3, 2, 2),
  nn.batch_norm(2) }
nn.sync_batch_norm(model, engine.ranks.group())
engine.trainer { model = model, steps = cfg.steps, attach = false, restart_data = true,
  precision = "fp16", policy = cfg.policy, trap = cfg.trap ~= "" and cfg.trap or nil,
  zero = cfg.zero, rank_timeout = 20, optimizer = engine.optim.adam(model, { lr = 0.01 }),
  data = { sharded = true, next = function()
    at = at + 1
    local bad = rank == 1 and at > 0
    return { x = engine.randn(4, 2, 6, 6) * (bad and cfg.where == "x" and 1e6 or 1), tokens = 4,
      factor = bad and cfg.where == "loss" and 1e9 or 1 }
  end },
  loss = function(m, b) return m(b.x):to "f32":square():mean() * b.factor end }:run()
engine.ranks.say("reached the end")
]]

local folder

local function run(job, ranks, ...)
  local script = folder .. "/job.lua"
  helper.write(script, job)
  return ranks == 1 and helper.run { script, ... }
    or start.run(ranks, script, { ... })
end

-- The numbers of each rank at the end of a job.
local function numbers_of(job, ranks, ...)
  local result, lists = run(job, ranks, ...), {}
  assert.equal(0, result.code, result.out .. result.err)
  for rank, line in result.err:gmatch "rank (%d): ([^\n]*)" do
    local list = {}
    for word in line:gmatch "%S+" do list[#list + 1] = tonumber(word) end
    lists[tonumber(rank) + 1] = list
  end
  return lists
end

local function train(...) return numbers_of(JOB, ...) end

-- The largest difference between two lists, relative to the largest number.
local function apart(a, b)
  assert.equal(#a, #b)
  local most, far = 0, 0
  for i = 1, #a do
    most, far = math.max(most, math.abs(a[i])), math.max(far, math.abs(a[i] - b[i]))
  end
  return far / most
end

describe("batch norm over several ranks", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("trains like one rank with the whole batch", function()
    for _, precision in ipairs { "fp32", "fp16" } do
      local option = "precision=" .. precision
      local alone = train(1, option)[1]
      for _, ranks in ipairs { 2, 3 } do
        local lists = train(ranks, option)
        for rank = 2, ranks do assert.same(lists[1], lists[rank]) end
        local limit = precision == "fp32" and 2e-6 or 2e-3
        assert.is_true(apart(alone, lists[1]) < limit, apart(alone, lists[1]))
      end
      assert.is_true(apart(alone, train(2, option, "sync=false")[1]) > 0.01)
    end
  end)

  it("trains the same without weight and bias, and with activation checkpointing", function()
    local alone = train(1, "affine=false")[1]
    assert.is_true(apart(alone, train(2, "affine=false")[1]) < 2e-6)
    assert.same(train(2, "affine=false"), train(2, "affine=false", "checkpoint=true"))
  end)

  it("has one rank's statistics and gradients for numbers far from 0", function()
    for _, far in ipairs { "far=1", "far=5e4", "far=5e6" } do
      local alone = numbers_of(OPERATION, 1, "rows=600", far)[1]
      for _, ranks in ipairs { 2, 3 } do
        local lists = numbers_of(OPERATION, ranks, "rows=600", far)
        assert.equal(ranks, #lists)
        for _, list in ipairs(lists) do
          assert.equal(#alone, #list)
          for i, v in ipairs(list) do
            assert.is_true(math.abs(v - alone[i]) <= 1e-6 * math.max(1, math.abs(alone[i])),
              ("%s, %d ranks, number %d: %.9g and %.9g"):format(far, ranks, i, alone[i], v))
          end
        end
      end
    end
  end)

  it("treats an empty batch as one rank does", function()
    local alone = run(OPERATION, 1, "rows=0")
    assert.matches("rank 0: 0 0 nan nan nan nan nan nan 0 0 0 0 0 0", alone.err:gsub("-nan", "nan"),
      1, true)
    local lists = run(OPERATION, 2, "rows=0")
    assert.equal(0, lists.code, lists.out .. lists.err)
    for rank = 0, 1 do
      assert.matches(("rank %d: 0 0 nan nan nan nan nan nan 0 0 0 0 0 0"):format(rank),
        (lists.err:gsub("-nan", "nan")), 1, true)
    end
  end)

  it("runs an overflowed step again on all ranks, and names the rank where it began", function()
    helper.write(folder .. "/stops.lua", [[return { name = "stops", doc = "d", options = {},
      init = function() return { scale = 1024 } end,
      decide = function(_, r)
        return { scale = 1024, action = r.overflow and "stop" or nil }
      end }]])
    for _, case in ipairs {
      { { "where=loss" }, { "first in 5.weight (rank 1); step skipped",
        "rank 1: step 10: 10 overflows in a row", "batch norm, from the gradients of rank 1",
        "first inf in backward of cast" } },
      { { "where=x", "trap=overflow", "steps=3", "zero=3" }, { "first in 1.weight (rank 1); step",
        "rank 1: step 1: overflow: first inf in cast, in 1" } },
      { { "where=x", "policy=" .. folder .. "/stops.lua" }, { "stopped after 2 steps",
        "rank 1: step 1: the policy ends the run", "batch norm, from the input of rank 1" } } } do
      local result = run(OVERFLOW, 2, unpack(case[1]))
      for _, words in ipairs(case[2]) do
        assert.matches(words, result.out .. result.err, 1, true)
      end
      for rank = 0, 1 do
        assert.matches(("rank %d: reached the end"):format(rank), result.err, 1, true)
      end
    end
  end)

  it("says in the trap's report that nan came from another rank", function()
    local result = run([[
      local engine = require "engine"
      local trap, model = require "engine.train.trap", engine.nn.batch_norm(3)
      engine.nn.sync_batch_norm(model, engine.ranks.group())
      local x = engine.randn(4, 3, 2)
      if engine.ranks.rank() == 1 then x:fill(0 / 0) end
      engine.ranks.say("%s", trap.watch(model, function() model(x):sum():backward() end))]], 2)
    assert.matches("rank 0: nan entered batch_norm, in batch_norm, through the mean (from " ..
      "another rank's part of the batch, or from running statistics): ", result.err, 1, true)
    assert.matches("rank 1: nan entered [^\n]*through its input 1, which no operation made",
      result.err)
  end)

  it("refuses what is not a group of ranks, or not a module", helper.in_step(function()
    local engine = require "engine"
    local nn, x, group = engine.nn, engine.randn(4, 2), engine.ranks.group()
    local sync = nn.sync_batch_norm
    local wants = "nn.sync_batch_norm: expected a group of ranks, engine.ranks.group(), got "
    local over = "batch_norm: expected the option 'over' to be a group of ranks, " ..
      "engine.ranks.group(), got "
    for _, case in ipairs { { wants .. "4", sync, nn.batch_norm(2), 4 },
      { wants .. "a table", sync, nn.batch_norm(2), { comm = 1, size = 2 } },
      { "nn.sync_batch_norm: expected a module, got nothing", sync, nil, group },
      { "nn.sync_batch_norm: expected a module, got a table", sync, {}, group },
      { over .. "true", x.batch_norm, x, nil, nil, { over = true } },
      { over .. "a table", x.batch_norm, x, nil, nil, { over = {} } },
      { "batch_norm: expected a mean and a variance, or neither", x.batch_norm, x, nil, nil,
        { over = group, variance = engine.ones(2) } },
      { "batch_norm: expected input 2 to be a tensor, got 3", x.batch_norm, x, 3 },
      { "nn.batch_norm: expected more than one number for each channel in training mode, got 1",
        nn.batch_norm(2), engine.randn(1, 2) },
      { "nn.moe: expected experts_over to be a group of ranks, engine.ranks.group(), got a table",
        nn.moe, { width = 4, experts_over = { across = 1 } } } } do
      helper.refuses(case[1], unpack(case, 2, 6))
    end
  end))
end)
