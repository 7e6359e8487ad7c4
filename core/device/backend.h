// The device interface: what the CPU ("cpu"), its slow twin ("reference") and the CUDA plug-in
// implement. A device is a table of functions; op.c checks and allocates, then calls through it.
// Devices see nothing above this header: no tape, no Lua, no files, no ranks.
#ifndef ENG_BACKEND_H
#define ENG_BACKEND_H

#include "gradstats.h"
#include "tensor/tensor.h"

/// An operation ready to compute: inputs checked, outputs allocated with their final shape and dtype.
/// ops.def gives the order of tensors and the names of attributes (call->sum.mask). `in[k]` is NULL for
/// an absent optional input, `out[k]` for an output that is not wanted.
typedef struct op_call {
  int32_t op, n_in, n_out;
  tensor *in[ENG_OP_INPUTS];
  tensor *out[ENG_OP_OUTPUTS];
  union {
    struct { int64_t ints[ENG_OP_INTS]; double floats[ENG_OP_FLOATS]; };
#define ENG_OP(name, inputs, outputs, layout, cast, shape, gradient, reads, saves, ints, floats) \
    ENG_OP_ATTRIBUTES(name, ints, floats)
#include "ops.def"
  };
} op_call;

/// Whether an operation has one elementwise input and no attributes (ENG_UNARY).
static inline bool op_is_unary(int op)
{
  switch (op) {
#define ENG_UNARY(name, ...) case ENG_OP_##name:
#include "ops.def"
      return true;
    default: return false;
  }
}

/// Flags of quantize and swiglu_quantize.
enum { QUANTIZE_STOCHASTIC = 2, QUANTIZE_POW2 = 4, QUANTIZE_TRANSPOSED = 8 };

typedef eng_status op_kernel(const op_call *call);

typedef enum copy_direction { COPY_TO_DEVICE, COPY_TO_HOST, COPY_INSIDE } copy_direction;

/// Numbers of a gradient (or of rows of tokens) and their place in a message between ranks; all of it in the device's memory. What a
/// message is made of: comm_pack.c.
typedef struct wire_run {
  void    *numbers;     // [n] in the tensor's dtype
  void    *packed;      // [n] in the wire's format: numbers, or e4m3 codes
  float   *scales;      // [ceil(n / 128)] of codes, else NULL
  int64_t  n;
  int32_t  slot;        // the run's entry in `flags`
  int32_t  how;         // WIRE_RUN_*
} wire_run;

enum {
  WIRE_RUN_THERE = 1,   // packing: there are numbers; without it zeros are packed
  WIRE_RUN_FILL = 2,    // packing: zeros up to the end of the last block of 128
  WIRE_RUN_ADD = 4,     // unpacking: what came, rounded to the dtype, is added to what stands there, in f32, and rounded
};

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
  double   scale;       // what the gradient carries beside the loss scale (per-layer scaling); optimize and unscale divide by it; 1 as a rule
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

  /// gradstats without waiting: the result stays on the device, where `optimize` with update->lagged finds it by its *ticket (never 0), and
  /// gradstats_fetch brings it, once, waiting only if it is not there yet. At most 64 are on their way. `loss`:
  /// the loss tensors of the step (f32, one element each), whose values come with the statistics. NULL on host devices.
  /// A fetch without `stats` drops it; whatever a fetch returns, its ticket is used up.
  eng_status (*gradstats_start)(int64_t *ticket, const param_span *spans, int n, unsigned needs, tensor *const *loss, int n_loss);
  eng_status (*gradstats_fetch)(int64_t ticket, eng_tensor_stats *stats, int n, double *loss, int n_loss);

  // What follows is NULL on devices that compute in host memory.

  /// The memory its tensors live in: SPACE_HOST, or a space of its own.
  int32_t space;
  /// Big pieces of memory, for the arenas. `take` gives NULL when there is none left; `capacity`: bytes there are in all.
  arena_source memory;
  /// Copies, in order with the kernels before and after. To the host: complete on return. From the host: `from` may be
  /// reused on return.
  eng_status (*move)(void *to, const void *from, int64_t bytes, copy_direction direction);
  eng_status (*clear)(void *memory, int64_t bytes);
  /// Waits for everything; reports what kernels could not tell at once (an index out of range, a fault).
  eng_status (*synchronize)(void);
  /// Captured steps: between begin and end the device notes what it is asked for and computes nothing. NULL: it cannot.
  eng_status (*capture_begin)(void);
  eng_status (*capture_end)(void **graph);
  eng_status (*graph_launch)(void *graph);
  void       (*graph_free)(void *graph);
  /// "NVIDIA H200, sm_90, driver 580.82, ..." for people; also set on the CPU. NULL: the name.
  const char *(*describe)(void);
  /// What its tensor cores multiply in FP8: 0 nothing, 1 factors with one scale each, 2 those with scales by row or block, too; 2 also where
  /// the user asked for the slow way. NULL: FP8 products have one way.
  int         (*fp8)(void);
  /// What no other card has, on any machine: its UUID.
  const char *(*identity)(void);

  /// A stream: work in an order of its own beside the device's (on a card a stream, which is what NCCL takes). Messages between ranks, and what is
  /// made of them, go there. NULL in out with the error set.
  eng_status (*stream_new)(void **stream);
  /// What is asked of the stream from now on waits for what the device was asked before.
  eng_status (*stream_follow)(void *stream);
  /// Whether all that was asked of it is done. Never waits.
  eng_status (*stream_done)(bool *done, void *stream);
  /// A mark behind what was asked of the stream so far (*mark is one made before, or NULL for a new one), and whether that is done. NULL ends it.
  eng_status (*stream_mark)(void **mark, void *stream);
  eng_status (*stream_reached)(bool *reached, void *mark);
  void       (*stream_forget)(void *mark);
  /// Copies on a stream, as `move`; to the host only when the stream is done.
  eng_status (*stream_move)(void *stream, void *to, const void *from, int64_t bytes, copy_direction direction);
  /// comm_pack.c's way of packing, adding up and unpacking, bit for bit but for which nan, on a stream, or in order with everything else (stream
  /// NULL). `runs` [n] and `flags` lie in the device's memory, the longest run has `longest` elements; dtype f32, f16 or bf16; wire these or
  /// e4m3. The bits of wire.h (WIRE_OVERFLOW: finite numbers that became inf) are added to flags[slot].
  eng_status (*wire_pack)(void *stream, const wire_run *runs, int n, int64_t longest, int comm_dtype, int dtype, uint32_t *flags);
  eng_status (*wire_unpack)(void *stream, const wire_run *runs, int n, int64_t longest, int comm_dtype, int dtype);
  /// The piece `out` of `count` elements, a multiple of 128, = the sum over k < n of the pieces terms[k] / share, in the order of comm.h.
  eng_status (*wire_sum)(void *stream, void *out, const void *const *terms, int n, int64_t count, int comm_dtype, float share);
} backend;

/// What a plug-in (libengine_cuda.so) needs of the core: it is handed over at loading, so that the core exports nothing more.
typedef struct backend_host {
  int32_t abi;                        // BACKEND_ABI; the plug-in refuses another
  eng_status  (*error)(eng_status status, const char *text);
  void       *(*alloc)(arena_id id, int64_t bytes);   // of the memory space in force
  void        (*free)(arena_id id, void *piece, int64_t bytes);
  const char *(*tensor_text)(const tensor *x);
  bool        (*tensor_contiguous)(const tensor *x);
  uint64_t    (*rng_seed)(void);
  int         (*interrupted)(void);
} backend_host;

enum { BACKEND_ABI = 6 };

/// The plug-in's one function: NULL with the error set when there is no usable device.
typedef const backend *backend_plugin(const backend_host *host);

/// The device in force, the reference, and one by name (NULL when unknown).
const backend *backend_current(void);
const backend *backend_find(const char *name);
/// The device that owns a memory space, once it was found; the CPU for the host's.
const backend *backend_of_space(int space);
/// Puts a device in force that is not in the list (profile.c's, trap.c's).
void backend_use(const backend *device);

/// Adds a device of this library to the list. Called by a constructor in the device's folder.
void backend_register(const char *name, const backend *(*get)(void));
/// Defined and registered in cpu/: "cpu", with the instruction set chosen once, and "reference".
const backend *backend_cpu(void);
const backend *backend_reference(void);

/// Set while a step is captured (autograd/graph.c).
void backend_capturing(bool on);
/// ENG_OK, or an error that says that `what` cannot be part of a captured step.
eng_status backend_forbids(const char *what);

#endif
