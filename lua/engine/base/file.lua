-- Reads small files, maps large ones, writes and removes files, and lists folders. The core reads
-- safetensors files itself. Used by most folders.
local M_ffi = require "engine.base.ffi"

local C, fail = M_ffi.C, M_ffi.fail

local file = {}
local PATH_BYTES = 2 ^ 14      -- the most bytes of the working folder's path

--- These three functions return whether a path exists, whether it is a regular file, and whether it
--- is a folder. They follow links. A pipe or a device exists, but is neither a file nor a folder.
function file.exists(path) return C.eng_file_kind(path) ~= C.ENG_FILE_NONE end
function file.is_file(path) return C.eng_file_kind(path) == C.ENG_FILE_REGULAR end
function file.is_folder(path) return C.eng_file_kind(path) == C.ENG_FILE_FOLDER end

--- Returns the working folder, as the environment variable PWD spells it if PWD is right: the
--- variable keeps the names of links. Returns nil if the folder has no path, for example because it
--- was removed.
function file.working_folder()
  local named, buffer = os.getenv "PWD", M_ffi.new("char[?]", PATH_BYTES)
  if named and named:sub(1, 1) == "/" and C.eng_file_stamp(named) == C.eng_file_stamp(".")
    and file.is_folder(named) then return named end
  return C.eng_file_working_folder(buffer, PATH_BYTES) == 0 and M_ffi.string(buffer) or nil
end

--- Returns the absolute path of `path`. If the working folder has no path, a relative path only
--- gets "./" in front.
function file.absolute(path)
  if path:sub(1, 1) == "/" then return path end
  return (file.working_folder() or "."):gsub("/$", "") .. "/" .. path
end

local LARGEST = 2 ^ 20
local REFUSED = { [C.ENG_FILE_FOLDER] = "a folder", [C.ENG_FILE_OTHER] = "not a regular file" }

--- Returns the text of a file of up to 1 MiB, or nil and the reason. Refuses pipes and devices,
--- because reading one could block or never end.
function file.read(path)
  local kind = REFUSED[C.eng_file_kind(path)]
  if kind then return nil, path .. ": it is " .. kind end
  local opened, why = io.open(path, "rb")
  if not opened then return nil, why end
  local text, problem = opened:read(LARGEST + 1)
  opened:close()
  if problem then return nil, path .. ": " .. problem end
  text = text or ""
  if #text > LARGEST then return nil, path .. ": it is larger than 1 MiB" end
  return text
end

--- Maps a file into memory, or raises an error. Returns an eng_mapping { data, size }; the file
--- stays mapped until this object is collected.
function file.map(path)
  local mapping = M_ffi.new("eng_mapping")
  M_ffi.check(C.eng_file_map(mapping, path))
  return M_ffi.ffi.gc(mapping, C.eng_file_unmap)
end

--- Writes a file; "-" is standard output. text: a string, or a function(put) that calls put(string)
--- for each piece. Returns the result of that function. Raises an error if the write fails.
function file.write(path, text)
  local target, why = io.stdout, nil
  if path ~= "-" then target, why = io.open(path, "wb") end
  if not target then error("cannot write " .. tostring(why), 0) end
  local problem
  local function put(piece)
    local good, message = target:write(piece)
    if not good then problem = problem or message end
  end
  local result
  if type(text) == "function" then result = text(put) else put(text) end
  local closed, message = target[path == "-" and "flush" or "close"](target)
  if problem or not closed then fail("cannot write %s: %s", path, tostring(problem or message)) end
  return result
end

--- Removes a file, or a folder with all that it holds. Removes links instead of following them.
function file.remove(path)
  path = path:match("^(.*[^/])/*$") or path                -- "link/" would be the link's target
  local is_full = C.eng_file_remove(path) == C.ENG_ERR_STATE        -- a folder, never a link
  for _, name in ipairs(is_full and file.names(path) or {}) do file.remove(path .. "/" .. name) end
  M_ffi.check(C.eng_file_remove(path))
end

--- Returns the names in a folder, sorted by bytes; or nil and the reason.
function file.names(path)
  local listing = M_ffi.new("eng_listing *[1]")
  if C.eng_file_list(listing, path) ~= 0 then return nil, M_ffi.message() end
  local names = {}
  while C.eng_listing_name(listing[0], #names) ~= nil do
    names[#names + 1] = M_ffi.string(C.eng_listing_name(listing[0], #names))
  end
  C.eng_listing_free(listing[0])
  return names
end

return file
