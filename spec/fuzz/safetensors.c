// Feeds mutated safetensors files to the reader. It must refuse or accept each without a memory
// error, and an accepted file must be consistent. The same seed gives the same files.
// Run by `make fuzz`, under the sanitizers. Usage: safetensors [rounds [seed]]
#define _GNU_SOURCE
#include "base/error.h"
#include "store/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ROOM = 4096 };

static const struct { const char *header; int64_t data; } seeds[] = {
  { "{}", 0 },
  { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}", 24 },
  { "{\"s\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
    "\"e\":{\"dtype\":\"F16\",\"shape\":[0,7],\"data_offsets\":[8,8]}}  ", 8 },
  { "{\"__metadata__\":{\"format\":\"pt\",\"k\\u00e9\\ud83d\\ude00\":\"v\\n\\\"\"},"
    "\"x.0\":{\"data_offsets\":[0,6],\"dtype\":\"BF16\",\"shape\":[3]},"
    "\"x.1\":{\"shape\":[1,1,1,1,1,2],\"dtype\":\"BOOL\",\"data_offsets\":[6,8]},"
    "\"\xC3\xA9\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[8,24]}}", 24 },
  { " {\"a\" : {\"dtype\" : \"U8\" , \"shape\" : [ 4 ] , \"data_offsets\" : [ 0 , 4 ] } }\n", 4 },
};

static const char *const words[] = {
  "9223372036854775807", "9223372036854775808", "18446744073709551616", "-1", "0", "1", "00",
  "1.5", "1e9", "4294967296", "null", "true",
  "{", "}", "[", "]", ",", ":", "\"", "\\", "\\u0000", "\\ud800", "\\udc00",
  "\\uFFFF", "\"__metadata__\"", "\"dtype\"", "\"shape\"",
  "\"data_offsets\"", "\"F32\"", "\"F8_E4M3\"", "\"BOOL\"", "\xC3", "\xED\xA0\x80",
  "\xF4\x90\x80\x80", "\xF0\x9F\x98\x80", "[[[[[[[[", "{\"a\":{\"a\":{\"a\":",
  "\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},",
};
enum { SEEDS = sizeof seeds / sizeof *seeds, WORDS = sizeof words / sizeof *words };

static uint64_t state;

static uint32_t draw(uint32_t below)
{
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)((state >> 33) % below);
}

static void splice(char *text, int64_t *size, int64_t at, int64_t removed, const char *with,
                   int64_t added)
{
  if (removed > *size - at) removed = *size - at;
  if (*size - removed + added > ROOM) return;
  memmove(text + at + added, text + at + removed, (size_t)(*size - at - removed));
  memcpy(text + at, with, (size_t)added);
  *size += added - removed;
}

static void mutate(char *text, int64_t *size)
{
  char copy[64];
  int64_t at = draw((uint32_t)*size + 1), length = 1 + draw(24), from;
  const char *word = words[draw(WORDS)];
  switch (draw(7)) {
  case 0: if (*size > 0) text[draw((uint32_t)*size)] ^= (char)(1 << draw(8)); break;
  case 1: copy[0] = (char)draw(256); splice(text, size, at, 1, copy, 1); break;
  case 2: splice(text, size, at, length, "", 0); break;
  case 3: splice(text, size, at, 0, word, (int64_t)strlen(word)); break;
  case 4: splice(text, size, at, length, word, (int64_t)strlen(word)); break;
  case 5:                                      // replace a number
    for (from = at; from < *size && (text[from] < '0' || text[from] > '9'); from++) { }
    length = 0;
    while (from + length < *size && text[from + length] >= '0' && text[from + length] <= '9') {
      length++;
    }
    word = words[draw(12)];
    if (length > 0) splice(text, size, from, length, word, (int64_t)strlen(word));
    break;
  default:                                     // repeat a piece elsewhere
    from = draw((uint32_t)*size + 1);
    if (length > *size - from) length = *size - from;
    memcpy(copy, text + from, (size_t)length);
    splice(text, size, at, 0, copy, length);
  }
}

static void require(bool holds, const char *what, const char *text, int64_t size)
{
  if (holds) return;
  fprintf(stderr, "fuzz: %s, for the header (%lld bytes):\n%.*s\n", what, (long long)size,
          (int)size, text);
  exit(1);
}

// Checks the reader's guarantees for an accepted file.
static void check(const eng_safetensors *file, const char *text, int64_t size, int64_t data)
{
  int64_t reached = 8 + size;
  for (int64_t i = 0; i < eng_safetensors_count(file); i++) {
    eng_safetensors_entry e;
    require(eng_safetensors_get(&e, file, i) == ENG_OK, "an entry is missing", text, size);
    int64_t bytes = eng_dtype_size(e.dtype);
    for (int d = 0; d < e.ndim; d++) bytes *= e.shape[d];
    require(e.begin == reached && e.end - e.begin == bytes, "ranges do not tile the data", text,
            size);
    reached = e.end;
  }
  require(reached == 8 + size + data, "bytes remain after the last tensor", text, size);
  for (int64_t i = 0; i < eng_safetensors_metadata_count(file); i++) {
    const char *key, *value;
    require(eng_safetensors_metadata(&key, &value, file, i) == ENG_OK
            && strlen(key) + strlen(value) <= (size_t)size, "metadata is wrong", text, size);
  }
}

// Reads every tensor of an accepted file.
static void read_all(const eng_safetensors *file, const char *text, int64_t size)
{
  for (int64_t i = 0; i < eng_safetensors_count(file); i++) {
    eng_tensor x;
    require(eng_safetensors_read(&x, file, i, true) == ENG_OK, "a tensor cannot be read", text,
            size);
    eng_free(&x);
  }
}

int main(int argc, char **argv)
{
  long rounds = argc > 1 ? atol(argv[1]) : 300000, accepted = 0;
  state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  int memory = memfd_create("fuzz", 0);
  char path[64], text[ROOM];
  snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
  for (long round = 0; round < rounds; round++) {
    int which = (int)draw(SEEDS);
    int64_t size = (int64_t)strlen(seeds[which].header), data = seeds[which].data;
    memcpy(text, seeds[which].header, (size_t)size);
    for (uint32_t i = 0, n = draw(5); i < n; i++) mutate(text, &size);
    if (draw(16) == 0) data += (int64_t)draw(17) - 8;
    if (data < 0) data = 0;
    eng_safetensors *file = NULL;
    eng_status status;
    if (round % 16 == 0) {                     // through a file, with a mutated length as well
      uint64_t length = (uint64_t)size;
      if (draw(4) == 0) length ^= 1ull << draw(64);
      if (ftruncate(memory, 0) != 0
          || ftruncate(memory, 8 + size + data - draw(2) * draw(9)) != 0) continue;
      if (pwrite(memory, &length, 8, 0) != 8
          || pwrite(memory, text, (size_t)size, 8) != size) return 1;
      status = eng_safetensors_open(&file, path);
      if (status == ENG_OK && length != (uint64_t)size) {
        eng_safetensors_close(file);
        continue;
      }
    } else {
      char *header = malloc(size > 0 ? (size_t)size : 1);
      memcpy(header, text, (size_t)size);
      status = safetensors_parse(&file, "fuzz", header, size, data);
    }
    if (status == ENG_OK) {
      accepted++;
      if (round % 16 != 0) check(file, text, size, data);
      else read_all(file, text, size);
    } else {
      require(status == ENG_ERR_FORMAT || status == ENG_ERR_DTYPE, "an unexpected status", text,
              size);
      require(file == NULL && eng_error_message()[0] != 0, "no message", text, size);
    }
    eng_safetensors_close(file);
  }
  printf("fuzz safetensors: %ld files, %ld accepted\n", rounds, accepted);
  return accepted > 0 && accepted < rounds ? 0 : 1;
}
