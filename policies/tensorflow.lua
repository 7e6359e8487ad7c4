-- Dynamic loss scaling as TensorFlow's DynamicLossScale (and tf_keras' LossScaleOptimizer) does it, number for number: the scale
-- is a float32, never below 1, and a growth that would reach infinity does not happen.
return {
  name = "tensorflow",
  doc  = "TensorFlow's DynamicLossScale: grow after increment_period good steps in a row, never below 1.",

  options = {
    initial_loss_scale = 2^15,
    increment_period   = 2000,   -- good steps in a row
    multiplier         = 2,      -- growth multiplies, overflow divides
    strict             = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local scale, period = math.f32(options.initial_loss_scale), options.increment_period
    need(scale > 0 and scale < math.huge,
      "initial_loss_scale must be a positive number that float32 can hold, got " .. options.initial_loss_scale)
    need(options.multiplier > 1 and options.multiplier < math.huge, "multiplier must be greater than 1 and finite, got " .. options.multiplier)
    need(period > 0, "increment_period must be a positive number of steps, got " .. period)
    trap(period ~= math.floor(period) or period == math.huge, "increment_period = " .. period .. " is no whole number of steps")
    trap(scale < 1, "initial_loss_scale = " .. scale .. " is below 1, the smallest scale, so an overflow would raise it")
    return { scale = scale, good_steps = 0 }
  end,

  decide = function(state, record, options)
    local scale, multiplier = state.scale, math.f32(options.multiplier)
    if record.overflow then
      state.good_steps = 0
      state.scale = math.max(math.f32(scale / multiplier), 1)
      return { scale = state.scale, reason = scale == state.scale and "overflow at the smallest scale " .. scale
        or "overflow: scale " .. scale .. " -> " .. state.scale }
    end
    state.good_steps = state.good_steps + 1
    if state.good_steps < options.increment_period then return scale end
    state.good_steps = 0
    local larger = math.f32(scale * multiplier)
    if larger == math.huge then return scale end
    state.scale = larger
    return { scale = larger, reason = options.increment_period .. " good in a row: scale " .. scale .. " -> " .. larger }
  end,
}
