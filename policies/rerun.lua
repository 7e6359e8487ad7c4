-- Megatron-LM's rerun state machine for spiky losses. If a loss's magnitude is at least `factor`
-- times the largest of the first `samples` losses, the step is computed again with the same batch,
-- random numbers and scale. If the two losses differ in any bit, the hardware computed one of them
-- wrongly. This is a transient fault, and the run stops (on_fault=stop). With on_fault=step, the
-- run uses the second result, or skips the step if the second loss is huge or not finite. If the
-- losses are equal, the spike comes from the data or the model, and the step is accepted. Source:
-- megatron/core/rerun_state_machine.py and its use in pretrain_gpt.py (the code was read, not run).
--
-- As in Megatron-LM, the first step is not a sample, losses that are inf or nan are ignored, and
-- the limit never changes once it is known. Differences: here a loss is the mean of the step over
-- all ranks; in Megatron-LM it is the loss of one micro-batch on one rank. Here a reproducible loss
-- is accepted immediately; Megatron-LM first repeats the step on another GPU, to detect a
-- persistent fault.
--
-- The rerun needs mode=sync, data that can go back (every engine.data) and a deterministic forward
-- pass. With FP8 scales that depend on earlier steps the losses differ, because the scales change
-- between the two passes. A replay of a recorded run cannot compute a step again; it uses the next
-- recorded step as the rerun.
return {
  name = "rerun",
  doc  = "Megatron-LM's rerun machine: repeats a step with a huge loss to find transient faults.",

  options = {
    factor          = 10,       -- a loss of this many times the largest sample is repeated
    samples         = 100,      -- losses that determine the limit
    on_fault        = "stop",   -- stop: a transient fault ends the run; step: the run continues
    loss_scale      = 0,        -- a fixed loss scale (1 for bf16); 0: dynamic.lua's rule
    init_scale      = 2^16,
    growth_interval = 2000,     -- good steps in a row until the scale doubles
  },

  init = function(options)
    check.factor(options, "factor")
    check.count(options, "samples")
    if options.on_fault ~= "stop" and options.on_fault ~= "step" then
      error("on_fault must be stop or step, got " .. options.on_fault, 0)
    end
    return { scale = check.rescale(options), good = 0, seen = 0, largest = 0, faults = 0 }
  end,

  decide = function(state, record, options)
    local loss, first = record.loss, state.first
    local known, limit = state.seen >= options.samples, options.factor * state.largest
    local finite = loss - loss == 0
    local huge = known and finite and limit > 0 and math.abs(loss) >= limit
    -- If the update was applied in spite of the retry (mode=lagged, a shadow), the current step is
    -- new and not a rerun.
    local again = first and record.updates == state.updates
    state.first, state.updates = nil, nil

    if huge and not again then
      state.first, state.updates = loss, record.updates
      return { scale = state.scale, action = "retry", log = { limit = limit, loss = loss },
        reason = ("loss %.6g, %g times the largest of the first %d: the policy asks for a retry")
          :format(loss, math.abs(loss) / state.largest, options.samples) }
    end

    local verdict = rescale(state, record, options)
    if again then
      local why
      if loss == first then
        why = "the second loss is the same to the bit: the spike comes from the data or the model"
      else
        state.faults = state.faults + 1
        why = ("transient fault: the same step gave loss %.17g, then %.17g"):format(first, loss)
        if options.on_fault == "stop" then verdict.action = "stop"
        elseif huge or not finite then verdict.action = "skip" end
      end
      verdict.reason = (verdict.reason and verdict.reason .. "; " or "") .. why
    elseif not known and finite and record.step > 0 then
      state.seen, state.largest = state.seen + 1, math.max(state.largest, math.abs(loss))
    end
    verdict.log = { limit = known and limit or nil, faults = state.faults }
    return verdict
  end,
}
