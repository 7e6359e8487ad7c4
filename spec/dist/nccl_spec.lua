-- NCCL between cards, with fakes for both (spec/cuda/fake_card.c, fake_nccl.c). Training must
-- equal, bit for bit, training through host memory. Also: ranks started without MPI, configurations
-- that are refused, and ranks that die or hang. Real NCCL and real cards are not used.
local helper = require "spec.helper"
local start = require "spec.dist.start"

if not start.fakes_there then
  if not helper.sanitized and not os.getenv("ENGINE_TEST_DEVICE") then
    describe("NCCL", function()
      pending "the fakes of a card and of NCCL were not built (make test): these are not run"
    end)
  end
  return
end

local WORLD, JOB, EXPERTS = "spec/dist/world.lua", "spec/dist/job.lua", "spec/dist/experts.lua"
local folder

-- The lines of a job's steps, the report of the weights at the end (the same text on every rank),
-- and the result.
local function read(result)
  local lines, weights = start.steps(result, "sent"), {}
  table.sort(lines)
  for text in result.err:gmatch("rank %d+: ([wc][eo][im][^\n]*)") do
    weights[#weights + 1] = text
  end
  for _, text in ipairs(weights) do assert.equal(weights[1], text) end
  return { lines = lines, weights = weights[1], ranks = #weights, code = result.code,
    out = result.out, err = result.err }
end

local function with_device(settings) return { "device=cuda", unpack(settings) } end

-- n ranks with NCCL only (`alone`), or with MPI as well (`over_mpi`).
local function alone(n, script, settings, options)
  local o = { folder = folder }
  for k, v in pairs(options or {}) do o[k] = v end
  return read(start.nccl(n, script, with_device(settings), o))
end
local function over_mpi(n, script, settings, environment)
  return read(start.run(n, script, with_device(settings),
    { environment = ("%s FAKE_NCCL_FOLDER=%s %s"):format(start.FAKES, folder, environment or "") }))
end

local function good(job, n)
  assert(job.code == 0 and job.ranks == n and #job.lines > 0, job.out .. job.err)
  return job
end

local function same(a, b)
  assert.same(a.lines, b.lines)
  assert.equal(a.weights, b.weights)
end

local function names(text) return function(rank) return (text:gsub("#", rank)) end end

describe("NCCL", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("runs collectives of ranks started by torchrun, srun or by hand", function()
    for n, how in pairs {
      [2] = {},
      [3] = { names = names("SLURM_PROCID=# SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=# " ..
        "MASTER_ADDR=127.0.0.1") },
      [4] = { names = names "RANK=# WORLD_SIZE=4 MASTER_ADDR=::1" },
      [1] = { names = names "ENGINE_RANKS=nccl" },
    } do
      how.folder = folder
      local result = start.nccl(n, WORLD, {}, how)
      assert(result.code == 0, result.err)
      assert.equal(n, select(2, result.err:gsub("good", "")))
      assert.matches(("NCCL 2.28.9 without MPI, %d rank"):format(n), result.out, 1, true)
      assert.matches(("%d of them here"):format(n), result.out, 1, true)
    end
  end)

  it("finds ranks next to torchrun's port, or at NCCL_COMM_ID", function()
    -- Rank 1 gets the address that rank 0 must choose by itself.
    for place, environment in pairs { ["10.0.0.7:29401"] = "MASTER_PORT=29400",
      ["10.0.0.7:29501"] = "A=B" } do
      local result = start.nccl(2, WORLD, {}, { folder = folder, names = function(rank)
        return ("RANK=%d WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x MASTER_ADDR=10.0.0.7 %s %s"):format(
          rank, environment, rank == 1 and "NCCL_COMM_ID=" .. place or "")
      end })
      assert(result.code == 0, result.err)
    end
  end)

  if start.there then
    it("gives way to mpirun in a shell that torchrun started as its only process", function()
      local result = start.run(2, "spec/dist/world.lua", {},
        { environment = "TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1" })
      assert(result.code == 0, result.err)
      assert.matches("2 ranks, 2 of them here", result.out, 1, true)
    end)

    it("trains bit for bit as through the host: dtypes, ZeRO, overflows, accumulation", function()
      for _, case in ipairs {
        { 2, "precision=fp16", "policy=dynamic:init_scale=2^19", "bucket=0.005" },
        { 4, "wire=fp8", "width=38", "clip=1" },
        { 3, "zero=2", "wire=fp16", "accumulate=2", "optimizer=lion" },
        { 2, "zero=1", "wire=bf16", "precision=fp16", "policy=dynamic:init_scale=2^18" },
      } do
        local n = table.remove(case, 1)
        local staged = good(over_mpi(n, JOB, case, "ENGINE_NCCL=off"), n)
        same(staged, good(alone(n, JOB, case), n))
        if n == 3 then same(staged, good(over_mpi(n, JOB, case, "ENGINE_NCCL=on"), n)) end
      end
    end)

    it("exchanges experts' rows as through the host, bit for bit", function()
      for _, case in ipairs {
        { 4, "over=2", "dispatch=fp8", "combine=bf16", "clip=0.5" },
        { 2, "precision=fp16", "policy=dynamic:init_scale=2^18", "wire=bf16", "zero=1" },
      } do
        local n = table.remove(case, 1)
        local staged = good(over_mpi(n, EXPERTS, case, "ENGINE_NCCL=off"), n)
        same(staged, good(alone(n, EXPERTS, case), n))
        if n == 2 then same(staged, good(over_mpi(n, EXPERTS, case), n)) end
      end
    end)

    it("is used with MPI where possible, else the log gives the reason", function()
      local settings = { "steps=1", "log=json" }
      local function text(environment)
        local job = over_mpi(2, JOB, settings, environment)
        return job.out .. job.err, job.code
      end
      for environment, expected in pairs {
        [""] = "from card to card over NCCL 2.28.9",
        ["ENGINE_NCCL=off"] = "through the host: ENGINE_NCCL=off",
        ["FAKE_CARD=same"] = "through the host: ranks 0 and 1 share one card, which NCCL refuses",
        ["ENGINE_NCCL_LIBRARY=/none.so"] = "through the host: rank 0: cannot load /none.so",
        ["FAKE_NCCL_VERSION=21703"] = "through the host: rank 0: NCCL 2.17.3, ",
      } do
        local said, code = text(environment)
        assert.equal(0, code, said)
        assert.matches(expected, said, 1, true)
        if environment:find("=same") then
          said, code = text("ENGINE_NCCL=on " .. environment)
          assert.are_not.equal(0, code)
          assert.matches("NCCL is required (ENGINE_NCCL=on) but not available: " ..
            expected:gsub("through the host: ", ""), said, 1, true)
        end
      end
      assert.matches("ENGINE_NCCL on rank 0: expected auto, on or off, got 'yes'",
        (text("ENGINE_NCCL=yes")), 1, true)
      local on_host = { "steps=1", "device=cpu" }
      assert.matches(": ENGINE_NCCL on rank 1: expected auto, on or off, got 'yes'\n",
        helper.shell(start.mixed({ { settings = on_host },
          { settings = on_host, environment = "ENGINE_NCCL=yes" } }, JOB)).err, 1, true)
    end)

    it("with MPI ends a job that waits for a rank, and names the rank", function()
      local job = over_mpi(3, JOB, { "hang_rank=2", "timeout=3", "agree_every=0" })
      assert.equal(70, job.code)
      assert.matches("rank 2 did not reach the sum of gradients within 3 s", job.err, 1, true)
    end)
  end

  it("reports the rank and the tensor of an inf", function()
    local job = good(alone(3, JOB, { "plant=inf", "plant_rank=2", "precision=fp16",
      "run=" .. folder .. "/inf", "zero=1" }), 3)
    assert.matches("^2 %S+ %S+ skip", job.lines[3])
    assert.matches("inf from rank 2, first in blocks.2.mlp.up.weight",
      helper.history(folder .. "/inf", "events", "overflow")[1].text, 1, true)
  end)

  it("resumes from a checkpoint", function()
    local whole = good(alone(2, JOB, { "steps=4" }), 2)
    good(alone(2, JOB, { "steps=2", "zero=1", "run=" .. folder .. "/run" }), 2)
    local rest = good(alone(2, JOB, { "steps=4", "run=" .. folder .. "/run", "resume=auto" }), 2)
    assert.same({ unpack(whole.lines, 3) }, rest.lines)
    assert.equal(whole.weights, rest.weights)
  end)

  it("without MPI reports in one line what is missing", function()
    for environment, expected in pairs {
      ["FAKE_CARD=same"] = "Duplicate GPU detected",
      ["ENGINE_NCCL_LIBRARY=/none.so"] = "cannot load /none.so",
      ["FAKE_NCCL_VERSION=30001"] = "expected version 2.18 or a later 2",
      ["ENGINE_NCCL=off"] = "these processes have no other connection",
      ["ENGINE_CUDA_PLUGIN=/none.so"] = "(/none.so is missing)",
    } do
      local result = start.nccl(2, WORLD, {}, { folder = folder, environment = environment,
        limit = 20 })
      local line = result.err:match("[^\n]*torchrun started 2 processes without MPI; " ..
        "each needs a card and a connection over NCCL, which failed: [^\n]*")
      assert.are_not.equal(0, result.code)
      assert.matches(expected, line, 1, true)
      assert.matches("; hint: mpirun -np 2 engine SCRIPT", line, 1, true)
    end
    local result = start.nccl(2, JOB, { "device=cpu" }, { folder = folder })
    assert.matches("these processes are connected by NCCL alone, which cannot carry this data: " ..
      "the data of rank 0 is in host memory", result.err, 1, true)
    for environment, expected in pairs {
      ["RANK=0 WORLD_SIZE=2 ENGINE_RANKS=nccl"] =
        "2 processes, which need a rendezvous address to connect over NCCL; hint: set MASTER_ADDR",
      ["RANK=0 WORLD_SIZE=2"] = "WORLD_SIZE=2 and RANK are set, but not MASTER_ADDR",
      ["WORLD_SIZE=2 MASTER_ADDR=x"] = "WORLD_SIZE=2 is set, but RANK is not",
      ["RANK=2 WORLD_SIZE=2 MASTER_ADDR=x"] =
        "WORLD_SIZE=2 RANK=2: expected the number of processes, and a rank below that number",
      ["RANK=0 WORLD_SIZE=2x MASTER_ADDR=x"] = "WORLD_SIZE=2x RANK=0: expected",
      ["ENGINE_RANKS=yes"] = "ENGINE_RANKS=yes: expected off, mpi or nccl",
      ["RANK=0 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=65535"] =
        "MASTER_PORT: expected a port from 1 to 65534, got '65535'",
      ["RANK=0 WORLD_SIZE=2 MASTER_ADDR=x ENGINE_RANK_TIMEOUT=-3"] =
        "ENGINE_RANK_TIMEOUT: expected a number of seconds above 0 and below 1e9, got '-3'",
    } do
      result = start.nccl(1, WORLD, {}, { folder = folder, names = names(environment) })
      assert.are_not.equal(0, result.code)
      assert.matches(expected, result.err, 1, true)
    end
  end)

  it("without MPI ends a job when a rank is absent, dies or hangs", function()
    local result = start.nccl(1, WORLD, {},
      { folder = folder, names = names "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1",
      environment = "ENGINE_RANK_TIMEOUT=1" })
    assert.equal(70, result.code)
    assert.matches("rank 0 of 2 has waited 1 s at the start of the job: another rank has died " ..
      "or hung, or was never started", result.err, 1, true)
    local began = os.time()
    local job = alone(3, JOB, { "hang_rank=1", "timeout=2", "agree_every=0" })
    assert.equal(70, job.code)
    -- Rank 0 or 2 gives up first. The other one may detect this before its own timeout and then
    -- prints another message.
    assert.matches("rank [02] of 3 has waited 2 s at the sum of gradients", job.err)
    assert.not_matches("rank 1 of 3", job.err, 1, true)
    job = alone(3, JOB, { "die_rank=1", "timeout=40", "agree_every=0" })
    assert.are_not.equal(0, job.code)
    assert.matches("nccl: the sum of gradients: remote process exited", job.err, 1, true)
    assert.is_true(os.time() - began < 30)
  end)
end)
