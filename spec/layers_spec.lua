-- Checks the layers: folders depend only on folders below them. Only main/ and policy/ use Lua's
-- headers; policies require nothing; only two Lua files load C libraries. Files that comments name
-- exist, and the first comment of a file says who calls it.
local helper = require "spec.helper"

-- Returns the files that a shell command lists. Raises an error if it lists none.
local function files(command)
  local list = {}
  for path in helper.shell(command).out:gmatch("[^\n]+") do list[#list + 1] = path end
  assert(#list > 0, command .. " lists nothing")
  return list
end

-- The code of a file, without its comments.
local function code_of(path)
  local text = helper.read(path)
  if path:match("%.lua$") then
    text = text:gsub("%-%-%[(=*)%[.-%]%1%]", ""):gsub("%-%-[^\n]*", "")
  else
    text = text:gsub("/%*.-%*/", ""):gsub("//[^\n]*", "")
  end
  return text
end

-- The folders from bottom to top: a file may use its own folder and those before it.
local CORE = { "base", "tokenizer", "tensor", "device", "cpu", "params", "autograd", "fp8", "dist",
  "store", "policy", "main" }
local CUDA = {
  "runtime", "kernel", "pointwise", "rows", "gemm", "images", "quantized", "attention",
  "parameters",
}
local LUA = {
  "base", "tensor", "nn", "data", "policy", "dist", "run", "optim", "train", "report", "docs",
  "cli",
}

-- Folders whose files have no dependency cycle.
local ACYCLIC = {
  "base", "tokenizer", "tensor", "device", "params", "autograd", "dist", "store", "policy",
}

local function ranks_of(folders)
  local rank = {}
  for number, name in ipairs(folders) do rank[name] = number end
  return rank
end
local core_rank, cuda_rank, lua_rank = ranks_of(CORE), ranks_of(CUDA), ranks_of(LUA)

-- The includes of a file: { "base/error.h", "<lua.h>" }; a header of the same folder has no folder
-- in its name.
local function includes(path)
  local list = {}
  for name in code_of(path):gmatch('#%s*include%s*"([^"]+)"') do list[#list + 1] = name end
  for name in code_of(path):gmatch("#%s*include%s*(<[^>]+>)") do list[#list + 1] = name end
  return list
end

-- Calls of functions in a folder above, according to the object files of `root`: "folder/file ->
-- function". Also returns the number of calls checked; nil if `root` has no build.
local function upward_calls(root, rank)
  local build, folder_of, wanted = require("engine.base.ffi").library_dir, {}, {}
  local listing = helper.shell(("cd %s && nm -A %s/*/*.o"):format(helper.quote(build), root))
  if listing.code ~= 0 then return nil end
  for line in listing.out:gmatch("[^\n]+") do
    local object, kind, name = line:match("^" .. root .. "/([^:]+)%.o:[%x ]* (%a) ([%w_]+)$")
    if kind == "U" then wanted[#wanted + 1] = { object, name }
    elseif kind and kind:match("[TDBRVW]") then folder_of[name] = object:match("^[^/]+") end
  end
  local upward = {}
  for _, want in ipairs(wanted) do
    local own, other = rank[want[1]:match("^[^/]+")], rank[folder_of[want[2]]]
    if own and other and other > own then
      upward[#upward + 1] = want[1]:gsub("%.%w+$", "") .. " -> " .. want[2]
    end
  end
  return upward, #wanted
end

describe("the folders of the core", function()
  it("include nothing from a folder above them", function()
    local upward = {}
    for _, path in ipairs(files "ls core/*/*.[ch]") do
      local own = assert(core_rank[path:match("^core/([^/]+)/")],
        path .. ": the folder is not in this spec")
      for _, name in ipairs(includes(path)) do
        local other = core_rank[name:match("^([%w_]+)/")]
        if other and other > own then upward[#upward + 1] = path .. " -> " .. name end
      end
    end
    assert.same({}, upward)
  end)

  -- Checks the symbols of the object files, which also show calls of functions declared by hand.
  it("call nothing in a folder above them", function()
    local upward, count = upward_calls("core", core_rank)
    if not count then return end   -- a folder made by `make dist`
    assert.is_true(count > 1000)
    assert.same({}, upward)
  end)

  -- No file of these folders depends on itself through other files.
  it("have no cycle between the files of " .. table.concat(ACYCLIC, ", "), function()
    local build, home, needs = require("engine.base.ffi").library_dir, {}, {}
    if helper.shell("ls " .. helper.quote(build .. "/core")).code ~= 0 then return end
    for _, folder in ipairs(ACYCLIC) do
      local wanted = {}
      local command = ("cd %s/core && nm -A %s/*.o"):format(helper.quote(build), folder)
      for line in helper.shell(command).out:gmatch("[^\n]+") do
        local object, kind, name = line:match("^([^:]+)%.o:[%x ]* (%a) ([%w_]+)$")
        if kind == "U" then wanted[#wanted + 1] = { object, name }
        elseif kind and kind:match("[TDBRVW]") then home[name] = object end
      end
      assert.is_true(#wanted > 20, folder)
      for _, want in ipairs(wanted) do
        local other = home[want[2]]
        if other and other ~= want[1] then
          needs[want[1]] = needs[want[1]] or {}
          needs[want[1]][other] = want[2]
        end
      end
    end
    local state = {}
    local function visit(file, path)
      assert.are_not.equal("open", state[file], path)
      if state[file] then return end
      state[file] = "open"
      for other, name in pairs(needs[file] or {}) do
        visit(other, path .. " -" .. name .. "-> " .. other)
      end
      state[file] = "done"
    end
    for file in pairs(needs) do visit(file, file) end
  end)

  it("are closed to devices, except base/, tensor/ and device/", function()
    local seen = { base = true, tensor = true, device = true }
    for _, root in ipairs { "core/cpu", "cuda" } do
      for _, path in ipairs(files("find " .. root .. " -name '*.[ch]' -o -name '*.cu'")) do
        for _, name in ipairs(includes(path)) do
          local folder = name:match("^([%w_]+)/")
          -- nccl_check.c compares this header with NVIDIA's
          local of_ranks = path:match("nccl_check%.c$") and name == "dist/comm_nccl.h"
          assert.is_true(of_ranks or not core_rank[folder] or seen[folder]
            or helper.read("cuda/" .. name) ~= nil,
            path .. " includes " .. name .. ", which devices may not see")
        end
      end
    end
  end)

  it("read attributes of operations by name", function()
    for _, path in ipairs(files "find core cuda -name '*.[ch]' -o -name '*.cu'") do
      assert.is_true(path == "core/autograd/op.c" or not code_of(path):find("[.>]attributes%."),
        path .. ": expected call->NAME.ATTRIBUTE, with the names in ops.def")
    end
  end)

  it("include Lua only in main/ and policy/", function()
    for _, path in ipairs(files "ls core/*/*.[ch]") do
      for _, name in ipairs(includes(path)) do
        if name:match("^<lu?a") then
          assert.is_truthy(path:match("^core/main/") or path:match("^core/policy/"),
            path .. " includes Lua's headers")
        end
      end
    end
  end)

  it("are compiled without flags that delete overflow checks", function()
    local text = helper.read("Makefile"):gsub("#[^\n]*", "")
    for _, flag in ipairs { "-ffast-math", "-Ofast", "-ffinite-math-only",
      "-funsafe-math-optimizations", "-fassociative-math" } do
      assert.is_nil(text:find(flag, 1, true), flag)
    end
    for _, path in ipairs(files "ls core/*/*.[ch]") do
      assert.is_nil(code_of(path):find("#%s*pragma%s+GCC%s+optimize"), path)
    end
  end)
end)

describe("the folders of the CUDA device", function()
  local sources = files "find cuda -name '*.[ch]' -o -name '*.cu'"

  it("include nothing from a folder above them", function()
    local upward = {}
    for _, path in ipairs(sources) do
      local folder = path:match("^cuda/([^/]+)/")
      local own = folder and assert(cuda_rank[folder], path .. ": the folder is not in this spec")
      for _, name in ipairs(includes(path)) do
        local other = cuda_rank[name:match("^([%w_]+)/")]
        if own and other and other > own then upward[#upward + 1] = path .. " -> " .. name end
      end
    end
    assert.same({}, upward)
  end)

  it("call nothing in a folder above them", function()
    for _, root in ipairs { "cuda", "emulated" } do
      assert.same({}, upward_calls(root, cuda_rank) or {})
    end
  end)

  -- Both trees are include roots, so a name in both would be ambiguous.
  it("have unique names", function()
    for _, name in ipairs(CUDA) do assert.is_nil(core_rank[name], name) end
  end)
end)

describe("comments", function()
  -- Names that comments may mention although the tree has no such file: files of users, of other
  -- projects, and files that the build makes.
  local ELSEWHERE = {}
  for name in ([[train.lua script.lua small.lua mine.lua careful.lua my/policy.lua nowhere.lua
      a_spec.lua jbo.lua NAME.lua cdef.h engine.d.lua nccl.h lua.h float8.h llm.c a.b.c
      common/recipe/delayed_scaling.cu]]):gmatch("%S+") do ELSEWHERE[name] = true end
  local NAMED = { c = true, h = true, cu = true, lua = true, def = true }

  local function comments(path)
    local kind = path:match("%.(%a+)$")
    if kind == "md" then return helper.read(path) end
    local text = {}
    if not NAMED[kind] then return "" end
    local mark = path:match("%.lua$") and "%-%-(.*)" or "//(.*)"
    for line in helper.read(path):gmatch("[^\n]+") do text[#text + 1] = line:match(mark) end
    return table.concat(text, "\n")
  end

  it("name files that exist", function()
    local missing, count = {}, 0
    local tree = files "ls -d *.*; find core cuda lua policies spec examples -type f"
    local all = "/" .. table.concat(tree, "\n/") .. "\n"
    for _, path in ipairs(tree) do
      for name, kind in comments(path):gmatch("([%w_%./%*-]*[%w_%*]%.(%a+))%f[^%w_%(/]") do
        name = name:gsub("^[%./]+", "")
        if NAMED[kind] and not ELSEWHERE[name] and not ELSEWHERE[name:match("[^/]+$")] then
          count = count + 1
          local pattern = "/" .. name:gsub("[%.%-]", "%%%0"):gsub("%*", "[^/\n]*") .. "\n"
          if not all:find(pattern) then missing[#missing + 1] = path .. ": " .. name end
        end
      end
    end
    assert.is_true(count > 500, count)
    assert.same({}, missing)
  end)

  it("at the top of a file say who calls it", function()
    local silent, phrases = {}, { "called [bft]", "called only by", "included %l* ?by", "used by",
      "read by", "registered by", "includes this file", "which calls" }
    for _, path in ipairs(files [[find core cuda lua/engine -name '*.[ch]' -o -name '*.cu' \
        -o -name '*.lua']]) do
      local head = helper.read(path):gsub("\n[/-][/-] ?", " "):match("^[^\n]*"):lower()
      local said = false
      for _, phrase in ipairs(phrases) do said = said or head:find(phrase) ~= nil end
      if not said then silent[#silent + 1] = path end
    end
    assert.same({}, silent)
  end)
end)

describe("the public header", function()
  it("declares what the library has, and every declared name begins with eng", function()
    local C = require("engine.base.ffi").C
    local count = 0
    for name in helper.read(require("engine.base.ffi").library_dir ..
      "/cdef.h"):gmatch("([%w_]+)%s*%(") do
      count = count + 1
      assert.matches("^eng_", name)
      local ok = pcall(function() return C[name] end)
      assert.is_true(ok, name .. " is declared in engine.h and not in the library")
    end
    assert.is_true(count > 50)
  end)
end)

describe("the folders of Lua", function()
  local lua_files = files "find lua -name '*.lua'"

  it("require nothing from a folder above them", function()
    local upward = {}
    for _, path in ipairs(lua_files) do
      local folder = path:match("^lua/engine/([^/]+)/")
      local own = folder and assert(lua_rank[folder], path .. ": the folder is not in this spec")
      for name in code_of(path):gmatch('require%s*%(?"(engine[%w_.]*)"') do
        local other = name == "engine" and lua_rank.docs
          or lua_rank[name:match("^engine%.([%w_]+)")]
        if own and other and other > own then upward[#upward + 1] = path .. " -> " .. name end
      end
    end
    assert.same({}, upward)
  end)

  -- Modules that a module requires, at load time or later.
  local function required_by()
    local needs = {}
    for _, path in ipairs(lua_files) do
      local module = path:match("^lua/(.*)%.lua$"):gsub("/", "."):gsub("%.init$", "")
      needs[module] = {}
      for name in code_of(path):gmatch('require%s*%(?"(engine[%w_.]*)"') do
        needs[module][name] = true
      end
    end
    return needs
  end

  it("have no cycle between modules", function()
    local needs, state, cycles = required_by(), {}, {}
    local function visit(module, trail)
      if state[module] == "done" or not needs[module] then return end
      trail = trail .. " -> " .. module
      if state[module] then
        cycles[#cycles + 1] = trail:match(module:gsub("%p", "%%%0") .. " .*$") return
      end
      state[module] = "open"
      for name in pairs(needs[module]) do
        if name ~= module then visit(name, trail) end
      end
      state[module] = "done"
    end
    for module in pairs(needs) do visit(module, "") end
    assert.same({}, cycles)
  end)

  it("use certain names and constants only in the module that owns them", function()
    local once = {
      { "65504", nil, "limits of formats come from base/formats.lua" },
      { "%.17g", "lua/engine/base/show.lua", "exact numbers are written by show.exact" },
      { "eng_nearest", "lua/engine/base/nearest.lua",
        "misspelt names are looked up by nearest.find" },
      { "eng_format_get", "lua/engine/base/formats.lua",
        "limits of formats come from base/formats.lua" },
      { "eng_file_list", "lua/engine/base/file.lua", "folders are listed by file.names" },
      { '"retry", "stop"', nil, "actions are named by eng_action_name" },
      { "argparse", nil, "cli/options.lua reads command lines" },
      { "did you mean", "lua/engine/base/nearest.lua", "hints come from nearest.hint" },
    }
    for _, path in ipairs(lua_files) do
      local code = code_of(path)
      for _, rule in ipairs(once) do
        assert.is_true(path == rule[2] or not code:find(rule[1], 1, true), path .. ": " ..
          rule[1] .. ": " .. rule[3])
      end
    end
  end)

  -- The files that may load C libraries: the core, and the decoders of images.
  local LOADS = { ["lua/engine/base/ffi.lua"] = true, ["lua/engine/data/image_files.lua"] = true }

  it("load C libraries only in ffi.lua and image_files.lua", function()
    for _, path in ipairs(lua_files) do
      local code = code_of(path)
      if not LOADS[path] then
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
    for _, path in ipairs(files "ls policies/*.lua") do
      local code = code_of(path)
      for _, word in ipairs { "require", "ffi", "io", "os", "debug", "package", "dofile",
        "loadfile", "getfenv" } do
        assert.is_nil(code:find("%f[%w_]" .. word .. "%s*[%.%(\"']"), path .. " uses " .. word)
      end
    end
  end)
end)
