-- Statistics of a few repetitions: mean and spread, and paired differences with their confidence
-- intervals. Used by engine.contest, `engine contest` and report/lab.lua.
local M = {}

--- Returns the mean and the standard deviation of a list; the deviation of a single number is 0.
function M.mean_and_spread(list)
  local sum, squares = 0, 0
  for _, x in ipairs(list) do sum = sum + x end
  local mean = sum / #list
  for _, x in ipairs(list) do squares = squares + (x - mean) ^ 2 end
  return mean, math.sqrt(squares / math.max(1, #list - 1))
end

--- Returns "0.3918 +- 0.0012": the spread with two significant digits, and the mean to the same
--- decimal place. Both are rounded to whole numbers if the spread is 10 or more; the mean has four
--- significant digits if the spread is 0 or below 1e-7. Returns only the mean if n, the number of
--- values, is 1, or if the mean is inf or nan.
function M.text(mean, spread, n)
  if n < 2 or mean - mean ~= 0 then return ("%.4g"):format(mean) end
  if spread == 0 then return ("%.4g +- 0"):format(mean) end
  local places = math.max(0, 1 - math.floor(math.log10(spread)))
  if places > 8 then return ("%.4g +- %.2g"):format(mean, spread) end
  local form = "%." .. places .. "f"
  return (form .. " +- " .. form):format(mean, spread)
end

-- The 97.5 % quantiles of Student's t distribution with 1 to 30 degrees of freedom.
local T = { 12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010,
  2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687,
  2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423 }
local Z = 1.959963984540054     -- the same quantile of the normal distribution

--- Returns the half width of a mean's 95 % confidence interval, in standard errors of the mean. Up
--- to 30 degrees of freedom it comes from the table T, beyond that from the expansion about the
--- normal distribution (Abramowitz and Stegun 26.7.5).
function M.t95(degrees)
  return T[degrees] or Z + (Z ^ 3 + Z) / (4 * degrees)
    + (5 * Z ^ 5 + 16 * Z ^ 3 + 3 * Z) / (96 * degrees ^ 2)
end

--- Returns statistics of the differences b[i] - a[i] for i from 1 to `count`: { n, mean, spread,
--- low, high }. Leaves out i if a value is missing or the difference is inf or nan; n is the number
--- of differences that remain. The 95 % confidence interval of the mean is from `low` to `high`;
--- both are false if n is 1. Returns nil if n would be 0.
function M.paired(a, b, count)
  local list = {}
  for i = 1, count do
    local difference = a[i] and b[i] and b[i] - a[i]
    if difference and difference - difference == 0 then list[#list + 1] = difference end
  end
  local n = #list
  if n == 0 then return nil end
  local mean, spread = M.mean_and_spread(list)
  local half = n > 1 and M.t95(n - 1) * spread / math.sqrt(n)
  return { n = n, mean = mean, spread = spread, low = half and mean - half,
    high = half and mean + half }
end

return M
