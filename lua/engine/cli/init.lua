-- Subcommands of the binary: `engine NAME ...` where no file NAME exists. Each is a module
-- engine.cli.NAME giving { doc = "one line", main = function(...) return exit code end }.
-- To add one, write the module and name it here.
local nearest = require "engine.base.nearest"

local commands = { "attach", "doctor", "export", "help", "plan", "plot", "replay", "report", "runs", "tune", "version" }

local cli = { commands = commands }

-- Called by main.c.
function cli.run(name, ...)
  for _, command in ipairs(commands) do
    if command == name and (... == "--help" or ... == "-h") then return require("engine.cli.help").main(name) or 0 end
    if command == name then return require("engine.cli." .. name).main(...) or 0 end
  end
  local hint = nearest.hint(name, commands)
  io.stderr:write(("engine: no script and no command '%s'%s: %s\n"):format(
    name, hint ~= "" and hint .. " The commands are" or "; the commands are", table.concat(commands, ", ")))
  return 1
end

return setmetatable(cli, { __call = function(_, ...) return cli.run(...) end })
