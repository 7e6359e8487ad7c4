-- The reference in memory: entries { name, names, kind, area, signature, text, example, where }
-- from the readers in this folder, and look-up by name. Used by `engine help NAME`, html.lua and
-- types.lua.
local contract = require "engine.docs.contract"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local source = require "engine.docs.source"

local M = {}

local Index = {}
Index.__index = Index

--- Reads the whole reference. `commands`: the subcommands, a list of { name, doc, help, where }.
function M.new(commands)
  local self = setmetatable({ entries = {}, words = {}, by_name = {} }, Index)
  local trainer
  local function add(entry)
    if entry.name == "engine.trainer" then trainer = entry end
    entry.names = entry.names or { entry.name }
    if entry.documented == nil then entry.documented = entry.text:find("%S") ~= nil end
    self.entries[#self.entries + 1] = entry
  end
  for _, command in ipairs(commands or {}) do
    add { name = command.name, kind = "command", area = "commands",
      signature = "engine " .. command.name,
      text = command.help, doc = command.doc, where = command.where }
  end
  require("engine.docs.functions").read(require "engine", add)
  require("engine.docs.c").read(add)
  contract.read(trainer, add, function(entry)
    entry.names = { entry.name }
    self.words[#self.words + 1] = entry
  end)
  for _, entry in ipairs(self.entries) do
    for _, name in ipairs(entry.names) do
      self.by_name[name] = self.by_name[name] or {}
      table.insert(self.by_name[name], entry)
    end
  end
  self:read_examples()
  return self
end

-- Reads docs/snippets.md: each block of code is the example for the names above it.
function Index:read_examples()
  local names, block = {}, nil
  for _, line in ipairs(source.lines("docs/snippets.md") or {}) do
    if line == "```lua" then block = {}
    elseif line == "```" and block then
      for _, name in ipairs(names) do
        for _, entry in ipairs(self.by_name[name] or {}) do
          entry.example = table.concat(block, "\n")
        end
      end
      names, block = {}, nil
    elseif block then block[#block + 1] = line
    else
      for name in line:gmatch("`([%w_.:]+)`") do names[#names + 1] = name end
    end
  end
  local shared = {}                            -- functions that one loop defines share an example
  for _, entry in ipairs(self.entries) do
    shared[entry.where] = entry.example or shared[entry.where]
  end
  for _, entry in ipairs(self.entries) do entry.example = entry.example or shared[entry.where] end
end

local function last_part(name) return name:match("([^.:]+)$") or name end

-- Returns a name in lower case, with '-' for each space and '_'.
local function plain(name) return (name:lower():gsub("[ _]", "-")) end

-- Returns two lists: the entries whose full name is `name`, and the entries whose name ends in
-- `name`. If no full name is `name`, the first list has the entries whose name ends in `name`, and
-- the second list is empty.
local function search(list, name)
  local full, parts = {}, {}
  for _, form in ipairs { tostring, plain } do         -- first exact names, then plain names
    local asked = form((name:gsub("%(.*$", "")))
    for _, entry in ipairs(list) do
      local is_full, is_part
      for _, own in ipairs(entry.names) do
        local same = form(own)
        is_full = is_full or same == asked or same:gsub(":", ".") == asked
          or same == "engine." .. asked
        is_part = is_part or last_part(same) == asked
      end
      if is_full then full[#full + 1] = entry elseif is_part then parts[#parts + 1] = entry end
    end
    if #full + #parts > 0 then break end
  end
  if #full > 0 then return full, parts end
  return parts, {}
end

-- Returns the entries that VARIABLE:METHOD may mean: h:plot may mean history:plot. If the
-- variable's name is the beginning of a class's name, returns only the methods of that class.
local function methods(list, name)
  local variable, method = name:match("^(%a[%w_]*):([%w_]+)")
  local near, all = {}, {}
  for _, entry in ipairs(method and list or {}) do
    local class, own = entry.name:match("^(.*):(.*)$")
    if own == method then
      local into = class:sub(1, #variable) == variable and near or all
      into[#into + 1] = entry
    end
  end
  return #near > 0 and near or all
end

-- Returns the commands whose help explains a method, such as run:pause (engine attach).
local function explaining(list, name)
  local found, method = {}, name:match("^%l+:%l+")
  for _, entry in ipairs(method and list or {}) do
    if entry.kind == "command" and entry.text:find(method .. "(", 1, true) then
      found[#found + 1] = entry
    end
  end
  return found
end

--- Returns the two lists of search() for `name`, so that `gelu` finds tensor:gelu. If they are
--- empty and `name` is VARIABLE:METHOD, returns the methods of this name, or the commands that
--- explain it. Adds the entries of self.words whose full name is `name`, such as the precision
--- fp8_delayed to the policy fp8_delayed. If nothing else is found, returns the result of search()
--- in self.words, or a column that only some runs have, such as signals.NAME.
function Index:find(name)
  local found, others = search(self.entries, name)
  if #found == 0 then found = methods(self.entries, name) end
  if #found == 0 then found = explaining(self.entries, name) end
  local words, parts = search(self.words, name)
  if #found + #words == 0 then
    local good, column = pcall(contract.column, name)
    return { good and column or nil }, {}
  end
  if #found == 0 then return words, parts end
  for _, word in ipairs(words) do
    if plain(word.name) == plain(name) then found[#found + 1] = word end
  end
  return found, others
end

--- Returns the entries whose text contains the word `name`, guides last. Leaves out the C
--- interface. For a name that has no entry, such as the option end_token, this list says where it
--- is explained. Returns an empty list for a name of fewer than three characters, or with another
--- character than letters, digits, "_", "." and ":".
function Index:mentions(name)
  local list, guides = {}, {}
  local word = "%f[%w_]" .. name:gsub("%W", "%%%0") .. "%f[^%w_]"
  if not name:find("^%w[%w_.:]+%w$") then return list end
  for _, entry in ipairs(self.entries) do
    if entry.area ~= "c" and entry.text:find(word) then
      local into = entry.kind == "guide" and guides or list
      into[#into + 1] = entry
    end
  end
  for _, guide in ipairs(guides) do list[#list + 1] = guide end
  return list
end

--- Returns "; did you mean 'x'?", or "" if no name is near.
function Index:hint(name)
  local names = {}
  for _, list in ipairs { self.entries, self.words } do
    for _, entry in ipairs(list) do
      for _, own in ipairs(entry.names) do
        for _, form in ipairs { own, (own:gsub("^engine%.", "")), last_part(own) } do
          names[#names + 1] = form
        end
      end
    end
  end
  return nearest.hint(name, names, true)
end

--- Returns an entry as text for the terminal.
function M.text(entry)
  local lines = { ("%s  (%s)"):format(entry.signature, entry.kind), "" }
  if entry.kind == "command" or entry.kind == "guide" then lines = {} end
  lines[#lines + 1] = (entry.text:gsub("%s+$", ""))
  if entry.kind ~= "guide" then lines[#lines] = show.wrap((lines[#lines]:gsub("%*%*", "")), 100) end
  if entry.example then
    lines[#lines + 1] = "\nExample:"
    lines[#lines + 1] = "  " .. entry.example:gsub("\n", "\n  ")
  end
  if entry.kind ~= "command" and entry.kind ~= "guide" then
    lines[#lines + 1] = "\n" .. entry.where
  end
  return table.concat(lines, "\n")
end

--- Returns the entries without documentation.
function Index:gaps()
  local gaps = {}
  for _, entry in ipairs(self.entries) do
    if not entry.documented then gaps[#gaps + 1] = entry end
  end
  return gaps
end

return M
