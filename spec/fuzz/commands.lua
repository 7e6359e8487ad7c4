-- Runs the engine's commands, in this process or as processes, and reports what is wrong with their
-- output. Used by histories.lua and texts.lua.
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"
local ffi, C = M_ffi.ffi, M_ffi.C

local M = { count = 0, failures = 0, slowest = 0, print = print }

local LIMIT = 5                     -- seconds of processor time a command may take
local shown, said
local function listener(list)
  return { write = function(self, ...)
    for i = 1, select("#", ...) do list[#list + 1] = tostring((select(i, ...))) end
    return self
  end, flush = function() return true end, setvbuf = function() return true end }
end

local function text_problem(text)
  if text:find("%.lua:%d+:") or text:find("attempt to", 1, true)
    or text:find("stack traceback", 1, true) then
    return "a Lua error: " .. text
  end
  if text:gsub("\n$", ""):find("\n", 1, true) then return "several lines: " .. text end
end

local room = ffi.new("char[?]", 2 ^ 22)
--- Describes the first place in a text that a terminal would execute, or returns nil.
function M.unsafe(text)
  text = text:gsub("\27%[[%d;]*[mKG]", "")             -- the engine's own colours
  local length = tonumber(C.eng_text_shown(room, 2 ^ 22, text, #text, true))
  if length == #text and length < 2 ^ 22 and ffi.string(room, length) == text then return nil end
  local safe, at = ffi.string(room), 1
  while text:byte(at) == safe:byte(at) do at = at + 1 end
  return ("unsafe text at byte %d: %q"):format(at, text:sub(math.max(1, at - 40), at + 40))
end

--- Runs f with stdout and stderr caught; returns what is wrong with the output, or nil. A message
--- may begin with a position in a policy's file. If `arguments` contains "attempt to", messages are
--- not checked for Lua errors and line breaks.
function M.problem_of(f, arguments)
  shown, said = {}, {}
  local began, out, err, write = os.clock(), io.stdout, io.stderr, io.write
  io.stdout, io.stderr = listener(shown), listener(said)      -- luacheck: ignore
  io.write = function(...) return io.stdout:write(...) end     -- luacheck: ignore
  _G.print = function(...)                                     -- luacheck: ignore
    for i = 1, select("#", ...) do shown[#shown + 1] = tostring((select(i, ...))) end
    shown[#shown + 1] = "\n"
  end
  local good, message = pcall(f)
  io.stdout, io.stderr, io.write, _G.print = out, err, write, M.print      -- luacheck: ignore
  local took = os.clock() - began
  M.slowest, M.count = math.max(M.slowest, took), M.count + 1
  local text = table.concat(said) .. (good and "" or tostring(message))
  text = text:gsub("spec/fuzz/[%w_]+%.lua:%d+: ", "")
  local place = text:find("/mine.lua:", 1, true)           -- a policy's file
  if place and place < 200 then text = text:gsub("^.-/mine%.lua:%d+: ", "") end
  if text ~= "" then M.failures = M.failures + 1 end
  if took > LIMIT then return ("took %.1f s of processor time"):format(took) end
  return M.unsafe(table.concat(shown) .. text)
    or not (arguments and arguments:find("attempt to")) and text_problem(text) or nil
end

--- Prints a fuzzer's counts and ends the process, with status 1 if something was wrong.
function M.finish(name, rounds, wrong)
  print(("%s: %d rounds, %d commands, %d with an error in one line; slowest %.2f s; %d wrong")
    :format(name, rounds, M.count, M.failures, M.slowest, wrong))
  os.exit(wrong == 0 and 0 or 1)
end

--- Runs the command as a process; returns what is wrong with it, or nil.
function M.problem_of_process(words)
  local quoted = { "timeout -k 1 60", helper.quote(helper.engine) }
  for _, word in ipairs(words) do quoted[#quoted + 1] = helper.quote(word) end
  local began = C.eng_clock()
  local result = helper.shell(table.concat(quoted, " "))
  if result.code ~= 0 and result.code ~= 1 then
    return ("as a process, it ended with %d after %.1f s: %s"):format(result.code,
      C.eng_clock() - began, result.err)
  end
  return M.unsafe(result.out .. result.err) or text_problem(result.err)
end

return M
