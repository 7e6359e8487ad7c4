-- Generates a history of many steps and times common queries on it:
--   ./engine spec/bench/long_history.lua /tmp/long 1000000
-- writes /tmp/long/history.db if missing. It uses the engine's writer, so the file is laid out like
-- a run's history.
local M_ffi = require "engine.base.ffi"
local history = require("engine").history
local machine = require "engine.base.machine"

local ffi, C = M_ffi.ffi, M_ffi.C
local dir, n = assert(arg[1], "expected a directory"), tonumber(arg[2] or 1e6)
local LAYERS, PARTS = 12, { "attn.qkv", "attn.out", "mlp.up", "mlp.down" }

local function write()
  M_ffi.check(C.eng_file_mkdir(dir))
  local h = history.open(dir, { write = true })
  local names = {}
  for layer = 0, LAYERS - 1 do
    for _, part in ipairs(PARTS) do
      names[#names + 1] = { name = ("blocks.%d.%s.weight"):format(layer, part),
        shape = { 768, 768 } }
    end
  end
  h:set_parameters(names)
  h:set_meta("precision", "fp16")
  h:set_meta("gradients", "f16")
  h:set_meta("steps", n)
  h:add_policy("00000000", "dynamic", "return {}")
  local record, verdict = ffi.new("eng_record"), ffi.new("eng_verdict")
  local stats = ffi.new("eng_tensor_stats[?]", #names)
  local shadow = ffi.new("eng_verdict")
  local scale, good = 2 ^ 16, 0
  math.randomseed(1)
  for step = 0, n - 1 do
    local amax = 0.25 * math.exp(0.6 * (math.random() + math.random() + math.random() - 1.5)) *
      (1 + 3 * math.exp(-step / (0.05 * n)))
    local over = amax * scale > 65504
    record.step, record.updates, record.count, record.first_bad = step, step, 85e6,
      over and #names - 1 or -1
    record.scale, record.loss, record.lr = scale,
      2.5 + 8 * math.exp(-step / (0.1 * n)) + 0.1 * math.random(), 1e-3
    record.amax, record.norm, record.norm_ref, record.elapsed = amax, 4 * amax, 0 / 0, step * 0.02
    record.overflow, record.inf, record.zeros, record.underflow = over and 1 or 0, over and 7 or 0,
      1000, 20000
    record.amax_f16 = amax * scale
    local top = math.floor(math.log(amax * scale) / math.log(2))
    ffi.fill(record.hist, ffi.sizeof(record.hist))
    for e = math.max(-24, top - 40), math.min(15, top) do
      record.hist[e + 160] = 1e7 * math.exp(-((e - top + 14) / 6) ^ 2)
    end
    verdict.action, good = over and 1 or 0, over and 0 or good + 1
    verdict.scale = over and scale / 2 or good % 2000 == 0 and scale * 2 or scale
    verdict.lr_mul = 1
    verdict.reason = over and "overflow: halved" or ""
    h:append(record, verdict, 16384)
    -- a policy that changes the scale at every step
    shadow.scale, shadow.action = 30000 / amax, over and 1 or 0
    h:append_shadow(step, "max_value", shadow)
    if step % 100 == 0 or over then
      for i = 0, #names - 1 do
        local s = stats[i]
        s.count, s.amax, s.inf = 589824, amax * scale * 2 ^ -((#names - i) / 8),
          over and i > #names - 4 and 3 or 0
        s.sum_squares = s.amax ^ 2 * 100
        local e0 = math.max(-20, math.min(15, math.floor(math.log(s.amax) / math.log(2))))
        ffi.fill(s.hist, ffi.sizeof(s.hist))
        for e = e0 - 4, e0 do s.hist[e + 160] = 1000 * 2 ^ (e0 - e) end
      end
      h:append_tensors(step, stats, #names)
    end
    if over then h:event(step, "overflow", "7 inf", nil) end
    scale = verdict.scale
  end
  h:event(n, "finished", "")
  h:close()
end

local function timed(what, f)
  local from = machine.clock()
  local result = f()
  print(("%-52s %8.1f ms"):format(what, 1e3 * (machine.clock() - from)))
  return result
end

if C.eng_file_kind(dir .. "/history.db") == 0 then timed(("writing %d steps"):format(n), write) end
local h = timed("open", function() return history.open(dir) end)
timed("tostring(h)", function() return tostring(h) end)
timed("h:last(20)", function() return h:last(20) end)
timed("h:overflows()", function() return h:overflows() end)
timed("h:why(n / 2)", function() return h:why(math.floor(n / 2)) end)
timed("select avg(loss)", function() return h:query("SELECT avg(loss) AS a FROM steps") end)
timed("select min, max, avg of 5 columns", function()
  return h:query [[SELECT avg(loss), min(loss), max(loss), avg(scale), min(scale), max(scale),
    avg(amax), min(amax), max(amax), avg(norm), min(norm), max(norm), avg(underflow),
    min(underflow), max(underflow), sum(overflow) FROM steps]]
end)
for _, what in ipairs { 'plot("loss")', 'plot("scale")', 'plot("amax", { log = true })',
  "heatmap()", 'heatmap { by = "exponent" }',
  'tensor("blocks.3.attn.qkv.weight")' } do
  local ask = loadstring("local h = ... return h:" .. what)
  timed("h:" .. what, function() return tostring(ask(h)) end)
end
timed("h:shadows()", function() return tostring(h:shadows()) end)
timed("the report", function() return require("engine.report.report").html(h, dir) end)
