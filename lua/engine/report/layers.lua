-- The statistics of each layer in a history, from the rows per tensor that a run records at
-- intervals and at every overflow. A long run has too many rows to read, so each column of a
-- picture reads a few of its own.
--   local l = layers.read(history, { points = 120, only = "blocks.3" })
--   l.names[k], l.x[i]      layers and columns; a column begins at step x[i]
--   l.cells[k][i]           { amax, inf, nan, count, zeros, underflow, overflows, step } of the
--                           gradients as stored (times the scale), or nil
--   l.rows, l.steps[n]      the number of rows read, and their steps
--   l.single                true if each column is one recorded step
--   l.hists[k][exponent]    elements by exponent over all rows
--   l.format                the gradients' format (base/formats.lua)
-- Used by views.lua and the report.
local M_ffi = require "engine.base.ffi"
local formats = require "engine.base.formats"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local ROWS = 2                -- rows read for a column, and as many of those with overflow

--- The groups of a history's parameters: the row number of each parameter id (from 0), and the
--- rows' names. `only`: the tensors inside that layer, or those whose names contain this text, one
--- by one; `tensors`: all tensors one by one.
function M.rows(h, options)
  local list = h:parameters()
  local row_of, names = {}, {}
  local only = options.only
  if only or options.tensors then
    for _, p in ipairs(list) do
      if not only or p.name == only or p.name:sub(1, #only + 1) == only .. "."
        or p.name:find(only, 1, true) then
        names[#names + 1] = p.name
        row_of[p.id] = #names
      end
    end
    if #names == 0 then
      local known = {}
      for i, p in ipairs(list) do known[i] = p.name end
      error(("no parameter's name contains '%s'%s"):format(tostring(only),
        require("engine.base.nearest").hint(tostring(only), known)), 0)
    end
    return row_of, names
  end
  local _, group_of, groups = require("engine.policy.groups").of(list)
  if #groups == 1 and #list > 1 then return M.rows(h, { tensors = true }) end
  for i, p in ipairs(list) do row_of[p.id] = group_of[i] end
  return row_of, groups
end

--- The format of the gradients, as base/formats.lua describes it.
function M.format(h) return formats.of(h:meta().gradients) or formats.of "f16" end

-- Calls visit(column, step, blob, overflow).
local function each_row(h, result, first, last, points, visit)
  local most = points * ROWS
  local known = h:query("SELECT count(*) AS n FROM (SELECT 1 FROM tensor_stats WHERE step " ..
    "BETWEEN ? AND ? LIMIT ?)", first, last, most + 1)[1].n
  if known == 0 then return end
  if known <= most then              -- a column for each row, or for a few neighbours
    local column, per, seen = 0, math.ceil(known / points), 0
    result.single = per == 1
    for row in h:each([[SELECT t.step AS step, t.stats AS stats, (SELECT max(overflow) FROM steps s
        WHERE s.step = t.step) AS over
      FROM tensor_stats t WHERE t.step BETWEEN ? AND ? ORDER BY t.step]], first, last) do
      if seen % per == 0 then
        column = column + 1
        result.x[column] = row.step
      end
      seen = seen + 1
      visit(column, row.step, row.stats, row.over == 1)
    end
    return
  end
  local width = math.ceil((last - first + 1) / points)
  local column = 0
  for from = first, last, width do
    local to, any, seen = math.min(from + width - 1, last), false, {}
    local function take(sql)
      for row in h:each(sql, from, to) do
        if not seen[row.step] then
          if not any then
            any, column = true, column + 1
            result.x[column] = from
          end
          seen[row.step] = true
          visit(column, row.step, row.stats, row.over == 1)
        end
      end
    end
    take(([[SELECT t.step AS step, t.stats AS stats, (SELECT max(overflow) FROM steps s
        WHERE s.step = t.step) AS over
      FROM tensor_stats t WHERE t.step BETWEEN ? AND ? ORDER BY t.step LIMIT %d]]):format(ROWS))
    take(([[SELECT t.step AS step, t.stats AS stats, 1 AS over FROM (SELECT DISTINCT step FROM steps
        WHERE overflow AND step BETWEEN ? AND ?
      ORDER BY step LIMIT %d) s JOIN tensor_stats t ON t.step = s.step]]):format(ROWS))
  end
end

local room = ffi.new("int[1]")

-- Returns a function that unpacks a blob: it returns the statistics of the tensors and their
-- number, or nil for a damaged blob.
local function unpacker()
  local stats, capacity = nil, 0
  return function(blob)
    if not blob or C.eng_history_unpack(room, stats, capacity, blob, #blob) ~= 0 then return nil end
    if room[0] > capacity then
      capacity = room[0]
      stats = ffi.new("eng_tensor_stats[?]", capacity)
      C.eng_history_unpack(room, stats, capacity, blob, #blob)
    end
    return stats, room[0]
  end
end

--- Calls visit(step, { [k] = { hist, zeros, amax, norm } }) for up to about `points` recorded
--- steps; k is a layer, whose tensors are summed.
function M.each(h, options, visit)
  local row_of = M.rows(h, options)
  local first, last = h:range()
  if not first then return end
  local unpack_blob = unpacker()
  each_row(h, { x = {} }, first, last, options.points, function(_, step, blob)
    local stats, n = unpack_blob(blob)
    local sums = {}
    for id = 0, stats and n - 1 or -1 do
      local k, s = row_of[id], stats[id]
      if k then
        local sum = sums[k] or { hist = {}, zeros = 0, amax = 0, squares = 0 }
        sums[k] = sum
        sum.zeros, sum.amax, sum.squares = sum.zeros + tonumber(s.zeros),
          math.max(sum.amax, s.amax), sum.squares + s.sum_squares
        sum.norm = math.sqrt(sum.squares)
        formats.add_histogram(sum.hist, s.hist)
      end
    end
    if next(sums) then visit(step, sums) end
  end)
end

--- See the top of the file. options: points (120), only, tensors (rows), from, to (steps), hists
--- (false: no exponents).
function M.read(h, options)
  local row_of, names = M.rows(h, options)
  local result = { names = names, x = {}, cells = {}, hists = {}, rows = 0, steps = {},
    single = false }
  result.format = M.format(h)
  for k = 1, #names do result.cells[k], result.hists[k] = {}, {} end
  local first, last = h:range(options.from, options.to)
  if not first then return result end
  result.first, result.last = first, last
  local unpack_blob = unpacker()
  each_row(h, result, first, last, options.points or 120, function(column, step, blob, over)
    local stats, n = unpack_blob(blob)
    if not stats then return end
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
        if s.amax > cell.amax then cell.amax, cell.step = s.amax, step end
        if inf + nan > 0 then
          if cell.bad_row ~= result.rows then cell.overflows = cell.overflows + 1 end
          cell.step, cell.bad_row = step, result.rows
        end
        cell.inf, cell.nan, cell.over = cell.inf + inf, cell.nan + nan, cell.over or over
        cell.count, cell.zeros, cell.underflow = cell.count + tonumber(s.count),
          cell.zeros + tonumber(s.zeros), cell.underflow + tonumber(s.underflow)
        if options.hists ~= false then formats.add_histogram(result.hists[k], s.hist) end
      end
    end
  end)
  return result
end

return M
