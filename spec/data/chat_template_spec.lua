-- Chat templates give the texts that transformers gives (spec/golden/chat_templates.json, written
-- and compared by spec/parity/chat.py), and refuse unsupported constructs in one line.
local cjson = require "cjson"
local engine = require "engine"
local helper = require "spec.helper"
local jinja = require "engine.data.jinja"

local golden = cjson.decode(helper.read "spec/golden/chat_templates.json")

local TOKENIZER = [[{ "added_tokens": [ { "id": 0, "content": "<|im_start|>", "special": true },
  { "id": 1, "content": "<|im_end|>", "special": true } ], "decoder": { "type": "Fuse" },
  "model": { "type": "BPE", "unk_token": "?", "merges": [], "vocab": { "?": 2, "\n": 3, "a": 4,
  "b": 5, "c": 6, " ": 7, "s": 8, "e": 9, "r": 10, "u": 11, "i": 12, "t": 13, "n": 14 } } }]]

local folder
before_each(function() folder = helper.folder() end)
after_each(function() helper.remove(folder) end)

local function tokenizer(template, more)
  helper.write(folder .. "/tokenizer.json", TOKENIZER)
  local config = more or {}
  config.chat_template = template
  for name, token in pairs(golden.tokens) do config[name] = token end
  helper.write(folder .. "/tokenizer_config.json", cjson.encode(config))
  return engine.tokenizer(folder)
end

describe("a chat template", function()
  for _, entry in ipairs(golden.templates) do
    it("gives the texts of transformers: " .. entry.name, function()
      local t, at = tokenizer(entry.template), 0
      for _, messages in ipairs(golden.conversations) do
        for _, prompt in ipairs { false, true } do
          at = at + 1
          local good, text = pcall(t.apply_chat_template, t, messages,
            { add_generation_prompt = prompt })
          local want = entry.texts[at]
          if type(want) == "table" then
            assert.is_false(good)
            assert.matches(want.error, text, 1, true)
          else assert.equal(want, text) end
        end
      end
      assert.equal(#entry.texts, at)
    end)
  end

  it("may be one of several, or in a file of its own", function()
    local t = tokenizer { { name = "tool_use", template = "x" },
      { name = "default", template = "{{ eos_token }}" } }
    assert.equal("</s>", t:apply_chat_template { { role = "user", content = "" } })
    helper.write(folder .. "/chat_template.jinja", "{{ messages[0].content }}!{{ bos_token }}")
    t = engine.tokenizer(folder)
    assert.equal("a!<s>", t:apply_chat_template { { role = "user", content = "a" } })
  end)

  it("and its tokens are read from large files", function()
    local many = { added = ("x"):rep(1.4e6) }
    local t = tokenizer("{{ bos_token }}", many)
    assert.equal("<s>", t:apply_chat_template { { role = "user" } })
    helper.write(folder .. "/chat_template.jinja", "{{ bos_token }}!")
    assert.equal("<s>!", engine.tokenizer(folder):apply_chat_template { { role = "user" } })
    helper.write(folder .. "/chat_template.jinja", ("x"):rep(2 ^ 20 + 1))
    t = engine.tokenizer(folder)
    assert.error_matches(function() t:apply_chat_template { { role = "user" } } end,
      "has 1048577 bytes, expected at most 1048576")
  end)

  it("reads further variables that the caller gives", function()
    local t = tokenizer "{{ 'yes' if think is defined and think else 'no' }}"
    assert.equal("no", t:apply_chat_template { { role = "user" } })
    assert.equal("yes", t:apply_chat_template({ { role = "user" } }, { think = true }))
  end)

  it("compares lists and dicts by their items", function()
    for expression, want in pairs {
      ["[1] == [1]"] = true, ["[1] == [2]"] = false, ["[1] == [1, 2]"] = false,
      ["[1, 2] == [1]"] = false, ["[] == []"] = true, ["[] == {}"] = false,
      ["[1, [2]] != [1, [2]]"] = false, ["[none] == [0]"] = false, ["none == {}"] = false,
      ["{'a': [1]} == {'a': [1]}"] = true, ["{'a': 1} == {'a': 1, 'b': 2}"] = false,
      ["{'a': 1, 'b': 2} == {'a': 1}"] = false, ["[1] in [[1], 2]"] = true,
      ["{'a': 1} not in [{'a': 2}]"] = true, ["'a' == ['a']"] = false } do
      assert.equal(want and "True" or "False", jinja.read("{{ " .. expression .. " }}")({}),
        expression)
    end
  end)

  it("makes training data in which only the assistant's messages are targets", function()
    local chatml = golden.templates[1]
    local t = tokenizer(chatml.template)
    helper.write(folder .. "/chats.jsonl", [[
{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},
{"role":"user","content":"c"},{"role":"assistant","content":"ab"}]}
]])
    helper.write(folder .. "/chats.jsonl", (helper.read(folder .. "/chats.jsonl"):gsub(",\n", ",")))
    local function targets(template)
      local data = engine.data.chat { path = folder .. "/chats.jsonl", encode = t, batch = 1,
        context = 256, pack = false, template = template, end_token = false }
      local batch = data:next()
      return batch.x:totable()[1], batch.y:totable()[1]
    end
    local x, y = targets(t)
    local x2, y2 = targets(nil)
    assert.same(x2, x)
    assert.same(y2, y)
    assert.same({ 5, 1, 3 }, (function()
      local first = {}
      for _, id in ipairs(y) do
        if id ~= -100 and #first < 3 then first[#first + 1] = id end
      end
      return first
    end)())
    for i = 2, 10 do
      targets(tokenizer(golden.templates[i].template))
    end
    t = tokenizer "{{ messages | length }}{{ messages[0].content }}"
    assert.error_matches(function() targets(t) end,
      "message 2: the chat template changes it when other messages follow; hint: give a function")
  end)

  it("that needs what the engine lacks is refused in one line", function()
    local function refused(template, pattern)
      local t = tokenizer(template)
      local message = helper.failure(t.apply_chat_template, t,
        { { role = "user", content = "a" } })
      assert.matches(pattern, message, 1, true)
      assert.matches("; hint: write the prompt's text yourself", message, 1, true)
    end
    refused("a\n{% macro f(x) %}{% endmacro %}", "line 2: {% macro %} is not supported")
    refused("{{ messages | tojson }}", "line 1: the filter 'tojson' is not supported")
    refused("{{ x is divisibleby }}", "the test 'divisibleby' is not supported")
    refused("{{ strftime_now('%d') }}", "there is no function 'strftime_now'")
    refused("{% if true %}", "expected {% endif %}, got the end of the template")
    refused("a\n{% endfor %}", "line 2: {% endfor %} belongs to no open statement")
    refused("{{ 'a }}", "expected '}}' at the end of the tag")
    refused("\n\n{{ messages }}", "line 3: cannot print a list")
    refused("{{ nothing.at_all }}", "cannot read 'at_all' of an undefined value")
    refused("{{ 'a'.title() }}", "a string has no supported method 'title'")
    refused("{{ 1 + 'a' }}", "cannot compute a number + a string")
    refused("{{ 1 // 0 }}", "cannot compute // by zero")
    refused("{{ 1.5 + 0.5 }}", "cannot print the number 2; supported: whole numbers below 2^53")
    refused("{{ 'a'.startswith(1) }}", "expected a text or a tuple of texts, got a number")
    refused("{{ 'a'.upper(1) }}", "upper: expected at most 0 arguments, got 1")
    refused("{{ 'a'.split(',', maxsplit=1) }}", "the argument 'maxsplit' of 'split' is not")
    refused("{{ messages | first(2) }}", "first: expected at most 0 arguments, got 1")
    refused("{{ raise_exception(message='a') }}", "the argument 'message' of 'raise_exception' is")
    refused("{{ a b }}", "expected the end of the tag, got 'b'")
    for _, template in ipairs { "{% set a = 1 junk %}", "{% set a junk %}b{% endset %}",
      "{% set a %}b{% endset junk %}", "{% if a junk %}{% endif %}",
      "{% if a %}{% elif b junk %}{% endif %}", "{% if a %}{% else junk %}{% endif %}",
      "{% if a %}{% endif junk %}", "{% for a in b junk %}{% endfor %}",
      "{% for a in b %}{% else junk %}{% endfor %}", "{% for a in b %}{% endfor junk %}",
      "{% for a in b %}{% break junk %}{% endfor %}",
      "{% for a in b %}{% continue junk %}{% endfor %}",
      "{% generation junk %}{% endgeneration %}", "{% generation %}{% endgeneration junk %}" } do
      refused(template, "line 1: expected the end of the tag, got 'junk'")
    end
    refused("{% set a = 1, 2 %}", "expected the end of the tag, got ','")
    refused("{% if a %}{% else if b %}{% endif %}", "expected the end of the tag, got 'if'")
    refused(("("):rep(10) .. "{{ " .. ("("):rep(100000) .. " }}", "line 1")
  end)

  it("computes what Jinja computes", function()
    for template, want in pairs {
      ["{{ 'a,b,c'.split(',', 1) | length }}"] = "2", ["{{ 'a,b'.split(',', -1) | length }}"] = "2",
      ["{{ 'aaa'.replace('a', 'b', 1) }}"] = "baa", ["{{ 'aaa' | replace('a', 'b', 2) }}"] = "bba",
      ["{{ 'abc'.startswith(('x', 'a')) }}"] = "True", ["{{ 'abc'.endswith(('b',)) }}"] = "False",
      ["{{ 1 == 1 == 1 }}"] = "True", ["{{ 1 < 2 > 3 }}"] = "False",
      ["{{ 1 == 1 in [1] }}"] = "True",
      ["{% for x in [1, 2] %}{{ loop.revindex }}{{ loop.revindex0 }}{% endfor %}"] = "2110",
      ["{% if true +%}\na{% endif %}\nb"] = "\nab", ["{# a +#}\nb"] = "\nb",
      ["{{ -1 | string + 'a' }}"] = "-1a", ["{{ 0.1 + 0.2 }}"] = "0.30000000000000004",
      ["{{ 100000000000000 * 10 }}"] = "1000000000000000",
      ["{{ ' \226\128\131a b ' | trim }}|{{ 'xax'.rstrip('x') }}|{{ ' '.lstrip() }}"] = "a b|xa|",
    } do assert.equal(want, jinja.read(template)({}), template) end
  end)

  it("neither hangs nor fills the memory", function()
    local double = "{% set x = 'aaaaaaaa' %}" .. ("{% set x = x + x %}"):rep(60) .. "{{ x }}"
    assert.matches("a text has more than", select(2, jinja.read(double)({})))
    local nested = ("{% for x in m %}"):rep(12) .. "a" .. ("{% endfor %}"):rep(12)
    local ten = jinja.list { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 }
    assert.matches("more than 1000000 operations", select(2, jinja.read(nested)({ m = ten })))
    local many = {}
    for i = 1, 1e4 do many[i] = i end
    for _, value in ipairs { "x.strip()", "x.upper()", "x.split('a')", "x.split('zz')", "part in x",
      "x.startswith(x)", "many + many" } do
      local began = os.clock()
      local template = ("{%% for i in many %%}{%% set y = %s %%}{%% endfor %%}"):format(value)
      assert.matches("more than 1000000 operations", select(2, jinja.read(template) {
        x = ("a "):rep(2 ^ 19), part = ("a "):rep(2 ^ 18) .. "b", many = jinja.list(many) }))
      assert.is_true(os.clock() - began < 5, value)
    end
  end)

  it("needs messages and a template", function()
    local t = tokenizer(nil)
    assert.error_matches(function() t:apply_chat_template { { role = "user" } } end,
      "has no chat template: neither chat_template.jinja nor a chat_template")
    t = tokenizer "x"
    assert.error_matches(function() t:apply_chat_template "hello" end,
      "expected a list of messages { role =, content = }, got")
  end)
end)
