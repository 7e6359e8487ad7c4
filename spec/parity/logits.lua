-- logits.lua DIR IDS.safetensors OUT.safetensors: computes the logits [B x T x V] of a GPT-2 folder
-- for ids [B x T].
local engine = require "engine"
local dir, from, to = arg[1], arg[2], arg[3]
local model = engine.load_model(dir):eval()
engine.scope(function() engine.save(to, { logits = model(engine.load(from).ids) }) end)
