std = "luajit"
max_line_length = 100
-- `self` and arguments that a fixed signature asks for may stay unused.
unused_args = false
self = false
globals = { "arg" }
-- `not (x > y)` is no `x <= y` when NaN may come.
ignore = { "581" }
exclude_files = { "build", "runs" }

files["spec"] = { std = "+busted" }
-- Policies run in a sandbox: no io, os, require or ffi.
files["policies"] = {
  std = { read_globals = { "math", "table", "string", "bit", "assert", "error", "ipairs", "next",
                           "pairs", "pcall", "select", "tonumber", "tostring", "type", "unpack",
                           "check", "back_off", "grow", "rescale" } },
}
