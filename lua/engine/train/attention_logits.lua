-- Publishes the largest attention logit of each head as a signal logit_max.MODULE.HEAD (heads count
-- from 1) that policies read. If a verdict has factors for the heads (`logit_muls`), multiplies the
-- heads' logits by them. Reads a model's nn.attention modules only while a policy needs their
-- logits. Called by trainer.lua, and by modes.lua, which asks for the modules.
local M_ffi = require "engine.base.ffi"
local autograd = require "engine.tensor.autograd"
local precision = require "engine.train.precision"
local signals = require "engine.policy.signals"
local tensor = require "engine.tensor.tensor"

local C, check = M_ffi.C, M_ffi.check

local M = {}

local Logits = {}
Logits.__index = Logits

--- Returns the nn.attention modules of a model, { path = module }, or nil if there are none.
function M.modules(model)
  local found = {}
  if model.apply then
    model:apply(function(module, path)
      if rawget(module, "watch_logits") == nil then return end
      found[path ~= "" and path or "attention"] = module
    end)
  end
  return next(found) and found or nil
end

--- Returns why a model's logits cannot be scaled through its query and key weights, or nil if they
--- can.
function M.fixed(model)
  for path, module in pairs(M.modules(model) or {}) do
    if rawget(module, "q_norm") then
      return ("%s normalizes queries and keys (qk_norm), which undoes factors on their weights")
        :format(path)
    elseif rawget(module.qkv, "_lora") then
      return ("%s.qkv has an adapter, and factors would scale only its frozen weights"):format(path)
    end
  end
end

--- Returns an object that measures the attention logits of a model.
function M.new(model)
  return setmetatable({ modules = M.modules(model) or {}, most = {} }, Logits)
end

--- Withdraws the signals of all models.
function M.clear() signals.withdraw "^logit_max%." end

--- Switches the measurement of logits on (before a forward pass whose logits count) or off (after
--- it).
function Logits:watch(on)
  for _, module in pairs(self.modules) do rawset(module, "watch_logits", on) end
end

--- Reads the largest logits of micro-batch i's forward pass. Each signal is the largest logit of
--- its head in the step so far.
function Logits:read(i)
  for path, module in pairs(self.modules) do
    local rows = rawget(module, "logits")                    -- [B x H x T]
    for head, most in ipairs(rows and rows:max(3):max(1):totable() or {}) do
      local name = ("logit_max.%s.%d"):format(path, head)
      most = i > 1 and math.max(self.most[name] or most, most) or most
      self.most[name] = most
      signals.publish_largest(name, most)
    end
  end
end

-- Returns the factors on the rows of qkv [(H + 2G) D x C] that multiply the logits of head h by
-- factor[h]. There are H query heads and G key heads, with D elements a head, and C inputs. Keys
-- get the square root of the smallest factor of the heads that share them. Queries get the rest of
-- the factor. Values get 1.
local function rows_of(module, factor)
  local H, G, D = module.heads, module.kv_heads, module.head_width
  local rows, keys = {}, {}
  for h = 1, H do
    local g = math.floor((h - 1) * G / H) + 1
    keys[g] = math.min(keys[g] or math.huge, math.sqrt(factor[h]))
  end
  for h = 1, H do
    local g = math.floor((h - 1) * G / H) + 1
    for _ = 1, D do rows[#rows + 1] = factor[h] / keys[g] end
  end
  for g = 1, G do
    for _ = 1, D do rows[#rows + 1] = keys[g] end
  end
  for _ = 1, G * D do rows[#rows + 1] = 1 end
  return rows
end

local function scale_rows(module, rows)
  local qkv, factors = module.qkv, tensor.tensor(rows)
  qkv.weight:copy(qkv.weight * factors:view(#rows, 1))
  local bias = rawget(qkv, "bias")
  if bias then bias:copy(bias * factors) end
end

--- Scales the query and key weights, and biases, so that the logits of each head are multiplied by
--- the head's factor in `muls`, { ["MODULE.HEAD"] = factor } or nil. Then refreshes the
--- low-precision copies in the parameter set `params`.
function Logits:scale(muls, params)
  if not muls then return end
  for path, module in pairs(self.modules) do
    local factor, some = {}, false
    for h = 1, module.heads do
      factor[h] = muls[path .. "." .. h] or 1
      some = some or factor[h] ~= 1
    end
    if some then
      precision.autocast("fp32", autograd.scope, scale_rows, module, rows_of(module, factor))
    end
  end
  check(C.eng_params_refresh(params))
end

return M
