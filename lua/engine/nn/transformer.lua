-- The parts of transformers: attention, feed-forward modules and residual blocks. models.lua builds
-- models from them. fuse.lua decides which operations run as one.
-- Shapes: B batch, T time, C width, H heads, G key/value heads, D = C / H.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fuse = require "engine.nn.fuse"
local layers = require "engine.nn.layers"
local module = require "engine.nn.module"
local tensor = require "engine.tensor.tensor"

local raise, want_whole = M_ffi.raise, arguments.want_whole
local class, last_use, sum = module.class, fuse.last_use, fuse.sum
local M = {}

--- Raises an error named `name` unless `width` divides by `heads`, and `heads` by `kv_heads`.
function M.want_heads(name, width, heads, kv_heads)
  if width % heads ~= 0 then
    raise("%s: the width %d does not divide by %d heads", name, width, heads)
  end
  if heads % kv_heads ~= 0 then
    raise("%s: %d heads do not divide by %d kv_heads", name, heads, kv_heads)
  end
end

--- The positions 0, 1 ... T-1 as i32; they belong to the step.
function M.positions(T) return tensor.arange(0, T - 1, 1, { dtype = "i32", keep = false }) end

-- ------------------------------------------------------------------ attention

--- Self-attention: nn.attention(width, heads [, options]), x [B x T x C] -> [B x T x C]. Options:
--- causal (true), kv_heads (heads), rope (base of the rotary positions), bias (true), std and
--- out_std (of the initial weights), dropout (of the attention weights in training mode; these are
--- then stored in full instead of computed row by row). If `watch_entropy` is set, each call stores
--- the entropy of each row of attention weights in `entropy`, in nats, [B x H x T].
local Attention = class("attention")
local ATTENTION = { causal = true, kv_heads = true, rope = true, bias = true, std = true,
  out_std = true, dropout = true }
function Attention:init(width, heads, options)
  options = tensor.read_named(options, "nn.attention", ATTENTION)
  local kv_heads, dropout = options.kv_heads or heads, options.dropout or 0
  want_whole(width, "nn.attention", "the width", 1)
  want_whole(heads, "nn.attention", "heads", 1)
  want_whole(kv_heads, "nn.attention", "kv_heads", 1)
  M.want_heads("nn.attention", width, heads, kv_heads)
  if dropout > 0 and kv_heads ~= heads then
    raise("nn.attention: dropout of the weights needs as many kv_heads as heads")
  end
  rawset(self, "heads", heads)
  rawset(self, "kv_heads", kv_heads)
  rawset(self, "head_width", width / heads)
  rawset(self, "causal", options.causal ~= false)
  rawset(self, "rope", options.rope)
  rawset(self, "dropout", dropout)
  rawset(self, "watch_entropy", false)
  local out_std = options.out_std or options.std
  self.qkv = layers.linear(width, width + 2 * kv_heads * self.head_width,
    { bias = options.bias, std = options.std })
  self.out = layers.linear(width, width, { bias = options.bias, std = out_std })
end

-- qkv [B x T x (C + 2GD)] -> q [B x T x H x D], k and v [B x T x G x D].
local function split_heads(self, qkv)
  local B, T = qkv:size()
  local H, G, D = self.heads, self.kv_heads, self.head_width
  local q, k, v = qkv:split({ H * D, G * D, G * D }, -1)
  return q:view(B, T, H, D), k:view(B, T, G, D), v:view(B, T, G, D)
end

-- q, k, v [B x T x H x D] -> [B x T x H x D], with the weights as a tensor that dropout can act on.
local function attention_with_dropout(q, k, v, causal, p)
  local T, D = q:size(2), q:size(4)
  local scores = q:permute(1, 3, 2, 4):matmul(k:permute(1, 3, 2, 4), false, true)
  scores = scores:to("f32") / math.sqrt(D)                                   -- [B x H x T x T]
  if causal then
    local row, column = M.positions(T):view(T, 1), M.positions(T):view(1, T)
    scores = column:le(row):where(scores, -math.huge)
  end
  return scores:softmax():dropout(p):matmul(v:permute(1, 3, 2, 4)):permute(1, 3, 2, 4)
end

-- softmax(q k^T / sqrt(D)) v: q [B x T x H x D], k and v [B x T x G x D] -> [B x T x H x D].
local function attend(self, q, k, v)
  rawset(self, "entropy", nil)
  if self.dropout > 0 and self._training then
    return attention_with_dropout(q, k, v, self.causal, self.dropout)
  end
  local y, entropy = fuse.attention(q, k, v, self.out,
    { causal = self.causal, entropy = self.watch_entropy })
  rawset(self, "entropy", entropy)
  return y
end

function Attention:forward(x)
  local q, k, v = split_heads(self, self.qkv(x))
  if self.rope then q, k = q:rope { base = self.rope }, k:rope { base = self.rope } end
  local y = attend(self, q, k, v)                                            -- [B x T x H x D]
  return last_use(self.out, y:view(x.shape), y)
end
function Attention:extra()
  return ("%d heads%s"):format(self.heads, self.causal and ", causal" or "")
end
M.attention = Attention

-- ------------------------------------------------------------------ feed-forward

local FEED_FORWARD = { bias = true, std = true, out_std = true, gelu = true }

--- Feed-forward with GELU: nn.mlp(width, hidden [, { bias, std, out_std, gelu = "tanh" | "erf" }]),
--- x [.. x C] -> [.. x C].
local MLP = class("mlp")
function MLP:init(width, hidden, options)
  options = tensor.read_named(options, "nn.mlp", FEED_FORWARD)
  local bias, std, out_std = options.bias, options.std, options.out_std or options.std
  self.up = layers.linear(width, hidden, { bias = bias, std = std })
  self.down = layers.linear(hidden, width, { bias = bias, std = out_std })
  rawset(self, "form", options.gelu or "tanh")
end
function MLP:forward(x) return fuse.gelu_mlp(x, self.up, self.form, self.down) end
M.mlp = MLP

--- Feed-forward with SwiGLU, silu(gate(x)) * up(x) and then down: nn.swiglu(width, hidden
--- [, { std, out_std }]), x [.. x C] -> [.. x C]. No biases.
local SwiGLU = class("swiglu")
function SwiGLU:init(width, hidden, options)
  options = tensor.read_named(options, "nn.swiglu", FEED_FORWARD)
  local std, out_std = options.std, options.out_std or options.std
  self.gate = layers.linear(width, hidden, { bias = false, std = std })
  self.up = layers.linear(width, hidden, { bias = false, std = std })
  self.down = layers.linear(hidden, width, { bias = false, std = out_std })
end
function SwiGLU:forward(x) return fuse.swiglu_mlp(self.gate(x), self.up(x), self.down) end
M.swiglu = SwiGLU

-- ------------------------------------------------------------------ blocks

--- A pre-norm residual block: nn.block(norm1, attention, norm2, feed_forward [, dropout]), x [B x T
--- x C] -> the same shape. x may be a Sum of fuse.lua; with `open` the result is a Sum.
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

--- BERT's post-norm block, for a configuration { width, heads, eps, dropout }: x [B x T x C] -> the
--- same shape.
local PostNormBlock = class("bert_block")
function PostNormBlock:init(c)
  self.attn = Attention(c.width, c.heads, { causal = false, std = 0.02 })
  self.norm1 = layers.layer_norm(c.width, { eps = c.eps })
  self.mlp = MLP(c.width, 4 * c.width, { std = 0.02, gelu = "erf" })
  self.norm2 = layers.layer_norm(c.width, { eps = c.eps })
  self.drop = layers.dropout(c.dropout)
end
function PostNormBlock:forward(x)
  x = (sum(x) + self.drop(self.attn(x))):norm(self.norm1)
  return (sum(x) + self.drop(self.mlp(x))):norm(self.norm2)
end
M.post_norm_block = PostNormBlock

return M
