-- Tokenizers: `engine.tokenizer`. Reads Hugging Face's tokenizer.json and produces the same ids as
-- the Python package `tokenizers`. This module reads and checks the file; the core (core/tokenizer)
-- encodes and decodes. Called by scripts, cli/data.lua and cli/generate.lua.
--   local t = engine.tokenizer "models/llama"       a folder with tokenizer.json, or the file
--   local ids = t:encode "Hello world"              { 1, 15043, 3186 }
--   print(t:decode(ids))
local M_ffi = require "engine.base.ffi"
local files = require "engine.base.file"
local json = require "engine.base.json"
local nearest = require "engine.base.nearest"
local read_named = require("engine.base.arguments").read_named
local steps = require "engine.data.tokenizer_steps"

local field, given = steps.field, steps.given
local ffi, C, check, expect, raise, raise_if, value_text = M_ffi.ffi, M_ffi.C, M_ffi.check,
  M_ffi.expect, M_ffi.raise, M_ffi.raise_if, M_ffi.value_text

local M = {}
local FILE_BYTES = 2 ^ 26      -- a larger tokenizer.json is refused

-- ------------------------------------------------------------------ reading the file

-- Returns the object in a JSON file, and the file's path.
local function read_json(path)
  expect(type(path) == "string", path, "tokenizer: expected a folder or a tokenizer.json")
  if C.eng_file_kind(path) == C.ENG_FILE_FOLDER then path = path .. "/tokenizer.json" end
  if C.eng_file_kind(path) == C.ENG_FILE_NONE then
    raise("tokenizer: %s; expected a folder with tokenizer.json, or the file",
      select(2, io.open(path)) or path)
  end
  local mapping = files.map(path)
  raise_if(mapping.size > FILE_BYTES, "tokenizer: %s has %.0f bytes, expected at most %.0f", path,
    tonumber(mapping.size), FILE_BYTES)
  local good, data = pcall(json.strict, ffi.string(mapping.data, mapping.size))
  if not good then raise("tokenizer: %s is not JSON: %s", path, tostring(data)) end
  raise_if(type(data) ~= "table" or type(data.model) ~= "table",
    "tokenizer: %s is not a tokenizer.json: it has no model", path)
  return data, path
end

local MODELS = { BPE = C.ENG_TOKENS_BPE, Unigram = C.ENG_TOKENS_UNIGRAM,
  WordPiece = C.ENG_TOKENS_WORDPIECE, WordLevel = C.ENG_TOKENS_WORDS }

-- Returns the type of the file's model. Old files do not give the type; for them it follows from
-- other fields.
local function model_type(model)
  if given(model.type) then return model.type end
  if given(model.merges) then return "BPE" end
  if type(model.vocab) == "table" and type(model.vocab[1]) == "table" then return "Unigram" end
  return given(model.continuing_subword_prefix) and "WordPiece" or "WordLevel"
end

-- Returns { fail }. fail(format, ...) raises an error that names the file and a part of the file,
-- such as "model".
local function failing(path, part)
  return { fail = function(message, ...)
    raise("tokenizer: %s: %s: %s", path, part, (message):format(...))
  end }
end

local function whole(fail, value, what)
  if type(value) ~= "number" or value % 1 ~= 0 or math.abs(value) > 2 ^ 53 then
    fail("%s: expected a whole number, got %s", what, value_text(value))
  end
  return value
end

-- Creates the core's tokenizer with the model's tokens and merges. Returns its handle, the model's
-- type, and a function that raises an error for a failed status.
local function build_model(model, to)
  local fail, kind = to.fail, model_type(model)
  local number = MODELS[kind] or fail("type '%s' is not supported%s", tostring(kind),
    nearest.choices(tostring(kind), nearest.keys(MODELS), "types"))
  local vocab = field(to, model, "vocab", "table")
  if given(model.dropout) and model.dropout ~= 0 then
    fail("expected dropout to be 0, got %s; dropout makes ids random", value_text(model.dropout))
  end
  local unknown = -1
  if kind == "Unigram" then
    unknown = given(model.unk_id) and whole(fail, model.unk_id, "unk_id") or -1
  elseif given(model.unk_token) then
    local id = vocab[field(to, model, "unk_token", "string")]
    unknown = given(id) and whole(fail, id, "vocab") or -2
  end
  local flags = (model.byte_fallback == true and C.ENG_TOKENS_BYTE_FALLBACK or 0)
    + (model.fuse_unk == true and C.ENG_TOKENS_FUSE_UNK or 0)
    + (model.ignore_merges == true and C.ENG_TOKENS_IGNORE_MERGES or 0)
  local prefix = field(to, model, "continuing_subword_prefix", "string", "")
  local suffix = field(to, model, "end_of_word_suffix", "string", "")
  local longest = given(model.max_input_chars_per_word)
    and whole(fail, model.max_input_chars_per_word, "max_input_chars_per_word") or 100
  local out = ffi.new("eng_tokenizer *[1]")
  check(C.eng_tokenizer_new(out, number, flags, unknown, prefix, suffix, longest))
  local handle = ffi.gc(out[0], C.eng_tokenizer_free)
  local function core(status)
    if status ~= 0 then fail("%s", (M_ffi.message():gsub("^tokenizer: ", ""))) end
  end
  if kind == "Unigram" then
    for i, entry in ipairs(vocab) do
      if type(entry) ~= "table" or type(entry[1]) ~= "string" or type(entry[2]) ~= "number" then
        fail("vocab: expected token %d to be a text and a score, got %s", i - 1, value_text(entry))
      end
      core(C.eng_tokenizer_token(handle, i - 1, entry[1], #entry[1], entry[2]))
    end
  else
    for token, id in pairs(vocab) do
      if type(token) ~= "string" then
        fail("vocab: expected an object of tokens and ids, got a list")
      end
      core(C.eng_tokenizer_token(handle, whole(fail, id, "vocab"), token, #token, 0))
    end
  end
  if kind ~= "BPE" then return handle, kind, core end
  for i, merge in ipairs(field(to, model, "merges", "table")) do
    local left, right
    if type(merge) == "string" then left, right = merge:match("^([^ ]*) ([^ ]*)$")
    elseif type(merge) == "table" then left, right = merge[1], merge[2] end
    if type(left) ~= "string" or type(right) ~= "string" then
      fail("merge %d: expected two tokens, got %s", i, value_text(merge))
    end
    core(C.eng_tokenizer_merge(handle, left, #left, right, #right))
  end
  return handle, kind, core
end

local ADDED = { lstrip = C.ENG_ADDED_LSTRIP, rstrip = C.ENG_ADDED_RSTRIP,
  single_word = C.ENG_ADDED_SINGLE_WORD, normalized = C.ENG_ADDED_NORMALIZED,
  special = C.ENG_ADDED_SPECIAL }

-- Adds the file's added tokens. Returns the special tokens among them: { { text =, id = } ... }.
local function build_added(data, handle, to, core)
  local special = {}
  for i, token in ipairs(field(to, data, "added_tokens", "table", {})) do
    if type(token) ~= "table" then to.fail("expected entry %d to be an object, got %s", i,
      value_text(token)) end
    if type(token.content) ~= "string" then
      to.fail("entry %d: expected 'content' to be a string, got %s", i, value_text(token.content))
    end
    local text = token.content
    local id, flags = whole(to.fail, token.id, "id of '" .. text .. "'"), 0
    for name, flag in pairs(ADDED) do
      if token[name] == true then flags = flags + flag end
    end
    if text ~= "" then
      core(C.eng_tokenizer_added(handle, id, text, #text, flags))
      if token.special == true then special[#special + 1] = { text = text, id = id } end
    end
  end
  return special
end

local STAGES = {
  { "normalizer", steps.normalizers, C.ENG_STAGE_NORMALIZE },
  { "pre_tokenizer", steps.splitters, C.ENG_STAGE_SPLIT },
  { "decoder", steps.decoders, C.ENG_STAGE_DECODE },
  { "post_processor", steps.processors },
}

-- ------------------------------------------------------------------ the object

local Tokenizer = {}
Tokenizer.__index = Tokenizer

--- Reads a tokenizer.json. path: the file, or a folder that has it. Raises a one-line error if the
--- file is malformed or uses a feature that the engine does not support.
---
---   local t = engine.tokenizer "models/llama"
---   local ids = t:encode "Hello world"
function M.open(path)
  local data
  data, path = read_json(path)
  local handle, kind, core = build_model(data.model, failing(path, "model"))
  local self = setmetatable({ path = path, model = kind, handle = handle }, Tokenizer)
  local special = build_added(data, handle, failing(path, "added_tokens"), core)
  for _, stage in ipairs(STAGES) do
    local name, table_of, number = stage[1], stage[2], stage[3]
    local to = failing(path, name)
    function to.stage(step, flags, a, b)
      a, b = a or "", b or ""
      core(C.eng_tokenizer_step(handle, number, step, flags or 0, a, #a, b, #b))
    end
    function to.frame(id, after)
      core(C.eng_tokenizer_frame(handle, whole(to.fail, id, "id"), after))
    end
    steps.add(to, data[name], table_of)
  end
  core(C.eng_tokenizer_ready(handle))
  self.special = special
  return self
end

local out_ids, out_text = ffi.new("const uint32_t *[1]"), ffi.new("const char *[1]")
local out_size = ffi.new("int64_t[1]")

--- Returns the ids of a text as a pointer to uint32, and their number. The pointer is valid until
--- the next call. special: whether to add the special tokens that the file puts around a text
--- (default true).
function Tokenizer:encode_memory(text, special)
  expect(type(text) == "string", text, "tokenizer:encode: expected a text")
  check(C.eng_tokenizer_encode(out_ids, out_size, self.handle, text, #text, special ~= false))
  return out_ids[0], tonumber(out_size[0])
end

--- Returns the ids of a text as a list. special = false leaves out the special tokens that the file
--- puts around a text. Bytes that are not UTF-8 count as U+FFFD, as in Python's decode("utf-8",
--- "replace").
function Tokenizer:encode(text, options)
  local special = read_named(options, "encode", "special").special
  local ids, n = self:encode_memory(text, special)
  local list = {}
  for i = 1, n do list[i] = ids[i - 1] end
  return list
end

--- Returns the text of a list of ids. special = true includes special tokens, which are left out by
--- default.
function Tokenizer:decode(ids, options)
  expect(type(ids) == "table", ids, "tokenizer: expected a list of ids, such as ids:totable()")
  local special, n = read_named(options, "decode", "special").special, #ids
  local list = ffi.new("uint32_t[?]", math.max(n, 1))
  for i = 1, n do
    local id = ids[i]
    if type(id) ~= "number" or id % 1 ~= 0 or id < 0 or id >= 2 ^ 32 then
      raise("tokenizer: expected whole ids from 0 to 2^32 - 1, got %s at position %d",
        value_text(id), i)
    end
    list[i - 1] = id
  end
  check(C.eng_tokenizer_decode(out_text, out_size, self.handle, list, n, special ~= true))
  return ffi.string(out_text[0], out_size[0])
end

--- Returns the text of a conversation, a list of messages { role =, content = }. Applies the chat
--- template in the tokenizer's folder, with the same result as transformers' method of this name,
--- except that a template sees the keys of an object in sorted order. Options:
--- add_generation_prompt (false; true: the text ends with the beginning of the assistant's answer),
--- and any other variable that the template reads. A template that uses a part of Jinja that the
--- engine does not support raises a one-line error. The text already has its special tokens, so
--- encode it with encode(text, { special = false }).
function Tokenizer:apply_chat_template(messages, options)
  self.chat = self.chat
    or require("engine.data.chat_template").of(self.path:match("^(.*)/[^/]*$") or ".")
  return self.chat(messages, options)
end

--- Returns one more than the largest id: the number of rows that a model's embedding needs.
function Tokenizer:vocab_size() return tonumber(C.eng_tokenizer_size(self.handle)) end

--- Returns the id of the token whose text in tokenizer.json is `text`; nil if there is none.
function Tokenizer:id(text)
  expect(type(text) == "string", text, "tokenizer:id: expected the text of a token")
  local id = tonumber(C.eng_tokenizer_find(self.handle, text, #text))
  return id >= 0 and id or nil
end

--- Returns the text that tokenizer.json gives to the token `id`; nil if there is no such token.
function Tokenizer:token(id)
  expect(type(id) == "number" and id % 1 == 0, id, "tokenizer:token: expected a whole id")
  local text = C.eng_tokenizer_text(out_size, self.handle, id)
  return text ~= nil and ffi.string(text, out_size[0]) or nil
end

--- Returns the special tokens as a table: text -> id.
function Tokenizer:special_tokens()
  local list = {}
  for _, token in ipairs(self.special) do list[token.text] = token.id end
  return list
end

--- Returns whether a text may be cut after a line end without a change of its ids, provided that
--- the two parts meet the conditions of eng_tokenizer_splits_lines (core/engine_tokenizer.h).
function Tokenizer:splits_lines() return C.eng_tokenizer_splits_lines(self.handle) end

function Tokenizer.__call()
  raise("a tokenizer cannot be called; hint: tokenizer:encode(text) returns a list of ids")
end

function Tokenizer:__tostring()
  local names = {}
  for i, token in ipairs(self.special) do
    if i > 6 then names[i] = ("and %d more"):format(#self.special - 6) break end
    names[i] = token.text
  end
  return ("tokenizer %s: %s, ids 0 to %d%s"):format(self.path, self.model, self:vocab_size() - 1,
    #names > 0 and ", special tokens " .. table.concat(names, " ") or "")
end

return M
