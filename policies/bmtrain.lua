-- Dynamic loss scaling of BMTrain's OptimManager, number for number: grows after loss_scale_steps
-- good steps in a row. An overflow at the smallest scale, min_loss_scale, does not reset the count
-- of good steps. The scale is a double. Difference: BMTrain's scale can reach infinity; here it
-- keeps its last finite value, or with strict=false the run stops at that step.
return {
  name = "bmtrain",
  doc  = "BMTrain's OptimManager: overflows at the smallest scale do not reset the window.",

  options = {
    loss_scale        = 2^20,   -- the first scale; BMTrain has no default, its examples use this
    loss_scale_factor = 2,      -- growth multiplies, overflow divides
    loss_scale_steps  = 1024,   -- good steps in a row until the scale grows
    min_loss_scale    = 1,
    strict            = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local init = check.positive(options, "loss_scale", "min_loss_scale")
    check.factor(options, "loss_scale_factor")
    check.steps(options, "loss_scale_steps")
    check.count(options, "loss_scale_steps")
    check.trap(options, options.min_loss_scale > init,
      "min_loss_scale = " .. options.min_loss_scale .. " is above loss_scale = " .. init
      .. ", so the scale could never fall; lower min_loss_scale")
    return { scale = init, steps_since_last_scale = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      if scale <= options.min_loss_scale then
        return { scale = scale, reason = "overflow at the smallest scale " .. scale }
      end
      state.steps_since_last_scale = 0
      return back_off(state, scale / options.loss_scale_factor)
    end
    state.steps_since_last_scale = state.steps_since_last_scale + 1
    if state.steps_since_last_scale < options.loss_scale_steps then return scale end
    state.steps_since_last_scale = 0
    return grow(state, scale * options.loss_scale_factor,
      options.loss_scale_steps .. " good steps in a row", options)
  end,
}
