-- Data loaders: the contents of a batch, the order of the examples (llm.c's loader, or a
-- permutation in each epoch), positions to resume from, and invalid files.
local engine = require "engine"
local ffi = require("engine.base.ffi").ffi
local helper = require "spec.helper"

local data = engine.data
local folder

local function u16(list)
  local bytes = {}
  for i, v in ipairs(list) do bytes[i] = string.char(v % 256, math.floor(v / 256)) end
  return table.concat(bytes)
end
local function i32(...)
  local bytes = {}
  for _, v in ipairs { ... } do
    v = v % 2 ^ 32
    bytes[#bytes + 1] = string.char(v % 256, math.floor(v / 2 ^ 8) % 256,
      math.floor(v / 2 ^ 16) % 256, math.floor(v / 2 ^ 24))
  end
  return table.concat(bytes)
end
local function big(...)
  return (i32(...):gsub("(.)(.)(.)(.)", "%4%3%2%1"))
end
local function file(name, bytes) return helper.write(folder .. "/" .. name, bytes) end
local function llmc(magic, version, count, tokens)
  return i32(magic, version, count) .. ("\0"):rep(1024 - 12) .. u16(tokens)
end
local function numbers(n, from)
  local list = {}
  for i = 1, n do list[i] = (from or 0) + i - 1 end
  return list
end

-- The first token of every row of n batches.
local function starts(loader, n)
  local list = {}
  for _ = 1, n do
    local batch = loader:next()
    for _, row in ipairs(batch.x:totable()) do list[#list + 1] = row[1] end
    engine.end_step()
  end
  return list
end

-- Asserts that code raises the message in one line at the script's position.
local function refuses(code, expected)
  local chunk = assert(loadstring("local y = " .. code .. "\nreturn y", "=script"))
  local good, message = pcall(setfenv(chunk, { data = data, engine = engine, folder = folder }))
  assert.is_false(good, code)
  assert.equal("script:1: " .. expected:gsub("FOLDER", (folder:gsub("%%", "%%%%"))), message)
end

describe("data", function()
  before_each(function() folder = helper.folder() end)
  after_each(function()
    engine.end_step()
    helper.remove(folder)
  end)

  -- ---------------------------------------------------------------- windows of tokens

  it("text gives bytes as tokens; targets are shifted by one", function()
    local batch = data.text { text = "hello world!", batch = 2, context = 4,
      shuffle = false }:next()
    assert.same({ { ("hell"):byte(1, -1) }, { ("o wo"):byte(1, -1) } }, batch.x:totable())
    assert.same({ { ("ello"):byte(1, -1) }, { (" wor"):byte(1, -1) } }, batch.y:totable())
    assert.same({ "i32", "i32", 8 }, { batch.x.dtype, batch.y.dtype, batch.tokens })
    local bytes = data.text { text = "\0\255\128\1", batch = 1, context = 3,
      shuffle = false }:next()
    assert.same({ { 0, 255, 128 } }, bytes.x:totable())
  end)

  it("text comes from a file, several files, or a share of them", function()
    local a, b = file("a.txt", "abcdefghij"), file("b.txt", "klm")
    local function all(options)
      options.batch, options.context, options.shuffle = 1, 1, false
      local loader, text = data.text(options), {}
      for _ = 1, loader:batches_per_epoch() do
        text[#text + 1] = string.char(loader:next().x:item())
      end
      return table.concat(text)
    end
    assert.equal("abcdefghi", all { path = a })  -- the last token is only a target
    assert.equal("abcdefghij\nkl", all { path = { a, b } })
    assert.equal("abcdefg", all { path = a, to = 0.8 })
    assert.equal("i", all { path = a, from = 0.8 })
  end)

  it("tokens are read without a header, as nanoGPT writes them, or with llm.c's header", function()
    local tokens = { 1, 50256, 65535, 4, 5, 6, 7 }
    local bare = data.tokens { path = file("a.bin", u16(tokens)), batch = 1, context = 3,
      shuffle = false }
    local headed = data.tokens { path = file("b.bin", llmc(20240520, 1, 7, tokens)), batch = 1,
      context = 3, shuffle = false }
    for _, loader in ipairs { bare, headed } do
      local batch = loader:next()
      assert.same({ { 1, 50256, 65535 } }, batch.x:totable())
      assert.same({ { 50256, 65535, 4 } }, batch.y:totable())
      assert.same({ { 4, 5, 6 } }, loader:next().x:totable())
    end
    assert.equal(7, headed.tokens)
  end)

  it("tokens of 32 bits are read without a header, with llm.c's header, and from .npy", function()
    local words = i32(1, 128000, 65536, 4, 5, 6, 7)
    local function npy(kind, count, bytes)
      local header = ("{'descr': '%s', 'fortran_order': False, 'shape': (%d,), }"):format(kind,
        count)
      return "\147NUMPY\1\0" .. string.char(118, 0) .. header .. (" "):rep(117 - #header) .. "\n"
        .. bytes
    end
    for _, o in ipairs { { path = file("a.bin", words), dtype = "u32" },
      { path = file("b.bin", i32(20240801, 7, 7) .. ("\0"):rep(1024 - 12) .. words) },
      { path = file("c.npy", npy("<u4", 7, words)) } } do
      o.batch, o.context, o.shuffle = 1, 3, false
      assert.same({ { 1, 128000, 65536 } }, data.tokens(o):next().x:totable())
    end
    local narrow = { path = file("d.npy", npy("<u2", 4, u16 { 1, 2, 65535, 4 })), batch = 1,
      context = 3, shuffle = false }
    assert.same({ { 1, 2, 65535 } }, data.tokens(narrow):next().x:totable())
    for bytes, want in pairs { [npy("<i8", 7, words)] = "one dimension and dtype <u2 or <u4",
      [npy("<u4", 8, words)] = "gives 8 tokens, but the file holds 7",
      ["\147NUMPY\1\0\255\255"] = "one dimension" } do
      assert.error_matches(function()
        data.tokens { path = file("e.npy", bytes), batch = 1, context = 3 }
      end, want, 1, true)
    end
  end)

  it("in order, row b of step i starts at token (i*B + b)*T; the data restart when a batch does " ..
    "not fit", function()
    for _, case in ipairs { { 3, 4, 61 }, { 1, 5, 26 }, { 4, 2, 100 }, { 2, 3, 13 }, { 2, 3, 12 },
      { 5, 1, 6 } } do
      local B, T, n = unpack(case)
      local loader = data.tokens { path = file("a.bin", u16(numbers(n))), batch = B, context = T,
        shuffle = false }
      local fit = math.floor((n - 1) / (B * T))  -- batches with a target for their last token
      assert.equal(fit, loader:batches_per_epoch())
      local i = 0
      for _ = 1, 3 * fit do
        local batch = loader:next()
        local x, y = batch.x:totable(), batch.y:totable()
        for b = 0, B - 1 do
          for t = 0, T - 1 do
            assert.equal((i * B + b) * T + t, x[b + 1][t + 1])
            assert.equal((i * B + b) * T + t + 1, y[b + 1][t + 1])
          end
        end
        i = (i + 1) % fit
      end
    end
  end)

  it("shuffled, an epoch visits every window once, in a new order each epoch", function()
    local T, B, n = 4, 3, 4 * 30 + 1
    local loader = data.tokens { path = file("a.bin", u16(numbers(n))), batch = B, context = T }
    local first
    for epoch = 1, 4 do
      local seen = starts(loader, loader:batches_per_epoch())
      local text = table.concat(seen, " ")
      assert.not_equal(first, text)
      first = first or text
      table.sort(seen)
      assert.same(30, #seen)
      for k = 1, 30 do assert.equal((k - 1) * T, seen[k], "epoch " .. epoch) end
    end
  end)

  it("shuffled, an epoch starts at a random offset if tokens are left over", function()
    local loader = data.tokens { path = file("a.bin", u16(numbers(100))), batch = 2, context = 8 }
    local offsets = {}
    for _ = 1, 30 do
      local seen = starts(loader, loader:batches_per_epoch())
      for _, s in ipairs(seen) do
        assert.equal(seen[1] % 8, s % 8)
        assert.is_true(s + 8 < 100)
      end
      offsets[seen[1] % 8] = true
    end
    local n = 0
    for _ in pairs(offsets) do n = n + 1 end
    -- 99 tokens with a target are 12 windows and 3 tokens left over: four possible offsets
    assert.equal(4, n)
  end)

  it("the order depends on the seed", function()
    local path = file("a.bin", u16(numbers(200)))
    local function with(seed)
      return starts(data.tokens { path = path, batch = 2, context = 2, seed = seed }, 20)
    end
    assert.same(with(1), with(1))
    assert.not_same(with(1), with(2))
  end)

  -- ---------------------------------------------------------------- positions

  it("resumes from every position as if it had never stopped", function()
    local path = file("a.bin", u16(numbers(45)))
    for _, shuffle in ipairs { true, false } do
      local function loader()
        return data.tokens { path = path, batch = 2, context = 4, shuffle = shuffle, seed = 3 }
      end
      local whole = starts(loader(), 25)
      for place = 0, 20 do
        local one = loader()
        starts(one, place)
        local state = one:state()
        local two = loader()
        starts(two, 7)
        two:restore(state)
        local rest = starts(two, 25 - place)
        for k, s in ipairs(rest) do assert.equal(whole[2 * place + k], s) end
      end
    end
  end)

  it("resumes a position of an earlier engine in that engine's order", function()
    local path = file("a.bin", u16(numbers(45)))
    local function loader() return data.tokens { path = path, batch = 2, context = 4, seed = 3 } end
    local old, new = loader(), loader()
    local state = old:state()
    state.order = nil
    old:restore(state)
    local whole = starts(old, 25)
    assert.not_same(starts(new, 25), whole)
    new:restore(state)
    new:skip(7)
    local other = loader()
    other:restore(new:state())
    for k, s in ipairs(starts(other, 18)) do assert.equal(whole[2 * 7 + k], s) end
    state.order = 9
    assert.error_matches(function() loader():restore(state) end,
      "this position has version 9 of the shuffled order, but this engine supports only up to 2")
  end)

  it("refuses a position of other data, another batch size or another order", function()
    local path = file("a.bin", u16(numbers(45)))
    local function loader(options)
      local o = { path = path, batch = 2, context = 4, seed = 3 }
      for key, value in pairs(options or {}) do o[key] = value end
      return data.tokens(o)
    end
    local state = loader():state()
    for key, value in pairs { batch = 3, context = 5, seed = 4, shuffle = false } do
      local other = loader { [key] = value }
      assert.error_matches(function() other:restore(state) end,
        ("this position was saved with %s %s, but the loader has %s; the batches would differ")
        :format(key, tostring(state[key]), tostring(value)), 1, true)
    end
    assert.error_matches(function() data.text { text = "0123456789", batch = 2, context = 4,
      seed = 3 }:restore(state) end, "saved with kind tokens")
    assert.error_matches(function() loader { path = file("b.bin", u16(numbers(60))) }:restore(
      state) end, "saved with examples 11, but the loader has 14")
    local text = loader():state()
    text.batch = "2"
    assert.error_matches(function() loader():restore(text) end,
      "saved with batch '2', but the loader has 2")
    assert.error_matches(function() loader():restore(5) end,
      "expected a position from state%(%): position: expected a table, got 5")
    assert.error_matches(function() loader():restore { at = -1 } end,
      "position.at: expected a whole number of 0 or more, up to 2^53, got -1", 1, true)
  end)

  it("a batch is freed with its step, even if no step was open before", function()
    local loader = data.text { text = ("abc"):rep(100), batch = 2, context = 8 }
    local batch = loader:next()
    engine.end_step()
    assert.error_matches(function() return batch.x.shape end, "was made between steps")
    loader:next()
    engine.end_step()
    local before = engine.memory().kept.used
    for _ = 1, 50 do
      loader:next()
      engine.end_step()
    end
    assert.equal(before, engine.memory().kept.used)
    assert.matches("text: 300 tokens in windows of 8: 37 examples, batch 2, shuffled, at batch " ..
      "52 %(epoch 2.89%)", tostring(loader))
  end)

  -- ---------------------------------------------------------------- rows

  it("csv takes a header, a target by name or number, and other separators", function()
    local path = file("a.csv", "\239\187\191a,\"b\",label\r\n1,2,0\r\n\r\n3,-4.5e1,1\r\n")
    local batch = data.csv { path = path, batch = 2, shuffle = false }:next()
    assert.same({ { 1, 2 }, { 3, -45 } }, batch.x:totable())
    assert.same({ 0, 1 }, batch.y:totable())
    assert.same({ "f32", "f32", 2 }, { batch.x.dtype, batch.y.dtype, batch.tokens })
    batch = data.csv { path = path, batch = 2, shuffle = false, target = "a" }:next()
    assert.same({ { { 2, 0 }, { -45, 1 } }, { 1, 3 } }, { batch.x:totable(), batch.y:totable() })
    batch = data.csv { path = path, batch = 2, shuffle = false, target = 2 }:next()
    assert.same({ { { 1, 0 }, { 3, 1 } }, { 2, -45 } }, { batch.x:totable(), batch.y:totable() })
    -- more rows than the file has: restarts at the beginning
    batch = data.csv { path = path, batch = 3, shuffle = false, classes = true }:next()
    assert.same({ "i64", { 0, 1, 0 } }, { batch.y.dtype, batch.y:totable() })
    assert.same({ "a", "b", "label" }, data.csv { path = path }.columns)
    assert.same({ { 1 } }, data.csv { path = file("b.csv", "1;2\n"), separator = ";",
      batch = 1 }:next().x:totable())
    assert.same({ { 1 } }, data.csv { path = file("c.csv", "1|2"), separator = "|",
      batch = 1 }:next().x:totable())
  end)

  it("tensors keep their dtypes and the shapes of their rows", function()
    local x, y = engine.arange(1, 12, 1, "f16"):view(3, 2, 2):keep(),
      engine.tensor({ { 1 }, { 2 }, { 3 } }, { dtype = "i32", keep = true })
    local batch = data.tensors { x = x, y = y, batch = 2, shuffle = false }:next()
    assert.same({ "f16", "i32" }, { batch.x.dtype, batch.y.dtype })
    assert.same({ { { 1, 2 }, { 3, 4 } }, { { 5, 6 }, { 7, 8 } } }, batch.x:totable())
    assert.same({ { 1 }, { 2 } }, batch.y:totable())
    local flat = data.tensors { x = engine.arange(0, 5), y = engine.arange(0, 5), batch = 4,
      shuffle = false }:next()
    assert.same({ { 0, 1, 2, 3 }, { 0, 1, 2, 3 }, "i64" },
      { flat.x:totable(), flat.y:totable(), flat.x.dtype })
  end)

  it("rows are shuffled together with their targets, each once an epoch", function()
    local x, y = engine.arange(0, 9, 1, "f32"):view(10, 1), engine.arange(100, 109)
    local loader = data.tensors { x = x, y = y, batch = 5 }
    for _ = 1, 3 do
      local seen = {}
      for _ = 1, 2 do
        local batch = loader:next()
        for i, row in ipairs(batch.x:totable()) do
          assert.equal(row[1] + 100, batch.y:totable()[i])
          seen[row[1]] = true
        end
      end
      for i = 0, 9 do assert.is_true(seen[i]) end
    end
  end)

  local function images(n, more)
    return big(0x00000803, n, 2, 2) .. ("\0\51\102\255"):rep(n) .. (more or "")
  end
  local function labels(n) return big(0x00000801, n) .. ("\7\3"):rep(n):sub(1, n) end

  it("idx images are read as 0..1, labels as classes", function()
    local batch = data.idx { images = file("i", images(3)), labels = file("l", labels(3)),
      batch = 2, shuffle = false }:next()
    assert.same({ 2, 4 }, batch.x.shape)
    for k, v in ipairs { 0, 0.2, 0.4, 1 } do assert.near(v, batch.x:totable()[2][k], 1e-7) end
    assert.same({ "i64", { 7, 3 } }, { batch.y.dtype, batch.y:totable() })
  end)

  -- ---------------------------------------------------------------- errors

  it("unknown and unusable options are refused in one line", function()
    refuses("data.text { text = 'abc', contxt = 2 }",
      "data.text: unknown option 'contxt'; did you mean 'context'?; options: batch context from " ..
      "path seed shuffle text to")
    refuses("data.txt {}", "engine.data has no 'txt'; did you mean 'text'?")
    refuses("data.text 'a'", "data.text: expected a table of options, got 'a'")
    refuses("data.text {}", "data.text: expected path = a file or a list of files, or text = a " ..
      "string")
    refuses("data.text { text = 'abc', batch = 0 }",
      "data.text: expected batch to be a whole number of 1 or more, got 0")
    refuses("data.text { text = 'abc', context = 1.5 }",
      "data.text: expected context to be a whole number of 1 or more, got 1.5")
    refuses("data.text { text = 'abc', seed = 'x' }",
      "data.text: expected seed to be a whole number of 0 or more, got 'x'")
    refuses("data.text { text = 'abc', shuffle = 'no' }",
      "data.text: expected shuffle to be true or false, got 'no'")
    refuses("data.text { text = 'abc', from = 0.5, to = 0.5 }",
      "data.text: expected 0 <= from < to <= 1, got 0.5 and 0.5")
    refuses("data.text { text = 'abc', from = 'a' }",
      "data.text: expected 0 <= from < to <= 1, got 'a' and 1")
    refuses("data.text { path = { 5 } }",
      "data.text: expected path to be the path of a file, got 5")
    refuses("data.text { path = {} }", "data.text: expected at least one file, got an empty list")
    refuses("data.text { path = 'a', text = 'abc' }", "data.text: expected path or text, got both")
    refuses("data.shapes { count = 1e9 }", "data.shapes: 1000000000 images of 32 x 32 are too " ..
      "many; expected at most 2^28 values in all")
    refuses("data.csv { path = folder }", "data.csv: FOLDER is a folder, expected a file")
    for _, loader in ipairs { "data.text { text = 'abc', context = 1 }",
      "data.mix { loaders = { data.text { text = 'abc', context = 1 } } }" } do
      refuses(loader .. ":skip(-1)",
        "data.skip: expected n to be a whole number of 0 or more, got -1")
      refuses("pairs(" .. loader .. "())", "a data loader cannot be called or looped over; " ..
        "hint: for i = 1, n do local batch = data:next() ... end")
    end
    refuses("data.tokens {}", "data.tokens: expected path to be the path of a file, got nothing")
    refuses("data.csv {}", "data.csv: expected path to be the path of a file, got nothing")
    refuses("data.idx { labels = 'x' }",
      "data.idx: expected images to be the path of a file, got nothing")
    refuses("data.tensors { x = 1, y = 2 }", "data.tensors: expected x to be a tensor, got 1")
    refuses("data.tensors { x = engine.zeros(2, 1), y = engine.zeros(3) }",
      "data.tensors: expected x and y to have the same number of rows, got 2 and 3")
    refuses("data.tensors { x = engine.zeros(0, 1), y = engine.zeros(0) }",
      "data.tensors: expected at least one row, got none")
  end)

  it("missing, short, truncated and odd files are named", function()
    file("short", "abcd")
    file("odd.bin", "abc")
    file("cut.bin", llmc(20240520, 1, 9, numbers(8)))
    file("more.bin", llmc(20240520, 1, 7, numbers(8)))
    file("two.bin", llmc(20240520, 2, 8, numbers(8)))
    file("wide.bin", llmc(20240801, 6, 8, numbers(8)))
    file("minus.bin", llmc(20240520, 1, -1, numbers(8)))
    file("big.bin", u16 { 5, 9, 10, 3 })
    file("empty", "")
    refuses("data.text { path = folder .. '/short', context = 4 }",
      "data.text: 4 tokens of FOLDER/short are too few for a context of 4, which needs 5")
    refuses("data.text { path = folder .. '/short', context = 4, from = 0.5 }",
      "data.text: 2 tokens of FOLDER/short (its part from 0.5 to 1) are too few for a context " ..
      "of 4, which needs 5")
    refuses("data.text { path = folder .. '/empty', context = 4 }",
      "data.text: 0 tokens of FOLDER/empty are too few for a context of 4, which needs 5")
    refuses("data.text { text = '', context = 4 }",
      "data.text: 0 tokens of the text are too few for a context of 4, which needs 5")
    refuses("data.tokens { path = folder .. '/odd.bin', context = 1 }",
      "data.tokens: expected FOLDER/odd.bin to hold uint16 tokens, got 3 bytes, which is not " ..
      "a multiple of 2; hint: `engine data tokenize` converts a text to tokens")
    refuses("data.tokens { path = folder .. '/cut.bin', context = 1 }",
      "data.tokens: the header of FOLDER/cut.bin gives 9 tokens, but the file holds 8; the " ..
      "file is truncated")
    refuses("data.tokens { path = folder .. '/more.bin', context = 1 }",
      "data.tokens: the header of FOLDER/more.bin gives 7 tokens, but the file holds 8")
    refuses("data.tokens { path = folder .. '/minus.bin', context = 1 }",
      "data.tokens: the header of FOLDER/minus.bin gives -1 tokens, but the file holds 8")
    refuses("data.tokens { path = folder .. '/two.bin', context = 1 }",
      "data.tokens: FOLDER/two.bin has version 2 of llm.c's format, expected 1 (uint16 tokens)")
    refuses("data.tokens { path = folder .. '/wide.bin', context = 1 }",
      "data.tokens: FOLDER/wide.bin has version 6 of llm.c's format, expected 7 (uint32 tokens)")
    refuses("data.tokens { path = folder .. '/big.bin', context = 1, vocab = 10 }",
      "data.tokens: token 10 at position 2 of FOLDER/big.bin is outside the vocabulary of 10; " ..
      "hint: the file may be for another tokenizer")
    for _, code in ipairs { "data.text { path = folder .. '/none' }",
      "data.tokens { path = folder .. '/none' }", "data.csv { path = folder .. '/none' }",
      "data.idx { images = folder .. '/none', labels = folder .. '/none' }" } do
      local chunk = assert(loadstring("local y = " .. code .. "\nreturn y", "=script"))
      assert.matches("^script:1: .*" .. folder:gsub("%p", "%%%0") ..
        "/none: .*No such file or directory",
        helper.failure(setfenv(chunk, { data = data, folder = folder })))
    end
  end)

  it("csv files that are not tables of numbers are reported with the line", function()
    file("a.csv", "a,b\n1,2\n3\n")
    file("b.csv", "a,b\n1,2\n3,x\n")
    file("c.csv", "a,b\n")
    file("d.csv", "1\n2\n")
    file("e.csv", "1,0\n2,1.5\n")
    file("f.csv", "1,0\n2,-1\n")
    refuses("data.csv { path = folder .. '/a.csv' }",
      "data.csv: FOLDER/a.csv:3: expected 2 columns, got 1")
    refuses("data.csv { path = folder .. '/b.csv' }",
      "data.csv: FOLDER/b.csv:3: expected a number in column 2, got 'x'")
    refuses("data.csv { path = folder .. '/c.csv' }",
      "data.csv: expected rows of numbers in FOLDER/c.csv, got none")
    refuses("data.csv { path = folder .. '/d.csv' }",
      "data.csv: FOLDER/d.csv has one column with the separator ','; expected features and a " ..
      "target")
    refuses("data.csv { path = folder .. '/e.csv', classes = true }",
      "data.csv: FOLDER/e.csv: expected a class, a whole number of 0 or more, in column 2 of "
        .. "numeric row 2, got 1.5")
    refuses("data.csv { path = folder .. '/f.csv', classes = true }",
      "data.csv: FOLDER/f.csv: expected a class, a whole number of 0 or more, in column 2 of "
        .. "numeric row 2, got -1")
    refuses("data.csv { path = folder .. '/e.csv', target = 3 }",
      "data.csv: there is no column 3 in FOLDER/e.csv, which has 2 columns")
    file("g.csv", "width,label\n1,0\n")
    refuses("data.csv { path = folder .. '/g.csv', target = 'lable' }",
      "data.csv: FOLDER/g.csv has no column 'lable'; did you mean 'label'?")
    refuses("data.csv { path = folder .. '/g.csv', separator = '' }",
      "data.csv: expected separator to be one byte other than a quote or a line end, got ''")
  end)

  it("idx files that are invalid, truncated or mismatched are named", function()
    file("good", images(2))
    file("labels", labels(2))
    file("three", labels(3))
    file("cut", images(2):sub(1, -2))
    file("long", images(2, "x"))
    file("hostile", big(0x00000803, 2 ^ 32 - 1, 2 ^ 32 - 1, 2 ^ 32 - 1))
    file("tiny", "\0\0\8")
    refuses("data.idx { images = folder .. '/cut', labels = folder .. '/labels' }",
      "data.idx: expected FOLDER/cut to have 8 bytes after its header, got 7")
    refuses("data.idx { images = folder .. '/long', labels = folder .. '/labels' }",
      "data.idx: expected FOLDER/long to have 8 bytes after its header, got 9")
    refuses("data.idx { images = folder .. '/labels', labels = folder .. '/labels' }",
      "data.idx: FOLDER/labels is not an idx file of images (unsigned bytes, 3 dimensions)")
    refuses("data.idx { images = folder .. '/tiny', labels = folder .. '/labels' }",
      "data.idx: FOLDER/tiny is not an idx file of images (unsigned bytes, 3 dimensions)")
    refuses("data.idx { images = folder .. '/good', labels = folder .. '/good' }",
      "data.idx: FOLDER/good is not an idx file of labels (unsigned bytes, 1 dimensions)")
    refuses("data.idx { images = folder .. '/good', labels = folder .. '/three' }",
      "data.idx: expected a label for each image, got 2 images and 3 labels")
    assert.matches("to have .* bytes after its header, got 0",
      helper.failure(data.idx, { images = folder .. "/hostile", labels = folder .. "/labels" }))
  end)

  it("refuses batches that are too large", function()
    assert.has_error(function() data.text { text = ("x"):rep(100), batch = 3e8, context = 64 } end,
      "data.text: a batch of 300000000 rows of 64 tokens is too large; "
      .. "expected at most 268435456 tokens")
    local x = engine.zeros(2, 3)
    assert.has_error(function() data.tensors { x = x, y = x, batch = 3e8 } end,
      "data.tensors: a batch of 300000000 rows of 3 elements is too large; "
      .. "expected at most 268435456 elements")
  end)

  it("a mapped file stays mapped while the loader exists", function()
    local loader = data.text { path = file("a.txt", ("x"):rep(5000)), batch = 1, context = 1000 }
    for _ = 1, 20 do collectgarbage() end
    assert.equal(("x"):byte(), ffi.cast("const uint8_t *", loader.keep.data)[4999])
    assert.equal(1000 * ("x"):byte(), loader:next().x:sum():item())
  end)
end)
