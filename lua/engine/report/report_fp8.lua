-- The data of the report's section on FP8 layers: their meters (fp8_sites.lua) over the measured
-- steps, for a heat map of SNR and a table of the layers with the lowest SNR. report.lua draws
-- both. Called by report.lua.
local M = {}

local COLUMNS, WORST = 160, 12

--- Reads the meters of a history along an axis of steps { first, last }. Returns nil if the history
--- has no meters, else a table with the fields
---   rows       { name =, cells = { [column] = row of the history } } for each role of each layer;
---              a cell is the column's first measurement
---   starts     the first step of each column
---   width      how many steps a column has; at least the smallest distance between two measured
---              steps
---   looks      the number of measured steps
---   worst      the rows with the lowest SNR
---   low, high  the range of SNR in dB
function M.read(h, axis)
  if not h:has "fp8" then return nil end
  local first = math.ceil(axis.first)
  local apart = h:query("SELECT min(step - before) AS steps FROM (SELECT step, lag(step) OVER " ..
    "(ORDER BY step) AS before FROM (SELECT DISTINCT step FROM fp8))")[1].steps
  local width = math.max(tonumber(apart) or 1, math.ceil((axis.last - first + 1) / COLUMNS))
  local m = { width = width, rows = {}, starts = {}, low = math.huge, high = -math.huge, looks = 0 }
  local column_of, row_of, before = {}, {}, nil
  for s in h:each("SELECT DISTINCT step FROM fp8 ORDER BY step") do
    m.looks = m.looks + 1
    local at = math.floor((s.step - first) / width)
    if at ~= before then
      m.starts[#m.starts + 1] = first + at * width
      column_of[s.step], before = #m.starts, at
    end
  end
  if m.looks == 0 then return nil end
  -- all rows of the role x come first, then those of w, then those of dy; layers have the model's
  -- order
  for r in h:each([[SELECT site, role, min(snr) AS least,
      max(underflow) AS underflow, max(overflow) AS overflow,
      min(scale_min) AS scale_min, max(scale_max) AS scale_max,
      (SELECT id FROM parameters p WHERE p.name = site || '.weight') AS place FROM fp8
          GROUP BY site, role
      ORDER BY CASE role WHEN 'x' THEN 0 WHEN 'w' THEN 1 ELSE 2 END, place, site]]) do
    r.name, r.cells = r.site .. " " .. r.role, {}
    m.rows[#m.rows + 1], row_of[r.name] = r, r
  end
  for r in h:each("SELECT * FROM fp8 ORDER BY step") do
    local row, column = row_of[r.site .. " " .. r.role], column_of[r.step]
    if row then                                  -- nil only in a damaged file
      row.last = r
      if r.snr and r.snr == row.least and not row.least_at then row.least_at = r.step end
      if column then row.cells[column] = r end
    end
    if r.snr and r.snr - r.snr == 0 then
      m.low, m.high = math.min(m.low, r.snr), math.max(m.high, r.snr)
    end
  end
  m.low, m.high = m.low < m.high and math.floor(m.low) or m.low - 1, math.ceil(m.high)
  if m.low == math.huge then m.low, m.high = 0, 1 end
  -- m.high must be above m.low, even where adding 1 to m.low is lost in rounding
  m.high = math.max(m.high, m.low + 1, m.low + 1e-12 * math.abs(m.low))
  m.worst = {}
  for i, r in ipairs(m.rows) do
    r.place = i
    if r.last then m.worst[#m.worst + 1] = r end
  end
  table.sort(m.worst, function(a, b)
    local x, y = a.least or math.huge, b.least or math.huge
    if x ~= y then return x < y end
    return a.place < b.place
  end)
  for i = #m.worst, WORST + 1, -1 do m.worst[i] = nil end
  return m
end

return M
