-- NF4, the format of QLoRA's frozen weights, with the codes of bitsandbytes. core/base/nf4.h
-- defines the format. Called by scripts and nn/lora_layers.lua.
--
--   local q = engine.nf4.quantize(weight)          -- 4.13 bits a number, with the scales
--   print(q, q:dequantize("bf16"))
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"

local run = M_ffi.run

local M = {}

local methods = {}
local Quantized = { __index = methods }

--- Returns the values as a tensor of x's shape, f32 unless another float dtype is named.
function methods.dequantize(x, dtype)
  local columns = x.shape[#x.shape] or 1
  return run("nf4_dequantize", { x.q, x.absmax, x.group or false, x.offset or false },
    { arguments.dtype_number(dtype or "f32"), x.block, columns > 0 and x.count / columns or 0,
      columns }):view(unpack(x.shape))
end

--- Returns how many bytes the codes and scales take.
function methods.bytes(x)
  return x.q.count + (x.group and x.absmax.count + 4 * x.group.count + 4 or 4 * x.absmax.count)
end

function Quantized.__tostring(x)
  return ("nf4 %s in blocks of %d, %d bytes"):format(arguments.shape_text(x.shape), x.block,
    x:bytes())
end

local OPTIONS = { block = true, double = true, offset = true }

--- Quantizes x to NF4: each element becomes one of 16 quantiles of a normal distribution, times the
--- absmax of its block. A block is a run of consecutive elements in row-major order. No gradient
--- passes through quantize. Options:
---   block    the number of elements in a block, a power of two from 32 to 4096; by default 64
---   double   true (the default): absmaxes are stored in 8 bits
---   offset   f32 [1]: subtracted from the absmaxes before they are stored in 8 bits; by default
---            their mean
--- Given bitsandbytes' offset, the codes are those of bitsandbytes 0.50 on a CPU. The default
--- offset may differ from bitsandbytes' offset, because bitsandbytes adds the absmaxes in a
--- different order.
--- Fields of the result: q (u8, two codes to a byte, the even element in the high half), absmax
--- (f32, or u8 codes with `double`), shape, count, block; with `double` also group (a scale for
--- each group of absmax codes) and offset.
function M.quantize(x, options)
  arguments.want(x, "nf4.quantize")
  options = arguments.read_named(options, "nf4.quantize", OPTIONS)
  local block, double = options.block or 64, options.double ~= false
  arguments.want_whole(block, "nf4.quantize", "block", 32)
  if options.offset ~= nil then arguments.want(options.offset, "nf4.quantize: offset") end
  local q, absmax, code, group, offset = run("nf4_quantize", { x, options.offset or false },
    { block, double and 1 or 0 }, {}, 5)
  return setmetatable({ q = q, absmax = double and code or absmax, group = group, offset = offset,
    shape = x.shape, count = x.count, block = block }, Quantized)
end

--- Makes a quantized matrix from the fields of a result of quantize() with blocks of 64. shape:
--- { rows, columns }.
function M.of(q, absmax, group, offset, shape)
  return setmetatable({ q = q, absmax = absmax, group = group, offset = offset, shape = shape,
    count = shape[1] * shape[2], block = 64 }, Quantized)
end

return M
