-- ZClip: clips the gradient norm if its z-score, from moving means of the norm and of its squared
-- deviation, is above z_thresh. The first warmup_steps norms give the first mean and deviation. The
-- statistics follow the clipped norm. Source: Kumar et al., ZClip (2025, arXiv 2504.02507), and the
-- package zclip 1.0.0.
--
-- clip_option chooses the norm to clip to: adaptive_scaling (the higher the z-score, the nearer to
-- the mean), mean, or percentile (mean + z_thresh * deviation; the original's mode "percentile").
-- max_grad_norm limits every norm; the statistics ignore this limit.
--
-- Differences: steps that overflow stay out of the statistics. In the original a NaN stays in them
-- permanently, and from then on only max_grad_norm works (keep_nan=true does the same). A mean of 0
-- clips nothing; the original would clip to 0 forever.

-- Returns the limit for `norm` if its z-score is too high, and nil or false otherwise. The second
-- result is the values to log.
local function judge(state, norm, options)
  local mean, std, far = state.mean, math.sqrt(state.var), options.z_thresh
  local z = (norm - mean) / (std + options.eps)
  local log = { z = z, mean = mean, std = std, threshold = mean + far * std }
  if options.clip_option == "percentile" then return norm > log.threshold and log.threshold, log end
  if not (z > far) then return nil, log end
  if options.clip_option == "mean" then return mean, log end
  return (mean + far * std / (z / far)) * options.clip_factor, log
end

return {
  name  = "zclip",
  doc   = "ZClip: clips gradient norms far above their moving mean, by z-score.",
  needs = { "norm" },

  options = {
    alpha                = 0.97,    -- decay of the moving means
    z_thresh             = 2.5,     -- z-score above which a norm is clipped
    max_grad_norm        = 1,       -- largest norm of any step; inf: no limit
    eps                  = 1e-6,    -- added to the deviation
    warmup_steps         = 25,      -- norms that give the first mean and deviation
    clip_option          = "adaptive_scaling",   -- or mean, percentile
    clip_factor          = 1,       -- factor on the norm that adaptive_scaling clips to
    skip_update_on_spike = false,   -- true: a clipped step does not change the statistics
    keep_nan             = false,   -- true: norms of steps that overflow enter the statistics
    loss_scale           = 0,       -- a fixed loss scale (1 for bf16); 0: dynamic.lua's rule
    init_scale           = 2^16,
    growth_interval      = 2000,    -- good steps in a row until the scale doubles
  },

  init = function(options)
    check.share(options, "alpha")
    check.positive(options, "z_thresh", "eps", "clip_factor")
    check.whole(options, "warmup_steps", 1, 20000)
    local choice = options.clip_option
    if choice ~= "adaptive_scaling" and choice ~= "mean" and choice ~= "percentile" then
      error("clip_option must be adaptive_scaling, mean or percentile, got " .. choice, 0)
    end
    check.expect(options, options.max_grad_norm > 0, "max_grad_norm > 0 (inf: no limit)")
    return { scale = check.rescale(options), good = 0, first = {} }
  end,

  decide = function(state, record, options)
    local verdict, norm = rescale(state, record, options), record.norm
    verdict.clip = options.max_grad_norm
    if record.overflow then
      if not options.keep_nan then return verdict end
      norm = record.nan > 0 and 0/0 or 1/0
    end
    if not state.mean then                        -- warming up
      local first, sum, squares = state.first, 0, 0
      first[#first + 1] = norm
      if #first >= options.warmup_steps then
        for _, x in ipairs(first) do sum = sum + x end
        state.mean = sum / #first
        for _, x in ipairs(first) do squares = squares + (x - state.mean)^2 end
        state.var, state.first = squares / #first, {}
      end
      return verdict
    end
    local clip, log = judge(state, norm, options)
    if clip and state.mean ~= 0 then
      verdict.clip = math.min(clip, options.max_grad_norm)
      verdict.reason = (verdict.reason and verdict.reason .. "; " or "")
        .. ("norm %.4g is %.1f deviations from the mean %.4g: clip at %.4g"):format(norm, log.z,
        log.mean, verdict.clip)
    else
      clip = nil
    end
    if not (clip and options.skip_update_on_spike) then
      local seen, alpha = clip or norm, options.alpha
      state.mean = alpha * state.mean + (1 - alpha) * seen
      state.var = alpha * state.var + (1 - alpha) * (seen - state.mean)^2
    end
    verdict.log = log
    return verdict
  end,
}
