-- Writes TensorBoard event files: TFRecord frames (length, payload, masked CRC-32C of each) around
-- the protobuf messages Event and Summary, as tensorflow/core/util/event.proto and
-- framework/summary.proto define them.
--   local w = tensorboard.open("runs/a/tensorboard")
--   w:scalars(step, { { "train/loss", 2.5 }, ... }, wall_time)
--   w:histogram(step, "gradients/blocks.3", hist, stats)      hist[exponent] = how many elements
--   w:text(0, "policy", source)
--   w:close()
-- Used by run.lua (live) and `engine export`. A reader sees the flushed data, and reads a truncated
-- file up to the last whole frame.
local M_ffi = require "engine.base.ffi"
local formats = require "engine.base.formats"
local show = require "engine.base.show"

local C, ffi = M_ffi.C, M_ffi.ffi

local M = {}

local Writer = {}
Writer.__index = Writer

-- ------------------------------------------------------------------ bytes

local cast = ffi.new [[union { double d; float f; uint32_t u; uint64_t q; uint8_t bytes[8]; }]]

local function bytes_of(member, size)
  return function(x)
    cast[member] = x
    return ffi.string(cast.bytes, size)
  end
end
local double_bytes, float_bytes = bytes_of("d", 8), bytes_of("f", 4)
local u32_bytes, u64_bytes = bytes_of("u", 4), bytes_of("q", 8)

-- Encodes a whole number from 0 to 2^53 as a protobuf varint.
local function varint(x)
  local parts = {}
  while x >= 128 do
    parts[#parts + 1] = string.char(x % 128 + 128)
    x = math.floor(x / 128)
  end
  parts[#parts + 1] = string.char(x)
  return table.concat(parts)
end

local VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
local function key(field, wire) return varint(field * 8 + wire) end
local function bytes_field(field, text) return key(field, BYTES) .. varint(#text) .. text end
local function double_field(field, x) return key(field, FIXED64) .. double_bytes(x) end
local function float_field(field, x) return key(field, FIXED32) .. float_bytes(x) end
local function int_field(field, x) return key(field, VARINT) .. varint(x) end

local function masked_crc(text)
  local crc = C.eng_crc32c(0, text, #text)
  -- TFRecord rotates the CRC and adds a constant, because a CRC of data that contains CRCs is weak
  local rotated = bit.bor(bit.rshift(crc, 15), bit.lshift(crc, 17))
  return u32_bytes((rotated + 0xa282ead8) % 2 ^ 32)
end

--- Puts a TFRecord frame around a payload.
function M.frame(payload)
  local length = u64_bytes(#payload)
  return length .. masked_crc(length) .. payload .. masked_crc(payload)
end

-- ------------------------------------------------------------------ messages

local function event(wall_time, step, field, message)
  return M.frame(double_field(1, wall_time) .. int_field(2, math.max(0, step)) ..
    bytes_field(field, message))
end

local FILE_VERSION, SUMMARY, SESSION_LOG = 3, 5, 7             -- fields of Event
local SESSION_START = 1

-- Encodes one number as a Summary.Value.
local function scalar_value(tag, x)
  return bytes_field(1, bytes_field(1, show.shown(tag)) .. float_field(2, x))
end

--- Encodes hist[exponent] = how many elements as a HistogramProto of magnitudes, which has a bucket
--- for zero and one for each binade. s: { zeros, amax, norm } as stored.
function M.histogram_proto(hist, s)
  local least, most = math.huge, -math.huge
  for e, n in pairs(hist) do
    if n > 0 then least, most = math.min(least, e), math.max(most, e) end
  end
  local limits, counts, sum, num, zeros = {}, {}, 0, 0, s.zeros or 0
  local function put(limit, n)
    limits[#limits + 1], counts[#counts + 1] = double_bytes(limit), double_bytes(n)
    num = num + n
  end
  local any = least <= most
  put(any and 2 ^ least or 2 ^ -149, zeros)
  for e = least, most do
    local n = hist[e] or 0
    put(2 ^ (e + 1), n)
    sum = sum + n * 1.5 * 2 ^ e                  -- the middle of the binade stands for its elements
  end
  local low = zeros == 0 and any and 2 ^ least or 0
  return double_field(1, low) .. double_field(2, s.amax or 0) .. double_field(3, num) ..
    double_field(4, sum) .. double_field(5, (s.norm or 0) ^ 2) ..
    bytes_field(6, table.concat(limits)) .. bytes_field(7, table.concat(counts))
end

-- ------------------------------------------------------------------ writing

local count = 0  -- number of files that this process has opened; it makes their names differ

--- Opens a new event file in a directory, which is created if missing. wall_time, here and below:
--- seconds since 1970; nil: now.
function M.open(dir, wall_time)
  M_ffi.check(C.eng_file_mkdir(dir))
  count = count + 1
  local pid = io.open("/proc/self/stat")
  local id = pid and pid:read("*n") or 0
  if pid then pid:close() end
  local path = ("%s/events.out.tfevents.%010d.engine.%d.%d"):format(dir, os.time(), id, count)
  local file, why = io.open(path, "wb")
  if not file then error("tensorboard: cannot write " .. tostring(why), 0) end
  local self = setmetatable({ path = path, file = file }, Writer)
  self:put(M.frame(double_field(1, wall_time or os.time()) ..
    bytes_field(FILE_VERSION, "brain.Event:2")))
  return self
end

-- Keeps the message of the first write that failed, for Live:trouble. good, why: what the write
-- returned. A full disk is reported once, as for the history, and the run continues.
local function noted(self, good, why)
  if not good and not self.trouble then
    self.trouble = ("tensorboard: cannot write %s: %s"):format(self.path, tostring(why))
  end
  return good
end

function Writer:put(bytes) return noted(self, self.file:write(bytes)) end

--- Writes a step's numbers, a list of { tag, number }. A pair without a number is left out; NaN and
--- infinities are written.
function Writer:scalars(step, values, wall_time)
  local parts = {}
  for _, pair in ipairs(values) do
    if pair[2] ~= nil then parts[#parts + 1] = scalar_value(pair[1], pair[2]) end
  end
  if #parts > 0 then
    return self:put(event(wall_time or os.time(), step, SUMMARY, table.concat(parts)))
  end
end

--- Writes a histogram. hist, s: as in M.histogram_proto.
function Writer:histogram(step, tag, hist, s, wall_time)
  return self:put(event(wall_time or os.time(), step, SUMMARY,
    bytes_field(1, bytes_field(1, show.shown(tag)) .. bytes_field(5, M.histogram_proto(hist, s)))))
end

--- Writes a histogram for each layer. sums: the result of M.layer_sums; names: the names of the
--- layers.
function Writer:layers(step, sums, names, wall_time)
  for layer, sum in pairs(sums) do
    self:histogram(step, "stored_gradients/" .. names[layer], sum.hist, sum, wall_time)
  end
end

--- Writes a text for TensorBoard's text tab (Markdown; four spaces before each line make it code).
function Writer:text(step, tag, text, wall_time)
  local dim = bytes_field(2, int_field(1, 1))  -- TensorShapeProto.Dim { size = 1 }
  text = show.shown(text, true)                -- protobuf's strings must be UTF-8
  local tensor = int_field(1, 7) .. bytes_field(2, dim) .. bytes_field(8, text)   -- DT_STRING
  local metadata = bytes_field(1, bytes_field(1, "text"))  -- PluginData.plugin_name
  return self:put(event(wall_time or os.time(), step, SUMMARY,
    bytes_field(1, bytes_field(1, show.shown(tag)) .. bytes_field(8, tensor) ..
      bytes_field(9, metadata))))
end

function Writer:flush() return noted(self, self.file:flush()) end

function Writer:close()
  if self.file then noted(self, self.file:close()) end
  self.file = nil
end

--- Returns the scalars of a step as { tag, number } pairs. s: { loss, lr, scale, overflow (0 or 1),
--- skipped, norm, amax, norm_ref, underflow, count, tokens, seconds (of the step) }. signals: the
--- signals by name. A loss, lr, scale, norm or amax of nil stands for NaN.
function M.step_values(s, signals)
  local nan, tokens = 0 / 0, s.tokens or 0
  local values = {
    { "train/loss", s.loss or nan }, { "train/learning_rate", s.lr or nan },
    { "scaling/scale", s.scale or nan },
    { "scaling/log2_scale", s.scale and math.log(s.scale) / math.log(2) or nan },
    { "scaling/overflow", s.overflow ~= 0 and 1 or 0 }, { "scaling/skipped", s.skipped and 1 or 0 },
    { "gradients/norm", s.norm or nan }, { "gradients/amax", s.amax or nan },
    { "gradients/norm_ref", s.norm_ref },
    { "gradients/underflow", (s.count or 0) > 0 and s.underflow and s.underflow / s.count or nil },
    { "speed/tokens_per_s", s.seconds > 0 and tokens > 0 and tokens / s.seconds or nil },
  }
  for name, value in pairs(signals) do
    local logged = name:match("^log%.(.*)")
    values[#values + 1] = { logged and "log/" .. logged or "signals/" .. name, value }
  end
  return values
end

--- Sums the statistics of n tensors by layer: { [layer] = { hist, zeros, amax, norm } }.
--- layer_of: the layer of each tensor by its id (from 0). A tensor without a layer is left out.
function M.layer_sums(stats, n, layer_of)
  local sums = {}
  for id = 0, n - 1 do
    local layer, s = layer_of[id], stats[id]
    if layer then
      local sum = sums[layer] or { hist = {}, zeros = 0, amax = 0, squares = 0 }
      sums[layer] = sum
      sum.zeros, sum.amax, sum.squares = sum.zeros + tonumber(s.zeros),
        math.max(sum.amax, s.amax), sum.squares + s.sum_squares
      sum.norm = math.sqrt(sum.squares)
      formats.add_histogram(sum.hist, s.hist)
    end
  end
  return sums
end

-- ------------------------------------------------------------------ live

local Live = {}
Live.__index = Live

local FLUSH_SECONDS = 2

--- Opens an event file for a live run. list: the parameters, in order. first: the first step. If
--- earlier files in the directory have steps from `first` on, a reader discards these steps.
function M.live(dir, list, first)
  local _, group_of, groups = require("engine.policy.groups").of(list)
  local self = setmetatable({ writer = M.open(dir), n = #list, layer_of = {}, layers = groups,
    flushed = 0, clock = require("engine.base.machine").clock }, Live)
  for i, layer in ipairs(group_of) do self.layer_of[i - 1] = layer end
  self.base = os.time() - self.clock()
  if first > 0 then
    self.writer:put(event(os.time(), first, SESSION_LOG, int_field(1, SESSION_START)))
  end
  return self
end

--- Writes a step: the core's record and verdict, and the signals that the policy saw.
function Live:step(record, verdict, tokens, signals)
  local now = self.base + self.clock()
  local step = tonumber(record.step)
  local seconds = self.before and record.elapsed - self.before or 0
  self.before = record.elapsed
  local values = M.step_values({ loss = record.loss, lr = record.lr, scale = record.scale,
    overflow = record.overflow, skipped = verdict.action ~= C.ENG_ACTION_STEP, norm = record.norm,
    amax = record.amax, underflow = tonumber(record.underflow),
    norm_ref = record.norm_ref == record.norm_ref and record.norm_ref or nil,
    count = tonumber(record.count), tokens = tokens, seconds = seconds }, signals)
  self.writer:scalars(step, values, now)
  if now - self.flushed >= FLUSH_SECONDS then
    self.writer:flush()
    self.flushed = now
  end
end

--- Writes a step's statistics per tensor as a histogram for each layer.
function Live:tensors(step, stats)
  self.writer:layers(step, M.layer_sums(stats, self.n, self.layer_of), self.layers)
end

function Live:close() self.writer:close() end

--- Returns the message about the first failed write, or nil.
function Live:trouble() return self.writer.trouble end

return M
