-- The REPL: `engine` on a terminal, and `engine -i script.lua`. An expression prints its value, `_`
-- is the last result, an unfinished entry continues on the next line, Tab completes globals and
-- fields, Ctrl-C drops the line or stops the running entry, Ctrl-D leaves. A `local` at the start
-- of an entry becomes global, so that the next entry can use it too.
-- `bits` shows a number in every format. `runs` lists the runs, and open "NAME" opens the history
-- of one. After a run, `history` is the history of that run. Lines are saved in ~/.engine_history.
-- Called by main.c and attach.lua; reads lines through engine.host.
local host = require "engine.host"

local repl = {}

-- ------------------------------------------------------------------ showing values

local MOST_ENTRIES, MOST_DEPTH = 60, 3

local function key_text(key)
  if type(key) == "string" and key:match("^[%a_][%w_]*$") then return key end
  return "[" .. (type(key) == "string" and ("%q"):format(key) or tostring(key)) .. "]"
end

local function sorted_keys(t, length)
  local keys = {}
  for key in pairs(t) do
    local in_list = type(key) == "number" and key >= 1 and key <= length and key == math.floor(key)
    if not in_list then keys[#keys + 1] = key end
  end
  table.sort(keys, function(a, b)
    if type(a) == type(b) and (type(a) == "number" or type(a) == "string") then return a < b end
    return type(a) > type(b)           -- strings before numbers before booleans
  end)
  return keys
end

-- Returns a value as text for people: a string in quotes, a plain table by its contents, any other
-- value by tostring().
local function show(value, indent, depth, seen)
  if type(value) == "string" then return ("%q"):format(value):gsub("\\\n", "\\n") end
  local meta = debug.getmetatable(value)
  -- shows only the first line of a tensor inside a table
  if type(value) == "cdata" and depth > 1 then return (tostring(value):gsub("\n.*", "")) end
  if type(value) ~= "table" or (type(meta) == "table" and meta.__tostring) or seen[value]
    or depth > MOST_DEPTH then
    return tostring(value)
  end
  seen[value] = true
  local parts, length, size = {}, #value, 0
  for i = 1, math.min(length, MOST_ENTRIES) do
    parts[i] = show(value[i], indent .. "  ", depth + 1, seen)
  end
  if length > MOST_ENTRIES then
    parts[#parts + 1] = ("... %d more"):format(length - MOST_ENTRIES)
  end
  local keys = sorted_keys(value, length)
  for i = 1, math.min(#keys, MOST_ENTRIES) do
    parts[#parts + 1] = key_text(keys[i]) .. " = " .. show(value[keys[i]], indent .. "  ",
      depth + 1, seen)
  end
  if #keys > MOST_ENTRIES then parts[#parts + 1] = ("... %d more"):format(#keys - MOST_ENTRIES) end
  seen[value] = nil
  if #parts == 0 then return "{}" end
  for _, part in ipairs(parts) do size = size + #part + 2 end
  if size < 90 and not table.concat(parts):find("\n") then
    return "{ " .. table.concat(parts, ", ") .. " }"
  end
  return "{\n" .. indent .. "  " .. table.concat(parts, ",\n" .. indent .. "  ") .. "\n" ..
    indent .. "}"
end

local function shown(text) return require("engine.base.show").shown(text, true) end

-- Like shown(), but keeps the colours of heat maps and curves.
local function coloured(text)
  return (text:gsub("([^\27]*)(\27?%[?[%d;]*m?)", function(before, colour)
    local good = colour == "\27[0m" or colour:find("^\27%[[34]8;5;[%d;]+m$")
    return shown(good and before or before .. colour) .. (good and colour or "")
  end))
end

-- Returns a value as the REPL shows it. A text of several lines, as h:why() returns, has no quotes.
function repl.show(value)
  if type(value) == "string" and value:find("\n", 1, true) then return coloured(value) end
  local ok, text = pcall(show, value, "", 1, {})
  return coloured(ok and text or tostring(value))
end

--- Returns all results of an entry as text. Functions report failure with two results, `nil` and a
--- message; of these, returns only the message.
function repl.show_all(...)
  local n, nothing, message = select("#", ...), ...
  if n == 2 and nothing == nil and type(message) == "string" then return shown(message) end
  local texts = {}
  for i = 1, n do texts[i] = repl.show((select(i, ...))) end
  return table.concat(texts, "\t")
end

-- ------------------------------------------------------------------ completion

local keywords = "and break do else elseif end false for function goto if in local nil not or " ..
  "repeat return then true until while"

local function each_key(t, visit)
  for key, field in next, t do
    if type(key) == "string" then visit(key, field) end
  end
end

-- Calls visit(name, value) for the string keys of a value and of the tables in its chain of
-- __index. If an __index is a function, as in modules, visits the keys of the tables among its
-- upvalues.
local function each_name(value, visit)
  if type(value) == "cdata" then
    local tensor = package.loaded["engine.tensor.tensor"]
    if tensor and tensor.is_tensor(value) then
      each_key(tensor.methods, visit)
      each_key(tensor.getters, visit)
    end
    return
  end
  for _ = 1, 10 do
    if type(value) == "table" then each_key(value, visit) end
    local meta = debug.getmetatable(value)
    value = type(meta) == "table" and rawget(meta, "__index") or nil
    if type(value) == "function" then
      for i = 1, 20 do
        local name, upvalue = debug.getupvalue(value, i)
        if not name then break end
        if type(upvalue) == "table" and debug.getmetatable(upvalue) == nil
          or name:match("^[Cc]lass$") or name == "Module" then
          each_key(upvalue, visit)
        end
      end
      return
    end
    if type(value) ~= "table" then return end
  end
end

local function index(value, name) return value[name] end

-- Returns the value of a path such as `a.b.c`; nil if any part is missing.
local function resolve(path)
  local value = _G
  for name in path:gmatch("[%a_][%w_]*") do
    local ok, found = pcall(index, value, name)
    if not ok or found == nil then return nil end
    value = found
  end
  return value
end

local function common_prefix(names)
  local prefix = names[1]
  for i = 2, #names do
    local n = 0
    while n < #prefix and prefix:byte(n + 1) == names[i]:byte(n + 1) do n = n + 1 end
    prefix = prefix:sub(1, n)
  end
  return prefix
end

local function columns_text(names)
  local width, rows = 0, {}
  for _, name in ipairs(names) do width = math.max(width, #shown(name) + 2) end
  local per_line = math.max(1, math.floor(78 / width))
  for i, name in ipairs(names) do
    if (i - 1) % per_line == 0 then rows[#rows + 1] = {} end
    table.insert(rows[#rows], name)
  end
  return require("engine.base.show").table(rows, true)
end

-- Returns the names in a folder that begin with `start`. The names of folders end with a slash.
local function paths(folder, start)
  local files, list = require "engine.base.file", {}
  for _, name in ipairs(files.names(folder == "" and "." or folder) or {}) do
    if name:sub(1, #start) == start and not (start == "" and name:sub(1, 1) == ".") then
      list[#list + 1] = files.is_folder(folder .. name) and name .. "/" or name
    end
  end
  return list
end

-- Takes names that all begin with `start`. Returns the text to insert, and the candidates to list.
local function offered(names, start)
  if #names == 0 then return nil end
  table.sort(names)
  local insert = common_prefix(names):sub(#start + 1)
  if #names == 1 or insert ~= "" then return insert end
  if #names > 200 then return nil, ("(%d names)"):format(#names) end
  return nil, columns_text(names)
end

-- If a line ends inside a string literal, returns the part of the literal so far, and the code
-- before the literal. Otherwise returns nil.
local function open_text(line)
  local blank = line:gsub("\\.", "\1\1")                -- blanks escapes, then whole literals
    :gsub("([\"'])(.-)%1", function(_, inside) return ("\1"):rep(#inside + 2) end)
  local quote = blank:find("[\"']")
  if quote then return line:sub(quote + 1), line:sub(1, quote - 1) end
end

-- Returns the names that may complete a string literal which follows `code`: columns if the literal
-- is an argument of h:plot, runs if it is the argument of `open`. Returns nil after other code.
local function names_after(code)
  if code:find("^%s*open[%s%(]*$") or code:find("[^%w_.:]open[%s%(]*$") then
    return require("engine.base.file").names "runs" or {}
  end
  local h = code:match("([%a_][%w_.]*):plot[^=:]*$")
  h = h and resolve(h)
  if type(h) ~= "table" or not pcall(index, h, "handle") or not h.handle then return nil end
  local good, columns = pcall(require("engine.run.curves").columns, h)
  return good and columns or nil
end

-- Returns the text that Tab inserts after `before`, and the candidates to list. The candidates are
-- names of Lua values; inside quotes they are columns, runs or files.
function repl.complete(before)
  local inside, code = open_text(before)
  if inside then
    local names = names_after(code)
    if names then
      local list = {}
      for _, name in ipairs(names) do
        if name:sub(1, #inside) == inside then list[#list + 1] = name end
      end
      return offered(list, inside)
    end
    local folder, start = inside:match("^(.*/)([^/]*)$")
    if not folder then folder, start = "", inside end
    return offered(paths(folder, start), start)
  end
  local path, separator, start = before:match("([%w_.]-)([.:]?)([%w_]*)$")
  if separator == "" and before:match("^%s*$") then return "  " end
  local holder = separator == "" and _G or resolve(path)
  if holder == nil then return nil end
  local seen, names = {}, {}
  local function visit(name, value)
    if name:sub(1, #start) == start and not seen[name] and name:match("^[%a_][%w_]*$")
       and not (start == "" and name:sub(1, 1) == "_")
       and (separator ~= ":" or type(value) == "function") then
      seen[name] = true
      names[#names + 1] = name
    end
  end
  each_name(holder, visit)
  if separator == "" then
    for word in keywords:gmatch("%a+") do visit(word) end
  end
  return offered(names, start)
end

-- ------------------------------------------------------------------ reading and running

-- Compiles an entry. Returns its chunk; or nil and "more" if the entry is unfinished; or nil and a
-- message if the entry is wrong.
function repl.compile(text)
  local chunk = loadstring("return " .. text:gsub("^%s*=", "", 1), "=stdin")
  if chunk then return chunk end
  local global = text:gsub("^(%s*)local%s+function%s", "%1function ", 1)
  if global == text then global = text:gsub("^(%s*)local%s+([%a_][%w_,%s]*=[^=])", "%1%2", 1) end
  local why
  chunk, why = loadstring(global, "=stdin")
  if chunk then return chunk end
  if why:find("'<eof>'", 1, true) then return nil, "more" end
  return nil, why
end

local function traceback(problem)
  if type(problem) ~= "string" then
    local meta = debug.getmetatable(problem)
    if not (type(meta) == "table" and meta.__tostring) then
      return "error object of type " .. type(problem)
    end
    problem = tostring(problem)
  end
  local trace = debug.traceback(problem, 2)
  trace = trace:gsub("\n%s*%[C%]: in function 'xpcall'.*$", "")      -- drop the REPL's own frames
  trace = host.trim(trace)
  return (trace:gsub("\nstack traceback:\n%s*stdin:%d+: in main chunk$", ""))   -- the entry itself
end

local function finish(ok, ...)
  host.settle()
  if not ok then
    io.stdout:flush()
    io.stderr:write(shown(tostring((...))), "\n")
    return
  end
  local n = select("#", ...)
  if n == 0 then return end
  rawset(_G, "_", (...))
  print(repl.show_all(...))
end

-- Reads one whole entry. Returns nil at the end of the input, and "" if there is nothing to run.
local function read_entry()
  local text
  while true do
    local line, why = host.read(text and ">> " or "> ", repl.complete)
    if not line then return why == "interrupted" and "" or nil end
    text = text and text .. "\n" .. line or line
    if text:match("^%s*$") then return "" end
    local _, problem = repl.compile(text)
    if problem ~= "more" then return text end
  end
end

-- Words that the REPL handles itself, unless a global has the same name. The REPL prints the word's
-- text, or ends if the word has the value false.
local words = {
  help = "Any Lua runs here. An expression prints its value; `_` holds the last value printed.\n" ..
  "Tab completes: engine. <Tab>, tensor: <Tab>.\n" ..
  "Ctrl-C clears the line or stops what runs, Ctrl-D leaves. lua/README.md lists the parts.\n" ..
  "help 'matmul' explains a name; bits(0.1) shows a number in every format;\n" ..
  "`runs` prints the runs; h = open 'NAME' opens one: h:plot 'loss', h:why(812), h:heatmap().",
  exit = false, quit = false,
}

-- Globals of the REPL. `runs` prints the table of `engine runs`, runs "FOLDER" prints the table of
-- that folder, and runs[1].loss is the loss of the first run.
local function listed(dir) return require("engine.cli.runs").list(dir) end
local provided = {
  bits = function(x) return package.loaded["engine"].bits(x) end,
  open = function(name)
    return require("engine.run.history").open(require("engine.run.runs").find(name))
  end,
  runs = setmetatable({}, { __tostring = function() return tostring(listed()) end,
    __call = function(_, dir) return listed(dir) end,
    __index = function(_, i) return type(i) == "number" and listed()[i] or nil end }),
}

-- Sets the globals above and `history`, unless the script has its own.
local function provide()
  local engine = package.loaded["engine"]
  for name, value in pairs(engine and provided or {}) do
    if rawget(_G, name) == nil then rawset(_G, name, value) end
  end
  local files = package.loaded["engine.run.run"]
  local path = files and files.latest
  if path and path ~= repl.offered then
    repl.offered = path
    local held = rawget(_G, "history")
    if held ~= nil and held ~= repl.history then return end
    local good, history = pcall(engine.history.open, path)
    if not good then return end
    repl.history = history
    rawset(_G, "history", history)
    if host.edited then print(("`history` is the history of %s"):format(path)) end
  end
end

local function run()
  local home = os.getenv("HOME")
  local history_file = host.edited and home and home .. "/.engine_history" or nil
  if history_file then host.history_load(history_file) end
  if rawget(_G, "engine") == nil then
    local ok, engine = pcall(require, "engine")
    if ok then rawset(_G, "engine", engine)
    else
      io.stderr:write("the engine cannot be used here: ", tostring(engine):match("[^\n]*"), "\n")
    end
  end
  if host.edited then
    print(("engine %s on %s. Tab completes, Ctrl-D leaves; `engine` holds the library."):format(
      host.version, host.luajit))
  end
  provide()
  for text in read_entry do
    local topic = rawget(_G, "help") == nil and text:match("^%s*help[%s%(]*['\"](.-)['\"][%s%)]*$")
    local word = text:match("^%s*(%a+)[%s%(%)]*$")
    if topic then require("engine.cli.help").main(topic)
    elseif words[word] ~= nil and rawget(_G, word) == nil then
      if not words[word] then return end
      print(words[word])
    elseif text ~= "" then
      if history_file then host.history_add((text:gsub("\n", " ")), history_file) end
      local chunk, problem = repl.compile(text)
      if chunk then
        -- Ctrl-C cannot stop a compiled loop, so the entry runs uncompiled. Functions that the
        -- entry calls are compiled as usual.
        jit.off(chunk)
        finish(xpcall(chunk, traceback))
        provide()
      else
        io.stderr:write(shown(problem), "\n")
      end
    end
  end
end

return setmetatable(repl, { __call = run })
