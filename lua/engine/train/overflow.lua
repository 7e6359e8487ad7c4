-- Handles the overflows of a run: writes the text of their events, runs a step again (trap.lua),
-- and gives advice when no loss scale helps. Owned by the trainer, which calls look() for every
-- step that overflowed and left the weights unchanged. Called by loop.lua and run/run.lua, too.
local M_ffi = require "engine.base.ffi"
local buffers = require "engine.train.buffers"
local json = require "engine.base.json"
local show = require "engine.base.show"
local random = require "engine.base.random"
local ranks = require "engine.dist.ranks"
local trap = require "engine.train.trap"

local C, check = M_ffi.C, M_ffi.check

local M = {}

local Overflows = {}
Overflows.__index = Overflows

local STUCK = 10        -- a run is stuck after this many overflows in a row without a lower scale

function M.new(trainer, every_time)
  return setmetatable({ trainer = trainer, every_time = every_time, in_row = 0, stuck = 0,
    told = {} }, Overflows)
end

-- Returns the names of the first and the last parameter, in the model's order, whose gradients hold
-- an inf (field "inf") or a nan (field "nan"); nil if there is none.
local function found_in(self, stats, field)
  local first, last
  for i, p in ipairs(self.trainer.optimizer.list) do
    if stats[i - 1][field] > 0 then first, last = first or p.name, p.name end
  end
  return first, last
end

-- If only the sum over ranks overflowed, returns a text that says so. Otherwise returns nil.
local function of_sum(trainer)
  local reducer = trainer.reducer
  if not reducer.many or reducer:culprits()[1] then return nil end
  return ("each rank's own gradients are finite, but their sum in comm dtype %s is not"):format(
    reducer.comm_dtype)
end

--- Returns the text and the JSON of an overflow's event. reason: the verdict's reason, which ends
--- the text, or "".
function Overflows:text(record, stats, reason)
  local parts, first, last = {}, {}, {}
  for i, kind in ipairs { "inf", "nan" } do
    first[kind], last[kind] = found_in(self, stats, kind)
    parts[i] = ("%d %s%s%s"):format(tonumber(record[kind]), kind, first[kind] and ", first in " ..
      first[kind] or "", last[kind] ~= first[kind] and ", last in " .. last[kind] or "")
  end
  local culprits = self.trainer.reducer:culprits()
  for i = 1, math.min(#culprits, 4) do
    local c = culprits[i]
    parts[#parts + 1] = ("%s from rank %d, first in %s"):format(c.what, c.rank, c.tensor)
  end
  if #culprits > 4 then
    parts[#parts + 1] = ("%d more such cases"):format(#culprits - 4)
  end
  parts[#parts + 1] = of_sum(self.trainer) or self.trainer.reducer.origin
  local text = table.concat(parts, "; ") .. (reason ~= "" and "; " .. reason or "")
  return text, json.encode { inf = tonumber(record.inf), nan = tonumber(record.nan),
    first_inf = first.inf, first_nan = first.nan, last_inf = last.inf, last_nan = last.nan,
    scale = record.scale, ranks = #culprits > 0 and culprits or nil }
end

--- Describes an overflow in one line: "overflow: 3 inf, first in head.weight (rank 1); step
--- skipped, loss scale 2^16 -> 2^15".
function Overflows:line(record, verdict)
  local counts, culprit = {}, self.trainer.reducer:culprits()[1]
  for _, kind in ipairs { "inf", "nan" } do
    local n = tonumber(record[kind])
    if n > 0 then counts[#counts + 1] = ("%d %s"):format(n, kind) end
  end
  local first = self.trainer.optimizer.list[record.first_bad + 1]
  local scale, next_scale = show.scale(record.scale), show.scale(verdict.scale)
  return ("overflow: %s, first in %s; %sloss scale %s"):format(table.concat(counts, " and "),
    culprit and ("%s (rank %d)"):format(culprit.tensor, culprit.rank) or first and first.name
    or "the sum over ranks", verdict.action == C.ENG_ACTION_STEP and "" or "step skipped, ",
    scale == next_scale and "stays " .. scale or scale .. " -> " .. next_scale)
end

-- Runs the step's forward and backward pass again with the trap set, from the same batches and
-- random numbers. Returns a finding (trap.lua), or nil and a message. Restores the random numbers.
-- Every rank calls it, since a model may exchange data between ranks in both passes.
local function run_again(trainer, scale)
  local place = random.place()
  trainer.optimizer:zero_grad()
  local mark = M_ffi.new("int64_t[1]")
  check(C.eng_scope_begin(mark))
  local finding, message = buffers.keeping(trainer.model, function()
    return trap.watch(trainer.model, function()
      for i = 1, trainer.accumulate do
        random.go(trainer.drawn_from[i])
        local loss = trainer:forward(trainer.batches[i])
        trainer.reducer:alone(function() loss:backward { scale = scale / trainer.accumulate } end)
      end
    end)
  end)
  C.eng_backward_abort()
  -- eng_scope_end fails if the pass ended early; the end of the step then frees the pass's tensors
  C.eng_scope_end(mark[0])
  random.go(place)
  return finding, message
end

-- Returns how to change this policy so that it can go below `scale`: by the option that sets the
-- scale (loss_scale of `static`), or by a lower floor.
local function lower_scale(policy, scale)
  for _, name in ipairs(policy.option_names or {}) do
    if name:find("scale") and name ~= "min_scale" and policy.options[name] == scale then
      return ("a smaller %s of policy %s, or policy=dynamic"):format(name, policy.name)
    end
  end
  return "a policy with a smaller min_scale"
end

local function advice(self, record, finding)
  local trainer, lines = self.trainer, {}
  local function say(format, ...) lines[#lines + 1] = "  " .. format:format(...) end
  local stats = trainer.stats
  say("first tensor with inf: %s; with nan: %s", (found_in(self, stats, "inf") or "none"),
    (found_in(self, stats, "nan") or "none"))
  local sum = of_sum(trainer)
  local spread = sum or trainer.reducer.origin
  if spread then say("%s", spread) end
  for _, line in ipairs(finding and finding:lines() or {}) do lines[#lines + 1] = "  " .. line end
  local held, forward, weight
  for _, kind in ipairs { "inf", "nan" } do
    local site = finding and finding[kind] and (finding[kind].forward or finding[kind].backward)
    if site and site.held_by then held = held or site end
    if site and not site.backward then forward = forward or site end
    for _, t in ipairs(site and site.inputs or {}) do
      if t.name and t.inf + t.nan > 0 then weight = t.name end
    end
  end
  if weight then
    say("the weight %s has inf or nan: resume from a checkpoint before this step " ..
      "(resume=RUN/checkpoints/STEP) with a smaller learning rate or clip=1", weight)
  elseif held and not held.backward then
    say("look at the data of this step, and at masks and constants; the loss scale is not the " ..
      "cause")
  elseif record.loss - record.loss ~= 0 or forward then
    say("the forward pass itself leaves the format's range, which no loss scale can fix; try a " ..
      "smaller learning rate, clip=1, precision=bf16, or f32 for the module that overflows")
  else
    say("the backward pass overflows at scale %s; try %s, clip=1, a smaller learning rate, or " ..
      "precision=bf16", show.scale(record.scale), lower_scale(trainer.policy, record.scale))
  end
  local path = trainer.run_files.path
  if path then
    say("to look closer: engine attach %s, then history:why(%d)", path, tonumber(record.step))
  end
  if path and not finding and not sum and not trainer.by_hand then
    say("to name the operation: run again with resume=auto trap=overflow%s",
      trainer.delay == 1 and " mode=sync" or "")
  end
  return lines
end

--- Handles a step that overflowed. Runs the step again if the option `trap` asks for this at every
--- overflow, or if the run is stuck: the policy stops it, or keeps the scale through repeated
--- overflows. If the run is stuck, shows advice. The advice has no finding if the step cannot run
--- again (with a delay of 1, in a session, or after an error in the pass), or if only the sum over
--- ranks overflowed. Every rank runs the step again. The first rank whose batches overflowed, or
--- else rank 0, shows and records the result.
function Overflows:look(record, verdict)
  local trainer = self.trainer
  local culprit = trainer.reducer:culprits()[1]
  local mine = trainer.reducer.rank == (culprit and culprit.rank or 0)
  local step = tonumber(record.step)
  if self.last ~= step - 1 then self.in_row, self.stuck = 0, 0 end
  self.last, self.in_row = step, self.in_row + 1
  self.stuck = verdict.scale >= record.scale and self.stuck + 1 or 0
  local stops = trainer:asks(verdict, C.ENG_ACTION_STOP)
  local stuck = stops or self.stuck == STUCK
  if not self.every_time and not stuck then return end

  local function say(line)
    if trainer.reducer.rank > 0 then ranks.say("%s", line) else trainer:note(line) end
  end
  local finding, text = nil, of_sum(trainer)
  -- with a delay the batches are gone by now; a session never had them
  if not text and trainer.delay == 0 and trainer.batches[1] then
    local problem
    trainer.reducer:whole(function() finding, problem = run_again(trainer, record.scale) end)
    text = finding and tostring(finding) or "the step could not be run again: " .. tostring(problem)
  end
  if not mine then return end
  if text then
    trainer.run_files:event(step, "trap", text, finding and finding:data() or nil)
    local place = finding and finding:place() or text
    if self.every_time and not self.told[place] then
      say(("step %d: overflow: %s"):format(step, (text:gsub("\n", "\n  "))))
    end
    self.told[place] = true                        -- each place is shown once; the history has all
  end
  if stuck then
    local what = stops and ("the policy ends the run at an overflow, with the loss scale at " ..
      "%g"):format(record.scale)
      or ("%d overflows in a row, and the loss scale stays at %s"):format(self.in_row,
      show.scale(record.scale))
    local lines = advice(self, record, finding)
    trainer.run_files:event(step, "stuck", what .. "\n" .. table.concat(lines, "\n"))
    say(("step %d: %s\n%s"):format(step, what, table.concat(lines, "\n")))
  end
end

return M
