-- The fast passes over all parameters beside their slow twins: gradient statistics, unscaling, optimizers with
-- their low-precision weights; and the gradients that kernels add straight into a parameter's buffer.
-- Each runs on device "reference" and then with every instruction set of this machine, from the same state.
local compare = require "spec.kernels.compare"
local engine = require "engine.ffi"
local tensors = require "spec.kernels.values"
local ffi, C, check = engine.ffi, engine.C, engine.check
local float, listed, whole = tensors.float, tensors.listed, tensors.whole
local count_of, values_of = tensors.count_of, tensors.values_of

local ones = {}
for i = 1, 33 do ones[i] = 1 end

local SHAPES = { { 1 }, { 17 }, { 33, 65 }, { 3 }, { 1030 }, { 5, 129 } }
local FORMATS = { "f32", "f16", "bf16" }

--- Runs f on the reference, then once for each instruction set: compare_with(set, expected, got).
local function on_each(f, compare_with)
  check(C.eng_device_set("reference"))
  local done, expected = pcall(f)
  check(C.eng_device_set("cpu"))
  if not done then error(expected, 0) end
  for _, set in ipairs(compare.SETS) do
    if #compare.SETS > 1 then C.eng_cpu_isa(set) end
    local fine, got = pcall(f)
    if #compare.SETS > 1 then C.eng_cpu_isa(compare.SETS[1]) end
    if not fine then error(got, 0) end
    compare_with(set, expected, got)
  end
end

local function copy_of(x)
  local values, n = values_of(x)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = values[i] end
  return list
end

--- NaN equals NaN; else within `ulps` units in the last place of the expected value.
local function close(where, expected, got, dtype, ulps)
  assert(#expected == #got, where)
  for i = 1, #expected do
    local a, b = expected[i], got[i]
    local fine = a == b or (a ~= a and b ~= b) or math.abs(a - b) <= ulps * tensors.ulp_of(a, tensors.FORMATS[dtype])
    if not fine then error(("%s: element %d: expected %.9g, got %.9g"):format(where, i - 1, a, b), 0) end
  end
end

-- ------------------------------------------------------------------ parameters

--- A set of parameters of these shapes with weights from `kind`, and every gradient present, in `format`.
--- `shadow`: the format of the low-precision weights.
local function parameters(shapes, format, shadow, kind)
  local n = #shapes
  local handles, names = ffi.new("eng_tensor[?]", n), ffi.new("const char *[?]", n)
  local kept = {}
  for i, shape in ipairs(shapes) do
    check(C.eng_new(handles[i - 1], engine.dtype.f32, #shape, ffi.new("int64_t[?]", #shape, shape), true))
    local x = float("f32", shape, kind or "normal")
    check(C.eng_write(handles[i - 1], (values_of(x)), engine.dtype.f64, count_of(shape)))
    check(C.eng_requires_grad(handles[i - 1], true))
    kept[i] = "p" .. i
    names[i - 1] = kept[i]
  end
  local out = ffi.new("eng_params *[1]")
  check(C.eng_params_new(out, handles, names, n))
  local set = { params = out[0], n = n, tensor = {}, names = kept }
  for i = 1, n do set.tensor[i] = engine.Tensor(handles[i - 1]) end
  local shadows, gradients = ffi.new("int32_t[?]", n), ffi.new("int32_t[?]", n)
  for i = 0, n - 1 do shadows[i], gradients[i] = engine.dtype[shadow or "f32"], engine.dtype[format] end
  check(C.eng_params_precision(set.params, shadows, gradients))
  return set
end

--- Makes every gradient of the set present by a backward pass, and gives them as tensors.
local function gradients_of(set)
  local total
  for i = 1, set.n do
    local sum = engine.run("sum", { set.tensor[i] }, { 2 ^ #tensors.shape_of(set.tensor[i]) - 1, 0 })
    total = total and engine.run("add", { total, sum }) or sum
  end
  check(C.eng_backward(total, 1, false))
  local list = {}
  for i = 1, set.n do
    list[i] = engine.Tensor()
    check(C.eng_gradient(list[i], set.tensor[i]))
  end
  return list
end

local function write(x, values) check(C.eng_write(x, ffi.new("double[?]", #values, values), engine.dtype.f64, #values)) end

local function in_step(f)
  return function()
    check(C.eng_step_begin())
    local done, message = pcall(f)
    check(C.eng_step_end())
    if not done then error(message, 0) end
  end
end

--- Gradients to write: one list of numbers a parameter.
local function gradient_lists(format, kind)
  local lists = {}
  for i, shape in ipairs(SHAPES) do lists[i] = copy_of(float(format, shape, kind)) end
  return lists
end

describe("passes over all parameters (" .. table.concat(compare.SETS, ", ") .. ")", function()
  for _, format in ipairs(FORMATS) do
    it("count and sum gradients like the reference: " .. format, in_step(function()
      tensors.seed("stats" .. format)
      local set = parameters(SHAPES, format)
      local gradients = gradients_of(set)
      for _, kind in ipairs { "normal", "wide", "tiny", "special", "rare" } do
        for i, list in ipairs(gradient_lists(format, kind)) do write(gradients[i], list) end
        for _, needs in ipairs { 0, 1, 2, 4, 8, 16, 63, 31 } do
          on_each(function()
            local record, stats = ffi.new("eng_record"), ffi.new("eng_tensor_stats[?]", set.n)
            check(C.eng_params_stats(record, stats, set.params, 1024, needs))
            return { record = record, stats = stats }
          end, function(name, want, got)
            local where = ("%s %s needs %d"):format(name, kind, needs)
            for i = 0, set.n do
              local a, b = want.stats[math.min(i, set.n - 1)], got.stats[math.min(i, set.n - 1)]
              if i == set.n then a, b = want.record, got.record end
              for _, field in ipairs { "count", "inf", "nan", "zeros", "underflow", "amax" } do
                if a[field] ~= b[field] then
                  error(("%s: %s of %d: expected %s, got %s"):format(where, field, i, tostring(a[field]), tostring(b[field])), 0)
                end
              end
              local sum_a, sum_b = i < set.n and a.sum_squares or a.norm, i < set.n and b.sum_squares or b.norm
              if math.abs(sum_a - sum_b) > 1e-6 * sum_a then
                error(("%s: sum of squares of %d: expected %.17g, got %.17g"):format(where, i, sum_a, sum_b), 0)
              end
              for bin = 0, 319 do assert(a.hist[bin] == b.hist[bin], where .. ": histogram") end
            end
            assert(want.record.overflow == got.record.overflow and want.record.first_bad == got.record.first_bad, where)
          end)
        end
      end
      C.eng_params_free(set.params)
    end))

    it("unscale like the reference: " .. format, in_step(function()
      tensors.seed("unscale" .. format)
      for _, factor in ipairs { 1, 2 ^ -16, 0.37, 2 ^ -127, 1e-40, 2 ^ 20 } do
        for _, kind in ipairs { "normal", "wide", "special" } do
          local lists = gradient_lists(format, kind)
          on_each(function()
            local set = parameters(SHAPES, format)
            for i, x in ipairs(gradients_of(set)) do write(x, lists[i]) end
            local found, result = ffi.new("int[1]"), {}
            check(C.eng_params_unscale(found, set.params, factor))
            for i = 1, set.n do
              local x = engine.Tensor()
              check(C.eng_gradient(x, set.tensor[i]))
              assert(tensors.dtype_of(x) == "f32")
              result[i] = copy_of(x)
            end
            result.found = found[0]
            C.eng_params_free(set.params)
            return result
          end, function(name, want, got)
            local where = ("%s %s times %g"):format(name, kind, factor)
            assert(want.found == got.found, where .. ": found_inf")
            for i = 1, #SHAPES do close(where, want[i], got[i], "f32", 1) end
          end)
        end
      end
    end))
  end

  local optimizers = {
    { name = "sgd", kind = C.ENG_SGD, moments = 1, sets = {
      { lr = 0.1 }, { lr = 0.1, weight_decay = 0.01 }, { lr = 0.1, momentum = 0.9 }, { lr = 0.1, momentum = 0.9, nesterov = 1 },
      { lr = 0.1, momentum = 0.8, dampening = 0.3, weight_decay = 0.1 } } },
    { name = "adam", kind = C.ENG_ADAM, moments = 2, sets = { { lr = 1e-3 }, { lr = 1e-2, weight_decay = 0.1 } } },
    { name = "adamw", kind = C.ENG_ADAMW, moments = 2, sets = { { lr = 1e-3 }, { lr = 1e-2, weight_decay = 0.1, beta1 = 0.3 } } },
    { name = "lion", kind = C.ENG_LION, moments = 1, sets = { { lr = 1e-3, beta2 = 0.99 }, { lr = 1e-3, beta2 = 0.99, weight_decay = 0.1 } } },
  }

  for _, optimizer in ipairs(optimizers) do
    it("update weights, moments and low-precision weights like the reference: " .. optimizer.name, in_step(function()
      tensors.seed(optimizer.name)
      for _, format in ipairs(FORMATS) do
        for _, moment_format in ipairs { "f32", "bf16" } do
          for _, h in ipairs(optimizer.sets) do
            for _, kind in ipairs { "normal", "special" } do
              local clip = h.weight_decay and 0.5 or 0
              local steps, weights = {}, {}
              for step = 1, 3 do steps[step] = gradient_lists(format, kind) end
              for i, shape in ipairs(SHAPES) do weights[i] = copy_of(float("f32", shape, "normal")) end
              on_each(function()
                local set = parameters(SHAPES, format, format)
                for i = 1, set.n do write(set.tensor[i], weights[i]) end
                check(C.eng_params_refresh(set.params))
                local state = ffi.new("eng_optimizer *[1]")
                local group_of = ffi.new("int32_t[?]", set.n)
                for i = 0, set.n - 1 do group_of[i] = i % 2 end
                check(C.eng_optimizer_new(state, set.params, optimizer.kind, engine.dtype[moment_format], group_of))
                local groups = ffi.new("eng_hyper[2]")
                for g = 0, 1 do
                  groups[g] = { lr = h.lr * (1 + g), beta1 = h.beta1 or 0.9, beta2 = h.beta2 or 0.999, eps = 1e-8, momentum = h.momentum or 0,
                                dampening = h.dampening or 0, nesterov = h.nesterov or 0, weight_decay = g == 0 and h.weight_decay or 0 }
                end
                for t, lists in ipairs(steps) do
                  for i, x in ipairs(gradients_of(set)) do write(x, lists[i]) end
                  local update = ffi.new("eng_update", { kind = optimizer.kind, n_groups = 2, groups = groups, gradient_factor = 1 / 3,
                                                         clip_value = clip, t = t })
                  check(C.eng_optimizer_step(state[0], update))
                  check(C.eng_params_zero_grad(set.params))
                end
                local result = { weights = {}, moments = {}, low = {} }
                for i = 1, set.n do
                  result.weights[i] = copy_of(set.tensor[i])
                  for which = 1, optimizer.moments do
                    local x = engine.Tensor()
                    check(C.eng_optimizer_moment(x, state[0], which, i - 1))
                    result.moments[#result.moments + 1] = copy_of(x)
                  end
                end
                -- the low-precision weights, seen through the sums of their columns
                if format ~= "f32" then
                  local recording = C.eng_grad_enabled(false)
                  C.eng_autocast(ffi.new("eng_precision", { engine.dtype[format], -1, -1, -1 }), nil)
                  local x = engine.run("matmul", { listed(format, { 1, 33 }, ones), set.tensor[3] })
                  C.eng_autocast(nil, nil)
                  C.eng_grad_enabled(recording)
                  result.low = copy_of(x)
                end
                C.eng_optimizer_free(state[0])
                C.eng_params_free(set.params)
                return result
              end, function(name, want, got)
                local where = ("%s %s moments %s lr %g %s"):format(name, format, moment_format, h.lr, kind)
                -- the moments are equal to the bit; a weight may differ by the order of a product
                for k = 1, #want.moments do close(where .. " moment " .. k, want.moments[k], got.moments[k], moment_format, 0) end
                for i = 1, #SHAPES do close(where .. " weight", want.weights[i], got.weights[i], "f32", 1) end
                close(where .. " low", want.low, got.low, format, 2)
              end)
            end
          end
        end
      end
    end))
  end
end)

describe("gradients written into a parameter's buffer (" .. table.concat(compare.SETS, ", ") .. ")", function()
  for _, format in ipairs(FORMATS) do
    it("add to what is there: " .. format, in_step(function()
      tensors.seed("accumulate" .. format)
      local shapes = { { 9, 33 }, { 17, 33 }, { 17 }, { 17, 5 } }   -- embedding, linear weight and bias, matrix
      local weights, ids, factors = {}, copy_of(whole("i64", { 40 }, 0, 8)), {}
      for i, shape in ipairs(shapes) do weights[i] = copy_of(float("f32", shape, "normal")) end
      for pass = 1, 2 do factors[pass] = copy_of(float("f32", { 40, 5 }, "normal")) end
      on_each(function()
        local set = parameters(shapes, format, format)
        for i = 1, set.n do write(set.tensor[i], weights[i]) end
        check(C.eng_params_refresh(set.params))
        local dtype = engine.dtype[format]
        if format ~= "f32" then C.eng_autocast(ffi.new("eng_precision", { dtype, dtype, engine.dtype.f32, engine.dtype.f32 }), nil) end
        for pass = 1, 2 do
          local p = set.tensor
          local x = engine.run("embedding", { p[1], listed("i64", { 40 }, ids) })
          local y = engine.run("matmul", { engine.run("linear", { x, p[2], p[3] }), p[4] })
          local loss = engine.run("sum", { engine.run("mul", { y, listed("f32", { 40, 5 }, factors[pass]) }) }, { 3, 0 })
          check(C.eng_backward(loss, 1, false))
        end
        C.eng_autocast(nil, nil)
        local result = {}
        for i = 1, set.n do
          local x = engine.Tensor()
          check(C.eng_gradient(x, set.tensor[i]))
          assert(tensors.dtype_of(x) == format)
          result[i] = copy_of(x)
        end
        C.eng_params_free(set.params)
        return result
      end, function(name, want, got)
        for i = 1, #shapes do
          local top = 0
          for _, value in ipairs(want[i]) do top = math.max(top, math.abs(value)) end
          -- the backward pass itself rounds its activations to `format`
          local tolerance = top * ({ f32 = 1e-5, f16 = 4e-3, bf16 = 3e-2 })[format]
          for k, value in ipairs(want[i]) do
            if not (math.abs(value - got[i][k]) <= tolerance) then
              error(("%s: parameter %d element %d: expected %.9g, got %.9g"):format(name, i, k - 1, value, got[i][k]), 0)
            end
          end
        end
      end)
    end))
  end
end)

describe("copies into views (" .. table.concat(compare.SETS, ", ") .. ")", function()
  it("reach every layout and no element beside it", in_step(function()
    tensors.seed("views")
    for _, to in ipairs { "f32", "f16", "bf16", "f64", "i32", "u8", "bool" } do
      for _, from in ipairs { "f32", "f16", "bf16", "f64", "i64", "u8" } do
        local source = copy_of(tensors.FORMATS[from] and float(from, { 3, 17, 5 }, "normal") or whole(from, { 3, 17, 5 }, 0, 100))
        for layout = 1, 3 do
          on_each(function()
            local base = tensors.tensor_of(to, { 4, 40, 11 })   -- zeros
            local view = engine.run("slice", { base }, { 0, 1, 4, 1 })
            view = engine.run("slice", { view }, { 1, 3, 37, 2 })
            view = engine.run("slice", { view }, { 2, 1, 11, 2 })
            local shape, order = { 3, 17, 5 }, { 0, 1, 2 }
            if layout == 2 then shape, order = { 17, 3, 5 }, { 1, 0, 2 } elseif layout == 3 then shape, order = { 5, 17, 3 }, { 2, 1, 0 } end
            check(C.eng_copy(engine.run("permute", { view }, order), listed(from, shape, source)))
            return copy_of(base)
          end, function(name, want, got)
            close(("%s %s to %s layout %d"):format(name, from, to, layout), want, got, tensors.FORMATS[to] and to or "f64", 0)
          end)
        end
      end
    end
  end))
end)
