-- Several ranks of one job, over Open MPI on this machine: the same training as one rank, also
-- through overflows; attribution of overflows; decisions that differ; ranks that die or hang;
-- resuming with another number of ranks. The job is spec/dist/job.lua.
local engine = require "engine"
local fused_state = require "engine.train.fused_state"
local helper = require "spec.helper"

local start = require "spec.dist.start"

if not start.can("ranks") then return end

-- Runs the job with n ranks (0: without mpirun). Returns the lines of its steps, the weights'
-- checksums by rank, and the result.
local function job(n, settings)
  local result = start.run(n, "spec/dist/job.lua", settings)
  local weights = {}
  for rank, sum in result.err:gmatch("rank (%d+): weights (%w+)") do
    weights[tonumber(rank) + 1] = sum
  end
  return start.steps(result, "signal"), weights, result
end

local function alike(weights, n)
  assert.equal(n, #weights)
  for i = 2, n do assert.equal(weights[1], weights[i]) end
  return weights[1]
end

local function numbers(line)
  local loss, scale, action = line:match("^%d+ (%S+) (%S+) (%S+)")
  return tonumber(loss), tonumber(scale), action
end

-- Expects losses within a relative difference and equal scales and actions.
local function near(expected, got)
  assert.equal(#expected, #got)
  for i, line in ipairs(expected) do
    local a, scale, action = numbers(line)
    local b, scale_b, action_b = numbers(got[i])
    assert.is_true(math.abs(a - b) <= 1e-5 * math.abs(a), line .. " against " .. got[i])
    assert.same({ scale, action }, { scale_b, action_b })
  end
end

local folder
describe("ranks", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("run shadows at their own scales, with ZeRO as well", function()
    local own = "dynamic:init_scale=2^18,growth_interval=5"
    for _, zero in ipairs { 0, 2 } do
      local run = ("%s/run%d"):format(folder, zero)
      local result = start.run(2, "examples/gpt.lua", { "steps=12", "layers=1", "width=32",
        "context=32", "sample=0", "log=quiet", "threads=1", "zero=" .. zero, "run=" .. run,
        "policy=" .. own, "shadow=" .. own .. ",static:loss_scale=2^22" })
      assert.equal(0, result.code, result.err)
      local h = engine.history.open(run)
      local same, high = unpack(h:shadows())
      assert.same({ #h:overflows(), #h:overflows(), 0 },
        { same.skipped, same.overflows, same.bounds })
      assert.is_true(same.overflows > 0 and same.overflows < 12)
      assert.same({ 12, 12 }, { high.skipped, high.overflows })
      assert.is_true(high.bounds > 0)
      h:close()
    end
  end)

  it("are shown in the log, the history, `engine runs` and the report, also on resume", function()
    local run = folder .. "/run"
    local function gpt(n, ...)
      return start.run(n, "examples/gpt.lua", { "run=" .. run, "resume=auto", "layers=1",
        "width=16", "heads=2", "context=8", "batch=2", "sample=0", ... })
    end
    local first = gpt(2, "steps=2", "zero=1", "wire=bf16")
    assert.matches("policy dynamic, 2 ranks, ZeRO%-1, comm dtype bf16, %d+ threads? each\n",
      first.out)
    local meta = engine.history.open(run):meta()
    assert.same({ "2", "1", "bf16" }, { meta.ranks, meta.zero, meta.comm_dtype })
    assert.matches("ranks +ended\n[^\n]* 2 ranks, ZeRO%-1, comm dtype bf16 +finished\n",
      helper.run({ "runs", folder }).out)
    assert.equal(0, helper.run({ "report", run }).code)
    assert.matches("on cpu · 2 ranks, ZeRO-1, comm dtype bf16<",
      helper.read(run .. "/report.html"), 1, true)
    local second = gpt(0, "steps=3")
    assert.matches("policy dynamic, %d+ threads?\n", second.out)
    assert.matches("\n1 rank with accumulate=2 continues a run of 2 with accumulate=1, " ..
      "with the same steps except for rounding\n", second.out .. second.err)
    assert.equal("1", engine.history.open(run):meta().ranks)
    assert.not_matches("ranks +ended", helper.run({ "runs", folder }).out)
  end)

  it("train as one rank does with all their batches", function()
    local one = job(0, { "accumulate=4", "clip=1" })
    local two, two_weights = job(2, { "accumulate=2", "clip=1" })
    local four, four_weights = job(4, { "clip=1" })
    near(one, two)
    near(one, four)
    alike(two_weights, 2)
    alike(four_weights, 4)
  end)

  -- Expects the same training with sharded moments (ZeRO-1), and with sharded gradients as well
  -- (ZeRO-2).
  local function same_with_zero(n, settings)
    local plain, weights = job(n, settings)
    for zero = 1, 2 do
      local shared, shared_weights = job(n, { "zero=" .. zero, unpack(settings) })
      assert.same(plain, shared)
      assert.equal(alike(weights, n), alike(shared_weights, n))
    end
    return plain
  end

  it("train the same with ZeRO, bit for bit", function()
    for _, kind in ipairs(fused_state.kinds) do
      same_with_zero(2, { "clip=1", "optimizer=" .. kind.name })
    end
    same_with_zero(4, { "precision=fp16", "policy=dynamic:init_scale=2^27" })
    same_with_zero(3, { "wire=bf16", "tied=false" })
  end)

  it("with ZeRO-2, which sends every micro-batch, train as one rank does", function()
    local one = job(0, { "accumulate=6", "clip=1" })
    local two, weights = job(2, { "accumulate=3", "clip=1", "zero=2", "bucket=0.01" })
    near(one, two)
    local three, three_weights = job(3, { "accumulate=2", "clip=1", "zero=2" })
    near(one, three)
    alike(weights, 2)
    alike(three_weights, 3)
    -- the bucket size changes no sum
    local again, again_weights = job(2, { "accumulate=3", "clip=1", "zero=2", "bucket=0.05" })
    assert.same(two, again)
    assert.equal(alike(weights, 2), alike(again_weights, 2))
  end)

  it("sum fp16 gradients of micro-batches in f32, with ZeRO, too", function()
    local settings = { "precision=fp16", "accumulate=3", "policy=static:loss_scale=2^20" }
    local plain, weights = job(2, settings)
    local shared, shared_weights = job(2, { "zero=1", unpack(settings) })
    assert.same(plain, shared)
    assert.equal(alike(weights, 2), alike(shared_weights, 2))
    local divided, divided_weights = job(2, { "zero=2", unpack(settings) })
    near(plain, divided)
    alike(divided_weights, 2)
  end)

  it("scale FP8 layers by the amaxes of all ranks, also with ZeRO", function()
    for _, precision in ipairs { "fp8_delayed", "fp8_block" } do
      same_with_zero(2, { "precision=" .. precision })
    end
  end)

  it("go through overflows, skips and retries together", function()
    local policy = helper.write(folder .. "/again.lua",
      [[return { name = "again", init = function() return { scale = 2^29 } end,
        decide = function(s, r)
          if r.overflow then
            s.scale = s.scale / 16
            return { scale = s.scale, action = "retry" }
          end
          return s.scale
        end }]])
    local one = job(0, { "accumulate=2", "precision=fp16", "policy=" .. policy, "dropout=0.1" })
    local two = same_with_zero(2, { "precision=fp16", "policy=" .. policy, "dropout=0.1" })
    assert.matches("retry", table.concat(two, "\n"))
    assert.matches("step", table.concat(two, "\n"))
    assert.equal(#one, #two)
    for i = 1, #one do
      local a, scale, action = numbers(one[i])
      local b, scale_b, action_b = numbers(two[i])
      assert.same({ scale, action }, { scale_b, action_b })
      assert.is_true(math.abs(a - b) < 1e-3 * a)          -- fp16 sums are rounded
    end
  end)

  it("send gradients in bf16 and FP8 with the errors of these formats", function()
    local exact = job(2, {})
    for wire, most in pairs { bf16 = 1e-3, fp8 = 1e-2 } do
      local lines, weights = job(2, { "wire=" .. wire })
      alike(weights, 2)
      local a, b = numbers(exact[#exact]), numbers(lines[#lines])
      assert.is_true(math.abs(a - b) <= most * a, wire)
    end
  end)

  it("skip the same step whichever rank has the inf or nan, and report rank and tensor", function()
    for _, case in ipairs { { "inf", 1, "blocks.2.mlp.up.weight", 0 },
      { "nan", 2, "wte.weight", 1 }, { "inf", 2, "wte.weight", 2 } } do
      local kind, rank, tensor, zero = unpack(case)
      local run = folder .. "/" .. kind .. rank
      local lines, weights = job(3, { "plant=" .. kind, "plant_rank=" .. rank, "plant_tensor=" ..
        tensor, "zero=" .. zero, "precision=fp16", "run=" .. run })
      alike(weights, 3)
      for i, line in ipairs(lines) do
        local _, scale, action = numbers(line)
        assert.equal(i == 3 and "skip" or "step", action)
        assert.equal(i <= 3 and 65536 or 32768, scale)
      end
      local history = require("engine.run.history").open(run)
      local event = history:query("select text from events where kind = 'overflow'")[1]
      history:close()
      assert.matches(("%s from rank %d, first in %s"):format(kind, rank, tensor), event.text, 1,
        true)
    end
  end)

  it("report an overflow that exists only in the sum over ranks, and only once", function()
    local script = helper.write(folder .. "/sum.lua", [[
      local engine = require "engine"
      local net = engine.nn.linear(1, 1)
      engine.trainer { model = net, optimizer = engine.optim.sgd(net), policy = "static",
        steps = 12, run = arg[1], comm_dtype = arg[2], trap = arg[3], zero = tonumber(arg[4]),
        accumulate = tonumber(arg[4]),
        data = { next = function() return { x = engine.full({ 1, 1 }, 3.4e38), tokens = 1 } end },
        loss = function(m, b) return m(b.x):sum() end }:run()]])
    local words = "each rank's own gradients are finite, but their sum in comm dtype fp8 is not"
    for _, trap in ipairs { "", "overflow" } do
      local result = start.run(2, script, { folder .. "/run" .. trap, "fp8", trap, "2" })
      local text = result.out .. result.err
      assert.equal(0, result.code, text)
      assert.equal(1, select(2, text:gsub("overflows in a row", "")), text)
      assert.equal(trap == "" and 1 or 2, select(2, text:gsub(words, "")), text)
      assert.not_matches("rank 1:", text)
      local history = engine.history.open(folder .. "/run" .. trap)
      for _, event in ipairs(history:events "overflow") do
        assert.matches(words, event.text)
      end
      assert.equal(12, #history:events "overflow")
      assert.matches(words, history:events("stuck")[1].text)
      history:close()
    end
    -- one pass: in FP8 the messages and their sum are finite, in bf16 the messages are inf
    start.run(2, script, { folder .. "/fp8", "fp8", "", "1" })
    assert.same({}, helper.history(folder .. "/fp8", "events", "overflow"))
    start.run(2, script, { folder .. "/low", "bf16", "", "1" })
    local event = helper.history(folder .. "/low", "events", "overflow")[1]
    for rank = 0, 1 do
      assert.matches(("inf only in the comm dtype from rank %d, first in weight"):format(rank),
        event.text, 1, true)
    end
  end)

  it("agree in random runs with an inf or nan on one rank", function()
    local result = helper.run { "spec/dist/plantings.lua", "runs=20", "ranks=2,3", "seed=11" }
    assert.equal(0, result.code, result.out .. result.err)
    assert.matches("20 runs, 0 failed", result.out, 1, true)
  end)

  it("end as their status and history say, whatever signals they get, and resume", function()
    if helper.sanitized then return pending("its jobs have time limits") end
    local result = helper.run { "spec/chaos.lua", "first=8", "runs=2" }
    assert.equal(0, result.code, result.out .. result.err)
    assert.matches("2 runs, 0 failed", result.out, 1, true)
  end)

  it("swap policies together, whatever differs or fails on one rank", function()
    local result = helper.run { "spec/dist/swaps.lua", "swaps=20", "ranks=3" }
    assert.equal(0, result.code, result.out .. result.err)
    assert.matches("0 failed", result.out, 1, true)
  end)

  it("resume from a checkpoint with the same and with another number of ranks", function()
    local whole, weights = job(4, { "steps=6", "dropout=0.1" })
    job(4, { "steps=3", "dropout=0.1", "zero=1", "run=" .. folder .. "/run" })
    for _, n in ipairs { 4, 2, 1 } do
      local copy = ("%s/run%d"):format(folder, n)
      helper.shell(("cp -r %s/run %s"):format(folder, copy))
      local rest, rest_weights = job(n, { "steps=6", "dropout=0.1", "run=" .. copy, "resume=auto" })
      near({ unpack(whole, 4) }, rest)
      alike(rest_weights, n)
      if n == 4 then
        assert.same({ unpack(whole, 4) }, rest)
        assert.equal(weights[1], rest_weights[1])
      end
    end
  end)

  it("let trainers with different options take turns on one optimizer, without ZeRO", function()
    local script = helper.write(folder .. "/turns.lua", [[
      local engine = require "engine"
      local cfg = engine.config { zero_of_first = 0, zero_of_second = 0 }
      engine.seed(1)
      local net = engine.nn.linear(64, 64)
      local optimizer = engine.optim.adamw(net, { lr = 1e-2 })
      local data = { next = function() return { x = engine.rand(4, 64), tokens = 4 } end }
      local function trainer(options)
        options.model, options.optimizer, options.data, options.log = net, optimizer, data, "quiet"
        options.steps, options.loss = 2, function(m, b) return m(b.x):sum() end
        return engine.trainer(options)
      end
      local function say(...) engine.ranks.say("%s", table.concat({ ... }, " ")) end
      local function try(f, ...)
        local good, message = pcall(f, ...)
        return good and "well" or message:match("^[^\n]*")
      end
      local second
      local function make() second = trainer { bucket = 1, zero = cfg.zero_of_second } end
      local first = trainer { bucket = 2, zero = cfg.zero_of_first }
      say("made", try(make))
      for turn = 1, 2 do
        say("first", try(first.run, first))
        if second then second:run() end
        first.steps = 4
        if second then second.steps = 4 end
      end
      say("done", first.updates, second and second.updates or "no",
        tostring(require("engine.base.ffi").C.eng_params_checksum_of(optimizer.params, nil, 0)))]])
    local function turns(...)
      local result = start.run(2, script, { ... })
      assert.equal(0, result.code, result.out .. result.err)
      local first, second = result.err:match("rank 0: (done [^\n]*)"),
        result.err:match("rank 1: (done [^\n]*)")
      assert.truthy(first)
      assert.equal(first, second)
      return result.err, first
    end
    local _, ended = turns()
    assert.matches("^done 4 4 ", ended)
    local refusal = "a trainer with ZeRO has divided this optimizer's state among the ranks"
    local text
    text, ended = turns "zero_of_first=1"
    assert.matches("rank 1: made [^\n]*" .. refusal, text)
    assert.matches("^done 4 no ", ended)
    text, ended = turns "zero_of_second=1"
    assert.matches("rank 1: first [^\n]*" .. refusal, text)
    assert.matches("^done 0 4 ", ended)
  end)

  -- ---------------------------------------------------------------- differences

  it("with different policies or settings are detected at once", function()
    local _, _, result = job(2, { "odd_rank=1", "odd_policy=dynamic" })
    assert.are_not.equal(0, result.code)
    assert.matches("rank 1 differs from rank 0: policy dynamic", result.err, 1, true)
    local edited = helper.write(folder .. "/mine.lua",
      helper.read("policies/dynamic.lua"):gsub("name *= *\"dynamic\"", "name = \"mine\""))
    _, _, result = job(2, { "policy=" .. edited, "odd_rank=1", "odd_steps=7" })
    assert.matches("rank 1 differs from rank 0: steps 7", result.err, 1, true)
  end)

  it("with different code or an early reduction in the script are detected, too", function()
    for _, case in ipairs { "another Lua file", "a script that reduces first",
      "a rank that is not the engine" } do
      local result = helper.run { "spec/dist/differences.lua", "only=" .. case }
      assert.equal(0, result.code, result.out .. result.err)
      assert.matches("1 cases, 0 failed", result.out, 1, true)
    end
  end)

  it("that decide differently stop and report both decisions", function()
    local lines, _, result = job(2, { "policy=moody", "agree_every=0" })
    assert.are_not.equal(0, result.code)
    assert.is_true(#lines <= 1)
    assert.matches("rank 0: step 0 at scale 1: step, scale 1,", result.err, 1, true)
    assert.matches("rank 1: step 0 at scale 1: step, scale 2,", result.err, 1, true)
  end)

  it("swap policies together, or not at all", function()
    local good = helper.write(folder .. "/good.lua",
      [[return { name = "good", init = function() return { scale = 1 } end,
        decide = function() return 4 end }]])
    local bad = helper.write(folder .. "/bad.lua",
      [[return { name = "bad", init = function() return { scale = 1 } end,
        decide = function() error("no") end }]])
    local lines, weights = job(2, { "swap_step=2", "swap=" .. good })
    assert.matches("static$", lines[2])
    assert.matches("good$", lines[3])
    alike(weights, 2)
    lines = job(2, { "swap_step=2", "swap=" .. bad })
    assert.matches("static$", lines[#lines])
    -- one rank cannot run the policy
    lines, weights = job(2, { "swap_step=2", "swap=" .. good, "few_rank=1" })
    assert.equal(6, #lines)
    assert.matches("static$", lines[#lines])
    alike(weights, 2)
  end)

  it("treat a nan on one replica like a nan on all, as tf_keras does", function()
    local lines, weights = job(2, { "precision=fp16", "policy=tensorflow:initial_loss_scale=2",
      "plant=nan", "plant_rank=1", "plant_step=0", "steps=2" })
    assert.matches("^0 %S+ 2 skip", lines[1])
    assert.matches("^1 %S+ 1 step", lines[2])
    alike(weights, 2)
  end)

  it("reduce signals by the rule that the script names", function()
    for rule, value in pairs { mean = 1.5, max = 2, sum = 3 } do
      local lines = job(2, { "signal=" .. rule, "steps=3" })
      local last
      for _, line in ipairs(lines) do last = line:match("^signal (%S+)") or last end
      assert.equal(value, tonumber(last))
    end
  end)

  it("reduce any number of signals", function()
    local script = helper.write(folder .. "/signals.lua", [[
      local engine = require "engine"
      local rank, gathered = engine.ranks.rank(), 0
      local from_all = engine.ranks.from_all
      function engine.ranks.from_all(...)
        gathered = gathered + 1
        return from_all(...)
      end
      local net = engine.nn.linear(2, 1)
      engine.trainer { model = net, optimizer = engine.optim.sgd(net), steps = 4, log = "quiet",
        data = { next = function() return { x = engine.ones(4, 2), tokens = 4 } end },
        loss = function(m, b)
          for i = 1, 400 do engine.signal("entropy.of.layer." .. i, i + rank, "max") end
          return m(b.x):sum()
        end,
        on_step = function(t)
          local n = 0
          for i = 1, 400 do
            if t.reducer.signals["entropy.of.layer." .. i] == i + 1 then n = n + 1 end
          end
          print(n .. " of 400 signals, texts gathered " .. gathered)
          gathered = 0
        end }:run()]])
    local result = start.run(2, script)
    local lines = {}
    for line in result.out:gmatch("[^\n]+") do lines[#lines + 1] = line end
    assert.equal(4, #lines, result.err)
    assert.matches("^400 of 400 signals", lines[1])
    for i = 2, 4 do assert.equal("400 of 400 signals, texts gathered 0", lines[i]) end
  end)

  -- ---------------------------------------------------------------- the end of a job

  it("exit with the status of their run when all of them have ended", function()
    local stops = helper.write(folder .. "/stops.lua",
      [[return { init = function() return { scale = 1 } end, decide = function(_, record)
        return { scale = 1, action = record.step == 2 and "stop" or nil } end }]])
    local lines, weights, result = job(2, { "policy=" .. stops })
    assert.equal(2, result.code, result.out .. result.err)
    assert.equal(3, #lines)
    alike(weights, 2)
  end)

  it("receive nothing after an interrupted exchange, and communicate no more", function()
    local script = helper.write(folder .. "/interrupted.lua", [[
      local M_ffi = require "engine.base.ffi"
      local ranks, file = require("engine").ranks, require "engine.base.file"
      local C, ffi, f64 = M_ffi.C, M_ffi.ffi, M_ffi.dtype.f64
      ffi.cdef "void *calloc(size_t n, size_t size);"
      local N, world, where, what = 4000, ranks.world(), arg[1], arg[2]
      local function memory(n) return ffi.cast("double *", ffi.C.calloc(n, 8)) end
      local own, all = memory(N), memory(2 * N)
      for i = 0, N - 1 do own[i] = 7 end
      local function exchange()
        if what == "reduction" then return C.eng_comm_all_reduce(world, own, N, f64, C.ENG_SUM) end
        return C.eng_comm_all_gather(world, all, own, 8 * N)
      end
      local function wait_for(name)
        while not file.exists(where .. name) do os.execute "sleep 0.01" end
      end
      if ranks.rank() == 1 then
        wait_for "/interrupted"
        file.write(where .. "/begun", "")
        exchange()
        wait_for "/looked"
        os.exit(0)
      end
      C.eng_interrupt(2)
      assert(exchange() == C.ENG_ERR_INTERRUPTED)
      local other = memory(N)                 -- gets the reduction's memory if it was freed
      file.write(where .. "/interrupted", "")
      wait_for "/begun"
      local status, landed
      for _ = 1, 20 do                        -- more calls let messages arrive
        os.execute "sleep 0.02"
        status = C.eng_comm_barrier(world)
      end
      for i = 0, N - 1 do landed = landed or other[i] ~= 0 or all[N + i] ~= 0 end
      C.eng_interrupt(0)
      local function pages() return io.open("/proc/self/statm"):read "*n" end
      local before = pages()
      for _ = 1, 2000 do C.eng_comm_all_reduce(world, own, N, f64, C.ENG_SUM) end   -- 64 MB
      assert(pages() - before < 4000, "refused reductions keep memory")
      print(what, landed and "landed" or "nothing landed", M_ffi.message())
      io.stdout:flush()
      file.write(where .. "/looked", "")]])
    for _, what in ipairs { "gather", "reduction" } do
      local result = start.run(2, script, { folder, what })
      assert.equal(what .. "\tnothing landed\tan exchange between ranks was cut short: this " ..
        "process can no longer reach the other ranks; hint: start the job again\n",
        result.out:match("%a.*"))             -- mpirun of Open MPI 5 may print a NUL first
      assert.equal(70, result.code)
      helper.shell(("rm %s/[bil]*ed %s/begun"):format(folder, folder))
    end
  end)

  it("name rank, operation and bytes when they exchange different lengths", function()
    local script = helper.write(folder .. "/lengths.lua", [[
      local engine = require "engine"
      local M_ffi = require "engine.base.ffi"
      local n = engine.ranks.rank() == 0 and 16 or tonumber(arg[1])
      M_ffi.check(M_ffi.C.eng_comm_broadcast(engine.ranks.world(), M_ffi.new("char[24]"), n, 0))]])
    for bytes, got in pairs { [8] = "more", [24] = "16" } do
      local result = start.run(2, script, { bytes })
      assert.not_equal(0, result.code)
      assert.matches(("rank 1, at a broadcast: ranks: expected a message of %d bytes from " ..
        "rank 0, got %s; hint: the ranks make different calls"):format(bytes, got), result.err, 1,
        true)
    end
  end)

  it("refuse collectives whose messages would exceed the largest", function()
    local script = helper.write(folder .. "/large.lua", [[
      local engine = require "engine"
      local M_ffi = require "engine.base.ffi"
      local C, ffi, world = M_ffi.C, M_ffi.ffi, engine.ranks.world()
      local n = ffi.new "double[1]"              -- never read: the call refuses the size first
      print(C.eng_comm_all_gather(world, n, n, 2 ^ 30 + 8), M_ffi.message())
      print(C.eng_comm_all_reduce(world, n, 2 ^ 28 + 1, M_ffi.dtype.f64, C.ENG_SUM),
        M_ffi.message())
      engine.ranks.barrier()]])
    local result = start.run(2, script)
    assert.equal(0, result.code, result.err)
    assert.matches("an all-gather: expected at most 1 GiB from each rank, got 1073741832 bytes",
      result.out, 1, true)
    assert.matches("a reduction: expected at most 1 GiB for each rank to sum, got 1073741832 " ..
      "bytes", result.out, 1, true)
  end)

  it("end when one of them raises, dies or hangs, and the message names it", function()
    local _, _, result = job(2, { "raise_rank=1" })
    assert.are_not.equal(0, result.code)
    assert.matches("this rank has had enough", result.err, 1, true)
    _, _, result = job(2, { "die_rank=1" })
    assert.are_not.equal(0, result.code)
    assert.matches("process rank 1", result.err .. result.out, 1, true)
    -- Rank 1 has only just begun to wait and must not be named.
    _, _, result = job(3, { "hang_rank=2", "slow_rank=1", "slow=2.7", "timeout=3",
      "agree_every=0" })
    assert.equal(70, result.code)
    assert.matches("rank 2 did not reach the sum of gradients within 3 s", result.err, 1, true)
  end)

  it("do not count as waiting the time during which they were stopped", function()
    -- While rank 1 is slow, rank 0 waits for it and is stopped for longer than rank_timeout.
    local script = helper.write(folder .. "/stops.lua", [[
      local execute = os.execute
      local pid = require("engine").ranks.from_all(io.open("/proc/self/stat"):read("*l"))[1]
        :match "^%d+"
      os.execute = function()
        execute(("sleep 0.2; kill -STOP %s; sleep 4; kill -CONT %s"):format(pid, pid))
      end
      dofile "spec/dist/job.lua"]])
    local result = start.run(2, script, { "slow_rank=1", "timeout=3" })
    assert.equal(0, result.code, result.err)
  end)

  it("end with the number of the signal that only one of them received", function()
    local script = helper.write(folder .. "/signals.lua", [[
      os.execute = function()
        local pid = io.open("/proc/self/stat"):read("*n")
        io.popen("kill -USR2 " .. pid):close()
      end
      dofile "spec/dist/job.lua"]])
    local command = ("%s %s slow_rank=1 run=%s/run; echo status $? >&2"):format(
      helper.quote(helper.engine), script, folder)
    local result = helper.shell(start.mixed { { n = 3, program = "sh -c " ..
      helper.quote(command) } })
    assert.equal(3, select(2, result.err:gsub("status 140", "")), result.err)
  end)
end)
