-- The engine's side of tokenizer.py: engine tokenizer.lua FOLDER. Compares ids and decoded texts,
-- and prints a table of differences and speeds.
local engine = require "engine"
local cjson = require "cjson"
local ffi = require "ffi"

ffi.cdef "int memcmp(const void *a, const void *b, size_t size);"
local clock = os.clock              -- processor time, as on the other side

local folder = ...

local function read(name)
  local file = assert(io.open(folder .. "/" .. name, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

local function numbers(name)
  local text = read(name)
  return ffi.cast("const uint32_t *", text), #text / 4, text
end

-- Splits a file into texts; another file holds their sizes in bytes (u32).
local function texts(name, sizes_name)
  local sizes, n, keep = numbers(sizes_name)
  local text, list, at = read(name), {}, 1
  for i = 1, n do
    list[i] = text:sub(at, at + sizes[i - 1] - 1)
    at = at + sizes[i - 1]
  end
  return list, keep
end

local docs = texts("text", "sizes")
local bytes = 0
for _, doc in ipairs(docs) do bytes = bytes + #doc end
print(("%d documents, %.1f MB"):format(#docs, bytes / 1e6))
print(("%-22s %9s %7s %7s %12s %12s %7s"):format("tokenizer", "tokens", "ids", "texts",
  "theirs MB/s", "ours MB/s", "ratio"))

local function differ(name, what, i, got, want, doc)
  if os.getenv "SHOW" then
    io.stderr:write(("%s: %s of document %d differ\n  got  %s\n  want %s\n  text %q\n"):format(name,
      what, i, got, want, doc:sub(1, 300)))
  end
end

local function around(ids, from, n, at)
  local list = {}
  for k = math.max(0, at - 3), math.min(n - 1, at + 5) do list[#list + 1] = ids[from + k] end
  return table.concat(list, " ")
end

local failed = false
for _, row in ipairs(cjson.decode(read "rows.json")) do
  local t = engine.tokenizer(("%s/%d.json"):format(folder, row.number))
  local start = clock()
  for _, doc in ipairs(docs) do t:encode_memory(doc) end
  local seconds = clock() - start
  local ids, total, keep = numbers(row.number .. ".ids")
  local counts, _, keep_counts = numbers(row.number .. ".counts")
  local skip, keep_skip = texts(row.number .. ".skip", row.number .. ".skip.sizes")
  local kept, keep_kept = texts(row.number .. ".keep", row.number .. ".keep.sizes")
  local at, bad_ids, bad_texts = 0, 0, 0
  for i, doc in ipairs(docs) do
    local got, n = t:encode_memory(doc)
    local want = counts[i - 1]
    local same = n == want and ffi.C.memcmp(got, ids + at, n * 4) == 0
    if not same then
      bad_ids = bad_ids + 1
      local k = 0
      while k < n and k < want and got[k] == ids[at + k] do k = k + 1 end
      if bad_ids < 6 then
        local near, theirs = {}, {}
        for j = math.max(0, k - 3), math.min(n, k + 6) - 1 do near[#near + 1] = t:token(got[j]) end
        for j = math.max(0, k - 3), math.min(want, k + 6) - 1 do
          theirs[#theirs + 1] = t:token(ids[at + j])
        end
        differ(row.name, "ids", i, around(got, 0, n, k) .. "  " .. table.concat(near, "|"),
          around(ids, at, want, k) .. "  " .. table.concat(theirs, "|"), doc)
      end
    end
    local list = {}
    for k = 0, want - 1 do list[k + 1] = ids[at + k] end
    local a, b = t:decode(list), t:decode(list, { special = true })
    if a ~= skip[i] or b ~= kept[i] then
      bad_texts = bad_texts + 1
      if bad_texts < 4 then
        differ(row.name, "texts", i, ("%q"):format(b:sub(1, 200)),
          ("%q"):format(kept[i]:sub(1, 200)), doc)
      end
    end
    at = at + want
  end
  print(("%-22s %9d %7d %7d %12.2f %12.2f %7.2f"):format(row.name, total, bad_ids, bad_texts,
    bytes / 1e6 / row.encode, bytes / 1e6 / seconds, row.encode / seconds))
  failed = failed or bad_ids + bad_texts > 0
  assert(keep and keep_counts and keep_skip and keep_kept)
end
os.exit(failed and 1 or 0)
