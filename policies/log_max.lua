-- Log-max scaling: log2(amax) is modelled as normally distributed. The scale brings amaxes of
-- 2^(mean + sigmas * deviation) to the format's limit. Source: OpenSeq2Seq's LogMax (Kuchaiev et
-- al., 2018), with two corrections: a step with amax = 0 is ignored, and an overflow counts as an
-- amax one octave above the format's limit, 2^(log_max + 1) / scale. In LogMax an overflow counts
-- as log2(amax) = 65536 and keeps the scale at its minimum for thousands of steps. Additions: an
-- overflow at least halves the scale, the scale does not grow during `warmup`, and its limits are
-- wider.
return {
  name = "log_max",
  doc  = "Treats log2(amax) as normally distributed; leaves room for its mean and some deviations.",
  needs = { "amax" },

  options = {
    init_scale = 2^14,
    log_max    = 16,      -- log2 of the format's largest number
    beta1      = 0.99,    -- decay of the moving mean of log2(amax)
    beta2      = 0.999,   -- decay of the moving mean of its square
    sigmas     = 3.09,    -- at 3.09, one step in a thousand would overflow
    warmup     = 10,      -- steps before the scale may grow
    min_scale  = 2^-10,
    max_scale  = 2^24,
  },

  init = function(options)
    check.positive(options, "log_max")
    check.not_negative(options, "sigmas", "warmup")
    check.fraction(options, "beta1", "beta2")
    return { scale = check.limits(options), mean = 0, square = 0, weight1 = 0, weight2 = 0,
      seen = 0 }
  end,

  decide = function(state, record, options)
    if not record.overflow and not (record.amax > 0) then return state.scale end
    local x = record.overflow and options.log_max + 1 - math.log(record.scale) / math.log(2)
      or math.log(record.amax) / math.log(2)
    local b1, b2 = options.beta1, options.beta2
    state.mean, state.weight1 = b1 * state.mean + (1 - b1) * x, b1 * state.weight1 + (1 - b1)
    state.square, state.weight2 = b2 * state.square + (1 - b2) * x * x,
      b2 * state.weight2 + (1 - b2)
    state.seen = state.seen + 1
    -- Corrects the bias from starting the moving means at zero.
    local mean = state.mean / state.weight1
    local sigma = math.sqrt(math.max(0, state.square / state.weight2 - mean * mean))
    local scale = 2^(options.log_max - mean - options.sigmas * sigma)
    if record.overflow then scale = math.min(scale, state.scale / 2)
    elseif state.seen <= options.warmup then scale = math.min(scale, state.scale) end
    state.scale = math.max(options.min_scale, math.min(options.max_scale, scale))
    return { scale = state.scale,
      reason = record.overflow and ("overflow: log2 amax %.1f +- %.1f"):format(mean, sigma) or nil }
  end,
}
