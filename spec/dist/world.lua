-- Compares collective operations on all ranks with the expected results; rank 0 prints "good" and
-- the transport. Started by nccl_spec.lua.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local ranks, C, ffi, check = engine.ranks, M_ffi.C, M_ffi.ffi, M_ffi.check
local world, rank, size = ranks.world(), ranks.rank(), ranks.size()

assert(rank == C.eng_comm_rank(world) and size == C.eng_comm_size(world), "the starter's numbers")
-- All-reduces in place: small and large buffers, f64 and i64.
for _, n in ipairs { 1, 100, 20000 } do
  local f, i = ffi.new("double[?]", n), ffi.new("int64_t[?]", n)
  for k = 0, n - 1 do f[k], i[k] = rank + k, (rank + 1) * k end
  check(C.eng_comm_all_reduce(world, f, n, M_ffi.dtype.f64, C.ENG_MAX))
  check(C.eng_comm_all_reduce(world, i, n, M_ffi.dtype.i64, C.ENG_SUM))
  local data = ffi.new("double[?]", n)
  for k = 0, n - 1 do data[k] = 3 * rank end
  check(C.eng_comm_all_reduce(world, data, n, M_ffi.dtype.f64, C.ENG_SUM))
  assert(data[n - 1] == 3 * size * (size - 1) / 2, "a sum")
  for k = 0, n - 1 do
    assert(f[k] == size - 1 + k and i[k] == k * size * (size + 1) / 2, "a reduction")
  end
end
local text = ("x"):rep(70000) .. "!"
assert(ranks.from_first(rank == 0 and text or nil) == text, "a broadcast")
assert(ranks.from_first(rank == 0 and "" or nil) == "", "a broadcast of nothing")
for r, t in ipairs(ranks.from_all("I am " .. rank)) do
  assert(t == "I am " .. r - 1, "an all-gather")
end
assert(ranks.reduce(rank, "mean") == (size - 1) / 2 and ranks.reduce(rank, "max") == size - 1,
  "a number")
-- Groups of two neighbouring ranks, and groups of one rank from each pair.
if size % 2 == 0 then
  local group = ranks.group(2)
  assert(group.size == 2 and group.rank == rank % 2 and group.across.size == size / 2
    and group.across.rank == math.floor(rank / 2), "groups")
  local own, both = ffi.new("int64_t[1]", rank), ffi.new("int64_t[2]")
  check(C.eng_comm_all_gather(group.comm, both, own, 8))
  assert(both[0] == rank - rank % 2 and both[1] == both[0] + 1, "an all-gather of a group")
  own[0] = rank
  check(C.eng_comm_all_reduce(group.across.comm, own, 1, M_ffi.dtype.i64, C.ENG_SUM))
  local sum = 0
  for r = rank % 2, size - 1, 2 do sum = sum + r end
  assert(own[0] == sum, "a sum across groups")
end
ranks.barrier()
ranks.say("good")
print(ffi.string(C.eng_comm_text()))
