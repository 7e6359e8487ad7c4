-- Damages histories (values of other types, negative and huge numbers, missing rows and tables,
-- flipped bytes), and runs every command that reads them in this process, and one command a round
-- as a process of its own. Each command must succeed or end with one line that is not a Lua error,
-- within five seconds. Deterministic.
-- Usage: engine spec/fuzz/histories.lua [rounds [seed [first round [steps of the history]]]]
local history = require("engine").history
local M_ffi = require "engine.base.ffi"
local commands = require "spec.fuzz.commands"
local draws = require "spec.fuzz.draws"
local helper = require "spec.helper"
local scratch = require "spec.store.scratch"
local ffi, C, draw, one_of = M_ffi.ffi, M_ffi.C, draws.draw, draws.one_of

local rounds, seed, first = tonumber(arg[1]) or 100, tonumber(arg[2]) or 1, tonumber(arg[3]) or 1
local steps = tonumber(arg[4]) or 300

-- ------------------------------------------------------------------ the intact history

local base = os.tmpname()
os.remove(base)
local root = io.open("/dev/shm") and base:gsub("^.*/", "/dev/shm/") or base
local dir, file = root .. "/run", root .. "/run/history.db"
os.execute("mkdir -p " .. dir)

local function write_template()
  local h = history.open(dir, { write = true })
  local record, verdict = ffi.new "eng_record", ffi.new "eng_verdict"
  local stats = ffi.new "eng_tensor_stats[3]"
  h:set_parameters { { name = "blocks.0.w", shape = { 4, 8 } }, { name = "blocks.1.w",
    shape = { 8 } }, { name = "head.w", shape = { 8, 2 } } }
  for key, value in pairs { created = "2026-11-20T19:47:26Z", precision = "fp8_block", steps = 600,
    device = "cpu", policy = "dynamic", gradients = "f16", parameters = 56, ranks = 2,
    fp8 = '{"layers":["blocks.0","blocks.1"],"sample":25,"rungs":3}' } do
    h:set_meta(key, value)
  end
  h:set_config("lr", "0.001")
  h:add_policy("abc", "dynamic", "return {}")
  h:event(0, "policy", "dynamic", '{"name":"dynamic","options":"init_scale=8"}')
  for step = 0, steps - 1 do
    local bad = step % 50 == 7
    ffi.fill(record, ffi.sizeof(record))
    ffi.fill(verdict, ffi.sizeof(verdict))
    record.step, record.updates, record.count, record.first_bad = step, step, 1000, bad and 1 or -1
    record.scale, record.loss, record.lr, record.amax, record.norm = 1024, 3 - step / 300, 1e-3,
      0.25, 1.5
    record.overflow, record.inf, record.elapsed = bad and 1 or 0, bad and 3 or 0, step / 10
    record.norm_ref = step % 3 == 0 and 1.25 or 0 / 0
    record.hist[140], record.hist[150] = 400, 500
    verdict.scale, verdict.lr_mul, verdict.action = bad and 512 or 1024, 1, bad and 1 or 0
    if bad then verdict.reason = "overflow" end
    h:append(record, verdict, 512)
    if step % 25 == 0 or bad then
      for i = 0, 2 do
        stats[i].count, stats[i].amax, stats[i].sum_squares = 100, 0.5, 3
        stats[i].hist[140 + i], stats[i].inf = 90, bad and 1 or 0
      end
      h:append_tensors(step, stats, 3)
      local rows = {}
      for _, site in ipairs { "blocks.0", "blocks.1" } do
        for _, role in ipairs { "x", "w", "dy" } do
          rows[#rows + 1] = { site = site, role = role, snr = 30, underflow = 0.01, overflow = 0,
            zeros = 0.1, amax = 2, least = 1e-3, scale_min = 0.5, scale_max = 1, count = 64,
            peak = 2.5, power = 9, asked = 0 }
        end
      end
      h:append_fp8(step, rows)
      h:append_signal(step, "entropy", step / 7)
      h:event(step, "layers", "high precision", ('{"blocks.1":%d}'):format(step % 2 + 1))
      h:append_shadow(step, "static", verdict)
      h:append_shadow(step, "deepspeed", verdict)
    end
    if bad then h:event(step, "overflow", "in blocks.1.w") end
  end
  h:event(100, "swap", "dynamic to static", '{"to":{"name":"static"},"by":"file"}')
  h:event(150, "evaluation", "loss 2.5")
  h:event(200, "checkpoint", "step-200")
  h:event(steps, "finished")
  h:close()
end

write_template()
local intact = helper.read(file)
local other = root .. "/other"                 -- an intact run, to compare with
os.execute("mkdir " .. other)
helper.write(other .. "/history.db", intact)

-- ------------------------------------------------------------------ damage

local TABLES = {
  steps = "step attempt updates loss lr scale next_scale action overflow inf nan count zeros " ..
    "underflow amax norm norm_ref clip lr_mul policy_failed first_bad reason elapsed tokens hist",
  tensor_stats = "step stats", events = "id step time kind text data", meta = "key value",
  config = "key value", policies = "hash name source", parameters = "id name shape",
  shadows = "name step scale action failed reason", signals = "name step value",
  fp8 = "step site role snr underflow overflow zeros amax least scale_min scale_max count peak " ..
    "power asked",
  blocks = "block rows first last overflows skipped failed tokens seconds loss_n loss_min " ..
    "loss_max loss_sum scale_n scale_min scale_max scale_sum amax_n stored_max zeros_sum",
}
local names = {}
for name, columns in pairs(TABLES) do
  names[#names + 1] = name
  local list = {}
  for column in columns:gmatch "%S+" do list[#list + 1] = column end
  TABLES[name] = list
end
table.sort(names)
-- Commands read the table of steps most, so this table is drawn more often.
for _ = 1, 4 do names[#names + 1] = "steps" end

local VALUES = { "NULL", "'text'", "''", "x'00ff'", "zeroblob(300)", "-1", "0", "7", "-9e999",
  "9e999", "1e300", "0.5", "9223372036854775807", "-9223372036854775808", "4503599627370496",
  "1000000000000", "'%s%n'", "'nan'", "char(27, 10, 0)", "'{\"to\":5}'", "'[1,[2'",
  "x'020301fe01017f80'", "hex(zeroblob(5000))" }

-- CREATE TABLE without keys, by the table's name.
local keyless = {}
do
  local h = history.open(dir)
  for _, row in ipairs(h:query "SELECT name AS t, sql FROM sqlite_master WHERE type = 'table'") do
    keyless[row.t] = row.sql:gsub(", PRIMARY KEY%(.*$", ")"):gsub(" PRIMARY KEY", "")
      :gsub(" WITHOUT ROWID", "")
  end
  h:close()
end

local function statement()
  local name = one_of(names)
  local columns = TABLES[name]
  local where = one_of { "", " WHERE %s = (SELECT max(%s) FROM %s)", " WHERE %s || '' LIKE '%%7'",
    " WHERE %s = (SELECT min(%s) FROM %s)" }
  local key = columns[1]
  where = where:format(key, key, name)
  local kind = draw(12)
  if kind == 0 then return ("DELETE FROM %s%s"):format(name, where) end
  if kind == 1 and draw(3) == 0 then return "DROP TABLE " .. name end
  if kind == 2 and draw(3) == 0 then
    return ("ALTER TABLE %s RENAME TO t; CREATE VIEW %s AS SELECT * FROM t"):format(name, name)
  end
  if kind == 3 then     -- a copy without keys, whose columns can then be NULL or repeat
    return ("ALTER TABLE %s RENAME TO t; %s; INSERT INTO %s SELECT * FROM t; DROP TABLE t; UPDATE "
      .. "%s SET %s = %s%s"):format(name, keyless[name], name, name, columns[1 + draw(2)],
      one_of { "NULL", one_of(VALUES) }, where)
  end
  return ("UPDATE OR REPLACE %s SET %s = %s%s"):format(name, one_of(columns), one_of(VALUES), where)
end

-- Writes a damaged history and returns what was done.
local function damage()
  collectgarbage()                                   -- closes histories that commands left open
  collectgarbage()
  for _, tail in ipairs { "", "-wal", "-shm" } do os.remove(file .. tail) end
  if draw(5) == 0 then
    local bytes, done = intact, {}
    for _ = 0, draw(8) do
      local at = draw(#bytes - 100) + 101           -- past the header
      local byte = one_of { 0, 255, draw(256) }
      bytes = bytes:sub(1, at - 1) .. string.char(byte) .. bytes:sub(at + 1)
      done[#done + 1] = ("byte %d = %d"):format(at, byte)
    end
    helper.write(file, bytes)
    return table.concat(done, ", ")
  end
  helper.write(file, intact)
  local done = {}
  for i = 1, 1 + draw(3) do
    done[i] = statement()
    scratch.sqlite(file, done[i])
  end
  return table.concat(done, "; ")
end

-- ------------------------------------------------------------------ commands

local COMMANDS = {
  { "runs", root }, { "runs", root, "--json" },
  { "plot", dir }, { "plot", dir, "--columns", "amax,stored,underflow,norm_ref,signals.entropy" },
  { "plot", dir, "--columns", "fp8.snr,fp8.underflow,scales.blocks.1" },
  { "plot", dir, "--from", "100", "--to", "200", "--svg", root .. "/a.svg" },
  { "plot", dir, "--heatmap", "exponent" }, { "plot", dir, "--heatmap", "time" },
  { "report", dir, "-o", root .. "/a.html" },
  { "export", dir, "--csv", root .. "/a.csv", "--jsonl", root .. "/a.jsonl" },
  { "export", dir, "--tensorboard", root .. "/tb" },
  { "replay", dir, "--policy", "dynamic", "--policy", "max_value", "--policy", "layer_ladder" },
  { "attach", dir, "-e", "print(history) print(history:why(57))" },
  { "plot", dir, other, "--columns", "loss" },
  { "report", dir, other, "-o", root .. "/b.html" },
}
local METHODS = {
  "return tostring(h)", "return tostring(h:last())", "return h:why(7)", "return h:why(299)",
  "return tostring(h:tensors(7))", "return tostring(h:shadows())", "return tostring(h:signals())",
  "return tostring(h:fp8())", "return tostring(h:events())", "return tostring(h:overflows())",
  "return h:hist(7)", "return tostring(h:tensor('blocks.1.w'))", "return tostring(h:plot('loss'))",
  "return tostring(h:shadow('static'))", "return tostring(h:policies())", "return h:totals()",
  "local at = h:signals_at() for step = 0, 300 do at(step) end",
}

local function method(code)
  local h = history.open(dir)
  local good, message = pcall(assert(loadstring("local h = ... " .. code)), h)
  h:close()
  if not good then error(message, 0) end
end

local wrong, round_now = 0, first - 1
for round = first, first + rounds - 1 do
  draws.start(seed, round)
  local done = damage()
  local function report(what, problem)
    if problem then
      wrong = wrong + 1
      commands.print(("round %d: %s\n  after: %s\n  %s"):format(round, what, done, problem))
    end
  end
  for _, words in ipairs(COMMANDS) do
    local code
    report("engine " .. table.concat(words, " "), commands.problem_of(function()
      code = require("engine.cli." .. words[1]).main(unpack(words, 2))
    end) or words[3] == other and code ~= 0 and "it failed, but one of the runs is intact" or nil)
  end
  local words = COMMANDS[round % #COMMANDS + 1]
  report("engine " .. table.concat(words, " "), commands.problem_of_process(words))
  for _, code in ipairs(METHODS) do
    report(code, commands.problem_of(function() method(code) end))
  end
  round_now = round
  if C.eng_interrupted() ~= 0 or wrong >= 100 then break end
end

os.execute("rm -r " .. root)
commands.finish("histories", round_now - first + 1, wrong)
