-- The file helpers of the core: read-only maps, atomic writes, directories.
local M_ffi = require "engine.base.ffi"
local file = require "engine.base.file"
local helper = require "spec.helper"
local scratch = require "spec.store.scratch"

local ffi, C, check = M_ffi.ffi, M_ffi.C, M_ffi.check

describe("files", function()
  local dir
  before_each(function() dir = helper.folder() end)
  after_each(function() helper.remove(dir) end)

  local function fails(status, pattern)
    assert.are_not.equal(0, tonumber(status))
    assert.truthy(M_ffi.message():find(pattern), M_ffi.message())
  end

  it("are mapped completely, including empty ones", function()
    local map = ffi.new("eng_mapping")
    helper.write(dir .. "/a", "abc\0def")
    check(C.eng_file_map(map, dir .. "/a"))
    assert.are.equal("abc\0def", ffi.string(map.data, map.size))
    C.eng_file_unmap(map)
    assert.is_true(map.data == nil and map.size == 0)
    helper.write(dir .. "/empty", "")
    check(C.eng_file_map(map, dir .. "/empty"))
    assert.is_true(map.data == nil and map.size == 0)
    C.eng_file_unmap(map)
    fails(C.eng_file_map(map, dir .. "/none"), "none: cannot open: No such file")
    fails(C.eng_file_map(map, dir), "expected a file, got a directory")
    fails(C.eng_file_map(map, "/dev/zero"), "expected a file, got a device")
  end)

  it("are replaced atomically or not at all", function()
    check(C.eng_file_write(dir .. "/a", "old", 3))
    check(C.eng_file_write(dir .. "/a", "newer", 5))
    assert.are.equal("newer", helper.read(dir .. "/a"))
    scratch.with_file_limit(4096, function() fails(C.eng_file_write(dir .. "/a", ("x"):rep(10000),
      10000), "a: cannot write the new contents %(an existing file is unchanged%): .*; hint: "
      .. "raise the limit on file sizes %(ulimit %-f%)$") end)
    assert.are.equal("newer", helper.read(dir .. "/a"))
    assert.are.same({ "a" }, scratch.names(dir))
    fails(C.eng_file_write(dir .. "/no/a", "", 0),
      "no/a: cannot create a temporary file in the same directory: No such file")
    local crc, size = ffi.new("uint32_t[1]"), ffi.new("int64_t[1]")
    check(C.eng_file_checksum(crc, size, dir .. "/a"))
    assert.are.same({ C.eng_crc32c(0, "newer", 5), 5 }, { crc[0], tonumber(size[0]) })
    fails(C.eng_file_checksum(crc, size, dir .. "/b"), "cannot open")
    helper.shell("mkfifo " .. helper.quote(dir .. "/pipe"))
    fails(C.eng_file_checksum(crc, size, dir .. "/pipe"), "expected a file, got a device or pipe")
  end)

  it("can be created, listed, renamed, swapped and removed with their directories", function()
    check(C.eng_file_mkdir(dir .. "/x/y//z/"))
    check(C.eng_file_mkdir(dir .. "/x/y/z"))
    helper.write(dir .. "/x/file", "")
    assert.are.same({ 0, 1, 2, 3 },
      { C.eng_file_kind(dir .. "/q"), C.eng_file_kind(dir .. "/x/file"),
      C.eng_file_kind(dir .. "/x"), C.eng_file_kind("/dev/null") })
    assert.are.same({ "file", "y" }, scratch.names(dir .. "/x"))
    fails(C.eng_file_mkdir(dir .. "/x/file/deeper"),
      "x/file: cannot make the directory: File exists")
    fails(C.eng_file_mkdir(""), "expected the path of a directory, got an empty text")
    check(C.eng_file_rename(dir .. "/x/file", dir .. "/x/other"))
    check(C.eng_file_exchange(dir .. "/x/other", dir .. "/x/y"))
    assert.are.same({ 2, 1 }, { C.eng_file_kind(dir .. "/x/other"),
      C.eng_file_kind(dir .. "/x/y") })
    fails(C.eng_file_remove(dir .. "/x"), "cannot remove")
    check(C.eng_file_remove(dir .. "/x/y"))
    check(C.eng_file_remove(dir .. "/x/y"))
    helper.write(dir .. "/x/target", "")
    helper.shell(("ln -s %s %s"):format(helper.quote(dir .. "/x"), helper.quote(dir .. "/link")))
    file.remove(dir .. "/link/")
    assert.are.same({ 0, 1 }, { C.eng_file_kind(dir .. "/link"),
      C.eng_file_kind(dir .. "/x/target") })
    file.remove(dir .. "/x/target")
    fails(C.eng_file_rename(dir .. "/none", dir .. "/x"), "cannot rename to")
    fails(C.eng_file_exchange(dir .. "/none", dir .. "/x"),
      "cannot exchange this directory or file with")
    check(C.eng_file_sync(dir))
    local out = ffi.new("eng_listing *[1]")
    fails(C.eng_file_list(out, dir .. "/none"), "cannot list")
    file.remove(dir .. "/x")
    assert.is_false(file.exists(dir .. "/x"))
  end)

  it("have absolute paths also if PWD is wrong", function()
    local script = helper.write(dir .. "/a.lua", "print((require 'engine.base.file').absolute 'x')")
    for folder, path in pairs { ["/"] = "/x", [dir] = dir .. "/x" } do
      for _, pwd in ipairs { "PWD=/tmp", "PWD=", "PWD=.", "-u PWD" } do
        assert.equal(path .. "\n", helper.shell(("cd %s && env %s %s %s"):format(
          helper.quote(folder), pwd, helper.quote(helper.engine), helper.quote(script))).out)
      end
    end
  end)
end)
