-- Runs busted in this process: ./engine spec/run.lua [busted options] [FILE...]. Called by
-- `make test`; works in a folder made by `make dist`, too.

-- Room for the compiled code of all specs. LuaJIT's default is 1,000 traces, which a few files
-- exceed; then it drops all of them and compiles again.
require("jit.opt").start("maxtrace=60000", "maxmcode=65536", "sizemcode=512")
require "busted.runner" { standalone = false }    -- raises if a spec failed
os.exit(0)       -- the status of the jobs that specs run must not become this script's
