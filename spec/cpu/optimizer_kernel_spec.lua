-- The fused optimizer updates against the textbook formulas in double precision. Every instruction
-- set and number of threads must give the same updates.
local engine = require "engine.base.ffi"
local sets = require "spec.cpu.kernels.parameter_set"
local ffi = engine.ffi

local inf, nan = math.huge, 0 / 0

local function numbers(n, seed, scale)
  local list, state = {}, seed
  for i = 1, n do
    state = (state * 48271) % 2147483647
    list[i] = (state / 2147483647 - 0.5) * 2 * (scale or 1)
  end
  return list
end

local function sign(x) return x > 0 and 1 or x < 0 and -1 or x end

-- One element in double: w, g, moments m and v, t counted from 1; returns w, m, v.
local FORMULA = {}
function FORMULA.sgd(h, w, g, m, _, t)
  g = g + (h.weight_decay or 0) * w
  if (h.momentum or 0) ~= 0 then
    m = t == 1 and g or h.momentum * m + (1 - (h.dampening or 0)) * g
    g = h.nesterov == 1 and g + h.momentum * m or m
  end
  return w - h.lr * g, m
end
function FORMULA.adam(h, w, g, m, v, t)
  g = g + (h.weight_decay or 0) * w
  m, v = h.beta1 * m + (1 - h.beta1) * g, h.beta2 * v + (1 - h.beta2) * g * g
  return w - h.lr / (1 - h.beta1 ^ t) * m / (math.sqrt(v) / math.sqrt(1 - h.beta2 ^ t) + h.eps), m,
    v
end
function FORMULA.adamw(h, w, g, m, v, t)
  local plain = { lr = h.lr, beta1 = h.beta1, beta2 = h.beta2, eps = h.eps }
  return FORMULA.adam(plain, w * (1 - h.lr * (h.weight_decay or 0)), g, m, v, t)
end
function FORMULA.lion(h, w, g, m)
  local direction = sign(h.beta1 * m + (1 - h.beta1) * g)
  return w * (1 - h.lr * (h.weight_decay or 0)) - h.lr * direction, h.beta2 * m + (1 - h.beta2) * g
end

local CASES = {
  { kind = "sgd", { lr = 0.1 }, { lr = 0.1, weight_decay = 0.1 }, { lr = 0.05, momentum = 0.9 },
    { lr = 0.05, momentum = 0.9, nesterov = 1, weight_decay = 0.01 },
    { lr = 0.05, momentum = 0.8, dampening = 0.5 } },
  { kind = "adam", { lr = 1e-2, beta1 = 0.9, beta2 = 0.999, eps = 1e-8 },
    { lr = 1e-2, beta1 = 0.2, beta2 = 0.9, eps = 1e-3, weight_decay = 0.1 } },
  { kind = "adamw", { lr = 1e-2, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1 } },
  { kind = "lion", { lr = 1e-3, beta1 = 0.9, beta2 = 0.99 },
    { lr = 1e-3, beta1 = 0.95, beta2 = 0.98, weight_decay = 0.5 } },
}
local ADAMW = { lr = 1e-2, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.1 }

describe("optimizer updates", function()
  it("have a formula and cases here for each fused optimizer", function()
    for i, kind in ipairs(sets.KINDS) do
      assert.is_function(FORMULA[kind.name], kind.name)
      assert.equal(kind.name, CASES[i] and CASES[i].kind, "CASES, in the order of optimizers.def")
    end
  end)

  for _, case in ipairs(CASES) do
    for number, hyper in ipairs(case) do
      it(("follow the formulas for 20 steps: %s %d"):format(case.kind, number), sets.step(function()
        local shapes = { { 67 }, { 5, 3 } }
        sets.everywhere(function()
          local set = sets.new(shapes)
          set:optimizer(case.kind)
          local w, m, v = {}, {}, {}
          for i, shape in ipairs(shapes) do
            local n = sets.count_of(shape)
            w[i], m[i], v[i] = numbers(n, 7 * i), {}, {}
            set:write_weights(i, w[i])
            for k = 1, n do m[i][k], v[i][k] = 0, 0 end
          end
          for t = 1, 20 do
            local lists = {}
            for i, shape in ipairs(shapes) do
              lists[i] = numbers(sets.count_of(shape), 1000 * i + t, 0.1)
            end
            set:write_gradients(lists)
            set:update { hyper = hyper, t = t }
            for i, list in ipairs(lists) do
              for k, g in ipairs(list) do
                w[i][k], m[i][k], v[i][k] = FORMULA[case.kind](hyper, w[i][k], g, m[i][k], v[i][k],
                  t)
              end
            end
          end
          for i in ipairs(shapes) do
            for k, got in ipairs(set:weights(i)) do
              assert.is_true(math.abs(got - w[i][k]) <= 3e-6 * math.max(1, math.abs(w[i][k])),
                  ("element %d of tensor %d: expected %.9g, got %.9g"):format(k, i, w[i][k], got))
            end
          end
          set:free()
        end)
      end))
    end
  end

  it("have the same bits on every instruction set and number of threads", sets.step(function()
    local lengths = { 1, 15, 513, 65536, 65537, 3, 70001 }
    local shapes, weights = {}, {}
    for i, n in ipairs(lengths) do
      shapes[i] = { n }
      weights[i] = ffi.new("float[?]", n)
      for k = 0, n - 1 do weights[i][k] = math.sin(k + i) end
    end
    for _, case in ipairs(CASES) do
      local hyper = case[#case]
      for _, format in ipairs { "f32", "f16", "bf16" } do
        local gradients = {}
        for i, n in ipairs(lengths) do
          gradients[i] = ffi.new("float[?]", n)
          for k = 0, n - 1 do gradients[i][k] = math.cos(k * 3 + i) * 100 end
        end
        local first
        sets.everywhere(function()
          local set = sets.new(shapes, { gradient = format, shadow = format })
          for i in ipairs(lengths) do set:write_weights(i, weights[i], "f32") end
          set:optimizer(case.kind, format == "bf16" and "bf16" or "f32")
          for t = 1, 2 do
            set:write_gradients(gradients, "f32")
            set:update { hyper = hyper, t = t, factor = 1 / 128, clip = 0.7 }
          end
          local sum = tostring(set:checksum())
          set:free()
          first = first or sum
          assert.equal(first, sum)
        end)
      end
    end
  end))

  -- The four sums of squares of each of n parameters, from values read back.
  local function norms_of(set, n, before)
    local list = {}
    for i = 1, n do
      local w, square = set:weights(i), { 0, 0, 0, 0 }
      local moments = { set:moment(1, i), set:moment(2, i) }
      local m, v = moments[1] and (sets.read(moments[1])), moments[2] and (sets.read(moments[2]))
      for k, x in ipairs(w) do
        for which, value in ipairs { x - before[i][k], x, m and m[k] or 0,
          v and v[k] or 0 } do
          square[which] = square[which] + value * value
        end
      end
      list[i] = square
    end
    return list
  end

  local function near(want, got, tolerance, what)
    assert.is_true(math.abs(got - want) <= tolerance * math.abs(want),
      ("%s: expected %.12g, got %.12g"):format(what, want, got))
  end

  it("add up the norms of change, weights and moments", sets.step(function()
    local lengths = { 1, 37, 5000, 70001 }
    local shapes = {}
    for i, n in ipairs(lengths) do shapes[i] = { n } end
    for _, case in ipairs(CASES) do
      local hyper = case[#case]
      for _, size in ipairs { 1, 1e-9 } do
        local first = {}
        sets.everywhere(function(where)
          local set = sets.new(shapes)
          set:optimizer(case.kind)
          local before, sums = {}, ffi.new("double[?]", #lengths * 4)
          for i, n in ipairs(lengths) do set:write_weights(i, numbers(n, i)) end
          for t = 1, 3 do
            local lists = {}
            for i, n in ipairs(lengths) do
              lists[i], before[i] = numbers(n, 77 * i + t, size), set:weights(i)
            end
            set:write_gradients(lists)
            set:update { hyper = hyper, t = t, norms = sums }
          end
          for i, square in ipairs(norms_of(set, #lengths, before)) do
            for k, want in ipairs(square) do
              near(want, sums[i * 4 - 5 + k], 2e-6, ("%s, %g, norm %d of tensor %d"):format(
                case.kind, size, k, i))
            end
          end
          local bits = ffi.string(sums, ffi.sizeof(sums))
          local same = where ~= "avx2" and where or "avx512"
          first[same] = first[same] or bits
          assert.equal(first[same], bits)
          set:free()
        end)
      end
    end
  end))

  it("shrink the change of all weights to update_clip", sets.step(function()
    for _, case in ipairs(CASES) do
      local hyper = case[#case]
      local function run(limit)
        local w, before, sums = {}, {}, ffi.new("double[8]")
        local set = sets.new({ { 600 }, { 33 } })
        set:optimizer(case.kind)
        for i, n in ipairs { 600, 33 } do
          before[i] = numbers(n, i)
          set:write_weights(i, before[i])
        end
        set:write_gradients { numbers(600, 5), numbers(33, 6) }
        set:update { hyper = hyper, norms = sums, update_clip = limit }
        for i = 1, 2 do w[i] = set:weights(i) end
        local moment = set:moment(1, 1)
        moment = moment and table.concat((sets.read(moment)), " ")
        set:free()
        return w, before, sums, moment
      end
      sets.everywhere(function()
        local whole, before, sums, moment = run(0)
        local norm = math.sqrt(sums[0] + sums[4])
        local same = run(norm * 1.01)
        assert.same(whole, same)
        local less, _, unclipped, kept = run(norm / 4)
        assert.equal(moment, kept)                         -- moments take the whole gradient
        near(sums[0], unclipped[0], 1e-12, "the norm before clipping")
        for i = 1, 2 do
          for k, x in ipairs(less[i]) do
            local want = before[i][k] + (whole[i][k] - before[i][k]) / 4
            assert.is_true(math.abs(x - want) <= 1e-6)
          end
        end
      end)
    end
  end))

  it("limit single elements by spike_clip, and scale gradients by clips", sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 40 }, { 40 } })
      set:optimizer("adamw")
      local h, w, m, v = { lr = 1e-2, beta1 = 0.9, beta2 = 0.99, eps = 1e-8 }, {}, {}, {}
      for i = 1, 2 do
        w[i], m[i], v[i] = numbers(40, i), {}, {}
        for k = 1, 40 do m[i][k], v[i][k] = 0, 0 end
        set:write_weights(i, w[i])
      end
      local clips = ffi.new("double[2]", 1, 0.5)
      for t = 1, 6 do
        local lists = { numbers(40, 10 + t), numbers(40, 20 + t) }
        lists[1][3], lists[1][4], lists[2][40] = 50, -50, 30
        set:write_gradients(lists)
        local spike = t > 2 and 4 or 0
        set:update { hyper = h, t = t, spike_clip = spike, clips = clips }
        for i = 1, 2 do
          for k, g in ipairs(lists[i]) do
            g = g * clips[i - 1]
            local most = math.sqrt(spike * v[i][k])
            if spike > 0 and math.abs(g) > most then g = sign(g) * most end
            w[i][k], m[i][k], v[i][k] = FORMULA.adamw(h, w[i][k], g, m[i][k], v[i][k], t)
          end
        end
      end
      for i = 1, 2 do
        for k, got in ipairs(set:weights(i)) do
          assert.is_true(math.abs(got - w[i][k]) <= 3e-6, ("element %d of tensor %d"):format(k, i))
        end
      end
      set:optimizer("sgd")
      assert.error_matches(function()
        set:update { hyper = { lr = 1 }, spike_clip = 1 }
      end, "this optimizer cannot use spike_clip; expected 0, got 1")
      assert.error_matches(function()
        set:update { hyper = { lr = 1 }, update_clip = 1 }
      end, "update_clip needs norms")
      set:free()
    end)
  end))

  it("leave a parameter without gradient unchanged, moments included", sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 3 }, { 3 } })
      set:write_weights(1, { 1, 2, 3 })
      set:write_weights(2, { 1, 2, 3 })
      set:optimizer("adamw")
      set:write_gradients { { 1, 1, 1 }, false }
      set:update { hyper = ADAMW }
      assert.same({ 1, 2, 3 }, set:weights(2))
      assert.same({ 0, 0, 0 }, (sets.read(set:moment(1, 2))))
      assert.is_true(set:weights(1)[1] < 1)
      set:free()
    end)
  end))

  it("use each group's own hyperparameters", sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 1 }, { 1 } })
      set:optimizer("sgd", "f32", { 1, 0 })
      set:write_gradients { { 1 }, { 1 } }
      set:update { hyper = { { lr = 0.5 }, { lr = 2 } } }
      assert.same({ -2, -0.5 }, { set:weights(1)[1], set:weights(2)[1] })
      set:free()
    end)
  end))

  it("multiply gradients by the factor, then clamp", sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 5 } }, { gradient = "f16" })
      set:optimizer("sgd")
      set:write_gradients { { 65504, 1024, -4096, 2 ^ -24, inf } }
      set:update { hyper = { lr = 1 }, factor = 2 ^ -10, clip = 2 }
      assert.same({ -2, -1, 2, -2 ^ -34, -2 }, set:weights(1))
      set:free()
    end)
  end))

  it("work with loss scales over the whole range of f32", sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 2 } })
      set:optimizer("sgd")
      set:write_gradients { { 2 ^ -149, -2 ^ -140 } }
      set:update { hyper = { lr = 1 }, factor = 2 ^ 149 }
      assert.same({ -1, 512 }, set:weights(1))
      set:write_weights(1, { 0, 0 })
      set:write_gradients { { 2 ^ 127, -2 ^ 100 } }
      set:update { hyper = { lr = 1 }, factor = 2 ^ -140 }
      assert.same({ -2 ^ -13, 2 ^ -40 }, set:weights(1))
      set:free()
    end)
  end))

  it("let non-finite gradients through: skipping is up to the policy", sets.step(function()
    for _, kind in ipairs(sets.KINDS) do
      sets.everywhere(function()
        local set = sets.new({ { 20 } })
        set:optimizer(kind.name)
        local values = numbers(20, 3)
        values[2], values[19] = nan, nan
        set:write_gradients { values }
        set:update { hyper = kind.hyper, clip = 1 }
        local weights = set:weights(1)
        for k = 1, 20 do
          assert.equal(k == 2 or k == 19, weights[k] ~= weights[k], kind.name .. " " .. k)
        end
        set:free()
      end)
    end
  end))

  it("round the weights into their low-precision copies", sets.step(function()
    local recording = engine.C.eng_grad_enabled(false)
    for _, format in ipairs { "f16", "bf16" } do
      sets.everywhere(function()
        local set = sets.new({ { 1, 40 } }, { shadow = format, gradient = format })
        set:optimizer("sgd")
        engine.C.eng_grad_enabled(true)
        local gradient = numbers(40, 5)
        set:write_gradients { gradient }
        set:update { hyper = { lr = 1 } }
        engine.C.eng_grad_enabled(false)
        -- the product of a 1 [1 x 1] and the weight [1 x 40] is the low-precision copy itself
        local one = ffi.new("eng_tensor[1]")
        engine.check(engine.C.eng_new(one, engine.dtype[format], 2, ffi.new("int64_t[2]", { 1, 1 }),
          false))
        engine.check(engine.C.eng_fill(one, 1))
        engine.C.eng_autocast(ffi.new("eng_precision", { engine.dtype[format], -1, -1, -1 }), nil)
        local y = engine.run("matmul", { engine.Tensor(one[0]), engine.Tensor(set.leaf[1][0]) })
        engine.C.eng_autocast(nil, nil)
        local rounded = engine.run("cast", { engine.Tensor(set.leaf[1][0]) },
          { engine.dtype[format] })
        assert.same((sets.read(rounded)), (sets.read(y)))
        assert.is_true(set:weights(1)[1] ~= 0)
        set:free()
      end)
    end
    engine.C.eng_grad_enabled(recording)
  end))
end)

describe("optimizer state", function()
  it("resumes from its moments to the bit", sets.step(function()
    for _, case in ipairs(CASES) do
      for _, hyper in ipairs(case) do
        for _, format in ipairs { "f32", "bf16" } do
          local function run(set, from, to)
            for t = from, to do
              set:write_gradients { numbers(33, t), numbers(9, 50 + t) }
              set:update { hyper = hyper, t = t }
            end
          end
          local whole = sets.new({ { 33 }, { 9 } })
          whole:optimizer(case.kind, format)
          run(whole, 1, 3)
          local resumed = sets.new({ { 33 }, { 9 } })
          resumed:optimizer(case.kind, format)
          for i = 1, 2 do
            resumed:write_weights(i, whole:weights(i))
            for which = 1, sets.KINDS[case.kind].moments do
              sets.write(resumed:moment(which, i), (sets.read(whole:moment(which, i))))
            end
          end
          run(whole, 4, 6)
          run(resumed, 4, 6)
          assert.equal(tostring(whole:checksum()), tostring(resumed:checksum()))
          whole:free()
          resumed:free()
        end
      end
    end
  end))

  it("has as many moments as its row of optimizers.def says", sets.step(function()
    for _, kind in ipairs(sets.KINDS) do
      sets.everywhere(function()
        local set = sets.new({ { 20 } })
        set:optimizer(kind.name)
        set:write_gradients { numbers(20, 3) }
        set:update { hyper = kind.hyper }
        for which = 1, engine.C.ENG_MOMENTS do
          local moment = set:moment(which, 1)
          assert.equal(which <= kind.moments, moment ~= nil, kind.name)
          for _, x in ipairs(moment and (sets.read(moment)) or {}) do
            assert.not_equal(0, x, kind.name .. ": moment " .. which .. " was not updated")
          end
        end
        set:free()
      end)
    end
  end))

  it("starts momentum with dampening at a parameter's first nonzero gradient", sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 1 }, { 1 }, { 1 } })
      set:optimizer("sgd")
      local hyper = { lr = 1, momentum = 0.5, dampening = 0.5 }
      set:write_gradients { { 1 }, false, { 0 } }
      set:update { hyper = hyper, t = 1 }
      set:write_gradients { { 1 }, { 1 }, { 1 } }
      set:update { hyper = hyper, t = 2 }
      assert.same({ -2, -1, -1 },
        { set:weights(1)[1], set:weights(2)[1], set:weights(3)[1] })
      set:free()
    end)
  end))

  it("refuses what does not fit, and says why", sets.step(function()
    local set = sets.new({ { 1 }, { 1 } })
    assert.error_matches(function() set:optimizer(99) end,
      "unknown optimizer number 99; expected 0 to " .. #sets.KINDS - 1)
    assert.error_matches(function() set:optimizer("adam", "f16") end,
      "moments in f32 or bf16, got f16")
    assert.error_matches(function() set:optimizer("adam", "f32", { 0, -1 }) end,
      "expected a group >= 0 for parameter p2, got %-1")
    set:optimizer("adam", "f32", { 0, 1 })
    assert.error_matches(function() set:update { hyper = { ADAMW } } end,
      "p2 is in group 1 %(counted from 0%), but the number of groups is 1")
    assert.error_matches(function() set:update { hyper = { ADAMW, ADAMW }, kind = 2 } end,
      "expected an update of adam, got an update of adamw")
    assert.error_matches(function() set:update { hyper = { ADAMW, ADAMW }, t = 0 } end,
      "expected an update number of 1 or more")
    local most = engine.C.ENG_MOMENTS
    assert.error_matches(function() set:moment(most + 1, 1) end,
      "expected moment 1 to " .. most .. ", or 0 %(ENG_COMPENSATION%), got " .. most + 1)
    assert.error_matches(function() set:moment(1, 3) end, "index from 0 to 1")
    engine.C.eng_params_free(set.params)
    assert.error_matches(function() set:update { hyper = { ADAMW, ADAMW } } end, "was freed")
    engine.C.eng_optimizer_free(set.state)
  end))
end)
