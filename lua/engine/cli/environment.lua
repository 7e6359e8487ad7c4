-- Warns on stderr about each environment variable ENGINE_* that the engine does not know, and about
-- values that docs/environment.md, which lists the variables, does not allow. Called by main.c with
-- the names of the variables that are set.
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local source = require "engine.docs.source"

-- The values of these variables are not checked here but where they are read, because some valid
-- values depend on the machine.
local CHECKED = { ENGINE_ISA = true, ENGINE_NCCL = true, ENGINE_RANKS = true, ENGINE_PAIRS = true }

-- Returns the values that a table cell such as "**`0`**, `1`" lists; nil if the cell also allows
-- values that it does not list.
local function choices_of(cell)
  local values, rest = {}, cell:gsub("%*%*", ""):gsub(";.*$", "")
  rest = rest:gsub("`([^`]*)`", function(value) values[#values + 1] = value return "" end)
  return #values > 0 and not rest:find("[^%s,]") and values or nil
end

return function(...)
  local known, choices = {}, {}
  for _, row in ipairs(source.table_rows("docs/environment.md", "# Environment variables")) do
    for name in row[1]:gmatch("`(ENGINE_[%w_]+)`") do
      known[name], choices[name] = true, not CHECKED[name] and choices_of(row[2]) or nil
    end
  end
  if not next(known) then return end       -- the documentation is not installed
  local function report(format, ...) io.stderr:write("engine: ", format:format(...), "\n") end
  for _, name in ipairs { ... } do
    local value, wanted = os.getenv(name), choices[name]
    if not known[name] then
      report("unknown environment variable %s is ignored%s", show.shown(name),
        nearest.hint(name, known))
    elseif wanted and value ~= "" and not (" " .. table.concat(wanted, " ") .. " "):find(
      " " .. value .. " ", 1, true) then
      report("%s: expected %s, got '%s', which is ignored", name, table.concat(wanted, " or "),
        show.cut(show.shown(value), 40))
    end
  end
end
