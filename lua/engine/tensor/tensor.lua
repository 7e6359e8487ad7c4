-- Tensors in Lua. A tensor is a handle, a small cdata {slot, generation}, with the operations as
-- methods. The handle holds no elements. A tensor made inside a step is freed when the step ends,
-- unless it was made with keep = true; :keep() makes a copy that outlives the step.
--
-- Counting follows Lua: dimensions and positions start at 1, ranges are inclusive, and negative
-- numbers count from the end (dimension -1 is the last). The numbers inside index tensors (token
-- ids, classes) are data and count from 0. Used by scripts and most folders.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local calls = require "engine.tensor.calls"
local create = require "engine.tensor.create"
local describe = require "engine.tensor.describe"
local nearest = require "engine.base.nearest"

require "engine.tensor.elementwise"
require "engine.tensor.views"
require "engine.tensor.products"

local ffi, C, check, expect, raise, raise_if = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.expect,
  M_ffi.raise, M_ffi.raise_if
local Tensor, dtype_name, value_text = M_ffi.Tensor, M_ffi.dtype_name, M_ffi.value_text
local is_tensor, info, shape_table = arguments.is_tensor, arguments.info, arguments.shape_table
local dimension, want_number, fill = arguments.dimension, arguments.want_number, create.fill_with

local methods, getters = calls.methods, {}
local M = { is_tensor = is_tensor, shape_text = arguments.shape_text,
  read_named = arguments.read_named, methods = methods, getters = getters }
for name, f in pairs(calls.functions) do M[name] = f end
for name, f in pairs(create) do M[name] = f end

-- ------------------------------------------------------------------ properties

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
--- Whether x is a leaf: not the result of a recorded operation.
function getters.is_leaf(x) return info(x).is_leaf ~= 0 end
--- Where the elements are: cpu, reference or cuda.
function getters.device(x)
  if info(x).space == 1 then return "cuda" end
  local name = M_ffi.string(C.eng_device_name())
  return name == "cuda" and "cpu" or name
end
--- The gradient that backward() computed, in x's shape, or nil.
function getters.grad(x)
  local g = Tensor()
  check(C.eng_gradient(g, x))
  if g.slot ~= 0 then return g end
end

--- The size of dimension d; without d, the sizes of all dimensions, as several results.
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
--- Returns a copy of the elements, row-major, as a C array of `dtype` (by default the tensor's
--- dtype), and the number of elements. f16 and bf16 come as uint16_t codes, e4m3 and e5m2 as
--- uint8_t codes.
function methods.read(x, dtype)
  local what = info(x)
  local count, number = tonumber(what.count), dtype and arguments.dtype_number(dtype) or what.dtype
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

--- Frees a kept tensor; its handles are stale from then on. Frees a tensor of the step only if the
--- tape is empty; otherwise that tensor lives until the step ends.
function methods.free(x) check(C.eng_free(x)) end

--- Declares that x, a tensor of the step, is not used again: its memory is freed at once, unless
--- the backward pass needs it or another tensor, such as a view, uses it.
function methods.done(x) check(C.eng_done(x)) end

--- Makes backward() compute the gradient of x, or, with on = false, leave it out; returns x.
function methods.requires_grad(x, on)
  expect(on == nil or type(on) == "boolean", on, "requires_grad: expected true or false")
  check(C.eng_requires_grad(x, on ~= false))
  return x
end

--- A view of x's values that has no gradient.
function methods.detach(x)
  arguments.want(x, "detach")
  local shape = shape_table(info(x))   -- raises for a stale handle before recording is off
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
--- Copies a number, or the elements of a tensor or a nested table, into x, in x's dtype. The shape
--- of the source must broadcast to x's shape. Returns x.
function methods.copy(x, source)
  if not is_tensor(source) then
    expect(source ~= nil and type(source) ~= "string", source,
      "copy: expected a tensor, a number or a table of numbers")
    source = M.tensor(source, { dtype = dtype_name[info(x).dtype], keep = false })
  end
  check(C.eng_copy(x, source))
  return x
end
--- Draws the elements uniformly from [low, high), by default [0, 1); returns x.
function methods.uniform(x, low, high)
  check(C.eng_uniform(x, want_number(low or 0, "uniform", "the lower bound"),
    want_number(high or 1, "uniform", "the upper bound")))
  return x
end
--- Draws the elements from a normal distribution, by default with mean 0 and std 1; returns x.
function methods.normal(x, mean, std)
  check(C.eng_normal(x, want_number(mean or 0, "normal", "the mean"),
    want_number(std or 1, "normal", "the standard deviation")))
  return x
end

-- ------------------------------------------------------------------ the metatype

local function no_order(a, b)
  raise("expected two numbers to compare, got %s and %s; hint: a:lt(b), a:le(b), a:gt(b) and " ..
    "a:ge(b) compare tensors element by element", value_text(a), value_text(b))
end

local function no_length(x)
  raise("a tensor has no length, got one of shape %s; hint: x:size(1), x.ndim, x.count",
    M.shape_text(x.shape))
end

-- Returns a metamethod that raises an error.
local function refusing(message) return function() raise(message) end end
local no_loop = refusing("a tensor cannot be looped over; hint: for i = 1, x:size(1) do local " ..
  "row = x:select(1, i)")

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
    raise_if(type(key) ~= "string", "a tensor cannot be indexed, got x[%s]; hint: " ..
      "x:select(1, i), x:slice(1, i, j)", value_text(key))
    local known = {}
    for _, names in ipairs { methods, getters } do
      for name in pairs(names) do known[name] = true end
    end
    local hint = nearest.hint(key, known, true)
    raise("a tensor has no method '%s'%s", key, hint ~= "" and hint
      or "; hint: docs/from-pytorch.md lists PyTorch's names")
  end,
  __newindex = no_assignment,
  __tostring = describe,
  __concat = function(a, b) return tostring(a) .. tostring(b) end,
  __add = methods.add, __sub = methods.sub, __mul = methods.mul, __div = methods.div,
  __pow = methods.pow, __unm = methods.neg,
  __eq = function(a, b)   -- the same handle; values are compared by a:eq(b)
    return is_tensor(a) and is_tensor(b) and a.slot == b.slot and a.generation == b.generation
  end,
  __lt = no_order, __le = no_order,
  __len = no_length, __pairs = no_loop, __ipairs = no_loop,
  __call = refusing "a tensor cannot be called; hint: x:method(...), or model(x)",
  __mod = refusing("expected two numbers for %, got a tensor; hint: if x >= 0, " ..
    "x - (x / n):to('i64') * n"),
})

return M
