-- Handles what a policy and the optimizer's update exchange besides scale, clip and lr_mul: the
-- norms that an update computes for the next step's record, and the verdict's entries for single
-- tensors. Owns the squares of these norms, which checkpoints store. Called by assemble.lua,
-- trainer.lua and run/restore.lua.
local autograd = require "engine.tensor.autograd"
local M_ffi = require "engine.base.ffi"
local show = require "engine.base.show"

local C = M_ffi.C

local M = {}

local Norms = {}
Norms.__index = Norms

--- Makes the norms of n parameters. The field `known` says whether the last step made an update
--- that computed norms.
function M.new(n) return setmetatable({ n = n, known = false }, Norms) end

local function sums(self)
  self.squares = self.squares or M_ffi.new("double[?]", self.n * C.ENG_NORMS)
  return self.squares
end

--- Fills the norms of a step's record and of its n tensors. Norms that are not known are NaN in the
--- record.
function Norms:fill(record, stats)
  for k = 0, C.ENG_NORMS - 1 do
    local known = self.known and k <= C.ENG_NORM_WEIGHT + self.moments
    local total = known and 0 or 0 / 0
    for i = 0, known and self.n - 1 or -1 do
      local square = self.squares[i * C.ENG_NORMS + k]
      total, stats[i].norms[k] = total + square, math.sqrt(square)
    end
    record.norms[k] = math.sqrt(total)
  end
end

--- Returns the norms as plain data for a checkpoint, or nil if they are not known.
function Norms:state()
  if not self.known then return nil end
  local list = {}
  for i = 1, self.n * C.ENG_NORMS do list[i] = show.exact(self.squares[i - 1]) end
  return { moments = self.moments, squares = table.concat(list, " ") }
end

--- Restores what state() returned. A state that does not fit the parameters is ignored.
function Norms:restore(state)
  self.known = false
  if not state then return end
  local i, into = 0, sums(self)
  for number in state.squares:gmatch("%S+") do
    local x = tonumber(number)
    if not x or i == self.n * C.ENG_NORMS then return end
    into[i], i = x, i + 1
  end
  self.moments, self.known = state.moments, i == self.n * C.ENG_NORMS
end

-- Returns what the policy set for each parameter, double [n], or nil. what: ENG_EACH_LR and so on.
local function each(trainer, what)
  local n = trainer.norms.n
  return trainer.policy:each(what, M_ffi.new("double[?]", n), n)
end

--- Applies the caps of a verdict: elements above a tensor's cap are multiplied by cap / amax. The
--- norms of the record and its tensors become those of the capped gradients.
function M.cap(trainer, s, record)
  local n, stats, changed = trainer.norms.n, trainer.stats, false
  local caps = each(trainer, C.ENG_EACH_CAP)
  for i, p in ipairs(trainer.optimizer.list) do
    local amax, relative = stats[i - 1].amax, stats[i - 1].relative_scale
    local most = caps[i - 1] * s.scale * (relative > 0 and relative or 1)
    if most < amax then
      changed = true
      autograd.scope(function()
        local g = p.tensor.grad
        local x = g:to "f32"
        g:copy(x:abs():gt(most):where(x * (most / amax), x):to(g.dtype))
      end)
    end
  end
  if not changed then return end
  local again, own = M_ffi.new "eng_record", M_ffi.new("eng_tensor_stats[?]", n)
  M_ffi.check(C.eng_params_stats(again, own, trainer.optimizer.params, s.scale, C.ENG_NEED_NORM))
  record.norm = again.norm
  for i = 0, n - 1 do stats[i].sum_squares = own[i].sum_squares end
end

--- Copies the verdict's fields for the update into the update's options. If norms are needed,
--- adds a buffer for them. Resets the moments of the tensors that the verdict names.
function M.add(trainer, options, verdict)
  local norms, opt = trainer.norms, trainer.optimizer
  if bit.band(trainer.needs, C.ENG_NEED_UPDATE_NORMS) ~= 0 or verdict.update_clip > 0 then
    options.norms, norms.known, norms.moments = sums(norms), true, opt.state:moments()
  end
  if verdict.update_clip > 0 then options.update_clip = verdict.update_clip end
  if verdict.spike_clip > 0 then options.spike_clip = verdict.spike_clip end
  if verdict.bias_step > 0 then options.bias_step = tonumber(verdict.bias_step) end
  if verdict.each == 0 then return end
  options.clips, options.lr_muls = each(trainer, C.ENG_EACH_CLIP), each(trainer, C.ENG_EACH_LR)
  local reset = each(trainer, C.ENG_EACH_RESET)
  for i = 1, reset and norms.n or 0 do
    if reset[i - 1] == 1 then opt:reset_moments(i) end
  end
end

return M
