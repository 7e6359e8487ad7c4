-- Helpers for studies: text to train on, tables of results, and curves of these results in an SVG
-- file. Used by examples.
--
--   lab.table({ "K", "none", "128" }, { { 1024, "1.5 %", "0.05 %" }, ... })
--   lab.svg("error.svg", { title =, x = { "1024", "4096" }, y = "K" (the title of the x axis),
--     log = 10 or nil, series = { { name =, values = { ... } } } })
local chart = require "engine.report.chart"
local files = require "engine.base.file"
local show = require "engine.base.show"

local M = {}

--- Prints rows under column headings; the first column is aligned to the left.
function M.table(heads, rows)
  local texts = {}
  for i, row in ipairs { heads, unpack(rows) } do
    texts[i] = {}
    for c = 1, #heads do texts[i][c] = tostring(row[c] == nil and "" or row[c]) end
  end
  print(show.table(texts, { true }))
end

--- The median of a list of numbers.
function M.median(list)
  local sorted = { unpack(list) }
  table.sort(sorted)
  local n = #sorted
  return n % 2 == 1 and sorted[(n + 1) / 2] or (sorted[n / 2] + sorted[n / 2 + 1]) / 2
end

--- Mean and standard deviation of a list; the deviation of a single number is 0.
M.mean = require("engine.base.statistics").mean_and_spread

--- Returns the mean and the standard deviation of a list as text, such as "0.3918 +- 0.0012", both
--- printed with `format`. For a single number, returns only that number.
function M.mean_text(list, format)
  local mean, spread = M.mean(list)
  if #list < 2 then return format:format(mean) end
  return ("%s +- %s"):format(format:format(mean), format:gsub("%+", ""):format(spread))
end

-- ------------------------------------------------------------------ generated text

local NOUNS = { "engine", "scale", "gradient", "tensor", "layer", "step", "number", "model",
  "weight", "loss", "batch", "policy", "river", "garden", "lamp",
  "mountain", "letter", "window", "clock", "bridge" }
local ADJECTIVES = { "small", "large", "quiet", "patient", "early", "infinite", "honest", "broken",
  "steady", "narrow" }
local VERBS = { "follows", "carries", "remembers", "divides", "crosses", "measures", "loses",
  "doubles", "waits for", "looks at" }
local ENDS = { ".\n", ". ", ". ", ". ", "; ", ", and " }

--- Returns a text of about `bytes` bytes. It is the same on every machine, so that the figures of
--- examples are reproducible; a different `seed` gives different sentences. The sentences follow a
--- small grammar, and some words are more common than others, so that a model has something to
--- learn.
function M.text(bytes, seed)
  local state = (seed or 1) * 2654435769 % 2 ^ 32
  local function draw(n)
    state = (state * 1664525 + 1013904223) % 2 ^ 32
    return math.floor(state / 2 ^ 32 * n)
  end
  -- Later words are more common.
  local function pick(list) return list[math.floor(draw(#list * #list) ^ 0.5) + 1] end
  local parts, length, fresh = {}, 0, true
  while length < bytes do
    local noun, other = pick(NOUNS), pick(NOUNS)
    local sentence = ("%s %s%s %s %s %s"):format(fresh and (draw(3) == 0 and "Every" or "The")
      or "the", draw(2) == 0 and pick(ADJECTIVES) .. " " or "", noun,
      pick(VERBS), noun:byte() % 2 == 0 and "its" or "the", other)
    if draw(5) == 0 then sentence = sentence .. (" %d times"):format(2 + draw(7)) end
    local stop = ENDS[draw(#ENDS) + 1]
    fresh = stop:sub(1, 1) == "."
    parts[#parts + 1] = sentence .. stop
    length = length + #sentence + #stop
  end
  return table.concat(parts)
end

--- Returns the text to train on: the content of the file `path` or, if `path` is "", generated text
--- of about `bytes` bytes.
function M.corpus(path, bytes)
  if path == "" then return M.text(bytes) end
  local file, why = io.open(path, "rb")
  if not file then error("cannot read " .. why, 0) end
  local text = file:read("*a")
  file:close()
  return text
end

-- ------------------------------------------------------------------ curves

--- Writes curves over named x positions to the file `path` and prints the path; does nothing if
--- the path is "". Values that are not finite are left out. o: see the top of the file.
function M.svg(path, o)
  if path == "" then return end
  local c = { x = {}, places = o.x, unit = o.y, width = 1, first = 1, last = #o.x }
  local series = {}
  for i in ipairs(o.x) do c.x[i] = i end
  for k, s in ipairs(o.series) do
    local values = {}
    for i, v in pairs(s.values) do values[i] = v and v - v == 0 and v or nil end
    c[k] = { min = values, mean = values, max = values }
    series[k] = { column = k, name = s.name, join = true }
  end
  files.write(path, chart.file(o.title, { { title = "by " .. o.y, c = c, series = series,
    log = o.log, height = 300 } }))
  print(path)
end

return M
