-- The trainer: runs in every precision, the effects of the policies' verdicts, resumed runs that
-- equal the uninterrupted one bit for bit, and steps that allocate nothing after the first.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local helper = require "spec.helper"
local loop = require "engine.train.loop"
local machine = require "engine.base.machine"

local C = M_ffi.C
local TEXT = require("engine.report.lab").text(40000)
local RECIPES = { "fp32", "bf16", "fp16" }

-- A tiny GPT job.
local function job(options)
  return helper.job({ text = TEXT, steps = 10, clip = 1.0,
    schedule = engine.schedule.cosine { lr = options.lr or 1e-3, warmup = 3, total = 40 } },
    options)
end

-- Loss, scale and norm of each step of a job, as exact text; the checksum of the final weights; the
-- summary; and the trainer.
local function trace(options)
  local lines = {}
  options.on_step = function(_, record)
    lines[#lines + 1] = ("%.17g %.17g %.17g"):format(record.loss, record.scale, record.norm)
  end
  local trainer = job(options)
  local summary = trainer:run()
  local sum = tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0))
  return lines, sum, summary, trainer
end

local folder
describe("the trainer", function()
  before_each(function() folder = helper.folder() end)
  after_each(function()
    C.eng_memory_limit(0)
    helper.remove(folder)
  end)

  for _, recipe in ipairs(RECIPES) do
    it("lowers the loss in " .. recipe, function()
      local first, last
      local summary = job { precision = recipe, steps = 40, lr = 3e-3, on_step = function(_, record)
        first = first or record.loss
        last = record.loss
      end }:run()
      assert.near(math.log(256), first, 0.1)
      assert.is_true(last < first - 1, ("loss went from %g to %g"):format(first, last))
      assert.equal(40, summary.steps)
    end)
  end

  it("fp16 and bf16 follow fp32", function()
    local losses = {}
    for _, recipe in ipairs(RECIPES) do
      job { precision = recipe, steps = 40, lr = 3e-3,
        on_step = function(_, record) losses[recipe] = record.loss end }:run()
    end
    assert.near(1, losses.fp16 / losses.fp32, 0.01)
    assert.near(1, losses.bf16 / losses.fp32, 0.02)
  end)

  it("micro-batches give the gradient of the whole batch", function()
    engine.seed(5)
    local norms = {}
    for k, accumulate in ipairs { 1, 4 } do
      helper.job { layers = 1, data = engine.data.text { text = TEXT, batch = 8 / accumulate,
        context = 16, shuffle = false }, optimizer = "sgd", lr = 0.1, steps = 3,
        accumulate = accumulate,
        on_step = function(_, record) norms[k] = { record.loss, record.norm } end }:run()
    end
    assert.near(norms[1][1], norms[2][1], 1e-5)
    assert.near(norms[1][2], norms[2][2], 1e-4)
  end)

  -- ---------------------------------------------------------------- verdicts

  it("an overflow skips the update, changes no weight and halves the scale", function()
    local seen = {}
    local trainer
    trainer = job { precision = "fp16", steps = 6, policy_options = { init_scale = 2 ^ 40 },
      on_step = function(_, record, verdict)
      seen[#seen + 1] = { overflow = record.overflow, action = verdict.action,
        scale = verdict.scale,
        sum = tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0)),
        bad = record.first_bad }
    end }
    local before = tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0))
    local summary = trainer:run()
    for i, s in ipairs(seen) do
      assert.equal(1, s.overflow)
      assert.equal(C.ENG_ACTION_SKIP, s.action)
      assert.equal(2 ^ (40 - i), s.scale)
      assert.equal(before, s.sum)
      assert.is_true(s.bad >= 0)
    end
    assert.equal(6, summary.skipped)
    assert.equal(0, summary.updates)
  end)

  it("the schedule follows updates, not attempts", function()
    local rates = {}
    local trainer = job { precision = "fp16", steps = 4, policy_options = { init_scale = 2 ^ 40 },
      on_step = function(_, record) rates[#rates + 1] = record.lr end }
    trainer:run()
    for i = 2, #rates do assert.equal(rates[1], rates[i]) end
  end)

  it("retry repeats the batch and the dropout mask", function()
    local source = [[return { name = "again", init = function() return { scale = 1, n = 0 } end,
      decide = function(state)
        state.n = state.n + 1
        return { scale = 1, action = state.n % 2 == 1 and "retry" or "step" }
      end }]]
    local losses = {}
    local summary = job { steps = 6, dropout = 0.2,
      policy = { source = source, file = "again.lua" },
      on_step = function(_, record) losses[#losses + 1] = record.loss end }:run()
    assert.equal(losses[1], losses[2])
    assert.equal(losses[3], losses[4])
    assert.are_not.equal(losses[2], losses[3])
    assert.equal(3, summary.updates)
    assert.equal(3, summary.retries)
  end)

  it("a reference backward and a step run again for the trap leave running statistics alone",
    function()
      local nn, x = engine.nn, engine.randn(8, 2, 4):keep()
      local function statistics(needs, trap)
        engine.seed(3)
        local model, at, references = nn.sequential { nn.linear(4, 4), nn.batch_norm(2) }, 0, 0
        engine.trainer { model = model, steps = 4, log = "quiet", attach = false, ref_every = 1,
          precision = "fp16", trap = trap, restart_data = true,
          policy = { file = "sees.lua", source = ([[return { name = "sees", needs = { %s },
            init = function() return { scale = 64 } end,
            decide = function() return { scale = 64 } end }]]):format(needs) },
          optimizer = engine.optim.sgd(model, { lr = 0.1 }),
          data = { next = function()
            at = at + 1
            return { x = x, tokens = 8, factor = at == 2 and 1e9 or 1 }
          end },
          on_step = function(_, r) references = references + (r.norm_ref > 0 and 1 or 0) end,
          loss = function(m, b) return m(b.x):to("f32"):square():mean() * b.factor end }:run()
        return { model[2].running_mean:totable(), model[2].running_var:totable(),
          model[2].num_batches_tracked:item() }, references
      end
      local plain = statistics ""
      assert.equal(4, plain[3])
      assert.same(plain, (statistics("", "overflow")))
      local with_references, references = statistics '"norm_ref"'
      assert.same(plain, with_references)
      assert.equal(4, references)
    end)

  it("running statistics count a retried step once, and not at all in a rescue checkpoint",
    function()
      local nn = engine.nn
      -- Makes updates whose batches differ; a retry repeats each batch once. The loss function of
      -- step `fails` raises after the forward pass. Returns the running means and the step that
      -- they are of, from the last checkpoint.
      local function means(o)
        local old
        engine.seed(3)
        local model, at, batch = nn.sequential { nn.linear(4, 4), nn.batch_norm(4) }, 0, 0
        local run, x = folder .. "/" .. o.run, engine.randn(8, 4):keep()
        local trainer = engine.trainer { model = model, steps = o.steps, log = "quiet",
          attach = false, run = run, mode = o.mode,
          policy = { file = "again.lua", source = ([[return { name = "again",
            init = function() return { scale = 1, again = false } end,
            decide = function(state)
              state.again = %s and not state.again
              return { scale = 1, action = state.again and "retry" or "step" }
            end }]]):format(tostring(o.retries or false)) },
          optimizer = engine.optim.sgd(model, { lr = 0.1 }),
          data = { next = function()
            batch = batch + 1
            return { x = x, tokens = 8, factor = batch }
          end, state = function() return { batch = batch } end,
          restore = function(_, state) batch = state.batch end },
          loss = function(m, b)
            at = at + 1
            if old then old:free() end
            local loss = m(b.x * b.factor):square():mean()
            if o.replaced then                 -- the buffer is a new tensor after every pass
              old, m[2].running_mean = m[2].running_mean, (m[2].running_mean * 1):detach():keep()
            end
            if at == o.fails then error("broken batch", 0) end
            return loss
          end }
        local good, why = pcall(trainer.run, trainer)
        assert.equal(o.fails == nil, good)
        if o.fails then assert.matches("broken batch", why, 1, true) end
        local c = assert(require("engine.run.checkpoint").load(run .. "/checkpoints"))
        return { c.step, c.model["2.running_mean"]:totable(),
          c.model["2.num_batches_tracked"]:item() }
      end
      for _, mode in ipairs { "sync", "lagged" } do
        assert.same(means { run = "whole-" .. mode, steps = 3, mode = mode },
          means { run = "failed-" .. mode, steps = 6, mode = mode, fails = 4 })
      end
      local plain, again = means { run = "plain", steps = 5 },
        means { run = "again", steps = 10, retries = true }
      assert.same({ plain[2], plain[3] }, { again[2], again[3] })
      local replaced = means { run = "replaced", steps = 10, retries = true, replaced = true }
      assert.same({ plain[2], plain[3] }, { replaced[2], replaced[3] })
    end)

  it("stop ends the run with the policy's reason", function()
    local source = [[return { name = "enough", init = function() return { scale = 1 } end,
      decide = function(_, record)
        return { scale = 1, action = record.step == 2 and "stop" or "step", reason = "seen enough" }
      end }]]
    local summary = job { policy = { source = source, file = "enough.lua" } }:run()
    assert.equal(3, summary.steps)
    assert.equal("seen enough", summary.stopped)
  end)

  it("a policy that raises does not end the run", function()
    local source = 'return { name = "bad", init = function() return { scale = 1 } end, ' ..
      [[decide = function(_, r) if r.step > 1 then error("oops") end return 1 end }]]
    local summary = job { policy = { source = source, file = "bad.lua" } }:run()
    assert.equal(10, summary.updates)
    summary = job { policy = { source = source, file = "bad.lua" }, on_policy_error = "stop" }:run()
    assert.equal(3, summary.steps)
    assert.matches("bad.lua:1: oops", summary.stopped, 1, true)
  end)

  it("a policy that never decides ends the run, and the last line counts its failures", function()
    local source = 'return { name = "bad", init = function() return { scale = 1 } end, ' ..
      [[decide = function(_, r) if r.step ~= %d then error("oops") end return 1 end }]]
    local function ended(spared, steps)
      local trainer = job { steps = steps,
        policy = { source = source:format(spared), file = "bad.lua" } }
      local summary = trainer:run()
      return summary, loop.summary_text(trainer, summary):match("[^\n]*$")
    end
    local summary, line = ended(-1, 30)
    assert.equal(20, summary.steps)
    assert.matches("the policy failed in each of its first 20 steps: bad.lua:1: oops",
      summary.stopped, 1, true)
    assert.equal("stopped, the policy failed in 20 of 20 steps", line)
    summary, line = ended(3, 30)
    assert.is_nil(summary.stopped)
    assert.equal("finished, the policy failed in 29 of 30 steps", line)
    summary, line = ended(-1, 10)
    assert.is_nil(summary.stopped)
    assert.equal("finished, the policy failed in 10 of 10 steps", line)
  end)

  it("the live line shows the scale after a swap from a static policy", function()
    local shown = {}
    job { steps = 4, on_step = function(t)
      function t.progress.update(_, row) shown[row.step] = not row.unscaled end
      if t.steps_done == 2 then assert(t.policy:swap "dynamic") end
    end }:run()
    assert.same({ [2] = false, [3] = true, [4] = true }, shown)
  end)

  it("a run without an update says why", function()
    local function last_line(options)
      local trainer = job(options)
      return loop.summary_text(trainer, trainer:run()):match("[^\n]*$")
    end
    assert.equal("no update was made: 4 of 4 steps overflowed",
      last_line { steps = 4, precision = "fp16", policy = "static:loss_scale=2^60" })
    local source = 'return { name = "same", init = function() return { scale = 1 } end, ' ..
      'decide = function() return { scale = 1, action = "%s" } end }'
    assert.equal("no update was made: 4 of 4 steps were retried",
      last_line { steps = 4, policy = { source = source:format "retry" } })
    assert.equal("no update was made: policy same skipped every step",
      last_line { steps = 4, policy = { source = source:format "skip" } })
  end)

  it("clips by norm and by value", function()
    for _, clip in ipairs { { clip = 1e-6 }, { clip_value = 1e-9 } } do
      local trainer = job { optimizer = "sgd", clip = clip.clip or 0, clip_value = clip.clip_value,
        steps = 2 }
      local before = trainer.model.wte.weight:keep()
      trainer:run()
      local moved = engine.scope(function() return (trainer.model.wte.weight -
        before):norm():item() end)
      assert.is_true(moved > 0 and moved < 1e-6, "moved by " .. moved)
    end
  end)

  -- ---------------------------------------------------------------- resuming

  for _, recipe in ipairs(RECIPES) do
    it("resumed after any step, a run in " .. recipe .. " is the uninterrupted one bit for bit",
      function()
      -- a scale that overflows at first, so that the policy's counters matter
      local options = { precision = recipe, dropout = 0.1, steps = 8, policy = "dynamic",
        policy_options = { init_scale = 2 ^ 26, growth_interval = 2 } }
      local function with(extra)
        local o = {}
        for key, value in pairs(options) do o[key] = value end
        for key, value in pairs(extra) do o[key] = value end
        return o
      end
      local whole, checksum = trace(with {})
      for _, at in ipairs { 1, 4, 7 } do
        local run = folder .. "/run" .. at
        local head = trace(with { steps = at, run = run })
        local tail, sum = trace(with { run = run, resume = "auto", seed = 77 })
        for _, line in ipairs(tail) do head[#head + 1] = line end
        assert.same(whole, head)
        assert.equal(checksum, sum)
      end
    end)
  end

  it("killed at random moments and resumed, a run has the losses of an uninterrupted one",
    function()
    local script = helper.write(folder .. "/job.lua", ([[
      local engine = require "engine"
      engine.seed(3)
      local model = engine.nn.gpt { vocab = 256, context = 16, width = 32, heads = 2, layers = 2,
        dropout = 0.1 }
      local out = io.open(arg[1], "a")
      engine.trainer { model = model,
        data = engine.data.text { text = require("engine.report.lab").text(40000), batch = 4,
        context = 16 },
        optimizer = engine.optim.adamw(model, { lr = 1e-3, precision = "fp16" }), steps = %d,
          run = arg[2], resume = "auto", checkpoint_every = 3,
        policy_options = { init_scale = 2 ^ 22, growth_interval = 4 }, log = "quiet",
        on_step = function(t, record)
          out:write(("%%d %%.17g %%.17g\n"):format(t.steps_done, record.loss,
            record.scale)) out:flush()
        end }:run()
      out:write("end\n") out:close()]]):format(helper.sanitized and 30 or 120))
    local function losses(path)
      local by_step, ended = {}, false
      for line in (helper.read(path) or ""):gmatch("[^\n]+") do
        local step, rest = line:match("^(%d+) (.*)$")
        if line == "end" then ended = true
        elseif step then
          -- a step that was computed twice must give the same result
          assert(by_step[tonumber(step)] == nil or by_step[tonumber(step)] == rest,
            "step " .. step .. " differs after a resume")
          by_step[tonumber(step)] = rest
        end
      end
      return by_step, ended
    end
    local began = C.eng_clock()
    helper.run { script, folder .. "/whole.txt", folder .. "/whole" }
    local seconds = C.eng_clock() - began     -- the time of a whole run on this machine
    local whole, whole_ended = losses(folder .. "/whole.txt")
    assert.is_true(whole_ended)
    local killed, hurry = 0, 1
    math.randomseed(11)
    for _ = 1, 40 do
      local delay = hurry * seconds * (0.35 + 0.5 * math.random())
      local result = helper.shell(("timeout -s KILL %.3f %s %s %s %s"):format(delay,
        helper.quote(helper.engine),
        script, folder .. "/killed.txt", folder .. "/killed"))
      local _, ended = losses(folder .. "/killed.txt")
      if ended and killed > 0 then break end
      if ended then   -- the run finished before the kill: try again, and kill earlier
        helper.remove(folder .. "/killed")
        helper.remove(folder .. "/killed.txt")
        hurry = hurry / 2
      else
        assert.equal(137, result.code, result.err)
        killed = killed + 1
      end
    end
    helper.run { script, folder .. "/killed.txt", folder .. "/killed" }
    local pieces, ended = losses(folder .. "/killed.txt")
    assert.is_true(ended)
    assert.same(whole, pieces)
    assert.is_true(killed > 0, "the job was never killed")
  end)

  it("an existing run is not overwritten", function()
    local run = folder .. "/a"
    job { run = run, steps = 2 }:run()
    local summary = job { run = run, steps = 2 }:run()
    assert.equal(run .. "-2", summary.path)
    assert.equal(2, #engine.history.open(run):steps())
    local third = helper.run { "examples/gpt.lua", "steps=1", "layers=1", "width=32", "context=16",
      "sample=0", "log=quiet", "run=" .. run }
    assert.same({ code = 0, out = "", err = ("%s already exists: this run writes to %s-3 " ..
      "(resume=auto continues the old one)\n"):format(run, run) }, third)
  end)

  it("an existing run is not overwritten by one that resumes from another run", function()
    local a, b = folder .. "/a", folder .. "/b"
    job { run = a, steps = 6, checkpoint_every = 2 }:run()
    job { run = b, steps = 2 }:run()
    for _, from in ipairs { b, b .. "/checkpoints", b .. "/checkpoints/step-00000002" } do
      local summary = job { run = a, resume = from, steps = 3 }:run()
      assert.matches("/a%-%d$", summary.path)
      assert.equal(3, summary.steps)
      assert.equal(6, #engine.history.open(a):steps())
      assert.same({ 2, 4, 6 }, engine.checkpoint.steps(a .. "/checkpoints"))
    end
    -- a path that leads to this run, or to one of its checkpoints, continues the run
    helper.shell(("ln -s %s %s/link"):format(helper.quote(a), helper.quote(folder)))
    for i, from in ipairs { a .. "/checkpoints/step-00000004/", a .. "/checkpoints",
      folder .. "/./a/", folder .. "/link" } do
      assert.equal(a, job { run = a, resume = from, steps = 4 + i }:run().path)
      assert.equal(4 + i, #engine.history.open(a):steps())
      assert.same(4 + i, engine.checkpoint.steps(a .. "/checkpoints")[3])
    end
  end)

  it("an existing run without a history is not overwritten", function()
    local run = folder .. "/a"
    job { run = run, steps = 2, history = false }:run()
    assert.equal(run .. "-2", job { run = run, steps = 2, history = false }:run().path)
  end)

  it("stops before a loss scale outside float32's range touches the weights", function()
    local function asks(verdict)
      return engine.policy.load { file = "tiny.lua",
        source = ("return { options = { init_scale = 4 }, decide = function(s, r) "
        .. "return r.step == 1 and %s or 4 end }"):format(verdict) }
    end
    local group = job({}).groups.groups[1]
    for _, verdict in ipairs { "1e-60", "5e-324", "1e39",
      ("{ scale = 4, scales = { [%q] = 1e-60 } }"):format(group) } do
      local trainer = job { steps = 5, policy = asks(verdict), run = folder .. "/tiny",
        resume = false }
      local summary = trainer:run()
      assert.matches("expected one of the normal f32 numbers, from", summary.stopped, 1, true)
      assert.equal(1, summary.updates)
    end
    assert.has_error(function() job({ steps = 5, policy = "static",
      policy_options = { loss_scale = 1e-60 } }):run() end)
    -- The same holds for a run resumed from a checkpoint with a policy whose migrated state sets
    -- such a scale.
    local run, shrinks = folder .. "/resumed", folder .. "/shrinks.lua"
    helper.write(shrinks, "return { options = { init_scale = 4 }, migrate = function(old) " ..
      "return { scale = 1e-60 } end, decide = function(s) return s.scale end }")
    job({ run = run, steps = 2 }):run()
    local resumed = job { run = run, steps = 4, resume = "auto", policy = shrinks }
    local good, message = pcall(resumed.run, resumed)
    if good then message = message.stopped end
    assert.matches("loss scale of 1e%-60; expected one of the normal f32 numbers, from", message)
    assert.equal(2, resumed.updates)
  end)

  it("reports once that the loss itself is inf or nan", function()
    local trainer, told = job {}, {}
    for i, loss in ipairs { 1, 0 / 0, 2, 1 / 0 } do
      for _ = 1, i == 2 and 9 or 15 do
        told[#told + 1] = trainer:loss_note { loss = loss, step = 7 }
      end
    end
    assert.equal(1, #told)
    assert.matches("the loss has been inf for 10 steps", told[1], 1, true)
  end)

  it("a run that failed before its first step leaves its name free", function()
    local run = folder .. "/a"
    assert.has_error(function() job { run = run, steps = 2,
      loss = function() error("at once") end }:run() end)
    assert.equal(run, job { run = run, steps = 2 }:run().path)
    assert.equal(2, #engine.history.open(run):steps())
  end)

  it("a checkpoint of more ranks is refused if the mode has no room for their batches", function()
    for accumulate, case in pairs { [40] = { mode = "lagged", "at most 64, got 80" },
      [1] = { graph = true, "graph=true: a captured step has one batch" } } do
      local run = folder .. "/run" .. accumulate
      job { run = run, steps = 1, accumulate = accumulate, mode = case.mode }:run()
      local c = engine.checkpoint.load(run .. "/checkpoints")
      c.state.ranks = 2
      engine.checkpoint.save(run .. "/checkpoints", 1, { model = c.model, optimizer = c.optimizer,
        state = c.state })
      local device = machine.device
      machine.device = function() return "a card" end      -- graph = true is refused on the CPU
      local good, message = pcall(job, { run = run, resume = "auto", accumulate = accumulate,
        mode = case.mode, graph = case.graph })
      machine.device = device
      assert.is_false(good)
      assert.matches(("resume: the checkpoint's run had %d batches in a step, which needs " ..
        "accumulate=%d on 1 rank; but "):format(2 * accumulate, 2 * accumulate), message, 1, true)
      assert.matches(case[1], message, 1, true)
    end
  end)

  it("a recipe that changes at a resume or by set_precision is an event of the history", function()
    local run, changes = folder .. "/a", {}
    local function to(steps, recipe, options)
      job(arguments.merged({ run = run, steps = steps, precision = recipe, resume = "auto" },
        options)):run()
    end
    to(2, { name = "mine", base = "fp16" })
    to(3, { name = "mine", base = "bf16" })
    to(4, { name = "mine", base = "bf16" })
    to(6, "bf16", { on_step = function(t)
      if t.steps_done == 5 then t.optimizer:set_precision "fp16" end
    end })
    local h = engine.history.open(run)
    for i, event in ipairs(h:events "precision") do
      changes[i] = event.step .. " " .. event.text:gsub(" %(%x+%)", "")
    end
    assert.same({ "2 the recipe changes from mine to mine",
      "4 the recipe changes from mine to bf16", "5 the recipe changes from bf16 to fp16" }, changes)
    assert.matches("Event precision: the recipe changes from mine %(%x+%) to bf16 %(%x+%)",
      tostring(h:why(4)))
    local formats = {}
    for step = 0, 5 do formats[step + 1] = h:parameters(step)[1].gradient end
    assert.equal("f16 f16 f32 f32 f32 f16", table.concat(formats, " "))
    assert.equal("f16", h:parameters()[1].gradient)
    assert.matches("^f16 %(f32 in %d+ of %d+ tensors%), from step 2 on f32, from step 5 on f16",
      (tostring(h:heatmap()):gsub("\n", " ")))
    -- at a loss scale of 2^40, the steps with f16 gradients overflow
    local r = engine.replay.run(engine.replay.trace(run), "static", { loss_scale = 2 ^ 40 })
    assert.equal("skip skip step step step skip", table.concat(r.actions, " "))
  end)

  it("after set_precision goes on like a run that is resumed with the new recipe", function()
    local run = folder .. "/a"
    for _, change in ipairs { { "bf16", "fp16" }, { "fp32", "bf16" } } do
      local options = { policy = "static", precision = change[1], steps = 3, run = run }
      job(options):run()
      options.steps, options.precision, options.resume = 6, change[2], "auto"
      local later, sum = trace(options)
      local live = {}
      local t = job { policy = "static", precision = change[1], steps = 6, log = "quiet",
        on_step = function(t, record)
          if t.steps_done == 3 then t.optimizer:set_precision(change[2]) end
          live[#live + 1] = ("%.17g %.17g %.17g"):format(record.loss, record.scale, record.norm)
        end }
      t:run()
      assert.same(later, { unpack(live, 4) })
      assert.equal(sum, tostring(C.eng_params_checksum_of(t.optimizer.params, nil, 0)))
      assert.equal(change[2], t.precision.name)
      helper.remove(run)
    end
    for _, change in ipairs { { "bf16", "fp8_current" }, { "fp8_current", "fp32" } } do
      local t = job { steps = 4, precision = change[1],
        on_step = function(t) t.optimizer:set_precision(change[2]) end }
      local _, why = pcall(t.run, t)
      assert.matches(("^set_precision: the recipe changes from %s %%(%%x+%%) to %s %%(%%x+%%), but "
        .. "a run cannot change its FP8 layers; hint: resume"):format(unpack(change)), why)
    end
    local t = job { steps = 2, precision = "fp8_current",
      on_step = function(t) t.optimizer:set_precision "fp8_current" end }
    assert.equal(2, t:run().steps)                         -- the same recipe changes nothing
  end)

  it("a run resumed with another policy hands it the state of the old one", function()
    local run, mine = folder .. "/a", folder .. "/mine.lua"
    helper.write(mine, [[return { options = { init_scale = 1 },
      migrate = function(old, name) return { scale = old.scale / 4, from = name } end,
      decide = function(state) return { scale = state.scale, reason = state.from } end }]])
    local first = job { run = run, steps = 3, precision = "fp16" }
    first:run()
    local scale = first.policy:scale()
    local trainer = job { run = run, steps = 5, precision = "fp16", resume = "auto",
      policy = "deepspeed" }
    assert.equal(scale, trainer.policy:scale())
    trainer = job { run = run, steps = 5, precision = "fp16", resume = "auto", policy = mine }
    assert.matches("it takes over at the scale 2^" .. math.log(scale / 4) / math.log(2),
      table.concat(trainer.run_files.notes, "\n"), 1, true)
    trainer:run()
    assert.equal("dynamic", engine.history.open(run):last(1)[1].reason)
    trainer = job { run = run, steps = 6, precision = "fp16", resume = "auto" }
    assert.equal(scale / 4, trainer.policy:scale())
    trainer = job { run = run, steps = 5, precision = "fp16", resume = "auto", policy = mine }
    assert.matches("nothing to do: 5 of 5 steps", trainer:summary_text(trainer:run()), 1, true)
    trainer = job { run = run, steps = 4, precision = "fp16", resume = "auto", policy = mine }
    assert.matches("nothing to do: steps=4 asks for fewer steps than the 5 that the run already " ..
      "has", trainer:summary_text(trainer:run()), 1, true)
    -- a resume that makes no step leaves the facts of the run as they were
    local function facts()
      local meta = engine.history.open(run):meta()
      return meta.policy .. " " .. meta.precision
    end
    local before = facts()
    job({ run = run, steps = 5, precision = "bf16", resume = "auto", policy = "static" }):run()
    assert.equal(before, facts())
    job({ run = run, steps = 6, precision = "bf16", resume = "auto", policy = "static" }):run()
    assert.equal("static bf16", facts())
    -- a note names a recipe that differs from the checkpoint's recipe of the same name; another
    -- note gives the reason why a policy's migrate failed
    run = folder .. "/mine"
    job({ run = run, steps = 2, precision = { name = "mine", base = "fp16" } }):run()
    trainer = job { run = run, steps = 3, precision = { name = "mine", base = "bf16" },
      resume = "auto" }
    assert.matches("the recipe of precision mine is not the same", table.concat(
      trainer.run_files.notes, "\n"), 1, true)
    helper.write(mine, [[return { options = { init_scale = 1 }, decide = function() return 1 end,
      migrate = function() error("not from there") end }]])
    trainer = job { run = run, steps = 3, precision = { name = "mine", base = "fp16" },
      resume = "auto", policy = mine }
    assert.matches("it starts fresh: .*mine.lua:2: not from there", table.concat(
      trainer.run_files.notes, "\n"))
  end)

  it("a resume says whether it reads a policy's file or the shipped policy of its name", function()
    local text = [[return { name = "dynamic", options = { init_scale = 1 },
      init = function(o) return { scale = o.init_scale } end,
      decide = function(state) state.scale = state.scale * 2 return state.scale end }]]
    local own, run = helper.write(folder .. "/dynamic.lua", text), folder .. "/own"
    local next_policy = helper.write(folder .. "/next.lua", [[return { options = { init_scale = 1 },
      migrate = function(old) return { scale = old.scale } end,
      decide = function(state) return state.scale end }]])
    local function notes(policy)
      local trainer = job { run = run, steps = 4, precision = "fp16", resume = "auto",
        policy = policy }
      return table.concat(trainer.run_files.notes, "\n")
    end
    job({ run = run, steps = 3, precision = "fp16", policy = own }):run()
    assert.matches("the policy is next now and was dynamic (" .. own .. "); it takes over at the "
      .. "scale 2^3", notes(next_policy), 1, true)
    assert.matches("the policy dynamic is from policies/dynamic.lua now and was from " .. own ..
      "; the policy ", notes "dynamic", 1, true)
    helper.write(own, "-- edited\n" .. text)
    assert.matches("was dynamic (" .. own .. ", which has changed since); it takes over",
      notes(next_policy), 1, true)
    assert.equal(0, C.eng_file_remove(own))
    assert.matches("was dynamic (" .. own .. "; its state was read by policies/dynamic.lua); it",
      notes(next_policy), 1, true)
    helper.write(own, (text:gsub('"dynamic"', '"own"')))
    run = folder .. "/gone"
    job({ run = run, steps = 3, precision = "fp16", policy = own }):run()
    assert.equal(0, C.eng_file_remove(own))
    assert.matches("the policy is next now and was own; it starts fresh: there is no file " ..
      own .. ", which the checkpoint names; hint: to take over the saved state, restore the file",
      notes(next_policy), 1, true)
  end)

  it("a corrupt checkpoint is skipped with a message, and the one before it is used", function()
    local run = folder .. "/a"
    local _, _, summary = trace { run = run, steps = 6, checkpoint_every = 2 }
    assert.equal(run, summary.path)
    local newest = run .. "/checkpoints/step-00000006/model.safetensors"
    local bytes = helper.read(newest)
    helper.write(newest, bytes:sub(1, -2) .. string.char((bytes:byte(-1) + 1) % 256))
    local trainer = job { run = run, steps = 8, resume = "auto" }
    assert.equal(4, trainer.steps_done)
    assert.matches("step%-00000006", table.concat(trainer.run_files.warnings, "\n"))
  end)

  it("the history holds every step, the overflows with their first tensor, and the policy",
    function()
    job { precision = "fp16", run = folder .. "/a", steps = 12,
      policy_options = { init_scale = 2 ^ 28 } }:run()
    local h = engine.history.open(folder .. "/a")
    assert.equal(12, #h:steps())
    assert.is_true(#h:overflows() > 0)
    local event = h:events("overflow")[1]
    assert.matches("first in %w+", event.text)
    assert.equal("dynamic", h:policies()[1].name)
    assert.matches("overflow", tostring(h:why(0)))
  end)

  -- ---------------------------------------------------------------- memory

  for _, recipe in ipairs(RECIPES) do
    it("allocates nothing after the first step in " .. recipe, function()
      local counts = {}
      job { precision = recipe, steps = 30, dropout = 0.1, on_step = function(t)
        local n = 0
        for _, row in ipairs(engine.memory()) do n = n + row.allocations end
        counts[t.steps_done] = n
      end }:run()
      for i = 2, 30 do assert.equal(counts[1], counts[i], "at step " .. i) end
    end)
  end

  it("out of memory names the arenas and what to change, and the next run works", function()
    local trainer = job { steps = 3 }
    C.eng_memory_limit(engine.memory().parameters.reserved + engine.memory().optimizer.reserved +
      engine.memory().kept.reserved + 2 ^ 17)
    local reserved = engine.memory().step.reserved
    local good, message = pcall(trainer.run, trainer)
    C.eng_memory_limit(0)
    if reserved == 0 then
      assert.is_false(good)
      assert.matches("out of memory", message)
    end
    assert.equal(3, job { steps = 3 }:run().steps)
  end)

  -- ---------------------------------------------------------------- errors

  it("an error names the module path of the failing operation", function()
    local model = engine.nn.gpt { vocab = 64, context = 8, width = 16, heads = 2, layers = 2 }
    model.blocks[2].mlp.down = engine.nn.linear(7, 16)
    local _, message = pcall(model, engine.zeros(1, 8, "i32"))
    assert.matches("In blocks.2.mlp.down: linear: expected x [.. x K] and a weight [N x K], got " ..
      "f32 [1 x 8 x 64] and f32 [16 x 7]", message, 1, true)
    engine.end_step()
  end)

  it("refuses unknown options, with the nearest name", function()
    assert.error_matches(function() job { clipp = 1 } end, "unknown option 'clipp'.*'clip'")
    assert.error_matches(function() job { precision = "fp61" } end, "did you mean 'fp16'")
    assert.error_matches(function() job { steps = 0 } end, "expected steps to be a whole number")
    assert.error_matches(function() job { accumulate = 1e9 } end, "expected accumulate to be")
    assert.error_matches(function() job { config = 5 } end, "expected config to be a table, got 5")
    assert.error_matches(function() job { evaluate = { data = {}, every = 1 } } end,
      "expected evaluate to be { data = a loader")
    assert.error_matches(function() job { schedule = function() end }:step() end,
      "expected the schedule to return a learning rate, a number, got nothing")
    engine.end_step()
    assert.error_matches(function() job { steps = 1e300 } end,
      "expected steps to be a whole number")
    assert.error_matches(function() job { policy = { name = "x", decide = function() end } } end,
      'got a table; hint: save the policy in a file: policy = "mine.lua"')
    assert.error_matches(function() job { policy = "dynamik" } end, "dynamic")
    assert.error_matches(function() job { resume = "auto" } end, "run=NAME")
    assert.error_matches(function() job { resume = folder .. "/none" } end,
      "there is no run or checkpoint")
    local path = folder .. "/a\0b/c"
    assert.error_matches(function() job { run = path } end, "expected run to be a name or a path")
    assert.error_matches(function() job { resume = path } end,
      "expected resume to be 'auto' %(or true%), a path")
    assert.error_matches(function() job { tensorboard = path } end, "expected tensorboard to be")
    assert.error_matches(function() job { run = ".." } end, "is that of another folder: 'runs/..'")
    assert.same({}, require("engine.base.file").names(folder))
  end)

  it("refuses graph = true on the CPU before the first step", function()
    assert.error_matches(function() job { graph = true } end,
      "graph=true: the CPU cannot capture steps; hint: device=cuda, or graph=false")
  end)

  it("refuses a batch that is not a table, in every mode", function()
    local data = { next = function() return "text" end }
    for _, extra in ipairs { {}, { mode = "lagged" }, { accumulate = 2 } } do
      extra.data = data
      local trainer = job(extra)
      assert.error_matches(function() trainer:run() end, "expected a batch to be a table .* 'text'")
    end
    assert.error_matches(function() job {}:evaluate_on(data, 1) end,
      "expected a batch to be a table .* 'text'")
  end)

  it("refuses a layer that the first forward pass adds, which no optimizer trains", function()
    local Late = engine.nn.class "Late"
    function Late:init() self.first = engine.nn.linear(4, 4) end
    function Late:forward(x)
      self.late = rawget(self, "late") or engine.nn.linear(4, 1)
      return self.late(self.first(x))
    end
    local function steps(model)
      local batch = { x = engine.ones { 2, 4, keep = true }, y = engine.ones { 2, 1, keep = true } }
      local before = model.late and model.late.weight:totable()
      engine.trainer { model = model, steps = 2, log = "quiet",
        data = { next = function() return batch end },
        loss = function(net, b) return engine.mse(net(b.x), b.y) end,
        optimizer = engine.optim.sgd(model, { lr = 0.1 }) }:run()
      return before, model.late.weight:totable()
    end
    local good, message = pcall(steps, Late())
    assert.is_false(good)
    assert.matches("the first forward pass added the parameter 'late.weight', which the " ..
      "optimizer does not train; hint: make it in init, or call the model once", message, 1, true)
    local Replaced = engine.nn.class "Replaced"
    function Replaced:init() self.late = engine.nn.linear(4, 1) end
    function Replaced:forward(x)
      if not rawget(self, "done") then self.late, self.done = engine.nn.linear(4, 1), true end
      return self.late(x)
    end
    good, message = pcall(steps, Replaced())
    assert.is_false(good)
    assert.matches("added the parameter 'late.weight'", message, 1, true)
    local model = Late()
    engine.scope(function() model(engine.ones(1, 4)) end)
    local before, after = steps(model)
    assert.are_not.same(before, after)
    function Late:forward(x)             -- activations that a pass stores are no parameters
      self.hidden = self.first(x)
      return self.late(self.hidden)
    end
    assert.are_not.same(after, select(2, steps(model)))
  end)

  it("an error in the loss names its function, and fields that a batch lacks", function()
    local function fails(loss)
      return select(2, pcall(function() job { loss = loss }:run() end)):match("^[^\n]*")
    end
    assert.matches("expected a tensor as .*, got nothing; .*the fields of the batch are tokens " ..
      "x y$",
      fails(function(model, batch) return model:loss(batch.inputs, batch.y) end))
    assert.matches("mse: expected a floating.*; in the loss function at .*trainer_spec.lua:%d+$",
      fails(function(_, batch) return engine.mse(batch.x, batch.y:view(-1)) end))
    assert.matches("In gpt: expected a tensor as ids, got nothing; the fields of the batch are " ..
      "tokens x y$",
      fails(function(model) local y = model() return y:sum() end))
  end)

  it("an error in the script closes the step and keeps the traceback", function()
    local trainer = job { loss = function() error("my own mistake") end }
    assert.error_matches(function() trainer:run() end, "my own mistake.*stack traceback")
    assert.equal(10, job {}:run().steps)
  end)
end)
