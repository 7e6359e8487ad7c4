# What the cache of keys and values gains in generation.
exec ./engine spec/bench/generate.lua
