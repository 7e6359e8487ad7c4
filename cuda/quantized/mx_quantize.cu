// Microscaling: mx_quantize, bit-equal to core/cpu/reference_mx.c, with the formulas of
// core/base/mx.h.
//
// quantize_in_registers (mx_registers.h) computes the usual calls, quantize_tile all others. In
// quantize_tile, a block of threads takes a tile of x: a whole number of scale blocks each way, up
// to 64 numbers or, if a scale block is longer, one block. It reads the tile as f32 into shared
// memory, finds the largest magnitude of each scale block (one warp per block), and writes the
// quantized x, its transposed copy, or both, as codes or as values in bf16. Rows of the transposed
// copy are columns of the tile. With square blocks the transposed copy has the same codes as the
// other result, so these codes replace the numbers in the tile.
//
// The amax of the tensor is a maximum of integers, and the number of NaN is an integer sum, so
// neither depends on order. For NVFP4, whose scales depend on the amax, a separate pass finds the
// amax and the number of NaN first. For the other rules, the kernels that quantize also find them.
// With a Hadamard transform, the transposed copy is made from the result of cuda_hadamard. Called
// through the device's table.
#include "mx_registers.h"

extern "C" {
#include "device/rotated_copy.h"
eng_status cuda_hadamard(const op_call *call);
}

namespace {

enum {
  WARPS = THREADS / 32,
  SIDE = 64,               // side of a tile, roughly: see tile_side
  EACH = 4,                // adjacent elements of a row that a thread reads or writes at a time
};

// ------------------------------------------------------------------ numbers of x

/// Loads the first `there` of four adjacent numbers from element i on. The rest become zeros.
__device__ inline void load_four(float (&v)[EACH], const void *x, int dtype, int64_t i, int there,
                                 bool aligned)
{
  if (!aligned || there < EACH) {
#pragma unroll
    for (int k = 0; k < EACH; k++) v[k] = k < there ? (float)element_double(x, dtype, i + k) : 0.0f;
  } else if (dtype == ENG_f32) {
    const float4 raw = *(const float4 *)((const float *)x + i);
    v[0] = raw.x, v[1] = raw.y, v[2] = raw.z, v[3] = raw.w;
  } else if (dtype == ENG_f64) {
#pragma unroll
    for (int k = 0; k < EACH; k++) v[k] = (float)((const double *)x)[i + k];
  } else {
    const uint2 raw = *(const uint2 *)((const uint16_t *)x + i);
    const uint32_t half[EACH] = {raw.x & 0xFFFFu, raw.x >> 16, raw.y & 0xFFFFu, raw.y >> 16};
#pragma unroll
    for (int k = 0; k < EACH; k++)
      v[k] = dtype == ENG_bf16 ? widen(bf16_t{(uint16_t)half[k]}) : widen(f16_t{(uint16_t)half[k]});
  }
}

template <typename T> __global__ void __launch_bounds__(THREADS)
survey_all(const T *x, int64_t count, bool aligned, survey *seen)
{
  uint32_t top = 0;
  int nan = 0;
  for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * EIGHT; i < count;
       i += (int64_t)gridDim.x * THREADS * EIGHT) {
    eight<T> v;
    if (aligned && count - i >= EIGHT) load_wide(v, x + i);
    else load_some(v, x + i, (int)min((int64_t)EIGHT, count - i));
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t &word : v.w) largest = larger<T>(largest, word &= magnitudes<T>::bits);
    if (some_nan<T>(largest)) {
      largest = 0;
#pragma unroll
      for (uint32_t word : v.w) {
        nan += __popc((word + magnitudes<T>::beyond) & magnitudes<T>::signs);
        largest = larger<T>(largest, but_nan<T>(word));
      }
    }
    top = larger<T>(top, largest);
  }
  report(seen, largest_bits<T>(top), nan);
}

/// Writes the amax to *amax and *again, and the number of NaN to *nan. `again` and `nan` may be
/// NULL. The amax is *given or, if `given` is NULL, the largest magnitude that the survey found, or
/// NaN if it found NaN and `finite` is false. Runs in one thread.
__global__ void finish(const survey *seen, const float *given, bool finite, float *amax,
                       float *again, int64_t *nan)
{
  const float found =
    seen->nan && !finite ? __uint_as_float(0x7FC00000u) : __uint_as_float(seen->top);
  *amax = given ? *given : found;
  if (again) *again = *amax;
  if (nan) *nan = (int64_t)seen->nan;
}

// ------------------------------------------------------------------ tiles

/// Applies the four-over-six rule. Returns 1.5 if the block at (r0, c0) has a smaller error when
/// its amax is scaled to 4 than when it is scaled to 6, else 1. A lane takes every 32nd row of the
/// block or, if the side is turned, every 32nd column. All lanes of a warp must call it.
__device__ inline float stretch_of(const float *tile, int pitch, const mx_job &p, const mx_side &s,
                                   int r0, int c0, int rows, int columns, float amax)
{
  const mx_format f = mx_format_of(ENG_FORMAT_E2M1);
  const float encode = nvfp4_encode_scale(*p.amax, p.rule);
  const int high = min(s.high, rows - r0), wide = min(s.wide, columns - c0),
            lines = s.turned ? wide : high, along = s.turned ? high : wide;
  float total[2];
  for (int four = 0; four < 2; four++) {
    const uint8_t scale = nvfp4_scale(amax, encode, p.rule, four ? 1.5f : 1.0f);
    const float factor = nvfp4_factor(scale, encode), unit = e4m3_to_f32(scale);
    float error[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int line = k * 32 + (int)threadIdx.x % 32;
      for (int i = 0; i < along && line < lines; i++) {
        const float x = tile[(r0 + (s.turned ? i : line)) * pitch + c0 + (s.turned ? line : i)];
        error[k] += nvfp4_error(x, mx_value(mx_code(x * factor, f), f) * unit, *p.amax, p.rule);
      }
    }
    float sum = error[0] + error[2] + (error[1] + error[3]);
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, half);
    total[four] = sum;
  }
  return total[1] < total[0] ? 1.5f : 1.0f;
}

/// Finds the scales of a tile's blocks. Sets block[b].x to the factor on the elements of block b,
/// and block[b].y to the value of the block's scale. `again` is another side that gets the same
/// scales, or NULL.
template <int FORMAT>
__device__ inline void find_scales(float2 *block, const float *tile, int pitch, const mx_job &p,
                                   const mx_side &s, const mx_side *again, int64_t r0, int64_t c0,
                                   int rows, int columns)
{
  const int across = (columns + s.wide - 1) / s.wide, down = (rows + s.high - 1) / s.high;
  const int64_t i0 = r0 / s.high, j0 = c0 / s.wide;
  for (int b = threadIdx.x / 32; b < down * across; b += WARPS) {
    const int i = b / across, j = b % across, r = i * s.high, c = j * s.wide;
    uint32_t top = 0;
    for (int e = threadIdx.x % 32; e < s.high * s.wide; e += 32) {
      const int y = (int)divide((uint32_t)e, s.by_wide), x = e - y * s.wide;
      if (r + y >= rows || c + x >= columns) continue;
      const uint32_t bits = __float_as_uint(tile[(r + y) * pitch + c + x]) & 0x7FFFFFFFu;
      top = max(top, p.finite && bits > 0x7F800000u ? 0u : bits);
    }
    top = __reduce_max_sync(0xFFFFFFFFu, top);
    const float amax = __uint_as_float(top);
    const float stretch = FORMAT == ENG_FORMAT_E2M1 && mx_is_four_over_six(p.rule) ?
      stretch_of(tile, pitch, p, s, r, c, rows, columns, amax) : 1.0f;
    if (threadIdx.x % 32) continue;
    uint8_t code;
    if (FORMAT == ENG_FORMAT_E2M1 && mx_is_nvfp4(p.rule)) {
      const float encode = nvfp4_encode_scale(*p.amax, p.rule);
      code = nvfp4_scale(amax, encode, p.rule, stretch);
      block[b] = make_float2(nvfp4_factor(code, encode) * p.factor, e4m3_to_f32(code));
    } else {
      code = mx_scale(amax, mx_format_of(FORMAT), p.rule, p.finite);
      block[b] = make_float2(mx_inverse(code) * p.factor, ue8m0_to_f32(code));
    }
    s.scale[(i0 + i) * s.scale_row + (j0 + j) * s.scale_column] = code;
    if (again) again->scale[(i0 + i) * again->scale_row + (j0 + j) * again->scale_column] = code;
  }
}

/// Writes n elements of a result, beginning with element `at`.
template <int FORMAT>
__device__ inline void store_four(const mx_job &p, const mx_side &s, int64_t at,
                                  const uint8_t (&code)[EACH], const uint16_t (&value)[EACH], int n)
{
  const bool whole = s.aligned && n == EACH;
  if (p.values) {
    uint16_t *to = (uint16_t *)s.q + at;
    if (whole)
      *(uint2 *)to = make_uint2(value[0] | (uint32_t)value[1] << 16,
                                value[2] | (uint32_t)value[3] << 16);
    for (int k = 0; k < n && !whole; k++) to[k] = value[k];
  } else if (FORMAT == ENG_FORMAT_E2M1) {
    uint8_t *to = s.q + at / 2;
    const uint8_t low = (uint8_t)(code[0] | code[1] << 4), high = (uint8_t)(code[2] | code[3] << 4);
    if (whole) *(uint16_t *)to = (uint16_t)(low | high << 8);
    else {
      to[0] = low;
      if (n > 2) to[1] = high;
    }
  } else {
    uint8_t *to = s.q + at;
    if (whole)
      *(uint32_t *)to = code[0] | (uint32_t)code[1] << 8 | (uint32_t)code[2] << 16 |
                        (uint32_t)code[3] << 24;
    for (int k = 0; k < n && !whole; k++) to[k] = code[k];
  }
}

/// Writes one result of a tile. A thread writes four elements of a row of the result at a time.
/// With `keep`, also replaces the tile's numbers by their codes.
template <int FORMAT, bool RANDOM>
__device__ inline void write_elements(float *tile, const float2 *block, const float *number,
                                      int pitch, const mx_job &p, const mx_side &s, bool keep,
                                      int64_t r0, int64_t c0, int rows, int columns)
{
  const mx_format f = mx_format_of(FORMAT);
  const int lines = s.turned ? columns : rows, along = s.turned ? rows : columns,
            groups = (along + EACH - 1) / EACH, across = (columns + s.wide - 1) / s.wide;
  for (int t = threadIdx.x; t < lines * groups; t += THREADS) {
    const int line = t / groups, from = t % groups * EACH, n = min((int)EACH, along - from);
    const int64_t at = ((s.turned ? c0 : r0) + line) * s.length + (s.turned ? r0 : c0) + from;
    uint64_t have = 0;
    uint32_t word[4] = {0, 0, 0, 0};
    uint8_t code[EACH] = {0, 0, 0, 0};
    uint16_t value[EACH] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      if (k >= n) continue;
      const int r = s.turned ? from + k : line, c = s.turned ? line : from + k;
      const float2 of = block[divide((uint32_t)r, s.by_high) * across +
                              divide((uint32_t)c, s.by_wide)];
      float *x = tile + r * pitch + c;
      if (s.same) {
        code[k] = (uint8_t)__float_as_uint(*x);
      } else if (RANDOM) {
        const uint64_t element = (uint64_t)(at + k), now = (uint64_t)s.random + element / 4;
        if (k == 0 || now != have) philox_of(word, p.seed, now);
        have = now;
        code[k] = mx_code_stochastic(*x * of.x,
                                     mx_uniform(word_of_element(word, element), p.sr_bits), f);
      } else if (p.average) {
        const float toward = p.average[(r0 + r) * p.columns + c0 + c];
        code[k] = mx_code_toward(*x * of.x, toward * of.x, f);
      } else {
        code[k] = mx_code(*x * of.x, f);
      }
      value[k] = bf16_from_f32(number[code[k]] * of.y);
      if (keep) *x = __uint_as_float(code[k]);
    }
    store_four<FORMAT>(p, s, at, code, value, n);
  }
}

template <int FORMAT, bool RANDOM>
__global__ void __launch_bounds__(THREADS, 4) quantize_tile(const __grid_constant__ mx_job p)
{
  extern __shared__ float2 room[];
  __shared__ float number[256];
  const int64_t r0 = blockIdx.x / p.tiles_across * p.tile_rows,
                c0 = blockIdx.x % p.tiles_across * p.tile_columns;
  const int rows = (int)min((int64_t)p.tile_rows, p.rows - r0),
            columns = (int)min((int64_t)p.tile_columns, p.columns - c0),
            pitch = p.tile_columns + 1, groups = (columns + EACH - 1) / EACH;
  float *tile = (float *)room;
  float2 *block = room + (p.tile_rows * pitch + 1) / 2;
  uint32_t top = 0;
  int nan = 0;
  number[threadIdx.x] = mx_value((uint8_t)threadIdx.x, mx_format_of(FORMAT));
  for (int t = threadIdx.x; t < rows * groups; t += THREADS) {
    const int r = t / groups, c = t % groups * EACH, there = min((int)EACH, columns - c);
    float v[EACH];
    load_four(v, p.x, p.dtype, (r0 + r) * p.columns + c0 + c, there, p.aligned);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      top = max(top, magnitude_of(v[k], nan));
      if (k < there) tile[r * pitch + c + k] = v[k];
    }
  }
  if (p.seen) report(p.seen, top, nan);
  for (int k = 0; k < p.sides; k++) {
    const mx_side &s = p.of[k];
    const mx_side *again = k + 1 < p.sides && p.of[k + 1].same ? &p.of[k + 1] : NULL;
    __syncthreads();
    if (!s.same)
      find_scales<FORMAT>(block, tile, pitch, p, s, again, r0, c0, rows, columns);
    __syncthreads();
    write_elements<FORMAT, RANDOM>(tile, block, number, pitch, p, s, again != NULL, r0, c0, rows,
                                   columns);
  }
}

// ------------------------------------------------------------------ the host's side

/// Returns the side of a tile that holds whole blocks of this size.
int tile_side(int block)
{ return block > SIDE ? block : SIDE / block * block; }

/// Describes a result of the call. `turned` is true for the result of the transposed p->x.
mx_side side_of(const op_call *call, tensor *q, tensor *scale, const mx_job *p, bool turned,
             int64_t random)
{
  const int64_t high = call->mx_quantize.block_rows, wide = call->mx_quantize.block_columns;
  mx_side s = {};
  s.q = (uint8_t *)q->data;
  s.scale = (uint8_t *)scale->data;
  s.high = (int)(turned ? wide : high);
  s.wide = (int)(turned ? high : wide);
  s.by_high = divider_of(s.high);
  s.by_wide = divider_of(s.wide);
  s.length = turned ? p->rows : p->columns;
  const int64_t across = parts(s.length, wide);
  s.scale_row = turned ? 1 : across;
  s.scale_column = turned ? across : 1;
  s.random = random;
  s.turned = turned;
  return s;
}

template <int FORMAT> eng_status launch(const mx_job *p, unsigned tiles, int bytes)
{
  auto kernel = p->sr_bits ? quantize_tile<FORMAT, true> : quantize_tile<FORMAT, false>;
  CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<tiles, THREADS, bytes, cuda_stream()>>>(*p);
  return cuda_launched("mx_quantize");
}

/// Computes the results of a job, one for each side. A tile must hold whole blocks of every side.
eng_status run(mx_job *p, int64_t format)
{
  int64_t blocks = 0;
  p->tile_rows = tile_side(p->of[0].high);
  p->tile_columns = tile_side(p->of[0].wide);
  p->tiles_across = parts(p->columns, p->tile_columns);
  p->aligned = p->columns % EACH == 0 && p->tile_columns % EACH == 0 && is_aligned(p->x);
  for (int k = 0; k < p->sides; k++) {
    mx_side *s = &p->of[k];
    int64_t n = (int64_t)(p->tile_rows / s->high) * (p->tile_columns / s->wide);
    if (n > blocks) blocks = n;
    s->aligned = s->length % EACH == 0 && (uintptr_t)s->q % 8 == 0 &&
                 (s->turned ? p->tile_rows : p->tile_columns) % EACH == 0;
  }
  const int64_t tiles = parts(p->rows, p->tile_rows) * p->tiles_across,
                room = (int64_t)p->tile_rows * (p->tile_columns + 1);
  const int bytes = (int)((room + 1) / 2 + blocks) * (int)sizeof(float2);
  if (tiles == 0) return ENG_OK;
  FAIL_IF(tiles > INT32_MAX, ENG_ERR_VALUE, "mx_quantize: expected at most 2^31 - 1 tiles, got "
          "%lld for %lld x %lld numbers; hint: a smaller batch", (long long)tiles,
          (long long)p->rows, (long long)p->columns);
  const unsigned n = (unsigned)tiles;
  switch (format) {
    case ENG_e4m3:          return launch<ENG_e4m3>(p, n, bytes);
    case ENG_e5m2:          return launch<ENG_e5m2>(p, n, bytes);
    case ENG_FORMAT_E2M3:   return launch<ENG_FORMAT_E2M3>(p, n, bytes);
    case ENG_FORMAT_E3M2:   return launch<ENG_FORMAT_E3M2>(p, n, bytes);
    case ENG_FORMAT_MXINT8: return launch<ENG_FORMAT_MXINT8>(p, n, bytes);
    default:                return launch<ENG_FORMAT_E2M1>(p, n, bytes);
  }
}

// ---- calls of quantize_in_registers

/// Whether quantize_in_registers can compute the results of this job for a call.
bool fits_registers(const mx_job *p, const op_call *call)
{
  const int64_t high = call->mx_quantize.block_rows, wide = call->mx_quantize.block_columns;
  const bool turned = p->sides == 2;
  return !p->average && (p->dtype == ENG_bf16 || p->dtype == ENG_f32) &&
         call->mx_quantize.format != ENG_FORMAT_MXINT8 && (wide == 16 || wide == 32) &&
         (high == 1 || high == wide) && p->columns % EIGHT == 0 && is_aligned(p->x) &&
         is_aligned(p->of[0].q) && (!turned || (p->rows % EIGHT == 0 && is_aligned(p->of[1].q))) &&
         parts(p->rows, TILE) * parts(p->columns, TILE) <= INT32_MAX &&
         // With square blocks both results have the same codes. This kernel cannot ensure that with
         // sr_bits, because it draws separate random bits for each result.
         !(turned && high > 1 && p->sr_bits);
}

mx_power power_of_rule(int rule, const mx_format &f, bool finite)
{
  mx_power r = {};
  r.by = rule == ENG_MX_RCEIL ? 1.0f / f.largest : 1.0f;
  r.half = rule == ENG_MX_EVEN ? 1u << (22 - f.fraction) : 0;
  r.up = rule == ENG_MX_CEIL || rule == ENG_MX_RCEIL ? 0x7FFFFFu : 0;
  r.zero = rule == ENG_MX_RCEIL ? 0x00400000u : 0;
  r.emax = rule == ENG_MX_RCEIL ? 0 : f.emax;
  r.slack = finite ? 0 : r.half;
  r.over = finite ? 254 : 255;
  return r;
}

template <typename T, int OUT> void launch_registers(const mx_job *p, unsigned tiles)
{
  auto kernel = p->sr_bits ? quantize_in_registers<T, OUT, true, false> :
                             quantize_in_registers<T, OUT, false, false>;
  if constexpr (OUT != BYTES)
    if (mx_is_four_over_six(p->rule)) kernel = quantize_in_registers<T, OUT, false, true>;
  kernel<<<tiles, TILE_THREADS, 0, cuda_stream()>>>(*p);
}

eng_status run_registers(mx_job *p, const op_call *call)
{
  const auto &a = call->mx_quantize;
  const int64_t across = parts(p->columns, TILE), tiles = parts(p->rows, TILE) * across;
  if (tiles == 0) return ENG_OK;
  p->format = mx_format_of(a.format);
  p->power = power_of_rule(p->rule, p->format, p->finite);
  p->square = a.block_rows > 1;
  p->lanes = (int)a.block_columns / EIGHT;
  p->by_across = divider_of(across);
  auto launch = [&](auto t) {
    typedef decltype(t) T;
    if (p->values) launch_registers<T, VALUES>(p, (unsigned)tiles);
    else if (mx_packed(a.format)) launch_registers<T, PAIRS>(p, (unsigned)tiles);
    else launch_registers<T, BYTES>(p, (unsigned)tiles);
  };
  if (p->dtype == ENG_f32) launch(float{});
  else launch(bf16_t{});
  return cuda_launched("mx_quantize");
}

eng_status survey_x(const tensor *x, survey *seen)
{
  const unsigned blocks = capped_grid(parts(x->count, THREADS * EIGHT), 8);
  if (blocks == 0) return ENG_OK;
  return with_format(x->dtype, [&](auto t) {
    survey_all<<<blocks, THREADS, 0, cuda_stream()>>>(
      (const decltype(t) *)x->data, x->count, is_aligned(x->data), seen);
    return cuda_launched("mx_quantize");
  });
}

/// Launches `finish` for the outputs of the call.
eng_status finish_x(const op_call *call, const survey *seen, bool finite)
{
  finish<<<1, 1, 0, cuda_stream()>>>(
    seen, (const float *)data_of(call->in[1]), finite, (float *)call->out[2]->data,
    call->out[3] ? (float *)call->out[6]->data : nullptr,
    (int64_t *)call->out[5]->data);
  return cuda_launched("mx_quantize");
}

eng_status quantize(const op_call *call, mx_job p, survey *seen)
{
  const auto &a = call->mx_quantize;
  const tensor *x = call->in[0];
  const bool turned = call->out[3], square = a.block_rows == a.block_columns,
             nvfp4 = mx_is_nvfp4(a.rule);
  CUDA_TRY(cudaMemsetAsync(seen, 0, sizeof *seen, cuda_stream()));
  if (nvfp4) {   // the other rules do not read the amax
    ENG_TRY(survey_x(x, seen));
    ENG_TRY(finish_x(call, seen, p.finite));
  }
  p.amax = (const float *)call->out[2]->data;
  p.seen = nvfp4 ? NULL : seen;
  p.sides = 1;
  p.of[0] = side_of(call, call->out[0], call->out[1], &p, false, a.counter);
  if (turned) {
    p.of[1] = side_of(call, call->out[3], call->out[4], &p, true, a.counter + parts(x->count, 4));
    p.of[1].same = square;
    if (square || (SIDE % a.block_rows == 0 && SIDE % a.block_columns == 0)) p.sides = 2;
  }
  ENG_TRY(fits_registers(&p, call) ? run_registers(&p, call) : run(&p, a.format));
  if (!nvfp4) ENG_TRY(finish_x(call, seen, p.finite));
  if (!turned || p.sides == 2) return ENG_OK;
  p.seen = NULL;
  p.sides = 1;
  p.of[0] = p.of[1];
  return run(&p, a.format);
}

}  // namespace

extern "C" eng_status cuda_mx_quantize(const op_call *call)
{
  const auto &a = call->mx_quantize;
  const tensor *x = call->in[0];
  FAIL_IF(mx_is_fitted(a.rule), ENG_ERR_VALUE, "mx_quantize: the rule %s has no CUDA kernel; "
          "hint: device=cpu", a.rule == ENG_MX_QUEST ? "quest" : "ms_eden");
  FAIL_IF(a.ties || a.sr_rule, ENG_ERR_VALUE, "mx_quantize: the option %s has no CUDA kernel; "
          "hint: device=cpu", a.ties ? "ties" : "sr_rule");
  if (a.hadamard) return quantize_rotated(call, cuda_hadamard, cuda_mx_quantize);
  mx_job p = {};
  p.x = x->data;
  p.dtype = x->dtype;
  p.columns = x->shape[x->ndim - 1];
  p.rows = rows_of(x);
  p.rule = (int)a.rule;
  p.sr_bits = (int)a.sr_bits;
  p.finite = (a.flags & MX_FINITE) != 0;
  p.values = (a.flags & MX_VALUES) != 0;
  p.seed = rng_seed();
  p.average = (const float *)data_of(call->in[2]);
  p.factor = a.factor != 0 ? (float)a.factor : 1.0f;
  survey *seen = (survey *)scratch_take(sizeof *seen);
  if (!seen) return ENG_ERR_MEMORY;
  const eng_status status = quantize(call, p, seen);
  scratch_give(seen, sizeof *seen);
  return status;
}
