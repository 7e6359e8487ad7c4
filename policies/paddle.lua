-- Dynamic loss scaling of Paddle's GradScaler, number for number. It counts overflows in a row, so
-- a good step resets the count. Paddle has two versions. The version for dynamic graphs has no
-- limits. The version for static graphs (static_graph=true) never goes below 1 and does not grow to
-- infinity. The scale is a float32. Differences: where the scale of dynamic graphs would become 0,
-- the run stops. Where it would become infinite, it keeps its last finite value, or with
-- strict=false the run stops at that step. Other releases of Paddle have the defaults
-- decr_every_n_nan_or_inf 1, init_loss_scaling 2^16 and incr_every_n_steps 2000.
return {
  name = "paddle",
  doc  = "Paddle's GradScaler: backs off after decr_every_n_nan_or_inf overflows in a row.",

  options = {
    init_loss_scaling        = 2^15,
    incr_ratio               = 2,
    decr_ratio               = 0.5,
    incr_every_n_steps       = 1000,    -- good steps in a row until the scale grows
    decr_every_n_nan_or_inf  = 2,       -- overflows in a row until the scale backs off
    use_dynamic_loss_scaling = true,    -- false: the scale is constant
    static_graph             = false,   -- true: the version for static graphs
    strict                   = true,    -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = check.float32(options, "init_loss_scaling")
    check.factor(options, "incr_ratio")
    check.share(options, "decr_ratio")
    check.count(options, "incr_every_n_steps")
    check.count(options, "decr_every_n_nan_or_inf")
    check.trap(options, options.static_graph and scale < 1,
      "init_loss_scaling = " .. scale
        .. " is below 1, the smallest scale, so an overflow would raise it")
    return { scale = scale, incr_count = 0, decr_count = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if not options.use_dynamic_loss_scaling then return scale end
    if record.overflow then
      state.incr_count = 0
      state.decr_count = state.decr_count + 1
      if state.decr_count ~= options.decr_every_n_nan_or_inf then
        return { scale = scale,
          reason = "overflow " .. state.decr_count .. " of " .. options.decr_every_n_nan_or_inf
          .. " in a row, scale stays " .. scale }
      end
      state.decr_count = 0
      local smaller = math.f32(scale * math.f32(options.decr_ratio))
      if options.static_graph then smaller = math.max(smaller, 1) end
      return back_off(state, smaller)
    end
    state.decr_count = 0
    state.incr_count = state.incr_count + 1
    if state.incr_count ~= options.incr_every_n_steps then return scale end
    state.incr_count = 0
    return grow(state, math.f32(scale * math.f32(options.incr_ratio)),
      options.incr_every_n_steps .. " good steps in a row",
      not options.static_graph and options or nil)
  end,
}
