-- Evaluates a number that is typed on a command line: 3e-4, 2^15, 1/3, -(2+3)*4, 0x10, inf, pi.
--   expression("2^15") -> 32768;  expression("2^") -> nil, "unexpected symbol near the end"
-- The text may contain only numbers, operators, brackets, spaces, inf and pi, so that no other code
-- can run. LuaJIT evaluates it, with the precedence of Lua. Called by config.lua, cli/options.lua,
-- policy/ and run/tune.lua.
local show = require "engine.base.show"

local NUMBERS = { "^0[xX]%x+", "^%d+%.?%d*[eE][+-]?%d+", "^%.%d+[eE][+-]?%d+", "^%d+%.?%d*",
  "^%.%d+" }
local CONSTANTS = { inf = true, pi = true }

-- Returns the number, constant, operator or bracket at a position; nil if there is none.
local function token_at(text, at)
  for _, pattern in ipairs(NUMBERS) do
    local number = text:match(pattern, at)
    if number then return number end
  end
  local word = text:match("^%a+", at)
  return CONSTANTS[word] and word or text:match("^[-+*/%%^()]", at)
end

return function(text)
  local code, at, after_operator = {}, text:match("^%s*()"), true
  while at <= #text do
    local token = token_at(text, at)
    if not token then
      return nil, ("expected a number or an operator at '%s'"):format(show.cut(text:sub(at), 40))
    end
    at = text:match("^%s*()", at + #token)
    -- Lua has no unary '+'
    if not (token == "+" and after_operator) then code[#code + 1] = token end
    after_operator = token:find("^[-+*/%%^(]$") ~= nil
  end
  local chunk, problem = loadstring("local inf, pi = ... return " .. table.concat(code, " "))
  if chunk then
    local good, value = pcall(chunk, math.huge, math.pi)      -- fails on a call such as pi(2)
    if good and type(value) == "number" then return value end
    problem = "expected a number"
  end
  return nil, show.cut(problem:gsub("^.*:1: ", ""):gsub("'<eof>'", "the end"), 100)
end
