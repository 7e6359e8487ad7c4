-- The models of the examples, put together from transformer.lua:
--   nn.gpt    decoder with learned positions, layer norm and GELU (the shape of GPT-2)
--   nn.llama  decoder with rotary positions, RMS norm, SwiGLU and grouped queries
--   nn.bert   encoder with a head for masked tokens
-- generate.lua samples from the decoders. Every model has the options soft_cap = 0 (with c > 0,
-- logits become c * tanh(logits / c)) and z_loss = 0 (see cross_entropy). Called with
-- { attention_maps = true }, a model also returns the attention weights, a list of [B x H x T x T]
-- f32, one for each block. With { mask = a tensor [B x T] }, tokens are padding where the mask is 0
-- (padding.lua). Called by scripts and hf_load.lua.
-- Shapes: B batch, T time, C width, V vocabulary.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fuse = require "engine.nn.fuse"
local layers = require "engine.nn.layers"
local module = require "engine.nn.module"
local padding = require "engine.nn.padding"
local show = require "engine.base.show"
local tensor = require "engine.tensor.tensor"
local transformer = require "engine.nn.transformer"

local expect, raise, raise_if, want_whole = M_ffi.expect, M_ffi.raise, M_ffi.raise_if,
  arguments.want_whole
local class, positions = module.class, transformer.positions
local Attention, Block = transformer.attention, transformer.block
local generate, moe = require "engine.nn.generate", require("engine.nn.moe").moe
local M = {}

-- ------------------------------------------------------------------ options

local WHOLE = { "vocab", "width", "heads", "layers", "context", "kv_heads", "hidden", "labels" }
local MOST_LAYERS = 16384
local BOOLEANS = { "bias", "out_bias", "mlp_bias", "tied" }
local PROBABILITIES = { "dropout", "embedding_dropout", "attention_dropout", "classifier_dropout" }
-- Defaults of the head's options, the same for every model.
local HEAD = { z_loss = 0, soft_cap = 0, labels = false }

-- Fills in missing options of the model `name` (such as "nn.gpt") from `defaults`, checks the
-- options and stores them as self.config. Also stores the option `context` as self.context.
local function configure(self, name, options, defaults)
  local known = arguments.merged(HEAD, defaults)
  local config = arguments.merged(known, tensor.read_named(options, name, known))
  for _, key in ipairs(WHOLE) do
    if defaults[key] or config[key] then want_whole(config[key], name, key, 1) end
  end
  expect(config.layers <= MOST_LAYERS, config.layers, "%s: expected up to %d layers", name,
    MOST_LAYERS)
  transformer.want_heads(name, config.head_width and config.heads or config.width, config.heads,
    config.kv_heads or config.heads)
  for _, key in ipairs { "z_loss", "soft_cap" } do
    expect(type(config[key]) == "number" and config[key] >= 0 and config[key] <= 1e6, config[key],
      "%s: expected %s to be a number in 0..1e6", name, key)
  end
  for _, key in ipairs(BOOLEANS) do
    expect(config[key] == nil or type(config[key]) == "boolean", config[key],
      "%s: expected %s to be true or false", name, key)
  end
  if config.pad then want_whole(config.pad, name, "pad") end
  for _, key in ipairs(PROBABILITIES) do
    local p = config[key]
    expect(not p or type(p) == "number" and p >= 0 and p < 1, p,
      "%s: expected %s in [0, 1)", name, key)
  end
  self.config, self.context = config, config.context
  return config
end

-- The sizes of a model as text. `more`: text to insert after the number of heads.
local function sizes(self, more)
  local c = self.config
  return ("%s, width %d, %s%s, vocab %d"):format(show.counted(c.layers, "layer"), c.width,
    show.counted(c.heads, "head"), more, c.vocab)
end

-- A list of n modules, each made by make(i).
local function repeated(n, make)
  local list = {}
  for i = 1, n do list[i] = make(i) end
  return layers.list(list)
end

-- ------------------------------------------------------------------ parts of models

-- The options of model(ids, options). Only loss() below sets `uncapped`, which leaves out soft_cap.
local FORWARD = { attention_maps = true, mask = true, uncapped = true }
-- The options of model:loss(ids, targets, options).
local LOSS = "attention_maps mask label_smoothing ignore_index reduction z_loss soft_cap"

-- model:loss(x, y [, options]): the mean cross entropy of the model's predictions for ids x [B x T]
-- against the ids y [B x T], or of a classifier's predictions against the labels y [B]. A target of
-- -100 does not count, nor does an id at padding. The second result is the attention maps, if
-- they are requested. Options: attention_maps, mask, and those of cross_entropy. z_loss and
-- soft_cap are by default those of the model.
local function loss(self, x, y, options)
  local own, forward = { z_loss = self.config.z_loss, soft_cap = self.config.soft_cap }, {}
  expect(tensor.is_tensor(y), y, "%s: expected targets, a tensor of ids", self._class)
  for key, value in pairs(tensor.read_named(options, self._class, LOSS)) do
    (FORWARD[key] and forward or own)[key] = value
  end
  forward.uncapped = self.config.soft_cap ~= 0 or nil        -- cross_entropy applies own.soft_cap
  raise_if(self.config.labels == 1, "%s: a model with one label predicts a number; hint: " ..
    "engine.mse(model(x):view(-1), y)", self._class)
  local predicted, maps = self(x, forward)
  if forward.mask and not self.config.labels then
    y = forward.mask:ne(0):where(y, own.ignore_index or -100)
  end
  return fuse.last_use(tensor.cross_entropy, predicted, nil, y, own), maps
end

-- Returns the sum of the embeddings of ids [B x T], of their positions and, if the model has types,
-- of `types` (0 unless given) -> [B x T x C]. Positions begin at 0, or after the tokens in the
-- cache; spans (padding.lua) may give other positions.
local function embed(self, ids, types)
  local T, first, spans = ids:size(-1), rawget(self, "cached") or 0, rawget(self, "_spans")
  raise_if(first + T > self.context, "expected up to %d tokens of context, got %d", self.context,
    first + T)
  local at, wtt = spans and spans.positions or positions(T, first), rawget(self, "wtt")
  raise_if(types and not wtt, "%s: the model has no token types; hint: nn.bert { types = 2 }",
    self._class)
  local x = self.wte(ids) + self.wpe(at)
  return wtt and x + (types and wtt(types) or wtt.weight:select(1, 1)) or x
end

-- Sets the spans (padding.lua) of a padded batch in the attention modules; nil: no padding.
local function set_spans(self, spans)
  for _, block in ipairs(self.blocks) do rawset(block.attn, "spans", spans) end
  rawset(self, "_spans", spans)
end

-- Returns a model's results: the logits y [B x T x V], with the model's soft cap, and the attention
-- maps of its blocks, if they are requested. Ends the call that begin() began.
local function results(self, y, options)
  local cap, maps = self.config.soft_cap, nil
  if cap > 0 and not options.uncapped then y = ((y / cap):to("f32"):tanh() * cap):to(y.dtype) end
  if options.attention_maps then
    maps = {}
    for i, block in ipairs(self.blocks) do maps[i] = block.attn:take_maps() end
  end
  if rawget(self, "_spans") then set_spans(self, nil) end
  return y, maps
end

-- Selects from each row of x [B x T x C] the last token whose id is not the padding token's -> [B x
-- C]. From a row of only padding tokens it selects the first, as Hugging Face's transformers does.
local function at_last_token(self, x, ids)
  local B, T, C = x:size()
  if not self.config.pad then
    if B == 1 then return x:select(2, -1) end
    raise("%s: expected the option pad, the id of the padding token, for a batch of %d rows",
      self._class, B)
  end
  local last = (positions(T):to("f32") * ids:ne(self.config.pad):to("f32")):argmax(-1):to("i64")
  return x:view(B * T, C):index_select(1, last + positions(B):to("i64") * T)
end

-- Adds a decoder's head, for labels if the model is a classifier, otherwise for tokens. A tied
-- model has no head for tokens; it uses the token embedding.
local function add_head(self, c, std)
  if c.labels then self.score = layers.linear(c.width, c.labels, { bias = false, std = std })
  elseif not c.tied then
    self.head = layers.linear(c.width, c.vocab, { bias = false, std = std })
  end
end

-- Returns a decoder's results. x [B x T x C] is the output of its last norm for `ids`. The head
-- computes the logits; in a tied model, the token embedding does. With a cache, there are logits
-- for the last token only.
local function logits(self, x, embedding, ids, options)
  local score, head = rawget(self, "score"), rawget(self, "head")
  if score then return results(self, score(at_last_token(self, x, ids)), options) end
  if rawget(self, "cached") then x = x:slice(2, -1) end
  return results(self, head and head(x) or x:linear(embedding.weight), options)
end

-- Reads and returns the options of a call model(ids, options). Switches attention maps on or off in
-- the blocks, and sets the spans of a padded batch in them.
local function begin(self, options, ids)
  options = tensor.read_named(options, self._class, FORWARD)
  if tensor.is_tensor(ids) and ids.ndim ~= 2 then
    raise("%s: expected ids [rows x length], got %s", self._class, tensor.shape_text(ids.shape))
  end
  local maps, spans = options.attention_maps, padding.read(options.mask, ids, self._class)
  raise_if(maps and spans,
    "%s: attention maps of a padded batch are not supported; hint: remove the padding", self._class)
  if maps or rawget(self, "_maps") then
    for _, block in ipairs(self.blocks) do block.attn:watch_maps(maps) end
    self._maps = maps
  end
  if spans or rawget(self, "_spans") then set_spans(self, spans) end
  return options
end

-- ------------------------------------------------------------------ decoders

-- Returns the standard deviation of initial weights and that of the residual projections' initial
-- weights, which shrinks with depth, as in GPT-2.
local function deviations(depth) return 0.02, 0.02 / math.sqrt(2 * depth) end

--- nn.gpt { vocab = 256, context = 256, width = 384, heads = 6, layers = 6, hidden = 4 * width,
--- gelu = "tanh", dropout = 0, embedding_dropout = dropout, attention_dropout = 0, bias = true,
--- tied = true, eps = 1e-5 }: ids [B x T] -> logits [B x T x V]. `dropout` acts on the residual
--- branches; a tied head shares the token embedding. labels: a number of labels. The model then
--- classifies sequences: it computes logits [B x labels] from each row's last token that is not
--- padding. pad: the id of the padding token. Methods: loss, generate.
local GPT = class("gpt")
function GPT:init(options)
  local c = configure(self, "nn.gpt", options, { vocab = 256, context = 256, width = 384, heads = 6,
    layers = 6, hidden = false, gelu = "tanh", dropout = 0, embedding_dropout = false,
    attention_dropout = 0, bias = true, tied = true, eps = 1e-5, pad = false })
  local std, out_std = deviations(c.layers)
  local function norm() return layers.layer_norm(c.width, { bias = c.bias, eps = c.eps }) end
  self.wte = layers.embedding(c.vocab, c.width, { std = std })
  self.wpe = layers.embedding(c.context, c.width, { std = std })
  self.drop = layers.dropout(c.embedding_dropout or c.dropout)
  self.blocks = repeated(c.layers, function()
    local attention = Attention(c.width, c.heads,
      { bias = c.bias, std = std, out_std = out_std, dropout = c.attention_dropout })
    local mlp = transformer.mlp(c.width, c.hidden or 4 * c.width,
      { bias = c.bias, std = std, out_std = out_std, gelu = c.gelu })
    return Block(norm(), attention, norm(), mlp, c.dropout)
  end)
  self.norm = norm()
  add_head(self, c, std)
end
function GPT:forward(ids, options)
  options = begin(self, options, ids)
  local x = self.drop(embed(self, ids))                                      -- [B x T x C]
  x = fuse.stack(x, self.blocks, self.norm)
  return logits(self, x, self.wte, ids, options)
end
GPT.loss, GPT.generate = loss, generate
function GPT:extra() return sizes(self, (", context %d"):format(self.context)) end
M.gpt = GPT

--- nn.llama { vocab = 256, context = 256, width = 256, heads = 8, kv_heads = 2, layers = 4, hidden
--- = 688, rope = 10000, eps = 1e-6, tied = false, dropout = 0 }: ids [B x T] -> logits [B x T x V].
--- `rope`, head_width, bias, out_bias, qk_norm, window and attention_dropout (there: dropout) are
--- options of nn.attention, but bias is false by default, and `window` may also be a list with an
--- entry for each layer (false: no window). mlp_bias adds biases to the feed-forward modules. With
--- `experts`, each of these modules is a mixture of that many experts, and each token uses top_k of
--- them (by default 2). labels and pad are those of nn.gpt. Methods: loss, generate.
local Llama = class("llama")
function Llama:init(options)
  local c = configure(self, "nn.llama", options, { vocab = 256, context = 256, width = 256,
    heads = 8, kv_heads = 2, layers = 4, hidden = 688, rope = 10000, eps = 1e-6, tied = false,
    dropout = 0, attention_dropout = 0, head_width = false, bias = false, out_bias = false,
    mlp_bias = false, qk_norm = false, window = false, experts = false, top_k = 2, pad = false })
  local windows, std, out_std = type(c.window) == "table" and c.window, deviations(c.layers)
  raise_if(windows and #windows ~= c.layers,
    "nn.llama: expected window to have %d entries, one for each layer, got %d", c.layers,
    windows and #windows)
  local function norm() return layers.rms_norm(c.width, { eps = c.eps }) end
  local function mlp()
    return transformer.swiglu(c.width, c.hidden, { bias = c.mlp_bias, std = std,
      out_std = out_std })
  end
  self.embed = layers.embedding(c.vocab, c.width, { std = std })
  self.blocks = repeated(c.layers, function(i)
    local attention = Attention(c.width, c.heads, { bias = c.bias, out_bias = c.out_bias,
      kv_heads = c.kv_heads, head_width = c.head_width, rope = c.rope, qk_norm = c.qk_norm,
      window = windows and windows[i] or not windows and c.window or nil,
      dropout = c.attention_dropout, std = std, out_std = out_std })
    return Block(norm(), attention, norm(), c.experts and moe { width = c.width, std = std,
      experts = c.experts, top_k = c.top_k, expert = mlp } or mlp(), c.dropout)
  end)
  self.norm = norm()
  add_head(self, c, std)
end
function Llama:forward(ids, options)
  options = begin(self, options, ids)
  local x = fuse.stack(self.embed(ids), self.blocks, self.norm)              -- [B x T x C]
  return logits(self, x, self.embed, ids, options)
end
Llama.loss, Llama.generate = loss, generate
function Llama:extra() return sizes(self, (", %d kv_heads"):format(self.config.kv_heads)) end
M.llama = Llama

-- ------------------------------------------------------------------ encoder

--- nn.bert { vocab = 257, context = 128, width = 128, heads = 4, layers = 2, hidden = 4 * width,
--- gelu = "erf", dropout = 0, attention_dropout = 0, types = 0, eps = 1e-12 }: ids [B x T] ->
--- logits [B x T x V] that predict the masked tokens. Post-norm blocks as in BERT. With `types` > 0
--- there are embeddings of token types, and a call takes the types [B x T] as its second argument
--- (by default all 0) and options as its third. The targets of loss are -100 at every token that is
--- not masked. With `labels`, the model classifies sequences by the first token of each row: its
--- logits are [B x labels]. classifier_dropout (by default `dropout`) acts before the last layer.
local Bert = class("bert")
function Bert:init(options)
  local c = configure(self, "nn.bert", options, { vocab = 257, context = 128, width = 128,
    heads = 4, layers = 2, hidden = false, gelu = "erf", dropout = 0, attention_dropout = 0,
    types = 0, eps = 1e-12, classifier_dropout = false })
  want_whole(c.types, "nn.bert", "types", 0)
  self.wte = layers.embedding(c.vocab, c.width, { std = 0.02 })
  self.wpe = layers.embedding(c.context, c.width, { std = 0.02 })
  if c.types > 0 then self.wtt = layers.embedding(c.types, c.width, { std = 0.02 }) end
  self.norm = layers.layer_norm(c.width, { eps = c.eps })
  self.drop = layers.dropout(c.dropout)
  self.blocks = repeated(c.layers, function() return transformer.post_norm_block(c) end)
  if c.labels then
    self.pooler = layers.linear(c.width, c.width, { std = 0.02 })
    self.classifier = layers.linear(c.width, c.labels, { std = 0.02 })
    self.classifier_drop = layers.dropout(c.classifier_dropout or c.dropout)
    return
  end
  self.transform = layers.linear(c.width, c.width, { std = 0.02 })
  self.transform_norm = layers.layer_norm(c.width, { eps = c.eps })
  self:parameter("head_bias", module.new_parameter { c.vocab }, "linear")
end

-- Returns logits for tokens [B x T x V] or, in a classifier, logits for labels [B x K], computed
-- from the first token of each row.
local function bert_head(self, x)
  if not self.config.labels then
    x = self.transform_norm(self.transform(x):gelu(self.config.gelu))
    return x:linear(self.wte.weight, self.head_bias)
  end
  for i, span in ipairs(rawget(self, "_spans") or {}) do
    raise_if(span.first > 0, "%s: expected a token at the beginning of each row, because the " ..
      "classifier reads it; row %d begins with padding", self._class, i)
  end
  return self.classifier(self.classifier_drop(self.pooler(x:select(2, 1)):tanh()))
end
function Bert:forward(ids, types, options)
  if type(types) == "table" then types, options = nil, types end
  options = begin(self, options, ids)
  local x = self.drop(self.norm(embed(self, ids, types)))                    -- [B x T x C]
  for _, block in ipairs(self.blocks) do x = block(x) end
  return results(self, bert_head(self, x), options)
end
Bert.loss = loss
function Bert:extra() return sizes(self, "") end
M.bert = Bert

return M
