// The slot table and the lifetime of tensors. See tensor.h. Called by the folders from device/ to
// store/.
//
// The tensors of a step are in a list; step.c drops them from there. When the last tensor is
// dropped, the step arena is reset. Dropping a tensor increments its slot's generation, so that old
// handles are recognised.
#include "tensor.h"

#include "base/array.h"
#include "base/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 256 };   // tensors per block; blocks never move, so pointers stay valid
// bounds the size of a tensor, so that byte counts of a kernel's work space cannot overflow
static const int64_t MOST_ELEMENTS = 1ll << 48;

static tensor **blocks;
static int n_blocks;
// A queue of free slots, linked through tensor.gradient. The queue is first in, first out, so that
// the data of a dropped tensor stays in its slot for as long as possible; error messages about
// stale handles use that data.
static tensor *free_slots;
static tensor *free_slots_end;
static storage *free_storages;    // linked through storage.memory

// tensors of the step, in order of creation; NULL where dropped early
static tensor **step_list;
static int step_length;
static int64_t step_room;
int tensor_tape_length;
static int64_t step_count;
static bool step_open;

// ---- slots

static bool add_block(void)
{
  tensor **more = realloc(blocks, (size_t)(n_blocks + 1) * sizeof *blocks);
  if (!more) return false;
  blocks = more;
  tensor *block = calloc(BLOCK, sizeof *block);
  if (!block) return false;
  blocks[n_blocks] = block;
  for (int i = BLOCK - 1; i >= 0; i--) {
    block[i].slot = (uint32_t)(n_blocks * BLOCK + i);
    block[i].generation = 1;
    if (block[i].slot == 0) continue;   // slot 0 means "no tensor"
    block[i].gradient = free_slots;
    if (!free_slots) free_slots_end = &block[i];
    free_slots = &block[i];
  }
  n_blocks++;
  return true;
}

static tensor *slot_take(void)
{
  if (!free_slots && !add_block()) return NULL;
  tensor *x = free_slots;
  free_slots = x->gradient;
  if (!free_slots) free_slots_end = NULL;
  *x = (tensor){.slot = x->slot, .generation = x->generation, .live = true, .node = -1,
                .step_index = -1, .step = step_count, .between = !step_open};
  return x;
}

static storage *storage_take(void)
{
  if (!free_storages) {
    storage *block = calloc(BLOCK, sizeof *block);
    if (!block) return NULL;
    for (int i = 0; i < BLOCK; i++) {
      block[i].memory = free_storages;
      free_storages = &block[i];
    }
  }
  storage *s = free_storages;
  free_storages = s->memory;
  return s;
}

static void storage_release(storage *s)
{
  if (--s->references > 0) return;
  if (s->arena >= 0) arena_free_in(s->space, (arena_id)s->arena, s->memory, s->bytes);
  s->memory = free_storages;
  free_storages = s;
}

eng_status tensor_get(tensor **out, const eng_tensor *handle)
{
  ENG_TRY(tensor_find(out, handle));
  if (!(*out)->store->closed) return ENG_OK;
  return error_set(ENG_ERR_STATE,
                   "%s is a weight that the ranks have divided (zero=3), and this rank has "
                   "only its own part; hint: use the weight inside trainer:whole(function() ... "
                   "end), which all ranks must call",
                   tensor_text(*out));
}

eng_status tensor_find(tensor **out, const eng_tensor *handle)
{
  *out = NULL;
  FAIL_IF(!handle || handle->slot == 0 || (int64_t)handle->slot >= (int64_t)n_blocks * BLOCK,
          ENG_ERR_STALE, "expected a tensor, got an empty or invalid handle");
  tensor *x = &blocks[handle->slot / BLOCK][handle->slot % BLOCK];
  if (x->live && x->generation == handle->generation) {
    if (!x->store->memory && x->count > 0 && (x->done || x->store->segment))
      return error_set(ENG_ERR_STALE,
                       x->done ? "tensor %s was used after done() freed its memory; hint: call "
                                 "done() after the last use"
                               : "tensor %s was computed inside a checkpointed module, which keeps "
                                 "only its results; hint: return the tensor from the module, or "
                                 "set checkpoint=false",
                       tensor_text(x));
    *out = x;
    return ENG_OK;
  }
  if (!x->live && x->generation == handle->generation + 1) {
    FAIL_IF(x->of_step && x->step < step_count, ENG_ERR_STALE,
            x->between ? "tensor %s was made between steps and ended with step %lld; hint: "
                         "x:keep() before that makes a copy that outlives it"
                       : "tensor %s belonged to step %lld, which has ended; hint: x:keep() in that "
                         "step makes a copy that outlives it",
            tensor_text(x), (long long)x->step);
    return error_set(ENG_ERR_STALE, "tensor %s was freed, for example by free() or at the end of "
                     "its engine.scope(); hint: x:keep() before then makes a copy", tensor_text(x));
  }
  return error_set(ENG_ERR_STALE, "a tensor was used after its step had ended or after it was "
                   "freed; hint: x:keep() before then makes a copy");
}

eng_tensor tensor_handle(const tensor *x)
{ return x ? (eng_tensor){x->slot, x->generation} : (eng_tensor){0, 0}; }

// ---- creating and dropping

static eng_status enter_step_list(tensor *x)
{
  FAIL_IF(!ARRAY_GROW(step_list, step_room, step_length + 1), ENG_ERR_MEMORY,
          "out of memory for the list of the step's tensors");
  x->of_step = true;
  x->step_index = step_length;
  step_list[step_length++] = x;
  return ENG_OK;
}

static eng_status set_shape(tensor *x, int dtype, int ndim, const int64_t *shape)
{
  FAIL_IF(ndim < 0 || ndim > ENG_MAX_DIMS, ENG_ERR_VALUE,
          "expected 0 to %d dimensions, got %d", ENG_MAX_DIMS, ndim);
  FAIL_IF(dtype < 0 || dtype >= ENG_DTYPE_COUNT, ENG_ERR_DTYPE, "expected the "
          "number of a dtype, 0 to %d, got %d", ENG_DTYPE_COUNT - 1, dtype);
  x->dtype = dtype;
  x->ndim = ndim;
  int64_t count = 1, bound = 1;   // bound: the product of the sizes above 0
  for (int d = ndim - 1; d >= 0; d--) {
    FAIL_IF(shape[d] < 0, ENG_ERR_VALUE,
            "expected a shape of sizes >= 0, got %s", tensor_shape_text(ndim, shape));
    FAIL_IF(__builtin_mul_overflow(bound, shape[d] > 0 ? shape[d] : 1, &bound) ||
            bound > MOST_ELEMENTS, ENG_ERR_VALUE,
            "expected a tensor of up to 2^48 elements, got %s", tensor_shape_text(ndim, shape));
    x->shape[d] = shape[d];
    x->stride[d] = count;
    count *= shape[d];
  }
  x->count = count;
  return ENG_OK;
}

static void slot_return(tensor *x)
{
  if (x->step_index >= 0) step_list[x->step_index] = NULL;
  x->step_index = -1;
  x->live = false;
  x->generation++;
  x->gradient = NULL;
  if (free_slots_end) free_slots_end->gradient = x;
  else free_slots = x;
  free_slots_end = x;
}

static eng_status make(tensor **out, int space, int arena, void *memory, int dtype, int ndim,
                       const int64_t *shape)
{
  *out = NULL;
  tensor *x = slot_take();
  storage *s = x ? storage_take() : NULL;
  if (!s) {
    if (x) slot_return(x);
    return error_set(ENG_ERR_MEMORY, "out of memory for the table of tensors");
  }
  eng_status status = set_shape(x, dtype, ndim, shape);
  *s = (storage){.bytes = x->count * eng_dtype_size(dtype),
                 .references = 1,
                 .arena = arena,
                 .space = space,
                 .memory = memory};
  if (status == ENG_OK && arena == ARENA_STEP) status = enter_step_list(x);
  if (status == ENG_OK && arena >= 0) {
    s->memory = arena_alloc_in(space, (arena_id)arena, s->bytes);
    if (!s->memory) status = ENG_ERR_MEMORY;
  }
  if (status != ENG_OK) {
    s->arena = -1;
    storage_release(s);
    slot_return(x);
    return status;
  }
  x->store = s;
  x->data = s->memory;
  *out = x;
  return ENG_OK;
}

eng_status tensor_make(tensor **out, arena_id arena, int dtype, int ndim, const int64_t *shape)
{ return make(out, arena_space(), arena, NULL, dtype, ndim, shape); }

eng_status tensor_make_in(tensor **out, int space, arena_id arena, int dtype, int ndim,
                          const int64_t *shape)
{ return make(out, space, arena, NULL, dtype, ndim, shape); }

eng_status tensor_make_done(tensor **out, int dtype, int ndim, const int64_t *shape)
{
  ENG_TRY(make(out, arena_space(), -1, NULL, dtype, ndim, shape));
  tensor *x = *out;
  x->store->bytes = 0;
  x->store->done = 1;
  x->done = true;
  eng_status status = enter_step_list(x);
  if (status == ENG_OK) return ENG_OK;
  tensor_drop(x);
  *out = NULL;
  return status;
}

eng_status tensor_wrap(tensor **out, int space, void *memory, int dtype, int ndim,
                       const int64_t *shape)
{
  ENG_TRY(make(out, space, -1, memory, dtype, ndim, shape));
  (*out)->held = true;
  return ENG_OK;
}

eng_status tensor_view(tensor **out, tensor *x, int64_t offset, int ndim, const int64_t *shape,
                       const int64_t *stride)
{
  *out = NULL;
  tensor *y = slot_take();
  FAIL_IF(!y, ENG_ERR_MEMORY, "out of memory for the table of tensors");
  eng_status status = set_shape(y, x->dtype, ndim, shape);
  // A view, even of a kept tensor, exists until the end of the step; the memory exists as long as
  // any tensor or view uses it.
  if (status == ENG_OK) status = enter_step_list(y);
  if (status != ENG_OK) {
    slot_return(y);
    return status;
  }
  for (int d = 0; d < ndim; d++) y->stride[d] = stride[d];
  y->data = (char *)x->data + offset * eng_dtype_size(x->dtype);
  y->store = x->store;
  y->store->references++;
  *out = y;
  return ENG_OK;
}

void tensor_drop(tensor *x)
{
  if (!x || !x->live) return;
  tensor_drop(x->gradient);
  x->store->done -= x->done;
  storage_release(x->store);
  slot_return(x);
}

void tensor_rehome(tensor *x, tensor *home)
{
  storage *old = x->store;
  old->done -= x->done;
  x->done = false;
  x->data = home->data;
  x->store = home->store;
  home->store = old;
  tensor_drop(home);
  x->held = true;
  if (x->step_index >= 0) step_list[x->step_index] = NULL;
  x->step_index = -1;
  x->of_step = false;
}

// ---- the step's list

int64_t tensor_step_number(void) { return step_count; }

bool tensor_step_open(void) { return step_open; }

void tensor_begin_step(void) { step_open = true; }

void tensor_next_step(void)
{
  step_count++;
  step_open = false;
}

int tensor_mark(void) { return step_length; }

void tensor_drop_since(int mark, bool gradients_too)
{
  for (int i = step_length - 1; i >= mark; i--)
    if (step_list[i] && (gradients_too || !step_list[i]->is_gradient)) tensor_drop(step_list[i]);
  int kept = mark;
  for (int i = mark; i < step_length; i++)
    if (step_list[i]) {
      step_list[i]->step_index = kept;
      step_list[kept++] = step_list[i];
    }
  step_length = kept;
}

// ---- shapes and text

bool tensor_contiguous(const tensor *x)
{
  int64_t expected = 1;
  for (int d = x->ndim - 1; d >= 0; d--) {
    if (x->shape[d] != 1 && x->stride[d] != expected) return x->count == 0;
    expected *= x->shape[d];
  }
  return true;
}

bool tensor_same_shape(const tensor *a, const tensor *b)
{
  return a->ndim == b->ndim &&
         memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof a->shape[0]) == 0;
}

static char *text_buffer(void)
{
  static _Thread_local char buffers[8][160];
  static _Thread_local int next;
  return buffers[next++ & 7];
}

const char *tensor_shape_text(int ndim, const int64_t *shape)
{
  char *text = text_buffer();
  int at = snprintf(text, 160, "[");
  for (int d = 0; d < ndim && at < 150; d++)
    at += snprintf(text + at, (size_t)(160 - at), "%s%lld", d ? " x " : "", (long long)shape[d]);
  snprintf(text + at, (size_t)(160 - at), "]");
  return text;
}

const char *tensor_text(const tensor *x)
{
  char *text = text_buffer();
  snprintf(text, 160, "%s %s", eng_dtype_name(x->dtype), tensor_shape_text(x->ndim, x->shape));
  return text;
}
