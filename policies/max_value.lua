-- Max-value scaling: the scale follows target / amax, so that the largest stored gradient is near
-- `target`, by default an octave below fp16's largest number. Source: Micikevicius et al., Mixed
-- Precision Training (2018), section 3.2, made online: a moving mean of target / amax, then limits
-- on the change per step.
--
-- The mean looks back over some 1 / (1 - decay) steps and begins at the first target / amax. In one
-- step, the scale changes by the factor `growth` or `backoff` at most. A single large gradient
-- hardly moves the mean. A single tiny gradient can raise the mean so far that the scale grows
-- until an overflow, which lowers the mean to the new scale. With limit=before, the limits apply to
-- each target / amax, and the mean is the scale itself. Then, with the default decay and growth, no
-- step grows the scale by more than 1 %: a tiny gradient does no harm, but a scale far from its
-- target takes hundreds of steps. An overflow lowers the target for a while, because amax does not
-- cover activation gradients, which can overflow while amax is on target.
return {
  name = "max_value",
  doc  = "Keeps the largest stored gradient near target by a moving mean of target / amax.",
  needs = { "amax" },

  options = {
    init_scale = 2^15,
    target     = 32768,   -- 49152 leaves less room; fp16 ends at 65504
    decay      = 0.99,    -- decay of the moving mean of target / amax
    limit      = "after", -- after: growth and backoff limit the scale; before: each target / amax
    growth     = 2,       -- largest growth in one step
    backoff    = 0.5,     -- factor at an overflow, and the largest cut in one step
    forgive    = 500,     -- good steps after which a lowered target rises again, by 1 / backoff
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    check.positive(options, "target")
    check.fraction(options, "decay")
    check.share(options, "backoff")
    check.count(options, "forgive")
    check.expect(options, options.growth > 1, "growth > 1")
    if options.limit ~= "after" and options.limit ~= "before" then
      error("limit must be after or before, got " .. options.limit, 0)
    end
    return { scale = check.limits(options), room = 1, good = 0 }
  end,

  decide = function(state, record, options)
    local scale, reason = state.scale, nil
    if record.overflow then
      state.room, state.good = math.max(state.room * options.backoff, 2^-10), 0
      scale, reason = scale * options.backoff, "overflow: the scale and the target of amax fall"
      state.mean = state.mean and math.min(state.mean, scale)
    else
      state.good = state.good + 1
      if state.good % options.forgive == 0 then
        state.room = math.min(1, state.room / options.backoff)
      end
      if record.amax > 0 then
        local wanted = options.target * state.room / record.amax
        local least, most = scale * options.backoff, scale * options.growth
        if options.limit == "before" then
          wanted = math.max(least, math.min(most, wanted))
          scale = options.decay * scale + (1 - options.decay) * wanted
        else
          wanted = math.max(options.min_scale, math.min(options.max_scale, wanted))
          state.mean = options.decay * (state.mean or wanted) + (1 - options.decay) * wanted
          scale = math.max(least, math.min(most, state.mean))
        end
      end
    end
    state.scale = math.max(options.min_scale, math.min(options.max_scale, scale))
    return { scale = state.scale, reason = reason, log = { mean = state.mean } }
  end,
}
