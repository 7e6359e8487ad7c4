-- engine.d.lua: the types of what scripts and policies write, for editors with LuaLS. Made from the
-- same entries as the pages. Called by `engine help --types FILE`.
local file = require "engine.base.file"
local source = require "engine.docs.source"

local M = {}

-- name -> type, from text in two columns.
local function columns(text)
  local map = {}
  for name, value in text:gmatch("(%S+) +([^\n]+)\n") do map[name] = value end
  return map
end

-- Types that the reference does not give. All other fields are `number` in records and `any` in
-- options.
local TYPE = columns [[
policy.name                string
policy.doc                 string
policy.kind                "scale"|"fp8"
policy.options             table<string, number|boolean|string>
policy.needs               engine.Statistic[]
policy.init                fun(options: table): table
policy.decide              engine.Decide
policy.migrate             fun(old_state: table, old_name: string, options: table): table
record.overflow            boolean
record.first_bad           string?
record.norm_ref            number?
record.hist                engine.Histogram
record.tensors             table<string|integer, engine.TensorRecord>?
record.groups              table<string|integer, engine.TensorRecord>?
record.signals             table<string, number?>
verdict.action             "step"|"skip"|"retry"|"stop"
verdict.reason             string
verdict.scales             table<string, number>
trainer.steps              integer
trainer.accumulate         integer
trainer.checkpoint_every   integer
trainer.keep               integer
trainer.stats_every        integer
trainer.ref_every          integer
trainer.clip               number
trainer.clip_value         number
trainer.bucket             number
trainer.rank_timeout       number
trainer.graph              boolean
trainer.run                string
trainer.log                "line"|"json"|"quiet"
trainer.mode               "sync"|"lagged"
trainer.on_policy_error    "hold"|"stop"
trainer.loss               fun(model: table, batch: table): engine.Tensor
tensor.shape               integer[]
tensor.ndim                integer
tensor.count               integer
tensor.dtype               string
tensor.device              string
tensor.is_leaf             boolean
tensor.grad                engine.Tensor?
]]
local REQUIRED = { ["policy.decide"] = true, ["verdict.scale"] = true, ["trainer.model"] = true,
  ["trainer.data"] = true, ["trainer.optimizer"] = true, ["trainer.steps"] = true }

-- What functions return; the other methods of tensors return a tensor.
local RETURNS = columns [[
tensor:item                number
tensor:size                integer
tensor:is_contiguous       boolean
tensor:totable             table
tensor:read                ffi.cdata*, integer
tensor:free                nil
tensor:done                nil
tensor:backward            nil
engine.trainer             engine.Trainer
engine.is_tensor           boolean
]]
for name in ([[zeros ones full rand randn randint arange tensor from_memory concat stack attention
  cross_entropy mse]]):gmatch("[%w_]+") do
  RETURNS["engine." .. name] = "engine.Tensor"
end

-- LuaLS accepts unknown fields in a table constructor, even of an exact class. This entry gives
-- every other field a type without values, so that LuaLS marks it.
local NO_OTHER = "---@field [string] engine.NoSuchField"

local PREAMBLE = [[
---@meta engine
-- Made by `engine help --types`; do not edit. Names and text are those of the reference.

---@alias engine.Statistic
---| "amax" | "norm" | "zeros" | "underflow" | "hist" | "tensors" | "groups" | "norm_ref"
---| "overflow" | "inf" | "nan" | "count"

---@alias engine.Decide
---| fun(state: table, record: engine.Record, options: table): number|engine.Verdict

---@alias engine.NoSuchField "there is no such field"

--- The exponent histogram of a record: hist[e] gradients have floor(log2 of the magnitude) = e.
---@class engine.Histogram
---@field first integer
---@field last integer
---@field [integer] integer
local histogram = {}
--- The number of gradients with exponents from `from` to `to`.
---@return integer
function histogram:sum(from, to) end

--- The statistics of one tensor or group in a record.
---@class engine.TensorRecord: engine.RecordStatistics
---@field name string
]]

local function comment(text, indent)
  local lines = {}
  for line in text:gsub("%s+$", ""):gmatch("[^\n]*") do
    if line ~= "" then lines[#lines + 1] = (indent or "") .. "--- " .. line end
  end
  return table.concat(lines, "\n")
end

local function field(entry)
  local name = entry.name:match("[^.]+$")
  local default = entry.kind:find("^trainer") and "any" or "number"
  local always = REQUIRED[entry.name] or entry.kind == "record field" or entry.kind == "field"
  return ("---@field %s%s %s %s"):format(name, always and "" or "?", TYPE[entry.name] or default,
    (entry.text:gsub("%s+", " ")))
end

-- "engine.nn.gpt(options)" as a declaration; nil when the name is a keyword.
local function declaration(signature)
  local code = ("function %s end"):format(signature)
  return loadstring(code) and code or nil
end

--- Writes the types into a file; returns a list of warnings.
function M.write(index, path)
  local out = { PREAMBLE }
  local function class(title, name, kind, rest)
    out[#out + 1] = ("--- %s\n---@class %s"):format(title, name)
    for _, entry in ipairs(index.entries) do
      if entry.kind == kind and (type(rest) ~= "function" or rest(entry)) then
        out[#out + 1] = field(entry)
      end
    end
    out[#out + 1] = (type(rest) == "string" and rest or "") .. "\n"
  end
  local shared = {}                                      -- by records, tensors and groups
  for name in ([[overflow inf nan count zeros underflow amax norm norm_ref hist
    scale]]):gmatch("%S+") do
    shared["record." .. name] = true
  end
  local function is_shared(entry) return shared[entry.name] ~= nil end
  class("Statistics of gradients.", "(exact) engine.RecordStatistics", "record field", is_shared)
  class("What a policy reads about a step; read-only.",
    "(exact) engine.Record: engine.RecordStatistics", "record field",
    function(entry) return not is_shared(entry) end)
  class("What `decide` returns.", "(exact) engine.Verdict", "verdict field", NO_OTHER)
  class("A policy file returns this.", "(exact) engine.Policy", "policy field", NO_OTHER)
  class("The options of engine.trainer.", "(exact) engine.TrainerOptions", "trainer option",
    NO_OTHER)
  class("A tensor: a handle that is valid until its step ends.", "engine.Tensor", "field")
  out[#out] = nil
  for _, operator in ipairs { "add", "sub", "mul", "div", "pow" } do
    out[#out + 1] = ("---@operator %s(engine.Tensor|number): engine.Tensor"):format(operator)
  end
  out[#out + 1] = "---@operator unm: engine.Tensor\nlocal tensor = {}\n\nlocal engine = {}\n"

  local made = {}
  for _, entry in ipairs(index.entries) do
    if entry.kind == "Lua module" then
      out[#out + 1] = comment(source.summary(entry.text)) .. "\n" .. entry.name .. " = {}\n"
    end
  end
  for _, entry in ipairs(index.entries) do
    for signature in (entry.kind == "Lua function" and entry.signature or ""):gmatch("[^\n]+") do
      local name = signature:match("^[^(]*")
      local object = name:match("^(%w+):")
      if object and not made[object] then
        if object ~= "tensor" then
          local class_name = object:gsub("^%l", string.upper)
          out[#out + 1] = ("---@class engine.%s\nlocal %s = {}\n"):format(class_name, object)
        end
        made[object] = true
      end
      local code = declaration(signature)
      if code then
        out[#out + 1] = comment(entry.text)
        if name == "engine.trainer" then
          code = code:gsub("%(.*%)", "(options)")
          out[#out + 1] = "---@param options engine.TrainerOptions"
        end
        local result = RETURNS[name] or entry.name:find("^tensor:") and "engine.Tensor"
        if result then out[#out + 1] = "---@return " .. result end
        out[#out + 1] = code .. "\n"
      end
    end
  end
  out[#out + 1] = "return engine"
  file.write(path, table.concat(out, "\n") .. "\n")
  return {}
end

return M
