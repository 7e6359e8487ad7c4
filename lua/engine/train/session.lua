-- A session gives a hand-written training loop the history, policies and checkpoints of a trainer.
-- It may have several models or optimizers. The script writes the loop:
--
--   local s = engine.session { optimizers = { d = opt_d, g = opt_g }, policy = "dynamic",
--     run = "gan" }
--   for turn in s:turns(1000) do
--     s:backward(loss_of_d)        -- the loss scale seeds the backward pass
--     s:step(opt_d)                -- statistics, record, policy, update, history
--     s:backward(loss_of_g)
--     s:step(opt_g)
--   end
--
-- A Session is a Trainer (trainer.lua) whose forward and backward passes are called by the script.
-- Each call of s:step() is one step of the run, with one record and one verdict. A turn of the loop
-- may have several steps. The tensors of a turn are freed when the turn ends. Between two
-- turns, loop.lua handles swaps, requests of attached clients, and checkpoints. Called by scripts
-- and deepspeed.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local assemble = require "engine.train.assemble"
local autograd = require "engine.tensor.autograd"
local loop = require "engine.train.loop"
local machine = require "engine.base.machine"
local module = require "engine.nn.module"
local nearest = require "engine.base.nearest"
local options = require "engine.train.options"
local precision = require "engine.train.precision"
local ranks = require "engine.dist.ranks"
local show = require "engine.base.show"
local signals = require "engine.policy.signals"
local tensor = require "engine.tensor.tensor"

local C, check, expect, raise, raise_if = M_ffi.C, M_ffi.check, M_ffi.expect, M_ffi.raise,
  M_ffi.raise_if
local Trainer = require("engine.train.trainer").Trainer

local M = {}

local Session = setmetatable({}, { __index = Trainer })
Session.__index = Session
Session.by_hand = true

-- ------------------------------------------------------------------ several optimizers as one

-- Gives several optimizers the interface of one, for the trainer's code. The parameters of the
-- optimizer `d` are called "d.NAME". `active`: the entry of the optimizer that takes the current
-- step.
local Several = {}
Several.__index = Several

local function several(entries)
  local self = setmetatable({ entries = entries, list = {}, sets = {}, updates = 0 }, Several)
  local names = {}
  for i, e in ipairs(entries) do
    names[i], e.first = ("%s %s"):format(e.name, e.opt.name), #self.list
    self.sets[i] = { params = e.opt.params, n = #e.opt.list }
    for _, p in ipairs(e.opt.list) do
      self.list[#self.list + 1] = { name = e.name .. "." .. p.name, tensor = p.tensor,
        role = p.role, owner = p.owner }
    end
  end
  self.name, self.precision = table.concat(names, ", "), entries[1].opt.precision
  self.state = self
  self:activate(entries[1])
  return self
end

function Several:activate(entry)
  self.active, self.params, self.lr = entry, entry.opt.params, entry.opt.lr
end

function Several:zero_grad()
  for _, e in ipairs(self.entries) do e.opt:zero_grad() end
end

function Several:step(o)
  self.active.opt.lr = self.lr
  self.active.opt:step(o)
end

function Several:state_tensors()
  local all = {}
  for i in ipairs(self.list) do
    for _, buffer in ipairs(self:of(i)) do all[buffer.name] = buffer.x end
  end
  return all
end

-- A Several is its own `state`. It has the methods of an optimizer's state (fused_state.lua) that
-- sessions call, for the parameters of all its optimizers.
function Several:of(i)
  local n = #self.entries
  while self.entries[n].first >= i do n = n - 1 end
  local e = self.entries[n]
  local list = e.opt.state:of(i - e.first)
  for _, buffer in ipairs(list) do buffer.name = e.name .. "." .. buffer.name end
  return list
end

function Several:restart()
  for _, e in ipairs(self.entries) do e.opt.state:restart() end
end

-- ------------------------------------------------------------------ making a session

-- Returns the session's optimizers, sorted by name: { name, number, opt, first_lr }.
local function entries_of(o)
  local given = o.optimizers
  if given == nil and o.optimizer ~= nil then given = { optimizer = o.optimizer } end
  if type(given) ~= "table" or next(given) == nil or o.optimizers ~= nil and o.optimizer ~= nil then
    raise("session: expected optimizer = an optimizer of engine.optim, or optimizers = { name = " ..
      "optimizer }, got %s", o.optimizers ~= nil and o.optimizer ~= nil and "both"
      or type(given) == "table" and "optimizers = {}" or M_ffi.value_text(given))
  end
  local entries, seen = {}, {}
  for name, opt in pairs(given) do
    expect(type(name) == "string" and name:find("^[%a_][%w_]*$"), name,
      "session: expected names of letters, digits and '_' in optimizers")
    expect(type(opt) == "table" and opt.params ~= nil and opt.step and opt.precision, opt,
      "session: expected optimizer %s to be an optimizer of engine.optim", name)
    if seen[opt] then
      raise("session: %s and %s are the same optimizer; list it once", seen[opt], name)
    end
    seen[opt] = name
    entries[#entries + 1] = { name = name, opt = opt, first_lr = opt.lr, updates = 0, first = 0 }
  end
  table.sort(entries, function(a, b) return a.name < b.name end)
  for i, e in ipairs(entries) do e.number = i end
  return entries
end

-- Returns the recipe of a session: `own` (the option precision), or that of its optimizers. Raises
-- an error if the optimizers have different ones or if a session cannot use it.
local function one_recipe(entries, own)
  local first = entries[1].opt.precision
  for _, e in ipairs(own and {} or entries) do
    raise_if(not precision.same(e.opt.precision, first), "session: expected one precision, but " ..
      "optimizer %s has %s and %s has %s; hint: the option precision, or set_precision for each " ..
      "optimizer", entries[1].name, first.name, e.name, e.opt.precision.name)
  end
  local recipe = precision.resolve(own or first)
  raise_if(recipe.fp8, "session: precision '%s' quantizes linear layers, which a session cannot " ..
    "do; hint: engine.trainer, or fp32, bf16 or fp16", recipe.name)
  return recipe
end

local Holder = module.class("tensors")
local Models = module.class("models")

-- Returns the module that an optimizer trains. If the optimizer was made without a module, returns
-- a new module that holds the optimizer's tensors.
local function model_of(opt)
  if opt.model then return opt.model end
  local holder = Holder()
  for _, p in ipairs(opt.list) do holder[p.name] = p.tensor end
  return holder
end

local function new(given)
  options.check_session(given)
  local o = arguments.merged(given)
  local entries = entries_of(o)
  raise_if(ranks.size() > 1, "session: expected a loop written by hand to run on one rank, got " ..
    "%d ranks; hint: use engine.trainer", ranks.size())
  local recipe = one_recipe(entries, o.precision)
  for _, e in ipairs(entries) do
    if not precision.same(e.opt.precision, recipe) then e.opt:set_precision(recipe) end
  end
  if #entries == 1 then o.optimizer, o.model = entries[1].opt, model_of(entries[1].opt)
  else
    o.optimizer, o.model = several(entries), Models()
    for _, e in ipairs(entries) do o.model[e.name] = model_of(e.opt) end
  end
  o.data = o.data or { next = function()
    raise("session: the policy skips data, so the session needs the loop's loader; hint: " ..
      "the option data") end }
  return assemble.object(o, Session, { entries = entries, own_data = given.data ~= nil, turn = 0,
    retain = #entries > 1 })                -- the losses of a turn may share parts of the tape
end

--- engine.session{ ... }: gives a hand-written training loop a history, policies with shadows and
--- hot swaps, attached clients, progress and checkpoints. docs/hand-written-loops.md has examples.
--- Options:
---   optimizer                    one of engine.optim; or
---   optimizers                   { name = optimizer } for several, which share the loss scale.
---                                Parameters are then called "name.PARAMETER" in the history
---   data                         the loop's loader, if it has state() and restore(). Checkpoints
---                                store its position. The loop itself calls data:next()
---   state                        the table session.state, by default {}: the loop's own numbers,
---                                strings, booleans, kept tensors and tables of these. Every
---                                checkpoint holds it
--- The options that follow are as in engine.trainer: precision policy policy_options clip
--- clip_value run resume restart_data checkpoint_every keep log on_policy_error on_lost rollbacks
--- stats_every history config shadow watch attach tensorboard. Several optimizers are numbered from
--- 1 in the order of their names. record.signals.optimizer is the number of the optimizer that
--- takes the step. An lr set in `engine attach` applies to all optimizers.
function M.new(given)
  expect(type(given) == "table", given, "session: expected a table of options")
  return assemble.made(function() return new(given) end)
end

-- ------------------------------------------------------------------ the loop

-- Sets the number of steps that the run is expected to make, unless a client has set it.
local function expect_steps(self)
  local left = self.most - self.turn
  if left == 0 then self.steps = math.min(self.steps, self.steps_done)
  elseif self.steps == self.expected then
    local each = math.max(1, self.steps_done - (self.turn_began_at or 0))
    self.steps = self.steps_done + left * each
    self.expected = self.steps
    if self.progress then self.progress:expect(self.steps) end
  end
end

local function open(self)
  self.expected = self.steps_done + math.max(0, self.most - self.turn) * #self.entries
  self.steps = self.limit or self.expected                 -- limit: set by cli/live.lua
  local files = self.run_files
  if files.history and self.most < 2 ^ 53 then
    files:complain(files.history:set_meta("steps", self.steps))
  end
  self.outcome, self.last_at = loop.start(self), machine.clock()
  return self.turn >= self.most or self.steps_done >= self.steps
end

-- Ends a turn. Returns whether the loop is over.
local function close_turn(self)
  self.current = nil
  check(C.eng_step_end())
  raise_if(self.unused > 0, "session: turn %d computed gradients that no step used, and they " ..
    "are lost; hint: s:step(optimizer) before the turn ends", self.turn)
  expect_steps(self)
  local over = loop.after_step(self, self.outcome) or self.turn >= self.most
  self.turn_began_at = self.steps_done
  return over
end

local function next_turn(self)
  local over
  if not self.outcome then over = open(self) elseif self.current then over = close_turn(self) end
  if over then
    self:close()
    return nil
  end
  self.turn, self.unused, self.passes, self.loss_sum = self.turn + 1, 0, 0, nil
  self.turn_began_at = self.steps_done
  self:begin()
  return self.turn
end

--- for turn in s:turns(n) do ... end: makes turns until the session has made n in all. Turns count
--- from 1; a later call, or a resumed run, goes on after the turns made before. Each turn begins
--- with empty gradients. The loop ends early when the policy, an attached client or s:stop() ends
--- it, when the run is lost (on_lost), when the policy fails (on_policy_error, or in each of its
--- first 20 steps), or on Ctrl-C. After `break`, call s:close().
function Session:turns(n)
  arguments.want_whole(n, "session:turns", "the number of turns", 0)
  self.most, self.summary = n, nil
  return function() return next_turn(self) end
end

--- Ends the run: writes the last checkpoint and closes the files. Returns the summary, as
--- trainer:run() does. A loop that ends by itself calls it. After `break`, the script must call it.
function Session:close()
  if not self.outcome then return self.summary end
  local outcome = self.outcome
  local unfinished = self.current
  if unfinished then                                       -- after a break
    self.current = nil
    check(C.eng_step_end())
    if not unfinished.counted then self:go_back(unfinished.place) end
    if self.steps_done == self.turn_began_at then self.turn = self.turn - 1 end
    self.steps = self.steps_done
    loop.after_step(self, outcome)
  end
  self.outcome = nil
  self.summary = loop.finish(self, outcome, true)
  return self.summary
end

--- Raises an error, because a session has no loop of its own.
function Session.run()
  raise("session:run: a session has no loop of its own; hint: for turn in s:turns(n) do ... end")
end

--- Ends the loop after this turn. The reason goes into the history and the summary.
function Session:stop(reason)
  raise_if(not self.outcome,
    "session:stop: expected to be called inside `for turn in s:turns(n) do ... end`")
  self.outcome.stopped = self.outcome.stopped or tostring(reason or "requested by the script")
end

-- Returns the open step. Raises an error outside of a turn.
local function inside(self, what)
  if self.current then return self.current end
  raise("session:%s: expected to be called inside `for turn in s:turns(n) do ... end`", what)
end

--- Runs f(...) in the session's precision and returns its results.
function Session:autocast(f, ...)
  if self.current then self:note_recipe(self.current.step) end
  return precision.autocast(self.precision, f, ...)
end

--- Returns the loss scale of the next backward pass.
function Session:get_scale() return self.current and self.current.scale or self.policy:scale() end

--- Runs the backward pass of a loss, seeded with the loss scale. With several optimizers, the tape
--- is kept until the turn ends, so that a later loss may share a part of it. Gradients of several
--- passes add up until the optimizer's step. If they are in fp16 or bf16, call
--- optimizer:accumulates(true) before the loop, so that they add up in f32. Further arguments go to
--- the scale_loss of a loss scaler class.
function Session:backward(loss, ...)
  local s = inside(self, "backward")
  expect(tensor.is_tensor(loss), loss,
    "session:backward: expected the loss to be a tensor of one element")
  self.passes, self.unused = self.passes + 1, self.unused + 1
  Trainer.backward(self, s, self.passes, loss, ...)
  local before = self.passes > 1 and self.loss_sum
  self.loss_sum = before and autograd.no_grad(function() return before + loss end) or loss
end

local function entry_of(self, opt)
  if opt == nil and #self.entries == 1 then return self.entries[1] end
  local names = {}
  for i, e in ipairs(self.entries) do
    if opt == e.opt or opt == e.name then return e end
    names[i] = e.name
  end
  raise("session:step: expected one of the session's optimizers (%s), got %s%s",
    table.concat(names, ", "), M_ffi.value_text(opt),
    type(opt) == "string" and nearest.hint(opt, names) or "")
end

local probe = M_ffi.new("eng_record")

-- Returns the scale of the next backward pass: the policy's scale, or the scale of step s as long
-- as some optimizer still has gradients of that scale.
local function next_scale(self, s)
  if self.policy:scale() == s.scale then return s.scale end
  for _, e in ipairs(self.entries) do
    check(C.eng_params_stats(probe, nil, e.opt.params, 1, 0))
    if probe.count > 0 then return s.scale end
  end
  return self.policy:scale()
end

--- Makes one step of an optimizer with its gradients: computes the statistics, asks the policy for
--- a verdict, and makes or skips the update. The update unscales and clips in the same pass. opt:
--- the optimizer or its name; may be nil if there is only one. The optimizer's gradients are empty
--- afterwards. options: clip (the limit of this step), tokens (the number of tokens trained on in
--- this step). Returns { skipped = boolean, action = "step", "skip", "retry", "stop" or "rollback",
--- reason = text or nil, step = number, loss = the sum over the backward passes, scale = the scale
--- of these gradients }.
function Session:step(opt, o)
  local s, entry = inside(self, "step"), entry_of(self, opt)
  o = tensor.read_named(o, "session:step", "clip tokens")
  expect(o.clip == nil or type(o.clip) == "number" and o.clip >= 0, o.clip,
    "session:step: expected clip to be a number >= 0 (0: no clipping)")
  if o.tokens ~= nil then arguments.want_whole(o.tokens, "session:step", "tokens", 0) end
  raise_if(entry.opt._clip or entry.opt._clip_value, "session:step: clip_grad_norm and " ..
    "clip_grad_value would clip scaled gradients; hint: s:step(optimizer, { clip = 1 })")
  local union, outcome = self.optimizer, self.outcome
  if union.activate then
    union:activate(entry)
    signals.values.optimizer = entry.number
  end
  s.first, s.entry = entry.first, entry
  s.lr, s.tokens = self.fixed_lr or entry.opt.lr, o.tokens or 0
  -- without a loss, Session.fetch raises an error below
  self.losses[0] = self.loss_sum or tensor.full({}, 0 / 0)
  self:request_statistics(s)
  local clip, tokens = self.clip, self.tokens
  if o.clip then self.clip = o.clip > 0 and o.clip or nil end
  local record, verdict = self:settle(s)
  self.clip = clip
  local now = machine.clock()
  loop.show(self, outcome, record, verdict,
    (self.tokens - tokens) / math.max(now - self.last_at, 1e-9))
  self.last_at, self.unused, self.passes = now, 0, 0
  entry.opt:zero_grad()
  local reason = M_ffi.string(verdict.reason)
  local result = { skipped = not s.updated, action = verdict:what(), step = s.step, scale = s.scale,
    loss = record.loss, reason = reason ~= "" and reason or nil }
  local scale = next_scale(self, s)
  self:attempt().scale = scale
  return result
end

-- ------------------------------------------------------------------ what differs from a trainer

--- Fills the record of a step as Trainer:fetch does, from the parameters of the optimizer that
--- steps. Raises an error if they have no gradients, or gradients without the loss scale.
function Session:fetch(s)
  local stats, n = self.stats, #s.entry.opt.list
  M_ffi.ffi.fill(stats, M_ffi.ffi.sizeof("eng_tensor_stats") * #self.optimizer.list)
  local record = Trainer.fetch(self, s)
  if record.count == 0 then
    raise("session:step: the optimizer%s has no gradients; hint: first call s:backward(loss) " ..
      "with a loss that depends on its parameters", #self.entries > 1 and " " .. s.entry.name or "")
  elseif not self.loss_sum then
    raise("session:step: the gradients of this turn do not carry the loss scale; hint: " ..
      "s:backward(loss) instead of loss:backward()")
  end
  if record.first_bad >= 0 and n > 0 then record.first_bad = record.first_bad + s.first end
  return record
end

--- Does what Trainer:decide does. A retry or a rollback needs a single optimizer and the option
--- `data` (the loop's loader). Without them, such a verdict is refused and becomes a skip or a
--- step.
function Session:decide(s, record)
  local verdict = Trainer.decide(self, s, record)
  local action = verdict:what()
  local goes_back = action == "retry" or action == "rollback"      -- in the data
  self.instead = nil
  if goes_back and not (self.own_data and #self.entries == 1) then
    verdict.action = record.overflow ~= 0 and C.ENG_ACTION_SKIP or C.ENG_ACTION_STEP
    self.instead, verdict.failed = verdict:what(), 1
    verdict.reason = ("session: policy %s asks for a %s, which needs a single optimizer and " ..
      "the option `data` (the loop's loader)"):format(self.policy.name, action)
  end
  return verdict
end

--- Does what Trainer:note_recipe does, for the recipe of all optimizers.
function Session:note_recipe(step)
  self.optimizer.precision = one_recipe(self.entries)
  Trainer.note_recipe(self, step)
end

--- Returns the loop's state for a checkpoint.
function Session:loop_state()
  local state = { turn = self.turn, optimizers = {} }
  for _, e in ipairs(self.entries) do
    state.optimizers[e.name] = { updates = e.opt.updates, lr = e.opt.lr, first_lr = e.first_lr }
  end
  return state
end

--- Restores each optimizer's number of updates. Restores its learning rate too, unless the script
--- now begins with a different rate than in the saved run. The moments are not restored here but in
--- restore.spread.
function Session:restore_loop(state)
  for _, e in ipairs(self.entries) do
    local saved = state and state.optimizers[e.name]
    if saved then
      e.updates, e.opt.updates = saved.updates, saved.updates
      if saved.first_lr == e.first_lr then e.opt.lr = saved.lr end
    end
  end
end

function Session:__tostring()
  return ("session: %s, %d parameters, precision %s, policy %s, turn %d, step %d, %s, "
    .. "%d skipped"):format(self.optimizer.name, self.model:count(), self.precision.name,
    self.policy.name, self.turn, self.steps_done, show.counted(self.updates, "update"),
    self.skipped)
end

return M
