-- Dynamic loss scaling as DeepSpeed's DynamicLossScaler does it on the ZeRO path, number for number:
-- the first growth comes scale_window + 1 good steps after the start or an overflow, later ones every
-- scale_window; an overflow that hysteresis absorbs restarts the window, too.
-- Where the original raises an exception at the smallest scale, this asks for a clean stop and says what to do;
-- where its scale would reach infinity, this keeps the last finite one, or, with strict=false, stops at that step.
return {
  name = "deepspeed",
  doc  = "DeepSpeed's dynamic loss scale (ZeRO): hysteresis, a window of good steps, a smallest scale.",

  options = {
    init_scale               = 2^16,    -- 2 ^ initial_scale_power
    scale_factor             = 2,
    scale_window             = 1000,    -- good steps
    hysteresis               = 2,       -- overflows until the first backoff; DeepSpeed also calls it delayed_shift
    consecutive_hysteresis   = false,   -- true: every good step refills the hysteresis; false: only growth does
    min_scale                = 1,
    raise_error_at_min_scale = true,    -- an overflow at min_scale stops the run; false: goes on at min_scale
    strict                   = true,    -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local init, least, window = options.init_scale, options.min_scale, options.scale_window
    need(init > 0 and init < math.huge, "init_scale must be a positive finite number, got " .. init)
    need(least > 0 and least < math.huge, "min_scale must be a positive finite number, got " .. least)
    need(window > 0 and window < math.huge, "scale_window must be a positive number of steps, got " .. window)
    need(options.scale_factor > 1 and options.scale_factor < math.huge,
      "scale_factor must be greater than 1 and finite, got " .. options.scale_factor)
    trap(options.hysteresis < 1 or options.hysteresis ~= math.floor(options.hysteresis),
      "hysteresis = " .. options.hysteresis .. " never counts down to 1, so the scale would never back off;"
      .. " use 1 to back off at every overflow")
    trap(least > init, "min_scale = " .. least .. " is above init_scale = " .. init
      .. ", so an overflow would raise the scale; lower min_scale")
    trap(window ~= math.floor(window), "scale_window = " .. window .. " is no whole number of steps")
    return { scale = init, iter = 0, last_overflow_iter = -1, hysteresis = options.hysteresis }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      local reason
      if options.hysteresis == 1 or state.hysteresis == 1 then
        if scale == options.min_scale and options.raise_error_at_min_scale then
          return { scale = scale, action = "stop", reason = "overflow at the smallest loss scale " .. scale
            .. ": the gradients are inf or nan for another reason than the scale; look at the first bad tensor,"
            .. " the learning rate and the data, or set min_scale lower, or raise_error_at_min_scale=false" }
        end
        state.scale = math.max(scale / options.scale_factor, options.min_scale)
        reason = "overflow: scale " .. scale .. " -> " .. state.scale
      else
        state.hysteresis = state.hysteresis - 1
        reason = "overflow: hysteresis " .. state.hysteresis + 1 .. " -> " .. state.hysteresis .. ", scale stays " .. scale
      end
      state.last_overflow_iter = state.iter
      state.iter = state.iter + 1
      return { scale = state.scale, reason = reason }
    end

    if options.consecutive_hysteresis then state.hysteresis = options.hysteresis end
    local stable = state.iter - state.last_overflow_iter - 1
    state.iter = state.iter + 1
    if stable <= 0 or stable % options.scale_window ~= 0 then return scale end
    state.hysteresis = options.hysteresis
    if scale * options.scale_factor == math.huge then
      if options.strict then return { scale = scale, reason = "growth would reach infinity: the scale stays" } end
      return { scale = scale, action = "stop", reason = "the loss scale would grow to infinity and stay there" }
    end
    state.scale = scale * options.scale_factor
    return { scale = state.scale, reason = "window of " .. options.scale_window .. " good: scale " .. scale .. " -> " .. state.scale }
  end,
}
