-- Shards: the parts of a checkpoint that the ranks of a job write at the same time, so that no rank
-- holds or writes the whole state.
--
--   shard-00001-of-00004.safetensors     the pieces of rank 0, and so on
--
-- "model/wte.weight@4096" holds consecutive elements of the model's wte.weight, from element 4096
-- on (row-major, from 0); the metadata has the whole shape, "model/wte.weight" = "256 32". Readers
-- join the pieces of all ranks, so any number of ranks can resume from them.
-- Called by checkpoint.lua, which writes and reads the files, and run.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local autograd = require "engine.tensor.autograd"
local ranks = require "engine.dist.ranks"
local reducers = require "engine.dist.reducer"
local safetensors = require "engine.tensor.safetensors"
local tensor = require "engine.tensor.tensor"

local C, check, ffi = M_ffi.C, M_ffi.check, M_ffi.ffi
local sorted = reducers.sorted

local M = {}

-- ------------------------------------------------------------------ cutting

--- Cuts tensors { { name =, x = } ... }, laid end to end, into `size` equal parts: calls f(name, x,
--- from, to) for the elements of each tensor in part `part` (from 0).
function M.cut(list, part, size, f)
  local total, at = 0, 0
  for _, item in ipairs(list) do total = total + item.x.count end
  local low, high = math.floor(total * part / size), math.floor(total * (part + 1) / size)
  for _, item in ipairs(list) do
    local count = item.x.count
    local from, to = math.max(low - at, 0), math.min(high - at, count)
    if to > from or (count == 0 and part == 0) then
      f(item.name, item.x, from, math.max(to, from))
    end
    at = at + count
  end
end

-- What a rank writes, piece by piece.
local Pieces = {}
Pieces.__index = Pieces
function M.pieces() return setmetatable({ tensors = {}, shapes = {} }, Pieces) end

--- Adds elements [from, to) of x, which has `name` and `shape` in `part` ("model" or "optimizer").
function Pieces:add(part, name, x, from, to, shape)
  local key = part .. "/" .. name
  self.tensors[("%s@%d"):format(key, from)] = to - from == x.count and x:view(-1)
    or x:view(-1):slice(1, from + 1, to)
  self.shapes[key] = table.concat(shape or x.shape, " ")
end

-- ------------------------------------------------------------------ a job of ranks

local own_from, own_to = ffi.new("int64_t[1]"), ffi.new("int64_t[1]")
-- The elements [from, to) of parameter i whose moments this rank keeps.
local function own_part(reducer, i)
  C.eng_parallel_own(own_from, own_to, reducer.reduction, i - 1)
  return tonumber(own_from[0]), tonumber(own_to[0])
end

--- The pieces that this rank writes: its share of the tensors that all ranks hold, its share of
--- those that only its holders hold (experts), and with ZeRO the moments it keeps.
function M.of_rank(reducer)
  local optimizer, pieces = reducer.trainer.optimizer, M.pieces()
  local function share(part, tensors)
    local common, held = {}, {}
    for _, name in ipairs(sorted(tensors)) do
      local of_model = name:gsub("%.moment%d$", "")
      local apart = reducer.apart and (reducer.apart[name] or reducer.apart[of_model])
      local list = not apart and common or apart.held and held
      if list then list[#list + 1] = { name = name, x = tensors[name] } end
    end
    local function add(name, x, from, to) pieces:add(part, name, x, from, to) end
    M.cut(common, reducer.rank, reducer.size, add)
    if reducer.apart then M.cut(held, reducer.holders.rank, reducer.holders.size, add) end
  end
  share("model", reducer.trainer.model:state())
  local moments = optimizer:state_tensors()
  if not reducer.zero then
    share("optimizer", moments)
    return pieces
  end
  for i, p in ipairs(optimizer.list) do
    local from, to = own_part(reducer, i)
    local mine = to > from or p.tensor.count == 0 and reducer.rank == 0
    for which = 1, 2 do
      local name = ("%s.moment%d"):format(p.name, which)
      if moments[name] and mine then
        pieces:add("optimizer", name, moments[name], from, to, reducer:shape(p))
      end
    end
  end
  return pieces
end

-- Raises an error unless a part of a checkpoint has exactly the tensors { name = shape } wanted.
local function want_tensors(c, part, wanted)
  local problems, text = {}, tensor.shape_text
  for name, shape in pairs(wanted) do
    local found = c.parts[part][name]
    if not found then problems[#problems + 1] = "missing: " .. name
    elseif text(found.shape) ~= text(shape) then
      problems[#problems + 1] = ("%s: expected %s, got %s"):format(name, text(shape),
        text(found.shape))
    end
  end
  for name in pairs(c.parts[part]) do
    if not wanted[name] then problems[#problems + 1] = "unknown: " .. name end
  end
  table.sort(problems)
  local shown = table.concat(problems, "\n  ", 1, math.min(#problems, 12))
  if #problems > 0 then
    error(("resume: %s does not fit this %s:\n  %s"):format(c.path, part, shown), 0)
  end
end

--- Restores the tensors of a checkpoint, one after the other. Rank 0, which has it open (`c`; nil
--- elsewhere), sends each to every rank: whole, or the part that the rank keeps.
function M.spread(reducer, c)
  local trainer = reducer.trainer
  local optimizer, state, largest = trainer.optimizer, trainer.model:state(), 0
  local list, wanted = {}, { model = {}, optimizer = {} }
  local function want(part, name, shape, x, from)
    local count = 1
    for _, n in ipairs(shape) do count = count * n end
    wanted[part][name] = shape
    list[#list + 1] = { part = part, name = name, x = x, dtype = x.dtype, count = count,
      from = from }
  end
  for _, name in ipairs(sorted(state)) do
    want("model", name, reducer:shape { name = name, tensor = state[name] }, state[name], 0)
  end
  local moments = optimizer:state_tensors()
  for i, p in ipairs(optimizer.list) do
    for which = 1, 2 do
      local name = ("%s.moment%d"):format(p.name, which)
      if moments[name] then
        want("optimizer", name, reducer:shape(p), moments[name],
          reducer.zero and own_part(reducer, i) or 0)
      end
    end
  end
  if c then
    for _, part in ipairs { "model", "optimizer" } do want_tensors(c, part, wanted[part]) end
  end
  for _, item in ipairs(list) do
    item.size = C.eng_dtype_size(arguments.dtype_number(item.dtype))
    largest = math.max(largest, item.count * item.size)
  end
  local memory = ffi.new("char[?]", largest)
  for _, item in ipairs(list) do
    local number = arguments.dtype_number(item.dtype)
    if c then
      local whole = c:read(item.part, item.name)
      check(C.eng_read(memory, number, item.count, whole))
      whole:free()
    end
    check(C.eng_comm_broadcast(ranks.world(), memory, item.count * item.size, 0))
    check(C.eng_write(item.x, memory + item.from * item.size, number, item.x.count))
  end
end

-- ------------------------------------------------------------------ reading

--- The contents of the shards in `path`: { model = { name = { dtype =, shape =, count =,
--- pieces = { { file =, name =, from =, count = } ... } } } }, the pieces in order. Raises an error
--- where they do not make up whole tensors.
function M.index(path, names)
  local parts = { model = {}, optimizer = {} }
  for _, name in ipairs(names) do
    local file = safetensors.open(path .. "/" .. name)
    file:close()
    for _, entry_name in ipairs(file.names) do
      local entry, part, tensor_name, from = file.entries[entry_name],
        entry_name:match("^(%w+)/(.*)@(%d+)$")
      local shape_text = part and file.metadata[part .. "/" .. tensor_name]
      if not shape_text then
        error(("%s: '%s' is not a piece of a tensor"):format(name, entry_name), 0)
      end
      local shape, count = {}, 1
      for n in shape_text:gmatch("%d+") do
        shape[#shape + 1], count = tonumber(n), count * tonumber(n)
      end
      parts[part] = parts[part] or {}
      local whole = parts[part][tensor_name]
        or { dtype = entry.dtype, shape = shape, count = count, pieces = {} }
      parts[part][tensor_name] = whole
      if whole.dtype ~= entry.dtype or whole.count ~= count then
        error(("%s: '%s' differs from the other shards"):format(name, entry_name), 0)
      end
      table.insert(whole.pieces, { file = name, name = entry_name, from = tonumber(from),
        count = entry.shape[1] })
    end
  end
  for part, tensors in pairs(parts) do
    for name, whole in pairs(tensors) do
      table.sort(whole.pieces, function(a, b) return a.from < b.from end)
      local at = 0
      for _, piece in ipairs(whole.pieces) do
        if piece.from ~= at then
          error(("elements %d to %d of %s's '%s' are in no shard, or in two"):format(at,
            piece.from, part, name), 0)
        end
        at = at + piece.count
      end
      if at ~= whole.count then
        error(("%s's '%s' has %d elements in the shards, expected %d"):format(part, name, at,
          whole.count), 0)
      end
    end
  end
  return parts
end

--- Reads a tensor of an index, whole and kept. open(file): returns the open file of that name.
function M.read(whole, open)
  local x = M_ffi.Tensor()
  local shape = ffi.new("int64_t[6]", whole.shape)
  check(C.eng_new(x, arguments.dtype_number(whole.dtype), #whole.shape, shape, C.ENG_KEEP))
  local good, message = pcall(autograd.scope, function()
    local flat = x:view(-1)
    for _, piece in ipairs(whole.pieces) do
      local part = open(piece.file):read(piece.name)
      if piece.count > 0 then
        flat:slice(1, piece.from + 1, piece.from + piece.count):copy(part)
      end
      part:free()
    end
  end)
  if good then return x end
  x:free()
  error(message, 0)
end

return M
