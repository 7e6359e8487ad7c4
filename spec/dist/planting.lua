-- A rank of spec/dist/plantings.lua, which starts it: performs all runs planned for this number of
-- ranks. With alone=1, one process performs all runs, each with the batches of all ranks of the
-- run. A run trains a fresh model for a few steps and puts one inf or NaN into the gradient of one
-- parameter, on one rank, in one micro-batch of one step. A run depends only on the seed and its
-- number.
--
-- Every rank writes OUT.RANK: a line of JSON per run with the steps as this rank saw them and its
-- state at the end. plantings.lua compares these files.
local engine = require "engine"
local fused_state = require "engine.train.fused_state"
local M_ffi = require "engine.base.ffi"
local json = require "engine.base.json"
local ranks = engine.ranks

local C = M_ffi.C
local cfg = engine.config { seed = 1, runs = 10, only = 0, ranks = "2,3,4", alone = 0, out = "",
  folder = "" }
local alone = cfg.alone == 1

-- ------------------------------------------------------------------ the plan of a run

local WIRES = { "own", "fp32", "bf16", "fp16", "fp8" }
local PRECISIONS = { "fp32", "fp16", "bf16", "fp32", "fp16", "fp8_delayed" }
local OPTIMIZERS = {}
for i, kind in ipairs(fused_state.kinds) do OPTIMIZERS[i] = kind.name end
local AGAIN = [[return { name = "again", init = function() return { scale = 64 } end,
  decide = function(s, r)
    if r.overflow then
      s.scale = s.scale / 2
      return { scale = s.scale, action = "retry" }
    end
    return s.scale
  end }]]

local sizes = {}
for n in cfg.ranks:gmatch("%d+") do sizes[#sizes + 1] = tonumber(n) end

-- Needs of policies that require adam or adamw, and needs that require a job without ZeRO.
local OF_ADAM = C.ENG_NEED_SPIKE_CLIP
local WHOLE = bit.bor(C.ENG_NEED_UPDATE_NORMS, C.ENG_NEED_UPDATE_CLIP, C.ENG_NEED_LOGIT_MULS,
  C.ENG_NEED_CAPS)

-- Policies with their needs and the option that sets their first scale. That scale is kept small,
-- so that nothing overflows unless planted.
local policies = {}
for _, name in ipairs(engine.policy.names()) do
  local policy, first = engine.policy.load(name), nil
  for _, option in ipairs(policy.option_names) do
    if option:find("^init") and option:find("scal") or option == "loss_scale"
      or option == "scale" then
      first = option
    end
  end
  policies[#policies + 1] = { name = name, first = first, needs = policy.needs }
end
policies[#policies + 1] = { name = "again", source = AGAIN, needs = 0 }

local function plan(number)
  math.randomseed(cfg.seed * 1000003 + number)
  for _ = 1, 8 do math.random() end
  local function any(list) return list[math.random(#list)] end
  local p = { number = number, ranks = any(sizes), kind = any { "inf", "inf", "-inf", "nan",
    "nan" }, wire = any(WIRES), precision = any(PRECISIONS),
    optimizer = any(OPTIMIZERS), zero = math.random(0, 3), accumulate = any { 1, 1, 2, 3 },
    steps = math.random(3, 7), bucket = 2 ^ math.random(-9, -2),
    width = any { 16, 32, 48 }, layers = math.random(1, 2), clip = any { 0, 1 },
    dropout = any { 0, 0, 0.1 }, scale = 2 ^ math.random(0, 9), tied = any { true, false },
    tensor_at = math.random(), element_at = math.random(), stats_every = any { 1, 100 } }
  p.rank, p.step, p.micro = math.random(0, p.ranks - 1), math.random(0, p.steps - 1),
    math.random(1, p.accumulate)
  local policy = any(policies)
  p.policy = policy.name
  if bit.band(policy.needs, OF_ADAM) ~= 0 then p.optimizer = "adamw" end
  if bit.band(policy.needs, WHOLE) ~= 0 then p.zero = 0 end
  p.given = policy.source and { source = policy.source, file = "again" } or policy.name
  if policy.first then p.options = { [policy.first] = p.scale } end
  return p
end

-- ------------------------------------------------------------------ a run

local VALUE = { inf = math.huge, ["-inf"] = -math.huge, nan = 0 / 0 }

-- Returns loss, with `value` added to one element of the gradient of `target`.
local function planted(loss, target, element, value)
  return engine.custom {
    forward = function(_, l) return l * 1 end,
    backward = function(_, dl)
      local values = M_ffi.new("float[?]", target.count)
      values[element] = value
      return dl, engine.from_memory(values, "f32", target.shape)
    end } (loss, target)
end

local text = {}
for i = 1, 3000 do text[i] = string.char(32 + i * i % 89) end
text = table.concat(text)

local function run(p)
  engine.seed(cfg.seed + p.number)
  local model = engine.nn.gpt { vocab = 256, context = 8, width = p.width, heads = 2,
    layers = p.layers, dropout = p.dropout, tied = p.tied }
  local optimizer = engine.optim[p.optimizer](model, { lr = 1e-3, precision = p.precision })
  local target = optimizer.list[1 + math.floor(p.tensor_at * #optimizer.list)]
  local element = math.floor(p.element_at * target.tensor.count)
  local accumulate = alone and p.accumulate * p.ranks or p.accumulate
  local victim = alone and 0 or p.rank
  local at = alone and p.rank * p.accumulate + p.micro or p.micro
  local trainer
  local made, micro = -1, 0
  local rows = {}
  local path = not alone and cfg.folder .. "/" .. p.ranks .. "-" .. p.number or nil
  trainer = engine.trainer { model = model, optimizer = optimizer,
    data = engine.data.text { text = text, batch = 2, context = 8, seed = p.number },
    steps = p.steps, accumulate = accumulate, clip = p.clip,
    comm_dtype = p.wire, zero = p.zero, bucket = p.bucket, run = path, policy = p.given,
    policy_options = p.options, log = "quiet", rank_timeout = 60, agree_every = 1,
    stats_every = p.stats_every, on_policy_error = "stop", attach = false,
    on_step = function(t, record, verdict)
      rows[#rows + 1] = { step = tonumber(record.step), loss = ("%.17g"):format(record.loss),
        scale = ("%.17g"):format(record.scale), action = verdict:what(),
        overflow = record.overflow ~= 0, inf = tonumber(record.inf), nan = tonumber(record.nan),
        weights = t:whole(function()
          return tostring(C.eng_params_checksum_of(t.optimizer.params, nil, 0))
        end) }
    end }
  -- Counts the micro-batches of a step, and plants the value in the chosen one. The backward passes
  -- of train/reference.lua do not call trainer:forward.
  local forward = trainer.forward
  function trainer:forward(batch)
    if made ~= self.steps_done then made, micro = self.steps_done, 0 end
    micro = micro + 1
    local loss = forward(self, batch)
    if made ~= p.step or micro ~= at or self.reducer.rank ~= victim then return loss end
    return planted(loss, target.tensor, element, VALUE[p.kind])
  end
  local summary = trainer:run()
  local result = { number = p.number, plan = p, tensor = target.name, element = element,
    rows = rows, state = trainer.policy:save(), stopped = summary.stopped,
    failed = trainer.policy_errors, updates = trainer.updates }
  if path and ranks.rank() == 0 then
    local history = engine.history.open(path)
    result.events = history:query("SELECT step, kind, text, data FROM events WHERE kind = " ..
      "'overflow' ORDER BY rowid")
    history:close()
    os.execute("rm -rf '" .. path .. "'")
  end
  return result
end

local out = assert(io.open(("%s.%d"):format(cfg.out, alone and 0 or ranks.rank()), "w"))
for number = 1, cfg.runs do
  local p = plan(number)
  if (alone or p.ranks == ranks.size()) and (cfg.only == 0 or cfg.only == number) then
    out:write(json.encode(run(p)), "\n")
    out:flush()
    collectgarbage()
  end
end
out:close()
