// Parameter sets: flat buffers of weights, gradients and low-precision weights. See engine.h.
// Called by op.c (which low-precision copy to use), tape.c (where a gradient goes), optimizer.c.
#ifndef ENG_PARAMS_H
#define ENG_PARAMS_H

#include "backend.h"

/// A member of a parameter set; tensor.parameter points here.
typedef struct parameter {
  eng_params *set;
  int32_t     index;
  char       *name;
  tensor     *value;          // the f32 master, the leaf that scripts hold
  tensor     *shadow;         // low-precision weights, or NULL; a leaf whose gradient is this parameter's
  tensor     *gradient;       // view of the flat gradient buffer, in gradient dtype (f32 once unscaled)
  bool        has_gradient;   // something was accumulated since the last zero_grad
  uint32_t    seen;           // value's storage.writes when the shadow was last rounded from it
} parameter;

/// One piece of memory cut into a tensor per parameter, each starting on a 64-byte boundary.
typedef struct flat_buffer {
  struct flat_buffer *next;   // while it waits to be released
  int32_t  space;             // whose memory
  arena_id arena;
  void    *memory;
  int64_t  bytes;
  int32_t  n;
  tensor  *part[];            // part[i] lies over parameter i's piece; NULL where it has none
} flat_buffer;

struct eng_params {
  int32_t      n;
  int32_t      references;    // the owner's, and one of each optimizer
  bool         freed;         // by its owner
  int64_t      count;         // elements of all members
  int32_t      space;         // whose memory all buffers are in
  parameter   *member;        // [n]
  flat_buffer *masters, *shadows, *gradients;
  flat_buffer *unscaled;      // f32 gradients of the members whose own are f16 or bf16
  param_span  *span;          // [n] working space of a pass over all parameters
  int32_t     *which;         // [n] span k is of member which[k]
  eng_tensor_stats *stats;    // [n]
  float      **target;        // [n]
};

/// A buffer with room for parameter i's elements in dtype[i]; a negative dtype: no part. Contents undefined.
eng_status flat_new(flat_buffer **out, arena_id arena, const eng_params *set, const int32_t *dtype);
/// Gives memory and tensors back, or does so later when the tape or a view still looks at them. NULL is fine.
void flat_release(flat_buffer *flat);

/// The low-precision weights of a member that has some, rounded again if a script wrote into the master since.
eng_status params_shadow(tensor **out, parameter *p);

/// Notes that a member's values changed, those of its low-precision weights with them: a tape that read them is out of date.
void params_written(parameter *p);

/// Fills set->span and set->which with the members that hold a gradient; gives their number.
int params_spans(eng_params *set);
/// Gives one reference back; the last one ends the set.
void params_release(eng_params *set);

#endif
