-- Lagged statistics and updates: the statistics of a step are requested and read later; the device
-- itself skips and clips updates, and counts them.
local engine = require "engine.base.ffi"
local sets = require "spec.cpu.kernels.parameter_set"
local ffi, C, check = engine.ffi, engine.C, engine.check

local inf = math.huge
local SHAPES = { { 20001 }, { 9, 3 }, { 5 } }
local ADAMW = { lr = 1e-2, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.1 }

local function start(set, needs, losses)
  local list = ffi.new("eng_tensor[?]", math.max(#(losses or {}), 1))
  for i, x in ipairs(losses or {}) do list[i - 1] = x end
  return C.eng_params_stats_start(set.params, needs or 31, list, #(losses or {}), nil)
end

local function fetch(set, scale)
  local record, stats, loss = ffi.new("eng_record"), ffi.new("eng_tensor_stats[?]", set.n),
    ffi.new("double[1]")
  check(C.eng_params_stats_fetch(record, stats, loss, set.params, scale or 1))
  return record, stats, loss[0]
end

--- Gradients of a step: small ones times `size`, with `bad` at one place if given.
local function gradients(step, size, bad)
  local lists = {}
  for i, shape in ipairs(SHAPES) do
    local n = sets.count_of(shape)
    local list = ffi.new("float[?]", n)
    for k = 0, n - 1 do list[k] = math.sin(k * 0.37 + i + step) * size end
    if bad and i == 2 then list[3] = bad end
    lists[i] = list
  end
  return lists
end

describe("lagged updates", function()
  it("give the same weights as updates that the host decides", sets.step(function()
    -- size of the gradients, and the bad value in them
    local steps = { { 1 }, { 64 }, { 1, inf }, { 0.5 }, { 2, 0 / 0 }, { 3 }, { 1 } }
    for _, format in ipairs { "f32", "f16" } do
      for _, kind in ipairs(sets.KINDS) do
        sets.everywhere(function()
          local eager, lagged = sets.new(SHAPES, { gradient = format }),
            sets.new(SHAPES, { gradient = format })
          eager:optimizer(kind.name)
          lagged:optimizer(kind.name)
          local t, factor, clip = 1, 1 / 8, 200
          for number, step in ipairs(steps) do
            local lists = gradients(number, unpack(step))
            eager:write_gradients(lists, "f32")
            lagged:write_gradients(lists, "f32")
            local record = eager:stats(8)
            assert.equal(step[2] and 1 or 0, record.overflow)
            if record.overflow == 0 then
              local own = factor
              if record.norm > clip then own = own * clip / (record.norm + 1e-6) end
              eager:update { hyper = kind.hyper, factor = own, t = t }
              t = t + 1
            end
            check(start(lagged, C.ENG_NEED_NORM))
            lagged:update { hyper = kind.hyper, factor = factor, t = 1, lagged = true,
              clip_norm = clip }
            local late = fetch(lagged, 8)
            assert.equal(record.overflow, late.overflow)
            assert.equal(record.norm, late.norm)
          end
          for i = 1, #SHAPES do
            local one, other = eager:weights(i), lagged:weights(i)
            for k = 1, #one, 7 do
              assert(math.abs(one[k] - other[k]) <= 1e-6 * math.abs(one[k]),
                ("tensor %d, element %d: %.9g, lagged %.9g"):format(i, k, one[k], other[k]))
            end
          end
          -- An update that is not lagged restarts the count.
          eager:write_gradients(gradients(9, 1), "f32")
          lagged:write_gradients(gradients(9, 1), "f32")
          eager:update { hyper = kind.hyper, t = 40 }
          lagged:update { hyper = kind.hyper, t = 40 }
          local one, other = eager:weights(2), lagged:weights(2)
          for k = 1, #one do assert(math.abs(one[k] - other[k]) <= 1e-6 * math.abs(one[k])) end
          eager:free()
          lagged:free()
        end)
      end
    end
  end))

  --- Weights of parameter 2 after updates from gradients of the given sizes. A size of NaN stands
  --- for gradients of size 1 with one NaN.
  local function updated(set, from, to, sizes)
    for number = from, to do
      local size = sizes[number]
      set:write_gradients(gradients(number, size == size and size or 1,
        size ~= size and 0 / 0 or nil), "f32")
      check(start(set, C.ENG_NEED_NORM))
      set:update { hyper = ADAMW, factor = 1 / 8, t = number, lagged = true, clip_norm = 200 }
      fetch(set, 8)
    end
    return set:weights(2)
  end
  local SIZES = { 1, 3, 0.5, 2, 1, 4 }

  it("of two sets keep their records and numbers apart, in any order of requests",
    sets.step(function()
    sets.everywhere(function()
      local alone = sets.new(SHAPES, {})
      alone:optimizer("adamw")
      local want = updated(alone, 1, 6, SIZES)
      alone:free()
      local one, other = sets.new(SHAPES, {}), sets.new({ { 4 } }, {})
      one:optimizer("adamw")
      other:optimizer("adamw")
      for number = 1, 6 do
        other:write_gradients { { number, 0, 0, 1 / 0 } }
        check(start(other))
        one:write_gradients(gradients(number, SIZES[number]), "f32")
        check(start(one, C.ENG_NEED_NORM))
        one:update { hyper = ADAMW, factor = 1 / 8, t = number, lagged = true, clip_norm = 200 }
        other:update { hyper = ADAMW, factor = 1, t = number, lagged = true, clip_norm = 0 }
        if number % 2 == 1 then assert.equal(1, fetch(other).overflow) end
        assert.equal(0, fetch(one, 8).overflow)
        if number % 2 == 0 then assert.equal(number, fetch(other).amax) end
      end
      assert.same(want, one:weights(2))
      assert.same({ 0, 0, 0, 0 }, other:weights(1))          -- inf in every step: never updated
      one:free()
      other:free()
    end)
  end))

  it("restart the count at the caller's request, from the first update that is not skipped",
    sets.step(function()
    sets.everywhere(function()
      local function fresh()
        local set = sets.new(SHAPES, {})
        set:optimizer("adamw")
        return set
      end
      -- The first update overflows and is skipped, so the second one has t = 1. The caller does not
      -- know this yet and passes 2.
      local plain, late = fresh(), fresh()
      local want = updated(plain, 1, 1, { 3 })
      late:write_gradients(gradients(9, 1, inf), "f32")
      check(start(late, C.ENG_NEED_NORM))
      late:update { hyper = ADAMW, factor = 1 / 8, t = 1, lagged = true, clip_norm = 200 }
      late:write_gradients(gradients(1, 3), "f32")
      check(start(late, C.ENG_NEED_NORM))
      late:update { hyper = ADAMW, factor = 1 / 8, t = 2, lagged = true, clip_norm = 200 }
      assert.same(want, late:weights(2))
      plain:free()
      late:free()
      -- After a restart the caller's t counts. Here the weights and moments of an earlier update
      -- are restored into the same optimizer.
      local set = fresh()
      updated(set, 1, 2, SIZES)
      local kept = { (set:weights(2)), (sets.read(set:moment(1, 2))),
        (sets.read(set:moment(2, 2))) }
      want = updated(set, 3, 3, SIZES)
      updated(set, 4, 6, SIZES)
      set:write_weights(2, kept[1])
      sets.write(set:moment(1, 2), kept[2])
      sets.write(set:moment(2, 2), kept[3])
      C.eng_optimizer_restart(set.state)
      assert.same(want, updated(set, 3, 3, SIZES))
      set:free()
    end)
  end))

  it("report a change of 0 when they are skipped", sets.step(function()
    check(C.eng_device_set "cpu")      -- a card refuses norms in a lagged update
    local set, norms = sets.new({ { 3 }, { 9, 3 } }, {}), ffi.new("double[?]", 2 * C.ENG_NORMS, 7)
    set:optimizer("adamw")
    set:write_gradients({ { 1, inf, 3 }, gradients(1, 1)[2] }, "f32")
    check(start(set, C.ENG_NEED_NORM))
    set:update { hyper = ADAMW, factor = 1, t = 1, lagged = true, norms = norms }
    for i = 0, 1 do assert.equal(0, norms[i * C.ENG_NORMS + C.ENG_NORM_UPDATE]) end
    fetch(set)
    set:free()
  end))

  it("of short-lived optimizers each start at their own count", sets.step(function()
    local want
    for _ = 1, 70 do      -- more than a device has counters
      local set = sets.new({ { 3 }, { 9, 3 } }, {})
      set:optimizer("adamw")
      for number = 1, 2 do
        set:write_gradients({ { 1, 2, 3 }, gradients(number, 1)[2] }, "f32")
        check(start(set, C.ENG_NEED_NORM))
        set:update { hyper = ADAMW, factor = 1, t = number, lagged = true, clip_norm = 0 }
        fetch(set)
      end
      want = want or set:weights(1)
      assert.same(want, set:weights(1))
      set:free()
    end
  end))

  it("withdraw statistics of a failed step, and drop those left in flight",
    sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 2 } }, {})
      for k = 1, 3 do
        set:write_gradients { { 3 * k, 4 * k } }
        check(start(set))
      end
      check(C.eng_params_stats_withdraw(set.params))
      assert.equal(5, fetch(set).norm)
      assert.equal(10, fetch(set).norm)
      assert.error_matches(function() fetch(set) end, "none were requested")
      check(start(set))
      check(start(set))
      C.eng_params_stats_forget(set.params)
      assert.is_true(C.eng_params_stats_withdraw(set.params) ~= 0)
      assert.error_matches(function() fetch(set) end, "none were requested")
      set:write_gradients { { 6, 8 } }
      check(start(set))
      assert.equal(10, fetch(set).norm)
      -- dropped statistics decide nothing: an update without statistics is refused
      set:optimizer("adamw")
      set:write_gradients { { 1 / 0, 1 } }
      check(start(set))
      C.eng_params_stats_forget(set.params)
      set:write_gradients { { 1, 1 } }
      assert.error_matches(function()
        set:update { hyper = ADAMW, factor = 1, t = 1, lagged = true, clip_norm = 0 }
      end, "a lagged update needs gradient statistics")
      set:free()
    end)
  end))

  it("return records and losses in the order of the requests", sets.step(function()
    sets.everywhere(function()
      local set = sets.new({ { 100 }, { 3 } }, { gradient = "bf16" })
      for round = 1, 4 do
        local losses = {}
        for i = 1, round do
          losses[i] = ffi.new("eng_tensor")
          check(C.eng_new(losses[i], engine.dtype.f32, 0, nil, C.ENG_AUTO))
          check(C.eng_fill(losses[i], round + i / 16))
        end
        local values = {}
        for k = 1, 100 do values[k] = k % 4 == 0 and 0 or round end
        set:write_gradients { values, round ~= 2 and { 1, 2, 2 ^ round * 4 } or false }
        check(start(set, 31, losses))
      end
      assert.is_true(start(set) ~= 0)
      assert.matches("not been fetched", engine.message())
      for round = 1, 4 do
        local record, stats, loss = fetch(set, 2)
        assert.equal(round * round + round * (round + 1) / 32, loss)
        assert.equal(25, tonumber(stats[0].zeros))
        assert.equal(round, stats[0].amax)
        assert.equal(round == 2 and 0 or 3, tonumber(stats[1].count))
        assert.equal((round == 2 and 2 or 2 ^ round * 4) / 2, record.amax)
      end
      assert.error_matches(function() fetch(set) end, "none were requested")
      check(start(set))   -- left in flight: freeing the set drops it
      set:free()
      local other = sets.new { { 2 } }
      other:write_gradients { { 3, 4 } }
      check(start(other))
      assert.equal(5, (fetch(other)).norm)
      other:free()
    end)
  end))
end)
