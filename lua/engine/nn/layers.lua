-- Basic layers: linear, embedding, norms, dropout, activations, containers. Initial values are
-- PyTorch's defaults unless the caller says otherwise. Shapes: K inputs, N outputs, C width. Called
-- by scripts and by this folder.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fuse = require "engine.nn.fuse"
local module = require "engine.nn.module"
local tensor = require "engine.tensor.tensor"

local expect, want_whole, class = M_ffi.expect, arguments.want_whole, module.class
local M = {}

local new_parameter = module.new_parameter

-- ------------------------------------------------------------------ linear, embedding

--- nn.linear(inputs, outputs [, { bias = true, std = nil }]): y = x W^T + b, x [.. x K] -> [.. x
--- N], weight [N x K], bias [N]. Initial values: uniform within +-1/sqrt(inputs); with `std`, the
--- weight is normal and the bias 0.
local Linear = class("linear")
function Linear:init(inputs, outputs, options)
  want_whole(inputs, "nn.linear", "inputs", 1)
  want_whole(outputs, "nn.linear", "outputs", 1)
  options = tensor.read_named(options, "nn.linear", "bias std")
  self.inputs, self.outputs = inputs, outputs
  module.add_linear(self, { outputs, inputs }, options)
end
function Linear:forward(x) return fuse.linear(self, x) end
function Linear:extra()
  return ("%d -> %d%s"):format(self.inputs, self.outputs,
    rawget(self, "bias") and "" or ", no bias")
end
fuse.register("linear", Linear)
M.linear = Linear

--- nn.embedding(count, width [, { std = 1 }]): ids [..] counted from 0 -> rows [.. x C] of the
--- weight [count x C].
local Embedding = class("embedding")
function Embedding:init(count, width, options)
  want_whole(count, "nn.embedding", "the number of rows", 1)
  want_whole(width, "nn.embedding", "the width", 1)
  local std = module.want_std(tensor.read_named(options, "nn.embedding", "std"), "nn.embedding")
  self.rows, self.width = count, width
  self:parameter("weight", new_parameter({ count, width },
    function(x) x:normal(0, std or 1) end), "embedding")
end
function Embedding:forward(ids) return self.weight:embedding(ids) end
function Embedding:extra() return ("%d x %d"):format(self.rows, self.width) end
M.embedding = Embedding

-- ------------------------------------------------------------------ norms

local function ones(x) x:fill(1) end

--- nn.layer_norm(width [, { eps = 1e-5, bias = true }]): x [.. x C] -> [.. x C]. norm(x, branch)
--- returns two tensors: the norm of x + branch, and x + branch.
local LayerNorm = class("layer_norm")
function LayerNorm:init(width, options)
  want_whole(width, "nn.layer_norm", "the width", 1)
  options = tensor.read_named(options, "nn.layer_norm", "eps bias")
  self.eps = module.want_eps(options, "nn.layer_norm", 1e-5)
  self:parameter("weight", new_parameter({ width }, ones), "norm")
  if not module.want_flag(options, "bias", "nn.layer_norm", true) then return end
  self:parameter("bias", new_parameter { width }, "norm")
end
function LayerNorm:forward(x, branch)
  return fuse.layer_norm(x, branch, self.weight, rawget(self, "bias"), self.eps)
end
function LayerNorm:extra() return ("%d"):format(self.weight.count) end
fuse.register("norm", LayerNorm)
M.layer_norm = LayerNorm

--- nn.rms_norm(width [, { eps = 1e-6 }]): x [.. x C] -> [.. x C]. norm(x, branch) returns two
--- tensors: the norm of x + branch, and x + branch.
local RMSNorm = class("rms_norm")
function RMSNorm:init(width, options)
  want_whole(width, "nn.rms_norm", "the width", 1)
  options = tensor.read_named(options, "nn.rms_norm", "eps")
  self.eps = module.want_eps(options, "nn.rms_norm", 1e-6)
  self:parameter("weight", new_parameter({ width }, ones), "norm")
end
function RMSNorm:forward(x, branch) return fuse.rms_norm(x, branch, self.weight, self.eps) end
RMSNorm.extra = LayerNorm.extra
fuse.register("norm", RMSNorm)
M.rms_norm = RMSNorm

-- ------------------------------------------------------------------ without parameters

--- nn.dropout(p = 0.5): in training mode sets elements to zero with probability p and scales the
--- others by 1 / (1 - p); in evaluation mode returns its input.
local Dropout = class("dropout")
function Dropout:init(p)
  p = p or 0.5
  expect(type(p) == "number" and p >= 0 and p <= 1, p,
    "nn.dropout: expected a probability in [0, 1]")
  self.p = p
end
function Dropout:forward(x)
  if not self._training or self.p == 0 then return x end
  return x:dropout(self.p)
end
function Dropout:extra() return ("%g"):format(self.p) end
M.dropout = Dropout

--- nn.relu(), nn.silu() ...: a module that applies the tensor method of the same name. nn.softmax
--- and nn.log_softmax take an optional dimension, which must be the last one.
for _, name in ipairs { "relu", "silu", "sigmoid", "tanh", "softplus", "softmax", "log_softmax",
  "log_sigmoid" } do
  local Activation = class(name)
  function Activation:init(d) self.d = d end
  function Activation:forward(x) return x[name](x, rawget(self, "d")) end
  M[name] = Activation
end

--- nn.gelu([form]): GELU in the form "erf" (default) or "tanh".
local GELU = class("gelu")
function GELU:init(form)
  expect(form == nil or form == "tanh" or form == "erf", form, "nn.gelu: expected 'erf' or 'tanh'")
  self.form = form
end
function GELU:forward(x) return x:gelu(self.form) end
M.gelu = GELU

-- ------------------------------------------------------------------ containers

--- nn.sequential { a, b, c } or nn.sequential(a, b, c): applies its modules one after the other.
local Sequential = class("sequential")
function Sequential:init(...)
  local list, n = { ... }, select("#", ...)
  if n == 1 and not module.is_module(list[1]) then
    list = list[1]
    arguments.want_list(list, "nn." .. self._class, "the modules",
      "{ nn.linear(4, 4), nn.layer_norm(4) }")
    n = #list
  end
  for i = 1, n do
    local child = list[i]
    expect(module.is_module(child), child,
      "nn.%s: expected entry %d to be a module", self._class, i)
    self[i] = child
  end
end
function Sequential:forward(x)
  for _, child in ipairs(self) do x = child(x) end
  return x
end
M.sequential = Sequential

--- nn.list { a, b, c }: registers modules that the model calls one by one. A list has no forward.
local List = class("list")
List.init = Sequential.init
M.list = List

return M
