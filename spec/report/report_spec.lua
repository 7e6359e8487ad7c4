-- engine runs, plot, report and export, and event files for TensorBoard, on runs of the real
-- binary.
local helper = require "spec.helper"
local run, shell, quote = helper.run, helper.shell, helper.quote
local M_ffi = require "engine.base.ffi"

local script = [[
  local engine = require "engine"
  local cfg = engine.config { run = "", steps = 60, policy = "dynamic:init_scale=2^22",
    tensorboard = false, shadow = "", factor = 1, log = "quiet" }
  engine.seed(1)
  local model = engine.nn.sequential { engine.nn.linear(8, 16), engine.nn.relu(),
    engine.nn.linear(16, 4) }
  local x, y = (engine.randn(32, 8) * cfg.factor):keep(), engine.randint(0, 4, 32):keep()
  engine.trainer {
    model = model, data = { next = function() return { x = x, y = y, tokens = 32 } end },
    loss = function(m, b) return engine.cross_entropy(m(b.x), b.y) end,
    optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = "fp16" }), policy = cfg.policy,
    steps = cfg.steps, run = cfg.run, tensorboard = cfg.tensorboard, shadow = cfg.shadow,
      config = cfg, log = cfg.log, stats_every = 10,
  }:run()
]]

-- The events of a file: { time, step, values = { tag = number or "histogram" or "text" }, version,
-- session }.
local function read_events(bytes)
  local ffi, C = M_ffi.ffi, M_ffi.C
  local function number(kind, text) return tonumber(ffi.cast("const " .. kind .. " *", text)[0]) end
  local function masked(text)
    local crc = C.eng_crc32c(0, text, #text)
    return (bit.bor(bit.rshift(crc, 15), bit.lshift(crc, 17)) + 0xa282ead8) % 2 ^ 32
  end
  -- fields of a message: { { number, value } ... }
  local function fields(text)
    local list, at = {}, 1
    local function varint()
      local value, scale = 0, 1
      repeat
        local byte = text:byte(at)
        at = at + 1
        value = value + byte % 128 * scale
        scale = scale * 128
      until byte < 128
      return value
    end
    while at <= #text do
      local key = varint()
      local wire = key % 8
      local value
      if wire == 0 then value = varint()
      elseif wire == 2 then
        local size = varint()
        value = text:sub(at, at + size - 1)
        at = at + size
      else
        local size = wire == 1 and 8 or 4
        value = number(wire == 1 and "double" or "float", text:sub(at, at + size - 1))
        at = at + size
      end
      list[#list + 1] = { math.floor(key / 8), value }
    end
    return list
  end
  local events, at = {}, 1
  while at <= #bytes do
    local length = bytes:sub(at, at + 7)
    local size = number("uint64_t", length)
    assert.equal(masked(length), number("uint32_t", bytes:sub(at + 8, at + 11)))
    local payload = bytes:sub(at + 12, at + 11 + size)
    assert.equal(masked(payload), number("uint32_t", bytes:sub(at + 12 + size, at + 15 + size)))
    at = at + 16 + size
    local event = { values = {} }
    for _, field in ipairs(fields(payload)) do
      if field[1] == 1 then
        event.time = field[2]
      elseif field[1] == 2 then
        event.step = field[2]
      elseif field[1] == 3 then event.version = field[2]
      elseif field[1] == 7 then event.session = true
      elseif field[1] == 5 then
        for _, value in ipairs(fields(field[2])) do
          local tag, what
          for _, part in ipairs(fields(value[2])) do
            if part[1] == 1 then
              tag = part[2]
            elseif part[1] == 2 then what = part[2] elseif part[1] == 5 then what = "histogram"
            elseif part[1] == 8 then what = "text" end
          end
          event.values[tag] = what
        end
      end
    end
    events[#events + 1] = event
  end
  return events
end

describe("a run's commands", function()
  local folder, engine
  local function inside(words)
    return shell("cd " .. quote(folder) .. " && " .. engine .. " " .. words)
  end
  setup(function()
    folder = helper.folder()
    local here = shell("pwd").out:match("[^\n]+")
    engine = quote(helper.engine:sub(1, 1) == "/" and helper.engine or here .. "/" .. helper.engine)
    helper.write(folder .. "/train.lua", script)
    local made = inside "train.lua run=a tensorboard=true shadow=deepspeed"
    assert.equal("", made.err)
    assert.equal(0, made.code)
    inside "train.lua run=b steps=5 policy=static"
    shell("mkdir -p " .. folder .. "/runs/broken && echo no > " .. folder ..
      "/runs/broken/history.db")
  end)
  teardown(function() helper.remove(folder) end)

  it("runs lists them, also as JSON, and names the damage of damaged ones", function()
    local result = inside "runs"
    assert.equal(0, result.code)
    assert.matches("^run +steps +loss +scale +skipped +policy +precision +began +took +ended\n",
      result.out)
    assert.matches("\na +60 +%d[%d.]+ +%S+ +%d+ %([%d.]+ %%%) +dynamic +fp16 +%d+%-%d+%-%d+ " ..
      "%d+:%d+ +0:0%d +finished\n", result.out)
    assert.matches("\nb +5 ", result.out)
    assert.matches("\nbroken .*is not a history", result.out)
    local first = inside("runs --json").out:match('{"[^\n]*"name":"a"[^\n]*}')
    assert.equal(60, require("cjson").decode(first).rows)
    inside "train.lua run=lost steps=2 factor=1e38*10"
    assert.matches('"loss":"nan","name":"lost"', inside("runs --json").out, 1, true)
    assert.equal("no runs in runs/; a script makes one with run=NAME\n",
      shell("cd / && " .. engine .. " runs").out)
    assert.equal("engine runs: there is no folder 'nowhere' or 'runs/nowhere'; hint: `engine runs` "
      .. "lists the runs under runs/\n", inside("runs nowhere").err)
  end)

  it("runs and report show in how many steps the policy failed", function()
    helper.write(folder .. "/bad.lua", "return { init = function() return { scale = 1 } end,\n" ..
      "decide = function(_, record) if record.step == 9 then error('other') end\n" ..
      "if record.step ~= 3 then error('oops') end return 1 end }")
    local told = inside("train.lua run=bad steps=30 log=line policy=bad.lua").out
    local shown = {}
    for line in told:gmatch("step (%d+: the policy failed[^\n]*)") do shown[#shown + 1] = line end
    local failed = ": the policy failed: bad.lua:"
    local counted = " (repeats are counted, not shown)"
    assert.same({ "0" .. failed .. "3: oops; it has no good verdict yet, so the loss scale stays" ..
      counted, "9" .. failed .. "2: other; its last good verdict is used" .. counted }, shown)
    assert.matches("\nbad +30 [^\n]* finished, the policy failed in 29 of 30 steps\n",
      inside("runs").out)
    inside "report bad"
    local html = helper.read(folder .. "/runs/bad/report.html")
    assert.matches('<span class="badge bad">finished, the policy failed</span>', html, 1, true)
    assert.matches("The policy failed in 29 of 30 steps", html, 1, true)
    shell("rm -r " .. folder .. "/runs/bad")
    told = inside("train.lua run=bad steps=30 log=line shadow=bad.lua").out
    local line = "shadow bad.lua failed: bad.lua:3: oops (later failures are counted, not shown)"
    assert.equal(1, select(2, told:gsub("later failures", "")))
    assert.matches("step 0: " .. line .. "\n", told, 1, true)
    assert.matches("it failed in 29 steps, most recently: bad.lua:3: oops", told, 1, true)
    assert.matches("\nbad +30 [^\n]* finished, 1 shadow failed\n", inside("runs").out)
    local events = require("engine").history.open(folder .. "/runs/bad"):events "shadow_failed"
    assert.same({ 1, 0, line }, { #events, events[1].step, events[1].text })
    shell("rm -r " .. folder .. "/runs/bad")
  end)

  it("runs names a policy's failure once", function()
    helper.write(folder .. "/bad.lua", "return { init = function() return { scale = 1 } end,\n" ..
      "decide = function() error('oops') end }")
    inside "train.lua run=bad policy=bad.lua"
    assert.matches("0:0%d +stopped, the policy failed in 20 of 20 steps\n", inside("runs").out)
    shell("rm -r " .. folder .. "/runs/bad")
  end)

  it("runs distinguishes a killed run from a running one", function()
    local result = shell("cd " .. quote(folder) .. "\n" .. engine ..
      " train.lua run=c steps=100000000 & p=$!; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; " ..
      engine .. " runs | grep '^c .*running' && break; done; kill -9 $p; wait $p 2>/dev/null; " ..
        engine .. " runs | grep '^c '")
    assert.matches("^c +.*running, 0 %% of 100,000,000 steps\nc +.*died\n", result.out)
  end)

  it("plot draws in the terminal and as SVG, and names unknown curves", function()
    local result = inside "plot a --width 70"
    assert.equal(0, result.code)
    assert.matches("^loss   [%d.]+ to ", result.out)
    assert.matches("\n\nloss scale", result.out, 1, true)
    assert.matches("× overflow", result.out, 1, true)
    for _, terminal in ipairs { "dumb", "linux" } do
      local plain = shell(("cd %s && TERM=%s %s plot a --width 70"):format(quote(folder), terminal,
        engine)).out
      assert.matches("\nx overflow", (plain:gsub("\n +", "\n")), 1, true)
      assert.is_nil(plain:find("[\128-\255]"))
    end
    assert.matches("^largest gradient",
      inside("plot runs/a --columns amax,underflow --from 10 --to 20 --width 70").out)
    assert.matches("by exponent", inside("plot a --heatmap exponent --width 100").out, 1, true)
    assert.equal("p.svg\n", inside("plot a --svg p.svg --columns loss,scale,norm").out)
    local svg = helper.read(folder .. "/p.svg")
    assert.matches("^<svg xmlns", svg)
    assert.equal(3, select(2, svg:gsub('class="title"', "")))
    assert.is_nil(svg:find("nan", 1, true))
    assert.matches("the history has no column 'lose'; did you mean 'loss'?",
      inside("plot a --columns lose").err, 1, true)
    assert.matches("^engine plot: there is no run 'nothing'.*; hint: `engine runs`",
      inside("plot nothing").err)
    assert.equal("engine plot: there is no run 'loss'; hint: engine plot RUN --columns loss\n",
      inside("plot a loss").err)
    assert.matches("no option '--colums'; did you mean '--columns'?",
      inside("plot a --colums loss").err, 1, true)
    assert.equal("engine plot: cannot write /nowhere/x.svg: No such file or directory\n",
      inside("plot a --svg /nowhere/x.svg").err)
    assert.matches("^engine plot: history runs/broken/history.db is not a history",
      inside("plot broken").err)
  end)

  it("plot --png draws through gnuplot, or reports that gnuplot is missing", function()
    local result = inside "plot a --png p.png"
    if pcall(require("engine.report.gnuplot").need) then
      assert.equal("p.png\n", result.out)
      assert.equal("\137PNG", helper.read(folder .. "/p.png"):sub(1, 4))
    end
    result = shell("cd " .. quote(folder) .. " && mkdir -p empty && PATH=$PWD/empty " .. engine ..
      " plot a --png q.png")
    assert.equal(1, result.code)
    assert.matches("^engine plot: a PNG needs gnuplot, which is not installed; hint: " ..
      "[^\n]+\n$", result.err)
  end)

  it("highlighted source has its long strings and comments marked", function()
    local highlighted = require("engine.report.report_html").highlighted
    assert.equal('x = <span class="s">[[a -- b\nif \\]]</span> ' ..
      '<span class="c">--[=[ \\]=]</span> <span class="k">end</span> ' ..
      '<span class="s">[==[ ]] ]==]</span>',
      highlighted("x = [[a -- b\nif \\]] --[=[ \\]=] end [==[ ]] ]==]"))
  end)

  it("report is one self-contained page", function()
    assert.equal("./report.html\n", shell("cd " .. quote(folder .. "/runs/a") .. " && " .. engine ..
      " report history.db").out)
    assert.equal("runs/a/report.html\n", inside("report a").out)
    local html = helper.read(folder .. "/runs/a/report.html")
    for _, piece in ipairs { "<title>a</title>", "<h2>Loss</h2>", "<h2>Loss scale</h2>",
      "<h2>Layers over the run</h2>", "<h2>Layers by exponent</h2>",
      "<h2>All gradients by exponent</h2>", "<h2>Shadows</h2>", "<h2>Where overflows are</h2>",
      "<h2>Settings</h2>", "prefers-color-scheme",
      '<span class="k">return</span>', "The run finished after 60 steps" } do
      assert.matches(piece, html, 1, true)
    end
    assert.is_nil(html:find("https?://[^w]"))
    assert.is_nil(html:find('src=', 1, true))
    local data = require("cjson").decode(
      html:match('<script type="application/json" id="data">(.-)</script>'))
    assert.equal(60, #data.x)
    assert.equal(60, #data.columns.loss.mean)
    assert.equal("deepspeed", data.shadows[1].name)
    assert.equal(1, select(2, html:gsub("</html>", "")))
    assert.matches("^<!doctype html>", inside("report b -o -").out)
  end)

  it("report draws a shadow of many verdicts at some of the steps", function()
    helper.write(folder .. "/small.lua", "return { name = 'small', options = {}, " ..
      "init = function() return { scale = 1, n = 0 } end, decide = function(s) " ..
      "s.n = s.n + 1 return s.n % 2 + 1 end }")
    assert.equal("", inside("train.lua run=flips steps=700 policy=static shadow=small.lua").err)
    local points = require("cjson").decode(inside("report flips -o -").out:match(
      '<script type="application/json" id="data">(.-)</script>')).shadows[1].points
    assert.equal(601, #points)
    local h = require("engine").history.open(folder .. "/runs/flips")
    for i = 1, 601, 100 do assert.equal(h:shadows_at(points[i][1])[1].scale, points[i][2]) end
    h:close()
  end)

  it("report and export show the meters of FP8 layers in the metered steps", function()
    helper.write(folder .. "/fp8.lua",
      (script:gsub('precision = "fp16"',
      'precision = { base = "fp8_current", fp8 = { sample = 4 } }')))
    assert.equal("", inside("fp8.lua run=eight steps=10 policy=static").err)
    local html = inside("report eight -o -").out
    assert.matches("<h2>FP8 layers</h2>", html, 1, true)
    assert.matches("From 3 measurements", html, 1, true)
    local data = require("cjson").decode(
      html:match('<script type="application/json" id="data">(.-)</script>')).fp8
    assert.same({ "1 x", "3 x", "1 w", "3 w", "1 dy", "3 dy" }, data.names)
    assert.same({ 0, 4, 8 }, { data.cells[1][1][1], data.cells[6][2][1], data.cells[6][3][1] })
    assert.is_true(data.cells[1][1][2] > 25 and data.cells[1][1][2] < 40)
    assert.is_nil(inside("report a -o -").out:find("<h2>FP8 layers</h2>", 1, true))
    local lines, at = {}, {}
    for line in inside("export eight --csv -").out:gmatch("[^\n]+") do lines[#lines + 1] = line end
    for name in (lines[1] .. ","):gmatch("([^,]*),") do at[#at + 1] = name end
    local function cell(step, name)
      local k = 0
      for value in (lines[2 + step] .. ","):gmatch("([^,]*),") do
        k = k + 1
        if at[k] == name then return value end
      end
    end
    assert.near(data.cells[2][2][2], tonumber(cell(4, "fp8.3:x.snr")), 0.01)
    assert.equal("", cell(5, "fp8.3:x.snr"))
    local objects = {}
    for line in inside("export eight --jsonl -").out:gmatch("[^\n]+") do
      objects[#objects + 1] = require("cjson").decode(line)
    end
    assert.equal(cell(8, "fp8.1:dy.scale_max"),
      ("%.17g"):format(objects[9].fp8["1:dy"].scale_max):sub(1, #cell(8, "fp8.1:dy.scale_max")))
    assert.is_nil(objects[2].fp8)
    assert.is_nil(lines[1]:find("signals", 1, true))
  end)

  it("report escapes the text of policies and settings", function()
    helper.write(folder .. "/evil.lua",
      "-- </script><b>\nreturn { name = '<i>&', options = { init_scale = 8 }, decide = " ..
      "function(s) return s.scale end }")
    inside "train.lua run='<x>' steps=3 policy=evil.lua"
    local html = inside("report '<x>' -o -").out
    assert.is_nil(html:find("<b>\n", 1, true))
    assert.is_nil(html:find("<i>&", 1, true))
    assert.matches("&lt;x&gt;", html, 1, true)
    assert.equal(2, select(2, html:gsub("</script>", "")))
  end)

  it("exports CSV and JSON Lines", function()
    assert.equal("a.csv: 60 steps\na.jsonl: 60 steps\n",
      inside("export a --csv a.csv --jsonl a.jsonl").out)
    local csv = helper.read(folder .. "/a.csv")
    assert.equal(61, select(2, csv:gsub("\n", "")))
    assert.matches("^step,attempt,updates,loss,lr,scale,", csv)
    local cjson, n = require "cjson", 0
    for line in helper.read(folder .. "/a.jsonl"):gmatch("[^\n]+") do
      local row = cjson.decode(line)
      assert.equal(n, row.step)
      n = n + 1
    end
    assert.equal(60, n)
    assert.matches("^engine export: expected %-%-csv FILE", inside("export a").err)
    assert.matches("^engine export: cannot write /dev/full: ",
      inside("export a --csv /dev/full").err)
  end)

  it("writes event files live and on export, framed with masked CRCs", function()
    local live = read_events(helper.read(
      inside("-e 'for p in io.popen(\"ls runs/a/tensorboard/*\"):lines() do io.write(\"" ..
      folder .. "/\", p) end'").out))
    assert.equal("brain.Event:2", live[1].version)
    local steps, histograms = 0, 0
    for _, event in ipairs(live) do
      if event.values["train/loss"] then
        assert.equal(steps, event.step)
        steps = steps + 1
        assert.is_number(event.values["scaling/log2_scale"])
      end
      for _, what in pairs(event.values) do
        histograms = histograms + (what == "histogram" and 1 or 0)
      end
    end
    assert.equal(60, steps)
    assert.is_true(histograms >= 6)
    local path = folder .. "/" .. inside("export a --tensorboard tb --every 10").out:match(
      "^(tb/%S+): 1?%d+ steps\n")
    local kinds = {}
    for _, event in ipairs(read_events(helper.read(path))) do
      for tag, what in pairs(event.values) do
        kinds[type(what) == "number" and "number" or what] = tag
      end
    end
    assert.is_string(kinds.number)
    assert.matches("^stored_gradients/", kinds.histogram)
    assert.is_string(kinds.text)
  end)

  it("begins a new session in the event file of a resumed run, and requires a name or a folder",
    function()
    inside "train.lua run=a steps=60 tensorboard=true"
    assert.matches("tensorboard: a run without a name has no directory for event files; hint: " ..
      "run=NAME", inside("train.lua tensorboard=true").err, 1, true)
    local tensorboard = require "engine.run.tensorboard"
    local live = tensorboard.live(folder .. "/live", { { name = "w" } }, 7)
    local record, verdict = M_ffi.new("eng_record"), M_ffi.new("eng_verdict")
    record.step, record.scale, record.loss = 7, 8, 0 / 0
    live:step(record, verdict, 0, {})
    live:close()
    local events = read_events(helper.read(live.writer.path))
    assert.same({ true, 7 }, { events[2].session, events[2].step })
    assert.equal(3, events[3].values["scaling/log2_scale"])
    assert.is_true(events[3].values["train/loss"] ~= events[3].values["train/loss"])
  end)

  it("help has an example of each command", function()
    for _, name in ipairs { "runs", "plot", "report", "export" } do
      local text = run({ "help", name }).out
      assert.matches("^usage: engine " .. name, text)
      assert.matches("\n  engine " .. name, text)
    end
  end)
end)

describe("the REPL after a run", function()
  it("offers its history, and prints text of several lines unchanged", function()
    local folder = helper.folder()
    helper.write(folder .. "/train.lua", script)
    local result = shell(("cd %s && printf 'history:why(1)\\nhistory:plot(\"loss\", { width = " ..
      "60 })\\n' | %s -i train.lua run=r steps=5"):format(quote(folder),
      quote(helper.engine:sub(1, 1) == "/" and helper.engine or shell("pwd").out:match("[^\n]+") ..
        "/" .. helper.engine)))
    assert.matches("> step 1 (update", result.out, 1, true)
    assert.matches("> loss   ", result.out, 1, true)
    helper.remove(folder)
  end)
end)
