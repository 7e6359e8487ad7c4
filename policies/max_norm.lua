-- A hybrid: max-value scaling at every step, calibrated every ref_every steps by a reference
-- backward pass in f32. If the f32 norm shows that gradients are lost, the target of the largest
-- gradient rises (to `bold` at most). If gradients saturate or overflow, the target falls. Source:
-- the combination of max_value.lua (its limit=before) and norm_ratio.lua.
return {
  name = "max_norm",
  doc  = "Max-value scaling; a reference backward pass in f32 calibrates its target.",
  needs = { "amax", "norm", "norm_ref" },

  options = {
    init_scale = 2^12,
    target     = 32768,   -- largest stored gradient to aim at, at first
    bold       = 49152,   -- the highest target
    ref_every  = 100,     -- steps between two reference passes
    high       = 1.05,    -- ratio f32 norm / norm above which gradients underflow
    low        = 0.95,    -- ratio below which they saturate
    decay      = 0.9,     -- share of the old scale in the next scale
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    check.positive(options, "target", "bold")
    check.fraction(options, "decay")
    check.expect(options, options.target <= options.bold and options.low < options.high,
      "target <= bold and low < high")
    check.whole(options, "ref_every", 1, 1e9)
    return { scale = check.limits(options), target = options.target }
  end,

  decide = function(state, record, options)
    local scale, reason = state.scale, nil
    local function aim(factor)
      state.target = math.max(2^-6, math.min(options.bold, state.target * factor))
    end
    if record.overflow then
      aim(0.5)
      scale, reason = scale / 2, ("overflow: the target of amax falls to %.4g"):format(state.target)
    elseif record.amax > 0 then
      if record.norm_ref and record.norm > 0 then
        local ratio = record.norm_ref / record.norm
        if ratio > options.high then aim(1.5) elseif ratio < options.low then aim(0.75) end
        reason = ("f32 norm / norm = %.4g: target %.4g"):format(ratio, state.target)
      end
      local wanted = math.max(scale / 2, math.min(scale * 2, state.target / record.amax))
      scale = options.decay * scale + (1 - options.decay) * wanted
    elseif record.norm_ref and record.norm_ref > 0 then
      scale, reason = scale * 16, "all gradients are zero, but not in f32"
    end
    state.scale = math.max(options.min_scale, math.min(options.max_scale, scale))
    return { scale = state.scale, reason = reason }
  end,
}
