// CRC-32C (polynomial 0x1EDC6F41, reflected): a checksum that detects damaged files. x86 computes
// it in hardware, 8 bytes in 3 cycles; on other processors a loop looks up 8 bytes per round in
// eight tables. Owns the tables. Called by file.c and, through engine.h, by dist/ and Lua.
#include "engine.h"

#include <pthread.h>
#include <string.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "files and checksums assume little endian");

static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void table_fill(void)
{
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0);
    table[0][i] = crc;
  }
  for (uint32_t i = 0; i < 256; i++)
    for (int t = 1; t < 8; t++)
      table[t][i] = (table[t - 1][i] >> 8) ^ table[0][table[t - 1][i] & 255];
}

static uint32_t crc_plain(uint32_t crc, const uint8_t *p, int64_t size)
{
  pthread_once(&table_once, table_fill);
  for (; size >= 8; size -= 8, p += 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (int t = 0; t < 8; t++) crc ^= table[7 - t][(word >> (8 * t)) & 255];
  }
  for (; size > 0; size--, p++) crc = (crc >> 8) ^ table[0][(crc ^ *p) & 255];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2")))
static uint32_t crc_hardware(uint32_t crc, const uint8_t *p, int64_t size)
{
  uint64_t wide = crc;
  for (; size >= 8; size -= 8, p += 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = (uint32_t)wide;
  for (; size > 0; size--, p++) crc = _mm_crc32_u8(crc, *p);
  return crc;
}
#endif

uint32_t eng_crc32c(uint32_t crc, const void *data, int64_t size)
{
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~crc_hardware(~crc, data, size);
#endif
  return ~crc_plain(~crc, data, size);
}
