-- Takes all layers out of FP4, permanently, once their gradients are hardly larger than the noise
-- of quantization. The policy divides the norm of the output gradients of all layers by the norm of
-- their quantization error. FP4 ends when the moving mean of this ratio over measured steps falls
-- below sqrt(3). Source: "FP4 All the Way" (arXiv 2505.19115), whose rule uses weight gradients
-- instead. Logs the moving mean. Acts only on steps that the recipe samples.
return {
  name    = "sqrt3",
  doc     = "Stops FP4 when gradients are less than sqrt(3) times their quantization noise.",
  kind    = "fp8",
  needs   = { "tensors", "norm" },
  options = { ratio = math.sqrt(3), decay = 0.8 },
  init = function(options)
    check.positive(options, "ratio")
    check.fraction(options, "decay")
    return { scale = 1 }
  end,
  decide = function(state, record, options)
    local signal, noise, scales, why = 0, 0, {}, nil
    for name, t in pairs(record.tensors) do
      if t.measured and string.find(name, ":dy$") and t.snr == t.snr then
        signal, noise = signal + t.norm ^ 2, noise + t.norm ^ 2 / 10 ^ (t.snr / 10)
      end
    end
    if noise > 0 then
      local ratio = math.sqrt(signal / noise)
      state.mean = state.mean and options.decay * state.mean + (1 - options.decay) * ratio or ratio
      if state.mean < options.ratio and not state.stopped then
        state.stopped, why = true, string.format("FP4 ends: gradients are %.2f times their noise",
          state.mean)
      end
    end
    for name in pairs(state.stopped and record.tensors or {}) do
      scales[string.match(name, "^(.*):") .. ":high"] = 1000     -- above any ladder: high precision
    end
    return { scale = 1, scales = scales, reason = why, log = { gradient_to_noise = state.mean } }
  end,
}
