-- The history of a run in runs/<name>/history.db: a row for each step, statistics per tensor,
-- events, policies, settings. Other processes can read it while the run writes.
--
--   local h = engine.history.open("runs/a")      also: open("runs/a/history.db")
--   print(h)                                     a summary
--   print(h:last(20))                            rows are tables: row.step, row.loss, row.scale ...
--   print(h:why(412))                            what happened at step 412, in words
--   print(h:plot("loss"))                        a curve; h:plot("amax", { log = true })
--   print(h:heatmap())                           each layer's gradients by exponent
--   print(h:tensor("blocks.3.attn.qkv.weight"))  the gradients of one parameter
--   for row in h:each("SELECT step, loss FROM steps WHERE scale < ?", 1024) do ... end
--
-- A run opens it with { write = true } and appends. Appending a row costs about a microsecond,
-- because a thread of the core writes the file. Used by scripts, this folder, report/ and cli/.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local files = require "engine.base.file"
local formats = require "engine.base.formats"
local history_fp8 = require "engine.run.history_fp8"
local json = require "engine.base.json"
local merged = arguments.merged
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local C, check, fail_if, ffi = M_ffi.C, M_ffi.check, M_ffi.fail_if, M_ffi.ffi
local raise, raise_if = M_ffi.raise, M_ffi.raise_if

local M = {}

local History = {}           -- methods for reading; init.lua adds plot, heatmap and tensor
History.__index = History
M.methods = History

-- methods for writing, used by the run itself
local Writing = setmetatable({}, { __index = History })
Writing.__index = Writing
function Writing:__tostring() return History.__tostring(self) end

local function refuse(h) return nil, ("history %s is open for reading only"):format(h.path) end

-- A history that is open for reading refuses the methods of `Writing` with nil and a message. They
-- are not fields of History, so tab completion does not list them.
setmetatable(History, { __index = function(_, key)
  if rawget(Writing, key) then return refuse end
  if key == "handle" then return nil end                   -- a closed history has no handle
  local names = {}
  for _, name in ipairs(nearest.keys(History)) do
    if not name:find("^__") then names[#names + 1] = name end
  end
  M_ffi.raise("a history has no method '%s'%s", tostring(key),
    nearest.choices(tostring(key), names, "methods", "engine help history"))
end })

-- ------------------------------------------------------------------ opening

--- Opens the history in a run's directory, or a database file. options.write: opens it for
--- appending, and creates it if it is missing.
function M.open(path, options)
  M_ffi.expect(type(path) == "string", path, "history.open: expected the directory of a run or " ..
    "its history.db")
  local write = options and options.write or false
  local file = files.is_folder(path) and path .. "/history.db" or path
  local out = ffi.new("eng_history *[1]")
  check(C.eng_history_open(out, file, write))
  return setmetatable({ path = file, handle = ffi.gc(out[0], C.eng_history_free) }, write
    and Writing or History)
end

--- Opens the history at `path`, calls f(h) and closes the history. Returns f's result, or nil and
--- the reason if the history cannot be read or f raises an error.
function M.with(path, f)
  M_ffi.expect(type(f) == "function", f, "history.with: expected a function of a history")
  local h
  local good, result = pcall(function()
    h = M.open(path)
    return f(h)
  end)
  if h then h:close() end
  if good then return result end
  return nil, result
end

local function handle(h) return h.handle or raise("history %s is closed", h.path) end

--- Commits all rows and closes.
function History:close()
  local open = self.handle
  self.handle = nil
  if open then check(C.eng_history_close(ffi.gc(open, nil))) end
end

-- ------------------------------------------------------------------ appending

-- Returns the result of a method that appends: true, or nil and a message. Appending never stops a
-- run. After the first failure (such as a full disk), rows wait in memory until there is space. If
-- the queue is full before that, further rows are dropped, and an event `history` counts them.
local function told(status)
  if status == 0 then return true end
  return nil, M_ffi.message()
end

-- Raises an error if a value that a method requires is nil, because the core would read a null
-- pointer. names: the names of the values, for the message.
local function need(method, names, ...)
  for i = 1, select("#", ...) do
    if (select(i, ...)) == nil then
      M_ffi.raise("history:%s: expected `%s`, got nothing", method,
        names:match(("%S+ "):rep(i - 1) .. "(%S+)"))
    end
  end
end

--- Appends a step: the core's eng_record and eng_verdict, and the number of tokens trained on.
function Writing:append(record, verdict, tokens)
  need("append", "record verdict", record, verdict)
  return told(C.eng_history_step(handle(self), record, verdict, tokens or 0))
end

--- Appends a step's statistics per tensor, an array of n eng_tensor_stats.
function Writing:append_tensors(step, stats, n)
  need("append_tensors", "step stats", step, stats)
  return told(C.eng_history_tensors(handle(self), step, stats, n))
end

--- Records an event. kind: "overflow", "swap", "error", "checkpoint" ...; data: JSON for programs,
--- or nil.
function Writing:event(step, kind, text, data)
  need("event", "step kind", step, kind)
  return told(C.eng_history_event(handle(self), step, kind, text, data))
end

--- Appends a row for a shadow at a step: its verdict, whether gradients overflow at its scale, and
--- whether the verdict is a bound (counterfactual.lua). The row holds until the shadow's next row.
function Writing:append_shadow(step, name, verdict, overflow, bound)
  need("append_shadow", "step name verdict", step, name, verdict)
  return told(C.eng_history_shadow(handle(self), step, name, verdict, overflow or false,
    bound or false))
end

local ENDING = ffi.new("eng_verdict", { scale = 0 / 0, action = C.ENG_ACTION_STOP })

--- Appends a row that ends a shadow's series, because the shadow sees no step from this one on. The
--- row has the action `stop` and no scale.
function Writing:end_shadow(step, name) return self:append_shadow(step, name, ENDING) end

--- Appends a value that the script published; it holds until the next row of the same name.
function Writing:append_signal(step, name, value)
  need("append_signal", "step name value", step, name, value)
  return told(C.eng_history_signal(handle(self), step, name, value))
end

M.meters = history_fp8.names
local meter_values = ffi.new("double[12]")

--- Appends a step's meters of FP8 layers (fp8_sites.lua).
function Writing:append_fp8(step, rows)
  for _, row in ipairs(rows) do
    need("append_fp8", "site role", row.site, row.role)
    for i, name in ipairs(M.meters) do meter_values[i - 1] = row[name] or 0 / 0 end
    local good, message = told(C.eng_history_fp8(handle(self), step, row.site, row.role,
      meter_values))
    if not good then return nil, message end
  end
  return true
end

local function set(self, what, key, value)
  need("set_" .. what, "key", key)
  return told(C.eng_history_text(handle(self), what, key, tostring(value)))
end

--- Stores a fact of the run (set_meta) or a setting (set_config).
function Writing:set_meta(key, value) return set(self, "meta", key, value) end
function Writing:set_config(key, value) return set(self, "config", key, value) end

function Writing:add_policy(hash, name, source)
  need("add_policy", "hash name source", hash, name, source)
  return told(C.eng_history_policy(handle(self), hash, name, source))
end

--- Stores a precision recipe, JSON text, under its checksum.
function Writing:add_recipe(checksum, text)
  return set(self, "meta", "recipe." .. checksum, text)
end

--- Stores the model's parameters, in order: a list of { name =, shape = { ... }, gradient = the
--- format of its gradient, such as "f16" }.
function Writing:set_parameters(list)
  for i, p in ipairs(list) do
    need("set_parameters", "name shape", p.name, p.shape)
    local shape = ffi.new("int64_t[?]", C.ENG_MAX_DIMS, p.shape)
    local good, message = told(C.eng_history_parameter(handle(self), i - 1, p.name, #p.shape,
      shape, p.gradient))
    if not good then return nil, message end
  end
  return true
end

--- Prepares for a run that continues at `step`: drops the rows from `step` on, except the events up
--- to the checkpoint of `step`, and adds an event 'resumed'.
function Writing:resume(step) return told(C.eng_history_resume(handle(self), step)) end

--- Waits until all rows are committed.
function Writing:flush() return told(C.eng_history_flush(handle(self))) end

-- ------------------------------------------------------------------ reading

local INTEGER, REAL, NULL = 1, 2, 5
local out_bool, out_size = ffi.new("bool[1]"), ffi.new("int64_t[1]")

local function value_of(q, column)
  local kind = C.eng_query_type(q, column)
  if kind == INTEGER then
    local value = C.eng_query_int(q, column)
    local number = tonumber(value)
    return number > -2 ^ 53 and number < 2 ^ 53 and number or value
  end
  if kind == REAL then return C.eng_query_double(q, column) end
  if kind == NULL then return nil end
  local bytes = C.eng_query_bytes(out_size, q, column)
  return ffi.string(bytes, out_size[0])
end

local function bind(q, index, value)
  local kind = type(value)
  if kind == "boolean" then value, kind = value and 1 or 0, "number" end
  if kind == "string" then check(C.eng_query_bind_text(q, index, value, #value))
  elseif kind == "number" and value % 1 == 0 and value > -2 ^ 53 and value < 2 ^ 53 then
    check(C.eng_query_bind_int(q, index, value))
  elseif kind == "number" then check(C.eng_query_bind_double(q, index, value))
  elseif kind ~= "nil" then
    raise("query: expected a number, a string or a boolean for parameter %d, got a %s", index + 1,
      kind)
  end
end

-- Returns an iterator over the rows of a query, and the names of the columns. Each row is a new
-- table, passed through `make`.
local function each(h, make, sql, ...)
  M_ffi.expect(type(sql) == "string", sql, "query: expected SQL as a string")
  local out = ffi.new("eng_query *[1]")
  check(C.eng_query_open(out, handle(h), sql))
  local q = ffi.gc(out[0], C.eng_query_close)
  local wanted, given = C.eng_query_parameters(q), select("#", ...)
  raise_if(wanted ~= given, "query: expected %s for the statement's parameters, got %d",
    show.counted(wanted, "value"), given)
  for i = 1, given do bind(q, i - 1, (select(i, ...))) end
  local names = {}
  for i = 1, C.eng_query_columns(q) do names[i] = ffi.string(C.eng_query_name(q, i - 1)) end
  local function following()
    if not q then return nil end
    local status = C.eng_query_next(out_bool, q)
    if status ~= 0 or not out_bool[0] then
      C.eng_query_close(ffi.gc(q, nil))
      q = nil
      check(status)
      return nil
    end
    local row = {}
    for i, name in ipairs(names) do row[name] = value_of(q, i - 1) end
    return make and make(row) or row
  end
  return following, names
end

-- Returns the first row of a query, or nil.
local function one(h, ...) return h:query(...)[1] end

-- Raises an error unless these fields of a row, which SQL computed, hold numbers (or nil, if
-- `optional`). The file may be damaged; the core checks the other values (history_query.c).
local function expect(h, row, fields, optional)
  for _, name in ipairs(fields) do
    local value = row[name]
    fail_if(type(value) ~= "number" and not (optional and value == nil),
      "history %s is damaged: expected the column '%s' of a query to be a number, got %s", h.path,
      name, M_ffi.value_text(value))
  end
  return row
end

-- Returns a function `make` for each(), which raises an error if one of these fields of a row is
-- nil. The core allows NULL in `id`, `name` and `shape`, which the LEFT JOIN of a script may yield.
local function present(h, ...)
  local fields = { ... }
  return function(row)
    for _, name in ipairs(fields) do
      fail_if(row[name] == nil, "history %s is damaged: a value of the column '%s' is NULL", h.path,
        name)
    end
    return row
  end
end

--- Iterates over rows of numbers that SQL computes. Raises an error for a value that is neither a
--- number nor nil, and for nil in one of `fields`.
function History:numbers(fields, sql, ...)
  local following, names = each(self, nil, sql, ...)
  return function()
    local row = following()
    return row and expect(self, expect(self, row, names, true), fields)
  end
end

local function short(value)
  if type(value) == "number" then
    return (value % 1 == 0 and math.abs(value) < 1e15 and "%.0f" or "%.6g"):format(value)
  end
  return value == nil and "-" or (tostring(value):gsub("%s+", " "))
end

-- Formats rows as a table in text. Strings are aligned left, numbers right.
local function table_text(rows, columns)
  local list, left = { columns }, {}
  for i, row in ipairs(rows) do
    local cells = {}
    for c, name in ipairs(columns) do
      local text = short(row[name])
      cells[c] = text
      left[c] = left[c] or type(row[name]) == "string"
    end
    list[i + 1] = cells
  end
  return show.table(list, left) .. (#rows == 0 and "\n(no rows)" or "")
end

local function collect(iterator, columns)
  local rows = {}
  for row in iterator do rows[#rows + 1] = row end
  return setmetatable(rows, { __tostring = function(list) return table_text(list, columns) end })
end

-- Returns an empty list that prints as `text`.
local function nothing(text)
  return setmetatable({}, { __tostring = function() return text end })
end

--- Returns the rows of any SELECT as tables by column name. The values for `?` follow the SQL. NULL
--- becomes nil. first_bad in the table `steps` is a parameter's id, which counts from 0; the table
--- `parameters` has its name.
function History:query(sql, ...) return collect(each(self, nil, sql, ...)) end

--- Like query, but returns an iterator over the rows, for large results.
function History:each(sql, ...) return (each(self, nil, sql, ...)) end

--- True if the file has this table. Old histories lack the tables shadows, signals, fp8 and blocks.
function History:has(name)
  return one(self, "SELECT count(*) AS n FROM sqlite_master WHERE name = ?", name).n > 0
end

--- Returns the first and the last recorded step, within from..to if given. Returns nil if the
--- history has no steps. If no step is within from..to, the first result is larger than the last.
function History:range(from, to)
  local first = one(self, "SELECT step FROM steps ORDER BY step LIMIT 1")
  local last = one(self, "SELECT step FROM steps ORDER BY step DESC LIMIT 1")
  if first and last then
    return math.max(first.step, math.ceil(from or first.step)),
      math.min(last.step, math.floor(to or last.step))
  end
end

--- The columns of `steps` except the histogram, in the order of exports: { name, what NULL stands
--- for }. If the second value is `false`, the column holds 0 or 1. If there is no second value, as
--- for norm_ref, NULL is a missing value. step_names: the names alone.
M.step_columns, M.step_names = {}, {}
for name, null in ffi.string(C.eng_history_columns()):gmatch("(%S+):(%S+)") do
  if name ~= "hist" then
    table.insert(M.step_names, name)
    table.insert(M.step_columns, { name, null ~= "false" and tonumber(null) })
  end
end

--- Returns columns of `steps` as a list for a SELECT. A column that this history lacks, because an
--- older engine wrote it, is NULL. prefix: "s." for a table named s, or nil.
function History:columns(names, prefix)
  local has, list = {}, {}
  local following, all = each(self, nil, "SELECT * FROM steps LIMIT 0")
  following()
  for _, name in ipairs(all) do has[name] = true end
  for i, name in ipairs(names) do
    list[i] = has[name] and (prefix or "") .. name or "NULL AS " .. name
  end
  return table.concat(list, ", ")
end

local step_meta = {}

function step_meta.__tostring(row)
  local parts = { ("step %d  loss %.4f  scale %s"):format(row.step, row.loss,
    show.scale(row.scale)) }
  if row.next_scale ~= row.scale then
    parts[1] = parts[1] .. " -> " .. show.scale(row.next_scale)
  end
  parts[2] = row.action ~= "step" and row.action or nil
  if row.overflow then
    parts[#parts + 1] = ("overflow (%d inf, %d nan)"):format(row.inf, row.nan)
  end
  parts[#parts + 1] = row.reason
  return show.shown(table.concat(parts, "  "))
end

-- Completes a row of the table `steps`: replaces NULL by what it stands for (M.step_columns).
local function step_row(row)
  for _, named in ipairs(M.step_columns) do
    local name, none = named[1], named[2]
    if none == false then row[name] = (row[name] or 0) ~= 0
    elseif row[name] == nil then row[name] = none end
  end
  row.action = tostring(row.action)
  return setmetatable(row, step_meta)
end

local SHOWN = { "step", "updates", "loss", "lr", "scale", "next_scale", "action", "inf", "nan",
  "amax", "norm", "reason" }

local function select_steps(h, rest, ...)
  return collect(each(h, step_row, "SELECT " .. h:columns(M.step_names) .. " FROM steps " .. rest,
    ...), SHOWN)
end

--- Returns the rows of the steps from..to (both included; nil: no limit).
function History:steps(from, to)
  return select_steps(self, "WHERE step BETWEEN ? AND ? ORDER BY step, attempt", from or 0,
    to or 2 ^ 53 - 1)
end

--- Returns the rows of the last n steps (20 by default), oldest first.
function History:last(n)
  n = arguments.want_whole(n or 20, "history:last", "the number of rows", 0)
  local rows = select_steps(self, "ORDER BY step DESC, attempt DESC LIMIT ?", n)
  for i = 1, math.floor(#rows / 2) do
    rows[i], rows[#rows + 1 - i] = rows[#rows + 1 - i], rows[i]
  end
  return rows
end

--- Returns the rows of the steps with inf or nan in the gradients.
function History:overflows() return select_steps(self, "WHERE overflow ORDER BY step, attempt") end

--- Returns the events of one kind or of all kinds, oldest first: { step, time, kind, text, data }.
function History:events(kind)
  return collect(each(self, nil,
    "SELECT step, time, kind, text, data FROM events WHERE ? IS NULL OR kind = ? ORDER BY id", kind,
    kind), { "step", "kind", "text" })
end

--- Returns the held-out losses that the run measured (the trainer's `evaluate`): { { step, loss }
--- ... }, oldest first. The loss is that of the weights with which `step` begins.
function History:evaluations()
  local list = {}
  for event in each(self, nil, "SELECT step, text FROM events WHERE kind = 'evaluation' " ..
    "ORDER BY id") do
    local loss = tonumber(tostring(event.text):match("loss ([%w.+-]+)"))
    if loss then list[#list + 1] = { event.step, loss } end
  end
  return list
end

-- Prints pairs as a table, in the order of their keys.
local pairs_meta = { __tostring = function(t)
  local rows = {}
  for i, key in ipairs(nearest.keys(t)) do
    rows[i] = { name = show.shown(key), value = show.cut(show.shown(t[key]), 100) }
  end
  return table_text(rows, { "name", "value" })
end }

-- Reads a database table with the columns key and value into a Lua table.
local function pairs_of(h, name)
  local t = setmetatable({}, pairs_meta)
  for row in each(h, nil, "SELECT key, value FROM " .. name) do t[row.key] = row.value end
  return t
end

--- Returns the facts of the run (meta) or its settings (config), as strings by name.
function History:meta() return pairs_of(self, "meta") end
function History:config() return pairs_of(self, "config") end

--- Returns the policies that the run has used: { hash, name, source }.
function History:policies()
  return collect(each(self, nil, "SELECT hash, name, source FROM policies"), { "hash", "name" })
end

--- Returns the precision recipes that the run has used: { checksum, recipe }, with the recipe as
--- JSON. Events of the kind 'precision', and checkpoints, refer to a recipe by its checksum.
function History:recipes()
  return collect(each(self, nil, "SELECT substr(key, 8) AS checksum, value AS recipe FROM meta " ..
    "WHERE key GLOB 'recipe.*' ORDER BY key"), { "checksum", "recipe" })
end

-- SQL for the names of the shadows, which needs one index lookup for each name.
local NAMES = [[WITH RECURSIVE names(name) AS (SELECT min(name) FROM shadows
  UNION ALL SELECT (SELECT min(name) FROM shadows WHERE name > names.name) FROM names
      WHERE names.name IS NOT NULL)]]

-- Two tests whether a row of `shadows` ends a shadow's series (Writing:end_shadow): ENDS in SQL,
-- `ends` in Lua.
local ENDS = "(action = 'stop' AND scale IS NULL)"
local function ends(row) return row.action == "stop" and row.scale == nil end

--- Returns the shadows of the run: { name, steps, skipped, overflows, bounds, failed, scale, action
--- }. Five fields count steps: those that the shadow saw, would have skipped, that overflow at its
--- own scale, whose verdict is a bound (counterfactual.lua), and in which it failed. scale and
--- action come from its last verdict. overflows and bounds are nil in a history of an older engine,
--- whose shadows read the run's own overflows.
function History:shadows()
  if not self:has "shadows" then return nothing "(no shadows)" end
  -- `others` leaves out rows that count in none of the sums, because a shadow whose scale moves
  -- has a row for every step
  local function whole(row) return expect(self, row, { "skipped", "failed" }) end
  local own = one(self, "SELECT count(*) AS n FROM sqlite_master WHERE name = 'shadows' AND sql " ..
    "LIKE '%bound INTEGER%'").n > 0        -- false in a history of an older engine
  local function sum(condition)
    return ("(SELECT coalesce(sum(n), 0) FROM others o WHERE o.name = names.name AND %s)")
      :format(condition)
  end
  local function last(column)
    return ("(SELECT %s FROM shadows s WHERE s.name = names.name AND NOT %s " ..
      "ORDER BY step DESC LIMIT 1)"):format(column, ENDS)
  end
  return collect(each(self, whole, NAMES .. [[
    , others AS (SELECT *, coalesce((SELECT min(step) FROM shadows t
        WHERE t.name = s.name AND t.step > s.step),
           (SELECT max(step) + 1 FROM steps)) - step AS n FROM shadows s
               WHERE action <> 'step' OR failed]] .. (own and " OR overflow OR bound" or "") .. [[)
    SELECT name, (SELECT max(step) + 1 FROM steps) - (SELECT min(step) FROM shadows s
        WHERE s.name = names.name) - ]] .. sum(ENDS) .. " AS steps, " ..
      sum("action <> 'step' AND NOT " .. ENDS) .. " AS skipped, " ..
      (own and sum "overflow" .. " AS overflows, " .. sum "bound" .. " AS bounds, " or "") ..
      sum "failed" .. " AS failed, " .. last "scale" .. " AS scale, " .. last "action" ..
      " AS action FROM names WHERE name IS NOT NULL ORDER BY name"),
    { "name", "steps", "skipped", "overflows", "bounds", "failed", "scale", "action" })
end

--- Returns a row for each step at which a shadow's verdict changed: { step, scale, action, failed,
--- reason, overflow, bound }. A row holds until the next row. overflow (the step overflows at the
--- shadow's own scale) and bound (counterfactual.lua) are nil in a history of an older engine. A
--- row with the action `stop` and no scale is no verdict: the run was resumed without the shadow.
function History:shadow(name)
  if not self:has "shadows" then return {} end
  return collect(each(self, nil, "SELECT * FROM shadows WHERE name = ? ORDER BY step", name),
    { "step", "scale", "action", "failed", "reason", "overflow", "bound" })
end

--- Returns, for each shadow, the verdict that is in force at a step: a row as shadow() returns it,
--- with `name`. Leaves out shadows that the run no longer has at that step.
function History:shadows_at(step)
  local list = {}
  if not self:has "shadows" then return list end
  for name in each(self, present(self, "name"), NAMES ..
    " SELECT name FROM names WHERE name IS NOT NULL ORDER BY name") do
    local row = one(self, "SELECT * FROM shadows WHERE name = ? AND step <= ? " ..
      "ORDER BY step DESC LIMIT 1", name.name, step)
    if row and not ends(row) then list[#list + 1] = row end
  end
  return list
end

local function published(self, condition, none)
  if not self:has "signals" then return nothing(none) end
  return collect(each(self, present(self, "name"), [[SELECT name, count(*) AS changes,
      min(value) AS least, max(value) AS most,
    (SELECT value FROM signals t WHERE t.name = s.name ORDER BY step DESC LIMIT 1) AS last
        FROM signals s WHERE coalesce(name, '') ]] .. condition .. " GROUP BY name ORDER BY name"),
    { "name", "changes", "least", "most", "last" })
end

--- Returns the numbers that the script published (engine.signal): { name, changes, least, most,
--- last }.
function History:signals() return published(self, "NOT GLOB 'log.*'", "(no signals)") end

--- Returns the numbers that the policy logged (`log` in its verdict), as signals() does. Their
--- names begin with "log.".
function History:logs() return published(self, "GLOB 'log.*'", "(no logs)") end

--- Returns a function from a step to { name = value }, the signals and logs in force at that step.
--- Call it with steps that never decrease.
function History:signals_at()
  local held = {}
  if not self:has "signals" then return function() return held end end
  local next_row = each(self, present(self, "name"),
    "SELECT step, name, value FROM signals ORDER BY step, name")
  local row = next_row()
  return function(step)
    while row and row.step <= step do
      held[row.name] = row.value or 0 / 0
      row = next_row()
    end
    return held
  end
end

-- A change of the precision recipe, NULL where the file is damaged.
local CHANGES = "SELECT CASE typeof(step) WHEN 'integer' THEN step END AS step, " ..
  "CASE typeof(data) WHEN 'text' THEN data END AS data FROM events WHERE kind = 'precision' " ..
  "ORDER BY id"

--- Returns the parts of the run between changes of its precision recipe, in order, as a list of
---   first        the part's first step; of the first part, 0
---   parameters   as History:parameters returns them
---   format_of    the format of each gradient (base/formats.lua), { [id] = format }
---   format       the narrowest of these formats
--- If events about such changes are damaged, they are left out, and the list's field `problem` is a
--- line that says so.
function History:parts()
  local default = formats.of(self:meta().gradients) or formats.of "f16"
  -- an older history has no column `gradient`
  local rows = collect(each(self, present(self, "id", "name", "shape"),
    "SELECT * FROM parameters ORDER BY id"))
  local parts, known, damaged, own = {}, {}, 0, {}
  local listed = { __tostring = function(list)
    local text = table_text(list, { "id", "name", "shape", "gradient" })
    return parts.problem and text .. "\n" .. parts.problem or text
  end }

  -- Returns a part. names: the names of the gradients' formats.
  local function part_of(names)
    local part = { first = 0, parameters = setmetatable({}, listed), format_of = {} }
    for i, p in ipairs(rows) do
      local format = formats.of(names[i]) or default
      part.parameters[i] = { id = p.id, name = p.name, shape = p.shape:gsub(",", " x "),
        gradient = format.name }
      part.format_of[p.id] = format
      if not part.format or format.limit < part.format.limit then part.format = format end
    end
    part.format = part.format or default
    return part
  end

  for i, row in ipairs(rows) do own[i] = row.gradient end
  parts[1] = part_of(own)
  for event in each(self, nil, CHANGES) do
    local text = event.data or ""
    if known[text] == nil then             -- a run may go back and forth between two recipes
      local good, names = pcall(function() return json.decode(text).to.gradients end)
      known[text] = good and type(names) == "table" and #names == #rows and part_of(names)
    end
    if known[text] and event.step then
      parts[#parts + 1] = merged(known[text], { first = tonumber(event.step) })
    else damaged = damaged + 1 end
  end
  parts.problem = damaged > 0 and ("formats may be wrong: the history has %s 'precision'"):format(
    show.counted(damaged, "damaged event")) or nil
  return parts
end

--- Returns the part of a list of parts that contains a step.
function M.part_at(parts, step)
  for i = #parts, 2, -1 do
    if parts[i].first <= step then return parts[i] end
  end
  return parts[1]
end

--- Returns the parameters in order: { id, name, shape, gradient }; id counts from 0, as first_bad
--- does. shape: text, such as "[256 x 64]". gradient: the format of the parameter's gradient at a
--- step, by default at the last one. An older history does not record this format; `gradient` is
--- then the format of the run's weight gradients, or f16 if the history lacks this, too.
function History:parameters(step)
  return M.part_at(self:parts(), step or math.huge).parameters
end

-- ------------------------------------------------------------------ statistics

local function unpack_stats(blob)
  fail_if(type(blob) ~= "string", "the history is damaged: expected the statistics of a step as " ..
    "a blob, got a %s", type(blob))
  local n = ffi.new("int[1]")
  check(C.eng_history_unpack(n, nil, 0, blob, #blob))
  local stats = ffi.new("eng_tensor_stats[?]", math.max(1, n[0]))
  check(C.eng_history_unpack(n, stats, n[0], blob, #blob))
  return stats, n[0]
end

--- Returns the meters of the FP8 layers whose path begins with `site` (default: all), of all
--- measured steps or of `step`. The rows { step, site, role, snr, underflow, overflow, zeros, amax,
--- least, scale_min, scale_max, count } print as a table. For replays, a row also has peak (the
--- largest magnitude of all elements), power (the sum of squares) and asked (the amax by which
--- policies scale the role in the next step; 0: its own amax; nil: its scale cannot be chosen). The
--- field `problem` of an empty list gives the reason.
function History:fp8(site, step)
  M_ffi.expect(type(site or "") == "string", site, "fp8: expected the beginning of a layer's name")
  return history_fp8.read(self, site or "", step)
end

--- Returns the statistics of a step's gradients: a list with { name, count, inf, nan, zeros,
--- underflow, amax, norm, hist, relative_scale, norm_ref } for each tensor. They describe the
--- gradients as the backward pass left them: multiplied by the loss scale and by the relative scale
--- of the tensor's layer (1 if layers have no separate scales). So `amax` and `norm` are as stored,
--- and a row of h:steps() has the true ones. norm_ref is nil without a reference backward. Returns
--- nil and a message if the step has no statistics.
function History:tensors(step)
  local row = one(self, "SELECT stats FROM tensor_stats WHERE step = ?", step)
  if not row then
    return nil, ("no statistics are recorded for step %s; history:tensor(NAME) lists the " ..
      "recorded steps"):format(tostring(step))
  end
  local stats, n = unpack_stats(row.stats)
  local names = {}
  for _, p in ipairs(self:query "SELECT id, name FROM parameters") do names[p.id] = p.name end
  local rows = {}
  for i = 0, n - 1 do
    local s = stats[i]
    rows[i + 1] = { name = names[i] or tostring(i), count = tonumber(s.count),
      inf = tonumber(s.inf), nan = tonumber(s.nan),
      zeros = tonumber(s.zeros), underflow = tonumber(s.underflow), amax = s.amax,
      norm = math.sqrt(s.sum_squares), hist = formats.add_histogram({}, s.hist),
      relative_scale = s.relative_scale > 0 and s.relative_scale or 1,
      norm_ref = s.norm_ref > 0 and s.norm_ref or nil }
    rows[i + 1].carry = rows[i + 1].relative_scale   -- the field's name in version 0.1
  end
  local columns = { "name", "count", "inf", "nan", "zeros", "underflow", "amax", "norm" }
  return setmetatable(rows, { __tostring = function(list) return table_text(list, columns) end })
end

--- Iterates over pairs of a step and the loss scale of a parameter's layer (the run's scale times
--- the layer's relative scale). id: the parameter's id in h:parameters(). The steps are the first
--- `most` steps of from..to that have statistics per tensor.
function History:layer_scales(id, from, to, most)
  local following = each(self, nil, "SELECT t.step AS step, t.stats AS stats, s.scale AS " ..
    "scale, max(s.attempt) FROM tensor_stats t JOIN steps s ON s.step = t.step WHERE t.step " ..
    "BETWEEN ? AND ? GROUP BY t.step ORDER BY t.step LIMIT ?", from, to, most)
  return function()
    local row = following()
    if not row then return nil end
    local stats, n = unpack_stats(row.stats)
    local relative = id < n and stats[id].relative_scale or 0
    return row.step, (row.scale or 0 / 0) * (relative > 0 and relative or 1)
  end
end

--- Returns the exponent histogram of a step as { [exponent] = count }, or nil if none was recorded.
function History:hist(step)
  local row = one(self, "SELECT hist FROM steps WHERE step = ? ORDER BY attempt DESC LIMIT 1", step)
  if not row or not row.hist then return nil end
  return formats.add_histogram({}, (unpack_stats(row.hist))[0].hist)
end

--- Returns totals of the whole run: { rows, first, last, overflows, skipped, failed, tokens,
--- seconds }.
function History:totals() return require("engine.run.curves").totals(self) end

--- Describes in words what happened at a step.
function History:why(step)
  M_ffi.expect(type(step) == "number", step, "why: expected a step number")
  return require("engine.run.history_why").why(self, step)
end

function History:__tostring()
  if not self.handle then return ("history %s (closed)"):format(self.path) end
  local sums = self:totals()
  if sums.rows == 0 then return ("history %s: no steps"):format(self.path) end
  local last = self:last(1)[1]
  return show.shown(("history %s: %s (%d to %d), %s, %d skipped\nlast: %s"):format(self.path,
    show.counted(sums.rows, "step"), sums.first, sums.last,
    show.counted(sums.overflows, "overflow"), sums.skipped, tostring(last)), true)
end

return M
