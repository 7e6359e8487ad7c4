-- The scaler of the explicit loop: PyTorch's GradScaler as a state machine, and class-style
-- scalers.
local engine = require "engine"
local helper = require "spec.helper"

local nn, optim = engine.nn, engine.optim

-- Weights of a linear layer as a list of numbers.
local function weights(model)
  local list = {}
  for _, p in ipairs(model:parameters()) do
    for _, value in ipairs(p.tensor:reshape(-1):totable()) do list[#list + 1] = value end
  end
  return list
end

local function setup(seed, options)
  engine.seed(seed or 1)
  local model = nn.linear(4, 3)
  return model, optim.sgd(model, options or { lr = 0.1 })
end

-- An input of ones, or one with an infinity in it.
local function input(bad) return bad and engine.full({ 2, 4 }, 1 / 0) or engine.ones { 2, 4 } end

local step = helper.step

local function backward(scaler, model, bad) scaler:scale(model(input(bad)):mean()):backward() end

describe("scaler", function()
  it("follows PyTorch's _run_scaling_case and ends with the parameters of an unscaled loop",
    function()
    local scaled, opt = setup(3)
    local plain, control = setup(3)
    local scaler = engine.scaler { policy = "dynamic", init_scale = 128, growth_interval = 1 }
    local scales = {}
    for i = 1, 4 do
      local bad = i == 3
      step(function()
        backward(scaler, scaled, bad)
        local result = scaler:step(opt)
        assert.are.equal(bad, result.skipped)
        scales[i] = scaler:update().scale
        opt:zero_grad()
        if not bad then
          plain(input()):mean():backward()
          control:step()
        end
        control:zero_grad()
      end)
      assert.are.equal(scales[i], scaler:get_scale())
    end
    assert.are.same({ 256, 512, 256, 512 }, scales)
    assert.are.same(weights(plain), weights(scaled))
    assert.are.equal(3, opt.updates)
  end)

  it("gives an unscaled loop's weights and norms with unscaling and clipping in between", function()
    local scaled, opt = setup(4)
    local plain, control = setup(4)
    local scaler = engine.scaler { init_scale = 1024, growth_interval = 2 }
    for _ = 1, 5 do
      step(function()
        backward(scaler, scaled)
        scaler:unscale(opt)
        local norm = opt:clip_grad_norm(0.1)
        scaler:step(opt)
        scaler:update()
        opt:zero_grad()
        plain(input()):mean():backward()
        assert.are.equal(control:clip_grad_norm(0.1), norm)
        control:step()
        control:zero_grad()
      end)
    end
    assert.are.same(weights(plain), weights(scaled))
  end)

  it("lets each optimizer decide its own skip and reports any skip to the policy", function()
    local a, opt_a = setup(5)
    local b, opt_b = setup(6)
    local scaler = engine.scaler { init_scale = 128, growth_interval = 1 }
    local scales, steps_a, steps_b = {}, {}, {}
    for i = 1, 4 do
      step(function()
        backward(scaler, a)
        backward(scaler, b, i == 3)
        if i == 2 then scaler:unscale(opt_b) end
        local result_a, result_b = scaler:step(opt_a), scaler:step(opt_b)
        assert.are.equal(false, result_a.skipped)
        assert.are.equal(i == 3, result_b.skipped)
        if i == 3 then
          assert.truthy(result_b.reason:find("inf", 1, true))
          assert.truthy(result_b.reason:find("the first in", 1, true))
        end
        scales[i] = scaler:update().scale
        opt_a:zero_grad()
        opt_b:zero_grad()
        steps_a[i], steps_b[i] = opt_a.updates, opt_b.updates
      end)
    end
    assert.are.same({ 256, 512, 256, 512 }, scales)
    assert.are.same({ 1, 2, 3, 4 }, steps_a)
    assert.are.same({ 1, 2, 2, 3 }, steps_b)
  end)

  it("accumulates gradients of several losses", function()
    local model, opt = setup(7)
    local plain, control = setup(7)
    local scaler = engine.scaler { init_scale = 256 }
    step(function()
      backward(scaler, model)
      backward(scaler, model)
      scaler:step(opt)
      scaler:update()
      plain(input()):mean():backward()
      plain(input()):mean():backward()
      control:step()
    end)
    assert.are.same(weights(plain), weights(model))
  end)

  it("raises what PyTorch raises", function()
    local model, opt = setup()
    local scaler = engine.scaler {}
    local function raises(f, text)
      helper.refuses(text, f)
    end
    raises(function() scaler:step(opt) end,
      "scaler:step: no loss has been scaled yet; call scaler:scale(loss):backward() first")
    raises(function() scaler:unscale(opt) end, "scaler:unscale: no loss has been scaled yet")
    raises(function() scaler:unscale_(opt) end, "has no 'unscale_'; did you mean 'unscale'")
    raises(function() scaler:update() end, "scaler:update: no loss has been scaled yet")
    step(function()
      local scaled = scaler:scale(model(input()):mean())
      raises(function() scaler:step(opt) end, "this optimizer has no gradients")
      raises(function() scaler:update() end, "no gradients were checked for inf and nan")
      scaled:backward()
      scaler:unscale(opt)
      raises(function() scaler:unscale(opt) end, "unscaled already")
      scaler:step(opt)
      raises(function() scaler:step(opt) end,
        "has already stepped; call update() before the next step")
      raises(function() scaler:unscale(opt) end, "unscale before step()")
      raises(function() scaler:step(opt, function() end) end, "closures are not supported")
      scaler:update()
      opt:zero_grad()
      raises(function() scaler:update() end, "no gradients were checked")
    end)
    raises(function() scaler:scale(5) end, "scaler:scale: expected a loss tensor, got 5")
    raises(function() scaler:step(5) end, "step: expected an optimizer of engine.optim, got 5")
    raises(function() scaler:update(0 / 0) end, "expected a positive finite scale, got nan")
    raises(function() engine.scaler { policy = "dynmic" } end, "did you mean 'dynamic'?")
    raises(function() engine.scaler { growth = 2 } end, "policy 'dynamic' has no option 'growth'")
    raises(function() engine.scaler(5) end, "scaler: expected a table of options")
  end)

  it("names the bad tensor, and separates inf from nan", function()
    local model, opt = setup()
    local scaler = engine.scaler {}
    step(function()
      backward(scaler, model, true)
      assert.are.equal("12 inf among the gradients, the first in weight", scaler:step(opt).reason)
      assert.are.equal("skip", scaler:update():what())
    end)
  end)

  it("sets the scale by hand without changing the count", function()
    local model, opt = setup()
    local scaler = engine.scaler { init_scale = 4, growth_interval = 2 }
    step(function()
      backward(scaler, model)
      scaler:step(opt)
      scaler:update()
      opt:zero_grad()
      scaler:update(1000.1)
      assert.are.equal(1000.0999755859375, scaler:get_scale())        -- a float32, as in PyTorch
      backward(scaler, model)
      scaler:step(opt)
      assert.are.equal(2000.199951171875, scaler:update().scale)
    end)
  end)

  it("refuses a scale outside float32's range before multiplying with it", function()
    local model = setup()
    local shrinks = engine.policy.load { file = "shrinks.lua",
      source = "return { options = { init_scale = 4 }, decide = function() return 1e-60 end }" }
    local scaler, opt = engine.scaler { policy = shrinks }, optim.sgd(model, { lr = 0.1 })
    step(function()
      backward(scaler, model)
      scaler:step(opt)
      scaler:update()
    end)
    local before = weights(model)
    assert.has_error(function() step(function() backward(scaler, model) end) end,
      "scaler:scale: policy shrinks chose a loss scale of 1e-60; expected one of the normal f32 " ..
      "numbers, from 2^-126 to 3.4e38")
    assert.same(before, weights(model))
  end)

  it("does nothing when disabled", function()
    local model, opt = setup(8)
    local plain, control = setup(8)
    local scaler = engine.scaler { enabled = false }
    assert.are.equal(1, scaler:get_scale())
    step(function()
      backward(scaler, model)
      scaler:unscale(opt)
      assert.are.equal(false, scaler:step(opt).skipped)
      assert.is_nil(scaler:update())
      plain(input()):mean():backward()
      control:step()
    end)
    assert.are.same(weights(plain), weights(model))
    assert.are.same({}, scaler:state_dict())
    scaler:load_state_dict {}
    assert.are.equal("scaler: disabled", tostring(scaler))
  end)

  it("resumes from its state", function()
    local function one(scaler, model, opt, bad)
      step(function()
        backward(scaler, model, bad)
        scaler:step(opt)
        scaler:update()
        opt:zero_grad()
      end)
      return scaler:get_scale()
    end
    local model, opt = setup()
    local trace, expected = { false, false, true, false, false, false, true, false }, {}
    local whole = engine.scaler { init_scale = 64, growth_interval = 2 }
    for i, bad in ipairs(trace) do expected[i] = one(whole, model, opt, bad) end
    for k = 0, #trace do
      local first, got = engine.scaler { init_scale = 64, growth_interval = 2 }, {}
      for i = 1, k do got[i] = one(first, model, opt, trace[i]) end
      local second = engine.scaler { init_scale = 64, growth_interval = 2 }
      second:load_state_dict(first:state_dict())
      for i = k + 1, #trace do got[i] = one(second, model, opt, trace[i]) end
      assert.are.same(expected, got)
      assert.are.equal(whole.attempts, second.attempts)
      assert.are.equal(whole.updates, second.updates)
    end
    assert.has_error(function() whole:load_state_dict {} end,
      "scaler:load_state_dict: the state is empty; it may come from a scaler that was disabled " ..
      "when it was saved")
    assert.has_error(function() whole:load_state_dict(
      engine.scaler({ policy = "static" }):state_dict()) end,
      "scaler:load_state_dict: the state is of policy 'static', but this scaler uses 'dynamic'; " ..
      "hint: engine.scaler{ policy = 'static' }")
  end)

  it("keeps real fp16 gradients: they overflow, and unscaling loses nothing", function()
    local model, opt = setup(9, { lr = 0.1, precision = "fp16" })
    local scaler = engine.scaler { init_scale = 2 ^ 20, growth_interval = 1000 }
    local skipped = 0
    for _ = 1, 12 do
      step(function()
        engine.autocast("fp16", function()
          backward(scaler, model)
        end)
        local result = scaler:step(opt)
        skipped = skipped + (result.skipped and 1 or 0)
        scaler:update()
        opt:zero_grad()
      end)
    end
    assert.is_true(skipped > 0, "expected an overflow of a gradient times 2^20")
    assert.is_true(scaler:get_scale() < 2 ^ 20)
    assert.are.equal(12 - skipped, opt.updates)
  end)

  it("sees rows of an embedding that overflow only as they are summed (PyTorch's " ..
    "test_grad_scaling_unscale_sparse)", function()
    for ids, skipped in pairs { [{ 2, 2 }] = true, [{ 1, 2 }] = false } do
      local model = nn.embedding(4, 3)
      local opt = optim.sgd(model, { lr = 1e-6, precision = "fp16" })
      local scaler = engine.scaler { policy = "dynamic", init_scale = 64000 }
      step(function()
        local rows = engine.autocast("fp16",
          function() return model(engine.tensor(ids, { dtype = "i32" })) end)
        -- 64000 for each picked row; twice that exceeds fp16
        scaler:scale(rows:sum()):backward()
        assert.are.equal(skipped, scaler:step(opt).skipped)
        assert.are.equal(skipped and 32000 or 64000, scaler:update().scale)
      end)
    end
  end)

  it("refuses the parts of a verdict that come after the update", function()
    for text, part in pairs { ["clip = 3"] = "clip = 3", ["lr_mul = 0.5"] = "lr_mul = 0.5",
      ["action = 'stop', reason = 'enough'"] = "action = 'stop'",
      ["action = 'retry'"] = "action = 'retry'",
      ["action = 'skip'"] = "action = 'skip' without an overflow" } do
      local model, opt = setup(5)
      local scaler = engine.scaler { policy = { file = "late", source = ([[return {
        init = function() return { scale = 16 } end,
        decide = function() return { scale = 8, %s } end }]]):format(text) } }
      step(function()
        backward(scaler, model)
        scaler:step(opt)
        helper.refuses("policy late gave the verdict " .. part .. ", which comes too",
          scaler.update, scaler)
        assert.equal(8, scaler:get_scale())
      end)
    end
  end)

  it("shows a policy every statistic it needs, also over several optimizers", function()
    local folder = helper.folder()
    local path = helper.write(folder .. "/look.lua",
      [[return { needs = { "amax", "norm", "hist", "tensors", "zeros" },
      init = function() return { scale = 16 } end, decide = function(state, r)
        local names = {}
        for name, t in pairs(r.tensors) do
          names[#names + 1] = name .. ":" .. t.count
        end
        local groups = {} for name in pairs(r.groups) do groups[#groups + 1] = name end
        return { scale = 16,
          reason = ("%.6f %.6f; "):format(r.amax, r.norm) .. table.concat(names, " ") .. "; "
            .. table.concat(groups, " ") .. "; "
            .. r.hist:sum() .. " " .. r.count .. " " .. r.step .. " " .. r.updates .. " " .. r.lr }
      end }]])
    local a, opt_a = setup(5)
    local b, opt_b = setup(5)
    local scaler = engine.scaler { policy = path }
    for i = 0, 2 do
      step(function()
        backward(scaler, a)
        backward(scaler, b)
        scaler:step(opt_a)
        scaler:step(opt_b)
        local v = scaler:update()
        assert.are.equal(0, v.failed, v:why())
        -- d mean / d weight = 2 rows of ones / 6 elements, likewise for the bias
        assert.are.equal(("0.333333 1.825742; weight:12 bias:3 weight:12 bias:3; " ..
          "sgd 1 sgd 2; 30 30 %d %d 0.1"):format(i, i), v:why())
        opt_a:zero_grad()
        opt_b:zero_grad()
      end)
    end
    helper.remove(folder)
  end)
end)

describe("a registered loss scaler", function()
  -- Multiplies the scale by 0.25 at an overflow, and by 1.8 after `interval` good steps in a row
  -- (up to a maximum).
  local Custom = {}
  Custom.__index = Custom
  function Custom.new(options)
    return setmetatable({ s = options.initial_scale or 2 ^ 16, max = options.max_scale or 2 ^ 24,
      interval = options.growth_interval or 1500, good = 0 }, Custom)
  end
  function Custom:get_scale() return self.s end
  function Custom:update(overflow)
    if overflow then
      self.s, self.good = self.s * 0.25, 0
    else
      self.good = self.good + 1
      if self.good == self.interval then self.s, self.good = math.min(self.s * 1.8, self.max), 0 end
    end
  end
  engine.register_loss_scaler("custom_dynamic", Custom)

  it("is chosen by name", function()
    local model, opt = setup()
    local scaler = engine.scaler { policy = "custom_dynamic", initial_scale = 100,
      growth_interval = 2 }
    local scales = {}
    for i = 1, 6 do
      step(function()
        backward(scaler, model, i == 4)
        assert.are.equal(i == 4, scaler:step(opt).skipped)
        scales[i] = scaler:update().scale
        opt:zero_grad()
      end)
    end
    assert.are.same({ 100, 180, 180, 45, 45, 81 }, scales)
    local other = engine.scaler { policy = "custom_dynamic", initial_scale = 100,
      growth_interval = 2 }
    other:load_state_dict(scaler:state_dict())
    assert.are.equal(81, other:get_scale())
    assert.are.equal("loss scaler custom_dynamic (a class): scale 81", tostring(other.policy))
    helper.refuses("custom_dynamic' is a class without a method set_scale",
      function() other.policy:set_scale(2) end)
    engine.register_loss_scaler("settable", { get_scale = function(self) return self.s or 1 end,
      update = function() end, set_scale = function(self, scale) self.s = scale end })
    other = engine.scaler { policy = "settable" }
    other.policy:set_scale(2)
    assert.are.equal(2, other:get_scale())
  end)

  it("sees the statistics it asks for, also per tensor by name", function()
    local seen
    engine.register_loss_scaler("looking",
      { needs = { "zeros", "tensors" }, get_scale = function() return 8 end,
      update = function(_, _, record, tensors)
        seen = { zeros = tonumber(record.zeros), bias = tensors.bias.amax,
          weight = tonumber(tensors.weight.count) }
      end })
    local model, opt = setup()
    local scaler = engine.scaler { policy = "looking" }
    step(function()
      backward(scaler, model)
      scaler:step(opt)
      scaler:update()
    end)
    assert.are.equal(12, seen.weight)
    assert.is_true(math.abs(seen.bias - 8 / 3) < 1e-6)      -- as stored: multiplied by the scale
    assert.are.equal(0, seen.zeros)
    engine.trainer { model = model, optimizer = opt, steps = 1, policy = "looking", log = "quiet",
      data = { next = function() return {} end },
      loss = function(m) return m(input()):mean() end }:run()
    assert.is_true(math.abs(seen.bias - 8 / 3) < 1e-6)
    assert.has_error(function() engine.register_loss_scaler("odd",
      { get_scale = print, update = print, needs = { "tensor" } }) end,
      "register_loss_scaler 'odd': needs: there is no statistic 'tensor'; did you mean " ..
      "'tensors'?; statistics: amax hist norm norm_ref tensors underflow zeros")
  end)

  it("may scale the loss and unscale the gradients itself", function()
    local calls = {}
    local Own = { get_scale = function() return 64 end,
      update = function() calls[#calls + 1] = "update" end }
    function Own.scale_loss(_, loss)
      calls[#calls + 1] = "scale"
      return loss * 64
    end
    engine.register_loss_scaler("own-way", Own)
    local model, opt = setup(11)
    local plain, control = setup(11)
    local scaler = engine.scaler { policy = "own-way" }
    step(function()
      backward(scaler, model)
      scaler:step(opt)
      scaler:update()
      plain(input()):mean():backward()
      control:step()
    end)
    assert.are.same({ "scale", "update" }, calls)
    assert.are.same(weights(plain), weights(model))
  end)

  it("gets the further arguments of scale(), and may change its scale in scale_loss", function()
    local given = {}
    local Entropy = { get_scale = function(self) return self.scale end, update = function() end }
    Entropy.__index = Entropy
    function Entropy.new() return setmetatable({ scale = 4 }, Entropy) end
    function Entropy:scale_loss(loss, maps, name)
      given[#given + 1] = { maps, name }
      self.scale = maps and maps.scale or 4
      return loss * self.scale
    end
    engine.register_loss_scaler("by-maps", Entropy)
    local model, opt = setup(11)
    local scaler = engine.scaler { policy = "by-maps" }
    step(function()
      scaler:scale(model(input()):mean(), { scale = 32 }, "maps"):backward()
      assert.equal(32, scaler:get_scale())
      scaler:step(opt)
      scaler:update()
    end)
    assert.same({ { { scale = 32 }, "maps" } }, given)

    -- The same scaler in a trainer; the weights must be those after the same steps at scale 1.
    local function train(policy, accumulate, scale_of)
      local net, o = setup(12)
      local scales, n = {}, 0
      local trainer = engine.trainer { model = net, optimizer = o, steps = 3, log = "quiet",
        policy = policy, accumulate = accumulate, data = { next = function() return {} end },
        loss = function(m)
          n = n + 1
          return m(input()):mean(), { scale = scale_of(n) }
        end,
        on_step = function(_, record) scales[#scales + 1] = record.scale end }
      trainer:run()
      return weights(net), scales
    end
    local plain = train("static:loss_scale=1", 2, function() return 1 end)
    local own, scales = train("by-maps", 2, function(n) return n > 2 and 16 or 8 end)
    assert.same({ 8, 16, 16 }, scales)
    assert.same(plain, own)
    local good, why = pcall(train, "by-maps", 2, function(n) return n end)
    assert.is_false(good)
    assert.matches("loss scaler 'by-maps': expected one scale for all micro-batches of a step, " ..
      "got 1 and then 2", why, 1, true)
  end)

  it("that raises or returns nonsense makes only that verdict fail", function()
    local mode
    engine.register_loss_scaler("liar",
      { get_scale = function() return mode == "lie" and -1 or 8 end,
      update = function() if mode == "raise" then error("broken") end end })
    local p = engine.policy.load("liar")
    local record = require("engine.base.ffi").new("eng_record")
    mode = "lie"
    local v = p:decide(record)
    assert.are.same({ 1, 8 }, { v.failed, v.scale })
    assert.truthy(v:why():find("get_scale() gave -1", 1, true))
    mode = "raise"
    v = p:decide(record)
    assert.truthy(v:why():find("broken", 1, true))
    assert.are.equal(2, p:failures())
    mode = nil
    assert.are.equal(0, p:decide(record).failed)
  end)

  it("is checked when registered", function()
    local function refused(name, class, text)
      helper.refuses(text, engine.register_loss_scaler, name, class)
    end
    refused("a b", {}, "expected a name")
    refused("a", 5, "expected a class (a table), got 5")
    refused("a", { get_scale = function() end, updat = function() end },
      "the class has no method update; did you mean 'updat'?")
    refused("a", { get_scale = function() end, update = function() end, scale_loss = 3 },
      "expected scale_loss to be a function, got 3")
  end)
end)
