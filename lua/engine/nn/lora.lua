-- `engine.lora`: low-rank adapters for fine-tuning, and their files in the format of Hugging Face's
-- PEFT: adapter_config.json and adapter_model.safetensors. lora_layers.lua has the adapters
-- themselves.
--
-- A layer of this engine may join several layers of Hugging Face's models by rows: qkv of nn.llama
-- joins q_proj, k_proj and v_proj. The adapter of such a layer is saved as one adapter for each
-- part: all parts have the same A, and each part has its own rows of B. PEFT, however, trains a
-- separate A for each part. If the A of the parts in a file differ, loading joins them by rows into
-- the layer's A, and the rank of the layer is the sum of the parts' ranks. The layer's B is
-- block-diagonal: its blocks are the parts' B, and all other elements are 0. The loaded layer
-- computes the same as the parts. Called by scripts and train/losses.lua.
-- Shapes: K inputs, N outputs, R rank; A [R x K], B [N x R].
local M_ffi = require "engine.base.ffi"
local adapters = require "engine.nn.lora_layers"
local architectures = require "engine.nn.architectures"
local autograd = require "engine.tensor.autograd"
local hf_config = require "engine.nn.hf_config"
local nearest = require "engine.base.nearest"
local safetensors = require "engine.tensor.safetensors"
local tensor = require "engine.tensor.tensor"
local within = require "engine.base.within"

local C, check, expect, raise, raise_if = M_ffi.C, M_ffi.check, M_ffi.expect, M_ffi.raise,
  M_ffi.raise_if

local M = { new = adapters.new, disabled = adapters.disabled, merge = adapters.merge,
  unmerge = adapters.unmerge }

-- ------------------------------------------------------------------ names

-- Class of a model -> its name in architectures.lua, where the two differ.
local MADE_AS = { gpt = "gpt2" }

local function known_names(path, layer, model)
  local arch = architectures.of[MADE_AS[model._class] or model._class]
  return arch and architectures.layer_names(model, arch, path, layer.outputs) or path
end

-- Returns two values. The first is a function(l), for a layer l = { path, layer } of the model. It
-- returns the layers of the file that l joins, as a list of { name =, first =, last = }: the rows
-- `first` to `last` (from 1) of l's weight come from the layer `name`. The names come from
-- options.names or, without it, from architectures.lua. A layer that architectures.lua does not
-- list has its path as its name. The second value is whether files store weights as [in x out], as
-- GPT-2's Conv1D does; adapters are always stored as [out x in].
local function namer(model, options, caller)
  local own, class = options.names, MADE_AS[model._class] or model._class
  expect(own == nil or type(own) == "function", own,
    "%s: expected names to be a function(path, layer)", caller)
  return function(l)
    local given = (own or known_names)(l.path, l.layer, model)
    local parts, row = {}, 0
    for i, part in ipairs(type(given) == "table" and given or { { given, l.layer.outputs } }) do
      local name, rows = unpack(type(part) == "table" and part or {}, 1, 2)
      expect(type(name) == "string" and type(rows) == "number", given,
        "%s: expected names('%s') to be a string or a list of { name, rows }", caller, l.path)
      parts[i], row = { name = name, first = row + 1, last = row + rows }, row + rows
    end
    raise_if(row ~= l.layer.outputs, "%s: expected the parts of names('%s') to have %d rows " ..
      "together, got %d", caller, l.path, l.layer.outputs, row)
    return parts
  end, class == "gpt2"
end

local function want_folder(folder, caller)
  expect(type(folder) == "string" and folder ~= "", folder, "%s: expected a folder", caller)
  return (folder:gsub("(.)/+$", "%1"))
end

-- ------------------------------------------------------------------ saving

local PREFIX, A, B, MAGNITUDE = "base_model.model.", "lora_A.weight", "lora_B.weight",
  "lora_magnitude_vector"

-- Returns the rows of a tensor that belong to a part, or the tensor itself if the part has all
-- rows.
local function rows_of(x, part)
  if part.first == 1 and part.last == x:size(1) then return x end
  return x:slice(1, part.first, part.last)
end

-- The names of classifier heads. PEFT trains and saves these modules in full, along with the
-- adapters.
local HEADS = { "classifier", "score" }

local function save(list, folder, name_of, base_model, conv1d, head, head_name)
  local json = require "engine.base.json"
  local first, tensors, targets, ranks, alphas = list[1].layer._lora, {}, {}, {}, {}
  for _, l in ipairs(list) do
    local own = l.layer._lora
    raise_if((own.m ~= nil) ~= (first.m ~= nil) or own.dropout ~= first.dropout,
      "lora.save: expected one dropout and one kind (LoRA or DoRA) for all adapters, because a " ..
      "PEFT file stores them once; %s and %s differ", list[1].path, l.path)
    for _, part in ipairs(name_of(l)) do
      local at = PREFIX .. part.name .. "."
      targets[#targets + 1] = part.name
      if own.rank ~= first.rank then ranks[part.name] = own.rank end
      if own.alpha ~= first.alpha then alphas[part.name] = own.alpha end
      tensors[at .. A], tensors[at .. B] = own.A.weight, rows_of(own.B.weight, part)
      tensors[at .. MAGNITUDE] = own.m and rows_of(own.m, part)
    end
  end
  for _, p in ipairs(head and head:parameters() or {}) do
    tensors[PREFIX .. head_name .. "." .. p.name] = p.tensor
  end
  local function patterns(t) return next(t) and t or json.no_fields end
  local text = json.plain { peft_type = "LORA", r = first.rank,
    task_type = head and "SEQ_CLS" or "CAUSAL_LM", modules_to_save = head and HEADS or json.null,
    lora_alpha = first.alpha, lora_dropout = first.dropout, use_dora = first.m ~= nil,
    target_modules = targets, rank_pattern = patterns(ranks), alpha_pattern = patterns(alphas),
    bias = "none", fan_in_fan_out = conv1d, inference_mode = true,
    base_model_name_or_path = base_model or json.null }
  check(C.eng_file_mkdir(folder), true)
  safetensors.save(folder .. "/adapter_model.safetensors", tensors, { format = "pt" })
  check(C.eng_file_write(folder .. "/adapter_config.json", text, #text), true)
end

--- lora.save(model, folder [, { names = nil, base_model = nil }]): writes the adapters, in the
--- dtype of their weights, to PEFT's files, adapter_config.json and adapter_model.safetensors.
--- names(path, layer) returns Hugging Face's name of a layer, or a list of { name, rows } if the
--- layer joins several of Hugging Face's by rows; models of nn.gpt, nn.llama and engine.load_model
--- need no `names`. base_model: the text of the field base_model_name_or_path. For a classifier,
--- the file also holds the model's head.
function M.save(model, folder, options)
  local list = adapters.adapted(model, "lora.save")
  folder = want_folder(folder, "lora.save")
  options = tensor.read_named(options, "lora.save", "names base_model")
  local name_of, conv1d = namer(model, options, "lora.save")
  autograd.scope(save, list, folder, name_of, options.base_model, conv1d,
    adapters.label_head(model))
end

-- ------------------------------------------------------------------ loading

-- Fields of adapter_config.json for which this engine supports only one value.
local ONLY = { peft_type = "LORA", bias = "none", use_rslora = false, lora_bias = false,
  modules_to_save = false, layer_replication = false, trainable_token_indices = false,
  target_parameters = false, use_qalora = false, alora_invocation_tokens = false }

-- Whether the field modules_to_save lists only the head of a classifier.
local function saves_heads(value)
  for _, name in ipairs(value) do
    if name ~= HEADS[1] and name ~= HEADS[2] then return false end
  end
  return true
end

local function read_config(folder, head)
  local good, config, _, path = pcall(hf_config.read, folder, "adapter_config",
    "adapter_model.safetensors")
  if not good then raise("lora.load: %s", config) end
  for key, value in pairs(config) do
    if type(value) == "userdata" then config[key] = nil end         -- JSON's null
  end
  for _, key in ipairs(nearest.keys(ONLY)) do
    local value, only = config[key], ONLY[key]
    local filled = type(value) == "table" and next(value) ~= nil
    local heads = filled and key == "modules_to_save" and saves_heads(value)
    raise_if(heads and not head, "lora.load: %s: this adapter belongs to a classifier " ..
      "(SEQ_CLS); hint: load_model(folder, { labels = N, pad = ID })", path)
    local fits = heads or type(value) == "table" and not filled
    raise_if(value ~= nil and value ~= only and not fits,
      "lora.load: %s: %s = %s is not supported, only %s", path, key,
      type(value) == "table" and "a list" or tostring(value), tostring(only))
  end
  local dropout = config.lora_dropout or 0
  expect(type(config.lora_alpha) == "number", config.lora_alpha,
    "lora.load: %s: expected lora_alpha to be a number", path)
  expect(type(dropout) == "number" and dropout >= 0 and dropout < 1, dropout,
    "lora.load: %s: expected lora_dropout in [0, 1)", path)
  if type(config.alpha_pattern) ~= "table" then config.alpha_pattern = {} end
  return config
end

-- Returns the alpha of the layer `name`, from PEFT's alpha_pattern or else from lora_alpha. A key
-- of alpha_pattern is a layer's name or the end of one. Adds the key that matches to `used`.
local function alpha_of(config, name, used)
  for key, value in pairs(config.alpha_pattern) do
    if name == key or name:sub(-#key - 1) == "." .. key then
      used[key] = true
      return value
    end
  end
  return config.lora_alpha
end

-- Returns the parameters of a classifier's head that the file has, as a list of { parameter, name
-- in the file }. Each name is also a key of the list. where: begins error messages.
local function find_head(model, file, where)
  local head, head_name = adapters.label_head(model)
  local list = {}
  for _, p in ipairs(head and head:parameters() or {}) do
    local name, x = PREFIX .. head_name .. "." .. p.name, p.tensor
    local found = file.entries[name]
    if found then
      local got, wanted = tensor.shape_text(found.shape), tensor.shape_text(x.shape)
      raise_if(got ~= wanted, "%s: expected '%s' to have shape %s, got %s", where, name, wanted,
        got)
      list[#list + 1], list[name] = { x, name }, true
    end
  end
  return list
end

-- Returns the layers of the model for which the file has an adapter, as a list of { path, layer,
-- count, part .. }. A part is { first, last, alpha, entries = { ending = name in the file } }.
-- Parts without an adapter in the file are left out, but `count` counts them too. head: the result
-- of find_head.
local function find(model, file, config, name_of, head, where)
  local by_name, names, list, used = {}, {}, {}, {}
  for _, l in ipairs(adapters.linears(model)) do
    local parts = name_of(l)
    l.count = #parts
    for _, part in ipairs(parts) do
      names[#names + 1], by_name[part.name] = part.name, { l = l, part = part }
    end
  end
  for _, key in ipairs(file.names) do
    local name, ending = key:match("^base_model%.model%.(.+)%.(lora_[AB]%.weight)$")
    if not name then
      name, ending = key:match("^base_model%.model%.(.+)%.(lora_magnitude_vector)$")
    end
    local at = name and by_name[name]
    if not at and not head[key] then
      raise("%s: the adapter is for another model: it has '%s'%s; this model's linear layers: %s",
        where, key, nearest.hint(name or key, names),
        adapters.text_of_paths(adapters.linears(model)))
    end
    if at then
      local l, part = at.l, at.part
      if not l[1] then list[#list + 1] = l end
      if not part.entries then
        l[#l + 1], part.entries, part.alpha = part, {}, alpha_of(config, name, used)
      end
      part.entries[ending] = key
    end
  end
  for key in pairs(config.alpha_pattern) do
    raise_if(not used[key], "%s: the key '%s' of alpha_pattern matches no layer of this adapter",
      where, key)
  end
  raise_if(#list == 0, "%s: expected tensors such as '%sNAME.%s', got no adapter", where, PREFIX, A)
  return list
end

-- Checks the shapes of a layer's parts and reads their tensors, which live until the scope ends.
-- Sets l.part_rank (the rank of a part), l.rank and l.alpha (for the whole layer) and l.joined
-- (whether the file has all parts, with the same A in each).
local function measure(l, file, dora, where)
  local a = file.entries[l[1].entries[A]]
  local rank = math.max(1, a and #a.shape == 2 and a.shape[1] or 0)
  for _, part in ipairs(l) do
    local rows = part.last - part.first + 1
    local expected = { [A] = { rank, l.layer.inputs }, [B] = { rows, rank },
      [MAGNITUDE] = dora and { rows } or nil }
    for ending, shape in pairs(expected) do
      local found, text = file.entries[part.entries[ending]], tensor.shape_text(shape)
      local got = found and tensor.shape_text(found.shape) or "nothing"
      raise_if(got ~= text, "%s: %s of %s: expected %s, got %s; hint: the adapter may belong to " ..
        "another model", where, ending, l.path, text, got)
    end
    expect(type(part.alpha) == "number", part.alpha,
      "%s: expected the alpha of %s to be a number", where, l.path)
    raise_if(part.alpha ~= l[1].alpha, "%s: expected one alpha for all parts of %s, got %g and %g",
      where, l.path, l[1].alpha, part.alpha)
    part.tensors = {}
    for ending, name in pairs(part.entries) do part.tensors[ending] = file:read(name, false) end
  end
  l.joined = #l == l.count
  for _, part in ipairs(l) do
    l.joined = l.joined and part.tensors[A]:eq(l[1].tensors[A]):to("f32"):min():item() == 1
  end
  local times, most = l.joined and 1 or #l, math.min(l.layer.inputs, l.layer.outputs)
  l.part_rank, l.rank, l.alpha = rank, rank * times, l[1].alpha * times
  raise_if(l.rank > most, "%s: the adapters of %s's parts have a total rank of %d; expected at " ..
    "most %d", where, l.path, l.rank, most)
end

-- Returns whether the model has adapters. If it has, raises an error unless the file's adapters are
-- for the same layers and of the same kind, rank and alpha.
local function compare(model, list, dora, where)
  local of_file, count = {}, 0
  for _, l in ipairs(list) do of_file[l.layer] = l end
  for _, l in ipairs(adapters.linears(model)) do
    local own, theirs = rawget(l.layer, "_lora"), of_file[l.layer]
    if own then
      raise_if(not theirs, "%s: the model has other adapters: the file has none for %s; hint: " ..
        "load into a model without adapters", where, l.path)
      raise_if(theirs.rank ~= own.rank or theirs.alpha ~= own.alpha or dora ~= (own.m ~= nil),
        "%s: the model has other adapters: %s is %s with rank %d and alpha %g, but %s with rank " ..
        "%d and alpha %g in the file; hint: load into a model without adapters", where, l.path,
        own.m and "DoRA" or "LoRA", own.rank, own.alpha, dora and "DoRA" or "LoRA", theirs.rank,
        theirs.alpha)
      count = count + 1
    end
  end
  raise_if(count > 0 and #list > count, "%s: the model has %d adapters, the file has %d; hint: " ..
    "load into a model without adapters", where, count, #list)
  return count > 0
end

local function fill(l)
  local own = l.layer._lora
  if not l.joined then own.B.weight:zero() end
  for i, part in ipairs(l) do
    local from, to = (i - 1) * l.part_rank + 1, i * l.part_rank
    if l.joined then from, to = 1, l.part_rank end
    own.A.weight:slice(1, from, to):copy(part.tensors[A])
    rows_of(own.B.weight, part):slice(2, from, to):copy(part.tensors[B])
    if own.m then rows_of(own.m, part):copy(part.tensors[MAGNITUDE]) end
  end
end

local function load(model, file, config, name_of)
  local where = "lora.load: " .. file.path
  local dora, head = config.use_dora == true, find_head(model, file, where)
  local list = find(model, file, config, name_of, head, where)
  autograd.scope(function()
    for _, l in ipairs(list) do measure(l, file, dora, where) end
    if not compare(model, list, dora, where) then
      for _, l in ipairs(list) do
        adapters.new(model, { match = "^" .. l.path:gsub("%p", "%%%0") .. "$", rank = l.rank,
          alpha = l.alpha, dropout = config.lora_dropout, dora = dora })
      end
    end
    for _, l in ipairs(list) do fill(l) end
    for _, item in ipairs(head) do item[1]:copy(file:read(item[2], false)) end
  end)
end

--- lora.load(model, folder [, { names = nil }]): reads adapters that PEFT or lora.save wrote. names
--- is as in lora.save. A model without adapters gets the adapters of the file, as nn.lora would add
--- them. If the model has adapters already, the file must have adapters of the same kind, rank and
--- alpha for the same layers. A file that does not fit raises an error and changes nothing. Returns
--- the model.
function M.load(model, folder, options)
  adapters.want_model(model, "lora.load")
  adapters.want_no_tape "lora.load"
  folder = want_folder(folder, "lora.load")
  options = tensor.read_named(options, "lora.load", "names")
  adapters.want_unmerged(model, "lora.load")
  local config = read_config(folder, adapters.label_head(model))
  local file = safetensors.open(folder .. "/adapter_model.safetensors")
  within(function() end, function() file:close() end, load, model, file, config,
    (namer(model, options, "lora.load")))
  return model
end

return M
