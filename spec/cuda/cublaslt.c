// cuBLASLt on the host, with plain loops and checks for what the real one refuses. `card` (card.h)
// sets which algorithms it offers and how long each takes. Used by the tests of host logic (card.c,
// gemm_host.c, gemm_fp8_host.c) and by the emulated card (emulator/).
#include "card.h"

#include "runtime/device.h"
#include "base/fp8_hopper.h"
#include "base/fp8_layout.h"
#include "base/mx_blackwell.h"

#include <cublasLt.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void check_failed(const char *file, int line, const char *what, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  printf("%s:%d: %s does not hold: ", file, line, what);
  vprintf(format, args);
  printf("\n");
  exit(1);
}

double element_get(const void *data, int dtype, int64_t at)
{
  switch (dtype) {
    case ENG_f32: return ((const float *)data)[at];
    case ENG_f16: return f16_to_f32(((const uint16_t *)data)[at]);
    case ENG_bf16: return bf16_to_f32(((const uint16_t *)data)[at]);
    default: return ((const double *)data)[at];
  }
}

void element_set(void *data, int dtype, int64_t at, double value)
{
  switch (dtype) {
    case ENG_f32: ((float *)data)[at] = (float)value; break;
    case ENG_f16: ((uint16_t *)data)[at] = f16_from_f64(value); break;
    case ENG_bf16: ((uint16_t *)data)[at] = bf16_from_f64(value); break;
    default: ((double *)data)[at] = value;
  }
}

double gelu_of(double x)
{ return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x)
{
  double t = tanh(0.79788456080286536 * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456080286536 * (1 + 3 * 0.044715 * x * x);
}

// ------------------------------------------------------------------ descriptors

typedef struct product {
  int32_t  op[2], mode[2], bias_type, pointer_mode;
  const void *scale[2];
  uint32_t epilogue;
  void *bias, *aux;
  int64_t aux_ld;
  int8_t   fast;
  cublasComputeType_t compute;
} product;
typedef struct layout {
  cudaDataType_t type;
  int64_t rows, columns, ld, stride;
  int32_t batch;
} layout;
typedef struct wishes { uint64_t workspace; uint32_t reductions, align[4]; } wishes;

const char *cublasLtGetStatusName(cublasStatus_t status) { (void)status; return "STATUS"; }
const char *cublasLtGetStatusString(cublasStatus_t status) { (void)status; return "a status"; }
size_t cublasLtGetVersion(void) { return 130100; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
  *handle = malloc(1);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
  CHECK((compute == CUBLAS_COMPUTE_64F) == (scale == CUDA_R_64F), "the type of alpha");
  product *p = calloc(1, sizeof *p);
  p->compute = compute;
  p->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  p->bias_type = -1;
  *desc = (cublasLtMatmulDesc_t)p;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
  free(desc);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t size)
{
  product *p = (product *)desc;
  struct { cublasLtMatmulDescAttributes_t attribute; void *to; size_t size;
  } known[] = {{CUBLASLT_MATMUL_DESC_TRANSA, &p->op[0], 4},
               {CUBLASLT_MATMUL_DESC_TRANSB, &p->op[1], 4},
               {CUBLASLT_MATMUL_DESC_EPILOGUE, &p->epilogue, 4},
               {CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, 8},
               {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->aux, 8},
               {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &p->aux_ld, 8},
               {CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &p->bias_type, 4},
               {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &p->mode[0], 4},
               {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &p->mode[1], 4},
               {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &p->scale[0], 8},
               {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &p->scale[1], 8},
               {CUBLASLT_MATMUL_DESC_POINTER_MODE, &p->pointer_mode, 4},
               {CUBLASLT_MATMUL_DESC_FAST_ACCUM, &p->fast, 1}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (known[i].attribute != attribute) continue;
    CHECK(size == known[i].size, "attribute %d has %zu bytes", (int)attribute, size);
    memcpy(known[i].to, value, size);
    return CUBLAS_STATUS_SUCCESS;
  }
  check_failed(__FILE__, __LINE__, "known attribute", "%d", (int)attribute);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t ld)
{
  CHECK(rows > 0 && columns > 0 && ld >= (int64_t)rows, "layout %lld x %lld, ld %lld",
        (long long)rows, (long long)columns, (long long)ld);
  layout *x = calloc(1, sizeof *x);
  *x = (layout){.type = type, .rows = (int64_t)rows, .columns = (int64_t)columns, .ld = ld,
                .batch = 1};
  *made = (cublasLtMatrixLayout_t)x;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t x)
{
  free(x);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t to,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t size)
{
  layout *x = (layout *)to;
  bool count = attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
  CHECK(count || attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, "attribute %d",
        (int)attribute);
  CHECK(size == (count ? 4 : 8), "attribute %d has %zu bytes", (int)attribute, size);
  memcpy(count ? (void *)&x->batch : (void *)&x->stride, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made)
{
  *made = calloc(1, sizeof(wishes));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t x)
{
  free(x);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t to,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t size)
{
  wishes *w = (wishes *)to;
  struct { cublasLtMatmulPreferenceAttributes_t attribute; void *to; size_t size;
  } known[] = {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &w->workspace, 8},
               {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &w->reductions, 4},
               {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &w->align[0], 4},
               {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &w->align[1], 4},
               {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &w->align[2], 4},
               {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &w->align[3], 4}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (known[i].attribute != attribute) continue;
    CHECK(size == known[i].size, "preference %d has %zu bytes", (int)attribute, size);
    memcpy(known[i].to, value, size);
    return CUBLAS_STATUS_SUCCESS;
  }
  check_failed(__FILE__, __LINE__, "known preference", "%d", (int)attribute);
}

static uint64_t workspace_of(int algorithm, const layout *c)
{
  return (uint64_t)(card.workspace[algorithm] * c->rows * c->columns * c->batch);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t *results, int *found)
{
  (void)handle, (void)a, (void)b, (void)d;
  const wishes *w = (const wishes *)preference;
  CHECK(w->reductions == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, "preferences");
  const product *p = (const product *)desc;
  if (card.no_bias && p->epilogue == CUBLASLT_EPILOGUE_BIAS) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (card.no_epilogue && (p->aux_ld || p->epilogue == CUBLASLT_EPILOGUE_BGRADB))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  card.heuristics++;
  *found = 0;
  for (int i = 0; i < CARD_ALGORITHMS && *found < card.offered && *found < most; i++) {
    if (workspace_of(i, (const layout *)c) > w->workspace) continue;
    cublasLtMatmulHeuristicResult_t *one = &results[(*found)++];
    *one = (cublasLtMatmulHeuristicResult_t){.state = CUBLAS_STATUS_SUCCESS,
                                             .workspaceSize = workspace_of(i, (const layout *)c)};
    one->algo.data[0] = (uint64_t)i;
    for (int k = 0; k < 4; k++) one->algo.data[1 + k] = w->align[k];
  }
  return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void *to, size_t size, size_t *written)
{
  int i = (int)algo->data[0];
  uint32_t value = attribute == CUBLASLT_ALGO_CONFIG_ID      ? 60u + (uint32_t)i / 2 :
                   attribute == CUBLASLT_ALGO_CONFIG_TILE_ID ? 20u + (uint32_t)i % 2 :
                   attribute == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME ?
                                                               (uint32_t)card.reduction[i] :
                                                               0;
  size_t own = attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID ||
                   attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID ?
                 2 :
                 4;
  if (size == own) memcpy(to, &value, own);
  else CHECK(size == 0, "configuration %d has %zu bytes", (int)attribute, size);
  *written = own;
  return CUBLAS_STATUS_SUCCESS;
}

static int dtype_from(cudaDataType_t type)
{
  return type == CUDA_R_32F     ? ENG_f32 :
         type == CUDA_R_64F     ? ENG_f64 :
         type == CUDA_R_16F     ? ENG_f16 :
         type == CUDA_R_16BF    ? ENG_bf16 :
         type == CUDA_R_8F_E4M3 ? ENG_e4m3 :
         type == CUDA_R_4F_E2M1 ? ENG_FORMAT_E2M1 :
                                  ENG_e5m2;
}

static bool is_nvfp4(const product *p)
{ return p->mode[0] == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3; }
static bool is_microscaled(const product *p)
{ return is_nvfp4(p) || p->mode[0] == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0; }

/// The scale of element (i, k) of an FP8 factor, laid out as in cuBLAS's manual.
static float scale_of(const layout *x, const product *p, int side, int64_t i, int64_t k)
{
  int64_t outer = x->columns, L = (x->rows + 127) / 128;
  const float *scale = (const float *)p->scale[side];
  switch (p->mode[side]) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F:    return scale[i];
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:       return scale[k / 128 * outer + i];
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
      return scale[i / 128 * ((L + 3) / 4 * 4) + k / 128];
    default:                                            return *scale;
  }
}

/// Element (i, k) of op(X) in batch z; i is along M or N.
static double factor(const void *data, const layout *x, const product *p, int side, int64_t z,
                     int64_t i, int64_t k)
{
  bool rows_are_k = (p->op[side] == CUBLAS_OP_T) == (side == 0);
  int64_t row = rows_are_k ? k : i, column = rows_are_k ? i : k;
  CHECK(row < x->rows && column < x->columns, "an element outside its matrix");
  int64_t at = z * x->stride + column * x->ld + row;
  int dtype = dtype_from(x->type);
  if (dtype < ENG_e4m3) return element_get(data, dtype, at);
  return fp8_to_f32(((const uint8_t *)data)[at], dtype == ENG_e4m3 ? 3 : 2) *
         (double)scale_of(x, p, side, i, k);
}

static bool is_gelu(const product *p)
{
  return p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX ||
         p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || p->epilogue == CUBLASLT_EPILOGUE_DGELU;
}

/// The same for microscaled factors, as in cuBLAS's manual: the table of its types, and "1D block
/// scaling for FP8 and FP4 data types".
static void check_microscaled(const product *p, int ta, int tb, int tc, const layout *a,
                              const layout *b, const layout *c)
{
  bool four = ta == ENG_FORMAT_E2M1 && tb == ta,
       eight = (ta == ENG_e4m3 || tb == ENG_e4m3) && ta < ENG_FORMAT_E2M1 && tb < ENG_FORMAT_E2M1;
  CHECK(cuda_capability() >= 100, "block-scaled products on sm_%d", cuda_capability());
  CHECK(p->mode[0] == p->mode[1] && (is_nvfp4(p) ? four : eight), "formats %d and %d", ta, tb);
  CHECK(p->op[0] == CUBLAS_OP_T && p->op[1] == CUBLAS_OP_N, "block scales take TN alone");
  CHECK(a->rows % 32 == 0 && a->ld % 32 == 0 && b->ld % 32 == 0 && c->ld % 8 == 0 && c->batch == 1,
        "the sizes of a block-scaled product");
  for (int k = 0; k < 2; k++)
    CHECK(p->scale[k] && (uintptr_t)p->scale[k] % 16 == 0, "the scales' alignment");
  CHECK(tc == ENG_f32 || tc == ENG_f16 || tc == ENG_bf16, "the output's format");
  CHECK(p->epilogue == CUBLASLT_EPILOGUE_DEFAULT && !p->fast, "an epilogue");
}

/// Checks for everything that a real cublasLtMatmul refuses.
static void check_product(const product *p, const layout *a, const layout *b, const layout *c)
{
  int ta = dtype_from(a->type), tb = dtype_from(b->type), tc = dtype_from(c->type);
  CHECK((p->pointer_mode == CUBLASLT_POINTER_MODE_DEVICE) == is_nvfp4(p), "the pointer mode");
  if (is_microscaled(p)) {
    check_microscaled(p, ta, tb, tc, a, b, c);
    return;
  }
  CHECK(ta <= ENG_e5m2 && tb <= ENG_e5m2, "FP4 without scales");
  if (ta >= ENG_e4m3) {
    CHECK(tb >= ENG_e4m3 && p->op[0] == CUBLAS_OP_T && p->op[1] == CUBLAS_OP_N,
          "FP8 supports only TN");
    CHECK(a->ld % 16 == 0 && b->ld % 16 == 0 && a->rows % 16 == 0 && a->columns % 16 == 0 &&
            b->columns % 16 == 0,
          "FP8 sizes that are no multiples of 16");
    bool blocks = p->mode[0] >= CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    CHECK(!(blocks && p->fast), "fast sums with blocks");
    CHECK(p->mode[0] != CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F ||
            p->mode[1] != CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
          "128x128 scales on both sides");
    CHECK(tc == ENG_f32 || tc == ENG_f16 || tc == ENG_bf16, "FP8's output");
    return;
  }
  CHECK(ta == tb, "factors of formats %d and %d", ta, tb);
  CHECK((p->compute == CUBLAS_COMPUTE_64F) == (ta == ENG_f64), "the type of sums");
  CHECK(tc == ta || (tc == ENG_f32 && ta != ENG_f64), "output %d of factors %d", tc, ta);
  bool has_bias =
    p->epilogue == CUBLASLT_EPILOGUE_BIAS || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  if (has_bias) CHECK(dtype_from((cudaDataType_t)p->bias_type) == tc, "the bias's format");
  if (p->epilogue == CUBLASLT_EPILOGUE_BGRADB)
    CHECK(p->bias && (uintptr_t)p->bias % 16 == 0 && p->bias_type < 0,
          "column sums, in C's format");
  if (is_gelu(p)) {
    CHECK(p->aux && (uintptr_t)p->aux % 16 == 0 && p->aux_ld % 8 == 0 && p->aux_ld >= c->rows &&
            c->batch == 1,
          "the auxiliary matrix of a GELU");
    CHECK(tc == ta && (tc == ENG_f16 || tc == ENG_bf16), "a GELU of format %d", tc);
  }
}

/// The epilogue for element (i, j) of D.
static double after(const product *p, int tc, int64_t i, int64_t j, double sum)
{
  bool bias =
    p->epilogue == CUBLASLT_EPILOGUE_BIAS || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  if (bias) sum += element_get(p->bias, dtype_from((cudaDataType_t)p->bias_type), i);
  if (!is_gelu(p)) return sum;
  if (p->epilogue == CUBLASLT_EPILOGUE_DGELU)
    return gelu_slope(element_get(p->aux, tc, j * p->aux_ld + i)) * sum;
  element_set(p->aux, tc, j * p->aux_ld + i, sum);
  return gelu_of(sum);
}

/// Sums of B over k, one for each column of D.
static void sum_columns(const product *p, const layout *b, const void *B, int tc, int64_t columns,
                        int64_t inner)
{
  for (int64_t j = 0; j < columns; j++) {
    double sum = 0;
    for (int64_t k = 0; k < inner; k++) sum += factor(B, b, p, 1, 0, j, k);
    element_set(p->bias, tc, j, sum);
  }
}

/// A call, kept until its stream reaches it.
typedef struct asked {
  product p;
  layout a, b, c;
  const void *A, *B;
  void *C, *workspace;
  uint64_t workspace_bytes;
  bool adds;
  float alpha, beta;                // of microscaled factors; for NVFP4 in device memory, at:
  const float *alpha_at, *beta_at;
} asked;

/// Whether there is a scale for every row, or for every 128 numbers of a row.
static bool has_rows(const product *p, int side)
{
  return p->mode[side] == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F ||
         p->mode[side] == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
}

/// Sum (i, j) of two FP8 factors in Hopper's tensor cores: a new sum every 128 steps except in fast
/// mode. K is contiguous in both.
static double hopper_sum(const asked *x, int64_t z, int64_t i, int64_t j, int64_t inner)
{
  const uint8_t *a = (const uint8_t *)x->A + z * x->a.stride + i * x->a.ld,
                *b = (const uint8_t *)x->B + z * x->b.stride + j * x->b.ld;
  const int fa = dtype_from(x->a.type) == ENG_e4m3 ? 3 : 2,
            fb = dtype_from(x->b.type) == ENG_e4m3 ? 3 : 2;
  const int64_t every = x->p.fast ? inner : 128;
  const bool blocks = x->p.mode[0] >= CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ||
                      x->p.mode[1] >= CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
  // The engine's factors a and b are B and A here.
  const int64_t along = blocks ? 128 : 0;
  const fp8_order order = fp8_scale_order(has_rows(&x->p, 1), along, has_rows(&x->p, 0), along);
  float total = 0, sum = 0;
  for (int64_t at = 0; at < inner; at += every) {
    const int64_t end = at + every < inner ? at + every : inner;
    float part = 0;
    for (int64_t k = at; k < end; k += HOPPER_GROUP)
      part = hopper_group(a + k, 1, fa, b + k, 1, fb,
                          (int)(end - k < HOPPER_GROUP ? end - k : HOPPER_GROUP), part);
    sum += part;
    if (!blocks && end < inner) continue;
    const float scale_a = scale_of(&x->a, &x->p, 0, i, at),
                scale_b = scale_of(&x->b, &x->p, 1, j, at);
    total = fp8_add_scaled(order, sum, scale_b, scale_a, total);
    sum = 0;
  }
  return total;
}

/// n codes of row i from element k on, and the scale of each 16 of them, in tiles of 128 x 4.
static void unpack_scaled(float *number, float *scale, const void *data, const layout *x,
                          const product *p, int side, int64_t i, int64_t k, int n)
{
  const int format = dtype_from(x->type);
  const int64_t block = is_nvfp4(p) ? 16 : 32, blocks = x->rows / block;
  for (int e = 0; e < n; e++) {
    const int64_t at = i * x->ld + k + e, c = (k + e) / block,
                  tile = i / 128 * ((blocks + 3) / 4) + c / 4;
    const uint8_t *codes = data, byte = codes[format == ENG_FORMAT_E2M1 ? at / 2 : at];
    number[e] = mx_value(format == ENG_FORMAT_E2M1 ? byte >> at % 2 * 4 & 15 : byte,
                         mx_format_of(format));
    const uint8_t *scales = (const uint8_t *)p->scale[side] + tile * 512;
    scale[e / 16] = blackwell_scale(scales[i % 32 * 16 + i % 128 / 32 * 4 + c % 4],
                                    is_nvfp4(p) ? ENG_MX_NVFP4 : ENG_MX_RCEIL);
  }
}

/// Element (i, j) of a product of microscaled factors in Blackwell's tensor cores.
static float blackwell_element(const asked *x, int64_t i, int64_t j, float before)
{
  const mx_format fa = mx_format_of(dtype_from(x->a.type)),
                  fb = mx_format_of(dtype_from(x->b.type));
  const bool four = fa.top == 7;
  float a[BLACKWELL_MOST], b[BLACKWELL_MOST], scale[2][BLACKWELL_MOST / 16], sum = 0;
  const int n = blackwell_products(four);
  CHECK(x->a.rows % n == 0, "K %lld", (long long)x->a.rows);
  for (int64_t k = 0; k < x->a.rows; k += n) {
    unpack_scaled(a, scale[0], x->A, &x->a, &x->p, 0, i, k, n);
    unpack_scaled(b, scale[1], x->B, &x->b, &x->p, 1, j, k, n);
    sum = blackwell_group(a, fa, scale[0], b, fb, scale[1],
                          is_nvfp4(&x->p) ? ENG_MX_NVFP4 : ENG_MX_RCEIL, sum);
  }
  sum *= x->alpha_at ? *x->alpha_at : x->alpha;
  const float beta = x->beta_at ? *x->beta_at : x->beta;
  return beta != 0 ? sum + beta * before : sum;
}

/// op(X) as doubles, K innermost.
static double *unpacked(const void *data, const layout *x, const product *p, int side, int64_t z,
                        int64_t outer, int64_t inner)
{
  double *all = malloc((size_t)(outer * inner + 1) * sizeof *all);
  for (int64_t i = 0; i < outer; i++)
    for (int64_t k = 0; k < inner; k++) all[i * inner + k] = factor(data, x, p, side, z, i, k);
  return all;
}

static void run(const void *what)
{
  const asked *x = what;
  const product *p = &x->p;
  const layout *a = &x->a, *b = &x->b, *c = &x->c;
  const int64_t inner = p->op[0] == CUBLAS_OP_T ? a->rows : a->columns;
  const int tc = dtype_from(c->type);
  // overwrites the workspace, which must still be valid and which no other product may be using
  memset(x->workspace, 0xFF, x->workspace_bytes);
  if (is_microscaled(p)) {
#pragma omp parallel for
    for (int64_t j = 0; j < c->columns; j++)
      for (int64_t i = 0; i < c->rows; i++)
        element_set(x->C, tc, j * c->ld + i,
                    blackwell_element(x, i, j, (float)element_get(x->C, tc, j * c->ld + i)));
    return;
  }
  const bool hopper = card.hopper && dtype_from(a->type) >= ENG_e4m3,
             whole = card.sample == 1 && !hopper;
  if (p->epilogue == CUBLASLT_EPILOGUE_BGRADB) sum_columns(p, b, x->B, tc, c->columns, inner);
  for (int64_t z = 0; z < c->batch; z++) {
    double *left = whole ? unpacked(x->A, a, p, 0, z, c->rows, inner) : NULL,
           *right = whole ? unpacked(x->B, b, p, 1, z, c->columns, inner) : NULL;
#pragma omp parallel for
    for (int64_t j = 0; j < c->columns; j++)
      for (int64_t i = 0; i < c->rows; i++) {
        double sum = 0;
        if ((j * c->rows + i) % card.sample != 0) continue;
        if (hopper) sum = hopper_sum(x, z, i, j, inner);
        for (int64_t k = 0; !hopper && k < inner; k++)
          sum += whole ? left[i * inner + k] * right[j * inner + k] :
                         factor(x->A, a, p, 0, z, i, k) * factor(x->B, b, p, 1, z, j, k);
        sum = after(p, tc, i, j, sum);
        int64_t at = z * c->stride + j * c->ld + i;
        if (x->adds) sum += element_get(x->C, tc, at);
        element_set(x->C, tc, at, sum);
      }
    free(left);
    free(right);
  }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a_, const void *B,
                              cublasLtMatrixLayout_t b_, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c_, void *D, cublasLtMatrixLayout_t d_,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_size, cudaStream_t stream)
{
  (void)handle;
  const product *p = (const product *)desc;
  const layout *a = (const layout *)a_, *b = (const layout *)b_, *c = (const layout *)c_;
  const uint64_t wanted = workspace_of((int)algo->data[0], c);
  CHECK(C == D && c_ == d_ && workspace && (uintptr_t)workspace % 256 == 0, "arguments");
  CHECK(workspace_size >= wanted, "a workspace of %zu bytes, algorithm %d needs %zu",
        workspace_size, (int)algo->data[0], (size_t)wanted);
  const void *data[3] = {A, B, C};
  for (int i = 0; i < 3; i++)
    CHECK((uintptr_t)data[i] % algo->data[1 + i] == 0, "matrix %d is not aligned to %d bytes", i,
          (int)algo->data[1 + i]);
  check_product(p, a, b, c);
  bool ta = p->op[0] == CUBLAS_OP_T;
  CHECK(c->rows == (ta ? a->columns : a->rows) && a->batch == c->batch && b->batch == c->batch,
        "shapes");
  if (card.refused > 0 && --card.refused == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  card.matmuls++;
  card.last_algorithm = (int)algo->data[0];
  card.last_fast = p->fast;
  card.running += card.time[algo->data[0]];
  if (p->epilogue == CUBLASLT_EPILOGUE_BGRADB || is_gelu(p)) {
    card.epilogues++;
    card.running += card.epilogue_time;
  }
  asked call = {.p = *p,
                .a = *a,
                .b = *b,
                .c = *c,
                .A = A,
                .B = B,
                .C = D,
                .workspace = workspace,
                .workspace_bytes = wanted};
  if (is_nvfp4(p)) call.alpha_at = alpha, call.beta_at = beta;
  else if (is_microscaled(p)) call.alpha = *(const float *)alpha, call.beta = *(const float *)beta;
  else
    call.adds =
      dtype_from(c->type) == ENG_f64 ? *(const double *)beta != 0 : *(const float *)beta != 0;
  card_later(run, &call, sizeof call, stream);
  return CUBLAS_STATUS_SUCCESS;
}
