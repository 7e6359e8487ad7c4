-- Calls for the microscaling and NF4 operations: every element format, scale rule, block shape and
-- flag, bit for bit like the reference. See spec/cpu/kernels_spec.lua.
local engine = require "engine.base.ffi"
local tensors = require "spec.cpu.kernels.values"
local float, skips = tensors.float, tensors.skips

local generators = {}

local ON_CARD = os.getenv("ENGINE_TEST_DEVICE") ~= nil
local FORMATS = { 10, 11, 13, 14, 15, 16 }
local TURNED, VALUES, FINITE, GATE, ONLY = 8, 16, 32, 64, 128
local BLOCKS = { { 1, 32 }, { 1, 16 }, { 16, 16 }, { 32, 32 }, { 32, 2 }, { 1, 128 }, { 128, 2 },
  { 3, 6 } }
local SHAPES = { { 2, 2 }, { 4, 34 }, { 34, 70 }, { 2, 3, 64 }, { 64, 130 }, { 1, 300 }, { 0, 4 },
  { 6, 0 }, { 40, 96 }, { 3, 1100 } }
local KINDS = { "normal", "rare", "tiny", "large" }

-- Every bf16 number up to 2^top, in rows of three blocks of 32. Each block begins with 2^top.
local function all_up_to(top)
  local list = {}
  for magnitude = 0, (top + 127) * 128 do
    local field, fraction = math.floor(magnitude / 128), magnitude % 128
    local x = field == 0 and math.ldexp(fraction, -133) or math.ldexp(128 + fraction, field - 134)
    for _, number in ipairs { x, -x } do
      if #list % 32 == 0 then list[#list + 1] = math.ldexp(1, top) end
      list[#list + 1] = number
    end
  end
  while #list % (96 * 32) > 0 do list[#list + 1] = 0 end
  return tensors.listed("bf16", { #list / 96, 96 }, list)
end

generators.mx_quantize = function(try)
  local n = 0
  for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
    for _, shape in ipairs(SHAPES) do
      for rule = 0, 6 do
        for _, format in ipairs(rule >= 4 and { 13 } or FORMATS) do
          n = n + 1
          local block = BLOCKS[n % #BLOCKS + 1]
          local flags = (n % 3 == 0 and shape[1] % 2 == 0 and TURNED or 0)
            + (n % 5 < 2 and VALUES or 0) + (n % 7 < 3 and FINITE or 0)
          local bits = rule < 5 and n % 11 < 3 and ({ 8, 1, 24 })[n % 3 + 1] or 0
          local x = float(dtype, shape, KINDS[n % 4 + 1], n % 13 == 0 and "transposed" or "plain")
          try { inputs = { x, n % 9 == 0 and tensors.listed("f32", { 1 }, { 3.5 }) or false },
            ints = { format, block[1], block[2], rule, flags, bits, n, 1 },
            floats = { rule < 5 and n % 4 == 0 and 0.75 or n % 6 == 0 and rule < 5 and 0.9 or 0 },
            outputs = 8, zeros = true, note = KINDS[n % 4 + 1] }
        end
      end
    end
    -- single numbers at the edges of the rules
    for _, list in ipairs { { 0, -0.0, 0, 0 }, { 1, 1 / 0, -2, 0 }, { 1, 0 / 0, -2, 4 },
      { 6, 5, 2.5, 3.5 }, { 448, 449, 464, 465 }, { 3.4e38, 1, 0, 1 }, { 1e-44, 0, 1e-45, 0 },
      { 2 ^ -126, 2 ^ -127, 2 ^ -128, 0 }, { 2 ^ -126 * 1.99, 1e-39, 0, 0 },
      { 511.99997, 512, 1, -1 }, { 7, 7.5, 7.999, 1 }, { 1.75, 1.9375, 1.96875, 1.99 } } do
      for rule = 0, 6 do
        for _, format in ipairs(rule >= 4 and { 13 } or FORMATS) do
          for flags = 0, FINITE, FINITE do
            for _, wide in ipairs { 2, 32 } do
              try { inputs = { tensors.listed(dtype, { 1, 4 }, list), false },
                ints = { format, 1, wide, rule, flags + (wide == 2 and VALUES or 0), 0, 0, 1 },
                outputs = 8, zeros = true }
            end
          end
        end
      end
    end
  end
  -- quest and ms_eden, which have no CUDA kernels
  for k, dtype in ipairs(ON_CARD and {} or { "f32", "bf16", "f16", "f64" }) do
    for i, kind in ipairs(KINDS) do
      for j, shape in ipairs { { 2, 2 }, { 4, 34 }, { 34, 70 }, { 0, 4 }, { 300, 96 },
        { 40, 300 } } do
        for given = 0, 1 do
          try { inputs = { float(dtype, shape, kind, (i + j) % 4 == 0 and "transposed" or "plain"),
            given == 1 and tensors.listed("f32", { 1 }, { ({ 3.5, 1e-3, 0, 1e-38 })[i] }) or
            false }, ints = { 13, 1, ({ 16, 32, 128, 2 })[(i + j + k) % 4 + 1], 8, i % 2 * VALUES,
            ({ 0, 24, 8 })[(i + j) % 3 + 1], i * j, 1 }, outputs = 8, zeros = true, note = kind }
        end
        try { inputs = { float(dtype, shape, kind, (i + j) % 4 == 0 and "transposed" or "plain"),
          j == 2 and tensors.listed("f32", { 1 }, { 3.5 }) or false }, ints = { 13, 1,
          ({ 32, 16, 128, 6 })[(i + j + k) % 4 + 1], 7, i % 2 * VALUES + (i + j) % 2 * GATE },
          outputs = 8, zeros = true, note = kind }
      end
    end
    for _, list in ipairs { { 0, -0.0, 0, 0 }, { 1, 1, 1, 1 }, { 1, 1 / 0, -2, 0 },
      { 1, 0 / 0, -2, 4 }, { 3.4e38, -3.4e38, 0, 1 }, { 1e-44, 0, 1e-45, 0 }, { 1e-7, 0, 0, 0 },
      { 2 ^ -126, 2 ^ -127, 2 ^ -128, 0 }, { .25, -.75, 1.25, -1.75, 2.5, -3.5, 5, -5 } } do
      local x = tensors.listed(dtype, { 1, #list }, list)
      try { inputs = { x, false }, ints = { 13, 1, 32, 7, VALUES + GATE }, outputs = 8,
        zeros = true }
      try { inputs = { x, false }, ints = { 13, 1, 2, 8, VALUES, 8, 3, 1 }, outputs = 8,
        zeros = true }
    end
  end
  -- matrices of more than one task and tile
  for k, block in ipairs { { 1, 32 }, { 16, 16 }, { 1, 16 }, { 1, 32 }, { 16, 16 }, { 1, 16 },
    { 64, 32 }, { 48, 6 } } do
    try { inputs = { float("bf16", { 130, 300 }, k == 4 and "rare" or "normal"), false },
      ints = { 13, block[1], block[2], k == 1 and 3 or k < 5 and 4 or 5 + k % 2, TURNED,
        k == 3 and 8 or 0, 5, 1 }, outputs = 8, zeros = true }
  end
  -- scales below, at and above the least that the CPU's 16-bit arithmetic supports
  for k, top in ipairs { -93, -92, 8, 127 } do
    local x = all_up_to(top)
    for i, format in ipairs(FORMATS) do
      for _, values in ipairs { 0, VALUES } do
        try { inputs = { x, false }, outputs = 8, zeros = true, note = "all bf16",
          ints = { format, 1, 32, (i + k) % 4, TURNED + values, 0, 0, 1 } }
      end
    end
  end
  -- rows and columns of whole vectors, whose codes the CPU packs as it computes them
  for rule = 0, 6 do
    for k, block in ipairs { { 1, 32 }, { 1, 16 }, { 1, 96 }, { 1, 6 }, { 16, 16 }, { 4, 32 } } do
      try { inputs = { float("bf16", { 64, 608 }, KINDS[(rule + k) % 4 + 1]), false },
        ints = { 13, block[1], block[2], rule, k % 3 > 0 and TURNED or 0, 0, 0, 1 },
        outputs = 8, zeros = true }
    end
  end
  -- blocks and shapes of the card's fast kernel: every rule, format and kind of value
  for _, dtype in ipairs { "bf16", "f32" } do
    for i, shape in ipairs { { 8, 8 }, { 24, 40 }, { 3, 136 }, { 136, 264 }, { 2, 72, 16 } } do
      for rule = 0, 6 do
        for k, block in ipairs { { 1, 16 }, { 1, 32 }, { 16, 16 }, { 32, 32 } } do
          n = n + 1
          local kind = ({ "normal", "rare", "tiny", "large", "sparse" })[n % 5 + 1]
          try { inputs = { float(dtype, shape, kind), n % 4 == 0 and
            tensors.listed("f32", { 1 }, { ({ 3.5, 1e-3, 1e-34, 1e36 })[n % 3 + 1] }) or false },
            ints = { rule >= 4 and 13 or FORMATS[n % 5 + 1], block[1], block[2], rule,
              (shape[1] == 3 and 0 or TURNED) + (i + k) % 2 * VALUES + (n + rule) % 2 * FINITE,
              rule < 5 and n % 3 == 0 and ({ 8, 24, 1 })[n % 9 / 3 + 1] or 0, n, 1 },
            floats = { rule < 5 and n % 7 == 0 and 0.75 or 0 }, outputs = 8, zeros = true,
            note = kind }
        end
      end
    end
  end
  -- a given amax that is much smaller than the largest magnitude (elements saturate), or not valid
  for _, amax in ipairs { 1e-38, 1e-3, 0, 1 / 0, 0 / 0, -1 } do
    try { inputs = { float("f32", { 4, 32 }, "normal"), tensors.listed("f32", { 1 }, { amax }) },
      ints = { 13, 1, 16, 4, VALUES, 8, -1, 1 }, outputs = 8, zeros = true }
    try { inputs = { float("f32", { 4, 32 }, "normal"), tensors.listed("f32", { 1 }, { amax }) },
      ints = { 13, 1, 16, 5, VALUES }, outputs = 8, zeros = true }
  end
  for k, block in ipairs { { 1, 32 }, { 1, 64 }, { 3, 6 }, { 128, 2 }, { 48, 48 }, { 1, 1 },
    { 2, 128 }, { 64, 64 } } do
    for j, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
      local format = FORMATS[(k + j) % 6 + 1]
      if format == 13 and block[2] == 1 then format = 16 end
      try { inputs = { float(dtype, { 136, 260 }, KINDS[(k + j) % 4 + 1]), false },
        ints = { format, block[1], block[2], (k + j) % 4,
          TURNED + k % 2 * VALUES + j % 2 * FINITE, k % 3 == 0 and 8 or 0, 7, 1 }, outputs = 8,
        floats = { k % 2 * 0.75 }, zeros = true }
    end
  end
  -- rounding toward an average that is near x, far from it, or NaN in places
  for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
    for i, shape in ipairs(SHAPES) do
      for rule = 0, 4 do
        for j, kind in ipairs(KINDS) do
          n = n + 1
          local block = BLOCKS[n % #BLOCKS + 1]
          local x = float(dtype, shape, kind, n % 13 == 0 and "transposed" or "plain")
          local average = n % 3 == 0 and float("f32", shape, kind)
            or n % 3 == 1 and float("f32", shape, "rare") or
            engine.run("affine", { (engine.run("cast", { x }, { engine.dtype.f32 })) }, {},
              { 1 + (j - 2) / 16, 0 })
          try { inputs = { x, false, average },
            ints = { rule == 4 and 13 or FORMATS[n % 6 + 1], block[1], block[2], rule,
              ((i + n) % 4 == 0 and shape[1] % 2 == 0 and TURNED or 0) + n % 2 * VALUES
              + (n + j) % 2 * FINITE }, floats = { n % 5 == 0 and 0.75 or 0 }, outputs = 8,
            zeros = true, note = kind }
        end
      end
    end
  end
  -- the transposed copy after a Hadamard transform, with and without the other copy
  local RANKS = { { 34, 70 }, { 2, 3, 64 }, { 64, 130 }, { 16, 2 }, { 0, 4 }, { 6, 0 },
    { 140, 260 }, { 272, 34 } }
  for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
    for i, shape in ipairs(RANKS) do
      for rule = 0, ON_CARD and 6 or 8 do
        for j, kind in ipairs { "normal", "rare", "tiny", "large", "sparse" } do
          n = n + 1
          local fitted, size = rule >= 7, 2 ^ (4 + (i + j + rule) % 4)
          local block = fitted and { 1, size } or BLOCKS[n % #BLOCKS + 1]
          if not skips(shape, j + rule) then
            try { inputs = { float(dtype, shape, kind), n % 7 == 0 and
              tensors.listed("f32", { 1 }, { 3.5 }) or false },
              ints = { rule >= 4 and 13 or FORMATS[n % 6 + 1], block[1], block[2], rule,
                TURNED + n % 2 * VALUES + (fitted and 0 or (j + rule) % 2 * FINITE) +
                (n % 3 == 0 and ONLY or rule == 7 and GATE or 0),
                (rule < 5 or rule == 8) and n % 5 == 0 and 8 or 0, n, 1,
                2 ^ (4 + n % 4), n % 11 % 3 - 1 },
              floats = { rule < 5 and n % 4 == 0 and 0.75 or 0 }, outputs = 8, zeros = true,
              note = kind }
          end
        end
      end
    end
  end
  local x = float("f32", { 3, 3 }, "normal")
  for _, bad in ipairs { { { 0, 1, 32, 0 }, "the format" }, { { 10, 1, 32, 9 }, "scale rule from" },
    { { 10, 1, 16, 4 }, "needs the format e2m1" }, { { 10, 0, 32, 0 }, "blocks of 1 to 128" },
    { { 13, 1, 5, 0 }, "even number of columns" }, { { 13, 1, 4, 0 }, "even length" },
    { { 10, 1, 32, 7 }, "needs the format e2m1" }, { { 13, 1, 4, 7, FINITE }, "quest and" },
    { { 13, 2, 2, 7 }, "quest and" }, { { 13, 1, 4, 7, 0, 8 }, "quest and" },
    { { 13, 1, 4, 8, TURNED }, "quest and" }, { { 13, 1, 6, 8 }, "divides 128" },
    { { 13, 1, 16, 8, GATE }, "flags" },
    { { 10, 1, 32, 0, GATE }, "flags" },
    { { 10, 1, 32, 0, TURNED, 0, 0, 1, 8 }, "hadamard to be 0" },
    { { 10, 1, 32, 0, 0, 0, 0, 1, 16 }, "hadamard to be 0" },
    { { 10, 1, 32, 0, TURNED + ONLY }, "flags" },
    { { 13, 1, 32, 7, TURNED + ONLY + GATE, 0, 0, 1, 16 }, "flags" },
    { { 10, 1, 32, 0, 1 }, "flags" }, { { 10, 1, 32, 0, 0, 25 }, "sr_bits" },
    { { 13, 1, 16, 5, 0, 8 }, "compares errors" },
    { { 10, 1, 32, 0, 0, 0, 0, 0, 0, 0, 4 }, "ties from" },
    { { 10, 1, 32, 0, 0, 8, 0, 0, 0, 0, 0, 3 }, "sr_rule from" },
    { { 10, 1, 32, 0, 0, 0, 0, 0, 0, 0, 0, 1 }, "sr_rule needs sr_bits" },
    { { 10, 1, 32, 0, 0, 8, 0, 0, 0, 0, 1 }, "at most one of" },
    { { 13, 1, 2, 8, 0, 0, 0, 0, 0, 0, 1 }, "quest and ms_eden allow no" },
    { { 13, 1, 2, 6, 0, 0, 0, 0, 0, 0, 1 }, "four_over_six allows no" } } do
    try { inputs = { x, false }, ints = bad[1], outputs = 8, fails = bad[2] }
  end
  try { inputs = { x, x }, ints = { 10, 1, 32, 0 }, outputs = 8, fails = "one f32 amax" }
  try { inputs = { x, false, float("f32", { 3 }, "normal") }, ints = { 10, 1, 32, 0 }, outputs = 8,
    fails = "expected an average in f32" }
  for _, factor in ipairs { -1, 1.5, 0 / 0 } do
    try { inputs = { x, false }, ints = { 10, 1, 32, 0 }, floats = { factor }, outputs = 8,
      fails = "expected a factor" }
  end
end

generators.hadamard = function(try)
  local n = 0
  for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
    for _, shape in ipairs { { 16 }, { 3, 130 }, { 70, 64 }, { 2, 80, 33 }, { 0, 32 },
      { 140, 260 }, { 144, 130 } } do
      for k, kind in ipairs { "normal", "rare", "tiny", "large", "sparse" } do
        local x = float(dtype, shape, kind)
        for j, size in ipairs { 16, 32, 64, 128 } do
          for turned = 0, 1 do
            n = n + 1
            for _, result in ipairs { "bf16", ({ "f32", "f16", "f64" })[n % 3 + 1] } do
              if not skips(shape, k + j) then
                try { inputs = { x }, ints = { size, n % 5 % 3 - 1, turned, engine.dtype[result] },
                  zeros = true, note = kind }
              end
            end
          end
        end
      end
    end
  end
  -- The exact sum lies above a tie of bf16, by a bit that a sum in f32 loses. The exponents differ
  -- by one more than those of a group whose f32 sums are certainly exact.
  for _, case in ipairs { { 16, 13, 2 ^ -4, 2 ^ -13 }, { 64, 60, 0.25, 2 ^ -11 } } do
    local size, ones, half, small = unpack(case)
    local list = { small * (1 + 2 ^ -7) }
    for k = 2, size do list[k] = k <= size / 2 and 1.5 or 0 end
    list[size / 2 + 1], list[size / 2 + 2] = -small, half
    for k = 1, ones - (size / 2 - 1) do list[size / 2 + 2 + k] = 1.5 end
    for turned = 0, 1 do
      try { inputs = { tensors.listed("bf16", turned == 0 and { 1, size } or { size, 1 }, list) },
        ints = { size, -1, turned, engine.dtype.bf16 }, zeros = true }
    end
    local twice = {}                                     -- the same list in each of two columns
    for k = 1, size do twice[2 * k - 1], twice[2 * k] = list[k], list[k] end
    try { inputs = { tensors.listed("bf16", { size, 2 }, twice) },
      ints = { size, -1, 1, engine.dtype.bf16 }, zeros = true }
  end
  local x = float("f32", { 3, 32 }, "normal")
  try { inputs = { x }, ints = { 8, 0, 0, 0 }, fails = "transform of 16, 32, 64 or 128" }
  try { inputs = { x }, ints = { 16, 0, 0, engine.dtype.i32 }, fails = "floating" }
end

generators.msamp_fp4 = function(try)
  local n = 0
  for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
    for _, shape in ipairs { { 1 }, { 1, 2 }, { 3, 100 }, { 2, 5, 64 }, { 0, 4 }, { 6, 0 },
      { 130, 300 } } do
      for k, kind in ipairs { "normal", "rare", "tiny", "large", "sparse" } do
        for j, clamp in ipairs { 0, 0.99, 0.5, 0.9999 } do
          n = n + 1
          if not skips(shape, k + j) then
            try { inputs = { float(dtype, shape, kind, n % 4 == 0 and "transposed" or "plain") },
              ints = { n % 2, n % 3 == 0 and 1 or 0 }, floats = { clamp }, outputs = 4,
              zeros = true, note = kind }
          end
        end
      end
    end
    for _, list in ipairs { { 0, -0.0, 0, 0 }, { 1, 1 / 0, -2, 0 }, { 1, 0 / 0, -2, 4 },
      { -1 / 0, 1 / 0, 1, 2 }, { 6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, 4.5, 1e-3 },
      { -6, -.25, -.75, -1.25, -1.75, -2.5, -3.5, -5, -4.5, -1e-3 }, { 3.3e38, -3.3e38, 0, 1 },
      { 1e-40, 0, 9.2e-41, -1e-40 }, { 2 ^ -126, 2 ^ -127, 2 ^ -133, 0 }, { 1.5, 3, 6, 12 },
      { 1.5078125, -1.4921875, 0, 1 }, { 3.3e38, 3.2e38, -3.3e38, 100, 1, 0, -1, 2 } } do
      for gate = 0, 1 do
        for drops = 0, 1 do
          for _, clamp in ipairs { 0, 0.75 } do
            try { inputs = { tensors.listed(dtype, { 1, #list }, list) }, ints = { gate, drops },
              floats = { clamp }, outputs = 4, zeros = true }
          end
        end
      end
    end
  end
  for _, clamp in ipairs { 0.4, 1, -1, 0 / 0 } do
    try { inputs = { float("f32", { 3, 4 }, "normal") }, ints = { 0, 0 }, floats = { clamp },
      outputs = 4, fails = "a quantile from 0.5 to 0.9999" }
  end
  try { inputs = { tensors.listed("i32", { 1 }, { 1 }) }, ints = { 0, 0 }, outputs = 4,
    fails = "floating" }
end

generators.mx_dequantize = function(try)
  local n = 0
  for _, shape in ipairs(SHAPES) do
    for rule = 0, 6 do
      for _, format in ipairs(rule >= 4 and { 13 } or FORMATS) do
        n = n + 1
        local block = BLOCKS[n % #BLOCKS + 1]
        local q, scale, amax = engine.run("mx_quantize",
          { float("f32", shape, KINDS[n % 4 + 1]), false },
          { format, block[1], block[2], rule, 0, 0, 0, 1 }, {}, 8)
        try { inputs = { q, scale, n % 3 == 0 and amax or false }, ints = {
          engine.dtype[({ "f32", "f16", "bf16", "f64" })[n % 4 + 1]], format, block[1], block[2],
          rule }, zeros = true }
      end
    end
  end
  local q, scale = engine.run("mx_quantize", { float("f32", { 2, 64 }, "normal"), false },
    { 10, 1, 32, 0, 0, 0, 0, 1 }, {}, 8)
  try { inputs = { q, scale, false }, ints = { 0, 10, 1, 16, 0 }, fails = "the scales of a" }
  try { inputs = { q, float("f32", { 2, 2 }, "normal"), false }, ints = { 0, 10, 1, 32, 0 },
    fails = "in u8" }
end

local EIGHT = { 10, 11 }
generators.mx_matmul = function(try)
  local n = 0
  local function codes(rows, k, format, rule, kind)
    local wide = rule >= 4 and 16 or 32
    return engine.run("mx_quantize", { float("f32", { rows, k }, kind), false },
      { format, 1, wide, rule, n % 2 * FINITE, 0, 0, 1 }, {}, 8)
  end
  for _, shape in ipairs { { 1, 1, 64 }, { 3, 20, 128 }, { 9, 33, 192 }, { 0, 3, 64 },
    { 2, 3, 0 } } do
    for _, kind in ipairs(KINDS) do
      for rule = 0, 6 do
        for pair = 1, rule >= 4 and 1 or 3 do
          n = n + 1
          local fa = rule >= 4 and 13 or pair == 3 and 13 or EIGHT[n % 2 + 1]
          local fb = fa == 13 and 13 or EIGHT[pair]
          local a, sa, ga = codes(shape[1], shape[3], fa, rule, kind)
          local b, sb, gb = codes(shape[2], shape[3], fb, rule, kind)
          try { inputs = { a, sa, b, sb, n % 3 == 0 and ga or false, n % 2 == 0 and gb or false },
            ints = { fa, fb, rule, rule >= 4 and 4 + n % 3 or n % 4,
              n % 5 == 0 and 0 or engine.dtype[({ "f32", "bf16", "f16", "f64" })[n % 4 + 1]] + 1 },
            floats = { n % 3 == 0 and 0 or 16 / 9 }, note = kind }
        end
      end
    end
  end
  for _, rows in ipairs { 16, 48 } do                        -- scales of 16 rows
    local a, sa, ga = engine.run("mx_quantize", { float("f32", { rows, 128 }, "normal"), false },
      { 13, 16, 16, 4, 0, 0, 0, 1 }, {}, 8)
    local b, sb, gb = codes(20, 128, 13, 4, "normal")
    try { inputs = { a, sa, b, sb, ga, gb }, ints = { 13, 13, 4, 4 }, floats = { 1 } }
    try { inputs = { b, sb, a, sa, gb, ga }, ints = { 13, 13, 4, 4 }, floats = { 1 } }
  end
  local a, sa = codes(2, 64, 10, 0, "normal")
  try { inputs = { a, sa, a, sa, false, false }, ints = { 10, 13, 0, 0 }, fails = "both in e2m1" }
  try { inputs = { a, sa, a, sa, false, false }, ints = { 10, 10, 4, 4 }, fails = "scale rule" }
  try { inputs = { a, sa, a, sa, false, false }, ints = { 10, 10, 0, 9 }, fails = "scale rule" }
  try { inputs = { a, sa, a, a, false, false }, ints = { 10, 10, 0, 0 },
    fails = "one for every 32" }
  try { inputs = { a, sa, a, sa, false, false }, ints = { 10, 10, 0, 0, engine.dtype.u8 + 1 },
    fails = "number of a floating" }
  try { inputs = { a, sa, a, sa, float("f32", { 2 }, "normal"), false }, ints = { 10, 10, 0, 0 },
    fails = "one f32 amax" }
end

local NF4_SHAPES = { { 1 }, { 63 }, { 64 }, { 65 }, { 3, 64 }, { 20, 333 }, { 0 }, { 50, 600 } }

generators.nf4_quantize = function(try)
  local n = 0
  for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
    for _, shape in ipairs(NF4_SHAPES) do
      for _, kind in ipairs(KINDS) do
        n = n + 1
        try { inputs = { float(dtype, shape, kind),
          n % 5 == 0 and tensors.listed("f32", { 1 }, { 0.75 }) or false },
          ints = { n % 3 == 0 and 32 or n % 7 == 0 and 4096 or 64, n % 2 }, outputs = 5,
          zeros = true, note = kind }
      end
    end
  end
  local x = float("f32", { 64 }, "normal")
  for _, block in ipairs { 0, 16, 48, 8192 } do
    try { inputs = { x, false }, ints = { block, 1 }, outputs = 5, fails = "a block of 32" }
  end
  try { inputs = { x, x }, ints = { 64, 1 }, outputs = 5, fails = "one f32 offset" }
end

generators.nf4_dequantize = function(try)
  for k, shape in ipairs { { 1, 1 }, { 3, 21 }, { 2, 64 }, { 20, 333 }, { 0, 5 }, { 130, 600 } } do
    local q, absmax, code, group, offset = engine.run("nf4_quantize",
      { float("f32", shape, KINDS[k % 4 + 1]), false }, { 64, 1 }, {}, 5)
    for _, dtype in ipairs { "f32", "f16", "bf16", "f64" } do
      local ints = { engine.dtype[dtype], 64, shape[1], shape[2] }
      try { inputs = { q, absmax, false, false }, ints = ints }
      try { inputs = { q, code, group, offset }, ints = ints }
      if shape[1] == 20 then
        try { inputs = { q, code, group, false }, ints = ints, fails = "or neither" }
        try { inputs = { q, code, false, false }, ints = ints, fails = "need codes u8" }
        try { inputs = { q, absmax, false, false }, ints = { ints[1], 32, 20, 333 },
          fails = "need codes u8" }
        try { inputs = { q, absmax, false, false }, ints = { ints[1], 64, -1, 333 },
          fails = "rows and columns" }
      end
    end
  end
end

return generators
