-- Implements the part of the template language Jinja that chat templates use, with transformers'
-- settings (trim_blocks and lstrip_blocks are on). A template becomes a function that converts
-- variables to a text. The supported statements are `for` (with `if`, `else`, `loop`, `break`,
-- `continue`), `if`, `set` (of a name, a namespace's field or a block) and `generation`. All of
-- Jinja's operators are supported except **, / and the unary +, but arithmetic and < > <= >= need
-- numbers (+ also joins texts and lists), a slice has a step of 1 or -1, and a tuple needs
-- parentheses. The tables below have the supported methods, filters and tests. Most unsupported
-- features are errors that name the template's line. There are no integers apart from floats, so a
-- template with a number such as 2.5 cannot print a whole number, which could be 2.0.
-- Values are Lua values; a list is a table with the metatable List, None is the value NONE, and
-- undefined is nil. Called by chat_template.lua.
local show = require "engine.base.show"

local M = {}

local List, NONE = {}, {}
M.NONE = NONE
-- The most operations of a rendering, and the most bytes of a text that it makes. These limits stop
-- endless templates within seconds.
local OPERATIONS, BYTES = 1e6, 2 ^ 24
local operations, printed
local has_floats      -- whether a number with a point is in the template that runs

local function list(items) return setmetatable(items, List) end
M.list = list
local function is_list(x) return getmetatable(x) == List end
local function is_dict(x) return type(x) == "table" and x ~= NONE and not is_list(x) end

local function fail(message, ...) error({ template = message:format(...) }, 0) end
M.fail = fail

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
local function joined(x, with)
  local parts = {}
  for i, item in ipairs(sequence(x)) do parts[i] = text_of(item) end
  return bounded(table.concat(parts, with or ""))
end

local FILTERS = {
  length = length, count = length, string = text_of, safe = function(s) return s end,
  list = sequence, join = joined,
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

local TESTS = {
  defined = function(x) return x ~= nil end, undefined = function(x) return x == nil end,
  none = function(x) return x == NONE end, string = function(x) return type(x) == "string" end,
  number = function(x) return type(x) == "number" end, mapping = is_dict,
  boolean = function(x) return type(x) == "boolean" end,
  ["true"] = function(x) return x == true end, ["false"] = function(x) return x == false end,
  iterable = function(x) return type(x) == "string" or type(x) == "table" and x ~= NONE end,
  sequence = function(x) return type(x) == "string" or type(x) == "table" and x ~= NONE end,
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
    if type(a) ~= "string" then fail("expected a text before `in` and a text, got %s", kind(a)) end
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

-- ------------------------------------------------------------------ expressions

local ESCAPES = { n = "\n", t = "\t", r = "\r", ["\n"] = "" }
local WORDS = { ["and"] = true, ["or"] = true, ["not"] = true, ["in"] = true, ["is"] = true,
  ["if"] = true, ["else"] = true }
local CONSTANTS = { ["true"] = true, ["True"] = true, ["false"] = false, ["False"] = false,
  none = NONE, None = NONE }

-- Returns the tokens inside a tag as a list of { kind, value }; the kinds are "name", "op", "text"
-- and "number".
local function tokens_of(source)
  local all, at = {}, 1
  while true do
    at = source:find("%S", at)
    if not at then break end
    local c = source:sub(at, at)
    if c == "'" or c == '"' then
      local out, i = {}, at + 1
      while source:sub(i, i) ~= c do
        local d = source:sub(i, i)
        if d == "" then fail("expected a closing quote after %s", source:sub(at, at + 20)) end
        if d == "\\" then
          i = i + 1
          d = source:sub(i, i)
          if d:find "[xuUN0-7]" then fail("the escape \\%s in a string is not supported", d) end
          d = ESCAPES[d] or d:find "[\\'\"]" and d or "\\" .. d
        end
        out[#out + 1], i = d, i + 1
      end
      all[#all + 1], at = { "text", table.concat(out) }, i + 1
    else
      local word = source:match("^[%a_][%w_]*", at)
      local number = not word and source:match("^%d+%.?%d*", at)
      local op = not word and not number and (source:match("^[=!<>]=", at)
        or source:match("^//", at) or source:match("^[%+%-%*/%%~<>%(%)%[%]{}%.,:|=]", at))
      if not (word or number or op) then fail("expected an expression, got '%s'", c) end
      if number and number:find(".", 1, true) then has_floats = true end
      all[#all + 1] = word and { "name", word } or number and { "number", tonumber(number) }
        or { "op", op }
      at = at + #(word or number or op)
    end
  end
  return all
end

local Parser = {}
Parser.__index = Parser

function Parser:is(value)
  local token = self[self.at]
  return token and token[2] == value and token[1] ~= "text" and token[1] ~= "number"
end
function Parser:accept(value)
  if not self:is(value) then return false end
  self.at = self.at + 1
  return true
end
function Parser:want(value)
  if not self:accept(value) then
    local token = self[self.at]
    fail("expected '%s', got %s", value, token and "'" .. tostring(token[2]) .. "'" or "the end")
  end
end
function Parser:name()
  local token = self[self.at]
  if not token or token[1] ~= "name" then
    fail("expected a name, got %s", token and "'" .. tostring(token[2]) .. "'" or "the end")
  end
  self.at = self.at + 1
  return token[2]
end

-- A parsed expression is a function that takes the scope and returns a value. applied() returns the
-- expression that calls f with the values of the n expressions in `args`. A missing expression
-- stands for nil.
local function applied(f, args, n)
  return function(scope)
    local values = {}
    for i = 1, n do values[i] = args[i] and args[i](scope) end
    return f(unpack(values, 1, n))
  end
end

local function constant(value) return function() return value end end

-- Parses arguments up to `close`. Returns a list of the positional arguments, which begins with
-- `first` if `first` is given; the length of this list; and a table of the named arguments.
function Parser:arguments(close, first)
  local args, n, named = { first }, first and 1 or 0, {}
  while not self:accept(close) do
    local after = self[self.at + 1]
    if self[self.at] and self[self.at][1] == "name" and after and after[1] == "op"
      and after[2] == "=" then
      local key = self:name()
      self:want "="
      named[key] = self:expression()
    else
      n = n + 1
      args[n] = self:expression()
    end
    if not self:is(close) then self:want "," end
  end
  return args, n, named
end

local function list_of(...) return list { ... } end

function Parser:dict()
  local keys, values = {}, {}
  while not self:accept "}" do
    keys[#keys + 1] = self:expression()
    self:want ":"
    values[#keys] = self:expression()
    if not self:is "}" then self:want "," end
  end
  return function(scope)
    local dict = {}
    for i, key in ipairs(keys) do dict[key(scope)] = values[i](scope) end
    return dict
  end
end

-- Parses a call of namespace() or of a function in the scope.
function Parser:call(name)
  local args, n, named = self:arguments ")"
  return function(scope)
    if name == "namespace" and n == 0 then
      local space = {}
      for key, value in pairs(named) do space[key] = value(scope) end
      return space
    end
    local f = scope[name]
    if type(f) ~= "function" then
      fail("there is no function '%s'; supported: namespace(name=value), raise_exception", name)
    end
    if next(named) then fail("the argument '%s' of '%s' is not supported", next(named), name) end
    return applied(f, args, n)(scope)
  end
end

function Parser:primary()
  local token = self[self.at] or fail "expected an expression, got the end"
  self.at = self.at + 1
  local what, value = token[1], token[2]
  if what == "text" or what == "number" then
    while what == "text" and self[self.at] and self[self.at][1] == "text" do
      value = value .. self[self.at][2]              -- adjacent literals are joined
      self.at = self.at + 1
    end
    return constant(value)
  elseif value == "(" then
    local items, n = { self:expression() }, 1
    local is_tuple = self:is ","
    while self:accept "," and not self:is ")" do
      n = n + 1
      items[n] = self:expression()
    end
    self:want ")"
    return is_tuple and applied(list_of, items, n) or items[1]
  elseif value == "[" then return applied(list_of, self:arguments "]")
  elseif value == "{" then return self:dict()
  elseif what ~= "name" or WORDS[value] then
    fail("expected an expression, got '%s'", tostring(value))
  end
  if CONSTANTS[value] ~= nil then return constant(CONSTANTS[value]) end
  if self:accept "(" then return self:call(value) end
  return function(scope) return scope[value] end
end

function Parser:method(x, name)
  local args, n, named = self:arguments(")", x)
  return applied(function(object, ...)
    local f = type(object) == "string" and METHODS[name] or is_dict(object) and DICT_METHODS[name]
    if not f then fail("%s has no supported method '%s'", kind(object), name) end
    if next(named) then fail("the argument '%s' of '%s' is not supported", next(named), name) end
    want_few(name, n - 1)
    return f(object, ...)
  end, args, n)
end

function Parser:subscript(x)
  local args, n = { x }, 2
  while not self:accept "]" do
    if self:accept ":" then n = n + 1 else args[n] = self:expression() end
  end
  if n > 2 then return applied(slice_of, args, n) end
  return applied(item_of, args[2] and args or fail "expected an index, got ']'", n)
end

function Parser:filter(x)
  local name = self:name()
  local f = FILTERS[name] or fail("the filter '%s' is not supported", name)
  if not self:accept "(" then return applied(f, { x }, 1) end
  local args, n, named = self:arguments(")", x)
  if next(named) then
    fail("the argument '%s' of the filter '%s' is not supported", next(named), name)
  end
  want_few(name, n - 1)
  return applied(f, args, n)
end

function Parser:test(x)
  local negated, name = self:accept "not", self:name()
  local f = TESTS[name] or fail("the test '%s' is not supported", name)
  return applied(function(value) return (f(value) and true or false) ~= negated end, { x }, 1)
end

-- Parses what follows the operand x. In an `inner` operand, filters and tests are left to the minus
-- before it: -x|f is (-x)|f.
function Parser:postfix(x, inner)
  while true do
    if self:accept "." then
      local name = self:name()
      x = self:accept "(" and self:method(x, name) or applied(item_of, { x, constant(name) }, 2)
    elseif self:accept "[" then x = self:subscript(x)
    elseif inner then return x
    elseif self:accept "|" then x = self:filter(x)
    elseif self:accept "is" then x = self:test(x)
    else return x end
  end
end

function Parser:unary(inner)
  if not self:accept "-" then return self:postfix(self:primary(), inner) end
  return self:postfix(applied(BINARY["-"], { constant(0), self:unary(true) }, 2), inner)
end

-- Binary operators, from the lowest precedence to the highest. The prefix `not` has a precedence
-- between `and` and the comparisons; after an operand, `not` begins `not in`.
local LEVELS = { { "or" }, { "and" }, { "==", "!=", "<", ">", "<=", ">=", "in", "not" },
  { "+", "-" }, { "~" }, { "*", "//", "%" } }
local COMPARISONS = 3

-- Returns the comparison of a with the values in `rest`, a list of { function, expression }. As in
-- Python, a < b < c is a < b and b < c.
local function chained(a, rest)
  return function(scope)
    local left = a(scope)
    for _, part in ipairs(rest) do
      local right = part[2](scope)
      if not part[1](left, right) then return false end
      left = right
    end
    return true
  end
end

function Parser:binary(level)
  if not LEVELS[level] then return self:unary() end
  if level == COMPARISONS and self:accept "not" then
    return applied(function(x) return not truth(x) end, { self:binary(level) }, 1)
  end
  local a, rest = self:binary(level + 1), {}
  while true do
    local op
    for _, candidate in ipairs(LEVELS[level]) do
      if not op and self:accept(candidate) then op = candidate end
    end
    if not op then return rest[1] and chained(a, rest) or a end
    if op == "not" then
      self:want "in"
      op = "not in"
    end
    local f, x, y = BINARY[op], a, self:binary(level + 1)
    if level == COMPARISONS then
      rest[#rest + 1] = { f, y }
    elseif f then
      a = applied(f, { x, y }, 2)
    else
      a = function(scope)                                        -- `and` and `or` short-circuit
        local value = x(scope)
        if truth(value) == (op == "or") then return value end
        return y(scope)
      end
    end
  end
end

function Parser:either() return self:binary(1) end

function Parser:expression()
  local a = self:either()
  while self:accept "if" do
    local x, condition, other = a, self:either(), nil
    if self:accept "else" then other = self:expression() end
    a = function(scope)
      if truth(condition(scope)) then return x(scope) end
      return other and other(scope)
    end
  end
  return a
end

function Parser:finished()
  if self[self.at] then fail("expected the end of the tag, got '%s'", self[self.at][2]) end
end

-- ------------------------------------------------------------------ the template's parts

-- Splits a template into a list of { kind, text, line }; the kinds are "text", "{{" and "{%". Trims
-- white space as trim_blocks, lstrip_blocks and the signs of the tags require.
local function parts_of(source)
  local parts, at, line, trim = {}, 1, 1, false
  source = source:gsub("\r\n", "\n"):gsub("\n$", "")
  -- Returns whether only blanks precede position i in its line.
  local function begins_line(i)
    repeat i = i - 1 until not source:find("^[ \t]", i) or i < 1
    return i < 1 or source:sub(i, i) == "\n"
  end
  local function add_text(text, tag, sign, from)
    if trim then text = text:gsub("^%s+", "") end
    if sign == "-" then text = text:gsub("%s+$", "")
    elseif tag and tag ~= "{{" and sign ~= "+" and begins_line(from) then
      text = text:gsub("[ \t]+$", "")
    end
    if text ~= "" then parts[#parts + 1] = { "text", text, line } end
  end
  while true do
    local from = source:find("{[{%%#]", at)
    if not from then
      add_text(source:sub(at))
      return parts
    end
    local open = source:sub(from, from + 1)
    local close = open == "{{" and "}}" or open == "{%" and "%}" or "#}"
    local sign = source:sub(from + 2, from + 2):match "[-+]"
    add_text(source:sub(at, from - 1), open, sign, from)
    line = line + select(2, source:sub(at, from - 1):gsub("\n", ""))
    local i, quote = from + 2 + (sign and 1 or 0), nil
    local first = i
    while quote or source:sub(i, i + 1) ~= close do      -- skips `close` inside quotes
      local c = source:sub(i, i)
      if c == "" then
        error({ template = ("expected '%s' at the end of the tag"):format(close), line = line }, 0)
      end
      if quote and c == "\\" then i = i + 1
      elseif quote == c then quote = nil
      elseif open ~= "{#" and not quote and (c == "'" or c == '"') then quote = c end
      i = i + 1
    end
    local inner = source:sub(first, i - 1)
    local last = inner:match(open == "{{" and "%-$" or "[-+]$")
    trim = last == "-"
    if last then inner = inner:sub(1, -2) end
    if open ~= "{#" then parts[#parts + 1] = { open, inner, line } end
    line, at = line + select(2, inner:gsub("\n", "")), i + 2
    if not last and open ~= "{{" and source:sub(at, at) == "\n" then at, line = at + 1, line + 1 end
  end
end

local block   -- parses parts until one of the given end tags

local STATEMENTS = {}

function STATEMENTS.set(state, p)
  local name, field = p:name(), nil
  if p:accept "." then field = p:name() end
  local value
  if p:accept "=" then value = p:expression()
  else
    p:finished()
    local body = block(state, { endset = true })
    value = function(scope)
      local out = {}
      body(scope, out)
      return table.concat(out)
    end
  end
  return function(scope)
    if not field then scope[name] = value(scope) return end
    if not is_dict(scope[name]) then
      fail("expected '%s' to be a namespace, got %s", name, kind(scope[name]))
    end
    scope[name][field] = value(scope)
  end
end

local ALWAYS = constant(true)

STATEMENTS["if"] = function(state, p)
  local cases, condition = {}, p:expression()
  local tag
  p:finished()
  repeat
    local case = { condition = condition }
    case.body, tag, p = block(state, { ["elif"] = condition ~= ALWAYS or nil,
      ["else"] = condition ~= ALWAYS or nil, endif = true })
    cases[#cases + 1], condition = case, tag == "elif" and p:expression() or ALWAYS
    p:finished()
  until tag == "endif"
  return function(scope, out)
    for _, case in ipairs(cases) do
      if truth(case.condition(scope)) then return case.body(scope, out) end
    end
  end
end

STATEMENTS["for"] = function(state, p)
  local names = { p:name() }
  while p:accept "," do names[#names + 1] = p:name() end
  p:want "in"
  local items, condition = p:either(), nil
  if p:accept "if" then condition = p:either() end
  p:finished()
  local body, tag = block(state, { ["else"] = true, endfor = true })
  local otherwise = tag == "else" and block(state, { endfor = true })
  local function bind(scope, item)
    if #names == 1 then scope[names[1]] = item return end
    for k, name in ipairs(names) do scope[name] = item[k] end
  end
  return function(scope, out)
    local all, scopes = {}, {}
    for _, item in ipairs(sequence(items(scope))) do
      local own = setmetatable({}, { __index = scope })
      bind(own, item)
      if not condition or truth(condition(own)) then
        all[#all + 1] = item
        scopes[#all] = own
      end
    end
    for i, own in ipairs(scopes) do
      spend(1)
      own.loop = { index = i, index0 = i - 1, first = i == 1, last = i == #all, length = #all,
        revindex = #all - i + 1, revindex0 = #all - i, depth = 1, depth0 = 0,
        previtem = all[i - 1], nextitem = all[i + 1] }
      if body(own, out) == "break" then break end
    end
    if #all == 0 and otherwise then return otherwise(scope, out) end
  end
end

STATEMENTS["break"] = function() return function() return "break" end end
STATEMENTS["continue"] = function() return function() return "continue" end end
STATEMENTS.generation = function(state, p)
  p:finished()
  return (block(state, { endgeneration = true }))
end

function block(state, ends)
  local nodes = {}
  local function body(scope, out)
    for _, node in ipairs(nodes) do
      spend(1)
      state.running = node.line
      local left = node.run(scope, out)
      if left then return left end
    end
  end
  while true do
    state.at = state.at + 1
    local part = state.parts[state.at]
    if not part then
      for tag in pairs(ends) do
        if tag:find "^end" then fail("expected {%% %s %%}, got the end of the template", tag) end
      end
      return body
    end
    state.running = part[3]
    local run
    if part[1] == "text" then
      local text = part[2]
      run = function(_, out) print_to(out, text) end
    else
      local p = setmetatable(tokens_of(part[2]), Parser)
      p.at = 1
      if part[1] == "{{" then
        local value = p:expression()
        p:finished()
        run = function(scope, out) print_to(out, text_of(value(scope))) end
      else
        local tag = p:name()
        if ends[tag] then
          if tag ~= "elif" then p:finished() end
          return body, tag, p
        end
        if tag:find "^end" or tag == "else" or tag == "elif" then
          fail("{%% %s %%} belongs to no open statement", tag)
        end
        local make = STATEMENTS[tag] or fail("{%% %s %%} is not supported", tag)
        run = make(state, p)
        p:finished()
      end
    end
    nodes[#nodes + 1] = { run = run, line = part[3] }
  end
end

-- Calls f and returns its result. If f raises an error, returns nil and "line N: message".
local function guarded(state, f, ...)
  operations, printed = 0, 0
  local good, result = pcall(f, ...)
  if good then return result end
  if type(result) == "table" and result.template then
    return nil, ("line %d: %s"):format(result.line or state.running or 1, result.template)
  end
  return nil, ("line %d: %s"):format(state.running or 1, tostring(result):gsub("^[^:]+:%d+: ", ""))
end

--- Parses a template. Returns a function(variables) that returns the rendered text or, if rendering
--- fails, nil and the reason. If the template cannot be parsed, M.read returns nil and the reason.
function M.read(source)
  local state = { at = 0 }
  has_floats = false
  local body, problem = guarded(state, function()
    state.parts = parts_of(source)
    return (block(state, {}))
  end)
  local floats = has_floats
  if not body then return nil, problem end
  return function(variables)
    has_floats = floats
    return guarded(state, function()
      local out = {}
      body(setmetatable({}, { __index = variables }), out)
      return table.concat(out)
    end)
  end
end

return M
