-- Writes numbers and tables as text: exact text that programs read back, rounded text for people.
-- Text of unknown origin (policies, scripts, files, other ranks) may reach a terminal or a page
-- only through show.shown, which makes it safe to display. Used by most folders.
local ffi = require "engine.base.ffi"

local C = ffi.C

local show = {}

local buffer = ffi.new "char[32]"

--- Returns a number as text with enough digits to read the same double back; or "inf", "-inf",
--- "nan".
function show.exact(x)
  C.eng_number_text(buffer, x)
  return ffi.string(buffer)
end

--- Returns a value as text for people: a number with up to ten digits, an empty text as '', any
--- other value by tostring().
function show.value(x)
  if x == "" then return "''" end
  return type(x) == "number" and ("%.10g"):format(x) or tostring(x)
end

--- Returns a number as JSON that other tools read. JSON has no infinity and no NaN, so these become
--- the strings "inf", "-inf" and "nan", which Python's float() accepts. nil and false become null.
function show.json_number(x)
  if not x then return "null" end
  return x - x ~= 0 and '"' .. show.exact(x) .. '"' or show.exact(x)
end

--- Rounds a number to a whole one and groups its digits: 16384000000 -> "16,384,000,000"
function show.grouped(n)
  local plain = ("%.0f"):format(n)
  local sign, digits = plain:match("^(%-?)(%d+)$")
  return digits and sign .. digits:reverse():gsub("(%d%d%d)", "%1,"):reverse():gsub("^,", "")
    or plain
end

--- Returns a count with its noun: "1 step", "2,000 steps"
function show.counted(n, what)
  return ("%s %s%s"):format(show.grouped(n), what, n == 1 and "" or "s")
end

--- Returns part / whole in percent: "0 %", "<0.01 %" or "12.3 %".
function show.percent(part, whole)
  local p = whole > 0 and 100 * part / whole or 0
  return p == 0 and "0 %" or p < 0.01 and "<0.01 %" or ("%.3g %%"):format(p)
end

--- Shortens a count: 1234567 -> "1.23M"
function show.count(x)
  if not x or x ~= x then return "-" end
  if x == math.huge then return "inf" end
  if x >= 999.5e9 then return ("%.0fG"):format(x / 1e9) end
  if x >= 999.5e6 then return ("%.3gG"):format(x / 1e9) end
  if x >= 999.5e3 then return ("%.3gM"):format(x / 1e6) end
  if x >= 1e4 then return ("%.3gk"):format(x / 1e3) end
  return ("%.0f"):format(x)
end

--- Returns a number of bytes as "1.5 KiB", "1.5 MiB" or "1.50 GiB".
function show.bytes(n)
  if n < 2 ^ 20 then return ("%.1f KiB"):format(n / 1024) end
  return n < 2 ^ 30 and ("%.1f MiB"):format(n / 2 ^ 20) or ("%.2f GiB"):format(n / 2 ^ 30)
end

--- Returns a loss scale as text, a power of two as such: 65536 -> "2^16", 1 -> "1", 3.7 -> "3.7"
function show.scale(x)
  if not x then return "-" end
  local mantissa, exponent = math.frexp(x)
  if mantissa == 0.5 and x ~= 1 then return "2^" .. (exponent - 1) end
  return ("%.6g"):format(x)
end

--- Returns a number of seconds as 0:42, 12:05 or 3:20:00.
function show.duration(seconds)
  if seconds ~= seconds or seconds == math.huge or seconds < 0 then return "-" end
  local s = math.floor(seconds + 0.5)
  if s >= 3600 then return ("%d:%02d:%02d"):format(s / 3600, s / 60 % 60, s % 60) end
  return ("%d:%02d"):format(s / 60, s % 60)
end

--- Makes text of unknown origin safe to print: writes control and bidirectional characters, and
--- bytes that are not UTF-8, as \xNN. Line ends and tabs become spaces unless `lines` is true. See
--- eng_text_shown.
function show.shown(text, lines)
  text = tostring(text)
  if not text:find("[^\32-\126]") then return text end
  local size = C.eng_text_shown(nil, 0, text, #text, lines or false)
  local out = ffi.new("char[?]", size + 1)
  C.eng_text_shown(out, size + 1, text, #text, lines or false)
  return ffi.string(out, size)
end

--- Returns why `name` is not valid as the name of a policy, an option, a run or a signal; nil if it
--- is valid. See eng_name_problem.
function show.name_problem(name)
  local problem = C.eng_name_problem(name, #name)
  return problem ~= nil and ffi.string(problem) or nil
end

--- Prints text of unknown origin, which shown() makes safe.
function show.print(text) print(show.shown(text, true)) end

--- Cuts a string to at most `most` characters. A string that was cut ends with `mark` (by default
--- "...").
function show.cut(text, most, mark)
  mark = mark or "..."
  local count, cut = 0, 1
  for start in text:gmatch("()[^\128-\191]") do
    count = count + 1
    if count == most - #mark + 1 then cut = start end
    if count > most then return text:sub(1, cut - 1) .. mark end
  end
  return text
end

--- Returns the number of characters in a UTF-8 text.
function show.width(text) return select(2, text:gsub("[^\128-\191]", "")) end

--- Breaks a text at spaces into lines of at most `width` characters; only a longer word makes a
--- longer line. The rest of a broken line keeps the line's indentation.
function show.wrap(text, width)
  local lines = {}
  for line in (text .. "\n"):gmatch("(.-)\n") do
    local indent, now = line:match("^ *"), nil
    for gap, word in line:gmatch("(%s*)(%S+)") do
      if now and show.width(now .. gap .. word) > width then
        lines[#lines + 1] = now
        now = indent .. word
      else
        now = (now or "") .. gap .. word
      end
    end
    lines[#lines + 1] = now or ""
  end
  return table.concat(lines, "\n")
end

local MOST = 60       -- a longer cell is cut to this number of characters

--- Returns rows of strings as lines with aligned columns. If left[c] is true, column c is aligned
--- to the left; if `left` itself is true, every column is. Long cells are cut, except in the last
--- column.
function show.table(rows, left)
  local lines, cells, width = {}, {}, {}
  for i, row in ipairs(rows) do
    cells[i] = {}
    for c, text in ipairs(row) do
      text = show.shown(text)
      text = c < #row and show.cut(text, MOST) or text
      cells[i][c], width[c] = text, math.max(width[c] or 0, show.width(text))
    end
  end
  for i, row in ipairs(cells) do
    for c, text in ipairs(row) do
      local gap = (" "):rep(width[c] - show.width(text))
      row[c] = left ~= true and not left[c] and gap .. text or c < #row and text .. gap or text
    end
    local line = table.concat(row, "  ")
    local last = #line
    while line:byte(last) == 32 do last = last - 1 end
    lines[i] = line:sub(1, last)
  end
  return table.concat(lines, "\n")
end

local Text = {}
Text.__index = Text
function Text.__tostring(t) return t.text end
function Text.__concat(a, b) return tostring(a) .. tostring(b) end

--- Wraps a text so that the REPL prints it unquoted and with its line ends. `fields`: the data from
--- which the text was made.
function show.text(text, fields)
  fields = fields or {}
  fields.text = text
  return setmetatable(fields, Text)
end

return show
