-- Numbers as people write them on a command line: 3e-4, 2^15, 1/3, -(2+3)*4, 0x10, inf, pi.
--   expression("2^15") -> 32768;  expression("2^") -> nil, "a number expected at the end"
local constants = { inf = math.huge, pi = math.pi }

local function fail(what, text, position)
  error({ ("%s expected %s"):format(what, position > #text and "at the end"
    or ("at '" .. text:sub(position) .. "'")) }, 0)
end

-- Each rule takes the text and a position, and returns a value and the position after it.
local sum

local function atom(text, position, depth)
  if depth > 100 then error({ "too deeply nested" }, 0) end
  local number, after = text:match("^(0[xX]%x+)()", position)
  if not number then number, after = text:match("^(%d+%.?%d*[eE][+-]?%d+)()", position) end
  if not number then number, after = text:match("^(%.%d+[eE][+-]?%d+)()", position) end
  if not number then number, after = text:match("^(%d+%.?%d*)()", position) end
  if not number then number, after = text:match("^(%.%d+)()", position) end
  if number then return tonumber(number), text:match("^%s*()", after) end
  local word, behind = text:match("^(%a+)()", position)
  if word and constants[word] then return constants[word], text:match("^%s*()", behind) end
  if text:sub(position, position) == "(" then
    local value, next_position = sum(text, text:match("^%s*()", position + 1), depth + 1)
    if text:sub(next_position, next_position) ~= ")" then fail("')'", text, next_position) end
    return value, text:match("^%s*()", next_position + 1)
  end
  fail("a number", text, position)
end

local unary

local function power(text, position, depth)
  local value
  value, position = atom(text, position, depth)
  if text:sub(position, position) == "^" then
    local exponent
    exponent, position = unary(text, text:match("^%s*()", position + 1), depth + 1)
    value = value ^ exponent
  end
  return value, position
end

function unary(text, position, depth)
  local sign = text:match("^[+-]", position)
  if not sign then return power(text, position, depth) end
  if depth > 100 then error({ "too deeply nested" }, 0) end
  local value
  value, position = unary(text, text:match("^%s*()", position + 1), depth + 1)
  return sign == "-" and -value or value, position
end

local OPERATIONS = {
  ["*"] = function(a, b) return a * b end, ["/"] = function(a, b) return a / b end,
  ["%"] = function(a, b) return a % b end, ["+"] = function(a, b) return a + b end,
  ["-"] = function(a, b) return a - b end,
}

-- A rule for left-associative operators; `pattern` matches one operator.
local function chain(operand, pattern)
  return function(text, position, depth)
    local value, right
    value, position = operand(text, position, depth)
    while true do
      local sign = text:match(pattern, position)
      if not sign then return value, position end
      right, position = operand(text, text:match("^%s*()", position + 1), depth)
      value = OPERATIONS[sign](value, right)
    end
  end
end

sum = chain(chain(unary, "^[*/%%]"), "^[+-]")

return function(text)
  local ok, value, position = pcall(function()
    local v, p = sum(text, text:match("^%s*()"), 0)
    if p <= #text then fail("an operator", text, p) end
    return v, p
  end)
  if ok and position then return value end
  return nil, type(value) == "table" and value[1] or tostring(value)
end
