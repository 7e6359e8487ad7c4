-- engine plan SCRIPT checkpoint=block: predicts and measures the memory that activation
-- checkpointing saves and the time that it costs. The prediction comes from a trainer without
-- checkpointing, the measurement from separate processes. Called by plan.lua.
local M_ffi = require "engine.base.ffi"
local measure = require "engine.cli.plan_measure"
local module = require "engine.nn.module"
local show = require "engine.base.show"

local C, check = M_ffi.C, M_ffi.check

local M = {}

local function used() return require("engine").memory().step.used end

-- Returns how many bytes are in use after a forward pass. With `watched`, a set of modules, also
-- returns the most bytes that the forward pass of one of these modules allocated, and how many
-- seconds all their forward passes took together.
local function forward(trainer, watched)
  local most, seconds = 0, 0
  if watched then
    module.watch(function(m) return { m = m, used = used(), at = C.eng_clock() } end, function(s)
      if not watched[s.m] then return end
      most, seconds = math.max(most, used() - s.used), seconds + C.eng_clock() - s.at
    end)
  end
  check(C.eng_step_begin())
  local good, problem = pcall(trainer.forward, trainer, trainer:next_batch())
  local bytes = used()
  module.watch(nil)
  check(C.eng_step_end())
  if not good then error(problem, 0) end
  return bytes, most, seconds
end

--- Predicts the effect of checkpoint=`which` from a trainer without checkpointing. Returns { plain
--- = the peak bytes of activations and their gradients without checkpointing, block = this peak
--- with checkpointing, time = a step's time with checkpointing, divided by its time without }.
function M.predict(trainer, which)
  local step, model, watched = measure.step(trainer), trainer.model, {}
  local peak = require("engine").memory().step.peak
  model:checkpoint(which)
  model:apply(function(m) watched[m] = rawget(m, "_checkpoint") end)
  local left = forward(trainer)
  model:checkpoint(false)
  local all, most, seconds = forward(trainer, watched)
  -- The loss and its gradient need (peak - all) bytes beyond those in use after the forward pass,
  -- with or without checkpointing. Computing a block again needs up to `most` bytes beyond them.
  return { plain = peak, block = left + math.max(peak - all, most),
    time = 1 + trainer.accumulate * seconds / step }
end

--- Prints the prediction beside the measurement. `given`: the settings of `engine plan`.
function M.print(script, settings, given)
  local which = given.checkpoint
  local function with(value) return setmetatable({ checkpoint = value }, { __index = given }) end
  local p = M.predict(measure.trainer(script, settings, with "none"), which)
  local plain = measure.alone(1, script, settings, with "none")[1]
  local block = measure.alone(1, script, settings, with(which))[1]
  local function mib(bytes) return ("%.1f MiB"):format(bytes / 2 ^ 20) end
  local function share(a, b) return ("%.0f %%"):format(100 * b / a) end
  local function times(x) return ("%.2f x"):format(x) end
  print(show.table({
    { "checkpoint=" .. which, "predicted", "measured" },
    { "peak without checkpointing", mib(p.plain), mib(plain.memory_step) },
    { "peak with checkpointing", mib(p.block), mib(block.memory_step) },
    { "peak with / peak without", share(p.plain, p.block),
      share(plain.memory_step, block.memory_step) },
    { "time of a step", times(p.time), times(block.step / plain.step) },
  }, { true }))
  print("\nA peak is the most memory that activations and their gradients take during a step of " ..
    "one rank\nwith one thread. Losses and gradients are the same bit for bit in both cases.")
end

return M
