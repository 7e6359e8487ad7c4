-- Dynamic loss scaling of Keras 3's LossScaleOptimizer, number for number: doubles and halves, with
-- no smallest or largest scale. The scale is a float32. Differences: in Keras the scale can become
-- 0 or infinite and never recovers. Here the run stops before the scale becomes 0. A growth that
-- would make it infinite is left out or, with strict=false, stops the run.
return {
  name = "keras",
  doc  = "Keras 3's LossScaleOptimizer: doubles after dynamic_growth_steps good steps, no limits.",

  options = {
    initial_scale        = 2^15,
    dynamic_growth_steps = 2000,   -- good steps in a row until the scale grows
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
    return grow(state, math.f32(scale * 2), options.dynamic_growth_steps .. " good steps in a row",
      options)
  end,
}
