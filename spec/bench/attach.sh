# What attached clients cost a run at full speed.
exec ./engine spec/bench/attach.lua
