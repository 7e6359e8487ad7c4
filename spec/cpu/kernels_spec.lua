-- Every fast kernel against its slow twin: device "cpu", with each instruction set of this machine,
-- and device "reference" on the same inputs. How results are compared:
-- spec/cpu/kernels/compare.lua.
--
-- The library supplies the list of operations (from ops.def): an operation with a kernel but
-- without a generator of calls in spec/cpu/kernels/ fails here, so no operation is left out. A
-- generator is a function(try) that calls try(call) for every call to compare. The calls cover
-- every format, sizes that no vector width divides, several memory layouts where the kernel accepts
-- any, and values that are ordinary, tiny, huge, zero, infinite and NaN.
--
-- ENGINE_ISA=avx512, avx2 or plain in the environment limits the spec to that instruction set.
local engine = require "engine.base.ffi"
local compare = require "spec.cpu.kernels.compare"
local values = require "spec.cpu.kernels.values"
local C = engine.C

-- Views have no kernel; FP8 layers run other operations.
local NO_KERNEL = { VIEW = true, CALLS = true }

local generators = {}
for _, part in ipairs { "elementwise", "picking", "reductions", "products", "norms", "attention",
  "losses", "images", "fp8", "mx" } do
  for name, generate in pairs(require("spec.cpu.kernels." .. part)) do
    generators[name] = generate
  end
end

describe("kernels (" .. table.concat(compare.SETS, ", ") .. ")", function()
  local known = {}
  for _, name in ipairs(engine.op_names) do
    known[name] = true
    if not NO_KERNEL[engine.string(C.eng_op_describe(engine.op[name]).layout)] then
      it("agree with the reference: " .. name, function()
        assert(C.eng_op_supported("reference", engine.op[name]),
          "the reference has no kernel for " .. name)
        local generate = assert(generators[name],
          "there is no generator in spec/cpu/kernels/ for " .. name)
        if compare.CARD and not C.eng_op_supported(compare.CARD, engine.op[name]) then
          pending("the card has no kernel for " .. name)
          return
        end
        values.seed(name)
        engine.check(C.eng_step_begin())
        local calls = 0
        local done, message = pcall(generate, function(call)
          calls = calls + 1
          compare.check(name, call)
        end)
        engine.check(C.eng_device_set("cpu"))
        engine.check(C.eng_step_end())
        if not done then error(message, 0) end
        assert(calls > 0, "the generator made no call")
      end)
    end
  end

  it("have no generator for an operation that does not exist", function()
    for name in pairs(generators) do assert(known[name], name) end
  end)

  -- A kernel that serves several operations reads the attributes under the first one's names.
  it("serve operations that list the same attributes in the same order", function()
    for _, family in ipairs { "sum mean max min extreme_grad", "reshape expand", "argmax argmin",
      "gather index_select", "gather_grad index_select_grad", "softmax_grad log_softmax_grad",
      "layer_norm rms_norm add_layer_norm add_rms_norm",
      "layer_norm_grad rms_norm_grad add_layer_norm_grad add_rms_norm_grad",
      "attention attention_grad", "cross_entropy cross_entropy_grad",
      "quantize swiglu_quantize" } do
      local first
      for name in family:gmatch("%S+") do
        local info = C.eng_op_describe(engine.op[name])
        local ints, floats = engine.string(info.ints), engine.string(info.floats)
        first = first or { ints = ints, floats = floats }
        -- a gradient may have fewer attributes: "(mask)" where the first has "(mask, keep)"
        assert.equal(first.ints:sub(1, #ints - 1), ints:sub(1, -2), name)
        assert.equal(first.floats, floats, name)
      end
    end
  end)
end)
