-- Reductions, products, norms, attention and losses of tensors. Called through tensor.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local calls = require "engine.tensor.calls"

local C, expect, raise_if, call = M_ffi.C, M_ffi.expect, M_ffi.raise_if, M_ffi.call
local ints, floats = call.ints, call.floats
local info, dimension, read_named = arguments.info, arguments.dimension, arguments.read_named
local want, want_number, want_whole = arguments.want, arguments.want_number, arguments.want_whole
local methods, functions, run1, run2, run_many = calls.methods, calls.functions, calls.run1,
  calls.run2, calls.run_many

-- ------------------------------------------------------------------ reductions

for _, name in ipairs { "sum", "mean", "max", "min" } do
  -- x:sum([d [, keepdim]]): d is a dimension or a list of dimensions; by default all dimensions.
  methods[name] = function(x, d, keepdim)
    want(x, name)
    local mask = 0
    if d == nil then mask = 2 ^ info(x).ndim - 1
    else
      if type(d) == "table" then arguments.want_list(d, name, "the dimensions", "{ 1, 2 }") end
      for _, k in ipairs(type(d) == "table" and d or { d }) do
        mask = bit.bor(mask, bit.lshift(1, (dimension(x, k, name))))
      end
    end
    ints[0], ints[1] = mask, calls.keep_of(keepdim, name,
      "; hint: write several dimensions as a list, as in x:sum { 1, 2 }")
    return run1(name, x)
  end
end

--- The Euclidean norm of all elements, in f64 for an f64 tensor and in f32 for others.
function methods.norm(x, p)
  want(x, "norm")
  expect(p == nil or p == 2, p, "norm: expected no argument or 2, for the Euclidean norm")
  local wide = methods.to(x, info(x).dtype == M_ffi.dtype.f64 and "f64" or "f32")
  return methods.sum(wide * x):sqrt()
end

-- ------------------------------------------------------------------ products, norms, losses

--- a:matmul(b [, transpose_a, transpose_b]): a [.. x M x K], b [.. x K x N] -> [.. x M x N]. With
--- transpose_a or transpose_b = true, first swaps the last two dimensions of a or b. If a is a
--- vector, it is one row; if b is a vector, it is one column.
function methods.matmul(a, b, transpose_a, transpose_b)
  want(a, "matmul")
  want(b, "matmul")
  local na, nb = info(a).ndim, info(b).ndim
  if na == 1 then
    local y = methods.matmul(methods.unsqueeze(a, 1), b, false, transpose_b)
    return methods.squeeze(y, nb == 1 and -1 or -2)
  elseif nb == 1 then
    return methods.squeeze(methods.matmul(a, methods.unsqueeze(b, 2), transpose_a), -1)
  end
  ints[0], ints[1], ints[2], ints[3] = transpose_a and 1 or 0, transpose_b and 1 or 0, 0, 0
  return run2("matmul", a, b)
end

--- x W^T + bias: x [.. x K], weight W [N x K], bias [N] or nil -> [.. x N]; site: the FP8 site of a
--- layer (train/fp8_sites.lua), or nil.
function methods.linear(x, weight, bias, site)
  if not site then return run_many("linear", 1, 2, x, weight, bias) end
  call.fp8_linear.site = site
  return (run_many("fp8_linear", 1, 2, x, weight, bias))
end

--- (silu(gate) * up) W^T + bias: gate and up [.. x K], weight W [N x K], bias [N] or nil -> [.. x
--- N]. The result is that of gate:swiglu(up, site) followed by linear at the same FP8 site, but
--- where the site's recipe allows it (core/ops.def), only the FP8 codes of silu(gate) * up are
--- stored. With nil for the site, nothing is in FP8.
function methods.swiglu_linear(gate, up, weight, bias, site)
  call.fp8_swiglu_linear.site = site or 0
  return run_many("fp8_swiglu_linear", 1, 3, gate, up, weight, bias)
end

--- gelu(x W1^T + b1, "tanh") W2^T + b2: x [.. x C], up (W1) [H x C], down (W2) [N x H], biases [H]
--- and [N], or nil -> [.. x N]. The result is that of linear, gelu and linear, computed in fewer
--- passes over memory.
function methods.mlp_gelu(x, up, up_bias, down, down_bias)
  want(down, "mlp_gelu")
  return (run_many("mlp_gelu", 3, 2, x, up, up_bias, down, down_bias))
end

--- Layer norm over the last dimension: x [.. x C], weight and bias [C] or nil; eps is by default
--- 1e-5.
function methods.layer_norm(x, weight, bias, eps)
  floats[0] = want_number(eps or 1e-5, "layer_norm", "eps")
  return (run_many("layer_norm", 3, 1, x, weight, bias))
end

--- RMS norm over the last dimension: x [.. x C], weight [C] or nil; eps is by default 1e-6.
function methods.rms_norm(x, weight, eps)
  floats[0] = want_number(eps or 1e-6, "rms_norm", "eps")
  return (run_many("rms_norm", 2, 1, x, weight))
end

--- Returns (x + branch):layer_norm(weight, bias, eps), and x + branch, computed in one pass over
--- memory. The bits are those of the separate operations. x and branch must have the same shape.
function methods.add_layer_norm(x, branch, weight, bias, eps)
  floats[0] = want_number(eps or 1e-5, "add_layer_norm", "eps")
  local y, sum = run_many("add_layer_norm", 4, 2, x, branch, weight, bias)
  return y, sum
end

--- Returns (x + branch):rms_norm(weight, eps), and x + branch, computed in one pass over memory.
--- The bits are those of the separate operations. x and branch must have the same shape.
function methods.add_rms_norm(x, branch, weight, eps)
  floats[0] = want_number(eps or 1e-6, "add_rms_norm", "eps")
  local y, sum = run_many("add_rms_norm", 3, 2, x, branch, weight)
  return y, sum
end

local ATTENTION = "causal scale entropy logit_max site"

--- softmax(scale q k^T) v: q [B x T x H x D], k and v [B x S x G x D] -> [B x T x H x D]; H is a
--- multiple of G. Options:
---   causal      true: a query attends to no later key
---   scale       by default 1 / sqrt(D)
---   entropy     true: also returns the entropy of each row's weights in nats, [B x H x T]
---   logit_max   true: also returns each row's largest scaled score, [B x H x T]; only on the CPU,
---               and not together with entropy
---   site        the FP8 site of the layer that reads the result
function functions.attention(q, k, v, options)
  options = read_named(options, "attention", ATTENTION)
  local a, name = call.fp8_attention, options.site and "fp8_attention" or "attention"
  raise_if(options.entropy and options.logit_max,
    "attention: expected entropy or logit_max, got both")
  a.causal = options.causal and 1 or 0
  a.entropy = options.entropy and C.ENG_ROW_ENTROPY or options.logit_max and C.ENG_ROW_LOGIT_MAX
    or 0
  local scale = want_number(options.scale or 0, "attention", "scale")
  expect(scale - scale == 0, scale, "attention: expected scale to be finite")
  a.site, a.scale = options.site or 0, scale
  local y, _, row = run_many(name, 3, 3, q, k, v)
  if options.entropy or options.logit_max then return y, row end
  return y
end

local ROPE = "position base interleaved factor low high context"

--- Rotary position embedding of x [B x T x H x D]. Options:
---   position             the position of the first token; by default 0
---   base                 by default 10000
---   interleaved          true: pairs adjacent features, instead of feature d with d + D / 2
---   factor               divides the frequencies (linear scaling)
---   low, high, context   limit this division to some of the frequencies, see below
--- With context, low and high, the scaling is that of Llama 3: frequencies that make at most `low`
--- turns within `context` positions are divided, and frequencies that make `high` turns or more are
--- not. With low and high but without context, the scaling is that of YaRN: frequencies with an
--- index (from 0) of `high` or more are divided, and frequencies with an index of at most `low` are
--- not. Frequencies in between are interpolated.
function methods.rope(x, options)
  options = read_named(options, "rope", ROPE)
  floats[0] = want_number(options.base or 10000, "rope", "base")
  floats[1], floats[2], floats[3] = want_number(options.factor or 0, "rope", "factor"),
    want_number(options.low or 0, "rope", "low"), want_number(options.high or 0, "rope", "high")
  ints[0], ints[1], ints[2], ints[3] = want_whole(options.position or 0, "rope", "position", 0),
    options.interleaved and 1 or 0, 0, want_whole(options.context or 0, "rope", "context", 0)
  return run1("rope", x)
end

local REDUCTION = { none = 0, mean = 1, sum = 2 }

local CROSS_ENTROPY = "label_smoothing ignore_index reduction z_loss soft_cap"

--- Cross entropy of logits [.. x V] and targets [..], class ids from 0. Options:
---   label_smoothing   by default 0
---   ignore_index      targets with this value do not count; by default -100
---   reduction         "mean" (the default), "sum" or "none"
---   soft_cap          a number c > 0: logits become c * tanh(logits / c); by default 0, no cap
---   z_loss            adds z_loss * logsumexp^2 to each target's loss; by default 0
function functions.cross_entropy(logits, targets, options)
  options = read_named(options, "cross_entropy", CROSS_ENTROPY)
  local reduction = REDUCTION[options.reduction or "mean"]
  expect(reduction, options.reduction, "cross_entropy: expected reduction mean, sum or none")
  ints[0], ints[1] = want_whole(options.ignore_index or -100, "cross_entropy", "ignore_index"),
    reduction
  for i, name in ipairs { "label_smoothing", "z_loss", "soft_cap" } do
    floats[i - 1] = want_number(options[name] or 0, "cross_entropy", name)
  end
  return (run_many("cross_entropy", 2, 2, logits, targets))
end

--- The mean of (a - b)^2 for two tensors of one shape.
function functions.mse(a, b) return run2("mse", a, b) end
