# Two ranks beside two threads, wire formats, messages.
exec ./engine spec/bench/ranks.lua
