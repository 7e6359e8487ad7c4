-- Dynamic loss scaling as Megatron-LM's DynamicGradScaler does it, number for number: the scale is a float32, hysteresis
-- counts overflows and is refilled by growth alone, never by a good step.
-- There the scale reaches infinity when it grows for long enough; here it keeps its last finite value, or, with
-- strict=false, the run stops at that step.
return {
  name = "megatron",
  doc  = "Megatron-LM's DynamicGradScaler: hysteresis refilled by growth, a smallest scale.",

  options = {
    initial_scale   = 2^32,
    min_scale       = 1,
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 1000,   -- good steps in a row
    hysteresis      = 2,      -- overflows, from one growth to the next, until every one backs off
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local scale, least, interval = math.f32(options.initial_scale), math.f32(options.min_scale), options.growth_interval
    need(scale > 0 and scale < math.huge, "initial_scale must be a positive number that float32 can hold, got " .. options.initial_scale)
    need(least > 0 and least < math.huge, "min_scale must be a positive number that float32 can hold, got " .. options.min_scale)
    need(options.growth_factor > 1 and options.growth_factor < math.huge,
      "growth_factor must be greater than 1 and finite, got " .. options.growth_factor)
    need(options.backoff_factor > 0 and options.backoff_factor < 1,
      "backoff_factor must lie between 0 and 1, got " .. options.backoff_factor)
    trap(not (interval >= 1) or interval ~= math.floor(interval),
      "growth_interval = " .. interval .. " is never met by a whole number of steps, so the scale would never grow")
    trap(not (options.hysteresis >= 1) or options.hysteresis ~= math.floor(options.hysteresis),
      "hysteresis = " .. options.hysteresis .. " is no count of overflows; use 1 to back off at every overflow")
    trap(least > scale, "min_scale = " .. least .. " is above initial_scale = " .. scale
      .. ", so an overflow would raise the scale; lower min_scale")
    return { scale = scale, growth_tracker = 0, hysteresis_tracker = options.hysteresis }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.growth_tracker = 0
      state.hysteresis_tracker = state.hysteresis_tracker - 1
      if state.hysteresis_tracker > 0 then
        return { scale = scale, reason = "overflow: hysteresis " .. state.hysteresis_tracker + 1 .. " -> "
          .. state.hysteresis_tracker .. ", scale stays " .. scale }
      end
      state.scale = math.max(math.f32(scale * math.f32(options.backoff_factor)), math.f32(options.min_scale))
      return { scale = state.scale, reason = scale == state.scale and "overflow at the smallest scale " .. scale
        or "overflow: scale " .. scale .. " -> " .. state.scale }
    end
    state.growth_tracker = state.growth_tracker + 1
    if state.growth_tracker ~= options.growth_interval then return scale end
    state.growth_tracker = 0
    state.hysteresis_tracker = options.hysteresis
    local larger = math.f32(scale * math.f32(options.growth_factor))
    if larger == math.huge then
      if options.strict then return { scale = scale, reason = "growth would reach infinity: the scale stays" } end
      return { scale = scale, action = "stop", reason = "the loss scale would grow to infinity and stay there" }
    end
    state.scale = larger
    return { scale = larger, reason = options.growth_interval .. " good in a row: scale " .. scale .. " -> " .. larger }
  end,
}
