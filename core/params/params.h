// Parameter sets: flat buffers of weights, gradients and low-precision weights. See engine.h.
// Called by op.c (which low-precision copy to use), tape.c (where a gradient goes), optimizer.c.
#ifndef ENG_PARAMS_H
#define ENG_PARAMS_H

#include "device/backend.h"

/// Identifies a derived copy: where it lies, who made it and by which version of the recipe.
typedef struct params_stamp {
  const void *memory;
  int64_t     maker;
  uint32_t    version;
} params_stamp;

/// A copy of a parameter in another format that a higher folder makes and owns (fp8/). Its struct
/// begins with this one.
typedef struct params_derived {
  void         (*free)(struct params_derived *copy);
  int64_t      (*bytes)(const struct params_derived *copy);
  // it is made again at its next use, in the same memory
  void         (*outdate)(struct params_derived *copy);
  params_stamp (*stamp)(const struct params_derived *copy);
} params_derived;

/// A member of a parameter set; tensor.parameter points here.
typedef struct parameter {
  eng_params *set;
  int32_t     index;
  char       *name;
  tensor     *value;          // the f32 master, the leaf that scripts hold
  // low-precision weights, or NULL; a leaf whose gradient is this parameter's
  tensor     *shadow;
  // where it stands: in the flat buffer, in gradient dtype (f32 once unscaled). NULL: it has no
  // memory yet, or,
  tensor     *gradient;
                              // where gradients are divided, it is not being computed
  bool        has_gradient;   // something was accumulated since the last zero_grad
  bool        expected;       // a mark of the tape's, while it makes its list
  bool        unscaled;       // its gradient is the true one: it carries nothing any more
  double      carry;          // what its gradient carries beside the loss scale
  double      carry_next;     // what the next one will
  params_derived *derived;    // a copy in another format, or NULL
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

/// Statistics asked for and not fetched yet.
typedef struct pending_stats {
  unsigned needs;
  int32_t  m, n_losses;
  int32_t *which;             // [n] of the set: entry k is of member which[k]
  double  *carry;             // [n] what entry k carries beside the loss scale
  int64_t  ticket;            // the device's, where it does not compute at once
  eng_tensor_stats *stats;    // [n], where it does; NULL on a card
  // likewise; squares of the gradients as stored, each divided by its span's scale
  double   loss, sum_squares;
  bool     overflow;
} pending_stats;

enum { MOST_LOSSES = 64 };    // micro-batches a lagged step may have

struct eng_params {
  int32_t      n;
  int32_t      references;    // the owner's, and one of each optimizer
  bool         freed;         // by its owner
  int64_t      count;         // elements of all members
  int32_t      space;         // whose memory all buffers are in
  parameter   *member;        // [n]
  flat_buffer *masters, *shadows;
  // NULL until the first backward pass; `divided`: of each member the own elements alone
  flat_buffer *gradients;
  // ZeRO-2: what backward writes has memory of comm_buckets.c's, until its sum over ranks is known
  bool         divided;
  int32_t     *gradient_dtype;// [n]
  flat_buffer *unscaled;      // f32 gradients of the members whose own are f16 or bf16
  flat_buffer *reference;     // f32 gradients of a reference backward
  bool        *kept;          // [n] has_gradient while a reference backward runs, else NULL
  param_span  *span;          // [n] working space of a pass over all parameters
  int32_t     *which;         // [n] span k is of member which[k]
  eng_tensor_stats *stats;    // [n]
  float      **target;        // [n]
  // [n][2] elements [from, to) of each member that this rank looks after; NULL: all
  // (comm_gradients.c)
  int64_t     *own;
  bool         sharded;       // it updates these alone (ZeRO-1)
  pending_stats pending[ENG_STATS_ON_THEIR_WAY];   // a ring: lagged statistics, oldest first
  int32_t      first_pending, n_pending;
  // what a lagged update goes by on devices that compute at once; NULL: none
  pending_stats *newest;
};

/// A buffer with room for parameter i's elements in dtype[i]; a negative dtype: no part. Contents
/// undefined.
eng_status flat_new(flat_buffer **out, arena_id arena, const eng_params *set, const int32_t *dtype);
/// The same for the own elements of each member, as tensors of one dimension.
eng_status flat_new_own(flat_buffer **out, arena_id arena, const eng_params *set,
                        const int32_t *dtype);
/// What a member's elements take of one.
int64_t params_part_bytes(int64_t count, int dtype);
/// Gives memory and tensors back, or does so later when the tape or a view still looks at them.
/// NULL is fine.
void flat_release(flat_buffer *flat);

/// The low-precision weights of a member that has some, rounded again if a script wrote into the
/// master since.
eng_status params_shadow(tensor **out, parameter *p);

/// Memory for the gradients of a set that has none yet. Errors: MEMORY; STATE where they are
/// divided.
eng_status params_gradients(eng_params *set);
/// From now on the set keeps its own elements of gradients alone, in the given buffer
/// (flat_new_own).
void params_divide(eng_params *set, flat_buffer *own);

/// Forgets a member's gradient.
static inline void params_forget(parameter *p)
{
  p->has_gradient = p->unscaled = false;
  p->carry = p->carry_next;
}

/// Notes that a member's values changed, those of its low-precision weights with them: a tape that
/// read them is out of date.
void params_written(parameter *p);

/// What every pass over them asks first: an error where the parameters are not in the memory of the
/// device in force (DEVICE), or where a step is being captured, in which there is no place for
/// `pass` (STATE).
eng_status params_here(const eng_params *set, const char *pass);
/// An error where this rank has its own elements of the gradients alone (ZeRO-2).
eng_status params_whole(const eng_params *set);
/// Fills set->span and set->which with the members that hold a gradient; gives their number.
int params_spans(eng_params *set);
/// The same of the own elements alone; a member without any has no span.
int params_own_spans(eng_params *set);
/// Statistics of the own elements of each member [n]; zeros where there are none.
eng_status params_own_stats(eng_tensor_stats *stats, eng_params *set, unsigned needs);
/// The record of statistics of all members [n], of which those without a gradient count nothing.
void params_total(eng_record *record, eng_params *set, const eng_tensor_stats *stats, double scale,
                  unsigned needs);
/// The record of a pass over m spans, span k being member which[k]'s; and each member's statistics
/// (of_member may be NULL).
void params_record(eng_record *record, eng_tensor_stats *of_member, const eng_params *set,
                   const eng_tensor_stats *of_span, const int32_t *which, int m, double scale,
                   unsigned needs);

/// Lagged statistics (params_lagged.c): what an update of a device that computes at once goes by,
/// false when it must be skipped, with the factor that clips to `clip_norm` (0: none); and giving
/// their memory back.
bool params_lagged_factor(double *factor, const eng_params *set, double gradient_factor,
                          double clip_norm);
void params_forget_lagged(eng_params *set);
/// Gives one reference back; the last one ends the set.
void params_release(eng_params *set);

#endif
