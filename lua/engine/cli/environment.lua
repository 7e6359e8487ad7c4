-- Reports variables of the environment that begin with ENGINE_ and mean nothing, on stderr. The
-- list of variables is docs/environment.md. Called by main.c with the names that are set.
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local source = require "engine.docs.source"

return function(...)
  local known = {}
  for _, row in ipairs(source.table_rows("docs/environment.md", "# Environment variables")) do
    for name in row[1]:gmatch("`(ENGINE_[%w_]+)`") do known[name] = true end
  end
  if not next(known) then return end       -- installed without its documentation
  for _, name in ipairs { ... } do
    if not known[name] then
      io.stderr:write(("engine: unknown environment variable %s is ignored%s\n"):format(
        show.shown(name), nearest.hint(name, known)))
    end
  end
end
