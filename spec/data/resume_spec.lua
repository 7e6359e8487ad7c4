-- Runs that resume: a killed run, once resumed, sees the batches of an uninterrupted run, also on
-- several ranks; a loader without a position is refused.
local engine = require "engine"
local helper = require "spec.helper"
local start = require "spec.dist.start"

local folder

local function write_files()
  local documents, chats = {}, {}
  for i = 1, 40 do
    documents[i] = ('{"text":"document %d %s"}\n'):format(i, ("x"):rep(i * 17 % 23))
    chats[i] = ('{"messages":[{"role":"user","content":"%s"},'
      .. '{"role":"assistant","content":"%d"}]}\n'):format(("?"):rep(i * 13 % 30), i)
  end
  helper.write(folder .. "/web.jsonl", table.concat(documents))
  helper.write(folder .. "/chat.jsonl", table.concat(chats))
end

-- Runs the job. Returns its status and output, and the checksum of each batch by its number.
local function job(n, settings)
  os.remove(folder .. "/seen")
  settings[#settings + 1] = "folder=" .. folder
  local result = helper.shell(start.command(n, "spec/data/job.lua", settings))
  local seen = {}
  for number, sum in (helper.read(folder .. "/seen") or ""):gmatch("(%d+) (%x+)\n") do
    seen[tonumber(number)] = sum
  end
  return result, seen
end

describe("a run with documents", function()
  before_each(function()
    folder = helper.folder()
    write_files()
  end)
  after_each(function() helper.remove(folder) end)

  for _, pack in ipairs { "true", "false" } do
    it("resumes after kill -9, bit-identical to an uninterrupted run, pack = " .. pack, function()
      local whole, all = job(0, { "pack=" .. pack })
      assert.equal(0, whole.code, whole.err)
      local run = "run=" .. folder .. "/run"
      assert.equal(137, job(0, { "pack=" .. pack, run, "die=5" }).code)
      local rest, seen = job(0, { "pack=" .. pack, run, "resume=auto" })
      assert.equal(0, rest.code, rest.err)
      assert.equal(whole.out, rest.out)
      assert.matches("weights%s+%d+", rest.out)
      assert.is_nil(seen[3])
      for i = 4, 8 do assert.equal(all[i], seen[i]) end       -- from the checkpoint of step 4
    end)
  end

  it("refuses to resume with a file that has changed", function()
    local run = "run=" .. folder .. "/run"
    assert.equal(0, job(0, { run, "steps=2" }).code)
    local path = folder .. "/web.jsonl"
    helper.write(path, helper.read(path) .. '{"text":"one more"}\n')
    local result = job(0, { run, "resume=auto" })
    assert.equal(1, result.code)
    assert.matches("^[^\n]*this position was saved with examples 40, but the loader has 41; "
      .. "the batches would differ\n$", result.err)
  end)

  if start.there then
    it("gives several ranks the batches of one process with accumulate", function()
      local one, all = job(0, { "accumulate=2" })
      local two, seen = job(2, {})
      assert.equal(0, one.code, one.err)
      assert.equal(0, two.code, two.err)
      assert.is_string(all[17])
      assert.same(all, seen)
      assert.equal(137, job(0, { "accumulate=2", "run=" .. folder .. "/run", "die=5" }).code)
      local rest, again = job(2, { "run=" .. folder .. "/run", "resume=auto" })
      assert.equal(0, rest.code, rest.err)
      for i = 8, 17 do assert.equal(all[i], again[i]) end
    end)
  end
end)

describe("resuming with a loader of the script's own", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  local read    -- the batches that the last run read

  -- Trains to `steps`. place: whether the loader has state() and restore().
  local function train(steps, place, options)
    local net, at = engine.nn.linear(2, 1), 0
    read = {}
    local data = { next = function()
      at = at + 1
      read[#read + 1] = at
      return { x = engine.full({ 4, 2 }, at) }
    end }
    if place then
      function data.state() return { at = at } end
      function data.restore(_, state) at = state.at end
    end
    local o = { model = net, data = data, steps = steps, log = "quiet", run = folder .. "/run",
      resume = "auto", optimizer = engine.optim.sgd(net, { lr = 1e-3 }),
      loss = function(m, batch) return m(batch.x):sum() end }
    for key, value in pairs(options or {}) do o[key] = value end
    engine.trainer(o):run()
  end

  it("is refused in one line where the data would begin again", function()
    train(2)
    for place, problem in pairs { [false] = "the loader has no state() and restore()",
      [true] = "the checkpoint holds no position in the data" } do
      local good, message = pcall(train, 4, place)
      assert.is_false(good)
      assert.equal(("resume: %s/run/checkpoints/step-00000002: %s, so the data would begin at "
        .. "their first batch again; hint: %s"):format(folder, problem, place
        and "restart_data = true accepts this" or "add them to the loader (docs/data.md), or "
        .. "accept this with restart_data = true"), message:match("resume: .*"))
      assert.same({}, read)
    end
  end)

  it("continues from the position, or begins again with restart_data", function()
    train(2, true)
    train(4, true)
    assert.same({ 3, 4 }, read)
    train(6, true, { restart_data = true })
    assert.same({ 1, 2 }, read)
    train(7, true)
    assert.same({ 3 }, read)
    train(8, false, { restart_data = true })
    assert.same({ 1 }, read)
  end)

  it("also continues the data of evaluations, unless the data have changed", function()
    local function evaluated(steps, text)
      local held_out, seen = engine.data.text { text = text, batch = 1, context = 1,
        shuffle = false }, {}
      local take = held_out.next
      function held_out:next()
        local batch = take(self)
        seen[#seen + 1] = batch.x:item()
        return { x = batch.x:to "f32":view(1, 1):expand(4, 2) }
      end
      train(steps, true, { evaluate = { data = held_out, every = 1, batches = 2 } })
      return string.char(unpack(seen))
    end
    assert.equal("abcd", evaluated(2, "abcdefghijk"))
    assert.equal("efgh", evaluated(4, "abcdefghijk"))
    assert.equal("zy", evaluated(5, "zyxwvu"))
  end)

  it("needs both state() and restore(), or neither", function()
    for _, method in ipairs { "state", "restore" } do
      local data = { next = function() end, [method] = function() end }
      assert.error_matches(function() train(1, false, { data = data }) end,
        "expected data to be a loader with both state%(%) and restore%(%), or with neither "
        .. "%(it has only " .. method .. "%(%)%), got a table")
    end
    assert.error_matches(function() train(1, true, { restart_data = 1 }) end,
      "expected restart_data to be true or false, got 1")
  end)
end)
