-- Wrong command lines of the subcommands: each ends with exit code 1 and one line on stderr that
-- says what was expected, what came and what to do next.
local helper = require "spec.helper"

describe("a wrong command line", function()
  local folder, run

  setup(function()
    folder = helper.folder()
    run = folder .. "/runs/a"
    local job = helper.write(folder .. "/job.lua", [[
      local engine = require "engine"
      local cfg = engine.config({ policy = "dynamic", seed = 1, run = "", lr = 0.1,
        a = 1, b = 1, c = 1, d = 1 })
      local net = engine.nn.linear(4, 4)
      engine.trainer { model = net, steps = 3, run = cfg.run, log = "quiet",
        optimizer = engine.optim.sgd(net, { lr = cfg.lr, precision = "fp16" }),
        data = { next = function() return { x = engine.randn(2, 4) } end },
        loss = function(model, batch) return model(batch.x):mean() end }:run()]])
    assert.equal("", helper.run({ job, "run=" .. run }).err)
  end)

  teardown(function() helper.remove(folder) end)

  local function told(line, message, code)
    local words = {}
    for word in line:gsub("RUN", run):gsub("JOB", folder .. "/job.lua"):gmatch("%S+") do
      words[#words + 1] = word == "EMPTY" and "" or word
    end
    local result = helper.run(words)
    assert.equal(code or 1, result.code, line)
    assert.equal("", result.out, line)
    assert.matches(message, result.err, 1, true)
    assert.matches("^engine %a+: [^\n]+\n$", result.err)
  end

  it("of the engine itself names the option", function()
    for _, option in ipairs { "-x", "--helpp", "-e", "-l", "-ix" } do
      local result = helper.run { option }
      assert.equal(1, result.code)
      assert.matches(("engine: the option '%s' is unknown or lacks its argument\nusage: ")
        :format(option), result.err, 1, true)
    end
  end)

  it("of a run's command says what is missing, surplus, misspelled or empty", function()
    local one = "expected one run, got "
    for line, message in pairs {
      ["attach EMPTY"] = "expected one run (code follows -e), got ''; see engine help attach",
      ["attach RUN -e"] = "-e: expected a value after it, got nothing",
      ["export"] = one .. "nothing; see engine help export",
      ["export EMPTY --csv -"] = one .. "''; see engine help export",
      ["export RUN"] = "expected --csv FILE, --jsonl FILE or --tensorboard FOLDER, got none",
      ["export RUN --csv"] = "--csv: expected a value after it, got nothing",
      ["export RUN --csv EMPTY"] = "--csv: expected a value, got an empty text",
      ["export RUN --csv x --jsonl x"] = "expected two different files, got 'x' twice",
      ["export RUN --csv - --every 5"] = "--every works with --tensorboard only",
      ["plot RUN --columns EMPTY"] = "--columns: expected names such as loss,scale, got none",
      ["plot RUN --log --linear"] = "expected --log or --linear, got both",
      ["plot RUN --heatmap x"] = "--heatmap: expected exponent or time, got 'x'",
      ["plot RUN --heatmap time --columns loss"] = "--columns does not work with --heatmap; " ..
        "hint: leave out one of them",
      ["plot RUN --heatmap time --log"] = "--log does not work with --heatmap",
      ["plot RUN --from x"] = "--from: expected a number, such as 100, 2^12 or 1e-3, got 'x'",
      ["report RUN -x"] = "there is no option '-x'; options: --output",
      ["report RUN -o EMPTY"] = "--output: expected a value, got an empty text",
      ["runs EMPTY"] = "expected at most one folder, got ''; see engine help runs",
      ["watch EMPTY"] = one .. "''; see engine help watch",
      ["watch RUN --columns EMPTY"] = "--columns: expected names such as loss,scale, got none",
    } do told(line, message) end
  end)

  it("of a replay or a search names the command that lists the policies", function()
    local lists = "; `engine policies` lists the policies"
    for line, message in pairs {
      ["replay RUN"] = "expected --policy FILE" .. lists,
      ["replay EMPTY --policy dynamic"] = "expected one trace (a run or a string of outcomes), " ..
        "got ''; see engine help replay",
      ["replay RUN --policy EMPTY"] = "there is no policy ''",
      ["tune"] = "expected one run or several, got nothing; see engine help tune",
      ["tune RUN"] = "expected one --policy FILE, got 0" .. lists,
      ["tune RUN --policy dynamic"] = "expected --over NAME=FROM..TO, such as --over " ..
        "growth_interval=100..5000; NAME is an option of the policy",
      ["contest JOB"] = "expected at least one --policy NAME or --vary SETTING=VALUE" .. lists,
    } do told(line, message) end
  end)

  it("of a script's command suggests the script, and how to give a setting", function()
    local absent = folder .. "/jbo.lua"
    local near = ("there is no script '%s'; did you mean '%s/job.lua'?"):format(absent, folder)
    for line, message in pairs {
      ["contest " .. absent .. " --policy dynamic"] = near,
      ["contest " .. folder .. " --policy dynamic"] = "expected a script, got the folder '",
      ["contest JOB --policy dynamic name="] = "name: '' is empty; hint: name=NAME chooses",
      ["contest JOB --policy dynamic seeed=3"] = "job.lua help` lists the fields",
      ["plan"] = "expected a script or a folder first, got nothing; see engine help plan",
      ["plan ranks=4"] = "expected a script or a folder first, got 'ranks=4'; see engine help plan",
      ["plan " .. absent] = near,
      ["plan JOB --ranks 4"] = "expected name=value, got '--ranks'; write ranks=VALUE",
      ["plan JOB --zero=9"] = "expected zero to be 0, 1, 2 or 3, got 9",
      ["plan " .. folder .. " extra"] = "expected nothing after the folder, got 'extra'",
    } do told(line, message) end
  end)

  it("of any other command names its options and arguments", function()
    for line, message in pairs {
      ["data"] = "expected 'tokenize', got nothing; see engine help data",
      ["data tokenize"] = "expected a text file after 'tokenize', got nothing; see engine help",
      ["data tokenize a.txt"] = "expected --tokenizer FOLDER, a folder with tokenizer.json",
      ["data tokenize a.txt --tokenizer x"] = "expected -o FILE.npy, the file to",
      ["doctor --verbose"] = "no option '--verbose'; `engine doctor` takes no options",
      ["generate nosuch --prompt x"] = "there is no folder 'nosuch'; expected the folder of",
      ["help --html x surplus"] = "expected no NAME beside them, got 'surplus'",
      ["policies --json"] = "there is no option '--json'; `engine policies` takes no options",
      ["version x"] = "expected no arguments, got 'x'; see engine help version",
    } do told(line, message) end
  end)
end)
