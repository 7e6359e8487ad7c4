-- Checks the arguments of tensor functions. A check that fails raises a one-line error. Called by
-- tensor/ and by most functions that take a table of options.
local M_ffi = require "engine.base.ffi"
local nearest = require "engine.base.nearest"
local pattern = require "engine.base.pattern"

local ffi, C, check, expect, raise, value_text = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.expect,
  M_ffi.raise, M_ffi.value_text
local Tensor = M_ffi.Tensor

local M = {}

local info_buffer = ffi.new("eng_tensor_info")

--- Returns whether x is a tensor handle.
function M.is_tensor(x) return ffi.istype(Tensor, x) end
local is_tensor = M.is_tensor

--- Returns the eng_tensor_info of x. The next call of this function overwrites it.
function M.info(x)
  check(C.eng_info(info_buffer, x))
  return info_buffer
end

--- Returns the shape in `what`, an eng_tensor_info, as a table.
function M.shape_table(what)
  local shape = {}
  for d = 0, what.ndim - 1 do shape[d + 1] = tonumber(what.shape[d]) end
  return shape
end

--- Returns the core's number for the dtype `name`. An unknown name raises an error that lists the
--- dtypes. devices: the device names that the caller also accepts, separated by spaces (nil: none);
--- the error lists them too.
function M.dtype_number(name, devices)
  local number = M_ffi.dtype[name]
  if number then return number end
  local names = {}
  for i = 0, C.ENG_DTYPE_COUNT - 1 do names[#names + 1] = M_ffi.dtype_name[i] end
  local listed = table.concat(names, " ")
  for device in (devices or ""):gmatch("%S+") do names[#names + 1] = device end
  raise("there is no dtype%s '%s'%s; dtypes: %s%s", devices and " or device" or "",
    tostring(name), nearest.hint(name, names), listed, devices and "; devices: " .. devices or "")
end

--- Returns a shape as text: "[64 x 768]".
function M.shape_text(shape) return "[" .. table.concat(shape, " x ") .. "]" end

--- Raises an error unless x is a tensor. `name`: the operation, for the message.
function M.want(x, name) expect(is_tensor(x), x, "%s: expected a tensor", name) end

--- Raises an error unless f is a function or a table or userdata with __call. For the message:
--- `name`, the function that takes f as an argument; `example`, a correct call of that function.
function M.want_function(f, name, example)
  local meta = type(f) ~= "cdata" and getmetatable(f)
  if type(f) == "function" or type(meta) == "table" and meta.__call then return end
  raise("%s: expected a function, got %s; hint: %s", name, value_text(f), example)
end

--- Returns whether v is a group of ranks that engine.ranks.group() returned, or such a group's
--- `across`.
function M.is_group(v)
  return type(v) == "table" and ffi.istype("eng_comm *", v.comm) and type(v.size) == "number"
end

--- Returns v, or raises an error unless v is a number. For the message: `name`, the function;
--- `what`, a name for the number, such as "eps".
function M.want_number(v, name, what)
  expect(type(v) == "number", v, "%s: expected %s to be a number", name, what)
  return v
end

--- Returns v, or raises an error unless v is a whole number from -2^53 to 2^53, and at least
--- `least` if that is given. name, what: as in want_number.
function M.want_whole(v, name, what, least)
  if type(v) ~= "number" or v % 1 ~= 0 or (least and v < least) then
    expect(false, v, "%s: expected %s to be a whole number%s", name, what,
      least and (" of %d or more"):format(least) or "")
  end
  expect(v <= 2 ^ 53 and v >= -2 ^ 53, v, "%s: expected %s to be from -2^53 to 2^53", name, what)
  return v
end

--- Raises an error unless v is a Lua pattern that pattern.lua accepts: well-formed and not slow.
--- For the message: `name`, the function; `what`, what it expects, such as "a Lua pattern of
--- module paths".
function M.want_pattern(v, name, what)
  expect(type(v) == "string", v, "%s: expected %s", name, what)
  local problem = pattern.problem(v)
  if problem then raise("%s: expected %s, got %s: %s", name, what, value_text(v), problem) end
end

--- Raises an error unless v is a list without holes. For the message: `name`, the function; `what`,
--- the option; `example`, a valid list as text.
function M.want_list(v, name, what, example)
  expect(type(v) == "table", v, "%s: expected %s to be a list, such as %s", name, what, example)
  local count = 0
  for _ in pairs(v) do count = count + 1 end
  for key in pairs(v) do
    if type(key) ~= "number" or key % 1 ~= 0 or key < 1 or key > count then
      local gaps = type(key) == "number" and key % 1 == 0 and key > count
      raise("%s: expected %s to be a list, such as %s, got %s %s", name, what, example,
        gaps and "a list with gaps before item" or "a table with the field", value_text(key))
    end
  end
end

local MOST_IN_BATCH = 2 ^ 28         -- the most elements of a batch

--- Raises an error if a batch of `rows` rows of `width` elements is too large. For the message:
--- `kind`, the loader in engine.data; `unit`, the noun for the elements.
function M.want_batch(kind, rows, width, unit)
  M_ffi.raise_if(rows * width > MOST_IN_BATCH, "data.%s: a batch of %d rows of %d %s is too " ..
    "large; expected at most %d %s", kind, rows, width, unit, MOST_IN_BATCH, unit)
end

--- Returns the arguments of f(1, 2, 3) or of f { 1, 2, 3 } as a list, and their count. Arguments
--- may be nil.
function M.numbers(...)
  local first = ...
  if type(first) == "table" then return first, table.maxn(first) end
  return { ... }, select("#", ...)
end

--- Makes an array on Lua's heap with room for `count` numbers. ctype: its C type, such as
--- "double[?]". `name`: the function, for the message.
function M.host_array(ctype, count, name)
  local good, values = pcall(ffi.new, ctype, math.max(count, 1))
  M_ffi.raise_if(not good, "%s: %.0f elements are more than Lua can hold; hint: use a " ..
    "smaller tensor, such as a slice", name, count)
  return values
end

--- Returns the index of dimension d of x, counted from 0, and the info of x. d counts from 1, or
--- from -1 backward. `name`: the function, for the message about a wrong d.
function M.dimension(x, d, name)
  local what = M.info(x)
  M.want_whole(d, name, "a dimension")
  local k = d < 0 and d + what.ndim or d - 1
  if k < 0 or k >= what.ndim then
    raise("%s: there is no dimension %d in %s; dimensions count from 1, or from -1 backward", name,
      d, M.shape_text(M.shape_table(what)))
  end
  return k, what
end

--- Returns the value list[name]. A constant of the core, which is a cdata, becomes a Lua number. An
--- unknown name raises an error that lists the names. For the message: `where`, the function;
--- `what`, the option.
function M.choose(list, name, where, what)
  if list[name] ~= nil then return tonumber(list[name]) or list[name] end
  local names = nearest.keys(list)
  raise("%s: expected %s %s, got %s%s", where, what,
    (table.concat(names, ", "):gsub(", ([^,]*)$", " or %1")), value_text(name),
    nearest.hint(tostring(name), names))
end

local BLOCKS = { tensor = { 0, 0 }, row = { 1, 0 }, column = { 0, 1 } }

--- Returns the number of rows and the number of columns of a block; 0 stands for all. block:
--- "tensor", "row", "column", a text such as "1x128" or a table such as { 1, 128 }. `where`: the
--- function, for the message.
function M.read_block(block, where)
  if type(block) == "table" and #block == 2 then
    return M.want_whole(block[1], where, "the number of rows in a block", 0),
      M.want_whole(block[2], where, "the number of columns in a block", 0)
  end
  local rows, columns = tostring(block):match("^([1-9]%d*)x([1-9]%d*)$")
  if rows then return tonumber(rows), tonumber(columns) end
  local named = type(block) == "string" and BLOCKS[block]
  expect(named, block,
    "%s: expected block to be 'tensor', 'row', 'column', a size such as '1x128' or " ..
    "{ rows, columns }", where)
  return named[1], named[2]
end

--- Returns a new table with the fields of all given tables. If several tables have the same field,
--- the last table wins.
function M.merged(...)
  local all = {}
  for i = 1, select("#", ...) do
    for key, value in pairs((select(i, ...)) or {}) do all[key] = value end
  end
  return all
end

local sets = setmetatable({}, { __index = function(all, words)
  all[words] = {}
  for word in words:gmatch("%S+") do all[words][word] = true end
  return all[words]
end })

--- Returns the words of a string as a set: "a b" -> { a = true, b = true }. Do not change the set:
--- later calls return the same table.
function M.set_of(words) return sets[words] end

local NO_OPTIONS = {}

--- Raises an error unless every key of a table of options is known. Returns the options ({} for
--- nil). known: a table whose keys are the valid names, or a string of these names. name: the
--- function; the message names it and may refer the user to `engine help NAME`.
function M.read_named(options, name, known)
  if options == nil then return NO_OPTIONS end
  if type(known) == "string" then known = M.set_of(known) end
  expect(type(options) == "table", options, "%s: expected a table of options", name)
  for key in pairs(options) do
    if known[key] == nil then
      raise("%s: unknown option %s%s", name, value_text(key),
        nearest.choices(key, known, "options", "engine help " .. name))
    end
  end
  return options
end

return M
