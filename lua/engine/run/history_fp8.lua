-- The meters of FP8 layers in a history: their names, and h:fp8(site, step), which prints as a
-- table. Called by history.lua.
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local M = {}

-- The names of the meters, which are columns of the table `fp8`.
M.names = { "snr", "underflow", "overflow", "zeros", "amax", "least", "scale_min", "scale_max",
  "count", "peak", "power", "asked" }

local MEASURED = 9     -- the first 9 meters cover only the measured elements of a tensor

-- Returns the reason why no meters are found: the run has no meters, the name of no layer with
-- meters begins with `site`, or this step was not measured.
local function no_fp8(h, site, step)
  local sites, steps = {}, {}
  for row in site and h:each("SELECT DISTINCT site FROM fp8 ORDER BY site") or function() end do
    sites[#sites + 1] = row.site
  end
  if #sites == 0 then
    return "the run has no meters of FP8 layers: a run in a recipe such as fp8_block has them, " ..
      "once a step was measured"
  end
  local known = false
  for _, name in ipairs(sites) do known = known or name:sub(1, #site) == site end
  if not known then
    return ("no FP8 layer's name begins with '%s'%s; FP8 layers are %s%s"):format(site,
      nearest.hint(site, sites), table.concat(sites, ", ", 1, math.min(#sites, 12)),
      #sites > 12 and (" and %d more"):format(#sites - 12) or "")
  end
  for row in h:each("SELECT DISTINCT step FROM fp8 ORDER BY step LIMIT 8") do
    steps[#steps + 1] = row.step
  end
  return ("FP8 layers were not measured at step %s; measured steps: %s%s"):format(tostring(step),
    table.concat(steps, ", "), #steps == 8 and " ..." or "")
end

local fp8_meta = { __tostring = function(rows)
  if #rows == 0 then return rows.problem end
  local lines = { ("%6s  %-28s %-4s %8s %10s %10s %11s %11s %9s"):format("step", "layer", "role",
    "SNR dB", "underflow", "overflow", "amax", "scale", "binades") }
  for _, r in ipairs(rows) do
    local range = r.least and r.least > 0 and math.log(r.amax / r.least) / math.log(2) or 0
    lines[#lines + 1] = ("%6d  %-28s %-4s %8s %9.3g%% %9.3g%% %11.4g %11.4g %9.1f"):format(r.step,
      r.site, r.role, r.snr and ("%.1f"):format(r.snr) or "-",
      100 * r.underflow, 100 * r.overflow, r.amax, r.scale_max, range)
  end
  lines[#lines + 1] = "SNR: the power of the values over the power of their rounding errors\n" ..
    "underflow: rounded to 0; overflow: past the format's largest number\n" ..
    "amax: before scaling; the amax of dy is divided by the loss scale\n" ..
    "scale: value = stored code x scale, in the block with the largest scale\n" ..
    "binades: powers of two from the smallest nonzero value to amax"
  if rows.every then
    lines[#lines + 1] = ("steps: 1 of %d is measured (the recipe's `sample`)"):format(rows.every)
  end
  return show.shown(table.concat(lines, "\n"), true)
end }

--- Returns the rows of h:fp8(site, step), which history.lua describes.
function M.read(h, site, step)
  if not h:has "fp8" then return setmetatable({ problem = no_fp8(h) }, fp8_meta) end
  local where = " FROM fp8 WHERE substr(site, 1, ?) = ?" .. (step and " AND step = ?" or "") ..
    " ORDER BY step, site, role"
  local rows = step and h:query("SELECT *" .. where, #site, site, step)
    or h:query("SELECT *" .. where, #site, site)
  for _, row in ipairs(rows) do
    for i, meter in ipairs(M.names) do
      if row[meter] == nil and meter ~= "snr" and meter ~= "least" and i <= MEASURED then
        row[meter] = 0 / 0
      end
    end
  end
  if #rows == 0 then rows.problem = no_fp8(h, site, step) end
  rows.every = not step and tonumber((h:meta().fp8 or ""):match('"sample":(%d+)')) or nil
  return setmetatable(rows, fp8_meta)
end

return M
