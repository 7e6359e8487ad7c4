-- engine.profile: what it counts, and that it leaves the current device unchanged.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local trap = require "engine.train.trap"

local C = M_ffi.C

describe("engine.profile", function()
  local function work()
    engine.scope(function()
      local a, b = engine.ones(8, 16), engine.ones(16, 4, "f32")
      for _ = 1, 3 do a:matmul(b) end
      engine.ones(4, 16):linear(engine.ones(2, 16)):exp()
    end)
  end

  local function calls_of(profile)
    for _, r in ipairs(profile.operations) do if r.op == "matmul" then return r.calls end end
  end

  it("counts calls, bytes and floating-point operations by operation, format and shape", function()
    local profile = engine.profile(work)
    local by_name = {}
    for _, r in ipairs(profile.rows) do by_name[r.op] = r end
    local m = by_name.matmul
    assert.equal(3, m.calls)
    assert.equal(3 * 2 * 8 * 16 * 4, m.flops)
    assert.equal(3 * 4 * (8 * 16 + 16 * 4 + 8 * 4), m.bytes)
    assert.equal("f32 [8 x 16], f32 [16 x 4] -> f32", m.detail)
    assert.equal(2 * 4 * 16 * 2, by_name.linear.flops)
    assert.equal(1, by_name.exp.calls)
    assert.equal(0, by_name.exp.flops)
    local inside = 0
    for _, r in ipairs(profile.operations) do inside = inside + r.seconds end
    assert.near(profile.seconds, inside, 1e-6)
  end)

  it("counts the operations of convolutions and of products of FP8 and MX codes", function()
    local flops = {}
    local x = engine.randn(2, 4, 5, 5, { keep = true }):requires_grad()
    local w = engine.randn(6, 2, 3, 3, { keep = true }):requires_grad()
    for _, r in ipairs(engine.profile(function()
      for _ in engine.steps(1) do
        x:conv2d(w, nil, { groups = 2 }):sum():backward()
        local a = engine.ones(4, 128, "f32")
        local q = engine.fp8.quantize(a, { block = "tensor" })
        engine.fp8.matmul(q, q, { transpose_b = true })
        engine.fp8.matmul(q, q, { transpose_a = true })
        for _, format in ipairs { "e4m3", "e2m1" } do
          local m = engine.mx.quantize(a, { format = format })
          engine.mx.matmul(m, m)
        end
      end
    end).operations) do flops[r.op] = r.flops end
    local convolution = 2 * (2 * 3 * 3 * 6) * (2 * 3 * 3)
    for _, op in ipairs { "conv2d", "conv2d_grad_x", "conv2d_grad_w" } do
      assert.equal(convolution, flops[op], op)
    end
    assert.equal(2 * (4 * 4 * 128 + 128 * 128 * 4), flops.fp8_matmul)
    assert.equal(2 * 2 * 4 * 4 * 128, flops.mx_matmul)
  end)

  it("separates transposed products and the passes over the parameters", function()
    local w = engine.randn(4, 3, { keep = true })
    local opt = engine.optim.adamw { { name = "w", tensor = w:requires_grad() } }
    local profile = engine.profile(function()
      for _ in engine.steps(2) do
        opt:zero_grad()
        w:matmul(engine.ones(4, 2), true):sum():backward()
        opt:clip_grad_norm(1)
        opt:step()
      end
    end)
    local seen = {}
    for _, r in ipairs(profile.rows) do seen[r.op .. " " .. r.detail] = r.calls end
    assert.equal(2, seen["matmul f32 [4 x 3]', f32 [4 x 2] -> f32"])
    assert.equal(2, seen["(optimizer) "])
    assert.equal(2, seen["(gradient statistics) "])
  end)

  it("prints operations and their kinds", function()
    local text = tostring(engine.profile(work))
    assert.is_truthy(text:find("matmul%s+3%s+[%d.]+%s+[%d.]+%%%s+[%d.]+ GFLOP/s"))
    assert.is_truthy(text:find("(outside kernels)", 1, true))
  end)

  it("starts from zero each time and keeps the current device", function()
    local before = engine.device()
    engine.profile(work)
    local profile = engine.profile(function() engine.scope(function() engine.ones(2):exp() end) end)
    for _, r in ipairs(profile.rows) do assert.are_not.equal("matmul", r.op) end
    assert.equal(before, engine.device())
    engine.profile(function() engine.device("reference") end)
    assert.equal("reference", engine.device())
    engine.device(before)
  end)

  it("can be inside the trap, which is inside another profile", function()
    local inner, after
    engine.profile(function()
      trap.watch({}, function()
        inner = engine.profile(work)
        trap.watch({}, work)
        after = engine.profile(function() end)
        work()
      end)
    end)
    assert.equal(3, calls_of(inner))
    assert.equal(1, #after.operations)          -- (outside kernels)
    assert.is_nil(trap.watch({}, function() error "x" end))
    assert.equal(3, calls_of(engine.profile(work)))
  end)

  it("ends while the trap that was set around it goes on", function()
    local rows = M_ffi.new("eng_profile_row[1]")
    C.eng_profile(true)
    C.eng_trap(true)
    C.eng_profile(false)
    work()
    C.eng_trap(false)
    work()
    assert.equal(0, C.eng_profile_rows(rows, 1))
    assert.equal(3, calls_of(engine.profile(work)))
  end)

  it("passes errors on and stops profiling", function()
    assert.error_matches(function() engine.profile(function() error("oh", 0) end) end, "^oh$")
    assert.error_matches(function() engine.profile(3) end, "expected a function, got 3")
    local before = #engine.profile(function() end).rows
    assert.equal(0, before)
  end)
end)
