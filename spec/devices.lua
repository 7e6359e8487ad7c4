-- For specs of single operations: runs them on the CPU with each instruction set, or, with
-- ENGINE_TEST_DEVICE=cuda, on the card.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local C = M_ffi.C

local devices = { card = os.getenv("ENGINE_TEST_DEVICE") }

--- A tensor's elements as bytes in memory order: equal strings mean equal bits.
function devices.bytes(x)
  local info, copy = M_ffi.new("eng_tensor_info"),
    engine.no_grad(function() return x:contiguous():to("cpu") end)
  M_ffi.check(C.eng_info(info, copy))
  return M_ffi.ffi.string(info.data, tonumber(info.count) * C.eng_dtype_size(info.dtype))
end

--- Runs f(name) on the card, or on the CPU with each instruction set.
function devices.everywhere(f)
  if devices.card then
    engine.device(devices.card)
    local good, message = pcall(f, devices.card)
    engine.device("cpu")
    if not good then error(message, 0) end
    return
  end
  local now = M_ffi.string(C.eng_cpu_isa(nil))
  for _, set in ipairs { "plain", "avx2", "avx512", now } do
    if C.eng_cpu_isa(set) ~= nil then
      local good, message = pcall(f, set)
      if not good then
        C.eng_cpu_isa(now)
        error(message, 0)
      end
    end
  end
  C.eng_cpu_isa(now)
end

return devices
