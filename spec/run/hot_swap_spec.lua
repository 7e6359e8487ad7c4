-- Swapping the policy of a running job: from the script, by saving its file, by SIGHUP; on
-- probation, undone, in the history and in checkpoints. A bad policy changes nothing.
local engine = require "engine"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"

local C = M_ffi.C
local TEXT = require("engine.report.lab").text(40000)
local DYNAMIC = helper.read("policies/dynamic.lua")

local folder
before_each(function() folder = helper.folder() end)
after_each(function() helper.remove(folder) end)

-- A tiny fp16 job with occasional overflows.
local function job(options)
  return helper.job({ text = TEXT, context = 8, width = 16, layers = 1, dropout = 0.1, batch = 2,
    precision = "fp16", steps = 20 }, options)
end

-- Loss, scale and action of every step and a checksum of the final weights, as exact text; and the
-- trainer. `each(trainer, step)` runs between the steps.
local function trace(options, each)
  local lines = {}
  options.on_step = function(trainer, record, verdict)
    lines[#lines + 1] = ("%.17g %.17g %d"):format(record.loss, record.scale, verdict.action)
    if each then each(trainer, trainer.steps_done) end
  end
  local trainer = job(options)
  trainer:run()
  return table.concat(lines, "\n") .. "\n" ..
    tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0)), trainer
end

local function events(kind, run)
  return helper.history(run or folder .. "/run", "events", kind)
end

local function policy_file(text, name)
  return helper.write(folder .. "/" .. (name or "p.lua"), text)
end

local OPTIONS = { init_scale = 2 ^ 22, growth_interval = 7 }

describe("swapping a policy", function()
  it("for an equal one a hundred times in a thousand steps leaves no trace", function()
    local plain = trace { steps = 1000, policy = policy_file(DYNAMIC), policy_options = OPTIONS }
    local swaps = 0
    local swapped, trainer = trace({ steps = 1000, policy = policy_file(DYNAMIC),
      policy_options = OPTIONS }, function(t, step)
      if step % 10 ~= 5 then return end
      swaps = swaps + 1
      if step % 20 == 5 then policy_file(("-- version %d\n"):format(step) .. DYNAMIC)     -- saved
      else
        assert(t.policy:swap({ source = ("-- %d\n"):format(step) .. DYNAMIC, file = folder ..
          "/p.lua", path = folder .. "/p.lua" }, OPTIONS))
      end
    end)
    assert.equal(100, swaps)
    assert.equal(100, trainer.swaps.swaps)
    assert.equal(plain, swapped)
  end)

  it("for one of the same name keeps the scales of layers", function()
    local text = helper.read "policies/layerwise.lua"
    local scales = {}
    trace({ steps = 6, policy = policy_file(text) }, function(t, step)
      if step ~= 5 then return end
      for k = 1, 2 do
        scales[k] = {}
        for i = 1, #t.groups.groups do scales[k][i] = t.policy:group_scale(i) end
        assert.is_true(t.policy:scales_groups())
        assert(t.policy:swap { file = folder .. "/p.lua", source = "-- again\n" .. text })
      end
    end)
    assert.same(scales[1], scales[2])
  end)

  it("keeps the scale, or the state that migrate returns", function()
    local scales = {}
    trace({ steps = 6, policy = "static:loss_scale=1024" }, function(t, step)
      if step == 2 then assert(t.policy:swap("deepspeed")) end
      if step == 4 then
        assert(t.policy:swap { file = "m.lua",
          source = [[return { name = "mine", init = function() return { scale = 1, from = "" } end,
          migrate = function(old, name) return { scale = old.scale / 2, from = name } end,
          decide = function(state) assert(state.from == "deepspeed") return state.scale end }]] })
      end
      scales[step] = t.policy:scale()
    end)
    assert.same({ 1024, 1024, 1024, 512, 512, 512 }, scales)
  end)

  it("is recorded in the history with hashes, names and sources", function()
    local _, trainer = trace({ steps = 4, run = folder .. "/run", policy = policy_file(DYNAMIC) },
      function(t, step)
      if step == 2 then t.policy:swap "deepspeed" end
    end)
    local list = events "swap"
    assert.equal(1, #list)
    assert.equal(2, list[1].step)
    local data = require("cjson").decode(list[1].data)
    assert.same({ name = "deepspeed", file = "policies/deepspeed.lua",
      hash = trainer.policy:hash() }, data.to)
    assert.same({ "dynamic", folder .. "/p.lua" }, { data.from.name, data.from.file })
    assert.equal("the script", data.by)
    local history = engine.history.open(folder .. "/run")
    local sources = {}
    for _, p in ipairs(history:policies()) do sources[p.hash] = p.source end
    assert.equal(DYNAMIC, sources[data.from.hash])
    assert.equal(helper.read("policies/deepspeed.lua"), sources[data.to.hash])
    history:close()
  end)

  it("can be undone without a trace", function()
    local plain = trace { steps = 12, policy = "dynamic", policy_options = OPTIONS }
    local undone = trace({ steps = 12, policy = "dynamic", policy_options = OPTIONS },
      function(t, step)
      if step == 6 then
        assert(t.policy:swap("static:loss_scale=8"))
        assert(t.policy:undo())
        local done, why = t.policy:undo()
        assert.is_nil(done)
        assert.matches("no swap to undo", why)
      end
    end)
    assert.equal(plain, undone)
  end)

  it("undone, gives the old policy the state and the loss scale that it had", function()
    local scales = {}
    trace({ steps = 8, policy = "dynamic:init_scale=4,growth_interval=4" }, function(t, step)
      scales[step] = t.policy:scale()
      if step == 3 then assert(t.policy:swap("static:loss_scale=2")) end
      if step == 6 then assert(t.policy:undo()) end
    end)
    assert.same({ 4, 4, 4, 2, 2, 2, 8, 8 }, scales)   -- the fourth good step of its own grows it
  end)

  it("is undone with a line if the old policy's file has changed", function()
    local notes = {}
    trace({ steps = 3, policy = policy_file(DYNAMIC) }, function(t, step)
      if step ~= 1 then return end
      assert(t.policy:swap "static")
      policy_file("-- other\n" .. DYNAMIC)
      t.note = function(_, text) notes[#notes + 1] = text end
      assert(t.policy:undo())
      assert.equal(DYNAMIC, t.policy.source)
    end)
    assert.equal(2, #notes)
    assert.equal(("step 1: %s/p.lua no longer holds the text that policy dynamic runs"):format(
      folder), notes[2])
  end)

  it("inside a step takes effect at its end", function()
    local seen = {}
    local trainer
    trainer = job { steps = 3, policy = "static:loss_scale=64", loss = function(model, batch)
      if trainer.steps_done == 1 then trainer.policy:swap("deepspeed") end
      seen[#seen + 1] = trainer.policy.name
      return model:loss(batch.x, batch.y)
    end }
    trainer:run()
    assert.same({ "static", "static", "deepspeed" }, seen)
    assert.equal(64, trainer.policy:scale())
  end)

  it("works to a loss scaler class and back", function()
    local Half = { update = function() end, get_scale = function(self) return self.scale end,
      set_scale = function(self, x) self.scale = x / 2 end, scale = 4 }
    engine.register_loss_scaler("half", Half)
    local _, trainer = trace({ steps = 6, policy = "static:loss_scale=1024" }, function(t, step)
      if step == 2 then assert(t.policy:swap("half")) end
      if step == 4 then assert(t.policy:swap("deepspeed")) end
    end)
    assert.equal("deepspeed", trainer.policy.name)
    assert.equal(512, trainer.policy:scale())
  end)
end)

describe("a bad policy", function()
  local plain
  before_each(function() plain = trace { steps = 20, policy = policy_file(DYNAMIC),
    policy_options = OPTIONS } end)

  local HEAD = "return { options = { init_scale = 8, growth_interval = 1 },\n "
  local BAD = {
    ["half-written"] = { DYNAMIC:sub(1, 900), "p.lua:%d+: " },
    ["without a table"] = { "-- nothing", "the file must return one table" },
    ["no Lua"] = { "\0\1\2\255", "p.lua:1:" },
    ["compiled code"] = { string.dump(function() return {} end), "compiled code" },
    ["looping in the file"] = { "while true do end", "instruction budget" },
    ["looping in decide"] = { HEAD .. "decide = function() while true do end end }",
      "it failed on the record of step %d+:.*instruction budget" },
    ["eating memory"] = { HEAD .. "decide = function() local t = {} for i = 1, 1e9 do t[i] = {} " ..
      "end end }", "it failed on the record of step" },
    ["lying"] = { HEAD .. "decide = function() return { scale = 0 / 0 } end }",
      "scale = nan; expected" },
    ["raising at some steps"] = { HEAD ..
      "decide = function(s, r) if r.step == 3 then error('three') end return 8 end }", "three" },
    ["migrating badly"] = { HEAD ..
      "migrate = function() return { scale = -1 } end, decide = function() return 8 end }",
      "hint: set state.scale in migrate" },
    ["without the options of the run"] =
      { [[return { options = { init_scale = 8 }, decide = function() return 8 end }]],
      "has no option 'growth_interval'" },
  }
  for name, bad in pairs(BAD) do
    it(name .. " changes nothing, and the history records the error", function()
      local traced, trainer = trace({ steps = 20, run = folder .. "/run",
        policy = policy_file(DYNAMIC), policy_options = OPTIONS }, function(_, step)
        if step == 6 then policy_file(bad[1]) end
        if step == 12 then policy_file("-- good again\n" .. DYNAMIC) end
      end)
      assert.equal(plain, traced)
      local refused = events "swap_refused"
      assert.equal(1, #refused)
      assert.matches(bad[2], refused[1].text)
      assert.equal(1, trainer.swaps.swaps)
    end)
  end

  it("that fails only at its first decision is removed at once", function()
    local source = 'return { name = "late", options = { init_scale = 8 }, ' ..
      [[migrate = function(old) return { scale = old.scale } end,
      decide = function(state, record) if record.step >= 6 then error("too late") end
        return state.scale
      end }]]
    local traced, trainer = trace({ steps = 20, run = folder .. "/run",
      policy = policy_file(DYNAMIC), policy_options = OPTIONS }, function(t, step)
      if step == 6 then assert(t.policy:swap { source = source, file = "late.lua" }) end
    end)
    assert.equal(plain, traced)
    assert.equal("dynamic", trainer.policy.name)
    assert.matches("late.lua:2: too late", events("swap_refused")[1].text, 1, true)
    local h = engine.history.open(folder .. "/run")
    assert.matches("The policy dynamic", h:why(9), 1, true)
    assert.equal("dynamic", require("engine.run.runs").policy_of(h))
    h:close()
  end)

  it("that fails at first, after another that never decided, brings the proven one back", function()
    local function late(name)
      return { file = name, source = ([[return { name = "%s",
        init = function() return { scale = 8 } end, decide = function(state, record)
          if record.step >= 6 then error("too late") end
          return state.scale
        end }]]):format(name) }
    end
    for _, undo in ipairs { false, true } do
      local traced, trainer = trace({ steps = 20, policy = policy_file(DYNAMIC),
        policy_options = OPTIONS }, function(t, step)
        if step ~= 6 then return end
        assert(t.policy:swap(late "b"))
        assert(t.policy:swap(late "c"))
        if undo then assert(t.policy:undo()) end
      end)
      assert.equal(plain, traced)
      assert.equal("dynamic", trainer.policy.name)
      assert.is_nil((trainer.policy:undo()))
    end
  end)

  it("that fails at first gives the old policy the step's signals, and says if caps stay",
    function()
      local reads = [[return { name = "reads", init = function() return { scale = 8 } end,
        decide = function(state, record)
          return { scale = 8, log = { at = record.signals.at or 0 } }
        end }]]
      local seen = {}
      local trainer = job { policy = policy_file(reads), steps = 8, run = folder .. "/run",
        on_step = function(t, record)
          seen[#seen + 1] = t.policy:logs().at
          engine.signal("at", tonumber(record.step) + 1)
          if record.step == 4 then
            t.policy:swap { file = "late.lua", source = [[return { name = "late",
              needs = { "tensors", "caps" }, init = function() return { scale = 8 } end,
              decide = function(state, record)
                if record.step > 4 and record.capped then error("late") end
                if record.step < 5 then return 8 end
                return { scale = 8, caps = { ['wte.weight'] = 1e-9 } }
              end }]] }
          end
        end }
      trainer:run()
      assert.same({ "reads", 1 }, { trainer.policy.name, trainer.swaps.swaps })
      assert.same({ 0, 1, 2, 3, 4, 5, 6, 7 }, seen)
      assert.matches("late; its caps on this step's gradients stay", events("swap_refused")[1].text,
        1, true)
    end)

  it("that fails at first gives the old policy a record with its statistics", function()
    local counts = [[return { name = "counts", needs = { "hist", "zeros" },
      init = function() return { scale = 8 } end,
      decide = function(state, record)
        return { scale = 8, log = { all = record.hist:sum(-160, 159) + record.zeros } }
      end }]]
    for _, mode in ipairs { "sync", "lagged" } do
      local seen = {}
      local trainer = job { policy = policy_file(counts), steps = 10, mode = mode,
        on_step = function(t, record)
          seen[#seen + 1] = t.policy:logs().all
          if record.step == 4 then
            t.policy:swap { file = "late.lua", source = [[return {
              init = function() return { scale = 8 } end,
              decide = function(state, record)
                if record.step > 4 then error("late") end
                return state.scale
              end }]] }
          end
        end }
      trainer:run()
      assert.equal("counts", trainer.policy.name)
      assert.equal(1, trainer.swaps.swaps)
      assert.equal(10, #seen)
      for _, all in ipairs(seen) do assert.equal(trainer.model:count(), all) end
    end
  end)

  it("file replaced by a pipe, a device or a huge file leaves the policy unchanged", function()
    for name, text in pairs { pipe = "is not a regular file",
      ["link to a device"] = "is not a regular file", ["large file"] = "is larger than 1 MiB" } do
      local path = ("%s/%s.lua"):format(folder, (name:gsub(" ", "_")))
      helper.write(path, "return { options = { init_scale = 4 }, decide = function(s) return " ..
        "s.scale end }")
      local trainer = job { policy = path, steps = 12, run = folder .. "/" .. name:sub(1, 4),
        on_step = function(t)
        if t.steps_done ~= 3 then return end
        helper.shell("rm " .. helper.quote(path) ..
          (name == "pipe" and "; mkfifo " .. helper.quote(path) or name == "large file"
          and "; truncate -s 3G " .. helper.quote(path)
          or "; ln -s /dev/zero " .. helper.quote(path)))
      end }
      trainer:run()
      local refused = engine.history.open(folder .. "/" ..
        name:sub(1, 4)):query("SELECT text FROM events WHERE kind = 'swap_refused'")
      assert.are.equal(1, #refused, name)
      assert.matches(text, refused[1].text, 1, true)
      assert.has_error(function() engine.policy.load(path) end)
    end
  end)

  it("file is not read while it is empty, as when it is being saved", function()
    local path = policy_file(DYNAMIC)
    job { policy = path, policy_options = OPTIONS, run = folder .. "/run", on_step = function(t)
      if t.steps_done == 3 then policy_file "" end
      if t.steps_done == 9 then policy_file(DYNAMIC .. "-- saved\n") end
    end }:run()
    assert.same({}, events "swap_refused")
    assert.matches("its file was saved", events("swap")[1].text, 1, true)
  end)

  it("file that is missing leaves the policy unchanged, with one message", function()
    local notes = {}
    local traced = trace({ steps = 20, policy = policy_file(DYNAMIC), policy_options = OPTIONS },
      function(t, step)
      t.note = function(_, text) notes[#notes + 1] = text end
      if step == 6 then os.remove(folder .. "/p.lua") end
    end)
    assert.equal(plain, traced)
    assert.equal(1, #notes)
    assert.matches("/p.lua no longer exists; the policy that was read from it stays", notes[1], 1,
      true)
  end)
end)

describe("a checkpoint", function()
  it("resumes with the swapped policy, bit for bit", function()
    local function swap(t, step) if step == 4 then assert(t.policy:swap(folder .. "/b.lua")) end end
    policy_file(DYNAMIC:gsub('name = "dynamic"', 'name = "b"'):gsub("growth_interval = 2000",
      "growth_interval = 3"), "b.lua")
    local whole = trace({ steps = 16, policy = "static:loss_scale=1024" }, swap)
    local first, trainer = trace({ steps = 8, run = folder .. "/run",
      policy = "static:loss_scale=1024" }, swap)
    assert.equal("b", trainer.policy.name)
    os.remove(folder .. "/b.lua")                   -- the checkpoint has its source
    local second, again = trace { steps = 16, run = folder .. "/run", resume = "auto",
      policy = "static:loss_scale=1024" }
    assert.equal("b", again.policy.name)
    assert.equal(whole, first:gsub("\n%d+ULL$", "") .. "\n" .. second)
  end)

  it("of a policy that has not decided yet resumes with the old one at hand", function()
    local Half = { update = function() end, get_scale = function() return 4 end }
    engine.register_loss_scaler("half_at_hand", Half)
    local late = { file = "late.lua", source = [[return { name = "late",
      init = function() return { scale = 8 } end, decide = function(state, record)
        if record.step == 4 then error("too late") end
        return state.scale
      end }]] }
    for i, policy in ipairs { policy_file(DYNAMIC), "half_at_hand" } do
      local run = folder .. "/run" .. i
      local function swap(t, step) if step == 4 then assert(t.policy:swap(late)) end end
      local whole = trace({ steps = 8, policy = policy }, swap)
      local first, trainer = trace({ steps = 4, run = run, policy = policy }, swap)
      assert.equal("late", trainer.policy.name)
      local second, again = trace { steps = 8, run = run, resume = "auto", policy = policy }
      assert.equal(trainer.swaps.seats[1].asked.name, again.policy.name)
      assert.equal(whole, first:gsub("\n%d+ULL$", "") .. "\n" .. second)
      assert.matches("late.lua:3: too late", events("swap_refused", run)[1].text, 1, true)
    end
  end)

  it("keeps the events of its step in the history when the run resumes", function()
    local data = engine.data.text { text = TEXT, batch = 2, context = 8 }
    local function options(steps, resume)
      return { steps = steps, run = folder .. "/run", policy = "dynamic", checkpoint_every = 4,
        resume = resume, evaluate = { every = 4, data = data, batches = 1 } }
    end
    trace(options(6), function(t, step)
      if step == 4 then assert(t.policy:swap "deepspeed") end
    end)
    helper.shell("rm -r " .. folder .. "/run/checkpoints/step-00000006")
    for _ = 1, 2 do
      job(options(8, "auto"))
      local kinds = {}
      for _, event in ipairs(events()) do
        if event.step >= 4 then kinds[#kinds + 1] = event.kind .. " " .. event.step end
      end
      assert.same({ "swap 4", "evaluation 4", "checkpoint 4", "resumed 4" },
        { unpack(kinds, 1, 4) })
    end
    assert.equal(1, #events "swap")
  end)

  it("resumes with options that a swap changed", function()
    local function swap(t, step)
      if step == 2 then assert(t.policy:swap "dynamic:growth_interval=2") end
    end
    local whole = trace({ steps = 10, policy = "dynamic" }, swap)
    local first = trace({ steps = 4, run = folder .. "/run", policy = "dynamic" }, swap)
    local second, trainer = trace { steps = 10, run = folder .. "/run", resume = "auto",
      policy = "dynamic" }
    assert.equal(2, trainer.policy.options.growth_interval)
    assert.equal(whole, first:gsub("\n%d+ULL$", "") .. "\n" .. second)
  end)

  it("names options that are not those of its policy, which may come from a swap", function()
    local function every(n) return "dynamic:growth_interval=" .. n end
    for name, case in pairs { plain = {}, swapped = { swap = true, was = 9 },
      undone = { swap = true, undo = true } } do
      local run, was = folder .. "/options-" .. name, case.was or 5
      trace({ steps = 6, run = run, policy = every(5) }, function(t, step)
        if step == 2 and case.swap then assert(t.policy:swap(every(9))) end
        if step == 4 and case.undo then assert(t.policy:undo()) end
      end)
      -- the same request as before brings no line, whichever policy the run has
      for n, line in pairs { [5] = false, [was] = false,
        [50] = "options of policy dynamic: growth_interval=50, was " .. was } do
        local trainer = job { steps = 7, run = run, resume = "auto", policy = every(n) }
        local notes = table.concat(trainer.run_files.notes, "\n")
        assert.equal(line or nil, notes:match "options of policy[^\n]*", name .. n)
        trainer.run_files:close()
      end
      job { steps = 7, run = run, resume = "auto", policy = every(50) }:run()
      local list = events("policy", run)
      assert.matches("growth_interval=50", list[#list].text, 1, true)
    end
  end)

  it("resumes with a policy given as source that replaced another such policy", function()
    local function inline(scale) return { source = ([[return { options = { init_scale = %d },
      decide = function() return %d end }]]):format(scale, scale) } end
    trace({ steps = 4, run = folder .. "/run", policy = inline(4) }, function(t, step)
      if step == 2 then assert(t.policy:swap(inline(64))) end
    end)
    local _, same = trace({ steps = 6, run = folder .. "/run", resume = "auto",
      policy = inline(4) }, function(t, step)
      if step == 5 then
        local notes = {}
        t.note = function(_, text) notes[1] = text end
        assert.is_nil((t.policy:undo()))
        assert.matches("a swap made before the run was resumed cannot be undone", notes[1], 1, true)
      end
    end)
    assert.equal(inline(64).source, same.policy.source)
    local _, other = trace { steps = 8, run = folder .. "/run", resume = "auto",
      policy = inline(2) }
    assert.equal(inline(2).source, other.policy.source)
  end)

  it("yields to the script if the script names another policy than before", function()
    trace({ steps = 4, run = folder .. "/run", policy = "static:loss_scale=1024" },
      function(t, step) if step == 2 then t.policy:swap("deepspeed") end end)
    local _, trainer = trace { steps = 8, run = folder .. "/run", resume = "auto",
      policy = "dynamic" }
    assert.equal("dynamic", trainer.policy.name)
    assert.equal(1024, trainer.policy:scale())
  end)
end)

describe("SIGHUP", function()
  it("reloads the policy's file, and nothing else", function()
    local script = helper.write(folder .. "/job.lua", ([[
      local engine = require "engine"
      local path = %q
      local model = engine.nn.linear(4, 1)
      local data = { next = function() return { x = engine.ones(2, 4), y = engine.ones(2, 1) } end }
      engine.trainer { model = model, data = data,
        loss = function(m, b) return engine.mse(m(b.x), b.y) end, watch = false,
        optimizer = engine.optim.sgd(model, { lr = 1e-3 }), policy = path, steps = 6, run = arg[1],
          log = "quiet",
        on_step = function(t)
          if t.steps_done == 2 then os.execute("kill -HUP $PPID; sleep 0.05") end
          if t.steps_done == 4 then
            local f = io.open(path, "w")
            f:write("return { options = { init_scale = 8 }, decide = function() return 32 end }")
            f:close()
            os.execute("kill -HUP $PPID; sleep 0.05")
          end
        end }:run() ]]):format(folder .. "/p.lua"))
    policy_file("return { options = { init_scale = 8 }, decide = function() return 16 end }")
    local result = helper.run { script, folder .. "/run" }
    assert.equal(0, result.code, result.err)
    local list = events "swap"
    assert.equal(1, #list)
    assert.matches("SIGHUP", list[1].text, 1, true)
    assert.equal(4, list[1].step)
  end)

  it("ends a script that trains nothing, as usual", function()
    assert.equal(129, helper.run({ "-e",
      "os.execute('kill -HUP $PPID; sleep 0.2') print('still here')" }).code)
  end)
end)
