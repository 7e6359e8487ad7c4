// The reference for gradient statistics: reads every byte once and keeps only a checksum. Built by
// bench.py with the system's compiler; called from parts.lua.
#include <stdint.h>

uint64_t read_all(const uint64_t *words, int64_t n)
{
  uint64_t sum = 0;
#pragma omp parallel for simd reduction(+ : sum) schedule(static)
  for (int64_t i = 0; i < n; i++) sum += words[i];
  return sum;
}
