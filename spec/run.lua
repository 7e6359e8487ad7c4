-- Runs busted in this process, for a folder made by `make dist`: ./engine spec/run.lua [options]
-- [FILE...]
require "busted.runner" { standalone = false }
