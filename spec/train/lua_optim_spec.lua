-- Optimizers written in Lua: engine.optim.register, and those of lua/engine/optim against the
-- numbers of their originals (spec/golden/optimizers.json, written by spec/parity/optim.py).
local engine = require "engine"
local helper = require "spec.helper"
local json = require "engine.base.json"

local nn, optim = engine.nn, engine.optim

-- AdamW in Lua, in the order of the core's operations
optim.register("spec_adamw", {
  defaults = { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2 },
  buffers = { "m", "v" },
  update = function(p, ctx)
    p.m = p.m + (p.grad - p.m) * (1 - ctx.beta1)
    p.v = p.v * ctx.beta2 + p.grad * (1 - ctx.beta2) * p.grad
    local size = p.v:sqrt() / math.sqrt(1 - ctx.beta2 ^ ctx.t) + ctx.eps
    p.weight = p.weight * (1 - ctx.lr * ctx.weight_decay)
    p.weight = p.weight - p.m * (ctx.lr / (1 - ctx.beta1 ^ ctx.t)) / size
  end,
})
-- writes in place, and keeps a count and, for matrices, a row
local calls = 0
optim.register("spec_inplace", {
  doc = "A test.",
  defaults = { lr = 0.1, weight_decay = 0, warm = false, how = "plain" },
  buffers = { "last", count = function() return { 1 } end,
    row = function(shape, p, options)
      local wanted = #shape == 2 and p.role ~= "embedding" and options.how == "plain"
      return wanted and { shape[2] } or nil
    end },
  check = function(o) return o.lr > 10 and "expected lr of 10 or less, got " .. o.lr or nil end,
  update = function(p, ctx)
    calls = calls + 1
    p.count:copy(p.count + 1)
    if p.row then p.row:copy(p.row + p.grad:mean(1)) end
    p.weight:copy(p.weight - p.grad * ctx.lr)
    p.last:copy(p.grad)
  end,
})

local function vector(values)
  return engine.tensor(values, { keep = true, requires_grad = true })
end

local text = {}
for i = 1, 4000 do text[i] = string.char(32 + i * i % 89) end

local function train(name, options, more)
  engine.seed(7)
  local model = nn.gpt { vocab = 256, context = 16, width = 32, heads = 2, layers = 2 }
  local o = { model = model, optimizer = optim[name](model, options), log = "quiet", steps = 12,
    data = engine.data.text { text = table.concat(text), batch = 2, context = 16, seed = 9 } }
  for key, value in pairs(more or {}) do o[key] = value end
  local trainer = engine.trainer(o)
  return trainer, trainer:run()
end

-- All weights and the whole state of a trainer's optimizer, as numbers.
local function everything(trainer)
  local all = { updates = trainer.optimizer.updates }
  for name, x in pairs(trainer.model:state()) do all[name] = x:detach():view(-1):totable() end
  for name, x in pairs(trainer.optimizer:state_tensors()) do
    all["state " .. name] = x:view(-1):totable()
  end
  return all
end

-- ------------------------------------------------------------------ register

describe("an optimizer written in Lua", function()
  local folder
  before_each(function() folder = helper.folder() end)
  after_each(function()
    engine.end_step()
    helper.remove(folder)
  end)

  it("trains as the fused kernel does, in every precision, with clip and accumulate", function()
    for _, case in ipairs { { "fp32", {} }, { "bf16", { clip = 0.5 } },
      { "fp16", { clip = 0.5, clip_value = 0.01, accumulate = 2, policy = "dynamic" } } } do
      local options = { lr = 1e-2, precision = case[1], decay = "matrices",
        groups = { { match = "mlp", lr_mul = 0.5, beta1 = 0.8 } } }
      local a, fused = train("adamw", options, case[2])
      local b, ours = train("spec_adamw", options, case[2])
      assert.near(fused.loss, ours.loss, case[1] == "fp32" and 1e-5 or 2e-3, case[1])
      assert.equal(a.skipped, b.skipped)
      assert.equal(a.updates, b.updates)
      for k, row in ipairs(a.optimizer:memory()) do
        assert.equal(row.measured, b.optimizer:memory()[k].measured, row.role)
        assert.near(row.measured, row.predicted, 64 * 200, row.role)
      end
    end
  end)

  it("refreshes the low-precision weights and divides by relative scales", function()
    local w = vector { 1, 2 }
    local opt = optim.spec_inplace({ w }, { precision = "fp16", lr = 0.5 })
    local scale = require("engine.base.ffi").new("double[1]", 4)
    require("engine.base.ffi").C.eng_params_relative_scale(opt.params, scale)
    engine.begin_step()
    opt:zero_grad()
    ;(w * 8):sum():backward()
    assert.same({ 32, 32 }, w.grad:to("f32"):totable())
    opt:step { gradient_factor = 1 / 2 }           -- 32 / 4 / 2
    assert.same({ -1, 0 }, w:totable())
    local low = require("engine.base.ffi").Tensor()
    require("engine.base.ffi").C.eng_params_low(low, opt.params, 0)
    assert.same({ "f16", { -1, 0 } }, { low.dtype, low:totable() })
    assert.same({ 4, 4 }, opt:state_tensors()["p1.last"]:totable())
    assert.same({ 32, 32 }, w.grad:to("f32"):totable())    -- the gradient stays as it was
  end)

  it("keeps a buffer where its shape function returns a shape, and describes itself", function()
    local net = nn.sequential { nn.linear(3, 2), nn.embedding(4, 3) }
    local opt = optim.spec_inplace(net, { moments = "bf16",
      groups = { { match = "^2", how = "other" } } })
    local found = {}
    for name, x in pairs(opt:state_tensors()) do
      found[name] = x.dtype .. " " .. table.concat(x.shape, "x")
    end
    assert.same({ ["1.weight.last"] = "bf16 2x3", ["1.weight.count"] = "f32 1",
      ["1.weight.row"] = "f32 3", ["1.bias.last"] = "bf16 2", ["1.bias.count"] = "f32 1",
      ["2.weight.last"] = "bf16 4x3", ["2.weight.count"] = "f32 1" }, found)
    assert.equal("spec_inplace: 3 parameters, 20 elements, 0 updates, lr 0.1, precision fp32\n" ..
      "  A test.\n  all: 2 tensors, how plain, warm false, weight_decay 0\n" ..
      "  group 1: 1 tensor, how other, warm false, weight_decay 0", tostring(opt))
  end)

  it("does not update a parameter without gradient, and leaves no tensors behind", function()
    local a, b = vector { 1 }, vector { 2 }
    local opt = optim.spec_inplace { a, b }
    local before = calls
    for t = 1, 3 do
      engine.begin_step()
      opt:zero_grad()
      ;(t < 3 and a or a + b):sum():backward()
      local used = engine.memory().tensors and engine.memory().tensors.used
      opt:step()
      assert.equal(used, engine.memory().tensors and engine.memory().tensors.used)
      engine.end_step()
    end
    assert.equal(4, calls - before)
    local state = opt:state_tensors()
    assert.same({ 3, 1 }, { state["p1.count"]:item(), state["p2.count"]:item() })
  end)

  it("frees its buffers with the optimizer, also while the tape has operations", function()
    local function used() return engine.memory().kept.used end
    local w, other, before = vector { 1, 2 }, optim.spec_inplace { vector { 1 } }, nil
    optim.sgd { w }                                  -- adopts w
    for turn = 1, 4 do
      collectgarbage()
      collectgarbage()
      other:step()                                   -- frees what could not be freed before
      before = before or used()
      assert.equal(before, used())
      local opt = optim.spec_inplace { w }
      opt:state_tensors()
      assert.is_true(used() > before)
      local loss = turn > 1 and (w * w):sum()
      opt = nil    -- luacheck: ignore
      collectgarbage()
      collectgarbage()
      assert.equal(turn > 1, used() > before)
      if loss then loss:backward() end
      engine.end_step()
    end
  end)

  it("keeps COAT's moments in FP8, expanded to the range of e4m3", function()
    local net = nn.linear(40, 10, { bias = false })
    local coat, plain = optim.coat(net, { lr = 0 }), optim.adamw(net, { lr = 0 })
    for _ in engine.steps(1) do
      coat:zero_grad()
      net(engine.randn(4, 40) * 1e-3):square():sum():backward()
      plain:step()
      coat:step()
    end
    local got, want, bytes = coat:state_tensors(), plain:state_tensors(), 0
    for which = 1, 2 do
      local codes, scale = got["weight.moment" .. which], got["weight.scale" .. which]
      assert.same({ "e4m3", 512 }, { codes.dtype, codes.count })
      assert.equal(0, codes:to("f32"):view(-1):slice(1, 401, 512):abs():sum():item())
      bytes = bytes + codes.count + 4 * scale.count
      local q, s = codes:to("f32"):totable(), scale:totable()
      local x = want["weight.moment" .. which]:view(-1):totable()
      for i, exact in ipairs(x) do
        local g, at = math.floor((i - 1) / 128) + 1, (i - 1) % 128 + 1
        local k, middle, unit = unpack(s[g])
        local size = (math.abs(q[g][at]) * unit) ^ (1 / k) * middle
        -- half a unit of e4m3: 1/16 of the expanded number, or half of 2^-9
        local off = math.max(1 / 16, 2 ^ -10 / math.abs(q[g][at]))
        assert.near(1, size / math.abs(exact), (1 + off) ^ (1 / k) - 0.99)
        assert.is_true(k % (1 / 16) == 0 and k >= 1 / 16)
      end
    end
    assert.is_true(bytes <= 2.2 * 512)
  end)

  it("resumes bit for bit at every step", function()
    for _, name in ipairs { "spec_inplace", "muon", "adafactor", "stableadamw", "lamb",
      "coat" } do
      local options = { lr = 1e-2, precision = "fp16",
        moments = name == "lamb" and "bf16" or "f32" }
      local whole = everything((train(name, options, { steps = 5 })))
      local part
      for steps = 1, 5 do
        part = train(name, options, { steps = steps, run = folder .. "/" .. name, resume = "auto",
          attach = false, policy = "dynamic:init_scale=2^10" })
      end
      part = everything(part)
      for key, value in pairs(everything((train(name, options, { steps = 5,
        policy = "dynamic:init_scale=2^10" })))) do
        assert.same(value, part[key], name .. ": " .. key)
      end
      assert.same(whole.updates, part.updates)
    end
  end)

  it("resumes bit for bit where a parameter's first gradient comes after the resume", function()
    local function run(steps, resume)
      engine.seed(2)
      local net = nn.sequential { nn.linear(3, 3), nn.linear(3, 3), nn.linear(3, 2) }
      local trainer = engine.trainer { model = net, optimizer = optim.spec_inplace(net),
        steps = steps, log = "quiet", attach = false, run = resume and folder .. "/late",
        resume = resume and "auto", restart_data = true, state = { n = 0 },
        data = { next = function() return { x = engine.ones(2, 3), y = engine.zeros(2, 2) } end },
        loss = function(m, batch) return engine.mse(m[3](m.late and m[2](m[1](batch.x))
          or m[1](batch.x)), batch.y) end,
        on_step = function(t)
          t.state.n = t.state.n + 1
          rawset(net, "late", t.state.n >= 3)
        end }
      rawset(net, "late", trainer.state.n >= 3)
      trainer:run()
      return everything(trainer)
    end
    local whole, part = run(6), nil
    for steps = 2, 6, 2 do part = run(steps, true) end
    assert.same(whole, part)
    assert.same({ { 3 }, { 6 } }, { part["state 2.weight.count"], part["state 1.weight.count"] })
  end)

  it("is left alone by a skipped step: an overflow never enters Muon's momentum", function()
    for _, name in ipairs { "muon", "adafactor", "stableadamw", "lamb", "coat" } do
      local trainer = train(name, { precision = "fp16", lr = 1e-2 },
        { policy = "dynamic:init_scale=2^40", steps = 40 })
      assert.is_true(trainer.skipped > 5 and trainer.updates > 5, name)
      assert.equal(40, trainer.skipped + trainer.updates)
      for key, x in pairs(trainer.optimizer:state_tensors()) do
        assert.equal(0, (x:to("f32") * 0):sum():item(), key)                  -- finite
      end
      -- in an explicit loop
      local w = vector { { 1, 2 }, { 3, 4 } }
      local opt, scaler = optim[name]({ w }), engine.scaler { init_scale = 4 }
      local function step(factor)
        engine.begin_step()
        opt:zero_grad()
        scaler:scale((w * factor):sum()):backward()
        local result = scaler:step(opt)
        scaler:update()
        engine.end_step()
        return result.skipped
      end
      assert.is_false(step(1))
      local before, weights = {}, w:totable()
      for key, x in pairs(opt:state_tensors()) do before[key] = x:totable() end
      assert.is_true(step(math.huge))
      assert.is_true(step(0 / 0))
      for key, x in pairs(opt:state_tensors()) do assert.same(before[key], x:totable()) end
      assert.same(weights, w:totable())
      assert.equal(1, opt.updates)
      assert.is_false(step(1))
    end
  end)

  it("cannot be used after an update that failed halfway, until a state is loaded", function()
    local fails = false
    optim.register("spec_fails", { defaults = { lr = 1 }, buffers = { "m" },
      update = function(p)
        if fails and p.name == "p2" then p.weight = p.weigth end
        p.weight, p.m = p.weight - p.grad, p.m + 1
      end })
    local a, b = vector { 1 }, vector { 2 }
    local opt = optim.spec_fails { a, b }
    ;(a + b):sum():backward()
    opt:step()
    local saved = {}
    for name, x in pairs(opt:state_tensors()) do saved[name] = x:keep() end
    fails = true
    assert.error_matches(function() opt:step() end,
      "p, the first argument of update, has no 'weigth'; did you mean 'weight'?", 1, true)
    assert.equal(1, opt.updates)
    for _, f in ipairs { function() opt:step() end, function() opt:state_tensors() end } do
      assert.error_matches(f, "optim.spec_fails: an update failed halfway, so weights and " ..
        "buffers belong to different updates; hint: load a checkpoint", 1, true)
    end
    fails = false
    assert.is_false(pcall(opt.load_state, opt, {}, 1))
    assert.is_false(pcall(opt.step, opt))
    opt:load_state(saved, 1)
    opt:step()
    assert.equal(2, opt.updates)
  end)

  it("writes no checkpoint of a torn state", function()
    optim.register("spec_late", { defaults = { lr = 1 }, update = function(p, ctx)
      if ctx.t == 3 and p.name == "head.weight" or ctx.t == 3 and p.name:find("norm") then
        error("a bug")
      end
      p.weight = p.weight - p.grad * ctx.lr
    end })
    assert.error_matches(function()
      train("spec_late", { lr = 1e-3 }, { run = folder .. "/late", checkpoint_every = 1,
        attach = false })
    end, "a bug", 1, true)
    assert.same({ 1, 2 }, engine.checkpoint.steps(folder .. "/late/checkpoints"))
  end)

  it("lets an update exchange buffers, and computes in f32 under autocast", function()
    optim.register("spec_swap", { defaults = { lr = 1 }, buffers = { "a", "b", "was", "seen" },
      update = function(p)
        p.a, p.b = p.b, p.a
        p.was, p.seen = p.weight, p.weight:view(2, 1):view(2)
        p.weight = p.weight + 1
        p.a = p.a + p.grad:view(1, -1):matmul(p.grad:view(-1, 1)):view {}
      end })
    local w = vector { 1, 2 }
    local opt = optim.spec_swap { w }
    ;(w * engine.tensor { 1, 2 ^ -10 }):sum():backward()
    engine.autocast("bf16", function()
      opt:step()
      opt:step()
    end)
    local x = 1 + 2 ^ -20
    local state = opt:state_tensors()
    assert.same({ { x, x }, { x, x } }, { state["p1.a"]:totable(), state["p1.b"]:totable() })
    assert.same({ { 2, 3 }, { 2, 3 } }, { state["p1.was"]:totable(), state["p1.seen"]:totable() })
    assert.same({ 3, 4 }, w:totable())
  end)

  it("is refused in lagged mode", function()
    assert.error_matches(function() train("muon", {}, { mode = "lagged" }) end, "mode=lagged: " ..
      "the device decides whether to update, and optimizer muon is written in Lua; hint: mode=sync",
      1, true)
    local w = vector { 1 }
    local opt = optim.muon { w }
    assert.error_matches(function() opt:step { lagged = true } end, "optim.muon: in " ..
      "mode=lagged the device decides whether to update", 1, true)
  end)
end)

-- ------------------------------------------------------------------ against the originals

describe("an optimizer with an original", function()
  local golden = json.decode(helper.read "spec/golden/optimizers.json")
  local runs = dofile "spec/parity/optim_runs.lua"
  local function tensor_of(key)
    return engine.tensor(golden.start[key]):view(golden.shapes[key])
  end
  for name, expected in pairs(golden.runs) do
    it("gives the original's numbers: " .. name, helper.in_step(function()
      local list = {}
      for key in pairs(expected) do
        list[#list + 1] = { name = key, tensor = tensor_of("w." .. key):keep():requires_grad() }
      end
      table.sort(list, function(a, b) return a.name < b.name end)
      local opt = optim[runs[name][1]](list, runs[name][2])
      for t = 1, golden.steps do
        opt:zero_grad()
        for _, p in ipairs(list) do
          local w = p.tensor
          ;((w * tensor_of("g." .. p.name):select(1, t)):sum() + (w * w):sum() * 0.05):backward()
        end
        opt:step()
      end
      for _, p in ipairs(list) do
        for i, value in ipairs(p.tensor:view(-1):totable()) do
          assert.near(expected[p.name][i], value, 1e-6, p.name)
        end
      end
    end))
  end

  it("may leave parameters to another: Muon gives embeddings, vectors and chosen groups to AdamW",
    function()
    engine.seed(1)
    local net = nn.sequential { nn.linear(3, 4), nn.embedding(5, 3), nn.linear(4, 2) }
    local opt = optim.muon(net, { groups = { { match = "^3", adamw = true } } })
    local kinds = {}
    for name in pairs(opt:state_tensors()) do
      local of, buffer = name:match "^(.*)%.(%w+)$"
      kinds[of] = (kinds[of] or "") .. (buffer == "momentum" and "muon" or "adamw")
    end
    assert.same({ ["1.weight"] = "muon", ["1.bias"] = "adamwadamw", ["2.weight"] = "adamwadamw",
      ["3.weight"] = "adamwadamw", ["3.bias"] = "adamwadamw" }, kinds)
  end)
end)

-- ------------------------------------------------------------------ complete programs

describe("in under 40 lines", function()
  local folder
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  local function program(name, code)
    assert.is_true(select(2, code:gsub("\n", "")) < 40)
    return helper.write(folder .. "/" .. name, code)
  end
  local function run(...)
    local result = helper.run { ... }
    assert.equal(0, result.code, result.out .. result.err)
    return result.out
  end

  it("a GAN trains two optimizers with one scaler", function()
    local out = run(program("gan.lua", [[
      local engine = require "engine"
      local nn = engine.nn
      engine.seed(1)
      local function net(inputs, outputs)
        local Net = nn.class "Net"
        function Net:init()
          self.a, self.b = nn.linear(inputs, 32), nn.linear(32, outputs)
        end
        function Net:forward(x) return self.b(self.a(x):gelu()):to "f32" end
        return Net()
      end
      local G, D = net(4, 2), net(2, 1)
      local g_opt = engine.optim.muon(G, { lr = 2e-3, precision = "fp16" })
      local d_opt = engine.optim.stableadamw(D, { lr = 2e-3, precision = "fp16" })
      local scaler = engine.scaler { policy = "dynamic", init_scale = 2^20, growth_interval = 50 }
      local skipped = 0
      local function update(opt, loss)
        g_opt:zero_grad() d_opt:zero_grad()
        scaler:scale(loss()):backward()
        if scaler:step(opt).skipped then skipped = skipped + 1 end
        scaler:update()
      end
      local distance
      for step in engine.steps(300) do
        engine.autocast("fp16", function()
          local z, real = engine.randn(64, 4), engine.randn(64, 2) * 0.3 + 2
          update(d_opt, function()
            return (D(G(z):detach())):softplus():mean() + (-D(real)):softplus():mean()
          end)
          update(g_opt, function() return (-D(G(z))):softplus():mean() end)
          distance = math.abs(G(engine.randn(512, 4)):detach():mean():item() - 2)
          if step == 1 or step == 300 then print(step, distance) end
        end)
      end
      print("skipped", skipped, "updates", g_opt.updates, d_opt.updates)
    ]]))
    local first, last = out:match "1%s+(%S+)%s+300%s+(%S+)"
    assert.is_true(tonumber(last) < 0.5 * tonumber(first), out)
    local skipped, g, d = out:match "skipped%s+(%d+)%s+updates%s+(%d+)%s+(%d+)"
    assert.is_true(tonumber(skipped) > 0)
    assert.equal(600, skipped + g + d)
  end)

  it("a custom optimizer with buffers resumes bit for bit", function()
    local path = program("own.lua", [[
      local engine = require "engine"
      local cfg = engine.config { run = "", resume = "", steps = 8 }
      engine.optim.register("signed", {
        doc = "The sign of a momentum, with a second, slower momentum.",
        defaults = { lr = 1e-3, fast = 0.9, slow = 0.99, weight_decay = 0 },
        buffers = { "quick", "steady" },
        update = function(p, ctx)
          p.quick = p.quick * ctx.fast + p.grad * (1 - ctx.fast)
          p.steady = p.steady * ctx.slow + p.grad * (1 - ctx.slow)
          local way = p.quick + p.steady
          p.weight = p.weight * (1 - ctx.lr * ctx.weight_decay)
            - way / (way:abs() + 1e-12) * ctx.lr
        end,
      })
      engine.seed(1)
      local model = engine.nn.gpt { vocab = 256, context = 16, width = 32, heads = 2, layers = 2 }
      local trainer = engine.trainer { model = model, steps = cfg.steps, log = "quiet", clip = 1,
        data = engine.data.text { path = "README.md", batch = 2, context = 16 },
        optimizer = engine.optim.signed(model, { precision = "fp16" }),
        run = cfg.run, resume = cfg.resume, attach = false, state = { best = math.huge } ,
        on_step = function(t, record) t.state.best = math.min(t.state.best, record.loss) end }
      local summary = trainer:run()
      local C = require("engine.base.ffi").C
      print(("%.17g %.17g %s"):format(summary.loss, trainer.state.best,
        tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0))))
    ]])
    local whole = run(path)
    for steps = 2, 8, 3 do
      local out = run(path, "run=" .. folder .. "/run", "resume=auto", "steps=" .. steps)
      if steps == 8 then assert.equal(whole, out) end
    end
  end)
end)

-- ------------------------------------------------------------------ misuse

describe("register refuses", function()
  local function spec(changes)
    local t = { defaults = { lr = 1 }, update = function() end }
    for key, value in pairs(changes) do t[key] = value ~= "nothing" and value or nil end
    return t
  end
  local nan = tostring(0 / 0)
  local cases = {
    { "a b", spec {}, "expected a name of letters, digits and _, with no digit first, got 'a b'" },
    { 5, spec {}, "expected a name of letters, digits and _, with no digit first, got 5" },
    { "x", 5, "expected a table for 'x', got 5" },
    { "adamw", spec {}, "engine.optim.adamw exists already; hint: another name" },
    { "muon", spec {}, "engine.optim.muon exists already; hint: another name" },
    { "register", spec {}, "engine.optim.register exists already; hint: another name" },
    { "x", spec { bufers = {} }, "unknown field 'bufers' of 'x'; did you mean 'buffers'?; " ..
      "fields: buffers check defaults doc update" },
    { "x", spec { update = "nothing" }, "expected update of 'x' to be a function, got nothing" },
    { "x", spec { defaults = 5 }, "expected defaults of 'x' to be a table, got 5" },
    { "x", spec { defaults = {} },
      "expected lr in the defaults of 'x' to be a number, got nothing" },
    { "x", spec { defaults = { lr = 1, f = print } },
      "expected f of 'x' to be a number, boolean or string, got a function" },
    { "x", spec { defaults = { lr = 1, groups = 1 } },
      "'groups' cannot be the name of a hyperparameter of 'x'; reserved names: betas " ..
        "decay groups label lr_mul match moments precision t" },
    { "x", spec { defaults = { lr = 1, "a" } },
      "'1' cannot be the name of a hyperparameter of 'x'; expected letters, digits and _, with " ..
      "no digit first" },
    { "x", spec { buffers = { "m", "m" } },
      "'m' cannot be the name of a buffer of 'x': it is listed twice" },
    { "x", spec { buffers = { "weight" } },
      "'weight' cannot be the name of a buffer of 'x': every parameter has a field of that name" },
    { "x", spec { buffers = { 5 } }, "5 cannot be the name of a buffer of 'x'; expected " ..
      "letters, digits and _, with no digit first" },
    { "x", spec { buffers = { m = { 1 } } },
      "expected buffer 'm' of 'x' to be a function(shape) that returns the buffer's shape, or " ..
      "{ shape = such a function, dtype = }, got a table" },
    { "x", spec { check = 1 }, "expected check of 'x' to be a function, got 1" },
  }
  for _, case in ipairs(cases) do
    it(case[3], function()
      local _, message = pcall(optim.register, case[1], case[2])
      assert.equal("optim.register: " .. case[3], (message:gsub("^[^:\n]+:%d+: ", "")))
    end)
  end

  local uses = {
    { { lrr = 1 }, "unknown option 'lrr'; did you mean 'lr'?; options: decay groups how lr " ..
      "moments precision warm weight_decay" },
    { { lr = "fast" }, "expected lr to be a finite number >= 0, got 'fast'" },
    { { lr = 0 / 0 }, "expected lr to be a finite number >= 0, got " .. nan },
    { { warm = 1 }, "expected warm to be a boolean, got 1" },
    { { how = false }, "expected how to be a string, got false" },
    { { weight_decay = -1 }, "expected weight_decay to be a finite number >= 0, got -1" },
    { { lr = 11 }, "expected lr of 10 or less, got 11" },
    { { groups = { { match = "x", warn = true } } },
      "group 1: unknown option 'warn'; did you mean 'warm'?" },
  }
  for _, case in ipairs(uses) do
    it(case[2], function()
      local _, message = pcall(optim.spec_inplace, { vector { 1 } }, case[1])
      assert.equal("optim.spec_inplace: " .. case[2], (message:gsub("^[^:\n]+:%d+: ", "")))
    end)
  end

  it("what an update must not do", function()
    local function fails(update, expected, buffers)
      optim.register("spec_bad", { defaults = { lr = 1 }, buffers = buffers or { "m" },
        update = update })
      local w = vector { 1, 2 }
      local good, message = pcall(function()
        local opt = optim.spec_bad { w }
        ;(w * 1):sum():backward()
        opt:step()
      end)
      engine.end_step()
      assert.is_false(good)
      assert.matches(expected, message, 1, true)
      assert.same({ 1, 2 }, w:totable())
    end
    fails(function(p) p.m = 5 end, "optim.spec_bad: expected p1's m to be a tensor, got 5")
    fails(function(p) p.weight = nil end,
      "optim.spec_bad: expected p1's weight to be a tensor, got nothing")
    fails(function(p) p.weight = p.weight:sum() end,
      "optim.spec_bad: expected p1's weight to keep its shape [2], got []")
    fails(function(p) p.m = p.m:to "f16" end, "optim.spec_bad: expected p1's m to be f32, got f16")
    fails(function(_, ctx) return ctx.bata end, "ctx, the second argument of update, has no 'bata'")
    fails(function(p) return p.nn + 1 end, "p, the first argument of update, has no 'nn'")
    fails(function() end, "expected the shape of buffer 'm' of p1 to be nil, or a list of at " ..
      "most 6 whole numbers of 0 or more, got a table with other entries",
      { m = function() return { 1.5 } end })
    fails(function() end, "expected the shape of buffer 'm' of p1 to be nil, or a list of at " ..
      "most 6 whole numbers of 0 or more, got 5", { m = function() return 5 end })
  end)

  it("decay where there is no weight_decay, and values that built-in optimizers exclude", function()
    optim.register("spec_plain", { defaults = { lr = 1 }, update = function() end })
    local function fails(name, options, expected)
      local _, message = pcall(optim[name], { vector { 1 } }, options)
      assert.matches(expected, message, 1, true)
    end
    fails("spec_plain", { decay = "matrices" }, "optim.spec_plain: the option decay needs an " ..
      "optimizer with weight_decay, and this one has none")
    fails("muon", { ns_steps = 1.5 },
      "expected ns_steps to be a whole number from 0 to 99, got 1.5")
    fails("muon", { ns_dtype = "f16" }, "expected ns_dtype to be f32 or bf16, got 'f16'")
    fails("muon", { adjust_lr = "spectral" }, "expected adjust_lr to be original, " ..
      "match_rms_adamw, spectral_unclamped or none, got 'spectral'")
    fails("muon", { ns_a = 0 / 0 }, "expected ns_a to be a finite number")
    fails("muon", { momentum = 1 }, "expected momentum to be in [0, 1), got 1")
    fails("adafactor", { d = 0.5 }, "expected d to be 1 or more, got 0.5")
    fails("adafactor", { beta2_decay = 1 }, "expected beta2_decay to be 0 or less, got 1")
    fails("lamb", { limit = 0 }, "expected limit to be above 0, got 0")
    fails("stableadamw", { beta2 = 1 }, "expected beta2 to be in [0, 1), got 1")
  end)
end)
