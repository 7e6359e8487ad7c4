-- Suggestions for misspelt names, for error messages. `names` is a list, or a table whose keys are
-- the names.
--   nearest("layer_nrm", { "linear", "layer_norm" })  -> "layer_norm"
--   nearest.hint("lrr", { "lr", "batch" })       -> "; did you mean 'lr'?", or "" when none is near
--   nearest.choices("lrr", { lr = 1, batch = 2 }, "options")
--                                                -> "; did you mean 'lr'?; options: batch lr"
local nearest = {}

--- The keys of a table as a sorted list of strings.
function nearest.keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = tostring(key) end
  table.sort(keys)
  return keys
end

local function list_of(names)
  return (names[1] ~= nil or next(names) == nil) and names or nearest.keys(names)
end

--- The nearest name, or nil when none is near (see eng_nearest in core/engine.h).
function nearest.find(name, names)
  local found, M_ffi = pcall(require, "engine.base.ffi")
  if not found then return nil end  -- without the library: `engine doctor`, command names
  local list, texts = list_of(names), {}
  for i, candidate in ipairs(list) do texts[i] = tostring(candidate) end
  local C, array = M_ffi.C, M_ffi.new("const char *[?]", #texts + 1, texts)
  return list[C.eng_nearest(tostring(name), array, #texts) + 1]
end

function nearest.hint(name, names)
  local found = nearest.find(name, names)
  return found and ("; did you mean '%s'?"):format(tostring(found)) or ""
end

--- The hint and all the names; `what`: the noun for them, such as "options".
function nearest.choices(name, names, what)
  local texts = {}
  for i, choice in ipairs(list_of(names)) do texts[i] = tostring(choice) end
  return ("%s; %s: %s"):format(nearest.hint(name, texts), what, table.concat(texts, " "))
end

--- A module in which a missing name is an error that suggests the nearest one.
function nearest.guard(module, what)
  return setmetatable(module, { __index = function(t, key)
    error(("%s has no '%s'%s"):format(what, tostring(key), nearest.hint(key, nearest.keys(t))), 2)
  end })
end

return setmetatable(nearest, { __call = function(_, name, names) return nearest.find(name,
  names) end })
