-- Where a piece of a program spends its time, by operation:
--   print(engine.profile(function() trainer:step() end))
-- Rows are kinds of calls (operation, dtypes, shapes), the most expensive first; time that no
-- kernel spent (tape, Lua, data) is "outside kernels". tostring shows operations, then kinds of
-- calls.
local M_ffi = require "engine.base.ffi"
local machine = require "engine.base.machine"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local Profile = {}
Profile.__index = Profile

local MAX_ROWS = 512

local function read_rows()
  local rows, list = M_ffi.new("eng_profile_row[?]", MAX_ROWS), {}
  for i = 0, C.eng_profile_rows(rows, MAX_ROWS) - 1 do
    local r = rows[i]
    list[#list + 1] = { op = ffi.string(r.op), detail = ffi.string(r.detail),
      calls = tonumber(r.calls), seconds = r.seconds, bytes = r.bytes, flops = r.flops }
  end
  return list
end

local function by_seconds(a, b)
  if a.seconds ~= b.seconds then return a.seconds > b.seconds end
  return a.op .. (a.detail or "") < b.op .. (b.detail or "")
end

--- engine.profile(f, ...): runs f(...) and returns { seconds, rows = kinds of calls, operations =
--- the same summed by operation }; each row has op, calls, seconds, bytes and flops. Prints as a
--- table.
function M.run(f, ...)
  if type(f) ~= "function" then error("profile: expected a function, got " .. type(f), 2) end
  C.eng_profile(true)
  local from = machine.clock()
  local good, message = pcall(f, ...)
  local seconds = machine.clock() - from
  C.eng_profile(false)
  if not good then error(message, 0) end

  local rows, by_name, operations = read_rows(), {}, {}
  local inside = 0
  for _, r in ipairs(rows) do
    local sum = by_name[r.op]
    if not sum then
      sum = { op = r.op, calls = 0, seconds = 0, bytes = 0, flops = 0 }
      by_name[r.op], operations[#operations + 1] = sum, sum
    end
    for _, key in ipairs { "calls", "seconds", "bytes", "flops" } do
      sum[key] = sum[key] + r[key]
    end
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
