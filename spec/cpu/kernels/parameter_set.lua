-- For specs: a parameter set and an optimizer over it, driven only through public functions.
--   local set = parameter_set.new({ { 3, 5 }, { 7 } }, { gradient = "f16", shadow = "f16" })
--   set:write_gradients { {..15 numbers..}, {..7 numbers..} }     set:stats(scale, needs)
-- Use it inside a step only (parameter_set.step), because gradients are tensors of the step.
local compare = require "spec.cpu.kernels.compare"
local arguments = require "engine.base.arguments"
local engine = require "engine.base.ffi"
local fused_state = require "engine.train.fused_state"
local ffi, C, check = engine.ffi, engine.C, engine.check

local M = {}
local Set = {}
Set.__index = Set

M.SETS = compare.SETS

--- A test body inside a step.
function M.step(f)
  return function()
    check(C.eng_step_begin())
    local done, message = pcall(f)
    check(C.eng_step_end())
    if not done then error(message, 0) end
  end
end

--- Runs f(device, threads) on the reference and on every instruction set with one and with three
--- threads.
function M.everywhere(f)
  local function on(device, set, threads)
    check(C.eng_device_set(device))
    if set and #M.SETS > 1 then C.eng_cpu_isa(set) end
    C.eng_threads(threads)
    local done, message = pcall(f, set or device, threads)
    C.eng_threads(compare.THREADS)
    if set and #M.SETS > 1 then C.eng_cpu_isa(M.SETS[1]) end
    check(C.eng_device_set("cpu"))
    if not done then
      error(("%s with %d threads: %s"):format(set or device, threads, tostring(message)), 0)
    end
  end
  on("reference", nil, 1)
  if compare.CARD then
    on(compare.CARD, nil, 1)
    on(compare.CARD, nil, 2)   -- must repeat the first call's bits
    return
  end
  for _, set in ipairs(M.SETS) do
    on("cpu", set, 1)
    on("cpu", set, 3)
  end
end

local function count_of(shape)
  local count = 1
  for _, size in ipairs(shape) do count = count * size end
  return count
end
M.count_of = count_of

local function kept(shape)
  local x = ffi.new("eng_tensor[1]")
  check(C.eng_new(x, engine.dtype.f32, #shape, ffi.new("int64_t[?]", math.max(#shape, 1), shape),
    true))
  check(C.eng_requires_grad(x, true))
  return x
end
M.kept = kept

--- Wraps tensors (eng_tensor[1] each) into a set. Returns nil and the message if the core refuses.
function M.wrap(leaves, names)
  local n = #leaves
  local handles, texts = ffi.new("eng_tensor[?]", math.max(n, 1)),
    ffi.new("const char *[?]", math.max(n, 1))
  for i, leaf in ipairs(leaves) do
    handles[i - 1] = leaf[0]
    texts[i - 1] = names[i]
  end
  local out = ffi.new("eng_params *[1]")
  if C.eng_params_new(out, handles, texts, n) ~= 0 then return nil, engine.message() end
  return setmetatable({ params = out[0], leaf = leaves, names = names, n = n }, Set)
end

--- A set of new parameters of these shapes. options: gradient, shadow and master, each the name of
--- a format or a list with one for each parameter.
function M.new(shapes, options)
  options = options or {}
  local leaves, names = {}, {}
  for i, shape in ipairs(shapes) do leaves[i], names[i] = kept(shape), "p" .. i end
  local set = assert(M.wrap(leaves, names))
  set.shapes = shapes
  if options.master then set:masters(options.master) end
  set:precision(options.shadow, options.gradient)
  return set
end

function Set:masters(format)
  local masters = ffi.new("int32_t[?]", math.max(self.n, 1))
  for i = 1, self.n do
    masters[i - 1] = engine.dtype[type(format) == "table" and format[i] or format]
  end
  return check(C.eng_params_masters(self.params, masters))
end

function Set:precision(shadow, gradient)
  local shadows, gradients = ffi.new("int32_t[?]", math.max(self.n, 1)),
    ffi.new("int32_t[?]", math.max(self.n, 1))
  for i = 1, self.n do
    shadows[i - 1] = engine.dtype[type(shadow) == "table" and shadow[i] or shadow or "f32"]
    gradients[i - 1] = engine.dtype[type(gradient) == "table" and gradient[i] or gradient or "f32"]
  end
  return check(C.eng_params_precision(self.params, shadows, gradients))
end

local function write(x, values, format)
  if type(values) == "table" then
    values, format = ffi.new("double[?]", math.max(#values, 1), values), "f64"
  end
  local info = ffi.new("eng_tensor_info")
  check(C.eng_info(info, x))
  check(C.eng_write(x, values, engine.dtype[format], info.count))
end

local function read(x)
  local info = ffi.new("eng_tensor_info")
  check(C.eng_info(info, x))
  local n = tonumber(info.count)
  local values, list = ffi.new("double[?]", math.max(n, 1)), {}
  check(C.eng_read(values, engine.dtype.f64, n, x))
  for i = 1, n do list[i] = values[i - 1] end
  return list, engine.dtype_name[info.dtype]
end
M.write, M.read = write, read

function Set:write_weights(i, values, format) write(self.leaf[i], values, format) end
function Set:weights(i) return read(self.leaf[i]) end

--- The gradient of parameter i as a tensor, or nil.
function Set:gradient(i)
  local x = ffi.new("eng_tensor[1]")
  check(C.eng_gradient(x, self.leaf[i]))
  return x[0].slot ~= 0 and x or nil
end

--- Gives each parameter a gradient: a backward pass creates it, then the numbers of its entry in
--- `lists` (a list, or an array with `format`) overwrite it. A parameter whose entry is false gets
--- no gradient.
function Set:write_gradients(lists, format)
  check(C.eng_params_zero_grad(self.params))
  local total
  for i = 1, self.n do
    if lists[i] then
      local sum = engine.run("sum", { engine.Tensor(self.leaf[i][0]) },
        { 2 ^ #self.shapes[i] - 1, 0 })
      total = total and engine.run("add", { total, sum }) or sum
    end
  end
  if total then check(C.eng_backward(total, 1, false)) end
  for i = 1, self.n do
    if lists[i] then write(self:gradient(i), lists[i], format) end
  end
end

--- The record, and the statistics of each tensor (from 0).
function Set:stats(scale, needs)
  local record, stats = ffi.new("eng_record"), ffi.new("eng_tensor_stats[?]", math.max(self.n, 1))
  check(C.eng_params_stats(record, stats, self.params, scale or 1, needs or C.ENG_NEED_GRADIENTS))
  return record, stats
end

function Set:unscale(factor)
  local found = ffi.new("int[1]")
  check(C.eng_params_unscale(found, self.params, factor))
  return found[0] ~= 0
end

function Set:zero_grad() check(C.eng_params_zero_grad(self.params)) end
function Set:checksum() return C.eng_params_checksum_of(self.params, nil, 0) end

function Set:free()
  if self.state then C.eng_optimizer_free(self.state) end
  C.eng_params_free(self.params)
  self.params, self.state = nil, nil
end

-- ------------------------------------------------------------------ optimizer

--- The fused optimizers: the fields of fused_state.kinds, and `hyper`, hyperparameters with which
--- every term of the formula counts. As a list and by name.
M.KINDS = {}
for i, row in ipairs(fused_state.kinds) do
  local kind = arguments.merged(row, { hyper = arguments.merged(row.defaults,
    { weight_decay = 0.1, momentum = row.defaults.momentum and 0.9 }) })
  M.KINDS[i], M.KINDS[row.name] = kind, kind
end

--- kind: a name, or a number.
function Set:optimizer(kind, moments, group_of)
  kind = M.KINDS[kind] and type(kind) == "string" and M.KINDS[kind].kind or kind
  local groups = ffi.new("int32_t[?]", math.max(self.n, 1))
  for i = 1, self.n do groups[i - 1] = group_of and group_of[i] or 0 end
  local out = ffi.new("eng_optimizer *[1]")
  check(C.eng_optimizer_new(out, self.params, kind, engine.dtype[moments or "f32"], groups))
  self.state, self.kind = out[0], kind
end

--- Makes an update. options: hyper (one table of hyperparameters, or a list of them), t, factor,
--- clip, kind, lagged, clip_norm; norms (an array that receives the sums of squares), update_clip,
--- spike_clip, clips.
function Set:update(options)
  local list = #options.hyper > 0 and options.hyper or { options.hyper }
  local groups = ffi.new("eng_hyper[?]", #list)
  for i, hyper in ipairs(list) do groups[i - 1] = hyper end
  check(C.eng_optimizer_step(self.state, ffi.new("eng_update", {
    kind = options.kind or self.kind, n_groups = #list, groups = groups,
    gradient_factor = options.factor or 1, clip_value = options.clip or 0, t = options.t or 1,
    lagged = options.lagged and 1 or 0, clip_norm = options.clip_norm or 0,
    norms = options.norms, update_clip = options.update_clip or 0, clips = options.clips,
    spike_clip = options.spike_clip or 0, draw = options.draw or options.t or 1 })))
end

local ROUNDING = { nearest = C.ENG_ROUND_NEAREST, stochastic = C.ENG_ROUND_STOCHASTIC,
  kahan = C.ENG_ROUND_KAHAN }
function Set:rounding(name) check(C.eng_optimizer_rounding(self.state, ROUNDING[name] or name)) end

--- A moment as an eng_tensor[1], or nil if the optimizer has none.
function Set:moment(which, i)
  local x = ffi.new("eng_tensor[1]")
  check(C.eng_optimizer_moment(x, self.state, which, i - 1))
  return x[0].slot ~= 0 and x or nil
end

return M
