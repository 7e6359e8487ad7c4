-- The core with a card: tensors in memory that the host cannot access. The card is
-- spec/cuda/fake_card.c; its kernels are the CPU's. Only they and copies may access its memory; any
-- other access ends the process.
local helper = require "spec.helper"

local CARD = "build/fake_card.so"
local sanitized = os.getenv("ENGINE_SANITIZED")

local function on_card(arguments)
  return helper.shell(("ENGINE_CUDA_PLUGIN=%s %s %s 2>&1"):format(CARD, helper.quote(helper.engine),
    arguments))
end

if not sanitized and helper.shell("test -f " .. CARD).code == 0
  and not os.getenv("ENGINE_TEST_DEVICE") then
  describe("a card with memory closed to the host", function()
    it("trains, overflows, lags and updates as the CPU does", function()
      for _, file in ipairs { "spec/cuda/training_spec.lua --filter='same steps' " ..
        "--filter='tensors on the card' --filter='captured'",
        "spec/cpu/optimizer_kernel_spec.lua", "spec/cpu/wire_kernel_spec.lua" } do
        local ran = on_card("spec/cuda/run.lua --output=TAP " .. file)
        assert(ran.code == 0 and not ran.out:find("\nnot ok", 1, true), ran.out)
        assert.truthy(ran.out:find("\nok 1", 1, true))
      end
    end)

    it("runs a job with checkpoints, lagged or not, and resumes from them", function()
      local folder = helper.folder()
      local job = "examples/gpt.lua device=cuda layers=2 width=32 heads=2 batch=2 context=16 " ..
        "warmup=4 sample=0 log=json checkpoint_every=4 resume=auto run=" .. folder
      assert.equal(0, on_card(job .. "/a steps=4").code)
      local ran = on_card(job .. "/a steps=8")
      assert(ran.code == 0, ran.out)
      local whole = on_card(job .. "/b steps=8")
      local function last(out)
        return out:match('.*"step":8,[^\n]*"loss":([^,}]+)') or out:match('.*"loss":([^,}]+)')
      end
      assert.equal(last(whole.out), last(ran.out))
      assert.truthy(last(ran.out))
    end)

    it("accepts requests for its tensors while the CPU is the current device", function()
      local ran = on_card([[-e 'local e = require "engine" local x = e.ones(3):to("cuda")
        print(e.device(), (x:to("cpu") * 2):sum():item(), x)']])
      assert(ran.code == 0 and ran.out:find("^cpu%s+6%s+f32 %[3%] cuda"), ran.out)
    end)

    it("gives the checksums that the host gives, of tensors larger than its staging memory",
      function()
      local ran = on_card([[-e 'local e, F = require "engine", require "engine.base.ffi"
        local function sum(x)
          local out = F.new("uint64_t[1]")
          F.check(F.C.eng_checksum(out, x))
          return out[0]
        end
        for _, n in ipairs { 0, 5, 3 * 2^20 + 7 } do
          local x = e.randn(n)
          print(sum(x) == sum(x:to("cuda")))
        end']])
      assert.equal("true\ntrue\ntrue\n", ran.out)
    end)

    it("has parameters that no other device accepts, and accepts no other device's", function()
      local file = helper.folder() .. "/away.lua"
      helper.write(file, [[
        local engine, F = require "engine", require "engine.base.ffi"
        local C = F.C
        local record, loss, found, graph, norm = F.new("eng_record"), F.new("double[1]"),
          F.new("int[1]"), F.new("eng_graph *[1]"), F.new("double[1]")
        for _, way in ipairs { { "cuda", "cpu" }, { "cpu", "cuda" } } do
          local home, away = way[1], way[2]
          local function refused(call)
            engine.device(away)
            local done, text = pcall(call)
            engine.device(home)
            local want = ("the parameters are in %s memory, but the current device is %s; " ..
              "hint: engine.device('%s')"):format(home, away, home)
            assert(not done and tostring(text):find(want, 1, true), text)
          end
          engine.device(home)
          local model = engine.nn.linear(4, 4)
          local optimizer = engine.optim.adamw(model, { lr = 0.1 })
          local set = optimizer.params
          local function start(losses, n)
            F.check(C.eng_params_stats_start(set, 63, losses, n, nil))
          end
          local function fetch() F.check(C.eng_params_stats_fetch(record, nil, loss, set, 1)) end
          model(engine.ones(2, 4)):sum():backward()
          refused(function() optimizer:step {} end)
          refused(function() F.check(C.eng_params_unscale(found, set, 0.5)) end)
          refused(function() F.check(C.eng_params_stats(record, nil, set, 1, 63)) end)
          refused(function() start(nil, 0) end)
          refused(function() F.check(C.eng_graph_begin(graph, set, nil, 0)) end)
          start(nil, 0)
          refused(fetch)
          fetch()
          local foreign = F.new("eng_tensor[1]")
          engine.device(away)
          local there = engine.ones(1):keep()
          foreign[0] = there
          engine.device(home)
          local done, text = pcall(start, foreign, 1)
          assert(not done and tostring(text):find("is not in the memory of the current device, " ..
            home, 1, true), text)
          refused(function()
            F.check(C.eng_params_reference_begin(set))
            F.check(C.eng_params_reference_end(norm, nil, set, 1))
          end)
          local before = model.weight:sum():item()
          optimizer:step {}   -- nothing was lost
          assert(model.weight:sum():item() ~= before)
          engine.end_step()
        end
        print("all refused")]])
      local ran = on_card(file)
      assert(ran.code == 0 and ran.out == "all refused\n", ran.out)
    end)

    it("must be a complete library in a regular file; else an error names the problem", function()
      local folder = helper.folder()
      local function with(plugin)
        return helper.shell(("ENGINE_CUDA_PLUGIN=%s timeout 20 %s -e " ..
          "'print(require(\"engine\").device(\"cuda\"))' 2>&1"):format(plugin,
            helper.quote(helper.engine)))
      end
      local whole = helper.read(CARD)
      for _, part in ipairs { 0.02, 0.3, 0.7, 0.999 } do
        helper.write(folder .. "/cut.so", whole:sub(1, math.floor(#whole * part)))
        local ran = with(folder .. "/cut.so")
        assert(ran.code == 1
          and ran.out:find("/cut.so is truncated; hint: run make, or copy the file again", 1, true),
          part .. ": " .. ran.out)
      end
      helper.write(folder .. "/text.so", "no library")
      assert.truthy(with(folder .. "/text.so").out:find("cannot load " .. folder .. "/text.so", 1,
        true))
      helper.shell("mkfifo " .. folder .. "/pipe.so")
      assert.truthy(with(folder .. "/pipe.so").out:find("/pipe.so is not a regular file", 1, true))
      -- a bare name is a path here
      assert.truthy(with("nowhere.so").out:find("(./nowhere.so is missing)", 1, true))
      assert.falsy(with("").out:find("( is missing)", 1, true))  -- empty means unset
      helper.remove(folder)
    end)

    it("names the available devices", function()
      assert.truthy(on_card("-e 'local e = require \"engine\" e.device(\"cuda\") " ..
        "print(e.device(), e.ones(2, 2))'").out:find("cuda", 1, true))
    end)
  end)
end
