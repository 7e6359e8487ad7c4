-- SPAM: sets the moments of Adam to 0 every `interval` updates, and limits each element of the
-- gradient to sqrt(threshold * v), where v is the element's second moment. After a reset, elements
-- are not limited for grad_accu_steps updates, and the learning rate rises along a cosine over
-- warmup_epoch updates. Source: Huang et al., SPAM (2025, arXiv 2501.06842), and its code
-- (galore_torch/SPAM.py) without the sparse momentum. Needs mode=sync and optimizer adam or adamw.
--
-- As in the original, a reset does not restart bias corrections, and the rate has no warm-up at the
-- start of a run. Differences: the factor on the learning rate also acts on decoupled weight decay,
-- and steps that overflow are not counted.
return {
  name  = "spam",
  doc   = "SPAM: resets Adam's moments now and then, and limits spikes of single elements.",
  needs = { "reset_moments", "spike_clip" },

  options = {
    interval        = 500,     -- updates between resets
    threshold       = 5000,    -- largest g^2 / v; 0: elements are not limited
    grad_accu_steps = 20,      -- updates without the limit after a reset; one less at the start
    warmup_epoch    = 150,     -- updates after a reset over which the rate rises
    death_rate      = 0.99,    -- share by which a reset lowers the rate at first
    loss_scale      = 0,       -- a fixed loss scale (1 for bf16); 0: dynamic.lua's rule
    init_scale      = 2^16,
    growth_interval = 2000,    -- good steps in a row until the scale doubles
  },

  init = function(options)
    check.not_negative(options, "threshold", "grad_accu_steps")
    check.expect(options, options.death_rate >= 0 and options.death_rate <= 1,
      "death_rate in [0, 1]")
    check.count(options, "interval")
    check.count(options, "warmup_epoch")
    return { scale = check.rescale(options), good = 0, count = 0, since = options.warmup_epoch + 1 }
  end,

  decide = function(state, record, options)
    local verdict = rescale(state, record, options)
    if record.overflow then return verdict end
    state.count = state.count + 1
    local count, warm = state.count, options.warmup_epoch
    if count % options.interval == 0 then
      verdict.reset_moments, state.since = true, 0
    end
    if options.threshold > 0 and count >= options.grad_accu_steps
      and count % options.interval >= options.grad_accu_steps then
      verdict.spike_clip = options.threshold
    end
    if state.since < warm then
      verdict.lr_mul = 1 - options.death_rate
        * (1 + math.cos(math.pi * state.since / (warm + 1))) / 2
    end
    state.since = state.since + 1
    return verdict
  end,
}
