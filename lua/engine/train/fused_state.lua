-- The state of the optimizers whose update is one fused kernel of the core (core/params/
-- optimizer.c): sgd, adam, adamw, lion. Owns the moments. Called by optim.lua; lua_state.lua has
-- the same methods for optimizers written in Lua.
local M_ffi = require "engine.base.ffi"

local ffi, C, check = M_ffi.ffi, M_ffi.C, M_ffi.check

local M = {}

local State = {}
State.__index = State

--- `kind`: ENG_SGD and so on. The optimizer has its parameters, groups and moments' dtype.
function M.new(optimizer, kind)
  local handle = ffi.new("eng_optimizer *[1]")
  check(C.eng_optimizer_new(handle, optimizer.params, kind, M_ffi.dtype[optimizer.moments],
    optimizer._group_of))
  return setmetatable({ handle = ffi.gc(handle[0], C.eng_optimizer_free), kind = kind,
    optimizer = optimizer, kept = 0, hyper = ffi.new("eng_hyper[?]", #optimizer.groups),
    call = ffi.new("eng_update") }, State)
end

--- One update. `lr`: the rate before a group's lr_mul. `options`: those of Optimizer:step, with
--- clip_norm and norm.
function State:update(lr, options)
  local groups, update = self.optimizer.groups, self.call
  for i, group in ipairs(groups) do
    local h = self.hyper[i - 1]
    h.lr = lr * group.lr_mul
    h.beta1, h.beta2, h.eps, h.weight_decay = group.beta1 or 0, group.beta2 or 0, group.eps or 0,
      group.weight_decay
    h.momentum, h.dampening, h.nesterov = group.momentum or 0, group.dampening or 0, group.nesterov
      and 1 or 0
  end
  update.kind, update.n_groups, update.groups = self.kind, #groups, self.hyper
  update.gradient_factor, update.clip_value = options.gradient_factor, options.clip_value
  update.t, update.lagged = self.optimizer.updates + 1, options.lagged and 1 or 0
  update.clip_norm, update.norm = options.clip_norm, options.norm
  check(C.eng_optimizer_step(self.handle, update))
end

local function same(shape) return shape end

-- How many moments there are. SGD without momentum keeps none.
local function moments_of(self)
  if self.kind ~= C.ENG_SGD then return 2 end
  for _, group in ipairs(self.optimizer.groups) do
    if group.momentum > 0 then return 1 end
  end
  return 0
end

--- The buffers of parameter i: a list of { name = "w.moment1", x = tensor, dtype, shape =
--- function(parameter's shape) -> the buffer's shape }. With ZeRO, x has the elements of the
--- parameter that this rank updates.
function State:of(i)
  local list = {}
  for which = 1, moments_of(self) do
    local x = M_ffi.Tensor()
    check(C.eng_optimizer_moment(x, self.handle, which, i - 1))
    if x.slot ~= 0 then
      list[#list + 1] = { name = ("%s.moment%d"):format(self.optimizer.list[i].name, which), x = x,
        dtype = self.optimizer.moments, shape = same }
    end
  end
  return list
end

--- The bytes of the buffers of a parameter with `count` elements.
function State:bytes(_, count)
  local each = self.optimizer.moments == "bf16" and 2 or 4
  local n = self.kind == C.ENG_LION and 1 or moments_of(self)
  return n * math.ceil(count * each / 64) * 64
end

--- Keeps only this rank's elements of the moments (ZeRO).
function State:shard() check(C.eng_optimizer_shard(self.handle)) end

--- Called after a load: the next update uses the optimizer's own count.
function State:restart() C.eng_optimizer_restart(self.handle) end

return M
