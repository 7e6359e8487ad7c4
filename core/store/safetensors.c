// Reads and writes safetensors files. See safetensors.h. Called by Lua.
#include "safetensors.h"

#include "base/array.h"
#include "base/error.h"
#include "base/file.h"
#include "base/heap.h"
#include "base/json.h"
#include "device/transfer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  PREFIX = 8,                  // bytes of the header's length
  HEADER_MOST = 100000000      // bytes; the format's own limit
};

static const struct { const char *name; int dtype;
} formats[] = {
  {"F32", ENG_f32}, {"F64", ENG_f64},      {"F16", ENG_f16},      {"BF16", ENG_bf16},
  {"U8", ENG_u8},   {"F8_E4M3", ENG_e4m3}, {"F8_E5M2", ENG_e5m2}, {"I8", ENG_i8},
  {"I16", ENG_i16}, {"I32", ENG_i32},      {"I64", ENG_i64},      {"BOOL", ENG_bool},
};
enum { FORMATS = sizeof formats / sizeof *formats };

typedef struct pair { char *key, *value; } pair;

struct eng_safetensors {
  char                  *path;
  int                    fd;          // -1 in the fuzzer
  char                  *header;      // holds the names and metadata that the lists below point to
  eng_safetensors_entry *entries;     // ordered by position in the file
  int64_t                count, room;
  pair                  *metadata;    // in file order
  int64_t                metadata_count, metadata_room;
};

// ---- the header

static eng_status find_format(int32_t *dtype, const char *name)
{
  for (int i = 0; i < FORMATS; i++) {
    if (strcmp(name, formats[i].name) != 0) continue;
    *dtype = formats[i].dtype;
    return ENG_OK;
  }
  return error_set(
    ENG_ERR_DTYPE,
    "dtype %s is not supported; supported: F32 F64 F16 BF16 F8_E4M3 F8_E5M2 U8 I8 I16 I32 I64 BOOL",
    json_show(name));
}

static eng_status read_shape(json_reader *json, eng_safetensors_entry *entry)
{
  ENG_TRY(json_expect(json, '['));
  entry->ndim = 0;
  if (json_accept(json, ']')) return ENG_OK;
  do {
    FAIL_IF(entry->ndim == ENG_MAX_DIMS, ENG_ERR_FORMAT,
            "expected at most %d dimensions, got more", ENG_MAX_DIMS);
    ENG_TRY(json_whole(json, &entry->shape[entry->ndim++]));
  } while (json_accept(json, ','));
  return json_expect(json, ']');
}

// Computes the size of an entry's data in bytes. The product of the element size and the non-zero
// dimensions must fit in 63 bits even if one dimension is 0, because strides are computed from it.
static eng_status size_of(int64_t *bytes, const eng_safetensors_entry *entry)
{
  int64_t product = eng_dtype_size(entry->dtype);
  bool empty = false;
  for (int d = 0; d < entry->ndim; d++) {
    if (entry->shape[d] == 0) empty = true;
    else if (__builtin_mul_overflow(product, entry->shape[d], &product))
      return error_set(ENG_ERR_FORMAT, "its shape needs more than 2^63-1 bytes");
  }
  *bytes = empty ? 0 : product;
  return ENG_OK;
}

// Reads {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}. The keys may have any order;
// a key other than these three is an error.
static eng_status read_entry(json_reader *json, eng_safetensors_entry *entry, int64_t data_size)
{
  enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
  unsigned seen = 0;
  ENG_TRY(json_expect(json, '{'));
  if (!json_accept(json, '}')) {
    do {
      char *key, *dtype;
      ENG_TRY(json_string(json, &key));
      ENG_TRY(json_expect(json, ':'));
      unsigned now = strcmp(key, "dtype") == 0          ? DTYPE
                     : strcmp(key, "shape") == 0        ? SHAPE
                     : strcmp(key, "data_offsets") == 0 ? OFFSETS
                                                        : 0;
      FAIL_IF(now == 0, ENG_ERR_FORMAT,
              "unknown key %s; expected dtype, shape or data_offsets", json_show(key));
      FAIL_IF(seen & now, ENG_ERR_FORMAT, "duplicate key %s", key);
      seen |= now;
      if (now == DTYPE) {
        ENG_TRY(json_string(json, &dtype));
        ENG_TRY(find_format(&entry->dtype, dtype));
      } else if (now == SHAPE) {
        ENG_TRY(read_shape(json, entry));
      } else {
        ENG_TRY(json_expect(json, '['));
        ENG_TRY(json_whole(json, &entry->begin));
        ENG_TRY(json_expect(json, ','));
        ENG_TRY(json_whole(json, &entry->end));
        ENG_TRY(json_expect(json, ']'));
      }
    } while (json_accept(json, ','));
    ENG_TRY(json_expect(json, '}'));
  }
  FAIL_IF(seen != (DTYPE | SHAPE | OFFSETS), ENG_ERR_FORMAT, "missing key %s",
          !(seen & DTYPE) ? "dtype" : !(seen & SHAPE) ? "shape" : "data_offsets");
  int64_t bytes = 0;
  ENG_TRY(size_of(&bytes, entry));
  FAIL_IF(entry->begin > entry->end, ENG_ERR_FORMAT, "data_offsets [%lld, %lld] end before they "
          "begin", (long long)entry->begin, (long long)entry->end);
  FAIL_IF(entry->end > data_size, ENG_ERR_FORMAT,
          "data_offsets [%lld, %lld] exceed the %lld bytes of data; hint: is the file complete?",
          (long long)entry->begin, (long long)entry->end, (long long)data_size);
  FAIL_IF(entry->end - entry->begin != bytes, ENG_ERR_FORMAT, "dtype and shape need %lld bytes, "
          "but data_offsets span %lld", (long long)bytes, (long long)(entry->end - entry->begin));
  return ENG_OK;
}

static eng_status read_metadata(json_reader *json, eng_safetensors *file)
{
  ENG_TRY(json_expect(json, '{'));
  if (json_accept(json, '}')) return ENG_OK;
  do {
    char *key, *value;
    ENG_TRY(json_string(json, &key));
    ENG_TRY(json_expect(json, ':'));
    ENG_TRY(json_string(json, &value));
    FAIL_IF(!ARRAY_GROW(file->metadata, file->metadata_room, file->metadata_count + 1),
            ENG_ERR_MEMORY, "out of memory reading the metadata");
    file->metadata[file->metadata_count++] = (pair){ key, value };
  } while (json_accept(json, ','));
  return json_expect(json, '}');
}

static int by_place(const void *a, const void *b)
{
  const eng_safetensors_entry *x = a, *y = b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  if (x->end != y->end) return x->end < y->end ? -1 : 1;
  return strcmp(x->name, y->name);
}

static int by_bytes(const void *a, const void *b)
{ return strcmp(*(const char *const *)a, *(const char *const *)b); }

// Sets *out to a name that occurs twice among `count` items, or to NULL if there is none. An item
// takes `size` bytes and begins with a pointer to its name.
static eng_status find_repeated(const char **out, const void *items, int64_t count, size_t size)
{
  *out = NULL;
  if (count < 2) return ENG_OK;
  FREED const char **names = malloc((size_t)count * sizeof *names);
  FAIL_IF(names == NULL, ENG_ERR_MEMORY, "out of memory for %lld names", (long long)count);
  for (int64_t i = 0; i < count; i++)
    names[i] = *(const char *const *)((const char *)items + (size_t)i * size);
  qsort(names, (size_t)count, sizeof *names, by_bytes);
  for (int64_t i = 1; i < count && *out == NULL; i++)
    if (strcmp(names[i - 1], names[i]) == 0) *out = names[i];
  return ENG_OK;
}

// Checks that names and keys are unique, and that the tensors' byte ranges cover the data without
// gaps or overlaps.
static eng_status check_together(eng_safetensors *file, int64_t data_size)
{
  eng_safetensors_entry *e = file->entries;
  int64_t reached = 0;
  const char *twice;
  ENG_TRY(find_repeated(&twice, file->metadata, file->metadata_count, sizeof *file->metadata));
  FAIL_IF(twice != NULL, ENG_ERR_FORMAT, "two metadata entries have the key %s", json_show(twice));
  ENG_TRY(find_repeated(&twice, e, file->count, sizeof *e));
  FAIL_IF(twice != NULL, ENG_ERR_FORMAT, "two tensors have the name %s", json_show(twice));
  if (file->count > 0) qsort(e, (size_t)file->count, sizeof *e, by_place);
  for (int64_t i = 0; i < file->count; i++) {
    FAIL_IF(e[i].begin < reached, ENG_ERR_FORMAT,
            "tensors %s and %s overlap", json_show(e[i - 1].name), json_show(e[i].name));
    FAIL_IF(e[i].begin > reached, ENG_ERR_FORMAT, "expected tensors without gaps, "
            "got %lld unused bytes before tensor %s",
            (long long)(e[i].begin - reached), json_show(e[i].name));
    reached = e[i].end;
  }
  FAIL_IF(reached != data_size, ENG_ERR_FORMAT,
          "expected the file to end with the last tensor, got %lld unused bytes after it",
          (long long)(data_size - reached));
  return ENG_OK;
}

static eng_status read_header(eng_safetensors *file, int64_t size, int64_t data_size)
{
  json_reader json;
  bool metadata = false;
  ENG_TRY(json_open(&json, "the header", file->header, size));
  if (size == 0 || file->header[0] != '{')
    return error_set(ENG_ERR_FORMAT,
                     "the header does not begin with '{'; hint: is this a safetensors file?");
  ENG_TRY(json_expect(&json, '{'));
  if (!json_accept(&json, '}')) {
    do {
      char *name;
      ENG_TRY(json_string(&json, &name));
      ENG_TRY(json_expect(&json, ':'));
      if (strcmp(name, "__metadata__") == 0) {
        FAIL_IF(metadata, ENG_ERR_FORMAT, "the header has two __metadata__ entries");
        metadata = true;
        ENG_TRY(read_metadata(&json, file));
        continue;
      }
      FAIL_IF(!ARRAY_GROW(file->entries, file->room, file->count + 1), ENG_ERR_MEMORY,
              "out of memory for the list of tensors, after %lld of them", (long long)file->count);
      eng_safetensors_entry *entry = &file->entries[file->count];
      *entry = (eng_safetensors_entry){ .name = name };
      ENG_TRY(error_prefix(read_entry(&json, entry, data_size), "tensor %s", json_show(name)));
      file->count++;
    } while (json_accept(&json, ','));
    ENG_TRY(json_expect(&json, '}'));
  }
  ENG_TRY(json_close(&json));
  ENG_TRY(check_together(file, data_size));
  for (int64_t i = 0; i < file->count; i++) {
    file->entries[i].begin += PREFIX + size;
    file->entries[i].end += PREFIX + size;
  }
  return ENG_OK;
}

eng_status safetensors_parse(eng_safetensors **out, const char *path, char *header, int64_t size,
                             int64_t data_size)
{
  *out = NULL;
  eng_safetensors *file = calloc(1, sizeof *file);
  if (file == NULL) {
    free(header);
    return error_set(ENG_ERR_MEMORY, "%s: out of memory", path);
  }
  file->fd = -1;
  file->header = header;
  file->path = strdup(path);
  eng_status status = file->path == NULL ? error_set(ENG_ERR_MEMORY, "out of memory")
                                         : read_header(file, size, data_size);
  if (status == ENG_OK) *out = file;
  else eng_safetensors_close(file);
  return error_prefix(status, "%s", path);
}

// ---- reading

static eng_status open_header(eng_safetensors **out, const char *path, int fd, int64_t total)
{
  FAIL_IF(total < PREFIX, ENG_ERR_FORMAT, "%s: expected at least 8 bytes, found %lld; hint: is "
          "this a safetensors file?", path, (long long)total);
  uint64_t length;
  ENG_TRY(file_read_at(fd, path, &length, PREFIX, 0));
  FAIL_IF(length > HEADER_MOST, ENG_ERR_FORMAT,
          "%s: header length %llu exceeds the format's limit of %d; hint: is this a safetensors "
          "file?", path, (unsigned long long)length, HEADER_MOST);
  FAIL_IF((int64_t)length > total - PREFIX, ENG_ERR_FORMAT,
          "%s: header length %llu exceeds the file's %lld bytes; hint: is the file complete?",
          path, (unsigned long long)length, (long long)total);
  char *header = malloc((size_t)length + 1);
  FAIL_IF(header == NULL, ENG_ERR_MEMORY,
          "%s: out of memory for a header of %llu bytes", path, (unsigned long long)length);
  eng_status status = file_read_at(fd, path, header, (int64_t)length, PREFIX);
  if (status != ENG_OK) {
    free(header);
    return status;
  }
  return safetensors_parse(out, path, header, (int64_t)length, total - PREFIX - (int64_t)length);
}

eng_status eng_safetensors_open(eng_safetensors **out, const char *path)
{
  int fd;
  int64_t total;
  *out = NULL;
  ENG_TRY(file_open(&fd, &total, path));
  eng_status status = open_header(out, path, fd, total);
  if (status == ENG_OK) (*out)->fd = fd;
  else close(fd);
  return status;
}

void eng_safetensors_close(eng_safetensors *file)
{
  if (file == NULL) return;
  if (file->fd >= 0) close(file->fd);
  free(file->path);
  free(file->header);
  free(file->entries);
  free(file->metadata);
  free(file);
}

int64_t eng_safetensors_count(const eng_safetensors *file) { return file->count; }

eng_status eng_safetensors_get(eng_safetensors_entry *out, const eng_safetensors *file,
                               int64_t index)
{
  FAIL_IF(index < 0 || index >= file->count, ENG_ERR_VALUE, "%s: expected a tensor index >= 0 "
          "and below %lld, got %lld", file->path, (long long)file->count, (long long)index);
  *out = file->entries[index];
  return ENG_OK;
}

// Fills a tensor from the file. A tensor on a card is filled through a host buffer.
static eng_status fill(const eng_tensor *to, const eng_safetensors *file,
                       const eng_safetensors_entry *entry)
{
  eng_tensor_info info;
  ENG_TRY(eng_info(&info, to));
  int64_t bytes = entry->end - entry->begin;
  FREED void *staged = info.space == 0 ? NULL : malloc(bytes > 0 ? (size_t)bytes : 1);
  uint8_t *host = info.space == 0 ? info.data : staged;
  FAIL_IF(info.space != 0 && !staged, ENG_ERR_MEMORY,
          "out of memory for %lld bytes", (long long)bytes);
  ENG_TRY(file_read_at(file->fd, file->path, host, bytes, entry->begin));
  // Kernels rely on bools being 0 or 1; a file can contain any byte.
  for (int64_t i = 0; entry->dtype == ENG_bool && i < info.count; i++) host[i] = host[i] != 0;
  return staged ? eng_write(to, host, entry->dtype, info.count) : ENG_OK;
}

eng_status eng_safetensors_read(eng_tensor *out, const eng_safetensors *file, int64_t index,
                                bool keep)
{
  eng_safetensors_entry entry;
  ENG_TRY(eng_safetensors_get(&entry, file, index));
  ENG_TRY(eng_new(out, entry.dtype, entry.ndim, entry.shape, keep));
  eng_status status = fill(out, file, &entry);
  if (status != ENG_OK) eng_free(out);
  return error_prefix(status, "tensor %s", json_show(entry.name));
}

int64_t eng_safetensors_metadata_count(const eng_safetensors *file) { return file->metadata_count; }

eng_status eng_safetensors_metadata(const char **key, const char **value,
                                    const eng_safetensors *file, int64_t index)
{
  FAIL_IF(index < 0 || index >= file->metadata_count, ENG_ERR_VALUE,
          "%s: expected a metadata index >= 0 and below %lld, got %lld", file->path,
          (long long)file->metadata_count, (long long)index);
  *key = file->metadata[index].key;
  *value = file->metadata[index].value;
  return ENG_OK;
}

// ---- writing

typedef struct item {
  char       *name;
  eng_tensor  tensor;
} item;

struct eng_safetensors_writer {
  heap     memory;      // of all texts
  char    *path;
  item    *items;
  int64_t  count, room;
  pair    *notes;
  int64_t  note_count, note_room;
};

eng_status eng_safetensors_begin(eng_safetensors_writer **out, const char *path)
{
  *out = calloc(1, sizeof **out);
  if (*out != NULL) (*out)->path = heap_text(&(*out)->memory, path, (int64_t)strlen(path));
  if (*out != NULL && (*out)->path != NULL) return ENG_OK;
  eng_safetensors_abort(*out);
  *out = NULL;
  return error_set(ENG_ERR_MEMORY, "%s: out of memory", path);
}

void eng_safetensors_abort(eng_safetensors_writer *writer)
{
  if (writer == NULL) return;
  heap_free(&writer->memory);
  free(writer->items);
  free(writer->notes);
  free(writer);
}

eng_status eng_safetensors_add(eng_safetensors_writer *writer, const char *name,
                               const eng_tensor *x)
{
  eng_tensor_info info;
  ENG_TRY(eng_info(&info, x));
  FAIL_IF(info.divided, ENG_ERR_STATE, "%s: the ranks have divided the weight %s (zero=3); hint: "
          "save in trainer:whole(function() ... end), on all ranks", writer->path, json_show(name));
  FAIL_IF(!json_is_text(name), ENG_ERR_VALUE,
          "%s: the tensor name %s is not UTF-8", writer->path, json_show(name));
  FAIL_IF(strcmp(name, "__metadata__") == 0, ENG_ERR_VALUE,
          "%s: __metadata__ is reserved and cannot name a tensor", writer->path);
  char *own = heap_text(&writer->memory, name, (int64_t)strlen(name));
  FAIL_IF(own == NULL || !ARRAY_GROW(writer->items, writer->room, writer->count + 1),
          ENG_ERR_MEMORY, "%s: out of memory", writer->path);
  writer->items[writer->count++] = (item){ own, *x };
  return ENG_OK;
}

eng_status eng_safetensors_annotate(eng_safetensors_writer *writer, const char *key,
                                    const char *value)
{
  FAIL_IF(!json_is_text(key) || !json_is_text(value), ENG_ERR_VALUE,
          "%s: the metadata key %s or its value is not UTF-8", writer->path, json_show(key));
  for (int64_t i = 0; i < writer->note_count; i++)
    FAIL_IF(strcmp(writer->notes[i].key, key) == 0, ENG_ERR_VALUE,
            "%s: duplicate metadata key %s", writer->path, json_show(key));
  pair own = {heap_text(&writer->memory, key, (int64_t)strlen(key)),
              heap_text(&writer->memory, value, (int64_t)strlen(value))};
  FAIL_IF(own.key == NULL || own.value == NULL ||
          !ARRAY_GROW(writer->notes, writer->note_room, writer->note_count + 1), ENG_ERR_MEMORY,
          "%s: out of memory", writer->path);
  writer->notes[writer->note_count++] = own;
  return ENG_OK;
}

static const char *format_name(int dtype)
{
  for (int i = 0; i < FORMATS; i++)
    if (formats[i].dtype == dtype) return formats[i].name;
  return NULL;
}

static eng_status put_header(FILE *to, const eng_safetensors_writer *writer)
{
  int64_t offset = 0;
  fputs("{", to);
  if (writer->note_count > 0) {
    fputs("\"__metadata__\":{", to);
    for (int64_t i = 0; i < writer->note_count; i++) {
      if (i > 0) fputs(",", to);
      json_put_string(to, writer->notes[i].key);
      fputs(":", to);
      json_put_string(to, writer->notes[i].value);
    }
    fputs("}", to);
  }
  for (int64_t i = 0; i < writer->count; i++) {
    eng_tensor_info info;
    eng_status status = eng_info(&info, &writer->items[i].tensor);
    const char *format = status == ENG_OK ? format_name(info.dtype) : NULL;
    if (status == ENG_OK && format == NULL)
      status =
        error_set(ENG_ERR_DTYPE, "the safetensors format cannot store %s",
                  eng_dtype_name(info.dtype));
    if (status != ENG_OK)
      return error_prefix(status, "%s: tensor %s", writer->path, json_show(writer->items[i].name));
    if (i > 0 || writer->note_count > 0) fputs(",", to);
    json_put_string(to, writer->items[i].name);
    fprintf(to, ":{\"dtype\":\"%s\",\"shape\":[", format);
    for (int d = 0; d < info.ndim; d++)
      fprintf(to, "%s%lld", d ? "," : "", (long long)info.shape[d]);
    int64_t next = offset + info.count * eng_dtype_size(info.dtype);
    fprintf(to, "],\"data_offsets\":[%lld,%lld]}", (long long)offset, (long long)next);
    offset = next;
  }
  fputs("}", to);
  while (ftell(to) % 8 != 0) fputs(" ", to);
  return ENG_OK;
}

// Builds the header in newly allocated memory, which the caller frees even after an error.
static eng_status make_header(char **header, size_t *size, const eng_safetensors_writer *writer)
{
  FILE *to = open_memstream(header, size);
  FAIL_IF(to == NULL, ENG_ERR_MEMORY, "%s: out of memory", writer->path);
  eng_status status = put_header(to, writer);
  bool failed = ferror(to);
  if (fclose(to) != 0 || failed)
    status = error_set(ENG_ERR_MEMORY, "%s: out of memory for the header", writer->path);
  if (status == ENG_OK && *size > HEADER_MOST)
    status = error_set(ENG_ERR_VALUE, "%s: the header would take %zu bytes; the format allows %d",
                       writer->path, *size, HEADER_MOST);
  return status;
}

// Writes the elements of a tensor in row-major order. If they are not contiguous in this order, or
// are in a card's memory, writes them through a copy.
static eng_status put_tensor(file_writer *out, const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  int64_t bytes = x->count * eng_dtype_size(x->dtype);
  if (x->store->space == SPACE_HOST && tensor_contiguous(x))
    return file_writer_put(out, x->data, bytes);
  FREED void *copy = malloc((size_t)bytes + 1);
  FAIL_IF(!copy, ENG_ERR_MEMORY, "out of memory for %lld bytes", (long long)bytes);
  ENG_TRY(transfer_read(copy, x->dtype, x));
  return file_writer_put(out, copy, bytes);
}

static eng_status write_file(const eng_safetensors_writer *writer, uint32_t *crc)
{
  FREED char *header = NULL;
  size_t size = 0;
  const char *twice;
  ENG_TRY(find_repeated(&twice, writer->items, writer->count, sizeof *writer->items));
  FAIL_IF(twice != NULL, ENG_ERR_VALUE,
          "%s: two tensors have the name %s", writer->path, json_show(twice));
  ENG_TRY(make_header(&header, &size, writer));
  uint64_t length = size;
  AT_END(file_writer_close) file_writer out;
  ENG_TRY(file_writer_open(&out, writer->path));
  ENG_TRY(file_writer_put(&out, &length, PREFIX));
  ENG_TRY(file_writer_put(&out, header, (int64_t)size));
  for (int64_t i = 0; i < writer->count; i++)
    ENG_TRY(put_tensor(&out, &writer->items[i].tensor));
  ENG_TRY(file_writer_commit(&out));
  if (crc != NULL) *crc = out.crc;
  return ENG_OK;
}

eng_status eng_safetensors_commit(eng_safetensors_writer *writer, uint32_t *crc)
{
  eng_status status = write_file(writer, crc);
  eng_safetensors_abort(writer);
  return status;
}
