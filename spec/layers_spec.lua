-- Who may include whom (design: the house). Lower layers never see higher ones; Lua is known to the
-- binary and the policy VM alone; policies are plain functions; one Lua file touches the C library.
local helper = require "spec.helper"

local function files(pattern)
  local list = {}
  for path in helper.shell("ls " .. pattern .. " 2>/dev/null").out:gmatch("[^\n]+") do list[#list + 1] = path end
  return list
end

-- C without comments and the contents of strings; Lua likewise.
local function code_of(path)
  local text = helper.read(path)
  if path:match("%.lua$") then
    text = text:gsub("%-%-%[(=*)%[.-%]%1%]", ""):gsub("%-%-[^\n]*", "")
  else
    text = text:gsub("/%*.-%*/", ""):gsub("//[^\n]*", "")
  end
  return text
end

-- Names in include directives: { ["error.h"] = true, ["<lua.h>"] = true }, folders left off.
local function includes(path)
  local set = {}
  for name in code_of(path):gmatch('#%s*include%s*"([^"]+)"') do set[name:match("[^/]+$")] = true end
  for name in code_of(path):gmatch("#%s*include%s*(<[^>]+>)") do set[name] = true end
  return set
end

-- The layer of each header, from the bottom. A file includes headers of its own layer and below;
-- a source file belongs to the layer of its longest matching name here.
local layers = {
  { "engine", "error", "errors", "dtypes", "ops", "numerics", "fp8", "system", "interrupt" },
  { "arena", "pool", "tensor", "dtype", "rng", "file", "json", "crc32c", "nearest", "pattern" },
  { "gradstats", "backend", "plugin", "transfer", "wire" },
  { "op", "tape", "params", "fp8_linear", "fp8_swiglu", "optimizer", "grad", "infer", "view", "step", "graph", "profile", "trap", "api", "random" },
  { "safetensors", "checkpoint", "history", "comm", "attach" },
  { "policy" },
  { "line", "main" },
}

local rank, DEVICES = {}, 3
for number, names in ipairs(layers) do
  for _, name in ipairs(names) do rank[name] = number end
end

local function rank_of(file)
  local name = file:match("([^/]+)%.%w+$")
  while name do
    if rank[name] then return rank[name] end
    name = name:match("^(.*)_[^_]*$")
  end
end

describe("the layers of the core", function()
  it("have a place for every file", function()
    for _, path in ipairs(files "core/*.[ch]") do
      assert.is_truthy(rank_of(path), path .. " is in no layer: name it in spec/layers_spec.lua")
    end
  end)

  it("include nothing above themselves", function()
    for _, path in ipairs(files "core/*.[ch]") do
      for name in pairs(includes(path)) do
        local other = name:match("%.h$") and rank_of("/" .. name)
        if other then
          assert.is_true(other <= rank_of(path), path .. " includes " .. name .. " of a higher layer")
        end
      end
    end
  end)

  it("keep devices below backend.h", function()
    for _, pattern in ipairs { "core/cpu/*.[ch]", "cuda/*.[ch] cuda/*.cu" } do
      local own = {}
      for _, path in ipairs(files(pattern)) do own[path:match("[^/]+$")] = true end
      for _, path in ipairs(files(pattern)) do
        for name in pairs(includes(path)) do
          if not name:match("^<") and not own[name] and not name:match("%.def$") then
            local other = rank_of("/" .. name)
            local of_ranks = path == "cuda/nccl_check.c" and name == "comm_nccl.h"      -- no part of the device: it holds this header against NVIDIA's
            assert.is_true(of_ranks or other ~= nil and other <= DEVICES, path .. " includes " .. name .. ", which devices may not see")
          end
        end
      end
    end
  end)

  it("know Lua in main.c and the policy VM alone", function()
    for _, path in ipairs(files "core/*.[ch] core/cpu/*.[ch]") do
      local set = includes(path)
      local sees_lua = set["<lua.h>"] or set["<lauxlib.h>"] or set["<lualib.h>"] or set["<luajit.h>"] or set["<lua.hpp>"]
      if sees_lua then
        assert.is_truthy(path == "core/main/main.c" or path:match("^core/policy_[%w_]+%.[ch]$"), path .. " includes Lua's headers")
      end
    end
  end)

  it("are compiled without flags that delete overflow checks", function()
    local text = helper.read("Makefile"):gsub("#[^\n]*", "")
    for _, flag in ipairs { "-ffast-math", "-Ofast", "-ffinite-math-only", "-funsafe-math-optimizations", "-fassociative-math" } do
      assert.is_nil(text:find(flag, 1, true), flag)
    end
    for _, path in ipairs(files "core/*.[ch] core/cpu/*.[ch]") do
      assert.is_nil(code_of(path):find("#%s*pragma%s+GCC%s+optimize"), path)
    end
  end)
end)

describe("the public header", function()
  it("declares what the library has, and every declared name begins with eng", function()
    local C = require("engine.base.ffi").C
    local count = 0
    for name in helper.read(require("engine.base.ffi").library_dir .. "/cdef.h"):gmatch("([%w_]+)%s*%(") do
      count = count + 1
      assert.matches("^eng_", name)
      local ok = pcall(function() return C[name] end)
      assert.is_true(ok, name .. " is declared in engine.h and not in the library")
    end
    assert.is_true(count > 50)
  end)
end)

describe("the layers of Lua", function()
  local lua_files = {}
  for path in helper.shell("find lua -name '*.lua'").out:gmatch("[^\n]+") do lua_files[#lua_files + 1] = path end

  it("load the C library in one place", function()
    assert.is_true(#lua_files > 10)
    for _, path in ipairs(lua_files) do
      local code = code_of(path)
      if path ~= "lua/engine/base/ffi.lua" then
        assert.is_nil(code:find("ffi%s*%.%s*load"), path .. " names ffi.load")
        assert.is_nil(code:find("ffi%s*%.%s*C%f[^%w_]%s*%."), path .. " names ffi.C")
        assert.is_nil(code:find("%.cdef%f[^%w_]"), path .. " declares C functions")
      end
    end
  end)

  it("never turn the JIT off for a whole program", function()
    for _, path in ipairs(lua_files) do
      local code = code_of(path)
      assert.is_nil(code:find("jit%s*%.%s*off%s*%(%s*%)"), path)
      assert.is_nil(code:find("jit%s*%.%s*off%s*%(%s*true"), path)
    end
  end)

  it("let policies require nothing", function()
    for _, path in ipairs(files "policies/*.lua") do
      local code = code_of(path)
      for _, word in ipairs { "require", "ffi", "io", "os", "debug", "package", "dofile", "loadfile", "getfenv" } do
        assert.is_nil(code:find("%f[%w_]" .. word .. "%s*[%.%(\"']"), path .. " uses " .. word)
      end
    end
  end)
end)
