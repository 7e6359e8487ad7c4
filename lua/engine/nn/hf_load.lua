-- Loads models from Hugging Face's files: config.json and model.safetensors, or shards with
-- model.safetensors.index.json. `engine.load_model` and `engine.new_model`:
--   local model = engine.load_model("Qwen3-0.6B", { dtype = "bf16" })
--   local model = engine.new_model { model_type = "llama", hidden_size = 64, ... }
--   model:save("out")                                   hf_save.lua
-- The model is built with shapes only. All names and shapes of the files are checked before the
-- first weight is read. Weights are converted one at a time, so that memory peaks at the size of
-- the model plus one tensor. Files are read, not mapped, so that a file that shrinks meanwhile
-- raises an error and does not crash the process. Called by scripts, init.lua and cli/.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local files = require "engine.base.file"
local json = require "engine.base.json"
local show = require "engine.base.show"
local safetensors = require "engine.tensor.safetensors"
local autograd = require "engine.tensor.autograd"
local tensor = require "engine.tensor.tensor"
local architectures = require "engine.nn.architectures"
local config = require "engine.nn.hf_config"
local models = require "engine.nn.models"
local module = require "engine.nn.module"
local within = require "engine.base.within"

local C, expect, raise, raise_if, fail, fail_if = M_ffi.C, M_ffi.expect, M_ffi.raise,
  M_ffi.raise_if, M_ffi.fail, M_ffi.fail_if

local M = {}

-- ------------------------------------------------------------------ the files of a folder

-- Reads the weight_map of an index: tensor name -> file.
local function read_index(path)
  local text, problem = files.read(path)
  if not text then fail("cannot read %s", problem) end
  local index = json.is_utf8(text) and require("cjson.safe").decode(text)
  local map = type(index) == "table" and index.weight_map
  fail_if(type(map) ~= "table" or next(map) == nil,
    "%s: expected a JSON object whose weight_map gives the file of each tensor, got %s", path,
    type(index) ~= "table" and "other text" or type(map) == "table" and "an empty weight_map"
      or "a weight_map that is no object")
  for name, file in pairs(map) do
    fail_if(type(name) ~= "string" or type(file) ~= "string" or file:find("[/%z]"),
      "%s: expected the weight_map to give a file of this folder for '%s', got %s", path,
      show.shown(tostring(name)), show.shown(tostring(file)))
  end
  return map
end

-- Opens the weight files of a folder. Returns a table with the fields
--   entries  tensor name -> { file, name = the tensor's name in the file, entry = what the file's
--            header says about the tensor }
--   names    the list of the tensor names
--   where    the path for messages
--   close    a function that closes the files
local function open_weights(folder)
  local single, index = folder .. "/model.safetensors", folder .. "/model.safetensors.index.json"
  local weights, opened, map = { entries = {}, names = {}, where = single }, {}, nil
  function weights.close()
    for _, file in pairs(opened) do file:close() end
  end
  local function add(path)
    fail_if(not files.exists(path), "%s is missing; hint: %s", path, map
      and "the index names it as a shard; copy it into the folder"
      or "transformers' save_pretrained writes it")
    local file = safetensors.open(path)
    opened[path] = file
    for _, name in ipairs(file.names) do
      local there = map and folder .. "/" .. tostring(map[name])
      fail_if(map and there ~= path, "%s: %s holds the tensor '%s', but the weight_map gives " ..
        "%s; expected it to give %s", index, path, show.shown(name),
        map and map[name] and show.shown(tostring(map[name])) or "no file for it", path)
      weights.entries[name] = { file = file, name = name, entry = file.entries[name] }
      weights.names[#weights.names + 1] = name
    end
  end
  local good, problem = pcall(function()
    if files.exists(single) or not files.exists(index) then return add(single) end
    map, weights.where = read_index(index), index
    local shards, seen = {}, {}
    for _, file in pairs(map) do
      if not seen[file] then shards[#shards + 1], seen[file] = file, true end
    end
    table.sort(shards)
    for _, shard in ipairs(shards) do add(folder .. "/" .. shard) end
    for name, shard in pairs(map) do
      fail_if(not weights.entries[name], "%s: expected the tensor '%s' in %s, which lacks it",
        index, show.shown(name), shard)
    end
  end)
  if not good then
    weights.close()
    error(problem, 0)
  end
  return weights
end

-- ------------------------------------------------------------------ names and shapes

-- Gives tensors of old files their present names.
local function rename_old(weights, old)
  for ending, new in pairs(old) do
    for i, name in ipairs(weights.names) do
      if name:sub(-#ending) == ending then
        local present = name:sub(1, -#ending - 1) .. new
        weights.names[i], weights.entries[present] = present, weights.entries[name]
      end
    end
  end
end

-- Returns the prefix of the tensors' names: arch.prefix and a dot, or "" in files of base models.
local function prefix_of(weights, arch)
  local prefix = arch.prefix .. "."
  for _, name in ipairs(weights.names) do
    if name:sub(1, #prefix) == prefix then return prefix end
  end
  return ""
end

-- Checks the shape and the dtype of `found`, an entry of the file `where`.
local function want_shape(found, name, expected, where)
  local got, want = tensor.shape_text(found.shape), tensor.shape_text(expected)
  fail_if(got ~= want, "%s: expected '%s' to have shape %s (from config.json), got %s", where, name,
    want, got)
  fail_if(not ("f32 f16 bf16 f64"):find(found.dtype, 1, true),
    "%s: expected '%s' to be f32, f16, bf16 or f64, got %s", where, name, found.dtype)
end

-- Whether the parameter belongs to the head of a classifier.
local function of_classifier(name)
  return name:find "^score%." or name:find "^pooler%." or name:find "^classifier%."
end

-- Checks that the files have every tensor of the plan with its shape, and no tensor that does not
-- belong to the model. For a new classifier, parameters of its head may be missing; the plan's
-- items for missing parameters get the field `new`.
local function check_names(plan, weights, arch, tied, new_classifier)
  local wanted = {}
  for i, item in ipairs(plan) do
    for _, part in ipairs(item.parts) do
      local name = part.name
      -- files with a tied head may have the embedding, the first parameter, only as lm_head.weight
      if i == 1 and tied and not weights.entries[name] and weights.entries["lm_head.weight"] then
        name = "lm_head.weight"
      end
      local found = weights.entries[name]
      item.new = not found and new_classifier and of_classifier(item.parameter.name)
      if not item.new then
        fail_if(not found, "%s has no tensor '%s'; hint: config.json may belong to another model",
          weights.where, part.name)
        local shape = { unpack(item.parameter.tensor.shape) }
        shape[1] = part.rows
        if item.transposed then shape = { shape[2], shape[1] } end
        want_shape(found.entry, name, shape, found.file.path)
        wanted[name], part.name = true, name
      end
    end
  end
  for _, name in ipairs(weights.names) do
    local known = wanted[name] or tied and name == "lm_head.weight"
      or new_classifier and (name:find "^lm_head%." or name:find "^cls%.")
    for _, pattern in ipairs(arch.ignored) do known = known or name:find(pattern) end
    fail_if(not known, "%s: '%s' does not belong to this model; hint: config.json may belong to " ..
      "another model", weights.where, show.shown(name))
  end
end

-- ------------------------------------------------------------------ values

-- Makes a new parameter for a classifier, with transformers' initial values: a matrix is normal
-- with the standard deviation `std`, a bias is 0.
local function new_values(shape, dtype, std)
  local x = tensor.zeros(shape, { dtype = dtype or "f32", keep = true })
  if #shape == 2 then x:normal(0, std) end
  return x
end

-- Reads one parameter from its parts, in the dtype `dtype` (false: the file's).
local function read(item, weights, dtype, std)
  if item.new then return new_values(item.parameter.tensor.shape, dtype, std) end
  local parts = item.parts
  local first = weights.entries[parts[1].name]
  dtype = dtype or first.entry.dtype
  if #parts == 1 and first.entry.dtype == dtype and not item.transposed then
    return first.file:read(first.name)
  end
  local x, row = tensor.zeros(item.parameter.tensor.shape, { dtype = dtype, keep = true }), 0
  for _, part in ipairs(parts) do
    local good, problem = pcall(autograd.scope, function()
      local found = weights.entries[part.name]
      local source = found.file:read(found.name, false)
      x:slice(1, row + 1, row + part.rows):copy(item.transposed and source:transpose() or source)
    end)
    if not good then
      C.eng_free(x)
      error(problem, 0)
    end
    row = row + part.rows
  end
  return x
end

-- Reads every parameter; frees all of them on an error. std: the standard deviation of new weights.
local function fill(plan, weights, dtype, std)
  local made = {}
  local good, problem = pcall(function()
    for i, item in ipairs(plan) do
      local p = item.parameter
      made[i] = read(item, weights, dtype, std)
      p.owner:parameter(p.key, made[i], p.role)
    end
  end)
  if not good then
    for _, x in ipairs(made) do C.eng_free(x) end
    error(problem, 0)
  end
end

-- ------------------------------------------------------------------ the model

-- Builds the model for the options. hf_save.lua reads the model's field `source`, { arch, prefix,
-- fields, text, folder, eos, tied_head }; tied_head is true if the files hold a tied head, too. The
-- field `stop` has the tokens at which generate stops.
local function build(arch, options, source)
  local model = models[arch.build](options)
  source.arch = arch
  rawset(model, "_class", source.fields.model_type)
  rawset(model, "source", source)
  rawset(model, "save", require("engine.nn.hf_save"))
  rawset(model, "stop", source.eos)
  return model
end

local DTYPES = { f32 = "f32", bf16 = "bf16", f16 = "f16", f64 = "f64", auto = false }

-- Loads a model. dtype: the dtype of the parameters, or false for the dtypes of the files.
local function load(folder, options, dtype)
  local fields, text, path = config.read(folder)
  if options.labels then
    fields, text = config.classifier(fields, options.labels, options.pad, path), nil
  end
  local arch, o = config.options_of(fields, path)
  if options.dropout then
    for _, key in ipairs { "dropout", "embedding_dropout", "attention_dropout",
      "classifier_dropout" } do
      o[key] = o[key] and options.dropout
    end
  end
  local weights = open_weights(folder)
  return within(function() end, weights.close, function()
    fail_if(o.layers > #weights.names, "%s: expected at least one tensor for each of the %d " ..
      "layers, but %s has only %d tensors", path, o.layers, weights.where, #weights.names)
    rename_old(weights, arch.old)
    local source = { fields = fields, text = text, folder = folder,
      eos = config.eos(folder, fields), prefix = prefix_of(weights, arch),
      tied_head = o.tied and not o.labels and weights.entries["lm_head.weight"] ~= nil }
    return autograd.scope(function()
      local built, model = pcall(module.build_shapes, build, arch, o, source)
      if not built then fail("%s: %s", path, (tostring(model):gsub("^[^ ]+:%d+: ", ""))) end
      local plan = architectures.plan(model, arch, source.prefix)
      check_names(plan, weights, arch, o.tied, options.labels)
      fill(plan, weights, dtype, tonumber(fields.initializer_range) or 0.02)
      if options.labels then source.prefix = arch.prefix .. "." end
      return model
    end)
  end)
end

--- engine.load_model(folder [, { dtype = "f32", dropout, labels, pad }]): loads a model from
--- Hugging Face's files, whose weights may be f32, f16, bf16 or f64. dtype: the dtype of the
--- parameters; "auto" keeps the dtypes of the files. `dropout` replaces every dropout probability
--- of config.json. labels: a number n, which makes any model a classifier with n labels; its head
--- is new unless the files have it. pad: the id of a classifier's padding token. The model is an
--- nn.gpt, nn.llama or nn.bert with a method save. A file, field, name, shape or dtype that does
--- not fit raises an error of one line.
function M.load(folder, options)
  expect(type(folder) == "string", folder, "load_model: expected a folder")
  options = tensor.read_named(options, "load_model", "dtype dropout labels pad")
  raise_if(options.pad ~= nil and not options.labels,
    "load_model: pad is an option of classifiers; hint: labels = the number of labels")
  local dropout = options.dropout
  expect(not dropout or type(dropout) == "number" and dropout >= 0 and dropout < 1, dropout,
    "load_model: expected dropout in [0, 1)")
  local dtype = arguments.choose(DTYPES, options.dtype or "f32", "load_model", "dtype")
  local good, result = pcall(load, (folder:gsub("(.)/+$", "%1")), options, dtype)
  if not good then raise("load_model: %s", M_ffi.without_line(result)) end
  return result
end

--- Builds the model for the fields of a config.json. The parameters have shapes but no values, and
--- live until the scope ends. `where` is the prefix of error messages.
function M.shapes(fields, where)
  local arch, options = config.options_of(fields, where)
  return module.build_shapes(build, arch, options, { fields = fields })
end

--- engine.new_model { model_type = "llama", hidden_size = 64, ... }: makes a model with random
--- weights from fields of a config.json. Fields that are not given have transformers' defaults.
--- model:save(folder) writes files that transformers loads.
function M.new(fields)
  expect(type(fields) == "table", fields,
    "new_model: expected a table with the fields of a config.json")
  local good, result = pcall(function()
    local all = config.complete(fields)
    local arch, options = config.options_of(all, "engine.new_model")
    return build(arch, options, { fields = all, prefix = arch.prefix .. "." })
  end)
  if not good then raise(M_ffi.without_line(result)) end
  return result
end

return M
