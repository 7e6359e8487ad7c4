-- The Lua API: `local engine = require "engine"`. Tensors and steps load with it. The larger parts
-- (nn, optim, trainer, data ...) load at first use. Used by scripts, docs/ and cli/.
local M_ffi = require "engine.base.ffi"
local tensor = require "engine.tensor.tensor"
local autograd = require "engine.tensor.autograd"
require "engine.tensor.stats"
require "engine.tensor.images"
local nearest = require "engine.base.nearest"

local C, check, expect = M_ffi.C, M_ffi.check, M_ffi.expect

-- Adds the methods `plot`, `heatmap` and `tensor` to histories (engine.run.history).
-- report/views.lua implements these methods. Both modules load at their first use.
local HISTORY = "engine.run.history"
local function add_pictures(history)
  local methods = history.methods
  local function view(picture, h, ...)
    expect(type(h) == "table" and h.why == methods.why, h,
      "history:%s: expected a history before the colon (h:%s, not h.%s)", picture, picture, picture)
    return require("engine.report.views")[picture](h, ...)
  end

  --- Draws curves: h:plot("loss"), h:plot { "loss", "scale" }, h:plot("amax", { log = true }).
  --- `engine help plot` lists the names of curves. Options: log (the base of a logarithmic axis,
  --- such as 2; true: the usual base of this curve, or 10; false: a linear axis), from, to (steps),
  --- points, width, height, ascii, marks (true: marks overflows and events below every curve, not
  --- only below the last; false: marks nothing); svg, png: names of files to draw into instead;
  --- title: the title in such a file.
  function methods:plot(names, options) return view("plot", self, names, options) end

  --- Draws how each layer's gradients are spread over the exponents. { by = "time" } draws instead
  --- how each layer's largest gradient changes from step to step. Options: only (a text; draws a
  --- row for each tensor whose name contains it), tensors (true: draws a row for each tensor),
  --- from, to (steps), width.
  function methods:heatmap(options) return view("heatmap", self, options) end

  --- Returns the recorded statistics of a parameter's gradients. print() draws a curve of the
  --- largest stored value and, below it, the last histogram. Options: points (the largest number of
  --- steps, by default 200), from, to (steps), width.
  function methods:tensor(name, options) return view("tensor", self, name, options) end

  return history
end
if package.loaded[HISTORY] then add_pictures(package.loaded[HISTORY])
else
  package.preload[HISTORY] = function()
    return add_pictures(assert(loadfile(assert(package.searchpath(HISTORY, package.path))))())
  end
end

-- Version 0.1 had all modules in one folder. A name of then still works if one of FOLDERS has a
-- module of this name: `require "engine.history"` loads engine.run.history and prints a warning
-- once.
local FOLDERS = { "base", "tensor", "policy", "dist", "run", "train", "report", "cli" }
table.insert(package.loaders, function(name)
  local module = name:match("^engine%.([%w_]+)$")
  for _, folder in ipairs(module and FOLDERS or {}) do
    local moved = ("engine.%s.%s"):format(folder, module)
    if package.searchpath(moved, package.path) then
      io.stderr:write(("engine: module '%s' is now '%s'\n"):format(name, moved))
      return function() return require(moved) end
    end
  end
end)

local engine = { version = M_ffi.version }

-- With several ranks, only rank 0 prints.
if require("engine.dist.ranks").rank() > 0 then _G.print = function() end end

for _, name in ipairs { "tensor", "zeros", "ones", "full", "rand", "randn", "randint", "arange",
  "from_memory", "concat", "stack", "attention", "cross_entropy", "mse", "is_tensor", "matmul",
  "linear", "mlp_gelu", "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "swiglu",
  "where", "maximum", "minimum", "dropout", "gelu", "relu", "silu", "softmax", "log_softmax", "exp",
  "log", "tanh", "sigmoid", "log_sigmoid" } do
  engine[name] = tensor[name] or tensor.methods[name]
end
engine.no_grad, engine.scope, engine.custom = autograd.no_grad, autograd.scope, autograd.custom

-- ------------------------------------------------------------------ steps

--- Opens a step. Tensors made inside it live until end_step().
function engine.begin_step() check(C.eng_step_begin()) end

--- Ends the step: its tensors become stale and their memory is reused.
function engine.end_step() check(C.eng_step_end()) end

-- True after engine.steps opened a step, until it ends the step. If break or an error leaves the
-- loop, the step stays open until the next loop or engine.end_step ends it.
local loop_is_open = false

--- for step in engine.steps(100) do ... end: each iteration is one step, counted from 1. A signal
--- such as Ctrl-C ends the loop.
function engine.steps(n)
  expect(type(n) == "number", n, "steps: expected a number of steps")
  local turn = 0
  return function()
    if loop_is_open then check(C.eng_step_end()) end
    loop_is_open = false
    if turn >= n or C.eng_interrupted() > 0 then return nil end
    turn = turn + 1
    check(C.eng_step_begin())
    loop_is_open = true
    return turn
  end
end

--- The index of the current step, counted from 0.
function engine.step_count() return tonumber(C.eng_step_count()) end

-- ------------------------------------------------------------------ machine

--- Seeds the random number generator. The same seed gives the same numbers on every device.
function engine.seed(seed)
  expect(type(seed) == "number" and seed % 1 == 0 and seed >= 0 and seed <= 2 ^ 53, seed,
    "seed: expected a whole number from 0 to 2^53")
  C.eng_seed(seed)
end

--- Sets the number of threads (nil or 0: no change); returns the number in use.
function engine.threads(n)
  local most = tonumber(C.ENG_THREADS_MAX)
  expect(n == nil or type(n) == "number" and n % 1 == 0 and n >= 0 and n <= most, n,
    "threads: expected a whole number from 0 to %d (0: no change)", most)
  return C.eng_threads(n or 0)
end

--- Chooses the device by name (nil: no change); returns the name of the current device.
function engine.device(name)
  expect(name == nil or type(name) == "string", name, "device: expected a name, such as 'cuda'")
  if name then check(C.eng_device_set(name)) end
  return M_ffi.string(C.eng_device_name())
end

--- Waits until the device has finished all work, and raises the errors of that work. Only code that
--- measures time needs this call.
function engine.synchronize() check(C.eng_synchronize()) end

local MIB, MEMORY = 2 ^ 20, { limit = true }
local memory_meta = {
  __tostring = function(rows)
    local lines = { ("%-16s %12s %12s %12s %8s"):format("memory", "used MiB", "peak MiB",
      "reserved MiB", "requests") }
    for _, row in ipairs(rows) do
      lines[#lines + 1] = ("%-16s %12.1f %12.1f %12.1f %8d"):format(row.name, row.used / MIB,
        row.peak / MIB, row.reserved / MIB, row.allocations)
    end
    return table.concat(lines, "\n")
  end,
}

--- Returns how much memory each purpose uses, as a list of { name, used, peak, reserved,
--- allocations }. `used` bytes are in use now, `peak` is the largest `used` so far, and `reserved`
--- bytes are taken from the system, in `allocations` requests. The names are also keys of the list.
--- memory{ limit = bytes } limits the memory of all purposes together (0: no limit); on a card and
--- on the host separately.
function engine.memory(options)
  local limit = tensor.read_named(options, "memory", MEMORY).limit
  if limit ~= nil then
    expect(type(limit) == "number" and limit >= 0, limit,
      "memory: expected limit to be a number of bytes >= 0 (0: no limit)")
    C.eng_memory_limit(math.min(limit, 2 ^ 62))
  end
  local rows = M_ffi.new("eng_memory_row[16]")
  local list = {}
  for i = 0, C.eng_memory(rows, 16) - 1 do
    local row = { name = M_ffi.string(rows[i].name), used = tonumber(rows[i].used),
      peak = tonumber(rows[i].peak),
      reserved = tonumber(rows[i].reserved), allocations = tonumber(rows[i].allocations) }
    list[#list + 1], list[row.name] = row, row
  end
  return setmetatable(list, memory_meta)
end

-- ------------------------------------------------------------------ parts that load on demand

-- Field of `engine` -> the module that provides it, without "engine.", and the field's name in that
-- module (if there is none, the module itself becomes the field).
local parts = {
  load = "tensor.safetensors load", save = "tensor.safetensors save", bits = "tensor.bits of",
  gradcheck = "tensor.gradcheck check", profile = "tensor.profile run", fp8 = "tensor.fp8",
  mx = "tensor.mx", nf4 = "tensor.nf4",
  nn = "nn", lora = "nn.lora", load_model = "nn.hf_load load", new_model = "nn.hf_load new",
  data = "data", tokenizer = "data.tokenizer open",
  optim = "train.optim", losses = "train.losses", schedule = "train.schedule", amp = "train.amp",
  precision = "train.precision", autocast = "train.precision autocast",
  trainer = "train.assemble new", session = "train.session new", deepspeed = "train.deepspeed",
  contest = "train.script_contest new", scaler = "train.scaler new",
  register_loss_scaler = "policy.policy register",
  policy = "policy.policy", signal = "policy.signals publish", config = "base.config",
  ranks = "dist.ranks", checkpoint = "run.checkpoint", history = "run.history",
  progress = "run.progress", replay = "run.replay", tune = "run.tune", plot = "report.plot",
}

return setmetatable(engine, {
  parts = parts,                 -- for docs/functions.lua
  __index = function(t, key)
    local part = parts[key]
    if not part then
      local names = nearest.keys(parts)
      for name in pairs(t) do names[#names + 1] = name end
      error(("engine has no '%s'%s"):format(tostring(key),
        nearest.hint(tostring(key), names, true)), 2)
    end
    if key == "config" then require "engine.policy.policy" end    -- adds the range `policy`
    local name, field = part:match("^(%S+) ?(%S*)$")
    local module = require("engine." .. name)
    t[key] = field ~= "" and module[field] or module
    return t[key]
  end,
})
