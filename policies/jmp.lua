-- Dynamic loss scaling as DeepMind's jmp.DynamicLossScale does it, number for number: the scale is a float32, a growth that would
-- reach infinity does not happen. (The original forgets min_loss_scale when it passes through a jit; here it holds.)
-- With min_loss_scale = 0 the original's scale becomes 0 at last; here the run stops instead.
return {
  name = "jmp",
  doc  = "jmp.DynamicLossScale: grow after period good steps in a row, a smallest scale.",

  options = {
    loss_scale     = 2^15,   -- the first one; jmp has no default, its examples take this
    period         = 2000,   -- good steps in a row
    factor         = 2,      -- growth multiplies, overflow divides
    min_loss_scale = 1,
    strict         = true,   -- false: accept settings that are probably mistakes
  },

  init = function(options)
    local function need(condition, text) if not condition then error(text, 0) end end
    local function trap(condition, text)
      if options.strict and condition then error(text .. "; strict=false accepts it", 0) end
    end
    local scale, least, period = math.f32(options.loss_scale), math.f32(options.min_loss_scale), options.period
    need(scale > 0 and scale < math.huge, "loss_scale must be a positive number that float32 can hold, got " .. options.loss_scale)
    need(least >= 0 and least < math.huge, "min_loss_scale must be 0 or a positive finite number, got " .. options.min_loss_scale)
    need(options.factor > 1 and options.factor < math.huge, "factor must be greater than 1 and finite, got " .. options.factor)
    need(period ~= 0, "period must be a number of steps, got 0")
    trap(not (period >= 1) or period ~= math.floor(period),
      "period = " .. period .. " is never met by a whole number of steps, so the scale would never grow")
    trap(least > scale, "min_loss_scale = " .. least .. " is above loss_scale = " .. scale
      .. ", so an overflow would raise the scale; lower min_loss_scale")
    return { scale = scale, counter = 0 }
  end,

  decide = function(state, record, options)
    local scale, factor = state.scale, math.f32(options.factor)
    if record.overflow then
      state.counter = 0
      local smaller = math.max(math.f32(options.min_loss_scale), math.f32(scale / factor))
      if smaller == 0 then
        return { scale = scale, action = "stop", reason = "the loss scale fell to " .. scale
          .. " and gradients still overflow: they are inf or nan for another reason than the scale"
          .. " (look at the first bad tensor, the learning rate, the data)" }
      end
      state.scale = smaller
      return { scale = smaller, reason = scale == smaller and "overflow at the smallest scale " .. scale
        or "overflow: scale " .. scale .. " -> " .. smaller }
    end
    local due = state.counter == options.period - 1
    state.counter = (state.counter + 1) % options.period
    if not due then return scale end
    local larger = math.f32(scale * factor)
    if larger == math.huge then return scale end
    state.scale = larger
    return { scale = larger, reason = options.period .. " good in a row: scale " .. scale .. " -> " .. larger }
  end,
}
