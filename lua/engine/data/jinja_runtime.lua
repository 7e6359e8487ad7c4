-- What a chat template (jinja.lua) calls when it runs: the methods, filters, tests and operators of
-- its values, with Python's meaning, and the limits of a rendering. A list is a table with the
-- metatable List, None is the value NONE, undefined is nil, and other values are Lua's. There are
-- no integers apart from floats, so a template with a number such as 2.5 cannot print a whole
-- number, which could be 2.0. Called by jinja.lua.
local show = require "engine.base.show"

local List, NONE = {}, {}
-- The most operations of a rendering, and the most bytes of a text that it makes. These limits stop
-- endless templates within seconds.
local OPERATIONS, BYTES = 1e6, 2 ^ 24
local operations, printed
local has_floats      -- whether a number with a point is in the template that runs

-- Begins a rendering. floats: whether the template has a number with a point.
local function begin(floats) operations, printed, has_floats = 0, 0, floats end

local function list(items) return setmetatable(items, List) end
local function is_list(x) return getmetatable(x) == List end
local function is_dict(x) return type(x) == "table" and x ~= NONE and not is_list(x) end

local function fail(message, ...) error({ template = message:format(...) }, 0) end

local function kind(x)
  return x == nil and "undefined" or x == NONE and "None" or is_list(x) and "a list"
    or type(x) == "table" and "a dict" or "a " .. type(x)
end

-- Counts n operations of the current rendering.
local function spend(n)
  operations = operations + n
  if operations > OPERATIONS then fail("the template runs more than %d operations", OPERATIONS) end
end

-- Returns a text that an operation has made, after a check of its size.
local function bounded(text)
  spend(#text / 1024)
  if #text > BYTES then fail("a text has more than %d bytes", BYTES) end
  return text
end

local function print_to(out, text)
  printed = printed + #text
  if printed > BYTES then fail("the rendered text has more than %d bytes", BYTES) end
  out[#out + 1] = text
end

-- Converts a number to text as Python's str() does. Refuses numbers that may be printed otherwise.
local function number_text(x)
  local whole = x % 1 == 0
  if x - x ~= 0 or whole and (has_floats or math.abs(x) >= 2 ^ 53) then
    fail("cannot print the number %g; supported: whole numbers below 2^53 in a template " ..
      "without a number such as 2.5, and numbers with a fraction", x)
  end
  return whole and ("%.0f"):format(x + 0) or show.exact(x)   -- + 0: Python has no whole number -0
end
-- Converts a value to the text that a template prints, as Python's str() does; lists are refused.
local function text_of(x)
  if type(x) == "string" then return x end
  if x == nil then return "" end
  if x == true then return "True" elseif x == false then return "False" end
  if type(x) == "number" then return number_text(x) end
  if x == NONE then return "None" end
  return fail("cannot print %s; supported: texts, numbers, booleans, None", kind(x))
end

local function truth(x)
  if is_list(x) then return x[1] ~= nil end
  if is_dict(x) then return next(x) ~= nil end
  return x ~= nil and x ~= NONE and x ~= false and x ~= 0 and x ~= ""
end

-- ------------------------------------------------------------------ texts

local function characters(s)
  local all = {}
  for c in s:gmatch "[%z\1-\127\192-\255][\128-\191]*" do all[#all + 1] = c end
  return all
end

-- The characters that Python's strip() removes, in ASCII and beyond.
local SPACES = {}
for c in (" \t\n\v\f\r\28\29\30\31"):gmatch "." do SPACES[c] = true end
for _, c in ipairs { "\194\133", "\194\160", "\225\154\128", "\226\128\168", "\226\128\169",
  "\226\128\175", "\226\129\159", "\227\128\128" } do SPACES[c] = true end
for i = 128, 138 do SPACES["\226\128" .. string.char(i)] = true end

local function strip(s, left, right, given)
  local set, from, to = SPACES, 1, #s
  if given ~= nil and given ~= NONE then
    if type(given) ~= "string" then fail("expected a text, got %s", kind(given)) end
    set = {}
    for _, c in ipairs(characters(given)) do set[c] = true end
  end
  local first = s:match("^[%z\1-\127\192-\255][\128-\191]*")
  while left and set[first] do
    from = from + #first
    first = s:match("^[%z\1-\127\192-\255][\128-\191]*", from)
  end
  while right and to >= from do
    local at = to
    while at > from and s:find("^[\128-\191]", at) do at = at - 1 end
    if not set[s:sub(at, to)] then break end
    to = at - 1
  end
  spend((#s - (to - from)) / 16)
  return bounded(s:sub(from, to))
end

-- Counts the operations of a search for `part` in s.
local function spend_search(s, part) spend(#s / 1024 * (1 + #part / 64)) end

-- Splits s at the first `most` places where `at` is, or at all of them.
local function split(s, at, most)
  if type(at) ~= "string" or at == "" then
    fail("split: expected a separator, got %s", at == "" and "an empty text"
      or at == nil and "nothing" or kind(at))
  end
  if most ~= nil and most ~= NONE and type(most) ~= "number" then
    fail("expected a number of places, got %s", kind(most))
  end
  if most == nil or most == NONE or most < 0 then most = math.huge end
  local parts, from = {}, 1
  spend_search(s, at)
  while true do
    spend(1 / 16)
    local first, last
    if #parts < most then first, last = s:find(at, from, true) end
    parts[#parts + 1] = s:sub(from, (first or #s + 1) - 1)
    if not first then return list(parts) end
    from = last + 1
  end
end

local function replace(s, old, new, most)
  if old == "" then fail("replace: expected a text to replace, got an empty one") end
  if type(new) ~= "string" then fail("replace: expected a new text, got %s", kind(new)) end
  return bounded(table.concat(split(s, old, most), new))
end

local function sequence(x)
  if type(x) == "string" then
    spend(#x / 16)
    return list(characters(x))
  end
  if is_list(x) then
    spend(#x / 16)
    return x
  end
  if is_dict(x) then
    local keys = {}
    for key in pairs(x) do keys[#keys + 1] = key end
    table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
    return list(keys)
  end
  return fail("expected a list, a dict or a text, got %s", kind(x))
end

-- Whether f(x) is true for `given`, a text, or for one of its items, a tuple of texts.
local function any_of(given, f)
  for _, x in ipairs(is_list(given) and given or { given == nil and NONE or given }) do
    if type(x) ~= "string" then fail("expected a text or a tuple of texts, got %s", kind(x)) end
    spend(#x / 1024)
    if f(x) then return true end
  end
  return false
end

local METHODS = {
  strip = function(s, c) return strip(s, true, true, c) end,
  lstrip = function(s, c) return strip(s, true, false, c) end,
  rstrip = function(s, c) return strip(s, false, true, c) end,
  split = split, replace = replace,
  upper = function(s) return bounded(s:upper()) end,
  lower = function(s) return bounded(s:lower()) end,
  startswith = function(s, with)
    return any_of(with, function(x) return s:sub(1, #x) == x end)
  end,
  endswith = function(s, with)
    return any_of(with, function(x) return x == "" or s:sub(-#x) == x end)
  end,
}
-- The most arguments of methods and filters that take any.
local MOST = { strip = 1, lstrip = 1, rstrip = 1, split = 2, replace = 3, startswith = 1,
  endswith = 1, get = 2, trim = 1, join = 1, default = 2, d = 2 }
local function want_few(name, n)
  local most = MOST[name] or 0
  if n > most then fail("%s: expected at most %d arguments, got %d", name, most, n) end
end

local DICT_METHODS = {
  get = function(d, key, default)
    if d[key] ~= nil then return d[key] end
    return default == nil and NONE or default
  end,
  items = function(d)
    local all = sequence(d)
    for i, key in ipairs(all) do all[i] = list { key, d[key] } end
    return all
  end,
  keys = sequence,
}

local function length(x) return #sequence(x) end

local FILTERS = {
  length = length, count = length, string = text_of, safe = function(s) return s end,
  list = sequence,
  join = function(x, with)
    local parts = {}
    for i, item in ipairs(sequence(x)) do parts[i] = text_of(item) end
    return bounded(table.concat(parts, with or ""))
  end,
  first = function(x) return sequence(x)[1] end,
  last = function(x) local all = sequence(x) return all[#all] end,
  default = function(x, other, falsy)
    if x == nil or falsy and not truth(x) then return other end
    return x
  end,
}
FILTERS.d = FILTERS.default
for filter, method in pairs { trim = "strip", upper = "upper", lower = "lower",
  replace = "replace" } do
  FILTERS[filter] = function(x, ...) return METHODS[method](text_of(x), ...) end
end

local function iterable(x) return type(x) == "string" or type(x) == "table" and x ~= NONE end

local TESTS = {
  defined = function(x) return x ~= nil end, undefined = function(x) return x == nil end,
  none = function(x) return x == NONE end, string = function(x) return type(x) == "string" end,
  number = function(x) return type(x) == "number" end, mapping = is_dict,
  boolean = function(x) return type(x) == "boolean" end,
  ["true"] = function(x) return x == true end, ["false"] = function(x) return x == false end,
  iterable = iterable, sequence = iterable,
  odd = function(x) return x % 2 == 1 end, even = function(x) return x % 2 == 0 end,
}

-- ------------------------------------------------------------------ values

local function item_of(x, key)
  if x == nil then fail("cannot read '%s' of an undefined value", tostring(key)) end
  if is_dict(x) then return x[key] end
  if type(key) == "number" and (is_list(x) or type(x) == "string") then
    local all = sequence(x)
    return all[key < 0 and #all + key + 1 or key + 1]
  end
end

local function slice_of(x, from, to, step)
  local all, out = sequence(x), {}
  local n = #all
  step = step or 1
  if step ~= 1 and step ~= -1 then
    fail("expected a slice with a step of 1 or -1, got %s",
      type(step) == "number" and text_of(step) or kind(step))
  end
  local function place(i, default)
    if i == nil or i == NONE then return default end
    return math.max(step > 0 and 0 or -1, math.min(i < 0 and i + n or i, step > 0 and n or n - 1))
  end
  local first, last = place(from, step > 0 and 0 or n - 1), place(to, step > 0 and n or -1)
  for i = first, last - step, step do out[#out + 1] = all[i + 1] end
  return type(x) == "string" and table.concat(out) or list(out)
end

-- Compares lists and dicts by their items, as Python does.
local function equal(a, b)
  if a == b or type(a) ~= "table" or type(b) ~= "table" or a == NONE or b == NONE
    or is_list(a) ~= is_list(b) then return a == b end
  for key, value in pairs(a) do
    spend(1)
    if not equal(value, b[key]) then return false end
  end
  for key in pairs(b) do
    if a[key] == nil then return false end
  end
  return true
end

local function contains(a, x)
  if type(x) == "string" then
    if type(a) ~= "string" then
      fail("the right side of `in` is a text, so expected a text on its left, got %s", kind(a))
    end
    spend_search(x, a)
    return x:find(a, 1, true) ~= nil
  end
  if is_dict(x) then return x[a] ~= nil end
  for _, item in ipairs(sequence(x)) do
    if equal(item, a) then return true end
  end
  return false
end

local function numbers(what, a, b)
  if type(a) ~= "number" or type(b) ~= "number" then
    fail("cannot compute %s %s %s", kind(a), what, kind(b))
  end
end

local BINARY = {
  ["=="] = equal, ["!="] = function(a, b) return not equal(a, b) end,
  ["in"] = contains, ["not in"] = function(a, b) return not contains(a, b) end,
  ["~"] = function(a, b) return bounded(text_of(a) .. text_of(b)) end,
  ["+"] = function(a, b)
    if type(a) == "string" and type(b) == "string" then return bounded(a .. b) end
    if is_list(a) and is_list(b) then
      local all = {}
      spend((#a + #b) / 16)
      for _, x in ipairs(a) do all[#all + 1] = x end
      for _, x in ipairs(b) do all[#all + 1] = x end
      if #all > BYTES / 64 then fail("a list has more than %d items", BYTES / 64) end
      return list(all)
    end
    numbers("+", a, b)
    return a + b
  end,
}
for op, f in pairs { ["-"] = function(a, b) return a - b end,
  ["*"] = function(a, b) return a * b end, ["//"] = function(a, b) return math.floor(a / b) end,
  ["%"] = function(a, b) return a % b end, ["<"] = function(a, b) return a < b end,
  [">"] = function(a, b) return a > b end, ["<="] = function(a, b) return a <= b end,
  [">="] = function(a, b) return a >= b end } do
  BINARY[op] = function(a, b)
    numbers(op, a, b)
    if b == 0 and (op == "//" or op == "%") then fail("cannot compute %s by zero", op) end
    return f(a, b)
  end
end

return { NONE = NONE, list = list, is_dict = is_dict, kind = kind, fail = fail, begin = begin,
  spend = spend, print_to = print_to, text_of = text_of, truth = truth, sequence = sequence,
  item_of = item_of, slice_of = slice_of, methods = METHODS, dict_methods = DICT_METHODS,
  filters = FILTERS, want_few = want_few, tests = TESTS, binary = BINARY }
