-- Dynamic loss scaling as Keras 3's LossScaleOptimizer does it, number for number: doubles, halves, no smallest scale, no look at
-- infinity. The scale is a float32.
-- There the scale can become 0, or infinite, for ever; here the run stops before it becomes 0, and infinity is
-- left out (with strict=false the run stops there, too).
return {
  name = "keras",
  doc  = "Keras 3's LossScaleOptimizer: double after dynamic_growth_steps good steps in a row, halve on overflow.",

  options = {
    initial_scale        = 2^15,
    dynamic_growth_steps = 2000,   -- good steps in a row
    strict               = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = check.float32(options, "initial_scale")
    check.count(options, "dynamic_growth_steps")
    return { scale = scale, step_counter = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.step_counter = 0
      return back_off(state, math.f32(scale * 0.5))
    end
    if state.step_counter ~= options.dynamic_growth_steps - 1 then
      state.step_counter = state.step_counter + 1
      return scale
    end
    state.step_counter = 0
    return grow(state, math.f32(scale * 2), options.dynamic_growth_steps .. " good in a row", options)
  end,
}
