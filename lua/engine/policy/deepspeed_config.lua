-- Translates a DeepSpeed configuration to a policy and its options. A user gives
-- `policy=ds_config.json`, or `policy = "deepspeed"` with the keys of the fp16 block as options.
-- Called by policy.lua and train/deepspeed.lua.
--
-- The policy is the first of these that applies:
--   static with scale 1          if fp16 is disabled, or if bf16 is enabled and fp16 is not
--   static with loss_scale       if loss_scale is not 0
--   deepspeed_fused              if zero_optimization.stage is 0: DeepSpeed then ignores hysteresis
--   deepspeed                    otherwise
-- If there is no zero_optimization block, the stage counts as unknown, because the configuration
-- may be a part of one, and the policy is `deepspeed`. engine.deepspeed.initialize gets a whole
-- configuration, to which DeepSpeed's default applies, stage 0. The value "auto", which Hugging
-- Face's transformers replaces at run time, counts as absent. If bf16 is not enabled, an fp16 block
-- without the key `enabled` counts as enabled, because the user chose it as the policy.
local arguments = require "engine.base.arguments"
local cjson = require "cjson.safe"
local expression = require "engine.base.expression"
local nearest = require "engine.base.nearest"
local M_ffi = require "engine.base.ffi"

local fail_if, value_text = M_ffi.fail_if, M_ffi.value_text

local M = {}

-- For each key of the fp16 block, the option of the policy `deepspeed` that the key sets, or false.
local KEYS = {
  enabled = false, auto_cast = false, fp16_master_weights_and_grads = false, loss_scale = false,
  initial_scale_power = "init_scale", loss_scale_window = "scale_window",
  scale_window = "scale_window", hysteresis = "hysteresis",
  consecutive_hysteresis = "consecutive_hysteresis", min_loss_scale = "min_scale",
  min_scale = "min_scale",
  raise_error_at_min_scale = "raise_error_at_min_scale",
}
local BOOLEAN = arguments.set_of [[enabled auto_cast fp16_master_weights_and_grads
  consecutive_hysteresis raise_error_at_min_scale]]
-- Options that the policies have and the fp16 block does not. Users may give them together with
-- keys of the block.
local OWN = arguments.set_of "init_scale scale_factor strict"

local function is_null(v) return v == nil or v == cjson.null end

-- Returns the value of a key as a number or a boolean. Returns nil if the key is absent or its
-- value is null or "auto". `where(key)` is the prefix of error messages.
local function read(block, key, where)
  local value = block[key]
  if is_null(value) or value == "auto" then return nil end
  if BOOLEAN[key] then
    if value == "true" or value == "false" then value = value == "true" end
    fail_if(type(value) ~= "boolean", "%sfp16.%s: expected true or false, got %s", where(key), key,
      value_text(value))
    return value
  end
  local number = type(value) == "string" and expression(value) or value
  fail_if(type(number) ~= "number" or number - number ~= 0, "%sfp16.%s: expected a number, got %s",
    where(key), key, value_text(value))
  return number
end

--- Returns the name and the options of the policy that an fp16 block describes. `stage` is the ZeRO
--- stage, nil if it is unknown. `where(key)` is the prefix of error messages about a key.
function M.translate(block, stage, where)
  where = where or function() return "" end
  local keys = nearest.keys(block)
  for _, key in ipairs(keys) do
    if KEYS[key] == nil and not OWN[key] then
      error(("%sfp16 has no key '%s'%s"):format(where(key), key,
        nearest.choices(key, KEYS, "keys")), 0)
    end
  end
  if read(block, "enabled", where) == false then return "static", { loss_scale = 1 } end
  local fixed = read(block, "loss_scale", where) or 0
  fail_if(fixed < 0, "%sfp16.loss_scale: expected 0 (dynamic) or a positive number, got %g",
    where "loss_scale", fixed)
  if fixed ~= 0 then return "static", { loss_scale = fixed } end

  local options = {}
  for _, key in ipairs(keys) do
    local option, value = KEYS[key], nil
    if option then value = read(block, key, where)
    elseif OWN[key] then option, value = key, block[key] end
    if option and value ~= nil then
      if key == "initial_scale_power" then
        fail_if(value < 0 or value > 1023, "%sfp16.initial_scale_power: expected an exponent of " ..
          "2 from 0 to 1023, got %g", where(key), value)
        value = 2 ^ value
      end
      fail_if(options[option] ~= nil and options[option] ~= value,
        "%sfp16 gives %s twice, as %s and as %s; keys that mean the same: %s", where(key), option,
        tostring(options[option]), tostring(value),
        "initial_scale_power and init_scale, loss_scale_window and scale_window, " ..
        "min_loss_scale and min_scale")
      options[option] = value
    end
  end
  if stage ~= 0 then return "deepspeed", options end
  options.hysteresis, options.consecutive_hysteresis, options.raise_error_at_min_scale = nil, nil,
    nil
  return "deepspeed_fused", options
end

-- Converts JSON as DeepSpeed accepts it, with comments (#, //, /* */) and commas before closing
-- brackets, to plain JSON with the same line numbers.
local function plain_json(text)
  local out, code, at = {}, {}, 1
  local function end_code()
    out[#out + 1] = table.concat(code):gsub(",(%s*[%]}])", " %1")
    code = {}
  end
  while at <= #text do
    local _, last = text:find('^"[^"\\]*', at)
    if last then                                       -- a string, with its escapes
      end_code()
      while text:find("^\\", last + 1) do _, last = text:find('^\\.?[^"\\]*', last + 1) end
      out[#out + 1] = text:sub(at, last + 1)
      last = last + 1
    else
      for _, comment in ipairs { "^#[^\n]*", "^//[^\n]*", "^/%*.-%*/" } do
        if not last then _, last = text:find(comment, at) end
      end
      local blank = last and text:sub(at, last):gsub("[^\n]", " ")
      if not last then _, last = text:find('^.[^"#/]*', at) end
      code[#code + 1] = blank or text:sub(at, last)
    end
    at = last + 1
  end
  end_code()
  return table.concat(out)
end

-- Returns "file:line: " for the first mention of a key in a JSON text, or "file: " if there is
-- none.
local function place_of(text, path, key)
  local at = text:find('"' .. key:gsub("%p", "%%%0") .. '"%s*:')
  if not at then return path .. ": " end
  local _, lines = text:sub(1, at):gsub("\n", "")
  return ("%s:%d: "):format(path, lines + 1)
end

-- Returns a copy of the block with `changes` applied. A changed key also replaces other keys that
-- set the same option.
local function changed(block, changes)
  local result = arguments.merged(block)
  for key, value in pairs(changes) do
    for other in pairs(KEYS) do
      if KEYS[other] and KEYS[other] == KEYS[key] then result[other] = nil end
    end
    result[key] = value
  end
  return result
end

--- Returns the name and the options of the policy that a decoded DeepSpeed configuration describes.
--- config: the whole configuration or only its fp16 block. `changes`: keys that replace those of
--- the block. Error messages about a key begin with `where(key)`; others name the file `path`, if
--- it is given. stage: the ZeRO stage of a configuration without zero_optimization, nil if unknown.
function M.from_table(config, changes, where, path, stage)
  local lead = path and path .. ": " or ""
  fail_if(type(config) ~= "table",
    "%sexpected a DeepSpeed configuration, which is a JSON object, got %s", lead,
    value_text(config))
  fail_if(not is_null(config.fp16) and type(config.fp16) ~= "table",
    "%sfp16: expected an object, got %s", where "fp16", value_text(config.fp16))
  local block, zero = config.fp16, config.zero_optimization
  local bf16 = is_null(config.bf16) and config.bfloat16 or config.bf16
  if type(zero) == "table" then stage = tonumber(zero.stage) or 0 end
  if is_null(block) then
    if next(changes) == nil and type(bf16) == "table" and bf16.enabled == true then
      return "static", { loss_scale = 1 }
    end
    local known = false
    for key in pairs(config) do known = known or KEYS[key] ~= nil end
    if not known then
      error(lead .. "expected an fp16 block, such as \"fp16\": {}, found none", 0)
    end
    block = config
  elseif type(bf16) == "table" and bf16.enabled == true and block.enabled ~= true then
    return "static", { loss_scale = 1 }
  end
  return M.translate(changed(block, changes), stage, where)
end

--- Reads a DeepSpeed JSON file, which may have comments and trailing commas. Returns it as a table,
--- and its text as plain JSON.
function M.decode(path)
  local text, why = require("engine.base.file").read(path)
  if not text then error(why, 0) end
  text = text:gsub("^\239\187\191", "")                -- a byte order mark
  text = plain_json(text)
  local config, problem = cjson.decode(text)
  if config == nil then
    local at = tonumber(problem:match("at character (%d+)"))
    local _, lines = text:sub(1, at or 0):gsub("\n", "")
    error(("%s:%d: not JSON: %s"):format(path, lines + 1, problem), 0)
  end
  return config, text
end

--- Reads a DeepSpeed JSON file. Returns the name and the options of the policy that it describes.
--- changes, stage: as in M.from_table.
function M.read(path, changes, stage)
  local good, config, text = pcall(M.decode, path)
  if not good then error((config:find("^[^:]+:%d+: ") and "" or "policy: ") .. config, 0) end
  return M.from_table(config, changes, function(key) return place_of(text, path, key) end, path,
    stage)
end

--- Returns whether `options` has a key of the fp16 block that is not an option of the policy
--- `deepspeed`.
function M.is_block(options)
  for key in pairs(options) do
    if KEYS[key] ~= nil and KEYS[key] ~= key then return true end
  end
  return false
end

return M
