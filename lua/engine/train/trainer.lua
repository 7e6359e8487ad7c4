-- The trainer's step and, in order, the parts of the step. Start reading at Trainer:step.
--
--   local trainer = engine.trainer {
--     model = model, data = data, optimizer = opt, schedule = engine.schedule.cosine { ... },
--     precision = "fp16", policy = "dynamic", steps = 1000, clip = 1.0, run = "gpt",
--   }
--   trainer:run()
--
-- assemble.lua puts a trainer together and documents its options. loop.lua runs the steps.
-- modes.lua refuses what does not work in a mode. session.lua gives the step's parts to loops
-- written by hand. run/run.lua writes history and checkpoints. run/swap.lua changes the policy
-- between steps. Called by scripts, assemble.lua, loop.lua, session.lua and cli/plan_measure.lua.
local M_ffi = require "engine.base.ffi"
local activations = require "engine.train.activations"
local arguments = require "engine.base.arguments"
local attention_logits = require "engine.train.attention_logits"
local autograd = require "engine.tensor.autograd"
local buffers = require "engine.train.buffers"
local captured = require "engine.train.captured"
local loop = require "engine.train.loop"
local loss_error = require "engine.train.loss_error"
local machine = require "engine.base.machine"
local modes = require "engine.train.modes"
local precision = require "engine.train.precision"
local random = require "engine.base.random"
local reference = require "engine.train.reference"
local show = require "engine.base.show"
local tensor = require "engine.tensor.tensor"
local update_norms = require "engine.train.update_norms"

local C, check, expect, fail_if = M_ffi.C, M_ffi.check, M_ffi.expect, M_ffi.fail_if

local M = {}

local Trainer = {}
Trainer.__index = Trainer
M.Trainer = Trainer
Trainer.run, Trainer.loss_note, Trainer.summary_text = loop.run, loop.loss_note, loop.summary_text

-- =================================================================== THE TRAINING STEP

--- Makes one step. Returns a record and the verdict on it, which are valid until the next step.
--- With a delay of 0 (mode = "sync"), both belong to this step, and the policy decides before the
--- update. With a delay of 1 ("lagged"), both belong to the step before (nil at the first step and
--- after drain()), so the host never waits for work that was queued in this step. The device itself
--- then skips an update that overflowed.
--- * On several ranks in sync mode, the pass of (4) runs later, as a part of (5): in
--- reducer:record, each rank reads its own part of the gradients.
function Trainer:step()
  local s = self:begin()                                   -- scale, lr, arena, groups, FP8, place
  for i = 1, self.accumulate do
    self:forward_backward(s, i)                            -- (1) the loss  (2) its gradients
  end
  self.reducer:finish(s)                                   -- (3) gradients summed over ranks
  self:request_statistics(s)                               -- (4) one pass over the gradients *
  local due = s
  if self.delay == 1 then
    self:update(s, self.last_verdict)                      -- (7) the device skips an overflow
    due, self.pending = self.pending, s
  end
  local record, verdict
  if due then record, verdict = self:settle(due) end       -- nil: no step was in flight
  self.current = nil
  check(C.eng_step_end())                                  -- the step's memory is free again
  return record, verdict
end

--- Completes a step whose statistics were requested. Returns its record and verdict.
function Trainer:settle(s)
  local record = self:fetch(s)                             -- (5) the record, same on all ranks *
  local verdict = self:decide(s, record)                   -- (6) the policy
  if self.delay == 0 then self:update(s, verdict, record) end   -- (7) unscale, clip, update
  self:finish(s, record, verdict)                          -- (8) counters, shadows, history
  return record, verdict
end

-- =================================================================== its parts

--- Opens the step and returns it: the table s, to which the step's parts add their results. The
--- list gives the fields of s and the function that sets each of them.
---   step, scale, lr            begin: as in the record, but lr without lr_factor (a rollback's)
---   place                      begin: the position in data and random numbers, for a retry
---   shadow_scales              begin: the scales that the shadows would use, or nil
---   recipe                     begin: the precision recipe of the step's passes
---   batches                    begin: the batches that a reference backward pass drew, or nil
---   tokens                     forward_backward: tokens of this rank; reducer:record: of all ranks
---   elapsed, together, asked   request_statistics: seconds since the trainer was made; whether the
---                              losses come with the statistics; whether the statistics were
---                              requested
---   meters                     request_statistics: the meters of FP8 layers, or nil
---   signals, first_bad         reducer:remember: the signals, { name = number }; the result of
---                              first_bad() in tensor/batch_norm_over.lua
---   culprits                   reducer:remember: in lagged mode on several ranks, the tensors that
---                              overflowed on each rank; otherwise nil
---   logs                       decide: what the policies logged, or nil
---   first, entry               Session:step: number (from 0) of the first parameter of the
---                              optimizer that steps; this optimizer's entry in session.entries
---   updated, counted           update: whether weights changed; whether steps_done counts this
---                              step already
function Trainer:begin()
  check(C.eng_step_begin())
  self:drop_record()
  self.optimizer:zero_grad()
  return self:attempt()
end

--- Begins a step without freeing tensors or clearing gradients, and returns it (see begin). Called
--- by begin(), and by a session after each step of a turn, for the next step of the same turn.
function Trainer:attempt()
  local opt, policy = self.optimizer, self.policy
  local lr = self.fixed_lr or not self.schedule and opt.lr or self.schedule(self.updates)
  expect(type(lr) == "number", lr, "trainer: update %d: expected the schedule to return a " ..
    "learning rate, a number", self.updates)
  local s = { step = self.steps_done, scale = policy:scale(), tokens = 0, lr = lr }
  self.groups:apply(policy)
  self:note_recipe(s.step)
  s.recipe = self.precision
  if opt.fp8 then opt.fp8:begin(s.step) end
  s.shadow_scales = self.shadows and self.shadows:scales()
  s.place = self:remember_place()                          -- for a retry, or when this step fails
  self.buffers = buffers.copy(self.model, self.buffers)    -- go_back() restores them
  self.current = s
  self.reducer:begin(s)
  s.batches = self.reference and self.reference:batches(s) -- runs them in f32, if due
  return s
end

--- Records an event if the optimizer's recipe differs from that of the step before: after a resume
--- with another recipe, or a call of Optimizer:set_precision. After such a call, the passes of this
--- step and of later steps also use the new recipe. Raises an error if such a call has changed the
--- FP8 layers, because swaps, shadows and checkpoints of this run refer to the old ones; and on
--- several ranks, whose reduction is set up for the old dtypes.
function Trainer:note_recipe(step)
  local before, now = self.recipe, self.optimizer.precision
  if before == now then return end
  local text = ("the recipe changes from %s (%s) to %s (%s)"):format(before.name, before.checksum,
    now.name, now.checksum)
  fail_if(self.sites ~= self.optimizer.fp8, "set_precision: %s, but a run cannot change its FP8 " ..
    "layers; hint: resume the run with the other precision, or let an FP8 policy move layers", text)
  fail_if(self.reducer.many and not precision.same(self.precision, now), "set_precision: %s, but" ..
    " a run of several ranks cannot change its recipe; hint: resume it with the other precision",
    text)
  if not precision.same(self.precision, now) then
    self.precision, self.fp16 = now, nil
    captured.drop(self, 0)
    self:note(("step %d: %s; the policy stays %s"):format(step, text, self.policy.name))
  end
  self.recipe = now
  self.run_files:event(step, "precision", text, {
    from = { name = before.name, checksum = before.checksum },
    to = { name = now.name, checksum = now.checksum, gradients = self:gradient_formats() } })
end

--- Drops the statistics in flight, after a failed step or an interrupted run.
function Trainer:drop_record()
  local params, failed = self.optimizer.params, self.current
  if not self.pending then C.eng_params_stats_forget(params)
  elseif failed and failed.asked and not failed.counted then
    check(C.eng_params_stats_withdraw(params))
  end
  self.current = nil
end

--- Returns the next batch of `data`, or of the trainer's data if `data` is nil.
function Trainer:next_batch(data)
  local batch = (data or self.data):next()
  if type(batch) == "table" then return batch end
  M_ffi.raise("trainer: expected a batch to be a table { x =, y =, ... }, got %s from the " ..
    "data's next()", M_ffi.value_text(batch))
end

-- Raises an error if the first forward pass has added parameters to the model, because the
-- optimizer, which was made earlier, does not train them.
local function refuse_added(self)
  for _, p in ipairs(self.model:parameters()) do
    fail_if(arguments.info(p.tensor).requires_grad ~= 0
      and not self.parameters_before[tonumber(p.tensor.slot)], "trainer: the first forward pass " ..
      "added the parameter '%s', which the optimizer does not train; hint: make it in init, or " ..
      "call the model once before making the optimizer", p.name)
  end
  self.parameters_before = nil
end

--- Runs micro-batch i: records its loss on the tape and adds its gradients to the flat buffer.
function Trainer:forward_backward(s, i)
  local batch = s.batches and s.batches[i] or self:next_batch()
  self.reducer:seed_batch(s, i)
  self.batches[i], self.drawn_from[i] = batch, random.place()   -- overflow.lua may run it again
  local loss = self.graph and captured.launch(self, batch, s.scale)
  if self.logits then self.logits:watch(true) end
  if not loss and self.activations then
    loss = self:backward(s, i, self.activations:during(i, self.forward, self, batch))
  elseif not loss then loss = self:backward(s, i, self:forward(batch)) end
  if self.parameters_before then refuse_added(self) end
  if self.logits then
    self.logits:watch(false)
    self.logits:read(i)
  end
  self.losses[i - 1] = loss
  s.tokens = s.tokens + (batch.tokens or batch.y and batch.y.count or 0)
  self.unit = not batch.tokens and "targets" or self.data.unit or "tokens"
end

--- Runs the backward pass of a micro-batch's loss and returns the loss. The pass begins with the
--- loss scale, divided by the number of micro-batches, as the gradient of the loss. If a loss
--- scaler class scales the loss itself, the pass begins without the scale.
function Trainer:backward(s, i, loss, ...)
  local policy = self.policy
  local scaled = policy.scale_loss and policy:scale_loss(loss, ...)
  if scaled and i > 1 and policy:scale() ~= s.scale then
    M_ffi.raise("loss scaler '%s': expected one scale for all micro-batches of a step, got %g " ..
      "and then %g", policy.name, s.scale, policy:scale())
  end
  self.reducer:backward_begins(i)                          -- reduces gradients as they complete
  if scaled then
    s.scale = policy:scale()
    scaled:backward { scale = 1 / self.accumulate, retain = self.retain }
  else loss:backward { scale = s.scale / self.accumulate, retain = self.retain } end
  return loss
end

--- Computes the loss of a trainer without the option `loss`.
function M.default_loss(model, batch) return model:loss(batch.x, batch.y) end

-- Returns the results of the loss function. Raises an error if the function failed (`good` is
-- false, and `loss` is the message) or if its first result is not a tensor.
local function checked(self, batch, good, loss, ...)
  if not good then error(loss_error(loss, self.loss ~= M.default_loss and self.loss, batch), 0) end
  expect(tensor.is_tensor(loss), loss, "trainer: expected the loss to be a tensor of one element")
  return loss, ...
end

--- Returns the loss of a batch, computed in the run's precision, and the loss function's other
--- results.
function Trainer:forward(batch)
  return checked(self, batch, pcall(precision.autocast, self.precision, self.loss, self.model,
    batch))
end

-- Returns whether the device reads the losses together with the statistics. Otherwise the losses
-- are read one by one, and each read waits for the device. A lagged run never reads them one by
-- one.
local function together(self)
  local fits = self.accumulate <= C.ENG_STATS_LOSSES
  for i = 0, self.accumulate - 1 do fits = fits and self.losses[i].dtype == "f32" end
  return fits or self.delay == 1
end

--- Requests the statistics of the gradients and the losses from the device, without waiting.
function Trainer:request_statistics(s)
  local opt, own_pass = self.optimizer, self.reducer.own_pass
  s.elapsed = machine.clock() - self.began
  s.together = not own_pass and together(self)
  if not own_pass then                                     -- otherwise reducer:record takes them
    check(C.eng_params_stats_start(opt.params, self.needs, self.losses,
      s.together and self.accumulate or 0, self.reducer:known_statistics(s)))
    s.asked = true
  end
  self.reducer:remember(s, self.delay == 1)
  if opt.fp8 then
    s.meters = opt.fp8:measure(s.step, s.scale / self.accumulate, self.reducer:comm())
  end
end

local loss_sum = M_ffi.new("double[1]")

--- Fills the record of a step and returns it.
function Trainer:fetch(s)
  local record, stats = self.record, self.stats
  loss_sum[0] = 0
  if s.asked then
    check(C.eng_params_stats_fetch(record, stats + (s.first or 0), loss_sum,
      self.optimizer.params, s.scale))
  end
  if not s.together then
    for i = 0, self.accumulate - 1 do loss_sum[0] = loss_sum[0] + self.losses[i]:item() end
  end
  record.step, record.scale = s.step, s.scale
  -- in a lagged run, self.updates also counts those of this step and of the step in flight
  record.updates = self.updates - (self.steps_done - s.step)
  record.lr = s.lr * self.lr_factor
  record.loss, record.elapsed, record.norm_ref = loss_sum[0] / self.accumulate, s.elapsed, 0 / 0
  self.reducer:record(record, stats, s)
  if self.reference then self.reference:fill(record, stats) end
  record.amax_f16 = -1
  self.norms:fill(record, stats)
  for _, i in ipairs(self:fp16_gradients()) do
    record.amax_f16 = math.max(record.amax_f16, stats[i].amax)
  end
  return record
end

-- Returns the policy's verdict on a step, and applies its caps.
local function verdict_of(self, s, record)
  for name, value in pairs(s.signals) do self.policy:signal(name, value) end
  return self.policy:decide(record, self.stats, update_norms.cap, self, s, record)
end

--- Runs the policy, then the policies of FP8 layers. Returns the verdict. If the verdict has caps,
--- update_norms.cap applies them and the policy decides again. If the run cannot use the policy,
--- for example because of its next scale, the action becomes stop. If the policy was just swapped
--- in and fails, run/swap.lua brings the old policy back, which then decides this step. In a lagged
--- run, the action then becomes what the device has done, and asks() gives what the run still does.
function Trainer:decide(s, record)
  local sites, swaps, verdict = self.optimizer.fp8, self.swaps, verdict_of(self, s, record)
  swaps:remember(record)
  if swaps:rejects(self, record, verdict) then verdict = verdict_of(self, s, record) end
  s.logs = self.policy:logs()
  local problem = self:refuses(self.policy)
  if problem then verdict.reason, verdict.action = problem:sub(1, 255), C.ENG_ACTION_STOP end
  self.reducer:note_verdict(record, verdict)
  if sites then
    s.logs = sites:decide(record, verdict.scale / self.accumulate, s.logs, verdict, swaps)
  end
  if self.delay == 1 then self.asked = verdict:apply_lag(record.overflow ~= 0) end
  self.last_verdict = verdict
  return verdict
end

--- Returns whether the run must carry out `action` (ENG_ACTION_*), by its last verdict.
function Trainer:asks(verdict, action) return (self.asked or verdict.action) == action end

--- Returns why a policy cannot be used in this run (modes.lua), or nil.
function Trainer:refuses(policy) return modes.policy_refusal(self, policy) end

--- Returns why no policy of FP8 layers can be used in this run, or nil.
function Trainer:refuses_fp8() return modes.fp8_refusal(self) end

--- Returns a policy's verdict on a record, with the last statistics per tensor.
function Trainer:ask(policy, record) return policy:decide(record, self.stats) end

--- Unscales, clips and updates in one pass if the verdict's action is `step`. With a delay of 1
--- there is no record, and the device decides by its own statistics. `verdict` is then the last
--- verdict, usually that of two steps before, or nil, and gives only clip and lr_mul.
function Trainer:update(s, verdict, record)
  local opt = self.optimizer
  self.norms.known = false
  if not record or verdict.action == C.ENG_ACTION_STEP then
    opt.lr = s.lr
    local given = { gradient_factor = 1 / s.scale, clip_value = self.clip_value,
      clip_norm = verdict and verdict.clip > 0 and verdict.clip or self.clip or 0,
      norm = record and record.norm, lr_mul = (verdict and verdict.lr_mul or 1) * self.lr_factor,
      lagged = record == nil }
    if record then update_norms.add(self, given, verdict) end
    opt:step(given)
    self.reducer:updated()
    if self.logits then self.logits:scale(self.policy:logit_muls(), opt.params) end
    self.updates, s.updated = self.updates + 1, true
  end
  self.steps_done, s.counted = self.steps_done + 1, true
end

--- Completes a step after its verdict: updates the counters, passes the step to the shadows and an
--- overflow to overflow.lua, and records the step in the history.
function Trainer:finish(s, record, verdict)
  local stats, files = self.stats, self.run_files
  local overflow_skipped = self.delay == 1 and record.overflow ~= 0
  if overflow_skipped then                                 -- the device skipped this update
    self.updates, self.optimizer.updates = self.updates - 1, self.optimizer.updates - 1
  end
  if self.shadows then
    self.shadows:observe(s, record, stats, verdict, s.updated and not overflow_skipped, files)
    self.shadows:observe_layers(s.step, record, self.optimizer.fp8, files)
  end
  if s.meters then files:fp8(s.step, s.meters) end
  files:layers(s.step)
  if overflow_skipped or not s.updated then
    self.skipped = self.skipped + 1
    if record.overflow ~= 0 then self.overflows:look(record, verdict) end
    if verdict.action == C.ENG_ACTION_RETRY then
      self.retries = self.retries + 1
      self:go_back(s.place)
      if self.optimizer.fp8 then self.optimizer.fp8.averages:hold() end
    end
  end
  self.tokens = self.tokens + s.tokens
  files:append(record, verdict, stats, s.tokens, s.signals, s.logs)
end

--- In a lagged run, finishes the step in flight: before a checkpoint, before a rollback, before a
--- swap, whose policy may need other statistics, and at the end of a run. The loop's on_drain shows
--- the step. Returns its record and verdict, or nothing if no step is in flight.
function Trainer:drain()
  local s = self.pending
  self.pending = nil
  if not s then return end
  local record, verdict = self:settle(s)
  if self.on_drain then self.on_drain(record, verdict) end
  return record, verdict
end

-- ------------------------------------------------------------------ going back

--- Returns the position in the data and in the random numbers, so that a retry sees the same batch.
function Trainer:remember_place()
  local place = random.place()
  place.data = self.data.state and self.data:state()
  return place
end

--- Returns to a position that remember_place() returned, and restores the model's buffers as they
--- were when the step began: a pass changes running statistics even if its step has no update.
function Trainer:go_back(place)
  if place.data then self.data:restore(place.data) end
  random.go(place)
  buffers.restore(self.buffers or {})
end

--- Frees the copies of the model's buffers.
function Trainer:forget_buffers()
  buffers.free(self.buffers or {})
  self.buffers = nil
end

--- Adapts a resumed run to its number of ranks. `ranks` and `accumulate` are the run's earlier
--- values. If only the number of ranks has changed, and it divides the number of batches in a step,
--- changes the trainer's `accumulate` so that a step keeps this number of batches. Returns a line
--- about the change, or nil.
function Trainer:share_as_before(ranks, accumulate)
  local before, size = ranks * accumulate, self.reducer.size
  local same = "with the same steps except for rounding"       -- the ranks sum in another order
  if before == size * self.accumulate then
    return ranks ~= size and ("%d ranks continue a run of %d, %s"):format(size, ranks, same) or nil
  end
  if accumulate == self.accumulate and before % size == 0 then
    self.accumulate = before / size
    local refusal = modes.refusal(self)
    fail_if(refusal, "resume: the checkpoint's run had %d batches in a step, which needs " ..
      "accumulate=%d on %d rank%s; but %s", before, self.accumulate, size, size == 1 and "" or "s",
      refusal)
    self.losses = M_ffi.new("eng_tensor[?]", self.accumulate)
    self.reducer:accumulates(self.accumulate > 1)
    return ("%d rank%s with accumulate=%d %s a run of %d with accumulate=%d, %s"):format(size,
      size == 1 and "" or "s", self.accumulate, size == 1 and "continues" or "continue", ranks,
      accumulate, same)
  end
  return ("a step has %d batches now and had %d, so the losses will differ"):format(
    size * self.accumulate, before)
end

-- ------------------------------------------------------------------ policies

--- Gives a policy the names of tensors and groups.
function Trainer:prepare(policy)
  policy:tensors(self.groups.names, self.groups.group_of, self.groups.groups, true)
end

--- Returns the statistics to compute: those that every record has, those that the policy, the
--- policy that a failing swap brings back and the shadows need, and the histogram if the run is
--- recorded. `engine replay` uses the histogram to predict a recorded step at a different scale.
function Trainer:all_needs()
  return bit.bor(self.policy.needs, self.swaps and self.swaps:needs() or 0,
    self.shadows and self.shadows.needs or 0, C.ENG_NEED_AMAX, C.ENG_NEED_NORM, C.ENG_NEED_ZEROS,
    C.ENG_NEED_UNDERFLOW,
    self.run_files and self.run_files:wants_hist() and C.ENG_NEED_HIST or 0)
end

--- Makes a prepared policy the current one (swap.lua changes it during the run).
function Trainer:use_policy(policy)
  self.policy = policy
  self.needs = self:all_needs()
  local function needed(what) return bit.band(self.needs, what) ~= 0 end
  local own = policy.options
  self.reference = needed(C.ENG_NEED_NORM_REF) and (self.reference or reference.new(self,
    self.ref_every or own.ref_every or 100, self.ref_layers or own.ref_layers or "")) or nil
  local wanted = needed(C.ENG_NEED_LOGIT_MAX)
  if not wanted then attention_logits.clear() end
  self.logits = wanted and (self.logits or attention_logits.new(self.model)) or nil
  wanted = needed(C.ENG_NEED_ACTIVATIONS) or self.activation_pattern
  if not wanted then activations.clear() end
  self.activations = wanted and (self.activations
    or activations.new(self.model, self.activation_pattern)) or nil
end

--- Returns the names of the gradients' formats in a recipe, such as "f32", as a list in the order
--- of the parameters. recipe: nil for the current one.
function Trainer:gradient_formats(recipe)
  local list = {}
  local _, formats = precision.parameter_formats(recipe or self.precision, self.optimizer.list)
  for i = 1, #self.optimizer.list do list[i] = M_ffi.dtype_name[formats[i - 1]] end
  return list
end

--- Returns the indices of the fp16 gradients in `stats`, from 0.
function Trainer:fp16_gradients()
  if not self.fp16 then
    self.fp16 = {}
    for i, format in ipairs(self:gradient_formats()) do
      if format == "f16" then self.fp16[#self.fp16 + 1] = i - 1 end
    end
  end
  return self.fp16
end

-- ------------------------------------------------------------------ evaluating, describing

--- Returns the mean loss over `batches` batches of `data`, with the tape and dropout off.
function Trainer:evaluate_on(data, batches)
  local sum = 0
  self.model:evaluating(function()
    for _ = 1, batches do
      sum = sum + autograd.scope(function() return self:forward(self:next_batch(data)):item() end)
    end
  end)
  return sum / batches
end

--- Runs f() and returns its results. With zero = 3, every rank has all weights during the call, and
--- f may read, save and change them (in the same way on all ranks). At other times only operations
--- can read them. All ranks must make the call, between two steps:
--- trainer:whole(function() model:save("model") end).
function Trainer:whole(f) return self.reducer:whole(f) end

--- Prints a line for the user, or keeps it until the progress display begins.
function Trainer:note(text)
  if self.progress then self.progress:note(text) else table.insert(self.run_files.notes, text) end
end

--- Prints a warning on stderr, for example that a file cannot be written.
function Trainer:warn(text)
  require("engine.run.progress").warn(self.progress or { silent = self.reducer.rank > 0 }, text)
end

--- Returns the resources of this run as text: "2 threads", or "4 ranks, ZeRO-1, 1 thread each".
function Trainer:resources()
  local threads, ranks = tonumber(C.eng_threads(0)), self.reducer:described()
  return ("%s%d thread%s%s"):format(ranks and ranks .. ", " or "", threads,
    threads == 1 and "" or "s", ranks and " each" or "")
end

function Trainer:__tostring()
  return ("trainer: %s, %d parameters, precision %s, policy %s, step %d of %d, %s, "
    .. "%d skipped"):format(self.model._class, self.model:count(), self.precision.name,
    self.policy.name, self.steps_done, self.steps, show.counted(self.updates, "update"),
    self.skipped)
end

return M
