// Tensors as the core sees them: a view (shape, strides) of a piece of memory, in a table of slots.
// Lua holds {slot, generation}; tensor_get turns that into a pointer or an error.
// Owns the slot table. Called by op.c, tape.c, params.c and, for reading, by every kernel.
#ifndef ENG_TENSOR_H
#define ENG_TENSOR_H

#include "arena.h"
#include "base/dtype.h"

/// A piece of memory shared by a tensor and its views.
typedef struct storage {
  void    *memory;
  int64_t  bytes;
  int32_t  references;      // tensors that look at it
  int32_t  arena;           // arena_id; -1: memory owned elsewhere
  int32_t  space;           // whose memory: SPACE_HOST, SPACE_CUDA
  uint32_t writes;          // how often a script wrote into it (fill, copy, random numbers)
  int32_t  done;            // of these tensors, those whose user said done()
} storage;

typedef struct tensor {
  void     *data;                    // first element of this view
  int64_t   shape[ENG_MAX_DIMS];     // elements
  int64_t   stride[ENG_MAX_DIMS];    // elements; 0 where broadcast
  int64_t   count;                   // product of shape
  int32_t   ndim;
  int32_t   dtype;
  storage  *store;
  uint32_t  slot, generation;
  bool      live;
  bool      requires_grad;
  bool      of_step;                 // belongs to the current step
  bool      held;                    // a flat buffer's: only its parameter set may drop it
  bool      hung;                    // is the gradient of some tensor
  bool      done;                    // its user needs it no more
  int32_t   node;                    // tape node that made it; -1: none
  int32_t   output;                  // which output of that node
  int32_t   step_index;              // place in the step's list
  int64_t   step;                    // step it was made in
  struct tensor *gradient;           // of a leaf, or while backward runs
  struct parameter *parameter;       // set for members of a parameter set (params.h)
} tensor;

/// The tensor behind a handle. ENG_ERR_STALE tells its shape, its step and what to do.
eng_status tensor_get(tensor **out, const eng_tensor *handle);
eng_tensor tensor_handle(const tensor *x);

/// A new tensor with undefined contents, in the memory space in force. Belongs to the step when
/// `arena` is ARENA_STEP.
eng_status tensor_make(tensor **out, arena_id arena, int dtype, int ndim, const int64_t *shape);
/// The same in a memory space by number.
eng_status tensor_make_in(tensor **out, int space, arena_id arena, int dtype, int ndim,
                          const int64_t *shape);
/// One of the step that never has memory: done (eng_done) from the beginning. What stands on the
/// tape for its shape alone.
eng_status tensor_make_done(tensor **out, int dtype, int ndim, const int64_t *shape);
/// A second look at x's memory: same dtype, new shape and strides, first element `offset` elements
/// in.
eng_status tensor_view(tensor **out, tensor *x, int64_t offset, int ndim, const int64_t *shape,
                       const int64_t *stride);
/// A tensor over memory of space `space` that another owner keeps alive (parameter buffers).
eng_status tensor_wrap(tensor **out, int space, void *memory, int dtype, int ndim,
                       const int64_t *shape);
/// Makes x a view of memory in its space that another owner keeps alive and has filled; x's old
/// memory is released.
void tensor_rehome(tensor *x, void *memory);
/// Forgets a tensor; memory returns to its arena with the last view.
void tensor_drop(tensor *x);

/// The step's tensors stand in a list, in order of making: where it ends now, dropping what was
/// made since a mark (`hung_too`: also gradients that hang at a tensor from before it), and
/// counting to the next step. See step.c.
int tensor_mark(void);
void tensor_drop_since(int mark, bool hung_too);
void tensor_next_step(void);
int64_t tensor_step_number(void);

bool tensor_contiguous(const tensor *x);
bool tensor_same_shape(const tensor *a, const tensor *b);

/// "[64 x 768]" into a rotating buffer of this thread (8 of them), "[]" for a scalar.
const char *tensor_shape_text(int ndim, const int64_t *shape);
/// "f16 [64 x 768]" likewise.
const char *tensor_text(const tensor *x);

/// Operations on the tape, which hold tensors by pointer; autograd/tape.c counts them.
extern int tensor_tape_length;

#endif
