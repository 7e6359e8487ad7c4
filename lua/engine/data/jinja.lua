-- Implements the part of the template language Jinja that chat templates use, with transformers'
-- settings (trim_blocks and lstrip_blocks are on). A template becomes a function that converts
-- variables to a text. The supported statements are `for` (with `if`, `else`, `loop`, `break`,
-- `continue`), `if`, `set` (of a name, a namespace's field or a block) and `generation`. All of
-- Jinja's operators are supported except **, / and the unary +, but arithmetic and < > <= >= need
-- numbers (+ also joins texts and lists), a slice has a step of 1 or -1, and a tuple needs
-- parentheses. jinja_runtime.lua has the supported methods, filters and tests. Most unsupported
-- features are errors that name the template's line. Called by chat_template.lua.
local runtime = require "engine.data.jinja_runtime"

local M = { NONE = runtime.NONE, list = runtime.list, fail = runtime.fail }

local NONE, list, fail = runtime.NONE, runtime.list, runtime.fail
local is_dict, kind, truth, text_of = runtime.is_dict, runtime.kind, runtime.truth, runtime.text_of
local spend, print_to, sequence = runtime.spend, runtime.print_to, runtime.sequence
local item_of, slice_of, want_few = runtime.item_of, runtime.slice_of, runtime.want_few
local METHODS, DICT_METHODS, FILTERS = runtime.methods, runtime.dict_methods, runtime.filters
local TESTS, BINARY = runtime.tests, runtime.binary
local has_floats      -- whether a number with a point is in the template that is parsed

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
function Parser:refuse(expected)
  local token = self[self.at]
  fail("expected %s, got %s", expected, token and "'" .. tostring(token[2]) .. "'" or "the end")
end
function Parser:want(value)
  if not self:accept(value) then self:refuse("'" .. value .. "'") end
end
function Parser:name()
  local token = self[self.at]
  if not token or token[1] ~= "name" then self:refuse "a name" end
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
  if self[self.at] then self:refuse "the end of the tag" end
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
  runtime.begin(state.has_floats)
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
  state.has_floats = has_floats
  if not body then return nil, problem end
  return function(variables)
    return guarded(state, function()
      local out = {}
      body(setmetatable({}, { __index = variables }), out)
      return table.concat(out)
    end)
  end
end

return M
