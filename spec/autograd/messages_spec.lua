-- Messages of the core about calls that the Lua methods do not make.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local C = M_ffi.C

-- The message of eng_run for these inputs (false: missing) and attributes.
local function run(name, inputs, attributes)
  local call = M_ffi.new("eng_op_call", { op = M_ffi.op[name], n_in = #inputs, n_out = 1 })
  for k, x in ipairs(inputs) do call["in"][k - 1] = x or M_ffi.Tensor(0, 0) end
  if attributes then call[name] = attributes end
  assert.are_not.equal(0, C.eng_run(call))
  return M_ffi.message()
end

describe("the core's message", function()
  after_each(function() engine.end_step() end)

  it("says how many inputs an operation takes", function()
    local x = engine.zeros(2)
    assert.equal("concat: expected 1 to 16 inputs, got 0", run("concat", {}))
    assert.equal("add: expected 2 inputs, got 1", run("add", { x }))
    assert.equal("add: input 1 is missing", run("add", { false, x }))
    assert.equal("add: input 2 is missing", run("add", { x, false }))
  end)

  it("asks for indices of an integer dtype, not FP8", function()
    local x, index = engine.zeros(4), engine.zeros(2):to("e4m3")
    for _, name in ipairs { "gather", "index_select" } do
      assert.equal(name .. ": expected index of an integer dtype, got e4m3 [2]; hint: " ..
        'index:to("i64")', run(name, { x, index }))
    end
  end)

  it("says that an operation to write into a tensor is unknown", function()
    local call = M_ffi.new("eng_op_call")
    call.op = 9999
    assert.are_not.equal(0, C.eng_run_into(call, engine.zeros(2)))
    assert.matches("^an unknown operation cannot write into a given tensor", M_ffi.message())
  end)

  it("counts dimensions from 1", function()
    assert.equal("gather_grad: dy f32 [2 x 3] and the index i64 [2 x 3] do not fit dx [1 x 3] " ..
      "along dimension 2", run("gather_grad", { engine.zeros(2, 3), engine.zeros(2, 3, "i64") },
      { dim = 1, shape = { 1, 3 }, ndim = 2 }))
  end)

  it("names the comm dtypes that a rounding accepts", function()
    local number = M_ffi.new("float[1]")
    assert.are_not.equal(0, C.eng_comm_dtype_round(number, 1, C.ENG_COMM_OWN))
    assert.equal("rounding as in a message: expected a comm dtype from 1 to 4 (ENG_COMM_*), got 0",
      M_ffi.message())
    assert.equal(0, C.eng_comm_dtype_round(number, 1, C.ENG_COMM_DTYPES - 1))
  end)
end)
