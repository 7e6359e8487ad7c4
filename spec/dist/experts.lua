-- The job of spec/dist/ranks_experts_spec.lua: a small classifier with two mixtures of experts,
-- divided over the ranks. Prints a line per step and the traffic (rank 0), and the checksum of the
-- weights that all ranks hold (every rank, on stderr).
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local ranks, nn = engine.ranks, engine.nn

local cfg = engine.config({
  steps = 8, batch = 8, accumulate = 1, precision = "fp32", wire = "own", zero = 0, run = "",
  resume = "", clip = 0.0, policy = "", timeout = 20,
  optimizer = "adam", over = 0, dispatch = "own", combine = "own", experts = 4, top_k = 2,
  bare = false, one = 0, timid = "", trap = "",
  plant = "", plant_rank = 0, plant_expert = 2, plant_step = 2, checkpoint_every = 0, hidden = 24,
  drift_rank = -1,        -- a rank that zeroes plant_expert's weights after the first step
  device = "cpu",
})
engine.device(cfg.device)
engine.seed(5)

local WIDTH, CLASSES = 20, 6
local Net = nn.class("net")
function Net:init()
  local function moe(over)
    return nn.moe { width = WIDTH, hidden = cfg.hidden, experts = cfg.experts, top_k = cfg.top_k,
      dispatch = cfg.dispatch, combine = cfg.combine,
      experts_over = over }
  end
  local over = cfg.over >= 0 and ranks.group(cfg.over > 0 and cfg.over or nil) or nil
  self.first = moe(over)
  self.between = nn.linear(WIDTH, WIDTH)
  self.second = moe(over)
  self.classes = nn.linear(WIDTH, CLASSES)
  if cfg.one > 0 then  -- all tokens go to one expert of the first layer, none to the others
    local gate = {}
    for e = 1, cfg.experts do
      gate[e] = {}
      for k = 1, WIDTH do gate[e][k] = k == 1 and (e == cfg.one and 1 or -1) or 0 end
    end
    self.first.gate.weight:copy(engine.tensor(gate))
  end
end
-- bare: the first layer's input is the data, which need no gradient.
function Net:forward(x, y)
  if not cfg.bare then x = self.between(x) end
  x = x + self.first(x)
  x = x + self.second(self.between(x):relu())
  return engine.cross_entropy(self.classes(x), y) + 0.01 * self.second.balance
end

local function drawn(n)
  local x, y = engine.randn(n, WIDTH):totable(), {}
  for i = 1, n do
    x[i][1] = math.abs(x[i][1])
    y[i] = (x[i][2] > 0 and 1 or 0) + (x[i][3] > 0 and 2 or 0) + (x[i][4] > 1 and 2 or 0)
  end
  return engine.tensor(x, { keep = true }), engine.tensor(y, { dtype = "i64", keep = true })
end

local x, y = drawn(512)
local net = Net()
net.first:sent()
local optimizer = engine.optim[cfg.optimizer](net, { lr = 3e-3, precision = cfg.precision })

-- Puts inf or nan into the gradient of one expert's parameter, on one of the ranks that hold it.
local target
for _, p in ipairs(optimizer.list) do
  if p.name == ("second.experts.%d.up.weight"):format(cfg.plant_expert) then target = p.tensor end
end
local calls = 0
local function loss_of(model, batch)
  local loss = model(batch.x, batch.y)
  local step = math.floor(calls / cfg.accumulate)
  calls = calls + 1
  if cfg.plant == "" or ranks.rank() ~= cfg.plant_rank or step ~= cfg.plant_step then
    return loss
  end
  assert(target.count > 0, "the rank does not hold this expert")
  local planted = cfg.plant == "inf" and math.huge or 0 / 0
  return engine.custom {
    forward = function(_, l) return l * 1 end,
    backward = function(_, dl)
      local values = M_ffi.new("float[?]", target.count)
      values[0] = planted
      return dl, engine.from_memory(values, "f32", target.shape)
    end }(loss, target)
end

local trainer
trainer = engine.trainer { model = net, optimizer = optimizer, loss = loss_of,
  data = engine.data.tensors { x = x, y = y, batch = cfg.batch, seed = 9 },
  steps = cfg.steps, accumulate = cfg.accumulate, clip = cfg.clip, comm_dtype = cfg.wire,
  zero = cfg.zero, run = cfg.run, resume = cfg.resume, rank_timeout = cfg.timeout,
  agree_every = 1,
  checkpoint_every = cfg.checkpoint_every, log = "quiet", trap = cfg.trap ~= "" and cfg.trap or nil,
  policy = cfg.policy ~= "" and cfg.policy or nil, ref_every = 2,
  on_step = function(t, record, verdict)
    if record.step == 0 and ranks.rank() == cfg.drift_rank then target:zero() end
    local scales = {}
    for i, group in ipairs(t.groups.groups) do
      scales[i] = ("%s=%g"):format(group, t.policy.group_scale and t.policy:group_scale(i) or 0)
    end
    print(("%d %.17g %.17g %s %.17g %s"):format(tonumber(record.step), record.loss, record.scale,
      verdict:what(), record.norm, table.concat(scales, " ")))
    if cfg.timid ~= "" then
      ranks.say("%d %.17g %.17g %d %g", tonumber(record.step), record.norm, record.amax,
        tonumber(record.count), record.norm_ref)
    end
  end }
trainer:run()
for way, facts in pairs(net.first:sent() or {}) do
  print(("sent %s %d %.4g"):format(way, facts.bytes, facts.snr))
end
print("counts " .. table.concat(net.first.counts, " "))
local common = trainer.reducer.marks and trainer:whole(function()
  return tostring(M_ffi.C.eng_params_checksum_of(optimizer.params, trainer.reducer.marks, 0))
end)
io.stderr:write(("rank %d: common %s, held %d\n"):format(ranks.rank(), common or "alone",
  net:count()))
