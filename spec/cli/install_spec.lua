-- `make install` into an empty folder whose path has a space, used from another folder and, if the
-- specs run as root, by another user; then `make uninstall`.
local helper = require "spec.helper"
local quote, shell = helper.quote, helper.shell

local build = require("engine.base.ffi").library_dir:match("build.*$")
local in_tree = build and helper.read("Makefile") and shell("command -v make pkg-config").code == 0

describe("an installed engine", function()
  if not in_tree then return end
  local top, dest, prefix, engine, as_user

  -- `-o all`: installs the existing build without building.
  local function make(target)
    return shell(("make --no-print-directory -o all BUILD=%s %s DESTDIR=%s PREFIX=/opt"):format(
      quote(build), target, quote(dest)))
  end

  local function run(command)
    return shell(("cd %s && %s sh -c %s"):format(quote(top), as_user, quote(command)))
  end

  setup(function()
    top = helper.folder()
    dest, prefix = top .. "/a place", top .. "/a place/opt"
    engine = quote(prefix .. "/bin/engine")
    shell("chmod 777 " .. quote(top))
    as_user = shell("id -u").out == "0\n" and "runuser -u nobody -- env HOME=/nonexistent" or "env"
    local result = make("install")
    assert.equal(0, result.code, result.out .. result.err)
  end)

  teardown(function() helper.remove(top) end)

  it("finds its library, its modules and its policies", function()
    local result = run(engine .. " doctor")
    assert.equal(0, result.code, result.err)
    result = run(engine .. " -e 'print(#require(\"engine\").policy.names() > 20)'")
    assert.equal("true\n", result.out, result.err)
  end)

  it("trains an example, and lists the run", function()
    local script = quote(prefix .. "/share/engine/examples/gpt.lua")
    local result = run(("%s %s steps=3 run=here log=quiet && %s runs"):format(
      engine, script, engine))
    assert.equal(0, result.code, result.err)
    assert.matches("here +3 ", result.out)
  end)

  it("can be required from plain luajit", function()
    if helper.sanitized then return end   -- luajit would lack the sanitizer's library
    local path = quote(prefix .. "/share/lua/5.1/?.lua;" .. prefix .. "/share/lua/5.1/?/init.lua")
    local code = quote 'local e = require "engine" print(e.full({ 2, 3 }, 2):sum():item())'
    local result = run(("LUA_PATH=%s luajit -e %s"):format(path, code))
    assert.equal("12\n", result.out, result.err)
  end)

  it("starts ranks", function()
    if not require("spec.dist.start").there then return end
    local code = quote 'print(require("engine").ranks.size())'
    local result = run(("mpirun --oversubscribe -np 2 %s -e %s"):format(engine, code))
    assert.matches("2\n", result.out, nil, nil, result.err)
  end)

  it("lets C programs find its headers and its library through pkg-config", function()
    if helper.sanitized then return end   -- the program would lack the sanitizer's library
    helper.write(top .. "/a.c", [[
#include <engine.h>
#include <stdio.h>
int main(void) { return puts(eng_version()) < 0; }
]])
    local flags = ("$(PKG_CONFIG_PATH=%s pkg-config --cflags --libs engine)"):format(
      quote(prefix .. "/lib/pkgconfig"))
    local result = run(('eval gcc -Wall -Wextra -Werror -o a a.c "%s" && ./a'):format(flags))
    assert.equal(require("engine").version .. "\n", result.out, result.err)
  end)

  it("has a man page and completions that know every command", function()
    local page = helper.read(prefix .. "/share/man/man1/engine.1")
    for _, command in ipairs(require("engine.cli.help").commands) do
      local entry = page:find("\n.It Cm " .. command, 1, true)
      assert.is_truthy(entry, command .. " is not in docs/engine.1")
    end
    local function completed(words)
      local _, gaps = words:gsub(" ", "")
      local code = ("source %s; COMP_WORDS=(%s) COMP_CWORD=%d; _engine; echo ${COMPREPLY[*]}")
        :format(quote(prefix .. "/share/bash-completion/completions/engine"), words, gaps)
      local result = run(("PATH=%s:$PATH bash -c %s"):format(quote(prefix .. "/bin"), quote(code)))
      assert.equal("", result.err)
      return result.out
    end
    assert.matches("replay", completed "engine re")
    assert.matches("report", completed "engine re")
    assert.equal("--columns\n", completed "engine plot a --col")
    shell("mkdir -p " .. quote(top .. "/runs/spring") .. " " .. quote(top .. "/runs/summer"))
    assert.equal("spring summer\n", completed "engine watch s")
    assert.equal("spring summer\n", completed "engine replay s")
    assert.equal("--verify\n", completed "engine replay spring --ver")
    assert.equal("--max_tokens\n", completed "engine generate folder --max")
  end)

  it("is removed without a trace", function()
    local result = make("uninstall")
    assert.equal(0, result.code, result.err)
    assert.equal("", shell("find " .. quote(dest) .. " -mindepth 1").out)
    assert.matches("nothing is installed", make("uninstall").err)
  end)
end)
