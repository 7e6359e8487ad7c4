-- Ranks compared with threads: one process with two threads, and two ranks with one thread each,
-- alternately make the same training steps of the bench GPT (6 layers, width 384, context 256, 8
-- sequences per step); then the comm dtypes, and messages without training.
--   ./engine spec/bench/ranks.lua [ROUNDS [STEPS]]
-- This file is also the job: with the word "job" it trains or times messages, and rank 0 prints.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local machine = require "engine.base.machine"

local C, ffi = M_ffi.C, M_ffi.ffi

local function median(list)
  table.sort(list)
  return list[math.ceil(#list / 2)]
end

-- ------------------------------------------------------------------ the job

local function train(steps, wire)
  local ranks = engine.ranks
  engine.seed(1)
  local model = engine.nn.gpt { vocab = 256, context = 256, width = 384, heads = 6, layers = 6 }
  local batch = 8 / ranks.size()
  local text = require("engine.report.lab").text(200000)
  local times, waited, from = {}, {}, nil
  local trainer
  trainer = engine.trainer { model = model, steps = steps + 2, clip = 1, log = "quiet",
    comm_dtype = wire ~= "one" and wire or nil,
    data = engine.data.text { text = text, batch = batch, context = 256, seed = 1 },
    optimizer = engine.optim.adamw(model, { lr = 1e-4 }), policy = "dynamic", precision = "fp32",
    on_step = function(t, record)
      local now = machine.clock()
      if record.step > 2 then
        times[#times + 1] = now - from
        if t.reducer.many then
          local facts = ffi.new("eng_parallel_facts")
          C.eng_parallel_last(facts, t.reducer.reduction)
          waited[#waited + 1], t.bytes = facts.waited, tonumber(facts.bytes)
        end
      end
      from = machine.clock()
    end }
  local summary = trainer:run()
  if ranks.rank() == 0 then
    print(("%.6f %.6f %d %.9g"):format(median(times), #waited > 0 and median(waited) or 0,
      trainer.bytes or 0, summary.loss))
  end
end

-- Times messages of 8 bytes and of the size of a step's record, here 7 doubles for each of 76
-- tensors.
local function messages()
  local world = engine.ranks.world()
  local function time(bytes, n)
    local memory = ffi.new("double[?]", bytes / 8)
    local best = math.huge
    for _ = 1, 9 do
      local from = C.eng_clock()
      for _ = 1, n do
        C.eng_comm_all_reduce(world, memory, bytes / 8, M_ffi.dtype.f64, C.ENG_SUM)
      end
      best = math.min(best, (C.eng_clock() - from) / n)
    end
    return best
  end
  local small, record = time(8, 2000), time(8 * 7 * 76, 2000)
  if engine.ranks.rank() == 0 then print(("%.9f %.9f"):format(small, record)) end
end

if arg[1] == "job" then
  if arg[2] == "messages" then messages() else train(tonumber(arg[2]), arg[3]) end
  return
end

-- ------------------------------------------------------------------ the bench

local rounds, steps = tonumber(arg[1] or 3), tonumber(arg[2] or 8)
local helper = require "spec.helper"

local function start(ranks, ...)
  local command = ("OMP_NUM_THREADS=%d OMPI_ALLOW_RUN_AS_ROOT=1 " ..
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 %s %s spec/bench/ranks.lua job %s 2>&1"):format(
    ranks == 1 and 2 or 1, ranks > 1 and "mpirun --oversubscribe --mca btl self,vader -np " .. ranks
      or "", helper.quote(helper.engine), table.concat({ ... }, " "))
  local pipe = io.popen(command)
  local text = pipe:read("*a")
  pipe:close()
  local numbers = {}
  for word in (text:match("([%d%.e%- ]+)\n$") or error("the job printed: " .. text, 0)):gmatch(
    "%S+") do
    numbers[#numbers + 1] = tonumber(word)
  end
  return numbers
end

if helper.execute("command -v mpirun >/dev/null") ~= 0 then
  print("no mpirun: skipped")
  return
end
local one, two = {}, {}
for i = 1, rounds do
  one[i] = start(1, steps, "one")[1]
  local got = start(2, steps, "fp32")
  two[i] = got[1]
  if i == rounds then
    print(("one process, two threads  %7.1f ms a step"):format(median(one) * 1e3))
    print(("two ranks, a thread each  %7.1f ms a step, %.2f of the throughput; waited for " ..
      "messages after backward %.1f ms (%.1f %%)"):format(median(two) * 1e3,
      median(one) / median(two), got[2] * 1e3, 100 * got[2] / got[1]))
  end
end
local exact
for _, wire in ipairs { "fp32", "bf16", "fp16", "fp8" } do
  local got = start(2, steps, wire)
  exact = exact or got[4]
  print(("comm dtype %-4s  %7.1f ms a step, waited %5.1f ms, %5.1f MiB a step, loss off by " ..
    "%.1e after %d steps"):format(wire, got[1] * 1e3, got[2] * 1e3,
    got[3] / 2 ^ 20, math.abs(got[4] / exact - 1), steps + 2))
end
local got = start(2, "messages")
print(("all-reduce between two ranks: 8 bytes %.1f us, the record of 76 tensors %.1f us"):format(
  got[1] * 1e6, got[2] * 1e6))
