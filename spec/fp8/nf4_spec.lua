-- NF4 against golden codes of bitsandbytes, and adapters on a base in NF4. spec/parity/nf4.py
-- compares 1e7 numbers with bitsandbytes; spec/cpu/kernels_spec.lua compares the kernels with their
-- slow twins.
local engine = require "engine"
local helper = require "spec.helper"

local nn, nf4 = engine.nn, engine.nf4

local function hex(x)
  local bytes = x:totable()
  for i, b in ipairs(bytes) do bytes[i] = ("%02x"):format(b) end
  return table.concat(bytes)
end

describe("NF4", function()
  it("gives bitsandbytes' codes", function()
    engine.begin_step()
    local list = {}
    for i = 0, 199 do list[i + 1] = (i * 37 % 101 - 50) / 16 * (1 + math.floor(i / 64)) end
    local x = engine.tensor(list)
    local q = nf4.quantize(x)
    assert.equal("04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f"
      .. "3b05d17e2af4c06d18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d"
      .. "18e3b04c17e29f3b05d17e2af3c05e18f", hex(q.q))
    assert.same({ 0, 52, 217, 240 }, q.absmax:totable())
    assert.same({ { 4.25 }, 7.375 }, { q.group:totable(), q.offset:item() })
    local y = q:dequantize()
    assert.near(4.147796720266342, y:to("f64"):sum():item(), 1e-12)
    assert.equal(100 + 4 + 4 + 4, q:bytes())
    assert.equal(100 + 4 * 4, nf4.quantize(x, { double = false }):bytes())
    assert.equal("nf4 [200] in blocks of 64, 112 bytes", tostring(q))
    engine.end_step()
  end)

  local function model()
    engine.seed(3)
    return nn.gpt { vocab = 32, context = 8, width = 32, heads = 2, layers = 2 }
  end

  it("gives adapters on a frozen base the gradients of the dequantized base", function()
    engine.seed(1)
    local ids = engine.randint(0, 32, { 4, 8 }):keep()
    local quantized = nn.lora(model(), { rank = 4, base = "nf4" })
    local plain = model()
    for _, block in ipairs { plain.blocks[1], plain.blocks[2] } do
      for _, layer in ipairs { block.attn.qkv, block.attn.out, block.mlp.up, block.mlp.down } do
        layer.weight = engine.scope(function()
          return nf4.quantize(layer.weight:detach()):dequantize():keep()
        end)
      end
    end
    nn.lora(plain, { rank = 4 })
    local adapters = {}
    for _, p in ipairs(plain:parameters()) do adapters[p.name] = p.tensor end
    for _, p in ipairs(quantized:parameters()) do
      if p.name:find("lora_[AB]") then
        if p.name:find("lora_B") then p.tensor:uniform(-0.1, 0.1) end
        adapters[p.name]:copy(p.tensor)
      end
    end
    for _, precision in ipairs { "fp32", "bf16" } do
      local grads = {}
      for k, m in ipairs { plain, quantized } do
        engine.begin_step()
        local loss = engine.autocast(precision, m.loss, m, ids, ids)
        loss:backward()
        grads[k] = {}
        for _, p in ipairs(m:parameters()) do
          if p.name:find("lora_[AB]") then
            grads[k][p.name] = p.tensor.grad:to("f32"):keep()
          end
        end
        engine.end_step()
      end
      for name, g in pairs(grads[1]) do
        local apart = engine.scope(function()
          return ((g - grads[2][name]):norm() / g:norm()):item()
        end)
        assert.is_true(apart < (precision == "fp32" and 1e-5 or 0.03), name .. " " .. apart)
      end
    end
  end)

  it("can be restored from a state, merged and unmerged", function()
    local folder = helper.folder()
    local ids = engine.randint(0, 32, { 2, 8 }):keep()
    local m = nn.lora(model(), { rank = 4, base = "nf4" })
    assert.matches("32 %-> 96, nf4, lora rank 4", m:describe())
    local function logits() return engine.scope(function() return m(ids):keep() end) end
    local before, weight = logits(), m.blocks[1].mlp.up.weight
    assert.same({ "u8", 64 * 32 }, { weight.dtype, weight.count })
    engine.save(folder .. "/state", m:state())
    m = nn.lora(model(), { rank = 4, base = "nf4" })
    m.blocks[1].mlp.up.weight:zero()
    m:load_state((engine.load(folder .. "/state")))
    assert.same(before:totable(), logits():totable())
    engine.lora.merge(m)
    assert.equal(model():count(), m:count())
    assert.is_true(engine.scope(function()
      return (logits() - before):abs():max():item()
    end) < 1e-5)
    engine.lora.unmerge(m)
    assert.same(before:totable(), logits():totable())
    helper.remove(folder)
  end)

  it("names what it expects", function()
    for message, options in pairs { ["a block of 32"] = { block = 48 },
      ["did you mean 'block'"] = { blok = 64 }, ["one f32 offset"] = { offset = engine.zeros(2) },
      ["expected block"] = { block = "64" } } do
      helper.refuses(message, nf4.quantize, engine.zeros(64), options)
    end
  end)
end)
