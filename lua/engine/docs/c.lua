-- The C interface and the operations: reads the contracts above the declarations in core/engine*.h
-- and the table core/ops.def. Used by index.lua.
local source = require "engine.docs.source"

local M = {}

local HEADERS = { "core/engine.h", "core/engine_ranks.h", "core/engine_files.h" }

-- A comment holds for the declarations below it up to an empty line.
local function header(path, add)
  local lines = source.lines(path)
  local text, declaration, started, below = "", nil, nil, false
  for i, line in ipairs(lines) do
    if declaration then
      declaration = declaration .. "\n" .. line
    elseif line:find("^///") then
      if below then text = "" end
      text, below = text .. line:gsub("^/// ?", "") .. "\n", false
    elseif line:find("^%s*$") then
      text = ""
    elseif line:find("^[%a]") and not line:find("^extern") then
      declaration, started, below = line, i, true
    end
    local _, opened = (declaration or ""):gsub("{", "")
    local _, closed = (declaration or ""):gsub("}", "")
    if declaration and opened == closed and (declaration:gsub("%s*//[^\n]*", "")):find(";%s*$") then
      local code = declaration:gsub("%s*//[^\n]*", "")
      local name = code:match("^typedef struct ([%w_]+)") or code:match("^typedef enum ([%w_]+)")
        or code:match("([%w_]+)%s*%(")
      local kind = code:find("^typedef") and "C type" or code:find("^enum") and "C constants" or "C function"
      if kind == "C constants" then name = code:match("([%u%d_]+)") end
      if name then
        add { name = name, kind = kind, area = "c", signature = declaration, text = text,
          where = ("%s:%d"):format(path, started) }
      end
      declaration = nil
    end
  end
end

-- The facts of an operation under the column names that the table's first line gives. Its text is
-- the comment above its group and the comment beside it.
local function operations(add)
  local path = "core/ops.def"
  local lines, columns = source.lines(path), nil
  local text, below = "", false
  for i, line in ipairs(lines) do
    local name, rest = line:match("^ENG_OP%(%s*([%w_]+)%s*,%s*(.*)$")
    if line:find("^//") then
      if below then text = "" end
      text, below = text .. line:gsub("^// ?", "") .. "\n", false
      columns = columns or line:match("ENG_OP%(name, ([^)]*)%)")
      if line:find("ENG_OP%(name") then text = "" end
    elseif line:find("^%s*$") then
      text = ""
    elseif name then
      below = true
      local j = i
      while not rest:find("%)%s*$") and not rest:find("%)%s*//") and lines[j + 1] do
        j = j + 1
        rest = rest .. " " .. lines[j]:match("^%s*(.-)%s*$")
      end
      local values, beside = rest:match("^(.-)%)%s*//%s*(.*)$")
      values = values or rest:match("^(.-)%)%s*$") or rest
      local facts, names = {}, {}
      for column in (columns or ""):gmatch("[%w_]+") do names[#names + 1] = column end
      for value in (values .. ","):gmatch("%s*(.-)%s*,") do
        facts[#facts + 1] = ("%s %s"):format(names[#facts + 1] or "", value)
      end
      add { name = "op." .. name, kind = "operation", area = "operations",
        signature = ("%s: %s"):format(name, table.concat(facts, ", ")),
        text = (beside and name .. ": " .. beside .. "\n\n" or "") .. text,
        where = ("%s:%d"):format(path, i) }
    end
  end
end

--- Adds an entry for each declaration and each operation.
function M.read(add)
  for _, path in ipairs(HEADERS) do header(path, add) end
  operations(add)
end

return M
