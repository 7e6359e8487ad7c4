-- Dynamic loss scaling of DeepSpeed's DynamicLossScaler on the ZeRO path, number for number. The
-- first growth comes scale_window + 1 good steps after the start or an overflow, later ones every
-- scale_window steps. An overflow that hysteresis absorbs also restarts the window. Differences:
-- where DeepSpeed raises an exception at the smallest scale, the policy stops the run, and its
-- reason says what to do. Where DeepSpeed's scale would reach infinity, the scale keeps its last
-- finite value, or with strict=false the run stops at that step.
return {
  name = "deepspeed",
  doc  = "DeepSpeed's DynamicLossScaler (ZeRO): hysteresis, a window, a smallest scale.",

  options = {
    init_scale               = 2^16,    -- 2 ^ initial_scale_power
    scale_factor             = 2,
    scale_window             = 1000,    -- good steps between two growths
    hysteresis               = 2,       -- overflows until a backoff; also called delayed_shift
    consecutive_hysteresis   = false,   -- true: good steps refill hysteresis; false: only growth
    min_scale                = 1,
    raise_error_at_min_scale = true,    -- true: a backoff at min_scale stops the run
    strict                   = true,    -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local init = check.positive(options, "init_scale", "min_scale")
    check.steps(options, "scale_window")
    check.factor(options, "scale_factor")
    check.count(options, "hysteresis", "1 backs off at every overflow")
    check.floor(options, "min_scale", "init_scale")
    check.count(options, "scale_window")
    return { scale = init, iter = 0, last_overflow_iter = -1, hysteresis = options.hysteresis }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      local verdict
      if options.hysteresis == 1 or state.hysteresis == 1 then
        if scale == options.min_scale and options.raise_error_at_min_scale then
          return { scale = scale, action = "stop",
            reason = "overflow at the smallest loss scale " .. scale
            .. ": the gradients are inf or nan for a reason other than the scale; look at the first"
            .. " bad tensor, the learning rate and the data, or set min_scale lower, or"
            .. " raise_error_at_min_scale=false" }
        end
        verdict = back_off(state, math.max(scale / options.scale_factor, options.min_scale))
      else
        state.hysteresis = state.hysteresis - 1
        verdict = { scale = scale,
          reason = "overflow: hysteresis " .. state.hysteresis + 1 .. " -> " .. state.hysteresis
          .. ", scale stays " .. scale }
      end
      state.last_overflow_iter = state.iter
      state.iter = state.iter + 1
      return verdict
    end

    if options.consecutive_hysteresis then state.hysteresis = options.hysteresis end
    local stable = state.iter - state.last_overflow_iter - 1
    state.iter = state.iter + 1
    if stable <= 0 or math.fmod(stable, options.scale_window) ~= 0 then return scale end
    state.hysteresis = options.hysteresis
    return grow(state, scale * options.scale_factor,
      "window of " .. options.scale_window .. " good steps", options)
  end,
}
