-- AdaGC: clips each tensor's gradient against a moving mean of its own clipped norms. In the first
-- warmup_steps - 1 updates the global norm is limited to lambda_abs, and each tensor's mean is the
-- smallest norm that the tensor has had under this limit. Afterwards a tensor's norm is limited to
-- lambda_rel times its mean, and the mean follows the clipped norm. Source: Wang et al., AdaGC
-- (2025, arXiv 2502.11034), and the class AdaGC of pytorch_optimizer. Needs mode=sync.
--
-- Differences: steps that overflow change neither the means nor the count. A norm of 0 does not
-- change a mean; in the original's warm-up it makes the mean 0, and the tensor is never updated
-- again.
return {
  name  = "adagc",
  doc   = "AdaGC: clips each tensor's gradient against a moving mean of its own norm.",
  needs = { "norm", "tensors", "clips" },

  options = {
    beta            = 0.98,    -- decay of the moving means
    lambda_abs      = 1,       -- largest global norm while warming up
    lambda_rel      = 1.05,    -- largest norm of a tensor, as a factor on its mean
    warmup_steps    = 100,     -- number of the first update after the warm-up
    eps             = 1e-8,    -- added to the global norm
    loss_scale      = 0,       -- a fixed loss scale (1 for bf16); 0: dynamic.lua's rule
    init_scale      = 2^16,
    growth_interval = 2000,    -- good steps in a row until the scale doubles
  },

  init = function(options)
    check.share(options, "beta")
    check.positive(options, "lambda_abs", "lambda_rel")
    check.not_negative(options, "warmup_steps", "eps")
    return { scale = check.rescale(options), good = 0, count = 0, means = {} }
  end,

  decide = function(state, record, options)
    local verdict = rescale(state, record, options)
    if record.overflow then return verdict end
    state.count = state.count + 1
    local warm = state.count < options.warmup_steps
    local factor = math.min(options.lambda_abs / (record.norm + options.eps), 1)
    local means, clips, clipped = state.means, {}, 0
    for name, tensor in pairs(record.tensors or {}) do
      local norm, mean = tensor.norm, means[name]
      if norm > 0 then
        local most = warm and norm * factor or mean and options.lambda_rel * mean or norm
        if most < norm then
          clips[name], norm, clipped = most, most, clipped + 1
        end
        if warm then means[name] = math.min(mean or norm, norm)
        else means[name] = options.beta * (mean or norm) + (1 - options.beta) * norm end
      end
    end
    verdict.clips = clips
    verdict.log = { clipped = clipped }
    return verdict
  end,
}
