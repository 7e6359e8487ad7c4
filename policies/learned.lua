-- A learned scale: log2(scale) is a parameter that online gradient descent trains, one update per
-- step, on the cost (share of gradients that lost bits) + price * overflow. Lost bits push the
-- scale up, an overflow pushes it down by `price`, stored gradients above `edge` push it down too,
-- and momentum smooths all of these. Source: none; the rule is the engine's own.
return {
  name = "learned",
  doc  = "Learns log2(scale) online from the counts of underflow and overflow.",
  needs = { "underflow", "zeros", "amax" },

  options = {
    init_scale = 2^12,
    rate       = 1,       -- octaves per step at a push of 1
    momentum   = 0.8,
    share      = 0.01,    -- share of subnormal gradients that gives half of the largest upward push
    price      = 5,       -- cost of an overflow; a step that loses all gradients costs 1
    edge       = 16384,   -- stored gradients above this push down, by 1 per octave, at most 1
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    check.positive(options, "rate", "share", "edge")
    check.not_negative(options, "price")
    check.fraction(options, "momentum")
    return { scale = check.limits(options), speed = 0 }
  end,

  decide = function(state, record, options)
    local push = 0
    if record.overflow then
      push = -options.price
      state.speed = math.min(state.speed, 0)                          -- upward momentum ends
    elseif record.count > 0 then
      local kept = record.count - record.zeros
      local lost = kept > 0 and record.underflow / kept or 1
      local high = record.amax > 0
        and math.log(record.amax * record.scale / options.edge) / math.log(2) or 0
      push = high > 0 and -math.min(1, high)
        or lost / (lost + options.share) * math.min(1, -high + (kept > 0 and 0 or 1))
    end
    state.speed = options.momentum * state.speed + (1 - options.momentum) * push
    local octaves = math.max(-2, math.min(1, options.rate * state.speed))
    state.scale = math.max(options.min_scale, math.min(options.max_scale, state.scale * 2^octaves))
    return { scale = state.scale, reason = record.overflow and "overflow" or nil }
  end,
}
