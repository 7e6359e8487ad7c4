-- Quantizers against the formulas of the projects they are named after (core/base/fp8_scale.h),
-- reimplemented here in LuaJIT's f32 and f64 arithmetic; the layout of the scales against
-- core/base/fp8_layout.h.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local values = require "spec.cpu.kernels.values"
local ffi, C = M_ffi.ffi, M_ffi.C
local fp8 = engine.fp8

local cell = ffi.new("union { float f; uint32_t u; }")
--- x rounded to f32.
local function f32(x)
  cell.f = x
  return tonumber(cell.f)
end
--- x rounded down to a power of two, with its sign.
local function pow2_down(x)
  cell.f = x
  cell.u = bit.band(cell.u, 0xFF800000)
  return tonumber(cell.f)
end
local function finite(x) return x == x and math.abs(x) < math.huge end

local FLT_MAX = f32(3.4028234663852886e38)
local EPS = { transformer_engine = 0, deepseek = 1e-4, deepgemm = 1e-4, torchao = 1e-12, msamp = 0 }

--- Each rule returns its factor, the scale, and true if the factor is a divisor. amax excludes NaN;
--- `nan`: whether the block has one.
local rules = {}
function rules.transformer_engine(amax, top, o)
  amax = math.max(amax, o.eps)
  if not finite(amax) or amax == 0 then return 1, 1 end
  local s = f32(top / amax)
  if not finite(s) then s = o.limit end
  if o.pow2 then s = pow2_down(s) end
  return s, f32(1 / s)
end
function rules.deepseek(amax, top, o)
  local s = f32(math.max(amax, o.eps) / top)
  if o.pow2 and finite(s) then s = 2 ^ math.ceil(math.log(s) / math.log(2) - 1e-9) end
  return s, s, true
end
function rules.deepgemm(amax, top, o)
  local s = f32(math.max(amax, o.eps) / top)
  if o.pow2 and finite(s) then
    cell.f = s
    local up = bit.band(cell.u, 0x7FFFFF) ~= 0
    s = pow2_down(s) * (up and 2 or 1)
  end
  return f32(1 / s), s
end
function rules.torchao(amax, top, o, nan)
  if nan then return 0 / 0, 0 / 0 end
  local s = f32(top / math.max(amax, o.eps))
  if o.pow2 then s = pow2_down(s) end
  return s, f32(1 / s)
end
function rules.msamp(amax, top)
  if not finite(amax) or amax == 0 then return 1, 1 end
  local ratio = f32(top / amax)
  local _, e = math.frexp(ratio)
  local s = finite(ratio) and 2 ^ (e - 1) or 2 ^ 127
  return s, f32(1 / s)
end

local TOP = { e4m3 = 448, e5m2 = 57344, e5m6 = 65024 }

--- Index of the scale of block (i, j) in memory; `shape` is the shape of the scales.
local function place(block, i, j, shape)
  if block[1] == 1 and block[2] ~= 0 then return j * shape[2] + i end
  if block[1] <= 1 and block[2] == 0 then return i end
  return i * shape[2] + j
end

local function expect_quantized(x, o)
  local shape = x.shape
  local columns = shape[#shape]
  local rows = x.count / columns
  local y = fp8.quantize(x, o)
  local numbers = values.values_of(x)
  local codes, scale = y.q:read(), y.scale:read()
  local block, where = y.block, y.scale.shape
  local high, wide = block[1] == 0 and rows or block[1], block[2] == 0 and columns or block[2]
  local limit = (block[1] == 0 and block[2] == 0 or x.dtype == "f32") and FLT_MAX
    or x.dtype == "f16" and 65504 or 3.3895313892515355e38
  local settings = { eps = f32(o.eps or EPS[o.rule]), pow2 = o.pow2, limit = limit }
  local saved = {}
  for i = 0, math.ceil(rows / high) - 1 do
    for j = 0, math.ceil(columns / wide) - 1 do
      local amax, nan = 0, false
      local function each(f)
        for r = i * high, math.min((i + 1) * high, rows) - 1 do
          for c = j * wide, math.min((j + 1) * wide, columns) - 1 do f(r * columns + c) end
        end
      end
      each(function(at)
        local v = math.abs(numbers[at])
        if v ~= v then nan = true elseif v > amax then amax = v end
      end)
      local factor, want, divides = rules[o.rule](amax, TOP[o.format], settings, nan)
      local at = place(block, i, j, where)
      saved[at] = true
      local got = scale[at]
      assert(got == want or (got ~= got and want ~= want),
        ("scale of block %d, %d: expected %.9g, got %.9g"):format(i, j, want, got))
      each(function(k)
        local v = numbers[k]
        local q = f32(divides and v / factor or v * factor)
        local code = tonumber(C.eng_small_encode(o.format, q, 1))
        assert(codes[k] == code, ("%.9g by %.9g: expected 0x%02x, got 0x%02x"):format(v, factor,
          code, codes[k]))
      end)
    end
  end
  for at = 0, y.scale.count - 1 do
    if not saved[at] then assert.equal(0, scale[at]) end
  end
  return y
end

local function spread(n, seed)   -- outliers, zeros, subnormals among ordinary numbers
  values.seed(seed)
  local list = {}
  for i = 1, n do
    local u = values.uniform()
    list[i] = values.sign() * (u < 0.02 and 2 ^ 14 * u or u < 0.05 and 0 or u < 0.08
      and 2 ^ -140 * u or u < 0.2 and u * 1e-4 or u)
  end
  return list
end

describe("FP8 quantizers", function()
  before_each(function() M_ffi.check(C.eng_step_begin()) end)
  after_each(function() M_ffi.check(C.eng_step_end()) end)

  for rule in pairs(rules) do
    it("follow " .. rule .. " bit for bit", function()
      for _, format in ipairs { "e4m3", "e5m2" } do
        for _, block in ipairs { "tensor", "row", "column", "1x128", "128x1", "128x128", "3x7",
          "1x16", { 0, 32 } } do
          for _, dtype in ipairs { "f32", "bf16" } do
            for _, pow2 in ipairs { false, true } do
              local x = values.listed(dtype, { 6, 300 }, spread(1800, rule .. format))
              expect_quantized(x, { rule = rule, format = format, block = block, pow2 = pow2 })
            end
          end
        end
      end
      expect_quantized(values.listed("f32", { 260, 9 }, spread(2340, rule)),
        { rule = rule, format = "e4m3", block = "128x128" })
    end)

    it("treat zero, tiny, huge and non-finite blocks as " .. rule .. " does", function()
      for _, list in ipairs { { 0, -0.0, 0, 0 }, { 1e-44, 0, -1e-45, 0 }, { 1e-38, 1, 2, 3 },
        { 1e-12, 1e-13, 0, 0 }, { 1 / 0, 1, -2, 0 }, { -1 / 0, 1 / 0, 0, 1 },
        { 0 / 0, 1, 3, -7 }, { 0 / 0, 0 / 0, 0 / 0, 0 / 0 }, { 3.4e38, -1, 1e-30, 0 },
        { 448, 449, 447, 1 }, { 0 / 0, 1 / 0, 1, 2 } } do
        for _, format in ipairs { "e4m3", "e5m2" } do
          for _, pow2 in ipairs { false, true } do
            expect_quantized(values.listed("f32", { 2, 2 }, list),
              { rule = rule, format = format, block = "1x128", pow2 = pow2 })
            expect_quantized(values.listed("f32", { 2, 2 }, list),
              { rule = rule, format = format, block = "tensor", pow2 = pow2 })
            if rule ~= "msamp" then
              expect_quantized(values.listed("f32", { 2, 2 }, list),
                { rule = rule, format = format, block = "2x2", eps = 0.25, pow2 = pow2 })
            end
          end
        end
      end
    end)
  end

  it("return a transposed copy equal to the quantized transposed matrix", function()
    local x = values.listed("f32", { 130, 260 }, spread(130 * 260, "turned"))
    for _, block in ipairs { "1x128", "128x1", "128x128", "tensor", "row", "column", "2x64" } do
      for _, dtype in ipairs { "f32", "f16" } do
        local one = x:to(dtype)
        local both = fp8.quantize(one, { block = block, transposed = true })
        local alone = fp8.quantize(one:transpose():contiguous(), { block = block })
        for _, field in ipairs { "q", "scale" } do
          assert.same(alone[field].shape, both.transposed[field].shape)
          assert.same(alone[field]:totable(), both.transposed[field]:totable(), block .. " " ..
            field)
        end
        local plain = fp8.quantize(one, { block = block })
        assert.same(plain.q:totable(), both.q:totable())
        assert.same(plain.scale:totable(), both.scale:totable())
      end
    end
    -- scales of 128x1 blocks of x and of 1x128 blocks of its transpose have the same layout
    local down, across = fp8.quantize(x, { block = "128x1" }),
      fp8.quantize(x:transpose():contiguous(), { block = "1x128" })
    assert.same(down.scale:totable(), across.scale:totable())
  end)

  it("pad scales as cuBLASLt reads them", function()
    local x = engine.ones(300, 640)
    -- rows of blocks, padded to a multiple of 4
    assert.same({ 3, 8 }, fp8.quantize(x, { block = "128x128" }).scale.shape)
    -- blocks along K; rows vary fastest
    assert.same({ 5, 300 }, fp8.quantize(x, { block = "1x128" }).scale.shape)
    assert.same({ 5, 4 }, fp8.quantize(x:slice(1, 1, 3), { block = "1x128" }).scale.shape)
    assert.same({ 1, 1 }, fp8.quantize(x).scale.shape)
    assert.same({ 1, 300 }, fp8.quantize(x, { block = "row" }).scale.shape)
    assert.same({ 1, 640 }, fp8.quantize(x, { block = "column" }).scale.shape)
  end)

  it("accept a factor, an eps and a margin", function()
    local x = engine.tensor { { 1, -2, 3, 1000 } }
    local y = fp8.quantize(x, { factor = 2 })
    assert.same({ { 2, -4, 6, 448 } }, y.q:totable())
    assert.equal(0.5, y.scale:item())
    assert.equal(1000, y.amax:item())
    assert.equal(2 * fp8.quantize(x).scale:item(), fp8.quantize(x, { margin = 1 }).scale:item())
    assert.equal(2 ^ -1, fp8.quantize(x, { rule = "deepseek", eps = 448 * 2 ^ -1,
      block = "1x1" }).scale:select(2, 1):select(1, 1):item())
    -- a factor in a tensor is not checked, because it may be on a card
    for _, bad in ipairs { 0, -1, 1 / 0, 0 / 0 } do
      assert.error_matches(function() fp8.quantize(x, { factor = bad }) end,
        "expected factor to be a positive finite number, got [^\n]+$")
      assert.same({ 1, 4 }, fp8.quantize(x, { factor = engine.full({ 1 }, bad, "f32") }).q.shape)
    end
  end)

  it("store e5m6 in 12 bits", function()
    local x = values.listed("f32", { 3, 16 }, spread(48, "e5m6"))
    for _, pow2 in ipairs { false, true } do
      local y = fp8.quantize(x, { format = "e5m6", block = "1x8", rule = "deepgemm", pow2 = pow2 })
      assert.same({ 3, 6 }, y.q.shape)
      local numbers, back, scale = values.values_of(x), values.values_of(y:dequantize()),
        y.scale:read()
      for i = 0, 47 do
        local s = scale[math.floor(i % 16 / 8) * 4 + math.floor(i / 16)]
        local code = C.eng_small_encode("e5m6", f32(numbers[i] * f32(1 / s)), 1)
        assert.equal(f32(C.eng_small_decode("e5m6", tonumber(code)) * s), back[i])
      end
    end
    local words = fp8.quantize(values.listed("f32", { 1, 8 },
      { 1, 2, 3, 4, -1, 0, 65024, 2 ^ -20 }), { format = "e5m6", factor = 1 }).q:read()
    local h = {}
    for k, v in ipairs { 1, 2, 3, 4, -1, 0, 65024, 2 ^ -20 } do h[k - 1] = fp8.encode(v, "e5m6") end
    assert.equal(bit.tobit(h[0] * 2 ^ 20 + h[1] * 2 ^ 8 + math.floor(h[2] / 16)), words[0])
    assert.equal(bit.tobit(h[2] % 16 * 2 ^ 28 + h[3] * 2 ^ 16 + h[4] * 2 ^ 4 +
      math.floor(h[5] / 256)), words[1])
    assert.equal(bit.tobit(h[5] % 256 * 2 ^ 24 + h[6] * 2 ^ 12 + h[7]), words[2])
  end)

  it("report misuse in one line", function()
    local x = engine.ones(4, 6)
    for _, case in ipairs {
      { function() fp8.quantize(x, { format = "e3m4" }) end,
        "expected format e4m3, e5m2 or e5m6, got 'e3m4'" },
      { function() fp8.quantize(x, { rule = "deepsek" }) end,
        "expected rule .*did you mean 'deepseek'" },
      { function() fp8.quantize(x, { block = "128" }) end, "expected block to be" },
      { function() fp8.quantize(x, { block = "0x128" }) end, "expected block to be" },
      { function() fp8.quantize(x, { factor = "a" }) end,
        "expected factor to be a number or a tensor of one element, got 'a'" },
      { function() fp8.quantize(engine.zeros(4, 0)) end,
        "expected rows of 1 or more elements, got f32 %[4 x 0%]" },
      { function() fp8.quantize(x):dequantize("i32") end,
        "expected dtype bf16, f16, f32 or f64, got 'i32'" },
      { function() fp8.matmul(fp8.quantize(x), fp8.quantize(x),
        { transpose_b = true, dtype = "e4m3" }) end, "expected dtype bf16, f16, f32 or f64" },
      { function() fp8.decode(256, "e4m3") end, "expected a code of e4m3 below 256, got 256" },
      { function() fp8.quantize(x, { block = { 1, -1 } }) end, "the number of columns in a block" },
      { function() fp8.quantize(x, { block = "1x128", factor = 2 }) end,
        "a given factor needs one block for the whole tensor" },
      { function() fp8.quantize(x, { format = "e5m6" }) end, "e5m6 packs 8 numbers" },
      { function() fp8.quantize(x, { margin = 0.5 }) end, "expected an integer margin" },
      { function() fp8.quantize(x, { eps = 1 / 0 }) end, "expected eps" },
      { function() fp8.quantize(x, { eps = -1 / 0 }) end, "expected eps within .*, got %-inf" },
      { function() fp8.quantize(x:to("e4m3")) end, "FP8 tensors allow no arithmetic" },
      { function() fp8.quantize(x:to("i32")) end, "expected a floating%-point tensor" },
      { function() fp8.quantize(3) end, "fp8.quantize: expected a tensor" },
      { function() M_ffi.run("dequantize", { fp8.quantize(x).q, engine.ones(2, 2) },
        { 0, 0, 0 }) end,
        "the scales of a 4 x 6 matrix in blocks of 0 x 0 must be f32 %[1 x 1%], " ..
          "got f32 %[2 x 2%] %(a block size of 0 means the whole dimension" },
    } do
      assert.error_matches(case[1], case[2])
    end
    assert.same({ 0, 6 }, fp8.quantize(engine.zeros(0, 6),
      { block = "1x128", transposed = true }).q.shape)
  end)
end)
