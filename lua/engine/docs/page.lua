-- Makes an HTML page of the reference: its frame and style, text with links to entries, and
-- Markdown through cmark-gfm. Used by html.lua.
local process = require "engine.base.process"
local source = require "engine.docs.source"

local M = {}

local STYLE = [[
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5c6670; --back: #fdfdfc; --box: #f1f2f0;
  --line: #dcdedb; --link: #0b5cad }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe3e6; --soft: #98a2ab; --back: #15181b;
  --box: #1f2428; --line: #343a40; --link: #79b8f5 } }
* { box-sizing: border-box }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 52rem; margin: 0 auto; padding: 0 1rem 4rem; overflow-wrap: break-word }
a { color: var(--link); text-decoration: none } a:hover { text-decoration: underline }
nav { padding: .8rem 0; border-bottom: 1px solid var(--line); color: var(--soft) }
h1 { font-size: 1.7rem; line-height: 1.2 } h2 { font-size: 1.25rem; margin-top: 2.2rem }
h3 { font-size: 1rem; margin: 2rem 0 .3rem }
code, pre { font: .86rem/1.45 ui-monospace, monospace }
code { background: var(--box); border-radius: 3px; padding: .08em .25em }
pre { background: var(--box); border-radius: 5px; padding: .7rem .8rem; overflow-x: auto }
pre code { background: none; padding: 0 }
.signature { margin: 0 0 .4rem; white-space: pre-wrap }
.where { color: var(--soft); font-size: .8rem }
.kind { color: var(--soft); font-weight: normal; font-size: .8rem; margin-left: .4em }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .92rem }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0;
  border-bottom: 1px solid var(--line) }
input { font: inherit; width: 100%; padding: .5rem .7rem; color: inherit; background: var(--box);
  border: 1px solid var(--line); border-radius: 5px }
ul.names { columns: 15rem; padding-left: 1.1rem } img { max-width: 100% }
]]

M.escape = require("engine.report.chart").entities

-- Returns the id of a heading, to which links with #ID lead.
local function slug(heading)
  local text = heading:lower():gsub("<[^>]*>", ""):gsub("&#?%w+;", "")
  return (text:gsub("[^%w%s_-]", ""):gsub("%s", "-"))
end

--- Returns a whole page as HTML. `body` is HTML, `title` plain text.
function M.frame(title, body)
  return ([[<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>%s</title><style>%s</style></head>
<body><nav><a href="index.html">engine</a> / %s</nav>
%s
</body></html>
]]):format(M.escape(title), STYLE, M.escape(title), body)
end

-- Turns each <code>name</code> into a link if the reference has an entry for it. links: name ->
-- address.
local function linked(html, links)
  return (html:gsub("<code>([%w_.:]+)</code>", function(name)
    local target = links[name]
    return target and ('<a href="%s"><code>%s</code></a>'):format(target, name) or nil
  end))
end

local function inline(text, links)
  local html = M.escape(text):gsub("`([^`]+)`", "<code>%1</code>")
    :gsub("%*%*([^*]+)%*%*", "<b>%1</b>")
  return linked(html, links)
end

--- Returns the text of a comment as HTML: paragraphs, and indented lines verbatim. links: the name
--- of an entry -> its address.
function M.prose(text, links)
  local html = {}
  for _, block in ipairs(source.blocks(text)) do
    if block.kind == "code" then
      local lines = table.concat(block.lines, "\n"):gsub("\n+$", "")
      local indent = lines:match("^ +")
      lines = ("\n" .. lines):gsub("\n" .. indent, "\n"):sub(2)
      html[#html + 1] = "<pre>" .. M.escape(lines) .. "</pre>"
    else
      html[#html + 1] = "<p>" .. inline(table.concat(block.lines, "\n"), links) .. "</p>"
    end
  end
  return table.concat(html, "\n")
end

--- Returns a Markdown file as HTML. Every heading has an anchor. resolve(address) converts the
--- address of a link in the file to the address in the page, or returns nil to make the link plain
--- text. links: as in M.prose.
function M.markdown(path, links, resolve)
  local html = process.output(("cmark-gfm -e table %s 2>&1"):format(
    process.quoted(source.path(path))))
  if html ~= "" and not html:find("^<") then
    error("cmark-gfm, which renders the guides, does not run here; hint: make deps", 0)
  end
  html = html:gsub("<(h[1-6])>(.-)</h[1-6]>", function(tag, text)
    return ('<%s id="%s">%s</%s>'):format(tag, slug(text), text, tag)
  end)
  html = html:gsub('<a href="([^"]*)">(.-)</a>', function(address, text)
    local target = resolve(address)
    return target and ('<a href="%s">%s</a>'):format(target, text) or text
  end)
  return linked(html, links)
end

return M
