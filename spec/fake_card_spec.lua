-- The core beside a card: tensors in memory that the host cannot touch. The card is spec/cuda/fake_card.c, whose kernels are the CPU's and whose
-- memory is closed to everybody else, so that a look into it ends the process.
local helper = require "spec.helper"

local CARD = "build/fake_card.so"
local sanitized = os.getenv("ENGINE_SANITIZED")

local function on_card(arguments)
  return helper.shell(("ENGINE_CUDA_PLUGIN=%s %s %s 2>&1"):format(CARD, helper.engine, arguments))
end

if not sanitized and helper.shell("test -f " .. CARD).code == 0 and not os.getenv("ENGINE_TEST_DEVICE") then
  describe("a card that the host cannot look into", function()
    it("trains, overflows, lags and updates as the CPU does", function()
      for _, file in ipairs { "spec/cuda/training_spec.lua --filter='same steps' --filter='tensors on the card' --filter='captured'",
        "spec/optimizer_kernel_spec.lua", "spec/wire_kernel_spec.lua" } do
        local ran = on_card("spec/cuda/run.lua --output=TAP " .. file)
        assert(ran.code == 0 and not ran.out:find("\nnot ok", 1, true), ran.out)
        assert.truthy(ran.out:find("\nok 1", 1, true))
      end
    end)

    it("runs a job with checkpoints, lagged or not, and goes on from them", function()
      local folder = helper.folder()
      local job = "examples/gpt.lua device=cuda layers=2 width=32 heads=2 batch=2 context=16 sample=0 log=json checkpoint_every=4 resume=auto run=" .. folder
      assert.equal(0, on_card(job .. "/a steps=4").code)
      local ran = on_card(job .. "/a steps=8")
      assert(ran.code == 0, ran.out)
      local whole = on_card(job .. "/b steps=8")
      local function last(out) return out:match('.*"step":8,[^\n]*"loss":([^,}]+)') or out:match('.*"loss":([^,}]+)') end
      assert.equal(last(whole.out), last(ran.out))
      assert.truthy(last(ran.out))
    end)

    it("says what device there is", function()
      assert.truthy(on_card("-e 'local e = require \"engine\" e.device(\"cuda\") print(e.device(), e.ones(2, 2))'").out:find("cuda", 1, true))
    end)
  end)
end
