-- Microscaling quantizers against golden codes; spec/parity/mx.py compares every rule except quest
-- and ms_eden with torchao and Transformer Engine's formulas. The fast kernels are compared with
-- their slow twins by spec/cpu/kernels_spec.lua.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local values = require "spec.cpu.kernels.values"

local inf, nan = math.huge, 0 / 0

local function bytes(x) return x:view(-1):totable() end

local function raw(x)
  local info = values.info_of(x)
  return M_ffi.ffi.string(info.data, tonumber(info.count) * M_ffi.C.eng_dtype_size(info.dtype))
end

-- The exponent of the scale of a block with this amax.
local function exponent(amax, format, rule)
  local x = engine.tensor { { amax, 0, 0, 0 } }
  local q = engine.mx.quantize(x, { format = format, rule = rule })
  return bytes(q.scale)[1] - 127
end

describe("microscaling", function()
  before_each(function() engine.begin_step() end)
  after_each(function() engine.end_step() end)

  it("chooses the exponents of the four rules", function()
    -- amax: floor, even, ceil, rceil
    local tables = {
      e2m1 = { [4] = { 0, 0, 0, 0 }, [4.5] = { 0, 0, 1, 0 }, [5] = { 0, 0, 1, 0 },
        [6] = { 0, 0, 1, 0 }, [6.001] = { 0, 0, 1, 1 }, [7] = { 0, 1, 1, 1 },
        [7.999] = { 0, 1, 1, 1 }, [8] = { 1, 1, 1, 1 } },
      e4m3 = { [256] = { 0, 0, 0, 0 }, [300] = { 0, 0, 1, 0 }, [448] = { 0, 0, 1, 0 },
        [449] = { 0, 0, 1, 1 }, [480] = { 0, 0, 1, 1 }, [496] = { 0, 1, 1, 1 },
        [511] = { 0, 1, 1, 1 }, [512] = { 1, 1, 1, 1 } },
    }
    for format, rows in pairs(tables) do
      for amax, want in pairs(rows) do
        for i, rule in ipairs { "floor", "even", "ceil", "rceil" } do
          assert.equal(want[i], exponent(amax, format, rule), format .. rule .. amax)
        end
      end
    end
    -- the range's ends: zero, f32's largest number and subnormals
    assert.equal(-127, exponent(0, "e4m3", "rceil"))
    assert.same({ 119, 120 }, { exponent(3.4028235e38, "e4m3", "floor"),
      exponent(3.4028235e38, "e4m3", "rceil") })
    assert.equal(-127, exponent(2 ^ -149, "e2m1", "rceil"))
  end)

  it("gives Transformer Engine's NVFP4 codes", function()
    local list = {}
    for i = 0, 15 do list[i + 1] = (-1) ^ i * 0.1 * i end
    for amax, want in pairs { [1.5] = "7E 0 9 2 A 3 C 4 D 5 E 6 E 6 F 7 F",
      [10] = "68 0 9 2 B 3 C 5 D 5 E 6 E 7 F 7 F", [1e6] = "00 0 F 7 F 7 F 7 F 7 F 7 F 7 F 7 F" } do
      local q = engine.mx.quantize(engine.tensor { list }, { rule = "nvfp4",
        amax = engine.tensor { amax } })
      local text = { ("%02X"):format(bytes(q.scale)[1]) }
      for _, pair in ipairs(bytes(q.q)) do
        text[#text + 1] = ("%X %X"):format(pair % 16, math.floor(pair / 16))
      end
      assert.equal(want, table.concat(text, " "))
    end
    -- one rounding of b * (S / 6), not two
    local q = engine.mx.quantize(engine.full({ 1, 16 }, 43.75), { rule = "nvfp4",
      amax = engine.tensor { 49 } })
    assert.equal(0x7D, bytes(q.scale)[1])
  end)

  it("scales a block's largest element to 6 or 4, whichever has the smaller error", function()
    local blocks = {   -- the last has equal absolute errors, and a smaller squared error with 4
      { 6, 4, 3, 2, 1.5, 1, .5, 0, -6, -4, -3, -2, -1.5, -1, -.5, 0 },
      { 10, 8, 5, 5, 5, -5, 8, -8, 3, 3, 3, 0, 0, 8, 5, 5 },
      { 6, 5, 1, 1, .25, .25, .25, .25, 1.7, 1.7, 0, 0, 0, 0, 0, 0 } }
    for rule, want in pairs {
      four_over_six = "70 76543210FEDCBA90 7A 65444C5D22200544 70 7622000033000000",
      four_over_six_mse = "70 76543210FEDCBA90 7A 65444C5D22200544 74 6511000022000000" } do
      local q = engine.mx.quantize(engine.tensor(blocks), { rule = rule,
        amax = engine.tensor { 12 } })
      local text, codes = {}, bytes(q.q)
      for i, scale in ipairs(bytes(q.scale)) do
        text[2 * i - 1], text[2 * i] = ("%02X"):format(scale), ""
        for k = 8 * i - 7, 8 * i do
          text[2 * i] = text[2 * i] .. ("%X%X"):format(codes[k] % 16, math.floor(codes[k] / 16))
        end
      end
      assert.equal(want, table.concat(text, " "))
    end
  end)

  -- A row of e2m1 codes as hexadecimal digits.
  local function digits(q)
    local text = {}
    for i, pair in ipairs(bytes(q)) do
      text[i] = ("%X%X"):format(pair % 16, math.floor(pair / 16))
    end
    return table.concat(text)
  end

  it("scales by QuEST's standard deviation, and gates saturated elements", function()
    local rows = { {}, {}, {}, {}, {}, {} }
    for i = 0, 31 do
      rows[1][i + 1], rows[2][i + 1] = (-1) ^ i * 0.1 * i, 0.25 * (i % 8)
      rows[3][i + 1] = i == 31 and 9 or i % 2 == 0 and 0.5 or -0.5
      rows[4][i + 1], rows[5][i + 1], rows[6][i + 1] = 1, 0, i == 3 and nan or 1
    end
    local q = engine.mx.quantize(engine.tensor(rows), { rule = "quest" })
    -- from the formula of the public kernel, in f32
    assert.same({ 126, 125, 126, 100, 100, 255 }, bytes(q.scale))
    local once = ("7"):rep(32)
    assert.equal("08192A2B3C4C4D5D5D6E6E6E6E7F7F7F" .. ("02456677"):rep(4) .. ("2A"):rep(15) ..
      "27" .. once .. ("0"):rep(32) .. once, digits(q.q))
    assert.equal(("1"):rep(30) .. "00" .. ("11111100"):rep(4) .. ("1"):rep(31) .. ("0"):rep(33) ..
      ("1"):rep(32) .. ("0"):rep(32), table.concat(bytes(q.gate)))
    -- the rule recomputed in doubles; the nearest e2m1 number is the one at the smallest distance
    local numbers = { 0, .5, 1, 1.5, 2, 3, 4, 6 }
    local x = engine.randn(40, 32) * engine.randn(40, 1):exp()
    local sizes, gates = bytes(engine.mx.quantize(x, { rule = "quest" }):dequantize():abs()),
      bytes(engine.mx.quantize(x, { rule = "quest" }).gate)
    for r, row in ipairs(x:totable()) do
      local mean, variance = 0, 0
      for _, v in ipairs(row) do mean = mean + v / 32 end
      for _, v in ipairs(row) do variance = variance + (v - mean) ^ 2 / 32 end
      local unit = 2 ^ math.floor(math.log(2.92247856 / 6 * math.sqrt(variance) + 1e-8)
        / math.log(2))
      for c, v in ipairs(row) do
        local best = 0
        for _, number in ipairs(numbers) do
          if math.abs(number * unit - math.abs(v)) < math.abs(best - math.abs(v)) then
            best = number * unit
          end
        end
        assert.equal(best, sizes[32 * r - 32 + c])
        assert.equal(math.abs(v) < 6 * unit and 1 or 0, gates[32 * r - 32 + c])
      end
    end
  end)

  it("corrects the scales of MS-EDEN, and rounds them without bias", function()
    -- from the formula of the public kernel
    local rows, want = { {}, {} }, { [2] = "74 78 78 78 75 78 78 78 " ..
      "092A3C4D5E6E6F7F6F7F78192A3C4C5D5E6E6E7F7F091A2B4C4D5D6E6E6F7F78" ..
      "192B4C5D5E6E6F7F7F7F091A2B4C4D5D6E6E6F7F78192A3C4C5D5E6E6E7F7F09",
      [40] = "54 54 54 54 03 03 03 03 " .. ("02456677"):rep(8) .. ("7"):rep(64) }
    for i = 0, 127 do
      rows[1][i + 1] = (-1) ^ i * 0.1 * (i % 21)
      rows[2][i + 1] = i < 64 and 0.25 * (i % 8) or 0.001
    end
    for k, amax in ipairs { 2, 40 } do
      local q = engine.mx.quantize(engine.tensor { rows[k] }, { rule = "ms_eden",
        amax = engine.tensor { amax } })
      assert.equal(want[amax], (("%02X "):rep(8)):format(unpack(bytes(q.scale))) .. digits(q.q))
    end
    engine.seed(3)                        -- a block is a group
    local x, sum = engine.randn(512, 128), 0
    local exact = x:square():sum():item()
    local function along(bits)
      local q = engine.mx.quantize(x, { rule = "ms_eden", block = "1x128", sr_bits = bits })
      return (q:dequantize() * x):sum():item() / exact
    end
    for _ = 1, 200 do sum = sum + along(16) / 200 end
    assert.near(1, sum, 2e-4)
    assert.is_true(math.abs(along(0) - 1) > 4e-4)
  end)

  it("leaves room for stochastic rounding on request", function()
    local function quantized(x, factor)
      return engine.mx.quantize(x, { format = "e2m1", sr_bits = 24, factor = factor })
    end
    engine.seed(8)
    local x = engine.full({ 512, 64 }, 7.5)                      -- the scale is 1
    assert.equal(6, quantized(x):dequantize():max():item())
    assert.near(7.5, quantized(x, 0.75):dequantize():mean():item(), 0.05)
    local q = quantized(engine.randn(16, 64), 0.75)              -- the product is divided by 0.75^2
    local product = engine.mx.matmul(q, q)
    local exact = q:dequantize():matmul(q:dequantize(), false, true)
    assert.is_true(((product - exact):norm() / exact:norm()):item() < 1e-5)
  end)

  it("counts NaN, and follows the rule for Inf and NaN", function()
    local x = engine.tensor { { 1, nan, 2, 0 }, { 1, inf, 2, 0 }, { 1, 3, 2, 0 } }
    local q = engine.mx.quantize(x, {})
    assert.equal(1, q.nan:item())
    assert.same({ 255, 255, 120 }, bytes(q.scale))
    assert.equal(0x7F, bytes(q.q)[1])
    q = engine.mx.quantize(x, { nonfinite = "te", rule = "rceil" })
    assert.same({ 120, 254, 120 }, bytes(q.scale))
    assert.same({ 0x70, 0x7F, 0x78, 0 }, { unpack(bytes(q.q), 1, 4) })
    assert.same({ 0, 0x7E, 0, 0 }, { unpack(bytes(q.q), 5, 8) })
    q = engine.mx.quantize(x, { nonfinite = "te", format = "e2m1", rule = "nvfp4" })
    assert.equal(7, math.floor(bytes(q.q)[1] / 16))       -- NaN becomes 6
    assert.is_true(q.amax:item() == inf)
    for _, value in ipairs(bytes(engine.mx.quantize(x, { rule = "nvfp4" }):dequantize())) do
      assert.is_true(value ~= value)
    end
  end)

  it("quantizes the transpose from the original", function()
    local x = engine.randn(64, 32)
    for _, o in ipairs { { format = "e2m1", rule = "rceil" }, { format = "e3m2" },
      { rule = "nvfp4" }, { rule = "nvfp4", block = "16x16" } } do
      o.transposed = true
      local q = engine.mx.quantize(x, o)
      o.transposed = nil
      local t = engine.mx.quantize(x:transpose(1, 2):contiguous(), o)
      assert.same(bytes(t.q), bytes(q.transposed.q))
      assert.same(bytes(t.scale), bytes(q.transposed.scale))
    end
    local q = engine.mx.quantize(x, { rule = "nvfp4", block = "16x16", transposed = true,
      sr_bits = 8 })
    assert.same(bytes(q:dequantize():transpose(1, 2):contiguous()),
      bytes(q.transposed:dequantize()))
  end)

  it("applies the Hadamard transform to the transposed copy, which keeps products", function()
    local TE = { 1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1 }
    local x, y = engine.randn(256, 24):to("bf16"), engine.randn(256, 8):to("bf16")
    for n = 16, 128 do
      if n == 16 or n == 32 or n == 64 or n == 128 then
        -- H[i][j] is -1 if i and j share an odd number of 1 bits, else 1; row i is multiplied by a
        -- sign from TE, which repeats every 16 rows
        local h = {}
        for i = 0, n - 1 do
          h[i + 1] = {}
          for j = 0, n - 1 do
            local odd = 0
            for b = 0, 6 do
              odd = odd + math.floor(i / 2 ^ b) % 2 * (math.floor(j / 2 ^ b) % 2)
            end
            h[i + 1][j + 1] = TE[i % 16 + 1] * (odd % 2 == 0 and 1 or -1)
          end
        end
        local turned = x:to("f64"):transpose(1, 2):contiguous():view(-1, n)
          :matmul(engine.tensor(h, { dtype = "f64" }))
        local want = (turned * math.sqrt(1 / n)):to("bf16"):view(24, 256)
        for _, o in ipairs { { rule = "nvfp4" }, { rule = "rceil", format = "e2m1" } } do
          local plain = engine.mx.quantize(want, o)
          o.transposed, o.hadamard = true, n
          local q = engine.mx.quantize(x, o).transposed
          assert.same(bytes(plain.q), bytes(q.q))
          assert.same(bytes(plain.scale), bytes(q.scale))
          assert.equal(plain.amax:item(), q.amax:item())
          -- with finer elements: transforming both factors keeps their product, for any signs
          local fine = { format = "mxint8", rule = "rceil", transposed = true, hadamard = n,
            signs = ({ 0, "none", 7 })[n % 3 + 1] }
          local a = engine.mx.quantize(x, fine).transposed
          local b = engine.mx.quantize(y, fine).transposed
          local product = a:dequantize():matmul(b:dequantize(), false, true)
          local exact = x:to("f32"):matmul(y:to("f32"), true)
          assert.is_true(((product - exact):norm() / exact:norm()):item() < 0.03)
        end
      end
    end
    -- rows after the last whole group are not transformed
    local q = engine.mx.quantize(x:slice(1, 1, 24), { transposed = true, hadamard = 16,
      signs = "none" }).transposed:dequantize()
    local rest = x:slice(1, 17, 24):transpose(1, 2):to("f32")
    assert.is_true(((q:slice(2, 17, 24) - rest):norm() / rest:norm()):item() < 0.05)
  end)

  it("makes that copy with the bits of two operations", function()
    local run, n = M_ffi.run, 0
    for _, dtype in ipairs { "f32", "bf16", "f16" } do
      local normal = engine.randn(144, 70)
      local spread = normal * (engine.randn(144, 70) * 12):exp()    -- f32 sums round, or overflow
      local mixed = engine.concat({ normal:slice(2, 1, 20), spread:slice(2, 21, 40),
        normal:slice(2, 41, 50) * 1e-39, normal:slice(2, 51, 60) * 3e38,
        engine.full({ 144, 10 }, 0) }, 2)
      local broken = mixed * 1
      for k, bad in ipairs { inf, nan, -inf } do
        broken = engine.concat({ broken:slice(1, 1, 40 * k), engine.full({ 1, 70 }, bad),
          broken:slice(1, 40 * k + 2, 144) }, 1)
      end
      for _, x in ipairs { normal, spread, mixed, broken } do
        x = x:to(dtype)
        for _, size in ipairs { 16, 32, 64, 128 } do
          for _, o in ipairs { { 13, 1, 16, 4 }, { 13, 1, 16, 5 }, { 13, 1, 32, 3 },
            { 10, 1, 32, 0 }, { 11, 1, 128, 1 }, { 16, 1, 48, 2 }, { 13, 16, 16, 4 },
            { 14, 1, 6, 3 }, { 13, 1, 32, 8 } } do
            n = n + 1
            local flags = n % 2 * 16 + (o[4] < 7 and n % 3 % 2 * 32 or 0)
            local bits, signs = (o[4] == 4 or o[4] == 8) and n % 5 == 0 and 8 or 0, n % 7 % 3 - 1
            local y = run("hadamard", { x }, { size, signs, 1, M_ffi.dtype.bf16 })
            local function quantized(of, more, counter, hadamard)
              return { run("mx_quantize", { of, false }, { o[1], o[2], o[3], o[4], flags + more,
                bits, counter, 1, hadamard, signs }, { n % 4 == 0 and o[4] < 5 and 0.75 or 0 }, 8) }
            end
            local both, only = quantized(x, 8, 100, size), quantized(x, 136, 2620, size)
            local plain, turned = quantized(x, 0, 100, 0), quantized(y, 0, 2620, 0)
            for k, want in pairs { [0] = plain[1], plain[2], plain[3], turned[1], turned[2],
              plain[6], turned[3] } do
              assert.same(raw(want), raw(both[k + 1]))
              if k == 3 or k == 4 or k == 6 then assert.same(raw(want), raw(only[k + 1]))
              else assert.is_nil(only[k + 1]) end
            end
          end
        end
      end
    end
  end)

  it("rounds stochastically without bias, to a multiple of 2^-bits", function()
    engine.seed(3)
    local n = 32768
    for value, mean in pairs { [0.3] = 0.3, [1.7] = 1.7, [2.6] = 2.6, [5] = 5, [-4.5] = -4.5 } do
      local x = engine.full({ n / 32, 32 }, value)
      x = engine.concat({ x, engine.full({ n / 32, 2 }, 6) }, 2)      -- the scale is 1
      local q = engine.mx.quantize(x, { format = "e2m1", rule = "rceil", block = { 1, 34 },
        sr_bits = 8 })
      local got = q:dequantize():slice(2, 1, 32):mean():item()
      assert.near(mean, got, 0.02)
    end
    local q = engine.mx.quantize(engine.full({ 8, 32 }, 6), { format = "e2m1", sr_bits = 24 })
    assert.equal(6, q:dequantize():min():item())
  end)

  it("rounds halves and random numbers by other projects' rules, and toward an average", function()
    local function rounded(list, more)
      local options = { format = "e2m1", rule = "rceil", block = { 1, #list } }
      for key, value in pairs(more) do options[key] = value end
      return engine.mx.quantize(engine.tensor { list }, options):dequantize():totable()[1]
    end
    local halves = { 6, .25, .75, 1.25, -1.25, 2.5, -2.5, -5 }
    for ties, want in pairs { even = { 6, 0, 1, 1, -1, 2, -2, -4 },
      away = { 6, .5, 1, 1.5, -1.5, 3, -3, -6 }, zero = { 6, 0, .5, 1, -1, 2, -2, -4 },
      up = { 6, .5, 1, 1.5, -1, 3, -2, -4 } } do
      assert.same(want, rounded(halves, { ties = ties }))
    end
    -- 1 is a number of the grid, but its average lies halfway to the next
    local x, average = { 6, .25, .75, 1.25, -1.25, -2.5, -5, 1 },
      engine.tensor { { 0, 0, .75, 1.2, -1.3, 2.6, -9, 1.25 } }
    assert.same({ 6, 0, 1, 1, -1.5, -2, -6, 1.5 }, rounded(x, { average = average }))
    -- One random bit, so u is 0 or 1/2. f is 1/4 at 1.125 and 1/2 at 0.25. MSLK adds at most 1/16
    -- to 0.25.
    local list = {}
    for i = 1, 128 do list[i] = i == 1 and 6 or i <= 64 and 1.125 or 0.25 end
    local function share(rule)
      local up, y = { 0, 0 }, rounded(list, { sr_bits = 1, sr_rule = rule })
      for i = 2, 128 do
        if y[i] > list[i] then up[i <= 64 and 1 or 2] = up[i <= 64 and 1 or 2] + 1 end
      end
      return up[1], up[2]
    end
    for rule, some in pairs { te = { false, true }, amd = { true, true },
      mslk = { false, false } } do
      for k, count in ipairs { share(rule) } do
        assert(some[k] and count > 16 and count < 48 or not some[k] and count == 0,
          rule .. " " .. count)
      end
    end
  end)

  it("lays out scales for a product", function()
    local x = engine.randn(130, 160)
    local q = engine.mx.quantize(x, {})
    local layout, scale = bytes(engine.mx.gemm_scales(q)), bytes(q.scale)
    assert.equal(2 * 2 * 512, #layout)
    for r = 0, 129 do
      for c = 0, 4 do
        local tile = math.floor(r / 128) * 2 + math.floor(c / 4)
        local at = tile * 512 + r % 32 * 16 + math.floor(r % 128 / 32) * 4 + c % 4
        assert.equal(scale[r * 5 + c + 1], layout[at + 1])
      end
    end
    q = engine.mx.quantize(x, { rule = "nvfp4", block = "16x16" })
    assert.equal(bytes(q.scale)[1], bytes(engine.mx.gemm_scales(q))[15 * 16 + 1])
  end)

  it("sums like Blackwell's tensor cores: truncates terms relative to the largest", function()
    local function of(...)
      return engine.mx.quantize(engine.concat({ engine.tensor { { ... } },
        engine.zeros(1, 32 - select("#", ...)) }, 2), { format = "e5m2" })
    end
    -- 25 bits below 2^28 keep multiples of 8: four terms of 8 count, eight terms of 4 do not
    local a = of(2 ^ 14, 2, 2, 2, 2, 2, 2, 2, 2)
    assert.equal(2 ^ 28 + 32, engine.mx.matmul(a, of(2 ^ 14, 4, 4, 4, 4)):item())
    assert.equal(2 ^ 28, engine.mx.matmul(a, a):item())
    local x, y = engine.randn(20, 128), engine.randn(12, 128)
    for _, o in ipairs { { format = "e4m3", rule = "rceil" }, { format = "e2m1", rule = "floor" },
      { rule = "nvfp4" } } do
      local p, q = engine.mx.quantize(x, o), engine.mx.quantize(y, o)
      local exact = p:dequantize("f64"):matmul(q:dequantize("f64"), false, true)
      local off = engine.mx.matmul(p, q):to("f64") - exact
      assert.is_true((off:norm() / exact:norm()):item() < 1e-5)
      -- sums of a few integers are exact
      local small = engine.mx.quantize(engine.randint(-2, 3, { 4, 64 }):to("f32"), { format =
        o.format, rule = "floor" })
      local product = small:dequantize("f64")
      assert.same(product:matmul(product, false, true):to("f32"):totable(),
        engine.mx.matmul(small, small):totable())
    end
    local w = engine.mx.quantize(engine.randn(32, 64), { rule = "nvfp4", block = "16x16" })
    assert.same({ 20, 32 }, engine.mx.matmul(engine.mx.quantize(x:slice(2, 1, 64), { rule =
      "nvfp4" }), w).shape)
    assert.matches("two quantized matrices of 2 dimensions, got a tensor", select(2, pcall(
      engine.mx.matmul, x, w)), 1, true)
  end)

  it("names what it expects", function()
    local x = engine.randn(2, 32)
    for message, options in pairs { ["rule ceil, even, floor"] = { rule = "flor" },
      ["did you mean 'e2m1'"] = { format = "e2m" }, ["needs the format e2m1"] = { rule = "nvfp4",
        format = "e4m3" }, ["nonfinite te"] = { nonfinite = "nan" },
      ["hadamard to be 0, 16"] = { hadamard = 8 },
      ["unless transposed is true"] = { hadamard = 16 },
      ["sr_bits from 0 to 24"] = { sr_bits = 30 } } do
      local good, text = pcall(engine.mx.quantize, x, options)
      assert.is_false(good)
      assert.matches(message, tostring(text), 1, true)
    end
  end)

  it("aligns tiny terms with zero terms, which on Blackwell have the exponent -133", function()
    local list = {}
    for i = 1, 32 do list[i] = i <= 8 and 2 ^ -76 or 0 end
    local q = engine.mx.quantize(engine.tensor { list }, {})
    assert.equal(2 ^ -149, engine.mx.matmul(q, q):item())      -- 8 terms of 2^-152
  end)
end)
