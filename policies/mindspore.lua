-- Dynamic loss scaling of MindSpore's DynamicLossScaleManager, number for number: the scale is a
-- double, never below 1, and grows at every scale_window-th step after an overflow. Differences: at
-- the 1001st overflow in a row MindSpore raises an exception; here the run stops. MindSpore's scale
-- can reach infinity; here it keeps its last finite value, or with strict=false the run stops at
-- that step.
return {
  name = "mindspore",
  doc  = "MindSpore's DynamicLossScaleManager: never below 1, stops at 1001 overflows in a row.",

  options = {
    init_loss_scale = 2^24,
    scale_factor    = 2,      -- growth multiplies, overflow divides
    scale_window    = 2000,   -- good steps between two growths
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local init = check.positive(options, "init_loss_scale", "scale_factor")
    check.steps(options, "scale_window")
    check.trap(options, options.scale_factor <= 1,
      "scale_factor = " .. options.scale_factor .. " would not raise the scale after good steps")
    check.count(options, "scale_window")
    check.trap(options, init < 1, "init_loss_scale = " .. init
      .. " is below 1, the smallest scale, so an overflow would raise it")
    return { scale = init, cur_iter = 1, last_overflow_iter = 0, bad_step = 0 }
  end,

  decide = function(state, record, options)
    local scale, iter = state.scale, state.cur_iter
    state.cur_iter = iter + 1
    if record.overflow then
      state.last_overflow_iter = iter
      state.bad_step = state.bad_step + 1
      local verdict = back_off(state, math.max(scale * (1 / options.scale_factor), 1))
      if state.bad_step <= 1000 then return verdict end
      state.cur_iter = iter                    -- MindSpore raises its exception here
      return { scale = state.scale, action = "stop",
        reason = "more than 1000 overflows in a row: the gradients are inf or nan for a reason"
          .. " other than the scale (look at the first bad tensor, the learning rate, the data)" }
    end
    state.bad_step = 0
    local since = iter - state.last_overflow_iter
    if math.fmod(since, options.scale_window) ~= 0 then return scale end
    return grow(state, scale * options.scale_factor,
      "window of " .. options.scale_window .. " good steps", options)
  end,
}
