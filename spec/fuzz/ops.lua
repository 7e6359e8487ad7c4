-- Runs random operations: random shapes (empty, 1, six dimensions, mismatched), all dtypes, sliced,
-- transposed and expanded inputs, out-of-range attributes, absent and stale inputs, invalid
-- operation numbers; through engine.ffi's run, raw calls and tensor methods; with and without
-- recording and backward; on both devices and every instruction set. Checks: a call succeeds or
-- raises a string; both devices agree on which, and on shapes and dtypes of the outputs; the step's
-- memory is empty after every step. Writes outside a kernel's memory are found by the sanitizer
-- build of `make check`. With ENGINE_TEST_DEVICE=cuda the card is compared with the reference
-- instead, including values: bit for bit for operations that round at most once, within a tolerance
-- for others where all numbers are ordinary. Round i depends only on the seed and i. Usage: engine
-- spec/fuzz/ops.lua [seconds [seed [first round [rounds]]]]
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local tensor = require "engine.tensor.tensor"

local CARD = os.getenv("ENGINE_TEST_DEVICE")
local ffi, C, call = M_ffi.ffi, M_ffi.C, M_ffi.call
local seconds, seed, first, rounds = tonumber(arg[1]) or 20, tonumber(arg[2]) or 1, tonumber(arg[3])
  or 1, tonumber(arg[4]) or 1e9

-- ------------------------------------------------------------------ chance

local state = 0

--- Returns an integer in 0 .. n - 1.
local function draw(n)
  state = (state * 1103515245 + 12345) % 2 ^ 31
  return math.floor(state / 2 ^ 8) % n
end
local function chance(percent) return draw(100) < percent end
local function one_of(list) return list[draw(#list) + 1] end

local WILD_INTS = { 0LL, 1LL, -1LL, 2LL, -2LL, 3LL, 5LL, 6LL, 7LL, 8LL, 9LL, 31LL, 32LL, 63LL, 64LL,
  255LL, 256LL, 2147483647LL, 2147483648LL, -2147483648LL,
  4294967296LL, 9007199254740992LL, 4611686018427387904LL, 9223372036854775807LL,
  -9223372036854775807LL - 1LL }
local WILD_FLOATS = { 0, -0.0, 0.5, 1, -1, 2, 3, -0.5, 1e-8, 1e30, -1e30, 1e300, 5e-324, 1e-40,
  math.huge, -math.huge, 0 / 0, 2 ^ 31, 2 ^ 53, 2 ^ 63 }
local VALUES = { 0, -0.0, 1, -1, 2, 3, 0.5, -2.5, 65504, 65520, 1e-7, 6e-8, 3.4e38, -3.4e38, 1e-45,
  math.huge, -math.huge, 0 / 0, 127, 128, 255, 2 ^ 31, -2 ^ 63 }
local DTYPES = { "f32", "f32", "f32", "f16", "bf16", "f64", "u8", "i8", "i16", "i32", "i64", "bool",
  "e4m3", "e5m2" }
local FLOATS = { "f32", "f32", "f16", "bf16", "f64" }
local INTEGERS = { "i64", "i32", "i64", "u8", "i16", "i8" }
local SIZES = { 1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 0, 1, 2, 3 }

local function shape_of(least, most)
  local shape, count = {}, 1
  for d = 1, least + draw(most - least + 1) do
    local n = one_of(SIZES)
    if count * n > 5000 then n = 1 end
    shape[d], count = n, count * n
  end
  return shape
end

-- ------------------------------------------------------------------ tensors

--- Fills with ordinary numbers, sometimes mixed with special ones (inf, nan, extremes), sometimes
--- with special ones only.
local odd = false   -- set when special numbers were drawn; the caller clears it

local function fill(x)
  local kind = draw(4)
  odd = odd or kind == 3
  if x.count == 0 then return x end
  if kind == 3 then
    local values = ffi.new("double[?]", x.count)
    for i = 0, x.count - 1 do values[i] = one_of(VALUES) end
    M_ffi.check(C.eng_write(x, values, M_ffi.dtype.f64, x.count))
  elseif x.dtype == "e4m3" or x.dtype == "e5m2" then
    local bytes = ffi.new("uint8_t[?]", x.count)
    for i = 0, x.count - 1 do bytes[i] = draw(256) end
    M_ffi.check(C.eng_write(x, bytes, M_ffi.dtype[x.dtype], x.count))
  else
    x:uniform(-2, 2 + 4 * kind)
  end
  return x
end

--- A tensor of this shape with any memory layout.
local function tensor_of(shape, dtype)
  local n = #shape
  local how = draw(8)
  if how == 0 and n > 0 then                                  -- every other element of a larger one
    local d, larger = draw(n) + 1, {}
    for i = 1, n do larger[i] = shape[i] end
    larger[d] = 2 * shape[d] + 1
    if larger[d] > 1 then
      local x = fill(engine.zeros(larger, dtype))
      return M_ffi.run("slice", { x }, { d - 1, 1, 2 * shape[d] + (shape[d] > 0 and 0 or 1), 2 })
    end
  elseif how == 1 and n > 1 then                              -- transposed
    local turned = { unpack(shape) }
    turned[1], turned[n] = shape[n], shape[1]
    local order = {}
    for d = 1, n do order[d] = d - 1 end
    order[1], order[n] = n - 1, 0
    return M_ffi.run("permute", { fill(engine.zeros(turned, dtype)) }, order)
  elseif how == 2 and n > 0 then                              -- stride 0
    local small, list, d = { unpack(shape) }, { n }, draw(n) + 1
    small[d] = 1
    for i = 1, n do list[i + 1] = shape[i] end
    return M_ffi.run("expand", { fill(engine.zeros(small, dtype)) }, list)
  end
  return fill(engine.zeros(shape, dtype))
end

--- Integers in 0 .. n - 1, occasionally one outside.
local function index_of(shape, n, dtype)
  local x = engine.zeros(shape, dtype or one_of(INTEGERS))
  local values = ffi.new("double[?]", math.max(x.count, 1))
  for i = 0, x.count - 1 do values[i] = n > 0 and draw(n) or 0 end
  if x.count > 0 and chance(8) then
    values[draw(x.count)] = one_of { -1, n, n + 1, 2 ^ 31, 2 ^ 62, -2 ^ 63, -100 }
  end
  if x.count > 0 then M_ffi.check(C.eng_write(x, values, M_ffi.dtype.f64, x.count)) end
  return x
end

local function dim_of(shape) return chance(20) and draw(#shape) - #shape or draw(#shape) end
local function with(shape, d, n)
  local other = { unpack(shape) }
  other[d] = n
  return other
end
local function appended(shape, ...)
  local other = { unpack(shape) }
  for _, n in ipairs { ... } do other[#other + 1] = n end
  return other
end
local function outer(shape) return { unpack(shape, 1, #shape - 1) } end

-- ------------------------------------------------------------------ a sensible call of each operat

local function float(shape) return tensor_of(shape, one_of(FLOATS)) end
local function any(shape) return tensor_of(shape, one_of(DTYPES)) end
local function float_number() return M_ffi.dtype[one_of(FLOATS)] end

--- A shape that broadcasts with `shape`.
local function partner(shape)
  local other = { unpack(shape, 1 + draw(#shape + 1)) }
  for d = 1, #other do if chance(30) then other[d] = 1 end end
  return other
end

local plans = {}

local function binary() local s = shape_of(0, 6) return { any(s), any(partner(s)) } end
for _, name in ipairs { "add", "sub", "mul", "div", "pow", "maximum", "minimum", "eq", "ne", "lt",
  "le", "gt", "ge" } do
  plans[name] = binary
end
local function unary() return { float(shape_of(0, 6)) } end
for number, name in ipairs(M_ffi.op_names) do
  if C.eng_op_describe(number - 1).unary ~= 0 then plans[name] = unary end
end
for _, name in ipairs { "neg", "abs", "relu", "contiguous" } do
  plans[name] = function() return { any(shape_of(0, 6)) } end
end
local function rows() return { float(shape_of(1, 6)) } end
for _, name in ipairs { "softmax", "log_softmax", "logsumexp" } do plans[name] = rows end
for _, name in ipairs { "affine", "clamp" } do
  plans[name] = function()
    return { any(shape_of(0, 6)) }, {}, { one_of(WILD_FLOATS), one_of(WILD_FLOATS) }
  end
end
function plans.pow_scalar() return unary(), {}, { one_of(WILD_FLOATS) } end
function plans.dropout() return unary(), { draw(100), draw(2) }, { one_of { 0, 0.1, 0.5, 1 } } end
function plans.where()
  local s = shape_of(0, 6) return { tensor_of(partner(s), "bool"), any(s), any(partner(s)) }
end
local function pair() local s = shape_of(0, 6) return { float(s), float(s) } end
function plans.unary_grad()
  return pair(), { M_ffi.op[one_of { "neg", "abs", "exp", "tanh", "gelu", "silu", "relu",
    "rsqrt" }], float_number() }
end
plans.swiglu, plans.mse = pair, pair
function plans.swiglu_grad() local s = shape_of(0, 6) return { float(s), float(s), float(s) } end
function plans.softmax_grad()
  local s = shape_of(1, 6) return { float(s), float(s) }, { float_number() }
end
plans.log_softmax_grad = plans.softmax_grad
function plans.cast() return { any(shape_of(0, 6)) }, { M_ffi.dtype[one_of(DTYPES)] } end

function plans.reshape()
  local s = shape_of(0, 6)
  local count = 1
  for _, n in ipairs(s) do count = count * n end
  local to = chance(50) and { count } or { 1, -1, 1 }
  if #s > 1 and chance(50) then to = { s[1] * s[2], unpack(s, 3) } end
  return { any(s) }, { #to, unpack(to) }
end
function plans.permute()
  local s, order = shape_of(0, 6), {}
  for d = 1, #s do order[d] = d - 1 end
  for d = #s, 2, -1 do local k = draw(d) + 1; order[d], order[k] = order[k], order[d] end
  return { any(s) }, order
end
function plans.expand()
  local s = shape_of(0, 6)
  return { any(partner(s)) }, { #s, unpack(s) }
end
function plans.slice()
  local s = shape_of(1, 6)
  return { any(s) }, { dim_of(s), draw(6) - 2, draw(12) - 2, 1 + draw(3) }
end
function plans.split()
  local s = shape_of(1, 6)
  local d, n = draw(#s), 1 + draw(4)
  local sizes, sum = {}, 0
  for k = 1, n do sizes[k] = draw(4); sum = sum + sizes[k] end
  return { any(with(s, d + 1, sum)) }, { d, unpack(sizes) }, {}, n
end
function plans.concat()
  local s = shape_of(1, 6)
  local d, list = draw(#s), {}
  for k = 1, 1 + draw(5) do list[k] = any(with(s, d + 1, draw(4))) end
  return list, { d }
end
function plans.gather()
  local s = shape_of(1, 5)
  local d = draw(#s)
  return { any(s), index_of(with(s, d + 1, draw(5)), s[d + 1]) }, { d }
end
function plans.gather_grad()
  local s = shape_of(1, 5)
  local d = draw(#s)
  local picked = with(s, d + 1, draw(5))
  local ints = { d, unpack(s) }
  for k = #ints + 1, 14 do ints[k] = 0 end
  ints[14] = #s
  return { float(picked), index_of(picked, s[d + 1]) }, ints
end
function plans.index_select()
  local s = shape_of(1, 5)
  local d = draw(#s)
  return { any(s), index_of({ draw(6) }, s[d + 1]) }, { d }
end
function plans.index_select_grad()
  local s, n = shape_of(1, 5), draw(6)
  local d = draw(#s)
  local ints = { d, unpack(s) }
  for k = #ints + 1, 14 do ints[k] = 0 end
  ints[14] = #s
  return { float(with(s, d + 1, n)), index_of({ n }, s[d + 1]) }, ints
end
function plans.embedding()
  local v, c = 1 + draw(9), one_of(SIZES)
  return { any { v, c }, index_of(shape_of(0, 3), v) }
end
function plans.embedding_grad()
  local s, v = shape_of(0, 3), 1 + draw(9)
  return { float(appended(s, one_of(SIZES))), index_of(s, v) }, { v, float_number(), 0 }
end
function plans.topk() local s = shape_of(1, 6) return { any(s) }, { draw(s[#s] + 1) } end
function plans.argmax() local s = shape_of(1, 6) return { any(s) }, { dim_of(s), draw(2) } end
plans.argmin = plans.argmax
local function reduce() local s = shape_of(0, 6) return { any(s) }, { draw(2 ^ #s), draw(2) } end
plans.sum, plans.mean, plans.max, plans.min = reduce, reduce, reduce, reduce
function plans.extreme_grad()
  local s, mask, kept, keep = shape_of(0, 6), draw(64), {}, chance(50)
  mask = mask % 2 ^ #s
  for d, n in ipairs(s) do
    if bit.band(mask, 2 ^ (d - 1)) == 0 then
      kept[#kept + 1] = n
    elseif keep then kept[#kept + 1] = 1 end
  end
  return { float(s), float(kept), float(kept) }, { mask, 0 }
end
function plans.matmul()
  local batch, m, n, k = shape_of(0, 3), one_of(SIZES), one_of(SIZES), one_of(SIZES)
  local ta, tb = draw(2), draw(2)
  local a, b = appended(batch, m, k), appended(partner(batch), k, n)
  if ta == 1 then a[#a], a[#a - 1] = m, k end
  if tb == 1 then b[#b], b[#b - 1] = k, n end
  return { float(a), float(b) }, { ta, tb, chance(30) and float_number() + 1 or 0, 0 }
end
function plans.linear()
  local k, n = one_of(SIZES), one_of(SIZES)
  return { float(appended(shape_of(0, 4), k)), float { n, k }, chance(50) and float { n } or false }
end
function plans.mlp_gelu()
  local c, h, n = one_of(SIZES), one_of(SIZES), one_of(SIZES)
  return { float(appended(shape_of(0, 4), c)), float { h, c }, chance(50) and float { h } or false,
    float { n, h }, chance(50) and float { n } or false },
    {}, {}, 3
end
function plans.matmul_gelu_grad()
  local batch, h, n = shape_of(0, 4), one_of(SIZES), one_of(SIZES)
  return { float(appended(batch, n)), float { n, h }, float(appended(batch, h)) }
end
function plans.linear_grad()
  local batch = shape_of(0, 4)
  return { float(appended(batch, one_of(SIZES))), float(appended(batch, one_of(SIZES))) },
    { float_number(), float_number(), 0, 0 }, {}, 2
end
function plans.bias_grad() return { float(shape_of(1, 5)) }, { float_number(), 0 } end
function plans.layer_norm()
  local s = shape_of(1, 5)
  return { float(s), chance(60) and float { s[#s] } or false, chance(60) and float { s[#s] }
    or false }, {}, { one_of { 0, 1e-5, 1 } }, 3
end
function plans.layer_norm_grad()
  local s = shape_of(1, 5)
  return { float(s), chance(60) and float { s[#s] } or false, float(outer(s)), float(outer(s)),
    float(s) }, { float_number(), draw(2) }, {}, 3
end
function plans.rms_norm()
  local s = shape_of(1, 5)
  return { float(s), chance(60) and float { s[#s] } or false }, {}, { one_of { 0, 1e-5, 1 } }, 2
end
function plans.rms_norm_grad()
  local s = shape_of(1, 5)
  return { float(s), chance(60) and float { s[#s] } or false, float(outer(s)), float(s) },
    { float_number(), draw(2) }, {}, 2
end
-- with a residual: `branch` belongs to x, `dsum` to dy
local function added(plan, at, more)
  return function()
    local inputs, ints, floats, n_out = plan()
    table.insert(inputs, at or #inputs + 1, float(inputs[1].shape))
    return inputs, ints, floats, n_out + more
  end
end
plans.add_layer_norm, plans.add_rms_norm = added(plans.layer_norm, 2, 1),
  added(plans.rms_norm, 2, 1)
plans.add_layer_norm_grad, plans.add_rms_norm_grad = added(plans.layer_norm_grad, nil, 0),
  added(plans.rms_norm_grad, nil, 0)
local function attention_inputs()
  local b, t, s, g, d = draw(3), one_of { 0, 1, 2, 5, 17, 40 }, one_of { 0, 1, 3, 5, 18, 50 },
    1 + draw(3), one_of { 1, 2, 4, 7, 16, 20 }
  local h = g * draw(3)
  return float { b, t, h, d }, float { b, s, g, d }, float { b, s, g, d }, { b, t, h, d }
end
function plans.attention()
  local q, k, v = attention_inputs()
  local scale = one_of { 0, 0, 0.3, 1e30, -1 }
  odd = odd or scale == 1e30
  return { q, k, v }, { draw(2), draw(2) }, { scale }, 3
end
function plans.attention_grad()
  local q, k, v, s = attention_inputs()
  return { q, k, v, float(s), float { s[1], s[3], s[2] }, float(s) }, { draw(2), 0 },
    { one_of { 0, 0, 0.3 } }, 3
end
function plans.rope()
  return { float { draw(3), one_of { 0, 1, 3, 70 }, draw(4), 2 * draw(9) } },
    { one_of(WILD_INTS), draw(2), draw(2), one_of { 0, 0, 1, 8192, -3 } },
    { one_of { 10000, 1, 0.5, 1e300 }, one_of { 0, 8, 0.3 }, one_of { 1, 4 }, 4 }
end
function plans.cross_entropy()
  local s, v = shape_of(0, 3), 1 + draw(12)
  return { float(appended(s, v)), index_of(s, v) }, { one_of { -100, 0, 1 }, draw(3) },
    { one_of { 0, 0.1, 0.9 }, one_of { 0, 1e-3, 1e6 }, one_of { 0, 1, 30 } }, 2
end
function plans.cross_entropy_grad()
  local s, v, reduction = shape_of(0, 3), 1 + draw(12), draw(3)
  return { float(appended(s, v)), index_of(s, v), float(s), float(reduction == 0 and s or {}) },
    { one_of { -100, 0, 1 }, reduction },
    { one_of { 0, 0.1 }, one_of { 0, 1e-3, 1e6 }, one_of { 0, 1, 30 } }
end

local FP8 = { M_ffi.dtype.e4m3, M_ffi.dtype.e5m2 }
local function block() return one_of { 0, 1, 2, 5, 128 }, one_of { 0, 1, 3, 16, 128 } end
function plans.quantize()
  local high, wide = block()
  return { float(shape_of(1, 4)), high == 0 and wide == 0 and chance(30) and tensor_of({ 1 }, "f32")
    or false },
    { one_of { FP8[1], FP8[2], 12 }, high, wide, draw(5), draw(16), draw(100), 1 },
      { one_of { -1, 0, 1e-4 }, draw(3) }, 5
end
function plans.swiglu_quantize()
  local inputs, ints, floats, outputs = plans.quantize()
  table.insert(inputs, 2, float(shape_of(1, 4)))
  if chance(70) then inputs[2] = inputs[1] end
  return inputs, ints, floats, outputs
end
local function quantized(shape, high, wide)
  return M_ffi.run("quantize", { float(shape), false }, { one_of(FP8), high, wide, draw(5) },
    { -1, 0 }, 5)
end
function plans.dequantize()
  local high, wide = block()
  local q, scale = quantized(shape_of(1, 4), high, wide)
  return { q, scale }, { float_number(), high, wide, 0 }
end
local MX = { 10, 11, 13, 14, 15, 16 }
local function mx_ints()
  local rule = draw(5)
  return rule == 4 and 13 or one_of(MX), one_of { 1, 2, 16 }, one_of { 2, 16, 32, 3 }, rule
end
function plans.mx_quantize()
  local format, high, wide, rule = mx_ints()
  return { float(shape_of(1, 4)), chance(20) and tensor_of({ 1 }, "f32") or false },
    { format, high, wide, rule, 8 * draw(8), chance(30) and draw(26) or 0, draw(100), 1 }, {}, 6
end
function plans.mx_dequantize()
  local format, high, wide, rule = mx_ints()
  local shape = shape_of(1, 4)
  shape[#shape] = 2 * shape[#shape]
  local q, scale, amax = M_ffi.run("mx_quantize", { float(shape), false },
    { format, high, wide == 3 and 4 or wide, rule, 0, 0, 0, 1 }, {}, 6)
  return { q, scale, chance(50) and amax or false }, { float_number(), format, high, wide, rule }
end
function plans.fp8_matmul()
  local m, n, k, ta, tb = one_of(SIZES), one_of(SIZES), one_of(SIZES), draw(2), draw(2)
  local high_a, wide_a = block()
  local high_b, wide_b = block()
  local a, scale_a = quantized(ta == 1 and { k, m } or { m, k }, high_a, wide_a)
  local b, scale_b = quantized(tb == 1 and { n, k } or { k, n }, high_b, wide_b)
  return { a, scale_a, b, scale_b, chance(30) and float { n } or false },
    { ta, tb, high_a, wide_a, high_b, wide_b, chance(50) and float_number() + 1 or 0, draw(4),
      32 * draw(5), 0 }
end


-- FP8 layers: a site for every way to keep x, an invalid site, and 0.
local SITES = { 0, 99 }
for keep = C.ENG_FP8_KEEP_CODES, C.ENG_FP8_KEEP_SWIGLU do
  local site, recipe = ffi.new("int64_t[1]"), ffi.new("eng_fp8_recipe")
  for role = 0, C.ENG_FP8_ROLES - 1 do
    recipe.role[role].format, recipe.role[role].eps = M_ffi.dtype.e4m3, -1
    recipe.role[role].block_rows, recipe.role[role].block_columns = role == C.ENG_FP8_W and 128
      or 1, 128
  end
  recipe.role[C.ENG_FP8_X].keep = keep
  M_ffi.check(C.eng_fp8_site_new(site, "fuzz " .. keep))
  M_ffi.check(C.eng_fp8_site_set(site[0], recipe))
  SITES[#SITES + 1] = tonumber(site[0])
end
function plans.fp8_linear()
  return (plans.linear()), { one_of(SITES) }, {}, 5
end
function plans.fp8_swiglu()
  local inputs = plans.swiglu()
  return inputs, { one_of(SITES) }, {}, 5
end
function plans.fp8_swiglu_linear()
  local k, n, s = one_of(SIZES), one_of(SIZES), shape_of(0, 4)
  return { float(appended(s, k)), float(appended(s, k)), float { n, k }, chance(50) and float { n }
    or false },
    { one_of(SITES) }
end
function plans.fp8_attention()
  local inputs, ints, floats = plans.attention()
  ints[3] = one_of(SITES)
  return inputs, ints, floats, 5
end

for _, name in ipairs(M_ffi.op_names) do
  if not plans[name] then error("spec/fuzz/ops.lua has no plan for the operation " .. name) end
end

-- ------------------------------------------------------------------ spoiling a call

local stale

local function spoil(inputs, ints, floats)
  local what = #inputs > 0 and draw(7) or 3
  if what == 0 then inputs[draw(#inputs) + 1] = any(shape_of(0, 6))
  elseif what == 1 then inputs[draw(#inputs) + 1] = false
  elseif what == 2 then
    inputs[draw(#inputs) + 1] = one_of { stale, M_ffi.Tensor(draw(2 ^ 20), draw(9)),
      M_ffi.Tensor(2 ^ 32 - 1, 2 ^ 32 - 1) }
  elseif what == 3 then inputs[#inputs + 1] = any(shape_of(0, 3))
  elseif what == 4 then inputs[#inputs] = nil
  elseif what == 5 then
    local at = draw(8) + 1
    for k = #ints + 1, at do ints[k] = 0 end
    ints[at] = one_of(WILD_INTS)
  else
    local at = draw(4) + 1
    for k = #floats + 1, at do floats[k] = 0 end
    floats[at] = one_of(WILD_FLOATS)
  end
end

-- ------------------------------------------------------------------ running one on every device

local isas = {}
for _, name in ipairs { "plain", "avx2", "avx512" } do
  if C.eng_cpu_isa(name) ~= nil then isas[#isas + 1] = name end
end

local function describe(name, inputs, ints, floats)
  local parts = {}
  for k = 1, 16 do
    local x = inputs[k]
    if x == nil then break end
    local good, text = pcall(function() return x and x.dtype .. " " .. tensor.shape_text(x.shape)
      or "absent" end)
    parts[#parts + 1] = good and text or "stale"
  end
  local numbers = {}
  for _, v in ipairs(ints) do numbers[#numbers + 1] = tostring(v):gsub("LL$", "") end
  for _, v in ipairs(floats) do numbers[#numbers + 1] = tostring(v) end
  return ("%s(%s; %s)"):format(name, table.concat(parts, ", "), table.concat(numbers, " "))
end

local function bug(...) error({ bug = table.concat({ ... }, " ") }, 0) end

--- Returns the outcome as text (shapes and dtypes, or "error"), the outputs, and whether devices
--- may differ.
local function attempt(f, ...)
  local results = { pcall(f, ...) }
  if results[1] then
    local texts = {}
    for k = 2, 9 do
      local y = results[k]
      texts[#texts + 1] = y and y.dtype .. tensor.shape_text(y.shape) or "-"
    end
    return table.concat(texts, " "), results
  end
  local message = results[2]
  if type(message) ~= "string" or #message < 8 then
    bug("an error that is not a string:", tostring(message))
  end
  -- a made-up handle that names an existing tensor
  local elsewhere = message:find("in the memory of the current device", 1, true)
  return "error", nil, elsewhere ~= nil or message:find("out of memory", 1, true) ~= nil, message
end

local FLOAT = { f32 = true, f64 = true, f16 = true, bf16 = true }

local function backward(y)
  if not y or not FLOAT[y.dtype] or y.count > 1e5 then return end
  y:sum():backward { scale = one_of { 1, 65536, 1e300, 0 / 0 }, retain = chance(10) }
end

local function compare(name, inputs, ints, floats, n_out)
  local recorded = chance(40)
  if recorded then
    for _, x in ipairs(inputs) do
      if x and chance(70) then pcall(x.requires_grad, x, true) end
    end
  end
  local precision = chance(25) and one_of { "fp16", "bf16" } or nil
  if name:find("^fp8_") and chance(70) then precision = "fp8_block" end
  local function run()
    if precision then
      return engine.autocast(precision, M_ffi.run, name, inputs, ints, floats, n_out)
    end
    return M_ffi.run(name, inputs, ints, floats, n_out)
  end
  local isa = one_of(isas)
  C.eng_cpu_isa(isa)
  local seen, texts = {}, {}
  local random = state
  for i, device in ipairs { "cpu", "reference" } do
    engine.device(device)
    state = random
    local text, results, no_memory, message = attempt(run)
    if results and recorded then
      local more, _, lacking, problem = attempt(backward, results[2])
      text, no_memory, message = text .. " backward " .. more, lacking, problem
      for _, x in ipairs(inputs) do
        local good, grad = pcall(function() return x and x.grad end)
        if good and grad then text = text .. " " .. grad.dtype .. tensor.shape_text(grad.shape) end
      end
    end
    if no_memory then engine.device("cpu") return end
    seen[i], texts[i] = text, message or text
    C.eng_backward_abort()
  end
  engine.device("cpu")
  if seen[1] ~= seen[2] then
    bug(("cpu (%s) and reference differ on %s%s\n  cpu:       %s\n  reference: %s"):format(isa,
      describe(name, inputs, ints, floats),
      precision and " under " .. precision or "", texts[1], texts[2]))
  end
end

-- Operations that round at most once: bit-identical on every device.
local EXACT = {}
for name in ("add sub mul maximum minimum eq ne lt le gt ge neg abs relu contiguous cast where " ..
  "clamp concat gather index_select embedding argmax argmin "
  .. "topk max min reshape permute expand slice split dequantize mx_quantize mx_dequantize"
  ):gmatch("%a[%w_]*") do
    EXACT[name] = true
  end
-- Operations that read values kept by a forward pass. The plans make these values up, so inputs may
-- contradict each other, and devices may read different inputs.
local KEPT = { cross_entropy_grad = true, layer_norm_grad = true, rms_norm_grad = true,
  attention_grad = true, extreme_grad = true }
-- Tolerances, relative to the largest number. That of f64 is f32's, because inputs may be f32.
local PRECISION = { f64 = 1e-5, f32 = 1e-5, f16 = 2e-2, bf16 = 0.12, e4m3 = 0.3, e5m2 = 0.6 }

--- All elements of a tensor, in host memory, as double.
local function numbers_of(y)
  local values = ffi.new("double[?]", math.max(y.count, 1))
  if y.count > 0 then M_ffi.check(C.eng_read(values, M_ffi.dtype.f64, y.count, y)) end
  return values
end

--- Describes where the elements of one output differ, or returns nil. The tolerance is relative to
--- the largest element, or to `least` where that is larger.
local function difference(want, got, n, tolerance, least)
  local top = least
  for i = 0, n - 1 do
    local size = math.abs(want[i])
    if size < math.huge and size > top then top = size end
  end
  for i = 0, n - 1 do
    local a, b = want[i], got[i]
    if a ~= b and (a == a or b == b) and not (math.abs(a - b) <= tolerance * top) then
      return ("element %d of %d: reference %.9g, %s %.9g"):format(i, n, a, CARD, b)
    end
  end
end

--- Runs the same call on the reference and on the card, each with its own inputs.
local function compare_card(name, number)
  local spoils, recorded, after = one_of { 0, 0, 0, 1, 1, 2, 4 }, chance(40), draw(2 ^ 20)
  local precision = chance(25) and one_of { "fp16", "bf16" } or nil
  local random = state
  local seen, texts, values, shown, lacking = {}, {}, {}, nil, false
  for i, device in ipairs { "reference", CARD } do
    engine.device(device)
    engine.seed(number)
    state, odd = random, false
    local inputs, ints, floats, n_out = plans[name]()
    ints, floats = ints or {}, floats or {}
    for _ = 1, spoils do spoil(inputs, ints, floats) end
    if recorded then
      for _, x in ipairs(inputs) do
        if x and chance(70) then pcall(x.requires_grad, x, true) end
      end
    end
    shown = describe(name, inputs, ints, floats)
    state = after
    local text, results, no_memory, message = attempt(function()
      local function run() return M_ffi.run(name, inputs, ints, floats, n_out) end
      local outputs = precision and { engine.autocast(precision, run) } or { run() }
      engine.synchronize()   -- an error that a kernel reports later
      return unpack(outputs, 1, table.maxn(outputs))
    end)
    if results then
      values[i] = {}
      for k = 2, table.maxn(results) do
        local y = results[k]
        if y and y.count < 1e6 then
          values[i][k] = { numbers = numbers_of(y), n = y.count, dtype = y.dtype }
        end
      end
      if recorded then
        local more, _, out_of, problem = attempt(function()
          backward(results[2])
          engine.synchronize()
        end)
        text, no_memory, message = text .. " backward " .. more, no_memory or out_of, problem
        for _, x in ipairs(inputs) do
          local good, grad = pcall(function() return x and x.grad end)
          if good and grad then
            text = text .. " " .. grad.dtype .. tensor.shape_text(grad.shape)
          end
        end
      end
    end
    lacking = lacking or no_memory
    seen[i], texts[i] = text, message or text
    C.eng_backward_abort()
  end
  if lacking then return end
  local under = precision and " under " .. precision or ""
  if seen[1] ~= seen[2] then
    bug(("reference and %s differ on %s%s\n  reference: %s\n  %s: %s"):format(CARD, shown, under,
      texts[1], CARD, texts[2]))
  end
  if not values[1] or KEPT[name] or not EXACT[name] and (odd or spoils > 0) then return end
  for k, one in pairs(values[1]) do
    local tolerance = EXACT[name] and 0 or precision
      and PRECISION[precision == "fp16" and "f16" or "bf16"] or PRECISION[one.dtype] or 0
    -- For outputs from the second on: an entropy is a difference of numbers near 1.
    local least = name == "attention" and k == 4 and 1 or 0
    local text = difference(one.numbers, values[2][k].numbers, one.n, tolerance, least)
    if text then
      bug(("reference and %s differ on %s%s\n  output %d (%s), %s"):format(CARD, shown, under,
        k - 1, one.dtype, text))
    end
  end
end

--- Passes a call structure of random bytes to the core.
local function garbage()
  ffi.fill(call, ffi.sizeof(call))
  local function number(most)
    return chance(60) and draw(most)
      or tonumber(one_of(WILD_INTS)) % 2 ^ 31 - (chance(20) and 2 ^ 31 or 0)
  end
  call.op, call.n_in, call.n_out = number(tonumber(C.ENG_OP_COUNT)), number(18), number(10)
  for k = 0, 15 do
    if chance(70) then
      call["in"][k] = chance(80) and any(shape_of(0, 4)) or M_ffi.Tensor(draw(5000), draw(4))
    end
  end
  for k = 0, 13 do call.ints[k] = chance(70) and draw(5) or one_of(WILD_INTS) end
  for k = 0, 3 do call.floats[k] = one_of(WILD_FLOATS) end
  local failed = C.eng_run(call) ~= 0 or C.eng_synchronize() ~= 0
  if failed and #M_ffi.message() < 8 then bug("no message") end
end

-- ------------------------------------------------------------------ tensor methods with anything a

local names = {}
for name in pairs(tensor.methods) do names[#names + 1] = name end
table.sort(names)

local function argument()
  local kind = draw(12)
  if kind < 4 then return any(shape_of(0, 4))
  elseif kind < 7 then return draw(6) - 2
  elseif kind == 7 then return one_of(WILD_FLOATS)
  elseif kind == 8 then
    return one_of { "f16", "f64", "i32", "bool", "tanh", "", "nonsense", {}, { 1 }, { 2, -1 },
      { "x" }, { -3, 1e18 }, print }
  elseif kind == 9 then return one_of { true, false }
  elseif kind == 10 then return shape_of(0, 4)
  end
  return nil
end

local FACTORIES = { "tensor", "zeros", "ones", "full", "rand", "randn", "randint", "arange",
  "concat", "stack", "attention", "cross_entropy", "mse" }

local function method()
  local name, f, shown
  if chance(85) then
    name = one_of(names)
    f = tensor.methods[name]
  else
    name = one_of(FACTORIES)
    f = engine[name]
  end
  local arguments = {}
  for k = 1, 5 do arguments[k] = argument() end
  if chance(90) and tensor.methods[name] == f then arguments[1] = any(shape_of(0, 4)) end
  if chance(30) and tensor.is_tensor(arguments[1]) then
    pcall(arguments[1].requires_grad, arguments[1], true)
  end
  shown = arguments[1]
  local good, y = pcall(f, unpack(arguments, 1, 1 + draw(5)))
  if not good and (type(y) ~= "string" or #y < 4) then
    bug("an error that is not a string:", name, tostring(y))
  end
  if good and tensor.is_tensor(y) then
    local alive, count = pcall(function() return y.count end)
    if alive and count < 1e5 then
      local told, problem = pcall(tostring, y)
      -- The card reports some errors only on synchronization.
      if not told and not (CARD and type(problem) == "string") then error(problem, 0) end
      if chance(30) then pcall(backward, y) end
    end
  end
  C.eng_synchronize()   -- errors still pending belong to this call
  return shown
end

-- ------------------------------------------------------------------ the rounds

local function used(name)
  local row = engine.memory()[name]
  return row and row.used or 0
end

local function round(i)
  state = (seed * 7919 + i * 104729) % 2 ^ 31
  draw(2)
  if CARD then engine.device(CARD) end
  engine.seed(i)
  engine.begin_step()
  for _ = 1, 1 + draw(3) do
    local kind = draw(10)
    if kind < 7 then
      local name = one_of(M_ffi.op_names)
      if CARD then compare_card(name, i)
      else
        local inputs, ints, floats, n_out = plans[name]()
        ints, floats = ints or {}, floats or {}
        for _ = 1, one_of { 0, 0, 1, 1, 2, 4 } do spoil(inputs, ints, floats) end
        compare(name, inputs, ints, floats, n_out)
      end
    elseif kind < 9 then
      method()
    else
      garbage()
    end
  end
  stale = engine.zeros(2)
  engine.end_step()
  if C.eng_tape_length() ~= 0 then bug("operations stayed on the tape") end
  for _, arena in ipairs { "step", "scratch", CARD and "cuda step", CARD and "cuda scratch" } do
    if used(arena) ~= 0 then
      bug(("%d bytes of the %s arena stayed in use"):format(used(arena), arena))
    end
  end
end

engine.memory { limit = 192 * 2 ^ 20 }
stale = engine.zeros(1)
local kept = used("kept")
local from, done = C.eng_clock(), 0
while done < rounds and C.eng_clock() - from < seconds do
  local i = first + done
  local good, problem = xpcall(round,
    function(e) return type(e) == "table" and e or debug.traceback(tostring(e), 2) end, i)
  if not good then
    io.stderr:write(("round %d, seed %d: %s\n  repeat: engine spec/fuzz/ops.lua 600 %d %d " ..
      "1\n"):format(i, seed,
      type(problem) == "table" and problem.bug or problem, seed, i))
    os.exit(1)
  end
  done = done + 1
  if used("kept") > kept + 2 ^ 20 then   -- only the method :keep() may keep a tensor
    kept = used("kept")
  end
end
print(("operations: %d rounds, seed %d, %s"):format(done, seed, CARD or table.concat(isas, " ")))
