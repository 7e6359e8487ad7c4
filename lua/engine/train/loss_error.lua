-- Returns the message of an error in a loss function, extended so that a user can find the mistake.
-- If the message names no line in the function (after a tail call it does not), adds the function's
-- place. If something was nil, adds the names of the batch's fields. loss: the user's function, or
-- false for the default loss, whose place would not help. Called by trainer.lua.
local M_ffi = require "engine.base.ffi"
local nearest = require "engine.base.nearest"

local C = M_ffi.C

return function(message, loss, batch)
  local at = type(loss) == "function" and debug.getinfo(loss, "S")
  if type(message) ~= "string" or C.eng_interrupted() > 0 then return message end
  local file, line = message:match("^([^\n]-):(%d+): ")
  local notes = {}
  if at and (file ~= at.short_src or tonumber(line) < at.linedefined
    or tonumber(line) > at.lastlinedefined) then
    notes[1] = ("in the loss function at %s:%d"):format(at.short_src, at.linedefined)
  end
  if message:find("got nothing", 1, true) or message:find("(a nil value)", 1, true) then
    notes[#notes + 1] = "the fields of the batch are " .. table.concat(nearest.keys(batch), " ")
  end
  if #notes == 0 then return message end
  local first, rest = message:match("^([^\n]*)(.*)$")
  return first .. "; " .. table.concat(notes, "; ") .. rest
end
