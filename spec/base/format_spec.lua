-- eng_format_get, eng_nearest and eng_action_name: facts that Lua reads from the core.
local M_ffi = require "engine.base.ffi"

local C, ffi = M_ffi.C, M_ffi.ffi

local function next_double(x, up)
  local cast = ffi.new "union { double d; int64_t q; }"
  cast.d = x
  cast.q = cast.q + (up and 1 or -1)
  return cast.d
end

-- x rounded to a small format.
local function round(name, x)
  return C.eng_small_decode(name, tonumber(C.eng_small_encode(name, x, 0)))
end

describe("a format's limits", function()
  for _, name in ipairs { "tf32", "bf16", "f16", "e5m6", "e5m2", "e4m3", "e4m3_ieee" } do
    it("lie where " .. name .. " rounds", function()
      local f = ffi.new "eng_format"
      assert.is_true(C.eng_format_get(f, name))
      assert.equal(f.largest, round(name, f.largest))
      assert.equal(f.largest, round(name, next_double(f.overflow, false)))
      local over = round(name, f.overflow)
      assert.is_true(over ~= over or over == math.huge)
      assert.equal(f.smallest, round(name, f.smallest))
      assert.equal(0, round(name, f.smallest / 2))
      assert.equal(f.smallest, round(name, next_double(f.smallest / 2, true)))
      assert.equal(f.normal, f.smallest * 2 ^ f.fraction_bits)
      assert.equal(2 ^ f.min_exponent, f.normal)
      assert.is_true(2 ^ f.max_exponent <= f.largest and f.largest < 2 ^ (f.max_exponent + 1))
    end)
  end

  it("match the processor's f32 and f64; ue8m0's numbers are powers of two", function()
    local f = ffi.new "eng_format"
    assert.is_true(C.eng_format_get(f, "f32"))
    assert.equal(tonumber(ffi.new("float", f.overflow)), math.huge)
    assert.equal(tonumber(ffi.new("float", next_double(f.overflow, false))), f.largest)
    assert.equal(2 ^ -149, f.smallest)
    assert.is_true(C.eng_format_get(f, "f64"))
    assert.equal(math.huge, f.overflow)
    assert.equal(math.huge, next_double(f.largest, true))
    assert.is_true(C.eng_format_get(f, "ue8m0"))
    assert.same({ 0, 2 ^ 127, 2 ^ -127 }, { f.is_signed, f.largest, f.smallest })
    assert.is_false(C.eng_format_get(f, "i32"))
  end)
end)

describe("eng_nearest", function()
  local function find(name, names)
    return C.eng_nearest(name, ffi.new("const char *[?]", #names, names), #names)
  end

  it("returns an index, or -1", function()
    assert.equal(1, find("lienar", { "layer_norm", "linear", "lr" }))
    assert.equal(0, find("LAYER_NROM", { "layer_norm", "linear" }))
    assert.equal(-1, find("convolution", { "layer_norm", "linear" }))
    assert.equal(-1, find("x", {}))
    assert.equal(-1, find(("x"):rep(65), { ("x"):rep(65) }))
    assert.equal(0, find(("x"):rep(63) .. "y", { ("x"):rep(64) }))
    assert.equal(1, find("width", { "height", "model.width" }))
  end)
end)

describe("an action's name", function()
  it("converts to its number and back", function()
    assert.equal("retry", ffi.string(C.eng_action_name(C.ENG_ACTION_RETRY)))
    for i = 0, C.ENG_ACTIONS - 1 do
      assert.equal(i, C.eng_action_from_name(C.eng_action_name(i)))
    end
    assert.equal("?", ffi.string(C.eng_action_name(C.ENG_ACTIONS)))
    assert.equal(-1, C.eng_action_from_name("steps"))
  end)
end)
