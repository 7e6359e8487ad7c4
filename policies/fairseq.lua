-- Dynamic loss scaling of fairseq's DynamicLossScaler, number for number. An overflow lowers the
-- scale if the overflows since the last backoff, divided by the steps since the last change of
-- scale, have reached `tolerance`. Growth comes at every scale_window-th step after an overflow.
-- The scale is a double. Differences: where fairseq raises "Minimum loss scale reached", the run
-- stops, with the scale unchanged. Where fairseq's scale would reach infinity, the scale keeps its
-- last finite value, or with strict=false the run stops at that step.
return {
  name = "fairseq",
  doc  = "fairseq's DynamicLossScaler: tolerates a share of overflows, stops at a smallest scale.",

  options = {
    init_scale     = 2^15,
    scale_factor   = 2,
    scale_window   = 2000,    -- good steps between growths; in fairseq 2^14 / ranks / update_freq
    tolerance      = 0,       -- the scale backs off once the share of overflows reaches this
    threshold      = 0,       -- the scale never falls below this; 0: no limit
    min_loss_scale = 1e-4,    -- a scale that would fall to this stops the run
    strict         = true,    -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local init = check.positive(options, "init_scale")
    check.factor(options, "scale_factor")
    check.steps(options, "scale_window")
    check.not_negative(options, "threshold", "min_loss_scale")
    if options.tolerance ~= options.tolerance then
      error("tolerance must be a share from 0 to 1, got nan", 0)
    end
    check.count(options, "scale_window")
    check.trap(options, options.tolerance < 0 or options.tolerance > 1,
      "tolerance = " .. options.tolerance .. " is not a share from 0 to 1")
    check.floor(options, "threshold", "init_scale")
    check.trap(options, options.min_loss_scale >= init,
      "min_loss_scale = " .. options.min_loss_scale .. " is not below init_scale = " .. init
      .. ", so the first overflow would stop the run")
    return { scale = init, iter = 0, last_overflow_iter = -1, last_rescale_iter = -1,
      overflows_since_rescale = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if not record.overflow then
      local due = math.fmod(state.iter - state.last_overflow_iter, options.scale_window) == 0
      if due then state.last_rescale_iter = state.iter end
      state.iter = state.iter + 1
      if not due then return scale end
      return grow(state, scale * options.scale_factor,
        "window of " .. options.scale_window .. " good steps", options)
    end

    local since = state.iter - state.last_rescale_iter
    state.last_overflow_iter = state.iter
    state.overflows_since_rescale = state.overflows_since_rescale + 1
    local share = state.overflows_since_rescale / since
    if share >= options.tolerance then
      state.scale = math.max(scale / options.scale_factor, options.threshold)
      state.last_rescale_iter = state.iter
      state.overflows_since_rescale = 0
    end
    if state.scale <= options.min_loss_scale then
      -- As in fairseq, the scale does not change, and this step is not counted.
      state.scale = scale
      return { scale = scale, action = "stop",
        reason = "the loss scale, " .. scale .. ", would fall to min_loss_scale = "
          .. options.min_loss_scale .. ": the gradients are inf or nan for a reason other than the"
          .. " scale; look at the first bad tensor, lower the learning rate, clip the gradients,"
          .. " or set threshold" }
    end
    state.iter = state.iter + 1
    if state.scale < scale then
      return { scale = state.scale, reason = "overflow: scale " .. scale .. " -> " .. state.scale }
    end
    return { scale = state.scale, reason = "overflow tolerated: " .. state.overflows_since_rescale
      .. " in " .. since .. " steps, scale stays " .. scale }
  end,
}
