// XXH64 with seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): a 64-bit hash for comparing
// data, not for protecting it from tampering. Called by file.c, device/checksum.c, params/ and
// tokenizer/. lua/engine/dist/agreement.lua calls it through engine.h to compare ranks.
#include "engine.h"

#include <string.h>

#define PRIME1 0x9E3779B185EBCA87ull
#define PRIME2 0xC2B2AE3D27D4EB4Full
#define PRIME3 0x165667B19E3779F9ull
#define PRIME4 0x85EBCA77C2B2AE63ull
#define PRIME5 0x27D4EB2F165667C5ull

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t word_at(const unsigned char *at, int bytes)
{
  uint64_t word = 0;
  memcpy(&word, at, (size_t)bytes);       // little endian, as crc32c.c asserts
  return word;
}

static inline uint64_t mixed(uint64_t lane, uint64_t word)
{ return rotate(lane + word * PRIME2, 31) * PRIME1; }

uint64_t eng_hash64(const void *data, int64_t size)
{
  const unsigned char *at = data, *end = at + size;
  uint64_t hash = PRIME5;
  if (size >= 32) {
    uint64_t a = PRIME1 + PRIME2, b = PRIME2, c = 0, d = 0 - PRIME1;
    for (; end - at >= 32; at += 32) {
      a = mixed(a, word_at(at, 8));
      b = mixed(b, word_at(at + 8, 8));
      c = mixed(c, word_at(at + 16, 8));
      d = mixed(d, word_at(at + 24, 8));
    }
    hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
    hash = (hash ^ mixed(0, a)) * PRIME1 + PRIME4;
    hash = (hash ^ mixed(0, b)) * PRIME1 + PRIME4;
    hash = (hash ^ mixed(0, c)) * PRIME1 + PRIME4;
    hash = (hash ^ mixed(0, d)) * PRIME1 + PRIME4;
  }
  hash += (uint64_t)size;
  for (; end - at >= 8; at += 8)
    hash = rotate(hash ^ mixed(0, word_at(at, 8)), 27) * PRIME1 + PRIME4;
  if (end - at >= 4) {
    hash = rotate(hash ^ word_at(at, 4) * PRIME1, 23) * PRIME2 + PRIME3;
    at += 4;
  }
  for (; at < end; at++) hash = rotate(hash ^ *at * PRIME5, 11) * PRIME1;
  hash = (hash ^ hash >> 33) * PRIME2;
  hash = (hash ^ hash >> 29) * PRIME3;
  return hash ^ hash >> 32;
}
