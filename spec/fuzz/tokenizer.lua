-- Mutated tokenizer.json files and random texts: a file must be refused with one line or give a
-- tokenizer that encodes and decodes any bytes. Ids must have tokens, a text must give the same ids
-- twice, and no call may take two seconds of processor time (20 in sanitizer builds).
-- Deterministic; run by `make fuzz`.
-- Usage: engine spec/fuzz/tokenizer.lua [rounds [seed]]
local engine = require "engine"
local draws = require "spec.fuzz.draws"
local helper = require "spec.helper"
local draw, one_of = draws.draw, draws.one_of

local rounds, seed = tonumber(arg[1]) or 1500, tonumber(arg[2]) or 1
draws.start(seed)

local BPE = [==[{"added_tokens":[{"id":0,"content":"<s>","special":true,"lstrip":true},{"id":9,
  "content":"AB","normalized":true,"single_word":true}],"normalizer":{"type":"Sequence",
  "normalizers":[{"type":"NFKC"},{"type":"Lowercase"},{"type":"Strip"},{"type":"Prepend",
  "prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"},{"type":"Nmt"}]},
  "pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},
  {"type":"Split","pattern":{"Regex":"\\s+"},"behavior":"MergedWithNext","invert":false}]},
  "post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},
  {"Sequence":{"id":"A"}}],"special_tokens":{"<s>":{"ids":[0]}}},"decoder":{"type":"Sequence",
  "decoders":[
  {"type":"ByteFallback"},{"type":"Strip","content":"▁","start":1,"stop":2},
  {"type":"Fuse"}]},"model":{"type":"BPE","unk_token":"?","fuse_unk":true,"byte_fallback":true,
  "vocab":{"<s>":0,"?":1,"a":2,"b":3,"▁":4,"ab":5,"▁ab":6,"<0xC3>":7,"<0xA9>":8},
  "merges":["a b",["▁","ab"]]}}]==]
local BYTES = [==[{"normalizer":{"type":"NFD"},"pre_tokenizer":{"type":"ByteLevel",
  "add_prefix_space":true,"use_regex":true},"decoder":{"type":"ByteLevel"},"model":{"type":"BPE",
  "ignore_merges":true,"vocab":{"a":0,"b":1,"Ġ":2,"ab":3,"Ġab":4,"Ã":5},
  "merges":["a b","Ġ ab"]}}]==]
local UNIGRAM = [==[{"normalizer":{"type":"Precompiled","precompiled_charsmap":
  "EAAAAAABAAAAAQAAAAAAAAAAAABhAA=="},"pre_tokenizer":{"type":"Metaspace","replacement":"▁",
  "prepend_scheme":"first","split":true},"decoder":{"type":"Metaspace","replacement":"▁"},"model":
  {"type":"Unigram","unk_id":0,"byte_fallback":true,"vocab":[["<unk>",0],["▁",-2],["a",-3.5],
  ["ab",-4],["<0xC3>",-9]]}}]==]
local BERT = [==[{"normalizer":{"type":"BertNormalizer"},
  "pre_tokenizer":{"type":"BertPreTokenizer"},
  "post_processor":{"type":"BertProcessing","sep":["[S]",1],"cls":["[C]",2]},"decoder":{"type":
  "WordPiece","prefix":"##"},"model":{"type":"WordPiece","unk_token":"[U]",
  "continuing_subword_prefix":"##","max_input_chars_per_word":20,"vocab":{"[U]":0,"[S]":1,"[C]":2,
  "a":3,"##b":4,"##":5,"ab":6}}}]==]
local SEEDS = { BPE, BYTES, UNIGRAM, BERT }

local PIECES = { "null", "true", "-1", "0", "1e999", "4194304", "99999999999", "0.5", "[]", "{}",
  '""', '"a"', '"▁"', '"<s>"', "[[", "{", "}", "]", ",", ":", '"', "\\", "\\u0000", "\\ud800",
  "\255",
  '"type":"NFC"', '"type":"Sequence"', '"type":"WordLevel"', '"merges":[]', '"a":0', '"b":2',
  '"type":"Unigram"', '"type":"BPE"', '"type":"Punctuation"', '"behavior":"Removed"',
  '"end_of_word_suffix":"</w>"', '"continuing_subword_prefix":"a"', '"dropout":0',
  '"replacement":""', '"prepend":""', '"content":""', '"String":""', ("a"):rep(5000) }

local function mutate(text)
  for _ = 1, 1 + draw(2) do
    local at, length = 1 + draw(#text), draw(20)
    local kind = draw(5)
    if kind == 0 then text = text:sub(1, at) .. string.char(draw(256)) .. text:sub(at + 2)
    elseif kind == 1 then text = text:sub(1, at) .. text:sub(at + length)
    elseif kind == 2 then text = text:sub(1, at) .. one_of(PIECES) .. text:sub(at + 1)
    elseif kind == 3 then
      local from = text:find('[%d"]', at) or at        -- a number or a string becomes another value
      local first, last = text:find(text:sub(from, from) == '"' and '"[^"]*"' or "%d+", from)
      if first then text = text:sub(1, first - 1) .. one_of(PIECES) .. text:sub(last + 1) end
    else
      local from = 1 + draw(#text)
      text = text:sub(1, at) .. text:sub(from, from + length) .. text:sub(at + 1)
    end
  end
  return draw(30) == 0 and text:sub(1, draw(#text)) or text
end

local BITS = { "a", "b", "ab", " ", "  ", "\n", "\r\n", "<s>", "AB", "é", "e\204\129", "你好", "\0",
  "\255", "\226\130", "\240\159\152\128", "'s", "123", "▁", "##b", "ﬁ", "\226\128\139", "İ", "!" }

local function random_text()
  local parts = {}
  for i = 1, draw(40) do
    parts[i] = draw(6) == 0 and string.char(draw(256)) or one_of(BITS)
  end
  if draw(50) == 0 then parts[#parts + 1] = one_of(BITS):rep(20000) end
  return table.concat(parts)
end

local folder = helper.folder()
local path = folder .. "/tokenizer.json"
local accepted, refused = 0, 0

local function fail(what, round)
  io.stderr:write(("tokenizer: round %d of seed %d: %s\nthe file is %s\n"):format(round, seed, what,
    path))
  os.exit(1)
end

-- Calls f; returns its results, or nil after an error of one line.
local function guarded(round, f, ...)
  local began = os.clock()
  local result = { pcall(f, ...) }
  if os.clock() - began > (helper.sanitized and 20 or 2) then fail("took too long", round) end
  if result[1] then return unpack(result, 2) end
  local message = tostring(result[2])
  if message:find("\n") or message:find("attempt to") or message:find("bad argument") then
    fail("expected a one-line message for users, got: " .. message, round)
  end
end

for round = 1, rounds do
  local text = SEEDS[1 + draw(#SEEDS)]
  helper.write(path, draw(3) == 0 and text or mutate(text))
  local t = guarded(round, engine.tokenizer, path)
  if t then
    accepted = accepted + 1
    for _ = 1, 4 do
      local input = random_text()
      local ids = guarded(round, t.encode, t, input)
      local again = ids and t:encode(input)
      for i, id in ipairs(ids or {}) do
        if again[i] ~= id or not t:token(id) then
          fail("the second encode gave other ids, or an id has no token", round)
        end
      end
      if ids then
        guarded(round, t.decode, t, ids, { special = true })
        local other = {}
        for i = 1, draw(10) do other[i] = draw(t:vocab_size() + 1) end
        guarded(round, t.decode, t, other)
      end
    end
    if tostring(t) == "" then fail("tostring gave an empty text", round) end
  else
    refused = refused + 1
  end
  if round % 100 == 0 then collectgarbage() end
end
helper.remove(folder)
print(("tokenizer: %d files accepted, %d refused"):format(accepted, refused))
