-- Checksums: XXH64 against published values, and checksums of tensors against their definition, for
-- any number of threads and after any change of a bit.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"

local C, check, ffi = M_ffi.C, M_ffi.check, M_ffi.ffi
local PIECE = 65536

local function checksum(x)
  local out = ffi.new("uint64_t[1]")
  check(C.eng_checksum(out, x))
  return out[0]
end

local function bytes_of(x)
  local info = ffi.new("eng_tensor_info")
  check(C.eng_info(info, x))
  return ffi.cast("uint8_t *", info.data)
end

describe("checksums", function()
  it("of text equal published values of XXH64", function()
    for text, expected in pairs { [""] = "ef46db3751d8e999", a = "d24ec4f1a98c6e5b",
      abc = "44bc2cf5ad770999", ["1234"] = "d8316e61d84f6ba4", ["12345678"] = "d2d02f08cf7cfd4a",
      ["123456789012345"] = "c377d78ade001a3c",
      ["1234567890123456789012345678901"] = "8f367cb873a5376e",
      ["12345678901234567890123456789012"] = "40fd1aa52d98274c",
      ["The quick brown fox jumps over the lazy dog"] = "0b242d361fda71bc" } do
      assert.equal(expected, ("%016x"):format(C.eng_hash64(text, #text)), text)
    end
  end)

  it("of a tensor are the hash of its pieces' hashes, for any number of threads", function()
    engine.seed(1)
    for _, case in ipairs { { 0, "f32" }, { 1, "f32" }, { 16384, "f32" }, { 16385, "f32" },
      { 300001, "bf16" } } do
      local x = engine.randn(case[1]):to(case[2])
      local size, data, sums, n = case[1] * (case[2] == "f32" and 4 or 2), bytes_of(x),
        ffi.new("uint64_t[16]"), 0
      for at = 0, size - 1, PIECE do
        sums[n] = C.eng_hash64(data + at, math.min(PIECE, size - at))
        n = n + 1
      end
      local before = engine.threads()
      for threads = 1, 3 do
        engine.threads(threads)
        assert.is_true(checksum(x) == C.eng_hash64(sums, 8 * n))
      end
      engine.threads(before)
    end
  end)

  it("of a tensor change when one bit of it changes", function()
    local x = engine.zeros(40000)
    local data, whole = bytes_of(x), checksum(x)
    for _, at in ipairs { 0, 31, 32, 65535, 65536, 131072, 159999 } do
      for k = 0, 7 do
        data[at] = bit.lshift(1, k)
        assert.is_false(checksum(x) == whole, at .. " " .. k)
      end
      data[at] = 0
    end
    assert.is_true(checksum(x) == whole)
  end)

  it("are refused for a tensor with gaps", function()
    local x = engine.zeros(4, 4):transpose()
    assert.are_not.equal(0, C.eng_checksum(ffi.new("uint64_t[1]"), x))
    assert.matches("checksum: expected a contiguous tensor, got a view f32 [4 x 4]",
      M_ffi.message(), 1, true)
  end)
end)
