-- Dynamic loss scaling as fairseq's DynamicLossScaler does it, number for number: an overflow backs off when the share of overflows
-- since the last change of scale reaches `tolerance`; growth comes at every scale_window-th step after an overflow. The scale
-- is a double.
-- Where the original raises "Minimum loss scale reached", with the scale as it was, the run stops. There the scale can reach
-- infinity; here it keeps its last finite value, or, with strict=false, the run stops at that step.
return {
  name = "fairseq",
  doc  = "fairseq's DynamicLossScaler: tolerates a share of overflows, stops at a smallest scale.",

  options = {
    init_scale     = 2^15,
    scale_factor   = 2,
    scale_window   = 2000,    -- good steps; fairseq's optimizer sets 2^14 / ranks / update_freq
    tolerance      = 0,       -- share of overflows since the last change of scale, 0 to 1
    threshold      = 0,       -- the scale never falls below it; 0: none
    min_loss_scale = 1e-4,    -- a scale that falls to it stops the run
    strict         = true,    -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local init, window, threshold = options.init_scale, options.scale_window, options.threshold
    need(init > 0 and init < math.huge, "init_scale must be a positive finite number, got " .. init)
    need(options.scale_factor > 1 and options.scale_factor < math.huge,
      "scale_factor must be greater than 1 and finite, got " .. options.scale_factor)
    need(window > 0, "scale_window must be a positive number of steps, got " .. window)
    need(threshold >= 0 and threshold < math.huge, "threshold must be 0 or a positive finite number, got " .. threshold)
    need(options.min_loss_scale >= 0 and options.min_loss_scale < math.huge,
      "min_loss_scale must be 0 or a positive finite number, got " .. options.min_loss_scale)
    need(options.tolerance == options.tolerance, "tolerance must be a share from 0 to 1, got nan")
    trap(window ~= math.floor(window) or window == math.huge, "scale_window = " .. window .. " is no whole number of steps")
    trap(options.tolerance < 0 or options.tolerance > 1, "tolerance = " .. options.tolerance .. " is no share from 0 to 1")
    trap(threshold > init, "threshold = " .. threshold .. " is above init_scale = " .. init
      .. ", so an overflow would raise the scale; lower threshold")
    trap(options.min_loss_scale >= init, "min_loss_scale = " .. options.min_loss_scale .. " is not below init_scale = " .. init
      .. ", so the first overflow would stop the run")
    return { scale = init, iter = 0, last_overflow_iter = -1, last_rescale_iter = -1, overflows_since_rescale = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if not record.overflow then
      local due = (state.iter - state.last_overflow_iter) % options.scale_window == 0
      local larger = scale * options.scale_factor
      if due then state.last_rescale_iter = state.iter end
      state.iter = state.iter + 1
      if not due then return scale end
      if larger == math.huge then
        if options.strict then return { scale = scale, reason = "growth would reach infinity: the scale stays" } end
        return { scale = scale, action = "stop", reason = "the loss scale would grow to infinity and stay there" }
      end
      state.scale = larger
      return { scale = larger, reason = "window of " .. options.scale_window .. " good: scale " .. scale .. " -> " .. larger }
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
      state.scale = scale                      -- the count of steps stays where it is, as in the original
      return { scale = scale, action = "stop", reason = "the loss scale, " .. scale .. ", would fall to min_loss_scale = "
        .. options.min_loss_scale .. ": the gradients are inf or nan for another reason than the scale; look at the first bad"
        .. " tensor, a smaller learning rate, clipping, or set threshold" }
    end
    state.iter = state.iter + 1
    if state.scale < scale then return { scale = state.scale, reason = "overflow: scale " .. scale .. " -> " .. state.scale } end
    return { scale = state.scale, reason = "overflow tolerated: " .. state.overflows_since_rescale .. " in " .. since .. " steps, scale stays " .. scale }
  end,
}
