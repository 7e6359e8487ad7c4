-- The host logic of the CUDA device's products, without a GPU: files of cuda/ compiled against a
-- fake card (spec/cuda/card.c), which computes on the host and refuses what cuBLASLt would. Needs
-- only CUDA's headers.
local helper = require "spec.helper"

local SOURCES = "spec/cuda/card.c spec/cuda/cublaslt.c spec/cuda/gemm_host.c " ..
  "spec/cuda/gemm_fp8_host.c cuda/gemm/gemm_layout.c cuda/gemm/gemm_cache.c cuda/gemm/gemm_lt.c " ..
  "cuda/gemm/gemm.c cuda/gemm/gemm_fused.c cuda/gemm/gemm_codes.c cuda/quantized/fp8_matmul.c"

--- A folder with CUDA's headers, or nil.
local function headers()
  local places = { os.getenv("CUDA_HOME") or "", "/usr/local/cuda",
    (helper.shell("command -v nvcc").out:gsub("/bin/nvcc%s*$", "")) }
  for _, place in ipairs(places) do
    local include = place .. "/include"
    if place ~= "" and helper.read(include .. "/cublasLt.h") then return include end
  end
end

describe("matrix products on the CUDA device, host side", function()
  local include = headers()
  if not include or helper.shell("command -v gcc").out == "" then
    pending("no CUDA headers or no gcc: skipped")
    return
  end

  local folder, program
  setup(function()
    folder = helper.folder()
    program = folder .. "/gemm_host"
    local compile = "gcc -std=gnu17 -O2 -fopenmp -Wall -Wextra -Werror -Icore -Icuda " ..
      "-Ispec/cuda -I%s -o %s %s -lm"
    local result = helper.shell(compile:format(include, program, SOURCES))
    assert.are.equal(0, result.code, result.err)
  end)
  teardown(function() helper.remove(folder) end)

  local function run(part, environment)
    local command = ("%s %s %s %s/cache"):format(environment or "", program, part, folder)
    local result = helper.shell(command)
    assert.are.equal("ok\n", result.out)
  end

  it("equal the definition for any strides, formats, batches and transposes", function()
    run("products")
  end)
  it("finish a batch that cuBLASLt refuses midway, adding nothing twice", function()
    run("refused_late")
  end)
  it("take an algorithm's workspace, or another algorithm when memory is short", function()
    run("workspaces")
    run("workspaces_again")
  end)
  it("add a bias separately where cuBLASLt does not", function() run("bias") end)
  it("compute a GELU, its slope and column sums in one kernel", function()
    run("fused", "ENGINE_CUBLASLT_FUSE=1")
  end)
  it("compute these epilogues separately where cuBLASLt does not, and by default", function()
    run("fused_refused", "ENGINE_CUBLASLT_FUSE=1")
    run("fused_refused")
  end)
  it("compute epilogues separately where that is faster", function()
    run("fused_search", "ENGINE_CUBLASLT_FUSE=1")
  end)
  it("compute epilogues the same way in the next run", function()
    run("fused_again", "ENGINE_CUBLASLT_FUSE=1")
  end)
  it("choose the fastest algorithm that adds in order, once", function() run("search") end)
  it("take the same algorithm in the next run", function() run("again") end)
  it("search again when the algorithm is no longer offered", function() run("gone") end)
  it("take the heuristic's first with ENGINE_CUBLASLT_SEARCH=0", function()
    run("off", "ENGINE_CUBLASLT_SEARCH=0")
  end)
  it("report a path that is too long for the file", function()
    local result = helper.shell(("%s search %s"):format(program, ("/x"):rep(2048)))
    assert.equal("ok\n", result.out)
    assert.matches("engine: cannot save the algorithms of matrix products to a file: ENGINE_CACHE "
      .. "and HOME are unset, or the file's path has 4096 bytes or more; the next run", result.err,
      1, true)
  end)
  it("keep choices in a file that survives damage", function() run("file") end)
  it("lay out FP8 operands and scales, and explain refusals", function() run("fp8") end)
  it("prepare transposed and ragged FP8 factors for the tensor cores", function()
    run("fp8_matmul")
  end)
end)
