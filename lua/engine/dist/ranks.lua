-- Ranks: several processes on one job, started by `mpirun -np 4 engine train.lua`, `srun engine
-- train.lua` or, with a card for each rank, `torchrun --no-python --nproc-per-node 4 engine
-- train.lua`.
-- A trainer uses all ranks by itself. For scripts:
--   local ranks = require("engine").ranks
--   ranks.rank(), ranks.size()   this process's rank, from 0, and the number of ranks
--   ranks.reduce(x, "sum")       the "sum", "mean" or "max" of x over all ranks, equal on all ranks
--   ranks.from_first(text)       rank 0's text on every rank
--   ranks.say("...")             prints a line on any rank; print() works only on rank 0
--   ranks.text()                 "Open MPI v4.1.4, 4 ranks, 4 of them here"; with cards also how
--                                messages go from card to card
--   ranks.group(4)               this rank's group of four adjacent ranks (for nn.moe's experts)
-- Every rank runs the same script and must make the same calls. If a rank misses a call, the job
-- ends with an error that names the rank (core/dist/comm_wait.c). Owns the groups. Called by
-- scripts, init.lua, dist/, run/, train/, report/ and cli/.
local M_ffi = require "engine.base.ffi"
local files = require "engine.base.file"
local show = require "engine.base.show"

local C, check, ffi, expect = M_ffi.C, M_ffi.check, M_ffi.ffi, M_ffi.expect

local M = {}

local launched_rank, launched_size = ffi.new("int[1]"), ffi.new("int[1]")
local launched = C.eng_comm_launched(launched_rank, launched_size)
local world
local code          -- code() returns lines about this rank's code; world() compares them

--- Returns the group of all ranks. The first call starts the transport, and raises an error on all
--- ranks if the code of a rank differs from rank 0's.
function M.world()
  if world then return world end
  local out = ffi.new("eng_comm *[1]")
  check(C.eng_comm_world(out), true)
  world = out[0]
  -- Without this limit each rank would use all cores, and the ranks would slow each other down.
  if not os.getenv("OMP_NUM_THREADS") then
    C.eng_threads(math.min(C.eng_threads(0), C.eng_comm_threads()))
  end
  if M.size() > 1 then M.compare(code()) end
  return world
end

--- Returns this process's rank, counted from 0, as the launcher's environment gives it. Starts no
--- transport.
function M.rank() return launched and launched_rank[0] or 0 end
--- Returns the number of ranks, as the launcher's environment gives it; 1 without a launcher.
function M.size() return launched and launched_size[0] or 1 end

--- Returns the transport and the ranks in words: "Open MPI v4.1.4, 4 ranks, 4 of them here".
function M.text() return ffi.string(C.eng_comm_text()) end

--- Prints a line on stderr. With several ranks, the line begins with this rank's number. Uses one
--- write, because other ranks write to stderr too.
function M.say(format, ...)
  local text = select("#", ...) > 0 and format:format(...) or tostring(format)
  io.stderr:write((M.size() > 1 and ("rank %d: "):format(M.rank()) or "") ..
    show.shown(text, true) .. "\n")
end

local RULES = { sum = "ENG_SUM", mean = "ENG_SUM", max = "ENG_MAX" }

--- Returns the sum, mean or maximum of a number over all ranks. rule: "sum" (default), "mean" or
--- "max".
function M.reduce(x, rule)
  expect(type(x) == "number", x, "ranks.reduce: expected a number")
  expect(RULES[rule or "sum"], rule, "ranks.reduce: expected 'sum', 'mean' or 'max'")
  local value = ffi.new("double[1]", x)
  check(C.eng_comm_all_reduce(M.world(), value, 1, M_ffi.dtype.f64, C[RULES[rule or "sum"]]))
  return rule == "mean" and value[0] / M.size() or value[0]
end

--- Waits until every rank has called this function.
function M.barrier() check(C.eng_comm_barrier(M.world())) end

--- Returns rank 0's text (or nil) on every rank.
function M.from_first(text)
  expect(text == nil or type(text) == "string", text, "ranks.from_first: expected a string or nil")
  local comm, length = M.world(), ffi.new("int64_t[1]", text and #text or -1)
  check(C.eng_comm_broadcast(comm, length, 8, 0))
  local n = tonumber(length[0])
  if n <= 0 then return n == 0 and "" or nil end
  local bytes = ffi.new("char[?]", n)
  if M.rank() == 0 then ffi.copy(bytes, text, n) end
  check(C.eng_comm_broadcast(comm, bytes, n, 0))
  return ffi.string(bytes, n)
end

--- Returns the list of every rank's text, in rank order.
function M.from_all(text)
  expect(type(text) == "string", text, "ranks.from_all: expected a string")
  local comm, size, most = M.world(), M.size(), 0
  local lengths, texts = ffi.new("int64_t[?]", size), {}
  check(C.eng_comm_all_gather(comm, lengths, ffi.new("int64_t[1]", #text), 8))
  for i = 0, size - 1 do most = math.max(most, tonumber(lengths[i])) end
  local own, all = ffi.new("char[?]", most), ffi.new("char[?]", most * size)
  ffi.copy(own, text, #text)
  check(C.eng_comm_all_gather(comm, all, own, most))
  for i = 0, size - 1 do texts[i + 1] = ffi.string(all + i * most, lengths[i]) end
  return texts
end

--- Returns a job in words: "4 ranks, ZeRO-1, comm dtype bf16". Leaves out settings that have their
--- defaults.
function M.job_text(size, zero, comm_dtype)
  return ("%d rank%s%s%s"):format(size, size == 1 and "" or "s",
    zero > 0 and ", ZeRO-" .. zero or "",
    comm_dtype ~= "own" and ", comm dtype " .. comm_dtype or "")
end

-- ------------------------------------------------------------------ comparing the ranks

local function crc_of(path)
  local crc, size = ffi.new("uint32_t[1]"), ffi.new("int64_t[1]")
  return C.eng_file_checksum(crc, size, path) == 0 and ("%08x"):format(crc[0])
    or "that cannot be read"
end

-- Adds a line for each Lua file in the subfolder `below` ("" or "/NAME") of `folder`.
local function add_modules(lines, folder, below)
  local names = files.names(folder .. below)
  if not names then return end
  for _, name in ipairs(names) do
    local path = below .. "/" .. name
    if name:find("%.lua$") then
      lines[#lines + 1] = ("engine's %s %s"):format(path:sub(2), crc_of(folder .. path))
    elseif files.is_folder(folder .. path) then add_modules(lines, folder, path) end
  end
end

--- Returns "KIND PATH CHECKSUM" for a file of code that must be the same on all ranks. what: its
--- kind, such as "script".
function M.file_line(what, path) return ("%s %s %s"):format(what, path, crc_of(path)) end

function code()
  local lines = { ("ranks %d"):format(M.size()) }
  if arg and arg[0] then lines[2] = M.file_line("script", arg[0]) end
  lines[#lines + 1] = "arguments " .. table.concat(arg or {}, " ")
  lines[#lines + 1] = ("engine %s, its library %s"):format(M_ffi.version,
    crc_of(M_ffi.library_dir .. "/libengine.so"))
  local here, host = pcall(require, "engine.host")
  if here and host.root then add_modules(lines, host.root .. "/engine", "") end
  return lines
end

local function first_difference(own, first)
  for i = 1, math.max(#own, #first) do
    if own[i] ~= first[i] then
      return ("%s; rank 0: %s"):format((own[i] or "nothing"):sub(1, 230),
        (first[i] or "nothing"):sub(1, 230))
    end
  end
  return ""
end

local MOST = 20     -- the most ranks that a message lists

--- Compares the list of lines `own` over all ranks. If the lines of any rank differ from rank 0's,
--- raises an error on all ranks. The message has the first difference of each rank that differs,
--- for MOST ranks at most.
function M.compare(own)
  local first = {}
  for line in (M.from_first(table.concat(own, "\0")) .. "\0"):gmatch("(%Z*)%z") do
    first[#first + 1] = line
  end
  local difference = first_difference(own, first)
  if M.reduce(difference == "" and 0 or 1, "max") == 0 then return end
  local problems, more = {}, 0
  for i, text in ipairs(M.from_all(difference)) do
    if text ~= "" and #problems < MOST then
      problems[#problems + 1] = ("\n  rank %d differs from rank 0: %s"):format(i - 1, text)
    elseif text ~= "" then more = more + 1 end
  end
  error("the ranks were started differently:" .. table.concat(problems) ..
    (more > 0 and ("\n  and %d more ranks differ"):format(more) or ""), 0)
end

local groups = {}

--- Returns this rank's group of `size` adjacent ranks (by default all ranks): { comm =, rank =,
--- size =, across = }. `across` is the group of the ranks that have this rank's position in their
--- own groups: { comm =, rank =, size = }. Every rank must call this function. Calls with the same
--- size return the same group.
function M.group(size)
  size = size or M.size()
  expect(type(size) == "number" and size % 1 == 0 and size >= 1 and M.size() % size == 0, size,
    "ranks.group: expected a whole number that divides the number of ranks, %d", M.size())
  if groups[size] then return groups[size] end
  local function part(color)
    local out = ffi.new("eng_comm *[1]")
    check(C.eng_comm_split(out, M.world(), color, M.rank()))
    local comm = ffi.gc(out[0], C.eng_comm_free)
    return { comm = comm, rank = C.eng_comm_rank(comm), size = C.eng_comm_size(comm) }
  end
  local group = part(math.floor(M.rank() / size))
  group.across = part(M.rank() % size)
  groups[size] = group
  return group
end

--- Returns a list of ranks in words: "ranks 0, 2 and 3".
function M.names(list)
  if #list == 1 then return "rank " .. list[1] end
  return "ranks " .. table.concat(list, ", ", 1, #list - 1) .. " and " .. list[#list]
end

return M
