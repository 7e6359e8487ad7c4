-- Moves each layer up and down the recipe's `ladder`, for example NVFP4, MXFP8, high precision. A
-- layer goes one rung up, to a higher precision and at most to rung `rungs`, if the signal-to-noise
-- ratio of any of its tensors falls below `snr` dB (`snr_high` once the layer is on a rung of the
-- ladder). After `pause` steps on a rung, the layer tries the rung below. Each time it goes up
-- again, its pause becomes `grow` times longer, up to `longest`. The policy moves layers up only on
-- steps that the recipe samples.
return {
  name    = "layer_ladder",
  doc     = "Moves each layer between the rungs of an FP8 recipe's ladder by its SNR.",
  kind    = "fp8",
  needs   = { "tensors" },
  options = { snr = 12, snr_high = 20, rungs = 2, pause = 200, grow = 2, longest = 10000 },
  init = function(options)
    check.not_negative(options, "snr", "snr_high")
    check.count(options, "rungs")
    check.expect(options, options.pause >= 1 and options.grow >= 1
      and options.longest >= options.pause, "longest >= pause >= 1 and grow >= 1")
    return { scale = 1, step = 0, rung = {}, pause = {}, down = {} }
  end,
  decide = function(state, record, options)
    local now, scales, why, worst = state.step + 1, {}, nil, {}
    state.step = now
    for name, t in pairs(record.tensors) do
      local site = string.match(name, "^(.*):")
      if t.measured and t.snr < (worst[site] or math.huge) then worst[site] = t.snr end
    end
    for site, snr in pairs(worst) do
      local rung = state.rung[site] or 0
      if rung < options.rungs and snr < (rung > 0 and options.snr_high or options.snr) then
        state.pause[site] = math.min(state.pause[site] and state.pause[site] * options.grow
          or options.pause, options.longest)
        state.rung[site], state.down[site] = rung + 1, now + state.pause[site]
        why = why or string.format("%s goes up to rung %d: SNR %.1f dB", site, rung + 1, snr)
      end
    end
    for site, rung in pairs(state.rung) do
      if now >= state.down[site] then
        rung, state.down[site] = rung - 1, now + state.pause[site]
        state.rung[site] = rung > 0 and rung or nil
      end
      if rung > 0 then scales[site .. ":high"] = rung + 1 end
    end
    return { scale = 1, scales = scales, reason = why }
  end,
}
