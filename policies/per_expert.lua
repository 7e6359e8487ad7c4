-- Mixtures of experts: each expert has a scale of its own, all else the common one. A rarely chosen expert has small gradients, a
-- favourite large ones, and an expert that overflows costs itself range, not the whole model. Idle experts (no token came) learn
-- nothing. Source: layer-wise scaling (Zhao et al., 2019; fairscale), applied to the groups that nn.moe declares.
return {
  name = "per_expert",
  doc  = "One scale per expert, the others follow a dynamic one.",
  needs = { "groups", "amax" },

  options = {
    init_scale      = 2^14,
    experts         = "experts%.%d+$",   -- pattern of the groups that are experts
    target          = 2^13,              -- an expert's largest stored gradient, between target/4 and target
    growth_interval = 500,               -- of the common scale
    min_scale       = 2^-20,
    max_scale       = 2^40,
  },

  init = function(options) return { scale = options.init_scale, good = 0, experts = {} } end,

  decide = function(state, record, options)
    local scales, guilty, reason = {}, 0, nil
    local function limited(scale) return math.max(options.min_scale, math.min(options.max_scale, scale)) end
    for _, group in pairs(record.groups or {}) do
      if group.name:find(options.experts) then
        local expert = state.experts[group.name] or { scale = state.scale, room = 1 }
        if group.overflow then
          guilty = guilty + 1
          expert.scale, expert.room = expert.scale / 4, math.max(2^-8, expert.room / 2)
        elseif group.amax > 0 then
          expert.room = math.min(1, expert.room * 1.002)
          local factor = 2^math.floor(math.log(options.target * expert.room / (group.amax * expert.scale)) / math.log(2))
          if factor < 1 or factor > 2 then expert.scale = expert.scale * math.min(16, factor) end
        end
        expert.scale = limited(expert.scale)
        state.experts[group.name], scales[group.name] = expert, expert.scale
      elseif group.overflow then reason = "overflow outside the experts" end
    end
    if record.overflow and (reason or guilty == 0) then state.scale, state.good = limited(state.scale / 2), 0
    elseif not record.overflow then
      state.good = state.good + 1
      if state.good % options.growth_interval == 0 then state.scale = limited(state.scale * 2) end
    end
    if guilty > 0 then reason = (reason and reason .. "; " or "") .. guilty .. " experts back off" end
    return { scale = state.scale, scales = next(scales) and scales or nil, reason = reason }
  end,
}
