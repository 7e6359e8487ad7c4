-- The text by which ranks compare their verdicts (dist/reducer.lua) shows every field of a verdict
-- but `reason` and `log`, so that ranks that decide differently never drift apart unnoticed.
local made = require "spec.policy.made"
local names = require "engine.policy.names"
local reducer = require "engine.dist.reducer"

local TENSORS, GROUPS = { "a.w", "a.b", "b.w" }, { "a", "b" }

-- Two verdicts that differ in one field, for each field; what they have besides `scale`. A new
-- field needs a line here and a part of reducer.verdict_text.
local PAIRS = {
  scale = { "scale = 4", "scale = 2" },
  action = { "action = 'step'", "action = 'skip'" },
  clip = { "clip = 1", "clip = 2" },
  lr_mul = { "lr_mul = 1", "lr_mul = 0.5" },
  scales = { "scales = { a = 2 }", "scales = { b = 2 }" },
  back = { "action = 'rollback', back = 1", "action = 'rollback', back = 2" },
  skip = { "action = 'rollback', skip = 1", "action = 'rollback', skip = 2" },
  clips = { "clips = { a = 1 }", "clips = { a = 0.5 }" },
  lr_muls = { "lr_muls = { a = 1 }", "lr_muls = { a = 2 }" },
  reset_moments = { "reset_moments = 'a.w'", "reset_moments = 'a.b'" },
  update_clip = { "update_clip = 1", "update_clip = 2" },
  spike_clip = { "spike_clip = 1", "spike_clip = 2" },
  logit_muls = { "logit_muls = { ['attn.1'] = 0.5 }", "logit_muls = { ['attn.2'] = 0.5 }" },
  caps = { "caps = { a = 1 }", "caps = { a = 2 }" },
  grad_norms = { "grad_norms = { a = 1 }", "grad_norms = { a = 2 }" },
  bias_step = { "bias_step = 1", "bias_step = 2" },
}
local UNUSED = { reason = true, log = true }           -- only the history keeps these

local stats = require("engine.base.ffi").new("eng_tensor_stats[?]", #TENSORS)
for i = 0, #TENSORS - 1 do stats[i].count, stats[i].sum_squares = 1, 1e4 end

local function text_of(verdict, name, need)
  local p = made.load(("return { name = 'p', needs = { %s }, decide = function() return { %s%s } "
    .. "end, init = function() return { scale = 8 } end }"):format(need and "'" .. name .. "'" or
    "", name == "scale" and "" or "scale = 8, ", verdict))
  p:tensors(TENSORS, { 1, 1, 2 }, GROUPS, true)
  for head = 1, 2 do p:signal("logit_max.attn." .. head, 1) end
  made.reset_record()
  local decided = made.decide(p, false, stats)
  assert.equal(0, decided.failed, decided:why())
  return (reducer.verdict_text(p, made.record, decided, GROUPS, #TENSORS):gsub(" %x+%)$", ")"))
end

describe("the text of a verdict for other ranks", function()
  for _, field in ipairs(names) do
    if field.verdict and not UNUSED[field.name] then
      it("shows " .. field.name, function()
        local pair = assert(PAIRS[field.name], "PAIRS has no verdicts for this field")
        local need = field.need ~= 0
        local one, other = text_of(pair[1], field.name, need), text_of(pair[2], field.name, need)
        assert.are_not.equal(one, other)
        assert.equal(one, text_of(pair[1], field.name, need))
      end)
    end
  end
end)
