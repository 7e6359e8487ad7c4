-- Tensors in Lua. A tensor is a handle, a small cdata {slot, generation}, with the operations as
-- methods. The handle holds no elements. A tensor made inside a step ends with the step; :keep()
-- makes a copy that outlives it.
--
-- Counting follows Lua: dimensions and positions start at 1, ranges are inclusive, and negative
-- numbers count from the end (dimension -1 is the last). The numbers inside index tensors (token
-- ids, classes) are data and count from 0.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local create = require "engine.tensor.create"
local describe = require "engine.tensor.describe"
local nearest = require "engine.base.nearest"

local ffi, C, check, raise = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.raise
local op, call, run_call, Tensor = M_ffi.op, M_ffi.call, M_ffi.run_call, M_ffi.Tensor
local dtype_number, dtype_name = arguments.dtype_number, M_ffi.dtype_name
local value_text = M_ffi.value_text
local inputs, ints, floats = call["in"], call.ints, call.floats
local NONE = Tensor(0, 0)
local huge = math.huge
local STEP = C.ENG_STEP
local is_tensor, info, shape_table = arguments.is_tensor, arguments.info, arguments.shape_table
local want, want_number, want_whole = arguments.want, arguments.want_number, arguments.want_whole
local dimension, read_named, numbers = arguments.dimension, arguments.read_named, arguments.numbers
local fill = create.fill_with

local M = { Tensor = Tensor, is_tensor = is_tensor, shape_text = arguments.shape_text,
  read_named = read_named, describe = describe }
for _, name in ipairs { "zeros", "ones", "full", "rand", "randn", "randint", "arange", "tensor",
  "from_memory" } do
  M[name] = create[name]
end
local methods, getters = {}, {}

-- ------------------------------------------------------------------ calling operations

local function run1(name, a)
  want(a, name)
  call.op, call.n_in, call.n_out, inputs[0] = op[name], 1, 1, a
  return run_call()
end

local function run2(name, a, b)
  want(a, name)
  want(b, name)
  call.op, call.n_in, call.n_out, inputs[0], inputs[1] = op[name], 2, 1, a, b
  return run_call()
end

-- ------------------------------------------------------------------ what a tensor is

local from_one = { __index = function(_, k)
  if type(k) ~= "number" or k > 0 then return nil end
  raise("shape[%g]: dimensions count from 1; x:size(-1) is the last", k)
end }

--- The sizes as a list, such as { 64, 768 }.
function getters.shape(x) return setmetatable(shape_table(info(x)), from_one) end
--- The number of dimensions.
function getters.ndim(x) return info(x).ndim end
--- The number of elements.
function getters.count(x) return tonumber(info(x).count) end
--- The dtype's name: f32, f64, f16, bf16, e4m3, e5m2, u8, i8, i16, i32, i64 or bool.
function getters.dtype(x) return dtype_name[info(x).dtype] end
--- Whether x is a leaf, that is, no recorded operation made it.
function getters.is_leaf(x) return info(x).is_leaf ~= 0 end
--- Where the elements are: cpu, reference or cuda.
function getters.device(x)
  if info(x).space == 1 then return "cuda" end
  local name = M_ffi.string(C.eng_device_name())
  return name == "cuda" and "cpu" or name
end
--- The gradient after backward(), of x's shape, or nil.
function getters.grad(x)
  local g = Tensor()
  check(C.eng_gradient(g, x))
  if g.slot ~= 0 then return g end
end

--- The size of dimension d; without d all sizes, as several results.
function methods.size(x, d)
  if d == nil then
    local sizes = shape_table(info(x))
    return unpack(sizes)
  end
  local k, what = dimension(x, d, "size")
  return tonumber(what.shape[k])
end

--- Whether the elements lie in memory in row-major order without gaps.
function methods.is_contiguous(x) return info(x).contiguous ~= 0 end

local item_buffer = ffi.new("double[1]")
--- The value of a tensor with one element, as a number. Other sizes are an error.
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

--- All elements as nested tables of numbers; a tensor without dimensions is a number.
function methods.totable(x)
  local what = info(x)
  local shape, count = shape_table(what), tonumber(what.count)
  local values = arguments.host_array("double[?]", count, "totable")
  check(C.eng_read(values, M_ffi.dtype.f64, count, x))
  return (nest(values, shape, 1, 0))
end

local CTYPE = { f32 = "float", f64 = "double", f16 = "uint16_t", bf16 = "uint16_t", u8 = "uint8_t",
  i8 = "int8_t", i16 = "int16_t", i32 = "int32_t", i64 = "int64_t", bool = "uint8_t",
  e4m3 = "uint8_t", e5m2 = "uint8_t" }
--- A copy of the elements, row-major, as a C array of `dtype` (the tensor's own unless given), and
--- their count. f16 and bf16 come as uint16_t codes, e4m3 and e5m2 as uint8_t codes.
function methods.read(x, dtype)
  local what = info(x)
  local count, number = tonumber(what.count), dtype and dtype_number(dtype) or what.dtype
  local values = arguments.host_array(CTYPE[dtype_name[number]] .. "[?]", count, "read")
  check(C.eng_read(values, number, count, x))
  return values, count
end

--- A copy that lives until :free(), beyond the end of the step. The copy is a leaf.
function methods.keep(x)
  local y = Tensor()
  check(C.eng_keep(y, x))
  return y
end

--- Frees a kept tensor; its handles are stale from then on.
function methods.free(x) check(C.eng_free(x)) end

--- Declares that x is not used again: its memory is freed at once, unless the backward pass needs
--- it.
function methods.done(x) check(C.eng_done(x)) end

--- Makes backward() compute the gradient of x, or, with on = false, leave it out; returns x.
function methods.requires_grad(x, on)
  check(C.eng_requires_grad(x, on == nil and true or on))
  return x
end

--- A view of the same values without a gradient.
function methods.detach(x)
  want(x, "detach")
  local shape = shape_table(info(x))   -- raises for a stale handle, while recording is on
  local before = C.eng_grad_enabled(false)
  local y = methods.view(x, shape)
  C.eng_grad_enabled(before)
  return y
end

-- The next five methods write in place and are not recorded.

--- Sets every element to a number; returns x.
function methods.fill(x, value) return (fill(x, value, "fill")) end
--- Sets every element to 0; returns x.
function methods.zero(x) return (fill(x, 0, "zero")) end
--- Copies the elements of a tensor or a nested table of x's shape, converting the dtype; returns x.
function methods.copy(x, source)
  if not is_tensor(source) then
    source = M.tensor(source, { dtype = dtype_name[info(x).dtype], keep = false })
  end
  check(C.eng_copy(x, source))
  return x
end
--- Draws the elements uniformly from [low, high), [0, 1) unless given; returns x.
function methods.uniform(x, low, high)
  check(C.eng_uniform(x, want_number(low or 0, "uniform", "the lower bound"),
    want_number(high or 1, "uniform", "the upper bound")))
  return x
end
--- Draws the elements from a normal distribution, mean 0 and std 1 unless given; returns x.
function methods.normal(x, mean, std)
  check(C.eng_normal(x, want_number(mean or 0, "normal", "the mean"),
    want_number(std or 1, "normal", "the standard deviation")))
  return x
end

-- ------------------------------------------------------------------ elementwise operations

local FLOAT = { [M_ffi.dtype.f32] = true, [M_ffi.dtype.f64] = true, [M_ffi.dtype.f16] = true,
  [M_ffi.dtype.bf16] = true }
local LOW = { [M_ffi.dtype.f16] = true, [M_ffi.dtype.bf16] = true }
-- The integer dtypes a number may need, smallest first: name, lowest, highest.
local INTEGERS = { { "u8", 0, 255 }, { "i16", -2 ^ 15, 2 ^ 15 - 1 },
  { "i32", -2 ^ 31, 2 ^ 31 - 1 }, { "i64", -2 ^ 63, 2 ^ 63 - 1024 } }
local RANGE = { [M_ffi.dtype.i8] = { -128, 127 }, [M_ffi.dtype.bool] = { 0, 1 } }
for _, row in ipairs(INTEGERS) do RANGE[M_ffi.dtype[row[1]]] = { row[2], row[3] } end

-- The dtype for a number that is combined with a tensor of `dtype`. Beside a float tensor the
-- number gets the tensor's dtype, and also beside an integer tensor whose dtype can hold it.
-- Otherwise the number gets the smallest integer dtype that can hold it, or f32 if none can.
local function dtype_beside(dtype, value)
  if FLOAT[dtype] or not RANGE[dtype] then return dtype end   -- FP8 too: the operation refuses it
  if value % 1 ~= 0 then return M_ffi.dtype.f32 end           -- also inf and nan
  local range = RANGE[dtype]
  if value >= range[1] and value <= range[2] then return dtype end
  for _, row in ipairs(INTEGERS) do
    if value >= row[2] and value <= row[3] then return M_ffi.dtype[row[1]] end
  end
  return M_ffi.dtype.f32
end

local function scalar(value, dtype)
  local y = Tensor()
  check(C.eng_new(y, dtype, 0, nil, STEP))
  check(C.eng_fill(y, value))
  return y
end

-- A number as a tensor to combine with x. If x is f16 or bf16 and this dtype would round the
-- number, the tensor is f32 and the second result is true.
local function scalar_beside(x, value)
  local dtype = info(x).dtype
  local y = scalar(value, dtype_beside(dtype, value))
  if not LOW[dtype] then return y, false end
  check(C.eng_item(item_buffer, y))
  if item_buffer[0] == value or value ~= value then return y, false end
  return scalar(value, M_ffi.dtype.f32), true
end

-- Runs an operation on two tensors, or a tensor and a number. A number never widens a float result:
-- if the number had to become f32 beside f16 or bf16, the result is rounded back to that dtype,
-- except for comparisons.
local function pair(name, a, b, compares)
  local wide, dtype
  if type(b) == "number" and is_tensor(a) then
    dtype = info(a).dtype
    b, wide = scalar_beside(a, b)
  elseif type(a) == "number" and is_tensor(b) then
    dtype = info(b).dtype
    a, wide = scalar_beside(b, a)
  end
  local y = run2(name, a, b)
  if not wide or compares then return y end
  ints[0] = dtype
  return run1("cast", y)
end

local function is_float(x)
  return is_tensor(x) and FLOAT[info(x).dtype]
end

-- y = x * factor + term in one pass, rounded once: arithmetic of a float tensor with a number.
local function affine(x, factor, term)
  floats[0], floats[1] = factor, term
  return run1("affine", x)
end

--- a + b, with broadcasting; b may be a number.
local function add(a, b)
  if type(b) == "number" and is_float(a) then return affine(a, 1, b) end
  if type(a) == "number" and is_float(b) then return affine(b, 1, a) end
  return pair("add", a, b)
end
--- a - b, with broadcasting; b may be a number.
local function sub(a, b)
  if type(b) == "number" and is_float(a) then return affine(a, 1, -b) end
  if type(a) == "number" and is_float(b) then return affine(b, -1, a) end
  return pair("sub", a, b)
end
--- a * b elementwise, with broadcasting; b may be a number.
local function mul(a, b)
  if type(b) == "number" and is_float(a) then return affine(a, b, 0) end
  if type(a) == "number" and is_float(b) then return affine(b, a, 0) end
  return pair("mul", a, b)
end
--- a / b, with broadcasting; b may be a number. Integers give floats.
local function div(a, b)
  return pair("div", a, b)
end
--- a ^ b, with broadcasting; b may be a number.
local function pow(a, b)
  if type(b) ~= "number" or not is_float(a) then return pair("pow", a, b) end
  floats[0], floats[1] = b, 0
  return run1("pow_scalar", a)
end

methods.add, methods.sub, methods.mul, methods.div, methods.pow = add, sub, mul, div, pow

--- Elementwise, with broadcasting; b may be a number. A NaN on either side of maximum and minimum
--- gives NaN; comparisons give bool.
---   maximum, minimum   the larger, the smaller of a and b
---   eq, ne             a == b, a ~= b
---   lt, le, gt, ge     a < b, a <= b, a > b, a >= b
for _, name in ipairs { "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge" } do
  local compares = #name == 2
  methods[name] = function(a, b) return pair(name, a, b, compares) end
end

--- The result is computed in f32 (f64 for an f64 tensor) and rounded once into x's dtype, or into
--- the dtype that autocast sets.
---   neg, abs           -x, the magnitude
---   exp, log           e^x, the natural logarithm
---   sqrt, rsqrt        the square root, 1 / sqrt(x)
---   sin, cos, tanh     of x in radians
---   sigmoid            1 / (1 + e^-x)
---   log_sigmoid        log(sigmoid(x))
---   softplus           log(1 + e^x)
---   relu               max(x, 0)
---   silu               x * sigmoid(x)
---   hardswish          x * min(max(x + 3, 0), 6) / 6
for number, name in ipairs(M_ffi.op_names) do   -- the unary operations of ops.def
  if C.eng_op_describe(number - 1).unary ~= 0 then
    methods[name] = function(x) return run1(name, x) end
  end
end

--- Computed as above, except that contiguous copies the bits.
---   contiguous         a row-major copy
---   softmax            e^x / sum(e^x) over the last dimension
---   log_softmax        log(softmax(x)) over the last dimension
---   logsumexp          log(sum(e^x)) over the last dimension, without that dimension
for _, name in ipairs { "contiguous", "softmax", "log_softmax", "logsumexp" } do
  methods[name] = function(x) return run1(name, x) end
end

--- GELU: gelu(x) is the erf form, gelu(x, "tanh") the tanh form, which GPT-2 uses.
function methods.gelu(x, form)
  if form ~= nil and form ~= "tanh" and form ~= "erf" then
    raise("gelu: expected 'erf' or 'tanh', got %s", value_text(form))
  end
  return run1(form == "tanh" and "gelu_tanh" or "gelu", x)
end

--- x * x.
function methods.square(x) return mul(x, x) end

--- silu(gate) * up for two tensors of one shape. site: the FP8 site of the layer that reads the
--- result, or nil.
function methods.swiglu(gate, up, site)
  if not site then return run2("swiglu", gate, up) end
  call.fp8_swiglu.site = site
  return (run2("fp8_swiglu", gate, up))
end

--- Elements below low become low, elements above high become high; nil: no limit. If low > high,
--- all become high.
function methods.clamp(x, low, high)
  want(x, "clamp")
  floats[0], floats[1] = want_number(low or -huge, "clamp", "the lower limit"),
    want_number(high or huge, "clamp", "the upper limit")
  return run1("clamp", x)
end

--- condition:where(a, b): a where the condition holds, else b; a and b may be numbers.
function methods.where(condition, a, b)
  if type(a) == "number" then
    a = scalar(a, is_tensor(b) and dtype_beside(info(b).dtype, a) or M_ffi.dtype.f32)
  end
  if type(b) == "number" then
    b = scalar(b, is_tensor(a) and dtype_beside(info(a).dtype, b) or M_ffi.dtype.f32)
  end
  want(condition, "where")
  want(a, "where")
  want(b, "where")
  call.op, call.n_in, call.n_out, inputs[0], inputs[1], inputs[2] = op.where, 3, 1, condition, a, b
  return run_call()
end

--- Sets elements to zero with probability p and scales the others by 1 / (1 - p).
function methods.dropout(x, p)
  want(x, "dropout")
  floats[0], ints[0], ints[1] = want_number(p, "dropout", "the probability"), 0, 0
  return run1("dropout", x)
end

local DEVICES = { cpu = true, cuda = true, reference = true }

local CAST = { saturate = true, stochastic = true }

--- x converted to another dtype (x itself if it has that dtype), or an unrecorded copy of x on
--- another device (cpu, cuda, reference). Numbers that are too large become NaN in e4m3 and Inf in
--- e5m2. Options for these two dtypes: saturate (such numbers become the largest finite one),
--- stochastic (rounds up or down at random; the distances to both neighbours set the probability).
function methods.to(x, dtype, options)
  want(x, "to")
  if DEVICES[dtype] then
    local out = Tensor()
    check(C.eng_to_device(out, x, dtype))
    return out
  end
  local number = dtype_number(dtype, "cpu cuda reference")
  if info(x).dtype == number then return x end
  ints[0], ints[1], ints[2], ints[3] = number, 0, 0, 0
  if options ~= nil then
    options = read_named(options, "to", CAST)
    if dtype ~= "e4m3" and dtype ~= "e5m2" then
      raise("to: only e4m3 and e5m2 take options, got %s", value_text(dtype))
    end
    ints[1] = (options.saturate and 1 or 0) + (options.stochastic and 2 or 0)
  end
  return run1("cast", x)
end

-- ------------------------------------------------------------------ views and joins

local function shape_ints(name, ...)
  local list, n = numbers(...)
  if n > C.ENG_MAX_DIMS then
    raise("%s: expected up to %d dimensions, got %d", name, tonumber(C.ENG_MAX_DIMS), n)
  end
  ints[0] = n
  for i = 1, n do ints[i] = want_whole(list[i], name, "a dimension") end
end

--- x:view(2, -1) or x:view { 2, -1 }: the same elements in a new shape; one dimension may be -1.
--- Also called reshape; copies only if the layout requires it.
function methods.view(x, ...)
  want(x, "view")
  shape_ints("view", ...)
  return run1("reshape", x)
end
methods.reshape = methods.view

--- x:permute(3, 1, 2): dimensions in a new order.
function methods.permute(x, ...)
  want(x, "permute")
  local n = info(x).ndim
  local order, given = numbers(...)
  if given ~= n then raise("permute: expected %d dimensions, got %d", n, given) end
  for i = 1, n do ints[i - 1] = dimension(x, order[i], "permute") end
  return run1("permute", x)
end

--- Swaps two dimensions, the last two unless given.
function methods.transpose(x, a, b)
  want(x, "transpose")
  local n = info(x).ndim
  if n < 2 and not a then
    raise("transpose: expected at least 2 dimensions, got %s", M.shape_text(shape_table(info(x))))
  end
  a, b = dimension(x, a or -2, "transpose"), dimension(x, b or -1, "transpose")
  for d = 0, n - 1 do ints[d] = d end
  ints[a], ints[b] = b, a
  return run1("permute", x)
end

--- x:expand(2, 3): dimensions of size 1 repeated to the given sizes, without a copy.
function methods.expand(x, ...)
  want(x, "expand")
  shape_ints("expand", ...)
  return run1("expand", x)
end

--- The positions start to stop of dimension d, or every step-th of them. Positions are as in
--- string.sub: inclusive, counted from 1 or, if negative, from the end, and limited to the
--- dimension. A range that ends before it starts is empty.
function methods.slice(x, d, start, stop, step)
  want(x, "slice")
  local k, what = dimension(x, d, "slice")
  local n = tonumber(what.shape[k])
  start, stop = want_whole(start or 1, "slice", "the first position"),
    want_whole(stop or -1, "slice", "the last position")
  if start == 0 then raise("slice: positions count from 1, or from -1 backward; got 0") end
  if start < 0 then start = math.max(start + n + 1, 1) end
  if stop < 0 then stop = stop + n + 1 end
  ints[0], ints[1], ints[2], ints[3] = k, start - 1, math.max(stop, 0),
    want_whole(step or 1, "slice", "the step", 1)
  return run1("slice", x)
end

--- Position i of dimension d; the result does not have that dimension.
function methods.select(x, d, i)
  want(x, "select")
  local k, what = dimension(x, d, "select")
  local shape, n = shape_table(what), tonumber(what.shape[k])
  local at = want_whole(i, "select", "a position") < 0 and i + n + 1 or i
  if at < 1 or at > n then
    raise("select: no position %d in dimension %d of %s; positions count from 1", i,
      k + 1, M.shape_text(shape))
  end
  table.remove(shape, k + 1)
  return methods.slice(x, d, at, at):view(shape)
end

--- Splits x along dimension d (the last unless given) into parts of the given sizes, returned as
--- several results. If `sizes` is a number, every part has that size, but the last may be smaller.
function methods.split(x, sizes, d)
  want(x, "split")
  local k, what = dimension(x, d or -1, "split")
  local n = tonumber(what.shape[k])
  if type(sizes) ~= "table" then
    local size, list = want_whole(sizes, "split", "the size of a part", 1), {}
    for at = 1, n, size do list[#list + 1] = math.min(size, n - at + 1) end
    sizes = #list > 0 and list or { 0 }
  end
  local sum = 0
  for _, size in ipairs(sizes) do sum = sum + want_whole(size, "split", "the size of a part", 0) end
  if sum ~= n then
    raise("split: the parts add up to %d, dimension %d of %s has %d", sum, k + 1,
      M.shape_text(shape_table(what)), n)
  end
  if #sizes > C.ENG_OP_OUTPUTS then   -- more parts than an operation has outputs
    local parts, at = {}, 1
    for i, size in ipairs(sizes) do
      parts[i], at = methods.slice(x, k + 1, at, at + size - 1), at + size
    end
    return unpack(parts)
  end
  call.op, call.n_in, call.n_out, inputs[0], ints[0] = op.split, 1, #sizes, x, k
  for i, size in ipairs(sizes) do ints[i] = size end
  check(C.eng_run(call))
  local parts = {}
  for i = 1, #sizes do parts[i] = Tensor(call.out[i - 1]) end
  return unpack(parts)
end

--- n equal parts along dimension d (the last unless given), as several results.
function methods.chunk(x, n, d)
  want(x, "chunk")
  want_whole(n, "chunk", "the number of parts", 1)
  local k, what = dimension(x, d or -1, "chunk")
  local size, sizes = tonumber(what.shape[k]), {}
  if size % n ~= 0 then
    raise("chunk: dimension %d of %s does not divide into %d equal parts", k + 1,
      M.shape_text(shape_table(what)), n)
  end
  for i = 1, n do sizes[i] = size / n end
  return methods.split(x, sizes, k + 1)
end

--- x without its dimensions of size 1, or without dimension d if its size is 1.
function methods.squeeze(x, d)
  want(x, "squeeze")
  local k = d and dimension(x, d, "squeeze")
  local what, kept = info(x), 0
  for i = 0, what.ndim - 1 do
    if what.shape[i] ~= 1 or (k ~= nil and k ~= i) then
      kept = kept + 1
      ints[kept] = what.shape[i]
    end
  end
  ints[0] = kept
  return run1("reshape", x)
end

--- x with a new dimension of size 1, which becomes dimension d.
function methods.unsqueeze(x, d)
  want(x, "unsqueeze")
  local what = info(x)
  local n = what.ndim
  local k = want_whole(d, "unsqueeze", "a dimension") < 0 and d + n + 2 or d
  if k < 1 or k > n + 1 then
    raise("unsqueeze: expected a dimension of 1 to %d for %s, got %d", n + 1,
      M.shape_text(shape_table(what)), d)
  end
  if n == C.ENG_MAX_DIMS then
    raise("unsqueeze: expected up to %d dimensions, got %d", tonumber(C.ENG_MAX_DIMS) - 1, n)
  end
  for i = 1, n + 1 do ints[i] = i < k and what.shape[i - 1] or i > k and what.shape[i - 2] or 1 end
  ints[0] = n + 1
  return run1("reshape", x)
end

local function want_list(list, name)
  if type(list) ~= "table" then
    raise("%s: expected a list of tensors, got %s", name, value_text(list))
  end
  if #list == 0 then raise("%s: expected a list of tensors, got an empty one", name) end
  for i = 1, #list do want(list[i], name) end
end

--- Joins a list of tensors along dimension d (1 by default).
function M.concat(list, d)
  want_list(list, "concat")
  local k = dimension(list[1], d or 1, "concat")
  while #list > C.ENG_OP_INPUTS do   -- more than one operation can join
    local joined, most = {}, tonumber(C.ENG_OP_INPUTS)
    for i = 1, #list, most do
      joined[#joined + 1] = M.concat({ unpack(list, i, math.min(i + most - 1, #list)) }, k + 1)
    end
    list = joined
  end
  for i, x in ipairs(list) do inputs[i - 1] = x end
  call.op, call.n_in, call.n_out, ints[0] = op.concat, #list, 1, k
  return run_call()
end

--- Joins tensors of one shape along a new dimension d (1 by default).
function M.stack(list, d)
  want_list(list, "stack")
  local raised, first = {}, M.shape_text(list[1].shape)
  for i, x in ipairs(list) do
    local shape = M.shape_text(x.shape)
    if shape ~= first then
      raise("stack: expected tensors of one shape, got %s and %s", first, shape)
    end
    raised[i] = methods.unsqueeze(x, d or 1)
  end
  return M.concat(raised, d or 1)
end

-- ------------------------------------------------------------------ picking

for _, name in ipairs { "gather", "index_select" } do
  -- x:gather(d, index), x:index_select(d, index): the numbers in index count from 0.
  methods[name] = function(x, d, index)
    want(x, name)
    want(index, name)
    ints[0] = dimension(x, d, name)
    return run2(name, x, index)
  end
end

--- weight:embedding(ids): weight [V x C], ids [..] from 0 -> rows [.. x C]. An id outside 0..V-1 is
--- an error.
function methods.embedding(weight, ids) return run2("embedding", weight, ids) end

--- The k largest elements of the last dimension, [.. x k], and their indices from 0.
function methods.topk(x, k)
  want(x, "topk")
  call.op, call.n_in, call.n_out, inputs[0], ints[0] = op.topk, 1, 2, x,
    want_whole(k, "topk", "k", 0)
  return run_call()
end

for _, name in ipairs { "argmax", "argmin" } do
  -- x:argmax([d [, keepdim]]): the index (from 0) of the extreme along d, the last unless given.
  methods[name] = function(x, d, keepdim)
    want(x, name)
    ints[0], ints[1] = dimension(x, d or -1, name), keepdim and 1 or 0
    return run1(name, x)
  end
end

-- ------------------------------------------------------------------ reductions

for _, name in ipairs { "sum", "mean", "max", "min" } do
  -- x:sum(), x:sum(d), x:sum({ d, e }), each with keepdim as the second argument.
  methods[name] = function(x, d, keepdim)
    want(x, name)
    local mask = 0
    if d == nil then mask = 2 ^ info(x).ndim - 1
    else
      for _, k in ipairs(type(d) == "table" and d or { d }) do
        mask = bit.bor(mask, bit.lshift(1, (dimension(x, k, name))))
      end
    end
    ints[0], ints[1] = mask, keepdim and 1 or 0
    return run1(name, x)
  end
end

--- The Euclidean norm of all elements, in f64 for an f64 tensor and in f32 for others.
function methods.norm(x)
  local wide = methods.to(x, info(x).dtype == M_ffi.dtype.f64 and "f64" or "f32")
  return methods.sum(mul(wide, x)):sqrt()
end

-- ------------------------------------------------------------------ products, norms, losses

--- a:matmul(b [, transpose_a, transpose_b]): a [.. x M x K], b [.. x K x N] -> [.. x M x N]. A
--- vector a is one row, a vector b one column.
function methods.matmul(a, b, transpose_a, transpose_b)
  want(a, "matmul")
  want(b, "matmul")
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

-- Runs an operation of several inputs. The inputs after the first `required` may be nil.
local function run_many(name, n_out, required, ...)
  for k = 1, select("#", ...) do
    local x = select(k, ...)
    if x ~= nil or k <= required then want(x, name) end
    inputs[k - 1] = x or NONE
  end
  call.op, call.n_in, call.n_out = op[name], select("#", ...), n_out
  return run_call()
end

--- x W^T + bias: x [.. x K], weight W [N x K], bias [N] or nil -> [.. x N]; site: the FP8 site of a
--- layer (fp8_sites.lua), or nil.
function methods.linear(x, weight, bias, site)
  if not site then return run_many("linear", 1, 2, x, weight, bias) end
  call.fp8_linear.site = site
  return (run_many("fp8_linear", 1, 2, x, weight, bias))
end

--- (silu(gate) * up) W^T + bias: gate and up [.. x K], weight W [N x K], bias [N] or nil -> [.. x
--- N]. The result is that of gate:swiglu(up, site) followed by linear at the same FP8 site, but the
--- product is stored only as FP8 codes.
function methods.swiglu_linear(gate, up, weight, bias, site)
  call.fp8_swiglu_linear.site = site or 0
  return run_many("fp8_swiglu_linear", 1, 3, gate, up, weight, bias)
end

--- gelu(x W1^T + b1, "tanh") W2^T + b2: x [.. x C], up W1 [H x C], down W2 [N x H], biases [H] and
--- [N] or nil -> [.. x N]. The same as linear, gelu and linear, in fewer passes over memory.
function methods.mlp_gelu(x, up, up_bias, down, down_bias)
  want(down, "mlp_gelu")
  return (run_many("mlp_gelu", 3, 2, x, up, up_bias, down, down_bias))
end

--- Layer norm over the last dimension: x [.. x C], weight and bias [C] or nil; eps 1e-5.
function methods.layer_norm(x, weight, bias, eps)
  floats[0] = want_number(eps or 1e-5, "layer_norm", "eps")
  return (run_many("layer_norm", 3, 1, x, weight, bias))
end

--- RMS norm over the last dimension: x [.. x C], weight [C] or nil; eps 1e-6.
function methods.rms_norm(x, weight, eps)
  floats[0] = want_number(eps or 1e-6, "rms_norm", "eps")
  return (run_many("rms_norm", 2, 1, x, weight))
end

--- Returns (x + branch):layer_norm(weight, bias, eps), and x + branch, computed in one pass over
--- memory. The bits are those of the separate operations. x and branch have one shape.
function methods.add_layer_norm(x, branch, weight, bias, eps)
  floats[0] = want_number(eps or 1e-5, "add_layer_norm", "eps")
  local y, sum = run_many("add_layer_norm", 4, 2, x, branch, weight, bias)
  return y, sum
end

--- Returns (x + branch):rms_norm(weight, eps), and x + branch, computed in one pass over memory.
--- The bits are those of the separate operations. x and branch have one shape.
function methods.add_rms_norm(x, branch, weight, eps)
  floats[0] = want_number(eps or 1e-6, "add_rms_norm", "eps")
  local y, sum = run_many("add_rms_norm", 3, 2, x, branch, weight)
  return y, sum
end

local ATTENTION = { causal = true, scale = true, entropy = true, logit_max = true,
  site = true }

--- softmax(scale q k^T) v: q [B x T x H x D], k and v [B x S x G x D] -> [B x T x H x D]; H is a
--- multiple of G. Options: causal, scale (1 / sqrt(D)), entropy (a second result: the entropy of
--- each row's weights in nats, [B x H x T]), logit_max (instead of the entropy, each row's largest
--- score, scaled; on the CPU), site (the FP8 site of the layer that reads the
--- result).
function M.attention(q, k, v, options)
  options = read_named(options, "attention", ATTENTION)
  local a, name = call.fp8_attention, options.site and "fp8_attention" or "attention"
  if options.entropy and options.logit_max then
    raise("attention: expected entropy or logit_max, got both")
  end
  a.causal = options.causal and 1 or 0
  a.entropy = options.entropy and C.ENG_ROW_ENTROPY or options.logit_max and C.ENG_ROW_LOGIT_MAX
    or 0
  a.site, a.scale = options.site or 0, want_number(options.scale or 0, "attention", "scale")
  local y, _, row = run_many(name, 3, 3, q, k, v)
  if options.entropy or options.logit_max then return y, row end
  return y
end

local ROPE = { position = true, base = true, interleaved = true, factor = true, low = true,
  high = true, context = true }

--- Rotary position embedding of x [B x T x H x D]; options: position (of the first row, 0), base
--- (10000), interleaved (pairs of neighbours instead of halves). `factor` divides the frequencies
--- (linear scaling). With context, low and high it is Llama 3's scaling: frequencies of up to `low`
--- turns within `context` positions are divided, those of `high` turns or more are not.
function methods.rope(x, options)
  options = read_named(options, "rope", ROPE)
  floats[0] = want_number(options.base or 10000, "rope", "base")
  floats[1], floats[2], floats[3] = want_number(options.factor or 0, "rope", "factor"),
    want_number(options.low or 0, "rope", "low"), want_number(options.high or 0, "rope", "high")
  ints[0], ints[1], ints[2], ints[3] = want_whole(options.position or 0, "rope", "position", 0),
    options.interleaved and 1 or 0, 0, want_whole(options.context or 0, "rope", "context", 0)
  return run1("rope", x)
end

local REDUCTION = { none = 0, mean = 1, sum = 2 }

local CROSS_ENTROPY = { label_smoothing = true, ignore_index = true, reduction = true,
  z_loss = true, soft_cap = true }

--- Cross entropy of logits [.. x V] and targets [..], class ids from 0. Options: label_smoothing
--- (0), ignore_index (-100: such targets do not count), reduction "mean" | "sum" | "none", soft_cap
--- (0: none; c: of c * tanh(logits / c)), z_loss (0: a factor; adds factor * logsumexp^2 to each
--- target's loss).
function M.cross_entropy(logits, targets, options)
  options = read_named(options, "cross_entropy", CROSS_ENTROPY)
  local reduction = REDUCTION[options.reduction or "mean"]
  if not reduction then
    raise("cross_entropy: expected reduction mean, sum or none, got %s",
      value_text(options.reduction))
  end
  ints[0], ints[1] = want_whole(options.ignore_index or -100, "cross_entropy", "ignore_index"),
    reduction
  for i, name in ipairs { "label_smoothing", "z_loss", "soft_cap" } do
    floats[i - 1] = want_number(options[name] or 0, "cross_entropy", name)
  end
  return (run_many("cross_entropy", 2, 2, logits, targets))
end

--- The mean of (a - b)^2 for two tensors of one shape.
function M.mse(a, b) return run2("mse", a, b) end

-- ------------------------------------------------------------------ the metatype

M.methods, M.getters = methods, getters

local function no_order(a, b)
  local hint = "a:lt(b), a:le(b), a:gt(b), a:ge(b)"
  raise("tensors are compared element by element: %s; got %s and %s", hint, value_text(a),
    value_text(b))
end

local function no_length(x)
  raise("a tensor has no length; hint: a:size(1), a.ndim, a.count; this one is %s",
    M.shape_text(x.shape))
end

local function no_assignment(_, key)
  raise("a tensor's field '%s' cannot be set; hint: x:fill(), x:copy() write elements",
    tostring(key))
end

ffi.metatype(Tensor, {
  __index = function(x, key)
    local method = methods[key]
    if method then return method end
    local getter = getters[key]
    if getter then return getter(x) end
    if type(key) == "number" then
      raise("a tensor is not indexed by numbers; hint: x:select(1, %g), x:slice(1, %g, %g)", key,
        key, key)
    end
    local names = {}
    for name in pairs(methods) do names[#names + 1] = name end
    for name in pairs(getters) do names[#names + 1] = name end
    table.sort(names)
    raise("a tensor has no method '%s'%s", tostring(key), nearest.hint(tostring(key), names))
  end,
  __newindex = no_assignment,
  __tostring = describe,
  __concat = function(a, b) return tostring(a) .. tostring(b) end,
  __add = add, __sub = sub, __mul = mul, __div = div, __pow = pow,
  __unm = function(a) return run1("neg", a) end,
  __eq = function(a, b)   -- the same handle; values are compared by a:eq(b)
    return is_tensor(a) and is_tensor(b) and tonumber(a.slot) == tonumber(b.slot)
      and tonumber(a.generation) == tonumber(b.generation)
  end,
  __lt = no_order, __le = no_order,
  __len = no_length,
})

return M
