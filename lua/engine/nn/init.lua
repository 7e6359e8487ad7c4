-- Neural networks: modules, layers, transformers. `engine.nn`.
local nearest = require "engine.base.nearest"
local module = require "engine.nn.module"

local nn = { class = module.class, Module = module.Module, is_module = module.is_module }
for name, layer in pairs(require "engine.nn.layers") do nn[name] = layer end
for name, layer in pairs(require "engine.nn.transformer") do nn[name] = layer end
for name, layer in pairs(require "engine.nn.moe") do nn[name] = layer end

return setmetatable(nn, {
  __index = function(t, key)
    if key == "gpt2" then
      local gpt2 = require "engine.nn.gpt2"
      rawset(t, key, gpt2)
      return gpt2
    end
    local names = { "gpt2" }
    for name in pairs(t) do names[#names + 1] = name end
    error(("engine.nn has no '%s'%s"):format(tostring(key), nearest.hint(tostring(key), names)), 2)
  end,
})
