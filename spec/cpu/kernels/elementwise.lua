-- Calls for the elementwise kernels. See spec/cpu/kernels_spec.lua.
local engine = require "engine.base.ffi"
local compare = require "spec.cpu.kernels.compare"
local tensors = require "spec.cpu.kernels.values"
local FORMATS, INTEGERS, FLOATS, ALL_INTEGERS = tensors.FORMATS, tensors.INTEGERS, tensors.FLOATS,
  tensors.ALL_INTEGERS
local LAYOUTS, uniform = tensors.LAYOUTS, tensors.uniform
local integer, sign, corners, values_of, lay, float = tensors.integer, tensors.sign,
  tensors.corners, tensors.values_of, tensors.lay, tensors.float
local whole, listed, with, both = tensors.whole, tensors.listed, tensors.with, tensors.both
local inf = math.huge

local generators = {}

--- Two inputs of any layout. `options`: integers (whether the operation accepts them). `tolerance`:
--- fields of a call.
local function two_inputs(options, tolerance)
  return function(try)
    for _, dtype in ipairs(FLOATS) do
      local list = corners(dtype)
      local function call(a, b) try(with({ inputs = { a, b } }, tolerance)) end
      call(listed(dtype, { #list, 1 }, list), listed(dtype, { 1, #list }, list))
      for k, kind in ipairs { "normal", "wide", "tiny", "few" } do
        for l = 1, 4 do
          call(float(dtype, { 5, 33 }, kind, LAYOUTS[l]),
            float(dtype, { 5, 33 }, kind, LAYOUTS[(k + l) % 4 + 1]))
        end
      end
      call(float(dtype, { 3, 1, 17 }, "normal", "transposed"),
        float(dtype, { 5, 1 }, "normal", "plain"))
      call(float(dtype, {}, "normal", "plain"), float(dtype, { 2, 7 }, "normal", "sliced"))
      call(float(dtype, { 1537 }, "normal", "plain"), float(dtype, { 2, 1537 }, "normal", "plain"))
      if dtype == "f16" then
        call(float(dtype, { 1537 }, "normal", "plain"),
          float(dtype, { 13, 1537 }, "normal", "transposed"))
      end
      call(float(dtype, { 0, 3 }, "normal", "plain"), float(dtype, { 3 }, "normal", "plain"))
      -- rows of whole vectors: a bias, a column, columns cut out of wider rows, heads before
      -- positions
      call(float(dtype, { 3, 5, 64 }, "normal"), float(dtype, { 64 }, "normal"))
      call(float(dtype, { 3, 5, 64 }, "normal"), float(dtype, { 3, 5, 1 }, "normal"))
      call(engine.run("slice", { float(dtype, { 7, 96 }, "normal") }, { 1, 32, 64, 1 }),
        float(dtype, { 1, 32 }, "normal"))
      call(engine.run("permute", { float(dtype, { 2, 5, 3, 16 }, "normal") }, { 0, 2, 1, 3 }),
        float(dtype, { 2, 3, 5, 16 }, "normal"))
    end
    for _, pair in ipairs { { "f32", "f16" }, { "f16", "bf16" }, { "bf16", "f32" },
      { "f16", "f64" } } do
      try(with({ inputs = { float(pair[1], { 3, 65 }, "normal", "transposed"),
        float(pair[2], { 65 }, "normal", "plain") } }, tolerance))
    end
    if options.integers then
      for _, dtype in ipairs(ALL_INTEGERS) do
        local low, high = unpack(INTEGERS[dtype])
        local a, b = whole(dtype, { 3, 17 }, low, high, "transposed"),
          whole(dtype, { 17 }, low, high, "sliced")
        try(with({ inputs = { a, b } }, tolerance))
        try(with({ inputs = { whole(dtype, { 40 }, 0, 3), whole(dtype, { 40 }, 0, 3) } },
          tolerance))
      end
      try(with({ inputs = { whole("i32", { 3, 17 }, -9, 9), whole("u8", { 17 }, 0, 255) } },
        tolerance))
      try(with({ inputs = { whole("i32", { 3, 17 }, -9, 9), float("f32", { 17 }, "normal") } },
        tolerance))
    end
  end
end

generators.add = two_inputs({ integers = true }, { ulp = 0, zeros = true })
generators.sub = two_inputs({ integers = true }, { ulp = 0, zeros = true })
-- bf16 subnormals are rounded twice: the f32 product may itself be subnormal
generators.mul = two_inputs({ integers = true }, { ulp = 0, ulp_low = 1, zeros = true })
generators.div = two_inputs({ integers = true }, { ulp = 0, ulp_low = 1, zeros = true })
generators.pow = two_inputs({}, { ulp = 2 })
generators.maximum = two_inputs({ integers = true }, { ulp = 0 })
generators.minimum = two_inputs({ integers = true }, { ulp = 0 })
for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge" } do
  generators[name] = two_inputs({ integers = true }, {})
end

generators.where = function(try)
  for _, dtype in ipairs(both(FLOATS, ALL_INTEGERS)) do
    for l = 1, 4 do
      local function values(layout)
        if FORMATS[dtype] then return float(dtype, { 5, 65 }, "special", layout) end
        return whole(dtype, { 5, 65 }, -100, 100, layout)
      end
      try { inputs = { whole("bool", { 5, 65 }, 0, 1, LAYOUTS[l]), values(LAYOUTS[l % 4 + 1]),
        values(LAYOUTS[(l + 1) % 4 + 1]) }, zeros = true }
    end
    if FORMATS[dtype] then
      try { inputs = { whole("bool", { 3, 1 }, 0, 1), float(dtype, { 700 }, "normal"),
        float(dtype, {}, "normal") } }
    end
  end
  try { inputs = { whole("bool", { 33 }, 0, 1), float("f16", { 33 }, "special"),
    float("f32", { 33 }, "special") } }
end

--- One input of every layout and kind. `options`: floats (lists of attributes, each of which is
--- tried), kinds (of values), integers (whether the operation accepts them).
local function one_input(tolerance, options)
  options = options or {}
  return function(try)
    for _, floats in ipairs(options.floats or { {} }) do
      for _, dtype in ipairs(FLOATS) do
        local list = corners(dtype)
        local function call(x) try(with({ inputs = { x }, floats = floats }, tolerance)) end
        call(listed(dtype, { #list }, list))
        for k, kind in ipairs(options.kinds or { "normal", "wide", "tiny", "special", "range" }) do
          call(float(dtype, { 5, 129 }, kind, LAYOUTS[k % 4 + 1]))
        end
        call(float(dtype, { 2, 3, 17 }, "normal", "transposed"))
        call(float(dtype, { 1537 }, "normal"))
        call(float(dtype, {}, "normal"))
        call(float(dtype, { 3, 0 }, "normal"))
        if dtype == "f16" then call(float(dtype, { 13, 1537 }, "normal")) end
      end
      for _, dtype in ipairs(options.integers and ALL_INTEGERS or {}) do
        local low, high = unpack(INTEGERS[dtype])
        try { inputs = { whole(dtype, { 3, 65 }, low, high, "transposed") }, floats = floats }
        try { inputs = { whole(dtype, { 17 }, math.max(low, -5), 5, "sliced") }, floats = floats }
      end
    end
  end
end

generators.affine = one_input({
  ulp = 1, eps = 4,
  bound = function(_, call)
    local values = values_of(call.inputs[1])
    return function(_, i) return math.abs(values[i] * call.floats[1]) + math.abs(call.floats[2]) end
  end,
}, { integers = true, floats = { { 2.5, -0.75 }, { -1, 0 }, { 0.1, 3 }, { 3, -7 }, { 1e-42, 0 },
  { 1e39, 1 } } })
generators.pow_scalar = one_input({ ulp = 2 },
  { floats = { { 2 }, { 3 }, { 1 }, { 0 }, { 0.5 }, { -0.5 }, { -1 }, { 1.7 }, { -2 } } })
generators.clamp = one_input({ ulp = 0 },
  { integers = true, floats = { { -1, 1 }, { 0, inf }, { -inf, 0.5 }, { -3, 100 }, { 2, 1 } } })
generators.neg = one_input({ ulp = 0, zeros = true }, { integers = true })
generators.abs = one_input({ ulp = 0, zeros = true }, { integers = true })
generators.relu = one_input({ ulp = 0 }, { integers = true })
generators.exp = one_input { ulp = 3 }
generators.log = one_input { ulp = 3 }
generators.sqrt = one_input { ulp = 0, ulp_low = 1, zeros = true }
generators.rsqrt = one_input { ulp = 2 }
generators.sin = one_input { ulp = 2, zeros = true }
generators.cos = one_input { ulp = 2 }
generators.tanh = one_input { ulp = 3, zeros = true }
generators.sigmoid = one_input { ulp = 3 }
generators.log_sigmoid = one_input { ulp = 4 }
generators.softplus = one_input { ulp = 4 }
generators.gelu = one_input { ulp = 4, eps = 4, bound = "input" }
generators.gelu_tanh = one_input { ulp = 4, eps = 4, bound = "input" }
-- the sigmoid of -90 is a subnormal f32, a multiple of 2^-149, and is multiplied by x
generators.silu = one_input { ulp = 4, eps = 2 ^ -125, bound = "input" }

generators.hardswish = one_input { ulp = 3 }

local UNARY = {}
for number, name in ipairs(engine.op_names) do
  if engine.C.eng_op_describe(number - 1).unary ~= 0 then UNARY[#UNARY + 1] = name end
end

generators.unary_grad = function(try)
  for _, unary in ipairs(UNARY) do
    for _, dtype in ipairs(FLOATS) do
      local function call(x, dy, out)
        -- A slope is near one, or its error is relative to it, so the result's error is measured
        -- against dy.
        try { inputs = { x, dy }, ints = { engine.op[unary], engine.dtype[out or dtype] }, ulp = 4,
          eps = 4,
          bound = "input", bound_input = 2, note = unary }
      end
      local list = corners(dtype)
      call(listed(dtype, { #list }, list), float(dtype, { #list }, "normal"))
      call(float(dtype, { #list }, "positive"), listed(dtype, { #list }, list))
      for k, kind in ipairs { "normal", "wide", "special", "range" } do
        -- These slopes overflow f32. Times a small dy, the reference's result in double is finite.
        if (kind == "range" and unary == "exp") or (kind == "wide" and unary == "rsqrt") then
          kind = "positive"
        end
        call(float(dtype, { 5, 65 }, kind, LAYOUTS[k % 4 + 1]),
          float(dtype, { 5, 65 }, "normal", LAYOUTS[(k + 1) % 4 + 1]))
      end
      call(float(dtype, { 1537 }, "normal"), float(dtype, { 1537 }, "special"))
      if dtype == "bf16" then
        call(float(dtype, { 13, 1537 }, "normal"), float(dtype, { 13, 1537 }, "normal"))
      end
      if dtype == "f32" then
        call(float("f32", { 65 }, "normal"), float("f16", { 65 }, "normal"), "bf16")
      end
    end
  end
  try { inputs = { float("f32", { 3 }, "normal"), float("f32", { 3 }, "normal") },
    ints = { engine.op.add, engine.dtype.f32 }, fails = "unary_grad" }
end

generators.swiglu = function(try)
  for _, dtype in ipairs(FLOATS) do
    for k, kind in ipairs { "normal", "tiny", "rare", "large" } do
      try { inputs = { float(dtype, { 5, 65 }, kind, LAYOUTS[k]),
        float(dtype, { 5, 65 }, kind, LAYOUTS[k % 4 + 1]) }, ulp = 4 }
    end
    local gate = float(dtype, { 1537 }, "range")   -- as for silu
    -- in bf16, a card takes a sigmoid below 2^-126 for zero
    try { inputs = { gate, float(dtype, { 1537 }, "normal") }, ulp = 4, eps = 4 * 2 ^ -125,
      bound = "input", flush = compare.CARD and dtype == "bf16" and 2 ^ -117 or nil }
  end
end

generators.swiglu_grad = function(try)
  for _, dtype in ipairs(FLOATS) do
    for k, kind in ipairs { "normal", "rare", "range" } do
      local shape = { 5, 65 }
      local gate, up = float(dtype, shape, kind, LAYOUTS[k]),
        float(dtype, shape, "normal", LAYOUTS[k % 4 + 1])
      local dy = float(dtype, shape, "normal", "transposed")
      local d, u = values_of(dy), values_of(up)
      try { inputs = { gate, up, dy }, outputs = 2, ulp = 4, eps = 8, bound = function()
        return function(_, i) return math.abs(d[i]) * math.max(1, math.abs(u[i])) end
      end }
    end
    try { inputs = { float(dtype, { 1537 }, "normal"), float(dtype, { 1537 }, "normal"),
      float(dtype, { 1537 }, "normal") }, outputs = 2,
          ulp = 4, eps = 64,
          bound = "largest" }
  end
end

generators.dropout = function(try)
  for _, dtype in ipairs(FLOATS) do
    for _, p in ipairs { 0, 0.1, 0.5, 0.999, 1 } do
      for _, counter in ipairs { 0, 12345, 2 ^ 32 - 3 } do
        try { inputs = { float(dtype, { 3, 641 }, "special", "plain") }, ints = { counter, 1 },
          floats = { p }, ulp = 2 }
      end
    end
    try { inputs = { float(dtype, { 5, 33 }, "normal", "transposed") }, ints = { 7, 1 },
      floats = { 0.3 }, ulp = 2 }
    try { inputs = { float(dtype, { 13, 1537 }, "normal") }, ints = { 7, 1 }, floats = { 0.3 },
      ulp = 2 }
  end
end

generators.cast = function(try)
  local all = both(FLOATS, both(ALL_INTEGERS, { "bool" }))
  for _, from in ipairs(all) do
    for _, to in ipairs(all) do
      local function call(x) try { inputs = { x }, ints = { engine.dtype[to] }, zeros = true } end
      if FORMATS[from] then
        for k, kind in ipairs { "special", "wide", "tiny", "range" } do
          call(float(from, { 5, 33 }, kind, LAYOUTS[k]))
        end
        call(float(from, { 1100 }, "wide"))
        if from == "f32" then call(float(from, { 13, 1537 }, "normal", "transposed")) end
        -- the limits of f16
        call(lay(from, { 600 }, function()
          return sign() * (1 + uniform()) * 2 ^ integer(-30, 17)
        end))
      else
        local low, high = 0, 1
        if INTEGERS[from] then low, high = unpack(INTEGERS[from]) end
        for _, layout in ipairs(LAYOUTS) do call(whole(from, { 5, 33 }, low, high, layout)) end
        call(whole(from, { 700 }, math.max(low, -300), math.min(high, 300)))
      end
    end
  end
  -- FP8, from and to every format; mode bits: saturation, stochastic rounding
  local function any(dtype, layout)
    if dtype == "bool" then return whole(dtype, { 5, 33 }, 0, 1, layout) end
    local low, high = unpack(INTEGERS[dtype] or { -500, 500 })
    if INTEGERS[dtype] then
      return whole(dtype, { 5, 33 }, math.max(low, -70000), math.min(high, 70000), layout)
    end
    return lay(dtype, { 5, 33 }, function() return uniform() < 0.1 and 1e5 * sign()
      or sign() * (1 + uniform()) * 2 ^ integer(-17, 16) end, layout)
  end
  for _, small in ipairs { "e4m3", "e5m2" } do
    for _, other in ipairs(both(all, { "e4m3", "e5m2" })) do
      for _, layout in ipairs(LAYOUTS) do
        try { inputs = { any(small, layout) }, ints = { engine.dtype[other] }, zeros = true }
        for mode = 0, 3 do
          try { inputs = { any(other, layout) }, ints = { engine.dtype[small], mode, 2 ^ 33 + 5,
            1 }, zeros = true }
        end
      end
    end
  end
end

generators.contiguous = function(try)
  for _, dtype in ipairs(both(FLOATS, both(ALL_INTEGERS, { "bool" }))) do
    for _, shape in ipairs { { 3, 65 }, { 2, 3, 17 }, { 129 }, {}, { 65, 300 } } do
      for _, layout in ipairs(LAYOUTS) do
        local x = FORMATS[dtype] and float(dtype, shape, "special", layout)
          or whole(dtype, shape, 0, dtype == "bool" and 1 or 100, layout)
        try { inputs = { x }, zeros = true }
      end
    end
    if FORMATS[dtype] then
      local function turned(shape, order)
        try { inputs = { engine.run("permute", { float(dtype, shape, "normal") }, order) },
          zeros = true }
      end
      turned({ 3, 5, 7, 9 }, { 2, 0, 3, 1 })
      turned({ 2, 9, 3, 16 }, { 0, 2, 1, 3 })   -- heads before positions
      turned({ 2, 72, 3, 40 }, { 0, 2, 3, 1 })
      try { inputs = { engine.run("slice", { float(dtype, { 7, 96 }, "normal") },
        { 1, 32, 64, 1 }) }, zeros = true }
    end
  end
end

return generators
