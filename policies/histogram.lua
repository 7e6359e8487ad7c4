-- Counts gradients in a histogram with two bins: stored magnitudes above an eighth of fp16's range,
-- and all other nonzero ones. Every `period` good steps the scale halves if the share of gradients
-- in the upper bin is above `threshold`; otherwise it doubles. Source: Graphcore PopART's automatic
-- loss scaling. Differences: here the scale has limits, steps that overflow are skipped and halve
-- the scale immediately, and the scale does not double for `wait` good steps after an overflow.
-- PopART does none of this.
return {
  name = "histogram",
  doc  = "Halves the scale if too many gradients exceed an eighth of the range, else doubles it.",
  needs = { "hist" },

  options = {
    init_scale = 2^12,
    threshold  = 1e-7,    -- a larger share of large gradients halves the scale
    edge       = 13,      -- stored gradients from 2^edge on are large; 2^13 is an eighth of 2^16
    period     = 10,      -- good steps between two decisions
    wait       = 100,     -- good steps without growth after an overflow
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    check.fraction(options, "threshold")
    check.expect(options, options.period >= 1 and options.wait >= 0, "period >= 1 and wait >= 0")
    check.whole(options, "edge", -160, 159)
    return { scale = check.limits(options), above = 0, below = 0, steps = 0, wait = 0 }
  end,

  decide = function(state, record, options)
    local reason
    if record.overflow then
      state.scale, state.wait, reason = state.scale / 2, options.wait, "overflow"
      state.above, state.below, state.steps = 0, 0, 0
    else
      state.above = state.above + record.hist:sum(options.edge)
      state.below = state.below + record.hist:sum(nil, options.edge - 1)
      state.steps, state.wait = state.steps + 1, math.max(0, state.wait - 1)
      if state.steps >= options.period then
        local share = state.above / math.max(1, state.above + state.below)
        if share > options.threshold then
          state.scale, reason = state.scale / 2, ("share of large gradients: %.3g"):format(share)
        elseif state.wait == 0 and state.below > 0 then
          state.scale = state.scale * 2
        end
        state.above, state.below, state.steps = 0, 0, 0
      end
    end
    state.scale = math.max(options.min_scale, math.min(options.max_scale, state.scale))
    return { scale = state.scale, reason = reason }
  end,
}
