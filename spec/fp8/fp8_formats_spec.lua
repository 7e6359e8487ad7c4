-- The FP8 formats: every number, every rounding, on every instruction set. The spec computes the
-- expected code from the tables of the formats: the nearest number, ties to the even code. It
-- computes in doubles, which hold all these numbers exactly.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local values = require "spec.cpu.kernels.values"
local SETS = require("spec.cpu.kernels.compare").SETS
local helper = require "spec.helper"
local bit = require "bit"
local ffi, C = M_ffi.ffi, M_ffi.C

local FORMATS = {
  e4m3 = { fraction = 3, bias = 7, largest = 448, past = 464, tie = true, over = 0x7F, top = 0x7E,
    sign = 0x80, nan = 0x7F },
  e5m2 = { fraction = 2, bias = 15, largest = 57344, past = 61440, over = 0x7C, top = 0x7B,
    sign = 0x80, nan = 0x7F },
  e5m6 = { fraction = 6, bias = 15, largest = 65024, past = 65280, over = 0x7C0, top = 0x7BF,
    sign = 0x800, nan = 0x7E0 },
}

--- The value of a code without its sign bit.
local function number(f, code)
  local field, rest = math.floor(code / 2 ^ f.fraction), code % 2 ^ f.fraction
  if field == 0 then return rest * 2 ^ (1 - f.bias - f.fraction) end
  return (2 ^ f.fraction + rest) * 2 ^ (field - f.bias - f.fraction)
end

for _, f in pairs(FORMATS) do
  f.numbers = {}
  for code = 0, f.top do f.numbers[code] = number(f, code) end
end

--- The code of x, rounded to nearest even.
local function expected(f, x, saturate)
  if x ~= x then return f.nan end
  local sign = (x < 0 or 1 / x < 0) and f.sign or 0
  local magnitude = math.abs(x)
  if magnitude > f.past or (magnitude == f.past and not f.tie) then
    return sign + (saturate and f.top or f.over)
  end
  local _, e = math.frexp(magnitude)   -- a first guess at the code, from the exponent
  local unit = 2 ^ (math.max(e - 1, 1 - f.bias) - f.fraction)
  local steps = magnitude / unit       -- exact
  local whole = math.floor(steps)
  local rest = steps - whole
  if rest > 0.5 or (rest == 0.5 and whole % 2 == 1) then whole = whole + 1 end
  local rounded = whole * unit
  local field = rounded < 2 ^ (1 - f.bias) and 0 or select(2, math.frexp(rounded)) - 1 + f.bias
  local code = field == 0 and rounded / 2 ^ (1 - f.bias - f.fraction)
    or (field - 1) * 2 ^ f.fraction + rounded / 2 ^ (field - f.bias - f.fraction)
  return sign + math.min(code, f.top)
end

local function bits_of(dtype, n, ctype)
  local x = values.tensor_of(dtype, { n })
  return x, ffi.cast(ctype, values.info_of(x).data)
end

local function codes_of(x) return ffi.cast("const uint8_t *", values.info_of(x).data) end

--- Casts x on every instruction set and on the reference, and compares every code with `expected`.
local function expect_codes(x, n, format)
  local source = values.values_of(x)
  local want = ffi.new("uint8_t[?]", n)
  for mode = 0, 1 do
    for i = 0, n - 1 do want[i] = expected(FORMATS[format], source[i], mode == 1) end
    for k = 0, #SETS do
      M_ffi.check(C.eng_device_set(k == 0 and "reference" or "cpu"))
      if k > 0 and #SETS > 1 then C.eng_cpu_isa(SETS[k]) end
      local got = codes_of(M_ffi.run("cast", { x }, { M_ffi.dtype[format], mode }))
      for i = 0, n - 1 do
        if got[i] ~= want[i] then
          error(("%s, mode %d, %s: %.9g: expected 0x%s, got 0x%s"):format(SETS[k] or "reference",
            mode, format, source[i], bit.tohex(want[i], 2), bit.tohex(got[i], 2)), 2)
        end
      end
    end
  end
end

describe("FP8 formats (" .. table.concat(SETS, ", ") .. ")", function()
  before_each(function() M_ffi.check(C.eng_step_begin()) end)
  after_each(function()
    M_ffi.check(C.eng_device_set("cpu"))
    if #SETS > 1 then C.eng_cpu_isa(SETS[1]) end
    M_ffi.check(C.eng_step_end())
  end)

  for _, format in ipairs { "e4m3", "e5m2" } do
    local f = FORMATS[format]

    it("widens every " .. format .. " exactly", function()
      local x, bits = bits_of(format, 256, "uint8_t *")
      for i = 0, 255 do bits[i] = i end
      for _, dtype in ipairs { "f32", "f16", "bf16", "f64" } do
        for k = 0, #SETS do
          M_ffi.check(C.eng_device_set(k == 0 and "reference" or "cpu"))
          if k > 0 and #SETS > 1 then C.eng_cpu_isa(SETS[k]) end
          local got = values.values_of(M_ffi.run("cast", { x }, { M_ffi.dtype[dtype] }))
          for code = 0, 255 do
            local magnitude, want = code % 128, nil
            if magnitude <= f.top then want = f.numbers[magnitude]
            elseif format == "e5m2" and magnitude == 0x7C then want = math.huge end
            if not want then assert(got[code] ~= got[code])
            else
              if code >= 128 then want = -want end
              assert(got[code] == want and 1 / got[code] == 1 / want,
                ("0x%s: %g"):format(bit.tohex(code, 2), got[code]))
            end
          end
        end
      end
    end)

    for _, dtype in ipairs { "f16", "bf16" } do
      it(("rounds all 65,536 %s to %s, saturating and not"):format(dtype, format), function()
        local x, bits = bits_of(dtype, 65536, "uint16_t *")
        for i = 0, 65535 do bits[i] = i end
        expect_codes(x, 65536, format)
      end)
    end

    for _, dtype in ipairs { "f32", "f64" } do
      it(("rounds %s to %s at every number and midpoint, and their neighbours"):format(dtype,
        format), function()
        local list = { 0, -0.0, 1 / 0, -1 / 0, 0 / 0, 1e30, -1e30, 1e-30, 2 ^ -149 }
        local step = dtype == "f32" and 2 ^ -23 or 2 ^ -52
        local function around(v)
          for _, w in ipairs { v, v * (1 + step), v * (1 - step), v * (1 - step / 2) } do
            list[#list + 1] = w
            list[#list + 1] = -w
          end
        end
        for code = 0, f.top do
          around(f.numbers[code])
          around((f.numbers[code] + (f.numbers[code + 1] or f.past * 2 - f.largest)) / 2)
        end
        local x = values.listed(dtype, { #list }, list)
        expect_codes(x, #list, format)
      end)
    end

    it("rounds f32 of any bits to " .. format, function()
      values.seed("any bits " .. format)
      local n = 60001
      local x, bits = bits_of("f32", n, "uint32_t *")
      for i = 0, n - 1 do bits[i] = values.integer(0, 65535) * 65536 + values.integer(0, 65535) end
      expect_codes(x, n, format)
    end)

    it("copies " .. format .. " in every layout", function()
      local x, bits = bits_of(format, 37 * 53, "uint8_t *")
      for i = 0, 37 * 53 - 1 do bits[i] = i * 7 % 256 end
      local turned = x:view(37, 53):transpose():contiguous()
      local got = codes_of(turned)
      for i = 0, 36 do
        for j = 0, 52 do assert.equal((i * 53 + j) * 7 % 256, got[j * 37 + i]) end
      end
      local wide, back = x:view(37, 53):transpose():to("f32"),
        x:view(37, 53):slice(2, 2, 50, 3):to("f32")
      assert.same({ 53, 37 }, wide.shape)
      assert.same({ 37, 17 }, back.shape)
      local again = codes_of(wide:transpose():to(format))
      for i = 0, 37 * 53 - 1 do
        if bits[i] % 128 <= f.top then assert.equal(bits[i], again[i]) end
      end
    end)

    it("rounds stochastically to " .. format .. " by distance, and keeps exact numbers", function()
      engine.seed(7)
      local n = 40000
      for _, v in ipairs { number(f, 20) * (1 + 2 ^ -f.fraction / 4), number(f, 1) * 0.3,
        -number(f, 3) * 1.125 } do
        local exponent = math.max(select(2, math.frexp(v)) - 1, 1 - f.bias)
        local low = math.abs(v) / 2 ^ (exponent - f.fraction)
        local part = low - math.floor(low)
        local y = engine.full({ n }, v):to(format, { stochastic = true, saturate = true }):to("f32")
        local got, up, numbers = values.values_of(y), 0, {}
        for i = 0, n - 1 do
          numbers[got[i]] = true
          if math.abs(got[i]) > math.abs(v) then up = up + 1 end
        end
        local count = 0
        for _ in pairs(numbers) do count = count + 1 end
        assert.equal(2, count)
        assert(math.abs(up / n - part) < 4 * math.sqrt(part * (1 - part) / n),
          ("%g: %g of %g"):format(v, up / n, part))
      end
      local x, bits = bits_of(format, 256, "uint8_t *")
      for i = 0, 255 do bits[i] = i end
      local same = codes_of(x:to("f32"):to(format, { stochastic = true }))
      for i = 0, 255 do
        if i % 128 <= f.top then assert.equal(i, same[i]) end
      end
    end)

    it("draws the same random " .. format .. " on every instruction set", function()
      values.seed("stochastic " .. format)
      for _, dtype in ipairs { "f32", "bf16", "f16" } do
        local x = values.float(dtype, { 9001 }, "rare")
        local want
        for k = 0, #SETS do
          M_ffi.check(C.eng_device_set(k == 0 and "reference" or "cpu"))
          if k > 0 and #SETS > 1 then C.eng_cpu_isa(SETS[k]) end
          for mode = 2, 3 do
            local y = M_ffi.run("cast", { x }, { M_ffi.dtype[format], mode, 1234567890123LL, 1 })
            local text = ffi.string(codes_of(y), 9001)
            want = want or {}
            want[mode] = want[mode] or text
            assert.equal(want[mode], text)
          end
        end
      end
    end)
  end

  it("encode and decode single numbers, e5m6 and ue8m0 too", function()
    local f = FORMATS.e5m6
    for code = 0, f.top do
      assert.equal(f.numbers[code], C.eng_small_decode("e5m6", code))
      assert.equal(-f.numbers[code], C.eng_small_decode("e5m6", code + 0x800))
      for _, v in ipairs { f.numbers[code],
        (f.numbers[code] + (f.numbers[code + 1] or 65536)) / 2 } do
        for _, w in ipairs { v, v * (1 + 2 ^ -30), v * (1 - 2 ^ -30) } do
          for mode = 0, 1 do
            assert.equal(expected(f, w, mode == 1),
              tonumber(C.eng_small_encode("e5m6", w, mode)))
          end
        end
      end
      -- TileKernels' rule is nearest even for normal results, and truncates subnormal ones
      if code >= 64 then
        for _, w in ipairs { f.numbers[code],
          (f.numbers[code] + f.numbers[math.min(code + 1, f.top)]) / 2 } do
          assert.equal(expected(f, w, true),
            tonumber(C.eng_small_encode("e5m6_tilekernels", w, 0)))
        end
      end
    end
    assert.equal(0, tonumber(C.eng_small_encode("e5m6_tilekernels", 2 ^ -21 * 1.5, 0)))
    assert.equal(1, tonumber(C.eng_small_encode("e5m6", 2 ^ -21 * 1.5, 0)))
    for code = 0, 254 do
      local v = 2 ^ (code - 127)
      assert.equal(v, C.eng_small_decode("ue8m0", code))
      for mode = 0, 1 do
        assert.equal(code, tonumber(C.eng_small_encode("ue8m0", v, mode)))
        if code < 254 then
          assert.equal(code + mode, tonumber(C.eng_small_encode("ue8m0", v * 1.5, mode)))
        end
      end
    end
    assert.equal(255, tonumber(C.eng_small_encode("ue8m0", 0 / 0, 0)))
    assert.equal(-1, tonumber(C.eng_small_encode("e3m4", 1, 0)))
    assert.equal(0x7E, tonumber(C.eng_small_encode("e4m3", 464, 0)))
    assert.equal(0xFF, tonumber(C.eng_small_encode("e4m3", -464.5, 0)))
    assert.equal(0x7C, tonumber(C.eng_small_encode("e5m2", 61440, 0)))
  end)

  it("survive saving and loading", function()
    local dir = helper.folder()
    local path = dir .. "/fp8.safetensors"
    local x = engine.tensor { { 1, 448, -0.5 }, { 2 ^ -9, 0, -448 } }
    engine.save(path, { a = x:to("e4m3"), b = x:to("e5m2") })
    local loaded = engine.load(path)
    assert.equal("e4m3", loaded.a.dtype)
    assert.same(x:totable(), loaded.a:totable())
    assert.equal("e5m2", loaded.b.dtype)
    helper.remove(dir)
  end)

  it("refuse arithmetic in one clear line", function()
    local q = engine.ones(2, 3):to("e4m3")
    local ids = engine.tensor({ 1, 0 }, { dtype = "i64" })
    for _, f in ipairs {
      function()
        return q + q
      end, function()
        return q * 2
      end, function() return 2 - q end, function() return q:sum() end, function() return -q end,
      function()
        return q:exp()
      end, function()
        return q:matmul(q, false, true)
      end, function() return engine.ones(4, 3):linear(q) end, function() return q:max() end,
      function()
        return q:softmax()
      end, function()
        return q:gt(0)
      end, function() return q:embedding(ids) end, function() return q:topk(1) end,
    } do
      assert.matches("FP8 tensors allow no arithmetic, got e4m3 %[[2 x3]*%]; hint: x:to%(\"f32\"%)",
        helper.failure(f))
    end
    assert.error_matches(function() engine.concat { q, q:to("e5m2") } end,
      "an FP8 tensor needs other tensors of the same dtype")
    assert.error_matches(function() q:uniform() end,
      "random numbers: expected a tensor that is not in FP8, got e4m3")
    assert.error_matches(function() q:requires_grad() end,
      "expected a tensor in f32, f64, f16 or bf16")
    assert.error_matches(function() engine.ones(3):to("f16", { saturate = true }) end,
      "expected e4m3 or e5m2, the dtypes with the options saturate and stochastic, got 'f16'")
    assert.error_matches(function() engine.ones(3):to("e4m3", { saturates = true }) end,
      "saturates")
    assert.same({ { 1, 1, 1 }, { 1, 1, 1 } },
      engine.concat({ q:slice(1, 1, 1), q:slice(1, 2, 2) }):totable())
    assert.same({ { 1, 1, 1 }, { 1, 1, 1 } }, q:index_select(1, ids):totable())
    assert.equal(3, q:to("i32"):sum():item() / 2)
    assert.truthy(tostring(q):find("e4m3 %[2 x 3%]"))
    assert.same({ { 2, 2, 2 }, { 2, 2, 2 } }, q:fill(2):totable())
  end)
end)
