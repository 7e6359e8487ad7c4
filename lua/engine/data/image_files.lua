-- Reads PNG and JPEG files into bytes, through libpng and libjpeg-turbo (TurboJPEG). Each library
-- is loaded when the first image of its kind is read, so the engine builds and runs without
-- libraries for images. Called by images.lua.
local M_ffi = require "engine.base.ffi"
local files = require "engine.base.file"

local ffi, C, fail_if = M_ffi.ffi, M_ffi.C, M_ffi.fail_if
local M = {}

ffi.cdef [[
typedef struct { void *opaque; uint32_t version, width, height, format, flags, colormap_entries,
  warning_or_error; char message[64]; } engine_png_image;
int png_image_begin_read_from_memory(engine_png_image *, const void *, size_t);
int png_image_finish_read(engine_png_image *, const void *background, void *buffer,
  int32_t row_stride, void *colormap);
void png_image_free(engine_png_image *);
void *tjInitDecompress(void);
int tjDecompressHeader3(void *, const void *, unsigned long, int *width, int *height,
  int *subsampling, int *colorspace);
int tjDecompress2(void *, const void *, unsigned long, void *, int width, int pitch, int height,
  int format, int flags);
char *tjGetErrorStr2(void *);
int tjDestroy(void *);
]]

local MOST_PIXELS = 2 ^ 28

-- Loads a library by the first of `names` that works, or raises an error that names the package to
-- install.
local function library(names, package, kind)
  for _, name in ipairs(names) do
    local good, lib = pcall(ffi.load, name)
    if good then return lib end
  end
  error(("%s images need %s; hint: apt-get install %s"):format(kind, names[1], package), 0)
end

local png, jpeg, decoder   -- the libraries, and TurboJPEG's handle

local function too_large(width, height)
  fail_if(width * height > MOST_PIXELS, "expected an image of up to 2^28 pixels, got %d x %d",
    width, height)
end

local function read_png(bytes, size, channels)
  png = png or library({ "libpng16.so.16", "png16", "png" }, "libpng16-16", "PNG")
  local image = ffi.gc(ffi.new("engine_png_image", { version = 1 }), png.png_image_free)
  local function want(result)
    if result == 0 then error(ffi.string(image.message), 0) end
  end
  want(png.png_image_begin_read_from_memory(image, bytes, size))
  too_large(image.width, image.height)
  image.format = channels == 3 and 2 or 0          -- PNG_FORMAT_RGB, PNG_FORMAT_GRAY
  local width, height = image.width, image.height
  local pixels = ffi.new("uint8_t[?]", width * height * channels)
  -- blends transparent pixels over black
  want(png.png_image_finish_read(image, ffi.new("uint8_t[3]"), pixels, 0, nil))
  return pixels, width, height
end

local function read_jpeg(bytes, size, channels)
  jpeg = jpeg or library({ "libturbojpeg.so.0", "turbojpeg" }, "libturbojpeg0", "JPEG")
  decoder = decoder or ffi.gc(jpeg.tjInitDecompress(), jpeg.tjDestroy)
  local function want(result)
    if result ~= 0 then error(ffi.string(jpeg.tjGetErrorStr2(decoder)), 0) end
  end
  local sizes = ffi.new("int[4]")
  want(jpeg.tjDecompressHeader3(decoder, bytes, size, sizes, sizes + 1, sizes + 2, sizes + 3))
  local width, height = sizes[0], sizes[1]
  too_large(width, height)
  local pixels = ffi.new("uint8_t[?]", width * height * channels)
  want(jpeg.tjDecompress2(decoder, bytes, size, pixels, width, 0, height,
    channels == 3 and 0 or 6, 0))                  -- TJPF_RGB, TJPF_GRAY
  return pixels, width, height
end

-- Returns the function that reads files which begin with these bytes; false if there is none.
local function reader_of(bytes, size)
  local start = ffi.string(bytes, math.min(size, 8))
  return start == "\137PNG\r\n\26\n" and read_png or start:sub(1, 3) == "\255\216\255" and read_jpeg
end

--- Returns whether a file begins like a PNG or JPEG image. Raises an error if it cannot be opened.
function M.is_image(path)
  if not files.is_file(path) then return false end           -- opening a pipe could block
  local file, why = io.open(path, "rb")
  if not file then M_ffi.raise("data.images: cannot read %s", why) end
  local start = file:read(8) or ""
  file:close()
  return reader_of(start, #start) and true or false
end

--- Returns three values: the pixels of an image as uint8_t [height x width x channels], its width
--- and its height. Returns nil and what is wrong if it cannot be read. channels: 3 (RGB) or 1
--- (gray).
function M.read(path, channels)
  local mapping = ffi.new("eng_mapping")
  if C.eng_file_map(mapping, path) ~= 0 then return nil, M_ffi.message() end
  local bytes, size = ffi.cast("const uint8_t *", mapping.data), tonumber(mapping.size)
  local read = size > 0 and reader_of(bytes, size)
  local good, pixels, width, height = false, "it is neither a PNG nor a JPEG image", nil, nil
  if read then good, pixels, width, height = pcall(read, bytes, size, channels) end
  C.eng_file_unmap(mapping)
  if good then return pixels, tonumber(width), tonumber(height) end
  return nil, ("%s: %s"):format(path, (tostring(pixels):gsub("%s+$", "")))
end

return M
