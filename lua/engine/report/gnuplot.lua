-- Draws curves as PNG with gnuplot, a program that may not be installed. Called by views.lua;
-- cli/contest.lua checks beforehand that gnuplot is installed.
local chart = require "engine.report.chart"
local files = require "engine.base.file"
local process = require "engine.base.process"
local show = require "engine.base.show"

local M = {}
local exact = show.exact

-- Quotes a text for gnuplot in single quotes, in which '' stands for one quote.
local function plain(text)
  return "'" .. show.shown(text):gsub("'", "''"):gsub("[\n\\]", " ") .. "'"
end

-- The kinds of marks that are drawn as ticks: their style for gnuplot, and their y position in the
-- panel, 0 (bottom) to 1 (top).
local TICKS = { overflow = { "points pt 2 ps 0.9 lw 1.5 lc rgb '#c4261a'", 0.03 },
  skip = { "points pt 6 ps 0.9 lw 1.5 lc rgb '#9a6a00'", 0.09 },
  checkpoint = { "points pt 11 ps 0.9 lc rgb '#5c6576'", 0.97 } }
local LINES = "lines lw 1.5 dt 2 lc rgb '#6d4aed'"

-- Writes the data of a panel's marks; returns the plot commands that draw them and name them in the
-- legend. say(format, ...): writes a line to gnuplot.
local function draw_marks(say, marks)
  local drawn = {}
  for i, m in ipairs(marks or {}) do
    local tick, name = TICKS[m.kind], plain(("%s (%s)"):format(m.name, show.grouped(m.count)))
    if tick then
      say("$mark%d << EOD", i)
      for _, step in ipairs(m.at) do say("%s %s", exact(step), exact(tick[2])) end
      say("EOD")
      drawn[i] = ("$mark%d using 1:2 axes x1y2 with %s title %s"):format(i, tick[1], name)
    else
      for _, step in ipairs(m.at) do
        say("set arrow from %s, graph 0 to %s, graph 1 nohead lw 1.5 dt 2 lc rgb '#6d4aed'",
          exact(step), exact(step))
      end
      drawn[i] = ("NaN with %s title %s"):format(LINES, name)
    end
  end
  return drawn
end

-- Writes the data of series i of a panel; returns the plot commands of its band and line (an empty
-- list if there is nothing to draw).
local function draw_series(say, panel, i)
  local c, s = panel.c, panel.series[i]
  local v, any = c[s.column], false
  say("$data%d << EOD", i)
  for at = 1, #c.x do
    if v.mean[at] and (not panel.log or v.min[at] > 0) then
      any = true
      say("%s %s %s %s", exact(c.x[at]), exact(v.min[at]), exact(v.mean[at]), exact(v.max[at]))
    end
  end
  say("EOD")
  if not any then return {} end
  local colour, dashes = chart.plain_style(s.style or i)
  local style = #c.x == 1 and "points pt 7" or c.width == 1 and panel.hold and "steps" or "lines"
  local line = ("$data%d using 1:3 with %s lw 1.5 %slc rgb '%s' %s"):format(i, style, #dashes > 0
    and style ~= "points pt 7" and "dt (" .. table.concat(dashes, ",") .. ") " or "", colour,
    (#panel.series > 1 or panel.named) and "title " .. plain(s.name) or "notitle")
  if c.width == 1 and not s.band then return { line } end
  return { ("$data%d using 1:2:4 with filledcurves lc rgb '%s' notitle"):format(i, colour), line }
end

local function draw(say, panel)
  local c, plots = panel.c, {}
  local marks = draw_marks(say, panel.marks)
  for i = 1, #panel.series do
    for _, piece in ipairs(draw_series(say, panel, i)) do plots[#plots + 1] = piece end
  end
  say("set title %s noenhanced", plain(panel.title .. (panel.log and ", log axis" or "")))
  local first, last = c.first, c.last
  if last <= first then first, last = first - 0.5, last + 0.5 end
  say("unset logscale y; set xrange [%s:%s]; set autoscale y; set format y %s; set format x " ..
    "'%%.0f'; set xtics autofreq", exact(first), exact(last), panel.log == 2 and "'2^{%L}'"
    or "'%g'")
  if last - first < 10 then say("set xtics 1") end
  if panel.log then say("set logscale y %d", panel.log) end
  say("set y2range [0:1]; unset y2tics")
  if #plots > 0 then
    for _, mark in ipairs(marks) do plots[#plots + 1] = mark end
    say("plot %s", table.concat(plots, ", "))
  else
    say("set label 1 'nothing to draw: no value is finite%s' at graph 0.5,0.5 center; unset " ..
      "ytics; plot [][0:1] -1 notitle; unset label 1; set ytics nomirror",
      panel.log and " and positive" or "")
  end
  say("unset arrow")
end

--- Raises an error if gnuplot is not installed.
function M.need()
  if process.output("command -v gnuplot 2>/dev/null") == "" then
    error("a PNG needs gnuplot, which is not installed; hint: apt-get install " ..
      "gnuplot-nox, or use --svg, which needs no other program", 0)
  end
end

--- Writes a PNG of the panels that chart.file draws. options: width, height (pixels). Raises an
--- error if gnuplot is missing or fails.
function M.png(path, title, panels, options)
  M.need()
  local width, height = options.width or 1200, options.height or 120 + 260 * #panels
  local log_file = os.tmpname()
  if files.is_file(path) then os.remove(path) end    -- an old picture would hide a failure
  local pipe = assert(io.popen("gnuplot > " .. process.quoted(log_file) .. " 2>&1", "w"))
  local function say(format, ...) pipe:write(format:format(...), "\n") end
  say("set terminal pngcairo size %d,%d font 'sans,11' background rgb 'white'", width, height)
  say("set output %s", plain(path))
  say("set multiplot layout %d,1 title %s noenhanced font 'sans,14'", #panels, plain(title))
  say("set grid lc rgb '#e6e9ef'; set border 3 lc rgb '#667085'; set tics nomirror; set key " ..
    "above left Left reverse horizontal samplen 2 noenhanced; set lmargin 10; " ..
    "set xlabel 'step'; set style fill transparent solid 0.25 noborder")
  for _, panel in ipairs(panels) do draw(say, panel) end
  say("unset multiplot")
  pipe:close()
  local said = files.read(log_file) or ""
  os.remove(log_file)
  local written = io.open(path, "rb")
  local size = written and written:seek("end") or 0
  if written then written:close() end
  if size == 0 then
    error(("gnuplot did not write %s: %s"):format(path, said:match("%S[^\n]*")
      or "no reason given"), 0)
  end
end

return M
