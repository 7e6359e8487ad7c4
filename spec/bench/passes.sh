# The passes over all parameters, compared with reading and copying the same bytes.
exec ./engine spec/bench/passes.lua
