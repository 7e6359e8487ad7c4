-- safetensors files, the format of Hugging Face's weights. Called by scripts, nn/ and run/.
--
--   local weights, metadata = engine.load("model.safetensors")    { name = tensor }, { key = text }
--   engine.save("model.safetensors", weights, { format = "pt" })
--
--   local file = safetensors.open("model.safetensors")            reads only the header
--   print(file)                                                   names, dtypes, shapes
--   local w = file:read("wte.weight")
--   file:close()
--
-- Loaded tensors live until tensor:free(). A file that violates the format is rejected as a whole.
local M_ffi = require "engine.base.ffi"
local nearest = require "engine.base.nearest"

local C, check, expect, raise, raise_if, ffi, value_text = M_ffi.C, M_ffi.check, M_ffi.expect,
  M_ffi.raise, M_ffi.raise_if, M_ffi.ffi, M_ffi.value_text

local M = {}

local File = {}
File.__index = File

local out_file = ffi.new("eng_safetensors *[1]")
local out_writer = ffi.new("eng_safetensors_writer *[1]")
local out_text = ffi.new("const char *[2]")
local out_crc = ffi.new("uint32_t[1]")

--- Opens a file and checks its header. The result has `names` (in file order), `entries` by name
--- ({ dtype, shape, bytes }) and `metadata`. A file that is missing or malformed is an error.
function M.open(path)
  expect(type(path) == "string", path, "load: expected the path of a safetensors file")
  check(C.eng_safetensors_open(out_file, path))
  local file = { path = path, handle = ffi.gc(out_file[0], C.eng_safetensors_close), names = {},
    entries = {}, metadata = {} }
  local entry = ffi.new("eng_safetensors_entry")
  for i = 0, tonumber(C.eng_safetensors_count(file.handle)) - 1 do
    check(C.eng_safetensors_get(entry, file.handle, i))
    local name, shape = ffi.string(entry.name), {}
    for d = 1, entry.ndim do shape[d] = tonumber(entry.shape[d - 1]) end
    file.names[i + 1] = name
    file.entries[name] = { index = i, dtype = M_ffi.dtype_name[entry.dtype], shape = shape,
      bytes = tonumber(entry["end"] - entry.begin) }
  end
  for i = 0, tonumber(C.eng_safetensors_metadata_count(file.handle)) - 1 do
    check(C.eng_safetensors_metadata(out_text, out_text + 1, file.handle, i))
    file.metadata[ffi.string(out_text[0])] = ffi.string(out_text[1])
  end
  return setmetatable(file, File)
end

--- Reads one tensor by name. The tensor lives until it is freed or, with keep = false, until the
--- scope or the step ends.
function File:read(name, keep)
  raise_if(not self.handle, "cannot read '%s': %s is closed", tostring(name), self.path)
  local entry = self.entries[name] or raise("%s has no tensor '%s'%s", self.path, tostring(name),
    nearest.hint(name, self.names))
  local x = M_ffi.Tensor()
  check(C.eng_safetensors_read(x, self.handle, entry.index, keep ~= false))
  return x
end

--- Closes the file. Tensors that were read remain valid.
function File:close()
  if self.handle then C.eng_safetensors_close(ffi.gc(self.handle, nil)) end
  self.handle = nil
end

function File:__tostring()
  local lines = { ("%s: %d tensors"):format(self.path, #self.names) }
  for _, name in ipairs(self.names) do
    local e = self.entries[name]
    lines[#lines + 1] = ("  %-48s %-4s [%s]"):format(name, e.dtype, table.concat(e.shape, " x "))
  end
  for key, value in pairs(self.metadata) do
    lines[#lines + 1] = ("  metadata %s = %s"):format(key, value)
  end
  return table.concat(lines, "\n")
end

--- Reads a file. Returns all its tensors as { name = tensor }, and its metadata as { key = text }.
function M.load(path)
  local file, tensors = M.open(path), {}
  local good, problem = pcall(function()
    for _, name in ipairs(file.names) do tensors[name] = file:read(name) end
  end)
  file:close()
  if not good then
    for _, x in pairs(tensors) do C.eng_free(x) end
    error(problem, 0)
  end
  return tensors, file.metadata
end

-- Returns the tensors' names in the order of element size, the largest first. In this order, each
-- tensor begins at a multiple of its element size.
local function ordered(path, tensors)
  local names, width = {}, {}
  local info = ffi.new("eng_tensor_info")
  for name, x in pairs(tensors) do
    expect(type(name) == "string", name, "save %s: expected each name to be a string", path)
    expect(ffi.istype(M_ffi.Tensor, x), x, "save %s: expected a tensor for '%s'", path, name)
    if C.eng_info(info, x) ~= 0 then raise("save %s: '%s': %s", path, name, M_ffi.message()) end
    expect(not name:find("%z"), name, "save %s: expected names without NUL bytes", path)
    names[#names + 1] = name
    width[name] = C.eng_dtype_size(info.dtype)
  end
  table.sort(names, function(a, b)
    if width[a] ~= width[b] then return width[a] > width[b] end
    return a < b
  end)
  return names
end

local function fill(writer, path, names, tensors, metadata)
  local keys = {}
  expect(metadata == nil or type(metadata) == "table", metadata,
    "save %s: expected metadata to be a table { key = text }", path)
  for key, value in pairs(metadata or {}) do
    raise_if(type(key) ~= "string" or type(value) ~= "string" or key:find("%z") or value:find("%z"),
      "save %s: expected metadata { key = text } without NUL bytes, got %s = %s", path,
      tostring(key), value_text(value))
    keys[#keys + 1] = key
  end
  table.sort(keys)
  for _, key in ipairs(keys) do check(C.eng_safetensors_annotate(writer, key, metadata[key])) end
  for _, name in ipairs(names) do check(C.eng_safetensors_add(writer, name, tensors[name])) end
end

--- Writes { name = tensor } and metadata { key = text } to a temporary file and renames it, so that
--- a failure leaves the old file unchanged. Returns the CRC-32C of the file.
function M.save(path, tensors, metadata)
  expect(type(path) == "string", path, "save: expected the path of the file to write")
  expect(type(tensors) == "table", tensors, "save %s: expected a table { name = tensor }", path)
  raise_if(tensors.parameters and tensors.state,
    "save %s: expected a table { name = tensor }, got a module; hint: model:state()", path)
  local names = ordered(path, tensors)
  check(C.eng_safetensors_begin(out_writer, path))
  local writer = out_writer[0]
  local good, message = pcall(fill, writer, path, names, tensors, metadata)
  if not good then
    C.eng_safetensors_abort(writer)
    error(message, 0)
  end
  check(C.eng_safetensors_commit(writer, out_crc))
  return out_crc[0]
end

return M
