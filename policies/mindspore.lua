-- Dynamic loss scaling as MindSpore's DynamicLossScaleManager does it, number for number: the scale is a double, never below 1, and
-- grows at every scale_window-th step after an overflow. After 1000 overflows in a row the original raises an exception;
-- here the run stops.
-- There the scale can reach infinity; here it keeps its last finite value, or, with strict=false, the run stops at that step.
return {
  name = "mindspore",
  doc  = "MindSpore's DynamicLossScaleManager: a window of good steps, never below 1, gives up after 1000 overflows in a row.",

  options = {
    init_loss_scale = 2^24,
    scale_factor    = 2,      -- growth multiplies, overflow divides
    scale_window    = 2000,   -- good steps
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local init, window = options.init_loss_scale, options.scale_window
    need(init > 0 and init < math.huge, "init_loss_scale must be a positive finite number, got " .. init)
    need(options.scale_factor > 0 and options.scale_factor < math.huge,
      "scale_factor must be a positive finite number, got " .. options.scale_factor)
    need(window > 0, "scale_window must be a positive number of steps, got " .. window)
    trap(options.scale_factor <= 1, "scale_factor = " .. options.scale_factor .. " would lower the scale after good steps")
    trap(window ~= math.floor(window) or window == math.huge, "scale_window = " .. window .. " is no whole number of steps")
    trap(init < 1, "init_loss_scale = " .. init .. " is below 1, the smallest scale, so an overflow would raise it")
    return { scale = init, cur_iter = 1, last_overflow_iter = 0, bad_step = 0 }
  end,

  decide = function(state, record, options)
    local scale, reason = state.scale, nil
    if record.overflow then
      state.scale = math.max(scale * (1 / options.scale_factor), 1)
      state.last_overflow_iter = state.cur_iter
      state.bad_step = state.bad_step + 1
      if state.bad_step > 1000 then
        return { scale = state.scale, action = "stop", reason = "more than 1000 overflows in a row: the gradients are inf or nan"
          .. " for another reason than the scale (look at the first bad tensor, the learning rate, the data)" }
      end
      reason = scale == state.scale and "overflow at the smallest scale " .. scale or "overflow: scale " .. scale .. " -> " .. state.scale
    else
      state.bad_step = 0
      if (state.cur_iter - state.last_overflow_iter) % options.scale_window == 0 then
        local larger = scale * options.scale_factor
        if larger < math.huge then
          state.scale = larger
          reason = "window of " .. options.scale_window .. " good: scale " .. scale .. " -> " .. larger
        elseif options.strict then
          reason = "growth would reach infinity: the scale stays"
        else
          return { scale = scale, action = "stop", reason = "the loss scale would grow to infinity and stay there" }
        end
      end
    end
    state.cur_iter = state.cur_iter + 1
    return { scale = state.scale, reason = reason }
  end,
}
