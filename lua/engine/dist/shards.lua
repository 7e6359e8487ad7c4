-- Checkpoints of several ranks: each writes a part of the state, at once and beside the others', so that none holds or writes all of it.
--
--   step-00000123/shard-00001-of-00004.safetensors     rank 0's pieces, and so on. "model/wte.weight@4096" is the run of elements of the
--                                                      model's wte.weight that begins at number 4096, row-major, from 0; the metadata
--                                                      has the whole shape: "model/wte.weight" = "256 32"
--                 state.json                           as checkpoint.lua has it, with the shards' sizes and checksums; by rank 0
--
-- The directory has its final name when every rank is done: a rank that dies before leaves the checkpoint before it the newest one.
-- What was written by n ranks is read whole, so any number goes on with it. The ranks need a disk in common.
-- Called by run.lua; checkpoint.lua reads through index() and read().
local M_ffi = require "engine.base.ffi"
local checkpoint = require "engine.run.checkpoint"
local ranks = require "engine.dist.ranks"
local safetensors = require "engine.tensor.safetensors"

local C, check, ffi = M_ffi.C, M_ffi.check, M_ffi.ffi

local M = {}

local FORMAT = 2              -- of state.json
local DIRECTORY = 2           -- what eng_file_kind says

-- ------------------------------------------------------------------ cutting

--- Tensors { { name =, x = } ... } as one run of elements, cut into `size` equal parts: calls f(name, x, from, to) for what lies in
--- part `part` (from 0) of each tensor.
function M.cut(list, part, size, f)
  local total, at = 0, 0
  for _, item in ipairs(list) do total = total + item.x.count end
  local low, high = math.floor(total * part / size), math.floor(total * (part + 1) / size)
  for _, item in ipairs(list) do
    local count = item.x.count
    local from, to = math.max(low - at, 0), math.min(high - at, count)
    if to > from or (count == 0 and part == 0) then f(item.name, item.x, from, math.max(to, from)) end
    at = at + count
  end
end

--- What a rank writes, piece by piece.
local Pieces = {}
Pieces.__index = Pieces
function M.pieces() return setmetatable({ tensors = {}, shapes = {} }, Pieces) end

--- Elements [from, to) of x, a tensor `shape` large called `name` in `part` ("model" or "optimizer").
function Pieces:add(part, name, x, from, to, shape)
  local key = part .. "/" .. name
  self.tensors[("%s@%d"):format(key, from)] = to - from == x.count and x:view(-1) or x:view(-1):slice(1, from + 1, to)
  self.shapes[key] = table.concat(shape or x.shape, " ")
end

-- ------------------------------------------------------------------ writing

local function shard_name(rank, size) return ("shard-%05d-of-%05d.safetensors"):format(rank + 1, size) end

local function plain(message) return (tostring(message):gsub("^[^:\n]+:%d+: ", "")) end

-- This rank's file; gives "crc bytes".
local function write_own(place, pieces, step)
  if C.eng_file_kind(place.temporary) ~= DIRECTORY then
    error(("there is no %s here; hint: the ranks need a disk in common"):format(place.temporary), 0)
  end
  local file
  require("engine").scope(function()
    local own = pieces()
    own.shapes.step = tostring(step)
    file = checkpoint.write_tensors(place.temporary, shard_name(ranks.rank(), ranks.size()), own.tensors, own.shapes)
  end)
  return ("%s %d"):format(file.crc32c, file.bytes)
end

-- What each rank said of its file, as state.json's `files`; raises where one failed.
local function files_of(answers)
  local files, failed = {}, {}
  for i, answer in ipairs(answers) do
    local crc, bytes = answer:match("^ok (%x+) (%d+)$")
    files[shard_name(i - 1, #answers)] = { crc32c = crc, bytes = tonumber(bytes) }
    if not crc then failed[#failed + 1] = ("rank %d: %s"):format(i - 1, answer) end
  end
  if #failed > 0 then error(table.concat(failed, "; "), 0) end
  return files
end

--- Writes the checkpoint of `step` into dir; every rank calls it. pieces(): what this rank writes (M.pieces()); state(): plain data, of
--- rank 0. options.keep as in checkpoint.save. Gives the path on every rank, or nil and what went wrong on one of them; then nothing in
--- dir has changed.
function M.save(dir, step, pieces, state, options)
  local first = ranks.rank() == 0
  local place, began, problem
  if first then
    began, place = pcall(checkpoint.begin, dir, step)
    if not began then problem = plain(place) end
  end
  local told = ranks.from_first(first and (began and "+" .. place.temporary or "-" .. problem:sub(1, 400)) or nil)
  if told:sub(1, 1) == "-" then return nil, told:sub(2) end
  place = place or { temporary = told:sub(2) }
  local wrote, answer = pcall(write_own, place, pieces, step)
  local answers = ranks.from_all(wrote and "ok " .. answer or plain(answer), 500)
  local final, note
  if first then
    local good, result, more = pcall(function()
      return checkpoint.finish(place, step, FORMAT, files_of(answers), state(), options)
    end)
    if good then final, note = result, more
    else
      problem = ("checkpoint %s: %s"):format(place.final, plain(result))
      checkpoint.abandon(place)
    end
  end
  told = ranks.from_first(first and (final and "+" .. final or "-" .. problem) or nil)
  if told:sub(1, 1) == "-" then return nil, told:sub(2) end
  return told:sub(2), note
end

-- ------------------------------------------------------------------ reading

--- What the shards in `path` hold: { model = { name = { dtype =, shape =, count =, pieces = { { file =, name =, from =, count = } ... } } } },
--- each tensor's pieces in order. Raises where they do not make up whole tensors.
function M.index(path, names)
  local parts = { model = {}, optimizer = {} }
  for _, name in ipairs(names) do
    local file = safetensors.open(path .. "/" .. name)
    file:close()
    for _, entry_name in ipairs(file.names) do
      local entry, part, tensor_name, from = file.entries[entry_name], entry_name:match("^(%w+)/(.*)@(%d+)$")
      local shape_text = part and file.metadata[part .. "/" .. tensor_name]
      if not shape_text then error(("%s: '%s' is no piece of a tensor"):format(name, entry_name), 0) end
      local shape, count = {}, 1
      for n in shape_text:gmatch("%d+") do
        shape[#shape + 1], count = tonumber(n), count * tonumber(n)
      end
      parts[part] = parts[part] or {}
      local whole = parts[part][tensor_name] or { dtype = entry.dtype, shape = shape, count = count, pieces = {} }
      parts[part][tensor_name] = whole
      if whole.dtype ~= entry.dtype or whole.count ~= count then error(("%s: '%s' differs from the other shards"):format(name, entry_name), 0) end
      table.insert(whole.pieces, { file = name, name = entry_name, from = tonumber(from), count = entry.shape[1] })
    end
  end
  for part, tensors in pairs(parts) do
    for name, whole in pairs(tensors) do
      table.sort(whole.pieces, function(a, b) return a.from < b.from end)
      local at = 0
      for _, piece in ipairs(whole.pieces) do
        if piece.from ~= at then error(("elements %d to %d of %s's '%s' are in no shard, or in two"):format(at, piece.from, part, name), 0) end
        at = at + piece.count
      end
      if at ~= whole.count then error(("%s's '%s' has %d elements in the shards, expected %d"):format(part, name, at, whole.count), 0) end
    end
  end
  return parts
end

--- A tensor of an index, whole and kept. `open(file)`: an open file of that name.
function M.read(whole, open)
  local x = M_ffi.Tensor()
  local shape = ffi.new("int64_t[6]", whole.shape)
  check(C.eng_new(x, M_ffi.dtype_number(whole.dtype), #whole.shape, shape, C.ENG_KEEP))
  local good, message = pcall(require("engine").scope, function()
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
