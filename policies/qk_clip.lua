-- QK-clip of MuonClip (Kimi K2, 2025, arXiv 2507.20534). It acts after an update on attention heads
-- whose largest logit of this step was above `threshold`: the query weights and the key weights of
-- such a head are both multiplied by the root of threshold / logit, so that the same inputs would
-- give a largest logit equal to the threshold. Source: section 2.1 of the paper and Megatron-LM's
-- qk_clip (qk_clip_alpha = 0.5) for heads with rotary positions applied to the whole head.
--
-- Differences: biases of queries and keys shrink too. If several query heads share a key head, the
-- key head is multiplied by the root of their smallest factor, and each query head by its own
-- factor divided by that root. A logit that is not finite scales nothing; Megatron-LM stops. A head
-- whose largest logit is below 0 does not change; Megatron-LM takes the root of a negative number
-- and makes the head's weights NaN. Needs mode=sync and the CPU; ZeRO and experts divided among
-- ranks refuse it.
return {
  name  = "qk_clip",
  doc   = "MuonClip's QK-clip: shrinks query and key weights of heads with large logits.",
  needs = { "logit_max", "logit_muls" },

  options = {
    threshold       = 100,     -- largest attention logit, after the factor 1 / sqrt(head width)
    loss_scale      = 0,       -- a fixed loss scale (1 for bf16); 0: dynamic.lua's rule
    init_scale      = 2^16,
    growth_interval = 2000,    -- good steps in a row until the scale doubles
  },

  init = function(options)
    check.positive(options, "threshold")
    return { scale = check.rescale(options), good = 0 }
  end,

  decide = function(state, record, options)
    local verdict = rescale(state, record, options)
    local muls, largest, clipped = {}, -1/0, 0
    for name, logit in pairs(record.signals) do
      local head = name:match("^logit_max%.(.+)$")
      if head and logit - logit == 0 then
        largest = math.max(largest, logit)
        if logit > options.threshold then
          muls[head], clipped = options.threshold / logit, clipped + 1
        end
      end
    end
    verdict.logit_muls = muls
    verdict.log = { logit_max = largest, heads_clipped = clipped }
    return verdict
  end,
}
