-- Microscaling by hand: blocks of small numbers with a scale of one byte each (OCP MX, NVFP4).
-- Codes and scales have the same bits as those of torchao and Transformer Engine. core/base/mx.h
-- defines formats and rules. Called by scripts, train/fp8_recipe.lua and train/fp8_sites.lua.
--
--   local q = engine.mx.quantize(x, { format = "e4m3", rule = "rceil" })       -- x [.. x K]
--   local w = engine.mx.quantize(weight, { rule = "nvfp4", block = "16x16", transposed = true })
--   print(q, q.q, q.scale, q:dequantize("bf16"))
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"

local C, expect, run = M_ffi.C, M_ffi.expect, M_ffi.run
local want, want_whole = arguments.want, arguments.want_whole

local M = {}

local FORMATS = { e4m3 = M_ffi.dtype.e4m3, e5m2 = M_ffi.dtype.e5m2, e2m1 = C.ENG_FORMAT_E2M1,
  e2m3 = C.ENG_FORMAT_E2M3, e3m2 = C.ENG_FORMAT_E3M2, mxint8 = C.ENG_FORMAT_MXINT8 }
local RULES = { floor = C.ENG_MX_FLOOR, ceil = C.ENG_MX_CEIL, even = C.ENG_MX_EVEN,
  rceil = C.ENG_MX_RCEIL, nvfp4 = C.ENG_MX_NVFP4, four_over_six = C.ENG_MX_FOUR_OVER_SIX,
  four_over_six_mse = C.ENG_MX_FOUR_OVER_SIX_MSE, quest = C.ENG_MX_QUEST,
  ms_eden = C.ENG_MX_MS_EDEN }
-- The rules that have a ue4m3 scale for each block and one f32 scale for the whole tensor.
local NVFP4 = { nvfp4 = true, four_over_six = true, four_over_six_mse = true, ms_eden = true }
local NONFINITE = { torchao = 0, te = 32 }     -- 32: the flag MX_FINITE (core/ops.def)
-- The rules that give some elements no gradient. These rules need e2m1.
local GATED = { quest = true }
local TRANSPOSED, GATE = 8, 64                 -- flags (core/ops.def)
local TIES = { even = 0, away = 1, zero = 2, up = 3 }
local SR_RULES = { te = 0, amd = 1, mslk = 2 }
local HADAMARDS = { [0] = 0, [16] = 16, [32] = 32, [64] = 64, [128] = 128 }
M.formats, M.rules, M.nvfp4 = FORMATS, RULES, NVFP4

--- Returns the default format and the default block of a rule.
function M.usual(rule)
  return (NVFP4[rule] or GATED[rule]) and "e2m1" or "e4m3", NVFP4[rule] and "1x16" or "1x32"
end

-- ------------------------------------------------------------------ quantized tensors

local methods = {}
local Quantized = { __index = methods }

--- Returns the values of the codes as a tensor of x's shape, in f32 or in another float dtype. A
--- value is code * scale / factor, where `factor` is the option of quantize. For the rule nvfp4,
--- the value is also multiplied by the tensor's amax / 2688; 2688 = 448 * 6 is the largest scale
--- times the largest code. In place of 2688, four_over_six and four_over_six_mse have 1536 = 256 *
--- 6, and ms_eden has 1554.4 (core/base/mx.h).
function methods.dequantize(x, dtype)
  local scaled = x.factor ~= 1
  local y = run("mx_dequantize", { x.q, x.scale, NVFP4[x.rule] and x.amax or false },
    { arguments.dtype_number(not scaled and dtype or "f32"), tonumber(FORMATS[x.format]),
      x.block[1], x.block[2], tonumber(RULES[x.rule]) })
  return scaled and (y / x.factor):to(dtype or "f32") or y
end

--- Returns how many bytes the codes and scales take.
function methods.bytes(x) return x.q.count + x.scale.count + (NVFP4[x.rule] and 4 or 0) end

function Quantized.__tostring(x)
  return ("%s %s in blocks of %d x %d (%s), %d bytes"):format(x.format,
    arguments.shape_text(x.shape), x.block[1], x.block[2], x.rule, x:bytes())
end

-- Converts the option `signs` (a whole number, "none" or nil) to the attribute `signs` of the
-- operations hadamard and mx_quantize. who: begins error messages.
local function signs_number(signs, who)
  return signs == "none" and -1 or want_whole(signs or 0, who, "signs", 0)
end

--- Hadamard transform: multiplies each group of n = 16, 32, 64 or 128 consecutive elements of a row
--- of x [.. x K] by diag(s) H / sqrt(n), where H is Sylvester's matrix and s is a vector of signs.
--- Elements after the last whole group are only converted to the dtype. Sums are in f64 and rounded
--- once. No gradient passes through this function. Options:
---   signs        0 (the default): Transformer Engine's 16 signs, repeated; "none": all 1; any
---                other number: random, drawn from the seed and this number
---   transposed   true: first transposes x, as a matrix [rows x K]. Groups are then parts of
---                columns of x, and the result is [K x rows]
---   dtype        of the result; by default that of x
function M.hadamard(x, n, options)
  want(x, "mx.hadamard")
  options = arguments.read_named(options, "mx.hadamard", "signs transposed dtype")
  return run("hadamard", { x }, { want_whole(n, "mx.hadamard", "n", 0),
    signs_number(options.signs, "mx.hadamard"), options.transposed and 1 or 0,
    arguments.dtype_number(options.dtype or x.dtype) })
end

local QUANTIZE = "format rule block nonfinite sr_bits sr_rule ties average factor transposed " ..
  "amax hadamard signs"

--- Quantizes x [.. x K] to codes and scales. No gradient passes through this function. Options:
---   format       "e4m3", "e5m2", "e2m1", "e2m3", "e3m2" or "mxint8"; by default "e4m3", but "e2m1"
---                for the rules quest, nvfp4 and those based on nvfp4
---   rule         how scales are chosen, see below; by default "floor"
---   block        "1x32", "1x16", "16x16" or { rows, columns }; by default "1x32", but "1x16" for
---                nvfp4 and the rules based on it
---   nonfinite    "torchao" (the default): Inf or NaN makes its block NaN and, with nvfp4 and the
---                rules based on it, the amax of the tensor Inf or NaN; "te": scales ignore NaN
---                and saturate for Inf, as in Transformer Engine
---   sr_bits      bits of stochastic rounding, 1 to 24; by default 0, which rounds to nearest
---   sr_rule      whose stochastic rounding: Transformer Engine's, "te" (the default), that of its
---                AMD port, "amd", or that of MSLK, "mslk"; the last two are slow and only on
---                the CPU
---   ties         without sr_bits, how a number halfway between two codes is rounded: to the "even"
---                code (the default), "away" from zero, toward "zero", or "up"; the last three are
---                slow and only on the CPU
---   average      f32, of x's shape: the moving average of each element over steps. Rounds an
---                element up or down, to the code nearer to its moving average (Q-EMA of TetraJet)
---   factor       a number from 0.5 to 1, by default 1: multiplies the elements before rounding;
---                dequantize divides by it
---   transposed   true: also quantizes x transposed (from the elements of x, not from codes)
---   amax         for nvfp4 and the rules based on it: f32 [1], used instead of x's own amax
---   hadamard     16, 32, 64 or 128: the group size of a Hadamard transform along the columns of
---                x; by default 0, no transform. The transform's result is bf16; only the
---                transposed copy is quantized from it
---   signs        the signs of this transform, as in mx.hadamard
--- Rules:
---   floor, ceil, even, rceil   scales are powers of two
---   nvfp4                      scales are ue4m3, with one f32 for the tensor
---   four_over_six              nvfp4, but each block's largest element becomes 6 or 4, whichever
---                              gives the block the smaller mean absolute error
---   four_over_six_mse          four_over_six, but with the mean squared error
---   quest                      e2m1; each scale is a power of two, computed from the standard
---                              deviation of its block
---   ms_eden                    nvfp4, but the scales correct the rounding errors, in groups of 128
---                              elements; sr_bits applies to these scales, not to elements
--- The last four rules allow no factor, ties, sr_rule or average, and except for ms_eden no
--- sr_bits. quest and ms_eden allow only blocks of one row, no nonfinite = "te", and transposed
--- only with hadamard. An average allows no sr_bits, ties or hadamard. Fields of the result: q (u8
--- codes, two to a byte in e2m1, the even element in the low half), scale (u8 codes, ue8m0 or
--- ue4m3), amax (f32 []), nan (i64 []: how many elements of x are NaN), gate (only of "quest":
--- bf16, 1 where a gradient would pass to x, 0 where x saturates), shape, block, format, rule,
--- factor, transposed.
function M.quantize(x, options)
  want(x, "mx.quantize")
  options = arguments.read_named(options, "mx.quantize", QUANTIZE)
  local function choose(list, name, usual)
    return arguments.choose(list, options[name] or usual, "mx.quantize", name)
  end
  local rule = options.rule or "floor"
  local rule_number = choose(RULES, "rule", "floor")
  local usual_format, usual_block = M.usual(rule)
  local format = options.format or usual_format
  local number = choose(FORMATS, "format", usual_format)
  local rows, columns = arguments.read_block(options.block or usual_block, "mx.quantize")
  local flags = choose(NONFINITE, "nonfinite", "torchao")
  if options.amax ~= nil then want(options.amax, "mx.quantize: amax") end
  if options.average ~= nil then want(options.average, "mx.quantize: average") end
  local ties, sr_rule = choose(TIES, "ties", "even"), choose(SR_RULES, "sr_rule", "te")
  local hadamard = options.hadamard or 0
  expect(HADAMARDS[hadamard], hadamard, "mx.quantize: expected hadamard to be 0, 16, 32, 64 or 128")
  expect(hadamard == 0 or options.transposed and rows ~= columns, hadamard, "mx.quantize: " ..
    "expected hadamard to be 0 unless transposed is true and blocks are not square")
  local bits = want_whole(options.sr_bits or 0, "mx.quantize", "sr_bits", 0)
  local factor = options.factor or 1
  expect(type(factor) == "number" and factor >= 0.5 and factor <= 1, factor,
    "mx.quantize: expected factor to be a number from 0.5 to 1")
  flags = flags + (options.transposed and TRANSPOSED or 0) + (GATED[rule] and GATE or 0)
  local q, scale, amax, q_t, scale_t, nan, amax_t, gate = run("mx_quantize",
    { x, options.amax or false, options.average or false }, { number, rows, columns, rule_number,
      flags, bits, 0, 0, hadamard, signs_number(options.signs, "mx.quantize"), ties, sr_rule },
    { factor }, 8)
  local y = setmetatable({ q = q, scale = scale, amax = amax, nan = nan, shape = x.shape,
    block = { rows, columns }, format = format, rule = rule, factor = factor, gate = gate },
    Quantized)
  if q_t then
    local k, n = x.shape[#x.shape], x.count / x.shape[#x.shape]
    y.transposed = setmetatable({ q = q_t, scale = scale_t, amax = amax_t, nan = nan,
      shape = { k, n }, block = y.block, format = format, rule = rule, factor = factor }, Quantized)
  end
  return y
end

--- Returns the values of a quantized tensor, as x:dequantize(dtype) does.
function M.dequantize(x, dtype)
  expect(getmetatable(x) == Quantized, x, "mx.dequantize: expected a result of mx.quantize")
  return x:dequantize(dtype)
end

-- Returns the scales of x as a matrix with one row of scales for each row of x.
local function scales_by_row(x, rows)
  local scale, high = x.scale, x.block[1]
  local down, across = scale.shape[1], scale.shape[2]
  if high == 1 then return scale end
  return scale:view(down, 1, across):expand(down, high, across):view(down * high, across)
    :slice(1, 1, rows)
end

--- Computes a b^T in f32 for quantized matrices a [M x K] and b [N x K]. It sums as Blackwell's
--- block-scaled tensor cores do (core/base/mx_blackwell.h). For e4m3 and e5m2 in blocks of 32,
--- these cores add 32 products at a time and keep 25 bits below the largest exponent. For e2m1 in
--- blocks of 32 or 16, they add 64 products at a time and keep 35 bits.
function M.matmul(a, b)
  local inputs = {}
  for k, x in ipairs { a or 0, b or 0 } do
    expect(getmetatable(x) == Quantized and #x.shape == 2, x ~= 0 and x or nil,
      "mx.matmul: expected two quantized matrices of 2 dimensions")
    inputs[2 * k - 1], inputs[2 * k] = x.q, scales_by_row(x, x.shape[1])
    inputs[4 + k] = NVFP4[x.rule] and x.amax or false
  end
  return (run("mx_matmul", inputs, { tonumber(FORMATS[a.format]), tonumber(FORMATS[b.format]),
    tonumber(RULES[a.rule]), tonumber(RULES[b.rule]) }, { 1 / (a.factor * b.factor) }))
end

local function padded(x, d, size)
  local shape = x.shape
  if shape[d] == size then return x end
  shape[d] = size - shape[d]
  return require("engine.tensor.tensor").concat({ x,
    require("engine.tensor.create").zeros(shape, { dtype = "u8", keep = false }) }, d)
end

--- Returns the scales of a quantized tensor in the order in which cuBLASLt's block-scaled products
--- read them (VEC32_UE8M0, VEC16_UE4M3): u8 [tiles down x tiles across x 32 x 4 x 4]. A tile is the
--- scales of 128 rows x 4 blocks; zeros fill incomplete tiles. In its tile, the scale of row r and
--- block c has the index (r % 32) * 16 + floor(r % 128 / 32) * 4 + c % 4. Rows, blocks and indices
--- count from 0. If a block has several rows, its scale is repeated for each row.
function M.gemm_scales(x)
  expect(getmetatable(x) == Quantized, x, "mx.gemm_scales: expected a result of mx.quantize")
  local rows = 1
  for d = 1, #x.shape - 1 do rows = rows * x.shape[d] end
  local scale = scales_by_row(x, rows)
  local across = scale.shape[2]
  local tiles, wide = math.ceil(rows / 128), math.ceil(across / 4)
  scale = padded(padded(scale, 2, 4 * wide), 1, 128 * tiles)
  return scale:view(tiles, 4, 32, wide, 4):permute(1, 4, 3, 2, 5):contiguous()
end

return M
