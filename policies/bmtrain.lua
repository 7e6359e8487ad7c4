-- Dynamic loss scaling as BMTrain's OptimManager does it, number for number: grows after loss_scale_steps good steps in a row; an
-- overflow acts only above min_loss_scale, so that at the smallest scale it does not set the count of good steps back. The
-- scale is a double.
-- There the scale can reach infinity; here it keeps its last finite value, or, with strict=false, the run stops at that step.
return {
  name = "bmtrain",
  doc  = "BMTrain's OptimManager: a window of good steps, which an overflow at the smallest scale does not interrupt.",

  options = {
    loss_scale        = 2^20,   -- the first one; BMTrain has no default, its examples take this
    loss_scale_factor = 2,      -- growth multiplies, overflow divides
    loss_scale_steps  = 1024,   -- good steps in a row
    min_loss_scale    = 1,
    strict            = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local init, least, steps = options.loss_scale, options.min_loss_scale, options.loss_scale_steps
    need(init > 0 and init < math.huge, "loss_scale must be a positive finite number, got " .. init)
    need(least > 0 and least < math.huge, "min_loss_scale must be a positive finite number, got " .. least)
    need(options.loss_scale_factor > 1 and options.loss_scale_factor < math.huge,
      "loss_scale_factor must be greater than 1 and finite, got " .. options.loss_scale_factor)
    need(steps > 0, "loss_scale_steps must be a positive number of steps, got " .. steps)
    trap(steps ~= math.floor(steps) or steps == math.huge, "loss_scale_steps = " .. steps .. " is no whole number of steps")
    trap(least > init, "min_loss_scale = " .. least .. " is above loss_scale = " .. init .. ", so the scale could never fall; lower min_loss_scale")
    return { scale = init, steps_since_last_scale = 0 }
  end,

  decide = function(state, record, options)
    local scale = state.scale
    if record.overflow then
      if scale <= options.min_loss_scale then return { scale = scale, reason = "overflow at the smallest scale " .. scale } end
      state.steps_since_last_scale = 0
      state.scale = scale / options.loss_scale_factor
      return { scale = state.scale, reason = "overflow: scale " .. scale .. " -> " .. state.scale }
    end
    state.steps_since_last_scale = state.steps_since_last_scale + 1
    if state.steps_since_last_scale < options.loss_scale_steps then return scale end
    state.steps_since_last_scale = 0
    local larger = scale * options.loss_scale_factor
    if larger == math.huge then
      if options.strict then return { scale = scale, reason = "growth would reach infinity: the scale stays" } end
      return { scale = scale, action = "stop", reason = "the loss scale would grow to infinity and stay there" }
    end
    state.scale = larger
    return { scale = larger, reason = options.loss_scale_steps .. " good in a row: scale " .. scale .. " -> " .. larger }
  end,
}
