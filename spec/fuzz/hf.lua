-- Loads models from mutated files: config.json, the index and the shards of tiny models. Each must
-- load or be refused with one line, and a model that loads must run. Deterministic.
-- Usage: engine spec/fuzz/hf.lua [rounds [seed]]
local engine = require "engine"
local draws = require "spec.fuzz.draws"
local files = require "engine.base.file"

local rounds, seed = tonumber(arg[1]) or 1500, tonumber(arg[2]) or 1
local draw = draws.draw
draws.start(seed)
engine.seed(seed)

local folder = os.tmpname()
os.remove(folder)
if io.open("/dev/shm") then folder = folder:gsub("^.*/", "/dev/shm/") end

local KINDS = {
  { model_type = "gpt2", n_embd = 8, n_head = 2, n_layer = 1, vocab_size = 9, n_positions = 8 },
  { model_type = "llama", rope_scaling = { rope_type = "llama3", factor = 8, low_freq_factor = 1,
    high_freq_factor = 4, original_max_position_embeddings = 16 } },
  { model_type = "llama", num_labels = 3, pad_token_id = 0, rope_scaling = { rope_type = "yarn",
    factor = 4, beta_fast = 8, beta_slow = 2, mscale = 1, mscale_all_dim = 0.5,
    attention_factor = 1.1, truncate = false, original_max_position_embeddings = 16 } },
  { model_type = "mistral", rope_scaling = { rope_type = "dynamic", factor = 4 } },
  { model_type = "mixtral", num_local_experts = 2 },
  { model_type = "qwen3", head_dim = 4, use_sliding_window = true, sliding_window = 2,
    max_window_layers = 0, layer_types = { "sliding_attention" } },
  { model_type = "bert" },
}
for i, fields in ipairs(KINDS) do
  if i > 1 then
    for key, value in pairs { vocab_size = 9, hidden_size = 8, num_attention_heads = 2,
      intermediate_size = 8, num_hidden_layers = 1, max_position_embeddings = 8 } do
      fields[key] = value
    end
    if i < #KINDS then fields.num_key_value_heads = 2 end
  end
  engine.new_model(fields):save(folder .. i, { shard_bytes = i % 2 == 0 and 700 or nil })
end

local WORDS = { "null", "-1", "0", "1e308", "1e999", "0.5", "2147483648", "true", "{}", "[]", '""',
  '"yarn"', ("["):rep(2000), "\255", "\0", "16384", "9007199254740993" }

-- Replaces a value of the JSON text, or bytes of any text.
local function mutate(name, text)
  for _ = 1, 1 + draw(2) do
    if name:find("%.json$") and draw(3) > 0 then
      local values = select(2, text:gsub('":', ""))
      local wanted, k = draw(math.max(values, 1)) + 1, 0
      text = text:gsub('":%s*("?[^,"{}%[%]]*"?)', function()
        k = k + 1
        if k == wanted then return '":' .. WORDS[draw(#WORDS) + 1] end
      end)
    else
      local at = draw(#text + 1)
      local kind = draw(3)
      text = kind == 0 and text:sub(1, at)
        or kind == 1 and text:sub(1, at) .. string.char(draw(256)) .. text:sub(at + 2)
        or text:sub(1, at) .. text:sub(at + 2 + draw(9))
    end
  end
  return text
end

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

local loaded = 0
for round = 1, rounds do
  local source = folder .. draw(#KINDS) + 1
  local names = files.names(source)
  local name = names[draw(#names) + 1]
  local path, before = source .. "/" .. name, read(source .. "/" .. name)
  files.write(path, mutate(name, before))
  if draw(20) == 0 then os.remove(path) end
  local good, result = pcall(engine.load_model, source,
    { dtype = ({ "f32", "bf16", "auto" })[draw(3) + 1] })
  if good then
    loaded = loaded + 1
    local ran, problem = pcall(engine.scope, function()
      return result:eval()(engine.tensor({ { 1, 2, 3 } }, "i32"))
    end)
    -- The weights' shapes rule out a smaller vocabulary or context, so the model must run, or fail
    -- with one line.
    assert(ran or not tostring(problem):find("\n"), problem)
    for _, p in ipairs(result:parameters()) do p.tensor:free() end
  elseif type(result) ~= "string" or result:find("\n") or #result > 600
    or result:find("attempt to", 1, true) or result:find("bad argument", 1, true)
    or result:find("hf_%w+%.lua:") then
    error(("round %d, %s: %s"):format(round, path, tostring(result)), 0)
  end
  files.write(path, before)
end
for i = 1, #KINDS do files.remove(folder .. i) end
print(("models: %d rounds, seed %d, %d loaded"):format(rounds, seed, loaded))
