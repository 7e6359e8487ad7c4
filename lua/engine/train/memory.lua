-- Predicts and measures memory by role. The prediction follows from the precision recipe and the
-- shapes of parameters and layers.
--
--   print(opt:memory(function() return model:loss(x, y) end))   -- one forward pass, measured
--
-- The roles are: the master weights, their low-precision copies, their FP8 copies; the gradients;
-- the moments. With a loss, there are two more: what the tape keeps for the backward pass, and how
-- much of that is FP8 codes and scales. The FP8 part is predicted from the shape of each layer and
-- the number of rows that went through it. Called by Optimizer:memory.
local M_ffi = require "engine.base.ffi"
local precision = require "engine.train.precision"

local C, check = M_ffi.C, M_ffi.check

local M = {}

local SIZE = { f32 = 4, bf16 = 2, f16 = 2 }
local function padded(n, to) return math.ceil(n / to) * to end

-- Returns the number of f32 scales of a matrix, in the layout of core/base/fp8_layout.h. role: {
-- block_rows, block_columns }, such as an entry of eng_fp8_recipe.role.
local function scales(role, rows, columns)
  local r, c = role.block_rows, role.block_columns
  local down, across = r > 0 and math.ceil(rows / r) or 1, c > 0 and math.ceil(columns / c) or 1
  if r == 1 and c > 0 then return across * padded(down, 4) end
  if c == 0 and r <= 1 then return down end
  return down * padded(across, 4)
end

-- Returns whether a layer, in its last forward pass, multiplied codes with Blackwell's accumulator.
local function coded(site) return C.eng_fp8_accumulator(site.id) == C.ENG_ACCUMULATE_BLACKWELL end

-- Returns how many bytes a quantized matrix takes. FP8 stores codes and scales. Microscaling stores
-- codes and scales if in_codes is true, and otherwise the dequantized values in bf16.
local function matrix(role, rows, columns, in_codes)
  if in_codes then
    local bits = role.format == C.ENG_FORMAT_E2M1 and 4 or 8
    return rows * columns * (bits / 8 + 1 / role.block_columns)
  end
  return role.mx > 0 and 2 * rows * columns or rows * columns + 4 * scales(role, rows, columns)
end

-- Returns how many bytes a role's gate takes: a bf16 factor on the gradient of each of the role's
-- `count` elements. Only the rule "quest" and the estimator "dge" have a gate.
local function gate(role, count)
  return (role.mx - 1 == C.ENG_MX_QUEST or role.dge > 0) and 2 * count or 0
end

local function sites_of(opt) return opt.fp8 and opt.fp8.list or {} end

local function predicted(opt)
  local sums = { masters = 0, copies = 0, gradients = 0, fp8 = 0, moments = 0 }
  local site_of = {}
  for _, site in ipairs(sites_of(opt)) do site_of[site.module] = site end
  local shadow, gradient, masters = precision.parameter_formats(opt.precision, opt.list)
  for i, p in ipairs(opt.list) do
    local n, low = p.tensor.count, M_ffi.dtype_name[shadow[i - 1]]
    sums.masters = sums.masters + padded(SIZE[M_ffi.dtype_name[masters[i - 1]]] * n, 64)
    if low ~= "f32" then sums.copies = sums.copies + padded(SIZE[low] * n, 64) end
    local stored = opt._accumulates and "f32" or M_ffi.dtype_name[gradient[i - 1]]
    sums.gradients = sums.gradients + padded(SIZE[stored] * n, 64)
    local site = p.tensor.ndim == 2 and site_of[p.owner]
    if site then
      local role, N, K = site.recipe.role[1], p.tensor:size(1), p.tensor:size(2)
      local codes = coded(site)
      local one = not codes and role.block_rows == role.block_columns
        or site.recipe.backward[1].mx ~= 0
      sums.fp8 = sums.fp8 + matrix(role, N, K, codes) + gate(role, N * K)
        + (one and 0 or matrix(role, K, N, codes))
    end
    sums.moments = sums.moments + opt.state:bytes(i, n) + (site and site.average and 4 * n or 0)
  end
  return sums
end

-- Returns how many bytes FP8 layers keep of their inputs. rows_of[path]: the number of rows that
-- went through a layer.
local function kept(opt, rows_of)
  local bytes = 0
  for _, site in ipairs(sites_of(opt)) do
    local role, K, rows = site.recipe.role[0], site.module.inputs, rows_of[site.path] or 0
    local codes = matrix(role, rows, K, coded(site))
    if rows == 0 then codes = 0
    elseif role.keep == C.ENG_FP8_KEEP_E5M6 then
      codes = 1.5 * rows * K + 4 * scales({ block_rows = 1, block_columns = 128 }, rows, K)
    elseif role.keep == C.ENG_FP8_KEEP_TRANSPOSED and role.block_rows ~= role.block_columns then
      codes = matrix(role, K, rows, coded(site))
    elseif role.keep == C.ENG_FP8_KEEP_SWIGLU and rows_of.swiglu then codes = 2 * codes end
    bytes = bytes + codes + gate(role, rows * K)
  end
  return bytes
end

local MIB = 2 ^ 20
local meta = { __tostring = function(rows)
  local lines = { ("%-26s %14s %14s"):format("memory", "predicted MiB", "measured MiB") }
  for _, row in ipairs(rows) do
    lines[#lines + 1] = ("%-26s %14s %14.3f"):format(row.role,
      row.predicted and ("%.3f"):format(row.predicted / MIB) or "", row.measured / MIB)
  end
  return table.concat(lines, "\n")
end }

-- Makes the FP8 layers count the rows that go through them. Returns the counts by path, and a
-- function that ends the counting.
local function count_rows(opt)
  local rows_of, before, seen = {}, {}, {}
  for _, site in ipairs(sites_of(opt)) do
    local m, path, role = site.module, site.path, site.recipe.role[0]
    local sharing = path
    -- layers that read the same x and quantize it in the same way share one copy of its codes
    if role.keep == C.ENG_FP8_KEEP_CODES and role.stochastic == 0 and role.mx == 0 then
      sharing = ("%d %d %d %d %d %d %g"):format(role.format, role.block_rows,
        role.block_columns, role.rule, role.pow2, role.margin, role.eps)
    end
    local forward = m.forward
    before[m] = rawget(m, "forward") or false
    rawset(m, "forward", function(self, x)
      local key = ("%d.%d %s"):format(x.slot, x.generation, sharing)
      if not seen[key] then rows_of[path] = (rows_of[path] or 0) + x.count / self.inputs end
      seen[key] = true
      return forward(self, x)
    end)
  end
  if opt.fp8 then
    opt.model:apply(function(m) if m._class == "swiglu" then rows_of.swiglu = true end end)
  end
  return rows_of, function()
    for m, forward in pairs(before) do rawset(m, "forward", forward or nil) end
  end
end

-- Computes a loss. Returns how many bytes its tape keeps, how many of these are in FP8, and the
-- number of rows that went through each FP8 layer. Ends the step.
local function measured(opt, loss)
  local fp8_bytes, mark, all = M_ffi.new("int64_t[1]"), M_ffi.new("int64_t[1]"), nil
  local rows_of, end_counting = count_rows(opt)
  check(C.eng_scope_begin(mark))
  local good, message = pcall(function()
    precision.autocast(opt.precision, loss)
    all = tonumber(C.eng_tape_bytes(fp8_bytes))
    if all < 0 then error("memory: the host is out of memory; hint: a smaller batch", 0) end
  end)
  end_counting()
  -- eng_scope_end fails here while the tape has operations of the scope, so its result is ignored;
  -- eng_step_end then empties the tape and drops the scope's tensors
  C.eng_scope_end(mark[0])
  check(C.eng_step_end())
  if not good then error(message, 0) end
  return all, tonumber(fp8_bytes[0]), rows_of
end

--- Returns rows { role, predicted, measured } in bytes, also by the names of the roles. All that is
--- kept for the backward pass has no prediction. loss: a function that returns a loss, or nil. With
--- a loss, the call ends the step.
function M.new(opt, loss)
  local kept_all, kept_fp8, rows_of
  if loss then kept_all, kept_fp8, rows_of = measured(opt, loss) end
  local bytes = M_ffi.new("int64_t[4]")
  C.eng_params_bytes(bytes, opt.params)
  local want, moments = predicted(opt), 0
  for _, x in pairs(opt:state_tensors()) do
    moments = moments + x.count * C.eng_dtype_size(M_ffi.dtype[x.dtype])
  end
  local rows = {
    { role = "masters", predicted = want.masters, measured = tonumber(bytes[0]) },
    { role = "low-precision copies", predicted = want.copies, measured = tonumber(bytes[1]) },
    { role = "FP8 copies", predicted = want.fp8, measured = tonumber(bytes[3]) },
    { role = "gradients", predicted = want.gradients, measured = tonumber(bytes[2]) },
    { role = "moments", predicted = want.moments, measured = moments },
  }
  if loss then
    rows[#rows + 1] = { role = "kept for backward", measured = kept_all }
    rows[#rows + 1] = { role = "  of which in FP8", predicted = kept(opt, rows_of),
      measured = kept_fp8 }
  end
  for _, row in ipairs(rows) do rows[row.role:match("^%s*(.*)$")] = row end
  return setmetatable(rows, meta)
end

return M
