-- Converts the normalizers, pre-tokenizers, decoders and post-processors of a tokenizer.json into
-- the core's steps. There is a table for each of these four, with a function for each type of
-- component. The function takes two arguments: `to`, which gets the steps, and a component of the
-- file. It calls to.stage(kind, flags, a, b) to add a step (core/engine_tokenizer.h explains flags
-- and the texts a and b), to.frame(id, after) to add a special token before or after every text,
-- and to.fail(format, ...) to raise an error. A type that is not in the table raises a one-line
-- error. Called by tokenizer.lua.
local M_ffi = require "engine.base.ffi"
local cjson = require "cjson"
local nearest = require "engine.base.nearest"

local C, value_text = M_ffi.C, M_ffi.value_text
local M = {}

-- ------------------------------------------------------------------ fields

--- Returns whether a field is in the file and is not null.
function M.given(value) return value ~= nil and value ~= cjson.null end
local given = M.given

-- The types of Lua -> JSON's words, for messages.
local JSON = { table = "a list or an object", string = "a string", number = "a number",
  boolean = "true or false" }

--- Returns a field of a component, after a check that its type is `kind`. default: what to return
--- if the field is missing or null; without a default, such a field is an error.
function M.field(to, part, name, kind, default)
  local value, owner = part[name], type(part.type) == "string" and part.type .. "." or ""
  if given(value) and type(value) == kind then return value end
  if given(value) or default == nil then
    to.fail("%s%s: expected %s, got %s", owner, name, JSON[kind],
      given(value) and (type(value) == "table" and JSON.table or value_text(value)) or "nothing")
  end
  return default
end
local field = M.field

local function number(to, part, name, default)
  local value = field(to, part, name, "number", default)
  if value % 1 ~= 0 or value < 0 or value > 255 then
    to.fail("%s.%s: expected a whole number from 0 to 255, got %g", part.type, name, value)
  end
  return value
end

-- Adds each component in the list part[name].
local function list_of(to, part, name, table_of)
  for _, inner in ipairs(field(to, part, name, "table")) do M.add(to, inner, table_of) end
end

--- Adds a component by its type. table_of: M.normalizers, M.splitters, M.decoders or M.processors.
function M.add(to, part, table_of)
  if not given(part) then return end
  local kind = type(part) == "table" and part.type
  if type(kind) ~= "string" then
    to.fail("expected an object whose 'type' is a string, got %s", type(part) == "table"
      and "an object whose 'type' is " .. value_text(part.type) or value_text(part))
  end
  to.depth = (to.depth or 0) + 1
  if to.depth > 20 then to.fail("expected components nested at most 20 deep") end
  local add = table_of[kind] or to.fail("type '%s' is not supported%s", kind,
    nearest.hint(kind, nearest.keys(table_of)))
  add(to, part)
  to.depth = to.depth - 1
end

-- ------------------------------------------------------------------ patterns

local CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
local LINES = [[|\s*[\r\n]+|\s+(?!\S)|\s+]]
local WORDS = "(?i:" .. CONTRACTIONS .. [[)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*]]
  .. LINES

-- Regular expression -> the core's scanner that splits a text in the same way.
local SCANS = {
  [CONTRACTIONS .. [[| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+]]] = C.ENG_SCAN_GPT2,
  [WORDS:format([[\p{N}{1,3}]])] = C.ENG_SCAN_LLAMA3,
  [WORDS:format([[\p{N}]])] = C.ENG_SCAN_QWEN2,
  [ [==[[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+]==]
    .. [==[|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*]==]
    .. LINES] = C.ENG_SCAN_DEEPSEEK,
  ["[一-龥぀-ゟ゠-ヿ]+"] = C.ENG_SCAN_CJK,
  [ [[\p{N}{1,3}]] ] = C.ENG_SCAN_DIGITS3, [ [[\p{N}]] ] = C.ENG_SCAN_NUMERIC,
  [ [[\p{N}+]] ] = C.ENG_SCAN_DIGITS, [ [[\s]] ] = C.ENG_SCAN_SPACE,
  [ [[\s+]] ] = C.ENG_SCAN_SPACES, [ [[\w+|[^\w\s]+]] ] = C.ENG_SCAN_WORDS,
  [" {2,}"] = C.ENG_SCAN_BLANKS,
}

local BEHAVIORS = { Isolated = C.ENG_SPLIT_ISOLATED, Removed = C.ENG_SPLIT_REMOVED,
  Contiguous = C.ENG_SPLIT_CONTIGUOUS, MergedWithPrevious = C.ENG_SPLIT_WITH_PREVIOUS,
  MergedWithNext = C.ENG_SPLIT_WITH_NEXT }

local function behavior(to, part, default)
  local name = field(to, part, "behavior", "string", default)
  return BEHAVIORS[name] or to.fail("%s.behavior: unknown behavior '%s'%s", part.type, name,
    nearest.choices(name, BEHAVIORS, "behaviors"))
end

-- Reads the field `pattern`, { String = text } or { Regex = expression }. Returns the text and nil,
-- or "" and the core's scanner for the expression.
local function pattern(to, part)
  local value = field(to, part, "pattern", "table")
  local text, expression = value.String, value.Regex
  if type(text) == "string" then return text, nil end
  if type(expression) ~= "string" then
    to.fail("%s.pattern: expected an object with a string 'String' or 'Regex', got neither",
      part.type)
  end
  expression = expression:gsub("\r", "\\r"):gsub("\n", "\\n")   -- some files have raw line ends
  return "", SCANS[expression] or to.fail("%s: expected the expression of GPT-2, Llama 3, Qwen2 "
    .. "or DeepSeek-V3, or a simple one such as \\p{N}+, got %s", part.type, expression)
end

local function split(to, scan, how, invert, text)
  to.stage(C.ENG_STEP_SPLIT, how + (invert and 8 or 0) + (scan and 16 * (1 + scan) or 0), text)
end

local function replace(to, part)
  local text, scan = pattern(to, part)
  to.stage(C.ENG_STEP_REPLACE, scan and scan + 1 or 0, text, field(to, part, "content", "string"))
end

-- ------------------------------------------------------------------ normalizers

local function plain(kind) return function(to) to.stage(kind) end end

local BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

local function base64(to, text)
  local value = {}
  for i = 1, 64 do value[BASE64:byte(i)] = i - 1 end
  local out, bits, held = {}, 0, 0
  for i = 1, #text do
    local v = value[text:byte(i)]
    if v then
      held, bits = held * 64 + v, bits + 6
      if bits >= 8 then
        bits = bits - 8
        local byte = math.floor(held / 2 ^ bits)
        out[#out + 1], held = string.char(byte), held - byte * 2 ^ bits
      end
    elseif text:byte(i) ~= 61 then
      to.fail("Precompiled.precompiled_charsmap is not base64 at character %d", i)
    end
  end
  return table.concat(out)
end

M.normalizers = {
  Sequence = function(to, part) list_of(to, part, "normalizers", M.normalizers) end,
  NFC = plain(C.ENG_STEP_NFC), NFD = plain(C.ENG_STEP_NFD), NFKC = plain(C.ENG_STEP_NFKC),
  NFKD = plain(C.ENG_STEP_NFKD), Lowercase = plain(C.ENG_STEP_LOWERCASE),
  StripAccents = plain(C.ENG_STEP_STRIP_ACCENTS), Nmt = plain(C.ENG_STEP_NMT),
  ByteLevel = plain(C.ENG_STEP_BYTES), Replace = replace,
  Strip = function(to, part)
    to.stage(C.ENG_STEP_TRIM, (field(to, part, "strip_left", "boolean", true) and 1 or 0)
      + (field(to, part, "strip_right", "boolean", true) and 2 or 0))
  end,
  Prepend = function(to, part)
    to.stage(C.ENG_STEP_PREPEND, 0, field(to, part, "prepend", "string"))
  end,
  Precompiled = function(to, part)
    to.stage(C.ENG_STEP_CHARSMAP, 0, base64(to, field(to, part, "precompiled_charsmap", "string")))
  end,
  BertNormalizer = function(to, part)
    local lowercase = field(to, part, "lowercase", "boolean", true)
    local accents = part.strip_accents
    if not given(accents) then accents = lowercase end
    if field(to, part, "clean_text", "boolean", true) then to.stage(C.ENG_STEP_CLEAN) end
    if field(to, part, "handle_chinese_chars", "boolean", true) then
      to.stage(C.ENG_STEP_CHINESE)
    end
    if accents then
      to.stage(C.ENG_STEP_NFD)
      to.stage(C.ENG_STEP_STRIP_ACCENTS, 1)
    end
    if lowercase then to.stage(C.ENG_STEP_LOWERCASE) end
  end,
}

-- ------------------------------------------------------------------ pre-tokenizers

local SCHEMES = { always = 1, first = 2 }     -- flags of ENG_STEP_PREPEND

-- Returns Metaspace's character, and a flag for ENG_STEP_PREPEND, which prepends the character
-- where it is missing: 1 (to every piece), 2 (only at the start of the text) or nil (never).
local function metaspace(to, part)
  local scheme = field(to, part, "prepend_scheme", "string", "always")
  if part.add_prefix_space == false then scheme = "never" end
  if scheme ~= "never" and not SCHEMES[scheme] then
    to.fail("Metaspace.prepend_scheme: expected first, always or never, got '%s'", scheme)
  end
  return field(to, part, "replacement", "string"), SCHEMES[scheme]
end

M.splitters = {
  Sequence = function(to, part) list_of(to, part, "pretokenizers", M.splitters) end,
  ByteLevel = function(to, part)
    if field(to, part, "add_prefix_space", "boolean", true) then
      to.stage(C.ENG_STEP_PREPEND, 1, " ")
    end
    if field(to, part, "use_regex", "boolean", true) then
      split(to, C.ENG_SCAN_GPT2, C.ENG_SPLIT_ISOLATED)
    end
    to.stage(C.ENG_STEP_BYTES)
  end,
  Metaspace = function(to, part)
    local char, scheme = metaspace(to, part)
    to.stage(C.ENG_STEP_REPLACE, 0, " ", char)
    if scheme then to.stage(C.ENG_STEP_PREPEND, scheme, char) end
    if field(to, part, "split", "boolean", true) then
      split(to, nil, C.ENG_SPLIT_WITH_NEXT, false, char)
    end
  end,
  Split = function(to, part)
    local text, scan = pattern(to, part)
    split(to, scan, behavior(to, part), field(to, part, "invert", "boolean", false), text)
  end,
  Whitespace = function(to) split(to, C.ENG_SCAN_WORDS, C.ENG_SPLIT_REMOVED, true) end,
  WhitespaceSplit = function(to) split(to, C.ENG_SCAN_SPACE, C.ENG_SPLIT_REMOVED) end,
  BertPreTokenizer = function(to)
    split(to, C.ENG_SCAN_SPACE, C.ENG_SPLIT_REMOVED)
    split(to, C.ENG_SCAN_PUNCTUATION, C.ENG_SPLIT_ISOLATED)
  end,
  Punctuation = function(to, part)
    split(to, C.ENG_SCAN_PUNCTUATION, behavior(to, part, "Isolated"))
  end,
  Digits = function(to, part)
    split(to, C.ENG_SCAN_NUMERIC, field(to, part, "individual_digits", "boolean", false)
      and C.ENG_SPLIT_ISOLATED or C.ENG_SPLIT_CONTIGUOUS)
  end,
  CharDelimiterSplit = function(to, part)
    split(to, nil, C.ENG_SPLIT_REMOVED, false, field(to, part, "delimiter", "string"))
  end,
}

-- ------------------------------------------------------------------ decoders

M.decoders = {
  Sequence = function(to, part) list_of(to, part, "decoders", M.decoders) end,
  ByteLevel = plain(C.ENG_STEP_FROM_BYTES), ByteFallback = plain(C.ENG_STEP_FROM_FALLBACK),
  Fuse = plain(C.ENG_STEP_FUSE), Replace = replace,
  Metaspace = function(to, part)
    local char, scheme = metaspace(to, part)
    to.stage(C.ENG_STEP_FROM_METASPACE, scheme and 1 or 0, char)
  end,
  WordPiece = function(to, part)
    to.stage(C.ENG_STEP_FROM_WORDPIECE, field(to, part, "cleanup", "boolean", true) and 1 or 0,
      field(to, part, "prefix", "string", "##"))
  end,
  BPEDecoder = function(to, part)
    to.stage(C.ENG_STEP_FROM_SUFFIX, 0, field(to, part, "suffix", "string", "</w>"))
  end,
  Strip = function(to, part)
    to.stage(C.ENG_STEP_CUT, number(to, part, "start", 0) + 256 * number(to, part, "stop", 0),
      field(to, part, "content", "string"))
  end,
}

-- ------------------------------------------------------------------ post-processors

-- Adds the special tokens that TemplateProcessing puts around a text.
local function template(to, part)
  local tokens, after = field(to, part, "special_tokens", "table", {}), false
  for _, piece in ipairs(field(to, part, "single", "table")) do
    local special = type(piece) == "table" and piece.SpecialToken
    if type(piece) == "table" and type(piece.Sequence) == "table" then
      if after then to.fail("TemplateProcessing.single: expected one Sequence, got two") end
      after = true
    elseif type(special) == "table" then
      local entry = tokens[special.id]
      if type(entry) ~= "table" or type(entry.ids) ~= "table" then
        to.fail("TemplateProcessing.special_tokens: expected an entry '%s' with a list 'ids'",
          tostring(special.id))
      end
      for _, id in ipairs(entry.ids) do to.frame(id, after) end
    else
      to.fail("TemplateProcessing.single: expected each entry to be a Sequence or a SpecialToken")
    end
  end
  if not after then to.fail("TemplateProcessing.single: expected one Sequence, got none") end
end

-- BertProcessing and RobertaProcessing put `cls` before and `sep` after a text; both fields are
-- { token, id }.
local function around(to, part)
  for name, after in pairs { cls = false, sep = true } do
    to.frame(field(to, part, name, "table")[2], after)
  end
end

M.processors = {
  Sequence = function(to, part) list_of(to, part, "processors", M.processors) end,
  ByteLevel = function() end,        -- changes only offsets, not ids
  TemplateProcessing = template, BertProcessing = around, RobertaProcessing = around,
}

return M
