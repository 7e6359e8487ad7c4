-- engine generate: continues texts or lists of token ids with a model in Hugging Face's files.
-- Called by init.lua.
local files = require "engine.base.file"
local options = require "engine.cli.options"
local show = require "engine.base.show"

local help = [==[
usage: engine generate FOLDER --prompt TEXT [--prompt TEXT ...] [--tokens 1,2,3 ...]
                       [--max_tokens 64] [--temperature T] [--top_k K] [--top_p P]
                       [--stop TOKEN,TOKEN] [--seed N] [--dtype f32|bf16|f16|auto]

Loads the model of a folder with config.json and model.safetensors (or shards) and continues each
prompt and each list of token ids. For a prompt it prints the text with its continuation. For a list
it prints one line with the given and the new ids.

  engine generate Qwen3-0.6B --prompt "The loss scale" --temperature 0
  engine generate Qwen3-0.6B --tokens 9707,11 --temperature 0          # the most likely tokens
  engine generate Qwen3-0.6B --tokens 9707,11 --top_p 0.9 --seed 1 --dtype bf16
  engine generate gpt2 --tokens 15496 --tokens 40,716 --max_tokens 20  # two lists in one run

prompt       a text, which the folder's tokenizer.json turns into token ids
tokens       a list of token ids
max_tokens   tokens to add to each prompt or list (64)
temperature  1 by default; a value below 1 favours likely tokens, 0 takes the most likely token
top_k top_p  draw from the K most likely tokens, or from the most likely ones that together have
             probability P
stop         ids, or texts of tokens such as '<|im_end|>', that end a continuation; by default the
             model's eos_token_id; with --stop= no token ends it
seed         the same seed gives the same tokens
dtype        dtype of the weights in memory; f32 by default, auto for the dtype in the files

next: engine plan FOLDER shows the memory that a model takes; docs/hugging-face.md]==]

local NUMBERS = { "temperature", "top_k", "top_p", "seed" }

-- Converts a list of words to token ids. Each word is an id or, with a tokenizer, the text of a
-- token. what: the option with these words, for messages.
local function ids_of(list, what, tokenizer)
  local ids = {}
  for i, text in ipairs(list) do
    ids[i] = tonumber(text) or tokenizer and options.token_id(tokenizer, text, what)
    options.fail_if(not ids[i] or ids[i] < 0 or ids[i] % 1 ~= 0 or ids[i] >= 2 ^ 31,
      "%s: expected token ids such as 1,2,3, got '%s'", what, text)
  end
  return ids
end

local function main(given)
  options.fail_if(#given.tokens + #given.prompt == 0,
    "expected --prompt TEXT, or --tokens with a list of ids such as 1,2,3")
  options.fail_if(not files.is_folder(given.words[1]),
    "there is no folder '%s'; expected the folder of a model, with config.json and its weights",
    given.words[1])
  local engine, rows, tokenizer = require "engine", {}, nil
  for i, text in ipairs(given.tokens) do
    local list = {}
    for part in text:gmatch("[^,%s]+") do list[#list + 1] = part end
    rows[i] = ids_of(list, "--tokens")
    options.fail_if(#rows[i] == 0, "--tokens: expected at least one id, got '%s'", text)
  end
  local texts = #given.prompt > 0
  for _, word in ipairs(given.stop or {}) do texts = texts or not tonumber(word) end
  if texts then
    local good
    good, tokenizer = pcall(engine.tokenizer, given.words[1])
    options.fail_if(not good, "%s; hint: --prompt and texts in --stop need the tokenizer; " ..
      "without a tokenizer, give ids, as in --tokens 1,2,3", tokenizer)
  end
  for _, text in ipairs(given.prompt) do
    local ids = tokenizer:encode(text)
    if #ids == 0 then options.fail("--prompt: expected a text, got an empty one") end
    rows[#rows + 1] = ids
  end
  local settings = { max_tokens = given.max_tokens or 64,
    stop = given.stop and ids_of(given.stop, "--stop", tokenizer) }
  for _, name in ipairs(NUMBERS) do settings[name] = given[name] end
  local model = engine.load_model(given.words[1], { dtype = given.dtype })
  options.fail_if(not model.generate, "the model %s cannot generate: it only predicts masked " ..
    "tokens", model._class)
  if require("engine.base.machine").terminal(2) then
    settings.progress = require("engine.run.progress").amount "tokens"
  end
  for i, row in ipairs(model:generate(rows, settings)) do
    if i > #given.tokens then show.print(tokenizer:decode(row))
    else print(table.concat(row, ",")) end
  end
end

return options.command {
  name = "generate", doc = "continue texts with a model in Hugging Face's files", help = help,
  least = 1, most = 1, expects = "one folder (a text follows --prompt, ids follow --tokens)",
  options = { prompt = "texts", tokens = "texts", max_tokens = "number", temperature = "number",
    top_k = "number", top_p = "number", stop = "list", seed = "number", dtype = "text" },
  main = main,
}
