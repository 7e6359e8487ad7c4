-- Cuts a checkpoint's tensors into pieces and joins them again. The ranks of a job write their
-- pieces at the same time, each rank into a shard, so that no rank gathers or writes the whole
-- state.
--
--   shard-00001-of-00004.safetensors     the pieces of rank 0, and so on
--
-- The piece "model/wte.weight@4096" holds consecutive elements of the model's wte.weight, from
-- element 4096 on (row-major, counted from 0). The file's metadata has the whole shape,
-- "model/wte.weight" = "256 32". Readers join the pieces of all ranks, so any number of ranks can
-- resume from the shards.
-- Called by run.lua, restore.lua and checkpoint.lua; checkpoint.lua writes and reads the files.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local autograd = require "engine.tensor.autograd"
local ranks = require "engine.dist.ranks"
local safetensors = require "engine.tensor.safetensors"
local tensor = require "engine.tensor.tensor"

local C, check, fail_if, ffi = M_ffi.C, M_ffi.check, M_ffi.fail_if, M_ffi.ffi
local sorted = require("engine.base.nearest").keys      -- the same order on all ranks

local M = {}

--- Returns the number of elements of a shape.
function M.elements(shape)
  local count = 1
  for _, n in ipairs(shape) do count = count * n end
  return count
end

-- ------------------------------------------------------------------ cutting

--- Cuts tensors { { name =, x = } ... }, laid end to end, into `size` parts that differ by at most
--- one element. Parts count from 0. Calls f(name, x, from, to) for each tensor whose elements
--- [from, to) are in the part `part`. Part 0 also gets the tensors without elements.
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

-- The pieces of tensors that a rank writes.
local Pieces = {}
Pieces.__index = Pieces
function M.pieces() return setmetatable({ tensors = {}, shapes = {} }, Pieces) end

--- Adds elements [from, to) of the tensor `name` of `part` ("model", "optimizer" or "user"), whose
--- whole shape is `shape` (x's by default). x holds either these elements or the whole tensor.
function Pieces:add(part, name, x, from, to, shape)
  local key = part .. "/" .. name
  self.tensors[("%s@%d"):format(key, from)] = to - from == x.count and x:view(-1)
    or x:view(-1):slice(1, from + 1, to)
  self.shapes[key] = table.concat(shape or x.shape, " ")
end

-- ------------------------------------------------------------------ a job of ranks

-- Calls f(p, buffer, from, to) for each buffer of the optimizer's state. This rank has the elements
-- [from, to) of the buffer.
local function each_buffer(reducer, f)
  local optimizer = reducer.trainer.optimizer
  for i, p in ipairs(optimizer.list) do
    local from, to = 0, p.tensor.count
    if reducer.zero then from, to = reducer:own_part(i) end
    for _, buffer in ipairs(optimizer.state:of(i, reducer:shape(p))) do
      if buffer.whole then f(p, buffer, 0, buffer.x and buffer.x.count or 0)
      else f(p, buffer, from, to) end
    end
  end
end

-- Returns the averages of weights (train/weight_averages.lua). Each rank holds the whole average of
-- each of its parameters.
local function averages_of(reducer)
  local fp8 = reducer.trainer.optimizer.fp8
  return fp8 and fp8.averages.list or {}
end

-- Returns, with ZeRO-3, this rank's part of each trained weight, by the weight's name in the model.
-- Without ZeRO-3, the table is empty.
local function own_weights(reducer)
  local own, slots = {}, {}
  for _, p in ipairs(reducer.parted and reducer.trainer.model:parameters() or {}) do
    slots[tonumber(p.tensor.slot)] = p.name
  end
  for i, w in ipairs(reducer.parted and reducer:weights() or {}) do
    local name = slots[tonumber(reducer.trainer.optimizer.list[i].tensor.slot)]
    if name and not (reducer.apart and reducer.apart[w.name]) then own[name] = w end
  end
  return own
end

--- Returns the pieces that this rank writes: its share of the tensors that all ranks hold, its
--- share of the tensors that only some ranks hold (experts) and, with ZeRO, the moments and weights
--- that it keeps. `user`: the tensors of trainer.state, which this rank writes whole, or nil.
function M.of_rank(reducer, user)
  local pieces, parameter_of = M.pieces(), {}
  local function share(part, tensors)
    local common, held = {}, {}
    for _, name in ipairs(sorted(tensors)) do
      local apart = reducer.apart and reducer.apart[parameter_of[name] or name]
      local list = not apart and common or apart.held and held
      if list then list[#list + 1] = { name = name, x = tensors[name] } end
    end
    local function add(name, x, from, to) pieces:add(part, name, x, from, to) end
    M.cut(common, reducer.rank, reducer.size, add)
    if reducer.apart then M.cut(held, reducer.holders.rank, reducer.holders.size, add) end
  end
  local state = reducer.trainer.model:state()
  for name, w in pairs(own_weights(reducer)) do
    local n = w.tensor.count
    if n > 0 or state[name].count == 0 and reducer.rank == 0 then
      pieces:add("model", name, w.tensor, w.from, w.from + n, state[name].shape)
    end
    state[name] = nil
  end
  share("model", state)
  local buffers = {}
  each_buffer(reducer, function(p, buffer, from, to)
    buffers[buffer.name], parameter_of[buffer.name] = buffer.x, p.name
    local empty = buffer.x and buffer.x.count == 0   -- then only one rank writes it
    if reducer.zero and (to > from or empty and (buffer.whole or reducer.rank == 0)) then
      pieces:add("optimizer", buffer.name, buffer.x, from, to, buffer.shape(reducer:shape(p)))
    end
  end)
  if not reducer.zero then share("optimizer", buffers) end
  local averages = {}
  for _, a in ipairs(averages_of(reducer)) do
    averages[a.name], parameter_of[a.name] = a.x, a.p.name
  end
  share("optimizer", averages)
  for name, x in pairs(user or {}) do pieces:add("user", name, x, 0, x.count) end
  return pieces
end

local MOST_PROBLEMS = 12   -- the most tensors that a message lists

-- Raises an error unless a part of a checkpoint has exactly the tensors `wanted`, { name = shape }.
-- If c has a function `changes`, the message has its text about changed settings.
local function want_tensors(c, part, wanted)
  local problems, text = {}, tensor.shape_text
  for name, shape in pairs(wanted) do
    local found = c.parts[part][name]
    if not found then problems[#problems + 1] = ("missing: %s %s"):format(name, text(shape))
    elseif text(found.shape) ~= text(shape) then
      problems[#problems + 1] = ("%s: expected %s, got %s"):format(name, text(shape),
        text(found.shape))
    end
  end
  for name in pairs(c.parts[part]) do
    if not wanted[name] then
      problems[#problems + 1] = ("unknown: %s %s"):format(name, text(c.parts[part][name].shape))
    end
  end
  table.sort(problems)
  local shown = table.concat(problems, "\n  ", 1, math.min(#problems, MOST_PROBLEMS))
  if #problems > MOST_PROBLEMS then
    shown = ("%s\n  and %d more tensors"):format(shown, #problems - MOST_PROBLEMS)
  end
  fail_if(#problems > 0, "resume: %s does not fit this %s%s:\n  %s", c.path, part,
    #problems > 0 and c.changes and c.changes() or "", shown)
end

M.PIECE = 2 ^ 22       -- elements that rank 0 sends at a time

-- Broadcasts a tensor from rank 0. Each rank copies its own part, if it has one, into item.x.
-- `whole`: the tensor on rank 0, nil on other ranks. memory: room for M.PIECE elements.
local function send(item, whole, memory)
  local number, x, from = arguments.dtype_number(item.dtype), item.x, item.from
  local size, own = C.eng_dtype_size(number), x and x.count or 0
  for at = 0, item.count - 1, M.PIECE do
    local n = math.min(M.PIECE, item.count - at)
    local low, high = math.max(at, from), math.min(at + n, from + own)
    if whole then check(C.eng_read(memory, number, n, whole:view(-1):slice(1, at + 1, at + n))) end
    check(C.eng_comm_broadcast(ranks.world(), memory, n * size, 0))
    if high > low then
      check(C.eng_write(x:view(-1):slice(1, low - from + 1, high - from),
        memory + (low - at) * size, number, high - low))
    end
  end
end

--- Restores the tensors of a checkpoint, one after the other. `c`: the open checkpoint on rank 0,
--- nil on other ranks. With several ranks, rank 0 sends each tensor to every rank, and a rank
--- stores the part that it keeps.
function M.spread(reducer, c)
  local trainer = reducer.trainer
  trainer.optimizer.state:restart()
  local state = trainer.model:state()
  local list, wanted = {}, { model = {}, optimizer = {} }
  local function want(part, name, shape, x, from, dtype)
    wanted[part][name] = shape
    list[#list + 1] = { part = part, name = name, x = x, dtype = dtype or x.dtype,
      count = M.elements(shape), from = from }
  end
  local own = own_weights(reducer)
  for _, name in ipairs(sorted(state)) do
    local w = own[name]
    want("model", name, reducer:shape { name = name, tensor = state[name] },
      w and w.tensor or state[name], w and w.from or 0)
  end
  each_buffer(reducer, function(p, buffer, from)
    want("optimizer", buffer.name, buffer.shape(reducer:shape(p)), buffer.x, from, buffer.dtype)
  end)
  local averages = averages_of(reducer)
  for _, a in ipairs(averages) do want("optimizer", a.name, reducer:shape(a.p), a.x, 0) end
  if c then
    for _, part in ipairs { "model", "optimizer" } do want_tensors(c, part, wanted[part]) end
  end
  local memory = reducer.many and ffi.new("double[?]", M.PIECE)  -- no dtype is wider than double
  for _, item in ipairs(list) do
    local whole = c and c:read(item.part, item.name)
    if reducer.many then autograd.scope(send, item, whole, ffi.cast("char *", memory))
    else item.x:copy(whole) end
    if whole then whole:free() end
  end
  if #averages > 0 then trainer.optimizer.fp8.averages:start() end
end

-- ------------------------------------------------------------------ reading

--- Returns the contents of the shards `names`, files in the directory `path`: { model = { name = {
--- dtype =, shape =, count =, pieces = { { file =, name =, from =, count = } ... } } }, optimizer =
--- ... }. The pieces are in order. Raises an error if the pieces do not make up whole tensors.
function M.index(path, names)
  local parts = { model = {}, optimizer = {} }
  for _, name in ipairs(names) do
    local file = safetensors.open(path .. "/" .. name)
    file:close()
    for _, entry_name in ipairs(file.names) do
      local entry, part, tensor_name, from = file.entries[entry_name],
        entry_name:match("^(%w+)/(.*)@(%d+)$")
      local shape_text = part and file.metadata[part .. "/" .. tensor_name]
      fail_if(not shape_text, "%s: '%s' is not a piece of a tensor; expected a name such as " ..
        "'model/NAME@0', and the shape of model/NAME in the metadata", name, entry_name)
      local shape = {}
      for n in shape_text:gmatch("%d+") do shape[#shape + 1] = tonumber(n) end
      parts[part] = parts[part] or {}
      local whole = parts[part][tensor_name]
        or { dtype = entry.dtype, shape = shape, count = M.elements(shape), pieces = {} }
      parts[part][tensor_name] = whole
      local expected, got = tensor.shape_text(whole.shape), tensor.shape_text(shape)
      fail_if(whole.dtype ~= entry.dtype or expected ~= got,
        "%s: '%s' differs from the shards read before: expected a piece of %s %s, got one of %s %s",
        name, entry_name, whole.dtype, expected, entry.dtype, got)
      table.insert(whole.pieces, { file = name, name = entry_name, from = tonumber(from),
        count = entry.shape[1] })
    end
  end
  for part, tensors in pairs(parts) do
    for name, whole in pairs(tensors) do
      table.sort(whole.pieces, function(a, b) return a.from < b.from end)
      local at = 0
      for _, piece in ipairs(whole.pieces) do
        fail_if(piece.from ~= at,
          "%s tensor '%s': expected a piece that begins at element %d, got one that begins at " ..
          "%d; a shard is missing, or two shards hold the same elements", part, name, at,
          piece.from)
        at = at + piece.count
      end
      fail_if(at ~= whole.count, "%s tensor '%s': expected %d elements in the shards, got %d",
        part, name, whole.count, at)
    end
  end
  return parts
end

--- Joins the pieces of `whole`, an entry of M.index's result, into one tensor, which the caller
--- must free. open(name) returns the open file with this name.
function M.read(whole, open)
  local x = M_ffi.Tensor()
  local shape = ffi.new("int64_t[?]", C.ENG_MAX_DIMS, whole.shape)
  check(C.eng_new(x, arguments.dtype_number(whole.dtype), #whole.shape, shape, C.ENG_KEEP))
  local good, message = pcall(autograd.scope, function()
    local flat = x:view(-1)
    for _, piece in ipairs(whole.pieces) do
      local part = open(piece.file):read(piece.name)
      if piece.count > 0 then flat:slice(1, piece.from + 1, piece.from + piece.count):copy(part) end
      part:free()
    end
  end)
  if good then return x end
  x:free()
  error(message, 0)
end

return M
