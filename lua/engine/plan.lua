-- What a job would cost on many ranks: memory of each, and the share of a step that goes into messages, from the time of a message (alpha,
-- seconds), of a byte (beta, seconds) and of one rank's own step. It follows what core/comm_gradients.c does: in each bucket every rank
-- sends every other one a piece, and a sum back (ZeRO-1: after the update, weights), while the backward pass goes on with the layers
-- below; then the record goes round in log2(ranks) messages.
-- Used by `engine plan`.
local M = {}

local BACKWARD = 2 / 3       -- share of a step's computing in which gradients come, so in which messages can hide
local SIZES = { own = false, fp32 = 4, bf16 = 2, fp16 = 2, fp8 = 1 + 4 / 128 }

--- job: { parameters, tensors, gradient_bytes (of all), shadow_bytes, moment_bytes, step (seconds), bucket (bytes), wire, zero, histogram };
--- cost: { alpha, beta }. Gives { ranks, memory = { weights, gradients, moments, buckets, all } (bytes), compute, messages, exposed, record, gather,
--- step (seconds), efficiency }.
function M.predict(job, cost, ranks)
  local wire = SIZES[job.wire] and job.parameters * SIZES[job.wire] or job.gradient_bytes
  local buckets = math.max(1, math.ceil(job.gradient_bytes / job.bucket))
  local others, share = ranks - 1, (ranks - 1) / ranks
  local one_way = buckets * others * cost.alpha + share * wire * cost.beta
  local messages = job.zero and one_way or 2 * one_way
  local rounds = math.ceil(math.log(ranks) / math.log(2))
  local numbers = job.tensors * 7 + 10 + (job.histogram and 320 or 0)
  local record = ranks > 1 and rounds * (cost.alpha + numbers * 8 * cost.beta) or 0
  -- Weights go round tensor by tensor; a rank has a piece of each bucket, or whole tensors of it.
  local sends = others * (job.tensors / ranks + buckets) + job.tensors
  local gather = job.zero and ranks > 1 and sends * cost.alpha + share * 4 * job.parameters * cost.beta or 0
  -- The last bucket comes when backward is over; the others hide as far as there is backward left.
  local exposed = math.max(messages / buckets, messages - BACKWARD * job.step * (1 - 1 / buckets))
  if ranks == 1 then messages, exposed = 0, 0 end
  local step = job.step + exposed + record + gather
  local memory = { weights = 4 * job.parameters + job.shadow_bytes, gradients = job.gradient_bytes,
    moments = job.zero and job.moment_bytes / ranks or job.moment_bytes, buckets = ranks > 1 and (2 + 1 / ranks) * wire or 0 }
  memory.all = memory.weights + memory.gradients + memory.moments + memory.buckets
  return { ranks = ranks, memory = memory, compute = job.step, messages = messages, exposed = exposed, record = record, gather = gather, step = step,
    efficiency = job.step / step }
end

--- 1, 2, 4, 8, 16, 64, 256 ... up to `most`, which is the last.
function M.counts(most)
  local counts, n = {}, 1
  while n < most do
    counts[#counts + 1] = n
    n = n * (n < 16 and 2 or 4)
  end
  counts[#counts + 1] = most
  return counts
end

return M
