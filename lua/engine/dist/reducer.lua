-- The reducer: the trainer's part of data parallelism, that is, what a step does differently on
-- several ranks (ranks.lua). Each rank computes its share of the step's batches. Gradients are
-- summed over ranks as backward completes them. One message per step makes the record, and so the
-- verdict, the same on every rank. The message of the next record carries a hash of the verdict; if
-- the hashes differ, the run stops. Only rank 0 prints, writes the run's files (except the other
-- ranks' checkpoint shards) and listens to clients. Rank 0 passes the clients' requests to the
-- other ranks between two steps.
--
-- The batches of a step are numbered from 0 over all ranks; a rank's first batch has the number
-- rank * accumulate. Jobs with the same product of ranks and accumulate therefore see the same
-- batches and random numbers. Owned by the trainer; called by train/, run/ and agreement.lua. A
-- single process has a reducer of one rank, which costs nothing.
local M_ffi = require "engine.base.ffi"
local batch_norm_over = require "engine.tensor.batch_norm_over"
local identity = require "engine.dist.identity"
local machine = require "engine.base.machine"
local nearest = require "engine.base.nearest"
local random = require "engine.base.random"
local ranks = require "engine.dist.ranks"
local reduction = require "engine.dist.reduction"
local show = require "engine.base.show"
local signals = require "engine.policy.signals"
local within = require "engine.base.within"

local C, check, fail_if, ffi = M_ffi.C, M_ffi.check, M_ffi.fail_if, M_ffi.ffi

local M = {}

local Reducer = {}
Reducer.__index = Reducer

-- ------------------------------------------------------------------ making

-- Indices (from 0) into the sums and the maxima of a record's message. hash is a checksum of the
-- last verdict; order is a checksum of the order in which ZeRO-3's weights arrived. interrupted is
-- the number of the POSIX signal that ends the run, or 0; hangup counts SIGHUPs. drawn: see
-- note_drawn. wish is 1 if rank 0 has a client's request for all ranks, unknown is 1 if a signal of
-- the script has a new name. minus_hash and minus_order are negated. Their maximum is the negated
-- minimum over the ranks, so the ranks agree if it is the negative of the maximum of hash or order.
local NUMBERS = { loss = 0, tokens = 1 }
local MAXIMA = { elapsed = 0, hash = 1, minus_hash = 2, interrupted = 3, hangup = 4, wish = 5,
  drawn = 6, unknown = 7, order = 8, minus_order = 9 }
local N_SUMS, N_MAXIMA = 2, 10
local RULES = signals.rules          -- how ranks combine a signal

-- Finds the parameters that only some ranks hold. Modules such as nn.moe declare them in `_apart`.
-- Returns three values: { [name] = { held = whether this rank holds it, shape = its whole shape } }
-- for these parameters; an array with 1 for each of them and 0 for every other parameter of the
-- optimizer's list; the group of ranks that hold the same experts. Returns nil if all ranks hold
-- everything.
local function find_apart(model, list)
  local apart, group = {}, nil
  if not model.apply then return nil end
  model:apply(function(m, path)
    local own = rawget(m, "_apart")
    if not own then return end
    fail_if(group and group ~= own.group, "trainer: '%s' divides its experts over a group of %d " ..
      "ranks, an earlier layer over another group; hint: give every nn.moe the same experts_over",
      path, own.group.size)
    group = own.group
    for name, what in pairs(own.parameters) do
      apart[(path ~= "" and path .. "." or "") .. name] = what
    end
  end)
  if not group then return nil end
  local marks = ffi.new("uint8_t[?]", #list)
  for i, p in ipairs(list) do marks[i - 1] = apart[p.name] and 1 or 0 end
  return apart, marks, group.across
end

--- Returns the whole shape of a parameter, whichever rank holds it.
function Reducer:shape(p)
  local apart = self.apart and self.apart[p.name]
  return apart and apart.shape or p.tensor.shape
end

--- Returns a number for rank r. Two ranks hold the same parameters if their numbers are equal.
function Reducer:holder(r) return self.apart and r % (self.size / self.holders.size) or 0 end

--- Makes the reducer of a trainer with the options `o`. Connects the ranks and raises an error if
--- they were started differently. Called before the run opens its files.
function M.new(trainer, o)
  local self = setmetatable({ trainer = trainer, rank = ranks.rank(), size = ranks.size(),
    signals = signals.values, ended_by = 0, decided = "", names = {} }, Reducer)
  self.many = self.size > 1
  self.own_pass = self.many and o.mode ~= "lagged"   -- whether record() itself reads the gradients
  self.comm_dtype = self.many and o.comm_dtype or "own"
  -- level: the ZeRO level, 0 to 3. zero: a rank updates only its part of the weights. divided: a
  -- rank keeps only its part of the gradients. parted: a rank keeps only its part of the weights.
  self.level = self.many and o.zero or 0
  self.zero, self.divided, self.parted = self.level > 0, self.level > 1, self.level > 2
  if not self.many then return self end
  if o.rank_timeout then C.eng_comm_timeout(o.rank_timeout) end
  ranks.world()
  self.signals = {}
  self.apart, self.marks, self.holders = find_apart(trainer.model, trainer.optimizer.list)
  ranks.compare(identity(trainer, o, function(p) return self:shape(p) end, self.apart))
  self.units = self.parted and reduction.units(trainer.optimizer) or nil
  self.options = reduction.options({ bucket = o.bucket, comm_dtype = o.comm_dtype, zero = o.zero,
    whole = reduction.whole(trainer.optimizer, o.zero), units = self.units }, self.marks,
    self.holders and self.holders.comm)
  self.reduction = reduction.of(trainer.optimizer, self.options)
  if self.zero then trainer.optimizer.state:shard(self.reduction, self.parted) end
  self:make_room()
  return self
end

--- Returns a text about the link between ranks that train on cards; nil on the CPU and for one
--- process.
function Reducer:text()
  return self.many and machine.device() == "cuda" and "ranks: " .. ranks.text() or nil
end

--- Returns the job in words, "4 ranks, ZeRO-1, comm dtype bf16"; nil for one process.
function Reducer:described()
  return self.many and ranks.job_text(self.size, self.level, self.comm_dtype) or nil
end

function Reducer:make_room()
  self.sums = ffi.new("double[?]", N_SUMS + 2 * #self.names)
  self.maxima = ffi.new("double[?]", N_MAXIMA + #self.names)
end

--- Returns the group of all ranks, or nil for one process.
function Reducer:comm() return self.many and ranks.world() or nil end

--- Tells the optimizer whether gradients of several micro-batches add up (Optimizer:accumulates).
--- Called when the number of micro-batches has changed since the reducer was made. With ZeRO the
--- gradients keep their format, because each rank's part of the gradients depends on the format.
function Reducer:accumulates(on)
  if not self.zero then self.trainer.optimizer:accumulates(on) end
end

--- Copies rank 0's buffers to every rank. Each rank updates its buffers, such as the running
--- statistics of batch norm, from its own data. Called before a checkpoint and an evaluation.
function Reducer:share_buffers()
  for _, p in ipairs(self.many and self.trainer.model:parameters() or {}) do
    if p.role == "buffer" and not (self.apart and self.apart[p.name]) then
      check(C.eng_comm_broadcast_tensor(ranks.world(), p.tensor, 0))
    end
  end
end

--- Gives all ranks the same weights, and then compares the checksums of these weights. `spread` is
--- a function that loads a checkpoint's weights on every rank; without it, rank 0's weights are
--- broadcast. If `spread` is given, weights are not compared on a single rank or with ZeRO-3,
--- because there no two ranks hold the same weights.
function Reducer:start(spread)
  local trainer = self.trainer
  if spread and (self.parted or not self.many) then   -- no two ranks hold the same weights
    spread()
    return self:drop_weights()
  end
  if self.parted then check(C.eng_parallel_whole(self.reduction)) end
  if spread then spread()
  else
    local state = trainer.model:state()
    for _, name in ipairs(nearest.keys(state)) do   -- one order on all ranks
      local apart = self.apart and self.apart[name]
      if not apart or apart.held then
        local comm = apart and self.holders.comm or ranks.world()
        check(C.eng_comm_broadcast_tensor(comm, state[name], 0))
      end
    end
  end
  local params = trainer.optimizer.params
  check(C.eng_params_refresh(params))
  local sum = tostring(C.eng_params_checksum_of(params, self.marks, 0))
  local own = self.apart and tostring(C.eng_params_checksum_of(params, self.marks, 1)) or ""
  local others = ranks.from_all(sum .. " " .. own)
  for i, text in ipairs(others) do
    local other, other_own = text:match("^(%S+) (%S*)$")
    local alike = self:holder(i - 1) == self:holder(self.rank)
    fail_if(other ~= sum or alike and other_own ~= own, "rank %d's weights (checksum %s) differ " ..
      "from rank %d's (%s), although both received the same weights; hint: suspect the memory " ..
      "or the network of their machines", i - 1, text, self.rank, others[self.rank + 1])
  end
  if self.parted then self:drop_weights() end
end

-- ------------------------------------------------------------------ ZeRO-3: divided weights

--- Drops the weights that other ranks own. From then on, an operation that needs dropped weights
--- receives them from the other ranks before it runs.
function Reducer:drop_weights()
  check(C.eng_params_refresh(self.trainer.optimizer.params))
  if self.parted then check(C.eng_parallel_leave(self.reduction)) end
end

--- Runs f with all weights on this rank and returns its results. Every rank must call this
--- function.
function Reducer:whole(f)
  if not self.parted then return f() end
  return within(function() check(C.eng_parallel_whole(self.reduction)) end,
    function() check(C.eng_parallel_leave(self.reduction)) end, f)
end

local own_from, own_to = ffi.new("int64_t[1]"), ffi.new("int64_t[1]")

--- Returns the range [from, to) of the elements that this rank updates in the optimizer's parameter
--- i (from 1).
function Reducer:own_part(i)
  C.eng_parallel_own(own_from, own_to, self.reduction, i - 1)
  return tonumber(own_from[0]), tonumber(own_to[0])
end

--- Returns the optimizer's parameters in order, as this rank holds them, as a list of { name =,
--- tensor =, from = }. With ZeRO-3, a tensor has this rank's elements of the parameter, from the
--- element `from` on; otherwise it has all elements, and `from` is 0.
function Reducer:weights()
  local list = {}
  for i, p in ipairs(self.trainer.optimizer.list) do
    local x, from = p.tensor, 0
    if self.parted and not (self.apart and self.apart[p.name]) then
      x, from = M_ffi.Tensor(), self:own_part(i)
      check(C.eng_parallel_piece(x, self.reduction, i - 1))
    end
    list[i] = { name = p.name, tensor = x, from = from }
  end
  return list
end

-- ------------------------------------------------------------------ a step

-- `s` below is the table that Trainer:attempt makes for each step. s.place is the position in the
-- stream of random numbers when the step began.

-- Skips n batches. Does nothing if each rank has its own data.
local function skip(data, n)
  if n == 0 or data.sharded then return end
  if data.skip then data:skip(n) return end
  for _ = 1, n do data:next() end
end

--- Skips the data of `steps` steps. Called between two steps.
function Reducer:skip_steps(steps)
  local data, n = self.trainer.data, steps * self.trainer.accumulate
  if data.sharded then for _ = 1, n do data:next() end
  else skip(data, n * self.size) end
end

--- Begins a step: skips the batches of lower ranks. Between two steps all ranks are at the same
--- position in the data.
function Reducer:begin()
  if self.many then self.reduction = reduction.of(self.trainer.optimizer, self.options) end
  batch_norm_over.begin()
  skip(self.trainer.data, self.rank * self.trainer.accumulate)
end

-- Updates self.drawn, the most Philox blocks that one micro-batch of this rank has drawn in this
-- step. Called before each micro-batch and after the last one, unless the step has only one
-- micro-batch over all ranks. `first` is true in the call before the first micro-batch.
local function note_drawn(self, s, first)
  self.drawn = first and 0
    or math.max(self.drawn, tonumber(random.place().counter - s.place.counter))
end

--- Seeds the random numbers of this rank's micro-batch i. The seed depends on the micro-batch's
--- number in the step, over all ranks, and not on the rank that runs the micro-batch.
function Reducer:seed_batch(s, i)
  local accumulate, place = self.trainer.accumulate, s.place
  if accumulate * self.size == 1 then return end
  note_drawn(self, s, i == 1)
  local number = self.rank * accumulate + i - 1
  random.go { seed = place.seed + number * 0x9E3779B97F4A7C15ULL, counter = place.counter }
end

--- Called before the backward pass of each micro-batch i. Begins the reduction of the gradients
--- over all ranks: with ZeRO-2 and ZeRO-3 before every pass, otherwise only before the last one.
function Reducer:backward_begins(i)
  if not self.many then return end
  if self.divided and i > 1 then
    check(C.eng_parallel_finish(self.reduction))
    check(C.eng_parallel_begin(self.reduction, C.ENG_PASS_MORE))
  elseif self.divided or i == self.trainer.accumulate then
    check(C.eng_parallel_begin(self.reduction, C.ENG_PASS_FIRST))
  end
end

--- Runs f, a backward pass whose gradients are not reduced over the ranks. From ZeRO-2 on, the
--- gradients of this pass are dropped.
function Reducer:alone(f)
  if not self.divided then return f() end
  check(C.eng_parallel_begin(self.reduction, C.ENG_PASS_ALONE))
  local good, message = pcall(f)
  if not good then
    C.eng_backward_abort()
    C.eng_parallel_cancel(self.reduction)
    error(message, 0)
  end
  check(C.eng_parallel_finish(self.reduction))
end

--- Completes the norms of a reference backward pass; does nothing if all ranks hold all parameters.
--- norms [n] has the norm of each parameter. Parameters that only other ranks hold get the norms
--- that these ranks computed, and norm[0] becomes the norm over all parameters.
function Reducer:share_norms(norm, norms, n)
  if not self.apart then return end
  check(C.eng_comm_all_reduce(ranks.world(), norms, n, M_ffi.dtype.f64, C.ENG_MAX))
  local squares = 0
  for i = 0, n - 1 do squares = squares + norms[i] * norms[i] end
  norm[0] = math.sqrt(squares)
end

-- Sets the position in the stream of random numbers to the position at the start of the step plus
-- `drawn`, the most Philox blocks that a micro-batch has drawn.
local function continue_numbers(s, drawn)
  random.go { seed = s.place.seed, counter = s.place.counter + drawn }
end

--- Called after the last backward pass. Waits until all gradients are reduced, and skips the
--- batches of higher ranks. Random numbers that the loader draws while it skips do not advance the
--- stream.
function Reducer:finish(s)
  local accumulate = self.trainer.accumulate
  if self.many then check(C.eng_parallel_finish(self.reduction)) end
  if accumulate * self.size == 1 then return end
  note_drawn(self, s, false)
  if self.many and not self.own_pass then self.drawn = ranks.reduce(self.drawn, "max") end
  skip(self.trainer.data, (self.size - 1 - self.rank) * accumulate)
  continue_numbers(s, self.drawn)
end

--- Computes the statistics of the gradients for the update and the record, in lagged mode on the
--- CPU. Each rank makes the pass over its own part of the gradients, and every rank gets the same
--- statistics. Returns nil on a single rank, in sync mode, and on cards, where each card computes
--- the statistics of all gradients.
function Reducer:known_statistics(s)
  if not self.many or self.own_pass or machine.device() ~= "cpu" then return nil end
  local record, none, needs = ffi.new("eng_record"), ffi.new("double[1]"), self.trainer.needs
  self.known = self.known or ffi.new("eng_tensor_stats[?]", #self.trainer.optimizer.list)
  check(C.eng_parallel_stats(record, self.known, self.reduction, s.scale,
    bit.bor(needs, C.ENG_NEED_NORM), none, 0, none, 0))
  if bit.band(needs, C.ENG_NEED_HIST) ~= 0 then
    check(C.eng_parallel_histograms(self.known, self.reduction))
  end
  return self.known
end

--- Saves in `s` some inputs of the record, because the next step may overwrite them: the signals;
--- first_bad() of batch_norm_over.lua, which says when this rank first gave inf or nan to a
--- synchronized batch norm; and, if the record is delayed, the tensors that overflowed on each
--- rank.
function Reducer:remember(s, delayed)
  s.signals, s.first_bad = signals.values, batch_norm_over.first_bad()
  if not delayed then return end
  s.signals = {}
  for name, value in pairs(signals.values) do s.signals[name] = value end
  if self.many then s.culprits = self:find_culprits() end
end

local function put_signals(self, own)
  self.maxima[MAXIMA.unknown] = 0
  for name in pairs(own) do
    if not self.names[name] then self.maxima[MAXIMA.unknown] = 1 end
  end
  for i, name in ipairs(self.names) do
    local value, at = own[name], N_SUMS + 2 * i - 2
    self.sums[at], self.sums[at + 1] = value or 0, value and 1 or 0
    self.maxima[N_MAXIMA + i - 1] = value or -math.huge
  end
end

local function take_signals(self)
  for i, name in ipairs(self.names) do
    local sum, n, most = self.sums[N_SUMS + 2 * i - 2], self.sums[N_SUMS + 2 * i - 1],
      self.maxima[N_MAXIMA + i - 1]
    local rule = RULES[name] or "mean"
    if n > 0 then
      self.signals[name] = rule == "max" and most or rule == "sum" and sum or sum / n
    end
  end
end

-- Reduces sums and maxima over all ranks.
local function reduce_numbers(self)
  local f64, world = M_ffi.dtype.f64, ranks.world()
  check(C.eng_comm_all_reduce(world, self.sums, N_SUMS + 2 * #self.names, f64, C.ENG_SUM))
  check(C.eng_comm_all_reduce(world, self.maxima, N_MAXIMA + #self.names, f64, C.ENG_MAX))
end

-- Called on all ranks when a rank has published a signal with a new name. Exchanges the names, and
-- reduces all values again.
local function agree_on_signals(self, published)
  local own = {}
  for name in pairs(published) do own[#own + 1] = name .. "\1" .. (RULES[name] or "mean") end
  for _, text in ipairs(ranks.from_all(table.concat(own, "\0"))) do
    for name, rule in text:gmatch("([^%z\1]+)\1([^%z\1]+)") do
      fail_if(RULES[name] and RULES[name] ~= rule,
        "signal '%s' is reduced by '%s' on one rank and by '%s' on another; hint: give " ..
        "engine.signal the same rule on every rank", name, RULES[name], rule)
      RULES[name] = rule
      if not self.names[name] then self.names[#self.names + 1], self.names[name] = name, true end
    end
  end
  table.sort(self.names)
  self:make_room()
  put_signals(self, published)
  reduce_numbers(self)
  take_signals(self)
end

local SIGTERM = 15

-- Returns the number of the POSIX signal that interrupted this process, or nil.
local function interrupted_here()
  if C.eng_interrupted() == 0 then return nil end
  local signal = C.eng_interrupt_signal(0)
  return signal > 0 and signal or SIGTERM            -- 0: the script called eng_interrupt itself
end

--- Makes a step's record the same on every rank. In sync mode this function makes the pass over the
--- gradients, each rank over its own part of them, and fills `stats`, the statistics per tensor.
--- In lagged mode every rank already has the statistics of the summed gradients (known_statistics),
--- and this function reduces only the other numbers, such as the loss and the signals.
function Reducer:record(record, stats, s)
  if not self.many then return end
  local trainer, needs, sums, maxima = self.trainer, self.trainer.needs, self.sums, self.maxima
  local hash = C.eng_crc32c(0, self.decided, #self.decided)
  sums[NUMBERS.loss], sums[NUMBERS.tokens] = record.loss, s.tokens
  maxima[MAXIMA.elapsed] = self.rank == 0 and record.elapsed or 0
  maxima[MAXIMA.hash], maxima[MAXIMA.minus_hash] = hash, -hash
  maxima[MAXIMA.interrupted], maxima[MAXIMA.hangup] = interrupted_here() or 0, C.eng_hangups()
  maxima[MAXIMA.wish] = self.rank == 0 and trainer.control:wishes() and 1 or 0
  maxima[MAXIMA.drawn] = self.drawn
  local order = self.parted and C.eng_parallel_order(self.reduction) or 0
  maxima[MAXIMA.order], maxima[MAXIMA.minus_order] = order, -order
  put_signals(self, s.signals)
  if self.own_pass then
    check(C.eng_parallel_stats(record, stats, self.reduction, s.scale, needs, sums,
      N_SUMS + 2 * #self.names, maxima, N_MAXIMA + #self.names))
    if self.drawn ~= maxima[MAXIMA.drawn] then continue_numbers(s, maxima[MAXIMA.drawn]) end
  else reduce_numbers(self) end
  record.loss, record.elapsed = sums[NUMBERS.loss] / self.size, maxima[MAXIMA.elapsed]
  s.tokens = sums[NUMBERS.tokens]
  self.ended_by, self.hangup = maxima[MAXIMA.interrupted], maxima[MAXIMA.hangup] > 0
  self.wish = maxima[MAXIMA.wish] > 0
  if maxima[MAXIMA.hash] ~= -maxima[MAXIMA.minus_hash] then self:differ() end
  fail_if(maxima[MAXIMA.order] ~= -maxima[MAXIMA.minus_order],
    "zero=3: the ranks did not use the same weights in the same order; hint: run the same " ..
    "operations on every rank, or use zero=2")
  take_signals(self)
  if maxima[MAXIMA.unknown] > 0 then agree_on_signals(self, s.signals) end
  s.signals = self.signals
  if record.overflow == 0 then self.found, self.origin = nil, nil
  else
    if self.apart then check(C.eng_parallel_gather_flags(self.reduction)) end
    self.found = s.culprits or self:find_culprits()
    self:find_origin(s.first_bad)
  end
  -- Histograms of single tensors make a large message, so they are reduced only if something reads
  -- them. All ranks make the same choice here.
  local wanted = bit.band(needs, C.ENG_NEED_HIST) ~= 0
    and (bit.band(needs, C.ENG_NEED_TENSORS) ~= 0 or record.overflow ~= 0
      or s.step % trainer.run_files.stats_every == 0)
  if wanted and self.own_pass then check(C.eng_parallel_histograms(stats, self.reduction)) end
end

-- Returns a checksum of texts, in hexadecimal.
local function checksum(texts)
  local text = table.concat(texts, " ")
  return ("%08x"):format(C.eng_crc32c(0, text, #text))
end

--- Returns a policy's last verdict, on `record`, as text. Verdicts that differ in any field but
--- `reason` and `log` have different texts (spec/dist/verdict_text_spec.lua). groups: the names of
--- the groups that can have separate scales; n: the number of tensors.
function M.verdict_text(policy, record, verdict, groups, n)
  local parts = { ("step %d at scale %s: %s, scale %s, clip %s, lr x%s"):format(
    tonumber(record.step), show.exact(record.scale), verdict:what(), show.exact(verdict.scale),
    show.exact(verdict.clip), show.exact(verdict.lr_mul)) }
  for i, group in ipairs(groups) do
    local scale = policy.group_scale and policy:group_scale(i)
    if scale and scale ~= verdict.scale then
      parts[#parts + 1] = ("%s %s"):format(group, show.exact(scale))
    end
  end
  if verdict.action == C.ENG_ACTION_ROLLBACK then
    parts[#parts + 1] = ("back %d, skip %d"):format(tonumber(verdict.back), tonumber(verdict.skip))
  end
  local bias_step = tonumber(verdict.bias_step)
  if verdict.each ~= 0 or verdict.update_clip + verdict.spike_clip + bias_step > 0 then
    local numbers = { show.exact(verdict.update_clip), show.exact(verdict.spike_clip),
      show.exact(bias_step) }
    for i = 0, n * C.ENG_EACH - 1 do
      numbers[i + 4] = show.exact(C.eng_policy_each(policy.handle, i % C.ENG_EACH,
        math.floor(i / C.ENG_EACH)))
    end
    parts[#parts + 1] = ("update clip %s, spike clip %s, single tensors %s"):format(numbers[1],
      numbers[2], checksum(numbers))
  end
  local factors = {}
  for name, factor in pairs(policy.logit_muls and policy:logit_muls() or {}) do
    factors[#factors + 1] = name .. " " .. show.exact(factor)
  end
  table.sort(factors)
  if factors[1] then parts[#parts + 1] = "logit factors " .. checksum(factors) end
  return ("%s (policy %s%s)"):format(table.concat(parts, ", "), policy.name,
    policy.hash and " " .. policy:hash() or "")
end

--- Stores a verdict. record() of the next step compares it with the other ranks' verdicts. With
--- ZeRO this function already compares them, because the update needs all ranks.
function Reducer:note_verdict(record, verdict)
  if not self.many then return end
  local trainer = self.trainer
  self.decided = M.verdict_text(trainer.policy, record, verdict, trainer.groups.groups,
    #trainer.optimizer.list)
  if self.zero then self:agree() end
end

--- Compares the ranks' last verdicts now. Also called at the end of a run.
function Reducer:agree()
  if not self.many then return end
  local hash = C.eng_crc32c(0, self.decided, #self.decided)
  local both = ffi.new("double[2]", hash, -hash)
  check(C.eng_comm_all_reduce(ranks.world(), both, 2, M_ffi.dtype.f64, C.ENG_MAX))
  if both[0] ~= -both[1] then self:differ() end
end

--- Raises an error that lists each verdict with its ranks.
function Reducer:differ()
  local of, order = {}, {}
  for i, text in ipairs(ranks.from_all(self.decided)) do
    if not of[text] then order[#order + 1], of[text] = text, {} end
    table.insert(of[text], i - 1)
  end
  local lines = {}
  for i, text in ipairs(order) do
    lines[i] = ("  %s: %s"):format(ranks.names(of[text]), show.cut(text, 500))
  end
  error("the policies of the ranks decided differently, so the weights would drift apart:\n" ..
    table.concat(lines, "\n")
    .. "\nhint: policies and scaler classes must decide from the record only, which is the same " ..
      "on all ranks", 0)
end

--- Called after an update. With ZeRO-1 and ZeRO-2 it sends every rank's part of the weights to all
--- ranks that hold them; with ZeRO-3 it does so for experts, and drops the other ranks' parts of
--- all other weights.
function Reducer:updated()
  if self.zero then check(C.eng_parallel_gather(self.reduction)) end
end

--- Returns the number of the POSIX signal that ends the run, or nil. With several ranks, this is
--- the highest number on any rank, as reduced with the last record.
function Reducer:interrupted()
  if not self.many then return interrupted_here() end
  return self.ended_by > 0 and self.ended_by or nil
end

-- ------------------------------------------------------------------ ranks that overflowed

-- the bits of eng_parallel_flags for kinds of overflow
local BITS = { { 2, "inf" }, { 4, "nan" }, { 8, "inf only in the comm dtype" } }

-- Returns what overflowed in the last reduction, { { rank =, tensor =, what = "inf" } ... }. For
-- each rank and each kind in BITS, the list names at most one tensor: the first in the optimizer's
-- order whose gradient from that rank is of this kind.
function Reducer:find_culprits()
  local found = {}
  for rank = 0, self.size - 1 do
    for _, kind in ipairs(BITS) do
      for i, p in ipairs(self.trainer.optimizer.list) do
        if bit.band(C.eng_parallel_flags(self.reduction, rank, i - 1), kind[1]) ~= 0 then
          found[#found + 1] = { rank = rank, tensor = p.name, what = kind[2] }
          break
        end
      end
    end
  end
  return found
end

--- Puts the cause first among the culprits. Inf and nan spread to other ranks through synchronized
--- batch norms. The ranks that were the first to give inf or nan to a batch norm (first_bad of
--- batch_norm_over.lua) come first, and `origin` names them. Among these ranks, and among the other
--- ranks, inf comes before nan.
function Reducer:find_origin(first_bad)
  local of, first, ranks_of, key = ffi.new("double[?]", self.size), math.huge, {}, {}
  check(C.eng_comm_all_gather(ranks.world(), of, ffi.new("double[1]", first_bad), 8))
  for rank = 0, self.size - 1 do first = math.min(first, of[rank]) end
  for rank = 0, self.size - 1 do
    if of[rank] == first then ranks_of[#ranks_of + 1] = rank end
  end
  self.origin = first < math.huge and ("inf or nan spread to other ranks through a batch norm, " ..
    "from the %s of %s"):format(first % 2 == 0 and "input" or "gradients", ranks.names(ranks_of))
    or nil
  for i, c in ipairs(self.found) do
    key[c] = (of[c.rank] == first and 0 or 2) + (c.what == "nan" and 1 or 0) + i / (#self.found + 1)
  end
  table.sort(self.found, function(a, b) return key[a] < key[b] end)
end

--- Returns the result of find_culprits() for the step of the last record. Returns an empty list if
--- that step did not overflow or there is only one rank.
function Reducer:culprits() return self.found or {} end

return M
