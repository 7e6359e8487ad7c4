-- A PID controller keeps the largest stored gradient near its target: the error is log2(target /
-- largest), in octaves, and the controller moves log2(scale). Its velocity form avoids integral
-- windup at the limits. An overflow lowers the scale by `shock` octaves and clears the controller's
-- state. Source: textbook control (Astrom and Murray, Feedback Systems, chapter 11).
return {
  name = "pid",
  doc  = "A PID controller on log2 of the largest stored gradient.",
  needs = { "amax" },

  options = {
    init_scale = 2^14,
    target     = 8192,    -- largest stored gradient to aim at
    kp         = 0.05,    -- octaves of scale for each octave that the error changes
    ki         = 0.05,    -- octaves of scale per step for each octave of error
    kd         = 0,       -- octaves of scale for each octave of the error's second difference
    shock      = 1,       -- octaves by which an overflow lowers the scale
    most       = 1,       -- largest change in octaves per step without overflow
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    check.positive(options, "target", "shock")
    check.expect(options, options.most > 0, "most > 0 (inf: no limit)")
    check.not_negative(options, "kp", "ki", "kd")
    return { scale = check.limits(options), change = 0 }
  end,

  decide = function(state, record, options)
    local octaves = 0
    if record.overflow then
      octaves, state.error, state.change = -options.shock, nil, 0
    elseif record.amax > 0 then
      local e = math.log(options.target / (record.amax * record.scale)) / math.log(2)
      -- Limits the weight of an outlier.
      e = math.max(-8, math.min(8, e))
      local change = state.error and e - state.error or 0
      octaves = options.kp * change + options.ki * e + options.kd * (change - state.change)
      octaves = math.max(-options.most, math.min(options.most, octaves))
      state.error, state.change = e, change
    end
    state.scale = math.max(options.min_scale, math.min(options.max_scale, state.scale * 2^octaves))
    return { scale = state.scale, reason = record.overflow and "overflow" or nil }
  end,
}
