-- Checks the syntax of Lua patterns that users give, such as patterns for the modules of a recipe.
-- string.find raises an error only when a match reaches the mistake, so a trial match on an empty
-- string would accept "blocks(". Called by arguments.lua (for functions that take a pattern),
-- config.lua and train/options.lua.
local M = {}

local CAPTURES, DEEPEST = 32, 199   -- LuaJIT's limits on captures and on the depth of a match

--- Returns what is wrong with a Lua pattern, or nil. If the result is nil, string.find raises no
--- error for this pattern, whatever text it searches.
function M.problem(text)
  text = text:match("^%Z*")                            -- a zero byte ends a pattern
  local open, closed, captures, at = {}, {}, 0, 1      -- closed[n]: capture n has its ")"
  while at <= #text do
    local two = text:sub(at, at + 1)
    local first, length = two:sub(1, 1), 1
    if first == "(" then
      captures = captures + 1
      open[#open + 1] = captures
    elseif first == ")" then
      if #open == 0 then return "its ')' has no '('" end
      closed[table.remove(open)] = true
    elseif first == "[" then
      local last = at + (two == "[^" and 2 or 1)       -- a "]" here is a member of the set
      repeat last = last + (text:sub(last, last) == "%" and 2 or 1)
      until last > #text or text:sub(last, last) == "]"
      if last > #text then return "its '[' has no ']'" end
      length = last + 1 - at
    elseif first == "%" then
      length = two == "%b" and 4 or 2
      if at + length - 1 > #text then
        return two == "%b" and "its %b needs two characters" or "it ends with '%'"
      elseif two == "%f" and text:sub(at + 2, at + 2) ~= "[" then
        return "its %f needs a set in brackets"
      elseif two:find("%d") and not closed[tonumber(two:sub(2))] then
        return ("its %s names no finished capture"):format(two)
      end
    end
    at = at + length
  end
  if #open > 0 then return "its '(' has no ')'" end
  if captures > CAPTURES then return ("it has more than %d captures"):format(CAPTURES) end
  if select(2, text:gsub("[()*+?-]", "")) > DEEPEST then return "it is too complex" end
end

return M
