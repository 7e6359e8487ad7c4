-- Number formats and exponent histograms, as the core defines them. Owns a cache of the formats'
-- properties. Used by tensor/, run/ and report/.
local M_ffi = require "engine.base.ffi"

local C = M_ffi.C
local FIRST, BINS = C.ENG_HIST_FIRST, C.ENG_HIST_BINS

-- first, last: the exponents of a histogram's first and last bin
local formats = { first = FIRST, last = FIRST + BINS - 1 }

local made = {}

--- Returns the properties of a number format; nil if there is no format of this name. Fields:
---   largest   the largest finite number
---   limit     the smallest magnitude that rounds to inf (in e4m3: to nan); inf if none does
---   top       the exponent of the largest finite number
---   normal    the exponent of the smallest normal number
---   zero      the exponent of the largest magnitude that rounds to zero
--- and name, exponent_bits, fraction_bits, bias, signed.
function formats.of(name)
  if made[name] then return made[name] end
  local f = M_ffi.new "eng_format"
  if type(name) ~= "string" or not C.eng_format_get(f, name) then return nil end
  local _, exponent = math.frexp(f.smallest)
  made[name] = { name = name, largest = f.largest, limit = f.overflow, top = f.max_exponent,
    normal = f.min_exponent, zero = exponent - 2, exponent_bits = f.exponent_bits,
    fraction_bits = f.fraction_bits, bias = f.bias, signed = f.is_signed ~= 0 }
  return made[name]
end

--- Adds a histogram's bins to `counts`: counts[exponent] is the number of finite nonzero elements g
--- with floor(log2|g|) = exponent. The first bin also has all smaller elements, the last bin all
--- larger ones. Returns `counts`.
function formats.add_histogram(counts, bins)
  for b = 0, BINS - 1 do
    if bins[b] ~= 0 then counts[b + FIRST] = (counts[b + FIRST] or 0) + tonumber(bins[b]) end
  end
  return counts
end

return formats
