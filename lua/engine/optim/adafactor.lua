-- Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), without a first moment. The rules and
-- defaults are those of torch.optim.Adafactor of PyTorch 2.15. In update t (from 1), the learning
-- rate of a tensor is min(lr, 1/sqrt(t)) * max(eps2, RMS of its weights). For tensors with two or
-- more dimensions, the state holds only a mean of the second moment for each row and one for each
-- column. Called through engine.optim.adafactor.
local steps = require "engine.optim.steps"

-- Returns a function from a parameter's shape to a buffer's shape. The shape of the buffer is the
-- same, but its last (d = -1) or second to last (d = -2) dimension is 1. For fewer than two
-- dimensions, the function returns nil: there is no such buffer.
local function with_one(d)
  return function(shape)
    if #shape < 2 then return nil end
    shape[#shape + 1 + d] = 1
    return shape
  end
end

-- Updates the means of the second moment over the last dimension (`row`) and over the second to
-- last (`column`). Returns the second moment as estimated from these means.
local function factored(p, ctx, weight)
  local squares = p.grad * p.grad
  p.row = steps.lerp(p.row, squares:mean(-1, true), weight)
  p.column = steps.lerp(p.column, squares:mean(-2, true), weight)
  return p.row * p.column / p.row:mean(-2, true):maximum(ctx.eps1)
end

return {
  doc = "Adafactor: keeps the second moment of a matrix as one row and one column.",
  defaults = { lr = 1e-2, beta2_decay = -0.8, eps1 = 2 ^ -23, eps2 = 1e-3, d = 1,
    weight_decay = 0 },
  buffers = { row = with_one(-1), column = with_one(-2),
    moment2 = function(shape) return #shape < 2 and shape or nil end },
  check = function(o)
    if o.beta2_decay > 0 then return "expected beta2_decay to be 0 or less, got " .. o.beta2_decay
    elseif o.eps1 < 2 ^ -63 then
      return "expected eps1 to be 2^-63 or more, so that its square is a normal f32, got " .. o.eps1
    elseif o.eps2 < 0 then return "expected eps2 to be 0 or more, got " .. o.eps2
    elseif o.d < 1 then return "expected d to be 1 or more, got " .. o.d end
  end,
  update = function(p, ctx)
    local weight = ctx.t ^ ctx.beta2_decay       -- 1 - beta2
    local alpha = steps.rms(p.weight):maximum(ctx.eps2) * math.min(ctx.lr, 1 / math.sqrt(ctx.t))
    local estimate
    if p.row then estimate = factored(p, ctx, weight)
    else
      p.moment2 = steps.lerp(p.moment2, p.grad * p.grad, weight)
      estimate = p.moment2
    end
    local update = estimate:maximum(ctx.eps1 ^ 2):rsqrt() * p.grad
    local limit = (steps.rms(update) / ctx.d):maximum(1)
    p.weight = p.weight * (1 - ctx.lr * ctx.weight_decay) - update * (alpha / limit)
  end,
}
