-- Optimizers: the formulas against plain Lua loops; groups and decay, clipping, state, several
-- optimizers of one model, and the errors for misuse.
local engine = require "engine"
local fused_state = require "engine.train.fused_state"
local helper = require "spec.helper"
local nearest = require "engine.base.nearest"

local nn = engine.nn
local optim = engine.optim

-- ------------------------------------------------------------------ the formulas

-- Each formula returns the new element i of a parameter: o holds the options; w, g and memory hold
-- the old weights, the gradient and the optimizer's state as lists; t is the step, from 1.
local formulas = {
  sgd = function(o, w, g, memory, _, i)
    local gradient = g[i] + o.weight_decay * w[i]
    if o.momentum > 0 then
      local first = memory.m[i] == nil
      memory.m[i] = first and gradient or o.momentum * memory.m[i] + (1 - o.dampening) * gradient
      gradient = o.nesterov and gradient + o.momentum * memory.m[i] or memory.m[i]
    end
    return w[i] - o.lr * gradient
  end,
  adam = function(o, w, g, memory, t, i)
    local gradient = g[i] + o.weight_decay * w[i]
    memory.m[i] = o.beta1 * (memory.m[i] or 0) + (1 - o.beta1) * gradient
    memory.v[i] = o.beta2 * (memory.v[i] or 0) + (1 - o.beta2) * gradient ^ 2
    return w[i] - o.lr * memory.m[i] / (1 - o.beta1 ^ t) / (
      math.sqrt(memory.v[i] / (1 - o.beta2 ^ t)) + o.eps)
  end,
  adamw = function(o, w, g, memory, t, i)
    memory.m[i] = o.beta1 * (memory.m[i] or 0) + (1 - o.beta1) * g[i]
    memory.v[i] = o.beta2 * (memory.v[i] or 0) + (1 - o.beta2) * g[i] ^ 2
    return w[i] * (1 - o.lr * o.weight_decay) - o.lr *
      memory.m[i] / (1 - o.beta1 ^ t) / (math.sqrt(memory.v[i] / (1 - o.beta2 ^ t)) + o.eps)
  end,
  lion = function(o, w, g, memory, _, i)
    local m = memory.m[i] or 0
    local direction = o.beta1 * m + (1 - o.beta1) * g[i]
    memory.m[i] = o.beta2 * m + (1 - o.beta2) * g[i]
    return w[i] * (1 - o.lr * o.weight_decay) - o.lr * (direction > 0 and 1 or direction < 0 and -1
      or 0)
  end,
}

local START, SLOPE = { 0.5, -1.25, 2 }, { 1.5, -0.3, 0.01 }

-- loss = sum(slope * w^2 / 2) * factor, so that the gradient is slope * w * factor
local function gradient_of(w, t)
  local g = {}
  for i = 1, 3 do g[i] = SLOPE[i] * w[i] * (1 + 0.1 * t) end
  return g
end

local function vector(values)
  return engine.tensor(values, { keep = true, requires_grad = true })
end

local function backward(w, t)
  (w * w * engine.tensor(SLOPE) * (0.5 * (1 + 0.1 * t))):sum():backward()
end

local function follow(kind, options)
  local w = vector(START)
  local opt = optim[kind]({ w }, options)
  local expected, memory = { unpack(START) }, { m = {}, v = {} }
  for t in engine.steps(5) do
    opt:zero_grad()
    backward(w, t)
    local g = gradient_of(expected, t)
    if options.change then options.change(opt, g, t) end
    opt:step()
    local o = setmetatable({ lr = opt.lr }, { __index = opt.groups[1] })
    local before = { unpack(expected) }
    for i = 1, 3 do expected[i] = formulas[kind](o, before, g, memory, t, i) end
    local got = w:totable()
    for i = 1, 3 do
      assert.near(expected[i], got[i], 2e-6 * math.abs(expected[i]) + 1e-7,
        ("%s: element %d after step %d"):format(kind, i, t))
    end
  end
  assert.equal(5, opt.updates)
end

describe("the formula of", function()
  after_each(function() engine.end_step() end)
  local cases = {
    sgd = { { lr = 0.1 }, { lr = 0.1, weight_decay = 0.2 }, { lr = 0.1, momentum = 0.9 },
      { lr = 0.1, momentum = 0.9, dampening = 0.3 },
      { lr = 0.1, momentum = 0.9, nesterov = true, weight_decay = 0.1 } },
    adam = { {}, { lr = 0.1, beta1 = 0.8, beta2 = 0.95, eps = 1e-3 },
      { lr = 0.1, weight_decay = 0.3 }, { lr = 0.05, betas = { 0.5, 0.6 } } },
    adamw = { {}, { lr = 0.1, weight_decay = 0.3 },
      { lr = 0.05, betas = { 0.5, 0.6 }, eps = 1e-2 } },
    lion = { {}, { lr = 0.01, weight_decay = 0.5 }, { lr = 0.02, beta1 = 0.5, beta2 = 0.6 } },
  }
  for kind, list in pairs(cases) do
    for k, options in ipairs(list) do
      it(("%s follows its paper, case %d"):format(kind, k),
        function() follow(kind, options) end)
    end
  end

  it("every fused optimizer has cases here, and a line in the reference", function()
    local text = helper.read("lua/engine/train/optim.lua")
    assert.matches("^sgd, adam, adamw.* and %l+$", fused_state.names "and")
    for _, row in ipairs(fused_state.kinds) do
      assert.is_table(cases[row.name], "cases of " .. row.name)
      assert.matches("\n%-%-%-   " .. row.name .. " +fused; ", text)
    end
  end)

  it("every optimizer follows lr as the script sets it", function()
    for kind in pairs(cases) do
      local w = vector(START)
      local opt = optim[kind]({ w }, { lr = 0.5 })
      backward(w, 1)
      opt.lr = 0
      opt:step()
      local same = w:totable()
      for i = 1, 3 do assert.equal(engine.tensor(START[i]):item(), same[i]) end
      opt:step { lr_mul = 3 }
      opt.lr = 0.1
      opt:step { lr_mul = 0.5 }
      assert.not_equal(START[1], w:totable()[1])
      engine.end_step()
    end
  end)
end)

-- ------------------------------------------------------------------ a step

local function model()
  local net = nn.sequential { nn.linear(2, 2), nn.layer_norm(2), nn.embedding(3, 2) }
  net[1].weight:fill(1)
  net[1].bias:fill(1)
  net[2].weight:fill(1)
  net[2].bias:fill(1)
  net[3].weight:fill(1)
  return net
end

-- runs backward from a loss whose gradient is 1 in every element, without the parameter `but`
local function ones(net, but)
  local sum
  for _, p in ipairs(net:parameters()) do
    if p.name ~= but then sum = sum and sum + p.tensor:sum() or p.tensor:sum() end
  end
  sum:backward()
end

local function values(net)
  local list = {}
  for _, p in ipairs(net:parameters()) do list[p.name] = p.tensor:view(-1):select(1, 1):item() end
  return list
end

local function near(expected, got)
  for name, value in pairs(expected) do assert.near(value, got[name], 1e-6, name) end
end

describe("an update", function()
  before_each(function() engine.begin_step() end)
  after_each(function() engine.end_step() end)

  it("leaves a parameter without gradient unchanged, decay included", function()
    local net = model()
    local opt = optim.adamw(net, { lr = 0.1, weight_decay = 0.5 })
    ones(net, "3.weight")
    opt:step()
    assert.equal(1, net[3].weight:view(-1):select(1, 1):item())
    assert.near(1 * 0.95 - 0.1, net[1].weight:view(-1):select(1, 1):item(), 1e-6)
  end)

  it("decay = 'matrices' spares biases and norms", function()
    local net = model()
    local opt = optim.adamw(net, { lr = 0.1, weight_decay = 0.5, decay = "matrices" })
    ones(net)
    opt:step()
    near({ ["1.weight"] = 0.85, ["1.bias"] = 0.9, ["2.weight"] = 0.9, ["2.bias"] = 0.9,
      ["3.weight"] = 0.85 }, values(net))
    assert.matches("adamw: 5 parameters, 16 elements, 1 update, lr 0.1, precision fp32\n  all: " ..
      "2 tensors, .*weight_decay 0.5\n  no decay: 3 tensors",
      tostring(opt))
  end)

  it("decay = 'all', the default, spares nothing", function()
    for _, decay in ipairs { "all", false } do
      local net = model()
      local opt = optim.adamw(net, { lr = 0.1, weight_decay = 0.5, decay = decay or nil })
      ones(net)
      opt:step()
      near({ ["1.weight"] = 0.85, ["1.bias"] = 0.85, ["2.bias"] = 0.85, ["3.weight"] = 0.85 },
        values(net))
    end
  end)

  it("reports its memory, measured on a loss function, also for a list of tensors", function()
    local x = engine.zeros(4, 64, { requires_grad = true })
    local rows = optim.sgd({ x }):memory(function() return x:exp():exp():sum() end)
    assert.equal(4 * 64 * 4, rows.masters.measured)
    assert.is_true(rows["kept for backward"].measured > 0)
  end)

  it("uses groups chosen by pattern or function; the first match wins", function()
    local net = model()
    local opt = optim.sgd(net, { lr = 0.1, groups = {
      { match = "^1%.", lr_mul = 2 }, { match = function(_, x) return x.ndim == 1 end, lr_mul = 0 },
      { match = "weight", weight_decay = 3 },
    } })
    ones(net)
    opt:step()
    near({ ["1.weight"] = 0.8, ["1.bias"] = 0.8, ["2.weight"] = 1, ["2.bias"] = 1,
      ["3.weight"] = 1 - 0.1 * 4 }, values(net))
    assert.matches("lr 0.1, precision fp32\n  group 1: 2 tensors, lr_mul 2, dampening 0, " ..
      "momentum 0, nesterov false, weight_decay 0\n", tostring(opt), 1, true)
    opt.lr = 1                                      -- lr_mul is a factor of the common rate
    opt:zero_grad()
    ones(net)
    opt:step()
    near({ ["1.weight"] = 0.8 - 2, ["2.weight"] = 1 }, values(net))
  end)

  it("names the parameters of a list that have no name", function()
    local x = engine.ones(2):requires_grad(true)
    local opt = engine.optim.adam({ engine.ones(2):requires_grad(true), { tensor = x } },
      { groups = { { match = "^p2$", lr_mul = 2 } } })
    assert.equal("p2", opt.list[2].name)
    assert.truthy(opt:state_tensors()["p2.moment1"])
  end)

  it("clips by norm, and returns the norm before clipping", function()
    local net = model()                             -- 16 elements with gradient 1: norm 4
    local opt = optim.sgd(net, { lr = 1 })
    ones(net)
    assert.near(4, opt:grad_norm(), 1e-6)
    assert.near(2, opt:grad_norm(2), 1e-6)          -- of scaled gradients
    assert.near(4, opt:clip_grad_norm(1), 1e-6)
    opt:step()
    near({ ["1.weight"] = 0.75, ["3.weight"] = 0.75 }, values(net))
    opt:zero_grad()
    ones(net)
    assert.near(4, opt:clip_grad_norm(5), 1e-6)     -- nothing to clip
    opt:step()
    near({ ["1.weight"] = -0.25 }, values(net))
    opt:zero_grad()                                 -- and the clip of the first step has no effect
    ones(net)
    opt:step()
    near({ ["1.weight"] = -1.25 }, values(net))
  end)

  it("ignores a clip that zero_grad cleared", function()
    local net = model()
    local opt = optim.sgd(net, { lr = 1 })
    ones(net)
    opt:clip_grad_norm(0.1)
    opt:clip_grad_value(0.1)
    opt:zero_grad()
    ones(net)
    opt:step()
    near({ ["1.weight"] = 0 }, values(net))
  end)

  it("clips by value, after unscaling", function()
    local net = model()
    local opt = optim.sgd(net, { lr = 1 })
    ;(net[1].weight * engine.tensor { { 8, -8 }, { 1, 0 } }):sum():backward()
    opt:clip_grad_value(0.5)
    opt:step { gradient_factor = 1 / 4 }
    assert.same({ { 0.5, 1.5 }, { 0.75, 1 } }, net[1].weight:totable())
    opt:step { gradient_factor = 1 / 4 }            -- once only
    assert.same({ { -1.5, 3.5 }, { 0.5, 1 } }, net[1].weight:totable())
    opt:step { gradient_factor = 1 / 4, clip_value = 1 }
    assert.same({ { -2.5, 4.5 }, { 0.25, 1 } }, net[1].weight:totable())
  end)

  it("says what a step's options must be", function()
    local net = nn.linear(2, 2)
    for _, case in ipairs {
      { { lr_muls = 3 }, "lr_muls to be an array of doubles, one for each parameter, got 3" },
      { { clips = { 1 } }, "clips to be an array of doubles, one for each parameter, got" },
      { { clip_norm = "a" }, "clip_norm to be a number, got 'a'" },
      { { lagged = 1 }, "lagged to be true or false, got 1" } } do
      local opt = optim.sgd(net, { lr = 0.1 })
      assert.error_matches(function() opt:step(case[1]) end, "step: expected " .. case[2])
    end
  end)

  it("sums backward passes until zero_grad clears the gradients", function()
    local net = model()
    local opt = optim.sgd(net, { lr = 1 })
    ones(net)
    ones(net)
    assert.equal(2, net[1].bias.grad:select(1, 1):item())
    opt:zero_grad()
    assert.is_nil(net[1].bias.grad)
    net:zero_grad()
    ones(net)
    assert.equal(1, net[1].bias.grad:select(1, 1):item())
    net:zero_grad()
    assert.is_nil(net[1].bias.grad)
  end)

  it("leaves frozen parameters unchanged", function()
    local net = model()
    net[1]:freeze()
    local opt = optim.sgd(net, { lr = 1 })
    assert.equal(3, #opt.list)
    local before = {}
    for i, p in ipairs(net:parameters()) do before[i] = p.tensor:totable() end
    ones(net)
    opt:step()
    local frozen = net[1]
    for i, p in ipairs(net:parameters()) do
      local own = p.tensor == frozen.weight or p.tensor == frozen.bias
      if own then assert.same(before[i], p.tensor:totable(), p.name)
      else assert.are_not.same(before[i], p.tensor:totable(), p.name) end
    end
    net[1]:freeze(false)
    assert.equal(5, #net:parameters())
  end)
end)

-- ------------------------------------------------------------------ state

describe("the state of an optimizer", function()
  after_each(function() engine.end_step() end)

  for k, row in ipairs(fused_state.kinds) do
    local kind, names = row.name, {}
    for which = 1, row.moments do names[which] = "w.moment" .. which end
    local options = { momentum = row.defaults.momentum and 0.9,
      dampening = row.defaults.dampening and 0.5, moments = k % 2 == 1 and "bf16" or nil }
    it("of " .. kind .. " is complete: a restored one continues bit for bit", function()
      local w = vector(START)
      local opt = optim[kind]({ { name = "w", tensor = w } }, options)
      local function advance(o, x, from, to)
        for t = from, to do
          engine.begin_step()
          o:zero_grad()
          backward(x, t)
          o:step()
          engine.end_step()
        end
      end
      advance(opt, w, 1, 3)
      local saved, weights, updates = {}, w:totable(), opt.updates
      for name, m in pairs(opt:state_tensors()) do saved[name] = m:keep() end
      assert.equal(options.moments or "f32", saved["w.moment1"].dtype)
      assert.same(names, nearest.keys(saved))
      advance(opt, w, 4, 6)

      local other = vector(weights)
      local fresh = optim[kind]({ { name = "w", tensor = other } }, options)
      fresh:load_state(saved, updates)
      advance(fresh, other, 4, 6)
      assert.same(w:totable(), other:totable())
      assert.equal(6, fresh.updates)
      for _, m in pairs(saved) do m:free() end
    end)
  end

  it("of plain SGD is empty", function()
    assert.same({}, optim.sgd({ vector(START) }, {}):state_tensors())
  end)

  it("that does not fit is refused, and nothing changes", function()
    local opt = optim.adam({ { name = "w", tensor = vector(START) } }, {})
    local good = { ["w.moment1"] = engine.full({ 3 }, 7), ["w.moment2"] = engine.full({ 3 }, 7) }
    local function with(changes)
      local t = { ["w.moment1"] = good["w.moment1"], ["w.moment2"] = good["w.moment2"] }
      for name, value in pairs(changes) do t[name] = value or nil end
      return t
    end
    local function refuses(tensors, updates, text)
      assert.error_matches(function() opt:load_state(tensors, updates) end, text, 1, true)
      assert.equal(0, opt:state_tensors()["w.moment1"]:sum():item())
      assert.equal(0, opt.updates)
    end
    refuses(with { ["w.moment2"] = false }, 3, "optimizer state: expected a tensor " ..
      "'w.moment2', got none; hint: the state may be of another optimizer or another model")
    refuses(with { ["w.moment2"] = engine.zeros(4) }, 3,
      "optimizer state: expected 'w.moment2' to have shape [3], got [4]")
    refuses(with { ["v.moment1"] = engine.zeros(3) }, 3,
      "optimizer state: this optimizer has no tensor 'v.moment1'; did you mean 'w.moment1'?")
    refuses(good, nil, "optimizer state: expected the number of updates to be a whole number of " ..
      "0 or more, got nothing")
    opt:load_state(good, 3)
    assert.equal(7, opt:state_tensors()["w.moment2"]:select(1, 3):item())
  end)
end)

describe("the parameters of a model", function()
  after_each(function() engine.end_step() end)

  it("outlive their optimizer, and may get a second optimizer", function()
    local net = model()
    local first = optim.adamw(net, { precision = "fp16" })
    local second = optim.sgd(net, { lr = 1, precision = "fp32" })
    assert.is_true(first.params == second.params)
    ones(net)
    second:step()
    near({ ["1.weight"] = 0, ["3.weight"] = 0 }, values(net))
    first, second = nil, nil    -- luacheck: ignore
    collectgarbage()
    collectgarbage()
    near({ ["1.weight"] = 0, ["3.weight"] = 0 }, values(net))
    engine.end_step()
    local third = optim.adam(net, { lr = 1 })
    ones(net)
    third:step()
    near({ ["1.weight"] = -1 }, values(net))
  end)

  it("outlive an optimizer given a list, too; part of the model gets no set of its own", function()
    local net = model()
    do optim.sgd(net:parameters(), { lr = 1 }) end
    collectgarbage()
    collectgarbage()
    near({ ["1.weight"] = 1 }, values(net))
    assert.error_matches(function() optim.sgd(net[1]) end,
      "parameter weight: this tensor f32 %[2 x 2%] is already parameter 1.weight of another " ..
      "optimizer; hint")
    assert.is_table(optim.sgd(net))
  end)
end)

-- ------------------------------------------------------------------ misuse

describe("an optimizer refuses", function()
  local cases = {
    { "optim.adamw(net, { lrr = 1 })",
      "optim.adamw: unknown option 'lrr'; did you mean 'lr'?; `engine help " ..
      "optim.adamw` lists the options" },
    { "optim.sgd(net, { beta1 = 0.9 })",
      "optim.sgd: unknown option 'beta1'; options: dampening decay groups lr moments " ..
      "momentum nesterov precision weight_decay" },
    { "optim.adam(net, { lr = -1 })",
      "optim.adam: expected lr to be a finite number >= 0, got -1" },
    { "optim.adam(net, { lr = 'fast' })",
      "optim.adam: expected lr to be a finite number >= 0, got 'fast'" },
    { "optim.adam(net, { lr = 0/0 })", "optim.adam: expected lr to be a finite number >= 0, got " ..
      tostring(0 / 0) },
    { "optim.adam(net, { beta2 = 1 })", "optim.adam: expected beta2 to be in [0, 1), got 1" },
    { "optim.lion(net, { betas = { 0.9 } })",
      "optim.lion: expected betas to be a list of two numbers, got a list of 1" },
    { "optim.lion(net, { betas = 0.9 })",
      "optim.lion: expected betas to be a list of two numbers, got 0.9" },
    { "optim.adam(net, { eps = 0 })",
      "optim.adam: expected eps to be a finite number no smaller than 2^-126 (smaller numbers " ..
      "may be 0 in f32), got 0" },
    { "optim.sgd(net, { nesterov = true })",
      "optim.sgd: nesterov needs a momentum above 0 and a dampening of 0, got momentum = 0 and " ..
        "dampening = 0" },
    { "optim.sgd(net, { nesterov = 'yes' })",
      "optim.sgd: expected nesterov to be true or false, got 'yes'" },
    { "optim.sgd(net, { decay = 'some' })",
      "optim.sgd: expected decay to be 'all' or 'matrices', got 'some'" },
    { "optim.sgd(net, { moments = 'f16' })",
      "optim.sgd: expected moments to be 'f32' or 'bf16', got 'f16'" },
    { "optim.sgd(net, 0.1)", "optim.sgd: expected a table of options, got 0.1" },
    { "optim.sgd(5)", "optim.sgd: expected a module or a list of tensors or of { name =, tensor " ..
      "= }, got 5" },
    { "optim.sgd { 5 }",
      "optim.sgd: expected entry 1 of the list to be a tensor or { name =, tensor = }, got 5" },
    { "optim.sgd {}", "optim.sgd: nothing to train: no parameter requires a gradient; " ..
      "hint: requires_grad(true) on the tensors to train" },
    { "optim.sgd { engine.zeros(2) }",
      "optim.sgd: nothing to train: no parameter requires a gradient; " ..
      "hint: requires_grad(true) on the tensors to train" },
    { "optim.sgd { engine.zeros(2, { dtype = 'f16', requires_grad = true }) }",
      "parameter p1: expected f32 or bf16 master weights, got f16 [2]; hint: keep the " ..
      "weights in f32; a precision recipe such as fp16 makes low-precision copies of them" },
    { "optim.sgd(net, { groups = { { lr_mul = 2 } } })",
      "optim.sgd: expected group 1 to have match = a pattern or a function(name, tensor), got " ..
      "match = nothing" },
    { "optim.sgd(net, { groups = { match = 'x' } })", "optim.sgd: expected groups to be a list, " ..
      "such as { { match = \"bias\", weight_decay = 0 } }, got a table with the field 'match'" },
    { "optim.sgd(net, { groups = { { match = 'x', lr = 2 } } })",
      "optim.sgd: group 1: a group cannot set lr; hint: lr_mul = a factor on the optimizer's lr" },
    { "optim.sgd(net, { groups = { { match = 'x', momentun = 2 } } })",
      "optim.sgd: group 1: unknown option 'momentun'; did you mean 'momentum'?" },
    { "optim.sgd(net, { groups = { { match = 'x', lr_mul = -1 } } })",
      "optim.sgd: group 1: expected lr_mul to be a finite number >= 0, got -1" },
    { "optim.sgd(net, { groups = { { match = 'weigth$', lr_mul = 2 } } })",
      "optim.sgd: group 1: match = 'weigth$' matches no parameter; did you mean 'weight'?; " ..
      "parameters: weight bias" },
    { "optim.sgd(net, { groups = { { match = 'bias' }, { match = function() end } } })",
      "optim.sgd: group 2: match = a function matches no parameter; parameters: weight bias" },
    { "optim.adamv(net)", "engine.optim has no 'adamv'; did you mean 'adam'?" },
    { "opt:load_state(nil, 1)",
      "optimizer state: expected a table { name = tensor }, got nothing" },
    { "opt:clip_grad_norm(0)", "clip_grad_norm: expected a limit > 0, got 0" },
    { "opt:clip_grad_value('a')", "clip_grad_value: expected a limit > 0, got 'a'" },
    { "opt:step { gradient_fact = 2 }",
      "step: unknown option 'gradient_fact'; did you mean 'gradient_factor'?; " ..
      "`engine help step` lists the options" },
    { "(function() opt.lr = 0/0 opt:step() end)()",
      "optim.sgd: expected lr to be a finite number >= 0, got " .. tostring(0 / 0) },
  }
  for _, case in ipairs(cases) do
    it(case[1], function()
      engine.begin_step()
      local net = nn.linear(2, 2)
      local opt = optim.sgd({ engine.zeros(2, { requires_grad = true }) })
      local chunk = assert(loadstring("local y = " .. case[1] .. "\nreturn y", "=script"))
      local good, message = pcall(setfenv(chunk, { engine = engine, optim = optim, net = net,
        opt = opt }))
      engine.end_step()
      assert.is_false(good)
      assert.equal("script:1: " .. case[2], message)
    end)
  end
end)
