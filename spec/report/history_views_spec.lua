-- Views of a history: curves from blocks, heat maps, one tensor; totals from blocks and from rows
-- agree, even after a resume.
local M_ffi = require "engine.base.ffi"
local curves = require "engine.run.curves"
local heat = require "engine.report.heat"
local history = require("engine").history
local scratch = require "spec.store.scratch"
local helper = require "spec.helper"

local ffi, C = M_ffi.ffi, M_ffi.C
local record, verdict = ffi.new("eng_record"), ffi.new("eng_verdict")
local stats = ffi.new("eng_tensor_stats[4]")

local NAMES = { "wte.weight", "blocks.1.attn.weight", "blocks.1.mlp.weight", "blocks.2.mlp.weight" }

-- Appends a step. The loss falls from step to step, every 100th step overflows, and statistics are
-- recorded every 50 steps and at overflows.
local function append(h, step, fields)
  ffi.fill(record, ffi.sizeof(record))
  ffi.fill(verdict, ffi.sizeof(verdict))
  local over = step % 100 == 99
  record.step, record.updates, record.count, record.first_bad = step, step, 1000, over and 3 or -1
  record.scale, record.loss, record.lr, record.norm_ref = 2 ^ (10 + step % 3), 5000 - step, 1e-3,
    0 / 0
  record.amax, record.norm, record.underflow, record.elapsed = 0.25, 1.5, 10, step
  record.overflow, record.inf = over and 1 or 0, over and 2 or 0
  verdict.scale, verdict.lr_mul, verdict.action = 1024, 1, over and C.ENG_ACTION_SKIP
    or C.ENG_ACTION_STEP
  for name, value in pairs(fields or {}) do
    if name == "action" then verdict.action = value else record[name] = value end
  end
  h:append(record, verdict, 512)
  if step % 50 == 0 or over then
    ffi.fill(stats, ffi.sizeof(stats))
    for i = 0, 3 do
      local s = stats[i]
      s.count, s.amax, s.sum_squares, s.zeros = 100, 2 ^ (4 * i), 4 ^ (4 * i), 1
      s.hist[160 + 4 * i], s.hist[160 + 4 * i - 20] = 98, 1
      if over and i == 3 then s.inf = 2 end
    end
    h:append_tensors(step, stats, 4)
  end
end

local function sums(h)
  local row = h:query [[SELECT count(*) AS rows, min(step) AS first, max(step) AS last,
    sum(overflow) AS overflows, sum(action <> 'step') AS skipped,
    sum(policy_failed) AS failed, sum(tokens) AS tokens, max(elapsed) AS seconds FROM steps]]
  return row[1]
end

describe("views of a history", function()
  local dir, h
  setup(function()
    dir = helper.folder()
    h = history.open(dir, { write = true })
    local list = {}
    for i, name in ipairs(NAMES) do list[i] = { name = name, shape = { 10, 10 } } end
    h:set_parameters(list)
    h:set_meta("gradients", "f16")
    for step = 0, 2999 do append(h, step) end
  end)
  teardown(function()
    h:close()
    helper.remove(dir)
  end)

  it("sum up blocks of 256 steps as they are written", function()
    local blocks = h:query "SELECT * FROM blocks ORDER BY block"
    assert.equal(11, #blocks)
    local b = blocks[2]
    assert.same({ 1, 256, 256, 511, 3, 3 }, { b.block, b.rows, b.first, b.last, b.overflows,
      b.skipped })
    assert.same({ 256, 5000 - 511, 5000 - 256 }, { b.loss_n, b.loss_min, b.loss_max })
    assert.equal(256 * (5000 - 383.5), b.loss_sum)
    assert.equal(0.25 * 4096, b.stored_max)
    assert.equal(0.01, b.underflow_max)
    assert.same(sums(h), h:totals())
  end)

  it("give a curve's least, mean and largest values, from blocks and from rows alike", function()
    local c = curves.read(h, { "loss", "inf" }, { points = 6 })
    assert.equal(512, c.width)
    assert.equal(6, #c.x)
    assert.same({ 5000 - 511, 5000 - 255.5, 5000 },
      { c.loss.min[1], c.loss.mean[1], c.loss.max[1] })
    assert.equal(2, c.inf.max[1])
    assert.equal(440, c.rows[6])
    local total = 0
    for _, n in ipairs(c.overflows) do total = total + n end
    assert.equal(30, total)
    c = curves.read(h, { "loss" }, { points = 10, from = 2990 })
    assert.same({ 1, 10, 2990, 2010, 2010 },
      { c.width, #c.x, c.x[1], c.loss.min[1], c.loss.max[1] })
    assert.equal(0, #curves.read(h, { "loss" }, { from = 5000 }).x)
    assert.has_error(function() curves.read(h, { "los" }) end, nil)
  end)

  it("plot by name, with marks and a range of steps", function()
    local text = tostring(h:plot("loss", { width = 60 }))
    assert.matches("^loss   2001 to 5000, at the end", text)
    assert.matches("× overflow (30)", text, 1, true)
    assert.matches("each column of dots spans the values of 25 steps", text, 1, true)
    assert.not_matches("overflow", tostring(h:plot("loss", { marks = false })))
    local both = { "loss", "scale" }
    for count, on in pairs { [0] = false, [2] = true } do
      assert.equal(count, select(2, tostring(h:plot(both, { marks = on })):gsub("× overflow", "")))
    end
    for _, on in ipairs { false, true } do
      h:plot("loss", { marks = on, svg = dir .. "/a.svg" })
      assert.equal(on, helper.read(dir .. "/a.svg"):find('class="mark overflow"', 1, true) ~= nil)
    end
    assert.matches("^loss scale   2%^10 to 2%^12", tostring(h:plot("scale", { width = 60 })))
    assert.matches("^largest gradient   0.25 to 0.25, at the end 0.25 %(log%)",
      tostring(h:plot("amax", { log = true, width = 60 })))
    assert.matches("\n\nloss scale",
      tostring(h:plot({ "loss", "scale" }, { from = 0, to = 20, width = 60 })), 1, true)
    assert.matches("^the history has none of these steps; it has steps 0 to %d+$",
      tostring(h:plot("loss", { from = 9000 })))
    local function fails(what, ...)
      helper.refuses(what, h.plot, h, ...)
    end
    fails("the history has no column 'los'; did you mean 'loss'?", "los")
    fails("plot: unknown option 'logg'; did you mean 'log'?", "loss", { logg = true })
    for problem, options in pairs { ["a whole number of 1 or more, got 0"] = { height = 0 },
      ["width to be a whole number of 1 or more, got -5"] = { width = -5 },
      ["points to be a whole number of 1 or more, got 0"] = { points = 0 },
      ["width to be at most 2000, got 1000000000"] = { width = 1e9 },
      ["from to be a number, got 'x'"] = { from = "x" },
      ["log to be true, false or a base above 1, got -1"] = { log = -1 } } do
      fails("plot: expected ", "loss", options)
      fails(problem, "loss", options)
    end
  end)

  it("name the one format whose limit a layer of several formats came nearest to", function()
    local mixed = history.open(dir .. "/mixed.db", { write = true })
    local list = {}
    for k, name in ipairs(NAMES) do
      list[k] = { name = name, shape = { 10, 10 }, gradient = k == 3 and "f32" or "f16" }
    end
    list[4].name = "blocks.1.norm.weight"
    mixed:set_parameters(list)
    for step = 0, 50 do append(mixed, step) end
    mixed:flush()
    assert.matches("<code>blocks.1</code> came nearest to the top of f16, 4.0 bits below it",
      require("engine.report.report").html(mixed, dir .. "/mixed.db"), 1, true)
    mixed:close()
  end)

  it("draw layers by exponent and over time", function()
    local text = tostring(h:heatmap { width = 120 })
    assert.matches("statistics of 90 steps, 0 to 2,999; on the right", text, 1, true)
    assert.matches("f16 gradients as stored, by exponent", text, 1, true)
    assert.matches("     wte ▏", text, 1, true)
    assert.matches("blocks.1 ▏[^\n]*2%^8.0, 8.0 bits of room\n", text)
    assert.matches("blocks.2 ▏[^\n]*!▕ 2%^12.0, inf or nan, 4.0 bits of room\n", text)
    text = tostring(h:heatmap { by = "time", width = 120 })
    assert.matches("largest gradient as stored, by step, f16;", text, 1, true)
    assert.matches("blocks.2 ▏[^\n]*!", text)
    assert.not_matches("blocks.1 ▏[^\n]*!", text)
    text = tostring(h:heatmap { only = "blocks.1", width = 120 })
    assert.matches("blocks.1.mlp.weight ▏", text, 1, true)
    assert.not_matches("wte", text)
    assert.has_error(function() h:heatmap { by = "steps" } end,
      "heatmap: expected `by` to be 'exponent' or 'time', got 'steps'")
    for _, from in ipairs { 3000, 3020, 9000 } do
      assert.equal("no statistics per tensor are recorded for these steps",
        tostring(h:heatmap { from = from }))
    end
    assert.error_matches(function() h:heatmap { only = "wt.weight" } end,
      "no parameter's name contains 'wt.weight'; did you mean 'wte.weight'?", 1, true)
  end)

  it("draw a recorded step in its own column and leave the others blank", function()
    local l = tostring(h:heatmap { by = "time", from = 100, to = 139, width = 100 })
    assert.matches("statistics of step 100; each column is a step", l, 1, true)
    assert.matches("blocks.2 ▏▓ +▕ 2^12.0, 4.0 bits of room", l)
    -- step 199 overflows; steps 150 and 200 do not
    local layers = require("engine.report.layers").read(h, { points = 60, from = 150, to = 209 })
    local recorded = {}
    for i = 1, #layers.x do
      local cell = layers.cells[3][i]
      if cell then recorded[#recorded + 1] = ("%d:%d"):format(layers.x[i], cell.overflows) end
    end
    assert.same({ "150:0", "199:1", "200:0" }, recorded)
  end)

  it("name the format of each layer's gradients, and measure its room in that format", function()
    local list = {}
    for i, name in ipairs(NAMES) do
      list[i] = { name = name, shape = { 10, 10 }, gradient = i % 2 == 0 and "f32" or "f16" }
    end
    h:set_parameters(list)
    local text = tostring(h:heatmap { width = 120 })
    assert.matches("^f16 %(f32 in 2 of 4 tensors%) gradients as stored", text)
    assert.matches("blocks.1 %(f16, f32%) ▏[^\n]* 2%^8.0, 8.0 bits of room\n", text)
    -- 116 bits from the top of f32
    assert.matches("blocks.2 %(f32%) ▏[^\n]* 2%^12.0, inf or nan\n", text)
    text = tostring(h:heatmap { by = "time", width = 120 })
    assert.matches("by step, f16 (f32 in 2 of 4 tensors);", text, 1, true)
    assert.matches("(f32 reaches 3.40282e+38)", tostring(h:tensor "blocks.2.mlp.weight"), 1, true)
    for i = 1, #list do list[i].gradient = "f16" end
    h:set_parameters(list)
  end)

  it("fit a terminal of 40 columns", function()
    for _, by in ipairs { "exponent", "time" } do
      for line in (tostring(h:heatmap { by = by, width = 40 }) .. "\n"):gmatch "(.-)\n" do
        assert.is_true(require("engine.base.show").width(line) <= 40, line)
      end
    end
    for line in (tostring(h:plot({ "loss", "underflow" }, { width = 40 })) .. "\n"):gmatch "(.-)\n"
    do assert.is_true(require("engine.base.show").width(line) <= 40, line) end
  end)

  it("mark swaps, steps skipped without overflow and settings, each by name", function()
    local dir2 = helper.folder()
    local other = history.open(dir2, { write = true })
    for step = 0, 199 do
      append(other, step, step == 30 and { action = C.ENG_ACTION_SKIP } or nil)
    end
    other:event(50, "swap", "a -> b")
    other:event(55, "swap", "the beginning " .. ("x"):rep(300))
    other:event(60, "set", "lr = 1")
    other:event(61, "set", "lr = 2")
    other:event(70, "paused", "by an attached client")
    local text = tostring(other:plot("scale", { width = 120 }))
    assert.matches("× overflow (2)   o skipped without overflow (1)   s policy swapped (2)   " ..
      "= setting changed (2)   p paused (1)", text, 1, true)
    local page = require("engine.report.report").html(other, dir2)
    assert.matches('"policy swapped: the beginning x', page, 1, true)
    other:close()
    helper.remove(dir2)
  end)

  it("keep the step of an inf where a later step of the column has a larger gradient", function()
    local dir2 = helper.folder()
    local other = history.open(dir2, { write = true })
    other:set_parameters { { name = "a.weight", shape = { 10, 10 } } }
    for step = 1, 2 do
      append(other, step)
      ffi.fill(stats, ffi.sizeof(stats))
      stats[0].count, stats[0].amax, stats[0].inf = 100, step, step == 1 and 1 or 0
      other:append_tensors(step, stats, 1)
    end
    local cell = require("engine.report.layers").read(other, { points = 1 }).cells[1][1]
    assert.same({ 2, 1 }, { cell.amax, cell.step })
    other:close()
    helper.remove(dir2)
  end)

  it("show one tensor, and suggest the nearest name for an unknown one", function()
    local t = h:tensor "blocks.2.mlp.weight"
    assert.equal("blocks.2.mlp.weight", t.name)
    assert.equal(90, #t.steps)
    assert.same({ 2 ^ 12, 98 }, { t.steps[1].amax, t.steps[1].hist[12] })
    assert.equal(2, t.steps[#t.steps].inf)
    local text = tostring(t)
    assert.matches("^blocks.2.mlp.weight %[10 x 10%]\n", text)
    assert.matches("× inf or nan (30)", text, 1, true)
    assert.matches("2^12 █", text, 1, true)
    helper.refuses("no parameter is called 'blocks.2.mlp.wieght'; did you mean " ..
      "'blocks.2.mlp.weight'?; history:parameters() lists all 4: wte.weight",
      h.tensor, h, "blocks.2.mlp.wieght")
  end)

  it("report a wrong name in one line, with the script's line and no traceback", function()
    for call, text in pairs { ['plot "los"'] = "the history has no column 'los'",
      ['tensor "wt"'] = "no parameter is called 'wt'", ['heatmap { only = "zz" }'] =
        "no parameter's name contains 'zz'", ['plott "loss"'] =
        "a history has no method 'plott'; did you mean 'plot'?", [".plot 'loss'"] =
        "expected a history before the colon (h:plot, not h.plot), got 'loss'",
      [".heatmap { by = 'time' }"] = "(h:heatmap, not h.heatmap), got a table" } do
      local result = helper.run { "-e", ("require('engine').history.open('%s')%s"):format(dir,
        (call:gsub("^%w", ":%0"))) }
      assert.equal(1, result.code)
      assert.matches("^engine: %(command line%):1: [^\n]*\n$", result.err)
      assert.matches(text, result.err, 1, true)
    end
  end)

  it("keep totals right through a resume, a retry and steps out of order", function()
    local other_dir = helper.folder()
    local other = history.open(other_dir, { write = true })
    for step = 0, 999 do append(other, step) end
    other:resume(300)
    assert.same(sums(other), other:totals())
    assert.equal(1, other:query("SELECT count(*) AS n FROM blocks")[1].n)
    for step = 300, 800 do append(other, step, { loss = 1 }) end
    append(other, 801, { action = C.ENG_ACTION_RETRY })
    append(other, 801, { loss = 0 / 0, amax = math.huge })
    for step = 802, 1300 do append(other, step) end
    assert.same(sums(other), other:totals())
    local b = other:query("SELECT * FROM blocks WHERE block = 3")[1]
    assert.same({ 257, 256, 256 }, { b.rows, b.loss_n, b.amax_n })
    assert.equal(0.25, b.amax_max)
    append(other, 10)
    for step = 1301, 1800 do append(other, step) end
    assert.same(sums(other), other:totals())
    other:close()
    other = history.open(other_dir, { write = true })
    for step = 1801, 2100 do append(other, step) end
    assert.same(sums(other), other:totals())
    assert.equal(8, other:query("SELECT count(*) AS n FROM blocks")[1].n)
    other:close()
    helper.remove(other_dir)
  end)

  it("read a history of schema 1, which has no blocks, and add blocks when the run continues",
    function()
    local old_dir = helper.folder()
    local old = history.open(old_dir, { write = true })
    for step = 0, 599 do append(old, step) end
    old:close()
    -- as the engine wrote it before blocks existed
    scratch.sqlite(old_dir .. "/history.db", "DROP TABLE blocks; PRAGMA user_version = 1")
    local reader = history.open(old_dir)
    assert.same(sums(reader), reader:totals())
    assert.equal(5000, curves.read(reader, { "loss" }, { points = 2 }).loss.max[1])
    reader:close()
    old = history.open(old_dir, { write = true })
    append(old, 600)
    assert.equal(2, old:query("SELECT count(*) AS n FROM blocks")[1].n)
    assert.same(sums(old), old:totals())
    old:close()
    helper.remove(old_dir)
  end)
end)

describe("shades", function()
  it("go from cold to hot; inf and nan have their own", function()
    local options = { rows = { { label = "a", cells = { 0, 0.5, 1, nil, "bad" }, note = "x" } },
      columns = 5, wide = 1, axis = { "0", [5] = "4" }, low = "low",
      high = "high", title = "t" }
    options.style = "shades"
    assert.equal("t\na ▏·▒█ !▕ x\n   ╵   ╵\n   0   4\n" ..
      "   low ·░▒▓█ high    ! inf or nan",
      heat.draw(options))
    options.style = "ascii"
    assert.matches("a |", heat.draw(options), 1, true)
    assert.not_matches("[\128-\255]", heat.draw(options))
    options.style = "colour"
    assert.matches("\27%[48;5;220m", heat.draw(options))
  end)
end)
