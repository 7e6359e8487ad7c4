-- Shadows: policies that see every record and change nothing; the history holds the decisions they
-- would have made.
local engine = require "engine"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"

local C = M_ffi.C
local TEXT = require("engine.report.lab").text(40000)

local folder
before_each(function() folder = helper.folder() end)
after_each(function() helper.remove(folder) end)

local function job(options)
  return helper.job({ text = TEXT, context = 8, width = 16, layers = 1, batch = 2, steps = 30,
    precision = "fp16", policy = "dynamic:init_scale=2^22,growth_interval=5" }, options)
end

local function trace(options)
  local lines, scales = {}, {}
  options.on_step = function(t, record, verdict)
    lines[#lines + 1] = ("%.17g %.17g"):format(record.loss, record.scale)
    scales[#scales + 1] = verdict.scale
    if t.shadows then
      t.shadows.seen = t.shadows.seen or {} table.insert(t.shadows.seen, t.shadows.list[1].scale)
    end
  end
  local trainer = job(options)
  trainer:run()
  local sum = tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0))
  return table.concat(lines, "\n") .. sum, trainer, scales
end

-- The scales that a shadow chose at each step, from the rows that record changes; and the number of
-- rows.
local function verdicts(run, name, steps)
  local history = engine.history.open(run)
  local rows, list, at = history:shadow(name), {}, 0
  for step = 0, steps - 1 do
    if rows[at + 1] and rows[at + 1].step == step then at = at + 1 end
    list[step + 1] = rows[at].scale
  end
  history:close()
  return list, #rows
end

describe("a shadow", function()
  it("changes nothing", function()
    assert.equal((trace {}), (trace { shadow = { "deepspeed", "static",
      "dynamic:growth_interval=2" } }))
  end)

  it("equal to the current policy decides the same, and all its verdicts are read back from the " ..
    "history", function()
    local _, trainer, scales = trace {
      shadow = "deepspeed,dynamic:init_scale=2^22,growth_interval=5", run = folder .. "/run" }
    local equal = trainer.shadows.list[2]
    assert.equal(trainer.policy:scale(), equal.scale)
    assert.equal(trainer.skipped, equal.skipped)
    assert.equal(0, equal.most)
    local list, rows = verdicts(folder .. "/run", "dynamic:init_scale=2^22,growth_interval=5", 30)
    assert.same(scales, list)
    assert.is_true(rows < 30)
    assert.same(trainer.shadows.seen, (verdicts(folder .. "/run", "deepspeed", 30)))
  end)

  it("is summarized in the history and at the end", function()
    local _, trainer = trace { shadow = { "static:loss_scale=65536,skip_on_overflow=false",
      "static:loss_scale=2^40" }, run = folder .. "/run" }
    local list = helper.history(folder .. "/run", "shadows")
    assert.equal(2, #list)
    assert.equal("static:loss_scale=2^40", list[1].name)
    assert.equal(30, list[1].skipped)                    -- its own overflows, not the run's
    assert.equal(30, list[1].overflows)
    assert.is_true(trainer.skipped > 0 and trainer.skipped < 30)
    assert.equal(0, list[2].skipped)
    assert.equal(65536, list[2].scale)
    -- the run skips step 0 and this shadow does not, so the shadow's later verdicts are bounds
    assert.equal(30 - trainer.shadows.list[2].certainty.exact, list[1].bounds)
    local lines = trainer.shadows:lines()
    assert.matches(("would have skipped at least 0 of 30 steps at its own scale (the run " ..
      "skipped %d)"):format(trainer.skipped), lines[1], 1, true)
    assert.matches("at least %d+, about 30 of 30 steps .*; its verdicts are bounds from step " ..
      "%d+ on: its updates differ from the run's", lines[2])
    assert.matches("^shadow scales relative to the run's: static:loss_scale=65536," ..
      "skip_on_overflow=false .* %-%d+ skipped, static:loss_scale=2^40 x2^%d",
      trainer.shadows:text())
  end)

  it("that fails is reported and affects nothing else", function()
    local bad = { file = "bad.lua",
      source = "return { name = 'bad', options = { init_scale = 4 }, decide = function(s, r) if " ..
      "r.step > 3 then error('no more') end return 4 end }" }
    local traced, trainer = trace { shadow = { bad, "deepspeed" } }
    assert.equal((trace {}), traced)
    assert.equal(26, trainer.shadows.list[1].failed)
    assert.matches("it failed in 26 steps, most recently: bad.lua:1: no more",
      trainer.shadows:lines()[1], 1, true)
  end)

  it("that does not exist or is invalid is refused at once, by name", function()
    local function refused(shadow, text)
      helper.refuses(text, job, { shadow = shadow })
    end
    refused({ "dynamc" }, "shadow: there is no policy 'dynamc'; did you mean 'dynamic'?")
    refused(",", "shadow: expected policies separated by commas, got ','")
    refused("dynamic,,megatron", "separated by commas, got 'dynamic,,megatron'")
    refused("dynamic,megatron,dynamic", "shadow: 'dynamic' is listed twice")
    refused("dynamic:growth=2", "has no option 'growth'")
    refused(5, "expected shadow to be a list of policies or a text 'a,b', got 5")
    refused({ a = "dynamic" }, "expected shadow to be a list, such as { \"dynamic\", ")
  end)

  it("gets the statistics it needs", function()
    local source = [[return { name = "h", needs = { "amax", "hist", "tensors" },
      options = { init_scale = 4 },
      decide = function(s, r)
        assert(r.hist:sum(-160, 159) > 0)
        assert(r.tensors[1].amax)
        return 4
      end }]]
    local _, trainer = trace { shadow = { { source = source, file = "h.lua" } }, policy = "static" }
    assert.equal(0, trainer.shadows.list[1].failed)
  end)

  it("agrees with a live run at its own scale where the weights agree, and says where it is a " ..
    "bound", function()
    local function overflows(scale, shadow)
      local list, seen = {}, {}
      local trainer = job { steps = 1000, policy = "static:loss_scale=" .. scale, shadow = shadow,
        optimizer = "sgd", lr = 1e-30,                 -- weights that stay, so that all steps agree
        on_step = function(t, record)
          list[#list + 1] = record.overflow ~= 0
          for i, s in ipairs(t.shadows and t.shadows.list or {}) do
            seen[i] = seen[i] or { over = {}, bound = {} }
            table.insert(seen[i].over, s.over)
            table.insert(seen[i].bound, s.bound)
          end
        end }
      trainer:run()
      return list, seen, trainer
    end
    local shadow = { "static:loss_scale=2^14", "static:loss_scale=2^17", "static:loss_scale=2^20" }
    local _, seen, trainer = overflows("2^16", shadow)
    for i, exponent in ipairs { 14, 17, 20 } do
      local live = overflows("2^" .. exponent)
      local agree, happened, wrong = 0, 0, 0
      for k = 1, 1000 do
        local same = seen[i].over[k] == live[k]
        agree, happened = agree + (same and 1 or 0), happened + (live[k] and 1 or 0)
        wrong = wrong + (not same and not seen[i].bound[k] and 1 or 0)
      end
      assert.is_true(agree >= 990, ("2^%d: %d of 1000"):format(exponent, agree))
      assert.equal(0, wrong)                           -- exact verdicts are right
      if exponent == 17 then assert.is_true(happened > 100 and happened < 900) end
    end
    local lines = trainer.shadows:lines()
    assert.matches("would have skipped 0 of 1000 steps at its own scale", lines[1], 1, true)
    assert.not_matches("bound", lines[1])
    assert.matches("would have skipped at least 1, about %d+ of 1000 steps", lines[2])
    assert.matches("bounds from step 0 on: its scale is larger than the run's", lines[2], 1, true)
    assert.matches("at least 1, about 1000 of 1000", lines[3], 1, true)
  end)

  it("is exact while its updates are the run's, and equals a live run until then", function()
    local losses, skips = {}, {}
    local function keep(list) return function(_, r, v)
      table.insert(list, ("%.17g %s"):format(r.loss, v:what()))
    end end
    local function of(policy, list, shadow)
      local trainer = job { steps = 200, policy = policy, shadow = shadow, on_step = keep(list) }
      trainer:run()
      return trainer
    end
    -- the shadow grows later than the run, so its scale is never larger
    local slow = "dynamic:init_scale=2^16,growth_interval=60"
    local trainer = of("dynamic:init_scale=2^16,growth_interval=20", losses, slow)
    of(slow, skips)
    local certainty = trainer.shadows.list[1].certainty
    assert.is_true(certainty.exact >= 20 and certainty.exact < 200, certainty.exact)
    for i = 1, certainty.exact do assert.equal(losses[i], skips[i]) end
    assert.equal(certainty.exact, certainty.from)
  end)

  it("works with layers' own scales, accumulation and mode=lagged", function()
    for _, options in ipairs { { policy = "layerwise" }, { accumulate = 2 },
      { mode = "lagged" } } do
      options.shadow = { "layerwise", "dynamic:init_scale=2^22,growth_interval=5", "histogram" }
      local _, trainer = trace(options)
      for _, s in ipairs(trainer.shadows.list) do
        assert.equal(0, s.failed, s.why)
        assert.equal(30, s.certainty.exact + s.certainty.bounds)
      end
      local same = trainer.shadows.list[options.policy and 1 or 2]
      assert.equal(30, same.certainty.exact)             -- the run's own policy
      assert.equal(trainer.skipped, same.skipped)
    end
  end)

  it("continues from a checkpoint as if the run had not ended", function()
    local shadow = "deepspeed:scale_window=4,dynamic:init_scale=2^30,growth_interval=3"
    local _, whole = trace { shadow = shadow, steps = 40, run = folder .. "/whole" }
    trace { shadow = shadow, steps = 20, run = folder .. "/run" }
    local _, again = trace { shadow = shadow, steps = 40, run = folder .. "/run", resume = "auto" }
    assert.same(whole.shadows:lines(), again.shadows:lines())
    for _, name in ipairs { "deepspeed:scale_window=4",
      "dynamic:init_scale=2^30,growth_interval=3" } do
      assert.same((verdicts(folder .. "/whole", name, 40)), (verdicts(folder .. "/run", name, 40)))
    end
  end)

  it("that a resume adds counts its own steps, and the others keep their counts", function()
    local run, old = folder .. "/run", "deepspeed:scale_window=4"
    local _, first = trace { shadow = old, steps = 20, run = run }
    local _, again = trace { shadow = old .. ",static:loss_scale=2^40", steps = 24, run = run,
      resume = "auto" }
    assert.is_true(first.skipped > 0)
    local lines = again.shadows:lines()
    assert.matches((" of 24 steps at its own scale (the run skipped %d)"):format(again.skipped),
      lines[1], 1, true)
    assert.matches((" 4 of 4 steps at its own scale (the run skipped %d)"):format(again.skipped -
      first.skipped), lines[2], 1, true)
    assert.matches(" %+" .. 4 - (again.skipped - first.skipped) .. " skipped$",
      again.shadows:text())
  end)

  it("ends in the history where the run was resumed without it, and may begin again", function()
    local run, gone = folder .. "/run", "static:loss_scale=2^40"
    trace { shadow = "deepspeed," .. gone, steps = 20, run = run }
    trace { shadow = "deepspeed", steps = 40, run = run, resume = "auto" }
    local function at(h, step)
      local list = {}
      for i, row in ipairs(h:shadows_at(step)) do list[i] = row.name end
      return table.concat(list, " ")
    end
    local h = engine.history.open(run)
    assert.equal("deepspeed " .. gone, at(h, 19))
    assert.equal("deepspeed", at(h, 20))
    assert.equal("deepspeed", at(h, 39))
    assert.matches("The shadow " .. gone, h:why(19), 1, true)
    assert.not_matches("The shadow " .. gone, h:why(30), 1, true)
    local kept, ended = unpack(h:shadows())
    assert.same({ 40, 20, 20, 20 }, { kept.steps, ended.steps, ended.skipped, ended.overflows })
    assert.same({ 2 ^ 40, "skip" }, { ended.scale, ended.action })
    local html = require("engine.report.report").html(h, run)
    assert.matches(gone .. '</code></td><td class="n">20</td><td class="n">20 (100', html, 1, true)
    h:close()
    trace { shadow = gone, steps = 50, run = run, resume = "auto" }
    h = engine.history.open(run)
    assert.same({ "deepspeed", gone }, { at(h, 39), at(h, 40) })
    kept, ended = unpack(h:shadows())
    assert.same({ 40, 30, 30 }, { kept.steps, ended.steps, ended.skipped })
    h:close()
  end)
end)
