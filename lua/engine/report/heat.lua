-- Draws a table of numbers as shades in the terminal: as colours if the terminal has them,
-- otherwise as characters.
--   print(heat.draw { title =, rows = { { label =, cells = { 0.3, nil, "bad", ... }, note = } },
--     columns = n, wide = 1, axis = { [3] = "2^-14" }, low = "text", high = "text",
--     none = "nothing recorded", width = 80 })
-- A cell is a number from 0 to 1, nil (blank), or "bad" (inf or nan). wide: the width of a cell in
-- characters. note: a text at the end of the row, or nil. axis: labels below columns. low, high:
-- the legend's texts for 0 and 1. none: the legend's text for blank cells. label (default 40): the
-- largest width of the rows' labels. Used by views.lua; plot.lua uses only style().
local machine = require "engine.base.machine"
local show = require "engine.base.show"

local M = {}

local SHADES = { "·", "░", "▒", "▓", "█" }
local ASCII = { ".", ":", "-", "=", "+", "*", "#", "%", "@" }
-- Colours of the 256-colour palette, cold to hot, near viridis: the brightness rises throughout, so
-- that the map is readable without colour vision. Inf and nan have a mark besides their colour.
local RAMP = { 53, 54, 60, 24, 30, 36, 72, 71, 77, 113, 149, 148, 184, 220 }
local BAD = 160

local function clamp(v) return math.max(0, math.min(1, v)) end

--- Returns the best style that this terminal can show: "colour", "shades" or "ascii".
function M.style()
  if machine.ascii() then return "ascii" end
  return machine.terminal(1) and not os.getenv("NO_COLOR")
    and (os.getenv("TERM") or ""):find("256") and "colour" or "shades"
end

local function cell_text(value, style, wide)
  if style == "colour" then
    if value == nil then return (" "):rep(wide) end
    local bad = value == "bad"
    local colour = bad and BAD or RAMP[1 + math.floor(clamp(value) * (#RAMP - 1) + 0.5)]
    return ("\27[48;5;%d%sm%s\27[0m"):format(colour, bad and ";38;5;231" or "", bad and "!" ..
      (" "):rep(wide - 1) or (" "):rep(wide))
  end
  local list = style == "ascii" and ASCII or SHADES
  local text = value == nil and " " or value == "bad" and "!"
    or list[1 + math.ceil(clamp(value) * (#list - 1))]
  return text:rep(wide)
end

local function ramp_text(style)
  local parts = {}
  local n = style == "colour" and #RAMP or style == "ascii" and #ASCII or #SHADES
  for i = 1, n do parts[i] = cell_text((i - 1) / (n - 1), style, 1) end
  return table.concat(parts)
end

-- Returns a row of ticks and, below it, the labels of the columns. Leaves out a label that would
-- touch the label before it.
local function axis_lines(options, margin)
  local total = options.columns * options.wide
  local ticks, texts, taken = {}, {}, 0
  for i = 1, total do ticks[i] = " " end
  local line = ""
  for column = 1, options.columns do
    local text = options.axis[column]
    if text then
      local at = (column - 1) * options.wide + 1
      local from = math.max(0, math.min(at - 1 - math.floor((#text - 1) / 2), total - #text))
      if from >= taken then
        ticks[at] = options.style == "ascii" and "|" or "╵"
        line = line .. (" "):rep(from - #line) .. text
        taken = from + #text + 1
        texts[#texts + 1] = text
      end
    end
  end
  if #texts == 0 then return {} end
  return { margin .. (table.concat(ticks):gsub(" +$", "")), margin .. line }
end

function M.draw(options)
  local style = options.style or M.style()
  local width = 0
  local labels = {}
  for i, row in ipairs(options.rows) do
    labels[i] = show.shown(row.label)
    width = math.max(width, #labels[i])
  end
  width = math.min(width, options.label or 40)
  local lines = { show.wrap(options.title, options.width or math.huge) }
  for k, row in ipairs(options.rows) do
    local parts = {}
    for i = 1, options.columns do parts[i] = cell_text(row.cells[i], style, options.wide) end
    local label = labels[k]
    label = #label > width and ".." .. label:sub(-(width - 2)) or label
    lines[#lines + 1] = (("%" .. width .. "s %s%s%s %s"):format(label, style == "ascii" and "|"
      or "▏", table.concat(parts), style == "ascii" and "|" or "▕", row.note or ""):gsub(" +$", ""))
  end
  for _, line in ipairs(axis_lines({ columns = options.columns, wide = options.wide,
    axis = options.axis or {}, style = style }, (" "):rep(width + 2))) do
    lines[#lines + 1] = line
  end
  local legend = { options.low .. " " .. ramp_text(style) .. " " .. options.high,
    cell_text("bad", style, 1) .. " inf or nan" }
  if options.none then legend[#legend + 1] = "blank: " .. options.none end
  local line, room = (" "):rep(width + 2), 0
  for i, text in ipairs(legend) do
    local size = show.width((text:gsub("\27%[[%d;]*m", "")))
    if i > 1 and width + 2 + room + 4 + size > (options.width or math.huge) then
      lines[#lines + 1] = line
      line, room = (" "):rep(width + 2), 0
    end
    line, room = line .. (room > 0 and "    " or "") .. text, room + (room > 0 and 4 or 0) + size
  end
  lines[#lines + 1] = line
  return table.concat(lines, "\n")
end

return M
