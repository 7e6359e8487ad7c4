-- Text of unknown origin: show.shown and the rule for names against a table of cases, then hostile
-- strings in every place from which a string reaches a terminal or a page.
local ffi = require "ffi"
local engine = require "engine"
local show = require "engine.base.show"
local helper = require "spec.helper"

local quote = helper.quote
local BAD = "\27]0;owned\7\27[31m\194\155\226\128\174\255"    -- OSC, BEL, CSI, C1, bidi, no UTF-8

-- Whether a terminal or a page can take the text: valid UTF-8 without control characters except
-- line ends and tabs.
local function harmless(text)
  local rest = text:gsub("[\n\t\32-\126]", ""):gsub("[\194-\244][\128-\191]+", function(c)
    local bidi = c:find("^\226\128[\142\143\168-\174]") or c:find("^\226\129[\166-\169]")
      or c == "\216\156"
    return not bidi and not c:find("^\194[\128-\159]") and "" or nil
  end)
  return rest == ""
end

local function safe(text)
  assert.is_true(harmless(text), ("%q"):format(text))
end

describe("text", function()
  it("that is long is cut to 200 bytes of whole characters in messages", function()
    local value_text = require("engine.base.ffi").value_text
    for before, after in pairs { [195] = "🙂b", [196] = "🙂", [197] = "", [200] = "" } do
      local text = ("a"):rep(before)
      assert.equal("'" .. text .. after .. "...'", value_text(text .. "🙂bcdefg"))
    end
    assert.equal(202, #value_text(("a"):rep(200)))
    assert.equal("null", value_text(require("engine.base.json").null))
  end)
  it("is shown unchanged when that is safe", function()
    for _, text in ipairs { "", "plain", "Zürich 漢字 🙂", "\239\191\189", "a\\x1B" } do
      assert.equal(text, show.shown(text))
    end
    assert.equal("a\n\tb", show.shown("a\n\tb", true))
    assert.equal("a  b", show.shown("a\n\tb"))
  end)

  it("shows as \\xNN what a terminal would execute or cannot read", function()
    for text, expected in pairs {
      ["\27[31m"] = "\\x1B[31m", ["a\0b"] = "a\\x00b", ["\r"] = "\\x0D", ["\127"] = "\\x7F",
      ["\194\155"] = "\\xC2\\x9B", ["\226\128\174"] = "\\xE2\\x80\\xAE",      -- C1, U+202E
      ["\226\129\166"] = "\\xE2\\x81\\xA6", ["\216\156"] = "\\xD8\\x9C",      -- U+2066, U+061C
      ["\226\128\168"] = "\\xE2\\x80\\xA8",                                   -- U+2028
      ["\255"] = "\\xFF", ["\128"] = "\\x80", ["\195"] = "\\xC3", ["\195a"] = "\\xC3a",
      ["\192\175"] = "\\xC0\\xAF", ["\224\128\175"] = "\\xE0\\x80\\xAF",      -- overlong
      ["\237\160\128"] = "\\xED\\xA0\\x80",                                   -- a surrogate
      ["\244\144\128\128"] = "\\xF4\\x90\\x80\\x80",                          -- past U+10FFFF
    } do
      assert.equal(expected, show.shown(text))
    end
    math.randomseed(1)
    for _ = 1, 2000 do
      local bytes = {}
      for i = 1, math.random(0, 12) do bytes[i] = string.char(math.random(0, 255)) end
      safe(show.shown(table.concat(bytes), true))
    end
  end)

  it("is cut between characters, also by the core", function()
    local C = require("engine.base.ffi").C
    local text = "aé漢🙂\27"
    local whole = show.shown(text)
    for room = 1, #whole + 1 do
      local out = ffi.new("char[32]", ("#"):rep(31))
      assert.equal(#whole, tonumber(C.eng_text_shown(out, room, text, #text, false)))
      local kept = ffi.string(out)
      assert.is_true(#kept < room)
      assert.equal(kept, whole:sub(1, #kept))
      safe(kept)
      assert.not_equal("\\", kept:sub(-1))
    end
    assert.equal("ééé...", show.cut(("é"):rep(10), 6))
    assert.equal(("é"):rep(6), show.cut(("é"):rep(6), 6))
  end)

  it("of a count has three digits and a unit", function()
    for count, text in pairs { [0] = "0", [9999] = "9999", [12345] = "12.3k", [999.4e3] = "999k",
      [999.5e3] = "1M", [999.4e6] = "999M", [999.7e6] = "1G", [1.5e9] = "1.5G", [999.6e9] = "1000G",
      [15e12] = "15000G", [math.huge] = "inf" } do assert.equal(text, show.count(count)) end
  end)

  it("in JSON is escaped and reads back as it was", function()
    local json = require "engine.base.json"
    for _, text in ipairs { BAD, "\194\128\194\159\216\156é",
      "\226\128\142\226\128\168\226\128\174", "\226\129\166\226\129\169漢" } do
      safe(json.encode(text))
      assert.equal(text, json.decode(json.encode(text)))
    end
    assert.equal([["\u009b\u202e\u2066\u061c"]],
      json.encode "\194\155\226\128\174\226\129\166\216\156")
  end)

  it("of table cells is cut and aligned by characters", function()
    local lines = show.table({ { "é", "1" }, { "ab", BAD }, { ("x"):rep(1e5), "2" } },
      { true, true })
    safe(lines)
    assert.matches("\nab  +\\x1B", lines)
    assert.is_true(#lines < 500)
  end)
end)

describe("hostile", function()
  local folder
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  local function policy(fields)
    return helper.write(folder .. "/p.lua", "local bad = " .. ("%q"):format(BAD) .. "\nreturn { " ..
      fields .. " }")
  end
  local DECIDE = "init = function() return { scale = 1 } end, decide = function() return 1 end"

  it("names of policies, options, signals, loss scalers and runs are refused", function()
    for _, name in ipairs { BAD, "\27", "a\nb", "\194\155", "\226\128\174", "\255",
      ("n"):rep(101) } do
      for _, fields in ipairs { "name = %q, ", "options = { [%q] = 1 }, ", "[%q] = 1, " } do
        local good, message = pcall(engine.policy.load, policy(fields:format(name) .. DECIDE))
        assert.is_false(good)
        safe(message)
      end
      for _, call in ipairs { function() engine.signal(name, 1) end,
        function() engine.register_loss_scaler(name, {}) end,
        function()
          local net = engine.nn.linear(2, 1)
          engine.trainer { model = net, data = { next = function() end }, steps = 1,
            optimizer = engine.optim.sgd(net), run = folder .. "/" .. name,
            loss = function() end }
        end } do
        local good, message = pcall(call)
        assert.is_false(good)
        assert.matches("name ", message, 1, true)
        assert.not_matches("%c", message)
      end
    end
    assert.has_no.errors(function()
      engine.policy.load(policy("name = 'Zürich', options = { ['größe'] = 1 }, " .. DECIDE))
    end)
  end)

  it("control characters from a policy reach no terminal", function()
    for _, fields in ipairs {
      "[bad] = 1, " .. DECIDE, "needs = { bad }, " .. DECIDE, "kind = bad, " .. DECIDE,
      "init = function() error(bad) end, decide = function() return 1 end",
      "init = function() return { scale = 1 } end, decide = function() error(bad) end",
      "init = function() return { scale = 1 } end, decide = function() return { [bad] = 1 } end",
      "init = function() return { scale = 1 } end, " ..
        "decide = function() return { scale = 1, action = bad } end",
      "init = function() return { scale = 1 } end, " ..
        "decide = function() return { scale = 1, action = 'stop', reason = bad } end",
    } do
      local result = helper.run { "replay", "3. x", "--policy", policy(fields) }
      safe(result.out .. result.err)
      assert.matches("owned", result.out .. result.err, 1, true)
      result = helper.run { "replay", "3. x", "--policy", policy(fields), "a=" .. BAD }
      safe(result.err)
    end
  end)

  it("names of files reach no terminal through Tab completion", function()
    helper.write(folder .. "/a\27[31m", "")
    helper.write(folder .. "/b", "")
    local _, list = require("engine.cli.repl").complete("f('" .. folder .. "/")
    assert.matches("a\\x1B[31m", list, 1, true)
  end)

  it("errors of scripts reach no terminal", function()
    local code = ("error(%q)"):format(BAD)
    for _, words in ipairs { { "-e", code }, { "-i", "-e", code },
      { helper.write(folder .. "/" .. "\27[31m.lua", code) } } do
      local result = helper.run(words, code .. "\nnil, " .. ("%q"):format(BAD) .. "\n")
      safe(result.err)
      assert.matches("owned", result.err, 1, true)
    end
  end)

  -- A run whose database has hostile strings in every column that can hold one.
  local function hostile_run(text)
    local net = engine.nn.linear(2, 1)
    engine.trainer { model = net, steps = 4, log = "quiet", run = folder .. "/a",
      data = { next = function() return { x = engine.rand(4, 2), tokens = 4 } end },
      optimizer = engine.optim.sgd(net), shadow = { "dynamic" },
      loss = function(m, b) engine.signal("s", 1) return m(b.x):sum() end }:run()
    local sqlite, db = ffi.load "sqlite3.so.0", ffi.new "void *[1]"
    pcall(ffi.cdef, "int sqlite3_open(const char *, void **); int sqlite3_exec(void *, const " ..
      "char *, void *, void *, char **); int sqlite3_close(void *);")
    assert.equal(0, sqlite.sqlite3_open(folder .. "/a/history.db", db))
    local value = ("CAST(X'%s' AS TEXT)"):format((text:gsub(".", function(c)
      return ("%02x"):format(c:byte())
    end)))
    for _, set in ipairs { "meta SET value = ? WHERE key IN ('policy', 'precision', 'device')",
      "policies SET name = ?, source = ?", "steps SET reason = ?", "shadows SET name = ?",
      "signals SET name = ?", "parameters SET name = ?", "events SET text = ?",
      "config SET value = ?" } do
      local sql = "UPDATE OR REPLACE " .. set:gsub("%?", function() return value end)
      assert.equal(0, sqlite.sqlite3_exec(db[0], sql, nil, nil, nil))
    end
    sqlite.sqlite3_close(db[0])
    local name = folder .. "/\27[31m\255"
    os.execute(("mv %s/a %s"):format(folder, quote(name)))
    return name
  end

  it("histories reach no terminal and no page", function()
    local run = hostile_run(BAD)
    for _, words in ipairs { { "runs", folder }, { "plot", run }, { "plot", run, "--heatmap",
      "time" }, { "attach", run, "-e", "print(history, history:why(1)) print(history:last()) " ..
      "print(history:events()) print(history:signals()) print(history:shadows())" },
      { "attach", run, "-e", "history:query('SELECT * FROM events')" },
      { "attach", run, "-e", "history:events()[1].text .. '\\n'" },
      { "replay", run, "--policy", "dynamic" }, { "export", run },
      { "runs", folder, "--json" }, { "plot", run .. "\27" } } do
      local result = helper.run(words)
      safe(result.out .. result.err)
    end
    assert.equal(0, helper.run({ "report", run, "-o", folder .. "/page.html" }).code)
    safe(helper.read(folder .. "/page.html"))
    local csv, jsonl, board = folder .. "/a.csv", folder .. "/a.jsonl", folder .. "/board"
    assert.equal(0, helper.run({ "export", run, "--csv", csv, "--jsonl", jsonl, "--tensorboard",
      board }).code)
    safe(helper.read(csv))
    for line in helper.read(jsonl):gmatch("[^\n]+") do
      safe(line)
      assert.matches("owned", require("cjson").decode(line).reason, 1, true)
    end
    local events = helper.shell("cat " .. board .. "/*").out
    assert.matches("\\x1B]0;owned", events, 1, true)
    assert.is_nil(events:find("\27]0;owned", 1, true))
    assert.equal(0, helper.run({ "plot", run, "--svg", folder .. "/a.svg" }).code)
    safe(helper.read(folder .. "/a.svg"))
  end)

  it("long names take little time", function()
    hostile_run((" "):rep(1e5) .. "x" .. (" "):rep(1e5))
    local before = os.time()
    local result = helper.run { "runs", folder }
    assert.equal(0, result.code, result.err)
    assert.is_true(os.time() - before <= 5)
    assert.is_true(#result.out < 2000)
  end)
end)
