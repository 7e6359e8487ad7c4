-- engine policies: lists the policies that come with the engine, one line each. Called by init.lua.
local options = require "engine.cli.options"
local show = require "engine.base.show"

return options.command {
  name = "policies", doc = "the policies that come with the engine, one line each",
  help = [==[
usage: engine policies

Lists the policies that come with the engine and says what each does. Some choose the loss scale of
each step, others choose the scales and formats of FP8 layers. Both kinds can be swapped into a run
(engine help attach), run as its shadows (shadow=NAME) and replayed.

  engine train.lua policy=dynamic:growth_interval=500     train with one
  engine replay runs/a --policy dynamic                   what it would have done on a recorded run

policies/README.md explains how to write one. Name your own file by its path: policy=./mine.lua]==],
  main = function(given)
    local word = given.words[1]
    options.fail_if(word, "expected no arguments, got '%s'; `engine help %s` explains a policy",
      word, word)
    local policy = require "engine.policy.policy"
    for _, kind in ipairs { "scale", "fp8" } do
      local rows = {}
      for i, name in ipairs(policy.names(kind)) do
        rows[i] = { "  " .. name, (policy.load(name, nil, kind).doc:gsub("%s+", " ")) }
      end
      print((kind == "fp8" and "\nfor FP8 layers:\n" or "for the loss scale:\n") ..
        show.table(rows, true))
    end
    print("\nnext: engine replay RUN --policy NAME shows what a policy would have done; " ..
      "policy=NAME\ntrains with it. A policy for FP8 layers trains with precision = " ..
      "{ base = \"nvfp4\",\nfp8 = { policy = NAME } }")
  end,
}
