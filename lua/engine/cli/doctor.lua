-- engine doctor: prints what this machine offers and what is missing. Each line begins with ok,
-- missing or note. A line that begins with missing says what the missing part is for or how to
-- install it. A last line has the command that installs missing programs, if there are any. The
-- exit code is 1 if a part is missing that the engine needs. Called by init.lua.
local host = require "engine.host"
local machine = require "engine.base.machine"
local process = require "engine.base.process"
local show = require "engine.base.show"

-- Returns the first line that a command prints, or nil.
local function output(command) return process.output(command .. " 2>/dev/null"):match("^[^\n]+") end

local needed_missing = false

local function line(state, what, text) print(("%-8s %-14s %s"):format(state, what, text)) end

local function need(found, what, text, advice)
  if found then return line("ok", what, text) end
  needed_missing = true
  line("missing", what, advice)
end

local function cpu()
  local info = process.output("cat /proc/cpuinfo")
  local model = info:match("model name%s*:%s*([^\n]+)") or output("uname -m") or "unknown"
  line("ok", "CPU", ("%s, %s usable"):format(model,
    show.counted(tonumber(output("nproc")) or machine.threads(), "thread")))

  local flags = " " .. (info:match("flags%s*:%s*([^\n]+)") or "") .. " "
  local sets = {}
  for _, pair in ipairs { { "avx2", "AVX2" }, { "f16c", "F16C" }, { "avx512f", "AVX-512" },
    { "avx512_bf16", "AVX-512 BF16" }, { "avx512_fp16", "AVX-512 FP16" },
    { "amx_bf16", "AMX BF16" }, { "amx_fp16", "AMX FP16" }, { "amx_int8", "AMX INT8" } } do
    if flags:find(" " .. pair[1] .. " ", 1, true) then sets[#sets + 1] = pair[2] end
  end
  line("ok", "instructions", #sets > 0 and table.concat(sets, ", ") or "baseline only")
end

local function memory()
  local info = process.output("cat /proc/meminfo")
  local total, free = tonumber(info:match("MemTotal:%s*(%d+)")),
    tonumber(info:match("MemAvailable:%s*(%d+)"))
  if total then
    line("ok", "memory", ("%.1f GiB, %.1f GiB available"):format(total / 2 ^ 20,
      (free or 0) / 2 ^ 20))
  end
end

local BF16 = { AMX = "on AMX, through oneDNN: several times faster than f32; subnormal " ..
  "bf16 numbers are flushed to zero",
  pairs = "on pairs of elements, with AVX-512 BF16: twice as fast as f32; subnormal bf16 " ..
  "numbers are flushed to zero",
  f32 = "in f32: as fast as f32, and subnormal numbers are kept" }

local function library()
  line("ok", "engine", ("%s, %s"):format(host.version, host.library))
  line("ok", "kernels", ("device %s, instruction set %s, %s"):format(machine.device(),
    machine.isa(), show.counted(machine.threads(), "thread")))
  line("note", "bf16", "products run " .. BF16[machine.bf16()])
  line("ok", "oneDNN", machine.library_version("onednn") or "unknown")
  line("ok", "SQLite", machine.library_version("sqlite") or "unknown")

  local count, text = machine.gpus()
  if count > 0 then
    for gpu in text:gmatch("[^\n]+") do line("note", "GPU", gpu) end
    local before = machine.device()
    local good, message = machine.try_device("cuda")
    if good then line("ok", "CUDA", machine.device_text() .. "; device=cuda trains there")
    else line("note", "CUDA", message) end
    machine.try_device(before)
  elseif count == 0 then line("note", "GPU", "a CUDA driver, but no GPU; training runs on the CPU")
  else line("note", "GPU", "no CUDA driver; training runs on the CPU") end
end

local function lua()
  local gc64 = require("ffi").abi("gc64")
  need(gc64, "LuaJIT", jit.version .. ", GC64, JIT " .. (jit.status() and "on" or "off"),
       "this LuaJIT lacks GC64: install libluajit-5.1-2 of Debian 12 or newer")
  need(pcall(require, "cjson"), "lua-cjson", "installed", "apt install lua-cjson")
end

-- Programs that are needed only to build and test: the program, its package, what it is for.
local optional = {
  { "gcc", "gcc", "needed to build the engine" }, { "make", "make", "needed to build the engine" },
  { "busted", "lua-busted", "needed for `make test`" },
  { "luacheck", "lua-check", "needed for `make check`" },
}

local function programs()
  local missing = {}
  for _, row in ipairs(optional) do
    local path = output("command -v " .. row[1])
    line(path and "ok" or "missing", row[1], path or row[3])
    if not path then missing[#missing + 1] = row[2] end
  end
  local mpi = output("command -v mpirun")
  line("note", "MPI", mpi and mpi .. "; mpirun -np N engine SCRIPT trains on N ranks" or
    "not installed; training runs in one process")
  local nccl, why = machine.nccl()
  local use = machine.gpus() > 0 and "ranks that each have a card send gradients from card to card"
    or "for ranks that each have a card; this machine has no card"
  line("note", "NCCL", nccl and ("%s; %s"):format(nccl, use) or why ..
    "; without it, gradients between cards go through the host's memory")
  if #missing > 0 then
    local sudo = output("id -u") == "0" and "" or "sudo "
    print(("\nTo install what is missing: %sapt-get install %s"):format(sudo,
      table.concat(missing, " ")))
  end
end

return require("engine.cli.options").command {
  name = "doctor", doc = "what this machine offers, and what is missing",
  most = 0, expects = "no arguments",
  help = [==[
usage: engine doctor

Prints what this machine offers: processor, memory, LuaJIT, libraries, programs, cards and ranks.
Each line begins with ok, missing or note. A line that begins with missing says what the missing
part is for or how to install it. The exit status is 1 if a part is missing that the engine
needs.]==],
  main = function()
    cpu()
    memory()
    lua()
    library()
    programs()
    return needed_missing and 1 or 0
  end,
}
