-- Dynamic loss scaling of metaseq's DynamicLossScaler (OPT), number for number: fairseq's scaler
-- with a small first scale and a window that grows and shrinks with the scale. It never stops the
-- run for a small scale: an overflow that would take the scale below min_loss_scale leaves the
-- scale unchanged, but still shrinks the window. The scale is a double. Difference: metaseq's scale
-- can reach infinity; here it keeps its last finite value, or with strict=false the run stops at
-- that step.
return {
  name = "metaseq",
  doc  = "metaseq's DynamicLossScaler: the window doubles and halves with the scale.",

  options = {
    init_scale     = 4,
    scale_factor   = 2,
    scale_window   = 256,     -- good steps between two growths, at first
    tolerance      = 0,       -- the scale backs off once the share of overflows reaches this
    threshold      = 0,       -- the scale never falls below this; 0: no limit
    min_loss_scale = 2^-5,
    strict         = true,    -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local init = check.positive(options, "init_scale", "min_loss_scale")
    check.factor(options, "scale_factor")
    check.steps(options, "scale_window")
    check.not_negative(options, "threshold")
    if options.tolerance ~= options.tolerance then
      error("tolerance must be a share from 0 to 1, got nan", 0)
    end
    check.count(options, "scale_window")
    check.trap(options, options.tolerance < 0 or options.tolerance > 1,
      "tolerance = " .. options.tolerance .. " is not a share from 0 to 1")
    check.floor(options, "threshold", "init_scale")
    check.trap(options, options.min_loss_scale > init,
      "min_loss_scale = " .. options.min_loss_scale .. " is above init_scale = " .. init
      .. ", so the scale could never fall; lower min_loss_scale")
    return { scale = init, window = options.scale_window, iter = 0, last_overflow_iter = -1,
      last_rescale_iter = -1, overflows_since_rescale = 0 }
  end,

  decide = function(state, record, options)
    local scale, factor = state.scale, options.scale_factor
    if not record.overflow then
      local due = math.fmod(state.iter - state.last_overflow_iter, state.window) == 0
      if due then state.last_rescale_iter = state.iter end
      state.iter = state.iter + 1
      if not due then return scale end
      local window = state.window
      state.window = window * factor
      return grow(state, scale * factor,
        "window of " .. window .. " good steps, next window " .. state.window, options)
    end

    local since = state.iter - state.last_rescale_iter
    state.last_overflow_iter = state.iter
    state.overflows_since_rescale = state.overflows_since_rescale + 1
    if state.overflows_since_rescale / since >= options.tolerance then
      state.scale = math.max(scale / factor, options.threshold)
      state.window = math.max(math.floor(state.window / factor), 1)
      state.last_rescale_iter = state.iter
      state.overflows_since_rescale = 0
    end
    if state.scale < options.min_loss_scale then state.scale = scale end
    state.iter = state.iter + 1
    if state.scale < scale then
      return { scale = state.scale, reason = "overflow: scale " .. scale .. " -> " .. state.scale
        .. ", window " .. state.window }
    end
    return { scale = state.scale,
      reason = "overflow: scale stays " .. scale .. ", window " .. state.window }
  end,
}
