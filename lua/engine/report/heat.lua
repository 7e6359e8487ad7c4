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

-- Returns a row of ticks and, below it, the labels of the columns; an empty list without labels.
-- Leaves out a label that would touch the label before it.
local function axis_lines(options, style, margin)
  local ticks, line = {}, ""
  for i = 1, options.columns * options.wide do ticks[i] = " " end
  for column = 1, options.columns do
    local text, at = options.axis and options.axis[column], (column - 1) * options.wide + 1
    local from = text
      and math.max(0, math.min(at - 1 - math.floor((#text - 1) / 2), #ticks - #text))
    if text and (line == "" or from > #line) then
      ticks[at] = style == "ascii" and "|" or "╵"
      line = line .. (" "):rep(from - #line) .. text
    end
  end
  return line == "" and {} or { margin .. (table.concat(ticks):gsub(" +$", "")), margin .. line }
end

function M.draw(options)
  local style, most = options.style or M.style(), options.width or math.huge
  local labels, width = {}, 0
  for i, row in ipairs(options.rows) do
    labels[i] = show.shown(row.label)
    width = math.max(width, #labels[i])
  end
  width = math.min(width, options.label or 40)
  local lines, margin = { show.wrap(options.title, most) }, (" "):rep(width + 2)
  for k, row in ipairs(options.rows) do
    local parts, label = {}, labels[k]
    for i = 1, options.columns do parts[i] = cell_text(row.cells[i], style, options.wide) end
    if #label > width then label = ".." .. label:sub(-(width - 2)) end
    lines[#lines + 1] = (("%" .. width .. "s %s%s%s %s"):format(label, style == "ascii" and "|"
      or "▏", table.concat(parts), style == "ascii" and "|" or "▕", row.note or ""):gsub(" +$", ""))
  end
  for _, line in ipairs(axis_lines(options, style, margin)) do lines[#lines + 1] = line end
  local legend = { options.low .. " " .. ramp_text(style) .. " " .. options.high,
    cell_text("bad", style, 1) .. " inf or nan" }
  if options.none then legend[#legend + 1] = "blank: " .. options.none end
  local line, room = margin, 0
  for i, text in ipairs(legend) do
    local size = show.width((text:gsub("\27%[[%d;]*m", "")))
    if i > 1 and #margin + room + 4 + size > most then
      lines[#lines + 1] = line
      line, room = margin, 0
    end
    line, room = line .. (room > 0 and "    " or "") .. text, room + (room > 0 and 4 or 0) + size
  end
  lines[#lines + 1] = line
  return table.concat(lines, "\n")
end

return M
