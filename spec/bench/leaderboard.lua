-- The leaderboard: every policy that chooses a loss scale, on seven fp16 tasks, with their default
-- options. Each task is an `engine contest`; the results go to docs/leaderboard.md.
--   make leaderboard                              all tasks, 5 seeds; continues if interrupted
--   ./engine spec/bench/leaderboard.lua seeds=2 only=rl out=/tmp/rl.md
-- The runs stay in runs/leaderboard-TASK. A difference from `dynamic` is called lower or higher
-- only if its interval excludes 0 at a level of 95 % over all policies of the task (Bonferroni):
-- with 5 seeds and 44 policies, if it exceeds about 8 standard errors.
local engine = require "engine"
local helper = require "spec.helper"
local json = require "engine.base.json"
local lab = require "engine.report.lab"
local show = require "engine.base.show"
local statistics = require "engine.base.statistics"

local cfg = engine.config({ seeds = 5, only = "", policies = "", out = "docs/leaderboard.md" },
  { seeds = "runs of each policy", only = "one task; empty: all",
    policies = "a,b; empty: all that choose a loss scale", out = "the page to write" },
  { count = "seeds" })

local TEXT = "runs/leaderboard.txt"          -- a made-up language (report/lab.lua)
local GPT = "examples/gpt.lua layers=2 width=64 heads=4 batch=8 context=64 steps=480 sample=0 " ..
  "evaluate_every=480 data=" .. TEXT
local TASKS = {
  { name = "gpt", title = "A byte GPT", command = GPT,
    text = "Two layers of 64 features learn a made-up language, which the script writes." },
  { name = "gpt-high-lr", title = "The same GPT at a high learning rate",
    command = GPT .. " lr=1.2e-2", text = "Six times the rate: the seeds differ much more." },
  { name = "lora", title = "Low-rank adapters", command = "examples/lora.lua",
    text = "Adapters on a bf16 base; their gradients are tiny at first." },
  { name = "moe", title = "A mixture of experts", command = "examples/moe.lua",
    text = "One of eight experts has rare outliers that overflow." },
  { name = "dpo", title = "Preference optimization", command = "examples/dpo.lua",
    text = "The loss is a sum over sequences. The held-out loss falls the further the model " ..
      "moves from its reference, so it favours policies that change the size of updates." },
  { name = "poison", title = "A poisoned stream", command = "examples/bad_batch.lua",
    text = "Every 25th batch has wrong labels and features a thousand times too large. The " ..
      "held-out loss is that of clean batches." },
  { name = "rl", title = "REINFORCE", command = "examples/reinforce.lua evaluate_every=200",
    text = "One episode in 300 returns 500 times as much as the others. The held-out loss is " ..
      "minus the mean return." },
}

-- ------------------------------------------------------------------ statistics

-- The share of Student's t distribution with n degrees of freedom that lies beyond +-t, by
-- Simpson's rule over its density, with t = tan(angle) sqrt(n).
local function beyond(t, n)
  local from, steps = math.atan(t / math.sqrt(n)), 2000
  local function sum(a, b)
    local h, total = (b - a) / steps, 0
    for i = 0, steps do
      local weight = (i == 0 or i == steps) and 1 or i % 2 == 1 and 4 or 2
      total = total + weight * math.cos(a + i * h) ^ (n - 1)
    end
    return total * h / 3
  end
  return sum(from, math.pi / 2) / sum(0, math.pi / 2)
end

-- "lower", "higher", "equal" (all differences are 0), or "" if the mean difference is not
-- significant at 5 % over `among` comparisons.
local function verdict(d, among)
  if d.n < 2 then return "" end
  if d.spread == 0 then return d.mean < 0 and "lower" or d.mean > 0 and "higher" or "equal" end
  local t = math.abs(d.mean) / d.spread * math.sqrt(d.n)
  if beyond(t, d.n - 1) > 0.05 / among then return "" end
  return d.mean < 0 and "lower" or "higher"
end

-- ------------------------------------------------------------------ running

local function policies()
  local list = { "dynamic" }
  if cfg.policies ~= "" then
    for name in cfg.policies:gmatch("[^,]+") do
      if name ~= "dynamic" then list[#list + 1] = name end
    end
    return list
  end
  for _, name in ipairs(engine.policy.names()) do
    if name ~= "dynamic" then list[#list + 1] = name end
  end
  return list
end

-- Runs a task's contest; its progress goes to the terminal.
local function contest(task, list)
  local out = helper.folder()
  local words = { "./engine contest", task.command, "seeds=" .. cfg.seeds,
    "name=leaderboard-" .. task.name, "--json" }
  for _, policy in ipairs(list) do words[#words + 1] = "--policy " .. policy end
  local result = out .. "/results.json"
  local code = os.execute(table.concat(words, " ") .. " >" .. result)
  local text = helper.read(result)
  helper.remove(out)
  if text == "" then error(("%s: the contest ended with %d"):format(task.name, code / 256), 0) end
  return json.decode(text)
end

-- ------------------------------------------------------------------ the page

local WIDTH = 41            -- characters of a drawn interval; the middle one is 0

-- The interval of a difference on an axis from -limit to limit: "    |  --o--   ".
local function drawn(d, limit)
  local cells = {}
  local function place(x)
    return math.max(1, math.min(WIDTH, math.floor((x / limit + 1) / 2 * (WIDTH - 1) + 1.5)))
  end
  for i = 1, WIDTH do cells[i] = " " end
  cells[place(0)] = "|"
  for i = place(d.low), place(d.high) do cells[i] = "-" end
  cells[place(d.mean)] = "o"
  return (table.concat(cells):gsub("%s+$", ""))
end

local function number(n, factor)
  return n.n == 0 and "-" or statistics.text(n.mean * factor, n.spread * factor, n.n)
end

-- A difference from the JSON, or nil if it is missing, null or without pairs.
local function known(d) return type(d) == "table" and d.n and d or nil end

local function section(task, results, score)
  local lines = { "## " .. task.title, "", show.wrap(task.text, 100), "", "```text",
    (show.wrap(("./engine contest %s seeds=%d --policy dynamic --policy NAME"):format(task.command,
      cfg.seeds), 90):gsub("\n", " \\\n  ")), "```", "",
    "| policy | finished | held-out loss | beside dynamic | skipped | underflow % |",
    "| --- | --- | --- | --- | --- | --- |" }
  local rows, limits = {}, {}
  for _, row in ipairs(results.policies) do
    local d, finished = known(row.held_out.difference), 0
    for _, run in ipairs(row.runs) do
      if run.exit == 0 then finished = finished + 1 end
    end
    local word = d and verdict(d, #results.policies - 1) or ""
    if finished < cfg.seeds then word = ("%d failed"):format(cfg.seeds - finished) end
    score[row.policy] = score[row.policy] or { lower = 0, higher = 0, failed = 0 }
    local s = score[row.policy]
    s.lower = s.lower + (word == "lower" and 1 or 0)
    s.higher = s.higher + (word == "higher" and 1 or 0)
    s.failed = s.failed + cfg.seeds - finished
    rows[#rows + 1] = { row = row, d = d, word = word, finished = finished,
      mean = row.held_out.n > 0 and row.held_out.mean or math.huge }
    if d and d.n > 1 then
      limits[#limits + 1] = math.max(math.abs(d.low), math.abs(d.high))
    end
  end
  table.sort(rows, function(a, b)
    if a.mean ~= b.mean then return a.mean < b.mean end
    return a.row.policy < b.row.policy
  end)
  for _, r in ipairs(rows) do
    lines[#lines + 1] = ("| %s | %d of %d | %s | %s | %s | %s |"):format(r.row.policy, r.finished,
      cfg.seeds, number(r.row.held_out, 1), r.word, number(r.row.skipped, 1),
      number(r.row.underflow, 100))
  end
  table.sort(limits)
  local limit = limits[math.ceil(#limits * 0.8)]      -- a few wide intervals are cut off
  if limit and limit > 0 then
    lines[#lines + 1] = ""
    lines[#lines + 1] = "```text"
    lines[#lines + 1] = ("%-16s held-out loss minus that of dynamic, 95 %% interval, axis +-%.2g")
      :format("", limit)
    for _, r in ipairs(rows) do
      if r.d and r.d.n > 1 then
        lines[#lines + 1] = ("%-16s %s"):format(r.row.policy, drawn(r.d, limit))
      end
    end
    lines[#lines + 1] = "```"
  end
  lines[#lines + 1] = ""
  return table.concat(lines, "\n")
end

local function summary(score, list, tasks)
  local lines = { "| policy | tasks with a lower loss | with a higher loss | failed runs |",
    "| --- | --- | --- | --- |" }
  table.sort(list, function(a, b)
    local x, y = score[a], score[b]
    local by = { x.failed - y.failed, (x.higher - x.lower) - (y.higher - y.lower) }
    if by[1] ~= 0 then return by[1] < 0 end
    if by[2] ~= 0 then return by[2] < 0 end
    return a < b
  end)
  for _, name in ipairs(list) do
    local s = score[name]
    lines[#lines + 1] = ("| %s | %d of %d | %d of %d | %d of %d |"):format(name, s.lower, tasks,
      s.higher, tasks, s.failed, tasks * cfg.seeds)
  end
  return table.concat(lines, "\n")
end

local HEAD = [[
# Leaderboard: loss scalers on %d tasks

This page compares all policies that choose a loss scale, with their default options, in fp16 on a
CPU, with %d seeds for each task. `make leaderboard` repeats it. The same machine gives the same
numbers; another one, or another number of threads, gives other last digits.

Read it with care. The tasks are small so that anyone can repeat them, and a policy made for one
kind of trouble gains nothing where that trouble is absent. The summary counts only differences from
`dynamic`, with the same seeds, that are beyond noise: their interval excludes 0 at a level of 95 %%
over all %d policies of the task together. An empty field "beside dynamic" means that these seeds
show no difference, whatever the means look like; "equal" means the same losses for all seeds. A
drawn interval (`o`: the mean, `|`: 0) is that of one policy alone, so it may miss 0 where the field
is empty. `+-` is the standard deviation over the seeds; [Contests](contests.md) explains the rest.

A scaler cannot train better than a run without overflow and underflow. If a policy has a lower
loss, look for the cause in its other effects: it may clip gradients, skip steps or lower the
learning rate. `qk_clip` refuses tasks without attention, or with adapters on it: these runs count
as failed.

## Summary

%s

]]

helper.shell("mkdir -p runs")
helper.write(TEXT, lab.text(200000, 1))
local list, score, sections = policies(), {}, {}
for _, task in ipairs(TASKS) do
  if cfg.only == "" or cfg.only == task.name then
    sections[#sections + 1] = section(task, contest(task, list), score)
  end
end
if #sections == 0 then engine.config.fail("only: there is no task '%s'", cfg.only) end
helper.write(cfg.out, HEAD:format(#sections, cfg.seeds, #list, summary(score, list, #sections))
  .. table.concat(sections, "\n"))
print(cfg.out)
