-- Makes optimizers over a module's parameters: their options, groups, step and state. An optimizer
-- updates a parameter set (flat weights and gradients), which the modules hold, and owns the state
-- that its update keeps. The update of a fused optimizer (core/optimizers.def) is one kernel, which
-- unscales and clips the gradients, updates the weights and refreshes their low-precision copies in
-- a single pass (fused_state.lua). All other optimizers are written in Lua: those in
-- lua/engine/optim, and those that scripts register (optim_register.lua, lua_state.lua). Owns the
-- registered optimizers. Called by scripts, this folder and report/lab.lua.
--   local opt = engine.optim.adamw(model, { lr = 3e-4, weight_decay = 0.1, decay = "matrices" })
--   opt:step()
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fp8_sites = require "engine.train.fp8_sites"
local fused_state = require "engine.train.fused_state"
local lua_state = require "engine.train.lua_state"
local module = require "engine.nn.module"
local nearest = require "engine.base.nearest"
local optim_register = require "engine.train.optim_register"
local precision = require "engine.train.precision"
local show = require "engine.base.show"
local tensor = require "engine.tensor.tensor"

local ffi, C, check, expect, raise, raise_if = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.expect,
  M_ffi.raise, M_ffi.raise_if

local M = {}

-- name -> an entry of fused_state.kinds; or { spec = a checked specification (optim_register.lua),
-- defaults = options and their default values, own = true if a script registered it }
local KINDS = {}
for _, row in ipairs(fused_state.kinds) do KINDS[row.name] = row end
for _, name in ipairs { "adafactor", "coat", "lamb", "muon", "stableadamw" } do
  local spec = optim_register.read(name, require("engine.optim." .. name))
  KINDS[name] = { spec = spec, defaults = spec.defaults }
end

local function within(v, least, below) return type(v) == "number" and v >= least and v < below end

-- The ranges of hyperparameters in core/optimizers.def: in words for messages, and a test.
local RANGES = {
  not_negative = { "to be a finite number >= 0", function(v) return within(v, 0, math.huge) end },
  below_one = { "to be in [0, 1)", function(v) return within(v, 0, 1) end },
  normal = { "to be a finite number no smaller than 2^-126 (smaller numbers may be 0 in f32)",
    function(v) return within(v, 2 ^ -126, math.huge) end },
  boolean = { "to be true or false", function(v) return type(v) == "boolean" end },
}
-- Name and range of each hyperparameter. Optimizers written in Lua follow the same rules.
local RULES = { { "lr_mul", RANGES.not_negative } }
for name, range in ffi.string(C.eng_hyper_ranges()):gmatch("([%w_]+)=([%w_]+)") do
  RULES[#RULES + 1] = { name, assert(RANGES[range], range) }
end

-- Raises an error for an invalid hyperparameter. where: the optimizer and perhaps its group, for
-- messages.
local function check_hyper(name, values, where)
  local spec = KINDS[name].spec
  for _, rule in ipairs(RULES) do
    local key, range, v = rule[1], rule[2], values[rule[1]]
    expect(v == nil or range[2](v), v, "%s: expected %s %s", where, key, range[1])
  end
  if spec then return optim_register.check_values(spec, values, where) end
  raise_if(values.nesterov and (values.momentum == 0 or values.dampening ~= 0),
    "%s: nesterov needs a momentum above 0 and a dampening of 0, got momentum = %s and " ..
    "dampening = %s", where, tostring(values.momentum), tostring(values.dampening))
end

-- ------------------------------------------------------------------ the object

local Optimizer = {}
Optimizer.__index = nearest.guard_elsewhere(Optimizer, "an optimizer")

-- Splits parameters into groups. options.groups is a list of { match = pattern or function(name,
-- tensor), lr_mul =, label =, overrides ... }, and the first match wins. decay = "matrices" applies
-- no weight decay to parameters of fewer than two dimensions that no group matches. Returns a list
-- of the groups' hyperparameters, and the number (from 0) of each parameter's group.
local function make_groups(name, list, options, defaults)
  local groups, group_of = {}, M_ffi.new("int32_t[?]", math.max(#list, 1))
  local function add(overrides, label, number)
    local where = "optim." .. name .. (number and (": group %d"):format(number) or "")
    local values = arguments.merged({ lr_mul = 1, label = label }, defaults)
    for key, value in pairs(overrides) do
      if key ~= "match" and key ~= "label" then
        raise_if(key == "lr", "%s: a group cannot set lr; hint: lr_mul = a factor on the " ..
          "optimizer's lr", where)
        if defaults[key] == nil and key ~= "lr_mul" then
          raise("%s: unknown option '%s'%s", where, tostring(key),
            nearest.hint(tostring(key), nearest.keys(defaults)))
        end
        values[key] = value
      end
    end
    check_hyper(name, values, where)
    groups[#groups + 1] = values
    return #groups
  end
  local base = add({}, "all")
  local plain = options.decay == "matrices" and add({ weight_decay = 0 }, "no decay") or base
  local given, user, matches, names, used = options.groups or {}, {}, {}, {}, {}
  arguments.want_list(given, "optim." .. name, "groups",
    '{ { match = "bias", weight_decay = 0 } }')
  for i, group in ipairs(given) do
    local match = type(group) == "table" and group.match
    if type(match) == "string" then
      arguments.want_pattern(match, ("optim.%s: group %d"):format(name, i),
        "match to be a Lua pattern of parameter names")
      matches[i] = function(parameter) return parameter:find(match) end
    elseif type(match) == "function" then matches[i] = match
    else
      raise("optim.%s: expected group %d to have match = a pattern or a function(name, tensor), " ..
        "got %s", name, i, type(group) == "table" and "match = " .. M_ffi.value_text(match)
        or M_ffi.value_text(group))
    end
    user[i] = add(group, group.label or ("group " .. i), i)
  end
  for i, p in ipairs(list) do
    local chosen
    names[i] = p.name
    for k, matched in ipairs(matches) do
      if matched(p.name, p.tensor) then chosen, used[k] = chosen or user[k], true end
    end
    group_of[i - 1] = (chosen or p.tensor.ndim < 2 and plain or base) - 1
  end
  for k, group in ipairs(given) do
    if not used[k] then
      raise("optim.%s: group %d: match = %s matches no parameter%s; parameters: %s", name, k,
        M_ffi.value_text(group.match), type(group.match) == "string"
        and nearest.part_hint(group.match, names) or "", nearest.few(names))
    end
  end
  return groups, group_of
end

local function parameter_list(name, model)
  local list = module.is_module(model) and model:parameters() or model
  expect(type(list) == "table", model,
    "optim.%s: expected a module or a list of tensors or of { name =, tensor = }", name)
  local trainable = {}
  for i, p in ipairs(list) do
    if tensor.is_tensor(p) then p = { tensor = p } end
    local given = type(p) == "table"
    expect(given and tensor.is_tensor(p.tensor), given and p.tensor or p, "optim.%s: expected " ..
      "%sentry %d of the list to be a tensor%s", name, given and "the field `tensor` of " or "", i,
      given and "" or " or { name =, tensor = }")
    expect(p.name == nil or type(p.name) == "string", p.name,
      "optim.%s: expected the name of entry %d of the list to be text", name, i)
    if not p.name then p = arguments.merged(p, { name = "p" .. i }) end
    if M.requires_grad(p.tensor) then trainable[#trainable + 1] = p end
  end
  if #trainable == 0 then
    raise("optim.%s: nothing to train: no parameter requires a gradient%s", name,
      module.is_module(model) and require("engine.nn.lora_layers").is_merged(model)
        and "; hint: the adapters are merged, lora.unmerge(model) brings them back"
        or "; hint: requires_grad(true) on the tensors to train")
  end
  return trainable
end

local loose = {}   -- slot of a parameter that no module owns -> the set that has this parameter

local function set_of(p)
  if p.owner then return rawget(p.owner, "_set") end
  return loose[tonumber(p.tensor.slot)]
end

-- Returns the set of these parameters: the set that an earlier optimizer made for them, or a new
-- one. The modules hold the set, so the weights outlive the optimizer, and a later optimizer can
-- use the same set. `loose` holds the sets of tensors without a module.
local function parameter_set(list)
  local n, found = #list, set_of(list[1])
  for i = 1, n do
    if found and not (set_of(list[i]) == found
      and found.slots[i] == tonumber(list[i].tensor.slot)) then
      found = nil
    end
  end
  if found and #found.slots == n then return found end
  local tensors, names, slots = M_ffi.new("eng_tensor[?]", n), M_ffi.new("const char *[?]", n), {}
  for i, p in ipairs(list) do
    tensors[i - 1], names[i - 1], slots[i] = p.tensor, p.name, tonumber(p.tensor.slot)
  end
  local out = M_ffi.new("eng_params *[1]")
  check(C.eng_params_new(out, tensors, names, n))
  local set = { params = ffi.gc(out[0], C.eng_params_free), slots = slots }
  for _, p in ipairs(list) do
    if p.owner then rawset(p.owner, "_set", set) else loose[tonumber(p.tensor.slot)] = set end
  end
  return set
end

--- Returns whether backward() computes the gradient of x.
function M.requires_grad(x) return arguments.info(x).requires_grad ~= 0 end

-- Gives the parameters the formats of the optimizer's recipe.
local function set_formats(self)
  local full = self.precision
  raise_if(full.masters ~= "f32" and KINDS[self.name].spec, "optim.%s: precision '%s' has bf16 " ..
    "masters, which only %s can update; hint: precision = 'bf16' has f32 masters", self.name,
    full.name, fused_state.names "and")
  local shadow, gradient, masters = precision.parameter_formats(full, self.list)
  check(C.eng_params_masters(self.params, masters))
  check(C.eng_params_precision(self.params, shadow, gradient))
end

-- Options of every optimizer, in addition to its hyperparameters.
local COMMON = arguments.set_of "groups decay precision moments"

local function new(name, model, options)
  local kind = KINDS[name]
  options = options or {}
  expect(type(options) == "table", options, "optim.%s: expected a table of options", name)
  local defaults = arguments.merged(kind.defaults)
  for key, value in pairs(options) do
    if key == "betas" and defaults.beta1 then
      raise_if(type(value) ~= "table" or #value ~= 2,
        "optim.%s: expected betas to be a list of two numbers, got %s", name,
        type(value) == "table" and "a list of " .. #value or M_ffi.value_text(value))
      defaults.beta1, defaults.beta2 = value[1], value[2]
    elseif defaults[key] ~= nil then defaults[key] = value
    elseif not COMMON[key] then
      raise("optim.%s: unknown option '%s'%s", name, tostring(key), nearest.choices(tostring(key),
        arguments.merged(defaults, COMMON), "options", not kind.own and
        "engine help optim." .. name or nil))
    end
  end
  local decay = options.decay
  expect(decay == nil or decay == "matrices" or decay == "all", decay,
    "optim.%s: expected decay to be 'all' or 'matrices'", name)
  raise_if(decay and defaults.weight_decay == nil,
    "optim.%s: the option decay needs an optimizer with weight_decay, and this one has none", name)
  check_hyper(name, defaults, "optim." .. name)

  local list = parameter_list(name, model)
  local full = precision.resolve(options.precision)
  raise_if(full.fp8 and not module.is_module(model), "optim.%s: precision '%s' quantizes linear " ..
    "layers and needs a module that has them, got a list of tensors", name, full.name)
  local moments = options.moments or full.moments
  expect(moments == "f32" or moments == "bf16", moments,
    "optim.%s: expected moments to be 'f32' or 'bf16'", name)
  local groups, group_of = make_groups(name, list, options, defaults)
  -- after the checks, because the model's layers lose the sites of an earlier optimizer
  local sites = module.is_module(model) and fp8_sites.attach(model, full, list) or nil
  local set = parameter_set(list)

  local self = setmetatable({
    name = name, list = list, groups = groups, updates = 0, lr = defaults.lr, precision = full,
    params = set.params, model = module.is_module(model) and model or nil, fp8 = sites,
    moments = moments, whole = kind.spec ~= nil,   -- whole: an update needs whole parameters
    traits = kind.traits or 0,                     -- ENG_SPIKE_CLIP and so on
    _record = M_ffi.new("eng_record"), _group_of = group_of, _clip = nil,
  }, Optimizer)
  set_formats(self)
  self.state = kind.spec and lua_state.new(self, kind.spec) or fused_state.new(self, kind)
  if self.state.set_rounding then self.state:set_rounding() end
  return self
end

--- engine.optim.adamw(model [, options]): makes an optimizer over the parameters of a module, or
--- over a list of tensors. Options of every optimizer: lr, weight_decay, precision (a recipe),
--- moments ("f32", "bf16"), groups, decay ("matrices": no weight decay on vectors that no group
--- matches). One update unscales and clips the gradients, and moves and rounds the weights. With
--- precision "bf16_stochastic" or "bf16_kahan" (fused optimizers) the weights are bf16 themselves,
--- without f32 masters (docs/numerics.md). In the list, the first value in parentheses after an
--- option is its default, and `fused` means that an update is one kernel of the core.
---   sgd      fused; more options: momentum (0), dampening (0), nesterov (false); lr 1e-2
---            dampening begins once a tensor's momentum is not all zeros (torch.optim.SGD: from the
---            tensor's second update on)
---   adam     fused; more options: beta1 (0.9), beta2 (0.999), eps (1e-8); weight decay is added to
---            the gradient; lr 1e-3
---   adamw    fused; as adam, with decoupled weight decay (1e-2); lr 1e-3
---   lion     fused; more options: beta1 (0.9), beta2 (0.99); the weights move by the sign of a
---            mean of moment and gradient; lr 1e-4
---   muon     for matrices. AdamW updates embeddings, groups with adamw = true and all tensors that
---            are not matrices, at the rate lr * adamw_lr_mul (1). More options: momentum (0.95),
---            nesterov (true), adjust_lr ("original"; or "match_rms_adamw", "spectral_unclamped",
---            "none"), ns_steps (5), ns_dtype ("bf16"; or "f32"), ns_a, ns_b, ns_c, ns_eps; beta1,
---            beta2, eps of AdamW; weight decay 0.1; lr 1e-3
---   adafactor  more options: beta2_decay (-0.8), eps1 (2^-23), eps2 (1e-3), d (1); the rate is
---            min(lr, 1/sqrt(t)) times the RMS of the weights, at least eps2; lr 1e-2
---   coat     as adamw, with moments in FP8, whose range is expanded separately in each group of
---            128 elements (COAT): 2.2 bytes of state an element
---   stableadamw  as adamw, with beta2 0.99 and eps 1e-6; divides a tensor's rate by the RMS of
---            gradient / sqrt(second moment) if that RMS is above 1; lr 1e-3
---   lamb     Adam's step without bias correction, times norm(weights) / norm(step) of the tensor;
---            eps 1e-6; more options: limit (10), the largest weight norm in that ratio; lr 1e-3
for name in pairs(KINDS) do
  M[name] = function(model, options) return new(name, model, options) end
end

--- engine.optim.register(name, spec): registers an optimizer written in Lua, which scripts then
--- call as engine.optim.NAME(model, options). docs/write-an-optimizer.md has examples. Fields of
--- spec:
---   doc         one line about the optimizer, which tostring shows
---   defaults    hyperparameters with their defaults: numbers, booleans or strings. lr is
---               required. The options of every optimizer (groups, precision, moments, and decay
---               with a weight_decay) cannot be entries here
---   buffers     the tensors that update keeps for each parameter. They begin as zeros. A plain
---               name in the list makes an f32 tensor of the parameter's shape (bf16 with moments =
---               "bf16"). name = function(shape, p, options) chooses the shape: the function
---               returns `shape` itself, another shape (then f32, whatever `moments` is), or nil if
---               p needs no such buffer. p has the fields p.name and p.role; options has the
---               hyperparameters of p's group. name = { shape = function, dtype = "e4m3" } also
---               chooses the format: f32, bf16, e4m3 or e5m2
---   update      function(p, ctx): one update of one parameter. p.weight (the f32 master) and
---               p.grad (f32, unscaled and clipped) are tensors, and so is every buffer, as
---               p.NAME. Assign new values to p.weight and the buffers, or write in place. ctx.t is
---               the number of the update, from 1; ctx.lr is the rate with schedule and lr_mul; ctx
---               has every other hyperparameter by its name
---   check       function(values): returns text about what is wrong with the hyperparameters, or
---               nil
--- A parameter without a gradient is not updated. A skipped step calls no update. Checkpoints hold
--- the buffers. With ZeRO each rank updates whole parameters.
function M.register(name, spec)
  local read = optim_register.read(name, spec)
  raise_if(rawget(M, name) and not (KINDS[name] and KINDS[name].own),
    "optim.register: engine.optim.%s exists already; hint: another name", name)
  KINDS[name] = { spec = read, defaults = read.defaults, own = true }
  M[name] = function(model, options) return new(name, model, options) end
end

--- Gives the parameters the formats of a precision recipe. Clears the gradients. If the recipe has
--- the formats of the present one, nothing changes: the optimizer keeps the present recipe and the
--- gradients. During the run of a trainer, call set_precision between two steps (in a session, at
--- the start of a turn): later forward and backward passes use the new recipe too. The policy
--- stays; trainer.policy:swap("dynamic") changes it. A run cannot change its FP8 layers in this
--- way.
function Optimizer:set_precision(recipe)
  local full = precision.resolve(recipe)
  raise_if(full.moments ~= self.precision.moments, "precision '%s' has moments in %s, but this " ..
    "optimizer was made with moments in %s; hint: engine.optim.%s(model, { precision = .. })",
    full.name, full.moments, self.precision.moments, self.name)
  raise_if(full.fp8 and not self.model, "precision '%s' quantizes linear layers and needs a " ..
    "module that has them, but this optimizer was made from a list of tensors", full.name)
  local before = self.precision
  local other = full.masters ~= before.masters or full.rounding ~= before.rounding
  raise_if(other and self.updates > 0, "precision '%s': the masters of this optimizer have had " ..
    "updates in %s (rounding %s) and cannot change to %s (rounding %s); hint: " ..
    "engine.optim.%s(model, { precision = .. })", full.name, before.masters, before.rounding,
    full.masters, full.rounding, self.name)
  if not other and precision.same(full, before) then return end
  local fp8, sites = self.fp8, {}
  if self.model then
    self.model:apply(function(m) sites[m] = { rawget(m, "_fp8"), rawget(m, "_fp8_site") } end)
  end
  self.precision = full
  local good, message = pcall(function()
    self.fp8 = self.model and fp8_sites.attach(self.model, full, self.list) or nil
    set_formats(self)
    if other then self.state:set_rounding() end
  end)
  if good then return end
  self.precision, self.fp8 = before, fp8
  for m, site in pairs(sites) do
    rawset(m, "_fp8", site[1])
    rawset(m, "_fp8_site", site[2])
  end
  error(message, 0)
end

--- Sets whether the gradients of several backward passes add up before a step (as in a trainer with
--- accumulate > 1). If so, fp16 and bf16 gradients are rounded to their format in every pass (and
--- can overflow there), and are summed in f32, as PyTorch's autocast does. Each element of a
--- gradient then takes 4 bytes instead of 2. The call clears the gradients.
function Optimizer:accumulates(on)
  check(C.eng_params_accumulate(self.params, on))
  self._accumulates = on
end

--- Clears all gradients, and the limits of clip_grad_norm and clip_grad_value.
function Optimizer:zero_grad()
  self._clip, self._clip_value = nil, nil
  check(C.eng_params_zero_grad(self.params))
end

--- Returns the norm over all finite gradient elements, divided by `scale` (by default 1).
function Optimizer:grad_norm(scale)
  check(C.eng_params_stats(self._record, nil, self.params, scale or 1, C.ENG_NEED_NORM))
  return self._record.norm
end

local function want_limit(name, limit)
  expect(type(limit) == "number" and limit > 0, limit, "%s: expected a limit > 0", name)
end

--- Limits the global norm of the gradients at the next step(), and returns the norm. The clipping
--- happens inside the update.
function Optimizer:clip_grad_norm(limit)
  want_limit("clip_grad_norm", limit)
  local norm = self:grad_norm()
  self._clip, self._clip_norm = limit, norm
  return norm
end

--- Limits every gradient element to +-limit at the next step().
function Optimizer:clip_grad_value(limit)
  want_limit("clip_grad_value", limit)
  self._clip_value = limit
end

local STEP = { gradient_factor = "number", clip_value = "number", lr_mul = "number",
  lagged = "boolean", clip_norm = "number", norm = "number", clips = "cdata", lr_muls = "cdata",
  norms = "cdata", update_clip = "number", spike_clip = "number", bias_step = "number" }
local EXPECTED = { number = "a number", boolean = "true or false",
  cdata = "an array of doubles, one for each parameter" }

--- Makes one update. options: gradient_factor (multiplies the gradients, by default by 1; 1/scale
--- unscales them), clip_value (the limit of each gradient element), lr_mul (multiplies the rate),
--- clip_norm (the limit for `norm`), norm (the gradients' norm after gradient_factor), lagged
--- (the device takes the norm from the statistics that were requested last, and makes no update if
--- a gradient is inf or nan). A limit set by clip_grad_norm replaces clip_norm. The other options
--- are for the trainer: clips (an array with a factor on each parameter's gradient), lr_muls (an
--- array with a factor on each parameter's rate), bias_step (the number of the update for bias
--- corrections) and, for fused optimizers, norms, update_clip and spike_clip (eng_update).
function Optimizer:step(options)
  options = tensor.read_named(options, "step", STEP)
  for name, value in pairs(options) do
    local kind = STEP[name]
    expect(type(value) == kind and (kind ~= "cdata" or pcall(ffi.cast, "const double *", value)),
      value, "step: expected %s to be %s", name, EXPECTED[kind])
  end
  expect(type(self.lr) == "number" and self.lr >= 0 and self.lr < math.huge, self.lr,
    "optim.%s: expected lr to be a finite number >= 0", self.name)
  local update = arguments.merged({ gradient_factor = 1, clip_value = self._clip_value or 0,
    clip_norm = 0, norm = 0 }, options)
  if self._clip then update.clip_norm, update.norm = self._clip, self._clip_norm end
  self.state:update(self.lr * (options.lr_mul or 1), update)
  self.updates = self.updates + 1
  self._clip, self._clip_value = nil, nil
end

--- Returns the moments or buffers, for checkpoints: { ["name.moment1"] = tensor }, and the averages
--- of weights that an FP8 recipe keeps (Q-EMA). The tensors share the optimizer's memory. With
--- `torn`, raises no error after an update that failed halfway.
function Optimizer:state_tensors(torn)
  local tensors = self.fp8 and self.fp8.averages:tensors() or {}
  for i in ipairs(self.list) do
    for _, buffer in ipairs(self.state:of(i, nil, torn)) do tensors[buffer.name] = buffer.x end
  end
  return tensors
end

--- Sets the moments or buffers of one parameter, or of all parameters, to 0. index: the parameter's
--- position in the list, from 1, or nil for all. The number of updates, which bias corrections
--- read, does not change.
function Optimizer:reset_moments(index)
  for i = index or 1, index or #self.list do
    for _, buffer in ipairs(self.state:of(i)) do
      if buffer.x then buffer.x:zero() end
    end
  end
end

--- Restores the moments or buffers and the number of updates. If they do not fit, raises an error
--- before anything changes.
function Optimizer:load_state(tensors, updates)
  expect(type(tensors) == "table", tensors, "optimizer state: expected a table { name = tensor }")
  arguments.want_whole(updates, "optimizer state", "the number of updates", 0)
  local own, names = self:state_tensors(true), {}
  for name, target in pairs(own) do
    names[#names + 1] = name
    local source = tensors[name]
      or raise("optimizer state: expected a tensor '%s', got none; hint: the state may be of " ..
        "another optimizer or another model", name)
    if tensor.shape_text(source.shape) ~= tensor.shape_text(target.shape) then
      raise("optimizer state: expected '%s' to have shape %s, got %s", name,
        tensor.shape_text(target.shape), tensor.shape_text(source.shape))
    end
  end
  for name in pairs(tensors) do
    if not own[name] then
      local hint = nearest.hint(tostring(name), names)
      raise("optimizer state: this optimizer has no tensor '%s'%s", tostring(name), hint ~= ""
        and hint or "; hint: the state may be of another optimizer or another model")
    end
  end
  for name, target in pairs(own) do target:copy(tensors[name]) end
  self.state:restart()
  self.updates = updates
  if self.fp8 then self.fp8.averages:start() end
end

--- Returns the memory that training takes, by role (memory.lua). loss: a function that returns a
--- loss, to include what the tape keeps; or nil.
function Optimizer:memory(loss) return require("engine.train.memory").new(self, loss) end

function Optimizer:__tostring()
  local lines = { ("%s: %s, %s elements, %s, lr %g, precision %s"):format(self.name,
    show.counted(#self.list, "parameter"), tostring(tonumber(C.eng_params_count(self.params))),
    show.counted(self.updates, "update"), self.lr, self.precision.name) }
  local spec = KINDS[self.name].spec
  lines[2] = spec and spec.doc and "  " .. spec.doc or nil
  local counts = {}
  for i = 0, #self.list - 1 do counts[self._group_of[i]] = (counts[self._group_of[i]] or 0) + 1 end
  for i, group in ipairs(self.groups) do
    local parts = { group.lr_mul ~= 1 and ("lr_mul %g"):format(group.lr_mul) or nil }
    for _, key in ipairs(nearest.keys(KINDS[self.name].defaults)) do
      local value = group[key]
      if value ~= nil and key ~= "lr" then
        parts[#parts + 1] = key .. " " .. (type(value) == "number" and ("%g"):format(value)
          or tostring(value))
      end
    end
    if counts[i - 1] then
      lines[#lines + 1] = ("  %s: %s, %s"):format(group.label,
        show.counted(counts[i - 1], "tensor"), table.concat(parts, ", "))
    end
  end
  return table.concat(lines, "\n")
end

return nearest.guard(M, "engine.optim")
