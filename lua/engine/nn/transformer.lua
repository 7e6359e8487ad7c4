-- Transformers: attention, feed-forward blocks, and the three models the examples use:
--   nn.gpt    decoder with learned positions, layer norm, GELU (GPT-2's shape)
--   nn.llama  decoder with rotary positions, RMS norm, SwiGLU, grouped queries
--   nn.bert   encoder with a masked-token head
-- Shapes: B batch, T time, C width, H heads, G key/value heads, D = C / H, V vocabulary.
local M_ffi = require "engine.base.ffi"
local tensor = require "engine.tensor.tensor"
local module = require "engine.nn.module"
local layers = require "engine.nn.layers"

local raise, value_text = M_ffi.raise, M_ffi.value_text
local M = {}
local class = module.class

local function known_names(...)
  local known = {}
  for _, key in ipairs { ... } do known[key] = true end
  return known
end

local function want_whole(name, what, n)
  if type(n) ~= "number" or n % 1 ~= 0 or n < 1 then raise("nn.%s: expected %s as a whole number of 1 or more, got %s", name, what, value_text(n)) end
end

local function want_heads(name, width, heads, kv_heads)
  if width % heads ~= 0 then raise("nn.%s: the width %d does not divide by %d heads", name, width, heads) end
  if heads % kv_heads ~= 0 then raise("nn.%s: %d heads do not divide by %d kv_heads", name, heads, kv_heads) end
end

-- The options of a model; `known` gives the defaults.
local function defaults(name, options, known)
  local config, names = {}, {}
  for key, value in pairs(known) do config[key], names[key] = value, true end
  for key, value in pairs(tensor.read_named(options, "nn." .. name, names)) do config[key] = value end
  for _, key in ipairs { "vocab", "width", "heads", "layers", "context", "kv_heads", "hidden" } do
    if known[key] or config[key] then want_whole(name, key, config[key]) end
  end
  want_heads(name, config.width, config.heads, config.kv_heads or config.heads)
  for _, key in ipairs { "dropout", "embedding_dropout", "attention_dropout" } do
    local p = config[key]
    if p and not (type(p) == "number" and p >= 0 and p < 1) then raise("nn.%s: expected %s in [0, 1), got %s", name, key, value_text(p)) end
  end
  return config
end

-- 0, 1 ... T-1, of the step also where none is open
local function places(T) return tensor.arange(0, T - 1, 1, { dtype = "i32", keep = false }) end

local function want_context(self, T)
  if T > self.context then raise("expected up to %d tokens of context, got %d", self.context, T) end
end

-- ------------------------------------------------------------------ blocks

--- Self-attention: x [B x T x C] -> [B x T x C]. options: causal, kv_heads, rope (base), bias, std, out_std, dropout (of the
--- attention weights, in training mode; the weights are then formed in full instead of row by row).
local Attention = class("attention")
local ATTENTION = known_names("causal", "kv_heads", "rope", "bias", "std", "out_std", "dropout")
function Attention:init(width, heads, options)
  options = tensor.read_named(options, "nn.attention", ATTENTION)
  want_whole("attention", "the width", width)
  want_whole("attention", "heads", heads)
  want_whole("attention", "kv_heads", options.kv_heads or heads)
  want_heads("attention", width, heads, options.kv_heads or heads)
  rawset(self, "heads", heads)
  rawset(self, "kv_heads", options.kv_heads or heads)
  rawset(self, "head_width", width / heads)
  rawset(self, "causal", options.causal ~= false)
  rawset(self, "rope", options.rope)
  rawset(self, "dropout", options.dropout or 0)
  if self.dropout > 0 and self.kv_heads ~= heads then raise("nn.attention: dropout of the weights needs as many kv_heads as heads") end
  rawset(self, "entropy", nil)   -- set by forward when watch_entropy is on: [B x H x T] nats
  rawset(self, "watch_entropy", false)
  local kv = self.kv_heads * self.head_width
  self.qkv = layers.linear(width, width + 2 * kv, { bias = options.bias, std = options.std })
  self.out = layers.linear(width, width, { bias = options.bias, std = options.out_std or options.std })
end
-- q, k, v [B x T x H x D] -> [B x T x H x D], with the weights as a tensor that dropout can act on.
local function attention_with_dropout(q, k, v, causal, p)
  local T, D = q:size(2), q:size(4)
  local scores = q:permute(1, 3, 2, 4):matmul(k:permute(1, 3, 2, 4), false, true):to("f32") / math.sqrt(D)   -- [B x H x T x T]
  if causal then
    local row, column = places(T):view(T, 1), places(T):view(1, T)
    scores = column:le(row):where(scores, -math.huge)
  end
  return scores:softmax():dropout(p):matmul(v:permute(1, 3, 2, 4)):permute(1, 3, 2, 4)
end
function Attention:forward(x)
  local B, T, C = x:size()
  local H, G, D = self.heads, self.kv_heads, self.head_width
  local q, k, v = self.qkv(x):split({ C, G * D, G * D }, -1)               -- [B x T x C], [B x T x GD] twice
  q, k, v = q:view(B, T, H, D), k:view(B, T, G, D), v:view(B, T, G, D)
  if self.rope then q, k = q:rope { base = self.rope }, k:rope { base = self.rope } end
  local y, entropy
  if self.dropout > 0 and self._training then y = attention_with_dropout(q, k, v, self.causal, self.dropout)
  else y, entropy = tensor.attention(q, k, v, { causal = self.causal, entropy = self.watch_entropy }) end   -- [B x T x H x D]
  rawset(self, "entropy", entropy)
  local flat = y:view(B, T, C)
  local answer = self.out(flat)
  flat:done() y:done()
  return answer
end
function Attention:extra() return ("%d heads%s"):format(self.heads, self.causal and ", causal" or "") end
M.attention = Attention

--- Feed-forward with GELU (tanh form): C -> hidden -> C.
local MLP = class("mlp")
local FEED_FORWARD = known_names("bias", "std", "out_std", "gelu")
function MLP:init(width, hidden, options)
  options = tensor.read_named(options, "nn.mlp", FEED_FORWARD)
  self.up = layers.linear(width, hidden, { bias = options.bias, std = options.std })
  self.down = layers.linear(hidden, width, { bias = options.bias, std = options.out_std or options.std })
  rawset(self, "form", options.gelu or "tanh")
end

-- A linear layer that is nothing else: not a module put in its place (an adapter), not scaled apart, not in FP8.
local function is_plain(m) return m.forward == layers.linear.forward and not rawget(m, "_carry") and not rawget(m, "_fp8") end

-- Whether an MLP runs as one operation, mlp_gelu, in place of three. The one place that decides it: whatever wants the two products
-- apart (FP8 sites quantize what goes into each) says so in is_plain. On a card the operation's epilogues have never been executed:
-- there ENGINE_MLP_IN_ONE=1 tries them.
local IN_ONE_ON_CARD = os.getenv("ENGINE_MLP_IN_ONE") == "1"
local function runs_in_one(self, x)
  local up, down = self.up, self.down
  return self.form == "tanh" and is_plain(up) and is_plain(down) and up.outputs == down.inputs and (IN_ONE_ON_CARD or x.device ~= "cuda")
end

function MLP:forward(x)
  local up, down = self.up, self.down
  if runs_in_one(self, x) then return x:mlp_gelu(up.weight, rawget(up, "bias"), down.weight, rawget(down, "bias")) end
  local h = up(x):gelu(self.form)
  local y = down(h)
  h:done()
  return y
end
M.mlp = MLP

--- Feed-forward with SwiGLU: silu(gate x) * (up x), then down.
local SwiGLU = class("swiglu")
function SwiGLU:init(width, hidden, options)
  options = tensor.read_named(options, "nn.swiglu", FEED_FORWARD)
  self.gate = layers.linear(width, hidden, { bias = false, std = options.std })
  self.up = layers.linear(width, hidden, { bias = false, std = options.std })
  self.down = layers.linear(hidden, width, { bias = false, std = options.out_std or options.std })
end
-- Whether `down` is a linear layer in FP8 and nothing else, whose input nobody but it looks at: neither a module put in its place or a
-- forward of one's own, nor a watch on modules (a trap, which shall name swiglu where inf begins). It may also be scaled apart.
local function takes_codes(down)
  return rawget(down, "_fp8") and down.forward == layers.linear.forward and not rawget(down, "_carry") and not module.watched()
end
function SwiGLU:forward(x)
  local gate, up, down = self.gate(x), self.up(x), self.down
  local y
  if takes_codes(down) then
    y = gate:swiglu_linear(up, down.weight, rawget(down, "bias"), rawget(down, "_fp8"))
  else
    local h = gate:swiglu(up, rawget(down, "_fp8"))
    y = down(h)
    h:done()
  end
  gate:done() up:done()
  return y
end
M.swiglu = SwiGLU

-- ------------------------------------------------------------------ residuals

-- Whether a norm takes a residual: one of ours, and not scaled apart, for the sum belongs to what is around it.
local function takes_residual(norm)
  return (norm.forward == layers.layer_norm.forward or norm.forward == layers.rms_norm.forward) and not rawget(norm, "_carry")
end

-- Whether x + branch is a sum of two like tensors: what somebody put in attention's place may give a number, or something to broadcast.
local function is_residual(x, branch) return tensor.is_tensor(branch) and branch.ndim == x.ndim and branch.count == x.count end

--- The norm of x + branch, and x + branch: in one pass where the norm can, else by two operations, which give the same bits.
local function add_and_norm(norm, x, branch)
  if takes_residual(norm) and is_residual(x, branch) then return norm(x, branch) end
  x = x + branch
  return norm(x), x
end

--- A pre-norm residual block around an attention and a feed-forward module. block(x, branch) takes x + branch; block(x, branch, true)
--- gives what it has not added up: x and the branch that belongs to it.
local Block = class("block")
function Block:init(norm1, attention, norm2, feed_forward, dropout)
  self.norm1 = norm1
  self.attn = attention
  self.norm2 = norm2
  self.mlp = feed_forward
  self.drop = layers.dropout(dropout or 0)
end
function Block:forward(x, branch, open)
  local h
  if branch then h, x = add_and_norm(self.norm1, x, branch) else h = self.norm1(x) end
  branch = self.drop(self.attn(h))
  h:done()
  h, x = add_and_norm(self.norm2, x, branch)
  branch = self.drop(self.mlp(h))
  h:done()
  if open and is_residual(x, branch) then return x, branch end
  return x + branch
end
M.block = Block

-- Whether a block's last sum can be left to what comes after it, and the one before it leave its own: a block as above, not scaled apart.
local function is_open(block) return block.forward == Block.forward and not rawget(block, "_carry") end

--- x through `blocks` and the norm behind them. The sum at a block's end is formed by the norm that comes next.
local function through(blocks, norm, x)
  local branch
  for i, block in ipairs(blocks) do
    local after = blocks[i + 1]
    local open = is_open(block)
    if after then open = open and is_open(after) else open = open and takes_residual(norm) end
    if open then x, branch = block(x, branch, true) else x, branch = block(x, branch), nil end
  end
  if branch then return (norm(x, branch)) end
  return norm(x)
end

-- ------------------------------------------------------------------ decoders

local GENERATE = known_names("temperature", "top_k")

--- The list `ids` (of numbers) and `count` sampled tokens more. options: temperature (1; 0: always the likeliest), top_k. Random
--- numbers come from the engine's generator.
local function generate(self, ids, count, options)
  options = tensor.read_named(options, "generate", GENERATE)
  local temperature, k = options.temperature or 1, options.top_k
  if type(ids) ~= "table" or #ids == 0 then raise("generate: expected a list of at least one token to begin with, got %s", value_text(ids)) end
  if type(count) ~= "number" or count < 0 or count % 1 ~= 0 then
    raise("generate: expected the number of tokens as a whole number of 0 or more, got %s", value_text(count))
  end
  if type(temperature) ~= "number" or not (temperature >= 0 and temperature < math.huge) then
    raise("generate: expected temperature as a number >= 0, got %s", value_text(temperature))
  end
  if k ~= nil and (type(k) ~= "number" or k < 1 or k % 1 ~= 0) then raise("generate: expected top_k as a whole number of 1 or more, got %s", value_text(k)) end
  local engine, list = require "engine", { unpack(ids) }
  self:evaluating(function()
    for _ = 1, count do
      list[#list + 1] = engine.scope(function()
        local window = { unpack(list, math.max(1, #list - self.context + 1)) }
        local logits = self(tensor.tensor({ window }, "i32")):select(2, -1):to("f32")       -- [1 x V]
        if temperature == 0 then return logits:argmax(-1):item() end
        local top, ids_of = logits, nil
        if k and k < logits:size(-1) then top, ids_of = logits:topk(k) end
        local p = (top / temperature):softmax():view(-1):totable()
        local u, sum, pick = tensor.rand(1):item(), 0, #p
        for i = 1, #p do
          sum = sum + p[i]
          if u < sum then pick = i break end
        end
        return ids_of and ids_of:view(-1):totable()[pick] or pick - 1
      end)
    end
  end)
  return list
end

--- Mean cross entropy of next tokens: x [B x T] ids, y [B x T] ids one further.
local function next_token_loss(self, x, y, options)
  return tensor.cross_entropy(self(x), y, options)
end

local function some(n, what) return ("%d %s%s"):format(n, what, n == 1 and "" or "s") end

--- nn.gpt{ vocab, context, width, heads, layers, hidden, gelu, dropout, embedding_dropout, attention_dropout, bias, tied, eps }: logits
--- [B x T x V]. The output head shares the token embedding unless tied = false. `dropout` is that of the residuals, and of the
--- embeddings unless embedding_dropout says otherwise.
local GPT = class("gpt")
function GPT:init(options)
  local c = defaults("gpt", options, { vocab = 256, context = 256, width = 384, heads = 6, layers = 6, hidden = false, gelu = "tanh", dropout = 0,
    embedding_dropout = false, attention_dropout = 0, bias = true, tied = true, eps = 1e-5 })
  rawset(self, "config", c)
  rawset(self, "context", c.context)
  local std, out_std = 0.02, 0.02 / math.sqrt(2 * c.layers)   -- GPT-2's: residual projections shrink with depth
  self.wte = layers.embedding(c.vocab, c.width, { std = std })
  self.wpe = layers.embedding(c.context, c.width, { std = std })
  self.drop = layers.dropout(c.embedding_dropout or c.dropout)
  local blocks = {}
  for i = 1, c.layers do
    blocks[i] = Block(layers.layer_norm(c.width, { bias = c.bias, eps = c.eps }),
      Attention(c.width, c.heads, { bias = c.bias, std = std, out_std = out_std, dropout = c.attention_dropout }),
      layers.layer_norm(c.width, { bias = c.bias, eps = c.eps }),
      MLP(c.width, c.hidden or 4 * c.width, { bias = c.bias, std = std, out_std = out_std, gelu = c.gelu }), c.dropout)
  end
  self.blocks = layers.list(blocks)
  self.norm = layers.layer_norm(c.width, { bias = c.bias, eps = c.eps })
  if not c.tied then self.head = layers.linear(c.width, c.vocab, { bias = false, std = std }) end
end
function GPT:forward(ids)
  local T = ids:size(-1)
  want_context(self, T)
  local x = self.drop(self.wte(ids) + self.wpe(places(T)))         -- [B x T x C]
  x = through(self.blocks, self.norm, x)
  local head = rawget(self, "head")
  if head then return head(x) end
  return x:linear(self.wte.weight)
end
GPT.loss, GPT.generate = next_token_loss, generate
function GPT:extra()
  local c = self.config
  return ("%s, width %d, %s, context %d, vocab %d"):format(some(c.layers, "layer"), c.width, some(c.heads, "head"), c.context, c.vocab)
end
M.gpt = GPT

--- nn.llama{ vocab, context, width, heads, kv_heads, layers, hidden, rope, eps, tied }
local Llama = class("llama")
function Llama:init(options)
  local c = defaults("llama", options, { vocab = 256, context = 256, width = 256, heads = 8, kv_heads = 2, layers = 4, hidden = 688, rope = 10000,
    eps = 1e-6, tied = false, dropout = 0 })
  rawset(self, "config", c)
  rawset(self, "context", c.context)
  local std, out_std = 0.02, 0.02 / math.sqrt(2 * c.layers)
  self.embed = layers.embedding(c.vocab, c.width, { std = std })
  local blocks = {}
  for i = 1, c.layers do
    blocks[i] = Block(layers.rms_norm(c.width, { eps = c.eps }),
      Attention(c.width, c.heads, { bias = false, kv_heads = c.kv_heads, rope = c.rope, std = std, out_std = out_std }),
      layers.rms_norm(c.width, { eps = c.eps }), SwiGLU(c.width, c.hidden, { std = std, out_std = out_std }), c.dropout)
  end
  self.blocks = layers.list(blocks)
  self.norm = layers.rms_norm(c.width, { eps = c.eps })
  if not c.tied then self.head = layers.linear(c.width, c.vocab, { bias = false, std = std }) end
end
function Llama:forward(ids)
  local x = self.embed(ids)
  x = through(self.blocks, self.norm, x)
  local head = rawget(self, "head")
  if head then return head(x) end
  return x:linear(self.embed.weight)
end
Llama.loss, Llama.generate = next_token_loss, generate
function Llama:extra()
  local c = self.config
  return ("%s, width %d, %s over %d, vocab %d"):format(some(c.layers, "layer"), c.width, some(c.heads, "head"), c.kv_heads, c.vocab)
end
M.llama = Llama

-- ------------------------------------------------------------------ encoder

--- nn.bert{ vocab, context, width, heads, layers, dropout }: logits [B x T x V] for masked tokens. Post-norm residuals as in BERT.
local BertBlock = class("bert_block")
function BertBlock:init(c)
  self.attn = Attention(c.width, c.heads, { causal = false, std = 0.02 })
  self.norm1 = layers.layer_norm(c.width, { eps = c.eps })
  self.mlp = MLP(c.width, 4 * c.width, { std = 0.02, gelu = "erf" })
  self.norm2 = layers.layer_norm(c.width, { eps = c.eps })
  self.drop = layers.dropout(c.dropout)
end
function BertBlock:forward(x)
  x = add_and_norm(self.norm1, x, self.drop(self.attn(x)))
  return (add_and_norm(self.norm2, x, self.drop(self.mlp(x))))
end

local Bert = class("bert")
function Bert:init(options)
  local c = defaults("bert", options, { vocab = 257, context = 128, width = 128, heads = 4, layers = 2, dropout = 0, eps = 1e-12 })
  rawset(self, "config", c)
  rawset(self, "context", c.context)
  self.wte = layers.embedding(c.vocab, c.width, { std = 0.02 })
  self.wpe = layers.embedding(c.context, c.width, { std = 0.02 })
  self.norm = layers.layer_norm(c.width, { eps = c.eps })
  self.drop = layers.dropout(c.dropout)
  local blocks = {}
  for i = 1, c.layers do blocks[i] = BertBlock(c) end
  self.blocks = layers.list(blocks)
  self.transform = layers.linear(c.width, c.width, { std = 0.02 })
  self.transform_norm = layers.layer_norm(c.width, { eps = c.eps })
  self:parameter("head_bias", tensor.zeros(c.vocab, { keep = true }), "linear")
end
function Bert:forward(ids)
  local T = ids:size(-1)
  want_context(self, T)
  local x = self.drop(self.norm(self.wte(ids) + self.wpe(places(T))))
  for _, block in ipairs(self.blocks) do x = block(x) end
  x = self.transform_norm(self.transform(x):gelu())
  return x:linear(self.wte.weight, self.head_bias)
end
--- Mean cross entropy over the masked places: targets are -100 everywhere else.
function Bert:loss(ids, targets) return tensor.cross_entropy(self(ids), targets) end
function Bert:extra()
  local c = self.config
  return ("%s, width %d, %s, vocab %d"):format(some(c.layers, "layer"), c.width, some(c.heads, "head"), c.vocab)
end
M.bert = Bert

return M
