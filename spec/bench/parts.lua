-- parts.lua READER.so ROUNDS SCRATCH: the cost of a step apart from its kernels, for bench.py.
-- Prints lines "name seconds seconds ...":
--   stats-f32 stats-f16   one pass over 124M random gradients with a training step's statistics
--   all-f32 all-f16       the same with all statistics, including the histogram
--   read-f32 read-f16     a plain read of the same bytes
--   policy                one decision of the policy dynamic
--   keeping               scale, policy, verdict and a history row, with the per-tensor rows of
--                         every 100th step
local engine = require "engine"
local machine = require "engine.base.machine"
local M_ffi = require "engine.base.ffi"
local ffi, C = M_ffi.ffi, M_ffi.C
local reader, rounds, scratch = arg[1], tonumber(arg[2]), arg[3]

local function report(name, seconds)
  for i, s in ipairs(seconds) do seconds[i] = ("%.9f"):format(s) end
  print(name .. " " .. table.concat(seconds, " "))
  io.stdout:flush()
end

-- ------------------------------------------------------------------ gradient statistics

ffi.cdef "uint64_t read_all(const uint64_t *words, int64_t n);"
local yardstick = ffi.load(reader)
-- the statistics a trainer computes
local STEP = bit.bor(C.ENG_NEED_AMAX, C.ENG_NEED_NORM, C.ENG_NEED_ZEROS, C.ENG_NEED_UNDERFLOW)
local ALL = bit.bor(STEP, C.ENG_NEED_HIST)

for _, precision in ipairs { "fp32", "fp16" } do
  local n, list = 124 * 2 ^ 20 / 16, {}
  for i = 1, 16 do
    list[i] = { name = "w" .. i, role = "linear",
      tensor = engine.zeros(n, { keep = true }):requires_grad() }
  end
  local opt = engine.optim.sgd(list, { precision = precision })
  for _, p in ipairs(list) do  -- a new step each time: gradients accumulate, memory does not
    engine.begin_step()
    ;(p.tensor * (engine.randn(n) * 1e-3)):sum():backward()
    engine.end_step()
  end
  local record, stats = M_ffi.new("eng_record"), M_ffi.new("eng_tensor_stats[16]")
  local bytes = 16 * n * (precision == "fp32" and 4 or 2)
  local memory = ffi.new("uint8_t[?]", bytes + 64)
  local words = ffi.cast("const uint64_t *",
    ffi.cast("uintptr_t", memory) + 64 - ffi.cast("uintptr_t", memory) % 64)
  ffi.fill(memory, bytes + 64, 1)
  local step, all, read = {}, {}, {}
  for round = 0, rounds do                    -- round 0 warms up
    local t0 = machine.clock()
    M_ffi.check(C.eng_params_stats(record, stats, opt.params, 1, STEP))
    local t1 = machine.clock()
    yardstick.read_all(words, bytes / 8)
    local t2 = machine.clock()
    M_ffi.check(C.eng_params_stats(record, stats, opt.params, 1, ALL))
    local t3 = machine.clock()
    if round > 0 then step[round], read[round], all[round] = t1 - t0, t2 - t1, t3 - t2 end
  end
  if record.count ~= 16 * n then
    error("the statistics saw " .. tostring(record.count) .. " elements")
  end
  local format = precision == "fp32" and "f32" or "f16"
  report("stats-" .. format, step)
  report("all-" .. format, all)
  report("read-" .. format, read)
  opt.params, opt.state = nil, nil
  collectgarbage() collectgarbage()
end

-- ------------------------------------------------------------------ policy and history

local TENSORS, CALLS = 76, 1000               -- of a GPT with 6 layers
local policy = require("engine.policy.policy").load("dynamic")
local record, stats = M_ffi.new("eng_record"), M_ffi.new("eng_tensor_stats[?]", TENSORS)
record.scale, record.loss, record.amax, record.norm, record.count = 65536, 3.2, 0.1, 1.5, 1e7

local decide = {}
for round = 0, rounds do
  local from = machine.clock()
  for i = 1, 100 * CALLS do
    -- as in a run: each decision has its own step
    record.step = i
    policy:decide(record, stats)
  end
  if round > 0 then decide[round] = (machine.clock() - from) / (100 * CALLS) end
end
report("policy", decide)

local history = engine.history.open(scratch .. "/history.db", { write = true })
local keeping, step = {}, 0
for round = 0, rounds do
  local from = machine.clock()
  for _ = 1, CALLS do
    record.step, record.scale = step, policy:scale()
    local verdict = policy:decide(record, stats)
    assert(history:append(record, verdict, 2048))
    if step % 100 == 0 then assert(history:append_tensors(step, stats, TENSORS)) end
    step = step + 1
  end
  if round > 0 then keeping[round] = (machine.clock() - from) / CALLS end
  history:flush()  -- the writer has its own thread, so its work is not part of the step
end
history:close()
report("keeping", keeping)
