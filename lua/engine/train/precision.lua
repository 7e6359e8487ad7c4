-- Precision recipes. A recipe is a table that says which number format each role has. The shipped
-- recipes are fp32, bf16, bf16_stochastic, bf16_kahan, fp16, and those of docs/fp8.md and
-- docs/microscaling.md; `engine help NAME` describes each of them. Users can write their own:
--   engine.trainer{ precision = { name = "mine", base = "fp16", residual = "f32" }, ... }
--   engine.trainer{ precision = { name = "mine", base = "fp8_current",
--     fp8 = { dy = { format = "e4m3" }, high = { "^blocks%.1%." } } }, ... }
-- Called by scripts, this folder and docs/contract.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fp8_recipe = require "engine.train.fp8_recipe"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local autograd = require "engine.tensor.autograd"

local C, dtype, expect, raise, value_text = M_ffi.C, M_ffi.dtype, M_ffi.expect, M_ffi.raise,
  M_ffi.value_text

local M = {}

-- The fields of a recipe:
--   base               the recipe whose fields a user's table changes; such a table must name one
--   weights            format in which the forward pass reads parameters; norms keep f32
--   masters            the weights that the optimizer updates. bf16 (for fused optimizers): the
--                      forward pass reads them too, and no f32 copy exists; norms keep f32
--   rounding           how new weights are rounded to bf16 masters. stochastic: up or down at
--                      random, unbiased; kahan: to nearest, and a bf16 buffer keeps the rounding
--                      error for the next update; nearest: small updates are lost, and training
--                      stalls
--   activations        inputs and outputs of matrix products, convolutions and attention
--   residual           the residual stream, which begins as the output of an embedding
--   norm               the output of layer, RMS and group norm (their statistics are always f32)
--   wide               softmax, exponentials, powers, losses, sums and means (WIDE in core/ops.def)
--   weight_gradients   the format of a parameter's gradient
--   norm_gradients     the format of a norm parameter's gradient
--   moments            the format of the optimizer's state
--   scaled             true: gradients need a loss scale
M.recipes = {
  fp32 = { weights = "f32", activations = "f32", residual = "f32", norm = "f32", wide = "f32",
    weight_gradients = "f32", norm_gradients = "f32", moments = "f32", scaled = false },
  -- bf16 has f32's range and needs no loss scale. Products are rounded once, and gradients are
  -- summed in f32.
  bf16 = { weights = "bf16", activations = "bf16", residual = "bf16", norm = "bf16", wide = "f32",
    weight_gradients = "f32", norm_gradients = "f32", moments = "f32", scaled = false },
  -- Gradients are stored in fp16: from 65520 on they become inf, and up to 2^-25 zero. The recipe
  -- therefore needs a loss scale.
  fp16 = { weights = "f16", activations = "f16", residual = "f16", norm = "f16", wide = "f32",
    weight_gradients = "f16", norm_gradients = "f32", moments = "f32", scaled = true },
}

-- Recipes whose weights are in bf16 alone: 2 bytes a weight instead of 6, or 4 with Kahan's
-- compensation.
for _, rounding in ipairs { "stochastic", "kahan" } do
  M.recipes["bf16_" .. rounding] = arguments.merged(M.recipes.bf16, { masters = "bf16",
    rounding = rounding })
end

-- FP8: linear layers multiply FP8 numbers; everything else is as in bf16. docs/fp8.md explains the
-- rules and accumulators. The fields of `fp8`:
--   x, w, dy  how a layer's input, its weight and the gradient of its output are quantized: tables
--             of the fields format, block and so on
--               format      e4m3, e5m2
--               block       tensor, row, column, 1x128, 128x128, { rows, columns }
--               rule        transformer_engine, deepseek, deepgemm, torchao, msamp
--               pow2        true: scales are powers of two
--               eps         a smaller amax counts as eps; each rule has its own default
--               margin      scales are multiplied by 2^margin; by default 0
--               stochastic  true: random rounding
--               keep        only in x: how the tape keeps x for the product dW:
--                           codes (the backward pass quantizes them again along the other
--                           dimension if blocks are not square), transposed (codes quantized along
--                           the other dimension in the forward pass), e5m6, swiglu (no copy of x:
--                           the tape keeps the FP8 inputs of the SwiGLU that made x, and x is
--                           recomputed)
--   forward, dgrad, wgrad   the products: tables of the fields accumulator, promotion and so on
--               accumulator  device (hopper on a card, fp32 elsewhere), fp32, exact, hopper, e4m3
--               promotion    how many products along K are summed before each promotion to f32; 0:
--                            no promotion
--             With microscaling (docs/microscaling.md), x, w and dy all have one of the following
--             rules, usually with the blocks given here: floor, ceil, even, rceil or quest with
--             blocks of 1x32; nvfp4, four_over_six or four_over_six_mse with 1x16 or 16x16; ms_eden
--             with 1x16; msamp_fp4 with row. dy may be in FP8 instead, in square blocks or one
--             block, with the rule msamp or with pow2 = true. Formats may also be e2m1, e2m3, e3m2,
--             mxint8. stochastic may be a number of random bits; true stands for 8. All three
--             products have the same accumulator: fp32 (sums exact bf16 products), blackwell (sums
--             products of codes) or device (blackwell where a card's tensor cores compute it, else
--             fp32). Roles also have
--               factor      multiplies elements before rounding; the product is divided by it
--               average     only in w: a number such as 0.9983, the decay of a weight's average
--                           over steps. Each weight is rounded up or down, to the code nearer to
--                           its average (Q-EMA). The averages take 4 bytes a weight
--               backward    only in x and w: how the backward product quantizes the values that
--                           the forward product read. It is a table like a role, or "same": the
--                           backward product reads these values as they are
--             With the rule msamp_fp4, roles also have
--               clamp       a quantile such as 0.99: clamps each row to the range from its 0.01
--                           quantile to its 0.99 quantile
--               residual    false: what clamping cuts off is lost, not added in bf16
--               estimator   for w: "dge" multiplies the weight's gradient by the slope of a smooth
--                           step function ("straight": by 1)
--             Products also have
--               hadamard    16, 32, 64, 128: transforms both factors along the summed dimension; 0
--                           (the default): no transform
--               signs       fixed (Transformer Engine's), layer (drawn for each layer), step (drawn
--                           in each step), backward (drawn in each backward pass), none
--   high_first, high_last   how many first and last blocks of the model stay in high precision; by
--                           default 0
--   high      patterns of modules that stay in high precision. Tied heads, the gates of nn.moe,
--             norms, embeddings and attention itself always do
--   layers    { { match = pattern, high =, x =, w =, .. } .. }: changes for some layers; a later
--             match overrides the fields of an earlier one
--   forward   with microscaling, also { high = true }: the forward product is in high precision
--   ladder    the recipes between a layer's own recipe and high precision that policies can choose,
--             lowest first. An entry is a recipe's name ("mxfp8"), or a table of changes to the
--             layer's fields: { forward = { high = true } }
--   policy    an FP8 policy or a list of them (fp8_sites.lua): fp8_delayed, fp8_fallback,
--             fp8_lm, layer_ladder, forward_high_before_decay, sqrt3
--   sample    steps between measurements of SNR, underflow and the like, by default 100; 0: no
--             measurements
local HYBRID = { x = { format = "e4m3" }, w = { format = "e4m3" }, dy = { format = "e5m2" },
  high = { "^head", "^lm_head" } }
local function hybrid(more) return arguments.merged(HYBRID, more) end
-- Returns the recipe bf16 with the table `fp8`. source: the project or the authors whose recipe
-- this is, and their paper.
local function like_bf16(source, fp8, moments)
  return arguments.merged(M.recipes.bf16, { moments = moments, source = source, fp8 = fp8 })
end
-- Transformer Engine's DelayedScaling and Float8CurrentScaling: e4m3 forward, e5m2 gradients, fast
-- accumulation (no promotion) in the forward product.
local FAST = { forward = { promotion = 0 }, dgrad = { promotion = 128 },
  wgrad = { promotion = 128 } }
M.recipes.fp8_delayed = like_bf16("Transformer Engine's DelayedScaling",
  hybrid(arguments.merged(FAST, { policy = "fp8_delayed" })))
M.recipes.fp8_current = like_bf16("Transformer Engine's Float8CurrentScaling", hybrid(FAST))
-- torchao's rowwise scaling: e4m3 throughout, with a scale for each row of x, W and dy. If a
-- product reads one of these transposed, the transpose is quantized separately, with a scale for
-- each of its own rows.
local ROW = { format = "e4m3", block = "row", rule = "torchao" }
M.recipes.fp8_rowwise = like_bf16("torchao's rowwise scaling", { x = { format = "e4m3",
  block = "row", rule = "torchao", keep = "transposed" }, w = ROW, dy = ROW, high = HYBRID.high })
-- DeepSeek-V3: e4m3 throughout, with blocks of 1x128 for activations and gradients and of 128x128
-- for weights, each scaled by its current amax. Sums are promoted after every 128 products along K.
-- Moments are bf16. FP8 copies of the weights exist in addition to the f32 masters. The input of
-- the linear layer after attention is kept in e5m6 with power-of-two scales. SwiGLU's inputs are
-- kept in FP8, and its output is recomputed from them.
local PROMOTED = { promotion = 128 }
M.recipes.fp8_block = like_bf16("DeepSeek-V3, arXiv 2412.19437", {
  x = { format = "e4m3", block = "1x128", rule = "deepgemm" },
    w = { format = "e4m3", block = "128x128", rule = "deepgemm" },
  dy = { format = "e4m3", block = "1x128", rule = "deepgemm" }, forward = PROMOTED,
    dgrad = PROMOTED, wgrad = PROMOTED,
  high = HYBRID.high, layers = { { match = "attn%.out$", x = { keep = "e5m6" } },
    { match = "%.down$", x = { keep = "swiglu" } } },
}, "bf16")

-- Transformer Engine's Float8BlockScaling: fp8_block's formats and blocks, with scales that are
-- powers of two. The transposed copies of inputs are quantized in the forward pass, from the
-- original numbers.
local function te_blocks(block, keep)
  return { format = "e4m3", block = block, rule = "transformer_engine", pow2 = true, keep = keep }
end
M.recipes.fp8_block_te = like_bf16("Transformer Engine's Float8BlockScaling", {
  x = te_blocks("1x128", "transposed"), w = te_blocks "128x128", dy = te_blocks "1x128",
  forward = PROMOTED, dgrad = PROMOTED, wgrad = PROMOTED, high = HYBRID.high })

-- The next recipes use OCP's MX formats with the rule of cuBLAS and Transformer Engine, and NVFP4
-- as in Transformer Engine, with its Hadamard transform. Gradients in FP4 are rounded
-- stochastically.
local function microscaled(source, x, w, dy, more)
  return like_bf16(source, arguments.merged({ x = x, w = w, dy = dy, high = HYBRID.high }, more))
end
local function e2m1(rule, block, more)
  return arguments.merged({ format = "e2m1", rule = rule, block = block }, more)
end
local STOCHASTIC = { stochastic = true }
local MXFP8 = { format = "e4m3", block = "1x32", rule = "rceil" }
M.recipes.mxfp8 = microscaled("Transformer Engine's MXFP8BlockScaling", MXFP8, MXFP8, MXFP8)
local MXFP4 = e2m1("rceil", "1x32")
M.recipes.mxfp4 = microscaled("OCP MX 1.0", MXFP4, MXFP4, e2m1("rceil", "1x32", STOCHASTIC))
local NVFP4_DY = e2m1("nvfp4", "1x16", STOCHASTIC)
M.recipes.nvfp4 = microscaled("Transformer Engine's NVFP4BlockScaling, arXiv 2509.25149",
  e2m1("nvfp4", "1x16"), e2m1("nvfp4", "16x16"), NVFP4_DY, { wgrad = { hadamard = 16 } })
-- Transformer Engine's 4over6 for inputs and weights. Transformer Engine does not combine it with
-- the Hadamard transform.
M.recipes.nvfp4_four_over_six = microscaled("Transformer Engine's NVFP4BlockScaling, 4over6",
  e2m1("four_over_six", "1x16"), e2m1("four_over_six", "16x16"), NVFP4_DY)
-- Tseng et al. (arXiv 2502.20586): the forward product is in bf16. The backward products are in
-- MXFP4, with stochastic rounding that cannot saturate, under a random Hadamard transform.
local UNCLIPPED = e2m1("floor", "1x32", { stochastic = 24, factor = 0.75 })
local RANDOM = { hadamard = 64, signs = "step" }
M.recipes.mxfp4_tseng = microscaled("Tseng et al., arXiv 2502.20586", UNCLIPPED, UNCLIPPED,
  UNCLIPPED, { forward = { high = true }, dgrad = RANDOM, wgrad = RANDOM })
-- Quartet (arXiv 2505.14669): QuEST's scales under a Hadamard transform in the forward pass. In the
-- backward pass, dy and the values that the forward product read are rounded as in Tseng et al.
local QUEST = e2m1("quest", "1x32", { backward = UNCLIPPED })
local REDRAWN = { hadamard = 32, signs = "backward" }
M.recipes.mxfp4_quartet = microscaled("Quartet, arXiv 2505.14669", QUEST, QUEST, UNCLIPPED,
  { forward = { hadamard = 32, signs = "none" }, dgrad = REDRAWN, wgrad = REDRAWN })
-- Quartet II (arXiv 2601.22813): four over six by squared errors in the forward pass. In the
-- backward pass, MS-EDEN rounds dy and the values that the forward product read.
local EDEN = e2m1("ms_eden", "1x16", { stochastic = 24 })
local SQUARES = e2m1("four_over_six_mse", "1x16", { backward = EDEN })
local REDRAWN_128 = { hadamard = 128, signs = "backward" }
M.recipes.nvfp4_quartet2 = microscaled("Quartet II, arXiv 2601.22813", SQUARES, SQUARES, EDEN,
  { dgrad = REDRAWN_128, wgrad = REDRAWN_128 })
-- TetraJet (arXiv 2502.20853): MXFP4 rounded to nearest in the forward pass. In the backward pass,
-- dy and the values that the forward product read are rounded stochastically. With Q-EMA, weights
-- are rounded toward their average over steps, so that they oscillate less between two codes.
local TETRAJET = e2m1("rceil", "1x32", { backward = e2m1("rceil", "1x32", { stochastic = 24 }) })
M.recipes.mxfp4_tetrajet = microscaled("TetraJet, arXiv 2502.20853, without Q-EMA and Q-Ramping",
  TETRAJET, TETRAJET, TETRAJET.backward)
M.recipes.mxfp4_tetrajet_q_ema = microscaled("TetraJet with Q-EMA, arXiv 2502.20853", TETRAJET,
  arguments.merged(TETRAJET, { average = 0.9983 }), TETRAJET.backward)

-- Microsoft's FP4 (arXiv 2501.17116), with the rules of MS-AMP. Each row of x and W is in e2m1 with
-- a power-of-two scale; dy is in e5m2 with one scale. The largest and smallest 1 % of each row of x
-- are clamped; the part that clamping cuts off is added to the quantized x in bf16. The backward
-- products read the same x and W as the forward product. DGE multiplies the gradient of W.
M.recipes.fp4_microsoft = microscaled("Microsoft's FP4, arXiv 2501.17116",
  { rule = "msamp_fp4", clamp = 0.99, backward = "same" },
  { rule = "msamp_fp4", estimator = "dge", backward = "same" }, { format = "e5m2", rule = "msamp" })

local FORMATS = {
  weights = "f32 f16 bf16", activations = "f32 f16 bf16", residual = "f32 f16 bf16",
    norm = "f32 f16 bf16", wide = "f32 f16 bf16",
  weight_gradients = "f32 f16 bf16", norm_gradients = "f32 f16 bf16", moments = "f32 bf16",
  masters = "f32 bf16", rounding = "nearest stochastic kahan",
}

-- The fields of a recipe: those of FORMATS and others.
local OTHER_FIELDS = arguments.set_of "name base scaled fp8"
local FIELDS = arguments.merged(FORMATS, OTHER_FIELDS)

local function find(name)
  local found = M.recipes[name]
  if found then return found end
  raise("there is no precision %s%s", value_text(name),
    nearest.choices(name, M.recipes, "precisions"))
end

--- Returns the names of the recipes in alphabetical order.
function M.names() return nearest.keys(M.recipes) end

--- Returns the `fp8` tables of the recipes that have one, by name.
function M.fp8_tables()
  local tables = {}
  for name, recipe in pairs(M.recipes) do tables[name] = recipe.fp8 end
  return tables
end

-- Copies a value and the plain tables in it, so that a change does not reach the original. An
-- object (a table with a metatable) is not copied. seen: the copies made so far, because a table
-- may hold itself.
local function copy(value, seen)
  if type(value) ~= "table" or getmetatable(value) then return value end
  if not seen[value] then
    seen[value] = {}
    for key, part in pairs(value) do seen[value][key] = copy(part, seen) end
  end
  return seen[value]
end

-- Compares two values and the tables in them. seen[a][b]: the pairs of tables compared so far,
-- because a table may hold itself.
local function equal(a, b, seen)
  if type(a) ~= "table" or type(b) ~= "table" then return a == b end
  seen[a] = seen[a] or {}
  if seen[a][b] then return true end
  seen[a][b] = true
  for key in pairs(arguments.merged(a, b)) do
    if not equal(a[key], b[key], seen) then return false end
  end
  return true
end

-- Maps each full recipe that M.resolve made to the formats of operations under it (eng_precision),
-- or to false if the recipe changes no operation.
local formats_of = setmetatable({}, { __mode = "k" })

-- Returns the entry of formats_of for one full recipe.
local function operation_formats(full)
  if not full.fp8 and full.activations == "f32" and full.residual == "f32" and full.norm == "f32"
    and full.wide == "f32" then return false end
  return M_ffi.new("eng_precision", { dtype[full.activations], dtype[full.residual],
    dtype[full.norm], dtype[full.wide], full.fp8 and 1 or 0 })
end

-- Returns a value as text. Equal tables have equal texts.
local function canonical(value)
  if type(value) ~= "table" then return tostring(value) end
  local parts = {}
  for _, key in ipairs(nearest.keys(value)) do
    local own = value[key] == nil and tonumber(key) or key       -- keys() returns texts
    parts[#parts + 1] = key .. "=" .. canonical(value[own])
  end
  return "{" .. table.concat(parts, ",") .. "}"
end

-- Returns a checksum of a full recipe's formats and `fp8` table, without the name, the policies and
-- `sample`, as 8 hexadecimal digits.
local function checksum_of(full)
  local fp8 = full.fp8 and arguments.merged(full.fp8)
  if fp8 then fp8.policy, fp8.sample = nil, nil end
  local parts = { canonical(fp8) }
  for _, role in ipairs(nearest.keys(FORMATS)) do parts[#parts + 1] = tostring(full[role]) end
  local text = table.concat(parts, " ")
  return ("%08x"):format(C.eng_crc32c(0, text, #text))
end

--- Returns the full recipe for a name or a table (nil: fp32). Missing fields of a table come from
--- its `base`. The field `checksum` tells recipes of the same name apart (checksum_of).
function M.resolve(recipe)
  if formats_of[recipe] ~= nil then return recipe end
  if recipe == nil then recipe = "fp32" end
  if type(recipe) == "string" then
    find(recipe)
    recipe = { name = recipe, base = recipe }
  elseif type(recipe) ~= "table" or not next(recipe) then
    raise("precision: expected a name or a recipe table, got %s", type(recipe) == "table"
      and "an empty table" or value_text(recipe))
  end
  for _, field in ipairs { "name", "base" } do
    expect(recipe[field] == nil or type(recipe[field]) == "string", recipe[field],
      "precision: expected %s to be a string", field)
  end
  local problem = recipe.name and show.name_problem(recipe.name)
  if problem then raise("precision: the name %s %s", value_text(recipe.name), problem) end
  if recipe.base == nil then
    raise("precision '%s': expected base to name the recipe that this table changes, got " ..
      "nothing; precisions: %s", recipe.name or "custom", table.concat(M.names(), " "))
  end
  local base = find(recipe.base)
  local full = { name = recipe.name or "custom", base = recipe.base, scaled = base.scaled,
    source = recipe.name == recipe.base and base.source or nil, usual_high = HYBRID.high }
  if recipe.scaled ~= nil then
    expect(type(recipe.scaled) == "boolean", recipe.scaled, "precision '%s': expected scaled to " ..
      "be true or false (whether it needs a loss scale)", full.name)
    full.scaled = recipe.scaled
  end
  for role in pairs(FORMATS) do full[role] = recipe[role] or base[role] end
  full.masters = full.masters or "f32"
  full.rounding = full.rounding or full.masters == "bf16" and "stochastic" or "nearest"
  local where = ("precision '%s' (base %s): fp8"):format(full.name, recipe.base)
  if recipe.fp8 == false then full.fp8, full.own_fp8 = nil, false
  elseif recipe.fp8 ~= nil then
    expect(type(recipe.fp8) == "table", recipe.fp8,
      "precision '%s': expected fp8 to be a table, or false for none", full.name)
    full.own_fp8 = copy(recipe.fp8, {})
    full.fp8 = fp8_recipe.on_base(copy(base.fp8, {}), full.own_fp8, where)
  else full.fp8 = copy(base.fp8, {}) end
  if full.fp8 then fp8_recipe.check(full.fp8, M.fp8_tables(), where) end
  for key, value in pairs(recipe) do
    if not OTHER_FIELDS[key] then
      if not FORMATS[key] then
        raise("precision '%s': unknown field %s%s", full.name, value_text(key),
          nearest.choices(key, FIELDS, "fields"))
      end
      arguments.choose(arguments.set_of(FORMATS[key]), value, ("precision '%s'"):format(full.name),
        key .. " to be")
    end
  end
  if full.masters == "bf16" and full.weights ~= "bf16" then
    raise("precision '%s': masters in bf16 need weights in bf16, got %s", full.name, full.weights)
  elseif full.masters == "f32" and full.rounding ~= "nearest" then
    raise("precision '%s': rounding = '%s' needs masters = 'bf16', but the masters are f32",
      full.name, full.rounding)
  end
  full.checksum = checksum_of(full)
  formats_of[full] = operation_formats(full)
  return full
end

--- Returns whether two recipes have the same formats and equal `fp8` tables.
function M.same(a, b)
  a, b = M.resolve(a), M.resolve(b)
  for role in pairs(FORMATS) do
    if a[role] ~= b[role] then return false end
  end
  return equal(a.fp8, b.fp8, {})
end

--- Runs f(...) with a recipe and returns its results. Scopes nest. The recipe "fp32" converts
--- nothing, so operations that read bf16 masters, such as an embedding, compute in bf16. in_f32
--- makes them compute in f32.
function M.autocast(recipe, f, ...)
  local full = M.resolve(recipe)
  arguments.want_function(f, "autocast", [[engine.autocast("bf16", function() ... end)]])
  return autograd.in_formats(formats_of[full] or nil, f, ...)
end

--- Runs f(...) in f32 and returns its results. full: the recipe of the parameters. If its masters
--- are bf16, operations convert the weights that they read to f32.
function M.in_f32(full, f, ...)
  local f32 = dtype.f32
  return autograd.in_formats(full.masters == "bf16"
    and M_ffi.new("eng_precision", { f32, f32, f32, f32, 0 }) or nil, f, ...)
end

--- Returns three int32_t arrays with an element for each parameter of `list` ({ role = } ...): the
--- format of the parameter's low-precision copy and the format of its gradient, for
--- eng_params_precision, and the format of its master, for eng_params_masters.
function M.parameter_formats(full, list)
  local function array() return M_ffi.new("int32_t[?]", #list) end
  local shadow, gradient, masters = array(), array(), array()
  for i, p in ipairs(list) do
    local norm = p.role == "norm"
    -- an FP8 layer reads an FP8 copy of its matrix and needs no other low-precision copy
    local fp8 = full.fp8 and p.owner and rawget(p.owner, "_fp8") and p.tensor.ndim == 2
    masters[i - 1] = dtype[norm and "f32" or full.masters]
    shadow[i - 1] = (norm or fp8 or full.masters == "bf16") and dtype.f32 or dtype[full.weights]
    gradient[i - 1] = dtype[norm and full.norm_gradients or full.weight_gradients]
  end
  return shadow, gradient, masters
end

--- Describes a recipe in a few lines.
function M.describe(recipe)
  local full = M.resolve(recipe)
  local lines = { "precision " .. full.name
    .. (full.base ~= full.name and ", based on " .. full.base or "") }
  lines[2] = full.source and "  " .. full.source
  for _, role in ipairs { "weights", "masters", "rounding", "activations", "residual", "norm",
    "wide", "weight_gradients", "norm_gradients", "moments" } do
    lines[#lines + 1] = ("  %-17s %s"):format(role, full[role])
  end
  for _, row in ipairs(full.fp8 and fp8_recipe.describe(full.fp8) or {}) do
    lines[#lines + 1] = ("  %-17s %s"):format(row[1], row[2])
  end
  return table.concat(lines, "\n")
end

return M
