-- Runs that are disturbed: by SIGINT, errors in the script, too little memory, another run, or
-- removed and damaged files. No trained step is lost while a sound checkpoint remains.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"

local C = M_ffi.C
local TEXT = require("engine.report.lab").text(40000)

local folder
before_each(function() folder = helper.folder() end)
after_each(function()
  C.eng_memory_limit(0)
  helper.remove(folder)
end)

-- A tiny job with resumable data.
local function job(options)
  return helper.job({ text = TEXT, dropout = 0.1, steps = 12 }, options)
end

local function checksum(trainer)
  return tostring(C.eng_params_checksum_of(trainer.optimizer.params, nil, 0))
end

local function events(path)
  local list = {}
  for _, event in ipairs(helper.history(path, "events")) do
    list[#list + 1] = event.kind .. ": " .. (event.text or "")
  end
  return list
end

describe("an error in the script", function()
  local whole
  setup(function()
    local trainer = job {}
    trainer:run()
    whole = checksum(trainer)
  end)

  --- Runs the job with options whose loss or on_step raises an error, and resumes it without them.
  --- It must end like the undisturbed job. Returns the error's message.
  local function disturbed(options)
    local trainer = job(options)
    local good, message = pcall(trainer.run, trainer)
    assert.is_false(good)
    assert.equal(0, C.eng_tape_length())
    assert.matches("error: ", table.concat(events(options.run), "\n"))
    local again = job { run = options.run, resume = "auto" }
    assert.is_true(again.steps_done > 0)
    again:run()
    assert.equal(12, again.steps_done)
    assert.equal(whole, checksum(again))
    return tostring(message)
  end

  it("in the loss loses no step before it", function()
    local calls = 0
    local message = disturbed { run = folder .. "/a", loss = function(model, batch)
      calls = calls + 1
      if calls == 8 then error("boom in the loss") end
      return model:loss(batch.x, batch.y)
    end }
    assert.matches("boom in the loss", message)
  end)

  it("in on_step loses no step, not even the one it is raised in", function()
    disturbed { run = folder .. "/a",
      on_step = function(trainer) if trainer.steps_done == 7 then error({ odd = true }) end end }
  end)

  it("in the gradient of a custom operation loses no step before it", function()
    local calls = 0
    local same = engine.custom { forward = function(_, x) return x * 1 end,
      backward = function(_, dy)
      calls = calls + 1
      if calls == 6 then error("boom in backward") end
      return dy
    end }
    assert.matches("boom in backward",
      disturbed { run = folder .. "/a",
      loss = function(model, batch) return same(model:loss(batch.x, batch.y)) end })
  end)

  it("is reported when the loss is not a tensor, has many elements, or the step was ended inside",
    function()
    local function message_of(loss)
      local trainer = job { loss = loss }
      local _, message = pcall(trainer.run, trainer)
      return message
    end
    assert.matches("expected the loss to be a tensor of one element, got nothing",
      message_of(function() end))
    assert.matches("expected the loss to be a tensor of one element, got 5",
      message_of(function() return 5 end))
    assert.matches("expected a loss of one element",
      message_of(function(model, batch) return model(batch.x) end))
    assert.matches("belonged to step", message_of(function(model, batch)
      local loss = model:loss(batch.x, batch.y)
      engine.end_step()
      return loss
    end))
    assert.matches("steps do not nest", message_of(function() engine.begin_step() end))
    assert.equal(12, job {}:run().steps)
  end)

  it("leaves a trainer that can be run again", function()
    local fail = true
    local trainer = job { run = folder .. "/a", on_step = function(t)
      if fail and t.steps_done == 5 then error("once") end
    end }
    assert.is_false(pcall(trainer.run, trainer))
    fail = false
    assert.equal(12, trainer:run().steps)
    assert.equal(whole, checksum(trainer))
    local steps = {}
    for _, row in ipairs(engine.history.open(folder .. "/a/history.db"):steps()) do
      steps[#steps + 1] = tonumber(row.step)
    end
    assert.same({ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 }, steps)
  end)
end)

describe("too little memory", function()
  --- Bytes taken from the system, minus bytes that could be returned.
  local function reserved()
    engine.memory { limit = 1 }
    pcall(engine.zeros, 2 ^ 26)
    engine.memory { limit = 0 }
    local sum = 0
    for _, row in ipairs(engine.memory()) do sum = sum + row.reserved end
    return sum
  end

  it("at any moment of a step leaves the weights unchanged, the step's memory and the tape empty",
    function()
    for _, recipe in ipairs { "fp32", "fp16" } do
      engine.seed(3)
      local model, opt = engine.nn.gpt { vocab = 256, context = 16, width = 32, heads = 2,
        layers = 2 }, nil
      local data = engine.data.text { text = TEXT, batch = 4, context = 16 }
      local base, failures, successes, weights = reserved(), 0, 0, nil
      for k = 1, 120 do
        engine.memory { limit = base + 25000 * k }
        local good, message = pcall(function()
          opt = opt or engine.optim.adamw(model, { precision = recipe })
          engine.begin_step()
          opt:zero_grad()
          local batch = data:next()
          local loss = engine.autocast(recipe, function() return model:loss(batch.x, batch.y) end)
          loss:backward { scale = 1024 }
          opt:step { gradient_factor = 1 / 1024 }
          return loss:item()
        end)
        engine.end_step()
        assert(good or message:find("out of memory", 1, true), message)
        if good then successes = successes + 1 else failures = failures + 1 end
        assert.equal(0, C.eng_tape_length())
        assert.equal(0, engine.memory().step.used)
        assert.equal(0, engine.memory().scratch.used)
        local now = opt and tostring(C.eng_params_checksum_of(opt.params, nil, 0))
        if not good and weights then assert.equal(weights, now) end
        weights = now
      end
      engine.memory { limit = 0 }
      assert.is_true(failures > 10 and successes > 10, failures .. " " .. successes)
    end
  end)

  it("for one batch lets the run go on with a smaller one", function()
    local trainer = job { run = folder .. "/a", steps = 6, batch = 4 }
    trainer:run()
    trainer.steps = 10
    local small = trainer.data
    trainer.data = engine.data.text { text = TEXT, batch = 4096, context = 16 }
    engine.memory { limit = reserved() + 2 ^ 20 }
    local good, message = pcall(trainer.run, trainer)
    assert.is_false(good)
    assert.matches("out of memory", message)
    trainer.data = small
    assert.equal(10, trainer:run().steps)
    assert.equal(10, tonumber(trainer.updates))
  end)
end)

describe("another run in the same directory", function()
  local script = [[
    local engine = require "engine"
    engine.seed(1)
    local net = engine.nn.linear(2, 1)
    local data = { next = function() return { x = engine.rand(4, 2), tokens = 4 } end }
    engine.trainer { model = net, data = data, optimizer = engine.optim.sgd(net),
      steps = tonumber(arg[2]), run = arg[1], resume = arg[3], restart_data = true, log = "quiet",
      checkpoint_every = tonumber(arg[4] or 0), loss = function(m, b) return m(b.x):sum() end,
      on_step = function(t)
        if t.steps_done == 1 then io.write("running\n") io.flush() end
        local until_then = os.clock() + (tonumber(arg[5]) or 0)
        while os.clock() < until_then do end
      end }:run()
    print("finished")]]

  local started = {}     -- pid -> the pipe of a process that was started

  after_each(function()
    for pid, pipe in pairs(started) do
      if io.type(pipe) ~= "closed file" then    -- the spec failed before it ended the process
        os.execute("kill -9 " .. pid)
        pipe:close()
      end
    end
    started = {}
  end)

  --- Starts the script in the background with these words; returns its pid when it trains.
  local function start(words)
    local path = helper.write(folder .. "/job.lua", script)
    local pipe = io.popen(("exec 2>&1; %s %s %s & echo $!; wait $!; echo code $?"):format(
      helper.quote(helper.engine), path, words))
    local pid = pipe:read("*l")
    started[pid] = pipe
    assert.equal("running", pipe:read("*l"))
    return pid, pipe
  end

  it("is refused with the process that holds the lock, and does not disturb that process",
    function()
    local run = folder .. "/r"
    local pid, pipe = start(("%s 100000 auto 0 0.001"):format(run))
    local second = helper.run { folder .. "/job.lua", run, "5", "auto" }
    assert.equal(1, second.code)
    assert.matches("locked by process " .. pid, second.err, 1, true)
    assert.matches("hint", second.err)
    os.execute("kill -INT " .. pid)
    local rest = pipe:read("*a")
    pipe:close()
    assert.matches("finished\ncode 130", rest)
    local last = helper.run { folder .. "/job.lua", run, "5", "auto" }
    assert.equal(0, last.code, last.err)
  end)

  it("gets its own name when it must not resume", function()
    local run = folder .. "/r"
    local pid, pipe = start(("%s 100000 false 0 0.001"):format(run))
    local second = helper.run { folder .. "/job.lua", run, "5", "false" }
    assert.equal(0, second.code, second.err)
    assert.equal(2, C.eng_file_kind(run .. "-2/checkpoints"))
    os.execute("kill -INT " .. pid)
    pipe:read("*a")
    pipe:close()
  end)

  it("is called an unknown process if the lock holds no process number", function()
    local path, taken = folder .. "/lock", M_ffi.new("int[2]")
    M_ffi.check(C.eng_file_lock(taken, path))
    for _, text in ipairs { "", "nobody\n", "-3" } do
      helper.write(path, text)
      assert.not_equal(0, C.eng_file_lock(taken + 1, path))
      assert.equal(path .. " is locked by an unknown process", M_ffi.message())
    end
    C.eng_file_unlock(taken[0])
  end)

  it("SIGINT ends a run at the end of a step with a checkpoint; the second ends it at once",
    function()
    local run = folder .. "/r"
    local pid, pipe = start(("%s 1000000000 auto 0 0.001"):format(run))
    os.execute("kill -INT " .. pid)
    local rest = pipe:read("*a")
    pipe:close()
    assert.matches("stopping after this step", rest)
    assert.matches("finished\ncode 130", rest)
    local path = engine.checkpoint.latest(run .. "/checkpoints")
    assert.is_truthy(path)

    pid, pipe = start(("%s 1000000000 false 0 30"):format(folder .. "/s"))
    os.execute("kill -INT " .. pid .. "; sleep 0.2; kill -INT " .. pid)
    rest = pipe:read("*a")
    pipe:close()
    assert.matches("code 130", rest)
    assert.is_nil(rest:find("finished"))
  end)
end)

describe("files of a run", function()
  it("that were removed are reported, and the final checkpoint exists", function()
    local run = folder .. "/r"
    local trainer = job { run = run,
      on_step = function(t) if t.steps_done == 4 then os.execute("rm -rf " .. run) end end }
    trainer:run()
    assert.matches("removed or replaced", (next(trainer.run_files.complained)))
    assert.is_truthy(engine.checkpoint.latest(run .. "/checkpoints"))
  end)

  it("that are not a history stop a run before it begins", function()
    local run = folder .. "/r"
    os.execute("mkdir -p " .. run)
    helper.write(run .. "/history.db", ("no database "):rep(1000))
    assert.matches("is not a history", helper.failure(job, { run = run, resume = "auto" }))
    os.remove(run .. "/history.db")
    assert.equal(12, job { run = run, resume = "auto" }:run().steps)  -- no longer locked
  end)

  it("with a sound state that belongs to no trainer are refused", function()
    local run = folder .. "/r"
    job { run = run }:run()
    local c = engine.checkpoint.load(run .. "/checkpoints")
    c.state.steps = 500
    for field, spoiled in pairs { ["steps"] = { steps = "7" }, ["rng"] = { rng = 5 },
      ["optimizer.updates"] = { optimizer = { name = "adamw" } },
      ["policy.state"] = { policy = { name = "x" } } } do
      local state = {}
      for key, value in pairs(c.state) do state[key] = value end
      for key, value in pairs(spoiled) do state[key] = value end
      engine.checkpoint.save(run .. "/checkpoints", 500, { model = c.model, optimizer = c.optimizer,
        state = state })
      helper.refuses("is not a checkpoint of a trainer: state.json: state." .. field ..
        ": expected ", job, { run = run, resume = "auto" })
    end
    engine.checkpoint.save(run .. "/checkpoints", 500, { state = c.state })
    assert.matches("has no weights", helper.failure(job, { run = run, resume = "auto" }))
  end)

  it("whose checkpoints are all damaged stop a run before it drops recorded steps", function()
    local run = folder .. "/r"
    job { run = run, steps = 12 }:run()
    os.execute("rm " .. run .. "/checkpoints/step-*/model.safetensors")
    assert.matches("no checkpoint can be used: .*model.safetensors is missing; hint: restore " ..
      "what is missing, or start a new run with run=ANOTHER_NAME",
      helper.failure(function() job { run = run, steps = 5, resume = "auto" }:run() end))
    assert.equal(12, #engine.history.open(run .. "/history.db"):steps())
  end)

  it("without checkpoints say so, and do not mix old rows with new ones", function()
    local run = folder .. "/r"
    job { run = run, steps = 12 }:run()
    os.execute("rm -rf " .. run .. "/checkpoints/step-*")
    local again = job { run = run, steps = 5, resume = "auto" }
    assert.matches("nothing to resume: a new run begins; the steps recorded so far are dropped",
      table.concat(again.run_files.notes, "\n"))
    again:run()
    assert.equal(5, #engine.history.open(run .. "/history.db"):steps())
  end)
end)

describe("a learning rate", function()
  it("of nan or inf from a schedule is refused before it reaches a weight", function()
    for _, lr in ipairs { 0 / 0, math.huge, -1 } do
      local trainer = job { steps = 3, schedule = function() return lr end }
      local before = checksum(trainer)
      local good, message = pcall(trainer.run, trainer)
      assert.is_false(good)
      assert.matches("expected lr to be a finite number", message)
      assert.equal(before, checksum(trainer))
    end
  end)
end)
