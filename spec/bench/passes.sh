# What the passes over all parameters cost, beside plain reading and copying of the same bytes.
exec ./engine spec/bench/passes.lua
