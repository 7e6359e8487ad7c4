-- Ranks: several processes on one job, started by `mpirun -np 4 engine train.lua` or `srun engine train.lua`. The trainer uses them by
-- itself; what a script may want of them:
--   local ranks = require("engine").ranks
--   ranks.rank(), ranks.size()          this process's number, from 0, and how many there are (0 and 1 where it is alone)
--   ranks.reduce(x, "sum")              a number over all ranks: "sum", "mean" or "max"; the same on each, bit for bit
--   ranks.from_first(text)              rank 0's text on every rank
--   ranks.say("...")                    a line from any rank; print() is rank 0's alone
-- Every rank runs the same script and must come to the same calls. Who does not come is named, and the job ends (core/comm.c).
local M_ffi = require "engine.ffi"

local C, check, ffi, raise = M_ffi.C, M_ffi.check, M_ffi.ffi, M_ffi.raise

local M = {}

local launched_rank, launched_size = ffi.new("int[1]"), ffi.new("int[1]")
local launched = C.eng_comm_launched(launched_rank, launched_size)
local world

--- The group of all ranks; the first call starts the transport.
function M.world()
  if world then return world end
  local out = ffi.new("eng_comm *[1]")
  check(C.eng_comm_world(out), true)
  world = out[0]
  -- Each process would take all cores, and they would stand in each other's way.
  if not os.getenv("OMP_NUM_THREADS") then C.eng_threads(math.min(C.eng_threads(0), C.eng_comm_threads())) end
  return world
end

--- What the starter says, without starting anything.
function M.rank() return launched and launched_rank[0] or 0 end
function M.size() return launched and launched_size[0] or 1 end

--- A line on stderr that names the rank.
function M.say(format, ...)
  local text = select("#", ...) > 0 and format:format(...) or tostring(format)
  io.stderr:write((M.size() > 1 and ("rank %d: "):format(M.rank()) or "") .. text .. "\n")
end

local RULES = { sum = "ENG_SUM", mean = "ENG_SUM", max = "ENG_MAX" }

--- A number over all ranks.
function M.reduce(x, rule)
  if type(x) ~= "number" then raise("ranks.reduce: expected a number, got %s", M_ffi.value_text(x)) end
  if not RULES[rule or "sum"] then raise("ranks.reduce: expected 'sum', 'mean' or 'max', got %s", M_ffi.value_text(rule)) end
  local value = ffi.new("double[1]", x)
  check(C.eng_comm_all_reduce(M.world(), value, 1, M_ffi.dtype.f64, C[RULES[rule or "sum"]]))
  return rule == "mean" and value[0] / M.size() or value[0]
end

function M.barrier() check(C.eng_comm_barrier(M.world())) end

--- Rank 0's text (or nil) on every rank.
function M.from_first(text)
  local comm, length = M.world(), ffi.new("int64_t[1]", text and #text or -1)
  check(C.eng_comm_broadcast(comm, length, 8, 0))
  local n = tonumber(length[0])
  if n <= 0 then return n == 0 and "" or nil end
  local bytes = ffi.new("char[?]", n)
  if M.rank() == 0 then ffi.copy(bytes, text, n) end
  check(C.eng_comm_broadcast(comm, bytes, n, 0))
  return ffi.string(bytes, n)
end

--- The first `most` bytes (500) of every rank's text, in order of ranks.
function M.from_all(text, most)
  most = (most or 500) + 4
  local own, all = ffi.new("char[?]", most), ffi.new("char[?]", most * M.size())
  local n = math.min(#text, most - 4)
  ffi.copy(own, ffi.new("int32_t[1]", n), 4)
  ffi.copy(own + 4, text, n)
  check(C.eng_comm_all_gather(M.world(), all, own, most))
  local texts = {}
  for i = 0, M.size() - 1 do
    texts[i + 1] = ffi.string(all + i * most + 4, ffi.cast("int32_t *", all + i * most)[0])
  end
  return texts
end

--- "ranks 0, 2 and 3" of a list.
function M.names(list)
  if #list == 1 then return "rank " .. list[1] end
  return "ranks " .. table.concat(list, ", ", 1, #list - 1) .. " and " .. list[#list]
end

return M
