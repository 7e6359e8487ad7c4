-- fp8.lua FOLDER: the engine's side of fp8.py. Reads requests from standard input, one per line:
-- "cast NAME" casts x of NAME.in to both formats in both modes, "quantize NAME RULE FORMAT BLOCK
-- POW2" quantizes it. Results go to NAME.out, then it prints "done".
local engine = require "engine"
local folder = assert(arg[1], "usage: engine spec/parity/fp8.lua FOLDER")

for line in io.lines() do
  local words = {}
  for word in line:gmatch("%S+") do words[#words + 1] = word end
  local what, name = words[1], words[2]
  engine.begin_step()
  local x, out = engine.load(folder .. "/" .. name .. ".in").x, {}
  if what == "cast" then
    for _, format in ipairs { "e4m3", "e5m2" } do
      out[format] = x:to(format)
      out[format .. "_sat"] = x:to(format, { saturate = true })
    end
  else
    local y = engine.fp8.quantize(x, { rule = words[3], format = words[4], block = words[5],
      pow2 = words[6] == "pow2" })
    out.q, out.scale, out.back = y.q, y.scale, y:dequantize()
  end
  engine.save(folder .. "/" .. name .. ".out", out)
  engine.end_step()
  x:free()
  print("done")
  io.flush()
end
