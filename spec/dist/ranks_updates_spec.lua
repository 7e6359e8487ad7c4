-- Policies that read the norms of updates and act on single tensors, on several ranks: the same
-- numbers as one process with the same batches, and the same weights on all ranks, which
-- spec/dist/job.lua compares after every step.
local engine = require "engine"
local helper = require "spec.helper"
local start = require "spec.dist.start"

if not start.can("policies that act on updates, on several ranks") then return end

local LIMITS = [[return {
  needs = { "update_norm", "weight_norm", "m_norm", "v_norm", "tensors", "norm", "clips", "lr_muls",
    "reset_moments", "update_clip" },
  options = { init_scale = 1 },
  decide = function(state, record)
    local log = { update = record.update_norm or 0, weight = record.weight_norm or 0,
      m = record.m_norm or 0, v = record.v_norm or 0 }
    return { scale = 1, clips = { [".*weight"] = record.tensors[1].norm / 2 },
      lr_muls = { [".*%.bias"] = 0.1 }, reset_moments = record.step == 3 and ".*up.*" or nil,
      update_clip = record.step % 2 == 1 and record.update_norm
        and record.update_norm * 0.9 or nil, log = log }
  end }]]

describe("policies that act on updates, on several ranks", function()
  local folder
  setup(function() folder = helper.folder() end)
  teardown(function() helper.remove(folder) end)

  -- Losses and logged numbers of each step of a run.
  local function run(n, name, settings)
    local path = folder .. "/" .. name
    local result = helper.shell(start.command(n, "spec/dist/job.lua",
      { "run=" .. path, "steps=8", "dropout=0", unpack(settings) }, { limit = 120 }))
    assert.equal(0, result.code, result.out .. result.err)
    local h = engine.history.open(path)
    local at, list = h:signals_at(), {}
    for i, row in ipairs(h:steps()) do
      local own = { loss = row.loss, norm = row.norm }
      for key, value in pairs(at(row.step)) do own[key] = value end
      assert.equal("step", row.action, row.reason)
      list[i] = own
    end
    h:close()
    return list
  end

  for _, case in ipairs { { "limits", 6 }, { "stable_spam:loss_scale=1,interval=3", 2 } } do
    it("give the numbers of one process: " .. case[1], function()
      local policy = case[1]
      if policy == "limits" then policy = helper.write(folder .. "/limits.lua", LIMITS) end
      local one = run(0, "one", { "accumulate=4", "policy=" .. policy })
      local four = run(4, "four", { "policy=" .. policy })
      assert.equal(8, #one)
      assert.equal(8, #four)
      local compared = 0
      for i, own in ipairs(one) do
        for key, value in pairs(own) do
          assert.near(value, four[i][key], 2e-4 * math.max(1e-3, math.abs(value)),
            ("%s of step %d"):format(key, i - 1))
          compared = compared + 1
        end
      end
      assert.equal(8 * case[2], compared)
      helper.remove(folder .. "/one")
      helper.remove(folder .. "/four")
    end)
  end

  it("are refused with ZeRO, by every rank in one line", function()
    local result = helper.shell(start.command(2, "spec/dist/job.lua", { "zero=1",
      "policy=stable_spam:loss_scale=1" }))
    assert.not_equal(0, result.code)
    assert.matches("policy stable_spam needs caps, which this run lacks: each rank updates only " ..
      "a part of the weights; hint: zero=0", result.err, 1, true)
  end)
end)
