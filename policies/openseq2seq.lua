-- Dynamic loss scaling as OpenSeq2Seq's BackoffScaler does it, number for number: starts at the largest scale, grows at every
-- step_window-th step after an overflow, stays between scale_min and scale_max. The scale is a float32.
return {
  name = "openseq2seq",
  doc  = "OpenSeq2Seq's BackoffScaler: starts at the largest scale, a window of good steps, limits on both sides.",

  options = {
    scale_min   = 1,
    scale_max   = 2^14,
    step_factor = 2,       -- growth multiplies, overflow divides
    step_window = 2000,    -- good steps
    strict      = true,    -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local least, most, window = math.f32(options.scale_min), math.f32(options.scale_max), options.step_window
    need(least > 0 and least < math.huge, "scale_min must be a positive number that float32 can hold, got " .. options.scale_min)
    need(most > 0 and most < math.huge, "scale_max must be a positive number that float32 can hold, got " .. options.scale_max)
    need(least <= most, "scale_min = " .. least .. " is above scale_max = " .. most)
    need(options.step_factor > 1 and options.step_factor < math.huge,
      "step_factor must be greater than 1 and finite, got " .. options.step_factor)
    need(window > 0, "step_window must be a positive number of steps, got " .. window)
    trap(window ~= math.floor(window) or window == math.huge, "step_window = " .. window .. " is no whole number of steps")
    return { scale = most, iteration = 0, last_overflow_iteration = -1 }
  end,

  decide = function(state, record, options)
    local scale, factor, reason = state.scale, math.f32(options.step_factor), nil
    if record.overflow then
      state.last_overflow_iteration = state.iteration
      state.scale = math.max(math.f32(scale / factor), math.f32(options.scale_min))
      reason = scale == state.scale and "overflow at the smallest scale " .. scale or "overflow: scale " .. scale .. " -> " .. state.scale
    elseif (state.iteration - state.last_overflow_iteration) % options.step_window == 0 then
      state.scale = math.min(math.f32(scale * factor), math.f32(options.scale_max))
      if state.scale ~= scale then reason = "window of " .. options.step_window .. " good: scale " .. scale .. " -> " .. state.scale end
    end
    state.iteration = state.iteration + 1
    return { scale = state.scale, reason = reason }
  end,
}
