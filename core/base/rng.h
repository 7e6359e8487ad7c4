// Random numbers: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as
// 1, 2, 3; SC 2011). A block of four 32-bit words is a pure function of seed and block number. So
// every thread and device draws the same numbers in any order, and a resumed run draws the same
// numbers as an uninterrupted run. The state is a seed and the number of blocks drawn. Owns that
// state. Called by op.c, random.c and fp8/mx.c (take blocks), kernels (compute blocks), plugin.c
// (passes the seed to the card) and Lua.
#pragma once

#include "engine.h"
#include "numerics.h"

/// Reserves `blocks` blocks and returns the number of the first block.
uint64_t rng_take(int64_t blocks);

/// Returns the current seed.
uint64_t rng_seed(void);

/// Philox 4x32-10 with its full counter and key. `word` holds the counter on entry and the output
/// on return.
ENG_INLINE void philox4x32(uint32_t word[4], uint32_t key0, uint32_t key1)
{
  for (int round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)0xD2511F53u * word[0], b = (uint64_t)0xCD9E8D57u * word[2];
    uint32_t next0 = (uint32_t)(b >> 32) ^ word[1] ^ key0,
             next2 = (uint32_t)(a >> 32) ^ word[3] ^ key1;
    word[1] = (uint32_t)b;
    word[3] = (uint32_t)a;
    word[0] = next0;
    word[2] = next2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

/// Computes block `counter` of the stream with this seed.
ENG_INLINE void philox_of(uint32_t word[4], uint64_t seed, uint64_t counter)
{
  word[0] = (uint32_t)counter;
  word[1] = (uint32_t)(counter >> 32);
  word[2] = word[3] = 0;
  philox4x32(word, (uint32_t)seed, (uint32_t)(seed >> 32));
}

/// Computes block `counter` of the stream with the current seed.
static inline void philox_block(uint32_t word[4], uint64_t counter)
{ philox_of(word, rng_seed(), counter); }

/// Computes the random words for elements 8 * block to 8 * block + 7 of parameter `index` in update
/// number `update` of an optimizer: 16 bits for each element. Word 3 of the counter is not 0, so
/// the counter never equals a counter of philox_of.
ENG_INLINE void rng_of_update(uint32_t word[4], uint64_t seed, int64_t update, int32_t index,
                              int64_t block)
{
  word[0] = (uint32_t)block;
  word[1] = (uint32_t)(block >> 32);
  word[2] = (uint32_t)update;
  word[3] = (uint32_t)index + 1u;
  philox4x32(word, (uint32_t)seed, (uint32_t)(seed >> 32));
}

/// Returns the 16 random bits of element i from the words of its block.
ENG_INLINE uint32_t rng_half(const uint32_t word[4], int64_t i)
{ return word[i % 8 / 2] >> 16 * (i % 2) & 0xFFFFu; }

/// Maps a word to one of the 2^24 floats k / 2^24 in [0, 1).
ENG_INLINE float rng_unit(uint32_t word) { return (float)(word >> 8) * 0x1p-24f; }
