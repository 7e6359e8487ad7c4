-- Suggests the right names for misspelt ones, in error messages. `names` is a list, or a table
-- whose keys are the names. Used by most folders.
--   nearest.find("layer_nrm", { "linear", "layer_norm" })  -> "layer_norm"
--   nearest.hint("lrr", { "lr", "batch" })       -> "; did you mean 'lr'?", or "" when none is near
--   nearest.choices("lrr", { lr = 1, batch = 2 }, "options", "engine help trainer")
--                                                -> "; did you mean 'lr'?; options: batch lr"
local nearest = {}

-- Names from other frameworks and from other parts of the engine. Each has a list of the engine's
-- names that the user may mean. nearest.elsewhere suggests the first of them that is valid.
local ELSEWHERE = {
  fp16 = "f16", f16 = "fp16", float16 = "f16 fp16", half = "f16 fp16 to", fp32 = "f32",
  f32 = "fp32", float32 = "f32 fp32", float = "f32 fp32 to", bfloat16 = "bf16 to", fp64 = "f64",
  float64 = "f64", double = "f64 to", int8 = "i8", uint8 = "u8", int16 = "i16", int32 = "i32",
  int = "i32 to", int64 = "i64", long = "i64 to", float8_e4m3fn = "e4m3", float8_e5m2 = "e5m2",
  gpu = "cuda", cuda = "to device", cpu = "to device",
  numel = "count", nelement = "count", num_parameters = "count", dim = "ndim", t = "transpose",
  numpy = "totable", tolist = "totable", data = "detach", cat = "concat", mm = "matmul",
  bmm = "matmul", modulelist = "list", gradscaler = "scaler", inference_mode = "no_grad",
  linspace = "arange", retain_graph = "retain",
  manual_seed = "seed", state_dict = "state state_tensors", load_state_dict = "load_state",
  unscale_ = "unscale", clip_grad_norm_ = "clip_grad_norm", clip_grad_value_ = "clip_grad_value",
  param_groups = "groups", learning_rate = "lr", named_parameters = "parameters",
  r = "rank", lora_alpha = "alpha", lora_dropout = "dropout", target_modules = "match",
  use_dora = "dora", torch_dtype = "dtype", tokenizer = "encode", packing = "pack",
  eos_token_id = "end_token stop", eos_token = "end_token stop", batch_size = "batch",
  max_length = "context max_tokens", seq_len = "context", block_size = "context",
  attention_mask = "mask",
}

-- Another framework's name -> what to write instead. For these names, a single name of the engine
-- would not be enough.
local INSTEAD = {
  cross_entropy = "engine.cross_entropy(x, targets)", mse = "engine.mse(x, y)",
  mse_loss = "engine.mse(x, y)", param_groups = "opt.lr, and the list opt.groups",
  crossentropyloss = "engine.cross_entropy(x, targets)", mseloss = "engine.mse(x, y)",
  clone = "x:contiguous(), or x:keep() for a copy that outlives the step",
  masked_fill = "mask:where(value, x)", dataloader = "a loader of engine.data",
  to = 'engine.device("cuda") before the model is made, and the option precision',
  functional = "a method of tensors, such as x:gelu(), or a loss of the engine, such as engine.mse",
  amp = "engine.autocast and engine.scaler", half = 'x:to("f16")', bfloat16 = 'x:to("bf16")',
  float = 'x:to("f32")', double = 'x:to("f64")', long = 'x:to("i64")', int = 'x:to("i32")',
  cuda = 'x:to("cuda") or engine.device("cuda")', cpu = 'x:to("cpu")',
}

--- Returns the keys of a table as a sorted list of strings.
function nearest.keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = tostring(key) end
  table.sort(keys)
  return keys
end

local function list_of(names)
  return (names[1] ~= nil or next(names) == nil) and names or nearest.keys(names)
end

--- Returns the entry of `names` that corresponds to `name`, a name in another framework; or nil.
function nearest.elsewhere(name, names)
  for ours in (ELSEWHERE[tostring(name):lower()] or ""):gmatch("%S+") do
    for _, candidate in ipairs(list_of(names)) do
      if candidate == ours then return ours end
    end
  end
end

--- Returns the entry of `names` that elsewhere() finds for `name` or, if it finds none, the entry
--- nearest to `name`; nil if none is near (see eng_nearest in core/engine.h).
function nearest.find(name, names)
  if type(name) ~= "string" then return nil end
  local ours = nearest.elsewhere(name, names)
  if ours then return ours end
  local found, M_ffi = pcall(require, "engine.base.ffi")
  if not found then return nil end  -- `engine doctor` and the command line work without the library
  local list, texts = list_of(names), {}
  for i, candidate in ipairs(list) do texts[i] = tostring(candidate) end
  local C, array = M_ffi.C, M_ffi.new("const char *[?]", #texts + 1, texts)
  return list[C.eng_nearest(tostring(name), array, #texts) + 1]
end

--- Returns "; did you mean 'NAME'?", or "" if no name is near. code: true if the user wrote `name`
--- as a function or a method; the hint may then also be "; write ... instead".
function nearest.hint(name, names, code)
  local found, instead = nearest.find(name, names), code and INSTEAD[tostring(name):lower()]
  if instead and (not found or found == "to") then return "; write " .. instead .. " instead" end
  return found and ("; did you mean '%s'?"):format(tostring(found)) or ""
end

--- Returns the first eight of a list of names as text.
function nearest.few(names)
  return table.concat(names, " ", 1, math.min(#names, 8)) .. (#names > 8 and " .." or "")
end

--- Returns the hint for a Lua pattern that matches none of the dotted names `names`. The hint
--- suggests one of these names or a part of one.
function nearest.part_hint(pattern, names)
  local parts = {}
  for _, name in ipairs(names) do
    for part in name:gmatch("%a[%w_]*") do parts[#parts + 1] = part end
    for at in ("." .. name):gmatch("%.()") do parts[#parts + 1] = name:sub(at - 1) end
  end
  return nearest.hint(pattern:gsub("[%^$%%]", ""), parts)
end

--- Returns a text that has the hint and then the list of all names. `what`: the noun for the names,
--- such as "options". `where`: a command that lists the names, or nil. If there is a hint and there
--- are more than eight names, the text gives this command instead of the list.
function nearest.choices(name, names, what, where)
  local texts = {}
  for i, choice in ipairs(list_of(names)) do texts[i] = tostring(choice) end
  local hint = nearest.hint(name, texts)
  if hint ~= "" and where and #texts > 8 then
    return ("%s; `%s` lists the %s"):format(hint, where, what)
  end
  return ("%s; %s: %s"):format(hint, what, table.concat(texts, " "))
end

--- Makes it an error to read a field that `class` lacks and that other frameworks have, such as
--- `numel`; the error says what to write instead. Any other missing field is nil; the field's name
--- is cached, so that reading it again is fast. `what`: the noun for `class` in the message, such
--- as "a module".
function nearest.guard_elsewhere(class, what)
  local absent = {}
  return setmetatable(class, { __index = function(t, key)
    if absent[key] then return nil end
    if type(key) ~= "string" or not (INSTEAD[key] or nearest.elsewhere(key, nearest.keys(t))) then
      absent[key] = true
      return nil
    end
    require("engine.base.ffi").raise("%s has no '%s'%s", what, key,
      nearest.hint(key, nearest.keys(t), true))
  end })
end

--- Makes it an error to read a name that `module` lacks; the error suggests the nearest name.
--- `what`: the module's name in the message, such as "engine.data". Returns `module`.
function nearest.guard(module, what)
  return setmetatable(module, { __index = function(t, key)
    error(("%s has no '%s'%s"):format(what, tostring(key),
      nearest.hint(key, nearest.keys(t), true)), 2)
  end })
end

return nearest
