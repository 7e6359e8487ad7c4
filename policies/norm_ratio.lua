-- Norm-ratio scaling: every `ref_every` steps the same batch also runs backward in f32. If the f32
-- norm is far above the low-precision norm, gradients were lost to underflow, and the scale grows.
-- If the f32 norm is far below, gradients saturated, and the scale shrinks. Source: common
-- practice, without a reference implementation. `ref_layers`, a pattern of parameter names, limits
-- the reference to some layers.
return {
  name = "norm_ratio",
  doc  = "Compares, on sampled steps, the norm of an f32 backward pass with the stored norm.",
  needs = { "norm", "norm_ref", "groups" },

  options = {
    init_scale = 2^12,
    ref_every  = 50,      -- steps between two reference passes
    ref_layers = "",      -- "": all layers
    high       = 8,       -- a larger ratio means underflow; 1.05 reacts to a few lost gradients
    low        = 0.125,   -- a smaller ratio means saturation
    decay      = 0.5,     -- decay of the moving mean of log2(ratio)
    growth     = 2,
    backoff    = 0.5,
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    check.fraction(options, "decay")
    check.factor(options, "growth")
    check.share(options, "backoff")
    check.expect(options, options.high > options.low and options.low > 0, "high > low > 0")
    check.whole(options, "ref_every", 1, 1e9)
    return { scale = check.limits(options), log_ratio = 0 }
  end,

  decide = function(state, record, options)
    local reason
    if record.overflow then
      state.scale, state.log_ratio, reason = state.scale * options.backoff, 0, "overflow"
    elseif record.norm_ref and record.norm_ref > 0 then
      local norm = record.norm
      if options.ref_layers ~= "" and record.groups then
        -- the norm over only those tensors that the reference pass covered
        local squares = 0
        for _, tensor in pairs(record.tensors) do
          squares = squares + (tensor.norm_ref and tensor.norm^2 or 0)
        end
        norm = math.sqrt(squares)
      end
      -- If every gradient was lost, the ratio counts as 2^10.
      local log_ratio = norm > 0 and math.log(record.norm_ref / norm) / math.log(2) or 10
      log_ratio = math.max(-10, math.min(10, log_ratio))
      state.log_ratio = options.decay * state.log_ratio + (1 - options.decay) * log_ratio
      local ratio = 2^state.log_ratio
      if ratio > options.high then
        state.scale, state.log_ratio = state.scale * options.growth, 0
      elseif ratio < options.low then
        state.scale, state.log_ratio = state.scale * options.backoff, 0
      end
      reason = ("f32 norm / norm = %.4g"):format(2^log_ratio)
    end
    state.scale = math.max(options.min_scale, math.min(options.max_scale, state.scale))
    return { scale = state.scale, reason = reason }
  end,
}
