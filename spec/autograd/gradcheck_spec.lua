-- Every operation with a gradient rule in ops.def passes a finite-difference check. The library
-- supplies the list of operations: an operation without a case in calls.lua fails the spec.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local calls = require "spec.autograd.calls"
local cases, random = calls.cases, calls.random

describe("the gradient of", function()
  before_each(function() engine.seed(7) end)
  after_each(function() engine.end_step() end)

  for op, name in ipairs(M_ffi.op_names) do
    if calls.has_gradient(op - 1) then
      it(name .. " equals finite differences", function()
        assert(cases[name], "no case for the operation '" .. name .. "' of ops.def")
        cases[name](function(f, inputs)
          engine.gradcheck(f, inputs)
          for _, x in ipairs(inputs) do x:requires_grad(false) end
          engine.end_step()
        end)
      end)
    end
  end

  it("a linear layer exists also if it has no rows, inputs or outputs", function()
    for _, size in ipairs { { 0, 3, 4 }, { 2, 0, 4 }, { 2, 3, 0 } } do   -- rows, inputs, outputs
      local M, K, N = unpack(size)
      local function zeros(...) return engine.zeros(..., { requires_grad = true }) end
      local x, w, b = zeros { 2, M, K }, zeros { N, K }, zeros { N }
      x:linear(w, b):sum():backward()
      assert.same({ 2, M, K }, x.grad.shape)
      assert.same({ N, K }, w.grad.shape)
      for _, db in ipairs(b.grad:totable()) do assert.equal(2 * M, db) end
      local w2, b2 = zeros { K, N }, zeros { K }
      x:mlp_gelu(w, b, w2, b2):sum():backward()
      assert.same({ K, N }, w2.grad.shape)
      engine.end_step()
    end
  end)

  it("a cast has the dtype of its input", function()
    local x = engine.tensor({ 1, 2, 3 }, { dtype = "f32", requires_grad = true })
    ;(x:to("f64") * engine.tensor({ 2, 3, 4 }, "f64")):sum():backward()
    assert.same({ 2, 3, 4 }, x.grad:totable())
    assert.equal("f32", x.grad.dtype)
  end)

  it("a power follows PyTorch at its poles and for negative bases", function()
    local nan, inf = 0 / 0, math.huge
    for dtype, tiny in pairs { f32 = 1e-42, f64 = 1e-310 } do
      for _, case in ipairs {
        -- a, b, and PyTorch's gradient of b: y log a, or 0 where a is 0 and b >= 0
        { 0, 0, 0 }, { -0.0, 0, 0 }, { 0, 2, 0 }, { 0, -1, -inf }, { 0, nan, nan }, { -2, 2, nan },
        { 2, 3, 8 * math.log(2) }, { tiny, 2, 0 }, { inf, -1, nan } } do
        local a = engine.tensor({ case[1] }, { dtype = dtype, requires_grad = true })
        local b = engine.tensor({ case[2] }, { dtype = dtype, requires_grad = true })
        a:pow(b):sum():backward()
        local got, text = b.grad:item(), ("%s %g ^ %g"):format(dtype, case[1], case[2])
        if case[3] ~= case[3] then assert.is_true(got ~= got, text)
        elseif case[3] == -inf then assert.equal(-inf, got, text)
        else assert.near(case[3], got, 1e-5, text) end
        engine.end_step()
      end
    end
  end)

  it("a tensor used twice is the sum over both uses", function()
    engine.gradcheck(function(x) return x * x + x:exp() end, { random(3, 3) })
  end)

  it("an input may be checked again", function()
    local x = random(3)
    for _ = 1, 2 do engine.gradcheck(function(y) return y * y end, { x }) end
  end)

  it("an operation written in Lua is what its Lua function returns", function()
    local cube = engine.custom {
      forward = function(saved, x) saved.x = x return x * x * x end,
      backward = function(saved, dy) return dy * saved.x * saved.x * 3 end,
    }
    engine.gradcheck(function(x) return cube(x * 2):exp() end, { (random(3) * 0.1):keep() })
  end)

  it("an operation written in Lua reaches every tensor, also after an argument of nil", function()
    local total = engine.custom {
      forward = function(_, x, bias, w) return bias and x * w + bias or x * w end,
      backward = function(_, dy) return dy * 2, dy * 3 end,
    }
    local x, w = engine.ones(2):requires_grad(true), engine.ones(2):requires_grad(true)
    total(x, nil, w):sum():backward()
    assert.same({ 2, 2 }, x.grad:totable())
    assert.same({ 3, 3 }, w.grad:totable())
  end)

  it("an operation written in Lua is reported when it is wrong", function()
    local wrong = engine.custom {
      forward = function(_, x) return x * 2 end,
      backward = function(_, dy) return dy * 3 end,
    }
    assert.error_matches(function() engine.gradcheck(wrong, { random(3) }) end,
      "finite differences")
  end)

  it("a tensor overwritten after its use is an error, not a wrong number", function()
    local x = engine.tensor({ 1, 2, 3 }, { requires_grad = true })
    local y = x:exp()
    local loss = (y * y):sum()
    y:fill(7)
    assert.error_matches(function() loss:backward() end,
      "backward of mul: f32 [3] was modified after an operation read it", 1, true)
    engine.end_step()
    local z = x + 1          -- an addition needs no values
    loss = z:sum()
    z:fill(7)
    loss:backward()
    assert.same({ 1, 1, 1 }, x.grad:totable())
  end)

  it("later operations is right after an error inside a Lua gradient", function()
    local broken = engine.custom { forward = function(_, x) return x * 2 end,
      backward = function() error("boom") end }
    local x = engine.tensor({ 1, 2 }, { requires_grad = true })
    assert.error_matches(function() broken(x):sum():backward() end, "boom")
    local y = engine.tensor({ 1, 2 }, { requires_grad = true })
    ;(y * y):sum():backward()
    assert.same({ 2, 4 }, y.grad:totable())
  end)
end)
