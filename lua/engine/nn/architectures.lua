-- The architectures of Hugging Face's transformers that this engine loads: for each model_type the
-- fields of its config.json and the names of its weights. The functions at the end return the names
-- that a model's parameters and layers have in files.
-- Read by hf_config.lua, hf_load.lua, hf_save.lua and lora.lua; nothing else depends on an
-- architecture.
--
--   classes    the supported entries of config.json's list `architectures`: the default first, the
--              classifier last
--   build      the name of the model in models.lua
--   prefix     what files put in front of a name in `names` that begins with a dot: ".wte" becomes
--              "transformer.wte". Files of base models have "wte", without the prefix and the dot
--   fields     field = { default, option, range }: transformers' default (false also stands for
--              null), the option of the model that the field sets (nil: only the default is
--              supported) and, for numbers, the range: { its description, a test }. Fields that are
--              not listed do not shape the model, except those that a rule reads
--   rules      names of functions of hf_config.lua that read several fields together
--   theta      transformers' default of rope_theta, if it is not 10000
--   options    further options of the model
--   names      the engine's module or parameter -> its name in files; %d stands for an index, which
--              counts from 0 in files. If there are several names, their tensors are joined by
--              rows. A final T means that files store the weight transposed
--   old        endings of names in old files -> their present form
--   ignored    patterns of names that a file may have and the model does not need
local function is_whole(x) return x >= 1 and x % 1 == 0 and x < 2 ^ 31 end
local whole = { "to be a whole number from 1 to 2^31 - 1", is_whole }
local count = { "to be a whole number from 1 to 16384",
  function(x) return is_whole(x) and x <= 16384 end }
local probability = { "in [0, 1)", function(x) return x >= 0 and x < 1 end }
local positive = { "to be a finite number above 0", function(x) return x > 0 and x < math.huge end }

local M = { whole = whole, positive = positive }   -- ranges that hf_config.lua uses, too

--- Fields that no architecture supports; they must be absent or null.
M.unsupported = { "quantization_config", "compression_config" }

local fail_if = require("engine.base.ffi").fail_if
local with = require("engine.base.arguments").merged

local GPT2 = {
  classes = { "GPT2LMHeadModel", "GPT2Model", "GPT2ForSequenceClassification" },
  build = "gpt", prefix = "transformer",
  fields = {
    vocab_size = { 50257, "vocab", whole }, n_positions = { 1024, "context", whole },
    n_embd = { 768, "width", whole }, n_layer = { 12, "layers", count },
    n_head = { 12, "heads", whole }, n_inner = { false, "hidden", whole },
    layer_norm_epsilon = { 1e-5, "eps", positive }, resid_pdrop = { 0.1, "dropout", probability },
    embd_pdrop = { 0.1, "embedding_dropout", probability },
    attn_pdrop = { 0.1, "attention_dropout", probability },
    activation_function = { "gelu_new", "gelu" }, tie_word_embeddings = { true, "tied" },
    scale_attn_weights = { true }, scale_attn_by_inverse_layer_idx = { false },
    add_cross_attention = { false },
  },
  rules = {}, options = {}, old = {}, ignored = { "%.attn%.bias$", "%.attn%.masked_bias$" },
  names = {
    wte = ".wte", wpe = ".wpe", norm = ".ln_f", head = "lm_head", score = "score",
    ["blocks.%d.norm1"] = ".h.%d.ln_1", ["blocks.%d.norm2"] = ".h.%d.ln_2",
    ["blocks.%d.attn.qkv"] = ".h.%d.attn.c_attn T", ["blocks.%d.attn.out"] = ".h.%d.attn.c_proj T",
    ["blocks.%d.mlp.up"] = ".h.%d.mlp.c_fc T", ["blocks.%d.mlp.down"] = ".h.%d.mlp.c_proj T",
  },
}

local LLAMA = {
  classes = { "LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification" },
  build = "llama", prefix = "model",
  fields = {
    vocab_size = { 32000, "vocab", whole }, hidden_size = { 4096, "width", whole },
    intermediate_size = { 11008, "hidden", whole }, num_hidden_layers = { 32, "layers", count },
    num_attention_heads = { 32, "heads", whole },
    num_key_value_heads = { false, "kv_heads", whole }, head_dim = { false, "head_width", whole },
    max_position_embeddings = { 2048, "context", whole }, rms_norm_eps = { 1e-6, "eps", positive },
    tie_word_embeddings = { false, "tied" }, attention_dropout = { 0, "attention_dropout",
      probability },
    hidden_act = { "silu" }, attention_bias = { false, "bias" }, mlp_bias = { false, "mlp_bias" },
  },
  rules = { "rope", "kv_heads", "out_bias" }, options = {}, old = {},
  ignored = { "%.rotary_emb%.inv_freq$" },
  names = {
    embed = ".embed_tokens", norm = ".norm", head = "lm_head", score = "score",
    ["blocks.%d.norm1"] = ".layers.%d.input_layernorm",
    ["blocks.%d.attn.qkv"] = ".layers.%d.self_attn.q_proj .layers.%d.self_attn.k_proj "
      .. ".layers.%d.self_attn.v_proj",
    ["blocks.%d.attn.q_norm"] = ".layers.%d.self_attn.q_norm",
    ["blocks.%d.attn.k_norm"] = ".layers.%d.self_attn.k_norm",
    ["blocks.%d.attn.out"] = ".layers.%d.self_attn.o_proj",
    ["blocks.%d.norm2"] = ".layers.%d.post_attention_layernorm",
    ["blocks.%d.mlp.gate"] = ".layers.%d.mlp.gate_proj",
    ["blocks.%d.mlp.up"] = ".layers.%d.mlp.up_proj",
    ["blocks.%d.mlp.down"] = ".layers.%d.mlp.down_proj",
  },
}

local NO_BIAS = { attention_bias = { false }, mlp_bias = { false } }

local MISTRAL = with(LLAMA, {
  classes = { "MistralForCausalLM", "MistralModel", "MistralForSequenceClassification" },
  fields = with(with(LLAMA.fields, NO_BIAS), {
    intermediate_size = { 14336, "hidden", whole }, num_key_value_heads = { 8, "kv_heads", whole },
    max_position_embeddings = { 131072, "context", whole },
    sliding_window = { 4096, "window", whole } }),
  rules = { "rope", "kv_heads" },
})

local MIXTRAL = with(MISTRAL, {
  classes = { "MixtralForCausalLM", "MixtralModel", "MixtralForSequenceClassification" },
  fields = with(MISTRAL.fields, {
    rms_norm_eps = { 1e-5, "eps", positive }, sliding_window = { false, "window", whole },
    num_local_experts = { 8, "experts", count }, num_experts_per_tok = { 2, "top_k", count },
    router_jitter_noise = { 0 }, output_router_logits = { false } }),
  theta = 1e6,
  names = with(LLAMA.names, {
    ["blocks.%d.mlp.gate"] = ".layers.%d.block_sparse_moe.gate",
    ["blocks.%d.mlp.experts.%d.gate"] = ".layers.%d.block_sparse_moe.experts.%d.w1",
    ["blocks.%d.mlp.experts.%d.up"] = ".layers.%d.block_sparse_moe.experts.%d.w3",
    ["blocks.%d.mlp.experts.%d.down"] = ".layers.%d.block_sparse_moe.experts.%d.w2" }),
})

local QWEN2 = with(LLAMA, {
  classes = { "Qwen2ForCausalLM", "Qwen2Model", "Qwen2ForSequenceClassification" },
  fields = with(with(LLAMA.fields, NO_BIAS), {
    vocab_size = { 151936, "vocab", whole }, intermediate_size = { 22016, "hidden", whole },
    num_key_value_heads = { 32, "kv_heads", whole },
    max_position_embeddings = { 32768, "context", whole } }),
  rules = { "rope", "kv_heads", "windows" }, options = { bias = true },
})
QWEN2.fields.attention_bias = nil   -- q, k and v always have biases

local QWEN3 = with(QWEN2, {
  classes = { "Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification" },
  fields = with(QWEN2.fields, {
    head_dim = { 128, "head_width", whole }, attention_bias = { false, "bias" } }),
  rules = { "rope", "kv_heads", "windows", "qk_norm", "out_bias" }, options = {},
})

local BERT = {
  classes = { "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification" },
  build = "bert", prefix = "bert",
  fields = {
    vocab_size = { 30522, "vocab", whole }, hidden_size = { 768, "width", whole },
    num_hidden_layers = { 12, "layers", count }, num_attention_heads = { 12, "heads", whole },
    intermediate_size = { 3072, "hidden", whole }, hidden_act = { "gelu", "gelu" },
    hidden_dropout_prob = { 0.1, "dropout", probability },
    attention_probs_dropout_prob = { 0.1, "attention_dropout", probability },
    classifier_dropout = { false, "classifier_dropout", probability },
    max_position_embeddings = { 512, "context", whole }, type_vocab_size = { 2, "types", whole },
    layer_norm_eps = { 1e-12, "eps", positive }, position_embedding_type = { "absolute" },
    is_decoder = { false }, add_cross_attention = { false }, tie_word_embeddings = { true },
  },
  rules = {}, options = {},
  old = { ["LayerNorm.gamma"] = "LayerNorm.weight", ["LayerNorm.beta"] = "LayerNorm.bias" },
  ignored = { "%.position_ids$", "^bert%.pooler%.", "^cls%.seq_relationship%.",
    "^cls%.predictions%.decoder%." },
  names = {
    wte = ".embeddings.word_embeddings", wpe = ".embeddings.position_embeddings",
    wtt = ".embeddings.token_type_embeddings", norm = ".embeddings.LayerNorm",
    ["blocks.%d.attn.qkv"] = ".encoder.layer.%d.attention.self.query "
      .. ".encoder.layer.%d.attention.self.key .encoder.layer.%d.attention.self.value",
    ["blocks.%d.attn.out"] = ".encoder.layer.%d.attention.output.dense",
    ["blocks.%d.norm1"] = ".encoder.layer.%d.attention.output.LayerNorm",
    ["blocks.%d.mlp.up"] = ".encoder.layer.%d.intermediate.dense",
    ["blocks.%d.mlp.down"] = ".encoder.layer.%d.output.dense",
    ["blocks.%d.norm2"] = ".encoder.layer.%d.output.LayerNorm",
    transform = "cls.predictions.transform.dense",
    transform_norm = "cls.predictions.transform.LayerNorm", head_bias = "cls.predictions.bias",
    pooler = ".pooler.dense", classifier = "classifier",
  },
}

--- The architectures by model_type.
M.of = { gpt2 = GPT2, llama = LLAMA, smollm = LLAMA, mistral = MISTRAL, mixtral = MIXTRAL,
  qwen2 = QWEN2, qwen3 = QWEN3, bert = BERT }

-- Splits a string of an architecture's table `names` at spaces. Returns the list of names, with the
-- ending `leaf` appended to each, and whether files store the weight transposed.
local function split(names, leaf)
  local list, transposed = {}, names:find(" T$") ~= nil
  for word in names:gsub(" T$", ""):gmatch("%S+") do list[#list + 1] = word .. leaf end
  return list, transposed and leaf == ".weight"
end

-- Returns the names of the tensors in a file that form the engine's parameter `name`, in the order
-- of their rows in the parameter, and whether files store these tensors transposed. `prefix`, such
-- as "model." or "", replaces a leading dot.
local function file_names(arch, name, prefix)
  local numbers = {}
  local key = name:gsub("%.(%d+)%f[.]", function(n)
    numbers[#numbers + 1] = n - 1
    return ".%d"
  end)
  local module, leaf = key:match("^(.*)(%.[^.]+)$")
  local names = arch.names[key]
  if names then leaf = "" else names = arch.names[module] end
  fail_if(not names, "the parameter '%s' has no name in Hugging Face's files; hint: engine.save " ..
    "keeps the engine's own names", name)
  local list, transposed = split(names, leaf)
  for i, text in ipairs(list) do list[i] = text:gsub("^%.", prefix):format(unpack(numbers)) end
  return list, transposed
end

-- Divides the rows of a parameter among its parts. Returns a list with the number of rows of each
-- part: three numbers for q, k and v, or { rows } for a single part.
local function rows_of(rows, model, parts)
  if parts == 1 then return { rows } end
  local o = model.config
  local D = o.head_width or o.width / o.heads
  local kv = (o.kv_heads or o.heads) * D
  return { o.heads * D, kv, kv }
end

--- Returns a list with an entry { parameter, transposed, parts = { { name, rows } } } for every
--- parameter of the model. The parts are the tensors of the file that form the parameter when they
--- are joined by rows; `rows` is the number of rows of a part. `prefix`, such as "model.", replaces
--- the leading dot of an architecture's names.
function M.plan(model, arch, prefix)
  local list = {}
  for i, p in ipairs(model:parameters()) do
    local names, transposed = file_names(arch, p.name, prefix)
    local rows, parts = rows_of(p.tensor.shape[1], model, #names), {}
    for k, name in ipairs(names) do parts[k] = { name = name, rows = rows[k] } end
    list[i] = { parameter = p, parts = parts, transposed = transposed }
  end
  return list
end

--- Returns the linear layers in Hugging Face's files that together form the model's layer at
--- `path`, as a list of { full name, number of rows }. Returns nil if the files have no name for
--- the layer. `rows`: the number of outputs of the whole layer.
function M.layer_names(model, arch, path, rows)
  local good, names = pcall(file_names, arch, path .. ".weight", arch.prefix .. ".")
  if not good then return nil end
  local parts, list = rows_of(rows, model, #names), {}
  for k, name in ipairs(names) do list[k] = { name:match("^(.*)%.weight$"), parts[k] } end
  return list
end

return M
