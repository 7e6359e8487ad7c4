-- Learning-rate schedules are pure functions of the number of applied updates (from 0). Calling a
-- schedule returns the rate; engine.plot draws s:values(n), the rates of n updates.
--   local s = engine.schedule.cosine{ lr = 3e-4, warmup = 100, total = 2000, floor = 3e-5 }
--   s(0), s(2000)
-- Called by scripts, the trainer and report/lab.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local nearest = require "engine.base.nearest"

local expect = M_ffi.expect

local M = {}

local Schedule = {}
Schedule.__index = Schedule
function Schedule:__call(updates) return self.rate(updates) end
function Schedule:__tostring() return self.text end
--- Returns the rates of the first n updates, as a list.
function Schedule:values(n)
  local list = {}
  for i = 1, n do list[i] = self.rate(i - 1) end
  return list
end

-- Defines M[name]. In the first o.warmup updates, the rate of update u (from 0) rises linearly: it
-- is o.lr * (u + 1) / o.warmup, so that the first update already moves the weights. From then on
-- the rate is after(u, o).
local function define(name, defaults, after)
  M[name] = function(options)
    options = options or {}
    if type(options) == "number" then options = { lr = options } end
    expect(type(options) == "table", options,
      "schedule.%s: expected a table of options or a rate", name)
    arguments.read_named(options, "schedule." .. name, defaults)
    for key, value in pairs(options) do
      local least = key == "every" and 1 or 0
      expect(type(value) == "number" and value >= least and value < math.huge, value,
        "schedule.%s: expected %s to be a finite number >= %d", name, key, least)
    end
    local o = arguments.merged(defaults, options)
    expect(not o.total or o.warmup <= o.total, o.warmup,
      "schedule.%s: expected warmup to be at most total, which is %g", name, o.total)
    local parts = {}
    for key, value in pairs(o) do parts[#parts + 1] = ("%s=%g"):format(key, value) end
    table.sort(parts)
    local function rate(u)
      if u < o.warmup then return o.lr * (u + 1) / o.warmup end
      return after(u, o)
    end
    return setmetatable({ name = name, options = o, rate = rate,
      text = ("schedule.%s{ %s }"):format(name, table.concat(parts, ", ")) }, Schedule)
  end
end

local function progress(u, o)
  if u >= o.total then return 1 end
  return math.max(0, (u - o.warmup) / (o.total - o.warmup))
end

--- The rate is lr after the warm-up.
define("constant", { lr = 1e-3, warmup = 0 }, function(_, o) return o.lr end)

--- The rate falls linearly from lr and reaches floor at update `total`.
define("linear", { lr = 1e-3, warmup = 0, total = 1000, floor = 0 }, function(u, o)
  return o.lr + (o.floor - o.lr) * progress(u, o)
end)

--- The rate falls as half a cosine from lr and reaches floor at update `total` (Loshchilov and
--- Hutter 2017, without restarts).
define("cosine", { lr = 1e-3, warmup = 0, total = 1000, floor = 0 }, function(u, o)
  return o.floor + (o.lr - o.floor) * 0.5 * (1 + math.cos(math.pi * progress(u, o)))
end)

--- The rate is lr * gamma ^ floor(u / every), where u counts updates since the warm-up.
define("step", { lr = 1e-3, warmup = 0, every = 1000, gamma = 0.1 }, function(u, o)
  return o.lr * o.gamma ^ math.floor((u - o.warmup) / o.every)
end)

--- The rate is lr * gamma ^ u, where u counts updates since the warm-up.
define("exponential", { lr = 1e-3, warmup = 0, gamma = 0.999 }, function(u, o)
  return o.lr * o.gamma ^ (u - o.warmup)
end)

--- The rate is lr * sqrt(warmup / u), where u counts updates from 1 and lr is the peak: "Attention
--- is all you need" (Vaswani et al. 2017).
define("inverse_sqrt", { lr = 1e-3, warmup = 100 }, function(u, o)
  return o.lr * math.sqrt(math.max(1, o.warmup) / math.max(1, u + 1))
end)

--- Warm-up, stable, decay: the rate is lr until `decay` updates before `total`, and then falls
--- linearly to floor (Hu et al. 2024, MiniCPM).
define("wsd", { lr = 1e-3, warmup = 0, total = 1000, decay = 200, floor = 0 }, function(u, o)
  local left = o.total - u
  if left >= o.decay then return o.lr end
  return o.floor + (o.lr - o.floor) * math.max(0, left / o.decay)
end)

return nearest.guard(M, "engine.schedule")
