// Tests the host logic of the CUDA device's products against a fake card (card.h): layouts from
// strides, choices of algorithms and their file. FP8's part is gemm_fp8_host.c. Called by
// spec/cuda/gemm_spec.lua with a part's name and a folder.
#include "gemm_host.h"

#include "gemm/gemm_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

op_kernel cuda_matmul, cuda_linear, cuda_mlp_gelu, cuda_matmul_gelu_grad, cuda_linear_grad;

static uint64_t random_state = 88172645463325252u;
int64_t random_below(int64_t n)
{
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (int64_t)(random_state >> 11) % n;
}

// ------------------------------------------------------------------ tensors

static void *pieces[64];
static int piece_count;

void *piece(int64_t bytes)
{
  return pieces[piece_count++] = aligned_alloc(256, (size_t)(bytes + 255) / 256 * 256);
}

void forget_tensors(void)
{
  while (piece_count > 0) free(pieces[--piece_count]);
}

tensor make(int dtype, int ndim, const int64_t *shape, int layout, bool spread)
{
  tensor x = {.dtype = dtype, .ndim = ndim, .count = 1};
  int order[ENG_MAX_DIMS];
  for (int d = 0; d < ndim; d++) order[d] = d;
  if (layout == 1 && ndim > 1) order[ndim - 1] = ndim - 2, order[ndim - 2] = ndim - 1;
  if (layout == 4)
    for (int d = 0; d < ndim; d++) order[d] = (d + 1) % ndim;
  int64_t step = layout == 2 ? 2 : 1;
  for (int k = ndim - 1; k >= 0; k--) {
    int d = order[k];
    x.shape[d] = shape[d];
    x.stride[d] = step;
    x.count *= shape[d];
    step *= shape[d];
    if (layout == 3 && k == ndim - 1) step += 3;
  }
  if (spread && ndim > 2) x.stride[0] = 0;
  int64_t elements = step + 64;
  char *memory = piece(elements * 8);
  for (int64_t i = 0; i < elements; i++)
    element_set(memory, dtype, i, (double)(random_below(7) - 3));
  x.data = memory + (layout == 5 ? eng_dtype_size(dtype) : 0);
  return x;
}

int64_t place(const tensor *x, int64_t index)
{
  int64_t at = 0;
  for (int d = x->ndim - 1; d >= 0; d--) {
    at += index % x->shape[d] * x->stride[d];
    index /= x->shape[d];
  }
  return at;
}

/// Computes the product into `want` (row-major), element by element from the definition in ops.def.
static void expect(double *want, const op_call *call)
{
  const tensor *a = call->in[0], *b = call->in[1], *y = call->out[0], *bias = call->in[2];
  bool linear = call->op == ENG_OP_linear, ta = !linear && call->matmul.transpose_a,
       tb = linear || call->matmul.transpose_b, adds = !linear && call->matmul.add;
  int64_t inner = a->shape[a->ndim - (ta ? 2 : 1)];
  for (int64_t i = 0; i < y->count; i += card.sample) {
    int64_t index[ENG_MAX_DIMS], rest = i;
    for (int d = y->ndim - 1; d >= 0; d--) {
      index[d] = rest % y->shape[d];
      rest /= y->shape[d];
    }
    int64_t at[2] = {0, 0};
    const tensor *side[2] = {a, b};
    for (int s = 0; s < 2; s++)
      for (int d = 0; d < side[s]->ndim - 2 || (linear && s == 0 && d < a->ndim - 1); d++) {
        int yd = d + (linear && s == 0 ? 0 : y->ndim - side[s]->ndim);
        if (side[s]->shape[d] != 1) at[s] += index[yd] * side[s]->stride[d];
      }
    int64_t row = y->ndim > 1 ? index[y->ndim - 2] : 0, column = index[y->ndim - 1];
    if (!linear) at[0] += row * a->stride[a->ndim - (ta ? 1 : 2)];
    at[1] += column * b->stride[b->ndim - (tb ? 2 : 1)];
    int64_t step_a = a->stride[a->ndim - (ta ? 2 : 1)], step_b = b->stride[b->ndim - (tb ? 1 : 2)];
    double sum = bias ? element_get(bias->data, bias->dtype, place(bias, column)) : 0;
    for (int64_t k = 0; k < inner; k++)
      sum += element_get(a->data, a->dtype, at[0] + k * step_a) *
             element_get(b->data, b->dtype, at[1] + k * step_b);
    want[i] = sum + (adds ? element_get(y->data, y->dtype, place(y, i)) : 0);
  }
}

static void try_call(op_call *call, const char *what)
{
  tensor *y = call->out[0];
  double *want = calloc((size_t)y->count, sizeof *want);
  expect(want, call);
  card.error[0] = 0;
  eng_status status = (call->op == ENG_OP_linear ? cuda_linear : cuda_matmul)(call);
  CHECK(status == ENG_OK, "%s: %s", what, card.error);
  CHECK(card.scratch_bytes == 0, "%s: %ld bytes of scratch leaked", what, card.scratch_bytes);
  for (int64_t i = 0; i < y->count; i += card.sample) {
    double got = element_get(y->data, y->dtype, place(y, i));
    CHECK(got == want[i], "%s: element %lld is %g, expected %g", what, (long long)i, got, want[i]);
  }
  free(want);
  forget_tensors();
}

// ------------------------------------------------------------------ matmul and linear

static const int FLOATS[] = {ENG_f32, ENG_f64, ENG_f16, ENG_bf16};

static void random_matmul(int number)
{
  int64_t m = 1 + random_below(6), n = 1 + random_below(6), k = random_below(8);
  int batch_dims = (int)random_below(4), ta = (int)random_below(2), tb = (int)random_below(2);
  int64_t batch[4], shape_a[6], shape_b[6], shape_y[6];
  int a_dims = (int)random_below(batch_dims + 1), b_dims = (int)random_below(batch_dims + 1);
  if (random_below(2)) a_dims = batch_dims;
  else b_dims = batch_dims;
  for (int d = 0; d < batch_dims; d++) batch[d] = 1 + random_below(3);
  for (int d = 0; d < batch_dims; d++) {
    bool in_a = d >= batch_dims - a_dims, in_b = d >= batch_dims - b_dims;
    int64_t of_a = in_a && !(in_b && random_below(4) == 0) ? batch[d] : 1;
    if (in_a) shape_a[d - (batch_dims - a_dims)] = of_a;
    int64_t of_b = in_b && !(of_a == batch[d] && random_below(4) == 0) ? batch[d] : 1;
    if (in_b) shape_b[d - (batch_dims - b_dims)] = of_b;
    shape_y[d] = of_a > of_b ? of_a : of_b;
  }
  shape_a[a_dims] = ta ? k : m, shape_a[a_dims + 1] = ta ? m : k;
  shape_b[b_dims] = tb ? n : k, shape_b[b_dims + 1] = tb ? k : n;
  shape_y[batch_dims] = m, shape_y[batch_dims + 1] = n;
  int dtype_a = FLOATS[random_below(4)],
      dtype_b = random_below(3) ? dtype_a : FLOATS[random_below(4)];
  int dtype_y = random_below(3) ? dtype_a : FLOATS[random_below(4)];
  tensor a = make(dtype_a, a_dims + 2, shape_a, (int)random_below(6), random_below(4) == 0);
  tensor b = make(dtype_b, b_dims + 2, shape_b, (int)random_below(6), random_below(4) == 0);
  bool accumulate = random_below(3) == 0;
  tensor y = make(dtype_y, batch_dims + 2, shape_y, accumulate ? (int)random_below(6) : 0, false);
  // NaN: must not be read
  if (!accumulate) memset(y.data, 0xFF, (size_t)y.count * (size_t)eng_dtype_size(dtype_y));
  op_call call = {.op = ENG_OP_matmul,
                  .n_in = 2,
                  .n_out = 1,
                  .in = {&a, &b},
                  .out = {&y},
                  .matmul = {.transpose_a = ta, .transpose_b = tb, .add = accumulate}};
  char what[64];
  snprintf(what, sizeof what, "matmul %d", number);
  try_call(&call, what);
}

static void random_linear(int number)
{
  int64_t k = random_below(9), n = 1 + random_below(9), shape_x[3], shape_w[2] = {n, k}, shape_y[3],
          batch = 1;
  int ndim = 1 + (int)random_below(3);
  for (int d = 0; d < ndim; d++) shape_x[d] = shape_y[d] = 1 + random_below(4);
  shape_x[ndim - 1] = k, shape_y[ndim - 1] = n;
  for (int d = 0; d < ndim - 1; d++) batch *= shape_x[d];
  int dtype = FLOATS[random_below(4)], other = random_below(4) ? dtype : FLOATS[random_below(4)];
  int bias_dtype = random_below(3) ? other : FLOATS[random_below(4)];
  tensor x = make(dtype, ndim, shape_x, 0, false), w = make(other, 2, shape_w, 0, false),
         y = make(bias_dtype, ndim, shape_y, 0, false);
  tensor bias = make(bias_dtype, 1, &n, random_below(3) ? 0 : 5, false);
  op_call call = {.op = ENG_OP_linear,
                  .n_in = 3,
                  .n_out = 1,
                  .in = {&x, &w, random_below(3) ? &bias : NULL},
                  .out = {&y}};
  char what[64];
  snprintf(what, sizeof what, "linear %d of %lld rows", number, (long long)batch);
  try_call(&call, what);
}

static void products(void)
{
  card.offered = 4;
  for (int i = 0; i < 20000; i++) random_matmul(i);
  for (int i = 0; i < 4000; i++) random_linear(i);
  int through = card.matmuls, plain = card.plain;
  CHECK(through > 15000 && card.finished > 500,
        "%d products went through cuBLASLt, %d through gemm_plain", through, plain);

  // The rows of all batches of x become rows of one product.
  int64_t shape_x[] = {3, 5, 8}, shape_w[] = {8, 4}, shape_y[] = {3, 5, 4};
  tensor x = make(ENG_bf16, 3, shape_x, 0, false), w = make(ENG_bf16, 2, shape_w, 0, false),
         y = make(ENG_bf16, 3, shape_y, 0, false);
  op_call call = {.op = ENG_OP_matmul, .n_in = 2, .n_out = 1, .in = {&x, &w}, .out = {&y}};
  card.matmuls = card.plain = 0;
  try_call(&call, "rows of a batch");
  CHECK(card.matmuls == 1 && card.plain == 0, "%d launches", card.matmuls);

  // A product without an algorithm in cuBLASLt is computed by gemm_plain; cuBLASLt is asked only
  // once.
  card.offered = 0;
  card.heuristics = card.plain = 0;
  for (int i = 0; i < 2; i++) {
    int64_t a_shape[] = {7, 11}, b_shape[] = {11, 13}, c_shape[] = {7, 13};
    tensor a = make(ENG_f16, 2, a_shape, 0, false), b = make(ENG_f16, 2, b_shape, 0, false),
           c = make(ENG_f16, 2, c_shape, 0, false);
    op_call refused = {.op = ENG_OP_matmul,
                       .n_in = 2,
                       .n_out = 1,
                       .in = {&a, &b},
                       .out = {&c},
                       .matmul = {.add = 1}};
    try_call(&refused, "refused by cuBLASLt");
  }
  CHECK(card.heuristics == 1 && card.plain == 2, "%d heuristics, %d plain", card.heuristics,
        card.plain);
}

/// If cuBLASLt refuses a batch midway, gemm_plain computes the rest, and no product is added twice.
static void refused_late(void)
{
  card.offered = 4;
  int finished = 0;
  for (int i = 0; i < 6000; i++) {
    int before = card.matmuls, plain = card.plain;
    card.refused = 2 + (int)random_below(3);
    random_matmul(i);
    finished += card.matmuls > before && card.plain > plain;
  }
  CHECK(finished > 30, "%d were refused midway", finished);
}

/// A bias that cuBLASLt does not add is added after the product.
static void bias_apart(void)
{
  card.offered = 4;
  card.no_bias = true;
  for (int i = 0; i < 200; i++) random_linear(i);
  // gemm_plain computes the products with K = 0
  CHECK(card.plain < 60 && card.finished > 60, "%d by gemm_plain, %d finished", card.plain,
        card.finished);
}

// ------------------------------------------------------------------ fused operations

/// Element `at` of x is `want`, within a rounding or two of x's format at the magnitude `size`.
static void expect_near(const tensor *x, int64_t at, double want, double size, const char *what,
                        int number)
{
  double unit = x->dtype == ENG_bf16 ? 0x1p-7 :
                x->dtype == ENG_f16  ? 0x1p-10 :
                x->dtype == ENG_f32  ? 0x1p-20 :
                                       0x1p-40;
  double got = element_get(x->data, x->dtype, at), off = got > want ? got - want : want - got;
  CHECK(off <= unit * (size + 1), "%s %d: element %lld is %g, expected %g", what, number,
        (long long)at, got, want);
}

static tensor make_rows(int dtype, int64_t rows, int64_t columns)
{ return make(dtype, 2, (int64_t[]){rows, columns}, 0, false); }

static double at_row(const tensor *x, int64_t row, int64_t column)
{ return element_get(x->data, x->dtype, row * x->shape[1] + column); }

static void run_one(eng_status (*kernel)(const op_call *), const op_call *call, const char *what)
{
  card.error[0] = 0;
  card.epilogues = card.passes = 0;
  CHECK(kernel(call) == ENG_OK && card.scratch_bytes == 0, "%s: %s", what, card.error);
}

static bool is_low(int dtype) { return dtype == ENG_f16 || dtype == ENG_bf16; }

static void random_mlp_gelu(int number)
{
  int64_t rows = 1 + random_below(9), width = random_below(2) ? 8 : random_below(12),
          hidden = random_below(3) ? 8 * (1 + random_below(3)) : random_below(20),
          out = random_below(9);
  int dtype = FLOATS[random_below(4)];
  tensor x = make_rows(dtype, rows, width), up = make_rows(dtype, hidden, width),
         down = make_rows(dtype, out, hidden);
  tensor b1 = make(dtype, 1, &hidden, random_below(3) ? 0 : 5, false),
         b2 = make(dtype, 1, &out, 0, false);
  tensor y = make_rows(dtype, rows, out), u = make_rows(dtype, rows, hidden),
         h = make_rows(dtype, rows, hidden);
  bool first = random_below(3), second = random_below(2);
  op_call call = {.op = ENG_OP_mlp_gelu,
                  .n_in = 5,
                  .n_out = 3,
                  .in = {&x, &up, first ? &b1 : NULL, &down, second ? &b2 : NULL},
                  .out = {&y, &u, &h}};
  run_one(cuda_mlp_gelu, &call, "mlp_gelu");
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < hidden; j++) {
      double sum = first ? element_get(b1.data, dtype, j) : 0;
      for (int64_t k = 0; k < width; k++) sum += at_row(&x, i, k) * at_row(&up, j, k);
      // small integers: exact
      expect_near(&u, i * hidden + j, sum, 0, "u of mlp_gelu", number);
      expect_near(&h, i * hidden + j, gelu_of(sum), sum < 0 ? -sum : sum, "h of mlp_gelu", number);
    }
    for (int64_t j = 0; j < out; j++) {
      double sum = second ? element_get(b2.data, dtype, j) : 0, size = 0;
      for (int64_t k = 0; k < hidden; k++) {
        double term = at_row(&h, i, k) * at_row(&down, j, k);
        sum += term;
        size += term < 0 ? -term : term;
      }
      expect_near(&y, i * out + j, sum, size, "y of mlp_gelu", number);
    }
  }
  bool one = is_low(dtype) && hidden % 8 == 0 && hidden > 0 && width % 8 == 0 && width > 0 &&
             (!first || (uintptr_t)b1.data % 16 == 0) && !card.no_epilogue;
  CHECK(card.epilogues == one && card.passes == (hidden > 0 && !one),
        "mlp_gelu %d: %d epilogues, %d passes", number, card.epilogues, card.passes);
  forget_tensors();
}

static void random_gelu_grad(int number)
{
  int64_t rows = 1 + random_below(9),
          hidden = random_below(3) ? 8 * (1 + random_below(3)) : 1 + random_below(20),
          out = random_below(2) ? 8 : random_below(12);
  int dtype = FLOATS[random_below(4)], factors = random_below(4) ? dtype : FLOATS[random_below(4)];
  tensor dy = make_rows(factors, rows, out), w = make_rows(factors, out, hidden),
         u = make_rows(dtype, rows, hidden), du = make_rows(dtype, rows, hidden);
  op_call call = {
    .op = ENG_OP_matmul_gelu_grad, .n_in = 3, .n_out = 1, .in = {&dy, &w, &u}, .out = {&du}};
  run_one(cuda_matmul_gelu_grad, &call, "matmul_gelu_grad");
  for (int64_t i = 0; i < rows * hidden; i++) {
    double sum = 0, slope = gelu_slope(element_get(u.data, dtype, i));
    for (int64_t k = 0; k < out; k++) sum += at_row(&dy, i / hidden, k) * at_row(&w, k, i % hidden);
    expect_near(&du, i, slope * sum, sum < 0 ? -sum : sum, "matmul_gelu_grad", number);
  }
  bool one = is_low(dtype) && factors == dtype && hidden % 8 == 0 && out % 8 == 0 && out > 0 &&
             !card.no_epilogue;
  CHECK(card.epilogues == one && card.passes == !one,
        "matmul_gelu_grad %d: %d epilogues, %d passes", number, card.epilogues, card.passes);
  forget_tensors();
}

static void random_linear_grad(int number)
{
  int64_t rows = 2 + random_below(9), n = 1 + random_below(9), k = random_below(9);
  int dtype = FLOATS[random_below(4)], format = is_low(dtype) && random_below(3) ? ENG_f32 : dtype;
  bool add_w = random_below(2), add_b = random_below(2), late = random_below(4) == 0;
  tensor dy = make_rows(dtype, rows, n), x = make_rows(dtype, rows, k),
         dw = make_rows(format, n, k), db = make(format, 1, &n, late ? 5 : 0, false);
  double *want_w = calloc((size_t)(n * k + 1), sizeof *want_w),
         *want_b = calloc((size_t)n, sizeof *want_b);
  for (int64_t i = 0; i < n; i++) {
    for (int64_t r = 0; r < rows; r++) want_b[i] += at_row(&dy, r, i);
    if (add_b) want_b[i] += element_get(db.data, format, i);
    for (int64_t j = 0; j < k; j++) {
      for (int64_t r = 0; r < rows; r++) want_w[i * k + j] += at_row(&dy, r, i) * at_row(&x, r, j);
      if (add_w) want_w[i * k + j] += at_row(&dw, i, j);
    }
  }
  op_call call = {.op = ENG_OP_linear_grad,
                  .n_in = 2,
                  .n_out = 2,
                  .in = {&dy, &x},
                  .out = {&dw, &db},
                  .linear_grad = {.dtype = {format, format}, .add = {add_w, add_b}}};
  run_one(cuda_linear_grad, &call, "linear_grad");
  for (int64_t i = 0; i < n * k; i++)
    expect_near(&dw, i, want_w[i], 0, "dW of linear_grad", number);
  for (int64_t i = 0; i < n; i++) expect_near(&db, i, want_b[i], 0, "db of linear_grad", number);
  bool one = is_low(dtype) && format == ENG_f32 && k > 0 && !card.no_epilogue;
  CHECK(card.epilogues == one && card.passes == !one, "linear_grad %d: %d epilogues, %d passes",
        number, card.epilogues, card.passes);
  free(want_w);
  free(want_b);
  forget_tensors();
}

static void random_fused(int count)
{
  for (int i = 0; i < count; i++) {
    random_mlp_gelu(i);
    random_gelu_grad(i);
    random_linear_grad(i);
  }
}

/// Runs linear_grad at a size worth a search; returns whether the column sums were fused with the
/// product.
static bool sums_come_along(int64_t k)
{
  card.sample = 1024;
  tensor dy = make_rows(ENG_bf16, k, 64), x = make_rows(ENG_bf16, k, 64),
         dw = make_rows(ENG_f32, 64, 64), db = make(ENG_f32, 1, &x.shape[1], 0, false);
  op_call call = {.op = ENG_OP_linear_grad,
                  .n_in = 2,
                  .n_out = 2,
                  .in = {&dy, &x},
                  .out = {&dw, &db},
                  .linear_grad = {.dtype = {ENG_f32, ENG_f32}}};
  run_one(cuda_linear_grad, &call, "a linear_grad worth a search");
  for (int64_t j = 0; j < 64; j++) {
    double sum = 0;
    for (int64_t r = 0; r < k; r++) sum += at_row(&dy, r, j);
    expect_near(&db, j, sum, 0, "db after a search", (int)j);
  }
  forget_tensors();
  return card.passes == 0;
}

static void fused(void)
{
  card.offered = 4;
  random_fused(2000);
}

/// What cuBLASLt does not support runs separately, whether fusing is on or off.
static void fused_refused(void)
{
  card.offered = 4;
  card.no_epilogue = true;
  random_fused(500);
}

/// An epilogue runs as a separate kernel if fusing it is slower; it is timed once.
static void fused_search(void)
{
  enum { K = 16384 };
  card.offered = 4;
  card.epilogue_time = 0.001f;
  CHECK(sums_come_along(K) && card.synchronizations > 0,
        "the column sums run separately, although that takes longer");
  card.epilogue_time = 0.5f;
  CHECK(!sums_come_along(K + 8), "the column sums are fused, although that takes longer");
  card.synchronizations = 0;
  card.epilogue_time = 0;
  CHECK(!sums_come_along(K + 8) && card.synchronizations == 0, "the choice is not kept");
}

/// The next run finds the choice in the file.
static void fused_again(void)
{
  enum { K = 16384 };
  card.offered = 4;
  card.epilogue_time = 0.2f;
  CHECK(sums_come_along(K) && card.synchronizations == 0, "timed again");
  CHECK(!sums_come_along(K + 8) && card.synchronizations == 0, "timed again");
}

// ------------------------------------------------------------------ choices

/// y += a b at a size worth a search; returns its algorithm.
static int search_one(int64_t k)
{
  card.sample = 1024;
  int64_t a_shape[] = {64, k}, b_shape[] = {k, 64}, c_shape[] = {64, 64};
  tensor a = make(ENG_f32, 2, a_shape, 0, false), b = make(ENG_f32, 2, b_shape, 0, false),
         c = make(ENG_f32, 2, c_shape, 0, false);
  op_call call = {
    .op = ENG_OP_matmul, .n_in = 2, .n_out = 1, .in = {&a, &b}, .out = {&c}, .matmul = {.add = 1}};
  try_call(&call, "a product worth a search");   // added once, however often it was timed
  return card.last_algorithm;
}

static void set_times(float first, float second, float third, float fourth)
{
  card.time[0] = first, card.time[1] = second, card.time[2] = third, card.time[3] = fourth;
}

/// First run: searches for the fastest algorithm and keeps it. Algorithm 1 is the fastest, but must
/// not be chosen: its split-K reduction adds partial sums in place, in no fixed order.
static void search_first(void)
{
  enum { K = 16384 };
  card.offered = 4;
  card.reduction[1] = 1;
  set_times(0.5f, 0.1f, 0.3f, 0.2f);
  int first = search_one(K);
  CHECK(first == 3 && card.synchronizations > 0, "algorithm %d", first);
  long kept = card.memory;
  set_times(0.1f, 0.1f, 0.3f, 0.9f);
  card.synchronizations = 0;
  CHECK(search_one(K) == 3 && card.synchronizations == 0, "the choice changed to %d",
        card.last_algorithm);
  set_times(0.202f, 0.1f, 0.2f, 0.3f);   // within 2 % of each other: the first one wins
  CHECK(search_one(K + 1) == 0, "algorithm %d", card.last_algorithm);
  CHECK(card.memory == kept, "%ld pieces of memory leaked", card.memory - kept);
  card.capturing = true;                 // no timing inside a graph
  card.synchronizations = 0;
  set_times(0.5f, 0.5f, 0.1f, 0.5f);
  CHECK(search_one(K + 2) == 0 && card.synchronizations == 0, "algorithm %d", card.last_algorithm);
  card.capturing = false;
  // no memory to time an accumulating product: takes the first
  card.no_memory = true;
  CHECK(search_one(K + 3) == 0, "algorithm %d", card.last_algorithm);
  card.no_memory = false;
  CHECK(search_one(8) == 0, "too small to search: %d", card.last_algorithm);
}

/// Second run: takes the file's choice without timing, although others are faster now.
static void search_again(void)
{
  enum { K = 16384 };
  card.offered = 4;
  card.reduction[1] = 1;
  set_times(0.1f, 0.1f, 0.1f, 0.9f);
  CHECK(search_one(K) == 3 && card.synchronizations == 0, "algorithm %d", card.last_algorithm);
  CHECK(search_one(K + 1) == 0 && card.synchronizations == 0, "algorithm %d", card.last_algorithm);
}

/// Next run: the file names algorithm 3, which is no longer offered, so it searches again.
static void search_gone(void)
{
  card.offered = 3;
  set_times(0.3f, 0.2f, 0.1f, 0.9f);
  CHECK(search_one(16384) == 2 && card.synchronizations > 0, "algorithm %d", card.last_algorithm);
}

static void search_off(void)
{
  card.offered = 4;
  set_times(0.5f, 0.1f, 0.3f, 0.2f);
  CHECK(search_one(16384) == 0 && card.synchronizations == 0, "algorithm %d", card.last_algorithm);
  CHECK(gemm_cache_path()[0] == 0, "expected no cache file, got %s", gemm_cache_path());
}

/// Workspaces: no launch takes more than is allowed, and when memory is short another algorithm
/// runs.
static void workspaces(void)
{
  enum { C = 64 * 64 /* elements */, SEARCHED = 20480, SMALL = 8 };
  card.offered = 2;
  card.workspace[0] = 16, card.workspace[1] = 4;   // the third and later need none
  set_times(0.1f, 0.2f, 0.1f, 0.1f);
  for (int search = 0; search < 2; search++) {
    int k = search ? SEARCHED : SMALL;
    card.room = 16 * C;
    CHECK(search_one(k) == 0, "algorithm %d", card.last_algorithm);
    card.room = 16 * C - 1;
    CHECK(search_one(k + 1) == 1, "algorithm %d", card.last_algorithm);
    card.room = 4 * C - 1;
    CHECK(search_one(k + 2) == 2, "algorithm %d", card.last_algorithm);
  }
  int64_t shape[] = {64, 64};
  tensor x = make(ENG_f32, 2, shape, 0, false), y = make(ENG_f32, 2, shape, 0, false);
  op_call call = {.op = ENG_OP_matmul, .n_in = 2, .n_out = 1, .in = {&x, &x}, .out = {&y}};
  // No algorithm's workspace fits.
  for (int i = 2; i < CARD_ALGORITHMS; i++) card.workspace[i] = 1;
  card.room = C - 1;
  card.error[0] = 0;
  CHECK(cuda_matmul(&call) == ENG_ERR_MEMORY && strstr(card.error, "out of scratch"), "'%s'",
        card.error);
  card.room = 0;
  CHECK(cuda_matmul(&call) == ENG_OK && card.last_algorithm == 0, "no recovery: %s",
        card.error);
  CHECK(card.scratch_bytes == 0, "%ld bytes of scratch leaked", card.scratch_bytes);
  forget_tensors();
}

/// The next run: the file names an algorithm whose workspace does not fit.
static void workspaces_again(void)
{
  enum { K = 20480 };
  card.offered = 2;
  card.workspace[0] = 16, card.workspace[1] = 4;
  card.room = 4 * 64 * 64;
  CHECK(search_one(K) == 1 && card.synchronizations == 0, "algorithm %d", card.last_algorithm);
}

// ------------------------------------------------------------------ the file

static gemm_problem some_problem(int64_t seed)
{
  gemm_problem p;
  int64_t *field = (int64_t *)&p;
  for (size_t i = 0; i < sizeof p / sizeof *field; i++) field[i] = seed * 1000 + (int64_t)i - 5;
  return p;
}

static void file(const char *folder)
{
  gemm_problem p = some_problem(1), q;
  gemm_choice c = {.rank = 2, .id = 66, .tile = -1, .ns = 123456789012345678}, d;
  char line[GEMM_LINE], text[GEMM_LINE];
  int n = gemm_line_write(line, &p, &c);
  CHECK(n == (int)strlen(line) && gemm_line_read(line, &q, &d), "%s", line);
  CHECK(memcmp(&p, &q, sizeof p) == 0 && memcmp(&c, &d, sizeof c) == 0, "%s", line);
  for (int i = 0; i < n; i++) {   // truncated anywhere, or with any byte changed to another kind
    memcpy(text, line, (size_t)n + 1);
    text[i] = 0;
    CHECK(!gemm_line_read(text, &q, &d), "a line of %d bytes: %s", i, text);
    strcpy(text + i, "\n");
    CHECK(!gemm_line_read(text, &q, &d) || i == n - 1 || (i > n - 20 && line[i] >= '0'),
          "a line of %d bytes: %s", i, text);
    memcpy(text, line, (size_t)n + 1);
    text[i] = '~';
    CHECK(!gemm_line_read(text, &q, &d), "byte %d changed: %s", i, text);
  }
  gemm_problem wide;
  memset(&wide, 0x80, sizeof wide);   // the longest possible line fits
  gemm_choice wide_choice;
  memset(&wide_choice, 0x80, sizeof wide_choice);
  CHECK(gemm_line_write(text, &wide, &wide_choice) < GEMM_LINE - 1, "%zu", strlen(text));
  CHECK(gemm_line_read(text, &q, &d) && memcmp(&q, &wide, sizeof q) == 0, "numbers of 19 digits");
  memcpy(text, line, (size_t)n + 1);
  char *number = strstr(text, " m=") + 3;   // the same line with a number of 30 digits
  memmove(number + 30, number, strlen(number) + 1);
  memset(number, '9', 30);
  CHECK(!gemm_line_read(text, &q, &d), "a number of 30 digits");

  // Choices are saved and found again; damaged lines are skipped; the later of two lines counts.
  char path[4200], home[4100];
  snprintf(home, sizeof home, "%s/deep/er", folder);
  setenv("ENGINE_CACHE", home, 1);
  gemm_cache_open("NVIDIA H200 / x", 130100);
  snprintf(path, sizeof path, "%s/cublaslt-nvidia-h200-x-130100.txt", home);
  CHECK(strcmp(gemm_cache_path(), path) == 0, "%s", gemm_cache_path());
  for (int64_t i = 0; i < 1000; i++) {
    gemm_problem each = some_problem(i);
    gemm_choice made = {.id = i};
    gemm_entry *entry = gemm_cache_entry(&each);
    CHECK(entry && !entry->chosen && gemm_cache_entry(&each) == entry, "entry %lld", (long long)i);
    if (i < 300) CHECK(gemm_cache_keep(entry, &made), "%s", path);
  }
  gemm_cache_clear();
  FILE *out = fopen(path, "ab");
  fputs("choice m=1 n=2", out);
  static const char damage[] = "\0\377\n\n choice\nchoice \n";
  fwrite(damage, 1, sizeof damage - 1, out);
  p = some_problem(7);
  c = (gemm_choice){.id = 4711};
  gemm_line_write(line, &p, &c);
  fputs(line, out);
  fputs("choice m=1", out);   // a process ended here
  fclose(out);
  gemm_cache_open("NVIDIA H200 / x", 130100);
  for (int64_t i = 0; i < 300; i++) {
    gemm_problem each = some_problem(i);
    gemm_entry *entry = gemm_cache_entry(&each);
    CHECK(entry->chosen && entry->choice.id == (i == 7 ? 4711 : i), "entry %lld", (long long)i);
  }
  p = some_problem(5000);
  CHECK(gemm_cache_keep(gemm_cache_entry(&p), &c), "%s", path);
  gemm_cache_clear();
  gemm_cache_open("NVIDIA H200 / x", 130100);
  CHECK(gemm_cache_entry(&p)->chosen, "the line after a truncated one is lost");
  gemm_cache_clear();

  // a pipe without a writer: skipped, not waited for
  snprintf(path, sizeof path, "%s/cublaslt-pipe-1.txt", home);
  CHECK(mkfifo(path, 0600) == 0, "%s", path);
  alarm(20);
  gemm_cache_open("pipe", 1);
  CHECK(!gemm_cache_keep(gemm_cache_entry(&p), &c), "%s", path);
  alarm(0);
  gemm_cache_clear();

  setenv("ENGINE_CACHE", "/proc/nowhere", 1);
  gemm_cache_open("card", 1);
  CHECK(!gemm_cache_keep(gemm_cache_entry(&p), &c) && gemm_cache_entry(&p)->chosen,
        "a folder that cannot be written");
  gemm_cache_clear();
}

int main(int argc, char **argv)
{
  const char *part = argc > 1 ? argv[1] : "", *folder = argc > 2 ? argv[2] : ".";
  card.capability = 90;
  card.sample = 1;
  for (int i = 0; i < CARD_ALGORITHMS; i++) card.time[i] = 1;
  if (strcmp(part, "file") == 0) {
    file(folder);
  } else {
    setenv("ENGINE_CACHE", folder, 1);
    if (strcmp(part, "products") == 0) products();
    else if (strcmp(part, "refused_late") == 0) refused_late();
    else if (strcmp(part, "workspaces") == 0) workspaces();
    else if (strcmp(part, "workspaces_again") == 0) workspaces_again();
    else if (strcmp(part, "bias") == 0) bias_apart();
    else if (strcmp(part, "fused") == 0) fused();
    else if (strcmp(part, "fused_again") == 0) fused_again();
    else if (strcmp(part, "fused_refused") == 0) fused_refused();
    else if (strcmp(part, "fused_search") == 0) fused_search();
    else if (strcmp(part, "search") == 0) search_first();
    else if (strcmp(part, "again") == 0) search_again();
    else if (strcmp(part, "gone") == 0) search_gone();
    else if (strcmp(part, "off") == 0) search_off();
    else if (strcmp(part, "fp8") == 0) fp8_products();
    else if (strcmp(part, "fp8_matmul") == 0) fp8_matmuls();
    else return 2;
  }
  printf("ok\n");
  return 0;
}
