// The table of operations, generated from ops.def. See op.h. Called by this folder, dist/ and Lua.
#include "op.h"

enum {
  ALL = ~0,
  I0 = 1, I1 = 2, I2 = 4, I3 = 8, I4 = 16, I5 = 32,
  O0 = 1, O1 = 2, O2 = 4, O3 = 8, O4 = 16, O5 = 32, O6 = 64, O7 = 128,
};

const op_info op_table[ENG_OP_COUNT] = {
#define MANY -1
#define ENG_OP(op, inputs, outputs, layout_, cast_, shape_, gradient_, reads_, saves_, ints_, \
               floats_) \
  [ENG_OP_##op] = { \
    .about = { \
      .name = #op, .layout = #layout_, .cast = #cast_, .shape = #shape_, .gradient = #gradient_, \
      .ints = #ints_, .floats = #floats_, .n_in = inputs, .n_out = outputs, \
      .reads = reads_, .saves = saves_, \
    }, \
    .layout = LAYOUT_##layout_, \
    .cast = CAST_##cast_, \
    .differentiable = __builtin_strcmp(#gradient_, "none") != 0, \
  },
#define ENG_OPTIONAL(op, inputs) [ENG_OP_##op].about.optional = inputs,
#define ENG_DEPENDS(op, outputs, inputs) \
  [ENG_OP_##op].later = outputs, [ENG_OP_##op].later_from = inputs,
#define ENG_TAKES_CODES(op) [ENG_OP_##op].takes_codes = true,
#define ENG_SAVES_CODES(op, outputs) [ENG_OP_##op].codes = outputs,
#include "ops.def"
#define ENG_OP(...)
#define ENG_UNARY(op, ...) [ENG_OP_##op].about.unary = 1,
#include "ops.def"
};

int op_absent_outputs(const op_call *c)
{
  int absent = 0;
#define ENG_OUTPUT_IF(name, outputs, condition) \
  if (c->op == ENG_OP_##name && !(condition)) absent |= outputs;
#include "ops.def"
  return absent;
}

int64_t *op_random_place(op_call *c, int *blocks)
{
  switch (c->op) {
#define ENG_DRAWS(name, number, place) \
  case ENG_OP_##name: \
    *blocks = number; \
    return place;
#include "ops.def"
    default: return NULL;
  }
}

bool op_adds_onto(const op_call *c, int output)
{
#define ENG_ADDS(name, number, condition) \
  if (c->op == ENG_OP_##name && output == number && condition) return true;
#include "ops.def"
  return false;
}

bool op_takes_target(int op)
{
#define ENG_ADDS(name, number, condition) \
  if (op == ENG_OP_##name && number == 0) return true;
#include "ops.def"
  return false;
}

const eng_op_info *eng_op_describe(int op)
{ return op >= 0 && op < ENG_OP_COUNT ? &op_table[op].about : NULL; }
