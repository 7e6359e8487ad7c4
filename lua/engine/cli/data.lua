-- engine data tokenize: converts text files to a file of tokens (data/tokenize.lua). Called by
-- init.lua.
local options = require "engine.cli.options"

local help = [==[
usage: engine data tokenize TEXT... --tokenizer FOLDER -o FILE.npy [--lines] [--special]
                            [--end TOKEN]

Writes the tokens of text files, one file after the other, to a NumPy file of uint16, or of uint32
if the vocabulary has more than 65,536 tokens. engine.data.tokens and numpy.load read this file.

  engine data tokenize a.txt b.txt --tokenizer models/llama -o tokens.npy
  engine data tokenize chat.txt --tokenizer tokenizer.json --lines --special -o chat.npy
  engine data tokenize books/*.txt --tokenizer gpt2 --end '<|endoftext|>' -o books.npy

--tokenizer a folder with tokenizer.json, or the file
--lines     each line is a text of its own; its line end and empty lines are left out
--special   put the tokenizer's special tokens, such as <s>, around each text
--end       put this token after each text

next: a trainer with engine.data.tokens { path = FILE }; docs/tokenizers.md, docs/data.md]==]

return options.command {
  name = "data", doc = "convert text files to tokens for training", help = help,
  options = { tokenizer = "text", output = "text", lines = "switch", special = "switch",
    ["end"] = "text" }, short = { o = "output" },
  main = function(given)
    local words = given.words
    local action = table.remove(words, 1)
    options.fail_if(action ~= "tokenize", "expected 'tokenize', got %s; see engine help data",
      action and "'" .. action .. "'" or "nothing")
    options.fail_if(#words == 0,
      "expected a text file after 'tokenize', got nothing; see engine help data")
    options.fail_if(not given.tokenizer,
      "expected --tokenizer FOLDER, a folder with tokenizer.json")
    options.fail_if(not given.output, "expected -o FILE.npy, the file to write the tokens to")
    local tokenizer = require("engine.data.tokenizer").open(given.tokenizer)
    local ending = given["end"] and options.token_id(tokenizer, given["end"], "--end")
    local result = require("engine.data.tokenize").run(tokenizer, words, given.output, {
      lines = given.lines, special = given.special, ending = ending,
      progress = require("engine.run.progress").amount "bytes" })
    local show = require "engine.base.show"
    print(("%s: %s tokens (%s) from %s, %s bytes in all"):format(given.output,
      show.grouped(result.tokens), result.dtype, show.counted(result.texts, "text"),
      show.grouped(result.bytes)))
  end,
}
