-- Dynamic loss scaling of MXNet's amp LossScaler, number for number: a decision takes effect one
-- step late, because MXNet reads the gradients while the next step already runs. The scale is a
-- double. Difference: where MXNet's scale would become 0, the run stops.
return {
  name = "mxnet",
  doc  = "MXNet's amp LossScaler: a window and a largest scale, applied one step late.",

  options = {
    init_scale      = 2^16,
    max_loss_scale  = 2^24,
    scale_seq_len   = 2000,   -- good steps in a row until the scale grows
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local init, most = check.positive(options, "init_scale", "max_loss_scale")
    check.count(options, "scale_seq_len")
    check.trap(options, init > most, "init_scale = " .. init .. " is above max_loss_scale = "
      .. most .. ", so growth would lower the scale")
    return { scale = init, next_scale = init, unskipped = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.next_scale
    state.scale = scale
    if record.overflow then
      state.unskipped = 0
      if scale / 2 == 0 then
        return { scale = scale, action = "stop", reason = "the loss scale fell to " .. scale
          .. " and gradients still overflow: they are inf or nan for a reason other than the scale"
          .. " (look at the first bad tensor, the learning rate, the data)" }
      end
      state.next_scale = scale / 2
      return { scale = scale, reason = "overflow: scale " .. scale .. " -> " .. state.next_scale
        .. " after the next step" }
    end
    state.unskipped = state.unskipped + 1
    if state.unskipped ~= options.scale_seq_len then return scale end
    state.unskipped = 0
    state.next_scale = math.min(options.max_loss_scale, scale * 2)
    return { scale = scale, reason = options.scale_seq_len .. " good steps in a row: scale "
      .. scale .. " -> " .. state.next_scale .. " after the next step" }
  end,
}
