-- FP8 by hand: matrices of e4m3, e5m2 or packed e5m6 codes with their scales, products of such
-- matrices with a chosen accumulator, and single numbers as bits. core/base/fp8*.h defines the
-- formats and scales, core/ops.def the operations. Called by scripts and train/fp8_recipe.lua.
--
--   local fp8 = engine.fp8
--   local qx = fp8.quantize(x, { block = "1x128" })                     -- x [.. x K]
--   local qw = fp8.quantize(w, { block = "128x128" })                   -- w [N x K]
--   local y = fp8.matmul(qx, qw, { transpose_b = true, accumulator = "hopper", dtype = "bf16" })
--   print(qx, fp8.bits(0.1, "e4m3"))
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local formats = require "engine.base.formats"

local C, expect, raise, raise_if = M_ffi.C, M_ffi.expect, M_ffi.raise, M_ffi.raise_if
local run, read_named, choose = M_ffi.run, arguments.read_named, arguments.choose
local want, want_number, want_whole = arguments.want, arguments.want_number, arguments.want_whole

local M = {}

local FORMATS = { e4m3 = M_ffi.dtype.e4m3, e5m2 = M_ffi.dtype.e5m2,
  e5m6 = tonumber(C.ENG_FORMAT_E5M6) }
-- Scale rules, named after the projects they come from (core/base/fp8_scale.h).
M.rules = { transformer_engine = C.ENG_SCALE_TRANSFORMER_ENGINE, deepseek = C.ENG_SCALE_DEEPSEEK,
  deepgemm = C.ENG_SCALE_DEEPGEMM, torchao = C.ENG_SCALE_TORCHAO, msamp = C.ENG_SCALE_MSAMP }
M.accumulators = { fp32 = C.ENG_ACCUMULATE_FP32, exact = C.ENG_ACCUMULATE_EXACT,
  hopper = C.ENG_ACCUMULATE_HOPPER, e4m3 = C.ENG_ACCUMULATE_E4M3 }

-- ------------------------------------------------------------------ quantized matrices

local methods = {}
local Quantized = { __index = methods }

local FLOATS = { f32 = true, f64 = true, f16 = true, bf16 = true }
local function want_float(dtype, where)
  expect(FLOATS[dtype], dtype, "%s: expected dtype bf16, f16, f32 or f64", where)
  return arguments.dtype_number(dtype)
end

local function quantized(fields) return setmetatable(fields, Quantized) end

--- Returns code * scale as a tensor of x's shape, f32 unless another float dtype is named.
function methods.dequantize(x, dtype)
  return run("dequantize", { x.q, x.scale }, { want_float(dtype or "f32", "dequantize"),
    x.block[1], x.block[2], x.format == "e5m6" and FORMATS.e5m6 or 0 })
end

--- Returns how many bytes the codes and scales take.
function methods.bytes(x) return x.q.count * (x.format == "e5m6" and 4 or 1) + x.scale.count * 4 end

local TENSORS = { "q", "scale", "amax", "transposed" }      -- transposed may be absent

--- Returns a copy that lives until :free(), beyond the end of the step.
function methods.keep(x)
  local copy = arguments.merged(x)
  for _, name in ipairs(TENSORS) do copy[name] = x[name] and x[name]:keep() end
  return quantized(copy)
end
--- Frees a kept copy.
function methods.free(x)
  for _, name in ipairs(TENSORS) do
    if x[name] then x[name]:free() end
  end
end

function Quantized.__tostring(x)
  local b = x.block
  return ("%s %s in blocks of %s x %s (%s%s), %d bytes"):format(x.format,
    arguments.shape_text(x.shape), b[1] == 0 and "all" or b[1],
    b[2] == 0 and "all" or b[2], x.rule, x.pow2 and ", powers of two" or "", x:bytes())
end

local QUANTIZE = "format block rule pow2 eps margin stochastic transposed factor"

--- Quantizes x [.. x K] to codes and scales. No gradient passes through this function. Options:
---   format       "e4m3" (the default), "e5m2" or "e5m6"
---   block        "tensor" (the default), "row", "column", "1x128", "128x128" or { rows, columns }
---   rule         how scales are chosen: "transformer_engine" (the default), "deepseek",
---                "deepgemm", "torchao" or "msamp"
---   pow2         true: scales are powers of two
---   eps          smaller amaxes count as eps; each rule has its own default
---   margin       scales are multiplied by 2^margin (0)
---   stochastic   true: rounds at random
---   transposed   true: also quantizes x transposed, in the same blocks and the same pass
---   factor       only with block "tensor": multiplies the elements, as in delayed scaling; the
---                scale is then 1 / factor
--- Fields of the result: q (codes), scale (dequantization multiplies the codes by it), amax
--- (f32 []), shape, block, format, rule, pow2, transposed.
function M.quantize(x, options)
  want(x, "fp8.quantize")
  options = read_named(options, "fp8.quantize", QUANTIZE)
  local format, rule = options.format or "e4m3", options.rule or "transformer_engine"
  local rows, columns = arguments.read_block(options.block or "tensor", "fp8.quantize")
  local factor = options.factor
  if type(factor) == "number" then
    raise_if(not (factor > 0 and factor < math.huge),
      "fp8.quantize: expected factor to be a positive finite number, got %g", factor)
    factor = require("engine.tensor.create").full({ 1 }, factor, "f32")
  elseif factor then
    expect(arguments.is_tensor(factor), factor,
      "fp8.quantize: expected factor to be a number or a tensor of one element")
  end
  local shape = x.shape
  if #shape == 0 or shape[#shape] == 0 then
    raise("fp8.quantize: expected rows of 1 or more elements, got %s %s", x.dtype,
      arguments.shape_text(shape))
  end
  local flags = (options.stochastic and 2 or 0) + (options.pow2 and 4 or 0)
    + (options.transposed and 8 or 0)
  local number, rule_number = choose(FORMATS, format, "fp8.quantize", "format"),
    choose(M.rules, rule, "fp8.quantize", "rule")
  local q, scale, amax, q_t, scale_t = run("quantize", { x, factor or false },
    { number, rows, columns, rule_number, flags, 0, 0 },
    { want_number(options.eps or -1, "fp8.quantize", "eps"),
      want_number(options.margin or 0, "fp8.quantize", "margin") }, 5)
  local pow2 = options.pow2 or rule == "msamp"
  local y = { q = q, scale = scale, amax = amax, shape = shape, block = { rows, columns },
    format = format, rule = rule, pow2 = pow2 }
  if q_t then
    y.transposed = quantized { q = q_t, scale = scale_t, amax = amax, shape = q_t.shape,
      block = y.block, format = format, rule = rule, pow2 = pow2 }
  end
  return quantized(y)
end

local MATMUL = "transpose_a transpose_b accumulator promotion dtype bias into add"

local function want_quantized(x, name)
  expect(getmetatable(x) == Quantized, x, "fp8.matmul: expected %s to be a result of fp8.quantize",
    name)
  raise_if(x.format == "e5m6", "fp8.matmul: %s is e5m6, a storage format; hint: :dequantize()",
    name)
end

--- Multiplies quantized matrices: a [M x K] times b [K x N] -> [M x N]. Options:
---   transpose_a, transpose_b   true: a is stored as [K x M], b as [N x K]
---   accumulator                "fp32" (the default), "exact" (sums in f64), "hopper" (as Hopper's
---                              tensor cores add) or "e4m3" (sums rounded to e4m3)
---   promotion                  the number of products along K after which the accumulator is added
---                              to an f32 sum: a multiple of 32 (by default 128), or 0 for never.
---                              If the blocks of scales split K, the accumulator is added after
---                              every block instead
---   dtype                      of the result ("f32")
---   bias                       [N]
---   into, add                  a tensor for the result; add = true adds the product to it
function M.matmul(a, b, options)
  want_quantized(a, "a")
  want_quantized(b, "b")
  options = read_named(options, "fp8.matmul", MATMUL)
  local qa, qb = a.q, b.q
  if #a.shape > 2 then qa = qa:view(-1, a.shape[#a.shape]) end
  if #b.shape > 2 then qb = qb:view(-1, b.shape[#b.shape]) end
  local ints = { options.transpose_a and 1 or 0, options.transpose_b and 1 or 0, a.block[1],
    a.block[2], b.block[1], b.block[2],
    options.dtype and want_float(options.dtype, "fp8.matmul") + 1 or 0,
    choose(M.accumulators, options.accumulator or "fp32", "fp8.matmul", "accumulator"),
    want_whole(options.promotion or 128, "fp8.matmul", "promotion", 0), options.add and 1 or 0 }
  local inputs = { qa, a.scale, qb, b.scale, options.bias or false }
  if not options.into then
    if options.add then raise("fp8.matmul: add needs a tensor to add into; hint: into = y") end
    return run("fp8_matmul", inputs, ints)
  end
  expect(arguments.is_tensor(options.into), options.into,
    "fp8.matmul: expected into to be a tensor")
  M_ffi.prepare("fp8_matmul", inputs, ints)
  M_ffi.check(C.eng_run_into(M_ffi.call, options.into))
  return options.into
end

-- ------------------------------------------------------------------ single numbers

local SMALL = { e5m6_tilekernels = formats.of "e5m6" }
for name in pairs(arguments.set_of("e4m3 e5m2 e5m6 f16 bf16 tf32 e4m3_ieee e3m2 e2m3 e2m1 int8 " ..
  "mxint8 ue4m3 ue8m0")) do
  SMALL[name] = formats.of(name)
end
local ENCODE = "saturate up nearest"

-- The number of bits of a code in a format.
local function width_of(format)
  return format.exponent_bits + format.fraction_bits + (format.signed and 1 or 0)
end

--- Returns the code of a number in a small format: e4m3, e5m2, e5m6, e5m6_tilekernels (e5m6,
--- rounded as TileKernels does), ue8m0, ue4m3, f16, bf16, tf32, e4m3_ieee (e4m3 with inf), e3m2,
--- e2m3, e2m1, int8, mxint8. Options: saturate (numbers that are too large become the format's
--- largest), up (only ue8m0: rounds up), nearest (only ue8m0: rounds to nearest, ties up; 0 and
--- negative numbers become nan). Without up and nearest, ue8m0 rounds down.
function M.encode(value, format, options)
  options = read_named(options, "fp8.encode", ENCODE)
  choose(SMALL, format, "fp8.encode", "format")
  return tonumber(C.eng_small_encode(format, want_number(value, "fp8.encode", "the first argument"),
    (options.saturate or options.up) and 1 or options.nearest and 4 or 0))
end

--- Returns the number that a code stands for.
function M.decode(code, format)
  local codes = 2 ^ width_of(choose(SMALL, format, "fp8.decode", "format"))
  raise_if(want_whole(code, "fp8.decode", "the code", 0) >= codes,
    "fp8.decode: expected a code of %s below %g, got %g", format, codes, code)
  local value = C.eng_small_decode(format, code)
  return value == value and value or 0 / 0   -- LuaJIT may read other NaNs as values of other types
end

--- Returns a number in a format as text: "e4m3 0 0011 101  0x1d  0.1015625".
function M.bits(value, format)
  format = format or "e4m3"
  local parts, code, text = choose(SMALL, format, "fp8.bits", "format"), M.encode(value, format), {}
  local digits, fraction = width_of(parts), parts.fraction_bits
  for k = digits - 1, 0, -1 do
    text[#text + 1] = math.floor(code / 2 ^ k) % 2 == 1 and "1" or "0"
    if k == fraction + parts.exponent_bits or k == fraction and k > 0 then text[#text + 1] = " " end
  end
  return ("%s %s  0x%0" .. math.ceil(digits / 4) .. "x  %.9g"):format(format, table.concat(text),
    code, M.decode(code, format))
end

return M
