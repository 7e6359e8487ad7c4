-- Runs busted in this process: ./engine spec/run.lua [busted options] [FILE...]. Called by
-- `make test`; works in a folder made by `make dist`, too.
require "busted.runner" { standalone = false }    -- raises if a spec failed
os.exit(0)       -- the status of the jobs that specs run must not become this script's
