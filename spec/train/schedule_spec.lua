-- Learning-rate schedules: pure functions of the number of updates.
local engine = require "engine"

local schedule = engine.schedule
local NAMES = { "constant", "linear", "cosine", "step", "exponential", "wsd" }

local function near(expected, s, updates)
  assert.near(expected, s(updates), 1e-12, "at " .. updates)
end

describe("a schedule", function()
  it("warms up linearly; the first update already has a rate above 0", function()
    for _, name in ipairs(NAMES) do
      local s = schedule[name] { lr = 2, warmup = 4 }
      for u = 0, 3 do near(2 * (u + 1) / 4, s, u) end
      near(2, s, 4)                                   -- and then starts at the full rate
    end
  end)

  it("without warm-up starts at the full rate", function()
    for _, name in ipairs(NAMES) do near(2, schedule[name] { lr = 2 }, 0) end
    near(0.3, schedule.constant(0.3), 10)
  end)

  it("constant stays", function()
    for _, u in ipairs { 0, 1, 1e6 } do near(0.5, schedule.constant { lr = 0.5 }, u) end
  end)

  it("linear falls straight to the floor and stays there", function()
    local s = schedule.linear { lr = 1, warmup = 10, total = 110, floor = 0.2 }
    near(1, s, 10)
    near(0.6, s, 60)
    near(1 - 0.8 * 0.25, s, 35)
    near(0.2, s, 110)
    near(0.2, s, 1000)
  end)

  it("cosine follows half a cosine to the floor and stays there", function()
    local s = schedule.cosine { lr = 1, warmup = 10, total = 110, floor = 0.2 }
    near(1, s, 10)
    near(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, s, 35)
    near(0.6, s, 60)
    near(0.2, s, 110)
    near(0.2, s, 1000)
  end)

  it("linear and cosine reach the floor at update `total`, also if all updates warm up", function()
    for _, name in ipairs { "linear", "cosine" } do
      for _, warmup in ipairs { 10, 9.5, 0 } do
        local s = schedule[name] { lr = 1, warmup = warmup, total = 10, floor = 0.1 }
        if warmup == 10 then near(1, s, 9) end
        near(0.1, s, 10)
        near(0.1, s, 11)
      end
    end
  end)

  it("step and exponential multiply", function()
    local s = schedule.step { lr = 1, every = 10, gamma = 0.5, warmup = 5 }
    near(1, s, 14)
    near(0.5, s, 15)
    near(0.25, s, 34)
    near(0.125, s, 35)
    s = schedule.exponential { lr = 2, gamma = 0.9, warmup = 1 }
    near(2, s, 1)
    near(2 * 0.9 ^ 7, s, 8)
  end)

  it("wsd stays constant, then falls linearly", function()
    local s = schedule.wsd { lr = 1, warmup = 10, total = 100, decay = 20, floor = 0.1 }
    near(1, s, 10)
    near(1, s, 80)
    near(0.55, s, 90)
    near(0.1 + 0.9 / 20, s, 99)
    near(0.1, s, 100)
    near(0.1, s, 500)
  end)

  it("is pure: the same number of updates gives the same rate, in any order", function()
    for _, name in ipairs(NAMES) do
      local s = schedule[name] { lr = 1, warmup = 7 }
      local forward, backward = s:values(50), {}
      for u = 49, 0, -1 do backward[u + 1] = s(u) end
      assert.same(forward, backward)
      assert.equal(50, #forward)
    end
  end)

  it("stays within the range of the options", function()
    for _, name in ipairs { "linear", "cosine", "wsd" } do
      for _, total in ipairs { 0, 1, 5, 100 } do
        local s = schedule[name] { lr = 1, warmup = math.min(5, total), total = total,
          floor = 0.25 }
        for u = 0, 120 do
          assert.is_true(s(u) <= 1 and s(u) >= 0.2, name .. " of " .. total .. " at " .. u)
        end
        near(0.25, s, 120)
      end
    end
  end)

  it("prints itself", function()
    assert.equal("schedule.linear{ floor=0, lr=0.5, total=10, warmup=2 }",
      tostring(schedule.linear { lr = 0.5, total = 10, warmup = 2 }))
  end)

  it("refuses unknown and unusable options", function()
    local cases = {
      { "schedule.cosine { warm = 1 }",
        "schedule.cosine: unknown option 'warm'; did you mean 'warmup'?; options: floor lr " ..
        "total warmup" },
      { "schedule.cosine { totl = 1 }",
        "schedule.cosine: unknown option 'totl'; did you mean 'total'?; options: floor lr total " ..
        "warmup" },
      { "schedule.cosine { lr = 'a' }",
        "schedule.cosine: expected lr to be a finite number >= 0, got 'a'" },
      { "schedule.linear { total = -1 }",
        "schedule.linear: expected total to be a finite number >= 0, got -1" },
      { "schedule.cosine { warmup = 20, total = 10 }",
        "schedule.cosine: expected warmup to be at most total, which is 10, got 20" },
      { "schedule.linear { warmup = 1/0 }",
        "schedule.linear: expected warmup to be a finite number >= 0, got inf" },
      { "schedule.step { every = 0 }",
        "schedule.step: expected every to be a finite number >= 1, got 0" },
      { "schedule.constant 'a'", "schedule.constant: expected a table of options or a rate, got " ..
        "'a'" },
      { "schedule.cosin {}", "engine.schedule has no 'cosin'; did you mean 'cosine'?" },
    }
    for _, case in ipairs(cases) do
      local chunk = assert(loadstring("local y = " .. case[1] .. "\nreturn y", "=script"))
      local good, message = pcall(setfenv(chunk, { schedule = schedule }))
      assert.is_false(good, case[1])
      assert.equal("script:1: " .. case[2], message)
    end
  end)
end)
