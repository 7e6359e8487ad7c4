-- Random runs with an inf or a NaN in one rank's gradient: all ranks must skip the step.
--   ./engine spec/dist/plantings.lua [runs=1000] [ranks=2,3,4] [seed=1] [only=NUMBER]
-- Each run draws the number of ranks, the rank, the parameter, the element (and so the bucket and
-- the shard), the step, the micro-batch, the ZeRO stage (0 to 3), the comm dtype, the precision,
-- the optimizer, the policy and the shape of the model (planting.lua). Checks of each run:
--   - all ranks report the same loss, scale, verdict and weights' checksum for every step, and
--     hold the same policy state
--   - the planted step changes no weight, and no other step overflows
--   - one process with the batches of all ranks gives the same verdicts and, where the policy
--     only counts overflows, the same scales; losses within 1e-5 in fp32 (see NEAR); equal
--     weights where the order of sums is the same: two ranks with one micro-batch each, fp32,
--     no tied weights
--   - the history, written by rank 0, has that one overflow and names the rank, the tensor, and
--     inf or nan
-- A policy that drives the scale to the top of fp16 may overflow in other steps, too; a run with
-- such a policy is not compared with one process. Many runs share one start of mpirun. Prints a
-- summary; each failed run is printed with the command that repeats it, and the exit code is 1.
local engine = require "engine"
local helper = require "spec.helper"
local json = require "engine.base.json"
local start = require "spec.dist.start"

local cfg = engine.config { runs = 1000, ranks = "2,3,4", seed = 1, only = 0, limit = 3000 }
if not start.there then
  io.stderr:write("there is no mpirun here, or this build has no MPI\n")
  os.exit(1)
end

-- ------------------------------------------------------------------ what the ranks wrote

local function lines_of(path)
  local by_number = {}
  local file = assert(io.open(path))
  for line in file:lines() do
    local entry = json.decode(line)
    by_number[entry.number] = entry
  end
  file:close()
  return by_number
end

-- Allowed relative differences of losses. 1e-5 in fp32, except where an optimizer divides by the
-- gradient's magnitude: a gradient that is pure rounding error (the bias of keys) then moves its
-- weight by a full step whose direction depends on the order of sums.
local NEAR = { sgd = 1e-5, others = 1e-4 }
local COARSE = 0.05        -- for formats in which sums are rounded

local function same_rows(a, b)
  if #a.rows ~= #b.rows then return ("%d steps against %d"):format(#a.rows, #b.rows) end
  for i, row in ipairs(a.rows) do
    for key, value in pairs(row) do
      if b.rows[i][key] ~= value then
        return ("step %d: %s %s against %s"):format(row.step, key, tostring(value),
          tostring(b.rows[i][key]))
      end
    end
  end
  for _, key in ipairs { "state", "updates", "tensor", "element", "failed", "stopped" } do
    if a[key] ~= b[key] then
      return ("%s: %s against %s"):format(key, tostring(a[key]), tostring(b[key]))
    end
  end
end

local counting = {}
for _, name in ipairs(engine.policy.names()) do
  counting[name] = engine.policy.load(name).needs == 0
end
counting.again, counting.lr_coupled = true, nil

local function exact_sums(p)
  return p.precision == "fp32" and (p.wire == "own" or p.wire == "fp32")
end
-- Policies that drive the scale to the top of fp16 may overflow without planting, at a step that
-- depends on rounding.
local function reaching(p) return p.precision == "fp16" and not counting[p.policy] end

local farthest = {}  -- by optimizer: the largest relative difference of a loss where sums are exact

-- Returns how the ranks' run differs from the run of one process, or nil, and whether they were
-- compared bit for bit.
local function against_one(run, one)
  local p = run.plan
  if reaching(p) then return nil end
  if #run.rows ~= #one.rows then
    return ("%d steps, one process makes %d"):format(#run.rows, #one.rows)
  end
  local exact = exact_sums(p)
  local bits = exact and p.ranks == 2 and p.accumulate == 1 and not p.tied
  for i, a in ipairs(run.rows) do
    local b = one.rows[i]
    local x, y = tonumber(a.loss), tonumber(b.loss)
    local apart = math.abs(x - y) / math.abs(y)
    if a.action ~= b.action then
      return ("step %d: %s, one process: %s"):format(a.step, a.action, b.action)
    end
    if counting[p.policy] and a.scale ~= b.scale then
      return ("step %d: scale %s, one process: %s"):format(a.step, a.scale, b.scale)
    end
    if exact then farthest[p.optimizer] = math.max(farthest[p.optimizer] or 0, apart) end
    if not (apart <= (exact and (NEAR[p.optimizer] or NEAR.others) or COARSE)) then
      return ("step %d: loss %s, one process: %s"):format(a.step, a.loss, b.loss)
    end
    if bits and a.weights ~= b.weights then
      return ("step %d: weights %s, one process: %s"):format(a.step, a.weights, b.weights)
    end
  end
  return nil, bits
end

-- Returns what is wrong with the run as one rank saw it, or nil.
local function wrong(run)
  local p, before = run.plan, nil
  if run.failed ~= 0 then return "the policy failed" end
  if run.stopped ~= nil then return "stopped: " .. tostring(run.stopped) end
  if #run.rows ~= p.steps then return ("%d steps, expected %d"):format(#run.rows, p.steps) end
  for _, row in ipairs(run.rows) do
    local planted = row.step == p.step
    if row.overflow ~= planted and not (row.overflow and reaching(p)) then
      return ("step %d: overflow is %s"):format(row.step, tostring(row.overflow))
    end
    if row.overflow and (row.action == "step" or before and row.weights ~= before) then
      return ("step %d: %s, and the weights changed"):format(row.step, row.action)
    end
    if not row.overflow and row.action ~= "step" then
      return ("step %d: %s without an overflow"):format(row.step, row.action)
    end
    before = row.weights
  end
end

local function wrong_history(run)
  local p, overflows, event = run.plan, 0, nil
  for _, row in ipairs(run.rows) do overflows = overflows + (row.overflow and 1 or 0) end
  if #run.events ~= overflows then
    return ("the history has %d overflows, there were %d"):format(#run.events, overflows)
  end
  for _, e in ipairs(run.events) do
    if e.step == p.step then event = e end
  end
  if not event then return ("the history has no overflow at step %d"):format(p.step) end
  local kind = p.kind == "nan" and "nan" or "inf"
  local text = ("%s from rank %d, first in %s"):format(kind, p.rank, run.tensor)
  if not event.text:find(text, 1, true) then
    return ("the history says '%s', expected '%s'"):format(event.text, text)
  end
  local culprits = json.decode(event.data).ranks
  if #culprits ~= 1 and not reaching(p) then
    return "the history names other ranks, too: " .. event.data
  end
end

-- ------------------------------------------------------------------ the campaign

local folder = helper.folder()
local settings = { "seed=" .. cfg.seed, "runs=" .. cfg.runs, "only=" .. cfg.only,
  "ranks=" .. cfg.ranks, "folder=" .. folder }
local function launch(n, out, ...)
  local words = { "out=" .. out, ... }
  for _, setting in ipairs(settings) do words[#words + 1] = setting end
  local result = start.run(n, "spec/dist/planting.lua", words, { limit = cfg.limit })
  if result.code == 0 then return end
  io.stderr:write(("%d ranks ended with code %d:\n%s\n%s"):format(n, result.code, result.out,
    result.err))
  helper.remove(folder)
  os.exit(1)
end

local seen, failures, bits = {}, {}, 0
local function note(what, value)
  seen[what] = seen[what] or {}
  seen[what][value] = (seen[what][value] or 0) + 1
end

local began = os.time()
launch(0, folder .. "/one", "alone=1")
local one, made = lines_of(folder .. "/one.0"), 0
for size in cfg.ranks:gmatch("%d+") do
  local n, by_rank = tonumber(size), {}
  launch(n, folder .. "/of" .. n)
  for rank = 0, n - 1 do by_rank[rank] = lines_of(("%s/of%d.%d"):format(folder, n, rank)) end
  for number, first in pairs(by_rank[0]) do
    local problem = wrong(first) or wrong_history(first)
    for rank = 1, n - 1 do
      local difference = by_rank[rank][number] and same_rows(first, by_rank[rank][number])
        or not by_rank[rank][number] and "nothing" or nil
      problem = problem or difference and ("rank 0 and rank %d differ: %s"):format(rank, difference)
    end
    local difference, exact = against_one(first, one[number])
    problem = problem or difference
    bits = bits + (exact and 1 or 0)
    if problem then
      failures[#failures + 1] = { number = number, problem = problem, plan = first.plan,
        tensor = first.tensor, element = first.element }
    end
    made = made + 1
    for _, what in ipairs { "ranks", "kind", "rank", "wire", "zero", "precision", "policy",
      "accumulate", "micro", "step", "optimizer" } do
      note(what, tostring(first.plan[what]))
    end
    note("tensor", first.tensor)
  end
end
helper.remove(folder)

-- ------------------------------------------------------------------ results

table.sort(failures, function(a, b) return a.number < b.number end)
for i, f in ipairs(failures) do
  if i > 20 then break end
  local p = f.plan
  p.given = nil
  io.stderr:write(("run %d: %s\n  %s in %s[%d]: %s\n  repeat: ./engine spec/dist/plantings.lua " ..
    "seed=%d runs=%d ranks=%s only=%d\n"):format(f.number, f.problem, p.kind,
    f.tensor, f.element, json.encode(p), cfg.seed, cfg.runs, cfg.ranks, f.number))
end
for _, what in ipairs { "ranks", "rank", "kind", "wire", "zero", "precision", "optimizer",
  "accumulate", "micro", "step" } do
  local parts = {}
  for value, count in pairs(seen[what] or {}) do
    parts[#parts + 1] = ("%s: %d"):format(value, count)
  end
  table.sort(parts)
  print(("  %-10s %s"):format(what, table.concat(parts, ", ")))
end
local function kinds(what)
  local n = 0
  for _ in pairs(seen[what] or {}) do n = n + 1 end
  return n
end
local parts = {}
for optimizer, apart in pairs(farthest) do
  parts[#parts + 1] = ("%s %.1e"):format(optimizer, apart)
end
table.sort(parts)
print("  largest relative difference of a loss from one process, f32 sums: "
  .. table.concat(parts, ", "))
print(("%d runs, %d failed: %d policies, %d tensors, %d runs compared bit for bit with one " ..
  "process; seed %d, %d s"):format(made, #failures, kinds "policy",
  kinds "tensor", bits, cfg.seed, os.time() - began))
if #failures > 0 or made == 0 or cfg.only == 0 and made ~= cfg.runs then os.exit(1) end
