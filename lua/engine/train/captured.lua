-- Captured steps, graph = true: the device records the kernels of one forward and backward pass and
-- from then on launches them as one graph. Host code in the model (branches, signals) runs once, at
-- the capture, so the core refuses operations that draw random numbers or read values back there. A
-- batch of another shape, and a step whose FP8 layers are measured, runs operation by operation.
-- Called by the trainer's forward_backward; owns trainer.captured.
local M_ffi = require "engine.base.ffi"
local tensor = require "engine.tensor.tensor"

local C, check = M_ffi.C, M_ffi.check

local M = {}

local WARM_UP = 3   -- steps before the capture: products choose their algorithms, arenas grow

--- The tensors of a batch in the order of their names: an array of handles, and how many.
local function tensors_of(batch)
  local names, list = {}, {}
  for name, value in pairs(batch) do
    if tensor.is_tensor(value) then names[#names + 1] = tostring(name) end
  end
  table.sort(names)
  for i, name in ipairs(names) do list[i] = batch[name] end
  local handles = M_ffi.new("eng_tensor[?]", math.max(1, #list))
  for i, x in ipairs(list) do handles[i - 1] = x end
  return handles, #list
end

--- Captures the step on `batch`; returns the graph.
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
  error(result, 0)
end

--- Forward and backward of a batch through the captured step. Returns the loss, or nil where the
--- step must run operation by operation: before the capture, and for a batch that does not fit it.
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
  if status == C.ENG_ERR_SHAPE or status == C.ENG_ERR_STATE then return nil end
  check(status)
  local loss = M_ffi.ffi.new("eng_tensor")
  check(C.eng_graph_loss(loss, trainer.captured))
  return loss
end

return M
