-- Runs reference backward passes: in every ref_every-th step, the step's own batches first go
-- through a forward and a backward pass in f32, with the step's own dropout. A policy can then
-- compare the norm of the step's low-precision gradients with the true norm (record.norm_ref). A
-- reference pass changes neither the step's gradients nor the model's buffers nor the random
-- numbers. It costs time, and memory for a second set of f32 gradients. Called by the trainer for
-- policies that need "norm_ref".
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local buffers = require "engine.train.buffers"
local machine = require "engine.base.machine"
local optim = require "engine.train.optim"
local precision = require "engine.train.precision"
local random = require "engine.base.random"

local C, check = M_ffi.C, M_ffi.check

local M = {}

local Reference = {}
Reference.__index = Reference

--- Returns an object that runs a trainer's reference backward passes, one every `every` steps.
--- layers: a Lua pattern for the names of the parameters to cover ("": all). The backward pass
--- computes no gradients of other parameters.
function M.new(trainer, every, layers)
  local list, spared = trainer.optimizer.list, {}
  arguments.want_pattern(layers, "ref_layers", "a Lua pattern of parameter names")
  for _, p in ipairs(list) do
    if layers ~= "" and not p.name:find(layers) then spared[#spared + 1] = p.tensor end
  end
  if #spared == #list then
    M_ffi.raise("ref_layers = '%s' matches no parameter of this model; its first parameter is %s",
      layers, list[1].name)
  end
  return setmetatable({ trainer = trainer, every = every, spared = spared, norm = 0 / 0,
    norms = M_ffi.new("double[?]", #list), n = #list, count = 0, seconds = 0 }, Reference)
end

local function backward(self, s, batches)
  local trainer, mark = self.trainer, M_ffi.new("int64_t[1]")
  for i, batch in ipairs(batches) do
    trainer.reducer:seed_batch(s, i)
    check(C.eng_scope_begin(mark))
    local good, message = pcall(function()
      precision.in_f32(trainer.precision, trainer.loss, trainer.model,
        batch):backward { scale = 1 / #batches }
    end)
    local status = C.eng_scope_end(mark[0])
    if not good then error(message, 0) end
    check(status)
  end
end

--- If a reference backward pass is due in this step, draws the step's batches, runs them in f32
--- and returns them, so that the step itself uses them. Otherwise returns nil.
function Reference:batches(s)
  local trainer = self.trainer
  self.norm = 0 / 0
  if trainer.steps_done % self.every ~= 0 then return nil end
  local began, batches, norm = machine.clock(), {}, M_ffi.new("double[1]")
  for i = 1, trainer.accumulate do batches[i] = trainer:next_batch() end
  local place, params, frozen = trainer:remember_place(), trainer.optimizer.params, {}
  for _, x in ipairs(self.spared) do
    if optim.requires_grad(x) then frozen[#frozen + 1] = x:requires_grad(false) end
  end
  local good, message = pcall(function()
    check(C.eng_params_reference_begin(params))
    buffers.keeping(trainer.model, function() backward(self, s, batches) end)
    if trainer.reducer.many then check(C.eng_parallel_reference(trainer.reducer.reduction)) end
  end)
  local status = C.eng_params_reference_end(norm, self.norms, params, 1)
  for _, x in ipairs(frozen) do x:requires_grad(true) end
  if not good then error(message, 0) end
  check(status)
  trainer.reducer:share_norms(norm, self.norms, self.n)
  random.go(place)
  self.norm, self.count, self.seconds = norm[0], self.count + 1,
    self.seconds + (machine.clock() - began)
  return batches
end

--- Writes the norms into the step's record and statistics.
function Reference:fill(record, stats)
  record.norm_ref = self.norm
  for i = 0, self.n - 1 do stats[i].norm_ref = self.norm == self.norm and self.norms[i] or 0 end
end

function Reference:__tostring()
  return ("%d reference backward passes in %.1f s"):format(self.count, self.seconds)
end

return M
