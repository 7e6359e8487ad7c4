-- The engine's side of stability.py: reads a file of cases, one JSON object a line (policy,
-- options, steps), and prints a line for each step. A step is [loss, norm, inf, nan], and its line
-- has the action, the clip and the logged numbers. Other policies have other steps and lines:
--   fp8_lm        [amax, clipped] -> the amax that scales the tensor
--   adagc         the norms of two tensors -> the factors on their gradients
--   update_clip   a list that begins with the norm of the update -> the factor on the update
--   spam          numbers that nothing reads -> the factor on the rate, whether moments are reset,
--                 and the threshold
--   stable_spam   the gradients of two tensors with one element each -> what the update reads of
--                 them, whether moments are reset, and the number for bias corrections
local json = require "cjson"
local engine = require "engine"
local ffi = require "ffi"

local function hex(x) return x == x and ("%a"):format(x) or "nan" end

-- A record as the trainer makes it. A skipped update does not count in `updates`.
local function guard(case)
  local policy, record, updates = engine.policy.load(case.policy, case.options),
    ffi.new("eng_record"), 0
  for i, s in ipairs(case.steps) do
    record.step, record.updates, record.scale, record.first_bad = i - 1, updates, policy:scale(), -1
    record.loss, record.norm = tonumber(s[1]), tonumber(s[2])
    record.inf, record.nan, record.count = s[3], s[4], 100
    record.overflow = s[3] + s[4] > 0 and 1 or 0
    local v = policy:decide(record)
    assert(v.failed == 0, v:why())
    if v:what() == "step" then updates = updates + 1 end
    local words = { v:what(), hex(v.clip > 0 and v.clip or 1 / 0) }
    for name, x in pairs(policy:logs() or {}) do words[#words + 1] = name .. "=" .. hex(x) end
    print(table.concat(words, " "))
  end
end

local function fp8(case)
  local policy, record, stats = engine.policy.load(case.policy, case.options, "fp8"),
    ffi.new("eng_record"), ffi.new("eng_tensor_stats[1]")
  policy:tensors({ "a:dy" }, { 1 }, { "a:dy" }, true)
  for i, s in ipairs(case.steps) do
    record.step, record.scale, record.first_bad = i - 1, 1, -1
    stats[0].relative_scale, stats[0].amax = 1, tonumber(s[1])
    stats[0].measured, stats[0].clipped = 1e6, s[2]
    local v = policy:decide(record, stats)
    assert(v.failed == 0, v:why())
    print(hex(policy:group_scale(1)))
  end
end

local function update(case)
  local policy, record, stats = engine.policy.load(case.policy, case.options),
    ffi.new("eng_record"), ffi.new("eng_tensor_stats[2]")
  policy:tensors({ "a", "b" }, { 1, 1 }, { "all" }, true)
  record.norms[0] = 0 / 0
  for i, s in ipairs(case.steps) do
    record.step, record.updates, record.scale, record.first_bad = i - 1, i - 1, 1, -1
    local first, second = tonumber(s[1]), tonumber(s[2])
    record.norm, stats[0].count, stats[1].count = math.sqrt(first ^ 2 + second ^ 2), 1, 1
    stats[0].sum_squares, stats[1].sum_squares = first ^ 2, second ^ 2
    stats[0].amax, stats[1].amax = first, second
    local v = policy:decide(record, stats, function()
      local caps = policy:each(3, ffi.new("double[2]"), 2)
      for k = 0, 1 do stats[k].sum_squares = math.min(stats[k].amax, caps[k]) ^ 2 end
    end)
    assert(v.failed == 0, v:why())
    if case.policy == "adagc" then
      local factors = policy:each(0, ffi.new("double[2]"), 2)
      print(hex(factors[0]) .. " " .. hex(factors[1]))
    elseif case.policy == "stable_spam" then
      local factors, reset = policy:each(0, ffi.new("double[2]"), 2),
        policy:each(2, ffi.new("double[2]"), 2)
      for k = 0, 1 do factors[k] = factors[k] * math.sqrt(stats[k].sum_squares) end
      print(table.concat({ hex(factors[0]), hex(factors[1]), hex(reset and reset[0] or 0),
        hex(tonumber(v.bias_step)) }, " "))
    elseif case.policy == "update_clip" then
      record.norms[0] = first                              -- of the update that this step makes
      print(hex(v.update_clip > 0 and math.min(1, v.update_clip / first) or 1))
    else
      local reset = policy:each(2, ffi.new("double[2]"), 2)
      print(hex(v.lr_mul) .. " " .. hex(reset and reset[0] or 0) .. " " .. hex(v.spike_clip))
    end
  end
end

local UPDATE = { adagc = true, update_clip = true, spam = true, stable_spam = true }
for line in io.lines(arg[1]) do
  local case = json.decode(line)
  if case.policy == "fp8_lm" then fp8(case)
  elseif UPDATE[case.policy] then update(case)
  else guard(case) end
end
