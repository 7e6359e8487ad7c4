-- Dynamic loss scaling of DeepMind's jmp.DynamicLossScale, number for number: the scale is a
-- float32, and growth that would reach infinity does not happen. Differences: jmp loses
-- min_loss_scale when the scaler passes through a jit; here the limit holds. With min_loss_scale =
-- 0, jmp's scale can fall to 0; here the run stops first.
return {
  name = "jmp",
  doc  = "jmp.DynamicLossScale: grows after `period` good steps in a row; has a smallest scale.",

  options = {
    loss_scale     = 2^15,   -- the first scale; jmp has no default, its examples use this
    period         = 2000,   -- good steps in a row until the scale grows
    factor         = 2,      -- growth multiplies, overflow divides
    min_loss_scale = 1,
    strict         = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = check.float32(options, "loss_scale")
    check.not_negative(options, "min_loss_scale")
    check.factor(options, "factor")
    if options.period == 0 then error("period must be 1 or more steps, got 0", 0) end
    check.count(options, "period")
    check.floor(options, "min_loss_scale", "loss_scale")
    return { scale = scale, counter = 0 }
  end,

  decide = function(state, record, options)
    local scale, factor = state.scale, math.f32(options.factor)
    if record.overflow then
      state.counter = 0
      return back_off(state, math.max(math.f32(options.min_loss_scale), math.f32(scale / factor)))
    end
    local due = state.counter == options.period - 1
    state.counter = math.fmod(state.counter + 1, options.period)
    if not due then return scale end
    return grow(state, math.f32(scale * factor), options.period .. " good steps in a row")
  end,
}
