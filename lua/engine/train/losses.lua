-- Implements `engine.losses`, the losses of fine-tuning, for a trainer's `loss` or a loop written
-- by hand.
--   engine.trainer { loss = engine.losses.sft, ... }
--   loss = function(model, batch)
--     local loss, rewards = engine.losses.dpo(model, batch, { beta = 0.1 })
--     ...
--     return loss
--   end
-- A batch holds token ids x [R x T], the next tokens y [R x T] and perhaps `mask` [R x T]. A token
-- counts if its y is not -100 and its mask, if there is one, is not 0. The losses ignore other
-- tokens. Shapes: R rows of a batch, T tokens of a row, P pairs. Called by scripts.
local M_ffi = require "engine.base.ffi"
local autograd = require "engine.tensor.autograd"
local lora = require "engine.nn.lora"
local module = require "engine.nn.module"
local nearest = require "engine.base.nearest"
local tensor = require "engine.tensor.tensor"

local expect, raise, raise_if, value_text = M_ffi.expect, M_ffi.raise, M_ffi.raise_if,
  M_ffi.value_text

local M = {}

local IGNORED = -100                                 -- the target that cross_entropy leaves out

local function want_batch(batch, name)
  for _, key in ipairs { "x", "y" } do
    local value = type(batch) == "table" and batch[key]
    if not tensor.is_tensor(value) then
      raise("%s: expected a batch with tensors x and y, got %s", name, type(batch) ~= "table"
        and value_text(batch) or ("%s as %s, and the fields %s"):format(value_text(value), key,
        table.concat(nearest.keys(batch), " ")))
    end
  end
end

-- Returns the targets, with IGNORED for tokens that do not count.
local function targets_of(batch, name)
  local mask = batch.mask
  if mask == nil then return batch.y end
  if not tensor.is_tensor(mask) or mask.ndim ~= batch.y.ndim or mask.count ~= batch.y.count then
    raise("%s: expected batch.mask to have y's shape %s, got %s", name,
      tensor.shape_text(batch.y.shape),
      tensor.is_tensor(mask) and tensor.shape_text(mask.shape) or value_text(mask))
  end
  return mask:ne(0):where(batch.y, IGNORED)
end

local function smoothing_of(options, name)
  local smoothing = options.label_smoothing or 0
  expect(type(smoothing) == "number" and smoothing >= 0 and smoothing < 1, smoothing,
    "%s: expected label_smoothing in [0, 1)", name)
  return smoothing
end

--- engine.losses.sft(model, batch [, { label_smoothing = 0 }]): supervised fine-tuning. Returns the
--- mean cross entropy of the tokens that count (for example the tokens of answers), or 0 if none
--- counts.
function M.sft(model, batch, options)
  options = tensor.read_named(options, "losses.sft", "label_smoothing")
  want_batch(batch, "losses.sft")
  local targets = targets_of(batch, "losses.sft")
  local sum = tensor.cross_entropy(model(batch.x), targets,
    { reduction = "sum", label_smoothing = smoothing_of(options, "losses.sft") })
  return sum / targets:ne(IGNORED):to("f32"):sum():clamp(1)
end

-- Returns the log-probability [R] of each row: the sum over its tokens that count.
local function log_probability(model, x, targets)
  return -tensor.cross_entropy(model(x), targets, { reduction = "none" }):sum(-1)
end

-- Returns the log-probability of each row under the reference model, without a gradient or dropout.
-- Without a reference, uses the model itself with its adapters off.
local function reference_log_probability(model, reference, x, targets)
  local function of(m) return autograd.no_grad(m.evaluating, m, log_probability, m, x, targets) end
  if reference then return of(reference) end
  return lora.disabled(model, of, model)
end

--- engine.losses.dpo(model, batch [, { beta = 0.1, label_smoothing = 0, reference, reduction =
--- "mean" }]): direct preference optimization. The first half of the batch's 2P rows are the chosen
--- answers, and the second half are the rejected answers in the same order. p and p_ref are a row's
--- probabilities under the model and the reference model. The margin of a pair is h = beta * (log
--- p/p_ref of the chosen - log p/p_ref of the rejected). The loss of a pair is -(1 -
--- label_smoothing) log_sigmoid(h) - label_smoothing log_sigmoid(-h). reduction: "mean" or "sum"
--- over pairs. reference: a frozen model; without it, the model with its adapters off. The second
--- result is a table of tensors for logs, without gradients:
---   chosen, rejected   beta * log p/p_ref of the chosen and of the rejected rows (rewards) [P]
---   margin             h [P]
---   accuracy           the share of pairs with a margin above 0
---   log_ratio          log p/p_ref [2P]
function M.dpo(model, batch, options)
  options = tensor.read_named(options, "losses.dpo", "beta label_smoothing reference reduction")
  want_batch(batch, "losses.dpo")
  local beta, smoothing = options.beta or 0.1, smoothing_of(options, "losses.dpo")
  local reference, reduction = options.reference, options.reduction or "mean"
  expect(type(beta) == "number" and beta >= 0 and beta < math.huge, beta,
    "losses.dpo: expected beta to be a finite number >= 0")
  expect(reduction == "mean" or reduction == "sum", reduction,
    "losses.dpo: expected reduction 'mean' or 'sum'")
  raise_if(reference == model,
    "losses.dpo: expected reference to be a frozen copy of the model, got the model itself")
  expect(reference == nil or module.is_module(reference), reference,
    "losses.dpo: expected reference to be a module")
  local rows = batch.y:size(1)
  raise_if(rows % 2 ~= 0,
    "losses.dpo: expected an even number of rows, the chosen and then the rejected, got %d", rows)
  local targets, pairs_ = targets_of(batch, "losses.dpo"), rows / 2
  local own = log_probability(model, batch.x, targets)
  local gain = own - reference_log_probability(model, reference, batch.x, targets)    -- [2P]
  local h = (gain:slice(1, 1, pairs_) - gain:slice(1, pairs_ + 1, rows)) * beta       -- [P]
  local loss = -h:log_sigmoid()
  if smoothing > 0 then loss = loss * (1 - smoothing) - (-h):log_sigmoid() * smoothing end
  local margin, ratio = h:detach(), gain:detach()
  return loss[reduction](loss), { chosen = ratio:slice(1, 1, pairs_) * beta, margin = margin,
    rejected = ratio:slice(1, pairs_ + 1, rows) * beta, log_ratio = ratio,
    accuracy = margin:gt(0):to("f32"):mean() }
end

return M
