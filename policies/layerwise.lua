-- A scale for each layer, on the signal that runs backward between layers, so that every layer's gradients use the whole of fp16's
-- range. Layers near the input, where gradients have become small, get larger scales. Scales are powers of two: going from layer to
-- layer rounds nothing. Sources: Zhao et al., Adaptive Loss Scaling (2019); fairscale's LayerwiseGradientScaler.
-- Groups come in the model's order. An infinity runs on toward the input, so every layer that shows one backs off, and the one
-- after the last of them, where it may have begun; those that were innocent are back in a few steps.
return {
  name = "layerwise",
  doc  = "One scale per layer, each from that layer's largest gradient.",
  needs = { "groups", "amax" },

  options = {
    init_scale = 2^12,
    target     = 2^12,    -- the largest stored gradient of a layer, between target/4 and target
    up         = 2^4,     -- most growth in a step
    forgive    = 500,     -- good steps until a layer that overflowed may use its full range again
    min_scale  = 2^-20,
    max_scale  = 2^60,
  },

  init = function(options) return { scale = options.init_scale, layers = {}, good = 0 } end,

  decide = function(state, record, options)
    if not record.groups then return state.scale end
    state.good = record.overflow and 0 or state.good + 1
    local above, scales, last, backed = nil, {}, nil, 0
    for i = #record.groups, 1, -1 do
      local group, before = record.groups[i], record.groups[i - 1]
      local layer = state.layers[group.name] or { scale = state.scale, room = 1 }
      if state.good > 0 and state.good % options.forgive == 0 then layer.room = math.min(1, layer.room * 2) end
      local target = options.target * layer.room
      if group.overflow or before and before.overflow then
        layer.scale, layer.room, backed = layer.scale / 4, math.max(2^-8, layer.room / 2), backed + 1
      elseif not record.overflow and group.amax > 0 then
        local factor = 2^math.floor(math.log(target / (group.amax * layer.scale)) / math.log(2))
        if factor < 1 or factor > 2 then layer.scale = layer.scale * math.min(options.up, factor) end
      elseif not record.overflow then                                           -- all zero: look for it, not far from its neighbour
        layer.scale = math.min(layer.scale * options.up, math.max(layer.scale, (above or options.init_scale) * 2^8))
      end
      layer.scale = math.max(options.min_scale, math.min(options.max_scale, layer.scale))
      above, last = layer.scale, last or layer.scale
      state.layers[group.name], scales[group.name] = layer, layer.scale
    end
    state.scale = last or state.scale                         -- what lies outside all layers, the loss, is scaled as the last one
    return { scale = state.scale, scales = scales, reason = backed > 0 and ("%d layers back off"):format(backed) or nil }
  end,
}
