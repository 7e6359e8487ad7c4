-- `engine.nn`: modules, layers and models for neural networks. Called by scripts and report/.
local nearest = require "engine.base.nearest"
local module = require "engine.nn.module"
local transformer = require "engine.nn.transformer"

local nn = { class = module.class, Module = module.Module, is_module = module.is_module,
  attention = transformer.attention, mlp = transformer.mlp, swiglu = transformer.swiglu,
  block = transformer.block, moe = require("engine.nn.moe").moe,
  lora = require("engine.nn.lora_layers").new }
for _, part in ipairs { "layers", "models", "image_layers", "image_models" } do
  for name, value in pairs(require("engine.nn." .. part)) do nn[name] = value end
end

return setmetatable(nn, {
  __index = function(t, key)
    if key == "gpt2" then   -- version 0.1's load_model and new_model for GPT-2
      require "engine.base.renamed"("engine.nn.gpt2", "engine.load_model and engine.new_model")
      local hf = require "engine.nn.hf_load"
      return setmetatable({ load = hf.load }, { __call = function(_, fields)
        return hf.new(require("engine.base.arguments").merged({ model_type = "gpt2" }, fields))
      end })
    end
    local hint = nearest.hint(key, nearest.keys(t), true)
    error(("engine.nn has no '%s'%s"):format(tostring(key), hint ~= "" and hint
      or "; hint: docs/from-pytorch.md lists PyTorch's names"), 2)
  end,
})
