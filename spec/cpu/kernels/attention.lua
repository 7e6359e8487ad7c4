-- Calls for attention and rotary embedding. See spec/cpu/kernels_spec.lua.
local engine = require "engine.base.ffi"
local compare = require "spec.cpu.kernels.compare"
local tensors = require "spec.cpu.kernels.values"
local FLOATS, LAYOUTS, float, with = tensors.FLOATS, tensors.LAYOUTS, tensors.float, tensors.with
local shape_of, values_of = tensors.shape_of, tensors.values_of

local generators = {}

-- B, T, S, H, G, D: batch, queries, keys, heads of q, heads of k and v, width of a head
local HEADS = { { 1, 1, 1, 1, 1, 8 }, { 2, 17, 17, 3, 3, 16 }, { 1, 33, 33, 2, 1, 64 },
  { 2, 5, 9, 4, 2, 33 }, { 1, 9, 5, 2, 2, 7 },
  { 1, 70, 70, 1, 1, 32 }, { 1, 130, 130, 2, 2, 24 }, { 1, 1, 65, 2, 1, 64 },
  { 3, 40, 40, 4, 4, 64 }, { 1, 20, 140, 2, 1, 128 }, { 1, 33, 70, 1, 1, 96 },
  { 1, 3, 901, 2, 1, 16 } }
-- On cards, for tensor cores: several blocks, enough tiles to use each of Hopper's buffers three
-- times, and blocks whose queries see no key.
local LONG = { { 1, 140, 520, 1, 1, 64 }, { 1, 140, 330, 1, 1, 128 }, { 1, 260, 70, 1, 1, 64 } }

local function sizes_for(dtype)
  local long = compare.CARD and (dtype == "f16" or dtype == "bf16")
  return long and tensors.both(HEADS, LONG) or HEADS
end

--- q, k and v for an entry of HEADS: separate, or (`fused`) cut out of one projection as in a GPT.
local function heads(dtype, size, kind, fused)
  local b, t, s, h, g, d = unpack(size)
  if fused and t == s and h == g then
    local all = float(dtype, { b, t, 3 * h, d }, kind)
    local function cut(k) return engine.run("slice", { all }, { 2, k * h, (k + 1) * h, 1 }) end
    return cut(0), cut(1), cut(2)
  end
  return float(dtype, { b, t, h, d }, kind), float(dtype, { b, s, g, d }, kind),
    float(dtype, { b, s, g, d }, kind)
end

local function top_of(x)
  local values, n = values_of(x)
  return compare.largest_of(values, 0, n - 1)
end

--- A bound of the scores: the largest log(sum(exp)) of scores computed from magnitudes, plus 1.
local function score_bound(call)
  local lse = compare.absolute_sums("attention",
    { inputs = { call.inputs[1], call.inputs[2], call.inputs[3] }, ints = { call.ints[1], 0 },
                                                   floats = call.floats, outputs = 3 })[2]
  return 1 + top_of(lse)
end

-- A probability's relative error is the absolute error of its score.
local function forward_bound(_, call)
  local scores = score_bound(call)
  local limits = { scores * top_of(call.inputs[3]), scores, scores ^ 2 }
  return function(output) return limits[output] end
end

-- A score's gradient is p * (dp - sum of p * dp), where dp is a product of D terms; dk and dv sum
-- over the queries.
local function backward_bound(_, call)
  local q, k, value, dy = call.inputs[1], call.inputs[2], call.inputs[3], call.inputs[6]
  local shape = shape_of(q)
  local queries, width = math.sqrt(shape[2] * shape[3] / shape_of(k)[3]), math.sqrt(shape[4])
  local factor = call.floats[1] == 0 and 1 / width or call.floats[1]
  local scores = score_bound(call)
  local dscore = scores * width * top_of(dy) * top_of(value)
  local limits = { factor * dscore * top_of(k), factor * dscore * top_of(q) * queries,
    scores * top_of(dy) * queries }
  return function(output) return limits[output] end
end

-- Probabilities and, in the backward pass, gradients of scores are rounded before the products that
-- use them.
local TOLERANCE = { outputs = 3, ulp = 2, eps = 4, card = 1, pairs = true }
local FORWARD, BACKWARD = with({ bound = forward_bound }, TOLERANCE),
  with({ bound = backward_bound }, TOLERANCE)

local EXTRAS = compare.CARD and 2 or 3   -- cards do not measure the largest logits

generators.attention = function(try)
  for _, dtype in ipairs(FLOATS) do
    for k, size in ipairs(sizes_for(dtype)) do
      for causal = 0, 1 do
        for _, kind in ipairs { "normal", "rare" } do
          local q, key, v = heads(dtype, size, kind, k % 2 == 0)
          try(with({ inputs = { q, key, v }, ints = { causal, (k + causal) % EXTRAS },
            floats = { k % 3 == 0 and 0.3 or 0 } }, FORWARD))
        end
      end
    end
    -- scores so far apart that one key gets all the weight
    local q, key, v = heads(dtype, HEADS[2], "large")
    try(with({ inputs = { q, key, v }, ints = { 0, EXTRAS - 1 }, floats = { -0.3 } }, FORWARD))
    if dtype == "f16" then
      try(with({ inputs = { q, key, v }, ints = { 1, 1 }, floats = { 0 } }, FORWARD))
    end
    -- [B x H x T x D] in memory
    local function head_major(n, m)
      return engine.run("permute", { float(dtype, { 2, m, n, 16 }, "normal") }, { 0, 2, 1, 3 })
    end
    try(with({ inputs = { head_major(17, 4), head_major(17, 2), head_major(17, 2) },
      ints = { 1, 1 }, floats = { 0 } }, FORWARD))
    -- D not contiguous; every batch shares the keys
    for _, width in ipairs { 16, 64 } do
      try(with({ inputs = { float(dtype, { 2, 9, 2, width }, "normal", "transposed"),
        float(dtype, { 2, 9, 2, width }, "normal", "sliced"),
        float(dtype, { 2, 9, 2, width }, "normal", "expanded") }, ints = { 1, 1 },
        floats = { 0 } }, FORWARD))
    end
  end
end

generators.attention_grad = function(try)
  for _, dtype in ipairs(FLOATS) do
    for k, size in ipairs(sizes_for(dtype)) do
      for causal = 0, 1 do
        for _, kind in ipairs { "normal", "rare" } do
          local b, t, _, h, _, d = unpack(size)
          local q, key, v = heads(dtype, size, "normal", k % 2 == 0)
          local floats = { k % 3 == 0 and 0.3 or 0 }
          local y, lse = engine.run("attention", { q, key, v }, { causal, 0 }, floats, 3)
          local dy = float(dtype, { b, t, h, d }, kind, LAYOUTS[k % 3 + 1])
          try(with({ inputs = { q, key, v, y, lse, dy }, ints = { causal, 0 }, floats = floats },
            BACKWARD))
        end
      end
    end
  end
end

generators.rope = function(try)
  for _, dtype in ipairs(FLOATS) do
    for k, shape in ipairs { { 1, 1, 1, 2 }, { 2, 17, 3, 16 }, { 1, 65, 2, 34 },
      { 1, 5, 1, 130 } } do
      for neighbours = 0, 1 do
        for back = 0, 1 do
          for _, position in ipairs { 0, 5, 3000 } do
            try { inputs = { float(dtype, shape, "normal", LAYOUTS[(k + back) % 4 + 1]) },
              ints = { position, neighbours, back },
              floats = { k == 3 and 500000 or 10000 }, ulp = 1, eps = 8, bound = "largest" }
          end
          -- linear scaling, Llama 3's, YaRN's
          for _, s in ipairs { { 0 }, { 16, 1, 4 }, { 0, 0, 5.001 } } do
            try { inputs = { float(dtype, shape, "normal") },
              ints = { 7, neighbours, back, s[1] }, floats = { 100, 8, s[2] or 0, s[3] or 0 },
              ulp = 1, eps = 8, bound = "largest" }
          end
        end
      end
    end
    try { inputs = { float(dtype, { 1, 9, 2, 16 }, "rare") }, ints = { 0, 0, 0 },
      floats = { 10000 }, ulp = 1, eps = 8, bound = "largest" }
    local heads_first = engine.run("permute", { float(dtype, { 2, 3, 9, 16 }, "normal") },
      { 0, 2, 1, 3 })
    try { inputs = { heads_first }, ints = { 0, 0, 0 }, floats = { 10000 }, ulp = 1, eps = 8,
      bound = "largest" }
  end
end

return generators
