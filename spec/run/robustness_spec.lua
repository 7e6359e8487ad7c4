-- Mistakes of scripts: each gets an error message, and none harms the process or another step.
local engine = require "engine"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"
local C, in_step = M_ffi.C, helper.step

local function message_of(f, ...)
  local good, message = pcall(f, ...)
  assert.is_false(good)
  assert.equal("string", type(message))
  return message
end

describe("sizes", function()
  it("beyond memory or number limits are refused", function()
    for _, shape in ipairs { { 1e12 }, { 2 ^ 62, 2 ^ 62 }, { 0, 2 ^ 62, 2 ^ 62 },
      { 2 ^ 53, 2 ^ 53 }, { 1e300 }, { math.huge }, { 0 / 0 }, { -1 } } do
      message_of(engine.zeros, shape)
    end
    assert.matches("2^53", message_of(engine.zeros, 1e300), 1, true)
    assert.matches("out of memory", message_of(engine.zeros, 1e12))
    assert.matches("finite", message_of(engine.arange, 1, math.huge))
    message_of(engine.arange, 0 / 0, 1)
    message_of(engine.arange, 1, 1e15)
    message_of(engine.randint, 0, 3, 1e11)
    assert.equal(0, engine.zeros(0, 2 ^ 40).count)
  end)

  it("of an expanded view do not reach outside its memory", function()
    in_step(function()
      local x = engine.zeros(1):expand(1e14)
      assert.matches("more than Lua can hold", message_of(x.totable, x))
      assert.matches("too many", tostring(x))
      assert.matches("out of memory", message_of(x.contiguous, x))
      assert.matches("out of memory", message_of(function() return x + 1 end))
      assert.matches("2^48", message_of(x.expand, x, 1000, 1e14), 1, true)
    end)
  end)

  it("of a reshape to an empty tensor may not overflow", function()
    in_step(function()
      local x = engine.zeros(0)
      message_of(M_ffi.run, "reshape", { x }, { 3, 0, 9223372036854775807LL, 5 })
      message_of(M_ffi.run, "split", { x }, { 0, 9223372036854775807LL, 9223372036854775807LL, 2 },
        {}, 3)
      assert.equal(1, M_ffi.run("slice", { engine.zeros(9) },
        { 0, 1, 9, 9223372036854775807LL }).count)
      message_of(M_ffi.run, "permute", { x }, { 9223372036854775807LL })
    end)
  end)
end)

describe("calls through engine.ffi", function()
  it("with too many of anything are refused", function()
    local many, x = {}, engine.zeros(2)
    for i = 1, 4000 do many[i] = 1 end
    assert.matches("up to 16 inputs, 14 ints and 4 floats",
      message_of(M_ffi.run, "neg", { x }, many))
    message_of(M_ffi.run, "neg", { x }, {}, many)
    for i = 1, 4000 do many[i] = x end
    message_of(M_ffi.run, "concat", many, { 0 })
    message_of(M_ffi.run, "split", { x }, { 0, 2 }, {}, 1e9)
    message_of(M_ffi.run, "split", { x }, { 0, 2 }, {}, -5)
    message_of(M_ffi.run, "no such thing", { x })
    x:free()
  end)

  it("of gradient operations are checked like others", function()
    in_step(function()
      local x, y, ids = engine.rand(2, 3), engine.rand(2, 2), engine.zeros({ 2 }, "i64")
      local f32 = M_ffi.dtype.f32
      for _, call in ipairs {
        { "unary_grad", { x, y }, { M_ffi.op.exp, f32 } },
        { "unary_grad", { x, x }, { 9999, f32 } },
        { "unary_grad", { x, x }, { M_ffi.op.exp, 77 } },
        { "swiglu_grad", { x, x, y } }, { "gather_grad", { x, ids }, { 0, 2, 3 } },
        { "gather_grad", { x, x:to("i64") }, { 0, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 99 } },
        { "index_select_grad", { x, ids }, { 0, 2, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2 } },
        { "embedding_grad", { x, engine.zeros({ 5 }, "i64") }, { 4, f32, 0 } },
        { "embedding_grad", { x, ids }, { 4, f32, 1 } }, { "extreme_grad", { x, y, y }, { 1, 0 } },
        { "softmax_grad", { x, x }, { M_ffi.dtype.i64 } },
        { "bias_grad", { x }, { f32, 1 } },
        { "linear_grad", { x, y }, { f32, f32, 1, 0 } }, { "linear_grad", { x, y }, { f32, 99 } },
        { "linear_grad", { x, engine.rand(3, 2) }, { f32, f32 } },
        { "matmul_gelu_grad", { x, y, y } }, { "mlp_gelu", { x, y, false, y } },
        { "matmul", { x, y }, { 1, 0, 0, 1 } },
        { "matmul", { y, x }, { 0, 0, M_ffi.dtype.i32 + 1, 0 } },
        { "matmul", { y, x }, { 0, 0, -2 ^ 63, 0 } },
        { "layer_norm_grad", { x, false, y, y, x }, { f32, 1 } },
        { "layer_norm_grad", { x, false, false, false, x }, { f32, 1 } },
        { "rms_norm_grad", { x, false, engine.rand(2), y }, { f32, 1 } },
        { "attention_grad", { x, x, x, x, x, x } },
        { "add_layer_norm", { x, y, false, false } }, { "add_rms_norm", { x, false, false } },
        { "add_rms_norm", { x, x:to("i64"), false } },
        { "add_rms_norm_grad", { x, false, engine.rand(2), x, y }, { f32, 1 } },
        { "add_rms_norm_grad", { x, false, engine.rand(2), x, false }, { f32, 1 } },
        { "cross_entropy_grad", { x, ids, y, y }, { -100, 1 } },
      } do
        local message = message_of(M_ffi.run, unpack(call))
        assert.is_nil(message:find("\n"), message)
      end
    end)
  end)

  it("with invalid handles are refused", function()
    for _, handle in ipairs { M_ffi.Tensor(0, 0), M_ffi.Tensor(0, 5), M_ffi.Tensor(4000000000, 1),
      M_ffi.Tensor(3, 4000000000) } do
      message_of(function() return handle + 1 end)
      message_of(function() return handle.shape end)
      message_of(handle.free, handle)
      message_of(handle.backward, handle)
      assert.equal("string", type(tostring(handle)))
    end
  end)
end)

describe("empty tensors", function()
  it("have gradients through index_select and gather", function()
    in_step(function()
      local x = engine.zeros(3, 0):requires_grad(true)
      x:index_select(1, engine.zeros({ 2 }, "i64")):sum():backward()
      assert.same({ 3, 0 }, x.grad.shape)
      local y = engine.rand(3, 4, 2):requires_grad(true)
      y:gather(1, engine.zeros({ 3, 4, 0 }, "i64")):sum():backward()
      assert.equal(0, y.grad:sum():item())
      local z = engine.rand(4, 3, 2):requires_grad(true)
      z:gather(3, engine.zeros({ 4, 0, 5 }, "i64")):sum():backward()
      assert.equal(0, z.grad:sum():item())
    end)
  end)
end)

describe("scopes", function()
  it("leave the gradients of earlier tensors unchanged", function()
    in_step(function()
      local x = engine.rand(3):requires_grad(true)
      local loss = (x * x):sum()
      engine.scope(function() loss:backward() end)
      for _ = 1, 600 do engine.full({ 3 }, 7) end
      for i, g in ipairs(x.grad:totable()) do assert.near(2 * x:totable()[i], g, 1e-6) end
    end)
  end)

  it("refuse to free what the tape still uses", function()
    in_step(function()
      local kept = engine.zeros(2)
      local f = engine.custom { forward = function() return kept end,
        backward = function(_, dy) return dy end }
      local mark = M_ffi.new("int64_t[1]")
      C.eng_scope_begin(mark)
      f(engine.rand(2):requires_grad(true))
      assert.not_equal(0, C.eng_scope_end(mark[0]))
      assert.matches("tape", M_ffi.message())
    end)
  end)

  it("of an earlier step do not affect this one", function()
    local mark = M_ffi.new("int64_t[1]")
    engine.begin_step()
    C.eng_scope_begin(mark)
    engine.end_step()
    engine.begin_step()
    local x = engine.full({ 2 }, 3)
    assert.not_equal(0, C.eng_scope_end(mark[0]))
    assert.equal(6, x:sum():item())
    engine.end_step()
  end)
end)

describe("overwritten values", function()
  it("between the passes are an error of the backward pass", function()
    in_step(function()
      local x, w = engine.rand(3):requires_grad(true), engine.rand(3)
      local loss = (x * w):sum()
      w:fill(0)
      assert.matches("backward of mul: f32 %[3%] was modified", message_of(loss.backward, loss))
      local sum = (x + w):sum()
      w:fill(1)                                 -- the rule of add reads no values
      sum:backward()
      local y = x:exp()
      local result = y:softmax()
      local total = (result * 2):sum()
      result:zero()
      assert.matches("backward of softmax", message_of(total.backward, total))
    end)
  end)

  it("by an optimizer make a retained tape useless", function()
    local net = engine.nn.linear(3, 2)
    local opt = engine.optim.sgd(net, { lr = 0.1 })
    in_step(function()
      opt:zero_grad()
      local hidden = engine.rand(4, 3):requires_grad(true)
      local loss = net(hidden):sum()
      loss:backward { retain = true }
      opt:step()
      assert.matches("backward of linear.*modified", message_of(loss.backward, loss))
    end)
  end)

  it("shifted within their own tensor behave as if copied first", function()
    local n = 300000
    local x = engine.arange(1, n, 1, "f32")
    x:slice(1, 2, n):copy(x:slice(1, 1, n - 1))
    local values = x:totable()
    for i = 2, n do
      if values[i] ~= i - 1 then error(("element %d is %g"):format(i, values[i])) end
    end
    x:free()
  end)
end)

describe("gradients in Lua", function()
  local function custom(forward, backward)
    return engine.custom { forward = forward or function(_, x) return x * 2 end,
      backward = backward or function(_, dy) return dy * 2 end }
  end
  local function pass(f)
    in_step(function() f(engine.rand(3):requires_grad(true)):sum():backward() end)
  end

  it("that raise, end the step or run backward leave a clean tape", function()
    assert.matches("boom", message_of(pass, custom(nil, function() error("boom") end)))
    assert.matches("no backward pass is computing the gradient of a custom",
      message_of(pass, custom(nil, function(_, dy) engine.end_step() return dy end)))
    assert.matches("already running", message_of(pass, custom(nil, function(_, dy)
      local z = engine.rand(2):requires_grad(true);
      (z * z):sum():backward()
      return dy
    end)))
    assert.equal(0, C.eng_tape_length())
    assert.equal(-1, tonumber(C.eng_backward_pending()))
    pass(custom())
  end)

  it("that switch recording on during backward record nothing", function()
    pass(custom(nil, function(_, dy)
      C.eng_grad_enabled(true)
      local z = engine.rand(2):requires_grad(true)
      for _ = 1, 3000 do z = z * 1 end
      return dy
    end))
    C.eng_grad_enabled(true)
    assert.equal(0, C.eng_tape_length())
  end)

  it("report what they must return", function()
    assert.matches("expected result 1 of forward to be a tensor, got 5",
      message_of(pass, custom(function() return 5 end)))
    assert.matches("expected forward to return a tensor, got nothing",
      message_of(pass, custom(function() end)))
    assert.matches("expected result 2 of forward to be a tensor, got nothing",
      message_of(pass, custom(function(_, x) return x * 2, nil, x * 3 end)))
    assert.matches("at most 1 gradients from backward, one for each tensor that forward got",
      message_of(pass, custom(nil, function(_, dy) return dy, dy end)))
    assert.matches("gradient of input 1 to be a tensor or nil, got 'five'",
      message_of(pass, custom(nil, function() return "five" end)))
    assert.matches("%[9%] as the gradient of input 1",
      message_of(pass, custom(nil, function() return engine.zeros(9) end)))
  end)
end)

describe("modules and their parameters", function()
  local nn = engine.nn

  it("cannot contain themselves", function()
    local Net = nn.class("Net")
    local a, b = Net(), Net()
    a.b = b
    assert.matches("Net.a: a module cannot contain itself", message_of(function() b.a = a end), 1,
      true)
    assert.matches("Net.me: a module cannot contain itself", message_of(function() a.me = a end), 1,
      true)
    assert.equal(0, #a:parameters())
  end)

  it("that call themselves end in an error message", function()
    local Net = nn.class("Net")
    function Net:forward(x) return self(x) end
    assert.matches("stack overflow", message_of(Net(), engine.zeros({ 1 }, { keep = false })))
    engine.end_step()
  end)

  it("outlive their optimizer, and the optimizer outlives them", function()
    local net = nn.linear(2, 2)
    engine.optim.sgd(net)
    local loose = engine.zeros({ 3 }, { keep = true, requires_grad = true })
    engine.optim.sgd { loose }
    local opt = engine.optim.adam(nn.linear(2, 2))
    collectgarbage()
    collectgarbage()
    assert.equal(0, loose:sum():item())
    assert.same({ 1, 2 }, net(engine.rand(1, 2)).shape)
    opt:zero_grad()
    opt:step()
    engine.optim.adam { loose }
    engine.end_step()
  end)

  it("of a freed set are not touched", function()
    local opt = engine.optim.sgd(nn.linear(2, 2))
    C.eng_params_free(M_ffi.ffi.gc(opt.params, nil))
    assert.matches("was freed", message_of(opt.zero_grad, opt))
    assert.matches("was freed", message_of(opt.step, opt))
    assert.matches("was freed", message_of(opt.grad_norm, opt))
    assert.matches("was freed", message_of(opt.set_precision, opt, "fp16"))
    assert.not_equal(0, C.eng_params_refresh(opt.params))
    assert.not_equal(0, C.eng_params_unscale(M_ffi.new("int[1]"), opt.params, 1))
  end)

  it("shared by two models stay with the first optimizer", function()
    local a, b = nn.linear(2, 2), nn.linear(2, 2)
    b.weight = a.weight
    engine.optim.sgd(a)
    assert.matches("is already parameter weight of another optimizer",
      message_of(engine.optim.sgd, b))
    assert.matches("are the same tensor",
      message_of(engine.optim.sgd, { nn.linear(1, 1).weight,
      (function() local x = engine.zeros(2):requires_grad(true)
      return x, x end)() }))
  end)

  it("are not read from a null pointer", function()
    assert.matches("got nothing", message_of(engine.from_memory, nil, "f32", { 4 }))
    assert.matches("got 5", message_of(engine.from_memory, 5, "f32", { 4 }))
    assert.matches("expected a pointer to memory for the elements of f32 [4]",
      message_of(engine.from_memory, M_ffi.ffi.cast("float *", nil), "f32", { 4 }), 1, true)
  end)
end)

describe("memory", function()
  after_each(function() engine.memory { limit = 0 } end)

  it("that ran out once can be used again, also for one large tensor", function()
    local function reserved()
      local sum = 0
      for _, row in ipairs(engine.memory()) do sum = sum + row.reserved end
      return sum
    end
    engine.memory { limit = reserved() + 96 * 2 ^ 20 }
    in_step(function()
      for _ = 1, 40 do
        if not pcall(engine.zeros, 2 ^ 20) then break end  -- 4 MiB each, until memory runs out
      end
      assert.matches("out of memory", message_of(engine.zeros, 2 ^ 24))
    end)
    -- one tensor of 80 MiB
    in_step(function() assert.equal(0, engine.zeros(20 * 2 ^ 20):sum():item()) end)
  end)

  it("of the machine is the limit if none is set", function()
    assert.matches("this machine has", message_of(engine.zeros, 1e12))
  end)
end)
