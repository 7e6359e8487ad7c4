-- Max-value scaling: the scale follows target / amax, so that the largest stored gradient is just
-- below the format's largest number. Source: Micikevicius et al., Mixed Precision Training (2018),
-- section 3.2, made online by a moving mean. Its known weakness is a single huge or tiny gradient:
-- here one step moves the scale by `growth` or `backoff` at most. An overflow below the target (of
-- activation gradients, which amax does not cover) lowers the target for a while.
return {
  name = "max_value",
  doc  = "Keeps the largest stored gradient near target by a moving mean of target / amax.",
  needs = { "amax" },

  options = {
    init_scale = 2^15,
    target     = 32768,   -- 49152 is bold; fp16 ends at 65504
    decay      = 0.99,    -- of the moving mean
    growth     = 2,       -- largest growth that one step may ask for
    backoff    = 0.5,     -- on overflow, and the largest cut that one step may ask for
    forgive    = 500,     -- good steps after which a lowered target rises again
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    if not (options.target > 0 and options.decay >= 0 and options.decay < 1 and options.growth > 1
      and options.backoff > 0 and options.backoff < 1) then
      error("expected target > 0, decay in [0, 1), growth > 1 and backoff in (0, 1)", 0)
    end
    return { scale = options.init_scale, room = 1, good = 0 }
  end,

  decide = function(state, record, options)
    local scale, reason = state.scale, nil
    if record.overflow then
      state.room, state.good = math.max(state.room * options.backoff, 2^-10), 0
      scale, reason = scale * options.backoff, "overflow: back off, aim lower"
    else
      state.good = state.good + 1
      if state.good % options.forgive == 0 then
        state.room = math.min(1, state.room / options.backoff)
      end
      if record.amax > 0 then
        local wanted = options.target * state.room / record.amax
        wanted = math.max(scale * options.backoff, math.min(scale * options.growth, wanted))
        scale = options.decay * scale + (1 - options.decay) * wanted
      end
    end
    state.scale = math.max(options.min_scale, math.min(options.max_scale, scale))
    return { scale = state.scale, reason = reason }
  end,
}
