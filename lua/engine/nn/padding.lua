-- Padding, for batches of sequences of unequal length. Each row [T] of a batch holds one sequence,
-- without gaps; the other tokens of the row are padding. Attention runs on each sequence
-- separately, so that no query attends to padding. All other layers treat padding like tokens.
-- A list of spans says where in its row each sequence is. models.lua makes the list from a mask,
-- generate.lua makes it from lengths, and transformer.lua reads it. Shapes: B rows, T tokens.
-- Called by models.lua and generate.lua.
local M_ffi = require "engine.base.ffi"
local tensor = require "engine.tensor.tensor"

local expect, raise_if = M_ffi.expect, M_ffi.raise_if

local M = {}

-- A list with an entry for each row: { first, last, position }. The sequence consists of the tokens
-- first + 1 to last of the row (counted from 1); `position` is the position of its first token. The
-- list also has the fields
--   place      [B*T]: the index (from 0) of each token among the N tokens of all sequences; N for
--              padding; nil if the batch has no padding
--   positions  [B x T]: the position of each token; nil if each row has the positions 0 to T - 1
--   reach      one more than the largest position of the rows, padding at their ends included
local Spans = {}
Spans.__index = Spans

local function of_step(list) return tensor.tensor(list, { dtype = "i32", keep = false }) end

local function new(spans, T)
  local place, count = {}, 0
  for _, span in ipairs(spans) do count = count + span.last - span.first end
  local n = 0
  for i, span in ipairs(spans) do
    for t = 0, T - 1 do
      local real = t >= span.first and t < span.last
      place[(i - 1) * T + t + 1] = real and n or count
      n = n + (real and 1 or 0)
    end
  end
  spans.place, spans.reach = count < #place and of_step(place) or nil, T
  return setmetatable(spans, Spans)
end

-- Returns the span of row i of a mask. `row` is the list of the numbers in this row.
local function span_of(row, i, name)
  local first, last, count = nil, 0, 0
  for t, value in ipairs(row) do
    if value ~= 0 then first, last, count = first or t - 1, t, count + 1 end
  end
  raise_if(not first, "%s: expected a token in every row of the mask, got none in row %d", name, i)
  raise_if(count < last - first, "%s: expected no gaps between tokens in row %d of the mask, " ..
    "got %d tokens at positions %d to %d", name, i, count, first + 1, last)
  return { first = first, last = last, position = first }
end

--- Returns the spans for a mask [B x T] of the ids [B x T]. The mask is 0 at padding and nonzero at
--- tokens. The position of a token is its index in the row (from 0), as in Hugging Face's
--- transformers. If `mask` is a list of spans already, returns it unchanged. Returns nil if there
--- is no mask or no padding. name: the model's name, which begins error messages.
function M.read(mask, ids, name)
  if mask == nil or getmetatable(mask) == Spans then return mask end
  expect(tensor.is_tensor(mask), mask, "%s: expected mask to be a tensor shaped like the ids", name)
  local shape, wanted = tensor.shape_text(mask.shape), tensor.shape_text(ids.shape)
  raise_if(shape ~= wanted, "%s: expected a mask %s like the ids, got %s", name, wanted, shape)
  local spans, T = {}, ids:size(-1)
  for i, row in ipairs(mask:ne(0):to("i32"):view(-1, T):totable()) do
    spans[i] = span_of(row, i, name)
  end
  spans = new(spans, T)
  return spans.place and spans or nil
end

--- Returns the spans of rows that begin with padding. Row i ends with a sequence of lengths[i]
--- tokens, whose first token has the position first[i].
function M.ending_together(lengths, first)
  local T, spans, positions, reach = math.max(unpack(lengths)), {}, {}, 0
  for i, n in ipairs(lengths) do
    reach = math.max(reach, first[i] + n)
    spans[i], positions[i] = { first = T - n, last = T, position = first[i] }, {}
    for t = 1, T do positions[i][t] = first[i] + math.max(0, t - 1 - (T - n)) end
  end
  spans = new(spans, T)
  spans.positions, spans.reach = of_step(positions), reach
  return spans
end

--- Joins the sequences' results, each [1 x L x ..], into the batch's result [B x T x ..] with 0 at
--- padding.
function Spans:join(parts)
  if not self.place then return tensor.concat(parts, 1) end
  local shape = parts[1].shape
  shape[2] = 1
  parts[#parts + 1] = tensor.zeros(shape, { dtype = parts[1].dtype, keep = false })
  shape[1], shape[2] = #self, -1
  return tensor.concat(parts, 2):index_select(2, self.place):view(shape)
end

return M
