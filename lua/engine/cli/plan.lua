-- engine plan SCRIPT [name=value ...] predicts what a script's training would cost on many ranks.
-- This file reads the command line and prints the tables, dist/plan.lua has the cost model, and
-- plan_measure.lua measures. engine plan FOLDER prints the memory of a model (plan_model.lua).
-- Called by init.lua.
local config = require "engine.base.config"
local nearest = require "engine.base.nearest"
local reduction = require "engine.dist.reduction"
local renamed = require "engine.base.renamed"
local show = require "engine.base.show"
local fail_if = require("engine.base.ffi").fail_if
local want_script = require("engine.cli.options").want_script

local help = [==[
usage: engine plan SCRIPT [ranks=1024] [alpha=S] [beta=S] [step=S] [comm_dtype=FORMAT]
                   [zero=0|1|2|3] [bucket=MIB] [measure=N,N,...] [name=value ...]
       engine plan SCRIPT checkpoint=block [name=value ...]
       engine plan FOLDER

Predicts what the script's training would cost on 1 to `ranks` ranks: the memory of each rank, the
share of a step spent on messages, and the time to agree on the step's record. The script runs until
its trainer exists, and a few steps of the trainer are timed. Other settings go to the script.

  engine plan examples/gpt.lua ranks=1024 alpha=2e-6 beta=1/25e9   # messages of 2 us, 25 GB/s
  engine plan examples/gpt.lua zero=2 measure=1,2,4                # beside jobs measured here
  engine plan examples/gpt.lua checkpoint=block                    # less memory, more time
  engine plan Llama-3-8B                                           # a folder with a config.json

For a FOLDER with Hugging Face's config.json it prints the parameters of the model and the memory
that generating and training take. No weights are needed.

alpha, beta  seconds that a message and a byte take between two ranks; by default measured between
             two processes on this machine, if mpirun is installed
step         seconds that a step takes on one rank without messages; measured by default
comm_dtype zero bucket   as in engine.trainer; by default the script's values

checkpoint   what activation checkpointing (the trainer's option) saves and costs on one rank:
             predicted, and measured in two processes

The first columns are the memory of one rank: the total, gradients (from zero=2 on: the rank's own
part and the buffers that backward writes), moments, and messages in flight. The other columns are
times, except the last:
  messages     all gradient messages
  not hidden   the messages that do not overlap the backward pass. This includes the messages with
               updated weights (zero=1 or 2), or with weights that a block waits for (zero=3)
  record       the message that makes the record the same on all ranks
  step         the whole step
  efficiency   a step's time on one rank without messages, divided by the time of the whole step

measure      also runs the job with these numbers of ranks on this machine, one thread for each
             rank, and prints the prediction for this machine beside the measurement. Ranks on one
             machine share its cores and caches. The prediction therefore starts from steps timed
             with every core busy, adds the wait for the slowest rank, overlaps no messages with
             computing, and lets ranks beyond the number of cores take turns]==]

-- The settings of `engine plan` itself. plan_measure.lua adds role=rank to the command of each rank
-- it starts.
local NUMBER, TEXT = config.optional "number", config.optional "string"
local OWN = { ranks = NUMBER, alpha = NUMBER, beta = NUMBER, step = NUMBER, zero = NUMBER,
  bucket = NUMBER, comm_dtype = TEXT, checkpoint = TEXT, measure = config.optional "list" }
local RANGES = { positive = "alpha beta step" }
local MIB = 2 ^ 20
local FALLBACK = { alpha = 5e-6, beta = 1 / 10e9 }

local function time_text(s)
  if s == 0 then return "-" end
  return s < 1e-3 and ("%.1f us"):format(s * 1e6) or s < 1 and ("%.2f ms"):format(s * 1e3)
    or ("%.2f s"):format(s)
end

-- Returns one line of advice if, on `ranks` ranks, a smaller bucket saves at least 1 MiB and a
-- tenth of each rank's memory; else nil. To find this bucket, halves the size until a halving saves
-- less than 5 % of the memory, or the size is 1/64 MiB.
local function smaller_bucket(job, params, options, ranks)
  local plan = require "engine.dist.plan"
  local function with(bucket, zero)
    local o = setmetatable({ bucket = bucket, zero = zero }, { __index = options })
    local other = setmetatable({ zero = o.zero or 0,
      sizes = function(n) return plan.sizes(params, o, -1, n) end }, { __index = job })
    return plan.predict(other, { alpha = 0, beta = 0 }, ranks)
  end
  if ranks == 1 then return nil end
  local bucket = options.bucket or reduction.BUCKET
  local now, best, found = with(bucket), with(bucket), bucket
  -- any bucket of gradient_bytes or more holds every gradient, so all such sizes cost the same
  while found / 2 * MIB >= job.gradient_bytes do found = found / 2 end
  while found > 1 / 64 do
    local half = with(found / 2)
    if half.memory.all > 0.95 * best.memory.all then break end
    found, best = found / 2, half
  end
  if best.memory.all > math.min(0.9 * now.memory.all, now.memory.all - MIB) then return nil end
  return ("on %d ranks, bucket=%g would take %s of memory on each rank instead of %s%s, and " ..
    "send %.1f times as many messages"):format(ranks, found, show.bytes(best.memory.all),
    show.bytes(now.memory.all), job.zero >= 2
    and (" (with zero=1: %s)"):format(show.bytes(with(bucket, 1).memory.all)) or "",
    best.sent.messages / now.sent.messages)
end

-- Returns the job of this process's trainer, for plan.predict. records: whether the script's
-- trainer would write a run. wanted, measured: lists of the numbers of ranks to predict and to
-- measure. step: the seconds of a step on one rank.
local function job_of(trainer, options, records, wanted, measured, step)
  local M_ffi, plan = require "engine.base.ffi", require "engine.dist.plan"
  local C, list, optimizer = M_ffi.C, trainer.optimizer.list, trainer.optimizer
  local job = { parameters = 0, tensors = #list, gradient_bytes = 0, moment_bytes = 0,
    histogram = records, accumulate = trainer.accumulate, comm_dtype = options.comm_dtype or "own",
    zero = options.zero or 0, model = tostring(trainer.model._class), step = step }
  local bytes = M_ffi.new("int64_t[4]")
  options.whole = reduction.whole(optimizer, options.zero)
  C.eng_params_bytes(bytes, optimizer.params)
  job.weight_bytes, job.gradient_bytes = tonumber(bytes[0] + bytes[1] + bytes[3]),
    tonumber(bytes[2])
  if optimizer.fp8 then job.weight_bytes = job.weight_bytes + optimizer.fp8.averages.bytes end
  for i, p in ipairs(list) do
    job.parameters = job.parameters + p.tensor.count
    job.moment_bytes = job.moment_bytes + optimizer.state:bytes(i, p.tensor.count)
  end
  -- From ZeRO-2 on, the prediction needs a step's operations on the tape. They determine which
  -- gradients, and with ZeRO-3 which weights, are in memory at the same time.
  options.units = job.zero == 3 and reduction.units(optimizer) or nil
  if job.zero >= 2 then
    M_ffi.check(C.eng_step_begin())
    trainer:forward(trainer:next_batch())
  end
  local sizes, first = {}, {}
  for _, n in ipairs(wanted) do sizes[n] = plan.sizes(optimizer.params, options, -1, n) end
  for _, n in ipairs(measured or {}) do first[n] = plan.sizes(optimizer.params, options, 0, n) end
  job.advice = smaller_bucket(job, optimizer.params, options, wanted[#wanted])
  M_ffi.check(C.eng_step_end())
  sizes[1].gradients = job.gradient_bytes
  first[1] = sizes[1]
  job.sizes = function(n) return sizes[n] end
  job.sizes_of_first = function(n) return first[n] end
  return job
end

local function counts_of(texts)
  local counts, wrong = {}, #texts == 0
  for i, text in ipairs(texts) do
    local n = tonumber(text) or 0
    counts[i], wrong = n, wrong or n < 1 or n > 64 or n % 1 ~= 0
  end
  fail_if(wrong, "measure: expected a list of rank counts from 1 to 64, such as 1,2,4, got '%s'",
    table.concat(texts, ","))
  return counts
end

-- Separates the words of the command line into the command's own settings, which it checks, and the
-- settings of the script.
local function read(words)
  local own, settings, role = {}, {}, nil
  for _, word in ipairs(words) do
    local name = word:match("^%-*([%a_]+)=")
    local bare = word:match("^%-*([%a_]+)$")
    fail_if(bare and OWN[bare], "expected name=value, got '%s'; write %s=VALUE", word, bare)
    if name == "wire" then
      renamed("engine plan's setting 'wire'", "'comm_dtype'")
      name, word = "comm_dtype", word:gsub("^%-*wire", "comm_dtype")
    end
    if name == "role" then role = word:match("=(.*)")
    else table.insert(name and OWN[name] and own or settings, word) end
  end
  local given = config.parse(OWN, own, nil, RANGES)
  given.role = role
  local key, expected = reduction.wrong { comm_dtype = given.comm_dtype, zero = given.zero,
    bucket = given.bucket }
  if key then
    error(("expected %s to be %s, got %s"):format(key, expected, tostring(given[key])), 0)
  end
  given.measure = given.measure and counts_of(given.measure)
  given.ranks = given.ranks or given.measure and math.max(1, unpack(given.measure)) or 1024
  fail_if(given.ranks < 1 or given.ranks > 1e5 or given.ranks % 1 ~= 0,
    "expected ranks to be a whole number from 1 to 100000, got %g", given.ranks)
  return given, settings
end

-- ------------------------------------------------------------------ comparison with measured jobs

local function off(predicted, measured)
  if measured == predicted then return "exact" end
  return measured == 0 and "" or ("%+.1f %%"):format(100 * (predicted / measured - 1))
end

-- Runs the job once for each number of ranks in given.measure. Prints the predictions beside rank
-- 0's measurements.
local function compare(job, cost, given, script, settings)
  local plan, measure = require "engine.dist.plan", require "engine.cli.plan_measure"
  local cores = require("engine.base.ffi").C.eng_comm_threads()
  local one = measure.alone(1, script, settings, given)[1]
  local here = setmetatable({ step = one.step, handling = one.handling,
    sizes = job.sizes_of_first }, { __index = job })
  local costs = { alpha = cost.alpha, beta = cost.beta, cores = cores, slowed = 1,
    times = one.times }
  if cores > 1 then
    local all, crowd = 0, measure.alone(cores, script, settings, given)
    for _, told in ipairs(crowd) do all = all + told.step / cores end
    costs.slowed, costs.times = math.max(1, all / one.step), crowd[1].times
  end
  print(("\nthis machine: %d cores, one thread per rank; a step takes %s alone and %.2f times " ..
    "that with a process on every core; packing and summing gradients takes %s"):format(cores,
    time_text(one.step), costs.slowed, time_text(one.handling)))
  for _, n in ipairs(given.measure) do
    local p = plan.predict(here, costs, n)
    local m = n == 1 and one or measure.job(n, script, settings, given)[1]
    print(("\n%-22s %14s %14s %10s"):format(n == 1 and "1 rank" or n .. " ranks", "predicted",
      "measured", "off by"))
    local function row(name, predicted, measured, text)
      if predicted == 0 and measured == 0 then return end
      print(("%-22s %14s %14s %10s"):format("  " .. name, text(predicted), text(measured),
        off(predicted, measured)))
    end
    row("step", p.step, m.step, time_text)
    row("wait after backward", p.waited, m.waited + m.held, time_text)
    row("record", p.record, m.record, time_text)
    row("sending weights", p.weights, m.weights, time_text)
    row("messages sent", p.sent.messages, m.messages, tostring)
    row("bytes sent", p.sent.bytes, m.bytes, show.bytes)
    row("memory: weights", p.memory.weights, m.memory_parameters, show.bytes)
    row("memory: gradients", p.memory.gradients, m.memory_gradients, show.bytes)
    row("memory: moments", p.memory.moments, m.memory_optimizer, show.bytes)
    row("memory: messages", p.memory.messages, m.memory_messages, show.bytes)
  end
  if math.max(unpack(given.measure)) > cores then
    print(("\nwhere there are more ranks than the %d cores, the ranks take turns in an order " ..
      "that the system chooses"):format(cores))
  end
end

-- ------------------------------------------------------------------ the table

local function table_of(job, cost, source, given)
  local plan = require "engine.dist.plan"
  print(("%s: %d parameters in %d tensors, gradients %s, comm dtype %s%s"):format(job.model,
    job.parameters, job.tensors,
    show.bytes(job.gradient_bytes), job.comm_dtype, job.zero > 0 and ", ZeRO-" .. job.zero or ""))
  print(("a step without messages takes %s, a message %s, at %.2f GB/s (%s)\n"):format(
    time_text(job.step), time_text(cost.alpha), 1e-9 / cost.beta, source))
  local form = "%7s  %11s  %11s  %11s  %11s  %9s  %10s  %9s  %9s  %10s"
  print(form:format("ranks", "memory", "gradients", "moments", "in flight", "messages",
    "not hidden", "record", "step", "efficiency"))
  local x, y = {}, {}
  for i, ranks in ipairs(plan.counts(given.ranks)) do
    local p = plan.predict(job, cost, ranks)
    print(form:format(ranks, show.bytes(p.memory.all), show.bytes(p.memory.gradients),
      show.bytes(p.memory.moments), show.bytes(p.memory.messages),
      time_text(p.messages), time_text(p.exposed + p.weights), time_text(p.record),
      time_text(p.step), ("%.1f %%"):format(100 * p.efficiency)))
    x[i], y[i] = math.log(ranks) / math.log(2), 100 * p.efficiency
  end
  if job.zero > 0 then
    print(job.zero < 3 and "\n'messages' counts only gradients; 'not hidden' also counts the " ..
      "weights, which are sent after the update" or "\n'messages' counts only gradients; " ..
      "'not hidden' also counts the weights that come too late for their block, in both passes")
  end
  if job.advice then print((job.zero > 0 and "" or "\n") .. job.advice) end
  if #x > 2 then
    print("\n" .. require("engine.report.plot").draw {
      title = "efficiency in %, against log2 of the number of ranks", x = x, y = y, height = 8 })
  end
end

local function main(script, ...)
  local good, problem = pcall(function(...)
    fail_if((script or "") == "" or script:find("^%-*[%a_]+=") or script:find("^%-"),
      "expected a script or a folder first, got %s; see engine help plan",
      script and "'" .. script .. "'" or "nothing")
    if require("engine.base.file").is_folder(script) then
      local more = ...
      fail_if(more, "expected nothing after the folder, got '%s'", more)
      return require("engine.cli.plan_model").print(script)
    end
    want_script(script)
    local measure = require "engine.cli.plan_measure"
    local given, settings = read { ... }
    if given.role == "rank" then return measure.rank(script, settings, given) end
    if given.checkpoint then
      return require("engine.cli.plan_checkpoint").print(script, settings, given)
    end
    local trainer, options, records = measure.trainer(script, settings, given)
    local wanted = require("engine.dist.plan").counts(given.ranks)
    local step = given.step or measure.step(trainer)
    local job, cost, source = job_of(trainer, options, records, wanted, given.measure, step),
      { alpha = given.alpha, beta = given.beta }, "given"
    if not (cost.alpha and cost.beta) then
      local alpha, beta = measure.messages()
      source = alpha and "measured between two processes here"
        or "assumed, because mpirun, which measuring needs, is missing or failed"
      cost.alpha, cost.beta = cost.alpha or alpha or FALLBACK.alpha, cost.beta or beta
        or FALLBACK.beta
    end
    table_of(job, cost, source, given)
    if given.measure then compare(job, cost, given, script, settings) end
  end, ...)
  if good then return 0 end
  local unknown = tostring(problem):match("config: no field '([^']+)'")
  local own = unknown and "\nengine plan has no such setting either" ..
    nearest.choices(unknown, OWN, "its settings") or ""
  local line = tostring(problem):gsub("^config: ", "")
  io.stderr:write("engine plan: ", show.shown(line, true), own, "\n")
  return 1
end

return { doc = "what training costs on many ranks, or what memory a model takes", help = help,
  main = main }
