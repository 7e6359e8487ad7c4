-- Dynamic loss scaling of NVIDIA Apex's amp.LossScaler, number for number. After scale_window good
-- steps in a row, the scale is multiplied by 2, up to a largest scale. Every overflow halves the
-- scale. Apex fixes the factor at 2, whatever its scale_factor argument is. The scale is a float64.
-- Difference: without min_loss_scale, Apex's scale can fall to 0; here the run stops first.
return {
  name = "apex",
  doc  = "Apex's amp.LossScaler: doubles after a window of good steps, up to a largest scale.",

  options = {
    init_scale     = 2^16,
    scale_window   = 2000,   -- good steps in a row until the scale grows
    min_loss_scale = 0,      -- 0: no limit
    max_loss_scale = 2^24,
    strict         = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local init = check.positive(options, "init_scale")
    check.not_negative(options, "min_loss_scale")
    local most = check.positive(options, "max_loss_scale")
    check.count(options, "scale_window")
    check.trap(options, init > most,
      "init_scale = " .. init .. " is above max_loss_scale = " .. most .. " and would be cut to it")
    check.floor(options, "min_loss_scale", init > most and "max_loss_scale" or "init_scale")
    return { scale = math.min(most, init), unskipped = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.unskipped = 0
      local smaller = scale / 2
      if options.min_loss_scale ~= 0 then smaller = math.max(options.min_loss_scale, smaller) end
      return back_off(state, smaller)
    end
    state.unskipped = state.unskipped + 1
    if state.unskipped ~= options.scale_window then return scale end
    state.unskipped = 0
    return grow(state, math.min(options.max_loss_scale, scale * 2),
      options.scale_window .. " good steps in a row")
  end,
}
