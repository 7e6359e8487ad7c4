-- Mixture of experts: a gate sends every token to its k best experts, each a small feed-forward module, and their answers are added by
-- the gate's weights. Only the chosen experts compute. Every expert is a group of its own for policies ("blocks.1.mlp.experts.3").
-- experts_over divides them over the ranks of a group (experts.lua).
-- Shapes: N tokens, C width, E experts, k of them for each token.
local M_ffi = require "engine.base.ffi"
local tensor = require "engine.tensor.tensor"
local divided = require "engine.nn.experts"
local module = require "engine.nn.module"
local layers = require "engine.nn.layers"

local raise = M_ffi.raise

local MoE = module.class("moe")
local KNOWN = { width = true, hidden = true, experts = 8, top_k = 2, expert = true, std = true, experts_over = true, dispatch = true, combine = true }

--- nn.moe{ width, hidden (4 width), experts (8), top_k (2), expert = function(index) -> module, std }: x [.. x C] -> [.. x C].
--- Of several ranks: experts_over = engine.ranks.group() (all) or .group(n), dispatch and combine ("own"), the formats of what goes round.
--- After a forward pass `counts` says how many tokens each expert got (of all ranks of its group), and `balance` is a scalar to be added to the loss with a
--- small weight: E * sum of (share of tokens * mean probability), 1 when all experts are used alike.
function MoE:init(options)
  options = tensor.read_named(options, "nn.moe", KNOWN)
  local width, count, k = options.width, options.experts or 8, options.top_k or 2
  for name, value in pairs { width = width or 0, experts = count, top_k = k } do
    if type(value) ~= "number" or value % 1 ~= 0 or value < 1 then
      raise("nn.moe: expected %s as a whole number of 1 or more, got %s", name, M_ffi.value_text(options[name]))
    end
  end
  if options.expert ~= nil and type(options.expert) ~= "function" then
    raise("nn.moe: expected expert as a function(index), got %s", M_ffi.value_text(options.expert))
  end
  if k > count then raise("nn.moe: top_k = %d of %d experts", k, count) end
  local MLP = require("engine.nn.transformer").mlp
  local make = options.expert or function() return MLP(width, options.hidden or 4 * width, { std = options.std }) end
  rawset(self, "width", width)
  rawset(self, "k", k)
  rawset(self, "total", count)
  self.gate = layers.linear(width, count, { bias = false, std = options.std })
  rawset(self.gate, "_high", true)                                                    -- no FP8 recipe touches it
  local experts, over = {}, divided.new(count, options)
  for e = 1, count do
    experts[e] = make(e)
    rawset(experts[e], "_group", true)
    if over then over:made(e, experts[e]) end
  end
  rawset(self, "_apart", over)
  self.experts = layers.list(experts)
end

local function index(list) return tensor.tensor(list, { dtype = "i64", keep = false }) end

function MoE:forward(x)
  local E, k, rows = self.total, self.k, x:reshape(-1, self.width)                    -- [N x C]
  local N = rows:size(1)
  local chance = self.gate(rows):to("f32"):softmax()                                  -- [N x E]
  local weight, chosen = chance:topk(k)                                               -- [N x k], [N x k]
  weight = weight / weight:sum(-1, true)
  local at, places, slot = {}, {}, 0                                                  -- by expert: its tokens; where each answer goes
  for e = 1, E do at[e], places[e] = {}, {} end
  for n, list in ipairs(chosen:totable()) do
    for _, e in ipairs(list) do
      table.insert(at[e + 1], n - 1)
      table.insert(places[e + 1], slot)
      slot = slot + 1
    end
  end
  local order, tokens, counts, share = {}, {}, {}, {}
  for e = 1, E do
    counts[e], share[e] = #at[e], #at[e] / (N * k) * E
    for _, place in ipairs(places[e]) do order[#order + 1] = place end
    for _, n in ipairs(at[e]) do tokens[#tokens + 1] = n end
  end
  local answers                                                                       -- [N k x C], by expert
  if self._apart then answers = self._apart:answers(rows:index_select(1, index(tokens)), counts, self.experts)
  else
    local parts = {}
    for e = 1, E do
      if counts[e] > 0 then parts[#parts + 1] = self.experts[e](rows:index_select(1, index(at[e]))) end
    end
    answers = #parts > 1 and tensor.concat(parts, 1) or parts[1]
  end
  local back = {}
  for from, place in ipairs(order) do back[place + 1] = from - 1 end
  local y = answers:index_select(1, index(back))
  y = (y:view(N, k, self.width) * weight:view(N, k, 1)):sum(2):to(x.dtype)            -- [N x C]
  rawset(self, "counts", counts)
  rawset(self, "balance", (chance:mean(1) * tensor.tensor(share, { keep = false })):sum())
  return y:view(x.shape)
end

--- Where experts are divided over ranks: what was sent since this was called last, { out = { bytes =, snr = }, back = { ... } } (experts.lua);
--- the first call begins to measure. Else nil.
function MoE:sent() return self._apart and self._apart:measure() or nil end
function MoE:extra() return ("%d experts, %d a token"):format(self.total, self.k) end

return { moe = MoE }
