# Two ranks compared with two threads, comm dtypes, messages.
exec ./engine spec/bench/ranks.lua
