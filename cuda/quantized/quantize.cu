// FP8: quantize, swiglu_quantize and dequantize; bit-equal to core/cpu/reference_fp8.c. quantize
// can also write a transposed copy; in tiles, one read of x serves both results.
//
// A block of threads processes tiles of 128 x 128 numbers, 8 x 8 per thread, and writes codes in
// both directions. The codes of the transposed copy go through shared memory. Meanwhile the next
// tile loads (cp.async; 96 KiB in flight per multiprocessor in 16-bit formats). Where the rule
// divides x by a scale, quotient() multiplies by the inverse and corrects the product, which gives
// the correctly rounded quotient without a division. If scale blocks fit a tile (1 x 128, 128 x 1
// or 128 x 128), their largest magnitudes are found within the tile, so x is read once. For other
// blocks, a first pass finds the largest magnitudes as integer maxima, which do not depend on
// order. With a given factor (delayed scaling) no such pass is needed. Numbers are processed one by
// one for stochastic rounding, for rows whose length is not a multiple of 8, for x that is not
// 16-byte aligned, for f64, and for blocks that are neither of the three sizes above nor a whole
// row, a whole column or all of x. All coordinates are those of x: blocks of the transposed copy
// are described with rows and columns exchanged.
//
// In bf16 and f16, if one read of the inputs is enough and the codes are e4m3 or e5m2,
// swiglu_quantize loads tiles of gate and up and computes silu(gate) * up in registers. Otherwise
// silu(gate) * up goes to scratch memory first. Called through the device's table.
#include "quantize_tiles.h"

extern "C" op_kernel cuda_swiglu;   // unary.cu

// ------------------------------------------------------------------ maxima of other blocks

enum { AHEAD = 4 /* rows in flight */, MAXIMA_COLUMNS = 32 * EIGHT };

/// The number of blocks of block_maxima per multiprocessor.
template <typename T> constexpr int maxima_resident(void) { return sizeof(T) == 2 ? 3 : 2; }

/// Merges a thread's maxima of eight columns, from column c on, into `of_row`, the maxima of one
/// row of scale blocks. Then clears the thread's maxima.
template <typename T>
__device__ static inline void flush_maxima(eight<T> &top, uint32_t *of_row, int64_t c, int there,
                                           int64_t column_block, bool whole_rows)
{
  uint32_t some = 0;
  if (whole_rows) {
#pragma unroll
    for (int i = 0; i < eight<T>::WORDS; i++) some = max(some, largest_bits<T>(top.w[i]));
    some = __reduce_max_sync(0xFFFFFFFFu, some);
    if (threadIdx.x % 32 == 0) atomicMax(of_row, some);
  } else {
#pragma unroll
    for (int k = 0; k < EIGHT; k++) {
      some = max(some, magnitude_bits<T>(top.w[k / eight<T>::EACH], k % eight<T>::EACH));
      if (k >= there || (k + 1 < there && (c + k) / column_block == (c + k + 1) / column_block))
        continue;
      atomicMax(of_row + (c + k) / column_block, some);
      some = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < eight<T>::WORDS; i++) top.w[i] = 0;
}

/// Finds the largest magnitudes of the scale blocks. `maxima` receives their bits and must start as
/// zeros. NaN is ignored unless `nans`. A warp processes `strip` rows of 256 columns, from the top
/// down.
template <typename T>
__global__ static void __launch_bounds__(THREADS, maxima_resident<T>())
  block_maxima(const T *x, int64_t rows, int64_t columns, int strip, int wide, int64_t row_block,
               int64_t column_block, int64_t blocks_across, int nans, uint32_t *maxima)
{
  __shared__ uint32_t warps[THREADS / 32];
  enum { WORDS = eight<T>::WORDS };
  const unsigned across = (unsigned)((columns + MAXIMA_COLUMNS - 1) / MAXIMA_COLUMNS);
  const int64_t r0 = ((int64_t)(blockIdx.x / across) * (THREADS / 32) + threadIdx.x / 32) * strip;
  const int64_t c = (int64_t)(blockIdx.x % across) * MAXIMA_COLUMNS + threadIdx.x % 32 * EIGHT;
  const int there = (int)min((int64_t)EIGHT, max((int64_t)0, columns - c)),
            down = (int)max((int64_t)0, min((int64_t)strip, rows - r0));
  const bool whole_rows = column_block >= columns, whole = whole_rows && row_block >= rows,
             all_wide = wide && there == EIGHT;
  const T *from = x + r0 * columns + c;
  eight<T> top, v[AHEAD];
#pragma unroll
  for (int i = 0; i < WORDS; i++) top.w[i] = 0;
  int64_t block = whole ? 0 : r0 / row_block;
  int64_t next = whole ? strip : (block + 1) * row_block - r0;   // rows until the block's end
#pragma unroll
  for (int j = 0; j < AHEAD; j++, from += columns) {
    if (all_wide && j < down) load_wide(v[j], from);
    else load_some(v[j], from, j < down ? there : 0);
  }
#pragma unroll 1
  for (int first = 0; first < down; first += AHEAD) {
#pragma unroll
    for (int j = 0; j < AHEAD; j++, from += columns) {
      const int r = first + j;
      uint32_t some = 0;
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        v[j].w[i] &= magnitudes<T>::bits;
        some = larger<T>(some, v[j].w[i]);
      }
      if (some_nan<T>(some) && !nans)
#pragma unroll
        for (int i = 0; i < WORDS; i++) v[j].w[i] = but_nan<T>(v[j].w[i]);
#pragma unroll
      for (int i = 0; i < WORDS; i++) top.w[i] = larger<T>(top.w[i], v[j].w[i]);
      if (all_wide && r + AHEAD < down) load_wide(v[j], from);
      else load_some(v[j], from, r + AHEAD < down ? there : 0);
      if (whole || r >= down || (r + 1 < next && r + 1 < down)) continue;
      flush_maxima(top, maxima + block * blocks_across, c, there, column_block, whole_rows);
      next += row_block;
      block++;
    }
  }
  if (!whole) return;
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < WORDS; i++) all = max(all, largest_bits<T>(top.w[i]));
  all = __reduce_max_sync(0xFFFFFFFFu, all);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = all;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 0; w < THREADS / 32; w++) all = max(all, warps[w]);
  atomicMax(maxima, all);
}

/// Computes the factors, and the scales of one side, from the maxima; one thread per scale block.
/// With `both`, also writes the scales of the other side, whose blocks are the same.
__global__ static void make_scales(side s, side other, bool both, scaling_rule rule)
{
  int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= s.down * s.across) return;
  int64_t i = at / s.across, j = at % s.across;
  fp8_scale found = scale_of(rule, __uint_as_float(s.maxima[at]));
  s.factor[at] = found.factor;
  if (s.q) s.scale[i * s.row_stride + j * s.column_stride] = found.scale;
  if (both && other.q) other.scale[i * other.row_stride + j * other.column_stride] = found.scale;
}

// ------------------------------------------------------------------ number by number

/// Each thread writes four codes (eight in e5m6) of one output, in the order of that output.
/// `turned` selects the transposed copy.
template <typename T, int E, bool RANDOM> __global__ static void __launch_bounds__(THREADS)
quantize_numbers(const T *x, const job p, bool turned)
{
  enum { N = E == 6 ? 8 : 4 };
  const side &s = turned ? p.turned : p.own;
  const int64_t count = p.rows * p.columns,
                first = N * ((int64_t)blockIdx.x * THREADS + threadIdx.x),
                inner = turned ? p.rows : p.columns;
  uint64_t have = 0;
  uint32_t word[4] = {0, 0, 0, 0};
  float y[N];
  for (int k = 0; k < N && first + k < count; k++) {
    const int64_t outer = (first + k) / inner, rest = (first + k) % inner,
                  r = turned ? rest : outer, c = turned ? outer : rest;
    y[k] = scaled(number(x[r * p.columns + c]), factor_at(s, r, c), p.rule.divides);
    if (E == 6) continue;
    uint32_t chance = 0;
    if (RANDOM) {
      const bool as_own = turned && p.same;
      const uint64_t element = (uint64_t)(as_own ? r * p.columns + c : first + k),
                     block = (uint64_t)(as_own ? p.own.random : s.random) + element / 4;
      if (k == 0 || block != have) philox_of(word, p.seed, block);
      have = block;
      chance = word_of_element(word, element);
    }
    ((uint8_t *)s.q)[first + k] =
      fp8_from_f32(y[k], E, FP8_SATURATE | (RANDOM ? FP8_STOCHASTIC : 0), chance);
  }
  if (E == 6 && first < count) put_e5m6((uint32_t *)s.q + first / 8 * 3, y);
}

/// Finds the bits of the largest magnitude of x, or the bits of a NaN if x contains a NaN.
template <typename T> __global__ static void __launch_bounds__(THREADS)
whole_amax(const T *x, int64_t count, uint32_t *amax)
{
  uint32_t top = 0;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * THREADS)
    top = max(top, magnitude_of(number(x[i]), 0x7FC00000u));
  top = __reduce_max_sync(0xFFFFFFFFu, top);
  if (threadIdx.x % 32 == 0) atomicMax(amax, top);
}

// ------------------------------------------------------------------ the host's side of quantize

/// Whether the factors of these blocks can be found within a tile.
static bool fits_tile(int64_t row_block, int64_t column_block)
{
  return (row_block == TILE && column_block == TILE) || (row_block == 1 && column_block == TILE) ||
         (row_block == TILE && column_block == 1);
}

static int how_of(const side *s, int64_t rows, int64_t columns)
{
  if (s->down == 1 && s->across == 1) return BY_TILE;
  if (s->row_block == TILE && s->column_block == TILE) return BY_TILE;
  if (s->row_block == 1 && (s->column_block == TILE || s->column_block >= columns)) return BY_ROW;
  if (s->column_block == 1 && (s->row_block == TILE || s->row_block >= rows)) return BY_COLUMN;
  return BY_BLOCK;
}

/// Describes one output in the coordinates of x [rows x columns]. The call gives block sizes in the
/// coordinates of the output itself.
static side side_of(const op_call *call, bool turned, int64_t rows, int64_t columns)
{
  fp8_scales at = fp8_scales_for(call->quantize.block_rows, call->quantize.block_columns,
                                 turned ? columns : rows, turned ? rows : columns, NULL);
  if (turned) at = fp8_scales_turned(at);
  tensor *q = call->out[turned ? 3 : 0], *scale = call->out[turned ? 4 : 1];
  side s = {};
  s.q = q && scale ? q->data : NULL;
  s.scale = (float *)data_of(scale);
  s.row_block = at.row_block;
  s.column_block = at.inner_block;
  s.down = at.row_count;
  s.across = at.inner_count;
  s.row_stride = at.row_stride;
  s.column_stride = at.inner_stride;
  s.random = call->quantize.counter + (turned ? (rows * columns + 3) / 4 : 0);
  s.how = how_of(&s, rows, columns);
  return s;
}

/// Finds the maxima of one side's blocks and, unless x is processed by tiles, computes the factors
/// and scales. With `both`, also writes the scales of the other side, whose blocks are the same.
/// The strips of block_maxima are as short as possible without making more blocks of threads than
/// can run at the same time.
template <typename T>
static eng_status find_scales(const T *x, const job *p, const side *s, const side *other, bool both)
{
  const int64_t blocks = s->down * s->across, across = parts(p->columns, MAXIMA_COLUMNS),
                warps = (int64_t)maxima_resident<T>() * cuda_multiprocessors() * (THREADS / 32);
  const int64_t strip = AHEAD * max((int64_t)2, parts(p->rows * across, warps * AHEAD)),
                pieces = parts(p->rows, strip * (THREADS / 32)) * across;
  if (blocks == 0) return ENG_OK;
  CUDA_TRY(cudaMemsetAsync(s->maxima, 0, (size_t)blocks * sizeof *s->maxima, cuda_stream()));
  if (pieces > 0 && !p->rule.given)
    block_maxima<T><<<(unsigned)pieces, THREADS, 0, cuda_stream()>>>(
      x, p->rows, p->columns, (int)strip, p->wide, s->row_block, s->column_block, s->across,
      p->rule.rule == ENG_SCALE_TORCHAO, s->maxima);
  if (!p->tiles)
    make_scales<<<(unsigned)parts(blocks, THREADS), THREADS, 0, cuda_stream()>>>(*s, *other, both,
                                                                                p->rule);
  return cuda_launched("quantize");
}

template <typename T, int E, bool SWIGLU> static eng_status launch_tiles(const T *x, const job *p)
{
  const int64_t tiles = parts(p->rows, TILE) * parts(p->columns, TILE);
  const unsigned blocks = capped_grid(tiles, tiles_resident<T, SWIGLU>());
  const int bytes = tile_bytes<T, SWIGLU>();
  auto kernel =
    p->rule.divides ? quantize_tiles<T, E, true, SWIGLU> : quantize_tiles<T, E, false, SWIGLU>;
  CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<blocks, TILE_THREADS, bytes, cuda_stream()>>>(x, (unsigned)tiles, *p);
  return ENG_OK;
}

template <typename T, int E> static eng_status write_codes(const T *x, const job *p, bool random)
{
  const int64_t count = p->rows * p->columns;
  cudaStream_t stream = cuda_stream();
  if (count == 0) return ENG_OK;
  if (p->tiles) {   // never true for f64
    if constexpr (sizeof(T) == 2 && E != 6)
      ENG_TRY((p->up ? launch_tiles<T, E, true>(x, p) : launch_tiles<T, E, false>(x, p)));
    else if constexpr (sizeof(T) < 8) ENG_TRY((launch_tiles<T, E, false>(x, p)));
  } else {
    unsigned blocks = (unsigned)parts(count, (E == 6 ? 8 : 4) * THREADS);
    auto kernel = random ? quantize_numbers<T, E, true> : quantize_numbers<T, E, false>;
    if (p->own.q) kernel<<<blocks, THREADS, 0, stream>>>(x, *p, false);
    if (p->turned.q) kernel<<<blocks, THREADS, 0, stream>>>(x, *p, true);
    if (p->amax)
      whole_amax<T>
        <<<(unsigned)(4 * cuda_multiprocessors()), THREADS, 0, stream>>>(x, count, p->amax);
  }
  return cuda_launched("quantize");
}

template <typename T> static eng_status quantize(const op_call *call, const job *p)
{
  const T *x = (const T *)call->in[0]->data;
  bool random = (call->quantize.flags & QUANTIZE_STOCHASTIC) != 0;
  if (p->own.maxima) ENG_TRY(find_scales(x, p, &p->own, &p->turned, p->same));
  if (p->turned.maxima && !p->same) ENG_TRY(find_scales(x, p, &p->turned, &p->own, false));
  if (call->quantize.format == ENG_e4m3) return write_codes<T, 3>(x, p, random);
  if (call->quantize.format == ENG_e5m2) return write_codes<T, 2>(x, p, random);
  return write_codes<T, 6>(x, p, false);
}

/// Describes the whole call before anything is launched.
static job job_of(const op_call *call)
{
  const tensor *x = call->in[0];
  job p = {};
  p.columns = x->shape[x->ndim - 1];
  p.rows = rows_of(x);
  p.own = side_of(call, false, p.rows, p.columns);
  p.turned = side_of(call, true, p.rows, p.columns);
  p.same = call->quantize.block_rows == call->quantize.block_columns;
  p.seed = rng_seed();
  p.amax = (uint32_t *)data_of(call->out[2]);
  p.rule.given = (const float *)data_of(call->in[1]);
  p.rule.largest = fp8_largest(call->quantize.format);
  p.rule.rule = (int)call->quantize.rule;
  p.rule.power_of_two = (call->quantize.flags & QUANTIZE_POW2) != 0;
  p.rule.eps = fp8_eps(p.rule.rule, call->quantize.eps);
  p.rule.margin = (int)call->quantize.margin;
  p.rule.divides = fp8_divides(p.rule.rule) && !p.rule.given;
  p.rule.limit = fp8_limit(call->quantize.block_rows, call->quantize.block_columns, x->dtype);

  p.wide = (uintptr_t)x->data % 16 == 0 && p.columns % EIGHT == 0;
  p.turned_wide = p.rows % 16 == 0;
  p.across = (unsigned)parts(p.columns, TILE);
  p.height = (int)p.rows;
  p.width = (int)p.columns;
  p.tiles = p.wide && x->count > 0 && p.rows < INT32_MAX - TILE && p.columns < INT32_MAX - TILE &&
            x->dtype != ENG_f64 && !(call->quantize.flags & QUANTIZE_STOCHASTIC) &&
            p.own.how != BY_BLOCK && p.turned.how != BY_BLOCK;
  return p;
}

/// Whether x is read only once: tiles compute the codes, and the factor is given or each tile finds
/// the factors of its own blocks.
static bool one_read(const op_call *call, const job *p)
{
  return p->tiles && (p->rule.given || (fits_tile(p->own.row_block, p->own.column_block) &&
                                        call->quantize.block_rows && call->quantize.block_columns));
}

static eng_status run(const op_call *call, job p)
{
  for (int k = 1; k <= 4; k += 3)   // clears both outputs' scales, if they are padded
    if (call->out[k] && call->out[k]->count >
                          (k == 1 ? p.own.down * p.own.across : p.turned.down * p.turned.across))
      CUDA_TRY(cudaMemsetAsync(call->out[k]->data, 0, (size_t)call->out[k]->count * sizeof(float),
                               cuda_stream()));
  if (p.amax) CUDA_TRY(cudaMemsetAsync(p.amax, 0, sizeof *p.amax, cuda_stream()));

  const int64_t own_blocks = p.own.down * p.own.across,
                blocks = own_blocks + p.turned.down * p.turned.across,
                bytes = one_read(call, &p) ? 0 : (2 * blocks + 1) * (int64_t)sizeof(float);
  uint32_t *maxima = NULL;
  if (bytes && !(maxima = (uint32_t *)scratch_take(bytes))) return ENG_ERR_MEMORY;
  if (maxima) {
    p.own.maxima = maxima;
    p.own.factor = (float *)(maxima + blocks);
    p.turned.maxima = p.own.maxima + (p.same ? 0 : own_blocks);
    p.turned.factor = p.own.factor + (p.same ? 0 : own_blocks);
  }
  eng_status status =
    with_format(call->in[0]->dtype, [&](auto t) { return quantize<decltype(t)>(call, &p); });
  if (maxima) scratch_give(maxima, bytes);
  return status;
}

extern "C" eng_status cuda_quantize(const op_call *call) { return run(call, job_of(call)); }

extern "C" eng_status cuda_swiglu_quantize(const op_call *call)
{
  const tensor *gate = call->in[0], *up = call->in[1];
  op_call codes = *call;
  codes.op = ENG_OP_quantize;
  codes.n_in = 2;
  codes.in[1] = call->in[2];
  job p = job_of(&codes);
  if (p.tiles && gate->dtype != ENG_f32 && call->quantize.format != ENG_FORMAT_E5M6 &&
      (uintptr_t)up->data % 16 == 0 && one_read(&codes, &p)) {
    p.up = up->data;
    return run(&codes, p);
  }
  tensor h = *gate;
  const int64_t bytes = h.count * eng_dtype_size(h.dtype);
  if (!(h.data = scratch_take(bytes))) return ENG_ERR_MEMORY;
  op_call swiglu = simple_call(ENG_OP_swiglu, gate, up, &h);
  codes.in[0] = &h;
  eng_status status = h.count > 0 ? cuda_swiglu(&swiglu) : ENG_OK;
  if (status == ENG_OK) status = run(&codes, job_of(&codes));
  scratch_give(h.data, bytes);
  return status;
}

// ------------------------------------------------------------------ dequantize

struct unscaling {
  const void  *q;
  const float *scale;
  void        *y;
  int64_t      rows, columns;
  fp8_scales   at;
  int          format, wide;
};

/// Each thread processes eight adjacent codes of a row.
template <typename T> __global__ static void __launch_bounds__(THREADS)
multiply_codes(const unscaling p)
{
  const int64_t groups = (p.columns + EIGHT - 1) / EIGHT,
                at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (at >= groups * p.rows) return;
  const int64_t r = at / groups, c = at % groups * EIGHT, first = r * p.columns + c;
  const int there = (int)min((int64_t)EIGHT, p.columns - c);
  float v[EIGHT];
  if (p.format == ENG_FORMAT_E5M6) {
    const uint32_t *from = (const uint32_t *)p.q + first / 8 * 3,
                   word[3] = {from[0], from[1], from[2]};
    uint16_t code[EIGHT];
    e5m6_unpack(code, word);
    for (int k = 0; k < EIGHT; k++) v[k] = e5m6_to_f32(code[k]);
  } else {
    uint2 eight = make_uint2(0, 0);
    const uint8_t *from = (const uint8_t *)p.q + first;
    if (p.wide) {
      eight = *(const uint2 *)from;
    } else {
#pragma unroll
      for (int k = 0; k < EIGHT; k++)
        if (k < there) (k < 4 ? eight.x : eight.y) |= (uint32_t)from[k] << k % 4 * 8;
    }
    for (int k = 0; k < EIGHT; k++) {
      uint8_t code = (uint8_t)((k < 4 ? eight.x : eight.y) >> k % 4 * 8);
      v[k] = p.format == ENG_e4m3 ? e4m3_to_f32(code) : e5m2_to_f32(code);
    }
  }
  const float *of_row = p.scale + r / p.at.row_block * p.at.row_stride;
  int64_t block = c / p.at.inner_block, next = (block + 1) * p.at.inner_block;
  pack<T, EIGHT> y;
  for (int k = 0; k < EIGHT; k++) {
    if (c + k == next && k < there) {
      block++;
      next += p.at.inner_block;
    }
    narrow(y.v[k], v[k] * of_row[block * p.at.inner_stride]);
  }
  T *to = (T *)p.y + first;
  if (p.wide) {
    enum { WORDS = sizeof(T) * EIGHT / 16 };
    union { pack<T, EIGHT> y; uint4 raw[WORDS]; } u;
    u.y = y;
#pragma unroll
    for (int i = 0; i < WORDS; i++) ((uint4 *)to)[i] = u.raw[i];
  } else {
    for (int k = 0; k < EIGHT; k++)
      if (k < there) to[k] = y.v[k];
  }
}

extern "C" eng_status cuda_dequantize(const op_call *call)
{
  const tensor *q = call->in[0], *y = call->out[0];
  unscaling p = {};
  p.q = q->data;
  p.scale = (const float *)call->in[1]->data;
  p.y = y->data;
  p.columns = y->shape[y->ndim - 1];
  p.rows = y->count / p.columns;
  p.at = fp8_scales_for(call->dequantize.block_rows, call->dequantize.block_columns, p.rows,
                        p.columns, NULL);
  p.format = call->dequantize.format == ENG_FORMAT_E5M6 ? (int)ENG_FORMAT_E5M6 : q->dtype;
  p.wide = p.columns % EIGHT == 0 && (uintptr_t)p.q % 8 == 0 && (uintptr_t)p.y % 16 == 0;
  unsigned blocks = (unsigned)parts(p.rows * parts(p.columns, EIGHT), THREADS);
  with_format(y->dtype, [&](auto t) {
    multiply_codes<decltype(t)><<<blocks, THREADS, 0, cuda_stream()>>>(p);
  });
  return cuda_launched("dequantize");
}
