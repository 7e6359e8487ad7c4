-- Divides the scale by four at every overflow and recovers slowly. Meant for fine-tuning large
-- models, where one overflow is often followed by others. Source: the QLoRA recipe for custom
-- scalers in ms-swift's guides.
return {
  name = "fast_backoff",
  doc  = "Quarters the scale at an overflow and grows by 1.8 every 1500 good steps.",

  options = {
    init_scale      = 2^16,
    backoff_factor  = 0.25,
    growth_factor   = 1.8,
    growth_interval = 1500,   -- good steps in a row until the scale grows
    min_scale       = 1,
    max_scale       = 2^24,
    patience        = 50,     -- overflows in a row at min_scale that stop the run
  },

  init = function(options)
    check.share(options, "backoff_factor")
    check.factor(options, "growth_factor")
    check.count(options, "growth_interval")
    check.steps(options, "patience")
    return { scale = check.limits(options), good = 0, stuck = 0 }
  end,

  decide = function(state, record, options)
    local before, action = state.scale, nil
    if record.overflow then
      state.good = 0
      state.stuck = before <= options.min_scale and state.stuck + 1 or 0
      state.scale = math.max(before * options.backoff_factor, options.min_scale)
      if state.stuck >= options.patience then action = "stop" end
    else
      state.stuck, state.good = 0, state.good + 1
      if state.good % options.growth_interval == 0 then
        state.scale = math.min(before * options.growth_factor, options.max_scale)
      end
    end
    return { scale = state.scale, action = action,
      reason = action and "gradients overflow at the smallest scale: look at the first bad tensor,"
        .. " the learning rate and the data"
        or state.scale ~= before and ("scale %.6g -> %.6g"):format(before, state.scale) or nil }
  end,
}
