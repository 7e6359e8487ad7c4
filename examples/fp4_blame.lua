-- Which product makes FP4 training worse: forward, dgrad (dx) or wgrad (dW)? Linear layers written
-- by hand quantize the factors of one product, or of all three, to MXFP4 and multiply in bf16. On
-- wgrad, the study also compares stochastic rounding with nearest, and random Hadamard transforms
-- with fixed ones. For wgrad, Transformer Engine uses stochastic rounding and random transforms.
-- arXiv 2605.09825 found that neither of them helps wgrad, but that deterministic transforms do.
--
--   ./engine examples/fp4_blame.lua
--   ./engine examples/fp4_blame.lua seeds=5 steps=400 svg=blame.svg
--
-- Excess loss over bf16, measured with the first command, mean +- standard deviation of 3 seeds:
--   forward +2.07 +- 0.97 %        wgrad, stochastic          +0.15 +- 0.54 %
--   dgrad   +0.83 +- 0.80 %        wgrad, fixed Hadamard      +0.03 +- 0.48 %
--   wgrad   +0.25 +- 0.56 %        wgrad, random Hadamard     +0.63 +- 0.76 %
--   all     +2.30 +- 0.46 %        wgrad, stochastic, random  +0.57 +- 0.61 %
-- In 120 steps the forward product harms most, not wgrad. With every seed, stochastic rounding is
-- better than nearest on wgrad, and random signs are worse than fixed signs. Nothing diverges at
-- this size, so the study does not show what makes large runs diverge.
local engine = require "engine"
local lab = require "engine.report.lab"

local cfg = engine.config({ seeds = 3, steps = 120, batch = 8, context = 64, width = 64, layers = 2,
  lr = 3e-3, variants = "", svg = "" }, { seeds = "runs of each variant, with seeds from 1",
  steps = "steps of each run", batch = "sequences per step", context = "bytes per sequence",
  width = "features per byte, a multiple of 32", layers = "blocks", lr = "peak learning rate",
  variants = "a Lua pattern of variants to run beside bf16; empty: all",
  svg = "a file for the curves" },
  { count = "seeds steps batch context width layers", positive = "lr", output = "svg",
    pattern = "variants" })
if cfg.width % 32 ~= 0 or cfg.batch * cfg.context % 32 ~= 0 then
  engine.config.fail("expected a width and a batch * context that are multiples of 32, got %d "
    .. "and %d", cfg.width, cfg.batch * cfg.context)
end

-- forward, dgrad, wgrad: products whose factors are quantized; sr: gradients are rounded
-- stochastically; hadamard, signs: the size and the signs of the Hadamard transform of wgrad's
-- factors.
local VARIANTS = { { "bf16" }, { "forward", forward = true }, { "dgrad", dgrad = true },
  { "wgrad", wgrad = true }, { "dgrad, stochastic", dgrad = true, sr = true },
  { "wgrad, stochastic", wgrad = true, sr = true },
  { "wgrad, fixed Hadamard", wgrad = true, hadamard = 32, signs = 0 },
  { "wgrad, random Hadamard", wgrad = true, hadamard = 32, signs = "drawn" },
  { "wgrad, stochastic, random", wgrad = true, sr = true, hadamard = 32, signs = "drawn" },
  { "all", forward = true, dgrad = true, wgrad = true },
  { "all, stochastic", forward = true, dgrad = true, wgrad = true, sr = true } }

local draws = 0     -- selects the random signs; grows by 1 in the backward pass of each layer

-- Returns x [M x K], quantized along its rows, as bf16. With `turned`, quantizes x along its
-- columns, after the Hadamard transform of variant `o` if it has one, and transposes it to [K x M].
local function fp4(x, o, turned, stochastic)
  local q = engine.mx.quantize(x, { format = "e2m1", rule = "rceil", transposed = turned,
    sr_bits = stochastic and 8 or 0, hadamard = turned and o.hadamard or nil,
    signs = turned and (o.signs == "drawn" and draws or o.signs) or nil })
  return (turned and q.transposed or q):dequantize("bf16")
end

-- Returns the function y = x W^T + b, in which the products that variant `o` names have factors in
-- MXFP4.
local function product(o)
  return engine.custom {
    forward = function(saved, x, w, bias)
      saved.x, saved.w = x:view(-1, w.shape[2]):to("bf16"), w:to("bf16")
      saved.shape, saved.dtype = x.shape, x.dtype
      local a, b = saved.x, saved.w
      if o.forward then a, b = fp4(a, o), fp4(b, o) end
      local shape = x.shape
      shape[#shape] = w.shape[1]
      local y = a:matmul(b, false, true)
      return (bias and y + bias:to("bf16") or y):view(unpack(shape))
    end,
    backward = function(saved, dy)
      dy = dy:view(-1, dy.shape[#dy.shape]):to("bf16")
      local a, b = dy, saved.w
      if o.dgrad then a, b = fp4(dy, o, false, o.sr), fp4(saved.w, o, true):transpose(1, 2) end
      local dx = a:matmul(b):view(unpack(saved.shape)):to(saved.dtype)
      a, b = dy, saved.x
      draws = draws + 1
      if o.wgrad then
        a, b = fp4(dy, o, true, o.sr):transpose(1, 2), fp4(saved.x, o, true):transpose(1, 2)
      end
      return dx, a:to("f32"):matmul(b:to("f32"), true), dy:to("f32"):sum(1)
    end,
  }
end

local text = lab.text(120000)
local cut = #text - 12000
local train_text, test_text = text:sub(1, cut), text:sub(cut + 1)

-- Makes the linear layers of the transformer blocks compute their products as variant `o` does.
local function replace_layers(model, o)
  local linear = product(o)
  draws = 1
  model:apply(function(layer, path)
    if layer._class == "linear" and path:find("^blocks") then
      rawset(layer, "forward", function(l, x) return linear(x, l.weight, rawget(l, "bias")) end)
    end
  end)
end

local chosen, series, names, excess = {}, {}, {}, {}
for _, o in ipairs(VARIANTS) do
  if o[1] == "bf16" or o[1]:find(cfg.variants) then chosen[#chosen + 1] = o end
end
local results = lab.by_seed(chosen, cfg.seeds, function(o, seed)
  return lab.train { sizes = cfg, seed = seed, precision = "bf16", text = train_text,
    held_out = test_text, change = function(model) replace_layers(model, o) end }
end)
for i, r in ipairs(results) do
  names[i], excess[r.name] = r.name, r.excess
  for seed, percent in ipairs(r.excess) do
    series[seed] = series[seed] or { name = "seed " .. seed, values = {} }
    series[seed].values[i] = percent
  end
end
lab.table({ "product in MXFP4", "held-out loss", "relative to bf16, by seed" },
  lab.loss_rows(results, "%+.2f"))

-- Returns words that compare the variants a and b. One counts as better than the other only if it
-- is better with every seed.
local function verdict(a, b)
  local less, more = excess[a] and excess[b], excess[a] and excess[b]    -- nil: one did not run
  for seed = 1, less and cfg.seeds or 0 do
    local d = excess[a][seed] - excess[b][seed]
    less, more = less and d < 0, more and d > 0
  end
  return cfg.seeds > 1 and (less and a .. " is better than " .. b
    or more and a .. " is worse than " .. b) or "no clear order of " .. a .. " and " .. b
end
local findings = {}
for _, pair in ipairs { { "wgrad", "dgrad" }, { "wgrad", "forward" },
  { "wgrad, stochastic", "wgrad" }, { "dgrad, stochastic", "dgrad" },
  { "wgrad, random Hadamard", "wgrad, fixed Hadamard" }, { "wgrad, fixed Hadamard", "wgrad" },
  { "all, stochastic", "all" } } do
  findings[#findings + 1] = verdict(pair[1], pair[2])
end
print("Conclusion, from orders that every seed confirms: " .. table.concat(findings, "; ") .. ".")
lab.svg(cfg.svg, { title = "Excess loss over bf16, %", x = names, y = "product in MXFP4",
  series = series })
