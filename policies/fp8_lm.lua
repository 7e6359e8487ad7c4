-- FP8-LM's automatic scaling of gradients: a tensor is multiplied by a factor mu, then stored in
-- FP8. mu halves when the share of saturated elements is above `threshold`. Otherwise it doubles
-- over growth_interval steps. Source: Peng et al., FP8-LM (2023, arXiv 2310.18313); the authors'
-- code (MS-AMP) does not contain the rule.
--
-- This is an FP8 policy because the rule needs counts of saturated elements, which only an FP8
-- layer has. A loss scale would also act on gradients that are never cast to FP8. The policy
-- differs from the paper in four points:
--   - mu is per layer and acts on the gradient of a layer's output (`:dy`); the paper has one
--     mu for the weight gradients that ranks reduce in FP8.
--   - The first mu scales the first measured amax to FP8's largest number.
--   - Elements are counted only at the steps that the recipe samples. At such a step mu grows for
--     all steps since the last count. sample=1 is the paper's rule; with sample=0 gradients are
--     scaled by their own amax, as if there were no policy.
--   - An element counts as saturated if it is beyond the largest number. In the paper, an element
--     that is equal to the largest number also counts.
-- If a tensor has an inf or nan, or only zeros, the step does not change the tensor's mu.
return {
  name    = "fp8_lm",
  doc     = "FP8-LM: halves a gradient's FP8 scale when too much saturates, else grows it slowly.",
  kind    = "fp8",
  needs   = { "amax", "tensors" },
  options = {
    threshold       = 1e-5,   -- share of saturated elements above which mu halves
    growth_interval = 1000,   -- steps that mu takes to double
  },
  init = function(options)
    check.share(options, "threshold")
    check.steps(options, "growth_interval")
    return { scale = 2^-126, step = 0, tops = {}, counted = {} }
  end,
  decide = function(state, record, options)
    local now, scales = state.step + 1, {}
    state.step = now
    for name, t in pairs(record.tensors) do
      if string.match(name, ":dy$") then
        local top = state.tops[name]           -- largest magnitude that does not saturate, ~ 1 / mu
        if t.measured and t.amax > 0 and not t.overflow then
          if not top then top = t.amax
          elseif t.clipped > options.threshold * t.measured then top = top * 2
          else top = top / 2^((now - state.counted[name]) / options.growth_interval) end
          -- 2^-126 marks tensors without a scale, so a scale is at least 2^-125.
          top = math.max(2^-125, math.min(top, 2^127))
          state.tops[name], state.counted[name] = top, now
        end
        scales[name] = top
      end
    end
    return { scale = 2^-126, scales = scales }
  end,
}
