-- Gives functions a precision of their own inside engine.autocast, with the interface of apex's
-- amp:
--   engine.amp.register_float_function(mylib, "energy")     runs in f32
--   engine.amp.register_half_function(mylib, "score")       runs in the scope's low format
--   engine.amp.register_promote_function(mylib, "blend")    casts floats to one format
-- A call replaces the function in its table. Outside of autocast, the function runs as before. The
-- precision recipe (precision.lua) defines the format of each built-in operation.
local M_ffi = require "engine.base.ffi"
local autograd = require "engine.tensor.autograd"
local tensor = require "engine.tensor.tensor"

local C, raise_if = M_ffi.C, M_ffi.raise_if

local M = {}

local FLOAT = { f16 = 1, bf16 = 1, f32 = 2 }   -- f64 and integers are not cast

-- Returns the precision of the current scope.
local function current()
  local now = M_ffi.new("eng_precision")
  C.eng_autocast(nil, now)
  C.eng_autocast(now, nil)
  return now
end

local function is_low(now)
  return now.compute == M_ffi.dtype.f16 or now.compute == M_ffi.dtype.bf16
end

-- Returns the arguments, with every tensor whose dtype is in FLOAT cast to `format`.
local function cast(format, n, ...)
  local list = { ... }
  for i = 1, n do
    local x = list[i]
    if tensor.is_tensor(x) and FLOAT[x.dtype] and x.dtype ~= format then list[i] = x:to(format) end
  end
  return unpack(list, 1, n)
end

-- Wraps f. Inside autocast to f16 or bf16, the wrapped f runs without autocast, with its f16 and
-- bf16 arguments cast to f32.
local function as_float(f)
  return function(...)
    local now, n = current(), select("#", ...)
    if not is_low(now) then return f(...) end
    return autograd.in_formats(nil, f, cast("f32", n, ...))
  end
end

local function as_half(f)
  return function(...)
    local now = current()
    if not is_low(now) then return f(...) end
    return f(cast(M_ffi.dtype_name[now.compute], select("#", ...), ...))
  end
end

local function as_widest(f)
  return function(...)
    local n, widest = select("#", ...), nil
    if not is_low(current()) then return f(...) end
    for i = 1, n do
      local x = select(i, ...)
      local format = tensor.is_tensor(x) and FLOAT[x.dtype] and x.dtype
      if format and format ~= widest then widest = widest and "f32" or format end
    end
    if widest then return f(cast(widest, n, ...)) end
    return f(...)
  end
end

--- engine.amp.NAME(place, name): replaces the function place[name]. Inside autocast to f16 or bf16,
--- the f16, bf16 and f32 arguments of the function are cast. f64 and integer arguments are not.
---   register_float_function     to f32; the function runs without autocast
---   register_half_function      to the low format of the scope
---   register_promote_function   to their common format if they have one, else to f32
for kind, wrap in pairs { float = as_float, half = as_half, promote = as_widest } do
  M[("register_%s_function"):format(kind)] = function(place, name)
    local f = type(place) == "table" and place[name]
    raise_if(type(f) ~= "function", "amp.register_%s_function: expected a table and the name of " ..
      "a function in it, got %s and %s", kind, M_ffi.value_text(place), M_ffi.value_text(name))
    place[name] = wrap(f)
  end
end

return M
