-- The names of the policy contract, as the core lists them (core/record.def and the fields of a
-- verdict): every need is of one kind, and policies/README.md has each name, and no other.
local C = require("engine.base.ffi").C
local helper = require "spec.helper"
local names = require "engine.policy.names"

local README = helper.read("policies/README.md")

-- Returns the names in the first column of the table under a heading of policies/README.md, sorted.
local function documented(heading)
  local list = {}
  local section = README:match("\n## " .. heading .. "\n(.-)\n## ")
  for row in section:gmatch("\n| ([^|]+) |") do
    for name in row:gmatch("`([%w_]+)`") do list[#list + 1] = name end
  end
  table.sort(list)
  return list
end

local function of_core(kind)
  local list = {}
  for _, entry in ipairs(names) do
    if entry[kind] then list[#list + 1] = entry.name end
  end
  table.sort(list)
  return list
end

describe("the names that policies use", function()
  it("are documented as fields of the record and of a verdict", function()
    assert.same(of_core "record", documented "The record")
    assert.same(of_core "verdict", documented "The verdict")
  end)

  it("are documented as fields of a tensor's statistics", function()
    local text = README:match("\n| `tensors` | ([^\n]+)") .. README:match("\n## FP8\n(.*)")
    for _, entry in ipairs(names) do
      if entry.tensor then assert.matches("%f[%w_]" .. entry.name .. "%f[^%w_]", text) end
    end
  end)

  it("are documented as needs", function()
    local row = README:match("\n| `needs` | ([^\n]+)")
    for _, entry in ipairs(names) do
      -- README.md mentions `signals` with the record; needs need not list it
      if entry.listed and entry.name ~= "signals" then
        assert.matches("`" .. entry.name .. "`", row, 1, true)
      end
    end
  end)

  it("have needs of one kind each", function()
    local kinds = { C.ENG_NEED_GRADIENTS, C.ENG_NEED_TENSORS, C.ENG_NEED_NORM_REF,
      C.ENG_NEED_UPDATE_NORMS, C.ENG_NEED_SIGNALS, C.ENG_NEED_VERDICT }
    local all, sum = 0, 0
    for _, entry in ipairs(names) do all = bit.bor(all, entry.need) end
    for _, kind in ipairs(kinds) do
      assert.equal(0, bit.band(sum, kind), "two kinds share a need")
      sum = bit.bor(sum, kind)
    end
    assert.equal(all, sum, "engine_policy.h: a need is in no mask, or a mask has an unused bit")
  end)
end)
