# What a policy decision costs.
exec ./engine spec/bench/policy.lua
