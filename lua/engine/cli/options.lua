-- The arguments of commands that ask a history: plain words, --name value or --name=value, and --switches.
local arguments = require "engine.cli.policies"

local M = { fail = arguments.fail }

--- { words = { ... }, name = value } from the words of a command line. known: name -> true (takes a value), "number", "list" (a,b,c) or
--- false (a switch).
function M.parse(words, known)
  local result = { words = {} }
  local i = 0
  while i < #words do
    i = i + 1
    local word = words[i]
    local name, text = word:match("^%-%-?([%a][%w_-]*)=?(.*)$")
    if word == "-o" then name, text = "output", "" end
    if not name then
      result.words[#result.words + 1] = word
    elseif known[name] == nil then
      local names = {}
      for k in pairs(known) do names[#names + 1] = k end
      table.sort(names)
      local near = require("engine.base.nearest").find(name, names)
      M.fail("no option '%s'%s the options are --%s", word, near and ("; did you mean '--%s'? All of"):format(near) or ";", table.concat(names, ", --"))
    elseif known[name] == false then
      result[name] = true
    else
      if text == "" and not word:find("=", 1, true) then
        i = i + 1
        text = words[i]
        if not text then M.fail("--%s wants a value", name) end
      end
      if known[name] == "number" then
        result[name] = tonumber(text) or M.fail("--%s: expected a number, got '%s'", name, text)
      elseif known[name] == "list" then
        local list = {}
        for part in text:gmatch("[^,%s]+") do list[#list + 1] = part end
        result[name] = list
      else
        result[name] = text
      end
    end
  end
  return result
end

--- A command on one run: { doc, help, main } of a function(options, history, path).
function M.command(name, doc, help, known, body)
  return { doc = doc, help = help, main = function(...)
    local words = { ... }
    return arguments.guard(name, function()
      local options = M.parse(words, known)
      if #options.words ~= 1 then M.fail("expected one run, got %d; engine help %s says more", #options.words, name) end
      local path = require("engine.run.runs").find(options.words[1])
      local history = require("engine.run.history").open(path)
      if history:query("SELECT count(*) AS n FROM (SELECT 1 FROM steps LIMIT 1)")[1].n == 0 then M.fail("%s has no steps", path) end
      return body(options, history, path)
    end)
  end }
end

return M
