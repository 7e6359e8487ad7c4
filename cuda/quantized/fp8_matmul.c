// The operation fp8_matmul on the card. The accumulator `hopper` runs on the tensor cores if
// cuBLASLt supports the call (gemm_codes.h): with scales by tensor from sm_89 on, with other scales
// on sm_90. All other calls use the formula (fp8_plain.cu), which is slow. For the accumulator
// `hopper`, the formula gives the same numbers as Hopper's tensor cores. ENGINE_FP8_FORMULA=1
// always uses the formula, for comparison.
//
// With scales by block, the tensor cores start a new sum every 128 products along K, so a promotion
// interval of 128 or more gives the same result as no promotion. With scales by tensor or by row,
// promotion every 128 products is cuBLASLt's ordinary mode, and no promotion is its fast mode.
//
// Tensor cores need operands that are contiguous along K, with sizes that are multiples of 16, and
// scales in cuBLASLt's layout. Other operands (transposed, ragged edges) are first copied into
// scratch memory, padded with zeros. Called through the device's table.
#include "runtime/device.h"
#include "fp8_plain.h"
#include "gemm/gemm_codes.h"

op_kernel cuda_contiguous, cuda_fp8_matmul;

enum { EVERY = 128 /* products along K between promotions */ };

/// Returns the fp8_scaling whose blocks have this size in an operand [outer x K], or -1 if there is
/// none.
static int scaling_of(int64_t outer_block, int64_t k_block)
{
  if (outer_block == 0 && k_block == 0) return FP8_TENSOR;
  if (outer_block == 1 && k_block == 0) return FP8_ROW;
  if (outer_block == 1 && k_block == FP8_BLOCK) return FP8_VEC128;
  if (outer_block == FP8_BLOCK && k_block == FP8_BLOCK) return FP8_BLK128;
  return -1;
}

/// Copies a matrix of [outer x k] elements with strides from_outer and from_k to `to`, with strides
/// to_outer and to_k.
static eng_status copy(void *to, int64_t to_outer, int64_t to_k, const void *from,
                       int64_t from_outer, int64_t from_k, int64_t outer, int64_t k, int dtype)
{
  bool turned = to_outer < to_k;   // dimension 1 is then `outer`, along which `to` is contiguous
  tensor x = {.data = (void *)from, .dtype = dtype, .ndim = 2, .count = outer * k}, y;
  x.shape[turned] = outer, x.stride[turned] = from_outer;
  x.shape[!turned] = k, x.stride[!turned] = from_k;
  y = x;
  y.data = to;
  y.stride[turned] = to_outer;
  y.stride[!turned] = to_k;
  op_call call = simple_call(ENG_OP_contiguous, &x, NULL, &y);
  return cuda_contiguous(&call);
}

/// Takes scratch memory. If the caller's copy into it will leave `gaps`, fills it with zeros first.
static eng_status take(void **piece, int64_t bytes, bool gaps, scratch *s)
{
  *piece = scratch_keep(s, bytes);
  if (!*piece) return ENG_ERR_MEMORY;
  if (gaps) CUDA_TRY(cudaMemsetAsync(*piece, 0, (size_t)bytes, cuda_stream()));
  return ENG_OK;
}

/// Prepares an operand for the tensor cores. q is [outer x K] if `along_k`, else [K x outer].
static eng_status prepare(fp8_operand *x, const tensor *q, const tensor *scale, bool along_k,
                          int64_t block_rows, int64_t block_columns, int scaling, scratch *s)
{
  int64_t outer = q->shape[along_k ? 0 : 1], k = q->shape[along_k ? 1 : 0];
  *x = (fp8_operand){.data = q->data, .scale = scale->data, .rows = fp8_padded(outer),
                     .inner = fp8_padded(k), .format = q->dtype, .scaling = scaling};
  bool padded = x->rows != outer || x->inner != k;
  if (!along_k || padded || !is_aligned(q->data)) {
    void *data;
    ENG_TRY(take(&data, x->rows * x->inner, padded, s));
    ENG_TRY(
      copy(data, x->inner, 1, q->data, along_k ? k : 1, along_k ? 1 : outer, outer, k, q->dtype));
    x->data = data;
  }
  if (scaling == FP8_TENSOR) return ENG_OK;
  fp8_scales have = fp8_scales_for(block_rows, block_columns, q->shape[0], q->shape[1], NULL),
             want = fp8_scales_for(along_k ? block_rows : block_columns,
                                   along_k ? block_columns : block_rows, x->rows, x->inner, NULL);
  if (!along_k) have = fp8_scales_turned(have);
  bool same = (have.row_stride == want.row_stride || have.row_count == 1) &&
              (have.inner_stride == want.inner_stride || have.inner_count == 1) &&
              have.count >= want.count;
  if (same && is_aligned(scale->data)) return ENG_OK;
  void *scales;
  ENG_TRY(take(&scales, want.count * (int64_t)sizeof(float), true, s));
  x->scale = scales;
  return copy(scales, want.row_stride, want.inner_stride, scale->data, have.row_stride,
              have.inner_stride, have.row_count, have.inner_count, ENG_f32);
}

int cuda_fp8(void)
{
  if (is_on("ENGINE_FP8_FORMULA", false) || cuda_capability() == 90) return 2;
  return cuda_capability() >= 89;
}

/// Whether the tensor cores support this call. Sets `fast` to whether they run without promotions.
static bool on_tensor_cores(const op_call *call, int scaling_a, int scaling_b, bool *fast)
{
  const tensor *a = call->in[0], *b = call->in[2], *bias = call->in[4], *y = call->out[0];
  int64_t promotion = call->fp8_matmul.promotion;
  if (is_on("ENGINE_FP8_FORMULA", false) || !fp8_product_supported(scaling_a, scaling_b) ||
      call->fp8_matmul.accumulator != ENG_ACCUMULATE_HOPPER)
    return false;
  bool blocks = scaling_a >= FP8_VEC128;   // scaling_b is by block, too (fp8_product_supported)
  *fast = !blocks && promotion == 0;
  bool promotes = blocks ? promotion == 0 || promotion >= EVERY : *fast || promotion == EVERY;
  bool formats = !(a->dtype == ENG_e5m2 && b->dtype == ENG_e5m2) && y->dtype != ENG_f64 &&
                 (!bias || (bias->dtype != ENG_f64 && bias->stride[0] == 1));
  return promotes && formats && a->count > 0 && b->count > 0 &&
         (y->stride[1] == 1 || y->shape[1] == 1) &&
         (y->stride[0] >= y->shape[1] || y->shape[0] == 1);
}

eng_status cuda_fp8_matmul(const op_call *call)
{
  bool ta = call->fp8_matmul.transpose_a != 0, tb = call->fp8_matmul.transpose_b != 0, fast;
  int64_t a_rows = call->fp8_matmul.a_rows, a_columns = call->fp8_matmul.a_columns,
          b_rows = call->fp8_matmul.b_rows, b_columns = call->fp8_matmul.b_columns;
  int scaling_a = ta ? scaling_of(a_columns, a_rows) : scaling_of(a_rows, a_columns),
      scaling_b = tb ? scaling_of(b_rows, b_columns) : scaling_of(b_columns, b_rows);
  if (!on_tensor_cores(call, scaling_a, scaling_b, &fast)) return fp8_plain(call);
  const tensor *y = call->out[0], *bias = call->in[4];
  fp8_result result = {.data = y->data,
                       .dtype = y->dtype,
                       .m = y->shape[0],
                       .n = y->shape[1],
                       .stride = y->shape[0] == 1 ? y->shape[1] : y->stride[0],
                       .accumulate = call->fp8_matmul.add != 0,
                       .bias = data_of(bias),
                       .bias_dtype = dtype_of(bias)};
  fp8_operand a, b;
  scratch s = {0};
  eng_status status = prepare(&a, call->in[0], call->in[1], !ta, a_rows, a_columns, scaling_a, &s);
  if (status == ENG_OK)
    status = prepare(&b, call->in[2], call->in[3], tb, b_rows, b_columns, scaling_b, &s);
  if (status == ENG_OK) status = fp8_product(&result, &a, &b, fast);
  scratch_give_all(&s);
  return status;
}
