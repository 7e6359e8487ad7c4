// Sites: the linear layers under an FP8 recipe. A site has a name, its recipe, the factors of
// delayed scaling, the amaxes of its quantizations, and meters. See sites.h; engine_fp8.h has the
// contracts. Owns the table of sites. Called by Lua and the other files of this folder.
#include "sites.h"

#include "base/array.h"
#include "base/error.h"
#include "base/fp8_layout.h"
#include "base/fp8_scale.h"
#include "base/msamp_fp4.h"
#include "base/mx.h"
#include "device/transfer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct { fp8_site **item; int64_t length, capacity; } sites;   // item i is site i + 1
static bool measuring;

const char *const fp8_role_name[] = { "x", "w", "dy" };
const char *const fp8_product_name[] = { "forward", "dgrad", "wgrad" };

const char *fp8_format_name(int64_t format)
{
  static const char *const small[] = { "e5m6", "e2m1", "e2m3", "e3m2", "mxint8" };
  if (format < ENG_FORMAT_E5M6) return eng_dtype_name((int)format);
  return format <= ENG_FORMAT_MXINT8 ? small[format - ENG_FORMAT_E5M6] : "unknown";
}

const char *fp8_rule_name(int64_t rule)
{
  static const char *const names[] = { "floor", "ceil", "even", "rceil", "nvfp4", "four_over_six",
                                       "four_over_six_mse", "quest", "ms_eden", "msamp_fp4" };
  return rule >= 0 && rule <= ENG_MX_MSAMP_FP4 ? names[rule] : "unknown";
}
const int fp8_factors[ENG_FP8_PRODUCTS][2] = {
  {ENG_FP8_X, ENG_FP8_W}, {ENG_FP8_DY, ENG_FP8_W}, {ENG_FP8_DY, ENG_FP8_X}};

/// Returns the site with this number, or NULL.
static fp8_site *find(int64_t site)
{ return site >= 1 && site <= sites.length ? sites.item[site - 1] : NULL; }

eng_status fp8_site_get(fp8_site **out, int64_t site)
{
  *out = find(site);
  return *out ? ENG_OK
              : error_set(ENG_ERR_STATE, "FP8 site %lld does not exist or was freed",
                          (long long)site);
}

// ---- tensors that the tape may still need after their owner drops them

static struct { tensor **item; int64_t length, capacity; } orphans;

void fp8_release_orphans(void)
{
  if (!tape_empty()) return;
  while (orphans.length > 0) tensor_drop(orphans.item[--orphans.length]);
}

void fp8_drop_later(tensor *x)
{
  if (!x) return;
  if (tape_empty()) {
    tensor_drop(x);
    return;
  }
  // If the list cannot grow, x leaks: dropping it would leave a dangling pointer on the tape.
  if (ARRAY_GROW(orphans.item, orphans.capacity, orphans.length + 1))
    orphans.item[orphans.length++] = x;
}

void fp8_drop_copies(fp8_copies *c)
{
  tensor *const all[] = {c->q, c->scale, c->q_t, c->scale_t, c->gate};
  for (int k = 0; k < 5; k++) tensor_drop(all[k]);
  *c = (fp8_copies){0};
}

// ---- amaxes: every quantization writes its amax to a slot of device memory; the host reads slots
// on request

enum { AMAX_SLOTS = 4096 };
/// A role whose amax is in a slot: the role that reserved the slot, or x of another site that
/// quantizes the same tensor.
typedef struct amax_owner { int64_t site; int role, slot; } amax_owner;
static struct {
  tensor *slots;                         // f32 [AMAX_SLOTS]
  int     used;
  // whether eng_fp8_amax was called since the slots last filled up; if not, the slots are
  // overwritten unread
  bool    asked;
  int64_t round;                         // number of times the slots were reused
  amax_owner owner[2 * AMAX_SLOTS];
  int     owners;
} amaxes;

static double larger_or_nan(double a, double b) { return a != a ? a : b != b || b > a ? b : a; }

static void amaxes_restart(void)
{
  amaxes.used = amaxes.owners = 0;
  amaxes.round++;
}

static eng_status collect_amaxes(void)
{
  if (!amaxes.slots || amaxes.used == 0) return ENG_OK;
  static float value[AMAX_SLOTS];
  int used = amaxes.used, owners = amaxes.owners;
  amaxes_restart();
  OWNED tensor *some = NULL;
  ENG_TRY(tensor_view(&some, amaxes.slots, 0, 1, (int64_t[]){used}, (int64_t[]){1}));
  ENG_TRY(transfer_read(value, ENG_f32, some));
  for (const amax_owner *o = amaxes.owner; o < amaxes.owner + owners; o++) {
    fp8_site *s = sites.item[o->site - 1];
    if (s) s->amax[o->role] = larger_or_nan(s->amax[o->role], value[o->slot]);
  }
  return ENG_OK;
}

eng_status fp8_amax_slot(tensor **out, int64_t site, int role)
{
  if (amaxes.slots && amaxes.slots->store->space != arena_space()) {
    ENG_TRY(collect_amaxes());
    fp8_drop_later(amaxes.slots);
    amaxes.slots = NULL;
  }
  if (!amaxes.slots)
    ENG_TRY(tensor_make(&amaxes.slots, ARENA_KEPT, ENG_f32, 1, (int64_t[]){AMAX_SLOTS}));
  if (amaxes.used == AMAX_SLOTS) {
    if (amaxes.asked) ENG_TRY(collect_amaxes());
    amaxes_restart();
    amaxes.asked = false;
  }
  ENG_TRY(tensor_view(out, amaxes.slots, amaxes.used, 0, NULL, NULL));
  amaxes.owner[amaxes.owners++] = (amax_owner){site, role, amaxes.used++};
  return ENG_OK;
}

fp8_amax_place fp8_amax_last(void) { return (fp8_amax_place){amaxes.used - 1, amaxes.round}; }

bool fp8_amax_can_share(int64_t round)
{ return round == amaxes.round && amaxes.owners - amaxes.used < AMAX_SLOTS; }

void fp8_amax_share(int64_t site, int64_t slot)
{ amaxes.owner[amaxes.owners++] = (amax_owner){site, ENG_FP8_X, (int)slot}; }

// ---- sites

fp8_site *fp8_site_in_force(int64_t site)
{
  fp8_site *s = op_precision()->fp8 ? find(site) : NULL;
  return s && s->on ? s : NULL;
}

eng_status eng_fp8_site_new(int64_t *site, const char *name)
{
  fp8_site *s = calloc(1, sizeof *s);
  if (s) s->name = strdup(name);
  if (!s || !s->name || !ARRAY_GROW(sites.item, sites.capacity, sites.length + 1)) {
    if (s) free(s->name);
    free(s);
    return error_set(ENG_ERR_MEMORY, "out of memory for the FP8 site of %s", name);
  }
  for (int r = 0; r < ENG_FP8_ROLES; r++) s->amax[r] = -1;
  s->accumulator = -1;
  sites.item[sites.length] = s;
  *site = ++sites.length;
  return ENG_OK;
}

void eng_fp8_site_free(int64_t site)
{
  fp8_site *s;
  if (fp8_site_get(&s, site) != ENG_OK) return;
  for (int r = 0; r < ENG_FP8_ROLES; r++) fp8_drop_later(s->factor_of[r]);
  sites.item[site - 1] = NULL;
  free(s->name);
  free(s);
  fp8_release_orphans();
}

// ---- checks of a recipe. Messages leave out the names of the site, role and product, which
// eng_fp8_recipe_check and eng_fp8_site_set add

static eng_status check_msamp_role(const eng_fp8_recipe *recipe, int role, const eng_fp8_role *r)
{
  bool fits = role != ENG_FP8_DY && r == &recipe->role[role] && recipe->backward[role].mx &&
              r->format == ENG_FORMAT_E2M1 && r->block_rows == 1 && r->block_columns == 0 &&
              r->keep == ENG_FP8_KEEP_CODES && !r->stochastic && r->factor == 0 &&
              (!r->dge || role == ENG_FP8_W) && msamp_clamps(r->clamp);
  if (fits) return ENG_OK;
  return error_set(ENG_ERR_VALUE,
                   "the rule msamp_fp4 is only for x and w in the forward product, in e2m1 with a "
                   "scale for each row; it needs `backward` and keep = 'codes' and allows no "
                   "stochastic rounding and no factor; dge is allowed only for w; clamp must be 0, "
                   "or from 0.5 to 0.9999; got %s in blocks of %d x %d (0 means the whole "
                   "dimension), %s `backward`, keep number %d, %d bits of stochastic rounding, the "
                   "factor %g, dge %d and clamp %g", fp8_format_name(r->format), r->block_rows,
                   r->block_columns,
                   role != ENG_FP8_DY && recipe->backward[role].mx ? "with" : "without", r->keep,
                   r->stochastic, r->factor, r->dge, r->clamp);
}

eng_status fp8_check_mx(int64_t format, int64_t rows, int64_t columns, int64_t rule)
{
  FAIL_IF(format != ENG_e4m3 && format != ENG_e5m2 &&
          (format < ENG_FORMAT_E2M1 || format > ENG_FORMAT_MXINT8), ENG_ERR_DTYPE,
          "expected the format e4m3, e5m2, e2m1, e2m3, e3m2 or mxint8, got %s (number %lld)",
          fp8_format_name(format), (long long)format);
  FAIL_IF(rule < 0 || rule >= ENG_MX_RULES, ENG_ERR_VALUE,
          "expected a scale rule from 0 to %d, got %lld", ENG_MX_RULES - 1, (long long)rule);
  FAIL_IF((mx_is_nvfp4(rule) || mx_is_fitted(rule)) && format != ENG_FORMAT_E2M1, ENG_ERR_VALUE,
          "the rule %s needs the format e2m1, got %s", fp8_rule_name(rule),
          fp8_format_name(format));
  FAIL_IF(rows < 1 || rows > 128 || columns < 1 || columns > 128 ||
          (format == ENG_FORMAT_E2M1 && columns % 2), ENG_ERR_VALUE,
          "expected blocks of 1 to 128 rows and columns (for e2m1, an even number of columns), got "
          "%lld x %lld (0 means the whole dimension)", (long long)rows, (long long)columns);
  return ENG_OK;
}

static eng_status check_mx_role(const eng_fp8_recipe *recipe, int role, const eng_fp8_role *r)
{
  if (r->mx - 1 == ENG_MX_MSAMP_FP4) return check_msamp_role(recipe, role, r);
  bool again = role != ENG_FP8_DY && recipe->backward[role].mx,
       backward = r != &recipe->role[role];
  ENG_TRY(fp8_check_mx(r->format, r->block_rows, r->block_columns, r->mx - 1));
  FAIL_IF(r->stochastic < 0 || r->stochastic > 24 ||
          !(r->factor == 0 || (r->factor >= 0.5 && r->factor <= 1)) ||
          (mx_is_four_over_six(r->mx - 1) && (r->stochastic || r->factor != 0)), ENG_ERR_VALUE,
          "expected 0 to 24 bits of stochastic rounding and a factor from 0.5 to 1, or 0 for none "
          "(with four_over_six, both must be 0), got %d bits and the factor %g", r->stochastic,
          r->factor);
  FAIL_IF(mx_is_gated(r->mx - 1) &&
          (!again || backward || r->block_rows != 1 || r->stochastic || r->factor != 0),
          ENG_ERR_VALUE,
          "the rule quest is only for x and w in the forward product, in blocks of one row; it "
          "needs `backward` in the same role and allows no stochastic rounding and no factor; got "
          "it %s, in blocks of %d x %d, with %d bits of stochastic rounding and the factor %g",
          backward ? "as `backward`" : again ? "with `backward`" : "without `backward`",
          r->block_rows, r->block_columns, r->stochastic, r->factor);
  FAIL_IF(r->mx - 1 == ENG_MX_MS_EDEN &&
            ((role != ENG_FP8_DY && !backward) || r->block_rows != 1 || r->factor != 0 ||
             MX_EDEN_GROUP % r->block_columns), ENG_ERR_VALUE,
          "the rule ms_eden is only for dy and for `backward` of x and w; it needs blocks of "
          "one row and of a length that divides %d, and allows no factor; got blocks of %d x %d "
          "and the factor %g", MX_EDEN_GROUP, r->block_rows, r->block_columns, r->factor);
  FAIL_IF(!(r->average >= 0 && r->average < 1), ENG_ERR_VALUE,
          "expected `average` (a decay) to be at least 0 and below 1, got %g", r->average);
  const bool rotated =
    recipe->product[ENG_FP8_FORWARD].hadamard ||
    (!recipe->backward[ENG_FP8_W].mx && recipe->product[ENG_FP8_DGRAD].hadamard);
  FAIL_IF(r->average != 0 &&
            (role != ENG_FP8_W || backward || r->stochastic || mx_is_fitted(r->mx - 1) ||
             mx_is_four_over_six(r->mx - 1) || rotated), ENG_ERR_VALUE,
          "the option average is allowed only for w (not in its backward format), with the rule "
          "floor, ceil, even, rceil or nvfp4, and with neither stochastic rounding nor a Hadamard "
          "transform of w; got the rule %s, %d bits of stochastic rounding and %s Hadamard "
          "transform", fp8_rule_name(r->mx - 1), r->stochastic, rotated ? "a" : "no");
  FAIL_IF(again && fp8_is_square(r), ENG_ERR_VALUE,
          "expected blocks that are not square, because this tensor has `backward`; got %d x %d",
          r->block_rows, r->block_columns);
  int keep = again || fp8_is_square(r) ? ENG_FP8_KEEP_CODES : ENG_FP8_KEEP_TRANSPOSED;
  if (role == ENG_FP8_X && !backward && r->keep != keep)
    return error_set(ENG_ERR_VALUE, keep == ENG_FP8_KEEP_CODES
                       ? "microscaling in square blocks, or with `backward`, needs keep = 'codes', "
                         "got number %d (ENG_FP8_KEEP_*)"
                       : "microscaling in blocks that are not square, and without `backward`, "
                         "needs keep = 'transposed', got number %d (ENG_FP8_KEEP_*)", r->keep);
  return ENG_OK;
}

static eng_status check_role(const eng_fp8_recipe *recipe, int role)
{
  const eng_fp8_role *r = &recipe->role[role];
  const eng_fp8_role *backward = role == ENG_FP8_DY ? NULL : &recipe->backward[role];
  if (backward && backward->mx && backward->mx != ENG_FP8_SAME)
    ENG_TRY(check_mx_role(recipe, role, backward));
  if (r->mx) return check_mx_role(recipe, role, r);
  FAIL_IF(r->format != ENG_e4m3 && r->format != ENG_e5m2, ENG_ERR_DTYPE,
          "expected the format e4m3 or e5m2, got %s (number %d)", fp8_format_name(r->format),
          r->format);
  FAIL_IF(r->block_rows < 0 || r->block_columns < 0, ENG_ERR_VALUE, "expected blocks of 1 or more "
          "rows and columns (0 means the whole dimension), got %d x %d", r->block_rows,
          r->block_columns);
  FAIL_IF(r->rule < 0 || r->rule >= ENG_SCALES, ENG_ERR_VALUE,
          "expected a scale rule ENG_SCALE_*, got number %d", r->rule);
  FAIL_IF(r->margin < -100 || r->margin > 100, ENG_ERR_VALUE,
          "expected a margin within +-100, got %d", r->margin);
  FAIL_IF(r->keep < 0 || r->keep > ENG_FP8_KEEP_SWIGLU, ENG_ERR_VALUE,
          "expected keep to be one of ENG_FP8_KEEP_*, got number %d", r->keep);
  FAIL_IF(!(fabs(r->eps) <= 1e30), ENG_ERR_VALUE,
          "expected eps within +-1e30 (negative: the rule's default), got %g", r->eps);
  return ENG_OK;
}

/// Checks that all roles have rules of FP8, or all have rules of microscaling. Microscaling also
/// allows dy in FP8 if its values are exact in bf16 and it has no transposed copy.
static eng_status check_kinds(const eng_fp8_recipe *recipe)
{
  const eng_fp8_role *r = recipe->role, *dy = &r[ENG_FP8_DY];
  bool exact = fp8_is_square(dy) && (dy->pow2 || dy->rule == ENG_SCALE_MSAMP);
  if (!r[ENG_FP8_X].mx == !r[ENG_FP8_W].mx &&
      (!dy->mx == !r[ENG_FP8_X].mx || (r[ENG_FP8_X].mx && exact)))
    return ENG_OK;
  return error_set(ENG_ERR_VALUE,
                   "expected x, w and dy to be all in microscaling or all in FP8; if x and w are "
                   "in microscaling, dy may be in FP8 with power-of-two scales (the rule msamp, or "
                   "pow2 = true) and with square blocks or one block for the whole tensor; got x "
                   "in %s, w in %s and dy in %s; dy has blocks of %d x %d (0 means the whole "
                   "dimension), the scale rule number %d and pow2 = %s",
                   r[ENG_FP8_X].mx ? "microscaling" : "FP8",
                   r[ENG_FP8_W].mx ? "microscaling" : "FP8", dy->mx ? "microscaling" : "FP8",
                   dy->block_rows, dy->block_columns, dy->rule, dy->pow2 ? "true" : "false");
}

static eng_status check_hadamard(const eng_fp8_recipe *recipe, int product)
{
  const eng_fp8_product *p = &recipe->product[product];
  const int *roles = fp8_factors[product];
  bool forward = product == ENG_FP8_FORWARD, again = recipe->backward[ENG_FP8_X].mx;
  const eng_fp8_role *a = &recipe->role[roles[0]],
                     *b = &(again && !forward ? recipe->backward : recipe->role)[roles[1]];
  int n = p->hadamard;
  FAIL_IF(n != MX_EDEN_GROUP && (a->mx - 1 == ENG_MX_MS_EDEN || b->mx - 1 == ENG_MX_MS_EDEN),
          ENG_ERR_VALUE, "ms_eden needs hadamard = %d, got %d", MX_EDEN_GROUP, n);
  if (!n) return ENG_OK;
  FAIL_IF(b->mx == ENG_FP8_SAME, ENG_ERR_VALUE, "expected hadamard to be 0, because %s has "
          "backward = \"same\", got %d", fp8_role_name[roles[1]], n);
  FAIL_IF(forward && again && p->signs != ENG_FP8_SIGNS_NONE, ENG_ERR_VALUE,
          "if x and w have `backward`, their gradients pass through this product's Hadamard "
          "transform, which needs signs = \"none\", got number %d (ENG_FP8_SIGNS_*)", p->signs);
  FAIL_IF(p->signs == ENG_FP8_SIGNS_BACKWARD && (forward || !again), ENG_ERR_VALUE,
          "signs = \"backward\" is allowed only in dgrad and wgrad, and only if x and w have "
          "the field `backward`");
  FAIL_IF(p->signs < ENG_FP8_SIGNS_NONE || p->signs > ENG_FP8_SIGNS_BACKWARD, ENG_ERR_VALUE,
          "expected signs to be one of ENG_FP8_SIGNS_*, got number %d", p->signs);
  FAIL_IF((n != 16 && n != 32 && n != 64 && n != 128) || p->high || !a->mx || fp8_is_square(a) ||
          fp8_is_square(b), ENG_ERR_VALUE, "expected hadamard to be 0, 16, 32, 64 or 128, and 0 "
          "if the product is in high precision or an operand is in FP8 or in square blocks; got "
          "%d%s with %s%s in blocks of %d x %d and %s in blocks of %d x %d (0 means the whole "
          "dimension)", n, p->high ? " in high precision" : "", fp8_role_name[roles[0]],
          a->mx ? "" : " in FP8 and", a->block_rows, a->block_columns, fp8_role_name[roles[1]],
          b->block_rows, b->block_columns);
  return ENG_OK;
}

static eng_status check_product(const eng_fp8_recipe *recipe, int product)
{
  const eng_fp8_product *p = &recipe->product[product];
  bool mx = recipe->role[0].mx;
  int n = p->accumulator;
  FAIL_IF(p->high && (product != ENG_FP8_FORWARD || !mx), ENG_ERR_VALUE,
          "only the forward product can be in high precision, and only in microscaling");
  ENG_TRY(check_hadamard(recipe, product));
  bool fits = n >= 0 && n < ENG_ACCUMULATORS;
  if (mx)
    fits = n == ENG_ACCUMULATE_DEVICE || n == ENG_ACCUMULATE_FP32 || n == ENG_ACCUMULATE_BLACKWELL;
  FAIL_IF(!fits, ENG_ERR_VALUE,
          "expected the accumulator to be %s (ENG_ACCUMULATE_*), got %d",
          mx ? "-1, 0 or 4 in microscaling" : "0, 1, 2 or 3 outside microscaling", n);
  FAIL_IF(p->promotion < 0 || p->promotion % 32, ENG_ERR_VALUE,
          "expected a promotion interval that is a multiple of 32, or 0, got %d", p->promotion);
  return ENG_OK;
}

/// Compares the block sizes of a product's operands along the summed dimension: one size must
/// divide the other. The size is always block_columns, because a matrix whose blocks are not square
/// is quantized again, transposed, for its other product.
static eng_status check_nesting(const eng_fp8_recipe *recipe, int product)
{
  const int *roles = fp8_factors[product];
  int a = recipe->role[roles[0]].block_columns, b = recipe->role[roles[1]].block_columns;
  if (a == 0 || b == 0 || a % b == 0 || b % a == 0) return ENG_OK;
  return error_set(ENG_ERR_SHAPE,
                   "along the summed dimension, blocks of %s have %d elements and blocks of %s "
                   "have %d; one must divide the other",
                   fp8_role_name[roles[0]], a, fp8_role_name[roles[1]], b);
}

eng_status eng_fp8_recipe_check(const eng_fp8_recipe *recipe)
{
  for (int r = 0; r < ENG_FP8_ROLES; r++)
    ENG_TRY(error_prefix(check_role(recipe, r), "%s", fp8_role_name[r]));
  ENG_TRY(check_kinds(recipe));
  FAIL_IF(!recipe->backward[ENG_FP8_X].mx != !recipe->backward[ENG_FP8_W].mx, ENG_ERR_VALUE,
          "expected `backward` in both x and w, or in neither, got it only in %s",
          fp8_role_name[recipe->backward[ENG_FP8_X].mx ? ENG_FP8_X : ENG_FP8_W]);
  FAIL_IF(recipe->backward[ENG_FP8_X].mx && !recipe->role[ENG_FP8_X].mx, ENG_ERR_VALUE,
          "expected `backward` only in microscaling, got it with x and w in FP8");
  for (int p = 0; p < ENG_FP8_PRODUCTS; p++) {
    ENG_TRY(error_prefix(check_product(recipe, p), "%s", fp8_product_name[p]));
    ENG_TRY(error_prefix(check_nesting(recipe, p), "%s", fp8_product_name[p]));
  }
  return ENG_OK;
}

eng_status eng_fp8_site_set(int64_t site, const eng_fp8_recipe *recipe)
{
  fp8_site *s;
  ENG_TRY(fp8_site_get(&s, site));
  fp8_release_orphans();
  FAIL_IF(!tape_empty(), ENG_ERR_STATE, "%s: this layer's FP8 recipe cannot change while the tape "
          "has operations; hint: change the recipe between steps", s->name);
  if (recipe) {
    ENG_TRY(error_prefix(eng_fp8_recipe_check(recipe), "%s", s->name));
    s->recipe = *recipe;
  }
  for (int r = 0; r < ENG_FP8_ROLES; r++) s->factor[r] = 0;
  s->on = recipe != NULL;
  s->version++;
  return ENG_OK;
}

eng_status eng_fp8_delay(int64_t site, int role, double amax)
{
  fp8_site *s;
  ENG_TRY(fp8_site_get(&s, site));
  FAIL_IF(role < 0 || role >= ENG_FP8_ROLES, ENG_ERR_VALUE,
          "%s: expected a role ENG_FP8_X, W or DY, got number %d", s->name, role);
  const eng_fp8_role *r = &s->recipe.role[role];
  FAIL_IF(!s->on, ENG_ERR_STATE,
          "%s: delayed scaling needs an FP8 recipe, and this site has none; hint: call "
          "eng_fp8_site_set first", s->name);
  FAIL_IF(!(amax >= 0) || !f32_is_finite((float)amax) || (amax > 0 && (float)amax == 0),
          ENG_ERR_VALUE,
          "%s: the amax of %s: expected a positive finite f32, or 0 for the measured amax, got %g",
          s->name, fp8_role_name[role], amax);
  FAIL_IF(amax != 0 && (r->block_rows || r->block_columns), ENG_ERR_VALUE,
          "%s: delayed scaling needs one block, but %s has blocks of %d x %d; hint: block = "
          "\"tensor\"", s->name, fp8_role_name[role], r->block_rows, r->block_columns);
  fp8_scale scale = fp8_scale_of((float)amax, fp8_largest(r->format), r->rule, r->pow2,
                                 fp8_eps(r->rule, r->eps), r->margin, fp8_limit(0, 0, ENG_f32));
  float wanted = amax == 0 ? 0.0f : fp8_divides(r->rule) ? 1.0f / scale.scale : scale.factor;
  if (s->factor_of[role] && s->factor_of[role]->store->space != arena_space()) {
    fp8_drop_later(s->factor_of[role]);
    s->factor_of[role] = NULL;
    s->factor[role] = 0;
  }
  if (s->factor[role] == (double)wanted) return ENG_OK;
  if (amax != 0) {
    if (!s->factor_of[role])
      ENG_TRY(tensor_make(&s->factor_of[role], ARENA_KEPT, ENG_f32, 1, (int64_t[]){1}));
    ENG_TRY(transfer_set(s->factor_of[role], wanted));
  }
  s->factor[role] = wanted;
  return ENG_OK;
}

eng_status eng_fp8_average(int64_t site, const eng_tensor *handle)
{
  fp8_site *s;
  tensor *average;
  ENG_TRY(fp8_site_get(&s, site));
  if (handle) {
    ENG_TRY(tensor_get(&average, handle));
    FAIL_IF(average->dtype != ENG_f32, ENG_ERR_DTYPE,
            "%s: expected the average of w in f32, got %s", s->name, tensor_text(average));
  }
  s->average = handle ? *handle : (eng_tensor){0};
  s->version++;
  return ENG_OK;
}

eng_status fp8_average(tensor **out, const fp8_site *s, const eng_fp8_role *r)
{
  *out = NULL;
  if (r->average == 0 || s->average.slot == 0) return ENG_OK;
  return error_prefix(tensor_get(out, &s->average), "%s: the average of w", s->name);
}

eng_status eng_fp8_amax(double amax[3], int64_t site)
{
  fp8_site *s;
  ENG_TRY(fp8_site_get(&s, site));
  ENG_TRY(collect_amaxes());
  amaxes.asked = true;
  for (int r = 0; r < ENG_FP8_ROLES; r++) {
    amax[r] = s->amax[r];
    s->amax[r] = -1;
  }
  return ENG_OK;
}

// ---- meters

bool fp8_measuring(void) { return measuring && !tape_runs_again(); }

static int64_t current_step;
void eng_fp8_step(int64_t step) { current_step = step; }
int64_t fp8_step(void) { return current_step; }

bool eng_fp8_measure(bool on)
{
  bool before = measuring;
  measuring = on;
  return before;
}

int eng_fp8_accumulator(int64_t site)
{
  const fp8_site *s = find(site);
  return s ? s->accumulator : -1;
}

eng_status eng_fp8_meters(eng_fp8_meter meter[3], int64_t site)
{
  fp8_site *s;
  ENG_TRY(fp8_site_get(&s, site));
  memcpy(meter, s->meter, sizeof s->meter);
  memset(s->meter, 0, sizeof s->meter);
  return ENG_OK;
}

enum { MOST_MEASURED = 1 << 16 };

void fp8_meter_element(eng_fp8_meter *m, float x, float code, float scale, float largest,
                       float limit)
{
  if (!f32_is_finite(x)) {
    m->nonfinite++;
    return;
  }
  double size = fabs((double)x), off = (double)x - (double)code * scale;
  m->count++;
  if (size == 0) m->zeros++;
  else {
    m->underflow += code == 0;                                    // -0 included
    m->overflow += fabsf(code) == largest && size > (double)limit * scale;
    if (m->least == 0 || size < m->least) m->least = size;
    // only here, because the scale of a block of zeros says nothing
    if (m->scale_min == 0 || scale < m->scale_min) m->scale_min = scale;
    if (scale > m->scale_max) m->scale_max = scale;
  }
  if (size > m->amax) m->amax = size;
  m->signal += size * size;
  if (f32_is_finite(code)) m->error += off * off;
}

/// Reads every `every`-th row of x [.. x K] as f32 into host memory.
static eng_status read_rows(float *to, tensor *x, int64_t every)
{
  OWNED tensor *flat = NULL, *some = NULL;
  ENG_TRY(op_rows(&flat, x));
  ENG_TRY(op_run1(&some, (op_call){.op = ENG_OP_slice, .in = {flat},
                                   .slice = {.stop = flat->shape[0], .step = every}}));
  return transfer_read(to, ENG_f32, some);
}

eng_status fp8_sample_read(fp8_sample *to, tensor *x, tensor *q, const tensor *scale)
{
  *to = (fp8_sample){0};
  if (x->count == 0) return ENG_OK;
  int64_t columns = x->shape[x->ndim - 1], rows = x->count / columns,
          most = MOST_MEASURED / columns > 1 ? MOST_MEASURED / columns : 1,
          every = (rows + most - 1) / most, taken = (rows + every - 1) / every;
  float *values = malloc((size_t)(2 * taken * columns + scale->count) * sizeof *values);
  FAIL_IF(!values, ENG_ERR_MEMORY, "out of memory for the FP8 meters");
  *to = (fp8_sample){values, values + taken * columns, values + 2 * taken * columns, taken, every,
                     columns};
  eng_status status = read_rows(to->x, x, every);
  if (status == ENG_OK) status = read_rows(to->q, q, every);
  if (status == ENG_OK) status = transfer_read(to->scale, ENG_f32, scale);
  if (status != ENG_OK) free(values);
  return status;
}

eng_status fp8_measure(fp8_site *s, int role, tensor *x, tensor *q, const tensor *scale)
{
  const eng_fp8_role *r = &s->recipe.role[role];
  fp8_sample m;
  ENG_TRY(fp8_sample_read(&m, x, q, scale));
  fp8_scales at = fp8_scales_for(r->block_rows, r->block_columns,
                                 m.columns ? x->count / m.columns : 0, m.columns, NULL);
  // Magnitudes above `limit` overflow (fp8.h). 464 itself does not overflow in e4m3, but 61440
  // itself overflows in e5m2, so the limit of e5m2 is the next smaller f32.
  float largest = fp8_largest(r->format),
        limit = r->format == ENG_e4m3 ? 464.0f : f32_from(f32_bits(61440.0f) - 1);
  for (int64_t i = 0; i < m.rows; i++)
    for (int64_t k = 0; k < m.columns; k++)
      fp8_meter_element(&s->meter[role], m.x[i * m.columns + k], m.q[i * m.columns + k],
                        m.scale[fp8_scale_at(&at, i * m.every, k)], largest, limit);
  free(m.x);
  return ENG_OK;
}
