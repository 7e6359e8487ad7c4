-- A number in every format: the rounded value, the error, the next numbers below and above, and the
-- bits.
--   print(engine.bits(15213.0))
--   engine.bits(0.1).f16.value, .error, .below, .above, .code
-- The REPL has this function as `bits`. Each format rounds the double once, to nearest even, as
-- core/base/numerics.h does. Numbers that are too large become inf. In e4m3, which has no inf, they
-- become nan; in formats without inf and nan, they become the largest number. ue4m3 and ue8m0 are
-- formats for scales and encode |x|; ue8m0 rounds |x| down to a power of two. int8 and mxint8
-- (units of 1/64) are two's complement. Called by scripts and the REPL.
local M_ffi = require "engine.base.ffi"
local formats = require "engine.base.formats"
local show = require "engine.base.show"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local FORMATS = {}
for i, name in ipairs { "f64", "f32", "tf32", "bf16", "f16", "e5m6", "e5m2", "e4m3", "e4m3_ieee",
  "e3m2", "e2m3", "e2m1", "ue4m3", "ue8m0", "int8", "mxint8" } do
  FORMATS[i] = formats.of(name)
end

local cast = ffi.new "union { double f64; uint64_t f64_code; float f32; uint32_t f32_code; }"
local IS_C = { f64 = true, f32 = true }     -- formats that C has; the core converts the others

local function encode(format, x)
  local name = format.name
  if not IS_C[name] then return ffi.new("uint64_t", tonumber(C.eng_small_encode(name, x, 0))) end
  cast[name] = x
  return ffi.new("uint64_t", cast[name .. "_code"])
end

local function decode(format, code)
  local name = format.name
  if not IS_C[name] then return C.eng_small_decode(name, tonumber(code)) end
  cast[name .. "_code"] = code
  return cast[name]
end

-- 2^n as uint64.
local function power(n) return bit.lshift(1ULL, n) end

-- Returns the neighbour of the finite number that has the code `code`: the next larger number of
-- the format (`up`) or the next smaller one. Returns nil at the end of the format's range.
local function neighbour(format, code, up)
  local width = format.exponent_bits + format.fraction_bits
  if not format.signed then
    if up then
      return decode(format, code) < format.largest and decode(format, code + 1) or nil
    end
    return code > 0 and decode(format, code - 1) or nil
  end
  if format.exponent_bits == 0 then                         -- two's complement
    if tonumber(code) == (up and 127 or 128) then return nil end
    return decode(format, (code + (up and 1ULL or 255ULL)) % 256)
  end
  local sign = power(width)
  local negative, magnitude = code >= sign, code % sign
  if magnitude == 0 then return decode(format, up and 1ULL or sign + 1) end
  local away = negative ~= up                               -- the neighbour is farther from zero
  if away and magnitude + 1 == sign then return nil end
  local next_magnitude = away and magnitude + 1 or magnitude - 1
  local value = decode(format, next_magnitude + (negative and sign or 0ULL))
  return value == value and value or nil
end

local function binary(code, from, count)
  local digits = {}
  for i = from + count - 1, from, -1 do
    digits[#digits + 1] = bit.band(bit.rshift(code, i), 1ULL) == 1ULL and "1" or "0"
  end
  return table.concat(digits)
end

local function describe(format, x)
  local e, m = format.exponent_bits, format.fraction_bits
  local code = encode(format, x)
  local value = decode(format, code)
  local r = { name = format.name, code = code, value = value, largest = format.largest,
    sign = format.signed and binary(code, e + m, 1) or "", exponent = binary(code, m, e),
    fraction = binary(code, 0, m) }
  local target = not format.signed and math.abs(x) or x
  if x == x then r.error = value - target end
  if value - value == 0 then
    r.below, r.above = neighbour(format, code, false), neighbour(format, code, true)
    local field = tonumber(bit.band(bit.rshift(code, m), power(e) - 1))
    local gradual = m > 0 and e > 0                         -- the format has subnormals
    r.subnormal = gradual and field == 0 and value ~= 0
    r.power = math.max(field, gradual and 1 or 0) - format.bias
    if e == 0 then r.power = format.top - 6 end             -- the exponent of the lowest bit
  end
  return r
end

-- ------------------------------------------------------------------ as text

-- Returns x as text with the fewest digits that read back as the same double: from 4 digits to
-- `most` (by default 9), even if the text then reads back as another double. A whole number below
-- 1e9 has all its digits.
local function text(x, most)
  if x == nil then return "-" end
  if x ~= x then return "nan" end
  if x == math.huge or x == -math.huge then return x > 0 and "inf" or "-inf" end
  if x == 0 then return 1 / x < 0 and "-0" or "0" end
  if x % 1 == 0 and math.abs(x) < 1e9 then return ("%.0f"):format(x) end
  for digits = 4, most or 9 do
    local short = ("%." .. digits .. "g"):format(x)
    if tonumber(short) == x then return short end
  end
  return ("%." .. (most or 9) .. "g"):format(x)
end

local function error_text(r, x)
  if x ~= x then return "" end
  if r.error - r.error ~= 0 then return x - x ~= 0 and "" or "too large" end     -- nan or inf
  if r.error == 0 then return "exact" end
  if r.value == 0 then return "lost" end
  if x == 0 then return ("%+.3g"):format(r.error) end
  local note = r.name == "ue8m0" and ", rounded down"
    or math.abs(x) > r.largest and ", saturated" or ""
  local percent = 100 * math.abs(r.error / x)
  return ("%+.3g (%s %%%s)"):format(r.error, (percent < 99 and "%.2g" or "%.0f"):format(percent),
    note)
end

local HEAD = { "format", "value", "error", "below", "above", "hex", "s exponent fraction" }

local function hex(r)
  local digits = math.ceil((#r.sign + #r.exponent + #r.fraction) / 4)
  return bit.tohex(r.code, digits)
end

local function table_text(result)
  local rows = { HEAD }
  for i, r in ipairs(result) do
    local bits = ("%1s %s %s"):format(r.sign, r.exponent, r.fraction):gsub("%s+$", "")
    local most = r.name == "f64" and 17 or 9
    local value = text(r.value, most) .. (r.subnormal and " (subnormal)" or "")
    rows[i + 1] = { r.name, value, error_text(r, result.x), text(r.below, most),
      text(r.above, most), hex(r), bits }
  end
  local lines = { show.table(rows, { [1] = true, [3] = true, [7] = true }) }
  local finite = result.x - result.x == 0 and result.x ~= 0
  if finite then
    local fraction, exponent = math.frexp(math.abs(result.x))
    table.insert(lines, 1, ("%s = %s%s * 2^%d"):format(text(result.x, 17),
      result.x < 0 and "-" or "", text(2 * fraction, 17), exponent - 1))
  end
  return table.concat(lines, "\n")
end

local meta = { __tostring = table_text }

--- engine.bits(x): a number in every format. x is a number or its text ("0x1p-24", "inf"). Returns
--- a list with an entry for each format; result[NAME] is the entry of the format NAME. Fields of an
--- entry: name, code, value, error (value - x; value - |x| in formats without a sign), below,
--- above; sign, exponent and fraction (each as a string of bits); power (|value| is 2^power times
--- the significand), subnormal (true or false), largest (the format's largest number). below,
--- above, power and subnormal are nil if the value is inf or nan. The list prints as a table.
function M.of(x)
  local number = tonumber(x)
  M_ffi.expect(number, x, "bits: expected a number")
  local result = { x = number }
  for i, format in ipairs(FORMATS) do
    result[i] = describe(format, number)
    result[format.name] = result[i]
  end
  return setmetatable(result, meta)
end

return M
