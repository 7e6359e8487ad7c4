-- Prints the FP8 formats as tables: their ranges and special codes, every positive number of e4m3
-- or e5m2, and the spacing of adjacent numbers. See core/base/fp8.h.
--
--   ./engine examples/fp8_bits.lua
--   ./engine examples/fp8_bits.lua format=e5m2 numbers=true      every positive number
--   ./engine examples/fp8_bits.lua value=0.1 svg=spacing.svg     a number in each format; spacing
local engine = require "engine"
local lab = require "engine.report.lab"
local fp8 = engine.fp8

local cfg = engine.config({ format = "e4m3", numbers = false, value = 0.1, svg = "" },
  { format = { "the format of the numbers that `numbers` prints", choices = { "e4m3", "e5m2" } },
    numbers = "print every positive number", value = "a number to show in each format",
    svg = "a file for the spacing" }, { output = "svg" })

-- name; bits of sign, exponent and fraction; bias; fraction bits; codes of the largest number and
-- of the smallest normal number
local FORMATS = { { "e4m3", "1-4-3", 7, 3, 0x7E, 0x08 }, { "e5m2", "1-5-2", 15, 2, 0x7B, 0x04 },
  { "e5m6", "1-5-6", 15, 6, 0x7BF, 0x40 },
  { "f16", "1-5-10", 15, 10, 0x7BFF, 0x400 }, { "bf16", "1-8-7", 127, 7, 0x7F7F, 0x80 } }

-- Returns a power of two as text.
local function power(x) return ("2^%d"):format(math.floor(math.log(x) / math.log(2) + 0.5)) end

local rows = {}
for i, f in ipairs(FORMATS) do
  local name = f[1]
  local largest, least, tiny = fp8.decode(f[5], name), fp8.decode(f[6], name), fp8.decode(1, name)
  rows[i] = { name, f[2], f[3], ("%.6g"):format(largest), power(least), power(tiny),
    ("%.1f"):format(math.log(largest / tiny) / math.log(2)),
    ("2^-%d"):format(f[4] + 1), ("0x%x"):format(fp8.encode(1 / 0, name)),
    ("0x%x"):format(fp8.encode(0 / 0, name)),
    ("%g"):format(fp8.decode(fp8.encode(largest * 1.2, name, { saturate = true }), name)) }
end
lab.table({ "format", "bits", "bias", "largest", "normal", "subnormal", "binades", "error <=",
  "inf", "nan", "saturated" }, rows)

print(("\n%g in each format:"):format(cfg.value))
for _, f in ipairs(FORMATS) do print("  " .. fp8.bits(cfg.value, f[1])) end
print("  ue8m0, rounded down and up: " .. ("0x%02x 0x%02x"):format(fp8.encode(cfg.value, "ue8m0"),
  fp8.encode(cfg.value, "ue8m0", { up = true })))

local last = cfg.format == "e4m3" and 0x7E or 0x7B
if cfg.numbers then
  print(("\nevery positive number of %s, code and value:"):format(cfg.format))
  for code = 0, last, 8 do
    local cells = {}
    for k = code, math.min(code + 7, last) do
      cells[#cells + 1] = ("%02x %-11.6g"):format(k, fp8.decode(k, cfg.format))
    end
    print("  " .. table.concat(cells, " "))
  end
end

if cfg.svg ~= "" then
  local places, series = {}, { { name = "e4m3", values = {} }, { name = "e5m2", values = {} },
    { name = "e5m6", values = {} } }
  for e = -20, 16 do
    places[#places + 1] = "2^" .. e
    for _, s in ipairs(series) do
      local x = fp8.decode(fp8.encode(2 ^ e, s.name), s.name)
      local next_one = x > 0 and x == x and x < math.huge
        and fp8.decode(fp8.encode(x, s.name) + 1, s.name) or 0 / 0
      s.values[#places] = (next_one - x) / x
    end
  end
  print()
  lab.svg(cfg.svg, { title = "distance to the next number, relative", x = places,
    y = "magnitude", log = 2, series = series })
end
