-- For specs of gradients: calls of every operation with a gradient rule in ops.def, on f64 inputs.
-- cases[name](check) runs check(f, inputs) for each call; has_gradient(op) tells whether the
-- operation with this number has such a rule.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"

-- f64 values away from kinks and poles.
local function random(...) return engine.randn({ ... }, "f64"):keep() end
local function positive(...) return (engine.rand({ ... }, "f64") + 0.5):keep() end
local function spaced(...)   -- all different: max, min and topk see no ties
  local shape, n = { ... }, 1
  for _, s in ipairs(shape) do n = n * s end
  local list = {}
  for i = 1, n do list[i] = ((i * 7919) % n) * 0.37 - n * 0.1 + 0.05 end
  return engine.tensor(list, { dtype = "f64", keep = true }):view(shape):keep()
end
local function ids(list) return engine.tensor(list, { dtype = "i64", keep = true }) end
local function method(name, ...)
  local rest = { ... }
  return function(x) return x[name](x, unpack(rest)) end
end

local shapes = { { 5, 3 }, { 1 }, { 2, 3, 5 } }
local function unary(name, make)
  return function(check)
    for _, shape in ipairs(shapes) do check(method(name), { (make or random)(unpack(shape)) }) end
    check(function(x) return x:transpose()[name](x:transpose()) end, { (make or random)(3, 4) })
  end
end
local function binary(name, make_a, make_b)
  make_a, make_b = make_a or random, make_b or random
  return function(check)
    local f = function(a, b) return a[name](a, b) end
    check(f, { make_a(5, 3), make_b(5, 3) })
    check(f, { make_a(5, 3), make_b(3) })
    check(f, { make_a(2, 1, 3), make_b(4, 1) })
    check(f, { make_a(1), make_b(2, 3) })
  end
end
-- Two tensors whose elements are never close to each other.
local function apart(name)
  return function(check)
    check(function(a) return a[name](a, engine.full({ 5, 3 }, 0.013, "f64")) end, { spaced(5, 3) })
    check(function(a, b) return a[name](a, b) end,
      { spaced(5, 3), (spaced(3) * 1.7 + 0.111):keep() })
  end
end
local function reduction(name, make)
  return function(check)
    for _, d in ipairs { 1, 2, -1 } do check(method(name, d), { (make or random)(3, 4, 2) }) end
    check(method(name), { (make or random)(3, 5) })
    check(method(name, { 1, 3 }, true), { (make or random)(3, 2, 4) })
  end
end

local cases = {
  add = binary "add", sub = binary "sub", mul = binary "mul", div = binary("div", nil, positive),
  pow = binary("pow", positive, random),
  maximum = apart "maximum", minimum = apart "minimum",
  where = function(check)
    local c = engine.tensor({ { 1, 0, 1 }, { 0, 0, 1 } }, { dtype = "bool", keep = true })
    check(function(a, b) return c:where(a, b) end, { random(2, 3), random(2, 3) })
    check(function(a, b) return c:where(a, b) end, { random(3), random(2, 1) })
  end,
  affine = function(check) check(function(x) return x * 3 + 2 end, { random(4, 3) }) end,
  pow_scalar = function(check)
    check(function(x) return x ^ 3 end, { random(4, 3) })
    check(function(x) return x ^ -0.5 end, { positive(4, 3) })
  end,
  clamp = function(check) check(method("clamp", -0.7, 0.9), { spaced(4, 4) }) end,
  neg = unary "neg", abs = unary("abs", spaced), exp = unary "exp", log = unary("log", positive),
  sqrt = unary("sqrt", positive),
  rsqrt = unary("rsqrt", positive), sin = unary "sin", cos = unary "cos", tanh = unary "tanh",
  sigmoid = unary "sigmoid",
  log_sigmoid = unary "log_sigmoid", softplus = unary "softplus", relu = unary("relu", spaced),
  hardswish = unary("hardswish", spaced), gelu = unary "gelu", silu = unary "silu",
  gelu_tanh = function(check) check(method("gelu", "tanh"), { random(5, 7) }) end,
  swiglu = function(check)
    check(function(a, b) return a:swiglu(b) end, { random(3, 5), random(3, 5) })
  end,
  dropout = function(check)
    -- Every evaluation needs the same mask, so the generator's state is restored.
    check(function(x) engine.seed(3) return x:dropout(0.4) end, { random(7, 5) })
  end,
  cast = function(check)
    check(function(y) return y:to("f64") end, { random(2, 2) })
  end,
  contiguous = function(check)
    check(function(x) return x:transpose():contiguous() end, { random(3, 4) })
  end,
  reshape = function(check)
    check(method("view", 6, -1), { random(3, 4) })
    check(function(x) return x:transpose():view(2, 6) end, { random(3, 4) })
  end,
  permute = function(check) check(method("permute", 3, 1, 2), { random(2, 3, 4) }) end,
  expand = function(check) check(method("expand", 4, 3, 2), { random(3, 1) }) end,
  slice = function(check)
    check(method("slice", 2, 2, 7, 3), { random(3, 8) })
    check(method("slice", 1, -2, -1), { random(5, 2) })
  end,
  split = function(check)
    check(function(x) local a, b, c = x:split({ 1, 3, 2 }, 2) return a, c, b end, { random(2, 6) })
    check(function(x) local _, b = x:split({ 2, 4 }, -1) return b end, { random(3, 6) })
  end,
  concat = function(check)
    check(function(a, b, c) return engine.concat({ a, b, c }, 2) end,
      { random(2, 1), random(2, 3), random(2, 2) })
  end,
  gather = function(check)
    check(function(x) return x:gather(2, ids { { 0, 2, 2 }, { 1, 1, 0 } }) end, { random(2, 4) })
  end,
  index_select = function(check)
    check(function(x) return x:index_select(1, ids { 3, 0, 3 }) end, { random(4, 3) })
    check(function(x) return x:index_select(2, ids { 1, 1 }) end, { random(2, 3, 2) })
  end,
  embedding = function(check)
    check(function(w) return w:embedding(ids { { 1, 4 }, { 4, 0 } }) end, { random(5, 3) })
  end,
  topk = function(check) check(function(x) return (x:topk(2)) end, { spaced(3, 5) }) end,
  sum = reduction "sum", mean = reduction "mean", max = reduction("max", spaced),
  min = reduction("min", spaced),
  softmax = unary "softmax", log_softmax = unary "log_softmax",
  logsumexp = function(check) check(method "logsumexp", { random(3, 5) }) end,
  matmul = function(check)
    local function f(ta, tb) return function(a, b) return a:matmul(b, ta, tb) end end
    check(f(), { random(3, 4), random(4, 2) })
    check(f(true), { random(4, 3), random(4, 2) })
    check(f(false, true), { random(3, 4), random(2, 4) })
    check(f(true, true), { random(4, 3), random(2, 4) })
    check(f(), { random(2, 3, 4), random(2, 4, 2) })
    check(f(), { random(2, 3, 4), random(4, 2) })
    check(f(true, true), { random(1, 4, 3), random(5, 2, 4) })
    check(function(a, b) return a:matmul(b) end, { random(4), random(4, 3) })
    check(function(a, b) return a:transpose():matmul(b) end, { random(4, 3), random(4, 2) })
  end,
  linear = function(check)
    check(function(x, w, b) return x:linear(w, b) end, { random(2, 3, 5), random(4, 5), random(4) })
    check(function(x, w) return x:linear(w) end, { random(3, 5), random(4, 5) })
    check(function(x, w, b) return x:transpose():linear(w, b) end,
      { random(5, 3), random(4, 5), random(4) })
  end,
  mlp_gelu = function(check)
    check(function(x, a, b, c, d) return x:mlp_gelu(a, b, c, d) end,
      { random(2, 3, 5), random(7, 5), random(7), random(4, 7), random(4) })
    check(function(x, a, c) return x:mlp_gelu(a, nil, c) end,
      { random(3, 5), random(7, 5), random(4, 7) })
    check(function(x, a, c, d) return x:transpose():mlp_gelu(a, nil, c, d) end,
      { random(5, 3), random(7, 5), random(4, 7), random(4) })
  end,
  layer_norm = function(check)
    check(function(x, w, b) return x:layer_norm(w, b) end, { random(3, 7), random(7), random(7) })
    check(function(x, w) return x:layer_norm(w) end, { random(2, 2, 5), random(5) })
    check(function(x) return x:layer_norm() end, { random(2, 5) })
  end,
  rms_norm = function(check)
    check(function(x, w) return x:rms_norm(w) end, { random(3, 7), random(7) })
    check(function(x) return x:rms_norm() end, { random(3, 7) })
  end,
  add_layer_norm = function(check)
    check(function(x, r, w, b) return x:add_layer_norm(r, w, b) end,
      { random(3, 7), random(3, 7), random(7), random(7) })
    check(function(x, r, w) return (x:add_layer_norm(r, w)) end,
      { random(2, 2, 5), random(2, 2, 5), random(5) })
    check(function(x, r) return select(2, x:add_layer_norm(r)) end, { random(2, 5), random(2, 5) })
    check(function(x, w) return x:transpose():add_layer_norm(x:transpose() * 2, w) end,
      { random(5, 3), random(5) })
  end,
  add_rms_norm = function(check)
    check(function(x, r, w) return x:add_rms_norm(r, w) end,
      { random(3, 7), random(3, 7), random(7) })
    check(function(x, r) return (x:add_rms_norm(r)) end, { random(3, 7), random(3, 7) })
    check(function(x) return x:add_rms_norm(x) end, { random(3, 7) })
  end,
  conv2d = function(check)
    local function f(options)
      return function(x, w, b) return x:conv2d(w, b, options) end
    end
    check(f(), { random(2, 3, 4, 5), random(2, 3, 3, 2), random(2) })
    check(f { stride = { 2, 1 }, padding = { 1, 2 }, dilation = { 1, 2 }, groups = 2 },
      { random(1, 4, 5, 4), random(6, 2, 3, 2) })
    check(function(x, w, b) return x:conv1d(w, b, { padding = 1, stride = 2 }) end,
      { random(2, 3, 7), random(4, 3, 3), random(4) })
  end,
  max_pool2d = function(check)
    check(method("max_pool2d", 3, { stride = 2, padding = 1 }), { spaced(2, 2, 5, 6) })
    check(method("max_pool1d", 2), { spaced(2, 3, 7) })
  end,
  avg_pool2d = function(check)
    check(method("avg_pool2d", 3, { stride = 2, padding = 1 }), { random(2, 2, 5, 6) })
    check(method("avg_pool2d", { 2, 3 }, { padding = 1, count_include_pad = false }),
      { random(1, 2, 5, 6) })
    check(method("avg_pool1d", 2), { random(2, 3, 7) })
    check(method("adaptive_avg_pool2d", { 2, 3 }), { random(2, 2, 5, 4) })
    check(method("adaptive_avg_pool1d", 3), { random(2, 2, 4) })
  end,
  batch_norm = function(check)
    check(function(x, w, b) return (x:batch_norm(w, b)) end,
      { random(2, 3, 2, 2), random(3), random(3) })
    check(function(x, w) return (x:batch_norm(w)) end, { random(5, 3), random(3) })
    local mean, variance = random(3), positive(3)
    check(function(x, w, b) return x:batch_norm(w, b, { mean = mean, variance = variance }) end,
      { random(2, 3, 4), random(3), random(3) })
  end,
  group_norm = function(check)
    check(function(x, w, b) return x:group_norm(2, w, b) end,
      { random(2, 4, 3, 2), random(4), random(4) })
    check(function(x) return x:group_norm(1) end, { random(2, 3, 4) })
  end,
  attention = function(check)
    local function f(options)
      return function(q, k, v) return (engine.attention(q, k, v, options)) end
    end
    check(f { causal = true }, { random(2, 5, 2, 3), random(2, 5, 2, 3), random(2, 5, 2, 3) })
    check(f {}, { random(1, 3, 4, 2), random(1, 5, 2, 2), random(1, 5, 2, 2) })
    check(f { causal = true, scale = 0.3 }, { random(1, 3, 2, 2), random(1, 5, 1, 2),
      random(1, 5, 1, 2) })
  end,
  rope = function(check)
    check(method("rope", { position = 3 }), { random(1, 3, 2, 4) })
    check(method("rope", { interleaved = true, base = 100 }), { random(2, 3, 1, 6) })
    check(method("rope", { factor = 8, context = 16, low = 1, high = 4 }), { random(2, 3, 1, 8) })
    check(method("rope", { factor = 8, low = 1, high = 3 }), { random(1, 3, 2, 8) })
  end,
  cross_entropy = function(check)
    for _, options in ipairs { {}, { label_smoothing = 0.1 },
      { reduction = "sum", ignore_index = 1 }, { reduction = "none" }, { z_loss = 0.1 },
      { soft_cap = 1.5 },
      { soft_cap = 2, z_loss = 0.1, label_smoothing = 0.1, ignore_index = 1 } } do
      check(function(x) return engine.cross_entropy(x, ids { 0, 4, 1 }, options) end,
        { random(3, 5) })
    end
  end,
  mse = function(check) check(engine.mse, { random(3, 4), random(3, 4) }) end,
}
-- FP8 layers outside an FP8 recipe; spec/fp8/ compares their FP8 gradients with f32 gradients.
local SITE = 1
cases.fp8_linear = function(check)
  check(function(x, w, b) return x:linear(w, b, SITE) end,
    { random(3, 5), random(4, 5), random(4) })
  check(function(x, u, w, b) return x:swiglu_linear(u, w, b, SITE) end,
    { random(3, 5), random(3, 5), random(4, 5), random(4) })
end
cases.fp8_swiglu = function(check)
  check(function(a, b) return a:swiglu(b, SITE) end, { random(3, 5), random(3, 5) })
end
cases.fp8_attention = function(check)
  local function f(q, k, v)
    return (engine.attention(q, k, v, { causal = true, scale = 0.3, site = SITE }))
  end
  check(f, { random(1, 3, 2, 2), random(1, 5, 1, 2), random(1, 5, 1, 2) })
end

local function has_gradient(op)
  return M_ffi.ffi.string(M_ffi.C.eng_op_describe(op).gradient) ~= "none"
end

return { cases = cases, random = random, has_gradient = has_gradient }
