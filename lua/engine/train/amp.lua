-- Gives functions a precision of their own inside engine.autocast, with the interface of apex's
-- amp:
--   engine.amp.register_float_function(mylib, "energy")     runs in f32
--   engine.amp.register_half_function(mylib, "score")       runs in the scope's low format
--   engine.amp.register_promote_function(mylib, "blend")    casts floats to one format
-- A call replaces the function in its table. Outside of autocast, the function runs as before. The
-- precision recipe (precision.lua) defines the format of each built-in operation. Called by
-- scripts.
local M_ffi = require "engine.base.ffi"
local autograd = require "engine.tensor.autograd"
local tensor = require "engine.tensor.tensor"

local C, raise_if = M_ffi.C, M_ffi.raise_if

local M = {}

local FLOAT = { f16 = true, bf16 = true, f32 = true }   -- f64 and integers are not cast

-- Returns the low format of the current scope, "f16" or "bf16". Returns nil outside of autocast,
-- and inside autocast to another format.
local function low_format()
  local now = M_ffi.new("eng_precision")
  C.eng_autocast(nil, now)
  C.eng_autocast(now, nil)
  local format = M_ffi.dtype_name[now.compute]
  return (format == "f16" or format == "bf16") and format or nil
end

local function castable(x) return tensor.is_tensor(x) and FLOAT[x.dtype] end

-- Returns the arguments, with every castable tensor cast to `format`.
local function cast(format, ...)
  local list, n = { ... }, select("#", ...)
  for i = 1, n do
    local x = list[i]
    if castable(x) and x.dtype ~= format then list[i] = x:to(format) end
  end
  return unpack(list, 1, n)
end

-- Returns the common format of the castable tensors, or "f32" if they have several formats.
local function widest(...)
  local format
  for i = 1, select("#", ...) do
    local x = select(i, ...)
    local own = castable(x) and x.dtype
    if own and own ~= format then format = format and "f32" or own end
  end
  return format
end

-- By kind of registration: casts the arguments of f, a registered function, and calls f. low: the
-- low format of the scope.
local CALLS = {
  float = function(_, f, ...) return autograd.in_formats(nil, f, cast("f32", ...)) end,
  half = function(low, f, ...) return f(cast(low, ...)) end,
  promote = function(_, f, ...) return f(cast(widest(...), ...)) end,
}

--- engine.amp.NAME(place, name): replaces the function place[name]. Inside autocast to f16 or bf16,
--- the f16, bf16 and f32 arguments of the function are cast. f64 and integer arguments are not.
---   register_float_function     to f32; the function runs without autocast
---   register_half_function      to the low format of the scope
---   register_promote_function   to their common format if they have one, else to f32
for kind, call in pairs(CALLS) do
  M[("register_%s_function"):format(kind)] = function(place, name)
    local f = type(place) == "table" and place[name]
    raise_if(type(f) ~= "function", "amp.register_%s_function: expected a table and the name of " ..
      "a function in it, got %s and %s", kind, M_ffi.value_text(place), M_ffi.value_text(name))
    place[name] = function(...)
      local low = low_format()
      if not low then return f(...) end
      return call(low, f, ...)
    end
  end
end

return M
