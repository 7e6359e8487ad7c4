-- Publishes statistics of the outputs of watched modules as signals that policies read:
-- activation_amax.MODULE, the largest magnitude, and activation_kurtosis.MODULE, the fourth central
-- moment over the squared variance (3 for a normal distribution). Each signal is the largest value
-- over a step's micro-batches and ranks. Outputs are measured only while a policy needs
-- `activations` or the trainer's option `activations` names modules. Called by trainer.lua, and by
-- modes.lua, which asks for the modules.
local autograd = require "engine.tensor.autograd"
local module = require "engine.nn.module"
local precision = require "engine.train.precision"
local signals = require "engine.policy.signals"
local tensor = require "engine.tensor.tensor"
local within = require "engine.base.within"

local M = {}

local Activations = {}
Activations.__index = Activations

-- Returns whether a path is that of a numbered entry of a list at the top of the model: "blocks.3",
-- or "3" if the model itself is a list. "fc3" is none.
local function in_list(path) return path:find "^%d+$" or path:find "^[^.]+%.%d+$" end

--- Returns the modules whose path matches the pattern, { module = path }, or nil if none does.
--- Without a pattern, returns the numbered entries of the model's top-level lists, such as
--- blocks.3.
function M.modules(model, pattern)
  local found, some = {}, false
  if model.apply then
    model:apply(function(part, path)
      if path ~= "" and (pattern and path:find(pattern) or not pattern and in_list(path)) then
        found[part], some = path, true
      end
    end)
  end
  return some and found or nil
end

--- Returns an object that measures the outputs of the modules that M.modules returns. First
--- withdraws the signals of an earlier model.
function M.new(model, pattern)
  M.clear()
  return setmetatable({ modules = M.modules(model, pattern), most = {} }, Activations)
end

--- Withdraws the signals of all models.
function M.clear() signals.withdraw "^activation_" end

-- Returns the amax and the kurtosis of an output. The kurtosis is NaN if the output is constant or
-- has inf or NaN.
local function measure(x)
  x = x:detach():to "f32"
  local amax = x:abs():max():item()
  if not (amax > 0 and amax < math.huge) then return amax, 0 / 0 end
  local d = x * (1 / amax)                              -- so that fourth powers fit f32
  d = d - d:mean()
  local q = d * d
  local variance = q:mean():item()
  return amax, (q * q):mean():item() / variance ^ 2
end

local function publish(self, what, path, value)
  local name = ("activation_%s.%s"):format(what, path)
  -- once the value is NaN, it stays NaN
  local most = self.most[name]
  if not most or most == most and not (value <= most) then most = value end
  self.most[name] = most
  signals.publish_largest(name, most)
end

--- Runs f(...), the forward pass of micro-batch i, and measures the modules' outputs.
function Activations:during(i, f, ...)
  if i == 1 then self.most = {} end
  return within(function()
    module.watch(function(part) return self.modules[part] end, function(path, x)
      if not path or not tensor.is_tensor(x) or x.dtype == "i32" then return end
      local amax, kurtosis = precision.autocast("fp32", autograd.scope, measure, x)
      publish(self, "amax", path, amax)
      publish(self, "kurtosis", path, kurtosis)
    end)
  end, function() module.watch(nil) end, f, ...)
end

return M
