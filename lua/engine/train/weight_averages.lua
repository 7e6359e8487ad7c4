-- Averages of weights over steps, toward which FP4 layers round their weights (Q-EMA of TetraJet,
-- arXiv 2502.20853). fp8_sites.lua makes and moves the averages. Checkpoints store them with the
-- optimizer's state (optim.lua, run/shards.lua). dist/agreement.lua compares them between ranks.
-- Called by fp8_sites.lua.
local M_ffi = require "engine.base.ffi"
local autograd = require "engine.tensor.autograd"
local steps = require "engine.optim.steps"
local tensor = require "engine.tensor.tensor"

local ffi, C, check = M_ffi.ffi, M_ffi.C, M_ffi.check

local M = {}

local Averages = {}
Averages.__index = Averages

-- Returns the decay of the average of a layer's weight, or nil if no rung of the layer has one.
-- Raises an error if two rungs have different decays.
local function decay_of(site)
  local decay
  for i, recipe in ipairs(site.rungs) do
    local own = recipe.role[1].average
    M_ffi.raise_if(own > 0 and decay and own ~= decay, "%s: ladder[%d]: w: expected average to " ..
      "be %g, as in the rungs below, got %g", site.path, i - 1, decay, own)
    decay = own > 0 and own or decay
  end
  return decay
end

--- Makes an average for each parameter in `list` whose layers have a recipe that needs one. sites:
--- the list of a model's FP8 layers. Frozen weights have no average and are rounded to nearest.
--- Fields of the result: list (of averages: { p = the parameter, name, x = the f32 tensor, decay,
--- sites }), held (true if the next step is a retry), bytes (the memory of the averages).
--- Checkpoints store the averages and `held`.
function M.new(sites, list)
  local self, parameter, made = setmetatable({ list = {}, bytes = 0 }, Averages), {}, {}
  for _, p in ipairs(list) do parameter[tonumber(p.tensor.slot)] = p end
  for _, site in ipairs(sites) do
    local decay, p = decay_of(site), parameter[tonumber(site.module.weight.slot)]
    if decay and p then
      local average = made[p]
      if not average then
        average = { p = p, name = p.name .. ".q_ema", decay = decay, sites = {},
          x = ffi.gc(tensor.zeros(p.tensor.shape, { keep = true }), C.eng_free) }
        made[p], self.list[#self.list + 1] = average, average
        self.bytes = self.bytes + 4 * average.x.count
      end
      table.insert(average.sites, site)
      site.average = average
    end
  end
  return self
end

--- Makes the layers round toward the averages from now on; before, they round to nearest. Called
--- when the averages have their first values, or those of a checkpoint.
function Averages:start()
  for _, average in ipairs(self.list) do
    for _, site in ipairs(average.sites) do check(C.eng_fp8_average(site.id, average.x)) end
  end
  self.started = true
end

local function move(self)
  for _, average in ipairs(self.list) do
    local x, weight = average.x, average.p.tensor
    local moved = self.started and steps.lerp(x, weight, 1 - average.decay) or weight
    x:copy(moved:isfinite():where(moved, weight))
  end
  if not self.started then self:start() end
end

--- Moves the averages by one step; called before a step's forward passes. In the first step the
--- averages are copies of the weights. An average that would become Inf or NaN is replaced by the
--- weight, so that it recovers when the weight does. In a retry (hold), the averages do not move.
function Averages:move()
  if not self.held and #self.list > 0 then autograd.no_grad(autograd.scope, move, self) end
  self.held = nil
end

--- Keeps the averages from moving in the next step, which retries the current one.
function Averages:hold() self.held = true end

--- Returns the averages for a checkpoint, { ["blocks.1.mlp.up.weight.q_ema"] = tensor }.
function Averages:tensors()
  local tensors = {}
  for _, average in ipairs(self.list) do tensors[average.name] = average.x end
  return tensors
end

return M
