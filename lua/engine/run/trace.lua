-- Reads the input of a replay: a string of outcomes such as "4. x 2. 3x" (. is a good step, x an
-- overflow, a number repeats the symbol after it), or the recorded history of a run. A trace gives
-- the record that a step would have had at any loss scale. Called by replay.lua and swap.lua.
--
-- A string of outcomes stands for one gradient. An x overflows at every scale. In a good step the
-- gradient has magnitude 1.
--
-- For a run, counterfactual.lua converts each recorded step to the policy's scale and says whether
-- the result is exact or a bound. The gradients are those of the recorded run.
local M_ffi = require "engine.base.ffi"
local counterfactual = require "engine.run.counterfactual"
local files = require "engine.base.file"
local histories = require "engine.run.history"

local C, ffi, fail_if = M_ffi.C, M_ffi.ffi, M_ffi.fail_if
local log2 = function(x) return math.log(x) / math.log(2) end

local M = {}

local MOST_STEPS = 5e6

-- ------------------------------------------------------------------ strings of outcomes

local Verdicts = {}
Verdicts.__index = Verdicts

--- True if `text` looks like a string of outcomes.
function M.is_verdicts(text) return text:find("[.xX]") ~= nil and not text:find("[^%d%s.xX]") end

--- Returns the trace of a string of outcomes such as "4. x 2. 3x".
function M.verdicts(text)
  local steps, at = {}, 1
  local function fail(what, place)
    M_ffi.fail("trace '%s': at character %d, %s; expected '.' (a good step) or 'x' (an " ..
      "overflow), with a count before it if it repeats, such as '3x'",
      #text > 60 and text:sub(1, 57) .. "..." or text, place, what)
  end
  while true do
    at = text:match("^%s*()", at)
    if at > #text then break end
    local count, kind, after = text:match("^(%d*)%s*([.xX]?)()", at)
    if kind == "" then
      if count ~= "" then fail("no symbol follows the number " .. count, at) end
      fail("got '" .. text:sub(at, at) .. "'", at)
    end
    local n = tonumber(count) or 1
    fail_if(#steps + n > MOST_STEPS, "the trace has more than %d steps", MOST_STEPS)
    for _ = 1, n do steps[#steps + 1] = kind ~= "." end
    at = after
  end
  fail_if(#steps == 0, "the trace is empty; expected steps such as '4. x 2. 3x'")
  return setmetatable({ n = #steps, overflow = steps, first = 0, name = text }, Verdicts)
end

-- Sets the norms of a record's update to NaN, because a trace does not have them.
local function without_update(record)
  for k = 0, C.ENG_NORMS - 1 do record.norms[k] = 0 / 0 end
end

--- Fills `record` with step i (from 1) at the loss scale `scale`. Returns "exact" (see Run:at).
function Verdicts:at(record, i, scale)
  local bad = self.overflow[i]
  ffi.fill(record, ffi.sizeof(record))
  without_update(record)
  record.step, record.scale, record.loss, record.lr, record.norm_ref, record.elapsed = i - 1, scale,
    1, 1, 0 / 0, i - 1
  record.count, record.inf, record.overflow, record.first_bad = 1, bad and 1 or 0, bad and 1 or 0,
    -1
  if not bad then
    record.amax, record.norm = 1, 1
    record.hist[math.max(0, math.min(C.ENG_HIST_BINS - 1,
      math.floor(log2(scale)) - C.ENG_HIST_FIRST))] = 1
  end
  return "exact"
end

-- ------------------------------------------------------------------ runs

local Run = {}
Run.__index = Run

-- FIELDS are the columns that are fields of a record. COLUMNS are all columns of numbers in a row.
local FIELDS, COLUMNS = {}, { "clip", "lr_mul" }
for _, name in ipairs(histories.step_names) do
  if ffi.offsetof("eng_record", name) then
    FIELDS[#FIELDS + 1], COLUMNS[#COLUMNS + 1] = name, name
  end
end
-- back, skip: of a rollback. A history does not hold `back`, and has `skip` only in an event.
local Row = ffi.typeof("struct { double " .. table.concat(COLUMNS, ", ") ..
  ", back, skip; int32_t action; }")
local Rows = ffi.typeof("$ [?]", Row)

--- Returns the trace of a run. path: the run's directory, or its history.db.
function M.run(path)
  local result, why = histories.with(path, function(history)
    local n = history:query("SELECT count(*) AS n FROM steps")[1].n
    fail_if(n == 0, "history %s has no steps to replay", history.path)
    local meta, config = history:meta(), history:config()   -- old histories lack meta.mode
    -- settled: the steps that began after the previous step's verdict even in lagged mode
    local self = setmetatable({ n = n, rows = Rows(n), hists = {}, name = path, settled = {},
      accumulate = tonumber(meta.accumulate or config.accumulate) or 1,
      lagged = (meta.mode or config.mode) == "lagged" }, Run)
    local i, skips, asked = 0, {}, {}        -- asked: the steps whose verdict was a rollback
    for _, event in ipairs(history:events "rollback") do
      local data = tostring(event.data)
      -- old histories lack `verdict`; their lagged rows have the action `rollback`
      local step = tonumber(data:match '"verdict": *(%d+)') or event.step - 1
      skips[step] = tonumber(data:match '"skip": *(%d+)')
      asked[step] = not self.lagged or data:find '"verdict"' ~= nil
    end
    for _, event in ipairs(history:events "rollback_refused") do asked[event.step] = true end
    self.asked = asked
    for row in history:each("SELECT " .. history:columns(COLUMNS) ..
      ", action, hist FROM steps ORDER BY step, attempt") do
      if i == n then break end                             -- the run is still writing
      local to = self.rows[i]
      for _, name in ipairs(COLUMNS) do to[name] = tonumber(row[name]) or 0 / 0 end
      to.back, to.skip = 0 / 0, skips[row.step] or 0 / 0
      to.action, self.hists[i + 1] = C.eng_action_from_name(tostring(row.action)), row.hist
      if self.lagged and to.action >= 0 then               -- old histories have what was asked
        asked[row.step] = asked[row.step] or to.action == C.ENG_ACTION_ROLLBACK
        to.action = to.overflow ~= 0 and C.ENG_ACTION_SKIP or C.ENG_ACTION_STEP
      end
      i = i + 1
    end
    self.n, self.first = i, tonumber(self.rows[0].step)
    self.parts, self.tensors = history:parts(), {}
    self.names = self.parts[1].parameters
    self.signals = {}  -- by row: the signals that changed there; a value holds until it changes
    local held, at = {}, history:signals_at()
    for k = 1, i do
      for name, value in pairs(at(tonumber(self.rows[k - 1].step))) do
        if held[name] ~= value and not name:find("^log%.") then   -- not the policy's logs
          held[name] = value
          self.signals[k] = self.signals[k] or {}
          self.signals[k][name] = value
        end
      end
    end
    for row in history:each("SELECT DISTINCT step FROM events WHERE kind IN ('checkpoint', " ..
      "'rollback', 'resumed')") do
      self.settled[row.step] = true
    end
    for row in history:each "SELECT step, stats FROM tensor_stats" do
      self.tensors[row.step] = row.stats
    end
    return self
  end)
  return result or error(why, 0)
end

local cell, room = ffi.new("eng_tensor_stats[1]"), ffi.new("int[1]")
local other = ffi.new("eng_tensor_stats[1]")
local AROUND = 64  -- steps on each side that are searched for a good step

-- Estimates the largest true gradient of step i: the geometric mean of the largest gradients of the
-- nearest good steps before and after it, or the one of these that is nearby. Returns nil if there
-- is no good step nearby.
function Run:expected(i)
  local function look(to, by)
    for j = i + by, to, by do
      local row, hist = self.rows[j - 1], self.hists[j]
      if row.overflow == 0 then
        local known = hist and C.eng_history_unpack(room, other, 1, hist, #hist) == 0
          and other[0].amax > 0
        return known and other[0].amax / row.scale or row.amax
      end
    end
  end
  local before, after = look(math.max(1, i - AROUND), -1), look(math.min(self.n, i + AROUND), 1)
  return before and after and math.sqrt(before * after) or before or after
end

-- Returns the statistics per tensor of a recorded step at `ratio` times its scale, or nil.
function Run:tensors_at(step, ratio)
  local blob, n = self.tensors[step], #self.names
  if not blob or n == 0 then return nil end
  self.stats = self.stats or ffi.new("eng_tensor_stats[?]", n)
  if C.eng_history_unpack(room, self.stats, n, blob, #blob) ~= 0 or room[0] ~= n then return nil end
  if ratio ~= 1 then
    local part = histories.part_at(self.parts, step)
    counterfactual.move_tensors(self.stats, n, ratio,
      function(k) return part.format_of[part.parameters[k].id] end)
  end
  return self.stats
end

-- Returns whether layers had separate scales at the last step with statistics per tensor.
local function has_own_scales(self)
  local last = -1
  for step in pairs(self.tensors) do last = math.max(last, tonumber(step) or -1) end
  local stats = self:tensors_at(last, 1)
  for k = 0, stats and #self.names - 1 or -1 do
    if stats[k].relative_scale ~= 0 and stats[k].relative_scale ~= 1 then return true end
  end
  return false
end

--- Fills `record` with step i (from 1) at the loss scale `scale`. Returns four values: the three of
--- counterfactual.move (how certain the record is, and two shares, which are nil without a
--- histogram), and the statistics per tensor, or nil.
function Run:at(record, i, scale, needs)
  local row, hist = self.rows[i - 1], self.hists[i]
  for _, name in ipairs(FIELDS) do record[name] = row[name] end
  without_update(record)
  hist = hist and C.eng_history_unpack(room, cell, 1, hist, #hist) == 0
  if hist then ffi.copy(record.hist, cell[0].hist, ffi.sizeof(record.hist))
  else ffi.fill(record.hist, ffi.sizeof(record.hist)) end
  record.amax_f16 = hist and cell[0].amax or 0               -- 0: unknown
  local ratio = scale / row.scale
  if self.apart == nil then self.apart = has_own_scales(self) end
  local known, elements, mass = counterfactual.move(record, scale, {
    format = histories.part_at(self.parts, tonumber(row.step)).format,
    accumulate = self.accumulate, needs = needs, hist = hist,
    around = function() return self:expected(i) end,
    reach = self.apart and record.amax_f16 * ratio or nil })
  local stats
  if bit.band(needs, C.ENG_NEED_TENSORS) ~= 0 then
    stats = self:tensors_at(tonumber(row.step), ratio)
    if not stats then known = "bound" end
  end
  return known, elements, mass, stats
end

--- Returns whether step i began before the verdict on step i - 1 was known.
function Run:early(i) return self.lagged and not self.settled[tonumber(self.rows[i - 1].step)] end

-- ------------------------------------------------------------------ opening

--- Opens a trace. text: a run's directory or history, the name of a run, or a string of outcomes.
function M.open(text)
  M_ffi.expect(type(text) == "string", text, "trace: expected a run or a string of outcomes")
  if files.exists(text .. "/history.db") then return M.run(text) end
  if files.exists("runs/" .. text .. "/history.db") then return M.run("runs/" .. text) end
  if M.is_verdicts(text) then return M.verdicts(text) end
  if files.is_file(text) then return M.run(text) end
  fail_if(files.is_folder(text), "%s holds no history.db; expected a run's directory or a " ..
    "string of outcomes such as '4. x 2. 3x'", text)
  if text:find("^[%d%s.xX]") and not text:find("/", 1, true) then return M.verdicts(text) end
  M_ffi.fail("there is no run '%s'; expected a run's directory or a string of outcomes such as " ..
    "'4. x 2. 3x'%s", text, require("engine.run.runs").hint(text))
end

return M
