-- Computing attention's entropies changes nothing else: y and the tensors of the backward pass stay
-- bit-identical. Runs on the CPU with every instruction set; with ENGINE_TEST_DEVICE=cuda on the
-- card, with each of its kernels: tensor cores for 32, 64, 96 and 128 columns, and the plain one.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local devices, helper = require "spec.devices", require "spec.helper"

describe("attention with entropies", function()
  for _, dtype in ipairs { "bf16", "f16", "f32" } do
    it("gives the same y and lse, bit for bit, in " .. dtype, helper.in_step(function()
      devices.everywhere(function(where)
        engine.seed(3)
        for k, width in ipairs { 16, 64, 80, 128 } do
          local causal, queries, keys = k % 2, 70, 150
          local q, key, v = engine.randn(1, queries, 2, width):to(dtype),
            engine.randn(1, keys, 1, width):to(dtype), engine.randn(1, keys, 1, width):to(dtype)
          q = q * 4   -- so that a row's largest score moves from tile to tile
          local without = { M_ffi.run("attention", { q, key, v }, { causal, 0 }, { 0 }, 3) }
          local with = { M_ffi.run("attention", { q, key, v }, { causal, 1 }, { 0 }, 3) }
          local y, lse, entropy = with[1], with[2], with[3]
          local label = ("%s, %s, %d wide"):format(where, dtype, width)
          assert.is_true(devices.bytes(without[1]) == devices.bytes(y), "y: " .. label)
          assert.is_true(devices.bytes(without[2]) == devices.bytes(lse), "lse: " .. label)

          if causal == 0 then   -- masks: see spec/cpu/kernels/attention.lua
            local turned = key:to("f32"):reshape(keys, width):transpose(1, 2)
            local scores = q:to("f32"):transpose(2, 3):matmul(turned) / math.sqrt(width)
            local logs = scores:log_softmax(-1)
            local far = (entropy + (logs:exp() * logs):sum(-1)):abs():max():item()
            assert.is_true(far < 2e-5, ("entropy: %s is off by %g nats"):format(label, far))
          end
        end
      end)
    end))
  end
end)
