// The operations mx_quantize and mx_dequantize. Called through backend.kernel[]; owns nothing but
// scratch during a call.
//
// A task takes a band of rows and quantizes it tile by tile. It finds the largest magnitude of each
// block in the tile, computes the scales as in core/base/mx.h, and writes codes or bf16 values
// straight to the result. If codes must be transposed, or packed in a way that mx_encode.h does not
// offer (strip_packs), they go to a buffer first.
//
// If blocks are square, the transposed copy is the transpose of this buffer. Otherwise the
// transposed copy is quantized from tiles of x: quantize_columns takes them as they are, and
// quantize_tile takes their transposes. With a Hadamard transform, these tiles are transformed
// first (hadamard.h). One task makes both copies of a band, unless there is such a transform or the
// blocks have several rows and are not square.
//
// NVFP4 needs the amax of x before its scales. Unless the caller gives this amax, an earlier pass
// over x finds it. mx_fitted.h has the rules quest and ms_eden. The reference kernels compute calls
// in f64, and calls with `ties`, with `sr_rule`, or with an average and a transposed copy that is
// quantized separately.
#include "base/mx.h"
#include "base/rng.h"
#include "device/rotated_copy.h"
#include "hadamard.h"
#include "magnitude.h"
#include "mx_encode.h"
#include "mx_fitted.h"
#include "philox.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"
#include "turn.h"

#include <math.h>

enum {
  MOST = 128,          // the longest side of a block; the most columns of a tile of several rows
  WIDE = 2048,         // the most columns of a tile of one row
  BAND = 64,           // rows of a task: as many whole blocks as fit, but at least one
};

// If a scale is at least this, its product with the value of any code of any format is exact in
// bf16.
#define EXACT_UNIT 0x1p-110f

// ------------------------------------------------------------------ what x holds

/// A summary of some elements. `top` is the largest magnitude other than NaN, as f32 bits. `nan` is
/// the number of NaN elements or, from rotated_survey_task, 1 if there are any and 0 if not.
typedef struct found {
  uint32_t top;
  int64_t  nan;
} found;

static void add_element(found *all, float x)
{
  uint32_t bits = f32_bits(x) & 0x7FFFFFFFu;
  if (bits > INFINITE) all->nan++;
  else if (bits > all->top) all->top = bits;
}

// Updates *all with n elements of x, from element `first` on.
static void add_elements(found *all, const void *x, int dtype, int64_t first, int64_t n)
{
  uint32_t top = largest_magnitude(x, dtype, first, n);
  if (top > INFINITE)
    for (int64_t i = 0; i < n; i++) add_element(all, get(x, dtype, first + i));
  else if (top > all->top) all->top = top;
}

static found total(const found *parts, int64_t n)
{
  found all = {0};
  for (int64_t k = 0; k < n; k++) {
    if (parts[k].top > all.top) all.top = parts[k].top;
    all.nan += parts[k].nan;
  }
  return all;
}

typedef struct survey { const tensor *x; found *part; } survey;
enum { PART = 16384 };   // elements of a task
static void survey_task(const void *context, int64_t t)
{
  const survey *s = context;
  add_elements(&s->part[t], s->x->data, s->x->dtype, t * PART,
               smaller(PART, s->x->count - t * PART));
}

// ------------------------------------------------------------------ tiles

/// One of the two results: the quantized x, or the quantized transpose of x. `rows` and `columns`
/// are the result's.
typedef struct side {
  const op_call *call;
  const void *x;
  int      dtype;            // of x
  int64_t  rows, columns;
  int64_t  down, wide;       // blocks along a column and along a row of the result
  int64_t  band;             // rows of x in a task
  uint8_t *scale, *q;
  uint8_t *turn_scale, *turn_q;   // square blocks: transposes of scale and q; or NULL
  uint64_t random;           // the Philox block of element 0
  mx_format format;
  float    encode, amax;     // encode: NVFP4's S (base/mx.h); amax: the tensor's
  float    factor;           // multiplies elements before rounding (ops.def); 1 if not given
  found   *found;            // [tasks], or NULL if an earlier pass has surveyed x
  const float *average;      // in the layout of x, or NULL
  const rotation *rotation;  // the Hadamard transform of the transposed x, or NULL
  bool     packed;           // strips write packed codes, as the result needs them
} side;

// Finds the largest magnitude of each block in one row of x. Compares bits, so NaN is above every
// number.
VF_INLINE void measure_typed(float *amax, const void *x, const int dtype, int64_t first,
                             int columns, const int wide)
{
  int j = 0, c = 0;
  if (dtype != ENG_f32 && (wide == 16 || wide == 32))
    for (; c + 16 * HALVES <= columns; c += 16 * HALVES) {
      uint16_t top[HALVES];
      vh most = largest_of_sixteens((const uint16_t *)x + first + c);
      vh_store(top, wide == 16 ? most : vh_larger_neighbours(most, most));
      for (int k = 0; k < 16 * HALVES / wide; k += VF_LANES, j += VF_LANES)
        vf_store(amax + j, vf_read(top, dtype, k, VF_LANES));
    }
  for (; c + wide <= columns; j++, c += wide)
    amax[j] = f32_from(largest_magnitude(x, dtype, first + c, wide));
  if (c < columns) amax[j] = f32_from(largest_magnitude(x, dtype, first + c, columns - c));
}

static void measure_row(float *amax, const void *x, int dtype, int64_t first, int columns,
                        int wide)
{
#define MEASURE(wide)                                                               \
  if (dtype == ENG_bf16) measure_typed(amax, x, ENG_bf16, first, columns, wide);    \
  else if (dtype == ENG_f32) measure_typed(amax, x, ENG_f32, first, columns, wide); \
  else measure_typed(amax, x, ENG_f16, first, columns, wide)
  if (wide == 16) { MEASURE(16); }
  else if (wide == 32) { MEASURE(32); }
  else { MEASURE(wide); }
#undef MEASURE
}

// Finds the largest magnitude in each of n columns of x, n <= MOST. Compares bits, so NaN is above
// every number. A column has `deep` elements. Writes whole vectors, so amax needs room for n
// rounded up to whole vectors.
static void largest_in_columns(float *amax, const void *x, int dtype, int64_t first, int64_t stride,
                               int deep, int n)
{
  uint16_t halves[MOST];
  int c = 0;
  for (; dtype != ENG_f32 && c + HALVES <= n; c += HALVES) {
    vh top = {0};
    const uint16_t *column = (const uint16_t *)x + first + c;
    for (int k = 0; k < deep; k++) top = vh_larger(top, vh_load(column + k * stride) & 0x7FFF);
    vh_store(halves + c, top);
  }
  for (int done = 0; done < c; done += VF_LANES)
    vf_store(amax + done, vf_read(halves, dtype, done, VF_LANES));
  for (; c < n; c += VF_LANES) {
    vi top = {0};
    for (int k = 0; k < deep; k++)
      top = vi_larger_(top, magnitudes(vf_read(x, dtype, first + k * stride + c,
                                                (int)smaller(VF_LANES, n - c))));
    vf_store(amax + c, (vf)top);
  }
}

// Returns the amax of a block in a tile that holds NaN. If the block itself holds NaN, its amax is
// NaN or, with `finite`, the largest of its other magnitudes. Updates *all with the block's
// elements.
static float amax_of_block(found *all, const void *x, int dtype, int64_t first, int64_t stride,
                             int rows, int columns, bool finite)
{
  found block = {0};
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) add_element(&block, get(x, dtype, first + r * stride + c));
  if (block.top > all->top) all->top = block.top;
  all->nan += block.nan;
  return f32_from(finite || !block.nan ? block.top : 0x7FC00000u);
}

/// Computes mx_scale for a vector of blocks. If an amax is NaN, very large, or very small (also 0),
/// returns false and no codes.
VF_INLINE bool mx_scales(vi amax, mx_format f, int64_t rule, vi *code)
{
  vi bits = amax;
  if (rule == ENG_MX_EVEN) bits = vi_add(bits, vi_set1(1 << (22 - f.fraction)));
  if (rule == ENG_MX_RCEIL) bits = (vi)vf_mul((vf)bits, vf_set1(1.0f / f.largest));
  vm large = vi_gt(amax, vi_set1(0x7E000000)), small = vi_gt(vi_set1(0x01000000), bits);
  if (vm_any(vm_or(large, small))) return false;
  if (rule == ENG_MX_CEIL || rule == ENG_MX_RCEIL) bits = vi_add(bits, vi_set1(0x7FFFFF));
  vi exponent = vi_shr(bits, 23);
  if (rule != ENG_MX_RCEIL) exponent = vi_sub(exponent, vi_set1(f.emax));
  *code = vi_larger_(exponent, vi_set1(0));
  return true;
}

// Computes for each of n blocks the code of its scale (`code`), the value of this code (`unit`),
// and the number by which the block's elements are multiplied before rounding (`factor`). amax,
// factor and unit have room for whole vectors. nvfp4_wanted (base/mx.h) explains `stretch`.
static void scales_of(const side *s, const float *amax, int n, uint8_t *code, float *factor,
                      float *unit, float stretch)
{
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  if (!mx_is_nvfp4(a->rule)) {
    for (int k = 0; k < n; k += VF_LANES) {
      int lanes = (int)smaller(VF_LANES, n - k);
      vi codes;
      if (mx_scales((vi)vf_load(amax + k), s->format, a->rule, &codes)) {
        vf_put_bytes_n_(code + k, codes, lanes);
        vf inverse = (vf)vi_shl(vi_sub(vi_set1(254), codes), 23);
        vf_store(factor + k, vf_mul(inverse, vf_set1(s->factor)));
        vf_store(unit + k, (vf)vi_larger_(vi_shl(codes, 23), vi_set1(0x00400000)));
        continue;
      }
      for (int l = k; l < k + lanes; l++) {
        code[l] = mx_scale(amax[l], s->format, (int)a->rule, (a->flags & MX_FINITE) != 0);
        factor[l] = mx_inverse(code[l]) * s->factor;
        unit[l] = ue8m0_to_f32(code[l]);
      }
    }
    return;
  }
  vf by = vf_set1(s->encode * (1.0f / 6.0f)), back = vf_set1(1.0f / s->encode),
     most = vf_from_bits(vi_set1(0x7F7FFFFF));
  for (int k = 0; k < n; k += VF_LANES) {   // computes nvfp4_scale and nvfp4_factor
    int lanes = (int)smaller(VF_LANES, n - k);
    vf top = vf_load(amax + k), wanted = vf_mul(top, by);
    if (mx_is_four_over_six(a->rule))
      wanted = vf_mul(vf_mul(vf_div(top, vf_set1(6)), vf_set1(s->encode)), vf_set1(stretch));
    vf scale;
    vi codes;
    encode(wanted, vf_zero(), NEAREST, true, mx_format_of(ENG_e4m3), &codes, &scale);
    vf_put_bytes_n_(code + k, codes, lanes);
    vf inverse = vf_div(vf_set1(1.0f), vf_mul(scale, back));
    vf_store(unit + k, scale);
    vf_store(factor + k, vf_mul(vf_select(vf_gt(inverse, most), most, inverse),
                                vf_set1(s->factor)));
  }
}

// Returns whether all n numbers are at least `least`. Returns false if one of them is NaN.
static bool all_at_least(const float *x, int n, float least)
{
  vf bound = vf_set1(least);
  vm all = vm_first(VF_LANES);
  for (int i = 0; i < n; i += VF_LANES)
    all = vm_and(all, vf_ge(load_padded(x + i, (int)smaller(VF_LANES, n - i), least), bound));
  return !vm_any(vm_not(all));
}

// Computes the field `powers` of a strip of n blocks.
static bool are_powers(const side *s, const float *factor, const float *unit, int n)
{
  return !mx_is_nvfp4(s->call->mx_quantize.rule) && s->factor == 1 &&
         all_at_least(factor, n, 0x1p-126f) && all_at_least(unit, n, 0x1p-100f);
}

// Rounds the elements of a vector to e2m1 and returns nvfp4_error of each.
VF_INLINE vf errors_of(vf x, vf factor, vf unit, vf amax, bool squared)
{
  vf value;
  vi code;
  encode(vf_mul(x, factor), vf_zero(), NEAREST, true, mx_format_of(ENG_FORMAT_E2M1), &code,
         &value);
  vf off = vf_sub(vf_div(vf_mul(vf_mul(value, unit), amax), vf_set1(1536)), x);
  return squared ? vf_mul(off, off) : vf_abs(off);
}

// Does the work of scales_of under the rule "four over six", which chooses between two scales for
// each block. The n blocks lie side by side in `rows` rows of x.
static void choose_scales(const side *s, const void *x, int64_t first, int64_t stride, int rows,
                          int columns, const float *amax, int n, uint8_t *code, float *factor,
                          float *unit)
{
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  int wide = (int)a->block_columns;
  uint8_t four_code[WIDE];
  float four_factor[WIDE], four_unit[WIDE], sum[2][MOST * MOST / 2],
        off[MOST];
  scales_of(s, amax, n, code, factor, unit, 1);
  scales_of(s, amax, n, four_code, four_factor, four_unit, 1.5f);
  for (int four = 0; four < 2; four++) {
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < n; j++) {
        int c0 = j * wide, deep = (int)smaller(wide, columns - c0);
        vf by = vf_set1((four ? four_factor : factor)[j]),
           scale = vf_set1((four ? four_unit : unit)[j]);
        for (int c = 0; c < deep; c += VF_LANES) {
          vf elements = vf_read(x, s->dtype, first + r * stride + c0 + c,
                                 (int)smaller(VF_LANES, deep - c));
          vf_store(off + c, errors_of(elements, by, scale, vf_set1(s->amax),
                                      a->rule == ENG_MX_FOUR_OVER_SIX_MSE));
        }
        float error = 0;
        for (int c = 0; c < deep; c++) error += off[c];
        sum[four][r * n + j] = error;
      }
    for (int half = MOST / 2; half > 0; half /= 2)
      for (int i = 0; i < half * n && i + half * n < rows * n; i++)
        sum[four][i] += sum[four][i + half * n];
  }
  for (int j = 0; j < n; j++)
    if (sum[1][j] < sum[0][j])
      code[j] = four_code[j], factor[j] = four_factor[j], unit[j] = four_unit[j];
}

// Does the work of choose_scales for n blocks. Each block is `deep` elements of one column of s->x,
// which is a tile.
static void choose_columns(const side *s, int64_t first, int deep, const float *amax, int n,
                           uint8_t *code, float *factor, float *unit)
{
  uint8_t four_code[MOST];
  float four_factor[MOST], four_unit[MOST];
  bool squared = s->call->mx_quantize.rule == ENG_MX_FOUR_OVER_SIX_MSE;
  scales_of(s, amax, n, code, factor, unit, 1);
  scales_of(s, amax, n, four_code, four_factor, four_unit, 1.5f);
  for (int c = 0; c < n; c += VF_LANES) {
    vf six = vf_zero(), four = vf_zero(), whole = vf_set1(s->amax), by = vf_load(factor + c),
       scale = vf_load(unit + c), by4 = vf_load(four_factor + c), scale4 = vf_load(four_unit + c);
    for (int k = 0; k < deep; k++) {
      vf value = vf_read(s->x, s->dtype, first + k * MOST + c, (int)smaller(VF_LANES, n - c));
      six = vf_add(six, errors_of(value, by, scale, whole, squared));
      four = vf_add(four, errors_of(value, by4, scale4, whole, squared));
    }
    vm better = vf_lt(four, six);
    vf_store(factor + c, vf_select(better, by4, by));
    vf_store(unit + c, vf_select(better, scale4, scale));
    float fours[VF_LANES], sixes[VF_LANES];
    vf_store(fours, four), vf_store(sixes, six);
    for (int k = 0; k < VF_LANES && c + k < n; k++)
      if (fours[k] < sixes[k]) code[c + k] = four_code[c + k];
  }
}

// Quantizes rows [r0, r0 + rows) and columns [c0, c0 + columns) of the result. The rows lie in one
// row of blocks, and the columns begin at a block's edge. Either rows = 1 and columns <= WIDE, or
// both are at most MOST. In x, element (r0, c0) has the index `first`, and rows are `stride`
// elements apart. Stores the scales, and writes the elements to `to`, whose rows are `line` bytes
// apart.
static void quantize_tile(const side *s, found *all, const void *x, int64_t first, int64_t stride,
                          int64_t r0, int rows, int64_t c0, int columns, uint8_t *to, int64_t line)
{
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  float amax[WIDE], factor[WIDE], unit[WIDE];
  int wide = (int)a->block_columns, blocks = (columns + wide - 1) / wide;
  int nan = 0;
  if (rows == 1) measure_row(amax, x, s->dtype, first, columns, wide);
  else {
    largest_in_columns(unit, x, s->dtype, first, stride, rows, columns);
    measure_row(amax, unit, ENG_f32, 0, columns, wide);
  }
  uint32_t top = largest_of_floats(amax, blocks);
  for (int j = blocks; j % VF_LANES; j++) amax[j] = 1;       // unused lanes of a vector
  if (top > INFINITE) {
    nan = 1;
    for (int j = 0; j < blocks; j++)
      amax[j] = amax_of_block(all, x, s->dtype, first + j * wide, stride, rows,
                              (int)smaller(wide, columns - j * wide), a->flags & MX_FINITE);
  } else if (top > all->top) {
    all->top = top;
  }
  int64_t i = r0 / a->block_rows, j0 = c0 / wide;
  uint8_t *code = s->scale + i * s->wide + j0;
  if (mx_is_four_over_six(a->rule))
    choose_scales(s, x, first, stride, rows, columns, amax, blocks, code, factor, unit);
  else scales_of(s, amax, blocks, code, factor, unit, 1);
  for (int j = 0; s->turn_scale && j < blocks; j++) s->turn_scale[(j0 + j) * s->down + i] = code[j];
  nan |= !all_at_least(factor, blocks, -INFINITY);
  bool exact = all_at_least(unit, blocks, EXACT_UNIT), powers = are_powers(s, factor, unit, blocks);
  for (int r = 0; r < rows; r++) {
    uint32_t words[WIDE + 4 * VF_LANES + 4];
    int64_t element = (r0 + r) * s->columns + c0, lead = element % 4;
    for (int i = 0; a->sr_bits && i < columns + lead; i += 4 * VF_LANES)
      philox_vectors(words + i, rng_seed(), s->random + (uint64_t)((element - lead + i) / 4));
    encode_as(to + r * line,
              &(strip){.x = x, .dtype = s->dtype, .first = first + r * stride, .rows = 1,
                       .columns = columns, .wide = wide, .factor = factor, .unit = unit,
                       .word = a->sr_bits ? words + lead : NULL, .sr_bits = (int)a->sr_bits,
                       .average = s->average ? s->average + first + r * stride : NULL,
                       .nan = nan, .exact = exact, .powers = powers, .packed = s->packed},
              a->flags & MX_VALUES, a->format);
  }
}

// Returns how many bytes a quantized element takes in a buffer, before codes are packed.
static int element_bytes(const side *s) { return s->call->mx_quantize.flags & MX_VALUES ? 2 : 1; }

// Returns whether the result holds two elements in each byte.
static bool is_packed(const side *s)
{ return element_bytes(s) == 1 && mx_packed(s->call->mx_quantize.format); }

// Writes a row of a buffer to elements [at, at + n) of a result. If the result is packed, `at` and
// n are even.
static void put_row(const side *s, uint8_t *q, int64_t at, const uint8_t *from, int n)
{
  if (is_packed(s))
    for (int i = 0; i < n / 2; i++) {
      uint16_t two;
      memcpy(&two, from + 2 * i, 2);
      q[at / 2 + i] = (uint8_t)(two | two >> 4);
    }
  else stream(q + element_bytes(s) * at, from, (size_t)(element_bytes(s) * n));
}

// Returns how many columns a tile has: as many whole blocks as fit in `most` columns.
static int64_t tile_columns(int64_t most, int64_t block) { return most / block * block; }

// Quantizes a band of rows of x, which become rows of the result.
static void band_task(const void *context, int64_t t)
{
  const side *s = context;
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  int64_t high = a->block_rows, begin = t * s->band, end = smaller(begin + s->band, s->rows),
          deep = s->turn_q ? s->band : high,       // rows of the buffer
          step = tile_columns(deep == 1 ? WIDE : MOST, a->block_columns), length = s->columns;
  // If blocks have one row, and rows of x have only whole blocks, the band is processed as one long
  // row, which takes fewer tiles.
  if (deep == 1 && length % a->block_columns == 0) length *= end - begin, end = begin + 1;
  uint8_t tile[2 * MOST * MOST], turn[2 * MOST * MOST];
  int size = element_bytes(s), line = MOST * size;
  bool direct = !s->turn_q && (!is_packed(s) || s->packed);   // writes straight to the result
  int per_byte = s->packed ? 2 : 1;
  found none = {0}, *all = s->found ? &s->found[t] : &none;
  for (int64_t top = begin; top < end; top += deep)
    for (int64_t c0 = 0; c0 < length; c0 += step) {
      int columns = (int)smaller(step, length - c0), rows = (int)smaller(deep, end - top);
      int64_t first = top * s->columns + c0;
      if (direct) {
        quantize_tile(s, all, s->x, first, s->columns, top, rows, c0, columns,
                      s->q + size * first / per_byte, size * s->columns / per_byte);
        continue;
      }
      for (int r = 0; r < rows; r += (int)high)
        quantize_tile(s, all, s->x, first + r * s->columns, s->columns, top + r,
                      (int)smaller(high, rows - r), c0, columns, tile + r * line, line);
      for (int r = 0; r < rows; r++)
        put_row(s, s->q, first + r * s->columns, tile + r * line, columns);
      if (!s->turn_q) continue;
      turn_tile(turn, MOST, tile, MOST, rows, columns, size);
      for (int c = 0; c < columns; c++)
        put_row(s, s->turn_q, (c0 + c) * s->rows + top, turn + c * line, rows);
    }
  stream_end();
}

// Finds the amaxes of n blocks and updates *all with their elements. Each block is `deep` elements
// of one column of s->x, which is a tile. With MX_FINITE, the amaxes ignore NaN. Returns whether
// the blocks hold NaN.
static bool measure_columns(float *amax, const side *s, found *all, int64_t first, int deep,
                            int n)
{
  bool finite = s->call->mx_quantize.flags & MX_FINITE;
  largest_in_columns(amax, s->x, s->dtype, first, MOST, deep, n);
  uint32_t most = largest_of_floats(amax, n);
  if (most <= INFINITE) {
    all->top = (uint32_t)larger(all->top, most);
    return false;
  }
  for (int c = 0; c < n; c++)
    amax[c] = amax_of_block(all, s->x, s->dtype, first + c, MOST, deep, 1, finite);
  return true;
}

// Computes the random words for rows [r0, r0 + rows) and columns [c0, c0 + deep) of the result.
// word[k] holds the words for column c0 + k. `deep`, c0 and s->columns are multiples of 4.
static void column_words(uint32_t (*word)[WORD_LINE], const side *s, int64_t r0, int rows,
                         int64_t c0, int deep)
{
  for (int k = 0; k < deep; k += 4)
    for (int r = 0; r < rows; r += VF_LANES) {
      int64_t element = (r0 + r) * s->columns + c0 + k;
      philox_columns(word[k] + r, WORD_LINE, rng_seed(), s->random + (uint64_t)(element / 4),
                     (uint32_t)(s->columns / 4));
    }
}

// Copies n bytes. The usual lengths are constants, so that the compiler copies them in place.
VF_INLINE void copy_bytes(void *to, const void *from, int64_t n)
{
  if (n == 4) memcpy(to, from, 4);
  else if (n == 8) memcpy(to, from, 8);
  else if (n == 2 * MOST) memcpy(to, from, 2 * MOST);
  else memcpy(to, from, (size_t)n);
}

// Does the work of quantize_tile if a block is part of one row of the result, and so part of one
// column of x. Measures and rounds the blocks in the layout of x, so that only the codes or values
// need to be transposed afterwards. s->x is a tile [columns x rows] of x, which becomes rows
// [r0, r0 + rows) and columns [c0, c0 + columns) of the result. `to` is [columns x rows], too, and
// its rows are MOST elements apart.
static void quantize_columns(const side *s, found *all, int64_t r0, int rows, int64_t c0,
                             int columns, uint8_t *to)
{
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  int wide = (int)a->block_columns, blocks = (columns + wide - 1) / wide;
  int64_t line = MOST * element_bytes(s);
  uint8_t code[MOST][MOST], turned[MOST][MOST];         // code: [block][row]; turned: [row][block]
  uint32_t word[MOST][WORD_LINE];
  for (int j = 0; j < blocks; j++) {
    int deep = (int)smaller(wide, columns - j * wide);
    int64_t first = j * wide * MOST;
    float amax[MOST], factor[MOST], unit[MOST];
    bool nan = measure_columns(amax, s, all, first, deep, rows);
    if (mx_is_four_over_six(a->rule))
      choose_columns(s, first, deep, amax, rows, code[j], factor, unit);
    else scales_of(s, amax, rows, code[j], factor, unit, 1);
    nan |= !all_at_least(factor, rows, -INFINITY);
    if (a->sr_bits) column_words(word, s, r0, rows, c0 + j * wide, deep);
    encode_as(to + j * wide * line / (s->packed ? 2 : 1),
              &(strip){.x = s->x, .dtype = s->dtype, .first = first, .stride = MOST, .line = line,
                       .rows = deep, .columns = rows, .factor = factor, .unit = unit,
                       .word = a->sr_bits ? *word : NULL, .sr_bits = (int)a->sr_bits, .nan = nan,
                       .exact = all_at_least(unit, rows, EXACT_UNIT),
                       .powers = are_powers(s, factor, unit, rows), .packed = s->packed},
              a->flags & MX_VALUES, a->format);
  }
  turn_tile(turned, MOST, code, MOST, blocks, rows, 1);
  for (int r = 0; r < rows; r++)
    copy_bytes(s->scale + (r0 + r) * s->wide + c0 / wide, turned[r], blocks);
}

// Packs rows 2k and 2k + 1 of a tile of codes into row k.
static void pack_rows(uint8_t *tile, int rows)
{
  for (int k = 0; k < rows / 2; k++)
    for (int c = 0; c < MOST; c++)
      tile[k * MOST + c] = (uint8_t)(tile[2 * k * MOST + c] | tile[(2 * k + 1) * MOST + c] << 4);
}

// Copies rows [first, first + columns) and columns [r0, r0 + rows) of x to a tile, whose rows are
// MOST elements apart. `rows` and `columns` are those of the result, in which x is transposed.
static void load_tile(uint8_t *tile, const side *s, int64_t first, int columns, int64_t r0,
                      int rows)
{
  int64_t size = s->dtype == ENG_f32 ? 4 : 2;
  for (int k = 0; k < columns; k++) {
    const char *x = (const char *)s->x + ((first + k) * s->rows + r0) * size;
    copy_bytes(tile + k * MOST * size, x, rows * size);
  }
}

// Quantizes a band of rows of x, which become columns of the result.
static void turned_task(const void *context, int64_t t)
{
  const side *s = context;
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  int64_t first = t * s->band, high = a->block_rows, step = tile_columns(MOST, high);
  int columns = (int)smaller(s->band, s->columns - first), bytes = element_bytes(s);
  // four: the words of each Philox block belong to elements of one column of x, and the steps of
  // column_words fit in 32 bits
  bool four = s->columns % 4 == 0 && a->block_columns % 4 == 0 && s->columns < 1 << 30,
       by_columns = high == 1 && (!a->sr_bits || four);
  uint8_t tile[4 * MOST * MOST], turn[4 * MOST * MOST], line[2 * MOST * MOST];
  found none = {0}, *all = s->found ? &s->found[t] : &none;
  side part = *s;
  part.x = tile;
  if (s->rotation) part.dtype = ENG_bf16;
  for (int64_t r0 = 0; r0 < s->rows; r0 += step) {
    int rows = (int)smaller(step, s->rows - r0);
    int64_t at = r0 * s->columns + first;
    if (s->rotation) ISA_NAME(rotate_tile)(s->rotation, tile, first, columns, r0, rows);
    else load_tile(tile, s, first, columns, r0, rows);
    if (by_columns) {
      int packed = is_packed(s) ? 2 : 1;
      quantize_columns(&part, all, r0, rows, first, columns, line);
      if (packed == 2 && !s->packed) pack_rows(line, columns);
      turn_tile(turn, MOST, line, MOST, columns / packed, rows, bytes);
      for (int r = 0; r < rows; r++)
        stream(s->q + (at + r * s->columns) * bytes / packed, turn + r * bytes * MOST,
               (size_t)(columns * bytes / packed));
      continue;
    }
    turn_tile(turn, MOST, tile, MOST, columns, rows, part.dtype == ENG_f32 ? 4 : 2);
    for (int r = 0; r < rows; r += (int)high) {
      int deep = (int)smaller(high, rows - r);
      quantize_tile(&part, all, turn, r * MOST, MOST, r0 + r, deep, first, columns, line,
                    bytes * MOST);
      for (int k = 0; k < deep; k++)
        put_row(s, s->q, at + (r + k) * s->columns, line + k * bytes * MOST, columns);
    }
  }
  stream_end();
}

// ------------------------------------------------------------------ the operations

// Returns the amax of a tensor with this summary. The amax is NaN if the tensor holds NaN, unless
// the flag MX_FINITE is set.
static float amax_of(const op_call *call, found all)
{
  bool nan = all.nan && !(call->mx_quantize.flags & MX_FINITE);
  return f32_from(nan ? 0x7FC00000u : all.top);
}

static void set_shape(side *s, int64_t rows, int64_t columns)
{
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  s->rows = rows, s->columns = columns;
  s->down = (rows + a->block_rows - 1) / a->block_rows;
  s->wide = (columns + a->block_columns - 1) / a->block_columns;
  s->band = larger(1, BAND / a->block_rows) * a->block_rows;
}

// Returns how many rows of x a task transforms and quantizes. These rows are whole groups of the
// transform and whole blocks. Returns 0 if no tile can hold both, or if the rule is one of
// mx_fitted.h, which does not work on tiles.
static int64_t rotated_band(const op_call *call)
{
  const typeof(call->mx_quantize) *a = &call->mx_quantize;
  int64_t band = mx_is_fitted(a->rule) ? 0 : MOST;
  while (band % a->block_columns) band -= a->hadamard;
  return band;
}

static void rotated_survey_task(const void *context, int64_t t)
{
  const side *s = context;
  int64_t first = t * s->band;
  s->found[t].nan = ISA_NAME(rotated_amax)(s->rotation, &s->found[t].top, first,
                                           (int)smaller(s->band, s->columns - first));
}

// The steps of a task, which takes one band of rows of x: it quantizes the rows (straight), surveys
// their transform (survey) and quantizes their transposed copy (turned). A step that is NULL is
// skipped. Because one task takes all steps, it reads the rows from memory only once.
typedef struct pass { const side *straight, *survey, *turned; } pass;

static void pass_task(const void *context, int64_t t)
{
  const pass *p = context;
  if (p->straight) band_task(p->straight, t);
  if (p->survey) rotated_survey_task(p->survey, t);
  if (p->turned) turned_task(p->turned, t);
}

// Prepares the side of x as it is and, if blocks are square, of its transpose. Returns whether it
// surveyed x, in a separate pass that finds the amax and the number of NaN. NVFP4's scales need the
// amax of the whole tensor, so they need this pass if the caller gives no amax. The rules of
// mx_fitted.h always need it, because quantize_fitted finds neither. Otherwise, band_task finds
// both while it quantizes.
static bool prepare_straight(side *s, const op_call *call, found *part, bool together)
{
  const typeof(call->mx_quantize) *a = &call->mx_quantize;
  const tensor *x = call->in[0];
  const float *given = call->in[1] ? call->in[1]->data : NULL;
  int64_t pieces = ceiling(x->count, PART);
  bool surveys = mx_is_fitted(a->rule) || (mx_is_nvfp4(a->rule) && !given);
  found all = {0};
  s->scale = call->out[1]->data, s->q = call->out[0]->data;
  s->packed = is_packed(s) && !s->turn_q &&
              strip_packs(s->dtype, !a->sr_bits && !s->average, (int)(s->columns % MOST),
                          (int)a->block_columns, 0);
  if (surveys) {
    run_tasks(pieces, together, survey_task, &(survey){.x = x, .part = part});
    all = total(part, pieces);
    memset(part, 0, (size_t)pieces * sizeof *part);
  }
  ((int64_t *)call->out[5]->data)[0] = all.nan;
  s->found = surveys ? NULL : part;
  ((float *)call->out[2]->data)[0] = s->amax = given ? *given : amax_of(call, all);
  s->encode = nvfp4_encode_scale(s->amax, a->rule);
  return surveys;
}

// Returns the side of the transposed copy. Called if turned_task quantizes this copy, because
// blocks are not square or there is a Hadamard transform. The side has the amax of `straight`; with
// a Hadamard transform, mx_quantize replaces it later.
static side turned_side(const side *straight, const op_call *call)
{
  const typeof(call->mx_quantize) *a = &call->mx_quantize;
  const tensor *x = call->in[0];
  side s = *straight;
  set_shape(&s, row_length(x), row_count(x));
  s.scale = call->out[4]->data, s.q = call->out[3]->data;
  if (call->out[0]) s.random += (uint64_t)((x->count + 3) / 4);
  s.found = NULL;
  s.packed = is_packed(&s) && a->block_rows == 1 &&
             strip_packs(a->hadamard ? ENG_bf16 : s.dtype, !a->sr_bits, (int)(s.rows % MOST), 0,
                         (int)a->block_columns);
  s.band = a->hadamard ? rotated_band(call) : tile_columns(MOST, a->block_columns);
  return s;
}

KERNEL(mx_quantize)
{
  const tensor *x = call->in[0], *q = call->out[0], *q_t = call->out[3];
  const typeof(call->mx_quantize) *a = &call->mx_quantize;
  bool square = a->block_rows == a->block_columns && !a->hadamard, apart = q_t && !square,
       together = x->count >= PARALLEL_ELEMENTS, surveyed = true;
  bool rare = (call->in[2] && apart) || a->ties || a->sr_rule;
  if (!dtype_is_fast(x->dtype) || x->count == 0 || rare) return forward_to_reference(call);
  if (a->hadamard && !rotated_band(call))
    return quantize_rotated(call, ISA_NAME(cpu_hadamard), ISA_NAME(cpu_mx_quantize));
  int64_t parts = ceiling(x->count, PART) + 2 * ceiling(row_count(x), 16);
  SCRATCH(found, part, parts);
  memset(part, 0, (size_t)parts * sizeof *part);

  side s = {.call = call, .x = x->data, .dtype = x->dtype, .format = mx_format_of(a->format),
            .average = call->in[2] ? call->in[2]->data : NULL,
            .random = (uint64_t)a->counter, .factor = a->factor != 0 ? (float)a->factor : 1}, t;
  set_shape(&s, row_count(x), row_length(x));
  if (q_t && square) s.turn_scale = call->out[4]->data, s.turn_q = q_t->data;
  if (q) surveyed = prepare_straight(&s, call, part, together);

  pass first = {.straight = q && !mx_is_fitted(a->rule) ? &s : NULL};
  rotation o;
  if (apart) {
    t = turned_side(&s, call);
    if (a->block_rows == 1) {
      s.band = t.band;
    } else if (q) {                                      // the bands of s and t differ
      run_tasks(ceiling(s.rows, s.band), together, pass_task, &first);
      first.straight = NULL;
    }
    if (!a->hadamard) first.turned = &t;
    else if (mx_is_nvfp4(a->rule)) first.survey = &t;
  }
  if (a->hadamard) {
    o = ISA_NAME(rotation_of)(x, a->hadamard, a->signs, true, ENG_bf16);
    t.rotation = &o, t.found = part + ceiling(row_count(x), 16);
  }
  int64_t bands = ceiling(row_count(x), apart ? t.band : s.band);
  if (mx_is_fitted(a->rule)) quantize_fitted(call, together);
  else run_tasks(bands, together, pass_task, &first);
  if (!surveyed) {
    found all = total(part, ceiling(row_count(x), s.band));
    if (!call->in[1]) s.amax = amax_of(call, all);
    ((int64_t *)call->out[5]->data)[0] = all.nan;
  }
  if (q) ((float *)call->out[2]->data)[0] = s.amax;
  if (a->hadamard) {
    t.amax = amax_of(call, total(t.found, bands)), t.encode = nvfp4_encode_scale(t.amax, a->rule);
    run_tasks(bands, together, pass_task, &(pass){.turned = &t});
    s.amax = amax_of(call, total(t.found, bands));
  }
  if (q_t) ((float *)call->out[6]->data)[0] = s.amax;
  return ENG_OK;
}

typedef struct back { const op_call *call; int64_t columns; float whole, value[256]; } back;

static void back_task(const void *context, int64_t row)
{
  const back *b = context;
  const typeof(b->call->mx_dequantize) *a = &b->call->mx_dequantize;
  const uint8_t *q = b->call->in[0]->data, *scale = b->call->in[1]->data;
  const tensor *y = b->call->out[0];
  scale += row / a->block_rows * ((b->columns + a->block_columns - 1) / a->block_columns);
  for (int64_t c = 0; c < b->columns; c++) {
    int64_t i = row * b->columns + c;
    uint8_t code = mx_packed(a->format) ? q[i / 2] >> i % 2 * 4 & 15 : q[i],
            s = scale[c / a->block_columns];
    float value = mx_is_nvfp4(a->rule) ? b->value[code] * e4m3_to_f32(s) * b->whole
                                          : b->value[code] * ue8m0_to_f32(s);
    put(y->data, y->dtype, i, value);
  }
}

KERNEL(mx_dequantize)
{
  const tensor *y = call->out[0];
  if (!dtype_is_fast(y->dtype) || y->count == 0) return forward_to_reference(call);
  back b = {.call = call, .columns = row_length(y), .whole = 1};
  if (call->in[2])
    b.whole = nvfp4_decode_scale(((const float *)call->in[2]->data)[0], call->mx_dequantize.rule);
  for (int i = 0; i < 256; i++)
    b.value[i] = mx_value((uint8_t)i, mx_format_of(call->mx_dequantize.format));
  run_tasks(row_count(y), y->count >= PARALLEL_ELEMENTS, back_task, &b);
  return ENG_OK;
}
