// The device interface: what the CPU ("cpu"), its slow twin ("reference") and the CUDA plug-in
// implement. A device is a table of functions; op.c checks and allocates, then calls through it.
// Devices see nothing above this header: no tape, no Lua, no files, no ranks.
#ifndef ENG_BACKEND_H
#define ENG_BACKEND_H

#include "gradstats.h"
#include "tensor.h"

/// An operation ready to compute: inputs checked, outputs allocated with their final shape and dtype.
/// Attributes and the order of tensors are those of ops.def. `in[k]` is NULL for an absent optional
/// input, `out[k]` NULL for an output nobody wants.
typedef struct op_call {
  int32_t op, n_in, n_out;
  tensor *in[ENG_OP_INPUTS];
  tensor *out[ENG_OP_OUTPUTS];
  int64_t ints[ENG_OP_INTS];
  double  floats[ENG_OP_FLOATS];
} op_call;

typedef eng_status op_kernel(const op_call *call);

/// One parameter's part in a pass over all parameters: gradient statistics, optimizer.
typedef struct param_span {
  const char *name;
  int64_t  count;       // elements
  float   *master;      // f32 weights
  void    *shadow;      // the same weights in shadow_dtype, or NULL
  void    *gradient;    // in gradient_dtype
  void    *moment1, *moment2;   // in moment_dtype; NULL where the optimizer has none
  int32_t  shadow_dtype, gradient_dtype, moment_dtype;
  int32_t  group;       // index of its eng_hyper
  int32_t  starts;      // 1: no update has reached moment1 yet; SGD's momentum then starts as the gradient itself
} param_span;

typedef struct backend {
  const char *name;

  /// Kernel of each operation; NULL: not supported.
  op_kernel *kernel[ENG_OP_COUNT];

  /// One read-only pass over every gradient. `stats` has n entries, in order of `spans`. `needs`
  /// (ENG_NEED_*) says what to compute; the rest stays zero. Sums in a fixed order.
  eng_status (*gradstats)(const param_span *spans, int n, unsigned needs, eng_tensor_stats *stats);

  /// One pass: gradient (times gradient_factor: unscale and clip), update, shadow refresh.
  eng_status (*optimize)(const param_span *spans, int n, const eng_update *update);

  /// Writes gradient * factor in f32 to target[i] for each span (target[i] may be the gradient itself
  /// where that is f32) and tells whether any product is inf or nan.
  eng_status (*unscale)(const param_span *spans, int n, double factor, float *const *target, int *found_inf);
} backend;

/// The device in force, the reference, and one by name (NULL when unknown).
const backend *backend_current(void);
const backend *backend_find(const char *name);
/// Puts a device in force that is not in the list (profile.c's).
void backend_use(const backend *device);

/// Defined in cpu/: fills its table, choosing the instruction set once.
const backend *backend_cpu(void);
const backend *backend_reference(void);

#endif
