-- Products of FP8 matrices: Hopper's accumulator against a second implementation of its definition,
-- in doubles; its error against published tables; the three products of a linear layer; refused
-- calls.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local values = require "spec.cpu.kernels.values"
local SETS = require("spec.cpu.kernels.compare").SETS
local C = M_ffi.C
local fp8 = engine.fp8

local FRACTION, BIAS = { e4m3 = 3, e5m2 = 2 }, { e4m3 = 7, e5m2 = 15 }

--- Value and exponent of a code in the accumulator: subnormals have the smallest normal exponent.
local function parts(code, format)
  local field = math.floor(code % 128 / 2 ^ FRACTION[format])
  return C.eng_small_decode(format, code), math.max(field, 1) - BIAS[format]
end

local function cut(x, unit)
  return x >= 0 and math.floor(x / unit) * unit or -math.floor(-x / unit) * unit
end

--- The sum of c and up to 32 products: each term truncated to a multiple of 2^(E-13), with E the
--- largest exponent of a term, and the sum to 13 fraction bits.
local function group(a, fa, b, fb, from, to, c)
  local largest, terms = -1000, {}
  for k = from, to do
    local x, ex = parts(a[k], fa)
    local y, ey = parts(b[k], fb)
    if x ~= 0 and y ~= 0 and ex + ey > largest then largest = ex + ey end
    terms[#terms + 1] = x * y
  end
  if c ~= 0 then
    terms[#terms + 1] = c
    largest = math.max(largest, select(2, math.frexp(c)) - 1)
  end
  if largest == -1000 then return 0 end
  local sum = 0
  for _, term in ipairs(terms) do sum = sum + cut(term, 2 ^ (largest - 13)) end
  if sum == 0 then return 0 end
  return cut(sum, 2 ^ (select(2, math.frexp(sum)) - 1 - 13))
end

--- The dot product of n codes, promoted every `promotion` steps along K.
local function hopper(a, fa, b, fb, n, promotion)
  local cell, total = M_ffi.ffi.new("float[1]"), nil
  for from = 0, n - 1, promotion do
    local c = 0
    for k = from, math.min(from + promotion, n) - 1, 32 do
      c = group(a, fa, b, fb, k, math.min(k + 32, from + promotion, n) - 1, c)
    end
    cell[0] = (total or 0) + c
    total = tonumber(cell[0])
  end
  return total
end

--- A matrix of codes made by `draw`, in one block of scale 1.
local function codes(format, rows, columns, draw)
  local bytes = M_ffi.ffi.new("uint8_t[?]", rows * columns)
  for i = 0, rows * columns - 1 do bytes[i] = draw(i) end
  local q = values.tensor_of(format, { rows, columns })
  M_ffi.check(C.eng_write(q, bytes, M_ffi.dtype[format], rows * columns))
  return { q = q, bytes = bytes, format = format }
end

local function product(a, b, ints)
  local one = values.listed("f32", { 1, 1 }, { 1 })
  return M_ffi.run("fp8_matmul", { a.q, one, b.q, one, false },
    { 0, 1, 0, 0, 0, 0, 0, ints[1], ints[2] })
end

--- Mean relative error (or, with `scale`, mean |error| / scale) of `accumulator` against the exact
--- sums.
local function error_of(qx, qw, options, scale)
  options.transpose_b, options.dtype = true, "f32"
  local got, n = values.values_of(fp8.matmul(qx, qw, options))
  local want = values.values_of(fp8.matmul(qx, qw, { transpose_b = true, accumulator = "exact",
    dtype = "f64" }))
  local sum = 0
  for i = 0, n - 1 do sum = sum + math.abs(got[i] - want[i]) / (scale or math.abs(want[i])) end
  return sum / n
end

describe("FP8 products (" .. table.concat(SETS, ", ") .. ")", function()
  before_each(function() M_ffi.check(C.eng_step_begin()) end)
  after_each(function()
    if #SETS > 1 then C.eng_cpu_isa(SETS[1]) end
    M_ffi.check(C.eng_step_end())
  end)

  it("accumulate like Hopper's tensor cores", function()
    values.seed("hopper")
    local draws = {
      any = function(f)
        return function()
          local c = values.integer(0, 255) return c % 128 > (f == "e4m3" and 126 or 123) and 0 or c
        end
      end,
      positive = function() return function() return values.integer(40, 60) end end,
      small = function()
        return function() return values.integer(0, 9) + 128 * values.integer(0, 1) end
      end,
      rare = function()
        return function()
          return values.uniform() < 0.9 and 128 * values.integer(0, 1) or values.integer(1, 120)
        end
      end,
    }
    for _, formats in ipairs { { "e4m3", "e4m3" }, { "e4m3", "e5m2" }, { "e5m2", "e4m3" },
      { "e5m2", "e5m2" } } do
      for _, draw in pairs(draws) do
        local m, n, k = 3, 19, 169
        local a, b = codes(formats[1], m, k, draw(formats[1])),
          codes(formats[2], n, k, draw(formats[2]))
        for _, promotion in ipairs { 0, 32, 128 } do
          for _, set in ipairs(SETS) do
            if #SETS > 1 then C.eng_cpu_isa(set) end
            local got = values.values_of(product(a, b, { C.ENG_ACCUMULATE_HOPPER, promotion }))
            for i = 0, m - 1 do
              for j = 0, n - 1 do
                local want = hopper(a.bytes + i * k, formats[1], b.bytes + j * k, formats[2], k,
                  promotion == 0 and 1e9 or promotion)
                assert(got[i * n + j] == want, (
                  "%s, %s x %s, promotion %d: expected %.9g, got %.9g"):format(set, formats[1],
                  formats[2], promotion, want, got[i * n + j]))
              end
            end
          end
        end
      end
    end
  end)

  it("propagate infinities and NaN", function()
    local function row(format, list)
      return codes(format, 1, 70, function(i) return list[i + 1] or 0x38 end)
    end
    local one = codes("e5m2", 1, 70, function() return 0x3C end)
    for _, accumulator in ipairs { C.ENG_ACCUMULATE_FP32, C.ENG_ACCUMULATE_EXACT,
      C.ENG_ACCUMULATE_HOPPER } do
      for _, set in ipairs(SETS) do
        if #SETS > 1 then C.eng_cpu_isa(set) end
        local function sum(a) return product(a, one, { accumulator, 0 }):item() end
        assert.equal(math.huge, sum(row("e5m2", { 0x7C })))
        assert.equal(-math.huge, sum(row("e5m2", { 0xFC })))
        for _, list in ipairs { { 0x7C, 0xFC }, { 0x7E } } do
          local v = sum(row("e5m2", list))
          assert(v ~= v)
        end
        local v = product(row("e5m2", { 0x7C }), codes("e5m2", 1, 70, function() return 0 end),
          { accumulator, 0 }):item()
        assert(v ~= v)
        v = sum(row("e4m3", { 0xFF }))
        assert(v ~= v)
      end
    end
  end)

  it("have the errors of the published table, without and with promotion", function()
    engine.seed(5)
    local rows = 24
    for _, case in ipairs {   -- distribution, K, promotion -> mean relative error
      { "uniform", 1024, { [0] = 1.50e-2, [512] = 5.8e-3, [128] = 5.5e-4 } },
      { "uniform", 4096, { [0] = 7.46e-2, [512] = 5.8e-3, [128] = 5.5e-4 } },
      { "half", 4096, { [0] = 6.64e-2, [512] = 5.7e-3, [128] = 6.0e-4 } },
      { "normal", 4096, { [0] = 8.6e-4, [512] = 2.6e-4, [128] = 1.0e-4 } },
    } do
      local law, k, table_of = unpack(case)
      local function draw()
        local x = law == "uniform" and engine.rand { rows, k } or engine.randn { rows, k }
        return law == "half" and x:abs() or x
      end
      local qx, qw = fp8.quantize(draw()), fp8.quantize(draw())
      for promotion, want in pairs(table_of) do
        local got = error_of(qx, qw, { accumulator = "hopper", promotion = promotion },
          law == "normal" and math.sqrt(k))
        assert(math.abs(got / want - 1) < 0.12,
          ("%s, K %d, promotion %d: expected %.2e, got %.2e"):format(law, k, promotion, want, got))
      end
    end
  end)

  it("are close to the true product with every accumulator but e4m3", function()
    engine.seed(6)
    local x, w = engine.randn { 33, 384 }, engine.randn { 50, 384 }
    local exact = x:to("f64"):matmul(w:to("f64"), false, true)
    for _, blocks in ipairs { { "tensor", "tensor" }, { "row", "row" }, { "1x128", "128x128" },
      { "1x128", "1x128" }, { "128x128", "1x128" } } do
      for _, format in ipairs { "e4m3", "e5m2" } do
        local qx, qw = fp8.quantize(x, { block = blocks[1] }),
          fp8.quantize(w, { block = blocks[2], format = format })
        local want = qx:dequantize("f64"):matmul(qw:dequantize("f64"), false, true)
        -- dequantize rounds to f32
        for accumulator, most in pairs { fp32 = 1e-6, exact = 1e-7, hopper = 2e-3 } do
          local y = fp8.matmul(qx, qw, { transpose_b = true, accumulator = accumulator,
            dtype = accumulator == "exact" and "f64" or "f32" })
          assert((y:to("f64") - want):norm():item() / want:norm():item() < most)
        end
        local loss = (want - exact):norm():item() / exact:norm():item()
        assert(loss < (format == "e4m3" and 0.05 or 0.08), tostring(loss))
      end
    end
  end)

  it("compute the three products of a linear layer", function()
    engine.seed(8)
    local M, N, K = 256, 144, 272
    local x, w, dy = engine.randn { M, K }, engine.randn { N, K }, engine.randn { M, N }
    local qx = fp8.quantize(x, { block = "1x128", transposed = true })
    local qw = fp8.quantize(w, { block = "128x128", transposed = true })
    local qd = fp8.quantize(dy, { block = "1x128", transposed = true, format = "e5m2" })
    local function near(y, want, most)
      assert.same(want.shape, y.shape)
      local error = ((y:to("f32") - want):norm() / want:norm()):item()
      assert(error < most, tostring(error))
    end
    for _, accumulator in ipairs { "fp32", "hopper" } do
      near(fp8.matmul(qx, qw, { transpose_b = true, accumulator = accumulator }),
        x:matmul(w, false, true), 0.05)
      local dx = fp8.matmul(qd, qw, { accumulator = accumulator })
      near(dx, dy:matmul(w), 0.09)
      -- The weight's transposed copy holds the same numbers; Hopper's product uses it.
      assert.same(dx:totable(), fp8.matmul(qd, qw.transposed,
        { transpose_b = true, accumulator = accumulator }):totable())
      local dw = fp8.matmul(qd.transposed, qx.transposed,
        { transpose_b = true, accumulator = accumulator })
      near(dw, dy:matmul(x, true), 0.09)
      local sum = engine.ones(N, K)
      fp8.matmul(qd.transposed, qx.transposed, { transpose_b = true, accumulator = accumulator,
        into = sum, add = true })
      assert.same((dw + 1):totable(), sum:totable())
      fp8.matmul(qd.transposed, qx.transposed, { transpose_b = true, accumulator = accumulator,
        into = sum })
      assert.same(dw:totable(), sum:totable())
      -- dW = dy^T x from blocks of 128 rows of x and dy themselves
      local tall = fp8.matmul(fp8.quantize(dy, { block = "128x1", format = "e5m2" }),
        fp8.quantize(x, { block = "128x1" }), { transpose_a = true, accumulator = accumulator })
      assert.same(dw:totable(), tall:totable())
    end
    local bias = engine.randn { N }
    assert.same((fp8.matmul(qx, qw, { transpose_b = true }) + bias):to("bf16"):totable(),
      fp8.matmul(qx, qw, { transpose_b = true, bias = bias, dtype = "bf16" }):totable())
  end)

  it("round products and sums to e4m3 on request", function()
    local q = fp8.quantize(engine.ones(1, 64), { factor = 1 })
    local function sum(a, n)
      return fp8.matmul(a, fp8.quantize(engine.ones(1, n), { factor = 1 }),
        { transpose_b = true, accumulator = "e4m3", promotion = 0 }):item()
    end
    assert.equal(16, sum(q, 64))   -- 16 + 1 is a tie and rounds to the even 16
    assert.equal(32, fp8.matmul(q, q, { transpose_b = true, accumulator = "e4m3",
      promotion = 32 }):item())
    -- saturates
    assert.equal(448, sum(fp8.quantize(engine.full({ 1, 8 }, 100), { factor = 1 }), 8))
  end)

  it("are 0 when K is 0 (only the operation itself accepts such matrices)", function()
    local function empty(rows)
      return M_ffi.run("quantize", { engine.zeros(rows, 0), false },
        { M_ffi.dtype.e4m3, 0, 0, 0, 0, 0, 0 }, { -1, 0 }, 5)
    end
    local a, a_scale = empty(3)
    local b, b_scale = empty(2)
    for accumulator = 0, 3 do
      assert.same({ { 0, 0 }, { 0, 0 }, { 0, 0 } },
        M_ffi.run("fp8_matmul", { a, a_scale, b, b_scale, false },
          { 0, 1, 0, 0, 0, 0, 0, accumulator, 128, 0 }):totable())
    end
    assert.same({ { 1, 2 }, { 1, 2 }, { 1, 2 } },
      M_ffi.run("fp8_matmul", { a, a_scale, b, b_scale, engine.tensor { 1, 2 } },
        { 0, 1, 0, 0, 0, 0, 0, 0, 128, 0 }):totable())
    assert.error_matches(function() fp8.quantize(engine.zeros(3, 0)) end,
      "expected rows of 1 or more elements, got f32 %[3 x 0%]$")
  end)

  it("report misuse in one line", function()
    local a, b = fp8.quantize(engine.ones(4, 256), { block = "1x128" }),
      fp8.quantize(engine.ones(6, 256), { block = "128x128" })
    local packed = fp8.quantize(engine.ones(4, 256), { format = "e5m6" })
    local wrong = fp8.quantize(engine.ones(4, 256), { block = "1x128" })
    wrong.scale = engine.ones(2, 3)
    local y = engine.zeros(4, 6)
    for _, case in ipairs {
      { function() fp8.matmul(a, b) end,
        "expected %[M x K%] times %[K x N%], got e4m3 %[4 x 256%] and e4m3 %[6 x 256%]" },
      { function() fp8.matmul(a, b, { accumulator = "fp22" }) end,
        "expected accumulator e4m3, exact, fp32 or hopper, got 'fp22'" },
      { function() fp8.matmul(a, b, { transpose_b = true, promotion = 100 }) end,
        "a multiple of 32" },
      { function() fp8.matmul(a, b, { transpose_b = true, promotion = -1 }) end, "promotion" },
      { function() fp8.matmul(a, engine.ones(3)) end,
        "expected b to be a result of fp8.quantize, got a tensor" },
      { function() fp8.matmul(packed, b) end, "a is e5m6" },
      { function() fp8.matmul(wrong, b, { transpose_b = true }) end,
        "the scales of a 4 x 256 matrix in blocks of 1 x 128 must be f32 %[2 x 4%], " ..
          "got f32 %[2 x 3%]" },
      { function() fp8.matmul(a, b, { transpose_b = true, bias = engine.ones(3) }) end,
        "expected a bias of shape %[6%]" },
      { function() fp8.matmul(a, b, { transpose_b = true, add = true }) end, "add needs a tensor" },
      { function() fp8.matmul(a, b, { transpose_b = true, into = engine.zeros(4, 7) }) end,
        "the given output is f32 %[4 x 7%], expected %[4 x 6%]" },
      { function() fp8.matmul(a, b, { transpose_b = true, into = y, add = true,
        bias = engine.ones(6) }) end, "expected no bias in a call that adds" },
      { function() fp8.matmul(a, b, { transpose_b = true,
        into = engine.zeros(6, 4):transpose() }) end, "contiguous" },
      { function() fp8.matmul(a, b, { transpose_b = true, into = a.scale }) end,
        "cannot read the memory it writes" },
      { function() fp8.matmul(a, fp8.quantize(engine.ones(6, 256), { block = "1x96" }),
        { transpose_b = true }) end, "one block size must divide the other, got 128 and 96" },
    } do
      assert.error_matches(case[1], case[2])
    end
  end)
end)
