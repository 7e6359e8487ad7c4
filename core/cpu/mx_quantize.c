// The operations mx_quantize and mx_dequantize. Called through backend.kernel[]; owns nothing but
// scratch during a call.
//
// A first pass finds the tensor's amax and counts NaN. In the second, a task takes one row of
// blocks, and a tile of at most TILE_COLUMNS columns at a time: it reads the tile as f32, turned if
// the copy is transposed, so that a block's rows are contiguous, and quantizes block by block with
// the formulas of core/base/mx.h. The loop over a block is compiled for each format, so that the
// compiler vectorizes it. A Hadamard transform writes x transposed and transformed to scratch, in
// bf16, from which the transposed copy is quantized. f64 goes to the reference.
#include "base/mx.h"
#include "base/rng.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"

#include <math.h>

enum { MOST = 128, TILE_COLUMNS = 128, CHUNK = 16 };

// ------------------------------------------------------------------ amax

typedef struct survey {
  const tensor *x;
  int64_t   rows, columns, *nan;
  uint32_t *top;
} survey;

static void survey_task(const void *context, int64_t t)
{
  const survey *s = context;
  int64_t from = t * CHUNK * s->columns,
          end = smaller((t + 1) * CHUNK, s->rows) * s->columns;
  uint32_t top = 0;
  int64_t nan = 0;
  float buffer[TILE];
  for (int64_t i = from; i < end; i += TILE) {
    int n = (int)smaller(TILE, end - i);
    const float *x = tile_load(buffer, s->x->data, s->x->dtype, i, n);
    int32_t most = 0, count = 0;
    for (int k = 0; k < n; k++) {
      int32_t bits = (int32_t)(f32_bits(x[k]) & 0x7FFFFFFFu), number = bits <= 0x7F800000;
      count += !number;
      bits = number ? bits : 0;
      most = bits > most ? bits : most;
    }
    nan += count;
    if ((uint32_t)most > top) top = (uint32_t)most;
  }
  s->top[t] = top;
  s->nan[t] = nan;
}

// *amax: the largest magnitude without NaN. *nan: the number of NaN.
static eng_status survey_all(const tensor *x, bool together, float *amax, int64_t *nan)
{
  survey s = {.x = x, .columns = row_length(x), .rows = row_count(x)};
  int64_t tasks = (s.rows + CHUNK - 1) / CHUNK, bytes = tasks * 16;
  s.nan = arena_alloc(ARENA_SCRATCH, bytes);
  if (!s.nan) return ENG_ERR_MEMORY;
  s.top = (uint32_t *)(s.nan + tasks);
  run_tasks(tasks, together, survey_task, &s);
  uint32_t top = 0;
  *nan = 0;
  for (int64_t t = 0; t < tasks; t++) {
    top = s.top[t] > top ? s.top[t] : top;
    *nan += s.nan[t];
  }
  arena_free(ARENA_SCRATCH, s.nan, bytes);
  *amax = f32_from(top);
  return ENG_OK;
}

// ------------------------------------------------------------------ blocks

// One of the two results. `rows` and `columns` are the result's, x transposed if `turned`.
typedef struct side {
  const op_call *call;
  const tensor *x;
  int64_t  rows, columns;
  bool     turned;
  uint8_t *scale, *q;
  // square blocks: the transposed copy, written with the same elements
  uint8_t *turn_scale, *turn_q;
  uint64_t random;
  float    encode;           // S of NVFP4
  float    value[256];
} side;

static float block_amax(const float *x, int64_t stride, int rows, int columns, bool finite)
{
  int32_t most = 0;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) {
      int32_t bits = (int32_t)(f32_bits(x[r * stride + c]) & 0x7FFFFFFFu);
      if (finite) bits = bits > 0x7F800000 ? 0 : bits;
      most = bits > most ? bits : most;
    }
  return f32_from((uint32_t)most);
}

VF_INLINE void encode_row(uint8_t *code, const float *x, int n, float factor, mx_format f)
{
  for (int i = 0; i < n; i++) code[i] = mx_code(x[i] * factor, f);
}

static void encode_by_format(uint8_t *code, const float *x, int n, float factor, int64_t format)
{
  switch (format) {
    case ENG_e4m3: encode_row(code, x, n, factor, mx_format_of(ENG_e4m3)); break;
    case ENG_e5m2: encode_row(code, x, n, factor, mx_format_of(ENG_e5m2)); break;
    case ENG_FORMAT_E2M3: encode_row(code, x, n, factor, mx_format_of(ENG_FORMAT_E2M3)); break;
    case ENG_FORMAT_E3M2: encode_row(code, x, n, factor, mx_format_of(ENG_FORMAT_E3M2)); break;
    case ENG_FORMAT_MXINT8: encode_row(code, x, n, factor, mx_format_of(ENG_FORMAT_MXINT8)); break;
    default: encode_row(code, x, n, factor, mx_format_of(ENG_FORMAT_E2M1));
  }
}

// element: the index of code[0] in the result.
static void encode_randomly(uint8_t *code, const float *x, int n, float factor, const side *s,
                            int64_t element)
{
  mx_format f = mx_format_of(s->call->mx_quantize.format);
  uint32_t word[4];
  for (int i = 0; i < n; i++, element++) {
    if (i == 0 || element % 4 == 0) philox_block(word, s->random + (uint64_t)(element / 4));
    code[i] = mx_code_stochastic(
      x[i] * factor, mx_uniform(word[element % 4], (int)s->call->mx_quantize.sr_bits), f);
  }
}

// Writes n elements, `at` elements from the beginning of q.
static void write_elements(const side *s, uint8_t *q, int64_t at, const uint8_t *code, int n,
                           float scale)
{
  if (s->call->mx_quantize.flags & MX_VALUES) {
    uint16_t *to = (uint16_t *)q + at;
    for (int i = 0; i < n; i++) to[i] = bf16_from_f32(s->value[code[i]] * scale);
  } else if (mx_packed(s->call->mx_quantize.format)) {
    for (int i = 0; i < n; i += 2) q[(at + i) / 2] = (uint8_t)(code[i] | code[i + 1] << 4);
  } else {
    memcpy(q + at, code, (size_t)n);
  }
}

// The block of x [rows x columns] whose first element is (r0, c0) of the result.
static void quantize_block(const side *s, const float *x, int64_t stride, int64_t r0, int64_t c0,
                           int rows, int columns)
{
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  bool finite = a->flags & MX_FINITE;
  float amax = block_amax(x, stride, rows, columns, finite), factor, value;
  uint8_t scale;
  if (a->rule == ENG_MX_NVFP4) {
    scale = nvfp4_scale(amax, s->encode);
    factor = nvfp4_factor(scale, s->encode);
    value = e4m3_to_f32(scale);
  } else {
    scale = mx_scale(amax, mx_format_of(a->format), (int)a->rule, finite);
    factor = mx_inverse(scale);
    value = ue8m0_to_f32(scale);
  }
  int64_t i = r0 / a->block_rows, j = c0 / a->block_columns,
          across = (s->columns + a->block_columns - 1) / a->block_columns;
  s->scale[i * across + j] = scale;
  if (s->turn_scale) s->turn_scale[j * ((s->rows + a->block_rows - 1) / a->block_rows) + i] = scale;
  uint8_t code[MOST + 1], turned[MOST][MOST + 1];
  for (int r = 0; r < rows; r++) {
    int64_t at = (r0 + r) * s->columns + c0;
    if (a->sr_bits) encode_randomly(code, x + r * stride, columns, factor, s, at);
    else encode_by_format(code, x + r * stride, columns, factor, a->format);
    write_elements(s, s->q, at, code, columns, value);
    if (s->turn_q)
      for (int c = 0; c < columns; c++) turned[c][r] = code[c];
  }
  if (s->turn_q)
    for (int c = 0; c < columns; c++)
      write_elements(s, s->turn_q, (c0 + c) * s->rows + r0, turned[c], rows, value);
}

// A row of blocks of x, which is a column of blocks of a turned result.
static void blocks_task(const void *context, int64_t t)
{
  const side *s = context;
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  int64_t x_rows = s->turned ? s->columns : s->rows, x_columns = s->turned ? s->rows : s->columns,
          high = s->turned ? a->block_columns : a->block_rows,
          wide = s->turned ? a->block_rows : a->block_columns, step = TILE_COLUMNS / wide * wide;
  int64_t r0 = t * high;
  int rows = (int)smaller(high, x_rows - r0);
  float tile[MOST * TILE_COLUMNS], turn[MOST * TILE_COLUMNS];
  for (int64_t c0 = 0; c0 < x_columns; c0 += step) {
    int columns = (int)smaller(step, x_columns - c0);
    for (int r = 0; r < rows; r++)
      floats_from(tile + r * columns, s->x->data, s->x->dtype, (r0 + r) * x_columns + c0, columns);
    if (s->turned)
      for (int c = 0; c < columns; c++)
        for (int r = 0; r < rows; r++) turn[c * rows + r] = tile[r * columns + c];
    for (int c = 0; c < columns; c += (int)wide) {
      int n = (int)smaller(wide, columns - c);
      if (s->turned) quantize_block(s, turn + c * rows, rows, c0 + c, r0, n, rows);
      else quantize_block(s, tile + c, columns, r0, c0 + c, rows, n);
    }
  }
}

// ------------------------------------------------------------------ Hadamard transform

typedef struct rotation {
  const tensor *x;
  uint16_t *y;               // [columns x rows]
  int64_t   rows, columns;
  int       n;
  float     sign[MOST];
} rotation;

enum { WIDE = 16 };          // columns of x at a time

// A group of n rows of x, or those after the last whole group.
static void rotate_task(const void *context, int64_t t)
{
  const rotation *o = context;
  int rows = (int)smaller(o->n, o->rows - t * o->n);
  double root = sqrt(1.0 / o->n), a[MOST][WIDE];
  for (int64_t c0 = 0; c0 < o->columns; c0 += WIDE) {
    int wide = (int)smaller(WIDE, o->columns - c0);
    float x[WIDE] = {0};
    for (int r = 0; r < rows; r++) {
      floats_from(x, o->x->data, o->x->dtype, (t * o->n + r) * o->columns + c0, wide);
      for (int c = 0; c < WIDE; c++) a[r][c] = rows == o->n ? x[c] * o->sign[r] : x[c];
    }
    for (int half = 1; half < o->n && rows == o->n; half *= 2)
      for (int r = 0; r < rows; r++)
        for (int c = 0; c < WIDE && !(r & half); c++) {
          double one = a[r][c], other = a[r + half][c];
          a[r][c] = one + other;
          a[r + half][c] = one - other;
        }
    for (int c = 0; c < wide; c++)
      for (int r = 0; r < rows; r++)
        o->y[(c0 + c) * o->rows + t * o->n + r] =
          bf16_from_f64(rows == o->n ? a[r][c] * root : a[r][c]);
  }
}

static void rotate(uint16_t *y, const op_call *call)
{
  const typeof(call->mx_quantize) *a = &call->mx_quantize;
  rotation o = {.x = call->in[0], .y = y, .rows = row_count(call->in[0]),
                .columns = row_length(call->in[0]), .n = (int)a->hadamard};
  uint32_t word[4] = {0};
  if (a->signs > 0) philox_block(word, (uint64_t)a->signs);
  for (int i = 0; i < o.n; i++) o.sign[i] = mx_sign(a->signs, word, i);
  run_tasks((o.rows + o.n - 1) / o.n, o.x->count >= PARALLEL_ELEMENTS, rotate_task, &o);
}

// ------------------------------------------------------------------ the operations

static eng_status mx_quantize(const op_call *call)
{
  const tensor *x = call->in[0];
  const typeof(call->mx_quantize) *a = &call->mx_quantize;
  bool turned = call->out[3] != NULL, square = a->block_rows == a->block_columns,
       together = x->count >= PARALLEL_ELEMENTS;
  if (!dtype_is_fast(x->dtype) || x->count == 0) return forward_to_reference(call);
  float amax;
  int64_t nan;
  ENG_TRY(survey_all(x, together, &amax, &nan));
  if (call->in[1]) amax = ((const float *)call->in[1]->data)[0];
  else if (nan && !(a->flags & MX_FINITE)) amax = f32_from(0x7FC00000u);
  ((float *)call->out[2]->data)[0] = amax;
  ((int64_t *)call->out[5]->data)[0] = nan;
  side s = {.call = call, .x = x, .rows = row_count(x), .columns = row_length(x),
            .scale = call->out[1]->data, .q = call->out[0]->data,
            .random = (uint64_t)a->counter, .encode = nvfp4_encode_scale(amax)};
  for (int i = 0; i < 256; i++) s.value[i] = mx_value((uint8_t)i, mx_format_of(a->format));
  if (turned && square) s.turn_scale = call->out[4]->data, s.turn_q = call->out[3]->data;
  run_tasks((s.rows + a->block_rows - 1) / a->block_rows, together, blocks_task, &s);
  if (turned) ((float *)call->out[6]->data)[0] = amax;
  if (!turned || square) return ENG_OK;
  s.rows = row_length(x), s.columns = row_count(x);
  s.scale = call->out[4]->data, s.q = call->out[3]->data;
  s.random += (uint64_t)((x->count + 3) / 4);
  if (!a->hadamard) {
    s.turned = true;
    run_tasks((s.columns + a->block_columns - 1) / a->block_columns, together, blocks_task, &s);
    return ENG_OK;
  }
  tensor y = {.dtype = ENG_bf16, .ndim = 2, .shape = {s.rows, s.columns}, .count = x->count,
              .data = arena_alloc(ARENA_SCRATCH, 2 * x->count)};
  if (!y.data) return ENG_ERR_MEMORY;
  rotate(y.data, call);
  eng_status status = survey_all(&y, together, &amax, &nan);
  if (status == ENG_OK) {
    if (nan && !(a->flags & MX_FINITE)) amax = f32_from(0x7FC00000u);
    ((float *)call->out[6]->data)[0] = amax;
    s.x = &y;
    s.encode = nvfp4_encode_scale(amax);
    run_tasks((s.rows + a->block_rows - 1) / a->block_rows, together, blocks_task, &s);
  }
  arena_free(ARENA_SCRATCH, y.data, 2 * x->count);
  return status;
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
    float value = a->rule == ENG_MX_NVFP4 ? b->value[code] * e4m3_to_f32(s) * b->whole
                                          : b->value[code] * ue8m0_to_f32(s);
    put(y->data, y->dtype, i, value);
  }
}

static eng_status mx_dequantize(const op_call *call)
{
  const tensor *y = call->out[0];
  if (!dtype_is_fast(y->dtype) || y->count == 0) return forward_to_reference(call);
  back b = {.call = call, .columns = row_length(y), .whole = 1};
  if (call->in[2]) b.whole = nvfp4_decode_scale(((const float *)call->in[2]->data)[0]);
  for (int i = 0; i < 256; i++)
    b.value[i] = mx_value((uint8_t)i, mx_format_of(call->mx_dequantize.format));
  run_tasks(row_count(y), y->count >= PARALLEL_ELEMENTS, back_task, &b);
  return ENG_OK;
}

void ISA_NAME(cpu_register_mx_quantize)(backend *b)
{
  b->kernel[ENG_OP_mx_quantize] = mx_quantize;
  b->kernel[ENG_OP_mx_dequantize] = mx_dequantize;
}
