-- What gradient rules read. For every operation with a gradient, the spec fills the tensors that
-- ops.def does not list under `reads` and `saves` with NaN between the forward and the backward
-- pass; no bit of the gradients may change. The calls come from spec/cpu/kernels/; a few are
-- written here. A checkpointed call, whose tensors are freed and which runs again during the
-- backward pass, must give the same gradients, too.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local values = require "spec.cpu.kernels.values"
local C, ffi = M_ffi.C, M_ffi.ffi

local MOST_CALLS = 6            -- of one operation
local FLOAT = { f32 = true, f64 = true, f16 = true, bf16 = true }

local generators = {}
for _, part in ipairs { "elementwise", "picking", "reductions", "products", "norms", "attention",
  "losses", "images", "fp8" } do
  for name, generate in pairs(require("spec.cpu.kernels." .. part)) do
    generators[name] = generate
  end
end

local function one(call) return function(try) try(call()) end end
local function x(...) return engine.randn { ... } end
generators.reshape = one(function() return { inputs = { x(3, 4) }, ints = { 2, 6, 2 } } end)
generators.permute = one(function() return { inputs = { x(3, 4) }, ints = { 1, 0 } } end)
generators.expand = one(function() return { inputs = { x(1, 4) }, ints = { 2, 3, 4 } } end)
generators.slice = one(function() return { inputs = { x(3, 4) }, ints = { 1, 1, 4, 2 } } end)
generators.split = one(function() return { inputs = { x(3, 4) }, ints = { 1, 1, 3 },
  outputs = 2 } end)

--- A site of an FP8 layer that keeps x in one format.
local function site_of(keep)
  local site, recipe = ffi.new("int64_t[1]"), ffi.new("eng_fp8_recipe")
  for role = 0, C.ENG_FP8_ROLES - 1 do
    local r = recipe.role[role]
    r.format, r.eps, r.block_rows, r.block_columns = M_ffi.dtype.e4m3, -1, role == C.ENG_FP8_W
      and 128 or 1, 128
  end
  recipe.role[C.ENG_FP8_X].keep = keep
  M_ffi.check(C.eng_fp8_site_new(site, "saved"))
  M_ffi.check(C.eng_fp8_site_set(site[0], recipe))
  return tonumber(site[0])
end
local function with_sites(try, call, ...)
  for _, keep in ipairs { ... } do
    call.ints[call.site_at], call.precision = site_of(keep), "fp8_block"
    try(call)
  end
end
function generators.fp8_linear(try)
  with_sites(try, { inputs = { x(3, 160), x(24, 160), x(24) }, ints = {}, site_at = 1,
    outputs = 5 },
    C.ENG_FP8_KEEP_CODES, C.ENG_FP8_KEEP_TRANSPOSED, C.ENG_FP8_KEEP_E5M6, C.ENG_FP8_KEEP_SWIGLU)
end
function generators.fp8_swiglu(try)
  with_sites(try, { inputs = { x(3, 160), x(3, 160) }, ints = {}, site_at = 1, outputs = 5 },
    C.ENG_FP8_KEEP_SWIGLU)
end
function generators.fp8_attention(try)
  local function q() return x(2, 5, 4, 8) end
  with_sites(try, { inputs = { q(), q(), q() }, ints = { 1, 0 }, site_at = 3, outputs = 5 },
    C.ENG_FP8_KEEP_E5M6)
end

local function has(mask, k) return bit.band(mask, bit.lshift(1, k)) ~= 0 end

--- The gradients of a call's float inputs, as strings of their bits. With `spoil`, fills every
--- tensor that ops.def does not list with NaN; the second result is the number of these tensors.
--- With `checkpoint`, the call and its inputs are checkpointed; the second result is the number of
--- freed outputs.
local function gradients(name, call, spoil, checkpoint)
  local info, leaves, inputs, filled = C.eng_op_describe(M_ffi.op[name]), {}, {}, 0
  assert.equal(checkpoint or false, checkpoint and C.eng_checkpoint_begin() or false)
  for k, input in ipairs(call.inputs) do
    inputs[k] = input
    if input and FLOAT[input.dtype] and not (call.constants and call.constants[k]) then
      leaves[#leaves + 1] = input:keep():requires_grad(true)
      inputs[k] = leaves[#leaves] * 1  -- a computed tensor, because leaves are never spoiled
    end
  end
  engine.seed(5)
  local function run() return { M_ffi.run(name, inputs, call.ints, call.floats, call.outputs) } end
  local outputs = call.precision and engine.autocast(call.precision, run) or run()
  local loss
  for k = 1, call.outputs or 1 do
    local y = outputs[k]
    if y and FLOAT[y.dtype] and not y.is_leaf then
      local scaled = (y * 1):to("f32")               -- the rules of * and to do not read y
      local part = (scaled * engine.rand(y.shape)):sum()
      loss = loss and loss + part or part
    end
  end
  if checkpoint then
    M_ffi.check(C.eng_checkpoint_end(M_ffi.new("eng_tensor[1]", { loss }), 1))
    for k = 1, call.outputs or 1 do
      local freed = outputs[k] and not pcall(outputs[k].read, outputs[k])
      filled = filled + (freed and 1 or 0)
    end
  end
  local function fill(list, n, read)
    for k = 1, n do
      local t = list[k]
      if spoil and t and FLOAT[t.dtype] and not has(read, k - 1) then
        t:fill(0 / 0)
        filled = filled + 1
      end
    end
  end
  fill(inputs, #call.inputs, info.reads)
  fill(outputs, call.outputs or 1, info.saves)
  loss:backward()
  local bits = {}
  for k, leaf in ipairs(leaves) do
    local gradient = leaf.grad
    if gradient then
      local memory, n = gradient:read()
      bits[k] = ffi.string(memory, n * C.eng_dtype_size(M_ffi.dtype[gradient.dtype]))
    end
  end
  for _, leaf in ipairs(leaves) do leaf:requires_grad(false) end
  return bits, filled
end

local freed = 0
describe("the backward pass reads only what ops.def lists", function()
  for number, name in ipairs(M_ffi.op_names) do
    local info = C.eng_op_describe(number - 1)
    if ffi.string(info.gradient) ~= "none" then
      it(name, function()
        local generate = assert(generators[name], "no call of " .. name)
        local count, filled, stop = 0, 0, {}
        values.seed(name)
        M_ffi.check(C.eng_step_begin())
        local good, why = pcall(generate, function(call)
          local float = false
          for _, input in ipairs(call.inputs) do float = float or (input and FLOAT[input.dtype]) end
          if call.fails or not float then return end
          count = count + 1
          local want = gradients(name, call, false)
          local got, n = gradients(name, call, true)
          local again, m = gradients(name, call, false, true)
          freed = freed + m
          for k, bits in pairs(want) do
            assert(again[k] == bits, ("%s: the gradient of float input %d changed when the call " ..
              "ran again"):format(name, k))
            assert(got[k] == bits, ("%s: the gradient of float input %d changed; its rule reads " ..
              "a tensor that ops.def lists neither under reads nor under saves"):format(name, k))
          end
          filled = filled + n
          if count == MOST_CALLS then error(stop) end
        end)
        M_ffi.check(C.eng_step_end())
        if not good and why ~= stop then error(why, 0) end
        assert.is_true(count > 0)
        -- no tensor can be filled if the operation reads all of them
        assert(filled > 0 or has(info.saves, 0), name .. ": no tensor was filled")
      end)
    end
  end

  it("and runs checkpointed calls again", function() assert(freed > 100, freed) end)
end)
