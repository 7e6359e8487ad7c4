-- For losses with large, sudden gradients, such as DPO's log-sigmoid. An overflow multiplies the
-- scale by 0.3, but never takes it below 2^12. After five overflows in a row, growth pauses. The
-- gradient norm is clipped at 1. When stored gradients grow beyond twice `ahead`, the scale halves
-- before they overflow. Source: the DPO recipe for custom scalers in ms-swift's guides.
return {
  name = "guarded",
  doc  = "Backs off by 0.3 to a floor, pauses growth after repeated overflows, clips; for DPO.",
  needs = { "norm", "amax" },

  options = {
    init_scale      = 2^16,
    backoff_factor  = 0.3,
    growth_factor   = 1.6,
    growth_interval = 1000,   -- good steps in a row until the scale grows
    floor           = 2^12,   -- smallest scale
    max_scale       = 2^24,
    bad_row         = 5,      -- overflows in a row after which growth pauses
    pause           = 2000,   -- steps without growth
    clip            = 1,      -- largest gradient norm of an update; inf: no limit
    ahead           = 2^14,   -- no growth takes the largest stored gradient above it; inf: no limit
    patience        = 50,     -- overflows in a row that stop the run if the scale is at the floor
  },

  init = function(options)
    check.share(options, "backoff_factor")
    check.factor(options, "growth_factor")
    check.count(options, "growth_interval")
    check.steps(options, "bad_row", "patience")
    check.float32(options, "init_scale", "floor", "max_scale")
    check.floor(options, "floor", "init_scale")
    check.expect(options, options.floor <= options.max_scale and options.pause >= 0 and
      options.clip > 0 and options.ahead > 0, "floor <= max_scale, pause >= 0, clip > 0, ahead > 0")
    return { scale = options.init_scale, good = 0, bad = 0, pause = 0 }
  end,

  decide = function(state, record, options)
    local before, action, reason = state.scale, nil, nil
    state.pause = math.max(0, state.pause - 1)
    if record.overflow then
      state.good, state.bad = 0, state.bad + 1
      if state.bad >= options.bad_row then
        state.pause, reason = options.pause, state.bad .. " overflows in a row: growth pauses"
      end
      state.scale = math.max(before * options.backoff_factor, options.floor)
      if state.bad >= options.patience and before <= options.floor then
        action, reason = "stop",
          "gradients overflow at the floor: look at the first bad tensor, the learning rate"
          .. " and the data"
      end
    else
      state.good, state.bad = state.good + 1, 0
      local largest = record.amax * before
      if largest > 2 * options.ahead then
        state.scale, state.good, reason = math.max(before / 2, options.floor), 0,
          "gradients grow: the scale backs off before they overflow"
      elseif state.good % options.growth_interval == 0 and state.pause == 0
        and largest * options.growth_factor <= options.ahead then
        state.scale = math.min(before * options.growth_factor, options.max_scale)
      end
    end
    return { scale = state.scale, action = action, clip = options.clip, reason = reason }
  end,
}
