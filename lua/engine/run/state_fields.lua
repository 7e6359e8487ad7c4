-- The fields of a trainer's state in a checkpoint, which restore.lua writes and reads. A resume or
-- a rollback calls `problem` to check all fields before it uses the first one. Some values are
-- checked by their owners instead: policies check their states, loaders their positions,
-- control.lua the clients' settings, and the script its own data. Called by restore.lua.
local M_ffi = require "engine.base.ffi"
local fields = require "engine.base.fields"

local amount, count, flag, text = fields.amount, fields.count, fields.flag, fields.text
local any, between, list, map = fields.any, fields.between, fields.list, fields.map
local optional, record, rule, whole = fields.optional, fields.record, fields.rule, fields.whole

local M = {}

local up_to_steps = rule("a whole number from 0 to the number of steps", function(x, state)
  return whole(x) and (not whole(state.steps) or x <= state.steps)
end)

local lr_factor = rule("1, or after a rollback a finite number of 0 or more", function(x, state)
  return x == 1 or amount(x, "") == nil and state.rollbacks ~= 0
end)

-- A random number's seed or counter, as text.
local uint64 = rule("a whole number below 2^64 as a string", function(x)
  return type(x) == "string" and x:find("^%d+$") ~= nil
    and (#x < 20 or #x == 20 and x <= "18446744073709551615")
end)

local number_text = rule("a number as a string", function(x)
  return type(x) == "string" and tonumber(x) ~= nil
end)

local key = rule("a string, a number or a boolean", function(x)
  return type(x) == "string" or type(x) == "boolean" or type(x) == "number" and x == x
end)

local dtype = rule("the name of a dtype", function(x) return M_ffi.dtype[x] ~= nil end)

-- A policy in a seat (swap.lua). `state` belongs to the policy. old: the policy that may return.
local policy = record {
  name = text, state = text, file = optional(text), hash = optional(text),
  options = optional(map(any)),
  swapped = optional(record {
    asked = record { name = text, file = optional(text), hash = optional(text),
      options = optional(text) },
    name = text, file = optional(text), path = optional(text), source = text,
    options = optional(map(any)),
    old = optional(record { name = text, file = optional(text), path = optional(text),
      source = optional(text), options = optional(map(any)), state = text }),
  }),
}

-- A shadow (shadow.lua). Those of FP8 layers have rungs, the others have scales and actions.
local shadow = record {
  name = text, policy = text, state = text, why = optional(text),
  steps = optional(count), run_skipped = optional(count),
  skipped = optional(count), failed = optional(count),
  apart = optional(amount), most = optional(amount), scale = optional(amount),
  action = optional(count), was_failed = optional(count), over = optional(flag),
  bound = optional(flag), rungs = optional(list(count)),
  certainty = optional(record { exact = count, bounds = count, least = count, closed = flag,
    from = function(value, path, certainty)
      return (value or certainty.bounds > 0) and count(value, path) or nil
    end, why = optional(text) }),
}

local STATE = record {
  -- the trainer
  steps = count, updates = up_to_steps, skipped = up_to_steps, retries = up_to_steps,
  tokens = count, elapsed = amount, rollbacks = optional(count),
  lr_factor = optional(lr_factor), accumulate = optional(between(1, 2 ^ 20)),
  ranks = optional(between(1, 2 ^ 16)), precision = optional(text), schedule = optional(text),
  recipe = optional(text),
  threads = optional(count), evaluation_loss = optional(number_text),
  last_verdict = optional(record { clip = amount, lr_mul = amount }),
  optimizer = record { name = text, updates = count },
  update_norms = optional(record { moments = count, squares = text }),
  rng = record { seed = uint64, counter = uint64 },
  -- a session's loop
  loop = optional(record { turn = count,
    optimizers = map(record { updates = count, lr = amount, first_lr = amount }) }),
  -- policies and shadows
  policy = policy,
  fp8 = optional(record { policies = optional(list(policy)), held = optional(flag) }),
  shadows = optional(record { list = list(shadow), largest = optional(amount),
    steps = optional(count), skipped = optional(count) }),    -- older engines write the last two
  -- settings changed by clients, by name; control.lua checks the values
  set = optional(map(any)),
  -- positions in the data, which the loaders check
  data = any, evaluation = any,
  -- trainer.state, which belongs to the script
  user = optional(record { data = fields.table, tensors = list(record { name = text,
    dtype = dtype, shape = list(count), path = list(key) }) }),
}

--- Returns what is wrong with a trainer's state, as text, or nil.
function M.problem(state) return STATE(state, "state") end

return M
