-- Swaps policies while four ranks train: all ranks must switch at the same step, or none.
--   ./engine spec/dist/swaps.lua [swaps=60] [ranks=4] [seed=1]
-- One run with a swap every few steps. Each swap is drawn at random from these kinds:
--   - a valid file, an undo, or a loss-scaler class that one rank has not registered
--   - a file that is broken or fails on the run's records
--   - a file that differs, is broken or is missing on one random rank
--   - a file that exceeds one random rank's limit of memory when loaded, or of instructions when
--     run, on the last records or after the swap
--   - a file saved again, or a SIGHUP to one rank, while a policy from that file is current
--   - an FP8 policy that moves the model's NVFP4 layers: from a file that differs on one rank, from
--     a file saved again, or refused by one rank
-- All ranks load rank 0's bytes, whatever file other ranks have under that name. Checks:
--   - in every step all ranks have the same policies (names, hash, scale), the same layers in FP4
--     and the same weights
--   - after a swap the current policy is the new one if every rank accepts it, else the old one
--   - the history has an event `swap` or `swap_refused` for each swap, and a refusal names the
--     rank that cannot switch
-- Started without mpirun, it starts the ranks and checks what they wrote; the exit code is 1 when a
-- check fails.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local json = require "engine.base.json"
local helper = require "spec.helper"
local ranks = engine.ranks

local cfg = engine.config { swaps = 60, ranks = 4, seed = 1, folder = "" }
local EVERY = 6            -- steps between two swaps: a saved file is examined twice

-- ------------------------------------------------------------------ a rank

local function policy_text(name, decide)
  return ("return { name = %q, init = function() return { scale = 1 } end, decide = function(s, " ..
    "r) %s end }"):format(name, decide)
end

local rank = ranks.rank()
local function file_of(number, text)
  local path = ("%s/rank%d-%d.lua"):format(cfg.folder, rank, number)
  if text then helper.write(path, text) end
  return path
end

local LIMITS = { memory = 8 * 2 ^ 20, instructions = 1e6, seconds = 2 }
local function limited(limits, f)
  engine.policy.limits(limits)
  f()
  engine.policy.limits(LIMITS)
end

-- A case is a function (trainer, number, victim, step), called on every rank at the same step. It
-- returns the name of the policy that must be current afterwards, or nil if the old one must stay,
-- and a text that the refusal must contain.
local cases = {}

local function good_text(number)
  return policy_text("good" .. number, ("return 2^%d"):format(number % 8))
end

function cases.good(t, number)
  t.policy:swap(file_of(number, good_text(number)))
  return "good" .. number
end

function cases.no_lua(t, number)
  t.policy:swap(file_of(number, "return { name = "))
  return nil, "rank 0: "
end

function cases.fails(t, number)
  t.policy:swap(file_of(number, policy_text("bad", "error 'no'")))
  return nil, "rank 0: it failed on the record of step"
end

function cases.other_text(t, number, victim)
  t.policy:swap(file_of(number, rank == victim and policy_text("other" .. number, "return 3")
    or good_text(number)))
  return (victim == 0 and "other" or "good") .. number
end

function cases.broken_there(t, number, victim)
  t.policy:swap(file_of(number, rank == victim and "return 7" or good_text(number)))
  if victim > 0 then return "good" .. number end
  return nil, "rank 0: "
end

function cases.missing_there(t, number, victim)
  t.policy:swap(file_of(number, rank ~= victim and good_text(number) or nil))
  if victim > 0 then return "good" .. number end
  return nil, "rank 0: "
end

function cases.no_memory(t, number, victim)
  limited(rank == victim and { memory = 1000 } or {},
    function() t.policy:swap(file_of(number, good_text(number))) end)
  return nil, ("rank %d: "):format(victim)
end

function cases.no_time(t, number, victim)
  local text = policy_text("long", "for i = 1, 1e5 do end return 1")
  limited(rank == victim and { instructions = 2e4 } or {},
    function() t.policy:swap(file_of(number, text)) end)
  return nil, ("rank %d: it failed on the record of step"):format(victim)
end

function cases.no_time_later(t, number, victim, step)
  local text = policy_text("later",
    ("if r.step > %d then for i = 1, 1e5 do end end return 1"):format(step))
  limited(rank == victim and { instructions = 2e4 } or {},
    function() t.policy:swap(file_of(number, text)) end)
  return nil, ("rank %d: "):format(victim)
end

local Class = { get_scale = function() return 32 end, update = function() end }
Class.__index = Class
function Class.new() return setmetatable({}, Class) end

function cases.class(t, number, victim)
  local known = number % 2 == 0 or rank ~= victim
  if known then engine.register_loss_scaler("class" .. number, Class) end
  t.policy:swap("class" .. number)
  if number % 2 == 0 then return "class" .. number end
  return nil, ("rank %d: "):format(victim)
end

function cases.saved(t, number)
  t.policy:swap(file_of(number, good_text(number)))
  if rank == 0 then file_of(number, policy_text("saved" .. number, "return 5")) end
  return "saved" .. number
end

function cases.saved_broken(t, number)
  t.policy:swap(file_of(number, good_text(number)))
  if rank == 0 then file_of(number, policy_text("saved" .. number, "return nil")) end
  return "good" .. number, "rank 0: it failed on the record of step"
end

function cases.hangup(t, number, victim)
  local text = good_text(number)
  t.policy:swap { source = policy_text("before" .. number, "return 6"), file = "p.lua",
    path = file_of(number, text) }
  if rank == victim then os.execute("kill -HUP " .. io.open("/proc/self/stat"):read("*n")) end
  return "good" .. number
end

function cases.undone(t, number)
  local before = t.policy.name
  t.policy:swap(file_of(number, good_text(number)))
  t.policy:undo()
  return before
end

-- A policy that moves layers at every step, depending on the statistics it reads.
local function fp8_text(number, more)
  return ([[return { name = "layers%d", kind = "fp8", needs = { "tensors" },
    init = function() return { scale = 1 } end, decide = function(s, r)
      %s
      local scales = {}
      for name, t in pairs(r.tensors) do
        if t.measured and t.snr < 18.5 then scales[string.match(name, "^(.*):") .. ":high"] = 2 end
      end
      return { scale = 1, scales = scales }
    end }]]):format(number, more or "")
end

function cases.fp8_other_text(t, number, victim)
  t.policy:swap(file_of(number, fp8_text(rank == victim and number + 1000 or number)))
  return "layers" .. number + (victim == 0 and 1000 or 0)
end

function cases.fp8_no_time(t, number, victim)
  limited(rank == victim and { instructions = 2e4 } or {},
    function() t.policy:swap(file_of(number, fp8_text(number, "for i = 1, 1e5 do end"))) end)
  return nil, ("rank %d: it failed on the record of step"):format(victim)
end

function cases.fp8_saved(t, number)
  t.policy:swap(file_of(number, fp8_text(number)))
  if rank == 0 then file_of(number, fp8_text(number + 2000)) end
  return "layers" .. number + 2000
end

local names = {}
for name in pairs(cases) do names[#names + 1] = name end
table.sort(names)

local function worker()
  engine.seed(cfg.seed)
  local text = {}
  for i = 1, 3000 do text[i] = string.char(32 + i * i % 89) end
  local model = engine.nn.gpt { vocab = 256, context = 8, width = 32, heads = 2, layers = 1 }
  local optimizer = engine.optim.adamw(model, { lr = 1e-4, precision = { name = "four",
    base = "nvfp4", fp8 = { sample = 2, ladder = { "mxfp8" } } } })
  local sites = optimizer.fp8
  local function current(t)
    return t.policy.name, sites.policies[1] and sites.policies[1].name or "none"
  end
  local out = assert(io.open(("%s/told.%d"):format(cfg.folder, rank), "w"))
  math.randomseed(cfg.seed)
  engine.trainer { model = model, optimizer = optimizer,
    data = engine.data.text { text = table.concat(text), batch = 2, context = 8 },
    steps = (cfg.swaps + 1) * EVERY + 1, log = "quiet", run = cfg.folder .. "/run",
    rank_timeout = 20, attach = false, zero = cfg.seed % 3, agree_every = 1,
    on_step = function(t, record)
      local step = tonumber(record.step)
      local line = { step = step, policy = ("%s %s"):format(current(t)),
        hash = t.policy.hash and t.policy:hash(), rungs = table.concat(sites:places().rungs),
        scale = ("%.17g"):format(record.scale),
        weights = tostring(M_ffi.C.eng_params_checksum_of(optimizer.params, nil, 0)) }
      if step % EVERY == 1 and step > EVERY then
        local number = (step - 1) / EVERY
        local case, victim = names[number <= #names and number or math.random(#names)],
          math.random(0, ranks.size() - 1)
        line.case, line.victim, line.before = case, victim, line.policy
        local own, layers = current(t)
        local expected
        expected, line.refusal = cases[case](t, number, victim, step)
        if case:find "^fp8" then layers = expected or layers else own = expected or own end
        line.expected = expected and own .. " " .. layers
      end
      out:write(json.encode(line), "\n")
      out:flush()
    end }:run()
  out:close()
end

-- ------------------------------------------------------------------ what the ranks wrote

local function lines_of(path)
  local list = {}
  for line in io.lines(path) do list[#list + 1] = json.decode(line) end
  return list
end

local function look(folder)
  local problems, of, counts = {}, {}, { taken = 0, refused = 0 }
  local function wrong(format, ...) problems[#problems + 1] = format:format(...) end
  for r = 0, cfg.ranks - 1 do of[r] = lines_of(("%s/told.%d"):format(folder, r)) end
  if #of[0] ~= (cfg.swaps + 1) * EVERY + 1 then
    wrong("%d steps, expected %d", #of[0], (cfg.swaps + 1) * EVERY + 1)
  end
  local history = engine.history.open(folder .. "/run")
  local events = history:query("SELECT step, kind, text FROM events WHERE kind LIKE '%swap%' " ..
    "ORDER BY id")
  history:close()
  local moved = false
  for i, first in ipairs(of[0]) do
    moved = moved or first.rungs:find "2" ~= nil
    for r = 1, cfg.ranks - 1 do
      for _, key in ipairs { "step", "policy", "hash", "scale", "rungs", "weights" } do
        local own = of[r][i] and of[r][i][key]
        if own ~= first[key] then
          wrong("step %d: %s is %s on rank 0, %s on rank %d", first.step, key, tostring(first[key]),
            tostring(own), r)
        end
      end
    end
    if first.case then
      local last = of[0][i + EVERY - 1] or {}
      local expected = first.expected or first.before
      local what = ("swap at step %d (%s, rank %d)"):format(first.step, first.case, first.victim)
      if last.policy ~= expected then
        wrong("%s: %s is current, expected %s", what, tostring(last.policy), expected)
      end
      local kinds, refusal = {}, ""
      for _, event in ipairs(events) do
        if event.step > first.step and event.step < first.step + EVERY then
          kinds[#kinds + 1] = event.kind
          if event.kind == "swap_refused" then refusal = event.text end
        end
      end
      counts.refused = counts.refused + (first.refusal and 1 or 0)
      counts.taken = counts.taken + (first.expected and 1 or 0)
      if #kinds == 0 then wrong("%s: the history has no event", what) end
      if (refusal ~= "") ~= (first.refusal ~= nil) or not refusal:find(first.refusal or "", 1,
        true) then
        wrong("%s: the history says '%s', expected '%s'", what, refusal, first.refusal or "nothing")
      end
    end
  end
  if not moved then wrong("no policy of FP8 layers moved a layer") end
  return problems, counts
end

if ranks.size() > 1 then
  worker()
  return
end

local start = require "spec.dist.start"
if not start.there then
  io.stderr:write("there is no mpirun here, or this build has no MPI\n")
  os.exit(1)
end
local folder = helper.folder()
local result = start.run(cfg.ranks, "spec/dist/swaps.lua",
  { "swaps=" .. cfg.swaps, "seed=" .. cfg.seed, "ranks=" .. cfg.ranks, "folder=" .. folder },
  { limit = 300 })
local problems, counts = {}, {}
if result.code ~= 0 then
  problems[1] = ("the job ended with code %d:\n%s%s"):format(result.code, result.out, result.err)
else problems, counts = look(folder) end
helper.remove(folder)
for i = 1, math.min(#problems, 20) do io.stderr:write(problems[i], "\n") end
print(("%d swaps of %d kinds on %d ranks: %s taken, %s refused; %d failed; seed %d"):format(
  cfg.swaps, #names, cfg.ranks, tostring(counts.taken),
  tostring(counts.refused), #problems, cfg.seed))
if #problems > 0 then os.exit(1) end
