-- The parts of transformers: attention, feed-forward modules and residual blocks. models.lua builds
-- models from them. fuse.lua decides which operations run as one. Called by scripts, models.lua,
-- image_models.lua and moe.lua.
-- Shapes: B batch, T time, C width, H heads, G key/value heads, D head width (by default C / H).
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fuse = require "engine.nn.fuse"
local layers = require "engine.nn.layers"
local module = require "engine.nn.module"
local tensor = require "engine.tensor.tensor"

local expect, raise, raise_if, want_whole = M_ffi.expect, M_ffi.raise, M_ffi.raise_if,
  arguments.want_whole
local class, last_use, sum = module.class, fuse.last_use, fuse.sum
local M = {}

--- Raises an error that begins with `name` unless `width` is divisible by `heads`, and `heads` by
--- `kv_heads`.
function M.want_heads(name, width, heads, kv_heads)
  raise_if(width % heads ~= 0, "%s: the width %d is not divisible by %d heads", name, width, heads)
  raise_if(heads % kv_heads ~= 0, "%s: %d heads are not divisible by %d kv_heads", name, heads,
    kv_heads)
end

--- Returns T consecutive positions from `first` (by default 0), as an i32 tensor that lives until
--- the step ends.
function M.positions(T, first)
  first = first or 0
  return tensor.arange(first, first + T - 1, 1, { dtype = "i32", keep = false })
end

-- ------------------------------------------------------------------ attention

-- Reads the option `rope` of an attention module of head width D. Sets self.rope (the options of
-- tensor:rope), self.attention_factor and self.dynamic.
local function read_rope(self, rope, D)
  if type(rope) == "number" then rope = { base = rope } end
  expect(type(rope) == "table", rope, "nn.attention: expected rope to be a number or a table")
  rope = arguments.merged(rope)
  self.attention_factor = rope.attention_factor or 1
  if rope.dynamic then
    self.dynamic = { length = rope.dynamic, base = rope.base or 10000, factor = rope.factor or 1,
      power = D / (D - 2) }
    rope.factor = nil
  end
  rope.attention_factor, rope.dynamic = nil, nil
  self.rope = rope
end

--- Self-attention: nn.attention(width, heads [, options]), x [B x T x C] -> [B x T x C]. Options,
--- with their defaults in parentheses:
---   causal      a query attends to no later key (true)
---   kv_heads    the number of key/value heads (heads)
---   head_width  the width of a head (width / heads)
---   rope        the base of the rotary positions, or a table with the options of tensor:rope and
---               two more: attention_factor multiplies the rotated q and k; dynamic is a length
---               in tokens. For longer sequences, the base grows as in dynamic NTK scaling with
---               the option `factor`.
---   bias        the projections to q, k and v have biases (true)
---   out_bias    the output projection has a bias (bias)
---   std         the standard deviation of the initial weights; out_std is that of the output
---               projection (std)
---   qk_norm     puts an RMS norm with this eps on every head's q and k, before the rotation (no
---               norm)
---   window      a query attends to at most this many keys, its own included (no limit)
---   dropout     the probability of dropping an attention weight in training mode (0)
--- With dropout in training mode, or with more keys than the window, the attention weights are
--- stored as tensors instead of computed row by row. If `watch_entropy` is set, each call that
--- computes the weights row by row records the entropy of each row, in nats, in `entropy` [B x H x
--- T]. If `watch_logits` is set instead, each call records each row's largest scaled score in
--- `logits` [B x H x T] (only on the CPU). In a padded batch, `entropy` and `logits` are [1 x H x
--- N], for the N tokens that are not padding.
local Attention = class("attention")
function Attention:init(width, heads, options)
  options = tensor.read_named(options, "nn.attention",
    "causal kv_heads head_width rope bias out_bias std out_std qk_norm window dropout")
  local kv_heads, dropout = options.kv_heads or heads, options.dropout or 0
  want_whole(width, "nn.attention", "the width", 1)
  want_whole(heads, "nn.attention", "heads", 1)
  want_whole(kv_heads, "nn.attention", "kv_heads", 1)
  M.want_heads("nn.attention", options.head_width and heads or width, heads, kv_heads)
  local D, out_bias = options.head_width or width / heads, options.out_bias
  want_whole(D, "nn.attention", "head_width", 1)
  if options.window then want_whole(options.window, "nn.attention", "window", 1) end
  expect(type(dropout) == "number" and dropout >= 0 and dropout < 1, dropout,
    "nn.attention: expected dropout in [0, 1)")
  raise_if(options.window and options.causal == false,
    "nn.attention: a window needs causal attention, got causal = false")
  self.heads, self.kv_heads, self.head_width = heads, kv_heads, D
  self.causal = module.want_flag(options, "causal", "nn.attention", true)
  self.window, self.dropout = options.window, dropout
  self.attention_factor = 1
  if options.rope then read_rope(self, options.rope, D) end
  self.watch_entropy, self.watch_logits = false, false
  local out_std = options.out_std or options.std
  if out_bias == nil then out_bias = options.bias end
  self.qkv = layers.linear(width, (heads + 2 * kv_heads) * D,
    { bias = options.bias, std = options.std })
  self.out = layers.linear(heads * D, width, { bias = out_bias, std = out_std })
  if not options.qk_norm then return end
  self.q_norm = layers.rms_norm(D, { eps = options.qk_norm })
  self.k_norm = layers.rms_norm(D, { eps = options.qk_norm })
end

-- Splits qkv [B x T x (HD + 2GD)] into q [B x T x H x D], k and v [B x T x G x D]. Normalizes q and
-- k if the module has q_norm.
local function split_heads(self, qkv)
  local B, T = qkv:size()
  local H, G, D = self.heads, self.kv_heads, self.head_width
  local q, k, v = qkv:split({ H * D, G * D, G * D }, -1)
  q, k, v = q:view(B, T, H, D), k:view(B, T, G, D), v:view(B, T, G, D)
  if not rawget(self, "q_norm") then return q, k, v end
  return self.q_norm(q), self.k_norm(k), v
end

-- Returns the base of the rotary positions in a batch with positions up to reach - 1.
local function dynamic_base(d, reach)
  local stretch = d.factor * math.max(reach, d.length) / d.length - (d.factor - 1)
  return d.base * stretch ^ d.power
end

-- Rotates q and k by their positions. Positions begin at `position` or, with a cache
-- (generate.lua), at the number of cached tokens. Appends k and v to the cache, and returns q and
-- all keys and values. reach: one more than the largest position of the batch; by default, one more
-- than the last position of q.
local function placed(self, q, k, v, cache, position, reach)
  local rope = self.rope
  if rope then
    rope.position = cache and cache.length or position
    if rawget(self, "dynamic") then
      rope.base = dynamic_base(self.dynamic, reach or rope.position + q:size(2))
    end
    q, k = q:rope(rope), k:rope(rope)
  end
  if cache then k, v = cache:append(k, v) end
  return q, k, v
end

--- If `on` is true, later calls also compute the attention weights, which take_maps() returns.
function Attention:watch_maps(on) self.maps_wanted = on or nil end

--- Returns the attention weights of the module's last call, [B x H x T x T] in f32, before dropout,
--- and drops them: a second take_maps() returns nil.
function Attention:take_maps()
  local maps = rawget(self, "maps")
  rawset(self, "maps", nil)
  return maps
end

-- Returns softmax(q k^T / sqrt(D)) in f32: q [B x T x H x D], k [B x S x G x D] -> [B x G x H/G x T
-- x S], and the scores before the softmax. Query t is at position first + t of the keys (both from
-- 0). The attention factor multiplies both q and k.
local function attention_weights(self, q, k, first)
  local B, T, H, D = q:size()
  local S, G, window = k:size(2), self.kv_heads, self.window
  local rows = q:view(B, T, G, H / G, D):permute(1, 3, 4, 2, 5):view(B, G, H / G * T, D)
  local scores = rows:matmul(k:permute(1, 3, 2, 4), false, true):to("f32")
    / (math.sqrt(D) / self.attention_factor ^ 2)
  scores = scores:view(B, G, H / G, T, S)
  local row, column = M.positions(T, first):view(T, 1), M.positions(S):view(1, S)
  if self.causal then scores = column:le(row):where(scores, -math.huge) end
  if window then scores = column:gt(row - window):where(scores, -math.huge) end
  return scores:softmax(), scores
end

-- Computes attention with the weights stored as a tensor, for dropout and windows: q [B x T x H x
-- D], k and v [B x S x G x D] -> [B x T x H x D]. With watch_logits, also returns the largest score
-- of each row, [B x H x T]. first: as in attention_weights.
local function explicit_attention(self, q, k, v, first)
  local B, T, H, D = q:size()
  local S, G, weights, scores = k:size(2), self.kv_heads, attention_weights(self, q, k, first)
  if self.dropout > 0 and self._training then weights = weights:dropout(self.dropout) end
  local y = weights:view(B, G, H / G * T, S):matmul(v:permute(1, 3, 2, 4)):to(v.dtype)
  return y:view(B, G, H / G, T, D):permute(1, 4, 2, 3, 5):view(B, T, H, D),
    self.watch_logits and scores:detach():max(-1):view(B, H, T)
end

-- Runs explicit_attention in blocks of `window` queries (without a window, in one block). A block
-- reads only the keys that its queries can see.
local function windowed_attention(self, q, k, v)
  local T, S, parts, logits = q:size(2), k:size(2), {}, {}
  local window = self.window or T
  for t = 0, T - 1, window do
    local last = math.min(t + window, T)
    local from = self.window and math.max(0, S - T + t - window + 1) or 0
    local to = self.window and S - T + last or S
    local n = #parts + 1
    parts[n], logits[n] = explicit_attention(self, q:slice(2, t + 1, last),
      k:slice(2, from + 1, to), v:slice(2, from + 1, to), S - T + t - from)
  end
  return #parts > 1 and tensor.concat(parts, 2) or parts[1],
    self.watch_logits and { logits = tensor.concat(logits, 3) } or {}
end

-- Returns softmax(q k^T / sqrt(D)) v: q [B x T x H x D], k and v [B x S x G x D] -> [B x T x H x
-- D], and the watched statistics, { entropy = [B x H x T] } or { logits = [B x H x T] }.
local function attend(self, q, k, v)
  if rawget(self, "maps_wanted") then
    local B, T, S = q:size(1), q:size(2), k:size(2)
    rawset(self, "maps", attention_weights(self, q, k, S - T):view(B, self.heads, T, S))
  end
  if self.dropout > 0 and self._training or self.window and k:size(2) > self.window then
    return windowed_attention(self, q, k, v)
  end
  local y, row = fuse.attention(q, k, v, self.out,
    { causal = self.causal, entropy = self.watch_entropy, logit_max = self.watch_logits,
      scale = self.attention_factor ~= 1 and self.attention_factor ^ 2 / math.sqrt(q:size(-1))
        or nil })
  return y, { [self.watch_entropy and "entropy" or "logits"] = row }
end

-- Computes attention for all rows of a batch together or, with spans (padding.lua), for each
-- sequence by itself.
local function attend_rows(self, q, k, v)
  local spans, caches = rawget(self, "spans"), rawget(self, "caches") or {}
  if not spans then
    q, k, v = placed(self, q, k, v, caches[1], 0)
    return attend(self, q, k, v)
  end
  local parts, all = {}, { entropy = {}, logits = {} }
  for i, span in ipairs(spans) do
    local function own(x) return x:slice(1, i, i):slice(2, span.first + 1, span.last) end
    local watched
    parts[i], watched = attend(self, placed(self, own(q), own(k), own(v), caches[i],
      span.position, spans.reach))
    for name, row in pairs(watched) do all[name][i] = row end
  end
  for name, list in pairs(all) do all[name] = list[1] and tensor.concat(list, 3) end
  return spans:join(parts), all
end

-- Returns x, or raises an error unless x has 3 dimensions.
local function sequences(x)
  if x.ndim == 3 then return x end
  raise("expected x [batch x time x width], got %s", tensor.shape_text(x.shape))
end

function Attention:forward(x)
  local q, k, v = split_heads(self, self.qkv(sequences(x)))
  local y, watched = attend_rows(self, q, k, v)                              -- [B x T x H x D]
  rawset(self, "entropy", watched.entropy)
  rawset(self, "logits", watched.logits)
  return last_use(self.out, y:view(x:size(1), x:size(2), self.heads * self.head_width), y)
end
function Attention:extra()
  return ("%d heads%s"):format(self.heads, self.causal and ", causal" or "")
end
M.attention = Attention

-- ------------------------------------------------------------------ feed-forward

--- Feed-forward with GELU: nn.mlp(width, hidden [, { bias, std, out_std, gelu = "tanh" | "erf" }]),
--- x [.. x C] -> [.. x C].
local MLP = class("mlp")
function MLP:init(width, hidden, options)
  options = tensor.read_named(options, "nn.mlp", "bias std out_std gelu")
  local bias, std, out_std = options.bias, options.std, options.out_std or options.std
  self.up = layers.linear(width, hidden, { bias = bias, std = std })
  self.down = layers.linear(hidden, width, { bias = bias, std = out_std })
  self.form = options.gelu or "tanh"
  expect(self.form == "tanh" or self.form == "erf", self.form,
    "nn.mlp: expected gelu to be 'erf' or 'tanh'")
end
function MLP:forward(x) return fuse.gelu_mlp(x, self.up, self.form, self.down) end
M.mlp = MLP

--- Feed-forward with SwiGLU, down(silu(gate(x)) * up(x)): nn.swiglu(width, hidden [, { bias =
--- false, std, out_std }]), x [.. x C] -> [.. x C].
local SwiGLU = class("swiglu")
function SwiGLU:init(width, hidden, options)
  options = tensor.read_named(options, "nn.swiglu", "bias std out_std")
  local std, out_std, bias = options.std, options.out_std or options.std, options.bias or false
  self.gate = layers.linear(width, hidden, { bias = bias, std = std })
  self.up = layers.linear(width, hidden, { bias = bias, std = std })
  self.down = layers.linear(hidden, width, { bias = bias, std = out_std })
end
function SwiGLU:forward(x) return fuse.swiglu_mlp(self.gate(x), self.up(x), self.down) end
M.swiglu = SwiGLU

-- ------------------------------------------------------------------ blocks

--- A pre-norm residual block: nn.block(norm1, attention, norm2, feed_forward [, dropout]), x [B x T
--- x C] -> the same shape. x may be a Sum (see fuse.lua); if `open` is true, the result is a Sum.
local Block = class("block")
function Block:init(norm1, attention, norm2, feed_forward, dropout)
  self.norm1 = norm1
  self.attn = attention
  self.norm2 = norm2
  self.mlp = feed_forward
  self.drop = layers.dropout(dropout or 0)
end
function Block:forward(x, open)
  x = sum(x)
  x = x + self.drop(last_use(self.attn, x:norm(self.norm1)))                 -- x + attn(norm1(x))
  x = x + self.drop(last_use(self.mlp, x:norm(self.norm2)))                  -- x + mlp(norm2(x))
  return open and x or x:value()
end
fuse.register("block", Block)
M.block = Block

--- BERT's post-norm block, for a configuration { width, heads, hidden, gelu, eps, dropout,
--- attention_dropout }: x [B x T x C] -> the same shape.
local PostNormBlock = class("bert_block")
function PostNormBlock:init(c)
  self.attn = Attention(c.width, c.heads,
    { causal = false, std = 0.02, dropout = c.attention_dropout })
  self.norm1 = layers.layer_norm(c.width, { eps = c.eps })
  self.mlp = MLP(c.width, c.hidden or 4 * c.width, { std = 0.02, gelu = c.gelu })
  self.norm2 = layers.layer_norm(c.width, { eps = c.eps })
  self.drop = layers.dropout(c.dropout)
end
function PostNormBlock:forward(x)
  x = (sum(x) + self.drop(self.attn(x))):norm(self.norm1)
  return (sum(x) + self.drop(self.mlp(x))):norm(self.norm2)
end
M.post_norm_block = PostNormBlock

return M
