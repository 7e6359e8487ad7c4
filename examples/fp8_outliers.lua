-- The effect of outliers on all other elements. One in a thousand activations is multiplied by 2^s.
-- A scale for the whole tensor must cover the outliers, which pushes all other elements toward the
-- subnormals. With a scale for each 1 x 128 block, an outlier affects only the elements of its
-- block. The signal-to-noise ratio covers only elements that are not outliers.
--
--   ./engine examples/fp8_outliers.lua
--   ./engine examples/fp8_outliers.lua rows=512 svg=outliers.svg
--
-- Measured (rows=256), dB; a tensor of 256 rows has larger outliers than one row:
--                 none   x 2^8  x 2^12  x 2^14  x 2^16
--   tensor scale  31.5    31.5    30.9    23.2    11.3
--   row           31.5    31.5    31.5    28.7    18.0
--   128x128       31.5    31.5    31.4    26.9    15.0
--   1x128         31.8    31.8    31.8    31.6    28.5
--   1x128 pow2    31.5    31.5    31.5    31.0    26.2
--   e5m2, tensor  25.6    25.5    25.5    25.5    25.5
-- e4m3 has 17.8 binades: block scales begin to matter when outliers are more than 2^12 to 2^14
-- times larger than the rest, not before.
local engine = require "engine"
local lab = require "engine.report.lab"
local fp8 = engine.fp8

local cfg = engine.config({ rows = 64, seed = 1, share = 0.001, svg = "" },
  { rows = "rows, of 4096 numbers each", seed = "seed for the numbers", share = "share of outliers",
    svg = "a file for the curves" },
  { count = "rows", natural = "seed", share = "share", output = "svg" })
local K = 4096
local KINDS = { { "tensor scale", { block = "tensor" } }, { "1x128", { block = "1x128" } },
  { "1x128 pow2", { block = "1x128", pow2 = true } },
  { "128x128", { block = "128x128" } }, { "row", { block = "row" } },
  { "e5m2, tensor", { format = "e5m2" } } }
local SIZES = { 0, 4, 8, 10, 12, 14, 16 }

engine.seed(cfg.seed)
local rows, series, heads = {}, {}, { "SNR, dB" }
for i, kind in ipairs(KINDS) do
  rows[i], series[i] = { kind[1] }, { name = kind[1], values = {} }
end
for column, s in ipairs(SIZES) do
  heads[column + 1] = s == 0 and "none" or "x 2^" .. s
  engine.scope(function()
    local plain = engine.randn(cfg.rows, K)
    local chosen = engine.rand(cfg.rows, K):lt(cfg.share):to("f32")
    local x = plain * (chosen * (2 ^ s - 1) + 1)
    local others = chosen:neg() + 1
    for i, kind in ipairs(KINDS) do
      local off = (fp8.quantize(x, kind[2]):dequantize() - x) * others
      local signal, noise = plain * others, off
      local power, lost = (signal * signal):sum():item(), (noise * noise):sum():item()
      -- false if all numbers are outliers
      local db = power > 0 and 10 * math.log10(power / lost)
      rows[i][column + 1], series[i].values[column] = db and ("%.1f"):format(db) or "-", db or 0 / 0
    end
  end)
end
lab.table(heads, rows)
print(("%g %% of the numbers are outliers, larger by the factor above (none: 1);\n"
  .. "the signal-to-noise ratio, in dB, is that of all other numbers"):format(100 * cfg.share))
lab.svg(cfg.svg, { title = "SNR of the elements that are not outliers, dB",
  x = { unpack(heads, 2) }, y = ("size of %g %% outliers"):format(100 * cfg.share),
  series = series })
