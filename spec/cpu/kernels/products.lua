-- Calls for matrix products. See spec/cpu/kernels_spec.lua.
local engine = require "engine.base.ffi"
local tensors = require "spec.cpu.kernels.values"
local compare = require "spec.cpu.kernels.compare"
local FLOATS, LAYOUTS, float, with = tensors.FLOATS, tensors.LAYOUTS, tensors.float, tensors.with

local generators = {}

local PRODUCT = { ulp = 1, eps = 16, bound = "sums", threads = "AMX" }

generators.matmul = function(try)
  local sizes = { { 1, 1, 1 }, { 1, 17, 33 }, { 3, 1, 65 }, { 17, 33, 1 }, { 33, 65, 129 },
    { 65, 17, 3 }, { 7, 129, 260 }, { 130, 33, 17 }, { 97, 210, 150 },
    { 4, 3, 0 }, { 0, 3, 5 } }   -- M, N, K
  for _, dtype in ipairs(FLOATS) do
    for k, size in ipairs(sizes) do
      local m, n, inner = unpack(size)
      for transposed = 0, 3 do
        local ta, tb = transposed % 2, math.floor(transposed / 2)
        local layout = LAYOUTS[(k + transposed) % 3 + 1]
        local a = float(dtype, ta == 1 and { inner, m } or { m, inner }, "normal", layout)
        local b = float(dtype, tb == 1 and { n, inner } or { inner, n }, "normal",
          LAYOUTS[k % 3 + 1])
        try(with({ inputs = { a, b }, ints = { ta, tb } }, PRODUCT))
      end
    end
    -- batches, broadcast on either side
    for _, shapes in ipairs { { { 3, 5, 17 }, { 3, 17, 9 } }, { { 3, 5, 17 }, { 17, 9 } },
      { { 5, 17 }, { 3, 17, 9 } }, { { 2, 1, 5, 17 },
          { 3, 17, 9 } },
      { { 2, 3, 5, 7 }, { 2, 3, 7, 4 } }, { { 0, 5, 17 }, { 17, 9 } } } do
      for _, layout in ipairs(LAYOUTS) do
        try(with({ inputs = { float(dtype, shapes[1], "normal", layout),
              float(dtype, shapes[2], "normal", layout == "expanded" and "plain" or layout) } },
                PRODUCT))
      end
    end
    -- heads: [B x T x H x D] seen as [B x H x T x D]
    local q = engine.run("permute", { float(dtype, { 2, 9, 3, 16 }, "normal") }, { 0, 2, 1, 3 })
    local k = engine.run("permute", { float(dtype, { 2, 9, 3, 16 }, "normal") }, { 0, 2, 1, 3 })
    try(with({ inputs = { q, k }, ints = { 0, 1 } }, PRODUCT))
    -- every output format; overflow to infinity in f16; subnormal inputs and outputs; NaN and Inf
    for _, out in ipairs(FLOATS) do
      if (dtype == "f64") == (out == "f64") then
        try(with({ inputs = { float(dtype, { 9, 33 }, "normal"),
          float(dtype, { 33, 17 }, "normal") },
              ints = { 0, 0, engine.dtype[out] + 1 } }, PRODUCT))
        try(with({ inputs = { float(dtype, { 9, 33 }, "large"), float(dtype, { 33, 17 }, "large") },
              ints = { 0, 0, engine.dtype[out] + 1 } }, PRODUCT))
      end
    end
    for _, size in ipairs { { 3, 5, 4 }, { 33, 65, 32 }, { 48, 64, 64 }, { 9, 50, 161 } } do
      local m, n, inner = unpack(size)
      -- instructions that multiply pairs of bf16 flush subnormals (core/cpu/gemm_pairs.h)
      local flush = dtype == "bf16" and inner >= 128 and inner * 2 ^ -123 or nil
      try(with({ inputs = { float(dtype, { m, inner }, "tiny"),
        float(dtype, { inner, n }, "normal") }, note = "tiny", flush = flush }, PRODUCT))
      try(with({ inputs = { float(dtype, { m, inner }, "normal"),
        float(dtype, { inner, n }, "tiny") }, note = "tiny", flush = flush }, PRODUCT))
      try(with({ inputs = { float(dtype, { m, inner }, "rare"),
        float(dtype, { inner, n }, "normal") } }, PRODUCT))
      try(with({ inputs = { float(dtype, { m, inner }, "normal"),
        float(dtype, { inner, n }, "rare") } }, PRODUCT))
    end
  end
  for _, pair in ipairs { { "f32", "f16" }, { "f16", "bf16" }, { "bf16", "f32" } } do
    try(with({ inputs = { float(pair[1], { 9, 33 }, "normal"),
      float(pair[2], { 33, 17 }, "normal") } }, PRODUCT))
  end
end

generators.linear = function(try)
  for _, dtype in ipairs(FLOATS) do
    for k, size in ipairs { { 1, 1, 1 }, { 3, 17, 33 }, { 33, 65, 129 }, { 130, 7, 64 },
      { 201, 130, 97 }, { 1, 129, 65 }, { 4, 3, 0 }, { 0, 5, 3 } } do
      local rows, n, inner = unpack(size)
      local layout = LAYOUTS[k % 3 + 1]
      local x, w = float(dtype, { rows, inner }, "normal", layout),
        float(dtype, { n, inner }, "normal", LAYOUTS[(k + 1) % 3 + 1])
      try(with({ inputs = { x, w, float(dtype, { n }, "normal") } }, PRODUCT))
      try(with({ inputs = { x, w, false } }, PRODUCT))
    end
    try(with({ inputs = { float(dtype, { 2, 3, 33 }, "normal"), float(dtype, { 17, 33 }, "normal"),
      float(dtype, { 17 }, "large") } }, PRODUCT))
    try(with({ inputs = { float(dtype, { 33 }, "normal"), float(dtype, { 17, 33 }, "normal"),
      false } }, PRODUCT))
    try(with({ inputs = { float(dtype, { 9, 33 }, "large"), float(dtype, { 17, 33 }, "large"),
      float(dtype, { 17 }, "normal") } }, PRODUCT))
    try(with({ inputs = { float(dtype, { 33, 64 }, "tiny"), float(dtype, { 65, 64 }, "normal"),
      float(dtype, { 65 }, "tiny") } }, PRODUCT))
    try(with({ inputs = { float(dtype, { 9, 33 }, "rare"), float(dtype, { 17, 33 }, "normal"),
      float(dtype, { 17 }, "rare") } }, PRODUCT))
  end
  try(with({ inputs = { float("f16", { 9, 33 }, "normal"), float("f16", { 17, 33 }, "normal"),
    float("f32", { 17 }, "normal") } }, PRODUCT))
  try(with({ inputs = { float("f32", { 9, 33 }, "normal"), float("bf16", { 17, 33 }, "normal"),
    false } }, PRODUCT))
end

-- ------------------------------------------------------------------ mlp_gelu, gradients of linear

-- u and h are rounded, and a sum near a midpoint may round to either neighbour. That difference,
-- one unit of the format, propagates to y. A card may take the GELU of u before u is rounded, with
-- a tanh precise enough for the format. In f32 there is no intermediate rounding.
local UNIT = { f16 = 2 ^ 14, bf16 = 2 ^ 17 }
local function through_gelu(dtype)
  return { ulp = 1, eps = UNIT[dtype] or 64, card = 4, bound = "sums" }
end
-- A card's library decides what GELU gives at infinity in the formats it fuses.
local function with_infinities(dtype) return not compare.CARD or not UNIT[dtype] end

generators.mlp_gelu = function(try)
  for _, dtype in ipairs(FLOATS) do
    local how = through_gelu(dtype)
    for k, size in ipairs { { 1, 1, 1, 1 }, { 3, 5, 7, 9 }, { 33, 129, 65, 17 },
      { 130, 33, 48, 50 }, { 64, 64, 256, 64 }, { 9, 400, 33, 16 }, { 5, 0, 7, 3 },
      { 5, 3, 0, 4 }, { 5, 3, 4, 0 }, { 0, 3, 5, 7 } } do
      local rows, width, hidden, out = unpack(size)
      local x, up = float(dtype, { rows, width }, "normal", LAYOUTS[k % 3 + 1]),
        float(dtype, { hidden, width }, "normal", LAYOUTS[(k + 1) % 3 + 1])
      local down = float(dtype, { out, hidden }, "normal")
      try(with({ inputs = { x, up, float(dtype, { hidden }, "normal"), down,
        float(dtype, { out }, "normal") }, outputs = 3 }, how))
      try(with({ inputs = { x, up, false, down, false }, outputs = 3 }, how))
    end
    local function one(kind, bias)
      return { inputs = { float(dtype, { 2, 3, 33 }, kind), float(dtype, { 17, 33 }, "normal"),
        float(dtype, { 17 }, bias), float(dtype, { 9, 17 }, "normal"), false },
        outputs = 3 }
    end
    try(with(one("tiny", "tiny"), how))
    if with_infinities(dtype) then
      try(with(one("large", "normal"), how))
      try(with(one("rare", "rare"), how))
    end
  end
  local mixed = { float("f16", { 9, 33 }, "normal"), float("f16", { 16, 33 }, "normal"),
    float("f32", { 16 }, "normal"), float("f16", { 8, 16 }, "normal"), false }
  try(with({ inputs = mixed, outputs = 3 }, through_gelu "f32"))
end

generators.matmul_gelu_grad = function(try)
  for _, dtype in ipairs(FLOATS) do
    local how = { ulp = 1, eps = 64, card = 4, bound = "sums" }
    for k, size in ipairs { { 1, 1, 1 }, { 3, 7, 9 }, { 33, 65, 129 }, { 130, 48, 33 },
      { 64, 256, 64 }, { 9, 33, 400 }, { 5, 7, 0 }, { 0, 5, 3 } } do
      local rows, hidden, out = unpack(size)
      try(with({ inputs = { float(dtype, { rows, out }, "normal", LAYOUTS[k % 3 + 1]),
        float(dtype, { out, hidden }, "normal", LAYOUTS[(k + 1) % 3 + 1]),
        float(dtype, { rows, hidden }, "normal") } }, how))
    end
    local function one(kind, u)
      return { inputs = { float(dtype, { 2, 3, 17 }, kind), float(dtype, { 17, 33 }, "normal"),
        float(dtype, { 2, 3, 33 }, u) } }
    end
    try(with(one("tiny", "normal"), how))
    try(with(one("normal", "tiny"), how))
    if with_infinities(dtype) then
      try(with(one("large", "normal"), how))
      try(with(one("rare", "special"), how))
    end
  end
  try(with({ inputs = { float("f32", { 9, 17 }, "normal"), float("f16", { 17, 33 }, "normal"),
    float("bf16", { 9, 33 }, "normal") } },
           { ulp = 1, eps = 64, card = 4, bound = "sums" }))
end

-- Up to 128 rows are added one after the other in f32.
local SUMS = { ulp = 1, eps = 64, bound = "sums" }

generators.bias_grad = function(try)
  for _, dtype in ipairs(FLOATS) do
    for _, out in ipairs { dtype, dtype ~= "f64" and "f32" or "f64" } do
      for k, shape in ipairs { { 1 }, { 17 }, { 3, 33 }, { 129, 65 }, { 5, 7, 130 }, { 1100, 3 },
        { 1100, 65 }, { 0, 5 } } do
        try(with({ inputs = { float(dtype, shape, "normal", LAYOUTS[k % 4 + 1]) },
          ints = { engine.dtype[out], 0 } }, SUMS))
      end
      try(with({ inputs = { float(dtype, { 65, 33 }, "rare") }, ints = { engine.dtype[out], 0 } },
        SUMS))
      try(with({ inputs = { float(dtype, { 65, 33 }, "large") }, ints = { engine.dtype[out], 0 } },
        SUMS))
    end
  end
end

generators.linear_grad = function(try)
  for _, dtype in ipairs(FLOATS) do
    for _, out in ipairs { dtype, dtype ~= "f64" and "f32" or "f64" } do
      local formats = { engine.dtype[out], engine.dtype[out], 0, 0 }
      for k, size in ipairs { { 1, 1, 1 }, { 17, 3, 5 }, { 129, 65, 33 }, { 1100, 17, 9 },
        { 256, 64, 48 }, { 0, 5, 3 }, { 7, 5, 0 }, { 7, 0, 5 } } do
        local rows, n, inner = unpack(size)
        try(with({ inputs = { float(dtype, { rows, n }, "normal", LAYOUTS[k % 3 + 1]),
          float(dtype, { rows, inner }, "normal", LAYOUTS[(k + 1) % 3 + 1]) },
                   ints = formats, outputs = 2 }, SUMS))
      end
      for _, kind in ipairs { "rare", "large", "tiny" } do
        try(with({ inputs = { float(dtype, { 3, 11, 17 }, kind),
          float(dtype, { 3, 11, 9 }, "normal") }, ints = formats, outputs = 2 }, SUMS))
      end
    end
  end
  try(with({ inputs = { float("bf16", { 33, 17 }, "normal"), float("f32", { 33, 9 }, "normal") },
    ints = { engine.dtype.f32, engine.dtype.bf16, 0, 0 },
    outputs = 2 }, SUMS))
end

return generators
