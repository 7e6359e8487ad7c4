-- Chat templates: convert a conversation into the text that a model expects. Hugging Face's files
-- have a Jinja template, in chat_template.jinja or in tokenizer_config.json. Called by
-- tokenizer.lua.
local cjson = require "cjson"
local M_ffi = require "engine.base.ffi"
local file = require "engine.base.file"
local jinja = require "engine.data.jinja"

local expect, raise, raise_if, value_text = M_ffi.expect, M_ffi.raise, M_ffi.raise_if,
  M_ffi.value_text

local M = {}
local MOST_BYTES = 2 ^ 20      -- the most bytes of a template
local FILE_BYTES = 2 ^ 26      -- a larger file is refused
local TOKENS = { "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
  "mask_token" }

-- Converts a value of Lua or JSON into a value of the template language (jinja.lua).
local function value_of(x, depth)
  if x == cjson.null then return jinja.NONE end
  if type(x) ~= "table" or x == jinja.NONE then return x end
  if depth > 20 then
    raise("apply_chat_template: expected messages and options nested up to 20 tables deep")
  end
  local out = {}
  for key, value in pairs(x) do out[key] = value_of(value, depth + 1) end
  return (x[1] ~= nil or next(x) == nil) and jinja.list(out) or out
end

-- Returns the text of a file, or nil if there is none. Lists of added tokens can make a
-- tokenizer_config.json larger than what file.read accepts.
local function text_of(path)
  if not file.exists(path) then return nil end
  local mapping = file.map(path)
  raise_if(mapping.size > FILE_BYTES, "tokenizer: %s has %.0f bytes, expected at most %.0f", path,
    tonumber(mapping.size), FILE_BYTES)
  return M_ffi.string(mapping.data, mapping.size)
end

-- Returns the text of the folder's template, and the special tokens by their names.
local function read(folder)
  local path = folder .. "/tokenizer_config.json"
  local text, config = text_of(path), {}
  if text then
    local good, data = pcall(cjson.decode, text)
    if not good or type(data) ~= "table" then raise("tokenizer: %s is not a JSON object", path) end
    config = data
  end
  local tokens = {}
  for _, name in ipairs(TOKENS) do
    local token = config[name]
    if type(token) == "table" then token = token.content end
    if type(token) == "string" then tokens[name] = token end
  end
  local template = text_of(folder .. "/chat_template.jinja") or config.chat_template
  for _, named in ipairs(type(template) == "table" and template or {}) do
    if type(named) == "table" and named.name == "default" then template = named.template end
  end
  raise_if(type(template) ~= "string",
    "tokenizer: %s has no chat template: neither chat_template.jinja nor a chat_template in " ..
    "tokenizer_config.json; hint: write the prompt's text yourself", folder)
  raise_if(#template > MOST_BYTES, "tokenizer: the chat template of %s has %d bytes, expected " ..
    "at most %d", folder, #template, MOST_BYTES)
  return template, tokens
end

--- Returns a function(messages, options) that applies the chat template of a folder and returns the
--- text; see apply_chat_template in tokenizer.lua.
function M.of(folder)
  local source, tokens = read(folder)
  local render, problem = jinja.read(source)
  local function refuse(why)
    raise("tokenizer: the chat template of %s: %s; hint: write the prompt's text yourself", folder,
      why)
  end
  if not render then refuse(problem) end
  return function(messages, options)
    raise_if(type(messages) ~= "table" or type(messages[1]) ~= "table",
      "apply_chat_template: expected a list of messages { role =, content = }, got %s",
      value_text(messages))
    expect(options == nil or type(options) == "table", options,
      "apply_chat_template: expected a table of options")
    local variables = { add_generation_prompt = false, tools = jinja.NONE, documents = jinja.NONE,
      raise_exception = function(message) jinja.fail("%s", tostring(message)) end }
    for name, token in pairs(tokens) do variables[name] = token end
    for name, value in pairs(options or {}) do variables[name] = value_of(value, 0) end
    variables.messages = value_of(messages, 0)
    local text, why = render(variables)
    return text or refuse(why)
  end
end

return M
