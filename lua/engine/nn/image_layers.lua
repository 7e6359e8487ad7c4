-- Layers for images [N x C x H x W] and sequences [N x C x L]: convolution, batch and group norm,
-- pooling. Initial values, options and names of parameters are PyTorch's. Called by scripts and
-- image_models.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local module = require "engine.nn.module"
local tensor = require "engine.tensor.tensor"

local expect, raise_if, want_whole = M_ffi.expect, M_ffi.raise_if, arguments.want_whole
local class, new_parameter = module.class, module.new_parameter
local M = {}

local function ones(x) x:fill(1) end

-- ------------------------------------------------------------------ convolution

-- Makes the class of nn.conv1d (dimensions = 1) or of nn.conv2d (dimensions = 2).
local function convolution(name, dimensions)
  local Conv, title = class(name), "nn." .. name
  function Conv:init(inputs, outputs, kernel, options)
    want_whole(inputs, title, "inputs", 1)
    want_whole(outputs, title, "outputs", 1)
    options = tensor.read_named(options, title, "stride padding dilation groups bias std")
    local groups, shape = options.groups or 1, { outputs }
    want_whole(groups, title, "groups", 1)
    raise_if(inputs % groups ~= 0 or outputs % groups ~= 0, "%s: expected groups to divide %d " ..
      "inputs and %d outputs, got %d", title, inputs, outputs, groups)
    shape[2] = inputs / groups
    local sizes = type(kernel) == "table" and kernel
    raise_if(sizes and #sizes ~= dimensions,
      "%s: expected the kernel to be a number or a list of length %d, got a table of length %d",
      title, dimensions, sizes and #sizes)
    for d = 1, dimensions do
      shape[2 + d] = want_whole(sizes and sizes[d] or kernel, title, "the kernel", 1)
    end
    self.options = { stride = options.stride, padding = options.padding,
      dilation = options.dilation, groups = groups }
    module.add_linear(self, shape, options)
  end
  function Conv:forward(x) return x[name](x, self.weight, rawget(self, "bias"), self.options) end
  function Conv:extra()
    local shape = self.weight.shape
    return ("%d -> %d, kernel %s%s"):format(shape[2] * self.options.groups, shape[1],
      table.concat(shape, " x ", 3), rawget(self, "bias") and "" or ", no bias")
  end
  return Conv
end

--- nn.conv2d(inputs, outputs, kernel [, { stride = 1, padding = 0, dilation = 1, groups = 1, bias =
--- true, std = nil }]): x [N x C x H x W] -> [N x O x P x Q], weight [O x C/groups x KH x KW].
--- kernel, stride, padding and dilation are numbers or { height, width }. Initial values: uniform
--- within +-1/sqrt(C/groups * KH * KW); with `std`, the weight is normal and the bias 0.
M.conv2d = convolution("conv2d", 2)
--- nn.conv1d(inputs, outputs, kernel [, options]): x [N x C x L] -> [N x O x P]; otherwise like
--- nn.conv2d.
M.conv1d = convolution("conv1d", 1)

-- ------------------------------------------------------------------ norms

--- nn.batch_norm(channels [, { eps = 1e-5, momentum = 0.1, affine = true }]): x [N x C x ..] -> the
--- same shape. In training mode it normalizes by the batch's mean and variance, and moves its
--- buffers running_mean and running_var towards them by `momentum`; in evaluation mode it
--- normalizes by the buffers. Checkpoints hold the buffers. With several ranks, each rank
--- normalizes by its own part of the batch unless nn.sync_batch_norm is called.
local BatchNorm = class("batch_norm")
function BatchNorm:init(channels, options)
  want_whole(channels, "nn.batch_norm", "channels", 1)
  options = tensor.read_named(options, "nn.batch_norm", "eps momentum affine")
  self.eps = module.want_eps(options, "nn.batch_norm", 1e-5)
  self.momentum = arguments.want_number(options.momentum or 0.1, "nn.batch_norm", "momentum")
  if module.want_flag(options, "affine", "nn.batch_norm", true) then
    self:parameter("weight", new_parameter({ channels }, ones), "norm")
    self:parameter("bias", new_parameter { channels }, "norm")
  end
  self:buffer("running_mean", new_parameter { channels })
  self:buffer("running_var", new_parameter({ channels }, ones))
  self:buffer("num_batches_tracked", new_parameter {})
end

-- Moves the buffers towards the statistics of a batch with n elements in each channel. running_var
-- follows the variance with the divisor n - 1, as in PyTorch.
local function follow(self, mean, variance, n)
  raise_if(n < 2,
    "nn.batch_norm: expected more than one number for each channel in training mode, got %g; " ..
    "hint: a larger batch, or model:eval()", n)
  local m = self.momentum
  self.running_mean:copy(self.running_mean * (1 - m) + mean * m)
  self.running_var:copy(self.running_var * (1 - m) + variance * (m * n / (n - 1)))
  self.num_batches_tracked:copy(self.num_batches_tracked + 1)
end

-- Normalizes x by the given mean and variance. Without them, normalizes x by the mean and variance
-- of the batch, and also returns these two and the number of elements of a channel.
local function normalized(self, x, mean, variance)
  return x:batch_norm(rawget(self, "weight"), rawget(self, "bias"),
    { eps = self.eps, mean = mean, variance = variance, over = rawget(self, "over") })
end

function BatchNorm:forward(x)
  if not self._training then return normalized(self, x, self.running_mean, self.running_var) end
  local y, mean, variance, n = normalized(self, x)
  follow(self, mean, variance, n)
  return y
end
function BatchNorm:extra() return ("%d"):format(self.running_mean.count) end
M.batch_norm = BatchNorm

--- nn.sync_batch_norm(model, group): in training, every batch norm of the model normalizes by the
--- mean and variance over all ranks of `group` (engine.ranks.group()), as in a run with the whole
--- batch on one rank. Every rank must run the same layers. Returns the model. In PyTorch this
--- function is SyncBatchNorm.convert_sync_batchnorm.
function M.sync_batch_norm(model, group)
  expect(module.is_module(model), model, "nn.sync_batch_norm: expected a module")
  expect(arguments.is_group(group), group,
    "nn.sync_batch_norm: expected a group of ranks, engine.ranks.group()")
  model:apply(function(m)
    if m._class == "batch_norm" then rawset(m, "over", group.size > 1 and group or nil) end
  end)
  return model
end

--- nn.group_norm(groups, channels [, { eps = 1e-5, affine = true }]): x [N x C x ..] -> the same
--- shape; normalizes each group of adjacent channels of each sample.
local GroupNorm = class("group_norm")
function GroupNorm:init(groups, channels, options)
  want_whole(groups, "nn.group_norm", "groups", 1)
  want_whole(channels, "nn.group_norm", "channels", 1)
  raise_if(channels % groups ~= 0, "nn.group_norm: expected groups to divide %d channels, got %d",
    channels, groups)
  options = tensor.read_named(options, "nn.group_norm", "eps affine")
  self.groups, self.channels = groups, channels
  self.eps = module.want_eps(options, "nn.group_norm", 1e-5)
  if not module.want_flag(options, "affine", "nn.group_norm", true) then return end
  self:parameter("weight", new_parameter({ channels }, ones), "norm")
  self:parameter("bias", new_parameter { channels }, "norm")
end
function GroupNorm:forward(x)
  return x:group_norm(self.groups, rawget(self, "weight"), rawget(self, "bias"), self.eps)
end
function GroupNorm:extra() return ("%d in %d groups"):format(self.channels, self.groups) end
M.group_norm = GroupNorm

-- ------------------------------------------------------------------ pooling

--- nn.max_pool2d(kernel [, options]), nn.avg_pool1d(3) ...: a module that applies the tensor method
--- of the same name with these arguments. nn.adaptive_avg_pool2d(1) is the mean of each channel.
for _, name in ipairs { "max_pool2d", "max_pool1d", "avg_pool2d", "avg_pool1d",
  "adaptive_avg_pool2d", "adaptive_avg_pool1d" } do
  local Pool = class(name)
  function Pool:init(size, options)
    if type(size) ~= "table" then want_whole(size, "nn." .. name, "the size", 1) end
    expect(options == nil or type(options) == "table", options,
      "nn.%s: expected a table of options", name)
    self.size, self.options = size, options
  end
  function Pool:forward(x) return x[name](x, self.size, self.options) end
  function Pool:extra()
    return type(self.size) == "table" and table.concat(self.size, " x ") or ("%d"):format(self.size)
  end
  M[name] = Pool
end

return M
