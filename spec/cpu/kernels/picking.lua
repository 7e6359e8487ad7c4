-- Calls for the kernels that join and select. See spec/cpu/kernels_spec.lua.
local engine = require "engine.base.ffi"
local tensors = require "spec.cpu.kernels.values"
local FORMATS, FLOATS, LAYOUTS, float, whole, listed = tensors.FORMATS, tensors.FLOATS,
  tensors.LAYOUTS, tensors.float, tensors.whole, tensors.listed
local with, both = tensors.with, tensors.both

local generators = {}

generators.concat = function(try)
  for _, dtype in ipairs(both(FLOATS, { "i32", "u8", "i64" })) do
    local function part(rows, columns, layout)
      if FORMATS[dtype] then return float(dtype, { rows, 3, columns }, "special", layout) end
      return whole(dtype, { rows, 3, columns }, 0, 100, layout)
    end
    try { inputs = { part(2, 5, "plain"), part(1, 5, "transposed"), part(4, 5, "sliced") },
      ints = { 0 }, zeros = true }
    try { inputs = { part(2, 5, "expanded"), part(2, 33, "transposed"), part(2, 1, "sliced") },
      ints = { 2 }, zeros = true }
    try { inputs = { part(3, 17, "plain") }, ints = { -2 }, zeros = true }
    local many = {}
    for k = 1, 16 do many[k] = part(1, k, LAYOUTS[k % 4 + 1]) end
    try { inputs = many, ints = { 2 }, zeros = true }
  end
  try { inputs = { float("f16", { 2, 33 }, "special"), float("f32", { 2, 5 }, "special"),
    float("bf16", { 2, 7 }, "special", "sliced") },
        ints = { 1 }, zeros = true }
  try { inputs = { whole("i32", { 4 }, -9, 9), float("f32", { 5 }, "normal") }, ints = { 0 } }
  for dimension = 0, 1 do
    try { inputs = { float("f16", { 130, 130 }, "normal"),
      float("f16", { 130, 130 }, "normal", "transposed") }, ints = { dimension }, zeros = true }
  end
end

generators.gather = function(try)
  for _, dtype in ipairs(both(FLOATS, { "i32", "u8" })) do
    for _, index_dtype in ipairs { "i64", "i32", "u8" } do
      local function values(shape, layout)
        return FORMATS[dtype] and float(dtype, shape, "special", layout)
          or whole(dtype, shape, 0, 100, layout)
      end
      try { inputs = { values({ 5, 33 }, "plain"), whole(index_dtype, { 5, 7 }, 0, 32, "plain") },
        ints = { 1 }, zeros = true }
      try { inputs = { values({ 5, 33 }, "transposed"),
        whole(index_dtype, { 9, 33 }, 0, 4, "transposed") }, ints = { 0 }, zeros = true }
      try { inputs = { values({ 3, 17, 2 }, "plain"),
        whole(index_dtype, { 2, 40, 2 }, 0, 16, "sliced") }, ints = { -2 }, zeros = true }
      try { inputs = { values({ 9 }, "sliced"), whole(index_dtype, { 65 }, 0, 8, "plain") },
        ints = { 0 }, zeros = true }
    end
    if dtype == "bf16" then
      try { inputs = { float(dtype, { 300, 70 }, "normal"), whole("i64", { 300, 70 }, 0, 69) },
        ints = { 1 }, zeros = true }
    end
    try { inputs = { float("f32", { 4, 3 }, "normal"),
      listed("i64", { 4, 2 }, { 0, 1, 2, 0, 1, 3, 2, 2 }) }, ints = { 1 }, fails = "3" }
    try { inputs = { float("f32", { 4, 3 }, "normal"),
      listed("i32", { 4, 2 }, { 0, 1, 2, 0, 1, 0, -1, 2 }) }, ints = { 1 }, fails = "%-1" }
  end
end

--- Attributes of a gradient that scatters: the dimension, then the shape; the 14th is the number of
--- dimensions.
local function scatter_ints(dimension, shape)
  local ints = { dimension, unpack(shape) }
  for k = #ints + 1, 13 do ints[k] = 0 end
  ints[14] = #shape
  return ints
end

generators.gather_grad = function(try)
  for _, dtype in ipairs(FLOATS) do
    for _, index_dtype in ipairs { "i64", "u8" } do
      for _, kind in ipairs { "normal", "rare" } do
        local options = { ulp = 1, eps = 8, bound = "sums" }
        try(with({ inputs = { float(dtype, { 5, 70 }, kind), whole(index_dtype, { 5, 70 }, 0, 32) },
          ints = scatter_ints(1, { 5, 33 }) }, options))
        try(with({ inputs = { float(dtype, { 9, 33 }, kind, "transposed"),
          whole(index_dtype, { 9, 33 }, 0, 4) }, ints = scatter_ints(0,
              { 5, 33 }) }, options))
        try(with({ inputs = { float(dtype, { 2, 40, 2 }, kind),
          whole(index_dtype, { 2, 40, 2 }, 0, 16) }, ints = scatter_ints(1,
              { 3, 17, 2 }) }, options))
      end
    end
  end
  for dimension = 0, 1 do
    try { inputs = { float("f16", { 300, 70 }, "normal"), whole("i64", { 300, 70 }, 0, 69) },
      ints = scatter_ints(dimension, { 300, 70 }), ulp = 1, eps = 8,
      bound = "sums" }
  end
  try { inputs = { float("f32", { 3 }, "normal"), listed("i64", { 3 }, { 0, 5, 1 }) },
    ints = scatter_ints(0, { 5 }), fails = "5" }
end

generators.index_select = function(try)
  for _, dtype in ipairs(both(FLOATS, { "i64", "i8" })) do
    for _, index_dtype in ipairs { "i64", "i32", "u8" } do
      local function values(shape, layout)
        return FORMATS[dtype] and float(dtype, shape, "special", layout)
          or whole(dtype, shape, 0, 100, layout)
      end
      try { inputs = { values({ 33, 65 }, "plain"), whole(index_dtype, { 17 }, 0, 32) },
        ints = { 0 }, zeros = true }
      try { inputs = { values({ 3, 17, 5 }, "transposed"),
        whole(index_dtype, { 40 }, 0, 16, "sliced") }, ints = { 1 }, zeros = true }
      try { inputs = { values({ 3, 17 }, "sliced"), whole(index_dtype, { 1 }, 0, 16) },
        ints = { -1 }, zeros = true }
    end
  end
  try { inputs = { float("f32", { 4, 3 }, "normal"), listed("i64", { 3 }, { 0, 4, 1 }) },
    ints = { 0 }, fails = "4" }
  try { inputs = { float("f32", { 4, 3 }, "normal"), listed("i16", { 3 }, { 0, -7, 1 }) },
    ints = { 0 }, fails = "%-7" }
end

generators.index_select_grad = function(try)
  try { inputs = { float("bf16", { 300, 65 }, "normal"), whole("i64", { 300 }, 0, 32) },
    ints = scatter_ints(0, { 33, 65 }), ulp = 1, eps = 8, bound = "sums" }
  for _, dtype in ipairs(FLOATS) do
    for _, kind in ipairs { "normal", "rare" } do
      local options = { ulp = 1, eps = 8, bound = "sums" }
      try(with({ inputs = { float(dtype, { 70, 65 }, kind), whole("i64", { 70 }, 0, 32) },
        ints = scatter_ints(0, { 33, 65 }) }, options))
      try(with({ inputs = { float(dtype, { 3, 40, 5 }, kind, "transposed"),
        whole("i32", { 40 }, 0, 16) }, ints = scatter_ints(1,
            { 3, 17, 5 }) }, options))
      try(with({ inputs = { float(dtype, { 3, 1 }, kind), whole("u8", { 1 }, 0, 16) },
        ints = scatter_ints(1, { 3, 17 }) }, options))
    end
  end
  try { inputs = { float("f32", { 3, 2 }, "normal"), listed("i64", { 3 }, { 0, 9, 1 }) },
    ints = scatter_ints(0, { 5, 2 }), fails = "9" }
end

generators.embedding = function(try)
  for _, dtype in ipairs(FLOATS) do
    for _, id_dtype in ipairs { "i64", "i32", "u8" } do
      try { inputs = { float(dtype, { 33, 65 }, "special"), whole(id_dtype, { 3, 17 }, 0, 32) },
        zeros = true }
      try { inputs = { float(dtype, { 33, 1 }, "normal", "transposed"),
        whole(id_dtype, { 5 }, 0, 32, "sliced") }, zeros = true }
      try { inputs = { float(dtype, { 7, 129 }, "normal"), whole(id_dtype, {}, 0, 6) },
        zeros = true }
      try { inputs = { float(dtype, { 7, 64 }, "special"), whole(id_dtype, { 2, 9 }, 0, 6) },
        zeros = true }
    end
    try { inputs = { float(dtype, { 33, 65 }, "normal"), whole("i32", { 300 }, 0, 32) },
      zeros = true }
  end
  try { inputs = { float("f32", { 4, 3 }, "normal"), listed("i64", { 2, 2 }, { 0, 1, 4, 2 }) },
    fails = "4" }
  try { inputs = { float("f32", { 4, 3 }, "normal"), listed("i64", { 2, 2 }, { 0, 1, -100, 2 }) },
    fails = "%-100" }
end

generators.embedding_grad = function(try)
  for _, dtype in ipairs(FLOATS) do
    for _, out in ipairs { dtype, dtype ~= "f64" and "f32" or "f64" } do
      for _, kind in ipairs { "normal", "rare" } do
        local options = { ulp = 1, eps = 8, bound = "sums" }
        try(with({ inputs = { float(dtype, { 3, 50, 65 }, kind), whole("i64", { 3, 50 }, 0, 32) },
          ints = { 33, engine.dtype[out], 0 } }, options))
        try(with({ inputs = { float(dtype, { 40, 17 }, kind, "transposed"),
          whole("u8", { 40 }, 0, 2) },
              ints = { 5, engine.dtype[out], 0 } }, options))
      end
    end
  end
  for _, rows in ipairs { 2, 7, 1000 } do
    for _, columns in ipairs { 64, 65 } do
      try { inputs = { float("f16", { 300, columns }, "normal"),
        whole("i64", { 300 }, 0, rows - 1) }, ints = { rows, engine.dtype.f32, 0 }, ulp = 1,
        eps = 8,
        bound = "sums" }
    end
  end
  try { inputs = { float("f32", { 3, 2 }, "normal"), listed("i32", { 3 }, { 0, 9, 1 }) },
    ints = { 5, engine.dtype.f32, 0 }, fails = "9" }
end

generators.topk = function(try)
  for _, dtype in ipairs(both(FLOATS, { "i32", "u8", "i64" })) do
    for _, n in ipairs { 1, 3, 17, 65, 700 } do
      for _, k in ipairs { 1, 5, n } do
        if k <= n then
          if FORMATS[dtype] then
            for l, kind in ipairs { "normal", "special", "few" } do
              try { inputs = { float(dtype, { 3, n }, kind, LAYOUTS[l]) }, ints = { k },
                outputs = 2, zeros = true }
            end
          else
            try { inputs = { whole(dtype, { 3, n }, 0, 20) }, ints = { k }, outputs = 2 }
          end
        end
      end
    end
    for _, k in ipairs { 5, 100 } do
      local x = FORMATS[dtype] and float(dtype, { 2, 1500 }, "special")
        or whole(dtype, { 2, 1500 }, 0, 20)
      try { inputs = { x }, ints = { k }, outputs = 2, zeros = true }
    end
  end
end

local function find_extreme(try)
  for _, dtype in ipairs(both(FLOATS, { "i32", "u8", "i64" })) do
    for _, kind in ipairs { "normal", "few", "special", "wide" } do
      for dimension = 0, 2 do
        for keep = 0, 1 do
          local x = FORMATS[dtype] and float(dtype, { 5, 17, 33 }, kind, LAYOUTS[dimension + 1])
            or whole(dtype, { 5, 17, 33 }, 0, 20)
          try { inputs = { x }, ints = { dimension, keep } }
        end
      end
    end
    for _, n in ipairs { 1100, 5000 } do
      try { inputs = { FORMATS[dtype] and float(dtype, { n }, "normal") or whole(dtype, { n }, 0,
        100) }, ints = { 0, 0 } }
    end
    if dtype == "bf16" then
      for dimension = 0, 1 do
        try { inputs = { float(dtype, { 300, 65 }, "normal") }, ints = { dimension, 0 } }
      end
    end
  end
  try { inputs = { float("f32", { 3, 0 }, "normal") }, ints = { 1, 0 }, fails = "arg" }
end

generators.argmax = find_extreme
generators.argmin = find_extreme

return generators
