-- Gradient statistics: what they count, at every value of a format, across blocks and threads.
local engine = require "engine.base.ffi"
local sets = require "spec.cpu.kernels.parameter_set"
local ffi, C = engine.ffi, engine.C

local inf, nan = math.huge, 0 / 0
local FORMATS = { f32 = { low = -126, digits = 23, high = 127 },
  f16 = { low = -14, digits = 10, high = 15 },
  bf16 = { low = -126, digits = 7, high = 127 } }

--- n random elements of a format as raw bits; `mask` selects the bits that may be set.
local function random_bits(format, n, mask)
  local wide = format == "f32"
  local bits, state = ffi.new(wide and "uint32_t[?]" or "uint16_t[?]", math.max(n, 1)), 12345
  for i = 0, n - 1 do
    state = (state * 48271) % 2147483647
    local low = state % 65536
    state = (state * 48271) % 2147483647
    bits[i] = bit.band(wide and (state % 65536) * 65536 + low or low, mask)
  end
  return bits
end

describe("gradient statistics", function()
  for name, format in pairs(FORMATS) do
    local smallest, normal = 2 ^ (format.low - format.digits), 2 ^ format.low

    it("count every kind of number: " .. name, sets.step(function()
      sets.everywhere(function()
        local set = sets.new({ { 4, 5 }, { 3 } }, { gradient = name })
        set:write_gradients {
          { 0, -0.0, smallest, -smallest, normal - smallest, normal, -normal, 1, -2, 0.5, inf, -inf,
            inf, nan, nan, 0, 0, 0, 0, -3 },
          { 1, 4, -2 },
        }
        local record, stats = set:stats(8)
        assert.same({ 20, 3, 2, 6, 3, 3 }, { tonumber(stats[0].count), tonumber(stats[0].inf),
          tonumber(stats[0].nan),
          tonumber(stats[0].zeros), tonumber(stats[0].underflow), stats[0].amax })
        assert.near(14.25, stats[0].sum_squares, 1e-6)
        assert.same({ 3, 0, 0, 0, 0, 4 }, { tonumber(stats[1].count), tonumber(stats[1].inf),
          tonumber(stats[1].nan),
          tonumber(stats[1].zeros), tonumber(stats[1].underflow), stats[1].amax })
        assert.same({ 23, 3, 2, 6, 3, 1, 0 }, { tonumber(record.count), tonumber(record.inf),
          tonumber(record.nan), tonumber(record.zeros), tonumber(record.underflow), record.overflow,
          record.first_bad })
        assert.equal(0.5, record.amax)   -- the true magnitude: 4 / 8
        assert.near(math.sqrt(14.25 + 21) / 8, record.norm, 1e-6)
        set:free()
      end)
    end))

    it("put each binade into its bin: " .. name, sets.step(function()
      local values = {}
      for e = format.low - format.digits, format.high do
        values[#values + 1] = 2 ^ e
        values[#values + 1] = e - format.digits >= format.low
          and -(2 - 2 ^ -format.digits) * 2 ^ e or 2 ^ e
      end
      sets.everywhere(function()
        local set = sets.new({ { #values } }, { gradient = name })
        set:write_gradients { values }
        local record = set:stats()
        for b = 0, C.ENG_HIST_BINS - 1 do
          local e = b - 160
          assert.equal(e >= format.low - format.digits and e <= format.high and 2 or 0,
            tonumber(record.hist[b]), "bin " .. b)
        end
        set:free()
      end)
    end))

    it("are the same to the bit on every instruction set and number of threads: " .. name,
      sets.step(function()
      local lengths = { 1, 31, 33, 4063, 4065, 65535, 65536, 65537, 140001, 7 }
      local shapes, masks = {}, name == "f32" and { 0xFFFFFFFF, 0xBFFFFFFF, 0x807FFFFF }
        or { 0xFFFF, 0xBFFF, name == "f16" and 0x83FF or 0x807F }
      for i, n in ipairs(lengths) do shapes[i] = { n } end
      for _, mask in ipairs(masks) do   -- all numbers; no inf or nan; subnormals only
        local bits = {}
        for i, n in ipairs(lengths) do bits[i] = random_bits(name, n, mask) end
        local truth, first
        sets.everywhere(function(device)
          local set = sets.new(shapes, { gradient = name })
          set:write_gradients(bits, name)
          local record, stats = set:stats(1)
          set:free()
          if device == "reference" then truth = stats return end
          for i = 0, set.n - 1 do
            for _, field in ipairs { "count", "inf", "nan", "zeros", "underflow" } do
              assert.equal(tonumber(truth[i][field]), tonumber(stats[i][field]), field .. " of " ..
                lengths[i + 1])
            end
            assert.equal(truth[i].amax, stats[i].amax)
            assert.is_true(math.abs(stats[i].sum_squares - truth[i].sum_squares) <= 2e-7 *
              truth[i].sum_squares)
            for b = 0, C.ENG_HIST_BINS - 1 do
              assert.equal(tonumber(truth[i].hist[b]), tonumber(stats[i].hist[b]))
            end
          end
          local text = ffi.string(ffi.cast("const char *", stats),
            ffi.sizeof("eng_tensor_stats") * set.n)
          assert.is_true((first or text) == text, "bits differ")
          first = first or text
          assert.is_true(record.norm >= record.amax)
        end)
      end
    end))
  end

  it("are all compared with their slow twins above", function()
    local compared = { zeros = true, underflow = true, amax = true, norm = true, hist = true }
    for _, entry in ipairs(require "engine.policy.names") do
      if bit.band(entry.need, C.ENG_NEED_GRADIENTS) ~= 0 then
        assert.is_true(compared[entry.name], entry.name .. ": compare it above, then list it here")
      end
    end
  end)

  it("hold the squares of many numbers that are small beside the largest", sets.step(function()
    local values = { 2 ^ -50 }
    for i = 2, 4096 do values[i] = 0.99 * 2 ^ -63 end
    for _, format in ipairs { "f32", "bf16" } do
      sets.everywhere(function()
        local set = sets.new({ { 4096 } }, { gradient = format })
        set:write_gradients { values }
        local _, stats = set:stats(1)
        local small = format == "f32" and 0.99 or 0.98828125        -- as stored
        local want = 2 ^ -100 + 4095 * (small * 2 ^ -63) ^ 2
        assert.near(1, stats[0].sum_squares / want, 1e-6)
        set:free()
      end)
    end
  end))

  it("hold squares beyond the range of f32, large and small", sets.step(function()
    for _, magnitude in ipairs { 1e30, 3e38, 1e-25, 1e-38 } do
      local values = {}
      for i = 1, 1000 do values[i] = i % 2 == 0 and magnitude or -magnitude end
      for _, format in ipairs { "f32", "bf16" } do
        sets.everywhere(function()
          local set = sets.new({ { 1000 } }, { gradient = format })
          set:write_gradients { values }
          local record = set:stats(1)
          assert.is_true(math.abs(record.norm / (record.amax * math.sqrt(1000)) - 1) < 1e-6)
          assert.is_true(math.abs(record.amax / magnitude - 1) < 0.01)
          assert.equal(0, record.overflow)
          set:free()
        end)
      end
    end
  end))

  it("contain only what is requested", sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 6 } }, { gradient = "f16" })
      set:write_gradients { { 0, 2 ^ -24, 1, 2, inf, nan } }
      local record = set:stats(1, 0)
      assert.same({ 6, 1, 1, 0, 0, 0, 0, 1 }, { tonumber(record.count), tonumber(record.inf),
        tonumber(record.nan), tonumber(record.zeros),
        tonumber(record.underflow), record.amax, record.norm, record.overflow })
      assert.equal(0, tonumber(record.hist[160]))
      assert.equal(2, set:stats(1, C.ENG_NEED_AMAX).amax)
      assert.near(math.sqrt(5), set:stats(1, C.ENG_NEED_NORM).norm, 1e-6)
      assert.equal(1, tonumber(set:stats(1, C.ENG_NEED_ZEROS).zeros))
      assert.equal(1, tonumber(set:stats(1, C.ENG_NEED_UNDERFLOW).underflow))
      assert.equal(1, tonumber(set:stats(1, C.ENG_NEED_HIST).hist[161]))
      set:free()
    end)
  end))

  it("skip parameters without gradient, and number the others by their place in the set",
    sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 3 }, { 2 }, { 4 }, { 1 } },
        { gradient = { "f32", "f16", "bf16", "f32" } })
      set:write_gradients { false, { 1, 2 }, { 1, nan, 1, 1 }, false }
      local record, stats = set:stats()
      assert.same({ 6, 2, 1 }, { tonumber(record.count), record.first_bad, record.overflow })
      assert.same({ 0, 2, 4, 0 }, { tonumber(stats[0].count), tonumber(stats[1].count),
        tonumber(stats[2].count), tonumber(stats[3].count) })
      set:zero_grad()
      record = set:stats()
      assert.same({ 0, -1, 0, 0 }, { tonumber(record.count), record.first_bad, record.overflow,
        record.norm })
      set:free()
    end)
  end))

  it("do not touch the gradients", sets.step(function()
    local set = sets.new({ { 5 } }, { gradient = "f16" })
    set:write_gradients { { 1, -0.0, 2 ^ -24, inf, 65504 } }
    local before = sets.read(set:gradient(1))
    set:stats(65536)
    assert.same(before, (sets.read(set:gradient(1))))
    set:free()
  end))
end)

describe("unscaling", function()
  it("moves low-precision gradients to f32 until they are cleared, and loses nothing",
    sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 3 }, { 2 }, { 2 }, { 1 } },
        { gradient = { "f16", "bf16", "f32", "f16" } })
      set:write_gradients { { 2 ^ -24, 65504, -1 }, { 2 ^ -100, 3 }, { 5, -6 }, false }
      assert.is_false(set:unscale(2 ^ -16))
      local values, format = sets.read(set:gradient(1))
      assert.same({ 2 ^ -40, 65504 / 65536, -2 ^ -16 }, values)
      assert.equal("f32", format)
      assert.same({ 2 ^ -116, 3 / 65536 }, (sets.read(set:gradient(2))))
      assert.same({ 5 / 65536, -6 / 65536 }, (sets.read(set:gradient(3))))
      assert.is_nil(set:gradient(4))
      local record = set:stats(1)   -- reads the unscaled gradients
      assert.equal(65504 / 65536, record.amax)
      assert.equal(0, tonumber(record.underflow))
      set:write_gradients { { 1, 1, 1 }, false, false, false }
      assert.equal("f16", select(2, sets.read(set:gradient(1))))
      set:free()
    end)
  end))

  it("finds inf and nan, and products that overflow", sets.step(function()
    for _, format in ipairs { "f32", "f16", "bf16" } do
      sets.everywhere(function()
        local set = sets.new({ { 70 } }, { gradient = format })
        for _, bad in ipairs { inf, -inf, nan } do
          for _, place in ipairs { 1, 17, 64, 70 } do
            local values = {}
            for i = 1, 70 do values[i] = i == place and bad or 1 end
            set:write_gradients { values }
            assert.is_true(set:unscale(0.5))
          end
        end
        local values = {}
        for i = 1, 70 do values[i] = 4 end
        set:write_gradients { values }
        assert.is_false(set:unscale(2 ^ 124))
        set:write_gradients { values }
        assert.is_true(set:unscale(2 ^ 126))
        set:free()
      end)
    end
  end))

  it("accepts scales whose inverse f32 cannot hold", sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 2 } }, { gradient = "f32" })
      set:write_gradients { { 2 ^ -149, -3 * 2 ^ -149 } }
      assert.is_false(set:unscale(2 ^ 149))
      assert.same({ 1, -3 }, (sets.read(set:gradient(1))))
      set:write_gradients { { 2 ^ 127, 1 } }
      assert.is_false(set:unscale(2 ^ -140))
      assert.same({ 2 ^ -13, 2 ^ -140 }, (sets.read(set:gradient(1))))
      set:free()
    end)
  end))
end)
