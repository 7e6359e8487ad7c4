-- Every `sh` and `lua` block of the guides runs as printed, in the order of its page, in a folder
-- of its own that sees ./engine, examples/ and policies/. A Lua block whose first line is a file
-- name in a comment is written to that file; other Lua blocks are run.
local helper = require "spec.helper"

local GUIDES = {}
for path in helper.shell("ls docs/*.md").out:gmatch("docs/([%w_-]+)%.md") do
  GUIDES[#GUIDES + 1] = path
end

-- { language, text, line } of a page.
local function blocks_of(path)
  local list, block, number = {}, nil, 0
  for line in assert(io.lines(path)) do
    number = number + 1
    if block and line == "```" then
      list[#list + 1], block = block, nil
    elseif block then
      block.text = block.text .. line .. "\n"
    elseif line:find("^```") then
      block = { language = line:sub(4), text = "", line = number }
    end
  end
  assert.is_nil(block, path .. ": a code block without an end")
  return list
end

local function absolute(path)
  return (helper.shell("readlink -f " .. helper.quote(path)).out:gsub("%s+$", ""))
end

describe("the guide", function()
  local folder

  before_each(function()
    folder = helper.folder()
    local targets = { engine = helper.engine }
    for _, name in ipairs { "examples", "policies", "core", "README.md" } do
      targets[name] = name
    end
    for name, target in pairs(targets) do
      helper.shell(("ln -s %s %s"):format(helper.quote(absolute(target)),
        helper.quote(folder .. "/" .. name)))
    end
  end)
  after_each(function() helper.remove(folder) end)

  for _, name in ipairs(GUIDES) do
    it(name .. " has blocks that run as printed", function()
      local path = ("docs/%s.md"):format(name)
      for _, block in ipairs(blocks_of(path)) do
        local where = ("%s:%d"):format(path, block.line)
        local file = block.text:match("^%-%- ([%w_-]+%.lua)\n")
        local known = { lua = true, sh = true, text = true }
        assert.is_true(known[block.language] or false,
          where .. ": expected a block of lua, sh or text")
        if block.language == "lua" and file then
          helper.write(folder .. "/" .. file, block.text)
        elseif block.language == "lua" then
          helper.write(folder .. "/block.lua", block.text)
          local result = helper.shell(("cd %s && ./engine block.lua"):format(helper.quote(folder)))
          assert.are.equal(0, result.code, where .. ": " .. result.err)
        elseif block.language == "sh" then
          local start = ("cd %s && set -e && PATH=$PWD:$PATH\n"):format(helper.quote(folder))
          local result = helper.shell(start .. block.text)
          assert.are.equal(0, result.code, where .. ": " .. result.err)
        end
      end
    end)
  end
end)
