-- Dynamic loss scaling of flax's DynamicScale, number for number. The count of good steps is tested
-- before the current step is counted, so growth takes growth_interval + 1 steps. The scale is a
-- float32. It grows up to the largest finite float32, which is not a power of two, and never falls
-- below minimum_scale.
return {
  name = "flax",
  doc  = "flax's DynamicScale: grows after growth_interval + 1 good steps in a row.",

  options = {
    scale           = 65536,      -- the first scale
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 2000,       -- good steps in a row until the scale grows, minus one
    minimum_scale   = 2^-126,     -- float32's smallest normal number
    strict          = true,       -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = check.float32(options, "scale", "minimum_scale")
    check.factor(options, "growth_factor")
    check.share(options, "backoff_factor")
    check.trap(options, not (options.growth_interval >= 0)
      or options.growth_interval ~= math.floor(options.growth_interval),
      "growth_interval must be a whole number of 0 or more, got " .. options.growth_interval)
    check.floor(options, "minimum_scale", "scale")
    return { scale = scale, fin_steps = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.fin_steps = 0
      return back_off(state, math.max(math.f32(scale * math.f32(options.backoff_factor)),
        math.f32(options.minimum_scale)))
    end
    if state.fin_steps ~= options.growth_interval then
      state.fin_steps = state.fin_steps + 1
      return scale
    end
    state.fin_steps = 0
    local largest = (2 - 2^-23) * 2^127
    return grow(state, math.min(math.f32(scale * math.f32(options.growth_factor)), largest),
      options.growth_interval + 1 .. " good steps in a row")
  end,
}
