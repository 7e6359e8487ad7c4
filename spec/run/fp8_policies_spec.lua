-- Policies of FP8 layers in the roles that loss-scaling policies have: swapped during a run, as
-- shadows, replayed on a recorded run, and in checkpoints. A bad policy changes nothing.
local engine = require "engine"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"
local scratch = require "spec.store.scratch"

local C = M_ffi.C
local TEXT = ("the quick brown fox jumps over the lazy dog "):rep(60)

local folder
before_each(function() folder = helper.folder() end)
after_each(function() helper.remove(folder) end)

-- A tiny job. o.fp8: fields of the recipe; each(trainer, step) runs between the steps.
local function job(o, each)
  local fp8 = { sample = 1, ladder = { "mxfp8" } }
  if o.base == "fp8_current" then fp8.ladder = nil end
  for key, value in pairs(o.fp8 or {}) do fp8[key] = value end
  local all = { text = TEXT, seed = 7, layers = 1, data_seed = 3, lr = 2e-3, steps = 8,
    precision = { name = "mine", base = o.base or "nvfp4", fp8 = fp8 } }
  local lines = {}
  all.on_step = function(t, record)
    lines[#lines + 1] = ("%.17g"):format(record.loss)
    if each then each(t, t.steps_done) end
  end
  for key, value in pairs(o) do if key ~= "base" and key ~= "fp8" then all[key] = value end end
  local t = helper.job(all)
  t:run()
  return tostring(C.eng_params_checksum_of(t.optimizer.params, nil, 0)), t, table.concat(lines, " ")
end

local function events(kind, run)
  return helper.history(run or folder .. "/run", "events", kind)
end
-- The moves of layers in a run, as lines "step path=rung ...", one a step; up to the step `last`.
local function moves(kind, run, last)
  local lines = {}
  for _, e in ipairs(events(kind or "layers", run)) do
    local data = require("cjson").decode(e.data)
    local names = {}
    for path, rung in pairs(data.layers or data) do names[#names + 1] = path .. "=" .. rung end
    table.sort(names)
    if not last or e.step <= last then
      lines[#lines + 1] = e.step .. " " .. table.concat(names, " ")
    end
  end
  return lines
end

local function policy_file(text, name) return helper.write(folder .. "/" .. (name or "p.lua"), text)
end

-- For each base recipe, a policy that moves layers every few steps, and another policy.
local MOVING = { nvfp4 = "layer_ladder:snr=17.5,snr_high=5,pause=2",
  fp8_current = "fp8_fallback:snr=28,pause=2" }
local OTHER = { nvfp4 = "sqrt3:ratio=1000", fp8_current = "fp8_delayed:history=2" }

describe("swapping a policy of FP8 layers", function()
  for _, case in ipairs { { "nvfp4", MOVING.nvfp4, 1 }, { "fp8_current", MOVING.fp8_current, 1 },
    { "fp8_current", nil, 0 } } do
    local base, fp8 = case[1], { policy = case[2], sample = case[3] }
    it(("equals a run that resumes with the new one at that step: %s, %s"):format(base,
      tostring(case[2])), function()
      local plain = job { base = base, fp8 = fp8 }
      local swapped, t = job({ base = base, fp8 = fp8, run = folder .. "/swapped" },
        function(trainer, step)
        if step == 4 then
          assert(trainer.policy:swap(OTHER[base]))
          trainer.run_files.checkpoint_every = 6
        end
      end)
      local name = t.optimizer.fp8.policies[1].name
      assert.equal(name, OTHER[base]:match("^[%w_]+"))
      job { base = base, fp8 = fp8, run = folder .. "/run", steps = 4 }
      local resumed = job { base = base, fp8 = { policy = OTHER[base], sample = case[3] },
        run = folder .. "/run", resume = "auto" }
      assert.equal(resumed, swapped)
      assert.not_equal(plain, swapped)
      -- the script still names the first policy; the checkpoint restores the second
      helper.shell(("rm -r %s/swapped/checkpoints/step-00000008"):format(folder))
      local after, again = job { base = base, fp8 = fp8, run = folder .. "/swapped",
        resume = "auto" }
      assert.equal(swapped, after)
      assert.equal(name, again.optimizer.fp8.policies[1].name)
    end)
  end

  it("notes it once if a policy chooses scales for tensors with scales of blocks", function()
    for base, count in pairs { fp8_block = 1, fp8_current = 0 } do
      local run = folder .. "/" .. base
      job { base = base, fp8 = { policy = "fp8_delayed", sample = 1 }, run = run }
      local list = helper.history(run, "events")
      local found = 0
      for _, event in ipairs(list) do
        if event.kind == "fp8_unused" then
          found = found + 1
          assert.equal("the FP8 policy chooses scales, which have no effect: every tensor under " ..
            "precision mine has a separate scale for each block", event.text)
        end
      end
      assert.equal(count, found)
      job { base = base, fp8 = { policy = "fp8_delayed", sample = 1 }, run = run, resume = "auto",
        steps = 10 }
    end
  end)

  it("hands over the state by migrate, and is recorded with sources", function()
    local source = [[return { name = "heir", kind = "fp8", options = { init_scale = 1 },
      migrate = function(old, name) return { scale = 1, from = name, step = old.step } end,
      decide = function(state)
        if state.from ~= "layer_ladder" or state.step ~= 4 then error("state") end
        return 1
      end }]]
    local _, t = job({ fp8 = { policy = MOVING.nvfp4 }, run = folder .. "/run" },
      function(trainer, step)
      if step == 4 then assert(trainer.policy:swap { source = source, file = "heir.lua" }) end
    end)
    assert.equal(0, t.optimizer.fp8.policies[1]:failures())
    local list = events "fp8_swap"
    assert.equal(1, #list)
    assert.equal(4, list[1].step)
    assert.matches("^FP8 policy layer_ladder %x+ %(.*snr=17.5.*%) %-> heir %x+ %(the script%)$",
      list[1].text)
    assert.matches("^layer_ladder %x+ %(", events("fp8_policy")[1].text)
    local sources = helper.history(folder .. "/run", "policies")
    assert.equal(3, #sources)                              -- static, layer_ladder, heir
  end)

  it("by saving its file keeps the state", function()
    local text = helper.read "policies/layer_ladder.lua"
    local path = policy_file(text)
    local options = MOVING.nvfp4:match(":.*")
    local plain = job { steps = 12, fp8 = { policy = path .. options } }
    local swapped, t = job({ steps = 12, fp8 = { policy = path .. options } }, function(_, step)
      if step == 4 then policy_file("-- second version\n" .. text) end
    end)
    assert.equal(plain, swapped)
    assert.equal(1, t.swaps.swaps)
    assert.equal("-- second version\n" .. text, t.optimizer.fp8.policies[1].source)
  end)

  it("into a recipe without a policy works, and undo leaves no trace", function()
    local plain = job {}
    local undone, after = job({ run = folder .. "/run" }, function(t, step)
      if step ~= 3 then return end
      assert(t.policy:swap(MOVING.nvfp4))
      assert.is_true(t.policy:undo())                      -- undo reverts what swap did
      assert.equal(0, #t.optimizer.fp8.policies)
      assert(t.policy:swap(MOVING.nvfp4))
      assert(t.policy:swap "dynamic")
      assert.is_true(t.optimizer.fp8.policies[1]:undo())
      assert.equal("dynamic", t.policy.name)
      assert.is_true(t.policy:undo())
    end)
    assert.equal(plain, undone)
    assert.equal(6, after.swaps.swaps)
    assert.matches("^FP8 policy none %-> layer_ladder", events("fp8_swap")[1].text)
    local moved = job({}, function(t, step)
      if step == 3 then assert(t.policy:swap(MOVING.nvfp4)) end
    end)
    assert.not_equal(plain, moved)
  end)

  it("that is refused leaves nothing to undo, also with another swap in the same step", function()
    local good = { source = "return { decide = function() return 1 end, options = " ..
      "{ init_scale = 1 } }" }
    local late = { source = [[return { name = "late", kind = "fp8", options = { init_scale = 1 },
      decide = function(_, r) if r.step >= 3 then error("late") end return 1 end }]] }
    job({ fp8 = { policy = MOVING.nvfp4 } }, function(t, step)
      local seats = t.optimizer.fp8.seats
      if step == 3 then
        assert(t.policy:swap(late))
        assert(t.policy:swap(good))
      elseif step == 5 then
        assert.equal("layer_ladder", seats[1].policy.name)
        assert.is_nil((seats[1].policy:undo()))
        assert(t.policy:undo())
        assert.equal("static", t.policy.name)
      end
    end)
  end)

  it("replaces, of several policies, the one of the same name", function()
    job({ base = "fp8_current", fp8 = { policy = { "fp8_delayed", "fp8_fallback" } } },
      function(t, step)
      if step ~= 2 then return end
      assert(t.policy:swap "fp8_fallback:snr=1")
      local list = t.optimizer.fp8.policies
      assert.equal(1, list[2].options.snr)
      assert(list[1]:swap "fp8_lm")
      assert.equal("fp8_lm", t.optimizer.fp8.policies[1].name)
      local done, why = t.policy:swap "sqrt3"
      assert.is_nil(done)
      assert.matches("has 2 FP8 policies (fp8_lm, fp8_fallback)", why, 1, true)
      done, why = list[2]:swap "dynamic"
      assert.is_nil(done)
      assert.matches("chooses a loss scale and does not work on FP8 layers", why, 1, true)
    end)
  end)

  it("follows operations of on_step with a layer's weight, and can be undone", function()
    local seen = {}
    local _, t = job({ fp8 = { policy = MOVING.nvfp4 } }, function(trainer, step)
      if step < 6 then trainer.model.blocks[1].attn.qkv.weight:norm():item() end
      if step == 3 then assert(trainer.policy:swap(OTHER.nvfp4)) end
      if step == 5 then assert(trainer.swaps:undo()) end
      seen[step] = trainer.optimizer.fp8.policies[1].name
    end)
    assert.same({ "layer_ladder", "layer_ladder", "sqrt3", "sqrt3", "layer_ladder", "layer_ladder",
      "layer_ladder", "layer_ladder" }, seen)
    assert.equal(2, t.swaps.swaps)
  end)

  it("is refused where the run has no FP8 layers, and in lagged mode", function()
    engine.seed(1)
    local model = engine.nn.linear(4, 4)
    local t = engine.trainer { model = model, steps = 1, log = "quiet", loss = function() end,
      data = { next = function() return {} end }, optimizer = engine.optim.sgd(model, { lr = 1 }) }
    local _, why = t.policy:swap "layer_ladder"
    assert.matches("works on FP8 layers and chooses no loss scale", why, 1, true)
    job({ mode = "lagged" }, function(trainer, step)
      if step == 2 then _, why = trainer.policy:swap "layer_ladder" end
    end)
    assert.matches("^mode=lagged: FP8 policies wait for the device", why)
    helper.refuses("mode=lagged: FP8 policies wait",
      job, { mode = "lagged", shadow = "layer_ladder" })
  end)
end)

describe("a message about a policy of FP8 layers", function()
  it("names the refused policy and the policy that stays", function()
    job({ fp8 = { policy = MOVING.nvfp4 }, run = folder .. "/run" }, function(t, step)
      if step ~= 2 then return end
      t.policy:swap { source = "return {" }
      t.policy:swap { source = [[return { name = "wrong", kind = "fp8",
        options = { init_scale = 1 }, decide = function() error("no") end }]] }
    end)
    local list = events "swap_refused"
    assert.matches("^the policy given as source is not used: ", list[1].text)
    assert.matches("^the policy layer_ladder stays; wrong is not used: ", list[2].text)
    local _, why = pcall(job, { fp8 = { policy = { 5 } } })
    assert.matches("fp8: policy: expected a name", why, 1, true)
  end)

  it("names the damage when damaged meters are replayed", function()
    local run = folder .. "/run"
    job { run = run }
    for _, case in ipairs { { "UPDATE fp8 SET snr = 'abc'",
      "is damaged: a value of the column 'snr' is not a number" },
      { "DROP TABLE fp8", "is damaged: it has FP8 layers, but no table fp8" } } do
      scratch.sqlite(run .. "/history.db", case[1])
      local _, why = pcall(engine.replay.run, engine.replay.trace(run), "layer_ladder")
      assert.matches(case[2], why, 1, true)
    end
  end)
end)

local HEAD = 'return { name = "bad", kind = "fp8", needs = { "tensors" },\n '
local HOSTILE = {
  ["that raises"] = { "decide = function() error('no') end }", "bad.lua:2: no" },
  ["that loops"] = { "decide = function() while true do end end }", "instruction budget" },
  ["that eats memory"] = { "decide = function() local t = {} for i = 1, 1e9 do t[i] = {} end end }",
    "bad.lua" },
  ["that returns text"] = { "decide = function() return 'high' end }", "bad.lua" },
  ["that scales by text"] = { "decide = function(s, r) return { scale = 1, scales = " ..
    "{ ['blocks.1.mlp.up:high'] = 'yes' } } end }", "bad.lua" },
  ["that names no layer"] = { "decide = function() return { scale = 1, scales = { a = 2 } } end }",
    "bad.lua" },
  ["with an amax beyond f32"] = { "decide = function() return { scale = 1, scales = " ..
    "{ ['blocks.1.mlp.up:x'] = 1e300 } } end }",
    "= 1e+300; expected an amax from 1.4e-45 to 3.4e38, as f32 has" },
  ["with an amax below f32"] = { "decide = function() return { scale = 1, scales = " ..
    "{ ['blocks.1.mlp.up:x'] = 1e-50 } } end }", "= 1e-50; expected an amax from 1.4e-45" },
  ["with half a rung"] = { "decide = function() return { scale = 1, scales = " ..
    "{ ['blocks.1.mlp.up:high'] = 0.5 } } end }",
    "scales['blocks.1.mlp.up:high'] = 0.5; expected 2 or more (2: the first" },
}

describe("a policy of FP8 layers", function()
  local plain, moved
  setup(function()
    plain = job { base = "fp8_current" }
    moved = job { base = "fp8_current", fp8 = { policy = MOVING.fp8_current } }
  end)
  for name, bad in pairs(HOSTILE) do
    local source = { source = HEAD .. "init = function() return { scale = 1 } end,\n" .. bad[1],
      file = "bad.lua" }
    local text = bad[2]:gsub("bad.lua:2", "bad.lua:3")
    it(name .. " is not swapped in", function()
      local weights = job({ base = "fp8_current", fp8 = { policy = MOVING.fp8_current },
        run = folder .. "/run" }, function(t, step)
        if step == 3 then assert.is_nil((t.policy:swap(source))) end
      end)
      assert.equal(moved, weights)
      local list = events "swap_refused"
      assert.equal(1, #list)
      assert.matches("^the policy fp8_fallback stays; .* is not used: .*", list[1].text)
      assert.equal(1, select(2, list[1].text:gsub("bad%.lua", "")))       -- the file, once
      assert.matches(text, list[1].text, 1, true)
    end)

    it(name .. " harms nothing as a shadow", function()
      local weights, t = job { base = "fp8_current", shadow = { source }, run = folder .. "/run" }
      assert.equal(plain, weights)
      assert.equal(8, t.shadows.layers[1].failed)
      assert.matches("it failed in 8 steps, most recently: .*" .. text:gsub("%p", "%%%0"),
        t.shadows:lines()[1])
    end)

    it(name .. " is reported by a replay", function()
      job { base = "fp8_current", run = folder .. "/run" }
      local r = engine.replay.run(engine.replay.trace(folder .. "/run"), source)
      assert.equal(8, r.failures)
      assert.matches(text, r.failure, 1, true)
      assert.matches("failed", engine.replay.table { r })
    end)

    it(name .. " as the run's own policy gives the same weights as no policy", function()
      local weights, t = job { base = "fp8_current", fp8 = { policy = source } }
      assert.equal(plain, weights)
      assert.equal(8, t.policy_errors)
    end)
  end

  it("that fails only at its first decision is removed at once", function()
    local late = HEAD .. [[init = function() return { scale = 1 } end,
      decide = function(_, r) if r.step >= 2 then error("late") end return 1 end }]]
    local weights, t = job({ base = "fp8_current", fp8 = { policy = MOVING.fp8_current },
      run = folder .. "/run" }, function(t, step)
      if step == 2 then assert(t.policy:swap { source = late, file = "late.lua" }) end
    end)
    assert.equal("fp8_fallback", t.optimizer.fp8.policies[1].name)
    assert.matches("fp8_fallback stays; bad %x+ is not used: its first decision failed: " ..
      "late.lua:3: late", events("swap_refused")[1].text)
    local h = engine.history.open(folder .. "/run")
    assert.matches("fp8_fallback", h:why(3), 1, true)
    h:close()
    assert.equal(moved, weights)                           -- no layer moved for the candidate
    assert.equal(0, t.policy_errors)
  end)

  it("that fails at its first decision is removed also if the run was resumed before", function()
    local late = HEAD .. [[init = function() return { scale = 1 } end,
      decide = function(_, r) if r.step >= 4 then error("late") end return 1 end }]]
    for i, policy in ipairs { MOVING.fp8_current, false } do
      local o = { base = "fp8_current", fp8 = { policy = policy or nil },
        run = folder .. "/r" .. i }
      local function swap(t, step)
        if step == 4 then assert(t.swaps:swap { source = late, file = "late.lua" }) end
      end
      local whole = job(o, swap)
      helper.shell("rm -r " .. o.run)
      o.steps = 4
      job(o, swap)
      o.steps, o.resume = 8, "auto"
      local weights, t = job(o)
      assert.equal(policy and 1 or 0, #t.optimizer.fp8.policies)
      assert.matches("its first decision failed: late.lua:3: late",
        events("swap_refused", o.run)[1].text, 1, true)
      assert.equal(whole, weights)
    end
  end)
end)

describe("history:why", function()
  local function why(policy, step, each)
    local run = folder .. "/why"
    helper.shell("rm -rf " .. helper.quote(run))
    job({ base = "fp8_current", fp8 = { policy = policy, sample = 2 }, run = run }, each)
    return tostring(helper.history(run, "why", step))
  end

  it("names what FP8 policies decided, and the tensors that stand out", function()
    local text = why("fp8_fallback:snr=28,pause=2", 0)
    assert.matches("The FP8 tensor with the lowest SNR was blocks%.1%.[%w.]+:dy: 2%d%.%d dB, ",
      text)
    assert.matches("The FP8 policy fp8_fallback (pause=2 snr=28) moved layers from the next " ..
      "step on: high precision: blocks.1.attn.out, ", text, 1, true)
    assert.matches("%(fp8_fallback: blocks%.1%.[%w.]+:%l+ moves up: SNR", text)
    text = why("fp8_fallback:snr=28,pause=2", 1)
    assert.matches("moved no layer; after this step: high precision: blocks.1.attn.out, ", text, 1,
      true)
    assert.matches("FP8 layers were not measured at step 1; measured steps: 0, 4", text, 1, true)
    assert.matches("moved layers from the next step on: the recipe: blocks.1.attn.out, ",
      why("fp8_fallback:snr=28,pause=2", 2), 1, true)
    text = why("fp8_delayed:history=2", 2)
    assert.matches("moved no layer; after this step: all layers as in the recipe.", text, 1, true)
    assert.matches("It chose the amaxes of 12 tensors for the next step, most unlike this " ..
      "step's for blocks%.1%.[%w.]+:%l+, [%d.e-]+ instead of [%d.e-]+%.\n", text)
    assert.not_matches("FP8 policy", why(nil, 0), 1, true)
  end)

  it("follows swaps, and does not blame the loss scaler for an FP8 policy that failed", function()
    local bad = policy_file [[return { name = "bad", kind = "fp8",
      options = { init_scale = 1 },
      decide = function(state, record)
        if record.step > 4 then error("no more") end
        return 1
      end }]]
    local function swap(trainer, step) if step == 3 then assert(trainer.policy:swap(bad)) end end
    assert.matches("The FP8 policy fp8_delayed (history=2) ", why("fp8_delayed:history=2", 2, swap),
      1, true)
    local text = why("fp8_delayed:history=2", 6, swap)
    assert.matches("The policy static left the loss scale at 1.\nAn FP8 policy failed here, so " ..
      "its verdict was not used: FP8 policy bad: " .. bad, text, 1, true)
    assert.matches("The FP8 policy bad moved no layer", text, 1, true)
  end)
end)

describe("the history", function()
  it("has curves of the meters of FP8 layers", function()
    local run, read = folder .. "/run", require("engine.run.curves").read
    job { run = run, fp8 = { sample = 2 } }
    local h = engine.history.open(run)
    local worst, of, least = {}, {}, {}
    for step = 0, 7 do
      for _, row in ipairs(step % 2 == 0 and h:fp8(nil, step) or {}) do
        worst[step] = math.min(worst[step] or math.huge, row.snr)
        least[step] = math.max(least[step] or 0, row.underflow)
        if row.site == "blocks.1.mlp.up" and row.role == "w" then of[step] = row.snr end
      end
    end
    local names = { "loss", "fp8.snr", "fp8.underflow", "fp8.blocks.1.mlp.up:w.snr" }
    local c = read(h, names)
    for step = 0, 7 do
      assert.equal(worst[step], c["fp8.snr"].mean[step + 1])
      assert.equal(least[step], c["fp8.underflow"].mean[step + 1])
      assert.equal(of[step], c[names[4]].mean[step + 1])
    end
    c = read(h, names, { points = 2 })                     -- 4 steps, 2 of them measured
    assert.same({ math.min(worst[4], worst[6]), math.max(of[0], of[2]) },
      { c["fp8.snr"].min[2], c[names[4]].max[1] })
    helper.refuses("the run has no FP8 meters of 'blocks.1.mlp.upp:w'; did you mean " ..
      "'blocks.1.mlp.up:w'?", read, h, { "fp8.blocks.1.mlp.upp:w.snr" })
    helper.refuses("no column 'fp8.sn'; did you mean 'fp8.snr'?", read, h, { "fp8.sn" })
    h:close()
    local function after(sql)
      scratch.sqlite(run .. "/history.db", sql)
      h = engine.history.open(run)
    end
    after("UPDATE fp8 SET site = site || ' layer'; UPDATE fp8 SET snr = 9e999 WHERE step = 2; " ..
      "UPDATE fp8 SET snr = -9e999 WHERE step = 4 AND role = 'x'")
    c = read(h, { "fp8.snr" })["fp8.snr"].mean
    assert.same({ worst[0], nil, nil, worst[6] }, { c[1], c[3], c[5], c[7] })
    h:close()
    assert.matches("SNR of blocks.1.mlp.up layer:w, in dB   .*\nlowest SNR of the FP8 tensors",
      helper.run({ "plot", run, "--columns", "fp8.blocks.1.mlp.up layer:w.snr, fp8.snr" }).out)
    after "UPDATE fp8 SET snr = 'x' WHERE step = 6 AND role = 'w'"
    helper.refuses("is damaged: expected the column 'most' of a query to be a number, got ", read,
      h, { "fp8.snr" })
    h:close()
  end)

  it("has each precision recipe of the run, and the report prints it as Lua", function()
    local run, resolve = folder .. "/run", require("engine.train.precision").resolve
    job { run = run, steps = 2, fp8 = { policy = "layer_ladder",
      layers = { { match = "mlp", w = { rule = "four_over_six" } } } } }
    job { run = run, base = "fp8_current", resume = "auto", steps = 4 }
    local h = engine.history.open(run)
    local list, change = h:recipes(), require("cjson").decode(h:events("precision")[1].data)
    local expected = { change.from.checksum, change.to.checksum }
    table.sort(expected)
    assert.same(expected, { list[1].checksum, list[2].checksum })
    for _, r in ipairs(list) do                -- the recipe can be used again
      assert.equal(r.checksum, resolve(require("cjson").decode(r.recipe)).checksum)
    end
    local page = require("engine.report.report").html(h, run):gsub("<[^>]*>", "")
    assert.matches("Its precision recipes", page, 1, true)
    assert.matches('\n        w = {\n          rule = &quot;four_over_six&quot;,', page, 1, true)
    assert.not_matches("recipe." .. list[1].checksum, page, 1, true)
    h:close()
  end)
end)

describe("a run that begins from another run's checkpoint", function()
  it("records the layers that are off the recipe, or no event", function()
    for scales, first in pairs { ['["blocks.1.attn.qkv:high"] = 2'] = "3 blocks", [""] = false } do
      local from, to = folder .. "/from", folder .. "/to"
      local policy = policy_file(([[return { kind = "fp8",
        init = function() return { scale = 1 } end,
        decide = function() return { scale = 1, scales = { %s } } end }]]):format(scales))
      job { fp8 = { policy = policy }, steps = 4, run = from }
      job { fp8 = { policy = policy }, steps = 5, run = to, resume = from }
      local recorded = moves("layers", to)[1]
      assert.equal(first, recorded and recorded:sub(1, 8) or false)
      assert.is_true(not recorded or recorded == "3 blocks.1.attn.qkv=2", recorded)
      helper.remove(from)
      helper.remove(to)
    end
  end)
end)

describe("a shadow of FP8 layers", function()
  for base, moving in pairs(MOVING) do
    it("changes nothing, and decides as the live policy until updates differ: " .. base, function()
      local plain = job { base = base }
      local weights, t = job { base = base, shadow = { moving, "dynamic" },
        run = folder .. "/shadow" }
      assert.equal(plain, weights)
      job { base = base, fp8 = { policy = moving }, run = folder .. "/live" }
      local live = moves("layers", folder .. "/live")
      local first = tonumber(live[1]:match("^%d+"))
      assert.equal(live[1], moves("shadow_layers", folder .. "/shadow", first)[1])
      local c = t.shadows.layers[1].certainty
      assert.same({ first + 1, 8 - first - 1 }, { c.exact, c.bounds })
      local text = table.concat(t.shadows:lines(), "\n")
      assert.matches("would have computed FP8 layers differently in %d of 8 steps; at the end: " ..
        ".*; its verdicts are bounds from step " .. first + 1 .. " on: its updates differ", text)
      local row = helper.history(folder .. "/shadow", "shadows")[2]
      assert.same({ moving, c.bounds, 0 }, { row.name, row.bounds, row.failed })
      assert.matches("The shadow " .. moving:gsub("%p", "%%%0") ..
        " would have chosen, for FP8 layers, .*blocks.1",
        tostring(helper.history(folder .. "/shadow", "why", first)))
    end)

    it("equal to the run's policy decides the same at every step: " .. base, function()
      local _, t = job { base = base, fp8 = { policy = moving }, shadow = { moving },
        run = folder .. "/run" }
      local list = moves "layers"
      assert.is_true(#list > 1)
      assert.same(list, moves "shadow_layers")
      assert.same({ 0, 8 }, { t.shadows.layers[1].apart, t.shadows.layers[1].certainty.exact })
    end)
  end

  it("continues when the run resumes", function()
    local function run(steps, path)
      local _, t = job { shadow = { MOVING.nvfp4 }, steps = steps, run = folder .. path,
        resume = "auto" }
      return moves("shadow_layers", folder .. path), t.shadows:lines()
    end
    local whole, lines = run(8, "/whole")
    run(5, "/run")
    local rest, rest_lines = run(8, "/run")
    assert.same(whole, rest)
    assert.same(lines, rest_lines)
  end)
end)

describe("a replay of a policy of FP8 layers", function()
  local function replayed(policy, run)
    return engine.replay.run(engine.replay.trace(run or folder .. "/run"), policy)
  end
  local function lines_of(r)
    local lines = {}
    for i, move in ipairs(r.moves) do
      local names = {}
      for path, rung in pairs(move.layers) do names[#names + 1] = path .. "=" .. rung end
      table.sort(names)
      lines[i] = move.step .. " " .. table.concat(names, " ")
    end
    return lines
  end

  for _, policy in ipairs { MOVING.nvfp4, "sqrt3:ratio=8,decay=0.5",
    "fp8_fallback:snr=17.5,pause=2", "forward_high_before_decay:at=3" } do
    it("equals what the run recorded: nvfp4, " .. policy, function()
      for _, sample in ipairs { 1, 2 } do
        local run = folder .. "/run" .. sample
        job { fp8 = { policy = policy, sample = sample }, run = run }
        local r = replayed(policy, run)
        assert.same(moves("layers", run), lines_of(r))
        assert.same({ 8, 8, 0, 0 }, { r.steps, r.certainty.exact, r.apart, r.failures })
        local history = engine.history.open(run)
        local at = history:signals_at()
        for step = 0, policy:find("sqrt3") and 7 or -1 do
          local logged = at(step)["log.gradient_to_noise"]
          assert.is_true(logged > 1)
          assert.equal(logged, r.logs.gradient_to_noise[step + 1])
        end
        history:close()
      end
    end)
  end

  it("equals the run's amaxes with sample=1, and is a bound where they are missing", function()
    local fp8 = { policy = { "fp8_delayed:history=2", "fp8_lm" } }
    job { base = "fp8_current", fp8 = fp8, run = folder .. "/run" }
    local r = replayed "fp8_lm"
    assert.same({ 8, 0 }, { r.certainty.exact, r.apart })
    r = replayed "fp8_delayed:history=3"
    assert.equal("its updates differ from the run's", r.certainty.why)
    fp8 = { policy = "fp8_delayed:history=2" }
    job { base = "fp8_current", fp8 = fp8, run = folder .. "/one" }
    assert.equal(8, replayed("fp8_delayed:history=2", folder .. "/one").certainty.exact)
    fp8.sample = 3
    job { base = "fp8_current", fp8 = fp8, run = folder .. "/three" }
    r = replayed("fp8_delayed:history=2", folder .. "/three")
    assert.same({ 1, 1, "the history lacks amaxes that the policy reads" },
      { r.certainty.exact, r.certainty.from, r.certainty.why })
    assert.equal(8, replayed("fp8_fallback:snr=1", folder .. "/three").certainty.exact)
  end)

  it("says which meters a policy reads that the run does not have", function()
    job { fp8 = { sample = 0 }, run = folder .. "/run" }
    local r = replayed("fp8_fallback:snr=17.5,pause=2")
    assert.same({ 0, 8, 0 }, { r.certainty.exact, r.certainty.bounds, r.certainty.from })
    assert.equal("the history lacks meters of FP8 layers, which the policy may read",
      r.certainty.why)
    assert.equal("the history lacks amaxes that the policy reads", replayed("fp8_lm").certainty.why)
  end)

  it("reads the amaxes of single steps, also of a run without a policy", function()
    local peaks = {}
    for i, policy in ipairs { false, "fp8_fallback:snr=1" } do
      local run = folder .. "/run" .. i
      job { base = "fp8_current", fp8 = { policy = policy or nil, sample = 3 }, run = run }
      peaks[i] = {}
      for k, row in ipairs(helper.history(run, "fp8")) do
        peaks[i][k] = row.peak
        assert.is_true(row.peak >= row.amax and row.power > 0 and row.asked == 0)
      end
    end
    assert.equal(4 * 3 * 3, #peaks[1])
    assert.same(peaks[1], peaks[2])
  end)

  it("follows swaps of the run, and marks what comes after another verdict as a bound", function()
    job({ fp8 = { policy = MOVING.nvfp4 }, run = folder .. "/run" }, function(t, step)
      if step == 4 then assert(t.policy:swap(OTHER.nvfp4)) end
    end)
    local r = replayed(MOVING.nvfp4)
    assert.equal("exact", r.marks[4])
    assert.equal("bound", r.marks[8])
    assert.is_true(r.apart > 0)
  end)

  it("is a command, with tables, JSON and refusals in one line", function()
    job { fp8 = { policy = MOVING.nvfp4 }, run = folder .. "/run" }
    local result = helper.run { "replay", folder .. "/run", "--policy", MOVING.nvfp4, "--policy",
      "dynamic" }
    assert.equal(0, result.code, result.err)
    assert.matches("layer_ladder .* 8 +%d steps +%d of 4 .* 0 steps +100 %%", result.out)
    assert.matches("mass lost", result.out)
    result = helper.run { "replay", folder .. "/run", "--policy", MOVING.nvfp4, "--json" }
    local data = require("cjson").decode(result.out).policies[1]
    assert.same({ "layer_ladder", 8, 8 }, { data.name, data.steps, #data.verdicts })
    assert.equal(#moves "layers", #data.moves)
    local function refused(text, ...)
      local out = helper.run { "replay", ... }
      assert.equal(1, out.code)
      assert.matches(text, out.err, 1, true)
      assert.equal(1, select(2, out.err:gsub("\n", "")))
    end
    refused("expected a run, because a string of outcomes has no layers", "4. x", "--policy",
      "sqrt3")
    refused("--verify compares loss scales", folder .. "/run", "--policy", "sqrt3", "--verify")
    engine.seed(1)
    local model = engine.nn.linear(4, 4)
    engine.trainer { model = model, steps = 1, log = "quiet", run = folder .. "/plain",
      loss = function(m, b) return m(b.x):sum() end,
      data = { next = function() return { x = engine.ones(1, 4) } end },
      optimizer = engine.optim.sgd(model, { lr = 1 }) }:run()
    refused("has no record of such layers: its precision is fp32", folder .. "/plain", "--policy",
      "sqrt3")
  end)
end)

describe("a checkpoint's options of an FP8 policy", function()
  it("that differ from those of a resume are named, and only those", function()
    local function trainer(options, resume)
      return helper.job { text = TEXT, layers = 1, steps = 2, run = folder .. "/run",
        resume = resume, precision = { name = "mine", base = "nvfp4",
        fp8 = { sample = 1, policy = "layer_ladder:snr=17" .. options } } }
    end
    trainer("", nil):run()
    for options, line in pairs { [""] = false,
      [",pause=3"] = "options of policy layer_ladder: pause=3, was 200" } do
      local files = trainer(options, "auto").run_files
      assert.equal(line or nil, table.concat(files.notes, "\n"):match "options of policy[^\n]*")
      files:close()
    end
  end)
end)

describe("a checkpoint's state of an FP8 policy", function()
  local START = 'return { name = "mine", kind = "fp8", init = function() return { scale = 1 } end, '
  local OLD = START .. "decide = function(s) s.n = (s.n or 0) + 1 return 1 end }"
  local NEW = START .. [[migrate = function(old)
      return { scale = 1, seen = { old.n or old.seen[1] } }
    end, decide = function(s) s.seen[1] = s.seen[1] + 1 return 1 end }]]

  it("is handed over to another source of the same name, after a resume and a rollback", function()
    local path = policy_file(OLD)
    job { fp8 = { policy = path }, steps = 4, run = folder .. "/run" }
    policy_file(NEW)
    local _, t = job { fp8 = { policy = path }, run = folder .. "/run", resume = "auto" }
    local list = t.optimizer.fp8.policies
    assert.equal(0, list[1]:failures())
    assert.matches("seen={8}", list[1]:save():gsub("%s", ""), 1, true)
    policy_file(OLD)
    local notes = {}
    _, t = job({ fp8 = { policy = path }, run = folder .. "/back", checkpoint_every = 4,
      policy = { source = [[return { init = function() return { scale = 1 } end,
        decide = function(s, r)
          return { scale = 1, action = r.step == 6 and "rollback" or nil }
        end }]] } },
      function(trainer, step)
        trainer.note = function(_, text) notes[#notes + 1] = text end
        if step == 5 then policy_file(NEW) end
      end)
    assert.equal(1, #events("rollback", folder .. "/back"))
    assert.equal(NEW, t.optimizer.fp8.policies[1].source)
    assert.equal(0, t.policy_errors)
    assert.matches("the source of the policy mine has changed since the checkpoint; " ..
      "the policy takes over",
      table.concat(notes, "\n"), 1, true)
    assert.matches("seen={5}", t.optimizer.fp8.policies[1]:save():gsub("%s", ""), 1, true)
  end)
end)
