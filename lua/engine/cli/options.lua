-- Parses the command lines of the subcommands: words, --name value or --name=value, switches, and
-- policies with their options.
--   return options.command {
--     name = "plot", doc = "one line for `engine help`", help = [==[usage: engine plot RUN ...]==],
--     options = { columns = "list", svg = "text", log = "switch" }, short = { o = "svg" },
--     least = 1, most = 1,    -- the fewest and the most words
--     expects = "one run",    -- names the expected words in an error message
--     word = f,               -- a word for which f(word, given) is true is not stored; f stores it
--     main = function(given) return exit_code end,   -- nil means 0; given: a result of M.parse
--   }
-- The kinds of options are "text", "number" (an expression such as 2^12), "list" (a,b c,d is three
-- texts), "texts" (may be repeated) and "switch". With policies = true, the command accepts
-- --policy FILE name=value ... and stores the policies in given.policies = { { source, options }
-- ... }.
-- base/config.lua reads the settings of training scripts (name=value). Called by every subcommand.
local M_ffi = require "engine.base.ffi"
local expression = require "engine.base.expression"
local files = require "engine.base.file"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

-- fail() and fail_if() end a command with a one-line message about its arguments.
local fail, fail_if = M_ffi.fail, M_ffi.fail_if
local M = { fail = fail, fail_if = fail_if }

--- Returns the id of the token with this text. option: the option that names it, for the message.
function M.token_id(tokenizer, text, option)
  return tokenizer:id(text) or fail("%s: the tokenizer has no token '%s'%s", option, text,
    nearest.hint(text, tokenizer:special_tokens()))
end

--- Takes the path of a script that does not exist. Returns a hint that suggests the script with the
--- most similar name in the path's folder or in examples/; "" if no name is near.
function M.script_hint(path)
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

--- Raises an error unless there is a script `path`; the error suggests the nearest name.
function M.want_script(path)
  fail_if(files.is_folder(path), "expected a script, got the folder '%s'", path)
  if files.exists(path) then return end
  fail("there is no script '%s'%s", path, M.script_hint(path))
end

local VALUE = {
  text = function(name, text)
    return text ~= "" and text or fail("--%s: expected a value, got an empty text", name)
  end,
  number = function(name, text)
    return expression(text) or fail("--%s: expected a number, such as 100, 2^12 or 1e-3, got '%s'",
      name, text)
  end,
  list = function(_, text)
    local list = {}
    for part in text:gmatch("%s*([^,]*[^,%s])") do list[#list + 1] = part end
    return list
  end,
  texts = function(_, text, list)
    list[#list + 1] = text
    return list
  end,
}

-- Returns an option's name with its dashes: -e, --json.
local function dashed(name) return (#name == 1 and "-" or "--") .. name end

local function unknown(word, spec)
  local names = nearest.keys(spec.options or {})
  if spec.policies then names[#names + 1] = "policy" end
  for i, name in ipairs(names) do names[i] = dashed(name) end
  table.sort(names)
  fail("there is no option '%s'%s", word, #names == 0 and ("; `engine %s` takes no options"):format(
    spec.name) or nearest.choices(word, names, "options", "engine help " .. spec.name))
end

-- Stores a word that does not begin with a dash: as an option of the policy before it, as a policy
-- file, or in given.words.
local function plain_word(word, given, spec)
  if spec.word and spec.word(word, given) then return end
  local policies = given.policies
  local name, value = word:match("^([%a_][%w_]*)=(.*)$")
  if policies and name then
    fail_if(#policies == 0, "'%s' sets an option of the policy before it, but no --policy FILE " ..
      "precedes it", word)
    policies[#policies].options[name] = value
  elseif policies and #given.words > 0 and (word:find("%.lua$") or word:find("%.json$")) then
    policies[#policies + 1] = { source = word, options = {} }
  else
    given.words[#given.words + 1] = word
  end
end

--- Parses the words of a command line. spec: as at the top of the file. Returns a table with the
--- fields words (a list), policies, line (all words as given) and, for each option that is given,
--- its name without dashes. An option of the kind "texts" is a list, also if it is not given.
function M.parse(words, spec)
  local given = { words = {}, policies = spec.policies and {} or nil, line = words }
  local known = spec.options or {}
  for name, kind in pairs(known) do
    if kind == "texts" then given[name] = {} end
  end
  local i = 0
  while i < #words do
    i = i + 1
    local word = words[i]
    local name, text = word:match("^%-%-?(%a[%w_-]*)=(.*)$")
    name = name or word:match("^%-%-?(%a[%w_-]*)$")
    name = spec.short and spec.short[name] or name
    local kind = name and (known[name] or spec.policies and name == "policy" and "policy")
    if kind == "switch" and not text then given[name] = true
    elseif kind and kind ~= "switch" then
      if not text then
        i = i + 1
        text = words[i] or fail("%s: expected a value after it, got nothing", dashed(name))
      end
      if kind == "policy" then given.policies[#given.policies + 1] = { source = text, options = {} }
      else given[name] = VALUE[kind](name, text, given[name]) end
    elseif word:find("^%-%-?%a") then unknown(word, spec)
    else plain_word(word, given, spec) end
  end
  return given
end

--- Makes a command for init.lua: { doc, help, main }. spec: as at the top of the file. After an
--- error, main prints one line and returns exit code 1.
function M.command(spec)
  return { doc = spec.doc, help = spec.help, main = function(...)
    local words = { ... }
    local good, result = pcall(function()
      local given = M.parse(words, spec)
      local n, empty = #given.words, false
      for _, word in ipairs(spec.expects and given.words or {}) do empty = empty or word == "" end
      if n < (spec.least or 0) or n > (spec.most or n) or empty then
        local got = n == 0 and "nothing" or "'" .. table.concat(given.words, "', '") .. "'"
        fail("expected %s, got %s; see engine help %s", spec.expects, show.cut(got, 200), spec.name)
      end
      return spec.main(given)
    end)
    if good then return result or 0 end
    M.note(spec.name, { tostring(result):match("^[^\n]*") })
    return 1
  end }
end

--- Writes a command's notes to stderr, one per line. A note may say that a run is left out, and
--- why.
function M.note(command, notes)
  for _, note in ipairs(notes) do
    io.stderr:write(("engine %s: %s\n"):format(command, show.shown(note)))
  end
end

--- Makes a command that reads one run and calls spec.main(given, history, path). With spec.empty,
--- the command also takes a run without steps. With spec.several, it also takes several runs; for
--- these it calls spec.several(given, list), where `list` is the result of compare.open.
function M.run_command(spec)
  local main = spec.main
  spec.least, spec.most = 1, not spec.several and 1 or nil
  spec.expects = spec.several and "one run or several" or "one run"
  spec.main = function(given)
    if #given.words > 1 then
      return spec.several(given, require("engine.run.compare").open(given.words))
    end
    local path = require("engine.run.runs").find(given.words[1])
    local history = require("engine.run.history").open(path)
    fail_if(not spec.empty and #history:query("SELECT 1 FROM steps LIMIT 1") == 0,
      "the run %s has no steps; `engine report` shows how it ended and its settings", path)
    return main(given, history, path)
  end
  return M.command(spec)
end

return M
