-- Mixture of experts: a gate sends every token to its k best experts, each a small feed-forward
-- module, and their outputs are summed with the gate's weights. Only the chosen experts run. Every
-- expert is a separate group for policies ("blocks.1.mlp.experts.3"). `experts_over` divides the
-- experts over the ranks of a group (experts.lua). Shapes: N tokens, C width, E experts, k of them
-- for each token. Called by scripts and models.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local divided = require "engine.nn.experts"
local layers = require "engine.nn.layers"
local module = require "engine.nn.module"
local tensor = require "engine.tensor.tensor"
local transformer = require "engine.nn.transformer"

local expect, raise, raise_if, want_whole = M_ffi.expect, M_ffi.raise, M_ffi.raise_if,
  arguments.want_whole

--- nn.moe { width, hidden = 4 * width, experts = 8, top_k = 2, expert = function(index) -> module,
--- std }: x [.. x C] -> [.. x C]. std: the standard deviation of the initial weights. experts_over:
--- a group of ranks over which the experts are divided, engine.ranks.group() (all ranks) or
--- engine.ranks.group(n). With such a group, dispatch ("own" | "fp32" | "bf16" | "fp8") is the
--- format in which rows are sent to experts, and combine ("own" | "fp32" | "bf16") is the format in
--- which outputs are sent back. After a forward pass, the field `counts` has the number of tokens
--- of each expert (over all ranks of the group). The field `balance` is a scalar to add to the loss
--- with a small weight: E times the sum, over the experts, of (share of tokens * mean probability),
--- for this rank's tokens. The scalar is 1 when all experts get equal shares.
local MoE = module.class("moe")
function MoE:init(options)
  options = tensor.read_named(options, "nn.moe",
    "width hidden experts top_k expert std experts_over dispatch combine")
  local width, count, k = options.width, options.experts or 8, options.top_k or 2
  want_whole(width, "nn.moe", "width", 1)
  want_whole(count, "nn.moe", "experts", 1)
  want_whole(k, "nn.moe", "top_k", 1)
  expect(options.expert == nil or type(options.expert) == "function", options.expert,
    "nn.moe: expected expert to be a function(index)")
  raise_if(k > count, "nn.moe: expected top_k to be at most %d, the number of experts, got %d",
    count, k)
  local make = options.expert or function()
    return transformer.mlp(width, options.hidden or 4 * width, { std = options.std })
  end
  self.width, self.k, self.total = width, k, count
  self.gate = layers.linear(width, count, { bias = false, std = options.std })
  rawset(self.gate, "_high", true)                            -- FP8 recipes skip the gate
  local experts, over = {}, divided.new(count, options)
  for e = 1, count do
    experts[e] = make(e)
    expect(module.is_module(experts[e]), experts[e],
      "nn.moe: expected expert(%d) to return a module", e)
    rawset(experts[e], "_group", true)
    if over then over:made(e, experts[e]) end
  end
  self._apart = over
  self.experts = layers.list(experts)
end

local function index(list) return tensor.tensor(list, { dtype = "i64", keep = false }) end

-- `chosen` [N x k]: the experts (from 0) of each token. Returns two lists. The first has a list of
-- tokens (from 0) for each expert. The second says which row (from 0) of the outputs, in expert
-- order, belongs to which choice: entry n * k + i + 1 is the row for choice i of token n (both from
-- 0).
local function route(chosen, experts, k)
  local slots, tokens, back, slot, row = {}, {}, {}, 0, 0
  for e = 1, experts do slots[e], tokens[e] = {}, {} end
  for _, list in ipairs(chosen:totable()) do
    for _, e in ipairs(list) do
      table.insert(slots[e + 1], slot)
      slot = slot + 1
    end
  end
  for e = 1, experts do
    for i, s in ipairs(slots[e]) do
      tokens[e][i], back[s + 1] = math.floor(s / k), row
      row = row + 1
    end
  end
  return tokens, back
end

-- Runs the experts on rows [N x C]. Returns the outputs [N k x C] in expert order.
local function outputs(self, rows, tokens, counts)
  if self._apart then
    local all = {}
    for _, list in ipairs(tokens) do
      for _, n in ipairs(list) do all[#all + 1] = n end
    end
    return self._apart:outputs(rows:index_select(1, index(all)), counts, self.experts)
  end
  local parts = {}
  for e, list in ipairs(tokens) do
    if #list > 0 then parts[#parts + 1] = self.experts[e](rows:index_select(1, index(list))) end
  end
  return #parts > 1 and tensor.concat(parts, 1) or parts[1]
end

-- Runs the chosen experts on rows [N x C]. Returns their outputs [N x k x C], and a tensor [E] with
-- E times each expert's share of all N k choices. Sets self.counts.
local function run_experts(self, rows, chosen)
  local tokens, back = route(chosen, self.total, self.k)
  local counts, share = {}, {}
  for e, list in ipairs(tokens) do counts[e], share[e] = #list, #list / #back * self.total end
  local y = outputs(self, rows, tokens, counts):index_select(1, index(back))
  self.counts = counts
  return y:view(rows:size(1), self.k, self.width), tensor.tensor(share, { keep = false })
end

-- Returns the k largest probabilities in each row of chance [N x E], scaled to add up to 1, and the
-- indices (from 0) of their experts.
local function choose(chance, k)
  local weight, chosen = chance:topk(k)
  return weight / weight:sum(-1, true), chosen
end

-- Returns x [.. x C] as rows [N x C], N > 0.
local function rows_of(x, width)
  if x:size(-1) == width and x.count > 0 then return x:reshape(-1, width) end
  raise("expected x [.. x %d] with at least one token, got %s", width, tensor.shape_text(x.shape))
end

function MoE:forward(x)
  local rows = rows_of(x, self.width)                                        -- [N x C]
  local chance = self.gate(rows):to("f32"):softmax()                         -- [N x E]
  local weight, chosen = choose(chance, self.k)                              -- [N x k] both
  local y, share = run_experts(self, rows, chosen)                           -- [N x k x C], [E]
  rawset(self, "balance", (chance:mean(1) * share):sum())
  return (y * weight:unsqueeze(3)):sum(2):to(x.dtype):view(x.shape)
end

--- moe:sent(): for experts divided over ranks, measures the rows that this rank has sent since the
--- last call: { out = { bytes, snr }, back = { bytes, snr } } (see Experts:measure in experts.lua).
--- The first call starts the measurement. Returns nil if the experts are not divided.
function MoE:sent() return self._apart and self._apart:measure() or nil end
function MoE:extra() return ("%d experts, %d a token"):format(self.total, self.k) end

return { moe = MoE }
