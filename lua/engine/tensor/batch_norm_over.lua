-- Batch norm over several ranks: each rank has a part of the batch's rows, and all normalise by the
-- mean and variance of the whole batch. Every rank of the group must make the same calls, in the
-- forward pass and in the backward pass. Called by images.lua.
--
-- Forward, the ranks exchange their number of rows and the mean and variance of each channel.
-- Backward, they exchange the sums of dy and of dy * (x - mean) / sqrt(variance + eps), on which
-- every dx depends; the gradients of weight and bias stay those of this rank's rows, since the
-- optimizer's reduction adds them up. Numbers are combined in double and in the order of ranks, so
-- all ranks have the same bits.
local M_ffi = require "engine.base.ffi"
local autograd = require "engine.tensor.autograd"
local tensor = require "engine.tensor.tensor"

local C, check, ffi, run = M_ffi.C, M_ffi.check, M_ffi.ffi, M_ffi.run

-- Combines the ranks' statistics of their parts of the batch (Chan, Golub and LeVeque, 1979). mean,
-- variance [channels] and rows: of this rank's part. Returns all three for the whole batch.
local function combine(group, mean, variance, rows)
  local n = mean.count
  local own, all = ffi.new("double[?]", 2 * n + 1), ffi.new("double[?]", (2 * n + 1) * group.size)
  own[0] = rows
  for c, value in ipairs(mean:totable()) do own[c] = value end
  for c, value in ipairs(variance:totable()) do own[n + c] = value end
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
    means[c], variances[c] = m, squares / total
  end
  return tensor.tensor(means, { dtype = mean.dtype, keep = false }),
    tensor.tensor(variances, { dtype = mean.dtype, keep = false }), total
end

-- The sums of `dweight` and `dbias` [channels] over the ranks: [2 x channels].
local function over_ranks(group, dweight, dbias)
  local n = dweight.count
  local sums = ffi.new("double[?]", 2 * n)
  for k, x in ipairs { dweight, dbias } do
    for c, value in ipairs(x:totable()) do sums[(k - 1) * n + c - 1] = value end
  end
  check(C.eng_comm_all_reduce(group.comm, sums, 2 * n, M_ffi.dtype.f64, C.ENG_SUM))
  local rows = { {}, {} }
  for k = 1, 2 do
    for c = 1, n do rows[k][c] = sums[(k - 1) * n + c - 1] end
  end
  return tensor.tensor(rows, { dtype = dweight.dtype, keep = false })
end

-- `call`: { group, eps }. forward adds to it the results without a gradient: mean, variance, rows.
local function forward(saved, call, x, weight, bias)
  local channels = x:size(-1)
  local own, mean, variance = run("batch_norm", { x, false, false, false, false }, {},
    { call.eps }, 3)
  own:done()
  call.mean, call.variance, call.rows = combine(call.group, mean, variance, x.count / channels)
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
  local dx = run("batch_norm_grad", inputs, { wide, 0, 0, call.rows }, { call.eps }, 3)
  local gradients = { dx }
  if saved.weight then gradients[#gradients + 1] = dweight:to(saved.weight.dtype) end
  if saved.bias then gradients[#gradients + 1] = dbias:to(saved.bias.dtype) end
  return unpack(gradients)
end

local normalise = autograd.custom { forward = forward, backward = backward }

--- Batch norm of x [.. x C] over the ranks of `group` (engine.ranks.group()); weight and bias: [C]
--- or nil. Returns the result, and the mean, the variance [C] and the number of rows of the batch.
return function(group, x, weight, bias, eps)
  local call = { group = group, eps = eps }
  return normalise(call, x, weight, bias), call.mean, call.variance, call.rows
end
