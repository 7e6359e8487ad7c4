-- Converts plain Lua data to JSON and back. encode and decode are lossless: decode returns the data
-- that encode was given, with every bit of its numbers (but every NaN becomes the same NaN). Tables
-- may be nested up to 1000 deep; a table in the form "$pairs" counts as three. Checkpoints and
-- histories use them. `plain` writes JSON for other programs; lua-cjson reads JSON from other
-- programs. Used by most folders.
--
-- A value that JSON lacks becomes an object with one key:
--   { "$number": "inf" }                 also "-inf" and "nan"
--   { "$int64": "..." }                  a signed 64-bit number
--   { "$uint64": "..." }                 an unsigned 64-bit number
--   { "$bytes": hex }                    a string that is not UTF-8
--   { "$pairs": [[key, value], ...] }    a table, other than a list, with a key that is not a
--                                        string, is not UTF-8 or begins with "$"
local ffi = require "ffi"
local cjson = require "cjson"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local M = {}
local DEEPEST = 1000           -- cjson decodes this many lists and objects inside each other

local function number_text(x)
  return x - x ~= 0 and '{"$number":"' .. show.exact(x) .. '"}' or show.exact(x)
end

local escapes = { ['"'] = '\\"', ["\\"] = "\\\\", ["\b"] = "\\b", ["\f"] = "\\f", ["\n"] = "\\n",
  ["\r"] = "\\r", ["\t"] = "\\t" }

-- The characters beyond ASCII that eng_text_shown escapes. Each entry is { a pattern that captures
-- the last byte of a character, the number to add to this byte to get the code point }.
local unshown = { { "\194([\128-\159])", 0 }, { "\216(\156)", 0x580 },
  { "\226\128([\142\143\168-\174])", 0x1F80 }, { "\226\129([\166-\169])", 0x1FC0 } }

-- Patterns for the valid UTF-8 characters beyond ASCII, without overlong forms and surrogates. Each
-- % stands for a continuation byte.
local CHARACTERS = { "[\194-\223]%", "\224[\160-\191]%", "[\225-\236\238\239]%%",
  "\237[\128-\159]%", "\240[\144-\191]%%", "[\241-\243]%%%", "\244[\128-\143]%%" }
for i, pattern in ipairs(CHARACTERS) do CHARACTERS[i] = pattern:gsub("%%", "[\128-\191]") end

--- Returns whether a string is valid UTF-8.
function M.is_utf8(s)
  if not s:find("[\128-\255]") then return true end
  for _, pattern in ipairs(CHARACTERS) do s = s:gsub(pattern, " ") end
  return not s:find("[\128-\255]")
end
local is_utf8 = M.is_utf8

local function string_text(s)
  if not is_utf8(s) then
    return '{"$bytes":"' .. s:gsub(".", function(c) return ("%02x"):format(c:byte()) end) .. '"}'
  end
  s = s:gsub('[%z\1-\31"\\\127]', function(c)
    return escapes[c] or ("\\u%04x"):format(c:byte())
  end)
  for _, set in ipairs(s:find("[\194\216\226]") and unshown or {}) do
    s = s:gsub(set[1], function(c) return ("\\u%04x"):format(c:byte() + set[2]) end)
  end
  return '"' .. s .. '"'
end

local encode_value

-- Returns `depth` + n, the number of JSON lists and objects around a value, if the value may have
-- this depth.
local function deeper(depth, n, path)
  if depth + n > DEEPEST then
    error(("%s: the tables are nested too deep; expected at most %d lists and objects in JSON")
      :format(show.cut(path, 80), DEEPEST), 0)
  end
  return depth + n
end

--- Returns the keys of a table (strings, numbers and booleans) in a fixed order, and whether all of
--- them can be names in a JSON object. If not, encode() needs the form "$pairs".
function M.sorted_keys(t)
  local keys, plain, count = {}, true, 0
  for key in pairs(t) do
    count = count + 1
    keys[count] = key
    if type(key) ~= "string" or key:sub(1, 1) == "$" or not is_utf8(key) then plain = false end
  end
  table.sort(keys, function(a, b)
    if type(a) ~= type(b) then return type(a) < type(b) end
    if type(a) == "boolean" then return a and not b end
    return a < b
  end)
  return keys, plain
end

local function is_array(t)
  local count = 0
  for _ in pairs(t) do count = count + 1 end
  if count == 0 then return false end
  for i = 1, count do
    if t[i] == nil then return false end
  end
  return true
end

local function encode_table(t, path, above, depth)
  if above[t] then error(("%s: the table contains itself"):format(show.cut(path, 80)), 0) end
  above[t] = true
  local parts = {}
  local text
  if is_array(t) then
    depth = deeper(depth, 1, path)
    for i, value in ipairs(t) do
      parts[i] = encode_value(value, path .. "[" .. i .. "]", above, depth)
    end
    text = "[" .. table.concat(parts, ",") .. "]"
  else
    for key in pairs(t) do
      local kind = type(key)
      if kind ~= "string" and kind ~= "number" and kind ~= "boolean" then
        error(("%s: expected a string, number or boolean as a key, got a %s"):format(path, kind), 0)
      end
    end
    local keys, plain = M.sorted_keys(t)
    depth = deeper(depth, plain and 1 or 3, path)
    for i, key in ipairs(keys) do
      local value = encode_value(t[key], path .. "." .. tostring(key), above, depth)
      parts[i] = plain and string_text(key) .. ":" .. value or "[" ..
        encode_value(key, path, above, depth) .. "," .. value .. "]"
    end
    text = plain and "{" .. table.concat(parts, ",") .. "}" or '{"$pairs":[' ..
      table.concat(parts, ",") .. "]}"
  end
  above[t] = nil
  return text
end

function encode_value(value, path, above, depth)
  local kind = type(value)
  if kind == "boolean" then return tostring(value) end
  if kind == "table" then return encode_table(value, path, above, depth) end
  local text = kind == "number" and number_text(value) or kind == "string" and string_text(value)
  if text and text:sub(1, 1) == "{" then deeper(depth, 1, path) end
  if text then return text end
  if kind == "cdata" then
    deeper(depth, 1, path)
    if ffi.istype("int64_t", value) then
      return '{"$int64":"' .. tostring(value):gsub("LL$", "") .. '"}'
    end
    if ffi.istype("uint64_t", value) then
      return '{"$uint64":"' .. tostring(value):gsub("ULL$", "") .. '"}'
    end
  end
  error(("%s: expected a number, string, boolean or table, got a %s"):format(path, kind), 0)
end

--- Two values for `plain`, which writes json.null as null and json.no_fields as an empty object {}.
M.null, M.no_fields = cjson.null, {}

local lengths = setmetatable({}, { __mode = "k" })

--- Stores the length n of a list whose elements may be nil, for `plain`. Returns the list.
function M.with_length(list, n)
  lengths[list] = n
  return list
end

--- Returns data as JSON for other programs. Sorts the keys, writes inf and nan as strings
--- (show.json_number), and writes unsafe characters as \xNN. A table without string keys, also an
--- empty one, becomes a list; no table may have both string keys and others. number_of(x) returns
--- the text of a number (by default show.json_number).
function M.plain(value, number_of)
  if value == nil or value == cjson.null then return "null" end
  if value == M.no_fields then return "{}" end
  local kind = type(value)
  if kind == "number" then return (number_of or show.json_number)(value) end
  if kind == "string" then return string_text(show.shown(value, true)) end
  if kind == "boolean" then return tostring(value) end
  if kind ~= "table" then
    error(("JSON: expected a number, string, boolean or table, got a %s"):format(kind), 0)
  end
  local parts = {}
  if type(next(value)) ~= "string" then
    for i = 1, lengths[value] or #value do parts[i] = M.plain(value[i], number_of) end
    return "[" .. table.concat(parts, ",") .. "]"
  end
  for i, name in ipairs(nearest.keys(value)) do
    parts[i] = M.plain(name) .. ":" .. M.plain(value[name], number_of)
  end
  return "{" .. table.concat(parts, ",") .. "}"
end

--- Returns a JSON object for other programs, with the fields { { name, value } ... } in this order.
function M.ordered(fields)
  local parts = {}
  for i, field in ipairs(fields) do parts[i] = ('"%s":%s'):format(field[1], M.plain(field[2])) end
  return "{" .. table.concat(parts, ",") .. "}"
end

--- Returns Lua data as lossless JSON text. name: the value's name at the start of error messages,
--- as in "state.policy: ... got a function".
function M.encode(value, name) return encode_value(value, name or "value", {}, 0) end

-- Returns the whole number that `text` spells, as the C type `kind` ("int64_t" or "uint64_t").
-- Returns nil if `text` is not how encode() writes a number of this type. Applies the sign last,
-- because -2^63 has no positive counterpart.
local function integer(text, kind)
  local negative, digits = text:match("^(%-?)(%d+)$")
  if not digits then return nil end
  local value = 0ULL
  for d in digits:gmatch("%d") do value = value * 10 + (d:byte() - 48) end
  if negative == "-" then value = 0ULL - value end
  value = ffi.cast(kind, value)
  return tostring(value):match("^[^UL]*") == text and value or nil    -- a larger number wrapped
end

local restore

-- Key of an object with one key -> { the type of its value, a function from this value to the data
-- that it stands for }. The function returns nil for a malformed value.
local tags = {
  ["$number"] = { "string", function(text)
    return ({ nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge })[text]
  end },
  ["$int64"] = { "string", function(text) return integer(text, "int64_t") end },
  ["$uint64"] = { "string", function(text) return integer(text, "uint64_t") end },
  ["$bytes"] = { "string", function(text)
    if #text % 2 ~= 0 or text:find("%X") then return nil end
    return (text:gsub("%x%x", function(hex) return string.char(tonumber(hex, 16)) end))
  end },
  ["$pairs"] = { "table", function(list)
    local t = {}
    for _, entry in ipairs(list) do
      if type(entry) ~= "table" then return nil end
      local key = restore(entry[1])
      if not ({ string = 1, number = 1, boolean = 1 })[type(key)] or key ~= key then return nil end
      t[key] = restore(entry[2])
    end
    return t
  end },
}

function restore(value)
  if value == cjson.null then error("null has no counterpart in Lua", 0) end
  if type(value) ~= "table" then return value end
  local key, content = next(value)
  local tag = next(value, key) == nil and tags[key]
  if tag then
    local data
    if type(content) == tag[1] then data = tag[2](content) end
    if data == nil then
      error(("malformed value of '%s': %s"):format(key, type(content) == "table"
        and "a list or an object" or show.cut(show.shown(content), 80)), 0)
    end
    return data
  end
  for k, v in pairs(value) do value[k] = restore(v) end
  return value
end

local strict = cjson.new()
strict.decode_invalid_numbers(false)

--- Decodes the JSON text of another program. nan and inf in the text are errors; null becomes
--- json.null.
M.strict = strict.decode

--- Returns the data from which encode() made `text`. Raises an error if the text is malformed.
function M.decode(text) return restore(strict.decode(text)) end

return M
