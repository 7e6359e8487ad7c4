-- Convolution, pooling, batch norm and group norm of images x [N x C x H x W] and sequences
-- x [N x C x L]. Adds these methods to tensors; loaded by engine/init.lua. Called by scripts and
-- nn/.
--
-- The kernels take and return tensors with the channels last (core/ops.def). The methods view x
-- that way, and their results are views [N x C x ..] of channels-last memory. Elementwise
-- operations keep this layout, so a chain of these methods copies only its first input.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local batch_norm_over = require "engine.tensor.batch_norm_over"
local tensor = require "engine.tensor.tensor"

local expect, raise, run, value_text = M_ffi.expect, M_ffi.raise, M_ffi.run, M_ffi.value_text
local want, want_whole, read_named = arguments.want, arguments.want_whole, arguments.read_named
local methods = tensor.methods

-- channels_last views x [N x C x ..] as [N x .. x C]; channels_second views it back. least, most:
-- the numbers of dimensions that x may have (most nil: no limit).
local function channels_last(x, name, least, most)
  want(x, name)
  local n = x.ndim
  if n < least or n > (most or n) then
    raise("%s: expected %s, got %s", name, least == 4 and "images [N x C x H x W]"
      or least == 3 and "sequences [N x C x L]" or "[N x C x ..]", tensor.shape_text(x.shape))
  end
  local order = { 1 }
  for d = 2, n - 1 do order[d] = d + 1 end
  order[n] = 2
  return n == 2 and x or x:permute(order)
end
local function channels_second(x)
  local order = { 1, x.ndim }
  for d = 3, x.ndim do order[d] = d - 1 end
  return x.ndim == 2 and x or x:permute(order)
end

-- Appends an option's values for height and width to `ints`. v: one number for both, or
-- { height, width }.
local function append_pair(ints, v, name, what, least)
  local list = type(v) == "table" and v or { v, v }
  if #list ~= 2 then
    raise("%s: expected %s to be a number or a list of two numbers, got %s", name, what,
      type(v) == "table" and ("a table of length %d"):format(#v) or value_text(v))
  end
  for d = 1, 2 do ints[#ints + 1] = want_whole(list[d], name, what, least) end
  return ints
end

-- Runs f, which takes images, on sequences [N x C x L], viewed as images of height 1. The caller's
-- options give the values for the width; HEIGHT has the values for the height.
local HEIGHT = { stride = 1, padding = 0, dilation = 1 }
local function as_images(x, options, name, f)
  want(x, name)
  if x.ndim ~= 3 then
    raise("%s: expected sequences [N x C x L], got %s", name, tensor.shape_text(x.shape))
  end
  local flat = {}
  for key, value in pairs(options or {}) do
    flat[key] = HEIGHT[key] and { HEIGHT[key], value } or value
  end
  return f(x:unsqueeze(3), flat):squeeze(3)
end

-- ------------------------------------------------------------------ convolution

local CONV = { stride = true, padding = true, dilation = true, groups = true }

local function conv2d(x, weight, bias, options, name)
  options = read_named(options, name, CONV)
  want(weight, name)
  local ints = append_pair({}, options.stride or 1, name, "stride", 1)
  append_pair(ints, options.padding or 0, name, "padding", 0)
  append_pair(ints, options.dilation or 1, name, "dilation", 1)
  ints[7] = want_whole(options.groups or 1, name, "groups", 1)
  return channels_second(run("conv2d", { channels_last(x, name, 4, 4), weight, bias or false },
    ints))
end

--- Convolution (cross-correlation, as in PyTorch) of images: x [N x C x H x W], weight [O x
--- C/groups x KH x KW], bias [O] or nil -> [N x O x P x Q]. Options: stride (1), padding (0),
--- dilation (1), each a number or { height, width }, and groups (1).
function methods.conv2d(x, weight, bias, options)
  return conv2d(x, weight, bias, options, "conv2d")
end

--- Convolution of sequences: x [N x C x L], weight [O x C/groups x K], bias [O] or nil -> [N x O x
--- P]. The options are those of conv2d, each a single number.
function methods.conv1d(x, weight, bias, options)
  want(weight, "conv1d")
  return as_images(x, read_named(options, "conv1d", CONV), "conv1d", function(image, o)
    return conv2d(image, weight:unsqueeze(-2), bias, o, "conv1d")
  end)
end

-- ------------------------------------------------------------------ pooling

local POOL = { max_pool = "stride padding", avg_pool = "stride padding count_include_pad" }

-- name: the method, such as "max_pool2d". Its first 8 characters are a key of POOL.
local function pool2d(x, kernel, options, name)
  local kind = name:sub(1, 8)
  options = read_named(options, name, POOL[kind])
  local ints = append_pair({}, kernel, name, "the kernel", 1)
  append_pair(ints, options.stride or kernel, name, "stride", 1)
  append_pair(ints, options.padding or 0, name, "padding", 0)
  if kind == "avg_pool" then ints[7] = options.count_include_pad == false and 0 or 1 end
  local images = channels_last(x, name, 4, 4)
  return channels_second((run(kind .. "2d", { images }, ints, {}, kind == "max_pool" and 2 or 1)))
end
local function pool1d(x, kernel, options, name)
  options = read_named(options, name, POOL[name:sub(1, 8)])
  local filled = { stride = options.stride or kernel, padding = options.padding,
    count_include_pad = options.count_include_pad }
  return as_images(x, filled, name, function(image, o)
    return pool2d(image, { 1, kernel }, o, name)
  end)
end

--- The largest element of each window of x [N x C x H x W] -> [N x C x P x Q]; a NaN counts as
--- largest. kernel: a number or { height, width }. Options: stride (by default the kernel's size),
--- padding (0; at most half the kernel; padded positions are ignored).
function methods.max_pool2d(x, kernel, options) return pool2d(x, kernel, options, "max_pool2d") end
--- max_pool2d of sequences: x [N x C x L] -> [N x C x P].
function methods.max_pool1d(x, kernel, options) return pool1d(x, kernel, options, "max_pool1d") end
--- The mean of each window; arguments as in max_pool2d, and the option count_include_pad (true: the
--- mean includes padding as zeros).
function methods.avg_pool2d(x, kernel, options) return pool2d(x, kernel, options, "avg_pool2d") end
--- avg_pool2d of sequences: x [N x C x L] -> [N x C x P].
function methods.avg_pool1d(x, kernel, options) return pool1d(x, kernel, options, "avg_pool1d") end

--- Divides each image of x [N x C x H x W] into windows, and takes the mean of each window -> [N x
--- C x P x Q]. size: { P, Q }, or one number for both. With size 1, the result is the mean of each
--- channel.
function methods.adaptive_avg_pool2d(x, size)
  local ints = append_pair({ 0, 0, 1, 1, 0, 0, 0 }, size, "adaptive_avg_pool2d", "the size", 1)
  return channels_second(run("avg_pool2d", { channels_last(x, "adaptive_avg_pool2d", 4, 4) }, ints))
end
--- adaptive_avg_pool2d of sequences: x [N x C x L] -> [N x C x size].
function methods.adaptive_avg_pool1d(x, size)
  return as_images(x, nil, "adaptive_avg_pool1d", function(image)
    return methods.adaptive_avg_pool2d(image, { 1, size })
  end)
end

-- ------------------------------------------------------------------ norms

local BATCH_NORM = "eps mean variance over"

--- Batch norm of x [N x C x ..]: each channel minus its mean, divided by sqrt(variance + eps),
--- times weight [C], plus bias [C] (either may be nil). Returns the result, the batch's mean and
--- biased variance [C] (f64 if x is f64, else f32; nan for a batch without elements), and the
--- number of elements of a channel. Options:
---   eps              by default 1e-5
---   mean, variance   [C]: x is normalized by these instead, and only the result is returned
---   over             a group of ranks, engine.ranks.group(), each with a part of the batch: all
---                    ranks normalize by the mean and variance of the whole batch, and return this
---                    mean and variance
function methods.batch_norm(x, weight, bias, options)
  options = read_named(options, "batch_norm", BATCH_NORM)
  local eps = arguments.want_number(options.eps or 1e-5, "batch_norm", "eps")
  local last, over = channels_last(x, "batch_norm", 2), options.over
  if over then
    expect(arguments.is_group(over), over,
      "batch_norm: expected the option 'over' to be a group of ranks, engine.ranks.group()")
  end
  if over and not options.mean and not options.variance then
    local y, mean, variance, n = batch_norm_over.batch_norm(over, last, weight, bias, eps)
    return channels_second(y), mean, variance, n
  end
  local y, mean, variance = run("batch_norm", { last, weight or false, bias or false,
    options.mean or false, options.variance or false }, {}, { eps }, 3)
  if options.mean then return channels_second(y) end
  return channels_second(y), mean, variance, x.count / mean.count
end

--- Group norm of x [N x C x ..]: in each sample, every group of C / groups adjacent channels is
--- normalized by its mean and variance; weight and bias [C] or nil; eps is by default 1e-5.
function methods.group_norm(x, groups, weight, bias, eps)
  return channels_second((run("group_norm", { channels_last(x, "group_norm", 2), weight or false,
    bias or false }, { want_whole(groups, "group_norm", "groups", 1) },
    { arguments.want_number(eps or 1e-5, "group_norm", "eps") }, 3)))
end
