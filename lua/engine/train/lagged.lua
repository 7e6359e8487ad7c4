-- A training step that never waits for the device: mode = "lagged". What Trainer:step does in order is done here in two halves. The first asks
-- the device for everything: forward, backward, statistics, and an update that the device itself leaves out when a gradient is inf or
-- nan. The second, one step later, reads the record that is there by then and lets the policy decide. So
--   - a policy's scale is used two steps after the backward pass it was decided on, not one; overflows are skipped all the same;
--   - a policy cannot hold back an update or ask for the batch again: `skip` and `retry` without an overflow come too late;
--   - the learning rate follows the updates known so far and takes those on their way for granted.
-- With graph = true the device captures forward and backward of the fourth step and launches them as one piece from then on. What the model
-- does on the host (branches, signals, dropout's numbers) happens at the capture alone, so operations that draw numbers or read values
-- back are refused there.
-- Used by trainer.lua.
local M_ffi = require "engine.base.ffi"
local machine = require "engine.base.machine"
local signals = require "engine.policy.signals"
local tensor = require "engine.tensor.tensor"

local C, check = M_ffi.C, M_ffi.check

local M = {}

M.MOST_LOSSES = 64         -- micro-batches of a step, as the core has it

--- What is wrong with a policy here, or nil. groups: how many may have a scale of their own.
function M.policy_refusal(policy, groups)
  if bit.band(policy.needs, C.ENG_NEED_NORM_REF) ~= 0 then
    return ("mode=lagged: policy %s wants reference backward passes, which wait for the device; hint: mode=sync"):format(policy.name)
  end
  for group = 1, policy.group_scale and groups or 0 do
    if policy:group_scale(group) ~= policy:scale() then
      return ("mode=lagged: policy %s scales layers apart, which takes the record of the step itself; hint: mode=sync"):format(policy.name)
    end
  end
end

--- Refuses what cannot work without waiting. Gives the message, or nil.
function M.refusal(options, policy, groups)
  local problem = M.policy_refusal(policy, groups)
  if problem then return problem end
  if options.optimizer.fp8 and #options.optimizer.fp8.policies > 0 then
    return "mode=lagged: FP8 policies go by each step's amaxes, which waits for the device; hint: mode=sync, or precision=fp8_current"
  end
  if options.trap == "overflow" then return "mode=lagged: trap runs an overflowed step again, which is over by the time it is known; hint: mode=sync" end
  if options.graph and (options.accumulate or 1) > 1 then return "graph=true: a captured step has one batch; hint: accumulate=1, or graph=false" end
  if (options.accumulate or 1) > M.MOST_LOSSES then
    return ("mode=lagged: expected accumulate of up to %d, got %d"):format(M.MOST_LOSSES, options.accumulate)
  end
end

-- ------------------------------------------------------------------ captured steps

local WARM_UP = 3          -- steps before one is captured: products have chosen their algorithms, the arenas have grown

--- The tensors of a batch, in the order of their names.
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

--- Captures the step on `batch`: a graph that the device launches as one piece.
local function capture(self, batch, handles, n)
  local out = M_ffi.new("eng_graph *[1]")
  check(C.eng_graph_begin(out, self.optimizer.params, handles, n))
  local graph = M_ffi.ffi.gc(out[0], C.eng_graph_free)
  local good, result = pcall(function()
    local loss = self:forward(batch)
    loss:backward { scale = 1 }
    check(C.eng_graph_end(graph, loss))
  end)
  if good then return graph end
  M_ffi.ffi.gc(graph, nil)
  C.eng_graph_free(graph)
  error(result, 0)
end

--- Forward and backward of a batch through the captured step; gives the loss, or nothing where the batch does not fit it.
local function launch(self, batch, scale)
  local handles, n = tensors_of(batch)
  if not self.captured then
    if self.steps_done - self.first_step < WARM_UP then return nil end
    self.captured = capture(self, batch, handles, n)
  end
  local status = C.eng_graph_launch(self.captured, scale, handles, n)
  if status == C.ENG_ERR_SHAPE or status == C.ENG_ERR_STATE then return nil end
  check(status)
  local loss = M_ffi.ffi.new("eng_tensor")
  check(C.eng_graph_loss(loss, self.captured))
  return loss
end

-- ------------------------------------------------------------------ the two halves

--- The first half. Gives what the second needs to know.
local function ask(self)
  local opt, data, policy = self.optimizer, self.data, self.policy
  local scale = policy:scale()
  local lr = self.fixed_lr or self.schedule and self.schedule(self.updates) or opt.lr
  check(C.eng_step_begin())
  opt:zero_grad()
  self.groups:apply(policy)
  local asked = { step = self.steps_done, updates = self.updates, scale = scale, lr = lr, tokens = 0, elapsed = machine.clock() - self.began,
    signals = {} }
  local losses = M_ffi.new("eng_tensor[?]", self.accumulate)
  self.place = self:remember_place()
  for i = 1, self.accumulate do
    local batch = data:next()
    self.parallel:draw(i)                            -- one rank alone, but the random numbers of a micro-batch are those it always has
    local loss = self.graph and launch(self, batch, scale)
    if not loss then
      loss = self:forward(batch)
      loss:backward { scale = scale / self.accumulate }
    end
    losses[i - 1] = loss
    asked.tokens = asked.tokens + (batch.tokens or batch.y and batch.y.count or 0)
  end
  for name, value in pairs(signals) do asked.signals[name] = value end
  self.parallel:backward_done()
  check(C.eng_params_stats_start(opt.params, self.needs, losses, self.accumulate))
  opt.lr = lr
  local verdict = self.last_verdict
  local updated, problem = pcall(opt.step, opt, { gradient_factor = 1 / scale, clip_value = self.clip_value, lr_mul = verdict and verdict.lr_mul or 1,
    lagged = true, clip_norm = verdict and verdict.clip > 0 and verdict.clip or self.clip or 0 })
  if not updated then
    check(C.eng_params_stats_withdraw(opt.params))   -- a step that was not made has no record
    error(problem, 0)
  end
  self.updates = self.updates + 1
  self.steps_done, self.place = self.steps_done + 1, nil
  self.tokens = self.tokens + asked.tokens
  check(C.eng_step_end())
  return asked
end

--- The second half, for the oldest step asked for: its record, and the policy's verdict.
local function settle(self)
  local asked = table.remove(self.asked, 1)
  local record, stats, opt, policy = self.record, self.stats, self.optimizer, self.policy
  local loss = M_ffi.new("double[1]")
  check(C.eng_params_stats_fetch(record, stats, loss, opt.params, asked.scale))
  record.step, record.updates, record.scale, record.lr, record.elapsed = asked.step, asked.updates, asked.scale, asked.lr, asked.elapsed
  record.loss, record.norm_ref = loss[0] / self.accumulate, 0 / 0
  for name, value in pairs(asked.signals) do policy:signal(name, value) end
  local verdict = self.swaps:decide(record, stats)
  if self.shadows then self.shadows:observe(record, stats, verdict, asked.signals, self.run_files.history) end
  if record.overflow ~= 0 then    -- the device left the update out
    self.skipped, self.updates, opt.updates = self.skipped + 1, self.updates - 1, opt.updates - 1
  end
  self.last_verdict = verdict
  self.run_files:append(record, verdict, stats, asked.tokens, asked.signals)
  return record, verdict
end

--- One step: asks for this one, settles the one before. Gives that one's record and verdict, nothing at the first step.
function M.step(self)
  if #self.asked == 0 then C.eng_params_stats_forget(self.optimizer.params) end   -- what a run that was broken off had asked for
  self.asked[#self.asked + 1] = ask(self)
  if #self.asked > 1 then return settle(self) end
end

--- Settles whatever is on its way: before a checkpoint, at the end of a run. `record`, `verdict`: what step() gave. Gives the last ones;
--- those before go to on_step here.
function M.drain(self, record, verdict)
  while self.asked[1] do
    if record and self.on_step then self.on_step(self, record, verdict) end
    record, verdict = settle(self)
  end
  return record, verdict
end

return M
