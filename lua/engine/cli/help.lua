-- engine help [command], engine --help
local nearest = require "engine.base.nearest"

-- The subcommands in the order of this help.
local commands = { "attach", "doctor", "export", "help", "plan", "plot", "policies", "replay", "report", "runs", "tune", "version" }

local text = [==[
usage: engine [options] [script.lua [name=value ...]]

Without a script it opens a REPL on a terminal, or runs what it reads from stdin.

  engine train.lua                      run a script
  engine train.lua lr=3e-4 steps=2^12   ... with some of its settings changed
  engine train.lua help                 ... list its settings
  engine -i train.lua                   ... and stay in the REPL with what it made
  engine -e 'print(1 + 1)'              run a line of Lua

options, as of the standalone Lua interpreter:
  -e code    run code                   -l name    require a module
  -i         stay in the REPL           -v         show the version
  -j cmd     JIT control, e.g. -j off   -O level   JIT optimisation
  -E         ignore LUA_INIT            -          run stdin
  --         end of options             --help     this text

commands:
%s

Ctrl-C ends a training run at its next step with a checkpoint, a second one at once.]==]

local function list()
  local lines = {}
  for i, name in ipairs(commands) do
    lines[i] = ("  engine %-10s %s"):format(name, require("engine.cli." .. name).doc)
  end
  return table.concat(lines, "\n")
end

local help = { doc = "this text, or the help of a command", commands = commands }

function help.main(name)
  if not name or name == "help" then
    print(text:format(list()))
    return 0
  end
  for _, command in ipairs(commands) do
    if command == name then
      local module = require("engine.cli." .. name)
      print(module.help or ("engine %s: %s"):format(name, module.doc))
      return 0
    end
  end
  io.stderr:write(("engine help: no command '%s'%s\n"):format(name, nearest.choices(name, commands, "commands")))
  return 1
end

return help
