-- Runs every file of examples/ at reduced size through the real binary: it succeeds, the loss
-- falls, and a wrong argument is refused in one line. A new example needs an entry here;
-- fp8_lab_spec.lua covers the studies fp4_*.lua, fp8_*.lua, scale_rules and rounding_bias.
local helper = require "spec.helper"

local folder, root

local function u16(list)
  local bytes = {}
  for i, v in ipairs(list) do bytes[i] = string.char(v % 256, math.floor(v / 256)) end
  return table.concat(bytes)
end

-- A file of tokens below 64 with a simple pattern: counting up and down.
local function tokens()
  local list = {}
  for i = 0, 2999 do
    local k = i % 100
    list[i + 1] = k < 50 and k or 100 - k
  end
  return helper.write(folder .. "/tokens.bin", u16(list))
end

-- Fields of every line of log=json.
local FIELDS = { "step", "updates", "loss", "lr", "scale", "skipped", "overflow", "amax", "norm",
  "tokens_per_s" }

-- Losses of a run with log=json.
local function json_losses(result)
  local losses = {}
  for line in result.out:gmatch("[^\n]+") do
    local object = require("cjson").decode(line)
    for _, field in ipairs(FIELDS) do
      assert(object[field] ~= nil, "no field " .. field .. " in " .. line)
    end
    losses[#losses + 1] = object.loss
    assert.equal(#losses, object.step)
  end
  return losses
end

-- Losses that a script prints itself: "step 10 loss 1.5".
local function printed_losses(result)
  local losses = {}
  for value in result.out:gmatch("step +%d+ +loss ([%d.]+)") do
    losses[#losses + 1] = tonumber(value)
  end
  return losses
end

local SMALL = { "layers=2", "width=48", "heads=4", "context=32", "batch=8" }
local function small(...)
  local list = { unpack(SMALL) }
  for _, word in ipairs { ... } do list[#list + 1] = word end
  return list
end

-- A folder with a tiny Llama and a tokenizer of characters, and a file of conversations.
local function tiny_llama()
  local engine = require "engine"
  local model, vocab = folder .. "/llama", {}
  engine.seed(1)
  engine.new_model { model_type = "llama", vocab_size = 64, hidden_size = 32,
    num_hidden_layers = 2, num_attention_heads = 4, intermediate_size = 64,
    max_position_embeddings = 64 }:save(model)
  for c in ("\n 0123456789?abcdefghijklmnopqrstuvwxyz"):gmatch "." do
    vocab[#vocab + 1] = ("%s: %d"):format(c == "\n" and '"\\n"' or '"' .. c .. '"', #vocab + 4)
  end
  helper.write(model .. "/tokenizer.json", ([[{ "added_tokens": [ { "id": 0, "content": "<s>",
    "special": true }, { "id": 1, "content": "<u>", "special": true }, { "id": 2, "content": "<a>",
    "special": true } ], "decoder": { "type": "Fuse" }, "model": { "type": "BPE",
    "unk_token": "?", "merges": [], "vocab": { %s } } }]]):format(table.concat(vocab, ", ")))
  helper.write(model .. "/tokenizer_config.json", [[{ "bos_token": "<s>", "chat_template":
    "{{ bos_token }}{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content }}{% endfor %}]]
    .. [[{% if add_generation_prompt %}{{ '<a>' }}{% endif %}" }]])
  local chats, pairs_ = {}, {}
  for i = 0, 8 do
    chats[i + 1] = ('{"messages":[{"role":"user","content":"after %d?"},{"role":"assistant",'
      .. '"content":"%d\\n"}]}'):format(i, i + 1)
    pairs_[i + 1] = ('{"prompt":"<s><u>after %d?<a>","chosen":"%d\\n","rejected":"%d\\n"}')
      :format(i, (i + 3) % 10, i + 1)
  end
  return { "model=" .. model, "match=attn,mlp,head", "batch=9", "context=32", "lr=1e-2",
    "steps=250", "out=" .. folder .. "/tuned", "data=" .. helper.write(folder .. "/chats.jsonl",
    table.concat(chats, "\n")) }, "data=" .. helper.write(folder .. "/pairs.jsonl",
    table.concat(pairs_, "\n"))
end

-- By file. arguments: of the run; losses: returns the losses in its output; falls: the minimum fall
-- from the first to the last losses; check: further assertions; words: patterns in the text output
-- of a run with the arguments `talk`.
local entries = {
  ["xor.lua"] = { arguments = function() return { "steps=200" } end, losses = printed_losses,
    falls = 0,
    check = function(result)
      local losses = printed_losses(result)
      assert.is_true(losses[#losses] < 0.01)
      for a, b, value in result.out:gmatch("(%d) xor (%d) = (%S+)") do
        assert.near(a == b and 0 or 1, tonumber(value), 0.2)
      end
    end },
  ["mlp.lua"] = { arguments = function() return { "steps=150", "count=2000", "log=json" } end,
    losses = json_losses, falls = 1,
    talk = function() return { "steps=600", "count=8000", "precision=fp16" } end,
    words = { "sequential", "3: linear%(128 %-> 128%)", "36,362 parameters",
      "done after 600 steps: 600 updates", "accuracy on %d+ new digits: 9%d" } },
  ["images.lua"] = { arguments = function()
    return { "steps=90", "size=16", "width=8", "batch=16", "log=json" }
  end, losses = json_losses, falls = 0.2,
    talk = function() return { "model=vit", "steps=3", "size=16", "width=8", "precision=bf16" } end,
    words = { "vit of %d+ parameters", "done after 3 steps", "accuracy on 512 other images" } },
  ["gpt.lua"] = { arguments = function() return small("steps=80", "lr=4e-3", "log=json") end,
    losses = json_losses, falls = 1.5,
    talk = function() return small("steps=5", "sample=20", "precision=bf16") end,
    words = { "gpt%(2 layers, width 48", "policy static",
      "done after 5 steps: 5 updates, 0 skipped", "loss on held%-out text: %d",
      "a sample:\nstatic eng_status " } },
  ["gpt2.lua"] = { arguments = function()
    return { "data=" .. tokens(), "layers=2", "width=32", "heads=4", "vocab=64", "context=32",
      "batch=4", "steps=60", "lr=5e-3", "log=json",
      "shuffle=false", "save=" .. folder .. "/tuned", "precision=fp16" }
  end, losses = json_losses, falls = 1.5,
    talk = function() return { "data=" .. folder .. "/tokens.bin", "model=" .. folder .. "/tuned",
      "steps=3", "batch=4", "context=32" } end,
    words = { "gpt2%(2 layers, width 32, 4 heads, context 1024, vocab 64%)", "done after 3 steps" },
    check = function(result)
      local losses = json_losses(result)
      for _, name in ipairs { "config.json", "model.safetensors" } do
        assert.is_string(helper.read(folder .. "/tuned/" .. name))
      end
      local again = helper.run { root .. "/examples/gpt2.lua", "model=" .. folder .. "/tuned",
        "data=" .. folder .. "/tokens.bin", "context=32", "batch=4",
        "steps=2", "shuffle=false", "log=json" }
      assert.equal(0, again.code, again.err)
      -- the second run continues where the first ended
      assert.near(losses[#losses], json_losses(again)[1], 0.3)
    end },
  ["llama.lua"] = { arguments = function() return small("kv_heads=2", "hidden=96", "steps=80",
    "lr=4e-3", "log=json") end, losses = json_losses, falls = 1.5,
    talk = function() return small("kv_heads=2", "hidden=96", "steps=3", "sample=10",
      "precision=fp16") end,
    words = { "llama%(2 layers, width 48, 4 heads, 2 kv_heads", "1: block", "done after 3 steps",
      "a sample:\nlocal function " } },
  ["bert_mlm.lua"] = { arguments = function() return small("steps=80", "lr=4e-3", "log=json") end,
    losses = json_losses, falls = 1,
    talk = function() return small("steps=3") end,
    words = { "bert%(2 layers", "done after 3 steps" } },
  ["compare.lua"] = { arguments = function() return small("policies=dynamic,megatron," .. root
    .. "/policies/static.lua", "steps=60", "lr=1e-2", "seeds=2") end,
    -- all first losses, then all last losses
    losses = function(result)
      local first, last = {}, {}
      for a, b in result.out:gmatch("([%d.]+) %-> ([%d.]+)") do
        first[#first + 1], last[#last + 1] = tonumber(a), tonumber(b)
      end
      for _, loss in ipairs(last) do first[#first + 1] = loss end
      return first
    end, falls = 0.5,
    check = function(result)
      assert.matches("policy +skipped +underflow +log2 scale +loss\n", result.out)
      -- megatron begins at 2^32, so it skips more steps
      assert.is_true(tonumber(result.out:match("megatron +([%d.]+)")) > tonumber(
        result.out:match("dynamic +([%d.]+)")))
      assert.is_true(tonumber(result.out:match("static.lua +[%d.]+ +([%d.]+)%%")) > tonumber(
        result.out:match("dynamic +[%d.]+ +([%d.]+)%%")))
    end },
  ["hot_swap.lua"] = { arguments = function() return { "steps=80", "log=json" } end,
    losses = json_losses, falls = 1.5,
    talk = function() return { "steps=120" } end,
    words = { "the policy timid stays; the new policy is not used: %S+:6: 'then' expected",
      "policy timid %x+ %-> aiming %x+ %(its file was saved%)",
      "policy aiming %x+ %-> aiming %x+ %(undone by the script%)", "\naiming +%d+ +0 +2^1" } },
  ["layerwise.lua"] = { arguments = function() return { "steps=220" } end, losses = printed_losses,
    falls = 0.5,
    check = function(result) assert.is_true(
      tonumber(result.out:match("([%d.]+) %% of the first layer's gradients were lost")) < 1) end,
    talk = function() return { "seeds=1", "steps=20", "depth=4" } end,
    words = { "policy +loss +lost +skipped", "dynamic", "layerwise +%S+ +%S+ +%S+\n", "fp32" } },
  ["moe.lua"] = { arguments = function() return { "steps=120" } end, losses = printed_losses,
    falls = 0.5,
    talk = function() return { "steps=5", "policy=dynamic" } end,
    words = { "%d steps skipped", "tokens of each expert in the last held%-out batch: %d+ %d+" } },
  ["reinforce.lua"] = { arguments = function() return { "steps=60", "log=json", "jackpot=1",
      "evaluate_every=5" } end,
    losses = function(result)       -- minus the mean return
      local list = {}
      for loss in result.err:gmatch("evaluation loss (%-?[%d.]+)") do list[#list + 1] = loss end
      return list
    end,
    falls = 0.1,
    talk = function() return { "steps=30", "evaluate_every=30" } end,
    words = { "step 30: evaluation loss %-0", "mean return 0%.%d+, at best 0%.784; %d+ steps" } },
  ["bad_batch.lua"] = { arguments = function() return { "steps=200" } end, losses = printed_losses,
    falls = 0.01,
    check = function(result) assert.matches("8 steps skipped", result.out) end,
    talk = function() return { "steps=60", "policy=guarded" } end,
    words = { "loss on the clean batches of the second half: 0%.%d+; %d steps skipped" } },
  ["dpo.lua"] = { arguments = function() return { "steps=40", "width=16" } end,
    losses = printed_losses, falls = 0.1,
    talk = function() return { "steps=4", "width=16", "policy=dynamic" } end,
    words = { "KL 0%.%d+ nats per token", "largest jump of the KL" } },
  ["lora.lua"] = { arguments = function() return { "steps=200", "pretrain=120", "lr=1e-2" } end,
    losses = printed_losses, falls = 0.07,
    talk = function() return { "steps=3", "pretrain=3", "base=e4m3" } end,
    words = { "%d+ of %d+ parameters train; .*48 %-> 192, e4m3, lora rank 4" } },
  ["qlora.lua"] = { arguments = function() return { "steps=40", "pretrain=30", "width=64",
    "layers=2", "seeds=1", "context=32" } end, falls = 2,
    losses = function(result)
      local plain, q = result.out:match("bf16[^\n]-([%d.]+)\nQLoRA[^\n]-([%d.]+)\n")
      assert.is_true(q / plain < 1.02)
      return { math.log(256), plain, q }
    end,
    talk = function() return { "steps=3", "pretrain=3", "width=32", "layers=1", "seeds=1" } end,
    words = { "QLoRA's frozen weights take %d+%.%d %% of .-; the losses differ by [+-]%d" } },
  ["finetune.lua"] = { arguments = function()
      local words = tiny_llama()
      words[#words + 1] = "log=json"
      return words
    end, losses = json_losses, falls = 0.5,
    check = function()
      local out = folder .. "/tuned/"
      for _, name in ipairs { "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
        "merged/model.safetensors", "merged/tokenizer.json", "merged/tokenizer_config.json" } do
        assert(require("engine.base.file").is_file(out .. name), name)
      end
      local result = helper.run { "generate", out .. "merged", "--prompt", "<s><u>after 3?<a>",
        "--temperature", "0", "--max_tokens", "1" }
      assert.matches("after 3%?4", result.out)
    end,
    talk = function()
      local words, pairs_ = tiny_llama()
      words[#words], words[6] = pairs_, "steps=20"
      for _, word in ipairs { "method=dpo", "from=" .. folder .. "/tuned", "checkpoint=block" } do
        words[#words + 1] = word
      end
      words[7] = "out=" .. folder .. "/preferred"
      return words
    end,
    words = { "loss 0%.%d+, %d+ %% of the last pairs ranked as preferred; wrote .*/merged" } },
  ["entropy.lua"] = { arguments = function() return { "steps=80" } end, losses = printed_losses,
    falls = 0.8,
    talk = function() return { "steps=3", "policy=dynamic" } end,
    words = { "entropy %d%.%d+ nats", "lost bits to underflow" } },
  ["explicit_loop.lua"] = { arguments = function() return small("steps=80", "lr=4e-3") end,
    losses = printed_losses, falls = 0.3,
    talk = function() return small("steps=10", "accumulate=2",
      "policy=" .. root .. "/policies/deepspeed.lua") end,
    words = { "step  10  loss %d.*scale %d" } },
}

local function mean(list, from, to)
  local sum = 0
  for i = from, to do sum = sum + list[i] end
  return sum / (to - from + 1)
end

describe("the example", function()
  setup(function()
    folder = helper.folder()
    root = helper.shell("pwd").out:match("[^\n]+")
  end)
  teardown(function() helper.remove(folder) end)

  local listed = helper.shell "ls examples/*.lua | grep -Ev '/(fp[48]_|scale_rules|rounding_bias)'"
  for name in listed.out:gmatch("([^/\n]+%.lua)") do
    local entry = entries[name]
    local function run(arguments)
      return helper.run { root .. "/examples/" .. name, unpack(arguments) }
    end

    it(name .. " runs and learns", function()
      assert(entry, "examples/" .. name .. " has no entry in spec/examples_spec.lua")
      local result = run(entry.arguments())
      assert.equal(0, result.code, result.err)
      local losses = entry.losses(result)
      assert.is_true(#losses >= 3, "it printed no losses: " .. result.out)
      local few = math.min(5, math.floor(#losses / 3))
      local first, last = mean(losses, 1, few), mean(losses, #losses - few + 1, #losses)
      assert.is_true(last < first - entry.falls,
        ("the loss went from %g to %g"):format(first, last))
      if entry.check then entry.check(result) end
    end)

    if entry and entry.words then
      it(name .. " prints its results as text", function()
        local result = run(entry.talk())
        assert.equal(0, result.code, result.err)
        for _, words in ipairs(entry.words) do assert.matches(words, result.out .. result.err) end
      end)
    end

    it(name .. " refuses a wrong argument in one line, and lists its settings for help", function()
      local result = run { "stpes=3" }
      assert.not_equal(0, result.code)
      assert.equal("", result.out)
      assert.matches("^engine: config: no field 'stpes'; did you mean 'steps'%?[^\n]*\n$",
        result.err)
      result = run { "steps=many" }
      assert.not_equal(0, result.code)
      assert.matches("^engine: config: [^\n]*steps[^\n]*'many'[^\n]*\n$", result.err)
      result = run { "steps=0" }
      assert.same({ 1, "",
        "engine: config: steps: expected a whole number of 1 or more, got 0\n" },
        { result.code, result.out, result.err })
      result = run { "help" }
      assert.equal(0, result.code)
      assert.matches("steps", result.out)
      if result.out:find("\n  policy ") then
        result = run { "policy=dynamc" }
        assert.equal("", result.out)
        assert.matches("^engine: config: policy: there is no policy 'dynamc'; did you mean "
          .. "'dynamic'%?[^\n]*\n$", result.err)
      end
    end)
  end

  it("finetune.lua names the files that a model folder needs", function()
    local result = helper.run { "examples/finetune.lua", "model=" .. folder .. "/none", "data=x" }
    assert.equal(1, result.code)
    assert.matches("expected a folder with config.json and model.safetensors", result.err, 1, true)
  end)

  it("entropy.lua counts no lost bits if no gradient is above zero", function()
    local result = helper.run { "examples/entropy.lua", "steps=2",
      "policy=static:loss_scale=1e-30" }
    assert.equal(0, result.code, result.err)
    assert.matches("; 0 %% of the gradients lost bits", result.out)
  end)

  it("bad_batch.lua reports no loss if every batch is poisoned", function()
    local result = helper.run { "examples/bad_batch.lua", "steps=3", "every=1" }
    assert.equal(0, result.code, result.err)
    assert.matches("loss on the clean batches of the second half: %-?nan; ", result.out)
  end)

  it("data files are found beside the script, in any working directory", function()
    local engine = helper.engine:sub(1, 1) == "/" and helper.engine or root .. "/" .. helper.engine
    local result = helper.shell(
      ("cd %s && %s %s/examples/explicit_loop.lua steps=10 width=16 layers=1 heads=2 batch=2 "
        .. "context=8")
      :format(helper.quote(folder), helper.quote(engine), helper.quote(root)))
    assert.equal(0, result.code, result.err)
    assert.matches("step  10", result.out)
  end)

  it("keep a run and resume it under the given name", function()
    local path = folder .. "/kept"
    local function gpt(...)
      return helper.run { root .. "/examples/gpt.lua", "layers=1", "width=16", "heads=2",
        "context=8", "batch=2", "log=json", ... }
    end
    local first = gpt("steps=6", "checkpoint_every=2", "run=" .. path)
    assert.equal(0, first.code, first.err)
    assert.same(json_losses(gpt "steps=6"), json_losses(first))
    assert.is_string(helper.read(path .. "/history.db"))
    local again = gpt("steps=8", "resume=auto", "run=" .. path)
    assert.equal(0, again.code, again.err)
    assert.matches("resumed from .* step 6", again.err)
    assert.equal(2, select(2, again.out:gsub("\n", "")))
    local other = gpt("layers=2", "steps=8", "resume=auto", "run=" .. path)
    assert.equal(1, other.code)
    assert.matches("does not fit this model; layers was 1, is 2:\n", other.err, 1, true)
    assert.matches("\n  missing: blocks.2.norm1.weight [16]\n", other.err, 1, true)
    other = gpt("layers=2", "steps=8", "resume=auto", "policy=static", "run=" .. path)
    assert.matches("layers was 1, is 2; policy was '', is static", other.err, 1, true)
  end)
end)
