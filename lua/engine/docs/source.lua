-- Reads the sources of the reference: files of the tree by name, the comment above a line, the
-- tables of a Markdown page. Owns the texts of files that it has read. Used by the files of this
-- folder, and by cli/help.lua and cli/environment.lua.
local M_ffi = require "engine.base.ffi"
local file = require "engine.base.file"

local M = {}

--- Returns where a file or folder is, in the source tree or in an installation. name: its name in
--- the tree, such as "core/ops.def". Returns nil if it does not exist; for a name below
--- lua/engine/, does not check whether it exists.
function M.path(name)
  local module = name:match("^lua/engine/(.*)$")
  if module then return M_ffi.home .. "/" .. module end
  for _, share in ipairs(M_ffi.shares) do
    local path = share .. "/" .. name
    if file.exists(path) then return path end
  end
end

local files = {}

--- Returns the lines of a file of the tree, or nil if it cannot be read. path: as in M.path.
function M.lines(path)
  if files[path] == nil then
    local handle = io.open(M.path(path) or "", "rb")
    local list = handle and {} or false
    if handle then
      for line in handle:lines() do list[#list + 1] = (line:gsub("\r$", "")) end
      handle:close()
    end
    files[path] = list
  end
  return files[path] or nil
end

--- Returns the whole text of a file of the tree, or nil.
function M.text(path)
  local lines = M.lines(path)
  return lines and table.concat(lines, "\n") .. "\n"
end

--- Returns the sorted paths of the files in a folder whose names end in `ending`.
function M.list(folder, ending)
  local paths = {}
  for _, name in ipairs(file.names(M.path(folder) or "") or {}) do
    if name:sub(-#ending) == ending then paths[#paths + 1] = folder .. "/" .. name end
  end
  return paths
end

--- Returns the comment that ends in the line above lines[at], without its marks, and the index of
--- its first line. Returns "" and `at` if the line above is not a comment. mark: the pattern of the
--- marks, "///?" for C, "%-%-%-?" for Lua.
function M.comment(lines, at, mark)
  local first = at
  while first > 1 and lines[first - 1]:find("^%s*" .. mark) do first = first - 1 end
  local text = {}
  for i = first, at - 1 do text[#text + 1] = (lines[i]:gsub("^%s*" .. mark .. " ?", "")) end
  return table.concat(text, "\n"), first
end

--- Returns the comment at the head of a file, "" if it has none. mark: as in M.comment.
function M.header(path, mark)
  local lines, last = M.lines(path) or {}, 1
  while lines[last] and lines[last]:find("^" .. mark) do last = last + 1 end
  return (M.comment(lines, last, mark))
end

--- Returns the rows of the tables below the heading `heading` ("## The record"), each as a list of
--- cells.
function M.table_rows(path, heading)
  local rows, inside = {}, false
  local level = #heading:match("^#+")
  for number, line in ipairs(M.lines(path) or {}) do
    local marks = line:match("^(#+) ")
    if marks and #marks <= level then inside = line == heading end
    if inside and line:find("^|") and not line:find("^|%s*%-") then
      local cells = { line = number }
      for cell in line:gsub("\\|", "\1"):sub(2):gmatch("([^|]*)|") do
        cells[#cells + 1] = (cell:gsub("\1", "|"):match("^%s*(.-)%s*$"))
      end
      rows[#rows + 1] = cells
    end
  end
  table.remove(rows, 1)                                 -- the table's header row
  return rows
end

--- Returns the prefix "`a`, `b`: " for a text that several names share; "" for a single name.
function M.shared(names) return #names > 1 and "`" .. table.concat(names, "`, `") .. "`: " or "" end

--- Returns two values: the options that a doc comment lists in two columns, as a list of { names =,
--- text = }; and the paragraphs between and below these options, as a list of texts.
function M.option_list(text)
  local list, paragraphs, column = {}, {}, nil
  for line in (text .. "\n"):gmatch("(.-)\n") do
    local indent, names, gap, rest = line:match("^(  +)([%l_][%w_, ]-)(  +)(%S.*)$")
    local at = names and #indent + #names + #gap
    if names and not names:find("[^,] ") then
      list[#list + 1], column = { names = {}, text = rest }, at
      for name in names:gmatch("[%w_]+") do table.insert(list[#list].names, name) end
    elseif column and line:find("^" .. (" "):rep(column) .. "%S") then
      list[#list].text = list[#list].text .. " " .. line:sub(column + 1)
    else
      local words = #list > 0 and line:match("%S.*")
      local again = words and not column and table.remove(paragraphs)   -- the paragraph goes on
      if words then paragraphs[#paragraphs + 1] = (again and again .. " " or "") .. words end
      column = nil
    end
  end
  return list, paragraphs
end

--- Splits a text into a list of { kind =, lines = }. The kinds are "text", the lines of one
--- paragraph, and "code", indented lines, which keep their indentation.
function M.blocks(text)
  local blocks, last = {}, nil
  for line in (text .. "\n"):gmatch("(.-)\n") do
    local kind = line:find("^%s*$") and "gap" or line:find("^  ") and "code" or "text"
    if kind ~= "gap" and (kind ~= last or (kind == "text" and line:find("^[-*] "))) then
      blocks[#blocks + 1] = { kind = kind, lines = {} }
    end
    if kind ~= "gap" then table.insert(blocks[#blocks].lines, line)
    elseif last == "code" then table.insert(blocks[#blocks].lines, "") end
    if kind ~= "gap" or last ~= "code" then last = kind end
  end
  return blocks
end

--- Returns the first sentence of `text` in one line, cut after about 160 bytes.
function M.summary(text)
  local first = M.blocks(text)[1]
  local line = first and table.concat(first.lines, " "):gsub("%s+", " ") or ""
  local sentence = line:match("^(.-[^.]%.)%s") or line
  return #sentence > 160 and sentence:sub(1, 160):gsub("%s+%S*$", " ...") or sentence
end

return M
