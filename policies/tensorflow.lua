-- Dynamic loss scaling of TensorFlow's DynamicLossScale (and tf_keras' LossScaleOptimizer), number
-- for number: the scale is a float32, never below 1, and growth that would reach infinity does not
-- happen.
return {
  name = "tensorflow",
  doc  = "TensorFlow's DynamicLossScale: grows after increment_period good steps, never below 1.",

  options = {
    initial_loss_scale = 2^15,
    increment_period   = 2000,   -- good steps in a row until the scale grows
    multiplier         = 2,      -- growth multiplies, overflow divides
    strict             = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = check.float32(options, "initial_loss_scale")
    check.factor(options, "multiplier")
    check.steps(options, "increment_period")
    check.count(options, "increment_period")
    check.trap(options, scale < 1, "initial_loss_scale = " .. scale
      .. " is below 1, the smallest scale, so an overflow would raise it")
    return { scale = scale, good_steps = 0 }
  end,

  decide = function(state, record, options)
    local scale, multiplier = state.scale, math.f32(options.multiplier)
    if record.overflow then
      state.good_steps = 0
      return back_off(state, math.max(math.f32(scale / multiplier), 1))
    end
    state.good_steps = state.good_steps + 1
    if state.good_steps < options.increment_period then return scale end
    state.good_steps = 0
    return grow(state, math.f32(scale * multiplier),
      options.increment_period .. " good steps in a row")
  end,
}
