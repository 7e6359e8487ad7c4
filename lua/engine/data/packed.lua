-- Makes rows of a fixed length from documents. With `pack`, the documents of all epochs follow each
-- other, each with its end token if there is one, and are cut into rows. The last token of a row is
-- also the first of the next row, so every token but the very first has one place as a target. A
-- target that does not count in the loss is -100. Without `pack`, a row holds one document, which
-- is cut or padded. Documents without a token that counts are left out.
--
-- The position is an epoch, an index into the order of the documents in this epoch, and the index
-- of a token in the document. Called by init.lua.
local arguments = require "engine.base.arguments"
local M_ffi = require "engine.base.ffi"
local fields = require "engine.base.fields"
local order = require "engine.data.order"
local position = require "engine.data.position"
local tensor = require "engine.tensor.tensor"

local ffi, raise = M_ffi.ffi, M_ffi.raise

local M = {}

local IGNORED = -100                 -- cross_entropy's ignore_index
local OF_STEP = { keep = false }     -- a batch is freed with its step, even outside engine.steps

local Packed = {}
Packed.__index = Packed

-- Returns the document at the loader's position. If none of its tokens counts in the loss, moves to
-- the next document with a token that counts.
local function current(self)
  local tried = 0
  while not self.document do
    if self.place >= self.examples then self.epoch, self.place = self.epoch + 1, 0 end
    local i = self.place
    if self.shuffle then i = order.permute(i, self.examples, self.seed, self.epoch, self.order) end
    self.document = self.documents:get(i)
    if self.document and self.token >= self.document[1].n then
      raise("data.%s: the position does not fit the documents: it is token %d (from 0) of a " ..
        "document with %d tokens; hint: resume with the `encode` of the run that saved the " ..
        "position", self.kind, self.token, self.document[1].n)
    end
    if not self.document then self.place, self.token = self.place + 1, 0 end
    tried = tried + 1
    -- If only one of the n documents has a token that counts, it may come first in an epoch and
    -- last in the next one. Finding it again then takes 2 n - 1 tries.
    if tried > 2 * self.examples then
      raise("data.%s: none of the %d documents has a token that counts in the loss%s%s", self.kind,
        self.examples, self.documents:left_out(), self.kind ~= "chat" and ""
        or "; hint: only tokens of messages with the role 'assistant' count" .. (self.pack and ""
        or (", and only in a document's first %d tokens"):format(self.context + 1)))
    end
  end
  return self.document
end

local function advance(self) self.place, self.token, self.document = self.place + 1, 0, nil end

-- Writes n tokens of a sequence, from token `from` on, to a row that already has t tokens. Returns
-- how many of the written targets count in the loss.
local function put(self, row, t, sequence, from, n)
  local x, y, T, learnt = self.x, self.y, self.context, 0
  local ids, counts, first = sequence.ids, sequence.counts, row * self.context + t
  for k = 0, n - 1 do
    local id = ids[from + k]
    if t + k < T then x[first + k] = id end
    if t + k > 0 then
      local counted = counts[from + k] ~= 0
      y[first + k - 1] = counted and id or IGNORED
      if counted then learnt = learnt + 1 end
    end
  end
  return learnt
end

local function fill_packed(self, row)
  local T, t, learnt = self.context, 0, 0
  while true do
    local sequence = current(self)[1]
    local n = math.min(sequence.n - self.token, T + 1 - t)
    learnt = learnt + put(self, row, t, sequence, self.token, n)
    t, self.token = t + n, self.token + n
    if t > T then break end
    advance(self)
  end
  self.token = self.token - 1
  return learnt
end

local function fill_padded(self, row)
  local T, learnt = self.context, 0
  for k, sequence in ipairs(current(self)) do
    local at = row + (k - 1) * self.batch
    learnt = learnt + put(self, at, 0, sequence, 0, sequence.n)
    for t = sequence.n - 1, T - 1 do
      if t >= sequence.n then self.x[at * T + t] = self.pad end
      self.y[at * T + t] = IGNORED
    end
  end
  advance(self)
  return learnt
end

-- Reads the next batch into self.x and self.y. Leaves out batches in which no target counts,
-- because their loss, a mean over the targets that count, is NaN.
local function fill(self)
  local put_row, learnt = self.pack and fill_packed or fill_padded, 0
  repeat
    for row = 0, self.batch - 1 do learnt = learnt + put_row(self, row) end
  until learnt > 0
  self.at = self.at + 1
end

--- Returns the next batch, as tensors of the current step.
function Packed:next()
  fill(self)
  local rows = self.batch * self.sequences
  return { x = tensor.from_memory(self.x, "i32", { rows, self.context }, OF_STEP),
    y = tensor.from_memory(self.y, "i32", { rows, self.context }, OF_STEP),
    tokens = rows * self.context }
end

--- Skips n batches. Their documents are read and encoded, because their lengths in tokens are not
--- known otherwise.
function Packed:skip(n)
  for _ = 1, arguments.want_whole(n, "data.skip", "n", 0) do fill(self) end
end
Packed.__call = position.no_loop

local IDENTITY = { "kind", "seed", "batch", "context", "shuffle", "examples", "pack", "end_token",
  "encoding" }

--- Returns the loader's position as plain data.
function Packed:state()
  local state = { at = self.at, epoch = self.epoch, place = self.place, token = self.token,
    order = self.order, files = self.files }
  for _, key in ipairs(IDENTITY) do state[key] = self[key] end
  return state
end

--- Moves to a saved position. Refuses a position that was saved with other files, with another
--- value of a field in IDENTITY, or with an encode that gave other tokens for the document that
--- Documents:checksum reads.
function Packed:restore(state)
  local at, version = position.check(state, self, IDENTITY, { epoch = fields.count,
    token = fields.count, place = fields.between(0, self.examples) })
  if state.files ~= self.files then self.documents.records:check(state.files) end
  if state.place ~= self.place or state.epoch ~= self.epoch or version ~= self.order then
    self.document = nil
  end
  self.at, self.order = at, version
  self.epoch, self.place, self.token = state.epoch, state.place, state.token
end

function Packed:__tostring()
  return ("%s: %d documents in %s of %d, batch %d, %s, at batch %d (epoch %.2f)%s"):format(
    self.kind, self.examples, self.pack and "packed rows" or "rows", self.context, self.batch,
    self.shuffle and "shuffled" or "in order", self.at, self.epoch + self.place / self.examples,
    self.documents:left_out())
end

--- Makes a loader of documents (documents.lua). sequences: the number of rows for each document: 2
--- for preferences, else 1.
function M.new(kind, documents, o, sequences)
  local records = documents.records
  local size = o.batch * sequences * o.context
  arguments.want_batch(kind, o.batch * sequences, o.context, "tokens")
  return setmetatable({ kind = kind, documents = documents, batch = o.batch, context = o.context,
    seed = o.seed, shuffle = o.shuffle, pack = o.pack, examples = records.n, sequences = sequences,
    end_token = documents.end_token, pad = documents.end_token or 0, files = records:identity(),
    encoding = documents:checksum(), order = order.newest, at = 0, epoch = 0, place = 0, token = 0,
    x = ffi.new("int32_t[?]", size), y = ffi.new("int32_t[?]", size) }, Packed)
end

return M
