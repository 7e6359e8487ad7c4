-- Updates of bf16 master weights: every instruction set and number of threads matches the reference
-- bit for bit; stochastic rounding has exact probabilities and independent random numbers; Kahan's
-- compensation keeps what rounding to nearest loses.
local engine = require "engine.base.ffi"
local sets = require "spec.cpu.kernels.parameter_set"
local ffi, C, check = engine.ffi, engine.C, engine.check

local inf, nan = math.huge, 0 / 0
local ROUNDINGS = { "nearest", "stochastic", "kahan" }

local function with_seed(f)
  return sets.step(function()
    local seed, counter = ffi.new("uint64_t[1]"), ffi.new("uint64_t[1]")
    C.eng_rng_get(seed, counter)
    C.eng_rng_set(20, 0)
    local good, message = pcall(f)
    C.eng_rng_set(seed[0], counter[0])
    if not good then error(message, 0) end
  end)
end

local function sum_of(x)
  local sum = ffi.new("uint64_t[1]")
  check(C.eng_checksum(sum, x))
  return tostring(sum[0])
end

-- A set of one parameter with n weights `w`, after an SGD step that adds `change` to each.
local function moved(n, w, change, rounding, draw)
  local set, values = sets.new({ { n } }, { master = "bf16" }), ffi.new("float[?]", n)
  for i = 0, n - 1 do values[i] = w end
  set:write_weights(1, values, "f32")
  for i = 0, n - 1 do values[i] = -change end
  set:write_gradients({ values }, "f32")
  set:optimizer("sgd")
  set:rounding(rounding)
  set:update { hyper = { lr = 1 }, t = 1, draw = draw }
  return set
end

describe("bf16 masters", function()
  for _, kind in ipairs(sets.KINDS) do
    it("have the same bits everywhere: " .. kind.name, with_seed(function()
      local lengths = { 1, 15, 513, 40001, 7 }
      local shapes, weights, gradients = {}, {}, {}
      for i, n in ipairs(lengths) do
        shapes[i], weights[i], gradients[i] = { n }, ffi.new("float[?]", n), ffi.new("float[?]", n)
        for k = 0, n - 1 do
          weights[i][k] = math.sin(k + i) * 2 ^ (k % 60 - 40)
          gradients[i][k] = math.cos(k * 3 + i) * 2 ^ (k % 40 - 30)
        end
        weights[i][0] = i == 2 and 2 ^ -133 or i == 3 and 3.3895e38 or weights[i][0]
      end
      for _, rounding in ipairs(ROUNDINGS) do
        local first
        sets.everywhere(function(where)
          local set = sets.new(shapes, { gradient = "bf16",
            master = { "bf16", "bf16", "f32", "bf16", "bf16" } })
          set:optimizer(kind.name, "bf16")
          set:rounding(rounding)
          for i in ipairs(lengths) do set:write_weights(i, weights[i], "f32") end
          for t = 1, 3 do
            set:write_gradients(gradients, "f32")
            set:update { hyper = kind.hyper, t = t, factor = 1 / 128,
              norms = t == 2 and ffi.new("double[?]", 20) or nil }
          end
          local bits = { tostring(set:checksum()) }
          for i = 1, #lengths do
            local lost = set:moment(C.ENG_COMPENSATION, i)
            assert.equal(rounding == "kahan" and i ~= 3, lost ~= nil)
            bits[#bits + 1] = lost and sum_of(lost)
          end
          bits = table.concat(bits, " ")
          set:free()
          first = first or bits
          assert.equal(first, bits, where)
        end)
      end
    end))
  end

  it("match the reference bit for bit, also inf, nan, zeros and subnormals", with_seed(function()
    local some = { 0, -0.0, inf, -inf, nan, 2 ^ -133, -2 ^ -130, 3.3895e38, 1, -3, 2 ^ -126, 1e-3 }
    local w, g = {}, {}
    for i, x in ipairs(some) do
      for k, y in ipairs { 0, nan, inf, -1e38, 2 ^ -140, 0.3, -1e-3 } do
        w[#w + 1], g[(i - 1) * 7 + k] = x, y
      end
    end
    for _, kind in ipairs(sets.KINDS) do
      for _, rounding in ipairs(ROUNDINGS) do
        local first
        sets.everywhere(function(where)
          local set = sets.new({ { #w } }, { master = "bf16" })
          set:write_weights(1, w)
          set:optimizer(kind.name)
          set:rounding(rounding)
          for t = 1, 3 do
            set:write_gradients { g }
            set:update { hyper = kind.hyper, t = t }
          end
          local text, lost = {}, set:moment(C.ENG_COMPENSATION, 1)
          for _, x in ipairs(set:weights(1)) do
            text[#text + 1] = x ~= x and "nan" or ("%.17g"):format(x)
          end
          for _, x in ipairs(lost and (sets.read(lost)) or {}) do
            assert.is_true(math.abs(x) < inf, "a compensation is finite")
            text[#text + 1] = ("%.17g"):format(x)
          end
          text = table.concat(text, " ")
          set:free()
          first = first or text
          assert.equal(first, text, ("%s %s on %s"):format(kind.name, rounding, where))
        end)
      end
    end
  end))

  it("round stochastically with exact probabilities", with_seed(function()
    local n = 2 ^ 14
    sets.everywhere(function()
      for _, sign in ipairs { 1, -1 } do
        for _, fraction in ipairs { 0, 2 ^ -10, 0.1, 0.5, 0.9 } do
          local set = moved(n, sign, sign * fraction * 2 ^ -7, "stochastic", 1)
          local up, pairs_up, last = 0, 0, false
          for _, x in ipairs(set:weights(1)) do
            assert.is_true(x == sign or x == sign * (1 + 2 ^ -7))
            local is_up = x ~= sign
            up, pairs_up = up + (is_up and 1 or 0), pairs_up + (is_up and last and 1 or 0)
            last = is_up
          end
          local function near(p, got)   -- within 4 standard deviations of a binomial's mean
            assert.is_true(math.abs(got - n * p) <= 4 * math.sqrt(n * p * (1 - p)) + 1e-9,
              ("p = %g: expected %g, got %d"):format(p, n * p, got))
          end
          near(fraction, up)
          near(fraction ^ 2, pairs_up)
          set:free()
        end
      end
    end)
  end))

  it("keep nan, whatever its bits", with_seed(function()
    sets.everywhere(function()
      local set, g = sets.new({ { 100 } }, { master = "bf16" }), ffi.new("float[100]")
      for i = 0, 99 do ffi.cast("uint32_t *", g)[i] = i % 2 * 2 ^ 31 + 0x7FFFFFFF end
      set:write_gradients({ g }, "f32")
      set:optimizer("sgd")
      set:rounding("stochastic")
      set:update { hyper = { lr = 1 } }
      for _, x in ipairs(set:weights(1)) do assert.is_true(x ~= x) end
      set:free()
    end)
  end))

  it("draw new random numbers for each update, and the same for the same update", with_seed(
    function()
      local n = 4096
      local function ups(draw)
        local set = moved(n, 1, 2 ^ -8, "stochastic", draw)
        local list = set:weights(1)
        set:free()
        return list
      end
      local a, b, again, both = ups(7), ups(8), ups(7), 0
      assert.same(a, again)
      for i = 1, n do both = both + (a[i] > 1 and b[i] > 1 and 1 or 0) end
      assert.is_true(math.abs(both - n / 4) < 4 * math.sqrt(n * 3 / 16), tostring(both))
      C.eng_rng_set(21, 0)
      assert.not_same(a, ups(7))
    end))

  it("draw in lagged updates by the device's own count of updates", with_seed(function()
    sets.everywhere(function()
      local function run(lagged)
        local set, t = sets.new({ { 3001 } }, { master = "bf16" }), 1
        set:optimizer("adamw")
        set:rounding("stochastic")
        for step, bad in ipairs { false, inf, false, nan, false } do
          local g = ffi.new("float[3001]")
          for i = 0, 3000 do g[i] = math.sin(i + step) end
          g[77] = bad or g[77]
          set:write_gradients({ g }, "f32")
          if lagged then
            check(C.eng_params_stats_start(set.params, C.ENG_NEED_NORM, nil, 0, nil))
            set:update { hyper = sets.KINDS.adamw.hyper, t = 1, draw = 99, lagged = true }
            check(C.eng_params_stats_fetch(ffi.new("eng_record"), nil, ffi.new("double[1]"),
              set.params, 1))
          elseif not bad then
            set:update { hyper = sets.KINDS.adamw.hyper, t = t }
            t = t + 1
          end
        end
        local sum = tostring(set:checksum())
        set:free()
        return sum
      end
      assert.equal(run(false), run(true))
    end)
  end))

  it("keep with Kahan what rounding to nearest loses", with_seed(function()
    for rounding, want in pairs { kahan = 1 + 2 ^ -6, nearest = 1 } do
      sets.everywhere(function()
        local set = sets.new({ { 21 } }, { master = "bf16" })
        check(C.eng_fill(set.leaf[1], 1))
        set:optimizer("sgd")
        set:rounding(rounding)
        local g = {}
        for i = 1, 21 do g[i] = -2 ^ -12 end
        for t = 1, 64 do
          set:write_gradients { g }
          set:update { hyper = { lr = 1 }, t = t }
        end
        for _, x in ipairs(set:weights(1)) do assert.equal(want, x) end
        set:free()
      end)
    end
  end))

  it("change between f32 and bf16 in place, rounded to nearest", sets.step(function()
    local set = sets.new({ { 3 }, { 2 } }, { shadow = "f16" })
    set:write_weights(1, { 1 + 2 ^ -9, -1 - 3 * 2 ^ -8, 2 ^ -133 })
    set:write_weights(2, { 5, 1 + 2 ^ -9 })
    local bytes = ffi.new("int64_t[4]")
    set:masters { "bf16", "f32" }
    local values, format = set:weights(1)
    assert.same({ { 1, -1 - 2 ^ -6, 2 ^ -133 }, "bf16" }, { values, format })
    assert.same({ 5, 1 + 2 ^ -9 }, (set:weights(2)))
    C.eng_params_bytes(bytes, set.params)
    assert.same({ 128, 0 }, { tonumber(bytes[0]), tonumber(bytes[1]) })
    set:masters "f32"
    values, format = set:weights(1)
    assert.same({ { 1, -1 - 2 ^ -6, 2 ^ -133 }, "f32" }, { values, format })
    set:free()
  end))

  it("refuse what cannot work, and say why", sets.step(function()
    local set = sets.new({ { 3 } }, { master = "bf16" })
    assert.error_matches(function() set:masters "f16" end,
      "parameter p1: expected master weights in f32 or bf16, got f16")
    assert.error_matches(function() set:precision("bf16") end,
      "parameter p1: its master is bf16, so expected f32 %(no low%-precision copy%), got bf16")
    set:optimizer("sgd")
    assert.error_matches(function() set:rounding(3) end, "sgd: unknown rounding number 3")
    assert.is_nil(set:moment(C.ENG_COMPENSATION, 1))
    local function slice()
      return engine.run("slice", { engine.Tensor(set.leaf[1][0]) }, { 0, 0, 2, 1 })
    end
    slice()
    assert.error_matches(function() set:masters "f32" end, "tape has operations")
    check(C.eng_step_end())
    check(C.eng_step_begin())
    C.eng_grad_enabled(false)
    local view = slice()
    C.eng_grad_enabled(true)
    assert.error_matches(function() set:masters "f32" end, "while a view of it exists")
    check(C.eng_free(view))
    set:masters "f32"
    set:free()
  end))
end)
