-- Helpers for studies: text to train on, tables of results, and the same numbers as curves in an
-- SVG file. Used by examples.
--
--   lab.table({ "K", "none", "128" }, { { 1024, "1.5 %", "0.05 %" }, ... })
--   lab.svg("error.svg", { title =, x = { "1024", "4096" }, y = "dB", log = 10 or nil,
--     series = { { name =, values = { ... } } } })
local M_ffi = require "engine.base.ffi"

local show = require "engine.base.show"
local C, check = M_ffi.C, M_ffi.check

local M = {}

--- Prints rows under column heads, aligned; the first column to the left.
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

--- Mean and standard deviation; the deviation of a single number is 0.
function M.mean(list)
  local sum, square = 0, 0
  for _, x in ipairs(list) do sum = sum + x / #list end
  for _, x in ipairs(list) do square = square + (x - sum) ^ 2 / math.max(1, #list - 1) end
  return sum, math.sqrt(square)
end

--- "0.3918 +- 0.0012" from a list of numbers, each printed by `format`; for a single number, only
--- that number.
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

--- A text of about `bytes` bytes, the same on every machine: sentences of a small grammar whose
--- words are not equally common, so that a model has something to learn. For examples whose figures
--- must be reproducible. `seed` chooses other sentences.
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

-- ------------------------------------------------------------------ curves

local COLOURS = { "#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e", "#6cc5b0",
  "#97bbf5" }
local W, H, LEFT, TOP, BOTTOM, RIGHT = 760, 420, 70, 40, 46, 190

local function finite(x) return x == x and x > -math.huge and x < math.huge end

--- Writes curves over named x positions into a file; values that are not finite are left out.
--- Returns the path.
function M.svg(path, o)
  local low, high = math.huge, -math.huge
  local function height(v)
    return o.log and (v > 0 and math.log(v) / math.log(o.log) or 0 / 0) or v
  end
  for _, s in ipairs(o.series) do
    for _, v in pairs(s.values) do
      local h = height(v)
      if finite(h) then low, high = math.min(low, h), math.max(high, h) end
    end
  end
  if not (low < high) then
    low, high = (finite(low) and low or 0) - 1, (finite(high) and high or 0) + 1
  end
  local function x_of(i)
    return LEFT + (W - LEFT - RIGHT) * (#o.x > 1 and (i - 1) / (#o.x - 1) or 0.5)
  end
  local function y_of(h) return H - BOTTOM - (H - TOP - BOTTOM) * (h - low) / (high - low) end
  local escape = require("engine.report.chart").escape
  local out = { ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" ' ..
    'font-family="system-ui,sans-serif" font-size="12">'):format(W, H),
    ('<rect width="%d" height="%d" fill="#fff"/>'):format(W, H),
    ('<text x="%d" y="24" font-size="15">%s</text>'):format(LEFT, escape(o.title)) }
  for k = 0, 4 do
    local h = low + (high - low) * k / 4
    out[#out + 1] = ('<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" ' ..
      'text-anchor="end">%s</text>'):format(LEFT, y_of(h), W - RIGHT, LEFT - 6,
      y_of(h) + 4, escape(("%.3g"):format(o.log and o.log ^ h or h)))
  end
  local every = math.ceil(#o.x / 10)
  for i, label in ipairs(o.x) do
    if (i - 1) % every == 0 then
      out[#out + 1] = ('<text x="%.1f" y="%d" text-anchor="middle">%s</text>'):format(x_of(i),
        H - BOTTOM + 18, escape(label))
    end
  end
  out[#out + 1] = ('<text x="%d" y="%d">%s</text>'):format(LEFT, H - 8, escape(o.y or ""))
  for k, s in ipairs(o.series) do
    local points, colour = {}, COLOURS[(k - 1) % #COLOURS + 1]
    for i = 1, #o.x do
      local h = s.values[i] and height(s.values[i])
      if h and finite(h) then points[#points + 1] = ("%.1f,%.1f"):format(x_of(i), y_of(h)) end
    end
    out[#out + 1] = ('<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>'):format(
      table.concat(points, " "), colour)
    out[#out + 1] = ('<path d="M%d %dh18" stroke="%s" stroke-width="2"/><text x="%d" ' ..
      'y="%d">%s</text>'):format(W - RIGHT + 12, TOP + 18 * k, colour,
      W - RIGHT + 36, TOP + 18 * k + 4, escape(s.name))
  end
  local text = table.concat(out, "\n") .. "\n</svg>\n"
  check(C.eng_file_write(path, text, #text))
  return path
end

return M
