// Matrix products through oneDNN 2.6 to 3.x: bf16 on processors with AMX (gemm.c gives the reason).
// oneDNN's scratchpad comes from the scratch arena. Called by gemm.c and cpu.c.
//
// Numerics (see gemm.h, too): AMX multiplies bf16 exactly and sums in f32 with round to nearest
// even. The order of the sums is fixed for one version of oneDNN, one shape and one thread count.
#include "gemm.h"

#include "onednn.h"

#include <omp.h>
#include <string.h>

#if DNNL_VERSION_MAJOR >= 3
#define append_sum(ops) dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef)
#define matmul_create dnnl_matmul_primitive_desc_create
#else
#define append_sum(ops) dnnl_post_ops_append_sum(ops, 1.0f)
static dnnl_status_t matmul_create(dnnl_primitive_desc_t *out, dnnl_engine_t on, layout_view a,
                                   layout_view b, layout_view bias, layout_view c,
                                   const_dnnl_primitive_attr_t attributes)
{
  dnnl_matmul_desc_t product;
  dnnl_status_t status = dnnl_matmul_desc_init(&product, a, b, bias, c);
  return status ? status : dnnl_primitive_desc_create(out, &product, attributes, on, NULL);
}
#endif

enum { LEAST_WORK = 1 << 18 };   // multiply-adds; below this a call costs more than it saves

// The arguments of a product. The key describes the layouts of all except SCRATCHPAD.
enum { A, B, C, BIAS, SCRATCHPAD, ARGUMENTS };
static const int argument[ARGUMENTS] = {
  DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS, DNNL_ARG_SCRATCHPAD};

// Everything that a primitive depends on.
typedef struct key {
  int64_t m, n, k, threads, c_row;
  int64_t a_row, a_column, b_row, b_column;
  int64_t batch[GEMM_BATCH_DIMS], c_batch[GEMM_BATCH_DIMS];
  int64_t a_batch[GEMM_BATCH_DIMS], b_batch[GEMM_BATCH_DIMS];
  int64_t batch_dims, a_dtype, b_dtype, c_dtype, bias_dtype, add;
} key;

bool gemm_onednn_here(void)
{
  static int known = -1;
  const int amx = dnnl_cpu_isa_avx512_core_amx;
  if (known < 0) known = ((int)dnnl_get_effective_cpu_isa() & amx) == amx;
  return known;
}

bool gemm_onednn_prefers(const gemm_call *g)
{
  if (g->a.dtype != ENG_bf16 || g->b.dtype != ENG_bf16 || !gemm_onednn_here()) return false;
  return (double)g->m * (double)g->n * (double)g->k >= LEAST_WORK;
}

static int format_of(int dtype)
{ return dtype == ENG_f16 ? dnnl_data_type_undef : onednn_format(dtype); }

// Returns whether oneDNN accepts the matrix: one dimension must have stride 1, and the other
// dimension's stride must be at least the size of the dimension with stride 1.
static bool plain(const gemm_operand *o, int64_t rows, int64_t columns)
{ return (o->column == 1 && o->row >= columns) || (o->row == 1 && o->column >= rows); }

static bool describable(const gemm_call *g)
{
  if (g->k == 0 || g->m == 0 || g->n == 0) return false;
  if (!plain(&g->a, g->m, g->k) || !plain(&g->b, g->k, g->n)) return false;
  for (int d = 0; d < g->batch_dims; d++)
    if (g->batch[d] == 0) return false;
  return format_of(g->c_dtype) != dnnl_data_type_undef &&
         (!g->bias || format_of(g->bias_dtype) != dnnl_data_type_undef);
}

static key key_of(const gemm_call *g)
{
  key k;
  memset(&k, 0, sizeof k);
  k.m = g->m, k.n = g->n, k.k = g->k, k.threads = omp_get_max_threads(), k.c_row = g->c_row;
  k.a_row = g->a.row, k.a_column = g->a.column, k.b_row = g->b.row, k.b_column = g->b.column;
  k.batch_dims = g->batch_dims;
  for (int d = 0; d < g->batch_dims; d++) {
    k.batch[d] = g->batch[d];
    k.a_batch[d] = g->a.batch[d];
    k.b_batch[d] = g->b.batch[d];
    k.c_batch[d] = g->c_batch[d];
  }
  k.a_dtype = g->a.dtype, k.b_dtype = g->b.dtype, k.c_dtype = g->c_dtype;
  k.bias_dtype = g->bias ? g->bias_dtype : -1;
  k.add = g->add;
  return k;
}

// Describes the layout of a matrix [batch.. x rows x columns]. A batch dimension that is broadcast
// gets size 1.
static dnnl_status_t describe(dnnl_memory_desc_t *l, const key *k, const int64_t *batch_stride,
                              bool broadcast, int64_t rows, int64_t columns, int64_t row,
                              int64_t column, int64_t dtype)
{
  dnnl_dims_t size, stride;
  int n = (int)k->batch_dims;
  for (int d = 0; d < n; d++) {
    bool one = broadcast && batch_stride[d] == 0;
    size[d] = one ? 1 : k->batch[d];
    stride[d] = one ? rows * columns : batch_stride[d];
  }
  size[n] = rows, stride[n] = row;
  size[n + 1] = columns, stride[n + 1] = column;
  return layout_create(l, n + 2, size, (dnnl_data_type_t)format_of((int)dtype), stride);
}

static dnnl_status_t describe_all(dnnl_memory_desc_t *l, const key *k)
{
  const int64_t none[GEMM_BATCH_DIMS] = {0};
  dnnl_status_t status =
    describe(&l[A], k, k->a_batch, true, k->m, k->k, k->a_row, k->a_column, k->a_dtype);
  if (status == dnnl_success)
    status = describe(&l[B], k, k->b_batch, true, k->k, k->n, k->b_row, k->b_column, k->b_dtype);
  if (status == dnnl_success)
    status = describe(&l[C], k, k->c_batch, false, k->m, k->n, k->c_row, 1, k->c_dtype);
  if (status == dnnl_success && k->bias_dtype >= 0)
    status = describe(&l[BIAS], k, none, true, 1, k->n, k->n, 1, k->bias_dtype);
  return status;
}

// Creates the primitive descriptor of the product. If k->add, the product is added to C. The caller
// of an execution provides its scratchpad.
static dnnl_status_t describe_product(dnnl_primitive_desc_t *out, const dnnl_memory_desc_t *l,
                                      const key *k)
{
  dnnl_primitive_attr_t attributes;
  dnnl_post_ops_t after = NULL;
  dnnl_status_t status = onednn_attributes(&attributes);
  if (status != dnnl_success) return status;
  if (k->add) {
    status = dnnl_post_ops_create(&after);
    if (status == dnnl_success) status = append_sum(after);
    if (status == dnnl_success) status = dnnl_primitive_attr_set_post_ops(attributes, after);
  }
  if (status == dnnl_success)
    status = matmul_create(out, onednn_engine, view(&l[A]), view(&l[B]),
                           k->bias_dtype >= 0 ? view(&l[BIAS]) : NULL, view(&l[C]), attributes);
  if (after) dnnl_post_ops_destroy(after);
  dnnl_primitive_attr_destroy(attributes);
  return status;
}

static dnnl_status_t fill(onednn_entry *e, const dnnl_memory_desc_t *l, const key *k,
                          const_dnnl_primitive_desc_t product)
{
  layout_view scratch = dnnl_primitive_desc_query_md(product, dnnl_query_scratchpad_md, 0);
  e->bytes[SCRATCHPAD] = (int64_t)dnnl_memory_desc_get_size(scratch);
  dnnl_status_t status = dnnl_success;
  for (int i = 0; i < ARGUMENTS && status == dnnl_success; i++)
    if (i != BIAS || k->bias_dtype >= 0)
      status = dnnl_memory_create(&e->memory[i], i == SCRATCHPAD ? scratch : view(&l[i]),
                                  onednn_engine, DNNL_MEMORY_NONE);
  return status == dnnl_success ? dnnl_primitive_create(&e->primitive[0], product) : status;
}

static eng_status build(onednn_entry *e, const key *k)
{
  ENG_TRY(onednn_open());
  dnnl_memory_desc_t l[SCRATCHPAD];
  memset(l, 0, sizeof l);
  onednn_take(e, k, sizeof *k);
  dnnl_primitive_desc_t product = NULL;
  dnnl_status_t status = describe_all(l, k);
  if (status == dnnl_success) status = describe_product(&product, l, k);
  if (status == dnnl_success) status = fill(e, l, k, product);
  if (product) dnnl_primitive_desc_destroy(product);
  e->refused = status != dnnl_success;
  for (int i = 0; i < SCRATCHPAD; i++) layout_destroy(&l[i]);
  return ENG_OK;
}

static eng_status execute(const onednn_entry *e, const gemm_call *g, void *scratch)
{
  void *data[ARGUMENTS] = {(void *)g->a.data, (void *)g->b.data, g->c, (void *)g->bias, scratch};
  dnnl_exec_arg_t arguments[ARGUMENTS];
  int n = 0;
  for (int i = 0; i < ARGUMENTS; i++) {
    if (!e->memory[i]) continue;
    DNNL_TRY("setting an argument of the product",
             dnnl_memory_set_data_handle(e->memory[i], data[i]));
    arguments[n++] = (dnnl_exec_arg_t){argument[i], e->memory[i]};
  }
  DNNL_TRY("running the product",
           dnnl_primitive_execute(e->primitive[0], onednn_stream, n, arguments));
  DNNL_TRY("waiting for the product", dnnl_stream_wait(onednn_stream));
  return ENG_OK;
}

eng_status gemm_onednn(bool *done, const gemm_call *g)
{
  *done = false;
  if (!describable(g)) return ENG_OK;
  key k = key_of(g);
  onednn_entry *e = onednn_find(&k, sizeof k);
  if (!e->taken) ENG_TRY(build(e, &k));
  if (e->refused) return ENG_OK;
  SCRATCH(char, room, e->bytes[SCRATCHPAD]);
  ENG_TRY(execute(e, g, room));
  *done = true;
  return ENG_OK;
}
