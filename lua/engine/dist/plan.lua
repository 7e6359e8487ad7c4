-- The cost model of a job on many ranks: the memory of each rank, and the share of a step spent on
-- messages. Its inputs are the seconds that a message (alpha), a byte (beta) and one rank's own
-- step take. The core counts messages and bytes, because it knows the buckets
-- (eng_parallel_predict). For each bucket, every rank sends a piece to every other rank, sums the
-- pieces that it receives, and sends the sum back (with ZeRO: the updated weights). From ZeRO-2 on,
-- the gradients are sent in every micro-batch. ZeRO-3 sends no updated weights; it sends a block's
-- weights before the forward and before the backward pass of the block. To agree on the step's
-- record (its loss and gradient statistics), each rank sends log2(ranks) messages, one after
-- another.
--
-- On separate machines, the messages of all buckets but the last overlap the rest of the backward
-- pass. With ZeRO-3, the messages with weights overlap both passes, except for the first weights.
-- Ranks that share a machine (cost.cores) copy messages with the cores that compute, so nothing
-- overlaps. Each step then waits for the slowest rank, and ranks beyond the number of cores take
-- turns. Used by `engine plan`; cli/plan_measure.lua measures the inputs.
local M_ffi = require "engine.base.ffi"
local reduction = require "engine.dist.reduction"

local C, check = M_ffi.C, M_ffi.check

local M = {}

-- the backward pass's share of the computing in a step; messages can overlap this share
local BACKWARD = 2 / 3

--- Returns how much data one of `ranks` ranks would send and keep: the fields of eng_parallel_sizes
--- as a table. rank: the index of this rank, or -1 for the rank that sums the most. options: a
--- trainer's { bucket (MiB), comm_dtype (name), zero, whole, units }. For ZeRO-2 and 3, the tape
--- must hold the operations of a step.
function M.sizes(params, options, rank, ranks)
  local out = M_ffi.new("eng_parallel_sizes")
  check(C.eng_parallel_predict(out, params, rank, ranks, reduction.options(options)))
  local sizes = {}
  for _, name in ipairs { "buckets", "messages", "bytes", "weight_messages", "weight_bytes",
    "weight_exchanges", "own", "gradients", "rooms", "under_way", "weights" } do
    sizes[name] = tonumber(out[name])
  end
  return sizes
end

--- Predicts the memory and the step of a job on `ranks` ranks. job:
---   parameters, tensors         the numbers of elements and of tensors
---   weight_bytes, moment_bytes  the bytes of weights and of moments before ZeRO divides them
---   zero, accumulate            as in a trainer's options
---   step                        the seconds that a step takes on one rank without messages
---   handling                    the seconds that packing and summing gradients take; nil: 0
---   histogram                   whether the record has a histogram
---   sizes                       a function of `ranks` that returns the result of M.sizes
--- cost: { alpha, beta }. For ranks on one machine, cost also has
---   cores    the number of cores
---   slowed   the time of a step while every core runs a process, divided by the time of a step
---            while only one process runs
---   times    a list of measured times of steps while every core runs a process, in seconds
--- Returns { ranks, memory = { weights, gradients, moments, messages, all } (bytes), sent =
--- { messages, bytes }, efficiency (job.step / step) } and, in the same table, times in seconds:
--- compute, messages, exposed (the part of `messages` that overlaps nothing), waited (the wait
--- after the backward pass), record (the message for the record), weights (the messages with
--- weights), step (the whole step).
function M.predict(job, cost, ranks)
  local sizes, alone = job.sizes(ranks), ranks == 1
  local passes = job.zero >= 2 and job.accumulate or 1
  local turns = cost.cores and math.max(1, ranks / cost.cores) or 1
  local crowd = cost.cores and cost.slowed
    and 1 + (cost.slowed - 1) * (math.min(ranks, cost.cores) - 1) / math.max(1, cost.cores - 1) or 1
  local compute, handling = job.step * turns * crowd, alone and 0
    or (job.handling or 0) * turns * passes
  local sent = { messages = alone and 0 or passes * sizes.messages,
    bytes = alone and 0 or passes * sizes.bytes }
  local messages = (sent.messages * cost.alpha + sent.bytes * cost.beta) * turns
  local rounds = math.ceil(math.log(ranks) / math.log(2))
  -- The numbers in the message that reduces the record: 6 sums and the amax of each tensor
  -- (core/dist/comm_record.c), N_SUMS + N_MAXIMA numbers of reducer.lua, and the histogram.
  local numbers = job.tensors * 7 + 12 + (job.histogram and C.ENG_HIST_BINS or 0)
  local record = rounds * (cost.alpha + numbers * 8 * cost.beta) * turns
  -- Weights are sent tensor by tensor: after an update, or with ZeRO-3 in every pass.
  local parted = job.zero == 3 and not alone
  local weights = job.zero > 0 and not alone
    and ((sizes.weight_messages + job.tensors) * cost.alpha + sizes.weight_bytes * cost.beta) *
    turns * (parted and passes or 1) or 0
  -- The last bucket is sent after the backward pass; the others overlap the rest of this pass.
  local last = messages / math.max(1, sizes.buckets * passes)
  local exposed = cost.cores and messages
    or math.max(last, messages - BACKWARD * job.step * (1 - 1 / math.max(1, sizes.buckets)))
  if parted and not cost.cores then
    local free = job.step - (messages - exposed)       -- computing time without gradient messages
    weights = math.max(weights / math.max(1, sizes.weight_exchanges * passes), weights - free)
  end
  local skew = cost.times and not alone and M.skew(cost.times, ranks) * turns or 0
  local waited = (cost.cores and last + handling / math.max(1, sizes.buckets * passes) or exposed) +
    skew
  local step = compute + handling + exposed + skew + record + weights
  local own = alone and 1 or sizes.own / math.max(1, job.parameters)
  local memory = { weights = parted and sizes.weights or job.weight_bytes,
    gradients = sizes.gradients + sizes.rooms,
    moments = job.zero > 0 and job.moment_bytes * own or job.moment_bytes,
    messages = alone and 0 or sizes.under_way }
  memory.all = memory.weights + memory.gradients + memory.moments + memory.messages
  return { ranks = ranks, memory = memory, sent = sent, compute = compute, messages = messages,
    exposed = exposed, waited = alone and 0 or waited,
    record = record, weights = weights, step = step, efficiency = job.step / step }
end

--- Returns the time by which the slowest of n ranks is expected to exceed the mean, estimated from
--- a list of times. Every step waits for the slowest rank.
function M.skew(times, n)
  local sorted, mean, longest = { unpack(times) }, 0, 0
  table.sort(sorted)
  for i, t in ipairs(sorted) do
    mean = mean + t / #sorted
    longest = longest + t * ((i / #sorted) ^ n - ((i - 1) / #sorted) ^ n)
  end
  return longest - mean
end

--- Returns the list 1, 2, 4, 8, 16, 64, 256 ... up to `most`, which is the last number.
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
