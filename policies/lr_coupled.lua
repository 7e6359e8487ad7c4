-- Follows the learning rate's schedule. While the rate is high or rising, weights and gradients
-- change fast, so the scale grows rarely or not at all. As the rate falls, gradients change slowly
-- and become small, so the scale grows more often, at most once in `least` good steps. An upward
-- jump of the rate (a restart, a new stage) halves the scale as a precaution. Source: a suggestion
-- in ms-swift's guides; no known system ships it.
return {
  name = "lr_coupled",
  doc  = "A dynamic scale whose growth interval shrinks with the learning rate.",

  options = {
    init_scale      = 2^16,
    growth_interval = 2000,   -- good steps in a row until growth, at the highest rate seen
    least           = 50,     -- good steps in a row until growth, at rates near zero
    jump            = 2,      -- the scale halves if the rate grows by more than this factor
    min_scale       = 2^-10,
    max_scale       = 2^32,
  },

  init = function(options)
    check.expect(options, options.growth_interval >= options.least and options.least >= 1 and
      options.jump > 1, "growth_interval >= least >= 1 and jump > 1")
    return { scale = check.limits(options), good = 0, peak = 0, lr = 0 }
  end,

  decide = function(state, record, options)
    -- If the rate is 0, inf or nan, uses the last valid rate.
    local lr = record.lr > 0 and record.lr < math.huge and record.lr or state.lr
    local before, reason = state.scale, nil
    state.peak = math.max(state.peak, lr)
    local share = state.peak > 0 and lr / state.peak or 1
    local rising = lr > state.lr
    if record.overflow then
      state.scale, state.good, reason = before / 2, 0, "overflow"
    -- In the first 100 updates a jump may be the warm-up.
    elseif state.lr > 0 and state.updates and state.updates > 100
      and lr > state.lr * options.jump then
      state.scale, state.good, reason = before / 2, 0,
        ("the learning rate jumps from %.4g to %.4g"):format(state.lr, lr)
    else
      state.good = state.good + 1
      local interval = math.max(options.least, options.growth_interval * share)
      if state.good >= interval and not rising then
        state.scale, state.good, reason = before * 2, 0,
          ("%d good steps in a row, at %.2g of the highest learning rate"):format(interval, share)
      end
    end
    state.lr, state.updates = lr, record.updates
    state.scale = math.max(options.min_scale, math.min(options.max_scale, state.scale))
    return { scale = state.scale, reason = reason }
  end,
}
