-- Dynamic loss scaling as ColossalAI's DynamicGradScaler does it, number for number: Megatron's, with an optional largest scale
-- and an optional smallest one. The scale is a float32. (The original forgets its counters in a checkpoint; here a
-- resumed run goes on as if it had not been interrupted.)
return {
  name = "colossalai",
  doc  = "ColossalAI's DynamicGradScaler: hysteresis refilled by growth, optional limits on both sides.",

  options = {
    initial_scale   = 2^16,
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 1000,   -- good steps in a row
    min_scale       = 0,      -- 0: none. ColossalAI's own fp16 plug-in sets 1
    max_scale       = 0,      -- 0: none. ColossalAI's own fp16 plug-in sets 2^32
    hysteresis      = 2,      -- overflows, from one growth to the next, until every one backs off
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local scale, interval = math.f32(options.initial_scale), options.growth_interval
    need(scale > 0 and scale < math.huge, "initial_scale must be a positive number that float32 can hold, got " .. options.initial_scale)
    need(options.min_scale >= 0 and options.min_scale < math.huge, "min_scale must be 0 or a positive finite number, got " .. options.min_scale)
    need(options.max_scale >= 0, "max_scale must be 0 or a positive number, got " .. options.max_scale)
    need(options.growth_factor > 1 and options.growth_factor < math.huge,
      "growth_factor must be greater than 1 and finite, got " .. options.growth_factor)
    need(options.backoff_factor > 0 and options.backoff_factor < 1,
      "backoff_factor must lie between 0 and 1, got " .. options.backoff_factor)
    trap(not (interval >= 1) or interval ~= math.floor(interval),
      "growth_interval = " .. interval .. " is never met by a whole number of steps, so the scale would never grow")
    trap(not (options.hysteresis >= 1) or options.hysteresis ~= math.floor(options.hysteresis),
      "hysteresis = " .. options.hysteresis .. " is no count of overflows; use 1 to back off at every overflow")
    trap(options.min_scale > scale, "min_scale = " .. options.min_scale .. " is above initial_scale = " .. scale
      .. ", so an overflow would raise the scale; lower min_scale")
    trap(options.max_scale ~= 0 and options.max_scale < scale, "max_scale = " .. options.max_scale
      .. " is below initial_scale = " .. scale .. ", so growth would lower the scale; raise max_scale")
    return { scale = scale, growth_step = 0, hysteresis_step = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.hysteresis_step = state.hysteresis_step + 1
      state.growth_step = 0
      if state.hysteresis_step < options.hysteresis then
        return { scale = scale, reason = "overflow " .. state.hysteresis_step .. " of " .. options.hysteresis .. ", scale stays " .. scale }
      end
      local smaller = math.f32(scale * math.f32(options.backoff_factor))
      if options.min_scale ~= 0 then smaller = math.max(smaller, math.f32(options.min_scale)) end
      if smaller == 0 then
        return { scale = scale, action = "stop", reason = "the loss scale fell to " .. scale
          .. " and gradients still overflow: they are inf or nan for another reason than the scale"
          .. " (look at the first bad tensor, the learning rate, the data)" }
      end
      state.scale = smaller
      return { scale = smaller, reason = scale == smaller and "overflow at the smallest scale " .. scale
        or "overflow: scale " .. scale .. " -> " .. smaller }
    end
    state.growth_step = state.growth_step + 1
    if state.growth_step ~= options.growth_interval then return scale end
    state.growth_step = 0
    state.hysteresis_step = 0
    local larger = math.f32(scale * math.f32(options.growth_factor))
    if options.max_scale ~= 0 then larger = math.min(larger, math.f32(options.max_scale)) end
    if larger == math.huge then
      if options.strict then return { scale = scale, reason = "growth would reach infinity: the scale stays" } end
      return { scale = scale, action = "stop", reason = "the loss scale would grow to infinity and stay there" }
    end
    state.scale = larger
    return { scale = larger, reason = options.growth_interval .. " good in a row: scale " .. scale .. " -> " .. larger }
  end,
}
