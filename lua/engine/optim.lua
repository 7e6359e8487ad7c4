-- Optimizers over a module's parameters: sgd, adam, adamw, lion. An optimizer owns the parameter set (flat
-- weights and gradients) and its moments; the fused kernel unscales, clips, updates and refreshes the
-- low-precision weights in one pass.
--   local opt = engine.optim.adamw(model, { lr = 3e-4, weight_decay = 0.1, decay = "matrices" })
--   opt:step()
local M_ffi = require "engine.ffi"
local nearest = require "engine.nearest"
local precision = require "engine.precision"
local tensor = require "engine.tensor"

local ffi, C, check = M_ffi.ffi, M_ffi.C, M_ffi.check

local M = {}

local KINDS = {
  sgd   = { kind = C.ENG_SGD,   defaults = { lr = 1e-2, momentum = 0, dampening = 0, nesterov = false, weight_decay = 0 } },
  adam  = { kind = C.ENG_ADAM,  defaults = { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0 } },
  adamw = { kind = C.ENG_ADAMW, defaults = { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2 } },
  lion  = { kind = C.ENG_LION,  defaults = { lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0 } },
}

local function names_of(t)
  local names = {}
  for name in pairs(t) do names[#names + 1] = name end
  table.sort(names)
  return names
end

local function check_hyper(name, values)
  local function bad(key, expected) error(("optim.%s: expected %s %s, got %s"):format(name, key, expected, tostring(values[key])), 0) end
  for _, key in ipairs { "lr", "weight_decay", "momentum", "dampening" } do
    local v = values[key]
    if v ~= nil and not (type(v) == "number" and v >= 0 and v < math.huge) then bad(key, "as a number >= 0") end
  end
  for _, key in ipairs { "beta1", "beta2" } do
    local v = values[key]
    if v ~= nil and not (type(v) == "number" and v >= 0 and v < 1) then bad(key, "in [0, 1)") end
  end
  local eps = values.eps
  if eps ~= nil and not (type(eps) == "number" and eps >= 2 ^ -126 and eps < math.huge) then
    bad("eps", "as a number no smaller than 2^-126 (the optimizer's f32 state would round it to 0)")
  end
  if values.nesterov and (values.momentum == 0 or values.dampening ~= 0) then
    error(("optim.%s: nesterov needs a momentum and no dampening"):format(name), 0)
  end
end

-- ------------------------------------------------------------------ the object

local Optimizer = {}
Optimizer.__index = Optimizer

--- Splits parameters into groups: options.groups is a list of { match = pattern or function(name, tensor), lr_mul =, overrides ... },
--- the first match wins; decay = "matrices" takes weight decay off everything with fewer than two dimensions.
local function make_groups(name, list, options, defaults)
  local groups, group_of = {}, M_ffi.new("int32_t[?]", math.max(#list, 1))
  local function add(overrides, label)
    local values = { lr_mul = 1, label = label }
    for key, value in pairs(defaults) do values[key] = value end
    for key, value in pairs(overrides) do
      if key ~= "match" and key ~= "label" then
        if key == "lr" then error(("optim.%s: a group sets lr_mul, a factor on the common rate, not lr"):format(name), 0) end
        if defaults[key] == nil and key ~= "lr_mul" then
          error(("optim.%s: unknown option '%s' in a group%s"):format(name, tostring(key), nearest.hint(tostring(key), names_of(defaults))), 0)
        end
        values[key] = value
      end
    end
    check_hyper(name, values)
    groups[#groups + 1] = values
    return #groups
  end
  local base = add({}, "all")
  local plain = options.decay == "matrices" and add({ weight_decay = 0 }, "no decay") or nil
  local user = {}
  for i, group in ipairs(options.groups or {}) do
    if type(group) ~= "table" or (type(group.match) ~= "string" and type(group.match) ~= "function") then
      error(("optim.%s: group %d needs match = a pattern or a function(name, tensor)"):format(name, i), 0)
    end
    user[i] = add(group, group.label or ("group " .. i))
  end
  for i, p in ipairs(list) do
    local chosen = plain and p.tensor.ndim < 2 and plain or base
    for k, group in ipairs(options.groups or {}) do
      local hit
      if type(group.match) == "string" then hit = p.name:find(group.match) ~= nil else hit = group.match(p.name, p.tensor) end
      if hit then chosen = user[k] break end
    end
    group_of[i - 1] = chosen - 1
  end
  return groups, group_of
end

local function parameter_list(name, model)
  local list = type(model) == "table" and model.parameters and model:parameters() or model
  if type(list) ~= "table" then error(("optim.%s: expected a module or a list of { name =, tensor = }"):format(name), 0) end
  local trainable = {}
  for i, p in ipairs(list) do
    if tensor.is_tensor(p) then p = { name = "p" .. i, tensor = p } end
    if p.tensor == nil then error(("optim.%s: entry %d has no tensor"):format(name, i), 0) end
    if M.requires_grad(p.tensor) then trainable[#trainable + 1] = p end
  end
  if #trainable == 0 then error(("optim.%s: nothing to train: no parameter requires a gradient"):format(name), 0) end
  return trainable
end

local info = M_ffi.new("eng_tensor_info")
function M.requires_grad(x)
  check(C.eng_info(info, x))
  return info.requires_grad ~= 0
end

local function new(name, model, options)
  local kind = KINDS[name]
  options = options or {}
  local defaults = {}
  for key, value in pairs(kind.defaults) do defaults[key] = value end
  for key, value in pairs(options) do
    if key == "betas" and defaults.beta1 then
      defaults.beta1, defaults.beta2 = value[1], value[2]
    elseif defaults[key] ~= nil then
      defaults[key] = value
    elseif key ~= "groups" and key ~= "decay" and key ~= "precision" and key ~= "moments" then
      error(("optim.%s: unknown option '%s'%s; options: %s groups decay precision moments"):format(name, tostring(key),
        nearest.hint(tostring(key), names_of(defaults)), table.concat(names_of(defaults), " ")), 0)
    end
  end
  if options.decay ~= nil and options.decay ~= "matrices" and options.decay ~= "all" then
    error(("optim.%s: decay is 'all' or 'matrices', not '%s'"):format(name, tostring(options.decay)), 0)
  end
  check_hyper(name, defaults)

  local list = parameter_list(name, model)
  local full = precision.resolve(options.precision)
  local n = #list
  local tensors, names = M_ffi.new("eng_tensor[?]", n), M_ffi.new("const char *[?]", n)
  for i, p in ipairs(list) do tensors[i - 1], names[i - 1] = p.tensor, p.name end
  local set = M_ffi.new("eng_params *[1]")
  check(C.eng_params_new(set, tensors, names, n))
  local groups, group_of = make_groups(name, list, options, defaults)

  local self = setmetatable({
    name = name, list = list, groups = groups, updates = 0, lr = defaults.lr, precision = full,
    params = ffi.gc(set[0], C.eng_params_free),
    _hyper = M_ffi.new("eng_hyper[?]", #groups), _update = M_ffi.new("eng_update"),
    _record = M_ffi.new("eng_record"), _kind = kind.kind, _group_of = group_of, _clip = nil,
  }, Optimizer)
  local shadow, gradient = precision.parameter_formats(full, list)
  check(C.eng_params_precision(self.params, shadow, gradient))
  local state = M_ffi.new("eng_optimizer *[1]")
  check(C.eng_optimizer_new(state, self.params, kind.kind, M_ffi.dtype_number(options.moments or full.moments), group_of))
  self.state = ffi.gc(state[0], C.eng_optimizer_free)
  if type(model) == "table" and model.parameters then rawset(model, "_set", self.params) end
  return self
end

for name in pairs(KINDS) do
  M[name] = function(model, options)
    local good, result = pcall(new, name, model, options)
    if not good then error(result, 2) end
    return result
  end
end

--- Gives the parameters the formats of a precision recipe; gradients are cleared.
function Optimizer:set_precision(recipe)
  self.precision = precision.resolve(recipe, 2)
  local shadow, gradient = precision.parameter_formats(self.precision, self.list)
  check(C.eng_params_precision(self.params, shadow, gradient))
end

--- Forgets all gradients.
function Optimizer:zero_grad()
  self._clip, self._clip_value = nil, nil
  check(C.eng_params_zero_grad(self.params))
end

--- Global norm of the gradients divided by `scale` (1): of the finite values.
function Optimizer:grad_norm(scale)
  check(C.eng_params_stats(self._record, nil, self.params, scale or 1, C.ENG_NEED_NORM))
  return self._record.norm
end

--- Limits the global norm of the gradients at the next step(); returns the norm. The clipping happens inside the update.
function Optimizer:clip_grad_norm(limit)
  if type(limit) ~= "number" or limit ~= limit or limit <= 0 then error("clip_grad_norm: expected a limit > 0, got " .. tostring(limit), 2) end
  local norm = self:grad_norm()
  self._clip = norm > limit and limit / (norm + 1e-6) or nil
  return norm
end

--- Limits every gradient element to +-limit at the next step().
function Optimizer:clip_grad_value(limit)
  if type(limit) ~= "number" or limit ~= limit or limit <= 0 then error("clip_grad_value: expected a limit > 0, got " .. tostring(limit), 2) end
  self._clip_value = limit
end

--- One update. options: gradient_factor (1; 1/scale to unscale), clip_value, lr_mul. A clip set by clip_grad_norm applies too.
function Optimizer:step(options)
  options = options or {}
  local lr = self.lr * (options.lr_mul or 1)
  for i, group in ipairs(self.groups) do
    local h = self._hyper[i - 1]
    h.lr = lr * group.lr_mul
    h.beta1, h.beta2, h.eps, h.weight_decay = group.beta1 or 0, group.beta2 or 0, group.eps or 0, group.weight_decay
    h.momentum, h.dampening, h.nesterov = group.momentum or 0, group.dampening or 0, group.nesterov and 1 or 0
  end
  local update = self._update
  update.kind, update.n_groups, update.groups = self._kind, #self.groups, self._hyper
  update.gradient_factor = (options.gradient_factor or 1) * (self._clip or 1)
  update.clip_value = options.clip_value or self._clip_value or 0
  update.t = self.updates + 1
  check(C.eng_optimizer_step(self.state, update))
  self.updates = self.updates + 1
  self._clip, self._clip_value = nil, nil
end

--- Moments as { ["name.moment1"] = tensor } over the optimizer's own memory, and its counters, for checkpoints.
function Optimizer:state_tensors()
  local state = {}
  for i, p in ipairs(self.list) do
    for which = 1, 2 do
      local m = M_ffi.Tensor()
      check(C.eng_optimizer_moment(m, self.state, which, i - 1))
      if m.slot ~= 0 then state[("%s.moment%d"):format(p.name, which)] = m end
    end
  end
  return state
end

--- Takes moments and counters back.
function Optimizer:load_state(tensors, updates)
  local own = self:state_tensors()
  for name, target in pairs(own) do
    local source = tensors[name] or error(("optimizer state: '%s' is missing"):format(name), 2)
    if tensor.shape_text(source.shape) ~= tensor.shape_text(target.shape) then
      error(("optimizer state: '%s' is %s, expected %s"):format(name, tensor.shape_text(source.shape), tensor.shape_text(target.shape)), 2)
    end
    target:copy(source)
  end
  self.updates = updates
end

function Optimizer:__tostring()
  local lines = { ("%s: %d parameters, %s elements, %d updates, lr %g, precision %s"):format(self.name, #self.list,
    tostring(tonumber(C.eng_params_count(self.params))), self.updates, self.lr, self.precision.name) }
  local counts = {}
  for i = 0, #self.list - 1 do counts[self._group_of[i]] = (counts[self._group_of[i]] or 0) + 1 end
  for i, group in ipairs(self.groups) do
    local parts = {}
    for _, key in ipairs { "lr", "beta1", "beta2", "eps", "momentum", "weight_decay" } do
      if group[key] ~= nil then parts[#parts + 1] = ("%s %g"):format(key, group[key]) end
    end
    if counts[i - 1] then lines[#lines + 1] = ("  %s: %d tensors, %s"):format(group.label, counts[i - 1], table.concat(parts, ", ")) end
  end
  return table.concat(lines, "\n")
end

return M
