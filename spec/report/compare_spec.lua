-- Several runs in one view: `engine plot a b c`, groups of runs, `engine report a b c`; and the
-- columns of layers. On runs of the real binary.
local chart = require "engine.report.chart"
local compare = require "engine.run.compare"
local engine = require "engine"
local helper = require "spec.helper"
local quote, shell = helper.quote, helper.shell

local SCRIPT = [[
  local engine = require "engine"
  local cfg = engine.config { run = "", steps = 30, policy = "dynamic:init_scale=2^20", seed = 1,
    lr = 1e-2, precision = "fp16", signal = false, evaluate = false, broken = false }
  engine.seed(cfg.seed)
  local model = engine.nn.sequential { engine.nn.linear(8, 16), engine.nn.layer_norm(16),
    engine.nn.linear(16, 4) }
  local x, y = engine.randn(32, 8):keep(), engine.randint(0, 4, 32):keep()
  local data = { next = function()
    if cfg.broken then error("no data", 0) end
    return { x = x, y = y, tokens = 32 }
  end }
  engine.trainer {
    model = model, data = data,
    loss = function(m, b)
      if cfg.signal then engine.signal("entropy", 0.5) end
      return engine.cross_entropy(m(b.x), b.y)
    end,
    optimizer = engine.optim.adamw(model, { lr = cfg.lr, precision = cfg.precision }),
    policy = cfg.policy, steps = cfg.steps, run = cfg.run, config = cfg, log = "quiet",
    stats_every = 10,
    evaluate = cfg.evaluate and { data = data, every = 10, batches = 1 } or nil,
  }:run()
]]

local RUNS = {
  "run=a1 signal=true", "run=a2 seed=2 steps=40", "run=s1 policy=static:loss_scale=64",
  "run=s2 policy=static:loss_scale=256 seed=2 steps=40", "run=layers policy=layerwise steps=60",
  "run=long policy=static steps=700", "run=b1 precision=bf16 seed=2",
}

describe("several runs", function()
  local folder, binary
  local function inside(words)
    return shell("cd " .. quote(folder) .. " && " .. binary .. " " .. words)
  end
  local function opened(names)
    local words = {}
    for i, name in ipairs(names) do words[i] = folder .. "/runs/" .. name end
    return compare.open(words)
  end
  setup(function()
    folder = helper.folder()
    binary = quote(helper.engine:sub(1, 1) == "/" and helper.engine
      or shell("pwd").out:match("[^\n]+") .. "/" .. helper.engine)
    helper.write(folder .. "/train.lua", SCRIPT)
    for _, words in ipairs(RUNS) do assert.equal("", inside("train.lua " .. words).err) end
  end)
  teardown(function() helper.remove(folder) end)

  it("are named with their precision and the fewest settings that tell them apart", function()
    local function labels(names)
      local list = {}
      for i, run in ipairs(opened(names)) do list[i] = run.label end
      return list
    end
    assert.same({ "a1: seed=1", "a2: seed=2" }, labels { "a1", "a2" })
    assert.same({ "a1: policy=dynamic:init_scale=2^20", "s1: policy=static:loss_scale=64" },
      labels { "a1", "s1" })
    assert.same({ "a1: policy=dynamic:init_scale=2^20 seed=1",
      "a2: policy=dynamic:init_scale=2^20 seed=2", "s1: policy=static:loss_scale=64 seed=1" },
      labels { "a1", "a2", "s1" })
    assert.same({ "a1: seed=1 precision=fp16", "b1: seed=2 precision=bf16" }, labels { "a1", "b1" })
    local differ = {}
    for _, key in ipairs(opened({ "a1", "a2" }).differ) do differ[key] = true end
    assert.same({ seed = true, steps = true, signal = true }, differ)   -- not `run`
    assert.error_matches(function() opened { "a1", "a1" } end, "is named twice")
  end)

  it("have a curve each in the terminal, also where one is longer", function()
    local result = inside "plot a1 a2 --columns scale"
    assert.equal(0, result.code)
    assert.equal("", result.err)
    assert.matches("\na a1: seed=1\nb a2: seed=2\n", result.out)
    assert.matches("step 0 .* 39\n", result.out)
    assert.matches("%*b+\n", result.out)                -- where a1 has ended
    assert.not_matches("not drawn", result.out, 1, true)
    result = inside "plot a1 a2 --columns scale --from 10.5 --to 12.25"
    assert.equal("", result.err)
    assert.matches("step 11 +12\n", result.out)
  end)

  it("that write more steps meanwhile are read up to the step known at first", function()
    local list = opened { "a1", "a2" }
    for _, run in ipairs(list) do
      local range, calls = run.history.range, 0
      run.history.range = function(h, from, to)
        calls = calls + 1
        return range(h, from, calls == 1 and 9 or to)        -- 10 steps, then all
      end
    end
    local c = compare.read(list, { "loss" }, { points = 5 })
    assert.same({ 0, 9, 5 }, { c.first, c.last, #c.x })
    assert.same({ 5, 5 }, { #c["loss 1"].mean, #c["loss 2"].mean })
  end)

  it("have colours in a terminal that shows them", function()
    if shell("command -v script").code ~= 0 then return pending("needs script(1)") end
    local result = shell(("cd %s && TERM=xterm-256color NO_COLOR= script -qec %s /dev/null"):format(
      quote(folder), quote("unset NO_COLOR; " .. binary .. " plot a1 a2 --columns loss")))
    for _, colour in ipairs { 32, 172 } do
      assert.matches("\27[38;5;" .. colour .. "m", result.out, 1, true)
    end
    assert.matches("m a2: seed=2", result.out:gsub("\27%[0", ""), 1, true)
  end)

  it("have curves that differ in colour and dashes in an SVG and a PNG", function()
    local svg = inside("plot a1 a2 s1 --columns loss,scale --svg -").out
    for i, name in ipairs { "a1: policy=dynamic:init_scale=2^20 seed=1",
      "a2: policy=dynamic:init_scale=2^20 seed=2", "s1: policy=static:loss_scale=64 seed=1" } do
      assert.matches(">" .. name .. "</text>", svg, 1, true)
      assert.matches('<path class="line s' .. i .. '" style="stroke-width:1.8" d="M', svg, 1, true)
    end
    local seen = {}
    for i = 1, 36 do
      local class = chart.style_of(i)
      assert.is_nil(seen[class], class)
      seen[class] = true
      for piece in class:gmatch("%S+") do
        assert.matches(".line." .. piece .. "{", chart.style, 1, true)
      end
    end
    shell("mkdir -p " .. quote(folder .. "/bin"))
    helper.write(folder .. "/bin/gnuplot", "#!/bin/sh\ncat > " .. folder ..
      "/commands\necho x > p.png\n")
    shell("chmod +x " .. quote(folder .. "/bin/gnuplot"))
    local made = shell("cd " .. quote(folder) .. " && PATH=$PWD/bin:$PATH " .. binary ..
      " plot a1 a2 --columns loss --png p.png")
    assert.equal("p.png\n", made.out)
    local commands = helper.read(folder .. "/commands")
    assert.matches("$data1 using 1:3 with lines lw 1.5 lc rgb '#0072b2' title 'a1: seed=1', " ..
      "$data2 using 1:3 with lines lw 1.5 dt (9,5) lc rgb '#d55e00' title 'a2: seed=2'",
      commands, 1, true)
  end)

  it("that lack a column are left out of it and named", function()
    local result = inside "plot a1 a2 --columns loss,signals.entropy --svg b.svg"
    assert.equal(0, result.code)
    assert.equal("engine plot: a2 is left out of the plot of signals.entropy: the run has no " ..
      "signal 'entropy'; engine.signal(name, value) publishes one\n", result.err)
    local svg = helper.read(folder .. "/b.svg")
    local first, second = svg:match('>loss</text>(.-)>signal entropy</text>(.*)')
    assert.matches('class="line s2"', first, 1, true)
    assert.not_matches('class="line s2"', second, 1, true)
    assert.matches('class="line s1"', second, 1, true)
    assert.matches(">a1: seed=1</text>", second, 1, true)          -- the legend
    local count, both = nil, 0
    for _, run in ipairs(opened { "a1", "a2" }) do
      both = both + #run.history:overflows()
      count = count or both
    end
    assert.is_true(both > count)
    assert.matches(("overflow in any run (%d)"):format(both), first, 1, true)
    assert.matches(("overflow in any run (%d)"):format(count), second, 1, true)
    local shown = inside("plot a1 a2 --columns loss,signals.entropy").out
    assert.matches(("overflow in any run %%(%d%%).*signal entropy.*run %%(%d%%)"):format(both,
      count), shown)
    assert.equal(1, select(2, inside("plot a1 a2").out:gsub("overflow in any run", "")))
    svg = inside("plot a1 a2 --columns loss --svg - --title 'Seeds & more'").out
    assert.matches('<text class="head" x="12" y="28">Seeds &amp; more</text>', svg, 1, true)
    assert.equal("engine plot: --title is the title in a file; hint: add --svg FILE or --png " ..
      "FILE\n", inside("plot a1 --title Seeds").err)
    assert.matches("\nb a1: seed=1\n", inside("plot a2 a1 --columns signals.entropy").out, 1, true)
    result = inside "plot a2 s1 --columns signals.entropy"
    assert.equal(1, result.code)
    assert.matches("no run has signals.entropy: the run has no signal", result.err, 1, true)
    result = inside "plot a1 s2 --columns los"
    assert.equal(1, result.code)
    assert.matches("did you mean 'loss'?", result.err, 1, true)
    result = inside "plot a1 a2 --from 35 --columns loss"
    assert.matches("a1 is left out: it has no steps to draw", result.err, 1, true)
    assert.equal(0, result.code)
    assert.equal(1, inside("plot a1 a2 --from 500").code)
    assert.matches("no run has steps from 900 to the end", inside("plot a1 a2 --from 900").err, 1,
      true)
    assert.matches("--heatmap draws one run, got 2 runs",
      inside("plot a1 a2 --heatmap time").err, 1, true)
  end)

  it("agree on the columns of a picture whatever their length and first step", function()
    local list = opened { "a1", "long" }
    for _, points in ipairs { 700, 100, 2 } do
      local c = compare.read(list, { "loss" }, { points = points })
      assert.equal(699, c.last)
      assert.equal(points == 2 and 512 or 700 / points, c.width)
      for k, run in ipairs(list) do
        local v, from = c[c.curves[k].column.loss], 0
        for i, step in ipairs(c.first_step) do
          assert.equal(from, step)
          from = from + c.width
          local rows, sum = run.history:steps(step, step + c.width - 1), 0
          for _, row in ipairs(rows) do sum = sum + row.loss end
          if #rows == 0 then assert.is_nil(v.mean[i])
          else assert.near(sum / #rows, v.mean[i], 1e-9) end
        end
      end
    end
    local c = compare.read(list, { "loss" }, { points = 7, from = 25, to = 45 })   -- 3 steps each
    for k, run in ipairs(list) do
      assert.same({ 24, 27, 30, 33, 36, 39, 42, 45 }, c.first_step)
      local rows = run.history:steps(27, 29)
      assert.near((rows[1].loss + rows[2].loss + rows[3].loss) / 3,
        c[c.curves[k].column.loss].mean[2], 1e-9)
    end
  end)

  describe("in groups", function()
    it("have the mean and one standard deviation where all have a value", function()
      local list = opened { "s1", "a1", "s2", "a2" }
      local c = compare.read(list, { "loss", "scale" }, { points = 40, group = "lr" })
      assert.equal("lr=0.01 (4 runs)", c.curves[1].label)
      local loss, scale = c[c.curves[1].column.loss], c[c.curves[1].column.scale]
      for _, i in ipairs { 1, 12, 30 } do
        local sum, squares, logs = 0, 0, 0
        for _, run in ipairs(list) do
          local row = run.history:steps(i - 1, i - 1)[1]
          sum, squares, logs = sum + row.loss, squares + row.loss ^ 2, logs + math.log(row.scale)
        end
        local mean = sum / 4
        local deviation = math.sqrt((squares - 4 * mean ^ 2) / 3)
        assert.near(mean, loss.mean[i], 1e-9)
        assert.near(mean - deviation, loss.min[i], 1e-6)
        assert.near(mean + deviation, loss.max[i], 1e-6)
        assert.near(math.exp(logs / 4), scale.mean[i], 1e-6 * scale.mean[i])
        assert.near(scale.mean[i] ^ 2, scale.min[i] * scale.max[i], 1e-6 * scale.mean[i] ^ 2)
      end
      for i = 31, 40 do assert.is_nil(loss.mean[i]) end
      assert.same({ "lr=0.01 (4 runs): its runs have the steps 0 to 29 in common (loss, scale)" },
        { unpack(c.notes) })
    end)

    it("end where one run diverges, and a group of one run has no spread", function()
      local nan = compare.band({ { mean = { 1, 2 } }, { mean = { 3 } } }, 2)
      assert.same({ mean = { 2 }, min = { 2 - math.sqrt(2) }, max = { 2 + math.sqrt(2) } }, nan)
      assert.same({ mean = { 5 }, min = { 5 }, max = { 5 } },
        compare.band({ { mean = { 5 } } }, 1))
      assert.same({ mean = {}, min = {}, max = {} }, compare.band({ { mean = { 0 } } }, 1, 2))
    end)

    it("have a band in a picture and in the terminal", function()
      local svg = inside "plot a1 a2 s1 s2 --group seed --columns loss --svg -"
      assert.equal("", svg.err)
      assert.matches(">seed=1 (2 runs)</text>", svg.out, 1, true)
      assert.matches('<path class="band s2" d="M%d', svg.out)
      local shown = inside "plot a1 a2 s1 s2 --group seed --columns loss"
      assert.matches("\na seed=1 %(2 runs%)\nb seed=2 %(2 runs%)\n", shown.out)
      assert.matches("[ab]%.", shown.out)
      local wrong = inside "plot a1 a2 --group sed"
      assert.equal(1, wrong.code)
      assert.matches("no run has a setting 'sed'; did you mean 'seed'?", wrong.err, 1, true)
      assert.matches("hint: a script records its settings with `config = cfg`", wrong.err, 1, true)
      assert.matches("--group draws several runs", inside("plot a1 --group seed").err, 1, true)
    end)
  end)

  it("share the marks of their overflows", function()
    local list = opened { "a1", "a2" }
    local c, counts = compare.read(list, { "loss" }, { points = 7 }), {}
    for i in ipairs(c.x) do counts[i] = 0 end
    for _, run in ipairs(list) do
      for _, row in ipairs(run.history:overflows()) do
        local i = math.floor(row.step / c.width) + 1
        counts[i] = counts[i] + 1
      end
    end
    assert.is_true(counts[1] > 1)
    assert.same(counts, c.overflows)
    assert.matches("[x×] overflow in any run %(%d+%)", inside("plot a1 a2").out)
    assert.matches("overflow in any run", inside("plot a1 a2 --svg -").out, 1, true)
  end)

  it("are left out with a note if their history is damaged", function()
    shell("cd " .. quote(folder .. "/runs") .. " && mkdir bad head && echo no > bad/history.db && "
      .. "cat a2/history.db > head/history.db && printf '%40960s' x | "
      .. "dd of=head/history.db bs=4096 seek=8 conv=notrunc 2>/dev/null")
    for _, words in ipairs { "plot a1 bad head", "report a1 head bad" } do
      local result = inside(words)
      assert.equal(0, result.code, result.err)
      assert.matches("bad is left out: history runs/bad/history.db is not a history", result.err, 1,
        true)
      assert.matches("head is left out: [^\n]*malformed", result.err)
    end
    assert.equal(1, inside("plot bad head bad/").code)
    shell("rm -r " .. quote(folder .. "/runs/bad") .. " " .. quote(folder .. "/runs/head"))
  end)

  describe("in a page", function()
    local html, data
    setup(function()
      assert.equal("runs/a1/report.html\n", inside("report a1").out)
      local made = inside "report a1 a2 s1"
      assert.equal("", made.err)
      assert.equal("comparison.html\n", made.out)
      html = helper.read(folder .. "/comparison.html")
      data = require("cjson").decode(html:match('id="data">(.-)</script>'))
    end)

    it("are in a table of what differs and how they ended", function()
      local heads = {}
      for head in html:gmatch("<th[^>]*>(.-)</th>") do heads[#heads + 1] = head end
      assert.same({ "run", "policy", "seed", "signal", "steps", "final loss", "skipped",
        "overflows", "last scale", "how it ended" }, heads)
      local row = html:match("(<tr><td><span.->a2</span></td>.-</tr>)")
      local list = engine.history.open(folder .. "/runs/a2")
      local last = list:last(1)[1]
      for _, piece in ipairs { ">dynamic:init_scale=2^20<", ">2<", ">40<",
        (">%.4f<"):format(last.loss), ">" .. chart.scale(last.next_scale) .. "<", ">finished<",
        (">%d<"):format(list:totals().overflows), 'class="line s2"' } do
        assert.matches(piece, row, 1, true)
      end
      list:close()
    end)

    it("link to their own pages where these exist", function()
      assert.matches('<a href="runs/a1/report.html">a1</a>', html, 1, true)
      assert.not_matches('href="runs/a2', html, 1, true)
      inside "report a1 a2 -o runs/a2/both.html"
      assert.matches('<a href="../a1/report.html">a1</a>',
        helper.read(folder .. "/runs/a2/both.html"), 1, true)
    end)

    it("have overlaid curves, with the values that the pointer shows", function()
      for _, name in ipairs { "loss", "scale" } do
        local svg = html:match('data%-column="' .. name .. '".-</svg></svg>')
        for i = 1, 3 do assert.matches('class="line s' .. i .. '"', svg, 1, true) end
        assert.equal(3, #data.groups[name])
      end
      assert.equal("a2: policy=dynamic:init_scale=2^20 seed=2", data.titles["loss 2"])
      assert.equal(40, #data.x)
      assert.near(helper.history(folder .. "/runs/s1", "steps", 7, 7)[1].loss,
        data.columns["loss 3"].mean[8], 1e-4)
      assert.is_true(data.columns["loss 3"].mean[35] == require("cjson").null)
    end)

    it("show the evaluation loss if a run has one, and runs without steps", function()
      assert.equal("", inside("train.lua run=e evaluate=true steps=20").err)
      assert.not_equal(0, inside("train.lua run=none broken=true").code)
      local page = inside "report e a1 none -o -"
      assert.equal("engine report: none is left out: it has no steps to draw\n", page.err)
      assert.equal(0, page.code)
      assert.matches("<th[^>]*>evaluation loss</th>", page.out)
      local points = helper.history(folder .. "/runs/e", "evaluations")
      assert.matches((">%.4f<"):format(points[#points][2]),
        page.out:match("</svg>e</span></td>(.-)</tr>"), 1, true)
      assert.matches(">no steps, ", page.out, 1, true)
      require("spec.store.scratch").sqlite(folder .. "/runs/none/history.db", "DROP TABLE events")
      page = inside "report a1 none -o -"
      assert.equal(0, page.code, page.err)
      assert.matches("no such table: events", page.out, 1, true)
    end)
  end)

  describe("with separate scales of layers", function()
    it("have a column for each layer", function()
      local h, other = engine.history.open(folder .. "/runs/layers"), 0
      local c = require("engine.run.curves").read(h, { "scales.1", "scales.3" }, { points = 60 })
      for step = 0, 59 do
        local tensors = h:tensors(step)
        for k, name in ipairs { "scales.1", "scales.3" } do
          local want
          if tensors then
            local t = tensors[k == 1 and 1 or 5]
            assert.equal(name:sub(-1), t.name:match("^%d"))
            want = t.relative_scale * h:steps(step, step)[1].scale
            if t.relative_scale ~= 1 then other = other + 1 end
          end
          assert.equal(want, c[name].mean[step + 1])
        end
      end
      assert.is_true(other > 0)
      h:close()
    end)

    it("draw these columns, and suggest the nearest name", function()
      local result = inside "plot layers --columns scales.1,scales.3"
      assert.equal(0, result.code)
      assert.matches("^loss scale of layer 1   %S+ to %S+, at the end %S+ %(log%)\n", result.out)
      assert.matches("scales.LAYER", inside("help plot").out, 1, true)
      result = inside "plot layers --columns scales.4"
      assert.equal(1, result.code)
      assert.matches("the run has no layer '4'; did you mean '1'?; layers: 1 2 3", result.err, 1,
        true)
      assert.matches("scales.1 scales.2 scales.3", inside("plot layers --columns x").err, 1, true)
    end)
  end)

  it("h:plot writes a file with svg =", function()
    local h = engine.history.open(folder .. "/runs/a1")
    local path = folder .. "/own.svg"
    assert.equal(path, tostring(h:plot("loss", { svg = path })))
    assert.matches("^<svg .*>a1</text>.*>loss</text>", helper.read(path))
    h:plot("loss", { svg = path, title = "A run" })
    assert.matches("^<svg .*>A run</text>", helper.read(path))
    assert.error_matches(function() h:plot("loss", { title = "A run" }) end,
      "plot: expected title to be a text, and the option svg or png beside it, got 'A run'", 1,
      true)
    h:close()
  end)
end)
