-- string.find, match, gmatch and gsub in a policy: LuaJIT's results within the policy's budget.
local made = require "spec.policy.made"

local with, decide, fails = made.with, made.decide, made.fails

before_each(made.reset_record)

describe("patterns in a policy", function()
  -- Calls whose results in a policy must equal LuaJIT's: function, arguments.
  local cases = {
    { "find", "hello world", "o w" }, { "find", "hello", "l+" }, { "find", "hello", "(l)(l)" },
    { "find", "hello", "()ll()" },
    { "find", "a.b", ".", 2, true }, { "find", "abc", "b", -2 },
    { "find", "abc", "^b" }, { "find", "abc", "c$" },
    { "find", "a$b", "a$b" }, { "match", "key = value", "^(%w+)%s*=%s*(%w+)$" },
    { "match", "blocks.12.attn", "blocks%.(%d+)" },
    { "match", "  trim  ", "^%s*(.-)%s*$" }, { "match", "f(a(b)c)d", "%b()" },
    { "match", "THE (quick) fox", "%f[%a]%a+%f[%A]" },
    { "match", "abcabc", "(abc)%1" }, { "match", "x]y", "[]]" }, { "match", "x-y", "[a%-]" },
    { "match", "2024-01-31", "(%d+)-(%d+)-(%d+)" },
    { "match", "aaa", "a-b" }, { "match", "aaab", "a-b" }, { "match", "[[x]]", "%[%[(.-)%]%]" },
    { "match", "abc", "[^a]+" },
    { "match", "abc", "[a-b]+" }, { "match", "0x1F", "^0[xX](%x+)$" }, { "match", "a\0b", "%z" },
    { "match", "abc", "((a)(b))" },
    { "gsub", "hello world", "o", "0" }, { "gsub", "hello", "", "-" },
    { "gsub", "abc", "%w", "%0%0" }, { "gsub", "abc", "(a)(b)", "%2%1" },
    { "gsub", "hello", "l", "L", 1 }, { "gsub", "abc", "^a", "x" }, { "gsub", "abc", "b*", "x" },
    { "gsub", "a b c", "%s+", "" },
    { "gsub", "100%", "%%", "%%%%" }, { "gsub", "abc", "", "" },
    { "gsub", "abc", "(b", "x" }, { "find", "a\0b", "a\0c" }, { "match", "a\0b", "a\0." },
  }
  local function text(...)
    local parts = {}
    for i = 1, select("#", ...) do parts[i] = tostring((select(i, ...))) end
    return table.concat(parts, "|")
  end
  local function literal(value)
    return type(value) == "string" and ("%q"):format(value):gsub("%z", "\\0") or tostring(value)
  end

  it("match as LuaJIT's do", function()
    for _, case in ipairs(cases) do
      local arguments = {}
      for i = 2, #case do arguments[#arguments + 1] = literal(case[i]) end
      local call = ("string.%s(%s)"):format(case[1], table.concat(arguments, ", "))
      local p = with("local function text(...) local p = {} for i = 1, select('#', ...) do p[i] " ..
        "= tostring((select(i, ...))) end"
        .. " return table.concat(p, '|') end return { scale = 1, reason = text(" .. call .. ") }")
      local v = decide(p)
      assert.are.equal((text(string[case[1]](unpack(case, 2))):gsub("%z.*", "")), v:why(), call)
    end
  end)

  -- LuaJIT built with the 5.2 extensions returns nil here; in policies, find returns the position.
  it("match the empty text after the end", function()
    assert.are.equal(4, decide(with("return { scale = string.find('abc', '', 10) }")).scale)
  end)

  it("are refused if malformed", function()
    for pattern, message in pairs { ["["] = "missing ']'", ["%"] = "ends with '%'",
      ["(a"] = "unfinished capture", ["(a))"] = "invalid pattern capture",
      ["%1"] = "invalid capture index", ["%f"] = "missing '['", ["%b"] = "unbalanced pattern",
      ["[%"] = "missing ']'" } do
      fails(with(("return ('aaa'):find(%q)"):format(pattern)), message)
    end
  end)

  it("work in gmatch and in gsub with tables and functions", function()
    assert.are.equal("a=1;bb=22;",
      decide(with([[local o = "" for k, v in ("a=1, bb=22"):gmatch("(%w+)=(%w+)") do
      o = o .. k .. "=" .. v .. ";" end
      return { scale = 1, reason = o }]])):why())
    assert.are.equal("<x> y <z>", decide(
      with([[return { scale = 1,
        reason = (("x y z"):gsub("%w", { x = "<x>", z = "<z>", y = false })) }]])):why())
    assert.are.equal("2 4 six", decide(
      with([[return { scale = 1,
        reason = (("1 2 six"):gsub("%d", function(d) return d * 2 end)) }]])):why())
    assert.are.equal("5", decide(with(
      [[local n = 0 for _ in ("abcd"):gmatch("") do n = n + 1 end
        return { scale = 1, reason = tostring(n) }]])):why())
  end)
end)
