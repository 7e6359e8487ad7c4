-- Checkpoints of several ranks: each rank writes a shard, any number of ranks can resume, and an
-- unfinished, incomplete or damaged checkpoint is skipped in favour of the one before it. The job
-- is spec/dist/job.lua.
local helper = require "spec.helper"
local checkpoint = require "engine.run.checkpoint"
local shards = require "engine.run.shards"
local start = require "spec.dist.start"
local engine = require "engine"

local quote = helper.quote

describe("shards", function()
  it("divide the elements of all tensors evenly among the ranks", function()
    engine.seed(3)
    local list = {}
    for i, n in ipairs { 0, 1, 5, 130, 64, 7, 1, 1000, 0, 3 } do
      list[i] = { name = "t" .. i, x = engine.zeros(n) }
    end
    for size = 1, 9 do
      local at, sums = {}, {}
      for part = 0, size - 1 do
        sums[part] = 0
        shards.cut(list, part, size, function(name, x, from, to)
          assert.equal(at[name] or 0, from)
          assert.is_true(to <= x.count)
          at[name], sums[part] = to, sums[part] + to - from
        end)
        assert.is_true(math.abs(sums[part] - 1211 / size) <= 1)
      end
      for _, item in ipairs(list) do assert.equal(item.x.count, at[item.name]) end
    end
  end)

  it("that do not form whole tensors are refused", function()
    local folder = helper.folder()
    local function index(...)
      local names = {}
      for i, tensors in ipairs { ... } do
        names[i] = ("shard-%05d-of-00002.safetensors"):format(i)
        engine.save(folder .. "/" .. names[i], tensors,
          { ["model/w"] = "2 3", ["model/other"] = "4" })
      end
      return shards.index(folder, names)
    end
    local w = index({ ["model/w@0"] = engine.tensor { 1, 2 } },
      { ["model/w@2"] = engine.tensor { 3, 4, 5, 6 } }).model.w
    assert.same({ 2, 3 }, w.shape)
    local x = shards.read(w, function(name) return require("engine.tensor.safetensors").open(
      folder .. "/" .. name) end)
    assert.same({ { 1, 2, 3 }, { 4, 5, 6 } }, x:totable())
    for message, files in pairs {
      ["expected a piece that begins at element 2, got one that begins at 3; a shard is missing"] =
        { { ["model/w@0"] = engine.tensor { 1, 2 } },
        { ["model/w@3"] = engine.tensor { 4, 5, 6 } } },
      ["model tensor 'w': expected 6 elements in the shards, got 5"] =
        { { ["model/w@0"] = engine.tensor { 1, 2 } },
        { ["model/w@2"] = engine.tensor { 4, 5, 6 } } },
      ["shard-00002-of-00002.safetensors: 'model/w@2' differs from the shards read before"] =
        { { ["model/w@0"] = engine.tensor { 1, 2 } },
          { ["model/w@2"] = engine.tensor({ 3, 4, 5, 6 }, "f16") } },
      ["'weight' is not a piece of a tensor"] = { { weight = engine.tensor { 1, 2 } }, {} },
    } do
      helper.refuses(message, index, unpack(files))
    end
    helper.remove(folder)
  end)
end)

if not start.can("checkpoints of several ranks") then return end

-- Runs a script (the job, or one that wraps it) with n ranks (0: without mpirun). Returns its
-- lines, the weights' checksum, and the result.
local function job(n, settings, script)
  local result = start.run(n, script or "spec/dist/job.lua", settings)
  return start.steps(result), result.err:match("rank 0: weights (%w+)"), result
end

local function names(path)
  local list = {}
  for name in helper.shell("ls " .. quote(path)).out:gmatch("[^\n]+") do list[#list + 1] = name end
  return list
end

-- Converts a checkpoint of all ranks into a checkpoint of one rank: files with whole tensors.
local function as_one(from, to)
  local c = assert(checkpoint.load(from))
  checkpoint.save(to, c.step, { model = c.model, optimizer = c.optimizer, state = c.state })
end

local folder
describe("checkpoints of several ranks", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  local function copy(name)
    helper.shell(("cp -r %s/run %s/%s"):format(folder, folder, name))
    return folder .. "/" .. name
  end

  it("are written by all ranks in equal parts, also with ZeRO", function()
    local seen = {}
    for zero = 0, 2 do
      local run = ("%s/zero%d"):format(folder, zero)
      job(4, { "steps=3", "zero=" .. zero, "run=" .. run })
      local path = run .. "/checkpoints/step-00000003"
      assert.same({ "shard-00001-of-00004.safetensors", "shard-00002-of-00004.safetensors",
        "shard-00003-of-00004.safetensors",
        "shard-00004-of-00004.safetensors", "state.json" }, names(path))
      local sizes, total = {}, 0
      for i = 1, 4 do
        sizes[i] = #helper.read(("%s/shard-%05d-of-00004.safetensors"):format(path, i))
        total = total + sizes[i]
      end
      for i = 1, 4 do assert.is_true(sizes[i] < 0.4 * total, table.concat(sizes, " ")) end
      seen[zero] = assert(checkpoint.load(path))
    end
    for part, n in pairs { model = 1, optimizer = 2 } do
      local count = 0
      for name, x in pairs(seen[0][part]) do
        count = count + 1
        assert.same(x.shape, seen[1][part][name].shape)
        for zero = 1, 2 do
          assert.is_true(x:view(-1):eq(seen[zero][part][name]:view(-1)):to("f32"):min():item() == 1,
            name)
        end
      end
      assert.is_true(count > 20 * n)
    end
  end)

  it("resume on as many or fewer ranks, bit for bit like a checkpoint of one rank", function()
    local whole, weights = job(4, { "steps=6", "dropout=0.1" })
    -- The jobs on four and on two ranks resume under another zero= than the job that wrote the
    -- checkpoint. Two ranks with two micro-batches under ZeRO-2 are left out: they add gradients
    -- in a different order than the job of one rank.
    local ended = {}                         -- jobs resumed from whole tensors, by number of ranks
    for zero = 0, 2 do
      helper.shell(("rm -rf %s/run"):format(folder))
      job(4, { "steps=3", "dropout=0.1", "zero=" .. zero, "run=" .. folder .. "/run" })
      if zero == 0 then as_one(folder .. "/run/checkpoints", folder .. "/one/checkpoints") end
      for _, n in ipairs { 4, 2, 0 } do
        local next_zero = n == 4 and (zero + 1) % 3 or n == 2 and (zero + 1) % 2 or 0
        local rest, rest_weights = job(n, { "steps=6", "dropout=0.1", "zero=" .. next_zero,
          "run=" .. copy("go" .. zero .. n), "resume=auto" })
        ended[n] = ended[n] or { job(n, { "steps=6", "dropout=0.1", "resume=" .. folder ..
          "/one" }) }
        assert.equal(3, #rest)
        assert.same(ended[n][1], rest)
        assert.equal(ended[n][2], rest_weights)
        if n == 4 then
          assert.same({ unpack(whole, 4) }, rest)
          assert.equal(weights, rest_weights)
        end
      end
    end
  end)

  it("are read in pieces, which need not end where a tensor or a rank's part ends", function()
    job(2, { "steps=2", "zero=1", "run=" .. folder .. "/run" })
    local small = helper.write(folder .. "/small.lua", [[
      local M_ffi = require "engine.base.ffi"
      require "engine.tensor.safetensors"
      require "engine.dist.reducer"
      local C = M_ffi.C
      local function broadcast(comm, memory, bytes, root)
        assert(bytes <= 8000, "a message larger than a piece")
        return C.eng_comm_broadcast(comm, memory, bytes, root)
      end
      M_ffi.C = setmetatable({ eng_comm_broadcast = broadcast }, { __index = C })
      require("engine.run.shards").PIECE = 1000
      M_ffi.C = C
      dofile "spec/dist/job.lua"
    ]])
    for zero = 0, 2 do
      local settings = { "steps=5", "zero=" .. zero, "resume=" .. folder .. "/run" }
      local whole, weights = job(3, settings)
      local pieces, same = job(3, settings, small)
      assert.equal(3, #whole)
      assert.same(whole, pieces)
      assert.equal(weights, same)
    end
  end)

  it("continue a checkpoint of one rank, and keep the dtype of moments", function()
    job(0, { "steps=2", "accumulate=3", "precision=bf16", "run=" .. folder .. "/run" })
    assert.same({ "model.safetensors", "optimizer.safetensors", "state.json" },
      names(folder .. "/run/checkpoints/step-00000002"))
    local rest = job(3, { "steps=4", "precision=bf16", "zero=1", "run=" .. folder .. "/run",
      "resume=auto" })
    assert.equal(2, #rest)
    local a, b = assert(checkpoint.load(folder .. "/run/checkpoints/step-00000002")),
      assert(checkpoint.load(folder .. "/run/checkpoints/step-00000004"))
    for _, part in ipairs { "model", "optimizer" } do
      for name, x in pairs(a[part]) do
        assert.same({ x.dtype, x.shape }, { b[part][name].dtype, b[part][name].shape })
      end
      for name in pairs(b[part]) do assert.truthy(a[part][name]) end
    end
  end)

  -- ---------------------------------------------------------------- failures

  -- The job, in which rank 1 fails at its third shard. how = "killed": it writes a part of the
  -- shard and is killed; "full": it reports a full disk.
  local function troubled(how)
    return helper.write(folder .. "/" .. how .. ".lua", ([[
      local safetensors, ranks = require "engine.tensor.safetensors", require "engine.dist.ranks"
      local save, calls = safetensors.save, 0
      function safetensors.save(path, ...)
        calls = calls + 1
        if calls ~= 3 or ranks.rank() ~= 1 then return save(path, ...) end
        if %q == "full" then error("writing " .. path .. ": No space left on device", 0) end
        local file = io.open(path, "wb")
        file:write(("x"):rep(1000))
        file:close()
        os.execute("kill -9 " .. io.open("/proc/self/stat"):read("*n"))
      end
      dofile "spec/dist/job.lua"
    ]]):format(how))
  end

  it("are ignored when a killed rank left one unfinished", function()
    local whole, weights = job(2, { "steps=6" })
    local settings = { "steps=6", "checkpoint_every=1", "zero=1", "run=" .. folder .. "/run" }
    local lines, _, result = job(2, settings, troubled "killed")
    assert.are_not.equal(0, result.code)
    assert.equal(3, #lines)
    assert.same({ "step-00000001", "step-00000002", "step-00000003.tmp" },
      names(folder .. "/run/checkpoints"))
    settings[#settings + 1] = "resume=auto"
    local rest, rest_weights = job(2, settings)
    assert.same({ unpack(whole, 3) }, rest)
    assert.equal(weights, rest_weights)
    assert.same({ "step-00000004", "step-00000005", "step-00000006" },
      names(folder .. "/run/checkpoints"))
  end)

  it("are dropped when a rank cannot write; the run names the rank and continues", function()
    local lines, _, result = job(2, { "steps=4", "checkpoint_every=1", "log=json",
      "run=" .. folder .. "/run" }, troubled "full")
    assert.equal(0, result.code)
    assert.equal(4, #lines)
    assert.matches("no checkpoint was written: checkpoint .*step%-00000003: rank 1: writing .* " ..
      "No space left on device", result.err)
    assert.same({ "step-00000001", "step-00000002", "step-00000004" },
      names(folder .. "/run/checkpoints"))
  end)

  it("with a missing, short or damaged shard are skipped with a message", function()
    local whole = job(2, { "steps=6", "checkpoint_every=2", "run=" .. folder .. "/run" })
    local shard = "shard-00002-of-00002.safetensors"
    for what, damage in pairs {
      [shard .. " is missing"] = "rm %s",
      [shard .. " has 100 bytes, expected"] = "truncate -s 100 %s",
      [shard .. " is damaged: its checksum is"] =
        "printf X | dd of=%s bs=1 seek=9000 conv=notrunc 2>&1",
    } do
      for _, n in ipairs { 2, 0 } do
        local run = copy(("%d%s"):format(n, damage:match("%w+")))
        helper.shell(damage:format(run .. "/checkpoints/step-00000006/" .. shard))
        local rest, _, result = job(n, { "steps=6", "log=json", "run=" .. run, "resume=auto" })
        assert.matches("step-00000006 is skipped: " .. what, result.err, 1, true)
        assert.equal(2, #rest)
        if n == 2 then assert.same({ unpack(whole, 5) }, rest) end
      end
    end
  end)

  it("of another model are refused with the mismatch", function()
    job(2, { "steps=1", "run=" .. folder .. "/run" })
    local _, _, result = job(2, { "steps=2", "width=48", "resume=" .. folder .. "/run" })
    assert.are_not.equal(0, result.code)
    assert.matches("step-00000001 does not fit this model", result.err, 1, true)
    assert.matches("blocks.1.attn.out.bias: expected [48], got [32]", result.err, 1, true)
  end)
end)
