-- Fits checkpoints to runs whose master weights have another format: f32, bf16, or bf16 with
-- Kahan's compensation, which is a buffer of the optimizer (NAME.compensation). Called by run.lua.
local autograd = require "engine.tensor.autograd"

local M = {}

--- Fits the open checkpoint c to an optimizer's masters. A compensation that c lacks is what its
--- weight loses in bf16. A compensation of a weight that is f32 now is added to that weight; any
--- other without use here is left out. Returns a line about the change, or nil.
function M.fit(optimizer, c)
  local model, buffers, make, read, note = c.parts.model, c.parts.optimizer, {}, c.read, nil
  local function f32(part, name)
    local x = read(c, part, name)
    local wide = x:to("f32") * 1
    x:free()
    return wide
  end
  for _, p in ipairs(optimizer.list) do
    local key, entry, now = p.name .. ".compensation", model[p.name], p.tensor.dtype
    local lost, kahan = buffers[key], optimizer.precision.rounding == "kahan" and now == "bf16"
    if entry and entry.dtype ~= now then
      note = ("master weights are %s now and were %s in the checkpoint"):format(now, entry.dtype)
    end
    if kahan and entry and not lost then
      buffers[key] = { dtype = "bf16", shape = entry.shape, count = entry.count }
      make["optimizer " .. key] = function()
        local w = f32("model", p.name)
        return w - w:to("bf16"):to("f32")
      end
    elseif lost and not kahan then
      buffers[key] = nil
      make["model " .. p.name] = now == "f32" and function()
        buffers[key] = lost
        local w = f32("model", p.name) + f32("optimizer", key)
        buffers[key] = nil
        return w
      end or nil
    end
  end
  function c:read(part, name)
    local f = make[part .. " " .. name]
    if not f then return read(self, part, name) end
    return autograd.scope(function() return f():keep() end)
  end
  return note
end

return M
