-- Batch norm over several ranks. Each rank has a part of the batch's rows, and all ranks normalize
-- by the mean and variance of the whole batch. Every rank of the group must make the same calls, in
-- the forward pass and in the backward pass. Owns the count of exchanges. Called by images.lua;
-- dist/reducer.lua calls begin() and first_bad().
--
-- In the forward pass, the ranks exchange their number of rows and, in f64, the mean and variance
-- of each channel. In the backward pass, they exchange the sums of dy and of dy * (x - mean) /
-- sqrt(variance + eps), on which every dx depends. The gradients of weight and bias remain those of
-- this rank's rows, because the gradient reduction adds them over the ranks later. All ranks
-- combine the numbers in f64 and in the same order, so they get the same bits. If no rank has rows,
-- mean and variance are nan, and the gradients of weight and bias are 0, as on a single rank.
local M_ffi = require "engine.base.ffi"
local autograd = require "engine.tensor.autograd"
local tensor = require "engine.tensor.tensor"

local C, check, ffi, run = M_ffi.C, M_ffi.check, M_ffi.ffi, M_ffi.run

local M = {}

-- The number of exchanges since begin(), and the result of first_bad().
local exchanges, bad = 0, math.huge

--- Counts exchanges from 0 again. Called at the beginning of a step.
function M.begin() exchanges, bad = 0, math.huge end

--- Returns a number for the first exchange since begin() to which this rank contributed inf or nan:
--- for exchange i (from 1), 2 * i in a forward pass and 2 * i + 1 in a backward pass. Returns inf
--- if there was none. An exchange spreads inf and nan to all ranks, so they originate from the rank
--- whose first_bad() is lowest.
function M.first_bad() return bad end

-- Counts an exchange, and updates first_bad(). own: the n numbers that this rank contributes.
local function count(own, n, backward)
  exchanges = exchanges + 1
  for i = 0, n - 1 do
    if own[i] - own[i] ~= 0 then bad = math.min(bad, 2 * exchanges + (backward and 1 or 0)) end
  end
end

-- Combines the ranks' statistics of their parts of the batch (Chan, Golub and LeVeque, 1979). mean
-- and variance ([channels], f64) and rows describe this rank's part. Returns the mean and variance
-- of the whole batch in `dtype`, and the number of rows of the whole batch.
local function combine(group, mean, variance, rows, dtype)
  local n = mean.count
  local own, all = ffi.new("double[?]", 2 * n + 1), ffi.new("double[?]", (2 * n + 1) * group.size)
  own[0] = rows
  ffi.copy(own + 1, mean:read "f64", 8 * n)
  ffi.copy(own + 1 + n, variance:read "f64", 8 * n)
  count(own, rows > 0 and 2 * n + 1 or 0)
  check(C.eng_comm_all_gather(group.comm, all, own, ffi.sizeof(own)))
  local total, means, variances = 0, {}, {}
  for p = 0, group.size - 1 do total = total + all[p * (2 * n + 1)] end
  for c = 1, n do
    local m, squares = 0, 0
    for p = 0, group.size - 1 do
      local part = all + p * (2 * n + 1)
      if part[0] > 0 then m = m + part[0] / total * part[c] end
    end
    for p = 0, group.size - 1 do
      local part = all + p * (2 * n + 1)
      if part[0] > 0 then squares = squares + part[0] * (part[n + c] + (part[c] - m) ^ 2) end
    end
    means[c], variances[c] = total > 0 and m or 0 / 0, squares / total
  end
  return tensor.tensor(means, { dtype = dtype, keep = false }),
    tensor.tensor(variances, { dtype = dtype, keep = false }), total
end

-- Sums `dweight` and `dbias` ([channels] each) over the ranks -> [2 x channels].
local function over_ranks(group, dweight, dbias)
  local n = dweight.count
  local sums = ffi.new("double[?]", 2 * n)
  ffi.copy(sums, dweight:read "f64", 8 * n)
  ffi.copy(sums + n, dbias:read "f64", 8 * n)
  count(sums, 2 * n, true)
  check(C.eng_comm_all_reduce(group.comm, sums, 2 * n, M_ffi.dtype.f64, C.ENG_SUM))
  return tensor.from_memory(sums, "f64", { 2, n }, { dtype = dweight.dtype, keep = false })
end

-- `call`: { group, eps }. Returns the normalized x. Adds call.mean, call.variance and call.rows,
-- which describe the whole batch and have no gradient.
local function forward(saved, call, x, weight, bias)
  local rows = x.count / math.max(x:size(-1), 1)
  local own, mean, variance = run("batch_norm", { x, false, false, false, false }, { 1 },
    { call.eps }, 3)
  own:done()
  call.mean, call.variance, call.rows = combine(call.group, mean, variance, rows,
    x.dtype == "f64" and "f64" or "f32")
  saved.call, saved.x, saved.weight, saved.bias = call, x, weight, bias
  return (run("batch_norm", { x, weight or false, bias or false, call.mean, call.variance }, {},
    { call.eps }, 3))
end

local function backward(saved, dy)
  local call, x, weight = saved.call, saved.x, saved.weight or false
  local wide = M_ffi.dtype[x.dtype == "f64" and "f64" or "f32"]
  local inputs = { x, weight, call.mean, call.variance, dy, false }
  local own, dweight, dbias = run("batch_norm_grad", inputs, { wide, 1, 1 }, { call.eps }, 3)
  own:done()
  inputs[6] = over_ranks(call.group, dweight, dbias)
  local dx = run("batch_norm_grad", inputs, { wide, 0, 0, math.max(call.rows, 1) }, { call.eps }, 3)
  local gradients = { dx }
  if saved.weight then gradients[#gradients + 1] = dweight:to(saved.weight.dtype) end
  if saved.bias then gradients[#gradients + 1] = dbias:to(saved.bias.dtype) end
  return unpack(gradients)
end

local normalize = autograd.custom { forward = forward, backward = backward }

--- Computes the batch norm of x [.. x C] over the ranks of `group` (engine.ranks.group()). weight
--- and bias: [C] or nil. Returns the result, and the mean [C], the variance [C] and the number of
--- rows of the whole batch.
function M.batch_norm(group, x, weight, bias, eps)
  local call = { group = group, eps = eps }
  return normalize(call, x, weight, bias), call.mean, call.variance, call.rows
end

return M
