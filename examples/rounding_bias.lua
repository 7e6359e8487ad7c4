-- Several projects round to E2M1 stochastically. Some of their rules are exact, others are biased
-- low or high. This study measures the bias of each rule, over all values of a random byte or over
-- many random draws with several seeds. In the list of rules, f is the distance of a number from
-- the next lower number of the grid, as a fraction of the grid's step:
--   te      Transformer Engine's software path: P(up) = floor(256 f) / 256
--   te amd  its AMD port, up if a random byte / 256 < f: P(up) = ceil(256 f) / 256
--   mslk    adds 22 random bits to the f32; below 1, this noise is narrower than a step of the grid
--   floats  uses the four bytes of a random float in [0, 1) as random bytes for four elements
--           (measured for bytes 2 and 3: sign, exponent and leading fraction bits)
--   exact   an ideal rule, P(up) = f; the engine with 24 random bits is within 2^-24 of it
--
--   ./engine examples/rounding_bias.lua
--   ./engine examples/rounding_bias.lua draws=100000 svg=bias.svg
--
-- Measured, largest bias in steps of the grid: te 0.0031 (low), te amd 0.0031 (high), mslk 0.60,
-- floats byte 2 0.136 +- 0.002 and byte 3 0.75, the engine with 24 bits 0.004 +- 0.003 (sampling).
local engine = require "engine"
local lab = require "engine.report.lab"

local cfg = engine.config({ draws = 20000, seeds = 5, svg = "" },
  { draws = "draws per number and seed, for rules that do not try all random bytes",
    seeds = "seeds of these draws", svg = "a file for the curves" },
  { count = "draws seeds", output = "svg" })

local floor = math.floor
local function step(x) return x < 2 and 0.5 or x < 4 and 1 or 2 end
-- Returns the mean of x after rounding, if x rounds up with probability p.
local function up(x, p) return floor(x / step(x)) * step(x) + p * step(x) end
local function fraction(x) return x / step(x) - floor(x / step(x)) end

-- Returns the mean of x after rounding with a random byte. weight(byte): the probability of a byte.
local function bytes(x, weight)
  local p, f = 0, fraction(x)
  for byte = 0, 255 do
    if floor(f * 256) + byte >= 256 then p = p + weight(byte) end
  end
  return up(x, p)
end

-- Returns one byte of an f32 number u in [0, 1). Byte 3 has the sign and the first seven bits of
-- the exponent, byte 2 the last bit of the exponent and the leading fraction bits.
local function byte_of(u, which)
  if u == 0 then return 0 end
  local m, e = math.frexp(u)
  local bits = (e + 126) * 2 ^ 23 + (2 * m - 1) * 2 ^ 23
  return floor(bits / 2 ^ (8 * which)) % 256
end
local function floats(which)
  return function(x)
    local weights = {}
    for byte = 0, 255 do weights[byte] = 0 end
    for _ = 1, cfg.draws do
      local b = byte_of(math.random(0, 2 ^ 24 - 1) / 2 ^ 24, which)
      weights[b] = weights[b] + 1 / cfg.draws
    end
    return bytes(x, function(byte) return weights[byte] end)
  end
end

-- Returns a function that measures the mean of x after the engine's rounding with `bits` random
-- bits. With 8 bits the engine rounds as te does.
local function engine_mean(bits)
  return function(x, seed)
    engine.seed(seed)
    return engine.scope(function()
      local n = math.ceil(cfg.draws / 32)
      local values = engine.concat({ engine.full({ n, 32 }, x), engine.full({ n, 32 }, 6) }, 2)
      local q = engine.mx.quantize(values, { format = "e2m1", rule = "rceil", sr_bits = bits,
        block = "1x64" })
      return q:dequantize():slice(2, 1, 32):mean():item()
    end)
  end
end

-- Each rule: its name, the mean of x after rounding, and whether this mean depends on draws.
local RULES = {
  { "te", function(x) return bytes(x, function() return 1 / 256 end) end },
  { "te amd", function(x) return up(x, math.ceil(256 * fraction(x)) / 256) end },
  { "mslk", function(x)
    -- adds noise in [0, 2^(e - 2)), where 2^(e - 2) is the value of x's first fraction bit, and
    -- truncates the sum to E2M1
    local _, e = math.frexp(x)
    local width, mean = 2 ^ (e - 2), 0
    for k = 0, 1023 do
      local sum = x + (k + 0.5) / 1024 * width
      mean = mean + floor(sum / step(sum)) * step(sum) / 1024
    end
    return mean
  end },
  { "floats, byte 2", floats(2), draws = true }, { "floats, byte 3", floats(3), draws = true },
  { "exact", function(x) return x end },
  { "engine, 8 bits", engine_mean(8), draws = true },
  { "engine, 24 bits", engine_mean(24), draws = true },
}

local NUMBERS = { 0.1, 0.3, 0.7, 0.9, 1.2, 1.7, 2.3, 3.1, 4.4, 5.5 }
local heads, rows, series, verdicts = { "mean - x" }, {}, {}, {}
for k, x in ipairs(NUMBERS) do heads[k + 1] = ("%g"):format(x) end
heads[#heads + 1] = "largest, in steps"
for _, rule in ipairs(RULES) do
  local row, curve, most = { rule[1] }, { name = rule[1], values = {} }, {}
  for k, x in ipairs(NUMBERS) do
    local bias = {}
    for seed = 1, rule.draws and cfg.seeds or 1 do
      math.randomseed(seed)
      bias[seed] = rule[2](x, seed) - x
      local size = math.abs(bias[seed]) / step(x)
      most[seed] = math.max(most[seed] or 0, size)
    end
    curve.values[k] = lab.mean(bias)
    row[k + 1] = ("%+.4f"):format(curve.values[k])
  end
  row[#row + 1] = lab.mean_text(most, "%.4f")
  rows[#rows + 1], series[#series + 1] = row, curve
  verdicts[rule[1]] = lab.mean(most)
end
lab.table(heads, rows)
local biased = {}
for _, rule in ipairs(RULES) do
  if verdicts[rule[1]] > 0.05 then biased[#biased + 1] = rule[1] end
end
print(("Conclusion: te is off by at most %.4f of a step and its AMD port by %.4f; off by more\n"
  .. "than 1/20 of a step: %s."):format(verdicts.te, verdicts["te amd"],
  table.concat(biased, "; ")))
lab.svg(cfg.svg, { title = "Bias of stochastic rounding to E2M1",
  x = { unpack(heads, 2, #NUMBERS + 1) }, y = "number", series = series })
