-- Implements engine.trainer { ... }: documents its options, and puts a trainer or a session
-- together from its parts. Called by scripts and by session.lua; trainer.lua has the training step.
local M_ffi = require "engine.base.ffi"
local agreement = require "engine.dist.agreement"
local control = require "engine.run.control"
local groups = require "engine.policy.groups"
local machine = require "engine.base.machine"
local modes = require "engine.train.modes"
local options = require "engine.train.options"
local overflow = require "engine.train.overflow"
local policies = require "engine.policy.policy"
local precision = require "engine.train.precision"
local reducer = require "engine.dist.reducer"
local run_files = require "engine.run.run"
local shadow = require "engine.run.shadow"
local swap = require "engine.run.swap"
local trainer = require "engine.train.trainer"
local update_norms = require "engine.train.update_norms"
local user_state = require "engine.run.user_state"

local Trainer = trainer.Trainer

local M = {}

-- Calls f. An error keeps its message and does not name this file's line.
local function plainly(f, ...)
  local good, result = pcall(f, ...)
  if not good then error(result, 0) end
  return result
end

--- Makes an object of a class (Trainer of trainer.lua, or Session of session.lua) from checked
--- options. fields: further fields of the object, or nil.
function M.object(o, class, fields)
  local full = precision.resolve(o.precision or o.optimizer.precision)
  local self = setmetatable({
    model = o.model, data = o.data, loss = o.loss or trainer.default_loss, optimizer = o.optimizer,
    schedule = o.schedule, precision = full, steps = o.steps, accumulate = o.accumulate or 1,
    clip = o.clip and o.clip > 0 and o.clip or nil, clip_value = o.clip_value,
    delay = o.mode == "lagged" and 1 or 0, graph = o.graph or nil,
    on_step = o.on_step, on_policy_error = o.on_policy_error or "hold",
    on_lost = o.on_lost or "stop", evaluate = o.evaluate, restart_data = o.restart_data,
    activation_pattern = o.activations,
    log = o.log or "line", ref_every = o.ref_every, ref_layers = o.ref_layers,
    steps_done = 0, updates = 0, skipped = 0, retries = 0, tokens = 0, policy_errors = 0,
    rollbacks = o.rollbacks or 3, rollbacks_made = 0, lr_factor = 1,
    failures = {},                 -- the reasons of the policy's failures that have been shown
    shown = {},                    -- for each kind of line, how many more may be shown (loop.lua)
    record = M_ffi.new("eng_record"),
    stats = M_ffi.new("eng_tensor_stats[?]", #o.optimizer.list),
    began = machine.clock(), rows = {},
    batches = {}, drawn_from = {},   -- the step's micro-batches, which overflow.lua may run again
    current = nil,                   -- the step that has begun and not ended
    pending = nil,                   -- with a delay: the step before `current`, whose record is due
    last_verdict = nil,
    progress = nil,                  -- the live line, once run() has begun
    state = o.state or {},           -- the user's own table, which every checkpoint holds
  }, class)
  for key, value in pairs(fields or {}) do self[key] = value end
  self.losses = M_ffi.new("eng_tensor[?]", self.accumulate)
  self.norms = update_norms.new(#o.optimizer.list)
  user_state.pack(self.state)        -- raises an error now, not at the first checkpoint
  local opt = self.optimizer
  if not precision.same(opt.precision, full) then opt:set_precision(full) end
  if not self.by_hand then opt:accumulates(self.accumulate > 1) end
  -- recipes without loss scaling get `static` with a scale of 1, which no output mentions
  self.policy = plainly(policies.load, o.policy or (full.scaled and "dynamic" or "static"),
    o.policy_options)
  self.groups = groups.new(self.model, opt.list, opt.sets or { { params = opt.params,
    n = #opt.list } })
  self.shadows = plainly(shadow.new, self, o.shadow)
  self.reducer = reducer.new(self, o)
  self:prepare(self.policy)
  self:use_policy(self.policy)
  self.swaps, self.control = swap.new(self, o), control.new(self, o)
  self.overflows = overflow.new(self, o.trap == "overflow")
  local refusal = modes.refusal(self)
  if refusal then error(refusal, 0) end
  self.run_files = run_files.open(self, o)
  self.recipe = self.recipe or opt.precision    -- restore.lua may have set another one
  self.sites = opt.fp8                          -- see Trainer:note_recipe
  self.agreement = agreement.new(self, o)
  self.needs = self:all_needs()
  self.parameters_before = {}                   -- by slot, until the first forward pass
  for _, p in ipairs(self.model:parameters()) do
    self.parameters_before[tonumber(p.tensor.slot)] = true
  end
  return self
end

--- engine.trainer{ ... }: makes a trainer. Options:
---   model, data, optimizer       the module to train, the data loader, the optimizer (required)
---   steps                        how many steps to make, skipped and retried ones included
---                                (required)
---   loss                         function(model, batch) -> loss; by default model:loss(batch.x,
---                                batch.y). Further results are passed to the scale_loss of a loss
---                                scaler class
---   schedule                     function(updates) -> learning rate
---   precision                    recipe name or table; by default the optimizer's recipe
---   policy, policy_options       name, file or loaded policy, by default "dynamic" for recipes
---                                that need a loss scale (fp16) and "static" for others; the
---                                policy's own options
---   clip, clip_value             limit on the norm of all gradients; limit on each element
---   accumulate                   micro-batches a step; from 2 on, gradients in fp16 or bf16 are
---                                summed in f32
---   checkpoint                   "block" for the model's blocks, or a pattern of module paths:
---                                activation checkpointing of these modules, which saves memory,
---                                costs time and changes no bit (Module:checkpoint)
---   run                          name or directory of the run; nil: nothing is written
---   resume                       "auto": continue from the newest checkpoint, if any; or the path
---                                of a run or checkpoint, whose files stay as they are unless
---                                `run` names the same run
---   restart_data                 true: a resumed run begins at its loader's first batch. Without
---                                it, a run whose loader has no state() and restore() does not
---                                resume
---   checkpoint_every, keep       steps between checkpoints, by default 0: a single checkpoint at
---                                the end; how many checkpoints to keep, by default 3
---   log                          "line" (the default), "json" or "quiet" (docs/runs.md). "quiet"
---                                still reports failures of the policy and results that could not
---                                be written
---   state                        the table trainer.state, by default {}: the script's own numbers,
---                                strings, booleans, kept tensors and tables of these. Every
---                                checkpoint holds it; resume and rollback restore it in place.
---                                With several ranks, rank 0's table is written, and every rank
---                                gets it back
---   on_step                      function(trainer, record, verdict), called after each step.
---                                Record and verdict are the core's eng_record and eng_verdict,
---                                with C numbers: record.overflow is 0 or 1 (write
---                                `record.overflow == 1`, because 0 is true in Lua), record.step an
---                                int64 (tonumber(record.step)), and record.first_bad an index from
---                                0, or -1
---   on_policy_error              "hold" (the default): continue with the last good verdict, but
---                                end the run if the policy fails at each of the first 20 steps;
---                                "stop": end the run
---   on_lost                      what happens when the loss has been inf or nan for 10 steps, or
---                                when a checkpoint is due and weights are inf or nan: "stop" (the
---                                default) ends the run, "continue" does not. Weights of inf or nan
---                                are never written to a checkpoint
---   rollbacks                    how many times a policy may return the run to a checkpoint, by
---                                default 3
---   history                      false: a run with `run` writes no history.db
---   stats_every                  steps between rows of per-tensor statistics in the history, by
---                                default 100. A step that overflows always gets a row
---   ref_every, ref_layers        for policies that need norm_ref: steps between reference
---                                backward passes, by default the policy's option ref_every,
---                                or 100; a pattern of the parameters that these passes cover, by
---                                default the policy's option ref_layers, or all parameters
---   activations                  a pattern of modules whose outputs are measured at each step and
---                                published as the signals activation_amax.MODULE and
---                                activation_kurtosis.MODULE; works on the CPU only. Without this
---                                option, a policy that needs `activations` gets the numbered
---                                entries of top-level lists, such as blocks.3
---   evaluate                     { data =, every =, batches = }: loss on other data; policies
---                                read it as record.signals.evaluation_loss
---   mode                         "sync" (the default): the host waits for the device, and the
---                                policy decides before the update; "lagged": the host waits only
---                                for the previous step, and the policy decides one step later
---                                (modes.lua)
---   graph                        true: forward and backward are captured once and then launched as
---                                one graph; works on cards only (captured.lua)
---   config                       the script's settings, to be recorded
---   shadow                       policies that see every record and decide nothing: a list, or
---                                "a,b" (run/shadow.lua); also policies of FP8 layers
---   watch                        false: saving the policy's file changes nothing (run/swap.lua)
---   trap                         "overflow": every overflowed step runs again to name the
---                                operation in which the overflow began (overflow.lua). Shows each
---                                operation once; the history has all of them
---   tensorboard                  true: event files for TensorBoard in the run's directory; or a
---                                directory for them
---   attach                       false: `engine attach` cannot reach this run (run/control.lua)
--- Options for several ranks that train together (dist/ranks.lua, dist/reducer.lua):
---   comm_dtype                   format in which gradients are sent: "own" (the gradient's own),
---                                "fp32", "bf16", "fp16" or "fp8"; sums are f32
---   bucket                       MiB of gradients sent together, by default 2
---   zero                         1 (ZeRO-1): each rank updates its part of the weights and keeps
---                                only that part's moments; 2 (ZeRO-2): also keeps only that
---                                part's gradients, which are sent at every micro-batch; x.grad
---                                cannot be read; 3 (ZeRO-3): also keeps only that part's weights,
---                                and gets the other weights of a block while the block uses them
---                                (trainer:whole)
---   rank_timeout                 seconds a rank waits for another before it ends the job, by
---                                default ENGINE_RANK_TIMEOUT or 300
---   agree_every                  steps between comparisons of the ranks' weights, moments and
---                                optimizer scalars, by default 1000; 0: no comparisons. Otherwise
---                                checkpoints and the end of the run compare them too. Ranks that
---                                differ end the job (dist/agreement.lua)
function M.new(given)
  M_ffi.expect(type(given) == "table", given, "trainer: expected a table of options")
  return M.made(function()
    local o = options.current(given)
    options.check(o)
    if o.checkpoint ~= nil then o.model:checkpoint(o.checkpoint) end
    return M.object(o, Trainer)
  end)
end

--- Calls make() and returns its result. If make() raises an error without a line number, adds the
--- line of the user's script to its message.
function M.made(make)
  local good, result = pcall(make)
  if not good then
    if type(result) ~= "string" or result:find("^[^\n:]+:%d+: ") then error(result, 0) end
    M_ffi.raise(result)
  end
  return result
end

return M
