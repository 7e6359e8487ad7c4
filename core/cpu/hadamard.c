// The operation hadamard. Called through backend.kernel[]; owns nothing.
//
// The result is [lines x along]: a line is a row of x, or a column if `turned`. A task transforms
// one tile of MOST x MOST numbers, LINE lines at a time, with the lines in the lanes of vectors;
// then it transposes the tile. Results in f16 or f64 and x in f64 go to the reference.
#include "base/mx.h"
#include "base/rng.h"
#include "philox.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"
#include "turn.h"

#include <math.h>
#include <string.h>

enum { MOST = 128, LINE = 32 };

typedef struct rotation {
  const tensor *x;
  void    *y;
  int      dtype, n;         // dtype: of y, bf16 or f32
  bool     turned;
  int64_t  along, lines, columns;   // columns: of x
  float    sign[MOST];
} rotation;

// Rounds LINE numbers from f64 to bf16, without rounding to f32 in between. If one of them is not a
// normal f32, the second loop rounds all of them again.
static void round_line(uint16_t *to, const double *x)
{
  uint64_t odd = 0;
  for (int c = 0; c < LINE; c++) {
    uint64_t bits = f64_bits(x[c]), exponent = bits >> 52 & 0x7FF,
             nearest = (bits + ((1ull << 44) - 1) + (bits >> 45 & 1)) & ~((1ull << 45) - 1);
    odd |= bits << 1 != 0 && exponent - 897 > 253;         // outside of 2^-126 to 2^128
    to[c] = (uint16_t)(f32_bits((float)f64_from(nearest)) >> 16);
  }
  for (int c = 0; odd && c < LINE; c++) to[c] = bf16_from_f64(x[c]);
}

// Transforms the n rows of x. A constant n lets the compiler unroll the loops.
VF_INLINE void transform(double (*x)[LINE], const int n)
{
  for (int half = 1; half < n; half *= 2)
    for (int r = 0; r < n; r += 2 * half)
      for (int k = r; k < r + half; k++)
        for (int c = 0; c < LINE; c++) {
          double one = x[k][c], other = x[k + half][c];
          x[k][c] = one + other;
          x[k + half][c] = one - other;
        }
  double root = sqrt(1.0 / n);
  for (int k = 0; k < n; k++)
    for (int c = 0; c < LINE; c++) x[k][c] *= root;
}

// to[k][l]: element first + k of `some` lines from `line` on, times its sign; zeros in other lines.
static void load_group(double (*to)[LINE], const rotation *o, int64_t first, int deep, int64_t line,
                       int some, bool whole)
{
  float x[LINE > MOST ? LINE : MOST] = {0};
  int size = o->x->dtype == ENG_f32 ? 4 : 2;
  memset(to, 0, (size_t)deep * sizeof *to);
  for (int k = 0; o->turned && k < deep; k++) {
    int64_t from = (first + k) * o->columns + line;
    // the next group's rows are too far apart for the hardware to foresee
    __builtin_prefetch((const char *)o->x->data + size * (from + o->n * o->columns));
    floats_from(x, o->x->data, o->x->dtype, from, some);
    for (int l = 0; l < some; l++) to[k][l] = x[l] * (whole ? o->sign[k] : 1);
  }
  for (int l = 0; !o->turned && l < some; l++) {
    floats_from(x, o->x->data, o->x->dtype, (line + l) * o->columns + first, deep);
    for (int k = 0; k < deep; k++) to[k][l] = x[k] * (whole ? o->sign[k] : 1);
  }
}

static void rotate_task(const void *context, int64_t t)
{
  const rotation *o = context;
  int64_t across = (o->lines + MOST - 1) / MOST, a0 = t / across * MOST, l0 = t % across * MOST;
  int deep = (int)smaller(MOST, o->along - a0), lines = (int)smaller(MOST, o->lines - l0),
      size = o->dtype == ENG_f32 ? 4 : 2;
  uint32_t tile[MOST * MOST], turn[MOST * MOST];
  double wide[MOST][LINE];
  for (int a = 0; a < deep; a += o->n)
    for (int l = 0; l < lines; l += LINE) {
      int n = (int)smaller(o->n, deep - a);
      load_group(wide, o, a0 + a, n, l0 + l, (int)smaller(LINE, lines - l), n == o->n);
      if (n == o->n) switch (n) {
          case 16: transform(wide, 16); break;
          case 32: transform(wide, 32); break;
          case 64: transform(wide, 64); break;
          default: transform(wide, 128); break;
        }
      for (int k = 0; k < n; k++)
        if (size == 2) round_line((uint16_t *)tile + (a + k) * MOST + l, wide[k]);
        else for (int c = 0; c < LINE; c++)
          ((float *)tile)[(a + k) * MOST + l + c] = (float)wide[k][c];
    }
  turn_tile(turn, MOST, tile, MOST, deep, lines, size);
  for (int l = 0; l < lines; l++)
    memcpy((char *)o->y + size * ((l0 + l) * o->along + a0), (char *)turn + size * l * MOST,
           (size_t)(size * deep));
}

static eng_status hadamard(const op_call *call)
{
  const typeof(call->hadamard) *a = &call->hadamard;
  const tensor *x = call->in[0], *y = call->out[0];
  bool fast = dtype_is_fast(x->dtype) && (y->dtype == ENG_f32 || y->dtype == ENG_bf16);
  if (!fast || x->count == 0) return forward_to_reference(call);
  rotation o = {.x = x, .y = y->data, .dtype = y->dtype, .n = (int)a->n, .turned = a->turned != 0,
                .columns = row_length(x)};
  o.along = a->turned ? row_count(x) : o.columns;
  o.lines = a->turned ? o.columns : row_count(x);
  uint32_t word[4] = {0};
  if (a->signs > 0) philox_block(word, (uint64_t)a->signs);
  for (int i = 0; i < o.n; i++) o.sign[i] = mx_sign(a->signs, word, i);
  run_tasks((o.along + MOST - 1) / MOST * ((o.lines + MOST - 1) / MOST),
            x->count >= PARALLEL_ELEMENTS, rotate_task, &o);
  return ENG_OK;
}

void ISA_NAME(cpu_register_hadamard)(backend *b) { b->kernel[ENG_OP_hadamard] = hadamard; }
