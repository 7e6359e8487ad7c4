-- The time of a token after 512 others, with and without the cache of keys and values.
--   ./engine spec/bench/generate.lua
local engine = require "engine"
local machine = require "engine.base.machine"

engine.seed(1)
local model = engine.new_model { model_type = "llama", hidden_size = 256, num_hidden_layers = 6,
  num_attention_heads = 8, num_key_value_heads = 4, intermediate_size = 688, vocab_size = 4000,
  max_position_embeddings = 1024 }
local prompt = {}
for i = 1, 512 do prompt[i] = i end

-- Seconds per token, without the time for the prompt.
local function seconds(cache, tokens)
  local function run(n)
    local began = machine.clock()
    model:generate(prompt, { max_tokens = n, temperature = 0, cache = cache })
    return machine.clock() - began
  end
  local first = run(1)
  return (run(1 + tokens) - first) / tokens
end

seconds(true, 4)
local with, without = seconds(true, 64), seconds(false, 16)
print(("a token after 512, %.1f M parameters: %.2f ms with the cache, %.2f ms without it, %.1fx")
  :format(model:count() / 1e6, with * 1e3, without * 1e3, without / with))
