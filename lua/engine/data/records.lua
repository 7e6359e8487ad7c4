-- The records of text files: lines, paragraphs or rows of CSV. M.open reads every file once, from
-- start to end, for its checksum and for the offsets of its records (8 bytes each). Records:read
-- reads a record when a batch needs it. Files are not mapped, because reading a mapped file that
-- has shrunk would end the process. Opened by init.lua, read by documents.lua; packed.lua puts
-- the files' sizes and checksums into saved positions.
local M_ffi = require "engine.base.ffi"
local file = require "engine.base.file"

local ffi, C, expect, raise_if = M_ffi.ffi, M_ffi.C, M_ffi.expect, M_ffi.raise_if

local M = {}

local CHUNK = 2 ^ 18       -- bytes read at a time
local LONGEST = 2 ^ 24     -- the most bytes of a record
local NEWLINE, QUOTE, SPACE, TAB, RETURN = 10, 34, 32, 9, 13

local Records = {}
Records.__index = Records

local function add(self, offset)
  if self.n == self.room then
    local starts = ffi.new("double[?]", 2 * self.room)
    ffi.copy(starts, self.starts, 8 * self.n)
    self.starts, self.room = starts, 2 * self.room
  end
  self.starts[self.n] = offset
  self.n = self.n + 1
end

--- Opens a file. Refuses a folder, and also a pipe or a device, because reading it could block.
--- name: the loader's name, for messages.
function M.open_file(name, path)
  raise_if(file.exists(path) and not file.is_file(path), "data.%s: %s is %s, expected a file", name,
    path, file.is_folder(path) and "a folder" or "a pipe or a device")
  local handle, why = io.open(path, "rb")
  return handle or M_ffi.raise("data.%s: %s", name, why)
end

-- Returns an iterator over the first `size` bytes of a file (nil: all bytes). It gives one chunk at
-- a time, with the chunk's offset.
local function chunks(handle, size)
  local at = 0
  return function()
    local chunk = handle:read(math.min(CHUNK, (size or math.huge) - at))
    if not chunk or chunk == "" then return nil end
    at = at + #chunk
    return chunk, at - #chunk
  end
end

-- Adds the records of a file. A record begins at a line that is not blank. With "lines", every
-- line that is not blank begins a record. With "paragraphs", the line must also be the first of the
-- file or follow a blank line. With "csv", the line must also start outside quotes.
local function scan(self, handle, f)
  local every, quote = self.kind ~= "paragraphs", self.kind == "csv" and QUOTE or -1
  local matters = self.kind == "csv" and '["\n]' or "\n"
  local blank, gap, quoted, line = true, true, false, 0
  for chunk, at in chunks(handle) do
    f.size, f.crc = at + #chunk, C.eng_crc32c(f.crc, chunk, #chunk)
    local bytes, i = ffi.cast("const uint8_t *", chunk), 0
    while i < #chunk do
      local c = bytes[i]
      if c == NEWLINE and not quoted then gap, blank, line = gap or blank or every, true, at + i + 1
      elseif c ~= SPACE and c ~= TAB and c ~= RETURN then
        if c == quote then quoted = not quoted end
        if blank then
          blank = false
          if gap then add(self, line) end
          gap = false
        end
        -- skips to the next line end or quote
        i = (chunk:find(matters, i + 2, self.kind ~= "csv") or #chunk + 1) - 2
      end
      i = i + 1
    end
  end
end

--- Reads the files and stores where their records begin. kind: "lines", "paragraphs" or "csv". The
--- first record of a CSV file is its header. name: the loader's name, for messages.
function M.open(name, paths, kind)
  if type(paths) == "string" then paths = { paths } end
  expect(type(paths) == "table" and #paths ~= 0, paths,
    "data.%s: expected path = a file or a list of one or more files", name)
  local self = setmetatable({ name = name, kind = kind, files = {}, n = 0, room = 1024,
    starts = ffi.new("double[1024]") }, Records)
  for k, path in ipairs(paths) do
    expect(type(path) == "string", path, "data.%s: expected the path of a file", name)
    local handle, f = M.open_file(name, path), { path = path, size = 0, crc = 0, first = self.n }
    scan(self, handle, f)
    handle:close()
    self.files[k] = f
    if kind == "csv" and self.n > f.first then
      f.header, f.second = self.starts[f.first], self.n > f.first + 1 and self.starts[f.first + 1]
      self.n = self.n - 1
      for i = f.first, self.n - 1 do self.starts[i] = self.starts[i + 1] end
    end
    raise_if(self.n == f.first, "data.%s: %s %s", name, path,
      f.size == 0 and "is empty" or "has no records")
  end
  return self
end

-- Returns the file of record i (from 0), and the file's index. It is the last file whose first
-- record is at or before i.
local function file_of(self, i)
  local low, high = 1, #self.files
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if self.files[middle].first <= i then low = middle else high = middle - 1 end
  end
  return self.files[low], low
end

-- Returns bytes `from` to `to`-1 of a file, without the white space at their end and a byte order
-- mark at the start of the file. For CSV, drops only the blank lines at their end. Leaves the file
-- open for the next read.
local function read(self, f, from, to)
  if self.latest ~= f then
    if self.handle then self.handle:close() end
    self.latest, self.handle = f, M.open_file(self.name, f.path)
    self.handle:setvbuf("no")
  end
  local size = self.handle:seek("end")
  self.handle:seek("set", from)
  local text = size == f.size and (to > from and self.handle:read(to - from) or "")
  raise_if(not text or #text ~= to - from,
    "data.%s: %s had %.0f bytes when it was opened and has %.0f now; hint: files must not " ..
    "change while they are read", self.name, f.path, f.size, tonumber(size) or 0)
  local last = #text
  while last > 0 and (" \t\r\n"):find(text:sub(last, last), 1, true) do last = last - 1 end
  if self.kind == "csv" then                        -- blanks in the last line may be cells
    last = (text:find("[\r\n]", last + 1) or #text + 1) - 1
  end
  text = text:sub(1, last)
  return from == 0 and text:gsub("^\239\187\191", "") or text     -- a byte order mark
end

--- Returns the text of record i (from 0) and its file; or nil and what is wrong with the record.
function Records:read(i)
  local f, k = file_of(self, i)
  local after = self.files[k + 1] and self.files[k + 1].first or self.n
  local from, to = self.starts[i], i + 1 < after and self.starts[i + 1] or f.size
  if to - from > LONGEST then
    return nil, ("the record has %.0f bytes, expected at most %.0f"):format(to - from, LONGEST)
  end
  return read(self, f, from, to), f
end

--- Returns the header of a CSV file.
function Records:header(f)
  return read(self, f, f.header, math.min(f.second or f.size, f.header + LONGEST))
end

--- Returns where record i begins, as "file:line".
function Records:where(i)
  local f = file_of(self, i)
  local handle, line = M.open_file(self.name, f.path), 1
  for chunk in chunks(handle, self.starts[i]) do line = line + select(2, chunk:gsub("\n", "")) end
  handle:close()
  return ("%s:%d"):format(f.path, line)
end

--- Returns the size and the checksum of each file, for a saved position.
function Records:identity()
  local list = {}
  for k, f in ipairs(self.files) do list[k] = { size = f.size, crc = ("%08x"):format(f.crc) } end
  return list
end

--- Raises an error unless the files have the sizes and checksums in `identity`, a saved result of
--- identity().
function Records:check(identity)
  local n = type(identity) == "table" and #identity or 0
  raise_if(n ~= #self.files, "data.%s: this position was saved with %d files, but the loader " ..
    "has %d; the batches would differ", self.name, n, #self.files)
  for k, f in ipairs(self.files) do
    local saved = type(identity[k]) == "table" and identity[k] or {}
    local size, crc = tonumber(saved.size) or 0, ("%08x"):format(f.crc)
    raise_if(size ~= f.size or saved.crc ~= crc, "data.%s: %s has changed since this position " ..
      "was saved (%.0f bytes, checksum %s, now %.0f and %s); the batches would differ", self.name,
      f.path, size, tostring(saved.crc), f.size, crc)
  end
end

return M
