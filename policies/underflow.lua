-- Underflow control: keeps the share of gradients lost to zero below a limit. A number that became
-- zero cannot be told from a true zero. But the histogram counts the numbers in the format's lowest
-- bin. Close to zero, magnitudes are spread evenly, so about as many numbers lie below that bin as
-- in it. The scale grows while too many are lost and the largest gradient has headroom. It falls
-- slowly, away from overflow, while far fewer are lost than allowed. Source: the exponent
-- histograms of Micikevicius et al., Mixed Precision Training (2018).
return {
  name = "underflow",
  doc  = "Keeps the share of gradients lost to underflow below a limit.",
  needs = { "hist", "amax" },

  options = {
    init_scale = 2^10,
    limit      = 0.001,   -- share of gradients that may be lost
    last       = -24,     -- exponent of the format's smallest number: 2^-24 in fp16
    target     = 32768,   -- the largest stored gradient must stay below this
    patience   = 20,      -- steps between two growths; a decrease takes 20 times as many
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    check.share(options, "limit")
    check.positive(options, "target")
    check.expect(options, options.patience >= 1, "patience >= 1")
    check.whole(options, "last", -160, 159)
    return { scale = check.limits(options), since = options.patience, room = 1 }
  end,

  decide = function(state, record, options)
    local scale, reason = state.scale, nil
    state.since = state.since + 1
    if record.overflow then
      state.since, state.room = 0, math.max(2^-10, state.room / 2)
      scale, reason = scale / 2, "overflow"
    elseif record.count > 0 then
      local kept = record.hist:sum()
      local lost = kept > 0 and record.hist[options.last] / kept or 1
      if lost > options.limit and state.since >= options.patience
        and record.amax * scale * 2 <= options.target * state.room then
        scale, state.since, reason = scale * 2, 0,
          ("about %.2g of the gradients are lost"):format(lost)
      elseif lost < options.limit / 16 and state.since >= 20 * options.patience then
        scale, state.since, state.room = scale / 2, 0, math.min(1, state.room * 2)
      end
    end
    state.scale = math.max(options.min_scale, math.min(options.max_scale, scale))
    return { scale = state.scale, reason = reason }
  end,
}
