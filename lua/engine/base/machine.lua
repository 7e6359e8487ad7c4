-- The machine as the core sees it: clock, terminal, versions, processors. Used by most folders.
local ffi = require "ffi"
local C = require("engine.base.ffi").C

local machine = {}

-- Returns the seconds on a monotonic clock.
function machine.clock() return C.eng_clock() end

local columns, rows = ffi.new("int[1]"), ffi.new("int[1]")

-- Returns the columns and rows of the terminal behind a file descriptor (1: stdout); nil if the
-- descriptor is not a terminal.
function machine.terminal(fd)
  if not C.eng_terminal(columns, rows, fd) then return nil end
  return columns[0], rows[0]
end

-- Returns whether output to the terminal must be ASCII: TERM is "dumb" or "linux", or the locale
-- does not name UTF-8. The locale is the first of LC_ALL, LC_CTYPE and LANG that is set.
function machine.ascii()
  local term = os.getenv "TERM"
  if term == "dumb" or term == "linux" then return true end
  for _, name in ipairs { "LC_ALL", "LC_CTYPE", "LANG" } do
    local value = os.getenv(name)
    if value and value ~= "" then return not value:lower():find("utf%-?8") end
  end
  return true
end

local function text(pointer) return pointer ~= nil and ffi.string(pointer) or nil end

-- Returns the version of the library "onednn", "sqlite" or "openmp"; nil if there is none.
function machine.library_version(name) return text(C.eng_library_version(name)) end

-- Returns the number of GPUs (-1 if there is no working driver), and a text with a line about each
-- GPU.
function machine.gpus()
  local buffer = ffi.new("char[4096]")
  return C.eng_gpu_probe(buffer, 4096), ffi.string(buffer)
end

function machine.device() return text(C.eng_device_name()) end

-- Switches to a device. Returns true, or false and the reason.
function machine.try_device(name)
  if C.eng_device_set(name) == 0 then return true end
  return false, text(C.eng_error_message())
end

-- Returns the version and file of the NCCL library that ranks with GPUs would use, as one text; or
-- nil and the reason why there is none.
function machine.nccl()
  local found = ffi.new("const char *[1]")
  if C.eng_comm_nccl(found) == 0 then return text(found[0]) end
  return nil, text(C.eng_error_message())
end

-- Returns a line of text about the current device.
function machine.device_text() return text(C.eng_device_text()) end
function machine.isa() return text(C.eng_cpu_isa(nil)) end
--- Returns how the CPU computes bf16 products: "AMX", "pairs" (AVX-512 BF16 instructions) or "f32".
function machine.bf16() return text(C.eng_cpu_bf16()) end
function machine.threads() return C.eng_threads(0) end

return machine
