-- Documents: turns each record of a file into token ids, and marks the ids that count in the loss.
-- A format is a function that divides a record's text into the parts of a document. It returns
-- { { text, whether it counts in the loss }, .. }, or calls refuse() if the record is invalid.
-- M.lines, M.csv_text, M.jsonl, M.chat and M.preferences return formats. Called by init.lua;
-- packed.lua puts the documents into rows.
local cjson = require "cjson"
local json = require "engine.base.json"
local M_ffi = require "engine.base.ffi"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local ffi, C, expect, raise, raise_if, fail_if, value_text = M_ffi.ffi, M_ffi.C, M_ffi.expect,
  M_ffi.raise, M_ffi.raise_if, M_ffi.fail_if, M_ffi.value_text

local M = {}

-- ------------------------------------------------------------------ formats

local Refusal = { __tostring = function(refusal) return refusal.text end }

-- Raises an error that says what is wrong with a record. Documents:get adds where the record is.
local function refuse(message, ...)
  error(setmetatable({ text = message:format(...) }, Refusal), 0)
end

local function kind_of(value)
  if value == cjson.null then return "null" end
  return type(value) == "table" and (value[1] ~= nil and "a list" or "an object")
    or value_text(type(value) == "string" and show.cut(value, 60) or value)
end

-- Returns a field of an object. `where`, such as "message 3", names the object in messages.
local function field_of(object, name, where)
  if object[name] ~= nil then return object[name] end
  refuse("%s has no field '%s'%s", where or "the object", name,
    nearest.hint(name, nearest.keys(object)))
end

local function text_of(object, name, where)
  local value = field_of(object, name, where)
  if type(value) == "string" then return value end
  refuse("expected the field '%s' of %s to be a text, got %s", name, where or "the object",
    kind_of(value))
end

local function object_of(line)
  local good, object = pcall(json.strict, line)
  if not good then refuse("the line is not a JSON object: %s", tostring(object)) end
  if type(object) == "table" and object[1] == nil then return object end
  refuse("expected a JSON object, got %s", kind_of(object))
end

--- Returns the format of plain text: the record's text is the document.
function M.lines() return function(text) return { { text, true } } end end

--- Returns the format of JSON lines: the document is one field of an object.
function M.jsonl(field)
  return function(line) return { { text_of(object_of(line), field), true } } end
end

-- Divides a conversation into parts, with a tokenizer's chat template. An assistant's message
-- begins where the text of the earlier messages ends, including the generation prompt if the
-- template adds one. To find the message's end, compares the text of the messages up to and
-- including this one with the text of the whole conversation: the end is where these two texts
-- first differ.
local function by_template(tokenizer, messages)
  local parts, done = {}, 0
  local function text(n, prompt)
    return n == 0 and "" or tokenizer:apply_chat_template({ unpack(messages, 1, n) },
      { add_generation_prompt = prompt })
  end
  local function shared(a, b)
    local n = 0
    while n < #a and a:byte(n + 1) == b:byte(n + 1) do n = n + 1 end
    return n
  end
  local good, problem = pcall(function()
    local all = text(#messages, false)
    local function add(to, counts)
      if to > done then parts[#parts + 1] = { all:sub(done + 1, to), counts } end
      done = to
    end
    for i, message in ipairs(messages) do
      if message.role == "assistant" then
        local before, stop = text(i - 1, true), shared(text(i, false), all)
        if shared(before, all) < #before then before = text(i - 1, false) end
        local content = message.content:match("^%s*(.-)%s*$")
        fail_if(#before < done or shared(before, all) < #before
          or not all:sub(#before + 1, stop):find(content, 1, true),
          "message %d: the chat template changes it when other messages follow; hint: give a " ..
          "function(role) as the template", i)
        add(#before, false)
        add(stop, true)
      end
    end
    add(#all, false)
  end)
  if not good then refuse("%s", M_ffi.without_line(problem)) end
  return parts
end

--- Returns the format of conversations. The record is a JSON object whose field `field` is a list
--- of messages { role =, content = }. template: a function(role) that returns the texts before and
--- after a message of that role, or a tokenizer with a chat template. Only the assistant's messages
--- and the texts after them count in the loss.
function M.chat(field, template)
  return function(line)
    local messages, parts = field_of(object_of(line), field), {}
    if type(messages) ~= "table" or messages[1] == nil then
      refuse("expected the field '%s' to be a list of messages, got %s", field, kind_of(messages))
    end
    for i, message in ipairs(messages) do
      local where = ("message %d"):format(i)
      if type(message) ~= "table" then
        refuse("expected %s to be an object, got %s", where, kind_of(message))
      end
      local role, content = text_of(message, "role", where), text_of(message, "content", where)
      if type(template) == "function" then
        local before, after = template(role)
        if type(before) ~= "string" or type(after) ~= "string" then
          raise("data.chat: expected template('%s') to return two texts, got %s and %s", role,
            value_text(before), value_text(after))
        end
        parts[#parts + 1] = { before, false }
        parts[#parts + 1] = { content .. after, role == "assistant" }
      end
    end
    if type(template) == "function" then return parts end
    return by_template(template, messages)
  end
end

--- The default template, ChatML: returns the texts before and after a message.
function M.chatml(role) return "<|im_start|>" .. role .. "\n", "<|im_end|>\n" end

--- Returns the format of preferences. The record is a JSON object with a prompt, a preferred answer
--- and a rejected answer; `fields` lists the names of these three fields. Only the answers count in
--- the loss. The format returns a list with the parts of the preferred sequence. This list has a
--- field `rejected`, the list with the parts of the rejected sequence.
function M.preferences(fields)
  return function(line)
    local object, texts = object_of(line), {}
    for i, field in ipairs(fields) do texts[i] = text_of(object, field) end
    local prompt = { texts[1], false }
    return { prompt, { texts[2], true }, rejected = { prompt, { texts[3], true } } }
  end
end

-- Returns the cells of a row of CSV (RFC 4180). `what` names the row in messages.
local function cells_of(text, separator, what)
  local cells, at = {}, 1
  repeat
    local stop
    if text:sub(at, at) == '"' then
      local from = at + 1
      repeat
        stop = text:find('"', from, true)
        if not stop then refuse("%s has a quote that does not end", what) end
        local doubled = text:sub(stop + 1, stop + 1) == '"'
        from = stop + 2
      until not doubled
      cells[#cells + 1] = text:sub(at + 1, stop - 1):gsub('""', '"')
      stop = stop + 1
      local next_one = text:sub(stop, stop)
      if next_one ~= "" and next_one ~= separator then
        refuse("%s has text after the closing quote of column %d", what, #cells)
      end
    else
      stop = text:find(separator, at, true) or #text + 1
      cells[#cells + 1] = text:sub(at, stop - 1)
      if cells[#cells]:find('"', 1, true) then
        refuse("%s has a quote inside column %d, which is not quoted", what, #cells)
      end
    end
    at = stop + 1
  until stop > #text
  return cells
end

--- Returns the format of CSV: the document is the cell in one column. The header of each file says
--- where this column is.
function M.csv_text(column, separator, records)
  local columns, places = {}, {}  -- file -> its number of columns; file -> the index of `column`
  for _, f in ipairs(records.files) do
    local good, names = pcall(cells_of, records:header(f), separator, "the header of " .. f.path)
    if not good then raise("data.csv_text: %s", tostring(names)) end
    for i, name in ipairs(names) do
      if name == column then places[f] = places[f] or i end
    end
    if not places[f] then
      raise("data.csv_text: %s has no column '%s'%s", f.path, column,
        show.shown(nearest.hint(column, names)))
    end
    columns[f] = #names
  end
  return function(text, f)
    local cells = cells_of(text, separator, "the row")
    if #cells ~= columns[f] then refuse("expected %d columns, got %d", columns[f], #cells) end
    return { { cells[places[f]], true } }
  end
end

-- ------------------------------------------------------------------ tokens

-- Returns the function that converts a text to its ids. encode: this function, or an object with a
-- method `encode`, such as a tokenizer. If `encode` is false, the bytes of the text are the ids.
local function encoder(name, encode)
  if not encode then return function(text) return text end end
  if type(encode) == "function" then return encode end
  local good, method = pcall(function() return encode.encode end)
  expect(good and type(method) == "function", encode,
    "data.%s: expected encode to be a function from a text to a list of ids, or an object with " ..
    "a method `encode`", name)
  return function(text) return method(encode, text, { special = false }) end
end

-- Returns the id of the end token, or false if end_token is false (no end token). end_token: an id,
-- or nil for 0. If `encode` has a method `id`, as a tokenizer has, end_token may be a token's text.
local function end_id(name, encode, end_token)
  if type(end_token) ~= "string" then return end_token or end_token == nil and 0 end
  local good, method = pcall(function() return encode.id end)
  raise_if(not good or type(method) ~= "function", "data.%s: expected end_token to be an id, " ..
    "because encode is not an engine.tokenizer, got '%s'", name, end_token)
  return method(encode, end_token)
    or raise("data.%s: end_token: the tokenizer has no token '%s'", name, end_token)
end

-- Copies the ids of a part into memory. list: the result of encode, or the text itself for bytes.
local function put(self, ids, list)
  if self.bytes then
    for i = 1, #list do ids[i - 1] = list:byte(i) end
    return
  end
  for i = 1, #list do
    local id = list[i]
    if type(id) ~= "number" or id % 1 ~= 0 or id < 0 or id >= 2 ^ 31 then
      raise("data.%s: expected encode to return whole numbers from 0 to 2^31 - 1, got %s at " ..
        "index %d", self.name, value_text(id), i)
    end
    ids[i - 1] = id
  end
end

-- Returns the tokens of all parts of document i as one sequence: { ids = int32_t[n], counts =
-- uint8_t[n], n = }. counts[k] is 1 if ids[k] counts in the loss as a target.
local function tokens_of(self, parts, i)
  local lists, n = {}, 0
  for k, part in ipairs(parts) do
    local text = part[1]
    if not json.is_utf8(text) then refuse("the text is not UTF-8") end
    if self.bytes and self.end_token == 0 and text:find("%z") then
      refuse("the text holds a NUL byte, which is the end token of bytes; hint: end_token = false")
    end
    local good, list = pcall(self.encode, text)
    if not good then
      raise("data.%s: %s: encode failed: %s", self.name, self.records:where(i), show.shown(list))
    end
    expect(type(list) == "table" or self.bytes, list,
      "data.%s: expected encode to return a list of token ids", self.name)
    lists[k], n = list, n + #list
  end
  local ids, counts, at = ffi.new("int32_t[?]", n + 1), ffi.new("uint8_t[?]", n + 1), 0
  for k, list in ipairs(lists) do
    put(self, ids + at, list)
    ffi.fill(counts + at, #list, parts[k][2] and 1 or 0)
    at = at + #list
  end
  if self.end_token and n > 0 then
    ids[n], counts[n] = self.end_token, counts[n - 1]
    n = n + 1
  end
  return { ids = ids, counts = counts, n = n }
end

-- Cuts a sequence to `most` tokens. Without `answers`, drops tokens at its end. With `answers`,
-- first drops tokens at the start of the prompt, but keeps the prompt's last token. If that is not
-- enough, then drops tokens at the end of the sequence.
local function cut(sequence, most, answers)
  if sequence.n <= most then return sequence end
  local from = 0
  if answers then
    local prompt = 0
    while prompt < sequence.n and sequence.counts[prompt] == 0 do prompt = prompt + 1 end
    from = math.min(sequence.n - most, math.max(0, prompt - 1))
  end
  return { ids = sequence.ids + from, counts = sequence.counts + from, n = most, whole = sequence }
end

-- Returns whether any target of a sequence counts in the loss. The targets are the tokens from
-- index `first` on.
local function learns(sequence, first)
  for i = first, sequence.n - 1 do
    if sequence.counts[i] ~= 0 then return true end
  end
  return false
end

local Documents = {}
Documents.__index = Documents

-- Returns the sequences of document i, or false if none of its tokens counts in the loss.
local function sequences_of(self, i)
  local text, f = self.records:read(i)
  if not text then refuse("%s", f) end
  local parts, rows = self.format(text, f), {}
  for k, list in ipairs { parts, parts.rejected } do
    rows[k] = tokens_of(self, list, i)
    if not self.pack then rows[k] = cut(rows[k], self.most, parts.rejected) end
    if not learns(rows[k], self.pack and 0 or 1) then
      if parts.rejected then
        refuse("the %s answer has no tokens", k == 1 and "preferred" or "rejected")
      end
      return false
    end
  end
  return rows
end

--- Returns the sequences of document i (from 0): { { ids =, counts =, n = }, .. }, two for
--- preferences. Returns false if none of its tokens counts in the loss, or if the record is invalid
--- and bad is "skip".
function Documents:get(i)
  local good, result = pcall(sequences_of, self, i)
  if good then return result end
  if getmetatable(result) ~= Refusal then error(result, 0) end        -- an error of the script
  local problem = show.shown(result)
  if self.bad == "stop" then
    raise("data.%s: %s: %s", self.name, self.records:where(i), problem)
  end
  if not self.invalid[i] then
    self.invalid[i], self.skipped = true, self.skipped + 1
    self.first = self.first or self.records:where(i) .. ": " .. problem
  end
  return false
end

--- Returns a checksum of the tokens of one document, to detect a changed encode, template or field.
--- The document is the first of documents 0 to 15 in which a token counts in the loss.
function Documents:checksum()
  local crc, rows = 0, false
  for i = 0, math.min(self.records.n, 16) - 1 do rows = rows or self:get(i) end
  for _, sequence in ipairs(rows or {}) do
    crc = C.eng_crc32c(crc, sequence.ids, 4 * sequence.n)
    crc = C.eng_crc32c(crc, sequence.counts, sequence.n)
  end
  return ("%08x"):format(crc)
end

--- Returns a text about the invalid documents that were left out; "" if there are none.
function Documents:left_out()
  if self.skipped == 0 then return "" end
  return (", %d invalid ones left out (the first: %s)"):format(self.skipped, self.first)
end

--- Makes the object that reads the documents from `records`. format: a result of M.lines, M.jsonl
--- and so on. o: the loader's options encode, end_token, pack, bad, check, context.
function M.new(name, records, format, o)
  local encode = encoder(name, o.encode)
  raise_if(o.encode and o.end_token == nil, "data.%s: expected the option end_token, because " ..
    "encode is given: the id of the token that ends a document, or false for no such token", name)
  local self = setmetatable({ name = name, records = records, format = format, bad = o.bad,
    encode = encode, bytes = not o.encode, end_token = end_id(name, o.encode, o.end_token),
    pack = o.pack, most = o.context + 1, invalid = {}, skipped = 0 }, Documents)
  for i = 0, o.check and records.n - 1 or 0 do self:get(i) end
  return self
end

return M
