-- Fits checkpoints to runs whose master weights have another format: f32, bf16, or bf16 with
-- Kahan's compensation, which is a buffer of the optimizer (NAME.compensation). Also adds the
-- averages of weights (NAME.q_ema) that the run needs and the checkpoint lacks, and drops averages
-- that the run does not need. Called by restore.lua.
local show = require "engine.base.show"

local M = {}

-- Returns an entry for a checkpoint's `parts`, for a tensor that `make` computes because no file
-- has it. like: the entry of a tensor of the same shape.
local function derived(dtype, like, make)
  return { dtype = dtype, shape = like.shape, count = like.count, make = make }
end

--- Fits the open checkpoint c to an optimizer's masters. A compensation that this run uses and c
--- lacks is computed as the weight minus its bf16 value. A compensation that this run does not use
--- is added to its weight if the weight is f32 now, and is otherwise dropped. An average that c
--- lacks starts as a copy of the weight. An average that this run does not use is dropped. Returns
--- a line about a change of the masters' format and about new averages, or nil.
function M.fit(optimizer, c)
  local model, buffers, note = c.parts.model, c.parts.optimizer, nil
  local function f32(part, name, entry)
    local x = c:read(part, name, entry)
    local wide = x:to("f32") * 1
    x:free()
    return wide
  end
  local averages, begun = optimizer.fp8 and optimizer.fp8.averages:tensors() or {}, 0
  for name in pairs(buffers) do
    if name:find("%.q_ema$") and not averages[name] then buffers[name] = nil end
  end
  for _, p in ipairs(optimizer.list) do
    local key, weight, now = p.name .. ".compensation", model[p.name], p.tensor.dtype
    local average = p.name .. ".q_ema"
    if averages[average] and weight and not buffers[average] then
      begun = begun + 1
      buffers[average] = derived("f32", weight, function() return f32("model", p.name, weight) end)
    end
    local lost, kahan = buffers[key], optimizer.precision.rounding == "kahan" and now == "bf16"
    if weight and weight.dtype ~= now then
      note = ("master weights are %s now and were %s in the checkpoint"):format(now, weight.dtype)
    end
    if kahan and weight and not lost then
      buffers[key] = derived("bf16", weight, function()
        local w = f32("model", p.name, weight)
        return w - w:to("bf16"):to("f32")
      end)
    elseif lost and not kahan then
      buffers[key] = nil
      if weight and now == "f32" then
        model[p.name] = derived("f32", weight, function()
          return f32("model", p.name, weight) + f32("optimizer", key, lost)
        end)
      end
    end
  end
  if begun > 0 then
    note = (note and note .. "; " or "") ..
      ("%s of weights (Q-EMA) %s of the weights"):format(show.counted(begun, "average"),
        begun == 1 and "starts as a copy" or "start as copies")
  end
  return note
end

return M
