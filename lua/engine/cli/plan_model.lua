-- engine plan FOLDER: prints the parameters and the memory of a model in Hugging Face's files, from
-- the model's config.json alone. Called by plan.lua.
local show = require "engine.base.show"
local config = require "engine.nn.hf_config"
local hf = require "engine.nn.hf_load"

local M = {}

-- The uses of a model: { name, weights, gradients, moments, precision recipe (for training) }. The
-- three numbers are bytes per parameter. Weights include the low-precision copies that matrix
-- products read. Moments are those of AdamW; for bf16_kahan, this number includes Kahan's
-- compensation. Norms and biases have no low-precision copies, so the totals differ slightly from
-- eng_params_bytes.
M.USES = {
  { "evaluate, f32", 4, 0, 0 }, { "evaluate, bf16 or f16", 2, 0, 0 },
  { "train, precision fp32", 4, 4, 8, "fp32" }, { "train, precision bf16", 6, 4, 8, "bf16" },
  { "train, precision fp16", 6, 2, 8, "fp16" },
  { "train, bf16_stochastic", 2, 4, 8, "bf16_stochastic" },
  { "train, bf16_kahan", 2, 4, 10, "bf16_kahan" },
}

--- Returns facts about the model that the fields of a config.json describe. Error messages begin
--- with `where`. The result has the fields
---   class       the model's class
---   parameters  the number of elements in all parameters
---   tensors     the number of parameter tensors
---   extra       the model's sizes as text, such as its width and its number of layers
---   context     the context length in tokens
---   token       the number of elements that generation caches for one token; nil for a model that
---               does not generate
function M.facts(fields, where)
  return require("engine").scope(function()
    local model = hf.shapes(fields, where)
    local list, o = model:parameters(), model.config
    local facts = { class = model._class, parameters = 0, tensors = #list, extra = model:extra(),
      context = model.context }
    for _, p in ipairs(list) do facts.parameters = facts.parameters + p.tensor.count end
    if model.generate then
      facts.token = 2 * o.layers * (o.kv_heads or o.heads) * (o.head_width or o.width / o.heads)
    end
    return facts
  end)
end

--- Prints the parameters and the memory of the model in a folder.
function M.print(folder)
  local fields, _, path = config.read(folder)
  local facts = M.facts(fields, path)
  print(("%s(%s), context %s"):format(facts.class, facts.extra, show.grouped(facts.context)))
  print(("%s parameters in %s tensors\n"):format(show.grouped(facts.parameters),
    show.grouped(facts.tensors)))
  local rows = { { "memory", "weights", "gradients", "moments", "in all" } }
  for _, use in ipairs(M.USES) do
    local row, all = { use[1] }, 0
    for i = 2, 4 do
      row[i] = use[i] > 0 and show.bytes(use[i] * facts.parameters) or "-"
      all = all + use[i] * facts.parameters
    end
    row[5] = show.bytes(all)
    rows[#rows + 1] = row
  end
  print(show.table(rows, { true }))
  print("\nThe column `moments` holds AdamW's moments and, with bf16_kahan, Kahan's " ..
    "compensation. Activations are not counted; they grow with the batch size and the sequence " ..
    "length.")
  if facts.token then
    print(("Generation caches keys and values. In bf16 they take %s for each token and %s for a " ..
      "sequence of %s tokens."):format(
      show.bytes(2 * facts.token), show.bytes(2 * facts.token * facts.context),
      show.grouped(facts.context)))
  end
end

return M
