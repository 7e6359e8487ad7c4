-- Environment variables with values that cannot be used.
local helper = require "spec.helper"

local SUM = helper.quote('local engine = require "engine" print(engine.ones(100000):sum():item())')

describe("OMP_NUM_THREADS", function()
  it("beyond the limit is reported once, and the processor's cores are used", function()
    local result = helper.shell(("OMP_NUM_THREADS=1000000 %s -e %s"):format(
      helper.quote(helper.engine), SUM))
    assert.equal("100000\n", result.out)
    assert.matches("^engine: OMP_NUM_THREADS: expected at most 4096 threads, got 1000000; " ..
      "using %d+\n$", result.err)
    assert.equal(0, result.code)
  end)
end)

it("OMP_STACKSIZE too large for threads to start is reported, and the default is used", function()
  for _, name in ipairs { "OMP_STACKSIZE", "GOMP_STACKSIZE" } do
    for _, spins in ipairs { "", "GOMP_SPINCOUNT=10" } do
      local result = helper.shell(("%s=1000000G %s OMP_NUM_THREADS=2 %s -e %s"):format(name, spins,
        helper.quote(helper.engine), SUM))
      assert.equal("100000\n", result.out)
      assert.equal("engine: " .. name .. "=1000000G: threads cannot start with stacks of " ..
        "this size; using the default size\n", result.err)
      assert.equal(0, result.code)
    end
  end
  local result = helper.shell(("OMP_STACKSIZE=4M OMP_NUM_THREADS=2 %s -e %s"):format(
    helper.quote(helper.engine), SUM))
  assert.same({ 0, "100000\n", "" }, { result.code, result.out, result.err })
end)

describe("variables that begin with ENGINE_", function()
  local function started(settings)
    return helper.shell(("%s %s -e 'require \"engine\".ones(2):sum():item()'"):format(settings,
      helper.quote(helper.engine)))
  end

  it("and are unknown are reported once, with the nearest name", function()
    local result = started("ENGINE_RANK=off ENGINE_ZZZZZZZZZZ=1")
    assert.matches("engine: unknown environment variable ENGINE_RANK is ignored; did you mean " ..
      "'ENGINE_RANKS'?\n", result.err, 1, true)
    assert.matches("engine: unknown environment variable ENGINE_ZZZZZZZZZZ is ignored\n",
      result.err, 1, true)
    assert.equal(2, select(2, result.err:gsub("\n", "\n")))
    assert.equal(0, result.code)
  end)

  it("and are known are not reported", function()
    assert.equal("", started("ENGINE_RANKS=off ENGINE_ISA=plain ENGINE_TEST_DEVICE=cpu").err)
  end)

  it("and are switches are reported unless they are 0, 1 or empty", function()
    assert.equal("engine: ENGINE_TF32: expected 0 or 1, got 'yes', which is ignored\n",
      started("ENGINE_TF32=yes ENGINE_CUBLASLT_SEARCH=1 ENGINE_CUBLASLT_FUSE=").err)
    assert.equal("", started("ENGINE_RANK_TIMEOUT=5 ENGINE_CACHE=yes ENGINE_FP8_FORMULA=0").err)
    for _, name in ipairs { "CUBLASLT_SEARCH", "CUBLASLT_FUSE", "FP8_FORMULA" } do
      assert.matches(name .. ": expected 0 or 1, got '2'", started("ENGINE_" .. name .. "=2").err,
        1, true)
    end
  end)

  it("and name an unknown instruction set are reported", function()
    assert.matches("^engine: ENGINE_ISA: expected plain, or else avx2 or avx512 on a machine " ..
      "that supports it, got 'avx3'; using %w+\n$", started("ENGINE_ISA=avx3").err)
  end)
end)
