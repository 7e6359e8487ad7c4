-- Prepares the core's reduction (core/dist/) for a reducer: checks and converts the options, forms
-- the units of ZeRO-3, and lets trainers of one parameter set share a reduction. Owns the table of
-- reductions. Called by reducer.lua, and by train/options.lua to check options; plan.lua and
-- `engine plan` predict with the same options.
local M_ffi = require "engine.base.ffi"
local ranks = require "engine.dist.ranks"

local C, check, fail_if, ffi = M_ffi.C, M_ffi.check, M_ffi.fail_if, M_ffi.ffi

local M = {}

local COMM_DTYPES = { own = 0, fp32 = 1, bf16 = 2, fp16 = 3, fp8 = 4 }
M.BUCKET = 2            -- MiB of gradients sent together, by default

--- Checks those of a trainer's options `o` that concern ranks. Returns the name of the first
--- invalid one, and what it must be; nil if all are valid.
function M.wrong(o)
  if o.comm_dtype ~= nil and not COMM_DTYPES[o.comm_dtype] then
    return "comm_dtype", "own, fp32, bf16, fp16 or fp8"
  end
  if o.bucket ~= nil and not (type(o.bucket) == "number" and o.bucket > 0 and o.bucket < 1024) then
    return "bucket", "a number of MiB above 0 and below 1024"
  end
  if o.zero ~= nil and o.zero ~= 0 and o.zero ~= 1 and o.zero ~= 2 and o.zero ~= 3 then
    return "zero", "0, 1, 2 or 3"
  end
  if o.rank_timeout ~= nil and not (type(o.rank_timeout) == "number" and o.rank_timeout > 0) then
    return "rank_timeout", "a positive number of seconds"
  end
end

--- Returns an array with the number of each parameter's unit, for the core's option `units`.
--- ZeRO-3 receives and drops the weights of a unit together. A unit is a block of the model, all
--- experts of a layer outside blocks, any other module that has parameters, or a single weight in
--- FP8.
function M.units(optimizer)
  local list, quantized = optimizer.list, {}
  local units, numbers, n = ffi.new("int32_t[?]", #list), {}, 0
  for _, site in ipairs(optimizer.fp8 and optimizer.fp8.list or {}) do
    quantized[tonumber(site.module.weight.slot)] = true
  end
  for i, p in ipairs(list) do
    -- All experts of a layer are one unit: each rank uses only some of the experts, but all ranks
    -- must receive the same units.
    local name = quantized[tonumber(p.tensor.slot)] and p.name
      or p.name:match("^(.*%f[^%z.]blocks%.%d+)%.") or p.name:match("^(.*%f[^%z.]experts)%.%d+%.")
      or p.name:match("^(.*)%.[^.]*$") or ""
    if not numbers[name] then numbers[name], n = n, n + 1 end
    units[i - 1] = numbers[name]
  end
  return units
end

--- Returns whether ZeRO must give each parameter to one rank as a whole. This is true for
--- optimizers that need whole parameters, and for ZeRO-3 in FP8, where one rank quantizes a weight
--- for all ranks.
function M.whole(optimizer, zero) return optimizer.whole or zero == 3 and optimizer.fp8 ~= nil end

--- Makes the core's options for a reduction from a trainer's options. o.whole: the result of
--- M.whole. o.units: the result of M.units. apart and holders: as in eng_parallel_options. The
--- caller must keep the arrays and the group alive.
function M.options(o, apart, holders)
  return ffi.new("eng_parallel_options", { bucket = math.floor((o.bucket or M.BUCKET) * 2 ^ 20),
    comm_dtype = COMM_DTYPES[o.comm_dtype or "own"], zero = o.zero or 0,
    whole = (o.zero or 0) > 0 and o.whole and 1 or 0, units = o.units,
    apart = apart, holders = holders })
end

-- parameter set -> the reduction that all trainers of the set share: { key = its options as text,
-- handle =, zero = whether it uses ZeRO }
local of_set = setmetatable({}, { __mode = "k" })

--- Returns the reduction of the optimizer's parameter set with these options. A set has only one
--- reduction: an earlier one with other options is freed or, if it uses ZeRO, raises an error. If
--- another trainer of the set used the freed reduction, that trainer's next step makes a new one.
function M.of(optimizer, options)
  local params = optimizer.params
  local key = ("%d %d %d %d %s %s"):format(tonumber(options.bucket), options.comm_dtype,
    options.zero, options.whole, tostring(options.holders), tostring(optimizer._accumulates))
  local had = of_set[params]
  if had and had.key == key then return had.handle end
  fail_if(had and had.zero,
    "a trainer with ZeRO has divided this optimizer's state among the ranks, so a trainer with " ..
    "other options cannot use it; hint: give all trainers of this optimizer the same bucket, " ..
    "comm_dtype, zero and accumulate")
  of_set[params] = nil
  if had then C.eng_parallel_free(ffi.gc(had.handle, nil)) end
  local out = ffi.new("eng_parallel *[1]")
  check(C.eng_parallel_new(out, params, ranks.world(), options))
  local handle = ffi.gc(out[0], C.eng_parallel_free)
  of_set[params] = { key = key, handle = handle, zero = options.zero > 0 }
  return handle
end

return M
