-- Conversions between f32, f16 and bf16, bit for bit against the reference device (which uses the
-- scalar conversions of core/base/numerics.h), with every instruction set of this machine. Inputs:
-- every f16 and bf16 number, and the f32 numbers around each of them and around each midpoint,
-- where rounding changes.
local engine = require "engine.base.ffi"
local values = require "spec.cpu.kernels.values"
local SETS = require("spec.cpu.kernels.compare").SETS
local bit = require "bit"
local ffi, C = engine.ffi, engine.C

local HALVES = 65536

--- A tensor of n elements and a pointer of type `ctype` to its bits.
local function bits_of(dtype, n, ctype)
  local x = values.tensor_of(dtype, { n })
  return x, ffi.cast(ctype, values.info_of(x).data)
end

local function cast(device, x, dtype, ctype)
  engine.check(C.eng_device_set(device))
  local y = engine.run("cast", { x }, { engine.dtype[dtype] })
  engine.check(C.eng_device_set("cpu"))
  return ffi.cast(ctype, values.info_of(y).data), y
end

--- Makes a signalling f32 NaN quiet: the reference converts through double, which quiets NaNs, but
--- a bf16 NaN becomes an f32 by a mere shift.
local function quiet(bits) return bit.bor(bits, 0x00400000) % 2 ^ 32 end

--- Compares bits on every instruction set; `source` shows the inputs.
local function expect_same(x, n, dtype, ctype, source)
  local want = cast("reference", x, dtype, ctype)
  for _, set in ipairs(SETS) do
    if #SETS > 1 then C.eng_cpu_isa(set) end
    local got = cast("cpu", x, dtype, ctype)
    for i = 0, n - 1 do
      if got[i] ~= want[i] and not (dtype == "f32" and got[i] % 2 ^ 31 > 0x7F800000
        and quiet(got[i]) == want[i]) then
        local message = ("%s: %s to %s: expected 0x%s, got 0x%s"):format(set, bit.tohex(source[i]),
          dtype, bit.tohex(want[i]), bit.tohex(got[i]))
        if #SETS > 1 then C.eng_cpu_isa(SETS[1]) end
        error(message, 2)
      end
    end
  end
  if #SETS > 1 then C.eng_cpu_isa(SETS[1]) end
end

describe("rounding (" .. table.concat(SETS, ", ") .. ")", function()
  before_each(function() engine.check(C.eng_step_begin()) end)
  after_each(function() engine.check(C.eng_step_end()) end)

  for _, dtype in ipairs { "f16", "bf16" } do
    it("widens every " .. dtype .. " to f32", function()
      local x, bits = bits_of(dtype, HALVES, "uint16_t*")
      for i = 0, HALVES - 1 do bits[i] = i end
      expect_same(x, HALVES, "f32", "uint32_t*", bits)
    end)

    it("rounds f32 to " .. dtype .. " at every number and midpoint, and their neighbours",
      function()
      local half, half_bits = bits_of(dtype, HALVES, "uint16_t*")
      for i = 0, HALVES - 1 do half_bits[i] = i end
      local number = cast("reference", half, "f32", "uint32_t*")
      local per = 6
      local x, bits = bits_of("f32", per * HALVES, "uint32_t*")
      for i = 0, HALVES - 1 do
        local here, above = number[i], number[math.min(i + 1, HALVES - 1)]
        -- f32 numbers of one sign are ordered like their bits, so the midpoint of two neighbours is
        -- the mean of their bits. Midpoints of subnormal f16 are computed from the values.
        local middle = math.floor((here + above) / 2)
        if dtype == "f16" and i % 32768 < 1024 then
          local pair = ffi.new("float[1]", (i % 32768 + 0.5) * 2 ^ -24 * (i < 32768 and 1 or -1))
          middle = ffi.cast("uint32_t*", pair)[0]
        end
        for k = -1, 1 do
          bits[per * i + 1 + k] = here + k
          bits[per * i + 4 + k] = middle + k
        end
      end
      expect_same(x, per * HALVES, dtype, "uint16_t*", bits)
    end)

    it("rounds f32 of arbitrary bits to " .. dtype, function()
      values.seed("any bits " .. dtype)
      local n = 200003
      local x, bits = bits_of("f32", n, "uint32_t*")
      for i = 0, n - 1 do bits[i] = values.integer(0, 65535) * 65536 + values.integer(0, 65535) end
      expect_same(x, n, dtype, "uint16_t*", bits)
    end)
  end

  it("converts between f16 and bf16 through f32, which holds both", function()
    local x, bits = bits_of("f16", HALVES, "uint16_t*")
    for i = 0, HALVES - 1 do bits[i] = i end
    expect_same(x, HALVES, "bf16", "uint16_t*", bits)
    local z, other = bits_of("bf16", HALVES, "uint16_t*")
    for i = 0, HALVES - 1 do other[i] = i end
    expect_same(z, HALVES, "f16", "uint16_t*", other)
  end)
end)
