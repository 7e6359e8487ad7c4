-- Dynamic loss scaling of NeMo's GradScaler and of the Apex kernel update_scale_hysteresis that it
-- calls, number for number: PyTorch's GradScaler with a hysteresis that every good step refills.
-- The scale is a float32. Differences: where NeMo's scale would become 0 permanently, the run
-- stops. NeMo's checkpoints lose the hysteresis through a misspelt name; here a resumed run
-- continues as if it had not been interrupted.
return {
  name = "nemo",
  doc  = "NeMo's GradScaler: PyTorch's with hysteresis that every good step refills.",

  options = {
    init_scale      = 2^16,
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 2000,   -- good steps in a row until the scale grows
    hysteresis      = 1,      -- overflows in a row until the scale backs off
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = check.float32(options, "init_scale")
    check.factor(options, "growth_factor")
    check.share(options, "backoff_factor")
    check.count(options, "growth_interval")
    check.count(options, "hysteresis", "1 backs off at every overflow")
    return { scale = scale, growth_tracker = 0, hysteresis_tracker = options.hysteresis }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.growth_tracker = 0
      state.hysteresis_tracker = state.hysteresis_tracker - 1
      if state.hysteresis_tracker > 0 then
        return { scale = scale,
          reason = "overflow: hysteresis " .. state.hysteresis_tracker + 1 .. " -> "
          .. state.hysteresis_tracker .. ", scale stays " .. scale }
      end
      return back_off(state, math.f32(scale * options.backoff_factor))
    end
    state.hysteresis_tracker = options.hysteresis
    state.growth_tracker = state.growth_tracker + 1
    if state.growth_tracker ~= options.growth_interval then return scale end
    state.growth_tracker = 0
    return grow(state, math.f32(scale * options.growth_factor),
      options.growth_interval .. " good steps in a row")
  end,
}
