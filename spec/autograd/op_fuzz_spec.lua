-- A few seconds of the operation fuzzer; `make check` runs it longer and under the sanitizers.
local helper = require "spec.helper"

describe("operations", function()
  it("return a result or an error message for any call, the same on both devices", function()
    local result = helper.run { "spec/fuzz/ops.lua", "3", "20" }
    assert.equal("", result.err)
    assert.equal(0, result.code)
  end)
end)
