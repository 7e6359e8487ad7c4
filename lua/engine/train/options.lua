-- Checks the options of engine.trainer{ ... } and engine.session{ ... }: their names and values,
-- with messages for what is wrong. assemble.lua and session.lua document the options for users.
-- Called by assemble.lua, session.lua and cli/plan_measure.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fields = require "engine.base.fields"
local nearest = require "engine.base.nearest"
local pattern = require "engine.base.pattern"
local reduction = require "engine.dist.reduction"
local renamed = require "engine.base.renamed"

local set_of = arguments.set_of
local M = {}

local KNOWN = set_of [[model data loss optimizer schedule precision policy policy_options steps
  clip clip_value accumulate checkpoint run resume restart_data checkpoint_every keep log state
  on_step on_policy_error on_lost rollbacks stats_every history config evaluate mode graph ref_every
  ref_layers shadow trap watch attach tensorboard comm_dtype bucket zero rank_timeout agree_every
  activations]]

local SESSION = set_of [[optimizer optimizers data precision policy policy_options clip clip_value
  run resume restart_data checkpoint_every keep log state on_policy_error on_lost rollbacks
  stats_every history config shadow watch attach tensorboard]]

local who = "trainer"   -- the function whose options are checked; its name begins the messages
local function want(condition, key, expected, got)
  M_ffi.expect(condition, got, "%s: expected %s to be %s", who, key, expected)
end

local function callable(v)
  local meta = type(v) == "table" and getmetatable(v)
  return type(v) == "function" or (meta and meta.__call ~= nil)
end

local function whole(v) return fields.whole(v) and v >= 1 end
local function not_negative(v) return type(v) == "number" and v >= 0 end
local function is(kind) return function(v) return type(v) == kind end end
local function is_pattern(v) return type(v) == "string" and not pattern.problem(v) end
local function path(v) return type(v) == "string" and not v:find("%z") end
local function one_of(words)
  local set = set_of(words)
  return function(v) return set[v] == true end
end
local function any_of(...)
  local tests = { ... }
  return function(v)
    for _, test in ipairs(tests) do
      if test(v) then return true end
    end
    return false
  end
end

-- Options that may be nil: name, what the value must be, a test. They are checked in this order.
local OPTIONAL = {
  { "accumulate", "a whole number from 1 to 2^20",
    function(v) return whole(v) and v <= 2 ^ 20 end },
  { "clip", "a number >= 0 (0: no clipping)", not_negative },
  { "clip_value", "a number >= 0 (0: no clipping)", not_negative },
  { "checkpoint", "'block', a Lua pattern of module paths or false",
    function(v) return v == false or type(v) == "string" end },
  { "checkpoint_every", "a whole number of steps (0: only at the end)", fields.whole },
  { "agree_every", "a whole number of steps (0: never)", fields.whole },
  { "keep", "a whole number of 1 or more", whole },
  { "stats_every", "a whole number of 1 or more", whole },
  { "ref_every", "a whole number of 1 or more", whole },
  { "ref_layers", "a Lua pattern of parameter names", is_pattern },
  { "activations", "a Lua pattern of module names", is_pattern },
  { "on_step", "a function", is "function" },
  { "state", "a table", is "table" }, { "config", "a table", is "table" },
  { "evaluate", "{ data = a loader, every = steps, batches = how many (default 10) }",
    function(v)
      if type(v) ~= "table" then return false end
      for key in pairs(v) do
        if key ~= "data" and key ~= "every" and key ~= "batches" then return false end
      end
      return type(v.data) == "table" and v.data.next and whole(v.every)
        and (v.batches == nil or whole(v.batches))
    end },
  { "log", "'line', 'json' or 'quiet'", one_of "line json quiet" },
  { "graph", "true or false", is "boolean" },
  { "mode", "'sync' or 'lagged'", one_of "sync lagged" },
  { "on_policy_error", "'hold' or 'stop'", one_of "hold stop" },
  { "rollbacks", "a whole number of 0 or more", fields.whole },
  { "on_lost", "'stop' or 'continue'", one_of "stop continue" },
  { "schedule", "a schedule of engine.schedule or a function(updates)", callable },
  { "trap", "'overflow' or false",
    function(v) return v == false or v == "" or v == "overflow" end },
  { "shadow", "a list of policies or a text 'a,b'", any_of(is "string", is "table") },
  { "tensorboard", "true, false or a directory", any_of(is "boolean", path) },
  { "policy_options", "a table", is "table" },
  { "run", "a name or a path", path },
  { "loss", "a function(model, batch)", callable },
  { "resume", "'auto' (or true), a path, or false", any_of(path, is "boolean") },
  { "restart_data", "true or false", is "boolean" },
}

--- Returns a copy of the options with the names of version 0.1 replaced.
function M.current(given)
  local o = arguments.merged(given)
  if o.wire ~= nil then
    renamed("the trainer's option 'wire'", "'comm_dtype'")
    if o.comm_dtype == nil then o.comm_dtype = o.wire end
    o.wire = nil
  end
  return o
end

local function check_names(o, known)
  for key in pairs(o) do
    if not known[key] then
      error(("%s: unknown option %s%s"):format(who, M_ffi.value_text(key),
        known == SESSION and KNOWN[key] and "; only engine.trainer has it"
          or nearest.hint(key, nearest.keys(known), true)), 0)
    end
  end
end

local function check_values(o)
  for _, option in ipairs(OPTIONAL) do
    local key, expected, test = option[1], option[2], option[3]
    want(o[key] == nil or test(o[key]), key, expected, o[key])
  end
end

local function check_loader(data)
  want(type(data) == "table" and data.next, "data", "a loader with next()", data)
  want(not data.state == not data.restore, "data",
    ("a loader with both state() and restore(), or with neither (it has only %s())"):format(
      type(data) == "table" and data.state and "state" or "restore"), data)
end

--- Raises an error that names the first invalid option of a session.
function M.check_session(o)
  who = "session"
  check_names(o, SESSION)
  if o.data ~= nil then check_loader(o.data) end
  check_values(o)
end

--- Raises an error that names the first invalid option of a trainer.
function M.check(o)
  who = "trainer"
  check_names(o, KNOWN)
  want(type(o.model) == "table" and o.model.parameters, "model", "a module", o.model)
  check_loader(o.data)
  want(type(o.optimizer) == "table" and o.optimizer.params, "optimizer",
    "an optimizer of engine.optim", o.optimizer)
  want(whole(o.steps), "steps", "a whole number of 1 or more", o.steps)
  check_values(o)
  want(o.loss ~= nil or o.model.loss, "loss",
    "a function(model, batch), because this model has no loss", o.loss)
  want(o.checkpoint == nil or o.model.checkpoint, "model",
    "a module of engine.nn, because the option checkpoint is set", o.model)
  local key, expected = reduction.wrong(o)
  if key then want(false, key, expected, o[key]) end
end

return M
