-- Formulas that the optimizers use. Where PyTorch has the formula, the order of operations is
-- PyTorch's, so that results agree up to rounding. Called by the other files of this folder and by
-- train/weight_averages.lua.
local M = {}

--- Returns a + w (b - a), computed from the nearer end, as torch.lerp does.
function M.lerp(a, b, w)
  if w < 0.5 then return a + (b - a) * w end
  return b - (b - a) * (1 - w)
end

--- Returns the next second moment, beta v + (1 - beta) g^2.
function M.second(v, g, beta) return v * beta + g * g * (1 - beta) end

--- Makes one AdamW step (Loshchilov and Hutter 2019) with the learning rate `lr` on the parameter
--- p, whose buffers are moment1 and moment2. The formula is that of the core's adamw.
function M.adamw(p, ctx, lr)
  local t = ctx.t
  p.moment1 = M.lerp(p.moment1, p.grad, 1 - ctx.beta1)
  p.moment2 = M.second(p.moment2, p.grad, ctx.beta2)
  local size = p.moment2:sqrt() / math.sqrt(1 - ctx.beta2 ^ t) + ctx.eps
  p.weight = p.weight * (1 - lr * ctx.weight_decay) - p.moment1 * (lr / (1 - ctx.beta1 ^ t)) / size
end

--- Returns the root mean square of x as a tensor of one element.
function M.rms(x) return (x * x):mean():sqrt() end

return M
