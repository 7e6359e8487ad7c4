-- Dynamic loss scaling of Megatron-LM's DynamicGradScaler, number for number. The scale is a
-- float32. Hysteresis is the number of overflows until the scale backs off. Only growth of the
-- scale refills it; a good step does not. Difference: Megatron's scale reaches infinity if it grows
-- for long enough; here it keeps its last finite value, or with strict=false the run stops at that
-- step.
return {
  name = "megatron",
  doc  = "Megatron-LM's DynamicGradScaler: hysteresis that growth refills, a smallest scale.",

  options = {
    initial_scale   = 2^32,
    min_scale       = 1,
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 1000,   -- good steps in a row until the scale grows
    hysteresis      = 2,      -- overflows since the last growth until the scale backs off
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = check.float32(options, "initial_scale", "min_scale")
    check.factor(options, "growth_factor")
    check.share(options, "backoff_factor")
    check.count(options, "growth_interval")
    check.count(options, "hysteresis", "1 backs off at every overflow")
    check.floor(options, "min_scale", "initial_scale")
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
      return back_off(state,
        math.max(math.f32(scale * math.f32(options.backoff_factor)), math.f32(options.min_scale)))
    end
    state.growth_tracker = state.growth_tracker + 1
    if state.growth_tracker ~= options.growth_interval then return scale end
    state.growth_tracker = 0
    state.hysteresis_tracker = options.hysteresis
    return grow(state, math.f32(scale * math.f32(options.growth_factor)),
      options.growth_interval .. " good steps in a row", options)
  end,
}
