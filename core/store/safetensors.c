// Reads and writes safetensors files. See safetensors.h.
#include "safetensors.h"

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  PREFIX = 8,                  // bytes of the header's length
  HEADER_MOST = 100000000,     // bytes; the format's own limit
  GATHER_BYTES = 16384         // bytes of a non-contiguous tensor gathered at once
};

static const struct { const char *name; int dtype;
} formats[] = {
  {"F32", ENG_f32}, {"F64", ENG_f64},      {"F16", ENG_f16},      {"BF16", ENG_bf16},
  {"U8", ENG_u8},   {"F8_E4M3", ENG_e4m3}, {"F8_E5M2", ENG_e5m2}, {"I8", ENG_i8},
  {"I16", ENG_i16}, {"I32", ENG_i32},      {"I64", ENG_i64},      {"BOOL", ENG_bool},
};
enum { FORMATS = sizeof formats / sizeof *formats };

typedef struct pair { const char *key, *value; } pair;

struct eng_safetensors {
  char                  *path;
  int                    fd;          // -1 in the fuzzer
  char                  *header;      // owns the strings below
  eng_safetensors_entry *entries;     // ordered by position in the file
  int64_t                count, room;
  const eng_safetensors_entry **by_name;
  pair                  *metadata;    // in file order
  int64_t                metadata_count, metadata_room;
};

// Bytes of an element, from the table of dtypes.
static int64_t bytes_of(int dtype)
{
  static const int64_t size[] = {
#define ENG_DTYPE(name, number, bytes, kind) [number] = bytes,
#include "dtypes.def"
#undef ENG_DTYPE
  };
  return size[dtype];
}

// Makes room for one more element of `size` bytes in a growing array.
static void *grown(void *array, int64_t count, int64_t *room, size_t size)
{
  if (count < *room) return array;
  int64_t more = *room ? 2 * *room : 64;
  void *bigger = realloc(array, (size_t)more * size);
  if (bigger != NULL) *room = more;
  return bigger;
}

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
    if (entry->ndim == ENG_MAX_DIMS)
      return error_set(ENG_ERR_FORMAT, "expected at most %d dimensions", ENG_MAX_DIMS);
    ENG_TRY(json_whole(json, &entry->shape[entry->ndim++]));
  } while (json_accept(json, ','));
  return json_expect(json, ']');
}

// Computes the bytes of a shape and dtype. The product of the non-zero dimensions must fit in 63
// bits even if one dimension is 0, because strides are computed from it.
static eng_status size_of(int64_t *bytes, const eng_safetensors_entry *entry)
{
  int64_t product = bytes_of(entry->dtype);
  bool empty = false;
  for (int d = 0; d < entry->ndim; d++) {
    if (entry->shape[d] == 0) empty = true;
    else if (__builtin_mul_overflow(product, entry->shape[d], &product))
      return error_set(ENG_ERR_FORMAT, "its shape needs more than 2^63-1 bytes");
  }
  *bytes = empty ? 0 : product;
  return ENG_OK;
}

// Reads {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}: keys in any order, no others.
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
      if (now == 0)
        return error_set(ENG_ERR_FORMAT, "unknown key %s; expected dtype, shape, data_offsets",
                         json_show(key));
      if (seen & now) return error_set(ENG_ERR_FORMAT, "duplicate key %s", key);
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
  if (seen != (DTYPE | SHAPE | OFFSETS))
    return error_set(ENG_ERR_FORMAT, "missing key %s",
                     !(seen & DTYPE)   ? "dtype"
                     : !(seen & SHAPE) ? "shape"
                                       : "data_offsets");
  int64_t bytes = 0;
  ENG_TRY(size_of(&bytes, entry));
  if (entry->begin > entry->end)
    return error_set(ENG_ERR_FORMAT, "data_offsets [%lld, %lld] end before they begin",
                     (long long)entry->begin, (long long)entry->end);
  if (entry->end > data_size)
    return error_set(ENG_ERR_FORMAT,
                     "data_offsets [%lld, %lld] exceed the %lld bytes of data; "
                     "hint: is the file complete?",
                     (long long)entry->begin, (long long)entry->end, (long long)data_size);
  if (entry->end - entry->begin != bytes)
    return error_set(ENG_ERR_FORMAT, "dtype and shape need %lld bytes, data_offsets span %lld",
                     (long long)bytes, (long long)(entry->end - entry->begin));
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
    pair *bigger =
      grown(file->metadata, file->metadata_count, &file->metadata_room, sizeof *bigger);
    if (bigger == NULL) return error_set(ENG_ERR_MEMORY, "out of memory reading the metadata");
    file->metadata = bigger;
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

static int by_name(const void *a, const void *b)
{
  return strcmp((*(const eng_safetensors_entry *const *)a)->name,
                (*(const eng_safetensors_entry *const *)b)->name);
}

static int by_key(const void *a, const void *b)
{
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Names must be unique; the ranges must tile the data.
static eng_status check_together(eng_safetensors *file, int64_t data_size)
{
  eng_safetensors_entry *e = file->entries;
  int64_t reached = 0;
  if (file->count > 0) {
    qsort(e, (size_t)file->count, sizeof *e, by_place);
    file->by_name = malloc((size_t)file->count * sizeof *file->by_name);
    if (file->by_name == NULL)
      return error_set(ENG_ERR_MEMORY, "out of memory reading %lld tensors",
                       (long long)file->count);
    for (int64_t i = 0; i < file->count; i++) file->by_name[i] = &e[i];
    qsort(file->by_name, (size_t)file->count, sizeof *file->by_name, by_name);
  }
  for (int64_t i = 1; i < file->count; i++)
    if (strcmp(file->by_name[i - 1]->name, file->by_name[i]->name) == 0)
      return error_set(ENG_ERR_FORMAT, "two tensors have the name %s",
                       json_show(file->by_name[i]->name));
  for (int64_t i = 0; i < file->count; i++) {
    if (e[i].begin < reached)
      return error_set(ENG_ERR_FORMAT, "tensors %s and %s overlap", json_show(e[i - 1].name),
                       json_show(e[i].name));
    if (e[i].begin > reached)
      return error_set(ENG_ERR_FORMAT, "%lld unused bytes before tensor %s",
                       (long long)(e[i].begin - reached), json_show(e[i].name));
    reached = e[i].end;
  }
  if (reached != data_size)
    return error_set(ENG_ERR_FORMAT, "%lld unused bytes after the last tensor",
                     (long long)(data_size - reached));
  return ENG_OK;
}

static eng_status check_metadata(const eng_safetensors *file)
{
  if (file->metadata_count < 2) return ENG_OK;
  pair *sorted = malloc((size_t)file->metadata_count * sizeof *sorted);
  if (sorted == NULL) return error_set(ENG_ERR_MEMORY, "out of memory reading the metadata");
  memcpy(sorted, file->metadata, (size_t)file->metadata_count * sizeof *sorted);
  qsort(sorted, (size_t)file->metadata_count, sizeof *sorted, by_key);
  eng_status status = ENG_OK;
  for (int64_t i = 1; i < file->metadata_count && status == ENG_OK; i++)
    if (strcmp(sorted[i - 1].key, sorted[i].key) == 0)
      status =
        error_set(ENG_ERR_FORMAT, "two metadata entries have the key %s", json_show(sorted[i].key));
  free(sorted);
  return status;
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
        if (metadata) return error_set(ENG_ERR_FORMAT, "the header has two __metadata__ entries");
        metadata = true;
        ENG_TRY(read_metadata(&json, file));
        continue;
      }
      eng_safetensors_entry *bigger =
        grown(file->entries, file->count, &file->room, sizeof *bigger);
      if (bigger == NULL)
        return error_set(ENG_ERR_MEMORY, "out of memory reading %lld tensors",
                         (long long)file->count);
      file->entries = bigger;
      eng_safetensors_entry *entry = &file->entries[file->count];
      *entry = (eng_safetensors_entry){ .name = name };
      eng_status status = read_entry(&json, entry, data_size);
      if (status != ENG_OK) return error_prefix(status, "tensor %s", json_show(name));
      file->count++;
    } while (json_accept(&json, ','));
    ENG_TRY(json_expect(&json, '}'));
  }
  ENG_TRY(json_close(&json));
  ENG_TRY(check_metadata(file));
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
  if (status != ENG_OK) {
    error_prefix(status, "%s", path);
    eng_safetensors_close(file);
    return status;
  }
  *out = file;
  return ENG_OK;
}

// ---- reading

static eng_status open_header(eng_safetensors **out, const char *path, int fd)
{
  struct stat stat_now;
  if (fstat(fd, &stat_now) != 0)
    return error_set(ENG_ERR_IO, "%s: cannot examine: %s", path, strerror(errno));
  if (!S_ISREG(stat_now.st_mode))
    return error_set(ENG_ERR_IO, "%s: expected a file, got a %s", path,
                     S_ISDIR(stat_now.st_mode) ? "directory" : "device or pipe");
  int64_t total = stat_now.st_size;
  if (total < PREFIX)
    return error_set(ENG_ERR_FORMAT,
                     "%s: expected at least 8 bytes, found %lld; hint: is this a safetensors file?",
                     path, (long long)total);
  uint64_t length;
  ENG_TRY(file_read_at(fd, path, &length, PREFIX, 0));
  if (length > HEADER_MOST)
    return error_set(ENG_ERR_FORMAT,
                     "%s: header length %llu exceeds the format's limit of %d; hint: is "
                     "this a safetensors file?",
                     path, (unsigned long long)length, HEADER_MOST);
  if ((int64_t)length > total - PREFIX)
    return error_set(ENG_ERR_FORMAT,
                     "%s: header length %llu exceeds the file's %lld bytes; hint: "
                     "is the file complete?",
                     path, (unsigned long long)length, (long long)total);
  char *header = malloc((size_t)length + 1);
  if (header == NULL)
    return error_set(ENG_ERR_MEMORY, "%s: out of memory for a header of %llu bytes", path,
                     (unsigned long long)length);
  eng_status status = file_read_at(fd, path, header, (int64_t)length, PREFIX);
  if (status != ENG_OK) {
    free(header);
    return status;
  }
  return safetensors_parse(out, path, header, (int64_t)length, total - PREFIX - (int64_t)length);
}

eng_status eng_safetensors_open(eng_safetensors **out, const char *path)
{
  *out = NULL;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);     // opening a pipe does not block
  if (fd < 0) return error_set(ENG_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
  eng_status status = open_header(out, path, fd);
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
  free(file->by_name);
  free(file->metadata);
  free(file);
}

int64_t eng_safetensors_count(const eng_safetensors *file)
{
  return file->count;
}

eng_status eng_safetensors_get(eng_safetensors_entry *out, const eng_safetensors *file,
                               int64_t index)
{
  if (index < 0 || index >= file->count)
    return error_set(ENG_ERR_VALUE, "%s: expected a tensor index below %lld, got %lld", file->path,
                     (long long)file->count, (long long)index);
  *out = file->entries[index];
  return ENG_OK;
}

eng_status eng_safetensors_read(eng_tensor *out, const eng_safetensors *file, int64_t index,
                                bool keep)
{
  eng_safetensors_entry entry;
  eng_tensor_info info;
  ENG_TRY(eng_safetensors_get(&entry, file, index));
  ENG_TRY(eng_new(out, entry.dtype, entry.ndim, entry.shape, keep));
  eng_status status = eng_info(&info, out);
  // A tensor on a card is filled through a host buffer.
  int64_t bytes = entry.end - entry.begin;
  void *host = info.data;
  if (status == ENG_OK && info.space != 0 && !(host = malloc(bytes > 0 ? (size_t)bytes : 1)))
    status = error_set(ENG_ERR_MEMORY, "out of memory for %lld bytes", (long long)bytes);
  if (status == ENG_OK) status = file_read_at(file->fd, file->path, host, bytes, entry.begin);
  // Kernels rely on 0 and 1; a file can contain any byte.
  if (status == ENG_OK && entry.dtype == ENG_bool)
    for (int64_t i = 0; i < info.count; i++) ((uint8_t *)host)[i] = ((uint8_t *)host)[i] != 0;
  if (status == ENG_OK && info.space != 0) status = eng_write(out, host, entry.dtype, info.count);
  if (host != info.data) free(host);
  if (status != ENG_OK) {
    error_prefix(status, "tensor %s", json_show(entry.name));
    eng_free(out);
    return status;
  }
  return ENG_OK;
}

int64_t eng_safetensors_metadata_count(const eng_safetensors *file)
{
  return file->metadata_count;
}

eng_status eng_safetensors_metadata(const char **key, const char **value,
                                    const eng_safetensors *file, int64_t index)
{
  if (index < 0 || index >= file->metadata_count)
    return error_set(ENG_ERR_VALUE, "%s: expected a metadata index below %lld, got %lld",
                     file->path, (long long)file->metadata_count, (long long)index);
  *key = file->metadata[index].key;
  *value = file->metadata[index].value;
  return ENG_OK;
}

// ---- writing

typedef struct item {
  char       *name;
  eng_tensor  tensor;
} item;

typedef struct note { char *key, *value; } note;

struct eng_safetensors_writer {
  char    *path;
  item    *items;
  int64_t  count, room;
  note    *notes;
  int64_t  note_count, note_room;
};

eng_status eng_safetensors_begin(eng_safetensors_writer **out, const char *path)
{
  *out = calloc(1, sizeof **out);
  if (*out != NULL) (*out)->path = strdup(path);
  if (*out != NULL && (*out)->path != NULL) return ENG_OK;
  eng_safetensors_abort(*out);
  *out = NULL;
  return error_set(ENG_ERR_MEMORY, "%s: out of memory", path);
}

void eng_safetensors_abort(eng_safetensors_writer *writer)
{
  if (writer == NULL) return;
  for (int64_t i = 0; i < writer->count; i++) free(writer->items[i].name);
  for (int64_t i = 0; i < writer->note_count; i++) {
    free(writer->notes[i].key);
    free(writer->notes[i].value);
  }
  free(writer->items);
  free(writer->notes);
  free(writer->path);
  free(writer);
}

eng_status eng_safetensors_add(eng_safetensors_writer *writer, const char *name,
                               const eng_tensor *x)
{
  eng_tensor_info info;
  ENG_TRY(eng_info(&info, x));
  if (info.divided)
    return error_set(ENG_ERR_STATE, "%s: the ranks have divided the weight %s (zero=3); hint: "
                                    "trainer:whole(function() ... end), on all ranks",
                     writer->path, json_show(name));
  if (!json_is_text(name))
    return error_set(ENG_ERR_VALUE, "%s: the tensor name %s is not UTF-8", writer->path,
                     json_show(name));
  if (strcmp(name, "__metadata__") == 0)
    return error_set(ENG_ERR_VALUE, "%s: __metadata__ is reserved and cannot name a tensor",
                     writer->path);
  item *bigger = grown(writer->items, writer->count, &writer->room, sizeof *bigger);
  char *own = strdup(name);
  if (bigger != NULL) writer->items = bigger;
  if (bigger == NULL || own == NULL) {
    free(own);
    return error_set(ENG_ERR_MEMORY, "%s: out of memory", writer->path);
  }
  writer->items[writer->count++] = (item){ own, *x };
  return ENG_OK;
}

eng_status eng_safetensors_annotate(eng_safetensors_writer *writer, const char *key,
                                    const char *value)
{
  if (!json_is_text(key) || !json_is_text(value))
    return error_set(ENG_ERR_VALUE, "%s: the metadata of %s is not UTF-8", writer->path,
                     json_show(key));
  for (int64_t i = 0; i < writer->note_count; i++)
    if (strcmp(writer->notes[i].key, key) == 0)
      return error_set(ENG_ERR_VALUE, "%s: duplicate metadata key %s", writer->path,
                       json_show(key));
  note *bigger = grown(writer->notes, writer->note_count, &writer->note_room, sizeof *bigger);
  note own = { strdup(key), strdup(value) };
  if (bigger != NULL) writer->notes = bigger;
  if (bigger == NULL || own.key == NULL || own.value == NULL) {
    free(own.key);
    free(own.value);
    return error_set(ENG_ERR_MEMORY, "%s: out of memory", writer->path);
  }
  writer->notes[writer->note_count++] = own;
  return ENG_OK;
}

static eng_status check_names(const eng_safetensors_writer *writer)
{
  if (writer->count < 2) return ENG_OK;
  const char **names = malloc((size_t)writer->count * sizeof *names);
  if (names == NULL) return error_set(ENG_ERR_MEMORY, "%s: out of memory", writer->path);
  for (int64_t i = 0; i < writer->count; i++) names[i] = writer->items[i].name;
  qsort(names, (size_t)writer->count, sizeof *names, by_key);
  eng_status status = ENG_OK;
  for (int64_t i = 1; i < writer->count && status == ENG_OK; i++)
    if (strcmp(names[i - 1], names[i]) == 0)
      status = error_set(ENG_ERR_VALUE, "%s: two tensors have the name %s", writer->path,
                         json_show(names[i]));
  free(names);
  return status;
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
    int64_t next = offset + info.count * bytes_of(info.dtype);
    fprintf(to, "],\"data_offsets\":[%lld,%lld]}", (long long)offset, (long long)next);
    offset = next;
  }
  fputs("}", to);
  while (ftell(to) % 8 != 0) fputs(" ", to);
  return ENG_OK;
}

// Builds the header in newly allocated memory.
static eng_status make_header(char **header, size_t *size, const eng_safetensors_writer *writer)
{
  *header = NULL;
  FILE *to = open_memstream(header, size);
  if (to == NULL) return error_set(ENG_ERR_MEMORY, "%s: out of memory", writer->path);
  eng_status status = put_header(to, writer);
  bool failed = ferror(to);
  if (fclose(to) != 0 || failed)
    status = error_set(ENG_ERR_MEMORY, "%s: out of memory for the header", writer->path);
  if (status == ENG_OK && *size > HEADER_MOST)
    status = error_set(ENG_ERR_VALUE, "%s: the header would take %zu bytes, the format allows %d",
                       writer->path, *size, HEADER_MOST);
  if (status != ENG_OK) {
    free(*header);
    *header = NULL;
  }
  return status;
}

static void copy_run(char *to, const char *from, int64_t count, int64_t stride, int64_t size)
{
  for (int64_t i = 0; i < count; i++) memcpy(to + i * size, from + i * stride * size, (size_t)size);
}

// Writes elements in row-major order, a bounded number at a time.
static eng_status put_tensor(file_writer *out, const eng_tensor_info *info)
{
  const int64_t size = bytes_of(info->dtype);
  if (info->count == 0) return ENG_OK;
  if (info->contiguous || info->ndim == 0)
    return file_writer_put(out, info->data, info->count * size);
  char piece[GATHER_BYTES];
  int64_t filled = 0, index[ENG_MAX_DIMS] = { 0 };
  const int last = info->ndim - 1;
  for (;;) {
    int64_t row = 0;
    for (int d = 0; d < last; d++) row += index[d] * info->stride[d];
    for (int64_t at = 0; at < info->shape[last];) {
      int64_t fits = (GATHER_BYTES - filled) / size,
              run = info->shape[last] - at < fits ? info->shape[last] - at : fits;
      copy_run(piece + filled, (const char *)info->data + (row + at * info->stride[last]) * size,
               run, info->stride[last], size);
      filled += run * size;
      at += run;
      if (filled == GATHER_BYTES) {
        ENG_TRY(file_writer_put(out, piece, filled));
        filled = 0;
      }
    }
    int d = last - 1;
    while (d >= 0 && ++index[d] == info->shape[d]) index[d--] = 0;
    if (d < 0) break;
  }
  return file_writer_put(out, piece, filled);
}

/// Writes a tensor in a card's memory.
static eng_status put_from_card(file_writer *out, const eng_tensor *x, const eng_tensor_info *info)
{
  int64_t bytes = info->count * bytes_of(info->dtype);
  void *host = malloc(bytes > 0 ? (size_t)bytes : 1);
  if (!host) return error_set(ENG_ERR_MEMORY, "out of memory for %lld bytes", (long long)bytes);
  eng_status status = eng_read(host, info->dtype, info->count, x);
  if (status == ENG_OK) status = file_writer_put(out, host, bytes);
  free(host);
  return status;
}

static eng_status write_file(const eng_safetensors_writer *writer, uint32_t *crc)
{
  char *header;
  size_t size = 0;
  file_writer out;
  ENG_TRY(check_names(writer));
  ENG_TRY(make_header(&header, &size, writer));
  uint64_t length = size;
  eng_status status = file_writer_open(&out, writer->path);
  if (status == ENG_OK) status = file_writer_put(&out, &length, PREFIX);
  if (status == ENG_OK) status = file_writer_put(&out, header, (int64_t)size);
  free(header);
  for (int64_t i = 0; i < writer->count && status == ENG_OK; i++) {
    eng_tensor_info info;
    status = eng_info(&info, &writer->items[i].tensor);
    if (status == ENG_OK)
      status = info.space == 0 ? put_tensor(&out, &info)
                               : put_from_card(&out, &writer->items[i].tensor, &info);
  }
  if (status == ENG_OK) status = file_writer_commit(&out);
  if (status == ENG_OK && crc != NULL) *crc = out.crc;
  file_writer_abort(&out);
  return status;
}

eng_status eng_safetensors_commit(eng_safetensors_writer *writer, uint32_t *crc)
{
  eng_status status = write_file(writer, crc);
  eng_safetensors_abort(writer);
  return status;
}
