-- Experts of nn.moe divided over ranks: rows exchanged between ranks, the same training as on one
-- rank, comm dtypes, attribution of overflows, and checkpoints. The job is spec/dist/experts.lua.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"
local start = require "spec.dist.start"

local C, ffi = M_ffi.C, M_ffi.ffi

describe("rows between ranks", function()
  local comm = engine.ranks.group().comm
  local function exchanged(x, wire, facts)
    local y, n = engine.zeros(x.shape, x.dtype), ffi.new("int64_t[1]", x:size(1))
    M_ffi.check(C.eng_comm_exchange_rows(y, x, comm, n, n, C[wire], facts))
    return y
  end

  it("are rounded to the comm dtype row by row, also when they stay on the rank", function()
    engine.seed(1)
    for _, columns in ipairs { 5, 128, 200, 256 } do
      local x = engine.randn(7, columns)
      x:select(1, 3):copy(engine.randn(columns) * 1e6)
      x:select(1, 4):zero()
      local y, facts = exchanged(x, "ENG_COMM_FP8"), ffi.new("eng_exchange_facts")
      for row = 1, 7 do
        local alone = ffi.new("float[?]", columns, x:select(1, row):totable())
        M_ffi.check(C.eng_comm_dtype_round(alone, columns, C.ENG_COMM_FP8))
        for i, v in ipairs(y:select(1, row):totable()) do assert.equal(alone[i - 1], v) end
      end
      assert.same(y:totable(), exchanged(x, "ENG_COMM_FP8", facts):totable())
      local signal, error = x:square():sum():item(), (x - y):square():sum():item()
      assert.near(1, facts.signal / signal, 1e-5)
      assert.near(1, facts.error / error, 1e-3)
      assert.equal(0, tonumber(facts.bytes))  -- nothing went to another rank
      assert.same(x:to("bf16"):to("f32"):totable(), exchanged(x, "ENG_COMM_BF16"):totable())
      for _, dtype in ipairs { "f32", "f16", "bf16", "f64" } do
        assert.same(x:to(dtype):totable(), exchanged(x:to(dtype), "ENG_COMM_OWN"):totable())
      end
    end
  end)

  it("keep inf and nan visible", function()
    local x = engine.tensor { { 1, math.huge, -3 }, { 0 / 0, 5, -math.huge }, { 1, 2, 3 } }
    local y = exchanged(x, "ENG_COMM_FP8"):totable()
    assert.same({ 1, -3, 5, 1, 2, 3 }, { y[1][1], y[1][3], y[2][2], unpack(y[3]) })
    for _, v in ipairs { y[1][2], y[2][1], y[2][3] } do assert.is_true(v ~= v) end
    y = exchanged(x, "ENG_COMM_BF16"):totable()
    assert.same({ math.huge, -math.huge }, { y[1][2], y[2][3] })
  end)

  it("are refused when counts or shapes do not match", function()
    local function try(y, x, n, m, wire)
      return C.eng_comm_exchange_rows(y, x, comm, ffi.new("int64_t[1]", n),
        ffi.new("int64_t[1]", m), wire or 0, nil)
    end
    local x = engine.zeros(3, 4)
    for message, status in pairs {
      ["expected the sent tensor to have 2 rows"] = function()
        return try(engine.zeros(3, 4), x, 2, 3)
      end,
      ["expected 0 or more rows, got -1"] = function() return try(engine.zeros(3, 4), x, -1, 3) end,
      ["expected two tensors of one dtype, width and device"] = function()
        return try(engine.zeros(3, 5), x, 3, 3)
      end,
      ["expected a contiguous floating-point tensor"] = function()
        return try(x:transpose(), engine.zeros(4, 3), 4, 4)
      end,
      ["expected a comm dtype from 0 to 4 (ENG_COMM_*), got 9"] = function()
        return try(engine.zeros(3, 4), x, 3, 3, 9)
      end,
    } do
      assert.are_not.equal(0, status())
      assert.matches(message, M_ffi.message(), 1, true)
    end
  end)
end)

describe("nn.moe over ranks", function()
  it("validates its options, and divides nothing on one rank", function()
    local function moe(options)
      options.width = 4
      return function() return engine.nn.moe(options) end
    end
    assert.error_matches(moe { experts_over = 2 },
      "expected experts_over to be a group of ranks, engine.ranks.group%(%), got 2")
    assert.error_matches(moe { dispatch = "f8" },
      "expected dispatch bf16, fp32, fp8 or own, got 'f8'")
    assert.error_matches(moe { combine = "fp8" },
      "expected combine bf16, fp32 or own, got 'fp8'")
    local two = { comm = engine.ranks.group().comm, size = 2, rank = 0, across = {} }
    assert.error_matches(moe { experts = 3, experts_over = two },
      "3 experts cannot be divided evenly among 2 ranks")
    assert.error_matches(function() engine.ranks.group(2) end,
      "expected a whole number that divides the number of ranks, 1, got 2")
    assert.equal(4 * 16 * 2 + 16 + 4,
      moe { experts = 2, experts_over = engine.ranks.group() }().experts[2]:count())
  end)
end)

if not start.can("experts over ranks") then return end

-- Runs the job with n ranks (0: one process). Returns { steps = { { loss =, scale =, action =, norm
-- =, scales = } ... }, common = checksums by rank, held = elements by rank, sent = { out = { bytes,
-- snr }, back = ... }, counts = text }, and the lines.
local function job(n, settings)
  local result = start.run(n, "spec/dist/experts.lua", settings)
  assert(result.code == 0, result.out .. result.err)
  local all, lines = { steps = {}, common = {}, held = {}, sent = {} }, {}
  for line in result.out:gmatch("[^\r\n]+") do
    local loss, scale, action, norm, scales = line:match("^%d+ (%S+) (%S+) (%S+) (%S+) (.+)$")
    if loss then
      all.steps[#all.steps + 1] = { loss = tonumber(loss), scale = tonumber(scale), action = action,
        norm = tonumber(norm), scales = scales }
      lines[#lines + 1] = line
    end
    local way, bytes, snr = line:match("^sent (%w+) (%d+) (%S+)$")
    if way then all.sent[way] = { bytes = tonumber(bytes), snr = tonumber(snr) } end
    all.counts = line:match("^counts (.*)") or all.counts
  end
  for rank, common, held in result.err:gmatch("rank (%d+): common (%w+), held (%d+)") do
    all.common[tonumber(rank) + 1], all.held[tonumber(rank) + 1] = common, tonumber(held)
  end
  for rank = 2, n do assert.equal(all.common[1], all.common[rank]) end
  assert.equal(math.max(n, 1), #all.held)
  return all, lines
end

-- Expects the same training: losses and norms within a relative difference, scales and actions
-- equal.
local function near(expected, got, most)
  assert.equal(#expected.steps, #got.steps)
  for i, a in ipairs(expected.steps) do
    local b = got.steps[i]
    assert.is_true(math.abs(a.loss - b.loss) <= (most or 1e-5) * a.loss,
      ("step %d: loss %.9g against %.9g"):format(i, a.loss, b.loss))
    assert.is_true(math.abs(a.norm - b.norm) <= 2 * (most or 1e-5) * a.norm,
      ("step %d: norm %.9g against %.9g"):format(i, a.norm, b.norm))
    assert.same({ a.scale, a.action, a.scales }, { b.scale, b.action, b.scales })
  end
end

local folder
describe("experts over ranks", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("train as on one rank, whatever the groups", function()
    local one = job(0, { "accumulate=4", "clip=0.5" })
    local two, four = job(2, { "accumulate=2", "clip=0.5" }), job(4, { "clip=0.5" })
    near(one, two)
    near(one, four)
    near(one, (job(4, { "clip=0.5", "over=2" })))
    near(one, (job(2, { "accumulate=2", "clip=0.5", "over=-1" })))  -- every rank holds all experts
    local experts = one.held[1] - (one.held[1] - two.held[1]) * 2
    assert.equal(experts + (one.held[1] - experts) / 4, four.held[3])  -- each rank holds its share
  end)

  it("may leave a rank out of an exchange of rows", function()
    -- Rank 0 keeps its only row, ranks 1 and 2 swap theirs. Afterwards all ranks meet.
    local script = helper.write(folder .. "/swap.lua", [[
      local engine = require "engine"
      local M_ffi = require "engine.base.ffi"
      local C, ranks = M_ffi.C, engine.ranks
      C.eng_comm_timeout(5)
      local n, peer = M_ffi.new("int64_t[3]"), 2 * ranks.rank() % 3      -- 0, 2, 1
      n[peer] = 1
      local x, y = engine.full({ 1, 2 }, ranks.rank()), engine.zeros(1, 2)
      M_ffi.check(C.eng_comm_exchange_rows(y, x, ranks.world(), n, n, C.ENG_COMM_OWN, nil))
      ranks.barrier()
      assert(y:sum():item() == 2 * peer, "the peer's row")]])
    local result = start.run(3, script)
    assert.equal(0, result.code, result.err)
  end)

  it("train the same with ZeRO, bit for bit, with every dtype of weights", function()
    for _, settings in ipairs { { "over=2", "optimizer=lion" }, { "over=2", "optimizer=muon" },
      { "precision=fp16", "policy=dynamic:init_scale=2^18" },
      { "over=2", "wire=bf16", "precision=bf16" },
      { "precision=fp8_block" } } do
      local plain, lines = job(4, settings)
      for zero = 1, 2 do
        local shared, shared_lines = job(4, { "zero=" .. zero, unpack(settings) })
        assert.same(lines, shared_lines)
        assert.equal(plain.common[1], shared.common[1])
      end
    end
  end)

  it("train as on one rank without input gradients and with idle experts", function()
    for bare, counts in pairs { ["bare=true"] = "0 0 32 0", ["bare=false"] = "%d+ 0 %d+ 0" } do
      local settings = { bare, "one=3", "top_k=1", "optimizer=sgd", "steps=4" }
      local one, four = job(0, { "accumulate=4", unpack(settings) }), job(4, settings)
      near(one, four)
      assert.matches("^" .. counts .. "$", four.counts)
      settings[#settings + 1] = "precision=fp16"  -- outputs use another format than tokens
      local half, quarter = job(0, { "accumulate=4", unpack(settings) }), job(4, settings)
      for i, a in ipairs(half.steps) do
        assert.is_true(math.abs(a.loss - quarter.steps[i].loss) < 1e-3 * a.loss)
      end
    end
  end)

  it("have the same scale for each expert, and the same record, on all ranks", function()
    local settings = { "precision=fp16", "policy=per_expert", "timid=yes" }
    local one, two = job(0, { "accumulate=2", unpack(settings) }), job(2, settings)
    for i, a in ipairs(one.steps) do
      assert.is_true(math.abs(a.loss - two.steps[i].loss) < 1e-3 * a.loss)
      assert.same({ a.scale, a.scales }, { two.steps[i].scale, two.steps[i].scales })
    end
    assert.matches("first.experts.1=131072", one.steps[8].scales, 1, true)
    local result = start.run(4, "spec/dist/experts.lua",
      { "over=2", "precision=fp16", "policy=norm_ratio", "timid=yes", "steps=4" })
    local records = {}
    for rank, record in result.err:gmatch("rank (%d): (%d %S+ %S+ %d+ %S+)") do
      local step = record:match("^%d")
      records[step] = records[step] or record
      assert.equal(records[step], record, "rank " .. rank)
      assert.matches(" 8738 ", record)  -- every element is held once
    end
    assert.not_matches("nan$", records["2"])  -- has the norm of a reference backward
  end)

  it("send FP8 out and bf16 back with these formats' errors, whatever the groups", function()
    local exact = job(2, { "accumulate=2" })
    local two, four = job(2, { "accumulate=2", "dispatch=fp8", "combine=bf16" }),
      job(4, { "dispatch=fp8", "combine=bf16" })
    local differs = false
    for i, a in ipairs(exact.steps) do
      differs = differs or a.loss ~= two.steps[i].loss
      assert.is_true(math.abs(a.loss - two.steps[i].loss) < 2e-2 * a.loss, a.loss .. " against " ..
        two.steps[i].loss)
      assert.is_true(math.abs(four.steps[i].loss - two.steps[i].loss) < 2e-3 * a.loss)
    end
    assert.is_true(differs)
    assert.is_true(two.sent.out.snr > 28 and two.sent.out.snr < 38, tostring(two.sent.out.snr))
    assert.is_true(two.sent.back.snr > 48 and two.sent.back.snr < 60, tostring(two.sent.back.snr))
    -- 20 codes and a scale (24 bytes) replace 20 f32 (80 bytes)
    assert.near(24 / 80, two.sent.out.bytes / exact.sent.out.bytes, 0.03)
    assert.near(0.5, two.sent.back.bytes / exact.sent.back.bytes, 0.05)
  end)

  it("skip the same step whichever rank has the inf or nan, and report rank and tensor", function()
    for _, case in ipairs { { "inf", 2, 2, 0 }, { "nan", 1, 4, 2 } } do
      local kind, rank, expert, zero = unpack(case)
      local run = ("%s/%s"):format(folder, kind)
      local all = job(4, { "over=2", "plant=" .. kind, "plant_rank=" .. rank, "plant_expert=" ..
        expert, "zero=" .. zero, "precision=fp16", "policy=dynamic",
        "run=" .. run, "trap=overflow" })
      for i, step in ipairs(all.steps) do assert.equal(i == 3 and "skip" or "step", step.action) end
      assert.matches(("%s from rank %d, first in second.experts.%d.up.weight"):format(kind, rank,
        expert), helper.history(run, "events", "overflow")[1].text, 1, true)
    end
  end)

  it("are whole in checkpoints, from which any number of ranks resumes", function()
    local whole, lines = job(4, { "over=2" })
    job(4, { "over=2", "zero=1", "steps=4", "run=" .. folder .. "/run" })
    local c = assert(engine.checkpoint.load(folder .. "/run/checkpoints"))
    assert.same({ 24, 20 }, c.model["first.experts.4.up.weight"].shape)
    assert.same({ 24, 20 }, c.optimizer["first.experts.1.up.weight.moment2"].shape)
    for _, case in ipairs { { 4, "over=2" }, { 4, "over=4" }, { 2, "zero=1" }, { 2, "zero=2" },
      { 0 }, { 2, "over=-1" } } do
      local n, setting = unpack(case)
      local copy = ("%s/%d%s"):format(folder, n, setting or "")
      helper.shell(("cp -r %s/run %s"):format(folder, copy))
      local rest, rest_lines = job(n, { "run=" .. copy, "resume=auto", setting })
      near({ steps = { unpack(whole.steps, 5) } }, rest)
      if setting == "over=2" then assert.same({ unpack(lines, 5) }, rest_lines) end
    end
    -- a rank has the averages (Q-EMA) of its own experts only
    local run, averaged = "run=" .. folder .. "/averaged", "precision=mxfp4_tetrajet_q_ema"
    local _, straight = job(4, { "over=2", averaged })
    job(4, { "over=2", averaged, "steps=4", run })
    local _, rest = job(4, { "over=2", averaged, run, "resume=auto" })
    assert.same({ unpack(straight, 5) }, rest)
  end)
end)
