-- Loss-scaling policies: sandboxed Lua files that choose the next loss scale from a step's record
-- (policies/README.md is the contract), and classes that a script registers itself
-- (class_scaler.lua). Called by scripts, train/, run/, docs/ and cli/.
--   local p = engine.policy.load("dynamic", { growth_interval = 500 })   -- or "my/policy.lua"
--   local verdict = p:decide(record)                                  -- an eng_verdict
--   local text = p:save(); p:restore(text)
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local class_scaler = require "engine.policy.class_scaler"
local deepspeed_config = require "engine.policy.deepspeed_config"
local expression = require "engine.base.expression"
local files = require "engine.base.file"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local ffi, C, check, expect, fail_if = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.expect, M_ffi.fail_if

local M = {}

-- The needs that a policy of FP8 layers cannot have.
local FOR_LOSS_SCALES = C.ENG_NEED_UPDATE_NORMS + C.ENG_NEED_SIGNALS + C.ENG_NEED_VERDICT

-- ------------------------------------------------------------------ verdicts

local ACTIONS, verdict_methods = {}, {}
for number = 0, C.ENG_ACTIONS - 1 do ACTIONS[number] = ffi.string(C.eng_action_name(number)) end

--- The action: "step", "skip", "retry", "stop" or "rollback".
function verdict_methods.what(v) return ACTIONS[v.action] end

--- The reason as text, "" if the policy gave none.
function verdict_methods.why(v) return ffi.string(v.reason) end

--- Replaces the action by what a lagged run has done with the step's update: the device skipped it
--- if the step overflowed, and made it otherwise. Returns the action that the run carries out now,
--- ENG_ACTION_*: a stop or a rollback that the policy asked for, otherwise the new action. If it is
--- too late for the policy's action, the reason says so.
function verdict_methods.apply_lag(v, overflow)
  local asked, number, why = v:what(), v.action, v:why()
  v.action = overflow and C.ENG_ACTION_SKIP or C.ENG_ACTION_STEP
  if number == C.ENG_ACTION_STOP or number == C.ENG_ACTION_ROLLBACK or number == v.action then
    return number
  end
  local reason = ("too late for %s, because mode=lagged decides after the update%s%s"):format(asked,
    why ~= "" and ": " or "", why)
  local n = 255
  while n > 0 and reason:find("^[\128-\191]", n + 1) do n = n - 1 end   -- cuts no character in two
  v.reason = reason:sub(1, n)
  return v.action
end

ffi.metatype("eng_verdict", {
  __index = verdict_methods,
  __tostring = function(v)
    local text = ("%s, scale %.10g"):format(v.failed ~= 0 and "failed, " .. v:what() or v:what(),
      v.scale)
    if v.clip > 0 then text = text .. (", clip %g"):format(v.clip) end
    if v.lr_mul ~= 1 then text = text .. (", lr x%g"):format(v.lr_mul) end
    if v.update_clip > 0 then text = text .. (", update clip %g"):format(v.update_clip) end
    if v.spike_clip > 0 then text = text .. (", spike clip %g"):format(v.spike_clip) end
    local why = v:why()
    return why ~= "" and text .. ": " .. why or text
  end,
})

-- ------------------------------------------------------------------ the object

local Policy = {}
Policy.__index = Policy

-- Returns a list of strings as an array, which must not outlive the list.
local function strings(list) return ffi.new("const char *[?]", #list + 1, list) end

--- The loss scale of the next step.
function Policy:scale() return C.eng_policy_scale(self.handle) end

--- Sets the scale. The policy's counters keep their values.
function Policy:set_scale(scale) check(C.eng_policy_set_scale(self.handle, scale)) end

local function decide(self, record, stats)
  check(C.eng_policy_decide(self.verdict, self.handle, record, stats))
  return self.verdict
end

--- Runs the policy on a step and returns its verdict. record: an eng_record; stats: the statistics
--- per tensor (eng_tensor_stats[n]), if the policy needs them. The verdict belongs to the policy
--- and changes with the next call. If the verdict has caps (limits on the elements of single
--- gradients), the policy decides again, and the second verdict is returned. cap(...), unless it is
--- nil, is called between the two decisions. It must apply the caps to the gradients, and replace
--- the norms of the record by those of the capped gradients.
function Policy:decide(record, stats, cap, ...)
  record.capped = 0
  local verdict = decide(self, record, stats)
  if bit.band(verdict.each, bit.lshift(1, C.ENG_EACH_CAP)) == 0 then return verdict end
  if cap then cap(...) end
  record.capped = 1
  return decide(self, record, stats)
end

local out_text, out_bytes = ffi.new("const char *[1]"), ffi.new("int64_t[1]")

--- Returns the state and the last good verdict as text. Equal states give equal bytes.
function Policy:save()
  check(C.eng_policy_save(out_text, out_bytes, self.handle))
  return ffi.string(out_text[0], out_bytes[0])
end

--- Restores what save() returned; on an error nothing changes.
function Policy:restore(text)
  expect(type(text) == "string", text, "policy %s: expected the text that save() gave", self.name)
  check(C.eng_policy_restore(self.handle, text, #text))
end

--- Resets the policy to its initial state.
function Policy:reset() check(C.eng_policy_init(self.handle)) end

--- Continues from the policy `old`: with the state that this policy's function `migrate` makes; or,
--- without this function, with the old state if both policies have the same name; or else with a
--- fresh state and the old scale, as it also does if `old` is a registered class.
function Policy:take_over(old)
  if old.handle then check(C.eng_policy_migrate(self.handle, old.handle), true)
  else
    self:reset()
    self:set_scale(old:scale())
  end
end

--- Tells the policy which tensors the `stats` of decide() describe. group_of: the index of each
--- tensor's group (from 1, or nil). groups: the groups' names. scalable: whether the caller can
--- scale groups separately, so that the policy may give them separate scales.
function Policy:tensors(names, group_of, groups, scalable)
  groups = groups or {}
  local c_group_of = ffi.new("int32_t[?]", #names + 1)
  for i = 1, #names do c_group_of[i - 1] = (group_of and group_of[i] or 0) - 1 end
  check(C.eng_policy_tensors(self.handle, strings(names), c_group_of, #names, strings(groups),
    #groups, scalable or false))
end

--- The scale that the last good verdict gives group i (from 1).
function Policy:group_scale(i) return C.eng_policy_group_scale(self.handle, i - 1) end

--- Whether the last good verdict gives some group a separate scale.
function Policy:scales_groups() return C.eng_policy_scales_groups(self.handle) end

--- Sets record.signals[name] to `value`, until the next call with this name.
function Policy:signal(name, value)
  expect(type(value) == "number", value, "signal '%s': expected a number", tostring(name))
  check(C.eng_policy_signal(self.handle, name, value))
end

--- Copies a field that the last verdict sets for each tensor into the array `into` of n numbers,
--- and returns the array. `what`: the field, one of ENG_EACH_*. Returns nil if the verdict does not
--- set the field.
function Policy:each(what, into, n)
  if bit.band(self.verdict.each, bit.lshift(1, what)) == 0 then return nil end
  for i = 0, n - 1 do into[i] = C.eng_policy_each(self.handle, what, i) end
  return into
end

local number = ffi.new("double[1]")

-- Returns named numbers of the last verdict as { name = number }, or nil if there are none. entry
-- is a function of the core: entry(number, handle, i) stores the i-th number (from 0) in number[0]
-- and returns its name.
local function entries(self, entry)
  local name, values, i = entry(number, self.handle, 0), nil, 0
  while name ~= nil do
    values = values or {}
    values[ffi.string(name)], i = number[0], i + 1
    name = entry(number, self.handle, i)
  end
  return values
end

--- Returns the factors on attention logits that the last verdict sets, { ["MODULE.HEAD"] =
--- factor }, or nil.
function Policy:logit_muls() return entries(self, C.eng_policy_logit_mul) end

--- Returns the numbers that the last verdict logged, { name = number }, or nil.
function Policy:logs() return entries(self, C.eng_policy_logged) end

--- Sets all[name][i] for each number that the last verdict logged. Returns `all`, which may be nil
--- as long as the policy has logged nothing.
function Policy:add_logs(all, i)
  for name, value in pairs(self:logs() or {}) do
    all = all or {}
    all[name] = all[name] or {}
    all[name][i] = value
  end
  return all
end

--- Returns the first 2048 bytes of what the policy has printed since the last call, in lines
--- "file:line: text", or nil.
function Policy:printed()
  local text = C.eng_policy_printed(self.handle)
  return text[0] ~= 0 and ffi.string(text) or nil
end

local info = ffi.new("eng_policy_info")

--- The number of decisions that have failed since the start.
function Policy:failures()
  C.eng_policy_describe(info, self.handle)
  return tonumber(info.failures)
end

--- The CRC-32C of the policy's source as 8 hexadecimal digits, by which histories identify the
--- source.
function Policy:hash() return ("%08x"):format(C.eng_crc32c(0, self.source, #self.source)) end

--- Returns the options that differ from the policy file's defaults, such as "growth_interval=500".
function Policy:changed()
  local words = {}
  for _, name in ipairs(self.option_names) do
    local value, preset = self.options[name], self.defaults[name]
    if value ~= preset and (value == value or preset == preset) then
      words[#words + 1] = name .. "=" .. show.value(value)
    end
  end
  return table.concat(words, " ")
end

function Policy:__tostring()
  local changed = self:changed()
  return show.shown(("policy %s (%s): scale %.10g%s"):format(self.name, self.file, self:scale(),
    changed ~= "" and ", " .. changed or ""))
end

-- ------------------------------------------------------------------ loading

local folders = {}
for i, share in ipairs(M_ffi.shares) do folders[i] = share .. "/policies" end

--- Returns the sorted names of the policies that come with the engine. kind: "fp8" for FP8 policies
--- (their source has kind = "fp8"), "any" for all policies, otherwise only policies that choose a
--- loss scale.
function M.names(kind)
  local names = {}
  for _, folder in ipairs(folders) do
    for _, entry in ipairs(files.names(folder) or {}) do
      local name = entry:match("^(.+)%.lua$")
      local text = name and files.read(folder .. "/" .. entry)
      local fp8 = text and text:find('\n%s*kind%s*=%s*"fp8"') ~= nil
      if text and (kind == "any" or fp8 == (kind == "fp8")) then names[#names + 1] = name end
    end
    if #names > 0 then break end
  end
  return names
end

-- Finds a policy by `name`, its name or path. kind: as in M.load, for the error message. Returns
-- the policy's source, display name and path.
local function find(name, kind)
  if name:find("[/\\]") or name:find("%.lua$") then
    local text, why = files.read(name)
    if not text then error("policy: " .. why, 0) end
    return text, name, name
  end
  for _, folder in ipairs(folders) do
    local text = files.read(folder .. "/" .. name .. ".lua")
    if text then return text, "policies/" .. name .. ".lua", folder .. "/" .. name .. ".lua" end
  end
  local names = M.names(kind)
  for class in pairs(kind == "fp8" and {} or M.classes) do names[#names + 1] = class end
  table.sort(names)
  local own = name .. ".lua"
  error(("there is no %spolicy '%s'%s; hint: %s"):format(kind == "fp8" and "FP8 " or "", name,
    nearest.hint(name, names), files.exists(own) and ("for the file here, write ./%s"):format(own)
    or "`engine policies` lists them; to use your own file, give its path, such as ./mine.lua"), 0)
end

local function option_text(name, value)
  local kind = type(value)
  if kind == "number" then return show.exact(value) end
  if kind == "string" or kind == "boolean" then return tostring(value) end
  error(("policy option '%s': expected a number, a boolean or a string, got a %s"):format(
    tostring(name), kind), 0)
end

local function compile(source, file, options, path)
  local names, values, out = nearest.keys(options), {}, ffi.new("eng_policy *[1]")
  for i, name in ipairs(names) do values[i] = option_text(name, options[name]) end
  check(C.eng_policy_load(out, source, #source, file, strings(names), strings(values), #names),
    true)
  local handle = ffi.gc(out[0], C.eng_policy_free)
  check(C.eng_policy_init(handle), true)
  C.eng_policy_describe(info, handle)
  local self = { handle = handle, name = ffi.string(info.name), doc = ffi.string(info.doc),
    file = file, source = source, path = path, given = options, needs = info.needs, fp8 = info.fp8,
    options = {}, defaults = {}, option_names = {}, verdict = ffi.new("eng_verdict") }
  local option = ffi.new("eng_policy_option")
  local function typed(text)
    text = ffi.string(text)
    if option.type == C.ENG_OPTION_BOOLEAN then return text == "true" end
    return option.type == C.ENG_OPTION_NUMBER and tonumber(text) or text
  end
  for i = 0, info.options - 1 do
    check(C.eng_policy_option_get(option, handle, i))
    local name = ffi.string(option.name)
    self.option_names[i + 1], self.options[name], self.defaults[name] = name, typed(option.value),
      typed(option.preset)
  end
  return setmetatable(self, Policy)
end

--- Whether a loss scale is in the range of normal f32 numbers. In f32, other scales may lose bits
--- or become 0 or inf.
function M.usable(scale) return scale >= 2 ^ -126 and scale <= (2 - 2 ^ -23) * 2 ^ 127 end

--- Returns a message if the next scale that a policy or a class has chosen is not usable, else nil.
--- groups: the number of groups that may have separate scales.
function M.unusable(policy, groups)
  for group = 0, groups or 0 do
    local scale = group == 0 and policy:scale() or policy:group_scale(group)
    if not M.usable(scale) then
      return ("policy %s chose a loss scale of %.10g; expected one of the normal f32 numbers, from "
        .. "2^-126 to 3.4e38"):format(policy.name, scale)
    end
  end
end

--- The loss scaler classes that scripts have registered, by name (engine.register_loss_scaler).
M.classes = {}

--- Registers a loss scaler class under a name; class_scaler.lua describes such classes.
function M.register(name, class)
  expect(type(name) == "string" and name:find("^[%w_%-]+$"), name,
    "register_loss_scaler: expected a name of letters, digits, '_' and '-'")
  class_scaler.check(name, class)
  for _, folder in ipairs(folders) do
    M_ffi.raise_if(files.exists(folder .. "/" .. name .. ".lua"),
      "register_loss_scaler '%s': a policy that comes with the engine has this name; hint: " ..
      "choose another name", name)
  end
  M.classes[name] = class
end

-- Splits "dynamic:growth_interval=500,init_scale=2^10" into the name "dynamic" and its settings.
-- Returns the name, and the options with the settings added as text. Without settings, returns both
-- arguments as they are.
local function with_settings(source, options)
  local name, settings = source:match("^(.-):([%a_][%w_]*=.*)$")
  -- a setting without "=value": the loop below refuses it
  if not name then name, settings = source:match("^([%w_-]+):([^/]+)$") end
  if not name then return source, options end
  local all = arguments.merged(options)
  for setting in settings:gmatch("[^,]+") do
    local key, value = setting:match("^([%a_][%w_]*)=(.*)$")
    fail_if(not key, "policy %s: expected name=value after the colon, separated by commas, " ..
      "got '%s'", name, setting)
    all[key] = value
  end
  return name, all
end

-- Returns the options for a class. A class declares no types, so strings that look like numbers or
-- booleans are converted.
local function values_of(options)
  local all = {}
  for key, value in pairs(options) do
    if type(value) == "string" then
      if value == "true" or value == "false" then value = value == "true"
      else value = expression(value) or value end
    end
    all[key] = value
  end
  return all
end

-- Does the work of M.load, but does not check that the policy is of the wanted kind.
local function loaded(source, options, kind)
  if type(source) == "table" and source.decide and source.scale then return source end
  if type(source) == "table" and type(source.source) == "string" then
    return compile(source.source, source.file or "policy", options, source.path)
  end
  if type(source) == "table" and (source.fp16 or source.bf16 or source.bfloat16) then
    source, options = deepspeed_config.from_table(source, options,
      function() return "policy: " end)
  end
  fail_if(type(source) ~= "string", "policy: expected a name, a path or { source =, file = }, " ..
    "got %s%s", M_ffi.value_text(source),
    type(source) == "table" and "; hint: save the policy in a file: policy = \"mine.lua\"" or "")
  source, options = with_settings(source, options)
  local json = source:find("%.json$") and source or nil
  if json then source, options = deepspeed_config.read(json, options)
  elseif source == "deepspeed" and deepspeed_config.is_block(options) then
    source, options = deepspeed_config.translate(options)
  end
  local class = M.classes[source]
  if class then return class_scaler.new(source, class, values_of(options)) end
  local text, file, path = find(source, kind)
  local made, self = pcall(compile, text, file, options, path)
  if not made then error(json and json .. ": " .. self or self, 0) end
  self.config = json
  return self
end

--- Loads a policy. source: the name of a shipped policy or of a registered class; a path; { source
--- = text, file = name, path = the file's path }; a DeepSpeed configuration, as a .json file or as
--- { fp16 = { ... } }; or a policy object, which is returned unchanged. A name or a path may end
--- with options: "dynamic:growth_interval=500". options: values for the policy's options; a value
--- may be text. For the policy `deepspeed`, options may also be keys of DeepSpeed's fp16 block.
--- kind: "fp8" for an FP8 policy, nil for a policy that chooses a loss scale, "any" for either.
function M.load(source, options, kind)
  options = options or {}
  if type(options) ~= "table" then
    error("policy: expected a table of options, got " .. M_ffi.value_text(options), 2)
  end
  local good, result = pcall(loaded, source, options, kind)
  if not good then error(result, 2) end
  if result.fp8 and bit.band(result.needs, FOR_LOSS_SCALES) ~= 0 then
    error(("policy %s works on FP8 layers, so its 'needs' cannot list what only a loss-scaling " ..
      "policy can read or set, such as update_norm, activations or clips"):format(result.name), 2)
  end
  if kind ~= "any" and (result.fp8 or false) ~= (kind == "fp8") then
    local wrong = "policy %s works on FP8 layers and chooses no loss scale; hint: precision = { " ..
      "base = \"fp8_current\", fp8 = { policy = \"%s\" } }"
    if kind == "fp8" then
      wrong = "policy %s chooses a loss scale and does not work on FP8 layers; hint: use " ..
        table.concat(M.names("fp8"), ", ") ..
        ", or a file of your own with kind = \"fp8\""
    end
    error(wrong:format(result.name, result.name), 2)
  end
  return result
end

-- Adds `policy` to the ranges that engine.config checks: a field with this range must hold the name
-- or the path of a policy that loads.
require("engine.base.config").ranges.policy = { problem = function(name)
  local good, message = pcall(M.load, name)
  -- A FILE:LINE at the beginning of the message refers to the policy's source, so it stays.
  return not good and (tostring(message):gsub("^policy: ", "")) or nil
end }

--- Sets the limits of policies that are loaded later: memory (bytes), instructions, seconds of
--- processor time. An absent field keeps its limit.
function M.limits(limits)
  C.eng_policy_limits(limits.memory or 0, limits.instructions or 0, limits.seconds or 0)
end

return M
