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
  engine.seed(5)
  local model = engine.nn.gpt { vocab = 256, context = 8, width = 16, heads = 2, layers = 1 }
  local o = { model = model, data = engine.data.text { text = TEXT, batch = 2, context = 8,
    seed = 9 },
    optimizer = engine.optim.adamw(model, { lr = 1e-3, precision = "fp16" }), steps = 30,
    log = "quiet", policy = "dynamic:init_scale=2^22,growth_interval=5" }
  for key, value in pairs(options) do o[key] = value end
  return engine.trainer(o)
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
  return table.concat(lines, "\n") .. tostring(C.eng_params_checksum(trainer.optimizer.params)),
    trainer, scales
end

-- The verdicts of a shadow at each step, from the rows that record changes.
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
    local history = engine.history.open(folder .. "/run")
    local list = history:shadows()
    history:close()
    assert.equal(2, #list)
    assert.equal("static:loss_scale=2^40", list[1].name)
    assert.equal(trainer.skipped, list[1].skipped)
    assert.equal(0, list[2].skipped)
    assert.equal(65536, list[2].scale)
    local lines = trainer.shadows:lines()
    assert.matches("would have skipped 0 of 30 steps %(the run skipped " .. trainer.skipped .. "%)",
      lines[1])
    assert.matches("its scale would have overflowed in " .. 30 - trainer.skipped .. " more",
      lines[2])
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
    assert.matches("it failed 26 times: bad.lua:1: no more", trainer.shadows:lines()[1], 1, true)
  end)

  it("that does not exist or is invalid is refused at once, by name", function()
    local function refused(shadow, text)
      local good, message = pcall(job, { shadow = shadow })
      assert.is_false(good)
      assert.matches(text, message, 1, true)
    end
    refused({ "dynamc" }, "shadow: there is no policy 'dynamc'; did you mean 'dynamic'?")
    refused("dynamic:growth=2", "has no option 'growth'")
    refused(5, "expected shadow to be a list of policies, got 5")
  end)

  it("asks for the statistics it needs", function()
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
end)
