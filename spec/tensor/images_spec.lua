-- Convolution, pooling and norms of images as methods: golden values of PyTorch, the order of
-- elements in memory, messages. The kernels: spec/cpu/kernels/images.lua.
local engine = require "engine"

-- A tensor of multiples of 1/4 from -3/4 to 3/4, the same numbers on every call.
local function counted(...)
  local shape, n = { ... }, 1
  for _, size in ipairs(shape) do n = n * size end
  local list = {}
  for i = 1, n do list[i] = (i % 7 - 3) * (i % 2 == 0 and -1 or 1) / 4 end
  return engine.tensor(list):view(shape)
end

local function near(expected, x, tolerance)
  local values = x:to("f64"):view(-1):totable()
  assert.equal(#expected, #values)
  for i, v in ipairs(expected) do
    assert(math.abs(v - values[i]) <= tolerance,
      ("element %d: expected %.9g, got %.9g"):format(i, v, values[i]))
  end
end

describe("images", function()
  after_each(function() engine.end_step() end)

  it("have the values of PyTorch", function()
    local golden = require "spec.golden.images"
    local x, w, b = counted(2, 4, 5, 6), counted(6, 2, 3, 2), counted(6)
    local y = x:conv2d(w, b, { stride = { 2, 1 }, padding = { 1, 0 }, dilation = { 1, 2 },
      groups = 2 })
    near(golden.conv2d, y, 1e-6)
    near(golden.conv1d, counted(2, 3, 8):conv1d(counted(4, 3, 3), nil, { padding = 1 }), 1e-6)
    near(golden.max_pool2d, x:max_pool2d(3, { stride = 2, padding = 1 }), 0)
    near(golden.avg_pool2d, x:avg_pool2d({ 2, 3 }, { padding = 1 }), 1e-6)
    near(golden.adaptive, x:adaptive_avg_pool2d { 2, 4 }, 1e-6)
    local normed, mean, variance = x:batch_norm(counted(4), counted(4))
    near(golden.batch_norm, normed, 1e-5)
    near(golden.mean, mean, 1e-6)
    near(golden.variance, variance, 1e-6)
    near(golden.group_norm, x:group_norm(2, counted(4), counted(4)), 1e-5)
  end)

  it("have an accurate variance where the mean is far from 0", function()
    for _, far in ipairs { 1e3, 1e5, 1e7 } do
      local x = engine.randn(2000, 3, 2) + far
      local _, mean, variance = x:batch_norm()
      local _, wide_mean, wide_variance = x:to("f64"):batch_norm()
      assert.same(wide_mean:to("f32"):totable(), mean:totable())
      local difference = (variance:to "f64" - wide_variance) / wide_variance
      assert.is_true(difference:abs():max():item() < 1e-6)
    end
  end)

  it("stay channels last in memory through elementwise operations", function()
    local function strides_agree(a, b)
      return not a:is_contiguous() and a:permute(1, 3, 4, 2):is_contiguous()
        and b:permute(1, 3, 4, 2):is_contiguous()
    end
    local x, w = engine.randn(2, 3, 6, 5), engine.randn(4, 3, 3, 3):requires_grad(true)
    local y = x:conv2d(w)
    local plain = y:contiguous()
    for _, f in ipairs { function(t) return t:relu() end, function(t) return t * 2 + 1 end,
      function(t) return t + t end, function(t) return t:to("f64") end,
      function(t) return t:gelu() - t end, function(t) return t:clamp(-1, 1) end } do
      local a, b = f(y), f(plain)
      assert.is_true(strides_agree(y, a))
      assert.is_true(b:is_contiguous())
      near(b:to("f64"):view(-1):totable(), a, 0)
    end
    (y:relu() + y):square():sum():backward()
    local got = w.grad:view(-1):totable()
    w:requires_grad(false)
    local v = w:detach():keep():requires_grad(true)
    local z = x:conv2d(v):contiguous();
    (z:relu() + z):square():sum():backward()
    near(v.grad:view(-1):totable(), engine.tensor(got), 1e-3)
  end)

  it("round once in low precision and run in the compute dtype under autocast", function()
    local x, w = engine.randn(2, 8, 6, 5), engine.randn(4, 8, 3, 3)
    for precision, dtype in pairs { fp16 = "f16", bf16 = "bf16" } do
      engine.autocast(precision, function()
        assert.equal(dtype, x:conv2d(w).dtype)
        assert.equal("f32", (x:batch_norm()).dtype)
        assert.equal(dtype, (x:to(dtype):batch_norm(engine.ones(8))).dtype)
        assert.equal(dtype, x:to(dtype):max_pool2d(2).dtype)
        assert.equal("f32", x:avg_pool2d(2).dtype)
      end)
      local low, weight = x:to(dtype), w:to(dtype)
      local want = low:to("f64"):conv2d(weight:to("f64")):to(dtype):to("f64")
      local apart = (low:conv2d(weight):to("f64") - want):abs():max():item()
      assert(apart <= want:abs():max():item() * (dtype == "f16" and 2 ^ -10 or 2 ^ -7))
    end
  end)

  it("say what they expect", function()
    local x = engine.zeros(2, 3, 5, 5)
    local function fails(pattern, f, ...)
      local good, message = pcall(f, ...)
      assert.is_false(good)
      assert.matches(pattern, message)
    end
    fails("conv2d: expected images %[N x C x H x W%], got %[3 x 5%]", function()
      engine.zeros(3, 5):conv2d(x)
    end)
    fails("expected a weight %[O x 3/groups x KH x KW%].*got %[4 x 2 x 3 x 3%] and 1 groups",
      x.conv2d, x, engine.zeros(4, 2, 3, 3))
    fails("a kernel of size 7, dilated by 1, does not fit into 5 pixels with a padding of 0",
      x.conv2d, x, engine.zeros(4, 3, 7, 7))
    fails("unknown option 'strides'", x.conv2d, x, engine.zeros(4, 3, 3, 3), nil, { strides = 2 })
    fails("max_pool2d: expected a padding of at most half the kernel size 2, got 2", x.max_pool2d,
      x, 2, { padding = 2 })
    fails("expected a number of groups that divides the 3 channels, got 2", x.group_norm, x, 2)
    fails("expected a mean and a variance, or neither; got only a mean", x.batch_norm, x, nil, nil,
      { mean = engine.zeros(3) })
  end)
end)
