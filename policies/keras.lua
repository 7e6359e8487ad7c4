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
    local scale, steps = math.f32(options.initial_scale), options.dynamic_growth_steps
    if not (scale > 0 and scale < math.huge) then
      error("initial_scale must be a positive number that float32 can hold, got " .. options.initial_scale, 0)
    end
    if options.strict and (not (steps >= 1) or steps ~= math.floor(steps)) then
      error("dynamic_growth_steps = " .. steps .. " is never met by a whole number of steps, so the scale would never grow;"
        .. " strict=false accepts it", 0)
    end
    return { scale = scale, step_counter = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.step_counter = 0
      local smaller = math.f32(scale * 0.5)
      if smaller == 0 then
        return { scale = scale, action = "stop", reason = "the loss scale fell to " .. scale
          .. " and gradients still overflow: they are inf or nan for another reason than the scale"
          .. " (look at the first bad tensor, the learning rate, the data)" }
      end
      state.scale = smaller
      return { scale = smaller, reason = "overflow: scale " .. scale .. " -> " .. smaller }
    end
    if state.step_counter ~= options.dynamic_growth_steps - 1 then
      state.step_counter = state.step_counter + 1
      return scale
    end
    state.step_counter = 0
    local larger = math.f32(scale * 2)
    if larger == math.huge then
      if options.strict then return { scale = scale, reason = "growth would reach infinity: the scale stays" } end
      return { scale = scale, action = "stop", reason = "the loss scale would grow to infinity and stay there" }
    end
    state.scale = larger
    return { scale = larger, reason = options.dynamic_growth_steps .. " good in a row: scale " .. scale .. " -> " .. larger }
  end,
}
