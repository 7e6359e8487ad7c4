-- The run history: appended rows are readable while the run writes, a killed run loses at most a
-- second, and a full disk loses no row that fits in memory.
local M_ffi = require "engine.base.ffi"
local history = require "engine.run.history"
local helper = require "spec.helper"
local curves = require "engine.run.curves"
local scratch = require "spec.store.scratch"

local ffi, C = M_ffi.ffi, M_ffi.C

local record, verdict = ffi.new("eng_record"), ffi.new("eng_verdict")

-- Appends a step; `fields` override the record's and the verdict's ordinary values.
local function append(h, step, fields)
  ffi.fill(record, ffi.sizeof(record))
  ffi.fill(verdict, ffi.sizeof(verdict))
  record.step, record.updates, record.count, record.first_bad = step, step, 1000, -1
  record.scale, record.loss, record.lr, record.amax, record.norm, record.norm_ref = 65536, 2, 1e-3,
    0.25, 1.5, 0 / 0
  record.elapsed = step / 10
  verdict.scale, verdict.lr_mul = 65536, 1
  for name, value in pairs(fields or {}) do
    if name == "next_scale" then verdict.scale = value
    elseif name == "action" or name == "reason" or name == "clip" or name == "lr_mul"
      or name == "failed" then
      verdict[name] = value
    elseif name == "hist" then
      for exponent, count in pairs(value) do record.hist[exponent + 160] = count end
    else record[name] = value end
  end
  return h:append(record, verdict, 512)
end

local overflow = { overflow = 1, inf = 3, nan = 1, first_bad = 1, action = C.ENG_ACTION_SKIP,
  next_scale = 32768, reason = "overflow: halved" }

describe("history", function()
  local dir, h
  before_each(function()
    dir = helper.folder()
    h = history.open(dir, { write = true })
  end)
  after_each(function()
    h:close()
    helper.remove(dir)
  end)

  it("returns every field of a step", function()
    append(h, 7, { updates = 5, loss = 0.1, lr = 3e-4, inf = 2, nan = 3, overflow = 1, zeros = 4,
      underflow = 5, first_bad = 6, amax = 1e-300,
      norm = 1e300, norm_ref = 2.5, elapsed = 12.25, clip = 1, lr_mul = 0.5, action = 1,
      next_scale = 2 ^ 24, reason = "é \"q\"", failed = 1 })
    local row = h:last(1)[1]
    assert.are.same({ step = 7, attempt = 1, updates = 5, loss = 0.1, lr = 3e-4, scale = 65536,
      next_scale = 2 ^ 24, action = "skip", overflow = true,
      inf = 2, nan = 3, count = 1000, zeros = 4, underflow = 5, amax = 1e-300, norm = 1e300,
      norm_ref = 2.5, clip = 1, lr_mul = 0.5,
      policy_failed = true, first_bad = 6, reason = "é \"q\"", elapsed = 12.25,
      tokens = 512 }, row)
  end)

  it("keeps NaN and infinities", function()
    append(h, 0, { loss = 0 / 0, amax = math.huge, norm = 0 / 0 })
    local row = h:last(1)[1]
    assert.is_true(row.loss ~= row.loss and row.norm ~= row.norm)
    assert.are.equal(math.huge, row.amax)
    assert.is_nil(row.norm_ref)
    assert.is_nil(row.reason)
    assert.truthy(tostring(row):find("step 0  loss %-?nan"))
  end)

  it("reads ranges, the last rows and the overflows", function()
    for step = 0, 99 do append(h, step, step % 25 == 24 and overflow or nil) end
    local steps = function(rows)
      local list = {}
      for i, row in ipairs(rows) do list[i] = row.step end
      return list
    end
    assert.are.same({ 10, 11, 12 }, steps(h:steps(10, 12)))
    assert.are.same({ 97, 98, 99 }, steps(h:last(3)))
    assert.are.same({ 24, 49, 74, 99 }, steps(h:overflows()))
    assert.are.equal(100, #h:steps())
    assert.truthy(tostring(h):find("100 steps (0 to 99), 4 overflows, 4 skipped", 1, true))
    assert.truthy(tostring(h:last(2)):find("next_scale"))
    for _, n in ipairs { -1, 1.5, "x" } do
      assert.error_matches(function() h:last(n) end,
        "expected the number of rows to be a whole number of 0 or more, got ", 1, true)
    end
  end)

  it("counts the attempts at a batch", function()
    append(h, 0, { action = C.ENG_ACTION_RETRY })
    append(h, 1, { action = C.ENG_ACTION_RETRY })     -- a retry with its own step number
    append(h, 2)
    append(h, 3)
    append(h, 3)                                      -- a retry under the same step number
    append(h, 4)
    local attempts = {}
    for i, row in ipairs(h:steps()) do attempts[i] = row.attempt end
    assert.are.same({ 1, 2, 3, 1, 2, 1 }, attempts)
  end)

  it("keeps statistics per tensor and histograms", function()
    h:set_parameters { { name = "wte.weight", shape = { 5, 3 } }, { name = "scale", shape = {} } }
    local stats = ffi.new("eng_tensor_stats[2]")
    stats[0].count, stats[0].inf, stats[0].nan, stats[0].amax, stats[0].sum_squares = 15, 2, 1,
      65504, 9
    stats[0].hist[0], stats[0].hist[319], stats[1].count, stats[1].underflow = 1, 2 ^ 40, 1, 1
    assert.is_true(h:append_tensors(3, stats, 2))
    append(h, 3, { hist = { [-14] = 7, [3] = 1 } })
    append(h, 4)
    local tensors = h:tensors(3)
    assert.are.same({ name = "wte.weight", count = 15, inf = 2, nan = 1, zeros = 0, underflow = 0,
      amax = 65504, norm = 3, relative_scale = 1, carry = 1,
      hist = { [-160] = 1, [159] = 2 ^ 40 } }, tensors[1])
    assert.are.equal("scale", tensors[2].name)
    assert.is_nil(h:tensors(4))
    assert.are.same({ [-14] = 7, [3] = 1 }, h:hist(3))
    assert.is_nil(h:hist(4))
    assert.are.equal("[5 x 3]", h:parameters()[1].shape)
    assert.has_error(function()
      local n = ffi.new("int[1]")
      M_ffi.check(C.eng_history_unpack(n, nil, 0, "\1\200", 2))
    end)
  end)

  it("keeps events, settings, policies and facts", function()
    h:event(5, "overflow", "3 inf", '{"n":3}')
    h:event(9, "swap", "max_value")
    h:set_config("lr", 1e-3)
    h:set_config("lr", 2e-3)
    h:set_meta("script", "train.lua")
    h:add_policy("abc", "dynamic", "return {}")
    local events = h:events()
    assert.are.equal(2, #events)
    assert.are.equal('{"n":3}', events[1].data)
    assert.is_true(math.abs(events[1].time - os.time()) < 60)
    assert.are.equal("max_value", h:events("swap")[1].text)
    assert.are.same({ lr = "0.002" }, h:config())
    assert.are.equal("name  value\nlr    0.002", tostring(h:config()))
    assert.are.equal("train.lua", h:meta().script)
    assert.are.equal(M_ffi.version, h:meta().engine)
    assert.are.same({ hash = "abc", name = "dynamic", source = "return {}" }, h:policies()[1])
    assert.has_error(function() M_ffi.check(C.eng_history_text(h.handle, "steps", "a", "b")) end)
  end)

  it("answers any SELECT and refuses to write", function()
    for step = 0, 9 do append(h, step) end
    local joined = h:query("SELECT s.step, p.name, p.id FROM steps s LEFT JOIN parameters p " ..
      "ON p.id = s.first_bad")[1]
    assert.same({ 0 }, { joined.step, joined.name, joined.id })
    assert.are.same({ { n = 3 } }, { h:query("SELECT count(*) AS n FROM steps WHERE step < ?",
      3)[1] })
    local seen = 0
    for row in h:each("SELECT step, NULL AS none, 'x' AS text, 0.5 AS half FROM steps ORDER BY " ..
      "step LIMIT ?", 5) do
      assert.are.same({ step = seen, text = "x", half = 0.5 }, row)
      seen = seen + 1
    end
    assert.are.equal(5, seen)
    local function fails(pattern, ...)
      assert.matches(pattern, helper.failure(h.query, h, ...))
    end
    fails("a query can only read", "DELETE FROM steps")
    fails("a query can only read", "UPDATE steps SET loss = 0")
    for _, sql in ipairs { "BEGIN", "COMMIT", "SAVEPOINT a", "ATTACH '/tmp/a.db' AS a",
      "DETACH main", "PRAGMA hard_heap_limit = 1000" } do
      fails("a query can only read, got: " .. sql, sql)
    end
    fails("syntax error", "SELEC 1")
    fails("no such table: nowhere", "SELECT * FROM nowhere")
    fails("expected one SQL statement", "SELECT 1; SELECT 2")
    fails("got nothing", "  ")
    fails("expected 1 value for the statement's parameters, got 2", "SELECT ?", 1, 2)
    fails("got a table", "SELECT ?", {})
    assert.are.equal(10, #h:steps())
  end)

  it("refuses calls without arguments", function()
    for _, method in ipairs { "query", "each", "append", "append_tensors", "event", "append_shadow",
      "append_signal", "set_meta", "set_config", "add_policy" } do
      assert.error_matches(function() h[method](h) end, "expected")
    end
    assert.error_matches(function() h:set_parameters { {} } end, "expected `name`, got nothing")
    assert.error_matches(function() h:append_fp8(1, { {} }) end, "expected `site`, got nothing")
    assert.error_matches(function() history.open() end,
      "history.open: expected the directory of a run or its history.db, got nothing")
    assert.error_matches(function() history.with("none") end,
      "history.with: expected a function of a history, got nothing")
  end)

  it("is not blocked by an unfinished iterator", function()
    for step = 0, 9 do append(h, step) end
    local left = h:each("SELECT step FROM steps")
    assert.are.equal(0, left().step)
    append(h, 10)
    assert.are.equal(10, h:last(1)[1].step)
    assert.are.equal(1, left().step)
  end)

  it("can be read by other processes while it is written", function()
    local reader
    append(h, 0)
    h:flush()
    reader = history.open(dir)
    assert.are.equal(1, #reader:steps())
    append(h, 1)
    h:flush()
    assert.are.equal(2, #reader:steps())
    local good, message = append(reader, 2)
    assert.is_nil(good)
    assert.truthy(message:find("is open for reading only", 1, true))
    _G.read_history = reader
    -- Tab completion offers the methods of a history that is open for reading only.
    local _, offered = require("engine.cli.repl").complete("read_history:")
    _G.read_history = nil
    assert.truthy(offered:find("tensors", 1, true))
    for _, writer in ipairs { "append", "set_meta", "flush", "event ", "resume" } do
      assert.is_nil(offered:find(writer, 1, true), writer)
    end
    reader:close()
    assert.has_error(function() reader:last() end)
  end)

  it("is written within a second without a flush", function()
    append(h, 0)
    local reader = history.open(dir)
    local deadline = os.time() + 5
    while #reader:steps() == 0 and os.time() < deadline do os.execute("sleep 0.1") end
    assert.are.equal(1, #reader:steps())
    reader:close()
  end)

  it("continues where a run resumes", function()
    for step = 0, 19 do append(h, step) end
    append(h, 20, { action = C.ENG_ACTION_RETRY })
    h:event(3, "swap", "a")
    h:event(15, "overflow", "b")
    for _, kind in ipairs { "print", "checkpoint", "swap", "checkpoint", "layers" } do
      h:event(12, kind)
    end
    h:close()
    h = history.open(dir, { write = true })
    assert.is_true(h:resume(12))
    append(h, 12, { loss = 9 })
    local last = h:last(2)
    assert.are.same({ 11, 12 }, { last[1].step, last[2].step })
    assert.are.same({ 9, 1 }, { last[2].loss, last[2].attempt })
    local events = h:events()
    local kinds = {}
    for i, event in ipairs(events) do kinds[i] = event.kind end
    assert.are.equal("swap print checkpoint swap checkpoint resumed", table.concat(kinds, " "))
    assert.are.equal("resumed at step 12, 9 recorded steps dropped", events[6].text)
    h:resume(5)
    assert.are.equal(2, #h:events("resumed"))
    assert.are.equal(3, #h:events())
  end)

  it("explains a step", function()
    assert.are.equal("the history has no steps", tostring(h:why(0)))
    h:set_parameters { { name = "wte.weight", shape = { 5, 3 } },
      { name = "h.0.w", shape = { 8 } } }
    for step = 0, 9 do append(h, step, (step == 4 or step == 5) and overflow or nil) end
    h:event(5, "checkpoint", "a")
    h:event(5, "swap", "to max_value")
    h:event(6, "rollback", "b")
    h:event(6, "swap", "back")
    local text = h:why(5)
    for _, piece in ipairs { "step 5 (update 5, 0.5 s into the run): skipped",
      "Of 1000 gradients, 3 were inf and 1 nan, first in h.0.w [8] (f16).",
      "from 2^16 to 2^15 (x 0.5): overflow: halved", "overflow number 2 in a row",
      "The loss was 2, 2 at the step before.", "Event swap: to max_value",
      "Event checkpoint (before this step): a", "Event rollback (after this step): b" } do
      assert.truthy(text:find(piece, 1, true), piece .. " is not in: " .. text)
    end
    assert.not_matches("Event swap: back", text, 1, true)
    local when = require("engine.run.history_why").when
    assert.same({ "after 5 steps", "step 5" }, { when(h:events()[1]), when(h:events()[2]) })
    assert.truthy(h:why(8):find("The previous overflow was at step 5, 3 steps earlier.", 1, true))
    assert.truthy(h:why(8):find("All 1000 gradients were finite", 1, true))
    assert.are.equal("step 77 is not recorded: the history has steps 0 to 9", tostring(h:why(77)))
    assert.equal(tostring(h:why(77)), require("engine.cli.repl").show(h:why(77)))  -- no quotes
    assert.has_error(function() h:why() end, "why: expected a step number, got nothing")
  end)

  it("does not show a step without a limit on the norm as one with the limit 0", function()
    for step = 0, 9 do append(h, step, { clip = step == 4 and 2 or 0 }) end
    h:flush()
    local c = curves.read(h, { "clip" })
    assert.same({ [5] = 2 }, c.clip.mean)
    local text = tostring(require("engine.report.views").plot(h, "clip"))
    assert.matches("the gradient norm   2 to 2, at the end 2", text, 1, true)
    assert.not_matches("not drawn", text, 1, true)
    assert.not_matches("limit", h:why(3), 1, true)
  end)

  it("leaves out damaged changes of the recipe, and says so", function()
    h:set_parameters { { name = "wte.weight", shape = { 5, 3 }, gradient = "f16" } }
    local function change(format)
      return ('{"to":{"gradients":[%s]}}'):format(format)
    end
    local stats = ffi.new("eng_tensor_stats[1]")
    stats[0].count, stats[0].amax, stats[0].hist[160] = 15, 1, 15
    append(h, 0)
    append(h, 9)
    h:append_tensors(9, stats, 1)
    assert.is_nil(h:parts().problem)
    h:event(2, "precision", "a", change '"bf16"')
    h:event(4, "precision", "b", change '"f32"')
    h:event(5, "precision", "c", change '"f32","f32"')
    h:event(6, "precision", "d", '{"to":{}}')
    h:event(7, "precision", "e", "{")
    h:event(8, "precision", "f", change '"bf16"')
    h:close()
    scratch.sqlite(dir .. "/history.db", "UPDATE events SET data = x'ff' WHERE text = 'b'; " ..
      "INSERT INTO events(step, kind, data) VALUES('x', 'precision', '{}')")
    h = history.open(dir)
    local firsts = {}
    for i, part in ipairs(h:parts()) do firsts[i] = part.first .. " " .. part.format.name end
    assert.are.equal("0 f16, 2 bf16, 8 bf16", table.concat(firsts, ", "))
    local line = "formats may be wrong: the history has 5 damaged events 'precision'"
    assert.are.equal(line, h:parts().problem)
    assert.matches(line, h:why(9), 1, true)
    local layers = require("engine.report.layers").read(h, {})
    assert.are.equal("bf16; " .. line, layers.formats_text:match("bf16; .*$"))
    assert.matches(line, tostring(h:parameters()), 1, true)
    assert.matches("wte.weight", tostring(h:parameters(3)), 1, true)
  end)

  it("says that the gradients of several micro-batches are summed in f32", function()
    h:set_parameters { { name = "wte.weight", shape = { 5, 3 }, gradient = "f16" } }
    h:set_meta("summed", "true")
    local stats = ffi.new("eng_tensor_stats[1]")
    stats[0].count, stats[0].inf, stats[0].amax = 15, 1, 1024
    append(h, 1, overflow)
    append(h, 2)
    h:append_tensors(1, stats, 1)
    local text = h:why(1)
    assert.matches("first in parameter 1.", text, 1, true)
    assert.matches("stored as 16384 in wte.weight (f16 summed in f32); the norm", text, 1, true)
    assert.matches("wte.weight: 1 inf, 0 nan of 15 f16 summed in f32", text, 1, true)
    assert.matches(" (gradients are f16 summed in f32); the norm", h:why(2), 1, true)
    assert.not_matches("65504", text .. h:why(2), 1, true)
  end)

  it("names the format of each gradient, also in histories that do not record it", function()
    h:set_parameters { { name = "wte.weight", shape = { 5, 3 }, gradient = "f16" },
      { name = "norm.weight", shape = { 8 }, gradient = "f32" } }
    h:set_meta("gradients", "f16")
    local stats = ffi.new("eng_tensor_stats[2]")
    stats[0].count, stats[0].amax, stats[1].count, stats[1].amax = 15, 1024, 8, 2 ^ 20
    stats[1].nan = 1
    append(h, 0, overflow)
    append(h, 1)
    h:append_tensors(0, stats, 2)
    local list, text = h:parameters(), h:why(0)
    assert.are.same({ "f16", "f32" }, { list[1].gradient, list[2].gradient })
    assert.matches("first in norm.weight [8] (f32).", text, 1, true)
    assert.matches(" in norm.weight (f32); the norm", text, 1, true)
    assert.matches("norm.weight: 0 inf, 1 nan of 8 f32", text, 1, true)
    assert.not_matches("65504", text, 1, true)
    assert.matches(" (gradients are f16 or f32); the norm", h:why(1), 1, true)
    h:close()
    scratch.sqlite(dir .. "/history.db", "ALTER TABLE parameters DROP COLUMN gradient")
    local old = history.open(dir)
    assert.are.equal("f16", old:parameters()[2].gradient)
    assert.matches(" (the largest f16 is 65504); the norm", old:why(1), 1, true)
    old:close()
    h = history.open(dir, { write = true })          -- the run continues
    h:set_parameters { { name = "wte.weight", shape = { 5, 3 }, gradient = "f16" },
      { name = "norm.weight", shape = { 8 }, gradient = "f32" } }
    assert.are.equal("f32", h:parameters()[2].gradient)
  end)

  it("reads a history that lacks a column of its steps, and continues it", function()
    for step = 0, 2 do append(h, step) end
    local whole = h:steps()
    assert.is_true(whole[2].zeros == whole[2].zeros and whole[2].tokens > 0)
    h:close()
    scratch.sqlite(dir .. "/history.db", "ALTER TABLE steps DROP COLUMN tokens")
    local old = history.open(dir)
    local rows = old:steps()
    assert.equal(3, #rows)
    assert.are_not.equal(rows[2].tokens, rows[2].tokens)       -- nan
    assert.equal(whole[2].norm, rows[2].norm)
    assert.equal(3, require("engine.run.trace").run(dir).n)
    old:close()
    h = history.open(dir, { write = true })          -- the run continues
    append(h, 3)
    rows = h:steps()
    assert.are_not.equal(rows[2].tokens, rows[2].tokens)
    assert.equal(whole[2].tokens, rows[4].tokens)
  end)

  it("reports a shadow's own overflows and bounds, and continues a history without them", function()
    local own = ffi.new("eng_verdict")
    own.scale = 8
    for step = 0, 9 do append(h, step) end
    h:append_shadow(0, "s", own, true, false)
    h:append_shadow(3, "s", own, false, true)
    local function counts(s) return { s.skipped, s.overflows or "-", s.bounds or "-" } end
    assert.same({ 0, 3, 7 }, counts(h:shadows()[1]))
    assert.matches("a loss scale of 2^3, on an overflow at its own scale.\n", h:why(1), 1, true)
    assert.matches("a loss scale of 2^3 (a bound).\n", h:why(5), 1, true)
    h:close()
    for _, name in ipairs { "overflow", "bound" } do
      scratch.sqlite(dir .. "/history.db", "ALTER TABLE shadows DROP COLUMN " .. name)
    end
    local old = history.open(dir)
    assert.same({ 0, "-", "-" }, counts(old:shadows()[1]))
    assert.is_nil(old:shadow("s")[1].bound)
    assert.matches("a loss scale of 2^3.\n", old:why(1), 1, true)
    old:close()
    h = history.open(dir, { write = true })          -- the run continues
    h:append_shadow(8, "s", own, true, true)
    assert.same({ 0, 2, 2 }, counts(h:shadows()[1]))
    h:close()
  end)

  it("reports a full disk once, keeps the rows and writes them when there is room", function()
    append(h, 0)
    h:flush()
    local told = 0
    scratch.with_file_limit(4096, function()
      for step = 1, 50 do
        local good, message = append(h, step)
        if not good then
          told = told + 1
          assert.truthy(message:find("hint: is the disk full?", 1, true), message)
        end
        if step == 10 then
          local flushed, why = h:flush()
          assert.is_nil(flushed)
          assert.truthy(why:find("kept in memory", 1, true), why)
        end
      end
      assert.are.equal(1, #h:steps())
    end)
    assert.are.equal(0, told)              -- flush() reported it
    assert.is_true(h:flush())
    assert.are.equal(51, #h:steps())
    assert.are.equal("ok", h:query("PRAGMA integrity_check")[1].integrity_check)
  end)

  it("reports a row that SQLite refuses, and does not blame the disk", function()
    assert.equal(0, C.eng_history_text(h.handle, "meta", nil, "a row without its key"))
    append(h, 0)
    local flushed, why = h:flush()
    assert.is_nil(flushed)
    assert.matches("history.db: a row was skipped: NOT NULL constraint failed: meta.key; the run "
      .. "continues$", why)
    assert.is_true(h:flush())              -- reported once; the other row is written
    assert.equal(1, #h:steps())
    assert.error_matches(function() h:close() end, "1 rows are lost: a row was skipped: NOT NULL")
  end)

  it("loses at most a second when the process is killed, and is never damaged", function()
    h:close()
    helper.write(dir .. "/run.lua", ([[
      local ffi = require "ffi"
      local h = require("engine.run.history").open(%q, { write = true })
      ffi.cdef "int getpid(void); int usleep(unsigned);"
      local record, verdict = ffi.new("eng_record"), ffi.new("eng_verdict")
      local first = #h:steps()
      for step = first, 1e9 do
        record.step = step
        h:append(record, verdict, 1)
        if step == first + 1000 then
          h:flush()
          io.write(ffi.C.getpid(), "\n")
          io.flush()
        end
        if step %% 10 == 0 then ffi.C.usleep(100) end
      end
    ]]):format(dir))
    local before = 0
    for _ = 1, 3 do
      local run = io.popen(scratch.command(dir .. "/run.lua"))
      local pid = run:read("*l")
      os.execute("sleep 0.4; kill -9 " .. pid)
      run:close()
      local reader = history.open(dir)
      assert.are.equal("ok", reader:query("PRAGMA integrity_check")[1].integrity_check)
      local rows = reader:query("SELECT count(*) AS n, max(step) AS last FROM steps")[1]
      assert.are.equal(rows.last + 1, rows.n)
      assert.is_true(rows.n > before + 1000)
      before = rows.n
      reader:close()
    end
  end)

  it("is closed when the process exits without closing it", function()
    helper.write(dir .. "/run.lua", ([[
      local h = require("engine.run.history").open(%q, { write = true })
      h:event(1, "left", "open")
      os.exit(0)
    ]]):format(dir .. "/other.db"))
    assert.are.equal(0, helper.execute(scratch.command(dir .. "/run.lua")))
    local other = history.open(dir .. "/other.db")
    assert.are.equal("open", other:events("left")[1].text)
    other:close()
  end)
end)

describe("a damaged history", function()
  local dir, intact
  before_each(function()
    dir = helper.folder()
    local h = history.open(dir, { write = true })
    for step = 0, 299 do append(h, step) end
    h:event(300, "finished")
    h:close()
    intact = helper.read(dir .. "/history.db")
  end)
  after_each(function() helper.remove(dir) end)

  local function after(sql)
    helper.write(dir .. "/history.db", intact)
    scratch.sqlite(dir .. "/history.db", sql)
  end
  local fails = helper.refuses

  it("with views or computed columns is refused", function()
    for _, sql in ipairs {
      "ALTER TABLE events RENAME TO t; CREATE VIEW events AS SELECT * FROM t",
      "CREATE TRIGGER a AFTER INSERT ON meta BEGIN SELECT 1; END",
      "ALTER TABLE events ADD COLUMN more AS (step + 1)" } do
      after(sql)
      fails("has views, triggers, virtual tables or computed columns; a history has plain",
        history.open, dir)
    end
  end)

  it("is closed again by a list of runs, which says what is wrong", function()
    after "UPDATE steps SET loss = 'x' WHERE step = 299"
    local pid = helper.read("/proc/self/stat"):match "%d+"
    local function open_files()
      return helper.shell(("ls -l /proc/%s/fd | grep -c %s/history.db"):format(pid, dir)).out
    end
    collectgarbage()
    collectgarbage "stop"                                    -- which would close it later
    local info = require("engine.run.runs").info(dir)
    local still = open_files()
    collectgarbage "restart"
    assert.matches("is damaged", info.problem, 1, true)
    assert.equal("0\n", still)
  end)

  it("names the column with a value of another type", function()
    for sql, text in pairs {
      ["UPDATE steps SET loss = 'x' WHERE step = 5"] = "'loss' is not a number",
      ["UPDATE steps SET updates = x'00' WHERE step = 5"] = "'updates' is not a whole number",
      ["UPDATE steps SET step = -3 WHERE step = 5"] = "'step' is negative",
      ["UPDATE steps SET count = 9223372036854775807 WHERE step = 5"] = "'count' is too large",
      ["UPDATE steps SET action = x'00' WHERE step = 5"] = "'action' is not text",
    } do
      after(sql)
      fails("history.db is damaged: a value of the column " .. text, function()
        local h = history.open(dir)
        local good, message = pcall(h.steps, h, -10)
        h:close()
        if not good then error(message, 0) end
      end)
    end
    after("UPDATE blocks SET loss_min = 'x'")
    local h = history.open(dir)
    fails("is damaged: expected the column 'low1' of a query to be a number, got ", curves.read, h,
      { "loss" }, { points = 1 })
    h:close()
  end)

  it("whose blocks hold impossible counts is refused where they are summed", function()
    after("UPDATE blocks SET rows = -9e999")
    local h = history.open(dir)
    fails("is damaged: expected the column 'rows' of its blocks to sum to 0 or more, got -inf",
      h.totals, h)
    h:close()
  end)

  it("reports, in one line, values that the tables' keys exclude in an undamaged one", function()
    local function reads(sql, pattern, method, ...)
      after(sql)
      local h = history.open(dir)
      fails(pattern, h[method], h, ...)
      h:close()
    end
    local signals = "DROP TABLE signals; CREATE TABLE signals(name TEXT, step %s, value REAL); " ..
      "INSERT INTO signals VALUES(NULL, 5, 1)"
    reads(signals:format("INTEGER"), "a value of the column 'name' is NULL", "signals")
    reads(signals:format("INTEGER"), "a value of the column 'name' is NULL", "signals_at")
    reads(signals:format("VARCHAR"), "'step' is of a type that a history does not have", "query",
      "SELECT step FROM signals")
    reads("DROP TABLE parameters; CREATE TABLE parameters(id INTEGER, name TEXT, shape TEXT); " ..
      "INSERT INTO parameters VALUES(NULL, 'w', '2')", "a value of the column 'id' is NULL",
      "parameters")
    local row = "('a', 4503599627370496, 1, 'skip', 0, NULL)"
    reads("DROP TABLE shadows; CREATE TABLE shadows(name TEXT, step INTEGER, scale REAL, action " ..
      "TEXT, failed INTEGER, reason TEXT); INSERT INTO shadows VALUES " ..
      table.concat({ row, row, row }, ", "),
      "expected the column 'skipped' of a query to be a number, got ", "shadows")
  end)

  local ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) " ..
    "SELECT count(*) AS n FROM n"

  it("cannot make a query endless", function()
    local h = history.open(dir)
    fails("a query exceeded ", h.query, h, ENDLESS)
    fails("string or blob too big", h.query, h, "SELECT length(hex(zeroblob(100000000))) AS n")
    assert.are.equal(300, h:query("SELECT count(*) AS n FROM steps")[1].n)
    h:close()
  end)

  it("lets an interrupt end a query", function()
    local h = history.open(dir)
    C.eng_interrupt(2)
    local good, message = pcall(h.query, h, ENDLESS)
    C.eng_interrupt(0)
    assert.is_false(good)
    assert.truthy(tostring(message):find("interrupted", 1, true), message)
    h:close()
  end)
end)

describe("opening a history", function()
  local dir
  before_each(function() dir = helper.folder() end)
  after_each(function() helper.remove(dir) end)

  local function refused(path, options, pattern)
    assert.matches(pattern, helper.failure(history.open, path, options))
  end

  it("refuses a file that is not a history", function()
    refused(dir, nil, "history.db: no such file")
    refused(dir .. "/no/h.db", { write = true }, "unable to open database file")
    helper.write(dir .. "/text", ("not a database "):rep(100))
    refused(dir .. "/text", nil, "is not a history, or is damaged")
    refused(dir .. "/text", { write = true }, "is not a history, or is damaged")
    helper.write(dir .. "/empty", "")
    refused(dir .. "/empty", nil, "is empty: its run has just begun, or ended before the first row")
    scratch.sqlite(dir .. "/other", "CREATE TABLE t(x)")
    refused(dir .. "/other", nil, "found another SQLite database")
  end)

  it("refuses a history of a newer engine in one line", function()
    history.open(dir, { write = true }):close()
    local bytes = helper.read(dir .. "/history.db")
    -- PRAGMA user_version is the big-endian number at byte 60 of the file.
    helper.write(dir .. "/history.db", bytes:sub(1, 60) .. "\0\0\0\99" .. bytes:sub(65))
    for _, options in ipairs { {}, { write = true } } do
      refused(dir, options, "history.db was written by a newer engine %(schema 99, expected " ..
        "up to 2%); hint: update the engine$")
    end
  end)

  it("reports a truncated file as damaged", function()
    local h = history.open(dir, { write = true })
    for step = 0, 999 do append(h, step) end
    h:close()
    local bytes = helper.read(dir .. "/history.db")
    helper.write(dir .. "/history.db", bytes:sub(1, 8192))
    local good, message = pcall(function() return #history.open(dir):steps() end)
    assert.is_false(good)
    assert.truthy(message:find("malformed") or message:find("damaged"), message)
  end)

  it("appends a step in a few microseconds", function()
    local h = history.open(dir, { write = true })
    local start = os.clock()
    for step = 1, 5000 do append(h, step) end
    local each = (os.clock() - start) / 5000
    h:close()
    assert.is_true(each < (os.getenv("ENGINE_SANITIZED") and 1e-3 or 2e-5),
      ("%.1f us a step"):format(each * 1e6))
  end)
end)
