-- Parameter sets: adopting tensors, gradients and low-precision weights, freeing everything.
local engine = require "engine.base.ffi"
local sets = require "spec.cpu.kernels.parameter_set"
local ffi, C, check = engine.ffi, engine.C, engine.check

local function memory(name)
  local rows = ffi.new("eng_memory_row[16]")
  for i = 0, C.eng_memory(rows, 16) - 1 do
    if ffi.string(rows[i].name) == name then
      return tonumber(rows[i].used), tonumber(rows[i].allocations)
    end
  end
end

local function info(x)
  local facts = ffi.new("eng_tensor_info")
  check(C.eng_info(facts, x))
  return facts
end

describe("a parameter set", function()
  it("keeps handles, values and order", sets.step(function()
    local a, b = sets.kept { 2, 3 }, sets.kept {}
    sets.write(a, { 1, 2, 3, 4, 5, 6 })
    sets.write(b, { -7 })
    local set = assert(sets.wrap({ a, b }, { "a", "b" }))
    assert.same({ 1, 2, 3, 4, 5, 6 }, (sets.read(a)))
    assert.same({ -7 }, (sets.read(b)))
    assert.equal(7, tonumber(C.eng_params_count(set.params)))
    assert.equal(2, info(a).owner)
    local address = tonumber(ffi.cast("uintptr_t", info(b).data))
    assert.equal(0, address % 64)
    assert.equal(64, address - tonumber(ffi.cast("uintptr_t", info(a).data)))
    set:free()
  end))

  it("adopts a leaf with strides, row by row", sets.step(function()
    local base = sets.kept { 2, 3 }
    sets.write(base, { 1, 2, 3, 4, 5, 6 })
    C.eng_grad_enabled(false)
    local turned = engine.run("permute", { engine.Tensor(base[0]) }, { 1, 0 })
    C.eng_grad_enabled(true)
    local leaf = ffi.new("eng_tensor[1]")
    leaf[0].slot, leaf[0].generation = turned.slot, turned.generation
    local set = assert(sets.wrap({ leaf }, { "turned" }))
    assert.same({ 1, 4, 2, 5, 3, 6 }, (sets.read(leaf)))
    assert.equal(1, info(leaf).contiguous)
    set:free()
  end))

  it("has a checksum of the bits of its weights", sets.step(function()
    local set = sets.new({ { 2 }, { 1 } })
    set:write_weights(1, { 1, -2 })
    set:write_weights(2, { 0.5 })
    local function hash(data, bytes) return C.eng_hash64(data, bytes) end
    local function piece(data, bytes) return hash(ffi.new("uint64_t[1]", hash(data, bytes)), 8) end
    local of_each = ffi.new("uint64_t[2]", piece(ffi.new("float[2]", 1, -2), 8),
      piece(ffi.new("float[1]", 0.5), 4))
    assert.is_true(hash(of_each, 16) == set:checksum())
    set:write_weights(2, { -0.5 })
    assert.is_false(hash(of_each, 16) == set:checksum())
    set:free()
  end))

  it("refuses tensors that cannot be parameters", sets.step(function()
    local a, b = sets.kept { 2 }, sets.kept { 3 }
    local function refuses(leaves, names, pattern)
      local set, message = sets.wrap(leaves, names)
      assert.is_nil(set)
      assert.is_truthy(message:find(pattern), message)
    end
    refuses({ a, b, a }, { "first", "second", "third" },
      "first and third are the same tensor f32 %[2%]")
    refuses({ a, b }, { "first" }, "number 1 has no name")
    local half = ffi.new("eng_tensor[1]")
    check(C.eng_new(half, engine.dtype.f16, 1, ffi.new("int64_t[1]", 2), true))
    refuses({ a, half }, { "a", "h" },
      "parameter h: expected f32 or bf16 master weights, got f16 %[2%]")
    check(C.eng_free(half))
    refuses({ half }, { "gone" }, "parameter gone: .*freed")
    local made = engine.run("add", { engine.Tensor(a[0]), engine.Tensor(a[0]) })
    local result = ffi.new("eng_tensor[1]")
    result[0].slot, result[0].generation = made.slot, made.generation
    refuses({ result }, { "y" }, "expected a leaf")
    local set = assert(sets.wrap({ a }, { "a" }))
    refuses({ a }, { "again" }, "is already parameter a of another optimizer")
    assert.same({ 0, 0, 0 }, (sets.read(b)))   -- unchanged by the failures
    set:free()
  end))

  it("may be empty", sets.step(function()
    local set = assert(sets.wrap({}, {}))
    set:optimizer("adamw")
    set:precision("f16", "f16")
    assert.equal(0, tonumber(set:stats().count))
    assert.is_false(set:unscale(2))
    set:update { hyper = { lr = 1 } }
    set:free()
  end))

  it("gives gradients the dtype of the recipe, and clears them when the recipe changes",
    sets.step(function()
    local set = sets.new({ { 2 }, { 2 } },
      { gradient = { "f16", "bf16" }, shadow = { "f16", "f32" } })
    set:write_gradients { { 1, 70000 }, { 1, 70000 } }
    assert.same({ { 1, math.huge }, "f16" }, { sets.read(set:gradient(1)) })
    assert.equal("bf16", select(2, sets.read(set:gradient(2))))
    set:precision({ "f16", "f32" }, { "f16", "bf16" })
    assert.is_nil(set:gradient(1))
    set:precision("f32", "f32")
    set:write_gradients { { 1, 70000 }, { 2, 3 } }
    assert.same({ { 1, 70000 }, "f32" }, { sets.read(set:gradient(1)) })
    assert.error_matches(function() set:precision("i32", "f32") end,
      "parameter p1: expected weights .* got i32")
    assert.error_matches(function() set:precision("f32", "f64") end,
      "parameter p1: expected gradients .* got f64")
    set:free()
  end))

  it("accumulates gradients of several backward passes", sets.step(function()
    for _, format in ipairs { "f32", "f16", "bf16" } do
      local set = sets.new({ { 2 } }, { gradient = format, shadow = format })
      for _ = 1, 3 do
        local x = engine.Tensor(set.leaf[1][0])
        check(C.eng_backward(engine.run("sum", { engine.run("mul", { x, x }) }, { 1, 0 }), 8,
          false))
        set:write_weights(1, { 1, 2 })
      end
      assert.same({ 2 * 16, 2 * 32 }, (sets.read(set:gradient(1))))   -- the first pass saw zeros
      set:free()
    end
  end))

  it("copies a true gradient without changing the stored one", sets.step(function()
    local values = { 1, -2 ^ -24, 65504, 0, 1 / 0, -1 / 0, 0 / 0, 3, 2 ^ -14 }
    local has, into, half = ffi.new("int[1]"), sets.kept { 3, 3 }, ffi.new("eng_tensor[1]")
    check(C.eng_new(half, engine.dtype.f16, 2, ffi.new("int64_t[2]", 3, 3), C.ENG_STEP))
    for _, format in ipairs { "f32", "f16", "bf16" } do
      local set = sets.new({ { 3, 3 }, { 2 } }, { gradient = format, shadow = format })
      check(C.eng_params_true_gradient(has, into, set.params, 0, 1))
      assert.equal(0, has[0])                       -- the parameter has no gradient yet
      check(C.eng_params_relative_scale(set.params, ffi.new("double[2]", 4, 1)))
      set:write_gradients({ ffi.new("float[9]", values), ffi.new("float[2]") }, "f32")
      local before = sets.read(set:gradient(1))
      for _, factor in ipairs { 0.5, 2 ^ 120, 2 ^ -140, 2 ^ 129 } do
        check(C.eng_params_true_gradient(has, into, set.params, 0, factor))
        assert.equal(1, has[0])
        for i, x in ipairs((sets.read(into))) do
          local want = tonumber(ffi.cast("float", before[i] * (factor / 4)))
          assert.is_true(x == want or x ~= x and want ~= want,
            ("%s, factor %g, element %d: expected %g, got %g"):format(format, factor, i, want, x))
        end
      end
      assert.same(tostring(before[1]), tostring(sets.read(set:gradient(1))[1]))
      local function fails(text, x, index)
        assert.is_true(C.eng_params_true_gradient(has, x, set.params, index, 1) ~= 0)
        assert.matches(text, engine.message(), 1, true)
      end
      fails("expected a parameter index from 0 to 1, got 2", into, 2)
      fails("expected a parameter index from 0 to 1, got -1", into, -1)
      fails("expected a tensor of its shape [2], got [3 x 3]", into, 1)
      fails("expected an f32 tensor in cpu memory, got f16 [3 x 3] in cpu memory", half, 0)
      set:free()
    end
  end))

  it("allocates memory for gradients and moments at first use, and frees all of it",
    sets.step(function()
    check(C.eng_step_end())
    check(C.eng_step_begin())
    sets.new({}):free()   -- frees buffers that earlier tests left waiting
    local before, before_gradients, before_moments = memory("parameters"), memory("gradients"),
      memory("optimizer")
    local set = sets.new({ { 1000, 1000 }, { 7 } }, { gradient = "f16", shadow = "bf16" })
    set:optimizer("adam")
    local during = memory("parameters") - before
    assert.is_true(during >= 6e6 and during < 6.1e6)
    assert.equal(before_gradients, memory("gradients"))
    assert.equal(before_moments, memory("optimizer"))
    set:write_gradients({ ffi.new("float[?]", 1e6), ffi.new("float[?]", 7) }, "f32")
    set:update { hyper = { lr = 0.1 } }
    during = memory("gradients") - before_gradients
    assert.is_true(during >= 2e6 and during < 2.1e6)
    assert.is_true(memory("optimizer") - before_moments >= 8e6)
    check(C.eng_step_end())            -- frees the views of gradients
    check(C.eng_step_begin())
    set:free()
    assert.equal(before, memory("parameters"))
    assert.equal(before_gradients, memory("gradients"))
    assert.equal(before_moments, memory("optimizer"))
    assert.error_matches(function() sets.read(set.leaf[1]) end, "freed")
  end))

  it("keeps its memory until views of the step are gone", sets.step(function()
    local set = sets.new({ { 2, 3 } })
    set:write_weights(1, { 1, 2, 3, 4, 5, 6 })
    C.eng_grad_enabled(false)
    local turned = engine.run("permute", { engine.Tensor(set.leaf[1][0]) }, { 1, 0 })
    C.eng_grad_enabled(true)
    local before = memory("parameters")
    set:free()
    assert.same({ 1, 4, 2, 5, 3, 6 }, (sets.read(turned)))
    assert.equal(before > 0, memory("parameters") > 0)
    check(C.eng_step_end())
    check(C.eng_step_begin())
    -- creating a set also frees the memory of sets that were freed while views still used it
    local other = sets.new({ { 1 } })
    assert.error_matches(function() sets.read(set.leaf[1]) end, "freed")
    other:free()
  end))

  it("takes no memory from the system after the first step", function()
    local set
    local function step(t)
      check(C.eng_step_begin())
      set = set or sets.new({ { 300, 70 }, { 70 } }, { gradient = "f16", shadow = "f16" })
      if not set.state then set:optimizer("sgd") end
      local gradients = { ffi.new("float[?]", 21000), ffi.new("float[?]", 70) }
      set:write_gradients(gradients, "f32")
      set:stats(1)
      set:unscale(0.5)
      set:update { hyper = { lr = 0.1, momentum = 0.9 }, t = t }
      check(C.eng_step_end())
    end
    local function allocations()
      local total, used = 0, {}
      for _, name in ipairs { "parameters", "gradients", "optimizer", "kept", "step", "scratch" } do
        local bytes, n = memory(name)
        total = total + n
        if name ~= "step" then used[#used + 1] = bytes end
      end
      return total, table.concat(used, " ")
    end
    step(1)
    local before, bytes = allocations()
    for t = 2, 6 do step(t) end
    local after, bytes_after = allocations()
    assert.equal(before, after)
    assert.equal(bytes, bytes_after)
    set:free()
  end)
end)
