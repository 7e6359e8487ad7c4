-- Puts byte sequences of every kind wherever text comes from outside: arguments of ten commands,
-- names of runs, policies, options, signals and logs, reasons, events, settings, sources of
-- policies. Each command must succeed or end with one line that is not a Lua error, within five
-- seconds, and print nothing that a terminal would execute; pages and pictures must be UTF-8.
-- Deterministic.
-- Usage: engine spec/fuzz/texts.lua [rounds [seed [first round]]]
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local commands = require "spec.fuzz.commands"
local draws = require "spec.fuzz.draws"
local helper = require "spec.helper"
local ffi, C, draw, one_of = M_ffi.ffi, M_ffi.C, draws.draw, draws.one_of

local rounds, seed, first = tonumber(arg[1]) or 20, tonumber(arg[2]) or 1, tonumber(arg[3]) or 1

local ODD = { "\27[31m", "\27]0;title\7", "\r", "\8", "\127", "\194\155", "\155", "\226\128\174",
  "\226\129\166", "\216\156", "\255", "\192\128", "\237\160\128", "\244\144\128\128",
  "\240\159\152\128", "\n", "\t", "%s%n%d", "'", '"', "\\", "<b>", "&amp;", "--", "=", ":", "../",
  "a", "scale", "\195\169", "{", "}", "[[", "]]", "nan", "1e999", "0x", "attach", ".lua", ".json",
  "log.", "signals.", "$(x)", "`", ";", "|", ("x"):rep(300), ("\27"):rep(50) }

local function text(zeros)
  local parts = {}
  for i = 1, 1 + draw(6) do
    parts[i] = draw(3) == 0 and string.char(draw(256)) or one_of(ODD)
  end
  if draw(40) == 0 then parts[#parts + 1] = one_of(ODD):rep(4000) end
  local result = table.concat(parts)
  return zeros and result or (result:gsub("%z", "0"))
end

-- ------------------------------------------------------------------ arguments of commands

local root = helper.folder()
local dir = root .. "/run"

-- Writes a history with a random text in every field that holds text.
local function write_history()
  os.execute("rm -rf " .. dir .. " && mkdir -p " .. dir)
  local h = engine.history.open(dir, { write = true })
  local record, verdict = ffi.new "eng_record", ffi.new "eng_verdict"
  pcall(h.set_parameters, h, { { name = text(), shape = { 4 } }, { name = text(), shape = { 2 } } })
  for _, key in ipairs { "created", "precision", "steps", "device", "policy", "gradients",
    "optimizer", "schedule", "ranks" } do
    pcall(h.set_meta, h, key, text())
  end
  pcall(h.set_config, h, text(), text())
  pcall(h.add_policy, h, text(), text(), text())
  for step = 0, 19 do
    record.step, record.updates, record.scale, record.loss = step, step, 8, 1
    record.first_bad, record.count, record.amax, record.norm = -1, 10, 1, 1
    verdict.scale, verdict.lr_mul = 8, 1
    ffi.fill(verdict.reason, 256)
    local reason = text():sub(1, 255)
    ffi.copy(verdict.reason, reason, #reason)
    h:append(record, verdict, 10)
    if step % 5 == 0 then
      pcall(h.append_signal, h, step, text(), step)
      pcall(h.append_signal, h, step, "log." .. text(), step)
      pcall(h.append_shadow, h, step, text(), verdict)
      pcall(h.event, h, step, one_of { "swap", "stuck", "overflow", text() }, text(), text())
    end
  end
  h:close()
end

local function policy_source()
  return ([[return { name = %q, doc = %q, options = { init_scale = 8, [%q] = %q },
    decide = function(state, record)
      print(%q)
      if record.step %% 3 == 1 then error(%q) end
      return { scale = 8, reason = %q, log = { [%q] = 1 } }
    end }]]):format(text(), text(), text(), text(), text(), text(), text(), text())
end

local READERS = { { "runs", root }, { "plot", dir }, { "report", dir, "-o", root .. "/a.html" },
  { "plot", dir, "--svg", root .. "/a.svg" }, { "export", dir, "--csv", root .. "/a.csv" },
  { "export", dir, "--jsonl", root .. "/a.jsonl" }, { "plot", dir, "--heatmap", "time" },
  { "attach", dir, "-e", "print(history) print(history:why(5)) print(history:events())" } }
local GIVEN = { "runs", "plot", "report", "export", "replay", "tune", "attach", "help", "policies",
  "version" }
local FLAGS = { "--columns", "--policy", "--svg", "--from", "--over", "--json", "-o", "-e", dir,
  "times=4", "4. x 3.", "--objective", "--heatmap", "--help" }

local function call(words)
  return commands.problem_of(function()
    require("engine.cli." .. words[1]).main(unpack(words, 2))
  end, table.concat(words, " "))
end

local function page_problem(path)
  local page = helper.read(path)
  os.remove(path)
  if not page then return nil end
  page = page:gsub("\r\n", "\n")
  return commands.unsafe(page)
end

-- ------------------------------------------------------------------ rounds

local wrong, round_now = 0, first - 1
for round = first, first + rounds - 1 do
  draws.start(seed, round)
  local function report(what, problem)
    if not problem then return end
    wrong = wrong + 1
    commands.print(("round %d: %s\n  %s"):format(round, what:gsub("[%c\128-\255]", "?"):sub(1, 300),
      problem:gsub("[%z\1-\9\11-\31\127-\255]", "?"):sub(1, 600)))
  end
  for _ = 1, 12 do                                      -- arguments of commands
    local words = { one_of(GIVEN) }
    for i = 2, 2 + draw(3) do words[i] = draw(2) == 0 and text() or one_of(FLAGS) end
    report("engine " .. table.concat(words, " "), call(words))
  end
  write_history()
  for _, words in ipairs(READERS) do
    report("engine " .. table.concat(words, " "), call(words))
  end
  report("the page", page_problem(root .. "/a.html"))
  report("the picture", page_problem(root .. "/a.svg"))
  report("the CSV file", page_problem(root .. "/a.csv"))
  for _ = 1, 4 do                                       -- policies, good and bad
    local source = draw(4) == 0 and text(true) or policy_source()
    report("policy " .. source, commands.problem_of(function()
      local p = engine.policy.load { source = source, file = text():sub(1, 50) }
      local record = ffi.new "eng_record"
      record.scale, record.step = 8, draw(9)
      print(p, p:decide(record), p:printed())
    end, "attempt to"))
    helper.write(root .. "/mine.lua", source)
    report("replay of " .. source, call { "replay", "4. x 2.", "--policy", root .. "/mine.lua" })
    report("replay with options", call { "replay", "4. x 2.", "--policy", "dynamic",
      text() .. "=" .. text() })
  end
  helper.write(root .. "/ds.json", ('{ "fp16": { "enabled": true, "%s": %s } }'):format(text(),
    text()))
  report("a DeepSpeed file", call { "replay", "4. x", "--policy", root .. "/ds.json" })
  if round % 10 == 0 then                               -- a script's settings, as a process
    local words = { "examples/gpt.lua", "steps=1", "layers=1", "width=32", "context=32",
      "log=quiet", text() .. "=" .. text() }
    report("engine " .. table.concat(words, " "), commands.problem_of_process(words))
  end
  round_now = round
  if C.eng_interrupted() ~= 0 or wrong >= 30 then break end
end

helper.remove(root)
commands.finish("texts", round_now - first + 1, wrong)
