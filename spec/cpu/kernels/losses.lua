-- Calls for the losses. See spec/cpu/kernels_spec.lua.
local compare = require "spec.cpu.kernels.compare"
local engine = require "engine.base.ffi"
local tensors = require "spec.cpu.kernels.values"
local FLOATS, LAYOUTS, uniform, integer = tensors.FLOATS, tensors.LAYOUTS, tensors.uniform,
  tensors.integer
local shape_of, values_of = tensors.shape_of, tensors.values_of
local float, listed = tensors.float, tensors.listed

local generators = {}

local function targets_of(dtype, rows, classes, ignored)
  local list = {}
  for r = 1, rows do
    list[r] = ignored and uniform() < 0.3 and ignored or integer(0, classes - 1)
  end
  return listed(dtype, { rows }, list)
end

local function cross_entropies(try, run)
  for _, dtype in ipairs(FLOATS) do
    for k, classes in ipairs { 1, 3, 17, 129, 1100, 5003 } do
      for mode = 0, 2 do
        -- label smoothing, z_loss, soft_cap
        for _, floats in ipairs { { 0, 0, 0 }, { 0.1, 0, 0 }, { 0.1, 1e-2, 0 }, { 0, 0, 3 },
          { 0.1, 1e-2, 30 } } do
          local rows = 7
          local target_dtype = ({ "i64", "i32", "i16" })[k % 3 + 1]
          run(try, dtype, float(dtype, { rows, classes }, "normal", LAYOUTS[k % 4 + 1]),
            targets_of(target_dtype, rows, classes, -100),
            { -100, mode }, floats)
          if classes > 1 and classes < 1000 then
            local x = tensors.score_rows(dtype, classes)
            run(try, dtype, x, targets_of("u8", shape_of(x)[1], math.min(classes, 250), 255),
              { 255, 0 }, floats)
          end
        end
      end
    end
    local nothing = listed("i64", { 2 }, { -1, -1 })
    run(try, dtype, float(dtype, { 2, 5 }, "normal"), nothing, { -1, 1 }, { 0, 0, 0 })
    run(try, dtype, float(dtype, { 2, 5 }, "normal"), nothing, { -1, 2 }, { 0, 0, 0 })
    run(try, dtype, float(dtype, { 2, 3, 5 }, "normal"),
      listed("i64", { 2, 3 }, { 0, 1, 2, 3, 4, 0 }), { -1, 1 }, { 0.2, 0, 0 })
  end
end

generators.cross_entropy = function(try)
  cross_entropies(try, function(run, _, logits, targets, ints, floats)
    run { inputs = { logits, targets }, ints = ints, floats = floats, outputs = 2, ulp = 4,
      eps = 16, bound = "largest" }
  end)
  try { inputs = { float("f32", { 3, 5 }, "normal"), listed("i64", { 3 }, { 0, 5, 1 }) },
    ints = { -100, 1 }, floats = { 0 }, fails = "5" }
  try { inputs = { float("f16", { 3, 5 }, "normal"), listed("i32", { 3 }, { 0, -100, -1 }) },
    ints = { -100, 1 }, floats = { 0 }, fails = "%-1" }
  for _, floats in ipairs { { 0, -1, 0 }, { 0, 0 / 0, 0 }, { 0, 2e6, 0 }, { 0, 0, -1 },
    { 0, 0, 1e-4 }, { 0, 0, 1e7 }, { 0, 0, 0 / 0 } } do
    try { inputs = { float("f16", { 3, 5 }, "normal"), listed("i32", { 3 }, { 0, 1, 2 }) },
      ints = { -100, 1 }, floats = floats, outputs = 2, fails = "expected [zs]" }
  end
  -- A kernel that read only the low 32 bits of 2^32 would see 0 (no reduction) and write a loss for
  -- each row into an output with room for one.
  for _, reduction in ipairs { 3, -1, 2 ^ 32 } do
    try { inputs = { float("f16", { 3, 5 }, "normal"), listed("i32", { 3 }, { 0, 1, 2 }) },
      ints = { -100, reduction }, floats = { 0 }, outputs = 2,
      fails = "expected the reduction" }
  end
end

generators.cross_entropy_grad = function(try)
  cross_entropies(try, function(run, dtype, logits, targets, ints, floats)
    local _, lse = engine.run("cross_entropy", { logits, targets }, ints, floats, 2)
    local wide = dtype == "f64" and "f64" or "f32"
    local dloss = ints[2] == 0 and float(wide, shape_of(targets), "normal")
      or float(wide, {}, "large")
    run { inputs = { logits, targets, lse, dloss }, ints = ints, floats = floats, ulp = 4,
      eps = 32, bound = function()
      -- dloss times (probability - target's share); the probability has lse's rounding error
      local slopes, n = values_of(dloss)
      local top = compare.largest_of(slopes, 0, n - 1)
        / (ints[2] == 1 and shape_of(targets)[1] or 1)
      local rows, columns = compare.row_tops(logits)
      return function(_, i)
        local row = rows[math.floor(i / columns)]
        return top * (1 + row) * (1 + 2 * floats[2] * (row + math.log(columns)))
      end
    end }
  end)
  local lse = listed("f32", { 3 }, { 1, 1, 1 })
  try { inputs = { float("f32", { 3, 5 }, "normal"), listed("i64", { 3 }, { 0, 5, 1 }), lse,
    listed("f32", {}, { 1 }) },
        ints = { -100, 1 }, floats = { 0 }, fails = "5" }
end

generators.mse = function(try)
  for _, dtype in ipairs(FLOATS) do
    for k, shape in ipairs { {}, { 1 }, { 17 }, { 3, 129 }, { 129, 515 }, { 0 } } do
      try { inputs = { float(dtype, shape, "normal", LAYOUTS[k % 4 + 1]),
        float(dtype, shape, "normal") }, ulp = 2, eps = 16, bound = "largest" }
    end
    try { inputs = { float(dtype, { 65 }, "rare"), float(dtype, { 65 }, "normal") }, ulp = 2,
      eps = 16, bound = "largest" }
    try { inputs = { float(dtype, { 65 }, "large"), float(dtype, { 65 }, "large") }, ulp = 2,
      eps = 16, bound = "largest" }
  end
  try { inputs = { float("f16", { 33 }, "normal"), float("f32", { 33 }, "normal") }, ulp = 2,
    eps = 16, bound = "largest" }
end

return generators
