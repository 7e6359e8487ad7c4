-- One job in both modes leaves the same history: mode = "lagged" moves the policy's decision by a
-- step and changes nothing else. Only these fields differ, by design:
--   elapsed     a time
--   updates     in the step after an overflow: the host does not know yet of the skipped step
--   next_scale  applies from the next step, or from the one after (so scales are static here)
-- A stuck lagged run gives its advice without running the step again: no `trap` event.
local engine = require "engine"
local helper = require "spec.helper"
local start = require "spec.dist.start"

local folder
before_each(function() folder = helper.folder() end)
after_each(function() helper.remove(folder) end)

-- Everything that a run of the job wrote, as plain tables.
local function history_of(mode, n, settings)
  local run = folder .. "/" .. mode
  local words = { "mode=" .. mode, "run=" .. run }
  for i, word in ipairs(settings) do words[2 + i] = word end
  local result
  if n > 1 then result = start.run(n, "spec/train/modes_job.lua", words, { limit = 120 })
  else result = helper.run { "spec/train/modes_job.lua", unpack(words) } end
  assert(result.code == (settings.status or 0), result.err)
  local h = engine.history.open(run)
  local all = { kinds = {},
    tensors = h:query "SELECT step, hex(stats) AS stats FROM tensor_stats ORDER BY step",
    steps = h:query [[SELECT step, attempt, updates, loss, lr, scale, next_scale, action, overflow,
      inf, nan, count, zeros, underflow, amax, norm, clip, lr_mul, policy_failed, first_bad, reason,
      tokens, hex(hist) AS hist FROM steps ORDER BY step, attempt]],
    shadows = h:query "SELECT * FROM shadows ORDER BY name, step",
    signals = h:query "SELECT * FROM signals ORDER BY name, step" }
  if #h:query "SELECT 1 FROM sqlite_master WHERE name = 'fp8'" > 0 then
    all.fp8 = h:query "SELECT * FROM fp8 ORDER BY step, site, role"
  end
  for _, event in ipairs(h:events()) do
    if event.kind ~= "trap" and event.kind ~= "checkpoint" then
      local text = event.kind == "overflow" and event.text or event.kind == "stuck"
        and event.text:match("^[^\n]*") or ""
      all.kinds[#all.kinds + 1] = ("%d %s %s"):format(event.step, event.kind, text)
    end
  end
  table.sort(all.kinds)
  h:close()
  return all
end

local function both(n, settings)
  return history_of("sync", n, settings), history_of("lagged", n, settings)
end

-- overflows: the number of steps that overflow, without the last one.
local function alike(sync, lagged, overflows)
  local found = 0
  for i = 1, #lagged.steps - 1 do found = found + lagged.steps[i].overflow end
  assert.equal(overflows, found)
  for _, part in ipairs { "steps", "tensors", "shadows", "signals", "kinds", "fp8" } do
    assert.same(sync[part], lagged[part], part)
  end
end

describe("the training step", function()
  it("is implemented once, within one screen", function()
    local begins, lines = 0, nil
    for path in helper.shell("ls lua/engine/train/*.lua").out:gmatch("%S+") do
      local text = helper.read(path)
      begins = begins + select(2, text:gsub("eng_step_begin", ""))
      local step = text:match("\nfunction Trainer:step.-\nend\n")
      if step then lines = select(2, step:gsub("\n", "")) - 1 end
    end
    assert.equal(1, begins)
    assert.is_true(lines <= 45)
  end)
end)

describe("both modes", function()
  it("write the same history of fp16, micro-batches, shadows and an overflow", function()
    local sync, lagged = both(1, { "accumulate=3", "dropout=0.1", "clip=0.5", "first=4", "last=4",
      "shadow=dynamic:growth_interval=3,static:loss_scale=2" })
    alike(sync, lagged, 1)
    assert.equal(10, #sync.steps)
    assert.equal("skip", sync.steps[5].action)
    assert.is_true(#sync.shadows >= 4 and #sync.tensors >= 4 and #sync.signals == 10)
    assert.matches("4 overflow 1 inf, first in blocks.2.mlp.up.weight", sync.kinds[3], 1, true)
  end)

  it("write the same meters of FP8 layers", function()
    local sync, lagged = both(1, { "precision=fp8_current", "sample=2", "accumulate=2",
      "policy=static:loss_scale=1", "first=3", "last=3" })
    alike(sync, lagged, 1)
    local steps = {}
    for _, row in ipairs(lagged.fp8) do steps[row.step] = (steps[row.step] or 0) + 1 end
    assert.same({ [0] = 24, [2] = 24, [4] = 24, [6] = 24, [8] = 24 }, steps)
  end)

  it("write meters at every step", function()
    local sync, lagged = both(1, { "precision=fp8_block", "sample=1", "steps=4",
      "policy=static:loss_scale=1" })
    alike(sync, lagged, 0)
    assert.equal(4 * 24, #lagged.fp8)
  end)

  it("give advice when no loss scale helps", function()
    local sync, lagged = both(1, { "steps=16", "first=2", "last=14" })
    alike(sync, lagged, 13)
    assert.matches("11 stuck 10 overflows in a row, and the loss scale stays at 2^10",
      table.concat(lagged.kinds, "\n"), 1, true)
  end)

  it("end at once when the policy stops the run, and record the step in flight", function()
    local stop = helper.write(folder .. "/stop.lua", [[return { name = "stopper",
      options = { at = 3 }, init = function() return { scale = 1024 } end,
      decide = function(state, record, options)
        return { scale = 1024, action = record.step == options.at and "stop" or nil,
          reason = "seen enough" }
      end }]])
    local sync, lagged = both(1, { "policy=" .. stop, status = 2 })
    assert.equal(4, #sync.steps)
    -- the device was at the fifth step when the host read the fourth
    assert.equal(5, #lagged.steps)
    assert.same(sync.steps[3], lagged.steps[3])
    assert.equal("5 stopped ", lagged.kinds[#lagged.kinds])
  end)

  it("record what the device did where a lagged verdict comes too late", function()
    local late = helper.write(folder .. "/late.lua", [[return { name = "late", options = {},
      init = function() return { scale = 1024 } end,
      decide = function(_, r)
        return { scale = 1024, reason = r.step == 2 and "noise" or nil,
          action = ({ [1] = "retry", [2] = "skip", [4] = "step", [5] = "step" })[r.step] }
      end }]])
    local words = { "policy=" .. late, "shadow=" .. late:gsub("late.lua", "copy.lua"), "first=4",
      "last=5", "steps=8" }
    helper.write(folder .. "/copy.lua", (helper.read(late):gsub('"late"', '"copy"')))
    local all = history_of("lagged", 1, words)
    local actions, reasons = {}, {}
    for i, row in ipairs(all.steps) do actions[i], reasons[i] = row.action, row.reason or "" end
    assert.equal("step step step step skip skip step step", table.concat(actions, " "))
    local why = "too late for %s, because mode=lagged decides after the update"
    assert.equal(why:format "retry", reasons[2])
    assert.equal(why:format "skip" .. ": noise", reasons[3])
    assert.equal(why:format "step", reasons[5])
    for _, row in ipairs(all.shadows) do assert.equal(0, row.bound) end
    assert.equal("skip", all.shadows[2].action)
  end)

  it("resume with the clip and lr_mul of the last verdict", function()
    local policy = helper.write(folder .. "/slow.lua", [[return { name = "slow", options = {},
      init = function() return { scale = 256 } end,
      decide = function(_, r)
        return { scale = 256, lr_mul = 0.5 + r.step / 8, clip = 0.25 }
      end }]])
    local words = { "policy=" .. policy, "checkpoint_every=4" }
    local whole = history_of("lagged", 1, words)
    helper.remove(folder .. "/lagged")
    history_of("lagged", 1, { words[1], words[2], "steps=4" })
    local parts = history_of("lagged", 1, { words[1], words[2], "resume=auto" })
    assert.same(whole.steps, parts.steps)
  end)

  it("write the same history on ranks", function()
    local sync, lagged = both(2, { "accumulate=2", "dropout=0.1", "first=4", "last=4",
      "shadow=dynamic:growth_interval=3" })
    alike(sync, lagged, 1)
    assert.matches("inf from rank 1, first in blocks.2.mlp.up.weight",
      table.concat(lagged.kinds, "\n"), 1, true)
  end)
end)
