-- The C interface and the operations: reads the comments above the declarations in core/engine*.h,
-- and the table core/ops.def. Used by index.lua.
local source = require "engine.docs.source"

local M = {}

local HEADERS = { "core/engine.h", "core/engine_fp8.h", "core/engine_policy.h",
  "core/engine_ranks.h", "core/engine_files.h", "core/engine_tokenizer.h" }

-- Adds the declarations of a header. A comment applies to the declarations below it, up to an empty
-- line.
local function header(path, add)
  local lines = source.lines(path) or {}
  local text, declaration, started, below = "", nil, nil, false
  for i, line in ipairs(lines) do
    if declaration then declaration = declaration .. "\n" .. line
    elseif line:find("^///") then
      if below then text = "" end
      text, below = text .. line:gsub("^/// ?", "") .. "\n", false
    elseif line:find("^%s*$") then text = ""
    elseif line:find("^[%a]") and not line:find("^extern") then
      declaration, started, below = line, i, true
    end
    local _, opened = (declaration or ""):gsub("{", "")
    local _, closed = (declaration or ""):gsub("}", "")
    if declaration and opened == closed and (declaration:gsub("%s*//[^\n]*", "")):find(";%s*$") then
      local code = declaration:gsub("%s*//[^\n]*", "")
      local name = code:match("^typedef struct ([%w_]+)") or code:match("^typedef enum ([%w_]+)")
        or code:match("([%w_]+)%s*%(")
      local kind = code:find("^typedef") and "C type" or code:find("^enum") and "C constants"
        or "C function"
      if kind == "C constants" then name = code:match("([%u%d_]+)") end
      if name then
        add { name = name, kind = kind, area = "c", signature = declaration, text = text,
          where = ("%s:%d"):format(path, started) }
      end
      declaration = nil
    end
  end
end

-- Splits the text of a call's arguments: "2, (a, b), c" -> { "2", "(a, b)", "c" }
local function arguments(text)
  local list, depth, current = {}, 0, ""
  for c in (text .. ","):gmatch(".") do
    depth = depth + (c == "(" and 1 or c == ")" and -1 or 0)
    if c == "," and depth == 0 then list[#list + 1], current = current:match("^%s*(.-)%s*$"), ""
    else current = current .. c end
  end
  return list
end

-- Returns two values: the macro call that begins in lines[i], joined into one line; and the index
-- of the call's last line.
local function call_at(lines, i)
  local call = lines[i]
  while not call:find("%)%s*$") and not call:find("%)%s*//") and lines[i + 1] do
    i = i + 1
    call = call .. " " .. lines[i]:match("^%s*(.-)%s*$")
  end
  return call, i
end

-- Returns the arguments of a macro call, without the first (the operation's name), as a text such
-- as "inputs 2, layout ANY". Leaves out empty lists, such as (no_ints). columns: the names of these
-- arguments.
local function facts_of(values, columns)
  local facts = {}
  for k = 2, #values do
    if not values[k]:find("^%(no_") then
      facts[#facts + 1] = ("%s %s"):format(columns[k - 1] or "", values[k])
    end
  end
  return table.concat(facts, ", ")
end

-- Adds the operations of core/ops.def. The comment at the top of that file names the arguments of
-- each macro, as in "ENG_OP(name, inputs, ...)". ENG_OP and ENG_UNARY make an entry for an
-- operation; the other macros add facts to this entry. The text of an operation is the comment
-- above its group.
local function operations(add)
  local path = "core/ops.def"
  local lines, columns, made = source.lines(path) or {}, {}, {}
  local text, below, i = "", false, 1
  while i <= #lines do
    local line, first = lines[i], i
    local macro, names = line:match("^// ENG_([%u_]+)%(name,? ?([^)]*)%)")
    if macro then columns[macro] = arguments(names) end
    macro = line:match("^ENG_([%u_]+)%(")
    if line:find("^//") then
      if below then text = "" end
      text, below = text .. line:gsub("^// ?", "") .. "\n", false
    elseif macro then
      line, i = call_at(lines, i)
      local body, beside = line:match("%((.*)%)%s*//%s*(.*)$")
      local values = arguments(body or line:match("%((.*)%)"))
      local name, facts = values[1], facts_of(values, columns[macro] or {})
      below = true
      if macro == "OP" or macro == "UNARY" then
        made[name] = { name = "op." .. name, kind = "operation", area = "operations",
          signature = name .. ": " .. facts,
          text = (beside and name .. ": " .. beside .. "\n\n" or "") .. text,
          where = ("%s:%d"):format(path, first) }
        add(made[name])
      elseif made[name] then
        made[name].signature = ("%s\n  %s %s"):format(made[name].signature,
          macro:lower():gsub("_", " "), facts)
      end
    else
      text = ""
    end
    i = i + 1
  end
end

--- Calls add(entry) for each declaration and each operation.
function M.read(add)
  for _, path in ipairs(HEADERS) do header(path, add) end
  operations(add)
end

return M
