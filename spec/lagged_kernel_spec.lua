-- Lagged statistics and updates: asked for at one step, read later, while the device skips, clips and counts by itself.
local engine = require "engine.ffi"
local sets = require "spec.kernels.parameter_set"
local ffi, C, check = engine.ffi, engine.C, engine.check

local inf = math.huge
local SHAPES = { { 20001 }, { 9, 3 }, { 5 } }
local ADAMW = { lr = 1e-2, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.1 }

local function start(set, needs, losses)
  local list = ffi.new("eng_tensor[?]", math.max(#(losses or {}), 1))
  for i, x in ipairs(losses or {}) do list[i - 1] = x end
  return C.eng_params_stats_start(set.params, needs or 31, list, #(losses or {}))
end

local function fetch(set, scale)
  local record, stats, loss = ffi.new("eng_record"), ffi.new("eng_tensor_stats[?]", set.n), ffi.new("double[1]")
  check(C.eng_params_stats_fetch(record, stats, loss, set.params, scale or 1))
  return record, stats, loss[0]
end

--- Gradients of a step: mild ones times `size`, with `bad` somewhere when it is given.
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
  it("do what updates do that are decided before they are made", sets.step(function()
    local steps = { { 1 }, { 64 }, { 1, inf }, { 0.5 }, { 2, 0 / 0 }, { 3 }, { 1 } }   -- size of the gradients, and what spoils them
    for _, format in ipairs { "f32", "f16" } do
      for _, kind in ipairs { "adamw", "sgd", "lion" } do
        sets.everywhere(function()
          local eager, lagged = sets.new(SHAPES, { gradient = format }), sets.new(SHAPES, { gradient = format })
          eager:optimizer(kind)
          lagged:optimizer(kind)
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
              eager:update { hyper = ADAMW, factor = own, t = t }
              t = t + 1
            end
            check(start(lagged, C.ENG_NEED_NORM))
            lagged:update { hyper = ADAMW, factor = factor, t = 1, lagged = true, clip_norm = clip }
            local late = fetch(lagged, 8)
            assert.equal(record.overflow, late.overflow)
            assert.equal(record.norm, late.norm)
          end
          for i = 1, #SHAPES do
            local one, other = eager:weights(i), lagged:weights(i)
            for k = 1, #one, 7 do
              assert(math.abs(one[k] - other[k]) <= 1e-6 * math.abs(one[k]), ("weight %d of %d: %.9g, lagged %.9g"):format(k, i, one[k], other[k]))
            end
          end
          -- An update that is not lagged counts anew.
          eager:write_gradients(gradients(9, 1), "f32")
          lagged:write_gradients(gradients(9, 1), "f32")
          eager:update { hyper = ADAMW, t = 40 }
          lagged:update { hyper = ADAMW, t = 40 }
          local one, other = eager:weights(2), lagged:weights(2)
          for k = 1, #one do assert(math.abs(one[k] - other[k]) <= 1e-6 * math.abs(one[k])) end
          eager:free()
          lagged:free()
        end)
      end
    end
  end))

  it("bring records and losses in the order they were asked for", sets.step(function()
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
      assert.matches("on their way", engine.message())
      for round = 1, 4 do
        local record, stats, loss = fetch(set, 2)
        assert.equal(round * round + round * (round + 1) / 32, loss)
        assert.equal(25, tonumber(stats[0].zeros))
        assert.equal(round, stats[0].amax)
        assert.equal(round == 2 and 0 or 3, tonumber(stats[1].count))
        assert.equal((round == 2 and 2 or 2 ^ round * 4) / 2, record.amax)
      end
      assert.error_matches(function() fetch(set) end, "none were asked for")
      check(start(set))   -- left behind: the set takes it along
      set:free()
      local other = sets.new { { 2 } }
      other:write_gradients { { 3, 4 } }
      check(start(other))
      assert.equal(5, (fetch(other)).norm)
      other:free()
    end)
  end))
end)
