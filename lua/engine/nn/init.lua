-- `engine.nn`: modules, layers and models for neural networks.
local nearest = require "engine.base.nearest"
local module = require "engine.nn.module"
local transformer = require "engine.nn.transformer"

local nn = { class = module.class, Module = module.Module, is_module = module.is_module,
  attention = transformer.attention, mlp = transformer.mlp, swiglu = transformer.swiglu,
  block = transformer.block, moe = require("engine.nn.moe").moe }
for name, layer in pairs(require "engine.nn.layers") do nn[name] = layer end
for name, model in pairs(require "engine.nn.models") do nn[name] = model end

return setmetatable(nn, {
  __index = function(t, key)
    if key == "gpt2" then   -- loaded at first use: it needs the JSON and safetensors readers
      local gpt2 = require "engine.nn.gpt2"
      rawset(t, key, gpt2)
      return gpt2
    end
    local names = { "gpt2" }
    for name in pairs(t) do names[#names + 1] = name end
    error(("engine.nn has no '%s'%s"):format(tostring(key), nearest.hint(tostring(key), names)), 2)
  end,
})
