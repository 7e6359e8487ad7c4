-- Captures steps (graph = true): the device records the kernels of one forward and backward pass
-- and from then on launches them as one graph. A launch does not run the host code of the model
-- (branches, signals); only the capture does. The core therefore refuses operations of a captured
-- step that draw random numbers or read values back. A batch with other shapes, dtypes or addresses
-- than the captured batch runs operation by operation, and so does a step whose FP8 layers are
-- measured. Called by trainer.lua; owns trainer.captured.
local M_ffi = require "engine.base.ffi"
local tensor = require "engine.tensor.tensor"

local C, check = M_ffi.C, M_ffi.check

local M = {}

local WARM_UP = 3   -- steps before the capture, in which GEMMs choose algorithms and arenas grow

-- Returns whether a table, or a table inside it, holds a tensor.
local function has_tensor(value, seen)
  if tensor.is_tensor(value) then return true end
  if type(value) ~= "table" or seen[value] then return false end
  seen[value] = true
  for _, part in pairs(value) do
    if has_tensor(part, seen) then return true end
  end
end

-- Returns the tensors of a batch in the order of their field names: an array of handles, and its
-- length. The core launches the graph only if shapes, dtypes and addresses of the tensors are those
-- of the captured batch.
local function tensors_of(batch)
  local list, seen, found = {}, {}, "a batch without tensors"
  for key, value in pairs(batch) do
    if tensor.is_tensor(value) then
      list[#list + 1] = { name = type(key) .. tostring(key), x = value }
    elseif has_tensor(value, seen) then
      list, found = {}, ("the field '%s', a table with tensors"):format(tostring(key))
      break
    end
  end
  M_ffi.raise_if(#list == 0, "graph=true: expected the loss to read tensors that are fields of " ..
    "the batch, got %s; hint: graph=false", found)
  table.sort(list, function(a, b) return a.name < b.name end)
  local handles = M_ffi.new("eng_tensor[?]", #list)
  for i, item in ipairs(list) do handles[i - 1] = item.x end
  return handles, #list
end

local function capture(trainer, batch, handles, n)
  local out = M_ffi.new("eng_graph *[1]")
  check(C.eng_graph_begin(out, trainer.optimizer.params, handles, n))
  local graph = M_ffi.ffi.gc(out[0], C.eng_graph_free)
  local good, result = pcall(function()
    local loss = trainer:forward(batch)
    loss:backward { scale = 1 }
    check(C.eng_graph_end(graph, loss))
  end)
  if good then return graph end
  C.eng_graph_free(M_ffi.ffi.gc(graph, nil))
  if type(result) == "string" and not result:find("graph=false", 1, true) then
    result = result:gsub("^[^\n]*", "%0; hint: graph=false")
  end
  error(result, 0)
end

--- Drops the captured step, if any; another warm-up begins, of which `made` steps are already made.
function M.drop(trainer, made)
  if trainer.captured then C.eng_graph_free(M_ffi.ffi.gc(trainer.captured, nil)) end
  trainer.captured, trainer.warm = nil, made
end

--- Runs forward and backward of a batch through the captured step, at the loss scale `scale`.
--- Returns the loss, or nil if the step must run operation by operation: before the capture, for a
--- batch that does not fit the captured graph, in a step whose FP8 layers are measured, and when
--- the parameters' formats or copies have changed since the capture (the step is then captured
--- again).
function M.launch(trainer, batch, scale)
  local sites = trainer.optimizer.fp8
  if sites and sites.looking then return nil end
  local handles, n = tensors_of(batch)
  if not trainer.captured then
    trainer.warm = (trainer.warm or 0) + 1
    if trainer.warm <= WARM_UP then return nil end
    trainer.captured = capture(trainer, batch, handles, n)
  end
  local status = C.eng_graph_launch(trainer.captured, scale, handles, n)
  if status == C.ENG_ERR_STATE then M.drop(trainer, 1) end   -- the graph is outdated
  if status == C.ENG_ERR_SHAPE or status == C.ENG_ERR_STATE then return nil end
  check(status)
  local loss = M_ffi.ffi.new("eng_tensor")
  check(C.eng_graph_loss(loss, trainer.captured))
  return loss
end

return M
