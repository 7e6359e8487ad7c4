-- Elementwise operations of tensors: arithmetic with tensors and numbers, unary functions,
-- comparisons, clamping, choosing, dropout, conversions. Called through tensor.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local calls = require "engine.tensor.calls"

local C, check, expect, Tensor, call = M_ffi.C, M_ffi.check, M_ffi.expect, M_ffi.Tensor, M_ffi.call
local ints, floats = call.ints, call.floats
local is_tensor, info, want = arguments.is_tensor, arguments.info, arguments.want
local dtype_number, read_named = arguments.dtype_number, arguments.read_named
local methods, run1, run2, run_many = calls.methods, calls.run1, calls.run2, calls.run_many
local want_number, huge, STEP = arguments.want_number, math.huge, C.ENG_STEP
local item_buffer = M_ffi.new("double[1]")

local FLOAT = { [M_ffi.dtype.f32] = true, [M_ffi.dtype.f64] = true, [M_ffi.dtype.f16] = true,
  [M_ffi.dtype.bf16] = true }
local LOW = { [M_ffi.dtype.f16] = true, [M_ffi.dtype.bf16] = true }
-- The integer dtypes that dtype_beside may choose for a number, smallest first, as { name, lowest
-- number, highest number }.
local INTEGERS = { { "u8", 0, 255 }, { "i16", -2 ^ 15, 2 ^ 15 - 1 },
  { "i32", -2 ^ 31, 2 ^ 31 - 1 }, { "i64", -2 ^ 63, 2 ^ 63 - 1024 } }
local RANGE = { [M_ffi.dtype.i8] = { -128, 127 }, [M_ffi.dtype.bool] = { 0, 1 } }
for _, row in ipairs(INTEGERS) do RANGE[M_ffi.dtype[row[1]]] = { row[2], row[3] } end

-- Returns the dtype for a number that is combined with a tensor of `dtype`. This is `dtype` itself
-- if it is a float dtype or can hold the number; otherwise the first of INTEGERS that can hold the
-- number, or f32 if none can.
local function dtype_beside(dtype, value)
  if FLOAT[dtype] or not RANGE[dtype] then return dtype end   -- FP8: the operation raises an error
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

-- Makes a tensor that holds a number, to combine it with x. If x is f16 or bf16 and x's dtype would
-- round the number, the new tensor is f32 and the second result is true.
local function scalar_beside(x, value)
  local dtype = info(x).dtype
  local y = scalar(value, dtype_beside(dtype, value))
  if not LOW[dtype] then return y, false end
  check(C.eng_item(item_buffer, y))
  if item_buffer[0] == value or value ~= value then return y, false end
  return scalar(value, M_ffi.dtype.f32), true
end

local function want_operand(x, name)
  expect(is_tensor(x), x, "%s: expected two tensors, or a tensor and a number", name)
end

-- Runs an operation on two tensors, or on a tensor and a number. A number never widens a float
-- result: if scalar_beside() stores the number in f32 although the tensor is f16 or bf16, the
-- result is rounded back to the tensor's dtype. The result of a comparison stays bool.
local function pair(name, a, b, compares)
  local wide, dtype
  if type(b) == "number" and is_tensor(a) then
    dtype = info(a).dtype
    b, wide = scalar_beside(a, b)
  elseif type(a) == "number" and is_tensor(b) then
    dtype = info(b).dtype
    a, wide = scalar_beside(b, a)
  end
  want_operand(a, name)
  want_operand(b, name)
  local y = run2(name, a, b)
  if not wide or compares then return y end
  ints[0] = dtype
  return run1("cast", y)
end

local function is_float(x) return is_tensor(x) and FLOAT[info(x).dtype] end

-- Computes x * factor + term in one pass, rounded once. Used for sums, differences and products of
-- a float tensor and a number.
local function affine(x, factor, term)
  floats[0], floats[1] = factor, term
  return run1("affine", x)
end

--- a + b, with broadcasting; b may be a number.
function methods.add(a, b)
  if type(b) == "number" and is_float(a) then return affine(a, 1, b) end
  if type(a) == "number" and is_float(b) then return affine(b, 1, a) end
  return pair("add", a, b)
end
--- a - b, with broadcasting; b may be a number.
function methods.sub(a, b)
  if type(b) == "number" and is_float(a) then return affine(a, 1, -b) end
  if type(a) == "number" and is_float(b) then return affine(b, -1, a) end
  return pair("sub", a, b)
end
--- a * b elementwise, with broadcasting; b may be a number.
function methods.mul(a, b)
  if type(b) == "number" and is_float(a) then return affine(a, b, 0) end
  if type(a) == "number" and is_float(b) then return affine(b, a, 0) end
  return pair("mul", a, b)
end
--- a / b, with broadcasting; b may be a number. Integers give floats.
function methods.div(a, b) return pair("div", a, b) end
--- a ^ b, with broadcasting; b may be a number.
function methods.pow(a, b)
  if type(b) ~= "number" or not is_float(a) then return pair("pow", a, b) end
  floats[0], floats[1] = b, 0
  return run1("pow_scalar", a)
end

--- Elementwise, with broadcasting; b may be a number. If a or b is NaN, maximum and minimum give
--- NaN. Comparisons give bool.
---   maximum, minimum   the larger (maximum) or smaller (minimum) of a and b
---   eq, ne             a == b, a ~= b
---   lt, le, gt, ge     a < b, a <= b, a > b, a >= b
for _, name in ipairs { "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge" } do
  local compares = #name == 2
  methods[name] = function(a, b) return pair(name, a, b, compares) end
end

--- Elementwise functions of a float tensor (neg, abs and relu also take integers). The result is
--- computed in f32 (f64 for an f64 tensor) and rounded once into x's dtype, or into the dtype that
--- autocast sets.
---   neg, abs           -x, the magnitude
---   exp, log           e^x, the natural logarithm
---   sqrt, rsqrt        the square root, 1 / sqrt(x)
---   sin, cos, tanh     the sine and cosine of x in radians, the hyperbolic tangent
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

--- A row-major copy.
function methods.contiguous(x) return run1("contiguous", x) end
--- Functions along the last dimension. The result is computed in f32 (f64 for an f64 tensor) and
--- rounded once into x's dtype, or into the dtype that autocast sets. The optional argument d must
--- be the last dimension.
---   softmax            e^x / sum(e^x) over the last dimension
---   log_softmax        log(softmax(x)) over the last dimension
---   logsumexp          log(sum(e^x)) over the last dimension; removes this dimension, unless
---                      keepdim, the argument after d, is true
for _, name in ipairs { "softmax", "log_softmax", "logsumexp" } do
  methods[name] = function(x, d, keepdim)
    want(x, name)
    calls.want_last(x, d, name)
    local keep = name == "logsumexp" and calls.keep_of(keepdim, name) == 1
    return keep and methods.unsqueeze(run1(name, x), -1) or run1(name, x)
  end
end

--- GELU: gelu(x) is the erf form, gelu(x, "tanh") the tanh form, which GPT-2 uses.
function methods.gelu(x, form)
  expect(form == nil or form == "tanh" or form == "erf", form, "gelu: expected 'erf' or 'tanh'")
  return run1(form == "tanh" and "gelu_tanh" or "gelu", x)
end

--- x * x.
function methods.square(x) return methods.mul(x, x) end

--- silu(gate) * up for two tensors of one shape. site: the FP8 site of the layer that reads the
--- result, or nil.
function methods.swiglu(gate, up, site)
  if not site then return run2("swiglu", gate, up) end
  call.fp8_swiglu.site = site
  return (run2("fp8_swiglu", gate, up))
end

--- Elements below low become low, and elements above high become high. low or high may be nil: no
--- limit. If low > high, all elements become high.
function methods.clamp(x, low, high)
  want(x, "clamp")
  floats[0], floats[1] = want_number(low or -huge, "clamp", "the lower limit"),
    want_number(high or huge, "clamp", "the upper limit")
  return run1("clamp", x)
end

-- Returns a, or a tensor that holds the number a, to combine it with b.
local function beside(a, b)
  if type(a) ~= "number" then return a end
  return scalar(a, is_tensor(b) and dtype_beside(info(b).dtype, a) or M_ffi.dtype.f32)
end

--- condition:where(a, b): a where the condition holds, else b; a and b may be numbers.
function methods.where(condition, a, b)
  return run_many("where", 1, 3, condition, beside(a, b), beside(b, a))
end

--- Sets elements to zero with probability p and scales the others by 1 / (1 - p).
function methods.dropout(x, p)
  want(x, "dropout")
  floats[0], ints[0], ints[1] = want_number(p, "dropout", "the probability"), 0, 0
  return run1("dropout", x)
end

local DEVICES = { cpu = true, cuda = true, reference = true }

local CAST = "saturate stochastic"

--- x converted to another dtype (x itself if it has that dtype), or a copy of x on another device
--- (cpu, cuda, reference). A copy to a device is not recorded for backward(). Numbers that are too
--- large become NaN in e4m3 and Inf in e5m2. Options for these two dtypes: saturate (such numbers
--- become the largest finite one), stochastic (rounds up or down at random; the distances to both
--- neighbours set the probability).
function methods.to(x, dtype, options)
  want(x, "to")
  expect(type(dtype) == "string", dtype,
    "to: expected the name of a dtype or a device, such as 'bf16' or 'cuda'")
  if DEVICES[dtype] then
    local out = Tensor()
    check(C.eng_to_device(out, x, dtype))
    return out
  end
  local number = dtype_number(dtype, "cpu cuda reference")
  local flags = 0
  if options ~= nil then
    options = read_named(options, "to", CAST)
    expect(dtype == "e4m3" or dtype == "e5m2", dtype,
      "to: expected e4m3 or e5m2, the dtypes with the options saturate and stochastic")
    flags = (options.saturate and 1 or 0) + (options.stochastic and 2 or 0)
  end
  if info(x).dtype == number then return x end
  ints[0], ints[1], ints[2], ints[3] = number, flags, 0, 0
  return run1("cast", x)
end
