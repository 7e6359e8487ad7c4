-- nn.sync_batch_norm: ranks with a part of the batch each train like one rank with the whole batch.
local helper = require "spec.helper"
local start = require "spec.dist.start"

if not start.there then
  describe("batch norm over several ranks", function()
    pending "there is no mpirun here, or this build has no MPI: these are not run"
  end)
  return
end

-- Trains on 12 images in each step, of which every rank takes its share. Rank r prints its running
-- statistics and weights. Parts differ in mean, so statistics of a part are not those of the batch.
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

local folder
-- The numbers of each rank at the end of the job.
local function train(ranks, ...)
  local script, lists = folder .. "/job.lua", {}
  helper.write(script, JOB)
  local result = ranks == 1 and helper.run { script, ... }
    or start.run(ranks, script, { ... }, { limit = helper.sanitized and 300 or 60 })
  assert.equal(0, result.code, result.out .. result.err)
  for rank, line in result.err:gmatch "rank (%d): ([^\n]*)" do
    local list = {}
    for word in line:gmatch "%S+" do list[#list + 1] = tonumber(word) end
    lists[tonumber(rank) + 1] = list
  end
  return lists
end

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

  it("does so without weight and bias, and with activation checkpointing", function()
    local alone = train(1, "affine=false")[1]
    assert.is_true(apart(alone, train(2, "affine=false")[1]) < 2e-6)
    assert.same(train(2, "affine=false"), train(2, "affine=false", "checkpoint=true"))
  end)

  it("refuses what is not a group of ranks", function()
    local engine = require "engine"
    local good, message = pcall(engine.nn.sync_batch_norm, engine.nn.batch_norm(2), 4)
    assert.is_false(good)
    assert.matches("nn.sync_batch_norm: expected a group of ranks, engine.ranks.group(), got 4",
      message, 1, true)
  end)
end)
