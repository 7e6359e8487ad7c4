-- AdamW with moments in FP8 and COAT's dynamic range expansion (Xi et al. 2024, arXiv 2410.19313):
-- a moment takes 1.1 bytes an element. Let a group of 128 elements have the largest magnitude a and
-- the smallest nonzero magnitude b, and let
--   c = sqrt(a b)
--   k = floor(16 log2(448^2 / 2) / log2(a / b)) / 16
--   s = (a / c)^k / 448
-- An element x is stored as the e4m3 number sign(x) (|x| / c)^k / s. These numbers fill the
-- format's range. COAT does not define k for a / b near 1; here k is at most 16.5625. Called
-- through engine.optim.coat.
local steps = require "engine.optim.steps"
local tensor = require "engine.tensor.tensor"

local GROUP, LARGEST = 128, 448
local RANGE = math.log(LARGEST ^ 2 / 2)

local function groups_of(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return math.ceil(n / GROUP), n
end
local CODES = { dtype = "e4m3", shape = function(shape) return { groups_of(shape), GROUP } end }
-- The shape of a moment's scales, [groups x 3]: k, c and s of each group.
local function scales(shape) return { (groups_of(shape)), 3 } end

local function sign_of(x) return x:gt(0):to("f32") - x:lt(0):to("f32") end

-- Encodes a moment. Returns its codes (e4m3 numbers in an f32 tensor) and its scales.
local function encode(x)
  local groups, n = groups_of(x.shape)
  x = x:view(n)
  if groups * GROUP > n then
    x = tensor.concat({ x, x:slice(1, 1, 1):expand(groups * GROUP - n) * 0 }, 1)
  end
  x = x:view(groups, GROUP)
  local size = x:abs()
  local least = (size + size:eq(0):to("f32") * 1e38):min(-1, true):maximum(1e-30)
  local most = size:max(-1, true):maximum(1e-30)
  local binades = (most / least):log():maximum(math.log(2))
  local k = (binades:pow(-1) * (16 * RANGE)):to("i32"):to("f32") / 16
  local middle = most:sqrt() * least:minimum(most):sqrt()
  local s = (most / middle):pow(k) / LARGEST
  return sign_of(x) * (size / middle):pow(k) / s, tensor.concat({ k, middle, s }, 2)
end

-- Decodes a moment into the shape of `like`.
local function decode(codes, scale, like)
  local k, middle, s = scale:slice(2, 1, 1), scale:slice(2, 2, 2), scale:slice(2, 3, 3)
  local x = sign_of(codes) * (codes:abs() * s):pow(k:maximum(1 / 16):pow(-1)) * middle
  return x:view(-1):slice(1, 1, like.count):view(unpack(like.shape))
end

return {
  doc = "AdamW with moments in FP8 (COAT): 2.2 bytes of state an element instead of 8.",
  defaults = { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2 },
  buffers = { moment1 = CODES, moment2 = CODES, scale1 = scales, scale2 = scales },
  update = function(p, ctx)
    local own = { weight = p.weight, grad = p.grad, moment1 = decode(p.moment1, p.scale1, p.weight),
      moment2 = decode(p.moment2, p.scale2, p.weight) }
    steps.adamw(own, ctx, ctx.lr)
    p.weight = own.weight
    p.moment1, p.scale1 = encode(own.moment1)
    p.moment2, p.scale2 = encode(own.moment2)
  end,
}
