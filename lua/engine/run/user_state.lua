-- Saves and restores trainer.state, the user's own table, which is part of every checkpoint. pack()
-- splits the table into plain data, for state.json, and tensors. restore() puts both back into the
-- same table. The script's references to inner tables, and to tensors of unchanged dtype and shape,
-- therefore stay valid. With several ranks, rank 0's table is written and every rank gets it.
-- Called by run.lua, restore.lua and assemble.lua.
local M_ffi = require "engine.base.ffi"
local json = require "engine.base.json"
local merged = require("engine.base.arguments").merged
local show = require "engine.base.show"
local tensor = require "engine.tensor.tensor"

local fail, fail_if = M_ffi.fail, M_ffi.fail_if
local M = {}

local KEYS = { number = true, string = true, boolean = true }

-- Returns the keys of a table in a fixed order. Raises an error for keys that JSON cannot hold.
local function sorted_keys(t, path)
  for key in pairs(t) do
    fail_if(not KEYS[type(key)] or key ~= key,
      "%s: expected keys to be numbers, strings or booleans, got %s", path, M_ffi.value_text(key))
  end
  return (json.sorted_keys(t))
end

local function what_of(value)
  if type(value) ~= "table" then return M_ffi.value_text(value) end
  return rawget(value, "_order") and "a module" or "an object with a metatable"
end

-- Returns a copy of t without its tensors, and adds the tensors to `found`. path: the name of t in
-- messages; trail: the list of keys that lead to t; above: the tables that contain t, as a set.
local function split(t, path, trail, above, found)
  if above[t] then error(path .. ": the table contains itself", 0) end
  above[t] = true
  local plain = {}
  for _, key in ipairs(sorted_keys(t, path)) do
    local value, at = t[key], path .. "." .. tostring(key)
    local inside = { unpack(trail) }
    inside[#inside + 1] = key
    if tensor.is_tensor(value) then
      local good, shape = pcall(function() return value.shape end)
      if not good then fail("%s: %s", at, M_ffi.without_line(shape)) end
      found[#found + 1] = { path = inside, x = value, shape = shape, dtype = value.dtype }
    elseif type(value) == "table" and getmetatable(value) == nil then
      plain[key] = split(value, at, inside, above, found)
    elseif type(value) == "table" or not pcall(json.encode, value) then
      fail("%s: expected a number, string, boolean, tensor or table of these, got %s", at,
        what_of(value))
    else plain[key] = value end
  end
  above[t] = nil
  return plain
end

--- Returns what a checkpoint holds of trainer.state: plain data for state.json, and a table { name
--- = tensor }. Raises an error of one line for a value that cannot be written.
function M.pack(state)
  if type(state) ~= "table" or getmetatable(state) ~= nil then
    fail("trainer.state: expected a plain table, got %s", what_of(state))
  end
  local found, tensors = {}, {}
  local saved = { data = split(state, "trainer.state", {}, {}, found), tensors = found }
  for _, item in ipairs(found) do
    local parts = {}
    for i, key in ipairs(item.path) do parts[i] = tostring(key) end
    local name, n = table.concat(parts, "."), 1
    while tensors[name] do      -- the keys 1 and "1" give the same name
      n = n + 1
      name = ("%s#%d"):format(table.concat(parts, "."), n)
    end
    tensors[name], item.name, item.x = item.x, name, nil
  end
  return saved, tensors
end

-- Makes the data of t equal to `source`, whose tensors it moves or frees. A table that both have
-- stays the same object in t, and so does a tensor if its dtype and shape are the same.
local function fill(t, source)
  for key in pairs(t) do
    if source[key] == nil then t[key] = nil end
  end
  for key, value in pairs(source) do
    local old = t[key]
    local is_tensor = tensor.is_tensor(value)
    if not is_tensor and type(value) == "table" and type(old) == "table" then fill(old, value)
    elseif is_tensor and tensor.is_tensor(old) and pcall(function()
      assert(old.dtype == value.dtype
        and tensor.shape_text(old.shape) == tensor.shape_text(value.shape))
      old:copy(value)
    end) then value:free()
    else t[key] = value end
  end
end

-- Returns the table that holds the last key of a tensor's path, or nil if the path leads elsewhere.
local function holder(data, path)
  for i = 1, #path - 1 do
    data = data[path[i]]
    if type(data) ~= "table" then return nil end
  end
  return #path > 0 and data or nil
end

--- Returns why a checkpoint's part `saved`, whose fields have the right types, cannot be restored,
--- as text, or nil. tensors: { [name] = { dtype =, shape = } } in the checkpoint's files.
function M.problem(saved, tensors)
  local function text(x) return x.dtype .. " " .. tensor.shape_text(x.shape) end
  local left = merged(tensors)
  for i, item in ipairs(saved.tensors) do
    local at, found, place = ("state.user.tensors[%d]"):format(i), left[item.name],
      holder(saved.data, item.path)
    if not found or text(found) ~= text(item) then
      return ("%s: expected the name, dtype and shape of a tensor in the files, got '%s', %s")
        :format(at, show.cut(show.shown(item.name), 80), text(item))
    elseif not place or place[item.path[#item.path]] ~= nil then
      return ("%s.path: expected keys that lead to an unused place in state.user.data, got %s")
        :format(at, show.cut(show.shown(json.encode(item.path)), 80))
    end
    left[item.name] = nil
  end
  local name = next(left)
  return name and ("state.user.tensors: expected an entry for the tensor '%s', got none"):format(
    show.cut(show.shown(name), 80))
end

--- Restores what pack() returned into the table `state`. read(item) returns a kept tensor for an
--- item { name, shape, dtype }. A checkpoint of a script without a state leaves `state` as it is.
function M.restore(state, saved, read)
  local data = saved.data
  if next(data) == nil and #saved.tensors == 0 then return end
  for _, item in ipairs(saved.tensors) do
    holder(data, item.path)[item.path[#item.path]] = read(item)
  end
  fill(state, data)
end

return M
