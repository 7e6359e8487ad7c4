-- Moves all layers up once: to the first rung of the recipe's `ladder`, or to high precision if the
-- recipe has no ladder. With ladder = { { forward = { high = true } } } only the forward pass
-- changes, which costs little and recovers most of what FP4 loses (NVIDIA's NVFP4 recipe). The move
-- comes after `at` updates or, with at = 0, once the learning rate falls under `below` * its peak.
return {
  name    = "forward_high_before_decay",
  doc     = "Moves layers to a higher precision before or when the learning rate decays.",
  kind    = "fp8",
  needs   = { "tensors" },
  options = { at = 0, below = 0.999 },
  init = function(options)
    check.not_negative(options, "at")
    check.expect(options, options.below > 0 and options.below <= 1, "below in (0, 1]")
    return { scale = 1, peak = 0 }
  end,
  decide = function(state, record, options)
    local scales, why = {}, nil
    state.peak = math.max(state.peak, record.lr or 0)
    local due = options.at > 0 and record.updates >= options.at
      or options.at == 0 and (record.lr or 0) < options.below * state.peak
    if due and not state.since then
      state.since, why = record.step, "layers move to a higher precision"
    end
    if state.since then
      for name in pairs(record.tensors) do scales[string.match(name, "^(.*):") .. ":high"] = 2 end
    end
    return { scale = 1, scales = scales, reason = why }
  end,
}
