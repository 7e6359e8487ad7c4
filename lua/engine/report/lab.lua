-- Helpers for studies: data and text to train on, training of a small GPT, tables of results, and
-- curves of these results in an SVG file. Used by examples.
--
--   lab.table({ "K", "none", "128" }, { { 1024, "1.5 %", "0.05 %" }, ... })
--   lab.svg("error.svg", { title =, x = { "1024", "4096" }, y = "K" (the title of the x axis),
--     log = 10 or nil, series = { { name =, values = { ... } } } })
local chart = require "engine.report.chart"
local files = require "engine.base.file"
local show = require "engine.base.show"

local M = {}

--- Prints rows under column headings; the first column is aligned to the left.
function M.table(heads, rows)
  local texts = {}
  for i = 0, #rows do
    local row, text = rows[i] or heads, {}
    for c = 1, #heads do text[c] = tostring(row[c] == nil and "" or row[c]) end
    texts[i + 1] = text
  end
  print(show.table(texts, { true }))
end

--- Returns the median of a list of numbers.
function M.median(list)
  local sorted, n = {}, #list
  for i = 1, n do sorted[i] = list[i] end
  table.sort(sorted)
  return n % 2 == 1 and sorted[(n + 1) / 2] or (sorted[n / 2] + sorted[n / 2 + 1]) / 2
end

--- Returns the mean and the standard deviation of a list; the deviation of a single number is 0.
M.mean = require("engine.base.statistics").mean_and_spread

--- Returns the mean and the standard deviation of a list as text, such as "0.3918 +- 0.0012", both
--- printed with `format`. For a single number, returns only that number.
function M.mean_text(list, format)
  local mean, spread = M.mean(list)
  if #list < 2 then return format:format(mean) end
  return ("%s +- %s"):format(format:format(mean), format:gsub("%+", ""):format(spread))
end

-- ------------------------------------------------------------------ generated text

local NOUNS = { "engine", "scale", "gradient", "tensor", "layer", "step", "number", "model",
  "weight", "loss", "batch", "policy", "river", "garden", "lamp",
  "mountain", "letter", "window", "clock", "bridge" }
local ADJECTIVES = { "small", "large", "quiet", "patient", "early", "infinite", "honest", "broken",
  "steady", "narrow" }
local VERBS = { "follows", "carries", "remembers", "divides", "crosses", "measures", "loses",
  "doubles", "waits for", "looks at" }
local ENDS = { ".\n", ". ", ". ", ". ", "; ", ", and " }

--- Returns a text of about `bytes` bytes. It is the same on every machine, so that the figures of
--- examples are reproducible; a different `seed` gives different sentences. The sentences follow a
--- small grammar, and some words are more common than others, so that a model has something to
--- learn.
function M.text(bytes, seed)
  -- a linear congruential generator with the constants of Numerical Recipes; the factor on the
  -- seed, 2^32 / the golden ratio, moves the states of neighbouring seeds apart
  local state = (seed or 1) * 2654435769 % 2 ^ 32
  local function draw(n)
    state = (state * 1664525 + 1013904223) % 2 ^ 32
    return math.floor(state / 2 ^ 32 * n)
  end
  -- Later words are more common.
  local function pick(list) return list[math.floor(draw(#list * #list) ^ 0.5) + 1] end
  local parts, length, fresh = {}, 0, true
  while length < bytes do
    local noun, other = pick(NOUNS), pick(NOUNS)
    local sentence = ("%s %s%s %s %s %s"):format(fresh and (draw(3) == 0 and "Every" or "The")
      or "the", draw(2) == 0 and pick(ADJECTIVES) .. " " or "", noun,
      pick(VERBS), noun:byte() % 2 == 0 and "its" or "the", other)
    if draw(5) == 0 then sentence = sentence .. (" %d times"):format(2 + draw(7)) end
    local stop = ENDS[draw(#ENDS) + 1]
    fresh = stop:sub(1, 1) == "."
    parts[#parts + 1] = sentence .. stop
    length = length + #sentence + #stop
  end
  return table.concat(parts)
end

--- Returns the text to train on: the content of the file `path` or, if `path` is "", generated text
--- of about `bytes` bytes.
function M.corpus(path, bytes)
  if path == "" then return M.text(bytes) end
  local file, why = io.open(path, "rb")
  if not file then error("cannot read " .. why, 0) end
  local text = file:read("*a")
  file:close()
  return text
end

--- Returns an endless loader for engine.trainer. Its batch i is make(i), so a resumed run gets the
--- same batches. i counts from first + 1; `first` is 0 by default.
function M.loader(make, first)
  local loader = { at = first or 0 }
  function loader:next()
    self.at = self.at + 1
    return make(self.at)
  end
  function loader:state() return { at = self.at } end
  function loader:restore(state) self.at = state.at end
  return loader
end

-- ------------------------------------------------------------------ training

--- Trains a small GPT over bytes and returns its loss on held-out text. o: sizes (the study's
--- settings batch, context, width, layers, heads, steps, lr), seed, precision (a recipe), text,
--- held_out (another text), schedule (default: cosine), change (a function that changes the model
--- before it trains), loss and on_step (as in engine.trainer).
function M.train(o)
  local optim, schedule = require "engine.train.optim", require "engine.train.schedule"
  local nn, sizes = require "engine.nn", o.sizes
  require("engine.base.ffi").C.eng_seed(o.seed)
  local model = nn.gpt { vocab = 256, context = sizes.context, width = sizes.width,
    heads = sizes.heads or 2, layers = sizes.layers }
  if o.change then o.change(model) end
  local function data(text, seed)
    return require("engine.data").text { text = text, batch = sizes.batch,
      context = sizes.context, seed = seed }
  end
  local trainer = require("engine.train.assemble").new { model = model,
    data = data(o.text, o.seed), steps = sizes.steps, clip = 1, log = "quiet",
    optimizer = optim.adamw(model, { lr = sizes.lr, decay = "matrices", precision = o.precision }),
    schedule = o.schedule or schedule.cosine { lr = sizes.lr, total = sizes.steps,
      warmup = math.ceil(sizes.steps / 20) },
    loss = o.loss, on_step = o.on_step }
  trainer:run()
  return trainer:evaluate_on(data(o.held_out, 1), 20)
end

--- Calls run(case, seed, result) for each case with the seeds 1 to n. run returns a loss. A case is
--- a name, or a table with the name in its field `name` or at index 1. Returns a list of results,
--- { name, losses, excess, values }, and the base: the result called bf16, or else the first.
--- losses and excess are lists by seed: the loss, and the percentage by which it exceeds the base's
--- loss with the same seed. values is a table for run to fill, such as a curve for M.svg.
function M.by_seed(cases, n, run)
  local results, base = {}, nil
  for i, case in ipairs(cases) do
    local r = { name = type(case) == "table" and (case.name or case[1]) or case, losses = {},
      excess = {}, values = {} }
    for seed = 1, n do r.losses[seed] = run(case, seed, r) end
    results[i] = r
    if r.name == "bf16" then base = base or r end
  end
  base = base or results[1]
  for _, r in ipairs(results) do
    for seed = 1, n do r.excess[seed] = 100 * (r.losses[seed] / base.losses[seed] - 1) end
  end
  return results, base
end

--- Returns the rows of a table of results, a result of M.by_seed: the name, then mean and deviation
--- of the losses and of the excess in percent. The excess is printed with `format`.
function M.loss_rows(results, format)
  local rows = {}
  for i, r in ipairs(results) do
    rows[i] = { r.name, M.mean_text(r.losses, "%.4f"), M.mean_text(r.excess, format) .. " %" }
  end
  return rows
end

-- ------------------------------------------------------------------ curves

--- Writes curves over named x positions to the file `path` and prints the path; does nothing if
--- the path is "". Values that are not finite are left out. o: see the top of the file.
function M.svg(path, o)
  if path == "" then return end
  local c = { x = {}, places = o.x, unit = o.y, width = 1, first = 1, last = #o.x }
  local series = {}
  for i in ipairs(o.x) do c.x[i] = i end
  for k, s in ipairs(o.series) do
    local values = {}
    for i, v in pairs(s.values) do values[i] = v and v - v == 0 and v or nil end
    c[k] = { min = values, mean = values, max = values }
    series[k] = { column = k, name = s.name, join = true }
  end
  files.write(path, chart.file(o.title, { { title = "by " .. o.y, c = c, series = series,
    log = o.log, height = 300 } }))
  print(path)
end

return M
