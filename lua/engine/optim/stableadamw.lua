-- StableAdamW (Wortsman et al. 2023, arXiv 2304.13013): AdamW whose learning rate for a tensor is
-- divided by the RMS of g / sqrt(v) if this RMS exceeds 1, for the gradient g and the second moment
-- v. Rules and defaults are those of optimi 0.3.3, which puts the bias correction into the betas.
-- Called through engine.optim.stableadamw.
local steps = require "engine.optim.steps"

-- Returns the beta for update t (counted from 1). With these betas, a moment is a weighted average
-- of all values so far and needs no bias correction.
local function debiased(beta, t) return (beta ^ t - beta) / (beta ^ t - 1) end

return {
  doc = "AdamW with a limit on the RMS of each tensor's update.",
  defaults = { lr = 1e-3, beta1 = 0.9, beta2 = 0.99, eps = 1e-6, weight_decay = 1e-2 },
  buffers = { "moment1", "moment2" },
  update = function(p, ctx)
    p.moment1 = steps.lerp(p.moment1, p.grad, 1 - debiased(ctx.beta1, ctx.t))
    p.moment2 = steps.second(p.moment2, p.grad, debiased(ctx.beta2, ctx.t))
    local ratio = p.grad * p.grad / p.moment2:maximum(ctx.eps ^ 2)
    local lr = ctx.lr / ratio:mean():sqrt():maximum(1)
    local size = p.moment2:sqrt() + ctx.eps
    p.weight = p.weight * (1 - lr * ctx.weight_decay) - p.moment1 / size * lr
  end,
}
