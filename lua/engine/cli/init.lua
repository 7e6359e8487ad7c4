-- Runs the subcommands of the binary: `engine NAME ...` where no file NAME exists. A subcommand is
-- a module engine.cli.NAME that returns { doc = "one line", help = text, main = function(...)
-- return exit_code end }; options.lua makes most of these tables. --help anywhere on the command
-- line prints the help. To add a subcommand, write the module and add its name in help.lua. Called
-- by main.c.
local help = require "engine.cli.help"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local cli = {}

local function run(_, name, ...)
  for _, command in ipairs(help.commands) do
    if command == name then
      local module = require("engine.cli." .. name)
      for _, word in ipairs { ... } do
        if word == "--help" or word == "-h" then return print(module.help) end
      end
      return module.main(...)
    end
  end
  io.stderr:write(("engine: there is no script and no command '%s'%s\n"):format(
    show.cut(show.shown(name), 100),
    nearest.choices(name, help.commands, "commands", "engine help")))
  return 1
end

cli.script_hint = require("engine.cli.options").script_hint     -- for main.c

return setmetatable(cli, { __call = run })
