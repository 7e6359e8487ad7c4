-- Dynamic loss scaling as NVIDIA Apex's amp.LossScaler does it, number for number: doubles after scale_window good steps up to a
-- largest scale, halves at every overflow. The factor 2 is fixed there, whatever its scale_factor argument says. The
-- scale is a double.
-- Without min_loss_scale the original's scale becomes 0 at last; here the run stops instead.
return {
  name = "apex",
  doc  = "Apex's amp.LossScaler: a window of good steps, a largest scale, optionally a smallest one.",

  options = {
    init_scale     = 2^16,
    scale_window   = 2000,   -- good steps in a row
    min_loss_scale = 0,      -- 0: none
    max_loss_scale = 2^24,
    strict         = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local init, least, most, window = options.init_scale, options.min_loss_scale, options.max_loss_scale, options.scale_window
    need(init > 0 and init < math.huge, "init_scale must be a positive finite number, got " .. init)
    need(least >= 0 and least < math.huge, "min_loss_scale must be 0 or a positive finite number, got " .. least)
    need(most > 0 and most < math.huge, "max_loss_scale must be a positive finite number, got " .. most)
    trap(not (window >= 1) or window ~= math.floor(window),
      "scale_window = " .. window .. " is never met by a whole number of steps, so the scale would never grow")
    trap(init > most, "init_scale = " .. init .. " is above max_loss_scale = " .. most .. " and would be cut to it")
    trap(least > math.min(init, most), "min_loss_scale = " .. least .. " is above the first scale " .. math.min(init, most)
      .. ", so an overflow would raise the scale; lower min_loss_scale")
    return { scale = math.min(most, init), unskipped = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.unskipped = 0
      local smaller = scale / 2
      if options.min_loss_scale ~= 0 then smaller = math.max(options.min_loss_scale, smaller) end
      if smaller == 0 then
        return { scale = scale, action = "stop", reason = "the loss scale fell to " .. scale
          .. " and gradients still overflow: they are inf or nan for another reason than the scale"
          .. " (look at the first bad tensor, the learning rate, the data)" }
      end
      state.scale = smaller
      return { scale = smaller, reason = scale == smaller and "overflow at the smallest scale " .. scale
        or "overflow: scale " .. scale .. " -> " .. smaller }
    end
    state.unskipped = state.unskipped + 1
    if state.unskipped ~= options.scale_window then return scale end
    state.unskipped = 0
    state.scale = math.min(options.max_loss_scale, scale * 2)
    return { scale = state.scale, reason = scale == state.scale and "the largest scale, " .. scale
      or options.scale_window .. " good in a row: scale " .. scale .. " -> " .. state.scale }
  end,
}
