-- Dynamic loss scaling of PyTorch's GradScaler, number for number: the scale is a float32, every
-- overflow restarts the count of good steps, and growth that would reach infinity does not happen.
-- Difference: PyTorch's scale can underflow to zero and stay there; here the run stops.
return {
  name = "dynamic",
  doc  = "PyTorch's GradScaler: grows after growth_interval good steps in a row.",

  options = {
    init_scale      = 2^16,
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 2000,   -- good steps in a row until the scale grows
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = check.float32(options, "init_scale")
    check.factor(options, "growth_factor")
    check.share(options, "backoff_factor")
    check.count(options, "growth_interval")
    return { scale = scale, growth_tracker = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.growth_tracker = 0
      return back_off(state, math.f32(scale * options.backoff_factor))
    end
    local tracker = state.growth_tracker + 1
    if tracker ~= options.growth_interval then
      state.growth_tracker = tracker
      return scale
    end
    state.growth_tracker = 0
    return grow(state, math.f32(scale * options.growth_factor), tracker .. " good steps in a row")
  end,
}
