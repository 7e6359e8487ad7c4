-- Computes the record that a step would have had at another loss scale. Shadows and replayed
-- policies read this record. Called by shadow.lua (live records), trace.lua (recorded ones), the
-- replays, cli/replay.lua and cli/tune.lua.
--
-- A record has the largest fp16 gradient as it was stored, the exponent histogram, and whether any
-- gradient was inf or nan. It says nothing about the intermediate results of the backward pass,
-- except that their inf and nan spread to the gradients of parameters. Therefore the answer to
-- whether a step overflows at `ratio` times its scale is exact, a bound (an estimate) or "hidden"
-- (explained below):
--   If the step did not overflow:
--     ratio <= 1   No overflow; exact, because no magnitude of the backward pass is larger.
--     ratio > 1    Let m be the largest fp16 gradient times `ratio`. If m is 65520 or more, which
--                  rounds past the largest fp16 number, the step overflows. This is exact if
--                  accumulate = 1. With accumulate > 1, the record describes the f32 sum of the
--                  micro-batches' gradients. The overflow is then exact only if m is accumulate *
--                  65520 or more, so that some micro-batch must overflow; otherwise it is a bound.
--                  If m is less than 65520, no overflow is assumed. This result is called "hidden",
--                  because an intermediate result may overflow where no parameter's gradient does.
--                  (If no gradient is fp16, m is the largest gradient, and the limit is that of the
--                  gradients' format.)
--   If the step overflowed:
--     ratio >= 1   An overflow; exact. A loss of inf or nan gives the same result at any ratio.
--     ratio < 1    A bound, because the true magnitude behind an inf is unknown. If the finite
--                  gradients end six binades or more below the largest fp16 number, the scale was
--                  not the cause, and the overflow remains. Otherwise the largest gradients of the
--                  good steps nearby decide, if they explain the recorded overflow. If they do not,
--                  the extrapolated tail of the histogram decides.
-- A result may be only a bound in four more cases:
--   - an overflow is predicted from a subnormal largest gradient;
--   - the ratio is not a power of two, so that the two scales round differently, and either a
--     magnitude is within 1/64 of the limit or the ratio is within 1/64 of 1;
--   - layers have separate scales that differ from the run's by different factors;
--   - the history is too old to tell fp16 gradients from others.
--
-- A policy may read more than the overflow. amax is exact if the ratio is a power of two and the
-- step overflows at neither scale. norm and counts are exact if, in addition, a histogram shows
-- that no gradient is subnormal or lost at either scale. The statistics of single tensors are
-- estimates.
--
-- M.judge decides whether the policy's verdicts are exact. A verdict is exact only as long as the
-- policy would have had the run's weights and batches, that is, while all verdicts so far are exact
-- and made the same updates. From the first step at which this fails, every verdict is a bound.
-- Rounding and underflow also differ between scales. These differences do not make a verdict a
-- bound, but a replay prints the underflow.
local M_ffi = require "engine.base.ffi"

local C, ffi = M_ffi.C, M_ffi.ffi
local log2 = function(x) return math.log(x) / math.log(2) end

local M = {}

local MARGIN = 1 / 64
local BINS, FIRST = C.ENG_HIST_BINS, C.ENG_HIST_FIRST

-- ------------------------------------------------------------------ statistics at another scale

local shifted = ffi.new("int64_t[?]", BINS)

-- Converts s, the statistics of gradients as stored at a scale, to `ratio` times that scale. over:
-- whether gradients overflow at the new scale. format: the format of the gradients (formats.of).
-- Returns the share of nonzero elements that underflow (fall below the smallest normal number), and
-- the share of the gradient mass (the sum of magnitudes) that is lost. An element that becomes zero
-- loses its whole magnitude. An element that becomes subnormal loses the mean rounding error, a
-- quarter of the spacing.
local function restate(s, ratio, over, format)
  local shift = log2(ratio)
  local whole = math.floor(shift + 1e-9)
  local part = shift - whole
  if part < 1e-9 then part = 0 end
  local mass, lost, kept, tiny, zeros, inf, removed, top = 0, 0, 0, 0, 0, 0, 0, nil
  ffi.fill(shifted, ffi.sizeof(shifted))

  -- Adds `count` elements whose exponent was `from` and is e at the new scale. Assumes that they
  -- are spread evenly over [2^e, 2^(e + 1)): their mean is 1.5 * 2^e, their mean square 7/3 * 4^e.
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
      local above = math.floor(count * part + 0.5)  -- elements that pass into the next binade
      put(e, e + whole, count - above)
      put(e, e + whole + 1, above)
    end
  end
  -- assumes that overflowed elements had the smallest magnitude that overflows
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

-- True if s.hist has nonzero elements below the format's smallest normal number.
local function has_tiny(s, format)
  for b = 0, math.min(BINS, format.normal - FIRST) - 1 do
    if s.hist[b] ~= 0 then return true end
  end
  return false
end

-- True if gradients that overflowed at a scale still overflow at that scale times `ratio` < 1. s:
-- the statistics of these gradients as stored. amax: the largest finite gradient as stored. format:
-- the gradients' format. around: the largest gradient of nearby good steps times the recorded
-- scale, or nil.
local function still_overflows(s, amax, ratio, format, around)
  if amax < format.limit * 2 ^ -6 then return true end
  if around and around >= format.limit / 2 then return around * ratio >= format.limit end
  local bad = tonumber(s.inf)
  if bad == 0 then return false end
  -- above0, above1, above2: log2 of the number of elements beyond the largest number of the format,
  -- beyond a half of it and beyond a quarter. A parabola through them extrapolates this logarithm
  -- to 2^k times the largest number, k = -log2(ratio).
  local above0 = log2(bad)
  local above1 = log2(bad + tonumber(s.hist[format.top - FIRST]))
  local above2 = log2(2 ^ above1 + tonumber(s.hist[format.top - 1 - FIRST]))
  local slope, bend = above1 - above0, math.max(0, 2 * above1 - above0 - above2)
  local k = -log2(ratio)
  -- -0.5 is about log2(ln 2): an expected count of ln 2 gives an overflow the probability 1/2
  return above0 - slope * k - bend * k * (k + 1) / 2 >= -0.5
end

-- ------------------------------------------------------------------ a step at another scale

local function is_power_of_two(x) return (math.frexp(x)) == 0.5 end

-- Returns whether gradients overflow at `ratio` times the record's scale, and how certain that is:
-- "exact", "hidden" (no overflow, unless in an intermediate result) or "bound". s: the statistics
-- as stored. o: as in M.move.
local function overflows(record, ratio, o, s)
  local format, amax, known = o.format, record.amax_f16, not o.reach
  if amax <= 0 then
    -- amax_f16 is negative if no gradient is fp16, and 0 if it was not recorded
    amax, known = record.amax * record.scale, known and amax < 0
  end
  if o.reach then ratio = amax > 0 and o.reach / amax or ratio end
  local away = is_power_of_two(ratio) and 1 or 1 + MARGIN
  local function mark(exact) return exact and not o.reach and "exact" or "bound" end
  if record.overflow ~= 0 then
    if record.loss - record.loss ~= 0 then return true, "exact" end
    if ratio >= 1 then return true, mark(ratio >= away) end
    local around = o.around and o.around()
    return still_overflows(s, amax, ratio, format, around and around * record.scale), "bound"
  end
  if ratio <= 1 / away then return false, mark(true) end
  local reach = amax * ratio
  if reach < format.limit / away then return false, known and ratio > 1 and "hidden" or "bound" end
  if known and amax >= 2 ^ format.normal and reach >= format.limit * o.accumulate * away then
    return true, "exact"
  end
  return amax < format.limit and reach >= format.limit, "bound"
end

-- COUNTED: the statistics that are exact if no element is lost or becomes subnormal (`counts` in
-- M.move). UNKNOWN: those that M.move cannot convert and leaves as they are (at present none).
local COUNTED = C.ENG_NEED_NORM + C.ENG_NEED_ZEROS + C.ENG_NEED_UNDERFLOW + C.ENG_NEED_HIST
local UNKNOWN = C.ENG_NEED_GRADIENTS - C.ENG_NEED_AMAX - COUNTED
local cell = ffi.new("eng_tensor_stats[1]")

--- Converts `record`, the record of a step at the scale record.scale, to the record of the same
--- step at `scale`. record.amax_f16 must be set. o: { format = the format of the gradients
--- (formats.of), accumulate = the number of micro-batches, needs = what the policy reads
--- (ENG_NEED_*), hist = whether record.hist is filled, around = a function that returns the largest
--- true gradient of good steps nearby, or nil (optional), reach = the largest fp16 gradient as
--- stored at the new scales, if layers have scales of their own (optional) }. Returns how certain
--- the overflow and everything in `needs` are: "exact", "hidden" or "bound" (see the top of the
--- file). With a histogram, also returns the share of nonzero elements that underflow and the share
--- of the gradient mass (the sum of magnitudes) that is lost.
function M.move(record, scale, o)
  local ratio, s, format = scale / record.scale, cell[0], o.format
  local same = ratio == 1 and not o.reach
  s.count, s.inf, s.nan, s.zeros = record.count, record.inf, record.nan, record.zeros
  s.amax, s.sum_squares = record.amax * record.scale, (record.norm * record.scale) ^ 2
  if o.hist then ffi.copy(s.hist, record.hist, ffi.sizeof(s.hist))
  else ffi.fill(s.hist, ffi.sizeof(s.hist)) end
  local had, over, known = record.overflow ~= 0, record.overflow ~= 0, "exact"
  local tiny = has_tiny(s, format)
  if not same then over, known = overflows(record, ratio, o, s) end
  local elements, mass
  if o.hist or not same then elements, mass = restate(s, ratio, over, format) end
  if not o.hist then elements, mass = nil, nil end
  if same then return known, elements, mass end

  local sizes = not had and not over and is_power_of_two(ratio)
  local counts = o.hist and sizes and not tiny and not has_tiny(s, format)
    and (ratio < 1 or record.zeros == 0)
  record.scale = scale
  record.inf, record.nan, record.zeros, record.underflow = s.inf, s.nan, s.zeros, s.underflow
  record.amax, record.norm = s.amax / scale, math.sqrt(s.sum_squares) / scale
  record.overflow, record.first_bad = over and 1 or 0, over and had and record.first_bad or -1
  ffi.copy(record.hist, s.hist, ffi.sizeof(record.hist))
  local function reads(needs) return bit.band(o.needs, needs) ~= 0 end
  if reads(C.ENG_NEED_AMAX) and not sizes or reads(COUNTED) and not counts
    or reads(UNKNOWN) or reads(C.ENG_NEED_TENSORS) then   -- statistics of tensors are estimates
    known = "bound"
  end
  return known, elements, mass
end

--- Converts the statistics of n tensors to `ratio` times their scale. format_of(i) returns the
--- format of the gradient of tensor i, counted from 1.
function M.move_tensors(stats, n, ratio, format_of)
  for k = 0, n - 1 do
    local s, format = stats[k], format_of(k + 1)
    local over = s.amax < format.limit and s.amax * ratio >= format.limit
      or (s.inf + s.nan > 0 and (ratio > 1 or still_overflows(s, s.amax, ratio, format)))
    restate(s, ratio, over, format)
  end
end

-- ------------------------------------------------------------------ a run at other scales

-- Returns whether a policy's action changes the weights, or the position in the data, differently
-- from the run's action.
local function departs(own, run)
  if own.action ~= run.action then return true end
  if own.action == C.ENG_ACTION_ROLLBACK then
    local function differ(a, b) return b == b and tonumber(a) ~= tonumber(b) end   -- NaN: unknown
    return own.lr_mul ~= run.lr_mul or differ(own.back, run.back) or differ(own.skip, run.skip)
  end
  return own.action == C.ENG_ACTION_STEP and (own.clip ~= run.clip or own.lr_mul ~= run.lr_mul)
end

local WHY = {
  hidden = "its scale is larger than the run's, so an intermediate result of the backward pass " ..
    "may overflow, which the record would not show",
  bound = "its statistics at its own scale are only estimated",
  departs = "its updates differ from the run's",
  late = "an older engine recorded the earlier steps",
  ["no amaxes"] = "the history lacks amaxes that the policy reads",
  ["no meters"] = "the history lacks meters of FP8 layers, which the policy may read",
}

--- Returns the certainty of a policy before its first step, as plain data. exact, bounds: how many
--- verdicts are exact and how many are bounds. least: the policy skips at least this many steps.
--- from, why: the first step whose verdict is a bound, and the reason, or nil. closed: whether
--- `least` is final, because later steps can no longer raise it. The argument `late` is nil or, if
--- an older engine recorded the earlier steps, the first step whose record is converted to the
--- policy's scale.
function M.certainty(late)
  return { exact = 0, bounds = 0, least = 0, closed = late ~= nil, from = late,
    why = late and WHY.late }
end

--- Adds a step to a policy's certainty. known: the first result of M.move, or "no amaxes" or "no
--- meters". own, run: the policy's verdict and the run's. apart: whether they differ in what the
--- two verdicts do not hold: an FP8 policy's rungs, or a rollback in lagged mode. Returns whether
--- the policy's verdict is exact.
---
--- `least` counts the skips among the exact verdicts. After an overflow that may be hidden, it also
--- counts the next known skip, because the policy skips either at the hidden overflow or at that
--- step. Later skips do not count.
function M.judge(certainty, step, known, own, run, apart)
  local c = certainty
  local exact = not c.from and known == "exact"
  if own.action ~= C.ENG_ACTION_STEP and known == "exact" and not c.closed then
    c.least, c.closed = c.least + 1, c.from ~= nil
  end
  if exact then c.exact = c.exact + 1 else c.bounds = c.bounds + 1 end
  if not exact and not c.from then c.from, c.why = step, WHY[known] end
  apart = apart or departs(own, run)
  if apart and not c.from then c.from, c.why = step + 1, WHY.departs end
  c.closed = c.closed or apart or known ~= "exact" and known ~= "hidden"
  return exact
end

--- Returns the number of skipped steps as text: "3" or, if some verdicts are bounds, "at least 1"
--- or "at least 1, about 3".
function M.count_text(certainty, skipped)
  if certainty.bounds == 0 then return tostring(skipped) end
  local least = ("at least %d"):format(certainty.least)
  return skipped == certainty.least and least or ("%s, about %d"):format(least, skipped)
end

--- Returns why verdicts are bounds, such as "its verdicts are bounds from step 12 on: ...", or nil
--- if all verdicts are exact.
function M.why_text(certainty)
  if certainty.bounds == 0 then return nil end
  return ("its verdicts are bounds from step %d on: %s"):format(certainty.from, certainty.why)
end

return M
