-- Calls for the norms. See spec/cpu/kernels_spec.lua.
local compare = require "spec.cpu.kernels.compare"
local engine = require "engine.base.ffi"
local tensors = require "spec.cpu.kernels.values"
local FORMATS, FLOATS, LAYOUTS, uniform = tensors.FORMATS, tensors.FLOATS, tensors.LAYOUTS,
  tensors.uniform
local sign, values_of = tensors.sign, tensors.values_of
local float, listed = tensors.float, tensors.listed
local inf, nan = math.huge, 0 / 0

local generators = {}

--- Rows of a norm: ordinary, shifted, constant, zero, one with NaN, one with Inf, large, tiny.
local function norm_rows(dtype, n)
  local f = FORMATS[dtype]
  local patterns = {
    function() return sign() * 3 * uniform() end,
    function() return 8 + uniform() end,
    function() return 2 end,
    function() return 0 end,
    function(i) return i == n - 1 and nan or uniform() end,
    function(i) return i == 0 and inf or uniform() end,
    function() return sign() * uniform() * (f.high == 15 and 60000 or 2 ^ 60) end,
    function() return sign() * uniform() * 2 ^ (f.low + 1) end,
  }
  local values = {}
  for i = 0, #patterns * n - 1 do values[i + 1] = patterns[math.floor(i / n) + 1](i % n) end
  return listed(dtype, { #patterns, n }, values), #patterns
end

--- f32 rounds y at the magnitude of x times 1/std, before the weight, the means at the magnitude of
--- x, and 1/std at its own magnitude. With a residual, x is the sum.
local function forward_bound(has_bias, adds)
  return function(_, call, want)
    local vectors = adds and 3 or 2
    local x, weight, bias = adds and want[3] or call.inputs[1], call.inputs[vectors],
      has_bias and call.inputs[vectors + 1]
    local tops, columns = compare.row_tops(x)
    local rstd = values_of(want[vectors + (has_bias and 2 or 1)])
    local w, b = weight and values_of(weight), bias and values_of(bias)
    return function(output, i)
      if output == 1 then
        local row, column = math.floor(i / columns), i % columns
        return tops[row] * rstd[row] * (w and math.abs(w[column]) or 1)
          + (b and math.abs(b[column]) or 0)
      end
      if output < vectors then return 0 end
      return output == vectors and has_bias and tops[i] or rstd[i]
    end
  end
end

--- With g = dy * weight and h = (x - mean) * rstd, by rows: dx is of the order rstd * g * (1 +
--- h^2), and dweight and dbias are sums over rows of dy * h and of dy. If dsum is added, dx has
--- been rounded before and may have moved to a neighbour.
local function backward_bound(has_bias, adds)
  return function(_, call)
    local digits = FORMATS[tensors.dtype_of(call.inputs[1])].digits
    local neighbour = adds and digits < 23 and 2 ^ (24 - digits) / call.eps or 0
    local x, weight, dy = call.inputs[1], call.inputs[2], call.inputs[has_bias and 5 or 4]
    local tops, columns = compare.row_tops(x)
    local slopes = compare.row_tops(dy)
    local rstd = values_of(call.inputs[has_bias and 4 or 3])
    local top_weight = 1
    if weight then
      local w, n = values_of(weight)
      top_weight = compare.largest_of(w, 0, n - 1)
    end
    local dweight, dbias, rows = 0, 0, #tops + (tops[0] and 1 or 0)
    for row = 0, rows - 1 do
      if rstd[row] < inf then
        dweight = dweight + slopes[row] * math.max(1, 2 * tops[row] * rstd[row])
        dbias = dbias + slopes[row]
      end
    end
    return function(output, i)
      if output == 2 then return dweight elseif output == 3 then return dbias end
      local row = math.floor(i / columns)
      return rstd[row] * slopes[row] * top_weight * (1 + (2 * tops[row] * rstd[row]) ^ 2) *
        (1 + neighbour)
    end
  end
end

local function norm(has_bias)
  return function(try)
    for _, dtype in ipairs(FLOATS) do
      for _, n in ipairs { 1, 3, 17, 33, 65, 129, 515, 768, 1100, 1536 } do
        local weight, bias = float(dtype, { n }, "normal"), float(dtype, { n }, "normal")
        local function call(x, w, b, eps)
          local inputs = has_bias and { x, w, b } or { x, w }
          try { inputs = inputs, floats = { eps }, outputs = has_bias and 3 or 2, ulp = 4, eps = 8,
            bound = forward_bound(has_bias) }
        end
        local x = norm_rows(dtype, n)
        call(x, weight, bias, 1e-5)
        call(x, false, false, 1e-5)
        if n == 515 then call(float(dtype, { 37, n }, "normal"), weight, bias, 1e-5) end
        call(float(dtype, { 2, 3, n }, "normal", LAYOUTS[n % 4 + 1]), weight, false, 1e-6)
        call(float(dtype, { 3, n }, "normal"), false, bias, n > 2 and 0 or 1e-5)
        if dtype == "f16" then
          call(float("f16", { 3, n }, "normal"), float("f32", { n }, "normal"),
            float("f32", { n }, "normal"), 1e-5)
        end
      end
    end
  end
end

generators.layer_norm = norm(true)
generators.rms_norm = norm(false)

local function add_norm(has_bias)
  return function(try)
    local function call(x, branch, w, b, eps)
      local inputs = has_bias and { x, branch, w, b } or { x, branch, w }
      try { inputs = inputs, floats = { eps }, outputs = has_bias and 4 or 3, ulp = 4, eps = 8,
        bound = forward_bound(has_bias, true) }
    end
    for _, dtype in ipairs(FLOATS) do
      for _, n in ipairs { 1, 3, 17, 33, 65, 129, 515, 768, 1100, 1536 } do
        local weight, bias = float(dtype, { n }, "normal"), float(dtype, { n }, "normal")
        local x, rows = norm_rows(dtype, n)
        call(x, float(dtype, { rows, n }, "normal"), weight, bias, 1e-5)
        call(x, x, false, false, 1e-5)   -- the large ones overflow f16
        if n == 515 then
          call(float(dtype, { 37, n }, "normal"), float(dtype, { 37, n }, "rare"), weight, bias,
            1e-5)
        end
        call(float(dtype, { 2, 3, n }, "normal", LAYOUTS[n % 4 + 1]),
          float(dtype, { 2, 3, n }, "normal", LAYOUTS[(n + 1) % 4 + 1]), weight, false, 1e-6)
      end
    end
    for _, pair in ipairs { { "f32", "bf16" }, { "f16", "f32" }, { "f16", "bf16" },
      { "bf16", "f64" } } do
      local function of(dtype) return float(dtype, { 5, 129 }, "normal") end
      call(of(pair[1]), of(pair[2]), float("f32", { 129 }, "normal"), false, 1e-5)
    end
  end
end

generators.add_layer_norm = add_norm(true)
generators.add_rms_norm = add_norm(false)

local function norm_grad(forward, has_bias, adds)
  local function with_sum(inputs, dsum)
    if adds then inputs[#inputs + 1] = dsum end
    return inputs
  end
  return function(try)
    for _, dtype in ipairs(FLOATS) do
      for _, n in ipairs { 1, 3, 17, 33, 65, 129, 515, 768, 1100, 1536 } do
        for _, rows in ipairs { 1, 5, 70 } do
          if n * rows < 40000 then
            local function call(x, w, dy, wanted)
              local sums, out = dtype == "f64" and "f64" or "f32", has_bias and 3 or 2
              local saved = { engine.run(forward, has_bias and { x, w, false } or { x, w }, {},
                { 1e-5 }, out) }
              local inputs = has_bias and { x, w, saved[2], saved[3], dy } or { x, w, saved[2], dy }
              with_sum(inputs, float(dtype, { rows, n }, "normal", LAYOUTS[wanted + 1]))
              try { inputs = inputs, ints = { engine.dtype[sums], wanted }, outputs = out, ulp = 2,
                eps = 16, bound = backward_bound(has_bias, adds) }
            end
            local shape = { rows, n }
            call(float(dtype, shape, "normal"), float(dtype, { n }, "normal"),
              float(dtype, shape, "normal"), 1)
            call(float(dtype, shape, "normal", "transposed"), false,
              float(dtype, shape, "normal", "sliced"), 0)
            call(float(dtype, shape, "normal"), float(dtype, { n }, "normal"),
              float(dtype, shape, "rare"), 1)
            if dtype ~= "f64" then
              call(float(dtype, shape, "normal"), float("f32", { n }, "normal"),
                float("f32", shape, "normal"), 1)
            end
          end
        end
      end
      for _, n in ipairs { 33 } do
        local x, rows = norm_rows(dtype, n)
        local saved = { engine.run(forward, has_bias and { x, false, false } or { x, false }, {},
          { 1e-5 }, has_bias and 3 or 2) }
        local dy = float(dtype, { rows, n }, "normal")
        local inputs = has_bias and { x, false, saved[2], saved[3], dy }
          or { x, false, saved[2], dy }
        with_sum(inputs, float(dtype, { rows, n }, "rare"))
        try { inputs = inputs, ints = { engine.dtype[dtype == "f64" and "f64" or "f32"], 1 },
          outputs = has_bias and 3 or 2, ulp = 2, eps = 16,
          bound = backward_bound(has_bias, adds) }
      end
    end
  end
end

generators.layer_norm_grad = norm_grad("layer_norm", true)
generators.rms_norm_grad = norm_grad("rms_norm", false)
generators.add_layer_norm_grad = norm_grad("layer_norm", true, true)
generators.add_rms_norm_grad = norm_grad("rms_norm", false, true)

return generators
