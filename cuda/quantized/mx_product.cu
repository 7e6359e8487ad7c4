// The operation mx_matmul on the card: cuBLASLt's block-scaled products (gemm/gemm_codes.h) where
// they support the formats, sizes and alignments, else the formula (mx_dequantize.cu). This file
// puts the scales in cuBLASLt's order. For NVFP4 it also computes alpha, the factors on the product
// and on the previous y. ENGINE_FP8_FORMULA=1 always uses the formula. Called through the device's
// table.
#include "kernel/element.h"
#include "fp8_plain.h"
#include "gemm/gemm_codes.h"

extern "C" {
#include "base/mx.h"
}

namespace {

enum { THREADS = 256, TILE_ROWS = 128, TILE_COLUMNS = 4, TILE_WORDS = TILE_ROWS };

/// The scales of an operand, row-major, with `across` scales to a row. Each covers `high` rows of
/// the operand. `to` receives the scales in cuBLASLt's tiles, as `words` words of four scales.
struct tiling {
  const uint8_t *scale;
  uint32_t      *to;
  int64_t        rows, across, high, tiles_across, words;
};

/// Writes the scales of both operands in cuBLASLt's order. A thread writes four adjacent scales of
/// a row, or padding. The first thread also writes alpha, unless alpha is NULL.
__global__ void __launch_bounds__(THREADS)
tile_scales(const tiling a, const tiling b, const float *amax_a, int rule_a, const float *amax_b,
            int rule_b, double factor, bool add, float *alpha)
{
  int64_t word = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (word == 0 && alpha) {
    alpha[0] = mx_alpha(amax_a, rule_a, amax_b, rule_b, factor);
    alpha[1] = add;
  }
  const tiling &x = word < a.words ? a : b;
  if (word >= a.words) word -= a.words;
  if (word >= x.words) return;
  const int64_t tile = word / TILE_WORDS, in_tile = word % TILE_WORDS,
                row = tile / x.tiles_across * TILE_ROWS + in_tile % 4 * 32 + in_tile / 4,
                column = tile % x.tiles_across * TILE_COLUMNS;
  uint32_t four = 0;
  for (int c = 0; c < TILE_COLUMNS; c++)
    if (row < x.rows && column + c < x.across)
      four |= (uint32_t)x.scale[row / x.high * x.across + column + c] << 8 * c;
  x.to[word] = four;
}

bool on_tensor_cores(const op_call *call, int64_t K)
{
  const auto &m = call->mx_matmul;
  const tensor *a = call->in[0], *b = call->in[2], *y = call->out[0];
  return !is_on("ENGINE_FP8_FORMULA", false) &&
         mx_product_supported(m.format_a, m.format_b, mx_is_nvfp4(m.rule_a)) && K > 0 &&
         (mx_is_nvfp4(m.rule_a) || (!call->in[4] && !call->in[5])) &&
         a->shape[0] % 16 == 0 && b->shape[0] % 16 == 0 && is_fast(y->dtype) &&
         is_aligned(a->data) && is_aligned(b->data) && is_aligned(y->data);
}

tiling tiling_of(const tensor *q, const tensor *scale)
{
  tiling x = {};
  x.scale = (const uint8_t *)scale->data;
  x.rows = q->shape[0];
  x.across = scale->shape[1];
  x.high = x.rows / scale->shape[0];
  x.tiles_across = parts(x.across, TILE_COLUMNS);
  x.words = parts(x.rows, TILE_ROWS) * x.tiles_across * TILE_WORDS;
  return x;
}

eng_status product(const op_call *call, int64_t K, scratch *s)
{
  const auto &m = call->mx_matmul;
  const tensor *q[2] = {call->in[0], call->in[2]}, *scale[2] = {call->in[1], call->in[3]};
  const int64_t format[2] = {m.format_a, m.format_b};
  tiling tiles[2];
  mx_operand x[2];
  for (int k = 0; k < 2; k++) {
    tiles[k] = tiling_of(q[k], scale[k]);
    tiles[k].to = (uint32_t *)scratch_keep(s, tiles[k].words * (int64_t)sizeof(uint32_t));
    if (!tiles[k].to) return ENG_ERR_MEMORY;
    x[k] = {q[k]->data, tiles[k].to, q[k]->shape[0], (int32_t)format[k]};
  }
  const bool nvfp4 = mx_is_nvfp4(m.rule_a);
  const float known[2] = {mx_alpha(NULL, 0, NULL, 0, m.factor), m.add ? 1.0f : 0.0f};
  float *found = nvfp4 ? (float *)scratch_keep(s, sizeof known) : NULL;
  if (nvfp4 && !found) return ENG_ERR_MEMORY;
  const int64_t words = tiles[0].words + tiles[1].words;
  tile_scales<<<(unsigned)parts(words, THREADS), THREADS, 0, cuda_stream()>>>(
    tiles[0], tiles[1], (const float *)data_of(call->in[4]), (int)m.rule_a,
    (const float *)data_of(call->in[5]), (int)m.rule_b, m.factor, m.add != 0, found);
  ENG_TRY(cuda_launched("mx_matmul"));
  const tensor *y = call->out[0];
  return mx_product(y->data, y->dtype, &x[0], &x[1], K, nvfp4, nvfp4 ? found : known, m.add != 0);
}

}  // namespace

extern "C" eng_status cuda_mx_matmul(const op_call *call)
{
  const int64_t K = call->in[0]->shape[1] * (mx_packed(call->mx_matmul.format_a) ? 2 : 1);
  if (!on_tensor_cores(call, K)) return mx_plain(call);
  scratch s = {};
  const eng_status status = product(call, K, &s);
  scratch_give_all(&s);
  return status;
}
