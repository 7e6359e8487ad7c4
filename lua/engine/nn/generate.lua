-- Sampling from decoders: model:generate. The keys and values of past tokens are kept in caches, so
-- that the model computes one row for a new token instead of a whole sequence. While tokens are
-- generated with caches, each attention module has a list `caches`. It holds one cache for all
-- sequences or, if their lengths differ, one for each sequence. The model's field `cached` is the
-- number of tokens that the cache of the longest sequence has. transformer.lua and models.lua read
-- these fields. Called through the models of models.lua. Shapes: R sequences, T tokens, G key/value
-- heads, D their width, V vocabulary.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local random = require "engine.base.random"
local autograd = require "engine.tensor.autograd"
local padding = require "engine.nn.padding"
local tensor = require "engine.tensor.tensor"
local within = require "engine.base.within"

local C, expect, raise_if, want_whole = M_ffi.C, M_ffi.expect, M_ffi.raise_if,
  arguments.want_whole

-- ------------------------------------------------------------------ the cache

-- Keys and values of one attention module, each [rows x room x kv_heads x head_width]; rows is 1 if
-- each sequence has a cache of its own. Only the first `length` of the `room` positions are filled.
local Cache = {}
Cache.__index = Cache

--- Appends k and v [R x T x G x D]. Returns all keys and values so far. A cache without memory only
--- records the dtype of k, and returns k and v.
function Cache:append(k, v)
  local first, last = self.length + 1, self.length + k:size(2)
  if not self.k then
    self.dtype = k.dtype
    return k, v
  end
  self.k:slice(2, first, last):copy(k)
  self.v:slice(2, first, last):copy(v)
  self.length = last
  return self.k:slice(2, 1, last), self.v:slice(2, 1, last)
end

-- Removes the caches from the model. Their memory is freed when the scope ends.
local function drop_caches(model)
  rawset(model, "cached", nil)
  model:apply(function(m) rawset(m, "caches", nil) end)
end

-- Makes caches for R sequences of up to `room` tokens. If `apart` is true, each sequence gets its
-- own cache. Runs the model on one token first, to learn the dtypes.
local function make_caches(model, R, room, token, apart)
  local attentions = {}
  model:apply(function(m)
    if m._class == "attention" then
      attentions[#attentions + 1] = m
      rawset(m, "caches", { setmetatable({ length = 0 }, Cache) })
    end
  end)
  autograd.scope(model, tensor.tensor({ { token } }, { dtype = "i32", keep = false }))
  for _, m in ipairs(attentions) do
    local options, rows = { dtype = m.caches[1].dtype, keep = false }, apart and 1 or R
    for i = 1, R / rows do
      m.caches[i] = setmetatable({ length = 0,
        k = tensor.zeros(rows, room, m.kv_heads, m.head_width, options),
        v = tensor.zeros(rows, room, m.kv_heads, m.head_width, options) }, Cache)
    end
  end
  rawset(model, "cached", 0)
end

-- ------------------------------------------------------------------ sampling

local FEW = 1024   -- this many of the most likely tokens usually reach the probability top_p

-- Draws an index of p, a list of probabilities. Draws only from the first entries: from the fewest
-- whose sum is `share` or more. Unless `share` is 1, p must be in falling order.
local function draw(p, share)
  local sum, count, kept = 0, 0, 0
  while count < #p and (kept < share or count == 0) do
    count = count + 1
    kept = kept + p[count]
  end
  local u = tensor.rand(1):item() * kept
  for i = 1, count do
    sum = sum + p[i]
    if u < sum then return i end
  end
  return count
end

local COLDEST = 1e-30   -- below this temperature, logits / temperature would overflow f32

-- Draws an id from logits [1 x V] f32. At a temperature below COLDEST, such as 0, returns the most
-- likely id. top_p is a share of the total probability of the top_k tokens.
local function sample(logits, o)
  local most = logits:max():item()
  raise_if(most - most ~= 0, "generate: expected finite logits from the model, got %g; hint: " ..
    "its weights may hold inf or nan", most)
  if o.temperature < COLDEST then return logits:argmax(-1):item() end
  local V, top, ids = logits:size(-1), logits / o.temperature, nil
  local k = math.min(o.top_k or V, V)
  if o.top_p < 1 and k == V and V > FEW then   -- finds the tokens without a full sort
    local chance, some = top:softmax():topk(FEW)
    if chance:sum():item() >= o.top_p then
      return some:view(-1):totable()[draw(chance:view(-1):totable(), o.top_p)]
    end
  end
  if k < V or o.top_p < 1 then top, ids = top:topk(k) end
  local pick = draw(top:softmax():view(-1):totable(), o.top_p)
  return ids and ids:view(-1):totable()[pick] or pick - 1
end

-- ------------------------------------------------------------------ generation

-- Returns the logits [R x V] f32 of the token that follows each of `rows`, R lists of tokens. The
-- longest list has n tokens. With a cache, the model reads only the tokens that the cache lacks. If
-- n exceeds the context, the cache is dropped and the model reads only the last tokens of each
-- list. Lists of unequal length (`apart`) are padded at their beginning.
local function next_logits(model, rows, n, apart)
  if n > model.context and rawget(model, "cached") then drop_caches(model) end
  local cached, part, lengths, first = rawget(model, "cached"), {}, {}, {}
  for r, row in ipairs(rows) do
    local start = math.max((cached or 0) > 0 and #row - 1 or 0, #row - model.context)
    part[r], lengths[r], first[r] = { unpack(row, start + 1) }, #row - start, cached and start or 0
  end
  for _, row in ipairs(part) do
    for _ = #row + 1, math.max(unpack(lengths)) do table.insert(row, 1, 0) end
  end
  local logits = model(tensor.tensor(part, { dtype = "i32", keep = false }),
    { mask = apart and padding.ending_together(lengths, first) or nil }):select(2, -1)
  if cached then rawset(model, "cached", n) end
  return logits:to("f32")
end

-- A yield would leave the caches and the scope of the generation open while other code runs.
local YIELDED = "generate: expected progress to return, but it yielded; hint: store the count " ..
  "in progress and yield after generate has returned"

-- Appends up to o.max_tokens tokens to each of `rows`, lists of tokens. A row ends at its first
-- stop token.
local function extend(model, rows, o)
  local n, open, ends, apart = 0, #rows, {}, false
  for _, row in ipairs(rows) do n, apart = math.max(n, #row), apart or #row ~= #rows[1] end
  if o.cache and n <= model.context then
    make_caches(model, #rows, math.min(model.context, n + o.max_tokens), rows[1][1], apart)
  end
  for i = n, n + o.max_tokens - 1 do
    autograd.scope(function()
      local logits = next_logits(model, rows, i, apart)
      for r, row in ipairs(rows) do
        row[#row + 1] = sample(logits:slice(1, r, r), o)
        if not ends[r] and o.stop[row[#row]] then ends[r], open = #row, open - 1 end
      end
    end)
    local over = open == 0 or C.eng_interrupted() > 0
    if o.progress then
      autograd.at_once(YIELDED, o.progress, i - n + 1, over and i - n + 1 or o.max_tokens)
    end
    if over then break end
  end
  for r, row in ipairs(rows) do rows[r] = { unpack(row, 1, ends[r] or #row) } end
end

local OPTIONS = "max_tokens temperature top_k top_p stop seed cache progress"

local function read(options, default_stop)
  options = arguments.read_named(options, "generate", OPTIONS)
  local o = { temperature = options.temperature or 1, top_k = options.top_k, stop = {},
    cache = options.cache ~= false, progress = options.progress, top_p = options.top_p or 1,
    max_tokens = want_whole(options.max_tokens, "generate", "max_tokens", 0) }
  expect(type(o.temperature) == "number" and o.temperature >= 0 and o.temperature < math.huge,
    o.temperature, "generate: expected temperature to be a finite number >= 0")
  if o.top_k ~= nil then want_whole(o.top_k, "generate", "top_k", 1) end
  expect(type(o.top_p) == "number" and o.top_p > 0 and o.top_p <= 1, o.top_p,
    "generate: expected top_p in (0, 1]")
  expect(o.progress == nil or type(o.progress) == "function", o.progress,
    "generate: expected progress to be a function(done, all)")
  local stop = options.stop or default_stop or {}
  if type(stop) ~= "table" then stop = { stop } end
  arguments.want_list(stop, "generate", "stop", "{ 0, 2 }")
  for _, id in ipairs(stop) do o.stop[want_whole(id, "generate", "a stop token", 0)] = true end
  if options.seed ~= nil then want_whole(options.seed, "generate", "seed", 0) end
  return o, options.seed
end

-- Returns the rows of `tokens`, which is one list of tokens or a list of such lists. Raises an
-- error if it is neither.
local function rows_of(tokens)
  local many = type(tokens) == "table" and type(tokens[1]) == "table"
  local list = many and tokens or { tokens }
  for i = 1, math.max(#list, 1) do
    local row = list[i]
    expect(type(row) == "table", row, "generate: expected a prompt to be a list of tokens, such " ..
      "as tokenizer:encode(text) or ids:totable()")
    arguments.want_list(row, "generate", "the tokens", "{ 1, 2, 3 }")
    raise_if(#row == 0, "generate: expected prompt %d to have at least one token, got none", i)
    for k, id in ipairs(row) do
      want_whole(id, "generate", ("token %d of prompt %d"):format(k, i), 0)
    end
  end
  return list
end

--- model:generate(tokens, { max_tokens, temperature = 1, top_k = nil, top_p = 1, stop = nil, seed =
--- nil, cache = true }): the list `tokens` followed by up to max_tokens sampled tokens, in
--- evaluation mode. Given a list of lists, of equal length or not, it continues all of them as one
--- batch. temperature 0 takes the most likely token. top_k: draws only from this many of the most
--- likely tokens. top_p: of these tokens, draws only from the most likely ones that together reach
--- this share of the total probability. stop: a token, or a list of tokens, that ends a sequence;
--- a loaded model stops at its eos_token_id unless `stop` is given. Draws from the engine's
--- generator; `seed` seeds it for this call only. cache = false computes the keys and values of all
--- tokens again for each new token. progress: a function(done, all) that is called after each new
--- token; it must not yield. done: how many new tokens each sequence has; all: max_tokens, but
--- equal to `done` in the last call.
local function generate(model, tokens, options, more)
  if type(options) == "number" then   -- generate(tokens, count [, options])
    options = arguments.merged({ max_tokens = options },
      arguments.read_named(more, "generate", OPTIONS))
  end
  raise_if(model.config.labels, "generate: %s has a head for labels, not for tokens; hint: " ..
    "model(ids) returns the logits of the labels", model._class)
  local o, seed = read(options, rawget(model, "stop"))
  local given, rows, place = rows_of(tokens), {}, random.place()
  for r, row in ipairs(given) do rows[r] = { unpack(row) } end
  within(function() end, function()
    drop_caches(model)
    if seed then random.go(place) end
  end, function()
    if seed then C.eng_seed(seed) end
    model:evaluating(autograd.scope, extend, model, rows, o)
  end)
  return given[1] == tokens and rows[1] or rows
end

return generate
