-- blackwell.lua FOLDER FORMAT-A FORMAT-B RULE: the engine's side of blackwell.py. Multiplies the
-- codes a [M x K] and b [N x K] of FOLDER/in by their scales, as engine.mx.matmul does, and writes
-- y [M x N] to FOLDER/out.
local engine = require "engine"
local run = require("engine.base.ffi").run

engine.begin_step()
local t = engine.load(arg[1] .. "/in")
local attributes = { tonumber(arg[2]), tonumber(arg[3]), tonumber(arg[4]) }
engine.save(arg[1] .. "/out", { y = run("mx_matmul", { t.a, t.a_scale, t.b, t.b_scale, false,
  false }, attributes) })
engine.end_step()
