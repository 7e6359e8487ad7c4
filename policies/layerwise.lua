-- Gives each layer a scale, which is applied to the gradient as it runs backward from layer to
-- layer, so that every layer's gradients use the whole range of fp16. Layers near the input, where
-- gradients have become small, get larger scales. With the default options scales are powers of
-- two, so passing from layer to layer rounds nothing. Each scale follows the layer's recent peak,
-- which decays slowly, so that rare spikes keep their headroom.
--
-- record.groups is in the model's order, and an inf propagates toward the input. So only the last
-- group with an inf (the nearest to the loss) backs off. If that group has an inf in more than
-- three steps in a row, the layer after it backs off too: the inf may begin there, in an activation
-- gradient, which record.groups does not cover.
-- Sources: Zhao et al., Adaptive Loss Scaling (2019); fairscale's LayerwiseGradientScaler.
return {
  name = "layerwise",
  doc  = "One scale per layer, each from that layer's largest gradient.",
  needs = { "groups", "amax" },

  options = {
    init_scale = 2^12,
    target     = 2^12,    -- largest stored gradient of a layer: kept between target/4 and target
    forget     = 0.005,   -- per step the peak falls by this share of its octaves above amax
    up         = 2^4,     -- largest growth factor per step
    min_scale  = 2^-20,
    max_scale  = 2^60,
  },

  init = function(options)
    check.positive(options, "target")
    check.expect(options, options.up > 1 and options.forget > 0 and options.forget <= 1,
      "up > 1 and forget in (0, 1]")
    return { scale = check.limits(options), layers = {}, row = 0 }
  end,

  decide = function(state, record, options)
    if not record.groups then return state.scale end
    local scales, above, last, guilty = {}, options.init_scale, nil, nil
    for i = #record.groups, 1, -1 do
      local group = record.groups[i]
      local layer = state.layers[group.name] or { scale = state.scale, peak = 0 }
      local smallest = 2^-24 / layer.scale         -- fp16's smallest number, unscaled
      if record.overflow then
        if group.overflow and not guilty then
          guilty, state.row = group.name, group.name == state.guilty and state.row + 1 or 1
          layer.peak = 4 * options.target / layer.scale        -- lowers the scale to a quarter
        elseif not guilty and state.row >= 3 and record.groups[i - 1]
          and record.groups[i - 1].name == state.guilty then
          layer.scale = layer.scale / 4
        end
      elseif layer.peak > 0 then
        -- In an all-zero group even the largest gradient underflowed.
        local amax = group.amax > 0 and group.amax or smallest
        layer.peak = math.max(amax, layer.peak * (amax / layer.peak)^options.forget)
      else layer.peak = group.amax end
      local peak = layer.peak > 0 and layer.peak or smallest
      local wanted = 2^math.floor(math.log(options.target / peak) / math.log(2))
      if wanted < layer.scale then layer.scale = wanted
      elseif not record.overflow and wanted > 2 * layer.scale then
        -- While its gradients are all zero, a layer's scale grows to at most 2^8 times the
        -- next layer's scale.
        local most = group.amax > 0 and options.max_scale or math.max(layer.scale, above * 2^8)
        layer.scale = math.min(wanted, layer.scale * options.up, most)
      end
      layer.scale = math.max(options.min_scale, math.min(options.max_scale, layer.scale))
      above, last = layer.scale, last or layer.scale
      state.layers[group.name], scales[group.name] = layer, layer.scale
    end
    state.guilty = guilty
    -- The loss is outside all layers and gets the last layer's scale.
    state.scale = last or state.scale
    return { scale = state.scale, scales = next(scales) and scales or nil,
      reason = guilty and "overflow: the scale of " .. guilty .. " backs off" or nil }
  end,
}
