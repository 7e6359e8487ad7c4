-- engine.data.images reads folders of PNG and JPEG images, with a subfolder for each class.
-- engine.data.shapes draws its images. Called by init.lua, which documents both.
local M_ffi = require "engine.base.ffi"
local file = require "engine.base.file"
local image_files = require "engine.data.image_files"
local order = require "engine.data.order"
local tensor = require "engine.tensor.tensor"

local ffi, raise, raise_if, value_text = M_ffi.ffi, M_ffi.raise, M_ffi.raise_if, M_ffi.value_text
local M = {}

-- Returns a tensor [1 x channels x 1 x 1] with a value for each channel. v: a number for all
-- channels, or a list.
local function per_channel(v, channels, what)
  local list = {}
  for c = 1, channels do
    list[c] = type(v) == "table" and v[c] or v
    raise_if(type(list[c]) ~= "number", "data.images: expected %s to be a number or a list of " ..
      "%d numbers, got %s", what, channels, value_text(v))
  end
  return tensor.tensor(list, { keep = true }):view(1, channels, 1, 1)
end

-- Returns three lists: the classes of a folder, such as { "cat", "dog" }; their images, as
-- { { path, class } ... } with classes counted from 0; and the files that are not images, in the
-- same form.
local function scan(path)
  local classes, list, others = {}, {}, {}
  for _, class in ipairs(file.names(path) or raise("data.images: %s", M_ffi.message())) do
    local folder = path .. "/" .. class
    if file.is_folder(folder) then
      classes[#classes + 1] = class
      for _, name in ipairs(file.names(folder) or raise("data.images: %s", M_ffi.message())) do
        local image = folder .. "/" .. name
        local into = image_files.is_image(image) and list or others
        into[#into + 1] = { image, #classes - 1 }
      end
    end
  end
  return classes, list, others
end

-- Returns the central square of an image as f32 [1 x channels x size x size], resized by averaging
-- pixels.
local function square(path, o)
  local pixels, width, height = image_files.read(path, o.channels)
  if not pixels then raise("data.images: %s", width) end
  local x = tensor.from_memory(pixels, "u8", { 1, height, width, o.channels }, { keep = false })
  local side = math.min(width, height)
  local top, left = math.floor((height - side) / 2), math.floor((width - side) / 2)
  x = x:slice(2, top + 1, top + side):slice(3, left + 1, left + side)
  return x:permute(1, 4, 2, 3):to("f32"):adaptive_avg_pool2d(o.size)
end

local function mirrored(x)
  local columns = tensor.arange(x:size(4) - 1, 0, -1, { dtype = "i32", keep = false })
  return x:contiguous():index_select(4, columns)
end

--- Returns the fields of a loader for data.images. example(self, at, b) must return the index of
--- example b of batch `at`; all count from 0.
function M.open(o, example)
  local classes, list, others = scan(o.path)
  if #others > 0 and o.bad == "stop" then
    raise("data.images: %d of %d files in %s are not PNG or JPEG images; the first is %s; hint: "
      .. "bad = 'skip'", #others, #others + #list, o.path, others[1][1])
  end
  local n, chosen = #list, {}
  for i = math.floor(n * o.from), math.floor(n * o.to) - 1 do
    chosen[#chosen + 1] = list[order.permute(i, n, 0, 0) + 1]
  end
  if n == 0 then
    raise("data.images: there are no images in %s; expected a folder for each class", o.path)
  elseif #chosen == 0 then
    raise("data.images: from = %g, to = %g choose none of the %d images in %s", o.from, o.to, n,
      o.path)
  end
  local mean, std = per_channel(o.mean, o.channels, "mean"), per_channel(o.std, o.channels, "std")
  raise_if(not (std:min():item() > 0), "data.images: expected std above 0, got %s",
    type(o.std) == "table" and table.concat(o.std, ", ") or o.std)
  return { kind = "images", batch = o.batch, seed = o.seed, shuffle = o.shuffle,
    examples = #chosen, size = o.size, unit = "images", classes = classes, skipped = #others,
    text = ("images: %d in %d classes, %d x %d"):format(#chosen, #classes, o.size, o.size),
    read = function(self, at)
      local x, y = {}, ffi.new("int64_t[?]", o.batch)
      for b = 0, o.batch - 1 do
        local i = example(self, at, b)
        x[b + 1], y[b] = square(chosen[i + 1][1], o), chosen[i + 1][2]
        if o.flip and order.draw(o.seed, at * o.batch + b, 2) == 1 then
          x[b + 1] = mirrored(x[b + 1])
        end
      end
      for b, image in ipairs(x) do x[b] = image:contiguous() end
      return { x = (tensor.concat(x, 1) / 255 - mean) / std, tokens = o.batch,
        y = tensor.from_memory(y, "i64", { o.batch }, { keep = false }) }
    end }
end

-- ------------------------------------------------------------------ drawn images

-- The shapes: a name, and a function that says whether a point (u, v) belongs to the shape. The
-- shapes are centred at 0 and about as large as the unit circle.
local SHAPES = { { "disc", function(u, v) return u * u + v * v < 1 end },
  { "ring", function(u, v)
    local r = u * u + v * v
    return r < 1 and r > 0.4
  end },
  { "square", function(u, v) return math.max(math.abs(u), math.abs(v)) < 0.75 end },
  { "frame", function(u, v)
    local r = math.max(math.abs(u), math.abs(v))
    return r < 0.8 and r > 0.5
  end },
  { "cross", function(u, v)
    return math.min(math.abs(u), math.abs(v)) < 0.28 and math.max(math.abs(u), math.abs(v)) < 0.95
  end },
  { "triangle", function(u, v) return v < 0.7 and math.abs(u) < (v + 0.9) * 0.6 end },
  { "bars", function(u, v)
    return math.max(math.abs(u), math.abs(v)) < 0.9 and math.floor((u + 1) * 2.5) % 2 == 0
  end },
  { "half", function(u, v) return u * u + v * v < 1 and u + v < 0 end } }

--- Draws o.count images. Returns x [count x 3 x size x size] f32 in about -1..1, y [count] i64, and
--- the names of the classes. Each image has a random position, size, colour, background and noise.
function M.draw(o)
  local size, n, key = o.size, o.count, 0
  local function random()                      -- in [0, 1)
    key = key + 1
    return order.draw(o.seed, key, 2 ^ 30) / 2 ^ 30
  end
  local x, y = ffi.new("float[?]", n * 3 * size * size), ffi.new("int64_t[?]", n)
  for i = 0, n - 1 do
    local kind = i % #SHAPES
    local inside, r = SHAPES[kind + 1][2], size * (0.2 + 0.2 * random())
    local cx, cy = r + (size - 2 * r) * random(), r + (size - 2 * r) * random()
    for c = 0, 2 do
      local front, back = 2 * random() - 1, 0.6 * random() - 0.3
      if math.abs(front - back) < 0.4 then front = back + (front > back and 0.6 or -0.6) end
      for p = 0, size * size - 1 do
        local u, v = (p % size - cx) / r, (math.floor(p / size) - cy) / r
        x[(i * 3 + c) * size * size + p] = (inside(u, v) and front or back)
          + o.noise * (random() + random() + random() - 1.5) * 2
      end
    end
    y[i] = kind
  end
  local names = {}
  for k, shape in ipairs(SHAPES) do names[k] = shape[1] end
  return tensor.from_memory(x, "f32", { n, 3, size, size }, { keep = true }),
    tensor.from_memory(y, "i64", { n }, { keep = true }), names
end

return M
