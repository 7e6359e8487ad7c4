-- Converts text files to one .npy file of token ids: uint16 if all ids of the tokenizer fit, else
-- uint32. The file gets its final name when it is complete. Called by cli/data.lua; data.tokens
-- reads the result.
local files = require "engine.base.file"
local M_ffi = require "engine.base.ffi"

local ffi, C, check, raise, raise_if = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.raise, M_ffi.raise_if

local M = {}
local CHUNK = 2 ^ 20      -- bytes of text encoded at a time, if the text may be cut at lines
local HEADER = 128

local function header(dtype, count)
  local text = ("{'descr': '%s', 'fortran_order': False, 'shape': (%d,), }"):format(dtype, count)
  return "\147NUMPY\1\0" .. string.char(HEADER - 10, 0) .. text
    .. (" "):rep(HEADER - 10 - #text - 1) .. "\n"
end

-- Returns the end of the piece of text that begins at `at`. With `apart`, the piece has at least
-- CHUNK bytes and ends at the next line end where the text may be cut (eng_tokenizer_splits_lines).
-- Without `apart`, or if there is no such line end, the piece is the rest of the text.
local function piece_end(bytes, at, size, apart)
  if not apart then return size end
  for i = at + CHUNK, size - 2 do
    local before, after = bytes[i - 1], bytes[i + 1]
    if bytes[i] == 10 and before > 32 and before < 127 and after > 32 and after < 127 then
      return i + 1
    end
  end
  return size
end

--- Writes the ids of the files' texts to the file `output`. Options:
---   lines     each line is a text of its own, without its line end; by default each file is a text
---   special   adds the ids that the tokenizer puts around a text
---   ending    an id to add after each text
---   progress  a function that is called with the number of bytes encoded so far and the number of
---             bytes in all files
--- Empty texts are left out. Returns { texts =, bytes =, tokens =, dtype = }: three counts and the
--- dtype of the ids.
function M.run(tokenizer, paths, output, options)
  local maps, all = {}, 0
  for i, path in ipairs(paths) do
    maps[i] = files.map(path)
    raise_if(C.eng_file_stamp(path) == C.eng_file_stamp(output),
      "data tokenize: %s is one of the texts; expected another output file", output)
    all = all + tonumber(maps[i].size)
  end
  local narrow = tokenizer:vocab_size() <= 65536
  local dtype, width = narrow and "<u2" or "<u4", narrow and 2 or 4
  raise_if(files.exists(output) and not files.is_file(output),
    "data tokenize: %s: expected a file to write, got a folder, device or pipe", output)
  local temporary = output .. ".part"
  local file, why = io.open(temporary, "wb")
  if not file then raise("data tokenize: cannot write %s", why) end
  local count, texts, done = 0, 0, 0
  local room, memory = 0, nil
  local function put(ids, n)
    if narrow then
      if room < n then room, memory = n * 2, ffi.new("uint16_t[?]", n * 2) end
      for i = 0, n - 1 do memory[i] = ids[i] end
      ids = memory
    end
    assert(file:write(ffi.string(ids, n * width)))
    count = count + n
  end
  local ending = options.ending and ffi.new("uint32_t[1]", options.ending)
  local function encode(bytes, from, to, first, last)
    put(tokenizer:encode_memory(ffi.string(bytes + from, to - from), options.special == true))
    if first then texts = texts + 1 end
    if last and ending then put(ending, 1) end
  end
  local good, problem = pcall(function()
    assert(file:write(header(dtype, 0)))
    for i = 1, #maps do
      local bytes, size = ffi.cast("const uint8_t *", maps[i].data), tonumber(maps[i].size)
      local at, apart = 0, tokenizer:splits_lines() and not options.special
      while at < size do
        local to, after
        if options.lines then
          to = at
          while to < size and bytes[to] ~= 10 do to = to + 1 end
          after = to + 1
          local cr = to > at and bytes[to - 1] == 13 and 1 or 0     -- the CR of a CRLF
          if to - cr > at then encode(bytes, at, to - cr, true, true) end
        else
          to = piece_end(bytes, at, size, apart)
          after = to
          encode(bytes, at, to, at == 0, to == size)
        end
        if options.progress then options.progress(done + math.min(after, size), all) end
        at = after
      end
      done = done + size
    end
    file:seek("set", 0)
    assert(file:write(header(dtype, count)))
    assert(file:close())
  end)
  if not good then
    pcall(file.close, file)
    C.eng_file_remove(temporary)
    raise("data tokenize: %s: %s", output, tostring(problem))
  end
  check(C.eng_file_rename(temporary, output))
  return { texts = texts, bytes = all, tokens = count, dtype = narrow and "u16" or "u32" }
end

return M
