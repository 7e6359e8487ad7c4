-- engine.bits: a number in every format, against known values.
local engine = require "engine"
local helper = require "spec.helper"

local inf, nan = math.huge, 0 / 0

describe("bits", function()
  it("rounds to each format once, from the double", function()
    local b = engine.bits(15213.0)
    assert.equal(15213, b.f64.value)
    assert.equal(15213, b.f32.value)
    assert.equal(15232, b.bf16.value)
    assert.equal(15216, b.f16.value)
    assert.equal(3, b.f16.error)
    assert.same({ 15208, 15224 }, { b.f16.below, b.f16.above })
    assert.same({ "0", "11100", "1101101110" }, { b.f16.sign, b.f16.exponent, b.f16.fraction })
    assert.equal(14336, b.e5m2.value)
    assert.equal(8192, b.ue8m0.value)
    assert.is_true(b.e4m3.value ~= b.e4m3.value)
    assert.same({ "0", "10000001100", "1101101101101000000000000000000000000000000000000000" },
      { b.f64.sign, b.f64.exponent, b.f64.fraction })
  end)

  it("knows neighbours across zero, powers of two and the ends", function()
    local b = engine.bits(0)
    assert.same({ -2 ^ -24, 2 ^ -24 }, { b.f16.below, b.f16.above })
    assert.same({ -2 ^ -149, 2 ^ -149 }, { b.f32.below, b.f32.above })
    b = engine.bits(-1)
    assert.same({ -1 - 2 ^ -10, -1 + 2 ^ -11 }, { b.f16.below, b.f16.above })
    assert.same({ -1 - 2 ^ -52, -1 + 2 ^ -53 }, { b.f64.below, b.f64.above })
    b = engine.bits(65504)
    assert.same({ 65472, inf }, { b.f16.below, b.f16.above })
    assert.same({ 416, nil }, { engine.bits(448).e4m3.below, engine.bits(448).e4m3.above })
  end)

  it("distinguishes subnormal, lost, too large, inf, nan and -0", function()
    assert.is_true(engine.bits(2 ^ -24).f16.subnormal)
    assert.is_false(engine.bits(2 ^ -14).f16.subnormal)
    local small = tostring(engine.bits(1e-9))
    assert.matches("f16 +0 +lost", small)
    assert.matches("f16 +inf +too large", tostring(engine.bits(1e6)))
    assert.matches("%(subnormal%)", tostring(engine.bits(2 ^ -24)))
    assert.matches("f32 +%-0 +exact", tostring(engine.bits(-0)))
    assert.equal(inf, engine.bits(inf).f32.value)
    assert.matches("f16 +nan", tostring(engine.bits(nan)))
    assert.equal(1.5, engine.bits("0x3p-1").f64.value)
    assert.has_error(function() engine.bits {} end)
  end)

  it("is a table of eight lines, and a global of the REPL", function()
    local text = tostring(engine.bits(0.1))
    assert.matches("^0%.1 = 1%.6 %* 2%^%-4\nformat +value +error", text)
    for _, name in ipairs { "f64", "f32", "bf16", "f16", "e5m6", "e5m2", "e4m3", "ue8m0" } do
      assert.matches("\n" .. name .. " ", text, 1, true)
    end
    local result = helper.run({ "-i", "-e", "" }, "bits(15213.0)\nbits = 3\nbits\n")
    assert.matches("f16     15216  +3 (0.02 %)", result.out, 1, true)
    assert.matches("> 3\n", result.out, 1, true)
  end)
end)
