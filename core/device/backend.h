// The device interface, implemented by the CPU ("cpu"), the slow reference kernels ("reference")
// and the CUDA plug-in. A device is a table of functions; op.c checks inputs and allocates outputs,
// then calls the kernel in the table. Devices depend on nothing above this header: no tape, no Lua,
// no files, no ranks. Included by devices and by params/, autograd/ and dist/.
#pragma once

#include "gradstats.h"
#include "tensor/tensor.h"

/// A call of an operation. When a kernel runs, the inputs have been checked and the outputs
/// allocated with their final shape and dtype. ops.def gives the order of tensors and the names of
/// attributes (call->sum.mask). A kernel that serves several operations uses the attribute names of
/// one of them; kernels_spec.lua checks that these operations list the same attributes in the same
/// order, except that some omit attributes at the end. `in[k]` is NULL for an absent optional
/// input, and `out[k]` is NULL for an output that is not needed.
typedef struct op_call {
  int32_t op, n_in, n_out;
  tensor *in[ENG_OP_INPUTS];
  tensor *out[ENG_OP_OUTPUTS];
  union {
    // all attributes by position, for op.c alone
    struct { int64_t ints[ENG_OP_INTS]; double floats[ENG_OP_FLOATS]; } attributes;
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

/// Flags of quantize and swiglu_quantize: STOCHASTIC rounds codes stochastically, POW2 makes scales
/// powers of two, TRANSPOSED adds the transposed copy. mx_quantize takes QUANTIZE_TRANSPOSED and
/// the MX_* flags, which ops.def describes.
enum { QUANTIZE_STOCHASTIC = 2, QUANTIZE_POW2 = 4, QUANTIZE_TRANSPOSED = 8 };
enum { MX_VALUES = 16, MX_FINITE = 32, MX_GATE = 64, MX_ROTATED_ONLY = 128 };
/// Values of the attributes `ties` and `sr_rule` of mx_quantize.
enum { MX_TIES_EVEN, MX_TIES_AWAY, MX_TIES_ZERO, MX_TIES_UP, MX_TIES };
enum { MX_SR_TE, MX_SR_AMD, MX_SR_MSLK, MX_SR_RULES };

typedef eng_status op_kernel(const op_call *call);

typedef enum copy_direction { COPY_TO_DEVICE, COPY_TO_HOST, COPY_INSIDE } copy_direction;

/// Consecutive numbers of a gradient, or of rows of tokens, and their position in a message between
/// ranks. Numbers and message are in the device's memory. comm_pack.c defines the format of
/// messages.
typedef struct wire_run {
  void    *numbers;     // [n] in the tensor's dtype
  void    *packed;      // [n] in the comm dtype: numbers, or e4m3 codes
  float   *scales;      // [ceil(n / 128)] scales of e4m3 codes, else NULL
  int64_t  n;
  int32_t  slot;        // wire_pack reports about this run in flags[slot]
  int32_t  how;         // WIRE_RUN_*
} wire_run;

enum {
  WIRE_RUN_THERE = 1,   // packing: `numbers` is valid; otherwise zeros are packed
  WIRE_RUN_FILL = 2,    // packing: pads with zeros to the end of the last block of 128
  // unpacking: rounds a received number to the dtype, adds it to `numbers` in f32, and rounds the
  // sum
  WIRE_RUN_ADD = 4,
};

/// A parameter, or a part of one, in a pass over all parameters: gradient statistics, unscaling,
/// optimizer.
typedef struct param_span {
  const char *name;
  int64_t  count;       // elements
  void    *master;      // weights in master_dtype: f32, or bf16 (then `low` is NULL)
  void    *compensation;   // rounding errors of bf16 masters, in bf16, or NULL
  void    *low;         // the same weights in low_dtype, or NULL
  void    *gradient;    // in gradient_dtype
  void    *moment[ENG_MOMENTS];   // in moment_dtype; NULL where the optimizer has none
  int32_t  master_dtype, low_dtype, gradient_dtype, moment_dtype;
  int32_t  group;       // index of its eng_hyper in eng_update.groups
  int32_t  index;       // index of the parameter in its set
  int64_t  first;       // element of the parameter at which the span begins; a multiple of 4096
  // The relative scale of the gradient (a factor in addition to the loss scale), usually 1.
  // optimize and unscale divide by it. In a call of optimize, this field is the relative scale
  // divided by the parameter's entry in eng_update.clips.
  double   scale;
  // 1: SGD's moment is all zero bits and starts as the gradient itself; set only if the group has
  // dampening
  int32_t  starts;
  double  *norms;       // [ENG_NORMS] sums of squares for optimize to fill, or NULL
} param_span;

enum { STATS_TICKETS = 64 };   // the most tickets of gradstats_start that may be open

typedef struct backend {
  const char *name;

  /// Kernel of each operation; NULL: not supported.
  op_kernel *kernel[ENG_OP_COUNT];

  /// Computes statistics of every gradient in one read-only pass. `stats` has n entries, in the
  /// order of `spans`. `needs` (ENG_NEED_*) selects what to compute; the rest stays zero. Sums have
  /// a fixed order.
  eng_status (*gradstats)(const param_span *spans, int n, unsigned needs, eng_tensor_stats *stats);

  /// In one pass, multiplies gradients by gradient_factor (unscale and clip), updates the weights,
  /// and rounds them into `low`. update->rounding selects how new bf16 masters are rounded. If a
  /// span has a compensation, its update starts from the old weights plus the compensation, which
  /// then becomes the new weights' rounding errors (0 where a weight is inf or nan).
  eng_status (*optimize)(const param_span *spans, int n, const eng_update *update);

  /// Writes gradient * factor / scale in f32 to target[i] for each span (target[i] may be the
  /// gradient itself if that is f32). `found_inf` reports whether any product is inf or nan.
  eng_status (*unscale)(const param_span *spans, int n, double factor, float *const *target,
                        int *found_inf);

  /// gradstats_start starts gradstats and does not wait. The result stays on the device, where
  /// `optimize` with update->lagged reads it; *ticket (never 0) identifies it. gradstats_fetch
  /// copies the result to the host and waits only if it is not ready. A ticket can be fetched once;
  /// a fetch with `stats` NULL drops the result. At most STATS_TICKETS may be open. `loss`: the
  /// loss tensors of the step (f32, one element each), whose values are fetched with the
  /// statistics. Both functions are NULL on devices that compute in host memory.
  eng_status (*gradstats_start)(int64_t *ticket, const param_span *spans, int n, unsigned needs,
                                tensor *const *loss, int n_loss);
  eng_status (*gradstats_fetch)(int64_t ticket, eng_tensor_stats *stats, int n, double *loss,
                                int n_loss);

  // The remaining functions, except `describe`, are NULL on devices that compute in host memory.

  /// The memory space of the device's tensors: SPACE_HOST, or a space of its own.
  int32_t space;
  /// The functions that allocate and free large chunks of memory, for the arenas. `take` returns
  /// NULL if there is no memory; `capacity` returns the device's total bytes.
  arena_source memory;
  /// Copies bytes. The copy runs after the kernels that were started before this call, and before
  /// the kernels that are started after it. A copy to the host is complete on return. After a copy
  /// from the host, `from` may be reused on return.
  eng_status (*move)(void *to, const void *from, int64_t bytes, copy_direction direction);
  eng_status (*clear)(void *memory, int64_t bytes);
  /// Waits for all work. Returns errors (an index out of range, a fault) that kernels detected
  /// after the call that started them had returned.
  eng_status (*synchronize)(void);
  /// Captured steps: between begin and end the device records work without running it. NULL: not
  /// supported.
  eng_status (*capture_begin)(void);
  eng_status (*capture_end)(void **graph);
  eng_status (*graph_launch)(void *graph);
  void       (*graph_free)(void *graph);
  /// Returns the device's description for messages: "NVIDIA H200, sm_90, driver 580.82, ...". The
  /// CPU has this function, too. NULL: messages give only the device's name.
  const char *(*describe)(void);
  /// Returns what eng_device_fp8 returns. NULL: 2, because the device computes all FP8 products in
  /// one way.
  int         (*fp8)(void);
  /// Whether the tensor cores compute mx_matmul for these formats, with scales by the rules of
  /// NVFP4 (`nvfp4`) or of MX. NULL: they never do.
  bool        (*mx)(int64_t format_a, int64_t format_b, bool nvfp4);
  /// Returns the card's UUID, which is unique across machines.
  const char *(*identity)(void);

  /// Creates a stream: a queue whose work runs in order, concurrently with the device's other work
  /// (on a card a CUDA stream, which NCCL accepts). Messages between ranks and their packing use
  /// streams. On error *stream is NULL.
  eng_status (*stream_new)(void **stream);
  /// Makes a stream wait for the device work issued before this call. Work that is already on the
  /// stream does not wait.
  eng_status (*stream_follow)(void *stream);
  /// Sets *done to whether the stream is idle. Never waits.
  eng_status (*stream_done)(bool *done, void *stream);
  /// stream_mark records a mark after the work issued on the stream so far; *mark is an earlier
  /// mark to reuse, or NULL for a new one. stream_reached tests whether the stream has passed a
  /// mark. stream_forget frees a mark; NULL is allowed.
  eng_status (*stream_mark)(void **mark, void *stream);
  eng_status (*stream_reached)(bool *reached, void *mark);
  void       (*stream_forget)(void *mark);
  /// Does the same as `move`, on a stream. A copy to the host waits for the stream, so call this
  /// function when the stream is idle.
  eng_status (*stream_move)(void *stream, void *to, const void *from, int64_t bytes,
                            copy_direction direction);
  /// wire_pack, wire_unpack and wire_sum give the same bits as comm_pack.c; only the payload of a
  /// nan may differ. The work runs on the stream, or in order with all other work if `stream` is
  /// NULL. `runs` [n] and `flags` are in the device's memory, and the longest run has `longest`
  /// elements. dtype is f32, f16 or bf16; comm_dtype is one of these or e4m3. wire_pack sets
  /// WIRE_INF, WIRE_NAN and WIRE_OVERFLOW (finite numbers became inf) in flags[slot].
  eng_status (*wire_pack)(void *stream, const wire_run *runs, int n, int64_t longest,
                          int comm_dtype, int dtype, uint32_t *flags);
  eng_status (*wire_unpack)(void *stream, const wire_run *runs, int n, int64_t longest,
                            int comm_dtype, int dtype);
  /// Computes out[i] = the sum over k < n of terms[k][i] / share, for i < count, in the order of
  /// sums that dist/comm.h defines. count is a multiple of 128.
  eng_status (*wire_sum)(void *stream, void *out, const void *const *terms, int n, int64_t count,
                         int comm_dtype, float share);
} backend;

/// The functions of the core that a plug-in (libengine_cuda.so) needs. The loader passes them, so
/// that the core need not export them.
typedef struct backend_host {
  int32_t abi;                        // BACKEND_ABI; the plug-in rejects any other value
  eng_status  (*error)(eng_status status, const char *text);
  void       *(*alloc)(int space, arena_id id, int64_t bytes);
  void        (*free)(int space, arena_id id, void *piece, int64_t bytes);
  const char *(*tensor_text)(const tensor *x);
  bool        (*tensor_contiguous)(const tensor *x);
  uint64_t    (*rng_seed)(void);
  int         (*interrupted)(void);
} backend_host;

enum { BACKEND_ABI = 9 };

/// The plug-in's only function. Returns NULL if host->abi is not its own BACKEND_ABI or, with the
/// error set, if there is no usable device.
typedef const backend *backend_plugin(const backend_host *host);

/// Return the current device, and the device called `name` (NULL, with the error set, if there is
/// none).
const backend *backend_current(void);
const backend *backend_find(const char *name);
/// Returns the device that owns a memory space: the CPU for host memory; NULL if the device is not
/// loaded.
const backend *backend_of_space(int space);
/// Makes a device current, without a wrapper (wrapper.h) around it.
void backend_use(const backend *device);

/// Registers a built-in device. Called by a constructor in the device's folder.
void backend_register(const char *name, const backend *(*get)(void));
/// Return the devices "cpu", whose instruction set is selected at first use (eng_cpu_isa changes
/// it), and "reference". Defined and registered in cpu/.
const backend *backend_cpu(void);
const backend *backend_reference(void);

/// Tells backend_forbids whether a step is being captured. Called by autograd/capture.c.
void backend_capturing(bool on);
/// Returns ENG_OK or, during a capture, the error that `what` cannot be part of a captured step.
eng_status backend_forbids(const char *what);
