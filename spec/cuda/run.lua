-- Every check that needs an NVIDIA card (make test-gpu): the kernel specs on the card instead of
-- the CPU, and the specs of this folder. Without a card it prints a line and succeeds.
--   ./engine spec/cuda/run.lua [busted options] [FILE...]
local engine = require "engine"
local ffi = require "ffi"

local there, message = pcall(engine.device, "cuda")
if not there then
  print("no GPU: skipped (" .. tostring(message):gsub("^[^\n:]+:%d+: ", "") .. ")")
  os.exit(0)
end
print(require("engine.base.machine").device_text())
engine.device("cpu")

ffi.cdef "int setenv(const char *name, const char *value, int overwrite);"
ffi.C.setenv("ENGINE_TEST_DEVICE", "cuda", 1)

local files = false
for _, argument in ipairs(arg) do files = files or argument:find("_spec", 1, true) ~= nil end
if not files then
  for _, name in ipairs { "cpu/kernels", "cpu/optimizer_kernel", "params/gradstats",
    "cpu/lagged_kernel", "cpu/in_place", "cpu/wire_kernel", "cpu/residual_norm",
    "cpu/attention_entropy", "cuda/fp8", "cuda/training", "cuda/images", "cuda/blackwell",
    "cuda/emulated" } do
    arg[#arg + 1] = "spec/" .. name .. "_spec.lua"
  end
end
require "busted.runner" { standalone = false }    -- raises if a spec failed
os.exit(0)       -- the status of the jobs that specs run must not become this script's
