-- The microscaling formats, one number at a time, against tables written by hand from the OCP MX
-- specification 1.0. spec/parity/mx.py compares millions of numbers with ml_dtypes.
local engine = require "engine"

local encode, decode = engine.fp8.encode, engine.fp8.decode
local inf, nan = math.huge, 0 / 0

-- The magnitudes of all codes without sign.
local VALUES = {
  e2m1 = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 },
  e2m3 = { 0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75,
    1.875, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5 },
  e3m2 = { 0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1, 1.25,
    1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28 },
}

describe("microscaling formats", function()
  for format, values in pairs(VALUES) do
    it("decode and round every number and midpoint of " .. format, function()
      local sign = #values
      for i, value in ipairs(values) do
        local code = i - 1
        assert.equal(value, decode(code, format))
        assert.equal(-value, decode(code + sign, format))
        assert.equal(code, encode(value, format))
        assert.equal(code + sign, encode(-value, format))
        local above = values[i + 1]
        if above then
          local tie = (value + above) / 2
          local even = code % 2 == 0 and code or code + 1
          assert.equal(even, encode(tie, format))
          assert.equal(code, encode(tie * (1 - 2 ^ -50), format))
          assert.equal(code + 1, encode(tie * (1 + 2 ^ -50), format))
        end
      end
      for _, x in ipairs { values[sign] * 1.01, 1e300, inf } do
        assert.equal(sign - 1, encode(x, format))
        assert.equal(2 * sign - 1, encode(-x, format))
      end
      assert.equal(sign - 1, encode(nan, format))   -- as the hardware's cast
    end)
  end

  it("have the scale formats ue4m3 and ue8m0", function()
    assert.equal(0x7E, encode(448, "ue4m3"))
    assert.equal(0x7E, encode(-448, "ue4m3"))
    assert.equal(0x7F, encode(1e9, "ue4m3"))
    assert.equal(0x7E, encode(1e9, "ue4m3", { saturate = true }))
    assert.is_true(decode(0x7F, "ue4m3") ~= decode(0x7F, "ue4m3"))
    local nearest = { nearest = true }
    for x, code in pairs { [1] = 127, [1.4999] = 127, [1.5] = 128, [0.75] = 127, [2 ^ -130] = 0,
      [2 ^ -127] = 0, [2 ^ -127 * 1.25] = 1, [2 ^ 127] = 254, [2 ^ 127 * 1.5] = 255, [-1] = 255,
      [0] = 255 } do
      assert.equal(code, encode(x, "ue8m0", nearest))
    end
  end)

  it("include tf32, an e4m3 with inf, and two integer formats", function()
    assert.equal(0x1FC00, encode(1, "tf32"))
    assert.equal(1 + 2 ^ -10, decode(0x1FC01, "tf32"))
    assert.equal(0x1FC00, encode(1 + 2 ^ -11, "tf32"))
    assert.equal(2 ^ -136, decode(1, "tf32"))
    assert.equal(inf, decode(encode(3.4028234e38, "tf32"), "tf32"))
    assert.same({ 0x77, 240 }, { encode(247, "e4m3_ieee"), decode(0x77, "e4m3_ieee") })
    assert.same({ 0x78, 0xF8, inf }, { encode(248, "e4m3_ieee"), encode(-inf, "e4m3_ieee"),
      decode(0x78, "e4m3_ieee") })
    assert.is_true(decode(0x79, "e4m3_ieee") ~= 0 and not (decode(0x79, "e4m3_ieee") < inf))
    for x, code in pairs { [0.5] = 0, [1.5] = 2, [-0.5] = 0, [-1] = 255, [1000] = 127,
      [-1000] = 128 } do
      assert.equal(code, encode(x, "int8"))
    end
    for x, code in pairs { [1] = 64, [1.5 / 64] = 2, [5] = 127, [-5] = 129 } do
      assert.equal(code, encode(x, "mxint8"))
    end
    assert.same({ -2, 1 / 64 }, { decode(128, "mxint8"), decode(1, "mxint8") })
    assert.has_error(function() decode(16, "e2m1") end)
  end)
end)
