-- Checks Lua patterns that users give, such as patterns for the modules of a recipe: their syntax,
-- and how long a match can take. string.find raises an error only when a match reaches the mistake,
-- so a trial match on an empty string would accept "blocks(". Called by arguments.lua (for
-- functions that take a pattern), config.lua and train/options.lua.
local M = {}

local CAPTURES, DEEPEST = 32, 199   -- LuaJIT's limits on captures and on the depth of a match

-- A repeat (* + - ?) is open if the characters that it takes can also match what follows it. Then a
-- match that fails tries every way to divide these characters between the two. The number of ways
-- grows by a factor for each open repeat. For ?, the factor is 2. For * + -, it is the length of
-- the name or, if a fixed character follows the repeat, how often the name has this character.
-- OPTION, ANY and FIXED are logarithms to base 2 of these factors, for a name of 128 characters
-- that has each character 8 times. A character that follows several repeats counts as AGAIN after
-- its first, because a name can consist of this character. A match of a pattern whose logarithms
-- add up to MOST takes milliseconds on such a name, and up to a second on a name of 60 characters.
local OPTION, FIXED, AGAIN, ANY, MOST = 1, 3, 4, 7, 20

-- Returns whether some character matches both items of a pattern.
local function overlap(a, b)
  for byte = 0, 255 do
    local c = string.char(byte)
    if c:find(a.one) and c:find(b.one) then return true end
  end
  return false
end

-- Returns whether a match may take too long. items: the pattern's items in order. An item has the
-- fields `one`, a pattern of one character; `times`, its repeat or ""; and `fixed`, true for one
-- fixed character without a repeat.
local function is_slow(items)
  local cost, seen = 0, {}
  for i, item in ipairs(items) do
    for k = i + 1, item.times ~= "" and #items or 0 do
      local next_item = items[k]
      if overlap(item, next_item) then
        local of_fixed = seen[next_item.one] and AGAIN or FIXED
        cost = cost + (item.times == "?" and OPTION or next_item.fixed and of_fixed or ANY)
        seen[next_item.one] = true
        break
      end
      if items[k].times == "" or items[k].times == "+" then break end
    end
  end
  return cost > MOST
end

--- Returns what is wrong with a Lua pattern, or nil. If the result is nil, string.find raises no
--- error for this pattern, whatever text it searches, and takes seconds at most on a usual name.
function M.problem(text)
  text = text:match("^%Z*")                            -- a zero byte ends a pattern
  local open, closed, captures, items = {}, {}, 0, {}  -- closed[n]: capture n has its ")"
  local at = text:sub(1, 1) == "^" and 2 or 1
  while at <= #text do
    local two = text:sub(at, at + 1)
    local first, length, one, times, fixed = two:sub(1, 1), 1, nil, "", false
    if first == "(" then
      captures = captures + 1
      open[#open + 1] = captures
    elseif first == ")" then
      if #open == 0 then return "its ')' has no '('" end
      closed[table.remove(open)] = true
    elseif first == "[" or two == "%f" then
      local from = first == "[" and at or at + 2
      if text:sub(from, from) ~= "[" then return "its %f needs a set in brackets" end
      local last = from + (text:sub(from + 1, from + 1) == "^" and 2 or 1)
      repeat last = last + (text:sub(last, last) == "%" and 2 or 1)  -- a first "]" is a member
      until last > #text or text:sub(last, last) == "]"
      if last > #text then return "its '[' has no ']'" end
      length = last + 1 - at
      one = first == "[" and text:sub(at, last) or nil               -- %f takes no character
    elseif first == "%" then
      length = two == "%b" and 4 or 2
      if at + length - 1 > #text then
        return two == "%b" and "its %b needs two characters" or "it ends with '%'"
      elseif two:find("%d") and not closed[tonumber(two:sub(2))] then
        return ("its %s refers to a capture that is not closed before it"):format(two)
      end
      one, fixed = two, two:find("%W$")
    elseif two ~= "$" then
      one, fixed = first:find("[%w.]") and first or "%" .. first, first ~= "."
    end
    at = at + length
    if one and one:find("^%%[b%d]") then one = "."     -- its match may begin with anything
    elseif one then
      times = text:match("^[*+?-]?", at)
      at = at + #times
    end
    if one then
      items[#items + 1] = { one = one, times = times, fixed = fixed and times == "" }
    end
  end
  if #open > 0 then return "its '(' has no ')'" end
  if captures > CAPTURES then return ("it has more than %d captures"):format(CAPTURES) end
  if select(2, text:gsub("[()*+?-]", "")) > DEEPEST then
    return ("it has more than %d of the characters ( ) * + - ?"):format(DEEPEST)
  end
  if is_slow(items) then
    return "a match could take minutes, because too many of its repeats (* + - ?) can also " ..
      "match what follows them; hint: put fixed text between them, or use classes such as %d"
  end
end

return M
