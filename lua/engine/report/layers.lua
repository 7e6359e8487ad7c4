-- The statistics of each layer in a history. At intervals and at every overflow, a run records a
-- row: the statistics of all tensors at one step. A long run has too many rows to read, so only a
-- few are read for each column of a picture.
--   local l = layers.read(history, { points = 120, only = "blocks.3" })
--   l.names[k]              the name of layer k
--   l.x[i], l.width         column i has the steps from l.x[i] to l.x[i] + l.width - 1
--   l.cells[k][i]           { amax, inf, nan, count, zeros, underflow, overflows, step, room,
--                           format } of the gradients as stored (times the scale); nil if the
--                           column has no recorded step. overflows: the number of recorded steps
--                           with inf or nan; step: the last step with inf or nan, else the step of
--                           the amax; room: the smallest distance, in bits, between the amax of one
--                           of the layer's tensors and the overflow limit of that tensor's format;
--                           format: the name of that format
--   l.rows, l.steps[n]      the number of rows read, and their steps
--   l.hists[k][exponent]    how many elements have this exponent, in all rows together
--   l.format                the gradients' narrowest format (base/formats.lua)
--   l.formats[k]            the names of a layer's formats, "f16" or "f16, f32"
--   l.formats_text          the formats of all layers: "f16", or "f16 (f32 in 5 of 16 tensors)"
-- Used by views.lua, the report and export.lua.
local M_ffi = require "engine.base.ffi"
local formats = require "engine.base.formats"
local histories = require "engine.run.history"
local nearest = require "engine.base.nearest"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local ROWS = 2                -- rows read for a column, in addition to up to ROWS rows of overflows
local MOST_TEXTS = 4          -- the most recipes that formats_text describes

--- Chooses the rows of a picture, by default one for each layer. Returns two tables: the row (from
--- 1) of each parameter by its id (from 0), and the names of the rows. With options.tensors, or if
--- the model has only one layer, every tensor has its own row. options.only leaves out the tensors
--- whose names do not contain this text and gives every other tensor its own row.
function M.rows(h, options)
  local list = h:parameters()
  local row_of, names = {}, {}
  local only = options.only
  M_ffi.expect(only == nil or type(only) == "string", only,
    "heatmap: expected `only` to be a text, a part of a parameter's name")
  if only or options.tensors then
    for _, p in ipairs(list) do
      if not only or p.name:find(only, 1, true) then
        names[#names + 1] = p.name
        row_of[p.id] = #names
      end
    end
    if #names == 0 then
      local known = {}
      for i, p in ipairs(list) do known[i] = p.name end
      M_ffi.raise("no parameter's name contains '%s'%s", tostring(only),
        nearest.part_hint(tostring(only), known))
    end
    return row_of, names
  end
  local _, group_of, groups = require("engine.policy.groups").of(list)
  if #groups == 1 and #list > 1 then return M.rows(h, { tensors = true }) end
  for i, p in ipairs(list) do row_of[p.id] = group_of[i] end
  return row_of, groups
end

-- Returns the formats of a part's gradients as text, such as "f16 (f32 in 5 of 16 tensors)", and
-- adds the names of each row's formats to the sets known[row].
local function formats_of(part, row_of, known)
  local seen, total, others = {}, 0, {}
  for _, p in ipairs(part.parameters) do
    if row_of[p.id] then
      seen[p.gradient], total = (seen[p.gradient] or 0) + 1, total + 1
      known[row_of[p.id]][p.gradient] = true
    end
  end
  for _, name in ipairs(nearest.keys(seen)) do
    if name ~= part.format.name then
      others[#others + 1] = ("%s in %d of %d tensors"):format(name, seen[name], total)
    end
  end
  return part.format.name .. (#others > 0 and " (" .. table.concat(others, ", ") .. ")" or "")
end

-- Sets result.format, .formats and .formats_text for the steps first to last. Returns a function
-- that returns { [id] = the parameter's format } at a step.
local function add_formats(h, result, row_of, first, last)
  local parts, known, texts, before = h:parts(), {}, {}, nil
  local summed = h:meta().summed == "true"       -- the gradients of micro-batches, in f32
  for k = 1, #result.names do known[k] = {} end
  for i, part in ipairs(parts) do
    if part.first <= last and not (parts[i + 1] and parts[i + 1].first <= first) then
      local text = formats_of(part, row_of, known)
      if summed and text ~= "f32" then text = text .. " summed in f32" end
      if text ~= before then
        texts[#texts + 1] = before and (", from step %d on %s"):format(part.first, text) or text
      end
      before = text
      if not result.format or part.format.limit < result.format.limit then
        result.format = part.format
      end
    end
  end
  for k, set in ipairs(known) do result.formats[k] = table.concat(nearest.keys(set), ", ") end
  result.formats_text = table.concat(texts, "", 1, math.min(#texts, MOST_TEXTS))
    .. (#texts > MOST_TEXTS and (" and %d more changes"):format(#texts - MOST_TEXTS) or "")
    .. (parts.problem and "; " .. parts.problem or "")
  return function(step) return histories.part_at(parts, step).format_of end
end

-- Calls visit(column, step, blob) for the rows of the steps first to last. A column is `width`
-- steps. If there are more than points * ROWS rows, visits only the first ROWS rows of each column
-- and the rows of its first ROWS overflows.
local function each_row(h, first, last, width, points, visit)
  local most = points * ROWS
  local known = h:query("SELECT count(*) AS n FROM (SELECT 1 FROM tensor_stats WHERE step " ..
    "BETWEEN ? AND ? LIMIT ?)", first, last, most + 1)[1].n
  local function column_of(step) return math.floor((step - first) / width) + 1 end
  if known <= most then
    for row in h:each("SELECT step, stats FROM tensor_stats WHERE step BETWEEN ? AND ? ORDER BY " ..
      "step", first, last) do
      visit(column_of(row.step), row.step, row.stats)
    end
    return
  end
  for from = first, last, width do
    local to, seen = math.min(from + width - 1, last), {}
    local function take(sql)
      for row in h:each(sql, from, to) do
        if not seen[row.step] then
          seen[row.step] = true
          visit(column_of(from), row.step, row.stats)
        end
      end
    end
    take(("SELECT step, stats FROM tensor_stats WHERE step BETWEEN ? AND ? ORDER BY step LIMIT " ..
      "%d"):format(ROWS))
    take(([[SELECT t.step AS step, t.stats AS stats FROM (SELECT DISTINCT step FROM steps
        WHERE overflow AND step BETWEEN ? AND ?
      ORDER BY step LIMIT %d) s JOIN tensor_stats t ON t.step = s.step]]):format(ROWS))
  end
end

--- Returns the first and last exponent of a picture of histograms. The picture shows all exponents
--- that occur. It is extended to each end of the format's normal range that is less than 24
--- exponents away. Returns nil if there is no nonzero element.
function M.exponents(hists, format)
  local least, most = math.huge, -math.huge
  for _, hist in ipairs(hists) do
    for e in pairs(hist) do least, most = math.min(least, e), math.max(most, e) end
  end
  if least > most then return nil end
  if most > format.top - 24 then most = math.max(most, format.top) end
  if least < format.normal + 24 then least = math.min(least, format.normal) end
  return math.max(least, formats.first), math.min(most, formats.last)
end

local room = ffi.new("int[1]")

-- Like each_row, but calls visit(column, step, stats, n) with the statistics of a row's n tensors.
-- Leaves out damaged rows.
local function each_stats(h, first, last, width, points, visit)
  local stats, capacity = nil, 0
  each_row(h, first, last, width, points, function(column, step, blob)
    if not blob or C.eng_history_unpack(room, stats, capacity, blob, #blob) ~= 0 then return end
    if room[0] > capacity then
      capacity = room[0]
      stats = ffi.new("eng_tensor_stats[?]", capacity)
      C.eng_history_unpack(room, stats, capacity, blob, #blob)
    end
    visit(column, step, stats, room[0])
  end)
end

--- Divides the history into `points` columns and calls visit(step, stats, n) for a few recorded
--- steps of each column, as each_row chooses them. stats: the statistics of the n tensors.
function M.each(h, points, visit)
  local first, last = h:range()
  if not first then return end
  each_stats(h, first, last, math.ceil((last - first + 1) / points), points,
    function(_, ...) visit(...) end)
end

--- Reads the statistics of each layer. The top of the file describes the result. options: points
--- (the most columns; 120 by default), only and tensors (as in M.rows), from and to (steps), hists
--- (false: leaves out the histograms).
function M.read(h, options)
  local row_of, names = M.rows(h, options)
  local result = { names = names, x = {}, cells = {}, hists = {}, rows = 0, steps = {},
    formats = {}, width = 1 }
  local first, last = h:range(options.from, options.to)
  local format_of = add_formats(h, result, row_of, first or 0, last or math.huge)
  for k = 1, #names do result.cells[k], result.hists[k] = {}, {} end
  if not first or first > last then return result end
  local points = options.points or 120
  local width = math.ceil((last - first + 1) / points)
  result.width = width
  for from = first, last, width do result.x[#result.x + 1] = from end
  each_stats(h, first, last, width, points, function(column, step, stats, n)
    result.rows = result.rows + 1
    result.steps[result.rows] = step
    for id = 0, n - 1 do
      local k = row_of[id]
      if k then
        local s = stats[id]
        local cell = result.cells[k][column]
        if not cell then
          cell = { amax = 0, inf = 0, nan = 0, count = 0, zeros = 0, underflow = 0, overflows = 0,
            step = step }
          result.cells[k][column] = cell
        end
        local inf, nan = tonumber(s.inf), tonumber(s.nan)
        if s.amax > cell.amax then
          cell.amax, cell.step = s.amax, cell.bad_row and cell.step or step
        end
        if s.amax > 0 then
          local format = format_of(step)[id]
          local bits = math.log(format.limit / s.amax) / math.log(2)
          if bits < (cell.room or math.huge) then cell.room, cell.format = bits, format.name end
        end
        if inf + nan > 0 then
          if cell.bad_row ~= result.rows then cell.overflows = cell.overflows + 1 end
          cell.step, cell.bad_row = step, result.rows
        end
        cell.inf, cell.nan = cell.inf + inf, cell.nan + nan
        cell.count, cell.zeros, cell.underflow = cell.count + tonumber(s.count),
          cell.zeros + tonumber(s.zeros), cell.underflow + tonumber(s.underflow)
        if options.hists ~= false then formats.add_histogram(result.hists[k], s.hist) end
      end
    end
  end)
  return result
end

return M
