-- The lifetime of a step's tensors, memory that does not grow, and gradients in scripts.
local engine = require "engine"
local helper = require "spec.helper"

local step = helper.in_step

local function bytes_in_use()
  collectgarbage() collectgarbage()   -- frees optimizers that earlier specs dropped
  local sum = 0
  for _, row in ipairs(engine.memory()) do sum = sum + row.used end
  return sum
end

describe("the step", function()
  it("ends the lifetime of its tensors; using one afterwards is an error that says so", function()
    engine.begin_step()
    local now = engine.step_count()
    local x, kept = engine.zeros(64, 768), engine.tensor({ 1, 2 }):keep()
    local first = engine.zeros(2, { keep = true })
    engine.end_step()
    local text = ("tensor f32 [64 x 768] belonged to step %d, which has ended; hint: x:keep() in "
      .. "that step makes a copy that outlives it"):format(now)
    for _, use in ipairs { function() return x.shape end, function() return x + 1 end,
      function() return x:totable() end, function() return x:keep() end,
      function() return x:item() end, function() return x:detach() end } do
      local good, message = pcall(use)
      assert.is_false(good)
      assert.equal(text, (message:gsub("^spec/tensor/step_spec.lua:%d+: ", "")))
    end
    local _, message = pcall(function() return x:matmul(x) end)
    assert.matches(text, message, 1, true)
    assert.equal("tensor (" .. text .. ")", tostring(x))
    assert.same({ 1, 2 }, kept:totable())
    assert.same({ 0, 0 }, first:totable())
    -- the errors have not switched recording off
    local w = engine.tensor({ 3 }, { requires_grad = true })
    ;(w * w):sum():backward()
    assert.same({ 6 }, w.grad:totable())
    engine.end_step()
    kept:free()
    _, message = pcall(function() return kept + 1 end)
    assert.matches("tensor f32 [2] was freed, for example by free()", message, 1, true)
    first:free()
    w:free()
  end)

  it("says that a tensor was freed if its step is still open", step(function()
    local freed = "e4m3 [1 x 4] was freed, for example by free() or at the end of its "
      .. "engine.scope(); hint: x:keep() before then makes a copy"
    local q = engine.fp8.quantize(engine.ones(1, 4))
    q:free()
    local _, message = pcall(q.dequantize, q)
    assert.matches("dequantize: input 1: tensor " .. freed, message, 1, true)
    local codes
    engine.scope(function() codes = engine.ones(1, 4):to("e4m3") end)
    _, message = pcall(codes.to, codes, "f32")
    assert.matches(freed, message, 1, true)
  end))

  it("does not free a tensor made outside of any step", function()
    local x = engine.zeros(3)
    local y = x + 1                     -- but results of operations end with the next step
    engine.end_step()
    assert.same({ 0, 0, 0 }, x:totable())
    local _, message = pcall(y.totable, y)
    assert.matches(("tensor f32 [3] was made between steps and ended with step %d; hint: x:keep() "
      .. "before that"):format(engine.step_count() - 1), message, 1, true)
    _, message = pcall(function() return x + y end)
    assert.matches("add: input 2: tensor f32 [3] was made between steps", message, 1, true)
    x:free()
  end)

  it("does not nest, and steps() counts from 1 and closes what break left open", function()
    engine.begin_step()
    assert.has_error(engine.begin_step)
    engine.end_step()
    local seen, x = {}, nil
    for n in engine.steps(3) do
      seen[#seen + 1] = n
      if x then assert.has_error(function() return x.shape end) end
      x = engine.zeros(1)
    end
    assert.same({ 1, 2, 3 }, seen)
    for n in engine.steps(5) do if n == 2 then break end end
    for n in engine.steps(1) do assert.equal(1, n) end
  end)

  it("keep() copies values, not the tape", step(function()
    local w = engine.tensor({ 2 }, { requires_grad = true })
    local y = w * 3
    local kept = y:keep()
    assert.is_false(y.is_leaf)
    assert.is_true(kept.is_leaf)
    y:fill(0)
    assert.equal(6, kept:item())
    engine.end_step()
    engine.begin_step()
    kept:free()
  end))

  it("engine.scope frees its tensors, except kept results", function()
    for _, inside in ipairs { false, true } do
      if inside then engine.begin_step() end
      local before, leaked, kept = bytes_in_use(), nil, nil
      local a, b, c = engine.scope(function(n)
        leaked = engine.zeros(1000)
        kept = engine.ones(2):keep()
        return n + 1, nil, (leaked + 1):sum():item()
      end, 4)
      assert.same({ 5, nil, 1000 }, { a, b, c })
      assert.has_error(function() return leaked.shape end)
      assert.same({ 1, 1 }, kept:totable())
      kept:free()
      assert.equal(before, bytes_in_use())
      assert.error_matches(function() engine.scope(
        function() leaked = engine.zeros(1000) error("inner trouble") end) end, "inner trouble")
      assert.equal(before, bytes_in_use())
      if inside then engine.end_step() end
    end
    local outer = engine.zeros(2)       -- after the scopes: this one stays
    engine.end_step()
    assert.same({ 0, 0 }, outer:totable())
    outer:free()
  end)

  it("no_grad, scope and autocast left by a coroutine's yield change nothing outside", function()
    local function open(around, ...)
      local arguments = { ... }
      arguments[#arguments + 1] = function()
        return coroutine.yield(engine.ones(2, 2):matmul(engine.ones(2, 2)).dtype)
      end
      local routine = coroutine.create(function() return around(unpack(arguments)) end)
      return routine, select(2, assert(coroutine.resume(routine)))
    end
    for _, case in ipairs { { engine.no_grad, "f32" }, { engine.scope, "f32" },
      { engine.autocast, "bf16", "bf16" } } do
      engine.begin_step()
      local around, inside, recipe = unpack(case)
      local routine, dtype
      if recipe then routine, dtype = open(around, recipe) else routine, dtype = open(around) end
      assert.equal(inside, dtype)
      local x = engine.ones(2, 2, { requires_grad = true, keep = true })
      local y = x:matmul(x)
      assert.equal("f32", y.dtype)
      y:sum():backward()
      assert.same({ { 4, 4 }, { 4, 4 } }, x.grad:totable())
      if around == engine.no_grad then    -- a resumed no_grad returns what resume passes
        assert.same({ true, 7 }, { coroutine.resume(routine, 7) })
        assert.equal("dead", coroutine.status(routine))
      end
      engine.end_step()
      x:free()
      local outer = engine.zeros(2)       -- outside of steps and scopes: this one stays
      engine.begin_step()
      engine.end_step()
      assert.same({ 0, 0 }, outer:totable())
      outer:free()
      if around == engine.scope then
        assert.matches("this scope began in an earlier step", select(2, coroutine.resume(routine)))
      end
    end
  end)

  it("profile, evaluating and a forward left by a yield change nothing outside", function()
    engine.begin_step()
    local nn = engine.nn
    local Waits = nn.class("Waits")
    function Waits.forward(_, x)
      if coroutine.running() then coroutine.yield(x) end
      return x + 1
    end
    local model = nn.sequential { nn.linear(2, 2), Waits() }
    local x = engine.ones(1, 2)
    local function left(f) assert(coroutine.resume(coroutine.create(f))) end

    left(function() model:evaluating(coroutine.yield) end)
    assert.is_true(model:is_training())
    local routine = coroutine.create(function()
      return model:evaluating(function() coroutine.yield() return model:is_training() end)
    end)
    assert(coroutine.resume(routine))
    assert.is_true(model:is_training())
    assert.same({ true, false }, { coroutine.resume(routine) })
    assert.is_true(model:is_training())

    -- An abandoned call leaves no trace: the next error names its own module, not the abandoned
    -- one.
    left(function() model(x) end)
    local _, message = pcall(nn.sequential { nn.linear(3, 2) }, x)
    assert.matches("spec/tensor/step_spec.lua:%d+: In 1: ", message)
    local _, inside = coroutine.resume(coroutine.create(function()
      nn.sequential { nn.linear(3, 2) }(x)
    end))
    assert.matches("spec/tensor/step_spec.lua:%d+: In 1: ", inside)
    routine = coroutine.create(function() return model(x) end)
    assert(coroutine.resume(routine))
    assert.same({ 1, 2 }, select(2, assert(coroutine.resume(routine))).shape)

    local measured
    routine = coroutine.create(function()
      measured = engine.profile(function()
        x:exp()
        coroutine.yield()
        x:exp()
      end)
    end)
    assert(coroutine.resume(routine))
    x:exp()
    left(function() engine.profile(coroutine.yield) end)
    assert(coroutine.resume(routine))
    assert.equal(2, measured.operations[1].op == "exp" and measured.operations[1].calls
      or measured.operations[2].calls)
    engine.end_step()
  end)

  it("a gradient that yields is an error, and leaves no pass open", function()
    engine.begin_step()
    local x = engine.ones(2, { requires_grad = true, keep = true })
    local waits = engine.custom { forward = function(_, y) return y * 2 end,
      backward = function(_, dy) coroutine.yield() return dy * 2 end }
    local _, message = coroutine.resume(coroutine.create(function() waits(x):sum():backward() end))
    assert.matches("custom: backward yielded", message)
    engine.end_step()
    engine.begin_step()
    local twice = engine.custom { forward = function(_, y) return y * 2 end,
      backward = function(_, dy) return dy * 2 end }
    assert(coroutine.resume(coroutine.create(function() twice(x):sum():backward() end)))
    assert.same({ 2, 2 }, x.grad:totable())
    engine.end_step()
    x:free()
  end)

  it("memory does not grow over 2000 steps", function()
    local w = engine.randn(16, 16, { keep = true, requires_grad = true })
    local after_first
    for n in engine.steps(2000) do
      local x = engine.randn(8, 16)
      local y = x:gt(0):where(x:matmul(w):tanh() + 1, 0)
      y:sum():backward()
      local _ = w.grad
      if n % 100 == 0 then engine.scope(function() return engine.rand(4):sum():item() end) end
      local sum, requests = 0, 0
      for _, row in ipairs(engine.memory()) do
        sum, requests = sum + row.reserved, requests + row.allocations
      end
      if n == 100 then after_first = { sum, requests } end
      if n > 100 then assert.same(after_first, { sum, requests }, "at step " .. n) end
    end
    w:free()
  end)

  it("memory of kept tensors is used again, however many sizes they have", function()
    local function reserved()
      for size = 16, 16 * 1500, 16 do engine.zeros(size, { keep = true }):free() end
      return engine.memory().kept.reserved
    end
    assert.are.equal(reserved(), reserved())
  end)

  it("memory does not grow outside of steps either, where only end_step() is called", function()
    local c, x = engine.tensor({ true, false }, "bool"), engine.zeros(2)
    local before
    -- frees what other specs left, so that it does not count
    for _ = 1, 2 do collectgarbage() end
    for n = 1, 300 do
      local y = c:where(1, 2) + 3 / x
      y:copy { 1, n }
      engine.end_step()
      local sum = 0
      for _, row in ipairs(engine.memory()) do sum = sum + row.used end
      if n == 1 then before = sum end
      assert.equal(before, sum)
    end
    c:free()
    x:free()
  end)
end)

describe("gradients", function()
  it("reach the leaves that require them, and accumulate", step(function()
    local w = engine.tensor({ 2, 3 }, { requires_grad = true })
    local other = engine.tensor { 1, 1 }
    assert.is_nil(w.grad)
    ;(w * w + other):sum():backward()
    assert.same({ 4, 6 }, w.grad:totable())
    assert.is_nil(other.grad)
    ;(w * w):sum():backward()
    assert.same({ 8, 12 }, w.grad:totable())
    w:requires_grad(false)
    assert.has_error(function() (w * w):sum():backward() end)
  end))

  it("scale seeds the pass, retain keeps the tape", step(function()
    local w = engine.tensor({ 2 }, { requires_grad = true })
    local loss = (w * w):sum()
    loss:backward { scale = 1024, retain = true }
    assert.same({ 4096 }, w.grad:totable())
    loss:backward()
    assert.same({ 4100 }, w.grad:totable())
  end))

  it("detach and no_grad cut the tape", step(function()
    local w = engine.tensor({ 2 }, { requires_grad = true })
    local cut = (w * 3):detach()
    assert.is_true(cut.is_leaf)
    ;(cut * w):sum():backward()
    assert.same({ 6 }, w.grad:totable())
    local y, z = engine.no_grad(function(a) return w * 2, a end, "argument")
    assert.same({ true, "argument" }, { y.is_leaf, z })
    assert.error_matches(function() engine.no_grad(function() error("inside") end) end, "inside")
    assert.is_false((w * 2).is_leaf)      -- recording is on again
    assert.is_false(engine.no_grad(function()
      pcall(engine.no_grad, error)
      return (w * 2).is_leaf == false
    end))
  end))

  it("a Lua gradient that is never run leaves nothing behind", step(function()
    local autograd = require "engine.tensor.autograd"
    assert.is_function(autograd.custom)
    local double = engine.custom { forward = function(_, x) return x * 2 end,
      backward = function(_, dy) return dy * 2 end }
    local nodes = require("engine.tensor.tensor").lua_nodes
    for _ = 1, 50 do
      -- nothing requires a gradient
      double(engine.tensor { 1 })
      engine.no_grad(double, engine.tensor({ 1 }, { requires_grad = true }))
    end
    local n = 0
    for _ in pairs(nodes.rules) do n = n + 1 end
    assert.equal(0, n)
  end))
end)
