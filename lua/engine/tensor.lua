-- Tensors in Lua: a small cdata {slot, generation} with the operations as methods. Nothing here holds
-- memory; a tensor made inside a step is gone at its end unless :keep() copies it.
--
-- Counting follows Lua: dimensions and positions from 1, ranges inclusive, negative from the end
-- (dimension -1 is the last). The numbers inside index tensors (token ids, classes) are data and count from 0.
local M_ffi = require "engine.ffi"
local nearest = require "engine.nearest"

local ffi, C, check = M_ffi.ffi, M_ffi.C, M_ffi.check
local op, call, run_call, Tensor = M_ffi.op, M_ffi.call, M_ffi.run_call, M_ffi.Tensor
local dtype_number, dtype_name = M_ffi.dtype_number, M_ffi.dtype_name
local inputs, ints, floats = call["in"], call.ints, call.floats
local NONE = Tensor(0, 0)
local huge = math.huge
local AUTO, KEEP, STEP = C.ENG_AUTO, C.ENG_KEEP, C.ENG_STEP

local M = { Tensor = Tensor }
local methods, getters = {}, {}
local info_buffer = ffi.new("eng_tensor_info")

local function is_tensor(x)
  return ffi.istype(Tensor, x)
end
M.is_tensor = is_tensor

local function info(x, level)
  check(C.eng_info(info_buffer, x), (level or 1) + 1)
  return info_buffer
end

-- ------------------------------------------------------------------ calling operations

local function want(x, name, level)
  if not is_tensor(x) then
    error(("%s: expected a tensor, got %s"):format(name, type(x) == "nil" and "nothing" or type(x)), (level or 2) + 1)
  end
end

local function run1(name, a, level)
  want(a, name, (level or 2) + 1)
  call.op, call.n_in, call.n_out, inputs[0] = op[name], 1, 1, a
  return run_call((level or 2) + 1)
end

local function run2(name, a, b, level)
  want(a, name, (level or 2) + 1)
  want(b, name, (level or 2) + 1)
  call.op, call.n_in, call.n_out, inputs[0], inputs[1] = op[name], 2, 1, a, b
  return run_call((level or 2) + 1)
end

-- ------------------------------------------------------------------ making tensors

local shape_buffer = ffi.new("int64_t[6]")

--- Shape arguments: new(2, 3), new{2, 3} -> count of dimensions, in shape_buffer; what follows the shape.
local function read_shape(name, level, first, ...)
  local list, rest
  if type(first) == "table" then
    list, rest = first, { ... }
  else
    list, rest = {}, {}
    for i, v in ipairs { first, ... } do
      if type(v) == "number" then list[i] = v else rest[#rest + 1] = v end
    end
  end
  if #list > C.ENG_MAX_DIMS then error(("%s: expected up to %d dimensions, got %d"):format(name, tonumber(C.ENG_MAX_DIMS), #list), level + 1) end
  for i, v in ipairs(list) do
    if type(v) ~= "number" or v % 1 ~= 0 or v < 0 then
      error(("%s: a dimension must be a whole number of 0 or more, got %s"):format(name, tostring(v)), level + 1)
    end
    shape_buffer[i - 1] = v
  end
  return #list, rest[1]
end

--- options: a dtype name, or { dtype =, keep =, requires_grad = }
local function read_options(name, options, level)
  if options == nil then return M_ffi.dtype.f32, false, false end
  if type(options) == "string" then return dtype_number(options, level + 1), false, false end
  if type(options) ~= "table" then error(("%s: expected options as a dtype name or a table, got %s"):format(name, type(options)), level + 1) end
  for key in pairs(options) do
    if key ~= "dtype" and key ~= "keep" and key ~= "requires_grad" then
      error(("%s: unknown option '%s'; options: dtype keep requires_grad"):format(name, tostring(key)), level + 1)
    end
  end
  return dtype_number(options.dtype or "f32", level + 1), options.keep or false, options.requires_grad or false
end

local function make(name, ndim, options, level)
  local dtype, keep, requires_grad = read_options(name, options, level + 1)
  local x = Tensor()
  check(C.eng_new(x, dtype, ndim, shape_buffer, keep and KEEP or AUTO), level + 1)
  if requires_grad then check(C.eng_requires_grad(x, true), level + 1) end
  return x
end

--- engine.zeros(2, 3 [, "f16" | {dtype=, keep=, requires_grad=}]); the others likewise.
function M.zeros(...)
  local ndim, options = read_shape("zeros", 2, ...)
  return make("zeros", ndim, options, 2)
end

function M.ones(...)
  local ndim, options = read_shape("ones", 2, ...)
  local x = make("ones", ndim, options, 2)
  check(C.eng_fill(x, 1))
  return x
end

--- engine.full({2, 3}, 7)
function M.full(shape, value, options)
  local ndim = read_shape("full", 2, shape)
  local x = make("full", ndim, options, 2)
  check(C.eng_fill(x, value))
  return x
end

--- Uniform in [0, 1), from the engine's generator.
function M.rand(...)
  local ndim, options = read_shape("rand", 2, ...)
  local x = make("rand", ndim, options, 2)
  check(C.eng_uniform(x, 0, 1))
  return x
end

--- Normal with mean 0 and standard deviation 1.
function M.randn(...)
  local ndim, options = read_shape("randn", 2, ...)
  local x = make("randn", ndim, options, 2)
  check(C.eng_normal(x, 0, 1))
  return x
end

--- Whole numbers low, low+1, ... high-1 drawn uniformly, i64.
function M.randint(low, high, ...)
  local ndim, options = read_shape("randint", 2, ...)
  local x = make("randint", ndim, options or "i64", 2)
  local count = tonumber(info(x).count)
  local values = ffi.new("double[?]", count)
  local draw = Tensor()
  shape_buffer[0] = count
  check(C.eng_new(draw, M_ffi.dtype.f64, 1, shape_buffer, STEP))
  check(C.eng_uniform(draw, low, high))
  check(C.eng_read(values, M_ffi.dtype.f64, count, draw))
  for i = 0, count - 1 do values[i] = math.floor(values[i]) end
  check(C.eng_write(x, values, M_ffi.dtype.f64, count))
  return x
end

--- start, start+step, ... up to and including stop (as Lua's for); i64 unless options say otherwise.
function M.arange(start, stop, step, options)
  step = step or 1
  if step == 0 then error("arange: expected a step that is not 0", 2) end
  local count = math.max(0, math.floor((stop - start) / step + 1e-9) + 1)
  shape_buffer[0] = count
  local x = make("arange", 1, options or "i64", 2)
  local values = ffi.new("double[?]", count)
  for i = 0, count - 1 do values[i] = start + i * step end
  check(C.eng_write(x, values, M_ffi.dtype.f64, count))
  return x
end

local function table_shape(value, shape, depth)
  if type(value) ~= "table" then return end
  if shape[depth] == nil then shape[depth] = #value end
  if #value > 0 then table_shape(value[1], shape, depth + 1) end
end

local function flatten(value, shape, depth, out, at, name)
  if depth > #shape then
    if type(value) == "boolean" then value = value and 1 or 0 end
    if type(value) ~= "number" then error(("%s: expected numbers, got %s"):format(name, type(value)), 0) end
    out[at] = value
    return at + 1
  end
  if type(value) ~= "table" or #value ~= shape[depth] then
    error(("%s: the table is ragged: expected %d entries at depth %d, got %s"):format(name, shape[depth], depth,
      type(value) == "table" and tostring(#value) or type(value)), 0)
  end
  for i = 1, #value do at = flatten(value[i], shape, depth + 1, out, at, name) end
  return at
end

--- engine.tensor{{1, 2}, {3, 4}} or engine.tensor(5); options as above.
function M.tensor(value, options)
  local shape, count = {}, 1
  table_shape(value, shape, 1)
  for i, n in ipairs(shape) do count = count * n; if i <= 6 then shape_buffer[i - 1] = n end end
  if #shape > 6 then error("tensor: expected up to 6 dimensions", 2) end
  local values = ffi.new("double[?]", math.max(count, 1))
  local good, message = pcall(flatten, value, shape, 1, values, 0, "tensor")
  if not good then error(message, 2) end
  local x = make("tensor", #shape, options, 2)
  check(C.eng_write(x, values, M_ffi.dtype.f64, count))
  return x
end

--- A tensor of `dtype` and `shape` filled from memory (a cdata pointer) in format `from`.
function M.from_memory(pointer, from, shape, options)
  local ndim = read_shape("from_memory", 2, shape)
  local x = make("from_memory", ndim, options or from, 2)
  check(C.eng_write(x, pointer, dtype_number(from), info(x).count))
  return x
end

-- ------------------------------------------------------------------ what a tensor is

local function shape_table(what)
  local shape = {}
  for d = 0, what.ndim - 1 do shape[d + 1] = tonumber(what.shape[d]) end
  return shape
end

function getters.shape(x) return shape_table(info(x, 3)) end
function getters.ndim(x) return info(x, 3).ndim end
function getters.count(x) return tonumber(info(x, 3).count) end
function getters.dtype(x) return dtype_name[info(x, 3).dtype] end
function getters.is_leaf(x) return info(x, 3).is_leaf ~= 0 end
function getters.device() return M_ffi.string(C.eng_device_name()) end
--- The gradient after backward(), or nil.
function getters.grad(x)
  local g = Tensor()
  check(C.eng_gradient(g, x), 3)
  if g.slot ~= 0 then return g end
end

--- shape as text, "[64 x 768]"
function M.shape_text(shape)
  return "[" .. table.concat(shape, " x ") .. "]"
end

--- Size of dimension d, or all sizes.
function methods.size(x, d)
  local what = info(x)
  if d == nil then
    local sizes = shape_table(what)
    return unpack(sizes)
  end
  local k = d < 0 and d + what.ndim or d - 1
  if k < 0 or k >= what.ndim then error(("size: there is no dimension %d in %s"):format(d, M.shape_text(shape_table(what))), 2) end
  return tonumber(what.shape[k])
end

function methods.is_contiguous(x) return info(x).contiguous ~= 0 end

--- The value of a tensor with one element.
local item_buffer = ffi.new("double[1]")
function methods.item(x)
  check(C.eng_item(item_buffer, x))
  return item_buffer[0]
end

local function nest(values, shape, depth, at)
  if depth > #shape then return values[at], at + 1 end
  local list = {}
  for i = 1, shape[depth] do list[i], at = nest(values, shape, depth + 1, at) end
  return list, at
end

--- All elements as nested tables of numbers.
function methods.totable(x)
  local what = info(x)
  local shape, count = shape_table(what), tonumber(what.count)
  local values = ffi.new("double[?]", math.max(count, 1))
  check(C.eng_read(values, M_ffi.dtype.f64, count, x))
  return (nest(values, shape, 1, 0))
end

--- Calls f with a pointer to the elements, row-major, in the tensor's own dtype, and their count; read only.
function methods.read(x, dtype)
  local what = info(x)
  local count, number = tonumber(what.count), dtype and dtype_number(dtype) or what.dtype
  local ctype = ({ f32 = "float", f64 = "double", f16 = "uint16_t", bf16 = "uint16_t", u8 = "uint8_t", i8 = "int8_t", i16 = "int16_t",
    i32 = "int32_t", i64 = "int64_t", bool = "uint8_t" })[dtype_name[number]]
  local values = ffi.new(ctype .. "[?]", math.max(count, 1))
  check(C.eng_read(values, number, count, x))
  return values, count
end

--- A copy that outlives the step; it is a leaf.
function methods.keep(x)
  local y = Tensor()
  check(C.eng_keep(y, x))
  return y
end

--- Frees a kept tensor.
function methods.free(x) check(C.eng_free(x)) end

function methods.requires_grad(x, on)
  check(C.eng_requires_grad(x, on == nil and true or on))
  return x
end

--- The same values, cut from the tape.
function methods.detach(x)
  local before = C.eng_grad_enabled(false)
  local y = methods.view(x, info(x).ndim == 0 and {} or shape_table(info_buffer))
  C.eng_grad_enabled(before)
  return y
end

--- In place, not recorded: fill, copy from another tensor or nested table, random numbers.
function methods.fill(x, value) check(C.eng_fill(x, value)); return x end
function methods.zero(x) check(C.eng_fill(x, 0)); return x end
function methods.copy(x, source)
  if not is_tensor(source) then source = M.tensor(source, dtype_name[info(x).dtype]) end
  check(C.eng_copy(x, source))
  return x
end
function methods.uniform(x, low, high) check(C.eng_uniform(x, low or 0, high or 1)); return x end
function methods.normal(x, mean, std) check(C.eng_normal(x, mean or 0, std or 1)); return x end

-- ------------------------------------------------------------------ elementwise operations

local function affine(x, factor, term, level)
  floats[0], floats[1] = factor, term
  return run1("affine", x, (level or 2) + 1)
end

local function scalar_like(x, value)
  local y = Tensor()
  local dtype = info(x, 3).dtype
  if value % 1 ~= 0 and dtype ~= M_ffi.dtype.f64 and dtype ~= M_ffi.dtype.f16 and dtype ~= M_ffi.dtype.bf16 then dtype = M_ffi.dtype.f32 end
  check(C.eng_new(y, dtype, 0, shape_buffer, STEP), 3)
  check(C.eng_fill(y, value), 3)
  return y
end

--- Both sides as tensors; a number becomes a scalar tensor of the other side's dtype.
local function pair(name, a, b, level)
  if type(b) == "number" then b = scalar_like(a, b)
  elseif type(a) == "number" then a = scalar_like(b, a) end
  return run2(name, a, b, (level or 2) + 1)
end

local function is_integer(x)
  local d = info(x, 3).dtype
  return d ~= M_ffi.dtype.f32 and d ~= M_ffi.dtype.f64 and d ~= M_ffi.dtype.f16 and d ~= M_ffi.dtype.bf16
end

local function add(a, b, level)
  level = (level or 2) + 1
  if type(b) == "number" and not is_integer(a) then return affine(a, 1, b, level) end
  if type(a) == "number" and not is_integer(b) then return affine(b, 1, a, level) end
  return pair("add", a, b, level)
end
local function sub(a, b, level)
  level = (level or 2) + 1
  if type(b) == "number" and not is_integer(a) then return affine(a, 1, -b, level) end
  if type(a) == "number" and not is_integer(b) then return affine(b, -1, a, level) end
  return pair("sub", a, b, level)
end
local function mul(a, b, level)
  level = (level or 2) + 1
  if type(b) == "number" and not is_integer(a) then return affine(a, b, 0, level) end
  if type(a) == "number" and not is_integer(b) then return affine(b, a, 0, level) end
  return pair("mul", a, b, level)
end
local function div(a, b, level)
  return pair("div", a, b, (level or 2) + 1)
end
local function pow(a, b, level)
  level = (level or 2) + 1
  if type(b) ~= "number" then return pair("pow", a, b, level) end
  floats[0], floats[1] = b, 0
  return run1("pow_scalar", a, level)
end

methods.add, methods.sub, methods.mul, methods.div, methods.pow = add, sub, mul, div, pow

for _, name in ipairs { "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge" } do
  methods[name] = function(a, b) return pair(name, a, b) end
end

for _, name in ipairs { "neg", "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "log_sigmoid", "softplus",
  "relu", "silu", "contiguous", "softmax", "log_softmax", "logsumexp" } do
  methods[name] = function(x) return run1(name, x) end
end

--- gelu(x) is the erf form, gelu(x, "tanh") the tanh form (GPT-2's).
function methods.gelu(x, form)
  if form ~= nil and form ~= "tanh" and form ~= "erf" then error(("gelu: expected 'erf' or 'tanh', got '%s'"):format(tostring(form)), 2) end
  return run1(form == "tanh" and "gelu_tanh" or "gelu", x)
end

function methods.square(x) return mul(x, x) end

--- silu(gate) * up
function methods.swiglu(gate, up) return run2("swiglu", gate, up) end

function methods.clamp(x, low, high)
  want(x, "clamp")
  floats[0], floats[1] = low or -huge, high or huge
  return run1("clamp", x)
end

--- condition:where(a, b): a where true, else b; a and b may be numbers.
function methods.where(condition, a, b)
  if type(a) == "number" and type(b) == "number" then a = M.full({}, a) end
  if type(a) == "number" then a = scalar_like(b, a) end
  if type(b) == "number" then b = scalar_like(a, b) end
  want(condition, "where"); want(a, "where"); want(b, "where")
  call.op, call.n_in, call.n_out, inputs[0], inputs[1], inputs[2] = op.where, 3, 1, condition, a, b
  return run_call()
end

--- Zeroes elements with probability p and scales the others by 1/(1-p).
function methods.dropout(x, p)
  want(x, "dropout")
  floats[0], ints[0], ints[1] = p, 0, 0
  return run1("dropout", x)
end

--- x in another dtype; x itself when it already has it.
function methods.to(x, dtype)
  local number = dtype_number(dtype, 2)
  if info(x).dtype == number then return x end
  ints[0] = number
  return run1("cast", x)
end

-- ------------------------------------------------------------------ views and joins

local function zero_based(d) return d > 0 and d - 1 or d end

local function shape_ints(name, level, ...)
  local list = type((...)) == "table" and (...) or { ... }
  if #list > 6 then error(("%s: expected up to 6 dimensions, got %d"):format(name, #list), level + 1) end
  ints[0] = #list
  for i, v in ipairs(list) do
    if type(v) ~= "number" or v % 1 ~= 0 then error(("%s: a dimension must be a whole number, got %s"):format(name, tostring(v)), level + 1) end
    ints[i] = v
  end
end

--- x:view(2, -1) or x:view{2, -1}: the same elements in a new shape; one dimension may be -1.
function methods.view(x, ...)
  want(x, "view")
  shape_ints("view", 2, ...)
  return run1("reshape", x)
end
methods.reshape = methods.view

--- x:permute(3, 1, 2): dimensions in a new order.
function methods.permute(x, ...)
  want(x, "permute")
  local n = info(x).ndim
  local order = type((...)) == "table" and (...) or { ... }
  if #order ~= n then error(("permute: expected %d dimensions, got %d"):format(n, #order), 2) end
  for i, d in ipairs(order) do ints[i - 1] = zero_based(d) end
  return run1("permute", x)
end

--- Swaps two dimensions; the last two by default.
function methods.transpose(x, a, b)
  want(x, "transpose")
  local n = info(x).ndim
  a, b = a or -2, b or -1
  a, b = a < 0 and a + n or a - 1, b < 0 and b + n or b - 1
  if a < 0 or b < 0 or a >= n or b >= n then error("transpose: there is no such dimension in " .. M.shape_text(shape_table(info(x))), 2) end
  for d = 0, n - 1 do ints[d] = d end
  ints[a], ints[b] = b, a
  return run1("permute", x)
end

function methods.expand(x, ...)
  want(x, "expand")
  shape_ints("expand", 2, ...)
  return run1("expand", x)
end

--- Positions start..stop of dimension d (inclusive, from 1, negative from the end), every step-th.
function methods.slice(x, d, start, stop, step)
  want(x, "slice")
  start, stop = start or 1, stop or -1
  ints[0], ints[1], ints[3] = zero_based(d), zero_based(start), step or 1
  if stop < 0 then
    local what = info(x)
    local k = d < 0 and d + what.ndim or d - 1
    if k >= 0 and k < what.ndim then stop = tonumber(what.shape[k]) + stop + 1 end
    stop = math.max(stop, 0)
  end
  ints[2] = stop
  return run1("slice", x)
end

--- Position i of dimension d, without that dimension.
function methods.select(x, d, i)
  want(x, "select")
  local shape = shape_table(info(x))
  local k = d < 0 and d + #shape + 1 or d
  local n = shape[k] or error(("select: there is no dimension %d in %s"):format(d, M.shape_text(shape)), 2)
  local at = i < 0 and i + n + 1 or i
  if at < 1 or at > n then error(("select: there is no position %d in dimension %d of %s"):format(i, d, M.shape_text(shape)), 2) end
  table.remove(shape, k)
  return methods.slice(x, k, at, at):view(shape)
end

--- Parts of the given sizes along d (a number: equal parts of that size), as several results.
function methods.split(x, sizes, d)
  want(x, "split")
  local shape = shape_table(info(x))
  local k = (d or -1) < 0 and (d or -1) + #shape + 1 or d
  local n = shape[k] or error(("split: there is no dimension %d in %s"):format(d or -1, M.shape_text(shape)), 2)
  if type(sizes) == "number" then
    local size, list = sizes, {}
    if size < 1 then error("split: expected parts of at least 1", 2) end
    for at = 1, n, size do list[#list + 1] = math.min(size, n - at + 1) end
    sizes = list
  end
  if #sizes > 8 then
    -- more parts than one operation yields: slices do the same
    local parts, at = {}, 1
    for i, size in ipairs(sizes) do parts[i], at = methods.slice(x, k, at, at + size - 1), at + size end
    if at ~= n + 1 then error(("split: the parts make %d, dimension %d of %s has %d"):format(at - 1, k, M.shape_text(shape), n), 2) end
    return unpack(parts)
  end
  call.op, call.n_in, call.n_out, inputs[0], ints[0] = op.split, 1, #sizes, x, k - 1
  for i, size in ipairs(sizes) do ints[i] = size end
  check(C.eng_run(call))
  local parts = {}
  for i = 1, #sizes do parts[i] = Tensor(call.out[i - 1]) end
  return unpack(parts)
end

--- n equal parts along d.
function methods.chunk(x, n, d)
  local size = methods.size(x, d or -1)
  if size % n ~= 0 then error(("chunk: %d does not divide into %d equal parts"):format(size, n), 2) end
  return methods.split(x, size / n, d or -1)
end

function methods.squeeze(x, d)
  local shape = shape_table(info(x))
  local kept = {}
  local k = d and (d < 0 and d + #shape + 1 or d)
  for i, n in ipairs(shape) do
    if not (n == 1 and (k == nil or k == i)) then kept[#kept + 1] = n end
  end
  return methods.view(x, kept)
end

function methods.unsqueeze(x, d)
  local shape = shape_table(info(x))
  table.insert(shape, d < 0 and d + #shape + 2 or d, 1)
  return methods.view(x, shape)
end

--- Joins a list of tensors along dimension d (1 by default).
function M.concat(list, d)
  if type(list) ~= "table" or #list == 0 then error("concat: expected a list of tensors", 2) end
  d = d or 1
  while #list > 16 do   -- one operation joins up to 16
    local joined = {}
    for i = 1, #list, 16 do joined[#joined + 1] = M.concat({ unpack(list, i, math.min(i + 15, #list)) }, d) end
    list = joined
  end
  for k, x in ipairs(list) do want(x, "concat"); inputs[k - 1] = x end
  call.op, call.n_in, call.n_out, ints[0] = op.concat, #list, 1, zero_based(d)
  return run_call()
end

--- Joins tensors of one shape along a new dimension d (1 by default).
function M.stack(list, d)
  local raised = {}
  for i, x in ipairs(list) do raised[i] = methods.unsqueeze(x, d or 1) end
  return M.concat(raised, d or 1)
end

-- ------------------------------------------------------------------ picking

local function pick(name)
  return function(x, d, index)
    want(x, name); want(index, name)
    ints[0] = zero_based(d)
    return run2(name, x, index)
  end
end
methods.gather = pick "gather"
methods.index_select = pick "index_select"

--- weight:embedding(ids): rows of [V x C] by ids counted from 0.
function methods.embedding(weight, ids) return run2("embedding", weight, ids) end

--- The k largest of the last dimension: values, indices from 0.
function methods.topk(x, k)
  want(x, "topk")
  call.op, call.n_in, call.n_out, inputs[0], ints[0] = op.topk, 1, 2, x, k
  return run_call()
end

for _, name in ipairs { "argmax", "argmin" } do
  methods[name] = function(x, d, keepdim)
    want(x, name)
    ints[0], ints[1] = zero_based(d or -1), keepdim and 1 or 0
    return run1(name, x)
  end
end

-- ------------------------------------------------------------------ reductions

for _, name in ipairs { "sum", "mean", "max", "min" } do
  --- x:sum(), x:sum(d), x:sum({d, e}), with keepdim as the second argument.
  methods[name] = function(x, d, keepdim)
    want(x, name)
    local n, mask = info(x).ndim, 0
    if d == nil then mask = 2 ^ n - 1
    else
      for _, k in ipairs(type(d) == "table" and d or { d }) do
        local at = k < 0 and k + n or k - 1
        if at < 0 or at >= n then error(("%s: there is no dimension %d in %s"):format(name, k, M.shape_text(shape_table(info(x)))), 2) end
        mask = bit.bor(mask, bit.lshift(1, at))
      end
    end
    ints[0], ints[1] = mask, keepdim and 1 or 0
    return run1(name, x)
  end
end

--- Euclidean norm of all elements.
function methods.norm(x) return methods.sum(mul(methods.to(x, info(x).dtype == M_ffi.dtype.f64 and "f64" or "f32"), x)):sqrt() end

-- ------------------------------------------------------------------ products, norms, attention, losses

--- a:matmul(b [, transpose_a, transpose_b]); vectors are taken as one row or one column.
function methods.matmul(a, b, transpose_a, transpose_b)
  want(a, "matmul"); want(b, "matmul")
  local na, nb = info(a).ndim, info(b).ndim
  if na == 1 then
    local y = methods.matmul(methods.unsqueeze(a, 1), b, false, transpose_b)
    return methods.squeeze(y, nb == 1 and -1 or -2)
  elseif nb == 1 then
    return methods.squeeze(methods.matmul(a, methods.unsqueeze(b, 2), transpose_a), -1)
  end
  ints[0], ints[1], ints[2], ints[3] = transpose_a and 1 or 0, transpose_b and 1 or 0, 0, 0
  return run2("matmul", a, b)
end

--- x [.. x K], weight [N x K], bias [N] or nil -> [.. x N]
function methods.linear(x, weight, bias)
  want(x, "linear"); want(weight, "linear")
  call.op, call.n_in, call.n_out, inputs[0], inputs[1], inputs[2] = op.linear, 3, 1, x, weight, bias or NONE
  return run_call()
end

function methods.layer_norm(x, weight, bias, eps)
  want(x, "layer_norm")
  call.op, call.n_in, call.n_out, inputs[0], inputs[1], inputs[2] = op.layer_norm, 3, 3, x, weight or NONE, bias or NONE
  floats[0] = eps or 1e-5
  return (run_call())
end

function methods.rms_norm(x, weight, eps)
  want(x, "rms_norm")
  call.op, call.n_in, call.n_out, inputs[0], inputs[1] = op.rms_norm, 2, 2, x, weight or NONE
  floats[0] = eps or 1e-6
  return (run_call())
end

--- q [B x T x H x D], k, v [B x S x G x D] -> [B x T x H x D]; options: causal, scale, entropy. With entropy=true a second
--- result gives each row's attention entropy in nats, [B x H x T].
function M.attention(q, k, v, options)
  want(q, "attention"); want(k, "attention"); want(v, "attention")
  options = options or {}
  call.op, call.n_in, call.n_out, inputs[0], inputs[1], inputs[2] = op.attention, 3, 3, q, k, v
  ints[0], ints[1], floats[0] = options.causal and 1 or 0, options.entropy and 1 or 0, options.scale or 0
  local y, _, entropy = run_call()
  if options.entropy then return y, entropy end
  return y
end

--- Rotary position embedding of x [B x T x H x D]; options: position (of the first row, from 0), base, interleaved.
function methods.rope(x, options)
  want(x, "rope")
  options = options or {}
  ints[0], ints[1], ints[2], floats[0] = options.position or 0, options.interleaved and 1 or 0, 0, options.base or 10000
  return run1("rope", x)
end

local REDUCTION = { none = 0, mean = 1, sum = 2 }

--- logits [.. x V], targets [..] of class ids from 0; options: label_smoothing, ignore_index (-100), reduction "mean" | "sum" | "none".
function M.cross_entropy(logits, targets, options)
  want(logits, "cross_entropy"); want(targets, "cross_entropy")
  options = options or {}
  local reduction = REDUCTION[options.reduction or "mean"]
  if not reduction then error(("cross_entropy: expected reduction mean, sum or none, got '%s'"):format(tostring(options.reduction)), 2) end
  call.op, call.n_in, call.n_out, inputs[0], inputs[1] = op.cross_entropy, 2, 2, logits, targets
  ints[0], ints[1], floats[0] = options.ignore_index or -100, reduction, options.label_smoothing or 0
  return (run_call())
end

--- mean of (a - b)^2
function M.mse(a, b) return run2("mse", a, b) end

-- ------------------------------------------------------------------ text

local function number_text(v, dtype)
  if dtype == "bool" then return v ~= 0 and "true" or "false" end
  if v ~= v then return "nan" end
  if v == huge or v == -huge then return v > 0 and "inf" or "-inf" end
  if v % 1 == 0 and math.abs(v) < 1e7 then return ("%d"):format(v) end
  return ("%.4g"):format(v)
end

--- What a person wants to see: dtype, shape, range, non-finite counts and a corner of the values.
function M.describe(x)
  local status = C.eng_info(info_buffer, x)
  if status ~= 0 then return "tensor (" .. M_ffi.message() .. ")" end
  local shape, dtype = shape_table(info_buffer), dtype_name[info_buffer.dtype]
  local count, grad = tonumber(info_buffer.count), info_buffer.requires_grad ~= 0
  local head = ("%s %s %s%s"):format(dtype, M.shape_text(shape), M_ffi.string(C.eng_device_name()), grad and " requires_grad" or "")
  if count == 0 then return head .. " (empty)" end
  local values = ffi.new("double[?]", count)
  check(C.eng_read(values, M_ffi.dtype.f64, count, x))
  if count == 1 and #shape == 0 then return ("%s: %s"):format(head, number_text(values[0], dtype)) end
  local least, most, sum, finite, inf, nan = huge, -huge, 0, 0, 0, 0
  for i = 0, count - 1 do
    local v = values[i]
    if v ~= v then nan = nan + 1
    elseif v == huge or v == -huge then inf = inf + 1
    else
      finite, sum = finite + 1, sum + v
      if v < least then least = v end
      if v > most then most = v end
    end
  end
  local lines = { head }
  if dtype ~= "bool" then
    lines[1] = head .. (finite > 0 and ("  min %s max %s mean %s"):format(number_text(least), number_text(most), number_text(sum / finite)) or "")
      .. (inf > 0 and ("  inf %d"):format(inf) or "") .. (nan > 0 and ("  nan %d"):format(nan) or "")
  end
  local columns = shape[#shape]
  local rows = count / columns
  for r = 0, math.min(rows, 6) - 1 do
    local row = {}
    for c = 0, math.min(columns, 8) - 1 do row[#row + 1] = ("%10s"):format(number_text(values[r * columns + c], dtype)) end
    lines[#lines + 1] = table.concat(row, " ") .. (columns > 8 and "  ..." or "")
  end
  if rows > 6 then lines[#lines + 1] = "       ..." end
  return table.concat(lines, "\n")
end

-- ------------------------------------------------------------------ the metatype

M.methods, M.getters = methods, getters

ffi.metatype(Tensor, {
  __index = function(x, key)
    local method = methods[key]
    if method then return method end
    local getter = getters[key]
    if getter then return getter(x) end
    local names = {}
    for name in pairs(methods) do names[#names + 1] = name end
    for name in pairs(getters) do names[#names + 1] = name end
    error(("a tensor has no method '%s'%s"):format(tostring(key), nearest.hint(tostring(key), names)), 2)
  end,
  __newindex = function(_, key) error(("a tensor's field '%s' cannot be set"):format(tostring(key)), 2) end,
  __tostring = M.describe,
  __add = function(a, b) return add(a, b, 2) end,
  __sub = function(a, b) return sub(a, b, 2) end,
  __mul = function(a, b) return mul(a, b, 2) end,
  __div = function(a, b) return div(a, b, 2) end,
  __pow = function(a, b) return pow(a, b, 2) end,
  __unm = function(a) return run1("neg", a) end,
  __eq = function(a, b)   -- the same handle; values are compared by a:eq(b)
    return is_tensor(a) and is_tensor(b) and tonumber(a.slot) == tonumber(b.slot) and tonumber(a.generation) == tonumber(b.generation)
  end,
})

return M
