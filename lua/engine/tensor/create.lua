-- Making tensors: zeros, ones, full, rand, randn, randint, arange, tensor, from_memory. Called
-- through tensor.lua, and by fp8.lua and mx.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"

local ffi, C, check, expect, raise, raise_if = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.expect,
  M_ffi.raise, M_ffi.raise_if
local value_text, dtype_number, Tensor = M_ffi.value_text, arguments.dtype_number, M_ffi.Tensor
local info, read_named, numbers = arguments.info, arguments.read_named, arguments.numbers
local want_number, want_whole = arguments.want_number, arguments.want_whole
local maxn = table.maxn   -- unlike #, it counts an entry after a nil
local AUTO, KEEP, STEP = C.ENG_AUTO, C.ENG_KEEP, C.ENG_STEP

local M = {}

local shape_buffer = ffi.new("int64_t[?]", C.ENG_MAX_DIMS)

-- Copies a shape, written as in zeros(2, 3) or zeros { 2, 3 }, into shape_buffer. Returns the
-- number of dimensions and the argument after the shape.
local function read_shape(name, ...)
  local list, n = numbers(...)
  local rest
  if list == (...) then
    rest = select(2, ...)
    raise_if(n == 0 and next(list) ~= nil,
      "%s: expected a shape first, got a table without numbers", name)
  elseif n > 0 and type(list[n]) ~= "number" then
    rest, n = list[n], n - 1
  end
  raise_if(n > C.ENG_MAX_DIMS, "%s: expected up to %d dimensions, got %d", name,
    tonumber(C.ENG_MAX_DIMS), n)
  for i = 1, n do shape_buffer[i - 1] = want_whole(list[i], name, "a dimension", 0) end
  return n, rest
end

local OPTIONS = "dtype keep requires_grad"

-- Returns the dtype that `options` name, or `preset`.
local function dtype_of(options, preset)
  return type(options) == "table" and options.dtype or type(options) == "string" and options
    or preset
end

-- Makes a tensor of the shape in shape_buffer. options: a dtype name, or { dtype, keep,
-- requires_grad }; zeros() below explains `keep`. preset: the default dtype, or nil for f32.
local function make(name, ndim, options, preset)
  local home, requires_grad = AUTO, false
  if options ~= nil and type(options) ~= "string" then
    expect(type(options) == "table", options,
      "%s: expected options to be a dtype name or a table", name)
    read_named(options, name, OPTIONS)
    requires_grad = options.requires_grad
    if options.keep ~= nil then home = options.keep and KEEP or STEP end
  end
  local x = Tensor()
  check(C.eng_new(x, dtype_number(dtype_of(options, preset or "f32")), ndim, shape_buffer, home))
  if requires_grad then check(C.eng_requires_grad(x, true)) end
  return x
end

-- Raises an error unless the integer dtype `dtype` can hold the numbers values[0..count-1]. Accepts
-- any numbers for other dtypes.
local function want_held(values, count, dtype, name)
  local sign, bits = tostring(dtype):match("^([iu])(%d+)$")
  if not sign or not M_ffi.dtype[dtype] then return end
  local power = sign == "u" and tonumber(bits) or bits - 1
  local low, high = sign == "u" and 0 or -2 ^ power, 2 ^ power
  for i = 0, count - 1 do
    local v = values[i]
    if not (v % 1 == 0 and v >= low and v < high) then     -- nan fails, too
      expect(false, v, "%s: expected whole numbers from %s to 2^%d - 1, the range of %s", name,
        sign == "u" and "0" or "-2^" .. power, power, dtype)
    end
  end
end

--- Sets every element of x to a number or a boolean; `name` names the function in errors.
function M.fill_with(x, value, name)
  if type(value) == "boolean" then value = value and 1 or 0 end
  want_number(value, name, "the value")
  want_held({ [0] = value }, 1, M_ffi.dtype_name[info(x).dtype], name)
  check(C.eng_fill(x, value))
  return x
end

--- engine.zeros(2, 3 [, options]) or engine.zeros({ 2, 3 } [, options]): a tensor of zeros. All
--- functions that make tensors take these options: a dtype name, or { dtype = "f32", keep,
--- requires_grad }. keep = true: the tensor lives until it is freed. keep = false: like the result
--- of an operation, it lives until the step or the scope ends. By default it belongs to the open
--- step or scope, if there is one, and otherwise lives until it is freed.
function M.zeros(...) return (make("zeros", read_shape("zeros", ...))) end

--- engine.ones(2, 3 [, options]): a tensor of ones.
function M.ones(...) return (M.fill_with(make("ones", read_shape("ones", ...)), 1, "ones")) end

--- engine.full({ 2, 3 }, 7 [, options]): a tensor with every element set to a number.
function M.full(shape, value, options)
  return (M.fill_with(make("full", read_shape("full", shape), options), value, "full"))
end

--- engine.rand(2, 3 [, options]): random numbers, uniform in [0, 1), from the engine's generator.
function M.rand(...)
  local x = make("rand", read_shape("rand", ...))
  check(C.eng_uniform(x, 0, 1))
  return x
end

--- engine.randn(2, 3 [, options]): random numbers, normal with mean 0 and standard deviation 1.
function M.randn(...)
  local x = make("randn", read_shape("randn", ...))
  check(C.eng_normal(x, 0, 1))
  return x
end

--- engine.randint(low, high, 2, 3 [, options]): whole numbers from low to high - 1, drawn
--- uniformly; i64 unless options say otherwise.
function M.randint(low, high, ...)
  want_whole(low, "randint", "the lower bound")
  raise_if(want_whole(high, "randint", "the upper bound") <= low,
    "randint: expected low < high, got %d and %d", low, high)
  local ndim, options = read_shape("randint", ...)
  want_held({ [0] = low, high - 1 }, 2, dtype_of(options), "randint")
  local x = make("randint", ndim, options, "i64")
  local count = tonumber(info(x).count)
  local values = arguments.host_array("double[?]", count, "randint")
  local draw = Tensor()
  shape_buffer[0] = count
  check(C.eng_new(draw, M_ffi.dtype.f64, 1, shape_buffer, STEP))
  check(C.eng_uniform(draw, low, high))
  check(C.eng_read(values, M_ffi.dtype.f64, count, draw))
  for i = 0, count - 1 do values[i] = math.floor(values[i]) end
  check(C.eng_write(x, values, M_ffi.dtype.f64, count))
  return x
end

--- engine.arange(start, stop [, step [, options]]): start, start + step, ... up to and including
--- stop, as in Lua's for. Unless options say otherwise, the dtype is i64, or f32 if start or step
--- is not whole.
function M.arange(start, stop, step, options)
  step = want_number(step or 1, "arange", "the step")
  want_number(start, "arange", "the first value")
  want_number(stop, "arange", "the last value")
  if step == 0 then raise("arange: expected a step other than 0, got 0") end
  local count = math.max(0, math.floor((stop - start) / step + 1e-9) + 1)
  raise_if(not (count <= 2 ^ 53), "arange: expected finite numbers and at most 2^53 elements, " ..
    "got %s to %s by %s", value_text(start), value_text(stop), value_text(step))
  shape_buffer[0] = count
  local whole = start % 1 == 0 and step % 1 == 0
  local values = arguments.host_array("double[?]", count, "arange")
  for i = 0, count - 1 do values[i] = start + i * step end
  want_held(values, count, dtype_of(options, whole and "i64" or "f32"), "arange")
  local x = make("arange", 1, options, whole and "i64" or "f32")
  check(C.eng_write(x, values, M_ffi.dtype.f64, count))
  return x
end

local function table_shape(value, shape, depth)
  -- The depth limit also ends the recursion into a table that contains itself.
  if type(value) ~= "table" or depth > C.ENG_MAX_DIMS + 1 then return end
  if shape[depth] == nil then shape[depth] = maxn(value) end
  if shape[depth] == 0 then arguments.want_list(value, "tensor", "the table", "{ 1, 2, 3 }") end
  if shape[depth] > 0 then table_shape(value[1], shape, depth + 1) end
end

local function flatten(value, shape, depth, out, at)
  if depth > #shape then
    if type(value) == "boolean" then value = value and 1 or 0 end
    expect(type(value) == "number", value, "tensor: expected a number%s", depth == 1
      and " or a table of numbers" or (" as element %d"):format(at + 1))
    out[at] = value
    return at + 1
  end
  if type(value) ~= "table" or maxn(value) ~= shape[depth] then
    raise("tensor: expected each row at depth %d to be a table of length %d, like the first " ..
      "row, got %s", depth, shape[depth], type(value) == "table"
      and ("a table of length %d"):format(maxn(value)) or value_text(value))
  end
  for i = 1, shape[depth] do at = flatten(value[i], shape, depth + 1, out, at) end
  return at
end

--- engine.tensor({ { 1, 2 }, { 3, 4 } } [, options]) or engine.tensor(5): a tensor of the numbers
--- and booleans in a nested table, whose rows must have equal lengths.
function M.tensor(value, options)
  local shape, count = {}, 1
  table_shape(value, shape, 1)
  raise_if(#shape > C.ENG_MAX_DIMS, "tensor: expected up to %d dimensions, got %d",
    tonumber(C.ENG_MAX_DIMS), #shape)
  for i, n in ipairs(shape) do count, shape_buffer[i - 1] = count * n, n end
  local values = ffi.new("double[?]", math.max(count, 1))
  flatten(value, shape, 1, values, 0)
  want_held(values, count, dtype_of(options), "tensor")
  local x = make("tensor", #shape, options)
  check(C.eng_write(x, values, M_ffi.dtype.f64, count))
  return x
end

--- A tensor copied from memory. `pointer` is an array from ffi.new or a cdata pointer; it holds the
--- elements of `shape` in row-major order, in the dtype `from`. The result has that dtype unless
--- options say otherwise. An array that is too short is an error; the size of the memory behind a
--- pointer is not checked.
function M.from_memory(pointer, from, shape, options)
  local kind = type(pointer) == "cdata" and tostring(ffi.typeof(pointer)):match("[*%[]")
  expect(kind, pointer, "from_memory: expected a pointer or an array from ffi.new")
  local x, number = make("from_memory", read_shape("from_memory", shape), options, from),
    dtype_number(from)
  local count = tonumber(info(x).count)
  local bytes = count * C.eng_dtype_size(number)
  raise_if(kind == "[" and ffi.sizeof(pointer) < bytes, "from_memory: expected an array of %d " ..
    "bytes or more for %d elements of %s, got %d bytes", bytes, count, from, ffi.sizeof(pointer))
  check(C.eng_write(x, pointer, number, count))
  return x
end

return M
