-- Handles losses that jump. A bad step has a loss that is inf or nan, or more than `sigmas`
-- standard deviations above its moving mean, which bad steps do not enter. Of several bad steps in
-- a row, the first `skips` are skipped, and the next are taken with a smaller learning rate or, if
-- their gradients overflow, skipped. After `patience` bad steps, the next bad step makes the run
-- return to a checkpoint and leave out data. The loss scale follows dynamic.lua's rule, but steps
-- whose loss is inf or nan count as good ones. A rollback needs checkpoints (run=,
-- checkpoint_every=, keep=) that reach `back` steps into the past. Source of the rollback: PaLM
-- (Chowdhery et al., 2022, section 5.1: go back about 100 steps, skip 200 to 500 batches). The
-- milder measures before it are common practice.
return {
  name = "spike",
  doc  = "Skips steps of a loss spike, lowers the rate, then goes back to a checkpoint.",

  options = {
    init_scale      = 2^16,
    growth_interval = 2000,   -- good steps in a row after which the loss scale doubles
    sigmas          = 6,
    decay           = 0.98,   -- decay of the moving mean and variance of the loss
    warmup          = 50,     -- so many first steps are bad only if their loss is inf or nan
    skips           = 3,      -- bad steps in a row that are skipped
    patience        = 10,     -- bad steps in a row before the rollback
    slow            = 0.5,    -- factor on the learning rate after the skips, until the rollback
    back            = 100,    -- steps that a rollback goes back
    leave_out       = 200,    -- steps of data that a rollback leaves out
    lr_mul          = 0.5,    -- factor on the learning rate after a rollback
    cooldown        = 50,     -- like warmup, counted from a rollback
  },

  init = function(options)
    check.positive(options, "init_scale", "sigmas")
    check.count(options, "growth_interval")
    check.not_negative(options, "warmup", "slow", "lr_mul", "cooldown")
    check.expect(options, options.skips >= 0 and options.patience >= 0,
      "skips >= 0 and patience >= 0 (inf: no limit)")
    check.expect(options, options.decay > 0 and options.decay <= 1, "decay in (0, 1]")
    check.whole(options, "back", 0, 1e9)
    check.whole(options, "leave_out", 0, 1e9)
    return { scale = options.init_scale, good = 0, bad = 0, seen = 0, mean = 0, variance = 0,
      rest = options.warmup }
  end,

  decide = function(state, record, options)
    local resting = state.rest > 0
    state.rest = math.max(0, state.rest - 1)
    if record.overflow and record.loss - record.loss == 0 then
      state.scale, state.good = state.scale / 2, 0
      return { scale = state.scale, reason = "overflow" }
    end
    state.good = state.good + 1
    if state.good % options.growth_interval == 0 then state.scale = state.scale * 2 end

    local limit = state.mean + options.sigmas * math.sqrt(state.variance)
    local bad = not (record.loss <= limit) and not resting or record.loss - record.loss ~= 0
    local log = { loss_limit = limit, bad = bad and state.bad + 1 or 0 }
    if not bad then
      state.bad, state.seen = 0, state.seen + 1
      local decay = math.min(options.decay, 1 - 1 / state.seen)     -- at first the plain mean
      local distance = record.loss - state.mean
      state.mean = state.mean + (1 - decay) * distance
      state.variance = decay * (state.variance + (1 - decay) * distance * distance)
      return { scale = state.scale, log = log }
    end
    state.bad = state.bad + 1
    local what = ("bad step %d in a row, loss %.4g: "):format(state.bad, record.loss)
    if state.bad > options.patience then
      state.bad, state.rest = 0, options.cooldown
      return { scale = state.scale, action = "rollback", back = options.back,
        skip = options.leave_out, lr_mul = options.lr_mul, log = log,
        reason = what .. "back to a checkpoint" }
    elseif state.bad > options.skips and not record.overflow then
      return { scale = state.scale, lr_mul = options.slow, log = log,
        reason = what .. "smaller learning rate" }
    end
    return { scale = state.scale, action = "skip", log = log, reason = what .. "skipped" }
  end,
}
