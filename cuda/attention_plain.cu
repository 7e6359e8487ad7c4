// Attention in plain arithmetic: f32 and f64 of any width, and what the tensor cores' way does not take. See attention.h.
// A warp takes a row: a query for y and dq, a key for dk and dv.
#include "attention.h"

enum { ROW_WARPS = 4 };   // of a block

/// The row of this warp among `rows`, or -1.
__device__ static inline int64_t own_row(int64_t rows)
{
  int64_t row = (int64_t)blockIdx.x * ROW_WARPS + (threadIdx.x >> 5);
  return row < rows ? row : -1;
}

template <class A> __global__ void __launch_bounds__(32 * ROW_WARPS) plain_forward(const __grid_constant__ attention_problem p, int64_t rows)
{
  int64_t row = own_row(rows), pair = row / p.queries;
  if (row >= 0) forward_row<A, A>(p, (int)(pair / p.heads), (int)(pair % p.heads), (int)(row % p.queries), p.width);
}

template <class A> __global__ void __launch_bounds__(32 * ROW_WARPS) plain_delta(const __grid_constant__ attention_problem p, int64_t rows)
{
  int64_t row = own_row(rows), pair = row / p.queries;
  if (row < 0) return;
  A sum = delta_of_row<A, A>(p, (int)(pair / p.heads), (int)(pair % p.heads), (int)(row % p.queries));
  if ((threadIdx.x & 31) == 0) ((A *)p.delta)[row] = sum;
}

template <class A> __global__ void __launch_bounds__(32 * ROW_WARPS) plain_grad_queries(const __grid_constant__ attention_problem p, int64_t rows)
{
  int64_t row = own_row(rows), pair = row / p.queries;
  if (row >= 0) dq_row<A, A>(p, (int)(pair / p.heads), (int)(pair % p.heads), (int)(row % p.queries), p.width);
}

template <class A> __global__ void __launch_bounds__(32 * ROW_WARPS) plain_grad_keys(const __grid_constant__ attention_problem p, int64_t rows)
{
  int64_t row = own_row(rows), pair = row / p.keys;
  if (row >= 0) dkdv_row<A, A>(p, (int)(pair / p.groups), (int)(pair % p.groups), (int)(row % p.keys), p.width);
}

static eng_status blocks_for(unsigned *blocks, int64_t rows)
{
  int64_t n = (rows + ROW_WARPS - 1) / ROW_WARPS;
  if (n > INT32_MAX) return error_set(ENG_ERR_SHAPE, "attention: %lld rows are more than a launch takes; hint: a smaller batch", (long long)rows);
  *blocks = (unsigned)n;
  return ENG_OK;
}

template <class A> static eng_status forward(const attention_problem *p)
{
  int64_t rows = (int64_t)p->batch * p->heads * p->queries;
  unsigned blocks = 0;
  ENG_TRY(blocks_for(&blocks, rows));
  if (blocks == 0) return ENG_OK;
  plain_forward<A><<<blocks, 32 * ROW_WARPS, 0, cuda_stream()>>>(*p, rows);
  CUDA_LAUNCHED("attention");
  return ENG_OK;
}

template <class A> static eng_status backward(const attention_problem *p)
{
  int64_t q_rows = (int64_t)p->batch * p->heads * p->queries, k_rows = (int64_t)p->batch * p->groups * p->keys;
  unsigned q_blocks = 0, k_blocks = 0;
  ENG_TRY(blocks_for(&q_blocks, q_rows));
  ENG_TRY(blocks_for(&k_blocks, k_rows));
  if (q_blocks) {
    plain_delta<A><<<q_blocks, 32 * ROW_WARPS, 0, cuda_stream()>>>(*p, q_rows);
    CUDA_LAUNCHED("attention_grad");
  }
  if (q_blocks && p->dq.data) {
    plain_grad_queries<A><<<q_blocks, 32 * ROW_WARPS, 0, cuda_stream()>>>(*p, q_rows);
    CUDA_LAUNCHED("attention_grad");
  }
  if (k_blocks && (p->dk.data || p->dv.data)) {
    plain_grad_keys<A><<<k_blocks, 32 * ROW_WARPS, 0, cuda_stream()>>>(*p, k_rows);
    CUDA_LAUNCHED("attention_grad");
  }
  return ENG_OK;
}

eng_status attention_plain_forward(const attention_problem *p, int dtype)
{
  return dtype == ENG_f64 ? forward<double>(p) : forward<float>(p);
}

eng_status attention_plain_backward(const attention_problem *call, int dtype)
{
  attention_problem p = *call;
  int64_t bytes = (int64_t)p.batch * p.heads * p.queries * (dtype == ENG_f64 ? 8 : 4);
  p.delta_line = p.queries;
  p.delta = scratch_take(bytes);
  if (!p.delta) return ENG_ERR_MEMORY;
  eng_status status = dtype == ENG_f64 ? backward<double>(&p) : backward<float>(&p);
  scratch_give(p.delta, bytes);
  return status;
}
