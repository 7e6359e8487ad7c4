-- The input of a replay: a string of verdicts such as "4. x 2. 3x" (. is a good step, x an
-- overflow, a number repeats what follows it), or the recorded history of a run. A trace gives the
-- record that a step would have had at any loss scale. Called by replay.lua and tune.lua.
--
-- In a string of verdicts, an overflow happens at every scale, and gradients all have magnitude 1.
--
-- For a run, the record at another scale follows from the largest gradient and the exponent
-- histogram. It is exact, or it is bounded by the record and estimated within the bound:
--   recorded without overflow  At a smaller scale there is no overflow (exact). At a larger scale
--                              there is one if the largest fp16 gradient passes the largest fp16
--                              number (exact); otherwise none is assumed (bound: an intermediate
--                              result of the backward pass may have overflowed).
--   recorded with overflow     At a larger scale, or if the loss was inf or nan, there is one
--                              (exact). At a smaller scale (bound) the largest gradients of the
--                              good steps nearby decide, if they explain the recorded overflow;
--                              otherwise the histogram's tail, extrapolated. If the finite
--                              gradients end six binades or more below the largest fp16 number,
--                              the scale was not the cause, and there is one.
-- With accumulate > 1 the record describes the sum of the micro-batches' fp16 gradients. Its
-- largest element stands for that of a micro-batch.
-- The gradients are those of the recorded run; how other updates would have changed them is
-- unknown.
local M_ffi = require "engine.base.ffi"
local files = require "engine.base.file"
local formats = require "engine.base.formats"

local C, ffi = M_ffi.C, M_ffi.ffi
local log2 = function(x) return math.log(x) / math.log(2) end

local M = {}

local MOST_STEPS = 5e6

-- ------------------------------------------------------------------ strings of verdicts

local Verdicts = {}
Verdicts.__index = Verdicts

--- True if `text` looks like a string of verdicts.
function M.is_verdicts(text) return text:find("[.xX]") ~= nil and not text:find("[^%d%s.xX]") end

--- A trace from "4. x 2. 3x".
function M.verdicts(text)
  local steps, at = {}, 1
  local function fail(what, place)
    error(("trace '%s': %s at character %d; expected . for a good step, x for an overflow, and " ..
      "a number before them to repeat"):format(
      #text > 60 and text:sub(1, 57) .. "..." or text, what, place), 0)
  end
  while true do
    at = text:match("^%s*()", at)
    if at > #text then break end
    local count, kind, after = text:match("^(%d*)%s*([.xX]?)()", at)
    if kind == "" then
      if count ~= "" then fail("the number " .. count .. " repeats nothing", at) end
      fail("'" .. text:sub(at, at) .. "'", at)
    end
    local n = tonumber(count) or 1
    if #steps + n > MOST_STEPS then fail(("more than %d steps"):format(MOST_STEPS), at) end
    for _ = 1, n do steps[#steps + 1] = kind ~= "." end
    at = after
  end
  if #steps == 0 then error("the trace is empty; expected steps such as '4. x 2. 3x'", 0) end
  return setmetatable({ n = #steps, overflow = steps, first = 0, name = text }, Verdicts)
end

--- Fills `record` with step i (from 1) at the loss scale `scale`.
function Verdicts:at(record, i, scale)
  local bad = self.overflow[i]
  ffi.fill(record, ffi.sizeof(record))
  record.step, record.scale, record.loss, record.lr, record.norm_ref, record.elapsed = i - 1, scale,
    1, 1, 0 / 0, i - 1
  record.count, record.inf, record.overflow, record.first_bad = 1, bad and 1 or 0, bad and 1 or 0,
    -1
  if not bad then
    record.amax, record.norm = 1, 1
    record.hist[math.max(0, math.min(C.ENG_HIST_BINS - 1,
      math.floor(log2(scale)) - C.ENG_HIST_FIRST))] = 1
  end
  return true
end

-- ------------------------------------------------------------------ another scale

local BINS, FIRST = C.ENG_HIST_BINS, C.ENG_HIST_FIRST
local shifted = ffi.new("int64_t[?]", BINS)

-- Changes the statistics of gradients stored at one scale to those at `ratio` times that scale;
-- `over`: whether some overflow then. Returns the share of nonzero elements that underflow (below
-- the smallest normal number) and the share of the sum of magnitudes lost: all of each element that
-- becomes zero, and the mean rounding error, half a spacing, of each that becomes subnormal.
local function restate(s, ratio, over, format)
  local shift = log2(ratio)
  local whole = math.floor(shift + 1e-9)
  local part = shift - whole
  if part < 1e-9 then part = 0 end
  local mass, lost, kept, tiny, zeros, inf, removed, top = 0, 0, 0, 0, 0, 0, 0, nil
  ffi.fill(shifted, ffi.sizeof(shifted))

  local function put(from, e, count)
    if count == 0 then return end
    local magnitude = 1.5 * 2 ^ e
    mass = mass + count * magnitude
    if from <= format.top and e > format.top then
      if over then
        inf, removed = inf + count, removed + count * 7 / 3 * 4 ^ e
        return
      end
      e = format.top
    end
    if e < format.zero then
      zeros, lost = zeros + count, lost + count * magnitude
      return
    end
    if e == format.zero then e = e + 1 end
    if e < format.normal then tiny, lost = tiny + count, lost + count * 2 ^ (format.zero - 1) end
    kept = kept + count
    local b = math.max(0, math.min(BINS - 1, e - FIRST))
    shifted[b] = shifted[b] + count
    if not top or e > top then top = e end
  end

  for b = 0, BINS - 1 do
    local count = tonumber(s.hist[b])
    if count ~= 0 then
      local e = b + FIRST
      local above = math.floor(count * part + 0.5)  -- the part that passes into the next binade
      put(e, e + whole, count - above)
      put(e, e + whole + 1, above)
    end
  end
  -- overflowed elements, at the smallest magnitude they can have had
  if s.inf + s.nan > 0 and not over then
    local bad = tonumber(s.inf + s.nan)
    s.inf, s.nan = 0, 0
    s.amax = math.max(s.amax, format.limit)
    s.sum_squares = s.sum_squares + bad * format.limit ^ 2
    put(format.top, math.min(format.top, math.floor(log2(format.limit * ratio))), bad)
  elseif over and inf == 0 and s.inf + s.nan == 0 then
    inf = 1
    if top then shifted[top - FIRST] = shifted[top - FIRST] - 1 end
  end
  s.amax = inf > 0 and top and 1.5 * 2 ^ top or math.min(s.amax * ratio, inf > 0 and 0 or math.huge)
  s.sum_squares = math.max(s.sum_squares * ratio * ratio - removed, 0)
  s.inf = s.inf + inf
  s.zeros = s.zeros + zeros
  s.underflow = tiny
  ffi.copy(s.hist, shifted, ffi.sizeof(shifted))
  local nonzero = kept + zeros + inf
  return nonzero > 0 and (tiny + zeros) / nonzero or 0, mass > 0 and lost / mass or 0
end

-- True if there are nonzero elements below the smallest normal number, at the recorded scale.
local function has_tiny(s, format)
  for b = 0, math.min(BINS, format.normal - FIRST) - 1 do
    if s.hist[b] ~= 0 then return true end
  end
  return false
end

-- True if gradients that overflowed at a scale still do at `ratio` < 1 times it. `around`: the
-- largest gradient of nearby steps times that scale, or nil.
local function still_overflows(s, amax, ratio, format, around)
  if amax < format.limit * 2 ^ -6 then return true end
  if around and around >= format.limit / 2 then return around * ratio >= format.limit end
  local bad = tonumber(s.inf)
  if bad == 0 then return false end
  -- log2 of the number of elements above 2^k for the last three known k, extrapolated as a parabola
  local above0 = log2(bad)
  local above1 = log2(bad + tonumber(s.hist[format.top - FIRST]))
  local above2 = log2(2 ^ above1 + tonumber(s.hist[format.top - 1 - FIRST]))
  local slope, bend = above1 - above0, math.max(0, 2 * above1 - above0 - above2)
  local k = -log2(ratio)
  -- an expected count of ln 2: as likely as not
  return above0 - slope * k - bend * k * (k + 1) / 2 >= -0.5
end

-- ------------------------------------------------------------------ runs

local Run = {}
Run.__index = Run

local Row = ffi.typeof [[struct {
  double step, scale, loss, lr, amax, norm, norm_ref, elapsed, count, inf, nan, zeros;
  double underflow, updates;
  int32_t overflow, first_bad, applied; }]]
local Rows = ffi.typeof("$ [?]", Row)

local COLUMNS = { "step", "scale", "loss", "lr", "amax", "norm", "norm_ref", "elapsed", "count",
  "inf", "nan", "zeros", "underflow",
  "updates", "overflow", "first_bad" }

--- The trace of a run: its directory, or its history.db.
function M.run(path)
  local history = require("engine.run.history").open(path)
  local good, result = pcall(function()
    local n = history:query("SELECT count(*) AS n FROM steps")[1].n
    if n == 0 then error(("%s has no steps"):format(history.path), 0) end
    local format = formats.of(history:meta().gradients) or formats.of "f16"
    local self = setmetatable({ n = n, rows = Rows(n), hists = {}, format = format, name = path },
      Run)
    local i = 0
    for row in history:each("SELECT " .. table.concat(COLUMNS, ", ") ..
      ", action = 'step' AS applied, hist FROM steps ORDER BY step, attempt") do
      if i == n then break end                             -- the run is still writing
      local to = self.rows[i]
      for _, name in ipairs(COLUMNS) do to[name] = tonumber(row[name]) or 0 / 0 end
      to.applied, self.hists[i + 1] = row.applied or 0, row.hist
      i = i + 1
    end
    self.n, self.first = i, tonumber(self.rows[0].step)
    self.names, self.tensors = {}, {}
    for k, p in ipairs(history:parameters()) do self.names[k] = p end
    self.signals = {}  -- by row: the signals that changed there; they hold until they change again
    local held, at = {}, history:signals_at()
    for k = 1, i do
      for name, value in pairs(at(tonumber(self.rows[k - 1].step))) do
        if held[name] ~= value then
          held[name] = value
          self.signals[k] = self.signals[k] or {}
          self.signals[k][name] = value
        end
      end
    end
    for row in history:each "SELECT step, stats FROM tensor_stats" do
      self.tensors[row.step] = row.stats
    end
    return self
  end)
  history:close()
  if not good then error(result, 0) end
  return result
end

local cell, room = ffi.new("eng_tensor_stats[1]"), ffi.new("int[1]")
local other = ffi.new("eng_tensor_stats[1]")
local AROUND = 64  -- how many steps before and after are searched for a good one

-- The largest true gradient of the good steps next to step i, or nil.
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

-- Statistics per tensor of a recorded step at `ratio` times its scale, or nil.
function Run:tensors_at(step, ratio)
  local blob = self.tensors[step]
  if not blob or #self.names == 0 then return nil end
  self.stats = self.stats or ffi.new("eng_tensor_stats[?]", #self.names)
  if C.eng_history_unpack(room, self.stats, #self.names, blob, #blob) ~= 0
    or room[0] ~= #self.names then
    return nil
  end
  if ratio ~= 1 then
    for k = 0, #self.names - 1 do
      local s = self.stats[k]
      local over = s.amax < self.format.limit and s.amax * ratio >= self.format.limit
        or (s.inf + s.nan > 0 and (ratio > 1 or still_overflows(s, s.amax, ratio, self.format)))
      restate(s, ratio, over, self.format)
    end
  end
  return self.stats
end

--- Fills `record` with step i (from 1) at the loss scale `scale`. Returns whether everything in
--- `needs` (ENG_NEED_*) is exact; the shares of elements and of gradient mass lost to underflow,
--- nil without a histogram; and the statistics per tensor, or nil.
function Run:at(record, i, scale, needs)
  local row, hist, format, s = self.rows[i - 1], self.hists[i], self.format, cell[0]
  local ratio = scale / row.scale
  if hist then
    if C.eng_history_unpack(room, cell, 1, hist, #hist) ~= 0 then hist = nil end
  end
  if not hist then ffi.fill(cell, ffi.sizeof(cell)) end
  -- The largest fp16 gradient as stored; -1: none are fp16; 0: unknown, and all are assumed to be
  -- fp16.
  local amax_f16 = s.amax
  local known = amax_f16 ~= 0
  local stored = row.amax * row.scale
  local amax = known and amax_f16 > 0 and amax_f16 or stored
  s.count, s.inf, s.nan, s.zeros, s.underflow = row.count, row.inf, row.nan, row.zeros,
    row.underflow
  s.amax, s.sum_squares = stored, (row.norm * row.scale) ^ 2
  local had, over = row.overflow ~= 0, row.overflow ~= 0
  local exact, exact_sizes, exact_counts = true, true, true
  if ratio ~= 1 then
    if had then
      local hopeless = row.loss - row.loss ~= 0
      if ratio < 1 and not hopeless then
        local around = self:expected(i)
        over = still_overflows(s, amax, ratio, format, around and around * row.scale)
        exact = false
      end
      exact_sizes = false
    else
      over = amax < format.limit and amax * ratio >= format.limit
      exact = ratio < 1 or over
      exact_sizes = not over
    end
    local power = log2(ratio)
    exact_counts = hist ~= nil and not had and not over
      and math.abs(power - math.floor(power + 0.5)) < 1e-9 and not has_tiny(s, format)
      and (ratio < 1 or row.zeros == 0)
  end
  local elements, mass
  if hist or ratio ~= 1 then elements, mass = restate(s, ratio, over, format) end
  if ratio ~= 1 and exact_counts then exact_counts = not has_tiny(s, format) end
  if not hist then
    elements, mass = nil, nil
    if ratio == 1 then s.underflow = row.underflow end
  end

  record.step, record.scale, record.loss, record.lr, record.norm_ref, record.elapsed = row.step,
    scale, row.loss, row.lr, row.norm_ref, row.elapsed
  record.count, record.inf, record.nan, record.zeros, record.underflow = row.count, s.inf, s.nan,
    s.zeros, s.underflow
  if ratio == 1 then record.underflow = row.underflow end
  record.amax, record.norm = ratio == 1 and row.amax or s.amax / scale, ratio == 1 and row.norm
    or math.sqrt(s.sum_squares) / scale
  record.overflow, record.first_bad = over and 1 or 0, over and had and row.first_bad or -1
  ffi.copy(record.hist, s.hist, ffi.sizeof(record.hist))

  local stats
  if bit.band(needs, C.ENG_NEED_TENSORS) ~= 0 then
    stats = self:tensors_at(tonumber(row.step), ratio)
    exact = exact and stats ~= nil and ratio == 1
  end
  if bit.band(needs, C.ENG_NEED_AMAX + C.ENG_NEED_NORM) ~= 0 then exact = exact and exact_sizes end
  if bit.band(needs, C.ENG_NEED_ZEROS + C.ENG_NEED_UNDERFLOW + C.ENG_NEED_HIST) ~= 0 then
    exact = exact and exact_counts
  end
  return exact, elements, mass, stats
end

-- ------------------------------------------------------------------ either

--- A trace from text: a run's directory or history, the name of a run, or a string of verdicts.
function M.open(text)
  if files.exists(text .. "/history.db") then return M.run(text) end
  if M.is_verdicts(text) then return M.verdicts(text) end
  if files.is_folder(text) then
    error(("%s holds no history.db; expected a run's directory or a string of verdicts such as " ..
      "'4. x 2. 3x'"):format(text), 0)
  end
  if files.exists(text) then return M.run(text) end
  if files.exists("runs/" .. text .. "/history.db") then return M.run("runs/" .. text) end
  if text:find("^[%d%s.xX]") and not text:find("/", 1, true) then return M.verdicts(text) end
  error(("there is no run '%s'; expected a run's directory or a string of verdicts such as '4. " ..
    "x 2. 3x'%s"):format(text, require("engine.run.runs").hint(text)), 0)
end

return M
