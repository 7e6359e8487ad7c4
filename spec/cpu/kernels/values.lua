-- Tensors for the kernel specs: every number format, values of every kind, every layout in memory.
local engine = require "engine.base.ffi"
local ffi = engine.ffi
local C = engine.C

local M = {}

-- ------------------------------------------------------------------ number formats

local FORMATS = {   -- digits after the leading one, smallest and largest exponent
  f32 = { digits = 23, low = -126, high = 127 }, f64 = { digits = 52, low = -1022, high = 1023 },
  f16 = { digits = 10, low = -14, high = 15 }, bf16 = { digits = 7, low = -126, high = 127 },
}
local INTEGERS = { u8 = { 0, 255 }, i8 = { -128, 127 }, i16 = { -32768, 32767 },
  i32 = { -2 ^ 31, 2 ^ 31 - 1 }, i64 = { -2 ^ 53, 2 ^ 53 } }
local FLOATS = { "f32", "f16", "bf16", "f64" }
local ALL_INTEGERS = { "u8", "i8", "i16", "i32", "i64" }

local function largest(format) return (2 - 2 ^ -format.digits) * 2 ^ format.high end

--- Distance between neighbouring numbers of a format around `value`.
local function ulp_of(value, format)
  local _, exponent = math.frexp(value)   -- value = m * 2^exponent with 0.5 <= |m| < 1
  exponent = exponent - 1
  if value == 0 or exponent < format.low then exponent = format.low end
  return 2 ^ (exponent - format.digits)
end

-- ------------------------------------------------------------------ random values

local state = 1
local function seed(text)
  state = 1
  for i = 1, #text do state = (state * 31 + text:byte(i)) % 2147483647 end
  if state == 0 then state = 1 end
end
--- Uniform in (0, 1): Lehmer's generator.
local function uniform()
  state = (state * 48271) % 2147483647
  return state / 2147483647
end
local function integer(low, high) return low + math.floor(uniform() * (high - low + 1)) end
local function sign() return uniform() < 0.5 and -1 or 1 end

local inf, nan = math.huge, 0 / 0

--- The corner cases of a format's arithmetic.
local function corners(dtype)
  local f = FORMATS[dtype]
  local smallest, normal, top = 2 ^ (f.low - f.digits), 2 ^ f.low, largest(f)
  return { 0, -0.0, inf, -inf, nan, smallest, -smallest, 3 * smallest, normal, -normal,
    normal - smallest, top, -top, top / 2,
    1, -1, 0.5, 2, -2, 3, -0.75, 1 + 2 ^ -f.digits }
end

-- Kinds of random values: kind(format, dtype) gives one.
local kinds = {
  normal = function() return sign() * 3 * uniform() end,
  positive = function() return 0.1 + 3 * uniform() end,
  -- every exponent of the format, subnormals included
  wide = function(f)
    return sign() * (1 + uniform()) * 2 ^ integer(f.low - f.digits, f.high - 1)
  end,
  -- subnormals and the smallest normal numbers
  tiny = function(f) return sign() * (1 + uniform()) * 2 ^ integer(f.low - f.digits, f.low + 2) end,
  -- products of two sometimes overflow f16; in f32 and bf16 they are large
  large = function(f) return sign() * (1 + uniform()) * (f.high == 15 and 128 or 2 ^ 40) end,
  special = function(_, dtype)
    local list = corners(dtype)
    return uniform() < 0.5 and list[integer(1, #list)] or sign() * 3 * uniform()
  end,
  -- so few NaN and Inf that most results stay finite
  rare = function()
    local u = uniform()
    return u < 0.01 and nan or u < 0.02 and inf or u < 0.03 and -inf or u < 0.1 and 0
      or sign() * 3 * uniform()
  end,
  -- Mostly zeros. The other numbers add up to ties of bf16 and to numbers slightly beyond a tie,
  -- which sums in f32 may lose.
  sparse = function()
    if uniform() < 0.75 then return 0 end
    local list = { 1, 1, 1, 2 ^ -8, 2 ^ -8, 2 ^ -9, 2 ^ -20, 2 ^ -30, 2 ^ 126, inf, nan }
    return sign() * list[uniform() < 0.01 and integer(9, #list) or integer(1, 8)]
  end,
  -- many ties
  few = function() return integer(-2, 2) end,
  -- exp spans 0 to infinity here
  range = function() return sign() * 110 * uniform() end,
}

-- ------------------------------------------------------------------ tensors

local function count_of(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

local function tensor_of(dtype, shape, values)
  local out, n = ffi.new("eng_tensor"), count_of(shape)
  engine.check(C.eng_new(out, engine.dtype[dtype], #shape, ffi.new("int64_t[?]", #shape + 1, shape),
    false))
  if values then engine.check(C.eng_write(out, values, engine.dtype.f64, n)) end
  return out
end

local function info_of(x)
  local info = ffi.new("eng_tensor_info")
  engine.check(C.eng_info(info, x))
  return info
end

local function shape_of(x)
  local info, shape = info_of(x), {}
  for d = 1, info.ndim do shape[d] = tonumber(info.shape[d - 1]) end
  return shape
end

local function dtype_of(x) return engine.dtype_name[info_of(x).dtype] end

--- All elements in row-major order as doubles, and their number.
local function values_of(x)
  local n = tonumber(info_of(x).count)
  local values = ffi.new("double[?]", n + 1)
  engine.check(C.eng_read(values, engine.dtype.f64, n, x))
  return values, n
end

local laid = setmetatable({}, { __mode = "k" })   -- view -> { operation, its base, ints }

local function view(op, base, ints)
  local x = engine.run(op, { base }, ints)
  laid[x] = { op, base, ints }
  return x
end

--- A copy of x on another device, with the memory layout of x if this file made that layout.
local function on_device(x, device)
  local how = laid[x]
  local out = ffi.new("eng_tensor")
  engine.check(C.eng_to_device(out, how and how[2] or x, device))
  return how and engine.run(how[1], { out }, how[3]) or out
end

--- A tensor filled from `draw()`, with the memory layout `layout`:
---   plain       row-major
---   transposed  the last two dimensions swapped in memory (plain if there is only one)
---   sliced      every second element of the last dimension of a larger tensor, starting at the
---               second
---   expanded    the first dimension broadcast from size 1
local function lay(dtype, shape, draw, layout)
  local n = #shape
  local memory = {}
  for d = 1, n do memory[d] = shape[d] end
  if layout == "transposed" and n >= 2 then memory[n - 1], memory[n] = shape[n], shape[n - 1]
  elseif layout == "sliced" and n >= 1 then memory[n] = 2 * shape[n] + 1
  elseif layout == "expanded" and n >= 1 then memory[1] = 1 end
  local total = count_of(memory)
  local values = ffi.new("double[?]", total + 1)
  for i = 0, total - 1 do values[i] = draw() end
  local x = tensor_of(dtype, memory, values)
  if layout == "transposed" and n >= 2 then
    local order = {}
    for d = 1, n do order[d] = d - 1 end
    order[n - 1], order[n] = n - 1, n - 2
    return view("permute", x, order)
  elseif layout == "sliced" and n >= 1 then
    return view("slice", x, { n - 1, 1, 2 * shape[n] + 1, 2 })
  elseif layout == "expanded" and n >= 1 then
    return view("expand", x, { n, unpack(shape) })
  end
  return x
end

local LAYOUTS = { "plain", "transposed", "sliced", "expanded" }

--- A float tensor with values of one kind.
local function float(dtype, shape, kind, layout)
  local format = FORMATS[dtype]
  return lay(dtype, shape, function() return kinds[kind](format, dtype) end, layout)
end

--- Integers in low..high; a bool is 0..1.
local function whole(dtype, shape, low, high, layout)
  return lay(dtype, shape, function() return integer(low, high) end, layout)
end

local function listed(dtype, shape, list)
  return tensor_of(dtype, shape, ffi.new("double[?]", #list + 1, list))
end

--- Typical rows of scores for softmax: ordinary, masked with -inf, all -inf, with +inf, with NaN,
--- far apart, all equal, at the limits of the format, spread wide.
local function score_rows(dtype, n, layout)
  local top = largest(FORMATS[dtype])
  local patterns = {
    function() return sign() * 5 * uniform() end,
    function() return uniform() < 0.5 and -inf or uniform() end,
    function() return -inf end,
    function(i) return i == 0 and inf or uniform() end,
    function(i) return i == n - 1 and nan or uniform() end,
    function(i) return i == 0 and 80 or -80 * uniform() end,
    function() return 3 end,
    function(i) return i == 0 and top or -top end,
    function() return sign() * 100 * uniform() end,
  }
  local x = ffi.new("double[?]", #patterns * n)
  for row = 0, #patterns - 1 do
    -- in memory row by row, or column by column
    for i = 0, n - 1 do
      x[layout == "transposed" and i * #patterns + row or row * n + i] = patterns[row + 1](i)
    end
  end
  if layout ~= "transposed" then return tensor_of(dtype, { #patterns, n }, x) end
  return engine.run("permute", { tensor_of(dtype, { n, #patterns }, x) }, { 1, 0 })
end

--- True for a call to leave out: of the calls with a large tensor in a loop over kinds of values,
--- the processor makes one in five; the card makes all. `index` varies with the innermost loops.
local function skips(shape, index)
  return not os.getenv("ENGINE_TEST_DEVICE") and count_of(shape) > 10000 and index % 5 ~= 0
end

--- Adds the fields of `more` to a call, and returns the call.
local function with(call, more)
  for key, value in pairs(more or {}) do call[key] = value end
  return call
end

--- A list with the items of a, then those of b.
local function both(a, b)
  local list = { unpack(a) }
  for _, item in ipairs(b) do list[#list + 1] = item end
  return list
end

--- Seeds the random numbers from a string.
M.seed = seed
M.uniform, M.integer, M.sign, M.kinds, M.corners = uniform, integer, sign, kinds, corners
M.FORMATS, M.INTEGERS, M.FLOATS, M.ALL_INTEGERS, M.LAYOUTS = FORMATS, INTEGERS, FLOATS,
  ALL_INTEGERS, LAYOUTS
M.largest, M.ulp_of, M.count_of = largest, ulp_of, count_of
M.tensor_of, M.info_of, M.shape_of, M.dtype_of, M.values_of = tensor_of, info_of, shape_of,
  dtype_of, values_of
M.on_device, M.lay, M.float, M.whole, M.listed, M.score_rows, M.skips, M.with, M.both = on_device,
  lay, float, whole, listed, score_rows, skips, with, both

return M
