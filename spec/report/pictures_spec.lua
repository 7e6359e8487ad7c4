-- What the pictures of a run show: gaps where nothing was recorded, marks with names, named axes,
-- curves that stay visible, colours that can be told apart, texts of a readable size; and runs
-- with hardly any steps.
local chart = require "engine.report.chart"
local heat = require "engine.report.report_heat"
local helper = require "spec.helper"
local page = require "engine.report.report_page"
local scratch = require "spec.store.scratch"
local quote, shell = helper.quote, helper.shell

local SCRIPT = [[
  local engine = require "engine"
  local cfg = engine.config { run = "", steps = 80, policy = "dynamic:init_scale=2^40", shadow = "",
    how = "" }
  engine.seed(1)
  local model = engine.nn.sequential { engine.nn.linear(8, 16), engine.nn.layer_norm(16),
    engine.nn.linear(16, 4) }
  local x, y = engine.randn(32, 8):keep(), engine.randint(0, 4, 32):keep()
  if cfg.how == "nan" then x = (engine.randn(32, 8) * (0 / 0)):keep() end
  local function next_batch()
    if cfg.how == "broken" then error("no data", 0) end
    return { x = x, y = y, tokens = 32 }
  end
  engine.trainer {
    model = model, data = { next = next_batch },
    loss = function(m, b) return engine.cross_entropy(m(b.x), b.y) end,
    optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = "fp16" }), policy = cfg.policy,
    steps = cfg.steps, run = cfg.run, shadow = cfg.shadow, config = cfg, log = "quiet",
    stats_every = 10, checkpoint_every = 40,
    on_step = function(t) if t.steps_done == 50 then t.policy:swap "static:loss_scale=256" end end,
  }:run()
]]

-- The contrast of two colours "#rrggbb" (WCAG 2).
local function contrast(a, b)
  local function luminance(colour)
    if #colour == 4 then colour = colour:gsub("%x", "%0%0") end
    local sum, weights = 0, { 0.2126, 0.7152, 0.0722 }
    for i = 1, 3 do
      local v = tonumber(colour:sub(2 * i, 2 * i + 1), 16) / 255
      sum = sum + weights[i] * (v <= 0.03928 and v / 12.92 or ((v + 0.055) / 1.055) ^ 2.4)
    end
    return sum
  end
  local high, low = luminance(a), luminance(b)
  if high < low then high, low = low, high end
  return (high + 0.05) / (low + 0.05)
end

local function variables(text)
  local list = {}
  for name, value in text:gsub("\n", ""):gmatch "%-%-([%w-]+):(#%x+)" do list[name] = value end
  return list
end

describe("the pictures of a run", function()
  local folder, engine, html, data
  local function inside(words)
    return shell("cd " .. quote(folder) .. " && " .. engine .. " " .. words)
  end
  local function report(run)
    local made = inside("report " .. run .. " -o -")
    assert.equal("", made.err)
    assert.equal(0, made.code)
    return made.out
  end
  setup(function()
    folder = helper.folder()
    engine = quote(helper.engine:sub(1, 1) == "/" and helper.engine
      or shell("pwd").out:match("[^\n]+") .. "/" .. helper.engine)
    helper.write(folder .. "/train.lua", SCRIPT)
    assert.equal("", inside("train.lua run=a shadow=deepspeed,megatron,megatron:hysteresis=2").err)
    html = report "a"
    data = require("cjson").decode(html:match('id="data">(.-)</script>'))
  end)
  teardown(function() helper.remove(folder) end)

  it("show a layer's statistics only at the steps that recorded them", function()
    local over = {}
    for i, n in ipairs(data.overflows) do over[i - 1] = n > 0 end
    local h, recorded, gaps = require("engine").history.open(folder .. "/runs/a"), 0, 0
    for i, cell in ipairs(data.layers.cells[1]) do
      local step = i - 1
      if type(cell) == "table" then
        recorded = recorded + 1
        assert.equal(step, cell[1])
        local tensors = h:tensors(step)                  -- the layer's weight and bias come first
        local amax = math.max(tensors[1].amax, tensors[2].amax)
        assert.is_true(math.abs(cell[2] - amax) <= 1e-4 * amax, step)
        assert.is_true(over[step] or step % 10 == 0, step)
        local x = data.layers.x[i]          -- half a column at either end of the axis
        assert.near(1000 / 79 * (step == 0 and 0.5 or 1), x[2] - x[1], 0.01)
      else
        gaps = gaps + 1
        assert.is_false(over[step] or step % 10 == 0, step)
      end
    end
    h:close()
    assert.is_true(recorded > 8 and gaps > 30)
    assert.matches('<rect class="none" width="100%" height=', html, 1, true)
    assert.matches("nothing recorded</span>", html, 1, true)
  end)

  it("leave a gap where the histogram of all gradients was not recorded", function()
    shell("cd " .. quote(folder) .. " && cp -r runs/a runs/holes")
    scratch.sqlite(folder .. "/runs/holes/history.db", "UPDATE steps SET hist = NULL WHERE step " ..
      "BETWEEN 30 AND 59")
    local holes = require("cjson").decode(report("holes"):match('id="data">(.-)</script>')).time
    for i, step in ipairs(holes.steps) do
      assert.is_false(step >= 30 and step < 60)
      if step > 0 and step < 79 then
        assert.near(1000 / 79, holes.x[i][2] - holes.x[i][1], 0.01)
      end
    end
  end)

  it("name the formats of the gradients", function()
    assert.matches("as stored, in f16 (f32 in 2 of 6 tensors): bright is near the top of f16",
      html, 1, true)
    assert.matches("as stored in f16 (f32 in 2 of 6 tensors).", html, 1, true)
    assert.same({ "f16", "f32", "f16" }, data.layers.formats)
  end)

  it("keep shadows with the same scales visible and say that they are the same", function()
    assert.matches("megatron:hysteresis=2 (= megatron)</span>", html, 1, true)
    assert.matches("the same scales as <code>megatron</code>", html, 1, true)
    assert.not_matches("deepspeed (=", html, 1, true)
    local scale = html:match('data%-column="scale".-</svg></svg>')
    local dashes = {}
    for i, name in ipairs { "s2", "s3", "s4" } do
      assert.matches('<path class="line ' .. name .. '" style="stroke-width:', scale, 1, true)
      dashes[i] = chart.style:match("line%." .. name .. "{[^}]*stroke%-dasharray:([%d ]+)")
      for k = 1, i - 1 do assert.not_equal(dashes[k], dashes[i]) end
    end
  end)

  it("name every mark, both axes and logarithms", function()
    local svg = inside("plot a --svg -").out
    local n = inside("plot a").out:match "overflow %((%d+)%)"
    for _, text in ipairs { html, svg } do
      for _, piece in ipairs { "overflow (" .. n .. ")", "checkpoint (2)", "policy swapped (1)",
        '">swap</text>', '">step</text>', "loss scale, log axis" } do
        assert.matches(piece, text, 1, true)
      end
    end
    assert.matches(">magnitude</text>", html, 1, true)
    assert.matches("s policy swapped (1)", inside("plot a").out, 1, true)
  end)

  it("have an axis for the largest numbers, too", function()
    for _, list in ipairs { { 1.7e308, 1.7e308 }, { -1.7e308, 1.7e308 } } do
      local c = { x = { 0, 1 }, width = 1, first = 0, last = 1,
        big = { min = list, mean = list, max = list } }
      local svg = chart.file("big", { { title = "big", c = c, series = { { column = "big" } } } })
      assert.matches('<path class="line s1"', svg, 1, true)
      assert.not_matches("[^%w]nan[^%w]", svg)
    end
  end)

  it("join lines and bands over steps without a value only if the series says so", function()
    local c = { x = { 0, 4, 8 }, width = 1, first = 0, last = 8,
      v = { min = { 1, nil, 2 }, mean = { 2, nil, 3 }, max = { 3, nil, 4 } } }
    local function path(kind, join)
      return chart.file("gaps", { { title = "gaps", c = c, series = { { column = "v", band = true,
        join = join } } } }):match('<path class="' .. kind .. ' s1"[^>]- d="(.-)"')
    end
    assert.matches("^M[^ML]+L[^ML]+$", path("line", true))
    assert.matches("^M[^ML]+M[^ML]+$", path("line"))
    assert.matches("^M[^ML]+L[^ML]+L[^ML]+L[^ML]+Z$", path("band", true))
    assert.equal("", path("band"))
  end)

  it("show a signal-to-noise ratio of -inf as the lowest, and of inf as the highest", function()
    local function drawn(...)
      local cells = {}
      for i, snr in ipairs { ... } do cells[i] = { step = i, snr = snr } end
      return (heat.fp8_over_time({ rows = { { name = "1 x", cells = cells } }, low = 10, high = 30,
        width = 1, starts = { 0, 1, 2 } }, chart.axis { first = 0, last = 2 }))
    end
    assert.equal(drawn(10, 20, 30), drawn(-math.huge, 20, math.huge))
  end)

  it("have colours with enough contrast, and brightness that rises along the heat map", function()
    for _, scheme in ipairs { "light", "dark" } do
      local all = variables(chart[scheme] .. page[scheme])
      for _, back in ipairs { all.page, all.card } do
        for i = 1, chart.series do
          assert.is_true(contrast(all["c" .. i], back) >= 3, scheme .. " c" .. i)
        end
        for _, name in ipairs { "text", "muted", "bad", "event" } do
          assert.is_true(contrast(all[name], back) >= 4.5, scheme .. " " .. name)
        end
      end
      for _, name in ipairs { "good", "live", "bad" } do
        assert.is_true(contrast(all[name], all[name .. "-soft"]) >= 4.5, scheme .. " " .. name)
      end
    end
    for i = 2, #heat.ramp do
      assert.is_true(contrast(heat.ramp[i], "#000") > contrast(heat.ramp[i - 1], "#000"))
    end
  end)

  it("have texts of at least 11 pixels at any width", function()
    for size in (chart.style .. page.style):gmatch "font[^;}]-:[^;}]-([%d.]+)px" do
      assert.is_true(tonumber(size) >= 11, size)
    end
    assert.is_nil((chart.style .. page.style):find("font%-size:[%d.]*e?m"))
    -- no text is among the shapes that are stretched to the page's width
    for shapes in html:gmatch '<svg class="shapes".-</svg>' do
      assert.is_nil(shapes:find("<text", 1, true))
    end
    for tag in html:gmatch "<svg[^>]*>" do
      assert.is_true(not tag:find("viewBox", 1, true) or tag:find('class="shapes"', 1, true) ~= nil)
    end
  end)

  it("in files need no browser: literal colours on white, one layout", function()
    for _, width in ipairs { 1000, 390 } do
      local svg = inside("plot a --svg -" .. (width == 1000 and "" or " --width " .. width)).out
      for _, piece in ipairs { "var(", "@media", "prefers-color-scheme", "font:" } do
        assert.not_matches(piece, svg, 1, true)
      end
      assert.matches(('width="%d" height="(%%d+)" viewBox="0 0 %d %%1"'):format(width, width), svg)
      assert.matches('</style><rect width="100%" height="100%" fill="#fff"/>', svg, 1, true)
      assert.matches(".line.s1{stroke:#0072b2;", svg, 1, true)
      for _, text in ipairs { "a", "loss", "loss scale, log axis" } do
        assert.equal(1, select(2, svg:gsub(">" .. text .. "</text>", "")), text)
      end
    end
    local values = { 1, 2 }
    local long = { { title = "long", series = { { column = "y" } }, c = { x = { 0, 7e6 },
      width = 1, first = 0, last = 7e6, y = { min = values, mean = values, max = values } } } }
    assert.matches(">1,000,000</text>", chart.file("long", long), 1, true)
    assert.not_matches(">1,000,000</text>", chart.file("long", long, 390), 1, true)  -- no room
    assert.matches(">6,000,000</text>", chart.file("long", long, 390), 1, true)
  end)

  it("tell how a run without steps ended; with few steps, no axis is empty", function()
    assert.matches("no data", inside("train.lua run=none how=broken").err, 1, true)
    assert.matches("none +0 .* error: no data\n", inside("runs").out)
    local none = report "none"
    assert.matches("The run has no steps.", none, 1, true)
    assert.matches("error: no data", none, 1, true)
    assert.is_nil(none:find("class=\"panel\"", 1, true))
    for _, words in ipairs { "plot none", "plot none --svg -", "export none --csv -" } do
      local refused = inside(words)
      assert.equal(1, refused.code)
      assert.matches("^engine %a+: the run runs/none has no steps; `engine report` [^\n]*\n$",
        refused.err)
    end
    -- a history with the sums of a block whose rows are lost
    shell("cd " .. quote(folder) .. " && cp -r runs/a runs/lost_rows")
    scratch.sqlite(folder .. "/runs/lost_rows/history.db", "INSERT INTO blocks(block, rows) " ..
      "VALUES(0, 256); DELETE FROM steps")
    assert.matches("The run has no steps.", report "lost_rows", 1, true)
    for run, options in pairs { one = "steps=1", two = "steps=2",
      over = "steps=12 policy=static:loss_scale=2^60", lost = "steps=12 how=nan" } do
      inside("train.lua run=" .. run .. " " .. options)
      local text = report(run)
      for shape in text:gmatch "<[pstr]%l+ [^>]*>" do      -- paths, texts and their positions
        assert.is_nil(shape:find "[=\" ,MHV%-]nan" or shape:find "[=\" ,MHV%-]inf", run .. shape)
      end
      assert.matches("<h2>Loss</h2>", text, 1, true)
      for _, words in ipairs { "plot %s --width 40", "plot %s --heatmap time --width 40",
        "plot %s --heatmap exponent --width 40", "plot %s --svg -", "export %s --csv -",
        "export %s --jsonl -" } do
        local made = inside(words:format(run))
        assert.equal("", made.err)
        assert.equal(0, made.code)
      end
    end
    local one = report "one"
    assert.matches('x="50%" y="210" dx="0" dy="16" text-anchor="middle">0</text>', one, 1, true)
    assert.matches('class="line dot s1" style="stroke-width:7" d="M500 ', one, 1, true)
    assert.matches("No step has a finite loss.", report "lost", 1, true)
    assert.matches("nothing to draw: no value is finite", inside("plot lost --svg -").out, 1, true)
  end)

  it("as PNG have the same marks, names and steps", function()
    -- a gnuplot that keeps its commands
    shell("mkdir -p " .. quote(folder .. "/bin"))
    helper.write(folder .. "/bin/gnuplot", "#!/bin/sh\ncat > " .. folder ..
      "/commands\necho x > p.png\n")
    shell("chmod +x " .. quote(folder .. "/bin/gnuplot"))
    local made = shell("cd " .. quote(folder) .. " && PATH=$PWD/bin:$PATH " .. engine ..
      " plot a --png p.png")
    assert.equal("p.png\n", made.out)
    local commands = helper.read(folder .. "/commands")
    inside "train.lua run=blank steps=3 how=nan policy=static"
    shell("cd " .. quote(folder) .. " && PATH=$PWD/bin:$PATH " .. engine ..
      " plot blank --columns loss --log --png p.png")
    assert.matches("'nothing to draw: no value is finite and positive' at graph",
      helper.read(folder .. "/commands"), 1, true)
    for _, piece in ipairs { "set xlabel 'step'", "set title 'loss scale, log axis'",
      "title 'policy swapped (1)'", "title 'checkpoint (2)'", "set arrow from 50, graph 0" } do
      assert.matches(piece, commands, 1, true)
    end
    assert.matches("title 'overflow %(%d+%)'", commands)
  end)
end)
