-- The cost of a policy decision, compared with an empty policy and a bare call into the library:
--   ./engine spec/bench/policy.lua
-- The best of many short batches counts, because other load only adds time.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"

local C = M_ffi.C
local BATCH, BATCHES = 20000, 100

local function best(f)
  local least = math.huge
  for _ = 1, BATCHES do
    local began = C.eng_clock()
    f()
    least = math.min(least, C.eng_clock() - began)
  end
  return least / BATCH * 1e9
end

local record = M_ffi.new("eng_record")
record.first_bad, record.norm_ref, record.amax, record.norm = -1, 0 / 0, 1e-3, 1

local function decisions(policy)
  return best(function()
    for i = 1, BATCH do
      record.step, record.scale = i, policy:scale()
      policy:decide(record)
    end
  end)
end

local empty = engine.policy.load { file = "empty",
  source = "return { init = function() return { scale = 1 } end, decide = function() return 1 " ..
  "end }" }
local call = best(function() for _ = 1, BATCH do C.eng_step_count() end end)
local floor = decisions(empty)
-- A decision as a trainer makes it: the scale for the step, groups, the decision, probation, checks
-- of the verdict. A GPT of 12 layers has 15 groups.
local function path()
  local model = engine.nn.gpt { vocab = 256, context = 8, width = 16, heads = 2, layers = 12 }
  local t = engine.trainer { model = model, steps = 1e9, log = "quiet", policy = empty,
    data = engine.data.text { text = ("abc"):rep(500), batch = 1, context = 8 },
    optimizer = engine.optim.adamw(model, { precision = "fp16" }) }
  t:step()
  local s = { signals = {} }
  return best(function()
    for i = 1, BATCH do
      record.step, record.scale = i, t.policy:scale()
      t.groups:apply(t.policy)
      t:decide(s, record)
    end
  end)
end

print(("%-12s %8.1f ns"):format("library call", call))
print(("%-12s %8.1f ns"):format("empty policy", floor))
local whole = path()
print(("%-12s %8.1f ns  %.1fx empty"):format("by a trainer", whole, whole / floor))
for _, name in ipairs(engine.policy.names()) do
  local time = decisions(engine.policy.load(name))
  print(("%-12s %8.1f ns  %.1fx empty"):format(name, time, time / floor))
end
