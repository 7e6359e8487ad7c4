-- Basic layers: linear, embedding, norms, dropout, activations, containers. Initial values are
-- PyTorch's defaults unless the caller says otherwise.
local M_ffi = require "engine.base.ffi"
local tensor = require "engine.tensor.tensor"
local module = require "engine.nn.module"

local raise, value_text = M_ffi.raise, M_ffi.value_text
local M = {}
local class = module.class

local function parameter_tensor(...)
  local shape = { ... }
  return tensor.zeros(shape, { keep = true })
end

local function read_options(options, name, ...)
  local known = {}
  for _, key in ipairs { ... } do known[key] = true end
  return tensor.read_named(options, "nn." .. name, known)
end

local function want_size(name, what, n)
  if type(n) ~= "number" or n % 1 ~= 0 or n < 1 then
    raise("nn.%s: expected %s as a whole number of 1 or more, got %s", name, what, value_text(n))
  end
end

-- ------------------------------------------------------------------ linear, embedding

--- nn.linear(inputs, outputs [, { bias = true, std = nil }]): y = x W^T + b, weight [outputs x inputs]. Uniform in
--- +-1/sqrt(inputs), or normal with `std` and zero bias.
local Linear = class("linear")
function Linear:init(inputs, outputs, options)
  want_size("linear", "inputs", inputs)
  want_size("linear", "outputs", outputs)
  options = read_options(options, "linear", "bias", "std")
  rawset(self, "inputs", inputs)
  rawset(self, "outputs", outputs)
  local bound = 1 / math.sqrt(inputs)
  local weight = parameter_tensor(outputs, inputs)
  if options.std then weight:normal(0, options.std) else weight:uniform(-bound, bound) end
  self:parameter("weight", weight, "linear")
  if options.bias ~= false then
    local bias = parameter_tensor(outputs)
    if not options.std then bias:uniform(-bound, bound) end
    self:parameter("bias", bias, "linear")
  end
end
function Linear:forward(x) return x:linear(self.weight, rawget(self, "bias"), rawget(self, "_fp8")) end
function Linear:extra() return ("%d -> %d%s"):format(self.inputs, self.outputs, rawget(self, "bias") and "" or ", no bias") end
M.linear = Linear

--- nn.embedding(count, width [, { std = 1 }]): rows of [count x width] by ids from 0.
local Embedding = class("embedding")
function Embedding:init(count, width, options)
  want_size("embedding", "the number of rows", count)
  want_size("embedding", "the width", width)
  options = read_options(options, "embedding", "std")
  rawset(self, "rows", count)
  rawset(self, "width", width)
  self:parameter("weight", parameter_tensor(count, width):normal(0, options.std or 1), "embedding")
end
function Embedding:forward(ids) return self.weight:embedding(ids) end
function Embedding:extra() return ("%d x %d"):format(self.rows, self.width) end
M.embedding = Embedding

-- ------------------------------------------------------------------ norms

--- nn.layer_norm(width [, { eps = 1e-5, bias = true }]). norm(x, branch) takes a residual: the norm of x + branch, and x + branch.
local LayerNorm = class("layer_norm")
function LayerNorm:init(width, options)
  want_size("layer_norm", "the width", width)
  options = read_options(options, "layer_norm", "eps", "bias")
  rawset(self, "eps", options.eps or 1e-5)
  self:parameter("weight", parameter_tensor(width):fill(1), "norm")
  if options.bias ~= false then self:parameter("bias", parameter_tensor(width), "norm") end
end
function LayerNorm:forward(x, branch)
  if branch then return x:add_layer_norm(branch, self.weight, rawget(self, "bias"), self.eps) end
  return x:layer_norm(self.weight, rawget(self, "bias"), self.eps)
end
function LayerNorm:extra() return ("%d"):format(self.weight.count) end
M.layer_norm = LayerNorm

--- nn.rms_norm(width [, { eps = 1e-6 }]); norm(x, branch) as that of nn.layer_norm.
local RMSNorm = class("rms_norm")
function RMSNorm:init(width, options)
  want_size("rms_norm", "the width", width)
  rawset(self, "eps", read_options(options, "rms_norm", "eps").eps or 1e-6)
  self:parameter("weight", parameter_tensor(width):fill(1), "norm")
end
function RMSNorm:forward(x, branch)
  if branch then return x:add_rms_norm(branch, self.weight, self.eps) end
  return x:rms_norm(self.weight, self.eps)
end
function RMSNorm:extra() return ("%d"):format(self.weight.count) end
M.rms_norm = RMSNorm

-- ------------------------------------------------------------------ without parameters

--- nn.dropout(p): active in training mode only.
local Dropout = class("dropout")
function Dropout:init(p)
  p = p or 0.5
  if type(p) ~= "number" or not (p >= 0 and p <= 1) then raise("nn.dropout: expected a probability in [0, 1], got %s", value_text(p)) end
  rawset(self, "p", p)
end
function Dropout:forward(x)
  if not self._training or self.p == 0 then return x end
  return x:dropout(self.p)
end
function Dropout:extra() return ("%g"):format(self.p) end
M.dropout = Dropout

for _, name in ipairs { "relu", "silu", "sigmoid", "tanh", "softplus", "softmax", "log_softmax", "log_sigmoid" } do
  local Activation = class(name)
  function Activation.forward(_, x) return x[name](x) end
  M[name] = Activation
end

--- nn.gelu() is the erf form, nn.gelu("tanh") the tanh form.
local GELU = class("gelu")
function GELU:init(form)
  if form ~= nil and form ~= "tanh" and form ~= "erf" then raise("nn.gelu: expected 'erf' or 'tanh', got %s", value_text(form)) end
  rawset(self, "form", form)
end
function GELU:forward(x) return x:gelu(self.form) end
M.gelu = GELU

-- ------------------------------------------------------------------ containers

--- nn.sequential{ a, b, c } or nn.sequential(a, b, c): one after the other.
local Sequential = class("sequential")
function Sequential:init(...)
  local list = module.is_module((...)) and { ... } or (...) or {}
  if type(list) ~= "table" then raise("nn.%s: expected modules, got %s", self._class, value_text(list)) end
  for i, child in ipairs(list) do
    if not module.is_module(child) then raise("nn.%s: expected entry %d to be a module, got %s", self._class, i, value_text(child)) end
    self[i] = child
  end
end
function Sequential:forward(x)
  for _, child in ipairs(self) do x = child(x) end
  return x
end
M.sequential = Sequential

--- nn.list{ a, b, c }: registered children to be called by hand.
local List = class("list")
List.init = Sequential.init
M.list = List

return M
