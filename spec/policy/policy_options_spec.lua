-- Options of the shipped policies with which a policy cannot work: each is refused when the policy
-- is loaded, in one line that names the option, the accepted range and the value.
local engine = require "engine"
local helper = require "spec.helper"

-- What a message says between an option's name and ", got VALUE".
local POSITIVE = "must be a positive finite number"
local NOT_NEGATIVE = "must be 0 or a positive finite number"
local FRACTION, SHARE = "must be 0 or more and below 1", "must lie strictly between 0 and 1"
local COUNT, STEPS = "must be a whole number of 1 or more", "must be a positive number of steps"
local FACTOR = "must be greater than 1 and finite"
local FLOAT32 = "must be a positive number that float32 can hold"
local BIN = "must be a whole number from -160 to 159"
local UPDATES = "must be a whole number from 0 to 1000000000"
local SAMPLED = "must be a whole number from 1 to 1000000000"

-- Policy = { { option=value, its range }, ... }. A range without "must" is of a message that begins
-- with "expected".
local REFUSED = {
  bandit = { { "period=nan", "period >= 1" } },
  entropy = { { "gain=inf", NOT_NEGATIVE }, { "growth_interval=2.5", COUNT },
    { "low=3", "low <= high" }, { "decay=1", FRACTION }, { "least=0", POSITIVE } },
  fast_backoff = { { "growth_interval=0", COUNT }, { "patience=-1", STEPS },
    { "growth_factor=1", FACTOR }, { "backoff_factor=2", SHARE } },
  guarded = { { "growth_interval=1.5", COUNT }, { "floor=-1", FLOAT32 }, { "bad_row=0", STEPS },
    { "floor=2^30,init_scale=2^31", "floor <= max_scale" }, { "init_scale=1", "floor = 4096 is" },
    { "pause=-1", "pause >= 0" },
    { "clip=0", "clip > 0" }, { "ahead=0", "ahead > 0" } },
  histogram = { { "edge=2.5", BIN }, { "edge=1e300", BIN }, { "threshold=1", FRACTION },
    { "wait=-1", "wait >= 0" } },
  layerwise = { { "target=inf", POSITIVE }, { "up=1", "up > 1" },
    { "forget=2", "forget in (0, 1]" } },
  learned = { { "rate=inf", POSITIVE }, { "price=-1", NOT_NEGATIVE }, { "edge=-1", POSITIVE },
    { "momentum=1", FRACTION } },
  log_max = { { "log_max=nan", POSITIVE }, { "sigmas=-1", NOT_NEGATIVE },
    { "beta1=2", FRACTION } },
  max_norm = { { "decay=1", FRACTION }, { "ref_every=0.5", SAMPLED },
    { "bold=1", "target <= bold" } },
  max_value = { { "forgive=0", COUNT }, { "decay=-1", FRACTION }, { "backoff=1", SHARE },
    { "growth=1", "growth > 1" } },
  norm_ratio = { { "growth=0.5", FACTOR }, { "backoff=2", SHARE }, { "decay=1", FRACTION },
    { "ref_every=2.5", SAMPLED }, { "low=9", "high > low > 0" } },
  per_expert = { { "growth_interval=0.5", COUNT }, { "target=-1", POSITIVE } },
  pid = { { "kp=-1", NOT_NEGATIVE }, { "kd=nan", NOT_NEGATIVE }, { "shock=0", POSITIVE } },
  spike = { { "growth_interval=0", COUNT }, { "sigmas=inf", POSITIVE }, { "back=1.5", UPDATES },
    { "leave_out=-1", UPDATES }, { "slow=-1", NOT_NEGATIVE }, { "lr_mul=inf", NOT_NEGATIVE },
    { "decay=0", "decay in (0, 1]" }, { "patience=-1", "patience >= 0" },
    { "init_scale=0", POSITIVE } },
  underflow = { { "last=-24.5", BIN }, { "target=0", POSITIVE }, { "limit=1", SHARE },
    { "patience=0", "patience >= 1" } },
  skip_step = { { "rolling_interval_length=1e300", "must be a whole number from 6 to 20000" } },
  update_clip = { { "rolling_interval_length=inf", "must be a whole number from 2 to 20000" } },
  zclip = { { "warmup_steps=50000", "must be a whole number from 1 to 20000" } },
  stable_spam = { { "interval=2.5", UPDATES } },
  fp8_delayed = { { "history=2.5", SAMPLED } },
  fp8_fallback = { { "pause=0.5", "pause >= 1" }, { "longest=100", "longest >= pause" },
    { "clipped=-1", NOT_NEGATIVE }, { "snr=nan", NOT_NEGATIVE } },
  forward_high_before_decay = { { "at=-1", NOT_NEGATIVE }, { "below=2", "below in (0, 1]" } },
  layer_ladder = { { "rungs=1.5", COUNT }, { "grow=0", "grow >= 1" },
    { "snr_high=inf", NOT_NEGATIVE } },
  sqrt3 = { { "ratio=0", POSITIVE }, { "decay=1", FRACTION } },
}

describe("a shipped policy refuses", function()
  for name, cases in pairs(REFUSED) do
    for _, case in ipairs(cases) do
      it(name .. ":" .. case[1], function()
        local option, range = case[1]:match "^[^=]+", case[2]
        if range:find "^must" then range = ("%s %s, got "):format(option, range) end
        helper.refuses("policies/" .. name .. ".lua: ", engine.policy.load, name .. ":" .. case[1])
        helper.refuses(range, engine.policy.load, name .. ":" .. case[1])
      end)
    end
  end

  it("no infinite number that means no limit", function()
    for _, text in ipairs { "spike:patience=inf", "spike:skips=inf", "pid:most=inf",
      "guarded:patience=inf", "fast_backoff:growth_interval=inf" } do
      assert.equal(text:match "^%w+", (engine.policy.load(text).name:gsub("_.*", "")))
    end
  end)

  it("limits of the scale that float32 cannot hold or that exclude each other", function()
    for _, name in ipairs { "bandit", "entropy", "fast_backoff", "histogram", "layerwise",
      "learned", "log_max", "lr_coupled", "max_norm", "max_value", "norm_ratio", "per_expert",
      "pid", "underflow" } do
      for _, value in ipairs { "-1", "0", "inf", "nan", "1e300" } do
        helper.refuses("init_scale " .. FLOAT32 .. ", got", engine.policy.load,
          ("%s:init_scale=%s"):format(name, value))
      end
      for limits, got in pairs { ["min_scale=8,max_scale=4"] = "min_scale = 8, max_scale = 4",
        ["min_scale=-1"] = "min_scale = -1, ", ["min_scale=nan"] = "min_scale = nan, ",
        ["max_scale=0"] = ", max_scale = 0", ["max_scale=nan"] = ", max_scale = nan" } do
        local text = helper.failure(engine.policy.load, name .. ":" .. limits)
        assert.matches("expected 0 <= min_scale <= max_scale and max_scale > 0", text, 1, true)
        assert.matches(got, text, 1, true)
      end
      assert.is_table(engine.policy.load(name .. ":min_scale=0,max_scale=inf"))     -- no limits
    end
  end)
end)
