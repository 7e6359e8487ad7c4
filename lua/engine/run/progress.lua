-- Displays a running job. A terminal shows one line, which is rewritten at most ten times a second.
-- A file or a pipe gets a plain line every few seconds. With json, stdout gets one object for each
-- step.
--
--   local progress = require("engine.run.progress").new { total = 1000, json = cfg.log == "json" }
--   progress:update { step = 12, updates = 11, loss = 3.2, lr = 3e-4, scale = 65536, skipped = 1,
--                     overflow = false, amax = 0.3, norm = 1.2, tokens_per_s = 12000 }
--   progress:note("step 12: evaluation loss 3.1000")     a separate line
--   progress:finish()
--
-- `step`, `updates` and `skipped` are the numbers of attempts, updates and skipped steps so far. A
-- line also gives the number of the step in the history, where steps count from 0: it begins with
-- "step 11 (12/1000)" in this example.
--
-- A json object has exactly the fields of update() above, in that order; `overflow` is true if this
-- step overflowed. JSON has no infinity and no NaN: they are the strings "inf", "-inf" and "nan",
-- which Python's float() accepts. A missing field is null. Numbers have enough digits to read the
-- same double back. Called by scripts, train/ and cli/.
local json = require "engine.base.json"
local show = require "engine.base.show"

local progress = {}
progress.__index = progress

local json_fields = { "step", "updates", "loss", "lr", "scale", "skipped", "overflow", "amax",
  "norm", "tokens_per_s" }

local REWRITE_SECONDS = 0.1       -- between two rewrites on a terminal
local PLAIN_SECONDS = 5           -- between two plain lines

--- Returns one step as a JSON object, without a newline.
function progress.json(row)
  local fields = {}
  for i, name in ipairs(json_fields) do
    local value = row[name]
    if name ~= "overflow" then value = tonumber(value)
    elseif value ~= nil then value = value ~= 0 and value ~= false end
    fields[i] = { name, value }
  end
  return json.ordered(fields)
end

-- Writes to stdout. The first failure (a full disk, a pipe without a reader) is reported on stderr,
-- and the run continues without this output.
local function put(self, ...)
  if self.broken then return end
  local _, why = self.stream:write(...)
  if not why then _, why = self.stream:flush() end
  if not why then return end
  self.broken, self.on_line = why, false
  self:warn(("cannot write to stdout (%s); the run continues without this output"):format(why))
end

-- Returns a number of steps, or nil if it is unknown: 0, nil, or so large that it means no limit.
local function known(total) return total and total > 0 and total < 2 ^ 52 and total or nil end

--- Returns a new display. Options: total (steps of the run; 0 or nil: unknown), json (stdout gets
--- objects and nothing else), quiet (shows only warnings and notes that matter), silent (shows
--- nothing). on_stderr and specs set stream and columns (false: no terminal), and specs set clock.
function progress.new(options)
  local self = setmetatable({}, progress)
  self.total = known(options.total)
  self.json_mode, self.silent = options.json or false, options.silent or false
  self.quiet = options.quiet or self.silent
  self.stream = options.stream or io.stdout
  self.clock = options.clock or require("engine.base.machine").clock
  self.fixed_columns = options.columns
  if options.columns == nil and options.stream then self.fixed_columns = false end
  return self
end

--- Returns a display on stderr for a command that waits, for example for runs that it started. Its
--- method update { step =, text = } shows `text`.
function progress.on_stderr()
  local self = progress.new { stream = io.stderr,
    columns = require("engine.base.machine").terminal(2) or false }
  function self.line(_, row) return row.text end
  return self
end

--- Returns a function (done, all) that shows on stderr how much of a command's work is done, its
--- speed and the time left. what: the unit, such as "bytes".
function progress.amount(what)
  local bar = progress.on_stderr()
  local began = bar.clock()
  bar.shown_at = began                             -- delays the first line by an interval
  function bar.line(_, row, now)
    local took = math.max(now - began, 1e-6)
    return ("%s of %s %s  %s %s/s%s"):format(show.count(row.step), show.count(row.all), what,
      show.count(row.step / took), what, row.step < row.all and row.step > 0
      and "  ETA " .. show.duration(took / row.step * (row.all - row.step)) or "")
  end
  return function(done, all)
    bar.total = all
    bar:update { step = done, all = all }
    if done == all then bar:finish() end
  end
end

--- Sets the number of steps of the run, as the option `total`.
function progress:expect(total) self.total = known(total) end

--- Returns the number of columns of the terminal, or false if stdout is not a terminal.
function progress:columns()
  if self.fixed_columns ~= nil then return self.fixed_columns end
  -- mpirun gives ranks a terminal even if its own output is a file
  if require("engine.dist.ranks").size() > 1 then return false end
  return require("engine.base.machine").terminal(1) or false
end

--- Returns the live line for one step, without a line end. row.unscaled: true hides the scale.
function progress:line(row, now)
  local parts = {}
  parts[1] = ("step %d"):format(row.step - 1)
  if self.total then parts[1] = ("%s (%d/%d)"):format(parts[1], row.step, self.total) end
  if row.loss then parts[#parts + 1] = ("loss %.4f"):format(row.loss) end
  if row.scale and not row.unscaled then parts[#parts + 1] = "scale " .. show.scale(row.scale) end
  parts[#parts + 1] = ("skipped %d"):format(row.skipped or 0)
  if row.tokens_per_s and row.tokens_per_s > 0 then
    parts[#parts + 1] = ("%s %s/s"):format(show.count(row.tokens_per_s), row.unit or "tokens")
  end
  if self.total and self.started and row.step > self.first_step and row.step < self.total then
    local left = (now - self.started) / (row.step - self.first_step) * (self.total - row.step)
    parts[#parts + 1] = "ETA " .. show.duration(math.max(0, left))
  end
  if row.shadows then parts[#parts + 1] = show.shown(row.shadows:text()) end
  if row.overflow and row.overflow ~= 0 then parts[#parts + 1] = "overflow" end
  return table.concat(parts, "  ")
end

-- Returns the live line, cut at the width of the terminal, which may have changed.
local function fitted(self, row, now)
  return show.cut(self:line(row, now), (self:columns() or 80) - 1, "")
end

-- Writes the line of the last step.
local function draw(self, now)
  if self.live then put(self, "\r", fitted(self, self.last, now), "\27[K")
  else put(self, self:line(self.last, now), "\n") end
  self.on_line, self.shown_at, self.pending = self.live, now, false
end

--- Shows a step; called once for each step.
function progress:update(row)
  if self.quiet then return end
  if self.json_mode then
    put(self, progress.json(row), "\n")
    return
  end
  local now = self.clock()
  if not self.started then self.started, self.first_step = now, row.step end
  self.last = row
  local last_step = self.total and row.step >= self.total
  if self.live == nil then self.live = self:columns() ~= false end
  local every = self.live and REWRITE_SECONDS or PLAIN_SECONDS
  if self.shown_at and now - self.shown_at < every and not last_step then
    self.pending = true
    return
  end
  draw(self, now)
end

--- Prints a separate line. In json mode the line goes to stderr, so that stdout holds only objects.
--- In quiet mode only a line with matters = true is printed, to stderr.
function progress:note(text, matters)
  if self.silent or self.quiet and not matters then return end
  text = show.shown(text, true)
  if self.json_mode or self.quiet then
    io.stderr:write(text .. "\n")
    return
  end
  put(self, self.on_line and "\r\27[K" or "", text, "\n", self.on_line and self.last
    and fitted(self, self.last, self.clock()) or "")
end

--- Prints a warning on stderr, for example that a file cannot be written. Quiet mode prints it too;
--- silent mode does not.
function progress:warn(text)
  if self.silent then return end
  if self.on_line then put(self, "\r\27[K") end
  io.stderr:write("engine: " .. show.shown(text, true) .. "\n")
end

--- Shows the last step and ends the line.
function progress:finish()
  if self.quiet or self.json_mode or not self.last then return end
  if self.pending then draw(self, self.clock()) end
  if self.on_line then put(self, "\n") end
  self.on_line, self.pending, self.last = false, false, nil
end

return progress
