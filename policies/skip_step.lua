-- OLMo-core's SkipStepOptimizer: skips an update whose loss or gradient norm is more than
-- sigma_factor standard deviations (unbiased) above the mean of the last rolling_interval_length
-- steps, the current step not included. It judges steps once they fill half of the window. Skipped
-- steps enter the window, so a lasting new level is accepted after a while. Source:
-- olmo_core/optim/skip_step_optimizer.py, version 3.0.0; an earlier version also skipped values far
-- below the mean.
--
-- Oddity: after equal values the deviation is 0, so any larger value is skipped.
-- Difference: a loss or norm that is not finite skips its own step and stays out of the window. In
-- the original such a value makes the deviation NaN, and all steps are skipped until it has left
-- the window (keep_nan=true does the same). Statistics are in double; in the original, in float32.
-- Skipping needs mode=sync.

-- Returns whether `x`, a loss or a norm, allows the step to proceed. If the window has two values
-- or more, adds its mean and deviation and the z-score of x to the log, as NAME_mean, NAME_std and
-- NAME_z. Then adds x to the window, unless x is not finite and keep_nan is false.
local function judge(window, name, x, options, log)
  local n, finite = #window, x - x == 0
  local fine = finite or options.keep_nan
  if n > 1 then
    local sum, squares = 0, 0
    for i = 1, n do sum = sum + window[i] end
    local mean = sum / n
    for i = 1, n do squares = squares + (window[i] - mean)^2 end
    local std = math.sqrt(squares / (n - 1))
    log[name .. "_mean"], log[name .. "_std"], log[name .. "_z"] = mean, std, (x - mean) / std
    if n + 1 >= math.floor(options.rolling_interval_length / 2) then
      fine = fine and x - mean <= options.sigma_factor * std     -- false if x or std is NaN
    end
  end
  if finite or options.keep_nan then
    window[n + 1] = x
    if n == options.rolling_interval_length then table.remove(window, 1) end
  end
  return fine
end

return {
  name  = "skip_step",
  doc   = "OLMo-core's SkipStep: skips updates whose loss or norm is far above the recent ones.",
  needs = { "norm" },

  options = {
    rolling_interval_length = 128,     -- steps in the window
    sigma_factor            = 6,       -- deviations above the mean beyond which a step is skipped
    keep_nan                = false,   -- true: numbers that are not finite enter the window
    loss_scale              = 0,       -- a fixed loss scale (1 for bf16); 0: dynamic.lua's rule
    init_scale              = 2^16,
    growth_interval         = 2000,    -- good steps in a row until the scale doubles
  },

  init = function(options)
    check.positive(options, "sigma_factor")
    check.whole(options, "rolling_interval_length", 6, 20000)
    return { scale = check.rescale(options), good = 0, losses = {}, norms = {} }
  end,

  decide = function(state, record, options)
    local verdict, norm = rescale(state, record, options), record.norm
    if record.overflow then norm = record.nan > 0 and 0/0 or 1/0 end
    local log = {}
    local calm = judge(state.losses, "loss", record.loss, options, log)
    local steady = judge(state.norms, "norm", norm, options, log)
    verdict.log = log
    if not (calm and steady) and not record.overflow then
      local name, x = "loss", record.loss
      if calm then name, x = "norm", norm end
      verdict.action = "skip"
      verdict.reason = (verdict.reason and verdict.reason .. "; " or "")
        .. ("%s %.4g is %.1f deviations above its mean: skipped"):format(name, x,
        log[name .. "_z"] or 0/0)
    end
    return verdict
  end,
}
