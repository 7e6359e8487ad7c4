-- The boundary to the core. Only this file loads the core. It finds the library and the
-- declarations that the build made from core/engine.h, checks that both come from one build, and
-- turns status codes into Lua errors. Owns the struct that all calls share. Used by every folder
-- but optim/.
local ffi = require "ffi"

local M = { ffi = ffi }

-- LuaJIT's compiler for x86 (2.1, at least until August 2026) can fuse the load of a C field with
-- the instruction that uses the value. This can move the load past a call that changes the field.
-- After `n = a.ndim; m = b.ndim` for two tensors, n held b's number of dimensions, because both
-- reads go through one eng_tensor_info. So fusing is switched off, and stays off when a script sets
-- other optimizations.
local optimizer = require "jit.opt"
local start = optimizer.start
optimizer.start = function(...)
  start(...)
  start("-fuse")
end
start("-fuse")

-- The folder lua/engine, which holds all modules. This file is in its subfolder base/.
local home = debug.getinfo(1, "S").source:match("^@(.*)/base/[^/]*$")
M.home = home

-- `make install` writes the module engine.base.place, which returns { library = folder, share =
-- folder }.
local installed, place = pcall(require, "engine.base.place")
--- The folders that may hold policies/ and examples/: the source tree, share/engine beside
--- share/lua/5.1, and the folder that `make install` chose.
M.shares = { home .. "/../..", home .. "/../../../engine", installed and place.share or nil }

--- Returns the folders that may hold libengine.so and cdef.h, in the order of the search: the
--- folder of the running binary's library, ENGINE_LIBRARY_DIR, the source tree, and the folders of
--- an installation.
local function places()
  local list = {}
  local host = package.preload["engine.host"] and require "engine.host"
    or package.loaded["engine.host"]
  if type(host) == "table" and host.library then
    list[#list + 1] = host.library:match("^(.*)/[^/]*$")
  end
  list[#list + 1] = os.getenv("ENGINE_LIBRARY_DIR")
  -- the folders into which `make`, `make install` and LuaRocks put the library
  for _, relative in ipairs { "/../../build", "/../../../../lib/engine",
    "/../../../../lib/lua/5.1/engine" } do
    list[#list + 1] = home .. relative
  end
  if installed then list[#list + 1] = place.library end
  return list
end

local function read(path)
  local file = io.open(path, "r")
  if not file then return nil end
  local text = file:read("*a")
  file:close()
  return text
end

local function load_library()
  local tried = {}
  for _, folder in ipairs(places()) do
    local declarations = read(folder .. "/cdef.h")
    if declarations then
      ffi.cdef(declarations)
      return ffi.load(folder .. "/libengine.so"), folder
    end
    tried[#tried + 1] = "  " .. folder
  end
  error("the engine's library was not found; looked in\n" .. table.concat(tried, "\n") ..
    "\nhint: run make, or set ENGINE_LIBRARY_DIR", 0)
end

local C, library_dir = load_library()
M.C = C
M.library_dir = library_dir

if C.eng_abi_size() ~= ffi.sizeof("eng_op_call") then
  error(("libengine.so in %s and its cdef.h come from different builds; hint: make clean && " ..
    "make"):format(library_dir), 0)
end

M.version = ffi.string(C.eng_version())
M.new = ffi.new
M.string = ffi.string

--- Returns the text of the last error in the core.
function M.message() return ffi.string(C.eng_error_message()) end

--- Returns "file:line: " for the script's line that called into the engine, or "" if there is none.
function M.script_line()
  for level = 2, 200 do
    local frame = debug.getinfo(level, "Sl")
    if not frame then break end
    if frame.what ~= "C" and frame.source:sub(2, #home + 2) ~= home .. "/" then
      return frame.currentline > 0 and ("%s:%d: "):format(frame.short_src, frame.currentline) or ""
    end
  end
  return ""
end

--- Raises an error. `message` is a format if more arguments follow. The error names the script's
--- line that called into the engine, even if the error arose deep inside the engine.
function M.raise(message, ...)
  if select("#", ...) > 0 then message = message:format(...) end
  error(M.script_line() .. message, 0)
end

--- Raises an error as raise() does if `bad` is true. Lua evaluates the other arguments in any case,
--- so they must be cheap and must not fail; otherwise use an `if`.
---   raise_if(width % heads ~= 0, "%s: the width %d is not divisible by %d", name, width, heads)
function M.raise_if(bad, message, ...)
  if bad then M.raise(message, ...) end
end

--- Raises an error that does not name the script's line. The arguments are those of raise().
function M.fail(message, ...)
  if select("#", ...) > 0 then message = message:format(...) end
  error(message, 0)
end

--- Raises an error as fail() does if `bad` is true.
function M.fail_if(bad, message, ...)
  if bad then M.fail(message, ...) end
end

--- Removes from a message the "file:line: " that raise() puts in front.
function M.without_line(message) return (tostring(message):gsub("^[^:\n]+:%d+: ", "")) end

--- Unless `status` is 0, raises an error with the core's error text. If `bare` is true, the message
--- does not name the script's line.
function M.check(status, bare)
  if status == 0 then return end
  if bare then error(M.message(), 0) end
  M.raise(M.message())
end

--- Returns a value as one line of text for messages, such as "'text'", "5", "a table", "nothing",
--- or "null" for JSON's null. Cuts a string to 200 bytes (and "..."), and writes its control
--- characters as \xNN.
function M.value_text(v)
  if v == nil then return "nothing" end
  local cjson = package.loaded.cjson               -- not required: `engine doctor` runs without it
  if cjson and v == cjson.null then return "null" end
  if type(v) == "string" then      -- cuts between two UTF-8 characters
    v = #v > 200 and v:sub(1, 201):gsub(".[\128-\191]*$", "") .. "..." or v
    return "'" .. v:gsub("%c", function(c) return ("\\x%02X"):format(c:byte()) end) .. "'"
  end
  if type(v) == "number" or type(v) == "boolean" then return tostring(v) end
  return type(v) == "cdata" and ffi.istype(M.Tensor, v) and "a tensor" or "a " .. type(v)
end

--- If `good` is false or nil, raises an error whose text is `message` (a format, if more arguments
--- follow) and ", got VALUE".
---   expect(type(rate) == "number", rate, "%s: expected a rate", name)
function M.expect(good, value, message, ...)
  if good then return end
  if select("#", ...) > 0 then message = message:format(...) end
  M.raise(message .. ", got " .. M.value_text(value))
end

-- ------------------------------------------------------------------ dtypes and operations by name

M.dtype = {}       -- "f16" -> number
M.dtype_name = {}  -- number -> "f16"
for number = 0, C.ENG_DTYPE_COUNT - 1 do
  local name = ffi.string(C.eng_dtype_name(number))
  M.dtype[name], M.dtype_name[number] = number, name
end

M.op = {}          -- "matmul" -> number
M.op_names = {}    -- the names in the order of ops.def
for number = 0, C.ENG_OP_COUNT - 1 do
  local name = ffi.string(C.eng_op_name(number))
  M.op[name], M.op_names[number + 1] = number, name
end

M.Tensor = ffi.typeof("eng_tensor")

-- All operations share this call structure. eng_run copies the values that the core needs later.
local call = ffi.new("eng_op_call")
M.call = call

--- Runs the operation in M.call, whose inputs and attributes the caller has set. Returns its
--- outputs (up to three) as new handles.
function M.run_call()
  local status = C.eng_run(call)
  if status ~= 0 then M.raise(M.message()) end
  local Tensor = M.Tensor
  local first = Tensor(call.out[0])
  if call.n_out == 1 then return first end
  local second = Tensor(call.out[1])
  if call.n_out == 2 then return first, second end
  return first, second, Tensor(call.out[2])
end

--- Fills M.call for the operation `name`. inputs: tensors, with false for an absent input; ints and
--- floats: the attributes that ops.def lists; n_out: the number of outputs (default 1).
function M.prepare(name, inputs, ints, floats, n_out)
  local op = M.op[name] or M.raise("there is no operation '%s'", tostring(name))
  ints, floats = ints or {}, floats or {}
  if #inputs > C.ENG_OP_INPUTS or #ints > C.ENG_OP_INTS or #floats > C.ENG_OP_FLOATS then
    M.raise("%s: expected up to %d inputs, %d ints and %d floats, got %d, %d and %d", name,
      tonumber(C.ENG_OP_INPUTS), tonumber(C.ENG_OP_INTS),
      tonumber(C.ENG_OP_FLOATS), #inputs, #ints, #floats)
  end
  ffi.fill(call, ffi.sizeof(call))
  call.op, call.n_in, call.n_out = op, #inputs, n_out or 1
  for k, x in ipairs(inputs) do
    if x then
      M.expect(ffi.istype(M.Tensor, x), x, "%s: expected input %d to be a tensor", name, k)
      call["in"][k - 1] = x
    end
  end
  for k, v in ipairs(ints) do call.ints[k - 1] = v end
  for k, v in ipairs(floats) do call.floats[k - 1] = v end
end

--- Runs an operation. Takes the same arguments as M.prepare. Returns the outputs, with nil for an
--- absent output.
function M.run(name, inputs, ints, floats, n_out)
  M.prepare(name, inputs, ints, floats, n_out)
  M.check(C.eng_run(call))
  local out = {}
  for k = 0, call.n_out - 1 do
    if call.out[k].slot ~= 0 then out[k + 1] = M.Tensor(call.out[k]) end
  end
  return unpack(out, 1, call.n_out)
end

return M
