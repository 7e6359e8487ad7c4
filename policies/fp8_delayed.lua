-- Delayed scaling of FP8, as Transformer Engine's DelayedScaling recipe has it (common/recipe/delayed_scaling.cu): a tensor is scaled by
-- the amaxes of the steps before, so that no pass over it comes first. The largest of the last `history` amaxes decides
-- (algorithm=max), or the last one alone (most_recent). Margin, format and rule are the recipe's; the scale is made from the amax there.
--
-- An amax that is 0, inf or nan keeps the scale as it is, and here, on purpose, leaves no trace in the history: there, an inf from a
-- step that was skipped would hold the scale for as long as the history is. Amaxes of gradients come without the loss scale and
-- are scaled by the next one, so that a loss scale that moves does not look like a gradient that does. Before the first amax is known
-- a tensor is scaled by its own; there, by 1.
return {
  name    = "fp8_delayed",
  doc     = "Scales of FP8 tensors from the amaxes of the last steps.",
  kind    = "fp8",
  needs   = { "amax", "tensors" },
  options = { history = 1024, algorithm = "max" },
  init = function(options)
    if options.history < 1 or options.history % 1 ~= 0 then error("history must be a whole number of 1 or more") end
    if options.algorithm ~= "max" and options.algorithm ~= "most_recent" then error("algorithm is max or most_recent, not " .. options.algorithm) end
    return { scale = 2^-126, step = 0, peaks = {} }
  end,
  decide = function(state, record, options)
    local now = state.step + 1
    state.step = now
    local scales = {}
    for name, t in pairs(record.tensors) do
      -- peaks: { when, amax, when, amax .. } of those amaxes that can still become the largest of a window, falling
      local peaks, amax = state.peaks[name], t.amax
      if amax > 0 and not t.overflow then
        if not peaks or options.algorithm == "most_recent" then
          peaks = { now, amax }
          state.peaks[name] = peaks
        else
          local n = #peaks
          while n > 0 and peaks[n] <= amax do
            peaks[n], peaks[n - 1] = nil, nil
            n = n - 2
          end
          peaks[n + 1], peaks[n + 2] = now, amax
        end
      end
      if peaks then
        if #peaks > 2 and peaks[1] <= now - options.history then
          table.remove(peaks, 1)
          table.remove(peaks, 1)
        end
        scales[name] = peaks[2]
      end
    end
    return { scale = 2^-126, scales = scales }     -- that of roles without a history, and nobody's amax
  end,
}
