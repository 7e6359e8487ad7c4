-- Kernels that write into existing memory: gradients added directly to a parameter's buffer, and
-- copies into views. Compares device "cpu", with every instruction set, with "reference", as
-- kernels_spec does.
local compare = require "spec.cpu.kernels.compare"
local engine = require "engine.base.ffi"
local sets = require "spec.cpu.kernels.parameter_set"
local tensors = require "spec.cpu.kernels.values"
local ffi, C, check = engine.ffi, engine.C, engine.check
local float, listed, whole = tensors.float, tensors.listed, tensors.whole

--- Runs f on the reference, then on each instruction set, and calls compare_with(set, expected,
--- got) for each result after the first.
local function on_each(f, compare_with)
  local expected
  sets.everywhere(function(device)
    local got = f()
    if expected then compare_with(device, expected, got) else expected = got end
  end)
end

local function copy_of(x) return (sets.read(x)) end

describe("gradients written into a parameter's buffer (" .. table.concat(compare.SETS, ", ") .. ")",
  function()
  -- activations are rounded to `format`, too
  for format, precision in pairs { f32 = 1e-5, f16 = 4e-3, bf16 = 3e-2 } do
    it("add to the existing values: " .. format, sets.step(function()
      tensors.seed("accumulate" .. format)
      -- embedding, linear weight and bias, matrix
      local shapes = { { 9, 33 }, { 17, 33 }, { 17 }, { 17, 5 } }
      local weights, ids, factors = {}, copy_of(whole("i64", { 40 }, 0, 8)), {}
      for i, shape in ipairs(shapes) do weights[i] = copy_of(float("f32", shape, "normal")) end
      for pass = 1, 2 do factors[pass] = copy_of(float("f32", { 40, 5 }, "normal")) end
      on_each(function()
        local set = sets.new(shapes, { gradient = format, shadow = format })
        local p = {}
        for i = 1, set.n do
          set:write_weights(i, weights[i])
          p[i] = engine.Tensor(set.leaf[i][0])
        end
        check(C.eng_params_refresh(set.params))
        local dtype = engine.dtype[format]
        if format ~= "f32" then
          C.eng_autocast(ffi.new("eng_precision",
            { dtype, dtype, engine.dtype.f32, engine.dtype.f32 }), nil)
        end
        for pass = 1, 2 do
          local x = engine.run("embedding", { p[1], listed("i64", { 40 }, ids) })
          local y = engine.run("matmul", { engine.run("linear", { x, p[2], p[3] }), p[4] })
          local loss = engine.run("sum", { engine.run("mul",
            { y, listed("f32", { 40, 5 }, factors[pass]) }) }, { 3, 0 })
          check(C.eng_backward(loss, 1, false))
        end
        C.eng_autocast(nil, nil)
        local result = {}
        for i = 1, set.n do
          local values, dtype_name = sets.read(set:gradient(i))
          assert(dtype_name == format)
          result[i] = values
        end
        set:free()
        return result
      end, function(name, want, got)
        for i = 1, #shapes do
          local top = 0
          for _, value in ipairs(want[i]) do top = math.max(top, math.abs(value)) end
          for k, value in ipairs(want[i]) do
            if not (math.abs(value - got[i][k]) <= precision * top) then
              error(("%s: parameter %d element %d: expected %.9g, got %.9g"):format(name, i, k - 1,
                value, got[i][k]), 0)
            end
          end
        end
      end)
    end))
  end
end)

describe("copies into views (" .. table.concat(compare.SETS, ", ") .. ")", function()
  it("reach every layout and no element outside it", sets.step(function()
    tensors.seed("views")
    -- shape, order
    local layouts = { { { 3, 17, 5 }, { 0, 1, 2 } }, { { 17, 3, 5 }, { 1, 0, 2 } },
      { { 5, 17, 3 }, { 2, 1, 0 } } }
    for _, to in ipairs { "f32", "f16", "bf16", "f64", "i32", "u8", "bool" } do
      for _, from in ipairs { "f32", "f16", "bf16", "f64", "i64", "u8" } do
        local source = copy_of(tensors.FORMATS[from] and float(from, { 3, 17, 5 }, "normal")
          or whole(from, { 3, 17, 5 }, 0, 100))
        for _, layout in ipairs(layouts) do
          local shape, order = unpack(layout)
          on_each(function()
            local base = tensors.tensor_of(to, { 4, 40, 11 })   -- zeros
            local view = engine.run("slice", { base }, { 0, 1, 4, 1 })
            view = engine.run("slice", { view }, { 1, 3, 37, 2 })
            view = engine.run("slice", { view }, { 2, 1, 11, 2 })
            check(C.eng_copy(engine.run("permute", { view }, order), listed(from, shape, source)))
            return copy_of(base)
          end, function(name, want, got)
            for i, value in ipairs(want) do
              if value ~= got[i] then
                error(("%s: %s to %s [%s] element %d: expected %.9g, got %.9g"):format(name, from,
                  to, table.concat(shape, " x "), i - 1,
                  value, got[i]), 0)
              end
            end
          end)
        end
      end
    end
  end))
end)
