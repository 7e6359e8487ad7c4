-- The public Lua functions: iterates over the table `engine`, and finds the comment above each
-- function's definition through debug information. Used by index.lua.
local nearest = require "engine.base.nearest"
local source = require "engine.docs.source"
local M_ffi = require "engine.base.ffi"

local M = {}

-- Returns where a function is defined, { path =, line = }; nil for a function outside lua/engine.
local function definition(f)
  local info = debug.getinfo(f, "S")
  local path = info.source:match("^@(.*)$")
  if info.what == "C" or not path or path:sub(1, #M_ffi.home) ~= M_ffi.home then return nil end
  return { path = "lua/engine" .. path:sub(#M_ffi.home + 1), line = info.linedefined }
end

local function comment_above(lines, line, mark)
  local text, first = source.comment(lines, line, "%-%-%-?")
  return lines[first] and lines[first]:find("^%s*" .. mark) and text or ""
end

-- Returns the doc comment of the function `name`. at: where it is defined, a result of
-- definition(); at.line becomes the line below the comment. The comment is above the line that
-- creates the function's class (class("linear")), registers the function (define("cosine", ...)) or
-- exports it (M.backward = backward). Without such a line, the comment is above the definition, or
-- above the loop that defines several functions. If the comment lists functions in two columns,
-- returns the function's row and the paragraph above the list.
local function text_of(at, name)
  local lines, line, options = source.lines(at.path), at.line, nil
  for i, candidate in ipairs(lines) do
    local leads = candidate:find(('^[%%w_ =.]+%%("%s"'):format(name))
      or candidate:find("^[%w_.]+%." .. name .. " = %a")
    if leads and comment_above(lines, i, "%-%-%-") ~= "" then
      line, at.line, options = i, i, candidate:match('"' .. name .. '", (%b{})')
    end
  end
  for above = line - 1, math.max(1, line - 4), -1 do
    if lines[above]:find("^%s*for ") and not lines[line - 1]:find("^%s*%-%-") then line = above end
    if lines[above]:find("^%s*$") or lines[above]:find("^%s*end")
      or lines[above]:find("^%s*%-%-") then
      break
    end
  end
  local text = comment_above(lines, line, "%-%-")
  for _, row in ipairs(source.option_list(text)) do
    for _, own in ipairs(row.names) do
      if own == name then
        return source.shared(row.names) .. row.text .. "\n\n" .. text:gsub("\n  .*$", "")
      end
    end
  end
  return options and text .. "\n\nOptions and defaults: " .. options or text
end

-- Returns the parameters of f as "(a, b, ...)", without the first `skip` ones.
local function parameters(f, skip)
  local info, names = debug.getinfo(f, "u"), {}
  for i = skip + 1, info.nparams do names[#names + 1] = debug.getlocal(f, i) end
  if info.isvararg then names[#names + 1] = "..." end
  return "(" .. table.concat(names, ", ") .. ")"
end

-- Returns the classes of the objects that `functions` create, as a list of { name =, methods = }.
-- Looks for classes among the upvalues of these functions, and of the functions in the same file
-- that they use.
local function classes_of(functions)
  local found, seen = {}, {}
  local function look(f, path, depth)
    if seen[f] or depth > 4 then return end
    seen[f] = true
    local at = definition(f)
    if not at or at.path ~= path then return end
    for i = 1, 250 do
      local name, value = debug.getupvalue(f, i)
      if not name then break end
      if type(value) == "function" then look(value, path, depth + 1)
      elseif type(value) == "table" and type(rawget(value, "__index")) == "table"
        and not seen[value] then
        seen[value] = true
        found[#found + 1] = { name = name:gsub("^%u", string.lower),
          methods = rawget(value, "__index") }
      end
    end
  end
  for _, f in ipairs(functions) do
    local at = definition(f)
    if at then look(f, at.path, 1) end
  end
  return found
end

-- Makes entries from functions. Fields: add(entry); known = { [function] = its entry }. A function
-- with two names, such as engine.matmul and tensor:matmul, has one entry.
local Reader = {}
Reader.__index = Reader

-- Adds an entry for the function f. If f already has an entry, adds the name and its signature to
-- that entry. area: the part of the reference to which it belongs, such as "nn". skip: how many of
-- the first parameters the signature leaves out.
function Reader:enter(name, f, area, skip)
  local at, entry = definition(f), self.known[f]
  if not at then return end
  local signature = name .. parameters(f, skip or 0)
  if entry then
    entry.signature = entry.signature .. "\n" .. signature
    table.insert(entry.names, name)
    return
  end
  local text = text_of(at, name:match("[^.:]+$"))   -- sets at.line to the line below the comment
  self.known[f] = { name = name, names = { name }, kind = "Lua function", area = area,
    signature = signature, text = text, where = ("%s:%d"):format(at.path, at.line) }
  self.add(self.known[f])
end

-- Adds the documented methods of the objects that `functions` create.
function Reader:enter_classes(functions, area)
  for _, class in ipairs(classes_of(functions)) do
    for _, name in ipairs(nearest.keys(class.methods)) do
      local f = rawget(class.methods, name)
      local at = type(f) == "function" and name:sub(1, 1) ~= "_" and definition(f)
      if at and text_of(at, name) ~= "" then self:enter(class.name .. ":" .. name, f, area, 1) end
    end
  end
end

-- Adds the functions and classes of a module. full: its name, such as "engine.nn". Returns its
-- functions.
function Reader:enter_module(full, module, area)
  local functions = {}
  for _, key in ipairs(nearest.keys(module)) do
    local value, name = rawget(module, key), ("%s.%s"):format(full, key)
    if type(value) == "function" and key:sub(1, 1) ~= "_" then
      functions[#functions + 1] = value
      self:enter(name, value, area)
    elseif type(value) == "table" and rawget(value, "_class") then
      local init = rawget(value, "init")
      self:enter(name, init or rawget(value, "forward"), area, init and 1 or math.huge)
    elseif type(value) == "table" and key:find("^%u") then                   -- a class
      for _, method in ipairs(nearest.keys(value)) do
        if type(value[method]) == "function" then
          self:enter(key:lower() .. ":" .. method, value[method], area, 1)
        end
      end
    end
  end
  return functions
end

-- Adds the methods and fields of tensors. Some methods are also functions of `engine`.
function Reader:enter_tensor(engine)
  local tensor = require "engine.tensor.tensor"
  for _, name in ipairs(nearest.keys(tensor.methods)) do
    local method = tensor.methods[name]
    self:enter("tensor:" .. name, method, "tensor", 1)
    if rawget(engine, name) == method then self:enter("engine." .. name, method, "tensor") end
  end
  for _, name in ipairs(nearest.keys(tensor.getters)) do
    local at = definition(tensor.getters[name])
    self.add { name = "tensor." .. name, kind = "field", area = "tensor",
      signature = "tensor." .. name, text = text_of(at, name),
      where = ("%s:%d"):format(at.path, at.line) }
  end
end

-- Adds a part of the engine: a function or a module that engine/init.lua loads when it is first
-- used. file: the module's name for `require`, without "engine.".
function Reader:enter_part(name, part, file)
  local full, functions = "engine." .. name, { part }
  local area = type(part) == "function" and name ~= "trainer" and "engine" or name
  if type(part) == "function" then self:enter(full, part, area)
  else
    functions = self:enter_module(full, part, name)
    local path = "lua/engine/" .. file:gsub("%.", "/")
    path = source.lines(path .. ".lua") and path .. ".lua" or path .. "/init.lua"
    self.add { name = full, kind = "Lua module", area = name, signature = full,
      where = path .. ":1", text = source.header(path, "%-%-%-?") }
  end
  self:enter_classes(functions, area)
end

--- Calls add(entry) for each public function and each module. `engine`: what `require "engine"`
--- returns.
function M.read(engine, add)
  local reader = setmetatable({ add = add, known = {} }, Reader)
  local methods = require("engine.tensor.tensor").methods
  for _, name in ipairs(nearest.keys(engine)) do
    if type(engine[name]) == "function" and not methods[name] then
      reader:enter("engine." .. name, engine[name], "engine")
    end
  end
  reader:enter_tensor(engine)
  local parts = getmetatable(engine).parts
  for _, name in ipairs(nearest.keys(parts)) do
    reader:enter_part(name, engine[name], parts[name]:match "^%S+")
  end
  -- methods that only some models have
  reader:enter("model:generate", require "engine.nn.generate", "nn", 1)
  reader:enter("model:save", require "engine.nn.hf_save", "nn", 1)
end

return M
