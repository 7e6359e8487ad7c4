-- Feeds mutated arguments and config files to engine.config: each must be accepted or refused with
-- an error text. Deterministic. Usage: engine spec/fuzz/config.lua [rounds [seed]]
local config = require "engine.base.config"
local draws = require "spec.fuzz.draws"

local rounds, seed = tonumber(arg[1]) or 6000, tonumber(arg[2]) or 1
local draw = draws.draw
draws.start(seed)

local defaults = { lr = 1, steps = 10, amp = true, name = "x", layers = { 1, 2 },
  model = { width = 4, deep = { p = 0.5 } } }

local seeds = {
  text = { "lr=3e-4", "steps=2^15", "amp=false", "name=a b=c", "layers=1,2,3",
    "model.deep.p=(1+2)/3", "lr=-inf", "x.y.z=", "lr=0x10" },
  json = {
    '{"lr":1,"model":{"width":2,"deep":{"p":0.25}},"layers":[1,2],"amp":true,"name":"\\u00e9"}',
    "[]", "null", '{"lr":null}' },
  lua = { "return { lr = 2^3, model = { width = 1 }, layers = { 1 } }", "return {}",
    "local x = 1 return { lr = x, [1] = 2 }" },
}

local words = { "(", ")", "^", "..", "=", ",", "{", "}", "[", "]", '"', "\\", "\0", "1e999", "-",
  "nan", "inf", "lr", "model.", "return",
                "function() end", "0x", "\255", "null", ("("):rep(300), ("["):rep(300),
                ("9"):rep(400) }

local function mutate(text)
  for _ = 1, draw(4) do
    local at = draw(#text + 1)
    local kind = draw(3)
    if kind == 0 then
      text = text:sub(1, at) .. words[draw(#words) + 1] .. text:sub(at + 1)
    elseif kind == 1 then
      text = text:sub(1, at) .. text:sub(at + 1 + draw(5))
    else
      text = text:sub(1, at) .. string.char(draw(256)) .. text:sub(at + 2)
    end
  end
  return text
end

local types = { lr = "number", steps = "number", amp = "boolean", name = "string", layers = "table",
  model = "table" }
local accepted, base = 0, os.tmpname()
local in_memory = io.open("/dev/shm") and base:gsub("^.*/", "/dev/shm/") or base

for round = 1, rounds do
  local kind = ({ "text", "text", "json", "lua" })[draw(4) + 1]
  local input = mutate(seeds[kind][draw(#seeds[kind]) + 1])
  local argument = input
  -- A mutated Lua file is a program; one with a loop could run forever and is skipped.
  local runs_long = kind == "lua" and (input:find("while", 1, true) or input:find("for", 1, true)
    or input:find("repeat", 1, true) or input:find("goto", 1, true))
  if kind ~= "text" and not runs_long then
    local path = in_memory .. "." .. kind
    local file = assert(io.open(path, "wb"))
    file:write(input)
    file:close()
    argument = "config=" .. path
  end
  local ok, result = pcall(config.parse, defaults, { argument })
  if ok then
    accepted = accepted + 1
    for name, expected in pairs(types) do
      if type(result[name]) ~= expected then
        error(("round %d: %s became a %s from %q"):format(round, name, type(result[name]), input))
      end
    end
    if result.lr ~= result.lr then error(("round %d: NaN from %q"):format(round, input)) end
  elseif type(result) ~= "table" or not tostring(result):find("^config: ") then
    error(("round %d: expected an error 'config: ...', got %s from %q"):format(round,
      tostring(result), input))
  end
end

os.remove(base)
for _, kind in ipairs { ".json", ".lua" } do os.remove(in_memory .. kind) end
print(("config: %d inputs, %d accepted, the others refused with a message"):format(rounds,
  accepted))
