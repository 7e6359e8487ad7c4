# Two ranks compared with two threads; then the comm dtypes; then messages without training.
exec ./engine spec/bench/ranks.lua
