-- The trainer: one training step, in order, and the loop around it. Start reading at Trainer:step.
--
--   local trainer = engine.trainer {
--     model = model, data = data, optimizer = opt, schedule = engine.schedule.cosine { ... },
--     precision = "fp16", policy = "dynamic", steps = 1000, clip = 1.0, run = "gpt",
--   }
--   trainer:run()
--
-- What a run writes stands in run.lua (history, checkpoints, resuming); what it shows in progress.lua.
local M_ffi = require "engine.base.ffi"
local groups = require "engine.policy.groups"
local lagged = require "engine.train.lagged"
local machine = require "engine.base.machine"
local nearest = require "engine.base.nearest"
local policies = require "engine.policy.policy"
local precision = require "engine.train.precision"
local run_files = require "engine.run.run"
local tensor = require "engine.tensor.tensor"

local C, check = M_ffi.C, M_ffi.check

local M = {}

local Trainer = {}
Trainer.__index = Trainer

-- ================================================================== TRAINING STEP

--- One step. Returns the record and the verdict, which hold until the next one.
function Trainer:step()
  local record, opt, data, policy = self.record, self.optimizer, self.data, self.policy
  local scale = policy:scale()
  local lr = self.fixed_lr or self.schedule and self.schedule(self.updates) or opt.lr
  check(C.eng_step_begin())
  opt:zero_grad()
  self.groups:apply(policy)                                                      -- layers that the policy scales apart
  if opt.fp8 then opt.fp8:begin(self.steps_done) end

  local losses, tokens = {}, 0
  self.place = self:remember_place()                                             -- for a retry, or when this step fails
  local reference, parallel = self.reference, self.parallel
  parallel:share_begins()                                                        -- of several ranks each has its batches
  local drawn = reference and reference:batches()                                -- now and then: the same in f32, for record.norm_ref
  for i = 1, self.accumulate do
    local batch = drawn and drawn[i] or data:next()                              -- (0) a batch
    parallel:draw(i)
    self:remember_batch(i, batch)
    local loss = self:forward(batch)                                             -- (1) forward, recorded on the tape
    parallel:backward_begins(i)                                                  -- its gradients are reduced as they come
    loss:backward { scale = scale / self.accumulate }                            -- (2) backward: the scale seeds the gradient
    losses[i] = loss                                                             -- (3) gradients stand in the flat buffer
    tokens = tokens + (batch.tokens or batch.y and batch.y.count or 0)
  end
  parallel:backward_done()
  parallel:share_ends()

  record.step, record.updates, record.scale = self.steps_done, self.updates, scale
  record.lr, record.norm_ref = lr, 0 / 0
  local stats = self.stats
  if parallel.many then                                                          -- (4) one read-only pass over the gradients
    self:note_loss(record, losses)
    tokens = parallel:record(record, stats, scale, tokens)                       -- the same on all ranks
  else
    self:look(record, stats, scale, losses)
  end
  if reference then reference:tell(record, stats) end
  for name, value in pairs(parallel.signals) do policy:signal(name, value) end
  local verdict = self.swaps:decide(record, stats)                               -- (5) the policy decides
  parallel:decide(verdict)
  if self.shadows then self.shadows:observe(record, stats, verdict, parallel.signals, self.run_files.history) end
  if opt.fp8 then self:observe_fp8(record, verdict) end                          -- scales of FP8 layers, and what was seen of them
  if verdict.action == C.ENG_ACTION_STEP then
    local factor = 1 / scale
    local clip = verdict.clip > 0 and verdict.clip or self.clip
    if clip and record.norm > clip then factor = factor * clip / (record.norm + 1e-6) end
    opt.lr = lr
    opt:step { gradient_factor = factor, clip_value = self.clip_value, lr_mul = verdict.lr_mul }  -- (6) unscale, clip, update: one pass
    parallel:updated()
    self.updates = self.updates + 1
  else
    self.skipped = self.skipped + 1
    if record.overflow ~= 0 then self.overflows:look(record, verdict) end
    if verdict.action == C.ENG_ACTION_RETRY then
      self.retries = self.retries + 1
      self:go_back(self.place)
    end
  end
  self.steps_done, self.place = self.steps_done + 1, nil
  self.tokens = self.tokens + tokens
  self.run_files:append(record, verdict, stats, tokens, parallel.signals)        -- (7) history; the step's memory is free again
  check(C.eng_step_end())
  return record, verdict
end

-- ==================================================================

--- The loss of a batch, in the run's precision.
function Trainer:forward(batch)
  if type(batch) ~= "table" then M_ffi.raise("trainer: expected a batch as a table { x =, y =, ... }, the data's next() gave %s", M_ffi.value_text(batch)) end
  local loss = precision.autocast(self.precision, self.loss, self.model, batch)
  if not tensor.is_tensor(loss) then M_ffi.raise("trainer: expected the loss as a tensor of one element, got %s", M_ffi.value_text(loss)) end
  return loss
end

--- What FP8 layers saw goes to their policies and, in a step that was looked at, into the history.
function Trainer:observe_fp8(record, verdict)
  local sites = self.optimizer.fp8
  sites.world = self.parallel.many and require("engine.dist.ranks").world() or nil
  sites:observe(record, record.scale / self.accumulate, verdict.scale / self.accumulate)
  if sites.looking then self.run_files:fp8(tonumber(record.step), sites:meters()) end
end

--- The loss, the mean of the micro-batches', and the time: what waits for the device.
function Trainer:note_loss(record, losses)
  local sum = 0
  for i = 1, self.accumulate do sum = sum + losses[i]:item() end
  record.loss, record.elapsed = sum / self.accumulate, machine.clock() - self.began
end

--- Loss and statistics of a step that no other rank has a part in. From a card they come together: one wait a step.
function Trainer:look(record, stats, scale, losses)
  local params, n = self.optimizer.params, self.accumulate
  local together = machine.device() == "cuda" and n <= lagged.MOST_LOSSES
  for i = 1, n do together = together and losses[i].dtype == "f32" end
  if not together then
    self:note_loss(record, losses)
    check(C.eng_params_stats(record, stats, params, scale, self.needs))
    return
  end
  C.eng_params_stats_forget(params)   -- what a lagged run that was broken off had asked for
  local list, sum = M_ffi.new("eng_tensor[?]", n), M_ffi.new("double[1]")
  for i = 1, n do list[i - 1] = losses[i] end
  check(C.eng_params_stats_start(params, self.needs, list, n))
  check(C.eng_params_stats_fetch(record, stats, sum, params, scale))
  record.loss, record.elapsed = sum[0] / n, machine.clock() - self.began
end

--- Where the data and the random numbers stand, so that a retry sees the same batch.
function Trainer:remember_place()
  local seed, counter = M_ffi.new("uint64_t[1]"), M_ffi.new("uint64_t[1]")
  C.eng_rng_get(seed, counter)
  return { data = self.data.state and self.data:state(), seed = seed[0], counter = counter[0] }
end

--- What micro-batch i was, and which random numbers come next: for a pass that is run again (overflow.lua).
function Trainer:remember_batch(i, batch)
  self.batches[i] = batch
  C.eng_rng_get(self.random + 2 * i - 2, self.random + 2 * i - 1)
end

--- A run goes on that `ranks` made, each with `accumulate` micro-batches a step. Keeps the step what it was where that can be, unless the
--- script asks for another; gives a line about it.
function Trainer:share_as_before(ranks, accumulate)
  local before, size = ranks * accumulate, self.parallel.size
  local same = "with the same step but for rounding"                           -- sums over more or fewer ranks round elsewhere
  if before == size * self.accumulate then return ranks ~= size and ("%d ranks go on where %d were, %s"):format(size, ranks, same) or nil end
  if accumulate == self.accumulate and before % size == 0 then
    self.accumulate = before / size
    self.random = M_ffi.new("uint64_t[?]", 2 * self.accumulate)
    return ("%d rank%s with accumulate=%d %s where %d with accumulate=%d %s, %s"):format(size, size == 1 and "" or "s", self.accumulate,
      size == 1 and "goes on" or "go on", ranks, accumulate, ranks == 1 and "was" or "were", same)
  end
  return ("a step has %d batches now, it had %d: the losses will differ"):format(size * self.accumulate, before)
end

--- What computes: "2 threads", or "4 ranks, ZeRO-1, 1 thread each".
function Trainer:resources()
  local threads, ranks = tonumber(C.eng_threads(0)), self.parallel:described()
  return ("%s%d thread%s%s"):format(ranks and ranks .. ", " or "", threads, threads == 1 and "" or "s", ranks and " each" or "")
end

function Trainer:go_back(place)
  if place.data then self.data:restore(place.data) end
  C.eng_rng_set(place.seed, place.counter)
end

-- ------------------------------------------------------------------ settings

local KNOWN = {
  model = true, data = true, loss = true, optimizer = true, schedule = true, precision = true, policy = true, policy_options = true,
  steps = true, clip = true, clip_value = true, accumulate = true, run = true, resume = true, checkpoint_every = true, keep = true,
  log = true, on_step = true, on_policy_error = true, stats_every = true, history = true, config = true, evaluate = true, mode = true, graph = true,
  ref_every = true, ref_layers = true,
  shadow = true, trap = true, watch = true, attach = true, tensorboard = true,
  wire = true, bucket = true, zero = true, rank_timeout = true,
}

local function want(condition, key, expected, got)
  if not condition then error(("trainer: expected %s as %s, got %s"):format(key, expected, M_ffi.value_text(got)), 0) end
end

local function callable(v)
  local meta = type(v) == "table" and getmetatable(v)
  return type(v) == "function" or (meta and meta.__call ~= nil)
end

local function whole(v) return type(v) == "number" and v % 1 == 0 and v >= 1 end

local function check_options(o)
  for key in pairs(o) do
    if not KNOWN[key] then
      local names = {}
      for name in pairs(KNOWN) do names[#names + 1] = name end
      error(("trainer: unknown option '%s'%s"):format(tostring(key), nearest.hint(tostring(key), names)), 0)
    end
  end
  want(type(o.model) == "table" and o.model.parameters, "model", "a module", o.model)
  want(type(o.data) == "table" and o.data.next, "data", "a loader with next()", o.data)
  want(type(o.optimizer) == "table" and o.optimizer.params, "optimizer", "one of engine.optim", o.optimizer)
  want(whole(o.steps), "steps", "a whole number of 1 or more", o.steps)
  want(o.accumulate == nil or whole(o.accumulate), "accumulate", "a whole number of 1 or more", o.accumulate)
  want(o.clip == nil or o.clip == 0 or (type(o.clip) == "number" and o.clip > 0), "clip", "a number (0: none)", o.clip)
  want(o.clip_value == nil or (type(o.clip_value) == "number" and o.clip_value >= 0), "clip_value", "a number (0: none)", o.clip_value)
  want(o.checkpoint_every == nil or o.checkpoint_every == 0 or whole(o.checkpoint_every), "checkpoint_every", "a whole number of steps (0: at the end)",
    o.checkpoint_every)
  want(o.keep == nil or whole(o.keep), "keep", "a whole number of 1 or more", o.keep)
  want(o.stats_every == nil or whole(o.stats_every), "stats_every", "a whole number of 1 or more", o.stats_every)
  want(o.ref_every == nil or whole(o.ref_every), "ref_every", "a whole number of 1 or more", o.ref_every)
  want(o.ref_layers == nil or type(o.ref_layers) == "string", "ref_layers", "a pattern of parameter names", o.ref_layers)
  want(o.on_step == nil or type(o.on_step) == "function", "on_step", "a function", o.on_step)
  want(o.evaluate == nil or (type(o.evaluate) == "table" and type(o.evaluate.data) == "table" and whole(o.evaluate.every)), "evaluate",
    "{ data = a loader, every = steps }", o.evaluate)
  want(o.log == nil or o.log == "line" or o.log == "json" or o.log == "quiet", "log", "line, json or quiet", o.log)
  want(o.graph == nil or type(o.graph) == "boolean", "graph", "true or false", o.graph)
  want(o.mode == nil or o.mode == "sync" or o.mode == "lagged", "mode", "sync or lagged", o.mode)
  want(o.on_policy_error == nil or o.on_policy_error == "hold" or o.on_policy_error == "stop", "on_policy_error", "hold or stop", o.on_policy_error)
  want(o.schedule == nil or callable(o.schedule), "schedule", "one of engine.schedule or a function(updates)", o.schedule)
  want(o.trap == nil or o.trap == false or o.trap == "" or o.trap == "overflow", "trap", "overflow, or nothing", o.trap)
  want(o.shadow == nil or type(o.shadow) == "string" or type(o.shadow) == "table", "shadow", "a list of policies", o.shadow)
  want(o.tensorboard == nil or type(o.tensorboard) == "boolean" or type(o.tensorboard) == "string", "tensorboard", "true, false or a directory", o.tensorboard)
  want(o.policy_options == nil or type(o.policy_options) == "table", "policy_options", "a table", o.policy_options)
  want(o.run == nil or type(o.run) == "string", "run", "a name or a path", o.run)
  want(o.loss == nil or callable(o.loss), "loss", "a function(model, batch)", o.loss)
  want(o.loss ~= nil or o.model.loss, "loss", "a function(model, batch), for this model has no loss of its own", o.loss)
  local key, expected = require("engine.dist.parallel").wrong(o)
  if key then want(false, key, expected, o[key]) end
  want(o.resume == nil or type(o.resume) == "string" or type(o.resume) == "boolean", "resume", "'auto', a path, or false", o.resume)
end

--- Tells a policy which tensors and groups there are.
function Trainer:prepare(policy) policy:tensors(self.groups.names, self.groups.group_of, self.groups.groups, true) end

--- Puts a policy in force (swap.lua changes it while the run goes on).
function Trainer:use_policy(policy)
  self:prepare(policy)
  self.policy = policy
  self.needs = bit.bor(policy.needs, self.shadows and self.shadows.needs or 0, C.ENG_NEED_AMAX, C.ENG_NEED_NORM, C.ENG_NEED_ZEROS, C.ENG_NEED_UNDERFLOW)
  -- engine replay asks of a recorded step what another scale would have done: that takes its histogram
  if self.run_files and self.run_files:wants_hist() then self.needs = bit.bor(self.needs, C.ENG_NEED_HIST) end
  local wanted = bit.band(self.needs, C.ENG_NEED_NORM_REF) ~= 0
  if wanted and not self.reference then
    local own = policy.options
    self.reference = require("engine.train.reference").new(self, self.ref_every or own.ref_every or 100, self.ref_layers or own.ref_layers or "")
  elseif not wanted then
    self.reference = nil
  end
end

--- A line for whoever watches the run.
function Trainer:note(text)
  if self.progress then self.progress:note(text) else table.insert(self.run_files.notes, text) end
end

local function default_loss(model, batch)
  return model:loss(batch.x, batch.y)
end

local function new(o)
  check_options(o)
  local full = precision.resolve(o.precision or o.optimizer.precision)
  local self = setmetatable({
    model = o.model, data = o.data, loss = o.loss or default_loss, optimizer = o.optimizer, schedule = o.schedule, precision = full,
    steps = o.steps, accumulate = o.accumulate or 1, clip = o.clip and o.clip > 0 and o.clip or nil, clip_value = o.clip_value,
    on_step = o.on_step, on_policy_error = o.on_policy_error or "hold", evaluate = o.evaluate, log = o.log or "line",
    steps_done = 0, updates = 0, skipped = 0, retries = 0, tokens = 0, policy_errors = 0, rows = {},
    record = M_ffi.new("eng_record"), stats = M_ffi.new("eng_tensor_stats[?]", #o.optimizer.list),
    began = machine.clock(), batches = {}, random = M_ffi.new("uint64_t[?]", 2 * (o.accumulate or 1)),
  }, Trainer)
  if not precision.same(self.optimizer.precision, full) then self.optimizer:set_precision(full) end
  -- without a scale to keep, the policy is static with a scale of 1: nothing talks of scaling then
  local policy = o.policy or (full.scaled and "dynamic" or "static")
  local loaded, message = pcall(require("engine.policy.policy").load, policy, o.policy_options)
  if not loaded then error(message, 0) end
  self.policy = message
  self.groups = groups.new(self.model, self.optimizer.list, { { params = self.optimizer.params, n = #self.optimizer.list } })
  self.ref_every, self.ref_layers = o.ref_every, o.ref_layers
  local shadows
  loaded, shadows = pcall(require("engine.run.shadow").new, self, o.shadow)
  if not loaded then error(shadows, 0) end
  self.shadows = shadows
  self.parallel = require("engine.dist.parallel").new(self, o)
  self:use_policy(self.policy)
  self.swaps, self.overflows = require("engine.run.swap").new(self, o), require("engine.train.overflow").new(self, o.trap == "overflow")
  self.control = require("engine.run.control").new(self, o)
  if o.mode == "lagged" then
    local refusal = lagged.refusal(o, self.policy, #self.groups.groups)
    if refusal then error(refusal, 0) end
    self.step, self.asked, self.graph = lagged.step, {}, o.graph
  elseif o.graph then
    error("trainer: graph=true captures a step that nothing waits for; hint: mode='lagged' with it", 0)
  end
  self.run_files = run_files.open(self, o)
  -- engine replay asks of a recorded step what another scale would have done: that takes its histogram
  if self.run_files:wants_hist() then self.needs = bit.bor(self.needs, C.ENG_NEED_HIST) end
  return self
end

--- engine.trainer{ ... }. Options:
---   model, data, optimizer       what to train, on what, how (required)
---   steps                        attempts to make (required)
---   loss                         function(model, batch) -> loss; model:loss(batch.x, batch.y) by default
---   schedule                     function(updates) -> learning rate
---   precision                    recipe name or table; the optimizer's by default
---   policy, policy_options       name, file or loaded policy; "dynamic" for fp16, "static" otherwise
---   clip, clip_value             limit on the gradients' norm, on each element
---   accumulate                   micro-batches a step
---   run                          name or directory of the run; nil: nothing is written
---   resume                       "auto": go on from the newest checkpoint, if any; or the path of a run or checkpoint
---   checkpoint_every, keep       steps between checkpoints (0: only at the end), how many to keep (3)
---   log                          "line", "json" or "quiet"
---   on_step                      function(trainer, record, verdict)
---   on_policy_error              "hold": go on with the last good verdict; "stop": end the run
---   stats_every                  steps between rows of per-tensor statistics (100; also at every overflow)
---   ref_every, ref_layers        for policies that need norm_ref: steps between reference backwards (the policy's option, or 100), and a
---                                pattern of the parameters they are for (all)
---   evaluate                     { data =, every =, batches = }: loss on other data
---   mode                         "sync": the policy decides before the update, which takes a wait for the device; "lagged": nothing
---                                waits, the policy decides one step later (lagged.lua)
---   graph                        true, with mode = "lagged" on a card: forward and backward are captured once and launched as one piece
---   config                       the script's settings, to be remembered
---   shadow                       policies that see every record and decide nothing: a list, or "a,b" (shadow.lua)
---   watch                        false: the policy's file is not looked at while the run goes on (swap.lua)
---   trap                         "overflow": every overflow is run again to name the operation it began in (overflow.lua)
---   tensorboard                  true: event files for TensorBoard in the run's directory; or a directory for them
---   attach                       false: `engine attach` cannot reach this run (control.lua)
--- And where several ranks train together (ranks.lua, parallel.lua):
---   wire                         format gradients travel in: "own" (each one's), "fp32", "bf16", "fp16" or "fp8"; sums are f32
---   bucket                       MiB of gradients that travel together (2)
---   zero                         1: each rank updates its part of the weights and keeps the moments of these alone (ZeRO-1); 2: and of the
---                                gradients, which are sent at every micro-batch (ZeRO-2): no x.grad
---   rank_timeout                 seconds a rank waits for another before it ends the job (300)
function M.new(options)
  if type(options) ~= "table" then error("trainer: expected a table of options, got " .. type(options), 2) end
  local good, result = pcall(new, options)
  if not good then
    if type(result) ~= "string" or result:find("^[^\n:]+:%d+: ") then error(result, 0) end
    M_ffi.raise(result)
  end
  return result
end

-- ------------------------------------------------------------------ signals

M.signals = require "engine.policy.signals"

local rules = require "engine.policy.signals_rules"

--- Publishes a number that policies read as record.signals[name], for example an attention entropy. `rule`: what becomes of the numbers
--- of several ranks, "mean" (as a rule), "max" or "sum"; ranks that published none do not count.
function M.signal(name, value, rule)
  if type(name) ~= "string" or type(value) ~= "number" then
    error(("signal: expected a name and a number, got %s and %s"):format(type(name), type(value)), 2)
  end
  if rule ~= nil and rule ~= "mean" and rule ~= "max" and rule ~= "sum" then
    error(("signal '%s': expected 'mean', 'max' or 'sum', got %s"):format(name, M_ffi.value_text(rule)), 2)
  end
  M.signals[name], rules[name] = value, rule or rules[name]
end

-- ------------------------------------------------------------------ the loop

--- Mean loss over `batches` of other data, unrecorded, dropout off.
function Trainer:evaluate_on(data, batches)
  local sum = 0
  self.model:evaluating(function()
    for _ = 1, batches do
      sum = sum + require("engine").scope(function()
        return self:forward(data:next()):item()
      end)
    end
  end)
  return sum / batches
end

local MAX_ROWS = 2000   -- kept for the plot at the end; thinned out in longer runs

function Trainer:remember_row(record)
  local every = self.row_every or 1
  if record.overflow ~= 0 then self.rows.overflows = (self.rows.overflows or 0) + 1 end
  if self.steps_done % every ~= 0 and record.overflow == 0 then return end
  self.rows[#self.rows + 1] = { step = tonumber(record.step), loss = record.loss, scale = record.scale, overflow = record.overflow ~= 0 }
  if #self.rows > MAX_ROWS then
    local thin = { overflows = self.rows.overflows }
    for i = 1, #self.rows, 2 do thin[#thin + 1] = self.rows[i] end
    self.rows, self.row_every = thin, every * 2
  end
end

local LOST_STEPS = 10   -- in a row whose loss is inf or nan, until it is told

--- A line when the loss itself has been inf or nan for a while: no scale mends that.
function Trainer:loss_note(record)
  self.lost = record.loss - record.loss ~= 0 and (self.lost or 0) + 1 or 0
  if self.lost == LOST_STEPS then
    return ("step %d: the loss has been %g for %d steps, and no loss scale mends that: weights or data hold inf or nan; hint: a smaller learning rate, clip=1")
      :format(tonumber(record.step), record.loss, LOST_STEPS)
  end
end

--- The message for a step the policy could not decide or did not like.
local function verdict_note(self, record, verdict)
  local reason = M_ffi.string(verdict.reason)
  if verdict.failed ~= 0 then
    self.policy_errors = self.policy_errors + 1
    if self.policy_errors <= 5 then return ("step %d: the policy failed, the last good verdict holds: %s"):format(tonumber(record.step), reason) end
  elseif verdict.action == C.ENG_ACTION_STOP then
    return ("step %d: policy %s stops the run%s"):format(tonumber(record.step), self.policy.name, reason ~= "" and ": " .. reason or ", and gives no reason")
  end
end

--- Trains until `steps` attempts are made, the policy stops the run, or the user interrupts. Returns a summary:
--- { steps, made (by this call), updates, skipped, loss, scale, tokens_per_s, stopped = reason or nil, path }.
function Trainer:run()
  local progress = require("engine.run.progress").new { total = self.steps, json = self.log == "json", quiet = self.log == "quiet" or self.parallel.rank > 0,
    unscaled = not self.precision.scaled and self.policy.name == "static" and self.policy:scale() == 1 }
  self.progress = progress
  local problem = policies.unusable(self.policy, #self.groups.groups)             -- from the start, or from a checkpoint
  if problem then M_ffi.raise("trainer: %s", problem) end
  self.run_files:reopen()
  self.control:open()
  local before = C.eng_interrupt_policy(1)
  for _, line in ipairs(self.run_files.notes) do progress:note(line) end
  self.run_files.notes = {}
  if self.parallel:text() then progress:note(self.parallel:text()) end
  self.model:train()
  check(C.eng_step_end())   -- what was computed before the run, or in a loop left by break, is over
  local loss, scale, speed, stopped = 0 / 0, self.policy:scale(), 0 / 0, nil
  local first = self.steps_done
  self.first_step = first

  local function loop()
    while self.steps_done < self.steps and not stopped do
      local from = machine.clock()
      local tokens_before = self.tokens
      local record, verdict = self:step()
      local ends = self.steps_done >= self.steps or self.run_files:due() or self.parallel:interrupted()
      if self.asked and ends then record, verdict = lagged.drain(self, record, verdict) end
      if not record then goto next end                                           -- lagged: the first record is still on its way
      local now = machine.clock()
      local rate = (self.tokens - tokens_before) / math.max(now - from, 1e-9)
      speed = speed ~= speed and rate or 0.9 * speed + 0.1 * rate
      loss, scale = record.loss, verdict.scale
      self:remember_row(record)
      progress:update { step = self.steps_done, updates = self.updates, loss = record.loss, lr = record.lr, scale = record.scale,
        skipped = self.skipped, overflow = record.overflow ~= 0, amax = record.amax, norm = record.norm,
        tokens_per_s = self.log == "json" and rate or speed, shadows = self.shadows }
      local note = verdict_note(self, record, verdict)
      if note then progress:note(note) end
      note = self:loss_note(record)
      if note then progress:note(note) end
      if verdict.action == C.ENG_ACTION_STOP then stopped = verdict.reason[0] ~= 0 and M_ffi.string(verdict.reason) or "the policy asked for it"
      elseif verdict.failed ~= 0 and self.on_policy_error == "stop" then stopped = "the policy failed: " .. M_ffi.string(verdict.reason) end
      if self.on_step then self.on_step(self, record, verdict) end
      local e = self.evaluate
      if e and self.steps_done % e.every == 0 then
        local value = self:evaluate_on(e.data, e.batches or 10)
        progress:note(("step %d: evaluation loss %.4f"):format(self.steps_done, value))
        self.run_files:event(self.steps_done, "evaluation", ("loss %.6g"):format(value))
      end
      stopped = self.control:between() or stopped                                -- swaps, and whoever is attached
      if self.parallel:interrupted() then stopped = "interrupted" end
      local message = self.run_files:after_step(self.steps_done >= self.steps or stopped ~= nil)
      if message then progress:note(message) end
      ::next::
    end
    self.parallel:agree()
  end

  local good, message = xpcall(loop, function(m)
    return type(m) == "string" and debug.traceback(m, 2) or m
  end)
  progress:finish()
  self.control:close()
  C.eng_interrupt_policy(before)
  if C.eng_interrupted() == 1 then C.eng_interrupt(0) end
  if not good then
    self:rescue(message)
    error(message, 0)
  end
  self.run_files:event(self.steps_done, stopped and "stopped" or "finished", stopped)
  self.run_files:close()
  local summary = { steps = self.steps_done, updates = self.updates, skipped = self.skipped, retries = self.retries, loss = loss, scale = scale,
    tokens_per_s = speed, stopped = stopped, path = self.run_files.path, rows = self.rows, made = self.steps_done - first,
    references = self.reference and self.reference.count, reference_s = self.reference and self.reference.seconds }
  progress:note(self:summary_text(summary))
  return summary
end

--- After an error: the unfinished step is taken back and the steps before it go into a checkpoint.
function Trainer:rescue(problem)
  C.eng_step_end()
  if self.asked then pcall(lagged.drain, self) end
  if self.place then pcall(self.go_back, self, self.place) end
  self.place = nil
  self.run_files:event(self.steps_done, "error", tostring(problem):match("^[^\n]*"))
  local note = self.steps_done > 0 and not self.parallel.zero and not self.parallel.apart and self.run_files:after_step(true, true)   -- else it takes all ranks
  if note then self.progress:note(note)
  elseif self.run_files.saved_at == self.steps_done then
    self.progress:note(("%s holds a checkpoint of the %d steps before the error"):format(self.run_files.path, self.steps_done))
  end
  self.run_files:close()
end

local function counted(n, what) return ("%d %s%s"):format(n, what, n == 1 and "" or "s") end

function Trainer:summary_text(s)
  local parts = { ("%s after %s: %s, %d skipped"):format(s.stopped and "stopped" or "done", counted(s.steps, "step"), counted(s.updates, "update"), s.skipped) }
  if s.made > 0 then parts[#parts + 1] = ("loss %.4f"):format(s.loss)
  else parts[1] = ("nothing to do: %d of %d steps were made before"):format(s.steps, self.steps) end
  if self.precision.scaled or s.scale ~= 1 then parts[#parts + 1] = "scale " .. require("engine.run.progress").scale_text(s.scale) end
  if self.reference then
    local share = self.reference.seconds / math.max(machine.clock() - self.began, 1e-9)
    parts[#parts + 1] = ("%s (%.0f %% of the time)"):format(tostring(self.reference), 100 * share)
  end
  local text = table.concat(parts, ", ")
  if self.policy_errors > 0 then text = text .. ("\nthe policy failed in %s of this run"):format(counted(self.policy_errors, "step")) end
  for _, line in ipairs(self.shadows and self.shadows:lines() or {}) do text = text .. "\n" .. line end
  if s.stopped then text = text .. "\nreason: " .. s.stopped end
  if s.path then text = text .. "\nrun: " .. s.path .. (s.stopped == "interrupted" and "   (resume=auto goes on from here)" or "") end
  return text
end

function Trainer:__tostring()
  return ("trainer: %s, %d parameters, precision %s, policy %s, step %d of %d, %d updates, %d skipped"):format(self.model._class, self.model:count(),
    self.precision.name, self.policy.name, self.steps_done, self.steps, self.updates, self.skipped)
end

return M
