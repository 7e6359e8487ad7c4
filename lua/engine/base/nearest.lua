-- Suggestions for misspelt names, for error messages. `names` is a list, or a table whose keys are the names.
--   nearest("layer_nrm", { "linear", "layer_norm" })  -> "layer_norm"
--   nearest.hint("lrr", { "lr", "batch" })            -> "; did you mean 'lr'?", or "" when none is near
--   nearest.choices("lrr", { lr = 1, batch = 2 }, "options")
--                                                     -> "; did you mean 'lr'?; options: batch lr"
local nearest = {}

--- The keys of a table as a sorted list of texts.
function nearest.keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = tostring(key) end
  table.sort(keys)
  return keys
end

local function list_of(names)
  return (names[1] ~= nil or next(names) == nil) and names or nearest.keys(names)
end

-- Edits (insert, delete, replace, swap of neighbours) from a to b.
local function distance(a, b)
  local before, previous, current = {}, {}, {}
  for j = 0, #b do previous[j] = j end
  for i = 1, #a do
    current[0] = i
    for j = 1, #b do
      local same = a:byte(i) == b:byte(j)
      local best = math.min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (same and 0 or 1))
      if i > 1 and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        best = math.min(best, before[j - 2] + 1)
      end
      current[j] = best
    end
    before, previous, current = previous, current, before
  end
  return previous[#b]
end

--- The nearest name, or nil when none is near: more than a third of the letters wrong.
function nearest.find(name, names)
  name = tostring(name)
  local best, best_distance
  local lower = name:lower()
  if #name > 64 then return nil end
  for _, candidate in ipairs(list_of(names)) do
    local text = tostring(candidate)
    local d = #text <= 64 and distance(lower, text:lower()) or 1e9
    local last = text:match("[^.]+$") or text          -- `width` for `model.width`
    if last ~= text and last:lower() == lower then d = 1 end
    if not best_distance or d < best_distance then best, best_distance = candidate, d end
  end
  local most = best and math.max(1, math.floor(math.max(#name, #tostring(best)) / 3))
  return best and best_distance <= most and best or nil
end

function nearest.hint(name, names)
  local found = nearest.find(name, names)
  return found and ("; did you mean '%s'?"):format(tostring(found)) or ""
end

--- The hint and all the names; `what` they are: "options".
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

nearest.distance = distance

return setmetatable(nearest, { __call = function(_, name, names) return nearest.find(name, names) end })
