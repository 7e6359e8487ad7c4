-- Runs the subcommands of the binary: `engine NAME ...` where no file NAME exists. A subcommand is
-- a module engine.cli.NAME that returns { doc = "one line", help = text, main = function(...)
-- return exit_code end }; options.lua makes most of these tables. --help anywhere on the command
-- line prints the help. To add a subcommand, write the module and add its name in help.lua. Called
-- by main.c.
local files = require "engine.base.file"
local help = require "engine.cli.help"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local cli = {}

local function run(_, name, ...)
  for _, command in ipairs(help.commands) do
    if command == name then
      for _, word in ipairs { ... } do
        if word == "--help" or word == "-h" then return help.main(name) end
      end
      return require("engine.cli." .. name).main(...)
    end
  end
  io.stderr:write(("engine: there is no script and no command '%s'%s\n"):format(
    show.cut(show.shown(name), 100),
    nearest.choices(name, help.commands, "commands", "engine help")))
  return 1
end

--- Takes the path of a script that does not exist. Returns a hint that suggests the script with the
--- most similar name in the path's folder or in examples/; "" if no name is near.
function cli.script_hint(path)
  local folder, script = path:match("^(.-)([^/]*)$")
  local paths = {}                        -- name without .lua -> path in quotes
  for _, dir in ipairs { "examples/", folder } do
    for _, name in ipairs(files.names(dir == "" and "." or dir) or {}) do
      local stem = name:match("^(.*)%.lua$")
      if stem then paths[stem] = "'" .. dir .. name .. "'" end
    end
  end
  return (nearest.hint(script:gsub("%.lua$", ""), paths):gsub("'(.*)'", paths))
end

return setmetatable(cli, { __call = run })
