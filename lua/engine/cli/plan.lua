-- engine plan SCRIPT [ranks=N] [alpha=seconds] [beta=seconds per byte] [step=seconds] [wire=] [zero=] [bucket=] [name=value ...]
local help = [==[
usage: engine plan SCRIPT [ranks=1024] [alpha=S] [beta=S] [step=S] [wire=FORMAT] [zero=0|1] [bucket=MIB]
                   [name=value ...]

Predicts what the script's training would cost on 1 to `ranks` ranks: memory of each, the share of
a step that goes into messages, and into the record of overflows. The script runs up to its trainer,
of which a few steps are timed. Other settings go to the script.

  engine plan examples/gpt.lua ranks=1024 alpha=2e-6 beta=1/25e9       # messages of 2 us, 25 GB/s a rank

alpha, beta  seconds of a message and of a byte between two ranks; measured here, between two
             processes, where they are not given and mpirun is there
step         seconds of one rank's own step; measured where it is not given
wire zero bucket   as the trainer takes them; what the script says where they are not given]==]

local MINE = { ranks = true, alpha = true, beta = true, step = true, wire = true, zero = true, bucket = true }
local MIB = 2 ^ 20
local FALLBACK = { alpha = 5e-6, beta = 1 / 10e9 }

-- Two processes of this machine. The sum of a million numbers sends each of its bytes once.
local MEASURE = [[local e, f = require("engine"), require("engine.ffi") local C, w, v = f.C, e.ranks.world(), f.new("float[?]", 2^20)
local function time(g, n) for _ = 1, 5 do g() end local t = C.eng_clock() for _ = 1, n do g() end return (C.eng_clock() - t) / n end
local a = time(function() C.eng_comm_all_reduce(w, v, 1, f.dtype.f32, C.ENG_SUM) end, 2000)
local b = time(function() C.eng_comm_all_reduce(w, v, 2^20, f.dtype.f32, C.ENG_SUM) end, 20)
print(("measured %.9g %.9g"):format(a, b / 2^22))]]

local function measure()
  local executable = require("engine.host").executable
  local pipe = io.popen(("OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 mpirun --oversubscribe "
    .. "-np 2 '%s' -e '%s' 2>/dev/null"):format(executable, MEASURE))
  local text = pipe and pipe:read("*a") or ""
  if pipe then pipe:close() end
  local alpha, beta = text:match("measured (%S+) (%S+)")
  return tonumber(alpha), tonumber(beta)
end

-- Runs the script up to its trainer, which `found` gets the options of.
local function up_to_trainer(script, settings, found)
  local engine = require "engine"
  local chunk, problem = loadfile(script)
  if not chunk then error(problem, 0) end
  local reached, show = {}, print
  local new = require("engine.trainer").new
  arg = { [0] = script, unpack(settings) }
  engine.trainer = function(options)
    found(new, options)
    error(reached, 0)
  end
  _G.print = function() end
  local good, why = pcall(chunk, unpack(settings))
  _G.print = show
  if good then error(("%s makes no trainer: there is nothing to plan"):format(script), 0) end
  if why ~= reached then error(why, 0) end
end

-- What the trainer is made of, and the time of its step.
local function look(given)
  local job
  return function(new, options)
    local o = {}
    for key, value in pairs(options) do o[key] = value end
    o.run, o.resume, o.log, o.steps, o.checkpoint_every, o.tensorboard = nil, nil, "quiet", 1e9, nil, nil
    local trainer = new(o)
    local M_ffi = require "engine.ffi"
    local C = M_ffi.C
    local shadow, gradient = require("engine.precision").parameter_formats(trainer.precision, trainer.optimizer.list)
    job = { parameters = 0, tensors = #trainer.optimizer.list, gradient_bytes = 0, shadow_bytes = 0, histogram = (options.run or "") ~= "" }
    for i, p in ipairs(trainer.optimizer.list) do
      local n = p.tensor.count
      job.parameters = job.parameters + n
      job.gradient_bytes = job.gradient_bytes + n * C.eng_dtype_size(gradient[i - 1])
      if shadow[i - 1] ~= M_ffi.dtype.f32 then job.shadow_bytes = job.shadow_bytes + n * C.eng_dtype_size(shadow[i - 1]) end
    end
    local moments = ({ sgd = 0, lion = 1 })[trainer.optimizer.name] or 2
    job.moment_bytes = moments * job.parameters * (trainer.precision.moments == "bf16" and 2 or 4)
    job.bucket = (given.bucket or options.bucket or 2) * MIB
    job.wire = given.wire or options.wire or "own"
    job.zero = (given.zero or options.zero or 0) == 1
    job.model = tostring(trainer.model._class)
    job.step = given.step
    if job.step then return end
    local clock, best, until_ = C.eng_clock, math.huge, C.eng_clock() + 3
    for turn = 1, 40 do
      local from = clock()
      trainer:step()
      if turn > 2 then best = math.min(best, clock() - from) end
      if turn > 3 and clock() > until_ then break end
    end
    job.step = best
  end, function() return job end
end

local function time_text(s)
  if s == 0 then return "-" end
  return s < 1e-3 and ("%.1f us"):format(s * 1e6) or s < 1 and ("%.2f ms"):format(s * 1e3) or ("%.2f s"):format(s)
end
local function bytes_text(b) return b < 2 ^ 30 and ("%.1f MiB"):format(b / MIB) or ("%.2f GiB"):format(b / 2 ^ 30) end

local function read(words)
  local given, settings = {}, {}
  for _, word in ipairs(words) do
    local name, text = word:match("^([%a_]+)=(.+)$")
    if name and MINE[name] then
      local value = name == "wire" and text or require("engine.expression")(text)
      if value == nil or type(value) == "number" and not (value >= 0) then error(("plan: expected %s as a number, got '%s'"):format(name, text), 0) end
      given[name] = value
    else
      settings[#settings + 1] = word
    end
  end
  local key, expected = require("engine.parallel").wrong { wire = given.wire, zero = given.zero, bucket = given.bucket }
  if key then error(("plan: expected %s as %s, got %s"):format(key, expected, tostring(given[key])), 0) end
  given.ranks = given.ranks or 1024
  if given.ranks < 1 or given.ranks > 1e5 or given.ranks % 1 ~= 0 then error(("plan: expected ranks from 1 to 100000, got %g"):format(given.ranks), 0) end
  return given, settings
end

local function main(script, ...)
  if not script or script:find("=") then
    print(help)
    return 1
  end
  local plan = require "engine.plan"
  local good, problem = pcall(function(...)
    local given, settings = read { ... }
    local found, result = look(given)
    up_to_trainer(script, settings, found)
    local job, cost, source = result(), { alpha = given.alpha, beta = given.beta }, "given"
    if not (cost.alpha and cost.beta) then
      local alpha, beta = measure()
      source = alpha and "measured between two processes here" or "assumed, for there is no mpirun to measure with"
      cost.alpha, cost.beta = cost.alpha or alpha or FALLBACK.alpha, cost.beta or beta or FALLBACK.beta
    end
    print(("%s: %d parameters in %d tensors, gradients %s, wire %s%s"):format(job.model, job.parameters, job.tensors, bytes_text(job.gradient_bytes), job.wire,
      job.zero and ", ZeRO-1" or ""))
    print(("own step %s, a message %s, %.2f GB/s (%s)\n"):format(time_text(job.step), time_text(cost.alpha), 1e-9 / cost.beta, source))
    print(("%7s  %11s  %11s  %9s  %9s  %9s  %9s  %10s"):format("ranks", "memory", "of moments", "messages", "not hidden", "record", "step", "efficiency"))
    local x, y = {}, {}
    for i, ranks in ipairs(plan.counts(given.ranks)) do
      local p = plan.predict(job, cost, ranks)
      print(("%7d  %11s  %11s  %9s  %9s  %9s  %9s  %8.1f %%"):format(ranks, bytes_text(p.memory.all), bytes_text(p.memory.moments), time_text(p.messages),
        time_text(p.exposed + p.gather), time_text(p.record), time_text(p.step), 100 * p.efficiency))
      x[i], y[i] = math.log(ranks) / math.log(2), 100 * p.efficiency
    end
    if #x > 2 then print("\n" .. require("engine.plot").draw { title = "efficiency in %, over log2 of the ranks", x = x, y = y, height = 8 }) end
  end, ...)
  if good then return 0 end
  io.stderr:write("engine plan: " .. tostring(problem):gsub("^[^:\n]+:%d+: ", "") .. "\n")
  return 1
end

return { doc = "what a script's training would cost on many ranks", help = help, main = main }
