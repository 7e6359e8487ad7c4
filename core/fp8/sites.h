// FP8 layers: sites, and functions shared by the files of this folder. See sites.c. Included by
// this folder.
#pragma once

#include "autograd/gradient.h"
#include "autograd/op.h"

typedef struct fp8_site {
  char    *name;
  bool     on;
  uint32_t version;                      // changes with the recipe, and with eng_fp8_average
  eng_fp8_recipe recipe;
  // the factor of delayed scaling; 0: the role is scaled by the tensor's current amax
  double   factor[ENG_FP8_ROLES];
  tensor  *factor_of[ENG_FP8_ROLES];     // factor in device memory, f32 [1]
  eng_tensor average;                    // see eng_fp8_average
  double   amax[ENG_FP8_ROLES];
  eng_fp8_meter meter[ENG_FP8_ROLES];
  int64_t  pass;                         // random number of this backward pass
  int      accumulator;                  // the result of eng_fp8_accumulator
} fp8_site;

extern const char *const fp8_role_name[], *const fp8_product_name[];
/// Return, for messages, the name of a format (a dtype or ENG_FORMAT_*) and of a rule of
/// microscaling (ENG_MX_*), or "unknown".
const char *fp8_format_name(int64_t format);
const char *fp8_rule_name(int64_t rule);
/// Checks a format, blocks and a rule of microscaling. Errors: DTYPE, VALUE.
eng_status fp8_check_mx(int64_t format, int64_t rows, int64_t columns, int64_t rule);
extern const int fp8_factors[ENG_FP8_PRODUCTS][2];   // the roles that a product multiplies

eng_status fp8_site_get(fp8_site **out, int64_t site);
/// Returns the site if it has a recipe and autocast requests FP8, otherwise NULL.
fp8_site *fp8_site_in_force(int64_t site);

/// fp8_amax_slot reserves a slot for the next amax of a role, f32 []. fp8_amax_last returns the
/// slot that was reserved last.
typedef struct fp8_amax_place { int64_t slot, round; } fp8_amax_place;
eng_status fp8_amax_slot(tensor **out, int64_t site, int role);
fp8_amax_place fp8_amax_last(void);
/// fp8_amax_share records that another site quantizes the same x and shares the amax in a slot.
/// fp8_amax_can_share returns whether the slots of `round` have not been reused yet and there is
/// room to record one more site.
bool fp8_amax_can_share(int64_t round);
void fp8_amax_share(int64_t site, int64_t slot);

/// Returns whether meters are on. They are off while a checkpointed operation runs again.
bool fp8_measuring(void);
/// Returns the step number that eng_fp8_step set.
int64_t fp8_step(void);
/// Compares x with its codes q and updates the meter of a role.
eng_status fp8_measure(fp8_site *s, int role, tensor *x, tensor *q, const tensor *scale);

/// A sample for the meters, in host memory as f32. `x` has every `every`-th row of the tensor x.
/// `q` has these rows of its codes or values. `scale` has all scales. `x` owns the memory of all
/// three arrays. `rows` is 0 if the tensor x is empty.
typedef struct fp8_sample { float *x, *q, *scale; int64_t rows, every, columns; } fp8_sample;
/// Reads a sample. The caller frees to->x.
eng_status fp8_sample_read(fp8_sample *to, tensor *x, tensor *q, const tensor *scale);
/// Adds an element x to a meter. code: the value of its code, unscaled. scale: the scale of this
/// code. largest: the format's largest number. limit: x overflows if |x| > limit * scale.
void fp8_meter_element(eng_fp8_meter *m, float x, float code, float scale, float largest,
                       float limit);

/// fp8_drop_later drops a tensor immediately if the tape is empty, else adds it to a list.
/// fp8_release_orphans drops all tensors of this list if the tape is empty.
void fp8_drop_later(tensor *x);
void fp8_release_orphans(void);

static inline bool fp8_is_square(const eng_fp8_role *r)
{ return r->block_rows == r->block_columns; }

/// Returns a call that quantizes x as a role says. Input 1: the factor of delayed scaling, or NULL.
static inline op_call fp8_quantize_call(const fp8_site *s, int role, tensor *x, bool transposed)
{
  const eng_fp8_role *r = &s->recipe.role[role];
  return (op_call){.op = ENG_OP_quantize, .n_in = 2, .n_out = 5,
                   .in = {x, s->factor[role] != 0 ? s->factor_of[role] : NULL},
                   .quantize = {.format = r->format, .block_rows = r->block_rows,
                                .block_columns = r->block_columns, .rule = r->rule,
                                .flags = (r->stochastic ? QUANTIZE_STOCHASTIC : 0) |
                                         (r->pow2 ? QUANTIZE_POW2 : 0) |
                                         (transposed ? QUANTIZE_TRANSPOSED : 0),
                                .eps = r->eps, .margin = r->margin}};
}

/// Quantized copies of a tensor [rows x K]: q; the transposed q_t [K x rows], NULL unless
/// requested; the gate, NULL if the rule has none. In FP8, q and q_t hold codes, and scale and
/// scale_t their scales. In microscaling, q and q_t hold values in bf16 or, if `coded`, codes and
/// scales in u8 (fp8_mx_make), and scale and scale_t are amaxes, f32 [].
typedef struct fp8_copies { tensor *q, *scale, *q_t, *scale_t, *gate; } fp8_copies;
void fp8_drop_copies(fp8_copies *c);

/// fp8_mx_again returns whether the backward product of x or w uses the numbers that the forward
/// product read, unchanged or quantized again (eng_fp8_recipe.backward). fp8_mx_same returns
/// whether it uses them unchanged.
static inline bool fp8_mx_again(const fp8_site *s, int role)
{ return role != ENG_FP8_DY && s->recipe.backward[role].mx; }
static inline bool fp8_mx_same(const fp8_site *s, int role)
{ return fp8_mx_again(s, role) && s->recipe.backward[role].mx == ENG_FP8_SAME; }
/// Sets *out to the average toward which a role is rounded, or to NULL if there is none. Errors:
/// STALE (the average was freed).
eng_status fp8_average(tensor **out, const fp8_site *s, const eng_fp8_role *r);
/// Returns whether mx_matmul computes the products of a layer with x [rows x columns] and W
/// [outputs x columns]. If so, the copies hold codes.
bool fp8_mx_coded(const fp8_site *s, int64_t rows, int64_t columns, int64_t outputs);
/// Creates a tensor for a coded copy of a matrix [rows x columns]: u8 [rows x bytes], first all
/// codes, then the scales of the blocks. If blocks have several rows, the end of the tensor is
/// unused.
eng_status fp8_mx_make(tensor **out, arena_id arena, const eng_fp8_role *r, int64_t rows,
                       int64_t columns);
/// Quantizes x as a role says, into the tensors in `to` that are not NULL; creates the others.
/// Measures x if meters are on. The amax also goes to `slot`. If the role is in FP8 (only dy),
/// to->q holds the values of its codes in bf16.
eng_status fp8_mx_quantize(fp8_copies *to, tensor *slot, fp8_site *s, int role, tensor *x,
                           bool transposed, bool coded);
/// Quantizes x or w again for its backward product, from q [rows x K], the values or codes that the
/// forward product read. Writes to->q_t and to->scale_t.
eng_status fp8_mx_requantize(fp8_copies *to, const fp8_site *s, int role, tensor *q,
                             tensor *amax);
/// Turns *g, the gradient of the values that the forward product read, into the gradient of x or
/// w: applies the gate, unless it is NULL, and the forward product's Hadamard transform, if it has
/// one. The result of the transform is in `dtype`; without a transform, *g keeps its format.
eng_status fp8_mx_through(tensor **g, const fp8_site *s, tensor *gate, int dtype);
/// Draws the random number for the signs of a site's backward pass, if its recipe needs one.
void fp8_mx_begin_backward(fp8_site *s);
/// Returns the step number if the signs of w's Hadamard transforms change from step to step,
/// otherwise 0.
int64_t fp8_mx_step(const fp8_site *s);
/// An operand of a product, quantized as `role` says: q or q_t of fp8_copies, with its scale.
/// turned: the product reads the transpose; ignored for codes of microscaling, whose rows always
/// lie along the summed dimension.
typedef struct fp8_factor {
  tensor *q, *scale;
  const eng_fp8_role *role;
  bool turned;
} fp8_factor;
/// Computes y = a b + bias in `dtype`. With `add`, adds the result onto *y.
eng_status fp8_mx_multiply(tensor **y, const fp8_factor *a, const fp8_factor *b, tensor *bias,
                           int dtype, bool add);

/// Runs fp8_linear of an active site. `swiglu` is the call that computes x if x has no memory, else
/// NULL.
eng_status fp8_linear_in_force(op_call *call, fp8_site *s, const op_call *swiglu);
/// Recomputes the output of a recorded fp8_swiglu from its codes.
eng_status fp8_swiglu_recompute(tensor **y, const op_call *node);
/// Converts x to e5m6, in blocks of 1 x 128 with power-of-two scales.
eng_status fp8_to_e5m6(tensor **q, tensor **scale, tensor *x);
