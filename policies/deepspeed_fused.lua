-- Dynamic loss scaling as DeepSpeed's FP16_Optimizer does it (fused and unfused, ZeRO stage 0), number for number: the window
-- of the ZeRO path, but no hysteresis, and an overflow at the smallest scale is skipped for ever. So one and the same JSON
-- gives other scales than `deepspeed`, which follows the ZeRO path.
return {
  name = "deepspeed_fused",
  doc  = "DeepSpeed's FP16_Optimizer (ZeRO stage 0): a window of good steps, a smallest scale, no hysteresis.",

  options = {
    init_scale   = 2^16,    -- 2 ^ initial_scale_power
    scale_factor = 2,
    scale_window = 1000,    -- good steps
    min_scale    = 1,
    strict       = true,    -- false: accept settings that are probably mistakes
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
    trap(least > init, "min_scale = " .. least .. " is above init_scale = " .. init
      .. ", so an overflow would raise the scale; lower min_scale")
    trap(window ~= math.floor(window), "scale_window = " .. window .. " is no whole number of steps")
    return { scale = init, iter = 0, last_overflow_iter = -1 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.scale = math.max(scale / options.scale_factor, options.min_scale)
      state.last_overflow_iter = state.iter
      state.iter = state.iter + 1
      return { scale = state.scale, reason = scale == state.scale and "overflow at the smallest scale " .. scale
        or "overflow: scale " .. scale .. " -> " .. state.scale }
    end
    local stable = state.iter - state.last_overflow_iter - 1
    state.iter = state.iter + 1
    if stable <= 0 or stable % options.scale_window ~= 0 then return scale end
    local larger = scale * options.scale_factor
    if larger == math.huge then
      if options.strict then return { scale = scale, reason = "growth would reach infinity: the scale stays" } end
      return { scale = scale, action = "stop", reason = "the loss scale would grow to infinity and stay there" }
    end
    state.scale = larger
    return { scale = larger, reason = "window of " .. options.scale_window .. " good: scale " .. scale .. " -> " .. larger }
  end,
}
