-- A step at another scale: what the record says about its overflow, and which verdicts of a policy
-- are exact.
local counterfactual = require "engine.run.counterfactual"
local formats = require "engine.base.formats"
local M_ffi = require "engine.base.ffi"

local C, ffi = M_ffi.C, M_ffi.ffi

-- A record at scale 1024 whose largest fp16 gradient is stored as `amax`.
local function record(amax, overflow, loss)
  local r = ffi.new("eng_record")
  r.scale, r.loss, r.count, r.amax, r.norm, r.amax_f16 = 1024, loss or 2, 100, amax / 1024, 1, amax
  r.overflow, r.inf = overflow and 1 or 0, overflow and 1 or 0
  return r
end

local function moved(r, ratio, more)
  local o = { format = formats.of "f16", accumulate = 1, needs = 0, hist = false }
  for key, value in pairs(more or {}) do o[key] = value end
  local known = counterfactual.move(r, r.scale * ratio, o)
  return r.overflow ~= 0 and "overflow" or "good", known
end

describe("a step at another scale", function()
  it("is known exactly where the record decides it", function()
    for _, case in ipairs {
      -- amax stored, overflow, ratio, expected verdict, what is known
      { 100, false, 1, "good", "exact" }, { 100, false, 0.5, "good", "exact" },
      { 65504, false, 2 ^ -20, "good", "exact" }, { 100, false, 0.9, "good", "exact" },
      { 65504, false, 0.999, "good", "bound" },              -- rounds differently, near the limit
      { 100, false, 0.99, "good", "bound" }, { 100, false, 1.01, "good", "hidden" },
      { 32752, false, 2, "good", "hidden" },                 -- 65504
      { 32768, false, 2, "overflow", "exact" },              -- 65536
      { 65504, false, 2, "overflow", "exact" }, { 100, false, 2 ^ 10, "overflow", "exact" },
      { 100, false, 2, "good", "hidden" },
      { 21840, false, 3, "overflow", "bound" }, { 21800, false, 3, "good", "bound" },
      { 22500, false, 3, "overflow", "exact" }, { 20000, false, 3, "good", "hidden" },
      { 2 ^ -20, false, 2 ^ 40, "overflow", "bound" },       -- subnormal: few bits
      { 60000, true, 1, "overflow", "exact" }, { 60000, true, 4, "overflow", "exact" },
      { 60000, true, 1.001, "overflow", "bound" },
    } do
      local verdict, known = moved(record(case[1], case[2]), case[3])
      local name = ("%g %s x%g"):format(case[1], tostring(case[2]), case[3])
      assert.equal(case[4], verdict, name)
      assert.equal(case[5], known, name)
    end
  end)

  it("is a bound below a scale that overflowed, unless the loss itself was inf or nan", function()
    local around = { around = function() return 40 end }     -- 40960 at the record's scale
    assert.same({ "good", "bound" }, { moved(record(60000, true), 0.25, around) })
    around = { around = function() return 400 end }
    assert.same({ "overflow", "bound" }, { moved(record(60000, true), 0.25, around) })
    assert.same({ "good", "bound" }, { moved(record(60000, true), 0.125, around) })
    assert.same({ "overflow", "exact" }, { moved(record(60000, true, math.huge), 0.125, around) })
    assert.equal("exact", select(2, moved(record(60000, true, 0 / 0), 2 ^ -30)))
  end)

  it("overflows in fp16 gradients only, and is a bound if their amax is not recorded", function()
    local r = record(30000, false)
    r.amax_f16 = 10                                          -- the larger gradient is in f32
    assert.same({ "good", "hidden" }, { moved(r, 4) })
    r = record(30000, false)
    r.amax_f16 = 0                                           -- unknown
    assert.same({ "overflow", "bound" }, { moved(r, 4) })
    r = record(30000, false)
    r.amax_f16 = -1                                          -- none is fp16
    assert.same({ "good", "hidden" }, { moved(r, 4, { format = formats.of "bf16" }) })
  end)

  it("is harder to know for a sum of micro-batches, and for layers with scales of their own",
    function()
    assert.same({ "overflow", "bound" }, { moved(record(30000, false), 4, { accumulate = 4 }) })
    assert.same({ "overflow", "exact" }, { moved(record(30000, false), 16, { accumulate = 4 }) })
    assert.same({ "overflow", "bound" }, { moved(record(30000, false), 1, { reach = 1e6 }) })
    assert.same({ "good", "bound" }, { moved(record(30000, false), 1, { reach = 10 }) })
  end)

  it("is a bound if the policy reads statistics that are estimated", function()
    assert.equal("exact", (select(2, moved(record(100, false), 0.5, { needs = C.ENG_NEED_AMAX }))))
    assert.equal("bound", (select(2, moved(record(100, false), 2 ^ 12,
      { needs = C.ENG_NEED_AMAX }))))
    assert.equal("bound", (select(2, moved(record(100, false), 0.5,
      { needs = C.ENG_NEED_TENSORS }))))
  end)

  it("survives every ratio and record", function()
    for _, ratio in ipairs { 2 ^ -1000, 1e-300, 0.3, 1e300, 2 ^ 1000 } do
      for _, amax in ipairs { 0, 2 ^ -24, 65504, 0 / 0 } do
        for _, overflow in ipairs { true, false } do
          local r = record(amax, overflow)
          for b = 0, C.ENG_HIST_BINS - 1 do r.hist[b] = b % 7 end
          local _, known = moved(r, ratio, { hist = true })
          assert.is_true(known == "exact" or known == "hidden" or known == "bound")
        end
      end
    end
  end)
end)

describe("a policy's verdicts", function()
  local STEP, SKIP, RETRY = C.ENG_ACTION_STEP, C.ENG_ACTION_SKIP, C.ENG_ACTION_RETRY
  local function act(action, clip, lr_mul)
    return { action = action, clip = clip or 0, lr_mul = lr_mul or 1 }
  end
  -- steps: a list of { what is known, the policy's action or verdict, the run's action or
  -- verdict }. Returns the certainty.
  local function judged(steps)
    local c = counterfactual.certainty()
    for i, s in ipairs(steps) do
      counterfactual.judge(c, i - 1, s[1], type(s[2]) == "table" and s[2] or act(s[2]),
        type(s[3]) == "table" and s[3] or act(s[3]))
    end
    return c
  end

  it("are exact while all is known and the updates are the run's", function()
    local c = judged { { "exact", STEP, STEP }, { "exact", SKIP, SKIP }, { "exact", STEP, STEP } }
    assert.same({ exact = 3, bounds = 0, least = 1, closed = false }, c)
    assert.equal("1", counterfactual.count_text(c, 1))
    assert.is_nil(counterfactual.why_text(c))
  end)

  it("are bounds after an update that differs from the run's; later skips do not count", function()
    for _, own in ipairs { act(SKIP), act(RETRY), act(STEP, 1), act(STEP, 0, 0.5) } do
      local c = judged { { "exact", STEP, STEP }, { "exact", own, STEP }, { "exact", SKIP, SKIP },
        { "exact", SKIP, SKIP } }
      assert.equal(2, c.exact)
      assert.equal(2, c.bounds)
      assert.equal(2, c.from)
      assert.equal(own.action == STEP and 0 or 1, c.least)
    end
    local c = judged { { "exact", SKIP, STEP }, { "exact", SKIP, STEP } }
    assert.equal("at least 1, about 2", counterfactual.count_text(c, 2))
    assert.equal("its verdicts are bounds from step 1 on: its updates differ from the run's",
      counterfactual.why_text(c))
  end)

  it("are bounds after a rollback to another place than the run's", function()
    local function rollback(back, skip)
      return { action = C.ENG_ACTION_ROLLBACK, clip = 0, lr_mul = 1, back = back, skip = skip }
    end
    local function bounds(own, run)
      return judged { { "exact", own, run }, { "exact", STEP, STEP } }.bounds
    end
    assert.equal(0, bounds(rollback(5, 1), rollback(5, 1)))
    assert.equal(1, bounds(rollback(5, 1), rollback(9, 1)))
    assert.equal(1, bounds(rollback(5, 1), rollback(5, 2)))
    assert.equal(0, bounds(rollback(5, 1), rollback(0 / 0, 1)))    -- a history lacks `back`
    assert.equal(1, bounds(rollback(5, 1), rollback(0 / 0, 2)))
  end)

  it("count one more skip where an overflow may have been hidden before", function()
    local c = judged { { "hidden", STEP, STEP }, { "exact", SKIP, SKIP }, { "exact", SKIP, SKIP } }
    assert.equal(0, c.exact)
    assert.equal(1, c.least)
    assert.equal(0, c.from)
    assert.equal("at least 1", counterfactual.count_text(c, 1))
  end)

  it("do not count skips as certain from the first step whose overflow is only a bound", function()
    local c = judged { { "bound", SKIP, SKIP }, { "exact", SKIP, SKIP } }
    assert.equal(0, c.least)
    assert.equal(0, c.from)
  end)
end)
