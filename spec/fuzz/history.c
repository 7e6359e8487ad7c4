// Feeds blobs of gradient statistics to eng_history_unpack. Intact blobs must unpack exactly;
// damaged ones may be refused or read, but never past their end. Run by `make fuzz`, under the
// sanitizers. Usage: history [rounds [seed]]
#include "store/history.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS = 5 };

static uint64_t state;

static uint32_t draw(uint32_t below)
{
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)((state >> 33) % below);
}

static void fill(eng_tensor_stats *stats)
{
  memset(stats, 0, TENSORS * sizeof *stats);
  for (int i = 0; i < TENSORS; i++) {
    stats[i].count = (int64_t)1 << draw(62);
    stats[i].inf = draw(3);
    stats[i].zeros = draw(1000);
    stats[i].amax = draw(100) * 0.37;
    for (uint32_t b = draw(ENG_HIST_BINS), n = draw(40); n > 0 && b < ENG_HIST_BINS; n--, b++) {
      stats[i].hist[b] = (int64_t)1 << draw(62);
    }
  }
}

int main(int argc, char **argv)
{
  long rounds = argc > 1 ? atol(argv[1]) : 100000, refused = 0;
  state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  eng_tensor_stats stats[TENSORS], back[TENSORS];
  uint8_t *packed = malloc((size_t)history_pack_bound(TENSORS));
  for (long round = 0; round < rounds; round++) {
    int n;
    fill(stats);
    int64_t size = history_pack(packed, stats, TENSORS);
    if (eng_history_unpack(&n, back, TENSORS, packed, size) != ENG_OK || n != TENSORS
        || memcmp(stats, back, sizeof stats) != 0) {
      fprintf(stderr, "fuzz: the blob of round %ld does not unpack exactly\n", round);
      return 1;
    }
    for (uint32_t i = draw(4); i > 0; i--) packed[draw((uint32_t)size)] ^= (uint8_t)(1 << draw(8));
    if (draw(2) == 0) size = draw((uint32_t)size + 1);
    uint8_t *exact = malloc(size > 0 ? (size_t)size : 1);   // detects reads past its end
    memcpy(exact, packed, (size_t)size);
    refused += eng_history_unpack(&n, back, (int)draw(TENSORS + 1), exact, size) != ENG_OK;
    free(exact);
  }
  free(packed);
  printf("fuzz history: %ld blobs, %ld refused\n", rounds, refused);
  return refused > 0 && refused < rounds ? 0 : 1;
}
