-- Reads config.json of Hugging Face's transformers: translates its fields to the options of a model
-- in models.lua. Every error is one line that names the file and the field. Called by hf_load.lua,
-- lora.lua (for the JSON of an adapter) and cli/plan_model.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local files = require "engine.base.file"
local json = require "engine.base.json"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local architectures = require "engine.nn.architectures"

local M = {}

local GELU = { gelu_new = "tanh", gelu_pytorch_tanh = "tanh", gelu_fast = "tanh",
  gelu_accurate = "tanh", gelu = "erf", gelu_python = "erf" }
local NULL, value_text = require("cjson").null, M_ffi.value_text

local function fail(where, ...) error(where .. ": " .. string.format(...), 0) end
local function fail_if(bad, where, ...) if bad then fail(where, ...) end end

local function text_of(value)
  return type(value) == "table" and "a table" or show.shown(tostring(value))
end

-- Returns a value as text, for the "got ..." of a message.
local function got(value) return show.shown(value_text(value)) end

-- Returns a field's value, or `default` if the field is absent or null.
local function value_of(fields, key, default)
  local value = fields[key]
  if value == nil or value == NULL then return default end
  return value
end

-- Returns the field `key`, a number in `range` (see architectures.lua; by default above 0). If the
-- field is missing, returns nil or, if it is `required`, raises an error.
local function number(fields, key, where, required, range)
  local value = value_of(fields, key)
  if value == nil and not required then return nil end
  range = range or architectures.positive
  fail_if(type(value) ~= "number" or not range[2](value), where, "expected %s %s, got %s", key,
    range[1], got(value))
  return value
end

local MOST_LABELS = 2 ^ 16

local function want_labels(n, where)
  fail_if(type(n) ~= "number" or n % 1 ~= 0 or n < 1 or n > MOST_LABELS, where,
    "expected from 1 to %d labels, got %s", MOST_LABELS, got(n))
end

-- ------------------------------------------------------------------ scaled rotary positions

-- SCALINGS has a function for each type of scaling. The function adds fields to the table `rope`,
-- which becomes nn.attention's option `rope` and already has the fields base and factor. p:
-- rope_scaling; o: the model's options; where: the prefix of error messages; context: the context
-- length in tokens before scaling. The formulas are those of transformers' modeling_rope_utils.py.
local SCALINGS, ORIGINAL = {}, "original_max_position_embeddings"

function SCALINGS.linear() end

function SCALINGS.llama3(rope, p, _, where, context)
  rope.low = number(p, "low_freq_factor", where, true)
  rope.high = number(p, "high_freq_factor", where, true)
  rope.context = context
  fail_if(rope.low >= rope.high, where,
    "expected low_freq_factor < high_freq_factor, got %g and %g", rope.low, rope.high)
end

-- For sequences longer than max_position_embeddings, the base grows with their length. A sequence
-- may be up to `factor` times max_position_embeddings long.
function SCALINGS.dynamic(rope, _, o, where)
  fail_if((o.head_width or o.width / o.heads) == 2, where,
    "rope type 'dynamic' is not supported with a head width of 2")
  rope.dynamic = o.context
  o.context = math.floor(o.context * math.max(rope.factor, 1))
end

-- Returns the attention factor of YaRN, 1 + 0.1 weight log(factor), or 1 if the factor is at most
-- 1. If config.json has mscale and mscale_all_dim, transformers uses the ratio of two such factors,
-- with these two numbers as weights.
local function yarn_attention(factor, weight)
  return factor > 1 and 0.1 * weight * math.log(factor) + 1 or 1
end

-- Pairs of features that turn beta_fast times or more within the context keep their frequency. The
-- frequency of pairs that turn beta_slow times or fewer is divided by factor. The frequencies of
-- pairs in between are interpolated.
function SCALINGS.yarn(rope, p, o, where, context)
  local D = o.head_width or o.width / o.heads
  local function pair(turns)             -- the index (from 0) of the pair that turns `turns` times
    return D * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
  end
  local fast, slow = number(p, "beta_fast", where) or 32, number(p, "beta_slow", where) or 1
  if fast < slow then fail(where, "expected beta_fast >= beta_slow, got %g and %g", fast, slow) end
  local truncate = value_of(p, "truncate", true)
  fail_if(type(truncate) ~= "boolean", where, "expected truncate to be a boolean, got %s",
    got(truncate))
  local low, high = pair(fast), pair(slow)
  if truncate then low, high = math.floor(low), math.ceil(high) end
  low, high = math.max(low, 0), math.min(high, D - 1)
  local function weight(key) return value_of(p, key) ~= 0 and number(p, key, where) end
  local above, below = weight "mscale", weight "mscale_all_dim"
  if not (above and below) then above, below = 1, 0 end
  rope.attention_factor = number(p, "attention_factor", where)
    or yarn_attention(rope.factor, above) / yarn_attention(rope.factor, below)
  -- In two cases, transformers does the opposite of what the comment above this function says: it
  -- divides no frequency if every pair turns less than beta_slow times, and all frequencies if
  -- every pair turns more than beta_fast times.
  if low <= high then rope.low, rope.high = low, low == high and high + 0.001 or high
  elseif high < 0 then rope.factor = nil end
end

-- ------------------------------------------------------------------ rules of several fields

local rules = {}

-- The known fields of rope_scaling and rope_parameters. `finetuned`, in old YaRN models, has no
-- effect.
local ROPE = arguments.set_of(ORIGINAL .. [[ rope_type type rope_theta factor low_freq_factor
  high_freq_factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate
  partial_rotary_factor finetuned]])

local function want_known(p, where)
  for _, key in ipairs(nearest.keys(p)) do
    if not ROPE[key] then
      fail(where, "the field '%s' of rope_parameters or rope_scaling is not supported%s",
        show.shown(key), nearest.choices(key, ROPE, "supported fields"))
    end
  end
end

-- Reads rope_theta and rope_scaling, or rope_parameters, which holds both.
function rules.rope(o, fields, where, arch)
  local p = value_of(fields, "rope_parameters") or value_of(fields, "rope_scaling") or {}
  fail_if(type(p) ~= "table", where,
    "expected rope_parameters or rope_scaling to be an object, got %s", got(p))
  local kind = value_of(p, "rope_type") or value_of(p, "type") or "default"
  local rope = { base = number(p, "rope_theta", where) or number(fields, "rope_theta", where)
    or arch.theta or 10000 }
  if kind ~= "default" then
    local scaling = SCALINGS[kind] or fail(where, "rope type '%s' is not supported; supported: "
      .. "default dynamic linear llama3 yarn", text_of(kind))
    local context = number(fields, ORIGINAL, where, false, architectures.whole)
      or number(p, ORIGINAL, where, false, architectures.whole) or o.context
    rope.factor = number(p, "factor", where, kind ~= "yarn") or o.context / context
    scaling(rope, p, o, where, context)
  end
  want_known(p, where)
  local part = value_of(p, "partial_rotary_factor") or value_of(fields, "partial_rotary_factor", 1)
  fail_if(part ~= 1, where, "partial_rotary_factor %s is not supported; supported: 1",
    text_of(part))
  o.rope = rope
end

-- Reads a classifier's number of labels: the number of names in id2label, else num_labels, else two
-- as in transformers. Also reads the padding token, which nn.bert does not need.
local function read_labels(o, fields, where, arch)
  local names, pad = value_of(fields, "id2label"), value_of(fields, "pad_token_id")
  fail_if(names ~= nil and type(names) ~= "table", where,
    "expected id2label to be an object, got %s", got(names))
  o.labels = names and #nearest.keys(names) or value_of(fields, "num_labels", 2)
  want_labels(o.labels, where)
  fail_if(pad ~= nil and type(pad) ~= "number", where,
    "expected pad_token_id to be a number, got %s", got(pad))
  if arch.build ~= "bert" then o.pad = pad end
end

function rules.kv_heads(o) o.kv_heads = o.kv_heads or o.heads end
function rules.out_bias(o) o.out_bias = o.bias end
function rules.qk_norm(o) o.qk_norm = o.eps end

-- Reads Qwen's sliding windows. They apply to the layers that are "sliding_attention" in
-- layer_types or, without this list, to the layers from max_window_layers on (counted from 0).
function rules.windows(o, fields, where)
  if value_of(fields, "use_sliding_window") ~= true then return end
  local window = number(fields, "sliding_window", where) or 4096
  local types = value_of(fields, "layer_types")
  local first = value_of(fields, "max_window_layers", 28)
  fail_if(type(first) ~= "number", where, "expected max_window_layers to be a number, got %s",
    got(first))
  o.window = {}
  for i = 1, o.layers do
    local kind = type(types) == "table" and types[i]
    fail_if(kind and kind ~= "sliding_attention" and kind ~= "full_attention", where,
      "layer type '%s' is not supported; supported: full_attention sliding_attention",
      text_of(kind))
    local slides = kind == "sliding_attention" or not kind and i > first
    o.window[i] = slides and window or false
  end
end

-- ------------------------------------------------------------------ from fields to options

local function read_field(fields, key, field, where)
  local default, option, range = unpack(field, 1, 3)
  if option == "window" and fields[key] == NULL then return nil end   -- null: no window
  local value = value_of(fields, key, default)
  if not option then
    fail_if(value ~= default, where, "%s %s is not supported; supported: %s", key,
      text_of(value), text_of(default))
    return nil
  end
  local kind = range and "number" or type(default)
  if value == default and not value then return nil, option end
  fail_if(type(value) ~= kind, where, "expected %s to be a %s, got %s", key, kind, got(value))
  if range and not range[2](value) then
    fail(where, "expected %s %s, got %s", key, range[1], got(value))
  end
  return value, option
end

--- Returns two values: the architecture that a config.json with these fields describes, and the
--- model's options. `where` is the prefix of error messages.
function M.options_of(fields, where)
  local kind = value_of(fields, "model_type")
  local arch = architectures.of[kind] or fail(where, "%s%s",
    kind and ("model_type '%s' is not supported"):format(text_of(kind))
      or "expected a model_type, got nothing",
    nearest.choices(text_of(kind), architectures.of, "supported"))
  local classifier, default = arch.classes[#arch.classes], arch.classes[1]
  if value_of(fields, "num_labels") then default = classifier end
  local class = value_of(fields, "architectures", { default })
  class = type(class) == "table" and class[1] or class
  local known = false
  for _, name in ipairs(arch.classes) do known = known or name == class end
  fail_if(not known, where, "architecture %s is not supported; supported: %s", text_of(class),
    table.concat(arch.classes, " "))
  for _, key in ipairs(architectures.unsupported) do
    fail_if(value_of(fields, key) ~= nil, where,
      "%s is not supported; hint: use the model without quantization", key)
  end
  local o = arguments.merged(arch.options)
  for _, key in ipairs(nearest.keys(arch.fields)) do
    local value, option = read_field(fields, key, arch.fields[key], where)
    if value ~= nil then o[option] = value end
  end
  for _, rule in ipairs(arch.rules) do rules[rule](o, fields, where, arch) end
  if class == classifier then read_labels(o, fields, where, arch) end
  if o.gelu then
    o.gelu = GELU[o.gelu] or fail(where, "activation '%s' is not supported; supported: gelu "
      .. "gelu_accurate gelu_fast gelu_new gelu_python gelu_pytorch_tanh", text_of(o.gelu))
  end
  fail_if(not o.head_width and o.width % o.heads ~= 0, where,
    "the width %d is not divisible by %d heads", o.width, o.heads)
  fail_if(o.kv_heads and o.heads % o.kv_heads ~= 0, where,
    "%d heads are not divisible by %d num_key_value_heads", o.heads, o.kv_heads)
  local D = o.head_width or o.width / o.heads
  fail_if(o.rope and D % 2 ~= 0, where,
    "expected an even head width, which rotary positions need, got %g", D)
  fail_if(o.experts and o.top_k > o.experts, where, "expected num_experts_per_tok to be at most " ..
    "%d, the number of experts, got %d", o.experts, o.top_k)
  fail_if(o.layers * (o.experts or 1) > 2 ^ 17, where, "expected up to 2^17 experts in all " ..
    "layers together, got %d layers of %d experts", o.layers, o.experts)
  return arch, o
end

local REPLACED = { num_labels = true, torch_dtype = true }    -- replaced by id2label and dtype

--- Returns the fields of a config.json for a classifier with n labels. They are made from `fields`,
--- which may describe any class of the same model_type. pad: the id of the padding token; by
--- default the id in `fields`.
function M.classifier(fields, n, pad, where)
  want_labels(n, where)
  local arch, all = architectures.of[value_of(fields, "model_type")], { id2label = {},
    label2id = {} }
  for key, value in pairs(fields) do
    -- an empty object and an empty list are the same in Lua, so such fields are left out;
    -- transformers then uses its defaults
    local empty = type(value) == "table" and next(value) == nil
    if all[key] == nil and not REPLACED[key] and not empty then all[key] = value end
  end
  for i = 0, n - 1 do
    all.id2label[tostring(i)], all.label2id["LABEL_" .. i] = "LABEL_" .. i, i
  end
  all.architectures = arch and { arch.classes[#arch.classes] }
  if pad then all.pad_token_id = pad end
  return all
end

-- Fields that new_model accepts in addition to those of an architecture.
local MORE = arguments.set_of [[model_type rope_theta rope_scaling rope_parameters
  use_sliding_window sliding_window max_window_layers layer_types pad_token_id initializer_range
  num_labels id2label label2id]]

--- Returns the fields of a new config.json: `fields`, and transformers' defaults for the fields
--- that it lacks.
function M.complete(fields)
  local where = "engine.new_model"
  local arch, options = M.options_of(fields, where)
  if options.labels and value_of(fields, "id2label") == nil then
    fields = M.classifier(fields, options.labels, nil, where)
  end
  local all = { architectures = { arch.classes[1] }, dtype = "float32", bos_token_id = NULL,
    eos_token_id = NULL }
  local known = arguments.merged(MORE, arch.fields)
  for key, field in pairs(arch.fields) do
    if field[2] and (field[1] or not field[3]) then all[key] = field[1] end
  end
  for key, value in pairs(fields) do
    if not known[key] and all[key] == nil then
      fail(where, "unknown field '%s'%s", tostring(key), nearest.hint(tostring(key), known))
    end
    all[key] = value
  end
  return all
end

--- Returns the ids of the tokens that end a generated sequence, from generation_config.json or else
--- from config.json: a number, a list or nil.
function M.eos(folder, fields)
  local text = files.read(folder .. "/generation_config.json")
  local more = text and require("cjson.safe").decode(text)
  local eos = type(more) == "table" and value_of(more, "eos_token_id")
  return eos or value_of(fields, "eos_token_id")
end

--- Reads folder/NAME.json, a JSON object (by default config.json). Returns its fields, its text and
--- its path. beside: the file that the folder should also hold, for the error message (by default
--- model.safetensors).
function M.read(folder, name, beside)
  name, beside = name or "config", beside or "model.safetensors"
  local path = ("%s/%s.json"):format(folder, name)
  local text, problem = files.read(path)
  M_ffi.fail_if(not text, "cannot read %s; hint: expected a folder with %s.json and %s, such as " ..
    "a download from Hugging Face", problem, name, beside)
  if not json.is_utf8(text) then fail(path, "the file is not UTF-8") end
  local fields, why = require("cjson.safe").decode(text)
  if why then fail(path, "the file is not JSON: %s", why) end
  fail_if(type(fields) ~= "table", path, "expected a JSON object, got %s", got(fields))
  return fields, text, path
end

return M
