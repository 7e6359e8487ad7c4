-- A product with few rows reads a transposed B in place; one with many rows packs B. Both must give
-- a row the same numbers, with every instruction set of this machine, because a result depends only
-- on its row of A, its column of B and K (core/cpu/gemm.h).
local engine = require "engine.base.ffi"
local values = require "spec.cpu.kernels.values"
local SETS = require("spec.cpu.kernels.compare").SETS
local C = engine.C

local MANY = 20   -- more rows than any instruction set treats as few
local SIZES = { { 1, 1 }, { 3, 15 }, { 16, 16 }, { 47, 33 }, { 48, 127 }, { 49, 128 }, { 97, 161 },
  { 130, 385 }, { 17, 800 } }   -- N, K

-- The elements of rows first .. first+rows-1 of x w^T + bias.
local function product(x, w, bias, first, rows)
  local some = engine.run("slice", { x }, { 0, first, first + rows, 1 })
  return values.values_of(engine.run("linear", { some, w, bias }))
end

if not os.getenv("ENGINE_TEST_DEVICE") then
  describe("a product with few rows (" .. table.concat(SETS, ", ") .. ")", function()
    for _, dtypes in ipairs { { "f32", "f32" }, { "f16", "f16" }, { "bf16", "bf16" },
      { "f32", "bf16" }, { "bf16", "f16" } } do
      it(("equals rows of a larger one: %s times %s"):format(unpack(dtypes)), function()
        -- oneDNN's order of sums may depend on the number of rows.
        if dtypes[1] == dtypes[2] and engine.string(C.eng_cpu_bf16()) == "AMX" then return end
        values.seed(dtypes[1] .. dtypes[2])
        engine.check(C.eng_step_begin())
        local wrong, seen = {}, 0
        for _, size in ipairs(SIZES) do
          local n, k = unpack(size)
          local kind = k < 20 and "rare" or "normal"   -- a longer sum of "rare" is always NaN
          local x = values.float(dtypes[1], { MANY, k }, kind)
          local w = values.float(dtypes[2], { n, k }, kind)
          local bias = values.float("f32", { n }, "normal")
          for _, set in ipairs(SETS) do
            if #SETS > 1 then C.eng_cpu_isa(set) end
            local want = product(x, w, bias, 0, MANY)
            for rows = 1, 9 do
              local first = rows % 3
              local got = product(x, w, bias, first, rows)
              for i = 0, rows * n - 1 do
                local a, b = got[i], want[first * n + i]
                seen = seen + 1
                if a ~= b and (a == a or b == b) then
                  wrong[#wrong + 1] =
                    ("%s, %d rows, N %d, K %d, element %d: expected %.9g, got %.9g")
                    :format(set, rows, n, k, i, b, a)
                end
              end
            end
          end
        end
        if #SETS > 1 then C.eng_cpu_isa(SETS[1]) end
        engine.check(C.eng_step_end())
        assert.same({}, { unpack(wrong, 1, 5) })
        assert.is_true(seen > 10000)
      end)
    end
  end)
end
