-- The ranks of spec/dist/ranks_zero_spec.lua and zero3_spec.lua. Trains a small GPT, or a model in
-- which every rank uses different layers (model=forked), and writes JSON into the file told.RANK:
-- steps, checksum of the weights, predicted and actual cost of the reduction, and the errors that a
-- script gets when it accesses sharded gradients.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local json = require "engine.base.json"

local C, check = M_ffi.C, M_ffi.check
local ranks = engine.ranks
local cfg = engine.config { model = "gpt", zero = 0, steps = 4, accumulate = 1, precision = "fp32",
  wire = "own", bucket = 0.05, width = 48, layers = 3, policy = "",
  run = "", trap = "", clip = 0.0, ask = false, optimizer = "adamw", timeout = 30, told = "told",
  resume = "", boom = 0, checkpoint = false, resident = false, mode = "sync" }
engine.seed(3)

-- ------------------------------------------------------------------ models

-- Some layers are registered in the order of their use, others in reverse. Some are used by rank 0
-- only, some by the other ranks only, some by all ranks. One weight is never used.
local Forked = engine.nn.class("Forked")

function Forked:init(W)
  self.out = engine.nn.linear(W, 1)
  for i = 1, 3 do self["back" .. i] = engine.nn.linear(W, W) end
  for _, name in ipairs { "first", "others", "idle", "middle" } do
    self[name] = engine.nn.linear(W, W)
  end
  self.into = engine.nn.linear(W, W)
  self:parameter("none", engine.zeros(0, 3), "linear")
end

local function boom(_, dy)
  if cfg.boom > 0 then error("boom") end
  return dy
end

function Forked:loss(x)
  local h = self.into(x):tanh()
  if cfg.boom == ranks.rank() then
    h = engine.custom { forward = function(_, y) return y * 1 end, backward = boom }(h)
  end
  h = (ranks.rank() == 0 and self.first or self.others)(h):tanh()
  for i = 3, 1, -1 do h = self["back" .. i](h):tanh() end
  h = self.middle(h):tanh()
  if ranks.rank() ~= 1 then h = self.first(h):tanh() + h end
  return self.out(h):to("f32"):mean()
end

local text = {}
for i = 1, 6000 do text[i] = string.char(32 + i * i % 89) end

local model, data, another
if cfg.model == "forked" then
  model = Forked(cfg.width)
  data = { next = function() return { x = engine.randn(6, cfg.width) } end,
    state = function() return {} end, restore = function() end, sharded = true }
else
  model = engine.nn.gpt { vocab = 256, context = 16, width = cfg.width, heads = 2,
    layers = cfg.layers }
  data = engine.data.text { text = table.concat(text), batch = 4, context = 16, seed = 9 }
  another = engine.data.text { text = table.concat(text), batch = 4, context = 16, seed = 9 }
end

-- ------------------------------------------------------------------ training

local told, steps = {}, {}
local function ask(name, f)
  local good, message = pcall(f)
  told[name] = good and "no error" or tostring(message)
end

local optimizer = engine.optim[cfg.optimizer](model, { lr = 1e-3, precision = cfg.precision })
local options = { model = model, optimizer = optimizer, data = data, steps = cfg.steps,
  accumulate = cfg.accumulate, clip = cfg.clip, comm_dtype = cfg.wire,
  zero = cfg.zero, bucket = cfg.bucket, run = cfg.run, resume = cfg.resume,
  checkpoint = cfg.checkpoint and "block" or nil,
  trap = cfg.trap ~= "" and cfg.trap or nil, policy = cfg.policy ~= "" and cfg.policy or nil,
  rank_timeout = cfg.timeout, agree_every = 1, mode = cfg.mode,
  log = "quiet", attach = false }
if cfg.model == "forked" then options.loss = function(m, batch) return m:loss(batch.x) end end
local trainer
options.on_step = function(t, record, verdict)
  steps[#steps + 1] = { ("%.17g"):format(record.loss), ("%.17g"):format(record.scale),
    ("%.17g"):format(record.norm), ("%.17g"):format(record.norm_ref),
    tonumber(record.inf), verdict:what() }
  local peak = cfg.resident and record.step == 0 and io.open("/proc/self/clear_refs", "w")
  if peak then
    peak:write("5")        -- resets the peak, VmHWM
    cfg.resident = peak:close() ~= nil
  end
  if not cfg.ask or record.step > 1 then return end
  local p = optimizer.list[2].tensor
  ask("grad", function() return p.grad end)
  ask("unscale", function() return check(C.eng_params_unscale(M_ffi.new("int[1]"), optimizer.params,
    1)) end)
  ask("stats", function() return check(C.eng_params_stats(M_ffi.new("eng_record"), nil,
    optimizer.params, 1, 0)) end)
  ask("backward", function() return t:forward(another:next()):backward() end)
  ask("format", function()
    return check(C.eng_params_precision(optimizer.params, nil,
      M_ffi.new("int32_t[?]", #optimizer.list, M_ffi.dtype.bf16, M_ffi.dtype.bf16)))
  end)
  C.eng_backward_abort()
  -- A tensor outside the parameter set still gets its gradient.
  local x = engine.tensor({ 1, 2, 3 }, { requires_grad = true })
  ask("leaf", function()
    x:mul(x):sum():backward()
    if x.grad:sum():item() ~= 12 then error("another gradient") end
  end)
end
trainer = engine.trainer(options)
trainer:run()

-- ------------------------------------------------------------------ memory and messages

local facts, memory = M_ffi.new("eng_parallel_facts"), engine.memory()
-- The peak memory of this process since the first step, in MiB; nil if the kernel cannot report it.
local function resident()
  for line in io.lines("/proc/self/status") do
    local kib = line:match("^VmHWM:%s+(%d+)")
    if kib and cfg.resident then return kib / 1024 end
  end
end
local result = { rank = ranks.rank(), resident = resident(), steps = steps, told = told,
  weights = trainer:whole(function()
    return tostring(C.eng_params_checksum_of(optimizer.params, nil, 0))
  end),
  gradients = memory.gradients.peak, messages_memory = memory.messages.peak }
if trainer.reducer.many then
  C.eng_parallel_last(facts, trainer.reducer.reduction)
  for _, name in ipairs { "messages", "bytes", "weight_messages", "weight_bytes",
    "weights_memory", "weight_exchanges", "weights_ahead" } do
    result[name] = tonumber(facts[name])
  end
  check(C.eng_step_begin())
  trainer:forward(data:next())
  options.whole = require("engine.dist.reduction").whole(optimizer, cfg.zero)
  options.units = trainer.reducer.units
  result.predicted = require("engine.dist.plan").sizes(optimizer.params, options, ranks.rank(),
    ranks.size())
  check(C.eng_step_end())
end
local file = assert(io.open(("%s.%d"):format(cfg.told, ranks.rank()), "w"))
file:write(json.encode(result))
assert(file:close())
