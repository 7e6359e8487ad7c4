// See card.h.
#include "card.h"

#include "device.h"
#include "fp8_plain.h"
#include "gemm_fp8.h"
#include "gemm_plain.h"

#include <cublasLt.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fake_card card;

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

// ------------------------------------------------------------------ what kernels see of the core and the device

eng_status error_set(eng_status status, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  vsnprintf(card.error, sizeof card.error, format, args);
  va_end(args);
  return status;
}

const char *eng_dtype_name(int dtype)
{
  static const char *const names[] = {"f32", "f64", "f16", "bf16"};
  return dtype >= 0 && dtype < 4 ? names[dtype] : "?";
}

int eng_dtype_size(int dtype) { return dtype == ENG_f64 ? 8 : dtype == ENG_f32 ? 4 : dtype == ENG_e4m3 || dtype == ENG_e5m2 ? 1 : 2; }

void *arena_alloc(arena_id id, int64_t bytes)
{
  (void)id;
  card.scratch_bytes += bytes;
  return aligned_alloc(256, (size_t)(bytes + 255) / 256 * 256 + 256);
}

void arena_free(arena_id id, void *piece, int64_t bytes)
{
  (void)id;
  card.scratch_bytes -= bytes;
  free(piece);
}

cudaStream_t cuda_stream(void) { return NULL; }
int cuda_multiprocessors(void) { return 132; }
int cuda_capability(void) { return card.capability; }
eng_status cuda_status(cudaError_t result, const char *what)
{
  return result == cudaSuccess ? ENG_OK : error_set(ENG_ERR_DEVICE, "cuda: error %d in %s", (int)result, what);
}

/// What the kernels contiguous and cast do.
static eng_status copy(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  int64_t index[ENG_MAX_DIMS] = {0};
  for (int64_t i = 0; i < y->count; i++) {
    int64_t from = 0, to = 0;
    for (int d = 0; d < x->ndim; d++) {
      from += index[d] * x->stride[d];
      to += index[d] * y->stride[d];
    }
    if (x->dtype == ENG_e4m3 || x->dtype == ENG_e5m2) ((uint8_t *)y->data)[to] = ((const uint8_t *)x->data)[from];
    else element_set(y->data, y->dtype, to, element_get(x->data, x->dtype, from));
    for (int d = x->ndim - 1; d >= 0 && ++index[d] == x->shape[d]; d--) index[d] = 0;
  }
  return ENG_OK;
}

eng_status cuda_contiguous(const op_call *call)
{
  CHECK(call->in[0]->dtype == call->out[0]->dtype, "contiguous does not convert");
  return copy(call);
}

eng_status cuda_cast(const op_call *call)
{
  CHECK(call->ints[0] == call->out[0]->dtype, "cast to another format than its output's");
  return copy(call);
}

// ------------------------------------------------------------------ unary.cu, bias_grad.cu

double gelu_of(double x)    { return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x)
{
  double t = tanh(0.79788456080286536 * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456080286536 * (1 + 3 * 0.044715 * x * x);
}

eng_status cuda_gelu_tanh(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  card.passes++;
  for (int64_t i = 0; i < y->count; i += card.sample) element_set(y->data, y->dtype, i, gelu_of(element_get(x->data, x->dtype, i)));
  return ENG_OK;
}

eng_status cuda_unary_grad(const op_call *call)
{
  const tensor *x = call->in[0], *dy = call->in[1], *dx = call->out[0];
  CHECK(call->ints[0] == ENG_OP_gelu_tanh && call->ints[1] == dx->dtype && x->count == dy->count && dx->count == x->count, "unary_grad");
  card.passes++;
  for (int64_t i = 0; i < dx->count; i += card.sample)
    element_set(dx->data, dx->dtype, i, gelu_slope(element_get(x->data, x->dtype, i)) * element_get(dy->data, dy->dtype, i));
  return ENG_OK;
}

eng_status cuda_bias_grad(const op_call *call)
{
  const tensor *dy = call->in[0], *db = call->out[0];
  int64_t n = db->count, rows = n ? dy->count / n : 0;
  CHECK(dy->shape[dy->ndim - 1] == n && call->ints[0] == db->dtype, "bias_grad");
  if (rows > 1) card.passes++;
  for (int64_t j = 0; j < n; j++) {
    double sum = call->ints[1] ? element_get(db->data, db->dtype, j) : 0;
    for (int64_t i = 0; i < rows; i++) sum += element_get(dy->data, dy->dtype, i * n + j);
    element_set(db->data, db->dtype, j, sum);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ gemm_plain.cu

static int64_t batch_offset(const gemm_product *p, const gemm_matrix *x, int64_t z)
{
  int64_t offset = 0;
  for (int d = p->batch_dims - 1; d >= 0; d--) {
    offset += z % p->batch[d] * x->batch[d];
    z /= p->batch[d];
  }
  return offset;
}

static void each(const gemm_product *p, const gemm_matrix *ready)
{
  int64_t batches = 1;
  for (int d = 0; d < p->batch_dims; d++) batches *= p->batch[d];
  for (int64_t z = 0; z < batches; z++)
    for (int64_t i = 0; i < p->m; i++)
      for (int64_t j = 0; j < p->n; j++) {
        double sum = 0;
        if (ready) sum = element_get(ready->data, ready->dtype, batch_offset(p, ready, z) + i * ready->row + j * ready->column);
        for (int64_t k = 0; !ready && k < p->k; k++)
          sum += element_get(p->a.data, p->a.dtype, batch_offset(p, &p->a, z) + i * p->a.row + k * p->a.column) *
                 element_get(p->b.data, p->b.dtype, batch_offset(p, &p->b, z) + k * p->b.row + j * p->b.column);
        int64_t at = batch_offset(p, &p->c, z) + i * p->c.row + j * p->c.column;
        if (p->bias) sum += element_get(p->bias, p->bias_dtype, j);
        if (p->accumulate) sum += element_get(p->c.data, p->c.dtype, at);
        element_set(p->c.data, p->c.dtype, at, sum);
      }
}

eng_status gemm_plain(const gemm_product *p)
{
  card.plain++;
  each(p, NULL);
  return ENG_OK;
}

eng_status gemm_finish(const gemm_product *p, const gemm_matrix *sum)
{
  card.finished++;
  each(p, sum);
  return ENG_OK;
}

/// fp8_plain.cu: only that it was called.
eng_status fp8_plain(const op_call *call)
{
  (void)call;
  card.plain++;
  return ENG_OK;
}

// ------------------------------------------------------------------ the CUDA runtime

static float running;   // milliseconds of work queued since the last event

struct CUevent_st { float at; };

cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
  (void)device;
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "NVIDIA Fake 1");
  properties->multiProcessorCount = 132;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void **memory, size_t bytes)
{
  if (card.no_memory) return cudaErrorMemoryAllocation;
  *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  card.memory++;
  return cudaSuccess;
}
cudaError_t cudaFree(void *memory) { free(memory); card.memory--; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
  (void)kind, (void)stream;
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
  (void)stream;
  memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = calloc(1, sizeof **event); return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { (void)stream; event->at = running; return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { (void)event; card.synchronizations++; return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) { *milliseconds = to->at - from->at; return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { (void)stream; card.synchronizations++; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
  (void)stream;
  *status = card.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// ------------------------------------------------------------------ cuBLASLt

typedef struct product {
  int32_t  op[2], mode[2], bias_type;
  const float *scale[2];
  uint32_t epilogue;
  void *bias, *aux;
  int64_t aux_ld;
  int8_t   fast;
  cublasComputeType_t compute;
} product;
typedef struct layout { cudaDataType_t type; int64_t rows, columns, ld, stride; int32_t batch; } layout;
typedef struct wishes { uint64_t workspace; uint32_t reductions, align[4]; } wishes;

const char *cublasLtGetStatusName(cublasStatus_t status) { (void)status; return "STATUS"; }
const char *cublasLtGetStatusString(cublasStatus_t status) { (void)status; return "a status"; }
size_t cublasLtGetVersion(void) { return 130100; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { *handle = malloc(1); return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale)
{
  CHECK((compute == CUBLAS_COMPUTE_64F) == (scale == CUDA_R_64F), "the type of alpha");
  product *p = calloc(1, sizeof *p);
  p->compute = compute;
  p->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  p->bias_type = -1;
  *desc = (cublasLtMatmulDesc_t)p;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { free(desc); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t size)
{
  product *p = (product *)desc;
  struct { cublasLtMatmulDescAttributes_t attribute; void *to; size_t size; } known[] = {
    {CUBLASLT_MATMUL_DESC_TRANSA, &p->op[0], 4}, {CUBLASLT_MATMUL_DESC_TRANSB, &p->op[1], 4},
    {CUBLASLT_MATMUL_DESC_EPILOGUE, &p->epilogue, 4}, {CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, 8},
    {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->aux, 8}, {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &p->aux_ld, 8},
    {CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &p->bias_type, 4}, {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &p->mode[0], 4},
    {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &p->mode[1], 4}, {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &p->scale[0], 8},
    {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &p->scale[1], 8}, {CUBLASLT_MATMUL_DESC_FAST_ACCUM, &p->fast, 1}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (known[i].attribute != attribute) continue;
    CHECK(size == known[i].size, "attribute %d has %zu bytes", (int)attribute, size);
    memcpy(known[i].to, value, size);
    return CUBLAS_STATUS_SUCCESS;
  }
  check_failed(__FILE__, __LINE__, "known attribute", "%d", (int)attribute);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, cudaDataType type, uint64_t rows, uint64_t columns, int64_t ld)
{
  CHECK(rows > 0 && columns > 0 && ld >= (int64_t)rows, "layout %lld x %lld, ld %lld", (long long)rows, (long long)columns, (long long)ld);
  layout *x = calloc(1, sizeof *x);
  *x = (layout){.type = type, .rows = (int64_t)rows, .columns = (int64_t)columns, .ld = ld, .batch = 1};
  *made = (cublasLtMatrixLayout_t)x;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t x) { free(x); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t to, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t size)
{
  layout *x = (layout *)to;
  bool count = attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
  CHECK(count || attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, "attribute %d", (int)attribute);
  CHECK(size == (count ? 4 : 8), "attribute %d has %zu bytes", (int)attribute, size);
  memcpy(count ? (void *)&x->batch : (void *)&x->stride, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made)
{
  *made = calloc(1, sizeof(wishes));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t x) { free(x); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t to, cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t size)
{
  wishes *w = (wishes *)to;
  struct { cublasLtMatmulPreferenceAttributes_t attribute; void *to; size_t size; } known[] = {
    {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &w->workspace, 8},
    {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &w->reductions, 4}, {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &w->align[0], 4},
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &w->align[1], 4}, {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &w->align[2], 4},
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &w->align[3], 4}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (known[i].attribute != attribute) continue;
    CHECK(size == known[i].size, "preference %d has %zu bytes", (int)attribute, size);
    memcpy(known[i].to, value, size);
    return CUBLAS_STATUS_SUCCESS;
  }
  check_failed(__FILE__, __LINE__, "known preference", "%d", (int)attribute);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t *results, int *found)
{
  (void)handle, (void)a, (void)b, (void)c, (void)d;
  const wishes *w = (const wishes *)preference;
  CHECK(w->workspace > 0 && w->reductions == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, "preferences");
  const product *p = (const product *)desc;
  if (card.no_bias && p->epilogue == CUBLASLT_EPILOGUE_BIAS) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (card.no_epilogue && (p->aux_ld || p->epilogue == CUBLASLT_EPILOGUE_BGRADB)) return CUBLAS_STATUS_NOT_SUPPORTED;
  card.heuristics++;
  *found = card.offered < most ? card.offered : most;
  for (int i = 0; i < *found; i++) {
    results[i] = (cublasLtMatmulHeuristicResult_t){.state = CUBLAS_STATUS_SUCCESS, .workspaceSize = 1024};
    results[i].algo.data[0] = (uint64_t)i;
    for (int k = 0; k < 4; k++) results[i].algo.data[1 + k] = w->align[k];
  }
  return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attribute, void *to,
                                                    size_t size, size_t *written)
{
  int i = (int)algo->data[0];
  uint32_t value = attribute == CUBLASLT_ALGO_CONFIG_ID ? 60u + (uint32_t)i / 2
                 : attribute == CUBLASLT_ALGO_CONFIG_TILE_ID ? 20u + (uint32_t)i % 2
                 : attribute == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME ? (uint32_t)card.reduction[i] : 0;
  size_t own = attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID || attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID ? 2 : 4;
  if (size == own) memcpy(to, &value, own);
  else CHECK(size == 0, "configuration %d has %zu bytes", (int)attribute, size);
  *written = own;
  return CUBLAS_STATUS_SUCCESS;
}

static int dtype_of(cudaDataType_t type)
{
  return type == CUDA_R_32F ? ENG_f32 : type == CUDA_R_64F ? ENG_f64 : type == CUDA_R_16F ? ENG_f16 : type == CUDA_R_16BF ? ENG_bf16
       : type == CUDA_R_8F_E4M3 ? ENG_e4m3 : ENG_e5m2;
}

/// E4M3 and E5M2 as far as the specs use them: normal numbers and zero.
static double fp8_value(uint8_t code, int dtype)
{
  int bits = dtype == ENG_e4m3 ? 3 : 2, bias = dtype == ENG_e4m3 ? 7 : 15;
  int exponent = (code & 0x7F) >> bits, fraction = code & ((1 << bits) - 1);
  if (exponent == 0) return 0;
  double value = 1 + (double)fraction / (1 << bits);
  for (; exponent > bias; exponent--) value *= 2;
  for (; exponent < bias; exponent++) value /= 2;
  return code & 0x80 ? -value : value;
}

/// Element (i, k) of op(X), i along M or N.
static double factor(const void *data, const layout *x, const product *p, int side, int64_t z, int64_t i, int64_t k)
{
  bool rows_are_k = (p->op[side] == CUBLAS_OP_T) == (side == 0);
  int64_t row = rows_are_k ? k : i, column = rows_are_k ? i : k;
  CHECK(row < x->rows && column < x->columns, "an element outside its matrix");
  int64_t at = z * x->stride + column * x->ld + row;
  int dtype = dtype_of(x->type);
  if (dtype < ENG_e4m3) return element_get(data, dtype, at);
  int64_t outer = x->columns, L = (x->rows + 127) / 128;   // as the manual of cuBLAS lays scales out
  const float *scale = p->scale[side];
  switch (p->mode[side]) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F: scale += i; break;
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F: scale += k / 128 * outer + i; break;
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F: scale += i / 128 * ((L + 3) / 4 * 4) + k / 128; break;
    default: break;
  }
  return fp8_value(((const uint8_t *)data)[at], dtype) * (double)*scale;
}

static bool is_gelu(const product *p)
{
  return p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || p->epilogue == CUBLASLT_EPILOGUE_DGELU;
}

/// What a real cublasLtMatmul refuses.
static void check_product(const product *p, const layout *a, const layout *b, const layout *c)
{
  int ta = dtype_of(a->type), tb = dtype_of(b->type), tc = dtype_of(c->type);
  if (ta >= ENG_e4m3) {
    CHECK(tb >= ENG_e4m3 && p->op[0] == CUBLAS_OP_T && p->op[1] == CUBLAS_OP_N, "FP8 takes TN alone");
    CHECK(a->ld % 16 == 0 && b->ld % 16 == 0 && a->rows % 16 == 0 && a->columns % 16 == 0 && b->columns % 16 == 0, "FP8's sizes");
    bool blocks = p->mode[0] >= CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    CHECK(!(blocks && p->fast), "fast sums with blocks");
    CHECK(p->mode[0] != CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F || p->mode[1] != CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, "blocks twice");
    CHECK(tc == ENG_f32 || tc == ENG_f16 || tc == ENG_bf16, "FP8's output");
    return;
  }
  CHECK(ta == tb, "factors of formats %d and %d", ta, tb);
  CHECK((p->compute == CUBLAS_COMPUTE_64F) == (ta == ENG_f64), "sums");
  CHECK(tc == ta || (tc == ENG_f32 && ta != ENG_f64), "output %d of factors %d", tc, ta);
  bool has_bias = p->epilogue == CUBLASLT_EPILOGUE_BIAS || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  if (has_bias) CHECK(dtype_of((cudaDataType_t)p->bias_type) == tc, "the bias's format");
  if (p->epilogue == CUBLASLT_EPILOGUE_BGRADB) CHECK(p->bias && (uintptr_t)p->bias % 16 == 0 && p->bias_type < 0, "column sums, in C's format");
  if (is_gelu(p)) {
    CHECK(p->aux && (uintptr_t)p->aux % 16 == 0 && p->aux_ld % 8 == 0 && p->aux_ld >= c->rows && c->batch == 1, "the matrix beside");
    CHECK(tc == ta && (tc == ENG_f16 || tc == ENG_bf16), "a GELU of format %d", tc);
  }
}

/// What comes after the sum for element (i, j) of D.
static double after(const product *p, int tc, int64_t i, int64_t j, double sum)
{
  bool bias = p->epilogue == CUBLASLT_EPILOGUE_BIAS || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  if (bias) sum += element_get(p->bias, dtype_of((cudaDataType_t)p->bias_type), i);
  if (!is_gelu(p)) return sum;
  if (p->epilogue == CUBLASLT_EPILOGUE_DGELU) return gelu_slope(element_get(p->aux, tc, j * p->aux_ld + i)) * sum;
  element_set(p->aux, tc, j * p->aux_ld + i, sum);
  return gelu_of(sum);
}

/// Sums of B over k, one for each column of D.
static void sum_columns(const product *p, const layout *b, const void *B, int tc, int64_t columns, int64_t inner)
{
  for (int64_t j = 0; j < columns; j++) {
    double sum = 0;
    for (int64_t k = 0; k < inner; k++) sum += factor(B, b, p, 1, 0, j, k);
    element_set(p->bias, tc, j, sum);
  }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *A, cublasLtMatrixLayout_t a_,
                              const void *B, cublasLtMatrixLayout_t b_, const void *beta, const void *C, cublasLtMatrixLayout_t c_, void *D,
                              cublasLtMatrixLayout_t d_, const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_size, cudaStream_t stream)
{
  (void)handle, (void)stream, (void)alpha;
  const product *p = (const product *)desc;
  const layout *a = (const layout *)a_, *b = (const layout *)b_, *c = (const layout *)c_;
  CHECK(C == D && c_ == d_ && workspace && workspace_size > 0, "arguments");
  const void *data[3] = {A, B, C};
  for (int i = 0; i < 3; i++) CHECK((uintptr_t)data[i] % algo->data[1 + i] == 0, "matrix %d is not aligned to %d bytes", i, (int)algo->data[1 + i]);
  check_product(p, a, b, c);
  bool adds = dtype_of(c->type) == ENG_f64 ? *(const double *)beta != 0 : *(const float *)beta != 0;
  bool ta = p->op[0] == CUBLAS_OP_T;
  int64_t inner = ta ? a->rows : a->columns;
  CHECK(c->rows == (ta ? a->columns : a->rows) && a->batch == c->batch && b->batch == c->batch, "shapes");
  card.matmuls++;
  card.last_algorithm = (int)algo->data[0];
  card.last_fast = p->fast;
  running += card.time[algo->data[0]];
  int tc = dtype_of(c->type);
  bool sums = p->epilogue == CUBLASLT_EPILOGUE_BGRADB;
  if (sums) sum_columns(p, b, B, tc, c->columns, inner);
  if (sums || is_gelu(p)) {
    card.epilogues++;
    running += card.epilogue_time;
  }
  for (int64_t z = 0; z < c->batch; z++)
    for (int64_t j = 0; j < c->columns; j++)
      for (int64_t i = 0; i < c->rows; i++) {
        double sum = 0;
        if ((j * c->rows + i) % card.sample != 0) continue;
        for (int64_t k = 0; k < inner; k++) sum += factor(A, a, p, 0, z, i, k) * factor(B, b, p, 1, z, j, k);
        sum = after(p, tc, i, j, sum);
        int64_t at = z * c->stride + j * c->ld + i;
        if (adds) sum += element_get(C, tc, at);
        element_set(D, tc, at, sum);
      }
  return CUBLAS_STATUS_SUCCESS;
}
