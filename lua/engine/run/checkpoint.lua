-- Checkpoints that resume bit for bit. A checkpoint is a directory
--
--   runs/<name>/checkpoints/step-00000123/
--     model.safetensors  optimizer.safetensors     tensors by name; one file per part
--     state.json              all other state as plain data; the sizes and CRC-32C of the files
--
-- The files are written to a temporary directory, which is then synced and renamed, so a checkpoint
-- is complete or absent. If checksums show later damage (a truncated file, a bad disk), readers use
-- the previous checkpoint.
--
--   checkpoint.save(dir, step, { model = { name = tensor }, optimizer = { ... }, state = { ... } },
--     { keep = 3 })
--   local c, message = checkpoint.load(dir)   -- the newest intact checkpoint: c.step,
--                                             -- c.model, c.optimizer, c.state, c.skipped
--   local c, message = checkpoint.open(dir)   -- without tensors; c:read("model", name) reads one
--
-- With several ranks, each rank writes a shard (shards.lua), and state.json lists all shards. The
-- same functions read both kinds of checkpoint. Called by scripts, run.lua, runs.lua and
-- verify.lua.
local M_ffi = require "engine.base.ffi"
local autograd = require "engine.tensor.autograd"
local disk = require "engine.base.file"
local fields = require "engine.base.fields"
local json = require "engine.base.json"
local nearest = require "engine.base.nearest"
local ranks = require "engine.dist.ranks"
local safetensors = require "engine.tensor.safetensors"
local shards = require "engine.run.shards"

local C, check, fail_if, ffi, plain = M_ffi.C, M_ffi.check, M_ffi.fail_if, M_ffi.ffi,
  M_ffi.without_line

local M = {}

local WHOLE, SHARDS = 1, 2   -- formats: one file for each part, or one for each rank

local FILE = fields.record { bytes = fields.count, crc32c = fields.text }

-- The fields of state.json, besides `state`, which belongs to the caller of M.save.
local HEADER = fields.record { format = fields.between(WHOLE, SHARDS), step = fields.count,
  files = fields.map(FILE, fields.rule("names of .safetensors files as keys", function(name)
    return type(name) == "string" and name:find("^[%w_%-]+%.safetensors$") ~= nil
  end)) }

local function names_in(directory) return disk.names(directory) or M_ffi.raise(M_ffi.message()) end

-- Removes the directory of a checkpoint and its files. Raises an error if it holds a folder that is
-- not empty.
local function remove(directory)
  if not disk.is_folder(directory) then return end
  for _, name in ipairs(names_in(directory)) do
    check(C.eng_file_remove(directory .. "/" .. name))
  end
  check(C.eng_file_remove(directory))
end

local function crc_text(crc) return ("%08x"):format(tonumber(crc)) end

-- Returns the checkpoint directories in `dir`, oldest first: { { step, path } ... }.
local function list(dir)
  M_ffi.expect(type(dir) == "string", dir, "checkpoint: expected the path of a directory")
  local found = {}
  if not disk.is_folder(dir) then return found end
  for _, name in ipairs(names_in(dir)) do
    local step = name:match("^step%-(%d+)$")
    if step and disk.is_folder(dir .. "/" .. name) then
      found[#found + 1] = { step = tonumber(step), path = dir .. "/" .. name }
    end
  end
  table.sort(found, function(a, b) return a.step < b.step end)
  return found
end

--- Returns the steps of the checkpoints in dir, oldest first, including those of damaged
--- checkpoints.
function M.steps(dir)
  local steps = {}
  for i, entry in ipairs(list(dir)) do steps[i] = entry.step end
  return steps
end

-- ------------------------------------------------------------------ saving

-- Removes all but the newest `keep` checkpoints.
local function prune(dir, keep)
  local all = list(dir)
  for i = 1, #all - keep do remove(all[i].path) end
end

-- Writes a file of tensors and reads it back; returns { crc32c =, bytes = }.
local function write_tensors(directory, name, tensors, metadata)
  local path = directory .. "/" .. name
  local crc = safetensors.save(path, tensors, metadata)
  local seen, size = ffi.new("uint32_t[1]"), ffi.new("int64_t[1]")
  check(C.eng_file_checksum(seen, size, path))
  fail_if(seen[0] ~= crc,
    "%s: the file read back differs from what was written; hint: check the disk", path)
  return { crc32c = crc_text(crc), bytes = tonumber(size[0]) }
end

local function write_state(directory, step, format, files, state)
  local body = ('{"format":%d,"engine":%s,"step":%d,"time":%s,\n"files":%s,\n"state":%s\n'):format(
    format, json.encode(M_ffi.version), step,
    json.encode(os.time()), json.encode(files), json.encode(state or {}, "state"))
  local text = ('%s,"crc32c":"%s"}\n'):format(body, crc_text(C.eng_crc32c(0, body, #body)))
  check(C.eng_file_write(directory .. "/state.json", text, #text))
end

-- Renames a complete checkpoint to its final name. Replaces a checkpoint of the same step.
local function put_in_place(temporary, final)
  if not disk.exists(final) then check(C.eng_file_rename(temporary, final))
  elseif C.eng_file_exchange(temporary, final) == 0 then pcall(remove, temporary)
  else
    remove(final)
    check(C.eng_file_rename(temporary, final))
  end
end

-- Returns the paths of a checkpoint: { dir =, final =, temporary = where it is written }.
local function place_of(dir, step)
  local final = ("%s/step-%08d"):format(dir, step)
  return { dir = dir, final = final, temporary = final .. ".tmp" }
end

-- Makes the temporary directory of a checkpoint. Returns its path.
local function begin(place)
  check(C.eng_file_mkdir(place.dir))
  for _, name in ipairs(names_in(place.dir)) do
    -- a killed run left this directory
    if name:match("^step%-%d+%.tmp$") then pcall(remove, place.dir .. "/" .. name) end
  end
  check(C.eng_file_mkdir(place.temporary))
  return place.temporary
end

-- Completes a checkpoint whose tensor files are written: writes state.json, renames the directory,
-- and keeps only the newest options.keep checkpoints. place: from place_of. format: WHOLE or
-- SHARDS. Returns the checkpoint's path, and a message if an old checkpoint could not be removed.
local function finish(place, step, format, files, state, options)
  for name in pairs(files) do
    fail_if(not disk.is_file(place.temporary .. "/" .. name),
      "%s is not in %s; hint: the ranks need a shared disk", name, place.temporary)
  end
  write_state(place.temporary, step, format, files, state)
  check(C.eng_file_sync(place.temporary))
  put_in_place(place.temporary, place.final)
  local keep = options and options.keep
  if not keep then return place.final end
  local pruned, problem = pcall(prune, place.dir, keep)
  return place.final, not pruned and problem or nil
end

-- Returns the results of f(place). After an error in f, removes what was written, and returns nil
-- and the message.
local function attempt(place, f)
  local good, result, note = pcall(f, place)
  if good then return result, note end
  pcall(remove, place.temporary)
  return nil, ("checkpoint %s: %s"):format(place.final, plain(result))
end

--- Writes a checkpoint of `step` into dir and returns its path. `parts.state` is plain data, and
--- every other part is a table of tensors. options.keep: how many checkpoints to keep (nil: all).
--- After an error, dir is unchanged. The second result is a message if an old checkpoint could not
--- be removed.
function M.save(dir, step, parts, options)
  M_ffi.expect(type(step) == "number" and step >= 0 and step % 1 == 0, step,
    "checkpoint.save: expected the step to be a whole number of 0 or more")
  M_ffi.expect(type(dir) == "string", dir, "checkpoint.save: expected the path of a directory")
  M_ffi.expect(type(parts) == "table", parts, "checkpoint.save: expected a table of parts, such " ..
    "as { model = { name = tensor } }")
  local keep = options and options.keep
  M_ffi.expect(not keep or type(keep) == "number" and keep >= 1, keep,
    "checkpoint.save: expected keep to be a number of 1 or more")
  local path, note = attempt(place_of(dir, step), function(place)
    begin(place)
    local files = {}
    for part, tensors in pairs(parts) do
      local name = part .. ".safetensors"
      if part ~= "state" then
        files[name] = write_tensors(place.temporary, name, tensors,
          { part = part, step = tostring(step) })
      end
    end
    return finish(place, step, WHOLE, files, parts.state, options)
  end)
  if not path then error(note, 2) end
  return path, note
end

local function shard_name(rank, size)
  return ("shard-%05d-of-%05d.safetensors"):format(rank + 1, size)
end

-- Writes this rank's file. Returns text with the file's checksum and its size in bytes.
local function write_own(place, pieces, step)
  fail_if(not disk.is_folder(place.temporary),
    "this rank sees no directory %s; hint: the ranks need a shared disk", place.temporary)
  local file
  autograd.scope(function()
    local own, name = pieces(), shard_name(ranks.rank(), ranks.size())
    own.shapes.step = tostring(step)
    file = write_tensors(place.temporary, name, own.tensors, own.shapes)
  end)
  return ("%s %d"):format(file.crc32c, file.bytes)
end

-- Builds the table `files` of state.json from the answers of all ranks. An answer is "ok CHECKSUM
-- BYTES" or an error message. Raises an error if a rank failed.
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

-- Calls attempt(place, f) on rank 0. Returns the checkpoint's path on every rank, and on rank 0
-- also the second result of f. After an error, returns nil and the message on every rank.
local function on_first(place, f)
  local path, note
  if ranks.rank() == 0 then path, note = attempt(place, f) end
  local problem = ranks.from_first(path and "" or note)
  if problem ~= "" then return nil, problem end
  return place.final, note
end

--- Writes the checkpoint of `step` into dir, one shard per rank; every rank calls it. pieces()
--- returns what this rank writes (shards.lua). state(), called on rank 0, returns what M.save takes
--- as parts.state. options.keep: as in M.save. Returns the path on every rank, and on rank 0 also
--- the second result of M.save. If a rank fails, returns nil and the failed ranks' messages, and
--- dir is unchanged. The checkpoint gets its final name when every rank is done. If a rank dies
--- before that, the previous checkpoint stays the newest.
function M.save_shards(dir, step, pieces, state, options)
  local place = place_of(dir, step)
  local begun, problem = on_first(place, begin)
  if not begun then return nil, problem end
  local wrote, answer = pcall(write_own, place, pieces, step)
  local answers = ranks.from_all(wrote and "ok " .. answer or plain(answer))
  return on_first(place, function()
    return finish(place, step, SHARDS, files_of(answers), state(), options)
  end)
end

--- Removes the checkpoints after `step`, for a run that continues from `step` and writes new ones.
function M.forget_after(dir, step)
  for _, entry in ipairs(list(dir)) do
    if entry.step > step then remove(entry.path) end
  end
end

-- ------------------------------------------------------------------ loading

local function read_state(directory)
  local file, problem = io.open(directory .. "/state.json", "rb")
  if not file then return nil, "state.json is missing: " .. problem end
  local text = file:read("*a") or ""
  file:close()
  local body, crc = text:match('^(.*),"crc32c":"(%x+)"}\n$')
  if not body then return nil, "state.json is incomplete: it does not end with a checksum" end
  local own = crc_text(C.eng_crc32c(0, body, #body))
  if own ~= crc then
    return nil, ("state.json is damaged: its checksum is %s, expected %s"):format(own, crc)
  end
  local good, header = pcall(json.decode, text)
  if not good then return nil, "state.json is damaged: " .. tostring(header) end
  if fields.whole(header.format) and header.format > SHARDS then
    return nil, ("it was written by a newer engine (in format %.0f; this engine reads up to %d)")
      :format(header.format, SHARDS)
  end
  problem = HEADER(header, "state.json")
  local step = tonumber(directory:match("/step%-(%d+)/*$"))
  if not problem and step and header.step ~= step then
    problem = ("state.json.step: expected %d, as in the directory's name, got %.0f"):format(step,
      header.step)
  end
  return not problem and header or nil, problem
end

-- Returns the contents of a checkpoint: { PART = { NAME = { dtype =, shape =, count =, pieces = },
-- ... }, ... }. Only a checkpoint of shards has `pieces`.
local function contents(path, header)
  local names, parts = nearest.keys(header.files), {}
  if header.format == SHARDS then return shards.index(path, names) end
  for _, name in ipairs(names) do
    local file, part = safetensors.open(path .. "/" .. name), {}
    file:close()
    for _, tensor in ipairs(file.names) do
      local entry = file.entries[tensor]
      part[tensor] = { dtype = entry.dtype, shape = entry.shape,
        count = shards.elements(entry.shape) }
    end
    parts[name:match("^(.*)%.safetensors$")] = part
  end
  return parts
end

-- Returns the contents of state.json, with `parts` added, if every file is intact. Otherwise
-- returns nil and what is wrong.
local function verify(directory)
  local header, problem = read_state(directory)
  if not header then return nil, problem end
  local crc, size = ffi.new("uint32_t[1]"), ffi.new("int64_t[1]")
  for name, expected in pairs(header.files) do
    local path = directory .. "/" .. name
    if not disk.is_file(path) then return nil, name .. " is missing" end
    if C.eng_file_checksum(crc, size, path) ~= 0 then return nil, M_ffi.message() end
    if tonumber(size[0]) ~= expected.bytes then
      return nil, ("%s has %d bytes, expected %d"):format(name, tonumber(size[0]), expected.bytes)
    end
    if crc_text(crc[0]) ~= expected.crc32c then
      return nil, ("%s is damaged: its checksum is %s, expected %s"):format(name, crc_text(crc[0]),
        expected.crc32c)
    end
  end
  local good, parts = pcall(contents, directory, header)
  if not good then return nil, tostring(parts) end
  header.parts = parts
  return header
end

-- Returns the path and the header of the newest intact checkpoint (nil and nil if there is none),
-- and a list of messages about the damaged checkpoints that were skipped. With `last`, ignores the
-- checkpoints after that step.
local function newest(dir, last)
  local all, skipped = list(dir), {}
  for i = #all, 1, -1 do
    if all[i].step <= (last or all[i].step) then
      local header, problem = verify(all[i].path)
      if header then return all[i].path, header, skipped end
      skipped[#skipped + 1] = ("checkpoint %s is skipped: %s"):format(all[i].path, problem)
    end
  end
  return nil, nil, skipped
end

--- Returns the path of the newest intact checkpoint in dir (nil if there is none), and a list of
--- messages about the damaged checkpoints that were skipped.
function M.latest(dir)
  local path, _, skipped = newest(dir)
  return path, skipped
end

local Checkpoint = {}
Checkpoint.__index = Checkpoint

local function file_of(self, name)
  self.files[name] = self.files[name] or safetensors.open(self.path .. "/" .. name)
  return self.files[name]
end

--- Reads a whole tensor, which the caller must free. If `entry` is given, it takes the place of
--- parts[part][name].
function Checkpoint:read(part, name, entry)
  entry = entry or self.parts[part] and self.parts[part][name]
    or error(("%s has no %s tensor '%s'"):format(self.path, part, name), 0)
  if entry.make then return autograd.scope(function() return entry.make():keep() end) end
  if entry.pieces then return shards.read(entry, function(file) return file_of(self, file) end) end
  return file_of(self, part .. ".safetensors"):read(name)
end

function Checkpoint:close()
  for _, file in pairs(self.files) do file:close() end
  self.files = {}
end

--- Opens a checkpoint: `dir` itself if it is a checkpoint, else the newest intact checkpoint in
--- `dir` (up to step `last`, if given). Returns { step, path, state, skipped = { messages }, parts
--- = { model = { name = { dtype =, shape =, count = } } ... }, read(part, name), close() }, or nil
--- and the reason. A third result is true if there are checkpoints in `dir` (up to `last`) and all
--- are damaged. Callers may change `parts`. If the entry of a tensor has a function `make`, read()
--- returns a kept copy of the tensor that `make` returns, and reads no file itself (masters.lua).
function M.open(dir, last)
  M_ffi.expect(type(dir) == "string", dir, "checkpoint: expected the path of a directory")
  local path, header, skipped
  if disk.is_file(dir .. "/state.json") or dir:match("step%-%d+/*$") then
    local problem
    path, skipped = dir, {}
    if not disk.is_folder(dir) then
      return nil, ("checkpoint %s: there is no such directory"):format(dir)
    end
    header, problem = verify(dir)
    if not header then return nil, ("checkpoint %s: %s"):format(dir, problem) end
  else
    path, header, skipped = newest(dir, last)
    if not path then
      if #skipped > 0 then return nil, table.concat(skipped, "\n"), true end
      return nil, ("there is no checkpoint%s in %s"):format(
        last and (" up to step %d"):format(last) or "", dir)
    end
  end
  return setmetatable({ path = path, step = header.step, state = header.state, skipped = skipped,
    parts = header.parts, files = {} }, Checkpoint)
end

--- Opens a checkpoint as M.open does and reads all tensors: { step, path, state, skipped, model =
--- tensors, ... }, or nil and the reason.
function M.load(dir)
  local c, message = M.open(dir)
  if not c then return nil, message end
  local result = { path = c.path, step = c.step, state = c.state, skipped = c.skipped }
  local good, problem = pcall(function()
    for part, tensors in pairs(c.parts) do
      result[part] = {}
      for name in pairs(tensors) do result[part][name] = c:read(part, name) end
    end
  end)
  c:close()
  if good then return result end
  for part in pairs(c.parts) do
    for _, x in pairs(result[part] or {}) do x:free() end
  end
  return nil, ("checkpoint %s: %s"):format(c.path, tostring(problem))
end

return M
