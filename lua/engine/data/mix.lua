-- Mixtures of loaders: `engine.data.mix`. The choice of the loader for draw n depends only on the
-- weights, the seed and n. So a mixture can skip draws, and it resumes from the positions of its
-- loaders. Called by init.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local order = require "engine.data.order"
local position = require "engine.data.position"
local show = require "engine.base.show"
local tensor = require "engine.tensor.tensor"

local expect, raise, raise_if = M_ffi.expect, M_ffi.raise, M_ffi.raise_if

local M = {}

local Mix = {}
Mix.__index = Mix

-- Returns the index (from 1) of the loader for draw n (from 0).
local function chosen(self, n)
  local u = order.draw(self.seed, n, 2 ^ 32) / 2 ^ 32
  for k, limit in ipairs(self.limits) do
    if u < limit then return k end
  end
  return self.last
end

-- Raises an error if `other`, a batch of loader l, lacks a field of `part`, a batch of loader k, or
-- has it with another type.
local function want_fields(part, other, k, l)
  for key, value in pairs(part) do
    if type(other[key]) ~= type(value) then
      raise("data.mix: batches of loader %d have the field %s, but batches of loader %d %s", k,
        tostring(key), l, other[key] == nil and "lack it" or "have it with another type")
    end
  end
end

-- Joins batches: joins their tensors along the first dimension, adds up `tokens`, and drops all
-- other fields.
local function join(self, parts, from)
  local joined = {}
  for i, part in ipairs(parts) do
    want_fields(parts[1], part, from[1], from[i])
    want_fields(part, parts[1], from[i], from[1])
  end
  for key, first in pairs(parts[1]) do
    local list = {}
    for i, part in ipairs(parts) do list[i] = part[key] end
    if tensor.is_tensor(first) then
      local row = first.shape
      for i, x in ipairs(list) do
        local shape = x.shape
        shape[1] = row[1]
        if x.dtype ~= first.dtype or tensor.shape_text(shape) ~= tensor.shape_text(row) then
          raise("data.mix: %s is %s %s in batches of loader %d, but %s %s in batches of loader %d; "
            .. "expected rows of one dtype and shape", tostring(key), first.dtype,
            tensor.shape_text(row), from[1], x.dtype, tensor.shape_text(x.shape), from[i])
        end
      end
      joined[key] = tensor.concat(list, 1)
    elseif key == "tokens" then
      joined.tokens = 0
      for _, n in ipairs(list) do joined.tokens = joined.tokens + n end
    end
  end
  self.at = self.at + 1
  return joined
end

--- Returns the next batch: `batch` draws, joined.
function Mix:next()
  local parts, from = {}, {}
  for i = 1, self.batch do
    from[i] = chosen(self, self.at * self.batch + i - 1)
    parts[i] = self.loaders[from[i]]:next()
    expect(type(parts[i]) == "table", parts[i],
      "data.mix: expected a batch of loader %d to be a table", from[i])
  end
  if self.batch > 1 then return join(self, parts, from) end
  self.at = self.at + 1
  return parts[1]
end

--- Skips n batches.
function Mix:skip(n)
  local counts = {}
  arguments.want_whole(n, "data.skip", "n", 0)
  for i = self.at * self.batch, (self.at + n) * self.batch - 1 do
    local k = chosen(self, i)
    counts[k] = (counts[k] or 0) + 1
  end
  for k, loader in ipairs(self.loaders) do
    local count = counts[k] or 0
    if loader.skip then loader:skip(count)
    else for _ = 1, count do loader:next() end end
  end
  self.at = self.at + n
end

local IDENTITY = { "kind", "seed", "batch", "weights" }

Mix.__call = position.no_loop

--- Returns the positions of the mixture and of its loaders as plain data.
function Mix:state()
  local state = { at = self.at, loaders = {} }
  for _, key in ipairs(IDENTITY) do state[key] = self[key] end
  for k, loader in ipairs(self.loaders) do state.loaders[k] = loader:state() end
  return state
end

--- Moves to a saved position. Refuses the position of another mixture, and a position that one of
--- the loaders refuses; the mixture and its loaders then stay where they were.
function Mix:restore(state)
  local at, before = position.check(state, self, IDENTITY), self:state().loaders
  for k, loader in ipairs(self.loaders) do
    local good, problem = pcall(loader.restore, loader,
      type(state.loaders) == "table" and state.loaders[k] or nil)
    if not good then
      for j = k - 1, 1, -1 do self.loaders[j]:restore(before[j]) end
      error(problem, 0)
    end
  end
  self.at = at
end

function Mix:__tostring()
  local lines = { ("mix of %d loaders, at batch %d"):format(#self.loaders, self.at) }
  for k, loader in ipairs(self.loaders) do
    lines[k + 1] = ("  %s  %s"):format(self.shares[k], tostring(loader))
  end
  return table.concat(lines, "\n")
end

--- Makes a mixture. o: the options, as init.lua has read them.
function M.new(o)
  local loaders = o.loaders
  expect(type(loaders) == "table" and #loaders ~= 0, loaders,
    "data.mix: expected loaders = a list of loaders")
  for k, loader in ipairs(loaders) do
    for _, method in ipairs { "next", "state", "restore" } do
      raise_if(type(loader) ~= "table" or not loader[method], "data.mix: expected loader %d to " ..
        "have next(), state() and restore(), but it has no %s()", k, method)
    end
  end
  local given, weights, total = o.weights, {}, 0
  raise_if(given and (type(given) ~= "table" or #given ~= #loaders),
    "data.mix: expected %d weights, one for each loader, got %s", #loaders,
    type(given) == "table" and #given or M_ffi.value_text(given))
  for k = 1, #loaders do
    local w = given and given[k] or 1
    expect(type(w) == "number" and w >= 0 and w < math.huge, w,
      "data.mix: expected weight %d to be a finite number of 0 or more", k)
    weights[k], total = w, total + w
  end
  if total <= 0 then raise("data.mix: expected a weight above 0, got only 0") end
  if total == math.huge then raise("data.mix: expected weights with a finite sum, got inf") end
  local limits, shares, exact, sum, last = {}, {}, {}, 0, 1
  for k, w in ipairs(weights) do
    sum = sum + w
    limits[k], shares[k], exact[k] = sum / total, ("%.3g %%"):format(100 * w / total), show.exact(w)
    if w > 0 then last = k end
  end
  return setmetatable({ kind = "mix", loaders = loaders, seed = o.seed, batch = o.batch, at = 0,
    limits = limits, shares = shares, weights = table.concat(exact, " "), last = last,
    unit = loaders[1].unit }, Mix)
end

return M
