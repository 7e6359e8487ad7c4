-- A script's settings: every field of a table of defaults can be given on the command line.
--
--   local cfg = engine.config(
--     { lr = 3e-4, steps = 1000, model = { width = 384 }, precision = "fp16" },
--     { lr = "peak learning rate", ["model.width"] = "features per token",
--       steps = "number of steps",
--       precision = { "recipe", choices = { "fp32", "bf16", "fp16" } } },
--     { count = "steps model.width", positive = "lr" })
--
--   engine train.lua lr=1e-3 steps=2^12 model.width=512   sets fields; a dot leads into a table
--   engine train.lua config=small.lua lr=1e-3             reads a file; the later lr wins
--   engine train.lua help                                 prints each field, its default and text
--
-- Every script also takes device=NAME, on the command line or in a config file, unless it declares
-- a field `device` itself. A field has the type of its default: number (an expression like 3e-4 or
-- 2^15), boolean (true or false), string, or list (a,b,c). config.optional "number" declares a
-- field without a default. A field whose text in the second argument is { "...", hidden = true } is
-- in no list of fields, neither in the help nor in messages. Fields that hold functions or other
-- values cannot be set. A config file is a Lua file that returns a table, or a JSON object.
--
-- The third argument gives ranges to fields. A value out of range is an error before the script
-- computes anything:
--   count       a whole number of 1 or more         natural       a whole number of 0 or more
--   positive    above 0 and finite                  not_negative  0 or more and finite
--   share       from 0 to 1                         part          above 0, up to 1
--   file        an existing file                    output        a file in an existing folder
--   folder      an existing or a new folder         policy        a policy that loads
--   pattern     a well-formed Lua pattern that is not slow
-- A default may be out of range as long as the user does not give the field. A list field with
-- choices takes one or more of the choices. Called by scripts, cli/, run/, dist/identity.lua and
-- policy/policy.lua.
local expression = require "engine.base.expression"
local files = require "engine.base.file"
local machine = require "engine.base.machine"
local nearest = require "engine.base.nearest"
local pattern = require "engine.base.pattern"
local show = require "engine.base.show"

local config = {}

-- The metatable of errors that a user's mistake causes. The engine binary shows them without a
-- traceback.
local usage_error = { __tostring = function(e) return e.message end }
usage_error.__index = usage_error
usage_error.traceback = false

local optional = {}          -- marks a field without a default

--- Declares a field that is nil unless the user gives it: config.optional "number", "boolean",
--- "string" or "list".
function config.optional(type_name)
  assert(({ number = 1, boolean = 1, string = 1, list = 1 })[type_name],
    "config.optional: expected \"number\", \"boolean\", \"string\" or \"list\", got " ..
    tostring(type_name))
  return setmetatable({ type = type_name }, optional)
end

local function fail(format, ...)
  local parts = { ... }
  for i, part in ipairs(parts) do              -- keeps the message on one line
    parts[i] = type(part) == "string" and show.shown(part) or part
  end
  error(setmetatable({ message = "config: " .. format:format(unpack(parts)) }, usage_error), 0)
end
local function fail_if(bad, ...) if bad then fail(...) end end

--- Ends the script with an error message and no traceback. Takes a format and its values. Scripts
--- call this function when they check their own settings.
config.fail = fail

-- Returns the kind of a default: number, boolean, string, list, table (nested fields), or nil for a
-- value that cannot be set.
local function kind_of(default)
  local t = type(default)
  if t == "number" or t == "boolean" or t == "string" then return t end
  if t ~= "table" then return nil end
  if getmetatable(default) == optional then return default.type end
  if getmetatable(default) ~= nil then return nil end
  return (#default > 0 or next(default) == nil) and "list" or "table"
end

-- Adds the fields of `defaults` to `fields`, under dotted names. An entry of `fields` is
-- { kind =, default =, element = the kind of a list's elements }.
local function collect(defaults, prefix, fields)
  for key, default in pairs(defaults) do
    local kind = kind_of(default)
    if type(key) == "string" and kind then
      local name = prefix .. key
      if kind == "table" then collect(default, name .. ".", fields)
      else
        local has_default = getmetatable(default) ~= optional
        local numbers = kind == "list" and has_default and type(default[1]) == "number"
        fields[name] = { kind = kind, element = numbers and "number" or "string" }
        if has_default then fields[name].default = default end
      end
    end
  end
  return fields
end

local function names_of(fields)
  local names = nearest.keys(fields)
  table.sort(names, function(a, b)        -- plain fields before nested ones
    local a_nested, b_nested = a:find(".", 1, true) ~= nil, b:find(".", 1, true) ~= nil
    if a_nested ~= b_nested then return b_nested end
    return a < b
  end)
  return names
end

-- Returns the names of the fields that are not hidden, for the help and for messages.
local function shown(fields, docs)
  local names = {}
  for _, name in ipairs(names_of(fields)) do
    local doc = docs[name]
    if type(doc) ~= "table" or not doc.hidden then names[#names + 1] = name end
  end
  return names
end

-- Returns a value in quotes for a message, cut to 200 characters.
local function quoted(value) return "'" .. show.cut(tostring(value), 200) .. "'" end

local function unknown(name, fields, rules, where)
  fail("%sno field %s%s", where, quoted(name), nearest.choices(name, shown(fields, rules.docs),
    "fields", ("engine %s help"):format(rules.script or (rawget(_G, "arg") or {})[0] or "SCRIPT")))
end

local function copy(value)
  if type(value) ~= "table" or getmetatable(value) ~= nil then return value end
  local result = {}
  for k, v in pairs(value) do
    if not (type(v) == "table" and getmetatable(v) == optional) then result[k] = copy(v) end
  end
  return result
end

local function assign(result, name, value)
  local at = result
  for part in name:gmatch("([^.]+)%.") do
    at[part] = at[part] or {}
    at = at[part]
  end
  at[name:match("[^.]+$")] = value
end

local booleans = { ["true"] = true, yes = true, on = true, ["1"] = true, ["false"] = false,
  no = false, off = false, ["0"] = false }

local function value_text(value)
  if type(value) == "number" then return show.exact(value) end
  if type(value) ~= "table" then return tostring(value) end
  local parts = {}
  for i, v in ipairs(value) do parts[i] = value_text(v) end
  return table.concat(parts, ",")
end

local function to_number(name, text)
  local value, why = expression(text)
  fail_if(not value, "%s: expected a number (or an expression like 3e-4 or 2^15), got %s (%s)",
    name, quoted(text), why)
  if value ~= value then fail("%s: expected a number, got %s, which is NaN", name, quoted(text)) end
  return value
end

-- Converts the text of a field on the command line to the field's value.
local function from_text(name, field, text)
  if field.kind == "number" then return to_number(name, text) end
  if field.kind == "boolean" then
    local value = booleans[text:lower()]
    if value == nil then fail("%s: expected true or false, got %s", name, quoted(text)) end
    return value
  end
  if field.kind == "string" then return text end
  local list = {}
  for item in (text == "" and "" or text .. ","):gmatch("(.-),") do
    list[#list + 1] = field.element == "number" and to_number(name, item) or item
  end
  return list
end

-- Raises an error unless `value`, a field's value in a config file, has the type of the field.
-- Returns the value; for a list, a copy.
local function from_file(name, field, value, where)
  local got, list = type(value), field.kind == "list"
  if got ~= (list and "table" or field.kind) then
    fail("%s%s: expected a %s, got %s", where, name, field.kind, (got == "table"
      or got == "function") and "a " .. got or "the " .. got .. " " .. quoted(value_text(value)))
  end
  if value ~= value then fail("%s%s: expected a number, got NaN", where, name) end
  if not list then return value end
  for key in pairs(value) do
    fail_if(type(key) ~= "number" or key % 1 ~= 0 or key < 1 or key > #value,
      "%s%s: expected a list without gaps, got a table with the field %s", where, name,
      quoted(tostring(key)))
  end
  for i, item in ipairs(value) do
    fail_if(type(item) ~= field.element, "%s%s: expected a list of %ss, but item %d is a %s", where,
      name, field.element, i, type(item))
    fail_if(item ~= item, "%s%s: expected a list of numbers, but item %d is NaN", where, name, i)
  end
  return copy(value)
end

local function finite(x) return x > -math.huge and x < math.huge end
local function whole(x) return x % 1 == 0 and x < 2 ^ 53 end

-- Range name -> range. A range of numbers is { description, test function }. A range of strings has
-- a function `problem`, which returns what is wrong with a string, or nil.
local RANGES = {
  count = { "a whole number of 1 or more", function(x) return x >= 1 and whole(x) end },
  natural = { "a whole number of 0 or more", function(x) return x >= 0 and whole(x) end },
  positive = { "a finite number above 0", function(x) return x > 0 and finite(x) end },
  not_negative = { "a finite number of 0 or more", function(x) return x >= 0 and finite(x) end },
  share = { "a number from 0 to 1", function(x) return x >= 0 and x <= 1 end },
  part = { "a number above 0, up to 1", function(x) return x > 0 and x <= 1 end },
  file = { problem = function(name)
    return not files.exists(name) and ("there is no file '%s'"):format(name)
      or files.is_folder(name) and ("expected a file, but '%s' is a folder"):format(name) or nil
  end },
  output = { problem = function(name)
    local folder = name:match("^(.*)/[^/]*$") or "."
    if files.is_folder(name) then
      return ("expected a file to write, but '%s' is a folder"):format(name)
    end
    return not files.is_folder(folder == "" and "/" or folder)
      and ("there is no folder '%s' to write into"):format(folder) or nil
  end },
  folder = { problem = function(name)
    return files.is_file(name) and ("expected a folder, but '%s' is a file"):format(name) or nil
  end },
  pattern = { problem = function(text)
    local problem = pattern.problem(text)
    return problem and ("expected a Lua pattern, got %s: %s"):format(quoted(text), problem)
  end },
}

--- Range name -> range. Other modules add ranges: policy/policy.lua adds `policy`.
config.ranges = RANGES

-- Converts `kinds`, such as { count = "steps width" }, to a table: field name -> range.
local function ranges_of(kinds, fields)
  local ranges = {}
  for kind, names in pairs(kinds or {}) do
    if not RANGES[kind] then
      error(("config: there is no range '%s'%s"):format(tostring(kind),
        nearest.choices(kind, RANGES, "ranges")), 0)
    end
    for name in names:gmatch("%S+") do
      if not fields[name] then
        error(("config: the range %s names the field '%s', which is not in the table of defaults")
          :format(kind, name), 0)
      end
      ranges[name] = RANGES[kind]
    end
  end
  return ranges
end

local function check_choice(name, value, choices)
  for _, choice in ipairs(choices) do
    if choice == value then return end
  end
  fail("%s: expected one of %s, got %s%s", name, table.concat(choices, ", "), quoted(value),
    nearest.hint(tostring(value), choices))
end

-- Checks a field's value, or each item of a list, against the field's range and choices. Returns
-- the value. rules: { docs = field name -> its text in the help, ranges = field name -> its range }
local function check(name, value, field, rules)
  local range, doc, single = rules.ranges[name], rules.docs[name], field.kind ~= "list"
  local choices = type(doc) == "table" and doc.choices
  local items, default = single and { value } or value, single and { field.default }
    or field.default or {}
  if #items == 0 and choices then
    fail("%s: expected one or more of %s, got an empty list", name, table.concat(choices, ", "))
  elseif #items == 0 and range and range.problem then
    fail("%s: expected at least one value, got an empty list", name)
  end
  for i, item in ipairs(items) do
    local problem = range and range.problem and item ~= default[i] and range.problem(item)
    if problem then fail("%s: %s", name, problem) end
    if range and range[2] and type(item) == "number" and not range[2](item) then
      fail("%s: expected %s, got %s", name, range[1], value_text(item))
    end
    if choices then check_choice(name, item, choices) end
  end
  return value
end

local function read_file(path)
  local text, why = files.read(path)
  if not text then fail("cannot read %s", why) end
  local result
  if path:match("%.json$") then
    local value, parse_error = require("cjson.safe").decode(text)
    if value == nil then fail("%s: it is not JSON: %s", path, tostring(parse_error)) end
    result = value
  else
    local chunk, syntax_error = loadstring(text, "@" .. path)
    fail_if(not chunk or text:byte(1) == 27, "%s",
      syntax_error or (path .. ": expected Lua source, got bytecode"))
    setfenv(chunk, { math = math, pairs = pairs, ipairs = ipairs, tonumber = tonumber,
      tostring = tostring })
    local ok, value = pcall(chunk)
    if not ok then fail("%s", tostring(value)) end
    result = value
  end
  fail_if(type(result) ~= "table", "%s: expected a table of fields, got %s", path,
    result == nil and "nothing" or "a " .. type(result))
  return result
end

local function apply_file(result, fields, rules, path)
  local where = path .. ": "
  local function walk(values, prefix, depth)
    if depth > 20 then
      fail("%s%s: expected tables nested at most 20 deep", where, quoted(prefix:sub(1, -2)))
    end
    for key, value in pairs(values) do
      local name = prefix .. tostring(key)
      local field = fields[name]
      local nested = false
      for other in pairs(fields) do nested = nested or other:sub(1, #name + 1) == name .. "." end
      if field then
        if type(value) ~= "userdata" then            -- skips JSON's null, as if it were absent
          assign(result, name, check(name, from_file(name, field, value, where), field, rules))
        end
      elseif nested and type(value) == "table" then walk(value, name .. ".", depth + 1)
      elseif nested then
        fail("%s%s: expected a table of fields, got a %s", where, name, type(value))
      else
        unknown(name, fields, rules, where)
      end
    end
  end
  walk(read_file(path), "", 1)
end

--- Parses `args`, a list of strings "name=value". Returns a table with the value of every field of
--- `defaults`. kinds: the ranges, such as { count = "steps" }. script: the script whose settings
--- these are, for messages; by default, the script that runs. A bad argument raises an error object
--- that tostring() converts to the message.
function config.parse(defaults, args, docs, kinds, script)
  local fields, result = collect(defaults, "", {}), copy(defaults)
  local rules = { docs = docs or {}, ranges = ranges_of(kinds, fields), script = script }
  for _, argument in ipairs(args) do
    local name, text = argument:match("^%-*([%w_.%-]+)=(.*)$")
    if not name then
      local known = argument:match("^%-*([%w_.%-]+)$")
      known = known and (fields[known] and known or fields[known:gsub("-", "_")] and known)
      fail("expected name=value, got %s; %s", quoted(argument), known and "write " ..
        known:gsub("-", "_") .. "=VALUE"
        or "fields: " .. table.concat(shown(fields, rules.docs), ", "))
    end
    if not fields[name] and fields[(name:gsub("-", "_"))] then name = name:gsub("-", "_") end
    local field = fields[name]
    if field then assign(result, name, check(name, from_text(name, field, text), field, rules))
    elseif name == "config" then apply_file(result, fields, rules, text)
    else unknown(name, fields, rules, "") end
  end
  return result
end

--- Returns a list of { dotted name, value } with an entry for every field, in the order of `help`.
function config.flatten(values)
  local fields = collect(values, "", {})
  local list = {}
  for i, name in ipairs(names_of(fields)) do list[i] = { name, fields[name].default } end
  return list
end

--- Returns the fields as lines of name=value, in the form that the command line takes.
function config.format(values)
  local lines = {}
  for i, pair in ipairs(config.flatten(values)) do
    lines[i] = pair[1] .. "=" .. value_text(pair[2])
  end
  return table.concat(lines, "\n")
end

--- Returns the text that `engine script.lua help` prints.
function config.help(defaults, docs, script)
  local fields = collect(defaults, "", {})
  local rows, width, default_width = {}, 6, 4
  docs = docs or {}
  for _, name in ipairs(shown(fields, docs)) do
    local field, doc = fields[name], docs[name]
    local text = type(doc) == "table" and (doc[1] or "") or doc or ""
    if type(doc) == "table" and doc.choices then
      text = text .. (text == "" and "" or ": ") .. table.concat(doc.choices, ", ")
    end
    local default = field.default ~= nil and value_text(field.default) or "-"
    rows[#rows + 1] = { name, field.kind, default == "" and "''" or default, text }
    width, default_width = math.max(width, #name), math.max(default_width, #rows[#rows][3])
  end
  if not fields.device then
    rows[#rows + 1] = { "device", "string", "cpu",
      "where to compute: cpu, cuda, auto (cuda if there is a card), reference" }
  end
  rows[#rows + 1] = { "config", "file", "-", "a .lua or .json file with any of these fields" }
  default_width = math.min(default_width, 24)
  local lines = { ("usage: engine %s [name=value ...]"):format(script or "script.lua"), "" }
  for _, row in ipairs(rows) do
    local line = ("  %-" .. width .. "s  %-7s  %-" .. default_width .. "s  %s"):format(row[1],
      row[2], row[3], row[4])
    lines[#lines + 1] = (line:gsub("%s+$", ""))
  end
  return table.concat(lines, "\n")
end

local asks_help = { help = true, ["--help"] = true, ["-h"] = true }

-- engine.config(defaults, docs, kinds): reads the script's own arguments; `help` prints the fields
-- and exits.
local function from_command_line(_, defaults, docs, kinds)
  local args = rawget(_G, "arg") or {}
  for _, argument in ipairs(args) do
    if asks_help[argument] then
      show.print(config.help(defaults, docs, args[0]))
      os.exit(0)
    end
  end
  if defaults.device ~= nil then return config.parse(defaults, args, docs, kinds) end
  local fields = { device = config.optional "string" }     -- every script has this field
  for key, value in pairs(defaults) do fields[key] = value end
  local result = config.parse(fields, args, docs, kinds)
  if result.device then
    local good, message = machine.try_device(result.device)
    if not good then fail("%s", message) end
    result.device = nil
  end
  return result
end

return setmetatable(config, { __call = from_command_line })
