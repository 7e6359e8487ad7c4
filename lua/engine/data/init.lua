-- Data loaders: `engine.data`. A loader gives batches of tensors of the current step and can say and take back its place:
--   local data = engine.data.text { path = "input.txt", batch = 8, context = 256 }
--   local batch = data:next()          batch.x [8 x 256] i32, batch.y [8 x 256] i32, batch.tokens 2048
--   local place = data:state()         data:restore(place)
-- Files are mapped, not read: a loader costs no memory beyond a batch.
local M_ffi = require "engine.ffi"
local nearest = require "engine.nearest"
local order = require "engine.data.order"
local tensor = require "engine.tensor"

local ffi, C, check = M_ffi.ffi, M_ffi.C, M_ffi.check

local M = {}
local NEEDED = {}   -- an option without a default

-- ------------------------------------------------------------------ options and files

local function options_of(name, given, known)
  if type(given) ~= "table" then error(("data.%s: expected a table of options, got %s"):format(name, type(given)), 3) end
  local o = {}
  for key, value in pairs(known) do
    if value ~= NEEDED then o[key] = value end
  end
  for key, value in pairs(given) do
    if known[key] == nil then
      local names = {}
      for n in pairs(known) do names[#names + 1] = n end
      error(("data.%s: unknown option '%s'%s"):format(name, tostring(key), nearest.hint(tostring(key), names)), 3)
    end
    o[key] = value
  end
  for _, key in ipairs { "batch", "context" } do
    local v = o[key]
    if known[key] and (type(v) ~= "number" or v < 1 or v % 1 ~= 0) then
      error(("data.%s: expected %s as a whole number of 1 or more, got %s"):format(name, key, tostring(v)), 3)
    end
  end
  return o
end

local function map(path)
  local mapping = ffi.new("eng_mapping")
  check(C.eng_file_map(mapping, path))
  return ffi.gc(mapping, C.eng_file_unmap)
end

-- ------------------------------------------------------------------ the loader

local Loader = {}
Loader.__index = Loader

--- The next batch, as tensors of the step.
function Loader:next()
  local batch = self.read(self, self.at)
  self.at = self.at + 1
  return batch
end

--- Where the loader stands, as plain data.
function Loader:state() return { at = self.at, kind = self.kind, seed = self.seed, batch = self.batch } end

--- Goes back (or on) to a place. A loader of another batch size or order refuses: the batches would not be the same.
function Loader:restore(state)
  for _, key in ipairs { "kind", "seed", "batch" } do
    if state[key] ~= self[key] then
      error(("data: this place was saved with %s %s, the loader has %s"):format(key, tostring(state[key]), tostring(self[key])), 2)
    end
  end
  self.at = state.at
end

--- Batches until every example has been seen once.
function Loader:batches_per_epoch() return math.max(1, math.floor(self.examples / self.batch)) end

function Loader:__tostring()
  return ("%s: %d examples, batch %d, %s, at batch %d (epoch %.2f)"):format(self.text or self.kind, self.examples, self.batch,
    self.shuffle and "shuffled" or "in order", self.at, self.at / self:batches_per_epoch())
end

local function loader(fields)
  fields.at = 0
  return setmetatable(fields, Loader)
end

--- Example number b (from 0) of batch `at`: in order, or by the epoch's permutation.
local function example(self, at, b)
  local per_epoch = self:batches_per_epoch()
  local epoch = math.floor(at / per_epoch)
  local place = (at - epoch * per_epoch) * self.batch + b
  if not self.shuffle then return place % self.examples, epoch end
  return order.permute(place % self.examples, self.examples, self.seed, epoch), epoch
end

-- ------------------------------------------------------------------ windows of tokens

-- Windows of T+1 tokens from `tokens` (a pointer, n of them). Shuffled, each epoch cuts the file at another offset and
-- visits the pieces in another order; in order, step i row b starts at token (i*B + b)*T, starting over when the next
-- batch would not fit, as llm.c's loader does.
local function windows(o, kind, tokens, n, keep)
  local B, T = o.batch, o.context
  if n < T + 1 then error(("data.%s: %d tokens are too few for a context of %d: it takes %d"):format(kind, n, T, T + 1), 3) end
  local pieces = math.floor((n - 1) / T)
  local slack = n - 1 - pieces * T                     -- tokens left over, among which an epoch may begin
  local x, y = ffi.new("int32_t[?]", B * T), ffi.new("int32_t[?]", B * T)
  return loader {
    kind = kind, batch = B, seed = o.seed, shuffle = o.shuffle, examples = pieces, keep = keep, tokens = n,
    text = ("%s: %d tokens in windows of %d"):format(kind, n, T),
    read = function(self, at)
      for b = 0, B - 1 do
        local piece, epoch = example(self, at, b)
        local start = piece * T + (self.shuffle and order.draw(self.seed, epoch, slack + 1) or 0)
        local source, row = tokens + start, b * T
        for t = 0, T - 1 do x[row + t], y[row + t] = source[t], source[t + 1] end
      end
      return { x = tensor.from_memory(x, "i32", { B, T }), y = tensor.from_memory(y, "i32", { B, T }), tokens = B * T }
    end,
  }
end

--- Text as bytes: tokens 0..255. path: a file, or a list of files read one after the other; or text = a string.
--- from, to: the share of the text to use (0, 1), e.g. to = 0.9 for training and from = 0.9 for evaluation.
function M.text(given)
  local o = options_of("text", given, { path = false, text = false, batch = 8, context = 128, shuffle = true, seed = 1234, from = 0, to = 1 })
  local pointer, size, keep
  if type(o.text) == "string" then
    keep, pointer, size = o.text, ffi.cast("const uint8_t *", o.text), #o.text
  elseif type(o.path) == "string" then
    keep = map(o.path)
    pointer, size = ffi.cast("const uint8_t *", keep.data), tonumber(keep.size)
  elseif type(o.path) == "table" then
    local parts = {}
    for i, path in ipairs(o.path) do
      local m = map(path)
      parts[i] = ffi.string(m.data, m.size)
    end
    keep = table.concat(parts, "\n")
    pointer, size = ffi.cast("const uint8_t *", keep), #keep
  else
    error("data.text: expected path = a file or a list of files, or text = a string", 2)
  end
  if not (o.from >= 0 and o.from < o.to and o.to <= 1) then error(("data.text: expected 0 <= from < to <= 1, got %s and %s"):format(o.from, o.to), 2) end
  local first, last = math.floor(size * o.from), math.floor(size * o.to)
  return windows(o, "text", pointer + first, last - first, keep)
end

local LLMC_MAGIC = 20240520

--- A .bin file of uint16 tokens: bare as nanoGPT writes it, or with llm.c's header of 256 int32.
function M.tokens(given)
  local o = options_of("tokens", given, { path = NEEDED, batch = 8, context = 128, shuffle = true, seed = 1234, vocab = false })
  if type(o.path) ~= "string" then error("data.tokens: expected path = a .bin file of uint16 tokens", 2) end
  local keep = map(o.path)
  local bytes, base = tonumber(keep.size), ffi.cast("const uint8_t *", keep.data)
  local offset = 0
  if bytes >= 1024 and ffi.cast("const int32_t *", base)[0] == LLMC_MAGIC then
    local header = ffi.cast("const int32_t *", base)
    if header[1] ~= 1 then error(("data.tokens: %s has version %d of llm.c's format, expected 1 (uint16 tokens)"):format(o.path, header[1]), 2) end
    offset = 1024
    if header[2] * 2 + 1024 ~= bytes then
      error(("data.tokens: the header of %s names %d tokens, the file holds %d; hint: it is truncated"):format(o.path, header[2], (bytes - 1024) / 2), 2)
    end
  end
  if (bytes - offset) % 2 ~= 0 then error(("data.tokens: %s has an odd number of bytes (%d): these are no uint16 tokens"):format(o.path, bytes), 2) end
  local tokens, n = ffi.cast("const uint16_t *", base + offset), (bytes - offset) / 2
  if o.vocab then
    for i = 0, n - 1 do
      if tokens[i] >= o.vocab then
        error(("data.tokens: token %d at place %d of %s is past the vocabulary of %d"):format(tokens[i], i, o.path, o.vocab), 2)
      end
    end
  end
  return windows(o, "tokens", tokens, n, keep)
end

-- ------------------------------------------------------------------ rows of features

--- Rows held in host memory: x (a table of rows or a tensor), y likewise; batches of `batch` rows.
local function rows(o, kind, x, width, y, y_width, y_dtype, n, shape)
  local B = o.batch
  if n < 1 then error(("data.%s: there are no rows"):format(kind), 3) end
  local bx, by = ffi.new("float[?]", B * width), ffi.new("double[?]", B * y_width)
  return loader {
    kind = kind, batch = B, seed = o.seed, shuffle = o.shuffle, examples = n, width = width, text = ("%s: %d rows of %d"):format(kind, n, width),
    read = function(self, at)
      for b = 0, B - 1 do
        local i = example(self, at, b)
        for k = 0, width - 1 do bx[b * width + k] = x(i * width + k) end
        for k = 0, y_width - 1 do by[b * y_width + k] = y(i * y_width + k) end
      end
      return { x = tensor.from_memory(bx, "f32", shape and { B, unpack(shape) } or { B, width }),
        y = tensor.from_memory(by, "f64", y_width == 1 and { B } or { B, y_width }, y_dtype), tokens = B }
    end,
  }
end

--- Tensors in memory: data.tensors{ x = [N x F], y = [N] or [N x K], batch = }.
function M.tensors(given)
  local o = options_of("tensors", given, { x = NEEDED, y = NEEDED, batch = 32, shuffle = true, seed = 1234 })
  if not (tensor.is_tensor(o.x) and tensor.is_tensor(o.y)) then error("data.tensors: expected x and y as tensors", 2) end
  local n = o.x:size(1)
  if o.y:size(1) ~= n then error(("data.tensors: x has %d rows, y has %d"):format(n, o.y:size(1)), 2) end
  local xs, count = o.x:read("f32")
  local ys, y_count = o.y:read("f64")
  local shape = o.x.shape
  table.remove(shape, 1)
  return rows(o, "tensors", function(i) return xs[i] end, count / n, function(i) return ys[i] end, y_count / n, o.y.dtype, n, #shape > 1 and shape or nil)
end

--- A CSV file of numbers. target: the column (name or number from 1) that becomes y, the last by default; classes = true makes y i64.
--- A first line that is no numbers names the columns.
function M.csv(given)
  local o = options_of("csv", given, { path = NEEDED, target = false, classes = false, separator = ",", batch = 32, shuffle = true, seed = 1234 })
  local file, message = io.open(o.path or "", "r")
  if not file then error("data.csv: " .. tostring(message), 2) end
  local values, names, columns, n, line_number = {}, nil, nil, 0, 0
  for line in file:lines() do
    line_number = line_number + 1
    line = line:gsub("\r$", "")
    if line:find("%S") then
      local cells = {}
      for cell in (line .. o.separator):gmatch("(.-)" .. o.separator:gsub("%p", "%%%0")) do
        cells[#cells + 1] = cell:match('^%s*"?(.-)"?%s*$')
      end
      columns = columns or #cells
      if #cells ~= columns then error(("data.csv: %s:%d has %d columns, expected %d"):format(o.path, line_number, #cells, columns), 2) end
      local numbers, bad = {}, nil
      for i, cell in ipairs(cells) do
        numbers[i] = tonumber(cell)
        if not numbers[i] and not bad then bad = i end
      end
      if bad and not names and n == 0 then names = cells
      elseif bad then error(("data.csv: %s:%d column %d is no number: '%s'"):format(o.path, line_number, bad, cells[bad]), 2)
      else
        for i = 1, columns do values[n * columns + i] = numbers[i] end
        n = n + 1
      end
    end
  end
  file:close()
  if n == 0 then error(("data.csv: %s has no rows of numbers"):format(o.path), 2) end
  local target = o.target or columns
  if type(target) == "string" then
    local found
    for i, name in ipairs(names or {}) do if name == target then found = i end end
    if not found then error(("data.csv: %s has no column '%s'%s"):format(o.path, target, nearest.hint(target, names or {})), 2) end
    target = found
  end
  if target < 1 or target > columns then error(("data.csv: there is no column %s among %d"):format(tostring(target), columns), 2) end
  local width = columns - 1
  local self = rows(o, "csv", function(i)
    local r, k = math.floor(i / width), i % width + 1
    return values[r * columns + (k >= target and k + 1 or k)]
  end, width, function(i) return values[i * columns + target] end, 1, o.classes and "i64" or "f32", n)
  self.columns = names
  return self
end

-- ------------------------------------------------------------------ idx images (MNIST's format)

local function idx(path, what, ndim)
  local keep = map(path)
  local bytes, size = ffi.cast("const uint8_t *", keep.data), tonumber(keep.size)
  if size < 4 + 4 * ndim or bytes[0] ~= 0 or bytes[1] ~= 0 or bytes[2] ~= 8 or bytes[3] ~= ndim then
    error(("data.idx: %s is no idx file of %s (unsigned bytes, %d dimensions)"):format(path, what, ndim), 3)
  end
  local shape, count = {}, 1
  for d = 1, ndim do
    local at = 4 * d
    shape[d] = bytes[at] * 2 ^ 24 + bytes[at + 1] * 2 ^ 16 + bytes[at + 2] * 2 ^ 8 + bytes[at + 3]
    count = count * shape[d]
  end
  if size ~= 4 + 4 * ndim + count then
    error(("data.idx: %s should hold %d bytes after its header, it holds %d"):format(path, count, size - 4 - 4 * ndim), 3)
  end
  return bytes + 4 + 4 * ndim, shape, keep
end

--- Images and labels in idx files: x [B x rows*columns] f32 in 0..1, y [B] i64.
function M.idx(given)
  local o = options_of("idx", given, { images = NEEDED, labels = NEEDED, batch = 32, shuffle = true, seed = 1234 })
  local pixels, shape, keep1 = idx(o.images, "images", 3)
  local labels, label_shape, keep2 = idx(o.labels, "labels", 1)
  if label_shape[1] ~= shape[1] then error(("data.idx: %d images but %d labels"):format(shape[1], label_shape[1]), 2) end
  local self = rows(o, "idx", function(i) return pixels[i] / 255 end, shape[2] * shape[3], function(i) return labels[i] end, 1, "i64", shape[1])
  self.keep = { keep1, keep2 }
  return self
end

return nearest.guard(M, "engine.data")
