-- Stable-SPAM: elements of a tensor's gradient above M, a moving mean of the gradient's amax, are
-- multiplied by M / amax. Then the gradient is scaled to the norm m / sqrt(v), where m is a moving
-- mean of its norms and v a moving mean of their squares. Every `interval` updates the moments of
-- Adam become 0, and all bias corrections restart at 1. Source: Huang et al., Stable-SPAM (2025,
-- arXiv 2502.17055), and its code without the option total_T, a cosine decay of beta1 and gamma1.
-- Meant for the optimizers adam and adamw; a run with another optimizer does not refuse it.
--
-- As in the original, a reset keeps the moving means. Difference: steps that overflow are not
-- counted. Needs mode=sync; ZeRO and experts divided among ranks refuse it.
return {
  name  = "stable_spam",
  doc   = "Stable-SPAM: caps elements, scales norms, and resets Adam's moments now and then.",
  needs = { "amax", "norm", "tensors", "caps", "grad_norms", "reset_moments", "bias_step" },

  options = {
    gamma1          = 0.7,     -- decay of the moving mean of norms
    gamma2          = 0.9,     -- decay of the moving mean of their squares
    theta           = 0.999,   -- decay of the moving mean of the largest magnitudes
    interval        = 1000,    -- updates between resets; 0: no resets
    eps             = 1e-8,    -- added to sqrt(v)
    loss_scale      = 0,       -- a fixed loss scale (1 for bf16); 0: dynamic.lua's rule
    init_scale      = 2^16,
    growth_interval = 2000,    -- good steps in a row until the scale doubles
  },

  init = function(options)
    check.share(options, "gamma1", "gamma2", "theta")
    check.not_negative(options, "eps")
    check.whole(options, "interval", 0, 1e9)
    return { scale = check.rescale(options), good = 0, count = 0, step = 0, means = {} }
  end,

  decide = function(state, record, options)
    if record.overflow then return rescale(state, record, options) end
    local function mean(of, name, beta, x)
      of[name] = beta * of[name] + (1 - beta) * x
      return of[name] / (1 - beta ^ state.step)
    end
    local tensors = record.tensors or {}
    if not record.capped then
      state.count, state.step = state.count + 1, state.step + 1
      local caps = {}
      for name, tensor in pairs(tensors) do
        local means = state.means[name] or { max = 0, norm = 0, square = 0 }
        state.means[name] = means
        caps[name] = mean(means, "max", options.theta, tensor.amax)
      end
      return { scale = state.scale, caps = caps }
    end
    local verdict = rescale(state, record, options)
    verdict.grad_norms = {}
    for name, tensor in pairs(tensors) do
      local norm, means = tensor.norm, state.means[name]
      local first = mean(means, "norm", options.gamma1, norm)
      local second = mean(means, "square", options.gamma2, norm * norm)
      if norm > 0 then
        verdict.grad_norms[name] = first / (math.sqrt(second) + options.eps)
      end
    end
    if options.interval > 0 and state.count % options.interval == 0 then
      verdict.reset_moments, state.step = true, 1
    end
    verdict.bias_step = state.step
    return verdict
  end,
}
