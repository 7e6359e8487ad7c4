-- Gives each expert of a mixture a scale that follows the expert's recent peak. Everything else has
-- the common scale. A rarely chosen expert has small gradients, a popular one large gradients, and
-- an expert that overflows lowers only its own scale. An expert without tokens keeps its peak.
-- Source: layer-wise scaling (Zhao et al., 2019; fairscale), applied to the groups that nn.moe
-- declares.
return {
  name = "per_expert",
  doc  = "One scale per expert of a mixture; everything else follows a dynamic scale.",
  needs = { "groups", "amax" },

  options = {
    init_scale      = 2^14,
    experts         = "experts%.%d+$",   -- Lua pattern that matches the names of expert groups
    target          = 2^13,    -- an expert's largest stored gradient lies in target/4 .. target
    forget          = 0.005,   -- per step, the peak falls by this share of its octaves above amax
    growth_interval = 500,               -- good steps until the common scale grows
    min_scale       = 2^-20,
    max_scale       = 2^40,
  },

  init = function(options)
    check.positive(options, "target")
    check.count(options, "growth_interval")
    check.expect(options, options.forget > 0 and options.forget <= 1, "forget in (0, 1]")
    return { scale = check.limits(options), good = 0, experts = {} }
  end,

  decide = function(state, record, options)
    local scales, guilty, others = {}, 0, false
    local function limited(scale)
      return math.max(options.min_scale, math.min(options.max_scale, scale))
    end
    for _, group in pairs(record.groups or {}) do
      if group.name:find(options.experts) then
        local expert = state.experts[group.name] or { scale = state.scale, peak = 0 }
        -- After an overflow, the new peak lowers the scale to a quarter.
        if group.overflow then expert.peak, guilty = 4 * options.target / expert.scale, guilty + 1
        elseif group.amax > 0 then
          expert.peak = expert.peak > 0 and math.max(group.amax,
            expert.peak * (group.amax / expert.peak)^options.forget) or group.amax
        end
        if expert.peak > 0 then
          local wanted = 2^math.floor(math.log(options.target / expert.peak) / math.log(2))
          if wanted < expert.scale or wanted > 2 * expert.scale then
            expert.scale = limited(math.min(wanted, expert.scale * 16))
          end
        end
        state.experts[group.name], scales[group.name] = expert, expert.scale
      else others = others or group.overflow end
    end
    if record.overflow and (others or guilty == 0) then
      state.scale, state.good = limited(state.scale / 2), 0
    elseif not record.overflow then
      state.good = state.good + 1
      if state.good % options.growth_interval == 0 then state.scale = limited(state.scale * 2) end
    end
    local reason = guilty > 0 and guilty .. " of the experts overflowed, and their scales back off"
      or nil
    if others then
      reason = (reason and reason .. "; " or "") .. "overflow outside the experts"
    end
    return { scale = state.scale, scales = next(scales) and scales or nil, reason = reason }
  end,
}
