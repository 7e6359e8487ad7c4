-- Dynamic loss scaling as flax's DynamicScale does it, number for number: it looks at its count of good steps before it counts the
-- step, so growth takes growth_interval + 1 of them. The scale is a float32; it grows up to the largest finite one, which
-- is no power of two, and never falls below minimum_scale.
return {
  name = "flax",
  doc  = "flax's DynamicScale: grow after growth_interval + 1 good steps in a row.",

  options = {
    scale           = 65536,      -- the first one
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 2000,       -- good steps in a row, less one
    minimum_scale   = 2^-126,     -- float32's smallest normal number
    strict          = true,       -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local scale, least, interval = math.f32(options.scale), math.f32(options.minimum_scale), options.growth_interval
    need(scale > 0 and scale < math.huge, "scale must be a positive number that float32 can hold, got " .. options.scale)
    need(least > 0 and least < math.huge, "minimum_scale must be a positive number that float32 can hold, got " .. options.minimum_scale)
    need(options.growth_factor > 1 and options.growth_factor < math.huge,
      "growth_factor must be greater than 1 and finite, got " .. options.growth_factor)
    need(options.backoff_factor > 0 and options.backoff_factor < 1,
      "backoff_factor must lie between 0 and 1, got " .. options.backoff_factor)
    trap(not (interval >= 0) or interval ~= math.floor(interval),
      "growth_interval = " .. interval .. " is never met by a whole number of steps, so the scale would never grow")
    trap(least > scale, "minimum_scale = " .. least .. " is above scale = " .. scale
      .. ", so an overflow would raise the scale; lower minimum_scale")
    return { scale = scale, fin_steps = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.fin_steps = 0
      state.scale = math.max(math.f32(scale * math.f32(options.backoff_factor)), math.f32(options.minimum_scale))
      return { scale = state.scale, reason = scale == state.scale and "overflow at the smallest scale " .. scale
        or "overflow: scale " .. scale .. " -> " .. state.scale }
    end
    if state.fin_steps ~= options.growth_interval then
      state.fin_steps = state.fin_steps + 1
      return scale
    end
    state.fin_steps = 0
    local largest = (2 - 2^-23) * 2^127
    state.scale = math.min(math.f32(scale * math.f32(options.growth_factor)), largest)
    return { scale = state.scale, reason = scale == state.scale and "the largest scale, " .. scale
      or options.growth_interval + 1 .. " good in a row: scale " .. scale .. " -> " .. state.scale }
  end,
}
