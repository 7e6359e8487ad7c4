-- How much precision a long sum loses in Hopper's FP8 accumulator, and how much promotion recovers.
-- Promotion adds the accumulator to an f32 sum at intervals. The tensor cores keep 13 fraction bits
-- and truncate, so a sum of K products of one sign loses a share that grows with K. The error here
-- is that of the accumulator alone, relative to exact sums of the same codes.
--
--   ./engine examples/fp8_promotion.lua
--   ./engine examples/fp8_promotion.lua draws=2000 svg=promotion.svg
--
-- Measured (draws=2000), mean (largest) relative error; in the last row |error| / sqrt(K):
--   data       K      no promotion       every 512          every 128
--   U[0,1)     1024   1.52 % (1.74 %)    0.586 % (0.691 %)  0.0558 % (0.0785 %)
--   U[0,1)     4096   7.46 % (7.85 %)    0.577 % (0.643 %)  0.0551 % (0.0656 %)
--   U[0,1)     16384  25.1 % (25.7 %)    0.58 % (0.611 %)   0.0555 % (0.0607 %)
--   |N(0,1)|   4096   6.61 % (7.43 %)    0.563 % (0.65 %)   0.0597 % (0.0747 %)
--   N(0,1)     4096   8.8e-4 (9.1e-3)    2.6e-4 (1.3e-3)    1.0e-4 (5.1e-4)
-- So promotion matters where products have one sign: after ReLU, squares, probabilities. With
-- independent signs the error is far below that of the codes themselves (2^-4 each).
local engine = require "engine"
local lab = require "engine.report.lab"
local fp8 = engine.fp8

local cfg = engine.config({ draws = 400, seed = 1, svg = "" },
  { draws = "dot products of each kind", seed = "seed for the numbers",
    svg = "a file for the curves" }, { count = "draws", natural = "seed", output = "svg" })

local DATA = {
  { "U[0,1)", { 1024, 4096, 16384 }, function(m, k) return engine.rand(m, k) end },
  { "|N(0,1)|", { 4096 }, function(m, k) return engine.randn(m, k):abs() end },
  { "N(0,1)", { 4096 }, function(m, k) return engine.randn(m, k) end, true },
}
local PROMOTIONS = { 0, 512, 128 }

engine.seed(cfg.seed)
local rows, curves = {}, {}
local rows_of_a = math.max(1, math.floor(math.sqrt(cfg.draws)))
local rows_of_b = math.ceil(cfg.draws / rows_of_a)
for _, data in ipairs(DATA) do
  for _, k in ipairs(data[2]) do
    local cells = { data[1] .. (data[4] and ", error / sqrt K" or ""), k }
    engine.scope(function()
      local a, b = fp8.quantize(data[3](rows_of_a, k), { block = "row" }),
        fp8.quantize(data[3](rows_of_b, k), { block = "row" })
      local want, n = fp8.matmul(a, b,
        { transpose_b = true, accumulator = "exact", dtype = "f64" }):read()
      for p, promotion in ipairs(PROMOTIONS) do
        local got = fp8.matmul(a, b,
          { transpose_b = true, accumulator = "hopper", promotion = promotion }):read()
        local unit, sum, most = data[4] and math.sqrt(k), 0, 0
        for i = 0, n - 1 do
          local off = math.abs(got[i] - want[i]) / (unit or math.abs(want[i]))
          sum, most = sum + off / n, math.max(most, off)
        end
        cells[p + 2] = data[4] and ("%.1e (%.1e)"):format(sum, most)
          or ("%.3g %% (%.3g %%)"):format(100 * sum, 100 * most)
        if data[1] == "U[0,1)" then
          curves[p] = curves[p]
            or { name = promotion == 0 and "no promotion" or "every " .. promotion, values = {} }
          table.insert(curves[p].values, sum)
        end
      end
    end)
    rows[#rows + 1] = cells
  end
end
lab.table({ "data", "K", "no promotion", "every 512", "every 128" }, rows)
print("mean relative error of a sum of K products, in parentheses the largest; the accumulator is\n"
  .. "promoted, which means added to f32, after every 512 or 128 products")
lab.svg(cfg.svg, { title = "relative error of Hopper's accumulator, U[0,1)",
  x = { "1024", "4096", "16384" }, y = "K", log = 10, series = curves })
