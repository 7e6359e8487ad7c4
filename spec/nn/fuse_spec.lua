-- Models read like the mathematics: a forward has at most 6 lines, and only fuse.lua names fused
-- operations and FP8 sites. Which modules fuse is in spec/cpu/residual_norm_spec.lua,
-- spec/cpu/mlp_gelu_spec.lua and spec/fp8/fp8_training_spec.lua.
local engine = require "engine"
local fuse = require "engine.nn.fuse"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"
local devices = require "spec.devices"

local nn, bytes = engine.nn, devices.bytes

--- The lines of every file of engine/nn without comments, as { name = { line, ... } }.
local function sources()
  local list = {}
  local listing = io.popen("ls '" .. M_ffi.home .. "/nn'")
  for name in listing:read("*a"):gmatch("[%w_]+%.lua") do
    list[name] = {}
    for line in io.lines(M_ffi.home .. "/nn/" .. name) do
      table.insert(list[name], (line:gsub("%-%-.*$", ""):gsub("%s+$", "")))
    end
  end
  listing:close()
  return list
end

describe("the modules of engine.nn", function()
  it("have a forward of at most 6 lines", function()
    local forwards = 0
    for name, lines in pairs(sources()) do
      for first, line in ipairs(lines) do
        local class = line:match("^%s*function ([%w_]+)[.:]forward%(")
        if class and not line:find("end$") then
          local indent, n, at = line:match("^%s*"), 0, first + 1
          while lines[at] ~= indent .. "end" do
            if lines[at] ~= "" then n = n + 1 end
            at = at + 1
          end
          assert(n <= 6, ("%s: %s:forward has %d lines"):format(name, class, n))
          forwards = forwards + 1
        elseif class then
          forwards = forwards + 1
        end
      end
    end
    assert(forwards >= 16, forwards .. " forwards found")
  end)

  it("leave fused operations and FP8 sites to fuse.lua", function()
    local names = { ":add_layer_norm", ":add_rms_norm", ":mlp_gelu", ":swiglu_linear", ":swiglu%(",
      "_fp8",
      ":done%(" }
    local found = {}
    for file, lines in pairs(sources()) do
      for i, line in ipairs(lines) do
        for _, name in ipairs(names) do
          if line:find(name) then
            assert(file == "fuse.lua", ("%s:%d names %s"):format(file, i, name))
            found[name] = true
          end
        end
      end
    end
    for _, name in ipairs(names) do assert(found[name], "fuse.lua does not name " .. name) end
  end)
end)

describe("a sum that is left open", function()
  it("is fused into a norm, but not into one with its own forward", helper.in_step(function()
    local x, branch = engine.randn(3, 8), engine.randn(3, 8)
    local norm, other = nn.rms_norm(8), nn.rms_norm(8)
    rawset(other, "forward", function(self, y) return nn.rms_norm.forward(self, y) end)
    local want = bytes(norm(x + branch))
    for _, module in ipairs { norm, other } do
      local sum = fuse.sum(x) + branch
      local ran = tostring(engine.profile(function()
        assert.equal(want, bytes(sum:norm(module)))
        assert.equal(bytes(x + branch), bytes(sum:value()))
      end))
      assert.equal(module == norm, ran:find("add_rms_norm", 1, true) ~= nil)
    end
  end))

  it("is computed at once if a term is a number or broadcasts", helper.in_step(function()
    local x = engine.randn(3, 8)
    for _, branch in ipairs { 2, engine.randn(8) } do
      local sum = fuse.sum(x) + branch
      assert.is_nil(sum.branch)
      assert.equal(bytes(x + branch), bytes(sum:value()))
    end
  end))

  it("is never returned by a block that is called on its own", helper.in_step(function()
    local model = nn.gpt { vocab = 8, context = 4, width = 8, heads = 2, layers = 2 }
    local x = engine.randn(1, 4, 8)
    local y = model.blocks[1](x)
    assert.equal("f32", y.dtype)
    assert.equal(bytes(y), bytes(model.blocks[1](fuse.sum(x), true):value()))
  end))
end)
