-- Random choices, shapes and tensors for the fuzzer of operations (ops.lua, op_plans.lua). `state`
-- is the state of the random number generator. `odd` is set when a tensor is filled with the
-- special numbers VALUES; the caller clears it.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"

local ffi, C = M_ffi.ffi, M_ffi.C

local M = { state = 0, odd = false }

--- Returns an integer in 0 .. n - 1.
function M.draw(n)
  M.state = (M.state * 1103515245 + 12345) % 2 ^ 31
  return math.floor(M.state / 2 ^ 8) % n
end
function M.chance(percent) return M.draw(100) < percent end
function M.one_of(list) return list[M.draw(#list) + 1] end

M.WILD_INTS = { 0LL, 1LL, -1LL, 2LL, -2LL, 3LL, 5LL, 6LL, 7LL, 8LL, 9LL, 31LL, 32LL, 63LL, 64LL,
  255LL, 256LL, 2147483647LL, 2147483648LL, -2147483648LL,
  4294967296LL, 9007199254740992LL, 4611686018427387904LL, 9223372036854775807LL,
  -9223372036854775807LL - 1LL }
M.WILD_FLOATS = { 0, -0.0, 0.5, 1, -1, 2, 3, -0.5, 1e-8, 1e30, -1e30, 1e300, 5e-324, 1e-40,
  math.huge, -math.huge, 0 / 0, 2 ^ 31, 2 ^ 53, 2 ^ 63 }
local VALUES = { 0, -0.0, 1, -1, 2, 3, 0.5, -2.5, 65504, 65520, 1e-7, 6e-8, 3.4e38, -3.4e38, 1e-45,
  math.huge, -math.huge, 0 / 0, 127, 128, 255, 2 ^ 31, -2 ^ 63 }
M.DTYPES = { "f32", "f32", "f32", "f16", "bf16", "f64", "u8", "i8", "i16", "i32", "i64", "bool",
  "e4m3", "e5m2" }
M.FLOATS = { "f32", "f32", "f16", "bf16", "f64" }
local INTEGERS = { "i64", "i32", "i64", "u8", "i16", "i8" }
M.SIZES = { 1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 0, 1, 2, 3 }

function M.shape_of(least, most)
  local shape, count = {}, 1
  for d = 1, least + M.draw(most - least + 1) do
    local n = M.one_of(M.SIZES)
    if count * n > 5000 then n = 1 end
    shape[d], count = n, count * n
  end
  return shape
end

--- Fills a tensor with ordinary numbers or, one time in four, with numbers from VALUES, such as
--- inf, nan and extremes.
local function fill(x)
  local kind = M.draw(4)
  M.odd = M.odd or kind == 3
  if x.count == 0 then return x end
  if kind == 3 then
    local values = ffi.new("double[?]", x.count)
    for i = 0, x.count - 1 do values[i] = M.one_of(VALUES) end
    M_ffi.check(C.eng_write(x, values, M_ffi.dtype.f64, x.count))
  elseif x.dtype == "e4m3" or x.dtype == "e5m2" then
    local bytes = ffi.new("uint8_t[?]", x.count)
    for i = 0, x.count - 1 do bytes[i] = M.draw(256) end
    M_ffi.check(C.eng_write(x, bytes, M_ffi.dtype[x.dtype], x.count))
  else
    x:uniform(-2, 2 + 4 * kind)
  end
  return x
end

--- A tensor of this shape with any memory layout.
function M.tensor_of(shape, dtype)
  local n = #shape
  local how = M.draw(8)
  if how == 0 and n > 0 then                                  -- every other element of a tensor
    local d, larger = M.draw(n) + 1, {}
    for i = 1, n do larger[i] = shape[i] end
    larger[d] = 2 * shape[d] + 1
    if larger[d] > 1 then
      local x = fill(engine.zeros(larger, dtype))
      return M_ffi.run("slice", { x }, { d - 1, 1, 2 * shape[d] + (shape[d] > 0 and 0 or 1), 2 })
    end
  elseif how == 1 and n > 1 then                              -- transposed
    local turned = { unpack(shape) }
    turned[1], turned[n] = shape[n], shape[1]
    local order = {}
    for d = 1, n do order[d] = d - 1 end
    order[1], order[n] = n - 1, 0
    return M_ffi.run("permute", { fill(engine.zeros(turned, dtype)) }, order)
  elseif how == 2 and n > 0 then                              -- stride 0
    local small, list, d = { unpack(shape) }, { n }, M.draw(n) + 1
    small[d] = 1
    for i = 1, n do list[i + 1] = shape[i] end
    return M_ffi.run("expand", { fill(engine.zeros(small, dtype)) }, list)
  end
  return fill(engine.zeros(shape, dtype))
end

--- Integers in 0 .. n - 1, occasionally one outside.
function M.index_of(shape, n, dtype)
  local x = engine.zeros(shape, dtype or M.one_of(INTEGERS))
  local values = ffi.new("double[?]", math.max(x.count, 1))
  for i = 0, x.count - 1 do values[i] = n > 0 and M.draw(n) or 0 end
  if x.count > 0 and M.chance(8) then
    values[M.draw(x.count)] = M.one_of { -1, n, n + 1, 2 ^ 31, 2 ^ 62, -2 ^ 63, -100 }
  end
  if x.count > 0 then M_ffi.check(C.eng_write(x, values, M_ffi.dtype.f64, x.count)) end
  return x
end

function M.dim_of(shape) return M.chance(20) and M.draw(#shape) - #shape or M.draw(#shape) end
function M.with(shape, d, n)
  local other = { unpack(shape) }
  other[d] = n
  return other
end
function M.appended(shape, ...)
  local other = { unpack(shape) }
  for _, n in ipairs { ... } do other[#other + 1] = n end
  return other
end
function M.outer(shape) return { unpack(shape, 1, #shape - 1) } end

return M
