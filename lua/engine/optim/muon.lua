-- Muon (Keller Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum, made orthogonal by
-- Newton-Schulz steps. The rules and defaults are those of torch.optim.Muon of PyTorch 2.15. Muon
-- updates matrices, except embeddings and groups with adamw = true. AdamW updates everything else,
-- at the learning rate lr * adamw_lr_mul. Called through engine.optim.muon.
local steps = require "engine.optim.steps"

-- Value of the option adjust_lr -> the factor on the learning rate of a matrix [rows x columns].
local ADJUST = {
  original = function(rows, columns) return math.sqrt(math.max(1, rows / columns)) end,
  match_rms_adamw = function(rows, columns) return 0.2 * math.sqrt(math.max(rows, columns)) end,
  spectral_unclamped = function(rows, columns) return math.sqrt(rows / columns) end,
  none = function() return 1 end,
}

local function by_muon(shape, p, options)
  return #shape == 2 and p.role ~= "embedding" and not options.adamw
end
local function if_muon(shape, p, options) return by_muon(shape, p, options) and shape or nil end
local function if_adamw(shape, p, options)
  return not by_muon(shape, p, options) and shape or nil
end

-- Approximates the semi-orthogonal matrix nearest to g [n x m]: every singular value becomes about
-- 1. Products run in ns_dtype and accumulate in f32.
local function orthogonal(g, ctx)
  local dtype, tall = ctx.ns_dtype, g:size(1) > g:size(2)
  local x = g:to(dtype)
  if tall then x = x:transpose():contiguous() end
  x = (x:to("f32") / x:norm():maximum(ctx.ns_eps)):to(dtype)
  for _ = 1, ctx.ns_steps do
    local gram = x:matmul(x, false, true)
    local update = (gram:to("f32") * ctx.ns_b + gram:matmul(gram):to("f32") * ctx.ns_c):to(dtype)
    x = (x:to("f32") * ctx.ns_a + update:matmul(x):to("f32")):to(dtype)
  end
  x = x:to("f32")
  return tall and x:transpose() or x
end

local function muon(p, ctx)
  p.momentum = steps.lerp(p.momentum, p.grad, 1 - ctx.momentum)
  local g = ctx.nesterov and steps.lerp(p.grad, p.momentum, ctx.momentum) or p.momentum
  local lr = ctx.lr * ADJUST[ctx.adjust_lr](p.grad:size())
  p.weight = p.weight * (1 - ctx.lr * ctx.weight_decay) - orthogonal(g, ctx) * lr
end

return {
  doc = "Muon for matrices, AdamW for the rest.",
  defaults = { lr = 1e-3, weight_decay = 0.1, momentum = 0.95, nesterov = true,
    ns_steps = 5, ns_dtype = "bf16", ns_a = 3.4445, ns_b = -4.7750, ns_c = 2.0315, ns_eps = 1e-7,
    adjust_lr = "original", adamw = false, adamw_lr_mul = 1, beta1 = 0.9, beta2 = 0.999,
    eps = 1e-8 },
  buffers = { momentum = if_muon, moment1 = if_adamw, moment2 = if_adamw },
  check = function(o)
    local n = o.ns_steps
    if n % 1 ~= 0 or n < 0 or n > 99 then
      return "expected ns_steps to be a whole number from 0 to 99, got " .. n
    elseif o.ns_dtype ~= "f32" and o.ns_dtype ~= "bf16" then
      return ("expected ns_dtype to be f32 or bf16, got '%s'"):format(o.ns_dtype)
    elseif not ADJUST[o.adjust_lr] then
      return ("expected adjust_lr to be original, match_rms_adamw, spectral_unclamped or none, " ..
        "got '%s'"):format(o.adjust_lr)
    elseif o.momentum >= 1 then return "expected momentum to be in [0, 1), got " .. o.momentum
    elseif o.ns_eps <= 0 then return "expected ns_eps to be above 0, got " .. o.ns_eps
    elseif o.adamw_lr_mul < 0 then
      return "expected adamw_lr_mul to be 0 or more, got " .. o.adamw_lr_mul
    end
  end,
  update = function(p, ctx)
    if p.momentum then muon(p, ctx) else steps.adamw(p, ctx, ctx.lr * ctx.adamw_lr_mul) end
  end,
}
