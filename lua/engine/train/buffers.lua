-- Copies of a model's buffers, such as the running statistics of batch norm. A forward pass changes
-- buffers even if its step makes no update, so they are restored before a retry, after a failed
-- step, and after passes that only measure. Called by trainer.lua, overflow.lua and reference.lua.
local tensor = require "engine.tensor.tensor"

local M = {}

-- Returns the tensor that is the buffer now, or nil if it has another shape or dtype than the copy:
-- a module may assign another tensor to the field at any time.
local function current(b)
  local x = rawget(b.owner, b.key)
  local same = tensor.is_tensor(x) and x.dtype == b.was.dtype
    and table.concat(x.shape, " ") == table.concat(b.was.shape, " ")
  return same and x or nil
end

--- Copies the buffers of a model. copies: the result of an earlier call, whose memory is used again
--- where the buffers still fit, or nil. Returns a list of { owner, key = the buffer's module and
--- field, was = a kept copy }.
function M.copy(model, copies)
  for _, b in ipairs(copies or {}) do
    local now = current(b)
    if not now then
      M.free(copies)
      copies = nil
      break
    end
    b.was:copy(now)
  end
  if copies then return copies end
  copies = {}
  for _, p in ipairs(model:parameters()) do
    if p.role == "buffer" then
      copies[#copies + 1] = { owner = p.owner, key = p.key, was = p.tensor:keep() }
    end
  end
  return copies
end

--- Writes the copies into the buffers.
function M.restore(copies)
  for _, b in ipairs(copies) do
    local now = current(b)
    if now then now:copy(b.was) else rawset(b.owner, b.key, b.was:keep()) end
  end
end

--- Frees the copies.
function M.free(copies)
  for _, b in ipairs(copies) do b.was:free() end
end

--- Runs f, which passes batches through the model, and then restores the model's buffers. Returns
--- f's results.
function M.keeping(model, f)
  local copies = M.copy(model)
  local function restored(...)
    M.restore(copies)
    M.free(copies)
    return ...
  end
  return restored(f())
end

return M
