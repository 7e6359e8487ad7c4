-- A sensible random call of each operation: plans[name]() -> inputs, ints, floats, number of
-- outputs. For the fuzzer ops.lua.
local M_ffi = require "engine.base.ffi"
local made = require "spec.fuzz.made"

local ffi, C = M_ffi.ffi, M_ffi.C
local draw, chance, one_of, shape_of = made.draw, made.chance, made.one_of, made.shape_of
local tensor_of, index_of, dim_of = made.tensor_of, made.index_of, made.dim_of
local with, appended, outer = made.with, made.appended, made.outer
local DTYPES, FLOATS, SIZES = made.DTYPES, made.FLOATS, made.SIZES
local WILD_INTS, WILD_FLOATS = made.WILD_INTS, made.WILD_FLOATS

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
-- A norm's plan with one more input of the first input's shape: `branch`, or `dsum` of a gradient.
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
-- Images: sizes usually fit each other; attributes are sometimes invalid.
local function step() return chance(5) and one_of(WILD_INTS) or 1 + draw(3) end
local function room() return chance(5) and one_of(WILD_INTS) or draw(3) end
local function image() return { draw(4), 1 + draw(9), 1 + draw(9), one_of(SIZES) } end
local function fitting(size, kernel, stride, padding, dilation)
  local n = math.floor((size + 2 * tonumber(padding) - tonumber(dilation) * (kernel - 1) - 1)
    / tonumber(stride)) + 1
  return n >= 0 and n < 40 and n or 1
end
local function convolution()
  local groups, x = 1 + draw(3), image()
  x[4] = groups * draw(6)
  local w = { groups * draw(5), x[4] / groups, 1 + draw(4), 1 + draw(4) }
  local ints = { step(), step(), room(), room(), step(), step(), chance(5) and step() or groups }
  local y = { x[1], fitting(x[2], w[3], ints[1], ints[3], ints[5]),
    fitting(x[3], w[4], ints[2], ints[4], ints[6]), w[1] }
  return x, w, y, ints
end
local function and_more(ints, ...)
  for _, n in ipairs { ... } do ints[#ints + 1] = n end
  return ints
end
function plans.conv2d()
  local x, w, _, ints = convolution()
  return { float(x), float(w), chance(50) and float { w[1] } or false }, ints
end
function plans.conv2d_grad_x()
  local x, w, y, ints = convolution()
  return { float(y), float(w) }, and_more(ints, x[2], x[3], float_number())
end
function plans.conv2d_grad_w()
  local x, w, y, ints = convolution()
  return { float(y), float(x) }, and_more(ints, w[3], w[4], float_number(), 0)
end
local function pooling()
  local x, kernel = image(), { 1 + draw(4), 1 + draw(4) }
  local ints = { kernel[1], kernel[2], step(), step() }
  for d = 1, 2 do ints[4 + d] = chance(5) and room() or draw(math.floor(kernel[d] / 2) + 1) end
  local y = { x[1], fitting(x[2], kernel[1], ints[3], ints[5], 1),
    fitting(x[3], kernel[2], ints[4], ints[6], 1), x[4] }
  return x, y, ints
end
function plans.max_pool2d() local x, _, ints = pooling() return { float(x) }, ints, {}, 2 end
function plans.max_pool2d_grad()
  local x, y, ints = pooling()
  return { float(y), tensor_of(y, "i32") }, and_more(ints, x[2], x[3], float_number())
end
function plans.avg_pool2d()
  local x, _, ints = pooling()
  and_more(ints, draw(2), draw(7), draw(7))
  if chance(30) then ints[1], ints[2] = 0, 0 end
  return { float(x) }, ints
end
function plans.avg_pool2d_grad()
  local x, y, ints = pooling()
  and_more(ints, draw(2), x[2], x[3], float_number())
  if chance(30) then ints[1], ints[2] = 0, 0 end
  return { float(y) }, ints
end
local function channels() local s = shape_of(2, 5) return s, s[#s] end
local function vector(n) return chance(60) and float { n } or false end
local function small() return { one_of { 0, 1e-5, 1 } } end
function plans.batch_norm()
  local s, c = channels()
  local given = chance(30)
  return { float(s), vector(c), vector(c), given and float { c }, given and float { c } },
    { draw(2) }, small(), 3
end
function plans.batch_norm_grad()
  local s, c = channels()
  return { float(s), vector(c), float { c }, float { c }, float(s), chance(30) and float { 2, c } },
    { float_number(), draw(2), draw(2), draw(100) }, small(), 3
end
local function grouped()
  local s, c = channels()
  return s, c, chance(80) and one_of { 1, math.max(c, 1) } or draw(5)
end
function plans.group_norm()
  local s, c, groups = grouped()
  return { float(s), vector(c), vector(c) }, { groups }, small(), 3
end
function plans.group_norm_grad()
  local s, c, groups = grouped()
  return { float(s), vector(c), float { s[1], groups }, float { s[1], groups }, float(s) },
    { float_number(), draw(2), groups }, small(), 3
end
local function attention_inputs()
  local b, t, s, g, d = draw(3), one_of { 0, 1, 2, 5, 17, 40 }, one_of { 0, 1, 3, 5, 18, 50 },
    1 + draw(3), one_of { 1, 2, 4, 7, 16, 20 }
  local h = g * draw(3)
  return float { b, t, h, d }, float { b, s, g, d }, float { b, s, g, d }, { b, t, h, d }
end
function plans.attention()
  local q, k, v = attention_inputs()
  local scale = one_of { 0, 0, 0.3, 1e30, -1 }
  made.odd = made.odd or scale == 1e30
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
    { one_of { 10000, 1, 0.5, 1e300 }, one_of { 0, 8, 0.3 }, one_of { 1, 4 },
      one_of { 0, 4 } }
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
-- quest and ms_eden, the last two, have no CUDA kernels
local RULES = os.getenv("ENGINE_TEST_DEVICE") and 7 or 9
local MX = { 10, 11, 13, 14, 15, 16 }
local function mx_ints()
  local rule = draw(RULES)
  return rule >= 4 and 13 or one_of(MX), one_of { 1, 2, 16 }, one_of { 2, 16, 32, 3 }, rule
end
function plans.mx_quantize()
  local format, high, wide, rule = mx_ints()
  local studied = not os.getenv("ENGINE_TEST_DEVICE") and chance(20)
  local shape = shape_of(1, 4)
  return { float(shape), chance(20) and tensor_of({ 1 }, "f32") or false,
    studied and chance(50) and tensor_of(shape, "f32") or false },
    { format, high, wide, rule, 8 * draw(32), chance(30) and draw(26) or 0, draw(100), 1,
      chance(40) and one_of { 16, 32, 64, 128, 8 } or 0, draw(5) - 1, studied and draw(5) or 0,
      studied and draw(4) or 0 },
    { chance(30) and draw(12) / 10 or 0 }, 8
end
function plans.hadamard()
  return { float(shape_of(1, 4)) }, { one_of { 16, 32, 64, 128, 8 }, draw(5) - 1, draw(2),
    float_number() }
end
function plans.msamp_fp4()
  return { float(shape_of(1, 4)) }, { draw(2) - 1, draw(2) - 1 },
    { one_of { 0, 0.99, 0.5, 0.3 } }, 4
end
function plans.mx_dequantize()
  local format, high, wide, rule = mx_ints()
  local shape = shape_of(1, 4)
  shape[#shape] = 2 * shape[#shape]
  if rule >= 7 then high = 1 end                          -- quest and ms_eden
  local q, scale, amax = M_ffi.run("mx_quantize", { float(shape), false },
    { format, high, wide == 3 and 4 or wide, rule, 0, 0, 0, 1 }, {}, 8)
  return { q, scale, chance(50) and amax or false }, { float_number(), format, high, wide, rule }
end
function plans.mx_matmul()
  local rule = draw(7)
  local four = rule >= 4 or chance(40)
  local k, formats = 64 * draw(3), four and { 13, 13 } or { one_of { 10, 11 }, one_of { 10, 11 } }
  local inputs = {}
  for side = 1, 2 do
    local q, scale, amax = M_ffi.run("mx_quantize", { float({ draw(5), k }), false },
      { formats[side], 1, rule >= 4 and 16 or 32, rule, 0, 0, 0, 1 }, {}, 8)
    inputs[2 * side - 1], inputs[2 * side] = q, scale
    inputs[4 + side] = chance(50) and amax or false
  end
  local other = rule >= 4 and 4 + draw(3) or draw(4)
  return inputs, { formats[1], formats[2], chance(90) and rule or draw(8), other,
    chance(50) and float_number() + 1 or 0 }, { chance(50) and draw(16) / 9 or 0 }
end
function plans.nf4_quantize()
  return { float(shape_of(1, 4)), chance(20) and tensor_of({ 1 }, "f32") or false },
    { 2 ^ (4 + draw(9)), draw(2) }, {}, 5
end
function plans.nf4_dequantize()
  local shape = shape_of(2, 2)
  local q, absmax, code, group, offset = M_ffi.run("nf4_quantize", { float(shape), false },
    { 64, 1 }, {}, 5)
  local nested = chance(50)
  return { q, nested and code or absmax, nested and group, nested and offset },
    { float_number(), chance(90) and 64 or 128, shape[1], shape[2] }
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


-- FP8 layers: a site for every way to keep x, an invalid site (99), and 0 (no site).
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
  if not plans[name] then error("spec/fuzz/op_plans.lua has no plan for the operation " .. name) end
end

return plans
