-- Writes the reference and the guides as a folder of HTML pages: an index with a search, a page for
-- each area, and a page for each guide. The pages need no other files. Called by `engine help
-- --html FOLDER`.
local M_ffi = require "engine.base.ffi"
local file = require "engine.base.file"
local page = require "engine.docs.page"
local source = require "engine.docs.source"

local C = M_ffi.C

local M = {}

-- The first areas of the index with their titles, in order. All other areas follow; each of them is
-- named after a module.
local AREAS = {
  { "commands", "Commands" },
  { "engine", "engine: steps, scopes, machine" },
  { "tensor", "Tensors" },
  { "nn", "engine.nn: modules and models" },
  { "trainer", "engine.trainer: options and methods" },
  { "contract", "Policy files: fields of policy, record and verdict" },
  { "policies", "Policies" },
  { "environment", "Environment variables" },
  { "operations", "Operations" },
  { "c", "C interface" },
}

local SEARCH = [[
<p><input id="q" placeholder="Search: matmul, record.amax, ENGINE_RANKS ..." autofocus></p>
<ul id="found"></ul>
<script>
const entries = %s;
const q = document.getElementById("q"), found = document.getElementById("found");
q.oninput = () => {
  const words = q.value.toLowerCase().split(/\s+/).filter(w => w);
  const lower = e => e[0].toLowerCase();
  const last = e => lower(e).split(/[.:]/).pop();
  const rank = e => last(e) === words[0] ? 0 : lower(e).includes(words[0]) ? 1 : 2;
  const matches = e => words.every(w => (e[0] + " " + e[2]).toLowerCase().includes(w));
  const hits = words.length ? entries.filter(matches) : [];
  hits.sort((a, b) => rank(a) - rank(b));
  found.replaceChildren(...hits.slice(0, 30).map(e => {
    const item = document.createElement("li"), link = document.createElement("a");
    link.href = e[1]; link.textContent = e[0];
    item.append(link, " " + e[2]);
    return item;
  }));
};
</script>]]

local function page_of(entry)
  return entry.kind == "guide" and (entry.name == "docs" and "guides" or entry.name) .. ".html"
    or "ref-" .. entry.area .. ".html"
end
local function address(entry)
  return entry.kind == "guide" and page_of(entry) or page_of(entry) .. "#" .. entry.name
end

local function entry_html(entry, links)
  local html = {
    ('<h3 id="%s">%s<span class="kind">%s</span></h3>'):format(entry.name, page.escape(entry.name),
      entry.kind),
    ('<pre class="signature">%s</pre>'):format(page.escape(entry.signature)),
  }
  if entry.kind == "command" then html[2] = "<pre>" .. page.escape(entry.text) .. "</pre>"
  else html[#html + 1] = page.prose(entry.text, links) end
  if entry.example then html[#html + 1] = "<pre>" .. page.escape(entry.example) .. "</pre>" end
  html[#html + 1] = ('<div class="where">%s</div>'):format(entry.where)
  return table.concat(html, "\n")
end

-- Returns the areas in order, with their entries: { name, title, entries }.
local function areas_of(index)
  local list, by_name = {}, {}
  local function area(name, title)
    if not by_name[name] then
      by_name[name] = { name = name, title = title or "engine." .. name, entries = {} }
      list[#list + 1] = by_name[name]
    end
    return by_name[name]
  end
  for _, a in ipairs(AREAS) do area(a[1], a[2]) end
  for _, entry in ipairs(index.entries) do
    if entry.kind ~= "guide" then
      local entries = area(entry.area).entries
      table.insert(entries, entry.kind == "Lua module" and 1 or #entries + 1, entry)
    end
  end
  return list
end

-- ------------------------------------------------------------------ the folder

-- The state while the pages are written: { index, folder, guides, warnings, links, anchors, pending
-- }. links: the name of an entry -> its address. anchors: the set of the addresses written so far,
-- PAGE and PAGE#ANCHOR. pending: the links in guides that M.write will check, a list of { path of
-- the guide, target in the guide, address in the pages }.
local Site = {}
Site.__index = Site

-- Writes the page `name`, a file name, and notes its anchors.
function Site:publish(name, title, body)
  if self.anchors[name] then self:warn("two pages are called %s: %s", name, title) end
  for id in body:gmatch('id="([^"]*)"') do self.anchors[name .. "#" .. id] = true end
  self.anchors[name] = true
  file.write(self.folder .. "/" .. name, page.frame(title, body))
end

function Site:warn(format, ...) self.warnings[#self.warnings + 1] = format:format(...) end

-- Converts `target`, a link in the guide at `path`, to an address in the pages or on the web.
-- Returns nil if there is no page for it. A link between guides, or to a missing file, is also
-- queued for the check in M.write.
function Site:resolve(path, target)
  if target:find("^%a+:") then return target end
  local name, anchor = target:match("^([^#]*)(#?.*)$")
  local full = name == "" and path or path:match("^(.-)[^/]*$") .. name
  repeat local n; full, n = full:gsub("[^/]+/%.%./", "", 1) until n == 0
  for _, other in ipairs(self.guides) do
    if other.where == full .. ":1" then
      table.insert(self.pending, { path, target, page_of(other) .. anchor })
      return page_of(other) .. anchor
    end
  end
  if not source.path(full) then table.insert(self.pending, { path, target, "" }) end
end

-- Writes a page for each guide. Then sorts the guides for the index: they come in the order of the
-- links in docs/README.md. A guide without such a link, like docs/README.md itself, comes first.
function Site:publish_guides()
  for _, entry in ipairs(self.guides) do
    local path = entry.where:match("^(.*):%d+$")
    local function resolve(target) return self:resolve(path, target) end
    self:publish(page_of(entry), entry.signature, page.markdown(path, self.links, resolve))
  end
  local contents = file.read(source.path "docs/README.md")
  local function place(entry)
    local link = ("(../" .. entry.where:match("^(.*):%d+$")):gsub("^%(%.%./docs/", "(")
    return contents:find(link, 1, true) or 0
  end
  table.sort(self.guides, function(a, b) return place(a) < place(b) end)
end

-- Writes a page for each area, and the index of all pages, with a search.
function Site:publish_reference()
  local body, rows = { "<h1>engine</h1>", "", "<h2>Guides</h2><ul>" }, {}
  local function item(address_of, text)
    body[#body + 1] = ('<li><a href="%s">%s</a></li>'):format(address_of, page.escape(text))
  end
  for _, entry in ipairs(self.guides) do item(page_of(entry), entry.signature) end
  body[#body + 1] = "</ul>"
  for _, area in ipairs(areas_of(self.index)) do
    local title, name = page.escape(area.title), "ref-" .. area.name .. ".html"
    local html = { ("<h1>%s</h1>"):format(title) }
    body[#body + 1] = ('<h2><a href="%s">%s</a></h2><ul class="names">'):format(name, title)
    for _, entry in ipairs(area.entries) do
      html[#html + 1] = entry_html(entry, self.links)
      item(address(entry), entry.name)
      for _, own in ipairs(entry.names) do
        rows[#rows + 1] = ("[%q,%q,%q]"):format(own, address(entry),
          source.summary(entry.text)):gsub("\\?\n", " ")
      end
    end
    body[#body + 1] = "</ul>"
    self:publish(name, area.title, table.concat(html, "\n"))
  end
  local list = ("[%s]"):format(table.concat(rows, ",\n")):gsub("</", "<\\/")
  body[2] = (SEARCH:gsub("%%s", function() return list end))
  self:publish("index.html", "reference", table.concat(body, "\n"))
end

--- Writes the pages into a folder. Returns a list of warnings about entries without documentation,
--- pages with the same name, and broken links.
function M.write(index, folder)
  M_ffi.check(C.eng_file_mkdir(folder))
  local site = setmetatable({ index = index, folder = folder, warnings = {}, links = {},
    anchors = {}, pending = {}, guides = {} }, Site)
  for _, entry in ipairs(index:gaps()) do
    site:warn("%s: %s has no documentation", entry.where, entry.name)
  end
  for _, entry in ipairs(index.entries) do
    if entry.kind == "guide" then table.insert(site.guides, entry) end
    for _, name in ipairs(entry.names) do site.links[name] = site.links[name] or address(entry) end
  end
  site:publish_guides()
  site:publish_reference()
  for _, link in ipairs(site.pending) do
    if not site.anchors[link[3]] then
      site:warn("%s: the link to %s is broken", link[1], link[2])
    end
  end
  return site.warnings
end

return M
