// Parameter sets: flat buffers of weights, gradients and low-precision weights. See engine.h.
// Called by autograd/ (for example op.c: which low-precision copy to use; gradient.c: where a
// gradient goes), fp8/, dist/ and the other files of this folder.
#pragma once

#include "base/heap.h"
#include "device/backend.h"

/// Identifies a derived copy: its address, the id of its maker (an FP8 site) and the version of the
/// recipe.
typedef struct params_stamp {
  const void *memory;
  int64_t     maker;
  uint32_t    version;
} params_stamp;

/// A copy of a parameter in another format, made and owned by fp8/. The struct in which fp8/ keeps
/// the copy begins with this struct.
typedef struct params_derived {
  void         (*free)(struct params_derived *copy);
  // marks the copy for a rebuild at its next use, in the same memory
  void         (*outdate)(struct params_derived *copy);
  params_stamp (*stamp)(const struct params_derived *copy);
  // lists the copy's tensors, at most PARAMS_DERIVED; returns their number
  int          (*tensors)(tensor **out, const struct params_derived *copy);
} params_derived;
enum { PARAMS_DERIVED = 5 };

/// A member of a parameter set; tensor.parameter points here.
typedef struct parameter {
  eng_params *set;
  int32_t     index;
  char       *name;
  tensor     *value;          // the master in f32 or bf16, the leaf that scripts hold
  // low-precision weights, a leaf whose gradient goes to this parameter; or NULL
  tensor     *low;
  // the gradient in the flat buffer, in the gradient dtype (f32 once unscaled). NULL: it has no
  // memory yet or, with divided gradients, backward is not computing it now
  tensor     *gradient;
  bool        has_gradient;   // a gradient was added since the last zero_grad
  bool        expected;       // while a backward pass begins: its operations read the parameter
  bool        unscaled;       // the gradient has been divided by its scales
  double      relative_scale; // of the gradient
  double      next_relative_scale;   // of the next gradient
  params_derived *derived;    // a copy in another format, or NULL
  uint32_t    seen;           // storage.writes of `value` when `low` was last rounded from it
} parameter;

/// One allocation divided into a tensor per parameter, each starting on a 64-byte boundary.
typedef struct flat_buffer {
  struct flat_buffer *next;   // in the list of buffers waiting for release
  int32_t  space;             // memory space
  arena_id arena;
  void    *memory;
  int64_t  bytes;
  int32_t  n;
  tensor  *part[];            // part[i] is parameter i's tensor; NULL: it has none
} flat_buffer;

/// Statistics that were requested and not fetched yet.
typedef struct pending_stats {
  unsigned needs;
  int32_t  m, n_losses;       // m: entries in use in the arrays, whose size is the set's n
  int32_t *which;             // [n] entry k belongs to member which[k]
  double  *relative_scale;    // [n] the relative scale of each entry
  int64_t  ticket;            // the device's ticket, if the device computes asynchronously
  eng_tensor_stats *stats;    // [n] the results, if the device computes immediately; NULL on a card
  double   loss;              // sum of the losses, once computed
  // if the device computes immediately: the sum of squares of all gradients, each divided by its
  // relative scale
  double   sum_squares;
  bool     overflow;          // if the device computes immediately: a gradient holds inf or nan
} pending_stats;

struct eng_params {
  int32_t      n;
  int32_t      references;    // the owner and each optimizer, eng_parallel and eng_graph hold one
  bool         freed;         // freed by its owner
  heap         memory;        // of the lists of members below, and of `pending`
  int64_t      count;         // elements of all members
  int32_t      space;         // memory space of all buffers
  parameter   *member;        // [n]
  flat_buffer *masters, *low;
  // NULL until the first backward pass; if `divided`, has only this rank's elements of each member
  flat_buffer *gradients;
  // ZeRO-2 and 3: backward writes gradients into temporary memory of dist/ until they are reduced
  bool         divided;
  int32_t     *gradient_dtype;// [n] dtypes of the stored gradients
  int32_t     *term_dtype;    // [n] dtypes of the terms that backward adds, from the recipe
  bool         accumulates;   // the gradients of several passes are summed, in f32
  flat_buffer *unscaled;      // f32 gradients of the members with f16 or bf16 gradients
  flat_buffer *reference;     // f32 gradients of a reference backward
  bool        *kept;          // [n] has_gradient from before the reference backward; NULL: no such
                              // pass is running
  param_span  *span;          // [n] work space of a pass over all parameters
  int32_t     *which;         // [n] span k belongs to member which[k]
  eng_tensor_stats *stats;    // [n] statistics of the spans
  float      **target;        // [n] where to write the unscaled gradient of each span
  // [n][2] elements [from, to) of each member that this rank owns; NULL: all (comm_parallel.c)
  int64_t     *own;
  bool         sharded;       // this rank updates only its own elements (ZeRO-1 to 3)
  struct params_parted *parted;   // ZeRO-3: the table of divided weights; NULL: not divided
  pending_stats pending[ENG_STATS_PENDING];   // a ring: statistics, oldest first
  int32_t      first_pending, n_pending;
  // the statistics requested last, which decide the next lagged update; NULL: none
  pending_stats *newest;
};

/// Allocates a buffer with a part of dtype[i] for each member i, but no part if the dtype is
/// negative. `own`: a part holds only the elements that this rank owns, in one dimension. Contents
/// undefined. *out is NULL if the buffer would have no parts.
eng_status flat_new(flat_buffer **out, arena_id arena, const eng_params *set, const int32_t *dtype,
                    bool own);
/// Returns the size in bytes of a part with `count` elements; 0 if the dtype is negative.
int64_t params_part_bytes(int64_t count, int dtype);
/// Frees a buffer and sets the pointer to NULL. While the tape has operations or a view uses the
/// buffer, its memory waits for flat_reclaim. *flat may be NULL.
void flat_release(flat_buffer **flat);
/// Frees the released buffers that are no longer in use, if the tape has no operations.
void flat_reclaim(void);

/// Copies the numbers of a contiguous tensor into a contiguous tensor with as many elements in the
/// same memory space. Rounds them to the dtype of `to`, on the device that owns the memory.
eng_status params_cast(tensor *to, tensor *from);
/// Rounds a member's master into its low-precision weights; they must exist. If they are fetched on
/// use (params_fetched_on_use), rounds only this rank's elements.
eng_status params_round(parameter *p);
/// Sets *out to a member's low-precision weights; they must exist. Rounds them again if a script
/// has written to the master since the last rounding.
eng_status params_low(tensor **out, parameter *p);
/// Rounds the low-precision weights of all members whose master a script has written to.
eng_status params_round_written(eng_params *set);

/// Returns the tensor of a member's gradient between passes, or NULL if there is none.
static inline tensor *params_gradient_part(const eng_params *set, int i)
{ return set->gradients && !set->divided ? set->gradients->part[i] : NULL; }

/// Allocates the gradients of a set that has none yet. Errors: MEMORY; STATE if the gradients are
/// divided.
eng_status params_gradients(eng_params *set);
/// Makes the set keep only this rank's elements of the gradients, in the buffer `own`.
void params_divide(eng_params *set, flat_buffer *own);

/// Returns whether each term of this gradient is rounded to the term dtype before it is added in
/// f32.
static inline bool params_sums_terms(const parameter *p)
{
  const eng_params *set = p->set;
  return !set->kept && set->term_dtype[p->index] != set->gradient_dtype[p->index];
}

/// Fetches the absent weights among the inputs x[n] of an operation. Entries of x may be NULL. All
/// ranks call this for the same operations. Errors: STATE.
eng_status params_fetch(tensor *const *x, int n);
/// The table of the set that is exchanging weights with other ranks; NULL: no set is.
/// params_advance, allowed only during an exchange, advances its messages and never waits.
/// params_wait waits until all messages have arrived. Until then nothing may write to weights,
/// because this rank is sending its own.
extern struct params_parted *params_exchanging;
eng_status params_advance(void);
eng_status params_wait(void);
/// Returns whether p's weights are fetched before each use and dropped afterwards (ZeRO-3). Returns
/// false while all weights are in memory (params_bring_all). If true, a derived copy of p needs one
/// rank that owns all elements of p (eng_parallel_options.whole). That rank makes the copy and
/// sends it to the other ranks.
bool params_fetched_on_use(const parameter *p);
/// Returns whether this rank owns the whole parameter.
bool params_owns(const parameter *p);
/// Records that a member's derived copy is new or out of date. Ranks that do not own the member
/// drop their copy; they fetch it when they next need it. Errors: VALUE.
eng_status params_derived_outdated(parameter *p);
/// Frees a member's derived copy, if it has one.
void params_drop_derived(parameter *p);
/// Ends the exchange of weights. This rank keeps its own elements and the elements in memory; the
/// values of absent elements become undefined.
void params_forget_parts(eng_params *set);

/// Marks a member as having no gradient.
static inline void params_drop_gradient(parameter *p)
{
  p->has_gradient = p->unscaled = false;
  p->relative_scale = p->next_relative_scale;
}

/// Records that an update has written a member's master and its low-precision weights. A tape that
/// has read them is then out of date.
void params_written(parameter *p);

/// Checks that `set` is not NULL and that its parameters were not freed. Errors: STATE.
eng_status params_alive(const eng_params *set);
/// Checks that the set has a member `index`. Errors: VALUE.
eng_status params_index(const eng_params *set, int index);

/// Checks what every pass over parameters needs. Errors: DEVICE (the parameters are not in the
/// memory of the current device), STATE (a capture is running; `pass` names the pass in the
/// message).
eng_status params_here(const eng_params *set, const char *pass);
/// Returns an error if this rank has only its own elements of the gradients (ZeRO-2 and 3).
eng_status params_whole(const eng_params *set);
/// Fills set->span and set->which with the members that have a gradient; returns their number.
int params_spans(eng_params *set);
/// Does the same as params_spans for the elements that this rank owns. A member has no span if this
/// rank owns none of its elements.
int params_own_spans(eng_params *set);
/// Computes the statistics of this rank's elements of each member [n]. If this rank owns no element
/// of a member, the member's counts and sums are 0.
eng_status params_own_stats(eng_tensor_stats *stats, eng_params *set, unsigned needs);
/// Sums the statistics of all members [n] into a record. Leaves out members without a gradient.
void params_total(eng_record *record, eng_params *set, const eng_tensor_stats *stats, double scale,
                  unsigned needs);
/// Sums the statistics of m spans into a record; span k belongs to member which[k]. Also stores
/// each member's own statistics in of_member unless it is NULL.
void params_record(eng_record *record, eng_tensor_stats *of_member, const eng_params *set,
                   const eng_tensor_stats *of_span, const int32_t *which, int m, double scale,
                   unsigned needs);

/// Computes the factor of a lagged update, which also clips to `clip_norm` (0: no clipping).
/// Returns false if the update must be skipped. For devices that compute lagged statistics
/// immediately (params_stats.c).
bool params_stats_factor(double *factor, const eng_params *set, double gradient_factor,
                         double clip_norm);
/// Drops one reference; the last one frees the set.
void params_release(eng_params *set);
