-- Dynamic loss scaling of OpenSeq2Seq's BackoffScaler, number for number: starts at the largest
-- scale, grows at every step_window-th step after an overflow, and stays between scale_min and
-- scale_max. The scale is a float32.
return {
  name = "openseq2seq",
  doc  = "OpenSeq2Seq's BackoffScaler: starts at the largest scale and stays between two limits.",

  options = {
    scale_min   = 1,
    scale_max   = 2^14,
    step_factor = 2,       -- growth multiplies, overflow divides
    step_window = 2000,    -- good steps between two growths
    strict      = true,    -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local least, most = check.float32(options, "scale_min", "scale_max")
    if least > most then error("scale_min = " .. least .. " is above scale_max = " .. most, 0) end
    check.factor(options, "step_factor")
    check.steps(options, "step_window")
    check.count(options, "step_window")
    return { scale = most, iteration = 0, last_overflow_iteration = -1 }
  end,

  decide = function(state, record, options)
    local scale, factor, iteration = state.scale, math.f32(options.step_factor), state.iteration
    state.iteration = iteration + 1
    if record.overflow then
      state.last_overflow_iteration = iteration
      return back_off(state, math.max(math.f32(scale / factor), math.f32(options.scale_min)))
    end
    local since = iteration - state.last_overflow_iteration
    if math.fmod(since, options.step_window) ~= 0 then return scale end
    return grow(state, math.min(math.f32(scale * factor), math.f32(options.scale_max)),
      "window of " .. options.step_window .. " good steps")
  end,
}
