-- Groups of parameters, and their separate loss scales. A group is a layer: "blocks.3" for
-- "blocks.3.attn.qkv.weight". A module can also declare itself a group (nn.moe does so for each
-- expert). A policy reads the groups in record.groups and may return scales = { ["blocks.3"] = s }.
-- The gradients inside that layer are then multiplied by s instead of the global loss scale. The
-- layer's relative scale is s divided by the global scale. Between two layers, the backward pass
-- multiplies the gradient of the activations once by the ratio of the two layers' scales (grad_emit
-- in core/autograd/gradient.c). Used by trainers and scalers. replay.lua, curves.lua and
-- tensorboard.lua of run/ and report/layers.lua use M.of.
local M_ffi = require "engine.base.ffi"

local C, check = M_ffi.C, M_ffi.check

local M = {}

local Groups = {}
Groups.__index = Groups

-- Returns two tables: the modules by path, and a list of the paths of the modules that declare
-- themselves groups.
local function modules_of(model)
  local at, declared = {}, {}
  if not (model and model.apply) then return at, declared end
  model:apply(function(module, path)
    at[path] = module
    if rawget(module, "_group") then declared[#declared + 1] = path end
  end)
  table.sort(declared, function(a, b) return #a > #b end)    -- innermost first
  return at, declared
end

local function group_name(name, declared)
  for _, path in ipairs(declared) do
    if name:sub(1, #path + 1) == path .. "." then return path end
  end
  return name:match("^(%d+)%.") or name:match("^(.-%.%d+)%.") or name:match("^([^.]+)") or name
end

--- Returns three lists: the names of the parameters, the index (from 1) of each parameter's group,
--- and the names of the groups. If `model` is given, its modules may declare themselves groups.
function M.of(list, model)
  local _, declared = modules_of(model)
  local names, group_of, groups, index = {}, {}, {}, {}
  for i, p in ipairs(list) do
    local group = group_name(p.name, declared)
    if not index[group] then
      groups[#groups + 1] = group
      index[group] = #groups
    end
    names[i], group_of[i] = p.name, index[group]
  end
  return names, group_of, groups
end

--- Returns the groups of `list`, a list of parameters { name = }. The modules of the groups are
--- looked up in `model`; without a model, the groups have no modules. `sets`: the parameter sets
--- that make up the list, in order, as { params =, n = }.
function M.new(model, list, sets)
  local at = modules_of(model)
  local self = setmetatable({ modules = {}, sets = sets, apart = false,
    relative = M_ffi.new("double[?]", math.max(1, #list)) }, Groups)
  self.names, self.group_of, self.groups = M.of(list, model)
  for i, group in ipairs(self.groups) do
    self.modules[i] = at[group] or false  -- false: the group is not a module
    if at[group] then rawset(at[group], "_relative_scale", nil) end   -- left by an earlier trainer
  end
  for _, set in ipairs(sets) do check(C.eng_params_relative_scale(set.params, nil)) end
  return self
end

--- Applies the policy's scales to the modules and parameters of the groups, from the next forward
--- pass on. Costs almost nothing while no group has a separate scale.
function Groups:apply(policy)
  local scale, apart = policy:scale(), policy:scales_groups()
  if not apart and not self.apart then return end
  for i, module in ipairs(self.modules) do
    if module then
      rawset(module, "_relative_scale", apart and policy:group_scale(i) / scale or nil)
    end
  end
  for i = 1, #self.names do self.relative[i - 1] = policy:group_scale(self.group_of[i]) / scale end
  local first = 0
  for _, set in ipairs(self.sets) do
    check(C.eng_params_relative_scale(set.params, self.relative + first))
    first = first + set.n
  end
  self.apart = apart
end

return M
