-- The arguments that engine replay and engine tune share: traces, policies with the options that follow them, switches.
local M = {}

--- An error of the user's: one line, no traceback.
function M.fail(format, ...) error({ usage = format:format(...) }, 0) end

-- Whether a bare word is a policy file.
local function is_file(word) return word:find("%.lua$") or word:find("%.json$") end

--- { traces = { text, ... }, policies = { { source, options }, ... }, switches = { json = true, over = { ... } } } from the words
--- of a command line. `switches` names those the command knows: false without a value, true with one (given any number
--- of times).
function M.parse(words, switches)
  local result = { traces = {}, policies = {} }
  for name, valued in pairs(switches) do result[name] = valued and {} or false end
  local i = 1
  local function value(name)
    i = i + 1
    if not words[i] then M.fail("--%s wants a value", name) end
    return words[i]
  end
  while i <= #words do
    local word = words[i]
    local switch, text = word:match("^%-%-([%w_-]+)=?(.*)$")
    if switch == "policy" then
      result.policies[#result.policies + 1] = { source = text ~= "" and text or value "policy", options = {} }
    elseif switch and switches[switch] ~= nil then
      if switches[switch] then
        local list = result[switch]
        list[#list + 1] = text ~= "" and text or value(switch)
      else
        result[switch] = true
      end
    elseif switch then
      local names = { "policy" }
      for name in pairs(switches) do names[#names + 1] = name end
      table.sort(names)
      local near = require("engine.base.nearest").find(switch, names)
      M.fail("no option '%s'%s the options are --%s", word, near and ("; did you mean '--%s'? All of"):format(near) or ";", table.concat(names, ", --"))
    elseif word:find("^[%a_][%w_]*=") then
      local last = result.policies[#result.policies]
      if not last then M.fail("'%s' stands before any --policy FILE, whose option it could be", word) end
      local name, text_value = word:match("^([%a_][%w_]*)=(.*)$")
      last.options[name] = text_value
    elseif is_file(word) and #result.traces > 0 then
      result.policies[#result.policies + 1] = { source = word, options = {} }
    else
      result.traces[#result.traces + 1] = word
    end
    i = i + 1
  end
  return result
end

--- Runs a command's body; an error becomes one line and the exit code 1.
function M.guard(name, body)
  local good, result = xpcall(body, function(message)
    if type(message) == "table" and message.usage then return message.usage end
    return tostring(message)
  end)
  if good then return result or 0 end
  io.stderr:write(("engine %s: %s\n"):format(name, (result:gsub("\n.*", ""))))
  return 1
end

return M
