// FP8's part of gemm_host.c: layouts of operands and scales as cuBLASLt reads them, refusals,
// transposed and ragged factors.
#include "gemm_host.h"

#include "gemm/gemm_codes.h"

#include <stdlib.h>
#include <string.h>

op_kernel cuda_fp8_matmul;

// ------------------------------------------------------------------ fp8_product

static double fp8_decoded(uint8_t code, int format)   // the few codes used: 0, +-1, +-1.5 or +-2
{
  uint8_t one = format == ENG_e4m3 ? 0x38 : 0x3C, magnitude = code & 0x7F;
  double value = magnitude == 0                                  ? 0 :
                 magnitude == one                                ? 1 :
                 magnitude == one + (format == ENG_e4m3 ? 4 : 2) ? 1.5 :
                                                                   2;
  return code & 0x80 ? -value : value;
}

static fp8_scales scales_of(int scaling, int64_t rows, int64_t inner)
{
  static const int blocks[][2] = {
    [FP8_TENSOR] = {0, 0}, [FP8_ROW] = {1, 0}, [FP8_VEC128] = {1, 128}, [FP8_BLK128] = {128, 128}};
  return fp8_scales_for(blocks[scaling][0], blocks[scaling][1], rows, inner, NULL);
}

/// A random operand; [rows x inner] of it is data, the rest zeros.
static fp8_operand fp8_random(int64_t rows, int64_t inner, int format, int scaling)
{
  fp8_operand x = {
    .rows = fp8_padded(rows), .inner = fp8_padded(inner), .format = format, .scaling = scaling};
  uint8_t *data = piece(x.rows * x.inner), one = format == ENG_e4m3 ? 0x38 : 0x3C;
  uint8_t codes[] = {0, one, one | 0x80, (uint8_t)(one + (format == ENG_e4m3 ? 4 : 2)),
                     (uint8_t)(one + (format == ENG_e4m3 ? 8 : 4))};
  for (int64_t i = 0; i < x.rows * x.inner; i++)
    data[i] = i / x.inner < rows && i % x.inner < inner ? codes[random_below(5)] : 0;
  fp8_scales s = scales_of(scaling, x.rows, x.inner);
  float *scale = piece(s.count * 4);
  for (int64_t i = 0; i < s.count; i++) scale[i] = (float)(1 + random_below(4)) / 2;
  x.data = data;
  x.scale = scale;
  return x;
}

static void fp8_one(int64_t m, int64_t n, int64_t k, int scaling_x, int scaling_w, int dtype,
                    bool accumulate, bool with_bias)
{
  fp8_operand x = fp8_random(m, k, random_below(2) ? ENG_e4m3 : ENG_e5m2, scaling_x);
  fp8_operand w =
    fp8_random(n, k, x.format == ENG_e5m2 || random_below(2) ? ENG_e4m3 : ENG_e5m2, scaling_w);
  int64_t shape[] = {m, n};
  tensor y = make(dtype, 2, shape, 0, false), bias = make(dtype, 1, &n, 0, false);
  fp8_result result = {.data = y.data,
                       .dtype = dtype,
                       .m = m,
                       .n = n,
                       .stride = n,
                       .accumulate = accumulate,
                       .bias = with_bias ? bias.data : NULL,
                       .bias_dtype = dtype};
  fp8_scales sx = scales_of(scaling_x, x.rows, x.inner),
             sw = scales_of(scaling_w, w.rows, w.inner);
  double *want = calloc((size_t)(m * n), sizeof *want);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      double sum = accumulate ? element_get(y.data, dtype, i * n + j) : 0;
      if (with_bias) sum += element_get(bias.data, dtype, j);
      for (int64_t p = 0; p < k; p++)
        sum += fp8_decoded(((const uint8_t *)x.data)[i * x.inner + p], x.format) *
               fp8_decoded(((const uint8_t *)w.data)[j * w.inner + p], w.format) *
               (double)x.scale[fp8_scale_at(&sx, i, p)] * (double)w.scale[fp8_scale_at(&sw, j, p)];
      want[i * n + j] = sum;
    }
  CHECK(fp8_product(&result, &x, &w, false) == ENG_OK, "%s", card.error);
  CHECK(card.scratch_bytes == 0, "%ld bytes of scratch leaked", card.scratch_bytes);
  for (int64_t i = 0; i < m * n; i++) {
    double got = element_get(y.data, dtype, i), off = got > want[i] ? got - want[i] : want[i] - got,
           size = want[i] < 0 ? -want[i] : want[i];
    double step = dtype == ENG_f32 ? 0 : dtype == ENG_f16 ? 1.0 / 1024 : 1.0 / 128;
    CHECK(off <= size * step,
          "fp8 [%lld x %lld], K %lld, scales %d %d: element %lld is %g, expected %g", (long long)m,
          (long long)n, (long long)k, scaling_x, scaling_w, (long long)i, got, want[i]);
  }
  free(want);
  forget_tensors();
}

/// Checks that a card multiplies operands with these scalings from capability `first` to `last`.
static void supported(int scaling_x, int scaling_w, int first, int last)
{
  for (card.capability = 80; card.capability <= 120; card.capability++)
    CHECK(fp8_product_supported(scaling_x, scaling_w) ==
            (card.capability >= first && card.capability <= last),
          "scales by %d times scales by %d on sm_%d", scaling_x, scaling_w, card.capability);
  card.capability = 90;
}

void fp8_products(void)
{
  static const int pairs[][2] = {{FP8_TENSOR, FP8_TENSOR},
                                 {FP8_ROW, FP8_ROW},
                                 {FP8_VEC128, FP8_BLK128},
                                 {FP8_BLK128, FP8_VEC128},
                                 {FP8_VEC128, FP8_VEC128}};
  card.offered = 1;
  for (int p = 0; p < 5; p++)
    for (int i = 0; i < 12; i++) {
      int dtype = i % 3 == 0 ? ENG_bf16 : i % 3 == 1 ? ENG_f32 : ENG_f16;
      fp8_one(1 + random_below(20), 1 + random_below(150), 1 + random_below(400), pairs[p][0],
              pairs[p][1], dtype, i % 2, i % 4 == 2);
      fp8_one(16 * (1 + random_below(9)), 16, 16 * (1 + random_below(40)), pairs[p][0], pairs[p][1],
              dtype, i % 2, i % 4 == 2);
    }
  // Every block's scale lies inside the array, and no two blocks share one.
  for (int scaling = FP8_TENSOR; scaling <= FP8_BLK128; scaling++)
    for (int64_t rows = 1; rows < 700; rows += 61)
      for (int64_t inner = 1; inner < 1300; inner += 127) {
        fp8_scales s = scales_of(scaling, rows, inner);
        char *seen = calloc((size_t)s.count, 1);
        for (int64_t r = 0; r < s.row_count; r++)
          for (int64_t k = 0; k < s.inner_count; k++) {
            int64_t at = fp8_scale_at(&s, r * s.row_block, k * s.inner_block);
            CHECK(at >= 0 && at < s.count && !seen[at], "scales by %d of [%lld x %lld]", scaling,
                  (long long)rows, (long long)inner);
            seen[at] = 1;
          }
        CHECK(fp8_scale_at(&s, rows - 1, inner - 1) < s.count, "the last scale");
        free(seen);
      }
  for (int x = -1; x <= FP8_BLK128; x++)
    for (int w = -1; w <= FP8_BLK128; w++) {
      bool pair = false;
      for (int p = 1; p < 5; p++) pair = pair || (pairs[p][0] == x && pairs[p][1] == w);
      if (x == FP8_TENSOR && w == FP8_TENSOR) supported(x, w, 89, 120);
      else supported(x, w, pair ? 90 : 121, 90);
    }
  // The message of a product without an algorithm describes the result and both operands.
  fp8_operand x = fp8_random(32, 64, ENG_e4m3, FP8_VEC128),
              w = fp8_random(48, 64, ENG_e4m3, FP8_VEC128);
  float out[32 * 48];
  fp8_result y = {.data = out, .dtype = ENG_f32, .m = 32, .n = 48, .stride = 48};
  card.offered = 0;
  card.error[0] = 0;
  CHECK(fp8_product(&y, &x, &w, false) != ENG_OK && strstr(card.error, "[32 x 64], scales by 1x"),
        "got '%s'", card.error);
  forget_tensors();
}

// ------------------------------------------------------------------ fp8_matmul

/// A factor [outer x K] in blocks, as is or transposed, without padding: bytes and scales as
/// quantize makes them.
static void fp8_factor(tensor *q, tensor *scale, int64_t outer, int64_t k, bool along_k,
                       int64_t block_rows, int64_t block_columns)
{
  static const uint8_t codes[] = {0, 0x38, 0xB8, 0x3C, 0x40};
  int64_t shape[2] = {along_k ? outer : k, along_k ? k : outer}, scale_shape[2];
  fp8_scales at = fp8_scales_for(block_rows, block_columns, shape[0], shape[1], scale_shape);
  *q = make(ENG_f32, 2, shape, 0, false);
  q->dtype = ENG_e4m3;
  for (int64_t i = 0; i < q->count; i++) ((uint8_t *)q->data)[i] = codes[random_below(5)];
  *scale = make(ENG_f32, 2, scale_shape, 0, false);
  CHECK(scale->count == at.count, "%lld scales", (long long)at.count);
  for (int64_t i = 0; i < at.count; i++)
    ((float *)scale->data)[i] = (float)(1 + random_below(4)) / 2;
}

static double fp8_element(const tensor *q, const tensor *scale, bool along_k, int64_t block_rows,
                          int64_t block_columns, int64_t i, int64_t k)
{
  int64_t row = along_k ? i : k, column = along_k ? k : i;
  fp8_scales at = fp8_scales_for(block_rows, block_columns, q->shape[0], q->shape[1], NULL);
  return fp8_decoded(((const uint8_t *)q->data)[row * q->shape[1] + column], ENG_e4m3) *
         (double)((const float *)scale->data)[fp8_scale_at(&at, row, column)];
}

static void fp8_matmul_one(int64_t m, int64_t n, int64_t k, const int64_t *blocks_a,
                           const int64_t *blocks_b, bool ta, bool tb, bool adds)
{
  tensor a, sa, b, sb;
  // rows and columns of a block in memory: a is [M x K], or [K x M] if ta; b is [K x N], or [N x K]
  // if tb
  int64_t ra = blocks_a[ta], ca = blocks_a[!ta], rb = blocks_b[!tb], cb = blocks_b[tb],
          shape[] = {m, n};
  fp8_factor(&a, &sa, m, k, !ta, ra, ca);
  fp8_factor(&b, &sb, n, k, tb, rb, cb);
  tensor y = make(ENG_f32, 2, shape, random_below(2) ? 3 : 0, false),
         bias = make(ENG_f32, 1, &n, 0, false);
  op_call call = {.op = ENG_OP_fp8_matmul,
                  .n_in = 5,
                  .n_out = 1,
                  .in = {&a, &sa, &b, &sb, !adds && random_below(2) ? &bias : NULL},
                  .out = {&y},
                  .fp8_matmul = {.transpose_a = ta, .transpose_b = tb, .a_rows = ra,
                                 .a_columns = ca, .b_rows = rb, .b_columns = cb,
                                 .accumulator = ENG_ACCUMULATE_HOPPER, .promotion = 128,
                                 .add = adds}};
  double *want = calloc((size_t)(m * n), sizeof *want);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      double sum = adds       ? element_get(y.data, ENG_f32, place(&y, i * n + j)) :
                   call.in[4] ? element_get(bias.data, ENG_f32, j) :
                                0;
      for (int64_t p = 0; p < k; p++)
        sum += fp8_element(&a, &sa, !ta, ra, ca, i, p) * fp8_element(&b, &sb, tb, rb, cb, j, p);
      want[i * n + j] = sum;
    }
  card.plain = 0;
  CHECK(cuda_fp8_matmul(&call) == ENG_OK && card.plain == 0 && !card.last_fast, "%s", card.error);
  CHECK(card.scratch_bytes == 0, "%ld bytes of scratch leaked", card.scratch_bytes);
  for (int64_t i = 0; i < m * n; i++) {
    double got = element_get(y.data, ENG_f32, place(&y, i));
    CHECK(got == want[i],
          "fp8_matmul [%lld x %lld], K %lld, transposed %d %d: element %lld is %g, expected %g",
          (long long)m, (long long)n, (long long)k, ta, tb, (long long)i, got, want[i]);
  }
  // The formula computes the accumulators and promotions that tensor cores lack. With one scale per
  // tensor, promotion 0 selects the fast mode.
  for (int model = ENG_ACCUMULATE_FP32; model < ENG_ACCUMULATORS; model++)
    for (int promotion = 0; promotion <= 256; promotion += 32) {
      bool blocks = blocks_a[1] == 128,
           cores = model == ENG_ACCUMULATE_HOPPER &&
                   (promotion == 0 || promotion == 128 || (blocks && promotion > 128));
      if (random_below(24)) continue;
      call.fp8_matmul.accumulator = model;
      call.fp8_matmul.promotion = promotion;
      card.plain = card.last_fast = 0;
      CHECK(cuda_fp8_matmul(&call) == ENG_OK && card.plain == !cores &&
              card.last_fast == (cores && !blocks && promotion == 0),
            "accumulator %d, promotion %d", model, promotion);
    }
  free(want);
  forget_tensors();
}

void fp8_matmuls(void)
{
  // block sizes along the outer dimension and along K; 0: the whole dimension
  static const int64_t tensor_wide[] = {0, 0}, row[] = {1, 0}, vec[] = {1, 128}, blk[] = {128, 128};
  static const int64_t *const pairs[][2] = {
    {tensor_wide, tensor_wide}, {row, row}, {vec, blk}, {blk, vec}, {vec, vec}};
  card.offered = 1;
  for (int p = 0; p < 5; p++)
    for (int i = 0; i < 16; i++) {
      bool ta = i % 2, tb = i / 2 % 2, adds = i / 4 % 2, ragged = i >= 8;
      int64_t m = ragged ? 1 + random_below(20) : 16 * (1 + random_below(3)),
              n = ragged ? 1 + random_below(150) : 16 * (1 + random_below(9));
      int64_t k = ragged ? 1 + random_below(290) : 16 * (1 + random_below(18));
      fp8_matmul_one(m, n, k, pairs[p][0], pairs[p][1], ta, tb, adds);
    }
}
