-- Loaders of documents: JSONL, chat, preferences, plain text, CSV; packing; positions to resume
-- from, skipping, mixtures, and invalid files.
local engine = require "engine"
local helper = require "spec.helper"
local json = require "engine.base.json"

local data = engine.data
local folder

local function file(name, text) return helper.write(folder .. "/" .. name, text) end

-- Ids as text: _ is a target that does not count, | the end token.
local function text_of(row)
  local out = {}
  for i, id in ipairs(row) do
    out[i] = id == -100 and "_" or id == 0 and "|" or string.char(id)
  end
  return table.concat(out)
end

-- The rows of n batches, each as "inputs>targets".
local function rows(loader, n)
  local list = {}
  for _ = 1, n do
    local batch = loader:next()
    local x, y = batch.x:totable(), batch.y:totable()
    for i in ipairs(x) do list[#list + 1] = text_of(x[i]) .. ">" .. text_of(y[i]) end
    engine.end_step()
  end
  return list
end

local function jsonl(texts)
  local lines = {}
  for i, text in ipairs(texts) do lines[i] = json.encode { text = text } .. "\n" end
  return table.concat(lines)
end

local function with(o, more)
  local options = { batch = 1, context = 4, shuffle = false }
  for _, list in ipairs { o, more or {} } do
    for key, value in pairs(list) do options[key] = value end
  end
  return options
end

-- Documents of different lengths, in two files.
local function corpus()
  local texts = {}
  for i = 1, 23 do texts[i] = ("%d:%s"):format(i, ("abc"):rep(i * 7 % 5)) end
  return { file("1.jsonl", jsonl(texts)), file("2.jsonl", jsonl { "second file", "", "the end" }) }
end

local CHAT = [[{"messages":[{"role":"system","content":"S"},{"role":"user","content":"hi"},]]
  .. [[{"role":"assistant","content":"yo"},{"role":"user","content":"2"},]]
  .. [[{"role":"assistant","content":"b"}]}]] .. "\n"
local function plain(role) return role:sub(1, 1) .. ":", ";" end

-- Asserts that `code` raises `expected`, in one line that begins with the position in the script.
local function refuses(code, expected)
  local chunk = assert(loadstring("local y = " .. code .. "\nreturn y", "=script"))
  local good, message = pcall(setfenv(chunk, { data = data, folder = folder }))
  assert.is_false(good, code)
  assert.equal("script:1: " .. expected:gsub("FOLDER", (folder:gsub("%%", "%%%%"))), message)
end

describe("data of documents", function()
  before_each(function() folder = helper.folder() end)
  after_each(function()
    engine.end_step()
    helper.remove(folder)
  end)

  -- ---------------------------------------------------------------- rows

  it("packed: documents and end tokens follow each other; every token is a target once", function()
    local path = file("a.jsonl", jsonl { "abc", "de", "f" })
    local loader = data.jsonl(with { path = path })
    assert.same({ "abc|>bc|d", "de|f>e|f|", "|abc>abc|" }, rows(loader, 3))
    local batch = data.jsonl(with { path = path, batch = 2 }):next()
    assert.same({ "i32", "i32", 8 }, { batch.x.dtype, batch.y.dtype, batch.tokens })
    assert.same({ "abcd>bcde", "efab>fabc" }, rows(data.jsonl(with { path = path,
      end_token = false }), 2))
  end)

  it("not packed: a row holds one document, padded or cut", function()
    local path = file("a.jsonl", jsonl { "ab", "abcdefgh" })
    local loader = data.jsonl(with { path = path, pack = false })
    assert.same({ "ab||>b|__", "abcd>bcde", "ab||>b|__" }, rows(loader, 3))
  end)

  it("shuffled, every epoch has each document once, in another order", function()
    local path = file("a.txt", "a\nb\nc\nd\ne\nf\ng\nh\n")
    local loader = data.lines { path = path, batch = 1, context = 2, pack = false, seed = 5 }
    local first, second = rows(loader, 8), rows(loader, 8)
    assert.not_same(first, second)
    table.sort(first)
    table.sort(second)
    assert.same(first, second)
    assert.equal("h|>|_", first[8])
  end)

  it("encode is a function or an object, and the caller gives end_token", function()
    local path = file("a.jsonl", jsonl { "a b", "c" })
    local words = { a = 65, b = 66, c = 67 }
    local function encode(text)
      local ids = {}
      for word in text:gmatch("%S+") do ids[#ids + 1] = words[word] end
      return ids
    end
    local special
    local object = { encode = function(_, text, options)
      special = options.special
      return encode(text)
    end }
    local expected = { "ABZC>BZCZ", "ZABZ>ABZC" }
    for _, given in ipairs { encode, object } do
      assert.same(expected, rows(data.jsonl(with { path = path, encode = given, end_token = 90 }),
        2))
    end
    assert.is_false(special)
  end)

  it("lines and paragraphs of plain text", function()
    local path = file("a.txt", "\239\187\191a\r\n  b\n\n \nc\n")
    local function all(by)
      return rows(data.lines(with { path = path, by = by, pack = false, context = 8 }), 3)
    end
    assert.same({ "a|||||||>|_______", "  b|||||>" .. " b|_____", "c|||||||>|_______" },
      all "line")
    assert.same("a\r\n  b||>\r\n  b|__", all "paragraph"[1])
    assert.same("c|||||||>|_______", all "paragraph"[2])
  end)

  it("csv: quoted cells hold separators, quotes and line ends", function()
    local text = 'id,text\r\n1,"a,b"\r\n2,"c ""d""\n\ne"\r\n3,\r\n4,f'
    local path = file("a.csv", text)
    local o = { path = path, pack = false, context = 10 }
    local expected = { "a,b|||||||>,b|_______", 'c "d"\n\ne||>' .. ' "d"\n\ne|__',
      "f|||||||||>|_________", "a,b|||||||>,b|_______" }
    assert.same(expected, rows(data.csv_text(with(o)), 4))
    file("a.csv", text:gsub(",", ";"):gsub("a;b", "a,b"))
    assert.same(expected, rows(data.csv_text(with(o, { separator = ";" })), 4))
  end)

  it("finds records that lie across the blocks in which a file is read", function()
    local texts, lines, cells = {}, {}, { "text\n" }
    for i = 1, 900 do
      texts[i] = i .. ("x"):rep(i * 7919 % 1500)          -- 670 KB in blocks of 256 KiB
      lines[i] = texts[i] .. ("\n"):rep(1 + i % 3)
      cells[i + 1] = '"' .. texts[i] .. ',""\n"\r\n'
    end
    local function first_tokens(make, name, contents, by)
      local loader = make { path = file(name, table.concat(contents)), by = by, batch = 900,
        context = 1510, pack = false, shuffle = false }
      assert.equal(900, loader.examples)
      local found = {}
      for i, row in ipairs(loader:next().x:totable()) do
        found[i] = text_of(row):match("^(%d+x*)")
      end
      engine.end_step()
      return found
    end
    assert.same(texts, first_tokens(data.lines, "a.txt", lines))
    assert.same(texts, first_tokens(data.csv_text, "a.csv", cells))
    for i in ipairs(lines) do lines[i] = texts[i] .. "\n\n" end
    assert.same(texts, first_tokens(data.lines, "b.txt", lines, "paragraph"))
  end)

  it("chat: only the assistant's messages and their end tokens count", function()
    local path = file("a.jsonl", CHAT)
    local o = { path = path, context = 24, template = plain, pack = false }
    assert.same({ "s:S;u:hi;a:yo;u:2;a:b;||" .. ">" .. "__________yo;_____" .. "_b;|__" },
      rows(data.chat(with(o)), 1))
    local learnt = {}
    for _, id in ipairs(data.chat(with { path = path, context = 160,
      pack = false }):next().y:totable()[1]) do
      if id ~= -100 then learnt[#learnt + 1] = id end
    end
    assert.equal("yo<|im_end|>\nb<|im_end|>\n|", text_of(learnt))
  end)

  it("chat: batches in which no target counts are left out", function()
    local nothing = '{"messages":[{"role":"user","content":"hello there"}]}\n'
    local path = file("a.jsonl", nothing .. CHAT .. nothing)
    local loader = data.chat(with { path = path, template = plain, context = 4 })
    for _, row in ipairs(rows(loader, 20)) do
      assert.is_truthy(row:match(">(.*)"):find("[^_]"), row)
      assert.is_nil(row:find("hello", 1, true))
    end
    file("a.jsonl", nothing)
    refuses("data.chat { path = folder .. '/a.jsonl' }:next()", "data.chat: none of the 1 " ..
      "documents has a token that counts in the loss; hint: only tokens of messages " ..
      "with the role 'assistant' count")
  end)

  it("the loss of a chat covers the assistant's tokens alone", function()
    local batch = data.chat(with { path = file("a.jsonl", CHAT), template = plain, context = 24,
      pack = false }):next()
    local logits = engine.randn(24, 256)
    local loss = engine.cross_entropy(logits, batch.y:view(24)):item()
    local each = engine.cross_entropy(logits, batch.y:view(24), { reduction = "none" }):totable()
    local sum, n = 0, 0
    for i, target in ipairs(batch.y:totable()[1]) do
      if target ~= -100 then sum, n = sum + each[i], n + 1
      else assert.equal(0, each[i]) end
    end
    assert.equal(6, n)
    assert.near(sum / n, loss, 1e-5)
  end)

  it("preferences: preferred rows, then rejected rows; prompts do not count", function()
    local path = file("a.jsonl", '{"prompt":"p=","chosen":"44","rejected":"5"}\n'
      .. '{"prompt":"abcdef","chosen":"x","rejected":"vwxyz"}\n')
    local loader = data.preferences(with { path = path, batch = 2, context = 5 })
    local batch = loader:next()
    assert.same({ 4, 5 }, batch.x.shape)
    loader:restore((data.preferences(with { path = path, batch = 2, context = 5 }):state()))
    -- a long prompt loses its start, a long answer its end
    assert.same({ "p=44|>_44|_", "cdefx>___x|", "p=5||>_5|__", "fvwxy>vwxyz" }, rows(loader, 1))
  end)

  -- ---------------------------------------------------------------- positions

  it("resumes from every position as if it had never stopped", function()
    local paths = corpus()
    for _, o in ipairs { { pack = true }, { pack = false }, { shuffle = false },
      { context = 37 } } do
      local function loader()
        return data.jsonl(with({ path = paths, batch = 2, shuffle = true, seed = 3 }, o))
      end
      local whole = rows(loader(), 40)
      for place = 0, 30, 3 do
        local one, two, three = loader(), loader(), loader()
        rows(one, place)
        local state = json.decode(json.encode(one:state()))
        rows(two, 7)
        two:restore(state)
        three:skip(place)
        for _, other in ipairs { two, three } do
          for k, row in ipairs(rows(other, 5)) do assert.equal(whole[2 * place + k], row) end
        end
      end
    end
  end)

  it("refuses a position of other files, options or tokens", function()
    local path = file("a.jsonl", jsonl { "abc", "def", "ghi" })
    local function loader(o) return data.jsonl(with({ path = path }, o)) end
    local state = json.decode(json.encode(loader():state()))
    for key, value in pairs { batch = 2, context = 5, seed = 9, shuffle = true, pack = false,
      end_token = 7 } do
      assert.error_matches(function() loader { [key] = value }:restore(state) end,
        "this position was saved with " .. key)
    end
    local function swapped(text) return { text:byte(1, -1) } end
    assert.error_matches(function()
      loader { encode = function(text) return swapped(text:reverse()) end,
        end_token = 0 }:restore(state)
    end, "saved with encoding %x+, but the loader has %x+")
    loader { encode = swapped, end_token = 0 }:restore(state)     -- the same tokens
    for _, texts in ipairs { { "abc", "def", "gh" }, { "abc", "def", "ghj" } } do
      file("a.jsonl", jsonl(texts))
      assert.error_matches(function() loader():restore(state) end, "data.jsonl: " ..
        path:gsub("%p", "%%%0") .. " has changed since this position was saved %(45 bytes")
    end
    assert.error_matches(function() loader():restore { at = 1 } end, "expected a position")
    file("a.jsonl", jsonl { "abc", "def", "ghi" })
    assert.error_matches(function()
      loader():restore(setmetatable({ files = { 1 } }, { __index = state }))
    end, "has changed since this position was saved")
    state.token = 99
    local other = loader()
    other:restore(state)
    assert.error_matches(function() other:next() end, "the position does not fit the documents")
  end)

  it("refuses a file that changes while it is read", function()
    local path = file("a.jsonl", jsonl { "abc", "def", "ghi" })
    local loader = data.jsonl(with { path = path })
    file("a.jsonl", jsonl { "abc" })
    assert.error_matches(function() rows(loader, 3) end, "a.jsonl had 45 bytes when it was opened "
      .. "and has 15 now; hint: files must not change while they are read")
  end)

  -- ---------------------------------------------------------------- mixtures

  it("a mixture draws from its loaders by their weights", function()
    local a, b = file("a.txt", "aaaaaaaa\n"), file("b.txt", "bbbbbbbb\n")
    local function mix(o)
      return data.mix { loaders = { data.lines(with { path = a }), data.lines(with { path = b }) },
        weights = o.weights, batch = o.batch, seed = o.seed }
    end
    local function share(loader, n)
      local count = 0
      for _, row in ipairs(rows(loader, n)) do
        if row:find("b") then count = count + 1 end
      end
      return count
    end
    assert.near(750, share(mix { weights = { 1, 3 } }, 1000), 45)       -- three deviations: 41
    assert.equal(0, share(mix { weights = { 1, 0 } }, 100))
    local joined = mix { batch = 6 }:next()
    assert.same({ { 6, 4 }, { 6, 4 }, 24 }, { joined.x.shape, joined.y.shape, joined.tokens })
    assert.same(rows(mix { seed = 1 }, 20), rows(mix { seed = 1 }, 20))
    assert.not_same(rows(mix { seed = 1 }, 20), rows(mix { seed = 2 }, 20))
    assert.same(rows(mix { batch = 4 }, 5), rows(mix {}, 20))
  end)

  it("a mixture resumes and skips, also with a loader of another kind", function()
    local paths, text = corpus(), ("to be or not "):rep(9)
    local function mix(weights)
      return data.mix { weights = weights or { 2, 1 }, batch = 3, loaders = {
        data.jsonl(with { path = paths, shuffle = true }),
        data.text { text = text, batch = 1, context = 4 } } }
    end
    local whole = rows(mix(), 20)
    local one, two, three = mix(), mix(), mix()
    rows(one, 9)
    rows(two, 2)
    local state = json.decode(json.encode(one:state()))
    two:restore(state)
    three:skip(9)
    for _, other in ipairs { two, three } do
      for k, row in ipairs(rows(other, 5)) do assert.equal(whole[3 * 9 + k], row) end
    end
    assert.error_matches(function() mix { 1, 2 }:restore(state) end, "saved with weights 2 1")
    state.loaders[2] = nil
    local refusing = mix()
    rows(refusing, 4)
    local before = refusing:state()
    assert.error_matches(function() refusing:restore(state) end, "expected a position")
    assert.same(before, refusing:state())      -- the first loader has not moved either
    assert.equal(whole[3 * 4 + 1], rows(refusing, 1)[1])
  end)

  it("mixtures that cannot work are refused in one line", function()
    file("a.txt", "abc\n")
    file("b.jsonl", '{"prompt":"a","chosen":"b","rejected":"c"}')
    refuses("data.mix {}", "data.mix: expected loaders = a list of loaders, got nothing")
    refuses("data.mix { loaders = { { next = function() end } } }",
      "data.mix: expected loader 1 to have next(), state() and restore(), but it has no state()")
    local two = "data.mix { loaders = { data.lines { path = folder .. '/a.txt' }, "
      .. "data.lines { path = folder .. '/a.txt', context = 5 } }, "
    refuses(two .. "weights = { 1 } }",
      "data.mix: expected 2 weights, one for each loader, got 1")
    refuses(two .. "weights = { 1, -1 } }",
      "data.mix: expected weight 2 to be a finite number of 0 or more, got -1")
    refuses(two .. "weights = { 0, 0 } }", "data.mix: expected a weight above 0, got only 0")
    refuses(two .. "weights = { 1e308, 1e308 } }", "data.mix: expected weights with a " ..
      "finite sum, got inf")
    local message = helper.failure(function()
      local lines = { path = folder .. "/a.txt", batch = 1 }
      data.mix { batch = 20, loaders = { data.lines(lines), data.lines { path = lines.path,
        batch = 1, context = 5 } } }:next()
    end)
    assert.matches("data.mix: [xy] is i32 %[1 x %d+%] in batches of loader %d, but i32 "
      .. "%[1 x %d+%] in batches of loader %d; expected rows of one dtype and shape", message)
  end)

  it("a mixture refuses a field that only some batches have, whichever comes first", function()
    local function loader(...)
      local keys = { ... }
      return { state = function() end, restore = function() end, next = function()
        local batch = {}
        for _, key in ipairs(keys) do batch[key] = engine.zeros(1, 2) end
        return batch
      end }
    end
    for seed = 1, 8 do
      assert.error_matches(function()
        data.mix { loaders = { loader("x"), loader("x", "mask") }, batch = 16, seed = seed }:next()
      end, "data.mix: batches of loader 2 have the field mask, but batches of loader 1 lack it")
    end
  end)

  -- ---------------------------------------------------------------- errors

  it("an invalid record is named by file, line and field", function()
    local good = '{"text":"good"}\n'
    local cases = {
      { good .. '\n{"text": broken}\n', 3, "the line is not a JSON object: Expected value but " ..
        "found invalid token at character 10" },
      { good .. '{"text":"cut', 2, "the line is not a JSON object: Expected value but found " ..
        "unexpected end of string at character 13" },
      { '{"txt":"a"}\n', 1, "the object has no field 'text'; did you mean 'txt'?" },
      { '{"body":"a"}\n', 1, "the object has no field 'text'" },
      { '{"text":5}\n', 1, "expected the field 'text' of the object to be a text, got 5" },
      { '{"text":null}\n', 1, "expected the field 'text' of the object to be a text, got null" },
      { '{"text":{"a":1}}\n', 1, "expected the field 'text' of the object to be a text, " ..
        "got an object" },
      { '["text"]\n', 1, "expected a JSON object, got a list" },
      { "7\n", 1, "expected a JSON object, got 7" },
      { good .. '{"text":"\255"}\n', 2, "the text is not UTF-8" },
      { '{"text":"a\\u0000"}\n', 1, "the text holds a NUL byte, which is the end token of " ..
        "bytes; hint: end_token = false" },
    }
    for _, case in ipairs(cases) do
      file("a.jsonl", case[1])
      refuses("data.jsonl { path = folder .. '/a.jsonl', check = true }",
        ("data.jsonl: FOLDER/a.jsonl:%d: %s"):format(case[2], case[3]))
    end
    file("nul.jsonl", '{"text":\0"a"}\n')
    file("deep.jsonl", ("["):rep(100000))
    for _, name in ipairs { "nul", "deep" } do
      local message = helper.failure(data.jsonl, { path = folder .. "/" .. name .. ".jsonl" })
      assert.matches("^[^\n]*" .. name .. "%.jsonl:1: the line is not a JSON object: [^\n]*$",
        message)
      assert.is_nil(message:find("%z"))
    end
  end)

  it("messages of a chat are named by their number", function()
    for text, expected in pairs {
      ['{"messages":5}'] = "expected the field 'messages' to be a list of messages, got 5",
      ['{"messages":{}}'] = "expected the field 'messages' to be a list of messages, got an object",
      ['{"mesages":[]}'] = "the object has no field 'messages'; did you mean 'mesages'?",
      ['{"messages":["a"]}'] = "expected message 1 to be an object, got 'a'",
      ['{"messages":[{"role":"user","contnt":"a"}]}'] =
        "message 1 has no field 'content'; did you mean 'contnt'?",
      ['{"messages":[{"content":"a"}]}'] = "message 1 has no field 'role'",
    } do
      file("a.jsonl", text)
      refuses("data.chat { path = folder .. '/a.jsonl' }", "data.chat: FOLDER/a.jsonl:1: " ..
        expected)
    end
    file("a.jsonl", '{"prompt":"a","choosen":"b","rejected":"c"}')
    refuses("data.preferences { path = folder .. '/a.jsonl' }", "data.preferences: " ..
      "FOLDER/a.jsonl:1: the object has no field 'chosen'; did you mean 'choosen'?")
    file("a.jsonl", '{"prompt":"a","chosen":"","rejected":"c"}')
    refuses("data.preferences { path = folder .. '/a.jsonl', end_token = false }",
      "data.preferences: FOLDER/a.jsonl:1: the preferred answer has no tokens")
  end)

  it("csv: cells at the end of a line may be empty or blank", function()
    local path = file("a.tsv", "id\ttext\t\n1\tab\t\r\n\n2\t\t\n3\tc \tx")
    local rows_ = rows(data.csv_text(with { path = path, separator = "\t", context = 5 }), 1)
    assert.same({ "ab|c >b|c |" }, rows_)
    for _, bad in ipairs { '"', "\n", "\r", "ab", "" } do
      assert.error_matches(function() data.csv_text { path = path, separator = bad } end,
        "data.csv_text: expected separator to be one byte other than a quote or a line end, got")
    end
  end)

  it("rows of csv are named by the line they begin in", function()
    local head = 'id,text\n1,"two\nlines"\n'
    for row, expected in pairs { ['2,"open'] = "the row has a quote that does not end",
      ['2,"a"b'] = "the row has text after the closing quote of column 2",
      ['2,a"b"'] = "the row has a quote inside column 2, which is not quoted",
      ["2"] = "expected 2 columns, got 1", ["2,a,b"] = "expected 2 columns, got 3" } do
      file("a.csv", head .. row .. "\n")
      refuses("data.csv_text { path = folder .. '/a.csv', check = true }",
        "data.csv_text: FOLDER/a.csv:4: " .. expected)
    end
    refuses("data.csv_text { path = folder .. '/a.csv', column = 'txet' }",
      "data.csv_text: FOLDER/a.csv has no column 'txet'; did you mean 'text'?")
  end)

  it("bad = 'skip' leaves invalid records out and counts them", function()
    local path = file("a.jsonl", '{"text":"ab"}\n{"text":broken}\n{"text":"c"}\n{"txt":1}\n')
    local loader = data.jsonl(with { path = path, bad = "skip", pack = false })
    assert.same({ "ab||>b|__", "c|||>|___", "ab||>b|__" }, rows(loader, 3))
    assert.matches("4 documents in rows of 4, .*, 2 invalid ones left out %(the first: .*jsonl:2: "
      .. "the line is not a JSON object: [^\n]*%)$", tostring(loader))
    file("a.jsonl", "broken\n")
    refuses("data.jsonl { path = folder .. '/a.jsonl', bad = 'skip' }:next()",
      "data.jsonl: none of the 1 documents has a token that counts in the loss, 1 invalid ones " ..
      "left out (the first: FOLDER/a.jsonl:1: the line is not a JSON object: Expected " ..
      "value but found invalid token at character 1)")
  end)

  it("files without documents and paths that are no files are refused", function()
    file("empty", "")
    file("blank", "\n \r\n\t\n")
    file("head.csv", "id,text\n")
    refuses("data.jsonl { path = folder .. '/empty' }", "data.jsonl: FOLDER/empty is empty")
    refuses("data.lines { path = folder .. '/blank' }", "data.lines: FOLDER/blank has no records")
    refuses("data.csv_text { path = folder .. '/head.csv' }",
      "data.csv_text: FOLDER/head.csv has no records")
    refuses("data.jsonl { path = folder .. '/none' }",
      "data.jsonl: FOLDER/none: No such file or directory")
    refuses("data.jsonl { path = folder }", "data.jsonl: FOLDER is a folder, expected a file")
    refuses("data.jsonl { path = '/dev/zero' }",
      "data.jsonl: /dev/zero is a pipe or a device, expected a file")
    refuses("data.jsonl {}",
      "data.jsonl: expected path = a file or a list of one or more files, got nothing")
    refuses("data.jsonl { path = { 5 } }", "data.jsonl: expected the path of a file, got 5")
  end)

  it("a line of 100 MB is refused, and is not read", function()
    local path = folder .. "/long.jsonl"
    helper.execute(("{ echo '{\"text\":\"a\"}'; head -c 100000000 /dev/zero | tr '\\0' a; } > %s")
      :format(helper.quote(path)))
    refuses("data.jsonl { path = folder .. '/long.jsonl', check = true }", "data.jsonl: "
      .. "FOLDER/long.jsonl:2: the record has 100000000 bytes, expected at most 16777216")
    local loader = data.jsonl(with { path = path, bad = "skip" })
    assert.same({ "a|a|>|a|a" }, rows(loader, 1))
  end)

  it("options and encode functions that cannot work are refused in one line", function()
    file("a.jsonl", '{"text":"ab"}')
    local function with_options(text, expected)
      refuses("data.jsonl { path = folder .. '/a.jsonl', " .. text .. " }:next()", "data.jsonl: "
        .. expected)
    end
    with_options("feild = 'x'", "unknown option 'feild'; did you mean 'field'?; `engine " ..
      "help data.jsonl` lists the options")
    for theirs, ours in pairs { tokenizer = "encode", packing = "pack", batch_size = "batch",
      max_length = "context", eos_token_id = "end_token" } do
      with_options(theirs .. " = 1", ("unknown option '%s'; did you mean '%s'?; " ..
        "`engine help data.jsonl` lists the options"):format(theirs, ours))
    end
    with_options("bad = 'ignore'", "expected bad to be stop or skip, got 'ignore'")
    with_options("end_token = -1", "expected end_token to be the id or the text of a token, or " ..
      "false, got -1")
    with_options("end_token = 'x', encode = function() end", "expected end_token to be an id, " ..
      "because encode is not an engine.tokenizer, got 'x'")
    with_options("encode = {}", "expected encode to be a function from a text to a list of ids, " ..
      "or an object with a method `encode`, got a table")
    with_options("encode = function() end", "expected the option end_token, because encode is " ..
      "given: the id of the token that ends a document, or false for no such token")
    with_options("batch = 2 ^ 20, context = 2 ^ 20", "a batch of 1048576 rows of 1048576 tokens " ..
      "is too large; expected at most 268435456 tokens")
    with_options("end_token = 1, encode = function() end",
      "expected encode to return a list of token ids, got nothing")
    with_options("end_token = 1, encode = function() return { 1.5 } end",
      "expected encode to return whole numbers from 0 to 2^31 - 1, got 1.5 at index 1")
    with_options("end_token = 1, bad = 'skip', encode = function() nothing() end",
      "FOLDER/a.jsonl:1: encode failed: script:1: attempt to call global 'nothing' (a nil value)")
  end)
end)
