-- LAMB (You et al. 2020, arXiv 1904.00962, version 3). The update of a tensor is Adam's, without
-- bias correction, plus weight decay. This sum is rescaled to the norm of the tensor's weights (at
-- most `limit`), unless one of the two norms is 0, and multiplied by the learning rate. Called
-- through engine.optim.lamb.
local steps = require "engine.optim.steps"

return {
  doc = "Adam with a trust ratio for each tensor.",
  defaults = { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 0, limit = 10 },
  buffers = { "moment1", "moment2" },
  check = function(o)
    return o.limit <= 0 and "expected limit to be above 0, got " .. o.limit or nil
  end,
  update = function(p, ctx)
    p.moment1 = p.moment1 * ctx.beta1 + p.grad * (1 - ctx.beta1)
    p.moment2 = steps.second(p.moment2, p.grad, ctx.beta2)
    local update = p.moment1 / (p.moment2:sqrt() + ctx.eps) + p.weight * ctx.weight_decay
    local size, norm = p.weight:norm():minimum(ctx.limit), update:norm()
    local trust = size:eq(0):where(1, norm:eq(0):where(1, size / (norm + ctx.eps)))
    p.weight = p.weight - update * (trust * ctx.lr)
  end,
}
