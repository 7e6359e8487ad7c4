-- The reference is complete: every exported C function, operation, public Lua function, trainer
-- option, environment variable, policy and policy option has an entry with text, and no link is
-- broken. `engine help NAME` finds entries; the editor types name what users can misspell.
local helper = require "spec.helper"
local reference = require "engine.docs.index"

local index = reference.new()

local function entry(name, kind)
  for _, candidate in ipairs((index:find(name))) do
    if not kind or candidate.kind == kind then return candidate end
  end
end

local function undocumented(kind)
  local list = {}
  for _, gap in ipairs(index:gaps()) do
    if gap.kind:find(kind) then list[#list + 1] = ("%s: %s"):format(gap.where, gap.name) end
  end
  return list
end

describe("the reference", function()
  for _, kind in ipairs { "^C ", "operation", "Lua ", "field", "option", "policy", "variable",
    "guide" } do
    it(("documents every entry of the kind '%s'"):format(kind), function()
      assert.same({}, undocumented(kind))
    end)
  end

  it("has every C function that the library exports", function()
    local missing, count = {}, 0
    for name in helper.read(require("engine.base.ffi").library_dir
      .. "/cdef.h"):gmatch("(eng_[%w_]+)%s*%(") do
      count = count + 1
      if not entry(name, "C function") then missing[#missing + 1] = name end
    end
    assert.is_true(count > 150)
    assert.same({}, missing)
  end)

  it("has every operation, with the facts of ops.def", function()
    for _, name in ipairs(require("engine.base.ffi").op_names) do
      assert.is_table(entry("op." .. name, "operation"), name)
    end
    assert.matches("inputs", entry("op.matmul").signature)
  end)

  it("has every public function of engine and every method of tensors", function()
    local engine, tensor = require "engine", require "engine.tensor.tensor"
    for name, value in pairs(engine) do
      if type(value) == "function" then assert.is_table(entry("engine." .. name), name) end
    end
    for name in pairs(tensor.methods) do assert.is_table(entry("tensor:" .. name), name) end
    for name in ([[engine.optim.adamw engine.nn.gpt engine.schedule.cosine engine.data.text
      engine.fp8.matmul engine.history.open trainer:run history:why module:parameters
      optimizer:step]]):gmatch("%S+") do
      assert.is_table(entry(name), name)
    end
  end)

  it("shows an example for every function that models and loops are made of", function()
    local missing = {}
    for _, e in ipairs(index.entries) do
      local wanted = e.kind == "Lua function" and not e.example
        and (e.area == "tensor" or e.area == "engine" or e.area == "optim"
        or e.area == "schedule" or e.area == "data" or e.area == "fp8" or e.area == "nn")
      if wanted and (e.name:find("^engine%.[%l_]+$") or e.name:find("^engine%.%w+%.[%w_]+$")
        or e.name:find("^tensor:")) then
        missing[#missing + 1] = e.name
      end
    end
    assert.same({}, missing)
  end)

  it("has every option of a trainer", function()
    local known, missing = {}, {}
    local text = helper.read("lua/engine/train/options.lua")
    for name in text:match("local KNOWN = set_of %[%[(.-)%]%]"):gmatch("%S+") do
      known[#known + 1] = name
      if not entry("trainer." .. name, "trainer option") then missing[#missing + 1] = name end
    end
    assert.is_true(#known > 30)
    assert.same({}, missing)
  end)

  it("has every environment variable that the code reads", function()
    local missing, count = {}, 0
    local ours = "(ENGINE|RANK|WORLD|LOCAL|OMPI|PMI|PMIX|SLURM|MASTER|TORCHELASTIC)_[A-Z_0-9]+"
    local text = helper.shell("grep -rhoE 'getenv *\\(\"[A-Z_]+\"|\"" .. ours .. "' "
      .. "core cuda lua --include=*.c --include=*.cu --include=*.lua").out
    for name in text:gmatch('"([A-Z_0-9]+)') do
      count = count + 1
      local set_by_us = name:find("^OMPI_ALLOW") or name == "OMPI_MCA_"    -- for mpirun
      if not set_by_us and not entry(name, "environment variable") then
        missing[#missing + 1] = name
      end
    end
    assert.is_true(count > 20)
    assert.same({}, missing)
  end)

  it("has every policy with its options", function()
    local policy = require "engine.policy.policy"
    for _, kind in ipairs { "scale", "fp8" } do
      for _, name in ipairs(policy.names(kind)) do
        local found = assert(entry(name, "policy"), name)
        for option in pairs(policy.load(name, nil, kind == "fp8" and "fp8" or nil).defaults) do
          assert.is_truthy(found.text:find("\n  " .. option .. " = ", 1, true),
            name .. "." .. option)
        end
      end
    end
  end)

  it("has the fields of records and verdicts that the sandbox knows", function()
    for name in ([[record.amax record.norm_ref record.signals verdict.scale verdict.lr_mul
      policy.migrate]]):gmatch("%S+") do
      assert.is_true(#entry(name).text > 10, name)
    end
  end)
end)

describe("engine help NAME", function()
  -- Runs `engine help WORDS` in this process. All calls share one index, because reading the whole
  -- reference takes a second.
  local new, made = reference.new, nil
  setup(function()
    reference.new = function(commands)
      made = made or new(commands)
      return made
    end
  end)
  teardown(function() reference.new = new end)

  local function help(...)
    local print, stderr, out, err = print, io.stderr, {}, {}
    rawset(_G, "print", function(text) out[#out + 1] = text .. "\n" end)
    rawset(io, "stderr", { write = function(_, text) err[#err + 1] = text end })
    local good, code = pcall(require("engine.cli.help").main, ...)
    rawset(_G, "print", print)
    rawset(io, "stderr", stderr)
    assert.is_true(good, code)
    return { code = code, out = table.concat(out), err = table.concat(err) }
  end

  it("prints functions, operations, fields, variables, policies and guides", function()
    local expectations = {
      ["tensor:gelu"] = "Lua function", eng_backward = "C function", ["op.matmul"] = "operation",
      ["policy.record"] = "record%.amax", ["record.amax"] = "largest magnitude",
      ["trainer.steps"] = "trainer option", dynamic = "growth_interval = 2000",
      ENGINE_PAIRS = "bf16", glossary = "found_inf",
      ["docs/data.md"] = "^# Data\n", ["model:save"] = "shard_bytes",
    }
    for name, expected in pairs(expectations) do
      local result = help(name)
      assert.are.equal(0, result.code, name .. ": " .. result.err)
      assert.matches(expected, result.out)
    end
  end)

  it("finds the last part of a name, shows several entries and lists others", function()
    local result = helper.run { "help", "matmul" }
    assert.matches("tensor:matmul", result.out)
    assert.equal(result.out, help("matmul").out)
    assert.matches("is the name of %d+ things", help("step").out)
  end)

  it("shows every thing that has the name: a policy, and the precision or term of that name",
    function()
      for name, other in pairs { fp8_delayed = "precision=fp8_delayed  (precision recipe)",
        underflow = "underflow  (term)", shadow = "shadow  (term)" } do
        assert.matches("\n" .. other, help(name).out, 1, true)
      end
      assert.matches("^policy=fp8_delayed ", help("fp8_delayed").out)
    end)

  it("lists the guide and the functions that have a command's name below its help", function()
    local listed = assert(help("data").out:match("^usage: engine data.*\nSee also:\n(.*)"))
    assert.matches("  engine.data  .*\n  docs/data +Data\n", listed)
    assert.matches("^# Data\n", help("docs/data").out)
    assert.matches("^usage: engine data", help("data", "tokenize").out)
    local alone = helper.run { "data", "--help" }
    assert.are.equal(0, alone.code)
    assert.no.matches("See also", alone.out)
  end)

  it("works without the folders core/, docs/ and policies/", function()
    local folder = helper.folder()
    helper.shell(("cp %s %s/engine && cp -r lua %s && mkdir %s/build && cp %s/*.so %s/cdef.h "
      .. "%s/build"):format(helper.quote(helper.engine), folder, folder, folder,
      require("engine.base.ffi").library_dir, require("engine.base.ffi").library_dir, folder))
    local result = helper.shell(("cd %s && ./engine help plot && ./engine help tensor:gelu"):format(
      folder))
    helper.remove(folder)
    assert.are.equal(0, result.code, result.err)
    assert.matches("^usage: engine plot .*\nSee also:.*tensor:gelu%(", result.out)
  end)

  it("finds a method by the usual name of its object", function()
    for name, method in pairs { ["h:plot"] = "history:plot", ["opt:step()"] = "optimizer:step",
      ["x:sum"] = "tensor:sum" } do
      assert.equal(method, help(name).out:match("^[%w_:]+"))
    end
  end)

  it("finds glossary terms, options of policies and precisions, in one word or several", function()
    for name, expected in pairs { ["loss scale"] = "factor on the loss",
      growth_interval = "dynamic.growth_interval", fp16 = "weight_gradients  f16",
      ["getting started"] = "# Getting started" } do
      assert.matches(expected, help(name).out)
    end
    assert.matches("# Getting started", help("getting", "started").out)
    assert.matches("`engine help` lists", help("zzzqqq").err)
  end)

  it("finds the columns of recorded runs, also those that only some runs have", function()
    for name, text in pairs { stored = "largest gradient as stored (times the scale)",
      ["fp8.snr"] = "lowest SNR of the FP8 tensors, in dB; only some steps have a value",
      ["signals.entropy"] = "signal entropy", ["fp8.1.up:w.snr"] = "SNR of 1.up:w, in dB; only" } do
      assert.matches("engine plot RUN --columns " .. name .. "  (recorded column)\n\n" .. text,
        help(name).out, 1, true)
    end
    assert.matches("did you mean 'fp8.snr'?", help("fp8.sn").err, 1, true)
  end)

  it("prints a command's own help, and all commands without a name", function()
    assert.matches("usage: engine plot", help("plot").out)
    assert.matches("engine replay", help().out)
    for _, name in ipairs { "policy:swap", "run:set", "run:pause()" } do
      assert.matches("usage: engine attach", help(name).out)
    end
    assert.matches("^history:last", help("history:last").out)
  end)

  it("lists the entries that mention a word if no entry has that name", function()
    local result = help "logit_max"
    assert.are.equal(1, result.code)
    assert.matches("nothing is called 'logit_max'; did you mean 'log_max'", result.err, 1, true)
    assert.matches("\n  verdict.logit_muls ", result.out)
    assert.are.equal("", help("%a.*").out)
    assert.matches("'num_labels' is mentioned in\n  %w", help("num_labels").out)
  end)

  it("shows the scales among a policy's options as powers of two, and no other option", function()
    for line, name in pairs { ["init_scale = 2^16\n"] = "dynamic", ["growth_factor = 2\n"] =
      "dynamic", ["min_scale = 2^-10\n"] = "bandit", ["loss_scale = 1 "] = "static",
      ["scale_max = 2^14\n"] = "openseq2seq", ["default 2^14)"] = "bandit.init_scale" } do
      assert.matches(line, help(name).out, 1, true)
    end
  end)

  it("explains the fields of a precision recipe", function()
    for name, text in pairs { ["fp8.keep"] = "how the tape keeps x for the product dW",
      accumulator = "device (hopper on a card", high_first = "`high_first`, `high_last`: how many",
      rounding = "how new weights are rounded", residual = "false: what clamping cuts off",
      ["precision.residual"] = "the output of an embedding" } do
      assert.matches(text, help(name).out, 1, true)
    end
  end)

  it("names every value that an option of a recipe accepts", function()
    local function accepted(base, fp8, option)
      local _, message = pcall(require("engine").precision.resolve, { base = base, fp8 = fp8 })
      return message:match("expected " .. option .. " (.*), got 'zz'"):gsub("a size such as", "")
    end
    for base, options in pairs {
      fp8_current = { x = { "rule", "format", "block", "keep" }, forward = { "accumulator" } },
      mxfp8 = { x = { "format" }, forward = { "accumulator", "signs" } } } do
      for name, list in pairs(options) do
        for _, option in ipairs(list) do
          local text = help("fp8." .. option).out
          local values = accepted(base, { [name] = { [option] = "zz" } }, option)
          for value in values:gsub("^to be", ""):gsub(" or ", " "):gmatch("[%w_]+") do
            assert.matches("%f[%w_]" .. value .. "%f[^%w_]", text, 1, false,
              option .. " of " .. base)
          end
        end
      end
    end
  end)

  it("suggests the nearest name", function()
    local result = help "matmull"
    assert.are.equal(1, result.code)
    assert.matches("did you mean 'matmul'", result.err)
    assert.matches("did you mean 'nn.linear'", helper.run({ "help", "nn.lineer" }).err, 1, true)
  end)
end)

describe("the types for editors", function()
  local folder
  setup(function() folder = helper.folder() end)
  teardown(function() helper.remove(folder) end)

  it("are Lua, and hold fields, options and methods", function()
    local path = folder .. "/engine.d.lua"
    assert.are.equal(0, helper.run({ "help", "--types", path }).code)
    assert.is_function(loadfile(path))
    local text = helper.read(path)
    local lines = {
      "---@meta engine", "---@class (exact) engine.Verdict", "---@field lr_mul? number",
      "---@field amax number", "---@class (exact) engine.TrainerOptions",
      "---@field steps integer", "function tensor:matmul(", "function engine.optim.adamw(",
      "function engine.zeros(", "return engine",
    }
    for _, line in ipairs(lines) do
      assert.is_truthy(text:find(line, 1, true), line)
    end
  end)

  it("mark a misspelled field, where a language server is installed", function()
    if helper.shell("command -v lua-language-server").code ~= 0 then
      return pending("lua-language-server is not installed")
    end
    helper.run { "help", "--types", folder .. "/engine.d.lua" }
    helper.write(folder .. "/.luarc.json",
      ('{ "runtime.version": "LuaJIT", "workspace.library": ["%s/engine.d.lua"] }'):format(folder))
    helper.write(folder .. "/mine.lua", [[
---@type engine.Policy
local policy = {
  optons = {},
  decide = function(state, record)
    if record.overfow then return { scale = 1, acton = "skip" } --[=[@as engine.Verdict]=] end
    return state.scale
  end,
}
return policy]])
    helper.shell(("cd %s && lua-language-server --check . --check_format=json --logpath=%s/log")
      :format(folder, folder))
    local found = assert(helper.read(folder .. "/log/check.json"))
    assert.matches("overfow", found)
    local _, marks = found:gsub("there is no such field", "")
    assert.is_true(marks >= 2, found)
  end)
end)

describe("the pages", function()
  it("are written without a broken link", function()
    if helper.shell("command -v cmark-gfm").code ~= 0 then
      return pending("cmark-gfm is not installed")
    end
    local folder = helper.folder()
    local warnings = require("engine.docs.html").write(reference.new { { name = "plot",
      doc = "curves", help = "usage", where = "x:1" } }, folder)
    local page, index_page = helper.read(folder .. "/ref-tensor.html"),
      helper.read(folder .. "/index.html")
    local external = helper.shell("grep -lE '(src|href)=\"https?:.*\\.(js|css)' "
      .. folder .. "/*.html").out
    helper.remove(folder)
    assert.same({}, warnings)
    assert.matches('id="tensor:matmul"', page, 1, true)
    assert.matches("ref-tensor.html#tensor:gelu", index_page, 1, true)
    local guides = {}
    for name in index_page:gmatch('<li><a href="([^"#]*)%.html">') do guides[#guides + 1] = name end
    assert.are.same({ "guides", "getting-started", "data" }, { unpack(guides, 1, 3) })
    assert.are.same({ "snippets", "policies", "examples" }, { unpack(guides, #guides - 2) })
    assert.are.equal("", external)
  end)
end)
