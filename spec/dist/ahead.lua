-- A job of zero3_spec.lua whose ranks use weights in changing orders (ZeRO-3). The number of a step
-- selects the order of its blocks: steps leave out different blocks, and some run a block twice.
-- Evaluations come between the steps. Rank 0 prints a line for each step. At the end every rank
-- prints the checksum of the weights and, for each step, how many units were gathered ("came") and
-- how many of them were prefetched ("ahead").
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local C = M_ffi.C
local ranks = engine.ranks
local cfg = engine.config { zero = 0, steps = 9, precision = "fp32", width = 64, order = "changes",
  accumulate = 1, checkpoint = false, evaluate = 0, timeout = 20, mode = "sync",
  -- the steps in which rank 1 swaps two blocks (odd), uses another block (other), dies, or raises
  -- an error between two blocks; -1: none
  odd_step = -1, other_step = -1, die_step = -1, raise_step = -1 }
engine.seed(11)
io.stdout:setvbuf "line"

local Blocks = engine.nn.class("Blocks")

function Blocks:init(W)
  local blocks = {}
  for i = 1, 6 do blocks[i] = engine.nn.linear(W, W) end
  self.into, self.blocks = engine.nn.linear(W, W), engine.nn.list(blocks)
  self.out = engine.nn.linear(W, 1)
end

local step = 0
local ORDERS = { { 1, 2, 3, 4, 5, 2 }, { 5, 4, 2, 3, 1 }, { 3, 1, 5, 4, 2, 3 } }

local function order_of()
  local order = { unpack(cfg.order == "changes" and ORDERS[step % 3 + 1] or ORDERS[1]) }
  if ranks.rank() == 1 and step == cfg.odd_step then
    order[3], order[4] = order[4], order[3]
  elseif ranks.rank() == 1 and step == cfg.other_step then
    order[3] = 6
  end
  return order
end

function Blocks:loss(x)
  local h = self.into(x):tanh()
  for i, k in ipairs(order_of()) do
    h = self.blocks[k](h):tanh() + h
    if i == 2 and ranks.rank() == 1 then
      if step == cfg.die_step then
        os.execute("kill -9 " .. io.open("/proc/self/stat"):read("*n"))
      end
      if step == cfg.raise_step then error("this rank has had enough", 0) end
    end
  end
  return self.out(h):to("f32"):mean()
end

local function data()
  return { next = function() return { x = engine.randn(8, cfg.width) } end,
    state = function() return {} end, restore = function() end, sharded = true }
end

local model = Blocks(cfg.width)
local optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = cfg.precision })
local facts, came, ahead = M_ffi.new("eng_parallel_facts"), {}, {}
local trainer
trainer = engine.trainer { model = model, optimizer = optimizer, data = data(), steps = cfg.steps,
  loss = function(m, batch) return m:loss(batch.x) end, zero = cfg.zero, bucket = 0.02,
  accumulate = cfg.accumulate, checkpoint = cfg.checkpoint and "block" or nil, mode = cfg.mode,
  evaluate = cfg.evaluate > 0 and { data = data(), every = cfg.evaluate, batches = 3 } or nil,
  rank_timeout = cfg.timeout, agree_every = 1, log = "quiet", attach = false,
  on_step = function(t, record)
    step = step + 1
    C.eng_parallel_last(facts, t.reducer.reduction)
    came[#came + 1], ahead[#ahead + 1] = tonumber(facts.weight_exchanges),
      tonumber(facts.weights_ahead)
    if ranks.rank() == 0 then print(("%d %.17g %.17g"):format(step, record.loss, record.norm)) end
  end }
trainer:run()
io.stderr:write(("rank %d: weights %s came %s ahead %s\n"):format(ranks.rank(),
  trainer:whole(function() return tostring(C.eng_params_checksum_of(optimizer.params, nil, 0)) end),
  table.concat(came, ","), table.concat(ahead, ",")))
