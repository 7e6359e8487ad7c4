-- Tokenizers: ids and texts of small tokenizers of every family, with the numbers that the Python
-- package `tokenizers` gives; malformed files. spec/parity/tokenizer.py compares large ones.
local engine = require "engine"
local helper = require "spec.helper"

local folder
setup(function() folder = helper.folder() end)
teardown(function() helper.remove(folder) end)

-- A tokenizer from the parts of its file; `changes` replaces parts.
local function text_of(parts, changes)
  local list = {}
  for name in pairs(parts) do list[name] = parts[name] end
  for name, value in pairs(changes or {}) do list[name] = value end
  local fields = {}
  for name, value in pairs(list) do fields[#fields + 1] = ('"%s":%s'):format(name, value) end
  return '{"version":"1.0",' .. table.concat(fields, ",") .. "}"
end

local function open(text)
  return engine.tokenizer(helper.write(folder .. "/tokenizer.json", text))
end

local function vocab(words)
  local list, id = {}, 0
  for word in words:gmatch("%S+") do
    list[#list + 1], id = ('"%s":%d'):format(word:gsub("[\"\\]", "\\%0"), id), id + 1
  end
  return "{" .. table.concat(list, ",") .. "}"
end

local function added(...)
  local list = {}
  for _, token in ipairs { ... } do
    list[#list + 1] = ('{"id":%d,"content":"%s","special":%s,"normalized":%s,"lstrip":%s,'
      .. '"rstrip":%s,"single_word":%s}'):format(token[1], token[2], tostring(not token.plain),
      tostring(token.normalized or false), tostring(token.lstrip or false),
      tostring(token.rstrip or false), tostring(token.single_word or false))
  end
  return "[" .. table.concat(list, ",") .. "]"
end

local LLAMA3 = [[(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|]]
  .. [[ ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+]]
local PATTERNS = {
  gpt2 = [['s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+]],
  llama3 = LLAMA3, qwen2 = LLAMA3:gsub("{1,3}", ""),
}
local function splitter(pattern)
  return ('{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"%s"},'
    .. '"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,'
    .. '"use_regex":false}]}'):format(pattern)
end

local BYTES = {
  added_tokens = added { 0, "<|end|>" }, normalizer = "null",
  decoder = '{"type":"ByteLevel"}', post_processor = "null",
  model = '{"type":"BPE","vocab":' .. vocab([[<|end|> h e l o Ġ w 1 2 3 4 Ċ ! Ã © ' s S he ll hell
      hello Ġw Ġhello 12 123 1234 'S 's]])
    .. [[,"merges":["h e","l l","he ll","hell o","Ġ w","Ġ hello","1 2","12 3",["123","4"],"' S",]]
    .. [["' s"]}]],
}

local SPM = {
  added_tokens = added({ 0, "<unk>" }, { 1, "<s>" }, { 2, "</s>" }),
  normalizer = [=[{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},
    {"type":"Replace","pattern":{"String":" "},"content":"▁"}]}]=], pre_tokenizer = "null",
  post_processor = [[{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>",
    "type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<s>":{"id":
    "<s>","ids":[1],"tokens":["<s>"]}}}]],
  decoder = [=[{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":
    " "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}
    ]}]=],
  model = '{"type":"BPE","unk_token":"<unk>","fuse_unk":true,"byte_fallback":true,"vocab":'
    .. vocab "<unk> <s> </s> <0xC3> <0xA9> ▁ a b ▁a ab ▁ab" .. ',"merges":["▁ a","a b","▁a b"]}',
}

local UNIGRAM = {
  added_tokens = "[]", normalizer = '{"type":"NFKC"}', post_processor = "null",
  pre_tokenizer = '{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}',
  decoder = '{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}',
  model = [=[{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0],["▁",-2.5],["a",-3],["b",-3.5],
    ["ab",-4],["▁ab",-4.25],["c",-5],["abc",-9.5],["fi",-3.25]]}]=],
}

local BERT = {
  added_tokens = added({ 0, "[UNK]" }, { 1, "[CLS]" }, { 2, "[SEP]" }),
  normalizer = [[{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,
    "strip_accents":null,"lowercase":true}]], pre_tokenizer = '{"type":"BertPreTokenizer"}',
  post_processor = '{"type":"BertProcessing","sep":["[SEP]",2],"cls":["[CLS]",1]}',
  decoder = '{"type":"WordPiece","prefix":"##","cleanup":true}',
  model = [[{"type":"WordPiece","unk_token":"[UNK]","continuing_subword_prefix":"##",
    "max_input_chars_per_word":8,"vocab":]]
    .. vocab "[UNK] [CLS] [SEP] un ##aff ##able ! cafe 你 ##s '" .. "}",
}

local WORDS = {
  added_tokens = added({ 4, "AB", single_word = true, lstrip = true, normalized = true,
    plain = true }, { 5, "<x>", rstrip = true }),
  normalizer = '{"type":"Lowercase"}', pre_tokenizer = '{"type":"WhitespaceSplit"}',
  post_processor = "null", decoder = "null",
  model = '{"type":"WordLevel","unk_token":"?","vocab":' .. vocab "? one two cab" .. "}",
}

-- Each case: text, its ids, its decoded text (by default the text itself).
local function expect(t, cases)
  for _, case in ipairs(cases) do
    local ids = t:encode(case[1])
    assert.same(case[2], ids, case[1])
    assert.equal(case[3] or case[1], t:decode(ids))
  end
end

describe("a tokenizer", function()
  local SAME = { { "hello  hello\n\nhello's", { 21, 5, 23, 11, 11, 21, 28 } },
    { "é!<|end|>he", { 13, 14, 12, 0, 18 }, "é!he" }, { "o\n \nw", { 4, 11, 5, 11, 6 } },
    { "", {} }, { "hell'ſ", { 20, 15 }, "hell'" } }
  for name, want in pairs {
    gpt2 = { 21, 15, 17, 15, 17, 5, 26, 5, 24 },
    llama3 = { 21, 27, 27, 5, 25, 10, 5, 24 },
    qwen2 = { 21, 27, 27, 5, 7, 8, 9, 10, 5, 7, 8 } } do
    it("splits words as " .. name .. " does", function()
      local t = open(text_of(BYTES, { pre_tokenizer = splitter(PATTERNS[name]) }))
      expect(t, SAME)
      expect(t, { { "hello'S'S 1234 12", want } })
      assert.is_true(t:splits_lines())
      assert.equal("é!<|end|>he", t:decode({ 13, 14, 12, 0, 18 }, { special = true }))
    end)
  end

  it("reads GPT-2's plain ByteLevel, with a space before the text", function()
    local t = open(text_of(BYTES, { pre_tokenizer = '{"type":"ByteLevel"}' }))
    expect(t, { { "hello 1234", { 23, 5, 26 }, " hello 1234" } })
  end)

  it("falls back to bytes, fuses unknowns, and puts ids around a text", function()
    local t = open(text_of(SPM))
    local many, want = ("ab a b "):rep(9), { 1 }
    for _ = 1, 9 do
      for _, id in ipairs { 10, 8, 5, 7 } do want[#want + 1] = id end
    end
    want[#want + 1] = 5
    expect(t, { { "ab a b", { 1, 10, 8, 5, 7 } }, { "é abab", { 1, 5, 3, 4, 10, 9 } },
      { "x你y a</s>b", { 1, 5, 0, 8, 2, 5, 7 }, " a b" }, { "  ab", { 1, 5, 5, 10 } },
      { many, want } })
    assert.same({ 10 }, t:encode("ab", { special = false }))
    assert.is_false(t:splits_lines())
  end)

  it("splits a long word like a short one", function()      -- the heap, and cuts
    local t = open(text_of(SPM))
    local ids = t:encode(("ab"):rep(20000), { special = false })
    assert.equal(20000, #ids)
    assert.equal(10, ids[1])
    for i = 2, 20000 do assert.equal(9, ids[i]) end
  end)

  it("works after the first Ctrl-C, which lets the step finish; the second one stops it", function()
    local C = require("engine.base.ffi").C
    local t = open(text_of(WORDS))
    local function encode(level)
      C.eng_interrupt(level)
      local good, result = pcall(t.encode, t, "one AB two ab")
      C.eng_interrupt(0)
      return good, result
    end
    local good, ids = encode(1)
    assert.is_true(good, ids)
    assert.same({ 1, 4, 2, 4 }, ids)
    good, ids = encode(2)
    assert.is_false(good)
    assert.matches("tokenizer: interrupted", ids, 1, true)
  end)

  it("finds the most probable pieces", function()
    expect(open(text_of(UNIGRAM)), { { "ab abc", { 5, 5, 6 } }, { "aabb", { 1, 2, 4, 3 } },
      { "xyz a", { 1, 0, 1, 2 }, "<unk> a" }, { "ﬁab\n", { 1, 8, 4, 0 }, "fiab<unk>" } })
  end)

  it("finds the longest pieces from the left", function()
    expect(open(text_of(BERT)), { { "Unaffable!", { 1, 0, 6, 2 }, "!" },
      { "Café's 你你", { 1, 7, 10, 0, 8, 8, 2 }, "cafe ' 你 你" },
      { "unaffablesss x", { 1, 0, 0, 2 }, "" }, { "un\tun\226\128\139un", { 1, 3, 0, 2 }, "un" },
      { "unaff unables", { 1, 3, 4, 3, 5, 9, 2 }, "unaff unables" } })
  end)

  it("looks up whole words, and added tokens with their white space", function()
    local t = open(text_of(WORDS))
    expect(t, { { "one AB two ab", { 1, 4, 2, 4 }, "one ab two ab" },
      { "cab ab", { 3, 4 } }, { "<x>  one<x>TWO", { 5, 1, 5, 2 }, "one two" },
      { "abc", { 0 }, "?" } })
    assert.equal("<x> one", t:decode({ 5, 1 }, { special = true }))
  end)

  it("reads bytes that are not UTF-8 as U+FFFD, as Python does", function()
    local t = open(text_of(BYTES, { pre_tokenizer = splitter(PATTERNS.gpt2),
      model = '{"type":"BPE","vocab":' .. vocab "a ï ¿ ½ \239\191\189" .. ',"merges":[]}',
      added_tokens = "[]" }))
    local one = { 1, 2, 3 }
    for bytes, n in pairs { ["\255"] = 1, ["\226\130"] = 1, ["\226\40"] = 1, ["\240\159\152"] = 1,
      ["\237\160\128"] = 3, ["\192\175"] = 2, ["\244\144\128\128"] = 4 } do
      local want = { 0 }
      for _ = 1, n do
        for _, id in ipairs(one) do want[#want + 1] = id end
      end
      want[#want + 1] = 0
      local ids = t:encode("a" .. bytes .. "a")
      assert.same(want, ids, bytes)
    end
    assert.equal("a\239\191\189a", t:decode { 0, 1, 2, 0 })     -- two bytes of three
  end)

  it("reads a vocabulary that holds the empty text", function()
    local t = open(text_of(SPM, { model = '{"type":"BPE","vocab":{"":0},"merges":[]}',
      added_tokens = "[]", post_processor = "null" }))
    assert.same({}, t:encode "")
    assert.equal(1, t:vocab_size())
  end)

  it("describes itself: tokens, ids, special tokens", function()
    local t = open(text_of(SPM))
    assert.equal(11, t:vocab_size())
    assert.equal("▁ab", t:token(10))
    assert.is_nil(t:token(11))
    assert.equal(10, t:id "▁ab")
    assert.is_nil(t:id "zz")
    assert.same({ ["<unk>"] = 0, ["<s>"] = 1, ["</s>"] = 2 }, t:special_tokens())
    assert.equal("tokenizer " .. folder .. "/tokenizer.json: BPE, ids 0 to 10, special tokens "
      .. "<unk> <s> </s>", tostring(t))
    assert.equal(11, engine.tokenizer(folder):vocab_size())
    assert.has_error(function() t:decode { 11 } end)
    assert.has_error(function() t:decode { -1 } end)
    assert.has_error(function() t:encode(nil) end)
  end)
end)

describe("a malformed tokenizer.json", function()
  local LONG = ("a"):rep(4097)
  for what, case in pairs {
    ["that ends early"] = { text_of(SPM):sub(1, 200), "is not JSON" },
    ["of another kind"] = { "[1,2]", "it has no model" },
    ["with a negative id"] = { text_of(WORDS, { model =
      '{"type":"WordLevel","vocab":{"a":-1}}' }), "has the id -1, expected 0 to 4194303" },
    ["with a huge id"] = { text_of(WORDS, { model = '{"type":"WordLevel","vocab":{"a":4e9}}' }),
      "has the id 4000000000, expected 0 to 4194303" },
    ["with a fraction as id"] = { text_of(WORDS, { model =
      '{"type":"WordLevel","vocab":{"a":0.5}}' }), "expected a whole number" },
    ["with an id of two tokens"] = { text_of(WORDS, { model =
      '{"type":"WordLevel","vocab":{"a":1,"b":1}}' }), "the id 1 belongs to two tokens" },
    ["without tokens"] = { text_of(WORDS, { model = '{"type":"WordLevel","vocab":{}}',
      added_tokens = "[]" }), "the vocabulary is empty" },
    ["with a long token"] = { text_of(WORDS, { model =
      '{"type":"WordLevel","vocab":{"' .. LONG .. '":1}}' }), "expected at most 4096" },
    ["with an added token twice"] = { text_of(WORDS, { added_tokens =
      added({ 5, "x" }, { 5, "x" }) }), "is added twice" },
    ["with an added token of another id"] = { text_of(WORDS, { added_tokens = added { 5, "one" } }),
      "'one' has two ids, 1 and 5" },
    ["with a merge of an unknown token"] = { text_of(SPM, { model =
      '{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a z"]}' }),
      "merge 1 of 'a' and 'z' names 'z'" },
    ["with a merge to an unknown token"] = { text_of(SPM, { model =
      '{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"]}' }), "names 'ab'" },
    ["with an unknown model"] = { text_of(SPM, { model = '{"type":"BPF","vocab":{}}' }),
      "did you mean 'BPE'?" },
    ["with an unknown step"] = { text_of(SPM, { normalizer = '{"type":"NFX"}' }),
      "normalizer: type 'NFX' is not supported" },
    ["with an unknown expression"] = { text_of(SPM, { pre_tokenizer = splitter("a|b") }),
      "or a simple one such as \\p{N}+, got a|b" },
    ["with random merges"] = { text_of(SPM, { model =
      '{"type":"BPE","dropout":0.1,"vocab":{"a":0},"merges":[]}' }), "dropout" },
    ["with a template of an unknown id"] = { text_of(SPM, { post_processor =
      SPM.post_processor:gsub("%[1%]", "[99]") }), "the template names the id 99" },
    ["with an infinite score"] = { text_of(UNIGRAM, { model =
      '{"type":"Unigram","vocab":[["a",1e999]]}' }), "score" },
    ["with an unknown token out of range"] = { text_of(UNIGRAM, { model =
      '{"type":"Unigram","unk_id":7,"vocab":[["a",1]]}' }), "in the vocabulary, got 7" },
    ["with a malformed character map"] = { text_of(UNIGRAM, { normalizer =
      '{"type":"Precompiled","precompiled_charsmap":"AAAA"}' }), "character map" },
    ["with too deeply nested steps"] = { text_of(SPM, { normalizer =
      ('{"type":"Sequence","normalizers":['):rep(30) .. ("]}"):rep(30) }),
      "nested at most 20 deep" },
  } do
    it(what .. " is refused in one line", function()
      helper.refuses(case[2], open, case[1])
    end)
  end

  it("that is missing is refused", function()
    assert.has_error(function() engine.tokenizer(folder .. "/none") end)
    assert.has_error(function() engine.tokenizer(5) end)
  end)

  it("refuses a word of more than 16 MiB", function()
    local t = open(text_of(SPM, { model = '{"type":"BPE","vocab":{"▁":0,"a":1,"aa":2},"merges":'
      .. '[["a","a"]]}', added_tokens = "[]", post_processor = "null" }))
    helper.refuses("a word has 16777217 bytes, expected at most 16777216",
      t.encode_memory, t, ("a"):rep(2 ^ 24 + 1))
  end)
end)

describe("engine data tokenize", function()
  local function run(words)
    return helper.shell(("%s data tokenize %s"):format(helper.engine, words))
  end

  it("writes the ids of files, which data.tokens reads", function()
    open(text_of(BYTES, { pre_tokenizer = splitter(PATTERNS.gpt2) }))
    local a = helper.write(folder .. "/a.txt", "hello hello\nhell 1234")
    local b = helper.write(folder .. "/b.txt", "hello")
    local out = folder .. "/tokens.npy"
    local done = run(("%s %s --tokenizer %s -o %s --end '<|end|>'"):format(a, b, folder, out))
    assert.equal(0, done.code, done.err)
    assert.matches("tokens.npy: 9 tokens %(u16%) from 2 texts, 26 bytes in all", done.out)
    local t = engine.data.tokens { path = out, batch = 1, context = 8, shuffle = false }
    assert.same({ { 21, 23, 11, 20, 5, 26, 0, 21 } }, t:next().x:totable())
    run(("%s --lines --tokenizer %s -o %s --end '<|end|>'"):format(a, folder, out))
    t = engine.data.tokens { path = out, batch = 1, context = 6, shuffle = false }
    assert.same({ { 21, 23, 0, 20, 5, 26 } }, t:next().x:totable())
    local text = helper.read(a)
    helper.write(a, (text:gsub("\n", "\r\n")) .. "\r\n")      -- the ids of the text with LF
    run(("%s --lines --tokenizer %s -o %s --end '<|end|>'"):format(a, folder, out))
    local other = engine.data.tokens { path = out, batch = 1, context = 6, shuffle = false }
    assert.same({ { 21, 23, 0, 20, 5, 26 } }, other:next().x:totable())
  end)

  it("cuts long texts where the cut changes no id", function()
    local t = open(text_of(BYTES, { pre_tokenizer = splitter(PATTERNS.llama3) }))
    local text = ("hello'S 1234 \n\n hello! \nhello\n  hell\nw\n"):rep(60000)   -- 2.3 MB
    local out = folder .. "/long.npy"
    local done = run(("%s --tokenizer %s -o %s"):format(helper.write(folder .. "/long.txt", text),
      folder, out))
    assert.equal(0, done.code, done.err)
    local bytes, ids, n = helper.read(out), t:encode_memory(text)
    assert.equal(128 + 2 * n, #bytes)
    for i = 0, n - 1 do
      if bytes:byte(129 + 2 * i) ~= ids[i] then error("token " .. i .. " differs") end
    end
  end)

  it("refuses wrong arguments in one line", function()
    local pipe = folder .. "/pipe"
    assert.equal(0, helper.shell("mkfifo " .. pipe).code)
    for words, want in pairs {
      ["a.txt"] = "expected --tokenizer FOLDER", ["a.txt --tokenizer x"] = "expected -o FILE.npy",
      [folder .. "/none --tokenizer " .. folder .. " -o x.npy"] = "none",
      [folder .. "/a.txt --end zz --tokenizer " .. folder .. " -o x.npy"] = "no token 'zz'",
      [folder .. "/a.txt --tokenizer " .. folder .. " -o /none/x.npy"] = "cannot write",
      [folder .. "/a.txt --tokenizer " .. folder .. " -o " .. pipe] =
        "expected a file to write, got a folder, device or pipe",
      [pipe .. " --tokenizer " .. folder .. " -o x.npy"] = "expected a file, got a device or pipe",
      [folder .. "/a.txt --tokenizer " .. folder .. " -o " .. folder .. "/a.txt"] =
        "a.txt is one of the texts; expected another output file",
    } do
      local done = run(words)
      assert.equal(1, done.code)
      assert.is_truthy(done.err:find(want, 1, true), done.err)
      assert.matches("^[^\n]*\n$", done.err)
    end
    assert.matches("^usage: engine data tokenize", run("--help").out)
  end)

  it("can be the `encode` of documents; then end_token may be a text", function()
    local t = open(text_of(BYTES, { pre_tokenizer = splitter(PATTERNS.gpt2) }))
    local path = helper.write(folder .. "/lines.txt", "hello\nhell\n")
    local function first(ending)
      return engine.data.lines({ path = path, encode = t, end_token = ending, batch = 1,
        context = 4, shuffle = false }):next().x:totable()
    end
    assert.same(first(t:id "<|end|>"), first "<|end|>")
    assert.error_matches(function() first "zz" end, "the tokenizer has no token 'zz'", 1, true)
  end)
end)

describe("the core's tokenizer", function()
  it("refuses to encode before it is built, and to change afterwards", function()
    local M_ffi = require "engine.base.ffi"
    local ffi, C = M_ffi.ffi, M_ffi.C
    local out = ffi.new("eng_tokenizer *[1]")
    M_ffi.check(C.eng_tokenizer_new(out, C.ENG_TOKENS_WORDS, 0, -1, "", "", 100))
    local t = ffi.gc(out[0], C.eng_tokenizer_free)
    local list, text, size = ffi.new("const uint32_t *[1]"), ffi.new("const char *[1]"),
      ffi.new("int64_t[1]")
    local function refused(status, hint)
      assert.equal(C.ENG_ERR_STATE, status)
      assert.matches(hint, M_ffi.message(), 1, true)
    end
    refused(C.eng_tokenizer_encode(list, size, t, "a", 1, true), "call eng_tokenizer_ready first")
    refused(C.eng_tokenizer_decode(text, size, t, ffi.new("uint32_t[1]"), 1, true),
      "call eng_tokenizer_ready first")
    M_ffi.check(C.eng_tokenizer_token(t, 0, "a", 1, 0))
    M_ffi.check(C.eng_tokenizer_ready(t))
    for _, status in ipairs { C.eng_tokenizer_token(t, 1, "b", 1, 0),
      C.eng_tokenizer_added(t, 1, "b", 1, 0), C.eng_tokenizer_merge(t, "a", 1, "a", 1),
      C.eng_tokenizer_step(t, 0, C.ENG_STEP_NFC, 0, "", 0, "", 0),
      C.eng_tokenizer_frame(t, 0, true), C.eng_tokenizer_ready(t) } do
      refused(status, "hint: build another one with eng_tokenizer_new")
    end
    assert.equal(0, C.eng_tokenizer_encode(list, size, t, "a", 1, true))
  end)
end)
