-- Megatron-LM's grad_norm_skip_threshold: skips an update whose gradient norm, before clipping, is
-- above a fixed threshold. As in Megatron-LM, the default is infinity, which skips nothing. Choose
-- a threshold well above the norms of a healthy run (`engine plot RUN --columns norm`); a threshold
-- below them skips every step. Source: megatron/core/optimizer/optimizer.py, ChainedOptimizer.step
-- (the code was read, not run).
--
-- A skipped step counts as a good one for the loss scale, as in Megatron-LM. Skipping needs
-- mode=sync.
return {
  name  = "norm_skip",
  doc   = "Megatron-LM's grad_norm_skip_threshold: skips updates with too large a gradient norm.",
  needs = { "norm" },

  options = {
    grad_norm_skip_threshold = math.huge,
    loss_scale               = 0,      -- a fixed loss scale (1 for bf16); 0: dynamic.lua's rule
    init_scale               = 2^16,
    growth_interval          = 2000,   -- good steps in a row until the scale doubles
  },

  init = function(options)
    check.expect(options, options.grad_norm_skip_threshold > 0,
      "grad_norm_skip_threshold > 0 (0 would skip every step)")
    return { scale = check.rescale(options), good = 0, skipped = 0 }
  end,

  decide = function(state, record, options)
    local verdict, threshold = rescale(state, record, options), options.grad_norm_skip_threshold
    if not record.overflow and record.norm > threshold then
      state.skipped = state.skipped + 1
      verdict.action = "skip"
      verdict.reason = (verdict.reason and verdict.reason .. "; " or "")
        .. ("norm %.4g is above %.4g: skipped"):format(record.norm, threshold)
    end
    verdict.log = { threshold = threshold, skipped = state.skipped }
    return verdict
  end,
}
