-- Calls for the FP8 operations: every format, block shape, scale rule, accumulator and layout, bit
-- for bit like the reference. See spec/cpu/kernels_spec.lua.
local engine = require "engine.base.ffi"
local compare = require "spec.cpu.kernels.compare"
local tensors = require "spec.cpu.kernels.values"
local float, whole, skips = tensors.float, tensors.whole, tensors.skips

local generators = {}

local FP8 = { "e4m3", "e5m2" }
local E5M6 = 12
local BLOCKS = { { 0, 0 }, { 1, 0 }, { 1, 128 }, { 128, 1 }, { 128, 128 }, { 0, 1 }, { 1, 16 },
  { 3, 5 }, { 2, 300 }, { 64, 0 }, { 0, 64 } }
local SHAPES = { { 1, 1 }, { 5, 3 }, { 3, 129 }, { 130, 257 }, { 7, 128 }, { 128, 16 }, { 1, 300 },
  { 0, 5 }, { 3, 0 }, { 64, 256 } }
local LARGE = { { 300, 40 }, { 5, 2100 }, { 140, 1100 } }  -- more than one tile in either direction

--- The outputs of quantize for a tensor, on the current device.
local function quantized(x, format, block, flags, rule)
  return engine.run("quantize", { x, false }, { engine.dtype[format], block[1], block[2], rule or 1,
    flags or 0 }, { -1, 0 }, 5)
end

generators.quantize = function(try)
  local n = 0
  for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
    for _, shape in ipairs(dtype == "bf16" and tensors.both(SHAPES, LARGE) or SHAPES) do
      for _, block in ipairs(BLOCKS) do
        n = n + 1
        local kind = ({ "normal", "rare", "tiny", "large" })[n % 4 + 1]
        local layout = n % 7 == 0 and "transposed" or "plain"
        local x = float(dtype, shape, kind, layout)
        local pow2, turned, rule = n % 3 == 0 and 4 or 0, n % 2 == 0 and 8 or 0, n % 5
        try { inputs = { x, false }, ints = { engine.dtype[FP8[n % 2 + 1]], block[1], block[2],
          rule, pow2 + turned }, floats = { -1, 0 }, outputs = 5,
              zeros = true, note = kind }
        if n % 4 == 0 then   -- at random: every device draws the same numbers
          try { inputs = { x, false }, ints = { engine.dtype[FP8[n % 2 + 1]], block[1], block[2],
            rule, 2 + turned, n, 1 }, floats = { -1, 0 },
                outputs = 5, zeros = true, note = "stochastic" }
        end
        if shape[2] % 8 == 0 and shape[2] > 0 then
          try { inputs = { x, false }, ints = { E5M6, block[1], block[2], 2, pow2 },
            floats = { -1, 0 }, outputs = 5 }
        end
      end
    end
    for rule = 0, 4 do   -- all zero; an infinity; a NaN; every value alone; eps and margin
      for _, list in ipairs { { 0, -0.0, 0 }, { 1, 1 / 0, -2 }, { 1, 0 / 0, -2 }, { 1e-30, 0, 0 },
        { 448, -448, 1 }, { 3e38, 1, 0 }, { 1e-44, 0, 1e-45 } } do
        for pow2 = 0, 4, 4 do
          try { inputs = { tensors.listed(dtype, { 1, 3 }, list), false },
            ints = { engine.dtype.e4m3, 1, 128, rule, pow2 }, floats = { -1, 0 }, outputs = 5,
            zeros = true }
          try { inputs = { tensors.listed(dtype, { 3 }, list), false },
            ints = { engine.dtype.e5m2, 0, 0, rule, pow2 + 8 }, floats = { 0.5, 2 }, outputs = 5 }
          local row = {}   -- of a length that is processed by tiles
          for i = 1, 16 do row[i] = list[(i - 1) % 3 + 1] end
          for _, margin in ipairs { -100, 0, 90 } do
            try { inputs = { tensors.listed(dtype, { 1, 16 }, row), false },
              ints = { engine.dtype.e4m3, 1, 128, rule, pow2 + 8 }, floats = { 0, margin },
              outputs = 5, zeros = true }
          end
        end
      end
    end
    -- scale given: delayed scaling
    for _, factor in ipairs { 1, 448, 0.3, -0.3, 2 ^ -20, 0, 1 / 0 } do
      try { inputs = { float(dtype, { 33, 70 }, "normal"),
        tensors.listed("f32", { 1 }, { factor }) },
            ints = { engine.dtype.e4m3, 0, 0, 1, 8 }, floats = { -1, 0 }, outputs = 5 }
    end
  end
  -- every rule on a matrix of several tiles, with values of several kinds
  for _, dtype in ipairs { "bf16", "f16", "f32" } do
    for rule = 0, 4 do
      for k, block in ipairs { { 1, 128 }, { 128, 1 }, { 128, 128 }, { 0, 0 } } do
        local x = float(dtype, { 144, 136 }, ({ "rare", "large", "tiny" })[(rule + k) % 3 + 1])
        try { inputs = { x, false }, ints = { engine.dtype[FP8[(rule + k) % 2 + 1]], block[1],
          block[2], rule, 8 + k % 2 * 4 }, floats = { -1, 0 },
              outputs = 5, zeros = true }
      end
    end
  end
  -- long rows: more blocks than the kernel measures at a time; the last block is cut
  for k, dtype in ipairs { "bf16", "f16", "f32" } do
    for rule = 0, 4 do
      for j, kind in ipairs { "normal", "rare", "tiny", "large" } do
        if not skips({ 18, 2200 }, rule + j + k) then
          local x = float(dtype, { 18, 2200 }, kind)
          try { inputs = { x, false }, ints = { engine.dtype[FP8[(j + k) % 2 + 1]], 1, 128, rule,
            (rule + j) % 2 * 4 }, floats = { -1, (rule + k) % 3 - 1 },
                outputs = 5, zeros = true, note = kind }
        end
      end
    end
  end
  -- a transposed copy so large that the kernel writes it past the caches
  try { inputs = { float("bf16", { 1536, 1408 }, "normal"), false },
    ints = { engine.dtype.e4m3, 1, 128, 0, 8 }, floats = { -1, 0 }, outputs = 5 }
  if os.getenv("ENGINE_TEST_DEVICE") then   -- more tiles than blocks that fit on a card
    try { inputs = { float("bf16", { 2576, 2600 }, "normal"), false },
      ints = { engine.dtype.e4m3, 1, 128, 1, 8 }, floats = { -1, 0 }, outputs = 5 }
  end
  -- several tiles of a card's kernel, the last ones cut
  for _, shape in ipairs { { 264, 136 }, { 272, 264 } } do
    for k, block in ipairs { { 1, 128 }, { 128, 1 }, { 128, 128 }, { 0, 0 }, { 1, 0 }, { 0, 1 } } do
      local x = float(k % 2 == 0 and "f16" or "bf16", shape, k % 3 == 0 and "rare" or "normal")
      try { inputs = { x, false }, ints = { engine.dtype[FP8[k % 2 + 1]], block[1], block[2], k % 5,
        8 }, floats = { -1, 0 }, outputs = 5, zeros = true }
      if k < 4 then
        try { inputs = { x, false }, ints = { E5M6, block[1], block[2], 2, 4 }, floats = { -1, 0 },
          outputs = 5 }
      end
    end
  end
  try { inputs = { float("f32", { 2, 3, 256 }, "normal"), false },
    ints = { engine.dtype.e4m3, 1, 128, 0, 8 }, floats = { -1, 0 }, outputs = 5 }
  for _, wide in ipairs { 128, 2048, 0 } do   -- e5m6 in rows longer than a tile
    try { inputs = { float("bf16", { 5, 4168 }, "normal"), false }, ints = { E5M6, 1, wide, 2, 4 },
      floats = { -1, 0 }, outputs = 5 }
  end
  try { inputs = { float("f32", { 4, 3 }, "normal"), false }, ints = { E5M6, 1, 0, 0, 0 },
    floats = { -1, 0 }, outputs = 5, fails = "packs 8" }
  try { inputs = { float("f32", { 4, 3 }, "normal"), false }, ints = { 0, 1, 0, 0, 0 }, outputs = 5,
    fails = "expected the format" }
end

-- Equals swiglu followed by quantize, bit for bit. The reference computes silu in f64, which may
-- round to another neighbour than a fast kernel's, so each device is compared with itself.
generators.swiglu_quantize = function(try)
  local n = 0
  local function same(dtype, shape, kinds, ints, options)
    options = options or {}
    n = n + 1
    local gate, up = float(dtype, shape, kinds[1], options.layout), float(dtype, shape, kinds[2])
    local factor = options.factor and tensors.listed("f32", { 1 }, { options.factor }) or false
    local call = { inputs = { gate, up, factor }, ints = ints, floats = options.floats or { -1, 0 },
      outputs = 5, note = table.concat(kinds, ", ") }
    compare.same_as("swiglu_quantize", call, function(inputs)
      local h = engine.run("swiglu", { inputs[1], inputs[2] }, {}, {})
      return { engine.run("quantize", { h, inputs[3] }, ints, call.floats, 5) }
    end)
  end
  local KINDS = { { "normal", "normal" }, { "rare", "normal" }, { "normal", "rare" },
    { "large", "normal" }, { "tiny", "large" }, { "large", "large" } }
  for d, dtype in ipairs { "bf16", "f16", "f32", "f64" } do
    for _, shape in ipairs(dtype == "bf16" and tensors.both(SHAPES, LARGE) or SHAPES) do
      for _, block in ipairs(BLOCKS) do
        local pow2, turned, rule = n % 3 == 0 and 4 or 0, n % 2 == 0 and 8 or 0, n % 5
        local format, kinds = engine.dtype[FP8[n % 2 + 1]], KINDS[n % #KINDS + 1]
        same(dtype, shape, kinds, { format, block[1], block[2], rule, pow2 + turned },
          { layout = n % 7 == 0 and "transposed" or "plain" })
        if n % 4 == 0 then
          same(dtype, shape, kinds, { format, block[1], block[2], rule, 2 + turned, n, 1 })
        end
        if shape[2] % 8 == 0 and shape[2] > 0 and n % 3 == 0 then
          same(dtype, shape, kinds, { E5M6, block[1], block[2], 2, pow2 })
        end
      end
    end
    -- every rule; matrices of several tiles, long rows and cut blocks; values of several kinds
    for rule = 0, 4 do
      for k, kinds in ipairs(KINDS) do
        if not skips({ 144, 136 }, rule + k + d) then
          local format = engine.dtype[FP8[(rule + k) % 2 + 1]]
          same(dtype, { 144, 136 }, kinds, { format, 1, 128, rule, 8 + k % 2 * 4 },
            { floats = { -1, k % 3 - 1 } })
          same(dtype, { 136, 264 }, kinds,
            { format, ({ 128, 128, 0 })[k % 3 + 1], ({ 128, 1, 0 })[k % 3 + 1], rule, k % 2 * 8 })
          if dtype ~= "f64" then
            same(dtype, { 6, 2200 + 1948 * (k % 2) }, kinds, { format, 1, 128, rule, k % 2 * 4 })
          end
        end
      end
    end
    -- scale given: delayed scaling
    for _, factor in ipairs { 1, 448, 0.3, -0.3, 2 ^ -20, 0, 1 / 0 } do
      same(dtype, { 40, 72 }, { "normal", "normal" }, { engine.dtype.e4m3, 0, 0, 1, 8 },
        { factor = factor })
      same(dtype, { 33, 70 }, { "rare", "normal" }, { engine.dtype.e5m2, 0, 0, 0, 0 },
        { factor = factor })
    end
  end
  -- several tiles of a card's kernel, the last ones cut
  for _, shape in ipairs { { 264, 136 }, { 272, 264 } } do
    for k, block in ipairs { { 1, 128 }, { 128, 1 }, { 128, 128 }, { 0, 0 }, { 1, 0 }, { 0, 1 } } do
      same(k % 2 == 0 and "f16" or "bf16", shape, KINDS[k],
        { engine.dtype[FP8[k % 2 + 1]], block[1], block[2], k % 5, 8 })
    end
  end
  same("bf16", { 2, 3, 256 }, { "normal", "normal" }, { engine.dtype.e4m3, 1, 128, 2, 8 })
  if os.getenv("ENGINE_TEST_DEVICE") then   -- more tiles than blocks that fit on a card
    same("bf16", { 2064, 2600 }, { "normal", "normal" }, { engine.dtype.e4m3, 1, 128, 1, 8 })
  end
  local x = float("f32", { 4, 8 }, "normal")
  try { inputs = { x, x, false }, ints = { 0, 1, 0, 0, 0 }, outputs = 5,
    fails = "swiglu_quantize: expected the format" }
  try { inputs = { x, float("f32", { 8, 4 }, "normal"), false }, ints = { 10, 1, 0, 0, 0 },
    outputs = 5, fails = "of the same shape and dtype" }
  try { inputs = { x, float("bf16", { 4, 8 }, "normal"), false }, ints = { 10, 1, 0, 0, 0 },
    outputs = 5, fails = "of the same shape and dtype" }
end

generators.dequantize = function(try)
  local n = 0
  for _, format in ipairs(FP8) do
    for _, shape in ipairs(SHAPES) do
      for _, block in ipairs(BLOCKS) do
        n = n + 1
        local q, scale = quantized(float("f32", shape, n % 3 == 0 and "rare" or "normal"), format,
          block)
        try { inputs = { q, scale }, ints = {
          engine.dtype[({ "f32", "f16", "bf16", "f64" })[n % 4 + 1]], block[1], block[2] },
          zeros = true }
      end
    end
    -- all 256 codes
    local codes = {}
    for i = 0, 255 do codes[i + 1] = i end
    local bytes = tensors.listed("u8", { 16, 16 }, codes)
    local q = tensors.tensor_of(format, { 16, 16 })
    engine.ffi.copy(tensors.info_of(q).data, tensors.info_of(bytes).data, 256)
    for _, dtype in ipairs { "f32", "f16", "bf16", "f64" } do
      try { inputs = { q, tensors.listed("f32", { 1, 1 }, { 0.37 }) },
        ints = { engine.dtype[dtype], 0, 0 }, zeros = true }
    end
  end
  for _, block in ipairs(BLOCKS) do
    local x = float("f32", { 12, 136 }, "normal")
    local q, scale = engine.run("quantize", { x, false }, { E5M6, block[1], block[2], 2, 4 },
      { -1, 0 }, 5)
    try { inputs = { q, scale }, ints = { engine.dtype.f32, block[1], block[2], E5M6 },
      zeros = true }
  end
end

--- A quantized matrix for fp8_matmul: bytes and scales, transposed or not.
local function operand(format, rows, columns, block, transposed, kind)
  if transposed then rows, columns, block = columns, rows, { block[2], block[1] } end
  local q, scale = quantized(float("f32", { rows, columns }, kind or "normal"), format, block)
  return q, scale, block
end

generators.fp8_matmul = function(try)
  local sizes = { { 1, 1, 1 }, { 3, 5, 32 }, { 17, 33, 65 }, { 9, 70, 128 }, { 33, 17, 200 },
    { 65, 130, 257 }, { 5, 3, 520 }, { 4, 3, 0 }, { 0, 3, 5 },
    { 2, 1100, 40 }, { 1100, 3, 33 } }
  local pairs_of_blocks = { { { 0, 0 }, { 0, 0 } }, { { 1, 0 }, { 1, 0 } },
    { { 1, 128 }, { 128, 128 } }, { { 1, 128 }, { 1, 128 } }, { { 128, 128 }, { 1, 128 } },
    { { 1, 64 }, { 1, 128 } }, { { 1, 0 }, { 128, 128 } }, { { 1, 16 }, { 16, 16 } } }
  local n = 0
  for _, size in ipairs(sizes) do
    local rows, columns, inner = unpack(size)
    for _, blocks in ipairs(pairs_of_blocks) do
      for model = 0, 3 do
        n = n + 1
        local ta, tb = n % 5 == 0, n % 3 ~= 0
        local kind = n % 6 == 0 and "rare" or "normal"
        local a, sa, block_a = operand(FP8[n % 4 == 0 and 2 or 1], rows, inner, blocks[1], ta, kind)
        local b, sb, block_b = operand(FP8[n % 3 == 0 and 2 or 1], columns, inner, blocks[2],
          tb == false, "normal")
        local bias = n % 2 == 0 and float("f32", { columns }, "normal") or false
        local out = ({ "f32", "bf16", "f16" })[n % 3 + 1]
        try { inputs = { a, sa, b, sb, bias },
              ints = { ta and 1 or 0, tb and 1 or 0, block_a[1], block_a[2], block_b[1], block_b[2],
                engine.dtype[out] + 1, model,
                ({ 0, 128, 32, 512 })[n % 4 + 1] } }
      end
    end
  end
  try { inputs = { whole("u8", { 3, 4 }, 0, 9), float("f32", { 1, 1 }, "normal"),
    whole("u8", { 3, 4 }, 0, 9), float("f32", { 1, 1 }, "normal"), false },
        ints = { 0, 1 }, fails = "two FP8 matrices" }
end

return generators
