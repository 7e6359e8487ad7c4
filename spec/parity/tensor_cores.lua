-- tensor_cores.lua FOLDER FORMAT-A FORMAT-B [RULE]: the engine's side of tensor_cores.py.
-- Multiplies a [M x K] and b [N x K] of FOLDER/in and writes y [M x N] to FOLDER/out. With a RULE
-- (a number of ENG_MX_*; the formats are numbers of dtypes), a and b are codes with scales,
-- multiplied as engine.mx.matmul does. Without one (the formats are names), they are numbers, which
-- are quantized to FP8 and multiplied with Hopper's accumulator.
local engine = require "engine"
local fp8, run = engine.fp8, require("engine.base.ffi").run
local folder, fa, fb, rule = arg[1], arg[2], arg[3], tonumber(arg[4])

engine.begin_step()
local t = engine.load(folder .. "/in")
local y
if rule then
  y = run("mx_matmul", { t.a, t.a_scale, t.b, t.b_scale, false, false },
    { tonumber(fa), tonumber(fb), rule, rule })
else
  y = fp8.matmul(fp8.quantize(t.a, { format = fa }), fp8.quantize(t.b, { format = fb }),
    { transpose_b = true, accumulator = "hopper", promotion = 0 })
end
engine.save(folder .. "/out", { y = y })
engine.end_step()
