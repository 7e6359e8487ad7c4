-- Fusion: decides which consecutive operations of a model run as one operation. Models call the
-- functions below; no other file of this folder calls a fused operation or passes an FP8 site to an
-- operation. A fused form gives the same bits as its parts, with one exception: the backward pass
-- of mlp_gelu in f16 and bf16 rounds one time fewer. Called by layers.lua, transformer.lua,
-- models.lua and lora_layers.lua.
--
-- A module can be fused if its `forward` is the library's, not an adapter's or an override, and if
-- it has no relative scale (`_relative_scale`, policy/groups.lua). Part of a fused operation would
-- run outside the module, where its relative scale does not apply.
-- Shapes: B batch, T time, C width.
local module = require "engine.nn.module"
local tensor = require "engine.tensor.tensor"

local M = {}

local library = { linear = {}, norm = {}, block = {} }   -- the library's forward functions

--- Registers the forward of `class` as one of the library's. kind: "linear", "norm" or "block". The
--- forward(x, branch) of a norm returns two tensors: the norm of x + branch, and x + branch. The
--- forward(x, open) of a block works as M.stack describes.
function M.register(kind, class) library[kind][class.forward] = true end

local function is_unchanged(m, kind)
  return library[kind][m.forward] and not rawget(m, "_relative_scale")
end

-- ------------------------------------------------------------------ linear layers

--- Computes x W^T + b for a linear layer: x [.. x K] -> [.. x N]. Uses the layer's FP8 site if a
--- recipe gave it one. `bias` = false leaves out b.
function M.linear(layer, x, bias)
  return x:linear(layer.weight, bias ~= false and rawget(layer, "bias") or nil,
    rawget(layer, "_fp8"))
end

--- Computes y = f(x, ...), frees the memory of x unless the backward pass needs it, and returns y.
--- Nothing but f may read x. `of`: the tensor that x is a view of, or nil.
function M.last_use(f, x, of, ...)
  local y = f(x, ...)
  x:done()
  if of then of:done() end
  return y
end

local function can_fuse_gelu(up, form, down)
  return form == "tanh" and is_unchanged(up, "linear") and is_unchanged(down, "linear")
    and not rawget(up, "_fp8") and not rawget(down, "_fp8")   -- mlp_gelu has no FP8 form
    and up.outputs == down.inputs
end

--- Computes down(gelu(up(x))): x [.. x C] -> [.. x N]. form: the form of GELU, "tanh" or "erf".
function M.gelu_mlp(x, up, form, down)
  if can_fuse_gelu(up, form, down) then
    return x:mlp_gelu(up.weight, rawget(up, "bias"), down.weight, rawget(down, "bias"))
  end
  return M.last_use(down, up(x):gelu(form))
end

--- Computes down(silu(gate) * up): gate, up [.. x K] -> [.. x N]. If `down` has an FP8 site and can
--- be fused, the product silu(gate) * up is quantized while it is computed. But while module.watch
--- is active, the product is stored first, because the watching functions have to see it.
function M.swiglu_mlp(gate, up, down)
  local site = rawget(down, "_fp8")
  local as_codes = site and is_unchanged(down, "linear") and not module.watched()
  local y = as_codes and gate:swiglu_linear(up, down.weight, rawget(down, "bias"), site)
    or M.last_use(down, gate:swiglu(up, site))
  gate:done()
  up:done()
  return y
end

--- Computes tensor.attention(q, k, v, options) for the layer `out`, which reads the result. The
--- result is kept in e5m6 if `out` has an FP8 site that stores its input in that format.
function M.attention(q, k, v, out, options)
  options.site = rawget(out, "_fp8")
  return tensor.attention(q, k, v, options)
end

-- ------------------------------------------------------------------ residuals and norms

--- Returns x:layer_norm(...). With a branch, returns two tensors: the norm of x + branch, and x +
--- branch.
function M.layer_norm(x, branch, ...)
  if branch then return x:add_layer_norm(branch, ...) end
  return x:layer_norm(...)
end

--- Returns x:rms_norm(...). With a branch, returns two tensors: the norm of x + branch, and x +
--- branch.
function M.rms_norm(x, branch, ...)
  if branch then return x:add_rms_norm(branch, ...) end
  return x:rms_norm(...)
end

-- A sum x + branch that is not computed yet. The norm that follows computes the sum too.
local Sum = {}
Sum.__index = Sum

--- Makes a Sum of x without a branch: `+ y` adds a branch, :norm(module) applies a norm, :value()
--- gives the tensor. An x that is a Sum already is returned unchanged.
function M.sum(x)
  if type(x) == "table" and getmetatable(x) == Sum then return x end
  return setmetatable({ x = x }, Sum)
end

-- Defers the sum only if the branch has x's shape. A number, or a tensor that broadcasts, is added
-- at once.
function Sum:__add(branch)
  local x = self:value()
  if tensor.is_tensor(branch) and branch.ndim == x.ndim and branch.count == x.count then
    return setmetatable({ x = x, branch = branch }, Sum)
  end
  return M.sum(x + branch)
end

function Sum:value()
  if self.branch then self.x, self.branch = self.x + self.branch, nil end
  return self.x
end

function Sum:norm(norm)
  if not self.branch or not is_unchanged(norm, "norm") then return (norm(self:value())) end
  local y
  y, self.x = norm(self.x, self.branch)
  self.branch = nil
  return y
end

--- Computes norm(blocks[n](... blocks[1](x))): x [B x T x C] -> the same shape. If a block and the
--- module after it (a block or the norm) can both be fused, block(x, true) leaves out its last
--- addition and returns a Sum. The module after it then computes this addition.
function M.stack(x, blocks, norm)
  for i, block in ipairs(blocks) do
    local after = blocks[i + 1]
    local open = is_unchanged(block, "block")
      and is_unchanged(after or norm, after and "block" or "norm")
    x = block(x, open or nil)
  end
  return M.sum(x):norm(norm)
end

return M
