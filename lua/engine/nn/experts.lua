-- Experts divided over the ranks of a group: each rank holds the weights of E / ranks experts, and
-- empty tensors in place of the other weights. Rows are sent to the ranks that hold their experts,
-- and the outputs are sent back (core/dist/comm_experts.c). Gradients take the same routes in
-- reverse.
--
-- Rows sent to experts (tokens, and gradients of outputs) have the format `dispatch`: "own" (their
-- dtype), "fp32", "bf16" or "fp8" (e4m3 in blocks of 128 along a row with power-of-two scales, as
-- in DeepSeek-V3; inf becomes nan). Rows sent back (outputs, and gradients of tokens) have the
-- format `combine`: "own", "fp32" or "bf16".
--
-- All ranks of the group run the same passes, also ranks whose experts get no rows. If a rank
-- misses a pass, the core's error names that rank (core/dist/comm_wait.c). dist/reducer.lua reads a
-- module's `_apart` to learn which ranks hold which parameters. The reducer sums a gradient only
-- over the ranks that hold the parameter; the record, group scales and verdicts cover all ranks.
-- Called by moe.lua. Shapes: n rows, C columns, E experts.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local autograd = require "engine.tensor.autograd"
local tensor = require "engine.tensor.tensor"

local C, check, ffi, expect = M_ffi.C, M_ffi.check, M_ffi.ffi, M_ffi.expect

local M = {}

local Experts = {}
Experts.__index = Experts

local DISPATCH = { own = C.ENG_COMM_OWN, fp32 = C.ENG_COMM_F32, bf16 = C.ENG_COMM_BF16,
  fp8 = C.ENG_COMM_FP8 }
local COMBINE = { own = C.ENG_COMM_OWN, fp32 = C.ENG_COMM_F32, bf16 = C.ENG_COMM_BF16 }

--- Divides `count` experts over the ranks of the group options.experts_over. options.dispatch and
--- options.combine: the formats of rows. Returns nil if there is no group or only one rank in it.
function M.new(count, options)
  local group = options.experts_over
  local formats = {
    out = arguments.choose(DISPATCH, options.dispatch or "own", "nn.moe", "dispatch"),
    back = arguments.choose(COMBINE, options.combine or "own", "nn.moe", "combine") }
  if group == nil then return nil end
  expect(arguments.is_group(group) and group.across, group,
    "nn.moe: expected experts_over to be a group of ranks, engine.ranks.group()")
  M_ffi.raise_if(count % group.size ~= 0,
    "nn.moe: %d experts cannot be divided evenly among %d ranks", count, group.size)
  if group.size == 1 then return nil end
  local each = count / group.size
  return setmetatable({ group = group, total = count, each = each, first = group.rank * each + 1,
    parameters = {}, formats = formats }, Experts)
end

-- Replaces p, a parameter held by another rank, with an empty tensor of the same dtype.
local function empty(p)
  local x, shape = p.tensor, p.tensor.shape
  shape[1] = 0
  local none = tensor.zeros(shape, { dtype = x.dtype, keep = true,
    requires_grad = arguments.info(x).requires_grad ~= 0 })
  for _, key in ipairs(p.owner._order) do              -- two fields may hold the tensor
    local value = rawget(p.owner, key)
    if tensor.is_tensor(value) and value.slot == x.slot then p.owner[key] = none end
  end
  x:free()
end

--- Registers expert e. Every rank makes every expert, so that one seed gives the same weights
--- everywhere. Each rank then frees the weights of the experts that it does not hold.
function Experts:made(e, expert)
  local held = e >= self.first and e < self.first + self.each
  for _, p in ipairs(expert:parameters()) do
    self.parameters[("experts.%d.%s"):format(e, p.name)] = { held = held, shape = p.tensor.shape }
    if not held then empty(p) end
  end
end

-- Sends rows [n x C] to other ranks and receives rows from them. send: the number of rows for each
-- rank; receive: the number of rows from each rank. `way` is "out" (to the experts) or "back";
-- gradients go the other way.
-- `anchor`: a further input, which only puts the operation on the tape (see Experts:outputs).
local function exchange(self, x, send, receive, way, anchor)
  local function run(rows, from, to, direction)
    local n = 0
    for p = 0, self.group.size - 1 do n = n + tonumber(to[p]) end
    local result = tensor.zeros({ n, rows:size(2) }, { dtype = rows.dtype, keep = false })
    check(C.eng_comm_exchange_rows(result, rows:contiguous(), self.group.comm, from, to,
      self.formats[direction], self.facts and self.facts[direction]))
    return result
  end
  local moved = autograd.custom {
    forward = function(_, rows) return run(rows, send, receive, way) end,
    backward = function(_, dy) return run(dy, receive, send, way == "out" and "back" or "out") end }
  return moved(x, anchor)
end

-- Adds the other ranks' row counts of each expert to `counts`. Returns the number of rows to send
-- to each rank, the number of rows to receive from each rank and, for each expert of this rank, the
-- indices (from 0) of the expert's rows among the received rows. Received rows are sorted by the
-- rank that sent them, and the rows from one rank by expert.
local function plan(self, counts)
  local E, size, each = self.total, self.group.size, self.each
  local own, all = ffi.new("int64_t[?]", E, counts), ffi.new("int64_t[?]", E * size)
  check(C.eng_comm_all_gather(self.group.comm, all, own, 8 * E))
  local send, receive = ffi.new("int64_t[?]", size), ffi.new("int64_t[?]", size)
  for e = 0, E - 1 do
    counts[e + 1] = 0
    for p = 0, size - 1 do counts[e + 1] = counts[e + 1] + tonumber(all[p * E + e]) end
    send[math.floor(e / each)] = send[math.floor(e / each)] + own[e]
  end
  local places, row = {}, 0
  for i = 1, each do places[i] = {} end
  for p = 0, size - 1 do
    for i = 1, each do
      local n = tonumber(all[p * E + self.first + i - 2])
      receive[p] = receive[p] + n
      for _ = 1, n do
        table.insert(places[i], row)
        row = row + 1
      end
    end
  end
  return send, receive, places
end

local function index(list) return tensor.tensor(list, { dtype = "i64", keep = false }) end

--- Applies the experts to rows [n x C], which are in expert order. Each expert runs on the rank
--- that holds it. Returns the outputs [n x C]. counts: the number of this rank's rows for each
--- expert; the call changes it to the sums over all ranks of the group.
function Experts:outputs(rows, counts, experts)
  local send, receive, places = plan(self, counts)
  local received, parts, back, at = exchange(self, rows, send, receive, "out"), {}, {}, 0
  for i, own in ipairs(places) do
    if #own > 0 then
      parts[#parts + 1] = experts[self.first + i - 1](received:index_select(1, index(own)))
      for _, place in ipairs(own) do
        back[place + 1] = at
        at = at + 1
      end
    end
  end
  local output = received                                -- for a rank that received no rows
  if at > 0 then
    output = (#parts > 1 and tensor.concat(parts, 1) or parts[1]):index_select(1, index(back))
  end
  -- A rank whose experts got no rows learns the outputs' dtype from the other ranks.
  local format = ffi.new("int64_t[1]", at > 0 and M_ffi.dtype[output.dtype] or -1)
  check(C.eng_comm_all_reduce(self.group.comm, format, 1, M_ffi.dtype.i64, C.ENG_MAX))
  output = output:to(M_ffi.dtype_name[tonumber(format[0])])
  -- Every rank must also run the backward exchange. If this rank received no rows, `output` may
  -- require no gradient, so one parameter of the experts is always a further input.
  local anchor
  for _, p in ipairs(experts:parameters()) do
    if not anchor and arguments.info(p.tensor).requires_grad ~= 0 then anchor = p.tensor end
  end
  return exchange(self, output, receive, send, "back", anchor)
end

--- Returns measurements of the rows that this rank has sent since the last call: { out = { bytes,
--- snr }, back = { bytes, snr } }. `bytes` is how many bytes went to other ranks. `snr` is the
--- signal-to-noise ratio, in dB, of rounding the rows to their format (inf: the rounding was
--- exact). The first call starts the measurement and returns an empty table.
function Experts:measure()
  local result = {}
  for way, facts in pairs(self.facts or {}) do
    result[way] = { bytes = tonumber(facts.bytes),
      snr = facts.error == 0 and math.huge or 10 * math.log10(facts.signal / facts.error) }
  end
  self.facts = { out = ffi.new("eng_exchange_facts"), back = ffi.new("eng_exchange_facts") }
  return result
end

return M
