-- Views of tensors, joins, and selection of elements: reshape, permute, slice, split, concat,
-- gather, topk and so on. Called through tensor.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local calls = require "engine.tensor.calls"

local C, check, raise, raise_if, Tensor, call = M_ffi.C, M_ffi.check, M_ffi.raise, M_ffi.raise_if,
  M_ffi.Tensor, M_ffi.call
local inputs, ints = call["in"], call.ints
local info, shape_table, shape_text = arguments.info, arguments.shape_table, arguments.shape_text
local is_tensor = arguments.is_tensor
local want, want_whole, dimension = arguments.want, arguments.want_whole, arguments.dimension
local methods, functions, run1, run2, run_many = calls.methods, calls.functions, calls.run1,
  calls.run2, calls.run_many

local MAX_DIMS = tonumber(C.ENG_MAX_DIMS)

local function shape_ints(name, ...)
  local list, n = arguments.numbers(...)
  raise_if(n > MAX_DIMS, "%s: expected up to %d dimensions, got %d", name, MAX_DIMS, n)
  ints[0] = n
  for i = 1, n do ints[i] = want_whole(list[i], name, "a dimension") end
end

--- x:view(2, -1) or x:view { 2, -1 }: the same elements in a new shape; one dimension may be -1.
--- Also called reshape; copies only if the layout requires it.
function methods.view(x, ...)
  want(x, "view")
  shape_ints("view", ...)
  return run1("reshape", x)
end
methods.reshape = methods.view

--- x:permute(3, 1, 2): x with its dimensions in a new order.
function methods.permute(x, ...)
  want(x, "permute")
  local n = info(x).ndim
  local order, given = arguments.numbers(...)
  if given ~= n then
    raise("permute: expected the %d dimensions of %s in a new order, got a list of %d", n,
      shape_text(shape_table(info(x))), given)
  end
  for i = 1, n do ints[i - 1] = dimension(x, order[i], "permute") end
  return run1("permute", x)
end

--- Swaps two dimensions, the last two unless given.
function methods.transpose(x, a, b)
  want(x, "transpose")
  local n = info(x).ndim
  if n < 2 and not a then
    raise("transpose: expected at least 2 dimensions, got %s", shape_text(shape_table(info(x))))
  end
  a, b = dimension(x, a or -2, "transpose"), dimension(x, b or -1, "transpose")
  for d = 0, n - 1 do ints[d] = d end
  ints[a], ints[b] = b, a
  return run1("permute", x)
end

--- x:expand(2, 3): x with its dimensions of size 1 repeated to the given sizes, and with further
--- dimensions in front, without a copy. A size of -1 keeps x's size.
function methods.expand(x, ...)
  want(x, "expand")
  shape_ints("expand", ...)
  return run1("expand", x)
end

--- The elements at the positions start (by default 1) to stop (by default -1, the last) of
--- dimension d, or at every step-th of these positions. As in string.sub, the range includes start
--- and stop, a negative position counts from the end, and positions outside the dimension are left
--- out. A range that ends before it starts is empty.
function methods.slice(x, d, start, stop, step)
  want(x, "slice")
  local k, what = dimension(x, d, "slice")
  local n = tonumber(what.shape[k])
  start, stop = want_whole(start or 1, "slice", "the first position"),
    want_whole(stop or -1, "slice", "the last position")
  if start == 0 then raise("slice: positions count from 1, or from -1 backward; got 0") end
  if start < 0 then start = math.max(start + n + 1, 1) end
  if stop < 0 then stop = stop + n + 1 end
  ints[0], ints[1], ints[2], ints[3] = k, start - 1, math.max(stop, 0),
    want_whole(step or 1, "slice", "the step", 1)
  return run1("slice", x)
end

--- Selects position i of dimension d. The result does not have that dimension.
function methods.select(x, d, i)
  want(x, "select")
  local k, what = dimension(x, d, "select")
  local n = tonumber(what.shape[k])
  local at = want_whole(i, "select", "a position") < 0 and i + n + 1 or i
  if at < 1 or at > n then
    raise("select: there is no position %d in dimension %d of %s; positions count from 1, or " ..
      "from -1 backward", i, k + 1, shape_text(shape_table(what)))
  end
  return methods.squeeze(methods.slice(x, d, at, at), d)
end

local MOST_PARTS = 7000      -- LuaJIT's limit on the results of a function is slightly higher

-- Raises an error if n parts are too many for a function to return.
local function want_parts(n, name)
  raise_if(n > MOST_PARTS, "%s: expected up to %d parts, got %.0f; hint: x:slice() in a loop",
    name, MOST_PARTS, n)
end

--- Splits x along dimension d (the last unless given) into parts of the given sizes, returned as
--- several results. If `sizes` is a number, every part has that size, but the last may be smaller.
function methods.split(x, sizes, d)
  want(x, "split")
  local k, what = dimension(x, d or -1, "split")
  local n = tonumber(what.shape[k])
  if type(sizes) ~= "table" then
    local size, list = want_whole(sizes, "split", "the size of a part", 1), {}
    want_parts(n / size, "split")
    for at = 1, n, size do list[#list + 1] = math.min(size, n - at + 1) end
    sizes = #list > 0 and list or { 0 }
  end
  want_parts(#sizes, "split")
  local sum = 0
  for _, size in ipairs(sizes) do sum = sum + want_whole(size, "split", "the size of a part", 0) end
  if sum ~= n then
    raise("split: the parts add up to %d, but dimension %d of %s has size %d", sum, k + 1,
      shape_text(shape_table(what)), n)
  end
  if #sizes > C.ENG_OP_OUTPUTS then   -- more parts than an operation has outputs
    local parts, at = {}, 1
    for i, size in ipairs(sizes) do
      parts[i], at = methods.slice(x, k + 1, at, at + size - 1), at + size
    end
    return unpack(parts)
  end
  call.op, call.n_in, call.n_out, inputs[0], ints[0] = M_ffi.op.split, 1, #sizes, x, k
  for i, size in ipairs(sizes) do ints[i] = size end
  check(C.eng_run(call))
  local parts = {}
  for i = 1, #sizes do parts[i] = Tensor(call.out[i - 1]) end
  return unpack(parts)
end

--- Splits x into n equal parts along dimension d (the last unless given), returned as several
--- results.
function methods.chunk(x, n, d)
  want(x, "chunk")
  want_parts(want_whole(n, "chunk", "the number of parts", 1), "chunk")
  local k, what = dimension(x, d or -1, "chunk")
  local size, sizes = tonumber(what.shape[k]), {}
  if size % n ~= 0 then
    raise("chunk: dimension %d of %s does not divide into %d equal parts; hint: x:split(%d, %d) " ..
      "makes a smaller last part", k + 1, shape_text(shape_table(what)), n, math.ceil(size / n),
      k + 1)
  end
  for i = 1, n do sizes[i] = size / n end
  return methods.split(x, sizes, k + 1)
end

--- x without its dimensions of size 1, or without dimension d if its size is 1.
function methods.squeeze(x, d)
  want(x, "squeeze")
  local k = d and dimension(x, d, "squeeze")
  local what, kept = info(x), 0
  for i = 0, what.ndim - 1 do
    if what.shape[i] ~= 1 or (k ~= nil and k ~= i) then
      kept = kept + 1
      ints[kept] = what.shape[i]
    end
  end
  ints[0] = kept
  return run1("reshape", x)
end

-- Returns x with a new dimension of size 1, which becomes dimension d.
local function unsqueeze(x, d, name)
  want(x, name)
  local what = info(x)
  local n = what.ndim
  local k = want_whole(d, name, "a dimension") < 0 and d + n + 2 or d
  if k < 1 or k > n + 1 then
    raise("%s: expected a dimension from 1 to %d for %s, got %d", name, n + 1,
      shape_text(shape_table(what)), d)
  end
  if n == MAX_DIMS then
    raise("%s: expected a tensor of up to %d dimensions, got %s", name, MAX_DIMS - 1,
      shape_text(shape_table(what)))
  end
  for i = 1, n + 1 do ints[i] = i < k and what.shape[i - 1] or i > k and what.shape[i - 2] or 1 end
  ints[0] = n + 1
  return run1("reshape", x)
end

--- x with a new dimension of size 1, which becomes dimension d.
function methods.unsqueeze(x, d) return unsqueeze(x, d, "unsqueeze") end

local function want_list(list, name)
  M_ffi.expect(type(list) == "table", list, "%s: expected a list of tensors", name)
  if #list == 0 then raise("%s: expected a list of tensors, got an empty one", name) end
  for i = 1, #list do
    M_ffi.expect(is_tensor(list[i]), list[i], "%s: expected entry %d of the list to be a tensor",
      name, i)
  end
end

--- Joins a list of tensors along dimension d (1 by default).
function functions.concat(list, d)
  want_list(list, "concat")
  local k = dimension(list[1], d or 1, "concat")
  while #list > C.ENG_OP_INPUTS do   -- more tensors than an operation has inputs
    local joined, most = {}, tonumber(C.ENG_OP_INPUTS)
    for i = 1, #list, most do
      local part = { unpack(list, i, math.min(i + most - 1, #list)) }
      joined[#joined + 1] = functions.concat(part, k + 1)
    end
    list = joined
  end
  ints[0] = k
  return run_many("concat", 1, #list, unpack(list))
end

--- Joins tensors of one shape along a new dimension d (1 by default).
function functions.stack(list, d)
  want_list(list, "stack")
  local raised, first = {}, shape_text(list[1].shape)
  for i, x in ipairs(list) do
    local shape = shape_text(x.shape)
    if shape ~= first then
      raise("stack: expected tensors of one shape, got %s and %s", first, shape)
    end
    raised[i] = unsqueeze(x, d or 1, "stack")
  end
  return functions.concat(raised, d or 1)
end

-- ------------------------------------------------------------------ selection

for _, name in ipairs { "gather", "index_select" } do
  -- x:gather(d, index), x:index_select(d, index): the indices in `index` count from 0.
  methods[name] = function(x, d, index)
    want(x, name)
    want(index, name)
    ints[0] = dimension(x, d, name)
    return run2(name, x, index)
  end
end

--- weight:embedding(ids): for each id in ids [..], the row with that index (from 0) of the weight
--- [V x C] -> [.. x C]. An id outside 0..V-1 is an error.
function methods.embedding(weight, ids) return run2("embedding", weight, ids) end

--- Returns the k largest elements along the last dimension, [.. x k], and their indices (from 0).
--- The optional argument d must be the last dimension.
function methods.topk(x, k, d)
  want(x, "topk")
  calls.want_last(x, d, "topk")
  ints[0] = want_whole(k, "topk", "k", 0)
  return run_many("topk", 2, 1, x)
end

for _, name in ipairs { "argmax", "argmin" } do
  -- x:argmax([d [, keepdim]]): the index (from 0) of the largest (argmin: smallest) element along
  -- dimension d, by default the last.
  methods[name] = function(x, d, keepdim)
    want(x, name)
    ints[0], ints[1] = dimension(x, d or -1, name), calls.keep_of(keepdim, name)
    return run1(name, x)
  end
end
