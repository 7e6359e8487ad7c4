-- A loss scale that never changes.
return {
  name = "static",
  doc  = "A fixed loss scale; skips steps that overflow unless skip_on_overflow=false.",

  options = {
    loss_scale       = 1,      -- multiplies the loss; a power of two loses no bits
    skip_on_overflow = true,   -- false, with mode=sync: the update happens even with inf or nan
  },

  init = function(options)
    return { scale = check.positive(options, "loss_scale") }
  end,

  decide = function(state, record, options)
    if record.overflow and not options.skip_on_overflow then
      return { scale = state.scale, action = "step",
        reason = "overflow, but skip_on_overflow=false" }
    end
    return state.scale
  end,

  migrate = function(_, _, options)
    return { scale = options.loss_scale }    -- ignores the old policy's scale
  end,
}
