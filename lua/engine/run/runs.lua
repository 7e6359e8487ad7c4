-- Finds and lists the runs of a folder: their settings, their progress and how they ended. Used by
-- the commands, the reports, contest.lua, compare.lua, trace.lua and verify.lua.
local M_ffi = require "engine.base.ffi"
local files = require "engine.base.file"

local M = {}

-- Returns the paths that a name may stand for: the name itself, and a folder under runs/.
local function places(text) return { text, "runs/" .. text } end

-- Returns the names of the folders in `dir` that hold a run.
local function names_in(dir)
  local names = {}
  for _, name in ipairs(files.names(dir) or {}) do
    if files.exists(dir .. "/" .. name .. "/history.db") then names[#names + 1] = name end
  end
  return names
end

--- Returns a hint for a run that does not exist: the nearest name under runs/; if `text` names a
--- folder of runs (a contest), how to list them; if it names the folder of a run without a history,
--- what remains of the run.
function M.hint(text)
  text = text:gsub("/+$", "")
  for _, dir in ipairs(places(text)) do
    if files.is_folder(dir .. "/checkpoints") then
      local left = #require("engine.run.checkpoint").steps(dir .. "/checkpoints")
      return ("; there is no file %s/history.db: it was deleted, or the run had the option " ..
        "history = false; hint: %s"):format(dir, left > 0 and "resume=auto continues the run " ..
        "from its last checkpoint, with a new history" or "start the run again")
    end
    local name = names_in(dir)[1]
    if name then
      return ("; %s is a folder of runs; hint: `engine runs %s` lists them, and %s/%s names one")
        :format(dir, dir, dir, name)
    end
  end
  return require("engine.base.nearest").hint(text:match("[^/]*$"), names_in "runs") ..
    "; hint: `engine runs` lists them"
end

--- Finds the directory (or history file) of a run from its path or its name under runs/. If there
--- is no such run, raises an error that suggests the nearest name.
function M.find(text)
  M_ffi.expect(type(text) == "string", text, "expected the name or the directory of a run")
  if files.is_file(text) then return text end
  for _, dir in ipairs(places(text)) do
    if files.exists(dir .. "/history.db") then return dir end
  end
  error(("there is no run '%s'%s"):format(text, M.hint(text)), 0)
end

--- Returns the directory of a run. path: the directory, or the history file in it.
function M.folder(path) return files.is_file(path) and (path:match("^(.*)/") or ".") or path end

--- Returns the id of the process that holds the directory of the run at `path`, and its state from
--- /proc ("T": stopped by a signal). Returns nil if there is no such process, or if it is a zombie.
function M.holder(path)
  local pid = tonumber((files.read(M.folder(path) .. "/lock") or ""):match("^%d+"))
  local stat = pid and files.read(("/proc/%d/stat"):format(pid)) or ""
  local state = stat:match("^.*%)%s+(%a)")
  if state == nil or state == "Z" or state == "X" then return nil end
  return pid, state
end

--- Returns two values that say how a run ended. The first is a text: "finished", "stopped: why",
--- "error: why", "drift: which ranks" (those whose weights drifted apart) or, if the history
--- records no end, "running" or "died". The second is the field `how` of M.info. last: the last
--- recorded step.
function M.ending(h, path, last)
  local alive = M.holder(path)      -- asked first, because a run records its end before it exits
  local event = h:query("SELECT kind, text, step FROM events WHERE kind IN ('finished', " ..
    "'stopped', 'error', 'drift', 'resumed') ORDER BY id DESC LIMIT 1")[1]
  if event and event.kind ~= "resumed" and event.step > last then
    local why = event.text and event.text ~= "" and ": " .. event.text:match("^[^\n]*") or ""
    return event.kind .. why, event.kind
  end
  if alive then return "running", "running" end
  return "died", "broken"
end

--- Returns the name of the policy that the run used last, or nil.
function M.policy_of(h)
  for event in h:each("SELECT data FROM events WHERE kind IN ('swap', 'swap_refused') AND id > " ..
    "coalesce((SELECT max(id) FROM events WHERE kind = 'resumed'), 0) ORDER BY id DESC") do
    local good, data = pcall(require("engine.base.json").decode, event.data or "")
    if good and type(data) == "table" and type(data.to) == "table" and not data.fp8 then
      return data.to.name                                  -- of a refused swap: the old policy
    end
  end
  local policies = h:policies()
  return h:meta().policy or policies[1] and policies[1].name
end

--- Describes the run at `path`: { name, path, created (seconds since 1970), rows, first, last,
--- updates, loss, scale, overflows, skipped, failed (steps in which the policy failed), tokens,
--- seconds, policy, precision, optimizer, schedule, device, ranks, zero, comm_dtype, parameters
--- (how many), steps (requested), engine (its version), ended, how (finished, stopped, error,
--- drift, running, broken), problem (what is wrong with the history; most other fields are then
--- missing), failed_shadows (how many) }.
function M.info(path, history)
  local name = path:gsub("/history%.db$", ""):match("([^/]+)/*$") or path
  local info = { name = name, path = path }
  local h = history
  local good, message = pcall(function()
    h = h or require("engine.run.history").open(path)
    local meta = h:meta()
    local created = h:query("SELECT strftime('%s', value) AS seconds FROM meta WHERE key = " ..
      "'created'")[1]
    info.created = created and tonumber(created.seconds)
    info.precision, info.device, info.optimizer, info.schedule = meta.precision, meta.device,
      meta.optimizer, meta.schedule
    info.ranks, info.zero = tonumber(meta.ranks) or 1, tonumber(meta.zero) or 0
    info.comm_dtype = meta.comm_dtype or meta.wire or "own"   -- `wire` is its name in version 0.1
    info.parameters, info.steps, info.engine = tonumber(meta.parameters), tonumber(meta.steps),
      meta.engine
    for key, value in pairs(h:totals()) do info[key] = value end
    info.ended, info.how = M.ending(h, path, info.last or -1)
    info.failed_shadows = #h:events "shadow_failed"
    local last = h:last(1)[1]      -- nil with rows > 0: the file is damaged
    if info.rows > 0 and last then
      info.updates, info.loss, info.scale = last.updates + (last.action == "step" and 1 or 0),
        last.loss, last.next_scale
      info.policy = M.policy_of(h)
    end
  end)
  if h and not history then h:close() end
  if not good then info.problem = M_ffi.without_line(message) end
  return info
end

--- Lists the runs of a folder (default "runs"), newest last. Returns the list and the folder, which
--- is `text` or runs/`text`. If the folder is itself a run, the list contains it. Raises an error
--- if there is no such folder.
function M.list(text)
  local dir = text or "runs"
  if text and not files.is_folder(text) then
    dir = "runs/" .. text
    M_ffi.fail_if(not files.is_folder(dir), "there is no folder '%s' or '%s'; hint: `engine " ..
      "runs` lists the runs under runs/", text, dir)
  end
  local list = {}
  if files.exists(dir .. "/history.db") then list[1] = M.info(dir) end
  for _, name in ipairs(names_in(dir)) do list[#list + 1] = M.info(dir .. "/" .. name) end
  table.sort(list, function(a, b)
    if (a.created or 0) ~= (b.created or 0) then return (a.created or 0) < (b.created or 0) end
    return a.name < b.name
  end)
  return list, dir
end

return M
