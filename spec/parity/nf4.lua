-- nf4.lua FOLDER BLOCK: the engine's side of nf4.py. Quantizes x of FOLDER/in (safetensors) with
-- the offset given there and with the engine's own, and writes every part and the dequantized
-- numbers to FOLDER/out.
local engine = require "engine"
local folder, block = assert(arg[1]), tonumber(arg[2])

engine.begin_step()
local given = engine.load(folder .. "/in")
local x = given.x
local q = engine.nf4.quantize(x, { block = block, offset = given.offset })
local plain = engine.nf4.quantize(x, { block = block, double = false })
local own = engine.nf4.quantize(x, { block = block })
local out = { q = q.q, absmax = plain.absmax, code = q.absmax, group = q.group,
  ["own code"] = own.absmax, ["own offset"] = own.offset }
for name, dtype in pairs { float32 = "f32", bfloat16 = "bf16", float16 = "f16" } do
  out[name], out[name .. " plain"] = q:dequantize(dtype), plain:dequantize(dtype)
end
engine.save(folder .. "/out", out)
engine.end_step()
