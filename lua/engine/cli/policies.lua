-- engine policies: the policies that come with the engine, one line each.
local options = require "engine.cli.options"
local show = require "engine.base.show"

return options.command {
  name = "policies", doc = "the policies that come with the engine, one line each",
  help = [==[
usage: engine policies

Lists the policies that come with the engine: the name, what it decides, and what it does.
A loss-scale policy chooses the loss scale of each step; an fp8 policy chooses what FP8 layers do.

  engine train.lua policy=dynamic:growth_interval=500     train with one
  engine replay runs/a --policy dynamic                   what it would have done on a recorded run

policies/README.md says how to write one. A file of your own is named with its path: policy=./mine.lua]==],
  main = function(given)
    if #given.words > 0 then options.fail("expected no arguments, got '%s'", given.words[1]) end
    local policy = require "engine.policy.policy"
    local rows = { { "policy", "decides", "what it does" } }
    for _, kind in ipairs { "scale", "fp8" } do
      for _, name in ipairs(policy.names(kind)) do
        rows[#rows + 1] = { name, kind == "fp8" and "fp8" or "loss scale", (policy.load(name, nil, kind).doc:gsub("%s+", " ")) }
      end
    end
    print(show.table(rows, { true, true, true }))
    print("\nnext: engine replay RUN --policy NAME shows what one would have done; policy=NAME trains with it")
    return 0
  end,
}
