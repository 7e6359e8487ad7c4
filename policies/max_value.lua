-- Max-value scaling: the scale follows target / amax, so that the largest gradient, as stored, stands just under the format's
-- largest number. Source: Micikevicius et al., Mixed Precision Training (2018), section 3.2, made on-line by a moving mean.
-- Its known weakness is one huge or tiny gradient: a single step counts for no more than `growth` or `backoff` here, and what
-- overflows below the target (activation gradients, which amax does not see) lowers the target for a while.
return {
  name = "max_value",
  doc  = "Keeps the largest gradient, as stored, near target by a moving mean of target / amax.",
  needs = { "amax" },

  options = {
    init_scale = 2^15,
    target     = 32768,   -- 49152 for the bold; fp16 ends at 65504
    decay      = 0.99,    -- of the moving mean
    growth     = 2,       -- the most one step may ask for, above the scale
    backoff    = 0.5,     -- on overflow, and the most one step may ask for below it
    forgive    = 500,     -- good steps until a lowered target rises again
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    if not (options.target > 0 and options.decay >= 0 and options.decay < 1 and options.growth > 1 and options.backoff > 0 and options.backoff < 1) then
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
      if state.good % options.forgive == 0 then state.room = math.min(1, state.room / options.backoff) end
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
