-- Child processes. Used by contests, `engine replay --verify`, `engine plan`, `engine doctor`, the
-- writers that run gnuplot or cmark-gfm, and dist/agreement.lua (which quotes a command line).
local M_ffi = require "engine.base.ffi"

local C, check = M_ffi.C, M_ffi.check

local M = {}

--- Starts a program: words[1], found in PATH, with the other words as its arguments. Its output is
--- appended to the file `log`. The program gets SIGTERM when this process ends. Returns a number
--- that status() and stop() take.
function M.start(words, log)
  local list, process = M_ffi.new("const char *[?]", #words + 1), M_ffi.new("int[1]")
  for i, word in ipairs(words) do list[i - 1] = word end
  check(C.eng_process_start(process, list, log), true)
  return process[0]
end

--- Returns the exit status of a program (128 + N after signal N), or nil while the program runs.
--- After this function has returned a status, do not call it again for the same program.
function M.status(process)
  local status = C.eng_process_status(process)
  return status >= 0 and status or nil
end

--- Sends SIGTERM to the process group of a program.
function M.stop(process) C.eng_process_signal(process, 15) end

--- Quotes a word for the shell. The word may contain any characters.
function M.quoted(word) return "'" .. tostring(word):gsub("'", "'\\''") .. "'" end

--- Returns the standard output of a shell command as text; "" if the shell cannot be started.
function M.output(command)
  local pipe = io.popen(command)
  local text = pipe and pipe:read("*a") or ""
  if pipe then pipe:close() end
  return text
end

--- Finds the last line "engine: MESSAGE" in the file `log`, and returns MESSAGE. If there is none,
--- returns the last line that is not blank, or nil. Reads only the last 8 KiB.
function M.last_words(log)
  local file = io.open(log, "rb")
  if not file then return nil end
  file:seek("set", math.max(0, file:seek("end") - 8192))
  local last, problem
  for line in file:read("*a"):gmatch("[^\n]*%S[^\n]*") do
    last, problem = line, line:match("^engine: (.*)") or problem
  end
  file:close()
  return problem or last
end

return M
