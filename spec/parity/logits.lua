-- logits.lua DIR IDS.safetensors OUT.safetensors: what a GPT-2 folder answers to ids [B x T], as logits [B x T x V].
local engine = require "engine"
local dir, from, to = arg[1], arg[2], arg[3]
local model = engine.nn.gpt2.load(dir):eval()
engine.scope(function() engine.save(to, { logits = model(engine.load(from).ids) }) end)
