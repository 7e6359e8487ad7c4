-- What a run prints: terminal plots and the progress line.
local plot = require "engine.report.plot"
local progress = require "engine.run.progress"
local show = require "engine.base.show"

local nan, inf = 0 / 0, math.huge

local function lines(text)
  local list = {}
  for line in (text .. "\n"):gmatch("(.-)\n") do list[#list + 1] = line end
  return list
end

-- Characters of a UTF-8 text.
local function length(text)
  return select(2, text:gsub("[^\128-\191]", ""))
end

describe("plot", function()
  it("draws a rising line from the lower left to the upper right", function()
    local drawn = lines(plot.draw { y = { 0, 1, 2, 3 }, width = 30, height = 4, ascii = true,
      title = "up" })
    assert.equal("up", drawn[1])
    assert.matches("%*$", drawn[2])
    assert.matches("^ *%d* ?[+|]%*", drawn[5])
    assert.not_matches("^ *%d* ?[+|]%*", drawn[2])
    assert.matches("^ *%+%-+$", drawn[6])
    assert.matches("^ +1 .* 4$", drawn[7])
  end)

  it("stays within its width and height", function()
    local y = {}
    for i = 1, 3000 do y[i] = math.sin(i / 100) * 1e5 end
    local drawn = lines(plot.draw { y = y, width = 60, height = 9, title = "wave",
      marks = { 1, 3000 } })
    assert.equal(1 + 9 + 1 + 3, #drawn)
    for _, line in ipairs(drawn) do assert.is_true(length(line) <= 60, line) end
  end)

  it("leaves out values that are not finite and counts them", function()
    local text = plot.draw { y = { 1, nan, 2, inf, -inf }, width = 60, title = "loss" }
    assert.matches("loss  [3 of 5 points not drawn: no finite value]", text, 1, true)
    assert.matches("2 of 3 points not drawn: no finite positive value]",
      plot.draw { y = { 1, 0, -1 }, log = 10, width = 60 }, 1, true)
  end)

  it("breaks titles and legends at the width of a narrow terminal, and names the axis", function()
    local text = plot.draw { title = "largest gradient as stored (times the loss scale)", log = 2,
      y = { 1, 2, 4 }, x = { 10, 20, 30 }, marks = { 10 }, mark_name = "overflow", x_name = "step",
      marked = { { name = "policy swapped", symbol = "s", at = { 20 }, count = 1 },
        { name = "setting changed", symbol = "=", at = { 30 }, count = 7 } }, width = 40 }
    for _, line in ipairs(lines(text)) do assert.is_true(length(line) <= 40, line) end
    assert.matches("\n +step 10 +20 +30\n +× overflow %(1%)   s policy swapped\n? *%(1%)", text)
    assert.matches("= setting changed (7)", text, 1, true)
    assert.matches("\n +× *\n +s *\n +=\n", text)
  end)

  it("puts a single step in the middle, and no label between two neighbouring steps", function()
    local drawn = lines(plot.draw { y = { 5 }, x = { 7 }, x_name = "step", width = 40, height = 3,
      ascii = true })
    assert.matches("^ +step 7$", drawn[#drawn])
    assert.matches("^ +step 7 +8$", select(2, plot.draw { y = { 5, 6 }, x = { 7, 8 },
      x_name = "step", width = 40 }:match "(.*)\n(.-)$"))
  end)

  it("is ASCII where the locale or the terminal has no UTF-8", function()
    local helper = require "spec.helper"
    local draw = " -e 'print(require(\"engine.report.plot\").draw { y = { 1, 2 }, width = 30 })'"
    local function plain(environment)
      local shown = helper.shell("env -u LANG -u LC_ALL -u LC_CTYPE " .. environment .. " " ..
        helper.quote(helper.engine) .. draw)
      assert.equal(0, shown.code)
      return not shown.out:find("[\128-\255]")
    end
    assert.is_true(plain "TERM=xterm")
    assert.is_true(plain "TERM=xterm LANG=C.UTF-8 LC_ALL=C")
    assert.is_true(plain "TERM=linux LANG=C.UTF-8")
    assert.is_false(plain "TERM=xterm LANG=en_US.utf8")
    assert.is_false(plain "TERM=xterm LANG=C LC_CTYPE=C.UTF-8")
  end)

  it("handles empty data, one point, equal points, and huge and tiny values", function()
    assert.matches("nothing to draw", plot.draw { y = {} }, 1, true)
    assert.matches("nothing to draw", plot.draw { y = { nan } }, 1, true)
    for _, y in ipairs { { 5 }, { 0, 0 }, { -3, -3 }, { 1e300, -1e300 }, { 1e-300, 2e-300 },
      { 5e-324 }, { 1.7e308, -1.7e308 } } do
      assert.equal(15, #lines(plot.draw { y = y, width = 40 }))
    end
    assert.equal(15, #lines(plot.draw { y = { 2 ^ 15, 2 ^ 15 }, log = 2, width = 40 }))
  end)

  it("labels a scale with powers of two", function()
    local text = plot.draw { y = { 2 ^ 10, 2 ^ 16 }, log = 2, width = 40, height = 8 }
    assert.matches("2^10", text, 1, true)
    assert.matches("2^16", text, 1, true)
  end)

  it("labels both ends of a range in which there is only one round number", function()
    local function labels(y, log)
      local text = plot.draw { y = y, log = log, width = 40, height = 8, ascii = true }
      local list = {}
      for label in text:gmatch("(%S+) %+[^-]") do list[#list + 1] = label end
      return table.concat(list, " ")
    end
    assert.equal("66000 2^16 65000", labels({ 65000, 66000 }, 2))
    assert.equal("90000 65000", labels({ 65000, 90000 }, 10))
    for power = -3, 9 do                                 -- pictures in files
      for width = 1, 40 do
        local y, yy = 7 ^ power, 7 ^ power * (1 + width / 7)
        for _, log in ipairs { false, 2, 10 } do
          local v = { min = { y, yy }, mean = { y, yy }, max = { y, yy } }
          local body = require("engine.report.chart").body { log = log or nil, height = 100,
            series = { { column = "v" } }, c = { x = { 1, 2 }, v = v, width = 1, first = 1,
            last = 2 } }
          local count = select(2, body.texts:gsub('text%-anchor="end">[^<]*%d', ""))
          assert.is_true(count >= 2, ("%g to %g, log %s"):format(y, yy, tostring(log)))
        end
      end
    end
  end)

  it("puts marks under their steps", function()
    local drawn = lines(plot.draw { y = { 1, 2, 3 }, x = { 0, 50, 100 }, marks = { 0, 100, 500 },
      mark_name = "overflow", width = 40, height = 3, ascii = true })
    assert.matches("^ *x +x$", drawn[6])
    assert.matches("x overflow (3)", drawn[8], 1, true)
  end)

  it("shows loss and scale of a run", function()
    local rows = {}
    for i = 1, 50 do
      rows[i] = { step = i, loss = 10 / i, scale = i < 25 and 65536 or 32768, overflow = i == 25 }
    end
    local text = plot.run(rows, { width = 60 })
    assert.matches("^loss\n", text)
    assert.matches("\n\nloss scale (log)\n", text, 1, true)
    assert.matches("overflow (1)", text, 1, true)
    assert.matches("2^16", text, 1, true)
    assert.matches("^loss, since step 7\n",
      plot.run({ { step = 7, loss = 1, scale = 2 }, { step = 8, loss = 1, scale = 2 } },
      { width = 60 }))
    for _, row in ipairs(rows) do row.scale = 1 end
    assert.not_matches("loss scale", plot.run(rows, { width = 60 }), 1, true)
    for _, row in ipairs(rows) do row.scale = 65536 end
    assert.matches("overflow (1)", plot.run(rows, { width = 60 }), 1, true)
    rows[25].overflow = false
    assert.matches("\n\nthe loss scale stayed at 2%^16$", plot.run(rows, { width = 60 }))
  end)
end)

describe("progress", function()
  local function sink()
    local parts = {}
    return { write = function(_, ...) for _,
      part in ipairs { ... } do parts[#parts + 1] = part end end, flush = function() end,
             text = function() return table.concat(parts) end }
  end

  local function row(step, fields)
    local r = { step = step, updates = step - 1, loss = 2.5, lr = 1e-3, scale = 65536, skipped = 1,
      overflow = false, amax = 0.25, norm = 1.5, tokens_per_s = 12345.5 }
    for k, v in pairs(fields or {}) do r[k] = v end
    return r
  end

  it("writes one JSON object a step with exactly the documented fields", function()
    local out = sink()
    local p = progress.new { json = true, stream = out, clock = function() return 0 end }
    p:update(row(1))
    p:update(row(2, { overflow = true, loss = nan, norm = inf, amax = -inf, lr = 1 / 3 }))
    p:finish()
    local cjson = require "cjson"
    local written = lines(out.text())
    assert.equal('{"step":1,"updates":0,"loss":2.5,"lr":0.001,"scale":65536,"skipped":1,' ..
      '"overflow":false,"amax":0.25,"norm":1.5,"tokens_per_s":12345.5}', written[1])
    assert.same({ step = 2, updates = 1, loss = "nan", lr = 1 / 3, scale = 65536, skipped = 1,
      overflow = true, amax = "-inf", norm = "inf", tokens_per_s = 12345.5 },
                cjson.decode(written[2]))
    assert.equal("", written[3])
    assert.equal(3, #written)
  end)

  it("writes doubles that read back exactly", function()
    local cjson = require "cjson"
    for _, x in ipairs { 1 / 3, 2 ^ -149, 1.1, 65504, 2 ^ 53, 1e22, -0.1, 3.4028234663852886e38,
      5e-324, 0 } do
      assert.equal(x, cjson.decode(progress.json { step = 1, loss = x }).loss)
    end
  end)

  it("writes plain lines at intervals, and always the last", function()
    local out, now = sink(), 0
    local p = progress.new { total = 100, stream = out,
      clock = function() now = now + 0.25 return now end }
    for i = 1, 100 do p:update(row(i)) end
    p:finish()
    local written = lines(out.text())
    assert.equal("step 0 (1/100)  loss 2.5000  scale 2^16  skipped 1  12.3k tokens/s", written[1])
    assert.matches("^step 20 %(21/100%) .*ETA 0:20$", written[2])
    assert.matches("  50 examples/s",
      p:line({ step = 1, tokens_per_s = 50, unit = "examples" }, 0), 1, true)
    assert.matches("^step 99 %(100/100%) ", written[#written - 1])
    assert.is_true(#written < 10)
    assert.not_matches("[\r\27]", out.text())
  end)

  it("shows the last step even if a run ended early", function()
    local out, now = sink(), 0
    local p = progress.new { total = 100, stream = out,
      clock = function() now = now + 0.01 return now end }
    for i = 1, 7 do p:update(row(i)) end
    p:finish()
    assert.matches("step 6 (7/100)", lines(out.text())[2], 1, true)
  end)

  it("rewrites one line on a terminal, at most ten times a second, within its width", function()
    local out, now = sink(), 0
    local p = progress.new { total = 1000, stream = out, columns = 40,
      clock = function() now = now + 0.001 return now end }
    for i = 1, 1000 do p:update(row(i)) end
    p:note("checkpoint written")
    p:finish()
    local text = out.text()
    local rewrites = select(2, text:gsub("\r", "\r"))
    assert.is_true(rewrites >= 9 and rewrites <= 14, rewrites)
    assert.matches("\nstep 999 (1000/1000)", text:sub(-60), 1, true)
    assert.matches("checkpoint written\n", text, 1, true)
    for piece in text:gmatch("[^\r\n]+") do assert.is_true(#piece:gsub("\27%[K", "") < 40) end
    assert.equal("\n", text:sub(-1))
  end)

  it("refuses sizes that cannot be drawn, and a call without numbers", function()
    for _, options in ipairs { 5, { y = { 1 }, height = 0 }, { y = { 1 }, width = 1e9 }, {} } do
      assert.error_matches(function() plot.draw(options) end, "plot.draw: expected ")
    end
  end)

  it("marks overflow, and abbreviates numbers", function()
    local out = sink()
    local p = progress.new { stream = out, clock = function() return 0 end }
    p:update(row(3, { overflow = true, scale = 2 ^ 24, loss = nan }))
    assert.equal("step 2  loss nan  scale 2^24  skipped 1  12.3k tokens/s  overflow\n",
      (out.text():gsub("%-nan", "nan")))
    assert.equal("1.23M", show.count(1.234e6))
    assert.equal("999", show.count(999))
    assert.equal("1:01:05", show.duration(3665))
    assert.equal("0:09", show.duration(9.4))
    for text, scale in pairs { ["2^-3"] = 0.125, ["1"] = 1, ["2^3"] = 8, ["2^16"] = 2 ^ 16,
      ["2^17"] = 2 ^ 17, ["3000"] = 3000, ["inf"] = math.huge } do
      assert.equal(text, show.scale(scale))
    end
  end)

  it("prints nothing on request", function()
    local out = sink()
    local p = progress.new { quiet = true, stream = out }
    p:update(row(1))
    p:note("x")
    p:finish()
    assert.equal("", out.text())
  end)
end)
