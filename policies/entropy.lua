-- Raises the loss scale when attention entropy is low: the model is then confident, and its
-- gradients are small. The script publishes the mean entropy of its attention rows in nats:
-- engine.signal("attention_entropy", H). H is clamped to [0.1, 2], and m is its moving mean. Then
-- scale = base * (1 + (1 - m) * gain). The option `least` limits the factor on base from below;
-- without it, the factor would be negative at m = 2 and gain = 2. base is a dynamic scale, because
-- entropy does not show overflow. Source: the entropy-adaptive recipe in ms-swift's guides; no
-- known system ships it.
return {
  name = "entropy",
  doc  = "A dynamic scale times a factor that grows as attention entropy falls.",

  options = {
    init_scale      = 2^13,   -- initial base
    gain            = 2,
    least           = 0.25,   -- smallest factor on base
    low             = 0.1,    -- the entropy is clamped to low..high, in nats
    high            = 2,
    decay           = 0.95,   -- decay of the moving mean of the entropy
    growth_interval = 500,    -- good steps in a row until the base doubles
    min_scale       = 2^-10,
    max_scale       = 2^32,
  },

  init = function(options)
    check.positive(options, "least")
    check.not_negative(options, "gain")
    check.fraction(options, "decay")
    check.count(options, "growth_interval")
    check.expect(options, options.low <= options.high, "low <= high")
    local scale = check.limits(options)
    return { scale = scale, base = scale, good = 0 }
  end,

  migrate = function(old, _, options)
    return { scale = old.scale, base = old.scale or options.init_scale, good = 0 }
  end,

  decide = function(state, record, options)
    local entropy = record.signals.attention_entropy
    if entropy and entropy == entropy then
      entropy = math.max(options.low, math.min(options.high, entropy))
      state.entropy = state.entropy
        and options.decay * state.entropy + (1 - options.decay) * entropy or entropy
    end
    if record.overflow then
      state.base, state.good = state.base / 2, 0
    else
      state.good = state.good + 1
      if state.good % options.growth_interval == 0 then state.base = state.base * 2 end
    end
    state.base = math.max(options.min_scale, math.min(options.max_scale, state.base))
    local factor = state.entropy
      and math.max(options.least, 1 + (1 - state.entropy) * options.gain) or 1
    state.scale = math.max(options.min_scale, math.min(options.max_scale, state.base * factor))
    return { scale = state.scale, reason = record.overflow and "overflow" or nil }
  end,
}
