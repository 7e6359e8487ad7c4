-- Data loaders: `engine.data`. A loader yields batches of tensors for the current step; its
-- position can be saved and restored:
--   local data = engine.data.text { path = "input.txt", batch = 8, context = 256 }
--   local batch = data:next()       batch.x [8 x 256] i32, batch.y [8 x 256] i32, batch.tokens 2048
--   local place = data:state()      data:restore(place)
-- Files of tokens, of bytes and of idx images are mapped, so that their loaders need no memory
-- beyond a batch. Documents are read one at a time (records.lua). Tables of CSV, lists of text
-- files and the tensors of data.tensors are copied into memory. Called by scripts and
-- report/lab.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local files = require "engine.base.file"
local documents = require "engine.data.documents"
local images = require "engine.data.images"
local mix = require "engine.data.mix"
local nearest = require "engine.base.nearest"
local order = require "engine.data.order"
local packed = require "engine.data.packed"
local position = require "engine.data.position"
local records = require "engine.data.records"
local tensor = require "engine.tensor.tensor"

local ffi, expect, raise, raise_if, value_text = M_ffi.ffi, M_ffi.expect, M_ffi.raise,
  M_ffi.raise_if, M_ffi.value_text
local read_named = arguments.read_named

local M = {}
local NEEDED = {}   -- marks an option without a default

-- ------------------------------------------------------------------ options and files

local function at_least(least)
  return { ("a whole number of %d or more"):format(least), function(v)
    return type(v) == "number" and v >= least and v % 1 == 0
  end }
end
local is_boolean = { "true or false", function(v) return type(v) == "boolean" end }
local is_name = { "a name", function(v) return type(v) == "string" end }
local is_id = { "the id or the text of a token, or false", function(v)
  if type(v) == "number" then return v >= 0 and v < 2 ^ 31 and v % 1 == 0 end
  return not v or type(v) == "string"
end }

-- Option -> { a description of its valid values, for messages; a function that tests a value }.
local CHECKS = { batch = at_least(1), context = at_least(1), seed = at_least(0),
  size = at_least(1), count = at_least(1), shuffle = is_boolean, flip = is_boolean,
  noise = { "a number of 0 or more", function(v) return type(v) == "number" and v >= 0 end },
  classes = is_boolean, pack = is_boolean, check = is_boolean,
  end_token = is_id, field = is_name, column = is_name, messages = is_name, prompt = is_name,
  chosen = is_name, rejected = is_name,
  bad = { "stop or skip", function(v) return v == "stop" or v == "skip" end },
  by = { "line or paragraph", function(v) return v == "line" or v == "paragraph" end },
  template = { "a function from a role to two texts, or a tokenizer", function(v)
    return type(v) == "function" or type(v) == "table" and v.apply_chat_template ~= nil
  end },
  dtype = { "u16 or u32", function(v) return v == "u16" or v == "u32" end },
  separator = { "one byte other than a quote or a line end",
    function(v) return type(v) == "string" and v:find('^[^"\r\n]$') end },
  vocab = { "a number of tokens, at least 1, or false", function(v)
    return v == false or type(v) == "number" and v >= 1
  end } }

-- Returns the given options, and defaults for the options that are not given. known: option ->
-- default, or NEEDED.
local function options_of(name, given, known)
  local o = arguments.merged(known, read_named(given
    or raise("data.%s: expected a table of options, got nothing", name), "data." .. name, known))
  for key, value in pairs(o) do
    if value == NEEDED then o[key] = nil end
  end
  for _, key in ipairs(nearest.keys(known)) do
    local check_of = CHECKS[key]
    if check_of and not check_of[2](o[key]) then
      raise("data.%s: expected %s to be %s, got %s", name, key, check_of[1], value_text(o[key]))
    end
  end
  return o
end

-- what: the function of `data`. option: its option that holds the path, or nil for "path".
local function want_path(path, what, option)
  expect(type(path) == "string", path, "data.%s: expected %s to be the path of a %s", what,
    option or "path", what == "images" and "folder" or "file")
end

local function map(path, what, option)
  want_path(path, what, option)
  return files.map(path)
end

-- ------------------------------------------------------------------ the loader

local Loader = {}
Loader.__index = Loader

--- Returns the next batch, as tensors of the current step.
function Loader:next()
  local batch = self.read(self, self.at)
  self.at = self.at + 1
  return batch
end

--- Skips n batches.
function Loader:skip(n) self.at = self.at + arguments.want_whole(n, "data.skip", "n", 0) end
Loader.__call = position.no_loop

-- Fields that must be equal in a saved position and in the loader that continues from it. If one of
-- them differs, the position refers to other batches.
local IDENTITY = { "kind", "seed", "batch", "context", "shuffle", "examples" }

--- Returns the loader's position as plain data. `order` is the version of the shuffled order.
function Loader:state()
  local state = { at = self.at, order = self.order }
  for _, key in ipairs(IDENTITY) do state[key] = self[key] end
  return state
end

--- Moves to a saved position. The loader continues with the version of the shuffled order that the
--- position names. Refuses a position that was saved by another kind of loader, or with another
--- seed, batch, context, shuffle or number of examples.
function Loader:restore(state) self.at, self.order = position.check(state, self, IDENTITY) end

--- Returns the number of batches in an epoch, at least 1. Leftover examples that do not fill a
--- batch are not used in that epoch. If there are fewer examples than a batch has, it repeats some.
function Loader:batches_per_epoch() return math.max(1, math.floor(self.examples / self.batch)) end

function Loader:__tostring()
  return ("%s: %d examples, batch %d, %s, at batch %d (epoch %.2f)"):format(self.text or self.kind,
    self.examples, self.batch,
    self.shuffle and "shuffled" or "in order", self.at, self.at / self:batches_per_epoch())
end

local function loader(fields)
  fields.at, fields.order = 0, order.newest
  return setmetatable(fields, Loader)
end

--- Returns the index of example b of batch `at`, and the epoch; all count from 0. Examples come in
--- the order of the data or, with shuffling, of the epoch's permutation.
local function example(self, at, b)
  local per_epoch = self:batches_per_epoch()
  local epoch = math.floor(at / per_epoch)
  local place = (at - epoch * per_epoch) * self.batch + b
  if not self.shuffle then return place % self.examples, epoch end
  return order.permute(place % self.examples, self.examples, self.seed, epoch, self.order), epoch
end

-- ------------------------------------------------------------------ windows of tokens

local OF_STEP = { keep = false }   -- a batch is freed with its step, even outside engine.steps

-- Makes a loader of windows of T+1 tokens from `tokens`, a pointer to n tokens. keep: the object
-- that owns the pointer's memory; the loader keeps it alive. With shuffling, each epoch cuts the
-- tokens at its own offset and visits the pieces in its own order. Without shuffling, row b of
-- batch i (both from 0) starts at token (i*B + b)*T. When too few tokens are left for a batch,
-- reading starts again from the beginning, as in llm.c's loader.
local function windows(o, kind, tokens, n, keep)
  local B, T = o.batch, o.context
  if n < T + 1 then
    local part = o.from and (o.from > 0 or o.to < 1)
      and (" (its part from %g to %g)"):format(o.from, o.to) or ""
    raise("data.%s: %d tokens of %s%s are too few for a context of %d, which needs %d", kind, n,
      type(o.path) == "table" and nearest.few(o.path) or o.path or "the text", part, T, T + 1)
  end
  arguments.want_batch(kind, B, T, "tokens")
  local pieces = math.floor((n - 1) / T)
  local slack = n - 1 - pieces * T  -- spare tokens; an epoch first skips 0 to `slack` tokens
  local x, y = ffi.new("int32_t[?]", B * T), ffi.new("int32_t[?]", B * T)
  return loader {
    kind = kind, batch = B, context = T, seed = o.seed, shuffle = o.shuffle, examples = pieces,
    keep = keep, tokens = n, text = ("%s: %d tokens in windows of %d"):format(kind, n, T),
    read = function(self, at)
      for b = 0, B - 1 do
        local piece, epoch = example(self, at, b)
        local start = piece * T + (self.shuffle and order.draw(self.seed, epoch, slack + 1) or 0)
        local source, row = tokens + start, b * T
        for t = 0, T - 1 do x[row + t], y[row + t] = source[t], source[t + 1] end
      end
      return { x = tensor.from_memory(x, "i32", { B, T }, OF_STEP),
        y = tensor.from_memory(y, "i32", { B, T }, OF_STEP), tokens = B * T }
    end,
  }
end

local function want_share(kind, o)
  raise_if(type(o.from) ~= "number" or type(o.to) ~= "number"
    or not (o.from >= 0 and o.from < o.to and o.to <= 1),
    "data.%s: expected 0 <= from < to <= 1, got %s and %s", kind, value_text(o.from),
    value_text(o.to))
end

--- Reads text whose bytes are the tokens, 0 to 255. path: a file, or a list of files, which are
--- joined with a newline between them; or text = a string. from, to: the share of the text to use
--- (0 to 1), such as to = 0.9 for training and from = 0.9 for evaluation.
function M.text(given)
  local o = options_of("text", given, { path = false, text = false, batch = 8, context = 128,
    shuffle = true, seed = 1234, from = 0, to = 1 })
  raise_if(o.path and o.text, "data.text: expected path or text, got both")
  local pointer, size, keep
  if type(o.text) == "string" then
    keep, pointer, size = o.text, ffi.cast("const uint8_t *", o.text), #o.text
  elseif type(o.path) == "string" then
    keep = map(o.path, "text")
    pointer, size = ffi.cast("const uint8_t *", keep.data), tonumber(keep.size)
  elseif type(o.path) == "table" then
    arguments.want_list(o.path, "data.text", "path", "{ 'a.txt', 'b.txt' }")
    if #o.path == 0 then raise("data.text: expected at least one file, got an empty list") end
    local parts = {}
    for i, path in ipairs(o.path) do
      local m = map(path, "text")
      parts[i] = ffi.string(m.data, m.size)
    end
    keep = table.concat(parts, "\n")
    pointer, size = ffi.cast("const uint8_t *", keep), #keep
  else
    raise("data.text: expected path = a file or a list of files, or text = a string")
  end
  want_share("text", o)
  local first, last = math.floor(size * o.from), math.floor(size * o.to)
  return windows(o, "text", pointer + first, last - first, keep)
end

local LLMC_MAGIC, LLMC_MAGIC_32 = 20240520, 20240801
local WIDTHS, LONG = { u16 = 2, u32 = 4 }, { u16 = "uint16", u32 = "uint32" }
local POINTERS = { u16 = ffi.typeof "const uint16_t *", u32 = ffi.typeof "const uint32_t *" }

-- Reads the header of a file of tokens. Returns the dtype, the size of the header in bytes, and the
-- number of tokens. Returns nil, 0 and nil if there is no header. base: the mapped file, which has
-- `bytes` bytes.
local function header_of(path, base, bytes)
  local header = ffi.cast("const int32_t *", base)
  if bytes >= 10 and ffi.string(base, 6) == "\147NUMPY" then
    local wide = base[6] >= 2
    local size = base[8] + 256 * base[9] + (wide and bytes >= 12 and 65536 * base[10] or 0)
    local start = wide and 12 or 10
    local text = ffi.string(base + start, math.max(0, math.min(size, bytes - start)))
    local kind = text:match "'descr':%s*'[<|]u([24])'"
    local count = tonumber(text:match "'shape':%s*%((%d+),%)")
    if not kind or not count then
      text = text:gsub("%s+$", "")
      raise("data.tokens: expected %s to be a .npy file of one dimension and dtype <u2 or <u4, "
        .. "got the header %s", path, value_text(text))
    end
    return kind == "2" and "u16" or "u32", start + size, count
  elseif bytes >= 1024 and (header[0] == LLMC_MAGIC or header[0] == LLMC_MAGIC_32) then
    local dtype, version = "u16", 1
    if header[0] == LLMC_MAGIC_32 then dtype, version = "u32", 7 end
    raise_if(header[1] ~= version, "data.tokens: %s has version %d of llm.c's format, expected " ..
      "%d (%s tokens)", path, header[1], version, LONG[dtype])
    return dtype, 1024, header[2]
  end
  return nil, 0, nil
end

--- Reads a file of tokens in one of three formats: uint16 without a header, as nanoGPT writes it
--- (or uint32 with dtype = "u32"); the format of llm.c, with a header of 256 int32; or .npy of u16
--- or u32, as `engine data tokenize` writes it. vocab: the size of the vocabulary; a token id of
--- `vocab` or more is an error.
function M.tokens(given)
  local o = options_of("tokens", given, { path = NEEDED, batch = 8, context = 128, shuffle = true,
    seed = 1234, vocab = false, dtype = "u16" })
  local keep = map(o.path, "tokens")
  local bytes, base = tonumber(keep.size), ffi.cast("const uint8_t *", keep.data)
  local dtype, offset, n = header_of(o.path, base, bytes)
  dtype = dtype or o.dtype
  local width = WIDTHS[dtype]
  local held = (bytes - offset) / width
  if n and n ~= held then
    raise("data.tokens: the header of %s gives %d tokens, but the file holds %s%s", o.path, n,
      tostring(held), n > held and "; the file is truncated" or "")
  elseif held % 1 ~= 0 then
    raise("data.tokens: expected %s to hold %s tokens, got %d bytes, which is not a multiple of "
      .. "%d; hint: `engine data tokenize` converts a text to tokens", o.path, LONG[dtype], bytes,
      width)
  end
  local tokens = ffi.cast(POINTERS[dtype], base + offset)
  n = held
  if o.vocab then
    for i = 0, n - 1 do
      if tokens[i] >= o.vocab then
        raise("data.tokens: token %d at position %d of %s is outside the vocabulary of %d; " ..
          "hint: the file may be for another tokenizer", tokens[i], i, o.path, o.vocab)
      end
    end
  end
  return windows(o, "tokens", tokens, n, keep)
end

-- ------------------------------------------------------------------ rows of features

--- Makes a loader of n rows, with o.batch rows in a batch. x and y are { get, shape = the shape of
--- a row, dtype }. get(i) returns element i (from 0) of all rows laid end to end.
local function rows(o, kind, x, y, n)
  local B, width, y_width = o.batch, 1, 1
  for _, size in ipairs(x.shape) do width = width * size end
  for _, size in ipairs(y.shape) do y_width = y_width * size end
  if n < 1 then raise("data.%s: expected at least one row, got none", kind) end
  arguments.want_batch(kind, B, math.max(width, y_width), "elements")
  local bx, by = ffi.new("double[?]", B * width), ffi.new("double[?]", B * y_width)
  local x_options, y_options = { dtype = x.dtype, keep = false }, { dtype = y.dtype, keep = false }
  return loader {
    kind = kind, batch = B, seed = o.seed, shuffle = o.shuffle, examples = n, width = width,
    unit = "examples",                                   -- what batch.tokens counts
    text = ("%s: %d rows of %d"):format(kind, n, width),
    read = function(self, at)
      for b = 0, B - 1 do
        local i = example(self, at, b)
        for k = 0, width - 1 do bx[b * width + k] = x.get(i * width + k) end
        for k = 0, y_width - 1 do by[b * y_width + k] = y.get(i * y_width + k) end
      end
      return { x = tensor.from_memory(bx, "f64", { B, unpack(x.shape) }, x_options),
        y = tensor.from_memory(by, "f64", { B, unpack(y.shape) }, y_options), tokens = B }
    end,
  }
end

--- Takes examples from tensors in memory: data.tensors{ x = [N x ..], y = [N x ..], batch = }. Row
--- i of x and of y is an example. A batch has the dtypes and the row shapes of x and y.
function M.tensors(given)
  local o = options_of("tensors", given, { x = NEEDED, y = NEEDED, batch = 32, shuffle = true,
    seed = 1234 })
  local sides, n = {}, nil
  for _, key in ipairs { "x", "y" } do
    local side = o[key]
    expect(tensor.is_tensor(side), side, "data.tensors: expected %s to be a tensor", key)
    raise_if(side.ndim < 1, "data.tensors: expected %s to have rows, got shape %s", key,
      tensor.shape_text(side.shape))
    raise_if(n and side:size(1) ~= n, "data.tensors: expected x and y to have the same number " ..
      "of rows, got %d and %d", n, side:size(1))
    n = side:size(1)
    local values, shape = side:read("f64"), side.shape
    table.remove(shape, 1)
    sides[key] = { get = function(i) return values[i] end, shape = shape, dtype = side.dtype }
  end
  return rows(o, "tensors", sides.x, sides.y, n)
end

--- Reads a CSV file of numbers. target: the column (its name, or its index from 1) that becomes y,
--- by default the last; classes = true makes y i64. separator: the character between cells (",").
--- If a cell of the first line is not a number, this line names the columns.
function M.csv(given)
  local o = options_of("csv", given, { path = NEEDED, target = false, classes = false,
    separator = ",", batch = 32, shuffle = true, seed = 1234 })
  want_path(o.path, "csv")
  local file = records.open_file("csv", o.path)
  local values, names, columns, n, line_number = {}, nil, nil, 0, 0
  for line in file:lines() do
    line_number = line_number + 1
    line = line:gsub("\r$", "")
    if line_number == 1 then line = line:gsub("^\239\187\191", "") end   -- a byte order mark
    if line:find("%S") then
      local cells = {}
      for cell in (line .. o.separator):gmatch("(.-)" .. o.separator:gsub("%p", "%%%0")) do
        cells[#cells + 1] = cell:match('^%s*"?(.-)"?%s*$')
      end
      columns = columns or #cells
      raise_if(#cells ~= columns, "data.csv: %s:%d: expected %d columns, got %d", o.path,
        line_number, columns, #cells)
      local numbers, bad = {}, nil
      for i, cell in ipairs(cells) do
        numbers[i] = tonumber(cell)
        if not numbers[i] and not bad then bad = i end
      end
      if bad and not names and n == 0 then names = cells
      elseif bad then
        raise("data.csv: %s:%d: expected a number in column %d, got %s", o.path, line_number,
          bad, value_text(cells[bad]))
      else
        for i = 1, columns do values[n * columns + i] = numbers[i] end
        n = n + 1
      end
    end
  end
  file:close()
  if n == 0 then raise("data.csv: expected rows of numbers in %s, got none", o.path) end
  local target = o.target or columns
  if type(target) == "string" then
    local found
    for i, name in ipairs(names or {}) do if name == target then found = i end end
    if not found then
      raise("data.csv: %s has no column '%s'%s", o.path, target, names
        and nearest.hint(target, names) or "; its first line does not name the columns")
    end
    target = found
  end
  raise_if(type(target) ~= "number" or target % 1 ~= 0 or target < 1 or target > columns,
    "data.csv: there is no column %s in %s, which has %d columns", tostring(target), o.path,
    columns)
  raise_if(columns < 2, "data.csv: %s has one column with the separator '%s'; expected features " ..
    "and a target", o.path, o.separator)
  for r = 0, o.classes and n - 1 or -1 do
    local class = values[r * columns + target]
    if class % 1 ~= 0 or class < 0 then
      raise("data.csv: %s: expected a class, a whole number of 0 or more, in column %d of " ..
        "numeric row %d, got %s", o.path, target, r + 1, class)
    end
  end
  local width = columns - 1
  local self = rows(o, "csv", { get = function(i)
    local r, k = math.floor(i / width), i % width + 1
    return values[r * columns + (k >= target and k + 1 or k)]
  end, shape = { width }, dtype = "f32" },
    { get = function(i) return values[i * columns + target] end, shape = {},
      dtype = o.classes and "i64" or "f32" }, n)
  self.columns = names
  return self
end

-- ------------------------------------------------------------------ idx images (MNIST's format)

local function idx(path, what, ndim)
  local keep = map(path, "idx", what)
  local bytes, size = ffi.cast("const uint8_t *", keep.data), tonumber(keep.size)
  if size < 4 + 4 * ndim or bytes[0] ~= 0 or bytes[1] ~= 0 or bytes[2] ~= 8 or bytes[3] ~= ndim then
    local zipped = size > 1 and bytes[0] == 31 and bytes[1] == 139
    raise("data.idx: %s is not an idx file of %s (unsigned bytes, %d dimensions)%s", path, what,
      ndim, zipped and "; hint: decompress the file with gunzip" or "")
  end
  local shape, count = {}, 1
  for d = 1, ndim do
    local at = 4 * d
    shape[d] = bytes[at] * 2 ^ 24 + bytes[at + 1] * 2 ^ 16 + bytes[at + 2] * 2 ^ 8 + bytes[at + 3]
    count = count * shape[d]
  end
  raise_if(size ~= 4 + 4 * ndim + count, "data.idx: expected %s to have %d bytes after its " ..
    "header, got %d", path, count, size - 4 - 4 * ndim)
  return bytes + 4 + 4 * ndim, shape, keep
end

--- Reads images and labels from idx files. A batch has x [B x rows*columns] f32 in 0..1, and y [B]
--- i64.
function M.idx(given)
  local o = options_of("idx", given, { images = NEEDED, labels = NEEDED, batch = 32, shuffle = true,
    seed = 1234 })
  local pixels, shape, keep1 = idx(o.images, "images", 3)
  local labels, label_shape, keep2 = idx(o.labels, "labels", 1)
  raise_if(label_shape[1] ~= shape[1], "data.idx: expected a label for each image, got %d " ..
    "images and %d labels", shape[1], label_shape[1])
  local self = rows(o, "idx", { get = function(i) return pixels[i] / 255 end,
    shape = { shape[2] * shape[3] }, dtype = "f32" },
    { get = function(i) return labels[i] end, shape = {}, dtype = "i64" }, shape[1])
  self.keep = { keep1, keep2 }
  return self
end

-- ------------------------------------------------------------------ images

--- Reads a folder of PNG and JPEG images that has a subfolder for each class. A batch has two
--- tensors. x [B x channels x size x size] f32 holds the central square of each image, resized by
--- averaging pixels, then normalized with `mean` and `std`. y [B] i64 holds the index of each
--- image's class, from 0, in the order of the subfolders' names (loader.classes). Options:
---   path              the folder
---   size              the width and height of x in pixels (32)
---   channels          3 for RGB (the default), 1 for gray
---   mean, std         the numbers that normalize the pixel values, which are in 0..1: one number
---                     for all channels, or a list with one for each channel (0.5, 0.25)
---   flip              true: mirrors each image with probability 1/2
---   from, to          the share of the images to use (0, 1), after a random shuffle that is always
---                     the same
---   bad               "stop": files that do not begin like a PNG or JPEG image are an error;
---                     "skip": they are left out
---   batch             images in a batch (32)
---   shuffle, seed     a different order of the images in each epoch (true, 1234)
function M.images(given)
  local o = options_of("images", given, { path = NEEDED, size = 32, channels = 3, mean = 0.5,
    std = 0.25, flip = false, from = 0, to = 1, bad = "stop", batch = 32, shuffle = true,
    seed = 1234 })
  want_path(o.path, "images")
  raise_if(o.channels ~= 1 and o.channels ~= 3,
    "data.images: expected channels to be 1 or 3, got %s", value_text(o.channels))
  want_share("images", o)
  arguments.want_batch("images", o.batch, o.channels * o.size ^ 2, "values")
  return loader(images.open(o, example))
end

--- Draws images of eight shapes in random places, sizes and colours when the loader is made. A
--- batch has x [B x 3 x size x size] f32 in about -1..1, and y [B] i64, the index of the shape.
--- Options:
---   count             the number of images (1024)
---   size              the width and height of an image in pixels (32)
---   noise             noise changes a value by at most three times this number (0.1)
---   batch             images in a batch (32)
---   shuffle, seed     a different order of the images in each epoch (true, 1234). The seed also
---                     determines the images
function M.shapes(given)
  local o = options_of("shapes", given or {}, { count = 1024, size = 32, noise = 0.1, batch = 32,
    shuffle = true, seed = 1234 })
  raise_if(o.count * 3 * o.size ^ 2 > 2 ^ 28, "data.shapes: %d images of %d x %d are too many; " ..
    "expected at most 2^28 values in all", o.count, o.size, o.size)
  local x, y, names = images.draw(o)
  local self = M.tensors { x = x, y = y, batch = o.batch, shuffle = o.shuffle, seed = o.seed }
  x:free()
  y:free()
  self.classes = names
  return self
end

-- ------------------------------------------------------------------ documents

-- Returns the options that every loader of documents has, with their defaults, and `own`, the
-- options of one format.
local function document_options(own)
  return arguments.merged({ path = NEEDED, encode = false, end_token = NEEDED, pack = true,
    bad = "stop", check = false, batch = 8, context = 128, shuffle = true, seed = 1234 }, own)
end

local function of_documents(name, o, read, format, sequences)
  return packed.new(name, documents.new(name, read, format, o), o, sequences or 1)
end

--- Reads documents from JSON lines. Each line holds a JSON object; one of its fields is the text of
--- a document. A batch has x and y [batch x context] i32. Every loader of documents has these
--- options:
---   path              a file, or a list of files
---   encode            a function from a text to a list of token ids, or an object such as an
---                     engine.tokenizer, whose method encode(text, { special = false }) returns
---                     the ids; by default bytes are the tokens
---   end_token         the id of the token that ends a document, or false for no such token; by
---                     default 0 for bytes, and needed if `encode` is given. If encode is an
---                     engine.tokenizer, end_token may instead be the token's text
---                     ("<|endoftext|>")
---   pack              true: documents follow each other in the rows; false: a row holds one
---                     document, and targets after its end are -100, which the loss ignores
---   batch, context    rows in a batch, and tokens in a row (8, 128)
---   shuffle, seed     a different order of the documents in each epoch (true, 1234)
---   bad               "stop": an invalid record is an error that names its line; "skip": it is
---                     left out
---   check             true: reads and encodes every document when the loader is made, which finds
---                     every invalid record or, with bad = "stop", the first one
--- This loader also has the option `field`, the name of the field that holds the text ("text").
function M.jsonl(given)
  local o = options_of("jsonl", given, document_options { field = "text" })
  return of_documents("jsonl", o, records.open("jsonl", o.path, "lines"), documents.jsonl(o.field))
end

--- Reads documents from plain text. With by = "line", every line is a document; with "paragraph",
--- blank lines separate the documents. The other options are the options of engine.data.jsonl.
function M.lines(given)
  local o = options_of("lines", given, document_options { by = "line" })
  return of_documents("lines", o, records.open("lines", o.path, o.by .. "s"), documents.lines())
end

--- Reads documents from a column of CSV files (RFC 4180), whose first line names the columns.
--- column: the column's name ("text"). separator: the character between cells (","). The other
--- options are the options of engine.data.jsonl.
function M.csv_text(given)
  local o = options_of("csv_text", given, document_options { column = "text", separator = "," })
  local read = records.open("csv_text", o.path, "csv")
  return of_documents("csv_text", o, read, documents.csv_text(o.column, o.separator, read))
end

--- Reads conversations from JSON lines: { "messages": [{ "role":, "content": }, ..] }. Only the
--- assistant's messages count in the loss: all other targets are -100. messages: the name of the
--- field with the messages. template: a function(role) that returns the texts before and after a
--- message of that role (by default the texts of ChatML), or a tokenizer whose folder has a chat
--- template. The template's text after an assistant's message counts too. Conversations in which no
--- target counts are left out. The other options are the options of engine.data.jsonl.
function M.chat(given)
  local o = options_of("chat", given, document_options { messages = "messages",
    template = documents.chatml })
  return of_documents("chat", o, records.open("chat", o.path, "lines"),
    documents.chat(o.messages, o.template))
end

--- Reads preferences from JSON lines: { "prompt":, "chosen":, "rejected": }, all strings. x and y
--- are [2 batch x context]: first the preferred sequences, then the rejected ones. Only the answers
--- count in the loss. A sequence that is too long is cut: first the start of its prompt (but not
--- the prompt's last token), then, if that is not enough, the end of the sequence. prompt, chosen,
--- rejected: the names of the fields. The other options are the options of engine.data.jsonl,
--- without pack.
function M.preferences(given)
  local known = document_options { prompt = "prompt", chosen = "chosen", rejected = "rejected" }
  known.pack = nil
  local o = options_of("preferences", given, known)
  o.pack = false
  return of_documents("preferences", o, records.open("preferences", o.path, "lines"),
    documents.preferences { o.prompt, o.chosen, o.rejected }, 2)
end

-- ------------------------------------------------------------------ mixtures

--- Mixes loaders: each draw takes the next batch of one loader, which is chosen at random by
--- weight. The choice depends only on the weights, the seed and the index of the draw. loaders: a
--- list; weights: a number for each loader, by default equal; batch: how many draws are joined
--- along the first dimension (1).
function M.mix(given)
  return mix.new(options_of("mix", given, { loaders = NEEDED, weights = false, batch = 1,
    seed = 1234 }))
end

return nearest.guard(M, "engine.data")
