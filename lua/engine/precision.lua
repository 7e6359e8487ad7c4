-- Precision recipes: which number format each role has. A recipe is a table; users write their own:
--   engine.trainer{ precision = { name = "mine", base = "fp16", residual = "f32" }, ... }
local M_ffi = require "engine.ffi"
local nearest = require "engine.nearest"

local C, dtype, raise, value_text = M_ffi.C, M_ffi.dtype, M_ffi.raise, M_ffi.value_text

local M = {}

-- weights            format the forward pass reads parameters in (masters stay f32); norms keep f32
-- activations        inputs and outputs of matrix products and attention
-- residual           the residual stream: what an embedding yields
-- norm               what layer and RMS norm yield (their statistics are always f32)
-- wide               softmax, exponentials, losses and sums
-- weight_gradients   format a parameter's gradient is stored in
-- norm_gradients     the same for norm parameters
-- moments            the optimizer's state
M.recipes = {
  fp32 = { weights = "f32", activations = "f32", residual = "f32", norm = "f32", wide = "f32",
    weight_gradients = "f32", norm_gradients = "f32", moments = "f32", scaled = false },
  -- bf16 has f32's range: no loss scale. Products are rounded once, gradients summed in f32.
  bf16 = { weights = "bf16", activations = "bf16", residual = "bf16", norm = "bf16", wide = "f32",
    weight_gradients = "f32", norm_gradients = "f32", moments = "f32", scaled = false },
  -- fp16 with real fp16 gradients: past 65504 they become inf, below 2^-24 zero. Wants a loss scale.
  fp16 = { weights = "f16", activations = "f16", residual = "f16", norm = "f16", wide = "f32",
    weight_gradients = "f16", norm_gradients = "f32", moments = "f32", scaled = true },
}
local FORMATS = {
  weights = "f32 f16 bf16", activations = "f32 f16 bf16", residual = "f32 f16 bf16", norm = "f32 f16 bf16", wide = "f32 f16 bf16",
  weight_gradients = "f32 f16 bf16", norm_gradients = "f32 f16 bf16", moments = "f32 bf16",
}

local function names_of(t)
  local names = {}
  for name in pairs(t) do names[#names + 1] = name end
  table.sort(names)
  return names
end

local function find(name)
  local found = M.recipes[name]
  if found then return found end
  local names = names_of(M.recipes)
  raise("there is no precision '%s'%s; precisions: %s", tostring(name), nearest.hint(tostring(name), names), table.concat(names, " "))
end

local full_recipes = setmetatable({}, { __mode = "k" })   -- what resolve made

--- The full recipe for a name or a table (missing fields come from its `base`, fp32 by default).
function M.resolve(recipe)
  if full_recipes[recipe] then return recipe end
  if recipe == nil then recipe = "fp32" end
  if type(recipe) == "string" then
    find(recipe)
    recipe = { name = recipe, base = recipe }
  elseif type(recipe) ~= "table" then
    raise("precision: expected a name or a recipe table, got %s", value_text(recipe))
  end
  local base = find(recipe.base or "fp32")
  local full = { name = recipe.name or "custom", scaled = base.scaled }
  if recipe.scaled ~= nil then full.scaled = recipe.scaled end
  for role in pairs(FORMATS) do full[role] = recipe[role] or base[role] end
  for key, value in pairs(recipe) do
    if key ~= "name" and key ~= "base" and key ~= "scaled" then
      if not FORMATS[key] then
        raise("precision '%s': unknown role '%s'%s; roles: %s", full.name, tostring(key), nearest.hint(tostring(key), names_of(FORMATS)),
          table.concat(names_of(FORMATS), " "))
      end
      if not (" " .. FORMATS[key] .. " "):find(" " .. tostring(value) .. " ", 1, true) then
        raise("precision '%s': %s cannot be %s; formats: %s", full.name, key, value_text(value), FORMATS[key])
      end
    end
  end
  full_recipes[full] = true
  return full
end

--- Whether two full recipes give every role the same format.
function M.same(a, b)
  for role in pairs(FORMATS) do
    if a[role] ~= b[role] then return false end
  end
  return true
end

--- Whether a full recipe leaves every operation as it is.
local function is_plain(full)
  return full.activations == "f32" and full.residual == "f32" and full.norm == "f32" and full.wide == "f32"
end

local function structure(full)
  if is_plain(full) then return nil end
  return M_ffi.new("eng_precision", { dtype[full.activations], dtype[full.residual], dtype[full.norm], dtype[full.wide] })
end

local function restore(previous, good, ...)
  C.eng_autocast(previous, nil)
  if not good then error((...), 0) end
  return ...
end

--- Runs f(...) with a recipe in force and returns its results. Scopes nest.
function M.autocast(recipe, f, ...)
  local full = M.resolve(recipe)
  if f == nil then raise("autocast: expected a recipe and a function, got no function") end
  local previous = M_ffi.new("eng_precision")
  C.eng_autocast(structure(full), previous)
  return restore(previous, pcall(f, ...))
end

--- Formats of each parameter in a list of { role = }: two int32_t arrays, shadow and gradient, for eng_params_precision.
function M.parameter_formats(full, list)
  local shadow, gradient = M_ffi.new("int32_t[?]", #list), M_ffi.new("int32_t[?]", #list)
  for i, p in ipairs(list) do
    local norm = p.role == "norm"
    shadow[i - 1] = norm and dtype.f32 or dtype[full.weights]
    gradient[i - 1] = dtype[norm and full.norm_gradients or full.weight_gradients]
  end
  return shadow, gradient
end

--- A recipe in a few lines.
function M.describe(recipe)
  local full = M.resolve(recipe)
  local lines = { "precision " .. full.name }
  for _, role in ipairs { "weights", "activations", "residual", "norm", "wide", "weight_gradients", "norm_gradients", "moments" } do
    lines[#lines + 1] = ("  %-17s %s"):format(role, full[role])
  end
  return table.concat(lines, "\n")
end

return M
