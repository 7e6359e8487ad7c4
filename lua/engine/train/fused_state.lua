-- Keeps the state of the fused optimizers, whose update is one kernel of the core
-- (core/params/optimizer.c), and reads their table, core/optimizers.def. Owns the moments and
-- compensations. Called by optim.lua; lua_state.lua has the same methods for optimizers written in
-- Lua, and modes.lua uses the table.
local M_ffi = require "engine.base.ffi"

local ffi, C, check = M_ffi.ffi, M_ffi.C, M_ffi.check

local M = {}

--- The fused optimizers: { name =, kind = ENG_SGD and so on, moments = their number, traits = a sum
--- of ENG_SPIKE_CLIP and so on, defaults = hyperparameters and their default values }.
M.kinds = {}
for kind = 0, C.ENG_OPTIMIZER_COUNT - 1 do
  local row, defaults = C.eng_optimizer_describe(kind), {}
  for name, value in ffi.string(row.hyper):gmatch("%.([%w_]+) = ([^,)]+)") do
    defaults[name] = value == "true" or value ~= "false" and assert(tonumber(value))
  end
  M.kinds[kind + 1] = { name = ffi.string(row.name), kind = kind, moments = row.moments,
    traits = row.traits, defaults = defaults }
end

--- Returns the names of the fused optimizers for messages, such as "adam, adamw and lion". `trait`:
--- only those that have this trait. `last`: the word before the last name.
function M.names(last, trait)
  local list = {}
  for _, row in ipairs(M.kinds) do
    if not trait or bit.band(row.traits, trait) ~= 0 then list[#list + 1] = row.name end
  end
  return (table.concat(list, ", "):gsub(", ([^,]+)$", " " .. last .. " %1"))
end

local State = {}
State.__index = State

--- Makes the state of an optimizer, which must already have its parameters, its groups and the
--- dtype of its moments. `row`: its entry in M.kinds.
function M.new(optimizer, row)
  local handle = ffi.new("eng_optimizer *[1]")
  check(C.eng_optimizer_new(handle, optimizer.params, row.kind, M_ffi.dtype[optimizer.moments],
    optimizer._group_of))
  return setmetatable({ handle = ffi.gc(handle[0], C.eng_optimizer_free), row = row,
    optimizer = optimizer, kept = 0, call = ffi.new("eng_update"),
    hyper = ffi.new("eng_hyper[?]", #optimizer.groups + #optimizer.list) }, State)
end

-- Writes the hyperparameters of `group` to h, with the rate lr.
local function fill(self, h, group, lr)
  for name in pairs(self.row.defaults) do h[name] = group[name] end
  h.lr = lr
end

-- Fills the hyperparameters of the groups. With `lr_muls` [n], factors on the rates of the
-- parameters, each parameter has an additional group of its own in this update. Returns the number
-- of groups.
local function fill_groups(self, lr, lr_muls)
  local groups, of, n = self.optimizer.groups, self.optimizer._group_of, #self.optimizer.groups
  for i, group in ipairs(groups) do fill(self, self.hyper[i - 1], group, lr * group.lr_mul) end
  if not lr_muls and not self.moved then return n end
  self.moved = lr_muls ~= nil
  if lr_muls then
    local count = #self.optimizer.list
    local own = ffi.new("int32_t[?]", count)
    for i = 0, count - 1 do
      local group = groups[of[i] + 1]
      own[i] = n + i
      fill(self, self.hyper[own[i]], group, lr * group.lr_mul * lr_muls[i])
    end
    of, n = own, n + count
  end
  check(C.eng_optimizer_groups(self.handle, of))
  return n
end

local ROUNDING = { nearest = C.ENG_ROUND_NEAREST, stochastic = C.ENG_ROUND_STOCHASTIC,
  kahan = C.ENG_ROUND_KAHAN }

--- Sets the rounding that the optimizer's precision recipe names, and drops Kahan's compensation.
function State:set_rounding()
  check(C.eng_optimizer_rounding(self.handle, ROUNDING[self.optimizer.precision.rounding]))
end

--- Makes one update. `lr`: the rate, not yet multiplied by the groups' lr_mul. `options`: as for
--- Optimizer:step; gradient_factor, clip_value, clip_norm and norm are required.
function State:update(lr, options)
  local update = self.call
  update.n_groups = fill_groups(self, lr, options.lr_muls)
  update.kind, update.groups = self.row.kind, self.hyper
  update.gradient_factor, update.clip_value = options.gradient_factor, options.clip_value
  update.draw = self.optimizer.updates + 1
  update.t = options.bias_step or update.draw
  update.lagged = options.lagged and 1 or 0
  update.clip_norm, update.norm, update.clips = options.clip_norm, options.norm, options.clips
  update.norms, update.update_clip, update.spike_clip = options.norms, options.update_clip or 0,
    options.spike_clip or 0
  check(C.eng_optimizer_step(self.handle, update))
end

--- Returns how many moments each parameter has. SGD without momentum has none.
function State:moments()
  local by_momentum = bit.band(self.row.traits, C.ENG_MOMENTUM) ~= 0
  for _, group in ipairs(self.optimizer.groups) do
    if not by_momentum or group.momentum > 0 then return self.row.moments end
  end
  return 0
end

local function compensates(self, i)
  local optimizer = self.optimizer
  return optimizer.precision.rounding == "kahan" and optimizer.list[i].tensor.dtype == "bf16"
end

--- Returns the buffers of parameter i: a list of { name = "w.moment1", x = tensor, dtype, shape =
--- function(parameter's shape) -> the buffer's shape }. With ZeRO, x has only the elements that
--- this rank updates.
function State:of(i)
  local list = {}
  local function add(which, name, dtype)
    local x = M_ffi.Tensor()
    check(C.eng_optimizer_moment(x, self.handle, which, i - 1))
    list[#list + 1] = { name = self.optimizer.list[i].name .. "." .. name, x = x, dtype = dtype,
      shape = function(shape) return shape end }
  end
  for which = 1, self:moments() do add(which, "moment" .. which, self.optimizer.moments) end
  if compensates(self, i) then add(C.ENG_COMPENSATION, "compensation", "bf16") end
  return list
end

--- Returns the size in bytes of the buffers of parameter i, which has `count` elements.
function State:bytes(i, count)
  local each = self.optimizer.moments == "bf16" and 2 or 4
  return self:moments() * math.ceil(count * each / 64) * 64
    + (compensates(self, i) and math.ceil(count * 2 / 64) * 64 or 0)
end

--- Keeps only this rank's elements of the moments (ZeRO).
function State:shard() check(C.eng_optimizer_shard(self.handle)) end

--- Makes the next update continue from the optimizer's number of updates. Called after a state is
--- loaded.
function State:restart() C.eng_optimizer_restart(self.handle) end

return M
