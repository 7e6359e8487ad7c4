-- Statistics of a tensor's elements: x:stats(), x:isfinite(), x:isinf(), x:isnan(). Adds these
-- methods to tensors; loaded by engine/init.lua. Called by scripts and run/run.lua.
local M_ffi = require "engine.base.ffi"
local formats = require "engine.base.formats"
local tensor = require "engine.tensor.tensor"

local C, check, methods = M_ffi.C, M_ffi.check, tensor.methods
local buffer = M_ffi.new("eng_tensor_stats")

--- Statistics from one pass over a float tensor (f64 is converted to f32 first): { count, inf, nan,
--- zeros, underflow, amax, norm, hist }. amax and norm are over the finite elements; underflow
--- counts nonzero elements below the smallest normal number of the dtype; hist[e] counts elements
--- with floor(log2 of the magnitude) = e.
function methods.stats(x)
  local read = x.dtype == "f64" and x:to("f32") or x:is_contiguous() and x or x:contiguous()
  check(C.eng_stats(buffer, read, C.ENG_NEED_GRADIENTS))
  return { count = tonumber(buffer.count), inf = tonumber(buffer.inf), nan = tonumber(buffer.nan),
    zeros = tonumber(buffer.zeros), underflow = tonumber(buffer.underflow), amax = buffer.amax,
    norm = math.sqrt(buffer.sum_squares), hist = formats.add_histogram({}, buffer.hist) }
end

--- Counts the weights that are not finite. Returns a text such as "the weights hold 3 inf and 1
--- nan, the first in head.weight", or nil if all are finite. list: entries { name, tensor }, as
--- from model:parameters().
local function nonfinite(list)
  local inf, nan, first = 0, 0, nil
  for _, p in ipairs(list) do
    check(C.eng_stats(buffer, p.tensor, 0))
    if buffer.inf + buffer.nan > 0 then
      inf, nan, first = inf + tonumber(buffer.inf), nan + tonumber(buffer.nan), first or p.name
    end
  end
  return first and ("the weights hold %d inf and %d nan, the first in %s"):format(inf, nan, first)
end

--- Whether each element is nan, as bool.
function methods.isnan(x) return x:ne(x) end
--- Whether each element is inf or -inf, as bool.
function methods.isinf(x) return x:abs():eq(math.huge) end
--- Whether each element is neither inf nor nan, as bool.
function methods.isfinite(x) return x:abs():lt(math.huge) end

return { nonfinite = nonfinite }
