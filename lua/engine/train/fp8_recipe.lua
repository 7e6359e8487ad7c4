-- Checks the `fp8` table of a precision recipe (precision.lua) and derives each layer's recipe from
-- it. A layer has three roles (x, w, dy), which are quantized, and three products. Called by
-- precision.lua, which checks recipes, and by fp8_sites.lua, which applies them.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fp8_codes = require "engine.tensor.fp8"
local fp8_verdict = require "engine.policy.fp8_verdict"
local mx = require "engine.tensor.mx"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local C, expect, raise, raise_if = M_ffi.C, M_ffi.expect, M_ffi.raise, M_ffi.raise_if
local choose, want_list, want_pattern = arguments.choose, arguments.want_list,
  arguments.want_pattern

local M = {}

M.roles, M.products = fp8_verdict.roles, { "forward", "dgrad", "wgrad" }
--- The indices, in eng_fp8_recipe.role, of the two roles that each product multiplies.
M.factors = { forward = { 0, 1 }, dgrad = { 2, 1 }, wgrad = { 2, 0 } }
--- ENG_ACCUMULATE_* by name, and device = -1, which stands for the current device's accumulator.
M.accumulators = arguments.merged(fp8_codes.accumulators, { device = -1 })

local FORMATS = { e4m3 = M_ffi.dtype.e4m3, e5m2 = M_ffi.dtype.e5m2 }
local SIGNS = { none = C.ENG_FP8_SIGNS_NONE, fixed = C.ENG_FP8_SIGNS_FIXED,
  layer = C.ENG_FP8_SIGNS_LAYER, step = C.ENG_FP8_SIGNS_STEP, backward = C.ENG_FP8_SIGNS_BACKWARD }
local ROWS = "msamp_fp4"     -- the rule of microscaling that mx.quantize does not have
local MX_RULES = arguments.merged(mx.rules, { [ROWS] = C.ENG_MX_MSAMP_FP4 })
local RULES = arguments.merged(fp8_codes.rules, MX_RULES)
local KEEPS = { codes = 0, transposed = 1, e5m6 = 2, swiglu = 3 }

-- Raises an error if the table t has a field that is not in the set `fields`. owner: what has these
-- fields, in plural (such as "roles with the rule deepgemm"), or nil.
local function known(t, fields, where, owner)
  expect(type(t) == "table", t, "%s: expected a table", where)
  for key in pairs(t) do
    if fields[key] == nil then
      raise("%s: %s %s%s", where, owner and owner .. " have no option" or "unknown field",
        M_ffi.value_text(key), nearest.choices(key, fields, owner and "options" or "fields"))
    end
  end
end

local function whole(v, where, what)
  arguments.want_whole(v, where, what)
  expect(math.abs(v) < 2 ^ 31, v, "%s: expected %s to be below 2^31 in magnitude", where, what)
  return v
end

local function boolean(v, where, what)
  expect(v == nil or type(v) == "boolean", v, "%s: expected %s to be true or false", where, what)
  return v and 1 or 0
end

local function between(v, least, most) return type(v) == "number" and v >= least and v <= most end

-- Returns a role's rule, the number of this rule in microscaling (nil: a rule of FP8), and the
-- role's format and block.
local function settings(role)
  local rule, format, block = role.rule or "transformer_engine", "e4m3", "tensor"
  if rule == ROWS then format, block = "e2m1", "row"
  elseif MX_RULES[rule] then format, block = mx.usual(rule) end
  return rule, MX_RULES[rule], role.format or format, role.block or block
end

-- The options that a role may have: under every rule (ROLE), under a rule of FP8 (FP8_ROLE), under
-- a rule of microscaling (MX_ROLE) and under the rule ROWS (ROWS_ROLE).
local ROLE = arguments.set_of "format block rule stochastic keep"
local FP8_ROLE = arguments.merged(ROLE, arguments.set_of "pow2 margin eps")
local MX_ROLE = arguments.merged(ROLE, arguments.set_of "factor average backward")
local ROWS_ROLE = arguments.merged(MX_ROLE, arguments.set_of "clamp residual estimator")
local function read_role(to, role, where, name)
  expect(type(role) == "table", role, "%s: expected a table", where)
  local rule, scaled, format, block = settings(role)
  choose(RULES, rule, where, "rule")
  known(role, rule == ROWS and ROWS_ROLE or scaled and MX_ROLE or FP8_ROLE, where,
    "roles with the rule " .. rule)
  local function want(field, good, what)
    local v = role[field]
    expect(v == nil or good, v, "%s: expected %s to be %s", where, field, what)
    return v
  end
  expect(role.keep == nil or name == "x", role.keep,
    "%s: keep sets how the tape stores x for dW; expected keep only in x", where)
  to.eps = want("eps", type(role.eps) == "number", "a number") or -1
  to.mx = scaled and tonumber(scaled) + 1 or 0
  to.format = choose(scaled and mx.formats or FORMATS, format, where, "format")
  local rows, columns = arguments.read_block(block, where)
  to.block_rows, to.block_columns = whole(rows, where, "the rows of a block"),
    whole(columns, where, "the columns of a block")
  to.rule = not scaled and choose(RULES, rule, where, "rule") or 0
  raise_if(not scaled and type(role.stochastic) == "number", "%s: expected stochastic to be " ..
    "true or false; only a rule of microscaling takes a number of random bits, and the rule " ..
    "here is %s", where, rule)
  to.clamp = want("clamp", role.clamp == 0 or between(role.clamp, 0.5, 0.9999),
    "a quantile from 0.5 to 0.9999, or 0 for none") or 0
  boolean(role.residual, where, "residual")
  to.drops = role.residual == false and 1 or 0
  local estimator = want("estimator", role.estimator == "straight" or role.estimator == "dge"
    and name == "w", "'straight' or, only in w, 'dge'")
  to.dge = estimator == "dge" and 1 or 0
  to.pow2 = boolean(role.pow2, where, "pow2")
  if scaled and type(role.stochastic) == "number" then
    want("stochastic", between(role.stochastic, 1, 24), "true (8 bits) or 1 to 24 bits")
    to.stochastic = whole(role.stochastic, where, "stochastic")
  else to.stochastic = boolean(role.stochastic, where, "stochastic") * (scaled and 8 or 1) end
  to.factor = want("factor", between(role.factor, 0.5, 1), "a number from 0.5 to 1") or 0
  expect(role.average == nil or name == "w", role.average,
    "%s: average is the decay of a weight's average; expected average only in w", where)
  to.average = want("average", between(role.average, 0, 1) and role.average < 1,
    "a decay from 0 (no average) to below 1") or 0
  local turned = scaled and name == "x" and rows ~= columns and not role.backward
  to.margin, to.keep = whole(role.margin or 0, where, "margin"),
    choose(KEEPS, role.keep or (turned and "transposed" or "codes"), where, "keep")
end

local FP8_PRODUCT = arguments.set_of "accumulator high promotion"
local MX_PRODUCT = arguments.set_of "accumulator high hadamard signs"
local SCALED_ACCUMULATORS = { device = C.ENG_ACCUMULATE_DEVICE, fp32 = C.ENG_ACCUMULATE_FP32,
  blackwell = C.ENG_ACCUMULATE_BLACKWELL }
local function read_product(to, product, where, scaled)
  known(product, scaled and MX_PRODUCT or FP8_PRODUCT, where,
    scaled and "products with microscaling" or "products in FP8")
  to.high = boolean(product.high, where, "high")
  to.hadamard = whole(product.hadamard or 0, where, "hadamard")
  to.signs = choose(SIGNS, product.signs or "fixed", where, "signs")
  local number = choose(scaled and SCALED_ACCUMULATORS or M.accumulators,
    product.accumulator or "device", where, "accumulator")
  -- On a card, `device` means the accumulator of the tensor cores; elsewhere, an f32 accumulator.
  -- For microscaling, the core chooses the accumulator by formats and sizes.
  if number < 0 and not scaled then
    number = M_ffi.string(C.eng_device_name()) == "cuda" and M.accumulators.hopper
      or M.accumulators.fp32
  end
  to.accumulator, to.promotion = number, whole(product.promotion or 128, where, "promotion")
end

-- FIELDS: the names of a layer's fields (its roles and products). LAYER: the names of the fields of
-- an entry of `layers`. FP8: the names of the fields of the table `fp8`.
local FIELDS = arguments.set_of "x w dy forward dgrad wgrad"
local LAYER = arguments.merged(FIELDS, arguments.set_of "match high")
local FP8 = arguments.merged(FIELDS,
  arguments.set_of "high high_first high_last layers policy sample ladder")

local function microscaled(role) return type(role) == "table" and MX_RULES[role.rule] ~= nil end

--- Returns a copy of `base`, the table `fp8` of the base recipe (nil if it has no FP8 layers), with
--- a user's table `own` laid over it. A role or a matrix product in `own` replaces only the fields
--- that it names; but a role that names a `rule` starts from this rule's defaults, because the rule
--- decides which other fields there are. Other entries of `own`, such as `high`, replace the base's
--- entries. If x changes between FP8 and microscaling, the base's products and `layers` are
--- dropped, because their fields are of the other kind. `where` begins error messages.
function M.on_base(base, own, where)
  raise_if(not base and not (own.x or own.w or own.dy), "%s: expected x, w or dy, because the " ..
    "base has no FP8 layers; hint: base = \"fp8_current\" or another recipe with FP8 layers, or " ..
    "x = { format = \"e4m3\" }", where)
  local fp8 = arguments.merged(base, own)
  for name in pairs(FIELDS) do
    local over = own[name]
    if type(over) == "table" and not over.rule then
      fp8[name] = arguments.merged((base or {})[name], over)
    end
  end
  if base and microscaled(base.x) ~= microscaled(fp8.x) then
    for _, name in ipairs { "layers", unpack(M.products) } do fp8[name] = own[name] end
  end
  return fp8
end

--- Returns the fields of each role and product of the layer at `path`: the fields of the table
--- `fp8`, overridden by every matching entry of `layers`. Returns false if the layer stays in high
--- precision. blocks: the number of blocks of the model.
function M.layer(fp8, path, blocks)
  local block = tonumber(path:match("^blocks%.(%d+)%."))
  if block and (block <= (fp8.high_first or 0) or block > blocks - (fp8.high_last or 0)) then
    return false
  end
  for _, match in ipairs(fp8.high or {}) do
    if path:find(match) then return false end
  end
  local layer = {}
  for name in pairs(FIELDS) do layer[name] = fp8[name] or {} end
  for _, over in ipairs(fp8.layers or {}) do
    if path:find(over.match) then
      if over.high ~= nil then layer.high = over.high end
      for name in pairs(FIELDS) do layer[name] = arguments.merged(layer[name], over[name]) end
    end
  end
  return not layer.high and layer
end

-- Reads the field `backward` of a role (x or w) into recipe.backward[i]. This field says how the
-- backward product quantizes the values that the forward product read.
local function read_backward(recipe, i, role, where, name)
  local back = role.backward
  if back == nil then return end
  raise_if(name == "dy", "%s: only x and w have the option backward", where)
  if back == "same" then
    recipe.backward[i].mx = C.ENG_FP8_SAME
    return
  end
  expect(type(back) == "table" and mx.rules[back.rule] ~= nil and not back.backward,
    type(back) == "table" and back.rule or back, "%s: expected backward to be \"same\", or a " ..
    "table with a rule of microscaling other than quest and %s, and without a field backward",
    where, ROWS)
  read_role(recipe.backward[i], arguments.merged({ keep = name == "x" and "codes" or nil }, back),
    where .. ": backward", name)
end

-- Returns the core's eng_fp8_recipe for the fields of a layer (M.layer). `where` begins error
-- messages.
local function structure(layer, where)
  local recipe = M_ffi.ffi.new("eng_fp8_recipe")
  for i, name in ipairs(M.roles) do
    local at = ("%s: %s"):format(where, name)
    read_role(recipe.role[i - 1], layer[name], at, name)
    read_backward(recipe, i - 1, layer[name], at, name)
  end
  local scaled, last = recipe.role[0].mx > 0, layer.wgrad.accumulator or "device"
  for i, name in ipairs(M.products) do
    local at, own = ("%s: %s"):format(where, name), layer[name].accumulator or "device"
    read_product(recipe.product[i - 1], layer[name], at, scaled)
    raise_if(scaled and recipe.product[i - 1].high == 0 and own ~= last,
      "%s: expected the accumulator to be %s, as in wgrad, got %s; with microscaling, all " ..
      "products of a layer have the same accumulator", at, last, own)
  end
  if C.eng_fp8_recipe_check(recipe) ~= 0 then raise("%s: %s", where, M_ffi.message()) end
  return recipe
end

-- Returns a copy of the fields of `layer`, changed by the table `over`.
local function changed(layer, over, where)
  local own = {}
  for name in pairs(FIELDS) do
    expect(over[name] == nil or type(over[name]) == "table", over[name],
      "%s: %s: expected a table", where, name)
    own[name] = arguments.merged(layer[name], over[name])
  end
  return own
end

--- Returns the core's recipes of a layer: the layer's own recipe, and one for each rung of
--- `ladder`. A rung is the name of a recipe, or a table of changes to the layer's fields. named:
--- the name of each recipe -> its table `fp8`.
function M.rungs(fp8, layer, named, where)
  local list = { structure(layer, where) }
  for i, rung in ipairs(fp8.ladder or {}) do
    local at, changes = ("%s: ladder[%d]"):format(where, i), type(rung) == "table"
    if changes then known(rung, FIELDS, at) end
    list[i + 1] = structure(changes and changed(layer, rung, at)
      or changed({}, choose(named, rung, at, "a table of changes or the name"), at), at)
  end
  return list
end

-- Describes a role in words: format, blocks, rule, rounding.
local function role_text(role)
  if role == "same" then return "the same values as the forward product" end
  local rule, scaled, format, block = settings(role)
  if type(block) == "table" then block = table.concat(block, "x") end
  local text = ("%s, scale%s per %s (rule %s), "):format(format, role.pow2 and " 2^n" or "", block,
    rule)
  local bits = role.stochastic == true and scaled and 8 or role.stochastic
  local random = not bits and ((role.average or 0) > 0 and ("toward an average of decay %g"):format(
    role.average) or "to nearest") or bits == true and "stochastic"
    or ("stochastic (%d bits)"):format(bits)
  text = text .. (rule == "ms_eden" and "to nearest, scales " .. random or random)
  for _, name in ipairs { "factor", "margin", "eps" } do
    if role[name] then text = text .. (", %s %g"):format(name, role[name]) end
  end
  if (role.clamp or 0) > 0 then
    text = text .. (", clamp %g, residual %s"):format(role.clamp,
      role.residual == false and "dropped" or "added")
  end
  if role.estimator then text = text .. ", estimator " .. role.estimator end
  return text .. (role.keep and ", keep " .. role.keep or "")
end

-- Describes a product in words. scaled: true with microscaling.
local FORMULAS = { forward = "y = x W^T", dgrad = "dx = dy W", wgrad = "dW = dy^T x" }
local function product_text(name, product, scaled)
  local list = { FORMULAS[name], product.high and "in high precision" or "quantized" }
  if not product.high then
    list[3] = "accumulator " .. (product.accumulator or "device")
    list[4] = not scaled and ("promotion %d%s"):format(product.promotion or 128,
      product.promotion == 0 and " (none)" or "") or nil
  end
  if (product.hadamard or 0) > 0 then
    list[#list + 1] = ("Hadamard %d, signs %s"):format(product.hadamard, product.signs or "fixed")
  end
  return table.concat(list, ", ")
end

--- Describes a valid `fp8` table in words, as a list of { name, text }.
function M.describe(fp8)
  local rows, scaled, device = {}, microscaled(fp8.x), false
  local function add(name, text) rows[#rows + 1] = { name, text } end
  for _, name in ipairs(M.roles) do
    local role = fp8[name] or {}
    add("fp8 " .. name, role_text(role))
    if role.backward then add("    for backward", role_text(role.backward)) end
  end
  for _, name in ipairs(M.products) do
    local product = fp8[name] or {}
    add("fp8 " .. name, product_text(name, product, scaled))
    device = device or not product.high and (product.accumulator or "device") == "device"
  end
  if device then
    add("  device", scaled and "blackwell where the card can multiply the codes, else fp32"
      or "hopper on a card, else fp32")
  end
  if fp8.high and #fp8.high > 0 then
    add("high precision", "layers that match " .. table.concat(fp8.high, " or "))
  end
  for _, over in ipairs(fp8.layers or {}) do
    local list = { over.high and "high precision" or nil }
    for _, name in ipairs(M.roles) do
      list[#list + 1] = over[name] and ("%s %s"):format(name,
        role_text(arguments.merged(fp8[name], over[name])))
    end
    for _, name in ipairs(M.products) do
      list[#list + 1] = over[name] and ("%s %s"):format(name,
        product_text(name, arguments.merged(fp8[name], over[name]), scaled))
    end
    add("layers", ("%s: %s"):format(over.match, table.concat(list, "; ")))
  end
  for i, rung in ipairs(fp8.ladder or {}) do
    add(("ladder %d"):format(i), type(rung) == "string" and rung
      or "changes of " .. table.concat(nearest.keys(rung), ", "))
  end
  for _, name in ipairs { "high_first", "high_last" } do
    if (fp8[name] or 0) > 0 then
      add(name, show.counted(fp8[name], "block") .. " in high precision")
    end
  end
  local policies = type(fp8.policy) == "string" and { fp8.policy } or fp8.policy or {}
  for _, policy in ipairs(policies) do
    if type(policy) == "string" then add("policy", policy) end
  end
  if fp8.sample then
    add("sample", fp8.sample == 0 and "never" or ("every %d steps"):format(fp8.sample))
  end
  add("guide", scaled and "docs/microscaling.md" or "docs/fp8.md")
  return rows
end

local EXAMPLES = { high = '{ "^blocks%.1%." }', ladder = '{ "mxfp8", { x = { format = "e5m2" } } }',
  layers = '{ { match = "mlp", x = { format = "e5m2" } } }', policy = '{ "fp8_delayed" }' }
local PATTERN = "a Lua pattern of module paths"

--- Raises an error if `fp8` is not a valid table; `where` begins the message. named: as in rungs().
function M.check(fp8, named, where)
  known(fp8, FP8, where)
  local policy = fp8.policy
  expect(policy == nil or type(policy) == "string" or type(policy) == "table", policy,
    "%s: expected policy to be a name or a list of names", where)
  for _, name in ipairs { "high", "ladder", "layers", "policy" } do
    local file = name == "policy" and (type(policy) == "string"
      or policy and (policy.source or policy.decide))
    if fp8[name] ~= nil and not file then want_list(fp8[name], where, name, EXAMPLES[name]) end
  end
  for i, match in ipairs(fp8.high or {}) do
    want_pattern(match, ("%s: high[%d]"):format(where, i), PATTERN)
  end
  local layer = changed({}, fp8, where)
  M.rungs(fp8, layer, named, where)
  for i, over in ipairs(fp8.layers or {}) do
    local at = ("%s: layers[%d]"):format(where, i)
    known(over, LAYER, at)
    want_pattern(over.match, at .. ": match", PATTERN)
    boolean(over.high, at, "high")
    M.rungs(fp8, changed(layer, over, at), named, at)
  end
  for _, name in ipairs { "high_first", "high_last" } do
    expect(fp8[name] == nil or whole(fp8[name], where, name) >= 0, fp8[name],
      "%s: expected %s to be a number of blocks, 0 or more", where, name)
  end
  expect(fp8.sample == nil or whole(fp8.sample, where, "sample") >= 0, fp8.sample,
    "%s: expected sample to be n > 0 (measures at every n-th step) or 0 (never)", where)
end

return M
