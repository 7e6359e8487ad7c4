-- Calls for reductions and for operations along rows. See spec/cpu/kernels_spec.lua.
local compare = require "spec.cpu.kernels.compare"
local engine = require "engine.base.ffi"
local tensors = require "spec.cpu.kernels.values"
local FORMATS, INTEGERS, FLOATS, ALL_INTEGERS = tensors.FORMATS, tensors.INTEGERS, tensors.FLOATS,
  tensors.ALL_INTEGERS
local LAYOUTS, shape_of = tensors.LAYOUTS, tensors.shape_of
local float, whole, with, both = tensors.float, tensors.whole, tensors.with, tensors.both
local listed, inf = tensors.listed, math.huge

local generators = {}

local function reduction(tolerance, integers, empty)
  return function(try)
    for _, dtype in ipairs(both(FLOATS, integers)) do
      local is_float = FORMATS[dtype]
      local function values(shape, kind, layout)
        if is_float then return float(dtype, shape, kind, layout) end
        return whole(dtype, shape, math.max(-100, INTEGERS[dtype][1]), 100, layout)
      end
      local function call(x, mask, keep)
        try(with({ inputs = { x }, ints = { mask, keep } }, is_float and tolerance or {}))
      end
      for mask = 0, 7 do
        for l, layout in ipairs(LAYOUTS) do
          call(values({ 5, 17, 33 }, "normal", layout), mask, l % 2)
        end
        call(values({ 5, 17, 33 }, "rare", LAYOUTS[mask % 4 + 1]), mask, 1)
        call(values({ 3, 5, 7 }, "few"), mask, 0)
      end
      call(values({}, "normal"), 0, 0)
      call(values({ 1 }, "normal"), 1, 0)
      if dtype == "f32" or dtype == "f16" or dtype == "i32" then   -- long sums, wide rows
        call(values({ 70000 }, "normal"), 1, 0)
        call(values({ 65, 1100 }, "normal"), 2, 0)
        call(values({ 1100, 65 }, "normal"), 1, 0)
        call(values({ 1100, 65 }, "normal", "transposed"), 3, 0)
      end
      if empty then
        call(values({ 3, 0 }, "normal"), 2, 0)
        call(values({ 3, 0 }, "normal"), 1, 0)
      else
        try { inputs = { values({ 3, 0 }, "normal") }, ints = { 2, 0 },
          fails = "expected at least one element" }
      end
    end
  end
end

generators.sum = reduction({ ulp = 1, eps = 16, bound = "sums" }, ALL_INTEGERS, true)
generators.mean = reduction({ ulp = 1, eps = 16, bound = "sums" }, { "i32", "u8" }, true)
-- sums that leave the range of f32 on the way, in both layouts
for _, name in ipairs { "sum", "mean" } do
  local usual = generators[name]
  generators[name] = function(try)
    usual(try)
    for _, rows in ipairs { 4, 40 } do
      local across, down = {}, {}
      for r = 0, rows - 1 do
        for c = 0, 15 do
          local value = name == "mean" and 3e38 or (r < rows / 2 and 3e38 or -3e38)
          if c == 3 and r == 2 then value = inf end
          down[r * 16 + c + 1], across[c * rows + r + 1] = value, value
        end
      end
      try { inputs = { listed("f32", { rows, 16 }, down) }, ints = { 1, 0 }, ulp = 1 }
      try { inputs = { listed("f32", { 16, rows }, across) }, ints = { 2, 0 }, ulp = 1 }
    end
  end
end

generators.max = reduction({}, ALL_INTEGERS, false)
generators.min = reduction({}, ALL_INTEGERS, false)

generators.extreme_grad = function(try)
  for _, dtype in ipairs(FLOATS) do
    for mask = 1, 7 do
      for keep = 0, 1 do
        for l, kind in ipairs { "few", "normal", "rare" } do
          for _, name in ipairs { "max", "min" } do
            local x = float(dtype, { 5, 7, 33 }, kind, LAYOUTS[l])
            local y = engine.run(name, { x }, { mask, keep })
            try { inputs = { x, y, float(dtype, shape_of(y), "normal") }, ints = { mask, keep },
              ulp = 0, ulp_low = 1 }
          end
        end
      end
    end
  end
end

local ROWS = { 1, 3, 17, 33, 64, 65, 129, 515, 1100, 2051, 5000, 9004 }

local function along_rows(tolerance)
  return function(try)
    for _, dtype in ipairs(FLOATS) do
      for _, n in ipairs(ROWS) do
        try(with({ inputs = { tensors.score_rows(dtype, n, n == 33 and "transposed" or "plain") } },
          tolerance))
        if n < 1000 then
          try(with({ inputs = { float(dtype, { 2, 3, n }, "normal", LAYOUTS[n % 4 + 1]) } },
            tolerance))
        end
      end
      try(with({ inputs = { float(dtype, { 33 }, "normal") } }, tolerance))
      try(with({ inputs = { float(dtype, { 0, 33 }, "normal") } }, tolerance))
    end
  end
end

--- log_softmax subtracts from the input: the error is relative to the row's largest finite input.
local function by_input(_, call)
  local tops, columns = compare.row_tops(call.inputs[1])
  local results = call.one_a_row and 1 or columns
  return function(_, i) return tops[math.floor(i / results)] end
end

generators.softmax = along_rows { ulp = 8, eps = 4,
  bound = function() return function() return 1 end end }
generators.log_softmax = along_rows { ulp = 4, eps = 2, bound = by_input }
generators.logsumexp = along_rows { ulp = 4, eps = 2, bound = by_input, one_a_row = true }

local function from_softmax(forward)
  return function(try)
    for _, dtype in ipairs(FLOATS) do
      for _, n in ipairs(ROWS) do
        for _, kind in ipairs { "normal", "rare" } do
          local y = engine.run(forward, { float(dtype, { 3, n }, "normal") })
          local dy = float(dtype, { 3, n }, kind, LAYOUTS[n % 4 + 1])
          for _, out in ipairs { dtype, dtype ~= "f64" and "f32" or "f64" } do
            try { inputs = { y, dy }, ints = { engine.dtype[out] }, ulp = 2, eps = 64,
              bound = "largest" }
          end
        end
      end
    end
  end
end

generators.softmax_grad = from_softmax "softmax"
generators.log_softmax_grad = from_softmax "log_softmax"

return generators
