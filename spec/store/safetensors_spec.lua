-- safetensors: saved tensors load bit for bit, the bytes follow the format, and a malformed or
-- hostile file is refused with a message that names the fault.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local safetensors = require "engine.tensor.safetensors"
local helper = require "spec.helper"
local scratch = require "spec.store.scratch"

local ffi, C = M_ffi.ffi, M_ffi.C

local function u64(n)
  local bytes = {}
  for i = 1, 8 do
    bytes[i] = string.char(tonumber(n % 256))
    n = (n - n % 256) / 256
  end
  return table.concat(bytes)
end

-- A file of a header and data.
local function file_of(header, data) return u64(#header) .. header .. (data or "") end

-- A tensor's elements in row-major order, as bytes.
local function bytes_of(x)
  local copy = x:keep()
  local info = ffi.new("eng_tensor_info")
  M_ffi.check(C.eng_info(info, copy))
  local target = ffi.new("uint8_t[?]",
    math.max(1, tonumber(info.count) * C.eng_dtype_size(info.dtype)))
  M_ffi.check(C.eng_read(target, info.dtype, info.count, copy))
  copy:free()
  return ffi.string(target, tonumber(info.count) * C.eng_dtype_size(info.dtype))
end

-- A tensor whose memory contains these bytes.
local function tensor_of(dtype, shape, bytes)
  local x = engine.zeros(shape, { dtype = dtype })
  local info = ffi.new("eng_tensor_info")
  M_ffi.check(C.eng_info(info, x))
  assert(tonumber(info.count) * C.eng_dtype_size(info.dtype) == #bytes)
  ffi.copy(info.data, bytes, #bytes)
  return x
end

describe("safetensors", function()
  local dir
  before_each(function() dir = helper.folder() end)
  after_each(function() helper.remove(dir) end)

  -- NaNs with payloads, infinities, -0, subnormals and ordinary numbers, little endian.
  local patterns = {
    f32 = "\1\0\192\127\0\0\128\127\0\0\128\255\0\0\0\128\1\0\0\0\219\15\73\64",
    f64 = "\1\0\0\0\0\0\248\127\0\0\0\0\0\0\240\255\0\0\0\0\0\0\0\128\1\0\0\0\0\0\0\0" ..
      "\24\45\68\84\251\33\9\64\154\153\153\153\153\153\185\63",
    f16 = "\1\126\0\124\0\252\0\128\1\0\72\66",
    bf16 = "\193\127\128\127\128\255\0\128\1\0\73\64",
    u8 = "\0\1\127\128\254\255", i8 = "\0\1\127\128\254\255",
    i16 = "\0\0\1\0\255\127\0\128\254\255\255\255",
    i32 = "\0\0\0\0\1\0\0\0\255\255\255\127\0\0\0\128\254\255\255\255\57\48\0\0",
    i64 = "\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\255\255\255\255\255\255\255\127\0\0\0\0\0\0\0\128" ..
      "\255\255\255\255\255\255\255\255\1\0\0\0\0\0\16\0",
    bool = "\0\1\1\0\1\0", e4m3 = "\0\1\126\127\128\255", e5m2 = "\0\1\124\127\128\255",
  }

  it("restores every dtype bit for bit, including scalars and empty tensors", function()
    for name in pairs(M_ffi.dtype) do
      local pattern = assert(patterns[name], "no pattern for " .. name)
      local size = C.eng_dtype_size(M_ffi.dtype[name])
      local path = dir .. "/" .. name
      local saved = { matrix = tensor_of(name, { 2, 3 }, pattern),
        scalar = tensor_of(name, {}, pattern:sub(-size)), empty = tensor_of(name, { 0, 7 }, "") }
      engine.save(path, saved, { dtype = name })
      local loaded, metadata = engine.load(path)
      assert.are.same({ dtype = name }, metadata)
      for key, x in pairs(saved) do
        assert.are.equal(name, loaded[key].dtype)
        assert.are.same(x.shape, loaded[key].shape)
        assert.are.equal(bytes_of(x), bytes_of(loaded[key]), name .. " " .. key)
      end
      assert.are.equal(pattern, bytes_of(loaded.matrix))
    end
  end)

  it("reads and writes transposed tensors of every dtype bit for bit", function()
    for name, pattern in pairs(patterns) do
      local size = C.eng_dtype_size(M_ffi.dtype[name])
      local turned = tensor_of(name, { 2, 3 }, pattern):transpose(1, 2)
      local expected = ""
      for _, i in ipairs { 0, 3, 1, 4, 2, 5 } do
        expected = expected .. pattern:sub(i * size + 1, (i + 1) * size)
      end
      assert.are.equal(expected, bytes_of(turned), name)
      engine.save(dir .. "/" .. name, { x = turned })
      assert.are.equal(expected, bytes_of(engine.load(dir .. "/" .. name).x), name)
    end
  end)

  it("writes tensors of any stride row-major", function()
    local x = engine.arange(1, 2 * 3 * 50 * 70):view(2, 3, 50, 70)
    local views = { whole = x, turned = x:transpose(2, 4), sliced = x:slice(3, 3, 40, 3):slice(4, 1,
      69, 2), wide = engine.arange(1, 7):expand(900, 7) }
    engine.save(dir .. "/views", views)
    local loaded = engine.load(dir .. "/views")
    for name, view in pairs(views) do
      assert.are.same(view.shape, loaded[name].shape)
      assert.are.equal(bytes_of(view), bytes_of(loaded[name]), name)
      assert.is_true(loaded[name]:is_contiguous())
    end
  end)

  it("writes the bytes that the format prescribes", function()
    engine.save(dir .. "/golden", { b = engine.tensor({ 1, 2 }):to("f16"),
      a = engine.tensor { { 1, -2, 0.5 } }, ["é\"\n"] = engine.tensor(7):to("u8") },
      { format = "pt" })
    local header = [[{"__metadata__":{"format":"pt"},]] ..
      [["a":{"dtype":"F32","shape":[1,3],"data_offsets":[0,12]},]] ..
      [["b":{"dtype":"F16","shape":[2],"data_offsets":[12,16]},]] ..
      [["é\"\n":{"dtype":"U8","shape":[],"data_offsets":[16,17]}}]]
    header = header .. (" "):rep(-#header % 8)
    assert.are.equal(file_of(header, "\0\0\128\63\0\0\0\192\0\0\0\63" .. "\0\60\0\64" .. "\7"),
      helper.read(dir .. "/golden"))
    engine.save(dir .. "/nothing", {})
    assert.are.equal(file_of("{}      "), helper.read(dir .. "/nothing"))
  end)

  it("reads other writers' files: any key order, white space, escapes, odd BOOL bytes", function()
    helper.write(dir .. "/odd", file_of(
      '{ "y\\u00e9\\ud83d\\ude00" : { "data_offsets":[ 4 , 8 ],\n"shape":[4],"dtype":"BOOL"},' ..
      '"x":{"shape":[],"dtype":"F32","data_offsets":[0,4]},' ..
      '"__metadata__":{"k\\/\\t":"\\u0041"} }  \n',
      "\0\0\128\63\0\1\2\255"))
    local file = safetensors.open(dir .. "/odd")
    assert.are.same({ "x", "yé😀" }, file.names)
    assert.are.same({ ["k/\t"] = "A" }, file.metadata)
    assert.are.same({ index = 1, dtype = "bool", shape = { 4 }, bytes = 4 },
      file.entries["yé😀"])
    assert.are.equal(1, file:read("x"):item())
    assert.are.equal("\0\1\1\1", bytes_of(file:read("yé😀")))
    assert.has_error(function() file:read("z") end,
      dir .. "/odd has no tensor 'z'; did you mean 'x'?")
    assert.truthy(tostring(file):find("x +f32 +%[%]"))
    file:close()
    assert.has_error(function() file:read("x") end, "cannot read 'x': " .. dir .. "/odd is closed")
  end)

  local function entry(dtype, shape, offsets)
    return ('{"dtype":"%s","shape":%s,"data_offsets":%s}'):format(dtype, shape, offsets)
  end
  local four = "\0\0\0\0"
  local A = entry("F32", "[1]", "[0,4]")

  local hostile = {
    { "an empty file", "", "expected at least 8 bytes, found 0" },
    { "fewer than 8 bytes", "\1\2\3", "expected at least 8 bytes, found 3" },
    { "a header length past the end", u64(100) .. "{}",
      "header length 100 exceeds the file's 10 bytes" },
    { "a header length of 2^63", "\0\0\0\0\0\0\0\128{}",
      "header length 9223372036854775808 exceeds the format's limit" },
    { "a header length of 2^64-1", ("\255"):rep(8) .. "{}",
      "header length 18446744073709551615 exceeds" },
    { "a header length past 100 MB", u64(100000001) .. "{}",
      "header length 100000001 exceeds the format's limit of 100000000" },
    { "no header", file_of(""), "does not begin with '{'" },
    { "a pickle", file_of("\128\2ctorch"), "invalid UTF%-8 at byte 0" },
    { "a header that is not UTF-8", file_of('{"\195":' .. A .. "}", four),
      "invalid UTF%-8 at byte 2" },
    { "an overlong character", file_of('{"\192\128":' .. A .. "}", four),
      "invalid UTF%-8 at byte 2" },
    { "an encoded surrogate", file_of('{"\237\160\128":' .. A .. "}", four),
      "invalid UTF%-8 at byte 2" },
    { "a header that is a list", file_of("[]"), "does not begin with '{'" },
    { "space before the header", file_of(" {}"), "does not begin with '{'" },
    { "a truncated header", file_of('{"a":' .. A, four), "expected '}' at byte %d+, got the end" },
    { "a truncated name", file_of('{"a'), "the string at byte 1 has no closing quote" },
    { "an extra comma", file_of('{"a":' .. A .. ",}", four),
      "expected a string at byte %d+, got '}'" },
    { "no comma", file_of('{"a":' .. A .. '"b":' .. A .. "}", four), "expected '}'" },
    { "trailing garbage", file_of('{"a":' .. A .. "}x", four),
      "expected nothing after the closing brace" },
    { "trailing NULs", file_of('{"a":' .. A .. "}\0\0", four),
      "expected nothing after the closing brace" },
    { "a second header", file_of("{}{}"), "expected nothing after the closing brace" },
    { "the same name twice", file_of('{"a":' .. A .. ',"a":' .. entry("F32", "[1]", "[4,8]") .. "}",
      four .. four), "two tensors have the name 'a'" },
    { "the same name twice, escaped",
      file_of('{"a":' .. A .. ',"\\u0061":' .. entry("F32", "[1]", "[4,8]") .. "}", four .. four),
      "two tensors have the name 'a'" },
    { "overlapping tensors", file_of('{"a":' .. A .. ',"b":' .. entry("F32", "[1]", "[2,6]") .. "}",
      four .. "\0\0"), "'a' and 'b' overlap" },
    { "two tensors in one place", file_of('{"a":' .. A .. ',"b":' .. A .. "}", four),
      "'a' and 'b' overlap" },
    { "a hole", file_of('{"a":' .. A .. ',"b":' .. entry("F32", "[1]", "[8,12]") .. "}",
      four .. four .. four), "4 unused bytes before tensor 'b'" },
    { "data before the first tensor", file_of('{"a":' .. entry("F32", "[1]", "[1,5]") .. "}",
      "\0" .. four), "1 unused bytes before tensor 'a'" },
    { "data after the last tensor", file_of('{"a":' .. A .. "}", four .. "\0"),
      "expected the file to end with the last tensor, got 1 unused bytes" },
    { "data without a tensor", file_of("{}", "x"),
      "expected the file to end with the last tensor, got 1 unused bytes" },
    { "missing data", file_of('{"a":' .. A .. "}", "\0\0\0"),
      "tensor 'a': data_offsets %[0, 4%] exceed the 3 bytes" },
    { "offsets past the end", file_of('{"a":' .. entry("F32", "[1]", "[4,8]") .. "}", four),
      "exceed the %d+ bytes of data" },
    { "an end of 2^63-1", file_of('{"a":' .. entry("U8", "[9223372036854775807]",
      "[0,9223372036854775807]") .. "}", four), "exceed the %d+ bytes of data" },
    { "an offset of 2^63", file_of('{"a":' .. entry("F32", "[1]", "[0,9223372036854775808]") .. "}",
      four), "is larger than 2^63%-1" },
    { "an offset of 2^64+4", file_of('{"a":' .. entry("F32", "[1]", "[0,18446744073709551620]") ..
      "}", four), "is larger than 2^63%-1" },
    { "a negative offset", file_of('{"a":' .. entry("F32", "[1]", "[-4,0]") .. "}", four),
      "expected a whole number >= 0 at byte %d+, got '%-'" },
    { "offsets that run backward", file_of('{"a":' .. entry("F32", "[1]", "[4,0]") .. "}", four),
      "data_offsets %[4, 0%] end before they begin" },
    { "three offsets", file_of('{"a":' .. entry("F32", "[1]", "[0,4,4]") .. "}", four),
      "expected '%]'" },
    { "one offset", file_of('{"a":' .. entry("F32", "[1]", "[0]") .. "}", four), "expected ','" },
    { "a size that does not fit", file_of('{"a":' .. entry("F32", "[2]", "[0,4]") .. "}", four),
      "dtype and shape need 8 bytes, but data_offsets span 4" },
    { "an empty tensor with bytes", file_of('{"a":' .. entry("F32", "[0]", "[0,4]") .. "}", four),
      "need 0 bytes, but data_offsets span 4" },
    { "a product past 2^64", file_of('{"a":' .. entry("F32", "[4294967296,4294967296]", "[0,0]") ..
      "}"), "needs more than 2^63%-1 bytes" },
    { "a product that wraps to 4", file_of('{"a":' .. entry("F32", "[4611686018427387905]",
      "[0,4]") .. "}", four), "needs more than 2^63%-1 bytes" },
    { "a product that overflows beside a 0",
      file_of('{"a":' .. entry("F32", "[0,4294967296,4294967296]", "[0,0]") .. "}"),
      "more than 2^63%-1 bytes" },
    { "a negative dimension", file_of('{"a":' .. entry("F32", "[-1]", "[0,4]") .. "}", four),
      "expected a whole number >= 0" },
    { "a fractional dimension", file_of('{"a":' .. entry("F32", "[1.0]", "[0,4]") .. "}", four),
      "got a fraction or exponent" },
    { "an exponent", file_of('{"a":' .. entry("F32", "[1e0]", "[0,4]") .. "}", four),
      "got a fraction or exponent" },
    { "a leading zero", file_of('{"a":' .. entry("F32", "[01]", "[0,4]") .. "}", four),
      "begins with 0" },
    { "a dimension in quotes", file_of('{"a":' .. entry("F32", '["1"]', "[0,4]") .. "}", four),
      "expected a whole number >= 0" },
    { "too many dimensions", file_of('{"a":' .. entry("F32", "[1,1,1,1,1,1,1]", "[0,4]") .. "}",
      four), "expected at most 6 dimensions" },
    { "deep nesting", file_of('{"a":' .. entry("F32", ("["):rep(100000), "[0,4]") .. "}", four),
      "expected a whole number >= 0" },
    { "nested objects", file_of(('{"a":'):rep(100000)), "unknown key 'a'" },
    { "null for a tensor", file_of('{"a":null}'),
      "tensor 'a': the header: expected '{' at byte 5, got 'n'" },
    { "the dtype of FP8 scales", file_of('{"a":' .. entry("F8_E8M0", "[4]", "[0,4]") .. "}", four),
      "tensor 'a': dtype 'F8_E8M0' is not supported" },
    { "an unsigned dtype", file_of('{"a":' .. entry("U16", "[2]", "[0,4]") .. "}", four),
      "dtype 'U16' is not supported" },
    { "an unknown dtype", file_of('{"a":' .. entry("f32", "[1]", "[0,4]") .. "}", four),
      "dtype 'f32' is not supported; supported: F32" },
    { "a dtype that is a number", file_of('{"a":{"dtype":0,"shape":[1],"data_offsets":[0,4]}}',
      four), "expected a string" },
    { "no dtype", file_of('{"a":{"shape":[1],"data_offsets":[0,4]}}', four),
      "tensor 'a': missing key dtype" },
    { "no shape", file_of('{"a":{"dtype":"F32","data_offsets":[0,4]}}', four),
      "missing key shape" },
    { "no offsets", file_of('{"a":{"dtype":"F32","shape":[1]}}', four),
      "missing key data_offsets" },
    { "an empty entry", file_of('{"a":{}}'), "missing key dtype" },
    { "a key twice", file_of('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
      four), "duplicate key dtype" },
    { "an unknown key",
      file_of('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"stride":[1]}}', four),
      "unknown key 'stride'" },
    { "metadata that is not an object", file_of('{"__metadata__":"x"}'), "expected '{'" },
    { "metadata that is not text", file_of('{"__metadata__":{"a":1}}'), "expected a string" },
    { "metadata twice", file_of('{"__metadata__":{},"__metadata__":{}}'),
      "has two __metadata__ entries" },
    { "a metadata key twice", file_of('{"__metadata__":{"a":"","a":""}}'),
      "two metadata entries have the key 'a'" },
    { "a NUL in a name", file_of('{"a\\u0000":' .. A .. "}", four), "a NUL character in a string" },
    { "a raw control character", file_of('{"a\1":' .. A .. "}", four),
      "control character 0x01 in a string" },
    { "an unknown escape", file_of('{"\\x":' .. A .. "}", four),
      "unknown escape in a string at byte %d+: a backslash in front of 'x'" },
    { "a malformed escape", file_of('{"\\u12g4":' .. A .. "}", four), "malformed \\u escape" },
    { "half a surrogate pair", file_of('{"\\ud83d":' .. A .. "}", four), "half a surrogate pair" },
    { "the other half", file_of('{"\\ude00":' .. A .. "}", four), "half a surrogate pair" },
    { "a name that would drive the terminal", file_of('{"\\u001b[2J' .. ("x"):rep(200) .. '":{}}'),
      "tensor '\\x1B%[2Jx+%.%.%.': missing key dtype" },
    { "a long name, which it cuts between characters", file_of('{"' .. ("é"):rep(90) .. '":{}}'),
      "tensor '" .. ("é"):rep(44) .. "%.%.%.': missing key dtype" },
  }

  for _, case in ipairs(hostile) do
    it("refuses " .. case[1], function()
      local path = dir .. "/hostile.safetensors"
      helper.write(path, case[2])
      local message = helper.failure(engine.load, path)
      assert.matches("hostile.safetensors: ", message, 1, true)
      assert.matches(case[3], message)
    end)
  end

  it("refuses a file cut off anywhere", function()
    local path = dir .. "/cut"
    engine.save(path, { a = engine.arange(0, 5), b = engine.ones(3) }, { k = "v" })
    local whole = helper.read(path)
    for size = 0, #whole - 1 do
      helper.write(path, whole:sub(1, size))
      assert.is_false((pcall(engine.load, path)), "cut to " .. size)
    end
    helper.write(path, whole)
    assert.are.equal(5, engine.load(path).a:totable()[6])
  end)

  it("reports a missing file or a path that is not a file", function()
    assert.has_error(function() engine.load(dir .. "/none") end)
    assert.truthy(select(2, pcall(engine.load, dir .. "/none")):find(
      "none: cannot open: No such file", 1, true))
    assert.truthy(select(2, pcall(engine.load, dir)):find("expected a file, got a directory", 1,
      true))
    assert.truthy(select(2, pcall(engine.load, "/dev/null")):find(
      "expected a file, got a device or pipe", 1, true))
  end)

  it("refuses tensors that cannot be saved and keeps the old file", function()
    local path = dir .. "/model"
    engine.save(path, { a = engine.ones(2) })
    local before = helper.read(path)
    local stale = engine.zeros(1)
    stale:free()
    local bad = {
      { { a = 1 }, nil, "expected a tensor for 'a', got 1" },
      { { engine.ones(1) }, nil, "expected each name to be a string" },
      { { ["\255"] = engine.ones(1) }, nil, "is not UTF-8" },
      { { ["a\0"] = engine.ones(1) }, nil, "expected names without NUL bytes" },
      { { __metadata__ = engine.ones(1) }, nil, "__metadata__ is reserved" },
      { { a = engine.ones(1) }, { k = 1 }, "expected metadata { key = text }" },
      { { a = engine.ones(1) }, "pt", "expected metadata to be a table { key = text }, got 'pt'" },
      { { a = stale }, nil, "'a': " },
    }
    for _, case in ipairs(bad) do
      helper.refuses(case[3], engine.save, path, case[1], case[2])
    end
    assert.is_false((pcall(engine.save, dir .. "/no/such/place", {})))
    assert.truthy(select(2, pcall(engine.save, dir, {})):find(
      "expected a file to write, got a directory", 1, true))
    assert.truthy(select(2, pcall(engine.save, "/dev/null", {})):find("got a device or pipe", 1,
      true))
    assert.are.equal(before, helper.read(path))
    assert.are.same({ "model" }, scratch.names(dir))
  end)

  it("keeps the old file when the disk is full", function()
    local path = dir .. "/model"
    engine.save(path, { a = engine.ones(10) })
    local before = helper.read(path)
    local good, message = scratch.with_file_limit(8192, pcall, engine.save, path,
      { a = engine.ones(10000) })
    assert.is_false(good)
    assert.truthy(message:find(
      "model: cannot write the new contents (an existing file is unchanged): ", 1, true),
      message)
    assert.are.equal(before, helper.read(path))
    assert.are.same({ "model" }, scratch.names(dir))
  end)
end)

describe("crc32c", function()
  it("gives the published values, also when computed in pieces", function()
    assert.are.equal(0xE3069283, C.eng_crc32c(0, "123456789", 9))
    assert.are.equal(0x8A9136AA, C.eng_crc32c(0, ("\0"):rep(32), 32))
    assert.are.equal(0x62A8AB43, C.eng_crc32c(0, ("\255"):rep(32), 32))
    assert.are.equal(0xE3069283, C.eng_crc32c(C.eng_crc32c(0, "1234", 4), "56789", 5))
    assert.are.equal(0, C.eng_crc32c(0, "", 0))
  end)
end)
