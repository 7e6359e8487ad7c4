-- Experts divided over the ranks of a group: each holds E / ranks of them, of the others tensors without elements; rows go to the ranks of
-- their experts and the answers back (core/dist/comm_experts.c), the gradients likewise the other way round.
--
-- What goes out to experts, tokens and the gradients of answers, has the format `dispatch`: "own", "fp32", "bf16" or "fp8" (e4m3, blocks of
-- 128 along a row, a power of two each, as DeepSeek-V3 has it; inf becomes nan there). What comes back from them, answers and the gradients
-- of tokens, has the format `combine`: "own", "fp32" or "bf16".
--
-- All ranks of the group run the same passes, whether they have rows or not; who does not come is named (core/dist/comm.c). parallel.lua takes
-- `_apart` of a module to know which parameters are whose: their gradients are added up over those who hold them alone, the record, scales
-- of groups and verdicts are of all ranks. Called by moe.lua. Shapes: n rows, C columns, E experts.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local autograd = require "engine.tensor.autograd"
local tensor = require "engine.tensor.tensor"

local C, check, ffi, raise = M_ffi.C, M_ffi.check, M_ffi.ffi, M_ffi.raise

local M = {}

local Experts = {}
Experts.__index = Experts

local DISPATCH = { own = C.ENG_COMM_OWN, fp32 = C.ENG_COMM_F32, bf16 = C.ENG_COMM_BF16, fp8 = C.ENG_COMM_FP8 }
local COMBINE = { own = C.ENG_COMM_OWN, fp32 = C.ENG_COMM_F32, bf16 = C.ENG_COMM_BF16 }

--- `count` experts over options.experts_over, in the formats options.dispatch and options.combine; nil: they are not divided.
function M.new(count, options)
  local group, dispatch, combine = options.experts_over, options.dispatch or "own", options.combine or "own"
  if not DISPATCH[dispatch] then raise("nn.moe: expected dispatch as own, fp32, bf16 or fp8, got %s", M_ffi.value_text(dispatch)) end
  if not COMBINE[combine] then raise("nn.moe: expected combine as own, fp32 or bf16, got %s", M_ffi.value_text(combine)) end
  if group == nil then return nil end
  if type(group) ~= "table" or not group.across then
    raise("nn.moe: expected experts_over as a group of ranks, engine.ranks.group(), got %s", M_ffi.value_text(group))
  end
  if count % group.size ~= 0 then raise("nn.moe: %d experts cannot be divided alike over %d ranks", count, group.size) end
  if group.size == 1 then return nil end
  local each = count / group.size
  return setmetatable({ group = group, total = count, each = each, first = group.rank * each + 1, parameters = {},
    wires = { out = DISPATCH[dispatch], back = COMBINE[combine] } }, Experts)
end

-- In the place of a parameter that another rank holds: one of its format, without elements.
local function empty(p)
  local x, shape = p.tensor, p.tensor.shape
  shape[1] = 0
  local none = tensor.zeros(shape, { dtype = x.dtype, keep = true })
  none:requires_grad(arguments.info(x).requires_grad ~= 0)
  for _, key in ipairs(p.owner._order) do
    local value = rawget(p.owner, key)
    if tensor.is_tensor(value) and value.slot == x.slot then p.owner[key] = none end
  end
  x:free()
end

--- Expert e was made, as on every rank, so that one seed gives the same weights everywhere; who does not hold it lets its weights go.
function Experts:made(e, expert)
  local held = e >= self.first and e < self.first + self.each
  for _, p in ipairs(expert:parameters()) do
    self.parameters[("experts.%d.%s"):format(e, p.name)] = { held = held, shape = p.tensor.shape }
    if not held then empty(p) end
  end
end

-- Rows of x [n x C] to other ranks and theirs here, `way` "out" or "back"; the gradients go the other way. `anchor` as in answers().
local function exchange(self, x, send, receive, way, anchor)
  local function run(rows, from, to, direction)
    local n = 0
    for p = 0, self.group.size - 1 do n = n + tonumber(to[p]) end
    local result = tensor.zeros({ n, rows:size(2) }, { dtype = rows.dtype, keep = false })
    check(C.eng_comm_exchange_rows(result, rows:contiguous(), self.group.comm, from, to, self.wires[direction], self.facts and self.facts[direction]))
    return result
  end
  local moved = autograd.custom {
    forward = function(_, rows) return run(rows, send, receive, way) end,
    backward = function(_, dy) return run(dy, receive, send, way == "out" and "back" or "out") end }
  return moved(x, anchor)
end

--- The answers [n x C] of experts(e) for every expert, here and on other ranks, to rows [n x C] that stand in order of experts. counts: how
--- many rows each expert has; from all ranks afterwards.
function Experts:answers(rows, counts, experts)
  local E, size, each = self.total, self.group.size, self.each
  local own, all = ffi.new("int64_t[?]", E, counts), ffi.new("int64_t[?]", E * size)
  check(C.eng_comm_all_gather(self.group.comm, all, own, 8 * E))
  local send, receive = ffi.new("int64_t[?]", size), ffi.new("int64_t[?]", size)
  for e = 0, E - 1 do
    counts[e + 1] = 0
    for p = 0, size - 1 do counts[e + 1] = counts[e + 1] + tonumber(all[p * E + e]) end
    send[math.floor(e / each)] = send[math.floor(e / each)] + own[e]
  end
  local places, row = {}, 0                              -- by own expert: its rows among those that come, by rank and then by expert
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
  local come, parts, back, at = exchange(self, rows, send, receive, "out"), {}, {}, 0
  for i = 1, each do
    if #places[i] > 0 then
      parts[#parts + 1] = experts[self.first + i - 1](come:index_select(1, tensor.tensor(places[i], { dtype = "i64", keep = false })))
      for _, place in ipairs(places[i]) do
        back[place + 1] = at
        at = at + 1
      end
    end
  end
  local answer = come                                    -- nobody asked these experts
  if at > 0 then
    answer = (#parts > 1 and tensor.concat(parts, 1) or parts[1]):index_select(1, tensor.tensor(back, { dtype = "i64", keep = false }))
  end
  -- Whose experts nobody asked learns from the others in which format answers are.
  local format = ffi.new("int64_t[1]", at > 0 and M_ffi.dtype_number(answer.dtype) or -1)
  check(C.eng_comm_all_reduce(self.group.comm, format, 1, M_ffi.dtype.i64, C.ENG_MAX))
  answer = answer:to(M_ffi.dtype_name[tonumber(format[0])])
  -- Every rank must go the gradients' way as well, also one whose experts nobody asked: a parameter of theirs stands for that.
  local anchor
  for _, p in ipairs(experts:parameters()) do
    if not anchor and arguments.info(p.tensor).requires_grad ~= 0 then anchor = p.tensor end
  end
  return exchange(self, answer, receive, send, "back", anchor)
end

--- Measures what is sent from now on: gives what was since it was called last, { out = { bytes =, snr = }, back = { ... } }: bytes to other
--- ranks, and dB of the numbers over the error that their format made of them (inf: none).
function Experts:measure()
  local result = {}
  for way, facts in pairs(self.facts or {}) do
    result[way] = { bytes = tonumber(facts.bytes), snr = facts.error == 0 and math.huge or 10 * math.log10(facts.signal / facts.error) }
  end
  self.facts = { out = ffi.new("eng_exchange_facts"), back = ffi.new("eng_exchange_facts") }
  return result
end

return M
