-- Dynamic loss scaling of ColossalAI's DynamicGradScaler, number for number: Megatron's rule with
-- an optional largest and an optional smallest scale. The scale is a float32. Differences:
-- ColossalAI's checkpoints lose its counters; here a resumed run continues as if it had not been
-- interrupted. Without min_scale ColossalAI's scale can fall to 0; here the run stops first.
-- Without max_scale it can reach infinity; here it keeps its last finite value, or with
-- strict=false the run stops at that step.
return {
  name = "colossalai",
  doc  = "ColossalAI's DynamicGradScaler: hysteresis that growth refills, optional scale limits.",

  options = {
    initial_scale   = 2^16,
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 1000,   -- good steps in a row until the scale grows
    min_scale       = 0,      -- 0: no limit. ColossalAI's own fp16 plug-in sets 1
    max_scale       = 0,      -- 0: no limit. ColossalAI's own fp16 plug-in sets 2^32
    hysteresis      = 2,      -- overflows since the last growth until the scale backs off
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = check.float32(options, "initial_scale")
    check.not_negative(options, "min_scale")
    check.expect(options, options.max_scale >= 0, "max_scale >= 0")
    check.factor(options, "growth_factor")
    check.share(options, "backoff_factor")
    check.count(options, "growth_interval")
    check.count(options, "hysteresis", "1 backs off at every overflow")
    check.floor(options, "min_scale", "initial_scale")
    check.trap(options, options.max_scale ~= 0 and options.max_scale < scale,
      "max_scale = " .. options.max_scale .. " is below initial_scale = " .. scale
      .. ", so growth would lower the scale; raise max_scale")
    return { scale = scale, growth_step = 0, hysteresis_step = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.hysteresis_step = state.hysteresis_step + 1
      state.growth_step = 0
      if state.hysteresis_step < options.hysteresis then
        return { scale = scale, reason = "overflow " .. state.hysteresis_step .. " of "
          .. options.hysteresis .. ", scale stays " .. scale }
      end
      local smaller = math.f32(scale * math.f32(options.backoff_factor))
      if options.min_scale ~= 0 then smaller = math.max(smaller, math.f32(options.min_scale)) end
      return back_off(state, smaller)
    end
    state.growth_step = state.growth_step + 1
    if state.growth_step ~= options.growth_interval then return scale end
    state.growth_step = 0
    state.hysteresis_step = 0
    local larger = math.f32(scale * math.f32(options.growth_factor))
    if options.max_scale ~= 0 then larger = math.min(larger, math.f32(options.max_scale)) end
    return grow(state, larger, options.growth_interval .. " good steps in a row", options)
  end,
}
