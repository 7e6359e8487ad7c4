-- Runs busted in this process: ./engine spec/run.lua [busted options] [FILE...]. Called by
-- `make test`; works in a folder made by `make dist`, too.
require "busted.runner" { standalone = false }    -- raises if a spec failed
os.exit(0)       -- runs of specs that end badly, as they should, are not this script's status
