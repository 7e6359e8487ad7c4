-- Reads the verdicts of FP8 policies (policies/README.md, section FP8); the layers themselves are
-- in train/fp8_sites.lua. The verdicts of a step give `places` = { rungs, amaxes } for the next
-- step:
--   rungs    a number for each layer: 1 for the recipe, k + 1 for rung k of the recipe's ladder,
--            and `most`, the largest, for high precision
--   amaxes   for each tensor (x, w and dy of each layer) the amax that sets its scale; nil: the
--            tensor's own amax
-- Called by train/fp8_sites.lua, which applies the places, by run/shadow.lua and
-- run/replay_fp8.lua, which compare them with the places of the run, by run/history_why.lua, and
-- by train/fp8_recipe.lua for the roles.
local M = {}

M.roles = { "x", "w", "dy" }

-- Numbers in this range are positive and finite as f32, too.
local LEAST, LARGEST = 2 ^ -149, (2 - 2 ^ -23) * 2 ^ 127

--- Declares the tensors and groups of the layers `paths` to a policy. Returns the tensors' names:
--- "PATH:ROLE" for each layer and role.
function M.prepare(policy, paths)
  local names, groups, group_of = {}, {}, {}
  for _, path in ipairs(paths) do
    for _, role in ipairs(M.roles) do
      names[#names + 1] = path .. ":" .. role
      groups[#groups + 1], group_of[#names] = names[#names], #names
    end
  end
  for _, path in ipairs(paths) do groups[#groups + 1] = path .. ":high" end
  policy:tensors(names, group_of, groups, true)
  return names
end

--- Combines the last verdicts of the policies in `list` into places. Each layer gets the highest
--- rung that a policy chose, up to `most`. Each tensor gets the amax of the last policy that sets
--- one. names: the names of the tensors, from prepare(). An amax that f32 numbers do not reach and
--- a rung below 2 are ignored; the second result is a message about the last one of these, or nil.
function M.places(list, names, most)
  local n, rungs, amaxes, problem = #names / 3, {}, {}, nil
  for i = 1, n do rungs[i] = 1 end
  for _, policy in ipairs(list) do
    local none, any = policy:scale(), policy:scales_groups()
    for i = 1, any and n or 0 do
      local own = policy:group_scale(3 * n + i)
      if own ~= none and own < 2 then
        problem = ("scales['%s'] = %g; expected 2 or more (2: the first rung above the recipe)")
          :format(names[3 * i]:gsub("dy$", "high"), own)
      elseif own ~= none then rungs[i] = math.min(math.max(rungs[i], math.floor(own)), most) end
    end
    for k = 1, any and 3 * n or 0 do
      local own = policy:group_scale(k)
      if own < LEAST or own > LARGEST then
        problem = ("scales['%s'] = %g; expected an amax from 1.4e-45 to 3.4e38, as f32 has")
          :format(names[k], own)
      elseif own ~= none then amaxes[k] = own end
    end
  end
  return { rungs = rungs, amaxes = amaxes }, problem
end

--- Returns whether layers would compute differently with the places `own` of one policy than with
--- the places `run` of the run. This is so if a layer has different rungs in `own` and `run`, or if
--- `own` sets another amax than `run` for a tensor that policies may scale. scaled(k): whether the
--- run lets policies scale tensor k (from 1, in the order of prepare()).
function M.differs(own, run, scaled)
  for i, rung in ipairs(own.rungs) do
    if rung ~= run.rungs[i] then return true end
  end
  for k, amax in pairs(own.amaxes) do
    if amax ~= run.amaxes[k] and scaled(k) then return true end
  end
  return false
end

--- Returns { [path] = rung in `after` } for the layers whose rung differs between the two lists of
--- rungs; nil if there are none.
function M.moved(paths, before, after)
  local moved
  for i, path in ipairs(paths) do
    if before[i] ~= after[i] then
      moved = moved or {}
      moved[path] = after[i]
    end
  end
  return moved
end

local MOST_LAYERS = 4

--- Returns the layers in `moved` by rung, as text: "high precision: a, b; rung 1 of the ladder: c;
--- the recipe: d, e, f, g and 5 more".
function M.text(moved, most)
  local by, parts = {}, {}
  for path, rung in pairs(moved) do
    by[rung] = by[rung] or {}
    table.insert(by[rung], path)
  end
  for rung = most, 1, -1 do
    local list = by[rung]
    if list then
      table.sort(list)
      parts[#parts + 1] = ("%s: %s%s"):format(rung == 1 and "the recipe"
        or rung == most and "high precision" or ("rung %d of the ladder"):format(rung - 1),
        table.concat(list, ", ", 1, math.min(#list, MOST_LAYERS)),
        #list > MOST_LAYERS and (" and %d more"):format(#list - MOST_LAYERS) or "")
    end
  end
  return table.concat(parts, "; ")
end

--- Returns text about the layers that differ from the recipe, in the form of M.text. If none
--- differs, returns "all layers as in the recipe".
function M.off(paths, rungs, most)
  local ones = {}
  for i = 1, #paths do ones[i] = 1 end
  local moved = M.moved(paths, ones, rungs)
  return moved and M.text(moved, most) or "all layers as in the recipe"
end

return M
