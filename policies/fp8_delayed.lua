-- Delayed scaling for FP8, as in Transformer Engine's DelayedScaling recipe
-- (common/recipe/delayed_scaling.cu): a tensor is scaled by amaxes of earlier steps, which saves a
-- pass over the tensor. The recipe's margin, format and rule turn an amax into the scale. With
-- algorithm=max, this amax is the largest of the last `history` steps; with algorithm=most_recent,
-- it is the last amax.
--
-- An amax that is 0, inf or nan does not enter the history, and the last valid amax never leaves
-- it. In Transformer Engine invalid amaxes do enter, so an inf from a skipped step keeps the scale
-- constant for the length of the history. Amaxes of gradients are stored without the loss scale and
-- multiplied by the next loss scale, so a change of the loss scale does not look like a change of
-- the gradients. Before its first amax is known, a tensor is scaled by its own current amax. In
-- Transformer Engine it is scaled by 1.
return {
  name    = "fp8_delayed",
  doc     = "Scales FP8 tensors by the amaxes of the last steps (delayed scaling).",
  kind    = "fp8",
  needs   = { "amax", "tensors" },
  options = { history = 1024, algorithm = "max" },
  init = function(options)
    check.whole(options, "history", 1, 1e9)
    if options.algorithm ~= "max" and options.algorithm ~= "most_recent" then
      error("algorithm must be max or most_recent, got " .. options.algorithm, 0)
    end
    return { scale = 2^-126, step = 0, peaks = {} }
  end,
  decide = function(state, record, options)
    local now = state.step + 1
    state.step = now
    local scales, size = {}, options.history
    for name, t in pairs(record.tensors) do
      -- ring.list: { step, amax, step, amax, ... }, a ring of at most `size` pairs. The n pairs
      -- from `head` on are in decreasing order of amax: those that can still become the largest
      -- of a window.
      local ring, amax = state.peaks[name], t.amax
      if ring and not ring.list then                           -- a state of version 0.1
        ring = { head = 0, n = #ring / 2, list = ring }
        state.peaks[name] = ring
      end
      local enters = amax > 0 and not t.overflow
      if enters and (not ring or options.algorithm == "most_recent") then
        ring = { head = 0, n = 0, list = {} }
        state.peaks[name] = ring
      end
      if ring then
        local list, head, n = ring.list, ring.head, ring.n
        while enters and n > 0 and list[2 * ((head + n - 1) % size) + 2] <= amax do n = n - 1 end
        if n > (enters and 0 or 1) and list[2 * head + 1] <= now - size then
          head, n = (head + 1) % size, n - 1
        end
        if enters then
          local at = 2 * ((head + n) % size)
          list[at + 1], list[at + 2], n = now, amax, n + 1
        end
        ring.head, ring.n = head, n
        scales[name] = math.max(2^-125, list[2 * head + 2])
      end
    end
    -- An entry of `scales` that is equal to `scale` counts as left out, and the tensor is scaled by
    -- its own amax. So `scale` is 2^-126, and the entries are 2^-125 or more.
    return { scale = 2^-126, scales = scales }
  end,
}
