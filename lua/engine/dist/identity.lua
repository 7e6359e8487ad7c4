-- Makes the lines of text that must be the same on all ranks when a job starts: the script's
-- modules, settings, policies, model, optimizer, data and options. Called by reducer.lua, which
-- compares these lines before a run opens its files. ranks.lua compares the engine and the script.
local C = require("engine.base.ffi").C
local config = require "engine.base.config"
local json = require "engine.base.json"
local random = require "engine.base.random"
local ranks = require "engine.dist.ranks"

local OPTIONS = { "comm_dtype", "zero", "bucket", "checkpoint_every", "agree_every", "stats_every",
  "ref_every", "ref_layers" }

-- Returns a line for each module that the script required, except the engine's modules.
local function module_lines()
  local lines = {}
  for name in pairs(package.loaded) do
    local path = type(name) == "string" and not name:find("^engine")
      and package.searchpath(name, package.path)
    if path then lines[#lines + 1] = ranks.file_line("module", path) end
  end
  table.sort(lines)
  return lines
end

-- Returns the position in the data as text. If each rank has its own data, the text says so
-- instead.
local function data_text(data)
  if data.sharded then return "separate on each rank" end
  local good, state = pcall(function() return json.encode(data:state()) end)
  return good and state or "from the script"
end

local function policy_text(policy)
  local options = {}
  for _, name in ipairs(policy.option_names or {}) do
    options[#options + 1] = name .. "=" .. tostring(policy.options[name])
  end
  return ("%s %s %s"):format(policy.name, policy.hash and policy:hash() or "a class",
    table.concat(options, " "))
end

local function model_text(model, list, shape_of)
  local parameters = {}
  for i, p in ipairs(list) do parameters[i] = p.name .. " " .. table.concat(shape_of(p), "x") end
  local text = table.concat(parameters, "\n")
  return ("%s, %d parameters, %08x"):format(tostring(model._class), #list,
    C.eng_crc32c(0, text, #text))
end

--- Returns the lines of a trainer with the options `o`. shape_of(p): the whole shape of a
--- parameter. apart: whether ranks hold different parameters (experts).
return function(trainer, o, shape_of, apart)
  local lines, opt, schedule = module_lines(), trainer.optimizer, trainer.schedule
  local function add(what, ...)
    local words = { what, ... }
    for i = 1, select("#", ...) + 1 do
      words[i] = words[i] == nil and "not set" or tostring(words[i])
    end
    lines[#lines + 1] = table.concat(words, " ")
  end
  for _, setting in ipairs(o.config and config.flatten(o.config) or {}) do
    add("setting", setting[1] .. "=" .. tostring(setting[2]))
  end
  add("policy", policy_text(trainer.policy))
  for _, s in ipairs(trainer.shadows and trainer.shadows.all or {}) do
    add("shadow", policy_text(s.policy))
  end
  for _, policy in ipairs(opt.fp8 and opt.fp8.policies or {}) do
    add("FP8 policy", policy_text(policy))
  end
  add("model", model_text(trainer.model, opt.list, shape_of))
  add("precision", trainer.precision.name)
  -- ranks with different experts may have different numbers of elements
  add("optimizer", apart and tostring(opt):gsub(", %d+ elements", "", 1) or tostring(opt))
  add("schedule", getmetatable(schedule) and tostring(schedule) or type(schedule))
  add("steps", trainer.steps)
  add("accumulate", trainer.accumulate)
  add("clip", trainer.clip)
  add("clip_value", trainer.clip_value)
  add("data", data_text(trainer.data))
  local place = random.place()
  add("random numbers", place.seed, place.counter)
  for _, name in ipairs(OPTIONS) do add(name, o[name]) end
  add("evaluate every", o.evaluate and o.evaluate.every)
  return lines
end
