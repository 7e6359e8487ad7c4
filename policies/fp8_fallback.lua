-- Takes a layer out of FP8 when quantization loses too much: when, in one of the layer's three
-- tensors, the signal-to-noise ratio is below `snr` dB, the share of numbers lost to 0 is above
-- `underflow`, or the share of clipped numbers is above `clipped`. The layer then computes in high
-- precision (or as the first rung of the recipe's `ladder` says) for `pause` steps, and tries FP8
-- again. Each further failure makes the pause `grow` times longer, up to `longest`. The recipe
-- measures the tensors only on the steps that it samples (its `sample`), so only these steps take a
-- layer out of FP8.
return {
  name    = "fp8_fallback",
  doc     = "Moves layers with low SNR or high underflow out of FP8 and retries them later.",
  kind    = "fp8",
  needs   = { "tensors", "underflow" },
  options = { snr = 20, underflow = 0.1, clipped = 0.01, pause = 200, grow = 2, longest = 10000 },
  init = function(options)
    check.not_negative(options, "snr", "underflow", "clipped")
    check.expect(options, options.pause >= 1 and options.grow >= 1
      and options.longest >= options.pause, "longest >= pause >= 1 and grow >= 1")
    return { scale = 1, step = 0, back = {}, pause = {} }
  end,
  decide = function(state, record, options)
    local now, scales, why = state.step + 1, {}, nil
    state.step = now
    for name, t in pairs(record.tensors) do
      local site = string.match(name, "^(.*):")
      if t.measured and not (state.back[site] and state.back[site] > now) then
        local lost, clipped = t.underflow / t.measured, t.clipped / t.measured
        if t.snr < options.snr or lost > options.underflow or clipped > options.clipped then
          local pause = math.min(state.pause[site] and state.pause[site] * options.grow
            or options.pause, options.longest)
          state.pause[site], state.back[site] = pause, now + pause
          why = why or string.format(
            "%s moves up: SNR %.1f dB, %.2g %% became 0, %.2g %% clipped", name, t.snr, 100 * lost,
            100 * clipped)
        end
      end
    end
    for site, back in pairs(state.back) do
      if back > now then scales[site .. ":high"] = 2 else state.back[site] = nil end
    end
    return { scale = 1, scales = scales, reason = why }
  end,
}
