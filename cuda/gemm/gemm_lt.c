// Products through cuBLASLt. A problem (shape, formats, layout, alignment, epilogue: gemm_problem)
// is prepared once: its descriptors are created and an algorithm is chosen. After that a call costs
// a table look-up and the launch.
//
// Choosing an algorithm: when a problem first occurs, cuBLASLt's heuristic suggests up to
// CANDIDATES algorithms. Those that keep the guarantees below are the candidates. If the file
// (gemm_cache.h) names a candidate, it is used. Otherwise all candidates are timed on the current
// operands. The fastest is stored in memory and in the file, so that later runs use the same
// algorithm. There is no timing with ENGINE_CUBLASLT_SEARCH=0 (which also ignores the file), for
// products too small to matter, and while the stream is being captured into a graph. Then this
// process uses the first candidate for the problem, in later calls too.
//
// Guarantees: sums in f32 (f64 for f64; gemm_codes.h for FP8) to the end; one rounding into C; f32
// operands unrounded unless ENGINE_TF32=1; and the same bits whenever the same algorithm runs. Of
// the ways to split a sum over k, only one is allowed: partial sums stay in the workspace in the
// sum's own format, and a separate step adds them. Another algorithm may give other bits, so the
// file (or ENGINE_CUBLASLT_SEARCH=0) fixes the choice.
//
// An algorithm's workspace is scratch memory that is taken for the launch only. If memory is short
// when the algorithm is chosen, one with a smaller workspace is used.
//
// Owns the handle and every problem's plan. Called by gemm.c, gemm_fused.c and
// gemm_codes.c.
#include "gemm_lt.h"

#include "runtime/device.h"
#include "gemm_cache.h"

#include <cublasLt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CANDIDATES = 24 };
// limits on the workspace of an algorithm, in bytes; the smaller limits apply if memory is short
static const int64_t WORKSPACE[] = {64 << 20, 1 << 20, 0};
// number of multiply-adds below which a launch takes longer than the computation
static const double LEAST_WORK = 67108864;

static struct {
  cublasLtHandle_t handle;
  bool  search;
  bool  told;     // already reported that the file cannot be written
} lt;

typedef struct plan {
  cublasLtMatmulDesc_t   product;
  cublasLtMatrixLayout_t a, b, c;
  cublasLtMatmulAlgo_t   algorithm;
  int64_t workspace;      // bytes
  bool refused;           // no algorithm exists
} plan;

static eng_status lt_status(cublasStatus_t status, const char *what, const gemm_problem *problem)
{
  return error_set(ENG_ERR_LIBRARY, "cuBLASLt: %s (%s) in %s%s%s",
                   cublasLtGetStatusString(status), cublasLtGetStatusName(status), what,
                   problem ? ", for the product " : "", problem ? gemm_problem_text(problem) : "");
}

#define LT_TRY(call, problem)                                                        \
  do {                                                                               \
    cublasStatus_t lt_try_ = (call);                                                 \
    if (lt_try_ != CUBLAS_STATUS_SUCCESS) return lt_status(lt_try_, #call, problem); \
  } while (0)

static eng_status open_library(void)
{
  int ordinal;
  struct cudaDeviceProp card;
  CUDA_TRY(cudaGetDevice(&ordinal));
  CUDA_TRY(cudaGetDeviceProperties(&card, ordinal));
  LT_TRY(cublasLtCreate(&lt.handle), NULL);
  lt.search = is_on("ENGINE_CUBLASLT_SEARCH", true);
  char name[300];
  snprintf(name, sizeof name, "%s %d", card.name, card.multiProcessorCount);
  if (lt.search) gemm_cache_open(name, (int64_t)cublasLtGetVersion());
  return ENG_OK;
}

// ------------------------------------------------------------------ descriptors

static cudaDataType_t type_of(int64_t dtype)
{
  switch (dtype) {
    case ENG_f64:   return CUDA_R_64F;
    case ENG_f16:   return CUDA_R_16F;
    case ENG_bf16:  return CUDA_R_16BF;
    case ENG_e4m3: return CUDA_R_8F_E4M3;
    case ENG_e5m2: return CUDA_R_8F_E5M2;
    case ENG_FORMAT_E2M1: return CUDA_R_4F_E2M1;
    default:        return CUDA_R_32F;
  }
}

#define SET(descriptor, attribute, value, problem)                                              \
  LT_TRY(cublasLtMatmulDescSetAttribute(descriptor, CUBLASLT_MATMUL_DESC_##attribute, &(value), \
                                        sizeof(value)),                                         \
         problem)

static eng_status layout_make(cublasLtMatrixLayout_t *layout, const gemm_problem *p, int64_t dtype,
                              int64_t rows, int64_t columns, int64_t ld, int64_t stride)
{
  LT_TRY(cublasLtMatrixLayoutCreate(layout, type_of(dtype), (uint64_t)rows, (uint64_t)columns, ld),
         p);
  if (p->batch == 1) return ENG_OK;
  int32_t count = (int32_t)p->batch;
  LT_TRY(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                          sizeof count),
         p);
  LT_TRY(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                          &stride, sizeof stride),
         p);
  return ENG_OK;
}

/// Returns the epilogue in cuBLASLt's terms. cuBLASLt's D is the transpose of our C, so a bias
/// applies to D's rows. cuBLASLt's B is the transpose of our A, so BGRADB, the sums of B's columns,
/// gives the sums of our A's rows.
static uint32_t epilogue_of(const gemm_problem *p)
{
  switch (p->after) {
  case GEMM_GELU:
    return p->bias >= 0 ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  case GEMM_GELU_GRAD: return CUBLASLT_EPILOGUE_DGELU;
  case GEMM_BIAS_GRAD: return CUBLASLT_EPILOGUE_BGRADB;
  default: return p->bias >= 0 ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

static bool has_matrix_beside(const gemm_problem *p)
{ return p->after == GEMM_GELU || p->after == GEMM_GELU_GRAD; }

/// Whether the operands are NVFP4. If so, alpha and beta are in device memory.
static bool is_nvfp4(const gemm_problem *p)
{ return p->scaling_a == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 + 1; }

static eng_status describe(plan *x, const gemm_problem *p)
{
  bool f64 = p->type_c == ENG_f64;
  LT_TRY(cublasLtMatmulDescCreate(&x->product,
                                  f64     ? CUBLAS_COMPUTE_64F :
                                  p->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 :
                                            CUBLAS_COMPUTE_32F,
                                  f64 ? CUDA_R_64F : CUDA_R_32F),
         p);
  int32_t op_a = p->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
          op_b = p->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  SET(x->product, TRANSA, op_a, p);
  SET(x->product, TRANSB, op_b, p);
  uint32_t epilogue = epilogue_of(p);
  SET(x->product, EPILOGUE, epilogue, p);
  if (p->bias >= 0) {
    int32_t type = type_of(p->bias);
    SET(x->product, BIAS_DATA_TYPE, type, p);
  }
  if (has_matrix_beside(p)) SET(x->product, EPILOGUE_AUX_LD, p->ldc, p);
  if (p->scaling_a || p->scaling_b) {
    int32_t mode_a = (int32_t)p->scaling_a - 1, mode_b = (int32_t)p->scaling_b - 1;
    int8_t fast = p->fast != 0;
    SET(x->product, A_SCALE_MODE, mode_a, p);
    SET(x->product, B_SCALE_MODE, mode_b, p);
    SET(x->product, FAST_ACCUM, fast, p);
  }
  if (is_nvfp4(p)) {
    int32_t where = CUBLASLT_POINTER_MODE_DEVICE;
    SET(x->product, POINTER_MODE, where, p);
  }
  bool ta = p->transpose_a, tb = p->transpose_b;
  ENG_TRY(
    layout_make(&x->a, p, p->type_a, ta ? p->k : p->m, ta ? p->m : p->k, p->lda, p->stride_a));
  ENG_TRY(
    layout_make(&x->b, p, p->type_b, tb ? p->n : p->k, tb ? p->k : p->n, p->ldb, p->stride_b));
  return layout_make(&x->c, p, p->type_c, p->m, p->n, p->ldc, p->stride_c);
}

/// Sets the descriptor's pointers, which change from call to call.
static eng_status point(const plan *x, const gemm_problem *p, const gemm_operands *on)
{
  if (p->bias >= 0) SET(x->product, BIAS_POINTER, on->bias, p);
  if (p->after == GEMM_BIAS_GRAD) SET(x->product, BIAS_POINTER, on->side, p);
  if (has_matrix_beside(p)) SET(x->product, EPILOGUE_AUX_POINTER, on->side, p);
  if (p->scaling_a || p->scaling_b) {
    SET(x->product, A_SCALE_POINTER, on->scale_a, p);
    SET(x->product, B_SCALE_POINTER, on->scale_b, p);
  }
  return ENG_OK;
}

/// Launches the product with a workspace of `bytes`. `answer` receives cuBLASLt's status. Fails
/// with ENG_ERR_MEMORY if the workspace does not fit into memory.
static eng_status launch(cublasStatus_t *answer, const plan *x, const gemm_problem *p,
                         const gemm_operands *on, void *c, const cublasLtMatmulAlgo_t *algorithm,
                         int64_t bytes)
{
  static const float f32[2] = {0, 1};
  static const double f64[2] = {0, 1};
  bool wide = p->type_c == ENG_f64;
  const void *one = wide ? (const void *)&f64[1] : &f32[1],
             *zero = wide ? (const void *)&f64[0] : &f32[0], *beta = p->accumulate ? one : zero;
  if (on->alpha) one = on->alpha, beta = on->alpha + 1;
  void *workspace = scratch_take(bytes);
  if (!workspace) return ENG_ERR_MEMORY;
  *answer = cublasLtMatmul(lt.handle, x->product, one, on->a, x->a, on->b, x->b,
                           beta, c, x->c, c, x->c, algorithm, workspace, (size_t)bytes,
                           cuda_stream());
  scratch_give(workspace, bytes);
  return ENG_OK;
}

static void plan_drop(plan *x)
{
  if (x->product) cublasLtMatmulDescDestroy(x->product);
  if (x->a) cublasLtMatrixLayoutDestroy(x->a);
  if (x->b) cublasLtMatrixLayoutDestroy(x->b);
  if (x->c) cublasLtMatrixLayoutDestroy(x->c);
  free(x);
}

// ------------------------------------------------------------------ choosing

typedef struct candidate {
  cublasLtMatmulAlgo_t algorithm;
  int64_t workspace;      // bytes
  gemm_choice choice;
} candidate;

static int64_t config(const cublasLtMatmulAlgo_t *algorithm,
                      cublasLtMatmulAlgoConfigAttributes_t attribute)
{
  uint8_t bytes[8] = {0};   // zeros for the high bytes of shorter attributes (little endian)
  size_t size = 0;
  if (cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, bytes, 0, &size) !=
        CUBLAS_STATUS_SUCCESS ||
      size > sizeof bytes)
    return -1;
  if (cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, bytes, size, &size) !=
      CUBLAS_STATUS_SUCCESS)
    return -1;
  int64_t value;
  memcpy(&value, bytes, sizeof value);
  return value;
}

static gemm_choice choice_of(const cublasLtMatmulAlgo_t *algorithm, int rank)
{
  return (gemm_choice){
    .rank = rank,
    .id = config(algorithm, CUBLASLT_ALGO_CONFIG_ID),
    .tile = config(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
    .stages = config(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID),
    .split_k = config(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
    .reduction = config(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
    .swizzle = config(algorithm, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
    .custom = config(algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
    .inner = config(algorithm, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
    .cluster = config(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
  };
}

static eng_status preference_make(cublasLtMatmulPreference_t *preference, const gemm_problem *p,
                                  uint64_t workspace)
{
  LT_TRY(cublasLtMatmulPreferenceCreate(preference), p);
#define PREFER(attribute, value)                                                             \
  LT_TRY(cublasLtMatmulPreferenceSetAttribute(*preference, CUBLASLT_MATMUL_PREF_##attribute, \
                                              &(value), sizeof(value)),                      \
         p)
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  uint32_t align_a = (uint32_t)p->align_a, align_b = (uint32_t)p->align_b,
           align_c = (uint32_t)p->align_c;
  PREFER(MAX_WORKSPACE_BYTES, workspace);
  PREFER(REDUCTION_SCHEME_MASK, reductions);
  PREFER(MIN_ALIGNMENT_A_BYTES, align_a);
  PREFER(MIN_ALIGNMENT_B_BYTES, align_b);
  PREFER(MIN_ALIGNMENT_C_BYTES, align_c);
  PREFER(MIN_ALIGNMENT_D_BYTES, align_c);
#undef PREFER
  return ENG_OK;
}

/// Lists the heuristic's algorithms that keep the guarantees at the top of this file and need at
/// most `most` bytes of workspace, best guess first. The list is empty if cuBLASLt does not support
/// the problem.
static eng_status candidates_of(candidate *list, int *n, const plan *x, const gemm_problem *p,
                                int64_t most)
{
  *n = 0;
  cublasLtMatmulHeuristicResult_t results[CANDIDATES];
  cublasLtMatmulPreference_t preference = NULL;
  eng_status status = preference_make(&preference, p, (uint64_t)most);
  int found = 0;
  cublasStatus_t answer = CUBLAS_STATUS_NOT_SUPPORTED;
  if (status == ENG_OK)
    answer = cublasLtMatmulAlgoGetHeuristic(lt.handle, x->product, x->a, x->b, x->c, x->c,
                                            preference, CANDIDATES, results, &found);
  if (preference) cublasLtMatmulPreferenceDestroy(preference);
  ENG_TRY(status);
  if (answer == CUBLAS_STATUS_NOT_SUPPORTED || answer == CUBLAS_STATUS_INVALID_VALUE) return ENG_OK;
  if (answer != CUBLAS_STATUS_SUCCESS) return lt_status(answer, "the heuristic", p);
  for (int i = 0; i < found; i++) {
    gemm_choice choice = choice_of(&results[i].algo, i);
    bool ordered = choice.reduction == CUBLASLT_REDUCTION_SCHEME_NONE ||
                   choice.reduction == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (results[i].state == CUBLAS_STATUS_SUCCESS && results[i].workspaceSize <= (size_t)most &&
        ordered)
      list[(*n)++] = (candidate){results[i].algo, (int64_t)results[i].workspaceSize, choice};
  }
  return ENG_OK;
}

/// Returns the index of the candidate that a choice from the file describes, or -1. If several
/// candidates match, prefers the candidate that has the choice's rank, else the first match.
static int named_candidate(const candidate *list, int n, const gemm_choice *choice)
{
  int found = -1;
  for (int i = n - 1; i >= 0; i--)
    if (gemm_same_algorithm(&list[i].choice, choice) &&
        (found < 0 || list[found].choice.rank != choice->rank))
      found = i;
  return found;
}

/// Measures the time of one launch on the device, in milliseconds. The time is infinite if the
/// algorithm fails or its workspace does not fit into memory.
static eng_status time_candidate(float *milliseconds, const plan *x, const gemm_problem *p,
                                 const gemm_operands *on, void *c, const candidate *which,
                                 cudaEvent_t before, cudaEvent_t after)
{
  *milliseconds = INFINITY;
  float best = INFINITY;
  int launches = 1;
  // Round 0 loads the kernel. Round 1 chooses how many launches (2 to 20) take about 0.2 ms.
  // Rounds 2 and 3 measure.
  for (int round = 0; round < 4; round++) {
    CUDA_TRY(cudaEventRecord(before, cuda_stream()));
    for (int i = 0; i < launches; i++) {
      cublasStatus_t answer;
      if (launch(&answer, x, p, on, c, &which->algorithm, which->workspace) != ENG_OK)
        return ENG_OK;
      if (answer != CUBLAS_STATUS_SUCCESS) return ENG_OK;
    }
    CUDA_TRY(cudaEventRecord(after, cuda_stream()));
    CUDA_TRY(cudaEventSynchronize(after));
    float all = 0;
    CUDA_TRY(cudaEventElapsedTime(&all, before, after));
    float one = all / (float)launches;
    if (round == 1) launches = one > 0.067f ? 3 : one < 0.01f ? 20 : (int)(0.2f / one);
    if (round > 1 && one < best) best = one;
  }
  *milliseconds = best;
  return ENG_OK;
}

/// Returns the number of bytes from the first element of C to the end of its last element.
static int64_t extent(const gemm_problem *p)
{
  return ((p->batch - 1) * p->stride_c + (p->n - 1) * p->ldc + p->m) *
         eng_dtype_size((int)p->type_c);
}

/// Finds the index of the fastest candidate, or -1 if none could be timed. Among candidates within
/// 2 % of the fastest, the first wins.
static eng_status fastest(int *best, const plan *x, const gemm_problem *p, const gemm_operands *on,
                          candidate *list, int n)
{
  *best = -1;
  void *target = on->c;   // timing may overwrite C, unless the product accumulates
  cudaEvent_t before = NULL, after = NULL;
  if (p->accumulate && cudaMalloc(&target, (size_t)extent(p)) != cudaSuccess) {
    cudaGetLastError();   // out of memory: the first candidate is used untimed
    return ENG_OK;
  }
  float time[CANDIDATES], least = INFINITY;
  eng_status status = cuda_status(cudaEventCreate(&before), "cudaEventCreate");
  if (status == ENG_OK) status = cuda_status(cudaEventCreate(&after), "cudaEventCreate");
  if (status == ENG_OK && p->accumulate)
    status = cuda_status(
      cudaMemcpyAsync(target, on->c, (size_t)extent(p), cudaMemcpyDeviceToDevice, cuda_stream()),
      "cudaMemcpyAsync");
  for (int i = 0; i < n && status == ENG_OK; i++) {
    status = time_candidate(&time[i], x, p, on, target, &list[i], before, after);
    if (status == ENG_OK && time[i] < least) least = time[i];
  }
  for (int i = n - 1; i >= 0 && status == ENG_OK; i--) {
    if (!(time[i] <= 1.02f * least) || time[i] == INFINITY) continue;
    list[i].choice.ns = (int64_t)(time[i] * 1e6f);
    *best = i;
  }
  if (before) cudaEventDestroy(before);
  if (after) cudaEventDestroy(after);
  if (target != on->c) {
    cudaStreamSynchronize(cuda_stream());
    cudaFree(target);
  }
  return status;
}

static bool worth_searching(const gemm_problem *p)
{
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  return lt.search && (double)p->m * (double)p->n * (double)p->k * (double)p->batch >= LEAST_WORK &&
         cudaStreamIsCapturing(cuda_stream(), &capture) == cudaSuccess &&
         capture == cudaStreamCaptureStatusNone;
}

/// Prints a warning if cuBLASLt refuses a large product, which is slow without cuBLASLt. Prints
/// nothing for FP8 and microscaled products, because their call fails with an error. Prints nothing
/// for products with an epilogue, because the epilogue then runs as a separate pass.
static void report_refusal(const gemm_problem *p)
{
  if ((double)p->m * (double)p->n * (double)p->k * (double)p->batch < 64 * LEAST_WORK ||
      p->scaling_a || p->after)
    return;
  fprintf(stderr,
          "engine: cuBLASLt %zu has no algorithm for the product %s; it is computed more slowly\n",
          cublasLtGetVersion(), gemm_problem_text(p));
}

static bool has_room(const candidate *c)
{
  void *workspace = scratch_take(c->workspace);
  if (workspace) scratch_give(workspace, c->workspace);
  return workspace != NULL;
}

/// Finds the first candidate whose workspace fits into free memory. If none fits, refills `list`
/// with candidates that need less. Fails with ENG_ERR_MEMORY if even these do not fit.
static eng_status first_with_room(int *found, candidate *list, int n, const plan *x,
                                  const gemm_problem *p)
{
  for (size_t k = 1;; k++) {
    for (*found = 0; *found < n; (*found)++)
      if (has_room(&list[*found])) return ENG_OK;
    // scratch_take has set the error message
    if (k == sizeof WORKSPACE / sizeof *WORKSPACE) return ENG_ERR_MEMORY;
    ENG_TRY(candidates_of(list, &n, x, p, WORKSPACE[k]));
  }
}

static eng_status choose(plan *x, gemm_entry *entry, const gemm_operands *on)
{
  const gemm_problem *p = &entry->problem;
  candidate list[CANDIDATES];
  int n, best = -1;
  ENG_TRY(candidates_of(list, &n, x, p, WORKSPACE[0]));
  x->refused = n == 0;
  if (n == 0) {
    report_refusal(p);
    return ENG_OK;
  }
  if (entry->chosen) best = named_candidate(list, n, &entry->choice);
  if (best < 0 && n > 1 && worth_searching(p)) {
    ENG_TRY(fastest(&best, x, p, on, list, n));
    if (best >= 0 && !gemm_cache_keep(entry, &list[best].choice) && !lt.told) {
      lt.told = true;
      fprintf(stderr,
              "engine: cannot save the algorithms of matrix products to %s; the next run may "
              "choose other algorithms and differ in the last bits; hint: set ENGINE_CACHE to a "
              "folder that can be written, or ENGINE_CUBLASLT_SEARCH=0\n",
              *gemm_cache_path() ? gemm_cache_path()
                                 : "a file: ENGINE_CACHE and HOME are unset, or the file's path "
                                   "has 4096 bytes or more");
    }
  }
  if (best < 0) best = 0;
  if (!has_room(&list[best])) ENG_TRY(first_with_room(&best, list, n, x, p));
  x->algorithm = list[best].algorithm;
  x->workspace = list[best].workspace;
  return ENG_OK;
}

// ------------------------------------------------------------------ running

static eng_status prepare(gemm_entry *entry, const gemm_operands *on)
{
  plan *x = calloc(1, sizeof *x);
  FAIL_IF(!x, ENG_ERR_MEMORY, "cuBLASLt: out of memory on the host for the plan of a product");
  eng_status status = describe(x, &entry->problem);
  if (status == ENG_OK) status = point(x, &entry->problem, on);
  if (status == ENG_OK) status = choose(x, entry, on);
  if (status != ENG_OK) plan_drop(x);
  else entry->plan = x;
  return status;
}

/// Finds or creates the entry of a problem, and its plan.
static eng_status prepared(gemm_entry **found, const gemm_problem *problem, const gemm_operands *on)
{
  if (!lt.handle) ENG_TRY(open_library());
  *found = gemm_cache_entry(problem);
  FAIL_IF(!*found, ENG_ERR_MEMORY, "cuBLASLt: out of memory on the host for the product table");
  return (*found)->plan ? ENG_OK : prepare(*found, on);
}

eng_status gemm_lt_time(int64_t *ns, const gemm_problem *problem, const gemm_operands *on)
{
  gemm_entry *entry;
  ENG_TRY(prepared(&entry, problem, on));
  *ns = ((plan *)entry->plan)->refused ? -1 : entry->chosen ? entry->choice.ns : 0;
  return ENG_OK;
}

eng_status gemm_lt_run(bool *done, const gemm_problem *problem, const gemm_operands *on)
{
  *done = false;
  gemm_entry *entry;
  ENG_TRY(prepared(&entry, problem, on));
  plan *x = entry->plan;
  if (x->refused) return ENG_OK;
  ENG_TRY(point(x, problem, on));
  cublasStatus_t status;
  ENG_TRY(launch(&status, x, problem, on, on->c, &x->algorithm, x->workspace));
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) {
    x->refused = true;
    return ENG_OK;
  }
  if (status != CUBLAS_STATUS_SUCCESS) return lt_status(status, "cublasLtMatmul", problem);
  *done = true;
  return ENG_OK;
}
