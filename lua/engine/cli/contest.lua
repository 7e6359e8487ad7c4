-- engine contest: reads the command line, checks the script, executes at most `jobs` runs at a time
-- (run/contest.lua), and prints the results (report/contest.lua). Called by init.lua.
local config = require "engine.base.config"
local files = require "engine.base.file"
local options = require "engine.cli.options"
local process = require "engine.base.process"
local show = require "engine.base.show"

local fail, fail_if = options.fail, options.fail_if

local help = [==[
usage: engine contest SCRIPT --policy A --policy B ... [seeds=5] [jobs=N] [threads=N]
                      [name=contest] [setting=value ...]
                      [--csv FILE] [--latex FILE] [--svg FILE] [--png FILE] [--json]
       engine contest SCRIPT --vary "SETTING=VALUE ..." --vary "SETTING=VALUE ..." ...

Trains the script under each policy with the seeds 1 to `seeds`, and compares the policies: mean and
standard deviation over the seeds, and differences from the first policy with the same seed, with
95 % confidence intervals. --vary compares other settings of the script in the same way.

  engine contest examples/gpt.lua --policy dynamic --policy max_value steps=200
  engine contest train.lua --policy dynamic:growth_interval=500 --policy ./mine.lua seeds=10
  engine contest examples/gpt.lua --vary precision=bf16 --vary precision=fp8_block
  engine contest train.lua --vary "precision=fp16 lr=1e-3" --vary "precision=bf16 lr=3e-3"
  engine contest train.lua --policy dynamic --policy pid name=first lr=1e-3 --svg first.svg
  engine runs runs/contest             # its runs, with `engine plot`, `report` and so on

Each run is a process, in a folder runs/NAME/POLICY-SEED/, or SETTINGS-SEED/ with --vary. Ctrl-C
ends the runs with a checkpoint; the same command continues them, and repeats no run that has ended.
More seeds, policies or settings to compare may be added to a contest; other settings of all runs
need another name. A run that fails does not end the contest. If its error may be temporary (exit
status 1, or a signal), the next start tries it again.

The script needs the settings seed, run and policy or those that --vary names (engine.config). If it
has the setting resume, interrupted runs continue instead of starting over. If it has the setting
log, runs print less.

seeds     runs of each policy, or of each --vary (5)
jobs      runs at a time; by default the usable cores divided by `threads`, or 1 on a GPU
threads   OpenMP threads of a run; by default the cores divided by the number of runs. All runs of a
          contest use the same number, because it changes the last digits of the results
name      the contest's folder under runs/

--csv     every run's numbers            --latex   the table for a paper (booktabs)
--svg     loss and loss scale: mean over the seeds and a band of one standard deviation
--png     the same through gnuplot       --json    the results as one JSON object
FILE may be - for stdout, except with --png.

  finished   runs that finished; the numbers are means over these
  loss       mean over the last tenth of the steps, without inf and nan
  held-out   the last evaluation of the script's trainer (`evaluate`); - if there is none
  skipped    steps without an update
  underflow  share of the gradients that are nonzero and below the smallest normal number
  seconds    of training

The exit status is 0 if every run finished, 1 if one failed.]==]

-- The settings of the contest itself. All other settings go to the script.
local OWN = { seeds = 5, jobs = config.optional "number", threads = config.optional "number",
  name = "contest" }
local RANGES = { count = "seeds jobs threads" }
local NEEDED = { policy = "engine.trainer { policy = cfg.policy }",
  seed = "engine.seed(cfg.seed)", run = "engine.trainer { run = cfg.run }" }

local function parse(...)
  local good, result = pcall(config.parse, ...)
  if not good then fail("%s", (tostring(result):gsub("^config: ", ""))) end
  return result
end

-- ------------------------------------------------------------------ the script

-- Runs the script up to its call of engine.config. Returns the three arguments of that call:
-- defaults, texts, ranges.
local function settings_of(script, settings)
  local engine = require "engine"
  local chunk, problem = loadfile(script)
  if not chunk then fail("%s", problem) end
  local reached, found, show_before, arg_before = {}, nil, print, arg
  local function stop(...)
    found = { ... }
    error(reached, 0)
  end
  arg = { [0] = script, unpack(settings) }
  engine.config, engine.trainer = stop, function() error(reached, 0) end
  _G.print = function() end
  local good, why = pcall(chunk, unpack(settings))
  arg, _G.print = arg_before, show_before
  if not good and why ~= reached then fail("%s: %s", script, tostring(why)) end
  fail_if(not found, "%s does not call engine.config, so a contest cannot set its policy and " ..
    "seed; hint: local cfg = engine.config { policy = \"dynamic\", seed = 1, run = \"\" }", script)
  return unpack(found, 1, 3)
end

-- Raises an error if the script lacks a needed setting, or if a run's settings are invalid.
local function check_script(contest)
  local defaults, docs, kinds = settings_of(contest.script, contest.settings)
  local needed = { "seed", "run" }
  for _, entrant in ipairs(contest.entrants) do
    for name in pairs(entrant.names) do needed[#needed + 1] = NEEDED[name] and name or nil end
  end
  for _, name in ipairs(needed) do
    fail_if(type(defaults) ~= "table" or defaults[name] == nil,
      "%s has no setting '%s', which a contest needs; hint: add it to engine.config { ... } and " ..
      "use it: %s", contest.script, name, NEEDED[name])
  end
  local load = require("engine.policy.policy").load     -- registers the range `policy`
  contest.resumes, contest.quiet = defaults.resume ~= nil, defaults.log ~= nil
  local words = { "seed=1", unpack(contest.settings) }
  -- engine.config gives every script this field
  if defaults.device == nil then defaults.device = config.optional "string" end
  contest.sources = {}
  for _, entrant in ipairs(contest.entrants) do
    local all = { unpack(entrant.settings) }
    for _, word in ipairs(words) do all[#all + 1] = word end
    local policy = parse(defaults, all, docs, kinds, contest.script).policy
    -- load() fails for a policy that only the script registers
    local good, loaded = pcall(load, policy or "")
    if good then contest.sources[policy] = loaded.source end
  end
end

-- ------------------------------------------------------------------ the command line

local TAKEN = { seed = "hint: use seeds=",
  run = "hint: use name=", resume = "the same command again continues the runs",
  log = "the file `output` in a run's folder has what the run printed" }

local OUTPUTS = { "csv", "latex", "svg", "png" }

-- Returns the contest's entrants, in order: { label = the policy or the settings as text, settings
-- = { "name=value" ... }, names = { [name] = value } }, and the set of the settings' names.
local function entrants_of(given)
  local list, labels, varied = {}, {}, {}
  local function enter(option, label, settings)
    fail_if(labels[label], "--%s: expected different %s, got %s twice", option,
      option == "policy" and "policies" or "settings", label)
    labels[label] = true
    local names = {}
    for _, word in ipairs(settings) do
      local name, value = word:match("^([%w_.-]+)=(.*)$")
      fail_if(not name, "--vary: expected SETTING=VALUE, got '%s'", word)
      fail_if(TAKEN[name] or OWN[name] ~= nil, "the contest itself sets '%s'%s", name,
        TAKEN[name] and "; " .. TAKEN[name] or "")
      fail_if(names[name], "--vary '%s' sets '%s' twice", label, name)
      names[name], varied[name] = value, true
    end
    list[#list + 1] = { label = label, settings = settings, names = names }
  end
  for _, policy in ipairs(given.policy) do enter("policy", policy, { "policy=" .. policy }) end
  for _, text in ipairs(given.vary) do
    local settings = {}
    for word in text:gmatch("%S+") do settings[#settings + 1] = word end
    fail_if(#settings == 0, "--vary: expected SETTING=VALUE, got an empty text")
    table.sort(settings)       -- their order makes no other entrant
    enter("vary", table.concat(settings, " "), settings)
  end
  fail_if(#list == 0, "expected at least one --policy NAME or --vary SETTING=VALUE; " ..
    "`engine policies` lists the policies")
  return list, varied
end

local function read(given)
  local M_ffi = require "engine.base.ffi"
  local C = M_ffi.C
  local size = M_ffi.new("int[1]")
  fail_if(C.eng_comm_launched(M_ffi.new("int[1]"), size), "expected one process, which starts " ..
    "the runs, got %d; hint: start the contest without mpirun, srun or torchrun, or set " ..
    "ENGINE_RANKS=off", size[0])
  local script = given.words[1]
  options.want_script(script)
  local entrants, varied = entrants_of(given)
  local own, settings = {}, {}
  for _, word in ipairs(given.settings or {}) do
    local name = word:match("^[^=]+")
    fail_if(TAKEN[name], "the contest itself sets '%s' for each run; %s", name, TAKEN[name])
    fail_if(varied[name] or name == "policy" and #given.policy > 0, "'%s' differs between the " ..
      "runs, so it cannot be a setting of all runs", name)
    table.insert(OWN[name] ~= nil and own or settings, word)
  end
  for _, name in ipairs(OUTPUTS) do
    local problem = given[name] and given[name] ~= "-" and config.ranges.output.problem(given[name])
    if problem then fail("--%s: %s", name, problem) end
  end
  if given.png then require("engine.report.gnuplot").need() end
  table.sort(settings)
  own = parse(OWN, own, nil, RANGES)
  local problem = show.name_problem(own.name)
  fail_if(problem, "name: '%s' %s; hint: name=NAME chooses the contest's folder under runs/",
    own.name, problem)
  local text, why = files.read(script)
  if not text then fail("cannot read %s", why) end
  local contest = { path = require("engine.run.run").directory(own.name), script = script,
    source = text, settings = settings, entrants = entrants, seeds = own.seeds,
    head = #given.vary > 0 and "settings" or "policy",
    threads = own.threads, jobs = own.jobs }
  check_script(contest)
  local cores = C.eng_comm_threads()
  contest.default_threads = math.max(1, math.floor(cores / (#entrants * own.seeds)))
  contest = require("engine.run.contest").open(contest)
  local card = ("\0" .. table.concat(settings, "\0")):find("%zdevice=[ac]u")   -- auto or cuda
  contest.jobs = contest.jobs or card and 1 or math.max(1, math.floor(cores / contest.threads))
  return contest
end

-- ------------------------------------------------------------------ running

local function quoted(word) return word:find("[^%w_./=:,+-]") and process.quoted(word) or word end

-- Returns the command line that continues the contest.
local function again(words)
  local first = 0
  while arg and arg[first - 1] do first = first - 1 end
  local parts = { quoted(arg and arg[first] or "engine"), "contest" }
  for _, word in ipairs(words) do parts[#parts + 1] = quoted(word) end
  return table.concat(parts, " ")
end

-- Returns a display on stderr that shows the progress of the runs: a line for each run that ends
-- and, on a terminal, a live line.
local function progress_of(contest, waiting)
  local machine = require "engine.base.machine"
  local bar = require("engine.run.progress").on_stderr()
  local began, ended, total = machine.clock(), 0, #waiting
  local before = {}                    -- run -> the share of its steps done before this command
  local progress = require("engine.run.contest").progress
  for _, run in ipairs(waiting) do before[run] = progress(run) end
  local function left(running)
    local made, todo = 0, 0
    for _, run in ipairs(waiting) do
      local share = run.ended_now and 1 or running[run] and progress(run) or before[run]
      made, todo = made + math.max(0, share - before[run]), todo + 1 - share
    end
    return made > 0 and ", about " .. show.duration((machine.clock() - began) / made * todo) ..
      " left" or ""
  end
  function bar:show(running)
    if not self:columns() then return end
    local parts = {}
    for _, run in ipairs(waiting) do
      if running[run] then
        parts[#parts + 1] = ("%s seed %d %.0f %%"):format(run.label, run.seed, 100 * progress(run))
      end
    end
    self:update { step = 0, text = ("%d of %d runs%s  %s"):format(ended, total, left(running),
      table.concat(parts, ", ")) }
  end
  function bar:ended(run, running)
    ended, run.ended_now = ended + 1, true
    self:note(("%d of %d: %s%s"):format(ended, total, run.done
      and ("%s seed %d: loss %.4f in %s"):format(run.label, run.seed, run.loss or 0 / 0,
        show.duration(run.seconds))
      or ("%s seed %d: %s"):format(run.label, run.seed, show.cut(run.why, 300)),
      ended < total and left(running) or ""))
  end
  function bar:finish()
    if self.on_line then io.stderr:write("\r\27[K") end
  end
  if total > 0 then
    bar:note(("%s: %s to make, %d at a time with %s each; %d of %d are done"):format(
      contest.path, show.counted(total, "run"), math.min(contest.jobs, total),
      show.counted(contest.threads, "thread"), #contest.runs - total, #contest.runs))
  end
  return bar
end

local POLL, LIVE = 0.05, 1     -- seconds between polls, and between live lines

-- Executes the runs that have not ended. Returns false if a signal interrupted them.
local function make_runs(contest)
  local C = require("engine.base.ffi").C
  local waiting, running, count, at = {}, {}, 0, 1
  for _, run in ipairs(contest.runs) do
    if not run.final then waiting[#waiting + 1] = run end
  end
  local bar = progress_of(contest, waiting)
  local policy_before = C.eng_interrupt_policy(2)
  local told, shown = false, 0
  local good, problem = pcall(function()
    while count > 0 or at <= #waiting and not told do
      if C.eng_interrupted() > 0 and not told then
        told = true
        bar:note(("interrupted: %s in progress; each writes a checkpoint and ends"):format(
          show.counted(count, "run")))
        for run in pairs(running) do process.stop(run.process) end
      end
      while not told and count < contest.jobs and at <= #waiting and contest:start(waiting[at]) do
        running[waiting[at]], count, at = true, count + 1, at + 1
      end
      for run in pairs(running) do
        if contest:ended(run) then
          running[run], count = nil, count - 1
          if not told then bar:ended(run, running) end
        end
      end
      if C.eng_clock() - shown > LIVE then
        bar:show(running)
        shown = C.eng_clock()
      end
      C.eng_sleep(POLL)
    end
  end)
  for run in pairs(running) do process.stop(run.process) end
  bar:finish()
  C.eng_interrupt_policy(policy_before)
  if not good then error(problem, 0) end
  return not told
end

local function main(given)
  local contest = read(given)
  if not make_runs(contest) then
    local done = 0
    for _, run in ipairs(contest.runs) do done = done + (run.final and 1 or 0) end
    io.stderr:write(show.shown(("interrupted, %d of %d runs are done; to continue:\n  %s")
      :format(done, #contest.runs, again(given.line)), true), "\n")
    return 1
  end
  local report, results, failed = require "engine.report.contest", contest:results(), 0
  for _, row in ipairs(results) do failed = failed + #row.failed end
  if given.json then print(report.json(contest, results))
  else
    print(report.text(contest, results))
    local figure = not (given.svg or given.png) and report.figure(contest)
    if figure then print("\n" .. figure) end
  end
  for _, name in ipairs(OUTPUTS) do
    local path = given[name]
    if path and report[name] then files.write(path, report[name](contest, results))
    elseif path then report.draw(contest, { [name] = path }) end
    if path and path ~= "-" and not given.json then print(path) end
  end
  return failed > 0 and 1 or 0
end

return options.command {
  name = "contest", doc = "a script under several policies or settings, and seeds, compared",
  help = help, least = 1, most = 1, expects = "one script",
  options = { policy = "texts", vary = "texts", csv = "text", latex = "text", svg = "text",
    png = "text", json = "switch" }, main = main,
  word = function(word, given)
    if not word:find("^[%w_.-]+=") then return false end
    given.settings = given.settings or {}
    table.insert(given.settings, word)
    return true
  end,
}
