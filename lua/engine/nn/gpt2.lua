-- Reads and writes GPT-2 in Hugging Face's files, config.json and model.safetensors, under Hugging
-- Face's names. Models trained here load there, and the other way round. `engine.nn.gpt2`:
--   local model = nn.gpt2.load("gpt2")                  a folder with both files
--   local model = nn.gpt2 { vocab_size = 50257, n_embd = 768, n_layer = 12, n_head = 12 }
--   model:save("out")                                   the same two files
-- The model is an nn.gpt; this file maps names. Hugging Face stores the weights of its Conv1D as
-- [in x out], so they are transposed on reading and writing.
local M_ffi = require "engine.base.ffi"
local files = require "engine.base.file"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local safetensors = require "engine.tensor.safetensors"
local tensor = require "engine.tensor.tensor"
local module = require "engine.nn.module"
local models = require "engine.nn.models"

local C, check = M_ffi.C, M_ffi.check

-- ------------------------------------------------------------------ config.json

local function is_whole(x) return x >= 1 and x % 1 == 0 and x < 2 ^ 31 end
local whole = { "a whole number of 1 or more", is_whole }
local probability = { "in [0, 1)", function(x) return x >= 0 and x < 1 end }
local positive = { "above 0", function(x) return x > 0 end }

-- The fields that shape the model: Hugging Face's default, the option of nn.gpt (nil: only the
-- default is supported), the range. Other fields are kept and written back.
local FIELDS = {
  vocab_size = { 50257, "vocab", whole }, n_positions = { 1024, "context", whole },
  n_embd = { 768, "width", whole }, n_layer = { 12, "layers", whole },
  n_head = { 12, "heads", whole }, n_inner = { false, "hidden", whole },
  layer_norm_epsilon = { 1e-5, "eps", positive }, resid_pdrop = { 0.1, "dropout", probability },
  embd_pdrop = { 0.1, "embedding_dropout", probability },
  attn_pdrop = { 0.1, "attention_dropout", probability },
  activation_function = { "gelu_new", "gelu" }, tie_word_embeddings = { true, "tied" },
  scale_attn_weights = { true }, scale_attn_by_inverse_layer_idx = { false },
  add_cross_attention = { false },
}
local GELU = { gelu_new = "tanh", gelu_pytorch_tanh = "tanh", gelu_fast = "tanh",
  gelu_accurate = "tanh", gelu = "erf", gelu_python = "erf" }

local function fail(...) error("gpt2: " .. string.format(...), 0) end

-- The options of nn.gpt for the fields of a config.json; `where` names the file in errors.
local function options_of(fields, where)
  local options = {}
  for _, key in ipairs(nearest.keys(FIELDS)) do
    local default, option, range = unpack(FIELDS[key], 1, 3)
    local value = fields[key]
    if value == nil or type(value) == "userdata" then value = default end   -- userdata: JSON's null
    if type(value) ~= type(default) and not (key == "n_inner" and type(value) == "number") then
      fail("%s: expected %s to be a %s, got %s", where, key, type(default), tostring(value))
    end
    if range and value and not range[2](value) then
      fail("%s: expected %s %s%s, got %s", where, key, range == whole and "to be " or "",
        range[1], tostring(value))
    end
    if not option and value ~= default then
      fail("%s: unscaled, layer-scaled and cross attention are not supported", where)
    end
    if option then options[option] = value end
  end
  if options.width % options.heads ~= 0 then
    fail("%s: the width n_embd %d is not divisible by %d heads", where, options.width,
      options.heads)
  end
  local gelu = options.gelu
  options.gelu = GELU[gelu]
    or fail("%s: expected activation_function gelu_new or gelu, got '%s'", where, gelu)
  return options
end

-- ------------------------------------------------------------------ the model

--- nn.gpt2 { vocab_size, n_positions, n_embd, n_layer, n_head, ... }: a new model from the fields
--- of a config.json: ids [B x T] -> logits [B x T x V]. Methods: loss, generate, save.
local GPT2 = module.class("gpt2")

local GPT = models.gpt

-- A new model stores its fields. A loaded one stores its source: { shape = options of nn.gpt, text
-- = the text of its config.json, prefix = of the names in its file, head = whether the file has a
-- head }.
function GPT2:init(fields, source)
  rawset(self, "source", source)
  if source then return GPT.init(self, source.shape) end
  local known = {}
  for name, field in pairs(FIELDS) do known[name] = field[1] end
  for key, value in pairs(fields or {}) do
    if FIELDS[key] == nil then
      local hint = nearest.hint(tostring(key), FIELDS)
      error(("nn.gpt2: unknown field '%s'%s"):format(tostring(key), hint), 3)
    end
    known[key] = value
  end
  local good, options = pcall(options_of, known, "the fields")
  if not good then error(options, 3) end
  rawset(self, "fields", known)
  GPT.init(self, options)
end
for _, name in ipairs { "forward", "loss", "generate", "extra" } do GPT2[name] = GPT[name] end

-- The engine's parameter name -> Hugging Face's, and whether the parameter is a Conv1D weight.
-- Block numbers count from 0 there.
local BLOCK = {
  ["norm1.weight"] = { "ln_1.weight" }, ["norm1.bias"] = { "ln_1.bias" },
  ["attn.qkv.weight"] = { "attn.c_attn.weight", true }, ["attn.qkv.bias"] = { "attn.c_attn.bias" },
  ["attn.out.weight"] = { "attn.c_proj.weight", true }, ["attn.out.bias"] = { "attn.c_proj.bias" },
  ["norm2.weight"] = { "ln_2.weight" }, ["norm2.bias"] = { "ln_2.bias" },
  ["mlp.up.weight"] = { "mlp.c_fc.weight", true }, ["mlp.up.bias"] = { "mlp.c_fc.bias" },
  ["mlp.down.weight"] = { "mlp.c_proj.weight", true }, ["mlp.down.bias"] = { "mlp.c_proj.bias" },
}
local OUTER = { ["wte.weight"] = "wte.weight", ["wpe.weight"] = "wpe.weight",
  ["norm.weight"] = "ln_f.weight", ["norm.bias"] = "ln_f.bias" }
local HEAD = "lm_head.weight"

-- Every parameter as { name = its name in the file, tensor =, transposed = }.
local function entries(model, prefix)
  local list = {}
  for i, p in ipairs(model:parameters()) do
    local block, rest = p.name:match("^blocks%.(%d+)%.(.+)$")
    local known = block and BLOCK[rest]
    local name = p.name == "head.weight" and HEAD or prefix .. (OUTER[p.name] or "")
    if known then name = ("%sh.%d.%s"):format(prefix, block - 1, known[1]) end
    list[i] = { tensor = p.tensor, transposed = known and known[2] or false, name = name }
  end
  return list
end

-- Entries of a file that are not parameters of the model: causal masks, and a head that is tied to
-- the embedding.
local function is_ignored(name, tied)
  return name:find("%.attn%.bias$") or name:find("%.attn%.masked_bias$") or tied and name == HEAD
end

-- ------------------------------------------------------------------ loading

-- Copies the file's weights into the model. Unknown names and missing weights are errors.
local function fill(model, file, prefix)
  local tied, wanted = model.config.tied, {}
  for _, e in ipairs(entries(model, prefix)) do
    local name = e.name
    if tied and name == prefix .. "wte.weight" and not file.entries[name] then name = HEAD end
    local found = file.entries[name] or fail("%s has no tensor '%s'", file.path, e.name)
    local expected = e.tensor.shape
    if e.transposed then expected = { expected[2], expected[1] } end
    local expected_text, found_text = tensor.shape_text(expected), tensor.shape_text(found.shape)
    if found_text ~= expected_text then
      fail("%s: expected '%s' to have shape %s (from config.json), got %s", file.path, name,
        expected_text, found_text)
    end
    if not ("f32 f16 bf16 f64"):find(found.dtype, 1, true) then
      fail("%s: '%s' holds %s, not floats", file.path, name, found.dtype)
    end
    wanted[name] = e
  end
  for _, name in ipairs(file.names) do
    if not wanted[name] and not is_ignored(name, tied) then
      fail("%s: '%s' does not belong to this GPT-2", file.path, name)
    end
  end
  require("engine").scope(function()
    for _, name in ipairs(file.names) do
      local e = wanted[name]
      if e then
        local source = file:read(name)
        check(C.eng_copy(e.tensor, e.transposed and source:transpose() or source))
        source:free()
      end
    end
  end)
end

local function load(dir, options)
  local path = dir .. "/config.json"
  local text, problem = files.read(path)
  if not text then
    fail("cannot read %s; hint: expected a folder with config.json and model.safetensors", problem)
  end
  local fields, why = require("cjson.safe").decode(text)
  if type(fields) ~= "table" then
    fail("%s is not a JSON object: %s", path, tostring(why or type(fields)))
  end
  if fields.model_type ~= nil and fields.model_type ~= "gpt2" then
    fail("%s: expected model_type gpt2, got '%s'", path, tostring(fields.model_type))
  end
  local shape = options_of(fields, path)
  local drop = options.dropout
  if drop then
    shape.dropout, shape.embedding_dropout, shape.attention_dropout = drop, drop, drop
  end

  local weights = dir .. "/model.safetensors"
  if not files.exists(weights) then
    fail("%s is missing; hint: %s", weights, files.exists(weights .. ".index.json")
      and "the weights are in shards, save them as one file" or "save_pretrained writes it")
  end
  local file = safetensors.open(weights)
  local prefix = file.entries["transformer.wpe.weight"] and "transformer." or ""
  local head = file.entries[HEAD] ~= nil
  local model = GPT2(nil, { shape = shape, text = text, prefix = prefix, head = head })
  local good, message = pcall(fill, model, file, prefix)
  file:close()
  if not good then
    for _, p in ipairs(model:parameters()) do p.tensor:free() end
    error(message, 0)
  end
  return model
end

--- nn.gpt2.load(folder [, { dropout = p }]): a model with the weights of Hugging Face's files,
--- which may be f32, f16, bf16 or f64. `dropout` replaces the three probabilities of config.json.
--- Raises an error that names the file if a field, a name, a shape or a dtype does not fit.
function GPT2.load(dir, options)
  if type(dir) ~= "string" then error("gpt2.load: expected a folder, got " .. type(dir), 2) end
  local good, result = pcall(load, dir:gsub("(.)/+$", "%1"), options or {})
  if not good then error(result, 2) end
  return result
end

-- ------------------------------------------------------------------ saving

-- The text of config.json. A loaded model keeps the text it was loaded with, except for the dtype,
-- which is f32 now.
local function config_text(model)
  if model.source then
    local text = model.source.text:gsub('("torch_dtype"%s*:%s*)"[^"]*"', '%1"float32"')
    return (text:gsub('("dtype"%s*:%s*)"[^"]*"', '%1"float32"'))
  end
  local f = model.fields
  local number = show.json_number
  local list = { '"architectures": ["GPT2LMHeadModel"]', '"model_type": "gpt2"',
    '"dtype": "float32"' }
  for _, key in ipairs { "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner",
    "layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop" } do
    list[#list + 1] = ('"%s": %s'):format(key, number(f[key] or nil))   -- n_inner may be false
  end
  list[#list + 1] = ('"activation_function": "%s"'):format(f.activation_function)
  list[#list + 1] = ('"tie_word_embeddings": %s'):format(tostring(f.tie_word_embeddings))
-- transformers' default is token 50256 of GPT-2's vocabulary, which is an error with a smaller one.
  local last = f.vocab_size - 1
  list[#list + 1] = ('"bos_token_id": %d,\n  "eos_token_id": %d'):format(last, last)
  return "{\n  " .. table.concat(list, ",\n  ") .. "\n}\n"
end

local function save(model, dir)
  check(C.eng_file_mkdir(dir), true)
  local source = model.source or { prefix = "transformer." }
  require("engine").scope(function()
    local tensors = {}
    for _, e in ipairs(entries(model, source.prefix)) do
      tensors[e.name] = e.transposed and e.tensor:transpose() or e.tensor
    end
    if source.head and model.config.tied then tensors[HEAD] = model.wte.weight end
    safetensors.save(dir .. "/model.safetensors", tensors, { format = "pt" })
  end)
  local text = config_text(model)
  check(C.eng_file_write(dir .. "/config.json", text, #text), true)
end

--- model:save(folder): writes config.json and model.safetensors in f32, for this engine and for
--- Hugging Face's transformers.
function GPT2:save(dir)
  if type(dir) ~= "string" or dir == "" then
    error("gpt2.save: expected a folder, got " .. tostring(dir), 2)
  end
  local good, message = pcall(save, self, dir)
  if not good then error(message, 2) end
end

return GPT2
