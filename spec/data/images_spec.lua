-- engine.data.images and engine.data.shapes: folders of PNG and JPEG, their positions, files that
-- are not images.
local engine = require "engine"
local ffi = require "ffi"
local files = require "engine.data.image_files"
local helper = require "spec.helper"

pcall(ffi.cdef, [[
int png_image_write_to_file(engine_png_image *, const char *, int, const void *, int32_t, void *);
void *tjInitCompress(void);
int tjCompress2(void *, const void *, int, int, int, int, unsigned char **, unsigned long *, int,
  int, int);
void tjFree(unsigned char *);
]])
local has_png, png = pcall(ffi.load, "libpng16.so.16")
local has_jpeg, jpeg = pcall(ffi.load, "libturbojpeg.so.0")

-- RGB pixels of one colour.
local function plain(width, height, r, g, b)
  local pixels = ffi.new("uint8_t[?]", width * height * 3)
  for i = 0, width * height - 1 do pixels[3 * i], pixels[3 * i + 1], pixels[3 * i + 2] = r, g, b end
  return pixels
end

local function write_png(path, width, height, pixels)
  local image = ffi.new("engine_png_image", { version = 1, width = width, height = height,
    format = 2 })
  assert(png.png_image_write_to_file(image, path, 0, pixels, 0, nil) ~= 0)
end

local function write_jpeg(path, width, height, pixels)
  local handle, out, size = ffi.gc(jpeg.tjInitCompress(), jpeg.tjDestroy),
    ffi.new("unsigned char *[1]"), ffi.new("unsigned long[1]")
  assert(jpeg.tjCompress2(handle, pixels, width, 0, height, 0, out, size, 0, 95, 0) == 0)
  helper.write(path, ffi.string(out[0], size[0]))
  jpeg.tjFree(out[0])
end

describe("folders of images", function()
  local folder
  before_each(function()
    folder = helper.folder()
    os.execute(("mkdir -p '%s/blue' '%s/red'"):format(folder, folder))
    for i = 1, 3 do
      if has_png then write_png(("%s/red/%d.png"):format(folder, i), 4 + i, 6,
        plain(4 + i, 6, 255, 0, 0)) end
      if has_jpeg then write_jpeg(("%s/blue/%d.jpg"):format(folder, i), 9, 8 + i,
        plain(9, 8 + i, 0, 0, 255)) end
    end
  end)
  after_each(function()
    engine.end_step()
    helper.remove(folder)
  end)
  local both = has_png and has_jpeg and it or pending

  both("become batches of squares and classes", function()
    local data = engine.data.images { path = folder, size = 4, batch = 6, shuffle = false,
      mean = 0, std = 1 }
    assert.same({ "blue", "red" }, data.classes)
    local batch = data:next()
    assert.same({ 6, 3, 4, 4 }, { batch.x:size() })
    local x, y, red = batch.x:totable(), batch.y:totable(), 0
    for i = 1, 6 do
      red = red + y[i]
      for c = 1, 3 do
        assert.near(c == (y[i] == 1 and 1 or 3) and 1 or 0, x[i][c][2][3], 0.02)
      end
    end
    assert.equal(3, red)
    local gray = engine.data.images { path = folder, size = 2, channels = 1, batch = 2 }:next()
    assert.same({ 2, 1, 2, 2 }, { gray.x:size() })
  end)

  both("are divided by from and to, and continue from a position", function()
    local function sums(data, n)
      local list = {}
      for i = 1, n do
        local batch = data:next()
        list[i] = ("%.6f %d"):format(batch.x:sum():item(), batch.y:sum():item())
      end
      return list
    end
    local function open(more)
      local o = { path = folder, size = 3, batch = 2, flip = true }
      for key, value in pairs(more or {}) do o[key] = value end
      return engine.data.images(o)
    end
    local first = open()
    sums(first, 2)
    local place = first:state()
    local rest = sums(first, 3)
    local second = open()
    second:restore(place)
    assert.same(rest, sums(second, 3))
    assert.equal(4, open({ to = 0.7 }).examples)
    assert.equal(2, open({ from = 0.7 }).examples)
    assert.has_error(function() open({ batch = 3 }):restore(place) end)
  end)

  both("refuse a std of 0", function()
    helper.refuses("data.images: expected std above 0, got 0.5, 0, 1", engine.data.images,
      { path = folder, size = 4, std = { 0.5, 0, 1 } })
  end)

  both("report files that are not images in one line", function()
    helper.write(folder .. "/red/notes.txt", "not an image")
    local function fails(pattern, options)
      assert.matches(pattern, helper.failure(function()
        options.path = options.path or folder
        return engine.data.images(options):next()
      end))
    end
    fails("1 of 7 files in .* are not PNG or JPEG images; the first is .*/red/notes.txt", {})
    assert.equal(1, engine.data.images({ path = folder, bad = "skip" }).skipped)
    assert.equal(0, helper.shell("mkfifo " .. folder .. "/red/pipe.png").code)   -- would block
    fails("2 of 8 files in .* are not PNG or JPEG images", {})
    os.remove(folder .. "/red/pipe.png")
    helper.remove(folder .. "/red/notes.txt")
    for _, name in ipairs { "red/1.png", "blue/2.jpg" } do
      local path = folder .. "/" .. name
      local bytes = helper.read(path)
      helper.write(path, bytes:sub(1, math.floor(#bytes * 0.7)))
      fails("data.images: .*/" .. name .. ": ", { batch = 6 })
      helper.write(path, bytes)
    end
    assert.is_nil((files.read(folder .. "/missing", 3)))
    fails("expected a folder for each class", { path = folder .. "/red" })
  end)

  it("drawn by the loader depend on the seed alone", function()
    local function sum(seed)
      local batch = engine.data.shapes { count = 16, size = 8, batch = 16, seed = seed }:next()
      return batch.x:sum():item(), batch.y:sum():item()
    end
    assert.equal(sum(1), (sum(1)))
    assert.not_equal(sum(1), (sum(2)))
    assert.equal(2 * 28, select(2, sum(1)))
    assert.equal(8, #engine.data.shapes({ count = 8 }).classes)
  end)
end)
