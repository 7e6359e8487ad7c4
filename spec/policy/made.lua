-- What the specs of policies share: policies from a few lines of Lua, and one record for all.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local assert = require "luassert"

local M = {}

local record = M_ffi.new("eng_record")
M.record = record

function M.reset_record()
  M_ffi.ffi.fill(record, M_ffi.ffi.sizeof("eng_record"))
  record.first_bad, record.norm_ref = -1, 0 / 0
end

function M.load(source, options)
  return engine.policy.load({ source = source, file = "p.lua" }, options)
end

-- A policy whose decide(state, record, options) has this body. It starts at scale 8 with state {
-- scale = 8, n = 0 }.
function M.with(body, head)
  return M.load((head or "") .. " return { init = function() return { scale = 8, n = 0 } end,\n " ..
    "decide = function(state, record, options) " .. body .. " end }")
end

function M.decide(p, overflow, stats)
  record.scale, record.overflow = p:scale(), overflow and 1 or 0
  return p:decide(record, stats)
end

-- Expects decide to fail with a reason that contains `text` and to leave scale and state unchanged.
function M.fails(p, text)
  local scale, before = p:scale(), p:save():gsub("failures=%d+", "")
  for _, overflow in ipairs { false, true } do
    local v = M.decide(p, overflow)
    assert.are.equal(1, v.failed)
    assert.are.equal(scale, v.scale)
    assert.are.equal(overflow and "skip" or "step", v:what())
    assert.truthy(v:why():find(text, 1, true), ("expected '%s' in '%s'"):format(text, v:why()))
    assert.are.equal(before, (p:save():gsub("failures=%d+", "")))
  end
  return true
end

-- "256x3 512" -> { 256, 256, 256, 512 }
function M.numbers(text)
  local list = {}
  for word in text:gmatch("%S+") do
    local value, times = word:match("^(.-)x(%d+)$")
    for _ = 1, tonumber(times) or 1 do list[#list + 1] = tonumber(value or word) end
  end
  return list
end

return M
