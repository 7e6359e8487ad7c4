-- Implements engine.deepspeed.initialize: a training loop with DeepSpeed's interface, over
-- engine.session.
--   local model_engine = engine.deepspeed.initialize { model = model, config = "ds_config.json",
--     steps = 100 }
--   for step in model_engine:turns() do
--     local loss = engine.mse(model_engine(x), y)
--     model_engine:backward(loss)
--     print(model_engine:step().loss)
--   end
--   model_engine:close()
-- policy/deepspeed_config.lua makes the policy. Called by scripts.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local config_of = require "engine.policy.deepspeed_config"
local json = require "engine.base.json"
local nearest = require "engine.base.nearest"
local optim = require "engine.train.optim"
local session = require "engine.train.session"
local tensor = require "engine.tensor.tensor"
local show = require "engine.base.show"

local expect, raise, raise_if = M_ffi.expect, M_ffi.raise, M_ffi.raise_if
local set_of = arguments.set_of

local M = {}

local Engine = {}
Engine.__index = Engine

local OPTIMIZERS = { adam = "adamw", adamw = "adamw", fusedadam = "adamw", lamb = "lamb",
  fusedlamb = "lamb", lion = "lion", fusedlion = "lion", sgd = "sgd", muon = "muon" }
local PARAMS = set_of "lr betas eps weight_decay momentum nesterov dampening"
local SWITCHES = set_of "adam_w_mode torch_adam"             -- torch_adam has no effect

local function optimizer_of(block, model, precision)
  local kind = type(block) == "table" and block.type
  expect(type(kind) == "string", kind or nil, "deepspeed: expected the configuration's " ..
    "optimizer to have a type, such as \"AdamW\", or initialize to have the option optimizer")
  local name = OPTIMIZERS[block.type:lower()] or raise("deepspeed: there is no optimizer '%s'%s",
    block.type, nearest.choices(block.type:lower(), OPTIMIZERS, "optimizers"))
  local given, options = block.params or {}, { precision = precision }
  expect(type(given) == "table", given, "deepspeed: expected optimizer.params to be an object")
  for key, value in pairs(given) do
    if PARAMS[key] then options[key] = value
    elseif not SWITCHES[key] then
      raise("deepspeed: optimizer %s has no parameter '%s'%s", block.type, tostring(key),
        nearest.choices(key, PARAMS, "parameters"))
    end
  end
  if name == "adamw" and given.adam_w_mode == false then name = "adam" end
  return optim[name](model, options)
end

-- Returns a value of the configuration; nil if it is null or "auto" (policy/deepspeed_config.lua).
local function given_in(config, key)
  local value = config[key]
  if value ~= json.null and value ~= "auto" then return value end
end

-- Returns whether the configuration's block `key` (fp16, bf16 or bfloat16) is enabled. The default
-- of `enabled` is false. Adds the key to `off` if the block leaves `enabled` out.
local function enabled(config, key, off)
  local block = config[key]
  if block == nil or block == json.null then return false end
  expect(type(block) == "table", block, "deepspeed: expected %s to be an object", key)
  local value = given_in(block, "enabled")
  if value == nil then
    off[#off + 1] = key
    return false
  end
  expect(value == "true" or value == "false" or type(value) == "boolean", value,
    "deepspeed: expected %s.enabled to be true or false", key)
  return value == true or value == "true"
end

-- Returns the number of micro-batches per update. As DeepSpeed does, computes it from the two batch
-- sizes if the configuration does not have it, and refuses sizes that contradict each other.
local function micro_batches(config)
  local function count(key)
    local value = given_in(config, key)
    expect(value == nil or type(value) == "number" and value >= 1 and value % 1 == 0, value,
      "deepspeed: expected %s to be a whole number of 1 or more", key)
    return value
  end
  local whole, micro = count "train_batch_size", count "train_micro_batch_size_per_gpu"
  local every = count "gradient_accumulation_steps"
    or whole and micro and math.floor(whole / micro) or 1
  micro = micro or whole and math.floor(whole / every)
  raise_if(whole and whole ~= micro * every, "deepspeed: expected train_batch_size to be " ..
    "train_micro_batch_size_per_gpu * gradient_accumulation_steps on one rank, got %s, %s and %s",
    whole, micro, every)
  return every
end

-- The keys of a configuration that unused() leaves out. `scheduler` is refused elsewhere. The batch
-- sizes only determine the number of micro-batches; the loop chooses the batches.
local USED = set_of [[optimizer scheduler fp16 bf16 bfloat16 gradient_clipping
  gradient_accumulation_steps train_batch_size train_micro_batch_size_per_gpu]]

-- Returns the keys of a configuration that are not in USED, sorted, as text. by_stage: whether the
-- key zero_optimization.stage chose the policy.
local function unused(config, by_stage)
  local keys = {}
  for _, key in ipairs(nearest.keys(config)) do
    if key == "zero_optimization" and by_stage and type(config[key]) == "table" then
      for _, inner in ipairs(nearest.keys(config[key])) do
        if inner ~= "stage" then keys[#keys + 1] = key .. "." .. inner end
      end
    elseif not USED[key] then keys[#keys + 1] = key end
  end
  return table.concat(keys, ", ")
end

local PASSED = "run resume restart_data checkpoint_every log data state"   -- options of the session

--- engine.deepspeed.initialize { model =, config = }. config is the path of DeepSpeed's JSON file,
--- in which comments and trailing commas are allowed, or a table with its contents. Of it, the
--- optimizer, gradient_clipping, gradient_accumulation_steps (or the batch sizes that determine it)
--- and the blocks named below have an effect. More options:
--- optimizer and policy (instead of the configuration's optimizer and fp16 block), steps (the run
--- ends after so many steps, skipped ones included), and, as in engine.session, run, resume,
--- restart_data, checkpoint_every, log, data and state. Returns an engine and its optimizer.
--- engine(...) calls the model in the configured precision. engine:backward(loss) runs the backward
--- pass. engine:step() returns what session:step returns, with action "accumulate" between updates.
--- A loop `for step in engine:turns() do` ends when the run does. engine:close() ends the run. The
--- engine runs on one rank only. A `scheduler` is refused, because the loop assigns optimizer.lr.
--- The blocks fp16 and bf16 need `"enabled": true`, which only one of them may have. In fp16,
--- zero_optimization.stage chooses the policy: deepspeed_fused for stage 0, the default, and
--- deepspeed for other stages. A line of output names the keys of the configuration that have no
--- effect.
function M.initialize(given)
  local o = tensor.read_named(given, "deepspeed.initialize",
    "model config optimizer policy steps " .. PASSED)
  expect(type(o.model) == "table" and o.model.parameters, o.model,
    "deepspeed.initialize: expected model to be a module")
  local config = o.config
  if type(config) == "string" then
    local good, result = pcall(config_of.decode, config)
    if not good then raise("deepspeed: %s", result) end
    config = result
  end
  expect(type(config) == "table", config,
    "deepspeed.initialize: expected config to be the path of a JSON file or a table")
  raise_if(type(config.scheduler) == "table",
    "deepspeed: a scheduler is not supported; hint: assign optimizer.lr before step()")
  local off = {}
  local bf16, bfloat16, fp16 = enabled(config, "bf16", off), enabled(config, "bfloat16", off),
    enabled(config, "fp16", off)
  raise_if(fp16 and (bf16 or bfloat16), "deepspeed: expected fp16 or bf16 to be enabled, got " ..
    "both; hint: \"enabled\": false in one of the two blocks")
  local precision = (bf16 or bfloat16) and "bf16" or fp16 and "fp16" or "fp32"
  local every = micro_batches(config)
  local opt = o.optimizer or optimizer_of(config.optimizer, o.model, precision)
  local options = { optimizer = opt, precision = precision,
    clip = given_in(config, "gradient_clipping") }
  for key in PASSED:gmatch("%S+") do options[key] = o[key] end
  if o.policy then options.policy = o.policy
  elseif precision == "fp16" then
    if type(o.config) == "string" then
      options.policy, options.policy_options = config_of.read(o.config, {}, 0)
    else
      options.policy, options.policy_options = config_of.from_table(config, {},
        function() return "deepspeed: " end, nil, 0)
    end
  end
  if every > 1 then opt:accumulates(true) end
  local self = setmetatable({ model = o.model, optimizer = opt, every = every, micro = 0,
    session = session.new(options) }, Engine)
  self.next_turn = self.session:turns(o.steps or 2 ^ 53)
  self.next_turn()
  for _, key in ipairs(off) do
    self.session:note(('deepspeed: the block %s is off; hint: "enabled": true (by default false)')
      :format(key))
  end
  local ignored = unused(config, precision == "fp16" and not o.policy)
  if ignored ~= "" then
    self.session:note("deepspeed: these keys of the configuration have no effect: " .. ignored)
  end
  return self, opt
end

--- for step in engine:turns() do ... end: each pass of the loop is one micro-batch, and `step` is
--- the number of its step, counted from 1. A resumed run goes on after the steps of its checkpoint.
--- The loop ends after the option `steps`, or early as that of session:turns, for instance on
--- Ctrl-C. After `break`, call engine:close().
function Engine:turns(n)
  raise_if(n ~= nil, "deepspeed: expected turns() without a number, got %s; hint: the option " ..
    "steps of initialize", M_ffi.value_text(n))
  return function() return self.session.current and self.session.turn or nil end
end

-- Returns the session. Raises an error if the run has ended.
local function running(self)
  if self.session.current then return self.session end
  local summary = self.session:close()
  local stopped = summary.stopped
  raise("deepspeed: the run has ended%s; hint: `for step in model_engine:turns() do` ends with " ..
    "it%s", stopped and ": " .. stopped or " after " .. show.counted(summary.steps, "step"),
    stopped and "" or ", or raise the option steps")
end

--- Returns the model's results for these inputs, in the configured precision.
function Engine:__call(...)
  return running(self):autocast(self.model, ...)
end

--- Runs the backward pass of loss / gradient_accumulation_steps, seeded with the loss scale.
function Engine:backward(loss)
  running(self):backward(self.every > 1 and tensor.is_tensor(loss) and loss / self.every or loss)
end

--- Ends a micro-batch. After the last micro-batch of a step, makes or skips the update, frees the
--- step's tensors and returns what session:step returns. After any other micro-batch, returns
--- { skipped = false, action = "accumulate" }.
function Engine:step()
  running(self)
  self.micro = self.micro + 1
  if self.micro < self.every then return { skipped = false, action = "accumulate" } end
  self.micro = 0
  local result = self.session:step(self.optimizer)
  self.next_turn()                                         -- closes this turn, opens the next
  return result
end

--- Returns the loss scale.
function Engine:get_scale() return self.session:get_scale() end

--- Ends the run and returns its summary.
function Engine:close() return self.session:close() end

function Engine:__tostring()
  local s = self.session
  return ("deepspeed: %s, %d parameters, precision %s, policy %s, step %d%s, %s, "
    .. "%d skipped"):format(s.optimizer.name, s.model:count(), s.precision.name, s.policy.name,
    s.steps_done, s.most < 2 ^ 53 and " of " .. s.most or "", show.counted(s.updates, "update"),
    s.skipped)
end

return M
