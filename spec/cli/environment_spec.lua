-- Environment variables with values that cannot be used.
local helper = require "spec.helper"

local SUM = helper.quote('local engine = require "engine" print(engine.ones(100000):sum():item())')

describe("OMP_NUM_THREADS", function()
  it("beyond the limit is reported once, and the processor's cores are used", function()
    local result = helper.shell(("OMP_NUM_THREADS=1000000 %s -e %s"):format(
      helper.quote(helper.engine), SUM))
    assert.equal("100000\n", result.out)
    assert.matches("^engine: OMP_NUM_THREADS: expected 1 to 4096, got 1000000; using %d+\n$",
      result.err)
    assert.equal(0, result.code)
  end)
end)
