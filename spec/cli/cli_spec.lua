-- The binary: the command line of the standalone Lua interpreter, exit codes, subcommands, signals,
-- REPL.
local helper = require "spec.helper"
local run, shell, quote = helper.run, helper.shell, helper.quote
local engine = quote(helper.engine)

describe("the command line", function()
  local folder
  setup(function() folder = helper.folder() end)
  teardown(function() helper.remove(folder) end)

  local function script(text)
    return helper.write(folder .. "/script.lua", text)
  end

  it("runs several -e in order, in one state", function()
    assert.same({ code = 0, out = "7\n", err = "" }, run { "-e", "x = 3", "-ex = x + 4", "-e",
      "print(x)" })
  end)

  it("runs a script with its arguments in ... and arg", function()
    local path = script "print(...) print(arg[0], arg[1], arg[2], #arg) print(arg[-1] ~= nil)"
    assert.equal(("lr=3\tb c\n%s\tlr=3\tb c\t2\ntrue\n"):format(path),
      run({ path, "lr=3", "b c" }).out)
  end)

  it("puts options before the script at negative indices of arg", function()
    local path = script "print(arg[-2], arg[-1])"
    assert.equal("-e\tlocal a\n", run({ "-e", "local a", path }).out)
  end)

  it("sets arg without a script, too", function()
    assert.equal("-e\n", run({ "-e", "print(arg[1])" }).out)
  end)

  it("requires a module with -l", function()
    assert.equal("table\n", run({ "-l", "engine.base.nearest", "-e",
      "print(type(package.loaded['engine.base.nearest']))" }).out)
    local missing = run { "-l", "no.such.module" }
    assert.equal(1, missing.code)
    assert.matches("no.such.module", missing.err, 1, true)
  end)

  it("runs stdin; `-` allows arguments", function()
    assert.equal("5\n", run({}, "print(2 + 3)").out)
    assert.equal("a\tb\n", run({ "-", "a", "b" }, "print(...)").out)
  end)

  it("skips a #! line", function()
    assert.equal("1\n", run({ script "#!/usr/bin/env engine\nprint(1)" }).out)
  end)

  it("takes the word after -- as the script", function()
    assert.equal("1\n", run({ "--", script "print(1)" }).out)
  end)

  it("shows the version with -v and --version", function()
    assert.matches("^engine %d+%.%d+%.%d+ %-%- LuaJIT", run({ "-v" }).out)
    assert.matches("^engine %d+%.%d+%.%d+ %-%- LuaJIT", run({ "--version" }).out)
  end)

  it("runs LUA_INIT unless -E is given", function()
    assert.equal("9\n", shell("LUA_INIT='x = 9' " .. engine .. " -e 'print(x)'").out)
    assert.equal("nil\n", shell("LUA_INIT='x = 9' " .. engine .. " -E -e 'print(x)'").out)
  end)

  it("controls the JIT with -j", function()
    assert.equal("false\n", run({ "-joff", "-e", "print((jit.status()))" }).out)
    assert.equal("false\n", run({ "-j", "off", "-e", "print((jit.status()))" }).out)
  end)

  it("refuses an unknown option with the usage", function()
    for _, option in ipairs { "-x", "-ix", "--nope", "-e" } do
      local result = run { option }
      assert.equal(1, result.code)
      assert.matches("usage: engine", result.err, 1, true)
    end
  end)

  it("exits with the code given to os.exit, and with 0 at the end of the script", function()
    assert.equal(0, run({ "-e", "" }).code)
    assert.equal(7, run({ "-e", "os.exit(7)" }).code)
    assert.equal(3, run({ script "os.exit(3, true)" }).code)
  end)

  it("exits with 1, a message and a traceback after an error", function()
    local path = script("local function deep() error('on purpose') end\n" ..
      "local function outer() deep() end\nouter()")
    local result = run { path }
    assert.equal(1, result.code)
    assert.equal("", result.out)
    assert.matches("engine: " .. path .. ":1: on purpose", result.err, 1, true)
    assert.matches("stack traceback:", result.err, 1, true)
    assert.matches(path .. ":3: in main chunk", result.err, 1, true)
  end)

  it("leaves out a traceback that only repeats the message's position", function()
    assert.equal("engine: (command line):2: here\n", run({ "-e", "\nerror('here')" }).err)
    assert.matches("(command line):2: in main chunk", run({ "-e", "local function deep() " ..
      "error('here') end\ndeep()" }).err, 1, true)
    assert.equal("engine: here\nstack traceback:\n\t(command line):1: in main chunk\n",
      run({ "-e", "error('here', 0)" }).err)
  end)

  it("leaves the engine's own frames out of a traceback", function()
    local path = script("local engine = require 'engine'\n" ..
      "local function deep() local x = engine.ones(2):item() return x end\ndeep()")
    local err = run({ path }).err
    assert.matches("engine: " .. path .. ":2: item: expected", err, 1, true)
    assert.matches(path .. ":3: in main chunk", err, 1, true)
    assert.is_nil(err:find("ffi.lua", 1, true))
    assert.equal("engine: " .. path .. ":1: item: expected a tensor of one element, got f32 [2]\n",
      run({ script "local x = require('engine').ones(2):item()" }).err)
  end)

  it("names file and line of a syntax error", function()
    local result = run { script "print(1)\nprint((" }
    assert.equal(1, result.code)
    assert.matches("script.lua:2:", result.err, 1, true)
  end)

  it("prints error objects by __tostring, others by type", function()
    assert.matches("engine: mine", run({ "-e",
      "error(setmetatable({}, { __tostring = function() return 'mine' end }))" }).err, 1, true)
    assert.matches("error object of type table", run({ "-e", "error({})" }).err, 1, true)
    assert.same({ code = 1, out = "", err = "" }, run { "-e", "error()" })
  end)

  it("reports a missing script, and suggests a command", function()
    local missing = run { folder .. "/nothing.lua" }
    assert.equal(1, missing.code)
    assert.matches("nothing.lua: No such file or directory\n$", missing.err)
    for _, name in ipairs { "gpt.lua", "examples/gtp.lua", "./examples/gpt" } do
      assert.matches("did you mean '[./]*examples/gpt.lua'?", run({ name }).err)
    end
    local misspelt = run { "docter" }
    assert.equal(1, misspelt.code)
    assert.matches("did you mean 'doctor'?", misspelt.err, 1, true)
  end)

  it("prefers a file to a command of the same name", function()
    helper.write(folder .. "/version", "print('a file')")
    assert.equal("a file\n", shell("cd " .. quote(folder) .. " && " .. engine .. " version").out)
  end)

  it("flushes stdout before it prints an error", function()
    local result = shell(engine .. " -e 'print(1) error(2)' 2>&1")
    assert.matches("^1\n", result.out)
  end)

  it("runs Lua tools", function()
    helper.write(folder .. "/a_spec.lua",
      "it('works', function() assert.is_truthy(require 'engine.host') end)\n" ..
      "it('fails', function() error('x') end)")
    -- a link, because busted cannot run an interpreter whose path has a space
    local result = shell(("cd %s && ln -s %s engine && busted --lua=./engine -o TAP a_spec.lua")
      :format(quote(folder), engine))
    assert.equal(1, result.code)
    assert.matches("ok 1 - works", result.out, 1, true)
    assert.matches("not ok 2 - fails", result.out, 1, true)
  end)
end)

describe("subcommands", function()
  it("help lists options, and each command with the text of its module", function()
    for _, arguments in ipairs { { "--help" }, { "-h" }, { "help" } } do
      local result = run(arguments)
      assert.equal(0, result.code)
      assert.matches("usage: engine", result.out, 1, true)
      assert.matches("engine doctor", result.out, 1, true)
    end
    assert.equal(0, run({ "help", "doctor" }).code)
    for _, name in ipairs { "plan", "plot", "version" } do     -- --help anywhere
      assert.matches("usage: engine " .. name, run({ name, "x.lua", "--help" }).out, 1, true)
    end
    assert.equal(1, run({ "help", "nothing" }).code)
  end)

  it("doctor prints one line for each capability of the machine", function()
    local result = run { "doctor" }
    assert.equal(0, result.code, result.out .. result.err)
    for _, what in ipairs { "CPU", "instructions", "memory", "LuaJIT", "kernels", "oneDNN",
      "GPU" } do
      assert.matches("\n?%a+ +" .. what .. " +%S", result.out)
    end
    for text in (result.out:match("^(.-)\n\n") or result.out):gmatch("[^\n]+") do
      assert.is_truthy(text:match("^ok ") or text:match("^note ") or text:match("^missing "), text)
    end
    result = helper.shell("LUA_CPATH=/nowhere/?.so " .. helper.quote(helper.engine) .. " doctor")
    assert.equal(1, result.code, result.out .. result.err)
    assert.matches("\nmissing +lua%-cjson +apt install lua%-cjson\n", result.out)
  end)
end)

describe("the REPL", function()
  it("prints expressions, continues after an error, reads over several lines", function()
    local result = run({ "-i" }, "1+1\nlocal x = 5\nx * 2\nerror('oops')\nfor i = 1, 2 do\n  " ..
      "io.write(i, ' ')\nend\n'a', nil, 3\n")
    assert.equal(0, result.code)
    assert.matches("> 2\n", result.out, 1, true)
    assert.matches("> 10\n", result.out, 1, true)
    assert.matches("1 2 ", result.out, 1, true)
    assert.matches('"a"\tnil\t3', result.out, 1, true)
    assert.matches("oops", result.err, 1, true)
    -- an error in the entry itself needs no traceback
    assert.matches("^there is no run [^\n]*\n$", run({ "-i" }, "open 'nothing' .x\n").err)
    assert.matches("^there\nstack traceback:", run({ "-i" },
      "function f() error('there', 0) end\nf()\n").err)
  end)

  it("keeps variables that a line set, even if the line failed", function()
    local folder = helper.folder()
    local path = helper.write(folder .. "/s.lua",
      "kept = 41 local own, string = 6, 'mine' local function twice(x) return 2 * x end " ..
      "error('stop')")
    local result = run({ "-i", path }, "kept + 1\nown + 1\ntype(string)\n")
    -- the script's locals are kept too, but they never replace existing globals
    assert.matches("> 42\n> 7\n> \"table\"\n", result.out, 1, true)
    assert.matches("stop", result.err, 1, true)
    helper.write(path, "#!/usr/bin/env engine\nlocal own = 41\nlocal function twice(x) return x " ..
      "+ own end -- no line end")
    assert.matches("> 42\n", run({ "-i", path }, "twice(1)\n").out, 1, true)
    helper.write(path, "local own = 41\nlocal function f()\nreturn 5\nend\nreturn own, " ..
      "error('line 5')\n")
    local returned = run({ "-i", path }, "own + 1\n")
    assert.matches("> 42\n", returned.out, 1, true)
    assert.matches("s.lua:5: line 5", returned.err, 1, true)
    helper.write(path, "local own = 41\nif own then\n  kept = own + 1\n  return own end")
    assert.matches("> 42\n", run({ "-i", path }, "kept\n").out, 1, true)
    helper.write(path, "")
    assert.equal(0, run({ "-i", path }, "").code)
    helper.remove(folder)
  end)

  it("prints help, and ends at exit and quit", function()
    assert.matches("Tab completes", run({ "-i" }, "help\n").out, 1, true)
    assert.matches("tensor:matmul", run({ "-i" }, "help('matmul')\n").out, 1, true)
    assert.is_nil(run({ "-i" }, "exit\n1 + 41\n").out:find("42", 1, true))
    assert.is_nil(run({ "-i" }, "quit()\n1 + 41\n").out:find("42", 1, true))
    assert.matches("> 7\n", run({ "-i" }, "exit = 7\nexit\n").out, 1, true)
  end)

  it("shows tables, strings and cycles", function()
    local repl = require "engine.cli.repl"
    assert.equal('{ 1, 2, a = "x\\n", [true] = {} }', repl.show({ 1, 2, a = "x\n", [true] = {} }))
    local cycle = {}
    cycle.me = cycle
    assert.matches("^{ me = table: ", repl.show(cycle))
    assert.matches("%.%.%. 40 more",
      repl.show((function() local t = {} for i = 1, 100 do t[i] = i end return t end)()))
  end)

  it("completes globals, fields and methods", function()
    local repl = require "engine.cli.repl"
    assert.equal("ing", repl.complete("str"))
    assert.same({ nil, "rep  reverse" }, { repl.complete("x = string.re") })
    assert.equal("ction", repl.complete("fun"))
    assert.is_nil((repl.complete("nothing_here.")))
    assert.equal("E.md", repl.complete("x = io.open 'READM"))
    assert.equal(".def", repl.complete('f("core/ops'))
    assert.is_nil((repl.complete('f("/nowhere/x')))
    _G.completion_test = { deep = { alpha = 1, alps = 2 }, text = "s" }
    assert.equal("alp", repl.complete("completion_test.deep."))
    assert.equal("per", repl.complete("completion_test.text:up"))
    local front = require "engine"
    _G.completion_test = { x = front.tensor { 1, 2 }, m = front.nn.linear(2, 3), front = front }
    assert.equal("beddi", repl.complete("completion_test.front.nn.em"):sub(1, 5))
    assert.equal("ape", repl.complete("completion_test.x.sh"))
    assert.equal("_state", repl.complete("completion_test.m:load"))
    assert.equal("rward", repl.complete("completion_test.m:fo"))
    assert.equal("ght", repl.complete("completion_test.m.wei"))
    _G.completion_test = nil
  end)

  it("edits lines on a terminal", function()
    if shell("command -v script").code ~= 0 then return pending("needs script(1)") end
    local folder = helper.folder()
    local result = shell(([[
      { sleep 0.5; printf '20+1\n'; sleep 0.3; printf 'stri\t.upper("up")\n'
        sleep 0.3; printf 'dropped\003'; sleep 0.3; printf 'while true do end\n'
        sleep 0.3; printf '\003'; sleep 0.3; printf '\004'; sleep 0.3; } |
      HOME=%s TERM=xterm timeout 20 script -qec %s /dev/null]]):format(quote(folder),
      quote(engine)))
    local history = helper.read(folder .. "/.engine_history")
    helper.remove(folder)
    assert.matches("21\r\n", result.out, 1, true)
    assert.matches('"UP"', result.out, 1, true)
    assert.matches("interrupted!", result.out, 1, true)
    assert.not_matches("dropped:", result.out, 1, true)
    assert.matches("20+1", history, 1, true)
  end)
end)

it("the process is named engine, although it executes itself a second time", function()
  assert.equal("engine\n", helper.run({ "-e", "print(io.open('/proc/self/comm'):read('*l'))" }).out)
end)

describe("signals", function()
  -- Runs code that prints "ready", sends the signals 0.2 s apart, and returns the exit code and the
  -- output.
  local function interrupted(code, signals)
    local sends = {}
    for i, name in ipairs(signals) do sends[i] = "kill -" .. name .. " $pid; sleep 0.2" end
    local out = os.tmpname()
    local result = shell(([[
      %s -e %s >%s 2>&1 & pid=$!
      for i in $(seq 100); do grep -q ready %s && break; sleep 0.05; done
      %s
      wait $pid; echo "code $?"]]):format(engine, quote(code), out, out, table.concat(sends, "; ")))
    local text = helper.read(out)
    os.remove(out)
    return tonumber(result.out:match("code (%d+)")), text
  end

  local busy = "io.write('ready\\n') io.flush() jit.off() while true do end"

  it("SIGINT stops a script with a message and status 130", function()
    local code, text = interrupted(busy, { "INT" })
    assert.equal(130, code)
    assert.equal("ready\nengine: (command line):1: interrupted!\n", text)
  end)

  it("names the script's line when it stops inside the engine's own Lua code", function()
    local code, text = interrupted([[local nn = require("engine").nn
      io.write("ready\n") io.flush() jit.off()
      while true do nn.sequential { nn.relu(), nn.relu() } end]], { "INT" })
    assert.equal(130, code)
    assert.matches("engine: %(command line%):3: interrupted!", text)
    assert.not_matches("lua/engine/", text, 1, true)
  end)

  it("SIGTERM stops a script with status 143", function()
    assert.equal(143, (interrupted(busy, { "TERM" })))
  end)

  it("explains that a compiled loop cannot be interrupted; the second SIGINT ends it", function()
    local pipe = io.popen(("exec 2>&1; %s -e %s & p=$!; sleep 0.4; kill -INT $p; sleep 1.6; " ..
      "kill -INT $p; wait $p; echo code $?"):format(engine, helper.quote(
      "io.write('ready\\n') io.flush() local function spin() while true do end end spin()")))
    local text = pipe:read("*a")
    pipe:close()
    assert.matches("still busy; interrupt again to stop at once", text, 1, true)
    assert.matches("code 130", text, 1, true)
  end)

  it("SIGTERM ends a compiled loop after a second, in a script without a run", function()
    local pipe = io.popen(("exec 2>&1; %s -e 'while true do end' & p=$!; sleep 0.4; " ..
      "kill -TERM $p; sleep 3; kill -KILL $p 2>/dev/null; wait $p; echo code $?"):format(engine))
    local text = pipe:read("*a")
    pipe:close()
    assert.matches("code 143", text, 1, true)
    assert.not_matches("still busy", text, 1, true)
  end)

  it("a second SIGINT ends at once, even if the script swallowed the first", function()
    local code = interrupted("io.write('ready\\n') io.flush() jit.off() while true do " ..
      "pcall(function() while true do end end) end", { "INT", "INT" })
    assert.equal(130, code)
  end)

  it("leaves the first SIGINT to a running trainer", function()
    local code, text = interrupted([[
      local C = require("engine.base.ffi").C
      C.eng_interrupt_policy(1)
      io.write("ready\n") io.flush()
      jit.off()
      while C.eng_interrupted() == 0 do end
      print("level", C.eng_interrupted())
      C.eng_interrupt(0)
      C.eng_interrupt_policy(0)]], { "INT" })
    assert.equal(0, code)
    assert.matches("level\t1", text, 1, true)
  end)
end)
