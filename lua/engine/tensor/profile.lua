-- Measures where a piece of a program spends its time, by operation:
--   print(engine.profile(function() trainer:step() end))
-- The result prints as two lists, the most expensive row first. A row of the first list sums the
-- calls of one operation; the row "(outside kernels)" has the time outside all kernels (tape, Lua,
-- data). A row of the second list sums calls with the same operation, dtypes and shapes; rows of
-- less than 0.5 % of the time are only counted. Measures up to MAX_ROWS kinds of calls. Called by
-- scripts.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local machine = require "engine.base.machine"
local within = require "engine.base.within"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local Profile = {}
Profile.__index = Profile

local MAX_ROWS = 512

local SUMMED = { "calls", "seconds", "bytes", "flops" }

-- Adds the numbers of `from` to the row `of[key]`. If there is no such row, makes it and appends it
-- to `list`.
local function sum_up(list, of, key, from, detail)
  local row = of[key]
  if not row then
    row = { op = from.op, detail = detail, calls = 0, seconds = 0, bytes = 0, flops = 0 }
    of[key], list[#list + 1] = row, row
  end
  for _, name in ipairs(SUMMED) do row[name] = row[name] + from[name] end
end

-- Adds to `list` what the core has measured since eng_profile(true).
local function read_rows(list, of)
  local rows = M_ffi.new("eng_profile_row[?]", MAX_ROWS)
  for i = 0, C.eng_profile_rows(rows, MAX_ROWS) - 1 do
    local r = rows[i]
    local op, detail = ffi.string(r.op), ffi.string(r.detail)
    sum_up(list, of, op .. "\0" .. detail, { op = op, calls = tonumber(r.calls),
      seconds = r.seconds, bytes = r.bytes, flops = r.flops }, detail)
  end
end

local function by_seconds(a, b)
  if a.seconds ~= b.seconds then return a.seconds > b.seconds end
  return a.op .. (a.detail or "") < b.op .. (b.detail or "")
end

--- engine.profile(f, ...): runs f(...) and returns { seconds, rows = a row for each kind of call,
--- operations = these rows summed by operation }; each row has op, calls, seconds, bytes and flops.
--- The result prints as a table.
function M.run(f, ...)
  arguments.want_function(f, "profile", "engine.profile(function() ... end)")
  local seconds, from, rows, of = 0, nil, {}, {}
  within(function()
    C.eng_profile(true)
    from = machine.clock()
  end, function()
    seconds = seconds + machine.clock() - from
    C.eng_profile(false)
    read_rows(rows, of)
  end, f, ...)

  local operations, by_name, inside = {}, {}, 0
  for _, r in ipairs(rows) do
    sum_up(operations, by_name, r.op, r)
    inside = inside + r.seconds
  end
  operations[#operations + 1] = { op = "(outside kernels)", calls = 1,
    seconds = math.max(0, seconds - inside), bytes = 0, flops = 0 }
  table.sort(rows, by_seconds)
  table.sort(operations, by_seconds)
  return setmetatable({ seconds = seconds, rows = rows, operations = operations }, Profile)
end

local function line(self, what, r)
  local rate = r.flops > 0 and ("%7.1f GFLOP/s"):format(r.flops / r.seconds * 1e-9)
    or r.bytes > 0 and ("%7.1f GB/s"):format(r.bytes / r.seconds * 1e-9) or ""
  return (("%-24s %7d %10.3f %6.1f%%  %s"):format(what, r.calls, r.seconds * 1e3,
    100 * r.seconds / self.seconds, rate):gsub("%s+$", ""))
end

function Profile:__tostring()
  local lines = { ("%-24s %7s %10s %7s"):format("operation", "calls", "ms", "share") }
  for _, r in ipairs(self.operations) do lines[#lines + 1] = line(self, r.op, r) end
  lines[#lines + 1] = ("%-24s %7s %10.3f"):format("all", "", self.seconds * 1e3)
  lines[#lines + 1] = ""
  local shown = 0
  for _, r in ipairs(self.rows) do
    if r.seconds < 0.005 * self.seconds then break end
    shown = shown + 1
    lines[#lines + 1] = line(self, r.op, r) .. "   " .. r.detail
  end
  if shown < #self.rows then
    lines[#lines + 1] = ("... and %d kinds of calls under 0.5 %% each"):format(#self.rows - shown)
  end
  return table.concat(lines, "\n")
end

return M
