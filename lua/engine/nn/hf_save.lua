-- Saves models in the files that Hugging Face's transformers loads: config.json, model.safetensors
-- or shards with an index, and copies of the other files (tokenizer, generation settings) of the
-- folder that the model was loaded from, without subfolders and hidden files. This module is the
-- method `save` of the models that hf_load.lua makes. Called by scripts.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local files = require "engine.base.file"
local json = require "engine.base.json"
local safetensors = require "engine.tensor.safetensors"
local autograd = require "engine.tensor.autograd"
local tensor = require "engine.tensor.tensor"
local architectures = require "engine.nn.architectures"

local C, check, expect, raise = M_ffi.C, M_ffi.check, M_ffi.expect, M_ffi.raise

local HF_NAMES = { f32 = "float32", bf16 = "bfloat16", f16 = "float16", f64 = "float64" }
local INDEX = "model.safetensors.index.json"

-- ------------------------------------------------------------------ config.json

-- Returns the text of a config.json with the given dtype. It is the text of the loaded file
-- (source.text) with the dtype replaced. If source.text is nil, it is source.fields as JSON.
local function config_text(source, dtype)
  if not source.text then
    source.fields.dtype = HF_NAMES[dtype]
    return json.plain(source.fields) .. "\n"
  end
  local name = '"' .. HF_NAMES[dtype] .. '"'
  local text, old = source.text:gsub('("torch_dtype"%s*:%s*)"[^"]*"', "%1" .. name)
  local new
  text, new = text:gsub('("dtype"%s*:%s*)"[^"]*"', "%1" .. name)
  return old + new > 0 and text or (text:gsub("{", '{\n  "dtype": ' .. name .. ",", 1))
end

local function write(path, text) check(C.eng_file_write(path, text, #text), true) end

-- ------------------------------------------------------------------ weights

-- Returns the tensors of the files in order, as a list of { name, tensor, bytes }.
local function parts_of(model, source, dtype)
  local list = {}
  local function add(name, x)
    list[#list + 1] = { name = name, tensor = x,
      bytes = x.count * tonumber(C.eng_dtype_size(M_ffi.dtype[dtype or x.dtype])) }
  end
  for _, item in ipairs(architectures.plan(model, source.arch, source.prefix)) do
    local row, x = 0, item.parameter.tensor
    for _, part in ipairs(item.parts) do
      local y = #item.parts > 1 and x:slice(1, row + 1, row + part.rows) or x
      add(part.name, item.transposed and y:transpose() or y)
      row = row + part.rows
    end
  end
  if source.tied_head then add("lm_head.weight", list[1].tensor) end
  return list
end

-- Divides the parts into shards of at most `limit` bytes. A part that is larger gets its own shard.
local function shards_of(parts, limit)
  local shards, room = {}, -1
  for _, part in ipairs(parts) do
    if room < part.bytes then
      shards[#shards + 1] = {}
      room = limit
    end
    room = room - part.bytes
    table.insert(shards[#shards], part)
  end
  return shards
end

-- Writes the shards and removes files of an earlier save, which transformers would load instead.
local function save_weights(folder, parts, limit, dtype)
  local shards, total, map, kept = shards_of(parts, limit), 0, {}, {}
  for i, shard in ipairs(shards) do
    local name = #shards == 1 and "model.safetensors"
      or ("model-%05d-of-%05d.safetensors"):format(i, #shards)
    kept[name] = true
    autograd.scope(function()
      local tensors = {}
      for _, part in ipairs(shard) do
        tensors[part.name] = dtype and part.tensor:to(dtype) or part.tensor
        map[part.name], total = name, total + part.bytes
      end
      safetensors.save(folder .. "/" .. name, tensors, { format = "pt" })
    end)
  end
  if #shards > 1 then
    kept[INDEX] = true
    write(folder .. "/" .. INDEX, json.plain { metadata = { total_size = total }, weight_map = map }
      .. "\n")
  end
  for _, name in ipairs(files.names(folder) or {}) do
    local ours = name == INDEX or name == "model.safetensors"
      or name:find("^model%-%d+%-of%-%d+%.safetensors$")
    if ours and not kept[name] then files.remove(folder .. "/" .. name) end
  end
end

-- ------------------------------------------------------------------ other files

local WEIGHTS = arguments.set_of "safetensors bin pt pth h5 gguf msgpack onnx ot"

-- Returns whether a file of the source folder must not be copied, because this module writes its
-- own: whether it holds weights in any format, is the index of shards, or is config.json.
local function is_weights(name)
  return WEIGHTS[name:match("%.(%w+)$")] or name == "config.json" or name:find("%.index%.json$")
end

-- Copies a file. Writes the copy under another name first, because `from` and `to` may be one file.
local function copy(from, to)
  local source, why = io.open(from, "rb")
  if not source then error("cannot read " .. why, 0) end
  local part = to .. ".part"
  local good, problem = pcall(files.write, part, function(put)
    for block in function() return source:read(2 ^ 20) end do put(block) end
  end)
  source:close()
  if not good then error(problem, 0) end
  check(C.eng_file_rename(part, to), true)
end

-- Copies the other files of the source folder, if it still exists.
local function copy_others(source, folder)
  for _, name in ipairs(source and source ~= folder and files.names(source) or {}) do
    local path = source .. "/" .. name
    if files.is_file(path) and not is_weights(name) and name:sub(1, 1) ~= "." then
      copy(path, folder .. "/" .. name)
    end
  end
end

-- ------------------------------------------------------------------ save

--- model:save(folder [, { dtype = nil, shard_bytes = 5e9 }]): writes config.json and the weights,
--- for this engine and for Hugging Face's transformers. The weights are in model.safetensors or, if
--- they exceed shard_bytes bytes, in shards of up to that size with an index (a larger tensor has
--- its own shard). dtype converts the weights; without it they keep the dtypes of the parameters.
--- Copies the tokenizer and the other files of the folder the model was loaded from. Models of
--- engine.load_model and engine.new_model have this method; for others there is engine.save.
return function(model, folder, options)
  expect(type(folder) == "string" and folder ~= "", folder, "save: expected a folder")
  options = tensor.read_named(options, "save", "dtype shard_bytes")
  local dtype, limit = options.dtype, options.shard_bytes or 5e9
  if dtype then arguments.choose(HF_NAMES, dtype, "save", "dtype") end
  expect(type(limit) == "number" and limit > 0, limit,
    "save: expected shard_bytes to be a number of bytes above 0")
  local source = model.source
  folder = folder:gsub("(.)/+$", "%1")
  local good, problem = pcall(function()
    check(C.eng_file_mkdir(folder), true)
    autograd.scope(function()
      local parts = parts_of(model, source, dtype)
      save_weights(folder, parts, limit, dtype)
      write(folder .. "/config.json", config_text(source, dtype or parts[1].tensor.dtype))
    end)
    copy_others(source.folder, folder)
  end)
  if not good then raise("save: %s", M_ffi.without_line(problem)) end
end
