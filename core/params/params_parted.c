// Divided weights (ZeRO-3). The flat buffers of weights keep their addresses, so that tensors,
// views and the tape stay valid; pages that hold none of this rank's own elements are returned to
// the system. Weights that are used together form a unit. Before an operation that reads an absent
// weight, dist/ fetches the weight's whole unit (parted_link), and the units that the operation
// does not read are dropped. So a forward pass has one unit after the other in memory, and the
// backward pass has them in reverse order.
//
// While operations use a unit, the next unit is already being fetched; parted_order.c predicts it
// from earlier passes. If another unit is needed, the predicted unit is received completely and
// then dropped. At most one unit is in flight, and none while weights are written (params_wait).
// A derived copy (the FP8 copy of a weight) is fetched early only if an operation has already
// needed it since parted_drop. Until then it may be out of date, because the rank that owns the
// weight quantizes it again only for the first operation that needs it.
//
// Absent weights are marked in their storage, so that nothing reads or writes them by mistake
// (tensor_get). Owns the table and the marks. Called by autograd/, fp8/, dist/ and this folder.
#include "params_parted.h"

#include "base/error.h"

#include <stdlib.h>
#include <unistd.h>

int parted_tensors(tensor *out[PARAMS_DERIVED], const eng_params *set, int i, int form)
{
  const parameter *p = &set->member[i];
  if (form == PARTED_DERIVED) return p->derived ? p->derived->tensors(out, p->derived) : 0;
  out[0] = form == PARTED_COMPUTE && p->low ? p->low : p->value;
  return form == PARTED_COMPUTE || p->low;
}

bool parted_holds(int *form, const parameter *p, const storage *store)
{
  for (int f = 0; f < PARTED_FORMS; f++) {
    tensor *x[PARAMS_DERIVED];
    int n = parted_tensors(x, p->set, p->index, f);
    for (int k = 0; k < n; k++)
      if (x[k]->store == store) {
        *form = f;
        return true;
      }
  }
  return false;
}

int64_t parted_kept(const eng_params *set, const params_parted *q)
{
  int64_t bytes[4];
  eng_params_bytes(bytes, set);
  return bytes[0] + bytes[1] + bytes[3] - q->away;
}

// ---- the table

/// Adds the whole pages between two addresses to a unit.
static eng_status add_pages(params_parted *q, int unit, int form, char *from, char *to)
{
  uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE),
            low = ((uintptr_t)from + size - 1) / size * size,
            high = (uintptr_t)to / size * size;
  if (high <= low) return ENG_OK;
  parted_unit *u = &q->unit[unit];
  int n = u->n_pages[form];
  parted_pages *more = realloc(u->pages[form], ((size_t)n + 1) * sizeof *more);
  FAIL_IF(!more, ENG_ERR_MEMORY, "out of memory for the table of weights");
  u->pages[form] = more;
  more[n] = (parted_pages){(char *)low, (int64_t)(high - low)};
  u->n_pages[form]++;
  q->away += more[n].bytes;
  return ENG_OK;
}

/// Finds the pages of a flat buffer that hold no elements of this rank. Merges adjacent runs of
/// bytes of one unit and form, because a page may span several of them.
static eng_status find_pages(params_parted *q, const eng_params *set, const int64_t *own,
                             const flat_buffer *flat)
{
  char *from = NULL, *to = NULL;       // a run of other ranks' bytes, in `unit` and `form`
  int unit = -1, form = 0;
  for (int i = 0; flat && i < set->n; i++) {
    const tensor *x = flat->part[i];
    if (!x || q->unit_of[i] < 0) continue;
    bool master = set->member[i].low && flat == set->masters;
    int its_form = master ? PARTED_MASTER : PARTED_COMPUTE;
    int64_t size = eng_dtype_size(x->dtype), a = own[2 * i], b = own[2 * i + 1];
    char *begin = x->data, *end = begin + params_part_bytes(x->count, x->dtype);
    char *gap[2][2] = {{begin, a == b ? end : begin + a * size}, {begin + b * size, end}};
    for (int k = 0; k < (a == b ? 1 : 2); k++) {
      if (gap[k][0] == gap[k][1]) continue;
      if (to == gap[k][0] && unit == q->unit_of[i] && form == its_form) {
        to = gap[k][1];
        continue;
      }
      if (to) ENG_TRY(add_pages(q, unit, form, from, to));
      from = gap[k][0];
      to = gap[k][1];
      unit = q->unit_of[i];
      form = its_form;
    }
  }
  return to ? add_pages(q, unit, form, from, to) : ENG_OK;
}

/// Finds the pages that this rank returns to the system for a derived copy. The copy has its own
/// memory, so these are all its whole pages. The rank that owns the parameter keeps its copy and
/// returns none.
static eng_status find_derived_pages(params_parted *q, const eng_params *set, const int64_t *own,
                                     int i)
{
  tensor *x[PARAMS_DERIVED];
  int n = q->unit_of[i] < 0 ? 0 : parted_tensors(x, set, i, PARTED_DERIVED);
  for (int k = 0; k < n && own[2 * i] == own[2 * i + 1]; k++)
    ENG_TRY(add_pages(q, q->unit_of[i], PARTED_DERIVED, x[k]->data,
                      (char *)x[k]->data + x[k]->store->bytes));
  return ENG_OK;
}

eng_status parted_new(params_parted **out, const eng_params *set, const int64_t *own,
                      const int32_t *units, const uint8_t *apart)
{
  params_parted *q = calloc(1, sizeof *q);
  *out = NULL;
  FAIL_IF(!q, ENG_ERR_MEMORY, "out of memory for the table of weights");
  HEAP_TAKE(&q->memory, q->unit_of, set->n);
  HEAP_TAKE(&q->memory, q->piece, set->n);
  for (int i = 0; q->unit_of && i < set->n; i++) {
    q->unit_of[i] = apart[i] ? -1 : units[i];
    if (q->unit_of[i] >= q->n_units) q->n_units = q->unit_of[i] + 1;
  }
  HEAP_TAKE(&q->memory, q->unit, q->n_units);
  eng_status status = q->memory.failed ? error_set(ENG_ERR_MEMORY, "out of memory for the table of "
                                                                   "weights") : ENG_OK;
  if (status == ENG_OK) status = find_pages(q, set, own, set->masters);
  if (status == ENG_OK) status = find_pages(q, set, own, set->low);
  for (int i = 0; status == ENG_OK && i < set->n; i++)
    status = find_derived_pages(q, set, own, i);
  if (status != ENG_OK) {
    parted_free(q);
    return status;
  }
  q->whole = true;
  q->coming = q->ahead = -1;
  *out = q;
  return ENG_OK;
}

void parted_free(params_parted *q)
{
  if (!q) return;
  for (int u = 0; q->unit && u < q->n_units; u++)
    for (int f = 0; f < PARTED_FORMS; f++) free(q->unit[u].pages[f]);
  heap_free(&q->memory);
  free(q);
}

// ---- fetching and dropping units

static void move_pages(params_parted *q, int unit, int form, bool here)
{
  parted_unit *u = &q->unit[unit];
  if (u->here[form] == here) return;
  u->here[form] = here;
  for (int k = 0; k < u->n_pages[form]; k++) {
    const parted_pages *p = &u->pages[form][k];
    q->here += here ? p->bytes : -p->bytes;
    if (q->imagined) continue;
    if (here) arena_pages_take(ARENA_PARAMETER, p->at, p->bytes);
    else arena_pages_give(ARENA_PARAMETER, p->at, p->bytes);
  }
  if (q->here > q->most) q->most = q->here;
}

params_parted *params_exchanging;

static void set_coming(params_parted *q, int32_t number)
{
  q->coming = number;
  if (!q->imagined) params_exchanging = number >= 0 ? q : NULL;
}

/// Waits for the unit that is being filled, if there is one. After an error, drops the unit's
/// pages.
static eng_status arrive(params_parted *q)
{
  if (q->coming < 0) return ENG_OK;
  int unit = q->coming / PARTED_FORMS, form = q->coming % PARTED_FORMS;
  eng_status status = q->link->finish(q->data);
  set_coming(q, -1);
  if (status != ENG_OK) move_pages(q, unit, form, false);
  return status;
}

eng_status params_wait(void) { return params_exchanging ? arrive(params_exchanging) : ENG_OK; }

eng_status params_advance(void)
{ return params_exchanging->link->advance(params_exchanging->data); }

/// Begins to fill a unit. First waits for the unit in flight, which may belong to another set; a
/// table that only predicts the use of memory (`imagined`) has none.
static eng_status start(params_parted *q, int unit, int form)
{
  if (!q->imagined) ENG_TRY(params_wait());
  move_pages(q, unit, form, true);
  eng_status status = q->link->start(q->data, unit, form);
  if (status == ENG_OK) set_coming(q, unit * PARTED_FORMS + form);
  else move_pages(q, unit, form, false);
  return status;
}

/// Begins to fill the unit that is predicted to be used next.
static eng_status start_next(params_parted *q)
{
  int32_t next = order_next(&q->order);
  if (next < 0) return ENG_OK;
  int unit = next / PARTED_FORMS, form = next % PARTED_FORMS;
  bool made = form != PARTED_DERIVED || q->unit[unit].made;
  if (!made || q->unit[unit].here[form]) return ENG_OK;
  ENG_TRY(start(q, unit, form));
  q->ahead = next;
  return ENG_OK;
}

eng_status parted_need(params_parted *q, const int *unit, const int *form, int n)
{
  int32_t ahead = q->ahead;
  q->ahead = -1;
  q->clock++;
  ENG_TRY(arrive(q));
  for (int k = 0; k < n; k++) q->unit[unit[k]].used = q->clock;
  for (int u = 0; u < q->n_units; u++)
    for (int f = 0; q->unit[u].used != q->clock && f < PARTED_FORMS; f++)
      move_pages(q, u, f, false);
  for (int k = 0; k < n; k++) {
    int32_t number = unit[k] * PARTED_FORMS + form[k];
    if (!q->unit[unit[k]].here[form[k]]) {
      ENG_TRY(start(q, unit[k], form[k]));
      ENG_TRY(arrive(q));
    } else if (number == ahead) {
      ahead = -1;
      q->used_ahead++;
    } else continue;
    if (form[k] == PARTED_DERIVED) q->unit[unit[k]].made = true;
    order_note(&q->order, number);
  }
  return start_next(q);
}

eng_status parted_drop(params_parted *q)
{
  eng_status status = arrive(q);
  q->ahead = -1;
  order_note(&q->order, ORDER_END);
  for (int u = 0; u < q->n_units; u++) {
    q->unit[u].made = false;
    for (int f = 0; f < PARTED_FORMS; f++) move_pages(q, u, f, false);
  }
  return status;
}

/// Sets the marks of the storages of divided members: storage.parted, closed and absent.
static void mark(eng_params *set)
{
  const params_parted *q = set->parted;
  tensor *x[PARAMS_DERIVED];
  for (int i = 0; i < set->n; i++)
    for (int f = 0; f < PARTED_FORMS; f++)
      for (int k = parted_tensors(x, set, i, f) - 1; k >= 0 && q->unit_of[i] >= 0; k--) {
        x[k]->store->parted = &set->member[i];
        x[k]->store->closed = !q->whole;
        x[k]->store->absent = !q->whole && !parted_here(q, q->unit_of[i], f);
      }
}

eng_status params_part(eng_params *set, params_parted *q)
{
  set->parted = q;
  for (int u = 0; u < q->n_units; u++)
    for (int f = 0; f < PARTED_FORMS; f++) q->unit[u].here[f] = true;
  q->here = q->away;
  mark(set);
  for (int i = 0; i < set->n; i++) {
    int64_t from = set->own[2 * i], count = set->own[2 * i + 1] - from;
    const tensor *x = set->member[i].value;
    ENG_TRY(tensor_wrap(&q->piece[i], set->space,
                        (char *)x->data + from * eng_dtype_size(x->dtype), x->dtype, 1, &count));
  }
  return ENG_OK;
}

/// Fetches the weights among x[n] that belong to the set of `absent`, one of them.
static eng_status fetch_set(const parameter *absent, tensor *const *x, int n)
{
  int unit[ENG_OP_INPUTS], form[ENG_OP_INPUTS], m = 0;
  eng_params *set = absent->set;
  for (int k = 0; k < n; k++) {
    const parameter *p = x[k] ? x[k]->store->parted : NULL;
    if (!p || p->set != set || !parted_holds(&form[m], p, x[k]->store)) continue;
    unit[m++] = set->parted->unit_of[p->index];
  }
  FAIL_IF(!set->parted->link, ENG_ERR_STATE,
          "parameter %s: this rank has only its part (zero=3), and the trainer, which fetches "
          "the rest, was freed; hint: keep the trainer while you use the model", absent->name);
  eng_status status = parted_need(set->parted, unit, form, m);
  mark(set);
  return status;
}

eng_status params_fetch(tensor *const *x, int n)
{
  for (int k = 0; k < n; k++)
    if (x[k] && x[k]->store->absent) ENG_TRY(fetch_set(x[k]->store->parted, x, n));
  return ENG_OK;
}

eng_status params_leave(eng_params *set)
{
  params_parted *q = set->parted;
  bool was_whole = q->whole;
  q->whole = false;
  if (was_whole) ENG_TRY(params_round_written(set));   // a script may have written to masters
  eng_status status = parted_drop(q);
  mark(set);
  if (was_whole) q->most = 0;
  return status;
}

eng_status params_bring_all(eng_params *set)
{
  params_parted *q = set->parted;
  if (q->whole) return ENG_OK;
  FAIL_IF(!q->link, ENG_ERR_STATE,
          "this rank has only its part of the weights (zero=3), and the trainer, which fetches "
          "the rest, was freed; hint: keep the trainer while you use the model");
  ENG_TRY(params_leave(set));      // so that all ranks fetch the same units
  for (int u = 0; u < q->n_units; u++)
    for (int f = 0; f < PARTED_FORMS; f++) {
      if (f == PARTED_DERIVED) {
        move_pages(q, u, f, true);
        continue;
      }
      eng_status status = start(q, u, f);
      if (status == ENG_OK) status = arrive(q);
      if (status == ENG_OK) continue;
      params_leave(set);
      return status;
    }
  for (int i = 0; i < set->n; i++)   // each rank now has the weights to make derived copies itself
    if (set->member[i].derived) set->member[i].derived->outdate(set->member[i].derived);
  q->whole = true;
  mark(set);
  return ENG_OK;
}

void params_forget_parts(eng_params *set)
{
  params_parted *q = set->parted;
  tensor *x[PARAMS_DERIVED];
  if (!q) return;
  arrive(q);
  for (int u = 0; u < q->n_units; u++)
    for (int f = 0; f < PARTED_FORMS; f++) move_pages(q, u, f, true);
  for (int i = 0; i < set->n; i++)
    for (int f = 0; f < PARTED_FORMS; f++)
      for (int k = parted_tensors(x, set, i, f) - 1; k >= 0; k--) {
        x[k]->store->parted = NULL;
        x[k]->store->closed = x[k]->store->absent = false;
      }
  set->parted = NULL;
  for (int i = 0; q->piece && i < set->n; i++) tensor_drop(q->piece[i]);
  parted_free(q);
}

// ---- derived copies

void params_derived_freed(parameter *p)
{
  params_parted *q = p->set->parted;
  if (!q || q->unit_of[p->index] < 0) return;
  parted_unit *u = &q->unit[q->unit_of[p->index]];
  arrive(q);
  u->made = false;
  move_pages(q, q->unit_of[p->index], PARTED_DERIVED, true);
  for (int k = 0; k < u->n_pages[PARTED_DERIVED]; k++) {
    q->here -= u->pages[PARTED_DERIVED][k].bytes;
    q->away -= u->pages[PARTED_DERIVED][k].bytes;
  }
  u->n_pages[PARTED_DERIVED] = 0;
}

eng_status params_derived_outdated(parameter *p)
{
  params_parted *q = p->set->parted;
  int unit = q->unit_of[p->index];
  const int64_t *own = p->set->own + 2 * p->index;
  for (int i = 0; i < p->set->n; i++)
    FAIL_IF(i != p->index && q->unit_of[i] == unit, ENG_ERR_VALUE,
            "parameter %s: zero=3 needs a separate unit for each FP8 weight, but parameter %s is "
            "in the same unit", p->name, p->set->member[i].name);
  FAIL_IF(own[1] > own[0] && !params_owns(p), ENG_ERR_VALUE, "parameter %s: zero=3 needs all "
          "elements of an FP8 weight on one rank (eng_parallel_options.whole), but this rank has "
          "%lld of %lld", p->name, (long long)(own[1] - own[0]), (long long)p->value->count);
  if (q->unit[unit].n_pages[PARTED_DERIVED] == 0) {   // a new copy
    int64_t before = q->away;
    ENG_TRY(find_derived_pages(q, p->set, p->set->own, p->index));
    q->here += q->away - before;
    q->unit[unit].here[PARTED_DERIVED] = true;
  }
  ENG_TRY(arrive(q));
  // If the copy was fetched early, it is out of date.
  if (q->ahead == unit * PARTED_FORMS + PARTED_DERIVED) q->ahead = -1;
  move_pages(q, unit, PARTED_DERIVED, false);
  mark(p->set);
  return ENG_OK;
}
