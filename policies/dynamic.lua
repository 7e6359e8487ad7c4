-- Dynamic loss scaling as PyTorch's GradScaler does it, number for number: the scale is a float32, the
-- count of good steps restarts at every overflow, growth that would reach infinity does not happen.
-- One step further than there: a scale that would underflow to zero, and stay zero for ever, stops the run.
return {
  name = "dynamic",
  doc  = "PyTorch's GradScaler: grow after growth_interval good steps in a row, back off on overflow.",

  options = {
    init_scale      = 2^16,
    growth_factor   = 2,
    backoff_factor  = 0.5,
    growth_interval = 2000,   -- good steps in a row
    strict          = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local scale = math.f32(options.init_scale)
    if not (scale > 0 and scale < math.huge) then
      error("init_scale must be a positive number that float32 can hold, got " .. options.init_scale, 0)
    end
    if not (options.growth_factor > 1) then
      error("growth_factor must be greater than 1, got " .. options.growth_factor, 0)
    end
    if options.growth_factor == math.huge then error("growth_factor must be finite, got inf", 0) end
    if not (options.backoff_factor > 0 and options.backoff_factor < 1) then
      error("backoff_factor must lie between 0 and 1, got " .. options.backoff_factor, 0)
    end
    local interval = options.growth_interval
    if options.strict and (interval < 1 or interval ~= math.floor(interval)) then
      error("growth_interval = " .. interval .. " is never met by a whole number of steps, so the scale would"
        .. " never grow; use a whole number from 1 on, or strict=false if that is meant", 0)
    end
    return { scale = scale, growth_tracker = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      state.growth_tracker = 0
      local smaller = math.f32(scale * options.backoff_factor)
      if smaller == 0 then
        return { scale = scale, action = "stop", reason = "the loss scale fell to " .. scale
          .. " and gradients still overflow: they are inf or nan for another reason than the scale"
          .. " (look at the first bad tensor, the learning rate, the data)" }
      end
      state.scale = smaller
      return { scale = smaller, reason = "overflow: scale " .. scale .. " -> " .. smaller }
    end
    local tracker = state.growth_tracker + 1
    if tracker ~= options.growth_interval then
      state.growth_tracker = tracker
      return scale
    end
    state.growth_tracker = 0
    local larger = math.f32(scale * options.growth_factor)
    if larger == math.huge then return scale end
    state.scale = larger
    return { scale = larger, reason = tracker .. " good in a row: scale " .. scale .. " -> " .. larger }
  end,
}
