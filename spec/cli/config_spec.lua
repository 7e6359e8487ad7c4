-- engine.config: settings on the command line and in files; base/expression.lua, base/nearest.lua.
local config = require("engine").config
local expression = require "engine.base.expression"
local nearest = require "engine.base.nearest"
local helper = require "spec.helper"

local function defaults()
  return {
    lr = 3e-4, steps = 1000, amp = true, precision = "fp16", layers = { 64, 32 }, files = {},
    resume = config.optional "string",
    clip = config.optional "number", model = { width = 384, heads = 6, block = { dropout = 0.1 } },
    loss = function() end,
  }
end

local function parse(...)
  return config.parse(defaults(), { ... })
end

local function message(...)
  local arguments = { ... }
  local ok, problem = pcall(function() return config.parse(defaults(), arguments) end)
  assert.is_false(ok)
  return tostring(problem)
end

describe("config", function()
  it("gives the defaults without arguments", function()
    local cfg = parse()
    assert.equal(3e-4, cfg.lr)
    assert.equal(384, cfg.model.width)
    assert.equal(0.1, cfg.model.block.dropout)
    assert.is_nil(cfg.resume)
    assert.equal("function", type(cfg.loss))
  end)

  it("never changes the table of defaults", function()
    local mine = defaults()
    config.parse(mine, { "model.width=8", "layers=1" })
    assert.equal(384, mine.model.width)
    assert.same({ 64, 32 }, mine.layers)
  end)

  it("takes a value's type from its default", function()
    local cfg = parse("lr=1e-3", "steps=2^12", "amp=false", "precision=bf16", "layers=1,2,3",
      "model.block.dropout=1/4", "clip=inf")
    assert.equal(1e-3, cfg.lr)
    assert.equal(4096, cfg.steps)
    assert.is_false(cfg.amp)
    assert.equal("bf16", cfg.precision)
    assert.same({ 1, 2, 3 }, cfg.layers)
    assert.equal(0.25, cfg.model.block.dropout)
    assert.equal(6, cfg.model.heads)
    assert.equal(math.huge, cfg.clip)
  end)

  it("takes a string unchanged, including = and spaces", function()
    assert.equal("a=b c", parse("precision=a=b c").precision)
    assert.equal("", parse("precision=").precision)
    assert.same({}, parse("layers=").layers)
    assert.same({ "a.bin", "b.bin" }, parse("files=a.bin,b.bin").files)
  end)

  it("takes the last value given, and accepts --name=value and dashes", function()
    assert.equal(2, parse("steps=1", "steps=2").steps)
    assert.equal(5, parse("--steps=5").steps)
    assert.equal(3, config.parse({ log_every = 1 }, { "--log-every=3" }).log_every)
  end)

  it("suggests the nearest name, or lists all of them", function()
    local text = message("stpes=3")
    assert.matches("^config: no field 'stpes'; did you mean 'steps'%?; `engine %S+ help` lists " ..
      "the fields$", text)
    assert.matches("did you mean 'model.width'?", message("width=3"), 1, true)
    text = message("zzzzzz=3")
    assert.not_matches("did you mean", text, 1, true)
    assert.matches("model.block.dropout", text, 1, true)
  end)

  it("names the expected type for a bad value", function()
    assert.matches("lr: expected a number (or an expression like 3e-4 or 2^15), got 'fast'",
      message("lr=fast"), 1, true)
    assert.matches("got 'nan'", message("lr=nan"), 1, true)
    assert.matches("which is NaN", message("lr=inf-inf"), 1, true)
    assert.matches("amp: expected true or false, got 'maybe'", message("amp=maybe"), 1, true)
    assert.matches("layers: expected a number", message("layers=1,b"), 1, true)
    assert.matches("expected name=value, got 'steps'; write steps=VALUE", message("steps"), 1, true)
    assert.matches("expected name=value, got '--steps'; write steps=", message("--steps"), 1, true)
    assert.matches("no field 'model'", message("model=3"), 1, true)
    assert.matches("no field 'loss'", message("loss=3"), 1, true)
  end)

  it("checks choices", function()
    local docs = { precision = { "recipe", choices = { "fp32", "fp16" } } }
    assert.equal("fp32", config.parse(defaults(), { "precision=fp32" }, docs).precision)
    assert.same({ "b", "a" }, config.parse({ list = { "a" } }, { "list=b,a" },
      { list = { "", choices = { "a", "b" } } }).list)
    for words, text in pairs { ["list="] = "list: expected one or more of a, b, got an empty list",
      ["list=a,c"] = "list: expected one of a, b, got 'c'" } do
      helper.refuses(text, config.parse, { list = { "a" } }, { words },
        { list = { "", choices = { "a", "b" } } })
    end
    local _, cpu = pcall(config.parse, defaults(), { "precision=cpu" }, docs)
    assert.equal("config: precision: expected one of fp32, fp16, got 'cpu'", tostring(cpu))
    local ok, problem = pcall(config.parse, defaults(), { "precision=fp61" }, docs)
    assert.is_false(ok)
    assert.equal("config: precision: expected one of fp32, fp16, got 'fp61'; did you mean 'fp16'?",
      tostring(problem))
  end)

  it("cuts long values", function()
    local long = ("7"):rep(3000)
    for _, argument in ipairs { "lr=" .. long .. "a", "lr=" .. long .. "=", long .. "=1", long,
      "steps=" .. long, "precision=" .. long, "on=" .. long, "lr=1" .. (" "):rep(3000) .. "1",
      "lr=" .. ("+"):rep(3000) } do
      local good, why = pcall(config.parse, { lr = 1, steps = 1, precision = "a", on = true },
        { argument }, { precision = { "", choices = { "a" } } }, { count = "steps" })
      assert.is_false(good, argument)
      assert.is_true(#tostring(why) < 500, tostring(why))
    end
  end)

  it("checks fields against their named ranges, in a file too", function()
    local folder = helper.folder()
    local broken = helper.write(folder .. "/broken.lua", "return {\n  decide = if\n}")
    local mine = { n = 1, k = 0, x = 1, y = 0, s = 0, p = 1, data = "", out = "", save = "",
      policy = "my own", several = { "all" } }
    local kinds = { count = "n", natural = "k", positive = "x", not_negative = "y", share = "s",
      part = "p", file = "data", output = "out", folder = "save",
      policy = "policy several" }
    local function parse_mine(...) return config.parse(mine, { ... }, nil, kinds) end
    for _, word in ipairs { "n=3", "k=0", "x=1e-9", "y=0", "s=1", "p=1", "data=", "data=README.md",
      "out=" .. folder .. "/new", "save=" .. folder, "save=later",
      "policy=my own", "policy=dynamic:growth_interval=5", "several=all",
      "several=dynamic,static" } do
        parse_mine(word)
      end
    for word, text in pairs { ["n=0"] = "n: expected a whole number of 1 or more, got 0",
      ["n=1.5"] = "n: expected a whole number of 1 or more, got 1.5",
      ["n=inf"] = "n: expected a whole number of 1 or more, got inf",
      ["k=-1"] = "k: expected a whole number of 0 or more, got -1",
      ["x=0"] = "x: expected a finite number above 0, got 0",
      ["x=inf"] = "x: expected a finite number above 0, got inf",
      ["y=-1"] = "y: expected a finite number of 0 or more, got -1",
      ["s=2"] = "s: expected a number from 0 to 1, got 2",
      ["p=0"] = "p: expected a number above 0, up to 1, got 0",
      ["data=none.txt"] = "data: there is no file 'none.txt'",
      ["data=spec"] = "data: expected a file, but 'spec' is a folder",
      ["out=" .. folder .. "/a/b"] = "out: there is no folder '" .. folder .. "/a' to write into",
      ["out=spec"] = "out: expected a file to write, but 'spec' is a folder",
      ["save=README.md"] = "save: expected a folder, but 'README.md' is a file",
      ["policy=dynamc"] = "policy: there is no policy 'dynamc'; did you mean 'dynamic'?",
      ["policy=" .. broken] = "policy: " .. broken .. ":2: unexpected symbol near 'if'",
      ["policy=./none.lua"] = "policy: ./none.lua: No such file or directory",
      ["policy="] = "policy: ", ["several=dynamic,statc"] = "several: there is no policy 'statc'",
      ["several="] = "several: expected at least one" } do
      local good, problem = pcall(parse_mine, word)
      assert.is_false(good, word)
      assert.equal("config: " .. text, tostring(problem):sub(1, #text + 8))
    end
    local file = helper.write(folder .. "/s.lua", "return { n = -4 }")
    assert.matches("config: n: expected a whole number of 1 or more, got -4",
      tostring(select(2, pcall(parse_mine, "config=" .. file))), 1, true)
    assert.matches("there is no range 'counts'",
      tostring(select(2, pcall(config.parse, mine, {}, nil, { counts = "n" }))), 1, true)
    assert.matches("the range count names the field 'm', which is not in",
      tostring(select(2, pcall(config.parse, mine, {}, nil, { count = "n m" }))), 1, true)
    helper.remove(folder)
  end)

  it("checks the items of an optional list", function()
    for _, range in ipairs { "file", "output", "folder", "pattern" } do
      local function parse_list(word)
        return config.parse({ f = config.optional "list" }, { word }, nil, { [range] = "f" }).f
      end
      assert.same({ "README.md" }, range == "file" and parse_list "f=README.md" or { "README.md" })
      assert.same({ "a", "b" }, range ~= "file" and parse_list "f=a,b" or { "a", "b" })
    end
    assert.error_matches(function()
      config.parse({ f = config.optional "list" }, { "f=README.md,b" }, nil, { file = "f" })
    end, "f: there is no file 'b'")
  end)

  it("names no hidden field in its help or in messages", function()
    local fields, docs = { older = "", new = "" }, { older = { "former name", hidden = true } }
    assert.is_nil(config.help(fields, docs):find("older"))
    assert.equal("config: no field 'oldr'; fields: new",
      tostring(select(2, pcall(config.parse, fields, { "oldr=1" }, docs))))
    assert.equal("config: expected name=value, got 'x'; fields: new",
      tostring(select(2, pcall(config.parse, fields, { "x" }, docs))))
    assert.equal("1", config.parse(fields, { "older=1" }, docs).older)
  end)

  it("has help with every field, default and text", function()
    local text = config.help(defaults(),
      { lr = "peak learning rate", precision = { "recipe", choices = { "fp32", "fp16" } } },
      "train.lua")
    assert.matches("usage: engine train.lua", text, 1, true)
    assert.matches("lr +number +0.0003 +peak learning rate", text)
    assert.matches("precision +string +fp16 +recipe: fp32, fp16", text)
    assert.matches("model.block.dropout +number +0.1", text)
    assert.matches("resume +string +%-", text)
  end)

  it("writes the settings as the command line takes them", function()
    local cfg = parse("lr=1/3", "amp=off")
    local lines = {}
    for line in config.format(cfg):gmatch("[^\n]+") do lines[#lines + 1] = line end
    assert.same(cfg, (function()
      local again = config.parse(defaults(), lines)
      again.loss = cfg.loss
      return again
    end)())
  end)
end)

describe("config files", function()
  local folder
  setup(function() folder = helper.folder() end)
  teardown(function() helper.remove(folder) end)

  local function file(name, text)
    return helper.write(folder .. "/" .. name, text)
  end

  it("may be Lua or JSON; of files and settings, the later one on the command line wins", function()
    local lua = file("a.lua", "return { lr = 1/8, model = { width = 2^5 }, layers = { 1 } }")
    local json = file("b.json", '{"steps": 7, "model": {"block": {"dropout": 0}}, "resume": ' ..
      'null, "files": ["x"]}')
    local cfg = parse("config=" .. lua, "config=" .. json, "lr=2")
    assert.equal(2, cfg.lr)
    assert.equal(32, cfg.model.width)
    assert.equal(6, cfg.model.heads)
    assert.equal(7, cfg.steps)
    assert.equal(0, cfg.model.block.dropout)
    assert.same({ 1 }, cfg.layers)
    assert.same({ "x" }, cfg.files)
    assert.equal(0.125, parse("lr=2", "config=" .. lua).lr)
  end)

  it("are refused with the file and the reason", function()
    local function refused(name, text)
      local path = file(name, text)
      local problem = message("config=" .. path)
      assert.matches(path, problem, 1, true)
      return problem
    end
    assert.matches("no field 'lrr'; did you mean 'lr'", refused("a.lua", "return { lrr = 1 }"), 1,
      true)
    assert.matches("lr: expected a number, got the string '1'",
      refused("b.lua", "return { lr = '1' }"), 1, true)
    assert.matches("model: expected a table of fields, got a number",
      refused("c.lua", "return { model = 3 }"), 1, true)
    assert.matches("expected a table of fields, got nothing", refused("d.lua", "local x = 1"), 1,
      true)
    assert.matches("e.lua:1:", refused("e.lua", "return {"), 1, true)
    assert.matches("f.lua:1:", refused("f.lua", "os.exit(3)"), 1, true)
    assert.matches("not JSON", refused("g.json", '{"lr": }'), 1, true)
    assert.matches("expected Lua source, got bytecode",
      refused("h.lua", string.dump(function() return {} end)), 1, true)
    assert.matches("item 2 is a string", refused("i.json", '{"layers": [1, "b"]}'), 1, true)
    refused("j.lua", "return { layers = { 1, nil, 3 } }")
    assert.matches("layers: expected a list of numbers, but item 2 is NaN",
      refused("n.lua", "return { layers = { 1, 0 / 0 } }"), 1, true)
    assert.matches("expected a list without gaps, got a table with the field 'a'",
      refused("k.lua", "return { layers = { 1, a = 2 } }"), 1, true)
    assert.matches("lr: expected a number, got a table", refused("l.lua", "return { lr = {} }"), 1,
      true)
    assert.matches("lr: expected a number, got a function",
      refused("m.lua", "return { lr = function() end }"), 1, true)
    assert.matches("cannot read", message("config=" .. folder .. "/none.lua"), 1, true)
    assert.matches("cannot read", message("config=" .. folder), 1, true)
  end)
end)

describe("a script with settings", function()
  local folder, script
  setup(function()
    folder = helper.folder()
    script = helper.write(folder .. "/train.lua", [[
      local config = require("engine").config
      local cfg = config({ lr = 0.5, steps = 10 }, { lr = "learning rate" })
      print(cfg.lr, cfg.steps)]])
  end)
  teardown(function() helper.remove(folder) end)

  it("reads them from its arguments", function()
    assert.equal("0.25\t10\n", helper.run({ script, "lr=2^-2" }).out)
  end)

  it("prints them for help", function()
    for _, word in ipairs { "help", "--help", "-h" } do
      local result = helper.run { script, word }
      assert.equal(0, result.code)
      assert.matches("learning rate", result.out, 1, true)
    end
  end)

  it("reports a mistake in one line without traceback, with exit code 1", function()
    local result = helper.run { script, "lrr=1" }
    assert.equal(1, result.code)
    assert.equal("", result.out)
    assert.equal("engine: config: no field 'lrr'; did you mean 'lr'?; fields: device lr steps\n",
      result.err)
  end)
end)

describe("a script's device", function()
  local folder, script
  setup(function()
    folder = helper.folder()
    script = helper.write(folder .. "/device.lua", [[
      local engine = require "engine"
      local cfg = engine.config { steps = 10 }
      print(engine.device(), cfg.device, cfg.steps)]])
  end)
  teardown(function() helper.remove(folder) end)

  it("is given on the command line or in a file; the later one wins", function()
    local file = helper.write(folder .. "/a.json", '{"device": "reference", "steps": 3}')
    assert.equal("reference\tnil\t10\n", helper.run({ script, "--device=reference" }).out)
    assert.equal("reference\tnil\t3\n", helper.run({ script, "config=" .. file }).out)
    assert.equal("cpu\tnil\t3\n", helper.run({ script, "config=" .. file, "device=cpu" }).out)
  end)

  it("has a hint for a misspelt field, and a line for an unknown device", function()
    for word, text in pairs { ["devices=cpu"] = "no field 'devices'; did you mean 'device'?",
      ["Device=cpu"] = "no field 'Device'; did you mean 'device'?",
      ["device=zz"] = "unknown device 'zz'; expected cpu, reference, cuda or auto" } do
      local result = helper.run { script, word }
      assert.equal(1, result.code)
      assert.matches(text, result.err, 1, true)
    end
  end)
end)

describe("expression", function()
  it("knows numbers, operators, brackets and constants", function()
    for text, value in pairs {
      ["3e-4"] = 3e-4, ["2^15"] = 32768, ["1/4"] = 0.25, ["-(2+3)*4"] = -20, ["0x10"] = 16,
      [".5"] = 0.5, ["1."] = 1,
      ["-2^2"] = -4, ["2^-1"] = 0.5, ["2^3^2"] = 512, ["10-2-3"] = 5, ["7%4"] = 3, [" 1 + 1 "] = 2,
      ["2--1"] = 3,
      ["inf"] = math.huge, ["-inf"] = -math.huge, ["2*pi"] = 2 * math.pi, ["6e5*1E+2"] = 6e7,
    } do assert.equal(value, expression(text), text) end
  end)

  it("refuses everything else and gives the reason", function()
    for _, text in ipairs { "", " ", "1 2", "2^", "(1", "1)", "a", "nan", "1..2", "os.exit()",
      "1;2", "0x", "--", ("("):rep(1000), ("-"):rep(1000) } do
      local value, why = expression(text)
      assert.is_nil(value, text)
      assert.equal("string", type(why))
    end
  end)
end)

describe("nearest", function()
  it("finds a misspelt name", function()
    local names = { "layer_norm", "linear", "embedding", "lr" }
    assert.equal("layer_norm", nearest.find("layernorm", names))
    assert.equal("layer_norm", nearest.find("Layer_Nrom", names))
    assert.equal("lr", nearest.find("rl", names))
    assert.is_nil(nearest.find("convolution", names))
    assert.is_nil(nearest.find(("x"):rep(1000), names))
    assert.is_nil(nearest.find("x", {}))
    assert.equal("; did you mean 'linear'?", nearest.hint("lienar", names))
    assert.equal("", nearest.hint("quux", names))
  end)
end)
