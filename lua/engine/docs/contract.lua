-- Makes the reference's entries for policies with their options; for the fields of policies,
-- records and verdicts; for the trainer's options; for environment variables; for the columns of
-- recorded runs; and for the guides. Used by index.lua.
local curves = require "engine.run.curves"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local source = require "engine.docs.source"

local M = {}

-- Markdown tables whose rows become entries. The first cell has the names; if it has several, they
-- share the row's text.
local TABLES = {
  { path = "policies/README.md", heading = "## The file", prefix = "policy.", kind = "policy field",
    area = "contract" },
  { path = "policies/README.md", heading = "## The record", prefix = "record.",
    kind = "record field", area = "contract" },
  { path = "policies/README.md", heading = "## The verdict", prefix = "verdict.",
    kind = "verdict field", area = "contract" },
  { path = "docs/environment.md", heading = "# Environment variables", prefix = "",
    kind = "environment variable", area = "environment" },
}

local function tables(add)
  for _, t in ipairs(TABLES) do
    local all = {}
    for _, row in ipairs(source.table_rows(t.path, t.heading)) do
      local names, text = {}, {}
      for name in row[1]:gmatch("`([%w_]+)`") do names[#names + 1] = name end
      for i = 2, #row do text[#text + 1] = row[i] end
      text = source.shared(names) .. table.concat(text, ": ")
      all[#all + 1] = ("%s%s  %s"):format(t.prefix, table.concat(names, ", " .. t.prefix),
        source.summary(row[#row]))
      for _, name in ipairs(names) do
        add { name = t.prefix .. name, kind = t.kind, area = t.area, signature = t.prefix .. name,
          text = text, where = ("%s:%d"):format(t.path, row.line) }
      end
    end
    if t.prefix ~= "" then
      local name = "policy." .. t.prefix:sub(1, -2)
      add { name = name, kind = "contract", area = t.area, signature = name, where = t.path .. ":1",
        text = ("The fields of a %s:\n\n  %s\n\n%s has the contract with examples."):format(
          t.kind:match("%w+"), table.concat(all, "\n  "), t.path) }
    end
  end
end

local function options(trainer, add)
  for _, option in ipairs(source.option_list(trainer.text)) do
    for _, name in ipairs(option.names) do
      add { name = "trainer." .. name, kind = "trainer option", area = "trainer",
        where = trainer.where, signature = "engine.trainer { " .. name .. " = ... }",
        text = source.shared(option.names) .. option.text }
    end
  end
end

-- Returns the default `value` of a policy's option `key` as text. A number whose key names a scale
-- is written as show.scale does, such as 2^16.
local function default_text(key, value)
  local is_scale = key:find("scale$") or key:find("scaling$") or key:find("^scale_m")
  return is_scale and type(value) == "number" and show.scale(value) or tostring(value)
end

local function policies(add, add_word)
  local policy = require "engine.policy.policy"
  for _, path in ipairs(source.list("policies", ".lua")) do
    local name = path:match("([^/]+)%.lua$")
    local text = source.text(path)
    local p = policy.load(name, nil, text:match('kind%s*=%s*"(fp8)"'))
    local lines = {}
    for i, key in ipairs(nearest.keys(p.defaults)) do
      local remark = text:match("\n%s*" .. key .. "%s*=[^\n]-,?%s*%-%-%s*([^\n]+)")
      local default = default_text(key, p.defaults[key])
      lines[i] = ("  %s = %s%s"):format(key, default, remark and "   -- " .. remark or "")
      add_word { name = name .. "." .. key, kind = "policy option", where = path .. ":1",
        signature = ("policy=%s:%s=..."):format(name, key),
        text = ("%s (default %s)"):format(remark or key, default) }
    end
    local doc = p.doc or text:match('doc%s*=%s*"(.-)"') or ""
    local header = source.header(path, "%-%-")
    add { name = name, kind = "policy", area = "policies", signature = "policy=" .. name,
      text = ("%s\n\n%s\n\nOptions:\n%s"):format(doc, header, table.concat(lines, "\n")), doc = doc,
      documented = doc ~= "" and header ~= "", where = path .. ":1" }
  end
end

local function guides(add)
  local paths = source.list("docs", ".md")
  for _, more in ipairs { "policies/README.md", "examples/README.md" } do
    paths[#paths + 1] = more
  end
  for _, path in ipairs(paths) do
    local text = source.text(path)
    local name = path:match("^docs/(.*)%.md$") or path:match("^(%w+)/")
    if name == "README" then name = "docs" end
    add { name = name, names = { name, (path:gsub("%.md$", "")) }, kind = "guide", area = "guides",
      signature = text and text:match("^# ([^\n]*)") or name,
      text = text or "", where = path .. ":1" }
  end
end

local PRECISION = "lua/engine/train/precision.lua"

-- Returns the whole sentences of the paragraphs that mention `name`.
local function mentions(name, paragraphs)
  local word, found = "%f[%w]" .. name .. "s?%f[^%w_]", ""
  for _, paragraph in ipairs(paragraphs) do
    local sentences = paragraph:match("^.*%.") or ""
    if sentences:lower():find(word) then found = found .. "\n\n" .. sentences end
  end
  return found
end

-- Adds the fields of a precision recipe and of its table `fp8`. In precision.lua, the comments
-- above M.recipes and HYBRID list these fields. The paragraphs below a list say what some of the
-- fields also accept.
local function recipe_fields(add)
  local lists = { ["M.recipes"] = "precision.", ["local HYBRID"] = "fp8." }
  for at, line in ipairs(source.lines(PRECISION)) do
    local prefix = lists[line:match("^(.-) = ")]
    local text, first = source.comment(source.lines(PRECISION), at, "%-%-")
    local fields, paragraphs = source.option_list(prefix and text or "")
    for _, field in ipairs(fields) do
      for _, name in ipairs(field.names) do
        add { name = prefix .. name, kind = "precision recipe field", area = "precision",
          signature = prefix .. name,
          text = source.shared(field.names) .. field.text .. mentions(name, paragraphs),
          where = ("%s:%d"):format(PRECISION, first) }
      end
    end
  end
end

--- Returns the entry of a column of recorded runs, such as loss or signals.NAME. Raises an error if
--- no column has this name.
function M.column(name)
  local metric = curves.metric(name)
  return { name = name, kind = "recorded column", where = "lua/engine/run/curves.lua:1",
    signature = "engine plot RUN --columns " .. name,
    text = metric.title .. (metric.sparse and "; only some steps have a value" or "") }
end

-- Adds the terms of the glossary, the precision recipes, and the columns of recorded runs.
local function words(add_word)
  for _, row in ipairs(source.table_rows("docs/glossary.md", "# Glossary")) do
    for term in row[1]:gmatch("[^,]+") do
      term = term:match("^%s*(.-)%s*$")
      add_word { name = term, kind = "term", signature = term, text = row[2],
        where = "docs/glossary.md:" .. row.line }
    end
  end
  local precision = require "engine.train.precision"
  for _, name in ipairs(nearest.keys(precision.recipes)) do
    add_word { name = name, kind = "precision recipe", signature = "precision=" .. name,
      text = precision.describe(name), where = PRECISION .. ":1" }
  end
  for _, name in ipairs(curves.columns()) do add_word(M.column(name)) end
end

--- Adds this file's entries to the reference. trainer: the entry of engine.trainer. `add` adds a
--- main entry, add_word a secondary one. `engine help NAME` shows a secondary entry if this is its
--- full name, or if no main entry has this name. The pages of the reference omit secondary entries,
--- because main entries already contain their texts.
function M.read(trainer, add, add_word)
  tables(add)
  if trainer then options(trainer, add) end
  policies(add, add_word)
  recipe_fields(add)
  words(add_word)
  guides(add)
end

return M
