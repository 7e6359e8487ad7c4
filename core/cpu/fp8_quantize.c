// The operations quantize and swiglu_quantize. Called through backend.kernel[]; owns nothing but
// scratch during a call.
//
// x is cut into tiles that stay in the second-level cache. Each block of a tile is measured, gets
// its scale from core/base/fp8_scale.h, and is written as codes. Measuring finds the largest
// magnitude by comparing bits, so a NaN is larger than any number. If a transposed copy is wanted,
// the same task produces it from the same tile, in blocks that may have another shape, provided
// that whole blocks of both results fit a tile; else it is made separately. Blocks too tall for a
// tile take two passes: the first measures them in pieces, the second writes their codes. Blocks of
// 1 x 128, the common case, have loops of their own. The other loops serve blocks of any width:
// they read one factor for each element of a row.
//
// These cases go to the reference kernels: f64; e5m6 in blocks of several rows, or in several
// blocks per row with a width that is not a multiple of 8; stochastic rounding of a transposed copy
// whose blocks are not square; an empty x; and calls that want no codes or no scales.
// swiglu_quantize runs all of swiglu and then quantize. It was no faster to quantize each row as
// soon as it was computed, because silu takes most of the time.
#include "base/fp8_layout.h"
#include "base/fp8_scale.h"
#include "base/rng.h"
#include "magnitude.h"
#include "philox.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"
#include "turn.h"

enum {
  STRIP = 1024,        // the most columns of a tile, unless blocks are wider or 1 x 128
  TALL = 256,          // the most rows of a block that fits a tile
  CHUNK = 64,          // rows of a piece of a taller block
  LINE = 64,           // bytes in a cache line
  TURN = LINE,         // rows transposed at a time
  TILE_ROW = 256,       // columns transposed at a time
  FAR = 1 << 21,       // a transposed copy of FAR bytes or more bypasses the caches
  ROW_BLOCKS = 16,     // how many blocks of 1 x 128 are measured and written at a time
  VERTICAL = 64,       // in blocks narrower than this, each column's maximum is found first
};

/// One of the two results: the codes and scales of x, or the codes and scales of its transpose. In
/// both, sizes and directions are in rows and columns of x.
typedef struct side {
  const op_call *call;
  const void *x;
  int      dtype;                          // of x
  int64_t  rows, columns;                  // of x
  int64_t  high, wide;                     // rows and columns of a block; never 0
  int64_t  across;                         // blocks in one row of blocks
  // Distances, in floats, from a block's scale to the scale of the block below and to the scale of
  // the block to the right.
  int64_t  scale_down, scale_across;
  uint8_t *q;
  float   *scale;
  bool     turned;
  uint8_t *turn_to;                        // square blocks: the transposed copy of q's bytes
  float   *turn_scale;
  int64_t  turn_down, turn_across;
  int64_t  pieces;                         // tall blocks: pieces of CHUNK rows in one block
  uint32_t *measured;                      // tall blocks: [all pieces][across] magnitudes, f32 bits
} side;

// Prefetches bytes that will be needed soon, because the hardware prefetcher stops at page
// boundaries. Addresses past the end of x are harmless.
VF_INLINE void fetch(const char *x, const int64_t bytes)
{
#pragma GCC unroll 8
  for (int64_t k = 0; k < bytes; k += LINE) __builtin_prefetch(x + k);
}

static void fetch_row(const side *s, int64_t r, int64_t c, int64_t columns)
{
  if (s->dtype == ENG_f32) fetch((const char *)s->x + 4 * (r * s->columns + c), 4 * columns);
  else fetch((const char *)s->x + 2 * (r * s->columns + c), 2 * columns);
}

// ------------------------------------------------------------------ measuring

// Sets top[c] to the larger of the magnitudes top[c] and |x[c]|, for c < columns. Compares bits.
static void compare_floats(float *top, const float *x, int64_t columns)
{
  FOR_VECTORS(c, columns, {
    vi here = magnitudes(vf_load_n(x + c, lanes));
    vf_store_n(top + c, (vf)vi_larger_((vi)vf_load_n(top + c, lanes), here), lanes);
  });
}

static void compare_halves(uint16_t *top, const uint16_t *x, int64_t columns)
{
  int64_t c = 0;
  for (; c + HALVES <= columns; c += HALVES)
    vh_store(top + c, vh_larger(vh_load(top + c), vh_load(x + c) & 0x7FFF));
  for (; c < columns; c++) {
    uint16_t here = x[c] & 0x7FFF;
    if (here > top[c]) top[c] = here;
  }
}

// Writes the largest magnitude of each block, as f32 bits, to `most`. Rows [r0, r0+rows) lie in one
// row of blocks; columns [c0, c0+columns) begin at a block's edge.
static void measure(const side *s, int64_t r0, int64_t rows, int64_t c0, int64_t columns,
                    uint32_t *most)
{
  int64_t blocks = (columns + s->wide - 1) / s->wide;
  if (s->wide >= VERTICAL) {
    for (int64_t j = 0; j < blocks; j++) {
      int64_t from = c0 + j * s->wide, end = smaller(from + s->wide, c0 + columns);
      uint32_t top = 0;
      for (int64_t r = r0; r < r0 + rows; r++) {
        if (rows > 1) fetch_row(s, r + 4, from, end - from);
        uint32_t here = largest_magnitude(s->x, s->dtype, r * s->columns + from, end - from);
        if (here > top) top = here;
      }
      most[j] = top;
    }
    return;
  }
  float top[STRIP];         // the largest magnitude of each column
  uint16_t halves[STRIP];   // the same, if x is f16 or bf16
  if (s->dtype == ENG_f32) memset(top, 0, (size_t)columns * sizeof *top);
  else memset(halves, 0, (size_t)columns * sizeof *halves);
  for (int64_t r = r0; r < r0 + rows; r++) {
    int64_t at = r * s->columns + c0;
    if (s->dtype == ENG_f32) compare_floats(top, (const float *)s->x + at, columns);
    else compare_halves(halves, (const uint16_t *)s->x + at, columns);
  }
  if (s->dtype != ENG_f32) floats_from(top, halves, s->dtype, 0, columns);
  for (int64_t j = 0; j < blocks; j++) {
    int32_t here = 0;
    for (int64_t c = j * s->wide; c < smaller((j + 1) * s->wide, columns); c++)
      here = (int32_t)f32_bits(top[c]) > here ? (int32_t)f32_bits(top[c]) : here;
    most[j] = (uint32_t)here;
  }
}

// Returns the largest magnitude of a block, ignoring NaNs. Used only for blocks that hold a NaN,
// which are rare.
static float without_nan(const side *s, int64_t r0, int64_t rows, int64_t c0, int64_t columns)
{
  float top = 0, x;
  for (int64_t r = r0; r < r0 + rows; r++)
    for (int64_t c = c0; c < c0 + columns; c++) {
      floats_from(&x, s->x, s->dtype, r * s->columns + c, 1);
      if (vf_bits(vf_set1(x))[0] < 0) x = -x;
      if (x > top) top = x;
    }
  return top;
}

// ------------------------------------------------------------------ scales and codes

// Returns the scale of the block at (r0, c0), whose largest magnitude is `most`.
static fp8_scale scale_of(const side *s, uint32_t most, int64_t r0, int64_t c0)
{
  const op_call *call = s->call;
  int rule = (int)call->quantize.rule;
  if (call->in[1]) {
    float factor = ((const float *)call->in[1]->data)[0];
    return (fp8_scale){factor, 1.0f / factor};
  }
  float amax = f32_from(most);
  if (most > 0x7F800000u && rule != ENG_SCALE_TORCHAO)
    amax =
      without_nan(s, r0, smaller(s->high, s->rows - r0), c0, smaller(s->wide, s->columns - c0));
  return fp8_scale_of(amax, fp8_largest(call->quantize.format), rule,
                      (call->quantize.flags & QUANTIZE_POW2) != 0,
                      fp8_eps(rule, call->quantize.eps), (int)call->quantize.margin,
                      fp8_limit(call->quantize.block_rows, call->quantize.block_columns, s->dtype));
}

// Computes the scales of `blocks` adjacent blocks in one row of blocks, the first at (r0, c0).
// Transformer Engine's rule, the default, is vectorized with the same operations as in
// fp8_scale_of.
static void scales_of(const side *s, const uint32_t *most, int64_t r0, int64_t c0, int64_t blocks,
                      float *scale, float *factor)
{
  const op_call *call = s->call;
  int64_t j = 0;
  if (call->quantize.rule == ENG_SCALE_TRANSFORMER_ENGINE && !call->in[1]) {
    vf one = vf_set1(1.0f), power = vf_set1(fp8_power(-(int)call->quantize.margin)),
       eps = vf_set1(fp8_eps(ENG_SCALE_TRANSFORMER_ENGINE, call->quantize.eps)),
       largest = vf_set1(fp8_largest(call->quantize.format)),
       limit = vf_set1(fp8_limit(call->quantize.block_rows, call->quantize.block_columns,
                                 s->dtype));
    vi kept = vi_set1(call->quantize.flags & QUANTIZE_POW2 ? (int32_t)0xFF800000 : -1);
    for (; j + VF_LANES <= blocks; j += VF_LANES) {
      vf amax = (vf)vi_load((const int32_t *)most + j);
      if (vm_any(vf_isnan(amax))) break;
      vm infinite = vf_isinf(amax);
      amax = vf_select(vf_lt(amax, eps), eps, amax);
      vf f = vf_mul(vf_div(largest, amax), power);
      f = (vf)vi_and((vi)vf_select(vf_isinf(f), limit, f), kept);
      f = vf_select(vm_or(infinite, vf_eq(amax, vf_zero())), one, f);
      vf_store(factor + j, f);
      vf_store(scale + j, vf_div(one, f));
    }
  }
  for (; j < blocks; j++) {
    fp8_scale one = scale_of(s, most[j], r0, c0 + j * s->wide);
    scale[j] = one.scale;
    factor[j] = one.factor;
  }
}

static bool divides(const side *s)
{ return fp8_divides((int)s->call->quantize.rule) && !s->call->in[1]; }
static int fraction_of(const side *s) { return s->call->quantize.format == ENG_e4m3 ? 3 : 2; }

// Returns whether every number of a block, multiplied by `factor` (divided if `by`), rounds to a
// number in the format's range. This holds for most blocks; their codes need no clamping. `most` is
// the block's largest magnitude. Returns false for a negative factor.
VF_INLINE bool is_within(uint32_t most, float factor, const int fraction, const bool by)
{
  float y = by ? f32_from(most) / factor : f32_from(most) * factor;
  return (int32_t)f32_bits(y) >= 0 && fp8_is_within(y, fraction);
}

// Computes the scales of the blocks in columns [c0, c0+columns) of the row of blocks that holds row
// r0. Stores the scales if `keep`, and writes the factor of each column to `factors`. If blocks are
// wider than STRIP, the columns are a single block with one factor, and only the first TILE entries
// of `factors` are written. Returns whether is_within holds for all blocks.
static bool lay_factors(const side *s, const uint32_t *most, int64_t r0, int64_t c0,
                        int64_t columns, bool keep, float *factors)
{
  int64_t i = r0 / s->high, j0 = c0 / s->wide, blocks = (columns + s->wide - 1) / s->wide;
  bool within = true, by = divides(s);
  float scale[STRIP], factor[STRIP];
  scales_of(s, most, i * s->high, c0, blocks, scale, factor);
  for (int64_t j = 0; j < blocks; j++) {
    within = within && is_within(most[j], factor[j], fraction_of(s), by);
    if (keep) {
      s->scale[i * s->scale_down + (j0 + j) * s->scale_across] = scale[j];
      if (s->turn_scale) s->turn_scale[i * s->turn_down + (j0 + j) * s->turn_across] = scale[j];
    }
    int64_t first = j * s->wide, end = smaller(first + s->wide, s->wide > STRIP ? TILE : columns);
    for (int64_t c = first; c < end; c++) factors[c] = factor[j];
  }
  return within;
}

static bool is_packed(const side *s) { return s->call->quantize.format == ENG_FORMAT_E5M6; }

static bool is_common(const side *s)   // whether row_of_blocks can quantize the side
{
  return !s->turned && s->high == 1 && s->wide == FP8_BLOCK && !s->turn_to && !is_packed(s) &&
         !(s->call->quantize.flags & QUANTIZE_STOCHASTIC);
}

VF_INLINE void put_codes(uint8_t *to, vf x, vf factor, int n, const int fraction, const bool by,
                         const bool within)
{
  vf y = by ? vf_div(x, factor) : vf_mul(x, factor);
  vi code = within ? vf_to_fp8_within(y, fraction) : vf_to_fp8(y, fraction, true);
  vf_put_bytes_n_(to, code, n);
}

#if defined(ENG_ISA_avx512)
// Converts 32 bf16 numbers to codes. is_within must be true for their blocks. Multiplies numbers at
// even positions by even_f and numbers at odd positions by odd_f; if `by` is true, divides instead.
VF_INLINE void pair_of_bf16(uint8_t *to, const uint16_t *x, vf even_f, vf odd_f, const int fraction,
                            const bool by)
{
  __m512i w = _mm512_loadu_si512(x), magnitude = _mm512_and_si512(w, _mm512_set1_epi16(0x7FFF));
  vf even = vf_even_bf16_(magnitude), odd = vf_odd_bf16_(magnitude);
  __m512i code = vf_pair_codes_(by ? vf_div(even, even_f) : vf_mul(even, even_f),
                                by ? vf_div(odd, odd_f) : vf_mul(odd, odd_f), w, fraction);
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi16_epi8(code));
}
#endif

// Calls f(.., dtype, fraction, by, within) with constant arguments, so that the loops over elements
// are compiled once for each combination.
#define FOR_BOUNDS(f, dtype, fraction, by, within, ...) \
  ((within) ? f(__VA_ARGS__, dtype, fraction, by, true) \
            : f(__VA_ARGS__, dtype, fraction, by, false))
#define FOR_RULES(f, dtype, fraction, by, within, ...)              \
  ((by) ? FOR_BOUNDS(f, dtype, fraction, true, within, __VA_ARGS__) \
        : FOR_BOUNDS(f, dtype, fraction, false, within, __VA_ARGS__))
#define FOR_FORMATS(f, dtype, fraction, by, within, ...)             \
  ((fraction) == 3 ? FOR_RULES(f, dtype, 3, by, within, __VA_ARGS__) \
                   : FOR_RULES(f, dtype, 2, by, within, __VA_ARGS__))
#define FOR_ALL(f, dtype, fraction, by, within, ...)                                 \
  ((dtype) == ENG_f32   ? FOR_FORMATS(f, ENG_f32, fraction, by, within, __VA_ARGS__) \
   : (dtype) == ENG_f16 ? FOR_FORMATS(f, ENG_f16, fraction, by, within, __VA_ARGS__) \
                        : FOR_FORMATS(f, ENG_bf16, fraction, by, within, __VA_ARGS__))

VF_INLINE void codes_typed(uint8_t *to, const void *x, int64_t at, const float *factors, int n,
                           const int dtype, const int fraction, const bool by, const bool within)
{
  int i = 0;
#if defined(ENG_ISA_avx512)
  const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
                odds = _mm512_or_si512(evens, _mm512_set1_epi32(1));
  for (; dtype == ENG_bf16 && within && i + HALVES <= n; i += HALVES) {
    vf a = vf_load(factors + i), b = vf_load(factors + i + VF_LANES);
    pair_of_bf16(to + i, (const uint16_t *)x + at + i, _mm512_permutex2var_ps(a, evens, b),
                 _mm512_permutex2var_ps(a, odds, b), fraction, by);
  }
#endif
  FOR_VECTORS(k, n - i, {
    put_codes(to + i + k, vf_read(x, dtype, at + i + k, lanes),
              load_padded(factors + i + k, lanes, 1), lanes, fraction, by, within);
  });
}

// Writes n <= TILE codes of row r, beginning with column c.
static void codes(const side *s, uint8_t *to, int64_t r, int64_t c, const float *factors,
                  bool within, int n)
{
  int64_t element = r * s->columns + c;
  if (s->call->quantize.flags & QUANTIZE_STOCHASTIC) {
    float buffer[TILE], y[TILE];
    const float *x = tile_load(buffer, s->x, s->dtype, element, n);
    uint32_t words[TILE + 4 * VF_LANES + 4];
    int64_t lead = element % 4;
    for (int i = 0; i < n + lead; i += 4 * VF_LANES)
      philox_vectors(words + i, rng_seed(),
                     (uint64_t)s->call->quantize.counter + (uint64_t)((element - lead + i) / 4));
    for (int i = 0; i < n; i++) y[i] = divides(s) ? x[i] / factors[i] : x[i] * factors[i];
    fp8_encode(to, (int)s->call->quantize.format, y, n, true, words + lead);
  } else {
    FOR_ALL(codes_typed, s->dtype, fraction_of(s), divides(s), within, to, s->x, element, factors,
            n);
  }
}

// Writes n <= TILE codes of row r in e5m6, beginning with column c. Three words hold eight codes.
static void pack_codes(const side *s, int64_t r, int64_t c, const float *factors, int n)
{
  float buffer[TILE];
  int32_t lanes[TILE];
  const float *x = tile_load(buffer, s->x, s->dtype, r * s->columns + c, n);
  bool by = divides(s);
  for (int i = 0; i < n; i += VF_LANES) {
    int m = n - i < VF_LANES ? n - i : VF_LANES;
    vf y = vf_load_n(x + i, m),
       f = vf_select(vm_first(m), vf_load_n(factors + i, m), vf_set1(1.0f));
    vi_store(lanes + i, vf_to_e5m6(by ? vf_div(y, f) : vf_mul(y, f)));
  }
  uint32_t *word = (uint32_t *)s->q + (r * s->columns + c) / 8 * 3;
  for (int i = 0; i < n; i += 8, word += 3) {
    uint16_t code[8];
    for (int k = 0; k < 8; k++) code[k] = (uint16_t)lanes[i + k];
    e5m6_pack(word, code);
  }
}

// Transposes the bytes of `from` [rows x columns], whose rows are TILE_ROW apart, into `to`
// [columns x rows]; rows <= TURN and columns <= TILE_ROW. Transposes all lines before it writes any
// of them to `to`: lines of `to` are far apart, and waiting for their memory must not delay the
// transposition.
static void turn(uint8_t *to, int64_t to_row, const uint8_t *from, int64_t rows, int64_t columns,
                 bool far)
{
  uint8_t lines[TILE_ROW][LINE] __attribute__((aligned(64)));
  for (int64_t c = 0; c < columns; c += 16) {   // the last round may transpose unused bytes
    int64_t r = 0;
    for (; r + 16 <= rows; r += 16)
      turn_bytes(lines[c] + r, LINE, from + r * TILE_ROW + c, TILE_ROW);
    for (; r < rows; r++)
      for (int j = 0; j < 16; j++) lines[c + j][r] = from[r * TILE_ROW + c + j];
  }
  if (rows < LINE) {
    for (int64_t c = 0; c < columns; c++) memcpy(to + c * to_row, lines[c], (size_t)rows);
  } else if (far) {
    for (int64_t c = 0; c < columns; c++) stream(to + c * to_row, lines[c], LINE);
    stream_end();
  } else {
    for (int64_t c = 0; c < columns; c++) memcpy(to + c * to_row, lines[c], LINE);
  }
}

// Writes the codes of rows [r0, r0+rows), columns [c0, c0+columns). factors, within: the results of
// lay_factors for these columns.
static void write(const side *s, int64_t r0, int64_t rows, int64_t c0, int64_t columns,
                  const float *factors, bool within)
{
  bool one = s->wide > STRIP;   // one factor for the whole row
  if (!s->turned && !s->turn_to) {
    for (int64_t r = r0; r < r0 + rows; r++)
      for (int64_t c = 0; c < columns; c += TILE) {
        const float *own = one ? factors : factors + c;
        int n = (int)smaller(TILE, columns - c);
        if (is_packed(s)) pack_codes(s, r, c0 + c, own, n);
        else codes(s, s->q + r * s->columns + c0 + c, r, c0 + c, own, within, n);
      }
    return;
  }
  uint8_t tile[TURN][TILE_ROW] __attribute__((aligned(64))), *to = s->turned ? s->q : s->turn_to;
  for (int64_t r = r0; r < r0 + rows; r += TURN)
    for (int64_t c = 0; c < columns; c += TILE_ROW) {
      int64_t deep = smaller(TURN, r0 + rows - r), n = smaller(TILE_ROW, columns - c);
      for (int64_t i = 0; i < deep; i++) {
        fetch_row(s, r + i + 1, c0 + c, n);
        codes(s, tile[i], r + i, c0 + c, one ? factors : factors + c, within, (int)n);
        if (!s->turned) memcpy(s->q + (r + i) * s->columns + c0 + c, tile[i], (size_t)n);
      }
      turn(to + (c0 + c) * s->rows + r, s->rows, tile[0], deep, n, s->rows * s->columns >= FAR);
    }
}

// ------------------------------------------------------------------ 1 x 128, the common case

VF_INLINE void block_typed(uint8_t *to, const void *x, int64_t at, float factor, const int dtype,
                           const int fraction, const bool by, const bool within)
{
  vf f = vf_set1(factor);
#if defined(ENG_ISA_avx512)
  if (dtype == ENG_bf16 && within) {
#pragma GCC unroll 4
    for (int v = 0; v < FP8_BLOCK; v += 2 * VF_LANES)
      pair_of_bf16(to + v, (const uint16_t *)x + at + v, f, f, fraction, by);
    return;
  }
#endif
#pragma GCC unroll 8
  for (int v = 0; v < FP8_BLOCK; v += VF_LANES)
    put_codes(to + v, vf_read(x, dtype, at + v, VF_LANES), f, VF_LANES, fraction, by, within);
}

// Quantizes `blocks` whole blocks of row r from column c0 on. Returns their largest magnitude as
// f32 bits. ROW_BLOCKS blocks at a time are measured, then scaled, then written while they are in
// the first-level cache. Working on several blocks hides the latency of each step. dtype, fraction
// and by are constants where this is inlined.
VF_INLINE uint32_t row_typed(const side *s, int64_t r, int64_t c0, int64_t blocks, const int dtype,
                             const int fraction, const bool by, const bool within)
{
  (void)within;
  const int size = dtype == ENG_f32 ? 4 : 2;
  // How many elements ahead to prefetch: to the next blocks of a long row, else to the next row.
  int64_t next = blocks > ROW_BLOCKS ? ROW_BLOCKS * FP8_BLOCK : s->columns;
  uint32_t top = 0, most[ROW_BLOCKS];
  float scales[ROW_BLOCKS], factors[ROW_BLOCKS];
  for (int64_t done = 0; done < blocks; done += ROW_BLOCKS) {
    int n = (int)smaller(ROW_BLOCKS, blocks - done);
    int64_t c = c0 + done * FP8_BLOCK, at = r * s->columns + c;
    float *scale = s->scale + r * s->scale_down + c / FP8_BLOCK * s->scale_across;
    for (int j = 0; j < n; j++) {
      most[j] = largest_magnitude(s->x, dtype, at + j * FP8_BLOCK, FP8_BLOCK);
      if (most[j] > top) top = most[j];
    }
    scales_of(s, most, r, c, n, scales, factors);
    for (int j = 0; j < n; j++) scale[j * s->scale_across] = scales[j];
    for (int j = 0; j < n; j++) {
      fetch((const char *)s->x + (at + j * FP8_BLOCK + next) * size, FP8_BLOCK * size);
      if (is_within(most[j], factors[j], fraction, by))
        block_typed(s->q + at + j * FP8_BLOCK, s->x, at + j * FP8_BLOCK, factors[j], dtype,
                    fraction, by, true);
      else
        block_typed(s->q + at + j * FP8_BLOCK, s->x, at + j * FP8_BLOCK, factors[j], dtype,
                    fraction, by, false);
    }
  }
  return top;
}

static uint32_t row_of_blocks(const side *s, int64_t r, int64_t c0, int64_t blocks)
{ return FOR_ALL(row_typed, s->dtype, fraction_of(s), divides(s), true, s, r, c0, blocks); }

// ------------------------------------------------------------------ tiles

typedef struct work {
  side     sides[2];
  int      n;
  int64_t  high, wide, across;      // rows and columns per task, and tasks per row of tasks
  uint32_t *tops;                   // the largest magnitude in each task, as f32 bits
} work;

static void tile_task(const void *context, int64_t task)
{
  const work *w = context;
  uint32_t most[STRIP], top = 0;
  float factors[STRIP];
  int64_t r0 = task / w->across * w->high, c0 = task % w->across * w->wide;
  for (int k = 0; k < w->n; k++) {
    const side *s = &w->sides[k];
    int64_t end = smaller(r0 + w->high, s->rows), columns = smaller(w->wide, s->columns - c0);
    bool common = is_common(s);
    for (int64_t r = r0; r < end; r += s->high) {
      int64_t rows = smaller(s->high, end - r), done = 0;
      if (common) {
        done = columns / FP8_BLOCK * FP8_BLOCK;
        uint32_t here = row_of_blocks(s, r, c0, done / FP8_BLOCK);
        if (here > top) top = here;
      }
      if (done == columns) continue;
      measure(s, r, rows, c0 + done, columns - done, most);
      for (int64_t j = 0; k == 0 && j * s->wide < columns - done; j++)
        top = most[j] > top ? most[j] : top;
      bool within = lay_factors(s, most, r, c0 + done, columns - done, true, factors);
      write(s, r, rows, c0 + done, columns - done, factors, within);
    }
  }
  w->tops[task] = top;
}

// Processes one piece of CHUNK rows of tall blocks. The first pass measures the pieces. The second
// pass, with `writes`, writes scales and codes; in s->measured, the entry of a block's first piece
// then holds the largest magnitude of the whole block.
static void tall_piece(const side *s, int64_t task, bool writes)
{
  float factors[STRIP];
  int64_t i = task / s->pieces, r0 = i * s->high + task % s->pieces * CHUNK,
          end = smaller(smaller((i + 1) * s->high, r0 + CHUNK), s->rows);
  int64_t strip = s->wide > STRIP ? s->wide : STRIP / s->wide * s->wide;
  for (int64_t c = 0; r0 < end && c < s->columns; c += strip) {
    int64_t columns = smaller(strip, s->columns - c);
    uint32_t *most = s->measured + (writes ? i * s->pieces : task) * s->across + c / s->wide;
    if (writes) {
      bool within = lay_factors(s, most, r0, c, columns, task % s->pieces == 0, factors);
      write(s, r0, end - r0, c, columns, factors, within);
    } else {
      measure(s, r0, end - r0, c, columns, most);
    }
  }
}

static void measure_task(const void *s, int64_t task) { tall_piece(s, task, false); }
static void write_task(const void *s, int64_t task) { tall_piece(s, task, true); }

// Quantizes a side with tall blocks. Raises *top to the side's largest magnitude, as f32 bits.
static eng_status run_tall(side *s, bool together, uint32_t *top)
{
  s->pieces = (smaller(s->high, s->rows) + CHUNK - 1) / CHUNK;
  int64_t tasks = ceiling(s->rows, s->high) * s->pieces;
  SCRATCH(uint32_t, measured, tasks * s->across);
  memset(measured, 0, (size_t)(tasks * s->across) * sizeof *measured);
  s->measured = measured;
  run_tasks(tasks, together, measure_task, s);
  for (int64_t task = 0; task < tasks; task++)
    for (int64_t j = 0; j < s->across; j++) {
      uint32_t here = s->measured[task * s->across + j],
               *first = &s->measured[task / s->pieces * s->pieces * s->across + j];
      if (here > *first) *first = here;
      if (here > *top) *top = here;
    }
  run_tasks(tasks, together, write_task, s);
  return ENG_OK;
}

// Quantizes all sides of `w` in one pass; their blocks must fit tiles. Raises *top to the largest
// magnitude of all tiles, as f32 bits.
static eng_status run_tiles(work *w, bool together, uint32_t *top)
{
  const side *s = &w->sides[0];
  w->across = ceiling(s->columns, w->wide);
  int64_t tasks = ceiling(s->rows, w->high) * w->across;
  SCRATCH(uint32_t, tops, tasks);
  w->tops = tops;
  run_tasks(tasks, together, tile_task, w);
  for (int64_t t = 0; t < tasks; t++) *top = w->tops[t] > *top ? w->tops[t] : *top;
  return ENG_OK;
}

// ------------------------------------------------------------------ the operations

static side side_of(const op_call *call, bool turned)
{
  const tensor *x = call->in[0];
  side s = {.call = call, .x = x->data, .dtype = x->dtype, .columns = x->shape[x->ndim - 1],
            .turned = turned};
  s.rows = s.columns ? x->count / s.columns : 0;
  s.q = call->out[turned ? 3 : 0]->data;
  s.scale = call->out[turned ? 4 : 1]->data;
  fp8_scales at = fp8_scales_for(call->quantize.block_rows, call->quantize.block_columns,
                                 turned ? s.columns : s.rows, turned ? s.rows : s.columns, NULL);
  if (turned) at = fp8_scales_turned(at);
  s.high = at.row_block, s.wide = at.inner_block, s.across = at.inner_count;
  s.scale_down = at.row_stride, s.scale_across = at.inner_stride;
  return s;
}

// Chooses the rows and columns of a tile so that whole blocks of all sides fill it. Returns false
// if there is no such tile.
static bool fit(work *w)
{
  const side *a = &w->sides[0], *b = &w->sides[w->n - 1];
  int64_t high = a->high > b->high ? a->high : b->high,
          wide = a->wide > b->wide ? a->wide : b->wide;
  int64_t low = a->high + b->high - high, narrow = a->wide + b->wide - wide;
  if (high > TALL && a->rows > TALL) return false;
  if (w->n == 1 && is_common(a)) {   // 1 x 128: a tile is 16 rows
    w->high = 16;
    w->wide = a->columns;
    return true;
  }
  if (high % low || wide % narrow || (w->n == 2 && wide > STRIP)) return false;
  // e5m6: a tile is one row, which is work enough for a task, because packing codes takes long
  w->high = is_packed(a) ? 1 : high >= TALL / 2 ? high : TALL / 2 / high * high;
  w->wide = wide >= STRIP ? wide : STRIP / wide * wide;
  return true;
}

KERNEL(quantize)
{
  const tensor *x = call->in[0];
  bool turned = call->out[3] != NULL, together = x->count >= PARALLEL_ELEMENTS,
       square = call->quantize.block_rows == call->quantize.block_columns;
  if (!dtype_is_fast(x->dtype) || !call->out[0] || !call->out[1] || x->count == 0 ||
      (turned && !square && call->quantize.flags & QUANTIZE_STOCHASTIC))
    return forward_to_reference(call);
  for (int k = 1; k < 5; k += 3)
    // Clears the scales (outputs 1 and 4), because their padding is not written below.
    if (call->out[k]) memset(call->out[k]->data, 0, (size_t)call->out[k]->count * sizeof(float));
  work w = {.n = 1, .sides = {side_of(call, false)}};
  if (turned) {
    side t = side_of(call, true);
    if (square) {
      w.sides[0].turn_to = t.q;
      w.sides[0].turn_scale = t.scale;
      w.sides[0].turn_down = t.scale_down;
      w.sides[0].turn_across = t.scale_across;
    } else {
      w.sides[w.n++] = t;
    }
  }
  const side *s = &w.sides[0];
  if (is_packed(s) && (s->high != 1 || (s->wide % 8 && s->wide < s->columns)))
    return forward_to_reference(call);
  uint32_t top = 0;
  if (fit(&w)) {
    ENG_TRY(run_tiles(&w, together, &top));
  } else {
    for (int k = 0; k < w.n; k++) {
      work one = {.n = 1, .sides = {w.sides[k]}};
      if (fit(&one)) ENG_TRY(run_tiles(&one, together, &top));
      else ENG_TRY(run_tall(&one.sides[0], together, &top));
    }
  }
  if (call->out[2])
    ((float *)call->out[2]->data)[0] = top > 0x7F800000u ? f32_from(0x7FC00000u) : f32_from(top);
  return ENG_OK;
}

KERNEL(swiglu_quantize)
{
  tensor h = *call->in[0];
  SCRATCH(char, room, h.count * eng_dtype_size(h.dtype));
  h.data = room;
  op_call swiglu = {.op = ENG_OP_swiglu, .n_in = 2, .n_out = 1, .in = {call->in[0], call->in[1]},
                    .out = {&h}},
          codes = *call;
  codes.op = ENG_OP_quantize, codes.n_in = 2, codes.in[0] = &h, codes.in[1] = call->in[2];
  ENG_TRY(backend_cpu()->kernel[ENG_OP_swiglu](&swiglu));
  return ISA_NAME(cpu_quantize)(&codes);
}
