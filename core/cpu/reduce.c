// Sum, mean, max and min over any dimensions, with any strides, and the gradient of max and min.
// f64 and integers go to the reference kernels. Called through backend.kernel[]; owns nothing.
//
// A sum is taken in a fixed order. The elements of a tile (or of FLUSH rows) are added in f32
// lanes, and added again in double if the f32 sum is Inf or NaN. The sums of the tiles, and then of
// the pieces, are added in double. How a sum is cut into pieces depends only on the shape and the
// strides, never on the number of threads. In max and min, a NaN gives NaN, and the choice between
// -0 and +0 is unspecified.
#include "operand.h"
#include "simd.h"
#include "tasks.h"

enum {
  PIECE = 64 * TILE,   // elements of x that make one piece, if results are not adjacent in x
  // If results are adjacent in x, a row of x holds one element of each of them. PIECE_ROWS rows
  // make one piece, if rows are cut into pieces at all.
  PIECE_ROWS = 256,
  FLUSH = 32,          // rows added in f32 before their sum is added to a total in double
};

typedef enum rule { SUM, MAX, MIN } rule;

/// A reduction. `kept` covers the dimensions of x that are kept, `gone` the dimensions that are
/// reduced.
typedef struct reduction {
  operand kept, gone;            // both point into the data of x
  int64_t results, each;         // number of results, and of elements reduced to each
  rule    rule;
  double  divisor;               // of each total: `each` for a mean, else 1
  const tensor *y;
  int64_t rows, pieces;          // rows (or elements, see PIECE) of a piece; pieces of a result
  double *part;                  // [pieces x results], if there are several pieces
} reduction;

static reduction reduction_of(const op_call *call)
{
  const tensor *x = call->in[0];
  uint64_t mask = (uint64_t)call->sum.mask;
  reduction r = {.kept = {.data = x->data, .dtype = x->dtype},
                 .gone = {.data = x->data, .dtype = x->dtype}, .results = 1, .each = 1,
                 .divisor = 1, .y = call->out[0]};
  for (int d = x->ndim - 1; d >= 0; d--) {
    bool gone = mask >> d & 1;
    operand_append(gone ? &r.gone : &r.kept, x->shape[d], x->stride[d]);
    if (gone) r.each *= x->shape[d];
    else r.results *= x->shape[d];
  }
  operand_finish(&r.kept);
  operand_finish(&r.gone);
  return r;
}

// ------------------------------------------------------------------ tiles

// Returns b if b is NaN or larger than a (for MIN, smaller), else a. So a NaN on either side gives
// NaN.
VF_INLINE vf vf_extreme(vf a, vf b, rule rule)
{ return vf_select(vm_or(rule == MAX ? vf_gt(b, a) : vf_lt(b, a), vf_ne(b, b)), b, a); }

static inline double extreme(double a, double b, rule rule)
{ return (rule == MAX ? b > a : b < a) || f64_is_nan(b) ? b : a; }

static inline double identity(rule rule)
{ return rule == SUM ? 0.0 : rule == MAX ? -INFINITY : INFINITY; }

static inline double combine(double a, double b, rule rule)
{ return rule == SUM ? a + b : extreme(a, b, rule); }

static double tile_extreme(const float *x, int n, rule rule)
{
  vf a = vf_set1((float)identity(rule)), b = a;
  int i = 0;
  for (; i + 2 * VF_LANES <= n; i += 2 * VF_LANES) {
    a = vf_extreme(a, vf_load(x + i), rule);
    b = vf_extreme(b, vf_load(x + i + VF_LANES), rule);
  }
  float lanes[VF_LANES];
  vf_store(lanes, vf_extreme(a, b, rule));
  double best = lanes[0];
  for (int k = 1; k < VF_LANES; k++) best = extreme(best, lanes[k], rule);
  for (; i < n; i++) best = extreme(best, x[i], rule);
  return best;
}

// --------------------------------------- results not adjacent in x: one at a time

// Reduces elements [first, first + n) of one result, whose elements begin at offset `base`.
static double reduce_piece(const reduction *r, int64_t base, int64_t first, int64_t n)
{
  operand gone = r->gone;
  gone.data = (const char *)r->gone.data + base * (r->gone.dtype == ENG_f32 ? 4 : 2);
  double total = identity(r->rule);
  float buffer[TILE];
  for (int64_t at = first; at < first + n; at += TILE) {
    int m = (int)smaller(TILE, first + n - at);
    const float *x = operand_load(&gone, buffer, at, m);
    total = combine(total, r->rule == SUM ? tile_sum(x, m) : tile_extreme(x, m, r->rule), r->rule);
  }
  return total;
}

static void single_task(const void *context, int64_t task)
{
  const reduction *r = context;
  int64_t result = task / r->pieces, piece = task % r->pieces, first = piece * r->rows;
  double total =
    reduce_piece(r, cursor_at(&r->kept, result).offset, first, smaller(r->rows, r->each - first));
  if (r->part) r->part[piece * r->results + result] = total;
  else put(r->y->data, r->y->dtype, result, total / r->divisor);
}

// ----------------------------------------- adjacent results in x: a tile of columns at a time

// Returns the sum of n elements of one column in double, from `row` on. at: the column's offset.
static __attribute__((noinline)) double column_sum(const reduction *r, cursor row, int64_t at,
                                                   int64_t n)
{
  double sum = 0;
  for (int64_t i = 0; i < n; i++) {
    float buffer[TILE];
    sum += *tile_load(buffer, r->gone.data, r->gone.dtype, at + row.offset, 1);
    cursor_advance(&row, &r->gone, 1);
  }
  return sum;
}

// Reduces rows [first, first + n) of the `width` columns that begin at offset `base`, into total
// [width]. Sums up to FLUSH rows at a time in f32, and a column whose sum is Inf or NaN again in
// double.
static void reduce_columns(const reduction *r, int64_t base, int width, int64_t first, int64_t n,
                           double *total)
{
  float sum[TILE], buffer[TILE];
  vf start = vf_set1((float)identity(r->rule));
  cursor row = cursor_at(&r->gone, first);
  for (int i = 0; i < width; i++) total[i] = identity(r->rule);
  for (int64_t at = 0; at < n;) {
    int64_t stop = smaller(at + FLUSH, n), rows = stop - at;
    const cursor begin = row;
    for (int i = 0; i < TILE; i += VF_LANES) vf_store(sum + i, start);
    for (; at < stop; at++) {
      const float *x = tile_load(buffer, r->gone.data, r->gone.dtype, base + row.offset, width);
      switch (r->rule) {
        case SUM: MAP2(sum, sum, x, width, vf_add(a, b)); break;
        case MAX: MAP2(sum, sum, x, width, vf_extreme(a, b, MAX)); break;
        case MIN: MAP2(sum, sum, x, width, vf_extreme(a, b, MIN)); break;
      }
      cursor_advance(&row, &r->gone, 1);
    }
    if (r->rule == SUM)
      for (int i = 0; i < width; i++)
        total[i] += f32_is_finite(sum[i]) ? sum[i] : column_sum(r, begin, base + i, rows);
    else for (int i = 0; i < width; i++) total[i] = extreme(total[i], sum[i], r->rule);
  }
}

static void columns_task(const void *context, int64_t task)
{
  const reduction *r = context;
  int64_t columns = r->kept.shape[0], across = (columns + TILE - 1) / TILE;
  int64_t column = task % across * TILE, piece = task / across % r->pieces;
  int64_t result = task / across / r->pieces * columns + column, first = piece * r->rows;
  int width = (int)smaller(TILE, columns - column);
  double own[TILE], *total = r->part ? r->part + piece * r->results + result : own;
  reduce_columns(r, cursor_at(&r->kept, result).offset, width, first,
                 smaller(r->rows, r->each - first), total);
  if (!r->part)
    for (int i = 0; i < width; i++) put(r->y->data, r->y->dtype, result + i, total[i] / r->divisor);
}

static void combine_task(const void *context, int64_t result)
{
  const reduction *r = context;
  double total = r->part[result];
  for (int64_t k = 1; k < r->pieces; k++)
    total = combine(total, r->part[k * r->results + result], r->rule);
  put(r->y->data, r->y->dtype, result, total / r->divisor);
}

// ------------------------------------------------------------------ the operations

static eng_status reduce_by(reduction *r, bool columns)
{
  int64_t groups =
    columns ? r->results / r->kept.shape[0] * ((r->kept.shape[0] + TILE - 1) / TILE) : r->results;
  bool together = r->results * r->each >= PARALLEL_ELEMENTS;
  // 64 groups of columns or more give enough tasks, so rows are then not cut into pieces.
  r->rows = !columns ? PIECE : groups >= 64 ? r->each : PIECE_ROWS;
  r->pieces = (r->each + r->rows - 1) / r->rows;
  SCRATCH(double, part, r->pieces > 1 ? r->pieces * r->results : 0);
  if (r->pieces > 1) r->part = part;
  run_tasks(groups * r->pieces, together, columns ? columns_task : single_task, r);
  if (r->part)
    run_tasks(r->results, r->results * r->pieces >= PARALLEL_ELEMENTS, combine_task, r);
  return ENG_OK;
}

static eng_status reduce(const op_call *call)
{
  if (!all_fast(call)) return forward_to_reference(call);
  reduction r = reduction_of(call);
  if (r.each == 0) {   // only for sum and mean: max and min reduce at least one element
    for (int64_t i = 0; i < r.results; i++)
      put(r.y->data, r.y->dtype, i, call->op == ENG_OP_mean ? NAN : 0.0);
    return ENG_OK;
  }
  r.rule = call->op == ENG_OP_max ? MAX : call->op == ENG_OP_min ? MIN : SUM;
  if (call->op == ENG_OP_mean) r.divisor = (double)r.each;
  bool beside =
    r.kept.stride[0] == 1 && r.kept.shape[0] >= VF_LANES && (r.gone.stride[0] != 1 || r.each == 1);
  return reduce_by(&r, beside);
}

KERNEL(sum) { return reduce(call); }
KERNEL(mean) { return reduce(call); }
KERNEL(max) { return reduce(call); }
KERNEL(min) { return reduce(call); }

// ------------------------------------------------------------------ gradient of max and min

// Returns the offset of a result in y, a tensor that holds one element for each result. In y, the
// reduced dimensions have size 1 or are absent.
static int64_t result_offset(const tensor *y, const tensor *x, uint64_t mask, int64_t result)
{
  int64_t offset = 0;
  for (int d = x->ndim - 1, e = y->ndim - 1; d >= 0; d--) {
    bool gone = mask >> d & 1;
    if (!gone) {
      offset += result % x->shape[d] * y->stride[e];
      result /= x->shape[d];
    }
    if (!gone || y->ndim == x->ndim) e--;
  }
  return offset;
}

/// A call of extreme_grad. `from` describes x; `into` describes dx, which has the shape of x.
typedef struct extreme_call {
  const op_call *call;
  reduction from, into;
} extreme_call;

// Shares dy equally among the elements that equal y; NaN equals NaN here.
static void extreme_grad_task(const void *context, int64_t result)
{
  const extreme_call *e = context;
  const tensor *x = e->call->in[0], *y = e->call->in[1], *dy = e->call->in[2],
               *dx = e->call->out[0];
  uint64_t mask = (uint64_t)e->call->extreme_grad.mask;
  float extreme = get(y->data, y->dtype, result_offset(y, x, mask, result));
  double slope = get(dy->data, dy->dtype, result_offset(dy, x, mask, result));
  int64_t from = cursor_at(&e->from.kept, result).offset,
          into = cursor_at(&e->into.kept, result).offset, equals = 0;
  bool nan = f32_is_nan(extreme);
  for (int pass = 0; pass < 2; pass++) {   // counts the equal elements, then shares dy
    cursor cx = cursor_at(&e->from.gone, 0), cdx = cursor_at(&e->into.gone, 0);
    for (int64_t i = 0; i < e->from.each; i++) {
      float value = get(x->data, x->dtype, from + cx.offset);
      bool equal = value == extreme || (nan && f32_is_nan(value));
      if (pass == 0) {
        equals += equal;
      } else {
        put(dx->data, dx->dtype, into + cdx.offset, equal ? slope / (double)equals : 0.0);
        cursor_advance(&cdx, &e->into.gone, 1);
      }
      cursor_advance(&cx, &e->from.gone, 1);
    }
  }
}

KERNEL(extreme_grad)
{
  if (!all_fast(call)) return forward_to_reference(call);
  op_call target = *call;
  target.in[0] = call->out[0];
  extreme_call e = {.call = call, .from = reduction_of(call), .into = reduction_of(&target)};
  int64_t count = e.from.results * e.from.each;
  run_tasks(e.from.results, count >= PARALLEL_ELEMENTS, extreme_grad_task, &e);
  return ENG_OK;
}
