-- Calls for convolution, pooling, batch norm and group norm. See spec/cpu/kernels_spec.lua.
local engine = require "engine.base.ffi"
local tensors = require "spec.cpu.kernels.values"
local FLOATS, LAYOUTS, float, with = tensors.FLOATS, tensors.LAYOUTS, tensors.float, tensors.with
local values_of, shape_of = tensors.values_of, tensors.shape_of
local inf, nan = math.huge, 0 / 0

local generators = {}

-- ------------------------------------------------------------------ convolution

-- { N, H, W, C, O, KH, KW, stride h w, padding h w, dilation h w, groups }
local CONVOLUTIONS = {
  { 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1 }, { 2, 5, 7, 3, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
  { 1, 9, 8, 3, 5, 7, 7, 2, 2, 3, 3, 1, 1, 1 }, { 2, 7, 6, 16, 17, 3, 3, 2, 1, 1, 0, 1, 1, 1 },
  { 3, 4, 4, 33, 32, 1, 1, 1, 1, 0, 0, 1, 1, 1 }, { 2, 6, 6, 32, 16, 1, 1, 2, 2, 0, 0, 1, 1, 1 },
  { 1, 9, 9, 6, 9, 3, 2, 1, 2, 2, 1, 2, 3, 3 }, { 2, 6, 5, 8, 8, 3, 3, 1, 1, 1, 1, 1, 1, 8 },
  { 1, 6, 5, 4, 8, 3, 3, 1, 1, 1, 1, 1, 1, 4 }, { 2, 5, 5, 32, 32, 3, 3, 1, 1, 1, 1, 1, 1, 2 },
  { 2, 1, 19, 5, 7, 1, 4, 1, 3, 0, 2, 1, 1, 1 }, { 1, 3, 3, 2, 2, 3, 3, 1, 1, 4, 5, 1, 1, 1 },
  { 2, 4, 4, 64, 64, 3, 3, 1, 1, 1, 1, 1, 1, 1 }, { 1, 10, 10, 1, 16, 5, 5, 3, 2, 0, 2, 1, 1, 1 },
  { 2, 3, 4, 0, 5, 3, 3, 1, 1, 1, 1, 1, 1, 1 }, { 0, 4, 4, 3, 5, 3, 3, 1, 1, 1, 1, 1, 1, 1 } }

-- Products flush subnormals in bf16; in f32 they round each subnormal term of a sum.
local function how(dtype, more)
  return with({ ulp = 1, eps = 32, bound = "sums", threads = true,
    flush = dtype == "bf16" and 2 ^ -120 or dtype == "f32" and 2 ^ -142 or nil }, more)
end

--- Calls f(dtype, k, x, w, y, ints) for entry k of CONVOLUTIONS: the shapes of x, w and y, and the
--- attributes.
local function each_convolution(f)
  for _, dtype in ipairs(FLOATS) do
    for k, g in ipairs(CONVOLUTIONS) do
      local function size(d)
        return math.floor((g[1 + d] + 2 * g[9 + d] - g[11 + d] * (g[5 + d] - 1) - 1) / g[7 + d]) + 1
      end
      f(dtype, k, { g[1], g[2], g[3], g[4] }, { g[5], g[4] / g[14], g[6], g[7] },
        { g[1], size(1), size(2), g[5] }, { unpack(g, 8, 14) })
    end
  end
end
local KINDS = { "normal", "rare", "tiny", "large" }
local function kind(k, shift) return KINDS[(k + shift) % 8 + 1] or "normal" end

function generators.conv2d(try)
  each_convolution(function(dtype, k, x, w, y, ints)
    for shift = 0, 1 do
      try(how(dtype, { inputs = { float(dtype, x, kind(k, shift), LAYOUTS[k % 3 + 1]),
        float(dtype, w, kind(k, 3 * shift)), shift == 0 and float(dtype, { y[4] }, "normal") },
        ints = ints }))
    end
  end)
  for _, pair in ipairs { { "f32", "f16" }, { "f16", "bf16" }, { "bf16", "f32" } } do
    try(how("bf16", { inputs = { float(pair[1], { 2, 5, 5, 3 }, "normal"),
      float(pair[2], { 4, 3, 3, 3 }, "normal"), float(pair[1], { 4 }, "normal") },
      ints = { 1, 1, 1, 1, 1, 1, 1 } }))
  end
end

local function attributes(ints, ...)
  local all = { unpack(ints) }
  for _, n in ipairs { ... } do all[#all + 1] = n end
  return all
end
local function wide(dtype) return engine.dtype[dtype == "f64" and "f64" or "f32"] end

function generators.conv2d_grad_x(try)
  each_convolution(function(dtype, k, x, w, y, ints)
    for shift = 0, 1 do
      try(how(dtype, { inputs = { float(dtype, y, kind(k, shift), LAYOUTS[k % 3 + 1]),
        float(dtype, w, kind(k, 3 * shift)) },
        ints = attributes(ints, x[2], x[3], shift == 0 and engine.dtype[dtype] or wide(dtype)) }))
    end
  end)
end

function generators.conv2d_grad_w(try)
  each_convolution(function(dtype, k, x, w, y, ints)
    for shift = 0, 1 do
      try(how(dtype, { inputs = { float(dtype, y, kind(k, shift), LAYOUTS[k % 3 + 1]),
        float(dtype, x, kind(k, 3 * shift)) },
        ints = attributes(ints, w[3], w[4], shift == 0 and engine.dtype[dtype] or wide(dtype),
          0) }))
    end
  end)
end

-- ------------------------------------------------------------------ pooling

-- { N, H, W, C, kernel h w, stride h w, padding h w }
local POOLS = { { 1, 1, 1, 1, 1, 1, 1, 1, 0, 0 }, { 2, 7, 6, 3, 3, 3, 2, 2, 1, 1 },
  { 1, 5, 9, 17, 2, 3, 2, 3, 0, 0 }, { 2, 8, 8, 33, 3, 2, 1, 1, 1, 1 },
  { 1, 4, 6, 520, 4, 5, 3, 1, 2, 2 }, { 1, 6, 6, 2, 2, 2, 4, 4, 0, 1 },
  { 2, 40, 40, 9, 3, 3, 2, 2, 1, 1 }, { 0, 4, 4, 3, 2, 2, 2, 2, 0, 0 },
  { 2, 3, 3, 0, 2, 2, 2, 2, 0, 0 } }

local function each_pool(f)
  for _, dtype in ipairs(FLOATS) do
    for k, g in ipairs(POOLS) do
      local function size(d)
        return math.floor((g[1 + d] + 2 * g[8 + d] - g[4 + d]) / g[6 + d]) + 1
      end
      f(dtype, k, { g[1], g[2], g[3], g[4] }, { g[1], size(1), size(2), g[4] },
        { unpack(g, 5, 10) })
    end
  end
end

function generators.max_pool2d(try)
  each_pool(function(dtype, k, x, _, ints)
    for _, values in ipairs { "normal", "rare", "few", "special" } do
      try { inputs = { float(dtype, x, values, LAYOUTS[k % 3 + 1]) }, ints = ints, outputs = 2,
        ulp = 0, eps = 0 }
    end
  end)
end

function generators.max_pool2d_grad(try)
  each_pool(function(dtype, _, x, y, ints)
    local _, cells = engine.run("max_pool2d", { float(dtype, x, "few") }, ints, {}, 2)
    for _, values in ipairs { "normal", "rare", "large" } do
      try { inputs = { float(dtype, y, values), cells }, ulp = 1, eps = 8, bound = "sums",
        ints = attributes(ints, x[2], x[3], engine.dtype[dtype]) }
    end
  end)
end

local ADAPTIVE = { 0, 0, 1, 1, 0, 0, 0 }
function generators.avg_pool2d(try)
  each_pool(function(dtype, k, x, _, ints)
    for counted = 0, 1 do
      try { inputs = { float(dtype, x, counted == 0 and "normal" or "rare", LAYOUTS[k % 3 + 1]) },
        ints = attributes(ints, counted), ulp = 1, eps = 16, bound = "sums" }
    end
    for size = 1, 3 do
      try { inputs = { float(dtype, x, "normal") }, ints = attributes(ADAPTIVE, size, 2 * size),
        ulp = 1, eps = 128, bound = "sums" }
    end
  end)
end

function generators.avg_pool2d_grad(try)
  each_pool(function(dtype, _, x, y, ints)
    for counted = 0, 1 do
      try { inputs = { float(dtype, y, counted == 0 and "normal" or "rare") }, ulp = 1, eps = 16,
        ints = attributes(ints, counted, x[2], x[3], engine.dtype[dtype]), bound = "sums" }
    end
    for size = 1, 3 do
      try { inputs = { float(dtype, { x[1], size, 2 * size, x[4] }, "normal") }, ulp = 1, eps = 16,
        ints = attributes(ADAPTIVE, x[2], x[3], engine.dtype[dtype]), bound = "sums" }
    end
  end)
end

-- ------------------------------------------------------------------ norms

--- Returns a function of an element's index i in x of this shape: the index of the element's
--- statistic, and of its channel.
local function indices(shape, groups)
  local channels, rows = shape[#shape], 1
  for d = 2, #shape - 1 do rows = rows * shape[d] end
  return function(i)
    local c = i % channels
    if not groups then return c, c end
    return math.floor(i / (rows * channels)) * groups + math.floor(c * groups / channels), c
  end
end
local function finite(v) return v < inf and v > -inf and math.abs(v) or 0 end

--- The largest magnitude for each statistic, and the sum of magnitudes for each channel.
local function tops_of(x, index)
  local values, n = values_of(x)
  local tops, sums = {}, {}
  for i = 0, n - 1 do
    local k, c = index(i)
    tops[k], sums[c] = math.max(tops[k] or 0, finite(values[i])),
      (sums[c] or 0) + finite(values[i])
  end
  return tops, sums
end

-- y: f32 rounds at the magnitude of x / std, before the weight.
local function forward_bound(eps, groups)
  return function(_, call, want)
    local x, weight, bias = call.inputs[1], call.inputs[2], call.inputs[3]
    local index = indices(shape_of(x), groups)
    local tops = tops_of(x, index)
    local variance = values_of(want[4] or call.inputs[5])
    local mean = values_of(want[3] or call.inputs[4])
    local w, b = weight and values_of(weight), bias and values_of(bias)
    return function(output, i)
      if output == 2 then return tops[i] end
      if output == 3 then return variance[i] + tops[i] ^ 2 * 2 ^ -12 end
      local k, c = index(i)
      return (tops[k] + finite(mean[k])) / math.sqrt(variance[k] + eps)
        * (w and math.abs(w[c]) or 1) + (b and math.abs(b[c]) or 0)
    end
  end
end

local function backward_bound(eps, groups)
  return function(_, call)
    local x, weight, variance, dy = call.inputs[1], call.inputs[2], values_of(call.inputs[4]),
      call.inputs[5]
    local index = indices(shape_of(x), groups)
    local tops, slopes = tops_of(x, index), tops_of(dy, index)
    local _, sums = tops_of(dy, index)
    local mean, shape = values_of(call.inputs[3]), shape_of(x)
    local channels, part = shape[#shape], call.inputs[6] and values_of(call.inputs[6])
    local w, heaviest, spread = weight and values_of(weight), weight and 0 or 1, {}
    local _, n = values_of(x)
    for i = 0, n - 1 do
      local k, c = index(i)
      heaviest = math.max(heaviest, w and finite(w[c]) or 1)
      spread[c] = math.max(spread[c] or 0,
        finite((tops[k] + finite(mean[k])) / math.sqrt(variance[k] + eps)))
    end
    return function(output, i)
      if output == 3 then return sums[i] end
      if output == 2 then return sums[i] * math.max(1, 2 * spread[i]) end
      local k, c = index(i)
      local slope = slopes[k]
      if part then                                         -- of all rows, of which x is a part
        slope = slope + (finite(part[c]) + finite(part[channels + c])) / call.ints[4]
      end
      return slope * heaviest / math.sqrt(variance[k] + eps) * (1 + (2 * spread[c]) ^ 2)
    end
  end
end

-- Shapes, and numbers of groups that divide the last size.
local NORMS = { { { 4, 1 }, 1 }, { { 5, 3 }, 3 }, { { 2, 3, 5, 6 }, 2 }, { { 3, 4, 4, 17 }, 1 },
  { { 2, 9, 8, 33 }, 11 }, { { 2, 30, 20, 64 }, 8 }, { { 1, 3, 2, 520 }, 4 }, { { 3, 700, 4 }, 2 },
  { { 2, 0, 4 }, 2 } }

-- A card computes with f32 factors, so the variance must be a finite f32 there.
local TOP = os.getenv("ENGINE_TEST_DEVICE") and 2 ^ 60 or tensors.largest(tensors.FORMATS.bf16)

-- Elements of channels that are ordinary, far from 0, constant, large, tiny in turn. If `extreme`,
-- the channels are ordinary, hold NaN, hold Inf, and have a variance that overflows f32 in turn.
local function channel_values(dtype, shape, extreme)
  local f = tensors.FORMATS[dtype]
  local function spread(top) return tensors.sign() * tensors.uniform() * top end
  local patterns = {
    function() return spread(3) end,
    function() return 8 + tensors.uniform() end, function() return 2 end,
    function() return spread(f.high == 15 and 60000 or 2 ^ 40) end,
    function() return spread(2 ^ (f.low + 1)) end }
  if extreme then
    patterns = { patterns[1], function(i) return i < 20 and nan or tensors.uniform() end,
      function(i) return i < 20 and inf or tensors.uniform() end,
      function() return spread(f.high == 15 and 60000 or TOP) end }
  end
  local values, channels = {}, shape[#shape]
  for i = 0, tensors.count_of(shape) - 1 do
    values[i + 1] = patterns[i % channels % #patterns + 1](math.floor(i / channels))
  end
  return tensors.listed(dtype, shape, values)
end

local function each_norm(f)
  for _, dtype in ipairs(FLOATS) do
    for k, norm in ipairs(NORMS) do
      local shape, groups = unpack(norm)
      local n = shape[#shape]
      local function vector(values) return float(dtype, { n }, values or "normal") end
      f(dtype, shape, groups, float(dtype, shape, "normal", LAYOUTS[k % 3 + 1]), vector, 1e-5)
      f(dtype, shape, groups, channel_values(dtype, shape), vector, 1e-3)
      f(dtype, shape, groups, channel_values(dtype, shape, true), vector, 1e-3)
    end
  end
end

function generators.batch_norm(try)
  each_norm(function(dtype, shape, _, x, vector, eps)
    local n = shape[#shape]
    local function call(...)
      try { inputs = { ... }, floats = { eps }, outputs = 3, ulp = 2, eps = 32,
        bound = forward_bound(eps), constants = { [4] = true, [5] = true } }
    end
    call(x, vector(), vector(), false, false)
    call(x, false, false, false, false)
    call(x, float("f32", { n }, "normal"), vector(), float("f32", { n }, "normal"),
      float("f32", { n }, "positive"))
    if dtype ~= "f64" then call(x, float("f32", { n }, "normal"), false, false, false) end
    try { inputs = { x, false, false, false, false }, ints = { 1 }, floats = { eps }, outputs = 3,
      ulp = 2, eps = 32, bound = forward_bound(eps), flush = 2 ^ -120 }   -- squares in f32
  end)
end

function generators.group_norm(try)
  each_norm(function(_, _, groups, x, vector, eps)
    for _, affine in ipairs { true, false } do
      try { inputs = { x, affine and vector(), affine and vector() }, ints = { groups },
        floats = { eps }, outputs = 3, ulp = 2, eps = 32, bound = forward_bound(eps, groups) }
    end
  end)
end

local function norm_grad(forward)
  return function(try)
    each_norm(function(dtype, shape, groups, x, vector, eps)
      local group = forward == "group_norm"
      local inputs = group and { x, false, false } or { x, false, false, false, false }
      local _, mean, variance = engine.run(forward, inputs, group and { groups } or {}, { eps }, 3)
      for round = 1, 3 do
        local given = not group and round == 3
        local arguments = { x, round ~= 2 and vector(), mean, variance,
          float(dtype, shape, round == 2 and "rare" or "normal") }
        if not group then arguments[6] = false end
        try { inputs = arguments,
          ints = { wide(dtype), round == 2 and 0 or 1, group and groups or given and 1 or 0 },
          floats = { eps }, outputs = 3, ulp = 2, eps = 64,
          bound = backward_bound(eps, group and groups) }
      end
      if not group then                                    -- x as a part of more rows
        local n = shape[#shape]
        local sums = float(dtype == "f64" and "f64" or "f32", { 2, n }, "normal")
        try { inputs = { x, vector(), mean, variance, float(dtype, shape, "normal"), sums },
          ints = { wide(dtype), 1, 0, 3 * tensors.count_of(shape) / n + 1 }, floats = { eps },
          outputs = 3, ulp = 2, eps = 64, bound = backward_bound(eps) }
      end
    end)
  end
end
generators.batch_norm_grad = norm_grad "batch_norm"
generators.group_norm_grad = norm_grad "group_norm"

return generators
