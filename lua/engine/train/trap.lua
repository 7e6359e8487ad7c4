-- The trap finds out why a step overflowed. It runs the step's forward and backward pass again
-- (same batch, random numbers and scale) and checks the result of every operation
-- (core/autograd/trap.c). It names the first operation that made an inf and the first that made a
-- nan, with module, shapes and magnitudes. It costs the time of a few steps.
-- Called by overflow.lua at every overflow (with trap = "overflow") or when a run is stuck.
local M_ffi = require "engine.base.ffi"
local module = require "engine.nn.module"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local Finding = {}
Finding.__index = Finding

local function read_tensor(t)
  local name = ffi.string(t.name)
  return { name = name ~= "" and name or nil, text = ffi.string(t.text), count = tonumber(t.count),
    inf = tonumber(t.inf), nan = tonumber(t.nan), amax = t.amax }
end

local function read_site(nan, backward, paths)
  local site = ffi.new("eng_trap_site")
  if not C.eng_trap_found(site, nan, backward) then return nil end
  local list = { kernel = ffi.string(site.kernel), op = ffi.string(site.op),
    kind = nan and "nan" or "inf", backward = backward, module = paths[site.module] or "",
    held_by = site.held_by > 0 and site.held_by or nil, inputs = {}, outputs = {} }
  for k = 1, site.n_in do list.inputs[k] = read_tensor(site["in"][k - 1]) end
  for k = 1, site.n_out do list.outputs[k] = read_tensor(site.out[k - 1]) end
  return list
end

-- Numbers the modules and, from now on, reports the running module to the core. Returns the paths
-- of the modules by number.
local function follow(model)
  local paths, number_of = {}, {}
  local function number(m, path)
    if not number_of[m] then
      paths[#paths + 1] = path
      number_of[m] = #paths
    end
    return number_of[m]
  end
  if model.apply then
    model:apply(function(m, path) number(m, path ~= "" and path or m._class) end)
  end
  local now = 0
  module.watch(function(m)
    local around = now
    now = number(m, m._class)
    C.eng_trap_module(now)
    return around
  end, function(around)
    now = around
    C.eng_trap_module(now)
  end)
  return paths
end

--- Runs f (a forward and backward pass) with the trap set. Returns a finding, or nil and a message.
function M.watch(model, f)
  local paths = follow(model)
  C.eng_trap(true)
  local good, message = pcall(f)
  C.eng_trap(false)
  module.watch(nil)
  if not good then return nil, tostring(message):match("^[^\n]*") end
  local finding = setmetatable({}, Finding)
  for _, kind in ipairs { "inf", "nan" } do
    local nan = kind == "nan"
    local forward, backward = read_site(nan, false, paths), read_site(nan, true, paths)
    -- an inf of the forward pass may be intended (a mask of -inf), so both passes are reported
    if forward or backward then finding[kind] = { forward = forward, backward = backward } end
  end
  return finding
end

-- Returns text such as "blocks.3.mlp.up.weight f16 [512 x 128] amax 0.31". The amax is over the
-- finite elements.
local function tensor_text(t)
  if t.text == "" then return nil end
  local text = (t.name and t.name .. " " or "") .. t.text
  if t.count == 0 then return text end
  local more = {}
  if t.inf + t.nan < t.count then more[1] = ("amax %.4g"):format(t.amax) end
  if t.inf > 0 then more[#more + 1] = (t.inf == t.count and "all" or t.inf) .. " inf" end
  if t.nan > 0 then more[#more + 1] = (t.nan == t.count and "all" or t.nan) .. " nan" end
  return text .. " " .. table.concat(more, ", ")
end

-- The inputs that a batch norm over several ranks gets from an exchange between the ranks, by
-- kernel and number of the input (from 1).
local EXCHANGED = { batch_norm = { [4] = "the mean", [5] = "the variance" },
  batch_norm_grad = { [6] = "the sums over all ranks" } }

-- Describes `t`, an input that no operation made. s: the site (see site_text).
local function given_text(s, t)
  if t.name then return "parameter " .. t.name end
  local what = EXCHANGED[s.kernel] and EXCHANGED[s.kernel][s.held_by]
  if what then
    return ("%s (from another rank's part of the batch%s)"):format(what,
      s.backward and "" or ", or from running statistics")
  end
  return ("its input %d, which no operation made (%s)"):format(s.held_by, s.backward
    and "probably the loss scale" or "data, a mask or a constant")
end

--- Returns in words where an inf or nan began, or entered from outside. s: a site of a finding,
--- which is the operation with its module, inputs and outputs (read_site). If the inf or nan
--- entered from outside, s.held_by is the number (from 1) of the input that held it; otherwise nil.
function M.site_text(s)
  local where = s.module ~= "" and "in " .. s.module or "outside of every module"
  local what = s.backward and (s.kernel == s.op and "backward of " ..
    s.op or ("backward of %s (%s)"):format(s.op, s.kernel)) or s.op
  local inputs, outputs = {}, {}
  for _, t in ipairs(s.inputs) do inputs[#inputs + 1] = tensor_text(t) end
  for _, t in ipairs(s.outputs) do
    if t.inf + t.nan > 0 then outputs[#outputs + 1] = tensor_text(t) end
  end
  local from = table.concat(inputs, "; ")
  if s.held_by then
    return ("%s entered %s, %s, through %s: %s"):format(s.kind, what, where,
      given_text(s, s.inputs[s.held_by]), from)
  end
  return ("first %s in %s, %s: %s, from %s"):format(s.kind, what, where,
    table.concat(outputs, "; "), from)
end

--- Returns a line for each kind (inf, nan) and pass (forward, backward) with a finding. If both
--- passes have one, leaves out an inf or nan that only entered the backward pass from outside.
function Finding:lines()
  local lines = {}
  for _, kind in ipairs { "inf", "nan" } do
    local found = self[kind] or {}
    if found.forward then lines[#lines + 1] = M.site_text(found.forward) end
    if found.backward and not (found.forward and found.backward.held_by) then
      lines[#lines + 1] = M.site_text(found.backward)
    end
  end
  return lines
end

function Finding:__tostring()
  local lines = self:lines()
  if #lines == 0 then
    return "the step was run again without an inf or a nan, so its computation is not deterministic"
  end
  return table.concat(lines, "\n")
end

--- Returns where the inf and the nan began, without magnitudes. Findings with the same cause have
--- the same place.
function Finding:place()
  local parts = {}
  for _, kind in ipairs { "inf", "nan" } do
    local site = self[kind] and (self[kind].forward or self[kind].backward)
    parts[#parts + 1] = site and ("%s %s %s %s"):format(kind, site.module, site.op, site.kernel)
      or nil
  end
  return table.concat(parts, "; ")
end

--- Returns the finding as plain data, for the history.
function Finding:data() return { inf = self.inf, nan = self.nan } end

return M
