-- Dynamic loss scaling of DeepSpeed's FP16_Optimizer (fused and unfused, ZeRO stage 0), number for
-- number. It has the window of the ZeRO path but no hysteresis, and it skips any number of
-- overflowed steps at the smallest scale. So the same DeepSpeed options can give different scales
-- here and with `deepspeed`, which follows the ZeRO path. Difference: DeepSpeed's scale can reach
-- infinity; here it keeps its last finite value, or with strict=false the run stops at that step.
return {
  name = "deepspeed_fused",
  doc  = "DeepSpeed's FP16_Optimizer (ZeRO stage 0): a window, a smallest scale, no hysteresis.",

  options = {
    init_scale   = 2^16,    -- 2 ^ initial_scale_power
    scale_factor = 2,
    scale_window = 1000,    -- good steps between two growths
    min_scale    = 1,
    strict       = true,    -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local init = check.positive(options, "init_scale", "min_scale")
    check.steps(options, "scale_window")
    check.factor(options, "scale_factor")
    check.floor(options, "min_scale", "init_scale")
    check.count(options, "scale_window")
    return { scale = init, iter = 0, last_overflow_iter = -1 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.last_overflow_iter = state.iter
      state.iter = state.iter + 1
      return back_off(state, math.max(scale / options.scale_factor, options.min_scale))
    end
    local stable = state.iter - state.last_overflow_iter - 1
    state.iter = state.iter + 1
    if stable <= 0 or math.fmod(stable, options.scale_window) ~= 0 then return scale end
    return grow(state, scale * options.scale_factor,
      "window of " .. options.scale_window .. " good steps", options)
  end,
}
