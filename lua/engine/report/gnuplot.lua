-- Curves as PNG through gnuplot, a program that may not be installed. Called by cli/plot.lua.
local files = require "engine.base.file"
local show = require "engine.base.show"
local curves = require "engine.run.curves"

local M = {}
local exact = show.exact

local function quote(text) return "'" .. tostring(text):gsub("'", "'\\''") .. "'" end
-- A text in gnuplot's own quotes, where '' is a quote.
local function plain(text)
  return "'" .. show.shown(text):gsub("'", "''"):gsub("[\n\\]", " ") .. "'"
end

--- True if gnuplot is installed.
function M.installed()
  local pipe = io.popen("command -v gnuplot 2>/dev/null")
  local found = pipe and pipe:read("*l")
  if pipe then pipe:close() end
  return found ~= nil and found ~= ""
end

--- Writes a PNG of curves.read's result. options: width, height (dots), log (as in history:plot).
--- Raises when gnuplot is missing or fails.
function M.png(path, title, c, names, options)
  if not M.installed() then
    error("--png draws through gnuplot, which is not installed; hint: apt-get install " ..
      "gnuplot-nox, or --svg, which needs nothing", 0)
  end
  local width, height = options.width or 1200, options.height or 120 + 260 * #names
  local log_file = os.tmpname()
  if files.is_file(path) then os.remove(path) end    -- else an old picture hides a failure
  local pipe = assert(io.popen("gnuplot > " .. quote(log_file) .. " 2>&1", "w"))
  local function say(format, ...) pipe:write(format:format(...), "\n") end
  say("set terminal pngcairo size %d,%d font 'sans,11' background rgb 'white'", width, height)
  say("set output %s", plain(path))
  say("set multiplot layout %d,1 title %s noenhanced font 'sans,14'", #names, plain(title))
  say("set grid lc rgb '#e6e9ef'; set border 3 lc rgb '#98a2b3'; set tics nomirror; set key " ..
    "off; set lmargin 10; " ..
    "set style fill transparent solid 0.25 noborder")
  for _, name in ipairs(names) do
    local metric, v = curves.metric(name), c[name]
    local log = curves.log_of(metric, options.log)
    local any = false
    say("$data << EOD")
    for i = 1, #c.x do
      if v.mean[i] and (not log or v.min[i] > 0) then
        any = true
        say("%s %s %s %s", exact(c.x[i]), exact(v.min[i]), exact(v.mean[i]), exact(v.max[i]))
      end
    end
    say("EOD")
    say("$marks << EOD")
    for i, n in ipairs(c.overflows) do
      if n > 0 then say("%s 0.02", exact(c.x[i])) end
    end
    say("-1 -1\nEOD")
    say("set title %s noenhanced", plain(metric.title))
    say("unset logscale y; set xrange [%s:%s]; set autoscale y; set format y %s; set format x " ..
      "'%%.0f'", exact(c.first),
      exact(math.max(c.last, c.first + 1)),
      log == 2 and "'2^{%L}'" or log and "'%g'" or "'%g'")
    if log then say("set logscale y %d", log) end
    say("set y2range [0:1]; unset y2tics")
    if any then
      say("plot $data using 1:2:4 with filledcurves lc rgb '#1f6feb', $data using 1:3 with %s " ..
        "lw 1.5 lc rgb '#1f6feb', " ..
        "$marks using 1:2 axes x1y2 with points pt 2 ps 0.6 lc rgb '#d92d20'", c.width == 1
        and name == "scale" and "steps" or "lines")
    else
      say("set label 1 'nothing to draw' at graph 0.5,0.5 center; plot [][0:1] -1; unset label 1")
    end
  end
  say("unset multiplot")
  pipe:close()
  local file = io.open(log_file)
  local said = file and file:read("*a") or ""
  if file then file:close() end
  os.remove(log_file)
  local written = io.open(path, "rb")
  local size = written and written:seek("end") or 0
  if written then written:close() end
  if size == 0 then
    error(("gnuplot did not write %s: %s"):format(path, said:match("%S[^\n]*")
      or "no reason given"), 0)
  end
  return size
end

return M
