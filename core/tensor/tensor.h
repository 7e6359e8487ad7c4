// Tensors in the core: a view (shape, strides) of a piece of memory, in a table of slots. Lua holds
// the handle {slot, generation}; tensor_get turns it into a pointer or an error. Owns the slot
// table. Called by device/, params/, autograd/, fp8/, dist/ and store/; kernels read tensors.
#pragma once

#include "arena.h"
#include "base/dtype.h"
#include "base/scope.h"

/// A piece of memory shared by a tensor and its views.
typedef struct storage {
  void    *memory;
  int64_t  bytes;
  int32_t  references;      // tensors that use it
  int32_t  arena;           // arena_id; -1: memory owned elsewhere
  int32_t  space;           // memory space: SPACE_HOST, SPACE_CUDA
  // counts the writes after creation, such as writes by scripts, optimizer updates, messages from
  // other ranks, and new roundings of a low-precision or FP8 copy
  uint32_t writes;
  int32_t  done;            // how many of the tensors that use it are `done`
  int32_t  segment;         // which checkpointed part of the tape computes it (tape.h); 0: none
  bool     awaited;         // used in checkpoint.c: a later node of the segment reads it
  // ZeRO-3 (params/params_parted.c). parted: the parameter whose weights these are, or NULL.
  // closed: the weights are not always in memory; only operations may read them, because an
  // operation first fetches its weights. absent: the weights are not in memory now.
  struct parameter *parted;
  bool     closed, absent;
} storage;

typedef struct tensor {
  void     *data;                    // first element of this view
  int64_t   shape[ENG_MAX_DIMS];     // sizes
  int64_t   stride[ENG_MAX_DIMS];    // elements; 0 where broadcast
  int64_t   count;                   // product of shape
  int32_t   ndim;
  int32_t   dtype;
  storage  *store;
  uint32_t  slot, generation;
  bool      live;
  bool      requires_grad;
  bool      of_step;                 // belongs to the current step
  bool      between;                 // made while no step was open
  bool      held;                    // in a flat buffer: only the parameter set may drop it
  bool      is_gradient;             // it is the gradient of another tensor
  bool      done;                    // eng_done was called: the user no longer needs it
  int32_t   node;                    // tape node that made it; -1: none
  int32_t   output;                  // which output of that node
  int32_t   step_index;              // index in the step's list
  int64_t   step;                    // the step in which it was made
  // the gradient of a leaf outside parameter sets or, during backward, of an operation's result
  struct tensor *gradient;
  struct parameter *parameter;       // set for members of a parameter set (params.h)
} tensor;

/// Resolves a handle. The message of ENG_ERR_STALE gives a hint and, until another tensor takes the
/// slot, the tensor's shape. Errors: STALE; STATE (a weight divided by ZeRO-3, which is not always
/// in memory).
eng_status tensor_get(tensor **out, const eng_tensor *handle);
/// Resolves a handle like tensor_get, for callers that do not read the values or that first fetch
/// absent weights.
eng_status tensor_find(tensor **out, const eng_tensor *handle);
eng_tensor tensor_handle(const tensor *x);

/// row_length returns the size of the last dimension (1 for a scalar), row_count the number of rows
/// of that length.
static inline int64_t row_length(const tensor *x) { return x->ndim ? x->shape[x->ndim - 1] : 1; }
static inline int64_t row_count(const tensor *x)
{
  int64_t n = 1;
  for (int d = 0; d + 1 < x->ndim; d++) n *= x->shape[d];
  return n;
}

/// Creates a tensor with undefined contents, in the current memory space. It belongs to the step if
/// `arena` is ARENA_STEP.
eng_status tensor_make(tensor **out, arena_id arena, int dtype, int ndim, const int64_t *shape);
/// Creates a tensor in a given memory space.
eng_status tensor_make_in(tensor **out, int space, arena_id arena, int dtype, int ndim,
                          const int64_t *shape);
/// Creates a tensor of the step that has no memory and counts as `done`. Used in tape entries that
/// need only its shape.
eng_status tensor_make_done(tensor **out, int dtype, int ndim, const int64_t *shape);
/// Creates a view of x's memory: same dtype, new shape and strides, starting at element `offset`.
eng_status tensor_view(tensor **out, tensor *x, int64_t offset, int ndim, const int64_t *shape,
                       const int64_t *stride);
/// Creates a tensor over memory in `space` that the tensor does not own, such as a parameter
/// buffer. The caller keeps the memory alive.
eng_status tensor_wrap(tensor **out, int space, void *memory, int dtype, int ndim,
                       const int64_t *shape);
/// Moves x to the memory of `home`, a tensor from tensor_wrap in x's memory space. The caller has
/// already copied x's values there. Drops `home` and releases x's old memory, which a view of x may
/// still keep.
void tensor_rehome(tensor *x, tensor *home);
/// Drops a tensor. Its memory returns to the arena when the last view is dropped. NULL is allowed.
void tensor_drop(tensor *x);
/// Before a declaration of pointers to tensors: drops each tensor when its block ends. The pointers
/// must be initialized.
#define OWNED AT_END(tensor_release)
static inline void tensor_release(tensor **x) { tensor_drop(*x); }

/// The list of the step's tensors, in order of creation (step.c). tensor_mark returns its current
/// end. tensor_drop_since drops the tensors created since a mark; it drops gradients only if
/// `gradients_too`. tensor_begin_step opens the step; tensor_next_step ends it and advances.
int tensor_mark(void);
void tensor_drop_since(int mark, bool gradients_too);
void tensor_begin_step(void);
bool tensor_step_open(void);
void tensor_next_step(void);
int64_t tensor_step_number(void);

bool tensor_contiguous(const tensor *x);
bool tensor_same_shape(const tensor *a, const tensor *b);

/// Returns a shape as text, such as "[64 x 768]", or "[]" for a scalar. The text is in one of 8
/// buffers of this thread, which are used in turn.
const char *tensor_shape_text(int ndim, const int64_t *shape);
/// Returns the dtype and shape of x as text, such as "f16 [64 x 768]". Takes two of the same
/// buffers, so up to four such texts are valid at a time.
const char *tensor_text(const tensor *x);

/// Number of operations on the tape, maintained by autograd/tape.c. While it is above 0, memory to
/// which the tape may refer must not be freed.
extern int tensor_tape_length;
