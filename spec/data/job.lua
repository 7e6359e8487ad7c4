-- The job of resume_spec.lua: a tiny GPT on a mixture of documents and chats. Appends a line for
-- each batch to FOLDER/seen: the number of the batch over all ranks, and a checksum of its tokens.
-- die: the step after which the process kills itself.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local ffi = M_ffi.ffi
ffi.cdef "int raise(int sig);"

local cfg = engine.config { folder = "", run = "", resume = "", steps = 9, accumulate = 1, die = 0,
  pack = true }
engine.seed(3)
local C, T = M_ffi.C, cfg.pack and 24 or 96
local function checksum(crc, x)
  return C.eng_crc32c(crc, x:read("i32"), 4 * x.count)
end

local options = { batch = 1, context = T, pack = cfg.pack, seed = 4 }
local function loader(make, name)
  local o = { path = cfg.folder .. "/" .. name }
  for key, value in pairs(options) do o[key] = value end
  return make(o)
end
local data = engine.data.mix { batch = 2, weights = { 1, 2 }, loaders = {
  loader(engine.data.jsonl, "web.jsonl"), loader(engine.data.chat, "chat.jsonl") } }

local model = engine.nn.gpt { vocab = 256, context = T, width = 16, heads = 2, layers = 1 }
local rank, size = engine.ranks.rank(), engine.ranks.size()
local seen = assert(io.open(cfg.folder .. "/seen", "a"))
local step, batches = 0, 0
local trainer = engine.trainer { model = model, data = data, steps = cfg.steps, log = "quiet",
  run = cfg.run, resume = cfg.resume, checkpoint_every = 2, accumulate = cfg.accumulate,
  optimizer = engine.optim.adamw(model, { lr = 1e-3 }),
  loss = function(m, batch)
    local number = (step * size + rank) * cfg.accumulate + batches
    seen:write(("%03d %08x\n"):format(number, checksum(checksum(0, batch.x), batch.y)))
    seen:flush()
    batches = batches + 1
    return m:loss(batch.x, batch.y)
  end,
  on_step = function(t)
    step, batches = t.steps_done, 0
    if step == cfg.die then ffi.C.raise(9) end
  end }
step = trainer.steps_done
trainer:run()
if rank == 0 then
  print("weights", tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0)))
end
