-- Checks the specification of an optimizer written in Lua (engine.optim.register). Called by
-- optim.lua; lua_state.lua runs the specification's update.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local nearest = require "engine.base.nearest"

local expect, raise, raise_if = M_ffi.expect, M_ffi.raise, M_ffi.raise_if
local set_of = arguments.set_of

local M = {}

local FIELDS = { doc = "string", defaults = "table", buffers = "table", update = "function",
  check = "function" }
-- TAKEN: names that a hyperparameter cannot have, because they are options of every optimizer,
-- fields of a group, or the context's field `t`. OF_PARAMETER: names that a buffer cannot have,
-- because they are fields of every parameter.
local TAKEN = set_of "betas groups decay precision moments match label lr_mul t"
local OF_PARAMETER = set_of "name role weight grad"

local DTYPES = set_of "f32 bf16 e4m3 e5m2"

local NAME = "; expected letters, digits and _, with no digit first"
local function is_name(x) return type(x) == "string" and x:find("^[%a_][%w_]*$") ~= nil end

local function check_defaults(name, defaults)
  expect(type(defaults.lr) == "number", defaults.lr,
    "optim.register: expected lr in the defaults of '%s' to be a number", name)
  for key, value in pairs(defaults) do
    local kind = type(value)
    if not is_name(key) or TAKEN[key] then
      raise("optim.register: '%s' cannot be the name of a hyperparameter of '%s'%s", tostring(key),
        name, TAKEN[key] and "; reserved names: " .. table.concat(nearest.keys(TAKEN), " ") or NAME)
    elseif kind ~= "number" and kind ~= "boolean" and kind ~= "string" then
      raise("optim.register: expected %s of '%s' to be a number, boolean or string, got %s", key,
        name, M_ffi.value_text(value))
    end
  end
end

-- Returns the buffers as a list of { name =, shape = a function or nil, dtype = a name or nil },
-- ordered by name.
local function buffers_in_order(name, given)
  local list, seen = {}, {}
  for key, value in pairs(given) do
    local plain = type(key) == "number"
    local buffer, shape = plain and value or key, not plain and value or nil
    if not is_name(buffer) or OF_PARAMETER[buffer] or seen[buffer] then
      raise("optim.register: %s cannot be the name of a buffer of '%s'%s",
        M_ffi.value_text(buffer), name, seen[buffer] and ": it is listed twice"
        or OF_PARAMETER[buffer] and ": every parameter has a field of that name" or NAME)
    end
    local given_shape, dtype = shape, nil
    if type(shape) == "table" then shape, dtype = shape.shape, shape.dtype end
    expect(plain or type(shape) == "function", given_shape,
      "optim.register: expected buffer '%s' of '%s' to be a function(shape) that returns the " ..
      "buffer's shape, or { shape = such a function, dtype = }", buffer, name)
    expect(dtype == nil or DTYPES[dtype], dtype, "optim.register: expected the dtype of buffer " ..
      "'%s' of '%s' to be bf16, e4m3, e5m2 or f32", buffer, name)
    seen[buffer] = true
    list[#list + 1] = { name = buffer, shape = shape, dtype = dtype }
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

--- Returns a checked copy of the specification `given`: { name, doc, defaults, buffers = { { name,
--- shape, dtype } ... }, update, check }.
function M.read(name, given)
  expect(is_name(name), name, "optim.register: expected a name of letters, digits and _, with " ..
    "no digit first")
  expect(type(given) == "table", given, "optim.register: expected a table for '%s'", name)
  for key in pairs(given) do
    if not FIELDS[key] then
      raise("optim.register: unknown field '%s' of '%s'%s", tostring(key), name,
        nearest.choices(tostring(key), FIELDS, "fields"))
    end
  end
  for field, kind in pairs(FIELDS) do
    local optional = field == "doc" or field == "buffers" or field == "check"
    expect(type(given[field]) == kind or optional and given[field] == nil, given[field],
      "optim.register: expected %s of '%s' to be a %s", field, name, kind)
  end
  check_defaults(name, given.defaults)
  return { name = name, doc = given.doc, defaults = arguments.merged(given.defaults),
    update = given.update, check = given.check,
    buffers = buffers_in_order(name, given.buffers or {}) }
end

--- Raises an error unless the values of an optimizer's hyperparameters have their defaults' types,
--- numbers are finite, and the values satisfy the specification's own check. `where` begins the
--- message.
function M.check_values(spec, values, where)
  for key, default in pairs(spec.defaults) do
    local value = values[key]
    local good = type(value) == type(default)
    if good and type(value) == "number" then good = value - value == 0 end
    raise_if(not good, "%s: expected %s to be a %s, got %s", where, key,
      type(default) == "number" and "finite number" or type(default), M_ffi.value_text(value))
  end
  local problem = spec.check and spec.check(values)
  if problem then raise("%s: %s", where, tostring(problem)) end
end

return M
