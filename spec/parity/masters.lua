-- The engine's side of masters.py: AdamW on the weights in FOLDER/w with the gradients of FOLDER/g,
-- f32 numbers in rows of COUNT, one row for each step. For every precision writes the last weights,
-- in f32 and without compensation, to FOLDER/PRECISION.
--   engine masters.lua FOLDER COUNT STEPS LR
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local ffi, C, check = M_ffi.ffi, M_ffi.C, M_ffi.check

local folder, count, steps, lr = arg[1], tonumber(arg[2]), tonumber(arg[3]), tonumber(arg[4])
local function numbers(name)
  local text = assert(io.open(folder .. "/" .. name, "rb")):read "*a"
  local array = ffi.new("float[?]", #text / 4)
  ffi.copy(array, text, #text)
  return array
end
local first, gradients = numbers "w", numbers "g"

for _, precision in ipairs { "bf16", "bf16_stochastic", "bf16_kahan" } do
  local w = engine.zeros(count, { requires_grad = true, keep = true })
  check(C.eng_write(w, first, M_ffi.dtype.f32, count))
  local opt = engine.optim.adamw({ w }, { lr = lr, beta1 = 0.9, beta2 = 0.99, eps = 1e-6,
    weight_decay = 0.1, precision = { base = precision, moments = "bf16" } })
  for t = 0, steps - 1 do
    engine.begin_step()
    opt:zero_grad()
    w:to("f32"):sum():backward()                             -- makes room for the gradient
    check(C.eng_write(w.grad, gradients + t * count, M_ffi.dtype.f32, count))
    opt:step()
    engine.end_step()
  end
  local out = ffi.new("float[?]", count)
  check(C.eng_read(out, M_ffi.dtype.f32, count, w))
  local file = assert(io.open(folder .. "/" .. precision, "wb"))
  file:write(ffi.string(out, count * 4))
  file:close()
end
