-- Dynamic loss scaling as NeMo's GradScaler, and the Apex kernel update_scale_hysteresis under it, do it, number for number:
-- PyTorch's GradScaler behind a hysteresis that every good step refills. The scale is a float32.
-- Where the original's scale would become 0 for ever, the run stops. (The original's checkpoints lose the hysteresis
-- through a misspelt name; here a resumed run goes on as if it had not been interrupted.)
return {
  name = "nemo",
  doc  = "NeMo's GradScaler: PyTorch's with hysteresis, refilled by every good step.",

  options = {
    init_scale      = 2^16,
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 2000,   -- good steps in a row
    hysteresis      = 1,      -- overflows in a row until one backs off
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local scale, interval = math.f32(options.init_scale), options.growth_interval
    need(scale > 0 and scale < math.huge, "init_scale must be a positive number that float32 can hold, got " .. options.init_scale)
    need(options.growth_factor > 1 and options.growth_factor < math.huge,
      "growth_factor must be greater than 1 and finite, got " .. options.growth_factor)
    need(options.backoff_factor > 0 and options.backoff_factor < 1,
      "backoff_factor must lie between 0 and 1, got " .. options.backoff_factor)
    trap(not (interval >= 1) or interval ~= math.floor(interval),
      "growth_interval = " .. interval .. " is never met by a whole number of steps, so the scale would never grow")
    trap(not (options.hysteresis >= 1) or options.hysteresis ~= math.floor(options.hysteresis),
      "hysteresis = " .. options.hysteresis .. " is no count of overflows; use 1 to back off at every overflow")
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
      local smaller = math.f32(scale * options.backoff_factor)
      if smaller == 0 then
        return { scale = scale, action = "stop", reason = "the loss scale fell to " .. scale
          .. " and gradients still overflow: they are inf or nan for another reason than the scale"
          .. " (look at the first bad tensor, the learning rate, the data)" }
      end
      state.scale = smaller
      return { scale = smaller, reason = "overflow: scale " .. scale .. " -> " .. smaller }
    end
    state.hysteresis_tracker = options.hysteresis
    state.growth_tracker = state.growth_tracker + 1
    if state.growth_tracker ~= options.growth_interval then return scale end
    state.growth_tracker = 0
    local larger = math.f32(scale * options.growth_factor)
    if larger == math.huge then return scale end
    state.scale = larger
    return { scale = larger, reason = options.growth_interval .. " good in a row: scale " .. scale .. " -> " .. larger }
  end,
}
