// Checksums of memory in any space. Several threads compute the XXH64 hashes of 64 KiB pieces; the
// checksum is the XXH64 hash of these hashes. It does not depend on the number of threads or on the
// device. Memory of a device is copied to the host 4 MiB at a time. Called by
// autograd/tensor_calls.c and params/.
#include "transfer.h"

#include "base/error.h"

#include <stdlib.h>

enum { PIECE = 1 << 16, STAGED = 64 * PIECE, PARALLEL_PIECES = 4 };

static void hash_pieces(uint64_t *hash, const char *data, int64_t bytes)
{
  int64_t pieces = (bytes + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(static) if (pieces >= PARALLEL_PIECES)
  for (int64_t k = 0; k < pieces; k++) {
    int64_t left = bytes - k * PIECE;
    hash[k] = eng_hash64(data + k * PIECE, left < PIECE ? left : PIECE);
  }
}

eng_status transfer_checksum(uint64_t *out, int space, const void *data, int64_t bytes)
{
  int64_t pieces = (bytes + PIECE - 1) / PIECE;
  bool host = space == SPACE_HOST;
  FREED uint64_t *hash = malloc((size_t)(pieces + 1) * sizeof *hash);
  FREED char *staged = host ? NULL : malloc(bytes < STAGED ? (size_t)bytes + 1 : STAGED);
  FAIL_IF(!hash || !(host || staged), ENG_ERR_MEMORY, "out of memory for a checksum");
  if (host) hash_pieces(hash, data, bytes);
  for (int64_t at = 0; !host && at < bytes; at += STAGED) {
    int64_t part = bytes - at < STAGED ? bytes - at : STAGED;
    ENG_TRY(transfer_to_host(staged, space, (const char *)data + at, part));
    hash_pieces(hash + at / PIECE, staged, part);
  }
  *out = eng_hash64(hash, pieces * (int64_t)sizeof *hash);
  return ENG_OK;
}
