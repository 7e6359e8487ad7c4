-- The syntax of Lua patterns: what pattern.problem accepts never raises an error in string.find,
-- and everything that takes a pattern refuses a malformed one in one line.
local engine = require "engine"
local pattern = require "engine.base.pattern"

local nn = engine.nn

describe("a Lua pattern", function()
  it("is accepted or refused with its mistake", function()
    local function before(name)
      return ("its %s refers to a capture that is not closed before it"):format(name)
    end
    for text, problem in pairs {
      ["blocks("] = "its '(' has no ')'", ["a)"] = "its ')' has no '('",
      ["b["] = "its '[' has no ']'", ["b[]"] = "its '[' has no ']'",
      ["b[^]"] = "its '[' has no ']'", ["[%]"] = "its '[' has no ']'",
      ["%f[a"] = "its '[' has no ']'", ["b%"] = "it ends with '%'", ["b%1"] = before "%1",
      ["(%1)"] = before "%1", ["(a)%2"] = before "%2", ["(a)%0"] = before "%0",
      ["a%b("] = "its %b needs two characters", ["%fa"] = "its %f needs a set in brackets",
      [("()"):rep(33)] = "it has more than 32 captures",
      [("a?b"):rep(200)] = "it has more than 199 of the characters ( ) * + - ?",
    } do assert.equal(problem, pattern.problem(text), text) end
    for _, text in ipairs { "", "^blocks%.%d+%.", "[]]", "[^]]", "[%]]", "((a)%2)%1", "%b()",
      "%f[%w]a", "a*(b-)$", "()%(", "a%%", "[(]", "x\0(", ("a?b"):rep(199) } do
      assert.is_nil(pattern.problem(text), text)
    end
  end)

  it("is refused if a match could run for minutes", function()
    for _, text in ipairs { ("a*"):rep(30) .. "b", ("a?"):rep(30) .. "b", (".-"):rep(6) .. "Z",
      ("(%w+)"):rep(6) .. "%.", "^" .. ("[%w_]*%a"):rep(9), ("(a*)%1"):rep(9),
      (".*%b()"):rep(9), ("%d*%a*"):rep(9), (".*a"):rep(6) .. ".?.?X" } do
      assert.matches("^a match could take minutes", pattern.problem(text) or "", 1, false, text)
    end
    for _, text in ipairs { ".*model.*layers.*attn.*q_proj.*weight.*", "%w+%.?%w*%.?%w*%.?weight",
      ".*blocks.*attn.*qkv.*weight", ".*model.*layers.*self_attn.*q_proj.*lora_A.*weight",
      (".*a"):rep(5) .. "X", "^.-%.(.-)%.(.-)$", ".*.*.*",
      ("%d+%."):rep(60), ("%d+%a+"):rep(60) .. "!", ("%.?%d"):rep(60), "[%w_]*",
      "%f[%w]a*%f[%W]", ("%b()"):rep(60) } do
      assert.is_nil(pattern.problem(text), text)
    end
  end)

  it("that is accepted is searched for in little time", function()
    math.randomseed(2)
    local signs = { "a", "b", ".", "%a", "%d", "[ab]", "(a)", "%1", "%.", "*", "+", "-", "?", "*" }
    local name, most, slow = ("a"):rep(40) .. ("ab"):rep(10), 0, nil
    for i = 1, 3000 do
      local parts = {}
      for k = 1, math.random(8, 24) do parts[k] = signs[math.random(#signs)] end
      local text = i == 1 and (".*a"):rep(5) .. ".?X" or table.concat(parts) .. "Z"
      if not pattern.problem(text) then
        local began = os.clock()
        name:find(text)
        if os.clock() - began > most then most, slow = os.clock() - began, text end
      end
    end
    assert.is_true(most < 1, ("%s took %g s"):format(slow, most))
  end)

  it("that is accepted raises no error, whatever the subject", function()
    math.randomseed(1)
    local signs = { "a", "b", "f", "1", "2", "(", ")", "[", "]", "%", "^", "$", "*", "-", "?", "+",
      ".", "\0" }
    local function made(most)
      local parts = {}
      for i = 1, math.random(0, most) do parts[i] = signs[math.random(#signs)] end
      return table.concat(parts)
    end
    local subjects, refused = {}, 0
    for i = 1, 40 do subjects[i] = made(8) end
    for _ = 1, 20000 do
      local text = made(8)
      local problem, raised = pattern.problem(text)
      for _, subject in ipairs(subjects) do
        raised = raised or not pcall(string.find, subject, text)
      end
      assert.is_false(raised and not problem, text)
      refused = refused + (raised and 1 or 0)
    end
    assert.is_true(refused > 1000)
  end)
end)

describe("a malformed pattern", function()
  local function model() return nn.sequential { nn.linear(4, 4), nn.linear(4, 4) } end
  local function trainer(more)
    local net = model()
    local options = { model = net, steps = 1, log = "quiet", attach = false,
      optimizer = engine.optim.sgd(net, { lr = 0.1 }), loss = function() end,
      data = { next = function() return {} end } }
    for key, value in pairs(more) do options[key] = value end
    return engine.trainer(options)
  end
  local function recipe(fp8) return engine.precision.resolve { base = "fp8_current", fp8 = fp8 } end
  for place, call in pairs {
    ["a recipe's high"] = function(p) recipe { high = { p } } end,
    ["a recipe's layers"] = function(p) recipe { layers = { { match = p } } } end,
    ["the meters"] = function(p)
      engine.optim.sgd(model(), { lr = 0.1, precision = "fp8_current" }).fp8:meters(p)
    end,
    ["nn.lora"] = function(p) nn.lora(model(), { match = { p } }) end,
    ["checkpoint"] = function(p) model():checkpoint(p) end,
    ["an optimizer's group"] = function(p)
      engine.optim.sgd(model(), { lr = 0.1, groups = { { match = p } } })
    end,
    ["the trainer's ref_layers"] = function(p) trainer { ref_layers = p } end,
    ["the trainer's activations"] = function(p) trainer { activations = p } end,
    ["a script's setting"] = function(p)
      engine.config.parse({ only = "" }, { "only=" .. p }, nil, { pattern = "only" })
    end,
  } do
    it("is refused by " .. place, function()
      for _, text in ipairs { "1(", "x[", "1%", "x%1", ("x"):rep(3000) .. "(",
        ("a*"):rep(30) .. "b" } do
        local good, message = pcall(call, text)
        message = tostring(message)
        assert.is_false(good, text)
        assert.matches("Lua pattern", message, 1, true)
        assert.is_true(#message < 400 and not message:find("\n")
          and not message:find("/lua/engine/", 1, true), message)
      end
    end)
  end
end)
