-- Clips the norm of the whole update, not of the gradient, to the mean of the last updates' norms
-- plus sigma_factor standard deviations (population deviation, at least 1e-6). The window stores
-- the norms before clipping. Clipping begins once half of the window is full. Source: levanter's
-- clip_update_by_historical_norm, which the Marin project added after loss spikes of a model with
-- 32B parameters.
--
-- Difference: the statistics are in double here and in float32 in levanter. Needs mode=sync and a
-- fused optimizer; ZeRO and experts divided among ranks refuse it.
return {
  name  = "update_clip",
  doc   = "levanter's update clipping: limits the update's norm by those of the last updates.",
  needs = { "update_norm", "update_clip" },

  options = {
    rolling_interval_length = 128,     -- updates in the window
    sigma_factor            = 3,       -- updates are clipped to this many deviations above the mean
    loss_scale              = 0,       -- a fixed loss scale (1 for bf16); 0: dynamic.lua's rule
    init_scale              = 2^16,
    growth_interval         = 2000,    -- good steps in a row until the scale doubles
  },

  init = function(options)
    check.positive(options, "sigma_factor")
    check.whole(options, "rolling_interval_length", 2, 20000)
    return { scale = check.rescale(options), good = 0, norms = {} }
  end,

  decide = function(state, record, options)
    local verdict, norms = rescale(state, record, options), state.norms
    local length = options.rolling_interval_length
    if record.update_norm then                    -- nil after a step without an update
      norms[#norms + 1] = record.update_norm
      if #norms > length then table.remove(norms, 1) end
    end
    if #norms < math.max(2, math.floor(length / 2)) then return verdict end
    local sum, squares = 0, 0
    for _, x in ipairs(norms) do sum = sum + x end
    local mean = sum / #norms
    for _, x in ipairs(norms) do squares = squares + (x - mean)^2 end
    local std = math.sqrt(squares / #norms)
    verdict.update_clip = mean + options.sigma_factor * math.max(std, 1e-6)
    verdict.log = { mean = mean, std = std, threshold = verdict.update_clip, last = norms[#norms] }
    return verdict
  end,
}
