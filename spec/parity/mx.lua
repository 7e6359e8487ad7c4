-- mx.lua FOLDER: the engine's side of mx.py. Reads requests from standard input, one per line:
-- "encode FORMAT MODE" encodes the f32 numbers in FOLDER/a.in and writes their codes (i32) to
-- FOLDER/a.out; "decode FORMAT" decodes codes (i32) in a.in and writes the values (f64) to a.out.
-- "quantize FORMAT RULE BLOCK NONFINITE [SR_BITS FACTOR]" quantizes x of FOLDER/x.in (safetensors)
-- and its transpose to FOLDER/x.out. "msamp_fp4 CLAMP DROPS" runs the operation msamp_fp4 on x.
-- Prints "done" after each request.
local engine = require "engine"
local ffi = require "ffi"
local folder = assert(arg[1], "usage: engine spec/parity/mx.lua FOLDER")
local M_ffi = require "engine.base.ffi"
local C = M_ffi.C

local function read()
  local file = assert(io.open(folder .. "/a.in", "rb"))
  local bytes = file:read("*a")
  file:close()
  return bytes
end

local function write(pointer, bytes)
  local file = assert(io.open(folder .. "/a.out", "wb"))
  file:write(ffi.string(pointer, bytes))
  file:close()
end

local function encode(format, mode)
  local bytes = read()
  local x, n = ffi.cast("const float *", bytes), #bytes / 4
  local codes = ffi.new("int32_t[?]", n)
  for i = 0, n - 1 do codes[i] = tonumber(C.eng_small_encode(format, x[i], mode)) end
  write(codes, 4 * n)
end

local function decode(format)
  local bytes = read()
  local codes, n = ffi.cast("const int32_t *", bytes), #bytes / 4
  local values = ffi.new("double[?]", n)
  for i = 0, n - 1 do values[i] = engine.fp8.decode(codes[i], format) end
  write(values, 8 * n)
end

local function quantize(format, rule, block, nonfinite, sr_bits, factor)
  engine.begin_step()
  local x = engine.load(folder .. "/x.in").x
  local y = engine.mx.quantize(x, { format = format, rule = rule, block = block,
    nonfinite = nonfinite, transposed = true, sr_bits = tonumber(sr_bits),
    factor = tonumber(factor) })
  local t = y.transposed
  engine.save(folder .. "/x.out", { q = y.q, scale = y.scale, amax = y.amax, nan = y.nan,
    back = y:dequantize(), q_t = t.q, scale_t = t.scale, layout = engine.mx.gemm_scales(y) })
  engine.end_step()
  x:free()
end

local function msamp_fp4(clamp, drops)
  engine.begin_step()
  local x = engine.load(folder .. "/x.in").x
  local y, scale, amax, gate = M_ffi.run("msamp_fp4", { x }, { 1, tonumber(drops) },
    { tonumber(clamp) }, 4)
  engine.save(folder .. "/x.out", { y = y, scale = scale, amax = amax, gate = gate })
  engine.end_step()
  x:free()
end

for line in io.lines() do
  local words = {}
  for word in line:gmatch("%S+") do words[#words + 1] = word end
  if words[1] == "encode" then
    encode(words[2], tonumber(words[3]))
  elseif words[1] == "decode" then
    decode(words[2])
  elseif words[1] == "msamp_fp4" then
    msamp_fp4(words[2], words[3])
  else
    quantize(unpack(words, 2))
  end
  print("done")
  io.flush()
end
