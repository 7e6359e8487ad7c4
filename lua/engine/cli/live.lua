-- The process in which `engine replay --verify` runs a recorded job again under another policy:
--   engine -e 'require("engine.cli.live")("JOB.json")'
-- The script runs as before, with one exception. The first trainer or session whose option `run`
-- names the recorded run gets its policy, checkpoint, number of steps and folder from the job
-- (run/verify.lua). Other trainers and sessions write no run. The process ends after the job's run.
-- Called by a process that replay_verify.lua starts.
local engine = require "engine"
local files = require "engine.base.file"
local json = require "engine.base.json"
local merged = require("engine.base.arguments").merged

-- Returns the options of the job's trainer or session: the options from the script (`given`), with
-- the job's changes. kind: "trainer" or "session".
local function options_of(given, job, kind)
  local o = merged(given)
  o.run, o.resume, o.log = job.run, job.resume or false, "quiet"
  o.steps = kind == "trainer" and job.steps or nil
  o.policy, o.policy_options = job.policy, job.policy_options
  o.shadow, o.tensorboard, o.history, o.trap = nil, nil, nil, nil
  o.attach, o.watch = false, false
  return o
end

-- Prepares the job's trainer, so that the process ends when the trainer's run ends. The trainer
-- still writes the checkpoints that are due, because a policy may roll back to them. It writes no
-- extra checkpoint at the end of the run.
local function prepare(trainer, job)
  if job.state then trainer.policy:restore(job.state) end
  local run_files, ending = trainer.run_files, trainer.by_hand and "close" or "run"
  local finish = trainer[ending]
  trainer.limit = job.steps
  local after_step = run_files.after_step
  function run_files.after_step(self, last, alone)
    if self:due() then return after_step(self, last, alone) end
  end
  trainer[ending] = function(self) os.exit(finish(self).status) end
  return trainer
end

return function(path)
  local job = json.decode((files.read(path)))
  local found = false
  for _, kind in ipairs { "trainer", "session" } do
    local new = engine[kind]
    engine[kind] = function(given)
      if type(given) ~= "table" then return new(given) end
      local name = given.run
      if not found and (name == job.run or name == job.name and name ~= nil and name ~= "") then
        found = true
        return prepare(new(options_of(given, job, kind)), job)
      end
      local o = merged(given)
      o.run, o.resume, o.tensorboard = nil, nil, nil
      return new(o)
    end
  end
  arg = { [-1] = arg[0], [0] = job.script, unpack(job.arguments) }
  local chunk, problem = loadfile(job.script)
  if not chunk then error(problem, 0) end
  chunk(unpack(job.arguments))
  error(("%s ended without making the trainer or session of the run '%s'"):format(job.script,
    tostring(job.name)), 0)
end
