-- Adds low-rank adapters to layers, switches them off and merges them. An adapter is part of its
-- linear layer, whose path in the model does not change. Optimizers, checkpoints and ranks
-- therefore treat adapters like any other parameters. The rest of the model is frozen, except a
-- classifier's head. A layer computes
--   LoRA:  y = x W^T + b + s (drop(x) A^T) B^T
--   DoRA:  y = m / |V| * (x V^T) + b
-- where s = alpha / rank and V = W + s B A. |V| is the norm of each row of V; it is treated as a
-- constant in the backward pass.
-- Shapes: K inputs, N outputs, R rank; W [N x K], b and m [N], A [R x K], B [N x R].
-- The layer's field `_lora` is the adapter's state: { rank, alpha, scale, dropout, A, B, m (DoRA),
-- weight (the frozen weight, while the adapter is merged) }. Called by lora.lua, nn/init.lua and
-- train/optim.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local autograd = require "engine.tensor.autograd"
local fuse = require "engine.nn.fuse"
local layers = require "engine.nn.layers"
local module = require "engine.nn.module"
local nearest = require "engine.base.nearest"
local nf4 = require "engine.tensor.nf4"
local tensor = require "engine.tensor.tensor"
local within = require "engine.base.within"

local C, expect, raise, raise_if = M_ffi.C, M_ffi.expect, M_ffi.raise, M_ffi.raise_if

local M = {}

-- ------------------------------------------------------------------ the forward pass

-- Runs f(...) without autocast: norms and merged weights are computed in f32.
local function in_f32(f, ...) return autograd.in_formats(nil, f, ...) end

-- Returns the frozen weight of a layer, dequantized to `dtype`. Beside an e4m3 weight, the layer
-- holds a scale for each row. Beside an NF4 weight (tensor/nf4.lua), it holds 8-bit codes of the
-- blocks' absmaxes, a scale for each group of these codes, and an offset.
local function frozen(layer, dtype)
  local weight, scale = layer.weight, rawget(layer, "weight_scale")
  if rawget(layer, "weight_group") then
    return nf4.of(weight, scale, layer.weight_group, layer.weight_offset,
      { layer.outputs, layer.inputs }):dequantize(dtype)
  end
  if scale then return weight:to(dtype) * scale:to(dtype) end
  return weight:to(dtype)
end

-- Computes x W^T for a frozen weight W in NF4. The tape keeps neither x nor W; the backward pass
-- dequantizes W again.
local nf4_product = autograd.custom {
  forward = function(saved, x, layer)
    saved.layer, saved.dtype = layer, x.dtype
    return fuse.last_use(function(w) return x:linear(w) end, frozen(layer, x.dtype))
  end,
  backward = function(saved, dy)
    return fuse.last_use(function(w) return dy:matmul(w):to(saved.dtype) end,
      frozen(saved.layer, dy.dtype))
  end,
}

-- Computes x W^T + b with the frozen weight W. Leaves out b if `bias` is false.
local function base(layer, x, bias)
  if not rawget(layer, "weight_scale") then return fuse.linear(layer, x, bias) end
  bias = bias ~= false and rawget(layer, "bias") or nil
  if not rawget(layer, "weight_group") then return x:linear(frozen(layer, x.dtype), bias) end
  local y = nf4_product(x, layer)
  return bias and y + bias:to(y.dtype) or y
end

-- Returns V = W + s B A in f32 [N x K].
local function adapted_weight(layer)
  local own = layer._lora
  return frozen(layer, "f32") + own.B.weight:detach():matmul(own.A.weight:detach()) * own.scale
end

local function row_norms(v) return v:square():sum(-1):sqrt() end

local function dropped(layer, x)
  local p = layer._lora.dropout
  return p > 0 and layer._training and x:dropout(p) or x
end

local function lora_forward(layer, x)
  local own = layer._lora
  return base(layer, x) + own.B(own.A(dropped(layer, x))) * own.scale
end

-- With dropout, the first term uses x and the others use drop(x), as in PEFT:
--   x W^T + b + (m / |V| - 1) drop(x) W^T + m / |V| s (drop(x) A^T) B^T
local function dora_forward(layer, x)
  local own, z = layer._lora, dropped(layer, x)
  local norms = autograd.no_grad(in_f32, function() return row_norms(adapted_weight(layer)) end)
  local gain, y = own.m / norms, base(layer, z, false)
  local delta, bias = own.B(own.A(z)) * own.scale, rawget(layer, "bias")
  local sum = gain * (y + delta)
  if z ~= x then sum = sum + base(layer, x, false) - y end
  return (bias and sum + bias or sum):to(y.dtype)
end

-- Switches the adapter of a layer on or off.
local function switch(layer, on)
  local own = layer._lora
  rawset(layer, "forward", on and (own.m and dora_forward or lora_forward)
    or rawget(layer, "weight_scale") and base or nil)
end

-- ------------------------------------------------------------------ adding adapters

--- Returns all linear layers of a model, with or without an adapter, in order, as a list of { path,
--- layer }. The layers A and B of adapters are not listed.
function M.linears(model)
  local list, seen = {}, {}
  model:apply(function(m, path)
    if m._class == "linear" and not rawget(m, "_is_adapter") and not seen[m] then
      list[#list + 1], seen[m] = { path = path, layer = m }, true
    end
  end)
  return list
end

--- Returns the last layer of a classifier and its name, or nil for other models. This layer is
--- trained along with the adapters.
function M.label_head(model)
  local config = rawget(model, "config")
  if type(config) ~= "table" or not config.labels then return nil end
  local name = rawget(model, "score") and "score" or "classifier"
  return rawget(model, name), name
end

--- Raises an error that begins with `name` unless `model` is a module.
function M.want_model(model, name)
  expect(module.is_module(model), model, "%s: expected a module", name)
end

--- Raises an error if operations are recorded, because the caller replaces and frees weights that
--- the backward pass of a recorded loss would still need.
function M.want_no_tape(name)
  raise_if(C.eng_tape_length() > 0,
    "%s: expected no recorded operations, got %d; hint: call %s between two steps", name,
    tonumber(C.eng_tape_length()), name)
end

--- Returns the layers with an adapter as a list of { path, layer }. Raises an error if there are
--- none. For the message: `name`, the function; `hint`, a text to add to the hint, or nil.
function M.adapted(model, name, hint)
  M.want_model(model, name)
  local list = {}
  for _, l in ipairs(M.linears(model)) do
    if rawget(l.layer, "_lora") then list[#list + 1] = l end
  end
  raise_if(#list == 0, "%s: the model has no adapters; hint: nn.lora adds them%s", name, hint or "")
  return list
end

--- Whether adapters of this model are merged.
function M.is_merged(model)
  local found = false
  for _, l in ipairs(M.linears(model)) do
    found = found or (rawget(l.layer, "_lora") or {}).weight ~= nil
  end
  return found
end

--- Raises an error if adapters of this model are merged.
function M.want_unmerged(model, name)
  raise_if(M.is_merged(model), "%s: the model's adapters are merged; hint: lora.unmerge(model)",
    name)
end

local function paths_of(list)
  local paths = {}
  for i, l in ipairs(list) do paths[i] = l.path ~= "" and l.path or "linear" end
  return paths
end

--- The paths of the first eight layers of a list, as text.
function M.text_of_paths(list) return nearest.few(paths_of(list)) end

-- Returns the linear layers that get an adapter. match: a Lua pattern or a list of patterns; nil
-- selects all layers except the head that computes the logits. A classifier's head never gets an
-- adapter, because it is trained itself.
local function chosen(model, match)
  local all, list, taken = M.linears(model), {}, {}
  if #all == 0 then raise("nn.lora: expected a model with nn.linear layers, got none") end
  if type(match) == "table" then
    arguments.want_list(match, "nn.lora", "match", '{ "attn", "mlp" }')
  end
  for _, pattern in ipairs(match == nil and {} or type(match) == "table" and match or { match }) do
    arguments.want_pattern(pattern, "nn.lora", "match to be a Lua pattern or a list of patterns")
    local found = false
    for _, l in ipairs(all) do
      if l.path:find(pattern) then found, taken[l] = true, true end
    end
    if not found then
      raise("nn.lora: the pattern '%s' matches no linear layer%s; linear layers: %s", pattern,
        nearest.part_hint(pattern, paths_of(all)), M.text_of_paths(all))
    end
  end
  local label_head = M.label_head(model)
  for _, l in ipairs(all) do
    local head = l.path:find("^head$") or l.path:find("^lm_head$")
    if l.layer ~= label_head and (taken[l] or match == nil and not head) then
      list[#list + 1] = l
    end
  end
  raise_if(#list == 0, "nn.lora: match %s; linear layers: %s", next(taken)
    and "selects only the classifier's head, which is trained without an adapter" or "is empty",
    M.text_of_paths(all))
  return list
end

local BASES = arguments.set_of "f32 bf16 f16 e4m3 nf4"

local function read(options)
  options = tensor.read_named(options, "nn.lora", "match rank alpha dropout dora base")
  local rank, alpha, dropout = options.rank or 8, options.alpha or 16, options.dropout or 0
  arguments.want_whole(rank, "nn.lora", "rank", 1)
  expect(type(alpha) == "number" and math.abs(alpha) < math.huge, alpha,
    "nn.lora: expected alpha to be a finite number")
  expect(type(dropout) == "number" and dropout >= 0 and dropout < 1, dropout,
    "nn.lora: expected dropout in [0, 1)")
  if options.base ~= nil then arguments.choose(BASES, options.base, "nn.lora", "base") end
  return { rank = rank, alpha = alpha, dropout = dropout, base = options.base,
    dora = module.want_flag(options, "dora", "nn.lora", false) }
end

-- Raises an error if the layer cannot get an adapter of this rank.
local function refuse(l, rank)
  local layer, path = l.layer, l.path ~= "" and l.path or "the model"
  raise_if(rawget(layer, "_lora"), "nn.lora: %s has an adapter already; hint: match other " ..
    "layers, or load saved values with lora.load", path)
  local most = math.min(layer.inputs, layer.outputs)
  raise_if(rank > most, "nn.lora: expected a rank of at most %d for %s, linear(%d -> %d), got %d",
    most, path, layer.inputs, layer.outputs, rank)
end

-- Stores the frozen weight in another format, and frees the old weight unless another module or an
-- optimizer may hold it. shared: the result of shared_tensors.
local function convert(layer, format, shared)
  local weight = layer.weight
  if format == weight.dtype then return end
  autograd.scope(function()
    local values = weight:detach():to("f32")
    if format == "nf4" then
      local q = nf4.quantize(weight:detach())
      layer.weight_scale, layer.weight_group = q.absmax:keep(), q.group:keep()
      layer.weight_offset = q.offset:keep()
      rawset(layer, "_high", true)                          -- FP8 recipes skip the layer
      layer.weight = q.q:keep()
      return
    end
    if format == "e4m3" then
      local rows = values:abs():max(-1):unsqueeze(2):totable()                            -- [N x 1]
      for _, row in ipairs(rows) do
        -- a power of two, so that only the rounding to e4m3 changes the weight
        local exponent = math.ceil(math.log(row[1] / 448) / math.log(2))
        row[1] = row[1] > 0 and 2 ^ math.max(-120, exponent) or 1
      end
      layer:parameter("weight_scale", tensor.tensor(rows, { dtype = "f32" }):keep(), "norm")
      rawset(layer, "_high", true)                          -- FP8 recipes skip the layer
      values = values / layer.weight_scale:detach()
    end
    layer.weight = values:to(format):keep()
  end)
  if not shared[tonumber(weight.slot)] and not rawget(layer, "_set") then weight:free() end
end

-- Makes model:save() raise an error while adapters are not merged, because model:save() writes only
-- the parameters of the frozen model.
local function guard_save(model)
  local save = model.save
  if not save or rawget(model, "_guards_save") then return end
  rawset(model, "_guards_save", true)
  rawset(model, "save", function(...)
    for _, l in ipairs(M.linears(model)) do
      raise_if(rawget(l.layer, "_lora") and not l.layer._lora.weight,
        "%s.save: the model has adapters; hint: lora.save writes them, lora.merge(model) adds " ..
        "them to the weights", model._class)
    end
    return save(...)
  end)
end

-- Adds an adapter with the options o (a result of read) to a layer, and switches it on.
local function attach(layer, o)
  local A = layers.linear(layer.inputs, o.rank, { bias = false })
  local B = layers.linear(o.rank, layer.outputs, { bias = false })
  B.weight:zero()
  for _, half in ipairs { A, B } do
    rawset(half, "_is_adapter", true)
    rawset(half, "_high", true)                             -- adapters are not quantized to FP8
    rawset(half, "_training", layer._training)
  end
  layer.lora_A = A
  layer.lora_B = B
  rawset(layer, "_lora", { rank = o.rank, alpha = o.alpha, scale = o.alpha / o.rank,
    dropout = o.dropout, A = A, B = B })
  if o.dora then
    local m = autograd.scope(in_f32, function() return row_norms(frozen(layer, "f32")):keep() end)
    layer:parameter("lora_magnitude_vector", m, "norm")
    layer._lora.m = m
  end
  rawset(layer, "extra", function(self)
    local dtype = rawget(self, "weight_group") and "nf4" or self.weight.dtype
    return ("%d -> %d%s, %s rank %d, alpha %g%s"):format(self.inputs, self.outputs,
      dtype == "f32" and "" or ", " .. dtype, o.dora and "dora" or "lora", o.rank, o.alpha,
      self._lora.weight and ", merged" or "")
  end)
  switch(layer, true)
end

-- Returns the tensors that several modules share, as { [slot] = true }.
local function shared_tensors(model)
  local seen, shared = {}, {}
  model:apply(function(m)
    for _, key in ipairs(m._order) do
      local x = rawget(m, key)
      if tensor.is_tensor(x) then
        local slot = tonumber(x.slot)
        shared[slot], seen[slot] = seen[slot], true
      end
    end
  end)
  return shared
end

--- nn.lora(model [, { match, rank = 8, alpha = 16, dropout = 0, dora = false, base }]): gives each
--- linear layer with a matching path a low-rank adapter, and freezes every other parameter, except
--- those of a classifier's head (nn.gpt's option `labels`); returns the model. match: a Lua pattern
--- of paths ("attn%.qkv$") or a list of patterns; default: all linear layers but the head. dropout
--- acts on the adapter's input. dora: a trained magnitude for each output (DoRA). base: the format
--- that stores the frozen weights of these layers, "f32", "bf16", "f16", "e4m3" (with a
--- power-of-two scale for each row) or "nf4" (engine.nf4, with double quantization: QLoRA); without
--- `base` they keep their format. An adapter changes nothing until it is trained.
function M.new(model, options)
  M.want_model(model, "nn.lora")
  M.want_no_tape "nn.lora"
  local o = read(options)
  local list = chosen(model, options and options.match)
  M.want_unmerged(model, "nn.lora")
  for _, l in ipairs(list) do refuse(l, o.rank) end
  local label_head = M.label_head(model)
  for _, p in ipairs(model:parameters()) do
    if not rawget(p.owner, "_is_adapter") and not p.name:find("lora_magnitude_vector$")
      and p.owner ~= label_head then
      p.tensor:requires_grad(false)
    end
  end
  local shared = shared_tensors(model)
  for _, l in ipairs(list) do
    if o.base then convert(l.layer, o.base, shared) end
    if rawget(l.layer, "weight_scale") then l.layer.weight_scale:requires_grad(false) end
    attach(l.layer, o)
  end
  guard_save(model)
  return model
end

-- ------------------------------------------------------------------ off, merged

--- lora.disabled(model, f, ...): runs f(...) with all adapters off and returns its results. Inside
--- f, the model computes the same as the frozen model. engine.losses.dpo computes its reference
--- this way.
function M.disabled(model, f, ...)
  local list = M.adapted(model, "lora.disabled", ", or give losses.dpo a reference")
  M.want_unmerged(model, "lora.disabled")
  arguments.want_function(f, "lora.disabled", "lora.disabled(model, function() ... end)")
  return within(function() for _, l in ipairs(list) do switch(l.layer, false) end end,
    function() for _, l in ipairs(list) do switch(l.layer, true) end end, f, ...)
end

local PARTS = { "weight_scale", "weight_group", "weight_offset", "lora_A", "lora_B",
  "lora_magnitude_vector" }

-- Removes the adapter's tensors from the layer's parameters, or puts them back if `hidden` is
-- false. Their keys stay in the layer's order.
local function hide(layer, hidden)
  local own = layer._lora
  for _, key in ipairs(PARTS) do
    if hidden then own.parts[key] = rawget(layer, key) end
    rawset(layer, key, not hidden and own.parts[key] or nil)
  end
end

--- lora.merge(model): adds every adapter to its frozen weight, in f32. The layers are then computed
--- and saved as plain linear layers. The adapters and the frozen weights are kept for lora.unmerge.
--- Returns the model.
function M.merge(model)
  local list = M.adapted(model, "lora.merge")
  M.want_no_tape "lora.merge"
  raise_if(M.is_merged(model),
    "lora.merge: the adapters are merged already; hint: lora.unmerge(model)")
  for _, l in ipairs(list) do
    local layer, own = l.layer, l.layer._lora
    local merged = autograd.scope(in_f32, function()
      local v = adapted_weight(layer)
      if own.m then v = v * (own.m:detach() / row_norms(v)):unsqueeze(2) end
      return v:keep()
    end)
    own.parts, own.weight = {}, layer.weight
    hide(layer, true)
    layer.weight = merged
    rawset(layer, "forward", nil)
  end
  return model
end

--- lora.unmerge(model): restores the frozen weights and the adapters, bit for bit. Returns the
--- model.
function M.unmerge(model)
  local list = M.adapted(model, "lora.unmerge")
  M.want_no_tape "lora.unmerge"
  raise_if(not M.is_merged(model),
    "lora.unmerge: the adapters are not merged; hint: lora.merge(model) merges them")
  for _, l in ipairs(list) do
    raise_if(l.layer._lora.weight and arguments.info(l.layer.weight).requires_grad ~= 0,
      "lora.unmerge: %s.weight has been unfrozen since lora.merge, and lora.unmerge would " ..
      "discard its changes; hint: to discard them, call model:freeze() first", l.path)
  end
  for _, l in ipairs(list) do
    local layer, own = l.layer, l.layer._lora
    if own.weight then
      layer.weight:free()
      layer.weight, own.weight = own.weight, nil
      hide(layer, false)
      switch(layer, true)
    end
  end
  return model
end

return M
