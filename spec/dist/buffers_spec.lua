-- Buffers on several ranks: the running statistics of batch norm, which each rank updates from its
-- own part of the data. Ranks must agree on them wherever they are used or saved.
local helper = require "spec.helper"
local start = require "spec.dist.start"

if not start.can("buffers on several ranks") then return end

-- The data of each rank has a different mean, so the statistics of the ranks differ after a step.
local JOB = [[
local engine = require "engine"
local cfg = engine.config { run = "", resume = false, evaluate = false }
engine.seed(3)
local nn, rank = engine.nn, engine.ranks.rank()
local model = nn.sequential { nn.conv2d(1, 2, 1), nn.batch_norm(2) }
local function batch() return { x = engine.randn(4, 1, 3, 3) + 10 * rank, tokens = 4 } end
engine.trainer { model = model, steps = 4, log = "quiet", attach = false, restart_data = true,
  run = cfg.run ~= "" and cfg.run or nil, resume = cfg.resume and "auto",
  optimizer = engine.optim.sgd(model, { lr = 0.01 }),
  data = { next = batch }, loss = function(m, b) return m(b.x):square():mean() end,
  evaluate = cfg.evaluate and { data = { next = batch }, every = 2, batches = 1 } or nil }:run()
io.stderr:write(("rank %d: %.9g\n"):format(rank, model[2].running_mean:totable()[1]))
]]

local folder
-- The running mean of each of two ranks at the end of the job.
local function means(...)
  local script = folder .. "/job.lua"
  helper.write(script, JOB)
  local result = start.run(2, script, { ... })
  assert.equal(0, result.code, result.out .. result.err)
  return tonumber(result.err:match "rank 0: (%S+)"), tonumber(result.err:match "rank 1: (%S+)")
end

describe("buffers on several ranks", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("are rank 0's after a checkpoint or an evaluation, otherwise each rank's own", function()
    local first, second = means()
    assert.is_true(math.abs(first - second) > 0.1)
    local alone = first
    for _, resume in ipairs { "false", "true" } do   -- the second only loads the checkpoint
      first, second = means("run=" .. folder .. "/run", "resume=" .. resume)
      assert.same({ alone, alone }, { first, second })
    end
    first, second = means "evaluate=true"
    assert.equal(first, second)
  end)
end)
