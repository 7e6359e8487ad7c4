-- Rewrites a CUDA source file, line for line, so that a C++ compiler accepts it:
-- luajit to_host.lua FROM TO
--   kernel<T><<<grid, block>>>(a, b)   ->   emulator::launch("kernel<T>",
--         emulator::shape(grid, block), [=](auto... a_) { kernel<T>(a_...); }, a, b)
--   __shared__ float a[4], b[8];       ->   references to variables that exist once per block
--   extern __shared__ T room[];        ->   a pointer to the launch's shared memory
--   __CUDACC__                         ->   EMULATED_CARD
local from, to = arg[1], arg[2]
local file = assert(io.open(from))
local text = file:read("*a")
file:close()

local function fail(at, message)
  local _, lines = text:sub(1, at):gsub("\n", "")
  error(("%s:%d: %s"):format(from, lines + 1, message), 0)
end

--- Where the name before `at` begins; the name includes its template arguments.
local function begin_of_name(at)
  local i = at - 1
  while text:sub(i, i):find("%s") do i = i - 1 end
  if text:sub(i, i) == ">" then
    local depth = 0
    repeat
      local c = text:sub(i, i)
      depth = depth + (c == ">" and 1 or c == "<" and -1 or 0)
      i = i - 1
    until depth == 0 or i == 0
  end
  while text:sub(i, i):find("[%w_.:]") do i = i - 1 end
  return i + 1
end

-- launches
local out, last = {}, 1
while true do
  local open = text:find("<<<", last, true)
  if not open then break end
  local begin = begin_of_name(open)
  local close, after = text:find(">>>%s*%(", open)
  if not close then fail(open, "a launch without an end") end
  local name, gap = text:sub(begin, open - 1):match("^(.-)(%s*)$")
  out[#out + 1] = text:sub(last, begin - 1)
  out[#out + 1] = ('emulator::launch("%s", emulator::shape(%s), [=](auto... a_) { %s(a_...); }, ')
    :format(name, text:sub(open + 3, close - 1), name) .. gap
  last = after + 1
end
out[#out + 1] = text:sub(last)
text = table.concat(out)

-- shared memory
text = text:gsub("extern%s+__shared__%s+([^;]-)([%w_]+)%[%];", function(type, name)
  type = type:gsub("__align__%b()", "")
  return ("%s *const %s = (%s *)emulator::dynamic_shared();"):format(type, name, type)
end)
text = text:gsub("__shared__%s+([^;]+);", function(declaration)
  local type, names = declaration:match("^(.-)([%a_][%w_]*%s*%[.*)$")
  if not type then type, names = declaration:match("^(.-)([%a_][%w_]*)$") end
  local made = {}
  local i = 1
  while i <= #names do   -- name[..][..], separated by commas
    local name, at = names:match("^%s*([%a_][%w_]*)()", i)
    local dimensions = ""
    while true do
      local d, next_at = names:match("^%s*(%b[])()", at)
      if not d then break end
      dimensions, at = dimensions .. d, next_at
    end
    local shared = "static emulator::shared_variable<%s%s> %s_shared; auto &%s = %s_shared.here();"
    made[#made + 1] = shared:format(type, dimensions, name, name, name)
    i = (names:match("^%s*,()", at)) or #names + 1
  end
  return table.concat(made, " ")
end)
local left = text:find("__shared__", 1, true)
if left then fail(left, "a shared variable that this script cannot parse") end

text = text:gsub("__CUDACC__", "EMULATED_CARD")
text = ('#include "emulator.h"\n#line 1 "%s"\n'):format(from) .. text

file = assert(io.open(to, "w"))
file:write(text)
file:close()
