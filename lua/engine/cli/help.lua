-- Runs `engine help [NAME]`, `engine help --html FOLDER`, `engine help --types FILE` and
-- `engine --help`. Called by init.lua and repl.lua.
local options = require "engine.cli.options"
local texts = require "engine.base.show"

-- The subcommands, in the order in which the help lists them.
local names = { "attach", "contest", "data", "doctor", "export", "generate", "help", "plan", "plot",
  "policies", "replay", "report", "runs", "tune", "version", "watch" }

local text = [==[
usage: engine [options] [script.lua [name=value ...]]

Without a script, engine opens a REPL on a terminal, or runs the program on stdin.

  engine train.lua                      run a script
  engine train.lua lr=3e-4 steps=2^12   ... with some of its settings changed
  engine train.lua help                 ... list its settings
  engine -i train.lua                   ... and open the REPL after it, with its globals
  engine -e 'print(1 + 1)'              run a line of Lua

options, as in the standalone Lua interpreter:
  -e code    run code                   -l name    require a module
  -i         open the REPL afterwards   -v         show the version
  -j cmd     JIT control, e.g. -j off   -O level   JIT optimisation
  -E         ignore LUA_INIT            -          run stdin
  --         end of options             --help     this text

commands:
%s

Help on anything: a command, a function, an operation, a policy, a field, an environment variable, a
guide:
  engine help replay   engine help matmul   engine help eng_backward   engine help dynamic
  engine help trainer.clip   engine help record.amax   engine help ENGINE_RANKS
  engine help getting-started   engine help docs

Ctrl-C ends a training run at its next step, a stored run with a checkpoint; a second Ctrl-C ends it
at once.]==]

local usage = [==[
usage: engine help [NAME]
       engine help --html FOLDER      write the reference and the guides as pages
       engine help --types FILE       write the types for an editor (LuaLS): engine.d.lua]==]

local function commands()
  local list = {}
  for i, name in ipairs(names) do
    local module = require("engine.cli." .. name)
    list[i] = { name = name, doc = module.doc, help = module.help,
      where = ("lua/engine/cli/%s.lua:1"):format(name) }
  end
  return list
end

local function overview()
  local lines = {}
  for i, command in ipairs(commands()) do
    lines[i] = ("  engine %-10s %s"):format(command.name, command.doc)
  end
  return text:format(table.concat(lines, "\n"))
end

local MOST_SHOWN, MOST_LISTED = 3, 12   -- the most entries to print in full, and to list

-- Returns the title and one line per entry, with the entry's name and summary.
local function listing(title, entries)
  local lines = { title }
  for i = 1, math.min(#entries, MOST_LISTED) do
    local entry = entries[i]
    local summary = require("engine.docs.source").summary(entry.text):gsub("^# ", "")
    local name = entry.kind == "guide" and entry.names[2] or entry.name   -- docs/data, not data
    lines[#lines + 1] = (("  %-26s %s"):format(name, summary):sub(1, 100):gsub("%s+$", ""))
  end
  if #entries > MOST_LISTED then
    lines[#lines + 1] = ("  ... and %d more"):format(#entries - MOST_LISTED)
  end
  return table.concat(lines, "\n")
end

local function show(name)
  local docs = require "engine.docs.index"
  local index = docs.new(commands())
  name = texts.cut(texts.shown(name), 100)
  local found, others = index:find((name:gsub("%.md$", "")))
  if #found == 0 then
    local hint, mentions = index:hint(name), index:mentions(name)
    io.stderr:write(("engine help: nothing is called '%s'%s\n"):format(name,
      hint ~= "" and hint or #mentions > 0 and "" or "; hint: `engine help` lists the commands"))
    if #mentions > 0 then print(listing(("'%s' is mentioned in"):format(name), mentions)) end
    return 1
  end
  if found[1].kind == "command" then           -- show its help, and list the rest
    for i = #found, 2, -1 do table.insert(others, 1, table.remove(found, i)) end
  end
  if #found > MOST_SHOWN then
    return print(listing(("'%s' is the name of %d things; ask for one by its full name:"):format(
      name, #found), found))
  end
  for i, entry in ipairs(found) do
    if i > 1 then print("\n" .. ("-"):rep(72) .. "\n") end
    print(docs.text(entry))
  end
  if #others > 0 then print("\n" .. listing("See also:", others)) end
end

-- Writes the pages or the types to `target`. writer: docs/html.lua or docs/types.lua. Returns the
-- exit code.
local function write(writer, target)
  local warnings = writer.write(require("engine.docs.index").new(commands()), target)
  options.note("help", warnings)
  return #warnings == 0 and 0 or 1
end

local function main(given)
  options.fail_if(given.words[1] and (given.html or given.types), "--html and --types write the " ..
    "whole reference; expected no NAME beside them, got '%s'", given.words[1])
  if given.html then return write(require "engine.docs.html", given.html) end
  if given.types then return write(require "engine.docs.types", given.types) end
  local topic = table.concat(given.words, " ")
  if topic == "" then return print(overview()) end
  if topic == "help" then return print(overview() .. "\n\n" .. usage) end
  for _, name in ipairs(names) do
    if name == given.words[1] then topic = name end
  end
  return show(topic)
end

local help = options.command {
  name = "help", doc = "this text; engine help NAME explains a command, a function, a policy ...",
  help = usage, options = { html = "text", types = "text" }, main = main,
}
help.commands = names
return help
