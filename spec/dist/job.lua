-- The job of spec/dist/ranks_spec.lua: a tiny GPT, trained by any number of ranks. Prints a line
-- per step (rank 0) and the checksum of the weights at the end (every rank, on stderr).
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local ranks = engine.ranks

local cfg = engine.config({
  steps = 6, batch = 4, accumulate = 1, precision = "fp32", wire = "own", zero = 0, run = "",
  resume = "", bucket = 0.05, clip = 0.0, dropout = 0.0,
  checkpoint_every = 0, policy = "", timeout = 60, optimizer = "adamw", width = 32, log = "quiet",
  tied = true, lora = 0,  -- size r of DoRA adapters; 0: no adapters
  -- inf or nan in a gradient of one rank
  plant = "", plant_rank = 0, plant_step = 2, plant_tensor = "blocks.2.mlp.up.weight",
  -- one rank with settings that differ from the others'
  odd_rank = -1, odd_policy = "", odd_steps = 0,
  hang_rank = -1, slow_rank = -1, slow = 0.0, die_rank = -1, raise_rank = -1, trouble_step = 3,
  swap_step = -1, swap = "", few_rank = -1, threads_rank = -1, signal = "",
  agree_every = 1, mode = "sync",
  noise = false,          -- data that draws random numbers for each batch
  -- what drift_rank changes after drift_step: a bit of drift_tensor (flip), of its second moment
  -- (moment) or of its low-precision copy (low); or lr, scale, state, random, updates
  drift = "", drift_rank = 1, drift_step = 2, drift_tensor = "blocks.2.mlp.up.weight",
  device = "cpu",
  -- for spec/chaos.lua: the minimum seconds of a step, and a file into which rank 0 writes the step
  pace = 0.0, marks = "",
})
local odd = ranks.rank() == cfg.odd_rank
if odd and cfg.odd_policy ~= "" then cfg.policy = cfg.odd_policy end
if odd and cfg.odd_steps > 0 then cfg.steps = cfg.odd_steps end
engine.device(cfg.device)
engine.seed(5)

local text = {}
for i = 1, 6000 do text[i] = string.char(32 + i * i % 89) end
local model = engine.nn.gpt { vocab = 256, context = 16, width = cfg.width, heads = 2, layers = 2,
  dropout = cfg.dropout, tied = cfg.tied }
if cfg.lora > 0 then engine.nn.lora(model, { rank = cfg.lora, dora = true, base = "bf16" }) end
local optimizer = engine.optim[cfg.optimizer](model, { lr = 1e-3, precision = cfg.precision })

local Moody = { get_scale = function(self) return self.scale end,
  update = function(self) self.scale = ranks.rank() == 1 and 2 or 1 end }
Moody.__index = Moody
function Moody.new() return setmetatable({ scale = 1 }, Moody) end
engine.register_loss_scaler("moody", Moody)

-- Puts inf or nan into one element of one parameter's gradient, on one rank, at one step.
local target
for _, p in ipairs(optimizer.list) do
  if p.name == cfg.plant_tensor then target = p.tensor end
end
local calls = 0
local function loss_of(m, batch)
  local loss = m:loss(batch.x, batch.y)
  local step = math.floor(calls / cfg.accumulate)
  calls = calls + 1
  if cfg.plant == "" or ranks.rank() ~= cfg.plant_rank or step ~= cfg.plant_step then
    return loss
  end
  local planted = cfg.plant == "inf" and math.huge or 0 / 0
  local add = engine.custom {
    forward = function(_, l) return l * 1 end,
    backward = function(_, dl)
      local values = M_ffi.new("float[?]", target.count)
      values[target.count - 1] = planted
      return dl, engine.from_memory(values, "f32", target.shape)
    end }
  return add(loss, target)
end

local data = engine.data.text { text = table.concat(text), batch = cfg.batch, context = 16,
  seed = 9 }
if cfg.noise then
  local batches = data
  data = { state = function() return batches:state() end,
    restore = function(_, state) batches:restore(state) end,
    next = function()
      local batch = batches:next()
      local noise = engine.rand(cfg.batch, 16):lt(0.2)
      return { x = noise:where(engine.randint(0, 256, cfg.batch, 16, "i32"), batch.x),
        y = batch.y }
    end }
end

-- Flips the lowest bit of the first element.
local function flip(x)
  local info = M_ffi.new("eng_tensor_info")
  M_ffi.check(M_ffi.C.eng_info(info, x))
  local bytes = M_ffi.ffi.cast("uint8_t *", info.data)
  bytes[0] = bit.bxor(bytes[0], 1)
end
local drift = {
  flip = function(t, i) flip(t.optimizer.list[i].tensor) end,
  moment = function(t, i)
    flip(t.optimizer:state_tensors()[t.optimizer.list[i].name .. ".moment2"])
  end,
  low = function(t, i)
    local low = M_ffi.Tensor()
    M_ffi.check(M_ffi.C.eng_params_low(low, t.optimizer.params, i - 1))
    flip(low)
  end,
  lr = function(t) t.optimizer.lr = 2e-3 end,
  scale = function(t) t.policy:set_scale(3) end,
  state = function(t) t.policy.save = function() return ("long "):rep(400) end end,
  random = function() engine.randn(1) end,
  updates = function(t) t.optimizer.updates = t.optimizer.updates + 1 end,
}
local marks = cfg.marks ~= "" and ranks.rank() == 0 and assert(io.open(cfg.marks, "w"))
if cfg.pace > 0 then M_ffi.ffi.cdef "int usleep(unsigned useconds);" end

local trainer
trainer = engine.trainer { model = model, optimizer = optimizer, loss = loss_of,
  data = data,
  steps = cfg.steps, accumulate = cfg.accumulate, clip = cfg.clip, comm_dtype = cfg.wire,
  zero = cfg.zero, bucket = cfg.bucket, run = cfg.run, resume = cfg.resume,
  checkpoint_every = cfg.checkpoint_every, rank_timeout = cfg.timeout, log = cfg.log,
  policy = cfg.policy ~= "" and cfg.policy or nil, agree_every = cfg.agree_every, mode = cfg.mode,
  on_step = function(t, record, verdict)
    local step = tonumber(record.step)
    if step == cfg.drift_step and ranks.rank() == cfg.drift_rank and drift[cfg.drift] then
      for i, p in ipairs(t.optimizer.list) do
        if p.name == cfg.drift_tensor then drift[cfg.drift](t, i) end
      end
    end
    if step == cfg.trouble_step then
      if ranks.rank() == cfg.hang_rank then while true do end end
      if ranks.rank() == cfg.slow_rank then os.execute("sleep " .. cfg.slow) end
      if ranks.rank() == cfg.die_rank then
        os.execute("kill -9 " .. io.open("/proc/self/stat"):read("*n"))
      end
      if ranks.rank() == cfg.raise_rank then error("this rank has had enough", 0) end
    end
    if step == cfg.swap_step then
      if ranks.rank() == cfg.few_rank then engine.policy.limits { memory = 1000 } end
      t.policy:swap(cfg.swap)
    end
    if cfg.signal ~= "" then
      engine.signal("mine", ranks.rank() + 1, cfg.signal)
      print(("signal %s"):format(tostring(t.reducer.signals.mine)))
    end
    print(("%d %.17g %.17g %s %s"):format(step, record.loss, record.scale, verdict:what(),
      t.policy.name))
    if marks then
      marks:seek("set")
      marks:write(("%9d\n"):format(step + 1))
      marks:flush()
    end
    if cfg.pace > 0 then M_ffi.ffi.C.usleep(cfg.pace * 1e6) end
  end }
trainer:run()
io.stderr:write(("rank %d: weights %s\n"):format(ranks.rank(), trainer:whole(function()
  return tostring(M_ffi.C.eng_params_checksum_of(optimizer.params, nil, 0))
end)))
