-- Events at single steps of a run, as marks on its curves: overflows, skipped steps, checkpoints,
-- swaps and so on, each kind with a name for the legend. Used by views.lua, report.lua and
-- report_compare.lua.
--   for _, m in ipairs(marks.read(history, c)) do ... end      c: from curves.read
--   m.kind, m.name, m.symbol, m.count
--   m.at[i]      where marks are drawn: for overflows and skipped steps, the middle of each column
--                of c that has some; for checkpoints, the first in each column; for other kinds,
--                the step of each event. Events after step c.last are drawn at c.last.
--   m.texts[i]   the history's text for each event of a kind drawn as lines; m.texts is nil for
--                kinds drawn as ticks
local curves = require "engine.run.curves"

local M = {}

-- The kinds of events that are drawn as lines: kind, name, symbol in the terminal.
local LINES = {
  { "swap", "policy swapped", "s" }, { "fp8_swap", "FP8 policy swapped", "f" },
  { "layers", "FP8 layers moved", "^" }, { "products", "products changed", "m" },
  { "swap_refused", "swap refused", "-" },
  { "set", "setting changed", "=" }, { "rollback", "rolled back", "<" },
  { "lost", "loss stays inf or nan", "!" }, { "paused", "paused", "p" },
  { "resumed", "run resumed", "r" }, { "stuck", "stuck in overflows", "!" },
}
local MOST = 200            -- the most lines of one kind

local function add(list, mark)
  if #mark.at > 0 then
    mark.count = mark.count or #mark.at
    list[#list + 1] = mark
  end
  return list
end

-- Returns the overflows in c, a result of curves.read, as a list of one mark, or an empty list if
-- there are none. name: the mark's name in the legend.
local function overflows(c, name)
  local at, count = curves.marks(c)
  return add({}, { kind = "overflow", name = name, symbol = "x", at = at, count = count })
end

--- Returns the overflows of the runs that have a curve of the metric `name` in c, a result of
--- compare.read, as a list of one mark, or an empty list if there are none.
function M.of_runs(c, name)
  return overflows({ x = c.x, overflows = c.overflows_of[name] }, "overflow in any run")
end

--- Returns the marks of a run; the top of the file describes them.
function M.read(h, c)
  if not c.first then return {} end
  local list = overflows(c, "overflow")
  local skipped = { kind = "skip", name = "skipped without overflow", symbol = "o", at = {},
    count = 0 }
  for i = 1, #c.x do
    local n = (c.skipped[i] or 0) - c.overflows[i]
    if n > 0 then
      skipped.at[#skipped.at + 1], skipped.count = c.x[i], skipped.count + n
    end
  end
  add(list, skipped)
  local checkpoints = { kind = "checkpoint", name = "checkpoint", symbol = "c", at = {}, count = 0 }
  local before
  for event in h:each("SELECT step FROM events WHERE kind = 'checkpoint' AND step BETWEEN ? AND " ..
    "? ORDER BY step", c.first, c.last + 1) do
    local column = math.floor((event.step - c.first) / c.width)
    checkpoints.count = checkpoints.count + 1
    if column ~= before then
      checkpoints.at[#checkpoints.at + 1], before = math.min(event.step, c.last), column
    end
  end
  add(list, checkpoints)
  for _, kind in ipairs(LINES) do
    local mark = { kind = kind[1], name = kind[2], symbol = kind[3], at = {}, texts = {} }
    for event in h:each("SELECT step, text FROM events WHERE kind = ? AND step BETWEEN ? AND ? " ..
      "ORDER BY id LIMIT " .. MOST, kind[1], c.first, c.last + 1) do
      mark.at[#mark.at + 1] = math.min(event.step, c.last)
      mark.texts[#mark.at] = kind[2] .. ": " .. tostring(event.text or "")
    end
    add(list, mark)
  end
  return list
end

return M
