-- engine.session: loops written by hand. One optimizer gives the bits of a trainer; several share
-- one scale; history, swaps, clients' requests, checkpoints and refusals.
local engine = require "engine"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"

local C, nn = M_ffi.C, engine.nn
local TEXT = require("engine.report.lab").text(20000)

local folder
before_each(function() folder = helper.folder() end)
after_each(function()
  C.eng_step_end()                      -- ends the step of a loop that an error left
  helper.remove(folder)
end)

local function with(options, more)
  for key, value in pairs(more or {}) do options[key] = value end
  return options
end

-- The model, data and optimizer of a tiny fp16 job whose first steps overflow.
local function parts(name)
  engine.seed(5)
  local model = nn.gpt { vocab = 256, context = 8, width = 16, heads = 2, layers = 1,
    dropout = 0.1 }
  local data = engine.data.text { text = TEXT, batch = 2, context = 8, seed = 9 }
  return model, data, engine.optim[name or "adamw"](model, { lr = 1e-3, precision = "fp16" })
end

local SCALE = { init_scale = 2 ^ 20, growth_interval = 5 }

-- n turns of one optimizer by hand; returns the session, the results, and the weights' checksum.
local function by_hand(n, options, each)
  local model, data, opt = parts()
  local s = engine.session(with({ optimizer = opt, data = data, policy = "dynamic",
    policy_options = SCALE, log = "quiet" }, options))
  local results = {}
  for turn in s:turns(n) do
    local b = data:next()
    s:backward(s:autocast(function() return model:loss(b.x, b.y) end))
    results[#results + 1] = s:step(opt)
    if each then each(s, turn, results[#results]) end
  end
  return s, results, tostring(C.eng_params_checksum_of(opt.params, nil, 0))
end

local function by_trainer(n, options)
  local model, data, opt = parts()
  local trainer = engine.trainer(with({ model = model, data = data, optimizer = opt, steps = n,
    policy = "dynamic", policy_options = SCALE, log = "quiet" }, options))
  trainer:run()
  return tostring(C.eng_params_checksum_of(opt.params, nil, 0))
end

local COLUMNS = "SELECT step, updates, loss, lr, scale, action, overflow, amax, norm FROM steps"
local function rows(run)
  local h = engine.history.open(run)
  local lines = {}
  for i, row in ipairs(h:query(COLUMNS)) do
    local list = {}
    for _, name in ipairs { "step", "updates", "loss", "lr", "scale", "action", "overflow", "amax",
      "norm" } do list[#list + 1] = tostring(row[name]) end
    lines[i] = table.concat(list, " ")
  end
  h:close()
  return lines
end

local function events(run, kind) return helper.history(run, "events", kind) end

local refused = helper.refuses

-- A policy that repeats overflowed steps at half the scale.
local AGAIN = { file = "again", source = [[return { init = function() return { scale = 2^22 } end,
  decide = function(state, record)
    if not record.overflow then return state.scale end
    state.scale = state.scale / 2
    return { scale = state.scale, action = "retry" }
  end }]] }

-- A GAN in two dimensions: a critic d, a generator g, and losses that share the generator's output.
local function gan(options, n, each)
  engine.seed(3)
  local d = nn.sequential { nn.linear(2, 16), nn.relu(), nn.linear(16, 1) }
  local g = nn.sequential { nn.linear(3, 16), nn.relu(), nn.linear(16, 2) }
  local opt_d = engine.optim.adam(d, { lr = 2e-3, precision = "fp16" })
  local opt_g = engine.optim.sgd(g, { lr = 1e-2, momentum = 0.9, precision = "fp16" })
  local s = engine.session(with({ optimizers = { d = opt_d, g = opt_g }, policy = "dynamic",
    policy_options = { init_scale = 2 ^ 21, growth_interval = 8 }, log = "quiet" }, options))
  for turn in s:turns(n) do
    local fake
    local loss_d = s:autocast(function()
      fake = g(engine.randn(8, 3))
      return -(d(engine.randn(8, 2) + 1):log_sigmoid():mean())
        - (-d(fake:detach())):log_sigmoid():mean()
    end)
    s:backward(loss_d)
    local of_d = s:step(opt_d)
    s:backward(s:autocast(function() return -(d(fake):log_sigmoid():mean()) end))
    local of_g = s:step "g"
    opt_g.lr = opt_g.lr * 0.98                      -- the loop's own schedule
    if each then each(s, turn, of_d, of_g) end
  end
  return s, opt_d, opt_g
end

describe("a session", function()
  it("of one optimizer gives a trainer's weights and history, bit for bit", function()
    local _, results, weights = by_hand(20, { run = folder .. "/hand", clip = 0.5 })
    assert.equal(by_trainer(20, { run = folder .. "/trainer", clip = 0.5 }), weights)
    assert.same(rows(folder .. "/trainer"), rows(folder .. "/hand"))
    assert.equal(20, #results)
    assert.same({ true, "skip", 0, 2 ^ 20 }, { results[1].skipped, results[1].action,
      results[1].step, results[1].scale })
    assert.matches("overflow", results[1].reason)
    assert.same({ false, "step" }, { results[20].skipped, results[20].action })
  end)

  it("repeats a batch at a verdict of retry, as a trainer does", function()
    local options = { policy = AGAIN, policy_options = {} }
    local _, results, weights = by_hand(12, with({ run = folder .. "/hand" }, options))
    assert.equal(by_trainer(12, with({ run = folder .. "/trainer" }, options)), weights)
    local seen = {}
    for _, r in ipairs(results) do seen[r.action] = true end
    assert.is_true(seen.retry, "the job must overflow")
  end)

  it("of several optimizers records each update, in one history with one scale", function()
    local scale, steps = 2 ^ 21, 0
    local s = gan({ run = folder .. "/gan", stats_every = 1, shadow = "static" }, 20,
      function(_, _, of_d, of_g)
        for _, r in ipairs { of_d, of_g } do
          assert.equal(steps, r.step)
          assert.equal(scale, r.scale)              -- a new scale applies at once
          steps, scale = steps + 1, r.skipped and scale / 2 or scale
          if r.reason and not r.skipped then scale = scale * 2 end
        end
      end)
    assert.equal(40, s:close().steps)
    assert.is_true(s.skipped > 0 and s.updates == 40 - s.skipped)
    local h = engine.history.open(folder .. "/gan")
    local first = h:events("overflow")[1]
    assert.matches("first in d%.%d", first.text)
    assert.equal(40, #h:query "SELECT step FROM steps")
    local stats = h:tensor "g.1.weight"
    h:close()
    assert.is_truthy(stats)
    local out = helper.run { "export", folder .. "/gan", "--csv", "-" }
    assert.matches("signals.optimizer", out.out)
    assert.equal(0, helper.run({ "plot", folder .. "/gan" }).code)
    assert.equal(0, helper.run({ "report", folder .. "/gan", "-o", folder .. "/p.html" }).code)
    assert.equal(0, helper.run({ "replay", folder .. "/gan", "--policy", "deepspeed" }).code)
  end)

  it("resumes bit for bit from the checkpoint of any turn", function()
    local _, d, g = gan({ run = folder .. "/whole", checkpoint_every = 6 }, 14)
    local function sums(a, b)
      return { tostring(C.eng_params_checksum_of(a.params, nil, 0)),
        tostring(C.eng_params_checksum_of(b.params, nil, 0)),
        a.updates, b.updates, b.lr }
    end
    local wanted = sums(d, g)
    for _, cut in ipairs { 1, 5, 13 } do
      local run = folder .. "/cut" .. cut
      gan({ run = run }, cut)
      local turns = {}
      local _, d2, g2 = gan({ run = run, resume = "auto" }, 14, function(_, turn)
        turns[#turns + 1] = turn
      end)
      assert.same({ cut + 1, 14, 14 - cut }, { turns[1], turns[#turns], #turns })
      assert.same(wanted, sums(d2, g2))
      assert.same(rows(folder .. "/whole"), rows(run))
    end
    -- A checkpoint that falls due within a turn is written at the end of the turn.
    assert.equal(0, helper.shell("ls -d " .. folder .. "/whole/checkpoints/step-00000018").code)
  end)

  it("resumes with data, state and the policy, as a trainer does", function()
    local _, _, weights = by_hand(12, { run = folder .. "/whole", state = { n = 0 } },
      function(s) s.state.n = s.state.n + 1 end)
    local function count(s) s.state.n = s.state.n + 1 end
    by_hand(7, { run = folder .. "/cut", state = { n = 0 } }, count)
    local s, _, resumed = by_hand(12, { run = folder .. "/cut", state = { n = 0 },
      resume = "auto" }, count)
    assert.equal(weights, resumed)
    assert.equal(12, s.state.n)
    assert.same(rows(folder .. "/whole"), rows(folder .. "/cut"))
  end)

  it("resumes with a loader that has no position only if restart_data is true", function()
    local data = select(2, parts())
    local bare = { next = function() return data:next() end }
    by_hand(2, { run = folder .. "/bare", data = bare })
    local again = { run = folder .. "/bare", data = bare, resume = "auto" }
    refused("the loader has no state() and restore()", by_hand, 4, again)
    assert.equal(4, by_hand(4, with({ restart_data = true }, again)):close().steps)
  end)

  it("leaves it to the loop whether gradients add up in f32", function()
    local _, _, opt = parts()
    opt:accumulates(true)
    engine.session { optimizer = opt, log = "quiet" }
    assert.is_true(opt._accumulates)
  end)

  it("keeps the scale of gradients that another optimizer still holds", function()
    engine.seed(1)
    local a, b = nn.linear(4, 4), nn.linear(4, 4)
    local opt_a = engine.optim.sgd(a, { lr = 0.1 })
    local opt_b = engine.optim.sgd(b, { lr = 0.1 })
    local before = b.weight:totable()[1][1]
    local s = engine.session { optimizers = { a = opt_a, b = opt_b }, log = "quiet",
      policy = { file = "halve", source = [[return { init = function() return { scale = 64 } end,
        decide = function(state) state.scale = state.scale / 2; return state.scale end }]] } }
    local scales = {}
    for _ in s:turns(2) do
      local x = engine.ones(1, 4)
      s:backward(a(x):sum())
      s:backward(b(x):sum())
      scales[#scales + 1] = s:step(opt_a).scale
      assert.equal(scales[#scales], s:get_scale())  -- b's gradients carry it
      scales[#scales + 1] = s:step(opt_b).scale
    end
    assert.same({ 64, 64, 16, 16 }, scales)
    assert.near(before - 0.2, b.weight:totable()[1][1], 1e-6)
  end)

  it("swaps its policy: from the script, by SIGHUP, and back if the new one fails", function()
    local file = helper.write(folder .. "/p.lua", helper.read "policies/dynamic.lua")
    by_hand(12, { run = folder .. "/run", policy = file, policy_options = { init_scale = 2 ^ 12 } },
      function(s, turn)
        if turn == 3 then s.policy:swap("static:loss_scale=8") end
        if turn == 5 then assert.equal(8, s:get_scale()) end
        if turn == 6 then s.policy:undo() end
        if turn == 8 then
          helper.write(file, (helper.read(file):gsub("growth_interval = %d+",
            "growth_interval = 1")))
          C.eng_hangup()
        end
      end)
    local list = events(folder .. "/run", "swap")
    assert.equal(3, #list)
    assert.matches("SIGHUP", list[3].text)
  end)

  it("stops by s:stop, by a policy and after a break, with a checkpoint", function()
    local s, results = by_hand(10, { run = folder .. "/a" }, function(s, turn)
      if turn == 4 then s:stop "enough" end
    end)
    assert.equal(4, #results)
    assert.equal("enough", s:close().stopped)
    results = select(2, by_hand(10, { run = folder .. "/b", policy_options = {},
      policy = { file = "end",
      source = [[return { init = function() return { scale = 8, n = 0 } end,
        decide = function(state)
          state.n = state.n + 1
          return { scale = 8, action = state.n == 3 and "stop" or "step", reason = "three" }
        end }]] } }))
    assert.equal(3, #results)
    assert.matches("three", events(folder .. "/b", "stopped")[1].text)
    local model, data, opt = parts()
    s = engine.session { optimizer = opt, data = data, run = folder .. "/c", log = "quiet" }
    for turn in s:turns(10) do
      local b = data:next()
      s:backward(s:autocast(function() return model:loss(b.x, b.y) end))
      s:step()
      if turn == 2 then break end
    end
    assert.equal(2, s:close().steps)
    for name, n in pairs { a = 4, b = 3, c = 2 } do
      assert.equal(0, helper.shell(("ls %s/%s/checkpoints/step-%08d"):format(folder, name, n)).code)
    end
  end)

  it("gives a loss scaler class the loss and further arguments", function()
    local given = {}
    local Maps = { get_scale = function(self) return self.s or 4 end, update = function() end,
      scale_loss = function(self, loss, maps)
        self.s = maps.scale
        given[#given + 1] = maps.scale
        return loss * maps.scale
      end }
    engine.register_loss_scaler("session-maps", Maps)
    local model, data, opt = parts()
    local s = engine.session { optimizer = opt, data = data, policy = "session-maps",
      log = "quiet" }
    local scales = {}
    for turn in s:turns(2) do
      local b = data:next()
      s:backward(s:autocast(function() return model:loss(b.x, b.y) end), { scale = 2 ^ turn })
      scales[turn] = s:step().scale
    end
    assert.same({ { 2, 4 }, { 2, 4 } }, { given, scales })
  end)

  it("refuses what it cannot do in one line", function()
    local model, data, opt = parts()
    local function make(options) return engine.session(with({ optimizer = opt }, options)) end
    refused("session: expected a table of options, got 'a'", engine.session, "a")
    refused("session: expected optimizer = an optimizer of engine.optim", engine.session, {})
    refused("session: unknown option 'mode'; only engine.trainer has it", make, { mode = "lagged" })
    refused("session: unknown option 'polcy'; did you mean 'policy'?", make, { polcy = 1 })
    refused("session: expected optimizer d to be an optimizer of engine.optim, got 5",
      engine.session, { optimizers = { d = 5 } })
    refused("session: expected names of letters, digits and '_' in optimizers, got 1",
      engine.session, { optimizers = { opt } })
    refused("are the same optimizer; list it once", engine.session,
      { optimizers = { a = opt, b = opt } })
    local other = engine.optim.sgd(nn.linear(2, 2), { precision = "bf16" })
    refused("session: expected one precision, but optimizer a has fp16 and b has bf16",
      engine.session, { optimizers = { a = opt, b = other } })
    refused("session: precision 'fp8_current' quantizes", make, { precision = "fp8_current" })
    refused("session: policy norm_ratio needs reference backward passes", make,
      { policy = "norm_ratio" })
    refused("there is no policy 'dynamc'; did you mean 'dynamic'?", make, { policy = "dynamc" })
    refused("session: expected clip to be a number >= 0 (0: no clipping), got 'x'", make,
      { clip = "x" })
    refused("session: expected optimizer d to be an optimizer of engine.optim, got a table",
      engine.session, { optimizers = { d = { params = 1, step = 1 } } })
    refused("session: expected data to be a loader with both state() and restore(), or with " ..
      "neither",
      make, { data = { next = function() end, state = function() end } })

    local s = make { data = data, log = "quiet" }
    refused("session:backward: expected to be called inside", s.backward, s, engine.ones(1))
    refused("session:turns: expected the number of turns", s.turns, s, "x")
    refused("session:run: a session has no loop of its own", s.run, s)
    for turn in s:turns(2) do
      if turn == 1 then
        refused("session:step: the optimizer has no gradients", s.step, s)
        refused("session:backward: expected the loss to be a tensor", s.backward, s, 3)
        refused("session:step: expected one of the session's optimizers (optimizer), got 'optimizr'"
          .. "; did you mean 'optimizer'?", s.step, s, "optimizr")
        refused("unknown option 'clop'", s.step, s, opt, { clop = 1 })
        refused("session:step: expected tokens to be a whole number of 0 or more, got 'x'", s.step,
          s, opt, { tokens = "x" })
      end
      local b = data:next()
      s:autocast(function() return model:loss(b.x, b.y) end):backward()
      refused("session:step: the gradients of this turn do not carry the loss scale", s.step, s)
      opt:zero_grad()
      s:backward(s:autocast(function() return model:loss(b.x, b.y) end))
      opt:clip_grad_norm(1)
      refused("session:step: clip_grad_norm and clip_grad_value would clip scaled gradients",
        s.step, s, opt)
      opt._clip = nil
      s:step(opt, { clip = 1, tokens = 16 })
    end
    local first = true
    refused("session: turn 1 computed gradients that no step used", function()
      local again = make { data = data, log = "quiet" }
      for _ in again:turns(1) do
        local b = data:next()
        again:backward(again:autocast(function() return model:loss(b.x, b.y) end))
        first = false
      end
    end)
    assert.is_false(first)
  end)

  it("refuses a retry that it cannot carry out, and goes on", function()
    local s = gan({ run = folder .. "/gan", policy = AGAIN,
      policy_options = {} }, 6)
    assert.is_true(s.policy_errors > 0)
    local row = helper.history(folder .. "/gan", "steps", 0, 0)[1]
    assert.same({ "skip", true }, { row.action, row.policy_failed })
    assert.matches("session: policy again asks for a retry, which needs a single optimizer",
      row.reason)
    assert.matches("; the action is skip instead %(repeats", select(2, next(s.failures)))
  end)

  it("follows set_precision, which all optimizers must get", function()
    local function changed(recipe, both)
      local a, b = nn.linear(4, 1), nn.linear(4, 1)
      local opt_a, opt_b = engine.optim.sgd(a, { precision = "bf16" }),
        engine.optim.sgd(b, { precision = "fp16" })
      local s = engine.session { optimizers = { a = opt_a, b = opt_b }, log = "quiet",
        precision = "bf16" }
      assert.equal("bf16", opt_b.precision.name)
      local seen = {}
      local good, why = pcall(function()
        for turn in s:turns(2) do
          if turn == 2 then opt_a:set_precision(recipe) end
          if turn == 2 and both then opt_b:set_precision(recipe) end
          for _, opt in ipairs { opt_a, opt_b } do
            local y = s:autocast(function() return opt.model(engine.ones(1, 4)) end)
            seen[#seen + 1] = y.dtype
            s:backward(y:sum())
            s:step(opt)
          end
        end
      end)
      s:close()
      return seen, good or why
    end
    assert.same({ "bf16", "bf16", "f16", "f16" }, (changed("fp16", true)))
    assert.matches("expected one precision, but optimizer a has fp16 and b has bf16",
      select(2, changed("fp16")))
    assert.matches("session: precision 'fp8_current' quantizes",
      select(2, changed("fp8_current", true)))
  end)

  it("refuses scales per layer at the start and at a swap", function()
    local why = "session: policy layerwise sets scales per layer"
    refused(why, by_hand, 6, { policy = "layerwise", policy_options = {} })
    local s = by_hand(0, { policy = "dynamic", policy_options = {} })
    local good, problem = s.policy:swap("layerwise")
    assert.is_nil(good)
    assert.matches(why, problem)
    assert.equal("dynamic", s.policy.name)
    local linear = engine.nn.linear(4, 4)                -- two groups: the weight and the bias
    refused(why, engine.session, { optimizer = engine.optim.sgd(linear, { lr = 0.1 }),
      policy = "layerwise" })
  end)

  it("refuses at a decision scales per layer that a policy begins to set later", function()
    local file = helper.write(folder .. "/later.lua", "return { name = 'later', options = {}, " ..
      "needs = { 'groups' }, init = function() return { scale = 4, n = 0 } end, " ..
      "decide = function(state, record) state.n = state.n + 1; local scales = {} " ..
      "for _, group in ipairs(record.groups or {}) do scales[group.name] = 2 end " ..
      "return { scale = 4, scales = state.n > 1 and scales or nil } end }")
    local s = by_hand(6, { policy = file, policy_options = {} })
    assert.matches("session: policy later sets scales per layer", s:close().stopped)
  end)

  it("can be attached to, and verified by a replay", function()
    local job = helper.write(folder .. "/job.lua", [[
local engine = require "engine"
engine.seed(1)
local model = engine.nn.linear(4, 1)
local opt = engine.optim.sgd(model, { lr = 1e-3, precision = "fp16" })
local s = engine.session { optimizer = opt, run = arg[1], policy = "dynamic:growth_interval=9",
  log = "quiet", resume = arg[3] }
for _ in s:turns(tonumber(arg[2])) do
  s:backward(s:autocast(function()
    return engine.mse(model(engine.ones(2, 4)), engine.ones(2, 1)) end))
  s:step()
end
print(s:close().stopped, s:close().steps)
]])
    local run = folder .. "/job"
    local program = helper.quote(helper.engine)
    local made = helper.shell(table.concat({
      ("%s %s %s 100000000 >%s/out 2>&1 & p=$!"):format(program, job, run, folder),
      ("for i in $(seq 200); do [ -S %s/attach.sock ] && break; sleep 0.02; done"):format(run),
      [[echo 'policy:swap("static:loss_scale=4")
run:set("lr", 0.5)
run:stop("seen")' | timeout 20 ]] .. program .. " attach " .. run,
      "wait $p", ("cat %s/out"):format(folder) }, "\n"))
    assert.matches("seen", made.out)
    local list = events(run, "swap")
    assert.equal(1, #list, made.out .. made.err)
    assert.matches("attached", list[1].text)
    assert.equal(1, #events(run, "set"))
    run = folder .. "/short"
    assert.equal(0, helper.run({ job, run, "40" }).code)
    local verified = helper.run { "replay", run, "--policy", "dynamic", "growth_interval=9",
      "--verify" }
    assert.equal(0, verified.code, verified.out .. verified.err)
  end)
end)
